"""Search for the best options of every method at equal bytes read, on the development text of the real model.

    python sweep.py KVSMITH REAL SWEEP.json [--only quest,lfps] [--lengths 8192] [--blocks 4] [--steps 24]

REAL is the folder that `make real` made. The development text is the end of the calibration texts, which no fit uses. For
each method, length and share of the bytes, the script measures a few values of the method's main options and writes all rows
and the best of them to SWEEP.json; results.py takes the best as the row "tuned". `--only` measures some methods again and
keeps the rows of the others. Methods and options that the program does not know are listed as missing. The script reuses
every result in REAL/lab that the same program made with the same command, so a stopped run continues.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import documents
from lab import MIXED, WORKS, Lab

TOKENS = 40_960
# A choice may read this much more than its share: the budget was found on two blocks, and what some methods read varies.
MOST = 1.1
SHARES = {8192: (0.05, 0.1, 0.2)}


@dataclass
class Case:
    """Options of a method: flags of `eval`, or options of the command that fits its section. Without any, the defaults."""

    flags: str = ""
    section: tuple = ()

    def artifact(self):
        """Return the name of the section's file, or of the artifact with the defaults."""
        return "-".join(["main", *(word.strip("-") for word in self.section)])

    def options(self):
        return self.flags or " ".join(map(str, self.section[1:]))

    def words(self):
        """Return the flags that the command must know, and the command."""
        words, command = (self.section[1:], self.section[0]) if self.section else (self.flags.split(), "eval")
        return [word for word in map(str, words) if word.startswith("--")], command


def flags(*each):
    return [Case(flags=words) for words in each]


def sections(command, *each):
    return [Case(section=(command, *words.split())) for words in each]


DEFAULTS = Case()
# The method of each entry, and its cases.
SWEPT = {
    "a2ats": ("a2ats", [DEFAULTS, *sections("codebook", "--size 256", "--size 512", "--size 2048")]),
    "buckets": ("a2ats", sections("codebook", *(f"--positions buckets --size {size}" for size in (256, 512, 1024)))),
    "selfindex": ("selfindex", [DEFAULTS, *flags("--sign-centroids offline", "--sign-centroids signs")]),
    "lfps": ("lfps", flags(
        "--lfps-theta 0.85", "--lfps-theta 1", *(f"--lfps-theta 1 --lfps-alpha {alpha}" for alpha in (0, 0.5, 1, 2)),
        "--lfps-theta 1 --lfps-threshold budget", "--lfps-theta 1 --lfps-threshold budget --lfps-alpha 0.4")),
    "ctkvr": ("ctkvr", [DEFAULTS, *flags(
        "--ct-list 1", "--ct-list 1.5", "--ct-list 4", "--ct-centroids 32", "--ct-centroids 64", "--ct-centroids 128",
        "--ct-list 1.5 --ct-centroids 64", "--ct-list 1.5 --ct-centroids 128")]),
    "quest": ("quest", [DEFAULTS, *flags("--page 32", "--page 64")]),
    "wpq": ("wpq", [DEFAULTS, *sections("wpq", "--wpq-bits 32", "--wpq-directions all", "--wpq-directions 16")]),
    "pqcache": ("pqcache", [DEFAULTS, *flags("--pq-groups 4 --pq-bits 8")]),
    "doublesparsity": ("doublesparsity", flags("--ds-channels 8", "--ds-channels 16", "--ds-channels 32")),
}


# Entries that are measured together, so that they share the blocks' prompts; a stopped run has lost at most one group.
GROUPS = (("selfindex", "quest", "pqcache", "doublesparsity"), ("a2ats", "buckets", "wpq"), ("lfps", "ctkvr"))


class Sweep(Lab):
    def __init__(self, arguments):
        super().__init__(arguments.kvsmith, arguments.real)
        self.arguments = arguments
        self.corpus_of_main = self.corpus("main", MIXED, TOKENS)
        self.main = self.calibrated(self.corpus_of_main)

    def known(self, name):
        """Return the cases of an entry that the program knows, and what it does not know."""
        method, cases = SWEPT[name]
        if not self.knows([method]):
            return [], [{"entry": name, "options": "", "why": f"{self.commit()} has no method {method}"}]
        unknown = [case for case in cases if not self.knows(*case.words())]
        missing = [{"entry": name, "options": case.options(), "why": f"{self.commit()} does not know these options"} for case in unknown]
        return [case for case in cases if case not in unknown], missing

    def measured(self, names, length):
        """Return the rows of a group of entries at a length, and what the program does not know of them."""
        cases, missing = {}, []
        for name in names:
            cases[name], unknown = self.known(name)
            missing += unknown
        cases = {name: of for name, of in cases.items() if of}
        if not cases:
            return [], missing
        artifacts, also, plain = {"main": self.main}, [], []
        # By method, artifact and flags: the entries and the options.
        wanted = {}
        for name, of in cases.items():
            method = SWEPT[name][0]
            for case in of:
                if case.section:
                    artifacts[case.artifact()] = self.section(self.corpus_of_main, case.artifact(), case.section[0], case.section[1:])
                if case.flags:
                    also += ["--also", f"{method} {case.flags}"]
                elif method not in plain:
                    plain.append(method)
                wanted[method, case.artifact(), case.flags] = name, case
        half = self.arguments.blocks // len(WORKS)
        text = self.tokens(f"development-{length}", [block for work in WORKS for block in self.blocks(work, length, half, "development")])
        first, *others = artifacts.values()
        options = ["--artifact", first, *(["--against", ",".join(map(str, others))] if others else []), "--tokens", text,
                   "--max-tokens", 10**9, "--seq-len", length, "--decode", self.arguments.steps, "--methods", ",".join(plain or ["topk"]),
                   "--reads", ",".join(map(str, SHARES[length])), *also]
        document = self.eval(f"sweep-{'-'.join(cases)}-{length}", options, [text, *artifacts.values()])
        rows = []
        for row in document["rows"]:
            name, case = wanted.get((row["method"], Path(row.get("artifact", first)).stem, row.get("flags", "")), (None, None))
            if name is None:
                continue
            found = {"entry": name, "method": row["method"], "options": case.options(), "length": length, "share": row["reads_target"]}
            if row["budget"] is None:
                found |= {"budget": None, "least": row["reads_sample"], "why": f"its smallest budget reads {100 * row['reads_sample']:.1f}% of the bytes"}
            else:
                found |= {key: row[key] for key in ("budget", "bytes_read_fraction", "bytes_moved_fraction", "kl", "kl_by_block") if key in row}
            rows.append(found)
        return rows, missing


def best(rows):
    """Return the row that loses least, for each entry, length and share, of those that read hardly more; of equals, the first."""
    found = {}
    for row in rows:
        key = row["entry"], row["length"], row["share"]
        if row["budget"] is not None and row["bytes_read_fraction"] <= MOST * row["share"] and (key not in found or row["kl"] < found[key]["kl"]):
            found[key] = row
    return [{key: row[key] for key in ("entry", "method", "options", "length", "share", "kl")} for row in found.values()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("sweep", type=Path, help="the JSON file to write")
    parser.add_argument("--only", default=",".join(SWEPT), help="methods to measure; the rows of the others are kept")
    parser.add_argument("--lengths", default=",".join(map(str, SHARES)), help="tokens per block")
    parser.add_argument("--blocks", type=int, default=4, help="blocks per length")
    parser.add_argument("--steps", type=int, default=24, help="decode steps per block")
    arguments = parser.parse_args()
    only, lengths = arguments.only.split(","), [int(length) for length in arguments.lengths.split(",")]
    if unknown := [name for name in only if name not in SWEPT] + [n for n in lengths if n not in SHARES]:
        parser.error(f"unknown: {unknown}; methods: {', '.join(SWEPT)}; lengths: {', '.join(map(str, SHARES))}")
    sweep = Sweep(arguments)
    document = documents.load(arguments.sweep.stem, arguments.sweep.parent) or {"rows": [], "missing": []}
    groups = [[name for name in group if name in only] for group in GROUPS]
    for length, group in ((length, group) for length in lengths for group in groups if group):
        rows, missing = sweep.measured(group, length)
        made = {"program": sweep.commit(), "blocks": arguments.blocks, "steps": arguments.steps}
        kept = [row for row in document["rows"] if row["entry"] not in group or row["length"] != length]
        rows = sorted(kept + [row | made for row in rows], key=lambda row: (-row["length"], list(SWEPT).index(row["entry"])))
        missing = [row for row in document["missing"] if row["entry"] not in group] + missing
        document = {"text": "development", "calibration": sweep.fits["main"], "best": best(rows), "missing": missing, "rows": rows}
        documents.save(arguments.sweep.stem, document, arguments.sweep.parent)
    for row in document["best"]:
        print(f"{row['length']} tokens, {row['share']:.0%}: {row['entry']} {row['options'] or '(defaults)'} loses {row['kl']:.4f} nats")
    for row in document["missing"]:
        print(f"missing: {row['entry']} {row['options']}: {row['why']}")


if __name__ == "__main__":
    main()
