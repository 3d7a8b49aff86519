#!/usr/bin/env python3
"""Writes the tables of docs/dev/gpu.md from the results of `make gpu-check`.

    python3 scripts/gpu_tables.py [--check]

docs/results/h200.json is the gpu.json of this version's run; docs/results/h200-first.json is that of the very first run,
before anything was tuned. The page's lines between the two marks are replaced; with --check, the program fails if they
differ from what it would write. Needs Python alone.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs/dev/gpu.md", ROOT / "docs/results"
MARKS = "<!-- tables: scripts/gpu_tables.py -->", "<!-- end of tables -->"
METHODS = ["full", "selfindex", "a2ats", "wpq"]
# Estimates in microseconds at batch 1 and 131,072 positions, made before the first run: bytes over 4.2 TB/s and
# instructions counted in the sources over 132 multiprocessors at 1.8 GHz, without the time between kernels.
ESTIMATES = {
    "begin_step": 0.5, "pad_rows": 0.7, "merge_parts": 3.5, "attend_bfloat_128 (full)": 127, "attend_bfloat_128": 10,
    "sign_tables": 2, "sign_keys": 8.5, "narrow_keys": 2.1, "count_best": 2, "list_best": 2.3,
    "count_candidates": 1.2, "map_rows": 1.3, "codeword_scores": 4.5, "rank_codewords": 11.5, "take_codewords": 11.5,
    "count_taken": 2, "list_taken": 3,
    "word_tables_16": 4, "static_scores": 3.5, "path_scores": 91, "word_parts_16": 7, "word_keys_16": 8,
    "refined_parts_16": 6, "refined_keys": 3, "name_items": 1,
}
# The same for a step of one layer with attention, and for a step of Llama-3.1-8B, in microseconds.
STEP_ESTIMATES = {("full", 1): 136, ("full", 4): 512, ("selfindex", 1): 53, ("selfindex", 4): 119, ("a2ats", 1): 66,
                  ("a2ats", 4): 115, ("wpq", 1): 190, ("wpq", 4): 570}
MODEL_ESTIMATES = {("full", 1): 9.1, ("a2ats", 1): 7.2, ("full", 4): 21, ("a2ats", 4): 9.5}


def load(name):
    return json.loads((RESULTS / name).read_text())


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def times(results, *parts):
    """Returns the median seconds of a benchmark's rows, by method, batch and positions."""
    found = {}
    for row in (row for part in parts for row in results["bench"].get(part, {}).get("rows", [])):
        batch, n = (int(re.search(pattern, row["shape"])[1]) for pattern in (r"batch (\d+)", r"(\d+) positions"))
        found[row["name"].split()[-1], batch, n] = row["median_s"]
    return found


def step_table(now, first):
    """One layer: microseconds per step, and how many times as fast as full attention of the same run."""
    rows = []
    for n in (8192, 131_072):
        for batch in (1, 4):
            for method in METHODS:
                key = (method, batch, n)
                full = now["full", batch, n]
                estimate = STEP_ESTIMATES.get((method, batch), "") if n > 8192 else ""
                rows.append([f"{n:,}", batch, f"`{method}`", estimate, f"{1e6 * first[key]:.0f}", f"{1e6 * now[key]:.0f}",
                             f"{full / now[key]:.1f}"])
    return table(["positions", "sequences", "method", "estimate, us", "first run, us", "this version, us", "times as fast as `full`"], rows)


def model_table(now, first):
    """A whole model: milliseconds per step, tokens per second."""
    rows = []
    for n in (8192, 131_072):
        for batch in (1, 4):
            for method in METHODS:
                key = (method, batch, n)
                estimate = MODEL_ESTIMATES.get((method, batch), "") if n > 8192 else ""
                rows.append([f"{n:,}", batch, f"`{method}`", estimate, f"{1e3 * first[key]:.2f}", f"{1e3 * now[key]:.2f}",
                             f"{batch / now[key]:.0f}", f"{now['full', batch, n] / now[key]:.2f}"])
    head = ["positions", "sequences", "method", "estimate, ms", "first run, ms", "this version, ms", "tokens/s", "times as fast as `full`"]
    return table(head, rows)


def kernel_rows(results):
    """Returns the kernels of each method's step with their microseconds, kernels of the same name summed up."""
    found = {}
    for row in results["bench"]["kernels"]["rows"]:
        for kernel in row["kernels"]:
            name = kernel["kernel"] + (" (full)" if row["method"] == "full" and kernel["kernel"].startswith("attend") else "")
            of = found.setdefault((row["method"], name), [])
            of.append(kernel["median_us"])
    return found


def kernel_table(now, first):
    rows, seen = [], set()
    for (method, name), measured in kernel_rows(now).items():
        if name in seen:
            continue
        seen.add(name)
        before = kernel_rows(first).get((method, name), [])
        each = lambda values: " + ".join(f"{us:.1f}" for us in values)
        rows.append([f"`{method}`", f"`{name}`", ESTIMATES.get(name, ""), each(before), each(measured)])
    return table(["first met in", "kernel", "estimate, us", "first run, us", "this version, us"], rows)


def other_table(now, first):
    """Fits, prompts and calibration, which the two runs have in common."""
    rows = []
    for part, key, what in [
        ("kmeans-one", "pass_s", "k-means, one head of 81,920 x 128 keys and 4,096 codewords: a pass"),
        ("kmeans-8b", "pass_s", "the same, the 256 heads of Llama-3.1-8B: a pass"),
        ("kmeans-8b", "upload_s", "the copy of their keys to the GPU"),
        ("kmeans-8b", "median_s", "their whole fit, 25 passes with seeding and copy"),
    ]:
        rows.append([what] + [f"{results['bench'][part]['rows'][0][key]:.3g} s" for results in (first, now)])
    rows.append(["a prompt of 81,920 tokens through four layers of Llama-3.1-8B's size"]
                + [f"{results['bench']['prefill']['prefill_s']:.2f} s" for results in (first, now)])
    stages = [{s["name"]: s["seconds"] for s in results["bench"]["calibrate-layers"]["stages"]} for results in (first, now)]
    for name in stages[1]:
        rows.append([f"calibration of these layers on 81,920 tokens: {name}"] + [f"{of[name]:.1f} s" for of in stages])
    return table(["what", "first run", "this version"], rows)


def peer_table(results):
    rows = [[f"{row['context']}", row["batch"], f"`{row['method']}`", f"{1e6 * row['kvsmith_s']:.0f}", f"{1e6 * row['torch_s']:.0f}",
             f"{row['ratio']:.2f}"] for row in results["bench"]["peers"]["rows"]]
    return table(["positions", "sequences", "method", "kvsmith, us", "PyTorch, us", "PyTorch / kvsmith"], rows)


def model_kernel_table(results):
    """The kernels of a whole model's step with full attention."""
    kernels = [k for row in results["bench"]["kernels-model"]["rows"] for k in row["kernels"]]
    total = sum(kernel["launches"] * kernel["median_us"] for kernel in kernels)
    rows = []
    for kernel in sorted(kernels, key=lambda kernel: -kernel["launches"] * kernel["median_us"]):
        us = kernel["launches"] * kernel["median_us"]
        rows.append([f"`{kernel['kernel']}`", kernel["launches"], f"{kernel['median_us']:.1f}", f"{100 * us / total:.1f}%"])
    return table(["kernel", "launches", "each, us", "share of the sum"], rows)


def check_table(results):
    named = {"gpu-check": "kvsmith gpu-check", "backends": "tests/backends", "decode": "tests/decode", "model": "tests/cuda_model",
             "calibrate": "a calibration against the CPU's", "memcheck": "compute-sanitizer memcheck", "racecheck": "compute-sanitizer racecheck"}
    rows = []
    for part in results["parts"]:
        if part["name"] in named:
            said = re.sub(r"(exit 101; )?test result: (ok|FAILED)\. |(; 0 failed.*|; \d ignored.*)", "", part["reason"])
            rows.append([named[part["name"]], part["status"], said, f"{part['seconds']} s"])
    return table(["check", "result", "details", "time"], rows)


def tables():
    now, first = load("h200.json"), load("h200-first.json")
    when = lambda results: f"{results['gpu'].split(',')[0]}, driver {results['gpu'].split(', ')[1]}, {results['date']}"
    loop = now["bench"]["attend"]["rows"][0]["read_loop_gbytes_per_s"]
    failed = [part["name"] for part in now["parts"] if part["status"] == "failed"]
    assert failed in ([], ["calibrate"]), failed
    calibration = ("One comparison failed: `calibrate` and the single commands wrote different bytes, because the sections of one named what "
                   "multiplies. Sections of this version do not name it; the run was not repeated. In the first run the comparison passed.")
    parts = [
        f"Run on {when(now)} ({now['adapter'].split(', ', 1)[1]}); a plain read loop reaches {loop:,.0f} GB/s. The first run was on "
        f"{when(first)}, before anything was tuned. Estimates were made before it, from bytes over 4.2 TB/s and instructions counted in "
        "the sources.",
        "### Checks", check_table(now), *([calibration] if failed else []),
        "### A step of one layer", "Choice and attention, 32 query and 8 KV heads of 128 channels, bf16 rows, budget 0.06.",
        step_table(times(now, "attend"), times(first, "attend")),
        "### A step of Llama-3.1-8B", "Random bf16 weights, bf16 rows, budget 0.06.",
        model_table(times(now, "decode-long", "decode-short"), times(first, "decode-long", "decode-short")),
        "### Kernels",
        "The kernels of the step above at 131,072 positions and one sequence, each measured alone by Nsight Compute; a step is shorter "
        "than their sum, because kernels overlap. An empty kernel takes 1.8 us. Kernels that a step launches twice have two times. The estimate of "
        "`path_scores` is that of its form without tensor cores, which never ran.",
        kernel_table(now, first),
        "A step of Llama-3.1-8B with `full` at 8,192 positions and one sequence, measured in the same way:",
        model_kernel_table(now),
        "### PyTorch", "Attention over the same shapes by `scaled_dot_product_attention`, in turns.", peer_table(now),
        "### Fits, prompts, calibration", other_table(now, first),
    ]
    return "\n\n".join(parts)


def main():
    text = PAGE.read_text()
    start, end = (text.index(mark) for mark in MARKS)
    written = text[: start + len(MARKS[0])] + "\n\n" + tables() + "\n\n" + text[end:]
    if "--check" in sys.argv[1:]:
        if written != text:
            sys.exit("docs/dev/gpu.md differs from docs/results/h200.json: run python3 scripts/gpu_tables.py")
        return
    PAGE.write_text(written)


if __name__ == "__main__":
    main()
