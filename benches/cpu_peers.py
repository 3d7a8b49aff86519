#!/usr/bin/env python3
"""Compares kvsmith on this machine's CPU with its peers, in one run, and writes docs/dev/cpu.md.

Needs numpy, safetensors, faiss-cpu, scikit-learn and torch, and a release build of kvsmith. Run it by hand, on an otherwise
idle machine; it takes about half an hour:

    python benches/cpu_peers.py --kvsmith target/release/kvsmith -o docs/dev/cpu.md

The contenders take turns, so that other work on the machine affects all of them. The script runs benches/kmeans_peers.py and
benches/attention_peers.py unchanged, and compares kvsmith with the 4-bit fast scan of faiss itself. All times are medians.
Compare only ratios within one table: each table is one run.

To check whether a change made kvsmith slower, compare it with an older program. This needs only Python, writes no file, and
takes about 10 minutes:

    python benches/cpu_peers.py --kvsmith target/release/kvsmith --against OLD_PROGRAM

Both programs take turns at the rows of AGAINST. The exit code is 1 if a row takes more than 1.1 times as long as with the
older program in every round.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
HEADS, KV_HEADS, CHANNELS = 32, 8, 128
SHARE = 0.06
# Largest accepted time of a row, divided by that of the older program.
MOST = 1.1
LAYER = ["--device", "cpu", "--shapes", f"{HEADS}/{KV_HEADS}x{CHANNELS}", "--budget", SHARE]
METHODS = "topk,a2ats,selfindex,lfps,ctkvr,wpq"
# The benchmarks by which --against compares two programs.
AGAINST = [
    ["kmeans", "--device", "cpu", "--n", 16384, "--size", 1024, "--iterations", 10, "--runs", 3],
    # As the groups of a product quantiser of wpq: 16 words of four channels.
    ["kmeans", "--device", "cpu", "--heads", 8, "--n", 32768, "--dim", 4, "--size", 16, "--iterations", 25, "--runs", 3],
    ["encode", "--n", 4096, "--runs", 5],
    ["prefill", "--tokens", 512, "--hidden", 2048, "--intermediate", 4096, "--runs", 3],
    ["retrieve", *LAYER, "--context", "16K", "--kv", "bf16", "--methods", METHODS],
    ["retrieve", *LAYER, "--context", "16K", "--kv", "bf16", "--methods", "a2ats,selfindex", "--ranking", "plain"],
    ["attend", *LAYER, "--context", "16K", "--kv", "f32", "--methods", f"full,{METHODS}"],
    ["attend", *LAYER, "--context", "16K", "--kv", "bf16", "--methods", f"full,{METHODS}"],
    # Makes 64 copies of each cache, which takes long.
    ["attend", *LAYER, "--context", "1K", "--kv", "2bit", "--methods", f"full,{METHODS}", "--runs", 64],
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvsmith", default="target/release/kvsmith", help="the binary")
    parser.add_argument("-o", "--output", default="docs/dev/cpu.md", help="the page to write")
    parser.add_argument("--against", metavar="OLD_PROGRAM", help="compare with this older binary instead of with peers")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: 3, with --against 5)")
    parser.add_argument("--quick", action="store_true", help="use small sizes, only to check that everything runs")
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.against else 3)
    return args


def bench(program, *more):
    """Returns the rows of one `kvsmith bench`."""
    command = [program, "bench", *map(str, more), "--json", "-q"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["rows"]


def kvsmith(args, *more):
    return bench(args.kvsmith, *more)


def against(args):
    """Times two programs in turns; returns whether no row is slower in every round."""
    small = {16384: 1024, 4096: 512, 2048: 256, 64: 8} if args.quick else {}
    ratios = {}
    for turn in range(args.rounds):
        for command in AGAINST:
            command = [small.get(part, part) for part in command]
            found = [None, None]
            # They alternate in going first, so that other work on the machine affects both alike.
            for i in [0, 1] if turn % 2 else [1, 0]:
                found[i] = bench([args.against, args.kvsmith][i], *command)
            for old, new in zip(*found, strict=True):
                if (old["name"], old["shape"]) != (new["name"], new["shape"]):
                    sys.exit(f"{' '.join(map(str, command))}: {old['name']} ({old['shape']}) is now {new['name']} ({new['shape']})")
                ratios.setdefault((new["name"], new["shape"]), []).append(new["median_s"] / old["median_s"])
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
    slower = [row for row, times in ratios.items() if min(times) > MOST]
    rows = []
    for (name, shape), times in ratios.items():
        least, middle, most = (f"{of(times):.2f}" for of in (min, statistics.median, max))
        mark = "slower" if (name, shape) in slower else ""
        rows.append([name, shape, " ".join(f"{ratio:.2f}" for ratio in times), least, middle, most, mark])
    print(f"{machine()}. Time of each row divided by that of {args.against}, per round:\n")
    print(table(["row", "shape", "per round", "least", "median", "most", ""], rows))
    print(f"{len(ratios)} rows; {len(slower)} of them take more than {MOST} times as long as with the older program in every round")
    return not slower


def peers(script, *more):
    """Returns the rows of another script; its exit status judges objectives and does not count if it wrote rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        done = subprocess.run([sys.executable, os.path.join(HERE, script), *map(str, more), "--json", path])
        if not os.path.exists(path):
            sys.exit(f"{script} failed with status {done.returncode}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)["rows"]


def machine():
    name, flags = platform.processor() or platform.machine(), set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                if key.strip() == "flags":
                    flags = set(value.split())
    except OSError:
        pass
    sets = [s for s in ["avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_vbmi", "amx_tile"] if s in flags]
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {', '.join(sets) or platform.machine()}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def ms(seconds):
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def positions(n):
    return f"{n >> 10}K" if n < 1 << 20 else f"{n >> 20}M"


def kmeans(args, cores):
    """Times codebooks: peers, and growth with n, M, d and threads."""
    case = "8192,64,256" if args.quick else "81920,128,4096"
    found = peers(
        "kmeans_peers.py", "--kvsmith", args.kvsmith, "--case", case, "--rounds", args.rounds, "--sklearn",
        "always" if args.quick else "never",
    )
    rows = [
        [r["kind"], r["name"], ms(r["median_s"]), f"{r['time_ratio']:.1f} x", f"{r['objective_ratio']:.4f}"] for r in found
    ]
    n, d, size = (int(v) for v in case.split(","))
    text = f"{n} points of {d} channels, {size} centroids, 25 passes, {cores} threads.\n\n"
    text += table(["points", "who", "time", "time / kvsmith", "kvsmith's objective / its objective"], rows)
    base = {"heads": 1, "n": n, "dim": d, "size": size, "threads": cores}
    changes = [{}, {"n": n // 4}, {"n": n // 2}, {"size": size // 4}, {"size": size // 2}, {"dim": d // 2}]
    changes += [{"threads": t} for t in sorted({1, max(1, cores // 2)}) if t < cores]
    # The same number of points, in heads that are fitted in parallel.
    changes += [{"heads": 4, "n": n // 4, "size": size // 4}, {"heads": 4, "n": n // 4, "size": size // 4, "threads": 1}]
    growth = []
    for change in changes:
        case = {**base, **change}
        flags = [v for key, value in case.items() for v in (f"--{key}", value)]
        row = kvsmith(args, "kmeans", *flags, "--runs", args.rounds, "--device", "cpu")[0]
        growth.append([case["heads"], case["n"], case["dim"], case["size"], case["threads"], ms(row["median_s"])])
    text += "\nHow the time grows, on random points that kvsmith makes (`kvsmith bench kmeans`):\n\n"
    return text + table(["heads", "n", "d", "M", "threads", "time"], growth)


def encode(args, cores):
    """Times the encoding of keys, against the matrix product and the exact search of faiss."""
    import faiss
    import numpy as np

    rows = []
    for threads in sorted({1, cores}):
        n, size = (1024, 256) if args.quick else (8192, 4096)
        rng = np.random.default_rng(0)
        keys = rng.standard_normal((n, CHANNELS), dtype=np.float32)
        index = faiss.IndexFlatL2(CHANNELS)
        index.add(rng.standard_normal((size, CHANNELS), dtype=np.float32))
        faiss.omp_set_num_threads(threads)
        ours, theirs = [], []
        for _ in range(args.rounds):
            found = kvsmith(args, "encode", "--n", n, "--size", size, "--threads", threads)
            ours.append(found[0])
            index.search(keys, 1)
            start = time.perf_counter()
            index.search(keys, 1)
            theirs.append(time.perf_counter() - start)
        mine = statistics.median(r["median_s"] for r in ours)
        share = statistics.median(r["gemm_share"] for r in ours)
        other = statistics.median(theirs)
        rows.append([f"{n} keys, {size} codewords", threads, ms(mine), f"{share:.0%}", ms(other), f"{other / mine:.1f} x"])
    return table(["", "threads", "kvsmith", "of the GEMM rate", "faiss IndexFlatL2, k = 1", "faiss / kvsmith"], rows)


def attention(args, cores):
    """Times full attention, against PyTorch."""
    rows = []
    for threads in sorted({1, cores}):
        for kv in ["f32", "bf16"]:
            found = peers(
                "attention_peers.py", "--kvsmith", args.kvsmith, "--device", "cpu", "--context", "4K" if args.quick else "32K",
                "--batch", 1, "--methods", "full", "--kv", kv, "--threads", threads, "--rounds", args.rounds, "--runs", 10,
            )
            for r in found:
                rows.append([
                    f"{r['context']} positions, {kv}", threads, ms(r["kvsmith_s"]), f"{r['bandwidth_share']:.0%}",
                    ms(r["torch_s"]), f"{r['ratio']:.1f} x",
                ])
    head = ["", "threads", "kvsmith", "of a read loop", "PyTorch", "PyTorch / kvsmith"]
    return table(head, rows)


class Layer:
    """PyTorch's projections and causal attention of one layer, in f32 and in bf16."""

    def __init__(self, hidden, inner):
        import torch

        torch.manual_seed(0)
        q, kv = HEADS * CHANNELS, KV_HEADS * CHANNELS
        shapes = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (inner, hidden), (inner, hidden), (hidden, inner)]
        self.weights = {torch.float32: [torch.randn(shape) for shape in shapes]}
        self.weights[torch.bfloat16] = [w.bfloat16() for w in self.weights[torch.float32]]

    def project(self, tokens, kind):
        import torch

        inputs = {w.shape[1]: torch.randn(tokens, w.shape[1], dtype=kind) for w in self.weights[kind]}
        start = time.perf_counter()
        for w in self.weights[kind]:
            torch.nn.functional.linear(inputs[w.shape[1]], w)
        return time.perf_counter() - start

    def attend(self, tokens, kind):
        import torch

        q, k, v = (torch.randn(1, heads, tokens, CHANNELS, dtype=kind) for heads in (HEADS, KV_HEADS, KV_HEADS))
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return time.perf_counter() - start


def prefill(args, cores):
    """Times a prompt through one layer, against PyTorch in its faster type."""
    import torch

    hidden, inner = (256, 512) if args.quick else (4096, 14336)
    layer = Layer(hidden, inner)
    kinds = {what: list(layer.weights) for what in ["projections", "attention"]}
    rows = []
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        for tokens in [64] if args.quick else [512, 2048]:
            found = {"projections": [], "attention": []}
            theirs = {(what, kind): [] for what in found for kind in kinds[what]}
            for what, kind in theirs:
                # Warms up.
                (layer.project if what == "projections" else layer.attend)(min(tokens, 64), kind)
            for _ in range(args.rounds):
                turn = kvsmith(
                    args, "prefill", "--tokens", tokens, "--heads", HEADS, "--kv-heads", KV_HEADS, "--head-dim", CHANNELS,
                    "--hidden", hidden, "--intermediate", inner, "--threads", threads, "--runs", 1,
                )
                found["projections"].append(turn[:-1])
                found["attention"].append(turn[-1:])
                for (what, kind), times in theirs.items():
                    run = layer.project if what == "projections" else layer.attend
                    times.append(run(tokens, kind))
            for what, turns in found.items():
                ours = statistics.median(sum(r["median_s"] for r in turn) for turn in turns)
                flop = sum(r["gflops"] * r["median_s"] for r in turns[0])
                rate = statistics.median(r["gemm_gflops"] for turn in turns for r in turn)
                times = {kind: statistics.median(theirs[what, kind]) for kind in kinds[what]}
                kind = min(times, key=times.get)
                # A type that is far behind is not timed again.
                kinds[what] = [other for other in kinds[what] if times[other] < 2 * times[kind]]
                rows.append([
                    f"{what}, {tokens} positions", threads, ms(ours), f"{flop / ours / rate:.0%}",
                    f"{ms(times[kind])}, {str(kind).split('.')[-1]}", f"{times[kind] / ours:.2f} x",
                ])
    text = f"One layer of {hidden} channels, with {inner} in its MLP and weights in bf16 (`kvsmith bench prefill`). PyTorch runs in f32 or\n"
    text += "bf16, whichever is faster. For causal attention, only the work on unmasked positions counts.\n\n"
    return text + table(["", "threads", "kvsmith", "of the GEMM rate", "PyTorch", "PyTorch / kvsmith"], rows)


def methods(args, cores):
    """Times every method at a budget of 6%, and how retrieval grows with the context."""
    names = "a2ats,selfindex,wpq,lfps,ctkvr,topk"
    context = "8K" if args.quick else "128K"
    text = "`time / time of its bytes` divides the time by the time that reading the method's bytes would take at the bandwidth of\n"
    text += "`full`. The last two columns give the bandwidth that a method reaches, as a share of that of a plain read loop and of a\n"
    text += "loop over scattered rows. That loop reads a random one in 16 keys and prefetches each key 64 keys ahead.\n\n"
    for kv, timed in [("f32", names), ("bf16", names), ("2bit", "a2ats,selfindex,topk")]:
        found = kvsmith(
            args, "attend", "--device", "cpu", "--threads", 1, "--context", context, "--methods", f"full,{timed}",
            "--budget", SHARE, "--kv", kv, "--runs", 10,
        )
        full = next(r for r in found if r["name"] == "attend full")
        rows = []
        for r in found:
            bytes_time = r["bytes"] / (full["bytes"] / full["median_s"])
            rows.append([
                r["name"].split()[-1], ms(r["median_s"]), f"{full['median_s'] / r['median_s']:.1f} x",
                f"{r['bytes'] / 1e6:.1f} MB", f"{r['median_s'] / bytes_time:.2f}", f"{r['bandwidth_share']:.0%}",
                "" if r is full else f"{r['gbytes_per_s'] / r['scattered_loop_gbytes_per_s']:.0%}",
            ])
        text += f"One thread, {context} positions, {kv} rows, budget {SHARE}; retrieval and attention of one layer:\n\n"
        text += table(
            ["method", "time", "speed-up over full", "bytes it needs", "time / time of its bytes", "of a read loop",
             "of a scattered loop"],
            rows,
        ) + "\n"
        scattered = full["scattered_loop_gbytes_per_s"] / full["gbytes_per_s"]
        text += f"The loop over scattered rows reaches {scattered:.2f} times the bandwidth of `full`.\n\n"
    text += lfps_with_few(args, context)
    contexts = [4096, 8192] if args.quick else [32768, 131072, 524288]
    budget = 245 if args.quick else 2048
    grown = {}
    for ranking in ["fast", "plain"]:
        found = kvsmith(
            args, "retrieve", "--device", "cpu", "--threads", 1, "--context", ",".join(map(positions, contexts)), "--methods",
            # The others process a prompt first, which takes long on one thread.
            "a2ats,selfindex", "--ranking", ranking, "--budget", budget, "--runs", 10,
        )
        for r in found:
            grown.setdefault(r["name"].removeprefix("retrieve "), []).append(r["median_s"])
    rows = [[name, *map(ms, times), f"{times[-1] / times[0]:.2f} x"] for name, times in grown.items()]
    text += f"Retrieval alone, on one thread, with a budget of {budget} positions at every context length:\n\n"
    return text + table(["method", *map(positions, contexts), "last / first"], rows)


def lfps_with_few(args, context):
    """Times lfps with few candidates; the paper's share at 128K is 1.7%."""
    share, alpha = 0.017, 1
    rows = []
    for shape in ["32/8x128", "32/32x128"]:
        flags = ["--device", "cpu", "--context", context, "--shapes", shape, "--kv", "bf16", "--threads", 1]
        # Timed before and after: the bandwidth of `full` varies with other work on the machine.
        fulls = [kvsmith(args, "attend", *flags, "--methods", "full", "--runs", 10)[0]]
        # The tables need many steps to settle: they start from only 32 prompt queries.
        found = kvsmith(
            args, "attend", *flags, "--methods", "lfps", "--budget", share, "--lfps-alpha", alpha, "--runs", 100 if args.quick else 1000,
        )[0]
        fulls += [kvsmith(args, "attend", *flags, "--methods", "full", "--runs", 10)[0]]
        ratios = sorted(full["median_s"] / found["median_s"] for full in fulls)
        rows.append([
            shape, f"{found['scored_share']:.2%}", ms(found["median_s"]), " to ".join(f"{ratio:.1f}" for ratio in ratios) + " x",
            f"{found['bytes'] / 1e6:.1f} MB", f"{fulls[0]['bytes'] / found['bytes']:.0f} x",
        ])
    text = f"lfps with few candidates (`--lfps-alpha {alpha}`; the paper's share at 128K is 1.7%): budget {share}, bf16 rows, {context}\n"
    text += "positions, one thread. The time is the median of 1000 steps between two measurements of `full`. The heads of a group are\n"
    text += "random and agree on no candidates, so a group reads the candidates of each head separately:\n\n"
    head = ["heads", "scores computed", "time", "speed-up over full", "bytes it needs", "bytes saved"]
    return text + table(head, rows) + "\n"


def fast_scan(args):
    """Times the 4-bit scan against that of faiss, with equally many codes of equal size, one query group after the other."""
    import faiss
    import numpy as np

    faiss.omp_set_num_threads(1)
    n = 8192 if args.quick else 131072
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, CHANNELS), dtype=np.float32)
    index = faiss.IndexPQFastScan(CHANNELS, CHANNELS // 4, 4)
    index.train(x[:8192])
    index.add(x)
    budget = int(SHARE * n)
    queries = rng.standard_normal((HEADS, CHANNELS), dtype=np.float32)
    plain = "selfindex, a plain f32 lookup"
    times = {"selfindex": [], plain: [], "faiss, top 1": [], f"faiss, top {budget}": []}
    for _ in range(args.rounds):
        for name, ranking in [("selfindex", "fast"), (plain, "plain")]:
            row = kvsmith(
                args, "retrieve", "--device", "cpu", "--threads", 1, "--context", n, "--methods", "selfindex", "--budget",
                SHARE, "--ranking", ranking, "--runs", 10,
            )[0]
            times[name].append(row["median_s"])
        for name, k in [("faiss, top 1", 1), (f"faiss, top {budget}", budget)]:
            start = time.perf_counter()
            # As in kvsmith: all queries of a group together, one group after the other.
            for group in queries.reshape(KV_HEADS, -1, CHANNELS):
                index.search(group, k)
            times[name].append(time.perf_counter() - start)
    rows = []
    for name, turns in times.items():
        ratios = sorted(theirs / ours for theirs, ours in zip(turns, times["selfindex"]))
        rows.append([name, ms(statistics.median(turns)), f"{statistics.median(ratios):.1f} x", f"{ratios[0]:.1f} to {ratios[-1]:.1f}"])
    text = f"{n} keys of {CHANNELS} channels as {CHANNELS // 4} codes of 4 bits, {HEADS} query heads, one thread. kvsmith chooses once per query group, and\n"
    text += f"exactly: the best {budget} keys by f32 scores. faiss ranks by rounded tables, for each query alone.\n\n"
    return text + table(["who", "time", "time / selfindex", "in each round"], rows)


def main():
    args = arguments()
    if args.against:
        sys.exit(0 if against(args) else 1)
    cores = len(os.sched_getaffinity(0))
    import faiss
    import torch

    text = "# On a CPU\n\n"
    text += "`benches/cpu_peers.py` writes this page and measures everything below in one run. Compare ratios within a table. The\n"
    text += "times are those of one machine.\n\n"
    text += f"{machine()}; faiss-cpu {faiss.__version__}, PyTorch {torch.__version__.split('+')[0]}; "
    text += f"{datetime.date.today().isoformat()}. {HEADS}/{KV_HEADS} heads of {CHANNELS} channels.\n"
    for title, body in [
        ("Methods", lambda: methods(args, cores)),
        ("Full attention of a decode step", lambda: attention(args, cores)),
        ("The 4-bit scan", lambda: fast_scan(args)),
        ("Encoding keys", lambda: encode(args, cores)),
        ("Prompts", lambda: prefill(args, cores)),
        ("Codebooks", lambda: kmeans(args, cores)),
    ]:
        text += f"\n## {title}\n\n{body()}"
        # Keeps the finished parts if a later one fails.
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(text)
    print(text)


if __name__ == "__main__":
    main()
