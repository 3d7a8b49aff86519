//! `eval`: its metrics against naive computations, and the properties that they must have.

use std::time::Duration;

use crate::common::*;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::compute::reference;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::kv::map::ModelMaps;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{KvHead, KvType, Limits};
use kvsmith::internal::method::registry::{METHODS, MethodName};
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::method::{Method, Place, Prompt, Step};
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::forward::Rows;
use kvsmith::internal::runner::{Counts, DecodeOptions, Session};
use ndarray::{Array1, ArrayView1, Axis, s};
use serde_json::{Value, json};

/// A golden checkpoint with an artifact and documents.
struct Model {
    scratch: Scratch,
    name: &'static str,
    documents: Vec<Vec<u32>>,
    /// `--model` and `--artifact`.
    files: String,
    /// `--tokens`.
    tokens: String,
}

impl Model {
    fn new(name: &'static str, lengths: &[usize]) -> Self {
        let scratch = Scratch::new();
        let model = scratch.model("model", name);
        let texts = scratch.tokens("texts.json", &documents(&[80, 80], 1));
        let calibrate = format!("calibrate --model {model} --tokens {texts} --size 8 --holdout 0 --peers");
        let artifact = scratch.make("art", &calibrate);
        let documents = documents(lengths, 9);
        let tokens = scratch.tokens("eval.json", &documents);
        Self {
            files: format!("--model {model} --artifact {artifact}"),
            tokens,
            scratch,
            name,
            documents,
        }
    }

    #[track_caller]
    fn eval(&self, options: &str) -> Value {
        kvsmith(&format!(
            "eval {} --tokens {} --json {options}",
            self.files, self.tokens
        ))
        .json()
    }
}

#[test]
fn the_oracle_covers_most_and_the_whole_budget_is_exact() {
    for name in ["llama_default", "qwen2_sliding", "llama_d128", "qwen2_bias"] {
        let model = Model::new(name, &[90, 50]);
        let json = model.eval(&format!(
            "--methods {} --budgets 0.1,9,1.0 --decode 12 --sinks 1 --window 3 --per-head",
            method_list()
        ));
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 3 * METHODS.len());
        assert_eq!((&json["blocks"], &json["steps"]), (&json!(2), &json!(24)));
        let of = |method: &str, budget: f64| {
            let found = rows
                .iter()
                .find(|r| r["method"] == json!(method) && r["budget"] == json!(budget));
            found.unwrap()
        };
        for row in rows {
            let what = format!("{name} {} {}", row["method"], row["budget"]);
            let budget = number(row, "budget");
            for key in ["recall", "mass"] {
                assert!((0.0..=1.0 + 1e-6).contains(&number(row, key)), "{what}: {key}");
            }
            let method = row["method"].as_str().unwrap();
            if budget == 1.0 || method == "full" {
                assert_eq!(number(row, "recall"), 1.0, "{what}");
                assert!(number(row, "kl") < 1e-9, "{what}: {row}");
                assert!(number(row, "output_error") < 1e-5, "{what}");
                assert!((number(row, "mass") - 1.0).abs() < 1e-5, "{what}");
                continue;
            }
            // In every layer and head too.
            let best = of("topk", budget);
            let heads = |row: &Value| row["per_head"].as_array().unwrap().clone();
            for (own, best) in heads(row).iter().zip(heads(best)) {
                assert!(
                    number(own, "mass") <= number(&best, "mass") + 1e-6,
                    "{what}: {own} {best}"
                );
            }
            assert!(number(row, "mass") <= number(best, "mass") + 1e-6, "{what}");
            assert!(
                number(row, "recall") <= 1.0 && number(best, "recall") == 1.0,
                "{what}"
            );
            let mean: f64 =
                heads(row).iter().map(|h| number(h, "recall")).sum::<f64>() / heads(row).len() as f64;
            assert!((mean - number(row, "recall")).abs() < 1e-9, "{what}");
        }
    }
}

/// Without choices along the full trajectory, losses are the same, and what needs these choices is missing.
#[test]
fn losses_alone_are_those_of_a_whole_measurement() {
    let model = Model::new("llama_default", &[90, 50]);
    let command = "--methods topk,quest --budgets 9 --decode 12 --sinks 1 --window 3";
    let whole = model.eval(command);
    let losses = model.eval(&format!("{command} --losses-only"));
    let rows = |json: &Value| json["rows"].as_array().unwrap().clone();
    assert_eq!(rows(&losses).len(), 2);
    for (own, all) in rows(&losses).iter().zip(rows(&whole)) {
        for key in [
            "kl",
            "kl_p99",
            "top1_equal",
            "perplexity_ratio",
            "kl_by_block",
            "by_position",
            "bytes_read_fraction",
            "index_bits_per_token",
        ] {
            assert!(own[key] == all[key] && !own[key].is_null(), "{key}: {own} {all}");
        }
        for key in ["recall", "mass", "output_error"] {
            assert!(
                own[key].is_null() && own["by_turn"][0][key].is_null() && !all[key].is_null(),
                "{key}: {own}"
            );
        }
        assert!(
            own.get("output_error_by_layer").is_none() && all.get("output_error_by_layer").is_some(),
            "{own}"
        );
    }
    let shown = kvsmith(&format!(
        "eval {} --tokens {} {command} --losses-only",
        model.files, model.tokens
    ))
    .ok()
    .stdout;
    assert!(
        shown.contains("KL nats") && !shown.contains("recall") && !shown.contains("mass"),
        "{shown}"
    );
    let input = "--methods topk --needles auto --losses-only";
    kvsmith(&format!("eval --model {} {input}", checkpoint("llama_default"))).fails(2, "--losses-only", "");
}

/// Recall, mass and output error of the last B candidates (`streaming`) at position `t` of KV head `c`.
fn naive(states: &Rows, c: usize, t: usize, model_window: Option<usize>, budget: f64) -> [f64; 3] {
    let (sinks, window) = (2, 4);
    let (h, _, d) = states.q.rope.dim();
    let r = h / states.k.rope.dim().0;
    let visible: Vec<usize> = (model_window.map_or(0, |w| (t + 1).saturating_sub(w))..t + 1).collect();
    let b = ((budget * visible.len() as f64).floor() as usize).max(1);
    let last = (t + 1 - window).max(visible[0]);
    let first = sinks.clamp(visible[0], last);
    let chosen: Vec<usize> = (last.saturating_sub(b).max(first)..last).collect();
    let attended: Vec<usize> = (visible[0]..first)
        .chain(chosen.clone())
        .chain(last..t + 1)
        .collect();
    let mut probability = vec![0.0; t + 1];
    let (mut mass, mut error, mut size) = (0.0, 0.0, 0.0);
    for a in c * r..(c + 1) * r {
        let q = states.q.rope.slice(s![a, t, ..]);
        let (k, v) = (states.k.rope.slice(s![c, .., ..]), states.v.slice(s![c, .., ..]));
        let score = |p: usize| reference::dot(q, k.row(p)) / (d as f64).sqrt();
        let sum: f64 = visible.iter().map(|p| score(*p).exp()).sum();
        for p in &visible {
            probability[*p] += score(*p).exp() / sum;
        }
        mass += attended.iter().map(|p| score(*p).exp() / sum).sum::<f64>() / r as f64;
        let full = reference::attention(q, k, v, visible.iter().copied());
        let sparse = reference::attention(q, k, v, attended.iter().copied());
        error += (&sparse - &full).mapv(|x| x * x).sum();
        size += full.mapv(|x| x * x).sum();
    }
    let mut order: Vec<usize> = (first..last).collect();
    order.sort_by(|i, j| probability[*j].total_cmp(&probability[*i]).then(i.cmp(j)));
    order.truncate(b);
    let found = order.iter().filter(|p| chosen.contains(p)).count();
    let recall = if order.is_empty() {
        1.0
    } else {
        found as f64 / order.len() as f64
    };
    [recall, mass, (error / size).sqrt()]
}

/// `a2ats` scores keys at one fixed distance, which costs recall where positions are rotated. Sections and indexes of layers
/// without rotation must do without: a2ats then finds more.
#[test]
fn layers_without_rotation_are_indexed_without() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "smollm3_nope");
    let types = vec!["full_attention"; 4];
    edit_json(
        &format!("{model}/config.json"),
        &json!({ "use_sliding_window": false, "layer_types": types }),
    );
    let tokens = scratch.tokens("tokens.json", &documents(&[300; 6], 1));
    let artifact = scratch.make(
        "art",
        &format!(
            "calibrate --model {model} --tokens {tokens} --seq-len 300 --size 32 --wrope-position 64 --no-verdict"
        ),
    );
    let json = kvsmith(&format!(
        "eval --model {model} --artifact {artifact} --tokens {tokens} --seq-len 300 --decode 8 --methods wpq,a2ats \
         --budgets 0.2 --per-head --json"
    ))
    .json();
    let recalls = |row: usize, rotates: bool| -> Vec<f64> {
        let heads = json["rows"][row]["per_head"].as_array().unwrap();
        let heads = heads
            .iter()
            .filter(|head| (head["layer"].as_u64().unwrap() % 2 == 0) == rotates);
        heads.map(|head| head["recall"].as_f64().unwrap()).collect()
    };
    let least = |values: Vec<f64>| values.into_iter().fold(1.0, f64::min);
    let most = |values: Vec<f64>| values.into_iter().fold(0.0, f64::max);
    assert!(
        least(recalls(0, true)) > 0.9 && least(recalls(0, false)) > 0.9,
        "{json}"
    );
    let [with, without] = [most(recalls(1, true)), least(recalls(1, false))];
    assert!(without > with + 0.1, "{with} {without}");
}

#[test]
fn metrics_are_those_of_the_definition() {
    for (name, lengths) in [
        ("llama_default", [60, 33]),
        ("mistral_sliding", [40, 50]),
        ("qwen3_norm", [70, 20]),
    ] {
        let model = Model::new(name, &lengths);
        let decoder = Decoder::open(&golden(name)).unwrap();
        let c = &decoder.config;
        let budget = 0.15;
        let json = model.eval(&format!(
            "--methods streaming --budgets {budget} --decode 10 --sinks 2 --window 4 --per-head"
        ));
        let row = &json["rows"][0];
        let all: Vec<Vec<Rows>> = model
            .documents
            .iter()
            .map(|ids| captured(&decoder, ids))
            .collect();
        for head in row["per_head"].as_array().unwrap() {
            let (layer, kv) = (
                head["layer"].as_u64().unwrap() as usize,
                head["kv_head"].as_u64().unwrap() as usize,
            );
            let mut sums = [0.0; 3];
            for (ids, states) in model.documents.iter().zip(&all) {
                for t in ids.len() - 10..ids.len() {
                    let one = naive(&states[layer], kv, t, c.blocks[layer].window, budget);
                    sums.iter_mut().zip(one).for_each(|(s, x)| *s += x / 20.0);
                }
            }
            for (key, expected) in ["recall", "mass", "output_error"].iter().zip(sums) {
                let actual = number(head, key);
                assert!(
                    (actual - expected).abs() < 1e-4,
                    "{name} {head}: {key} {expected}"
                );
            }
        }
        let expected = naive_kl(&decoder, &model.documents, budget);
        let kl = number(row, "kl");
        assert!(
            (kl - expected).abs() < 1e-6 + 1e-3 * expected,
            "{name}: {kl} {expected}"
        );
        assert!(kl > 1e-6, "{name}: nothing is lost");
    }
}

/// Mean KL of the next token between two sessions fed the same tokens.
fn naive_kl(decoder: &Decoder, documents: &[Vec<u32>], budget: f64) -> f64 {
    let mut sum = 0.0;
    for ids in documents {
        let logits = |name: MethodName| -> Vec<Array1<f64>> {
            let method = prepared(name, None, decoder);
            let options = DecodeOptions {
                limits: Limits {
                    sinks: 2,
                    window: 4,
                    ..Limits::new(Budget::Fraction(budget))
                },
                kv: KvType::F32,
                packed: Center::Median.into(),
                maps: ModelMaps::HADAMARD,
                granule: 64,
            };
            let mut session = Session::on_cpu(decoder, method.as_ref(), options, ids.len()).unwrap();
            let (prompt, rest) = ids.split_at(ids.len() - 10);
            session.prefill(prompt).unwrap();
            let step = |id: &u32| session.step(*id).unwrap().mapv(f64::from);
            rest.iter().map(step).collect()
        };
        for (full, own) in logits(method("full")).iter().zip(logits(method("streaming"))) {
            sum += divergence(full, &own);
        }
    }
    sum / (10 * documents.len()) as f64
}

/// KL of the softmax of two rows of logits.
fn divergence(p: &Array1<f64>, q: &Array1<f64>) -> f64 {
    let log_softmax = |x: &Array1<f64>| {
        let sum: f64 = x.iter().map(|v| v.exp()).sum();
        x.mapv(|v| v - sum.ln())
    };
    let (p, q) = (log_softmax(p), log_softmax(q));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// The shares of a row that a session counts, too.
const SHARES: [&str; 5] = [
    "kv_read_fraction",
    "exact_dot_fraction",
    "bytes_read_fraction",
    "bytes_moved_fraction",
    "scratch_bytes_fraction",
];

/// What a session of a method says when it is driven turn by turn: per turn, the logits after every decode
/// step; and its [`SHARES`].
struct Driven {
    turns: Vec<Vec<Array1<f64>>>,
    shares: [f64; 5],
}

/// Drives a session through `turns`, each a prompt and tokens that are fed one by one.
fn drive(
    decoder: &Decoder,
    artifact: &Artifact,
    (name, budget): (MethodName, Budget),
    kv: KvType,
    turns: &[(Vec<u32>, Vec<u32>)],
) -> Driven {
    let method = prepared(name, Some(artifact), decoder);
    let options = DecodeOptions {
        limits: Limits {
            sinks: 1,
            window: 3,
            ..Limits::new(budget)
        },
        kv,
        packed: Center::Median.into(),
        maps: ModelMaps::HADAMARD,
        granule: 64,
    };
    let mut session = Session::on_cpu(decoder, method.as_ref(), options, 200).unwrap();
    let mut turn = |(prompt, rest): &(Vec<u32>, Vec<u32>)| -> Vec<Array1<f64>> {
        let first = session.prefill(prompt).unwrap();
        let steps: Vec<_> = rest.iter().map(|id| session.step(*id).unwrap()).collect();
        let all = std::iter::once(first).chain(steps);
        all.map(|logits| logits.mapv(f64::from)).collect()
    };
    let turns = turns.iter().map(&mut turn).collect();
    let shares = session.shares().unwrap();
    let counts: Counts = session.counts().unwrap().into_iter().sum();
    let bytes = [
        counts.bytes_fraction(),
        counts.moved_fraction(),
        counts.scratch_fraction(),
    ];
    let [bytes, moved, scratch] = bytes.map(|share| share.unwrap_or(0.0));
    Driven {
        turns,
        shares: [shares.read, shares.products, bytes, moved, scratch],
    }
}

#[test]
fn every_turn_is_that_of_a_session() {
    for (name, kv, flag) in [
        ("llama_default", KvType::F32, "f32"),
        ("qwen2_sliding", KvType::F32, "f32"),
        ("llama_default", KvType::F16, "f16"),
        ("llama_default", KvType::TWO_BIT, "2bit"),
    ] {
        // Turns of 30 tokens: 25 in the prompt, 5 fed one by one.
        let model = Model::new(name, &[120]);
        let decoder = Decoder::open(&golden(name)).unwrap();
        let artifact = Artifact::open(model.scratch.path("art").as_ref(), SECTIONS).unwrap();
        let json = model.eval(&format!(
            "--methods {} --budgets 0.15 --turns 4 --decode 5 --sinks 1 --window 3 --kv {flag}",
            method_list()
        ));
        assert_eq!((&json["turns"], &json["steps"]), (&json!(4), &json!(20)));
        let parts = model.documents[0].chunks(30).map(|turn| turn.split_at(25));
        let turns: Vec<_> = parts.map(|(p, r)| (p.to_vec(), r.to_vec())).collect();
        let full = drive(
            &decoder,
            &artifact,
            (method("full"), Budget::Fraction(1.0)),
            KvType::F32,
            &turns,
        );
        for (row, method) in json["rows"].as_array().unwrap().iter().zip(METHODS) {
            let own = drive(&decoder, &artifact, (*method, Budget::Fraction(0.15)), kv, &turns);
            let what = format!("{name} {flag} {}", method.as_str());
            let shares = SHARES.map(|key| number(row, key));
            for (share, expected) in shares.iter().zip(own.shares) {
                assert!(
                    (share - expected).abs() < 1e-9,
                    "{what}: {shares:?} {:?}",
                    own.shares
                );
            }
            let by_turn = row["by_turn"].as_array().unwrap();
            assert_eq!(by_turn.len(), 4, "{what}");
            for (i, turn) in by_turn.iter().enumerate() {
                // What follows the prompt is not measured.
                let pairs = full.turns[i][1..].iter().zip(&own.turns[i][1..]);
                let expected = pairs.map(|(p, q)| divergence(p, q)).sum::<f64>() / 5.0;
                let kl = number(turn, "kl");
                assert!(
                    (kl - expected).abs() < 1e-6 + 1e-3 * expected,
                    "{what}, turn {i}: {kl} {expected}"
                );
            }
            let mean = by_turn.iter().map(|t| number(t, "recall")).sum::<f64>() / 4.0;
            assert!((mean - number(row, "recall")).abs() < 1e-9, "{what}");
        }
    }
}

/// Recall of a method that is driven by hand along the states of full attention, per turn: the mean over
/// the KV heads of one layer.
fn shadow_recall(
    states: &Rows,
    method: &dyn Method,
    place: &Place,
    turns: &[(Vec<u32>, Vec<u32>)],
) -> Vec<f64> {
    let (h, _, d) = states.q.rope.dim();
    let (g, r) = (states.k.rope.dim().0, place.group);
    assert_eq!(h, g * r);
    let mut recalls = vec![0.0; turns.len()];
    for c in 0..g {
        let (k, v) = (states.k.rope.slice(s![c, .., ..]), states.v.slice(s![c, .., ..]));
        let mut head = method.head(&Place { kv_head: c, ..*place });
        let mut kv = KvHead::new(place.kv, d, 1, Center::Median);
        let (mut t, mut steps) = (0, 0);
        for (turn, (prompt, rest)) in turns.iter().enumerate() {
            // Earlier rows as the cache gives them.
            let end = t + prompt.len();
            let (mut keys, mut values) = (
                k.slice(s![..end, ..]).to_owned(),
                v.slice(s![..end, ..]).to_owned(),
            );
            let mut scratch = vec![0.0; d];
            for p in 0..t {
                keys.row_mut(p)
                    .assign(&ArrayView1::from(kv.keys().row(p, &mut scratch)));
                values
                    .row_mut(p)
                    .assign(&ArrayView1::from(kv.values().row(p, &mut scratch)));
            }
            let q_rope = states.q.rope.slice(s![c * r..(c + 1) * r, t..end, ..]);
            let last = q_rope.index_axis(Axis(1), prompt.len() - 1);
            let query = last.mean_axis(Axis(0)).unwrap().to_vec();
            kv.prompt(keys.view(), values.view(), &query, 0..end);
            head.prefill(&Prompt {
                first: t,
                k_pre: states.k.pre.slice(s![c, t..end, ..]),
                q_rope,
                keys: keys.view(),
                values: values.view(),
                kv: &kv,
            });
            t = end;
            for _ in rest {
                kv.extend(k.slice(s![t..t + 1, ..]), v.slice(s![t..t + 1, ..]));
                head.append(states.k.pre.slice(s![c, t..t + 1, ..]), k.slice(s![t..t + 1, ..]));
                let q = states.q.rope.slice(s![c * r..(c + 1) * r, t, ..]);
                let step = Step {
                    step: steps,
                    visible: 0..t + 1,
                    candidates: place.limits.sinks..t + 1 - place.limits.window,
                    budget: place.limits.budget.positions(t + 1),
                    q_pre: states.q.pre.slice(s![c * r..(c + 1) * r, t, ..]),
                    q_rope: q,
                    kv: &kv,
                };
                let chosen = head.select(&step).positions;
                let mut probability = vec![0.0; t + 1];
                for q in q.rows() {
                    let weight = |p: usize| (reference::dot(q, k.row(p)) / (d as f64).sqrt()).exp();
                    let sum: f64 = (0..=t).map(weight).sum();
                    (0..=t).for_each(|p| probability[p] += weight(p) / sum);
                }
                let mut best: Vec<usize> = step.candidates.clone().collect();
                best.sort_by(|i, j| probability[*j].total_cmp(&probability[*i]).then(i.cmp(j)));
                best.truncate(step.budget);
                let found = best.iter().filter(|p| chosen.contains(&(**p as u32))).count();
                recalls[turn] += found as f64 / best.len() as f64 / (g * rest.len()) as f64;
                t += 1;
                steps += 1;
            }
        }
    }
    recalls
}

#[test]
fn recall_is_that_of_a_choice_along_the_full_trajectory() {
    let model = Model::new("llama_default", &[120]);
    let decoder = Decoder::open(&golden(model.name)).unwrap();
    let artifact = Artifact::open(model.scratch.path("art").as_ref(), SECTIONS).unwrap();
    let c = &decoder.config;
    let states = captured(&decoder, &model.documents[0]);
    let parts = model.documents[0].chunks(30).map(|turn| turn.split_at(25));
    let turns: Vec<_> = parts.map(|(p, r)| (p.to_vec(), r.to_vec())).collect();
    // Those that do not learn from what was attended.
    let names = ["topk", "quest", "snapkv", "a2ats", "selfindex", "ctkvr"].map(method);
    let list = names.map(|name| name.as_str()).join(",");
    for (kv, flag) in [
        (KvType::F32, "f32"),
        (KvType::BF16, "bf16"),
        (KvType::TWO_BIT, "2bit"),
    ] {
        let json = model.eval(&format!(
            "--methods {list} --budgets 8 --turns 4 --decode 5 --sinks 1 --window 3 --kv {flag}"
        ));
        for (row, name) in json["rows"].as_array().unwrap().iter().zip(names) {
            let method = prepared(name, Some(&artifact), &decoder);
            let mut expected = vec![0.0; 4];
            for (layer, states) in states.iter().enumerate() {
                let place = Place {
                    layer,
                    kv_head: 0,
                    group: c.group(),
                    head_dim: c.head_dim,
                    limits: Limits {
                        sinks: 1,
                        window: 3,
                        ..Limits::new(Budget::Count(8))
                    },
                    kv,
                };
                let own = shadow_recall(states, method.as_ref(), &place, &turns);
                expected
                    .iter_mut()
                    .zip(own)
                    .for_each(|(e, x)| *e += x / c.n_layers() as f64);
            }
            for (i, (turn, expected)) in row["by_turn"]
                .as_array()
                .unwrap()
                .iter()
                .zip(expected)
                .enumerate()
            {
                let recall = number(turn, "recall");
                assert!(
                    (recall - expected).abs() < 1e-9,
                    "{flag} {} turn {i}: {recall} {expected}",
                    name.as_str()
                );
            }
        }
    }
}

#[test]
fn every_turn_has_its_oracle_and_the_whole_budget_is_exact() {
    for name in ["llama_default", "qwen2_sliding", "qwen3_norm"] {
        let model = Model::new(name, &[90, 61]);
        let json = model.eval(&format!(
            "--methods {} --budgets 0.1,1.0 --turns 3 --decode 6 --sinks 1 --window 3",
            method_list()
        ));
        assert_eq!((&json["blocks"], &json["steps"]), (&json!(2), &json!(36)));
        let rows = json["rows"].as_array().unwrap();
        let oracle = rows.iter().find(|r| r["method"] == json!("topk")).unwrap();
        assert_eq!(oracle["budget"], json!(0.1));
        let mut lost = 0;
        for row in rows {
            let turns = row["by_turn"].as_array().unwrap();
            assert_eq!(turns.len(), 3);
            for (i, turn) in turns.iter().enumerate() {
                let what = format!("{name} {} {} turn {i}: {turn}", row["method"], row["budget"]);
                let best = &oracle["by_turn"][i];
                assert_eq!(number(best, "recall"), 1.0, "{what}");
                if row["budget"] == json!(1.0) || row["method"] == json!("full") {
                    assert_eq!(number(turn, "recall"), 1.0, "{what}");
                    assert!(number(turn, "kl") < 1e-9, "{what}");
                    assert!(number(turn, "output_error") < 1e-5, "{what}");
                    assert!((number(turn, "mass") - 1.0).abs() < 1e-5, "{what}");
                } else {
                    assert!(number(turn, "mass") <= number(best, "mass") + 1e-6, "{what}");
                    lost += usize::from(number(turn, "kl") > 1e-6);
                }
            }
        }
        assert!(lost > 3 * 5, "{name}: {lost}");
    }
}

#[test]
fn conversations_are_answered_where_every_token_is_the_greedy_choice() {
    let model = Model::new("llama_default", &[10]);
    let decoder = Decoder::open(&golden(model.name)).unwrap();
    let artifact = Artifact::open(model.scratch.path("art").as_ref(), SECTIONS).unwrap();
    let prompts = documents(&[40, 30, 25, 20], 5);
    // The answers are what full attention says, but for the last token of the third.
    let mut answers: Vec<Vec<u32>> = Vec::new();
    for (i, length) in [3, 1, 2, 4].into_iter().enumerate() {
        let mut answer = Vec::new();
        for _ in 0..length {
            let mut questions = answers.clone();
            questions.push(answer.iter().copied().chain([0]).collect());
            let said = greedy(
                &decoder,
                &artifact,
                (method("full"), Budget::Fraction(1.0)),
                &prompts,
                &questions,
            );
            answer.push(said[i][answer.len()]);
        }
        if i == 2 {
            answer[1] ^= 1;
        }
        answers.push(answer);
    }
    let pairs = prompts.iter().zip(&answers);
    let turns: Vec<Value> = pairs
        .map(|(prompt, answer)| json!({ "prompt_tokens": prompt, "answer_tokens": answer }))
        .collect();
    let line = json!({ "turns": turns }).to_string();
    let file = model.scratch.write("talk.jsonl", format!("{line}\n{line}\n"));
    let json = kvsmith(&format!(
        "eval {} --needles {file} --methods {} --budgets 1.0,2 --sinks 1 --window 3 --decode-prompt 0 --json",
        model.files,
        method_list()
    ))
    .json();
    assert_eq!(json["needles"], json!(8));
    assert_eq!(json["full_needle_accuracy"], json!(0.75));
    assert_eq!(json["full_needle_accuracy_by_turn"], json!([1.0, 1.0, 0.0, 1.0]));
    assert_eq!(
        json["full_scores_by_line"],
        json!([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    );
    let rows = json["rows"].as_array().unwrap();
    let pairs = METHODS
        .iter()
        .flat_map(|m| [(*m, Budget::Fraction(1.0)), (*m, Budget::Count(2))]);
    let mut worse = 0;
    for (row, (method, budget)) in rows.iter().zip(pairs) {
        assert_eq!(
            (&row["method"], &row["budget"]),
            (&json!(method.as_str()), &json!(budget.value()))
        );
        assert_eq!(row["kl"], Value::Null, "{row}");
        let said = greedy(&decoder, &artifact, (method, budget), &prompts, &answers);
        let right: Vec<f64> = said
            .iter()
            .zip(&answers)
            .map(|(s, a)| f64::from(u8::from(s == a)))
            .collect();
        assert_eq!(row["needle_accuracy_by_turn"], json!(right), "{row}");
        assert_eq!(row["scores_by_line"], json!([right, right]), "{row}");
        assert_eq!(
            number(row, "needle_accuracy"),
            right.iter().sum::<f64>() / 4.0,
            "{row}"
        );
        worse += usize::from(right.iter().sum::<f64>() < 3.0);
    }
    assert!(worse > 0, "no method loses anything at two positions");
}

/// The greedy choices of a session at every place of the answers, which it is fed as `run` feeds replies:
/// the last token of each with the next prompt.
fn greedy(
    decoder: &Decoder,
    artifact: &Artifact,
    (name, budget): (MethodName, Budget),
    prompts: &[Vec<u32>],
    answers: &[Vec<u32>],
) -> Vec<Vec<u32>> {
    let mut last = None;
    let mut turns = Vec::new();
    for (prompt, answer) in prompts.iter().zip(answers) {
        let (end, fed) = answer.split_last().unwrap();
        turns.push((
            last.into_iter().chain(prompt.iter().copied()).collect(),
            fed.to_vec(),
        ));
        last = Some(*end);
    }
    let best = |logits: &Array1<f64>| {
        let best = |a: (usize, f64), b: (usize, &f64)| if *b.1 > a.1 { (b.0, *b.1) } else { a };
        logits.iter().enumerate().fold((0, f64::NEG_INFINITY), best).0 as u32
    };
    let said = drive(decoder, artifact, (name, budget), KvType::F32, &turns).turns;
    said.iter().map(|turn| turn.iter().map(best).collect()).collect()
}

#[test]
fn needles_are_found_where_decoding_starts_with_the_answer() {
    let model = Model::new("llama_default", &[10]);
    let ids = golden_ids(model.name, "ids");
    let greedy = golden_ids(model.name, "greedy");
    let mut wrong = greedy[..3].to_vec();
    wrong[2] ^= 1;
    let line = |answer: &[u32]| json!({ "prompt_tokens": ids, "answer_tokens": answer }).to_string();
    let file = model.scratch.write(
        "needles.jsonl",
        [
            line(&greedy[..1]),
            line(&greedy[..5]),
            String::new(),
            line(&wrong),
            line(&greedy[..12]),
        ]
        .join("\n"),
    );
    let json = kvsmith(&format!(
        "eval {} --needles {file} --methods {} --budgets 1.0,2 --sinks 0 --window 1 --decode-prompt 0 --json",
        model.files,
        method_list()
    ))
    .json();
    assert_eq!(json["needles"], json!(4));
    assert_eq!(json["full_needle_accuracy"], json!(0.75));
    let mut worse = 0;
    for row in json["rows"].as_array().unwrap() {
        assert_eq!(row["kl"], Value::Null, "{row}");
        let accuracy = number(row, "needle_accuracy");
        if row["budget"] == json!(1.0) || row["method"] == json!("full") {
            assert_eq!(accuracy, 0.75, "{row}");
        } else {
            // The first token comes from the prefill.
            assert!((0.25..=0.75).contains(&accuracy), "{row}");
            worse += usize::from(accuracy < 0.75);
        }
    }
    assert!(worse > 0, "no method loses anything at two positions");
}

#[test]
fn needles_of_text() {
    let model = Model::new("llama_default", &[10]);
    model
        .scratch
        .write("model/tokenizer.json", tokenizer(Value::Null));
    let prompt = "a prompt";
    let said = {
        let file = model.scratch.tokens("ids.json", &[character_ids(prompt)]);
        let files = format!("--model {}", model.scratch.path("model"));
        kvsmith(&format!(
            "run {files} --tokens {file} --max-new 12 --ignore-eos --json"
        ))
        .json()
    };
    let text = said["text"].as_str().unwrap().trim().to_string();
    assert!(text.len() > 2, "{said}");
    let line = |answer: &str| json!({ "prompt": prompt, "answer": answer }).to_string();
    let lines = [line(&text[..2]), line(&format!("{}~", &text[..1])), line(&text)];
    let file = model.scratch.write("needles.jsonl", lines.join("\n"));
    let json = kvsmith(&format!(
        "eval {} --needles {file} --methods full --json",
        model.files
    ))
    .json();
    assert!(
        (number(&json, "full_needle_accuracy") - 2.0 / 3.0).abs() < 1e-9,
        "{json} {said}"
    );
}

/// Budgets of one method share the index of the first prompt where it is the same; nobody may see that they do.
#[test]
fn a_budget_beside_others_gives_what_it_gives_alone() {
    let model = Model::new("llama_default", &[120]);
    let names: Vec<&str> = METHODS.iter().map(|method| method.as_str()).collect();
    let rows = |budgets: &str| -> Vec<Value> {
        let methods = names.join(",");
        let json = model.eval(&format!(
            "--methods {methods} --budgets {budgets} --turns 2 --decode 20 --sinks 1 --window 3 --kv bf16"
        ));
        json["rows"].as_array().unwrap().clone()
    };
    let (both, few, many) = (rows("4,24"), rows("4"), rows("24"));
    let alone = few.into_iter().zip(many).flat_map(|(few, many)| [few, many]);
    for (row, alone) in both.iter().zip(alone) {
        assert_eq!(*row, alone);
    }
    assert_eq!(both.len(), 2 * names.len());
}

#[test]
fn other_flags_beside_a_method_give_what_they_give_alone() {
    let model = Model::new("llama_default", &[60, 50]);
    let eval = |options: &str, also: &[&str]| -> Value {
        let (files, tokens) = (&model.files, &model.tokens);
        let mut command = command(&format!(
            "eval {files} --tokens {tokens} --json --decode 12 --sinks 1 --window 3 {options}"
        ));
        also.iter().for_each(|also| {
            command.args(["--also", also]);
        });
        Outcome::from_output(command.output().unwrap()).json()
    };
    let rows = |json: &Value| json["rows"].as_array().unwrap().clone();
    let also = [
        "lfps --lfps-theta 0.85",
        "ctkvr --ct-probes 1",
        "lfps --lfps-theta 0.2",
    ];
    let together = eval("--methods ctkvr,lfps --budgets 6", &also);
    let together_rows = rows(&together);
    let asked = ["ctkvr", "lfps"].into_iter().chain(also);
    for (row, asked) in together_rows.iter().zip(asked) {
        let (method, flags) = asked.split_once(' ').unwrap_or((asked, ""));
        let alone = &rows(&eval(&format!("--methods {method} --budgets 6 {flags}"), &[]))[0];
        assert_eq!(row["method"], alone["method"]);
        assert_eq!(row["flags"].as_str().unwrap_or(""), flags);
        for key in [
            "kl",
            "recall",
            "bypass_fraction",
            "bytes_read_fraction",
            "exact_dot_fraction",
        ] {
            let [own, alone] = [row, alone].map(|row| row[key].as_f64().unwrap());
            // Rows of the model's products are summed in another order beside others.
            assert!((own - alone).abs() <= 1e-5, "{asked}: {key} {own}, alone {alone}");
        }
    }
    assert_eq!(together_rows.len(), 5);
    assert_ne!(
        together_rows[1]["bypass_fraction"],
        together_rows[4]["bypass_fraction"]
    );
    assert_ne!(together_rows[0]["recall"], together_rows[3]["recall"]);
    // The flag in the quotes is the default. That of the caches, outside, applies to both rows.
    let same = "selfindex --sign-centroids one-pass";
    let centered = |center: &str| {
        rows(&eval(
            &format!("--methods selfindex --budgets 6 {center}"),
            &[same],
        ))
    };
    let (mean, median) = (centered("--center mean"), centered(""));
    assert_eq!(mean[0]["output_error"], mean[1]["output_error"]);
    assert_ne!(mean[0]["output_error"], median[0]["output_error"]);
    let pairs = together["differences"].as_array().unwrap();
    assert_eq!(pairs[0]["flags"], json!([null, null]));
    assert_eq!(
        pairs.last().unwrap()["flags"],
        json!(["--ct-probes 1", "--lfps-theta 0.2"])
    );
}

/// Later turns see earlier rows as each cache rounds them, and every cache has an index of its own.
#[test]
fn formats_beside_one_give_what_they_give_alone() {
    let model = Model::new("llama_default", &[90, 70]);
    let eval = |options: &str| -> Value {
        model.eval(&format!(
            "--methods wpq,topk,full --budgets 6 --turns 2 --decode 12 --sinks 1 --window 3 {options}"
        ))
    };
    let rows = |json: &Value| json["rows"].as_array().unwrap().clone();
    let formats = ["f32", "int8", "k=int4,v=int2", "2bit"];
    let others: Vec<String> = formats[1..].iter().map(|kv| format!("--also-kv {kv}")).collect();
    let together = eval(&format!("--kv {} {}", formats[0], others.join(" ")));
    let found = rows(&together);
    assert_eq!(found.len(), 3 * formats.len());
    for (place, (kv, found)) in formats.iter().zip(found.chunks(3)).enumerate() {
        let alone = rows(&eval(&format!("--kv {kv}")));
        for (row, alone) in found.iter().zip(&alone) {
            assert_eq!(row["method"], alone["method"]);
            let flags = (place > 0).then(|| format!("--kv {kv}"));
            assert_eq!(
                (&row["flags"], &row["kv"]),
                (&json!(flags), &json!(flags.map(|_| kv)))
            );
            for key in [
                "kl",
                "recall",
                "output_error",
                "bytes_read_fraction",
                "index_bits_per_token",
            ] {
                let [own, alone] = [row, alone].map(|row| row[key].as_f64().unwrap());
                // Rows of the model's products are summed in another order beside others.
                assert!((own - alone).abs() <= 1e-5, "{kv}: {key} {own}, alone {alone}");
            }
        }
    }
    let [of_f32, of_int8, of_few] = [2, 5, 8].map(|full| found[full]["kl"].as_f64().unwrap());
    assert!(
        of_f32 < of_int8 && of_int8 < of_few,
        "{of_f32} {of_int8} {of_few}"
    );
    assert_eq!(together["kv"], "f32");
    assert_eq!(together["differences"][2]["flags"], json!([null, "--kv int8"]));
}

#[test]
fn threads_change_nothing() {
    let model = Model::new("qwen2_sliding", &[60, 40]);
    let run = |threads: usize| {
        model.eval(&format!(
            "--methods {} --budgets 0.2 --decode 8 --sinks 1 --window 2 --kv 2bit --threads {threads}",
            method_list()
        ))
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn an_interrupt_tells_what_was_measured() {
    // Some seconds of work.
    let model = Model::new("llama_default", &[100; 400]);
    let arguments = format!(
        "eval {} --tokens {} --methods topk --budgets 3 --decode 90 --sinks 0 --window 1 --json",
        model.files, model.tokens
    );
    // The signal may come before there is anything to tell.
    for delay in (0..).map(|i| Duration::from_millis(50 << i)) {
        let child = start(&arguments);
        std::thread::sleep(delay);
        send(&child, libc::SIGINT);
        let outcome = Outcome::from_output(child.wait_with_output().unwrap());
        // On a busy machine the program may not have begun to watch for signals.
        if outcome.code.is_none() && outcome.stderr.is_empty() {
            continue;
        }
        assert_eq!(outcome.code, Some(130), "{}", outcome.stderr);
        if outcome.stdout.is_empty() {
            continue;
        }
        assert!(
            outcome.stderr.contains("error: interrupted"),
            "{}",
            outcome.stderr
        );
        let json: Value = serde_json::from_str(&outcome.stdout).unwrap();
        if json["rows"].is_null() {
            assert!(json["error"].is_object(), "{json}");
            continue;
        }
        let steps = json["steps"].as_u64().unwrap();
        assert!((1..400 * 90).contains(&steps), "{json}");
        assert_eq!(json["blocks"].as_u64().unwrap(), steps / 90, "{json}");
        let row = &json["rows"][0];
        assert_eq!(number(row, "recall"), 1.0, "{row}");
        assert!(number(row, "mass") > 0.1 && number(row, "kl") > 0.0, "{row}");
        return;
    }
}

#[test]
fn bad_input_is_named() {
    let model = Model::new("llama_default", &[20]);
    let needles = |text: &str, code: i32, error: &str| {
        let file = model.scratch.write("bad.jsonl", text);
        kvsmith(&format!("eval {} --needles {file} --methods topk", model.files)).fails(code, error, "");
    };
    needles("", 1, "contains no questions");
    needles(
        "{\"prompt_tokens\": [3]}",
        1,
        "does not have a prompt and an answer",
    );
    needles("{\"prompt_tokens\": [], \"answer_tokens\": [3]}", 1, "is empty");
    needles("{\"prompt_tokens\": [3], \"answer_tokens\": []}", 1, "is empty");
    needles(
        "{\"prompt_tokens\": [99999], \"answer_tokens\": [3]}",
        1,
        "line 1",
    );
    needles("not json", 1, "line 1");
    needles("{\"prompt\": \"x\", \"answer\": \"y\"}", 1, "no tokenizer.json");
    let good = "{\"prompt_tokens\": [3, 4], \"answer_tokens\": [5]}";
    let talk = |turns: &str, error: &str| needles(&format!("{good}\n{{\"turns\": {turns}}}"), 1, error);
    talk("[]", "line 2: `turns` is not a list of at least one turn");
    talk("7", "line 2: `turns` is not a list of at least one turn");
    talk(
        "[7]",
        "line 2: turn 1: the object does not have a prompt and an answer",
    );
    talk(
        &format!("[{good}, {{\"prompt_tokens\": [3], \"answer_tokens\": []}}]"),
        "line 2: turn 2: the prompt, the question or an answer is empty",
    );
    talk(
        &format!("[{good}, {{\"prompt_tokens\": [], \"answer_tokens\": [3]}}]"),
        "turn 2: the prompt, the question or an answer is empty",
    );
    talk(
        &format!("[{good}, {{\"prompt\": \"x\", \"answer\": \"y\"}}]"),
        "turn 2: the conversation mixes turns of text and turns of token ids",
    );
    talk(
        "[{\"prompt\": \"x\", \"answer_tokens\": [3]}]",
        "turn 1: the object does not have a prompt",
    );
    talk(
        "[{\"prompt\": \"x\", \"answer\": \" \"}]",
        "turn 1: the prompt, the question or an answer is empty",
    );
    talk(
        "[{\"prompt\": \"x\", \"answer\": \"y\"}]",
        "turn 1: the prompt is text, but the model has no tokenizer.json",
    );
    talk("[{\"prompt_tokens\": [99999], \"answer_tokens\": [3]}]", "turn 1");
    talk("[{\"prompt_tokens\": [3], \"answer_tokens\": [99999]}]", "turn 1");
    needles(
        "{\"turns\": [], \"prompt_tokens\": [3]}",
        1,
        "`turns` and `prompt_tokens`",
    );
    let run = |options: &str, code: i32, error: &str| {
        kvsmith(&format!("eval --model {} {options}", model.scratch.path("model"))).fails(code, error, "");
    };
    let tokens = format!("--tokens {}", model.tokens);
    run(&format!("{tokens} --methods a2ats"), 2, "--artifact");
    run(&format!("{tokens} --methods nothing"), 2, "nothing");
    run(&format!("{tokens} --methods topk --budgets 0.1,0"), 2, "budget");
    run(&format!("{tokens} --methods topk --decode 0"), 2, "");
    run("--methods topk", 2, "");
    run(&format!("{tokens} --methods topk --turns 0"), 2, "--turns");
    run(
        &format!("{tokens} --methods topk --turns 11"),
        1,
        "each of the 11 turns",
    );
    run("--needles none.jsonl --methods topk --turns 2", 2, "--turns");
    let one = model.scratch.tokens("one.json", &[vec![3]]);
    run(
        &format!("--tokens {one} --methods topk"),
        1,
        "more than one token",
    );
}
