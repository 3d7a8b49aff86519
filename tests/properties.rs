//! Properties that hold for any numbers: each fast implementation against a naive one.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use crate::common::random::{matrix, noise};
use crate::common::*;
use half::f16;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::compute::attention;
use kvsmith::internal::compute::reference;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::StaticSet;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{KvHead, KvType, RowCache, RowStore, float};
use kvsmith::internal::method::a2ats::{
    A2ats, BUCKETS, CHOL, CODEBOOK, Codebooks, Edges, HeadCodebook, MEAN, Quotas,
};
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::method::{Retriever, Step};
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::ModelConfig;
use kvsmith::internal::model::fields::read_json;
use kvsmith::internal::model::tokenizer::Tokenizer;
use kvsmith::internal::stats::linalg::{cholesky, invert_lower};
use ndarray::{Array1, Array2, Array3, Axis, s};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const F32_UNIT: f64 = 1.0 / (1u32 << 24) as f64;

#[test]
fn a2ats_selects_what_the_definition_says() {
    const D: usize = 4;
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let (mut cases, mut without_k, mut tied) = (0, 0, 0);
    for _ in 0..300 {
        // Small whole numbers: f32 scores are exact, ties and duplicate codewords common.
        let m = rng.gen_range(1..16);
        let range = rng.gen_range(1..4);
        let codebook = Array2::from_shape_simple_fn((m, D), || rng.gen_range(-range..=range) as f32);
        let head = HeadCodebook::new(
            codebook.clone(),
            Array1::zeros(D),
            Array2::eye(D),
            &plain_rope(D),
            0,
        )
        .unwrap();
        let mut a2ats = A2ats::new(Arc::new(head), None);
        // Keys are codewords, some of which no key has.
        let n = rng.gen_range(1..60);
        let used = rng.gen_range(1..=m);
        let codes: Vec<usize> = (0..n)
            .map(|_| {
                let c = rng.gen_range(0..used);
                // A duplicate codeword encodes to the first of its kind.
                (0..=c).find(|&e| codebook.row(e) == codebook.row(c)).unwrap()
            })
            .collect();
        for &code in &codes {
            let key = codebook.select(Axis(0), &[code]);
            a2ats.append(key.view(), key.view());
        }
        let kv = KvHead::new(KvType::F32, D, 0, Center::Median);
        let (mut start, mut end) = (0, rng.gen_range(1..=n));
        for step in 0..4 {
            let r = [1, 2, 3, 5, 8][rng.gen_range(0..5)];
            let q = Array2::from_shape_simple_fn((r, D), || rng.gen_range(-range..=range) as f32);
            let scores = q.dot(&codebook.t());
            let budget = rng.gen_range(1..=(end - start).max(2));
            let choice = a2ats.select(&Step {
                step,
                visible: 0..n,
                candidates: start..end,
                budget,
                q_pre: q.view(),
                q_rope: q.view(),
                kv: &kv,
            });
            let selected = choice.positions;
            let window: Vec<u16> = codes[start..end].iter().map(|c| *c as u16).collect();
            let expected = reference::select(scores.view(), &window, start as u32, budget);
            if budget >= end - start {
                assert_eq!(selected, (start as u32..end as u32).collect::<Vec<_>>());
            } else {
                assert_eq!(
                    selected, expected,
                    "scores {scores:?} codes {codes:?} {start}..{end} B {budget}"
                );
                let mut counts = vec![0; m];
                codes[start..end].iter().for_each(|c| counts[*c] += 1);
                let quotas = Quotas::within(scores.view(), &counts, budget);
                // Not even k = 1 fits: more distinct best tokens than the budget.
                let best: BTreeSet<u32> = scores
                    .rows()
                    .into_iter()
                    .flat_map(|row| reference::select(row.insert_axis(Axis(0)), &window, 0, 1))
                    .collect();
                assert_eq!(quotas.is_some(), best.len() <= budget);
                without_k += usize::from(quotas.is_none());
            }
            let distinct: BTreeSet<i64> = scores.row(0).iter().map(|s| *s as i64).collect();
            tied += usize::from(distinct.len() < m);
            cases += 1;
            // The candidates move on as in decoding, and now and then jump back.
            (start, end) = if rng.gen_bool(0.2) {
                (0, rng.gen_range(1..=n))
            } else {
                (rng.gen_range(start..end), rng.gen_range(end..=n))
            };
        }
    }
    assert!(
        cases >= 1000 && without_k >= 50 && tied >= 500,
        "{cases} {without_k} {tied}"
    );
}

/// A random metric: L of a second moment of correlated vectors, d x d.
fn random_chol(rng: &mut ChaCha8Rng, d: usize) -> Array2<f32> {
    let samples = matrix(rng, 2 * d, d).dot(&matrix(rng, d, d)).mapv(f64::from);
    let h = samples.t().dot(&samples) / (2 * d * d) as f64 + Array2::<f64>::eye(d) * 1e-3;
    cholesky(h.view()).unwrap().unwrap().mapv(|v| v as f32)
}

/// Every row of `z` times L^-1, by substitution.
fn unwhiten(mut z: Array2<f64>, l: &Array2<f64>) -> Array2<f64> {
    for mut row in z.rows_mut() {
        for j in (0..row.len()).rev() {
            let known: f64 = (j + 1..row.len()).map(|i| row[i] * l[[i, j]]).sum();
            row[j] = (row[j] - known) / l[[j, j]];
        }
    }
    z
}

#[test]
fn encoding_is_the_argmin_in_the_metric_of_the_queries() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for (d, offset) in [
        (4, 0.0),
        (16, 0.0),
        (64, 0.0),
        (80, 3.0),
        (16, 1800.0),
        (128, 1800.0),
    ] {
        let (n, m) = (120, 40);
        let chol = random_chol(&mut rng, d);
        let wide = chol.mapv(f64::from);
        // A bias of the keys that is `offset` long once it is whitened.
        let direction = matrix(&mut rng, 1, d).mapv(f64::from);
        let length = direction.dot(&wide).mapv(|v| v * v).sum().sqrt();
        let bias = direction * (offset / length);
        let keys = (matrix(&mut rng, n, d).mapv(f64::from) + &bias).mapv(|v| v as f32);
        let mean = bias.dot(&wide).row(0).mapv(|v| v as f32);
        // Codewords near keys, as the file stores them, with a duplicate and an outlier.
        let chosen = keys.slice(s![..m, ..]).mapv(f64::from).dot(&wide) - mean.mapv(f64::from);
        let mut codebook = chosen.mapv(|v| f16::from_f64(v + rng.gen_range(-0.3..0.3)).to_f32());
        let row = codebook.row(3).to_owned();
        codebook.row_mut(7).assign(&row);
        codebook.row_mut(9).fill(500.0);
        let head = HeadCodebook::new(codebook.clone(), mean.clone(), chol, &plain_rope(d), 0).unwrap();
        let codes = head.encode(keys.view());

        // c = (c_z + mean) L^-1, and (k - c) H (k - c)^T with H = L L^T.
        let raw = unwhiten(codebook.mapv(f64::from) + mean.mapv(f64::from), &wide);
        let h = wide.dot(&wide.t());
        let mut same = 0;
        for (key, &code) in keys.rows().into_iter().zip(&codes) {
            let key = key.mapv(f64::from);
            let distance = |c: usize| {
                let difference = &key - &raw.row(c);
                difference.dot(&h).dot(&difference)
            };
            let best = (0..m)
                .min_by(|a, b| distance(*a).total_cmp(&distance(*b)))
                .unwrap();
            same += usize::from(best == usize::from(code));
            // z is computed in f32: it is off by at most `delta`; the search adds 4 e.
            let norm = |x: &Array1<f64>| x.dot(x).sqrt();
            let sizes = key.mapv(f64::abs).dot(&wide.mapv(f64::abs)) + mean.mapv(|v| f64::from(v.abs()));
            let delta = norm(&(sizes * ((d + 2) as f64 * F32_UNIT)));
            let z = norm(&(key.dot(&wide) - mean.mapv(f64::from))) + delta;
            let e = codebook.rows().into_iter().fold(0.0f64, |e, c| {
                let c = norm(&c.mapv(f64::from));
                e.max((d + 2) as f64 * F32_UNIT * (z * c + c * c / 2.0))
            });
            let bound = ((distance(best).sqrt() + delta).powi(2) + 4.0 * e).sqrt() + delta;
            let found = distance(code.into()).sqrt();
            // The reference itself, inverse of L included, is good to 1e-9 or so.
            assert!(
                found <= bound * (1.0 + 1e-6),
                "d {d} offset {offset}: {found} above {bound}"
            );
        }
        assert!(
            same * 100 >= 95 * n,
            "d {d} offset {offset}: {same} of {n} are the exact argmin"
        );
        assert!(
            codes.iter().all(|c| *c != 7),
            "the lower index of two equal codewords wins"
        );
        assert!(codes.contains(&3));
    }
}

#[test]
fn scores_are_products_with_the_codewords_in_key_space() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for (d, r, position) in [(4, 1, 0), (16, 3, 2048), (64, 8, 100), (128, 5, 2048)] {
        let chol = random_chol(&mut rng, d);
        let codebook = matrix(&mut rng, 50, d);
        let q_pre = matrix(&mut rng, r, d);
        let rope = plain_rope(d);
        let inverse = invert_lower(chol.mapv(f64::from).view()).unwrap().unwrap();
        let head =
            HeadCodebook::new(codebook.clone(), Array1::zeros(d), chol.clone(), &rope, position).unwrap();
        let scores = head.scores(q_pre.view());
        let table = rope.table(position..position + 1);
        for (query, scores) in q_pre.rows().into_iter().zip(scores.rows()) {
            let mut rotated = query.to_vec();
            table.rotate(&mut rotated, 0);
            let rotated = Array1::from(rotated).mapv(f64::from);
            let exact = unwhiten(codebook.mapv(f64::from), &chol.mapv(f64::from)).dot(&rotated);
            // Only y's rounding and the f32 product differ.
            let y = inverse.dot(&rotated).mapv(f64::abs);
            let sizes = codebook.mapv(|v| f64::from(v.abs())).dot(&y);
            for ((score, exact), size) in scores.iter().zip(&exact).zip(&sizes) {
                let bound = (d + 2) as f64 * F32_UNIT * size;
                assert!(
                    (f64::from(*score) - exact).abs() <= bound + 1e-9 * size,
                    "d {d}: {score} {exact}"
                );
            }
        }
    }
}

/// Scores of keys that are codewords themselves, in every bucket, against the scaled products of attention: query and
/// key at their own positions, averaged over the positions that the bucket has.
#[test]
fn scores_in_buckets_are_mean_scores_of_attention() {
    let mut rng = ChaCha8Rng::seed_from_u64(30);
    let edges = Edges([0, 1, 2, 10, 30, 64, 100, 101, 300]);
    for (d, r) in [(4, 1), (16, 3), (64, 2)] {
        let (n, rope, at) = (6, plain_rope(d), 400);
        let chol = random_chol(&mut rng, d);
        let wide = chol.mapv(f64::from);
        let keys = matrix(&mut rng, n, d);
        // Far from the origin, so that a bucket without the mean's part would be off by more than its scores differ.
        let mean = matrix(&mut rng, 1, d).row(0).mapv(|v| 5.0 * v);
        let codebook = (keys.mapv(f64::from).dot(&wide) - mean.mapv(f64::from)).mapv(|v| v as f32);
        let head = HeadCodebook::with_buckets(codebook, mean, chol, &rope, edges).unwrap();
        let q_pre = matrix(&mut rng, r, d);
        // In position order, as a choice takes them.
        let buckets: Vec<usize> = (0..BUCKETS).rev().collect();
        let scores = head.scores_in(q_pre.view(), &buckets);
        let table = rope.table(0..at + 1);
        let rotated = |x: ndarray::ArrayView1<f32>, position: usize| {
            let mut x = x.to_vec();
            table.rotate(&mut x, position);
            Array1::from(x).mapv(f64::from)
        };
        for (query, scores) in q_pre.rows().into_iter().zip(scores.rows()) {
            let at_own = rotated(query, at);
            let exact = buckets.iter().flat_map(|bucket| {
                let distances = edges.0[*bucket] as usize..edges.0[bucket + 1] as usize;
                let share = 1.0 / distances.len() as f64;
                keys.rows()
                    .into_iter()
                    .map(move |key| (key, distances.clone(), share))
            });
            let exact: Vec<f64> = exact
                .map(|(key, distances, share)| {
                    distances
                        .map(|distance| at_own.dot(&rotated(key, at - distance)) * share)
                        .sum()
                })
                .collect();
            // Scores are up to a constant of the query.
            let constant = exact[0] - f64::from(scores[0]);
            let size = query.dot(&query).sqrt() as f64 * (d as f64).sqrt() * 10.0;
            for (i, (score, exact)) in scores.iter().zip(&exact).enumerate() {
                let off = (f64::from(*score) + constant - exact).abs();
                assert!(
                    off < 1e-4 * size,
                    "d {d}, {i}: {score} + {constant} is not {exact}"
                );
            }
            let spread = exact
                .iter()
                .fold(0.0f64, |most, x| most.max((x - exact[0]).abs()));
            assert!(spread > 1e-2 * size, "{spread}");
        }
    }
}

/// Fails where `actual` is further from `exact` than attention in f32 explains.
#[track_caller]
fn close<'a>(actual: impl IntoIterator<Item = f32>, exact: impl IntoIterator<Item = &'a f64>, what: &str) {
    for (a, e) in actual.into_iter().zip(exact) {
        // Scores are good to (d + 2) 2^-24 |q| |k| / sqrt(d): 9e-5 for d = 128 and normal values, of
        // which an output has less, since the errors of its weights average out.
        assert!((f64::from(a) - e).abs() < 5e-5, "{what}: {a} instead of {e}");
    }
}

#[test]
fn causal_attention_is_that_of_the_definition() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    // Rows, group, d, KV heads, first position, window.
    for (m, r, d, g, first, window) in [
        (1, 1, 16, 1, 0, None),
        (7, 2, 48, 2, 0, Some(3)),
        (33, 3, 64, 1, 5, None),
        (85, 3, 80, 1, 0, Some(40)),
        (255, 1, 16, 1, 0, None),
        (256, 1, 16, 1, 1, Some(256)),
        (257, 5, 16, 1, 0, Some(1)),
        (300, 8, 128, 1, 0, Some(100)),
        (129, 2, 128, 2, 200, Some(300)),
        (64, 8, 64, 1, 511, None),
        (520, 1, 64, 2, 3, Some(257)),
        (31, 40, 16, 1, 0, None),
        (140, 2, 256, 2, 7, None),
        (200, 3, 144, 1, 0, Some(150)),
        (400, 600, 16, 1, 0, Some(20)),
    ] {
        let n = first + m;
        let cube = |heads: usize, rows: usize, rng: &mut ChaCha8Rng| {
            Array3::from_shape_simple_fn((heads, rows, d), || noise(rng))
        };
        let (q, k, v) = (
            cube(g * r, m, &mut rng),
            cube(g, n, &mut rng),
            cube(g, n, &mut rng),
        );
        let mut out = Array2::from_elem((m, g * r * d), f32::NAN);
        attention::causal(q.view(), k.view(), v.view(), first, window, false, out.view_mut());
        let what = format!("m {m} r {r} d {d} first {first} window {window:?}");
        let exact = reference::causal(q.view(), k.view(), v.view(), first, window);
        close(out, exact.iter(), &what);
    }
}

#[test]
fn decode_attention_is_that_of_the_definition() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for (n, r, d) in [
        (1, 1, 16),
        (2, 8, 48),
        (17, 2, 64),
        (64, 3, 80),
        (255, 5, 128),
        (700, 8, 16),
    ] {
        let (q, k, v) = (
            matrix(&mut rng, r, d),
            matrix(&mut rng, 2 * n, d),
            matrix(&mut rng, 2 * n, d),
        );
        let store = |x: &Array2<f32>, kind| {
            let mut rows = float::cache(kind, d, 0);
            rows.extend(x.view());
            rows
        };
        for kind in [Float::F32, Float::F16, Float::Bf16] {
            let (keys, values) = (store(&k, kind), store(&v, kind));
            // Every second position, out of what the cache really holds.
            let positions: Vec<u32> = (0..n as u32).map(|p| 2 * p + 1).collect();
            let mut scratch = vec![0.0; d];
            let mut held = |rows: &dyn RowCache| {
                let values = positions
                    .iter()
                    .flat_map(|p| rows.row(*p as usize, &mut scratch).to_vec());
                Array2::from_shape_vec((n, d), values.collect()).unwrap()
            };
            let (k, v) = (held(&*keys), held(&*values));
            let mut out = Array2::from_elem((r, d), f32::NAN);
            let (weights, _) =
                attention::decode_with_weights(q.view(), &*keys, &*values, &positions, out.view_mut());
            assert_eq!(weights.dim(), (r, n));
            for (query, (out, weights)) in q
                .rows()
                .into_iter()
                .zip(out.rows().into_iter().zip(weights.rows()))
            {
                let exact = reference::attention(query, k.view(), v.view(), 0..n);
                close(out.to_vec(), exact.iter(), &format!("n {n} r {r} d {d} {kind:?}"));
                assert!((weights.sum() - 1.0).abs() < 1e-5);
            }
        }
    }
    let mut out = Array2::from_elem((2, 16), f32::NAN);
    let empty = RowStore::<f32>::new(16, 0);
    attention::decode(
        matrix(&mut rng, 2, 16).view(),
        &empty,
        &empty,
        &[],
        out.view_mut(),
    );
    assert!(out.iter().all(|v| *v == 0.0), "no position gives zeros");
}

#[test]
fn every_spelling_of_a_rope_means_the_same() {
    let base = read_json(&golden("llama_default").join("config.json")).unwrap();
    let canonical = |fields: Value| {
        let mut config = base.clone();
        let map = config.as_object_mut().unwrap();
        ["rope_theta", "rope_scaling"]
            .iter()
            .for_each(|name| drop(map.remove(*name)));
        map.extend(fields.as_object().unwrap().clone());
        ModelConfig::parse(&config).unwrap().canonical()["rope"].clone()
    };
    let same = |spellings: &[Value], expected: Value| {
        for spelling in spellings {
            assert_eq!(canonical(spelling.clone()), expected, "{spelling}");
        }
    };
    same(
        &[
            json!({ "rope_theta": 5e5 }),
            json!({ "rope_theta": 5e5, "rope_scaling": null }),
            json!({ "rope_theta": 5e5, "rope_scaling": { "type": "default" } }),
            json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } }),
            json!({ "rope_theta": 5e5, "rope_parameters": { "rope_type": "default" } }),
        ],
        json!({ "rope_type": "default", "theta": 5e5 }),
    );
    same(
        &[
            json!({}),
            json!({ "rope_scaling": null, "rope_parameters": null }),
        ],
        json!({ "rope_type": "default", "theta": 1e4 }),
    );
    same(
        &[
            json!({ "rope_theta": 1e6, "rope_scaling": { "type": "linear", "factor": 4.0 } }),
            json!({ "rope_theta": 1e6, "rope_scaling": { "rope_type": "linear", "factor": 4 } }),
            json!({ "rope_parameters": { "rope_theta": 1e6, "rope_type": "linear", "factor": 4.0 } }),
        ],
        json!({ "rope_type": "linear", "factor": 4.0, "theta": 1e6 }),
    );
    let yarn = json!({ "factor": 4.0, "original_max_position_embeddings": 32 });
    let with = |name: &str, more: Value| {
        let mut map = yarn.clone();
        map[name] = json!("yarn");
        map.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        map
    };
    same(
        &[
            json!({ "rope_theta": 1e4, "rope_scaling": with("type", json!({})) }),
            json!({ "rope_theta": 1e4, "rope_scaling": with("rope_type", json!({ "beta_fast": 32, "beta_slow": 1.0 })) }),
            json!({ "rope_parameters": with("rope_type", json!({ "rope_theta": 1e4, "truncate": true })) }),
        ],
        json!({
            "rope_type": "yarn", "theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32.0,
            "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.1 * 4f64.ln() + 1.0, "truncate": true,
        }),
    );
}

#[test]
fn a_static_set_is_what_its_words_say() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for _ in 0..5000 {
        let t = rng.gen_range(0..80);
        let model_window = rng.gen_bool(0.5).then(|| rng.gen_range(1..50));
        let (sinks, window) = (rng.gen_range(0..12), rng.gen_range(1..30));
        let set = StaticSet::at(t, model_window, sinks, window);
        let visible = |p: &usize| *p <= t && model_window.is_none_or(|w| p + w > t);
        let fixed = |p: &usize| *p < sinks || p + window > t;
        let all: Vec<usize> = (0..100).filter(visible).collect();
        let chosen: Vec<usize> = all.iter().copied().filter(|p| !fixed(p)).collect();
        let what = format!("t {t} model window {model_window:?} sinks {sinks} window {window}");
        assert_eq!(set.visible().collect::<Vec<_>>(), all, "{what}");
        assert_eq!(set.candidates.clone().collect::<Vec<_>>(), chosen, "{what}");
        assert_eq!(set.len(), all.len() - chosen.len(), "{what}");
        assert!(!set.is_empty(), "the current token is always attended");
    }
}

#[test]
fn json_objects_are_written_in_key_order() {
    // Manifests are hashed as text; a build in which maps keep insertion order would change them.
    let text = json!({ "b": { "d": 1, "c": 2 }, "a": [] }).to_string();
    assert_eq!(text, r#"{"a":[],"b":{"c":2,"d":1}}"#);
    // Numbers survive being written and read.
    for x in [0.1 + 0.2, 1e-300, 12345.678901234567, f64::from(0.1f32)] {
        let back: f64 = serde_json::from_str(&json!(x).to_string()).unwrap();
        assert_eq!(back.to_bits(), x.to_bits());
    }
}

/// Retrieval on the states of the bundled model, in the four settings of the paper's ablation.
#[test]
fn retrieval_on_captured_states() {
    for rope in ["windowed", "standard"] {
        for metric in ["query-aware", "plain"] {
            retrieval(rope, metric);
        }
    }
}

/// Step by step against f64: the codes by distance, the scores by value, the selection exactly.
fn retrieval(rope: &str, metric: &str) {
    let windowed = rope == "windowed";
    let scratch = Scratch::new();
    let model = root().join("calib-data/model");
    let text = root().join("calib-data/heldout.txt");
    let calibrate = format!(
        "calibrate --model {} --text {} --max-tokens 3000 --uuid-tokens 600 --seq-len 512 --size 64 \
         --wrope-position 256 --rope {rope} --metric {metric} --wpq-bits none --no-verdict",
        model.display(),
        text.display()
    );
    let out = scratch.make("art.safetensors", &calibrate);
    let artifact = Artifact::open(Path::new(&out), SECTIONS).unwrap();
    let decoder = Decoder::open(&model).unwrap();
    let codebooks = Codebooks::load(&artifact, &decoder.ropes).unwrap();
    let c = &decoder.config;
    let (g, d, r) = (c.n_kv_heads, c.head_dim, c.group());
    let section = artifact.section("a2ats").unwrap();
    let (codewords, means, chols) = (
        section.widened(CODEBOOK).unwrap(),
        section.read::<f32>(MEAN).unwrap(),
        section.read::<f32>(CHOL).unwrap(),
    );
    let tokenizer = Tokenizer::open(&model, c).unwrap();
    let ids = tokenizer
        .encode_prefix(&std::fs::read_to_string(text).unwrap(), 700)
        .unwrap();
    let n = ids.len();
    let (mut exact, mut keys) = (0, 0);
    for (layer, states) in captured(&decoder, &ids).iter().enumerate() {
        let (queries, keys_used) = if windowed {
            (&states.q.pre, &states.k.pre)
        } else {
            (&states.q.rope, &states.k.rope)
        };
        for head in 0..g {
            let i = layer * g + head;
            let wide = |values: &[f32], rows: usize| {
                let part = values[i * rows * d..(i + 1) * rows * d]
                    .iter()
                    .map(|v| f64::from(*v));
                Array2::from_shape_vec((rows, d), part.collect()).unwrap()
            };
            let (codebook, mean, chol) = (wide(&codewords, 64), wide(&means, 1), wide(&chols, d));
            assert!(metric == "query-aware" || chol == Array2::<f64>::eye(d));
            let k = keys_used.index_axis(Axis(0), head);
            let codes = codebooks.head(layer, head).encode(k);
            let z = k.mapv(f64::from).dot(&chol) - &mean;
            let norms = codebook.rows().into_iter().map(|word| word.dot(&word));
            let largest = norms.fold(0.0, f64::max);
            for (z, code) in z.rows().into_iter().zip(&codes) {
                let distance = |c: usize| -> f64 {
                    let pairs = z.iter().zip(codebook.row(c));
                    pairs.map(|(z, word)| (z - word).powi(2)).sum()
                };
                let best = (0..64).map(distance).fold(f64::INFINITY, f64::min);
                let found = distance(usize::from(*code));
                exact += usize::from(found == best);
                keys += 1;
                // The search is good to 4 (d + 2) 2^-24 (|z| |c| + c^2 / 2); as much again for z in f32.
                let size = z.dot(&z) + largest;
                assert!(
                    found - best <= 8.0 * (d + 2) as f64 * F32_UNIT * size,
                    "{found} {best}"
                );
            }
            let group = s![head * r..(head + 1) * r, n - 1, ..];
            let q = queries.slice(group);
            let scores = codebooks.head(layer, head).scores(q);
            let inverse = invert_lower(chol.view()).unwrap().unwrap();
            let table = decoder.ropes.layer(0).table(256..257);
            for (q, scores) in q.rows().into_iter().zip(scores.rows()) {
                let mut qt = q.to_vec();
                if windowed {
                    table.rotate(&mut qt, 0);
                }
                let y = inverse.dot(&Array1::from(qt).mapv(f64::from));
                let bound = (d + 2) as f64 * F32_UNIT;
                for (score, c) in scores.iter().zip(codebook.rows()) {
                    let size: f64 = c.iter().zip(&y).map(|(a, b)| (a * b).abs()).sum();
                    assert!((f64::from(*score) - c.dot(&y)).abs() <= bound * size);
                }
            }
            let kv = KvHead::new(KvType::F32, d, 0, Center::Median);
            let mut a2ats = A2ats::new(Arc::clone(codebooks.head(layer, head)), None);
            for p in 0..n {
                let key = |k: &Array3<f32>| k.slice(s![head, p..p + 1, ..]).to_owned();
                a2ats.append(key(&states.k.pre).view(), key(&states.k.rope).view());
            }
            for budget in [1, 2, 20, 42, 300] {
                let step = Step {
                    step: 0,
                    visible: 0..n,
                    candidates: 4..n - 64,
                    budget,
                    q_pre: states.q.pre.slice(group),
                    q_rope: states.q.rope.slice(group),
                    kv: &kv,
                };
                let expected = reference::select(scores.view(), &codes[4..n - 64], 4, budget);
                assert_eq!(
                    a2ats.select(&step).positions,
                    expected,
                    "layer {layer} head {head} budget {budget}"
                );
            }
        }
    }
    assert!(
        exact * 1000 >= 999 * keys,
        "{exact} of {keys} codes are the exact argmin"
    );
}
