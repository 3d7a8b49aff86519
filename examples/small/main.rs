//! Measures every method on the bundled model; writes the tables of the small model in `docs/dev/replication.md`, the
//! JSON with their numbers and the pictures. `make results` runs this program.

mod groups;
mod page;
mod pictures;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::method::a2ats::{CODEBOOK, FitParams, MEAN};
use kvsmith::internal::method::sections::SECTIONS;
use serde_json::{Value, json};

use groups::{BASE, BY_LENGTH, Case, Group, METHODS, On, SIMILARITY, groups};
use page::replaced;

type Error = Box<dyn std::error::Error>;

const MODEL: &str = "calib-data/model";
const TEXT: &str = "calib-data/text.txt";
const HELD_OUT: &str = "calib-data/heldout.txt";
const NEEDLES: &str = "calib-data/needles.jsonl";
const CONVERSATIONS: &str = "calib-data/conversations.jsonl";
/// The page with the tables.
const PAGE: &str = "docs/dev/replication.md";
/// Lengths of prompts in the needle file; each prompt is near one of them.
const LENGTHS: [u64; 3] = [512, 1024, 2000];

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let program = args.next().ok_or("the kvsmith binary is the first argument")?;
    let work = PathBuf::from(args.next().ok_or("a scratch folder is the second argument")?);
    std::fs::create_dir_all(&work)?;
    let lab = Lab { program, work };
    let numbers = Path::new("docs/dev/small/small.json");
    let before = || -> Result<BTreeMap<String, Value>, Error> {
        Ok(serde_json::from_str(&std::fs::read_to_string(numbers)?)?)
    };
    let results = match args.next().as_deref() {
        None => {
            let names = groups()
                .into_iter()
                .map(|g| g.name)
                .chain([BY_LENGTH, SIMILARITY]);
            lab.measure_all(names.map(str::to_string), BTreeMap::new())?
        }
        // Writes the page and the pictures again from the existing numbers.
        Some("page") => before()?,
        // Measures some tables again, given by their names in the JSON.
        Some(names) => lab.measure_all(names.split(',').map(str::to_string), before()?)?,
    };
    let base = lab.artifact(BASE)?;
    std::fs::create_dir_all("docs/dev/small")?;
    let data = serde_json::to_string_pretty(&results)?;
    std::fs::write(numbers, data + "\n")?;
    pictures::all(&results, &base)?;
    let page = replaced(&std::fs::read_to_string(PAGE)?, &results);
    std::fs::write(
        PAGE,
        page.ok_or("docs/dev/replication.md has no marks for the tables")?,
    )?;
    Ok(())
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
        if output.status.success() {
            Ok(output.stdout)
        } else {
            Err(format!("failed: kvsmith {arguments}").into())
        }
    }

    /// Returns the artifact calibrated with these options; makes it only once.
    fn artifact(&self, options: &str) -> Result<PathBuf, Error> {
        self.artifact_of(TEXT, &format!("--uuid-tokens 8192 {options}"))
    }

    /// Returns the artifact calibrated with these options on this text; makes it only once.
    fn artifact_of(&self, text: &str, options: &str) -> Result<PathBuf, Error> {
        let name: String = options
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        let stem = Path::new(text).file_stem().and_then(|s| s.to_str()).unwrap_or("");
        let path = self.work.join(format!("{stem}{name}.safetensors"));
        if !path.exists() {
            self.run(&format!(
                "calibrate -q --overwrite --no-verdict --model {MODEL} --text {text} --wrope-position 1024 {options} -o {}",
                path.display()
            ))?;
        }
        Ok(path)
    }

    /// Writes the needles whose prompts are near a length; returns the file.
    fn needles_of(&self, length: u64) -> Result<PathBuf, Error> {
        let mut lines = String::new();
        for line in std::fs::read_to_string(NEEDLES)?.lines() {
            let needle: Value = serde_json::from_str(line)?;
            let tokens = needle["tokens"].as_f64().ok_or("a needle without its length")?;
            let nearest = LENGTHS
                .into_iter()
                .min_by_key(|l| (tokens - *l as f64).abs() as u64);
            if nearest == Some(length) {
                lines += line;
                lines += "\n";
            }
        }
        let path = self.work.join(format!("needles-{length}.jsonl"));
        std::fs::write(&path, lines)?;
        Ok(path)
    }

    /// Measures needle accuracy at a budget of 6%, for prompts of each length.
    fn by_length(&self) -> Result<Value, Error> {
        let mut rows = Vec::new();
        for length in LENGTHS {
            let out: Value = serde_json::from_slice(&self.run(&format!(
                "eval -q --json --model {MODEL} --methods {METHODS} --budgets 0.06 --artifact {} --needles {}",
                self.artifact(BASE)?.display(),
                self.needles_of(length)?.display()
            ))?)?;
            let mut measured = out["rows"].clone();
            measured
                .as_array_mut()
                .into_iter()
                .flatten()
                .for_each(drop_single_turns);
            rows.push(json!({ "length": length, "full": out["full_needle_accuracy"], "rows": measured }));
        }
        Ok(Value::Array(rows))
    }

    /// Computes Eq. 7 of A2ATS per layer: the similarity of the codebooks of two texts, of keys before and
    /// after rotation.
    fn similarity(&self) -> Result<Value, Error> {
        let mut rows = Vec::new();
        for rope in ["windowed", "standard"] {
            let options = format!(
                "--metric plain --rope {rope} --size 256 --max-tokens 20000 --uuid-tokens 0 --holdout 0"
            );
            let codebooks = [TEXT, HELD_OUT].map(|text| -> Result<_, Error> {
                Ok(codebook(&Artifact::open(
                    &self.artifact_of(text, &options)?,
                    SECTIONS,
                )?)?)
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

    /// Measures these tables; keeps the others of `results`.
    fn measure_all(
        &self,
        names: impl Iterator<Item = String>,
        mut results: BTreeMap<String, Value>,
    ) -> Result<BTreeMap<String, Value>, Error> {
        let groups = groups();
        for name in names {
            eprintln!("{name}");
            let rows = match name.as_str() {
                BY_LENGTH => self.by_length()?,
                SIMILARITY => self.similarity()?,
                _ => {
                    let group = groups.iter().find(|g| g.name == name);
                    let group = group.ok_or_else(|| format!("there is no table `{name}`"))?;
                    let cases = group.cases.iter();
                    let rows = cases
                        .map(|case| Ok(json!({ "case": case.label, "rows": self.measure(group, case)? })));
                    Value::Array(rows.collect::<Result<_, Error>>()?)
                }
            };
            results.insert(name, rows);
        }
        Ok(results)
    }

    /// Returns the rows of a case; results on needles join those on text.
    fn measure(&self, group: &Group, case: &Case) -> Result<Value, Error> {
        let mut options = format!(
            "eval -q --json --model {MODEL} --methods {} --budgets {} {}",
            case.methods.unwrap_or(group.methods),
            group.budgets,
            case.eval
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
                On::TextInTurns => format!("--text {HELD_OUT} --turns 8 --decode 32"),
                On::Needles => format!("--needles {NEEDLES}"),
                On::Conversations => format!("--needles {CONVERSATIONS}"),
            };
            let out: Value = serde_json::from_slice(&self.run(&format!("{options} {input}"))?)?;
            let new = out["rows"].as_array().cloned().unwrap_or_default();
            if rows.is_empty() {
                rows.clone_from(&new);
            }
            for (row, new) in rows.iter_mut().zip(&new) {
                join(row, new, &out);
            }
        }
        Ok(Value::Array(rows))
    }
}

/// Adds to a row the needle accuracy of another run of the same case, and that of full attention.
fn join(row: &mut Value, new: &Value, out: &Value) {
    if new["needle_accuracy"].is_number() {
        for key in ["needle_accuracy", "needle_accuracy_by_turn"] {
            row[key] = new[key].clone();
        }
        for key in ["full_needle_accuracy", "full_needle_accuracy_by_turn"] {
            row[key] = out[key].clone();
        }
    }
    drop_single_turns(row);
}

/// Removes the values by turn from a row with a single turn, where they repeat the totals.
fn drop_single_turns(row: &mut Value) {
    if let Some(row) = row.as_object_mut() {
        row.retain(|key, value| !(key.ends_with("by_turn") && value.as_array().is_some_and(|t| t.len() < 2)));
    }
}

/// Codewords in key space, per layer and KV head. With the plain metric they are stored there, minus the
/// mean.
type Codebooks = Vec<Vec<Vec<Vec<f64>>>>;

fn codebook(artifact: &Artifact) -> Result<Codebooks, kvsmith::internal::error::Error> {
    let sizes = artifact.sizes;
    let (g, d) = (sizes.n_kv_heads, sizes.head_dim);
    let section = artifact.section("a2ats")?;
    let m = section.params::<FitParams>()?.size;
    let (words, means) = (section.widened(CODEBOOK)?, section.read::<f32>(MEAN)?);
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

/// Returns the mean, over the vectors of `a`, of the largest cosine with a vector of `b`.
fn nearest_cosine(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let cosine = |x: &[f64], y: &[f64]| dot(x, y) / (dot(x, x) * dot(y, y)).sqrt().max(f64::MIN_POSITIVE);
    let best = |x: &Vec<f64>| b.iter().map(|y| cosine(x, y)).fold(f64::NEG_INFINITY, f64::max);
    a.iter().map(best).sum::<f64>() / a.len() as f64
}

/// Returns the path of a picture.
fn in_folder(name: &str) -> PathBuf {
    Path::new("docs/dev/small").join(name)
}
