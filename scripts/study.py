"""Measure on the real model and held-out text whether calibration pays.

Compares calibrated indexes with indexes that know nothing of the model and with indexes fitted to the prompt alone.
Also measures calibration on other kinds of text, and on less or more text.

    python study.py KVSMITH REAL [--tokens 40960] [--most 131072] [--blocks 20] [--block 3072] [--decode 24]
        [--domains A,B] [--only A,B]

REAL is the folder that `make real` made. All measurements use the budgets with which the calibrated artifact reads 10 % of the
bytes. An index that replaces another has the same size, so the bytes are equal too. The script writes REAL/lab/*.json and
prints tables in Markdown. It reuses every result that the same program made with the same command, so a stopped run
continues. Everything together takes about five hours on 2 cores.
"""

import argparse
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
from safetensors import safe_open

from lab import HELD_OUT, MIXED, SEED, Lab, paired, write

READS = "0.1"
METHODS = ("a2ats", "selfindex", "lfps", "wpq")
# The mean magnitude of a standard normal variable: the level of its one-bit Lloyd-Max quantiser.
LEVEL = np.sqrt(2 / np.pi)


def read_artifact(path):
    """Return the tensors by name and the manifest."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["kvsmith"])


def artifact_bytes(tensors, manifest):
    """Return the bytes of an artifact with these tensors and this manifest, as docs/artifact.md describes it."""
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
    """Replace all codewords by normal random ones with the same variance in every channel."""
    for name in ("a2ats.codebook", "wpq.codebook"):
        words = tensors[name].astype(np.float64)
        spread = words.std(axis=-2, keepdims=True)
        tensors[name] = (draw.standard_normal(words.shape) * spread).astype(np.float16)


def without_data(tensors, manifest, draw):
    """Replace wpq by a quantiser that knows only the scale of a head's keys: a random rotation and one bit per channel.

    Its 16 groups of 4 channels have the 16 sign patterns as words, at the Lloyd-Max level of a normal variable. It takes
    64 bits per key, like the calibrated quantiser. Needs heads of 64 channels.
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
            size[layer, head] = np.sqrt((back[:, : channels.size] ** 2 @ channels).mean())
    signs = np.array([[1 if p >> i & 1 else -1 for i in range(4)] for p in range(16)])
    rotations = np.linalg.qr(draw.standard_normal((layers, heads, d, d)))[0]
    tensors["wpq.rotation"] = rotations.astype(np.float32)
    tensors["wpq.chol"] = np.broadcast_to(np.eye(d, dtype=np.float32), chol.shape).copy()
    tensors["wpq.mean"] = np.zeros_like(tensors["wpq.mean"])
    patterns = LEVEL * size[:, :, None, None, None, None] * signs
    tensors["wpq.codebook"] = np.broadcast_to(patterns, (layers, heads, 1, 16, 16, 4)).astype(np.float16)
    manifest["sections"]["wpq"] |= {"stages": 1, "groups": 16, "directions": d}


class Study(Lab):
    def __init__(self, arguments):
        super().__init__(arguments.kvsmith, arguments.real)
        self.arguments, self.budgets = arguments, {}

    def held_out(self, domain):
        return self.blocks(domain, self.arguments.block, self.arguments.blocks)

    def edited(self, name, base, change, sections):
        """Return an artifact of some sections of `base`, edited by `change(tensors, manifest, random generator)`."""
        path = self.out / f"{name}.safetensors"
        tensors, manifest = read_artifact(base)
        tensors = {name: tensor for name, tensor in tensors.items() if name.split(".")[0] in sections}
        manifest["sections"] = {name: section for name, section in manifest["sections"].items() if name in sections}
        manifest["quality"] = {name: report for name, report in manifest["quality"].items() if name in sections}
        change(tensors, manifest, np.random.default_rng(SEED))
        write(path, artifact_bytes(tensors, manifest))
        return path

    def of_prompt(self, domain, block, ids):
        """Return the artifact calibrated on a block's own prompt, which excludes the measured steps."""
        prompt = ids[: -self.arguments.decode]
        return self.fitted(f"prompt-{domain}-{block}", [prompt], ["--seq-len", len(prompt), "--holdout", 0])

    def losses(self, name, artifacts, domain, methods, documents=None, flags=(), also=()):
        """Return, by label and method, the KL of each block and the share of the bytes read, at the budgets found.

        `artifacts` gives paths by label. All are measured on the same steps, against one run of full attention. The methods
        with flags in `also` are found under their text.
        """
        documents = self.held_out(domain) if documents is None else documents
        text = self.tokens(f"{name}-{domain}", documents)
        first, *others = artifacts.values()
        against = ["--against", ",".join(map(str, others))] if others else []
        budgets = ",".join(f"{method}={self.budgets[method]}" for method in methods)
        options = ["--artifact", first, *against, "--tokens", text, "--max-tokens", 10**9,
                   "--seq-len", self.arguments.block, "--decode", self.arguments.decode, "--methods",
                   ",".join(methods), "--budgets", budgets, *flags, *(word for one in also for word in ("--also", one))]
        document = self.eval(f"{name}-{domain}", options, [text, *artifacts.values()])
        labels = {str(of): label for label, of in artifacts.items()}
        found = {label: {} for label in artifacts}
        for row in document["rows"]:
            label = labels[row.get("artifact", str(first))]
            name = " ".join((row["method"], row["flags"])) if "flags" in row else row["method"]
            found[label][name] = (np.array(row["kl_by_block"]), row["bytes_read_fraction"])
        return found

    def find_budgets(self, artifact):
        """Find the budgets with which the calibrated artifact reads 10 % of the bytes."""
        text = self.tokens("budgets", self.held_out(HELD_OUT[0])[:1])
        options = ["--artifact", artifact, "--tokens", text, "--seq-len", self.arguments.block,
                   "--decode", 8, "--methods", ",".join(METHODS), "--reads", READS]
        for row in self.eval("budgets", options, [text, artifact])["rows"]:
            # A method that cannot read so little is measured with the default budget of `run`.
            self.budgets[row["method"]] = round(row["budget"] or 0.06, 4)


def table(title, rows, reference):
    """Print the mean KL of every row and how much less than the reference it loses; `reference` holds losses by block."""
    print(f"### {title}\n")
    print("| index | KL, nats | less than the first row by (95 %, paired) | read |")
    print("|---|---|---|---|")
    for name, (losses, read) in rows:
        if losses is reference:
            print(f"| {name} | {losses.mean():.4f} | | {100 * read:.1f} % |")
            continue
        mean, low, high = paired(reference, losses)
        print(f"| {name} | {losses.mean():.4f} | {mean:.4f} ({low:.4f} to {high:.4f}) | {100 * read:.1f} % |")
    print()


def pays(study, main, arguments):
    """Compare each calibrated index with others of the same size."""
    artifacts = {
        "calibrated": main,
        "random codewords": study.edited("random", main, random_words, ("a2ats", "wpq")),
        "no data: random rotation, one bit a channel": study.edited("nodata", main, without_data, ("wpq",)),
    }
    # By default selfindex has the centroids of the paper.
    hybrid, no_prior = "selfindex --sign-centroids hybrid", "lfps --lfps-prior 0"
    for domain in HELD_OUT:
        documents = study.held_out(domain)
        found = study.losses("pays", artifacts, domain, METHODS, also=(hybrid, no_prior))
        ours = found["calibrated"]
        each = [study.of_prompt(domain, i, ids) for i, ids in enumerate(documents)]
        each = [study.losses(f"prompt-{i}", {"": of}, domain, ("a2ats", "wpq"), [ids])[""] for i, (of, ids) in enumerate(zip(each, documents))]
        rows = {method: [("calibrated", ours[hybrid if method == "selfindex" else method])] for method in METHODS}
        for method in ("a2ats", "wpq"):
            rows[method].append(("random codewords", found["random codewords"][method]))
            losses = np.concatenate([of[method][0] for of in each])
            rows[method].append(("fitted to the prompt", (losses, np.mean([of[method][1] for of in each]))))
        without = "no data: random rotation, one bit a channel"
        rows["wpq"].append((without, found[without]["wpq"]))
        rows["selfindex"].append(("centroids of the prompt alone (the paper)", ours["selfindex"]))
        rows["lfps"].append(("no priors (the paper)", ours[no_prior]))
        for method in METHODS:
            table(f"`{method}`, {domain}: {len(documents)} blocks", rows[method], rows[method][0][1][0])


def domains(study, main, arguments):
    """Calibrate on one kind of text, and measure on another."""
    artifacts = {"handbook, Python and UUIDs": main}
    artifacts |= {name: study.calibrated(f"of-{name}", {name: 1}, arguments.tokens) for name in arguments.domains.split(",")}
    across(study, "domains", artifacts)


def lengths(study, main, arguments):
    """Calibrate on less or more text, and on shorter blocks."""
    artifacts = {f"{arguments.tokens} tokens": main}
    artifacts |= {f"{n} tokens": study.calibrated(f"tokens-{n}", MIXED, n) for n in (8192, arguments.most)}
    artifacts[f"{arguments.tokens} tokens in blocks of 2048"] = study.calibrated("blocks-2048", MIXED, arguments.tokens, ["--seq-len", 2048])
    across(study, "lengths", artifacts)


def across(study, title, artifacts):
    """Compare artifacts; selfindex with calibrated centroids, because by default it has those of the prompt alone."""
    for domain in HELD_OUT:
        found = study.losses(title, artifacts, domain, METHODS, flags=("--sign-centroids", "hybrid"))
        first = next(iter(artifacts))
        for method in METHODS:
            rows = [(label, of[method]) for label, of in found.items()]
            table(f"{title}: `{method}` on {domain}", rows, found[first][method][0])


PARTS = {"pays": pays, "domains": domains, "lengths": lengths}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("--tokens", type=int, default=40_960, help="tokens to calibrate on")
    parser.add_argument("--most", type=int, default=131_072, help="tokens of the longest calibration")
    parser.add_argument("--blocks", type=int, default=20, help="maximum number of blocks per held-out text")
    parser.add_argument("--block", type=int, default=3072, help="tokens per block")
    parser.add_argument("--decode", type=int, default=24, help="decode steps per block")
    parser.add_argument("--domains", default="handbook,python,bible,uuid", help="texts to calibrate on one at a time")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    arguments = parser.parse_args()
    study = Study(arguments)
    base = study.calibrated("main", MIXED, arguments.tokens)
    study.find_budgets(base)
    print("Budgets: " + ", ".join(f"`{method}` {budget}" for method, budget in study.budgets.items()) + "\n")
    for part in arguments.only.split(","):
        PARTS[part](study, base, arguments)


if __name__ == "__main__":
    main()
