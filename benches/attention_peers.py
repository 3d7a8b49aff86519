#!/usr/bin/env python3
"""Compares `kvsmith bench attend` with PyTorch's scaled_dot_product_attention on the same shapes, in one run.

Needs torch and a release build of kvsmith. Run it by hand, on a GPU or (with --device cpu) on the CPU:

    python benches/attention_peers.py --kvsmith target/release/kvsmith --context 8K,128K --batch 1,4,16

Each row is one decode step of one layer, with one query per query head. PyTorch and `full` attend all cached positions. The
other methods attend the static set and the positions that they choose; their retrieval is included. The contenders take
turns in every round. Steps rotate through copies of the keys and values, so that no cache of the processor holds them from
one step to the next. The table shows medians over the rounds, and PyTorch's time divided by kvsmith's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

ROTATED_BYTES = 256 << 20
MODELS = {"llama-3.1-8b": (32, 8, 128), "mistral-7b": (32, 8, 128), "qwen2.5-14b": (40, 8, 128)}
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvsmith", default="target/release/kvsmith", help="the binary")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="where both run")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(MODELS), help="model whose heads are used")
    parser.add_argument("--context", default="8K,32K,128K", help="context lengths, in tokens")
    parser.add_argument("--batch", default="1,4,16", help="numbers of sequences")
    parser.add_argument("--budget", default="0.06", help="budget of the methods, as in `kvsmith bench attend`")
    parser.add_argument("--methods", default="full,a2ats,selfindex", help="methods of kvsmith to time")
    parser.add_argument("--kv", default="bf16", choices=sorted(TYPES), help="type of the cache")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--runs", type=int, default=20, help="timed runs per round")
    parser.add_argument("--steps", type=int, default=20, help="PyTorch steps between two synchronisations")
    parser.add_argument("--threads", type=int, help="CPU threads, for both")
    parser.add_argument("--json", help="write the rows to this file")
    return parser.parse_args()


def positions(text):
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1].upper())
    return int(text[:-1]) * unit if unit else int(text)


class Peer:
    """PyTorch's attention of one decode step."""

    def __init__(self, args, heads, kv_heads, channels, context, batch):
        self.cuda = args.device == "cuda"
        kind = TYPES[args.kv]
        size = torch.tensor([], dtype=kind).element_size()
        copies = min(64, max(2, -(-ROTATED_BYTES // (2 * size * batch * kv_heads * context * channels))))
        torch.manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, device=args.device, dtype=kind)

        # The queries of a group, as heads with one query each or as the queries of one head. The numbers are the same,
        # but PyTorch computes them differently. The faster form counts.
        query = draw(batch, heads, 1, channels)
        self.forms = [(query, True), (query.view(batch, kv_heads, heads // kv_heads, channels), False)]
        self.rows = [
            (draw(batch, kv_heads, context, channels), draw(batch, kv_heads, context, channels))
            for _ in range(copies)
        ]
        self.steps = args.steps if self.cuda else max(1, min(args.steps, copies))
        self.at = 0

    def step(self, query, grouped):
        keys, values = self.rows[self.at]
        self.at = (self.at + 1) % len(self.rows)
        return scaled_dot_product_attention(query, keys, values, enable_gqa=grouped)

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, runs):
        """Returns the median time of one step in its faster form; the first run warms up."""
        return min(self.form_seconds(form, runs) for form in self.forms)

    def form_seconds(self, form, runs):
        times = []
        for _ in range(runs + 1):
            self.wait()
            start = time.perf_counter()
            for _ in range(self.steps):
                self.step(*form)
            self.wait()
            times.append((time.perf_counter() - start) / self.steps)
        return statistics.median(times[1:])


def ours(args, context, batch):
    """Returns the rows of `kvsmith bench attend`, by method."""
    command = [args.kvsmith, "bench", "attend", "--json", "-q", "--device", args.device, "--shapes", args.shape]
    command += ["--context", context, "--batch", batch, "--budget", args.budget, "--methods", args.methods]
    command += ["--kv", args.kv, "--runs", str(args.runs)]
    if args.threads:
        command += ["--threads", str(args.threads)]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return {row["name"].split()[-1]: row for row in json.loads(out)["rows"]}


def main():
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    heads, kv_heads, channels = MODELS[args.shape]
    print(f"{name}, torch {torch.__version__}: {args.shape}, {args.kv}, budget {args.budget}")
    print(f"{'context':>8} {'batch':>5} {'method':>10} {'kvsmith us':>11} {'torch us':>10} {'ratio':>7} {'of read loop':>13}")
    table = []
    for context in args.context.split(","):
        for batch in args.batch.split(","):
            times, peers, shares = {}, [], {}
            for _ in range(args.rounds):
                peer = Peer(args, heads, kv_heads, channels, positions(context), int(batch))
                with torch.inference_mode():
                    peers.append(peer.seconds(args.runs))
                # Frees its memory for kvsmith.
                del peer
                if args.device == "cuda":
                    torch.cuda.empty_cache()
                for method, row in ours(args, context, batch).items():
                    times.setdefault(method, []).append(row["median_s"])
                    shares.setdefault(method, []).append(row["bandwidth_share"])
            torch_s = statistics.median(peers)
            for method, seconds in times.items():
                seconds, share = statistics.median(seconds), statistics.median(shares[method])
                ratio = torch_s / seconds
                print(
                    f"{context:>8} {batch:>5} {method:>10} {1e6 * seconds:11.1f} {1e6 * torch_s:10.1f} "
                    f"{ratio:7.2f} {100 * share:12.0f}%"
                )
                table.append(
                    {"context": context, "batch": int(batch), "method": method, "kvsmith_s": seconds,
                     "torch_s": torch_s, "ratio": ratio, "bandwidth_share": share}
                )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": name, "torch": torch.__version__, "rows": table}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
