//! `plan` against the memory and disk that `calibrate` and `dump` then take, and `calibrate --plan`.

use std::path::Path;

use crate::common::*;
use serde_json::{Value, json};

/// Bytes of a file, or of the files of a folder.
fn bytes(path: &str) -> f64 {
    let path = Path::new(path);
    if path.is_file() {
        return path.metadata().unwrap().len() as f64;
    }
    let files = std::fs::read_dir(path).unwrap();
    files
        .map(|file| file.unwrap().metadata().unwrap().len() as f64)
        .sum()
}

#[track_caller]
fn close(planned: &Value, taken: f64, what: &str) {
    let planned = planned.as_f64().unwrap();
    assert!(
        (planned / taken - 1.0).abs() < 0.1,
        "{what}: {planned} planned, {taken} taken"
    );
}

#[test]
fn disk_is_what_is_taken() {
    // Shapes of heads, codebooks and texts, of which each makes another term the largest.
    for (name, lengths, options) in [
        ("llama_default", vec![900; 4], "--size 512 --no-verdict"),
        ("llama_default", vec![150; 20], "--size 16 --wpq-bits none"),
        (
            "qwen3_norm",
            vec![700; 6],
            "--size 1024 --seq-len 400 --no-verdict",
        ),
        ("mistral_sliding", vec![2000; 2], "--size 64 --no-verdict"),
        ("qwen2_bias", vec![400; 9], "--size 256"),
    ] {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let tokens = scratch.tokens("tokens.json", &documents(&lengths, 1));
        let flags = format!("--model {model} --tokens {tokens}");
        let plan = kvsmith(&format!("plan {flags} {options} --no-probe --json")).json();
        let (art, dump) = (scratch.path("art"), scratch.path("dump"));
        kvsmith(&format!("calibrate {flags} {options} -o {art}")).ok();
        close(
            &plan["artifact_bytes"],
            bytes(&art),
            &format!("{name} {options}: artifact"),
        );
        let cut = if options.contains("--seq-len") {
            "--seq-len 400"
        } else {
            ""
        };
        kvsmith(&format!("dump {flags} {cut} --queries --values -o {dump}")).ok();
        close(
            &plan["dump_bytes"],
            bytes(&dump),
            &format!("{name} {options}: dump"),
        );
    }
}

#[test]
fn weights_and_text_need_not_be_there() {
    let scratch = Scratch::new();
    let model = scratch.path("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::copy(
        golden("llama_default/config.json"),
        format!("{model}/config.json"),
    )
    .unwrap();
    let plan = kvsmith(&format!(
        "plan --model {model} --max-tokens 3000 --uuid-tokens 0 --size 32 --no-probe --json"
    ))
    .json();
    assert_eq!(plan["weights_found"], false);
    assert_eq!(plan["tokens"], 3000);
    assert_eq!(plan["seconds"], Value::Null);
    let shown = kvsmith(&format!(
        "plan --model {model} --max-tokens 3000 --uuid-tokens 0 --size 32 --no-probe"
    ))
    .ok();
    assert!(shown.stdout.contains("no text given"), "{}", shown.stdout);
    assert!(
        shown.stdout.lines().all(|line| line.chars().count() <= 80),
        "{}",
        shown.stdout
    );
}

#[test]
fn stages_are_those_of_the_calibration() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_d128");
    let tokens = scratch.tokens("tokens.json", &documents(&[300; 5], 1));
    let art = scratch.path("art");
    let flags = format!("calibrate --model {model} --tokens {tokens} --size 16 -o {art}");
    let without = flags.replace(&format!(" -o {art}"), "");
    kvsmith(&without).fails(2, "required arguments", "");
    let plan = kvsmith(&format!("{without} --plan --json")).ok();
    assert!(!Path::new(&art).exists(), "a plan writes nothing");
    let shown = kvsmith(&format!("{flags} --no-verdict --plan -q")).ok().stdout;
    assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    // The small calibration that is timed says nothing.
    assert!(!plan.stderr.contains("recommended"), "{}", plan.stderr);
    let (plan, made) = (plan.json(), kvsmith(&format!("{flags} --json")).json());
    let names = |of: &Value| -> Vec<Value> {
        of["stages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|stage| stage["name"].clone())
            .collect()
    };
    assert_eq!(names(&plan), names(&made));
    for of in [&plan, &made] {
        let seconds = of["stages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|stage| number(stage, "seconds"));
        let sum: f64 = seconds.inspect(|seconds| assert!(*seconds > 0.0)).sum();
        assert!(sum <= number(of, "seconds") * 1.001);
    }
    let methods = plan["methods"].as_array().unwrap();
    assert_eq!(methods[0]["method"], "full");
    // One bit of a channel's sign, and two stages of 32 bits, per key and KV head.
    let index = |name: &str| {
        let of = methods.iter().find(|of| of["method"] == name).unwrap();
        number(of, "index_bytes_per_token")
    };
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(golden("llama_d128/config.json")).unwrap()).unwrap();
    let heads = number(&config, "num_hidden_layers") * number(&config, "num_key_value_heads");
    let signs = heads * number(&config, "head_dim") / 8.0;
    assert_eq!(index("full"), 0.0);
    assert!(
        (signs..1.2 * signs).contains(&index("selfindex")),
        "{}",
        index("selfindex")
    );
    assert!(
        (8.0 * heads..11.0 * heads).contains(&index("wpq")),
        "{}",
        index("wpq")
    );
    assert!(
        methods
            .iter()
            .all(|of| of["step_seconds"][0].as_f64().unwrap() > 0.0)
    );
    // The bytes of a cache of this shape: 2 KV heads of its channels in every layer, K and V in bf16.
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(golden("llama_d128/config.json")).unwrap()).unwrap();
    let of = |key: &str| config[key].as_u64().unwrap();
    let d = config["head_dim"]
        .as_u64()
        .unwrap_or_else(|| of("hidden_size") / of("num_attention_heads"));
    let token = 2 * 2 * d * of("num_key_value_heads") * of("num_hidden_layers");
    let bf16 = plan["caches"]
        .as_array()
        .unwrap()
        .iter()
        .find(|cache| cache["kv"] == "bf16")
        .unwrap();
    assert_eq!(bf16["bytes_per_token"], token);
}

/// The sizes of a Llama 3.1: layers, hidden channels, channels of the MLP, and query heads. All have 8 KV heads of 128
/// channels and a vocabulary of 128,256 tokens.
struct Llama {
    layers: u64,
    hidden: u64,
    inner: u64,
    heads: u64,
}

const LLAMAS: [(&str, Llama); 3] = [
    (
        "8B",
        Llama {
            layers: 32,
            hidden: 4096,
            inner: 14_336,
            heads: 32,
        },
    ),
    (
        "70B",
        Llama {
            layers: 80,
            hidden: 8192,
            inner: 28_672,
            heads: 64,
        },
    ),
    (
        "405B",
        Llama {
            layers: 126,
            hidden: 16_384,
            inner: 53_248,
            heads: 128,
        },
    ),
];

impl Llama {
    /// Writes the config.json of the model, without weights; returns the folder.
    fn write(&self, scratch: &Scratch, name: &str) -> String {
        let config = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_attention_heads": self.heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
            "tie_word_embeddings": false, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0, "torch_dtype": "bfloat16", "bos_token_id": 128_000, "eos_token_id": 128_001,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        });
        std::fs::create_dir(scratch.path(name)).unwrap();
        scratch.write(&format!("{name}/config.json"), config.to_string());
        scratch.path(name)
    }

    /// Plans 16 shards of ten million tokens: 610 blocks of text and one of UUIDs, each of 16,384 tokens.
    fn plan(&self, scratch: &Scratch, name: &str) -> (Value, String) {
        let model = self.write(scratch, name);
        let flags = format!(
            "plan --model {model} --max-tokens 9994240 --uuid-tokens 16384 --shards 16 --task-memory 64GB \
             --no-probe --threads 2 --device cpu -q"
        );
        (
            kvsmith(&format!("{flags} --json")).json(),
            kvsmith(&flags).ok().stdout,
        )
    }
}

/// Every figure in bytes, against arithmetic by hand. A row of a head is 128 f32, 512 bytes; a sum over the queries of a
/// layer is 8 heads x 128 x 128 f64, 1,048,576 bytes.
#[test]
fn shards_take_what_arithmetic_by_hand_says() {
    let scratch = Scratch::new();
    for (name, of) in LLAMAS {
        let (plan, _) = of.plan(&scratch, name);
        let Llama {
            layers,
            hidden,
            inner,
            heads,
        } = of;
        let (n, blocks, q, kv) = (611 * 16_384, 611, heads * 128, 8 * 128);
        assert_eq!((&plan["tokens"], &plan["blocks"]), (&json!(n), &json!(blocks)));
        let shards = &plan["shards"];
        let check = |of: &Value, key: &str, expected: u64| {
            assert_eq!(of[key], expected, "{name}: {key} of {}", of["name"]);
        };

        // Keys, queries and values of every token; two sums and eight counts per block and layer.
        let rows = heads + 2 * 8;
        check(shards, "states_bytes", layers * rows * n * 512);
        check(shards, "states_bf16_bytes", layers * rows * n * 256);
        let block = layers * (2 * 1_048_576 + 64);
        check(shards, "block_bytes", block);
        check(shards, "block_sums_bytes", blocks * block);
        // 611 blocks are 16 shards of at most 39; 32, 80 and 126 layers are 16 ranges of at most 2, 5 and 8.
        let t = 39 * 16_384;
        check(shards, "shard_tokens", t);
        let longest = layers.div_ceil(16);
        let ranges = shards["layer_ranges"].as_array().unwrap();
        assert_eq!(
            (ranges.len(), &ranges[0][0], &ranges[15][1]),
            (16, &json!(0), &json!(layers))
        );
        let [tokens, fits, join] = [0, 1, 2].map(|i| &shards["phases"][i]);

        // Projections of q and o, k and v, gate, up and down, in bf16, and an embedding. The head is not needed.
        let layer = 2 * hidden * (2 * q + 2 * kv + 3 * inner);
        let pass = layers * layer + 2 * 128_256 * hidden;
        // Three sums and a count for the moments of the shard; id, position and mark of each token.
        let folder = |t: u64, blocks: u64| {
            layers * rows * t * 512 + blocks * block + layers * (3 * 1_048_576 + 64) + 9 * t
        };
        check(tokens, "task_written_bytes", folder(t, 39));
        check(tokens, "task_read_bytes", pass + folder(t, 39));
        let written = folder(n, blocks) + 15 * layers * (3 * 1_048_576 + 64);
        check(tokens, "written_bytes", written);
        check(tokens, "read_bytes", 16 * pass + written);
        check(tokens, "mapped_bytes", layer);
        // While a block attends: q, k, v, rotated keys and queries, the output of every head, and the rotations.
        let attends = 16_384 * 4 * (q + 2 * kv + kv + q + 128);
        // A head of the block on its way to the file, twice, and the sums of the block.
        let block_memory = attends + 16_384 * 128 * 8 + 2 * 1_048_576;
        // Two sums of every layer meanwhile; when these are written, seven.
        let sums = (2 * layers * 1_048_576 + block_memory).max(7 * layers * 1_048_576);
        // The program, two threads, and freed memory between allocations.
        let program = (2 << 20) + (2 << 20) + (8 << 20);
        // The widest inputs of a projection, for 2,048 rows, as the matrix product packs and keeps them.
        let kept = 2048 * hidden.max(q).max(inner) * 4;
        check(
            tokens,
            "memory_bytes",
            program + kept + t * hidden * 4 + 5 * t + sums,
        );

        // Codewords in f16, mean, Cholesky factor, counts; signs: centroids, counts, scales, means; 64-bit quantisers
        // of 64 directions: words in f16, both means, factor, all directions; maps of keys and values and means.
        assert_eq!(plan["codewords"], 1024);
        let a2ats = 1024 * 128 * 2 + 512 + 128 * 512 + 1024 * 4;
        let signs = 32 * 16 * 4 * 2 + 32 * 16 * 8 + 512 + 512;
        let wpq = 2 * 8 * 16 * 8 * 2 + 2 * 512 + 128 * 512 + 128 * 512;
        let rotation = 2 * 128 * 512 + 512;
        let per_query_head = (600 + 68 + 23) * 4 + 4 + 1;
        let results = layers * (8 * (a2ats + signs + wpq + rotation) + heads * per_query_head);
        let reports = 6500 + layers * (8 * 1150 + heads * 450);
        let packed = results + reports;
        // Six sections, each of which checks every file of its layers and the tokens.
        let sums_of_blocks = blocks * (2 * 1_048_576 + 64);
        let file = rows * n * 512 + sums_of_blocks;
        // Then keys: codebook 1, signs 2, priors 1, wpq 1, rotation 1, tail 1; and 1 to find constant heads, but not for the last
        // two. Values: rotation and tail. Queries: priors, rotation and tail. Sums: codebook, wpq and rotation.
        let then = (11 + 2) * 8 * n * 512 + 3 * heads * n * 512 + 3 * sums_of_blocks;
        let range = |layers_of: u64| {
            let written = packed * layers_of / layers;
            (
                6 * (layers_of * file + 9 * n) + layers_of * then + written,
                written,
            )
        };
        let (read, written) = range(longest);
        check(fits, "task_read_bytes", read);
        check(fits, "task_written_bytes", written);
        let all = ranges
            .iter()
            .map(|r| r[1].as_u64().unwrap() - r[0].as_u64().unwrap());
        let all: Vec<(u64, u64)> = all.map(range).collect();
        let written_by_all: u64 = all.iter().map(|task| task.1).sum();
        check(fits, "read_bytes", all.iter().map(|task| task.0).sum());
        check(fits, "written_bytes", written_by_all);
        check(fits, "mapped_bytes", 0);
        // The tail: keys and values, 768 rows of each query head of a group, all rows of one while it is read and those
        // of a shard as they are in the file; rotations; a row per thread; five errors of 32 bytes per row and head.
        let group = heads / 8;
        let tail = 2 * n * 512 + group * 768 * 512 + (n + t) * 512 + 16_384 * 512;
        let tail = tail + 2 * 16_384 * (2 * group + 10) * 8 + 768 * group * 5 * 32;
        let a2ats_of_range = layers * 8 * a2ats * longest / layers;
        check(
            fits,
            "memory_bytes",
            program + 10 * n + 3 * 1_048_576 + tail + a2ats_of_range,
        );

        // pack writes and checks the artifact; the verdict reads it and runs the model once for the budgets, twice for
        // the texts and three times for the questions. It writes 7 methods at 3 shares, and full attention over 5 types of
        // the cache: means, intervals, means on three other kinds and lengths of text, answers.
        let judged = packed + 26 * (60 + 110 + 3 * 140 + 90 + layers * 8 * 25);
        check(join, "written_bytes", packed + judged);
        check(
            join,
            "read_bytes",
            2 * packed + packed + 6 * pass + 9 * n + judged,
        );
        check(join, "mapped_bytes", layer);
        // Together, 12 blocks of text and 8 of UUIDs, and one of full length of each, with 16 steps of 26 variants each.
        let (ends, steps) = (20 * 2048 + 2 * 16_384, 26 * 16);
        // On each of two threads, a head has its queries three times, and keys, values, caches and indices as twelve.
        let on_threads = 2 * (3 * group + 12) * 16_384 * 512;
        let verdict = (ends + 22 * steps) * hidden * 4 + steps * 2 * (q + kv) * 4 + attends + on_threads;
        check(join, "memory_bytes", program + results.max(kept + verdict));
        check(
            shards,
            "disk_bytes",
            folder(n, blocks) + 15 * layers * (3 * 1_048_576 + 64) + written_by_all + packed + judged,
        );
    }
}

/// Some of these figures as numbers, as a reader of the page on clusters finds them.
#[test]
fn shards_of_10_million_tokens_are_in_the_documentation() {
    let scratch = Scratch::new();
    let page = std::fs::read_to_string(root().join("docs/cluster.md")).unwrap();
    for (name, of) in LLAMAS {
        let (plan, shown) = of.plan(&scratch, name);
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
        let shards = &plan["shards"];
        assert_eq!(shards["meets_deadline"], Value::Null);
        let of_phase = |i: usize, key: &str| number(&shards["phases"][i], key);
        let terabytes = |bytes: f64| format!("{:.1} TB", bytes / 1e12);
        let cells = [
            terabytes(number(shards, "states_bytes")),
            format!("{:.0} MB", number(shards, "block_bytes") / 1e6),
            terabytes(of_phase(1, "read_bytes")),
            format!("{:.1} GB", of_phase(0, "memory_bytes") / 1e9),
            format!("{:.1} GB", of_phase(1, "memory_bytes") / 1e9),
        ];
        let row = format!("| {name} | {} |", cells.join(" | "));
        assert!(page.contains(&row), "not in the page: {row}");
    }
}

#[test]
fn shards_follow_the_machine_and_the_deadline() {
    let scratch = Scratch::new();
    let model = LLAMAS[0].1.write(&scratch, "model");
    let flags =
        format!("plan --model {model} --max-tokens 319488 --no-probe --seq-len 16384 --device cpu -q");
    let plan = |options: &str| kvsmith(&format!("{flags} {options} --json")).json()["shards"].clone();
    assert_eq!(plan(""), Value::Null);
    // Without times, memory decides: the states of 20 blocks in a shard take 5.2 GB, and a block's way through a layer
    // 0.8 GB.
    let tasks = |plan: &Value| plan["phases"][0]["tasks"].as_u64().unwrap();
    let large = plan("--shards --task-memory 64GB");
    let small = plan("--shards auto --task-memory 4GB");
    assert_eq!((tasks(&large), &large["fits_memory"]), (1, &json!(true)));
    assert!(tasks(&small) > 1, "{small}");
    let fits = |plan: &Value| {
        number(&plan["phases"][0], "memory_bytes") + number(&plan["phases"][0], "mapped_bytes") <= 4e9
    };
    assert!(fits(&small));
    assert!(!fits(&plan(&format!(
        "--shards {} --task-memory 4GB",
        tasks(&small) - 1
    ))));
    // No number of shards is small enough: the most is proposed, and the text says what is missing.
    let none = kvsmith(&format!("{flags} --shards auto --task-memory 100MB"))
        .ok()
        .stdout;
    assert!(none.contains("not enough for the token shards"), "{none}");
    assert!(none.contains("not enough for the layer parts"), "{none}");
    assert!(none.lines().all(|line| line.chars().count() <= 80), "{none}");
    // More shards than blocks, and flags without --shards, are wrong use.
    for (options, message) in [
        ("--shards 22", "21 blocks"),
        ("--deadline 1h", "--shards"),
        ("--shards 2 --deadline 8", "with a unit"),
        ("--shards 0", "at least 1"),
    ] {
        let failed = kvsmith(&format!("{flags} {options}"));
        assert_eq!(failed.code, Some(2), "{options}");
        assert!(failed.stderr.contains(message), "{options}: {}", failed.stderr);
    }
}

#[test]
fn times_of_shards_add_up() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[300, 300, 300, 150, 150], 1));
    let flags = format!("plan --model {model} --tokens {tokens} --size 16 --device cpu -q --shards");
    let plan = kvsmith(&format!(
        "{flags} 4 --tasks-at-once 3 --shared-bandwidth 0.001 --json"
    ))
    .json();
    let shards = &plan["shards"];
    let phases = shards["phases"].as_array().unwrap();
    let all: f64 = phases.iter().map(|phase| number(phase, "seconds")).sum();
    assert!((all - number(shards, "seconds")).abs() < 1e-9 * all);
    for phase in phases {
        let of = |key: &str| number(phase, key);
        let at_once = of("tasks").min(3.0);
        let disk = (of("task_read_bytes") + of("task_written_bytes")) * at_once / 1e6;
        assert!((of("disk_seconds") / disk - 1.0).abs() < 1e-9);
        let task = of("compute_seconds") + of("disk_seconds");
        assert!(of("compute_seconds") > 0.0 && (of("task_seconds") / task - 1.0).abs() < 1e-9);
        let turns = (of("tasks") / at_once).ceil();
        assert!((of("seconds") / (turns * task) - 1.0).abs() < 1e-9);
    }
}

#[test]
fn shards_take_the_disk_that_is_planned() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_d128");
    let tokens = scratch.tokens("tokens.json", &documents(&[900, 700, 800, 600, 1000, 500], 1));
    let flags = format!("--model {model} --tokens {tokens} --device cpu -q");
    let plan = kvsmith(&format!("plan {flags} --size 64 --no-probe --shards 3 --json")).json();
    let shards = &plan["shards"];
    let layers = shards["layer_ranges"].as_array().unwrap().len();
    let path = |name: String| scratch.path(&name);
    let dumps: Vec<String> = (0..3).map(|i| path(format!("tokens-{i}"))).collect();
    for (i, dump) in dumps.iter().enumerate() {
        kvsmith(&format!(
            "dump {flags} --queries --values --dtype f32 --shard {i}/3 -o {dump}"
        ))
        .ok();
    }
    let written: f64 = dumps.iter().map(|dump| bytes(dump)).sum();
    close(&shards["phases"][0]["written_bytes"], written, "token shards");
    let (dumps, mut sections) = (dumps.join(" "), Vec::new());
    for (command, options) in [
        ("codebook", "--size 64"),
        ("signs", ""),
        ("priors", ""),
        ("wpq", ""),
        ("rotation", ""),
        ("tail", ""),
    ] {
        for j in 0..layers {
            let section = path(format!("{command}-{j}"));
            kvsmith(&format!(
                "{command} --dump {dumps} --layers {j}/{layers} {options} -q -o {section}"
            ))
            .ok();
            sections.push(section);
        }
    }
    let [packed, judged] = ["packed", "judged"].map(|name| scratch.path(name));
    kvsmith(&format!(
        "pack {} --model {model} -q -o {packed}",
        sections.join(" ")
    ))
    .ok();
    kvsmith(&format!(
        "verdict {packed} --model {model} --dump {dumps} --device cpu -q -o {judged}"
    ))
    .ok();
    close(
        &shards["phases"][2]["written_bytes"],
        bytes(&packed) + bytes(&judged),
        "join",
    );
    let sections: f64 = sections.iter().map(|section| bytes(section)).sum();
    close(
        &shards["disk_bytes"],
        written + sections + bytes(&packed) + bytes(&judged),
        "disk",
    );
}
