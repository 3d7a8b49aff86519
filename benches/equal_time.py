"""Compares indexes at equal time: the loss on the real model against the time of one layer's choice and attention.

    python equal_time.py KVSMITH REAL [--blocks 20] [--times]

REAL is the folder that `make real` made. For every index and budget, the script measures

- the time that the choice and the attention of one layer take: `bench attend` on random data, with the model's heads, 8,192
  positions and one thread; the least of five medians of 50 runs;
- the KL on validation text of the same length, each work with an artifact that is calibrated on the other.

It writes docs/results/equal-time.json, with a row for full attention. scripts/render.py interpolates between budgets and gives
the KL of every index at the time that `wpq` takes at a budget of 6%.

With `--times`, the losses of the document stay and the times are measured again, for a build that chooses the same positions in
another time: one block of each work must give the losses of the document to the last digit, with the artifacts in REAL/lab.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import documents  # noqa: E402
from lab import fail  # noqa: E402
from results import FORMS as SECTIONS  # noqa: E402
from results import Results, require_apart  # noqa: E402

BUDGETS = (0.015, 0.03, 0.06, 0.12, 0.24)
CONTEXT, SHAPE, STEPS, TURNS = 8192, "9/3x64", 16, 5
# Label, method, form of its section, flags of `bench`.
FORMS = (
    ("`wpq`", "wpq", "", ()),
    ("`wpq` around the mean", "wpq", "mean", ("--wpq-center", "mean")),
    ("`selfindex`", "selfindex", "", ()),
    ("`a2ats`, 1,024 codewords", "a2ats", "", ("--size", "1024")),
    ("`pqcache`", "pqcache", "", ()),
)


def time_of(kvsmith, method, budget, flags):
    """Returns the microseconds of a step: the median of runs."""
    command = [kvsmith, "bench", "attend", "--shapes", SHAPE, "--context", CONTEXT, "--methods", method,
               "--budget", budget, "--threads", 1, "--runs", 50, "--device", "cpu", *flags, "--json", "-q"]
    printed = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout
    [row] = json.loads(printed)["rows"]
    return 1e6 * row["median_s"]


def times(kvsmith, forms):
    """Returns the microseconds of a step by label and budget, and of full attention: the least median of runs in turn."""
    found = {}
    for _ in range(TURNS):
        for label, method, _, flags in (("full", "full", "", ()), *forms):
            for budget in BUDGETS if method != "full" else BUDGETS[:1]:
                time = time_of(kvsmith, method, budget, flags)
                found[label, budget] = min(time, found.get((label, budget), time))
    return found


def losses(results, forms, blocks):
    """Returns the KL of every block by label and budget."""
    found = {}
    for work, of_work in results.long_blocks(blocks).items():
        corpus, artifact = results.of(work)
        require_apart({corpus.name: results.fits[corpus.name]}, work)
        mean = results.form(corpus, *SECTIONS["mean"])
        text = results.tokens(f"equal-time-{work}", of_work)
        methods = ",".join(dict.fromkeys(method for _, method, _, _ in forms))
        options = ["--artifact", artifact, "--against", mean, "--tokens", text, "--max-tokens", 10**9, "--seq-len", CONTEXT, "--methods", methods,
                   "--budgets", ",".join(map(str, BUDGETS)), "--decode", STEPS, *results.losses_only()]
        for row in results.eval(f"equal-time-{work}", options, [text, artifact, mean])["rows"]:
            form = "mean" if Path(row.get("artifact", artifact)).stem == mean.stem else ""
            for label, *key in forms:
                if (row["method"], form) == tuple(key[:2]):
                    found.setdefault((label, row["budget"]), []).extend(row["kl_by_block"])
    return found


def require_same_losses(results, known):
    """Stop the script unless one block of each work, at a budget of 6%, has the losses of a document."""
    kl = {row["index"]: row["kl_by_block"] for row in known["rows"] if row["budget"] == 0.06}
    methods = ",".join(dict.fromkeys(method for label, method, _, _ in FORMS if label in kl))
    first = 0
    for work, of_work in results.long_blocks(len(kl["`wpq`"])).items():
        artifact = results.out / f"for-{work}.safetensors"
        mean = results.out / f"for-{work}-wpq-wpq-center-mean.safetensors"
        if missing := [path.name for path in (artifact, mean) if not path.exists()]:
            fail(f"{', '.join(missing)}: no longer in {results.out}", "omit --times")
        text = results.tokens(f"equal-time-one-{work}", of_work[:1])
        options = ["--artifact", artifact, "--against", mean, "--tokens", text, "--max-tokens", 10**9, "--seq-len", CONTEXT, "--methods", methods,
                   "--budgets", 0.06, "--decode", STEPS, *results.losses_only()]
        rows = results.eval(f"equal-time-one-{work}", options, [text, artifact, mean])["rows"]
        for label, method, form, _ in FORMS:
            own = mean if form else artifact
            [row] = [row for row in rows if row["method"] == method and Path(row.get("artifact", own)).stem == own.stem]
            if documents.rounded(row["kl_by_block"][0]) != kl[label][first]:
                fail(f"{label} loses {row['kl_by_block'][0]} on the first block of {work}, in the document {kl[label][first]}", "omit --times: the losses are others now")
        first += len(of_work)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of validation text")
    parser.add_argument("--times", action="store_true", help="measure the times again, and keep the losses of docs/results/equal-time.json")
    arguments = parser.parse_args()
    results = Results(arguments.kvsmith, arguments.real)
    if arguments.times:
        known = documents.load("equal-time") or fail("there is no docs/results/equal-time.json", "omit --times")
        require_same_losses(results, known)
        kl = {(row["index"], row["budget"]): row["kl_by_block"] for row in known["rows"] if "kl_by_block" in row}
        head = {key: value for key, value in known.items() if key != "rows"}
        forms = [form for form in FORMS if any(form[0] == index for index, _ in kl)]
    else:
        forms = [form for form in FORMS if results.knows([form[1]]) and results.knows([form[1]], "bench attend")]
        kl = losses(results, forms, arguments.blocks)
        head = {"table": "equal-time", "program": results.commit(), "text": "validation", "length": CONTEXT, "calibration": results.fits}
    time = times(arguments.kvsmith, forms)
    # In the order of the forms, and full attention last.
    labels = [*(form[0] for form in forms), "full"]
    rows = [{"index": label, "budget": budget, "us": us, **({"kl": np.mean(kl[label, budget]), "kl_by_block": kl[label, budget]} if label != "full" else {})}
            for (label, budget), us in sorted(time.items(), key=lambda item: (labels.index(item[0][0]), item[0][1]))]
    documents.save("equal-time", head | {"timed": results.commit(), "rows": rows})


if __name__ == "__main__":
    main()
