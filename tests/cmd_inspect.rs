//! `inspect`: what is in an artifact, and whether it is intact.

use crate::common::*;
use serde_json::{Value, json};

/// An artifact of `qwen2_sliding` (three layers, two KV heads) in a scratch folder.
fn artifact() -> (Scratch, String) {
    let scratch = Scratch::new();
    let model = checkpoint("qwen2_sliding");
    let tokens = scratch.tokens("tokens.json", &documents(&[60, 50], 1));
    let command = format!("calibrate --size 4 --seed 9 --model {model} --tokens {tokens}");
    let path = scratch.make("art.safetensors", &command);
    (scratch, path)
}

#[test]
fn json_has_the_contracts_keys() {
    let (_scratch, artifact) = artifact();
    let json = kvsmith(&format!("inspect {artifact} --json")).json();
    assert_eq!(json["model"]["model_type"], "qwen2");
    assert_eq!(json["model"]["rope"]["rope_type"], "default");
    assert_eq!(json["model"]["fingerprint"].as_str().map(str::len), Some(64));
    assert_eq!(
        (&json["calibration"]["tokens"], &json["calibration"]["seed"]),
        (&json!(110), &json!(9))
    );
    assert_eq!(
        (&json["device"], &json["verified"]),
        (&json!("cpu"), &json!(false))
    );
    let section = &json["sections"]["a2ats"];
    assert_eq!(
        (&section["codebook_size"], &section["wrope_position"]),
        (&json!(4), &json!(256))
    );
    let digests: Vec<&String> = section["sha256"].as_object().unwrap().keys().collect();
    assert_eq!(
        digests,
        ["a2ats.chol", "a2ats.codebook", "a2ats.count", "a2ats.mean"]
    );

    let rows = json["rows"].as_array().unwrap();
    let of_a2ats: Vec<&Value> = rows.iter().filter(|r| r["section"] == "a2ats").collect();
    let heads: Vec<(u64, u64)> = of_a2ats
        .iter()
        .map(|r| (r["layer"].as_u64().unwrap(), r["head"].as_u64().unwrap()))
        .collect();
    assert_eq!(heads, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
    for row in of_a2ats {
        for key in [
            "inertia",
            "held_out_inertia",
            "iterations",
            "empty_repaired",
            "usage_entropy_bits",
            "condition",
        ] {
            assert!(row[key].is_number(), "{key} in {row}");
        }
        assert!(
            row["usage_entropy_bits"].as_f64().unwrap() <= 2.0,
            "4 codewords: {row}"
        );
        // Lloyd never makes a codebook worse.
        let history: Vec<f64> = serde_json::from_value(row["inertia_history"].clone()).unwrap();
        assert!(
            history.windows(2).all(|w| w[1] <= w[0] * (1.0 + 1e-6)),
            "{history:?}"
        );
    }
}

#[test]
fn layer_and_head_choose_rows() {
    let (_scratch, artifact) = artifact();
    for (options, expected) in [
        ("", 6),
        ("--layer 1", 2),
        ("--head 0", 3),
        ("--layer 2 --head 1", 1),
    ] {
        let json = kvsmith(&format!("inspect {artifact} --json {options}")).json();
        let rows = json["rows"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|r| r["section"] == "a2ats");
        let rows: Vec<&Value> = rows.collect();
        assert_eq!(rows.len(), expected, "{options}");
        for (name, value) in [("layer", 1), ("layer", 2), ("head", 0), ("head", 1)] {
            if options.contains(&format!("--{name} {value}")) {
                assert!(rows.iter().all(|r| r[name] == value), "{options}");
            }
        }
    }
    for (options, culprit) in [
        ("--layer 3", "--layer 3 is out of range"),
        ("--head 2", "--head 2 is out of range"),
    ] {
        kvsmith(&format!("inspect {artifact} {options}")).fails(2, culprit, "");
    }
}

#[test]
fn text_names_what_matters() {
    let (_scratch, artifact) = artifact();
    let table = kvsmith(&format!("inspect {artifact} -v")).ok().stdout;
    for part in [
        "qwen2",
        "3 layers",
        "110 tokens in 2 blocks",
        "a2ats",
        "4 codewords",
        "worst heads",
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let one = kvsmith(&format!("inspect {artifact} --layer 2 --head 1"))
        .ok()
        .stdout;
    assert!(
        one.contains("layer 2, KV head 1") && one.contains("inertia_history"),
        "{one}"
    );
    // A value that is not whole has four significant digits.
    let history = one.split("inertia_history").nth(1).unwrap();
    let first = history.split_whitespace().next().unwrap();
    let digits = first.chars().filter(char::is_ascii_digit).collect::<String>();
    assert_eq!(digits.trim_start_matches('0').len(), 4, "{first}: {one}");
    let verified = kvsmith(&format!("inspect {artifact} --verify")).ok().stdout;
    assert!(verified.contains("verified"), "{verified}");
    assert_eq!(
        kvsmith(&format!("inspect {artifact} --verify --json")).json()["verified"],
        json!(true)
    );
}

/// Tables per layer are shown on request; heads are listed only if there is something to say of them.
#[test]
fn weak_heads_are_listed_and_others_are_not() {
    let (scratch, artifact) = artifact();
    let inspect = |file: &str, options: &str| kvsmith(&format!("inspect {file} {options}")).ok().stdout;
    let plain = inspect(&artifact, "");
    assert!(
        !plain.contains("passes\n") && !plain.contains("noise 2"),
        "{plain}"
    );
    for options in ["-v", "--layer 1"] {
        let table = inspect(&artifact, options);
        assert!(
            table.contains("passes\n") && table.contains("noise 2"),
            "{options}: {table}"
        );
    }
    let edited = scratch.path("edited");
    let lists = [
        "tail, heads without an estimate",
        "sign, heads with patterns that no key has",
        "a2ats, heads that use few of their 4 codewords",
        "lfps, heads that attend most widely",
        "wpq, worst heads",
    ];
    let change = |weak: bool| {
        resealed(&artifact, &edited, |manifest| {
            let quality = &mut manifest["quality"];
            for section in ["tail", "sign", "a2ats", "lfps", "wpq"] {
                for head in quality[section]
                    .as_array_mut()
                    .unwrap()
                    .iter_mut()
                    .flat_map(|l| l.as_array_mut().unwrap())
                {
                    match section {
                        "tail" => head["shift"] = json!([0.5]),
                        "sign" => head["empty_patterns"] = json!(0),
                        "a2ats" => {
                            head["usage_entropy_bits"] = json!(1.9);
                            head["unused_codewords"] = json!(0);
                        }
                        "lfps" => head["k_fraction"] = json!([0.0]),
                        _ => {
                            head["held_out_inertia"] = json!(0.0);
                            head["inertia"] = json!(0.0);
                        }
                    }
                }
                if weak {
                    let head = &mut quality[section][2][1];
                    match section {
                        "tail" => head["shift"] = json!([0.5, null]),
                        "sign" => head["empty_patterns"] = json!(7),
                        "a2ats" => head["usage_entropy_bits"] = json!(1.0),
                        "lfps" => head["k_fraction"] = json!([0.4]),
                        _ => head["inertia"] = json!(1.0),
                    }
                    if section == "wpq" {
                        head["held_out_inertia"] = json!(null);
                        head["variance"] = json!(2.0);
                    }
                }
            }
        });
        inspect(&edited, "-v")
    };
    let fine = change(false);
    for list in lists {
        assert!(!fine.contains(list), "{list}: {fine}");
    }
    let weak = change(true);
    for (list, says) in lists.iter().zip([
        "50.0%",
        "7",
        "spread as evenly over 2; 0 have no keys",
        "40.0%",
        "50.0%",
    ]) {
        let (_, heads) = weak.split_once(list).unwrap_or_else(|| panic!("{list}: {weak}"));
        let mut lines = heads.lines().skip(1);
        let line = format!("  layer 2  head 1  {says}");
        assert_eq!(lines.next(), Some(&line[..]), "{list}: {weak}");
        assert!(lines.next().is_none_or(str::is_empty), "{list}: {weak}");
    }
}

/// A small model whose verdict is known: what is said of single heads.
#[test]
fn the_verdict_names_heads() {
    let scratch = Scratch::new();
    let model = checkpoint("qwen2_sliding");
    let tokens = scratch.tokens("tokens.json", &documents(&[120; 12], 1));
    let artifact = scratch.make(
        "art",
        &format!(
            "calibrate --size 4 --model {model} --tokens {tokens} --holdout 0.2 --seq-len 120 --verdict-steps 4 \
             --verdict-reads 0.9 --verdict-methods streaming,topk"
        ),
    );
    let edited = scratch.path("edited");
    resealed(&artifact, &edited, |manifest| {
        for row in manifest["quality"]["methods"]["rows"].as_array_mut().unwrap() {
            let heads = &mut row["heads"];
            heads["mass"] = json!([[0.5, 0.5], [0.995, 0.5], [0.5, 0.25]]);
            heads["output_error"] = json!([[0.1, 0.1], [0.1, 0.1], [0.1, 0.75]]);
            heads["recall"] = json!([[0.5, 0.5], [0.5, 0.5], [0.5, 0.375]]);
        }
        for (layer, heads) in manifest["quality"]["lfps"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .enumerate()
        {
            for (head, of) in heads.as_array_mut().unwrap().iter_mut().enumerate() {
                let share = if (layer, head) == (0, 1) { 0.96 } else { 0.5 };
                let queries = of["sink_mean"].as_array().unwrap().len();
                of["sink_mean"] = json!(vec![share; queries]);
            }
        }
    });
    let told = kvsmith(&format!("inspect {edited} -v")).ok().stdout;
    let after = |heading: &str| {
        let mut lines = told.lines().skip_while(|line| !line.contains(heading)).skip(1);
        lines.next().unwrap_or_default().trim().to_owned()
    };
    assert_eq!(
        after("largest output error"),
        "layer 2  head 1  output error 75.0%, attends to 25.0% of the attention mass",
        "{told}"
    );
    assert_eq!(after("that gain nothing"), "layer/head 1/0", "{told}");
    assert_eq!(after("sinks alone"), "layer/head 0/1", "{told}");
    let one = kvsmith(&format!("inspect {edited} --layer 2 --head 1"))
        .ok()
        .stdout;
    let (_, rows) = one
        .split_once("methods at layer 2, KV head 1\n")
        .unwrap_or_else(|| panic!("{one}"));
    let row = rows.lines().find(|line| line.starts_with("streaming")).unwrap();
    for value in ["37.5%", "25.0%", "75.0%"] {
        assert!(row.contains(value), "{value}: {row}");
    }
}

/// Buckets of distances: what is shown of them, and what is refused.
#[test]
fn buckets_are_shown_and_checked() {
    let scratch = Scratch::new();
    let model = checkpoint("qwen2_sliding");
    let tokens = scratch.tokens("tokens.json", &documents(&[60, 50], 1));
    let command =
        format!("calibrate --size 4 --positions buckets --seq-len 64 --model {model} --tokens {tokens}");
    let artifact = scratch.make("art.safetensors", &command);
    let shown = kvsmith(&format!("inspect -v --verify --model {model} {artifact}"))
        .ok()
        .stdout;
    let edges = "distances in buckets from 0, 2, 3, 5, 9, 14, 24, 39, 64";
    assert!(shown.contains(edges), "{shown}");
    let edited = scratch.path("edited");
    let row = |weight: f64, buckets: usize| vec![weight; buckets];
    let good = json!([0, 2, 3, 5, 9, 14, 24, 39, 64]);
    let even = json!([row(0.125, 8), row(0.125, 8), row(0.125, 8)]);
    for (key, value, culprit) in [
        ("edges", json!([0, 2, 3, 5, 9, 14, 14, 39, 64]), "edges"),
        ("edges", json!([0, 2, 3, 9, 5, 14, 24, 39, 64]), "edges"),
        ("edges", json!([1, 2, 3, 5, 9, 14, 24, 39, 64]), "edges"),
        ("edges", json!([0, 2, 3, 5, 9, 14, 24, 39]), "sections.a2ats"),
        (
            "edges",
            json!([0, 2, 3, 5, 9, 14, 24, 39, 64, 65]),
            "sections.a2ats",
        ),
        (
            "edges",
            json!([0, 2, 3, 5, 9, 14, 24, 39, f64::NAN]),
            "sections.a2ats",
        ),
        (
            "edges",
            json!([0, 2, 3, 5, 9, 14, 24, 39, 1u64 << 32]),
            "sections.a2ats",
        ),
        ("edges", json!([-1, 2, 3, 5, 9, 14, 24, 39, 64]), "sections.a2ats"),
        ("edges", json!(null), "sections.a2ats"),
        ("weights", json!([row(0.125, 8), row(0.125, 8)]), "weights"),
        (
            "weights",
            json!([row(0.125, 8), row(0.125, 8), row(0.1, 8)]),
            "weights",
        ),
        (
            "weights",
            json!([row(0.125, 8), row(0.125, 8), row(0.125, 7)]),
            "sections.a2ats",
        ),
        (
            "weights",
            json!([
                row(0.125, 8),
                row(0.125, 8),
                [1.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
            ]),
            "weights",
        ),
        (
            "weights",
            json!([row(0.125, 8), row(0.125, 8), row(f64::INFINITY, 8)]),
            "sections.a2ats",
        ),
    ] {
        resealed(&artifact, &edited, |manifest| {
            manifest["sections"]["a2ats"]["distance_buckets"][key] = value.clone();
        });
        kvsmith(&format!("inspect {edited}")).fails(1, culprit, "recreate");
    }
    for (key, value) in [("edges", good), ("weights", even)] {
        resealed(&artifact, &edited, |manifest| {
            manifest["sections"]["a2ats"]["distance_buckets"][key] = value.clone();
        });
        kvsmith(&format!("inspect --verify {edited}")).ok();
    }
    // Neither a position nor buckets, and both.
    for position in [None, Some(json!(2048)), Some(json!(null))] {
        resealed(&artifact, &edited, |manifest| {
            let section = manifest["sections"]["a2ats"].as_object_mut().unwrap();
            match position.clone() {
                None => section.remove("distance_buckets"),
                Some(position) => section.insert("wrope_position".to_owned(), position),
            };
        });
        kvsmith(&format!("inspect {edited}")).fails(1, "wrope_position", "recreate");
    }
}

#[test]
fn only_verify_reads_the_data() {
    let (scratch, artifact) = artifact();
    let mut bytes = std::fs::read(&artifact).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let damaged = scratch.write("damaged", &bytes);
    let plain = kvsmith(&format!("inspect {damaged} --json")).json();
    assert_eq!(
        plain["rows"],
        kvsmith(&format!("inspect {artifact} --json")).json()["rows"]
    );
    kvsmith(&format!("inspect {damaged} --verify")).fails(1, "does not match its digest", "recreate it");
    // The header alone is enough to tell that it was altered.
    bytes[last] ^= 1;
    let seed = bytes.windows(8).position(|w| w == b"\\\"seed\\\"").unwrap();
    bytes[seed + 9] ^= 1;
    let altered = scratch.write("altered", &bytes);
    kvsmith(&format!("inspect {altered}")).fails(1, "altered: the manifest was modified", "recreate it");
}

#[test]
fn section_files_can_be_inspected_too() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60], 1));
    let dump = scratch.make("dump", &format!("dump --model {model} --tokens {tokens}"));
    let section = scratch.make("section", &format!("codebook --dump {dump} --size 3"));
    let json = kvsmith(&format!("inspect {section} --json --verify --model {model}")).json();
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(4));
    kvsmith(&format!("inspect {dump}/moments.safetensors")).fails(1, "is not an artifact", "");
    kvsmith(&format!("inspect {model}/model.safetensors")).fails(1, "model.safetensors", "");
    kvsmith(&format!("inspect {}", scratch.path("missing"))).fails(
        1,
        "missing",
        "check that the path exists",
    );
}
