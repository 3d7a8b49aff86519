#!/usr/bin/env python3
"""Times each kernel of a decode step of one layer on an NVIDIA GPU, by Nsight Compute (`ncu`).

    python3 benches/kernel_times.py --kvsmith target/release/kvsmith --methods full,a2ats,wpq --context 128K

`ncu` runs `kvsmith bench attend` and measures every launch alone: the sum over a step leaves out what lies between
kernels, and includes no overlap. Caches are left as the kernel before leaves them. The result is one JSON document on
stdout: for each method and batch, the launches of a step in their order, each with its median microseconds.
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
    parser.add_argument("--methods", default="full,selfindex,a2ats,wpq", help="methods to time, one run each")
    return parser.parse_args()


def launches(args, method):
    """Returns the launches of a run: kernel and microseconds."""
    command = [
        args.ncu, "--csv", "--page", "raw", "--metrics", METRIC, "--clock-control", "none", "--cache-control", "none",
        args.kvsmith, "bench", "attend", "-q", "--device", "cuda", "--shapes", args.shapes, "--size", args.size,
        "--context", args.context, "--methods", method, "--runs", "1",
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        sys.exit(f"error: ncu measured nothing: {(run.stderr or run.stdout).strip()[-300:]}")
    rows = csv.DictReader(lines[start:])
    units = next(rows)
    scale = UNITS[units[METRIC]]
    return [(row["Kernel Name"].split("(")[0], scale * float(row[METRIC].replace(",", ""))) for row in rows]


def steps(found):
    """Cuts the launches of a benchmark into steps, each of which begins with `begin_step`; what comes before the first
    prepares the benchmark."""
    starts = [i for i, (name, _) in enumerate(found) if name == "begin_step"]
    cut = [found[a:b] for a, b in zip(starts, starts[1:] + [len(found)])]
    whole = statistics.mode(len(step) for step in cut)
    return [step for step in cut if len(step) == whole]


def main():
    args = arguments()
    rows = []
    for method in args.methods.split(","):
        measured = steps(launches(args, method))
        kernels = []
        for launch in zip(*measured):
            times = [microseconds for _, microseconds in launch]
            kernels.append({"kernel": launch[0][0], "median_us": round(statistics.median(times), 2)})
        total = sum(kernel["median_us"] for kernel in kernels)
        said = ", ".join(f"{kernel['kernel']} {kernel['median_us']:.1f}" for kernel in kernels)
        print(f"{method}: {total:.1f} us in {len(kernels)} launches: {said}", file=sys.stderr)
        rows.append({"method": method, "context": args.context, "steps": len(measured), "sum_us": round(total, 1), "kernels": kernels})
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
