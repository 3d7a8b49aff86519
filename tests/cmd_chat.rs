//! `run --chat`: turns on one cache, from ids, from stdin and through chat templates.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::common::*;
use kvsmith::internal::method::registry::METHODS;
use kvsmith::internal::model::chat::{ChatTemplate, Message};
use serde_json::{Value, json};

/// Documents of three turns for a golden checkpoint.
fn three_turns(name: &str) -> Vec<Vec<u32>> {
    let mut turns = vec![golden_ids(name, "ids")];
    turns.extend(documents(&[9, 1], 5));
    turns
}

fn ids_of(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Runs the turns on one cache, and each of them on a fresh one after all that came before.
fn turns_equal_plain_runs(scratch: &Scratch, model: &str, turns: &[Vec<u32>], options: &str) {
    let tokens = scratch.tokens("turns.json", turns);
    let run = |arguments: String| {
        kvsmith(&format!(
            "run --model {model} --max-new 8 --ignore-eos --json {options} {arguments}"
        ))
        .json()
    };
    let chat = run(format!("--chat --tokens {tokens}"));
    assert_eq!(chat["turns"].as_array().unwrap().len(), turns.len());
    let mut said = Vec::new();
    for (i, (turn, told)) in turns.iter().zip(chat["turns"].as_array().unwrap()).enumerate() {
        said.extend_from_slice(turn);
        let whole = scratch.tokens("whole.json", &[said.clone()]);
        let plain = run(format!("--tokens {whole}"));
        assert!(plain.get("turns").is_none());
        assert_eq!(told["ids"], plain["ids"], "{model} {options}, turn {i}");
        assert_eq!(told["prompt_tokens"], json!(turn.len()));
        said.extend(ids_of(&told["ids"]));
    }
    let prompts: usize = turns.iter().map(Vec::len).sum();
    assert_eq!(chat["prompt_tokens"], json!(prompts));
    assert_eq!(ids_of(&chat["ids"]).len(), 8 * turns.len());
    assert_eq!(said.len(), prompts + 8 * turns.len());
    for key in ["prefill_s", "decode_s"] {
        let told = chat["turns"].as_array().unwrap().iter();
        let sum: f64 = told.map(|turn| number(turn, key)).sum();
        assert!((number(&chat, key) - sum).abs() < 1e-9, "{key}");
    }
    assert_eq!(chat["text"], json!(""), "there is no text without a tokenizer");
}

#[test]
fn turns_go_on_where_the_cache_ends() {
    let scratch = Scratch::new();
    for dir in all_golden() {
        let name = dir.file_name().unwrap().to_str().unwrap();
        let model = dir.display().to_string();
        turns_equal_plain_runs(&scratch, &model, &three_turns(name), "--method full");
    }
}

#[test]
fn every_method_with_the_whole_budget_goes_on_exactly() {
    for name in ["llama_default", "mistral_sliding", "qwen2_sliding", "qwen3_yarn"] {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let texts = scratch.tokens("texts.json", &documents(&[60, 60], 1));
        let calibrate = format!("calibrate --model {model} --tokens {texts} --size 8 --no-verdict --peers");
        let artifact = scratch.make("art", &calibrate);
        for method in METHODS {
            let options = format!(
                "--artifact {artifact} --sinks 1 --window 2 --budget 1.0 --method {}",
                method.as_str()
            );
            turns_equal_plain_runs(&scratch, &model, &three_turns(name), &options);
        }
    }
}

#[test]
fn steps_are_counted_over_all_turns() {
    let scratch = Scratch::new();
    let turns = three_turns("llama_default");
    let tokens = scratch.tokens("turns.json", &turns);
    let trace = scratch.path("trace");
    let chat = kvsmith(&format!(
        "run --chat --model {} --tokens {tokens} --max-new 5 --ignore-eos --json --method topk \
         --budget 4096 --sinks 0 --window 1 --trace {trace}",
        golden("llama_default").display()
    ))
    .json();
    assert_eq!(chat["kv_read_fraction"], json!(1.0));
    // A token of each reply comes from the prefill, and is fed by the first step.
    let mut expected = Vec::new();
    let mut fed = 0;
    for (i, turn) in turns.iter().enumerate() {
        fed += turn.len() + usize::from(i > 0);
        for _ in 0..4 {
            let positions: Vec<usize> = (0..fed).collect();
            for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                expected.push(json!({
                    "step": expected.len() / 4, "layer": layer, "kv_head": head, "positions": positions,
                }));
            }
            fed += 1;
        }
    }
    assert_eq!(json_lines(&std::fs::read_to_string(trace).unwrap()), expected);
}

#[test]
fn tokens_without_turns() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let run = |turns: &[Vec<u32>]| {
        let tokens = scratch.tokens("turns.json", turns);
        kvsmith(&format!(
            "run --chat --model {model} --tokens {tokens} --max-new 3 --ignore-eos --json"
        ))
        .ok()
    };
    let none = run(&[]).json();
    assert_eq!((&none["ids"], &none["turns"]), (&json!([]), &json!([])));
    let gaps = run(&[vec![], vec![5, 6], vec![], vec![7]]);
    assert_eq!(gaps.stderr.matches("skipped").count(), 2, "{}", gaps.stderr);
    let [gaps, dense] = [gaps, run(&[vec![5, 6], vec![7]])].map(Outcome::json);
    assert_eq!(gaps["turns"].as_array().unwrap().len(), 2);
    assert_eq!(gaps["ids"], dense["ids"]);

    // Nothing is generated, so nothing is left to feed.
    let tokens = scratch.tokens("turns.json", &[vec![5, 6], vec![7]]);
    let silent = kvsmith(&format!(
        "run --chat --model {model} --tokens {tokens} --max-new 0 --json"
    ))
    .json();
    assert_eq!(
        (&silent["ids"], &silent["prompt_tokens"]),
        (&json!([]), &json!(3))
    );
    // The first turn fits into the context of 512, the second does not.
    let tokens = scratch.tokens("turns.json", &documents(&[300, 208], 1));
    let run = format!("run --chat --model {model} --tokens {tokens} --max-new 5 --ignore-eos -q");
    let warned = kvsmith(&format!("{run} --beyond-context")).ok();
    assert_eq!(
        warned.stderr,
        "warning: the tokens so far and --max-new add up to 518 positions, more than the model's context of 512 tokens\n"
    );
    // The turn before is reported all the same.
    let refused = kvsmith(&format!("{run} --json"));
    assert!(
        refused.code == Some(1) && refused.stderr.contains("the conversation has 513 tokens"),
        "{}",
        refused.stderr
    );
    let turns: Value = serde_json::from_str(&refused.stdout).unwrap();
    assert_eq!(turns["turns"].as_array().map(Vec::len), Some(1), "{turns}");
    // Checked before the first turn.
    let tokens = scratch.tokens("turns.json", &[vec![5, 6], vec![96]]);
    kvsmith(&format!("run --chat --model {model} --tokens {tokens}")).fails(1, "token id 96", "");
}

/// A copy of a golden checkpoint with a tokenizer of characters and more special tokens.
struct Chat {
    scratch: Scratch,
    model: String,
    /// Special tokens with their ids, longest first.
    specials: Vec<(String, u32)>,
}

impl Chat {
    /// The special tokens get the ids that are asked for, from 43 on.
    fn new(specials: &[(&str, u32)]) -> Self {
        let scratch = Scratch::new();
        let model = scratch.model("model", "llama_default");
        let mut own: Value = serde_json::from_str(&tokenizer(Value::Null)).unwrap();
        for id in ALPHABET.len() as u32 + 3..96 {
            let name = specials.iter().find(|s| s.1 == id).map(|s| s.0.to_string());
            own["added_tokens"].as_array_mut().unwrap().push(json!({
                "id": id, "content": name.unwrap_or(format!("<filler {id}>")), "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false, "special": true,
            }));
        }
        scratch.write("model/tokenizer.json", own.to_string());
        let all = [("<s>", 1), ("</s>", 2)].iter().chain(specials);
        let specials = all.map(|(token, id)| (token.to_string(), *id)).collect();
        Self {
            scratch,
            model,
            specials,
        }
    }

    fn config(&self, config: &Value) {
        self.scratch
            .write("model/tokenizer_config.json", config.to_string());
    }

    fn template(&self, template: &str) {
        self.config(&json!({
            "bos_token": "<s>", "eos_token": { "content": "</s>" }, "chat_template": template,
        }));
    }

    fn stop_token(&self, id: u32) {
        self.scratch.write(
            "model/generation_config.json",
            json!({ "eos_token_id": id }).to_string(),
        );
    }

    /// The ids of a text with special tokens.
    fn ids(&self, mut text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        while let Some(c) = text.chars().next() {
            let special = self.specials.iter().find(|s| text.starts_with(&s.0));
            let len = special.map_or(c.len_utf8(), |s| s.0.len());
            match special {
                Some((_, id)) => ids.push(*id),
                None => ids.extend(character_ids(&text[..len])),
            }
            text = &text[len..];
        }
        ids
    }

    /// Runs with these bytes on stdin.
    fn run(&self, options: &str, stdin: impl AsRef<[u8]>) -> Outcome {
        let length = if options.contains("--max-new") {
            ""
        } else {
            "--max-new 12"
        };
        let arguments = format!("run --model {} {length} {options}", self.model);
        let mut child = start(&arguments);
        // A program that fails early reads nothing.
        let _ = child.stdin.take().unwrap().write_all(stdin.as_ref());
        Outcome::from_output(child.wait_with_output().unwrap())
    }

    /// Checks that a chat fed these texts, each after the reply before it; returns the replies.
    #[track_caller]
    fn fed(&self, options: &str, chat: &Value, texts: &[&str]) -> Vec<Vec<u32>> {
        let turns: Vec<Vec<u32>> = texts.iter().map(|text| self.ids(text)).collect();
        let tokens = self.scratch.tokens("fed.json", &turns);
        let same = self
            .run(&format!("--chat --json {options} --tokens {tokens}"), "")
            .json();
        let parts = |chat: &Value| -> Vec<[Value; 3]> {
            let part = |turn: &Value| ["ids", "text", "prompt_tokens"].map(|key| turn[key].clone());
            chat["turns"].as_array().unwrap().iter().map(part).collect()
        };
        assert_eq!(parts(chat), parts(&same), "{texts:?}");
        parts(chat).iter().map(|part| ids_of(&part[0])).collect()
    }
}

const CHATML: &str = "{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
";

const LLAMA3: &str = "{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\n\n' }}
{%- endif %}
";

#[test]
fn a_chatml_template() {
    let chat = Chat::new(&[("<|im_start|>", 50), ("<|im_end|>", 51)]);
    chat.template(CHATML);
    let first = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n";
    let next = "<|im_end|>\n<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n";
    let told = chat
        .run("--chat --json --ignore-eos", "hello\nand then\nand then\n")
        .ok();
    assert!(!told.stderr.contains("warning"), "{}", told.stderr);
    let told = told.json();
    let replies = chat.fed("--ignore-eos", &told, &[first, next, next]);
    assert!(replies.iter().all(|r| r.len() == 12));
    let texts: Vec<&str> = (0..3)
        .map(|i| told["turns"][i]["text"].as_str().unwrap())
        .collect();
    assert_eq!(told["text"], json!(texts.join("\n")));

    // The same replies as of a plain run over everything that was said.
    let said = [chat.ids(first), replies[0].clone(), chat.ids(next)].concat();
    let tokens = chat.scratch.tokens("said.json", &[said]);
    let plain = chat
        .run(&format!("--json --ignore-eos --tokens {tokens}"), "")
        .json();
    assert_eq!(plain["ids"], told["turns"][1]["ids"]);

    // Without --json, the replies alone go to stdout, a line each.
    let shown = chat.run("--chat --ignore-eos -q", "hello\nand then\n").ok();
    assert_eq!(shown.stdout, texts[..2].join("\n") + "\n");
    assert_eq!(shown.stderr, "");

    let system = "<|im_start|>system\nbe brief<|im_end|>\n".to_string();
    let arguments = format!(
        "run --model {} --chat --json --max-new 12 --ignore-eos",
        chat.model
    );
    let mut with_system = command(&arguments);
    with_system.args(["--system", "be brief", "--prompt", "hello"]);
    let told = Outcome::from_output(with_system.output().unwrap()).json();
    chat.fed("--ignore-eos", &told, &[&(system + first)]);
}

#[test]
fn a_llama3_template_that_trims() {
    let chat = Chat::new(&[("<|start|>", 60), ("<|end|>", 61), ("<|eot|>", 62)]);
    chat.template(LLAMA3);
    let told = chat.run("--chat --json --ignore-eos", " hello\nand then\n").ok();
    assert!(!told.stderr.contains("warning"), "{}", told.stderr);
    chat.fed(
        "--ignore-eos",
        &told.json(),
        &[
            "<s><|start|>user<|end|>\n\nhello<|eot|><|start|>assistant<|end|>\n\n",
            "<|eot|><|start|>user<|end|>\n\nand then<|eot|><|start|>assistant<|end|>\n\n",
        ],
    );
}

#[test]
fn stop_tokens_are_fed_once() {
    // The token that ends a turn is one that the model says: its reply to this message shows which.
    let template = |close: &str| {
        format!(
            "{{% for m in messages %}}{{% if m.role == 'user' %}}[{{{{ m.content }}}}]{{% else %}}{{{{ ' ' + m.content + '{close}' }}}}{{% endif %}}{{% endfor %}}"
        )
    };
    let chat = Chat::new(&[]);
    chat.template(&template(""));
    let reply = ids_of(&chat.run("--chat --json --ignore-eos", "hello\n").json()["ids"]);
    let at = (1..12)
        .find(|i| reply[*i] >= 43 && !reply[..*i].contains(&reply[*i]))
        .expect("a token that is no character");
    let end = reply[at];
    for close in ["<end>", " <end>", ""] {
        let chat = Chat::new(&[("<end>", end)]);
        chat.stop_token(end);
        chat.template(&template(close));
        let told = chat.run("--chat --json", "hello\nand then\n").json();
        assert_eq!(told["turns"][0]["ids"], json!(reply[..=at]));
        let replies = chat.fed(
            "",
            &told,
            &["[hello]", &(close.trim().to_string() + "[and then]")],
        );
        // Whether the template repeats the stop token or not, it is in the cache once.
        assert_eq!(told["turns"][1]["prompt_tokens"], json!("[and then]".len()));
        let said = [chat.ids("[hello]"), replies[0].clone(), chat.ids("[and then]")].concat();
        let tokens = chat.scratch.tokens("said.json", &[said]);
        let plain = chat.run(&format!("--json --tokens {tokens}"), "").json();
        assert_eq!(plain["ids"], told["turns"][1]["ids"], "`{close}`");
    }
}

/// A conversation whose second turn failed has told its first one; takes that from the outcome.
#[track_caller]
fn first_turn_is_told(outcome: &mut Outcome) {
    let told: Value = serde_json::from_str(&std::mem::take(&mut outcome.stdout)).unwrap();
    assert_eq!(told["turns"].as_array().map(Vec::len), Some(1), "{told}");
}

#[test]
fn templates_that_rewrite_earlier_turns() {
    let chat = Chat::new(&[("<|im_start|>", 50), ("<|im_end|>", 51)]);
    // Earlier replies lose all but their last character; a plain word stays as it is.
    let rewriting = CHATML.replace(
        "message['content']",
        "(message['content'][-1:] if message['content'] | length > 9 else message['content'])",
    );
    chat.template(&rewriting);
    let told = chat
        .run(
            "--chat --json --ignore-eos --max-new 30",
            "hello\nand then\nand then\n",
        )
        .ok();
    assert_eq!(
        told.stderr.matches("warning: ").count(),
        1,
        "once: {}",
        told.stderr
    );
    assert!(told.stderr.contains("rewrites earlier turns"), "{}", told.stderr);
    let next = "<|im_end|>\n<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n";
    let first = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n";
    chat.fed("--ignore-eos --max-new 30", &told.json(), &[first, next, next]);

    // One that leaves replies out says nothing about what follows them.
    chat.template("{% for m in messages if m.role == 'user' %}{{ m.content }}.{% endfor %}");
    let mut lost = chat.run("--chat --json", "hello\nand then\n");
    first_turn_is_told(&mut lost);
    lost.fails(1, "last reply exactly once", "--tokens");
    assert!(lost.stderr.contains("tokenizer_config.json"), "{}", lost.stderr);
}

#[test]
fn where_templates_are_found() {
    let chat = Chat::new(&[]);
    let text = |name: &str| format!("{name} {{{{ messages[0].content }}}}");
    let list = |names: &[&str]| {
        let one = |name: &&str| json!({ "name": name, "template": text(name) });
        json!({ "chat_template": names.iter().map(one).collect::<Vec<_>>() })
    };
    let fed = |expected: &str| {
        let told = chat.run("--chat --json", "hello\n").json();
        chat.fed("", &told, &[expected]);
    };
    chat.scratch
        .write("model/chat_template.json", list(&["default"]).to_string());
    fed("default hello");
    chat.config(&json!({ "chat_template": null }));
    fed("default hello");
    chat.template(&text("string"));
    fed("string hello");
    chat.config(&list(&["tools", "default"]));
    fed("default hello");
    chat.config(&list(&["tools", "other"]));
    chat.run("--chat", "hello\n")
        .fails(1, "tokenizer_config.json", "");
    chat.config(&json!({ "chat_template": 3 }));
    chat.run("--chat", "hello\n")
        .fails(1, "tokenizer_config.json", "");
    // As in transformers, the file counts more than the configuration.
    chat.scratch.write("model/chat_template.jinja", text("file"));
    fed("file hello");
    chat.scratch
        .write("model/chat_template.jinja", b"\xff{{ messages }}");
    chat.run("--chat", "hello\n").fails(1, "chat_template.jinja", "");
}

#[test]
fn broken_and_hostile_templates() {
    let chat = Chat::new(&[]);
    let chain = |link: &str, close: &str| {
        let n = 130_000 / (link.len() + close.len());
        format!("{{% set x = {}1{} %}}", link.repeat(n), close.repeat(n))
    };
    for (template, culprit) in [
        ("{% if %}", "syntax error"),
        ("{{ messages[0].content", "syntax error"),
        ("{{ nothing() }}", "nothing"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        (
            "{{ raise_exception('no system messages here') }}",
            "no system messages here",
        ),
        (
            "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
            "does not finish",
        ),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "cannot be used",
        ),
        (
            "{% set s = 'x' * 50000 %}{% for i in range(1000) %}{{ s }}{% endfor %}",
            "exceeds the limit",
        ),
        ("{% include 'config.json' %}", "config.json"),
        (&chain("(", ")"), "recursion"),
        (&chain("[", "]"), "recursion"),
        (&"x".repeat(140_000), "140000 bytes"),
    ] {
        chat.template(template);
        let outcome = chat.run("--chat", "hello\n");
        outcome.fails(1, culprit, "");
        assert!(
            outcome.stderr.contains("tokenizer_config.json: "),
            "{}",
            outcome.stderr
        );
    }
    // Chains that the engine follows as deep as they go, and a value as deep as a loop makes it.
    let branches = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(10_000));
    for template in [
        chain("-", ""),
        chain("not ", ""),
        chain("1+", ""),
        chain("1~", ""),
        chain("1 and ", ""),
        branches,
        "{% set n = namespace(x=1) %}{% for i in range(9) %}{% for j in range(9999) %}\
         {% set n.x = [n.x] %}{% endfor %}{% endfor %}"
            .to_string(),
    ] {
        chat.template(&format!("{{{{ messages[0].content }}}}{template}"));
        let outcome = chat.run("--chat --json", "hello\n");
        assert_eq!(outcome.code, Some(0), "{}: {}", &template[..20], outcome.stderr);
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let fixtures = root().join("tests/fixtures/chat");
    let rows: Vec<Value> =
        serde_json::from_slice(&std::fs::read(fixtures.join("expected.json")).unwrap()).unwrap();
    let today = || {
        let output = Command::new("date").env("LC_ALL", "C").arg("+%d %b %Y").output();
        String::from_utf8(output.unwrap().stdout)
            .unwrap()
            .trim()
            .to_string()
    };
    let mut templates = std::collections::BTreeSet::new();
    for row in &rows {
        let scratch = Scratch::new();
        let name = row["template"].as_str().unwrap();
        templates.insert(name);
        std::fs::copy(
            fixtures.join(format!("{name}.jinja")),
            scratch.path("chat_template.jinja"),
        )
        .unwrap();
        let tokens = json!({
            "bos_token": "<s>", "eos_token": { "content": "</s>" }, "pad_token": null,
            "add_bos_token": true, "additional_special_tokens": ["<a>", { "content": "<b>" }],
        });
        scratch.write("tokenizer_config.json", tokens.to_string());
        let template = ChatTemplate::open(Path::new(&scratch.path(""))).unwrap().unwrap();
        let messages: Vec<Message> = row["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| Message {
                role: m["role"].as_str().unwrap().to_owned().into(),
                content: m["content"].as_str().unwrap().to_string(),
            })
            .collect();
        let before = today();
        let text = template
            .render(&messages, row["add_generation_prompt"] == true)
            .unwrap();
        // The day may end in between.
        let expected = |day: &str| row["text"].as_str().unwrap().replace("@DATE@", day);
        if text != expected(&before) {
            assert_eq!(text, expected(&today()), "{name} of {}", row["messages"]);
        }
    }
    assert_eq!(templates.len(), 5);
}

#[test]
fn lines_of_stdin_without_a_template() {
    let chat = Chat::new(&[]);
    chat.config(&json!({ "add_bos_token": true, "bos_token": "<s>" }));
    let run = |stdin: &[u8]| chat.run("--chat --json --ignore-eos", stdin).ok();
    let told = run(b"hello\nand then\n");
    let texts = ["<s>hello", "and then"];
    assert_eq!(told.stderr.matches("no chat template").count(), 1);
    assert!(!told.stderr.contains("> "), "no prompt for a pipe");
    let told = told.json();
    chat.fed("--ignore-eos", &told, &texts);
    for same in [
        &b"hello\nand then"[..],
        b"hello\r\nand then\r\n",
        b"\n\nhello\n\r\n\nand then\n\n",
    ] {
        assert_eq!(run(same).json()["turns"][1]["ids"], told["turns"][1]["ids"]);
    }
    assert_eq!(run(b"").json()["turns"], json!([]));
    // A prompt comes before the lines; a file is one turn.
    let prompt = chat.scratch.write("prompt.txt", "hello\nagain");
    let options = format!("--chat --json --ignore-eos --prompt-file {prompt}");
    let told = chat.run(&options, "and then\n").json();
    chat.fed("--ignore-eos", &told, &["<s>hello\nagain", "and then"]);
    // Ids leave stdin alone.
    let tokens = chat.scratch.tokens("one.json", &[vec![5, 6]]);
    let told = chat
        .run(&format!("--chat --json --tokens {tokens}"), "hello\n")
        .json();
    assert_eq!(told["turns"].as_array().unwrap().len(), 1);

    let mut unreadable = chat.run("--chat --json", b"hello\n\xff\n");
    first_turn_is_told(&mut unreadable);
    unreadable.fails(1, "stdin", "");
}

#[test]
fn wrong_use() {
    let chat = Chat::new(&[]);
    chat.template(CHATML);
    let tokens = chat.scratch.tokens("one.json", &[vec![5, 6]]);
    let lone = chat.run("--prompt x --system y", "");
    lone.fails(2, "required", "");
    assert!(lone.stderr.contains("--chat"), "{}", lone.stderr);
    chat.run(&format!("--chat --tokens {tokens} --system y"), "")
        .fails(2, "--system", "");
    chat.run("", "").fails(2, "required", "");
    chat.config(&json!({}));
    chat.run("--chat --system y", "hello\n")
        .fails(2, "--system needs a chat template", "");
    let two = chat.scratch.tokens("two.json", &[vec![5], vec![6]]);
    chat.run(&format!("--tokens {two}"), "")
        .fails(1, "exactly one document", "--chat");
    std::fs::remove_file(format!("{}/tokenizer.json", chat.model)).unwrap();
    chat.run("--chat", "hello\n")
        .fails(1, "tokenizer.json", "--tokens");
}

#[test]
fn an_interrupt_while_waiting_tells_what_was_said() {
    let chat = Chat::new(&[]);
    let arguments = format!(
        "run --chat --json --model {} --max-new 3 --ignore-eos",
        chat.model
    );
    let mut child = start(&arguments);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"hello\n").unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(stderr.any(|line| line.unwrap().starts_with("turn 1: ")));
    send(&child, libc::SIGINT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["turns"].as_array().unwrap().len(), 1);
    assert_eq!(ids_of(&told["ids"]).len(), 3);
    drop(stdin);
}

#[test]
fn commands_in_a_chat() {
    let chat = Chat::new(&[("<|im_start|>", 50), ("<|im_end|>", 51)]);
    chat.template(CHATML);
    let run = |stdin: &str| chat.run("--chat --json --ignore-eos", stdin).ok();
    let fresh = run("and then\nhello\n").json();
    let told = run("/stats\nhello\n/help\n/stats\n/reset\nand then\nhello\n/exit\nnever read\n");
    let stderr = told.stderr.clone();
    let told = told.json();
    // What came after the reset knows nothing of what was before; the document is that of the last conversation.
    let turns = |of: &Value| -> Vec<[Value; 2]> {
        let turns = of["turns"].as_array().unwrap().iter();
        turns
            .map(|turn| ["ids", "prompt_tokens"].map(|key| turn[key].clone()))
            .collect()
    };
    assert_eq!(turns(&told), turns(&fresh));
    assert_eq!(turns(&told).len(), 2);
    for said in [
        "/reset  forget",
        "full: no reply yet",
        "full: 12 tokens",
        "a new conversation",
    ] {
        assert!(stderr.contains(said), "{said}: {stderr}");
    }
    // A slash begins text too.
    for message in ["/etc/hosts and more", "// a comment", "/ 2 is a half", "//"] {
        let path = run(&format!("{message}\n")).json();
        assert_eq!(path["turns"].as_array().unwrap().len(), 1, "{message}");
    }
    for command in ["/hlep", "/quit now"] {
        let unknown = run(&format!("{command}\nhello\n"));
        let word = command.split(' ').next().unwrap();
        let said = format!("unknown command {word}\n/help   show this list\n/stats");
        assert!(unknown.stderr.contains(&said), "{}", unknown.stderr);
        assert_eq!(unknown.json()["turns"].as_array().unwrap().len(), 1, "{command}");
    }
    let reset = run("hello\n/reset\n/stats\nhello\n").stderr;
    assert_eq!(reset.matches("full: no reply yet\n").count(), 1, "{reset}");
}

/// A program whose terminal is ours.
struct Terminal {
    child: Child,
    keys: std::fs::File,
    /// What the terminal shows.
    screen: Arc<Mutex<String>>,
}

impl Terminal {
    fn start(arguments: &str) -> Self {
        let (mut ours, mut theirs) = (0, 0);
        let none = std::ptr::null_mut();
        // SAFETY: both numbers are written; the rest takes defaults.
        let opened = unsafe { libc::openpty(&mut ours, &mut theirs, none, none.cast(), none.cast()) };
        assert_eq!(opened, 0);
        // SAFETY: nothing else owns the two.
        let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let mut command = command(arguments);
        command
            .stdin(theirs.try_clone().unwrap())
            .stderr(theirs)
            .stdout(Stdio::piped());
        // SAFETY: both functions may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    Err(std::io::Error::last_os_error())
                } else {
                    Ok(())
                }
            })
        };
        let child = command.spawn().unwrap();
        drop(command);
        let keys = std::fs::File::from(ours);
        let (mut shown, screen) = (keys.try_clone().unwrap(), Arc::new(Mutex::new(String::new())));
        let writer = screen.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Reading fails when the program is gone.
            while let Ok(n @ 1..) = shown.read(&mut bytes) {
                *writer.lock().unwrap() += &String::from_utf8_lossy(&bytes[..n]);
            }
        });
        Self { child, keys, screen }
    }

    /// Types keys and waits until the screen shows a text.
    fn types(&mut self, keys: &str, until: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        let start = std::time::Instant::now();
        while !self.screen.lock().unwrap().contains(until) {
            let screen = self.screen.lock().unwrap().clone();
            assert!(
                start.elapsed().as_secs() < 60,
                "no {until:?} after {keys:?}: {screen:?}"
            );
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn a_person_edits_lines_and_calls_them_back() {
    let chat = Chat::new(&[("<|im_start|>", 50), ("<|im_end|>", 51)]);
    chat.template(CHATML);
    let run = format!(
        "run --model {} --max-new 4 --chat --json --ignore-eos",
        chat.model
    );
    let mut terminal = Terminal::start(&run);
    terminal.types("", "> ");
    // "helo", a step to the left, "l".
    terminal.types("helo\x1b[Dl\r", "turn 1:");
    terminal.types("\x1b[A\r", "turn 2:");
    terminal.types("/hlep\r", "unknown command /hlep");
    terminal.types("/exit\r", "KV rows read");
    let told = Outcome::from_output(terminal.child.wait_with_output().unwrap());
    let told: Value = serde_json::from_str(&told.stdout).unwrap();
    let asked = chat
        .run("--chat --json --ignore-eos --max-new 4", "hello\nhello\n")
        .json();
    for turn in 0..2 {
        assert_eq!(told["turns"][turn]["ids"], asked["turns"][turn]["ids"], "{turn}");
    }
}

/// Ctrl-C ends a reply and not the chat; at the prompt, it ends the chat.
#[test]
fn a_person_ends_a_reply() {
    let chat = Chat::new(&[("<|im_start|>", 50), ("<|im_end|>", 51)]);
    chat.template(CHATML);
    let run = format!(
        "run --model {} --max-new 1000000 --beyond-context --chat --json --ignore-eos",
        chat.model
    );
    let mut terminal = Terminal::start(&run);
    terminal.types("", "/help for the commands");
    terminal.types("", "> ");
    for turn in ["turn 1:", "turn 2:"] {
        terminal.types("hello\r", "hello");
        // The reply is under way, whether it has begun or not.
        std::thread::sleep(std::time::Duration::from_millis(400));
        terminal.types("\x03", turn);
    }
    terminal.types("\x03", "KV rows read");
    // Lines are broken between words.
    let screen = terminal.screen.lock().unwrap().clone();
    let words: Vec<&str> = screen.split_whitespace().collect();
    assert_eq!(words.join(" ").matches("ended by Ctrl-C").count(), 2, "{screen}");
    let told = Outcome::from_output(terminal.child.wait_with_output().unwrap());
    assert_eq!(told.code, Some(130), "{}", told.stderr);
    let told: Value = serde_json::from_str(&told.stdout).unwrap();
    let turns = told["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 2);
    for turn in turns {
        assert_eq!(turn["stop_reason"], "interrupted");
        let tokens = turn["ids"].as_array().unwrap().len();
        assert!((1..1_000_000).contains(&tokens), "{tokens}");
    }
    // SIGTERM ends the program in the middle of a reply.
    let mut terminal = Terminal::start(&run);
    terminal.types("", "> ");
    terminal.types("hello\r", "hello");
    std::thread::sleep(std::time::Duration::from_millis(400));
    send(&terminal.child, libc::SIGTERM);
    let told = Outcome::from_output(terminal.child.wait_with_output().unwrap());
    assert_eq!(told.code, Some(130));
}

/// A reply that was cut says where.
#[test]
fn a_reply_ends_at_the_models_context() {
    let chat = Chat::new(&[("<|im_start|>", 50), ("<|im_end|>", 51)]);
    chat.template(CHATML);
    let cut = chat.run("--chat --json --ignore-eos --max-new 3", "hello\n").ok();
    assert!(cut.stderr.contains("cut at --max-new"), "{}", cut.stderr);
    assert_eq!(cut.json()["stop_reason"], "length");
    let whole = chat
        .run("--chat --json --ignore-eos --max-new 100000", "hello\n")
        .ok();
    assert!(
        whole.stderr.contains("cut at the model's context"),
        "{}",
        whole.stderr
    );
    let whole = whole.json();
    assert_eq!(whole["stop_reason"], "context");
    let context = {
        let config = std::fs::read_to_string(format!("{}/config.json", chat.model)).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        config["max_position_embeddings"].as_u64().unwrap()
    };
    let tokens = whole["ids"].as_array().unwrap().len() as u64 + whole["prompt_tokens"].as_u64().unwrap();
    // The last token is not fed.
    assert_eq!(tokens, context + 1);
    let beyond = chat.run(
        "--chat --json --ignore-eos --beyond-context --max-new 700",
        "hello\n",
    );
    assert_eq!(beyond.ok().json()["ids"].as_array().unwrap().len(), 700);
}
