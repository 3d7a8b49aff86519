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
    "The lighthouse \u{e4}\u{f6} \u{1f30a}",
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
                Outcome::from_output(run.args(["--prompt", prompt]).output().unwrap()).json()
            })
            .collect();
        for sequences in [1, 3, 6] {
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
        // A mark of the byte order, and line ends of another system.
        "\u{feff}".to_owned() + &json!({ "prompt": "No id of its own", "max_new": 3 }).to_string() + "\r",
        "{ not JSON".to_owned(),
        json!({ "id": "a", "prompt": "first", "max_new": 0 }).to_string(),
        json!({ "id": "a", "prompt": "the same id" }).to_string(),
        String::new(),
        json!({ "id": "b", "prompt": "both", "messages": [] }).to_string(),
        json!({ "id": "c", "prompt": long }).to_string(),
        json!({ "id": "d", "prompt": "a misspelt key", "max_tokens": 3 }).to_string(),
        json!({ "id": ["e"], "prompt": "a list as id" }).to_string(),
        json!({ "id": "f", "messages": [{ "role": "user", "content": "no template" }] }).to_string(),
        json!({ "id": "g", "prompt": "" }).to_string(),
        json!({ "id": 1.5, "prompt": "a number that is not whole" }).to_string(),
        "{\"id\": 18446744073709551616, \"prompt\": \"a number of more than 64 bits\"}".to_owned(),
        "{\"id\": 18446744073709551615, \"prompt\": \"the largest number\", \"max_new\": 1}".to_owned(),
    ];
    let input = batch.scratch.write("prompts.jsonl", lines.join("\n"));
    let out = batch.scratch.path("replies.jsonl");
    let outcome = kvsmith(&batch.command(&input, &out, "--json --max-new 2")).ok();
    for said in [
        "skipped line 2: key must be a string (column 3)",
        "skipped line 4: another line has the id \"a\"",
        "skipped line 6: give either `prompt` or `messages`",
        "skipped line 7: the prompt has",
        "skipped line 8: unknown field `max_tokens`",
        "skipped 5 more lines",
    ] {
        assert!(outcome.stderr.contains(said), "{said}: {}", outcome.stderr);
    }
    let document = outcome.json();
    assert_eq!(
        (&document["batch"]["replies"], &document["batch"]["skipped"]),
        (&json!(3), &json!(10))
    );
    let replies = replies(&out);
    assert_eq!(replies["1"]["ids"].as_array().unwrap().len(), 3);
    assert_eq!(replies["18446744073709551615"]["stop_reason"], json!("length"));
    let empty = &replies["\"a\""];
    assert_eq!((&empty["ids"], &empty["text"]), (&json!([]), &json!("")));
    assert_eq!(
        (&empty["stop_reason"], &empty["bytes_read_fraction"]),
        (&json!("length"), &Value::Null)
    );

    let input = batch.scratch.write("none.jsonl", "nothing\n");
    let out = batch.scratch.path("none-replies.jsonl");
    kvsmith(&batch.command(&input, &out, "")).fails(1, "no line that can be answered", "\"prompt\"");
    let input = batch.scratch.write("bytes.jsonl", b"\xff\xfe\n");
    kvsmith(&batch.command(&input, &out, "")).fails(1, "is not UTF-8 text", "UTF-8");
}

/// A reply may be as long as the model's context lets it; memory is not taken before it is needed.
#[test]
fn a_reply_without_a_limit_ends_at_the_context() {
    let batch = Batch::new();
    let line =
        |id: &str, max_new: u64| json!({ "id": id, "prompt": "Later", "max_new": max_new }).to_string();
    let lines = [line("a", 4_294_967_295), line("b", u64::MAX), line("c", 5)];
    let input = batch.scratch.write("prompts.jsonl", lines.join("\n"));
    let out = batch.scratch.path("replies.jsonl");
    let config = json!({ "max_position_embeddings": 60 });
    let model = batch.scratch.path("short");
    copy_dir(&root().join("calib-data/model"), model.as_ref());
    edit_json(&format!("{model}/config.json"), &config);
    kvsmith(&format!(
        "run --model {model} --method full --batch {input} -o {out} --ignore-eos --sequences 6"
    ))
    .ok();
    let replies = replies(&out);
    for (id, n) in [("a", 60), ("b", 60), ("c", 5)] {
        let reply = &replies[&format!("\"{id}\"")];
        let positions =
            reply["prompt_tokens"].as_u64().unwrap() + reply["ids"].as_array().unwrap().len() as u64;
        match id {
            // The last token is not fed any more.
            "c" => assert_eq!(reply["ids"].as_array().unwrap().len(), n),
            _ => assert_eq!(
                (positions, &reply["stop_reason"]),
                (n as u64 + 1, &json!("context"))
            ),
        }
    }
}

/// `messages` are put into the model's chat template, as by `run --chat`.
#[test]
fn messages_are_rendered() {
    let batch = Batch::new();
    let model = batch.scratch.path("chat");
    copy_dir(&root().join("calib-data/model"), model.as_ref());
    let template =
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:";
    edit_json(
        &format!("{model}/tokenizer_config.json"),
        &json!({ "chat_template": template }),
    );
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let line =
        json!({ "messages": [message("system", "Be short."), message("user", "Where?")], "max_new": 6 });
    let plain = json!({ "id": "plain", "prompt": "Where?", "max_new": 2 });
    let broken = json!({ "id": "none", "messages": [] });
    let input = batch
        .scratch
        .write("prompts.jsonl", format!("{line}\n{plain}\n{broken}\n"));
    let out = batch.scratch.path("replies.jsonl");
    let outcome = kvsmith(&format!(
        "run --model {model} --method full --batch {input} -o {out}"
    ))
    .ok();
    assert!(
        outcome.stderr.contains("a `prompt` is not formatted with it"),
        "{}",
        outcome.stderr
    );
    assert!(
        outcome.stderr.contains("skipped line 3: there are no messages"),
        "{}",
        outcome.stderr
    );
    let mut chat = command(&format!(
        "run --model {model} --method full --chat --max-new 6 --json"
    ));
    chat.args(["--system", "Be short.", "--prompt", "Where?"])
        .stdin(std::process::Stdio::null());
    let chat = Outcome::from_output(chat.output().unwrap()).json();
    let reply = &replies(&out)["1"];
    for key in ["ids", "text", "prompt_tokens", "stop_reason"] {
        assert_eq!(reply[key], chat[key], "{key}");
    }
}

/// A run that is killed, or finds the disk full, at any change on the disk goes on where it stopped.
#[test]
fn a_stopped_batch_goes_on() {
    let batch = Batch::new();
    let input = batch.prompts();
    let whole = batch.scratch.path("whole.jsonl");
    kvsmith(&batch.command(&input, &whole, "--sequences 2")).ok();
    let expected = replies(&whole);
    let mut is_over = [false; 2];
    let places = (0..60)
        .step_by(one_in(3))
        .flat_map(|at| [(at, "kill", 0), (at, "full", 1)]);
    for (at, kind, which) in places {
        if is_over[which] {
            continue;
        }
        let out = batch.scratch.path(&format!("replies-{kind}-{at}.jsonl"));
        let run = batch.command(&input, &out, "--sequences 2 --json");
        let mut stopped = command(&run);
        stopped.env("KVSMITH_DISK_FAULT", format!("{kind}:{at}"));
        let stopped = Outcome::from_output(stopped.output().unwrap());
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
        is_over[which] = is_whole;
    }
    assert_eq!(is_over, [true; 2], "more changes than expected");
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
    let changed = read(&input).replace("The lighthouse", "The keeper of the");
    let other = batch.scratch.write("changed.jsonl", changed);
    kvsmith(&batch.command(&other, &out, "")).fails(1, "of the id 0", "another id");
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
    // Two at a time would mix their lines.
    let held = std::fs::File::open(&out).unwrap();
    held.lock().unwrap();
    kvsmith(&batch.command(&input, &out, "--temperature 0.5")).fails(1, "open in another process", "wait");
    kvsmith(&batch.command(&input, &out, "--overwrite")).fails(1, "open in another process", "wait");
    assert_eq!(replies(&out).len(), 6);
    drop(held);
    let timed = format!(
        "run --model {} --artifact {} --prefer time --batch {input} -o {out}",
        batch.model, batch.artifact
    );
    kvsmith(&timed).fails(2, "may choose another method each time", "--method");
    // Files of others, and inputs, are not touched.
    let settings = batch
        .scratch
        .write("mine.jsonl.settings.json", "{\"mine\": true}");
    let mine = batch.scratch.path("mine.jsonl");
    kvsmith(&batch.command(&input, &mine, "--overwrite")).fails(2, "was not written by", "another name");
    assert_eq!(read(&settings), "{\"mine\": true}");
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
