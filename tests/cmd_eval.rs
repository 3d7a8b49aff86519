//! `eval`: its metrics against naive ones, and what must hold of them.

mod common;

use clap::ValueEnum;
use common::*;
use kvsmith::compute::reference;
use kvsmith::method::{Method, MethodName, Params};
use kvsmith::model::Decoder;
use kvsmith::model::decoder::rotated;
use kvsmith::runner::budget::Budget;
use kvsmith::runner::kv::KvType;
use kvsmith::runner::packed::Center;
use kvsmith::runner::{Options, Session};
use ndarray::{Array1, Array3, s};
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
        let artifact = scratch.path("art");
        kvsmith(&format!(
            "calibrate --model {model} --tokens {texts} --size 8 -o {artifact}"
        ))
        .ok();
        let documents = documents(lengths, 2);
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

fn methods() -> String {
    let names: Vec<&str> = MethodName::value_variants().iter().map(|m| m.as_str()).collect();
    names.join(",")
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"))
}

#[test]
fn the_oracle_covers_most_and_the_whole_budget_is_exact() {
    for name in ["llama_default", "qwen2_sliding", "llama_d128", "qwen2_bias"] {
        let model = Model::new(name, &[90, 50]);
        let json = model.eval(&format!(
            "--methods {} --budgets 0.1,9,1.0 --decode 12 --sinks 1 --window 3 --per-head",
            methods()
        ));
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 3 * MethodName::value_variants().len());
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

/// Rotated states of every layer along a document.
struct States {
    q: Array3<f32>,
    k: Array3<f32>,
    v: Array3<f32>,
}

fn states(decoder: &Decoder, ids: &[u32]) -> Vec<States> {
    let mut hidden = decoder.embed(ids).unwrap();
    let table = decoder.rope.table(0..ids.len());
    let layer = |i: usize| {
        let mut out = None;
        let layer = decoder.layer(i).unwrap();
        layer.forward(&decoder.rope, hidden.view_mut(), |s, k_rope| {
            out = Some(States {
                q: rotated(&s.q_pre, &table, 0..ids.len()),
                k: k_rope.clone(),
                v: s.v.clone(),
            });
        });
        out.unwrap()
    };
    (0..decoder.config.n_layers).map(layer).collect()
}

/// Recall, mass and output error of the last B candidates (`streaming`) at position `t` of KV head `c`.
fn naive(states: &States, c: usize, t: usize, model_window: Option<usize>, budget: f64) -> [f64; 3] {
    let (sinks, window) = (2, 4);
    let (h, _, d) = states.q.dim();
    let r = h / states.k.dim().0;
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
        let q = states.q.slice(s![a, t, ..]);
        let (k, v) = (states.k.slice(s![c, .., ..]), states.v.slice(s![c, .., ..]));
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
        let all: Vec<Vec<States>> = model.documents.iter().map(|ids| states(&decoder, ids)).collect();
        for head in row["per_head"].as_array().unwrap() {
            let (layer, kv) = (
                head["layer"].as_u64().unwrap() as usize,
                head["kv_head"].as_u64().unwrap() as usize,
            );
            let mut sums = [0.0; 3];
            for (ids, states) in model.documents.iter().zip(&all) {
                for t in ids.len() - 10..ids.len() {
                    let one = naive(&states[layer], kv, t, c.windows[layer], budget);
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
            let method = Method::new(
                name,
                None,
                &decoder.rope,
                decoder.config.head_dim,
                &Params::default(),
                0,
            );
            let options = Options {
                sinks: 2,
                window: 4,
                budget: Budget::Fraction(budget),
                kv: KvType::F32,
                packed: Center::Median.into(),
            };
            let mut session = Session::new(decoder, &method.unwrap(), options, ids.len()).unwrap();
            let (prompt, rest) = ids.split_at(ids.len() - 10);
            session.prefill(prompt).unwrap();
            let step = |id: &u32| session.step(*id).unwrap().mapv(f64::from);
            rest.iter().map(step).collect()
        };
        let log_softmax = |x: &Array1<f64>| {
            let sum: f64 = x.iter().map(|v| v.exp()).sum();
            x.mapv(|v| v - sum.ln())
        };
        for (full, own) in logits(MethodName::Full).iter().zip(logits(MethodName::Streaming)) {
            let (p, q) = (log_softmax(full), log_softmax(&own));
            sum += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        }
    }
    sum / (10 * documents.len()) as f64
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
        "eval {} --needles {file} --methods {} --budgets 1.0,2 --sinks 0 --window 1 --json",
        model.files,
        methods()
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

#[test]
fn threads_change_nothing() {
    let model = Model::new("qwen2_sliding", &[60, 40]);
    let run = |threads: usize| {
        model.eval(&format!(
            "--methods {} --budgets 0.2 --decode 8 --sinks 1 --window 2 --kv 2bit --threads {threads}",
            methods()
        ))
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn bad_input_is_named() {
    let model = Model::new("llama_default", &[20]);
    let needles = |text: &str, code: i32, error: &str| {
        let file = model.scratch.write("bad.jsonl", text);
        kvsmith(&format!("eval {} --needles {file} --methods topk", model.files)).fails(code, error, "");
    };
    needles("", 1, "has no line");
    needles("{\"prompt_tokens\": [3]}", 1, "has no prompt with its answer");
    needles("{\"prompt_tokens\": [], \"answer_tokens\": [3]}", 1, "is empty");
    needles("{\"prompt_tokens\": [3], \"answer_tokens\": []}", 1, "is empty");
    needles(
        "{\"prompt_tokens\": [99999], \"answer_tokens\": [3]}",
        1,
        "line 1",
    );
    needles("not json", 1, "line 1");
    needles("{\"prompt\": \"x\", \"answer\": \"y\"}", 1, "no tokenizer.json");
    let run = |options: &str, code: i32, error: &str| {
        kvsmith(&format!("eval --model {} {options}", model.scratch.path("model"))).fails(code, error, "");
    };
    let tokens = format!("--tokens {}", model.tokens);
    run(&format!("{tokens} --methods a2ats"), 2, "--artifact");
    run(&format!("{tokens} --methods nothing"), 2, "nothing");
    run(&format!("{tokens} --methods topk --budgets 0.1,0"), 2, "budget");
    run(&format!("{tokens} --methods topk --decode 0"), 2, "");
    run("--methods topk", 2, "");
    let one = model.scratch.tokens("one.json", &[vec![3]]);
    run(
        &format!("--tokens {one} --methods topk"),
        1,
        "more than one token",
    );
}
