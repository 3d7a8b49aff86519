"""Sentences of the pages that are made from docs/results/*.json.

A sentence that a table would no longer support stops the script.
"""

import re
import sys
import textwrap

import numpy as np

import claims
import intervals
import pictures
import tables
from tables import percent

NAMES = {"handbook": "the Debian Administrator's Handbook", "python": "Python's documentation", "prose": "an FAQ on anarchism",
         "source": "the source of Mercurial", "dialogue": "quotes from IRC", "uuid": "random UUIDs", "bible": "the King James Bible"}


def listed(words):
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


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


def of_works(works):
    """Say from which works the blocks of a table are."""
    each = [f"{works.count(work)} of {NAMES[work]}" for work in dict.fromkeys(works)]
    return f", {' and '.join(each)}" if len(each) > 1 else f" of {NAMES[works[0]]}"


def require_other_works(document):
    """Stop if a table's own record of the fits says that an artifact was fitted to the work that it is measured on.

    On final text, no artifact may be fitted to any of its works.
    """
    is_final, fits = document["table"].startswith("final"), document["calibration"]
    for work in set(document.get("works") or [document["haystack"].split("-")[0]]):
        used = [name for name in fits if is_final or name.startswith(f"for-{work}")]
        for name in used:
            if work in fits[name]["fitted"]:
                sys.exit(f"error: {document['table']}: {name} is fitted to {work}, which is measured\nhint: measure the table again")
        if not used:
            sys.exit(f"error: {document['table']}: no artifact is for {work}\nhint: measure the table again")


def final_of(found, name):
    """Return the same table of final text, if there is one."""
    document = found.get(f"final-{name}")
    if document:
        require_other_works(document)
    return document


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
            more.append(f"at {100 * share:.0f}% {times_as_much(best, ratio, ends, not more)}")
        said.append(f"At {document['length']:,} tokens, `wpq` loses {listed(lost)} (an exact choice: {listed(exact)}). The best of the published methods lose more: {listed(more)}.")
    if found["questions-4096"]:
        said.append(question_sentence(found["questions-4096"]))
    if found["final-text"] and found["final-long"]:
        said.append(final_summary(found))
    return said


def final_summary(found):
    """Say in a few sentences what was found on final text."""
    lost, more = [], []
    for name, share in (("text", 0.2), ("long", 0.1)):
        document = final_of(found, name)
        best, ratio, ends = best_published(document, share)
        words = ("", "") if lost else (" nats", " of the bytes")
        lost.append(f"{tables.row_at(document, 'wpq', '', share)['kl']:.4f}{words[0]} with {100 * share:.0f}%{words[1]} at {document['length']:,} tokens")
        more.append(times_as_much(best, ratio, ends, not more))
    said = f"On other works, opened once (*final text*), `wpq` loses {listed(lost)}. The best of the published methods lose more: {listed(more)}."
    if asked := final_of(found, "questions-4096"):
        said += f" Of {asked['questions']} questions about one of them, {answers(asked)}: {apart(asked)}."
    return said


def apart(document):
    """Say whether wpq and the best of the published methods answer different shares of the questions."""
    _, ends = intervals.paired(tables.scores(best_answer(document, ["wpq"])), tables.scores(best_answer(document)))
    return "the two differ" if ends[0] > 0 or ends[1] < 0 else "the two are not told apart"


def best_published(document, share):
    """Return the best of the papers' methods at a share of the bytes, how many times as much as wpq it loses, and the interval of that."""
    best, ours = tables.best_of_papers(document, share), tables.row_at(document, "wpq", "", share)
    return best, best["kl"] / ours["kl"], tables.ratio_interval(best["kl_by_block"], ours["kl_by_block"])


def times_as_much(best, ratio, ends, is_first):
    """Say how many times as much as wpq a method loses."""
    return f"{tables.named(best)} {ratio:.1f} times{' as much' if is_first else ''}{tables.spread(ends, 1)}"


def ratio_sentence(document, share):
    """Say how much less wpq loses than the best of the papers' methods at a share of the bytes."""
    best, ratio, ends = best_published(document, share)
    return f"Of the published methods, `{best['method']}` loses least here, {ratio:.1f} times as much as `wpq`{tables.spread(ends, 1)}."


def final_sentence(document, asked, share):
    """Say what wpq and the best of the published methods lose and answer on final text."""
    ours, (best, ratio, ends) = tables.row_at(document, "wpq", "", share), best_published(document, share)
    said = f"On other works, opened once, `wpq` loses {ours['kl']:.4f}, `{best['method']}` {ratio:.1f} times as much{tables.spread(ends, 1)}"
    if not asked:
        return f"{said}."
    each = listed([percent(best_answer(asked, [method])["needle_accuracy"]) for method in ("wpq", best["method"])])
    return f"{said}; they answer {each} of {asked['questions']} questions about one, full attention {percent(asked['full_needle_accuracy'])}."


def best_answers(document):
    """Return for each method the row with the options that answer most, the best method first."""
    rows = [row for row in document["rows"] if row.get("needle_accuracy") is not None]
    best = [row for row, _ in tables.better(rows, lambda row: -row["needle_accuracy"])]
    return sorted(best, key=lambda row: -row["needle_accuracy"])


def best_answer(document, methods=claims.PAPERS):
    """Return the row of the method that answers most of these, our form of a2ats left out."""
    return next(row for row in best_answers(document) if row["method"] in methods and not tables.is_buckets(row))


def answered(row):
    """Say what share of the questions a row answers."""
    own = tables.scores(row)
    return percent(row["needle_accuracy"]) + tables.spread(intervals.mean_interval(own) if own else None, 1, 100)


def answers(document):
    """Say what share of the questions full attention, wpq and the best of the published methods answer."""
    best = best_answer(document)
    return (f"full attention answers {percent(document['full_needle_accuracy'])}, `wpq` at 10% of the bytes {answered(best_answer(document, ['wpq']))}, "
            f"and the best of the published methods, {tables.named(best)} {answered(best)}")


def question_sentence(document):
    """Say what is asked, and what share is answered."""
    return f"Of {document['questions']} questions about facts hidden in {document['length']:,} tokens, {answers(document)}."


def longer_questions(document):
    """Say what share of the questions about longer texts is answered."""
    return f"Of {document['questions']} questions about {document['length']:,} tokens, {answers(document)}: paired by text, {apart(document)}."


def answers_sentence(document):
    """Say what share of the questions full attention and wpq answer."""
    return f"Full attention answers {percent(document['full_needle_accuracy'])} of {document['questions']} questions, `wpq` {answered(best_answer(document, ['wpq']))}."


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


def prompts_sentence(document):
    """Say how fast the parts of a prompt are in bf16, compared with f32 and with PyTorch in the faster of its types."""
    times = {(row["program"], row["precision"], row["part"], row["tokens"], row["threads"]): row["seconds"] for row in document["rows"]}
    settings = sorted({key[3:] for key in times})

    def faster(part, peers):
        """Say how many times as long the fastest of these takes as kvsmith in bf16."""
        ratios = [min(times[program, precision, part, *at] for program, precision in peers) / times["kvsmith", "bf16", part, *at] for at in settings]
        low, high = (f"{end:.1f}" for end in (min(ratios), max(ratios)))
        return low if low == high else f"{low} to {high}"

    (project, their_project), (attend, their_attend) = ([faster(part, peers) for peers in ([("kvsmith", "f32")], [("PyTorch", "f32"), ("PyTorch", "bf16")])]
                                                        for part in ("projections", "attention"))
    tokens, threads = ({at[i] for at in settings} for i in (0, 1))
    return (f"`--precision bf16` multiplies prompts in bf16, for weights in bf16, on processors with AVX512-BF16. Compared with it, on {document['machine'].split(',')[0]} (a layer of Llama-3.1-8B, "
            f"{listed([f'{n:,}' for n in sorted(tokens)])} tokens, {listed([str(n) for n in sorted(threads)])} threads), f32 takes {project} times as long in projections and {attend} in attention, "
            f"PyTorch (its faster type) {their_project} and {their_attend} ([prompts.json](results/prompts.json)). Its loss is unmeasured.")


def speed_sentence(document, found):
    """Say how many tokens per second the longest context of the real model gives, with full attention and with methods at equal bytes."""
    rows = pictures.at_equal_bytes(document)
    longest = max(row["context"] for row in rows)
    rate = {row["method"]: row["tokens_per_s"] for row in rows if row["context"] == longest}
    lost = {row["method"]: tables.setting_of(row, found) for row in rows if row["context"] == longest}

    def loss(method):
        return f", KL {lost[method]['kl']:.4f}" if lost.get(method) else ""

    others = [f"`{method}` {rate[method]:.0f} ({rate[method] / rate['full']:.1f} times{loss(method)})" for method, _ in pictures.SPEEDS if method in rate and method != "full"]
    machine = next(run["machine"] for run in document["runs"] if pictures.REAL in run["models"])
    where = ", ".join(part.strip() for part in machine.split(",")[:2])
    peer = next((row["tokens_per_s"] for row in pictures.of_peer(document) if row["context"] == longest), None)
    beside = f" (llama.cpp {peer:.0f})" if peer else ""
    said = (f"SmolLM2-135M on {where}, {longest:,} positions, tokens per second: full attention {rate['full']:.0f}{beside}; at {100 * pictures.SHARE:.0f}% of the bytes {listed(others)}. "
            "`streaming` keeps fixed positions.")
    drawn = {row["method"]: row for row in document["rows"] if (row["program"], row["model"], row["weights"], row["context"]) == ("kvsmith", "qwen3-0.6b", "bf16", 32768)}
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
