"""Compares indexes at equal time: the loss on the real model against the time of one layer's choice and attention.

    python equal_time.py KVSMITH REAL [--blocks 20]

REAL is the folder in which `make results` ran: its artifact is used, and its dump, to which two more sections are fitted. For
`wpq` with codes of 64 bits in three forms (two stages of 8 groups of 16 words, the same around the mean of the keys, two
stages of 4 groups of 256 words), for `selfindex` and for `a2ats` with 1,024 codewords, the script measures at every budget

- the time that the choice and the attention of one layer take: `bench attend` on random data, with the model's heads, 8,192
  positions and one thread; the least of five medians of 50 runs;
- the KL on held-out text of the same length, half of it from each of two texts.

It prints both, and for every index the KL at the time that the two-stage `wpq` takes at a budget of 6 %, interpolated between
budgets on logarithmic scales, or nothing if its budgets take less or more time.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from lab import RESAMPLES, SEED  # noqa: E402
from results import Results  # noqa: E402

BUDGETS = (0.015, 0.03, 0.06, 0.12, 0.24)
CONTEXT, SHAPE, STEPS, TURNS = 8192, "9/3x64", 16, 5
WIDE = ("--wpq-words", "256")
# Label, method, name of the artifact, flags of `bench`.
FORMS = (
    ("wpq, 16 words, two stages", "wpq", "main", ()),
    ("the same around the mean", "wpq", "wpq-mean", ("--wpq-center", "mean")),
    ("wpq, 256 words", "wpq", "wpq-256", WIDE),
    ("selfindex", "selfindex", "main", ()),
    ("a2ats, 1,024 codewords", "a2ats", "main", ("--size", "1024")),
)


def times(kvsmith):
    """Returns the microseconds of a step by label and budget: the least median of runs in turn."""
    found = {}
    for _ in range(TURNS):
        for label, method, _, flags in FORMS:
            for budget in BUDGETS:
                command = [kvsmith, "bench", "attend", "--shapes", SHAPE, "--context", CONTEXT, "--methods", method,
                           "--budget", budget, "--threads", 1, "--runs", 50, "--device", "cpu", *flags, "--json", "-q"]
                printed = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout
                [row] = json.loads(printed)["rows"]
                median = 1e6 * row["median_s"]
                found[label, budget] = min(median, found.get((label, budget), median))
    return found


def losses(results, blocks):
    """Returns the KL of every block by label and budget."""
    others = [results.section("wpq-mean", "wpq", ["--wpq-center", "mean"]), results.section("wpq-256", "wpq", WIDE)]
    documents = results.blocks("handbook", CONTEXT, blocks // 2)
    documents += results.blocks("python", CONTEXT, blocks - len(documents))
    flags = ["--budgets", ",".join(map(str, BUDGETS)), "--decode", STEPS]
    document = results.measure("equal-time", documents, "wpq,selfindex,a2ats", flags, [results.main, *others])
    found = {}
    for row in document["rows"]:
        artifact = Path(row.get("artifact", "main.safetensors")).stem
        for label, method, name, _ in FORMS:
            if (row["method"], artifact) == (method, name):
                found[label, row["budget"]] = np.array(row["kl_by_block"])
    return found


def at_time(label, time, kl, wanted):
    """Returns the mean KL that a method has at a time, or None outside the times of its budgets."""
    own = [time[label, budget] for budget in BUDGETS]
    if not own[0] <= wanted <= own[-1]:
        return None
    logs = np.log([kl[label, budget].mean(-1) for budget in BUDGETS])
    return np.exp([np.interp(np.log(wanted), np.log(own), column) for column in np.atleast_2d(logs.T)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of held-out text")
    arguments = parser.parse_args()
    kl = losses(Results(arguments.kvsmith, arguments.real), arguments.blocks)
    time = times(arguments.kvsmith)
    picked = np.random.default_rng(SEED).integers(arguments.blocks, size=(RESAMPLES, arguments.blocks))
    resampled = {key: blocks[picked] for key, blocks in kl.items()}
    print("| index | " + " | ".join(f"budget {budget:.1%}" for budget in BUDGETS) + " | KL at the time of wpq at 6 % (95 %) |")
    print("|---" * (len(BUDGETS) + 2) + "|")
    wanted = time[FORMS[0][0], 0.06]
    for label, *_ in FORMS:
        cells = [f"{time[label, budget]:.0f} us, {kl[label, budget].mean():.4f}" for budget in BUDGETS]
        found, spread = (at_time(label, time, of, wanted) for of in (kl, resampled))
        last = "" if found is None else "{:.4f} ({:.4f} to {:.4f})".format(found[0], *np.percentile(spread, [2.5, 97.5]))
        print(f"| {label} | " + " | ".join(cells) + f" | {last} |")


if __name__ == "__main__":
    main()
