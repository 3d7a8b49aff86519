//! The commands of docs/tutorial.md, from planning to generation, on the bundled model.

use std::path::Path;
use std::process::Command;

use crate::common::{no_cache, root};
use serde_json::Value;

/// Returns the shell blocks of the tutorial as one script, whose variables are set to the bundled model and texts.
fn script() -> String {
    let data = root().join("calib-data");
    let tutorial = std::fs::read_to_string(root().join("docs/tutorial.md")).unwrap();
    let mut blocks: String = tutorial
        .split("\n```")
        .filter_map(|block| block.strip_prefix("sh\n"))
        .map(|block| format!("{block}\n"))
        .collect();
    let paths = [
        ("MODEL=", "model"),
        ("TEXT=", "text.txt"),
        ("HELD_OUT=", "heldout.txt"),
    ];
    let paths = paths.map(|(variable, name)| (variable, data.join(name).display().to_string()));
    for (variable, value) in paths.into_iter().chain([("TOKENS=", "4K".to_owned())]) {
        let old = blocks
            .lines()
            .find(|line| line.starts_with(variable))
            .expect(variable);
        blocks = blocks.replace(old, &format!("{variable}'{value}'"));
    }
    // The same commands on less of everything.
    for (much, little) in [
        ("--uuid-tokens 8K", "--uuid-tokens 1K"),
        ("--max-tokens 40K", "--max-tokens 4K"),
        ("--context 32K", "--context 4K"),
        ("--work work", "--work work --verdict-tokens 4K"),
    ] {
        assert!(blocks.contains(much), "{much}");
        blocks = blocks.replace(much, little);
    }
    blocks
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"))
}

#[test]
fn every_command_works() {
    let script = script();
    assert!(
        script.lines().filter(|line| line.starts_with("kvsmith ")).count() >= 9,
        "{script}"
    );
    let dir = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_kvsmith")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let out = Command::new("sh")
        .args(["-eu", "-c", &script])
        .current_dir(&dir)
        .env("PATH", path)
        .env("XDG_CACHE_HOME", no_cache())
        .output()
        .unwrap();
    let (stdout, stderr) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    assert!(out.status.success(), "{stdout}\n{stderr}");
    assert!(stderr.contains("recommended: "), "{stderr}");

    let eval = std::fs::read_to_string(dir.path().join("eval.json")).unwrap();
    let eval: Value = serde_json::from_str(&eval).unwrap();
    let rows = eval["rows"].as_array().unwrap();
    for method in ["topk", "wpq", "selfindex", "a2ats"] {
        let of = |row: &&Value| row["method"] == method;
        assert_eq!(rows.iter().filter(of).count(), 2, "{method}: {eval}");
    }
    let best = rows.iter().filter(|row| row["method"] == "topk");
    assert!(
        best.into_iter()
            .all(|row| number(row, "bytes_read_fraction") < 0.25),
        "{eval}"
    );
    assert!(
        stdout.contains("attend wpq") && stdout.contains("times as fast as full attention"),
        "{stdout}"
    );
    let report = std::fs::read_to_string(dir.path().join("report.html")).unwrap();
    assert!(report.starts_with("<!doctype html>") && report.trim_end().ends_with("</html>"));
}
