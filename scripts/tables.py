"""Tables of the pages in docs/ and of README.md, in Markdown, from the documents in docs/results."""

import numpy as np

from claims import BYPASS, NO_BYPASS, OURS, PAPERS, SEARCHED, judged, percentage
from intervals import FEWEST, fits_interval, interval, mean_interval, paired, picked, ratio_interval

# What a form is called in a table, where its name would not do.
LABELS = {BYPASS: "bypass", NO_BYPASS: "no bypass"}


def grid(head, rows):
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def percent(value):
    return "" if value is None else f"{100 * value:.1f}%"


def spread(interval, digits, scale=1):
    """Return an interval in parentheses, or nothing."""
    return "" if interval is None else " ({:.{d}f} to {:.{d}f})".format(*(scale * end for end in interval), d=digits)


def label(row):
    """Name the method and form of a row; a tuned row also says its options."""
    form = LABELS.get(row["form"], row["form"])
    if form.endswith("tuned") or SEARCHED in form:
        word = "tuned: " if form.endswith("tuned") else SEARCHED
        form = f"{word}`{row['options']}`" if row["options"] else "tuned: defaults"
    return f"`{row['method']}`" + (f" ({form})" if form else "")


def kl_interval(row):
    """Return the interval of a row's mean KL, over fits too if several were measured."""
    if "kl_by_fit" in row:
        return fits_interval(row["kl_by_fit"])
    return mean_interval(row["kl_by_block"])


def decimals(key, digits):
    return lambda row: f"{row[key]:.{digits}f}" if row.get(key) is not None else ""


# Column heads of tables of text, and their cells.
TEXT_COLUMNS = {
    "KL, nats (95%)": lambda row: f"{row['kl']:.4f}" + spread(kl_interval(row), 4),
    "median block": lambda row: f"{np.median(row['kl_by_block']):.4f}",
    "largest block": lambda row: f"{max(row['kl_by_block']):.4f}",
    "99th percentile": decimals("kl_p99", 3),
    "equal top-1": lambda row: percent(row.get("top1_equal")),
    "perplexity ratio": decimals("perplexity_ratio", 3),
    "recall": decimals("recall", 3),
    "mass": decimals("mass", 3),
    "index bits": decimals("index_bits_per_token", 0),
}


def filled(head, rows):
    """Return a table without the columns that are empty in every row."""
    used = [i for i in range(len(head)) if any(row[i] != "" for row in rows)]
    return grid([head[i] for i in used], [[row[i] for i in used] for row in rows])


def budget_of(row):
    """Return the budget of a row: that of each work or fit, or their range if there are more than two."""
    budgets = row["budget"] if isinstance(row["budget"], list) else [row["budget"]]
    if len(budgets) > 2:
        return f"{min(budgets):.4f} to {max(budgets):.4f}"
    return ", ".join(f"{budget:.4f}" for budget in budgets)


def text_table(document):
    """Return the rows of a table of text, by share of the bytes; a row that was not measured says why."""
    rows = []
    for row in sorted(document["rows"], key=lambda row: row["share"]):
        if row["form"] == "tuned" and not row["options"]:
            # The same as the row with the defaults.
            continue
        start = [percent(row["share"]), label(row)]
        if row["budget"] is None:
            rows.append([*start, "", row.get("why") or f"at least {percent(row['least'])}", *[""] * (1 + len(TEXT_COLUMNS))])
            continue
        cells = [cell(row) for cell in TEXT_COLUMNS.values()]
        rows.append([*start, budget_of(row), percent(row["bytes_read_fraction"]), percent(row.get("bytes_moved_fraction")), *cells])
    return filled(["bytes", "method", "budget", "read", "moved", *TEXT_COLUMNS], rows) + missing_rows(document)


def missing_rows(document):
    """List what was not measured, with the reasons."""
    rows = document.get("missing") or []
    return "".join(f"\nNot in this table: `{row['method']}`{' ' + row['form'] if row.get('form') else ''}, because {row['why']}.\n" for row in rows)


def best_of_papers(document, share):
    """Return the row of the papers' methods, in any form but ours of a2ats, that loses least at a share of the bytes."""
    rows = [row for row in document["rows"] if row["method"] in PAPERS and not is_buckets(row) and row["share"] == share and "kl_by_block" in row]
    return min(rows, key=lambda row: row["kl"], default=None)


def is_buckets(row):
    """Tell whether a row is of our form of a2ats."""
    return "buckets" in row["form"] + row.get("options", "")


def is_choice(row):
    """Tell whether a row has the defaults or options that were searched for, and is no ablation."""
    form = row["form"]
    return form in ("", NO_BYPASS, "buckets") or form.endswith("tuned") or SEARCHED in form


def better(rows, key):
    """Return, for each method (a2ats with buckets counts as one), the best of its rows by a key, and its other rows; of `wpq`, the row with the defaults."""
    found = {}
    for row in rows:
        if is_choice(row) and not (row["method"] == "wpq" and row["form"]):
            found.setdefault((row["method"], is_buckets(row)), []).append(row)
    return [(min(each, key=key), each) for each in found.values()]


def chosen_rows(document, share):
    """Return for each method at a share of the bytes the row that loses least and one to compare it with; the least loss comes first.

    That is the row with the most usual options: the defaults, or of `lfps` the paper's form.
    """
    rows = [row for row in document["rows"] if row["share"] == share and "kl_by_block" in row]
    found = []
    for best, each in better(rows, lambda row: row["kl"]):
        usual = row_at(document, best["method"], BYPASS, share) or next((row for row in each if row["form"] in ("", "buckets")), best)
        found.append((best, usual))
    return sorted(found, key=lambda pair: pair[0]["kl"])


def named(row):
    """Name the method of a row for users, with its options unless they are the defaults."""
    options = row.get("options") or ("--positions buckets" if row["form"] == "buckets" else "")
    options = "" if options == NO_BYPASS else options
    return f"`{row['method']}`" + (f" (`{options}`)" if options else "")


def short_table(document, share, final):
    """Return the user's table of losses at a share of the bytes; `final` is the same table of final text, or None."""
    others = {named(row): row for row in final["rows"] if row["share"] == share and "kl" in row} if final else {}
    rows, found = [], chosen_rows(document, share)
    for row, usual in found[:ROWS]:
        other = others.get(named(row))
        rows.append([named(row), percent(row["bytes_read_fraction"]), percent(row.get("bytes_moved_fraction")), f"{row['kl']:.4f}" + spread(kl_interval(row), 4),
                     percent(row.get("top1_equal")), decimals("perplexity_ratio", 3)(row), decimals("kl", 4)(usual) if usual["kl"] != row["kl"] else "",
                     f"{other['kl']:.4f}" + spread(kl_interval(other), 4) if other else ""])
    more = f"\nOn validation text, these lose more: {', '.join(named(row) for row, _ in found[ROWS:])}.\n" if found[ROWS:] else ""
    return filled(["method", "read", "moved", "KL, nats (95%)", "same top token", "perplexity ratio", "KL with the defaults", "KL on final text"], rows) + more


# Most rows of the user's tables of losses.
ROWS = 6
# Methods that answer less are named below the user's table of questions.
FEW_ANSWERS = 0.2


def short_questions(document, final):
    """Return the user's table of questions; `final` is the same table of final text, or None."""
    def answered(row):
        own = scores(row)
        ends = mean_interval(own) if own else (row.get("intervals") or {}).get("needle_accuracy")
        return percent(row["needle_accuracy"]) + spread(ends, 1, 100)

    def asked(of):
        return [row for row in of["rows"] if row.get("needle_accuracy") is not None]

    others = {named(row): row for row in asked(final)} if final else {}
    rows, few = [], []
    found = better(asked(document), lambda row: -row["needle_accuracy"])
    for row, _ in sorted(found, key=lambda each: -each[0]["needle_accuracy"]):
        if row["needle_accuracy"] < FEW_ANSWERS:
            few.append(named(row))
            continue
        other = others.get(named(row))
        rows.append([named(row), percent(row["bytes_read_fraction"]), answered(row), answered(other) if other else ""])
    rest = f"\nLess than {100 * FEW_ANSWERS:.0f}% on validation text: {', '.join(few)}.\n" if few else ""
    return filled(["method", "read", "answered (95%)", "on final text"], rows) + rest


# Methods of the worked example in docs/eval.md.
EXAMPLE = ("topk", "wpq", "lfps", "selfindex", "snapkv")


def example_rows(document, share):
    """Return the rows of the worked example: each method in the form whose table column says the defaults, least loss first."""
    rows = [row for method in EXAMPLE for row in document["rows"]
            if (row["method"], row["share"]) == (method, share) and row["form"] in ("", NO_BYPASS) and "kl_by_block" in row]
    return sorted(rows, key=lambda row: row["kl"])


def example_table(document, share):
    """Return what `eval` prints for some methods at a share of the bytes."""
    rows = []
    for row in example_rows(document, share):
        ends = mean_interval(row["kl_by_block"])
        rows.append([f"`{row['method']}`", budget_of(row), percent(row["bytes_read_fraction"]), f"{row['kl']:.4f}", "-".join(f"{end:.4f}" for end in ends) if ends else "",
                     *(percent(row.get(key)) for key in ("recall", "mass", "output_error", "top1_equal"))])
    return filled(["method", "budget", "read", "KL nats", "95% interval", "recall", "mass", "error", "top-1"], rows)


def shares_of(document):
    return sorted({row["share"] for row in document["rows"]})


def row_at(document, method, form, share):
    rows = [row for row in document["rows"] if (row["method"], row["form"], row["share"]) == (method, form, share)]
    return rows[0] if rows and "kl_by_block" in rows[0] else None


def ratio_table(document):
    """Compare wpq with the method of the papers, in any form, that loses least at each share of the bytes."""
    rows = []
    for share in shares_of(document):
        best, ours = best_of_papers(document, share), row_at(document, "wpq", "", share)
        if best and ours:
            interval = ratio_interval(ours["kl_by_block"], best["kl_by_block"])
            rows.append([percent(share), label(best), f"{best['kl']:.4f}", f"{ours['kl']:.4f}", f"{ours['kl'] / best['kl']:.2f}" + spread(interval, 2)])
    return grid(["bytes", "best method of the papers", "its KL", "KL of `wpq`", "ratio (95%, paired)"], rows)


def claim_table(tables):
    rows = []
    for row in judged(tables):
        reads = ", ".join(percent(share) or "?" for share in row["reads"])
        if "p" not in row:
            rows.append([row["source"], row["claim"], "not measured: one of the two cannot read so little", "", reads, "", "", "", ""])
            continue
        less, more = row["kl"]
        one_block = "" if row["largest"] <= 0.5 else "all" if row["largest"] >= 1 else f"{100 * row['largest']:.0f}%"
        rows.append([row["source"], row["claim"], f"**{row['verdict']}**", row["after_holm"], reads, f"{less:.4f}, {more:.4f}",
                     f"{row['difference']:.4f}" + spread(row["interval"], 4), f"{row['median']:.4f}", one_block])
    return filled(["source", "claim", "here", "after Holm", "read by the first, by the second", "KL of the first, of the second",
                   "difference (95%, paired)", "median block", "share of the largest block"], rows)


def claims_list(tables):
    """Return the claims of the papers about their own parts, and the verdicts after the correction for the number of claims."""
    rows = [[row["source"], row["claim"], row.get("after_holm", "not measured")] for row in judged(tables) if row["source"] != OURS and "`quest`" not in row["claim"]]
    return grid(["source", "claim", "here"], rows)


def setting_of(row, tables):
    """Return the row of the table whose setting a row of speeds has, or None.

    A row that reads another share here, on random rows, has none: its loss does not belong to this speed.
    """
    share = row.get("share")
    if share is None or abs(row["bytes_read_fraction"] - share) > 0.1 * share:
        return None
    document = tables.get(row["table"]) or {"rows": ()}
    found = [of for of in document["rows"] if (of["method"], of["share"]) == (row["method"], share) and of["form"] in ("", NO_BYPASS) and of["budget"] is not None]
    # A table that was measured anew has other budgets.
    return next((of for of in found if abs(np.mean(of["budget"]) - row["budget"]) <= 1e-6), None)


def answered_at(row, tables):
    """Return the share of questions about a text of this length that the method answers at the setting of a row of speeds, to 1% of the budget, or None."""
    asked = tables.get(f"questions-{row['context']}")
    if not asked or row["method"] == "full":
        return asked and asked["full_needle_accuracy"]
    found = [of for of in asked["rows"] if (of["method"], of["share"]) == (row["method"], row.get("share")) and of["form"] in ("", NO_BYPASS) and of["budget"] is not None]
    return next((of["needle_accuracy"] for of in found if abs(np.mean(of["budget"]) / row["budget"] - 1) <= 0.01), None)


def decode_table(document, tables, shown=lambda row: True):
    """Return tokens per second of whole models, with the loss at the same setting where it is known; with rounded weights, of some methods."""
    rows = []
    for row in filter(shown, document["rows"]):
        ours, exact = row["program"] == "kvsmith", row["weights"] == "bf16"
        if not exact and row["method"] not in ("full", "wpq", "selfindex", "streaming"):
            continue
        reads = percent(row.get("bytes_read_fraction")) if row["method"] != "full" else "100%"
        rate = f"{row['tokens_per_s']:.1f} ({min(row['rounds']):.1f} to {max(row['rounds']):.1f})"
        # The losses were measured with weights in bf16.
        measured = setting_of(row, tables) if exact else None
        is_real = row["model"] == "smollm2-135m"
        loss = "0" if row["method"] == "full" and exact and ours and is_real else decimals("kl", 4)(measured or {})
        is_known = exact and ours and is_real and (measured or row["method"] == "full")
        answered = percent(answered_at(row, tables) if is_known else None)
        rows.append([row["model"] if is_real else f"{row['model']}, random", row["weights"], f"{row['context']:,}", f"`{row['method']}`" if ours else f"{row['program']}, cache in {row['cache']}", reads, loss,
                     answered, rate])
    head = ["model", "weights", "positions", "method", "read", "KL, nats", "questions answered", "tokens/s (range)"]
    each = {}
    how = {"llama": "the better of flash attention on and off", "trans": "the better of its two caches"}
    for run in document["runs"]:
        peers = " and ".join(f"{peer} ({how[peer[:5]]})" for peer in run.get("peers", ()))
        beside = f", beside {peers}" if peers else ""
        each.setdefault(f"{run['program']}, {run['machine']}, median of {run['rounds']} rounds{beside}", []).extend(run["models"])
    runs = "; ".join(f"{', '.join(models)}: {said}" for said, models in each.items())
    return f"{runs}.\n\n" + filled(head, rows)


# What the project asked of itself: a name, the rows that are compared as (model, weights, positions, method, share), and the least ratio of the first to the
# second. The program is kvsmith, or llama.cpp with its faster cache where the method is named so.
AIMS = (
    ("full attention over llama.cpp, SmolLM2-135M in bf16", [(("smollm2-135m", "bf16", n, "full", None), ("smollm2-135m", "bf16", n, "llama.cpp", None), least) for n, least in ((1024, 1.05), (4096, 1.2), (8192, 1.2))]),
    ("`wpq` over full attention", [(("smollm2-135m", "bf16", 8192, "wpq", 0.05), ("smollm2-135m", "bf16", 8192, "full", None), 1.4)]),
    ("`wpq` over full attention, weights in q8", [(("smollm2-135m", "q8", 8192, "wpq", 0.05), ("smollm2-135m", "q8", 8192, "full", None), 1.5)]),
    ("`wpq` with weights in q8 over full attention with weights in bf16", [(("smollm2-135m", "q8", 8192, "wpq", 0.05), ("smollm2-135m", "bf16", 8192, "full", None), 2.0)]),
    ("`wpq` over `streaming`, which reads the same rows and chooses nothing", [(("smollm2-135m", "bf16", n, "wpq", share), ("smollm2-135m", "bf16", n, "streaming", share), 0.9) for n, share in ((4096, 0.1), (8192, 0.05))]),
    ("`wpq` over llama.cpp, shape of Llama-3.2-1B, q8", [(("llama-3.2-1b", "q8", n, "wpq", None), ("llama-3.2-1b", "q8", n, "llama.cpp", None), least) for n, least in ((32768, 3.0), (131072, 5.0))]),
)


def decode_aims(document):
    """Return what the speeds of whole models were to reach, and what they reach."""
    def rate(model, weights, positions, method, share):
        program, method = ("llama.cpp", "full") if method == "llama.cpp" else ("kvsmith", method)
        found = [row["tokens_per_s"] for row in document["rows"]
                 if (row["program"], row["model"], row["weights"], row["context"], row["method"]) == (program, model, weights, positions, method) and (share is None or row.get("share") == share)]
        return max(found, default=None)

    rows = []
    for name, compared in AIMS:
        for first, second, least in compared:
            rates = rate(*first), rate(*second)
            if None not in rates:
                ratio = rates[0] / rates[1]
                share = f", {100 * first[4]:.0f}%" if first[4] else ""
                rows.append([name, f"{first[2]:,}{share}", f"{rates[0]:.1f} / {rates[1]:.1f}", f"{ratio:.2f}", f"{least}", "yes" if ratio >= least else "no"])
    # `wpq` is never to be below full attention: the row that comes closest to it, or falls furthest below.
    each = []
    for row in document["rows"]:
        full = rate(row["model"], row["weights"], row["context"], "full", None)
        if (row["program"], row["method"]) == ("kvsmith", "wpq") and full:
            each.append((row["tokens_per_s"] / full, row, full))
    if each:
        ratio, row, full = min(each, key=lambda of: of[0])
        share = row.get("share") or row["budget"]
        rows.append([f"`wpq` over full attention, the least of {len(each)} ratios: {row['model']}, {row['weights']}", f"{row['context']:,}, {100 * share:.0f}%",
                     f"{row['tokens_per_s']:.1f} / {full:.1f}", f"{ratio:.2f}", "1.0", "yes" if ratio >= 1 else "no"])
    return filled(["tokens/s", "positions", "measured", "ratio", "aim", "met"], rows)


def scores(row):
    """Return the mean scores of the lines of a row of questions, or None for a row of an earlier version, which lacks them."""
    return [float(np.mean(line)) for line in row["scores_by_line"]] if "scores_by_line" in row else None


def question_table(document):
    """Return the table of questions: the share of right answers, and what topk answers more."""
    exact = next((row for row in document["rows"] if row["method"] == "topk" and row.get("needle_accuracy") is not None), None)
    rows = []
    for row in document["rows"]:
        if row["budget"] is None:
            rows.append([label(row), "", row.get("why") or f"at least {percent(row['least'])}", "", "", ""])
            continue
        own = scores(row)
        right = percent(row["needle_accuracy"])
        right += spread(mean_interval(own) if own else (row.get("intervals") or {}).get("needle_accuracy"), 1, 100)
        less = ""
        if exact and row is not exact:
            less = f"{100 * (exact['needle_accuracy'] - row['needle_accuracy']):.1f}"
            if own:
                less += spread(paired(scores(exact), own)[1], 1, 100)
        rows.append([label(row), budget_of(row), percent(row["bytes_read_fraction"]), percent(row.get("bytes_moved_fraction")), right, less])
    return filled(["method", "budget", "read", "moved", "right (95%)", "points below `topk` (95%, paired)"], rows) + missing_rows(document)


def study_table(document):
    """Return a part of the study: the mean KL of each index, what it loses more than the first one of its method, and the mean on each work."""
    works = list(document["rows"][0]["kl_by_work"])
    rows, first = [], {}
    # The rows of a method stand together.
    methods = list(dict.fromkeys(row["method"] for row in document["rows"]))
    for row in sorted(document["rows"], key=lambda row: methods.index(row["method"])):
        method, cell = row["method"], f"{row['kl']:.4f}"
        reference = first.setdefault(method, row)
        if reference is not row:
            cell += spread(paired(row["kl_by_block"], reference["kl_by_block"])[1], 4)
        rows.append([f"`{method}`" if reference is row else "", row["index"], percent(row["bytes_read_fraction"]), cell,
                     *(f"{row['kl_by_work'][work]:.4f}" for work in works)])
    blocks = len(document["rows"][0]["kl_by_block"])
    about = (f"{blocks} blocks of {document['length']:,} tokens, as many of each work. KL: the mean, in nats, and in parentheses the 95% interval of the\n"
             "paired difference from the first index of the method (above 0: it loses more).\n\n")
    return about + grid(["method", "index", "read", "KL", *(f"on {work}" for work in works)], rows)


def bits_table(document):
    """Return the KL of codes of 32 and 64 bits at equal bytes, and the ratios of the blocks."""
    rows = []
    for share in shares_of(document):
        long, short = (row_at(document, "wpq", form, share) for form in ("", "32 bits"))
        ratios = sorted(np.array(short["kl_by_block"]) / long["kl_by_block"])
        rows.append([percent(share), f"{long['kl']:.4f}", f"{short['kl']:.4f}", f"{short['kl'] / long['kl']:.1f}", ", ".join(f"{ratio:.2f}" for ratio in ratios)])
    return grid(["bytes", "KL with 64 bits", "with 32 bits", "times as much", "by block, ascending"], rows)


# Bits per number of a format of rows, scales included, for heads of 64 channels.
BITS = {"f32": 32, "f16": 16, "bf16": 16, "int8": 8.25, "int4+4": 8, "int4": 4.5, "int2": 2.5}
# How many rows of a cache are in 16 bits whatever its format: sinks and window of a format of few bits, rows of the prompt in `2bit`.
IN_16_BITS = {"int4+4": 68, "int4": 68, "int2": 68, "2bit": 64}

# Formats whose rows are turned before they are rounded, and the words for what turns keys.
TURNED = ("int4+4", "int4", "int2")
MAPS = {"hadamard": "Hadamard", "balanced": "fitted", "orthogonal": "fitted, as OSCAR"}


def format_table(document):
    """Return what full attention loses with caches of each format, the least bits last."""
    rows = []
    for row in document["rows"]:
        pair = dict(half.split("=") for half in row["kv"].split(",")) if "=" in row["kv"] else {"k": row["kv"], "v": row["kv"]}
        # Keys in 2 bits have signs as well.
        halves = [3.5 if row["kv"] == "2bit" else BITS[half] for half in pair.values()]
        shares = [IN_16_BITS.get(half, 0) / document["length"] for half in pair.values()]
        bits = np.mean(halves), np.mean([bits + (16 - bits) * share for bits, share in zip(halves, shares)])
        rows.append([f"`{row['kv']}`", MAPS[row["maps"]] if any(half in TURNED for half in pair.values()) else "", *(f"{number:.4g}" for number in bits), f"{row['kl']:.5f}" + spread(kl_interval(row), 5), f"{row['kl_p99']:.4f}", percent(row["top1_equal"])])
    works = ", ".join(dict.fromkeys(document["works"]))
    about = f"{document['blocks']} blocks of {document['length']:,} tokens ({works}), {document['steps']} steps.\n\n"
    return about + filled(["`--kv`", "map", "bits per number", "with rows in 16 bits", "KL, nats (95%)", "99th percentile", "same top token"], rows)


def sums_table(document):
    """Return what rounding and choosing lose apart, what they lose together, and that over the sum of the two."""
    of = {(row["method"], row["kv"]): row for row in document["rows"]}
    chosen, rows = of["wpq", "bf16"], []
    for (method, kv), both in of.items():
        if method != "wpq" or both is chosen:
            continue
        rounded = of["full", kv]
        apart = [a + b for a, b in zip(chosen["kl_by_block"], rounded["kl_by_block"])]
        rows.append([f"`{kv}`", *(f"{kl:.4f}" for kl in (rounded["kl"], chosen["kl"], rounded["kl"] + chosen["kl"])), f"{both['kl']:.4f}" + spread(kl_interval(both), 4),
                     f"{both['kl'] / (rounded['kl'] + chosen['kl']):.2f}" + spread(ratio_interval(both["kl_by_block"], apart), 2)])
    works = ", ".join(dict.fromkeys(document["works"]))
    about = f"{document['blocks']} blocks of {document['length']:,} tokens ({works}), {document['steps']} steps; `wpq` with a budget of {percent(chosen['budget'])}.\n\n"
    return about + filled(["`--kv`", "`full`", "`wpq` over `bf16`", "sum", "`wpq` over it (95%)", "over the sum (95%)"], rows)


def reads_table(document):
    """Return what full attention and `wpq` lose over rows of each format, and what tuned plans lose, beside the loss of `wpq` over bf16 at 5%.

    A sentence compares each plan with the form of `wpq` that loses least at the same share.
    """
    [base] = [row for row in document["rows"] if (row["method"], row["form"], row["share"]) == ("wpq", "bf16", 0.05)]
    rows = []
    for row in sorted(document["rows"], key=lambda row: (row["method"] != "full", row["share"])):
        start = [f"`{row['method']}`", row["form"] if " " in row["form"] else f"`{row['form']}`"]
        if row["budget"] is None:
            rows.append([*start, f"at least {percent(row['least'])}", "", ""])
            continue
        is_compared = row["method"] != "full" and row is not base
        beside = f"{row['kl'] / base['kl']:.2f}" + spread(ratio_interval(row["kl_by_block"], base["kl_by_block"]), 2) if is_compared else ""
        rows.append([*start, percent(row["uncompressed_moved_fraction"]), f"{row['kl']:.5f}" + spread(kl_interval(row), 5), beside])
    works = ", ".join(dict.fromkeys(document["works"]))
    about = f"{document['blocks']} blocks of {document['length']:,} tokens ({works}), {document['steps']} steps.\n\n"
    said = []
    for plan in [row for row in document["rows"] if row["method"] == "plan"]:
        alike = [row for row in document["rows"] if row["method"] == "wpq" and row["share"] == plan["share"] and row["budget"] is not None]
        best = min(alike, key=lambda row: row["kl"])
        said.append(f"At {percent(plan['share'])}, the plan loses {plan['kl'] / best['kl']:.2f}{spread(ratio_interval(plan['kl_by_block'], best['kl_by_block']), 2)} "
                    f"times as much as `wpq` over `{best['form']}`.")
    table = filled(["method", "`--kv`", "moved", "KL, nats (95%)", "KL over that of `wpq`, `bf16`, 5%"], rows)
    return about + table + ("\n" + "\n".join(said) + "\n" if said else "")


def format_time_table(document):
    """Return the time of a step with caches of each format: the median over the rounds, and the least and the most."""
    def cell(ms):
        return f"{np.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})"

    about = (f"{document['model']}, {document['context']:,} positions, `wpq` with a budget of {percent(document['budget'])}; ms per step: the median of "
             f"{document['rounds']} rounds, the least and the most. {document['program']}; {document['machine']}.\n\n")
    methods = list(document["rows"][0]["ms"])
    return about + filled(["`--kv`", *(f"`{method}`" for method in methods)], [[f"`{row['kv']}`", *(cell(row["ms"][method]) for method in methods)] for row in document["rows"]])


def map_table(document):
    """Return the error of attention's output with keys or values in 4 and 2 bits after each map, over that after a Hadamard rotation."""
    def named(row):
        # What `int4` and `int2` do has one row.
        return row["map"].replace({4: "clip 0.97", 2: "clip 0.8"}[row["bits"]], "clipped")

    errors = {(row["rows"], named(row), row["bits"]): np.array(row["errors"]) for row in document["rows"]}
    rows = []
    for of in ("keys", "values"):
        for name in dict.fromkeys(name for rows, name, _ in errors if rows == of):
            def cell(bits):
                if (of, name, bits) not in errors:
                    return ""
                own, base = errors[of, name, bits], errors[of, "hadamard", bits]
                return f"{own.mean():.5f} ({np.exp(np.log(own / base).mean()):.2f})"

            rows.append([of, name, cell(4), cell(2)])
    return grid(["of", "map", "4 bits", "2 bits"], rows)


def center_table(document):
    """Return how much of the variance of keys the path of their mean makes up, and the error of the codes around it."""
    rows = document["rows"]
    share = [1 - row["path"]["variance"] / row["mean"]["variance"] for row in rows]
    error = [row["path"]["held_out_inertia"] / row["mean"]["held_out_inertia"] for row in rows]
    cells = [["share of the path in the variance of the keys", f"{np.median(share):.2f}", f"{max(share):.2f}", f"above a half: {sum(s > 0.5 for s in share)}"],
             ["error of the codes on held-out tokens, path over mean", f"{np.median(error):.2f}", f"{max(error):.2f}", f"above 1: {sum(e > 1 for e in error)}"]]
    return grid(["", "median head", "largest", f"of {len(rows)} heads"], cells)


def at_time(rows, losses, wanted):
    """Return the KL that an index has at a time, from that of its budgets on logarithmic scales: losses [.., budgets]; None outside their times."""
    # Noise aside, a smaller budget never takes longer.
    times = np.minimum.accumulate([row["us"] for row in rows][::-1])[::-1]
    if not times[0] <= wanted <= times[-1]:
        return None
    logs = np.log(losses)
    return np.exp([np.interp(np.log(wanted), np.log(times), column) for column in np.atleast_2d(logs)])


def at_equal_time(document):
    """Return the time of the first index at a budget of 6%, in microseconds, and for each index its rows, and its KL and interval at that time."""
    found = {}
    for row in document["rows"]:
        found.setdefault(row["index"], []).append(row)
    wanted = next(row["us"] for row in next(iter(found.values())) if row["budget"] == 0.06)
    made = {}
    for index, each in found.items():
        if index == "full":
            continue
        losses = np.array([row["kl_by_block"] for row in each])
        here = at_time(each, losses.mean(1), wanted)
        ends = None
        if here is not None and losses.shape[1] >= FEWEST:
            ends = interval(at_time(each, losses[:, picked(losses.shape[1])].mean(-1).T, wanted))
        made[index] = each, None if here is None else float(here[0]), ends
    return wanted, made, next((each[0]["us"] for index, each in found.items() if index == "full"), None)


def time_table(document):
    """Return loss against time, and the KL of every index at the time of the first one at a budget of 6%."""
    wanted, found, full = at_equal_time(document)
    rows = [[index, *(f"{row['us']:.0f} µs, {row['kl']:.4f}" for row in each), "" if here is None else f"{here:.4f}{spread(ends, 4)}"] for index, (each, here, ends) in found.items()]
    rows += [["full attention", *[""] * (len(rows[0]) - 2), f"{full:.0f} µs, 0"]] if full else []
    budgets = [f"budget {100 * row['budget']:g}%" for row in next(iter(found.values()))[0]]
    return grid(["index", *budgets, f"KL at {wanted:.0f} µs (95%)"], rows)


# Forms of the keys in code-store.json, in words.
STORED = {"2 bits": "2 bits per channel", "3 bits": "3 bits per channel", "4 bits": "4 bits per channel", "sign and 2 bits": "sign and 2 bits (`--kv 2bit`)",
          "codes": "codes of `wpq` alone", "codes and 2 bits in k": "codes and 2 bits per channel of the key",
          "codes and 2 bits in z": "codes and 2 bits per channel of the quantiser"}


def store_table(document):
    """Return the error of scores of each form of the keys."""
    rows = [[STORED[row["form"]], row["bits"], f"{np.mean(row['errors']):.4f}", f"{np.max(row['errors']):.3f}"] for row in document["rows"]]
    return grid(["key", "bits", "error, mean", "largest"], rows)


def search_table(document):
    """Return the error of attention's output of each index at equal bytes, with one budget, one threshold and top-p."""
    def cell(errors):
        if errors is None:
            return "cannot"
        own, *others = [f"{error:.4f}" for error in errors]
        return own + (f" ({', '.join(others)})" if others else "")

    # A bar would end the cell.
    rows = [[row["index"].replace("|v|", "the norm of v"), f"{row['bits']:.0f}", *(cell(errors) for errors in row["errors"])] for row in document["rows"]]
    return grid(["index", "bits read per key, with fixed tables", *(f"error at {percentage(share)} (threshold, top-p)" for share in document["shares"])], rows)
