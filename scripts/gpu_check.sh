#!/bin/sh
# Every check and measurement that needs an NVIDIA GPU, in one command of less than ten minutes.
#
#     scripts/gpu_check.sh KIT [OUT]
#
# KIT is what `make gpu-kit` put together: the program, the test programs and the libraries they link.
# Nothing else is needed, no Rust and no download. OUT (default: KIT/out) gets gpu.json, and the log of each
# part. The exit status is 0 if every check held; a figure that misses its aim is no failure.
set -u

kit=$(cd "$1" && pwd)
out=${2:-$kit/out}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$kit"
export LD_LIBRARY_PATH="$kit/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export KVSMITH_BIN="$kit/kvsmith" KVSMITH_ROOT="$kit"
failed=""
start=$(date +%s)

# name limit-in-seconds command...: runs a part, its output in OUT/name.log.
part() {
    name=$1 limit=$2
    shift 2
    began=$(date +%s)
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    seconds=$(($(date +%s) - began))
    [ $code = 0 ] || failed="$failed $name"
    echo "$name: exit $code after $seconds s; $(tail -n 1 "$out/$name.log")"
    parts="${parts:-}${parts:+,}
    {\"name\": \"$name\", \"exit\": $code, \"seconds\": $seconds}"
}

# What the tests say they ran must not be nothing.
ran() {
    if ! grep -q "test result: ok. [1-9][0-9]* passed" "$out/$1.log" || grep -q "^cuda: ignored" "$out/$1.log"; then
        echo "$1: it did not run on the GPU" >&2
        failed="$failed $1-ran"
    fi
}

gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -n 1)
echo "GPU: ${gpu:-none found}"

part backends 90 ./backends cuda::
ran backends
part calibrate 80 ./cmd_device cuda
ran calibrate
part decode 40 ./decode cuda::
ran decode

sanitizer=$(command -v compute-sanitizer || echo "$kit/compute-sanitizer/bin/compute-sanitizer")
if [ -x "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        part "$tool" 60 "$sanitizer" --tool $tool --error-exitcode 1 ./backends cuda:: --test-threads 1 \
            --skip 5000x --skip 20000x --skip 100000x
    done
    sanitized=true
else
    echo "compute-sanitizer: not found, left out"
    sanitized=false
fi

# One head at a time against the CPU in the same run, then all 256 heads of Llama-3.1-8B's keys.
part kmeans-cpu 30 ./kvsmith bench kmeans --runs 1 --json --device cpu
part kmeans-one 30 ./kvsmith bench kmeans --runs 5 --json --device cuda
part kmeans-8b 120 ./kvsmith bench kmeans --heads 256 --runs 2 --json --device cuda
# A decode step of one layer of Llama-3.1-8B.
part retrieve 35 ./kvsmith bench retrieve --context 128K,1M --batch 1,4 --json --device cuda
part attend 35 ./kvsmith bench attend --context 8K,128K --batch 1,4,16 --json --device cuda

# The one JSON document that each of them wrote.
rows() {
    for name in kmeans-cpu kmeans-one kmeans-8b retrieve attend; do
        grep '^{' "$out/$name.log" | tail -n 1 >"$out/$name.json"
        [ -s "$out/$name.json" ] && printf '%s    "%s": %s' "${comma:-}" "$name" "$(cat "$out/$name.json")"
        [ -s "$out/$name.json" ] && comma=",
"
        rm -f "$out/$name.json"
    done
}

{
    echo "{"
    echo "  \"gpu\": \"${gpu}\","
    echo "  \"date\": \"$(date -u +%Y-%m-%d)\","
    echo "  \"version\": \"$(./kvsmith --version)\","
    echo "  \"sanitized\": $sanitized,"
    echo "  \"parts\": [${parts}"
    echo "  ],"
    echo "  \"bench\": {"
    rows
    echo
    echo "  }"
    echo "}"
} >"$out/gpu.json"
echo "wrote $out/gpu.json after $(($(date +%s) - start)) s"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
