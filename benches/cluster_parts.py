"""Time and traffic of a calibration that is cut into N token shards and N layer parts, all on this machine.

    python3 benches/cluster_parts.py target/release/kvsmith [--parts 1,2,4,8] [--cores 2] [--work DIR]

As many tasks as cores run at a time, each on one thread, as a cluster of so many small nodes would run them. The first
row is `kvsmith calibrate --no-verdict` on all cores. Every artifact must have its bytes. Bytes read are those that the
tasks ask the system for (`rchar` of /proc/PID/io); the mapped weights of the model are not among them.
"""

import argparse
import concurrent.futures
import filecmp
import pathlib
import shutil
import subprocess
import tempfile
import time

SECTIONS = ["codebook", "signs", "priors", "wpq", "tail"]
MODEL = "calib-data/model"
INPUT = ["--text", "calib-data/text.txt", "--max-tokens", "32K", "--uuid-tokens", "6K", "--seq-len", "2048",
         "--wrope-position", "1024"]


def run(program, arguments):
    """Runs a command; returns the bytes that it read and its CPU seconds."""
    script = '"$@" 2>/dev/null || exit 1; cat /proc/$$/io; cut -d" " -f16,17 /proc/$$/stat'
    out = subprocess.run(["sh", "-c", script, "sh", program, *arguments], check=True, capture_output=True, text=True)
    lines = out.stdout.splitlines()
    read = next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
    ticks = sum(int(field) for field in lines[-1].split())
    return read, ticks / 100


def phase(program, commands, cores):
    """Runs commands, `cores` at a time; returns seconds, bytes read and CPU seconds."""
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        done = list(pool.map(lambda arguments: run(program, [*arguments, "--threads", "1"]), commands))
    return time.monotonic() - start, sum(read for read, _ in done), sum(cpu for _, cpu in done)


def size_below(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sharded(program, work, parts, cores):
    """Calibrates in parts; returns the artifact and the cells of a row."""
    tokens, layers, artifact = work / "tokens", work / "layers", work / "artifact.safetensors"
    layers.mkdir(parents=True)
    dumps = [str(tokens / str(index)) for index in range(parts)]
    dump = ["dump", "--model", MODEL, *INPUT, "--queries", "--values", "--dtype", "f32"]
    first = phase(program, [[*dump, "--shard", f"{i}/{parts}", "-o", out] for i, out in enumerate(dumps)], cores)
    ranges = min(parts, 4)  # the layers of the model

    def fit(section, index):
        flags = ["--size", "256"] if section == "codebook" else []
        out = layers / f"{section}-{index}.safetensors"
        return [section, "--dump", *dumps, "--layers", f"{index}/{ranges}", *flags, "-o", str(out)]

    fits = [fit(section, index) for index in range(ranges) for section in SECTIONS]
    second = phase(program, fits, cores)
    files = [str(path) for path in sorted(layers.glob("*.safetensors"))]
    third = phase(program, [["pack", *files, "--model", MODEL, "-o", str(artifact)]], cores)
    phases = [first, second, third]
    seconds, cpu = (sum(of[column] for of in phases) for column in (0, 2))
    return artifact, seconds, cpu, [of[0] for of in phases], size_below(tokens), size_below(layers), [of[1] for of in phases]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the program")
    parser.add_argument("--parts", default="1,2,4,8", help="numbers of shards, with commas between them")
    parser.add_argument("--cores", type=int, default=2, help="tasks that run at a time")
    parser.add_argument("--work", help="folder for the parts (default: a temporary one)")
    args = parser.parse_args()
    program = str(pathlib.Path(args.program).resolve())
    work = pathlib.Path(args.work or tempfile.mkdtemp())
    one = work / "one.safetensors"
    start = time.monotonic()
    calibrate = ["calibrate", "--no-verdict", "--model", MODEL, *INPUT, "--size", "256", "-o", str(one), "--overwrite"]
    _, cpu = run(program, [*calibrate, "--threads", str(args.cores)])
    whole = time.monotonic() - start
    mb = lambda n: f"{n / 1e6:.0f}"
    print("| N | seconds | dump, fit, join | CPU s | written, MB | read by fits, MB | read by the join, MB | efficiency |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| `calibrate` | {whole:.1f} | | {cpu:.1f} | {mb(one.stat().st_size)} | | | 100% |", flush=True)
    for parts in [int(text) for text in args.parts.split(",")]:
        folder = work / str(parts)
        shutil.rmtree(folder, ignore_errors=True)
        artifact, seconds, cpu, phases, tokens, layers, read = sharded(program, folder, parts, args.cores)
        assert filecmp.cmp(artifact, one, shallow=False), f"{parts} parts: other bytes"
        shown = ", ".join(f"{of:.1f}" for of in phases)
        print(f"| {parts} | {seconds:.1f} | {shown} | {cpu:.1f} | {mb(tokens + layers)} | {mb(read[1])} | {mb(read[2])} "
              f"| {100 * whole / seconds:.0f}% |", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
