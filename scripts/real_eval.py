"""Measure every method on the real model of `make real`, at equal bytes read, on held-out text and tasks.

    python real_eval.py KVSMITH REAL [--reads 0.05,0.1,0.2] [--methods A,B] [--texts A,B] [--blocks 24] [--block 3072]
        [--decode 32] [--drift 512] [--lengths N,M] [--tasks A,B] [--per-task 4] [--calibration 65536]
        [--uuid-tokens 8192]

REAL is the folder that `make real` made. The script calibrates on its calibration texts, then evaluates on each held-out
text, by generated position, and on tasks of three lengths. It prints tables in Markdown and writes REAL/eval/NAME.json: the
document of `kvsmith eval --json`, with the command that made it. It reuses every result that the same program made with the
same command, so a stopped run continues.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from lab import TEXT_COLUMNS, digest, percent, run, table, with_interval, write

METHODS = "topk,wpq,wpq+tail,a2ats,selfindex,lfps,ctkvr,quest,snapkv,h2o,streaming"
TEXTS = ("handbook", "python", "uuid")
LENGTHS = (2048, 4096, 8192)
TASKS = "single,multikey,multivalue,tracking,words,turns"
# Nothing was fitted to the reported texts and tasks, or with this seed.
SEED = 20261
# The shortest text has 73K tokens, and intervals need 20 blocks.
BLOCK = 3072
CALIBRATION = 65_536
UUIDS = 8_192
# Blocks of the table by position: fewer blocks have no intervals.
DRIFT_BLOCKS = 20


class Study:
    def __init__(self, arguments):
        self.kvsmith = arguments.kvsmith
        self.real = arguments.real
        self.out = arguments.real / "eval"
        self.out.mkdir(exist_ok=True)
        self.program = digest(self.kvsmith)
        self.methods = arguments.methods
        self.reads = arguments.reads
        self.asked = ["--tasks", arguments.tasks, "--per-task", str(arguments.per_task)]
        self.calibration = ["--max-tokens", str(arguments.calibration), "--uuid-tokens", str(arguments.uuid_tokens)]

    def calibrated(self):
        """Return the artifact; make it unless this program already did."""
        artifact, made_by = self.out / "artifact.safetensors", self.out / "artifact.json"
        texts = [str(self.real / "text" / f"{name}-calib.txt") for name in TEXTS[:2]]
        command = ["calibrate", "--model", str(self.real / "model"), "--text", *texts, *self.calibration, "--seq-len", "8192", "--no-verdict"]
        recipe = json.dumps({"program": self.program, "command": command})
        if not (artifact.exists() and made_by.exists() and made_by.read_text() == recipe):
            # kvsmith refuses a work folder of another program or command, and says what to delete.
            work = ["--work", str(self.out / "work"), "--resume", "--overwrite", "-o", str(artifact)]
            run([self.kvsmith, *command, *work])
            write(made_by, recipe)
        return artifact

    def tasks(self, length):
        """Return a file of tasks of one length, because budgets are searched for per length."""
        of = hashlib.sha256(" ".join(self.asked).encode()).hexdigest()[:8]
        path = self.out / f"tasks-{length}-{of}.jsonl"
        if not path.exists():
            text = self.real / "text" / "handbook-heldout.txt"
            script = Path(__file__).with_name("tasks.py")
            part = path.with_suffix(".part")
            run([sys.executable, script, "--haystack", text, "--lengths", str(length), *self.asked, "--seed", str(SEED),
                 "--tokenizer", self.real / "model" / "tokenizer.json", "-o", part])
            os.replace(part, path)
        return path

    def evaluate(self, name, options, reads=None):
        """Return the document that `eval` prints with these options."""
        artifact = self.calibrated()
        asked = ["--methods", self.methods, "--reads", reads or self.reads, "--kv", "bf16", "--json"]
        command = ["eval", "--model", str(self.real / "model"), "--artifact", str(artifact), *asked, *options]
        path = self.out / f"{name}.json"
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["program"] == self.program and known["options"] == command:
                return known
        print(f"measuring {name}", file=sys.stderr)
        document = json.loads(run([self.kvsmith, *command], stdout=subprocess.PIPE).stdout)
        document |= {"program": self.program, "options": command}
        write(path, json.dumps(document, indent=1) + "\n")
        return document


def drift(document):
    """Print the mean KL by the place of the step in its block."""
    rows = [row for row in document["rows"] if row["budget"] is not None]
    spans = [f"steps {span['first']} to {span['last']}" for span in rows[0]["by_position"]]
    print("| method | budget | read | " + " | ".join(spans) + " |")
    print("|---" * (3 + len(spans)) + "|")
    for row in rows:
        cells = [f"{span['kl']:.4f}" for span in row["by_position"]]
        print(f"| `{row['method']}` | {row['budget']:.4f} | {percent(row['bytes_read_fraction'])} | " + " | ".join(cells) + " |")
    print()


def task_columns(document):
    def score(task):
        return lambda row: next(f"{of['accuracy']:.2f}" for of in row["by_task"] if of["task"] == task)

    tasks = {task["task"]: score(task["task"]) for task in document["full_by_task"]}
    return {"all (95 %)": lambda row: with_interval(row, "needle_accuracy", 2)} | tasks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("--reads", default="0.05,0.1,0.2", help="shares of the bytes that a step may read")
    parser.add_argument("--methods", default=METHODS, help="methods to evaluate")
    parser.add_argument("--texts", default=",".join(TEXTS), help="held-out texts to evaluate on; empty = none")
    parser.add_argument("--blocks", type=int, default=24, help="maximum number of blocks per text")
    parser.add_argument("--block", type=int, default=BLOCK, help="tokens per block")
    parser.add_argument("--calibration", type=int, default=CALIBRATION, help="tokens of text to calibrate on")
    parser.add_argument("--uuid-tokens", type=int, default=UUIDS, help="tokens of random UUIDs to calibrate on")
    parser.add_argument("--decode", type=int, default=32, help="decode steps per block")
    parser.add_argument("--drift", type=int, default=512, help="decode steps per block for the table by position; 0 = no such table")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="lengths of the tasks, in tokens; empty = no tasks")
    parser.add_argument("--tasks", default=TASKS, help="tasks to make and evaluate on")
    parser.add_argument("--per-task", type=int, default=4, help="lines per task and length")
    arguments = parser.parse_args()
    study = Study(arguments)
    for name in filter(None, arguments.texts.split(",")):
        tokens = ["--seq-len", str(arguments.block), "--max-tokens", str(arguments.block * arguments.blocks), "--decode", str(arguments.decode)]
        document = study.evaluate(name, ["--text", str(study.real / "text" / f"{name}-heldout.txt"), *tokens])
        print(f"## {name}: {document['blocks']} blocks of {arguments.block} tokens, {document['steps']} steps\n")
        print(table(document, TEXT_COLUMNS))
    if arguments.drift:
        tokens = ["--seq-len", str(arguments.block), "--max-tokens", str(arguments.block * min(arguments.blocks, DRIFT_BLOCKS))]
        text = ["--text", str(study.real / "text" / "handbook-heldout.txt")]
        document = study.evaluate("drift", [*text, *tokens, "--decode", str(arguments.drift)], "0.1")
        print(f"## Mean KL by generated position: {document['blocks']} blocks of {arguments.block} tokens\n")
        drift(document)
    for length in map(int, filter(None, arguments.lengths.split(","))):
        document = study.evaluate(f"tasks-{length}", ["--needles", str(study.tasks(length))])
        full = ", ".join(f"{task['task']} {task['accuracy']:.2f}" for task in document["full_by_task"])
        print(f"## Tasks of {length} tokens\n\nFull attention: {document['full_needle_accuracy']:.2f} ({full}).\n")
        print(table(document, task_columns(document)))


if __name__ == "__main__":
    main()
