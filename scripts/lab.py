"""Shared parts of the scripts that measure the real model: texts, artifacts, commands that run only once, intervals."""

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from intervals import SEED

WORKS = ("handbook", "python")
# Share of each text in the calibration mixture.
MIXED = {"handbook": 0.4, "python": 0.4, "uuid": 0.2}
# The commands that fit the sections of an artifact to a dump.
COMMANDS = {"a2ats": "codebook", "sign": "signs", "lfps": "priors", "wpq": "wpq", "rotation": "rotation", "doublesparsity": "doublesparsity", "triattention": "triattention"}
# Tokens at the end of each calibration text that no fit may use: the development text.
DEVELOPMENT = 32_768


def fail(error, hint):
    sys.exit(f"error: {error}\nhint: {hint}")


def run(command, **options):
    """Run a command; stop the script if it fails."""
    done = subprocess.run(list(map(str, command)), check=False, **options)
    if done.returncode:
        fail(f"exit code {done.returncode} of {shlex.join(map(str, command))}", "run it alone; the script continues where it stopped")
    return done


def write(path, data):
    """Write a file atomically."""
    part = path.with_suffix(".part")
    part.write_bytes(data if isinstance(data, bytes) else data.encode())
    os.replace(part, path)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_of(artifact):
    """Return the manifest of an artifact."""
    with open(artifact, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return json.loads(header["__metadata__"]["kvsmith"])


def fitted_tokens(manifest, documents):
    """Return the tokens of each kind of text that the fits of an artifact used.

    `documents` lists the kind and the number of tokens of each document, in order, UUIDs last. What was held out is read
    from the manifest.
    """
    calibration = manifest["calibration"]
    blocks = []
    for kind, tokens in documents:
        size = calibration["seq_len"]
        blocks += [(kind, min(size, tokens - at)) for at in range(0, tokens, size)]
    found = {kind: 0 for kind, _ in documents}
    for kind, tokens in blocks:
        found[kind] += tokens
    if (sum(found.values()), len(blocks)) != (calibration["tokens"], calibration["blocks"]):
        fail(f"an artifact was calibrated on {calibration['tokens']} tokens in {calibration['blocks']} blocks, not on {documents}",
             "delete the folder lab in the folder that `make real` made")
    for block, first, end in calibration["held_out"]:
        found[blocks[block][0]] -= end - first
    # The program's own count, of which files of earlier versions have none.
    own = {kind["kind"]: kind["fitted_tokens"] for kind in calibration.get("kinds", ())}
    if own and sum(own.values()) != sum(found.values()):
        fail(f"an artifact says that it was fitted to {own} tokens, its held-out ranges say {found}", "report this")
    return found


def require_made(manifest, version):
    """Return the device and the version of kvsmith that made an artifact; stop the script unless they are the CPU and this program's version."""
    devices = sorted({section["device"] for section in manifest["sections"].values()})
    if devices != ["cpu"]:
        fail(f"an artifact was fitted on {', '.join(devices)}, and the tables are of the CPU", "add --device cpu")
    if manifest["tool_version"] != version:
        fail(f"an artifact was made by kvsmith {manifest['tool_version']}, and this is {version}", "remove the artifact")
    return {"device": devices[0], "version": version}


def require_fitted(manifest, documents):
    """Return the fitted tokens of each kind of text; stop the script if a kind has none."""
    fitted = fitted_tokens(manifest, documents)
    if missing := [kind for kind, tokens in fitted.items() if tokens == 0]:
        fail(f"an artifact was fitted to no tokens of {', '.join(missing)}: all of them were held out", "take another --seed, or more tokens")
    return fitted


def require_apart(fits, work):
    """Stop the script if an artifact of text of a work was fitted to that work."""
    if wrong := [name for name, fit in fits.items() if work in fit["tokens"]]:
        fail(f"{', '.join(wrong)}: fitted to {work}, which is measured", "report this")


def known_commit(version):
    """Return a version, or stop the script if it does not tell the commit: nobody could say what was measured."""
    if "unknown" in version:
        fail(f"the program does not know its commit: {version}", "build it with `make`, in a git checkout")
    return version


class Lab:
    """Runs commands on what `make real` made, and reuses results of the same command, program and inputs."""

    def __init__(self, kvsmith, real):
        self.kvsmith, self.real = Path(kvsmith).absolute(), Path(real)
        self.out = self.real / "lab"
        self.out.mkdir(parents=True, exist_ok=True)
        self.program = digest(kvsmith)
        self.version = self.commit().partition(",")[0].removeprefix("kvsmith ")
        # Only what measures needs this package; the tests of these scripts do without.
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(self.real / "model" / "tokenizer.json"))
        # What each artifact was fitted to, by its name, and the words in the help of each command.
        self.fits, self.help = {}, {}

    def commit(self):
        """Return what the program says of its version and commit; stop the script if it does not know its commit."""
        printed = subprocess.run([self.kvsmith, "--version"], check=True, capture_output=True, text=True).stdout
        return known_commit(", ".join(printed.splitlines()[:2]))

    def knows(self, words, command="eval"):
        """Tell whether the help of a command has all of these names of methods and flags."""
        if command not in self.help:
            text = subprocess.run([self.kvsmith, *command.split(), "--help"], check=True, capture_output=True, text=True).stdout
            self.help[command] = set(re.findall(r"[\w+-]+", text))
        return self.help[command].issuperset(words)

    def losses_only(self):
        """Return the flag of `eval` that measures losses alone, in half the time; an earlier program does not have it."""
        return ["--losses-only"] if self.knows(["--losses-only"]) else []

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
        """Return the document that `eval` prints with these options; without `kv`, the type of the cache is left to them."""
        options = ["eval", "--model", self.real / "model", *(["--kv", kv] if kv else []), *options, "--json"]
        path = self.once(self.out / f"{name}.json", options, inputs, printed=True)
        return json.loads(path.read_text(encoding="utf-8"))

    # Texts

    def text(self, name):
        """Return the calibration text of this name."""
        if name == "bible":
            return (Path(__file__).parent.parent / "calib-data" / "text.txt").read_text(encoding="utf-8")
        if name == "uuid":
            draw = random.Random(SEED)
            return " ".join(str(uuid.UUID(int=draw.getrandbits(128))) for _ in range(8000))
        return (self.real / "text" / f"{name}-calib.txt").read_text(encoding="utf-8")

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    @cache
    def whole(self, name):
        """Return the tokens of a calibration text."""
        return self.encode(self.text(name))

    def ids(self, text, most):
        return self.encode(text[: 16 * most]).ids[:most]

    def part(self, name, first, most):
        """Return whole words of a calibration text, from the line after token `first` on: at most `most` tokens, of which few are missing.

        Stops the script if they reach into the development text.
        """
        text, whole = self.text(name), self.whole(name)
        usable = len(whole.ids) - (DEVELOPMENT if name in WORKS else 0)
        if first + most > usable:
            fail(f"the calibration text {name} has only {usable} tokens for fits, not {first + most}", "calibrate on fewer tokens")
        start = text.find("\n", whole.offsets[first][0]) + 1 if first else 0
        rest = text[start : start + 16 * most]
        end = self.encode(rest).offsets[most - 1][1]
        # Whole words, so that the part has the tokens that it has within the text.
        end = max(rest.rfind(" ", 0, end), rest.rfind("\n", 0, end))
        return rest[:end]

    def tokens(self, name, documents):
        path = self.out / f"{name}.tokens.json"
        write(path, json.dumps(documents))
        return path

    def blocks(self, work, size, count, part="valid"):
        """Return the first `count` blocks of `size` tokens of the validation or development text of a work."""
        if part == "development":
            ids = self.whole(work).ids[-DEVELOPMENT:]
        else:
            ids = self.ids((self.real / "text" / f"{work}-{part}.txt").read_text(encoding="utf-8"), size * count)
        blocks = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
        return blocks[:count]

    # Artifacts

    def corpus(self, name, parts, tokens, options=("--seq-len", 8192, "--holdout", 0.1), first=0):
        """Return a calibration corpus of `tokens` tokens; `parts` gives the share of each text, UUIDs included.

        The part of each text begins after its token `first`.
        """
        wanted = {text: int(share * tokens) for text, share in parts.items()}
        uuids = wanted.pop("uuid", 0)
        if not wanted:
            # The program adds UUIDs to a text only; UUIDs alone are given as tokens.
            return self.documents(name, [self.ids(self.text("uuid"), uuids)], options, ["uuid"])
        files, layout = [], []
        for text, most in wanted.items():
            words, path = self.part(text, first, most), self.out / f"{name}.{text}.txt"
            write(path, words)
            files.append(path)
            # With the special tokens that the program adds.
            layout.append((text, len(self.tokenizer.encode(words).ids)))
        layout += [("uuid", uuids)] if uuids else []
        return Corpus(name, ["--text", *files, "--uuid-tokens", uuids, *options], files, layout)

    def documents(self, name, documents, options, kinds=None):
        """Return a calibration corpus of documents given as tokens."""
        file = self.tokens(name, documents)
        layout = list(zip(kinds or ["text"] * len(documents), map(len, documents)))
        return Corpus(name, ["--tokens", file, *options], [file], layout)

    def calibrated(self, corpus, size=1024, options=(), sections=()):
        """Return the artifact calibrated on a corpus, with `size` codewords for a2ats, with some sections or with all."""
        path = self.out / f"{corpus.name}.safetensors"
        # Some sections are made on request only.
        chosen = ["--sections", ",".join(sections)] if sections else ["--peers"]
        command = ["calibrate", "--model", self.real / "model", *corpus.source, "--max-tokens", "all", "--size", size,
                   *chosen, *options, "--no-verdict", "-o", path, "--overwrite"]
        return self.checked(corpus, self.once(path, command, corpus.inputs))

    def packed(self, corpus, sections, size=1024):
        """Return the same artifact as `calibrated`, fitted to the dump of a corpus: the text is captured once, also for other forms of its sections."""
        path = self.out / f"{corpus.name}.safetensors"
        parts = [self.section(corpus, f"{corpus.name}-{section}", COMMANDS[section], ("--size", size) if section == "a2ats" else ()) for section in sections]
        return self.checked(corpus, self.once(path, ["pack", *parts, "--model", self.real / "model", "-o", path, "--overwrite"], parts))

    def checked(self, corpus, path):
        """Record what an artifact was fitted to; stop the script if the fits used no tokens of one of the kinds of text. Returns the artifact."""
        manifest = manifest_of(path)
        block = manifest["calibration"]["seq_len"]
        fitted = require_fitted(manifest, corpus.layout)
        self.fits[corpus.name] = {"tokens": dict(corpus.layout), "fitted": fitted, "block": block} | require_made(manifest, self.version)
        return path

    def dump(self, corpus, name="dump", options=("--dtype", "f32", "--queries", "--values")):
        """Capture a corpus: by default with the precision that `calibrate` fits to, so that sections fitted to the dump equal its sections."""
        dump = self.out / f"{corpus.name}-{name}"
        command = ["dump", "--model", self.real / "model", *corpus.source, "--max-tokens", "all", *options, "-o", dump]
        self.once(dump / "manifest.json", command, corpus.inputs, folder=dump)
        return dump

    def section(self, corpus, name, command, options):
        """Fit a section to a dump of a corpus."""
        dump, path = self.dump(corpus), self.out / f"{name}.safetensors"
        return self.once(path, [command, "--dump", dump, *options, "-o", path, "--overwrite"], [dump / "manifest.json"])


@dataclass
class Corpus:
    """What an artifact is calibrated on: the flags and files that say so, and the kind and tokens of each document."""

    name: str
    source: list
    inputs: list
    layout: list
