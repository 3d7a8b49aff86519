#!/usr/bin/env python3
"""Times decode steps with caches of each row format, whose losses are in docs/results/row-formats.json.

    python benches/row_format_times.py KVSMITH [--rounds 3]

A step of SmolLM2-135M's shape with random weights and 8,192 random rows in the cache: `bench decode`, with full attention and with
`wpq` at a budget of 6%. The formats take turns, in reverse order every other round; a row has the medians of all rounds. Run it
alone: it uses all cores. It writes docs/results/row-format-times.json; scripts/render.py makes the table of docs/dev/caches.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import documents  # noqa: E402
from decode_peers import machine  # noqa: E402
from lab import known_commit  # noqa: E402
from results import FORMATS  # noqa: E402

SHAPE, CONTEXT, BUDGET, METHODS = "smollm2-135m", 8192, 0.06, ("full", "wpq")


def times(kvsmith, kv):
    """Return the milliseconds of a step by method: the median of the steps of one run."""
    command = [kvsmith, "bench", "decode", "--shapes", SHAPE, "--context", CONTEXT, "--methods", ",".join(METHODS), "--budget", BUDGET, "--kv", kv,
               "--device", "cpu", "--json", "-q"]
    document = json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout)
    return {row["method"]: 1e3 * row["median_s"] for row in document["rows"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each format")
    arguments = parser.parse_args()
    version = subprocess.run([arguments.kvsmith, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()
    found = {kv: {method: [] for method in METHODS} for kv in FORMATS}
    for number in range(arguments.rounds):
        for kv in FORMATS[::-1] if number % 2 else FORMATS:
            for method, ms in times(arguments.kvsmith, kv).items():
                found[kv][method].append(ms)
    head = {"table": "row-format-times", "program": known_commit(", ".join(version[:2])), "machine": machine(version)}
    setting = {"model": SHAPE, "context": CONTEXT, "budget": BUDGET, "rounds": arguments.rounds}
    documents.save("row-format-times", head | setting | {"rows": [{"kv": kv, "ms": found[kv]} for kv in FORMATS]})


if __name__ == "__main__":
    main()
