#!/usr/bin/env python3
"""Times decode steps of whole models beside llama.cpp and transformers, and puts the loss of the same setting beside the time.

    python benches/decode_peers.py KVSMITH REAL [--only smollm2,0.6b,1b,4b] [--llama PYTHON] [--transformers PYTHON] [--rounds 3]

REAL is the folder that `make real` made. The first PYTHON has the package llama-cpp-python (0.3.36), the second one
transformers (4.57.3) and torch; without them, there are no rows of these programs. Run it alone: it uses all cores.

SmolLM2-135M is timed where its loss is known: at the length, and with the budgets, of rows of docs/results/text.json,
questions-4096.json and long.json; at 1,024 positions with full attention alone. The other models are shapes with random
weights, so no loss is known. kvsmith and transformers fill their caches with random rows, llama.cpp's is filled with the
state of a short prompt, again and again; a step of most methods reads as many bytes as after a real prompt (`lfps` and
`ctkvr` choose by attention, which is not that of text). The contenders take turns; a row has the median over the rounds,
and all of them.

The script writes docs/results/decode.json after each model; scripts/render.py makes the tables of docs/performance.md from it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))
import documents  # noqa: E402
from claims import NO_BYPASS  # noqa: E402
from lab import known_commit  # noqa: E402

# Methods whose loss and time both are known, and the options of `bench decode` with which they are as in those tables.
LOSSES = {"wpq": (), "selfindex": (), "streaming": (), "pqcache": (), "lfps": (), "a2ats": ("--size", 1024)}
# Tables with the losses, and their shares of the bytes.
TABLES = (("text", (0.1, 0.2)), ("questions-4096", (0.1,)), ("long", (0.05, 0.1)))
# Shapes, and the weights and contexts with which they are timed.
SHAPES = {
    "0.6b": ("qwen3-0.6b", ("bf16", "q8"), ("8K", "32K")),
    "1b": ("llama-3.2-1b", ("bf16", "q8", "q4"), ("8K", "32K", "128K")),
    "4b": ("qwen3-4b", ("q8", "q4"), ("8K", "32K")),
}
SHAPE_METHODS, SHAPE_BUDGET = ("full", "wpq", "selfindex", "streaming"), 0.06
# A context at which SmolLM2 is timed with full attention alone.
SHORT = 1024
# The models that llama.cpp runs too: the name of the file, and the shape if the weights are random.
PEERS = {"smollm2": ("smollm2",), "0.6b": ("qwen3-0.6b", "qwen3-0.6b"), "1b": ("llama-3.2-1b", "llama-3.2-1b"), "4b": ("qwen3-4b", "qwen3-4b")}
# Types of llama.cpp's weights and cache; with a shape, those whose weights are timed with kvsmith too.
LLAMA = (("bf16", "f16"), ("q8", "f16"), ("q8", "q8"))
# Shapes that transformers runs too, and llama.cpp with both types of its cache, of which f16 is the faster one everywhere.
WHOLLY = ("llama-3.2-1b",)


def bench(program, *words):
    """Return the rows of `kvsmith bench decode`."""
    command = [program, "bench", "decode", "--device", "cpu", *words, "--json", "-q"]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["rows"]


def settings():
    """Return what SmolLM2 is timed at: length, method, budget, share of the bytes and the table with the loss.

    The budget is the mean over the works of the table, each of which has its own.
    """
    found = []
    for table, shares in TABLES:
        document = documents.load(table)
        if document is None:
            print(f"note: no {table}.json: its settings are left out", file=sys.stderr)
            continue
        for row in document["rows"]:
            if row["form"] not in ("", NO_BYPASS) or row["method"] not in LOSSES or row["share"] not in shares or row["budget"] is None:
                continue
            budgets = row["budget"] if isinstance(row["budget"], list) else [row["budget"]]
            found.append({"context": document["length"], "method": row["method"], "budget": statistics.fmean(budgets), "share": row["share"], "table": table})
    return found


def in_turns(contenders, rounds):
    """Time (rows, function) pairs in turns; return each row with the median of its rates, and all of them.

    A function times a list of rows.
    """
    found = [[] for rows, _ in contenders for _ in rows]
    for number in range(rounds):
        places = iter(found)
        for rows, run in contenders:
            for row, timed in zip(rows, run(), strict=True):
                next(places).append(timed)
                print(f"round {number + 1}: {json.dumps(row)}: {timed['tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
    all_rows = (row for rows, _ in contenders for row in rows)
    return [row | each[-1] | {"tokens_per_s": statistics.median(one["tokens_per_s"] for one in each), "rounds": [one["tokens_per_s"] for one in each]}
            for row, each in zip(all_rows, found)]


def kvsmith(program, model, weights, contexts, methods, budget, options=(), runs=6):
    """Return a function that times kvsmith at several contexts, and there with several methods."""
    def run():
        rows = bench(program, *model, *(("--weights", weights) if weights != "bf16" else ()), "--context", ",".join(map(str, contexts)),
                     "--methods", ",".join(methods), "--budget", budget, "--runs", runs, *options)
        return [{key: row[key] for key in ("tokens_per_s", "bytes_read_fraction", "bytes_moved_fraction", "bytes", "weight_bytes", "kv_bytes")} for row in rows]
    return run


def llama(python, gguf, context, cache):
    """Return a function that times llama.cpp: the better of flash attention on and off."""
    def run():
        rates = {}
        for flash in (0, 1) if cache == "f16" else (1,):
            command = [python, HERE / "llama_decode.py", gguf, context, cache, flash]
            done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
            rates[flash] = json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]
        best = max(rates, key=rates.get)
        return [{"tokens_per_s": rates[best], "flash_attention": bool(best)}]
    return run


def transformers(python, model, context):
    """Return a function that times transformers: the faster of its two caches."""
    def run():
        command = [python, HERE / "transformers_decode.py", model, context]
        done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
        timed = json.loads(done.stdout.splitlines()[-1])
        return [{"tokens_per_s": timed["tokens_per_s"], "cache_class": timed["cache"]}]
    return run


def positions(text):
    return int(text[:-1]) * 1024 if str(text).endswith("K") else int(text)


def smollm2(arguments, ggufs):
    """Time SmolLM2 at every setting of the tables."""
    model = ("--model", arguments.real / "model")
    contenders, chosen = [], settings()
    for context in sorted({SHORT, *(setting["context"] for setting in chosen)}):
        for weights in ("bf16", "q8"):
            common = {"program": "kvsmith", "model": "smollm2-135m", "weights": weights, "cache": "bf16", "context": context}
            contenders.append(([common | {"method": "full"}], kvsmith(arguments.kvsmith, model, weights, [context], ["full"], 1.0)))
            for of in chosen:
                if of["context"] == context:
                    contenders.append(([common | of], kvsmith(arguments.kvsmith, model, weights, [context], [of["method"]], of["budget"], LOSSES[of["method"]])))
        for weights, cache in LLAMA if arguments.llama else ():
            row = {"program": "llama.cpp", "model": "smollm2-135m", "weights": weights, "cache": cache, "context": context, "method": "full"}
            contenders.append(([row], llama(arguments.llama, ggufs[weights], context, cache)))
        if arguments.transformers:
            row = {"program": "transformers", "model": "smollm2-135m", "weights": "bf16", "cache": "bf16", "context": context, "method": "full"}
            contenders.append(([row], transformers(arguments.transformers, arguments.real / "model", context)))
    return in_turns(contenders, arguments.rounds)


def shape(arguments, name, ggufs):
    """Time a shape with random weights, which each run draws once."""
    of, all_weights, contexts = SHAPES[name]
    contenders = []
    for weights in all_weights:
        rows = [{"program": "kvsmith", "model": of, "weights": weights, "cache": "bf16", "context": positions(context), "method": method}
                | ({"budget": SHAPE_BUDGET} if method != "full" else {}) for context in contexts for method in SHAPE_METHODS]
        contenders.append((rows, kvsmith(arguments.kvsmith, ("--shapes", of), weights, contexts, SHAPE_METHODS, SHAPE_BUDGET, runs=3)))
    for context in map(positions, contexts):
        for weights, cache in LLAMA:
            if weights in ggufs and (cache == "f16" or of in WHOLLY):
                row = {"program": "llama.cpp", "model": of, "weights": weights, "cache": cache, "context": context, "method": "full"}
                contenders.append(([row], llama(arguments.llama, ggufs[weights], context, cache)))
        if arguments.transformers and of in WHOLLY:
            row = {"program": "transformers", "model": of, "weights": "bf16", "cache": "bf16", "context": context, "method": "full"}
            contenders.append(([row], transformers(arguments.transformers, of, context)))
    return in_turns(contenders, arguments.rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("--only", default="smollm2,0.6b,1b,4b", help="models to time (default: all)")
    parser.add_argument("--llama", help="a Python with the package llama-cpp-python")
    parser.add_argument("--transformers", help="a Python with the packages transformers and torch")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    arguments = parser.parse_args()
    version = subprocess.run([arguments.kvsmith, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()
    peers = {}
    if arguments.llama:
        peers["llama.cpp"] = f"llama-cpp-python {printed(arguments.llama, 'import llama_cpp; print(llama_cpp.__version__)')}"
        (arguments.real / "lab").mkdir(exist_ok=True)
    if arguments.transformers:
        peers["transformers"] = printed(arguments.transformers, "import torch, transformers; print('transformers', transformers.__version__, 'on PyTorch', torch.__version__.split('+')[0])")
    document = documents.load("decode") or {"table": "decode", "runs": [], "rows": []}
    for name in arguments.only.split(","):
        weights = ("bf16", "q8") if name == "smollm2" else SHAPES[name][1]
        ggufs = files(arguments.real, PEERS[name], weights) if arguments.llama else {}
        rows = smollm2(arguments, ggufs) if name == "smollm2" else shape(arguments, name, ggufs)
        mine = {row["model"] for row in rows}
        run = {"models": sorted(mine), "program": known_commit(", ".join(version[:2])), "machine": machine(version), "rounds": arguments.rounds,
               "peers": [said for program, said in peers.items() if any(row["program"] == program for row in rows)]}
        document["runs"] = [of for of in document["runs"] if not mine & set(of["models"])] + [run]
        document["rows"] = [row for row in document["rows"] if row["model"] not in mine] + rows
        order = ["smollm2-135m", *(model for model, _, _ in SHAPES.values())]
        place = {model: i for i, model in enumerate(order)}
        document["runs"].sort(key=lambda of: place.get(of["models"][0], len(order)))
        document["rows"].sort(key=lambda row: place.get(row["model"], len(order)))
        documents.save("decode", document)


def printed(python, code):
    """Return what a Python prints."""
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def files(real, words, types):
    """Return the model's GGUF files by type of weights; makes those that are missing."""
    found = {}
    for weights in types:
        if weights not in dict(LLAMA):
            continue
        path = real / "lab" / f"{words[0]}-{weights}.gguf"
        if not path.exists():
            subprocess.run([sys.executable, str(HERE / "llama_gguf.py"), str(real), weights, str(path), *words[1:]], check=True)
        found[weights] = path
    return found


def machine(version):
    """Describe the processor."""
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name")] if os.path.exists("/proc/cpuinfo") else []
    features = next((line for line in version if line.startswith("cpu: ")), "cpu: ")[5:]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} threads, {features}"


if __name__ == "__main__":
    main()
