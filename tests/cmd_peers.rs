//! The sections of peers, `doublesparsity` and `triattention`: made on request, with the statistics of their definitions.

use crate::common::*;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::dump::{Dump, State};
use kvsmith::internal::method::doublesparsity;
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::method::triattention;
use serde_json::json;

const PEERS: [&str; 2] = ["doublesparsity", "triattention"];

fn input(scratch: &Scratch, model: &str) -> String {
    let tokens = scratch.tokens("tokens.json", &documents(&[90, 70, 80], 4));
    format!(
        "--model {} --tokens {tokens} --seq-len 60 --size 8",
        checkpoint(model)
    )
}

#[test]
fn sections_are_made_on_request_alone() {
    let scratch = Scratch::new();
    let input = input(&scratch, "llama_default");
    let plain = scratch.make("plain", &format!("calibrate {input} --no-verdict"));
    let asked = scratch.make("asked", &format!("calibrate {input} --no-verdict --peers"));
    let open = |path: &str| Artifact::open(path.as_ref(), SECTIONS).unwrap();
    for section in PEERS {
        assert!(!open(&plain).has(section) && open(&asked).has(section));
    }
    // Everything else stays as it is.
    let (few, all) = (read_tensors(&plain), read_tensors(&asked));
    assert_eq!(all.len(), few.len() + 3);
    for (name, tensor) in &few {
        assert!(all[name].bytes == tensor.bytes, "{name}");
    }
    // The methods without their section, and labels that no head can have.
    let prompt = scratch.tokens("prompt.json", &documents(&[80], 5));
    let run = |artifact: &str, options: &str| {
        let model = checkpoint("llama_default");
        kvsmith(&format!(
            "run --model {model} --artifact {artifact} --tokens {prompt} --max-new 3 --ignore-eos --json {options}"
        ))
    };
    for method in PEERS {
        let method = format!("--method {method} --budget 7");
        run(&plain, &method).fails(2, "section `", "calibrate --peers");
        run(&asked, &method).ok();
    }
    run(&asked, "--method doublesparsity --ds-channels 17").fails(2, "17", "from 1 to 16");
    run(&asked, "--method doublesparsity --ds-channels 0").fails(2, "--ds-channels", "");
    // The sections of peers give no default method.
    assert_eq!(run(&asked, "--budget 7").json()["method"], "wpq");
    let shown = kvsmith(&format!("inspect -v {asked}")).ok().stdout;
    for part in [
        "in d/8",
        "concentration",
        "channels by the sum of |q k|",
        "mean queries",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

/// A plan knows the sections that were asked for, and their stages.
#[test]
fn plans_have_the_stages_of_peers() {
    let scratch = Scratch::new();
    let input = input(&scratch, "llama_default");
    let plan =
        |options: &str| kvsmith(&format!("calibrate {input} --no-verdict --plan --json {options}")).json();
    let names = |plan: &serde_json::Value| -> Vec<String> {
        let stages = plan["stages"].as_array().unwrap();
        stages
            .iter()
            .map(|stage| stage["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let (plain, asked) = (plan(""), plan("--peers"));
    let more: Vec<String> = names(&asked)
        .into_iter()
        .filter(|name| !names(&plain).contains(name))
        .collect();
    assert_eq!(more, ["channels", "mean queries"]);
    let bytes = |plan: &serde_json::Value| plan["artifact_bytes"].as_u64().unwrap();
    // Two layers: 2 x 16 channel numbers, and 4 x 8 pairs of three values.
    assert!(bytes(&asked) - bytes(&plain) >= 2 * 4 * (2 * 16 + 3 * 4 * 8));
}

/// The sections of a dump against sums over its states, in f64.
#[test]
fn statistics_are_those_of_the_kept_rows() {
    for (name, holdout) in [("llama_default", 0.0), ("qwen2_sliding", 0.4)] {
        let scratch = Scratch::new();
        let (model, tokens) = (
            checkpoint(name),
            scratch.tokens("tokens.json", &documents(&[70, 40, 55], 6)),
        );
        let dump = scratch.make(
            "dump",
            &format!("dump --model {model} --tokens {tokens} --seq-len 50 --queries --dtype f32 --holdout {holdout}"),
        );
        let sections = PEERS.map(|section| scratch.make(section, &format!("{section} --dump {dump}")));
        let packed = scratch.make("packed", &format!("pack {} --model {model}", sections.join(" ")));
        let artifact = Artifact::open(packed.as_ref(), SECTIONS).unwrap();
        let read = |section: &str, tensor: &str| {
            let section = artifact.section(section).unwrap();
            section
                .read::<f32>(tensor)
                .unwrap()
                .into_iter()
                .map(f64::from)
                .collect::<Vec<f64>>()
        };
        let channels = artifact.section(PEERS[0]).unwrap();
        let channels: Vec<u32> = channels.read(doublesparsity::CHANNELS).unwrap();
        let (means, magnitudes) = (
            read(PEERS[1], triattention::Q_MEAN),
            read(PEERS[1], triattention::Q_ABS),
        );
        let dump = Dump::open(&[&dump]).unwrap();
        let kept: Vec<usize> = (0..dump.n).filter(|row| dump.kept[*row]).collect();
        assert_eq!(kept.len() < dump.n, holdout > 0.0);
        let (sizes, ropes) = (dump.sizes, dump.origin.model.ropes());
        let (r, d) = (sizes.n_heads / sizes.n_kv_heads, sizes.head_dim);
        let position = |row: usize| {
            let starts = dump.corpus.block_start.iter().map(|start| *start as usize);
            row - starts.filter(|start| *start <= row).max().unwrap()
        };
        for layer in 0..sizes.n_layers {
            let states = dump.layer(layer).unwrap();
            for kv_head in 0..sizes.n_kv_heads {
                let keys = states.read(State::KPre, kv_head, 0, dump.n).unwrap();
                let mut sums = vec![0.0; d];
                for query_head in kv_head * r..(kv_head + 1) * r {
                    let queries = states.read(State::QPre, query_head, 0, dump.n).unwrap();
                    let mut pairs = vec![[0.0; 3]; d / 2];
                    for row in &kept {
                        let turned = |x: &ndarray::Array2<f32>| {
                            let (mut x, p) = (x.row(*row).to_vec(), position(*row));
                            ropes.layer(layer).table(p..p + 1).rotate(&mut x, 0);
                            x
                        };
                        let (q, k) = (turned(&queries), turned(&keys));
                        for (sum, (q, k)) in sums.iter_mut().zip(q.iter().zip(&k)) {
                            *sum += f64::from(*q).abs() * f64::from(*k).abs();
                        }
                        for (f, pair) in pairs.iter_mut().enumerate() {
                            let (x, y) = (queries[[*row, f]], queries[[*row, f + d / 2]]);
                            let (x, y) = (f64::from(x), f64::from(y));
                            let of = [x, y, (x * x + y * y).sqrt()];
                            pair.iter_mut()
                                .zip(of)
                                .for_each(|(sum, x)| *sum += x / kept.len() as f64);
                        }
                    }
                    let at = (layer * sizes.n_heads + query_head) * d / 2;
                    for (f, [x, y, abs]) in pairs.into_iter().enumerate() {
                        let found = [means[2 * (at + f)], means[2 * (at + f) + 1], magnitudes[at + f]];
                        for (found, exact) in found.into_iter().zip([x, y, abs]) {
                            // A rounding to f32.
                            assert!(
                                (found - exact).abs() <= 1e-7 * abs,
                                "{name} {layer} {query_head} {f}"
                            );
                        }
                    }
                }
                let first = (layer * sizes.n_kv_heads + kv_head) * d;
                let order = &channels[first..first + d];
                for pair in order.windows(2) {
                    let [high, low] = [pair[0], pair[1]].map(|channel| sums[channel as usize]);
                    assert!(
                        high >= low * (1.0 - 1e-12),
                        "{name} {layer} {kv_head}: {order:?} {sums:?}"
                    );
                }
                let reports = &artifact.manifest.quality.sections[PEERS[0]][layer][kv_head];
                let share = sums[order[0] as usize] / sums.iter().sum::<f64>();
                let told = reports["share_eighth"].as_f64().unwrap();
                // One channel of 8 is one eighth; of 16, two are.
                let second = if d == 16 {
                    sums[order[1] as usize] / sums.iter().sum::<f64>()
                } else {
                    0.0
                };
                assert!((told - share - second).abs() < 1e-9, "{told} {share} {second}");
                assert_eq!(reports["keys"], json!(kept.len()));
            }
        }
    }
}

/// Values that no fit gives are refused when the section is written to a file and when it is used.
#[test]
fn sections_that_no_fit_gives_are_refused() {
    let scratch = Scratch::new();
    let input = input(&scratch, "llama_default");
    let artifact = scratch.make("artifact", &format!("calibrate {input} --no-verdict --peers"));
    let prompt = scratch.tokens("prompt.json", &documents(&[80], 5));
    let crafted = scratch.path("crafted");
    let model = checkpoint("llama_default");
    let refused = |tensor: &str, value: &[u8], method: &str, culprit: &str| {
        with_values(&artifact, &crafted, tensor, value);
        let run = format!(
            "run --model {model} --artifact {crafted} --tokens {prompt} --max-new 3 --method {method}"
        );
        kvsmith(&run).fails(1, culprit, "damaged");
        kvsmith(&format!("inspect --verify {crafted}")).fails(1, culprit, "damaged");
    };
    for channel in [16u32, u32::MAX] {
        let what = "`doublesparsity.channels` of layer 1, KV head 1 does not have every channel once";
        refused("doublesparsity.channels", &channel.to_le_bytes(), PEERS[0], what);
    }
    for value in [-1.0f32, 0.0] {
        let what = "layer 1, query head 3: a value of `triattention.q_mean` exceeds";
        refused("triattention.q_abs", &value.to_le_bytes(), PEERS[1], what);
    }
    refused(
        "triattention.q_mean",
        &1e30f32.to_le_bytes(),
        PEERS[1],
        "layer 1, query head 3",
    );
    refused(
        "triattention.q_mean",
        &f32::NAN.to_le_bytes(),
        PEERS[1],
        "NaN or infinite",
    );
}

/// Fits run on the CPU: another device is refused by the section's name, and `calibrate` says what stays on the CPU.
#[test]
fn other_devices_are_refused_by_name() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60, 60], 4));
    let dump = scratch.make(
        "dump",
        &format!("dump --model {model} --tokens {tokens} --queries --dtype f32"),
    );
    for section in PEERS {
        for device in ["wgpu", "cuda"] {
            let out = scratch.path("out");
            let command = format!("{section} --dump {dump} --device {device} -o {out}");
            kvsmith(&command).fails(3, section, "--device cpu");
            assert!(!std::path::Path::new(&out).exists());
        }
        // A dump without queries.
        let short = scratch.make(
            &format!("short-{section}"),
            &format!("dump --model {model} --tokens {tokens} --dtype f32"),
        );
        kvsmith(&format!("{section} --dump {short} -o {}", scratch.path("out"))).fails(
            1,
            "queries",
            "--queries",
        );
    }
}
