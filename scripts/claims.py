"""The claims of docs/results.md and docs/dev/results.md: that one way of reading the cache loses less than another, and whether it does."""

import numpy as np

from intervals import holm, largest_share, paired, sign_flip

NO_MORE = "bypassing heads at theta 0.85 loses no more than bypassing none"
A2ATS, SIGNS, LFPS, CTKVR = "A2ATS", "Self-Indexing", "LFPS", "CTkvr"
OURS = "ours"
# Methods of papers, and what the papers are called in the table.
PAPERS = {"a2ats": A2ATS, "selfindex": SIGNS, "lfps": LFPS, "ctkvr": CTKVR, "pqcache": "PQCache", "doublesparsity": "Double Sparsity",
          "randsign": "ParisKV", "triattention": "TriAttention", "quest": "Quest", "snapkv": "SnapKV", "h2o": "H2O"}
# The form of lfps without a bypass, which is its default, and that of its paper.
NO_BYPASS, BYPASS = "--lfps-theta 1", "--lfps-theta 0.85"

# What the form of a row has before options that were chosen for another share of the bytes.
SEARCHED = "searched: "


def row_of(document, method, form="", share=None, part=None):
    """Return the row of a method, form, share of the bytes and part of a table, or None."""
    for row in (document or {}).get("rows", ()):
        if (row["method"], row["form"], row.get("share"), row.get("part")) == (method, form, share, part):
            return row
    return None


def percentage(share):
    return f"{100 * share:.0f}%"


def listed(tables):
    """List the claims: source, wording, the row that should lose less, and the other row; a row is None if it was not measured."""
    claims, text, long = (tables.get(name) for name in ("claims", "text", "long"))

    def of(method, form="", part="base"):
        return row_of(claims, method, form, part=part)

    def codebook(rope, metric):
        words = [word for word in (rope, metric) if word not in ("windowed", "query-aware")]
        return of("a2ats", ", ".join(words))

    both, neither = codebook("windowed", "query-aware"), codebook("standard", "plain")
    plain, standard = codebook("windowed", "plain"), codebook("standard", "query-aware")
    packed, signs = of("selfindex", part="2bit-full"), "--sign-centroids signs"
    bypass = of("lfps", BYPASS)
    lfps = of("lfps") or bypass
    no_bypass = of("lfps", NO_BYPASS) or of("lfps")
    found = [
        (A2ATS, "windowed RoPE with the plain metric loses less than standard RoPE with the plain metric", plain, neither),
        (A2ATS, "standard RoPE with the plain metric loses less than standard RoPE with the query-aware metric", neither, standard),
        (A2ATS, "with windowed RoPE, the query-aware metric loses less than the plain metric", both, plain),
        (A2ATS, "windowed RoPE with the query-aware metric loses less than standard RoPE with the plain metric", both, neither),
        (A2ATS, "windowed RoPE loses less than standard RoPE, both with the query-aware metric", both, standard),
        (SIGNS, "in a 2-bit cache, keys quantised with their signs lose less than keys quantised without them", packed, of("selfindex", part="2bit-plain")),
        (SIGNS, "in a 2-bit cache, scores from centroids lose less than scores from signs alone", packed, of("selfindex", signs, part="2bit-full")),
        (SIGNS, "in a 2-bit cache, some full-precision tokens lose less than none", packed, of("selfindex", part="2bit-all")),
        (SIGNS, "in a bf16 cache, scores from centroids lose less than scores from signs alone", of("selfindex"), of("selfindex", signs)),
        (LFPS, NO_MORE, bypass, no_bypass),
        (LFPS, "tables filled from the prompt and calibrated priors lose less than tables filled from the priors alone", lfps, of("lfps", "--lfps-rows 0")),
        (CTKVR, "query centroids from the last queries of the prompt lose less than those from evenly spaced queries", of("ctkvr"), of("ctkvr", "--ct-choose even")),
        (CTKVR, "query centroids from evenly spaced queries lose less than those from random queries", of("ctkvr", "--ct-choose even"), of("ctkvr", "--ct-choose random")),
        (CTKVR, "query centroids from random queries lose less than those from the first queries", of("ctkvr", "--ct-choose random"), of("ctkvr", "--ct-choose first")),
        (CTKVR, "recalling the lists of four query centroids loses less than recalling those of two", of("ctkvr"), of("ctkvr", "--ct-probes 2")),
        (CTKVR, "over eight turns, replacing query centroids in decode steps loses less than keeping those of the first prompt",
         of("ctkvr", "--ct-keep", "turns"), of("ctkvr", "--ct-keep --ct-update 0", "turns")),
    ]
    for method, name in PAPERS.items():
        if method not in ("quest", "snapkv", "h2o"):
            # ctkvr cannot read as little as 10% of 8,192 tokens.
            where, tokens, share = (text, "3,072", 0.2) if method == "ctkvr" else (long, "8,192", 0.1)
            form = "" if row_of(where, method, BYPASS, share) is None else BYPASS
            found.append((name, f"`{method}` loses less than `quest` at {percentage(share)} of the bytes, {tokens} tokens",
                          row_of(where, method, form, share), row_of(where, "quest", "", share)))
    found += [
        (OURS, "centroids of signs from the prompt and the calibration (`hybrid`) lose less than those from the prompt alone", of("selfindex", "--sign-centroids hybrid"), of("selfindex")),
        (OURS, "calibrated priors of `lfps` lose less than no priors", lfps, of("lfps", "--lfps-prior 0")),
        (OURS, "eight buckets of distances lose less than the one distance of windowed RoPE (`a2ats`, `--positions buckets`)", of("a2ats", "buckets"), both),
    ]
    for method in PAPERS:
        for share in (0.05, 0.1):
            for form in ("", "tuned"):
                other = row_of(long, method, form, share)
                if other and "kl" in other:
                    words = f"`wpq` loses less than `{method}`{' (tuned)' if form else ''} at {percentage(share)} of the bytes"
                    found.append((OURS, words, row_of(long, "wpq", "", share), other))
    for words, form in (("codes around the path of the mean lose less than codes around the mean", "mean"),
                        ("codes of half of the directions lose less than codes of all", "all directions")):
        for where, tokens, share in ((text, "3,072", 0.1), (text, "3,072", 0.2), (long, "8,192", 0.05), (long, "8,192", 0.1)):
            found.append((OURS, f"{words} (`wpq`, {tokens} tokens, {percentage(share)} of the bytes)",
                          row_of(where, "wpq", "", share), row_of(where, "wpq", form, share)))
    found += [
        (OURS, "`wpq` with 32 bits per key loses less than `selfindex` with 64 bits", of("wpq", "32 bits"), of("selfindex")),
        (OURS, "`wpq` loses less than `topk`, the exact choice", of("wpq"), of("topk")),
    ]
    return found


def judged(tables):
    """Decide each claim by the paired interval of the difference, and again by Holm's correction of all p-values.

    Claims of which a row is missing are left out; a row that could not be measured leaves its claim undecided.
    """
    rows = []
    for source, words, less, more in listed(tables):
        if less is None or more is None:
            continue
        row = {"source": source, "claim": words, "reads": [of.get("bytes_read_fraction") for of in (less, more)]}
        if "kl_by_block" in less and "kl_by_block" in more:
            losses = [np.asarray(of["kl_by_block"]) for of in (less, more)]
            difference = losses[0] - losses[1]
            mean, interval = paired(*losses)
            row |= {"kl": [float(of.mean()) for of in losses], "difference": mean, "interval": interval, "p": sign_flip(difference),
                    "median": float(np.median(difference)), "largest": largest_share(difference)}
            row["verdict"] = verdict(row, interval[0] > 0, interval[1] < 0) if interval else "too few blocks"
        rows.append(row)
    measured = [row for row in rows if "p" in row]
    for row, p in zip(measured, holm([row["p"] for row in measured])):
        row["holm"] = p
        row["after_holm"] = verdict(row, p < 0.05 and row["difference"] > 0, p < 0.05 and row["difference"] < 0)
    return rows


def verdict(row, is_more, is_less):
    """Name the verdict of a claim for a difference that is above 0, below 0, or neither."""
    if is_more:
        return "false" if row["source"] == OURS else "not reproduced"
    if row["claim"] == NO_MORE:
        return "not refuted"
    return "confirmed" if is_less else "undecided"
