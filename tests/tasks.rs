//! What `scripts/tasks.py` writes, on the bundled text and without a tokenizer.

use std::collections::HashSet;

use crate::common::{Scratch, json_lines, make_tasks, number, root};
use serde_json::Value;

#[test]
#[ignore = "needs Python; `make test` finds one and runs this test"]
fn tasks_depend_on_the_seed_alone_and_hold_their_answers() {
    let scratch = Scratch::new();
    let make = |name: &str, seed: u32| {
        let arguments = format!("--lengths 1024,2048 --per-task 3 --seed {seed}");
        make_tasks(
            &scratch.path(name),
            &root().join("calib-data/text.txt"),
            &arguments,
        )
    };
    let text = make("a.jsonl", 7);
    assert!(text == make("b.jsonl", 7), "the same seed gives other bytes");
    let prompts = |text: &str| {
        let lines = json_lines(text).into_iter();
        lines
            .map(|line| first_turn(&line)["prompt"].to_string())
            .collect::<HashSet<String>>()
    };
    let seven = prompts(&text);
    assert_eq!(seven.len(), 6 * 2 * 3, "every line has a prompt of its own");
    assert!(seven.is_disjoint(&prompts(&make("c.jsonl", 8))));

    for line in json_lines(&text) {
        if line["task"] == "turns" {
            check_turns(&line, 8);
            continue;
        }
        let [task, prompt, question] = ["task", "prompt", "question"].map(|key| line[key].as_str().unwrap());
        let answers: Vec<&str> = match (line["answer"].as_str(), line["answers"].as_array()) {
            (Some(answer), None) => vec![answer],
            (None, Some(answers)) => answers.iter().map(|a| a.as_str().unwrap()).collect(),
            _ => panic!("{task} needs either `answer` or `answers`"),
        };
        for (i, answer) in answers.iter().enumerate() {
            let expected = match task {
                "words" => 30,
                // All variables but the last are named twice.
                "tracking" if i + 1 < answers.len() => 2,
                _ => 1,
            };
            assert!(!question.contains(answer.trim()), "{task}: {question}{answer}");
            assert_eq!(
                prompt.matches(answer.trim()).count(),
                expected,
                "{task}: {answer}"
            );
        }
        if ["single", "multikey"].contains(&task) {
            let sentence = format!("{}{}.", question.trim(), answers[0]);
            assert!(prompt.contains(&sentence), "{task}: no sentence `{sentence}`");
        }
        check_length(&line, &format!("{prompt}{question}"));
    }
    let text = make_tasks(
        &scratch.path("some.jsonl"),
        &root().join("calib-data/text.txt"),
        "--tasks turns --asked 3 --lengths 2048 --per-task 3",
    );
    let lines = json_lines(&text).into_iter();
    assert_eq!(lines.inspect(|line| check_turns(line, 3)).count(), 3);
}

/// Returns the line itself, or the first of its turns.
fn first_turn(line: &Value) -> &Value {
    line["turns"].get(0).unwrap_or(line)
}

/// Checks that a line hides eight facts in one text and asks for some of them, each another one.
fn check_turns(line: &Value, questions: usize) {
    let turns = line["turns"].as_array().unwrap();
    assert_eq!(turns.len(), questions);
    let text = |turn: &Value, key: &str| turn[key].as_str().unwrap().to_owned();
    let haystack = text(&turns[0], "prompt");
    assert_eq!(haystack.matches("The secret code of").count(), 8, "facts");
    let mut whole = String::new();
    let mut asked = HashSet::new();
    for turn in turns {
        let [prompt, question, answer] = ["prompt", "question", "answer"].map(|key| text(turn, key));
        let sentence = format!("{}{answer}.", question.trim());
        assert_eq!(haystack.matches(&sentence).count(), 1, "{sentence}");
        whole += &format!("{prompt}{question}{answer}");
        asked.insert(question);
    }
    assert_eq!(asked.len(), questions, "every question is another one");
    check_length(line, &whole);
}

/// Checks that what is fed has the tokens that the line says, by the script's estimate.
fn check_length(line: &Value, whole: &str) {
    let digits = whole.chars().filter(char::is_ascii_digit).count() as f64;
    let tokens = 1.45 * whole.split_whitespace().count() as f64 + digits;
    let share = (tokens + 40.0) / number(line, "length");
    assert!(
        (0.965..1.01).contains(&share),
        "{}: {share} of the length",
        line["task"]
    );
}
