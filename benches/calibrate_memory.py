#!/usr/bin/env python3
"""Compare the memory that `kvsmith calibrate` plans with what it takes, on checkpoints with random weights.

Samples RssAnon (the program's own memory) and RssFile (mapped pages of the weights, which the system can take back) in
/proc/PID/status; Linux alone. Example: python3 benches/calibrate_memory.py target/release/kvsmith
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
    ("SmolLM2-135M, 4 layers", "4,576,1536,9,3,64,512", 73_728, 4_096, 1024),
    ("SmolLM2-135M, 8 layers", "8,576,1536,9,3,64,512", 73_728, 4_096, 1024),
    ("1B, 2 layers", "2,2048,8192,32,8,64,512", 20_000, 4_096, 256),
    ("8B, 2 layers", "2,4096,14336,32,8,128,512", 12_000, 4_096, 256),
    ("many KV heads", "2,512,512,16,16,64,512", 60_000, 2_048, 256),
    ("long blocks", "2,256,512,16,4,64,512", 32_768, 16_384, 256),
]


def documents(tokens, longest, vocabulary, rng):
    """Random documents of different lengths, the longest first."""
    lengths, left = [longest], tokens - longest
    while left > 0:
        length = min(left, longest, 20 + int(rng.expovariate(5 / longest)))
        lengths.append(length)
        left -= length
    return [[rng.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


def field(status, name):
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.M)
    return int(found[1]) * 1024 if found else 0


def measure(command):
    """Run the command; its stderr and the peaks of RssAnon, RssFile and VmHWM."""
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    peaks = {"RssAnon": 0, "RssFile": 0, "VmHWM": 0}
    while child.poll() is None:
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
        except OSError:
            break
        for name in peaks:
            peaks[name] = max(peaks[name], field(status, name))
        time.sleep(0.005)
    stderr = child.communicate()[1]
    if child.returncode:
        sys.exit(f"{' '.join(command)}\n{stderr}")
    return stderr, peaks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--only", default="", help="runs whose name has this")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print("| run | planned / MB | RssAnon / MB | off by | RssFile / MB | VmHWM / MB |\n|---|---|---|---|---|---|")
    for name, shape, tokens, longest, codewords in RUNS:
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "model")
            subprocess.run([sys.executable, MAKE, shape, model], check=True, stdout=subprocess.DEVNULL)
            text = Path(folder, "text.json")
            vocabulary = int(shape.split(",")[6])
            text.write_text(json.dumps(documents(tokens, longest, vocabulary, random.Random(1))))
            stderr, peaks = measure([
                str(args.program), "calibrate", "--model", str(model), "--tokens", str(text), "--device", "cpu",
                "--threads", str(args.threads), "--seq-len", "16384", "--size", str(codewords), "--iterations", "2",
                "-o", str(Path(folder, "art")),
            ])
        number, unit = re.search(r"^plan: about ([\d.]+) (MB|GB)", stderr, re.M).groups()
        planned = float(number) * {"MB": 1.0, "GB": 1e3}[unit]
        anon, file, high = (peaks[name] / 1e6 for name in ("RssAnon", "RssFile", "VmHWM"))
        off = f"{100 * (planned - anon) / anon:+.1f} %"
        print(f"| {name} | {planned:.0f} | {anon:.0f} | {off} | {file:.0f} | {high:.0f} |", flush=True)


if __name__ == "__main__":
    main()
