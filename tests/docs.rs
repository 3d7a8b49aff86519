//! The documentation against the program: `docs/reference/artifact.md` is enough to read an artifact from Python, and what the
//! pages name exists.

use std::path::Path;
use std::process::Command;

use crate::common::{golden, no_cache, root};
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::method::a2ats::Codebooks;
use kvsmith::internal::method::lfps::priors::{Priors, SCALARS};
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::method::triattention::MeanQueries;
use kvsmith::internal::method::wpq::HeadCodebooks;
use kvsmith::internal::method::{doublesparsity, triattention};
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::layer::rotated;
use ndarray::{ArrayView2, Axis, s};
use serde_json::{Value, json};

#[test]
#[ignore = "needs Python with numpy and safetensors; `make test` makes one and runs this test"]
fn python_reads_the_artifact() {
    [("window", "mean"), ("buckets", "path")]
        .into_iter()
        .for_each(python_reads);
}

#[test]
#[ignore = "needs Python; `make test` makes one and runs this test"]
fn tables_of_the_gpu_page_are_of_its_results() {
    let python = std::env::var("KVSMITH_PYTHON").expect("KVSMITH_PYTHON names a Python");
    let script = root().join("scripts/gpu_tables.py");
    let output = Command::new(python).arg(script).arg("--check").output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "needs Python with numpy; `make test` makes one and runs this test"]
fn tables_are_of_the_committed_documents() {
    let python = std::env::var("KVSMITH_PYTHON").expect("KVSMITH_PYTHON names a Python");
    let script = root().join("scripts/render.py");
    let output = Command::new(python).arg(script).arg("--check").output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "needs Python with numpy and safetensors; `make test` makes one and runs this test"]
fn scripts_pass_their_own_tests() {
    let python = std::env::var("KVSMITH_PYTHON").expect("KVSMITH_PYTHON names a Python");
    let tests = ["-B", "-m", "unittest", "discover", "-s", "scripts"];
    let output = Command::new(python)
        .current_dir(root())
        .args(tests)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // A Python that finds no tests succeeds too.
    assert!(output.status.success() && !said.contains("Ran 0 tests"), "{said}");
}

/// The times of one layer in docs/performance.md are those of docs/dev/cpu.md.
#[test]
fn times_of_a_layer_are_measured() {
    let page = std::fs::read_to_string(root().join("docs/performance.md")).unwrap();
    let cpu = std::fs::read_to_string(root().join("docs/dev/cpu.md")).unwrap();
    let (_, layer) = page.split_once("\n## Attention of one layer").unwrap();
    let (layer, _) = layer.split_once("\n## ").unwrap();
    // The paragraph before the list: times, and how many times as fast as full attention.
    let (paragraph, _) = layer.trim().split_once("\n\n").unwrap();
    let words: Vec<&str> = paragraph.split(|c: char| c.is_whitespace() || c == '(').collect();
    let mut found = 0;
    for pair in words.windows(2) {
        let number = pair[0].trim_end_matches([',', ';', ')', '.', ':']);
        if !number.contains('.') || number.parse::<f64>().is_err() || pair[1].starts_with("GHz") {
            continue;
        }
        let forms = [" ms", " x", " to "].map(|unit| format!("| {number}{unit}"));
        assert!(
            forms.iter().any(|form| cpu.contains(form)),
            "docs/performance.md: {number} is not in docs/dev/cpu.md"
        );
        found += 1;
    }
    assert!(found >= 8, "{found}");
}

/// Compares the program with the script on an artifact with this `--positions` and `--wpq-center`.
fn python_reads((positions, center): (&str, &str)) {
    let python = std::env::var("KVSMITH_PYTHON").expect("KVSMITH_PYTHON names a Python");
    let dir = tempfile::tempdir().unwrap();
    let art = dir.path().join("art.safetensors");
    let model = golden("qwen2_bias");
    let ids: Vec<u32> = (0..400u32).map(|i| (i * i + 7 * i) % 90 + 3).collect();
    let tokens = dir.path().join("tokens.json");
    std::fs::write(&tokens, json!([ids]).to_string()).unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_kvsmith"))
        .env("XDG_CACHE_HOME", no_cache())
        .args([
            "calibrate",
            "-q",
            "--size",
            "24",
            "--wrope-position",
            "64",
            "--positions",
            positions,
            "--wpq-center",
            center,
            "--peers",
            "--model",
        ])
        .arg(&model)
        .arg("--tokens")
        .arg(&tokens)
        .arg("-o")
        .arg(&art)
        .status()
        .unwrap();
    assert!(status.success());

    let decoder = Decoder::open(&model).unwrap();
    let layer = decoder.layer(0).unwrap();
    let states = layer.project(decoder.embed(&ids).unwrap().view());
    let keys = states.k.slice(s![0, ..40, ..]);
    let queries = states.q.index_axis(Axis(1), 11);
    let rows =
        |x: ndarray::ArrayView2<f32>| json!(x.rows().into_iter().map(|r| r.to_vec()).collect::<Vec<_>>());
    let theta = decoder.config.rope.theta;
    let d = decoder.config.head_dim;
    let inv_freq: Vec<f64> = (0..d / 2)
        .map(|i| theta.powf(-2.0 * i as f64 / d as f64))
        .collect();
    let table = decoder.ropes.layer(0).table(0..ids.len());
    let (k_rope, q_rope) = (rotated(&states.k, &table), rotated(&states.q, &table));
    let keys_rope = k_rope.slice(s![0, ..40, ..]);
    // A query of each head of the first group.
    let group = decoder.config.n_heads / decoder.config.n_kv_heads;
    let queries_rope = q_rope.slice(s![..group, 300, ..]);
    let given = dir.path().join("keys.json");
    let request = json!({
        "layer": 0, "head": 0, "keys": rows(keys), "queries": rows(queries), "rope_inv_freq": inv_freq,
        "keys_rope": rows(keys_rope), "queries_rope": rows(queries_rope), "query_head": 3, "offsets": OFFSETS,
    });
    std::fs::write(&given, request.to_string()).unwrap();
    let output = Command::new(python)
        .arg(root().join("docs/reference/read_artifact.py"))
        .args([&art, &given])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();

    let artifact = Artifact::open(&art, SECTIONS).unwrap();
    let codebooks = Codebooks::load(&artifact, &decoder.ropes).unwrap();
    let head = codebooks.head(0, 0);
    let codes = head.encode(keys);
    assert_eq!(answer["codes"], json!(codes));
    let buckets: Vec<usize> = (0..head.buckets()).collect();
    assert_eq!(answer["scores"].as_array().unwrap().len(), buckets.len());
    let table = head.scores_in(queries, &buckets);
    for (a, row) in table.rows().into_iter().enumerate() {
        // Up to a constant per query.
        let theirs = |bucket: usize, j: usize| answer["scores"][bucket][a][j].as_f64().unwrap();
        let ours = |bucket: usize, j: usize| f64::from(row[bucket * head.size() + usize::from(codes[j])]);
        let size = f64::from(row.fold(0.0f32, |m, x| m.max(x.abs())));
        for (bucket, j) in buckets
            .iter()
            .flat_map(|b| (0..codes.len()).map(move |j| (*b, j)))
        {
            let (ours, theirs) = (ours(bucket, j) - ours(0, 0), theirs(bucket, j) - theirs(0, 0));
            assert!(
                (ours - theirs).abs() < 1e-4 * size,
                "query {a} bucket {bucket} key {j}: {ours} {theirs}"
            );
        }
    }
    let priors = Priors::load(&artifact).unwrap();
    let prior = priors.head(0, 3);
    let number = |v: &Value| v.as_f64().unwrap() as f32;
    for (i, offset) in OFFSETS.into_iter().enumerate() {
        assert_eq!(
            number(&answer["slash"][i]),
            prior.slash_at(offset),
            "offset {offset}"
        );
    }
    let scalars = &answer["scalars"];
    assert_eq!(scalars.as_object().unwrap().len(), SCALARS.len());
    assert_eq!(number(&scalars["lambda"]), prior.lambda);
    assert_eq!(number(&scalars["persist_32"]), prior.persist[2]);
    let codebooks = HeadCodebooks::load(&artifact, &decoder.ropes).unwrap();
    assert_eq!(codebooks.have_paths(), center == "path");
    check_wpq(&answer, &codebooks, keys_rope, queries_rope);
    check_peers(&answer, &artifact, &decoder, [keys, keys_rope], queries_rope);
    let shift = &artifact.manifest.quality.sections["tail"][0][3 / group]["shift"][3 % group];
    assert_eq!(&answer["tail"], shift);
}

/// Compares codes with the program's, and scores with what they estimate.
fn check_wpq(answer: &Value, codebooks: &HeadCodebooks, keys: ArrayView2<f32>, queries: ArrayView2<f32>) {
    let codes = codebooks.head(0, 0).encode(keys, 0);
    assert_eq!(codes.len(), 2);
    for (stage, codes) in codes.iter().enumerate() {
        // Two groups of 16 words share a byte.
        let numbers: Vec<u8> = codes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
        let theirs = answer["wpq_codes"][stage].as_array().unwrap().iter();
        let theirs: Vec<&Value> = theirs.flat_map(|row| row.as_array().unwrap()).collect();
        assert_eq!(json!(theirs), json!(numbers), "stage {stage}");
    }
    let (mut error, mut spread) = (0.0, 0.0);
    for (a, query) in queries.rows().into_iter().enumerate() {
        let exact = keys.dot(&query) / (query.len() as f32).sqrt();
        let mean = exact.mean().unwrap();
        for (j, exact) in exact.iter().enumerate() {
            let estimate = answer["wpq_scores"][a][j].as_f64().unwrap();
            error += (estimate - f64::from(*exact)).powi(2);
            spread += f64::from(exact - mean).powi(2);
        }
    }
    assert!(error < 0.1 * spread, "{error} of {spread}");
}

/// Compares the scores of peers with what the methods' own definitions give: the label's product is near the product of the
/// first channels, and the series is the program's.
fn check_peers(
    answer: &Value,
    artifact: &Artifact,
    decoder: &Decoder,
    [keys, keys_rope]: [ArrayView2<f32>; 2],
    queries_rope: ArrayView2<f32>,
) {
    let (n, d) = keys_rope.dim();
    let section = artifact.section("doublesparsity").unwrap();
    let channels: Vec<u32> = section.read(doublesparsity::CHANNELS).unwrap();
    for (a, query) in queries_rope.rows().into_iter().enumerate() {
        for (j, key) in keys_rope.rows().into_iter().enumerate() {
            let first = || channels[..4].iter().map(|i| *i as usize);
            let values: Vec<f64> = first().map(|i| f64::from(key[i])).collect();
            let products = first().zip(&values).map(|(i, k)| f64::from(query[i]) * k);
            let exact = products.sum::<f64>() / (d as f64).sqrt();
            let range = values.iter().copied().fold(f64::MIN, f64::max)
                - values.iter().copied().fold(f64::MAX, f64::min);
            // Half a step in every channel, and the roundings to f16.
            let size: f64 = first().map(|i| f64::from(query[i].abs())).sum();
            let largest = values.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let bound = size * (range / 30.0 + largest / 1000.0) / (d as f64).sqrt();
            let theirs = answer["doublesparsity"][a][j].as_f64().unwrap();
            assert!(
                (theirs - exact).abs() <= bound,
                "query {a} key {j}: {theirs} {exact}"
            );
        }
    }
    let section = artifact.section("triattention").unwrap();
    let half = d / 2;
    let head = |tensor: &str, width: usize| {
        let values: Vec<f32> = section.read(tensor).unwrap();
        values[3 * width..4 * width].to_vec()
    };
    let queries = MeanQueries::new(
        &head(triattention::Q_MEAN, 2 * half),
        &head(triattention::Q_ABS, half),
        decoder.ropes.layer(0),
    );
    let table = decoder.ropes.layer(0).table(0..n);
    let mut rotated = keys.to_owned();
    for (position, mut key) in rotated.rows_mut().into_iter().enumerate() {
        table.rotate(key.as_slice_mut().unwrap(), position);
    }
    let ours = queries.scores(rotated.view(), n - 1);
    let size = ours.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (j, ours) in ours.row(0).iter().enumerate() {
        let theirs = answer["triattention"][j].as_f64().unwrap();
        assert!((ours - theirs).abs() < 1e-4 * size, "key {j}: {ours} {theirs}");
    }
}

/// Offsets at both ends of buckets, and beyond the last.
const OFFSETS: [usize; 8] = [0, 1, 511, 512, 575, 576, 1 << 20, 1 << 24];

/// Files below `folder`, read.
fn sources(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let read = |path: std::path::PathBuf| {
        if path.is_dir() {
            sources(&path)
        } else {
            vec![std::fs::read_to_string(path).unwrap()]
        }
    };
    entries.flat_map(read).collect()
}

/// docs/methods.md says where each equation stands.
#[test]
fn equations_are_where_the_methods_say() {
    let methods = std::fs::read_to_string(root().join("docs/methods.md")).unwrap();
    let sources = sources(&root().join("src"));
    let has = |source: &String, kinds: &[&str], name: &str| {
        let is_word = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        kinds.iter().any(|kind| {
            let start = format!("{kind} {name}");
            source
                .match_indices(&start)
                .any(|(at, _)| is_word(&source[at + start.len()..]))
        })
    };
    let mut names = 0;
    for paragraph in methods.split("\n\n").filter(|p| p.starts_with("`src/")) {
        for name in paragraph.split('`').skip(1).step_by(2) {
            names += 1;
            let found = match (name.starts_with("src/"), name.split_once("::")) {
                (true, _) => root().join(name).exists(),
                (false, Some((of, function))) => sources
                    .iter()
                    .any(|s| has(s, &["impl", "for"], of) && has(s, &["fn"], function)),
                (false, None) => sources.iter().any(|s| has(s, &["fn", "struct", "enum"], name)),
            };
            assert!(found, "docs/methods.md: `{name}` is nowhere");
        }
    }
    assert!(names > 20, "{names}");
}

#[test]
fn the_readme_lists_every_command() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let (_, table) = readme.split_once("<summary>All commands").unwrap();
    let (table, _) = table.split_once("</details>").unwrap();
    let help = Command::new(env!("CARGO_BIN_EXE_kvsmith"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|l| !l.starts_with("Commands:"))
        .skip(1)
        .take_while(|l| !l.starts_with("Options:"))
        .filter_map(|l| l.strip_prefix("  ")?.split_whitespace().next())
        .filter(|c| *c != "help")
        .collect();
    assert!(commands.len() >= 20, "{commands:?}");
    for command in commands {
        let listed = table.contains(&format!("`{command}`"));
        assert!(listed, "README.md does not list `{command}`");
    }
}

/// The glossary explains each term in at most two lines; docs/dev/architecture-notes.md says where terms are in the code.
#[test]
fn terms_have_one_meaning_and_a_place() {
    for (page, least) in [
        ("docs/reference/glossary.md", 50),
        ("docs/dev/architecture-notes.md", 40),
    ] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        let entries: Vec<&str> = text.split("\n- ").skip(1).collect();
        assert!(entries.len() > least, "{page}: {}", entries.len());
        let mut seen = std::collections::BTreeSet::new();
        for entry in entries {
            let entry = entry.split("\n\n").next().unwrap_or_default();
            assert!(entry.lines().count() <= 2, "more than two lines: {entry}");
            let term = entry.split("**").nth(1).unwrap_or_default();
            assert!(
                !term.is_empty() && seen.insert(term.to_string()),
                "two meanings: {entry}"
            );
            for path in entry.split('`').filter(|code| code.starts_with("src/")) {
                assert!(root().join(path).exists(), "{page}: `{path}` is nowhere");
            }
        }
    }
}
