#!/usr/bin/env python3
"""Runs two builds of kvsmith on the same commands and compares all their output, byte for byte.

Needs only Python. Both programs run on the CPU, on the bundled model and on the fixtures of tests/fixtures:

    python benches/same_results.py --against OLD_PROGRAM [--program target/release/kvsmith]

The script compares the exit code, stdout, stderr and every file written: artifacts, sections, moments, dumps and traces. It
ignores measured times and memory, which TIMES and TIMES_IN_TEXT below name. The exit code is 1 if anything else differs, or
if a command that should succeed fails with both programs.

--quick runs a part of the commands, --only those whose name matches a pattern, and the commands that they need.
--self-test shows that the script finds differences: it compares one program with itself under different options.
"""

import argparse
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Measured members of the JSON documents on stdout.
TIMES = [
    "prefill_s", "decode_s", "tokens_per_s", "seconds", "verdict_seconds", "step_s", "full_step_s", "median_s", "min_s", "max_s",
    "upload_s", "seed_s", "pass_s", "gflops", "gbytes_per_s", "peak_bytes", "read_loop_gbytes_per_s",
    "scattered_loop_gbytes_per_s", "bandwidth_share", "gemm_gflops", "gemm_share",
]
# Measured values in text output and random parts of temporary names, each with its replacement.
TIMES_IN_TEXT = [
    (r"(?m)^layer \d+ \([\d-]+\): .* elapsed, .*\n", ""),
    (r"(?s)  at \d+ positions, a step takes.*?(?=\n  \S|\Z)", "  a step takes _"),
    (r"\b\d+\.\d+ s\b", "_ s"), (r"\bm(in|ax) \d+\.\d+\b", r"m\1 _"),
    (r"\b\d+ (hours?|minutes?|seconds?) (elapsed|left)", r"_ \2"),
    (r"\(\d+(\.\d+)? tokens/s\)", "(_ tokens/s)"), (r"\b\d+\.\d+ GB/s", "_ GB/s"),
    (r"\b\d+ GFLOP/s", "_ GFLOP/s"), (r"/\.kvsmith-\w+\.part", "/.kvsmith-_.part"),
]
METHODS = ["full", "topk", "random", "streaming", "quest", "snapkv", "a2ats", "selfindex", "lfps", "ctkvr", "wpq"]
GOLDEN = sorted(os.listdir(os.path.join(ROOT, "tests/fixtures/golden")))
# Paths are relative to the folder in which a program runs, so that messages name the same paths.
LINKS = {"model": "calib-data/model", "data": "calib-data", "golden": "tests/fixtures/golden"}
TEXT = "--text data/text.txt --seq-len 1024"


@dataclass
class Case:
    name: str
    command: str
    quick: bool = False
    stdin: str = ""
    # Whether later cases read what it writes.
    makes: bool = False
    # Largest file that the command may write, in bytes; 0: no limit.
    limit: int = 0
    # Expected exit code; None: that of the older program.
    code: int | None = 0


@dataclass
class Outcome:
    code: int
    stdout: bytes
    stderr: bytes
    # Files written, changed or removed.
    files: list = field(default_factory=list)


def calibration():
    """Makes the artifact of the bundled model, the same step by step, and small artifacts of every kind of model."""
    calibrate = f"calibrate --model model {TEXT} --wrope-position 1024 --json"
    yield Case("calibrate", f"{calibrate} --max-tokens 8192 --uuid-tokens 2048 --size 256 -v -o art.st", quick=True, makes=True)
    small = f"{calibrate} --max-tokens 3072 --uuid-tokens 0 --size 64"
    yield Case("calibrate, plain metric, mean center, seed 7", f"{small} --metric plain --center mean --seed 7 -o plain.st")
    yield Case("calibrate, standard RoPE, nothing held out", f"{small} --rope standard --holdout 0 -o standard.st")
    yield Case("calibrate, few passes, least gain, one thread", f"{small} --iterations 4 --min-gain 0.01 --threads 1 -o few.st")
    yield Case("calibrate with a work folder", f"{small} --work work -o worked.st")
    # The artifact exceeds the limit; the files of the work folder do not.
    stopped = f"{calibrate} --max-tokens 1024 --uuid-tokens 0 --size 800 --work stopped -o resumed.st"
    yield Case("calibrate, stopped", stopped, makes=True, limit=850_000, code=1)
    yield Case("calibrate, resumed", f"{stopped} --resume")
    for name in GOLDEN:
        tokens = "--tokens ids.json --size 16 --wrope-position 64"
        yield Case(f"calibrate {name}", f"calibrate --model golden/{name} {tokens} -o {name}.st", name == "mistral_sliding", makes=True)
    take = f"--model model {TEXT} --max-tokens 3072 --uuid-tokens 512 --wrope-position 1024"
    yield Case("dump f32", f"dump {take} --queries --values --dtype f32 -o dump-f32 -v", makes=True)
    yield Case("dump bf16", f"dump {take} --queries --values -o dump-bf16 --json", makes=True)
    yield Case("dump f16, keys alone", f"dump {take} --dtype f16 -o dump-f16")
    yield Case("dump qwen3_yarn", "dump --model golden/qwen3_yarn --tokens ids.json --queries --wrope-position 64 -o dump-yarn", True)
    for kind in ["f32", "bf16"]:
        dump = f"--dump dump-{kind}"
        yield Case(f"moments of {kind}", f"moments {dump} --wrope-position 512 -o moments-{kind}.st", makes=True)
        yield Case(f"moments of {kind}, standard RoPE", f"moments {dump} --rope standard -o standard-{kind}.st --json", makes=True)
        yield Case(f"codebook of {kind}", f"codebook {dump} --size 64 -o a2ats-{kind}.st", makes=True)
        yield Case(f"codebook of {kind}, other moments", f"codebook {dump} --size 32 --moments moments-{kind}.st -o b-{kind}.st")
        yield Case(f"codebook of {kind}, standard RoPE", f"codebook {dump} --size 32 --moments standard-{kind}.st -o c-{kind}.st --json")
        yield Case(f"signs of {kind}", f"signs {dump} -o sign-{kind}.st", makes=True)
        yield Case(f"signs of {kind}, mean center", f"signs {dump} --center mean -o mean-{kind}.st --json")
        yield Case(f"priors of {kind}", f"priors {dump} -o lfps-{kind}.st", makes=True)
        parts = f"lfps-{kind}.st a2ats-{kind}.st sign-{kind}.st"
        yield Case(f"pack {kind}", f"pack {parts} --model model -o packed-{kind}.st --json", makes=True)


def inspection():
    for i, options in enumerate(["", "--json", "--layer 1", "--head 1 --json", "--layer 0 --head 1", "--verify --model model"]):
        yield Case(f"inspect {options}".strip(), f"inspect art.st {options}", i < 2)
    for file in ["a2ats-f32.st", "sign-bf16.st", "lfps-f32.st", "packed-bf16.st --json", "mistral_sliding.st", "standard.st --verify"]:
        yield Case(f"inspect {file}", f"inspect {file}")


def runs():
    bare = "run --model model --max-new 12 --ignore-eos"
    base = f"{bare} --artifact art.st"
    prompt = "--prompt-file data/demo-prompt.txt"
    for method, budget in itertools.product(METHODS, ["0.03", "24", "1.0"]):
        command = f"{base} {prompt} --method {method} --budget {budget} --json --trace t.jsonl"
        yield Case(f"run {method}, budget {budget}", command, budget == "24")
    for method, kv in itertools.product(METHODS, ["f32", "f16", "bf16", "2bit"]):
        command = f"{base} {prompt} --method {method} --budget 0.05 --kv {kv} --json --trace t.jsonl"
        yield Case(f"run {method}, --kv {kv}", command, kv == "2bit" and method in ["full", "selfindex"])
    options = [
        "", "--method full", "--method a2ats --topk-per-query-head 0.02", "--sinks 0 --window 1", "--sinks 16 --window 256",
    ]
    options += [f"--method selfindex --sign-centroids {kind}" for kind in ["one-pass", "offline", "signs"]]
    options += [f"--method selfindex {more}" for more in ["--sign-full 0", "--kv 2bit --plain-keys", "--sign-centroids one-pass --center mean"]]
    lfps = ["--lfps-rows 0", "--lfps-prior 0", "--lfps-alpha 1", "--lfps-theta 0.2", "--lfps-threshold budget"]
    options += [f"--method lfps {more}" for more in lfps]
    ctkvr = ["--ct-centroids 8", "--ct-probes 1", "--ct-update 0", "--ct-update 4", "--ct-list 2", "--ct-keep"]
    options += [f"--method ctkvr {more}" for more in ctkvr + [f"--ct-choose {kind}" for kind in ["even", "first", "random"]]]
    for more in options:
        yield Case(f"run {more}".strip(), f"{base} {prompt} {more} --trace t.jsonl")
    for method, file in [("a2ats", "standard"), ("a2ats", "plain"), ("selfindex", "plain"), ("lfps", "packed-bf16"), ("lfps", "lfps-f32")]:
        yield Case(f"run {method} with {file}", f"{bare} {prompt} --method {method} --artifact {file}.st --kv bf16 --trace t.jsonl")
    yield Case("run selfindex, mean center, 2bit", f"{bare} {prompt} --method selfindex --artifact plain.st --kv 2bit --center mean --trace t.jsonl")
    for more in ["--seed 1", "--seed 2", "--top-p 0.8", "--method random --seed 5", "--threads 1"]:
        yield Case(f"run, sampled, {more}", f"{base} {prompt} --temperature 0.9 {more} --json", more == "--seed 1")
    yield Case("run, not ignoring stop tokens", f"run --model model {prompt} --max-new 40 --temperature 1.5 -v")
    yield Case("run without an artifact", "run --model model --prompt 'In the beginning' --max-new 8 --top-p 0.5", True)
    talk = "And it came to pass\nthat the king of Israel\n\nsaid unto him\n"
    for method in ["full", "a2ats", "selfindex", "lfps", "ctkvr", "quest", "snapkv"]:
        command = f"{base} --chat --method {method} --budget 0.1 --window 8 --json --trace t.jsonl"
        yield Case(f"chat {method}", command, method in ["lfps", "ctkvr"], stdin=talk)
    yield Case("chat, a first prompt, 2bit", f"{base} --chat {prompt} --kv 2bit --method selfindex", stdin=talk)
    yield Case("chat with a template", "run --model chat-model --chat --system Sing --max-new 8 --method full --json", stdin=talk)
    yield Case("chat of token ids", "run --model golden/llama_default --chat --tokens ids.json --max-new 4 --method ctkvr --budget 6 --window 4 --json")
    for name, method in itertools.product(GOLDEN, METHODS):
        command = f"run --model golden/{name} --artifact {name}.st --tokens prompt.json --max-new 10 --ignore-eos --sinks 2 --window 4"
        quick = name == "mistral_sliding" and method in ["lfps", "topk"]
        yield Case(f"run {name}, {method}", f"{command} --method {method} --budget 6 --json --trace t.jsonl", quick)


def evaluation():
    base = "eval --model model --artifact art.st"
    text = "--text data/heldout.txt --seq-len 384 --decode 8 --max-tokens"
    every = ",".join(METHODS)
    yield Case("eval every method", f"{base} {text} 768 --methods {every} --budgets 0.05,16,1.0 --json")
    yield Case("eval, turns and heads", f"{base} {text} 768 --methods {every} --budgets 0.08 --turns 3 --per-head --json")
    yield Case("eval, quick", f"{base} {text} 256 --methods a2ats,lfps,snapkv --turns 2 --per-head", True)
    for kv in ["bf16", "f16", "2bit"]:
        yield Case(f"eval, --kv {kv}", f"{base} {text} 768 --methods {every} --kv {kv} --json --window 16")
    yield Case("eval, UUIDs", f"eval --model model {text} 768 --uuid-tokens 128 --methods topk,quest --seed 3")
    few = ",".join(["topk", "a2ats", "selfindex", "lfps", "ctkvr", "snapkv"])
    yield Case("eval needles", f"{base} --needles needles.jsonl --methods {every} --budgets 0.05 --json")
    yield Case("eval needles, a table", f"{base} --needles needles.jsonl --methods {few} --budgets 0.02,0.1")
    yield Case("eval conversations", f"{base} --needles conversations.jsonl --methods {few} --json")
    for name in GOLDEN:
        command = f"eval --model golden/{name} --artifact {name}.st --tokens ids.json --decode 6 --sinks 2 --window 4 --per-head --json"
        yield Case(f"eval {name}", f"{command} --methods {every} --budgets 4,0.3")


def benchmarks():
    """Compares what `bench` prints besides times."""
    yield Case("bench kmeans", "bench kmeans --n 4096 --dim 32 --size 64 --iterations 8 --runs 1 --json -o codebook.st", makes=True)
    yield Case("bench kmeans, heads", "bench kmeans --heads 3 --n 1000 --dim 20 --size 17 --seed 4 --runs 1 --json -o heads.st", True)
    yield Case("bench kmeans of points", "bench kmeans --points points.st --size 8 --runs 1 --json -o fitted.st")
    shape = "--device cpu --shapes 4/2x64 --context 2K --runs 1 --json"
    methods = "full,topk,a2ats,selfindex,lfps,ctkvr"
    for kv in ["f32", "f16", "bf16", "2bit"]:
        yield Case(f"bench attend, --kv {kv}", f"bench attend {shape} --size 64 --kv {kv} --methods {methods}")
    yield Case("bench retrieve", f"bench retrieve {shape} --size 64 --methods a2ats,selfindex --ranking plain")
    yield Case("bench encode", "bench encode --n 512 --size 64 --dim 32 --runs 1 --json")
    yield Case("bench prefill", "bench prefill --tokens 64 --hidden 128 --intermediate 256 --heads 4 --kv-heads 2 --head-dim 32 --runs 1 --json")


def failures():
    run = "run --model golden/llama_default"
    commands = [
        "", "frobnicate", "--help", "--version", "run --help", "calibrate --help", "eval --help", "bench attend --help", run,
        f"{run} --tokens prompt.json --budget 1.5", f"{run} --tokens prompt.json --budget 0", f"{run} --tokens prompt.json --window 0",
        f"{run} --tokens prompt.json --method a2ats", f"{run} --tokens prompt.json --method guess", f"{run} --tokens none.json",
        f"{run} --tokens ids.json", f"{run} --tokens prompt.json --artifact art.st", f"{run} --tokens prompt.json --device wgpu",
        f"{run} --tokens prompt.json --artifact qwen2_bias.st", f"{run} --tokens prompt.json --artifact qwen2_bias.st --force",
        f"{run} --tokens prompt.json --kv host --device cpu", f"{run} --prompt text", f"{run} --tokens prompt.json --trace none/t",
        f"{run} --tokens prompt.json --lfps-theta 2", f"{run} --tokens prompt.json --ct-list 0", f"{run} --tokens prompt.json --topk-per-query-head 0",
        f"{run} --tokens prompt.json --artifact a2ats-f32.st --method lfps", f"{run} --tokens outside.json", f"{run} --tokens bad.json",
        "run --model none --prompt x", "run --model data --prompt x", "run --model model --prompt ''",
        "inspect none.st", "inspect ids.json", "inspect cut.st", "inspect altered.st", "inspect altered.st --verify", "inspect format.st",
        "inspect art.st --layer 4", "inspect art.st --head 2 --json", "inspect art.st --model model", "inspect art.st --device cuda",
        "inspect art.st --verify --model golden/llama_default", "inspect codebook.st", "inspect moments-f32.st",
        f"calibrate --model model {TEXT} --max-tokens 256 -o x.st", f"calibrate --model model {TEXT} --size 0 -o x.st",
        f"calibrate --model model {TEXT} --max-tokens 512 --uuid-tokens 0 --size 64 --holdout 1 -o x.st", "calibrate --model model -o x.st",
        f"calibrate --model model {TEXT} -o none/x.st", f"calibrate --model model {TEXT} -o x.st --resume",
        "calibrate --model golden/llama_default --tokens short.json --size 4 -o x.st",
        f"dump --model model {TEXT} -o dump-f32", "dump --model model --text none.txt -o x", "dump --model model --text ids.json -o x",
        "codebook --dump none -o x.st", "codebook --dump dump-bf16 --moments moments-f32.st --size 4 -o x.st", "codebook --dump dump-f32 -o x.st",
        "moments --dump dump-f16 -o x.st", "priors --dump dump-f16 -o x.st", "signs --dump model -o x.st", "priors --dump dump-f32 -o x.st --device wgpu",
        "pack a2ats-f32.st a2ats-f32.st --model model -o x.st", "pack a2ats-f32.st lfps-bf16.st --model model -o x.st",
        "pack a2ats-f32.st --model golden/llama_default -o x.st", "pack moments-f32.st --model model -o x.st",
        "eval --model model --text data/heldout.txt --methods lfps --budgets 0", "eval --model model --needles ids.json --methods topk",
        "eval --model model --text data/heldout.txt --methods a2ats", "eval --model model --needles empty.jsonl --methods topk",
        "eval --model model --needles wrong.jsonl --methods topk", "eval --model model --tokens short.json --methods topk --turns 9",
        "bench attend --methods quest", "bench attend --device wgpu", "bench retrieve --ranking plain --methods lfps", "bench kmeans --n 99999999999999",
        "bench kmeans --points art.st", "bench encode --size 70000", "bench prefill --heads 3 --kv-heads 2", "bench decode --device cpu --batch 2",
    ]
    for command in commands:
        # --quick does not make all files that these commands read.
        quick = not re.search(r"dump-|-f32|-bf16|qwen2_bias.st|codebook.st", command)
        yield Case(f"kvsmith {command}".strip(), command, quick, code=None)


def write_inputs(folder):
    """Writes the inputs that are not files of the repository."""
    for name, target in LINKS.items():
        os.symlink(os.path.join(ROOT, target), os.path.join(folder, name))
    ids = lambda n, start: [(i * i + 7 * i + start) % 90 + 3 for i in range(n)]
    shutil.copytree(os.path.join(ROOT, "calib-data/model"), os.path.join(folder, "chat-model"))
    shutil.copy(os.path.join(ROOT, "tests/fixtures/chat/qwen25.jinja"), os.path.join(folder, "chat-model/chat_template.jinja"))
    texts = {
        "ids.json": json.dumps([ids(90, 0), ids(61, 5), ids(40, 9)]),
        "prompt.json": json.dumps([ids(70, 3)]),
        "short.json": "[[3, 4]]",
        "outside.json": "[[3, 400]]",
        "bad.json": "[[3, 4",
        "empty.jsonl": "\n",
        "wrong.jsonl": '{"prompt": "a"}\n',
    }
    for name, count in [("needles", 3), ("conversations", 1)]:
        with open(os.path.join(ROOT, f"calib-data/{name}.jsonl"), encoding="utf-8") as file:
            texts[f"{name}.jsonl"] = "".join(itertools.islice(file, count))
    for name, text in texts.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    values = [((i * 7919) % 1009) / 512 - 1 for i in range(600 * 8)]
    header = json.dumps({"x": {"dtype": "F32", "shape": [600, 8], "data_offsets": [0, 4 * len(values)]}}).encode()
    write(os.path.join(folder, "points.st"), struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(values)}f", *values))


def damage(folder):
    """Writes broken forms of the artifact."""
    good = read(os.path.join(folder, "art.st"))
    flipped = bytearray(good)
    flipped[-1] ^= 1
    write(os.path.join(folder, "cut.st"), good[: len(good) // 2])
    write(os.path.join(folder, "altered.st"), bytes(flipped))
    write(os.path.join(folder, "format.st"), good.replace(b'\\"format\\":1,', b'\\"format\\":2,'))


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def listing(folder):
    """Returns every file below a folder, without following links, with values that change when it is written."""
    found = {}
    for base, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(base, name)
            stat = os.lstat(path)
            found[os.path.relpath(path, folder)] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return found


def execute(program, case, folder):
    # A trace replaces another only with --overwrite, which older programs do not have.
    for trace in re.findall(r"--trace (t\.jsonl)", case.command):
        if os.path.exists(os.path.join(folder, trace)):
            os.remove(os.path.join(folder, trace))
    before = listing(folder)
    # Usage texts contain the name by which the program was called.
    command = ["kvsmith", *shlex.split(case.command)]
    pipe = subprocess.PIPE
    limit = lambda: case.limit and resource.setrlimit(resource.RLIMIT_FSIZE, (case.limit, case.limit))
    # The signal of this limit stays ignored, so that exceeding it is a file error.
    process = subprocess.Popen(
        command, executable=program, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=limit, restore_signals=False
    )
    stdout, stderr = process.communicate(case.stdin.encode(), timeout=600)
    after = listing(folder)
    files = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return Outcome(process.returncode, stdout, stderr, files)


def without_times(text, folder):
    """Returns output without measured values and without the name of its folder."""
    text = text.decode("utf-8", "replace").replace(folder, "")
    text = re.sub(rf'("(?:{"|".join(TIMES)})": ?)[-+.0-9eE]+', r"\1_", text)
    if not text.startswith("{"):
        for pattern, instead in TIMES_IN_TEXT:
            text = re.sub(pattern, instead, text)
    return text


def member(old, new, path=""):
    """Returns the first member in which two JSON values differ."""
    if type(old) is type(new) is dict and list(old) == list(new):
        return next((found for key in old if (found := member(old[key], new[key], f"{path}.{key}"))), None)
    if type(old) is type(new) is list and len(old) == len(new):
        return next((found for i, pair in enumerate(zip(old, new)) if (found := member(*pair, f"{path}[{i}]"))), None)
    return None if repr(old) == repr(new) else f"{path or 'the document'}: {shortened(old)} is now {shortened(new)}"


def shortened(value):
    text = json.dumps(value)
    return text if len(text) < 100 else text[:97] + "..."


def text_difference(old, new):
    """Returns where two texts first differ: a member of JSON, or a line."""
    for i, (a, b) in enumerate(itertools.zip_longest(old.splitlines(), new.splitlines())):
        if a == b:
            continue
        try:
            # The replacement of a measured value is not JSON.
            found = member(*(json.loads(re.sub(r'": ?_', '": 0', line or "")) for line in (a, b)))
        except json.JSONDecodeError:
            found = None
        return f"line {i + 1}, {found}" if found else f"line {i + 1}: {shortened(a)} is now {shortened(b)}"
    return "the end of the last line"


def bytes_difference(old, new):
    at = next((i for i, pair in enumerate(zip(old, new)) if pair[0] != pair[1]), min(len(old), len(new)))
    return f"byte {at} ({len(old)} and {len(new)} bytes)"


def tensors(data):
    """Returns the manifest of a safetensors file, and the bytes of each tensor."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    manifest = json.loads(header.pop("__metadata__", {}).get("kvsmith", "{}"))
    body = data[8 + size :]
    return manifest, {name: (info["dtype"], info["shape"], body[slice(*info["data_offsets"])]) for name, info in header.items()}


def file_difference(old, new):
    """Returns where two files first differ: a tensor, the manifest, or a line."""
    try:
        (manifest, was), (other, now) = tensors(old), tensors(new)
        for name in [*was, *now]:
            if was.get(name) != now.get(name):
                (a, b) = (pair.get(name, ("", [], b"")) for pair in (was, now))
                if a[:2] == b[:2]:
                    return f"tensor {name}, {bytes_difference(a[2], b[2])}"
                return f"tensor {name}: {a[:2]} is now {b[:2]}"
        # Moved to the end: the seal only says that there is a difference.
        for seal in (manifest, other):
            seal["manifest_sha256"] = seal.pop("manifest_sha256", "")
        found = member(manifest, other)
        return f"manifest{found}" if found else f"the header, {bytes_difference(old, new)}"
    except (ValueError, KeyError, struct.error):
        pass
    try:
        return text_difference(old.decode(), new.decode())
    except UnicodeDecodeError:
        return bytes_difference(old, new)


def difference(folders, outcomes):
    """Describes the first difference between two runs; `None` if there is none."""
    old, new = outcomes
    if old.code != new.code:
        return f"exit code {old.code} is now {new.code}: {new.stderr.decode('utf-8', 'replace').strip()[-200:]}"
    for stream in ["stdout", "stderr"]:
        a, b = (without_times(getattr(outcome, stream), folder) for outcome, folder in zip(outcomes, folders))
        if a != b:
            return f"{stream}, {text_difference(a, b)}"
    if old.files != new.files:
        return f"files {shortened(old.files)} are now {shortened(new.files)}"
    for path in old.files:
        a, b = (read(full) if os.path.exists(full := os.path.join(folder, path)) else b"" for folder in folders)
        if a != b:
            return f"{path}, {file_difference(a, b)}"
    return None


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/kvsmith", help="the build to check")
    parser.add_argument("--against", help="the build with which it must agree")
    parser.add_argument("--quick", action="store_true", help="run only a part of the commands")
    parser.add_argument("--only", metavar="PATTERN", help="run only commands whose name matches, and those that they need")
    parser.add_argument("--self-test", action="store_true", help="show that the script finds differences")
    args = parser.parse_args()
    if not args.self_test and not args.against:
        parser.error("--against is needed")
    return args


def compare(programs, folders, args):
    """Runs every case with both programs; returns the exit code."""
    cases = [*calibration(), *inspection(), *runs(), *evaluation(), *benchmarks(), *failures()]
    if args.quick:
        cases = [case for case in cases if case.quick]
    if args.only:
        cases = [case for case in cases if case.makes or re.search(args.only, case.name)]
    start, bad, files = time.monotonic(), 0, 0
    for case in cases:
        outcomes = [execute(program, case, folder) for program, folder in zip(programs, folders)]
        found = difference(folders, outcomes)
        if not found and outcomes[0].code != case.code is not None:
            found = f"exit code {outcomes[0].code} with both: {outcomes[0].stderr.decode('utf-8', 'replace').strip()}"
        if case.name == "calibrate":
            for folder in folders:
                damage(folder)
        bad += found is not None
        files += len(outcomes[0].files)
        print(f"{'DIFFERS' if found else 'same   '} {case.name}{': ' + found if found else ''}", flush=True)
    print(f"{len(cases)} commands, {files} files, {bad} differences, {time.monotonic() - start:.0f} s")
    return int(bad > 0)


# Where the script must find a difference, and between which two commands; "nowhere" if there is none.
PAIRS = [
    ("art.st, tensor a2ats.codebook, byte", f"calibrate --model model {TEXT} --max-tokens 1024 --uuid-tokens 0 --size 16 --no-verdict --seed {{0|1}} -o art.st"),
    ("art.st, manifest.sections.a2ats", f"calibrate --model model {TEXT} --max-tokens 1024 --uuid-tokens 0 --size 2 --no-verdict --iterations {{90|91}} -o art.st"),
    ("dump/layer-00000.safetensors, tensor k_pre, byte", f"dump --model model {TEXT} --max-tokens 256 --uuid-tokens 256 --seed {{0|1}} -o dump -q"),
    ("files [", "calibrate --model golden/qwen2_bias --tokens ids.json --size 4 -o {a|b}.st -q"),
    ("stdout, line 1, .ids[", "run --model model --prompt Lo --max-new 8 --temperature 1 --seed {0|1} --ignore-eos --json"),
    ("stdout, line 1: ", "run --model model --prompt Lo --max-new 8 --temperature 1 --seed {0|1} --ignore-eos"),
    ("t.jsonl, line 1, .positions: ", "run --model model --prompt-file data/demo-prompt.txt --method topk --budget {9|10} --max-new 3 --ignore-eos --trace t.jsonl -q"),
    ("stdout, line 1, .rows[0].", "eval --model golden/qwen2_bias --tokens ids.json --methods topk --budgets 4 --decode {8|9} --window 4 --json -q"),
    ("stderr, line 1: ", "inspect {none|nine}.st"),
    ("exit code 1 is now 2", "inspect none.st {-q|-x}"),
    ("nowhere", "run --model model --prompt Lo --max-new 8 --ignore-eos --json"),
]


def self_test(program, folders):
    """Compares a program with itself under different options; returns the exit code."""
    bad = 0
    for expected, command in PAIRS:
        sides = [re.sub(r"\{(.*)\|(.*)\}", choice, command) for choice in (r"\1", r"\2")]
        outcomes = [execute(program, Case("", side), folder) for side, folder in zip(sides, folders)]
        found = difference(folders, outcomes) or "nowhere"
        good = found.startswith(expected)
        if expected == "nowhere":
            # Times must differ, so that ignoring them is tested.
            good &= outcomes[0].stdout != outcomes[1].stdout
        bad += not good
        print(f"{'found ' if good else 'MISSED'} {expected}  <-  {command}  ->  {found}", flush=True)
        for folder in folders:
            for path in outcomes[0].files + outcomes[1].files:
                if os.path.exists(os.path.join(folder, path)):
                    os.remove(os.path.join(folder, path))
    print(f"{len(PAIRS)} pairs, {bad} not judged right")
    return int(bad > 0)


def main():
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="same-results-") as scratch:
        folders = [os.path.join(scratch, name) for name in ("old", "new")]
        for folder in folders:
            os.mkdir(folder)
            write_inputs(folder)
        if args.self_test:
            sys.exit(self_test(os.path.abspath(args.program), folders))
        sys.exit(compare([os.path.abspath(args.against), os.path.abspath(args.program)], folders, args))


if __name__ == "__main__":
    main()
