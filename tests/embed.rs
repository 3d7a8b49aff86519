//! kvsmith as a library: the example of `examples/embed.rs`, and hosts with threads of their own.

use std::sync::atomic::{AtomicBool, Ordering};

use kvsmith::internal::sandbox::{self, Allowance};
use kvsmith::{
    Artifact, Budget, Calibration, CalibrationSettings, Corpus, CorpusOptions, CorpusSource, Cpu, Env,
    Estimate, Isolation, Machine, Model, Output, SECTIONS, Silent, VerdictSettings, recommended,
};
use serde_json::{Value, json};

use crate::common::*;

#[path = "../examples/embed.rs"]
mod example;

#[test]
fn the_example_runs_beside_other_threads() {
    let text = std::fs::read_to_string(root().join("examples/embed.rs")).unwrap();
    assert!(text.lines().count() <= 60, "an example is short");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = || {
            while !done.load(Ordering::Relaxed) {
                drop(std::hint::black_box(vec![0u8; 4096]));
                std::thread::yield_now();
            }
        };
        (0..8).for_each(|_| drop(scope.spawn(busy)));
        let outcome = std::panic::catch_unwind(example::main);
        done.store(true, Ordering::Relaxed);
        outcome.expect("no panic").expect("no error");
    });
}

/// A caller branches on the kind of an error, and finds the failure of the system behind it.
#[test]
fn errors_have_kinds_and_sources() {
    use kvsmith::internal::error::ErrorKind;
    use std::error::Error as _;
    let scratch = Scratch::new();
    let kind = |found: kvsmith::internal::error::Result<Artifact>| found.err().expect("an error").kind();
    let open = |path: &str| Artifact::open(path.as_ref(), SECTIONS);
    let missing = open(&scratch.path("none.safetensors")).err().expect("an error");
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    let source = missing
        .source()
        .and_then(|source| source.downcast_ref::<std::io::Error>());
    assert_eq!(
        source.map(std::io::Error::kind),
        Some(std::io::ErrorKind::NotFound)
    );
    std::fs::write(scratch.path("cut.safetensors"), [7; 40]).unwrap();
    assert_eq!(kind(open(&scratch.path("cut.safetensors"))), ErrorKind::Damaged);
    // Models: none at the path, one of an unknown family, one without a name of its family.
    let model = |name: &str| Model::open(scratch.path(name).as_ref()).err().expect("an error");
    assert_eq!(model("none").kind(), ErrorKind::NotFound);
    let folder = scratch.model("llama", "llama_default");
    let whole = Model::open(folder.as_ref()).unwrap();
    scratch.model("other", "llama_default");
    let family = |name: Value| {
        let path = scratch.path("other/config.json");
        let mut fields: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        fields["model_type"] = name;
        std::fs::write(path, fields.to_string()).unwrap();
        model("other")
    };
    let unknown = family(json!("mamba"));
    let hint = unknown.advice().unwrap_or_default();
    assert_eq!(
        (unknown.kind(), hint.starts_with("supported: ")),
        (ErrorKind::Unsupported, true),
        "{hint}"
    );
    assert_eq!(family(json!(3)).kind(), ErrorKind::Invalid);
    // An artifact of another model, and cancelled work.
    let artifact = scratch.make(
        "artifact",
        &format!(
            "calibrate --model {folder} --tokens {} --size 4 --no-verdict",
            scratch.tokens("text.json", &documents(&[60], 2))
        ),
    );
    let artifact = Artifact::open(artifact.as_ref(), SECTIONS).unwrap();
    let another = Model::open(checkpoint("qwen2_bias").as_ref()).unwrap();
    assert_eq!(
        recommended(&artifact, &another, 0)
            .err()
            .expect("an error")
            .kind(),
        ErrorKind::Mismatch
    );
    let env = Env::default();
    env.cancel.cancel();
    let stopped = env.during(kvsmith::internal::env::check).expect_err("cancelled");
    assert_eq!(stopped.kind(), ErrorKind::Interrupted);
    // Settings stand in angle brackets, for each user of the library to write in its own way.
    let options = CorpusOptions {
        holdout: 2.0,
        ..CorpusOptions::default()
    };
    let tokens = CorpusSource::Tokens(scratch.tokens("tokens.json", &documents(&[30], 1)).into());
    let error = Corpus::load(&whole.path, whole.config(), &tokens, &options).expect_err("an error");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.to_string().starts_with("⟨holdout=2⟩ is out of range"),
        "{error}"
    );
}

/// A host that may not fork gets the same tokens, from its own process.
#[test]
fn a_host_can_decline_forks() {
    let limits = Allowance {
        memory_bytes: 64 << 20,
        seconds: 5,
    };
    let process = |isolation| {
        let env = Env {
            isolation,
            ..Env::default()
        };
        let work = || Ok(std::process::id().to_le_bytes().to_vec());
        env.during(|| sandbox::run(limits, work)).unwrap()
    };
    let own = std::process::id().to_le_bytes().to_vec();
    assert_eq!(process(Isolation::Thread), own);
    assert_ne!(process(Isolation::Fork), own);
    let model = Model::open(&root().join("calib-data/model")).unwrap();
    let tokens = |isolation| {
        let env = Env {
            isolation,
            ..Env::default()
        };
        env.during(|| {
            let tokenizer = model.tokenizer().unwrap();
            tokenizer
                .encode("In the morning the three of them walked")
                .unwrap()
        })
    };
    assert_eq!(tokens(Isolation::Thread), tokens(Isolation::Fork));
    assert!(tokens(Isolation::Thread).len() > 3);
}

/// The library and the command make the same bytes of the same settings, the verdict included; what `recommended` prepares is
/// what `run` takes.
#[test]
fn a_calibration_is_that_of_the_command() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let ids = documents(&[400; 24], 3);
    let tokens = scratch.tokens("tokens.json", &ids);
    // Of a model of random weights, methods lose more than the default limit; below this limit, all are dropped.
    let limit = 10.0;
    let calibrate = format!(
        "calibrate --model {model} --tokens {tokens} --seq-len 400 --holdout 0.5 --size 16 --wpq-bits 32 --seed 7 \
         --verdict-tokens 4000 --verdict-steps 4 --verdict-reads 0.5,0.9"
    );
    let by_command = scratch.make("command", &format!("{calibrate} --verdict-kl {limit}"));
    let by_library = scratch.path("library");
    let opened = Model::open(model.as_ref()).unwrap();
    let object = |value: Value| value.as_object().unwrap().clone();
    let mut settings = CalibrationSettings {
        seed: 7,
        verdict: Some(VerdictSettings {
            tokens: 4000,
            steps: 4,
            reads: vec![0.5, 0.9],
            kl: limit,
            ..VerdictSettings::default()
        }),
        ..CalibrationSettings::default()
    };
    let parameters = &mut settings.sections.parameters;
    parameters.insert("a2ats".to_owned(), object(json!({ "size": 16 })));
    parameters.insert("wpq".to_owned(), object(json!({ "wpq_bits": 32 })));
    // As another program would keep them.
    let settings: CalibrationSettings =
        serde_json::from_value(serde_json::to_value(&settings).unwrap()).unwrap();
    let cut = CorpusOptions {
        seq_len: Some(400),
        holdout: 0.5,
        seed: 7,
        ..CorpusOptions::default()
    };
    let source = CorpusSource::Tokens(tokens.into());
    let beyond = settings.beyond(400);
    let (text, beyond) =
        Corpus::load_with_reserve(&opened.path, opened.config(), &source, &cut, beyond).unwrap();
    // What it would take is what `plan` says.
    let (model_of, texts) = ((opened.config(), opened.path.as_path()), (&text, &beyond));
    let estimate = Estimate::new(model_of, &settings, texts, &Cpu, &Silent).unwrap();
    let flags = calibrate.replacen("calibrate", "plan --no-probe --json --device cpu", 1);
    let plan = kvsmith(&format!("{flags} --verdict-kl {limit}")).json();
    assert_eq!(plan["weights_bytes"], json!(estimate.weights.bytes));
    assert_eq!(plan["codewords"], json!(estimate.codewords));
    assert_eq!(
        [&plan["artifact_bytes"], &plan["work_bytes"], &plan["dump_bytes"]],
        [
            &json!(estimate.disk.artifact),
            &json!(estimate.disk.work),
            &json!(estimate.disk.dump)
        ]
    );
    assert!(estimate.memory_bytes > estimate.disk.artifact);
    let machine = Machine::new(&Cpu, &Silent);
    let seconds = estimate.measure(machine).unwrap().stages.total();
    assert!(seconds > 0.0 && seconds.is_finite(), "{seconds}");
    let new = |settings| Calibration::new(machine, &opened, settings, (&text, &beyond));
    let output = Output::create(by_library.as_ref()).unwrap();
    let made = new(&settings).unwrap().run(output, None).unwrap();
    made.verdict.expect("a verdict").unwrap();
    assert!(
        std::fs::read(&by_command).unwrap() == std::fs::read(&by_library).unwrap(),
        "other bytes"
    );

    let artifact = Artifact::open(by_library.as_ref(), SECTIONS).unwrap();
    let (_, options) = recommended(&artifact, &opened, 7).unwrap();
    let prompt = scratch.tokens("prompt.json", &ids[..1]);
    let run =
        format!("run --model {model} --artifact {by_command} --tokens {prompt} --max-new 2 --seed 7 --json");
    let run = kvsmith(&run).json();
    assert_eq!(run["budget"], json!(Budget::value(options.limits.budget)));
    let plain = scratch.make(
        "plain",
        &format!(
            "calibrate --model {model} --tokens {} --size 16 --no-verdict",
            scratch.path("tokens.json")
        ),
    );
    let none = recommended(&Artifact::open(plain.as_ref(), SECTIONS).unwrap(), &opened, 7);
    assert_eq!(none.err().unwrap().to_string(), "the artifact has no verdict");
    let dropped = scratch.make("dropped", &calibrate);
    let none = recommended(&Artifact::open(dropped.as_ref(), SECTIONS).unwrap(), &opened, 7);
    let none = none.err().unwrap().to_string();
    assert!(none.contains("every method was dropped"), "{none}");

    // Settings out of range are refused by name before anything is fitted.
    let mut wrong = settings.clone();
    wrong
        .sections
        .parameters
        .insert("lfps".to_owned(), object(json!({ "rows": 5 })));
    assert_eq!(
        new(&wrong).err().unwrap().to_string(),
        "there is no parameter `rows`"
    );
    let mut wrong = settings.clone();
    wrong.verdict.as_mut().unwrap().reads = vec![0.05, 2.0];
    assert!(new(&wrong).err().unwrap().to_string().contains("`reads`"));
}
