//! What `scripts/tasks.py` writes, on the bundled text and without a tokenizer.

mod common;

use std::collections::HashSet;

use common::{Scratch, json_lines, make_tasks, number, root};

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
            .map(|line| line["prompt"].to_string())
            .collect::<HashSet<String>>()
    };
    let seven = prompts(&text);
    assert_eq!(seven.len(), 5 * 2 * 3, "every line has a prompt of its own");
    assert!(seven.is_disjoint(&prompts(&make("c.jsonl", 8))));

    for line in json_lines(&text) {
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
        let whole = format!("{prompt}{question}");
        let digits = whole.chars().filter(char::is_ascii_digit).count() as f64;
        let tokens = 1.45 * whole.split_whitespace().count() as f64 + digits;
        let share = (tokens + 40.0) / number(&line, "length");
        assert!((0.965..1.005).contains(&share), "{task}: {share} of the length");
    }
}
