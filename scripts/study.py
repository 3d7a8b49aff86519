"""Measure on the real model and validation text whether calibration pays.

Compares calibrated indexes with indexes that know nothing of the model and with indexes fitted to the prompt alone.
Also measures calibration on other kinds of text, on less or more text, and in shorter or longer blocks.

    python study.py KVSMITH REAL [--only pays,domains,lengths] [--blocks 20] [--decode 24]

REAL is the folder that `make real` made. All measurements use the budgets with which the calibrated artifact reads 10% of the
bytes, found on development text. An index that replaces another has the same size, so the bytes are equal too. Each part is
written to docs/results/study-PART.json when it ends. The script reuses every result that the same program made with the same
command, so a stopped run continues.
"""

import argparse
from pathlib import Path

import numpy as np

import documents
from artifacts import artifact_bytes, of_sections, read_artifact, read_tensors
from intervals import SEED
from lab import MIXED, WORKS, Lab, write

READS = 0.1
METHODS = ("a2ats", "selfindex", "lfps", "wpq")
# Tokens per measured block, of the calibration, and of the least, usual and most text in the part `lengths`: of each kind a
# whole number of blocks, so that all artifacts of a comparison have blocks of one length.
BLOCK = 3072
TOKENS = 40_960
AMOUNTS = (5 * BLOCK, 15 * BLOCK, 45 * BLOCK)
SINGLE = ("handbook", "python", "bible", "uuid")
# By default selfindex has the centroids of the prompt alone.
OFFLINE, NO_PRIOR = "--sign-centroids offline", "--lfps-prior 0"
# The mean magnitude of a standard normal variable: the level of its one-bit Lloyd-Max quantiser.
LEVEL = np.sqrt(2 / np.pi)


def random_words(tensors, manifest, draw):
    """Replace all codewords by normal random ones with the same variance in every channel."""
    for name in ("a2ats.codebook", "wpq.codebook"):
        words = tensors[name].astype(np.float64)
        spread = words.std(axis=-2, keepdims=True)
        tensors[name] = (draw.standard_normal(words.shape) * spread).astype(np.float16)


def sizes_of_keys(dump, layers):
    """Return the root mean square of a channel of the keys of each layer and KV head; RoPE leaves it as it is."""
    keys = (read_tensors(dump / f"layer-{layer:05d}.safetensors")[0]["k_pre"] for layer in range(layers))
    return np.array([np.sqrt((of.astype(np.float64) ** 2).mean((1, 2))) for of in keys])


def without_data(sizes):
    """Return the change of an artifact that replaces wpq by a quantiser that knows only the size of a head's keys.

    It rotates keys at random and keeps one bit per channel, at the Lloyd-Max level of a normal variable: in each of 8 groups of 8
    channels, the 16 words of the first stage are the signs of four channels, and those of the second the signs of the others.
    It takes 64 bits per key, like the calibrated quantiser. Needs heads of 64 channels.
    """
    def change(tensors, manifest, draw):
        layers, heads, d, _ = tensors["wpq.chol"].shape
        assert d == 64, "heads of 64 channels"
        signs = np.array([[1 if p >> i & 1 else -1 for i in range(4)] for p in range(16)])
        words = np.zeros((2, 16, 8))
        words[0, :, :4], words[1, :, 4:] = signs, signs
        rotations = np.linalg.qr(draw.standard_normal((layers, heads, d, d)))[0]
        tensors["wpq.rotation"] = rotations.astype(np.float32)
        tensors["wpq.chol"] = np.broadcast_to(np.eye(d, dtype=np.float32), (layers, heads, d, d)).copy()
        tensors["wpq.mean"] = np.zeros_like(tensors["wpq.mean"])
        tensors.pop("wpq.mean_pre", None)
        of_head = LEVEL * sizes[:, :, None, None, None] * words
        tensors["wpq.codebook"] = np.broadcast_to(of_head[:, :, :, None], (layers, heads, 2, 8, 16, 8)).astype(np.float16)
        manifest["sections"]["wpq"] |= {"bits": 64, "words": 16, "stages": 2, "groups": 8, "directions": d, "center": "mean"}

    return change


class Study(Lab):
    def __init__(self, arguments):
        super().__init__(arguments.kvsmith, arguments.real)
        self.arguments, self.budgets = arguments, {}
        self.corpus_of_main = self.corpus("main", MIXED, TOKENS)
        self.main = self.calibrated(self.corpus_of_main)

    def valid(self, work):
        return self.blocks(work, BLOCK, self.arguments.blocks // len(WORKS))

    def mixture(self, tokens, block):
        """Return the artifact calibrated on `tokens` tokens of the mixture in blocks of at most `block` tokens."""
        return self.calibrated(self.corpus(f"mixture-{tokens}-{block}", MIXED, tokens, ("--seq-len", block, "--holdout", 0.1)))

    def edited(self, name, base, change, sections):
        """Return an artifact of some sections of `base`, edited by `change(tensors, manifest, random generator)`."""
        path = self.out / f"{name}.safetensors"
        tensors, manifest = of_sections(base, sections)
        change(tensors, manifest, np.random.default_rng(SEED))
        write(path, artifact_bytes(tensors, manifest))
        return path

    def of_prompt(self, work, block, ids):
        """Return the artifact calibrated on a block's own prompt, which excludes the measured steps."""
        prompt = ids[: -self.arguments.decode]
        return self.calibrated(self.documents(f"prompt-{work}-{block}", [prompt], ("--seq-len", len(prompt), "--holdout", 0)))

    def losses(self, name, artifacts, work, methods, blocks=None, flags=(), also=()):
        """Return the rows of methods, one per artifact and flags, at the budgets found.

        `artifacts` gives paths by label. All are measured on the same steps, against one run of full attention.
        """
        text = self.tokens(f"{name}-{work}", self.valid(work) if blocks is None else blocks)
        first, *others = artifacts.values()
        against = ["--against", ",".join(map(str, others))] if others else []
        budgets = ",".join(f"{method}={self.budgets[method]}" for method in methods)
        options = ["--artifact", first, *against, "--tokens", text, "--max-tokens", 10**9, "--seq-len", BLOCK, "--decode", self.arguments.decode, *self.losses_only(),
                   "--methods", ",".join(methods), "--budgets", budgets, *flags, *(word for one in also for word in ("--also", one))]
        document = self.eval(f"study-{name}-{work}", options, [text, *artifacts.values()])
        labels = {str(path): label for label, path in artifacts.items()}
        return [{"work": work, "method": row["method"], "index": labels[row.get("artifact", str(first))], "flags": row.get("flags", ""),
                 **{key: row[key] for key in ("budget", "bytes_read_fraction", "kl", "kl_by_block")}} for row in document["rows"]]

    def find_budgets(self):
        """Find the budgets with which the calibrated artifact reads 10% of the bytes, on development text."""
        text = self.tokens("study-budgets", self.blocks(WORKS[0], BLOCK, 1, "development"))
        options = ["--artifact", self.main, "--tokens", text, "--seq-len", BLOCK, "--decode", 8, "--methods", ",".join(METHODS), "--reads", READS]
        for row in self.eval("study-budgets", options, [text, self.main])["rows"]:
            # A method that cannot read so little is measured with the default budget of `run`.
            self.budgets[row["method"]] = round(row["budget"] or 0.06, 4)


def pays(study):
    """Compare each calibrated index with others of the same size."""
    n_layers = read_artifact(study.main)[0]["wpq.mean"].shape[0]
    sizes = sizes_of_keys(study.dump(study.corpus_of_main), n_layers)
    artifacts = {
        "calibrated": study.main,
        "random codewords": study.edited("random", study.main, random_words, ("a2ats", "wpq")),
        "no data: random rotation, one bit a channel": study.edited("nodata", study.main, without_data(sizes), ("wpq",)),
    }
    also = f"selfindex {OFFLINE}", f"lfps {NO_PRIOR}"
    rows = []
    for work in WORKS:
        for row in study.losses("pays", artifacts, work, METHODS, also=also):
            if row["method"] == "selfindex":
                row["index"] = "calibrated" if row["flags"] else "centroids of the prompt alone (the paper)"
            elif row["flags"]:
                row["index"] = "no priors (the paper)"
            rows.append(row)
        each = [study.losses(f"prompt-{i}", {"fitted to the prompt": study.of_prompt(work, i, ids)}, work, ("a2ats", "wpq"), [ids])
                for i, ids in enumerate(study.valid(work))]
        for of in zip(*each):
            losses = [loss for row in of for loss in row["kl_by_block"]]
            rows.append(of[0] | {"kl_by_block": losses, "kl": np.mean(losses), "bytes_read_fraction": np.mean([row["bytes_read_fraction"] for row in of])})
    return rows


def domains(study):
    """Calibrate on one kind of text, and measure on another."""
    artifacts = {"handbook, Python and UUIDs": study.main}
    artifacts |= {name: study.calibrated(study.corpus(f"only-{name}", {name: 1}, TOKENS)) for name in SINGLE}
    return across(study, "domains", artifacts)


def lengths(study):
    """Calibrate on less or more text in blocks of one length, and on the same amount in shorter and longer blocks."""
    less, usual, more = AMOUNTS
    artifacts = {f"{tokens:,} tokens": study.mixture(tokens, BLOCK) for tokens in (usual, less, more)}
    artifacts |= {f"{usual:,} tokens in blocks of {block:,}": study.mixture(usual, block) for block in (2048, 8192)}
    return across(study, "lengths", artifacts)


def across(study, title, artifacts):
    """Compare artifacts; selfindex with calibrated centroids, because by default it has those of the prompt alone."""
    return [row for work in WORKS for row in study.losses(title, artifacts, work, METHODS, flags=OFFLINE.split())]


def over_works(rows):
    """Return one row for each index, with the losses on the blocks of all works, in the order of WORKS, and the mean of each work."""
    found = {}
    for row in rows:
        found.setdefault((row["method"], row["index"]), {})[row["work"]] = row
    merged = []
    for each in found.values():
        each = [each[work] for work in WORKS]
        losses = [loss for row in each for loss in row["kl_by_block"]]
        merged.append({key: value for key, value in each[0].items() if key != "work"} | {
            "kl": float(np.mean(losses)), "kl_by_block": losses, "kl_by_work": {row["work"]: row["kl"] for row in each},
            "bytes_read_fraction": float(np.average([row["bytes_read_fraction"] for row in each], weights=[len(row["kl_by_block"]) for row in each]))})
    return merged


PARTS = {"pays": pays, "domains": domains, "lengths": lengths}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of validation text, as many of each work")
    parser.add_argument("--decode", type=int, default=24, help="decode steps per block")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure")
    arguments = parser.parse_args()
    study = Study(arguments)
    study.find_budgets()
    main_fit = dict(study.fits)
    for part in arguments.only.split(","):
        study.fits = dict(main_fit)
        rows = over_works(PARTS[part](study))
        fits = {name: fit for name, fit in study.fits.items() if not name.startswith("prompt-")}
        documents.save(f"study-{part}", {"table": f"study-{part}", "program": study.commit(), "text": "validation", "length": BLOCK,
                                         "calibration": fits, "budgets": study.budgets, "rows": rows})


if __name__ == "__main__":
    main()
