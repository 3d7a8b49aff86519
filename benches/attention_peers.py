#!/usr/bin/env python3
"""Compares `kvsmith bench attend` with PyTorch's scaled_dot_product_attention on the same shapes, in one run.

Needs torch and a release build of kvsmith. Run by hand, on a GPU or (with --device cpu) on the CPU:

    python benches/attention_peers.py --kvsmith target/release/kvsmith --context 8K,128K --batch 1,4,16

Each row is one decode step of one layer: one query per query head, over all cached positions for PyTorch and for
`full`, over the static set and what the method chooses for the others, retrieval included. The contenders take turns
in every round. Keys and values are rotated through copies, so that no cache holds them from one step to the next. The
table shows medians over the rounds, and how many times PyTorch's time is kvsmith's.
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
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(MODELS))
    parser.add_argument("--context", default="8K,32K,128K")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--budget", default="0.06")
    parser.add_argument("--methods", default="full,a2ats,selfindex")
    parser.add_argument("--kv", default="bf16", choices=sorted(TYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=20, help="timed runs in each round")
    parser.add_argument("--steps", type=int, default=20, help="steps of PyTorch between two waits")
    parser.add_argument("--threads", type=int, help="of the CPU, for both")
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

        # The group's queries as heads of one query, or as one head's queries: the same numbers, and PyTorch takes
        # different ways to them. The faster one counts.
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
        """The median of one step in its faster form; the first run warms up."""
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
    """Seconds of one step per method."""
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
                # Its memory is needed by the other.
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
