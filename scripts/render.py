"""Write docs/results.md and docs/dev/results.md, the tables of other pages that are made from docs/results/*.json, the pictures, and the
JSON Schema of docs/reference/json.md.

    python render.py [--check]

Nothing is measured. A table of another page stands between the marks `<!-- results: NAME -->` and `<!-- end of results -->`. With
--check, nothing is written, and the script fails if a file differs from what it would write. Needs numpy.
"""

import re
import sys
from pathlib import Path

import documents
import json_schema
import pictures
import sentences
import tables
from tables import percent

ROOT = Path(__file__).resolve().parent.parent
RESULTS, ALL_RESULTS, PICTURES = ROOT / "docs/results.md", ROOT / "docs/dev/results.md", ROOT / "docs/pictures"
JSON_PAGE, SCHEMA = ROOT / "docs/reference/json.md", ROOT / "docs/reference/json.schema.json"
PAGES = [ROOT / name for name in ("README.md", "docs/performance.md", "docs/eval.md", "docs/tutorial.md", "docs/dev/replication.md", "docs/dev/wpq-notes.md", "docs/dev/decode.md", "docs/dev/caches.md")]
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

HEADER = """# What the methods lose

All of this was measured on one model, SmolLM2-135M-Instruct (30 layers, 3 KV heads of 64 channels), at 2,048 to 8,192 tokens.
**Nothing was measured on a model of 1B parameters or more, on heads of 128 channels, or beyond 8,192 tokens**, where the papers
measured: what is not reproduced here may hold there.
"""

READING = """*KL* is how far the distribution of the next token is from that of full attention, the mean over the last steps of each block.
*Perplexity ratio*: the text's perplexity over that with full attention. *Read*: the
share of the bytes of all visible keys and values that a step reads, index included; the keys that `topk` reads in order to rank are not counted. *Moved*:
the same in whole granules of 64 bytes, as memory moves them. Intervals (95%) resample whole blocks or texts. Nothing was fitted to
these passages, but nine forms of `wpq` were looked at on the validation text, which therefore favours it. *Final text* is an FAQ,
source code and quotes from IRC, measured once for this version, with an artifact fitted to other parts of both validation works: trust it more. A row has the options that lose least
on validation text: the defaults, or options searched for elsewhere; "defaults" of `lfps` are its paper's.
[All forms](dev/results.md); [texts](dev/replication.md).
"""

ALL_HEADER = """# All tables of results

Measured on SmolLM2-135M-Instruct, as [../results.md](../results.md) says, which shows the part that most readers need.
`scripts/render.py` (`make pages`) writes both pages from the documents in [../results/](../results): one for each table, with the
losses of every block or text. `make results` measures the tables anew; `make results-long` measures one of them.
[replication.md](replication.md) lists the texts.

There are three sets of text. *Development* text is the end of the calibration texts, which no fit uses; every option is
searched for on it alone. *Validation* text is what this page shows, unless a table says otherwise. It takes no part in any
fit. It was looked at while `wpq` was developed, in nine forms of it, and decided between some of them, so that it is not an
independent test of `wpq`. *Final* text is of other works and is measured once per version (`make results FINAL=1`).
"""

ALL_READING = """How to read the tables:

- *KL* is the Kullback-Leibler divergence of the method's distribution of the next token from that with full attention, in
  nats: the mean over the steps, which are the last ones of each block. *Median block* and *largest block* are of the means of the
  blocks; 99% of the steps lose at most the *99th percentile*.
- *Equal top-1* is the share of the steps in which the method and full attention have the same most probable token.
- *Perplexity ratio* is the perplexity of the text divided by that with full attention.
- *Recall*: of the positions that an exact choice of the same size takes, the share that the method took too. *Mass* is the
  share of all attention on the positions that a step attends, sinks and window included.
- *Index bits* are the bits of memory that the index takes per position and KV head, including the room that it keeps
  for more positions.
- *Read* is the number of bytes that a step reads, index included, divided by the bytes of all visible keys and values. The
  keys that `topk` reads in order to rank are not counted, nor is scratch that a step writes and reads again. *Moved* counts whole
  granules, the units in which memory moves ([../eval.md](../eval.md)).
- An empty budget means that the method cannot read so little; the share shown is its minimum.
- Rows without a word in parentheses have the defaults of their method, with 1,024 codewords for `a2ats`. *Buckets* is
  `--positions buckets`, *all directions* is `--wpq-directions all`, *mean* is `--wpq-center mean`, *bypass* is the paper's form of
  `lfps` (`--lfps-theta 0.85`) and *no bypass* `--lfps-theta 1`. *Tuned* rows have the options that lost least on development text at
  this share of the bytes of 8,192 tokens (`make sweep`, [../results/sweep.json](../results/sweep.json)).
- Intervals are 95% intervals from resamples of the blocks or texts, and of the artifacts where a method was measured with
  several; otherwise they hold for one artifact. They speak for the texts that were measured, not for other works. Fewer than 20 blocks
  have none.
"""

CLAIMS = """Each claim says that one way of reading the cache loses less than another. Both are measured on the same blocks and
steps. The difference is the first loss minus the second. A claim is *confirmed* if the 95% interval of the difference
lies below 0, *not reproduced* (one of our own: *false*) if it lies above 0, and *undecided* if it contains 0. A claim that something loses *no
more* cannot be confirmed, only not refuted. *After Holm* is the verdict at 5% after Holm's correction for the number of claims, from exact p-values of changes of signs (2^20 for 20 blocks). Where one block makes more than half of a mean
difference, the last column gives its share; compare the median then.

Claims that name a share of the bytes are measured on the prose of the next sections. All others are measured at one budget, 6% of
the positions, on 20 blocks of 2,048 tokens of Python's documentation (for the claim over eight turns, each block is cut into
eight prompts). At equal budgets the two may read different shares of the bytes, which the table shows: where the first reads more, the
claim says only that more reading loses less. [../methods.md](../methods.md) explains the terms.
"""

QUESTIONS = "Each text hides the secret codes of eight names and asks for all of them, one after the other (the task `turns` of `scripts/tasks.py`)."
# Of texts that ask for fewer.
FEWER = "At {:,} tokens, it asks for {} of them."
FED = "Each question is fed in decode steps."
QUESTION_INTERVALS = "The intervals resample the texts, not the questions."
# How a question is fed.
PROTOCOLS = {
    "decode": "The question is fed token by token, in decode steps, so that the method must find the answer for it.",
    "prefill": "The question is fed with the prompt, as in the papers' own measurements: full attention reads it. Compare these figures with published ones.",
}
CLAIMS_HERE = """Each claim compares the losses of two ways of reading the cache at one budget, 6% of the positions of 2,048 tokens, where
the two may read different shares of the bytes. It is *confirmed* if the first loses less, *not reproduced* if it loses more, and *undecided*
otherwise, at 5% after the correction for the number of claims. That something loses *no more* is at best not refuted. [dev/results.md](dev/results.md#claims)
has the figures, and the claims against `quest` and about kvsmith's own method.
"""
# Tables of text: name, heading, and what they are about.
TEXTS = (
    ("text", "Prose, 3,072 tokens"),
    ("long", "Prose, 8,192 tokens"),
    ("same", "Prose, 8,192 tokens, calibrated on the same works"),
    ("final-text", "Final texts, 3,072 tokens"),
    ("final-long", "Final texts, 8,192 tokens"),
)


def of_blocks(document):
    """Say what a table of text was measured on."""
    works = document["works"]
    return f"{len(works)} blocks of {document['text']} text{sentences.of_works(works)}; {document['steps']} steps. {calibration(document)}\n"


def calibration(document):
    """Say what the artifacts of a table were fitted to."""
    alike = {}
    for name, fit in document["calibration"].items():
        # Artifacts of other texts of the same works differ by the tokens that make a block whole.
        kinds = tuple((kind, round(tokens, -2)) for kind, tokens in fit["fitted"].items())
        alike.setdefault(kinds, []).append((name, fit["fitted"]))
    each = []
    for fits in alike.values():
        names = sentences.listed([f"`{name}`" for name, _ in fits])
        tokens = {kind: sorted({fitted[kind] for _, fitted in fits}) for kind in fits[0][1]}
        texts = [f"{counts[0]:,} {f'to {counts[-1]:,} ' if len(counts) > 1 else ''}tokens of {sentences.NAMES.get(kind, kind)}" for kind, counts in tokens.items()]
        each.append(f"{names} {'are each' if len(fits) > 1 else 'is'} fitted to {' and '.join(texts)}")
    return f"Artifacts: {'; '.join(each)}."


def fewer(document):
    """Say how many facts of each text are asked for, if there is such a table."""
    return f"{FEWER.format(document['length'], document['questions'] // len(document['full_scores_by_line']))} " if document else ""


def all_results_page(found):
    """Return docs/dev/results.md."""
    parts = [ALL_HEADER, ALL_READING]
    if found["claims"]:
        parts += ["## Claims\n", CLAIMS, f"For the claims at one budget: {calibration(found['claims'])}\n", tables.claim_table(found)]
    for name, heading in TEXTS:
        if document := found[name]:
            parts += [f"## {heading}\n", of_blocks(document), tables.text_table(document), tables.ratio_table(document)]
    parts += ["## Questions\n", f"{QUESTIONS} {fewer(found['questions-8192'])}{QUESTION_INTERVALS}\n"]
    for name in ("questions-4096", "questions-8192", "easy-4096", "final-questions-4096"):
        if document := found[name]:
            right = percent(document["full_needle_accuracy"])
            of_final = ", final text" if name.startswith("final") else ""
            easy = ", fed with the prompt" if document["protocol"] == "prefill" else ""
            parts += [f"### {document['length']:,} tokens, {document['questions']} questions{easy}{of_final}, 10% of the bytes\n",
                      f"{PROTOCOLS[document['protocol']]} {calibration(document)} Full attention answers {right}.\n", tables.question_table(document)]
    return sentences.wrapped("\n".join(parts)).rstrip("\n") + "\n"


def results_page(found):
    """Return docs/results.md."""
    parts = [HEADER]
    if headline(found)[0]:
        parts += ["## In short\n", "\n".join(f"- {said}" for said in sentences.summary(found)) + "\n", picture("loss", "Loss of each method against the bytes that it reads", "pictures/"), READING]
    for name, share in (("text", 0.2), ("long", 0.1)):
        if document := found[name]:
            sentences.require_other_works(document)
            parts += [f"## {document['length']:,} tokens, {100 * share:.0f}% of the bytes\n", of_blocks(document), tables.short_table(document, share, sentences.final_of(found, name))]
    if document := found["questions-4096"]:
        sentences.require_other_works(document)
        parts += [f"## {document['questions']} questions about {document['length']:,} tokens, 10% of the bytes\n",
                  f"{QUESTIONS} {FED} {calibration(document)} Full attention answers {percent(document['full_needle_accuracy'])}.\n",
                  tables.short_questions(document, sentences.final_of(found, "questions-4096"))]
        if longer := found["questions-8192"]:
            sentences.require_other_works(longer)
            # In the paragraph below the table.
            parts[-1] = f"{parts[-1].rstrip()} {sentences.longer_questions(longer)}\n"
    if found["claims"]:
        fits = found["claims"].get("calibration", {}).values()
        kinds = sentences.listed([sentences.NAMES[kind] for fit in fits for kind in fit["fitted"]])
        sentences.require_other_works(found["claims"])
        fitted = f"The artifact was fitted to {kinds}."
        parts += ["## What the papers claim\n", f"{CLAIMS_HERE.rstrip()} {fitted}\n", "<details><summary>The claims of the papers and how they fared</summary>\n", tables.claims_list(found), "</details>\n"]
    return sentences.wrapped("\n".join(parts)).rstrip("\n") + "\n"


def picture(name, words, folder):
    """Return the Markdown of a picture that has a light and a dark form."""
    return (f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}{name}-dark.svg">'
            f'<img src="{folder}{name}-light.svg" alt="{words}"></picture>\n')


def headline(found):
    """Return the table of text that README shows, and the share of its bytes."""
    name, share = ("long", 0.1) if found["long"] else ("text", 0.2)
    return found[name], share


ROWS_OF_README, README_WIDTH = 8, 170


def loss_table(found):
    """Return README's table of losses, least first."""
    document, share = headline(found)
    questions = [row for row in (found["questions-4096"] or {"rows": []})["rows"] if row.get("needle_accuracy") is not None]
    asked = {(row["method"], tables.is_buckets(row)): row for row, _ in tables.better(questions, lambda row: -row["needle_accuracy"])}
    body = []
    for row, _ in tables.chosen_rows(document, share)[:ROWS_OF_README]:
        of = asked.get((row["method"], tables.is_buckets(row)), {})
        words = ", whose ranking is free" if row["method"] == "topk" else ", our form of it" if tables.is_buckets(row) else ""
        body.append([tables.named(row) + words, percent(row["bytes_read_fraction"]), f"{row['kl']:.4f}" + tables.spread(tables.kl_interval(row), 4),
                     percent(row.get("top1_equal")), percent(of.get("needle_accuracy")) or "not measured"])
    return tables.grid(["method", "read", "KL, nats (95%)", "same top token", "questions answered"], body)


def blocks(found):
    """Return the text of each marked block, or None where its document is missing."""
    made = {"losses": None, "speeds": None, "decode": None, "decode-all": None, "decode-aims": None, "times": found["times"] and sentences.wrapped(sentences.times_sentence(found["times"]), README_WIDTH) + "\n"}
    document, share = headline(found)
    if document:
        sentences.require_other_works(document)
        about = (f"{len(document['works'])} blocks of {document['length']:,} tokens of {' and '.join(sentences.NAMES[work] for work in dict.fromkeys(document['works']))}, {100 * share:.0f}% of the bytes; "
                 f"fitted to other works. [All rows](docs/dev/results.md).")
        said = [sentences.ratio_sentence(document, share)]
        if asked := found["questions-4096"]:
            said.append(sentences.answers_sentence(asked))
        if final := sentences.final_of(found, "long"):
            said.append(sentences.final_sentence(final, sentences.final_of(found, "questions-4096"), share))
        made["losses"] = "\n".join([sentences.wrapped(about, README_WIDTH), "", loss_table(found), sentences.wrapped(" ".join(said), README_WIDTH) + "\n"])
    if found["decode"]:
        made["decode"] = tables.decode_table(found["decode"], found, pictures.usual)
        made["decode-all"] = tables.decode_table(found["decode"], found)
        made["decode-aims"] = tables.decode_aims(found["decode"])
        words = "Tokens per second against the length of the context, for full attention and for methods that read a tenth of the cache"
        made["speeds"] = "\n".join([picture("speed", words, "docs/pictures/"), sentences.wrapped(sentences.speed_sentence(found["decode"], found), README_WIDTH) + "\n"])
    made["equal-time-said"] = found["equal-time"] and sentences.wrapped(sentences.equal_time_sentence(found["equal-time"])) + "\n"
    made["prompts"] = found.get("prompts") and sentences.wrapped(sentences.prompts_sentence(found["prompts"])) + "\n"
    made["study-pays-said"] = found["study-pays"] and sentences.wrapped(sentences.study_sentence(found["study-pays"])) + "\n"
    made["scale"] = document and sentences.scale(document, share)
    made["example"] = found["text"] and sentences.example(found["text"])
    made["retrieval"] = found["questions-4096"] and sentences.retrieval(found["questions-4096"], found["easy-4096"])
    return made | {name: make(found[name]) if found[name] else None for name, make in OTHERS.items()}


OTHERS = {"study-pays": tables.study_table, "study-domains": tables.study_table, "study-lengths": tables.study_table, "wpq-bits": tables.bits_table,
          "wpq-center": tables.center_table, "row-formats": tables.format_table, "row-sums": tables.sums_table, "row-reads": tables.reads_table, "row-format-times": tables.format_time_table, "row-maps": tables.map_table,
          "equal-time": tables.time_table, "code-store": tables.store_table, "index-search": tables.search_table}


def rendered(found):
    """Return the pages and their text."""
    made = blocks(found)

    def block(match):
        name = match[2]
        if name not in made:
            sys.exit(f"error: no table is called {name}")
        return match[0] if made[name] is None else f"{match[1]}{made[name]}{match[3]}"

    pages = {page: MARKED.sub(block, page.read_text(encoding="utf-8")) for page in PAGES}
    drawn = {PICTURES / name: text for name, text in pictures.drawn(found, headline(found)[0]).items()}
    schema = {SCHEMA: json_schema.schema(JSON_PAGE.read_text(encoding="utf-8"))}
    return {RESULTS: results_page(found), ALL_RESULTS: all_results_page(found)} | pages | drawn | schema


def main():
    names = {name for name, _ in TEXTS} | {"claims", "questions-4096", "questions-8192", "easy-4096", "final-questions-4096", "decode", "times", "prompts", *OTHERS}
    found = {name: documents.load(name) for name in names}
    for page, text in rendered(found).items():
        if "--check" not in sys.argv[1:]:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or text != page.read_text(encoding="utf-8"):
            sys.exit(f"error: {page.relative_to(ROOT)} differs from what docs/results/*.json or docs/reference/json.md says\nhint: run make pages")


if __name__ == "__main__":
    main()
