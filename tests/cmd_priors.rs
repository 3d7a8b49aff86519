//! `priors`: every bucket and scalar against its definition, computed naively in f64.

use std::collections::BTreeSet;

use crate::common::*;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::dump::{Dump, State};
use kvsmith::internal::method::lfps::priors::{
    ALPHAS, GAMMAS, LAGS, Priors, SCALARS, SLASH, THETAS, VERT, slash_bucket, slash_width,
};
use kvsmith::internal::method::sections::SECTIONS;
use ndarray::Array2;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Dumps queries of random documents, and takes the priors.
fn priors_of(scratch: &Scratch, name: &str, lengths: &[usize], options: &str) -> (Dump, String) {
    let model = checkpoint(name);
    let tokens = scratch.tokens("tokens.json", &documents(lengths, 5));
    let command = format!("dump --model {model} --tokens {tokens} --queries --dtype f32 {options}");
    let dump = scratch.make(&format!("{name}-dump"), &command);
    let out = scratch.make(&format!("{name}.st"), &format!("priors --dump {dump}"));
    (Dump::open(&[&dump]).unwrap(), out)
}

/// One query head of one layer, as full matrices per block in f64.
struct Naive {
    /// Per block: the scores of all rows against all positions.
    scores: Vec<Vec<Vec<f64>>>,
    /// Per block: squared norms of the queries.
    norms: Vec<Vec<f64>>,
    /// Per block and row.
    kept: Vec<Vec<bool>>,
    window: usize,
    /// The largest score.
    size: f64,
}

/// Block and position.
type Row = (usize, usize);
/// Vertical and slash.
type Tables = (Vec<f64>, Vec<f64>);

impl Naive {
    fn new(dump: &Dump, layer: usize, head: usize) -> Self {
        let r = dump.sizes.n_heads / dump.sizes.n_kv_heads;
        let (d, states, rope) = (
            dump.sizes.head_dim,
            dump.layer(layer).unwrap(),
            dump.origin.model.ropes().layer(layer).clone(),
        );
        let keys = states.read(State::KPre, head / r, 0, dump.n).unwrap();
        let queries = states.read(State::QPre, head, 0, dump.n).unwrap();
        let rotated = |x: &Array2<f32>, row: usize, p: usize| -> Vec<f64> {
            let mut x = x.row(row).to_vec();
            rope.table(p..p + 1).rotate(&mut x, 0);
            x.into_iter().map(f64::from).collect()
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let mut out = Self {
            scores: Vec::new(),
            norms: Vec::new(),
            kept: Vec::new(),
            window: dump.origin.model.windows[layer].unwrap_or(usize::MAX),
            size: 0.0,
        };
        for block in dump.corpus.block_start.windows(2) {
            let rows = block[0] as usize..block[1] as usize;
            let turned = |x| {
                rows.clone()
                    .map(|i| rotated(x, i, i - rows.start))
                    .collect::<Vec<_>>()
            };
            let (q, k) = (turned(&queries), turned(&keys));
            let line = |q: &Vec<f64>| {
                k.iter()
                    .map(|k| dot(q, k) / (d as f64).sqrt())
                    .collect::<Vec<_>>()
            };
            out.scores.push(q.iter().map(line).collect());
            out.norms.push(q.iter().map(|q| dot(q, q)).collect());
            out.kept.push(dump.kept[rows].to_vec());
        }
        let all = out.scores.iter().flatten().flatten();
        out.size = all.fold(0.0, |m: f64, x| m.max(x.abs()));
        out
    }

    /// Positions that a row sees, sinks or others.
    fn sees(&self, (_, p): Row, i: usize) -> bool {
        i <= p && p - i < self.window
    }

    fn others(&self, row: Row) -> Vec<usize> {
        (4..row.1 + 1).filter(|i| self.sees(row, *i)).collect()
    }

    fn lse(&self, (block, p): Row, at: impl Iterator<Item = usize>) -> f64 {
        at.map(|i| self.scores[block][p][i].exp()).sum::<f64>().ln()
    }

    /// The weight of every position, zero where the row does not look.
    fn weights(&self, row: Row) -> Vec<f64> {
        let others = self.others(row);
        let total = self.lse(row, others.iter().copied());
        let mut out = vec![0.0; self.scores[row.0].len()];
        for i in others {
            out[i] = (self.scores[row.0][row.1][i] - total).exp();
        }
        out
    }

    /// Rows that may count.
    fn eligible(&self) -> Vec<Row> {
        let mut out = Vec::new();
        for (b, kept) in self.kept.iter().enumerate() {
            for (p, kept) in kept.iter().enumerate() {
                if *kept && p >= 1024.min(self.kept[b].len() / 2) && !self.others((b, p)).is_empty() {
                    out.push((b, p));
                }
            }
        }
        out
    }

    fn anchors(&self) -> Vec<Row> {
        let all: Vec<Row> = self
            .eligible()
            .into_iter()
            .filter(|(b, p)| {
                *p >= 32 && (p - 32..*p).all(|i| self.kept[*b][i] && !self.others((*b, i)).is_empty())
            })
            .collect();
        evenly(&all, 64)
    }

    /// The vertical and the slash table before a row, at the positions `others`.
    fn tables(&self, (b, p): Row, decay: f64) -> Tables {
        let history: Vec<Vec<f64>> = (1..33).map(|j| self.weights((b, p - j))).collect();
        let at = |i: usize, shift: bool| -> f64 {
            let one = |(j, w): (usize, &Vec<f64>)| {
                let i = if shift { i.checked_sub(j + 1) } else { Some(i) };
                i.map_or(0.0, |i| w[i]) * decay.powi(j as i32)
            };
            history.iter().enumerate().map(one).sum()
        };
        let others = self.others((b, p));
        (
            others.iter().map(|i| at(*i, false)).collect(),
            others.iter().map(|i| at(*i, true)).collect(),
        )
    }

    /// The weights at the positions `others`.
    fn own(&self, row: Row) -> Vec<f64> {
        let weights = self.weights(row);
        self.others(row).into_iter().map(|i| weights[i]).collect()
    }
}

fn evenly(all: &[Row], most: usize) -> Vec<Row> {
    let m = all.len().min(most);
    (0..m).map(|j| all[j * all.len() / m]).collect()
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

fn std(x: &[f64]) -> f64 {
    let m = mean(x);
    mean(&x.iter().map(|v| (v - m).powi(2)).collect::<Vec<_>>()).sqrt()
}

/// Places of the m largest, the lower one first on ties.
fn top(x: &[f64], m: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|a, b| x[*b].total_cmp(&x[*a]).then(a.cmp(b)));
    order.truncate(m);
    order
}

fn two_percent(n: usize) -> usize {
    (n * 2 / 100).max(1)
}

fn mass(weights: &[f64], at: &[usize]) -> f64 {
    at.iter().map(|i| weights[*i]).sum()
}

/// Which of the places `0..n` the candidates and their neighbours are.
fn expanded(v: &[f64], s: &[f64], alpha: f64) -> Vec<bool> {
    let kurtosis = |x: &[f64]| {
        let m = mean(x);
        let central = |e: i32| mean(&x.iter().map(|v| (v - m).powi(e)).collect::<Vec<_>>());
        if central(2) == 0.0 {
            3.0
        } else {
            central(4) / central(2).powi(2)
        }
    };
    let [[mean_v, std_v, kv], [mean_s, std_s, ks]] = [v, s].map(|x| [mean(x), std(x), kurtosis(x)]);
    let tau_v = mean_v + alpha * std_v * 2.0 * ks / (kv + ks);
    let tau_s = mean_s + alpha * std_s * 2.0 * kv / (kv + ks);
    let candidate = |i: usize| v[i] > tau_v || s[i] > tau_s;
    let n = v.len();
    (0..n)
        .map(|j| {
            let near = (0..n).any(|i| (-1..=2).contains(&(j as i64 - i as i64)) && candidate(i));
            near && (v[j] > mean_v || s[j] > mean_s) || j + 5 >= n
        })
        .collect()
}

/// The bucket of a position by its own words.
fn vert_bucket(i: usize, p: usize) -> usize {
    if i < 64 {
        return i - 4;
    }
    let share = i as f64 / p as f64;
    60 + (0..8).find(|b| *b == 7 || share > 0.5f64.powi(b + 1)).unwrap() as usize
}

/// How far f32 scores and weights may move a mass or a mean of scores: a score of `size` is a sum of
/// d products, off by at most a few units in the last of 24 bits of its terms, and a weight moves by
/// twice what its score does.
fn tolerance(naive: &Naive) -> f64 {
    1e-5 * (1.0 + naive.size)
}

/// Compares the static quantities of one head.
fn check_static(naive: &Naive, slash: &[f32], vert: &[f32], scalar: &dyn Fn(&str) -> f64, what: &str) {
    let rows = evenly(&naive.eligible(), 4096);
    let n = rows.len() as f64;
    let (mut expected_slash, mut expected_vert) = (vec![0.0; SLASH], vec![0.0; VERT]);
    for row in &rows {
        for (i, w) in naive
            .weights(*row)
            .iter()
            .enumerate()
            .skip(4)
            .take(row.1.saturating_sub(3))
        {
            expected_slash[slash_bucket(row.1 - i)] += w / n;
            expected_vert[vert_bucket(i, row.1)] += w / n;
        }
    }
    let tolerance = tolerance(naive);
    let close = |name: &str, a: f64, e: f64, size: f64| {
        assert!((a - e).abs() <= tolerance * size, "{what} {name}: {a} {e}");
    };
    for (name, actual, expected) in [("slash", slash, &expected_slash), ("vert", vert, &expected_vert)] {
        for (b, (a, e)) in actual.iter().zip(expected).enumerate() {
            close(&format!("{name}[{b}]"), f64::from(*a), *e, 1.0);
        }
    }
    let of = |f: &dyn Fn(Row) -> f64| rows.iter().map(|r| f(*r)).collect::<Vec<f64>>();
    let scores = |r: Row| {
        naive
            .others(r)
            .into_iter()
            .map(move |i| naive.scores[r.0][r.1][i])
    };
    let sinks = |r: Row| naive.lse(r, (0..4).filter(|i| naive.sees(r, *i)));
    let rest = |r: Row| naive.lse(r, naive.others(r).into_iter());
    let local = |r: Row| naive.lse(r, naive.others(r).into_iter().rev().take(5));
    let sink = of(&|r| sinks(r).exp() / (sinks(r).exp() + rest(r).exp()));
    close("sink_mean", scalar("sink_mean"), mean(&sink), 1.0);
    close("sink_std", scalar("sink_std"), std(&sink), 1.0);
    let mut sorted = sink;
    sorted.sort_by(f64::total_cmp);
    for percent in [5, 25, 50, 75, 95] {
        let name = format!("sink_q{percent:02}");
        let rank = (n * f64::from(percent) / 100.0 - 1e-9).ceil() as usize - 1;
        close(&name, scalar(&name), sorted[rank], 1.0);
    }
    let rho = of(&|r| std(&scores(r).collect::<Vec<_>>()).powi(2) / naive.norms[r.0][r.1]);
    close("rho0", scalar("rho0"), mean(&rho), 1.0);
    close("rho_std", scalar("rho_std"), std(&rho), 1.0);
    let rho0 = mean(&rho);
    let glob = |r: Row| {
        let x: Vec<f64> = scores(r).collect();
        (x.len() as f64).ln() + mean(&x) + rho0 * naive.norms[r.0][r.1] / 2.0
    };
    let bias = mean(&of(&|r| rest(r) - glob(r)));
    close("glob_bias", scalar("glob_bias"), bias, 1.0);
    let sparsity = of(&|r| 1.0 / (1.0 + ((glob(r) + bias).max(local(r)) - sinks(r)).exp()));
    for theta in THETAS {
        let name = format!("p_bypass_{theta:.2}");
        // Those too near to theta may be on either side.
        let above = |slack: f64| sparsity.iter().filter(|s| **s > theta + slack).count() as f64 / n;
        let value = scalar(&name);
        assert!(
            (above(tolerance) - 1e-6..=above(-tolerance) + 1e-6).contains(&value),
            "{what} {name}: {value}"
        );
    }
}

/// Compares what looks back.
fn check_dynamic(naive: &Naive, scalar: &dyn Fn(&str) -> f64, what: &str) {
    let anchors = naive.anchors();
    let tolerance = tolerance(naive);
    let close = |name: &str, a: f64, e: f64| {
        assert!((a - e).abs() <= tolerance, "{what} {name}: {a} {e}");
    };
    let of = |f: &dyn Fn(Row) -> f64| mean(&anchors.iter().map(|r| f(*r)).collect::<Vec<f64>>());
    let best_mass = |r: Row, table: &[f64]| {
        let own = naive.own(r);
        mass(&own, &top(table, two_percent(own.len())))
    };
    let lv = of(&|r| best_mass(r, &naive.tables(r, 1.0).0));
    let ls = of(&|r| best_mass(r, &naive.tables(r, 1.0).1));
    let lambda = lv / (lv + ls);
    close("lambda", scalar("lambda"), lambda);

    let log_mass = |gamma: f64| {
        of(&|r| {
            let (v, s) = naive.tables(r, gamma);
            let both: Vec<f64> = v
                .iter()
                .zip(&s)
                .map(|(v, s)| lambda * v + (1.0 - lambda) * s)
                .collect();
            best_mass(r, &both).max(1e-6).ln()
        })
    };
    let values = GAMMAS.map(log_mass);
    let best = values.into_iter().fold(f64::NEG_INFINITY, f64::max);
    // The first of the best: no earlier one is better by more than rounding may hide.
    let at = GAMMAS
        .iter()
        .position(|g| (g - scalar("gamma")).abs() < 1e-6)
        .unwrap();
    assert!(values[at] >= best - tolerance, "{what} gamma: {values:?}");
    assert!(
        values[..at].iter().all(|v| *v < best + tolerance),
        "{what} gamma: {values:?}"
    );

    let found: Vec<_> = anchors
        .iter()
        .map(|r| {
            let visible = (0..=r.1).filter(|i| naive.sees(*r, *i)).count();
            let own = naive.own(*r);
            let best = top(&own, (visible * 2 / 100).max(64));
            (own, best, naive.tables(*r, 0.95))
        })
        .collect();
    let kept = ALPHAS.map(|alpha| {
        let share = |(own, best, (v, s)): &(Vec<f64>, Vec<usize>, Tables)| {
            let found = expanded(v, s, alpha);
            let inside: Vec<usize> = best.iter().copied().filter(|i| found[*i]).collect();
            mass(own, &inside) / mass(own, best)
        };
        mean(&found.iter().map(share).collect::<Vec<_>>())
    });
    let at = ALPHAS
        .iter()
        .position(|a| (a - scalar("alpha")).abs() < 1e-6)
        .unwrap();
    assert!(at == 0 || kept[at] >= 0.95 - tolerance, "{what} alpha: {kept:?}");
    assert!(
        kept[at + 1..].iter().all(|k| *k < 0.95 + tolerance),
        "{what} alpha: {kept:?}"
    );

    let k_fraction = of(&|r| {
        let mut own = naive.own(r);
        own.sort_by(|a, b| b.total_cmp(a));
        let enough = (1..=own.len())
            .find(|k| own[..*k].iter().sum::<f64>() >= 0.95)
            .unwrap();
        enough as f64 / own.len() as f64
    });
    close("k_fraction", scalar("k_fraction"), k_fraction);
    for lag in LAGS {
        let name = format!("persist_{lag}");
        let set = |r: Row| -> Vec<usize> {
            let own = naive.own(r);
            let places = top(&own, two_percent(own.len()));
            places.into_iter().map(|i| naive.others(r)[i]).collect()
        };
        let overlap = of(&|r| {
            let (now, before) = (set(r), set((r.0, r.1 - lag)));
            now.iter().filter(|i| before.contains(i)).count() as f64 / now.len() as f64
        });
        close(&name, scalar(&name), overlap);
    }
}

#[test]
fn the_section_is_what_its_definition_says() {
    let scratch = Scratch::new();
    // Several blocks with a held-out one; windows of 16 and of 12; an only block with a held-out
    // end; a yarn factor.
    for (name, lengths, options) in [
        ("llama_default", &[150, 90, 20, 130][..], ""),
        ("mistral_sliding", &[140, 100], ""),
        ("qwen2_sliding", &[300], "--holdout 0.2"),
        ("llama_yarn", &[180, 60], "--holdout 0"),
    ] {
        let (dump, out) = priors_of(&scratch, name, lengths, options);
        check_all(&dump, &out, name, usize::MAX);
    }
}

#[test]
fn a_trained_model_agrees_too() {
    // Heads with sharp patterns: every alpha and the bypass occur.
    let scratch = Scratch::new();
    let data = root().join("calib-data").display().to_string();
    let command = format!(
        "dump --model {data}/model --text {data}/text.txt --max-tokens 500 --uuid-tokens 0 --seq-len 420 \
         --wrope-position 140 --queries --dtype f32"
    );
    let dump = scratch.make("dump", &command);
    let out = scratch.make("out", &format!("priors --dump {dump}"));
    let dump = Dump::open(&[&dump]).unwrap();
    check_all(&dump, &out, "bundled", 2);
    let priors = Priors::load(&Artifact::open(out.as_ref(), SECTIONS).unwrap()).unwrap();
    let heads: Vec<_> = (0..16).map(|i| priors.head(i / 4, i % 4)).collect();
    let alphas: BTreeSet<u32> = heads.iter().map(|h| (h.alpha * 100.0).round() as u32).collect();
    let bypassed = heads.iter().filter(|h| h.p_bypass[0] > 0.0).count();
    assert!(alphas.len() >= 3 && bypassed > 0, "{alphas:?} {bypassed}");
}

/// Sections of earlier versions say over which positions mean and deviation were taken: all, as today, or the candidates.
#[test]
fn priors_of_the_candidates_alone_are_refused() {
    let scratch = Scratch::new();
    let (_, out) = priors_of(&scratch, "llama_default", &[60], "");
    let with = |population: &str| {
        let path = scratch.path("earlier.st");
        resealed(&out, &path, |manifest| {
            let section = &mut manifest["sections"]["lfps"];
            (section["population"], section["population_window"]) = (json!(population), json!(64));
        });
        path
    };
    kvsmith(&format!("inspect {}", with("all"))).ok();
    for population in ["candidates", "some"] {
        kvsmith(&format!("inspect {}", with(population))).fails(
            1,
            &format!("`sections.lfps.population` is \"{population}\", a form that was removed"),
            "`kvsmith priors --dump DIR -o FILE`",
        );
    }
}

#[test]
fn long_blocks_fill_every_kind_of_bucket() {
    let scratch = Scratch::new();
    // Rows from 1,024 on rather than from the middle, offsets beyond 512, i/p down to 2^-4.
    let (dump, out) = priors_of(&scratch, "llama_linear", &[2150], "--seq-len 4096 --holdout 0.01");
    check_all(&dump, &out, "llama_linear", 1);
}

/// Compares the first `layers` of a section file.
fn check_all(dump: &Dump, out: &str, name: &str, layers: usize) {
    let artifact = Artifact::open(out.as_ref(), SECTIONS).unwrap();
    artifact.verify().unwrap();
    let (l, h) = (dump.sizes.n_layers, dump.sizes.n_heads);
    let read = |tensor: &str, width: usize| artifact.store.read::<f32>(tensor, &[l, h, width]).unwrap();
    let (slash, vert) = (read("lfps.slash", SLASH), read("lfps.vert", VERT));
    let scalars = read("lfps.scalars", SCALARS.len());
    let priors = Priors::load(&artifact).unwrap();
    let quality = artifact.section("lfps").unwrap().quality;
    let r = h / dump.sizes.n_kv_heads;
    for at in 0..h * l.min(layers) {
        let naive = Naive::new(dump, at / h, at % h);
        let what = format!("{name} layer {} head {}", at / h, at % h);
        let scalar = |name: &str| {
            let i = SCALARS.iter().position(|s| *s == name).unwrap();
            f64::from(scalars[at * SCALARS.len() + i])
        };
        let (slash, vert) = (
            &slash[at * SLASH..(at + 1) * SLASH],
            &vert[at * VERT..(at + 1) * VERT],
        );
        check_static(&naive, slash, vert, &scalar, &what);
        check_dynamic(&naive, &scalar, &what);

        let prior = priors.head(at / h, at % h);
        assert_eq!((&prior.slash[..], &prior.vert[..]), (slash, vert));
        for (field, name) in [
            (prior.lambda, "lambda"),
            (prior.sink_mean, "sink_mean"),
            (prior.glob_bias, "glob_bias"),
            (prior.rho0, "rho0"),
            (prior.rho_std, "rho_std"),
            (prior.gamma, "gamma"),
            (prior.alpha, "alpha"),
            (prior.k_fraction, "k_fraction"),
            (prior.p_bypass[0], "p_bypass_0.70"),
            (prior.p_bypass[5], "p_bypass_0.95"),
            (prior.persist[0], "persist_1"),
            (prior.persist[2], "persist_32"),
        ] {
            assert_eq!(f64::from(field), scalar(name), "{name}");
        }
        let report = &quality[at / h][at % h / r];
        for (key, name) in [
            ("lambda", "lambda"),
            ("sink_mean", "sink_mean"),
            ("p_bypass", "p_bypass_0.85"),
            ("alpha", "alpha"),
            ("gamma", "gamma"),
            ("k_fraction", "k_fraction"),
            ("persist_1", "persist_1"),
            ("persist_8", "persist_8"),
            ("persist_32", "persist_32"),
        ] {
            let shown = report[key][at % r].as_f64().unwrap();
            assert_eq!(f64::from(shown as f32), scalar(name), "{key}");
        }
        assert_eq!(report["rows"], json!(evenly(&naive.eligible(), 4096).len()));
        assert_eq!(report["anchors"], json!(naive.anchors().len()));
    }
}

#[test]
fn buckets_have_no_gaps() {
    let mut start = 0;
    for bucket in 0..SLASH {
        let end = start + slash_width(bucket);
        assert!(end > start);
        // Bounds that grow by a quarter of their octave at most.
        assert_eq!((slash_bucket(start), slash_bucket(end - 1)), (bucket, bucket));
        start = end;
    }
    assert_eq!((start, SLASH, VERT), (1 << 20, 600, 68));
    assert_eq!(
        (
            slash_width(511),
            slash_width(512),
            slash_width(519),
            slash_width(520)
        ),
        (1, 64, 64, 128)
    );
    assert_eq!((slash_bucket(1 << 20), slash_bucket(usize::MAX)), (599, 599));
}

#[test]
fn short_texts_get_neutral_priors_and_a_warning() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    for (length, warning, rows) in [
        (4, "all LFPS priors are neutral", 0),
        (20, "that need a history are neutral", 10),
    ] {
        let tokens = scratch.tokens("tokens.json", &documents(&[length], 1));
        let out = scratch.path("art");
        let outcome = kvsmith(&format!(
            "calibrate --size 2 --holdout 0 --model {model} --tokens {tokens} --overwrite -o {out}"
        ))
        .ok();
        assert_eq!(outcome.stderr.matches(warning).count(), 1, "{}", outcome.stderr);
        let artifact = Artifact::open(out.as_ref(), SECTIONS).unwrap();
        artifact.verify().unwrap();
        let report = &artifact.section("lfps").unwrap().quality[0][0];
        assert_eq!((&report["rows"], &report["anchors"]), (&json!(rows), &json!(0)));
        let priors = Priors::load(&artifact).unwrap();
        let head = priors.head(1, 3);
        assert_eq!((head.lambda, head.gamma, head.alpha), (0.5, 0.95, 0.2));
        assert_eq!((head.k_fraction, head.persist), (0.0, [0.0; 3]));
        if rows == 0 {
            assert_eq!(head.slash_at(7), 1.0 / 600.0);
            assert_eq!(head.slash_at(600), 1.0 / 600.0 / 64.0);
            assert_eq!(
                [3, 4, 63, 64].map(|i| head.vert_at(i)),
                [None, Some(1.0 / 68.0), Some(1.0 / 68.0), None]
            );
            assert_eq!((head.glob_bias, head.rho0, head.p_bypass), (0.0, 0.0, [0.0; 6]));
        }
    }
}

#[test]
fn ties_and_constant_tables_have_their_rules() {
    // With a window of one a row sees itself alone: every gamma catches all of it, and no table
    // varies.
    let scratch = Scratch::new();
    let model = scratch.model("model", "mistral_sliding");
    edit_json(&format!("{model}/config.json"), &json!({ "sliding_window": 1 }));
    let tokens = scratch.tokens("tokens.json", &documents(&[90], 5));
    let command = format!("dump --queries --model {model} --tokens {tokens}");
    let dump = scratch.make("dump", &command);
    let out = scratch.make("out", &format!("priors --dump {dump}"));
    let priors = Priors::load(&Artifact::open(out.as_ref(), SECTIONS).unwrap()).unwrap();
    let head = priors.head(1, 2);
    assert_eq!((head.lambda, head.gamma, head.alpha), (0.5, 0.95, 0.5));
    assert_eq!((head.k_fraction, head.persist), (1.0, [0.0; 3]));
    assert_eq!((head.sink_mean, head.p_bypass), (0.0, [0.0; 6]));
    assert_eq!((head.slash_at(0), head.slash_at(1)), (1.0, 0.0));
}

#[test]
fn threads_do_not_change_the_bytes() {
    let scratch = Scratch::new();
    let model = checkpoint("qwen2_sliding");
    let tokens = scratch.tokens("tokens.json", &documents(&[900, 400], 9));
    let command = format!("dump --queries --model {model} --tokens {tokens}");
    let dump = scratch.make("dump", &command);
    let bytes = |threads: usize| {
        let command = format!("priors --dump {dump} --threads {threads}");
        std::fs::read(scratch.make(&format!("{threads}.st"), &command)).unwrap()
    };
    let one = bytes(1);
    assert!(one == bytes(2) && one == bytes(3));
}

#[test]
fn a_dump_without_queries_is_refused() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60], 1));
    let command = format!("dump --values --model {model} --tokens {tokens}");
    let (dump, out) = (scratch.make("dump", &command), scratch.path("out"));
    kvsmith(&format!("priors --dump {dump} -o {out}")).fails(1, "contains no queries", "--queries");
    kvsmith(&format!("priors --dump {} -o {out}", scratch.path("no"))).fails(1, "complete dump", "");
    assert_eq!(scratch.list(""), ["dump", "tokens.json"]);
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Replaces one value of a tensor, and makes every digest fit again.
fn with_value(path: &str, to: &str, tensor: &str, at: usize, value: f32) {
    with_bytes(path, to, tensor, at, value.to_le_bytes());
}

/// The same with the bytes of any element of four.
fn with_bytes(path: &str, to: &str, tensor: &str, at: usize, value: [u8; 4]) {
    let mut tensors = read_tensors(path);
    let bytes = std::fs::read(path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut json: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let text = json["__metadata__"]["kvsmith"].as_str().unwrap();
    let mut manifest: Value = serde_json::from_str(text).unwrap();
    let data = &mut tensors.get_mut(tensor).unwrap().bytes;
    data[4 * at..4 * at + 4].copy_from_slice(&value);
    let (section, _) = tensor.split_once('.').unwrap();
    manifest["sections"][section]["sha256"][tensor] = json!(hex(data));
    manifest.as_object_mut().unwrap().remove("manifest_sha256");
    let seal = hex(manifest.to_string().as_bytes());
    manifest["manifest_sha256"] = json!(seal);
    json["__metadata__"]["kvsmith"] = json!(manifest.to_string());
    // The digests have fixed lengths, so nothing moves.
    let start = header + json[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    let mut text = json.to_string();
    text += &" ".repeat(header - 8 - text.len());
    let mut out = [&bytes[..8], text.as_bytes(), &bytes[header..]].concat();
    out[start..start + data.len()].copy_from_slice(data);
    std::fs::write(to, out).unwrap();
}

/// What docs/reference/artifact.md says that no method reads may change without changing a choice.
#[test]
fn what_describes_a_head_is_not_read() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[150, 90], 5));
    let calibrate = format!("calibrate --model {model} --tokens {tokens} --size 8");
    let artifact = scratch.make("art", &calibrate);
    let prompt = scratch.tokens("prompt.json", &documents(&[120], 7));
    let traces = |artifact: &str| {
        ["a2ats", "selfindex", "lfps"].map(|method| {
            let path = scratch.path("trace");
            kvsmith(&format!(
                "run --model {model} --artifact {artifact} --tokens {prompt} --method {method} --max-new 12 --ignore-eos \
                 --budget 20 --window 8 --overwrite --trace {path}"
            ))
            .ok();
            std::fs::read_to_string(path).unwrap()
        })
    };
    let expected = traces(&artifact);
    let page = std::fs::read_to_string(root().join("docs/reference/artifact.md")).unwrap();
    let said = |name: &str| {
        let of = |line: &&str| line.starts_with('|') && line.contains(&format!("`{name}`"));
        let line = page.lines().find(of).unwrap();
        assert!(line.contains("(diagnostic"), "{line}");
    };
    let changed = scratch.path("changed");
    for tensor in [
        "sign.count",
        "sign.alpha",
        "sign.mean_pre",
        "a2ats.count",
        "lfps.vert",
    ] {
        said(tensor);
    }
    for (tensor, at, value) in [
        ("sign.alpha", 3, 7.5f32.to_le_bytes()),
        ("sign.mean_pre", 5, (-7.5f32).to_le_bytes()),
    ] {
        with_bytes(&artifact, &changed, tensor, at, value);
        assert_eq!(traces(&changed), expected, "{tensor}");
    }
    let silent = [
        "sink_mean",
        "sink_std",
        "sink_q05",
        "sink_q95",
        "rho_std",
        "k_fraction",
    ];
    for name in silent.into_iter().chain(["persist_1", "persist_8", "persist_32"]) {
        said(name);
        let scalar = SCALARS.iter().position(|s| *s == name).unwrap();
        with_value(&artifact, &changed, "lfps.scalars", scalar, 0.77);
        assert_eq!(traces(&changed), expected, "{name}");
    }
    // Others are read.
    with_value(&artifact, &changed, "lfps.slash", 0, -1.0);
    kvsmith(&format!(
        "run --model {model} --artifact {changed} --tokens {prompt} --method lfps --max-new 2"
    ))
    .fails(1, "not a share", "");
}

#[test]
fn values_out_of_range_are_refused() {
    let scratch = Scratch::new();
    let (_, out) = priors_of(&scratch, "llama_default", &[80], "");
    let damaged = scratch.path("damaged");
    let stored = read_tensors(&out);
    let value = |tensor: &str, at: usize| {
        let bytes = &stored[tensor].bytes[4 * at..4 * at + 4];
        f32::from_le_bytes(bytes.try_into().unwrap())
    };
    // The helper itself does no harm.
    with_value(&out, &damaged, "lfps.vert", 3, value("lfps.vert", 3));
    kvsmith(&format!("inspect --verify {damaged}")).ok();
    let scalar = |name: &str| SCALARS.len() + SCALARS.iter().position(|s| *s == name).unwrap();
    for (tensor, at, wrong, culprit) in [
        (
            "lfps.slash",
            2,
            f32::NAN,
            "`lfps.slash` contains a NaN or infinite value in layer 0, head 0",
        ),
        ("lfps.slash", 700, 0.5, "`lfps.slash` is not a share"),
        ("lfps.slash", 599, -1e-6, "`lfps.slash` is not a share"),
        (
            "lfps.vert",
            5,
            f32::INFINITY,
            "`lfps.vert` contains a NaN or infinite value in layer 0, head 0",
        ),
        ("lfps.scalars", scalar("lambda"), 1.5, "lambda = 1.5"),
        ("lfps.scalars", scalar("gamma"), 1.0, "gamma = 1"),
        ("lfps.scalars", scalar("alpha"), 0.0, "alpha = 0"),
        ("lfps.scalars", scalar("rho0"), -1.0, "rho0 = -1"),
        (
            "lfps.scalars",
            scalar("glob_bias"),
            f32::NAN,
            "NaN or infinite value in layer 0, head 1",
        ),
        (
            "lfps.scalars",
            scalar("p_bypass_0.90"),
            -0.1,
            "p_bypass_0.90 = -0.1",
        ),
        (
            "lfps.scalars",
            scalar("persist_32"),
            f32::NAN,
            "NaN or infinite value in layer 0, head 1",
        ),
    ] {
        with_value(&out, &damaged, tensor, at, wrong);
        kvsmith(&format!("inspect --verify {damaged}")).fails(1, culprit, "recreate it");
        assert!(Priors::load(&Artifact::open(damaged.as_ref(), SECTIONS).unwrap()).is_err());
    }
}

#[test]
fn inspect_shows_them() {
    let scratch = Scratch::new();
    let (_, out) = priors_of(&scratch, "mistral_sliding", &[120, 80], "");
    let text = kvsmith(&format!("inspect -v --verify {out}")).ok().stdout;
    for part in ["section      lfps", "sink mass", "bypassed", "verified"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let one = kvsmith(&format!("inspect {out} --layer 1 --head 0")).ok().stdout;
    assert!(
        one.contains("lfps, layer 1, KV head 0") && one.contains("persist_32"),
        "{one}"
    );
    let json = kvsmith(&format!("inspect {out} --json")).json();
    assert_eq!(json["rows"][0]["section"], "lfps");
    assert_eq!(json["rows"][0]["lambda"].as_array().map(Vec::len), Some(4));
    assert_eq!(
        json["sections"]["lfps"]["scalars"].as_array().map(Vec::len),
        Some(SCALARS.len())
    );
}
