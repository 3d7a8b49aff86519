#!/usr/bin/env python3
"""Compare the memory, disk and time that `kvsmith plan` predicts with what `kvsmith calibrate` takes, on random weights.

Samples RssAnon (the program's own memory) in /proc/PID/status, so it runs only on Linux. Times are meaningful only on an idle
machine. Example: python3 benches/plan.py target/release/kvsmith
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAKE = Path(__file__).with_name("make_random_model.py")
# name, shape for make_random_model.py, tokens, longest document, codewords
RUNS = [
    ("SmolLM2-135M, 4 layers", "4,576,1536,9,3,64,512", 40_960, 8_192, 1024),
    ("1B, 2 layers", "2,2048,8192,32,8,64,512", 16_384, 4_096, 512),
    ("8B, 1 layer", "1,4096,14336,32,8,128,512", 8_192, 4_096, 256),
    ("many KV heads", "2,512,512,16,16,64,512", 32_768, 2_048, 512),
    ("long blocks", "2,256,512,16,4,64,512", 32_768, 16_384, 1024),
]


def documents(tokens, longest, vocabulary, rng):
    """Return random documents of different lengths, the longest first."""
    lengths, left = [longest], tokens - longest
    while left > 0:
        lengths.append(min(left, rng.randint(longest // 4, longest)))
        left -= lengths[-1]
    return [[rng.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


def calibrate(command):
    """Run the command; return its document and the peak of its own memory, in bytes."""
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    peak = 0
    while child.poll() is None:
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
        except OSError:
            break
        found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)
        peak = max(peak, int(found[1]) * 1024 if found else 0)
        time.sleep(0.005)
    stdout, stderr = child.communicate()
    if child.returncode:
        sys.exit(f"{' '.join(command)}\n{stderr}")
    return json.loads(stdout), peak


def row(what, planned, taken, unit):
    return f"| | {what} | {planned:.1f} {unit} | {taken:.1f} {unit} | {100 * (planned - taken) / taken:+.0f}% |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="the kvsmith program")
    parser.add_argument("--only", default="", help="only runs whose name contains this text")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    print("| run | | planned | taken | off by |\n|---|---|---|---|---|")
    for name, shape, tokens, longest, codewords in RUNS:
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model, art = Path(folder, "model"), Path(folder, "art")
            subprocess.run([sys.executable, MAKE, shape, model], check=True, stdout=subprocess.DEVNULL)
            text = Path(folder, "text.json")
            vocabulary = int(shape.split(",")[6])
            text.write_text(json.dumps(documents(tokens, longest, vocabulary, random.Random(1))))
            flags = ["--model", model, "--tokens", text, "--device", "cpu", "--threads", args.threads, "--seq-len", 16384,
                     "--size", codewords, "--json", "-q"]
            flags = list(map(str, flags))
            began = time.time()
            plan = subprocess.run([str(args.program), "plan", *flags], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            probe = time.time() - began
            plan = json.loads(plan.stdout)
            made, peak = calibrate([str(args.program), "calibrate", *flags, "-o", str(art)])
            print(f"| {name}: {tokens} tokens, {codewords} codewords | plan itself | | {probe:.1f} s | |")
            print(row("memory", plan["memory_bytes"] / 1e6, peak / 1e6, "MB"))
            print(row("artifact", plan["artifact_bytes"] / 1e6, art.stat().st_size / 1e6, "MB"))
            print(row("time", plan["seconds"], made["seconds"], "s"))
            taken = {stage["name"]: stage["seconds"] for stage in made["stages"]}
            for stage in plan["stages"]:
                print(row(stage["name"], stage["seconds"], taken[stage["name"]], "s"), flush=True)


if __name__ == "__main__":
    main()
