#!/usr/bin/env python3
"""Times each kernel of a decode step on an NVIDIA GPU, by Nsight Compute (`ncu`).

    python3 benches/kernel_times.py --kvsmith target/release/kvsmith --methods full,a2ats,wpq --context 128K
    python3 benches/kernel_times.py --kvsmith target/release/kvsmith --methods full --context 8K --step model

`ncu` runs `kvsmith bench attend`, a step of one layer, or `kvsmith bench decode`, a step of a whole model, and measures
every launch alone: the sum over a step leaves out what lies between kernels, and includes no overlap. Caches are left as
the kernel before leaves them. The result is one JSON document on stdout: for each method, the launches of a layer's step
in their order, or the kernels of a model's step with the number of their launches, with median microseconds per launch.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys

METRIC = "gpu__time_duration.sum"
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvsmith", default="target/release/kvsmith", help="the program")
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's command line")
    parser.add_argument("--shapes", default="llama-3.1-8b", help="the layer, as in `kvsmith bench attend`")
    parser.add_argument("--size", default="4096", help="codewords of a2ats")
    parser.add_argument("--context", default="128K", help="positions in the cache")
    parser.add_argument("--step", default="layer", choices=["layer", "model"], help="what is timed")
    parser.add_argument("--methods", default="full,selfindex,a2ats,wpq", help="methods to time, one run each")
    return parser.parse_args()


# What is run, and the kernel that begins a step.
STEPS = {"layer": (["bench", "attend"], "begin_step"), "model": (["bench", "decode"], "embed_rows")}
# Launches of a model that are measured, some steps of 32 layers; all kernels but fill_random and read_all, which prepare.
MODEL_LAUNCHES = "1200"


def launches(args, method):
    """Returns the launches of a run: kernel and microseconds."""
    limit = ["--kernel-name", "regex:^([^fr]|re[^a]|rm|ra)", "--launch-count", MODEL_LAUNCHES] if args.step == "model" else []
    command = [
        args.ncu, "--csv", "--page", "raw", "--metrics", METRIC, "--clock-control", "none", "--cache-control", "none", *limit,
        args.kvsmith, *STEPS[args.step][0], "-q", "--device", "cuda", "--shapes", args.shapes, "--size", args.size,
        "--context", args.context, "--methods", method, "--runs", "1",
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        sys.exit(f"error: ncu measured nothing: {(run.stderr or run.stdout).strip()[-300:]}")
    rows = csv.DictReader(lines[start:])
    scale = UNITS[next(rows)[METRIC]]
    return [(row["Kernel Name"].split("(")[0], scale * float(row[METRIC].replace(",", ""))) for row in rows]


def steps(found, first):
    """Cuts the launches of a benchmark into steps, each of which begins with kernel `first`; what comes before the first
    step prepares the benchmark."""
    starts = [i for i, (name, _) in enumerate(found) if name == first]
    cut = [found[a:b] for a, b in zip(starts, starts[1:] + [len(found)])]
    whole = statistics.mode(len(step) for step in cut)
    return [step for step in cut if len(step) == whole]


def kernels_of(measured, step):
    """Returns the kernels of a step with their median microseconds."""
    if step == "layer":
        return [
            {"kernel": launch[0][0], "launches": 1, "median_us": round(statistics.median(us for _, us in launch), 2)}
            for launch in zip(*measured)
        ]
    names = list(dict.fromkeys(name for name, _ in measured[0]))
    times = {name: [us for each in measured for kernel, us in each if kernel == name] for name in names}
    return [
        {"kernel": name, "launches": len(times[name]) // len(measured), "median_us": round(statistics.median(times[name]), 2)}
        for name in names
    ]


def main():
    args = arguments()
    rows = []
    for method in args.methods.split(","):
        measured = steps(launches(args, method), STEPS[args.step][1])
        kernels = kernels_of(measured, args.step)
        total = sum(kernel["launches"] * kernel["median_us"] for kernel in kernels)
        count = sum(kernel["launches"] for kernel in kernels)
        said = ", ".join(
            f"{kernel['kernel']}{' x' + str(kernel['launches']) if kernel['launches'] > 1 else ''} {kernel['median_us']:.1f}"
            for kernel in kernels
        )
        print(f"{method}: {total:.1f} us in {count} launches: {said}", file=sys.stderr)
        rows.append({
            "method": method, "step": args.step, "context": args.context, "steps": len(measured), "sum_us": round(total, 1),
            "kernels": kernels,
        })
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
