//! The examples in the help of the commands.

/// The name of a command, and lines that can be typed.
pub const EXAMPLES: [(&str, &[&str]); 15] = [
    (
        "plan",
        &[
            "kvsmith plan --model Qwen/Qwen3-0.6B",
            "kvsmith plan --model Qwen/Qwen3-0.6B --text corpus.jsonl --max-tokens 128K",
        ],
    ),
    (
        "calibrate",
        &[
            "kvsmith calibrate --model Qwen/Qwen3-0.6B --text corpus.jsonl -o art.safetensors",
            "kvsmith calibrate --model Qwen/Qwen3-0.6B --text docs/ --work work --resume -o art.safetensors",
            "kvsmith calibrate --model Qwen/Qwen3-0.6B --text corpus.jsonl --sections wpq,sign -o art.safetensors",
        ],
    ),
    (
        "inspect",
        &[
            "kvsmith inspect art.safetensors",
            "kvsmith inspect art.safetensors --layer 3 --head 0",
        ],
    ),
    (
        "report",
        &["kvsmith report art.safetensors --eval eval.json -o report.html"],
    ),
    (
        "run",
        &[
            "kvsmith run --model Qwen/Qwen3-0.6B --artifact art.safetensors --chat",
            "kvsmith run --model Qwen/Qwen3-0.6B --artifact art.safetensors --method wpq --budget 6% --prompt-file long.txt",
            "kvsmith run --model Qwen/Qwen3-0.6B --artifact art.safetensors --batch prompts.jsonl -o replies.jsonl",
        ],
    ),
    (
        "eval",
        &[
            "kvsmith eval --model Qwen/Qwen3-0.6B --artifact art.safetensors --text heldout.txt --reads 5%,10%",
            "kvsmith eval --model Qwen/Qwen3-0.6B --artifact art.safetensors --needles questions.jsonl --reads 10%",
        ],
    ),
    (
        "verdict",
        &[
            "kvsmith verdict art.safetensors --model Qwen/Qwen3-0.6B --text corpus.jsonl --verdict-reads 5%,30% -o art2.safetensors",
        ],
    ),
    (
        "tune",
        &[
            "kvsmith tune art.safetensors --model Qwen/Qwen3-0.6B --text corpus.jsonl --limit bytes=5% -o plan.json",
            "kvsmith tune --from plan.json --limit kl=0.01 -o plan2.json",
        ],
    ),
    (
        "dump",
        &["kvsmith dump --model Qwen/Qwen3-0.6B --text corpus.jsonl --queries --values -o dump"],
    ),
    (
        "codebook",
        &["kvsmith codebook --dump dump --size 1024 -o a2ats.safetensors"],
    ),
    ("wpq", &["kvsmith wpq --dump dump -o wpq.safetensors"]),
    (
        "pack",
        &["kvsmith pack a2ats.safetensors wpq.safetensors --model Qwen/Qwen3-0.6B -o art.safetensors"],
    ),
    ("status", &["kvsmith status work"]),
    ("gpu-check", &["kvsmith gpu-check"]),
    (
        "man",
        &["kvsmith man | man -l -", "kvsmith man calibrate | man -l -"],
    ),
];

/// Returns the examples of a command as the end of its help.
pub fn for_command(command: &str) -> Option<String> {
    let (_, lines) = EXAMPLES.iter().find(|(name, _)| *name == command)?;
    let lines: Vec<String> = lines.iter().map(|line| format!("  {line}")).collect();
    Some(format!("Examples:\n{}", lines.join("\n")))
}
