#!/bin/sh
# Every check and measurement that needs an NVIDIA GPU, in one command of less than nine minutes.
#
#     scripts/gpu_check.sh KIT [OUT] [quick|8b]
#
# KIT is what `make gpu-kit` put together: the program, the test programs and the libraries they link. Nothing else is
# needed, no Rust and no download. OUT (default: KIT/out) gets gpu.json, which is whole after every part, and the logs
# tests.log, bench.log and sanitizer.log. Parts come in the order of their worth; each has a limit in seconds.
# `quick` takes small sizes, to see that everything runs; `8b` calibrates a model of the size of Llama-3.1-8B instead.
#
# The exit status is 0 if every check held, 1 if one failed, 3 if the GPU was not checked at all. A part that cannot run
# is `not checked`, which is no failure; neither is a figure that misses its aim.
set -u

kit=$(cd "$1" && pwd) || exit 2
out=${2:-$kit/out}
mode=${3:-all}
case $mode in
all | quick | 8b) ;;
*) echo "error: \`$mode\` is neither quick nor 8b" >&2 && exit 2 ;;
esac
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$kit" || exit 2
export LD_LIBRARY_PATH="$kit/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export KVSMITH_BIN="$kit/kvsmith" KVSMITH_ROOT="$kit"
: >"$out/tests.log" && : >"$out/bench.log" && : >"$out/sanitizer.log"
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
trap 'exit 143' INT TERM

start=$(date +%s)
# No part runs longer than until here, whatever its limit.
deadline=$((start + 530))
parts="" documents="" failed="" passed=""

# text: without what a JSON string cannot have, and no longer than a line.
plain() {
    printf '%s' "$1" | tr -cd '[:alnum:] .,:;()%/_=+-' | cut -c 1-150
}

gpu=$(plain "$(timeout 10 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -n 1)")
version=$(plain "$(timeout 10 ./kvsmith --version 2>&1 | head -n 1)")
date=$(date -u +%Y-%m-%d)

# Writes gpu.json under another name first, so that it is whole whenever this is killed.
write() {
    {
        printf '{\n  "gpu": "%s",\n  "date": "%s",\n  "version": "%s",\n  "mode": "%s",\n' "$gpu" "$date" "$version" "$mode"
        printf '  "seconds": %s,\n' $(($(date +%s) - start))
        printf '  "parts": [%s\n  ],\n  "bench": {%s\n  }\n}\n' "$parts" "$documents"
    } >"$scratch/gpu.json" && cp "$scratch/gpu.json" "$out/gpu.json.new" && mv "$out/gpu.json.new" "$out/gpu.json"
}

# name status seconds reason: notes how a part ended.
note() {
    reason=$(plain "$4")
    echo "$1: $2${3:+ after $3 s}${reason:+; $reason}"
    parts="$parts${parts:+,}
    {\"name\": \"$1\", \"status\": \"$2\", \"seconds\": ${3:-0}, \"reason\": \"$reason\"}"
    case $2 in
    failed) failed="$failed $1" ;;
    passed) passed="$passed $1" ;;
    esac
    write
}

# name limit command...: runs a part; sets code, seconds and the file of its output. Notes it if there is no time left.
run() {
    name=$1 limit=$2 log=$scratch/log
    shift 2
    left=$((deadline - $(date +%s)))
    if [ "$left" -lt 3 ]; then
        note "$name" "not checked" "" "no time left"
        return 1
    fi
    [ "$limit" -le "$left" ] || limit=$left
    began=$(date +%s)
    timeout -k 2 "$limit" "$@" >"$log" 2>&1
    code=$?
    seconds=$(($(date +%s) - began))
    # The error without its hint, or the last line; Mesa complains of its own.
    said=$(grep '^error: ' "$log" | grep -v XDG_RUNTIME_DIR | tail -n 1)
    [ -n "$said" ] || said=$(grep . "$log" | tail -n 1)
    [ $code = 124 ] && said="longer than $limit s"
    return 0
}

# file: appends the output of the last part to a log.
keep() {
    { echo "==== $name" && cat "$log"; } >>"$out/$1"
}

# name limit test-program filter...: tests on the GPU.
tests() {
    run "$@" || return 0
    keep tests.log
    if grep -q '^cuda: ignored' "$log"; then
        note "$name" "not checked" "$seconds" "$(grep '^cuda: ignored' "$log" | head -n 1)"
    elif [ $code = 0 ] && grep -q 'test result: ok. [1-9][0-9]* passed' "$log"; then
        note "$name" passed "$seconds" "$(grep 'test result: ' "$log" | tail -n 1)"
    else
        note "$name" failed "$seconds" "exit $code; $said"
    fi
}

# name limit argument...: a benchmark, whose last line is one JSON document, even if it is stopped before its end.
bench() {
    name=$1 limit=$2
    shift 2
    measure "$name" "$limit" ./kvsmith bench "$@" --device cuda --json
}

# name limit command...: a measurement.
measure() {
    run "$@" || return 0
    keep bench.log
    document=$(grep '^{.*}$' "$log" | tail -n 1)
    [ -z "$document" ] || documents="$documents${documents:+,}
    \"$name\": $document"
    if [ $code = 0 ]; then
        note "$name" passed "$seconds" ""
    elif [ $code = 3 ]; then
        note "$name" "not checked" "$seconds" "$said"
    elif [ $code = 124 ] && [ -n "$document" ]; then
        note "$name" passed "$seconds" "$said; its first rows are there"
    else
        note "$name" failed "$seconds" "exit $code; $said"
    fi
}

# tool limit: NVIDIA's checker of kernels over small cases.
sanitize() {
    sanitizer=$(command -v compute-sanitizer || echo "$kit/compute-sanitizer/bin/compute-sanitizer")
    if [ ! -x "$sanitizer" ]; then
        note "$1" "not checked" "" "there is no compute-sanitizer"
        return
    fi
    # shellcheck disable=SC2016
    each='for test in $2; do "$0" --tool $1 --error-exitcode 9 ./${test%%:*} cuda::${test#*:} --test-threads 1; [ $? != 9 ] || exit 9; done'
    run "$1" "$2" sh -c "$each" "$sanitizer" "$1" "backends:assign::1x64x64 backends:update::2x3x5 decode:attend::bf16::b2 \
        decode:prefill::bf16::b1_g1_r1 decode:linear::bf16::m17 decode:a2ats::batch decode:topk::d40 decode:wpq::d20 decode:sample::v257 \
        cuda_model:session::llama_d128" || return 0
    keep sanitizer.log
    if [ $code = 9 ]; then
        note "$1" failed "$seconds" "$(grep 'ERROR SUMMARY' "$log" | grep -v ': 0 ' | tail -n 1)"
    elif grep -q 'ERROR SUMMARY: 0' "$log"; then
        note "$1" passed "$seconds" "$(grep -c 'ERROR SUMMARY: 0' "$log") runs without a report${said:+; }$said"
    else
        note "$1" "not checked" "$seconds" "it does not work here: $said"
    fi
}

# PyTorch's attention beside ours, in one run.
peers() {
    if ! timeout 20 python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        note peers "not checked" "" "python3 has no torch that finds the GPU"
        return
    fi
    # shellcheck disable=SC2016
    measure peers 30 sh -c 'python3 attention_peers.py --kvsmith ./kvsmith --device cuda --context 8K,128K --batch 1 \
        --rounds 2 --runs 10 --json "$0" && tr -d "\n" <"$0" && echo' "$scratch/peers.json"
}

# A calibration of random weights in the sizes of Llama-3.1-8B, the default number of tokens.
calibrate_8b() {
    if [ "$(df -Pk "$scratch" | awk 'NR == 2 { print $4 }')" -lt $((40 * 1000 * 1000)) ]; then
        note calibrate-8b "not checked" "" "less than 40 GB of disk are free"
        return
    fi
    run write-8b 150 python3 make_random_model.py 8b "$scratch/model" --tokens 81920 || return 0
    if [ $code != 0 ]; then
        note calibrate-8b "not checked" "$seconds" "no model was written: $said"
        return
    fi
    measure calibrate-8b 370 ./kvsmith calibrate --device cuda --model "$scratch/model" --tokens "$scratch/model/tokens.json" \
        --seq-len 16384 --max-tokens 81920 --uuid-tokens 0 -o "$scratch/artifact.safetensors" --json
}

echo "GPU: ${gpu:-none found}"
write
if [ $mode = 8b ]; then
    calibrate_8b
else
    model="--shapes llama-3.1-8b" layer="--shapes llama-3.1-8b" long=128K short=8K batches=1,4 points="" runs="" more=,a2ats
    if [ $mode = quick ]; then
        model="--config calib-data/model/config.json --size 16" layer="--shapes 2/1x64 --size 32" long=200 short=100 batches=1
        points="--n 500 --dim 32 --size 16 --iterations 2" runs="--runs 1" more=""
    fi
    # Correctness. The limits of all parts add up to 500 s.
    tests backends 70 ./backends cuda::
    tests decode 60 ./decode cuda::
    tests model 50 ./cuda_model cuda::
    tests calibrate 30 ./cmd_device cuda
    # Bandwidth, a decode step of one layer, and of a whole model; what does not fit the memory is left out.
    # shellcheck disable=SC2086
    {
        bench attend 35 attend $layer --context $short,$long --batch $batches --methods full$more${more:+,selfindex,wpq} $runs
        bench retrieve 25 retrieve $layer --context $long --batch $batches $runs
        bench decode-long 40 decode $model --context $long --batch $batches --methods full$more${more:+,selfindex} $runs
        bench decode-short 30 decode $model --context $short --batch $batches --methods full$more $runs
        [ $mode = quick ] || peers
        # Fits: one head of 81,920 x 128 keys and 4,096 codewords, then all 256 of Llama-3.1-8B's.
        bench kmeans-one 15 kmeans --runs 3 $points
        [ $mode = quick ] || bench kmeans-8b 35 kmeans --heads 256 --runs 1
    }
    sanitize memcheck 30
    sanitize racecheck 30
fi
echo "wrote $out/gpu.json after $(($(date +%s) - start)) s"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
if [ -z "$passed" ]; then
    echo "nothing was checked" >&2
    exit 3
fi
