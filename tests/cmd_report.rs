//! `report`: the page has the very numbers of `inspect --json` and `eval --json`, needs no network, and its controls work.
//! Without a Chromium on PATH or in KVSMITH_CHROMIUM, the tests in a browser show as ignored.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::OnceLock;

use common::*;
use libtest_mimic::Arguments;
use serde_json::{Value, json};

fn main() -> ExitCode {
    let mut trials = Vec::from(trials![
        the_page_is_one_file_with_the_documents_numbers,
        the_recommendation_is_that_of_inspect,
        spectra_and_profiles_are_those_of_the_tensors,
        text_is_escaped,
        what_is_missing_is_left_out,
        other_rows_are_left_out,
        bad_documents_are_refused,
        outputs_are_safe,
    ]);
    let in_browser = trials![
        every_number_is_that_of_the_documents,
        pointing_at_a_mark_tells_its_value,
        a_phone_shows_the_page_without_scrolling_sideways,
        paper_has_no_controls,
        the_slider_recommends,
        hostile_names_are_text,
        nothing_measured_is_said,
    ];
    let missing = chromium().is_none();
    if missing {
        eprintln!("ignored: no chromium, chromium-browser or google-chrome on PATH, and no KVSMITH_CHROMIUM");
    }
    trials.extend(in_browser.into_iter().map(|t| t.with_ignored_flag(missing)));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// An artifact with a verdict, what was measured with it, and a page of everything.
struct Files {
    scratch: Scratch,
    artifact: String,
    other: String,
    text: String,
    longer: String,
    questions: String,
    page: String,
}

fn files() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| {
        let scratch = Scratch::new();
        let model = checkpoint("llama_default");
        let tokens = scratch.tokens("tokens.json", &documents(&[200; 4], 1));
        let calibrate = format!(
            "calibrate --model {model} --tokens {tokens} --holdout 0.3 --verdict-steps 8 --verdict-reads 0.6,0.9"
        );
        let artifact = scratch.make("art", &format!("{calibrate} --size 8"));
        let other = scratch.make("other", &format!("{calibrate} --size 6 --seed 4"));
        let eval = |name: &str, options: &str| {
            let command = format!("eval --model {model} --artifact {artifact} --methods topk,wpq,lfps --kv bf16");
            scratch.write(name, kvsmith(&format!("{command} --json -q {options}")).ok().stdout)
        };
        let blocks = scratch.tokens("blocks.json", &documents(&[160; 20], 2));
        let text = eval(
            "text.json",
            &format!("--tokens {blocks} --turns 2 --decode 18 --budgets 0.1,0.2 --per-head"),
        );
        let blocks = scratch.tokens("longer.tokens", &documents(&[250; 2], 3));
        let longer = eval("longer.json", &format!("--tokens {blocks} --decode 4 --budgets 0.1 --sinks 2"));
        let turn =
            |i: u64| json!({ "prompt_tokens": documents(&[50], 5 + i)[0], "answer_tokens": [7] });
        let line = |i| json!({ "turns": [turn(i), turn(i + 1)], "task": "one", "length": 50 }).to_string();
        let lines: Vec<String> = (0..20).map(line).collect();
        let lines = scratch.write("questions.jsonl", lines.join("\n"));
        let questions = eval("questions.json", &format!("--needles {lines} --budgets 0.1"));
        let page = scratch.make(
            "page.html",
            &format!("report {artifact} --eval {text} --eval {longer} --eval {questions} --against {other}"),
        );
        Files {
            scratch,
            artifact,
            other,
            text,
            longer,
            questions,
            page,
        }
    })
}

fn parsed(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn inspected(path: &str) -> Value {
    kvsmith(&format!("inspect {path} --json --verify")).json()
}

/// The data of a page.
fn data_of(page: &str) -> Value {
    let page = std::fs::read_to_string(page).unwrap();
    let start = page.split_once("id=\"data\">").unwrap().1;
    serde_json::from_str(start.split_once("</script>").unwrap().0).unwrap()
}

/// Checks that everything of `part` is in `whole` at the same place; null stands for what was left out of a list.
#[track_caller]
fn assert_part(part: &Value, whole: &Value, place: &str) {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => {
            for (key, value) in part {
                assert_part(
                    value,
                    whole.get(key).unwrap_or(&json!("nothing")),
                    &format!("{place}/{key}"),
                );
            }
        }
        (Value::Array(part), Value::Array(whole)) => {
            assert_eq!(part.len(), whole.len(), "{place}");
            for (i, (part, whole)) in part.iter().zip(whole).enumerate() {
                assert_part(part, whole, &format!("{place}/{i}"));
            }
        }
        _ => assert_eq!(part, whole, "{place}"),
    }
}

fn the_page_is_one_file_with_the_documents_numbers() {
    let of = files();
    let page = std::fs::read_to_string(&of.page).unwrap();
    assert!(page.starts_with("<!doctype html>"));
    assert!(page.contains("default-src 'none'"));
    // No address but the name of SVG.
    let addresses = page.matches("http://").count() + page.matches("https://").count();
    assert_eq!(addresses, page.matches("http://www.w3.org/2000/svg").count());
    assert!(!page.contains("src=") && !page.contains("@import") && !page.contains("url("));
    let data = data_of(&of.page);
    assert_part(&data["inspect"], &inspected(&of.artifact), "inspect");
    assert_part(&data["against"]["inspect"], &inspected(&of.other), "against");
    for (i, path) in [&of.text, &of.longer, &of.questions].into_iter().enumerate() {
        let (part, whole) = (&data["evals"][i]["document"], parsed(path));
        assert_part(part, &whole, path);
        assert!(
            part["rows"].as_array().unwrap().iter().all(Value::is_object),
            "{path}"
        );
    }
    // Numbers that the page needs.
    assert!(data["inspect"]["rows"][0]["inertia_history"].is_array());
    assert!(data["evals"][0]["document"]["rows"][0]["intervals"]["kl"].is_array());
    let out = of.scratch.path("again.html");
    let document = kvsmith(&format!(
        "report {} --eval {} -o {out} --json",
        of.artifact, of.questions
    ))
    .json();
    assert_eq!(document["report"], json!(out));
    assert_eq!(document["bytes"], json!(std::fs::metadata(&out).unwrap().len()));
    assert_eq!(
        document["sections"],
        json!([
            "decision",
            "front",
            "turns",
            "questions",
            "map",
            "head",
            "provenance"
        ])
    );
    // Equal inputs make equal pages.
    let again = of.scratch.path("more.html");
    kvsmith(&format!(
        "report {} --eval {} -o {again}",
        of.artifact, of.questions
    ))
    .ok();
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&again).unwrap());
}

fn the_recommendation_is_that_of_inspect() {
    let of = files();
    let data = data_of(&of.page);
    let row = &data["inspect"]["methods"]["rows"][data["recommended"].as_u64().unwrap() as usize];
    let text = kvsmith(&format!("inspect {} -v", of.artifact)).ok().stdout;
    let taken = text.lines().skip_while(|line| !line.starts_with("recommended"));
    let taken: Vec<&str> = taken.collect();
    let settings = || {
        taken
            .iter()
            .filter(|line| line.trim_start().contains("--method ") && line.contains(" --budget 0."))
    };
    let last = settings()
        .find(|line| line.ends_with(" *"))
        .or_else(|| settings().next_back())
        .unwrap();
    let method = row["method"].as_str().unwrap();
    assert!(
        last.contains(&format!("--method {method} --budget {},", row["budget"])),
        "{text} {row}"
    );
    // Readers without scripts see the same.
    let page = std::fs::read_to_string(&of.page).unwrap();
    assert!(page.contains(&taken[0].replace("<=", "&lt;=")), "{text}");
}

fn spectra_and_profiles_are_those_of_the_tensors() {
    let of = files();
    let data = data_of(&of.page);
    let tensors = read_tensors(&of.artifact);
    let model = &data["inspect"]["model"];
    let [layers, heads, kv_heads, d] =
        ["n_layers", "n_heads", "n_kv_heads", "head_dim"].map(|key| model[key].as_u64().unwrap() as usize);
    for section in ["a2ats", "wpq"] {
        let factors = tensors[&format!("{section}.chol")].f32s();
        for (i, l) in factors.chunks(d * d).enumerate() {
            let found = &data["spectra"][section][i / kv_heads][i % kv_heads];
            let shares: Vec<f64> = serde_json::from_value(found["shares"].clone()).unwrap();
            assert_eq!(shares.len(), d);
            assert!(shares.is_sorted_by(|a, b| a >= b), "{shares:?}");
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-3);
            // Sum of the squared eigenvalues of L Lᵀ over the squared trace, without eigenvalues.
            let row = |i: usize| &l[i * d..(i + 1) * d];
            let dot = |a: &[f32], b: &[f32]| {
                a.iter()
                    .zip(b)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum::<f64>()
            };
            let trace: f64 = (0..d).map(|i| dot(row(i), row(i))).sum();
            let squares: f64 = (0..d * d).map(|at| dot(row(at / d), row(at % d)).powi(2)).sum();
            let own: f64 = shares.iter().map(|x| x * x).sum();
            assert!(
                (own / (squares / trace.powi(2)) - 1.0).abs() < 2e-3,
                "{section} {i}"
            );
            let held = found["held"][0].as_u64().unwrap() as usize;
            let sum = |n: usize| shares[..n].iter().sum::<f64>();
            assert!(sum(held) > 0.899 && sum(held - 1) < 0.901, "{held} {shares:?}");
        }
    }
    let slash = tensors["lfps.slash"].f32s();
    let first: Vec<usize> = serde_json::from_value(data["slash"]["first"].clone()).unwrap();
    let density = &data["slash"]["density"];
    assert_eq!(density.as_array().unwrap().len(), layers);
    let near = density[1][0][0].as_f64().unwrap();
    let group = heads / kv_heads;
    let expected = (0..group)
        .map(|head| f64::from(slash[(heads + head) * 600]))
        .sum::<f64>()
        / group as f64;
    assert!((near - expected).abs() <= 1e-3 * expected, "{near} {expected}");
    assert!(first.len() > 20 && *first.last().unwrap() < 200, "{first:?}");
}

/// A copy of the artifact whose names are markup.
fn hostile() -> (String, String) {
    let of = files();
    let name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>";
    let art = of.scratch.path("hostile");
    resealed(&of.artifact, &art, |manifest| {
        manifest["model"]["model_type"] = json!(name);
        manifest["quality"]["methods"]["rows"][1]["method"] = json!(name);
        manifest["calibration"]["<b>setting"] = json!(name);
    });
    let mut eval = parsed(&of.text);
    eval["rows"][1]["method"] = json!(name);
    let eval = of.scratch.write("<i>hostile.json", eval.to_string());
    let page = of
        .scratch
        .make("hostile.html", &format!("report {art} --eval {eval}"));
    (page, name.to_owned())
}

fn text_is_escaped() {
    let (page, name) = hostile();
    let text = std::fs::read_to_string(&page).unwrap();
    assert_eq!(text.matches("</script>").count(), 2, "the data and the script");
    assert!(!text.contains("<img") && !text.contains("<script>alert"));
    assert_eq!(data_of(&page)["inspect"]["model"]["model_type"], json!(name));
}

fn what_is_missing_is_left_out() {
    let of = files();
    let plain = of.scratch.path("no-verdict");
    resealed(&of.artifact, &plain, |manifest| {
        manifest["quality"].as_object_mut().unwrap().remove("methods");
    });
    let report = |options: &str| {
        let out = of.scratch.path("parts.html");
        kvsmith(&format!("report {options} -o {out} --json --overwrite")).json()["sections"].clone()
    };
    assert_eq!(report(&plain), json!(["map", "head", "provenance"]));
    let all = report(&format!(
        "{plain} --eval {} --eval {} --eval {} --against {}",
        of.text, of.longer, of.questions, of.other
    ));
    let names = [
        "decision",
        "front",
        "lengths",
        "positions",
        "blocks",
        "turns",
        "questions",
        "map",
        "head",
        "provenance",
        "differences",
    ];
    assert_eq!(all, json!(names));
}

/// Of a document about two artifacts, the rows of the other one are left out, and what needs no artifact stays. Rows of
/// `--also` would stand beside another row of their method, and are left out.
fn other_rows_are_left_out() {
    let of = files();
    let blocks = of.scratch.path("longer.tokens");
    let mut eval = command(&format!(
        "eval --model {} --artifact {} --against {} --methods topk,wpq --budgets 0.1 --tokens {blocks} --decode 2 --json -q",
        checkpoint("llama_default"),
        of.artifact,
        of.other
    ));
    let eval = Outcome::from_output(eval.args(["--also", "lfps --lfps-theta 0.85"]).output().unwrap());
    let eval = of.scratch.write("two.json", eval.ok().stdout);
    let rows = |artifact: &str| {
        let page = of
            .scratch
            .make("two.html", &format!("report {artifact} --eval {eval}"));
        let rows = data_of(&page)["evals"][0]["document"]["rows"].clone();
        let rows = rows.as_array().unwrap().iter();
        rows.map(|row| !row.is_null()).collect::<Vec<bool>>()
    };
    assert_eq!(rows(&of.artifact), [true, true, false, false, false]);
    assert_eq!(rows(&of.other), [true, false, true, false, false]);
}

fn bad_documents_are_refused() {
    let of = files();
    let text = std::fs::read_to_string(&of.text).unwrap();
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut document = parsed(&of.text);
        edit(&mut document);
        document.to_string()
    };
    let row =
        |key: &'static str, value: Value| edited(&move |document| document["rows"][2][key] = value.clone());
    let cases: Vec<(String, &str)> = vec![
        ("what is this".to_owned(), "not JSON"),
        (text[..text.len() / 2].to_owned(), "the file ends too early"),
        (text.replacen("\"kl\":", "\"kl\":NaN,\"was\":", 1), "not JSON"),
        ("[1,2]".to_owned(), "not a document of `eval --json`"),
        (inspected(&of.artifact).to_string(), "not"),
        (
            kvsmith(&format!("inspect {} --json", of.artifact)).ok().stdout,
            "not",
        ),
        (
            edited(&|document| document["command"] = json!("verdict")),
            "a document of `verdict`, not of `eval`",
        ),
        (
            edited(&|document| document["rows"] = json!([])),
            "there are no rows",
        ),
        (
            edited(&|document| document["error"] = json!({ "message": "no memory" })),
            "the evaluation failed: no memory",
        ),
        (
            edited(&|document| document["fingerprint"] = json!("0".repeat(64))),
            "measured with another model",
        ),
        (
            edited(&|document| {
                document["artifacts"][0]["sections_sha256"] = json!("0".repeat(64));
                document["rows"]
                    .as_array_mut()
                    .unwrap()
                    .retain(|row| row["method"] == "wpq");
            }),
            "measured with another artifact",
        ),
        (row("kl", json!(null)), "`rows[2].kl`"),
        (row("kl", json!(-1.0)), "`rows[2].kl`"),
        (row("budget", json!(0)), "`rows[2].budget`"),
        (
            row("intervals", json!({ "kl": [2.0, 1.0] })),
            "`rows[2].intervals`",
        ),
        (row("kl_by_block", json!([0.1, -0.1])), "`rows[2].kl_by_block`"),
        (
            row(
                "per_head",
                json!([{ "layer": 0, "kv_head": 0, "recall": 1, "mass": 1, "output_error": 0 }]),
            ),
            "`rows[2].per_head`",
        ),
        (
            row("output_error_by_layer", json!([0.1])),
            "`rows[2].output_error_by_layer`",
        ),
        (
            row("by_turn", json!([{ "kl": null }])),
            "not a document of `eval --json`",
        ),
    ];
    let out = of.scratch.path("bad.html");
    for (content, culprit) in cases {
        let bad = of.scratch.write("bad.json", content);
        kvsmith(&format!("report {} --eval {bad} -o {out}", of.artifact)).fails(1, culprit, "eval");
        assert!(!Path::new(&out).exists(), "{culprit}");
    }
    let missing = of.scratch.path("nowhere.json");
    kvsmith(&format!("report {} --eval {missing} -o {out}", of.artifact)).fails(1, "cannot read", "path");
    // An older document, which does not name its model, is taken with a warning.
    let older = edited(&|document| {
        let members = document.as_object_mut().unwrap();
        for key in [
            "schema",
            "command",
            "fingerprint",
            "artifacts",
            "kv",
            "sinks",
            "window",
            "longest_block",
        ] {
            members.remove(key).unwrap();
        }
    });
    let older = of.scratch.write("older.json", older);
    let taken = kvsmith(&format!("report {} --eval {older} -o {out}", of.artifact)).ok();
    assert!(
        taken.stderr.contains("does not say from which model"),
        "{}",
        taken.stderr
    );
}

fn outputs_are_safe() {
    let of = files();
    let report = |options: &str| kvsmith(&format!("report {options}"));
    let (art, text) = (&of.artifact, &of.text);
    report(&format!("{art} -o {art} --overwrite")).fails(2, "is an input", "another name");
    report(&format!("{art} --eval {text} -o {text} --overwrite")).fails(2, "is an input", "another name");
    report(&format!("{art} --against {0} -o {0} --overwrite", of.other)).fails(
        2,
        "is an input",
        "another name",
    );
    let own = of.scratch.write("mine.html", "<!doctype html><p>mine");
    report(&format!("{art} -o {own} --overwrite")).fails(2, "was not written by kvsmith", "another name");
    let page = of.scratch.path("safe.html");
    report(&format!("{art} -o {page}")).ok();
    report(&format!("{art} -o {page}")).fails(2, "already exists", "--overwrite");
    report(&format!("{art} -o {page} --overwrite")).ok();
    let stranger = of.scratch.tokens("stranger.tokens", &documents(&[60, 60], 1));
    let stranger = of.scratch.make(
        "stranger",
        &format!(
            "calibrate --model {} --tokens {stranger} --size 4 --no-verdict",
            checkpoint("qwen2_bias")
        ),
    );
    report(&format!("{art} --against {stranger} -o {page} --overwrite")).fails(
        1,
        "another model",
        "one model",
    );
    // A damaged tensor is found, since its numbers would be shown.
    let mut bytes = std::fs::read(art).unwrap();
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    let damaged = of.scratch.write("damaged", bytes);
    report(&format!("{damaged} -o {page} --overwrite")).fails(1, "digest", "damaged");
}

/// The browser, if there is one.
fn chromium() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("KVSMITH_CHROMIUM") {
        return Some(named.into());
    }
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let places = names
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    places.into_iter().find(|place| place.is_file())
}

/// What a browser without a network makes of a page, after a script at its end.
fn dom(page: &str, script: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("page.html");
    let text = std::fs::read_to_string(page).unwrap();
    std::fs::write(
        &copy,
        text.replace("</body>", &format!("<script>{script}</script></body>")),
    )
    .unwrap();
    let output = Command::new(chromium().unwrap())
        .args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-extensions",
        ])
        .args([
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--proxy-server=127.0.0.1:9",
        ])
        .args([
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            "--dump-dom",
            "--window-size=1000,900",
        ])
        .arg(format!(
            "--user-data-dir={}",
            folder.path().join("profile").display()
        ))
        .arg(format!("file://{}", copy.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let console: Vec<&str> = said.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(console.is_empty(), "{console:?}");
    let dom = String::from_utf8(output.stdout).unwrap();
    assert!(
        dom.contains("data-ready=\"yes\""),
        "the script of the page did not end: {said}"
    );
    dom
}

/// What a script put into the element `results`.
fn results(dom: &str) -> Value {
    let text = dom
        .split_once("<pre id=\"results\">")
        .expect("results")
        .1
        .split_once("</pre>")
        .unwrap()
        .0;
    let text = text
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&amp;", "&");
    serde_json::from_str(&text).unwrap()
}

/// A script that gives `results` what an expression returns.
fn giving(expression: &str) -> String {
    format!(
        "const results = document.createElement('pre'); results.id = 'results'; \
         results.textContent = JSON.stringify((() => {{ {expression} }})()); document.body.append(results);"
    )
}

/// The documents that numbers of the page are from, by the names that the page gives them.
fn originals() -> BTreeMap<String, Value> {
    let of = files();
    let mut all = BTreeMap::from([
        ("inspect".to_owned(), inspected(&of.artifact)),
        ("against".to_owned(), inspected(&of.other)),
    ]);
    for (i, path) in [&of.text, &of.longer, &of.questions].into_iter().enumerate() {
        all.insert(format!("eval{i}"), parsed(path));
    }
    all
}

/// Every number that the page shows, with each quantity and method of the map, each source and each file chosen in turn.
const NUMBERS: &str = "
    const found = new Map();
    const texts = new Map();
    const collect = () => document.querySelectorAll('[data-from]').forEach((of) => {
      found.set(of.dataset.from, of.dataset.value);
      if (of.matches('.number')) texts.set(of.dataset.from + ' ' + of.textContent, [of.dataset.value, of.textContent]);
    });
    const each = (id, then) => {
      const n = byId(id)?.options.length ?? 0;
      for (let i = 0; i < n; i++) {
        const select = byId(id);
        select.selectedIndex = i;
        select.dispatchEvent(new Event('change'));
        then();
      }
    };
    collect();
    each('source', collect);
    each('quantity', () => { collect(); each('map-method', collect); });
    each('file', () => { collect(); each('setting', collect); });
    document.querySelectorAll('#map .cell')[3].dispatchEvent(new Event('click'));
    collect();
    const bad = /undefined|NaN|\\[object|Infinity/.exec(document.querySelector('header').textContent + document.querySelector('main').textContent);
    const computed = [...document.querySelectorAll('[data-formula]')].map((of) => [of.dataset.formula, +of.dataset.value]);
    return { numbers: [...found], texts: [...texts.values()], head: byId('head-name').textContent, bad: bad && bad[0], computed,
      wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
      unlabelled: document.querySelectorAll('main svg[role=img]:not([aria-label])').length };";

/// Checks that a text shows a number, rounded to the digits that it has.
#[track_caller]
fn assert_shows(text: &str, value: f64) {
    let (number, unit) = match text.strip_suffix('%') {
        Some(number) => (number, "%"),
        None => text.split_once(' ').unwrap_or((text, "")),
    };
    let scale = match unit {
        "" | "bits" | "bytes" | "positions" => 1.0,
        "%" => 0.01,
        "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        other => panic!("{text}: unknown unit {other:?}"),
    };
    let number = number.replace(',', "");
    let shown: f64 = number.parse().unwrap_or_else(|_| panic!("{text}"));
    let (digits, exponent) = number.split_once('e').unwrap_or((&number, "0"));
    let decimals = digits.split_once('.').map_or(0, |(_, after)| after.len() as i32);
    let half = 0.5 * 10f64.powi(exponent.parse::<i32>().unwrap() - decimals) * scale;
    // A large number without decimals has three digits or more.
    let half = if decimals == 0 {
        half.max(0.005 * value.abs())
    } else {
        half
    };
    let error = (shown * scale - value).abs();
    assert!(error <= half * (1.0 + 1e-9), "{text} for {value}");
}

fn every_number_is_that_of_the_documents() {
    let found = results(&dom(&files().page, &giving(NUMBERS)));
    let originals = originals();
    let numbers = found["numbers"].as_array().unwrap();
    let mut parts: BTreeMap<&str, usize> = BTreeMap::new();
    for number in numbers {
        let (pointer, shown) = (number[0].as_str().unwrap(), number[1].as_str().unwrap());
        let (name, path) = pointer.split_once('#').unwrap();
        let value = originals[name].pointer(path).and_then(Value::as_f64);
        assert_eq!(Some(shown.parse::<f64>().unwrap()), value, "{pointer}");
        for part in [
            "/heads/mass/",
            "/methods/formats/",
            "/per_head/",
            "/by_turn/",
            "/by_position/",
            "/kl_by_block/",
            "/intervals/kl/",
            "/by_task/",
            "/held_out_inertia",
            "/unused_codewords",
            "/inertia_history/",
            "/needle_accuracy_by_turn/",
            "/file_bytes",
        ] {
            *parts.entry(part).or_default() += usize::from(pointer.contains(part));
        }
        *parts.entry(name.trim_end_matches(char::is_numeric)).or_default() += 1;
    }
    assert!(parts.values().all(|n| *n > 0) && parts.len() == 16, "{parts:?}");
    let texts = found["texts"].as_array().unwrap();
    assert!(texts.len() > 100, "{}", texts.len());
    for shown in texts {
        let (value, text) = (shown[0].as_str().unwrap(), shown[1].as_str().unwrap());
        assert_shows(text, value.parse().unwrap());
    }
    assert_eq!(found["bad"], json!(null));
    assert_eq!(found["wide"], json!(false), "the page scrolls sideways");
    assert_eq!(found["unlabelled"], 0);
    // Two KV heads: the fourth cell is the second head of the second layer.
    assert_eq!(found["head"], "Layer 1, KV head 1");
    let computed = found["computed"].as_array().unwrap();
    assert!(
        computed.iter().all(|of| of[1].is_number()) && computed.len() > 10,
        "{computed:?}"
    );
}

/// Pointing at a cell of the map, and at a mark of a chart, says what it shows.
fn pointing_at_a_mark_tells_its_value() {
    let script = giving(
        "const enter = (of) => of.dispatchEvent(new Event('pointerenter'));
         const cells = [...document.querySelectorAll('#map .cell')].map((cell) => {
           enter(cell);
           return [cell.getAttribute('aria-label'), byId('map-readout').textContent, cell.querySelector('title').textContent];
         });
         const chart = document.querySelector('#front-chart figure');
         const marks = [...chart.querySelectorAll('.point')].map((mark) => {
           enter(mark);
           return [mark.querySelector('title').textContent, chart.querySelector('.readout').textContent];
         });
         const rows = [...document.querySelectorAll('#front-table tbody tr')].map((row) => [...row.children].map((of) => of.textContent));
         const title = document.querySelector('#map svg text.title');
         const svg = document.querySelector('#map svg');
         return { cells, marks, rows, cut: title.getBBox().x + title.getBBox().width > svg.width.baseVal.value };",
    );
    let found = results(&dom(&files().page, &script));
    let cells = found["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 4);
    for cell in cells {
        assert_eq!(cell[0], cell[1]);
        assert_eq!(cell[0], cell[2]);
    }
    let marks = found["marks"].as_array().unwrap();
    let rows = found["rows"].as_array().unwrap();
    assert!(marks.len() > 3, "{found}");
    for mark in marks {
        assert_eq!(mark[0], mark[1]);
        let text = mark[0].as_str().unwrap();
        let is_of = |row: &&Value| {
            let cell = |i: usize| row[i].as_str().unwrap();
            let name = cell(0).split(' ').next().unwrap();
            text.starts_with(name)
                && text.contains(&format!("KL {} nats", cell(3)))
                && text.contains(&format!("budget {}", cell(1)))
        };
        assert!(rows.iter().any(|row| is_of(&row)), "{text}: {rows:?}");
    }
    assert_eq!(found["cut"], false, "the title of the map is cut");
}

/// A phone of 390 pixels: the page is in a frame, since a window cannot be as narrow.
fn a_phone_shows_the_page_without_scrolling_sideways() {
    let of = files();
    let probe = "addEventListener('load', () => setTimeout(() => {
         const page = document.documentElement;
         document.querySelectorAll('details').forEach((of) => { of.open = true; });
         const all = [...document.querySelectorAll('caption span')];
         parent.postMessage({ width: innerWidth, wide: page.scrollWidth > page.clientWidth, captions: all.length,
           cut: all.filter((of) => of.getBoundingClientRect().right > innerWidth).map((of) => of.textContent),
           outside: [...document.querySelectorAll('main button, main select, main p, #map svg text.title')].filter((of) => of.getBoundingClientRect().right > innerWidth + 1)
             .map((of) => of.textContent.slice(0, 60)) }, '*');
       }, 300));";
    let text = std::fs::read_to_string(&of.page).unwrap();
    let inner = of.scratch.write(
        "phone.html",
        text.replace("</body>", &format!("<script>{probe}</script></body>")),
    );
    let frame = of.scratch.write(
        "frame.html",
        format!("<!doctype html><body data-ready=\"yes\" style=\"margin:0\"><iframe src=\"file://{inner}\" style=\"border:0;width:390px;height:800px\"></iframe></body>"),
    );
    let script = "addEventListener('message', (event) => { const results = document.createElement('pre'); results.id = 'results'; \
                  results.textContent = JSON.stringify(event.data); document.body.append(results); });";
    let found = results(&dom(&frame, script));
    assert_eq!(found["width"], 390);
    assert_eq!(found["wide"], false, "the page scrolls sideways");
    assert!(found["captions"].as_u64().unwrap() > 2, "{found}");
    assert_eq!(found["cut"], json!([]));
    assert_eq!(found["outside"], json!([]));
}

/// What is printed: the rules for paper, applied to a page as wide as paper, hide controls and keep everything in the page.
fn paper_has_no_controls() {
    let script = giving(
        "for (const sheet of document.styleSheets) for (const rule of sheet.cssRules) {
           if (rule.media?.mediaText === 'print') rule.media.mediaText = 'all';
         }
         document.body.style.width = '720px';
         const shown = (name) => [...document.querySelectorAll(name)].filter((of) => of.checkVisibility()).length;
         return { controls: shown('nav, button, input, summary, .readout'), charts: shown('main svg'), answer: shown('#answer-text'), line: shown('#run-line'),
           outside: [...document.querySelectorAll('main svg, main table')].filter((of) => of.checkVisibility() && of.getBoundingClientRect().width > 724).length };",
    );
    let found = results(&dom(&files().page, &script));
    assert_eq!(found["controls"], 0, "{found}");
    assert!(found["charts"].as_u64().unwrap() > 1, "{found}");
    assert_eq!((&found["answer"], &found["line"]), (&json!(1), &json!(1)));
    assert_eq!(found["outside"], 0, "{found}");
}

/// The row of the verdict that loses least at the smallest share of the bytes within a loss, else the one that loses
/// least.
fn expected(rows: &[Value], limit: f64) -> (&Value, bool) {
    let own = || {
        rows.iter()
            .filter(|row| row["kl"].is_number() && row["method"] != "topk")
    };
    let key = |row: &&Value| {
        let target = row["reads_target"].as_f64();
        (
            target.unwrap_or_else(|| number(row, "bytes_read_fraction")),
            number(row, "kl"),
        )
    };
    let within = own().filter(|row| number(row, "kl") <= limit);
    match within.min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap()) {
        Some(row) => (row, true),
        None => (
            own()
                .min_by(|a, b| number(a, "kl").total_cmp(&number(b, "kl")))
                .unwrap(),
            false,
        ),
    }
}

fn the_slider_recommends() {
    let of = files();
    let script = giving(
        "const answers = [];
         const tell = () => answers.push({ limit: +byId('limit').dataset.value, text: byId('answer-text').textContent,
           method: byId('answer-method').textContent, line: byId('run-line').textContent, source: byId('source').value, context: byId('context').value,
           read: +byId('answer-read').dataset.value, cache: +byId('answer-cache').dataset.value, index: +byId('answer-index').dataset.value });
         tell();
         const slider = byId('slider');
         for (let place = +slider.min; place <= +slider.max; place += 0.25) {
           slider.value = place;
           slider.dispatchEvent(new Event('input'));
           tell();
         }
         byId('context').value = '256';
         byId('context').dispatchEvent(new Event('change'));
         tell();
         for (const source of ['eval0', 'eval1']) {
           byId('source').value = source;
           byId('source').dispatchEvent(new Event('change'));
           tell();
         }
         return answers;",
    );
    let answers = results(&dom(&of.page, &script));
    let originals = originals();
    let document = &originals["inspect"];
    let answers = answers.as_array().unwrap();
    assert!(answers.len() > 15);
    assert_eq!(answers[0]["limit"], 0.03);
    let mut outcomes = BTreeMap::new();
    for answer in answers {
        let source = answer["source"].as_str().unwrap();
        let rows = match originals.get(source) {
            Some(eval) => &eval["rows"],
            None => &document["methods"]["rows"],
        };
        let (row, is_within) = expected(rows.as_array().unwrap(), number(answer, "limit"));
        // The second file was measured with other sinks than `run` has by itself.
        let sinks = if source == "eval1" {
            " --sinks 2 --window 64"
        } else {
            ""
        };
        let method = row["method"].as_str().unwrap();
        assert_eq!(answer["method"], method, "{answer}");
        let line = format!(
            "kvsmith run --model DIR --artifact {} --method {method} --budget {} --kv bf16{sinks} --prompt-file prompt.txt",
            of.artifact, row["budget"]
        );
        assert_eq!(answer["line"], line);
        assert_eq!(
            answer["text"]
                .as_str()
                .unwrap()
                .starts_with("For a KL of at most"),
            is_within,
            "{answer}"
        );
        *outcomes.entry(is_within).or_insert(0) += 1;
        // Keys and values of every layer and KV head, two bytes a channel; the share of the bytes that the row reads.
        let model = &document["model"];
        let heads = number(model, "n_layers") * number(model, "n_kv_heads");
        let context: f64 = answer["context"].as_str().unwrap().parse().unwrap();
        let cache = context * heads * 4.0 * number(model, "head_dim");
        assert_eq!(number(answer, "cache"), cache);
        assert_eq!(number(answer, "read"), cache * number(row, "bytes_read_fraction"));
        assert!(
            number(answer, "index")
                >= number(row, "index_bits_per_token") / 8.0 * context * heads * (1.0 - 1e-9)
        );
    }
    assert_eq!(outcomes.len(), 2, "both outcomes were tried: {outcomes:?}");
    // The model's context is 512.
    assert_eq!(
        (&answers[0]["context"], &answers.last().unwrap()["context"]),
        (&json!("512"), &json!("256"))
    );
}

fn hostile_names_are_text() {
    let (page, name) = hostile();
    let script = giving(
        "return { images: document.querySelectorAll('img, main b b, i').length, text: byId('subject').textContent };",
    );
    let found = results(&dom(&page, &script));
    assert_eq!(found["images"], 0);
    assert!(found["text"].as_str().unwrap().contains(&name));
}

/// An artifact without a verdict: the page says which command measures one.
fn nothing_measured_is_said() {
    let of = files();
    let plain = of.scratch.path("unmeasured");
    resealed(&of.artifact, &plain, |manifest| {
        manifest["quality"].as_object_mut().unwrap().remove("methods");
    });
    let page = of.scratch.make("unmeasured.html", &format!("report {plain}"));
    let found = results(&dom(
        &page,
        &giving(
            "return [...document.querySelectorAll('.missing')].map((of) => of.parentNode.id + ' ' + of.textContent);",
        ),
    ));
    let said: Vec<&str> = found
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    for (place, command) in [
        ("decision ", "kvsmith verdict"),
        ("lengths ", "--seq-len"),
        ("positions ", "--decode 64"),
        ("turns ", "--turns"),
        ("questions ", "--needles"),
        ("map ", "kvsmith verdict"),
    ] {
        assert!(
            said.iter()
                .any(|line| line.starts_with(place) && line.contains(command)),
            "{place}{said:?}"
        );
    }
}
