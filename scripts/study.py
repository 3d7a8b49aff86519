"""Ask whether calibration pays, on the real model of `make real` and held-out text: against an index that knows nothing of
the model, against one that is fitted to the prompt alone, across domains, and by how much text there is.

    python study.py KVSMITH REAL [--tokens 32768] [--blocks 12] [--block 4096] [--decode 32] [--only A,B]

Everything is measured at the same budgets, those with which the calibrated artifact reads 10 % of the bytes; an index that
is put in the place of another has its size, so that the bytes are equal too. Writes REAL/study/*.json and prints tables in
Markdown. What is there from the same command and the same program is not done again, so a run that was stopped goes on.
All of it takes about four hours on 2 cores.
"""

import argparse
import hashlib
import json
import os
import random
import shlex
import struct
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer

READS = "0.1"
METHODS = ("a2ats", "selfindex", "lfps", "wpq")
HELD_OUT = ("handbook", "python")
SEED = 20262
RESAMPLES = 2000
# The mean magnitude of a standard normal variable: the levels of its quantiser of one bit (Lloyd-Max).
LEVEL = np.sqrt(2 / np.pi)


def run(command, **options):
    done = subprocess.run(list(map(str, command)), check=False, **options)
    if done.returncode:
        sys.exit(f"error: exit code {done.returncode} of {shlex.join(map(str, command))}\nhint: run it alone; this command goes on where it stopped")
    return done


def write(path, data):
    """Give a file its content at once."""
    part = path.with_suffix(".part")
    part.write_bytes(data if isinstance(data, bytes) else data.encode())
    os.replace(part, path)


def read_artifact(path):
    """Return the tensors by name and the manifest."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["kvsmith"])


def artifact_bytes(tensors, manifest):
    """Return the file of tensors and manifest, with its digests, as docs/artifact.md describes it."""
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint32): "U32", np.dtype(np.uint64): "U64", np.dtype(np.uint8): "U8"}
    for section in manifest["sections"].values():
        for name in section["sha256"]:
            section["sha256"][name] = hashlib.sha256(np.ascontiguousarray(tensors[name]).tobytes()).hexdigest()
    manifest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}

    def text(value):
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    digest = hashlib.sha256(text(manifest).encode()).hexdigest()
    sealed = text(manifest | {"manifest_sha256": digest})
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, at = {"__metadata__": {"kvsmith": sealed}}, 0
    for name in order:
        tensor = tensors[name]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    head = text(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in order)


def random_words(tensors, manifest, draw):
    """Replace all codewords by normal ones with the same variance in every channel."""
    for name in ("a2ats.codebook", "wpq.codebook"):
        words = tensors[name].astype(np.float64)
        spread = words.std(axis=-2, keepdims=True)
        tensors[name] = (draw.standard_normal(words.shape) * spread).astype(np.float16)


def without_data(tensors, manifest, draw):
    """Replace wpq by a quantiser that knows nothing but the size of a head's keys: a random rotation and one bit a channel.

    16 groups of 4 channels with the 16 patterns of signs, at the levels of Lloyd and Max for a normal variable: 64 bits,
    as the calibrated one. Needs heads of 64 channels.
    """
    chol, words = tensors["wpq.chol"], tensors["wpq.codebook"].astype(np.float64)
    layers, heads, d, _ = chol.shape
    assert d == 64, "heads of 64 channels"
    # The mean square of a whitened channel, back in the coordinates of the keys.
    size = np.empty((layers, heads))
    for layer in range(layers):
        for head in range(heads):
            back = np.linalg.inv(chol[layer, head].astype(np.float64)).T @ tensors["wpq.rotation"][layer, head]
            _, groups, count, width = words.shape[2:]
            power = (words[layer, head, 0] ** 2).mean(1) + (words[layer, head, 1] ** 2).mean(1)
            channels = power.T.reshape(-1)[:d]
            size[layer, head] = np.sqrt((back**2 @ channels).mean())
    signs = np.array([[1 if p >> i & 1 else -1 for i in range(4)] for p in range(16)])
    rotations = np.linalg.qr(draw.standard_normal((layers, heads, d, d)))[0]
    tensors["wpq.rotation"] = rotations.astype(np.float32)
    tensors["wpq.chol"] = np.broadcast_to(np.eye(d, dtype=np.float32), chol.shape).copy()
    tensors["wpq.mean"] = np.zeros_like(tensors["wpq.mean"])
    patterns = LEVEL * size[:, :, None, None, None, None] * signs
    tensors["wpq.codebook"] = np.broadcast_to(patterns, (layers, heads, 1, 16, 16, 4)).astype(np.float16)
    manifest["sections"]["wpq"] |= {"stages": 1, "groups": 16}


class Study:
    def __init__(self, arguments):
        self.kvsmith, self.real, self.arguments = arguments.kvsmith, arguments.real, arguments
        self.out = arguments.real / "study"
        self.out.mkdir(exist_ok=True)
        with open(self.kvsmith, "rb") as file:
            self.program = hashlib.file_digest(file, "sha256").hexdigest()
        self.tokenizer = Tokenizer.from_file(str(arguments.real / "model" / "tokenizer.json"))
        self.budgets = {}

    def text(self, name):
        """Return a text for calibration."""
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

    def blocks(self, domain):
        """Return the blocks of a held-out text."""
        size, count = self.arguments.block, self.arguments.blocks
        text = (self.real / "text" / f"{domain}-heldout.txt").read_text(encoding="utf-8")
        ids = self.ids(text, size * count)
        return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]

    def made(self, path, recipe):
        """Tell whether a file is the result of this recipe and this program."""
        note = path.with_suffix(".made")
        return path.exists() and note.exists() and note.read_text() == recipe

    def calibrated(self, name, texts, tokens, block=8192):
        """Return the artifact of a number of tokens, in equal parts of some texts."""
        path = self.out / f"{name}.safetensors"
        documents = [self.ids(self.text(text), tokens // len(texts)) for text in texts]
        command = ["calibrate", "--model", self.real / "model", "--tokens", self.tokens(name, documents), "--seq-len", block,
                   "--size", 1024, "--holdout", 0.1, "--no-verdict"]
        recipe = json.dumps([self.program, hashlib.sha256(json.dumps(documents).encode()).hexdigest(), list(map(str, command))])
        if not self.made(path, recipe):
            print(f"calibrating {name}", file=sys.stderr)
            run([self.kvsmith, *command, "-o", path, "--overwrite", "-q"])
            write(path.with_suffix(".made"), recipe)
        return path

    def edited(self, name, base, change):
        """Return the artifact `base` after a change, a function of tensors, manifest and a source of random numbers."""
        path = self.out / f"{name}.safetensors"
        tensors, manifest = read_artifact(base)
        change(tensors, manifest, np.random.default_rng(SEED))
        write(path, artifact_bytes(tensors, manifest))
        return path

    def of_prompt(self, domain, block, ids):
        """Return the artifact of a block's own prompt, which no step that is measured is part of."""
        path = self.out / f"prompt-{domain}-{block}.safetensors"
        prompt = ids[: -self.arguments.decode]
        command = ["calibrate", "--model", self.real / "model", "--tokens", self.tokens(path.stem, [prompt]), "--seq-len",
                   len(prompt), "--size", 1024, "--holdout", 0, "--no-verdict"]
        recipe = json.dumps([self.program, prompt, list(map(str, command))])
        if not self.made(path, recipe):
            run([self.kvsmith, *command, "-o", path, "--overwrite", "-q"])
            write(path.with_suffix(".made"), recipe)
        return path

    def losses(self, name, artifact, domain, methods, blocks=None, flags=()):
        """Return the KL of each block by method, at the budgets of the calibrated artifact."""
        documents = self.blocks(domain) if blocks is None else blocks
        text = self.tokens(f"{name}-{domain}", documents)
        found = {}
        for method in methods:
            path = self.out / f"{name}-{domain}-{method}.json"
            command = ["eval", "--model", self.real / "model", "--artifact", artifact, "--tokens", text, "--max-tokens",
                       10**9, "--seq-len", self.arguments.block, "--decode", self.arguments.decode, "--kv", "bf16", "--methods",
                       method, "--budgets", self.budgets[method], *flags, "--json"]
            recipe = json.dumps([self.program, hashlib.sha256(Path(artifact).read_bytes()).hexdigest(), documents, list(map(str, command))])
            if not self.made(path, recipe):
                print(f"measuring {name}, {domain}, {method}", file=sys.stderr)
                write(path, run([self.kvsmith, *command, "-q"], stdout=subprocess.PIPE).stdout)
                write(path.with_suffix(".made"), recipe)
            row = json.loads(path.read_text())["rows"][0]
            found[method] = (np.array(row["kl_by_block"]), row["bytes_read_fraction"])
        return found

    def find_budgets(self, artifact):
        """Find the budgets with which the calibrated artifact reads 10 % of the bytes."""
        path = self.out / "budgets.json"
        text = self.tokens("budgets", self.blocks(HELD_OUT[0])[:1])
        command = ["eval", "--model", self.real / "model", "--artifact", artifact, "--tokens", text, "--seq-len",
                   self.arguments.block, "--decode", 8, "--kv", "bf16", "--methods", ",".join(METHODS), "--reads", READS, "--json"]
        recipe = json.dumps([self.program, list(map(str, command))])
        if not self.made(path, recipe):
            write(path, run([self.kvsmith, *command, "-q"], stdout=subprocess.PIPE).stdout)
            write(path.with_suffix(".made"), recipe)
        for row in json.loads(path.read_text())["rows"]:
            # What cannot read so little is measured with a small budget.
            self.budgets[row["method"]] = round(row["budget"] or 0.02, 4)


def paired(losses, reference):
    """Return the mean difference of two means over blocks and its 95 % interval, by the bootstrap."""
    draw = np.random.default_rng(SEED)
    difference = losses - reference
    means = difference[draw.integers(len(difference), size=(RESAMPLES, len(difference)))].mean(1)
    return difference.mean(), *np.percentile(means, [2.5, 97.5])


def table(title, rows, reference):
    """Print the mean KL of every row and its difference from the reference; each value is a list of losses by block."""
    print(f"### {title}\n")
    print("| index | KL, nats | less than the calibrated one by (95 %, paired) | read |")
    print("|---|---|---|---|")
    for name, (losses, read) in rows:
        if losses is reference:
            print(f"| {name} | {losses.mean():.4f} | | {100 * read:.1f} % |")
            continue
        mean, low, high = paired(reference, losses)
        print(f"| {name} | {losses.mean():.4f} | {mean:.4f} ({low:.4f} to {high:.4f}) | {100 * read:.1f} % |")
    print()


def pays(study, main, arguments):
    """Beside each calibrated index, others of the same size."""
    edits = {
        "random codewords": ("random", random_words, ("a2ats", "wpq")),
        "no data: random rotation, one bit a channel": ("nodata", without_data, ("wpq",)),
    }
    for domain in HELD_OUT:
        calibrated = study.losses("main", main, domain, METHODS)
        rows = {method: [("calibrated", calibrated[method])] for method in METHODS}
        for what, (name, change, methods) in edits.items():
            other = study.losses(name, study.edited(name, main, change), domain, methods)
            for method in methods:
                rows[method].append((what, other[method]))
        documents = study.blocks(domain)
        own = [study.losses(f"prompt-{i}", study.of_prompt(domain, i, ids), domain, ("a2ats", "wpq"), [ids]) for i, ids in enumerate(documents)]
        for method in ("a2ats", "wpq"):
            losses = np.concatenate([of[method][0] for of in own])
            rows[method].append(("fitted to the prompt", (losses, np.mean([of[method][1] for of in own]))))
        one_pass = study.losses("onepass", main, domain, ("selfindex",), flags=("--sign-centroids", "one-pass"))
        rows["selfindex"].append(("centroids of the prompt alone (the paper)", one_pass["selfindex"]))
        off = study.losses("noprior", main, domain, ("lfps",), flags=("--lfps-prior", "0"))
        rows["lfps"].append(("no priors (the paper)", off["lfps"]))
        for method in METHODS:
            table(f"`{method}`, {domain}: {len(documents)} blocks", rows[method], calibrated[method][0])


def domains(study, main, arguments):
    """Calibrated on one kind of text, measured on another."""
    artifacts = [("handbook and Python", main)]
    artifacts += [(name, study.calibrated(f"of-{name}", [name], arguments.tokens)) for name in ("handbook", "python", "bible", "uuid")]
    across(study, "domains", artifacts)


def lengths(study, main, arguments):
    """Calibrated on less or more text, and on shorter blocks."""
    artifacts = [(f"{arguments.tokens} tokens", main)]
    artifacts += [(f"{n} tokens", study.calibrated(f"tokens-{n}", HELD_OUT, n)) for n in (8192, 131072)]
    artifacts.append((f"{arguments.tokens} tokens in blocks of 2048", study.calibrated("blocks-2048", HELD_OUT, arguments.tokens, 2048)))
    across(study, "lengths", artifacts)


def across(study, title, artifacts):
    for domain in HELD_OUT:
        found = [(name, study.losses(path.stem, path, domain, METHODS)) for name, path in artifacts]
        for method in METHODS:
            rows = [(name, of[method]) for name, of in found]
            table(f"{title}: `{method}` on {domain}", rows, rows[0][1][0])


PARTS = {"pays": pays, "domains": domains, "lengths": lengths}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path)
    parser.add_argument("real", type=Path)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of calibration")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each held-out text")
    parser.add_argument("--block", type=int, default=4096, help="tokens of a block")
    parser.add_argument("--decode", type=int, default=32, help="steps of each block")
    parser.add_argument("--only", default=",".join(PARTS), help="the parts to run")
    arguments = parser.parse_args()
    study = Study(arguments)
    base = study.calibrated("main", HELD_OUT, arguments.tokens)
    study.find_budgets(base)
    print("Budgets: " + ", ".join(f"`{method}` {budget}" for method, budget in study.budgets.items()) + "\n")
    for part in arguments.only.split(","):
        PARTS[part](study, base, arguments)


if __name__ == "__main__":
    main()
