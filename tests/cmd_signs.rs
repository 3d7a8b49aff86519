//! `signs`: sign-pattern centroids against their definition, computed naively in f64.

use crate::common::*;
use half::f16;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::compute::cpu::sign_sums;
use kvsmith::internal::dump::{Dump, State};
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::method::selfindex::{centroids, pattern};
use ndarray::{Array2, Axis};
use serde_json::json;

/// The value at a rank of the sorted values.
fn ranked(values: impl Iterator<Item = f64>, rank: impl Fn(usize) -> usize) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[rank(values.len())]
}

#[test]
fn patterns_have_the_first_channel_in_the_lowest_bit() {
    let x = [0.5, -1.0, 2.0, -0.25, -3.0, 0.0, 1.5, 4.0];
    assert_eq!((pattern(&x[..4]), pattern(&x[4..])), (5, 12));
    assert_eq!(pattern(&[0.0, -0.0, 0.0, -0.0]), 0, "zero is not positive");
}

#[test]
fn patterns_that_no_key_has_get_mean_magnitudes() {
    let x = Array2::from_shape_vec((2, 4), vec![1.0, 2.0, -3.0, 4.0, 3.0, 2.0, -1.0, 2.0]).unwrap();
    let (values, counts) = centroids(sign_sums(x.view()));
    let centroid = |p: usize| {
        values[4 * p..4 * p + 4]
            .iter()
            .map(|v| v.to_f32())
            .collect::<Vec<_>>()
    };
    assert_eq!(counts.iter().sum::<u64>(), 2);
    assert_eq!((counts[0b1011], centroid(0b1011)), (2, vec![2.0, 2.0, -2.0, 3.0]));
    assert_eq!(centroid(0b0110), [-2.0, 2.0, 2.0, -3.0]);
    let empty = centroids(sign_sums(Array2::zeros((0, 8)).view()));
    assert!(empty.0.iter().all(|v| *v == f16::ZERO) && empty.0.len() == 128);
}

#[test]
fn the_section_is_what_its_definition_says() {
    let scratch = Scratch::new();
    for (name, center) in [
        ("llama_llama3", "median"),
        ("qwen2_bias", "mean"),
        ("llama_yarn", "median"),
    ] {
        let model = checkpoint(name);
        let tokens = scratch.tokens("tokens.json", &documents(&[90, 33, 61], 5));
        let command = format!("dump --model {model} --tokens {tokens} --dtype f32");
        let dump = scratch.make(&format!("{name}-dump"), &command);
        let command = format!("signs --dump {dump} --center {center}");
        let out = scratch.make(&format!("{name}.st"), &command);
        let artifact = Artifact::open(out.as_ref(), SECTIONS).unwrap();
        artifact.verify().unwrap();
        assert_eq!(artifact.manifest.sections["sign"].params["center"], json!(center));
        let dump = Dump::open(&[&dump]).unwrap();
        let (l, g, d) = (dump.sizes.n_layers, dump.sizes.n_kv_heads, dump.sizes.head_dim);
        let ropes = dump.origin.model.ropes();
        let stored = |tensor: &str, shape: &[usize]| artifact.store.read::<f32>(tensor, shape).unwrap();
        let centroid: Vec<f16> = artifact
            .store
            .read("sign.centroid", &[l, g, d / 4, 16, 4])
            .unwrap();
        let count: Vec<u64> = artifact.store.read("sign.count", &[l, g, d / 4, 16]).unwrap();
        let (alpha, mean_pre) = (
            stored("sign.alpha", &[l, g, d]),
            stored("sign.mean_pre", &[l, g, d]),
        );
        assert!(dump.kept.contains(&false));
        for at in 0..l * g {
            let keys = dump
                .layer(at / g)
                .unwrap()
                .read(State::KPre, at % g, 0, dump.n)
                .unwrap();
            let kept: Vec<usize> = (0..dump.n).filter(|i| dump.kept[*i]).collect();
            let close = |a: f32, e: f64, size: f64| {
                assert!(
                    (f64::from(a) - e).abs() <= 1e-5 * size,
                    "{name} head {at}: {a} {e}"
                );
            };
            let size = keys.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
            for (c, mean) in mean_pre[at * d..(at + 1) * d].iter().enumerate() {
                let sum: f64 = kept.iter().map(|i| f64::from(keys[[*i, c]])).sum();
                close(*mean, sum / kept.len() as f64, size);
            }
            // Every block turns from position 0 and has its own center.
            let mut centered: Vec<Vec<f64>> = Vec::new();
            for block in dump.corpus.block_start.windows(2) {
                let start = block[0] as usize;
                let rows: Vec<usize> = kept
                    .iter()
                    .copied()
                    .filter(|i| (block[0]..block[1]).contains(&(*i as u32)))
                    .collect();
                let rotated: Vec<Vec<f32>> = rows
                    .iter()
                    .map(|i| {
                        let mut key = keys.index_axis(Axis(0), *i).to_vec();
                        ropes
                            .layer(at / g)
                            .table(i - start..i - start + 1)
                            .rotate(&mut key, 0);
                        key
                    })
                    .collect();
                if rotated.is_empty() {
                    continue;
                }
                let channel = |c: usize| rotated.iter().map(move |k| f64::from(k[c]));
                let centers: Vec<f64> = (0..d)
                    .map(|c| match center {
                        "median" => ranked(channel(c), |n| (n - 1) / 2),
                        _ => channel(c).sum::<f64>() / rotated.len() as f64,
                    })
                    .collect();
                centered.extend(
                    rotated
                        .iter()
                        .map(|k| (0..d).map(|c| f64::from(k[c]) - centers[c]).collect()),
                );
            }
            for c in 0..d {
                let n = centered.len();
                let rank = (n as f64 * 0.999).ceil() as usize - 1;
                close(
                    alpha[at * d + c],
                    ranked(centered.iter().map(|k| k[c].abs()), |_| rank),
                    size,
                );
            }
            for group in 0..d / 4 {
                let code = |k: &Vec<f64>| {
                    (0..4)
                        .map(|e| usize::from(k[4 * group + e] > 0.0) << e)
                        .sum::<usize>()
                };
                for p in 0..16 {
                    let members: Vec<&Vec<f64>> = centered.iter().filter(|k| code(k) == p).collect();
                    let place = (at * (d / 4) + group) * 16 + p;
                    assert_eq!(
                        count[place],
                        members.len() as u64,
                        "{name} head {at} group {group} pattern {p}"
                    );
                    for e in 0..4 {
                        let channel = 4 * group + e;
                        let expected = if members.is_empty() {
                            let magnitude = centered.iter().map(|k| k[channel].abs()).sum::<f64>();
                            let sign = if p & (1 << e) == 0 { -1.0 } else { 1.0 };
                            sign * magnitude / centered.len() as f64
                        } else {
                            members.iter().map(|k| k[channel]).sum::<f64>() / members.len() as f64
                        };
                        // Half a unit of f16's 11 bits, and f32 rounding before.
                        let error = (f64::from(centroid[4 * place + e].to_f32()) - expected).abs();
                        assert!(error <= expected.abs() / 2048.0 + 1e-5 * size, "{name}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_the_bytes() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_d128");
    let tokens = scratch.tokens("tokens.json", &documents(&[200, 100], 9));
    let dump = scratch.make("dump", &format!("dump --model {model} --tokens {tokens}"));
    let bytes = |threads: usize| {
        let command = format!("signs --dump {dump} --threads {threads}");
        std::fs::read(scratch.make(&format!("{threads}.st"), &command)).unwrap()
    };
    assert_eq!(bytes(1), bytes(3));
}
