"""Measure what every method loses on the real model, decide which claims of the papers hold, and write docs/results.md.

    python results.py KVSMITH REAL PAGE [--questions 4096,8192] [--tasks 4096]

REAL is the folder that `make real` made. The script writes PAGE and, beside it, results/real.json with the numbers of the
page. It reuses every result in REAL/lab that the same program made with the same command, so a stopped run continues.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from lab import MIXED, RESAMPLES, SEED, TEXT_COLUMNS, Lab, form_of, paired, percent, run, table, write

METHODS = "topk,wpq,selfindex,lfps,ctkvr,a2ats,quest,snapkv,h2o,streaming"
PAPERS = ("a2ats", "selfindex", "lfps", "ctkvr")
TOKENS = 40_960
# Nothing was fitted to these texts, blocks and questions.
BLOCKS = 20
TASK_SEED = 20263
# Texts of each length, and questions about each text.
TEXTS, ASKED = 50, 8
# Other tasks of which full attention answers at least half, and texts of each, with one question about each text.
TASKS, TEXTS_PER_TASK = "single,multikey,multivalue", 134

HEADER = """# What the methods lose

Measured on SmolLM2-135M-Instruct: 135M parameters, 30 layers with 3 KV heads of 64 channels each, contexts of 2,048 to
8,192 tokens, on text and questions to which nothing was fitted. **No quality was measured on a model of 1B parameters
or more, on heads of 128 channels, or beyond 8,192 tokens**, which is where the papers measured. A claim that fails here
may hold there. To measure your model, run `kvsmith verdict` or `kvsmith eval`.

`make results` writes this page and continues where it was stopped. [real.md](real.md) lists what it fetches. Once the
program is compiled, it takes 82 minutes on two cores of an AMD EPYC with AVX-512. The numbers behind this page are in
[results/real.json](results/real.json). [small.md](small.md) measures the tiny model that comes with the repository.

Unless a table or claim says otherwise, the methods run with their defaults (`a2ats` with 1,024 codewords), the caches are
in bf16, and all methods use one artifact, calibrated on 32,768 tokens of the calibration texts and 8,192 tokens of random
UUIDs. By default, a paper's method uses the parameters of its paper ([methods.md](methods.md)). Rows with a word in
parentheses are other forms of a method: *buckets* is `--positions buckets`, *all directions* is `--wpq-directions all`,
*mean* is `--wpq-center mean`, and *no bypass* is `--lfps-theta 1`.

How to read the tables:

- *KL* is the Kullback-Leibler divergence of the method's distribution of the next token from that with full attention, in
  nats. The column gives the mean over the steps; half of the steps have at most the *median*, and 99 % of them at most
  the *99th percentile*.
- *Equal top-1* is the share of the steps in which the method and full attention have the same most probable token.
- *Perplexity ratio* is the perplexity of the text divided by that with full attention.
- *Recall*: of the positions that an exact choice of the same size takes, the share that the method took too. *Mass* is the
  share of all attention on the positions that a step attends, sinks and window included.
- *Index bits* are the bits of memory that the index has per position and KV head. They include the room that it keeps
  for more positions, so that an index of 64 bits shows more than 64.
- *Read* is the number of bytes that a step reads, index included, divided by the bytes of all visible keys and values. The
  keys that `topk` reads in order to rank are not counted.
- A row without a budget was not measured: even with its smallest budget the method reads the share shown.
- Intervals are 95 % intervals from resamples of the blocks or texts.

"""

NO_MORE = "bypassing heads at theta 0.85 loses no more than bypassing none"

CLAIMS = """Each claim says that one way of reading the cache loses less than another. Both are measured on the same blocks and
steps. The difference is the first loss minus the second. A claim is *confirmed* if the 95 % interval of the difference
lies below 0, *contradicted* if it lies above 0, and *undecided* if it contains 0. A claim that something loses *no more*
is either contradicted or not; it cannot be confirmed. Claims that name a share of the bytes are measured on the prose of
the next sections, of 8,192 tokens (3,072 for `ctkvr` and where the claim says so). All others are measured on 20 blocks
of 2,048 tokens of Python's documentation, at a budget of 6 % of the positions; for the claim over eight turns, each block
is cut into eight prompts. The intervals are not corrected for the number of claims: where there is no real difference,
one claim in twenty is expected to come out as confirmed or contradicted by chance. [methods.md](methods.md) explains the terms.

"""

QUESTIONS = """Each text hides the secret codes of eight names and asks for all of them, one after the other (the task `turns` of
`scripts/tasks.py`). Each method reads 10 % of the bytes. `lfps` runs with `--lfps-theta 1`, with which its KL is lower.
The intervals resample the texts, not the questions.

"""

ONE_QUESTION = """Each text has one question, of one of these tasks of `scripts/tasks.py`; the columns of the tasks give the share
of right answers in each.

"""

FORMS = {"a2ats-windowed-buckets": "buckets", "wpq-all": "all directions", "wpq-mean": "mean", "--lfps-theta 1": "no bypass"}


class Results(Lab):
    def __init__(self, kvsmith, real):
        super().__init__(kvsmith, real)
        self.main = self.calibrated("main", MIXED, TOKENS)

    def measure(self, name, documents, methods, options, artifacts=None, kv="bf16", also=()):
        """Evaluate methods on blocks, with all artifacts and the methods with flags in `also` on the same steps."""
        text = self.tokens(name, documents)
        first, *others = artifacts or [self.main]
        against = ["--against", ",".join(map(str, others))] if others else []
        size = max(map(len, documents))
        options = ["--artifact", first, *against, "--tokens", text, "--max-tokens", 10**9, "--seq-len", size, "--methods", methods, *options]
        options += [word for one in also for word in ("--also", one)]
        return self.eval(name, options, [text, first, *others], kv)

    def dump(self):
        """Capture the calibration text of the artifact."""
        text, dump = self.out / "main.tokens.json", self.out / "dump"
        self.once(dump / "manifest.json", ["dump", "--model", self.real / "model", "--tokens", text, "--max-tokens", 10**9,
                                           "--seq-len", 8192, "--holdout", 0.1, "--queries", "-o", dump], [text], folder=dump)
        return dump

    def section(self, name, command, options):
        """Fit a section to the calibration text."""
        dump, path = self.dump(), self.out / f"{name}.safetensors"
        return self.once(path, [command, "--dump", dump, *options, "-o", path, "--overwrite"], [dump / "manifest.json"])

    def codebook(self, name, options):
        return self.section(f"a2ats-{name}", "codebook", ["--size", 1024, *options])

    def forms(self):
        """Fit the other forms of two sections that are measured beside the defaults."""
        return [
            self.codebook("windowed-buckets", ["--positions", "buckets"]),
            self.section("wpq-all", "wpq", ["--wpq-directions", "all"]),
            self.section("wpq-mean", "wpq", ["--wpq-center", "mean"]),
        ]

    def texts(self):
        """Evaluate every method at two shares of the bytes."""
        documents = self.blocks("handbook", 3072, BLOCKS)
        return self.measure("text", documents, METHODS, ["--reads", "0.1,0.2", "--decode", 24], [self.main, *self.forms()])

    def long(self):
        """Evaluate the methods that can read 10 % of the bytes, at the longest context of the model."""
        half = BLOCKS // 2
        documents = self.blocks("handbook", 8192, half)
        documents += self.blocks("python", 8192, BLOCKS - len(documents))
        flags, methods = ["--reads", "0.05,0.1", "--decode", 16], "topk,wpq,selfindex,lfps,a2ats,quest,snapkv,streaming"
        return self.measure("long", documents, methods, flags, [self.main, *self.forms()], also=["lfps --lfps-theta 1"])

    def asked(self, name, length, tasks, per_task):
        """Ask questions about texts of a length; `lfps` bypasses no head, with which it loses less."""
        path = self.out / f"{name}-{length}.jsonl"
        run([sys.executable, Path(__file__).with_name("tasks.py"), "--haystack", self.real / "text" / "handbook-heldout.txt",
             "--lengths", length, "--tasks", tasks, "--per-task", per_task, "--seed", TASK_SEED,
             "--tokenizer", self.real / "model" / "tokenizer.json", "-o", path])
        options = ["--artifact", self.main, "--needles", path, "--methods", "topk,wpq,selfindex,lfps,snapkv", "--reads", "0.1", "--lfps-theta", 1]
        return self.eval(f"{name}-{length}", options, [path, self.main])

    def questions(self, length):
        """Ask eight questions about each text."""
        return self.asked("questions", length, "turns", TEXTS)

    def tasks(self, length):
        """Ask one question about each text."""
        return self.asked("tasks", length, TASKS, TEXTS_PER_TASK)

    def codebooks(self):
        """Fit the codebooks of a2ats with each other combination of rotation and metric, and with buckets, from one dump."""
        dump, moments = self.dump(), self.out / "moments-standard.safetensors"
        self.once(moments, ["moments", "--dump", dump, "--rope", "standard", "-o", moments, "--overwrite"], [dump / "manifest.json"])
        return [
            self.codebook("windowed-plain", ["--metric", "plain"]),
            self.codebook("standard-query-aware", ["--moments", moments]),
            self.codebook("standard-plain", ["--moments", moments, "--metric", "plain"]),
            self.codebook("windowed-buckets", ["--positions", "buckets"]),
        ]

    def ablations(self):
        """Evaluate every part of a method that a claim is about, at the papers' usual budget."""
        documents = self.blocks("python", 2048, BLOCKS)
        others = [*self.codebooks(), self.section("wpq-32", "wpq", ["--wpq-bits", 32])]
        steps = ["--budgets", "0.06", "--decode", 24]

        also = [
            "selfindex --sign-centroids hybrid",
            "selfindex --sign-centroids signs",
            "lfps --lfps-prior 0",
            "lfps --lfps-theta 1",
            "lfps --lfps-rows 0",
            *(f"ctkvr --ct-choose {way}" for way in ("even", "random", "first")),
            "ctkvr --ct-probes 2",
        ]
        packed = {"full": [], "plain": ["--plain-keys"], "all": ["--sign-full", 0]}

        def in_2_bits(name, flags):
            also = ["selfindex --sign-centroids signs"] if name == "full" else []
            return self.measure(f"ablation-2bit-{name}", documents, "selfindex", [*steps, *flags], kv="2bit", also=also)

        turns = ["--budgets", "0.06", "--turns", 8, "--decode", 8, "--ct-keep"]
        return {
            "base": self.measure("ablation", documents, "topk,a2ats,selfindex,lfps,ctkvr,wpq", steps, [self.main, *others], also=also),
            **{f"2bit-{name}": in_2_bits(name, flags) for name, flags in packed.items()},
            "turns": self.measure("turns", documents, "ctkvr", turns, also=["ctkvr --ct-keep --ct-update 0"]),
        }


def by_block(document, method, artifact="main", share=None, flags=None):
    """Return the KL of each block of the row with this method, artifact, share of the bytes and flags of `--also`."""
    for row in document["rows"]:
        of = row["method"], Path(row.get("artifact", "main.safetensors")).stem, row.get("reads_target"), row.get("flags")
        if of == (method, artifact, share, flags):
            return None if row.get("kl_by_block") is None else np.array(row["kl_by_block"])
    raise KeyError((method, artifact, share, flags))


def claims(text, long, ablations):
    """List the claims: source, wording, and the losses by block of the form that should lose less and of the other form."""
    base = ablations["base"]

    def of(method, flags=None, artifact="main", within="base"):
        return by_block(ablations[within], method, artifact, flags=flags)

    def codebook(rope, metric):
        return of("a2ats", artifact="main" if (rope, metric) == ("windowed", "query-aware") else f"a2ats-{rope}-{metric}")

    full = of("selfindex"), of("lfps"), of("ctkvr")
    packed = of("selfindex", within="2bit-full")
    from_signs = "--sign-centroids signs"
    a2ats, signs, lfps, ctkvr = "A2ATS", "Self-Indexing", "LFPS", "CTkvr"
    both, neither = codebook("windowed", "query-aware"), codebook("standard", "plain")
    found = [
        (a2ats, "windowed RoPE with the plain metric loses less than standard RoPE with the plain metric", codebook("windowed", "plain"), neither),
        (a2ats, "standard RoPE with the plain metric loses less than standard RoPE with the query-aware metric", neither, codebook("standard", "query-aware")),
        (a2ats, "with windowed RoPE, the query-aware metric loses less than the plain metric", both, codebook("windowed", "plain")),
        (a2ats, "windowed RoPE with the query-aware metric loses less than standard RoPE with the plain metric", both, neither),
        (a2ats, "windowed RoPE loses less than standard RoPE, both with the query-aware metric", both, codebook("standard", "query-aware")),
        (signs, "in a 2-bit cache, keys quantised with their signs lose less than keys quantised without them", packed, of("selfindex", within="2bit-plain")),
        (signs, "in a 2-bit cache, scores from centroids lose less than scores from signs alone", packed, of("selfindex", from_signs, within="2bit-full")),
        (signs, "in a 2-bit cache, some full-precision tokens lose less than none", packed, of("selfindex", within="2bit-all")),
        (signs, "in a bf16 cache, scores from centroids lose less than scores from signs alone", full[0], of("selfindex", from_signs)),
        (lfps, NO_MORE, full[1], of("lfps", "--lfps-theta 1")),
        (lfps, "tables filled from the prompt and calibrated priors lose less than tables filled from the priors alone", full[1], of("lfps", "--lfps-rows 0")),
        (ctkvr, "query centroids from the last queries of the prompt lose less than those from evenly spaced queries", full[2], of("ctkvr", "--ct-choose even")),
        (ctkvr, "query centroids from evenly spaced queries lose less than those from random queries", of("ctkvr", "--ct-choose even"), of("ctkvr", "--ct-choose random")),
        (ctkvr, "query centroids from random queries lose less than those from the first queries", of("ctkvr", "--ct-choose random"), of("ctkvr", "--ct-choose first")),
        (ctkvr, "recalling the lists of four query centroids loses less than recalling those of two", full[2], of("ctkvr", "--ct-probes 2")),
        (ctkvr, "over eight turns, replacing query centroids in decode steps loses less than keeping those of the first prompt", of("ctkvr", within="turns"), of("ctkvr", "--ct-keep --ct-update 0", within="turns")),
    ]
    named = {"a2ats": a2ats, "selfindex": signs, "lfps": lfps, "ctkvr": ctkvr}
    for method in PAPERS:
        # ctkvr cannot read as little as 10 %.
        where, share = (text, 0.2) if method == "ctkvr" else (long, 0.1)
        losses = [by_block(where, name, share=share) for name in (method, "quest")]
        found.append((named[method], f"`{method}` loses less than `quest` at {share:.0%} of the bytes".replace("%", " %"), *losses))
    ours = [
        ("centroids of signs from the prompt and the calibration (`hybrid`) lose less than those from the prompt alone", of("selfindex", "--sign-centroids hybrid"), full[0]),
        ("calibrated priors of `lfps` lose less than no priors", full[1], of("lfps", "--lfps-prior 0")),
        ("eight buckets of distances lose less than the one distance of windowed RoPE (`a2ats`, `--positions buckets`)", codebook("windowed", "buckets"), both),
        ("`wpq` loses less than `selfindex` at 10 % of the bytes", by_block(long, "wpq", share=0.1), by_block(long, "selfindex", share=0.1)),
        *[(f"{words} (`wpq`, {tokens} tokens, {share:.0%} of the bytes)".replace("%", " %"),
           by_block(where, "wpq", share=share), by_block(where, "wpq", other, share))
          for words, other in (("codes around the path of the mean lose less than codes around the mean", "wpq-mean"),
                               ("codes of half of the directions lose less than codes of all", "wpq-all"))
          for where, tokens, share in ((text, "3,072", 0.1), (text, "3,072", 0.2), (long, "8,192", 0.05), (long, "8,192", 0.1))],
        ("`wpq` with 32 bits per key loses less than `selfindex` with 64 bits, at equal budgets", of("wpq", artifact="wpq-32"), full[0]),
        ("`wpq` loses less than `topk`, the exact choice, at equal budgets", of("wpq"), of("topk")),
    ]
    return found + [("ours", *claim) for claim in ours]


def judged(claims):
    """Decide each claim by the paired interval of the difference."""
    rows = []
    for source, words, less, more in claims:
        row = {"source": source, "claim": words, "verdict": "not measured"}
        if less is not None and more is not None:
            mean, low, high = paired(less, more)
            open_verdict = "not contradicted" if words == NO_MORE else "confirmed" if high < 0 else "undecided"
            verdict = "contradicted" if low > 0 else open_verdict
            row |= {"verdict": verdict, "kl": [less.mean(), more.mean()], "difference": mean, "interval": [low, high]}
        rows.append(row)
    return rows


def claim_table(rows):
    lines = ["| source | claim | here | KL of the first, of the second | difference (95 %, paired) |", "|---|---|---|---|---|"]
    for row in rows:
        if "kl" not in row:
            lines.append(f"| {row['source']} | {row['claim']} | {row['verdict']}: one of the two cannot read so little | | |")
            continue
        less, more = row["kl"]
        low, high = row["interval"]
        lines.append(f"| {row['source']} | {row['claim']} | **{row['verdict']}** | {less:.4f}, {more:.4f} | {row['difference']:.4f} ({low:.4f} to {high:.4f}) |")
    return "\n".join(lines) + "\n"


def ratios(document, shares):
    """Compare wpq with the method of the papers, in any form, that loses least at each share of the bytes."""
    lines = ["| bytes | best method of the papers | its KL | KL of `wpq` | ratio (95 %, paired) |", "|---|---|---|---|---|"]
    draw = np.random.default_rng(SEED)
    for share in shares:
        rows = [row for row in document["rows"] if row["method"] in PAPERS and row["reads_target"] == share and row.get("kl_by_block")]
        best = min(rows, key=lambda row: row["kl"])
        ours, theirs = by_block(document, "wpq", share=share), np.array(best["kl_by_block"])
        picked = draw.integers(len(ours), size=(RESAMPLES, len(ours)))
        low, high = np.percentile(ours[picked].mean(1) / theirs[picked].mean(1), [2.5, 97.5])
        form = form_of(best, FORMS)
        name = f"`{best['method']}`{f' ({form})' if form else ''}"
        lines.append(f"| {percent(share)} | {name} | {theirs.mean():.4f} | {ours.mean():.4f} | {ours.mean() / theirs.mean():.2f} ({low:.2f} to {high:.2f}) |")
    return "\n".join(lines) + "\n"


def question_table(document):
    against = {pair["methods"][1]: pair for pair in document["differences"] if pair["methods"][0] == "topk"}
    tasks = [of["task"] for of in document["full_by_task"]]
    # A single task is the whole table.
    tasks = tasks if len(tasks) > 1 else []
    names = "".join(f" `{task}` |" for task in tasks)
    lines = [f"| method | budget | read | right (95 %) | points below `topk` (95 %, paired) |{names}", "|---|---|---|---|---|" + "---|" * len(tasks)]
    for row in document["rows"]:
        if row["budget"] is None:
            lines.append(f"| `{row['method']}` | | at least {percent(row['reads_sample'])} | | |" + " |" * len(tasks))
            continue
        low, high = (100 * x for x in row["intervals"]["needle_accuracy"])
        right = f"{100 * row['needle_accuracy']:.1f} % ({low:.1f} to {high:.1f})"
        pair = against.get(row["method"])
        less = "" if pair is None else f"{100 * pair['difference']:.1f} ({100 * pair['interval'][0]:.1f} to {100 * pair['interval'][1]:.1f})"
        of_task = {of["task"]: percent(of["accuracy"]) for of in row["by_task"]}
        cells = "".join(f" {of_task[task]} |" for task in tasks)
        lines.append(f"| `{row['method']}` | {row['budget']:.4f} | {percent(row['bytes_read_fraction'])} | {right} | {less} |{cells}")
    return "\n".join(lines) + "\n"


KEPT = ("method", "artifact", "flags", "budget", "reads_target", "reads_sample", "bytes_read_fraction", "kl", "kl_median", "kl_p99", "top1_equal",
        "perplexity_ratio", "recall", "mass", "output_error", "index_bits_per_token", "needle_accuracy", "by_task", "kl_by_block", "intervals")


def kept(document):
    """Return the numbers from which the page is made, without paths of this machine."""
    rows = []
    for row in document["rows"]:
        row = {key: row[key] for key in KEPT if row.get(key) is not None}
        if "artifact" in row:
            row["artifact"] = Path(row["artifact"]).stem
        rows.append(row)
    found = {key: document[key] for key in ("blocks", "steps", "full_needle_accuracy", "full_by_task") if key in document}
    return found | {"rows": rows}


def lengths(text):
    """Read the lengths of a list with commas, which may be empty."""
    return [int(length) for length in text.split(",") if length]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("page", type=Path, help="the page to write")
    parser.add_argument("--questions", type=lengths, default=[4096], help="lengths of the texts with eight questions each, in tokens")
    parser.add_argument("--tasks", type=lengths, default=[], help="lengths of the texts with one question each, in tokens (default: none)")
    arguments = parser.parse_args()
    results = Results(arguments.kvsmith, arguments.real)
    text, long, ablations = results.texts(), results.long(), results.ablations()
    questions = {length: results.questions(length) for length in arguments.questions}
    tasks = {length: results.tasks(length) for length in arguments.tasks}
    verdicts = judged(claims(text, long, ablations))
    page = HEADER
    page += "## Claims\n\n" + CLAIMS + claim_table(verdicts)
    page += f"\n## Prose, 3,072 tokens\n\n{text['blocks']} blocks of held-out chapters of the handbook, {text['steps']} steps.\n\n"
    page += table(text, TEXT_COLUMNS, FORMS) + "\n" + ratios(text, (0.1, 0.2))
    page += f"\n## Prose, 8,192 tokens\n\n{long['blocks']} blocks of held-out text of the handbook and of Python's documentation, {long['steps']} steps.\n\n"
    page += table(long, TEXT_COLUMNS, FORMS) + "\n" + ratios(long, (0.05, 0.1))
    page += "\n## Questions\n\n" + QUESTIONS
    for length, asked in questions.items():
        page += f"### {length:,} tokens, {ASKED * TEXTS} questions\n\nFull attention answers {percent(asked['full_needle_accuracy'])}.\n\n"
        page += question_table(asked) + "\n"
    for length, asked in tasks.items():
        page += f"### {length:,} tokens, {asked['needles']} questions of other tasks\n\n" + ONE_QUESTION
        of_each = ", ".join(f"{percent(of['accuracy'])} of `{of['task']}`" for of in asked["full_by_task"])
        page += f"Full attention answers {percent(asked['full_needle_accuracy'])}: {of_each}.\n\n" + question_table(asked) + "\n"
    page = page.rstrip("\n") + "\n"
    numbers = {"text": kept(text), "long": kept(long), "claims": verdicts}
    numbers |= {f"questions-{length}": kept(asked) for length, asked in questions.items()}
    numbers |= {f"tasks-{length}": kept(asked) for length, asked in tasks.items()}
    numbers |= {"ablations": {name: kept(of) for name, of in ablations.items()}}
    folder = arguments.page.parent / "results"
    folder.mkdir(exist_ok=True)
    write(folder / "real.json", json.dumps(numbers, indent=1, default=float) + "\n")
    write(arguments.page, page)


if __name__ == "__main__":
    main()
