//! Tails: the fit against its definition in f64, and how `run` and `eval` use a tail.

use std::ops::Range;

use crate::common::*;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::dump::{Dump, State};
use kvsmith::internal::method::sections::SECTIONS;
use ndarray::Array2;
use serde_json::{Value, json};

/// The static set of the fit.
const SINKS: usize = 4;
const WINDOW: usize = 64;

type Row = Vec<f64>;

/// A block of one KV head in f64: rotated queries of its group, rotated keys and values.
struct Block {
    rows: Range<usize>,
    queries: Vec<Vec<Row>>,
    keys: Vec<Row>,
    values: Vec<Row>,
    kept: Vec<bool>,
    window: usize,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + x.iter().map(|v| (v - max).exp()).sum::<f64>().ln()
}

fn combined(weights: &[f64], rows: &[&Row]) -> Row {
    let sum = |c: usize| weights.iter().zip(rows).map(|(w, row)| w * row[c]).sum();
    (0..rows[0].len()).map(sum).collect()
}

/// Reads the blocks of a KV head.
fn blocks(dump: &Dump, layer: usize, kv_head: usize) -> Vec<Block> {
    let r = dump.sizes.n_heads / dump.sizes.n_kv_heads;
    let (states, rope) = (
        dump.layer(layer).unwrap(),
        dump.origin.model.ropes().layer(layer).clone(),
    );
    let read = |state, head| states.read(state, head, 0, dump.n).unwrap();
    let wide = |row: &[f32]| row.iter().map(|v| f64::from(*v)).collect::<Row>();
    let (keys, values) = (read(State::KPre, kv_head), read(State::V, kv_head));
    let queries: Vec<Array2<f32>> = (kv_head * r..(kv_head + 1) * r)
        .map(|a| read(State::QPre, a))
        .collect();
    let block = |ends: &[u32]| {
        let rows = ends[0] as usize..ends[1] as usize;
        let rotated = |x: &Array2<f32>| -> Vec<Row> {
            let turn = |row: usize| {
                let mut x = x.row(row).to_vec();
                rope.table(row - rows.start..row - rows.start + 1)
                    .rotate(&mut x, 0);
                wide(&x)
            };
            rows.clone().map(turn).collect()
        };
        Block {
            queries: queries.iter().map(rotated).collect(),
            keys: rotated(&keys),
            values: rows.clone().map(|row| wide(&values.row(row).to_vec())).collect(),
            kept: dump.kept[rows.clone()].to_vec(),
            window: dump.origin.model.windows[layer].unwrap_or(usize::MAX),
            rows,
        }
    };
    dump.corpus.block_start.windows(2).map(block).collect()
}

impl Block {
    /// Positions of the rows that the fit takes; all of them, in texts as short as here.
    fn sampled(&self, kept: bool) -> impl Iterator<Item = usize> + '_ {
        let first = (self.rows.len() / 2).max(SINKS + WINDOW);
        (first..self.rows.len()).filter(move |p| self.kept[*p] == kept)
    }

    /// The squared relative errors of every query head at `p`, without a tail and with each of `shifts`; the choice is of
    /// the best `budget` of what is visible. `None` if a near tie leaves the choice open.
    fn errors(&self, p: usize, budget: f64, shifts: &[f64]) -> Option<Vec<Vec<f64>>> {
        let seen: Vec<usize> = ((p + 1).saturating_sub(self.window)..p + 1).collect();
        let is_static = |i: &usize| *i < SINKS || *i + WINDOW > p;
        let d = self.keys[0].len() as f64;
        let scores: Vec<Row> = self
            .queries
            .iter()
            .map(|q| {
                seen.iter()
                    .map(|i| dot(&q[p], &self.keys[*i]) / d.sqrt())
                    .collect()
            })
            .collect();
        let probability = |a: usize, at: usize| (scores[a][at] - log_sum_exp(&scores[a])).exp();
        let mut ranked: Vec<(f64, usize)> = (0..seen.len())
            .filter(|at| !is_static(&seen[*at]))
            .map(|at| ((0..scores.len()).map(|a| probability(a, at)).sum(), at))
            .collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        let count = if budget > 0.0 {
            ((budget * seen.len() as f64) as usize).max(1)
        } else {
            0
        };
        let count = count.min(ranked.len());
        if count > 0 && count < ranked.len() && ranked[count - 1].0 - ranked[count].0 < 1e-5 * ranked[count].0
        {
            return None;
        }
        let left: Vec<usize> = ranked[count..].iter().map(|(_, at)| *at).collect();
        let of = |a: usize| self.errors_of(&scores[a], &seen, &left, shifts);
        Some((0..scores.len()).map(of).collect())
    }

    fn errors_of(&self, scores: &[f64], seen: &[usize], left: &[usize], shifts: &[f64]) -> Vec<f64> {
        let attend = |at: &[usize]| {
            let own: Vec<f64> = at.iter().map(|i| scores[*i]).collect();
            let lse = log_sum_exp(&own);
            let weights: Vec<f64> = own.iter().map(|s| (s - lse).exp()).collect();
            let values: Vec<&Row> = at.iter().map(|i| &self.values[seen[*i]]).collect();
            (combined(&weights, &values), lse)
        };
        let all: Vec<usize> = (0..seen.len()).collect();
        let read: Vec<usize> = all.iter().copied().filter(|at| !left.contains(at)).collect();
        let ((full, _), (own, lse)) = (attend(&all), attend(&read));
        let error = |o: &Row| {
            let square = |x: &Row| dot(x, x);
            let difference: Row = o.iter().zip(&full).map(|(x, y)| x - y).collect();
            square(&difference) / square(&full)
        };
        let mut out = vec![error(&own)];
        for shift in shifts {
            if left.is_empty() {
                out.push(out[0]);
                continue;
            }
            let n = left.len() as f64;
            let tail = n.ln() + left.iter().map(|at| scores[*at]).sum::<f64>() / n + shift;
            let values: Vec<&Row> = left.iter().map(|at| &self.values[seen[*at]]).collect();
            let mean = combined(&vec![1.0 / n; left.len()], &values);
            let joint = log_sum_exp(&[lse, tail]);
            out.push(error(&combined(
                &[(lse - joint).exp(), (tail - joint).exp()],
                &[&own, &mean],
            )));
        }
        out
    }
}

/// The ratios that a report has for a rule, against the definition.
fn check_ratios(blocks: &[Block], report: &Value, (rule, budget): (&str, f64), kept: bool) -> usize {
    let key = format!("{}ratio_{rule}", if kept { "" } else { "held_out_" });
    let mut checked = 0;
    for (a, shift) in report["shift"].as_array().unwrap().iter().enumerate() {
        let shifts: Vec<f64> = shift.as_f64().into_iter().collect();
        let (mut with, mut without) = (0.0, 0.0);
        for block in blocks {
            for p in block.sampled(kept) {
                let Some(errors) = block.errors(p, budget, &shifts) else {
                    return checked;
                };
                without += errors[a][0];
                with += errors[a].last().unwrap();
            }
        }
        let expected = if without > 0.0 { with / without } else { 1.0 };
        let found = report[&key][a].as_f64().unwrap();
        assert!(
            (found - expected).abs() < 1e-3 * expected,
            "{key} of {a}: {found}, not {expected}"
        );
        checked += 1;
    }
    checked
}

#[test]
fn the_fit_is_that_of_the_definition() {
    let (mut checked, mut used, mut heads) = (0, 0, 0);
    for name in ["llama_default", "qwen2_sliding", "qwen3_norm"] {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let tokens = scratch.tokens("tokens.json", &documents(&[150, 110, 90], 1));
        let dump = scratch.make(
            "dump",
            &format!("dump --model {model} --tokens {tokens} --queries --values --dtype f32 --holdout 0.3"),
        );
        let made = scratch.make("tail", &format!("tail --dump {dump} --seed 3"));
        let artifact = Artifact::open(made.as_ref(), SECTIONS).unwrap();
        let dump = Dump::open(&[&dump]).unwrap();
        let (shift, flag) = (
            &read_tensors(&made)["tail.shift"],
            &read_tensors(&made)["tail.used"],
        );
        for layer in 0..dump.sizes.n_layers {
            for kv_head in 0..dump.sizes.n_kv_heads {
                let report = json!(artifact.manifest.quality.sections["tail"][layer][kv_head]);
                let blocks = blocks(&dump, layer, kv_head);
                let rows = |kept| blocks.iter().map(|b| b.sampled(kept).count()).sum::<usize>();
                assert_eq!(report["rows"], rows(true));
                assert_eq!(report["held_out_rows"], rows(false));
                assert!(rows(true) > 0 && rows(false) > 0);
                for rule in [("static", 0.0), ("top_05", 0.05), ("top_20", 0.2)] {
                    checked += check_ratios(&blocks, &report, rule, true);
                    checked += check_ratios(&blocks, &report, rule, false);
                }
                for rule in ["static", "top_05", "top_20", "noisy_1_05", "noisy_2_05"] {
                    for ratio in report[format!("ratio_{rule}")].as_array().unwrap() {
                        assert!(ratio.as_f64().unwrap() <= 1.0, "{name} {rule} {ratio}");
                    }
                }
                let r = dump.sizes.n_heads / dump.sizes.n_kv_heads;
                for (a, told) in report["shift"].as_array().unwrap().iter().enumerate() {
                    let at = layer * dump.sizes.n_heads + kv_head * r + a;
                    let stored = (flag.bytes[at] == 1).then(|| f64::from(shift.f32s()[at]));
                    assert_eq!(told.as_f64(), stored);
                    used += usize::from(flag.bytes[at]);
                    heads += 1;
                }
            }
        }
    }
    // Heads of layers with a small sliding window have no candidates and hence no tail.
    assert!(checked > 50, "{checked}");
    assert!(used > heads / 4 && used < heads, "{used} of {heads}");
}

/// A golden checkpoint with an artifact.
struct Model {
    scratch: Scratch,
    files: String,
    tokens: String,
}

impl Model {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let texts = scratch.tokens("texts.json", &documents(&[200, 150], 1));
        let tokens = scratch.tokens("eval.json", &documents(&[120, 90], 2));
        let art = scratch.make(
            "art",
            &format!("calibrate --model {model} --tokens {texts} --size 8"),
        );
        Self {
            files: format!("--model {model} --artifact {art}"),
            scratch,
            tokens,
        }
    }

    fn eval(&self, options: &str) -> Value {
        let Self { files, tokens, .. } = self;
        kvsmith(&format!(
            "eval {files} --tokens {tokens} --json --decode 8 --sinks 1 --window 4 {options}"
        ))
        .json()
    }
}

#[test]
fn a_tail_changes_outputs_and_not_choices() {
    let model = Model::new("llama_default");
    let json = model.eval("--methods topk,topk+tail,selfindex+tail,selfindex,wpq,wpq+tail --budgets 0.1,1.0");
    let rows = json["rows"].as_array().unwrap();
    let of = |method: &str, budget: f64| {
        let found = rows
            .iter()
            .find(|r| r["method"] == method && r["budget"] == budget);
        found.unwrap()
    };
    for method in ["topk", "selfindex", "wpq"] {
        let (plain, tail) = (of(method, 0.1), of(&format!("{method}+tail"), 0.1));
        for key in ["recall", "mass", "kv_read_fraction", "index_bits_per_token"] {
            assert_eq!(plain[key], tail[key], "{method} {key}");
        }
        assert!(
            number(tail, "output_error") < number(plain, "output_error"),
            "{method}"
        );
        assert!(number(tail, "bytes_read_fraction") > number(plain, "bytes_read_fraction"));
        assert!(number(tail, "constant_bytes") > number(plain, "constant_bytes"));
        // Nothing is left out.
        let (plain, tail) = (of(method, 1.0), of(&format!("{method}+tail"), 1.0));
        for key in ["kl", "output_error", "bytes_read_fraction"] {
            assert_eq!(plain[key], tail[key], "{method} {key}");
        }
    }
    let pairs = json["differences"].as_array().unwrap();
    let is_paired = |pair: &&Value| pair["methods"] == json!(["topk", "topk+tail"]);
    assert_eq!(pairs.iter().filter(is_paired).count(), 2);
    // The flag is the suffix of every method, and a method gives beside others what it gives alone.
    let alone = model.eval("--methods wpq,selfindex,topk,quest --budgets 0.1,1.0 --tail");
    let rows = alone["rows"].as_array().unwrap().iter().step_by(2);
    for (row, method) in rows.zip(["wpq+tail", "selfindex+tail", "topk+tail"]) {
        assert_eq!(row["method"], method);
        for key in ["kl", "output_error", "bytes_read_fraction", "constant_bytes"] {
            assert_eq!(row[key], of(method, 0.1)[key], "{method} {key}");
        }
    }
}

/// Two sums in f64 per KV head and step.
#[test]
fn what_a_tail_reads_is_counted() {
    let Model { files, scratch, .. } = &Model::new("llama_default");
    let prompt = scratch.tokens("prompt.json", &documents(&[100], 4));
    let run = |more: &str| {
        let run = format!("run --json --ignore-eos {files} --tokens {prompt} --max-new 6 --method streaming");
        kvsmith(&format!("{run} --sinks 1 --window 4 {more}")).json()
    };
    let (plain, tail) = (run("--budget 3"), run("--budget 3 --tail"));
    assert_eq!((&plain["tail"], &tail["tail"]), (&json!(false), &json!(true)));
    assert_eq!(plain["kv_bytes_read"], tail["kv_bytes_read"]);
    let art = files.split(' ').next_back().unwrap();
    let used = read_tensors(art)["tail.used"].bytes.clone();
    // Two layers of two KV heads, of which those count that have a query head with a tail.
    let groups = used.chunks(2).filter(|group| group.contains(&1)).count();
    assert!(used.len() == 8 && groups > 0);
    let bytes = |row: &Value| row["index_bytes_read"].as_u64().unwrap() as usize;
    assert_eq!(bytes(&tail) - bytes(&plain), 5 * groups * 2 * 8 * 16);
    assert!(run("--tail --budget 1.0")["ids"] == run("--budget 1.0")["ids"]);
}

#[test]
fn a_tail_needs_its_section() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[90], 1));
    let dump = scratch.make("dump", &format!("dump --model {model} --tokens {tokens}"));
    let signs = scratch.make("signs", &format!("signs --dump {dump}"));
    let art = scratch.make("art", &format!("pack {signs} --model {model}"));
    let run = format!("run --model {model} --tokens {tokens} --max-new 2");
    for artifact in [String::new(), format!("--artifact {art}")] {
        kvsmith(&format!("{run} {artifact} --method topk --tail")).fails(
            2,
            "section `tail`",
            "kvsmith calibrate",
        );
        let eval = format!("eval --model {model} --tokens {tokens} {artifact} --decode 2");
        kvsmith(&format!("{eval} --methods topk+tail")).fails(2, "section `tail`", "kvsmith calibrate");
        kvsmith(&format!("{eval} --methods topk")).ok();
    }
    let eval = format!("eval --model {model} --tokens {tokens} --decode 2 --methods");
    for wrong in ["topk+tails", "+tail", "other+tail"] {
        kvsmith(&format!("{eval} topk,{wrong}")).fails(2, wrong, "");
    }
    kvsmith(&format!("{run} --method topk+tail")).fails(2, "section `tail`", "kvsmith calibrate");
    kvsmith(&format!("{run} --method topk+tails")).fails(2, "topk+tails", "");
}
