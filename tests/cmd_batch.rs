//! `run --batch`: replies to the prompts of a file, several at a time, which a stopped run continues.

use std::collections::BTreeMap;

use crate::common::*;
use serde_json::{Value, json};

/// The bundled model, with an artifact and prompts of different lengths.
struct Batch {
    scratch: Scratch,
    model: String,
    artifact: String,
}

const PROMPTS: [&str; 6] = [
    "The lighthouse",
    "In the morning the three of them walked down to the harbour and",
    "Every village has",
    "A letter came. It said that nobody should wait for the boat, because",
    "Later",
    "The oldest of the trees stood",
];

impl Batch {
    fn new() -> Self {
        let scratch = Scratch::new();
        let model = root().join("calib-data/model").display().to_string();
        let text = root().join("calib-data/text.txt").display().to_string();
        let calibrate = format!(
            "calibrate --model {model} --text {text} --max-tokens 1500 --uuid-tokens 0 --seq-len 256 --size 16 --no-verdict"
        );
        let artifact = scratch.make("art", &calibrate);
        Self {
            scratch,
            model,
            artifact,
        }
    }

    /// Writes the prompts, of which each has its number as its id and a length of its own.
    fn prompts(&self) -> String {
        let line = |(i, prompt): (usize, &&str)| {
            json!({ "id": i, "prompt": prompt, "max_new": 8 + 5 * i }).to_string()
        };
        let lines: Vec<String> = PROMPTS.iter().enumerate().map(line).collect();
        self.scratch.write("prompts.jsonl", lines.join("\n"))
    }

    fn command(&self, input: &str, out: &str, options: &str) -> String {
        format!(
            "run --model {} --artifact {} --method wpq --budget 0.2 --batch {input} -o {out} {options}",
            self.model, self.artifact
        )
    }
}

/// The replies of a file by id, without their times.
fn replies(path: &str) -> BTreeMap<String, Value> {
    let lines = json_lines(&std::fs::read_to_string(path).unwrap());
    let reply = |mut line: Value| {
        assert!(line["seconds"].as_f64().is_some_and(|s| s >= 0.0), "{line}");
        line["seconds"] = Value::Null;
        (line["id"].to_string(), line)
    };
    let n = lines.len();
    let replies: BTreeMap<String, Value> = lines.into_iter().map(reply).collect();
    assert_eq!(replies.len(), n, "each prompt is answered once");
    replies
}

/// Whatever runs beside it, a reply is that of a run of its own, sampled ones included.
#[test]
fn replies_are_those_of_single_runs() {
    let batch = Batch::new();
    let input = batch.prompts();
    for sampling in ["", "--temperature 0.9 --top-k 40 --seed 3"] {
        let expected: Vec<Value> = PROMPTS
            .iter()
            .enumerate()
            .map(|(i, prompt)| {
                let mut run = command(&format!(
                    "run --model {} --artifact {} --method wpq --budget 0.2 --max-new {} --json {sampling}",
                    batch.model,
                    batch.artifact,
                    8 + 5 * i
                ));
                Outcome::of(run.args(["--prompt", prompt]).output().unwrap()).json()
            })
            .collect();
        for sequences in [1, 3, 4] {
            let out = batch
                .scratch
                .path(&format!("replies-{sequences}-{}.jsonl", sampling.len()));
            let options = format!("--json --sequences {sequences} {sampling}");
            let document = kvsmith(&batch.command(&input, &out, &options)).json();
            let replies = replies(&out);
            for (i, expected) in expected.iter().enumerate() {
                let reply = &replies[&i.to_string()];
                for key in [
                    "ids",
                    "text",
                    "prompt_tokens",
                    "stop_reason",
                    "bytes_read_fraction",
                ] {
                    assert_eq!(
                        reply[key], expected[key],
                        "{sequences} at a time, prompt {i}: {key}"
                    );
                }
            }
            let tokens: usize = replies
                .values()
                .map(|reply| reply["ids"].as_array().unwrap().len())
                .sum();
            assert_eq!(document["batch"]["replies"], json!(PROMPTS.len()));
            assert_eq!(
                (&document["batch"]["tokens"], &document["batch"]["skipped"]),
                (&json!(tokens), &json!(0))
            );
        }
    }
}

#[test]
fn lines_that_cannot_be_answered_are_named_and_counted() {
    let batch = Batch::new();
    let long = "and ".repeat(20_000);
    let lines = [
        json!({ "prompt": "No id of its own", "max_new": 3 }).to_string(),
        "{ not JSON".to_owned(),
        json!({ "id": "a", "prompt": "first", "max_new": 0 }).to_string(),
        json!({ "id": "a", "prompt": "the same id" }).to_string(),
        String::new(),
        json!({ "id": "b", "prompt": "both", "messages": [] }).to_string(),
        json!({ "id": "c", "prompt": long }).to_string(),
        json!({ "id": "d", "prompt": "a misspelt key", "max_tokens": 3 }).to_string(),
        json!({ "id": ["e"], "prompt": "a list as id" }).to_string(),
        json!({ "id": "f", "messages": [{ "role": "user", "content": "no template" }] }).to_string(),
    ];
    let input = batch.scratch.write("prompts.jsonl", lines.join("\n"));
    let out = batch.scratch.path("replies.jsonl");
    let outcome = kvsmith(&batch.command(&input, &out, "--json --max-new 2")).ok();
    for said in [
        "skipped line 2:",
        "skipped line 4: another line has the id \"a\"",
        "skipped line 6: give either `prompt` or `messages`",
        "skipped line 7: the prompt has",
        "skipped line 8: unknown field `max_tokens`",
        "skipped 2 more lines",
    ] {
        assert!(outcome.stderr.contains(said), "{said}: {}", outcome.stderr);
    }
    let document = outcome.json();
    assert_eq!(
        (&document["batch"]["replies"], &document["batch"]["skipped"]),
        (&json!(2), &json!(7))
    );
    let replies = replies(&out);
    assert_eq!(replies["1"]["ids"].as_array().unwrap().len(), 3);
    let empty = &replies["\"a\""];
    assert_eq!((&empty["ids"], &empty["text"]), (&json!([]), &json!("")));
    assert_eq!(
        (&empty["stop_reason"], &empty["bytes_read_fraction"]),
        (&json!("length"), &Value::Null)
    );

    let input = batch.scratch.write("none.jsonl", "nothing\n");
    let out = batch.scratch.path("none-replies.jsonl");
    kvsmith(&batch.command(&input, &out, "")).fails(1, "no line that can be answered", "\"prompt\"");
}

/// A run that is killed, or finds the disk full, at any change on the disk goes on where it stopped.
#[test]
fn a_stopped_batch_goes_on() {
    let batch = Batch::new();
    let input = batch.prompts();
    let whole = batch.scratch.path("whole.jsonl");
    kvsmith(&batch.command(&input, &whole, "--sequences 2")).ok();
    let expected = replies(&whole);
    for (at, kind) in (0..40)
        .step_by(one_in(3))
        .zip(["kill", "full"].into_iter().cycle())
    {
        let out = batch.scratch.path(&format!("replies-{at}.jsonl"));
        let run = batch.command(&input, &out, "--sequences 2 --json");
        let mut stopped = command(&run);
        stopped.env("KVSMITH_DISK_FAULT", format!("{kind}:{at}"));
        let stopped = Outcome::of(stopped.output().unwrap());
        let is_whole = stopped.code == Some(0);
        if !is_whole && kind == "full" {
            assert!(
                stopped.stderr.contains("free some disk space"),
                "{}",
                stopped.stderr
            );
        }
        let earlier = std::fs::read_to_string(&out).unwrap_or_default();
        let whole_lines = earlier
            .lines()
            .filter(|line| serde_json::from_str::<Value>(line).is_ok())
            .count();
        let again = kvsmith(&run).json();
        assert_eq!(
            again["batch"]["already_answered"],
            json!(whole_lines),
            "{kind}:{at}"
        );
        assert_eq!(replies(&out), expected, "{kind}:{at}");
        let later = std::fs::read_to_string(&out).unwrap();
        let kept: Vec<&str> = earlier.lines().take(whole_lines).collect();
        assert!(
            later.starts_with(&kept.join("\n")),
            "what was answered stays: {kind}:{at}"
        );
        if is_whole {
            return;
        }
    }
    panic!("more changes than expected");
}

#[test]
fn replies_of_other_settings_and_other_files_are_not_mixed() {
    let batch = Batch::new();
    let input = batch.prompts();
    let out = batch.scratch.path("replies.jsonl");
    kvsmith(&batch.command(&input, &out, "")).ok();
    let before = std::fs::read_to_string(&out).unwrap();
    let fails = |options: &str, culprit: &str, hint: &str| {
        kvsmith(&batch.command(&input, &out, options)).fails(2, culprit, hint);
        assert_eq!(std::fs::read_to_string(&out).unwrap(), before);
    };
    fails("--temperature 0.5", "another `temperature`", "--overwrite");
    fails("--wpq-bits 32", "unexpected argument", "");
    fails("--kv bf16", "another `kv`", "--overwrite");
    // With the same settings, there is nothing to do.
    let again = kvsmith(&batch.command(&input, &out, "--json")).json();
    assert_eq!(
        (&again["batch"]["replies"], &again["batch"]["already_answered"]),
        (&json!(0), &json!(6))
    );
    assert_eq!(std::fs::read_to_string(&out).unwrap(), before);
    // A prompt that changed is not taken for answered.
    let changed = read(&input).replace("The lighthouse", "The keeper");
    let other = batch.scratch.write("changed.jsonl", changed);
    kvsmith(&batch.command(&other, &out, "")).fails(1, "another prompt with the id 0", "another id");
    // More lines are answered; the replies so far stay.
    let more = format!(
        "{}\n{}",
        read(&input),
        json!({ "id": "new", "prompt": "More", "max_new": 2 })
    );
    let more = batch.scratch.write("more.jsonl", more);
    kvsmith(&batch.command(&more, &out, "")).ok();
    assert!(std::fs::read_to_string(&out).unwrap().starts_with(&before));
    kvsmith(&batch.command(&input, &out, "--overwrite --temperature 0.5")).ok();
    assert_eq!(replies(&out).len(), 6);
    // Files of others, and inputs, are not touched.
    let notes = batch.scratch.write("notes.txt", "the only copy\n");
    kvsmith(&batch.command(&input, &notes, "--overwrite")).fails(2, "already exists", "another name");
    kvsmith(&batch.command(&input, &input, "--overwrite")).fails(
        2,
        "is an input of this command",
        "another name",
    );
    assert_eq!(std::fs::read_to_string(notes).unwrap(), "the only copy\n");
    kvsmith(&batch.command(&input, &out, "--chat")).fails(2, "cannot be used with", "");
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap()
}
