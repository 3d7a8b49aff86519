"""Write docs/results.md, and the tables of other pages that are made from docs/results/*.json, without measuring anything.

    python render.py [--check]

A table of another page stands between the marks `<!-- results: NAME -->` and `<!-- end of results -->`. With --check, nothing is
written, and the script fails if a page differs from what it would write. Needs numpy.
"""

import re
import sys
import textwrap
from pathlib import Path

import documents
import tables
from tables import percent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/results.md"
PAGES = [ROOT / "README.md", ROOT / "docs/real.md", ROOT / "docs/methods.md", ROOT / "docs/tutorial.md"]
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

HEADER = """# What the methods lose

Measured on SmolLM2-135M-Instruct: 135M parameters, 30 layers with 3 KV heads of 64 channels each, contexts of 2,048 to
8,192 tokens. **No quality was measured on a model of 1B parameters or more, on heads of 128 channels, or beyond 8,192
tokens**, which is where the papers measured. A claim that fails here may hold there. To measure your model, run `kvsmith
verdict` or `kvsmith eval`.

`scripts/render.py` (`make pages`) writes this page from the documents in [results/](results): one for each table, with the
losses of every block or text. `make results` measures the tables anew; `make results-long` measures one of them. [real.md](real.md)
lists the texts. [small.md](small.md) measures the tiny model that comes with the repository.

There are three sets of text. *Development* text is the end of the calibration texts, which no fit uses; every option is
searched for on it alone. *Validation* text is what this page shows, unless a table says otherwise. It takes no part in any
fit. It was looked at while `wpq` was developed, in nine forms of it, and decided between some of them, so that it is not an
independent test of `wpq`. *Final* text is of other works and is measured once per version (`make results FINAL=1`).
"""

READING = """How to read the tables:

- *KL* is the Kullback-Leibler divergence of the method's distribution of the next token from that with full attention, in
  nats: the mean over the steps, which are the last ones of each block. *Median block* and *largest block* are of the means of the
  blocks; 99 % of the steps lose at most the *99th percentile*.
- *Equal top-1* is the share of the steps in which the method and full attention have the same most probable token.
- *Perplexity ratio* is the perplexity of the text divided by that with full attention.
- *Recall*: of the positions that an exact choice of the same size takes, the share that the method took too. *Mass* is the
  share of all attention on the positions that a step attends, sinks and window included.
- *Index bits* are the bits of memory that the index has per position and KV head. They include the room that it keeps
  for more positions, so that an index of 64 bits shows more than 64.
- *Read* is the number of bytes that a step reads, index included, divided by the bytes of all visible keys and values. The
  keys that `topk` reads in order to rank are not counted, nor is scratch that a step writes and reads again. *Moved* counts whole
  granules, the units in which memory moves ([eval.md](eval.md)).
- A row without a budget was not measured: even with its smallest budget the method reads the share shown.
- Rows without a word in parentheses have the defaults of their method, with 1,024 codewords for `a2ats`. *Buckets* is
  `--positions buckets`, *all directions* is `--wpq-directions all`, *mean* is `--wpq-center mean`, *bypass* is the paper's form of
  `lfps` (`--lfps-theta 0.85`) and *no bypass* `--lfps-theta 1`. *Tuned* rows have the options that lost least on development text at
  this share of the bytes of 8,192 tokens (`make sweep`, [results/sweep.json](results/sweep.json)).
- Intervals are 95 % intervals from resamples of the blocks or texts, and of the artifacts where a method was measured with
  several; otherwise they hold for one artifact. They speak for the texts that were measured, not for other works. Fewer than 20 blocks
  have none.
"""

CLAIMS = """Each claim says that one way of reading the cache loses less than another. Both are measured on the same blocks and
steps. The difference is the first loss minus the second. A claim is *confirmed* if the 95 % interval of the difference
lies below 0, *contradicted* if it lies above 0, and *undecided* if it contains 0. A claim that something loses *no more*
is either contradicted or not; it cannot be confirmed. *After Holm* is the verdict at 5 % after Holm's correction for the
number of claims, from exact p-values of changes of signs (2^20 for 20 blocks). Where one block makes more than half of a mean
difference, the last column gives its share; compare the median then.

Claims that name a share of the bytes are measured on the prose of the next sections. All others are measured at one budget, 6 % of
the positions, on 20 blocks of 2,048 tokens of Python's documentation (for the claim over eight turns, each block is cut into
eight prompts). At equal budgets the two may read different shares of the bytes, which the table shows: where the first reads more, the
claim says only that more reading loses less. [methods.md](methods.md) explains the terms.
"""

QUESTIONS = """Each text hides the secret codes of eight names and asks for all of them, one after the other (the task `turns` of
`scripts/tasks.py`). Each method reads 10 % of the bytes. The intervals resample the texts, not the questions.
"""
# How a question is fed.
PROTOCOLS = {
    "decode": "The question is fed token by token, in decode steps, so that the method must find the answer for it.",
    "prefill": "The question is fed with the prompt, as in the papers' own measurements: full attention reads it. Compare these figures with published ones.",
}
ONE_QUESTION = """Each text has one question, of one of these tasks of `scripts/tasks.py`; the columns of the tasks give the share
of right answers in each.
"""
# Tables of text: name, heading, and what they are about.
TEXTS = (
    ("text", "Prose, 3,072 tokens"),
    ("long", "Prose, 8,192 tokens"),
    ("same", "Prose, 8,192 tokens, calibrated on the same works"),
    ("final-text", "Final texts, 3,072 tokens"),
    ("final-long", "Final texts, 8,192 tokens"),
)
NAMES = {"handbook": "the Debian Administrator's Handbook", "python": "Python's documentation", "prose": "an FAQ on anarchism",
         "source": "the source of Mercurial", "dialogue": "quotes from IRC", "uuid": "random UUIDs", "bible": "the King James Bible"}


def of_blocks(document):
    """Say what a table of text was measured on."""
    works = document["works"]
    each = [f"{works.count(work)} of {NAMES[work]}" for work in dict.fromkeys(works)]
    what = f"{len(works)} blocks of {document['text']} text" + (f", {' and '.join(each)}" if len(each) > 1 else f" of {NAMES[works[0]]}")
    return f"{what}; {document['steps']} steps. {calibration(document)}\n"


def calibration(document):
    """Say what the artifacts of a table were fitted to."""
    if "calibration_text" in document:
        return document["calibration_text"]
    fits = document["calibration"]
    each = [f"`{name}` is fitted to {', '.join(f'{tokens:,} tokens of {NAMES.get(kind, kind)}' for kind, tokens in fit['fitted'].items())}" for name, fit in fits.items()]
    return f"Artifacts: {'; '.join(each)}."


def results_page(found):
    """Return docs/results.md."""
    parts = [HEADER, READING]
    if found["claims"]:
        parts += ["## Claims\n", CLAIMS, f"For the claims at one budget: {calibration(found['claims'])}\n", tables.claim_table(found)]
    for name, heading in TEXTS:
        if document := found[name]:
            parts += [f"## {heading}\n", of_blocks(document), tables.text_table(document), tables.ratio_table(document)]
    parts += ["## Questions\n", QUESTIONS]
    for name in ("questions-4096", "questions-8192", "easy-4096", "final-questions-4096"):
        if document := found[name]:
            right = percent(document["full_needle_accuracy"])
            of_final = ", final text" if name.startswith("final") else ""
            easy = ", fed with the prompt" if document["protocol"] == "prefill" else ""
            parts += [f"### {document['length']:,} tokens, {document['questions']} questions{easy}{of_final}\n",
                      f"{PROTOCOLS[document['protocol']]} {calibration(document)} Full attention answers {right}.\n", tables.question_table(document)]
    if document := found["tasks-4096"]:
        of_each = ", ".join(f"{percent(of['accuracy'])} of `{of['task']}`" for of in document["full_by_task"])
        parts += [f"### {document['length']:,} tokens, {document['needles']} questions of other tasks\n", ONE_QUESTION,
                  f"Full attention answers {percent(document['full_needle_accuracy'])}: {of_each}.\n", tables.question_table(document)]
    return wrapped("\n".join(parts)).rstrip("\n") + "\n"


ROWS_OF_README = (("topk", "", "oracle"), ("wpq", "", ""), ("pqcache", "tuned", "tuned"), ("lfps", "", "never skips the cache"), ("lfps", "--lfps-theta 1", "`--lfps-theta 1`, never skips the cache"),
                  ("a2ats", "buckets, tuned", "`--positions buckets`, ours, tuned"), ("a2ats", "buckets", "`--positions buckets`, ours"), ("selfindex", "", ""),
                  ("doublesparsity", "tuned", "tuned"), ("lfps", "--lfps-theta 0.85", "`--lfps-theta 0.85`, the paper's"), ("a2ats", "tuned", "tuned"), ("a2ats", "", "1,024 codewords"))


def loss_table(found):
    """Return README's table of losses at 10 % of the bytes of 8,192 tokens, least first."""
    document = found["long"]
    rows = [(row, words) for method, form, words in ROWS_OF_README if (row := tables.row_at(document, method, form, 0.1))]
    body = [[f"`{row['method']}`" + (f" ({words})" if words else ""), percent(row["bytes_read_fraction"]), f"{row['kl']:.4f}",
             tables.spread(tables.kl_interval(row), 4).strip(" ()")] for row, words in sorted(rows, key=lambda each: each[0]["kl"])]
    return tables.grid(["method", "read", "KL, nats", "95 % interval"], body)


def ratio_sentence(found):
    """Return README's sentence on the ratio of wpq to the best of the papers' methods."""
    said = []
    for share in tables.shares_of(found["long"]):
        best, ours = tables.best_of_papers(found["long"], share), tables.row_at(found["long"], "wpq", "", share)
        interval = tables.spread(tables.ratio_interval(ours["kl_by_block"], best["kl_by_block"]), 2)
        said.append(f"at {100 * share:.0f} % of the bytes {ours['kl'] / best['kl']:.2f} times as much as the best of them, {tables.label(best)}{interval}")
    return f"Compared with the papers' methods in the table, `wpq` loses {' and '.join(said)}."


def question_sentence(found):
    """Return README's sentences on questions."""
    said = []
    for name in ("questions-4096", "questions-8192"):
        if document := found[name]:
            right = {row["method"]: percent(row["needle_accuracy"]) for row in document["rows"] if row.get("needle_accuracy") is not None and row["form"] == ""}
            said.append(f"Of {document['questions']} questions that ask for one of eight facts hidden in {document['length']:,} tokens, full attention answers "
                        f"{percent(document['full_needle_accuracy'])}. At 10 % of the bytes `wpq` answers {right['wpq']} and `selfindex` {right['selfindex']}.")
    return " ".join(said)


def wrapped(text, width=120):
    """Break the paragraphs and list items of a Markdown text into lines; leave tables and headings as they are."""
    parts = []
    for part in text.split("\n\n"):
        if part.lstrip().startswith(("|", "#", "<")):
            parts.append(part)
            continue
        items = re.split(r"\n(?=- )", part.strip("\n"))
        lines = (textwrap.fill(" ".join(item.split()), width, subsequent_indent="  " if item.startswith("- ") else "",
                               break_long_words=False, break_on_hyphens=False) for item in items)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def blocks(found):
    """Return the text of each marked block, or None where its document is missing."""
    made = {"losses": None}
    if found["long"]:
        made["losses"] = "\n".join([loss_table(found), wrapped(f"{ratio_sentence(found)} {question_sentence(found)}", 140) + "\n"])
    return made | {name: make(found[name]) if found[name] else None for name, make in OTHERS.items()}


OTHERS = {"study-pays": tables.study_table, "study-domains": tables.study_table, "study-lengths": tables.study_table, "wpq-bits": tables.bits_table,
          "wpq-center": tables.center_table, "equal-time": tables.time_table, "code-store": tables.store_table, "index-search": tables.search_table}


def rendered(found):
    """Return the pages and their text."""
    made = blocks(found)

    def block(match):
        name = match[2]
        if name not in made:
            sys.exit(f"error: no table is called {name}")
        return match[0] if made[name] is None else f"{match[1]}{made[name]}{match[3]}"

    pages = {page: MARKED.sub(block, page.read_text(encoding="utf-8")) for page in PAGES}
    return {RESULTS: results_page(found)} | pages


def main():
    names = {name for name, _ in TEXTS} | {"claims", "questions-4096", "questions-8192", "easy-4096", "tasks-4096", "final-questions-4096", *OTHERS}
    found = {name: documents.load(name) for name in names}
    for page, text in rendered(found).items():
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
        elif text != page.read_text(encoding="utf-8"):
            sys.exit(f"error: {page.relative_to(ROOT)} differs from docs/results/*.json\nhint: run make pages")


if __name__ == "__main__":
    main()
