//! Chat templates that ask for endless work, memory or nesting: each ends soon, with an error or with a result, and
//! takes little memory.

mod common;

use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use common::*;
use kvsmith::internal::model::chat::{ChatTemplate, Message};
use serde_json::{Value, json};

/// A model with a tokenizer of characters.
fn model(scratch: &Scratch) -> String {
    let model = scratch.model("model", "llama_default");
    scratch.write("model/tokenizer.json", tokenizer(Value::Null));
    model
}

/// What a run with a template left behind, how long it took, and the most memory that it and its processes had.
struct Ended {
    outcome: Outcome,
    took: Duration,
    peak_mib: i64,
}

#[allow(clippy::zombie_processes, reason = "wait4 waits for it")]
fn run(template: &str, stop: Option<i32>) -> Ended {
    let scratch = Scratch::new();
    let model = model(&scratch);
    let config = json!({ "chat_template": template }).to_string();
    scratch.write("model/tokenizer_config.json", config);
    let start_time = Instant::now();
    let mut child = start(&format!("run --chat --json --model {model} --max-new 1"));
    // A program that fails early reads nothing.
    let _ = child.stdin.take().unwrap().write_all(b"hello\n");
    if let Some(signal) = stop {
        std::thread::sleep(Duration::from_millis(500));
        send(&child, signal);
    }
    let (mut stdout, mut stderr) = (String::new(), String::new());
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    let (mut status, mut usage) = (0, no_usage());
    // SAFETY: the child has not been waited for; both are plain data that the call fills.
    let waited = unsafe { libc::wait4(child.id() as i32, &mut status, 0, &mut usage) };
    assert_eq!(waited, child.id() as i32);
    Ended {
        outcome: Outcome {
            code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
            stdout,
            stderr,
        },
        took: start_time.elapsed(),
        peak_mib: usage.ru_maxrss >> 10,
    }
}

fn no_usage() -> libc::rusage {
    // SAFETY: a plain struct of numbers.
    unsafe { std::mem::zeroed() }
}

/// A template that sets `ns.x` and repeats a tag many times.
fn repeated(start: &str, times: usize, tag: &str) -> String {
    format!(
        "{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}{tag}{{% endfor %}}{{{{ ns.x | length }}}}"
    )
}

/// In [`cases`], the error of a template that exceeds a limit: which one is reached first depends on the machine.
const LIMIT: &str = "a limit";

/// Templates with what their errors say; an empty text where a result is fine, too.
fn cases() -> Vec<(String, &'static str)> {
    let own = |print: &str| format!("{{% set ns = namespace() %}}{{% set ns.x = ns %}}{print}");
    let text = |case: &str| case.to_string();
    vec![
        // Values that hold themselves.
        (own("{{ ns | tojson }}"), LIMIT),
        (own("{{ ns | tojson(indent=2, sort_keys=true) }}"), LIMIT),
        (own("{{ ns }}"), "exceeds the limit"),
        (own("{{ ns | pprint }}"), LIMIT),
        (own("{{ ns | upper }}"), LIMIT),
        (
            own("{% set ms = namespace() %}{% set ms.x = ms %}{{ ns == ms }}"),
            "",
        ),
        (own("{{ {ns: 1} }}{{ [ns, ns] | unique | list | length }}"), ""),
        // Values that double.
        (repeated("'x'", 60, "{% set ns.x = ns.x ~ ns.x %}"), LIMIT),
        (repeated("'x'", 60, "{% set ns.x = ns.x + ns.x %}"), LIMIT),
        (repeated("'x'", 60, "{% set ns.x = [ns.x, ns.x] | join %}"), LIMIT),
        (
            repeated("'x'", 60, "{% set ns.x = ns.x | replace('x', 'xx') %}"),
            LIMIT,
        ),
        (
            repeated("'x'", 60, "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
            LIMIT,
        ),
        (
            repeated("[1]", 60, "{% set ns.x = (ns.x + ns.x) | list %}"),
            LIMIT,
        ),
        (
            repeated("[1]", 60, "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x | tojson }}",
            "",
        ),
        (
            "{% set x = 'x' %}".to_string() + &"{% set x = x ~ x %}".repeat(60),
            LIMIT,
        ),
        // Sizes in arguments.
        (text("{{ 'a\nb' | indent(10**9) }}"), LIMIT),
        (text("{{ '%1000000000d' | format(1) }}"), LIMIT),
        (text("{{ '{:1000000000}'.format(1) }}"), LIMIT),
        (text("{{ '%.1000000000f' | format(1.5) }}"), LIMIT),
        (text("{{ [1] | batch(10**9, 0) | length }}"), LIMIT),
        (text("{{ [1] | slice(10**9, 0) | length }}"), LIMIT),
        (text("{{ range(100000) | join('x' * 100000) | length }}"), LIMIT),
        (
            text("{{ ('x' * 10000000) | replace('', 'y' * 1000) | length }}"),
            LIMIT,
        ),
        (text("{{ ('x' * 90000000).split('') | length }}"), LIMIT),
        (text("{{ ('x' * 90000000) | list | length }}"), LIMIT),
        (text("{{ 'x' * 10**12 }}"), "too large"),
        (text("{{ strftime_now('%2000000000Y') }}"), ""),
        // Few instructions with much work.
        (
            text(
                "{% set x = 'x' * 20000000 %}{% for i in range(90000) %}{% set y = x | upper %}{% endfor %}",
            ),
            LIMIT,
        ),
        (
            text(
                "{% set x = range(99999) | list %}{{ x | select('in', x | reverse | list) | list | length }}",
            ),
            LIMIT,
        ),
        (
            text("{% for i in range(90000) %}{% set y = range(99999) | sum %}{% endfor %}"),
            LIMIT,
        ),
        (
            text(
                "{% set x = 'x' * 90000000 %}{% for i in range(90000) %}{% if x == x ~ 'y' %}{% endif %}{% endfor %}",
            ),
            "",
        ),
        // Calls that never return, and nesting.
        (text("{% block a %}{{ self.a() }}{% endblock %}"), ""),
        (
            text("{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('x' * 1000) }}"),
            "",
        ),
        (
            text("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"),
            "",
        ),
        (format!("{{{{ 'x'{} }}}}", "|upper".repeat(20_000)), ""),
        (format!("{{{{ x{} }}}}", ".a".repeat(60_000)), "undefined"),
        (
            format!("{}{}", "{% if 1 %}".repeat(5000), "{% endif %}".repeat(5000)),
            "recursion",
        ),
        (
            format!(
                "{}{}",
                "{% for x in y %}".repeat(4000),
                "{% endfor %}".repeat(4000)
            ),
            "recursion",
        ),
        // What the engine panics over, and a tag that ends within its first mark.
        (text("{{ 3 is divisibleby(0) }}"), "its library crashed"),
        (text("{%}}{{ 'a' }}%}"), "syntax error"),
        // Errors are text, too.
        (text("{{ raise_exception('x' * 1000000) }}"), "xxxx"),
    ]
}

#[test]
fn hostile_templates_end_soon() {
    let check = |(template, culprit): &(String, &str)| {
        let shown: String = template.chars().take(100).collect();
        let ended = run(template, None);
        let outcome = ended.outcome;
        assert!(ended.took < Duration::from_secs(10), "{:?}: {shown}", ended.took);
        assert!(ended.peak_mib < 640, "{} MiB: {shown}", ended.peak_mib);
        if culprit.is_empty() && outcome.code == Some(0) {
            return;
        }
        outcome.fails(1, "the chat template cannot be used: ", "omit --chat");
        let limits = [
            "more than 256 MB of memory or is nested too deeply",
            "does not finish",
        ];
        let said = |text: &str| outcome.stderr.contains(text);
        let expected = match *culprit {
            LIMIT => limits.into_iter().any(said),
            _ => said(culprit),
        };
        assert!(expected, "{shown}: {}", outcome.stderr);
        assert!(outcome.stderr.len() < 3000, "{shown}");
    };
    let cases = cases();
    std::thread::scope(|scope| {
        for half in cases.chunks(cases.len().div_ceil(2)) {
            scope.spawn(move || half.iter().for_each(check));
        }
    });
}

#[test]
fn one_signal_stops_a_template() {
    let template =
        "{% set x = 'x' * 50000000 %}{% for i in range(90000) %}{% set y = x | upper %}{% endfor %}";
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let ended = run(template, Some(signal));
        assert_eq!(
            ended.outcome.code,
            Some(130),
            "{:?}: {}",
            ended.took,
            ended.outcome.stderr
        );
        assert!(
            ended.outcome.stderr.contains("interrupted"),
            "{}",
            ended.outcome.stderr
        );
    }
}

/// A process of templates has the memory of its parent, and several may be at work: none waits for another.
#[test]
fn templates_of_several_threads() {
    let folder = |template: &str| {
        let scratch = Scratch::new();
        scratch.write("chat_template.jinja", template);
        let opened = ChatTemplate::open(Path::new(&scratch.path("")));
        opened.unwrap().unwrap()
    };
    let endless = folder("{% for i in range(90000) %}{% set y = range(99999) | sum %}{% endfor %}");
    let plain = folder("{{ messages[0].content }}");
    let messages = [Message {
        role: "user".into(),
        content: "hello".repeat(100_000),
    }];
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| endless.render(&messages, true));
        let quick = (0..4).map(|_| {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(plain.render(&messages, true).unwrap(), messages[0].content);
                }
            })
        });
        let quick: Vec<_> = quick.collect();
        quick.into_iter().for_each(|thread| thread.join().unwrap());
        let error = slow.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("does not finish"), "{error}");
    });
}
