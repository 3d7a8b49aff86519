//! `eval` at equal bytes, its losses and intervals, and questions that are fed token by token.

use crate::common::*;
use kvsmith::internal::kv::map::ModelMaps;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{Budget, KvType, Limits};
use kvsmith::internal::method::registry::MethodName;
use kvsmith::internal::model::Decoder;
use kvsmith::internal::runner::{DecodeOptions, Session};
use ndarray::Array1;
use serde_json::{Value, json};

const NAME: &str = "llama_default";

/// Evaluates documents of these lengths.
struct Eval {
    scratch: Scratch,
    documents: Vec<Vec<u32>>,
    files: String,
}

impl Eval {
    fn new(lengths: &[usize]) -> Self {
        let scratch = Scratch::new();
        let model = scratch.model("model", NAME);
        let texts = scratch.tokens("texts.json", &documents(&[80, 80], 1));
        let artifact = scratch.make(
            "art",
            &format!("calibrate --model {model} --tokens {texts} --size 8"),
        );
        Self {
            documents: documents(lengths, 2),
            files: format!("--model {model} --artifact {artifact} --sinks 1 --window 3"),
            scratch,
        }
    }

    #[track_caller]
    fn text(&self, options: &str) -> Outcome {
        let tokens = self.scratch.tokens("eval.json", &self.documents);
        kvsmith(&format!("eval {} --tokens {tokens} {options}", self.files))
    }

    #[track_caller]
    fn needles(&self, lines: &[Value], options: &str) -> Value {
        let text: Vec<String> = lines.iter().map(Value::to_string).collect();
        let file = self.scratch.write("needles.jsonl", text.join("\n"));
        kvsmith(&format!("eval {} --needles {file} --json {options}", self.files)).json()
    }
}

fn rows(json: &Value) -> &[Value] {
    json["rows"].as_array().unwrap()
}

/// A session of a method on the CPU with an f32 cache.
fn logits(
    decoder: &Decoder,
    name: MethodName,
    budget: Budget,
    prompt: &[u32],
    rest: &[u32],
) -> Vec<Array1<f64>> {
    let method = prepared(name, None, decoder);
    let options = DecodeOptions {
        limits: Limits {
            sinks: 1,
            window: 3,
            ..Limits::new(budget)
        },
        kv: KvType::F32,
        packed: Center::Median.into(),
        maps: ModelMaps::HADAMARD,
        granule: 64,
    };
    let mut session = Session::on_cpu(decoder, method.as_ref(), options, 200).unwrap();
    let first = session.prefill(prompt).unwrap();
    let steps = rest.iter().map(|id| session.step(*id).unwrap());
    let all: Vec<_> = std::iter::once(first).chain(steps).collect();
    all.iter().map(|row| row.mapv(f64::from)).collect()
}

fn log_softmax(row: &Array1<f64>) -> Array1<f64> {
    let sum: f64 = row.iter().map(|v| v.exp()).sum();
    row.mapv(|v| v - sum.ln())
}

fn top(row: &Array1<f64>) -> u32 {
    let best = |a: (usize, f64), b: (usize, &f64)| if *b.1 > a.1 { (b.0, *b.1) } else { a };
    row.iter().enumerate().fold((0, f64::NEG_INFINITY), best).0 as u32
}

/// The `share` quantile by linear interpolation.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = share * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    low + place.fract() * (high - low)
}

#[test]
fn losses_are_those_of_the_definition() {
    let eval = Eval::new(&[60, 45]);
    let decoder = Decoder::open(&golden(NAME)).unwrap();
    let json = eval
        .text("--methods streaming --budgets 0.1 --decode 20 --json")
        .json();
    let row = &rows(&json)[0];
    let (mut kl, mut same, mut surprise) = (Vec::new(), 0, Vec::new());
    for ids in &eval.documents {
        let (prompt, rest) = ids.split_at(ids.len() - 20);
        let full = logits(&decoder, method("full"), Budget::Fraction(1.0), prompt, rest);
        let own = logits(&decoder, method("streaming"), Budget::Fraction(0.1), prompt, rest);
        for (i, (full, own)) in full.iter().zip(&own).skip(1).enumerate() {
            let (p, q) = (log_softmax(full), log_softmax(own));
            kl.push(p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
            same += usize::from(top(full) == top(own));
            if let Some(next) = rest.get(i + 1) {
                surprise.push(p[*next as usize] - q[*next as usize]);
            }
        }
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    for (key, expected) in [
        ("kl", mean(&kl)),
        ("kl_median", quantile(&kl, 0.5)),
        ("kl_p99", quantile(&kl, 0.99)),
        ("top1_equal", same as f64 / 40.0),
        ("perplexity_ratio", mean(&surprise).exp()),
    ] {
        let actual = number(row, key);
        assert!(
            (actual - expected).abs() < 1e-5 + 1e-3 * expected,
            "{key}: {actual} {expected}"
        );
    }
    assert!(number(row, "kl_p99") > number(row, "kl") && number(row, "kl") > number(row, "kl_median"));
    // Steps 1 to 16, and the rest.
    let spans = row["by_position"].as_array().unwrap();
    let names: Vec<_> = spans
        .iter()
        .map(|s| (s["first"].clone(), s["steps"].clone()))
        .collect();
    assert_eq!(names, [(json!(1), json!(32)), (json!(17), json!(8))]);
    let first: Vec<f64> = kl[..16].iter().chain(&kl[20..36]).copied().collect();
    assert!((number(&spans[0], "kl") / mean(&first) - 1.0).abs() < 1e-3);
    // Layers whose error makes up half of the sum.
    let layers: Vec<f64> = row["output_error_by_layer"]
        .as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap())
        .collect();
    let most = if layers[0] > layers[1] { 0 } else { 1 };
    assert_eq!(row["output_error_layers"], json!([most]));
    assert!((mean(&layers) - number(row, "output_error")).abs() < 1e-9);
    assert!((number(row, "output_error_median") - mean(&layers)).abs() < 1e-9);
}

#[test]
fn budgets_are_found_that_read_the_shares() {
    let eval = Eval::new(&[180, 170]);
    let methods = [
        "full",
        "topk",
        "quest",
        "pqcache",
        "randsign",
        "a2ats",
        "selfindex",
        "lfps",
        "ctkvr",
        "streaming",
    ];
    let json = eval
        .text(&format!(
            "--methods {} --reads 0.1,0.3,0.6 --decode 30 --json",
            methods.join(",")
        ))
        .json();
    let pairs = methods
        .iter()
        .flat_map(|m| [0.1, 0.3, 0.6].map(|share| (*m, share)));
    let (mut met, mut refused) = (0, 0);
    for (row, (name, target)) in rows(&json).iter().zip(pairs) {
        assert_eq!(
            (&row["method"], &row["reads_target"]),
            (&json!(name), &json!(target))
        );
        let sampled = number(row, "reads_sample");
        if row["budget"].is_null() {
            // Even one position reads more.
            assert!(sampled > target, "{row}");
            assert_eq!(row["bytes_read_fraction"], Value::Null);
            refused += 1;
            continue;
        }
        met += 1;
        assert_ne!(name, "full");
        // A position is 0.6% of the context, a page of quest has 16, and ctkvr ranks whole lists.
        let step = match name {
            "quest" => 16.0 / 165.0,
            "ctkvr" => 5.0 / 165.0,
            _ => 1.0 / 165.0,
        };
        assert!((sampled - target).abs() < 0.01 * target + step, "{row}");
        // The first block is measured again with the rest.
        let reached = number(row, "bytes_read_fraction");
        assert!((reached - target).abs() < 0.05 + step, "{row}");
    }
    assert!(met > 12 && refused >= 3, "{met} {refused}");
    // Reading more loses less, and the oracle of the same share loses less than the last positions.
    let kl = |name: &str, target: f64| {
        let of = |row: &&Value| row["method"] == json!(name) && row["reads_target"] == json!(target);
        number(rows(&json).iter().find(of).unwrap(), "kl")
    };
    assert!(kl("topk", 0.6) < kl("topk", 0.1));
    assert!(kl("topk", 0.3) < kl("streaming", 0.3));
    // The text says what cannot be met.
    let text = eval.text("--methods topk,ctkvr --reads 0.05 --decode 5").stdout;
    assert!(
        text.contains("smallest budget reads ") && text.contains("above the target of 5.0%"),
        "{text}"
    );
    assert!(
        text.contains("bytes") && text.lines().all(|line| line.len() <= 80),
        "{text}"
    );
}

/// The same share reads more rows of fewer bits.
#[test]
fn shares_of_different_caches_are_of_the_same_bytes() {
    let eval = Eval::new(&[180, 170]);
    let options = "--methods topk,full --decode 20 --kv bf16 --also-kv int8 --also-kv int4 --json";
    let json = eval.text(&format!("{options} --reads 0.2")).json();
    let topk: Vec<&Value> = rows(&json).iter().filter(|row| row["method"] == "topk").collect();
    let mut before = 0.0;
    for row in topk {
        assert!((number(row, "reads_sample") - 0.2).abs() < 0.01, "{row}");
        assert!(
            (number(row, "uncompressed_read_fraction") - 0.2).abs() < 0.02,
            "{row}"
        );
        assert!(number(row, "budget") > 1.4 * before, "{row}");
        before = number(row, "budget");
    }
    // A row of 16 channels takes 32 bytes in bf16, 18 in int8, and 12 in int4, sinks and window aside; full attention reads all.
    let json = eval.text(options).json();
    let full: Vec<f64> = rows(&json)
        .iter()
        .filter(|row| row["method"] == "full")
        .map(|row| {
            assert_eq!(row["bytes_read_fraction"], 1.0);
            number(row, "uncompressed_read_fraction")
        })
        .collect();
    assert_eq!(full[..2], [1.0, 18.0 / 32.0]);
    let ends = 4.0 / 165.0;
    assert!(
        (full[2] - (ends + (1.0 - ends) * 12.0 / 32.0)).abs() < 0.01,
        "{full:?}"
    );
}

/// Of rows in layers, methods read one layer of most of what they choose.
#[test]
fn rows_in_layers_are_counted_as_they_are_read() {
    let eval = Eval::new(&[500]);
    let count = |flags: &str| {
        let options = "--methods full,topk,quest --budgets 100 --decode 20 --kv int4+4 --json";
        let json = eval.text(&format!("{options} {flags}")).json();
        let fraction = |row: &Value| number(row, "uncompressed_read_fraction");
        rows(&json).iter().map(fraction).collect::<Vec<f64>>()
    };
    // At the 20 steps, about 490 positions are visible. A row of 16 channels takes 32 bytes in bf16, and 8 in each layer; 4 rows
    // are in bf16, and least and step of every channel take 64 bytes.
    let all = 490.0 * 32.0;
    let rows_of = |whole: f64, upper: f64| (64.0 + 4.0 * 32.0 + 16.0 * whole + 8.0 * upper) / all;
    let mut of_quest = Vec::new();
    for (flags, topk) in [
        ("", rows_of(25.0, 75.0)),
        ("--whole-rows 0.5", rows_of(50.0, 50.0)),
        ("--whole-rows 1", rows_of(100.0, 0.0)),
        ("--whole-rows 0", rows_of(0.0, 100.0)),
    ] {
        let [full, own_topk, quest] = count(flags)[..] else {
            panic!("three rows")
        };
        assert!((full - rows_of(486.0, 0.0)).abs() < 0.01, "{flags} {full}");
        assert!((own_topk - topk).abs() < 0.002, "{flags} {own_topk} {topk}");
        of_quest.push(quest);
    }
    // It chooses whole pages, and does not rank their rows.
    assert_eq!(of_quest[..2], [of_quest[2]; 2]);
    let saved = (of_quest[2] - of_quest[3]) * all / 8.0;
    assert!(saved > 80.0 && saved < 100.0, "{saved}");
    // As long as few rows have left the window, all are in bf16.
    let short = Eval::new(&[180]);
    let options = "--methods full,topk --budgets 40 --decode 20 --json";
    let of = |kv: &str| short.text(&format!("{options} --kv {kv}")).json();
    let (layered, plain) = (of("int4+4"), of("bf16"));
    for (layered, plain) in rows(&layered).iter().zip(rows(&plain)) {
        for key in [
            "bytes_read_fraction",
            "uncompressed_read_fraction",
            "uncompressed_moved_fraction",
        ] {
            assert_eq!(layered[key], plain[key], "{key}");
        }
        // The same rows, added up in other parts.
        let [own, other] = [layered, plain].map(|row| number(row, "kl"));
        assert!((own - other).abs() < 1e-3 * other, "{own} {other}");
    }
}

#[test]
fn a_granule_sets_what_the_shares_count_in() {
    let eval = Eval::new(&[180]);
    let options = "--methods topk,wpq,lfps --reads 0.6 --decode 20 --kv bf16 --json";
    let plain = eval.text(options).json();
    assert_eq!(
        (&plain["granule"], &plain["reads_granule"]),
        (&json!(64), &json!(1))
    );
    let mut smaller = 0;
    for granule in [32, 64, 256] {
        let json = eval.text(&format!("{options} --granule {granule}")).json();
        assert_eq!(
            (&json["granule"], &json["reads_granule"]),
            (&json!(granule), &json!(granule))
        );
        for (row, plain) in rows(&json).iter().zip(rows(&plain)) {
            let what = format!("{granule}: {row}");
            // Rows of 32 bytes, of which a granule of 256 holds eight; the least share may be above what was asked for.
            let Some(budget) = row["budget"].as_f64() else {
                assert!(number(row, "reads_sample") > 0.6, "{what}");
                continue;
            };
            let moved = number(row, "bytes_moved_fraction");
            // The same steps again, beside fewer rows: rounding may change a choice.
            assert!((moved - number(row, "reads_sample")).abs() < 0.01, "{what}");
            assert!((moved - 0.6).abs() < 0.06, "{what}");
            assert!(moved >= number(row, "bytes_read_fraction"), "{what}");
            // A search ends within 1% of a share.
            assert!(budget < plain["budget"].as_f64().unwrap() + 0.02, "{what}");
            smaller += usize::from(budget < plain["budget"].as_f64().unwrap());
        }
    }
    assert!(smaller >= 3, "{smaller}");
    for granule in ["0", "48", "8192", "x"] {
        eval.text(&format!("--methods topk --granule {granule}"))
            .fails(2, "--granule", "");
    }
}

#[test]
fn pages_of_quest_have_the_size_asked_for() {
    let eval = Eval::new(&[180]);
    let row = |options: &str| {
        let options = format!("--methods quest --budgets 64 --decode 8 --json {options}");
        rows(&eval.text(&options).json()).last().unwrap().clone()
    };
    let pages = ["16", "32", "64"];
    let alone = pages.map(|page| row(&format!("--page {page}")));
    // Two rows of 16 values in f32 per page; the bounds have room to grow by an eighth.
    for (row, page) in alone.iter().zip([16.0, 32.0, 64.0]) {
        let bits = number(row, "index_bits_per_token");
        let least = 8.0 * 128.0 / page;
        assert!(bits > 0.7 * least && bits < 2.0 * least, "{page}: {bits}");
    }
    assert_eq!(alone[0], row(""));
    assert_ne!(alone[0]["recall"], alone[2]["recall"]);
}

#[test]
fn intervals_come_with_twenty_blocks() {
    let few = Eval::new(&[30; 19]).text("--methods topk,streaming --budgets 2 --decode 4 --json");
    assert!(few.stderr.contains("at least 20 blocks"), "{}", few.stderr);
    let json = few.json();
    assert_eq!(rows(&json)[0]["intervals"], Value::Null);
    assert_eq!(json["differences"][0]["interval"], Value::Null);

    let eval = Eval::new(&[30; 24]);
    let options = "--methods topk,streaming,random --budgets 2,4 --decode 4 --json";
    let json = eval.text(options).json();
    let width = |interval: &Value| interval[1].as_f64().unwrap() - interval[0].as_f64().unwrap();
    for row in rows(&json) {
        for (key, interval) in row["intervals"].as_object().unwrap() {
            let value = number(row, key);
            let [low, high] = [0, 1].map(|i| interval[i].as_f64().unwrap());
            assert!(low <= value && value <= high, "{key}: {value} {interval}");
        }
        assert!(width(&row["intervals"]["kl"]) > 0.0, "{row}");
    }
    // Three pairs of methods at two budgets each.
    let differences = json["differences"].as_array().unwrap();
    assert_eq!(differences.len(), 6);
    for of in differences {
        let kl = |i: usize| {
            let same = |row: &&Value| row["method"] == of["methods"][i] && row["budget"] == of["budget"];
            number(rows(&json).iter().find(same).unwrap(), "kl")
        };
        assert!((number(of, "difference") - (kl(0) - kl(1))).abs() < 1e-12, "{of}");
        let [low, high] = [0, 1].map(|i| of["interval"][i].as_f64().unwrap());
        assert!(low <= kl(0) - kl(1) && kl(0) - kl(1) <= high, "{of}");
    }
    assert_eq!(
        json,
        eval.text(options).json(),
        "the same seed gives the same intervals"
    );
    // Budgets of their own are paired by their places.
    let own = "--methods topk,streaming,random --decode 4 --json --budgets topk=2,streaming=5,topk=4,streaming=4,random=3";
    let own = eval.text(own).json();
    let pairs = own["differences"].as_array().unwrap();
    let found: Vec<Value> = pairs
        .iter()
        .map(|of| json!([of["methods"], of["budget"], of["budgets"]]))
        .collect();
    let expected = json!([
        [["topk", "streaming"], null, [2.0, 5.0]],
        [["topk", "random"], null, [2.0, 3.0]],
        [["topk", "streaming"], 4.0, null],
        [["streaming", "random"], null, [5.0, 3.0]],
    ]);
    assert_eq!(json!(found), expected);
    let kl = |name: &str, budget: f64| {
        let of = |row: &&Value| row["method"] == name && row["budget"] == budget;
        number(rows(&own).iter().find(of).unwrap(), "kl")
    };
    let difference = kl("topk", 2.0) - kl("streaming", 5.0);
    assert!((number(&pairs[0], "difference") - difference).abs() < 1e-12);
    assert_ne!(pairs[0]["interval"], Value::Null);
    // Unless each method has budgets of its own, equal budgets alone are a pair.
    let mixed = eval
        .text("--methods topk,streaming --decode 4 --json --budgets 2,streaming=5")
        .json();
    assert_eq!(mixed["differences"].as_array().unwrap().len(), 1);
    // A method against itself differs by nothing, however wide its own interval.
    let twice = eval
        .text("--methods topk,topk --budgets 2 --decode 4 --json")
        .json();
    assert_eq!(
        twice["differences"],
        json!([{
            "methods": ["topk", "topk"], "budget": 2.0, "reads_target": null, "metric": "kl",
            "difference": 0.0, "interval": [0.0, 0.0],
        }])
    );
}

#[test]
fn questions_are_fed_in_decode_steps() {
    let eval = Eval::new(&[]);
    let decoder = Decoder::open(&golden(NAME)).unwrap();
    let ids = golden_ids(NAME, "ids");
    let (prompt, question) = ids.split_at(ids.len() - 6);
    let budget = Budget::Count(2);
    // What a method says after steps; after a prompt alone the first token is that of full attention.
    let after_steps = logits(&decoder, method("streaming"), budget, prompt, question);
    let own = top(after_steps.last().unwrap());
    let exact = top(logits(&decoder, method("full"), budget, &ids, &[])
        .last()
        .unwrap());
    assert_ne!(own, exact, "the method answers as full attention does");
    let line = |own_question: bool, answer: u32| {
        if own_question {
            json!({ "prompt_tokens": prompt, "question_tokens": question, "answer_tokens": [answer] })
        } else {
            json!({ "prompt_tokens": ids, "answer_tokens": [answer] })
        }
    };
    let ask = |own_question: bool, options: &str| {
        let lines = [line(own_question, own), line(own_question, exact)];
        let json = eval.needles(&lines, &format!("--methods streaming --budgets 2 {options}"));
        assert_eq!(json["full_needle_accuracy"], json!(0.5));
        let row = &rows(&json)[0];
        (number(row, "needle_accuracy"), number(row, "bytes_read_fraction"))
    };
    for (own_question, options) in [
        (true, ""),
        (true, "--decode-prompt 0"),
        (false, "--decode-prompt 6"),
    ] {
        let (accuracy, bytes) = ask(own_question, options);
        assert_eq!(accuracy, 0.5, "{options}");
        assert!(bytes > 0.0 && bytes < 0.5, "{options}: {bytes}");
    }
    // The right answer is the method's own with a question, and that of full attention without.
    let right = |options: &str| {
        let lines = [line(false, own), line(false, own)];
        number(
            &rows(&eval.needles(&lines, &format!("--methods streaming --budgets 2 {options}")))[0],
            "needle_accuracy",
        )
    };
    assert_eq!(right("--decode-prompt 6"), 1.0);
    assert_eq!(right("--decode-prompt 0"), 0.0);
    // A prompt keeps a token, however long the question is.
    let short = json!({ "prompt_tokens": [3, 4], "answer_tokens": [5] });
    assert_eq!(eval.needles(&[short], "--methods topk")["needles"], json!(1));
    // In every turn of a conversation too.
    let turn = json!({ "prompt_tokens": prompt, "question_tokens": question, "answer_tokens": [own] });
    let json = eval.needles(&[json!({ "turns": [turn] })], "--methods streaming --budgets 2");
    assert_eq!(
        (&json["full_needle_accuracy"], &rows(&json)[0]["needle_accuracy"]),
        (&json!(0.0), &json!(1.0))
    );
}

/// Makes a line of a needle file from the ids of its question.
type Form<'a> = &'a dyn Fn(&[u32]) -> Value;

#[test]
fn questions_are_prefilled_on_request() {
    let eval = Eval::new(&[]);
    let decoder = Decoder::open(&golden(NAME)).unwrap();
    let ids = golden_ids(NAME, "ids");
    let (prompt, question) = ids.split_at(ids.len() - 6);
    let last = |name: &str, prompt: &[u32], rest: &[u32]| {
        top(logits(&decoder, method(name), Budget::Count(2), prompt, rest)
            .last()
            .unwrap())
    };
    // The first token of full attention, and that of the method whose steps read the question.
    let (exact, own) = (last("full", &ids, &[]), last("streaming", prompt, question));
    assert_ne!(own, exact);
    // After the prefilled question, the method decodes the answer.
    let second = last("streaming", &ids, &[exact]);
    let streaming = "--methods streaming --budgets 2";
    let ask = |line: &Value, options: &str| {
        let json = eval.needles(std::slice::from_ref(line), &format!("{streaming} {options}"));
        (number(&rows(&json)[0], "needle_accuracy"), json)
    };
    let line = |answer: &[u32]| json!({ "prompt_tokens": prompt, "question_tokens": question, "answer_tokens": answer });
    let joined = |answer: &[u32]| json!({ "prompt_tokens": ids, "answer_tokens": answer });
    let turns = |answer: &[u32]| json!({ "turns": [line(answer)] });
    let forms: [Form; 2] = [&line, &turns];
    for form in forms {
        for (answer, prefilled, decoded) in [([exact], 1.0, 0.0), ([own], 0.0, 1.0)] {
            let (accuracy, json) = ask(&form(&answer), "--question prefill");
            assert_eq!((accuracy, &json["question"]), (prefilled, &json!("prefill")));
            for options in ["", "--question decode"] {
                let (accuracy, json) = ask(&form(&answer), options);
                assert_eq!((accuracy, &json["question"]), (decoded, &json!("decode")));
            }
        }
        assert_eq!(ask(&form(&[exact, second]), "--question prefill").0, 1.0);
        assert_eq!(ask(&form(&[exact, second ^ 1]), "--question prefill").0, 0.0);
    }
    // It is as if the question were the end of the prompt, of which nothing is decoded.
    let [own_question, in_prompt] = [line(&[exact, second]), joined(&[exact, second])];
    let expected = ask(&in_prompt, "--decode-prompt 0").1;
    assert_eq!(
        ask(&own_question, "--question prefill").1["rows"],
        expected["rows"]
    );
    assert_eq!(ask(&in_prompt, "--question prefill").1["rows"], expected["rows"]);
    // A later turn's question is prefilled too: over the method's own cache, in which the answer before was decoded.
    let mut second_turn = line(&[exact]);
    second_turn["prompt_tokens"] = json!(question);
    let conversation = json!({ "turns": [line(&[exact, second]), second_turn] });
    let json = ask(&conversation, "--question prefill").1;
    let steps = |json: &Value| number(&rows(json)[0], "kv_read_fraction");
    assert!(steps(&json) < 1.0, "{json}");
    let mut second_turn = joined(&[exact]);
    second_turn["prompt_tokens"] = json!([question, question].concat());
    let both = json!({ "turns": [joined(&[exact, second]), second_turn] });
    assert_eq!(json["rows"], ask(&both, "--decode-prompt 0").1["rows"]);

    let file = eval.scratch.write("one.jsonl", line(&[exact]).to_string());
    let run = |options: &str| kvsmith(&format!("eval {} {options}", eval.files));
    let shown = run(&format!("--needles {file} {streaming} --question prefill"))
        .ok()
        .stdout;
    assert!(
        shown.contains("1 question in 1 line, prefilled with the prompt"),
        "{shown}"
    );
    let shown = run(&format!("--needles {file} {streaming}")).ok().stdout;
    assert!(
        shown.contains("1 question in 1 line, decoded token by token"),
        "{shown}"
    );
    run(&format!(
        "--needles {file} {streaming} --question prefill --decode-prompt 4"
    ))
    .fails(
        2,
        "--decode-prompt decodes the end of a prompt, which --question prefill prefills",
        "omit one",
    );
    run(&format!(
        "--needles {file} {streaming} --question prefill --decode-prompt 0"
    ))
    .ok();
    // The only token of the answer comes from exact attention.
    run(&format!(
        "--needles {file} --methods streaming --reads 0.3 --question prefill"
    ))
    .fails(1, "the first lines decode nothing", "several tokens");
}

#[test]
fn several_answers_score_by_the_share_found() {
    let eval = Eval::new(&[]);
    let (ids, said) = (golden_ids(NAME, "ids"), golden_ids(NAME, "greedy"));
    let line = |answers: &[&[u32]], task: &str, length: usize| json!({ "prompt_tokens": ids, "answers_tokens": answers, "task": task, "length": length });
    let absent = [said[0] ^ 1, said[0] ^ 1, said[0] ^ 1];
    let lines = [
        line(&[&said[1..3], &said[3..4]], "values", 2048),
        line(&[&said[1..3], &absent], "values", 2048),
        line(&[&said[..1], &said[2..3], &absent, &absent], "words", 4096),
    ];
    let json = eval.needles(&lines, "--methods topk --budgets 1.0");
    assert_eq!(json["full_needle_accuracy"], json!(2.0 / 3.0));
    let by_task = json!([
        { "task": "values", "length": 2048, "questions": 2, "accuracy": 0.75 },
        { "task": "words", "length": 4096, "questions": 1, "accuracy": 0.5 },
    ]);
    assert_eq!(json["full_by_task"], by_task);
    assert_eq!(rows(&json)[0]["by_task"], by_task);
    let bad = |line: &str, error: &str| {
        let file = eval.scratch.write("bad.jsonl", line);
        kvsmith(&format!("eval {} --needles {file} --methods topk", eval.files)).fails(1, error, "");
    };
    bad(
        "{\"prompt_tokens\": [3], \"answer_tokens\": [4], \"answers_tokens\": [[4]]}",
        "`answer` and `answers`",
    );
    bad("{\"prompt_tokens\": [3], \"answers_tokens\": []}", "is empty");
    bad("{\"prompt_tokens\": [3], \"answers_tokens\": [[]]}", "is empty");
    bad(
        "{\"prompt_tokens\": [3], \"question_tokens\": [], \"answer_tokens\": [4]}",
        "is empty",
    );
    bad(
        "{\"turns\": [{\"prompt_tokens\": [3], \"answers_tokens\": [[4]]}]}",
        "several answers",
    );
    let both = kvsmith(&format!(
        "eval {} --tokens x.json --methods topk --reads 0.1 --budgets 0.1",
        eval.files
    ));
    both.fails(2, "--reads", "");
    for share in ["0", "1", "1.5", "-0.1", "x"] {
        let options = format!("--tokens x.json --methods topk --reads={share}");
        kvsmith(&format!("eval {} {options}", eval.files)).fails(2, "above 0 and below 1", "");
    }
}

/// Artifacts beside each other, and budgets of single methods, give what they give alone.
#[test]
fn artifacts_are_held_against_each_other() {
    let eval = Eval::new(&[90, 90]);
    let texts = eval.scratch.tokens("texts.json", &documents(&[80, 80], 5));
    let model = eval.scratch.path("model");
    let make = |name: &str, options: &str| {
        let command = format!("calibrate --model {model} --tokens {texts} --size 8 --no-verdict {options}");
        eval.scratch.make(name, &command)
    };
    let (second, third) = (make("second", ""), make("third", "--wpq-bits none --seed 3"));
    let first = eval.scratch.path("art");
    let alone = |artifact: &str, options: &str| {
        let files = eval.files.replace(&first, artifact);
        let tokens = eval.scratch.tokens("eval.json", &eval.documents);
        let json = kvsmith(&format!(
            "eval {files} --tokens {tokens} --decode 9 --json {options}"
        ))
        .json();
        rows(&json).to_vec()
    };
    let json = eval
        .text(&format!(
            "--decode 9 --json --methods topk,wpq,a2ats,wpq+tail --budgets 5,wpq=9 --against {second},{third}"
        ))
        .json();
    let mut expected = Vec::new();
    for (method, budgets, artifacts) in [
        ("topk", "5", vec![&first]),
        ("wpq", "5,9", vec![&first, &second]),
        ("a2ats", "5", vec![&first, &second, &third]),
        ("wpq+tail", "5", vec![&first, &second]),
    ] {
        for artifact in artifacts {
            for row in alone(artifact, &format!("--methods {method} --budgets {budgets}")) {
                expected.push((artifact, row));
            }
        }
    }
    assert_eq!(rows(&json).len(), expected.len());
    for (row, (artifact, alone)) in rows(&json).iter().zip(expected) {
        assert_eq!(row["artifact"], *artifact.as_str());
        for key in [
            "method",
            "budget",
            "recall",
            "bytes_read_fraction",
            "constant_bytes",
        ] {
            assert_eq!(row[key], alone[key], "{key} of {}", row["method"]);
        }
        // Products with more rows round otherwise: 1e-6 seen.
        for key in ["kl", "perplexity_ratio", "mass", "output_error"] {
            let (one, other) = (number(row, key), number(&alone, key));
            assert!((one - other).abs() <= 1e-5 * other, "{key} {one}, alone {other}");
        }
    }
    let compared = json["differences"].as_array().unwrap();
    let pair = compared
        .iter()
        .find(|pair| pair["methods"] == json!(["a2ats", "a2ats"]))
        .unwrap();
    assert_eq!(pair["artifacts"], json!([first, second]));

    let shown = eval
        .text(&format!("--decode 9 --methods wpq,topk --against {second}"))
        .ok()
        .stdout;
    assert!(
        shown.contains("wpq [2] ") && shown.contains(&format!("[2] {second}")),
        "{shown}"
    );

    eval.text("--methods topk --budgets 3,lfps=4")
        .fails(2, "`lfps`", "");
    eval.text("--methods topk,lfps --budgets lfps=4")
        .fails(2, "no budget for method `topk`", "");
    let unknown = eval.text("--methods topk --budgets nearest=4");
    assert!(
        unknown.code == Some(2) && unknown.stderr.contains("unknown method `nearest`"),
        "{}",
        unknown.stderr
    );
}

/// In the first turn, the static set covers everything; the budget is found in the second.
#[test]
fn budgets_are_searched_where_a_conversation_is_long() {
    let scratch = Scratch::new();
    let turn = |prompt: usize, answer: usize, seed| json!({ "prompt_tokens": documents(&[prompt], seed)[0], "answer_tokens": documents(&[answer], seed + 1)[0] });
    let line = json!({ "turns": [turn(20, 12, 1), turn(120, 8, 3)] });
    let file = scratch.write("needles.jsonl", line.to_string());
    let input = format!("--model {} --needles {file}", checkpoint(NAME));
    let json = kvsmith(&format!(
        "eval {input} --methods topk --reads 0.5 --sinks 1 --window 40 --json"
    ))
    .json();
    let row = &rows(&json)[0];
    let read = row["reads_sample"].as_f64().unwrap();
    assert!(
        row["budget"].is_number() && (read / 0.5 - 1.0).abs() < 0.05,
        "{row}"
    );
}
