//! What `run` reports to have read equals a count of its trace.

use crate::common::*;
use kvsmith::internal::method::registry::METHODS;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// First and last positions that are always attended, and tokens to generate.
const SINKS: usize = 2;
const WINDOW: usize = 3;
const NEW: usize = 10;

/// The sizes of a golden checkpoint.
struct Sizes {
    name: &'static str,
    g: usize,
    d: usize,
    /// Per layer.
    windows: &'static [Option<usize>],
    /// Where the a2ats codebooks have queries stand.
    positions: &'static str,
}

const MODELS: [Sizes; 3] = [
    Sizes {
        name: "llama_default",
        g: 2,
        d: 16,
        windows: &[None, None],
        positions: "window",
    },
    Sizes {
        name: "qwen2_sliding",
        g: 2,
        d: 8,
        windows: &[None, Some(12), Some(12)],
        positions: "buckets",
    },
    Sizes {
        name: "mistral_sliding",
        g: 1,
        d: 16,
        windows: &[Some(16), Some(16)],
        positions: "window",
    },
];

/// What a trace says of one layer.
#[derive(Default)]
struct Counted {
    choices: usize,
    rows: usize,
    visible: usize,
    full: usize,
    index: usize,
    /// Bytes that memory moves, of the cache and of the index.
    moved: usize,
}

/// The bytes that a memory of 64-byte lines moves for items of an array, of `width` bytes each.
fn lines(width: usize, places: impl IntoIterator<Item = usize>) -> usize {
    let bytes = places
        .into_iter()
        .flat_map(|place| place * width..(place + 1) * width);
    64 * bytes.map(|byte| byte / 64).collect::<BTreeSet<_>>().len()
}

/// The words of a group of pqcache: at most 2^6, and no more than the prompt has keys beside the sinks.
fn words(prompt: usize) -> usize {
    64.min(prompt - SINKS)
}

/// The bytes that memory moves of the index, for a choice of `chosen` of the candidates from `start` to `end` with
/// `visible` positions, after a prompt of `prompt` tokens; `None` where the trace does not tell.
fn moved_index(
    method: &str,
    kv: &str,
    sizes: &Sizes,
    prompt: usize,
    [start, end, chosen]: [usize; 3],
    visible: std::ops::Range<usize>,
) -> Option<usize> {
    let d = sizes.d;
    let float = if ["f16", "bf16"].contains(&kv) { 2 } else { 4 };
    Some(match method {
        "full" | "topk" | "random" | "streaming" => 0,
        "quest" => lines(2 * float * d, (start..end).map(|p| p / 16)),
        // The words are held in single precision.
        "pqcache" => lines(1, 12 * start / 8..(12 * end).div_ceil(8)) + lines(4 * words(prompt) * d, [0]),
        "randsign" => lines(d / 8, start..end) + lines(256 * 4 * d / 8, [0]),
        "snapkv" => lines(4 * chosen, [0]),
        "h2o" => lines(8, start..end),
        // The codewords in panels of 32 in half precision, L^-1 in double precision, the counts, and a code per candidate.
        "a2ats" if sizes.positions == "window" => {
            lines(2 * 32 * d + 8 * d * d, [0]) + lines(4 * 8, [0]) + lines(2, start..end)
        }
        "selfindex" => lines(d / 8, visible) + lines(16 * 4 * d, [0]),
        "doublesparsity" => lines((d / 8).div_ceil(2) + 4, start..end) + lines(8 * (d / 8), [0]),
        _ => return None,
    })
}

/// The bytes that memory moves of the cache: the keys in one array, or their signs in another, and the values.
fn moved_rows(kv: &str, d: usize, attended: &BTreeSet<usize>) -> usize {
    let rows = |width: usize| lines(width, attended.iter().copied());
    match kv {
        "f32" => 2 * rows(4 * d),
        "f16" | "bf16" => 2 * rows(2 * d),
        _ => rows(d / 8) + 2 * rows(packed_width(d)),
    }
}

/// Bytes of the index for a choice of `chosen` of `n` candidates from position `start` on, with `seen` visible
/// positions, after a prompt of `prompt` tokens; `None` where the trace does not tell.
fn index_bytes(
    method: &str,
    kv: &str,
    sizes: &Sizes,
    prompt: usize,
    [start, n, seen, chosen]: [usize; 4],
) -> Option<usize> {
    let d = sizes.d;
    let float = if ["f16", "bf16"].contains(&kv) { 2 } else { 4 };
    Some(match method {
        "full" | "topk" | "random" | "streaming" => 0,
        "quest" => 2 * float * d * ((start + n).div_ceil(16) - start / 16),
        // Two numbers of 6 bits per candidate, and the words in half precision.
        "pqcache" => (12 * (start + n)).div_ceil(8) - 12 * start / 8 + 2 * words(prompt) * d,
        // A bit per channel, and a count of 4 bytes for each of the 256 patterns of 8 channels.
        "randsign" => n * d / 8 + 256 * 4 * d / 8,
        "snapkv" => 4 * chosen,
        "h2o" => 8 * n,
        // 8 codewords, once for all buckets, and a code per candidate: too few of them for lists.
        "a2ats" => 2 * 8 * d + 2 * n,
        // The signs, and 16 centroids for every 4 channels.
        "selfindex" => seen * d / 8 + 16 * 4 * d,
        // Twice 8 groups of 16 words, the map of the query and both means; 4 bytes per candidate, and as many per refined one.
        "wpq" => 4 * (n + n.min(4 * chosen)) + (2 * 2 * 16 + 2 * d) * 8 * d.div_ceil(8) + 8 * d,
        // Two codes per byte, a minimum and a step; and the numbers of the channels.
        "doublesparsity" => n * ((d / 8).div_ceil(2) + 4) + 4 * (d / 8),
        _ => return None,
    })
}

/// Counts the lines of a trace, per layer.
fn count(
    trace: &str,
    method: &str,
    kv: &str,
    sizes: &Sizes,
    prompt: usize,
    budget: f64,
) -> (Vec<Counted>, [bool; 2]) {
    let mut layers: Vec<Counted> = sizes.windows.iter().map(|_| Counted::default()).collect();
    let (mut known, mut moves_known) = (true, true);
    for line in json_lines(trace) {
        let at = |key: &str| line[key].as_u64().unwrap() as usize;
        let (end, layer) = (prompt + at("step") + 1, at("layer"));
        let start = sizes.windows[layer].map_or(0, |w| end.saturating_sub(w));
        let last = (end - WINDOW).max(start);
        let first = SINKS.clamp(start, last);
        let positions = line["positions"].as_array().unwrap();
        let chosen = positions.len();
        let (n, seen) = (last - first, end - start);
        let most = if budget > 1.0 {
            budget as usize
        } else {
            ((budget * seen as f64) as usize).max(1)
        };
        let counted = &mut layers[layer];
        counted.choices += 1;
        counted.rows += seen - n + chosen;
        counted.visible += seen;
        counted.full += usize::from(chosen == n);
        let positions = positions.iter().map(|p| p.as_u64().unwrap() as usize);
        let attended: BTreeSet<usize> = (start..first).chain(positions).chain(last..end).collect();
        counted.moved += moved_rows(kv, sizes.d, &attended);
        if most < n {
            match moved_index(method, kv, sizes, prompt, [first, last, chosen], start..end) {
                Some(bytes) => counted.moved += bytes,
                None => moves_known = false,
            }
            match index_bytes(method, kv, sizes, prompt, [first, n, seen, chosen]) {
                Some(bytes) => counted.index += bytes,
                None => known = false,
            }
        }
    }
    (layers, [known, moves_known])
}

#[test]
fn the_counters_are_those_of_the_trace() {
    for sizes in &MODELS {
        let scratch = Scratch::new();
        let model = checkpoint(sizes.name);
        let ids = golden_ids(sizes.name, "ids");
        let (prompt, trace, mut moves) = (ids.len(), scratch.path("trace"), 0);
        let tokens = scratch.tokens("prompt.json", &[ids]);
        let texts = scratch.tokens("texts.json", &documents(&[60, 60], 1));
        let art = scratch.make(
            "art",
            &format!(
                "calibrate --model {model} --tokens {texts} --size 8 --seq-len 60 --peers --positions {}",
                sizes.positions
            ),
        );
        for (method, budget, kv) in METHODS.iter().flat_map(|m| {
            let kinds = [("0.2", "f32"), ("5", "bf16"), ("1.0", "f16"), ("3", "2bit")];
            kinds.map(|(budget, kv)| (m.as_str(), budget, kv))
        }) {
            let what = format!("{} {method} {budget} {kv}", sizes.name);
            // No query head bypasses its choice, of which the trace says nothing.
            let run = kvsmith(&format!(
                "run --json --ignore-eos --model {model} --artifact {art} --tokens {tokens} --max-new {NEW} \
                 --sinks {SINKS} --window {WINDOW} --budget {budget} --method {method} --kv {kv} --lfps-theta 1 \
                 --overwrite --trace {trace}"
            ));
            let told = run.stderr.clone();
            let json = run.json();
            let text = std::fs::read_to_string(&trace).unwrap();
            let (layers, [known, moves_known]) =
                count(&text, method, kv, sizes, prompt, budget.parse().unwrap());
            let sum = |of: fn(&Counted) -> usize| layers.iter().map(of).sum::<usize>();
            let [rows, full, choices] = [sum(|c| c.rows), sum(|c| c.full), sum(|c| c.choices)];
            assert_eq!(choices, (NEW - 1) * sizes.g * layers.len(), "{what}");
            assert_eq!(json["choices"], choices, "{what}");
            assert_eq!(json["rows_read"], rows, "{what}");
            assert_eq!(json["bypasses"], full, "{what}");
            assert_eq!(json["bypassed_heads"], 0, "{what}");
            assert_eq!(json["fallbacks"], json!([]), "{what}");
            // Bytes: a row has a key and a value; in 2 bits signs, 2-bit magnitudes and 2-bit values with scales.
            let key = match kv {
                "f32" => 4 * sizes.d,
                "f16" | "bf16" => 2 * sizes.d,
                _ => sizes.d / 8 + packed_width(sizes.d),
            };
            let row = if kv == "2bit" {
                key + packed_width(sizes.d)
            } else {
                2 * key
            };
            let ranked = json["keys_ranked"].as_u64().unwrap() as usize;
            if !["lfps", "ctkvr"].contains(&method) {
                assert_eq!(ranked, 0, "{what}");
            }
            assert_eq!(json["kv_bytes_read"], rows * row + ranked * key, "{what}");
            let index = json["index_bytes_read"].as_u64().unwrap() as usize;
            let bytes = rows * row + ranked * key + index;
            assert_eq!(json["bytes_read"], bytes, "{what}");
            let share = bytes as f64 / (row * sum(|c| c.visible)) as f64;
            assert_eq!(json["bytes_read_fraction"], json!(share), "{what}");
            let float = if kv == "2bit" { 4 * sizes.d } else { row };
            let share = bytes as f64 / (float * sum(|c| c.visible)) as f64;
            assert_eq!(json["uncompressed_read_fraction"], json!(share), "{what}");
            // Memory moves whole lines: more than is read.
            let visible = (row * sum(|c| c.visible)) as f64;
            let moved = json["bytes_moved_fraction"].as_f64().unwrap() * visible;
            if moves_known {
                assert!(
                    (moved - sum(|c| c.moved) as f64).abs() < 1e-6 * visible,
                    "{what}: {moved}"
                );
                moves += 1;
            } else {
                assert!(moved > sum(|c| c.moved) as f64, "{what}: {moved}");
            }
            assert!(
                moved > bytes as f64 - 1e-6 * visible,
                "{what}: {moved} of {bytes}"
            );
            assert_eq!(json["granule"], 64);
            // triattention keeps scores in a step that makes them; these steps are too few for that.
            let keeps_nothing = ["full", "random", "streaming", "snapkv", "topk", "triattention"]
                .contains(&method)
                || full == choices;
            let scratch = json["scratch_bytes_fraction"].as_f64().unwrap();
            assert_eq!(scratch == 0.0, keeps_nothing, "{what}: {scratch}");
            if known {
                assert_eq!(index, sum(|c| c.index), "{what}");
            } else {
                assert!(index > 0, "{what}");
            }
            let of_layers = json["layers"].as_array().unwrap();
            assert_eq!(of_layers.len(), layers.len());
            for ((of_layer, layer), window) in of_layers.iter().zip(&layers).zip(sizes.windows) {
                let method = if layer.full == layer.choices {
                    "full"
                } else {
                    method
                };
                let expected = json!({
                    "method": method, "model_window": window, "rows_read": layer.rows, "bypasses": layer.full,
                    "full_heads": [],
                });
                assert_eq!(of_layer, &expected, "{what}");
            }
            for said in [
                format!("  {rows} rows and "),
                format!("  {full} of {choices} choices read everything"),
            ] {
                let lines = told.lines().filter(|line| line.starts_with(&said));
                assert_eq!(lines.count(), 1, "{what}: {told}");
            }
        }
        assert!(moves >= 30, "{}: {moves}", sizes.name);
    }
}

/// Bytes of a row's 2-bit numbers, and of a scale and a zero in f16 for every 32 of them.
fn packed_width(d: usize) -> usize {
    d / 4 + 4 * d.div_ceil(32)
}

/// A sliding-window layer that the static set covers has full attention, whatever the method.
#[test]
fn a_layer_in_which_nothing_is_chosen_is_named() {
    let scratch = Scratch::new();
    let tokens = scratch.tokens("prompt.json", &[golden_ids("qwen2_sliding", "ids")]);
    let run = kvsmith(&format!(
        "run --json --ignore-eos --model {} --tokens {tokens} --max-new 5 --sinks 2 --window 12 --budget 2 --method streaming",
        checkpoint("qwen2_sliding")
    ));
    assert!(
        run.stderr.contains("full attention in layers 1, 2"),
        "{}",
        run.stderr
    );
    let json = run.json();
    let names: Vec<&Value> = json["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|l| &l["method"])
        .collect();
    assert_eq!(names, ["streaming", "full", "full"]);
    // Without a decode step nothing was chosen and nothing read.
    let none = kvsmith(&format!(
        "run --json --model {} --tokens {tokens} --max-new 1 --method streaming",
        checkpoint("qwen2_sliding")
    ));
    let json = none.json();
    assert_eq!((&json["choices"], &json["bytes_read"]), (&json!(0), &json!(0)));
    assert_eq!(json["bytes_read_fraction"], Value::Null);
}
