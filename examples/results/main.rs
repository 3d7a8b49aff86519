//! Measures every method on the bundled model and writes `docs/results.md`, the JSON behind it and its
//! pictures. `make results` runs it.

mod pictures;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvsmith::artifact::Artifact;
use serde_json::{Value, json};

type Error = Box<dyn std::error::Error>;

const MODEL: &str = "calib-data/model";
const TEXT: &str = "calib-data/text.txt";
const HELD_OUT: &str = "calib-data/heldout.txt";
const NEEDLES: &str = "calib-data/needles.jsonl";
const METHODS: &str = "topk,a2ats,selfindex,lfps,ctkvr,quest,snapkv,streaming,random";
const BUDGETS: &str = "0.02,0.04,0.06,0.1,0.2";

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let program = args.next().ok_or("the kvsmith binary is the first argument")?;
    let work = PathBuf::from(args.next().ok_or("a scratch folder is the second argument")?);
    std::fs::create_dir_all(&work)?;
    let lab = Lab { program, work };
    let numbers = Path::new("docs/results/results.json");
    let results = match args.next().as_deref() {
        None => lab.all()?,
        // The page and the pictures again, from the numbers that are there.
        Some("page") => serde_json::from_str(&std::fs::read_to_string(numbers)?)?,
        Some(other) => return Err(format!("`{other}` is not known").into()),
    };
    let base = lab.artifact(BASE)?;
    std::fs::create_dir_all("docs/results")?;
    let data = serde_json::to_string_pretty(&results)?;
    std::fs::write(numbers, data + "\n")?;
    pictures::all(&results, &base)?;
    std::fs::write("docs/results.md", page(&results))?;
    Ok(())
}

/// Options of the calibration that most cases use.
const BASE: &str = "--size 1024 --max-tokens 65536";

/// Cases of one table.
struct Group {
    name: &'static str,
    title: &'static str,
    /// What the paper says, and what is held against it.
    about: &'static str,
    /// Whether it is measured on needles, on text, or on both.
    on: &'static [On],
    methods: &'static str,
    budgets: &'static str,
    cases: Vec<Case>,
    /// Columns of the table.
    columns: &'static [&'static str],
    /// Says of the measured values whether the paper's ordering holds.
    verdict: fn(&[Measured]) -> String,
    /// Why something may not be reproduced here.
    why: &'static str,
}

#[derive(Clone, Copy, PartialEq)]
enum On {
    Text,
    Needles,
}

struct Case {
    label: &'static str,
    /// Options of `calibrate`; empty for no artifact.
    calibrate: &'static str,
    /// Options of `eval`.
    eval: &'static str,
}

/// One row of a table.
struct Measured<'a> {
    case: &'a str,
    row: &'a Value,
}

impl Measured<'_> {
    fn get(&self, key: &str) -> f64 {
        self.row[key].as_f64().unwrap_or(f64::NAN)
    }
}

struct Lab {
    program: String,
    work: PathBuf,
}

impl Lab {
    fn run(&self, arguments: &str) -> Result<Vec<u8>, Error> {
        let output = Command::new(&self.program)
            .args(arguments.split_whitespace())
            .stderr(std::process::Stdio::inherit())
            .output()?;
        match output.status.success() {
            true => Ok(output.stdout),
            false => Err(format!("failed: kvsmith {arguments}").into()),
        }
    }

    /// The artifact of these options, made once.
    fn artifact(&self, options: &str) -> Result<PathBuf, Error> {
        self.artifact_of(TEXT, &format!("--uuid-tokens 8192 {options}"))
    }

    /// The artifact of these options and this text, made once.
    fn artifact_of(&self, text: &str, options: &str) -> Result<PathBuf, Error> {
        let name: String = options
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        let stem = Path::new(text).file_stem().and_then(|s| s.to_str()).unwrap_or("");
        let path = self.work.join(format!("{stem}{name}.safetensors"));
        if !path.exists() {
            self.run(&format!(
                "calibrate -q --model {MODEL} --text {text} --wrope-position 1024 {options} -o {}",
                path.display()
            ))?;
        }
        Ok(path)
    }

    /// Needle accuracy at a budget of 6 %, for prompts of each length.
    fn by_length(&self) -> Result<Value, Error> {
        let mut files: BTreeMap<u64, String> = BTreeMap::new();
        for line in std::fs::read_to_string(NEEDLES)?.lines() {
            let needle: Value = serde_json::from_str(line)?;
            let tokens = needle["tokens"].as_f64().ok_or("a needle without its length")?;
            // Lengths are near 512, 1024 and 2000.
            let length = [512u64, 1024, 2000]
                .into_iter()
                .min_by_key(|l| (tokens - *l as f64).abs() as u64)
                .unwrap_or(0);
            let file = files.entry(length).or_default();
            *file += line;
            *file += "\n";
        }
        let mut rows = Vec::new();
        for (length, lines) in files {
            let path = self.work.join(format!("needles-{length}.jsonl"));
            std::fs::write(&path, lines)?;
            let artifact = self.artifact(BASE)?;
            let out: Value = serde_json::from_slice(&self.run(&format!(
                "eval -q --json --model {MODEL} --methods {METHODS} --budgets 0.06 --artifact {} --needles {}",
                artifact.display(),
                path.display()
            ))?)?;
            rows.push(json!({ "length": length, "full": out["full_needle_accuracy"], "rows": out["rows"] }));
        }
        Ok(Value::Array(rows))
    }

    /// Eq. 7 of A2ATS per layer: how much alike are the codebooks of two texts, of keys before and after
    /// rotation.
    fn similarity(&self) -> Result<Value, Error> {
        let mut rows = Vec::new();
        for rope in ["windowed", "standard"] {
            let options = format!(
                "--metric plain --rope {rope} --size 256 --max-tokens 20000 --uuid-tokens 0 --holdout 0"
            );
            let codebooks = [TEXT, HELD_OUT].map(|text| -> Result<_, Error> {
                Ok(codebook(&Artifact::open(&self.artifact_of(text, &options)?)?)?)
            });
            let [one, other] = codebooks;
            let (one, other) = (one?, other?);
            for (layer, (one, other)) in one.iter().zip(&other).enumerate() {
                let heads = one.iter().zip(other);
                let sum: f64 = heads
                    .map(|(a, b)| (nearest_cosine(a, b) + nearest_cosine(b, a)) / 2.0)
                    .sum();
                rows.push(json!({ "rope": rope, "layer": layer, "similarity": sum / one.len() as f64 }));
            }
        }
        Ok(Value::Array(rows))
    }

    /// Every number.
    fn all(&self) -> Result<BTreeMap<String, Value>, Error> {
        let mut results = BTreeMap::new();
        for group in groups() {
            eprintln!("{}", group.title);
            let mut rows = Vec::new();
            for case in &group.cases {
                rows.push(json!({ "case": case.label, "rows": self.measure(&group, case)? }));
            }
            results.insert(group.name.to_string(), Value::Array(rows));
        }
        eprintln!("needles by length");
        results.insert("needles_by_length".to_string(), self.by_length()?);
        eprintln!("codebooks of two inputs");
        results.insert("codebook_similarity".to_string(), self.similarity()?);
        Ok(results)
    }

    fn measure(&self, group: &Group, case: &Case) -> Result<Value, Error> {
        let mut options = format!(
            "eval -q --json --model {MODEL} --methods {} --budgets {} {}",
            group.methods, group.budgets, case.eval
        );
        if !case.calibrate.is_empty() {
            write!(
                options,
                " --artifact {}",
                self.artifact(case.calibrate)?.display()
            )?;
        }
        let mut rows: Vec<Value> = Vec::new();
        for on in group.on {
            let input = match on {
                On::Text => format!("--text {HELD_OUT}"),
                On::Needles => format!("--needles {NEEDLES}"),
            };
            let out: Value = serde_json::from_slice(&self.run(&format!("{options} {input}"))?)?;
            let new = out["rows"].as_array().cloned().unwrap_or_default();
            if rows.is_empty() {
                rows = new;
            } else {
                for (row, new) in rows.iter_mut().zip(new) {
                    row["needle_accuracy"] = new["needle_accuracy"].clone();
                }
            }
        }
        Ok(Value::Array(rows))
    }
}

/// Codewords in key space, per layer and KV head; for the plain metric that is where they are stored, but
/// for the mean.
type Codebooks = Vec<Vec<Vec<Vec<f64>>>>;

fn codebook(artifact: &Artifact) -> Result<Codebooks, kvsmith::error::Error> {
    let sizes = artifact.sizes;
    let (g, d) = (sizes.n_kv_heads, sizes.head_dim);
    let section = artifact.section("a2ats")?;
    let m = section["codebook_size"].as_u64().unwrap_or(0) as usize;
    let specs = kvsmith::method::a2ats::specs(sizes, m);
    let (words, means) = (artifact.f16s(&specs[0])?, artifact.f32s(&specs[1])?);
    let head = |i: usize| -> Vec<Vec<f64>> {
        let words = words[i * m * d..(i + 1) * m * d].chunks_exact(d);
        let mean = &means[i * d..(i + 1) * d];
        words
            .map(|w| w.iter().zip(mean).map(|(w, m)| f64::from(w + m)).collect())
            .collect()
    };
    Ok((0..sizes.n_layers)
        .map(|layer| (0..g).map(|c| head(layer * g + c)).collect())
        .collect())
}

/// Mean over `a` of the largest cosine with any of `b`.
fn nearest_cosine(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let cosine = |x: &[f64], y: &[f64]| dot(x, y) / (dot(x, x) * dot(y, y)).sqrt().max(f64::MIN_POSITIVE);
    let best = |x: &Vec<f64>| b.iter().map(|y| cosine(x, y)).fold(f64::NEG_INFINITY, f64::max);
    a.iter().map(best).sum::<f64>() / a.len() as f64
}

fn case(label: &'static str, calibrate: &'static str, eval: &'static str) -> Case {
    Case {
        label,
        calibrate,
        eval,
    }
}

/// The value of `key` of the first row whose case is `label`.
fn of(rows: &[Measured], label: &str, key: &str) -> f64 {
    rows.iter()
        .find(|m| m.case == label)
        .map_or(f64::NAN, |m| m.get(key))
}

/// Whether the values of `key` in this order of cases do not fall.
fn rises(rows: &[Measured], labels: &[&str], key: &str) -> bool {
    labels
        .windows(2)
        .all(|w| of(rows, w[0], key) <= of(rows, w[1], key))
}

fn told(holds: bool, what: &str) -> String {
    match holds {
        true => format!("Reproduced here: {what}."),
        false => format!("Not reproduced here: {what}."),
    }
}

const QUALITY: &[&str] = &["recall", "mass", "output_error", "kl"];

fn groups() -> Vec<Group> {
    let both: &[On] = &[On::Text, On::Needles];
    let text: &[On] = &[On::Text];
    vec![
        Group {
            name: "methods",
            title: "Methods and budgets",
            about: "`topk` is the ceiling of every method at its budget. The four papers each report their method \
                    closer to full attention than Quest at a like share of reads.",
            on: both,
            methods: METHODS,
            budgets: BUDGETS,
            cases: vec![case("", BASE, "")],
            columns: &[
                "recall",
                "mass",
                "output_error",
                "kl",
                "needle_accuracy",
                "kv_read_fraction",
                "exact_dot_fraction",
                "index_bits_per_token",
            ],
            why: "",
            verdict: |rows| {
                let kl = |method: &str| {
                    let found = rows
                        .iter()
                        .find(|m| m.row["method"] == json!(method) && m.get("budget") == 0.06);
                    found.map_or(f64::NAN, |m| m.get("kl"))
                };
                let verdicts = ["a2ats", "selfindex", "lfps", "ctkvr"].map(|method| {
                    let holds = kl(method) < kl("quest");
                    told(
                        holds,
                        &format!("`{method}` has a lower KL than `quest` at a budget of 6 %"),
                    )
                });
                verdicts.join(" ")
            },
        },
        Group {
            name: "a2ats_ablation",
            title: "a2ats: windowed RoPE and the query-aware metric",
            about: "Paper (RULER average, Llama-3.1-8B): neither 81.4, windowed RoPE alone 85.9, query-aware metric \
                    alone 81.1, both 86.6.",
            on: both,
            methods: "a2ats",
            budgets: "0.06",
            cases: vec![
                case(
                    "neither",
                    "--size 1024 --max-tokens 65536 --rope standard --metric plain",
                    "",
                ),
                case(
                    "windowed RoPE",
                    "--size 1024 --max-tokens 65536 --metric plain",
                    "",
                ),
                case(
                    "query-aware metric",
                    "--size 1024 --max-tokens 65536 --rope standard",
                    "",
                ),
                case("both", BASE, ""),
            ],
            columns: &["recall", "mass", "output_error", "kl", "needle_accuracy"],
            why: "The model is small and its context short: much of its attention follows the distance, which windowed RoPE leaves out on purpose, so standard RoPE finds more of it.",
            verdict: |rows| {
                let others = ["neither", "windowed RoPE", "query-aware metric"];
                let best = others.iter().all(|c| of(rows, c, "kl") >= of(rows, "both", "kl"));
                let needles = |c: &str| of(rows, c, "needle_accuracy");
                let rope = needles("windowed RoPE") > needles("neither");
                let most = others.iter().all(|c| needles(c) <= needles("both"));
                [
                    told(best, "both together have the lowest KL"),
                    told(rope, "windowed RoPE alone answers more needles than neither"),
                    told(most, "both together answer the most needles"),
                ]
                .join(" ")
            },
        },
        Group {
            name: "selfindex_ablation",
            title: "selfindex: signs, centroids and full-precision tokens",
            about: "With `--kv 2bit`. Paper (LongBench, four tasks): full method 54.6/55.7/33.1/54.4, without signs in the \
                    quantiser 52.5/54.9/32.2/50.9, retrieval by signs alone 52.8/53.2/31.9/52.1, no full-precision tokens \
                    52.6/55.2/32.5/54.2.",
            on: both,
            methods: "selfindex",
            budgets: "0.1",
            cases: vec![
                case("full method", BASE, "--kv 2bit"),
                case("no signs in the quantiser", BASE, "--kv 2bit --plain-keys"),
                case(
                    "retrieval by signs alone",
                    BASE,
                    "--kv 2bit --sign-centroids signs",
                ),
                case("no full-precision tokens", BASE, "--kv 2bit --sign-full 0"),
                case("16 bits", BASE, "--kv f16"),
            ],
            columns: &["recall", "mass", "output_error", "kl", "needle_accuracy"],
            why: "",
            verdict: |rows| {
                let parts = [
                    "no signs in the quantiser",
                    "retrieval by signs alone",
                    "no full-precision tokens",
                ];
                let verdicts = parts.map(|part| {
                    let holds = of(rows, part, "kl") > of(rows, "full method", "kl");
                    told(holds, &format!("the KL is higher with {part}"))
                });
                verdicts.join(" ")
            },
        },
        Group {
            name: "sign_centroids",
            title: "selfindex: where the centroids come from",
            about: "Ours: one pass over the prompt is the paper's way; an artifact's centroids need no pass, and the hybrid \
                    takes both.",
            on: text,
            methods: "selfindex",
            budgets: "0.06",
            cases: vec![
                case("one pass", BASE, "--sign-centroids one-pass"),
                case("offline", BASE, "--sign-centroids offline"),
                case("hybrid", BASE, "--sign-centroids hybrid"),
            ],
            columns: QUALITY,
            why: "",
            verdict: |rows| {
                let holds = of(rows, "offline", "recall") >= of(rows, "one pass", "recall") - 0.03;
                told(
                    holds,
                    "the offline centroids' recall is within 3 points of one pass",
                )
            },
        },
        Group {
            name: "lfps_alpha",
            title: "lfps: threshold",
            about: "Paper (Table 4): the share of exact products falls as alpha grows: at 4K 8.0, 6.0, 4.8 and 4.2 % for 0.1 to \
                    0.4.",
            on: text,
            methods: "lfps",
            budgets: "0.06",
            cases: vec![
                case("alpha 0.1", BASE, "--lfps-alpha 0.1"),
                case("alpha 0.2", BASE, "--lfps-alpha 0.2"),
                case("alpha 0.3", BASE, "--lfps-alpha 0.3"),
                case("alpha 0.4", BASE, "--lfps-alpha 0.4"),
                case("calibrated", BASE, ""),
                case(
                    "mean-std, 0.2",
                    BASE,
                    "--lfps-alpha 0.2 --lfps-threshold mean-std",
                ),
                case("budget, 0.2", BASE, "--lfps-alpha 0.2 --lfps-threshold budget"),
            ],
            columns: &["exact_dot_fraction", "recall", "mass", "kl", "bypass_fraction"],
            why: "",
            verdict: |rows| {
                let order = ["alpha 0.4", "alpha 0.3", "alpha 0.2", "alpha 0.1"];
                told(
                    rises(rows, &order, "exact_dot_fraction"),
                    "the share falls as alpha grows",
                )
            },
        },
        Group {
            name: "lfps_theta",
            title: "lfps: bypass",
            about: "Paper: theta 1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7 saves 0, 2.5, 6.1, 12, 16, 23 and 32 % of the heads' cost; \
                    quality falls below 0.85.",
            on: text,
            methods: "lfps",
            budgets: "0.06",
            cases: vec![
                case("theta 1", BASE, "--lfps-theta 1"),
                case("theta 0.95", BASE, "--lfps-theta 0.95"),
                case("theta 0.9", BASE, "--lfps-theta 0.9"),
                case("theta 0.85", BASE, "--lfps-theta 0.85"),
                case("theta 0.8", BASE, "--lfps-theta 0.8"),
                case("theta 0.75", BASE, "--lfps-theta 0.75"),
                case("theta 0.7", BASE, "--lfps-theta 0.7"),
            ],
            columns: &[
                "bypass_fraction",
                "exact_dot_fraction",
                "mass",
                "output_error",
                "kl",
            ],
            why: "A head is bypassed only where its sinks outweigh everything else together, and the heads of this model, which was trained without padding or instructions, hardly look at their first tokens.",
            verdict: |rows| {
                let order = [
                    "theta 1",
                    "theta 0.95",
                    "theta 0.9",
                    "theta 0.85",
                    "theta 0.8",
                    "theta 0.75",
                    "theta 0.7",
                ];
                let more = of(rows, "theta 0.7", "bypass_fraction") > of(rows, "theta 1", "bypass_fraction");
                told(
                    more && rises(rows, &order, "bypass_fraction"),
                    "more heads are bypassed as theta falls",
                )
            },
        },
        Group {
            name: "lfps_start",
            title: "lfps: what fills the tables",
            about: "Ours: the prompt's last rows (the paper), calibrated priors alone (a cold start), or both.",
            on: text,
            methods: "lfps",
            budgets: "0.06",
            cases: vec![
                case("observed", BASE, "--lfps-prior 0"),
                case("cold", BASE, "--lfps-rows 0"),
                case("mixed", BASE, ""),
            ],
            columns: &["recall", "mass", "output_error", "kl", "exact_dot_fraction"],
            why: "Priors know distances and the first positions, not what a prompt says.",
            verdict: |rows| {
                let holds = of(rows, "cold", "recall") >= of(rows, "observed", "recall") - 0.1;
                told(
                    holds,
                    "the cold start's recall is within 10 points of the observed one",
                )
            },
        },
        Group {
            name: "ctkvr_choice",
            title: "ctkvr: which prompt queries become centroids",
            about: "Paper (64K): last 83.35, evenly spaced 81.98, random 79.93, first 75.60.",
            on: both,
            methods: "ctkvr",
            budgets: "0.06",
            cases: vec![
                case("last", "", ""),
                case("even", "", "--ct-choose even"),
                case("random", "", "--ct-choose random"),
                case("first", "", "--ct-choose first"),
                case("last, 640, no cap", "", "--ct-cap 1 --ct-centroids 640"),
            ],
            columns: &["recall", "mass", "output_error", "kl", "needle_accuracy"],
            why: "",
            verdict: |rows| {
                let order = ["first", "random", "even", "last"];
                told(
                    rises(rows, &order, "needle_accuracy"),
                    "needle accuracy in the paper's order: first, random, even, last",
                )
            },
        },
        Group {
            name: "ctkvr_sweep",
            title: "ctkvr: C, C' and the update",
            about: "Without a cap on the index. Paper (96K): accuracy rises with C up to 640 and is flat after; C' 2, 4, 6, 8 gives \
                    88.5, 89.6, 89.9, 89.9 %; without the update it falls from 100 to 85.7 over eight turns.",
            on: text,
            methods: "ctkvr",
            budgets: "0.06",
            cases: vec![
                case("C 20", "", "--ct-cap 1 --ct-centroids 20"),
                case("C 40", "", "--ct-cap 1 --ct-centroids 40"),
                case("C 80", "", "--ct-cap 1 --ct-centroids 80"),
                case("C 160", "", "--ct-cap 1 --ct-centroids 160"),
                case("C 320", "", "--ct-cap 1 --ct-centroids 320"),
                case("C 640", "", "--ct-cap 1 --ct-centroids 640"),
                case("C' 2", "", "--ct-probes 2"),
                case("C' 4", "", "--ct-probes 4"),
                case("C' 6", "", "--ct-probes 6"),
                case("C' 8", "", "--ct-probes 8"),
                case("no update", "", "--ct-update 0"),
            ],
            columns: &["recall", "mass", "kl", "kv_read_fraction", "index_bits_per_token"],
            why: "A block is one turn of 64 steps, for which the prompt's own queries are still good centroids; the paper's loss builds up over eight turns, which are not measured here.",
            verdict: |rows| {
                let c = rises(
                    rows,
                    &["C 20", "C 40", "C 80", "C 160", "C 320", "C 640"],
                    "recall",
                );
                let probes = rises(rows, &["C' 2", "C' 4", "C' 6", "C' 8"], "recall");
                let update = of(rows, "C' 4", "recall") > of(rows, "no update", "recall");
                [
                    told(c, "recall rises with C"),
                    told(probes, "recall rises with C'"),
                    told(update, "recall is higher with the update"),
                ]
                .join(" ")
            },
        },
        Group {
            name: "codebook",
            title: "a2ats: codebook size and calibration length",
            about: "The paper has 4,096 codewords and 80K tokens; no sweep is reported.",
            on: text,
            methods: "a2ats",
            budgets: "0.06",
            cases: vec![
                case("256 codewords", "--size 256 --max-tokens 65536", ""),
                case("1024 codewords", BASE, ""),
                case("4096 codewords", "--size 4096 --max-tokens 65536", ""),
                case("1024, 8K tokens", "--size 1024 --max-tokens 8192", ""),
                case("1024, 262K tokens", "--size 1024 --max-tokens 262144", ""),
            ],
            columns: &["recall", "mass", "output_error", "kl", "constant_bytes"],
            why: "",
            verdict: |rows| {
                let size = rises(
                    rows,
                    &["256 codewords", "1024 codewords", "4096 codewords"],
                    "recall",
                );
                told(size, "recall rises with the codebook")
            },
        },
    ]
}

/// The page.
fn page(results: &BTreeMap<String, Value>) -> String {
    let mut out = String::from(
        "# What the methods lose\n\n\
         Made by `make results` from the bundled model and its held-out text and needles; the numbers are in\n\
         [results/results.json](results/results.json). The model has 2.2M parameters and a context of 2,048, so \
         `--wrope-position`\nis 1024 and the figures say how the methods compare on its heads, not on yours: run `kvsmith eval` \
         for those.\nRecall is the share of the exact top-k, mass the true probability attended, error the relative L2 error of \
         the\nattention output (these three along the full-attention trajectory), KL that of the next token along the method's \
         own.\n\n\
         ![recall](results/recall.svg)\n![KL](results/kl.svg)\n![needles](results/needles.svg)\n\n",
    );
    for group in groups() {
        let Some(cases) = results.get(group.name).and_then(Value::as_array) else {
            continue;
        };
        let rows: Vec<Measured> = cases
            .iter()
            .flat_map(|c| {
                let label = c["case"].as_str().unwrap_or("");
                let rows = c["rows"].as_array().map_or(&[][..], Vec::as_slice);
                rows.iter().map(move |row| Measured { case: label, row })
            })
            .collect();
        let verdict = (group.verdict)(&rows);
        let _ = writeln!(out, "## {}\n\n{}\n\n{verdict}", group.title, group.about);
        if verdict.contains("Not reproduced") && !group.why.is_empty() {
            let _ = writeln!(out, "{}", group.why);
        }
        out += "\n";
        let named = group.cases.len() > 1;
        let first = if named { "case" } else { "method | budget" };
        let _ = writeln!(out, "| {first} | {} |", group.columns.join(" | "));
        let columns = group.columns.len() + if named { 1 } else { 2 };
        let _ = writeln!(out, "|{}", "---|".repeat(columns));
        for row in &rows {
            let label = match named {
                true => row.case.to_string(),
                false => format!(
                    "`{}` | {} %",
                    row.row["method"].as_str().unwrap_or(""),
                    100.0 * row.get("budget")
                ),
            };
            let values: Vec<String> = group.columns.iter().map(|c| shown(c, row.get(c))).collect();
            let _ = writeln!(out, "| {label} | {} |", values.join(" | "));
        }
        out += "\n";
    }
    out += &length_table(&results["needles_by_length"]);
    out += &similarity_table(&results["codebook_similarity"]);
    out += "## Pictures\n\n\
            ![second moment](results/moment.svg)\n![slash profile](results/slash.svg)\n![codeword usage](results/usage.svg)\n";
    out
}

fn length_table(lengths: &Value) -> String {
    let lengths = lengths.as_array().map_or(&[][..], Vec::as_slice);
    let accuracy = |at: &Value, method: &str| -> f64 {
        let mut rows = at["rows"].as_array().into_iter().flatten();
        let row = rows.find(|r| r["method"] == json!(method));
        row.and_then(|r| r["needle_accuracy"].as_f64())
            .unwrap_or(f64::NAN)
    };
    let mut out = "## Needles by length\n\nGreedy answers at a budget of 6 %; `topk` is the ceiling of what a method can choose.\n\n"
        .to_string();
    if let Some(longest) = lengths.last() {
        let full = longest["full"].as_f64().unwrap_or(f64::NAN);
        for method in ["a2ats", "selfindex", "lfps", "ctkvr"] {
            let loss = 100.0 * (full - accuracy(longest, method));
            let verdict = if loss <= 3.0 { "within" } else { "not within" };
            let _ = writeln!(
                out,
                "`{method}` is {verdict} 3 points of full attention at 2,000 tokens ({loss:.1} points)."
            );
        }
    }
    out += "\n| method |";
    for at in lengths {
        let _ = write!(out, " {} tokens |", at["length"]);
    }
    let _ = writeln!(out, "\n|---|{}", "---|".repeat(lengths.len()));
    for method in std::iter::once("full").chain(METHODS.split(',')) {
        let _ = write!(out, "| `{method}` |");
        for at in lengths {
            let x = match method {
                "full" => at["full"].as_f64().unwrap_or(f64::NAN),
                _ => accuracy(at, method),
            };
            let _ = write!(out, " {:.1} % |", 100.0 * x);
        }
        out += "\n";
    }
    out + "\n"
}

fn similarity_table(rows: &Value) -> String {
    let of = |rope: &str| -> Vec<f64> {
        let rows = rows
            .as_array()
            .into_iter()
            .flatten()
            .filter(|r| r["rope"] == json!(rope));
        rows.filter_map(|r| r["similarity"].as_f64()).collect()
    };
    let (before, after) = (of("windowed"), of("standard"));
    let holds = before.iter().zip(&after).all(|(b, a)| b > a);
    let mut out = format!(
        "## Codebooks of two inputs\n\nEq. 7 of A2ATS: mean largest cosine between the codewords of two texts (plain metric, 256 \
         codewords, 20,000 tokens each). Paper: above 0.9 before rotation for most layers, about 0.85 after.\n\n{}\n\n\
         | layer | before rotation | after |\n|---|---|---|\n",
        told(holds, "codebooks are more alike before rotation, in every layer")
    );
    for (layer, (b, a)) in before.iter().zip(&after).enumerate() {
        let _ = writeln!(out, "| {layer} | {b:.3} | {a:.3} |");
    }
    out + "\n"
}

fn shown(column: &str, x: f64) -> String {
    match column {
        _ if x.is_nan() => "".to_string(),
        "kl" | "output_error" | "recall" | "mass" => format!("{x:.3}"),
        "index_bits_per_token" => format!("{x:.1}"),
        "constant_bytes" => format!("{x:.0}"),
        _ => format!("{:.1} %", 100.0 * x),
    }
}

/// A path as the pictures need it.
fn in_results(name: &str) -> PathBuf {
    Path::new("docs/results").join(name)
}
