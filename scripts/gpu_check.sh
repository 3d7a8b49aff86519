#!/bin/sh
# Every check and measurement that needs an NVIDIA GPU, in two commands of less than ten minutes each, or in one.
#
#     scripts/gpu_check.sh KIT [OUT] [check|bench]
#
# KIT is what `make gpu-kit` put together: the program, the test programs and the libraries they link.
# Nothing else is needed, no Rust and no download; what needs python3 is left out where there is none. OUT
# (default: KIT/out) gets gpu.json, and the log of each part. `check` runs the tests, `bench` the measurements,
# without either both run. The exit status is 0 if every check held; a figure that misses its aim is no failure.
set -u

kit=$(cd "$1" && pwd)
out=${2:-$kit/out}
asked=${3:-both}
case $asked in
check | bench | both) ;;
*) echo "error: \`$asked\` is neither check nor bench" >&2 && exit 2 ;;
esac
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$kit"
export LD_LIBRARY_PATH="$kit/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export KVSMITH_BIN="$kit/kvsmith" KVSMITH_ROOT="$kit"
failed="" parts="" left_out="" measured=""
start=$(date +%s)

# name limit-in-seconds command...: runs a part, its output in OUT/name.log.
part() {
    name=$1 limit=$2
    shift 2
    began=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    seconds=$(($(date +%s) - began))
    [ $code = 0 ] || failed="$failed $name"
    [ $code = 124 ] && echo "it took longer than $limit s" >>"$out/$name.log"
    # Its error without the hint, or the last line; Mesa complains of its own.
    said=$(grep '^error: ' "$out/$name.log" | grep -v XDG_RUNTIME_DIR | tail -n 1)
    [ -n "$said" ] || said=$(grep . "$out/$name.log" | tail -n 1)
    echo "$name: exit $code after $seconds s; $said"
    parts="$parts${parts:+,}
    {\"name\": \"$name\", \"exit\": $code, \"seconds\": $seconds}"
    return $code
}

# name reason: says that a part is left out.
skip() {
    echo "$1: left out, $2"
    left_out="$left_out${left_out:+,}
    {\"name\": \"$1\", \"reason\": \"$2\"}"
}

# What the tests say they ran must not be nothing, for any filter.
ran() {
    if ! grep -q "test result: ok. [1-9][0-9]* passed" "$out/$1.log" ||
        grep -q -e "test result: ok. 0 passed" -e "^cuda: ignored" "$out/$1.log"; then
        echo "$1: it did not run on the GPU" >&2
        failed="$failed $1-ran"
    fi
}

# name limit test-program filter [option...]: a test program on the GPU.
tests() {
    name=$1
    shift
    part "$name" "$@"
    ran "$name"
}

# name limit argument...: a benchmark, whose last line is one JSON document.
bench() {
    name=$1 limit=$2
    shift 2
    measured="$measured $name"
    part "$name" "$limit" ./kvsmith "$@" --json
}

gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -n 1)
gpu_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
echo "GPU: ${gpu:-none found}"

# 570 s at most.
checks() {
    tests backends 90 ./backends cuda::
    tests calibrate 60 ./cmd_device cuda
    tests decode 60 ./decode cuda::
    tests model 60 ./cuda_model cuda::
    sanitizer=$(command -v compute-sanitizer || echo "$kit/compute-sanitizer/bin/compute-sanitizer")
    for tool in memcheck racecheck; do
        if [ ! -x "$sanitizer" ]; then
            skip "$tool" "there is no compute-sanitizer"
            continue
        fi
        part "$tool" 60 "$sanitizer" --tool $tool --error-exitcode 1 ./backends cuda:: --test-threads 1 \
            --skip 5000x --skip 20000x --skip 100000x
        ran "$tool"
        # One filter a run.
        several='for filter in $3; do "$0" --tool $1 --error-exitcode 1 "$2" "$filter" --test-threads 1 || exit 1; done'
        part "$tool-decode" 50 sh -c "$several" "$sanitizer" $tool ./decode \
            "cuda::attend::bf16::b2 cuda::prefill::bf16::b1_g1_r1 cuda::linear::bf16::m17 cuda::a2ats::batch cuda::topk::d40"
        ran "$tool-decode"
        part "$tool-model" 50 sh -c "$several" "$sanitizer" $tool ./cuda_model \
            "cuda::session::llama_d128 cuda::layers::qwen3_norm"
        ran "$tool-model"
    done
}

# 585 s at most.
benches() {
    # One head at a time against the CPU in the same run, then all 256 heads of Llama-3.1-8B's keys.
    bench kmeans-cpu 25 bench kmeans --runs 1 --device cpu
    bench kmeans-one 20 bench kmeans --runs 5 --device cuda
    bench kmeans-8b 60 bench kmeans --heads 256 --runs 2 --device cuda
    # A decode step of one layer of Llama-3.1-8B.
    bench retrieve 30 bench retrieve --context 128K,1M --batch 1,4 --device cuda
    bench attend 30 bench attend --context 8K,128K --batch 1,4,16 --device cuda
    # Decode steps of all of it; what does not fit the GPU's memory is left out.
    bench decode-128k 60 bench decode --shapes llama-3.1-8b --context 128K --batch 1,4 --methods full,a2ats --device cuda
    bench decode-8k 40 bench decode --shapes llama-3.1-8b --context 8K --batch 1,4 --methods full,a2ats --device cuda
    peers
    calibrate_8b
}

# PyTorch's attention beside ours, in one run.
peers() {
    if [ -z "$gpu" ]; then
        skip peers "there is no GPU"
    elif ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        skip peers "python3 has no torch that finds the GPU"
    else
        measured="$measured peers"
        part peers 60 python3 attention_peers.py --kvsmith ./kvsmith --device cuda --context 8K,128K --batch 1,4 \
            --rounds 2 --runs 10 --json "$out/peers.json"
    fi
}

# A calibration of random weights in the sizes of Llama-3.1-8B, the default number of tokens.
calibrate_8b() {
    free_kib=$(df -Pk "${TMPDIR:-/tmp}" | awk 'NR == 2 { print $4 }')
    if [ -z "$gpu" ]; then
        skip calibrate-8b "there is no GPU"
    elif [ "$gpu_mib" -lt 38000 ]; then
        skip calibrate-8b "the GPU has less than 40 GB"
    elif [ "$free_kib" -lt $((40 * 1000 * 1000)) ]; then
        skip calibrate-8b "${TMPDIR:-/tmp} has less than 40 GB free"
    elif ! command -v python3 >/dev/null; then
        skip calibrate-8b "there is no python3"
    else
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        if part write-8b 60 python3 make_random_model.py 8b "$work/model" --tokens 81920; then
            bench calibrate-8b 200 calibrate --device cuda --model "$work/model" --tokens "$work/model/tokens.json" \
                --seq-len 16384 --max-tokens 81920 --uuid-tokens 0 -o "$work/artifact.safetensors"
        fi
        rm -rf "$work"
    fi
}

[ $asked = bench ] || checks
[ $asked = check ] || benches

# The one JSON document that each of them wrote.
rows() {
    comma=""
    for name in $measured; do
        document=$(grep '^{' "$out/$name.log" | tail -n 1)
        [ "$name" = peers ] && document=$(cat "$out/peers.json" 2>/dev/null)
        [ -n "$document" ] || continue
        printf '%s    "%s": %s' "$comma" "$name" "$document"
        comma=",
"
    done
}

{
    echo "{"
    echo "  \"gpu\": \"${gpu}\","
    echo "  \"date\": \"$(date -u +%Y-%m-%d)\","
    echo "  \"version\": \"$(./kvsmith --version)\","
    echo "  \"ran\": \"$asked\","
    echo "  \"parts\": [${parts}"
    echo "  ],"
    echo "  \"left_out\": [${left_out}"
    echo "  ],"
    echo "  \"bench\": {"
    rows
    echo
    echo "  }"
    echo "}"
} >"$out/gpu.json"
echo "wrote $out/gpu.json after $(($(date +%s) - start)) s"
[ -n "$gpu" ] || failed="$failed gpu"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
