#!/usr/bin/env python3
"""Times a prompt through one layer, in f32 and with `--precision bf16`, beside PyTorch; writes docs/results/prompts.json.

    python benches/prompt_peers.py KVSMITH [--tokens 512] [--threads 1,2] [--rounds 3]

Needs numpy and torch, a processor with AVX512-BF16, and an otherwise idle machine; it takes about four minutes. The contenders
take turns; a row has the median over the rounds, and all of them. The layer is that of benches/cpu_peers.py: 4096 channels,
14336 in its MLP, 32 query and 8 KV heads of 128 channels, weights in bf16. scripts/render.py says in docs/performance.md what was found.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts")]
import documents  # noqa: E402
from cpu_peers import CHANNELS, HEADS, KV_HEADS, Layer, bench  # noqa: E402
from decode_peers import machine  # noqa: E402
from lab import known_commit  # noqa: E402

HIDDEN, INNER = 4096, 14336
PARTS = ("projections", "attention")


def numbers(text):
    return [int(number) for number in text.split(",")]


def ours(program, tokens, threads, precision):
    """Return the seconds of each part of a prompt in kvsmith."""
    rows = bench(program, "prefill", "--tokens", tokens, "--heads", HEADS, "--kv-heads", KV_HEADS, "--head-dim", CHANNELS, "--hidden", HIDDEN,
                 "--intermediate", INNER, "--threads", threads, "--precision", precision, "--runs", 1)
    return {"projections": sum(row["median_s"] for row in rows[:-1]), "attention": rows[-1]["median_s"]}


def theirs(layer, tokens, kind):
    """Return the seconds of each part of a prompt in PyTorch."""
    return {"projections": layer.project(tokens, kind), "attention": layer.attend(tokens, kind)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("--tokens", type=numbers, default=[512], help="lengths of the prompt")
    parser.add_argument("--threads", type=numbers, default=sorted({1, os.cpu_count()}), help="numbers of threads (default: one and all)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    arguments = parser.parse_args()
    import torch

    version = subprocess.run([arguments.kvsmith, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()
    layer, kinds = Layer(HIDDEN, INNER), {"f32": torch.float32, "bf16": torch.bfloat16}
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for kind in kinds.values():
            # Warms up.
            theirs(layer, 64, kind)
        for tokens in arguments.tokens:
            found = {(who, precision): [] for precision in kinds for who in ("kvsmith", "PyTorch")}
            for number in range(arguments.rounds):
                for (who, precision), times in found.items():
                    times.append(ours(arguments.kvsmith, tokens, threads, precision) if who == "kvsmith" else theirs(layer, tokens, kinds[precision]))
                    print(f"round {number + 1}, {tokens} tokens, {threads} threads: {who}, {precision}: {times[-1]}", file=sys.stderr, flush=True)
            for (who, precision), times in found.items():
                for part in PARTS:
                    each = [of[part] for of in times]
                    rows.append({"program": who, "precision": precision, "part": part, "tokens": tokens, "threads": threads,
                                 "seconds": statistics.median(each), "rounds": each})
    documents.save("prompts", {"table": "prompts", "program": known_commit(", ".join(version[:2])), "machine": machine(version), "peer": f"PyTorch {torch.__version__}",
                               "layer": {"hidden": HIDDEN, "intermediate": INNER, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": CHANNELS}, "rows": rows})


if __name__ == "__main__":
    main()
