//! Head plans: KV heads of one layer with methods, budgets and row formats of their own.

use crate::common::*;
use kvsmith::internal::kv::{Budget, KvType, Limits};
use kvsmith::internal::method::Method;
use kvsmith::internal::method::declaration::Ask;
use kvsmith::internal::method::params::MethodParams;
use kvsmith::internal::method::plan::Plan;
use kvsmith::internal::method::registry::MethodName;
use kvsmith::internal::runner::{DecodeOptions, Session};
use serde_json::{Value, json};

impl Calibrated {
    /// What each KV head of each layer chose in each step: lines of the trace.
    fn trace(&self, method: &dyn Method, options: DecodeOptions) -> Vec<Value> {
        let mut trace = Vec::new();
        let (prompt, fed) = self.ids.split_at(100);
        let mut session = Session::on_cpu(&self.decoder, method, options, 150).unwrap();
        session.trace(&mut trace);
        session.prefill(prompt).unwrap();
        fed.iter().for_each(|id| drop(session.step(*id).unwrap()));
        drop(session);
        json_lines(&String::from_utf8(trace).unwrap())
    }

    fn planned(&self, plan: Plan) -> Box<dyn Method> {
        let ask = Ask {
            artifact: Some(&self.artifact),
            ropes: &self.decoder.ropes,
            sizes: self.decoder.config.sizes(),
            params: &MethodParams::default(),
            seed: 0,
        };
        plan.prepare(&ask).unwrap()
    }
}

fn options(budget: Budget, kv: KvType) -> DecodeOptions {
    DecodeOptions {
        limits: Limits {
            sinks: 2,
            window: 4,
            ..Limits::new(budget)
        },
        ..DecodeOptions::new(budget, kv)
    }
}

/// The inputs of the first layer depend on the fed tokens only, so that its KV heads choose as if each were served alone.
fn check_choices(model: &Calibrated) {
    let served = [
        ("wpq", 9, "bf16"),
        ("lfps", 20, "f32"),
        ("selfindex", 12, "2bit"),
        ("a2ats", 30, "f16"),
        ("topk", 7, "k=bf16,v=2bit"),
    ];
    let sizes = model.decoder.config.sizes();
    let alone: Vec<Vec<Value>> = served
        .iter()
        .map(|(name, budget, kv)| {
            let method = prepared(
                MethodName::named(name).unwrap(),
                Some(&model.artifact),
                &model.decoder,
            );
            let kv = KvType::named(kv).unwrap();
            model.trace(method.as_ref(), options(Budget::Count(*budget), kv))
        })
        .collect();
    // The bundled model has two KV heads per layer: each is served by each method in one of the plans.
    for shift in 0..served.len() {
        let of = |kv_head: usize| (kv_head + shift) % served.len();
        let head = |kv_head: usize| {
            let (name, budget, kv) = served[of(kv_head)];
            let kv = KvType::named(kv).unwrap();
            json!({"method": name, "budget": budget, "keys": kv.keys, "values": kv.values})
        };
        let heads: Vec<Value> = (0..sizes.n_kv_heads).map(head).collect();
        let plan = json!({"sinks": 2, "window": 4, "layers": [{"repeat": sizes.n_layers, "heads": heads}]});
        let method = model.planned(Plan::read(plan).unwrap());
        // Budgets and formats of the session are not those of the plan.
        let found = model.trace(method.as_ref(), options(Budget::Count(1), KvType::F32));
        let compared = same_in_first_layer(&found, |kv_head| &alone[of(kv_head)]);
        assert_eq!(compared, 20 * sizes.n_kv_heads);
    }
}

#[test]
fn heads_of_a_layer_choose_as_their_methods_alone() {
    for (name, dir) in [
        ("bundled", root().join("calib-data/model")),
        ("llama_default", golden("llama_default")),
        ("qwen3_norm", golden("qwen3_norm")),
    ] {
        assert!(dir.exists(), "{name}");
        check_choices(&Calibrated::new(&dir, 120));
    }
}

/// A plan that serves all heads alike is the method itself; its bytes are those of the formats.
#[test]
fn a_plan_of_equal_heads_is_their_method() {
    let model = Calibrated::new(&golden("llama_default"), 120);
    let sizes = model.decoder.config.sizes();
    let head =
        json!({"repeat": sizes.n_kv_heads, "method": "wpq", "budget": 9, "keys": "f16", "values": "f16"});
    let plan = json!({"sinks": 2, "window": 4, "layers": [{"repeat": sizes.n_layers, "heads": [head]}]});
    let method = model.planned(Plan::read(plan).unwrap());
    assert!(method.cuda().is_some());
    let own = prepared(
        MethodName::named("wpq").unwrap(),
        Some(&model.artifact),
        &model.decoder,
    );
    let options = options(Budget::Count(9), KvType::F16);
    assert_eq!(
        model.trace(method.as_ref(), options.clone()),
        model.trace(own.as_ref(), options)
    );
}

/// Runs `run` with a plan of two kinds of heads.
#[test]
fn run_follows_a_plan_and_flags_come_before_it() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let config = kvsmith::internal::model::ModelConfig::load(model.as_ref()).unwrap();
    let (layers, heads) = (config.n_layers(), config.n_kv_heads);
    let prompt = scratch.tokens("prompt.json", &documents(&[90], 3));
    let plan = json!({"head_plan": {"sinks": 1, "window": 3, "layers": [
        {"heads": [{"repeat": heads, "method": "topk", "budget": 8, "keys": "bf16", "values": "f16"}]},
        {"repeat": layers - 1, "heads": [{"repeat": heads, "method": "full", "budget": 0.06, "keys": "f32", "values": "f32"}]},
    ]}});
    let file = scratch.write("plan.json", plan.to_string());
    let files = format!("run --model {model} --tokens {prompt} --max-new 4 --ignore-eos --json");
    let run = |more: &str| kvsmith(&format!("{files} {more}")).json();
    let out = run(&format!("--head-plan {file}"));
    assert_eq!((&out["method"], &out["budget"]), (&json!("plan"), &Value::Null));
    let shown = |plan: &Value| Plan::read(plan["head_plan"].clone()).unwrap().json();
    assert_eq!(out["head_plan"], shown(&plan));
    let of_layers = out["layers"].as_array().unwrap();
    assert_eq!(
        (&of_layers[0]["method"], &of_layers[1]["method"]),
        (&json!("topk"), &json!("full"))
    );
    let all: Vec<usize> = (0..heads).collect();
    assert_eq!(
        (&of_layers[0]["full_heads"], &of_layers[1]["full_heads"]),
        (&json!([]), &json!(all))
    );
    assert_eq!(out["bypasses"], 0);
    // Three steps read sinks, window and budget in the first layer; the window is shorter than the prompt.
    assert_eq!(of_layers[0]["rows_read"], json!(3 * heads * (1 + 3 + 8)));
    let d = config.head_dim;
    let held = |bytes: usize| heads * 93 * d * bytes;
    let kv_bytes = out["kv_bytes"].as_u64().unwrap() as usize;
    let least = held(2 + 2) + (layers - 1) * held(4 + 4);
    assert!(
        (least..2 * least).contains(&kv_bytes),
        "{kv_bytes}, at least {least}"
    );
    // One budget for all heads, and one method for all heads: then it is an ordinary run.
    let flags = run(&format!("--head-plan {file} --method topk --budget 8 --kv bf16"));
    let plain = run("--method topk --budget 8 --kv bf16 --sinks 1 --window 3");
    for key in [
        "ids",
        "method",
        "budget",
        "rows_read",
        "kv_bytes",
        "bytes_read_fraction",
        "layers",
    ] {
        assert_eq!(flags[key], plain[key], "{key}");
    }
    let bytes = |out: &Value| number(out, "bytes_read");
    let wider = run(&format!("--head-plan {file} --sinks 2"));
    assert!(bytes(&wider) > bytes(&out));
    assert_eq!(
        (&wider["head_plan"]["sinks"], &wider["head_plan"]["window"]),
        (&json!(2), &json!(3))
    );
}

#[test]
fn a_plan_that_does_not_fit_is_refused() {
    let scratch = Scratch::new();
    let (model, prompt) = (
        checkpoint("llama_default"),
        scratch.tokens("prompt.json", &documents(&[20], 3)),
    );
    let run = |name: &str, text: &str| {
        let file = scratch.write(name, text);
        kvsmith(&format!(
            "run --model {model} --tokens {prompt} --head-plan {file}"
        ))
    };
    run("a.json", "{}").fails(1, "there is no key `head_plan`", "a head plan looks like");
    run("b.json", "{\"head_plan\": 3}").fails(1, "the head plan is invalid", "a head plan looks like");
    run("c.json", "not JSON").fails(1, "c.json: not valid JSON", "a head plan looks like");
    let one = json!({"head_plan": {"layers": [{"heads": [{"method": "topk"}]}]}});
    run("d.json", &one.to_string()).fails(1, "the head plan has 1 layer,", "use the plan of this model");
    let calibrated =
        json!({"head_plan": {"layers": [{"repeat": 2, "heads": [{"repeat": 2, "method": "wpq"}]}]}});
    let said = run("e.json", &calibrated.to_string());
    said.fails(
        2,
        "layer 0, KV head 0 of the head plan: --method wpq needs --artifact",
        "kvsmith calibrate",
    );
    kvsmith(&format!(
        "run --model {model} --tokens {prompt} --head-plan x.json --prefer time"
    ))
    .fails(2, "cannot be used with", "");
}

/// Sinks and window may have any number of rows, in caches that hold these rows in another way, too.
#[test]
fn sinks_and_window_may_be_larger_than_the_context() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let prompt = scratch.tokens("prompt.json", &documents(&[90], 3));
    let run = |most: u64| {
        let limits = format!("--sinks {most} --window {most} --budget {most}");
        let command = format!("run --model {model} --tokens {prompt} --max-new 3 --ignore-eos --json");
        let files = format!("{command} --method topk --kv k=int4,v=int2 {limits}");
        let out = kvsmith(&files).json();
        (out["ids"].clone(), out["kv_bytes"].clone())
    };
    let (enough, most) = (run(200), run(u64::from(u32::MAX)));
    assert_eq!(enough, most);
}

/// A batch is continued with the plan that it began with.
#[test]
fn a_batch_keeps_its_plan() {
    let scratch = Scratch::new();
    let model = root().join("calib-data/model").display().to_string();
    let config = kvsmith::internal::model::ModelConfig::load(model.as_ref()).unwrap();
    let plan = |budget: usize| {
        let heads = json!([{"repeat": config.n_kv_heads, "method": "topk", "budget": budget}]);
        let other = json!([{"repeat": config.n_kv_heads, "method": "streaming", "budget": budget}]);
        let layers = json!([{"heads": heads}, {"repeat": config.n_layers() - 1, "heads": other}]);
        json!({"head_plan": {"layers": layers}}).to_string()
    };
    let [first, second] = [8, 9].map(|budget| scratch.write(&format!("{budget}.json"), plan(budget)));
    let prompts = scratch.write(
        "prompts.jsonl",
        json!({"prompt": "It was a bright cold day. ".repeat(20)}).to_string(),
    );
    let out = scratch.path("replies.jsonl");
    let run = |plan: &str| {
        kvsmith(&format!(
            "run --model {model} --batch {prompts} --output {out} --max-new 3 --head-plan {plan} --json"
        ))
    };
    assert_eq!(run(&first).json()["batch"]["method"], "plan");
    assert_eq!(run(&first).json()["batch"]["already_answered"], 1);
    let refused = run(&second);
    refused.fails(2, "replies that were made with another `", "choose another name");
}

/// A plan of one kind of head loses what its method loses, and one of several kinds has a row of its own.
#[test]
fn eval_measures_a_plan_beside_methods() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let config = kvsmith::internal::model::ModelConfig::load(model.as_ref()).unwrap();
    let tokens = scratch.tokens("tokens.json", &documents(&[80, 70], 3));
    let plan = |budgets: [usize; 2]| {
        let heads = |budget: usize| json!([{"repeat": config.n_kv_heads, "method": "topk", "budget": budget, "keys": "f16", "values": "f16"}]);
        let rest = json!({"repeat": config.n_layers() - 1, "heads": heads(budgets[1])});
        let layers = json!([{"heads": heads(budgets[0])}, rest]);
        let text = json!({"head_plan": {"sinks": 1, "window": 3, "layers": layers}}).to_string();
        scratch.write(&format!("{}-{}.json", budgets[0], budgets[1]), text)
    };
    let eval = |more: &str| {
        kvsmith(&format!(
            "eval --model {model} --tokens {tokens} --decode 12 --json {more}"
        ))
        .json()
    };
    let same = eval(&format!(
        "--methods topk --budgets 8 --head-plan {}",
        plan([8, 8])
    ));
    let [own, planned] = [0, 1].map(|i| &same["rows"][i]);
    assert_eq!(
        (&own["method"], &planned["method"]),
        (&json!("topk"), &json!("plan"))
    );
    for key in [
        "budget",
        "kl",
        "recall",
        "mass",
        "bytes_read_fraction",
        "kl_by_block",
    ] {
        assert_eq!(own[key], planned[key], "{key}");
    }
    assert_eq!(
        (&same["kv"], &same["sinks"], &same["window"]),
        (&json!("f16"), &json!(1), &json!(3))
    );
    assert_eq!(same["differences"][0]["methods"], json!(["topk", "plan"]));
    let more = eval(&format!(
        "--methods topk --budgets 8 --head-plan {}",
        plan([8, 30])
    ));
    let [own, planned] = [0, 1].map(|i| &more["rows"][i]);
    assert_eq!(planned["budget"], Value::Null);
    assert_eq!(planned["head_plan"]["layers"].as_array().unwrap().len(), 2);
    assert!(number(planned, "bytes_read_fraction") > number(own, "bytes_read_fraction"));
    assert!(number(planned, "kl") < number(own, "kl"));
    // The text has it in both tables.
    let text = kvsmith(&format!(
        "eval --model {model} --tokens {tokens} --decode 12 --methods topk --budgets 8 --head-plan {}",
        plan([8, 30])
    ));
    let text = text.ok().stdout;
    assert_eq!(
        text.lines().filter(|line| line.starts_with("plan ")).count(),
        2,
        "{text}"
    );
}

/// `pack` puts a plan into an artifact, `inspect` shows it and `run` follows it, unless flags choose otherwise.
#[test]
fn an_artifact_keeps_a_plan() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let config = kvsmith::internal::model::ModelConfig::load(model.as_ref()).unwrap();
    let tokens = scratch.tokens("tokens.json", &documents(&[300, 300], 1));
    let bare = scratch.make(
        "bare",
        &format!("calibrate --model {model} --tokens {tokens} --size 8 --no-verdict"),
    );
    let (layers, heads) = (config.n_layers(), config.n_kv_heads);
    let plan = json!({"head_plan": {"sinks": 2, "window": 5, "layers": [
        {"heads": [{"repeat": heads, "method": "wpq", "budget": 8, "keys": "bf16", "values": "bf16"}]},
        {"repeat": layers - 1, "heads": [{"repeat": heads, "method": "full", "budget": 0.06, "keys": "bf16", "values": "bf16"}]},
    ]}});
    let file = scratch.write("plan.json", plan.to_string());
    let with = scratch.make("with", &format!("pack {bare} --model {model} --head-plan {file}"));
    let format = |path: &str| {
        let (header, _) = header(&std::fs::read(path).unwrap());
        let manifest: Value =
            serde_json::from_str(header["__metadata__"]["kvsmith"].as_str().unwrap()).unwrap();
        manifest["format"].as_u64().unwrap()
    };
    assert_eq!((format(&bare), format(&with)), (1, 2));
    let inspected = kvsmith(&format!("inspect {with} --json --verify")).json();
    let shown = Plan::read(plan["head_plan"].clone()).unwrap().json();
    assert_eq!(inspected["head_plan"], shown);
    assert_eq!(
        kvsmith(&format!("inspect {bare} --json")).json()["head_plan"],
        Value::Null
    );
    let text = kvsmith(&format!("inspect {with}")).ok().stdout;
    assert!(
        text.contains(&format!("{heads} KV heads wpq, budget 8, bf16 cache")),
        "{text}"
    );
    // A pack of packed files keeps the plan.
    let again = scratch.make("again", &format!("pack {with} --model {model}"));
    assert_eq!(std::fs::read(&again).unwrap(), std::fs::read(&with).unwrap());
    let prompt = scratch.tokens("prompt.json", &documents(&[90], 3));
    let run = |more: &str| {
        kvsmith(&format!(
            "run --model {model} --tokens {prompt} --max-new 3 --ignore-eos --json {more}"
        ))
    };
    let followed = run(&format!("--artifact {with}"));
    assert!(
        followed.stderr.contains("head plan of the artifact"),
        "{}",
        followed.stderr
    );
    let followed = followed.json();
    assert_eq!(followed["head_plan"], shown);
    let given = run(&format!("--artifact {bare} --head-plan {file}")).json();
    for key in ["ids", "rows_read", "kv_bytes", "index_bytes", "layers"] {
        assert_eq!(followed[key], given[key], "{key}");
    }
    // So does `eval`, unless it is told what to measure.
    let eval = format!("eval --model {model} --artifact {with} --tokens {tokens} --decode 8 --json");
    let rows = |more: &str| kvsmith(&format!("{eval} {more}")).json()["rows"].clone();
    let followed = kvsmith(&eval);
    assert!(
        followed.stderr.contains("head plan of the artifact"),
        "{}",
        followed.stderr
    );
    assert_eq!(followed.json()["rows"][0]["method"], "plan");
    assert_eq!(rows(""), rows(&format!("--head-plan {file}")));
    let named = rows("--methods topk");
    assert_eq!(
        (named.as_array().unwrap().len(), &named[0]["method"]),
        (1, &json!("topk"))
    );
    // A page of results does without the row of the plan.
    let eval = format!(
        "eval --model {model} --artifact {with} --tokens {tokens} --decode 8 --methods topk --head-plan {file} --json"
    );
    let measured = scratch.write("eval.json", kvsmith(&eval).ok().stdout);
    kvsmith(&format!(
        "report {with} --eval {measured} -o {}",
        scratch.path("page.html")
    ))
    .ok();
    let chosen = run(&format!("--artifact {with} --method lfps")).json();
    assert_eq!(
        (&chosen["method"], &chosen["head_plan"]),
        (&json!("lfps"), &Value::Null)
    );
    // A verdict does not replace a plan that was given.
    let verdict = |art: &str, out: &str| {
        let to = scratch.path(out);
        let judged = format!(
            "verdict {art} --model {model} --tokens {tokens} --verdict-methods wpq,topk --verdict-reads 0.7 --verdict-steps 8 \
             --verdict-kl 99 --verdict-points 100 -o {to}"
        );
        (kvsmith(&judged).ok().stderr, to)
    };
    let (told, kept) = verdict(&with, "kept");
    assert!(told.contains("the artifact keeps its head plan"), "{told}");
    let kept = kvsmith(&format!("inspect {kept} --json")).json();
    assert_eq!(kept["head_plan"], shown);
    assert_ne!(kept["methods"], Value::Null);
    // Otherwise it says its recommendation as a plan.
    let (told, judged) = verdict(&bare, "judged");
    assert!(!told.contains("head plan"), "{told}");
    let artifact = kvsmith::Artifact::open(judged.as_ref(), kvsmith::SECTIONS).unwrap();
    let plan = Plan::of_artifact(&artifact).unwrap().unwrap();
    let head = plan.same().unwrap();
    let (row, of) = artifact
        .manifest
        .quality
        .methods
        .as_ref()
        .unwrap()
        .usual()
        .unwrap();
    assert_eq!(head.method.to_string(), row.method);
    assert_eq!(
        (head.budget.value(), head.kv.to_string().as_str()),
        (of.budget, "bf16")
    );
    assert_eq!((format(&judged), Plan::given(&artifact).unwrap()), (2, None));
    let text = kvsmith(&format!("inspect {judged} -v")).ok().stdout;
    assert!(text.contains("bf16 cache (as recommended)"), "{text}");
    // A pack has no verdict, and so nothing that repeats it; another verdict takes its place.
    let repacked = scratch.make("repacked", &format!("pack {judged} --model {model}"));
    assert_eq!(std::fs::read(&repacked).unwrap(), std::fs::read(&bare).unwrap());
    let (_, again) = verdict(&judged, "judged-again");
    assert_eq!(format(&again), 2);
    let reread = kvsmith::Artifact::open(again.as_ref(), kvsmith::SECTIONS).unwrap();
    assert_eq!(Plan::given(&reread).unwrap(), None);
    let broken = scratch.path("broken");
    resealed(&with, &broken, |manifest| {
        manifest["head_plan"]["layers"][0]["heads"][0]["method"] = json!("nope")
    });
    run(&format!("--artifact {broken}")).fails(1, "unknown method `nope`", "a head plan looks like");
    resealed(&with, &broken, |manifest| manifest["format"] = json!(1));
    run(&format!("--artifact {broken}")).fails(1, "not an artifact of format 2", "kvsmith calibrate");
}
