"""Write docs/results.md and docs/dev/results.md, the tables of other pages that are made from docs/results/*.json, the pictures, and the
JSON Schema of docs/reference/json.md.

    python render.py [--check]

Nothing is measured. A table of another page stands between the marks `<!-- results: NAME -->` and `<!-- end of results -->`. With
--check, nothing is written, and the script fails if a file differs from what it would write. Needs numpy.
"""

import re
import sys
import textwrap
from pathlib import Path

import numpy as np

import claims
import documents
import intervals
import json_schema
import pictures
import tables
from tables import percent

ROOT = Path(__file__).resolve().parent.parent
RESULTS, ALL_RESULTS, PICTURES = ROOT / "docs/results.md", ROOT / "docs/dev/results.md", ROOT / "docs/pictures"
JSON_PAGE, SCHEMA = ROOT / "docs/reference/json.md", ROOT / "docs/reference/json.schema.json"
PAGES = [ROOT / name for name in ("README.md", "docs/performance.md", "docs/eval.md", "docs/tutorial.md", "docs/dev/replication.md", "docs/dev/wpq-notes.md", "docs/dev/decode.md")]
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

HEADER = """# What the methods lose

All of this was measured on one model, SmolLM2-135M-Instruct: 135M parameters, 30 layers with 3 KV heads of 64 channels each,
contexts of 2,048 to 8,192 tokens. **Nothing was measured on a model of 1B parameters or more, on heads of 128 channels, or beyond 8,192
tokens**, which is where the papers measured: what is not reproduced here may hold there.
"""

READING = """*KL* is how far the distribution of the next token is from that of full attention, the mean over the last steps of each block.
*Perplexity ratio*: the text's perplexity over that with full attention. *Read*: the
share of the bytes of all visible keys and values that a step reads, index included; the keys that `topk` reads in order to rank are not counted. *Moved*:
the same in whole granules of 64 bytes, as memory moves them. Intervals (95%) resample whole blocks or texts. Nothing was fitted to
these passages, but nine forms of `wpq` were looked at on the validation text while it was developed, so that text favours it. *Final text* is an FAQ,
source code and quotes from IRC, measured once for this version, with an artifact fitted to other parts of both validation works: trust it more. A row has the options that lose least
on validation text: the defaults, or options that were searched for on other text; "defaults" of `lfps` are its paper's.
[dev/results.md](dev/results.md) has every form, [dev/replication.md](dev/replication.md) the texts.
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

QUESTIONS = """Each text hides the secret codes of eight names and asks for all of them, one after the other (the task `turns` of
`scripts/tasks.py`). The intervals resample the texts, not the questions.
"""
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
NAMES = {"handbook": "the Debian Administrator's Handbook", "python": "Python's documentation", "prose": "an FAQ on anarchism",
         "source": "the source of Mercurial", "dialogue": "quotes from IRC", "uuid": "random UUIDs", "bible": "the King James Bible"}


def of_blocks(document):
    """Say what a table of text was measured on."""
    works = document["works"]
    return f"{len(works)} blocks of {document['text']} text{of_works(works)}; {document['steps']} steps. {calibration(document)}\n"


def of_works(works):
    """Say from which works the blocks of a table are."""
    each = [f"{works.count(work)} of {NAMES[work]}" for work in dict.fromkeys(works)]
    return f", {' and '.join(each)}" if len(each) > 1 else f" of {NAMES[works[0]]}"


def calibration(document):
    """Say what the artifacts of a table were fitted to."""
    alike = {}
    for name, fit in document["calibration"].items():
        # Artifacts of other texts of the same works differ by the tokens that make a block whole.
        kinds = tuple((kind, round(tokens, -2)) for kind, tokens in fit["fitted"].items())
        alike.setdefault(kinds, []).append((name, fit["fitted"]))
    each = []
    for fits in alike.values():
        names = listed([f"`{name}`" for name, _ in fits])
        tokens = {kind: sorted({fitted[kind] for _, fitted in fits}) for kind in fits[0][1]}
        texts = [f"{counts[0]:,} {f'to {counts[-1]:,} ' if len(counts) > 1 else ''}tokens of {NAMES.get(kind, kind)}" for kind, counts in tokens.items()]
        each.append(f"{names} {'are each' if len(fits) > 1 else 'is'} fitted to {' and '.join(texts)}")
    return f"Artifacts: {'; '.join(each)}."


def all_results_page(found):
    """Return docs/dev/results.md."""
    parts = [ALL_HEADER, ALL_READING]
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
            parts += [f"### {document['length']:,} tokens, {document['questions']} questions{easy}{of_final}, 10% of the bytes\n",
                      f"{PROTOCOLS[document['protocol']]} {calibration(document)} Full attention answers {right}.\n", tables.question_table(document)]
    return wrapped("\n".join(parts)).rstrip("\n") + "\n"


def results_page(found):
    """Return docs/results.md."""
    parts = [HEADER]
    if headline(found)[0]:
        parts += ["## In short\n", "\n".join(f"- {said}" for said in summary(found)) + "\n", picture("loss", "Loss of each method against the bytes that it reads", "pictures/"), READING]
    for name, share in (("text", 0.2), ("long", 0.1)):
        if document := found[name]:
            parts += [f"## {document['length']:,} tokens, {100 * share:.0f}% of the bytes\n", of_blocks(document), tables.short_table(document, share, final_of(found, name))]
    for name in ("questions-4096", "questions-8192"):
        if document := found[name]:
            asked = QUESTIONS.split(" The intervals")[0].replace("one after the other", "one after the other, in decode steps")
            parts += [f"## {document['questions']} questions about {document['length']:,} tokens, 10% of the bytes\n",
                      f"{asked} {calibration(document)} Full attention answers {percent(document['full_needle_accuracy'])}.\n", tables.short_questions(document, final_of(found, name))]
    if found["claims"]:
        fits = found["claims"].get("calibration", {}).values()
        kinds = listed([NAMES[kind] for fit in fits for kind in fit["fitted"]])
        require_other_works(found["claims"])
        fitted = f"The artifact was fitted to {kinds}."
        parts += ["## What the papers claim\n", f"{CLAIMS_HERE.rstrip()} {fitted}\n", "<details><summary>The claims of the papers and how they fared</summary>\n", tables.claims_list(found), "</details>\n"]
    return wrapped("\n".join(parts)).rstrip("\n") + "\n"


def final_of(found, name):
    """Return the same table of final text, if there is one; stop if its artifact was fitted to one of the works."""
    document = found.get(f"final-{name}")
    for fitted, fit in (document or {"calibration": {}})["calibration"].items():
        if both := set(fit["fitted"]) & set(document.get("works") or ()):
            sys.exit(f"error: {document['table']}: {fitted} is fitted to {', '.join(both)}, which is measured")
    return document


def picture(name, words, folder):
    """Return the Markdown of a picture that has a light and a dark form."""
    return (f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}{name}-dark.svg">'
            f'<img src="{folder}{name}-light.svg" alt="{words}"></picture>\n')


def summary(found):
    """Say in a few sentences what was found."""
    said = []
    for document in [found[name] for name in ("text", "long") if found[name]]:
        lost, exact, more = [], [], []
        for share in tables.shares_of(document):
            rows = {row["method"]: row for row, _ in tables.chosen_rows(document, share)}
            best, ratio, ends = best_published(document, share)
            words = ("", "") if lost else (" nats", " of the bytes")
            lost.append(f"{rows['wpq']['kl']:.4f}{words[0]} with {100 * share:.0f}%{words[1]}")
            exact.append(f"{rows['topk']['kl']:.4f}")
            more.append(f"at {100 * share:.0f}% {tables.named(best)} {ratio:.1f} times{' as much' if not more else ''}{tables.spread(ends, 1)}")
        said.append(f"At {document['length']:,} tokens, `wpq` loses {listed(lost)} (an exact choice: {listed(exact)}). The best of the published methods lose more: {listed(more)}.")
    for name in ("questions-4096", "questions-8192"):
        if document := found[name]:
            said.append(question_sentence(document))
    if found["final-text"] and found["final-long"]:
        said.append(finally_said(found))
    return said


def finally_said(found):
    """Say in a few sentences what was found on final text."""
    lost, more = [], []
    for name, share in (("text", 0.2), ("long", 0.1)):
        document = final_of(found, name)
        best, ratio, ends = best_published(document, share)
        ours = tables.row_at(document, "wpq", "", share)
        words = ("", "") if lost else (" nats", " of the bytes")
        lost.append(f"{ours['kl']:.4f}{words[0]} with {100 * share:.0f}%{words[1]} at {document['length']:,} tokens")
        more.append(f"{tables.named(best)} {ratio:.1f} times{' as much' if not more else ''}{tables.spread(ends, 1)}")
    said = f"On three other works, opened once (*final text*), `wpq` loses {listed(lost)}. The best of the published methods lose more: {listed(more)}."
    if asked := final_of(found, "questions-4096"):
        rows = {row["method"]: row for row in best_answers(asked)}
        _, ends = intervals.paired(*(tables.scores(rows[method]) for method in ("wpq", best["method"])))
        apart = "the two differ" if ends[0] > 0 or ends[1] < 0 else "the two are not told apart"
        said += f" Of {asked['questions']} questions, {answers(asked)}: {apart}."
    return said


def require_other_works(document):
    """Stop if a table's own record of the fits says that an artifact was fitted to the work that it is measured on."""
    for work in set(document["works"]):
        for name, fit in document["calibration"].items():
            if name.startswith(f"for-{work}") and work in fit["fitted"]:
                sys.exit(f"error: {document['table']}: {name} is fitted to {work}, which is measured\nhint: measure the table again")
        if not any(name.startswith(f"for-{work}") for name in document["calibration"]):
            sys.exit(f"error: {document['table']}: no artifact is for {work}\nhint: measure the table again")


def headline(found):
    """Return the table of text that README shows, and the share of its bytes."""
    name, share = ("long", 0.1) if found["long"] else ("text", 0.2)
    return found[name], share


def listed(words):
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


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


def best_published(document, share):
    """Return the best of the papers' methods at a share of the bytes, how many times as much as wpq it loses, and the interval of that."""
    best, ours = tables.best_of_papers(document, share), tables.row_at(document, "wpq", "", share)
    return best, best["kl"] / ours["kl"], tables.ratio_interval(best["kl_by_block"], ours["kl_by_block"])


def ratio_sentence(document, share):
    """Say how much less wpq loses than the best of the papers' methods at a share of the bytes."""
    best, ratio, ends = best_published(document, share)
    return f"Of the published methods, `{best['method']}` loses least here, {ratio:.1f} times as much as `wpq`{tables.spread(ends, 1)}."


def answers(document):
    """Say what share of the questions full attention, wpq and the best of the published methods answer."""
    rows = best_answers(document)
    published = [row for row in rows if row["method"] in claims.PAPERS and not tables.is_buckets(row)]
    named = {row["method"]: row for row in rows if not tables.is_buckets(row)}

    def answered(row):
        own = tables.scores(row)
        return f"{tables.named(row)} {percent(row['needle_accuracy'])}" + tables.spread(intervals.mean_interval(own) if own else None, 1, 100)

    return (f"full attention answers {percent(document['full_needle_accuracy'])}, `wpq` at 10% of the bytes{answered(named['wpq'])[len('`wpq`'):]}, "
            f"and the best of the published methods, {answered(published[0])}")


def question_sentence(document):
    """Say what is asked, and what share is answered."""
    return f"Each of {document['questions']} questions asks for one of eight facts hidden in {document['length']:,} tokens: {answers(document)}."


def answers_sentence(document):
    """Say what share of the questions full attention and wpq answer."""
    full = document["full_needle_accuracy"]
    ours = next(row for row in best_answers(document) if row["method"] == "wpq")
    ends = intervals.mean_interval(tables.scores(ours))
    return f"Full attention answers {percent(full)} of {document['questions']} questions, `wpq` {percent(ours['needle_accuracy'])}{tables.spread(ends, 1, 100)}."


def final_sentence(document, asked, share):
    """Say what wpq and the best of the published methods lose and answer on final text."""
    ours, (best, ratio, ends) = tables.row_at(document, "wpq", "", share), best_published(document, share)
    said = f"On three other works, opened once, `wpq` loses {ours['kl']:.4f}, `{best['method']}` {ratio:.1f} times as much{tables.spread(ends, 1)}"
    if not asked:
        return f"{said}."
    rows = {row["method"]: row for row in best_answers(asked)}
    answered = listed([percent(rows[method]["needle_accuracy"]) for method in ("wpq", best["method"])])
    return f"{said}; they answer {answered} of {asked['questions']} questions, full attention {percent(asked['full_needle_accuracy'])}."


def best_answers(document):
    """Return for each method the row with the options that answer most, the best method first."""
    rows = [row for row in document["rows"] if row.get("needle_accuracy") is not None]
    best = [row for row, _ in tables.better(rows, lambda row: -row["needle_accuracy"])]
    return sorted(best, key=lambda row: -row["needle_accuracy"])


def example(document, share=0.1):
    """Return the worked example of docs/eval.md: the table, and what it says."""
    rows = {row["method"]: row for row in tables.example_rows(document, share)}
    ours, other = rows["wpq"], rows["selfindex"]
    difference, ends = intervals.paired(ours["kl_by_block"], other["kl_by_block"])
    verdict = "contains 0, so that the two are not told apart here" if ends[0] <= 0 <= ends[1] else f"does not contain 0, so `{'wpq' if difference < 0 else 'selfindex'}` loses less on this text"
    positions = {method: percent(np.mean(rows[method]["budget"])) for method in ("wpq", "topk")}
    each = ours["kl_by_block"]
    said = [f"`wpq` may choose {positions['wpq']} of the positions and `topk` {positions['topk']}: the index of `wpq` takes the other bytes.",
            f"The paired difference of `wpq` and `selfindex` is {difference:.4f} nats{tables.spread(ends, 4)}. The interval {verdict}. "
            "`--json` lists the differences of all pairs ([json.md](reference/json.md#eval)).",
            f"The block means of `wpq` range from {min(each):.4f} to {max(each):.4f} nats, so a few blocks say little."]
    about = (f"The figures are from [results/{document['table']}.json](results/{document['table']}.json): SmolLM2-135M, the last {document['steps'] // len(document['works'])} tokens of "
             f"each of {len(document['works'])} blocks of {document['length']:,} tokens{of_works(document['works'])}. `eval` prints `top-1` in a second table.")
    return "\n".join([wrapped(about), "", tables.example_table(document, share), wrapped("\n".join(f"- {of}" for of in said)) + "\n"])


def scale(document, share):
    """Say how often the most probable token stays the same with the losses of two methods."""
    rows = {row["method"]: row for row, _ in tables.chosen_rows(document, share)}
    ours, other = rows["wpq"], rows["selfindex"]
    return wrapped(f"On SmolLM2-135M at {document['length']:,} tokens, a method that loses a mean of {ours['kl']:.4f} nats keeps the most probable token in "
                   f"{percent(ours['top1_equal'])} of the steps, and one that loses {other['kl']:.4f} nats in {percent(other['top1_equal'])}.") + "\n"


def retrieval(document, easy):
    """Return what docs/eval.md says about questions: the share that each method answers, also of those that are fed with the prompt."""
    def answered(of):
        rows = [row for row in best_answers(of) if row["method"] in (*tables.EXAMPLE, "pqcache", "doublesparsity", "quest")]
        return listed([f"{tables.named(row)} {percent(row['needle_accuracy'])}" for row in rows])

    length = document["length"]
    said = (f"On SmolLM2-135M at 10% of the bytes, of {document['questions']} questions on texts of {length:,} tokens ([results](results/questions-{length}.json)), full attention answers "
            f"{percent(document['full_needle_accuracy'])}, {answered(document)}.")
    if easy:
        decoded = {row["method"]: row["needle_accuracy"] for row in best_answers(document)}
        if not all(row["needle_accuracy"] > decoded[row["method"]] for row in best_answers(easy) if row["method"] in (*tables.EXAMPLE, "pqcache", "doublesparsity", "quest")):
            sys.exit("error: the page says that every method answers more questions that are fed with the prompt\nhint: write what is true")
        said += (f" If the same questions are fed with the prompt, as in most papers, each of them answers more ([results](results/easy-{length}.json)): "
                 f"{answered(easy)}.")
    return wrapped(said) + "\n"


def speed_sentence(document, found):
    """Say how many tokens per second the longest context of the real model gives, with full attention and with methods at equal bytes."""
    rows = pictures.at_equal_bytes(document)
    longest = max(row["context"] for row in rows)
    rate = {row["method"]: row["tokens_per_s"] for row in rows if row["context"] == longest}
    lost = {row["method"]: tables.setting_of(row, found) for row in rows if row["context"] == longest}

    def loss(method):
        return f", KL {lost[method]['kl']:.4f}" if lost.get(method) else ""

    others = [f"`{method}` {rate[method]:.0f} ({rate[method] / rate['full']:.1f} times{loss(method)})" for method, _ in pictures.SPEEDS if method in rate and method != "full"]
    machine = next(run["machine"] for run in document["runs"] if "smollm2-135m" in run["models"])
    where = ", ".join(part.strip() for part in machine.split(",")[:2])
    peer = next((row["tokens_per_s"] for row in document["rows"] if row["program"] != "kvsmith" and row["context"] == longest and pictures.usual(row)), None)
    beside = f" (llama.cpp {peer:.0f})" if peer else ""
    said = (f"SmolLM2-135M on {where}, {longest:,} positions, tokens per second: full attention {rate['full']:.0f}{beside}; at {100 * pictures.SHARE:.0f}% of the bytes {listed(others)}. "
            "`streaming` keeps fixed positions.")
    drawn = {row["method"]: row for row in document["rows"] if (row["model"], row["weights"], row["context"]) == ("qwen3-0.6b", "bf16", 32768)}
    if drawn:
        same = ", on the same CPU," if machine == next(run["machine"] for run in document["runs"] if "qwen3-0.6b" in run["models"]) else ""
        times = listed([f"{drawn[method]['tokens_per_s'] / drawn['full']['tokens_per_s']:.1f} times with `{method}` (reading {100 * drawn[method]['bytes_read_fraction']:.0f}%)" for method in ("wpq", "selfindex")])
        said += (f" In the shape of Qwen3-0.6B with random weights{same} at 32K positions: {times}; the loss there is unmeasured.")
    return said


def equal_time_sentence(document):
    """Say what each index loses in the time of wpq at a budget of 6%."""
    wanted, found, full = tables.at_equal_time(document)
    ours, *others = [(index, here, ends) for index, (_, here, ends) in found.items() if here is not None]
    lost = {index: here for index, here, _ in (ours, *others)}
    if not lost["`wpq` around the mean"] < lost["`wpq`"] < lost["`selfindex`"]:
        sys.exit("error: docs/methods.md says what wpq, wpq around the mean and selfindex lose at equal time, and equal-time.json no longer does\nhint: write what is true")
    each = [f"{index} {here:.4f}{tables.spread(ends, 4)}" for index, here, ends in (ours, *others)]
    return (f"`wpq` takes {wanted:.0f} µs for one layer of SmolLM2-135M at {document['length']:,} positions and a budget of 6%, on one thread, and full attention {full:.0f} µs. "
            f"Given as much time as `wpq`, the indexes lose, in nats: {listed(each)} ([dev/wpq-notes.md](dev/wpq-notes.md#loss-at-equal-time)).")


def study_sentence(document):
    """Say whether calibration pays; stop if the table no longer shows it."""
    rows = {(row["method"], row["index"]): row for row in document["rows"]}

    def against(method, index, usual="calibrated"):
        row, first = rows[method, index], rows[method, usual]
        return row["kl"] / first["kl"], intervals.paired(row["kl_by_block"], first["kl_by_block"])[1]

    random = {method: against(method, "random codewords") for method in ("a2ats", "wpq")}
    nothing = against("wpq", "no data: random rotation, one bit a channel")
    own = {method: against(method, "fitted to the prompt") for method in ("a2ats", "wpq")}
    signs = against("selfindex", "calibrated", "centroids of the prompt alone (the paper)")
    priors = against("lfps", "no priors (the paper)")
    more = [random["a2ats"], random["wpq"], nothing, signs]
    undecided = [own["wpq"], priors]
    if not (all(ends[0] > 0 for _, ends in more) and own["a2ats"][1][1] < 0 and all(ends[0] <= 0 <= ends[1] for _, ends in undecided)):
        sys.exit("error: study-pays.json no longer shows what the page says of it\nhint: write what is true")
    return (f"Calibration pays: with random codewords `a2ats` loses {random['a2ats'][0]:.1f} times as much and `wpq` {random['wpq'][0]:.1f} times; a quantiser that knows "
            f"nothing of the model loses {nothing[0]:.1f} times as much as `wpq`. A fit to the prompt itself is better for `a2ats` alone, and would have to wait for every prompt. "
            "Calibrated centroids of `selfindex` lose more, so they are off by default; priors of `lfps` are undecided. The artifact was fitted to other chapters of both works.")


# Stages that measure the methods, which `--no-verdict` skips.
MEASURING = ("budgets", "verdict", "probe")


def times_sentence(document):
    """Say how long a calibration takes."""
    rows = {row["what"]: row for row in document["rows"]}
    planned, taken = rows["plan"], rows["calibrate"]

    def measuring(row):
        return sum(row["stages"][stage] for stage in MEASURING)

    hours, of_them = planned["seconds"] / 3600, measuring(planned) / 3600
    return (f"For Qwen3-0.6B, `plan` estimates {hours:.1f} hours on two threads of one core ({document['machine'].split(',')[0]}; {planned['tokens']:,} tokens, the default), {of_them:.1f} of them to measure "
            f"the methods (`--no-verdict` skips this, and with it the recommendation), {planned['memory_bytes'] / 1e9:.1f} GB of memory and {planned['disk_bytes'] / 1e9:.1f} GB of disk. "
            f"SmolLM2-135M with {taken['tokens']:,} tokens took {taken['seconds'] / 60:.0f} minutes, {measuring(taken) / 60:.0f} of them to measure.")


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
    made = {"losses": None, "speeds": None, "decode": None, "decode-all": None, "times": found["times"] and wrapped(times_sentence(found["times"]), README_WIDTH) + "\n"}
    document, share = headline(found)
    if document:
        require_other_works(document)
        about = (f"{len(document['works'])} blocks of {document['length']:,} tokens of {' and '.join(NAMES[work] for work in dict.fromkeys(document['works']))}, {100 * share:.0f}% of the bytes; "
                 f"fitted to other works. [All rows](docs/dev/results.md).")
        sentences = [ratio_sentence(document, share)]
        if asked := found["questions-4096"]:
            sentences.append(answers_sentence(asked))
        if final := final_of(found, "long"):
            sentences.append(final_sentence(final, final_of(found, "questions-4096"), share))
        made["losses"] = "\n".join([wrapped(about, README_WIDTH), "", loss_table(found), wrapped(" ".join(sentences), README_WIDTH) + "\n"])
    if found["decode"]:
        made["decode"] = tables.decode_table(found["decode"], found, pictures.usual)
        made["decode-all"] = tables.decode_table(found["decode"], found)
        words = "Tokens per second against the length of the context, for full attention and for methods that read a tenth of the cache"
        made["speeds"] = "\n".join([picture("speed", words, "docs/pictures/"), wrapped(speed_sentence(found["decode"], found), README_WIDTH) + "\n"])
    made["equal-time-said"] = found["equal-time"] and wrapped(equal_time_sentence(found["equal-time"])) + "\n"
    made["study-pays-said"] = found["study-pays"] and wrapped(study_sentence(found["study-pays"])) + "\n"
    made["scale"] = document and scale(document, share)
    made["example"] = found["text"] and example(found["text"])
    made["retrieval"] = found["questions-4096"] and retrieval(found["questions-4096"], found["easy-4096"])
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
    drawn = {PICTURES / name: text for name, text in pictures.drawn(found, headline(found)[0]).items()}
    schema = {SCHEMA: json_schema.schema(JSON_PAGE.read_text(encoding="utf-8"))}
    return {RESULTS: results_page(found), ALL_RESULTS: all_results_page(found)} | pages | drawn | schema


def main():
    names = {name for name, _ in TEXTS} | {"claims", "questions-4096", "questions-8192", "easy-4096", "final-questions-4096", "decode", "times", *OTHERS}
    found = {name: documents.load(name) for name in names}
    for page, text in rendered(found).items():
        if "--check" not in sys.argv[1:]:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or text != page.read_text(encoding="utf-8"):
            sys.exit(f"error: {page.relative_to(ROOT)} differs from what docs/results/*.json or docs/reference/json.md says\nhint: run make pages")


if __name__ == "__main__":
    main()
