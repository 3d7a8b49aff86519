//! Commands that run the model: on the stand-in's GPU the same as on the CPU.

use std::path::Path;
use std::process::Stdio;
use std::sync::OnceLock;

use kvsmith::internal::disk::Output as NewFile;
use kvsmith::internal::dump::{Dump, State};
use kvsmith::internal::method::registry::METHODS;
use kvsmith::internal::store::{self, Tensor};
use serde_json::{Value, json as object};

use super::checked::stamp;
use super::common::{Outcome, checkpoint, number, resealed, root};
use super::libraries::build_cublas;
use super::{command, run_wrong};

fn kvsmith(driver: &Path, arguments: &str) -> Outcome {
    Outcome::from_output(command(driver, arguments).output().unwrap())
}

/// The one JSON document of a run that succeeded.
#[track_caller]
fn json(driver: &Path, arguments: &str) -> Value {
    kvsmith(driver, arguments).json()
}

/// Writes an artifact of the bundled model, which is calibrated once.
pub fn write_artifact(driver: &Path, out: &Path) {
    static ARTIFACT: OnceLock<Vec<u8>> = OnceLock::new();
    let calibrate = || {
        let command = format!(
            "calibrate --peers --device cpu --model calib-data/model --text calib-data/text.txt --max-tokens 2048 \
             --uuid-tokens 0 --seq-len 512 --wrope-position 128 --size 32 --iterations 3 --verdict-tokens 512 -o {}",
            out.display()
        );
        kvsmith(driver, &command).ok();
        std::fs::read(out).unwrap()
    };
    std::fs::write(out, ARTIFACT.get_or_init(calibrate)).unwrap();
}

/// A folder with an artifact of the bundled model and the beginning of the demo's prompt, in two lengths.
fn scratch(driver: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_artifact(driver, &dir.path().join("a.safetensors"));
    let prompt = std::fs::read_to_string(root().join("calib-data/demo-prompt.txt")).unwrap();
    for (name, characters) in [("prompt", 1000), ("short", 400)] {
        std::fs::write(dir.path().join(name), &prompt[..characters]).unwrap();
    }
    dir
}

/// What is counted on the device is what is counted on the CPU.
#[track_caller]
fn same_counts(cuda: &Value, cpu: &Value, of: &str) {
    for key in ["kv_read_fraction", "exact_dot_fraction", "bypass_fraction"] {
        let (a, b) = (number(cuda, key), number(cpu, key));
        assert!((a - b).abs() < 1e-9, "{of} {key}: {a} {b}");
    }
    for key in [
        "choices",
        "rows_read",
        "keys_ranked",
        "kv_bytes_read",
        "bypasses",
        "bypassed_heads",
        "layers",
    ] {
        assert_eq!(cuda[key], cpu[key], "{of} {key}");
    }
}

/// Every method: the same tokens and the same positions, and what is counted of them.
pub fn run(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    for method in METHODS.iter().map(|m| m.as_str()) {
        // With the paper's theta, some heads are bypassed.
        let flags = if method == "lfps" { "--lfps-theta 0.85" } else { "" };
        let run = |device: &str| {
            let trace = format!("{at}/{method}-{device}");
            let result = json(
                driver,
                &format!(
                    "run -q --json --model calib-data/model --artifact {at}/a.safetensors --prompt-file {at}/short \
                     --method {method} --budget 0.1 --window 16 --max-new 6 --kv f32 --precision f32 --ignore-eos \
                     --device {device} --trace {trace} {flags}"
                ),
            );
            (result, std::fs::read_to_string(trace).unwrap())
        };
        let ((cuda, cuda_trace), (cpu, cpu_trace)) = (run("cuda"), run("cpu"));
        assert_eq!(cuda["device"], "cuda");
        assert_eq!(cuda["ids"], cpu["ids"], "{method}");
        assert_eq!(cuda_trace, cpu_trace, "{method}");
        assert_eq!(cuda_trace.lines().count(), 5 * 4 * 2, "{method}");
        same_counts(&cuda, &cpu, method);
        // Tables and lists that steps change on the device are not counted by the host.
        let index = match method {
            "lfps" | "ctkvr" => Value::Null,
            // The codes of every candidate, where the CPU reads lists.
            "a2ats" => cuda["index_bytes_read"].clone(),
            _ => cpu["index_bytes_read"].clone(),
        };
        assert_eq!(cuda["index_bytes_read"], index, "{method}");
        assert_eq!(cuda["bytes_read"].is_null(), index.is_null(), "{method}");
        let on_cpu = [
            "quest",
            "pqcache",
            "randsign",
            "snapkv",
            "h2o",
            "doublesparsity",
            "triattention",
        ]
        .contains(&method);
        assert_eq!(
            cuda["fallbacks"].as_array().unwrap().len(),
            usize::from(on_cpu),
            "{method}"
        );
        if method == "lfps" {
            // On the device two tables of f32 for each of 4 heads in 4 layers, as long as the cache has room.
            let room = cuda["prompt_tokens"].as_u64().unwrap() + 6;
            assert_eq!(cuda["index_bytes"], room.next_multiple_of(8) * 2 * 4 * 4 * 4);
            assert!(cuda["bypass_fraction"].as_f64().unwrap() > 0.0);
        }
    }
}

/// KV heads of a layer with methods, budgets and row formats of their own: the same tokens and positions as on the CPU.
pub fn run_planned(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    let head = |method: &str, budget: f64| object!({ "method": method, "budget": budget, "keys": "f32", "values": "f32" });
    let mut bypassing = head("lfps", 0.1);
    bypassing["params"] = object!({ "lfps_theta": 0.85 });
    let layers = [
        [head("wpq", 0.1), bypassing.clone()],
        [bypassing.clone(), head("selfindex", 0.15)],
        [head("a2ats", 0.2), bypassing.clone()],
        // The head that is surest of its sinks.
        [head("ctkvr", 0.1), bypassing],
    ];
    let layers: Vec<Value> = layers.iter().map(|heads| object!({ "heads": heads })).collect();
    let plan = object!({ "head_plan": { "sinks": 4, "window": 16, "layers": layers } });
    std::fs::write(dir.path().join("plan.json"), plan.to_string()).unwrap();
    let run = |device: &str| {
        let trace = format!("{at}/planned-{device}");
        let result = json(
            driver,
            &format!(
                "run -q --json --model calib-data/model --artifact {at}/a.safetensors --prompt-file {at}/short \
                 --head-plan {at}/plan.json --max-new 6 --precision f32 --ignore-eos --device {device} --trace {trace}"
            ),
        );
        (result, std::fs::read_to_string(trace).unwrap())
    };
    let ((cuda, cuda_trace), (cpu, cpu_trace)) = (run("cuda"), run("cpu"));
    assert_eq!(cuda["fallbacks"], object!([]));
    assert_eq!((&cuda["ids"], &cuda["method"]), (&cpu["ids"], &object!("plan")));
    assert_eq!(cuda_trace, cpu_trace);
    same_counts(&cuda, &cpu, "plan");
    assert!(number(&cuda, "bypass_fraction") > 0.0);
}

/// A constant head is attended in full beside the others of its layer; caches and indexes stay on the GPU.
pub fn constant_heads(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    let marked = format!("{at}/marked.safetensors");
    resealed(&format!("{at}/a.safetensors"), &marked, |manifest| {
        for section in ["wpq", "a2ats"] {
            manifest["quality"][section][1][0]["constant"] = object!(true);
        }
    });
    for method in ["wpq", "a2ats"] {
        let log = dir.path().join(format!("{method}-log"));
        let run = |device: &str| {
            let trace = format!("{at}/constant-{method}-{device}");
            let arguments = format!(
                "run --json --model calib-data/model --artifact {marked} --prompt-file {at}/short --method {method} \
                 --budget 0.1 --window 16 --max-new 6 --kv f32 --precision f32 --ignore-eos --device {device} --trace {trace}"
            );
            let outcome = kvsmith(driver, &arguments);
            (outcome, std::fs::read_to_string(trace).unwrap())
        };
        let ((cuda, cuda_trace), (cpu, cpu_trace)) = (run("cuda"), run("cpu"));
        assert!(!cuda.stderr.contains("on the CPU"), "{}", cuda.stderr);
        let (cuda, cpu) = (cuda.json(), cpu.json());
        assert_eq!((&cuda["ids"], cuda_trace), (&cpu["ids"], cpu_trace), "{method}");
        assert_eq!(cuda["layers"][1]["full_heads"], object!([0]));
        assert_eq!(
            (&cuda["rows_read"], &cuda["layers"]),
            (&cpu["rows_read"], &cpu["layers"])
        );
        // Steps without a trace are recorded: the layer with the constant head has two parts, whose rows are gathered.
        let mut recorded = command(
            driver,
            &format!(
                "run -q --json --model calib-data/model --artifact {marked} --prompt-file {at}/short --method {method} \
                 --budget 0.1 --window 16 --max-new 3 --ignore-eos --device cuda"
            ),
        );
        Outcome::from_output(recorded.env("FAKE_CUDA_LOG", &log).output().unwrap()).ok();
        let graphs = std::fs::read_to_string(&log).unwrap();
        let kernels: Vec<&str> = graphs.lines().next().unwrap().split_whitespace().collect();
        let count = |name: &str| kernels.iter().filter(|kernel| **kernel == name).count();
        assert_eq!(
            (count("gather_heads"), count("scatter_heads")),
            (2 * 5, 2),
            "{graphs}"
        );
        assert_eq!(count("split_heads"), 4);
    }
}

/// What a user gets who says nothing: a cache of bf16, products on the tensor cores, steps that are recorded.
pub fn run_rounded(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    let run = |more: &str| {
        let common = format!(
            "run --json --model calib-data/model --artifact {at}/a.safetensors --prompt-file {at}/prompt --max-new 8 {more}"
        );
        json(driver, &common)
    };
    let cuda = run("--device cuda --method full");
    assert_eq!(cuda["ids"], run("--device cpu --method full")["ids"]);
    // 2 bytes for K and V, of 4 layers with 2 heads of 64, at every position that there is room for.
    let room = cuda["prompt_tokens"].as_u64().unwrap() + 8;
    assert_eq!(cuda["kv_bytes"], room.next_multiple_of(8) * 2 * 2 * 4 * 2 * 64);
    let sparse = run("--device cuda --budget 0.1");
    assert_eq!(sparse["method"], "wpq");
    let read = sparse["kv_read_fraction"].as_f64().unwrap();
    assert!(read > 0.1 && read < 0.5, "{read}");
    // What the same cache on the CPU gives.
    for (method, kv) in [
        ("selfindex", "2bit"),
        ("wpq", "2bit"),
        ("wpq", "int8"),
        ("full", "int8"),
        ("full", "k=bf16,v=int8"),
        ("wpq", "k=int8,v=f16"),
    ] {
        let cuda = run(&format!(
            "--device cuda --method {method} --kv {kv} --precision f32"
        ));
        let expected = run(&format!("--device cpu --method {method} --kv {kv}"));
        assert_eq!(cuda["ids"], expected["ids"], "{method} {kv}");
        assert_eq!(cuda["fallbacks"], object!([]), "{method} {kv}");
        let (a, b) = (&cuda["kv_bytes"], &expected["kv_bytes"]);
        let ratio = a.as_f64().unwrap() / b.as_f64().unwrap();
        assert!((0.9..1.1).contains(&ratio), "{method} {kv}: {a} {b}");
    }
    // Sampling sees the same logits.
    let sampled = |device| {
        run(&format!(
            "--device {device} --method topk --kv f32 --precision f32 --temperature 0.7"
        ))
    };
    assert_eq!(sampled("cuda")["ids"], sampled("cpu")["ids"]);
}

/// Keys and values in the machine's memory, the index on the device: what caches of bf16 on the CPU give, but for the
/// rounding of the prompt's own keys.
pub fn host(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    for method in [
        "full",
        "streaming",
        "random",
        "a2ats",
        "selfindex",
        "lfps",
        "topk",
    ] {
        let run = |device: &str| {
            let trace = format!("{at}/{method}-{}", device.len());
            let result = json(
                driver,
                &format!(
                    "run -q --json --model calib-data/model --artifact {at}/a.safetensors --prompt-file {at}/short \
                     --method {method} --budget 0.1 --window 16 --max-new 6 --precision f32 --ignore-eos --device {device} \
                     --trace {trace}"
                ),
            );
            (result, std::fs::read_to_string(trace).unwrap())
        };
        let ((host, host_trace), (cpu, cpu_trace)) = (run("cuda --kv host"), run("cpu --kv bf16"));
        assert_eq!(host["ids"], cpu["ids"], "{method}");
        // What is common of all that was chosen; signs around a median of rounded keys are the first to differ.
        let chosen = |trace: &str| -> Vec<Vec<u64>> {
            let lines = trace
                .lines()
                .map(|line| serde_json::from_str::<Value>(line).unwrap());
            let positions = lines.map(|line| line["positions"].as_array().unwrap().clone());
            positions
                .map(|list| list.iter().map(|p| p.as_u64().unwrap()).collect())
                .collect()
        };
        let (host_lists, cpu_lists) = (chosen(&host_trace), chosen(&cpu_trace));
        assert_eq!(host_lists.len(), cpu_lists.len());
        let pairs = host_lists.iter().zip(&cpu_lists);
        let common: usize = pairs
            .map(|(a, b)| a.iter().filter(|p| b.contains(p)).count())
            .sum();
        let all: usize = cpu_lists.iter().map(Vec::len).sum();
        assert!(
            common * 100 >= all * 95,
            "{method}: {common} of {all} positions agree"
        );
        let (a, b) = (&host["kv_read_fraction"], &cpu["kv_read_fraction"]);
        assert!(
            (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 0.01,
            "{method}: {a} {b}"
        );
        assert_eq!(host["kv_bytes"], cpu["kv_bytes"], "{method}");
        if ["full", "streaming", "random"].contains(&method) {
            for key in ["choices", "rows_read", "bytes_read", "bypasses", "layers"] {
                assert_eq!(host[key], cpu[key], "{method} {key}");
            }
        }
    }
    let wrong = kvsmith(
        driver,
        "run --model calib-data/model --prompt x --device cpu --kv host",
    );
    wrong.fails(2, "--kv host is available with --device cuda", "");
}

/// Turns continue the cache on the device.
pub fn chat(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    let turns: Vec<Vec<u32>> = vec![(3..90).collect(), (40..60).collect(), vec![7, 8, 9]];
    std::fs::write(
        dir.path().join("turns.json"),
        serde_json::to_string(&turns).unwrap(),
    )
    .unwrap();
    kvsmith(
        driver,
        &format!(
            "calibrate -q --model calib-data/model --text calib-data/text.txt --max-tokens 256 --uuid-tokens 0 --size 8 \
             --wrope-position 64 --wpq-center mean --no-verdict --device cpu -o {at}/mean.safetensors"
        ),
    )
    .ok();
    let methods = ["full", "topk", "a2ats", "selfindex", "lfps", "ctkvr", "wpq"];
    let with = methods
        .map(|method| (method, "a"))
        .into_iter()
        .chain([("wpq", "mean")]);
    for (method, artifact) in with {
        let run = |device: &str| {
            json(
                driver,
                &format!(
                    "run -q --json --chat --model calib-data/model --artifact {at}/{artifact}.safetensors --tokens {at}/turns.json \
                     --method {method} --budget 0.2 --window 8 --max-new 4 --ignore-eos --kv f32 --precision f32 \
                     --device {device}"
                ),
            )
        };
        let (cuda, cpu) = (run("cuda"), run("cpu"));
        assert_eq!(cuda["turns"].as_array().unwrap().len(), 3);
        assert_eq!(cuda["ids"], cpu["ids"], "{method} {artifact}");
    }
}

/// All numbers of `eval` agree.
pub fn eval(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    let run = |device: &str| {
        json(
            driver,
            &format!(
                "eval -q --json --model calib-data/model --artifact {at}/a.safetensors --text calib-data/heldout.txt \
                 --max-tokens 400 --seq-len 200 --decode 4 --turns 2 --methods a2ats,selfindex,lfps --budgets 0.1,0.3 \
                 --window 16 --kv f32 --precision f32 --device {device}"
            ),
        )
    };
    let (cuda, cpu) = (run("cuda"), run("cpu"));
    assert_eq!(cuda["device"], "cuda");
    let rows = |result: &Value| result["rows"].as_array().unwrap().clone();
    assert_eq!(rows(&cuda).len(), 6);
    for (cuda, cpu) in rows(&cuda).iter().zip(&rows(&cpu)) {
        for key in ["recall", "mass", "output_error", "kl", "kv_read_fraction"] {
            let (a, b) = (number(cuda, key), number(cpu, key));
            assert!((a - b).abs() <= 1e-3 * b.abs() + 1e-6, "{key}: {a} {b}");
        }
    }
}

/// Captured states agree to the rounding of f32; without --precision inputs are rounded too, by how much is a check of
/// tests/cuda_model.
pub fn dump(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    let dump = |name: &str, more: &str| {
        let arguments = format!(
            "dump -q --model calib-data/model --text calib-data/text.txt --max-tokens 240 --seq-len 120 --uuid-tokens 0 \
             --wrope-position 64 --queries --values --dtype f32 {more} -o {at}/{name}"
        );
        kvsmith(driver, &arguments).ok();
        Dump::open(&[dir.path().join(name)]).unwrap()
    };
    let cpu = dump("cpu", "--device cpu");
    assert_eq!(dump_device(&dir.path().join("cpu")), "cpu");
    for (name, more) in [
        ("exact", "--device cuda --precision f32"),
        ("rounded", "--device cuda"),
    ] {
        let cuda = dump(name, more);
        assert_eq!(dump_device(&dir.path().join(name)), "cuda");
        let (mut worst, mut checked) = (0f32, 0);
        for layer in 0..4 {
            for head in 0..2 {
                let keys = |dump: &Dump| {
                    dump.layer(layer)
                        .unwrap()
                        .read(State::KPre, head, 0, 240)
                        .unwrap()
                };
                let (a, b) = (keys(&cuda), keys(&cpu));
                let size = b.iter().fold(0f32, |m, v| m.max(v.abs()));
                let off = (&a - &b).iter().fold(0f32, |m, v| m.max(v.abs()));
                worst = worst.max(off / size);
                checked += a.len();
            }
        }
        assert_eq!(checked, 4 * 2 * 240 * 64);
        assert_eq!(worst > 1e-4, name == "rounded", "{name}: {worst}");
    }
}

/// Where a dump says that the model ran.
fn dump_device(dump: &Path) -> Value {
    let manifest = std::fs::read(dump.join("manifest.json")).unwrap();
    serde_json::from_slice::<Value>(&manifest).unwrap()["device"].clone()
}

/// Where cuBLAS is found it does the products of many rows, biases included: the same states but for the order of sums.
pub fn cublas(driver: &Path) {
    let library = tempfile::tempdir().unwrap();
    build_cublas(library.path(), 13);
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (3..43).collect();
    std::fs::write(dir.path().join("ids"), serde_json::to_string(&vec![ids]).unwrap()).unwrap();
    // bf16 and f16 weights, and one with biases.
    for (model, kept) in [("llama_default", 2), ("llama_linear", 2), ("qwen2_sliding", 3)] {
        let dump = |name: &str, with: bool| {
            let at = dir.path().display();
            let mut command = command(
                driver,
                &format!(
                    "dump --model tests/fixtures/golden/{model} --tokens {at}/ids --wrope-position 64 --dtype f32 \
                     --device cuda -o {at}/{model}-{name}"
                ),
            );
            if with {
                let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
                let folders = [library.path(), driver].map(|p| p.display().to_string());
                command
                    .env("LD_LIBRARY_PATH", format!("{}:{path}", folders.join(":")))
                    .env_remove("KVSMITH_CUBLAS");
            }
            let text = Outcome::from_output(command.output().unwrap()).ok().stderr;
            assert_eq!(text.contains("stand-in cuBLAS"), with, "{text}");
            Dump::open(&[dir.path().join(format!("{model}-{name}"))]).unwrap()
        };
        let (own, library) = (dump("own", false), dump("library", true));
        for layer in 0..kept {
            let keys = |dump: &Dump| dump.layer(layer).unwrap().read(State::KPre, 0, 0, 40).unwrap();
            let (a, b) = (keys(&own), keys(&library));
            let size = b.iter().fold(0f32, |m, v| m.max(v.abs()));
            let off = (&a - &b).iter().fold(0f32, |m, v| m.max(v.abs()));
            // A rounding that falls the other way after a sum in another order.
            assert!(off <= 0.01 * size, "{model} layer {layer}: {off} of {size}");
        }
    }
}

/// A budget of everything is full attention.
pub fn everything(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    let run = |more: &str| {
        json(
            driver,
            &format!(
                "run -q --json --model calib-data/model --artifact {at}/a.safetensors --prompt-file {at}/short --max-new 6 \
                 --budget 1.0 --ignore-eos --device cuda {more}"
            ),
        )
    };
    for kv in ["bf16", "host"] {
        let full = run(&format!("--method full --kv {kv}"));
        for method in ["a2ats", "selfindex", "streaming", "wpq"] {
            let sparse = run(&format!("--method {method} --kv {kv}"));
            assert_eq!(sparse["ids"], full["ids"], "{method} {kv}");
            assert_eq!(sparse["kv_read_fraction"], 1.0, "{method} {kv}");
        }
    }
    // Where no memory can be locked, copies wait, and arrive all the same.
    let arguments = format!(
        "run -q --json --model calib-data/model --artifact {at}/a.safetensors --prompt-file {at}/short --max-new 6 \
         --budget 0.1 --window 16 --temperature 0.9 --ignore-eos --device cuda --kv host"
    );
    let locked = json(driver, &arguments);
    let pageable = run_wrong(driver, "no_pinned", &arguments).json();
    assert_eq!(locked["ids"], pageable["ids"]);
}

/// What does not fit is said with what would.
pub fn room(driver: &Path) {
    let long: Vec<Vec<u32>> = vec![vec![5; 4]];
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens.json");
    std::fs::write(&tokens, serde_json::to_string(&long).unwrap()).unwrap();
    // The stand-in has 256 MiB.
    let arguments = format!(
        "run --model calib-data/model --tokens {} --method full --device cuda --max-new 200000",
        tokens.display()
    );
    let Outcome { code, stderr, .. } = kvsmith(driver, &arguments);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.contains("out of GPU memory: the model's weights need")
            && stderr.contains("the KV cache of 200004 positions"),
        "{stderr}"
    );
    assert!(stderr.contains("positions would fit"), "{stderr}");
    assert!(stderr.contains("hint: "), "{stderr}");
}

/// A model that is larger than the GPU's memory is named before anything is copied.
pub fn small(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    let arguments =
        format!("run --model calib-data/model --prompt-file {at}/prompt --method full --device cuda");
    let mut command = command(driver, &arguments);
    let Outcome { code, stderr, .. } =
        Outcome::from_output(command.env("FAKE_CUDA_MIB", "2").output().unwrap());
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.contains("out of GPU memory: the model's weights need"),
        "{stderr}"
    );
    assert!(stderr.contains("hint: "), "{stderr}");
}

/// Writes a llama of two query heads and one KV head, with a head of its own, whose tensors have the values that `value`
/// gives for their names, rows and columns.
fn write_model(
    dir: &Path,
    [hidden, head_dim, vocab, layers]: [usize; 4],
    value: impl Fn(&str, usize, usize) -> f32,
) {
    let config = object!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": false,
        "hidden_act": "silu",
    });
    std::fs::create_dir(dir).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let tensor = |name: &str, shape: &[usize]| {
        let columns = *shape.last().unwrap();
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|i: usize| value(name, i / columns, i % columns))
            .collect();
        Tensor::new(&format!("{name}.weight"), shape, &values)
    };
    let mut tensors = vec![
        tensor("model.embed_tokens", &[vocab, hidden]),
        tensor("model.norm", &[hidden]),
        tensor("lm_head", &[vocab, hidden]),
    ];
    for layer in 0..layers {
        for (name, shape) in [
            ("input_layernorm", &[hidden][..]),
            ("post_attention_layernorm", &[hidden]),
            ("self_attn.q_proj", &[2 * head_dim, hidden]),
            ("self_attn.k_proj", &[head_dim, hidden]),
            ("self_attn.v_proj", &[head_dim, hidden]),
            ("self_attn.o_proj", &[hidden, 2 * head_dim]),
            ("mlp.gate_proj", &[hidden, hidden]),
            ("mlp.up_proj", &[hidden, hidden]),
            ("mlp.down_proj", &[hidden, hidden]),
        ] {
            tensors.push(tensor(&format!("model.layers.{layer}.{name}"), shape));
        }
    }
    let weights = NewFile::create(&dir.join("model.safetensors")).unwrap();
    store::write(weights, &tensors, None).unwrap();
}

/// A small number for a row and a column.
fn small_number(row: usize, column: usize) -> f32 {
    ((row * 3 + column) % 7) as f32 * 0.1 - 0.3
}

/// A model with attention or layers that no kernel is made for is refused, and runs on the CPU where no device was asked for.
pub fn unfit(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    write_model(&dir.path().join("model"), [64, 160, 64, 1], |_, row, column| {
        small_number(row, column)
    });
    std::fs::write(dir.path().join("ids"), "[[3,4,5,6,7,8]]").unwrap();
    // Without a device, the GPU is taken, which has passed the check.
    let cache = dir.path().join("cache");
    stamp(driver, &cache);
    let kvsmith = |arguments: &str| {
        let mut command = command(driver, arguments);
        Outcome::from_output(command.env("XDG_CACHE_HOME", &cache).output().unwrap())
    };
    let run = |device: &str| {
        let arguments = format!("run --json --model {at}/model --tokens {at}/ids --max-new 2 --method full");
        kvsmith(&format!("{arguments} --device {device}"))
    };
    run("cuda").fails(
        1,
        "a head dimension of 160; 1 to 128 are supported",
        "use --device cpu",
    );
    for (model, part) in [
        ("granite_factors", "constant factors on activations"),
        ("smollm3_nope", "layers without RoPE"),
        ("qwen3_moe_mixed", "mixtures of experts"),
    ] {
        let model = checkpoint(model);
        let arguments =
            format!("run --model {model} --tokens {at}/ids --max-new 2 --method full --device cuda");
        kvsmith(&arguments).fails(1, &format!("models with {part}"), "use --device cpu");
    }
    let auto = run("auto").ok();
    assert!(
        auto.stderr.contains("the model runs on the CPU"),
        "{}",
        auto.stderr
    );
    assert_eq!(auto.json()["device"], "cpu");
    // So does a dump of it, and says so.
    let arguments = format!("dump --model {at}/model --tokens {at}/ids --wrope-position 8 -o {at}/dump");
    let said = kvsmith(&arguments).ok().stderr;
    assert!(said.contains("the model runs on the CPU"), "{said}");
    assert_eq!(dump_device(&dir.path().join("dump")), "cpu");
}

/// A key that a step makes, and that is not finite once it is cached or times a query, ends the run as it does on the CPU.
pub fn not_finite_key(driver: &Path) {
    const SPIKE: usize = 7;
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    // Token 7 alone has something in channel 1, whose queries and keys in the second layer are beyond the range of f16,
    // and their products beyond that of f32. It follows every token, and is not in the prompt.
    let value = |name: &str, row: usize, column: usize| match (name, column) {
        ("model.embed_tokens", 0) => 1.0,
        ("model.embed_tokens", 1) => f32::from(u8::from(row == SPIKE)),
        ("lm_head", _) => f32::from(u8::from(row == SPIKE && column == 0)),
        ("model.layers.1.self_attn.q_proj", 1) => [1e20, -1e20][row % 2],
        ("model.layers.1.self_attn.k_proj", 1) => 1e20,
        _ if name.ends_with("norm") => 1.0,
        // What a layer adds stays small, and leaves the first two channels as they are.
        _ if name.ends_with("o_proj") || name.ends_with("down_proj") => match row {
            0 | 1 => 0.0,
            _ => 0.01 * small_number(row, column),
        },
        _ => small_number(row, column),
    };
    write_model(&dir.path().join("model"), [16, 16, 8, 2], value);
    std::fs::write(dir.path().join("ids"), "[[3,4,5,6]]").unwrap();
    let run = |device: &str, kv: &str, tokens: usize| {
        let arguments = format!(
            "run --json --model {at}/model --tokens {at}/ids --method full --ignore-eos --max-new {tokens} \
             --device {device} --kv {kv}"
        );
        kvsmith(driver, &arguments)
    };
    for (device, kv) in [
        ("cpu", "f16"),
        ("cuda", "f16"),
        ("cuda", "bf16"),
        ("cuda", "f32"),
        ("cuda", "host"),
    ] {
        // The first token comes from the prompt, which is finite.
        let first = run(device, kv, 1).json();
        assert_eq!(first["ids"], object!([SPIKE]), "{device} {kv}");
        run(device, kv, 3).fails(
            1,
            "the hidden states after layer 1 contain NaN or infinite values, although the weights are finite",
            "its activations overflow",
        );
    }
}

/// A checkpoint with a NaN is named, as on the CPU.
pub fn not_finite(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let from = root().join("tests/fixtures/golden/llama_default");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header: usize = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let names: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let start = names["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0]
        .as_u64()
        .unwrap() as usize;
    // bf16.
    bytes[8 + header + start..][..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let tokens = dir.path().join("tokens.json");
    std::fs::write(&tokens, "[[3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20]]").unwrap();
    for method in ["full", "quest"] {
        let arguments = format!(
            "run --model {} --tokens {} --method {method} --device cuda --max-new 3",
            dir.path().display(),
            tokens.display()
        );
        let mut command = command(driver, &arguments);
        let failed = Outcome::from_output(command.stdin(Stdio::null()).output().unwrap());
        assert_eq!(failed.code, Some(1), "{}", failed.stderr);
        assert!(
            failed.stderr.contains("model.layers.1.mlp.up_proj.weight"),
            "{}",
            failed.stderr
        );
    }
}
