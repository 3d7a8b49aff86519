"""Shared parts of the scripts that measure the real model: commands that run only once, tables and intervals."""

import hashlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

SEED = 20262
RESAMPLES = 2000
HELD_OUT = ("handbook", "python")
# Share of each text in the calibration mixture.
MIXED = {"handbook": 0.4, "python": 0.4, "uuid": 0.2}


def run(command, **options):
    """Run a command; stop the script if it fails."""
    done = subprocess.run(list(map(str, command)), check=False, **options)
    if done.returncode:
        sys.exit(f"error: exit code {done.returncode} of {shlex.join(map(str, command))}\nhint: run it alone; the script continues where it stopped")
    return done


def write(path, data):
    """Write a file atomically."""
    part = path.with_suffix(".part")
    part.write_bytes(data if isinstance(data, bytes) else data.encode())
    os.replace(part, path)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Lab:
    """Runs commands on what `make real` made, and reuses results of the same command, program and inputs."""

    def __init__(self, kvsmith, real):
        self.kvsmith, self.real = Path(kvsmith).absolute(), Path(real)
        self.out = self.real / "lab"
        self.out.mkdir(parents=True, exist_ok=True)
        self.program = digest(kvsmith)
        self.tokenizer = Tokenizer.from_file(str(self.real / "model" / "tokenizer.json"))

    def once(self, path, command, inputs=(), printed=False, folder=None):
        """Make a file with a command that writes or prints it, unless it is up to date; the result depends on the files `inputs`.

        `folder` is what else the command makes; an older one is deleted first.
        """
        note = self.out / f"{path.relative_to(self.out)}.made".replace("/", "-")
        recipe = json.dumps([self.program, list(map(str, command)), [digest(of) for of in inputs]])
        if path.exists() and note.exists() and note.read_text() == recipe:
            return path
        print(f"making {path.name}", file=sys.stderr, flush=True)
        note.unlink(missing_ok=True)
        if folder and folder.exists():
            shutil.rmtree(folder)
        done = run([self.kvsmith, *command, "-q"], stdout=subprocess.PIPE if printed else None)
        if printed:
            write(path, done.stdout)
        write(note, recipe)
        return path

    def eval(self, name, options, inputs, kv="bf16"):
        """Return the document that `eval` prints with these options."""
        options = ["eval", "--model", self.real / "model", "--kv", kv, *options, "--json"]
        path = self.once(self.out / f"{name}.json", options, inputs, printed=True)
        return json.loads(path.read_text(encoding="utf-8"))

    def text(self, name):
        """Return the calibration text of this name."""
        if name == "bible":
            return (Path(__file__).parent.parent / "calib-data" / "text.txt").read_text(encoding="utf-8")
        if name == "uuid":
            draw = random.Random(SEED)
            return " ".join(str(uuid.UUID(int=draw.getrandbits(128))) for _ in range(8000))
        return (self.real / "text" / f"{name}-calib.txt").read_text(encoding="utf-8")

    def ids(self, text, most):
        return self.tokenizer.encode(text[: 16 * most], add_special_tokens=False).ids[:most]

    def tokens(self, name, documents):
        path = self.out / f"{name}.tokens.json"
        write(path, json.dumps(documents))
        return path

    def blocks(self, domain, size, count):
        """Return the first `count` blocks of `size` tokens of a held-out text."""
        text = (self.real / "text" / f"{domain}-heldout.txt").read_text(encoding="utf-8")
        ids = self.ids(text, size * count)
        return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]

    def calibrated(self, name, parts, tokens, options=()):
        """Return the artifact calibrated on `tokens` tokens; `parts` gives the share of each text."""
        documents = [self.ids(self.text(text), int(share * tokens)) for text, share in parts.items()]
        return self.fitted(name, documents, ["--holdout", 0.1, *(options or ["--seq-len", 8192])])

    def fitted(self, name, documents, options):
        """Return the artifact calibrated on these documents, with 1,024 codewords for a2ats."""
        path, text = self.out / f"{name}.safetensors", self.tokens(name, documents)
        command = ["calibrate", "--model", self.real / "model", "--tokens", text, "--max-tokens", 10**9, "--size", 1024,
                   *options, "--no-verdict", "-o", path, "--overwrite"]
        return self.once(path, command, [text])


def paired(losses, reference):
    """Return the mean over blocks of losses - reference, and its 95 % bootstrap interval."""
    draw = np.random.default_rng(SEED)
    difference = np.asarray(losses) - np.asarray(reference)
    means = difference[draw.integers(len(difference), size=(RESAMPLES, len(difference)))].mean(1)
    return difference.mean(), *np.percentile(means, [2.5, 97.5])


def percent(value):
    return "" if value is None else f"{100 * value:.1f} %"


def with_interval(row, key, digits):
    interval = (row.get("intervals") or {}).get(key)
    if row.get(key) is None:
        return ""
    text = f"{row[key]:.{digits}f}"
    return f"{text} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})" if interval else text


def form_of(row, forms):
    """Return the name in `forms` of the flags or of the artifact of a row."""
    return forms.get(row.get("flags")) or forms.get(Path(row.get("artifact", "")).stem)


def table(document, columns, forms=None):
    """Return the rows in Markdown; a row without a budget shows the least that its method reads.

    `forms` names rows by their flags, and rows of other artifacts than the first by the artifact's name.
    """
    lines = ["| bytes | method | budget | read | " + " | ".join(columns) + " |", "|---" * (4 + len(columns)) + "|"]
    rows = sorted(document["rows"], key=lambda row: row["reads_target"])
    for row in rows:
        form = form_of(row, forms or {})
        start = f"| {percent(row['reads_target'])} | `{row['method']}`{f' ({form})' if form else ''} "
        if row["budget"] is None:
            lines.append(f"{start}| | at least {percent(row['reads_sample'])} |" + " |" * len(columns))
            continue
        cells = [of(row) for of in columns.values()]
        lines.append(f"{start}| {row['budget']:.4f} | {percent(row['bytes_read_fraction'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


TEXT_COLUMNS = {
    "KL, nats (95 %)": lambda row: with_interval(row, "kl", 4),
    "median": lambda row: f"{row['kl_median']:.4f}",
    "99th percentile": lambda row: f"{row['kl_p99']:.3f}",
    "equal top-1": lambda row: percent(row["top1_equal"]),
    "perplexity ratio": lambda row: with_interval(row, "perplexity_ratio", 3),
    "recall": lambda row: f"{row['recall']:.3f}",
    "mass": lambda row: f"{row['mass']:.3f}",
    "index bits": lambda row: f"{row['index_bits_per_token']:.0f}",
}
