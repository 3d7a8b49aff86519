//! `bench`: what the documents of `--json` say, and which flags are refused.

use crate::common::*;
use serde_json::{Value, json};

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} of {row}"))
}

fn rows(arguments: &str) -> Vec<Value> {
    let json = kvsmith(arguments).ok().json();
    json["rows"].as_array().expect("rows").clone()
}

#[test]
fn rows_have_the_keys_of_the_contract() {
    let rows = rows(
        "bench attend --json --device cpu --shapes 4/2x64 --context 1K,3000 --batch 1,2 --size 64 --runs 3",
    );
    assert_eq!(rows.len(), 2 * 2 * 4);
    for row in &rows {
        let number = |name: &str| number(row, name);
        assert!(row["name"].is_string() && row["shape"].is_string(), "{row}");
        assert_eq!(row["device"], "cpu");
        assert_eq!(row["runs"], 3);
        assert!(
            0.0 < number("min_s") && number("min_s") <= number("median_s"),
            "{row}"
        );
        assert!(number("median_s") <= number("max_s"), "{row}");
        assert!(
            number("peak_bytes") > 0.0 && number("bandwidth_share") > 0.0,
            "{row}"
        );
        let rate = number("bytes") / number("median_s") * 1e-9;
        assert!((rate / number("gbytes_per_s") - 1.0).abs() < 1e-9, "{row}");
    }
    for of_shape in rows.chunks(4) {
        assert!(of_shape[0]["speedup_over_full"].is_null());
        for row in &of_shape[1..] {
            let speedup = number(&of_shape[0], "median_s") / number(row, "median_s");
            assert_eq!(number(row, "speedup_over_full"), speedup, "{row}");
        }
    }
    let names: Vec<&str> = rows
        .iter()
        .take(4)
        .filter_map(|row| row["name"].as_str())
        .collect();
    assert_eq!(
        names,
        ["attend full", "attend a2ats", "attend selfindex", "attend wpq"]
    );
}

/// The largest seed; what is drawn with the seeds that follow it must not fail.
const LAST_SEED: u64 = u64::MAX;

/// Bytes by hand: 2 KV heads, 1000 positions of 64 channels in bf16, budget 100 and 68 static ones.
#[test]
fn bytes_are_what_a_step_reads() {
    let common = "--json --device cpu --shapes 4/2x64 --context 1000 --budget 100 --runs 1";
    let bytes = |what: &str| -> Vec<u64> {
        let rows = rows(&format!("bench {what} {common}"));
        rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect()
    };
    // The signs, and 16 centroids of f32 for every 4 channels.
    let signs = 2 * (1000 * 8 + 16 * 64 * 4);
    let row = 2 * 64 * 2;
    let attended = 2 * 168 * row;
    // So many codewords that all codes are read, of the candidates.
    let codes = 2 * 932 * 2 + 2 * 500 * 64 * 2;
    assert_eq!(
        bytes("retrieve --size 500 --methods a2ats,selfindex"),
        [codes, signs]
    );
    assert_eq!(
        bytes("attend --size 500 --methods full,selfindex"),
        [2 * 1000 * row, signs + attended]
    );
    // So few that lists are read, in whole chunks of 7 positions, which take less than all codes.
    let codewords = 2 * 64 * 64 * 2;
    let lists = bytes("retrieve --size 64 --methods a2ats")[0] - codewords;
    assert!(
        lists.is_multiple_of(32) && (1..2 * 932 * 2).contains(&lists),
        "{lists}"
    );
    // The plain ranking reads every code of the candidates.
    let plain = "retrieve --size 64 --methods a2ats,selfindex --ranking plain";
    assert_eq!(bytes(plain), [codewords + 2 * 932 * 2, signs]);
    // Four bytes of each candidate and of the best 400, two stages of 16 words, the map of the query to 32 directions,
    // both in half precision, and the mean.
    let words = 2 * 16 * 32 * 2 + 64 * 32 * 2 + 64 * 4;
    let codes = 2 * (4 * (932 + 400) + words);
    assert_eq!(bytes("retrieve --methods wpq --wpq-center mean"), [codes]);
    // By default also the mean before rotation.
    let codes = codes + 2 * 64 * 4;
    assert_eq!(bytes("retrieve --methods wpq"), [codes]);
    // More words of the same channels, in two stages.
    let more_words = 2 * 2 * (256 - 16) * 32 * 2;
    assert_eq!(
        bytes("retrieve --methods wpq --wpq-words 256"),
        [codes + more_words]
    );
    assert_eq!(bytes("attend --methods wpq"), [codes + attended]);
    // 12 bits of each candidate and 64 words of every channel in half precision; a bit per channel and 256 counts per 8
    // channels.
    let codes = [932 * 12 / 8 + 64 * 64 * 2, 932 * 8 + 8 * 256 * 4];
    assert_eq!(
        bytes("retrieve --methods pqcache,randsign"),
        codes.map(|bytes| 2 * bytes)
    );
    // The oracle reads every key, and the values of what it attends.
    let keys = 2 * 1000 * 64 * 2;
    assert_eq!(bytes("retrieve --methods topk"), [keys]);
    assert_eq!(bytes("attend --methods topk"), [keys + attended / 2]);
    // In 2 bits a key has 8 bytes of signs; it and its value have 16 of magnitudes, and two scales.
    let (key, value) = (8 + 16 + 8, 16 + 8);
    assert_eq!(
        bytes("retrieve --kv 2bit --methods selfindex,topk"),
        [signs, 2 * 1000 * key]
    );
    assert_eq!(
        bytes("attend --kv 2bit --methods full,selfindex"),
        [2 * 1000 * (key + value), signs + 2 * 168 * (key + value)]
    );
}

#[test]
fn methods_that_learn_are_timed() {
    let common = "--json --device cpu --shapes 4/2x64 --context 4K --runs 3 --methods lfps,ctkvr";
    for what in ["retrieve", "attend"] {
        for row in rows(&format!("bench {what} {common}")) {
            let bytes = row["bytes"].as_u64().unwrap();
            // Less than the keys and values of all positions.
            assert!(row["median_s"].as_f64().unwrap() > 0.0, "{row}");
            assert!((1..2 * 4096 * 64 * 4).contains(&bytes), "{row}");
            assert!(
                row["scattered_loop_gbytes_per_s"].as_f64().unwrap() > 0.0,
                "{row}"
            );
        }
    }
    // Higher thresholds, fewer candidates; the oracle scores every position.
    let share = |flags: &str| {
        let common = "--json --device cpu --shapes 4/2x64 --context 4K --runs 1";
        rows(&format!("bench retrieve {common} {flags}"))[0]["scored_share"]
            .as_f64()
            .unwrap()
    };
    let [few, many] = ["2", "0.1"].map(|alpha| share(&format!("--methods lfps --lfps-alpha {alpha}")));
    assert!(0.0 < few && few < many && many < 1.0, "{few} {many}");
    assert_eq!(share("--methods topk"), 1.0);
}

#[test]
fn what_cannot_be_timed_is_refused() {
    kvsmith("bench attend --shapes 5/2x64").fails(2, "5/2x64", "");
    kvsmith("bench attend --shapes 4/2x60").fails(2, "4/2x60", "");
    kvsmith("bench attend --context 17M").fails(2, "17M", "");
    kvsmith("bench attend --kv 3bit").fails(2, "3bit", "");
    kvsmith("bench attend --kv 2bit --device cuda").fails(2, "2bit", "--device cpu");
    kvsmith("bench attend --batch 70000").fails(2, "70000", "");
    kvsmith("bench attend --context 16M --batch 60000 --device cpu").fails(2, "the data need", "--context");
    kvsmith("bench retrieve --device cpu --methods quest").fails(2, "quest", "lfps");
    kvsmith("bench retrieve --device cpu --methods topk --ranking plain").fails(2, "topk", "selfindex");
    kvsmith("bench retrieve --device cuda --methods a2ats --ranking plain").fails(3, "plain", "--device cpu");
    kvsmith("bench retrieve --device wgpu").fails(3, "wgpu", "--device cpu");
    kvsmith("bench decode --device wgpu").fails(3, "wgpu", "--device cpu");
    kvsmith("bench decode --device cpu --batch 60000").fails(2, "the data needs", "--batch");
    kvsmith("bench decode --device cpu --methods random").fails(2, "random", "wpq");
    kvsmith("bench decode --device cpu --context 16M").fails(2, "the data needs", "--context");
    let absent = kvsmith("bench decode --device cpu --model nope");
    assert!(!absent.stderr.contains("read bandwidth"), "{}", absent.stderr);
    absent.fails(1, "nope", "--model");
    kvsmith(&format!(
        "bench decode --device cuda --model {}",
        checkpoint("llama_default")
    ))
    .fails(2, "--model", "--config");
    kvsmith("bench decode --methods lfps --device cuda").fails(2, "lfps", "a2ats");
    kvsmith("bench decode --kv 2bit --device cuda").fails(2, "2bit", "--device cpu");
    kvsmith("bench decode --kv k=int8,v=int4 --device cuda").fails(2, "k=int8,v=int4", "--device cpu");
    kvsmith("bench decode --kv int8 --methods full,topk --device cuda").fails(2, "topk", "--device cpu");
}

/// On the CPU, a whole model is timed with the steps of `run`: what is read is what `run` reads of as many positions.
#[test]
fn whole_models_are_timed_on_the_cpu() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let bench =
        "--device cpu --context 300,500 --methods full,streaming,selfindex,wpq --budget 0.2 --runs 2 --json";
    let found = rows(&format!("bench decode --model {model} {bench}"));
    assert_eq!(found.len(), 8);
    let shapes = ["full", "streaming", "selfindex", "wpq"];
    for (row, (context, method)) in found
        .iter()
        .zip([300, 500].into_iter().flat_map(|n| shapes.map(|m| (n, m))))
    {
        assert_eq!(
            (&row["context"], &row["method"]),
            (&json!(context), &json!(method))
        );
        let [seconds, rate] = ["median_s", "tokens_per_s"].map(|key| number(row, key));
        assert!((seconds * rate - 1.0).abs() < 1e-9, "{row}");
        let share = number(row, "bytes_read_fraction");
        match method {
            "full" => assert!(
                (share - 1.0).abs() < 1e-9 && row["speedup_over_full"].is_null(),
                "{row}"
            ),
            _ => assert!(share < 0.8 && number(row, "speedup_over_full") > 0.0, "{row}"),
        }
        // A step reads all weights, and this share of the rows: of the largest caches, after the last of 30 steps.
        let rows = number(row, "bytes") - number(row, "weight_bytes");
        let most = share * number(row, "kv_bytes");
        assert!(rows <= most && rows > 0.8 * most, "{rows} {most}");
    }
    // Three sequences in one step read three times the rows, and the weights once.
    let together = rows(&format!("bench decode --model {model} {bench} --batch 3"));
    for (three, one) in together.iter().zip(&found) {
        let [seconds, rate] = ["median_s", "tokens_per_s"].map(|key| number(three, key));
        assert!((seconds * rate - 3.0).abs() < 1e-9, "{three}");
        let read = |row: &Value| number(row, "bytes") - number(row, "weight_bytes");
        assert!((read(three) / read(one) - 3.0).abs() < 1e-9, "{three} {one}");
        assert_eq!(three["bytes_read_fraction"], one["bytes_read_fraction"]);
        assert_eq!(number(three, "kv_bytes"), 3.0 * number(one, "kv_bytes"));
        assert_eq!(three["batch"], json!(3));
    }
    // A head plan, of which all heads are served alike or differ.
    let plan = |other: &str| {
        let heads = json!([{"method": "wpq", "budget": 0.2}, {"method": other, "budget": 0.2}]);
        let layers = json!([{"repeat": 2, "heads": heads}]);
        scratch.write(other, json!({"head_plan": {"layers": layers}}).to_string())
    };
    let planned = |plan: &str| {
        let timed = rows(&format!(
            "bench decode --model {model} {bench} --head-plan {plan}"
        ));
        assert_eq!(timed.len(), 10);
        let [at, rest] = [4, 9].map(|i| timed[i].clone());
        assert_eq!((&at["method"], &rest["context"]), (&json!("plan"), &json!(500)));
        assert!(
            number(&at, "speedup_over_full") > 0.0 && at["head_plan"]["layers"][0]["repeat"] == 2,
            "{at}"
        );
        at
    };
    let alike = planned(&plan("wpq"));
    for key in ["bytes_read_fraction", "kv_bytes", "index_bytes", "bytes"] {
        assert_eq!(alike[key], found[3][key], "{key}");
    }
    let mixed = planned(&plan("streaming"));
    let mean = |key: &str| f64::midpoint(number(&found[1], key), number(&found[3], key));
    for key in ["bytes_read_fraction", "index_bytes"] {
        let (own, mean) = (number(&mixed, key), mean(key));
        assert!((own - mean).abs() <= 1e-9 * mean, "{key}: {own} {mean}");
    }
    let refused = |plan: &str| {
        kvsmith(&format!(
            "bench decode --model {model} {bench} --head-plan {plan}"
        ))
    };
    refused(&plan("wpq+tail")).fails(2, "KV head 1", "without tails");
    kvsmith(&format!("bench decode --device cuda --head-plan {}", plan("wpq"))).fails(
        2,
        "--head-plan",
        "--device cpu",
    );
    // The same budget and positions through `run`: the static set and the chosen positions are the same.
    let prompt = scratch.tokens("prompt.json", &documents(&[300], 5));
    let run = format!(
        "run --model {model} --tokens {prompt} --method streaming --budget 0.2 --kv bf16 --max-new 31 --ignore-eos"
    );
    let run = kvsmith(&format!("{run} --json")).ok().json();
    let [own, other] = [&run, &found[1]].map(|row| number(row, "bytes_read_fraction"));
    assert!((own - other).abs() < 1e-9, "{own} {other}");
    // A shape with random weights, of a configuration.
    let config = format!("{model}/config.json");
    let drawn = rows(&format!("bench decode --config {config} {bench}"));
    for (drawn, found) in drawn.iter().zip(&found) {
        for key in ["bytes_read_fraction", "kv_bytes", "context"] {
            assert_eq!(drawn[key], found[key], "{key}");
        }
    }
    let weights = |row: &Value| number(row, "weight_bytes");
    // Both are in bf16, and as large.
    assert!(
        (weights(&found[0]) - weights(&drawn[0])).abs() < 1e-9,
        "{} {}",
        found[0],
        drawn[0]
    );
}

#[test]
fn encoding_is_set_against_a_product() {
    let found = rows(&format!(
        "bench encode --json --n 3000 --dim 24 --size 50 --runs 2 --seed {LAST_SEED}"
    ));
    let number = |name: &str| number(&found[0], name);
    assert_eq!(found[0]["runs"], 2);
    let rate = 2.0 * 3000.0 * 24.0 * 50.0 / number("median_s") * 1e-9;
    assert!((number("gflops") / rate - 1.0).abs() < 1e-9, "{}", found[0]);
    assert!(
        (number("gemm_share") * number("gemm_gflops") / rate - 1.0).abs() < 1e-9,
        "{}",
        found[0]
    );
    kvsmith("bench encode --size 70000").fails(2, "too large", "");
    kvsmith("bench encode --device cuda").fails(3, "CPU only", "--device cpu");
}

#[test]
fn a_layer_is_set_against_a_product() {
    let layer = "--heads 4 --kv-heads 2 --head-dim 24 --hidden 100 --intermediate 150";
    for (kind, tokens) in [("f32", "1,70"), ("bf16", "70")] {
        let found = rows(&format!(
            "bench prefill --json --tokens {tokens} {layer} --weights {kind} --runs 1 --seed {LAST_SEED}"
        ));
        let names: Vec<&str> = found.iter().filter_map(|row| row["name"].as_str()).collect();
        let once =
            ["q", "k", "v", "o", "gate", "up", "down", "attention"].map(|name| format!("prefill {name}"));
        let times = tokens.split(',').count();
        assert_eq!(names, [&once[..]].repeat(times).concat());
        // Products by hand; of attention, two for every position that a position sees.
        let of_70 = [
            96 * 100,
            48 * 100,
            48 * 100,
            96 * 100,
            150 * 100,
            150 * 100,
            150 * 100,
        ];
        let mut flops = of_70.map(|values| 2.0 * 70.0 * f64::from(values)).to_vec();
        flops.push(4.0 * 96.0 * (70.0 * 71.0 / 2.0));
        let of_70_tokens = &found[8 * (times - 1)..];
        assert_eq!(of_70_tokens.len(), flops.len());
        for (row, flop) in of_70_tokens.iter().zip(flops) {
            let number = |name: &str| number(row, name);
            let rate = flop / number("median_s") * 1e-9;
            assert!((number("gflops") / rate - 1.0).abs() < 1e-9, "{row}");
            let share = number("gemm_share") * number("gemm_gflops");
            assert!((share / rate - 1.0).abs() < 1e-9, "{row}");
            assert_eq!((&row["device"], &row["runs"]), (&"cpu".into(), &1.into()));
        }
        assert!(
            of_70_tokens[0]["shape"]
                .as_str()
                .expect("a shape")
                .ends_with(kind)
        );
    }
    kvsmith("bench prefill --device cuda").fails(3, "CPU only", "--device cpu");
    kvsmith("bench prefill --device wgpu").fails(3, "CPU only", "--device cpu");
    kvsmith("bench prefill --heads 5 --kv-heads 2").fails(2, "not a multiple", "");
    kvsmith("bench prefill --tokens 0").fails(2, "from 1 to 16M", "");
    kvsmith("bench prefill --tokens 16M").fails(2, "too large", "");
    kvsmith("bench prefill --hidden 1000000").fails(2, "too large", "");
    kvsmith("bench prefill --heads 1000000000000 --head-dim 1000000000000 --kv-heads 1").fails(
        2,
        "too large",
        "",
    );
    kvsmith("bench prefill --weights int8").fails(2, "f32, f16 or bf16", "");
    kvsmith("bench prefill --runs 0").fails(2, "--runs", "");
}

#[test]
fn a_fit_may_end_at_a_small_gain() {
    let passes = |more: &str| {
        let found = rows(&format!(
            "bench kmeans --json --n 2000 --dim 8 --size 20 --runs 1 --device cpu {more}"
        ));
        found[0]["shape"].as_str().expect("a shape").to_owned()
    };
    assert!(
        passes("--min-gain 0.5").contains("1 passes"),
        "{}",
        passes("--min-gain 0.5")
    );
    assert!(!passes("").contains(" 1 passes"), "{}", passes(""));
    kvsmith("bench kmeans --min-gain 1").fails(2, "less than 1", "");
}

/// Sizes whose products overflow or exceed the memory are refused before anything is allocated.
#[test]
fn absurd_sizes_are_refused() {
    const HUGE: &str = "1000000000 1000000000000000 9223372036854775807 18446744073709551615";
    let mut commands = Vec::new();
    for huge in HUGE.split(' ') {
        for flag in ["--n", "--dim", "--heads", "--size"] {
            commands.push(format!("kmeans --device cpu {flag} {huge}"));
        }
        commands.push(format!(
            "kmeans --device cpu --heads {huge} --n {huge} --dim {huge}"
        ));
        for flag in ["--n", "--dim", "--size"] {
            commands.push(format!("encode {flag} {huge}"));
        }
        for flags in [
            format!("--tokens {huge}"),
            format!("--heads {huge} --kv-heads 1"),
            format!("--heads {huge} --kv-heads {huge} --head-dim {huge}"),
            format!("--head-dim {huge}"),
            format!("--hidden {huge}"),
            format!("--intermediate {huge}"),
        ] {
            commands.push(format!("prefill {flags}"));
        }
        for flags in [
            format!("--context {huge}"),
            format!("--batch {huge}"),
            format!("--size {huge}"),
            format!("--shapes {huge}/1x128"),
            format!("--shapes {huge}/{huge}x{huge}"),
            format!("--shapes 32/8x{huge}"),
        ] {
            commands.push(format!("retrieve --device cpu {flags}"));
            commands.push(format!("attend --device cpu {flags}"));
        }
        for flag in ["--context", "--batch", "--size"] {
            commands.push(format!("decode --device cuda {flag} {huge}"));
            commands.push(format!("decode --device cpu {flag} {huge}"));
        }
    }
    commands.push("attend --device cpu --budget 1000000000000000".to_owned());
    // Every flag within its limits, and yet too much.
    commands
        .push("attend --device cpu --shapes 1024/1024x1024 --context 16M --batch 65535 --kv f32".to_owned());
    commands.push(
        "retrieve --device cpu --methods lfps --shapes 1024/1x1024 --context 16M --lfps-rows 16000000"
            .to_owned(),
    );
    commands.push("attend --device cpu --context 1K,16M --batch 1,60000".to_owned());
    for device in ["cpu", "cuda"] {
        commands.push(format!("decode --device {device} --runs 18446744073709551615"));
    }
    commands.push("decode --device cuda --context 16M --batch 65535".to_owned());
    for command in commands {
        let outcome = kvsmith(&format!("bench {command}"));
        assert_eq!(outcome.code, Some(2), "{command}: {}", outcome.stderr);
        assert_eq!(outcome.stdout, "", "{command}");
    }
    // Both amounts are said.
    let attend = kvsmith("bench attend --device cpu --context 16M --batch 60000");
    attend.fails(2, "GB are free", "--context");
}

/// `encode` and `prefill` have it in their own tests.
#[test]
fn any_seed_will_do() {
    for command in [
        "kmeans --device cpu --heads 2 --n 50 --dim 4 --size 3 --runs 1",
        "attend --device cpu --shapes 2/2x32 --context 500 --methods a2ats,lfps --runs 1",
    ] {
        kvsmith(&format!("bench {command} --seed {LAST_SEED}")).ok();
    }
}
