#!/bin/sh
# Every check and measurement that needs an NVIDIA GPU, in one command of less than nine minutes.
#
#     scripts/gpu_check.sh KIT [OUT] [all|quick|8b|PART,..]
#
# KIT is what `make gpu-kit` put together: the program, the test programs and the libraries they link. Nothing else is
# needed, no Rust and no download. OUT (default: KIT/out) gets gpu.json and the logs tests.log, bench.log and
# sanitizer.log, to which every part writes as it goes. gpu.json is whole at any time: it names the part that runs, and
# has the results of those before it. Parts come in the order of their worth; each has a limit in seconds.
# `quick` takes small sizes, to see that everything runs; `8b` calibrates a whole model of the size of Llama-3.1-8B;
# names of parts run these alone.
#
# The exit status is 0 if every check held, 1 if one failed, 3 if the GPU was not checked at all. A part that cannot run
# is `not checked`, which is no failure; neither is a figure that misses its aim.
set -u

kit=$(cd "$1" && pwd) || exit 2
out=${2:-$kit/out}
mode=${3:-all}
all="gpu-check backends decode model calibrate attend attend-mean retrieve decode-long decode-short kernels kernels-model peers kmeans-one \
kmeans-8b prefill calibrate-layers calibrate-8b memcheck racecheck"
case $mode in
all | quick) wanted=$(echo " $all " | sed 's/ calibrate-8b / /') ;;
8b) wanted=" gpu-check calibrate-8b " ;;
*)
    wanted=" $(echo "$mode" | tr , ' ') "
    for name in $wanted; do
        case " $all " in
        *" $name "*) ;;
        *) echo "error: \`$name\` is no part; the parts are $all" >&2 && exit 2 ;;
        esac
    done
    ;;
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
parts="" documents="" failed="" passed="" running="" adapter=""

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
        printf '{\n  "adapter": "%s",\n  "gpu": "%s",\n' "$adapter" "$gpu"
        printf '  "date": "%s",\n  "version": "%s",\n  "mode": "%s",\n' "$date" "$version" "$(plain "$mode")"
        printf '  "seconds": %s,\n  "running": "%s",\n' $(($(date +%s) - start)) "$running"
        printf '  "parts": [%s\n  ],\n  "bench": {%s\n  }\n}\n' "$parts" "$documents"
    } >"$scratch/gpu.json" && cp "$scratch/gpu.json" "$out/gpu.json.new" && mv "$out/gpu.json.new" "$out/gpu.json"
}

# name status seconds reason: notes how a part ended.
note() {
    reason=$(plain "$4")
    echo "$1: $2${3:+ after $3 s}${reason:+; $reason}"
    parts="$parts${parts:+,}
    {\"name\": \"$1\", \"status\": \"$2\", \"seconds\": ${3:-0}, \"reason\": \"$reason\"}"
    running=""
    case $2 in
    failed) failed="$failed $1" ;;
    passed) passed="$passed $1" ;;
    esac
    write
}

# name: whether a part was asked for.
wants() {
    case "$wanted" in
    *" $1 "*) return 0 ;;
    *) return 1 ;;
    esac
}

# file name limit command...: runs a part, whose output goes to the screen's log and to a file of OUT as it comes; sets
# code, seconds and said. Notes the part and returns 1 if there is no time left; returns 1 if it was not asked for.
run() {
    file=$out/$1 name=$2 limit=$3
    shift 3
    wants "$name" || return 1
    left=$((deadline - $(date +%s)))
    if [ "$left" -lt 3 ]; then
        note "$name" "not checked" "" "no time left"
        return 1
    fi
    [ "$limit" -le "$left" ] || limit=$left
    running=$name
    write
    began=$(date +%s)
    echo "==== $name" >>"$file"
    lines=$(wc -l <"$file")
    timeout -k 2 "$limit" "$@" >>"$file" 2>&1
    code=$?
    seconds=$(($(date +%s) - began))
    tail -n +$((lines + 1)) "$file" >"$scratch/log"
    log=$scratch/log
    # The error without its hint, or the last line; Mesa complains of its own.
    said=$(grep '^error: ' "$log" | grep -v XDG_RUNTIME_DIR | tail -n 1)
    [ -n "$said" ] || said=$(grep . "$log" | tail -n 1)
    [ $code = 124 ] && said="longer than $limit s"
    return 0
}

# name limit test-program filter...: tests on the GPU.
tests() {
    run tests.log "$@" || return 0
    if grep -q '^cuda: ignored' "$log"; then
        note "$name" "not checked" "$seconds" "$(grep '^cuda: ignored' "$log" | head -n 1)"
    elif [ $code = 0 ] && grep -q 'test result: ok. [1-9][0-9]* passed' "$log"; then
        note "$name" passed "$seconds" "$(grep 'test result: ' "$log" | tail -n 1)"
    elif [ $code = 124 ] && ! grep -q 'FAILED$' "$log"; then
        note "$name" "not checked" "$seconds" "$said; $(grep -c '\.\.\. ok$' "$log") passed until then"
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
    run bench.log "$@" || return 0
    keep "$(grep '^{.*}$' "$log" | tail -n 1)"
}

# document: stores the figures of the part that ran last, and notes how it ended.
keep() {
    [ -z "$1" ] || documents="$documents${documents:+,}
    \"$name\": $1"
    if [ $code = 0 ]; then
        note "$name" passed "$seconds" ""
    elif [ $code = 3 ]; then
        note "$name" "not checked" "$seconds" "$said"
    elif [ $code = 124 ] && [ -n "$1" ]; then
        note "$name" passed "$seconds" "$said; its first rows are there"
    else
        note "$name" failed "$seconds" "exit $code; $said"
    fi
}

# tool: NVIDIA's checker of kernels, in half of the time that is left: over three small cases, then over all.
sanitize() {
    wants "$1" || return
    sanitizer=$(command -v compute-sanitizer || echo "$kit/compute-sanitizer/bin/compute-sanitizer")
    if [ ! -x "$sanitizer" ]; then
        note "$1" "not checked" "" "there is no compute-sanitizer"
        return
    fi
    # shellcheck disable=SC2016
    each='for test in $2; do echo "== $test"; "$0" --tool $1 --error-exitcode 9 ./${test%%:*} cuda::${test#*:} --test-threads 1
        code=$?; [ $code = 0 ] || exit $code; done'
    run sanitizer.log "$1" $(((deadline - $(date +%s)) / 2)) sh -c "$each" "$sanitizer" "$1" \
        "decode:attend::bf16::b2 decode:wpq::d20 backends:sign_sums::normal_1x2 decode: cuda_model: backends:" || return 0
    checked="$(grep -c 'SUMMARY: 0 ' "$log") of 6 runs, with $(grep -c '^test .* ok$' "$log") tests, without a report"
    if [ $code = 9 ]; then
        note "$1" failed "$seconds" "$(grep 'SUMMARY: ' "$log" | grep -v ': 0 ' | tail -n 1); $checked"
    elif [ $code = 0 ] || [ $code = 124 ] && grep -q 'test result: ok. [1-9]' "$log" && grep -q 'SUMMARY: 0 ' "$log"; then
        note "$1" passed "$seconds" "$checked"
    else
        note "$1" "not checked" "$seconds" "it does not work here: $said"
    fi
}

# A case of every kernel, by the program's own check, which names the GPU, its driver and what multiplies; the stamp that
# lets `--device auto` use the GPU is not kept.
check_gpu() {
    run bench.log gpu-check 40 env XDG_CACHE_HOME="$scratch" ./kvsmith gpu-check --json || return 0
    adapter=$(plain "$(sed -n 's/.*"adapter":"\([^"]*\)".*/\1/p' "$log")")
    keep "$(grep '^{.*}$' "$log" | tail -n 1)"
}

# PyTorch's attention beside ours, in one run.
peers() {
    wants peers || return
    if ! timeout 20 python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        note peers "not checked" "" "python3 has no torch that finds the GPU"
        return
    fi
    # shellcheck disable=SC2016
    measure peers 30 sh -c 'python3 attention_peers.py --kvsmith ./kvsmith --device cuda --context 8K,128K --batch 1 \
        --rounds 2 --runs 10 --json "$0" && tr -d "\n" <"$0" && echo' "$scratch/peers.json"
}

# part limit argument...: the time of each kernel of a step, by NVIDIA's profiler.
kernels() {
    wants "$1" || return
    if ! command -v ncu >/dev/null 2>&1; then
        note "$1" "not checked" "" "there is no ncu"
        return
    fi
    name=$1 limit=$2
    shift 2
    measure "$name" "$limit" python3 kernel_times.py --kvsmith ./kvsmith "$@"
}

# gigabytes: whether this much disk is free for a model.
has_disk() {
    [ "$(df -Pk "$scratch" | awk 'NR == 2 { print $4 }')" -ge $(($1 * 1000 * 1000)) ] && return 0
    note "$name" "not checked" "" "less than $1 GB of disk are free"
    return 1
}

# part limit layers argument...: a calibration of random weights in the sizes of Llama-3.1-8B, whose stages are stored as
# they end.
calibrate() {
    name=$1 limit=$2
    wants "$1" || return
    shift 2
    model_of "$1" || return
    shift
    run bench.log "$name" "$limit" ./kvsmith calibrate -v --device cuda --model "$scratch/model" \
        --tokens "$scratch/model/tokens.json" -o "$scratch/artifact.safetensors" --overwrite --json "$@" || return 0
    document=$(grep '^{.*}$' "$log" | tail -n 1)
    # Stopped before its end: what its finished stages took, all layers together.
    [ -n "$document" ] || document=$(sed -n 's/^layer [0-9]*: \(.*\) \([0-9.]*\) s$/\1|\2/p' "$log" | awk -F '|' '
        { if (!($1 in sum)) order[++n] = $1; sum[$1] += $2 }
        END {
            if (n == 0) exit
            printf "{\"stages\": ["
            for (i = 1; i <= n; i++) printf "%s{\"name\": \"%s\", \"seconds\": %.3f}", (i > 1 ? ", " : ""), order[i], sum[order[i]]
            print "]}"
        }')
    keep "$document"
}

# layers: writes a model of random weights, unless it is there.
model_of() {
    [ "$(cat "$scratch/layers" 2>/dev/null)" = "$1" ] && return 0
    has_disk $((8 + $1 / 2)) || return 1
    rm -rf "$scratch/model"
    # shellcheck disable=SC2086
    if ! timeout "$((15 + 4 * $1))" python3 make_random_model.py $shape "$scratch/model" --layers "$1" --tokens "$tokens" >"$scratch/log" 2>&1; then
        note "$name" "not checked" "" "no model was written: $(tail -n 1 "$scratch/log")"
        return 1
    fi
    echo "$1" >"$scratch/layers"
}

# A prompt of as many tokens, through four layers.
prefill() {
    name=prefill
    wants prefill || return
    model_of 4 || return
    measure prefill 15 ./kvsmith run --json --device cuda --model "$scratch/model" --tokens "$scratch/model/tokens.json" \
        --method full --max-new 2 --ignore-eos
}

echo "GPU: ${gpu:-none found}"
write
check_gpu
echo "adapter: ${adapter:-none}"
model="--shapes llama-3.1-8b" layer="--shapes llama-3.1-8b" long=128K short=8K batches=1,4 points="" runs="" more=,selfindex,a2ats
shape=8b tokens=81920 seq=16384 size=4096
if [ "$mode" = quick ]; then
    model="--config calib-data/model/config.json --size 16" layer="--shapes 2/1x64 --size 32" long=200 short=100 batches=1
    points="--n 500 --dim 32 --size 16 --iterations 2" runs="--runs 1" more=""
    shape=4,64,64,2,1,32,64 tokens=512 seq=256 size=16
fi
# Each part on the GPU, against the CPU or a plain form.
tests backends 20 ./backends cuda::
tests decode 20 ./decode cuda::
tests model 20 ./cuda_model cuda::
tests calibrate 15 ./cmd_device cuda
# A decode step of one layer, and of a whole model; what does not fit the memory is left out.
# shellcheck disable=SC2086
{
    bench attend 20 attend $layer --context $short,$long --batch $batches --methods full$more${more:+,wpq} $runs
    bench attend-mean 8 attend $layer --context $long --batch $batches --methods wpq --wpq-center mean $runs
    bench retrieve 10 retrieve $layer --context $long --batch $batches $runs
    bench decode-long 40 decode $model --context $long --batch $batches --methods full$more${more:+,wpq} $runs
    bench decode-short 30 decode $model --context $short --batch $batches --methods full$more${more:+,wpq} $runs
    kernels kernels 45 $layer --context $long --methods full$more${more:+,wpq}
    [ "$mode" = quick ] || kernels kernels-model 35 $model --context $short --methods full --step model
    [ "$mode" = quick ] || peers
    # Fits: one head of 81,920 x 128 keys and 4,096 codewords, then all 256 of Llama-3.1-8B's.
    bench kmeans-one 8 kmeans --runs 3 $points
    [ "$mode" = quick ] || bench kmeans-8b 25 kmeans --heads 256 --runs 1
}
prefill
calibrate calibrate-layers 95 4 --no-verdict --seq-len $seq --size $size --wrope-position $((seq / 8))
calibrate calibrate-8b 370 32 --seq-len $seq --size $size
sanitize memcheck
sanitize racecheck
echo "wrote $out/gpu.json after $(($(date +%s) - start)) s"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
if [ -z "$passed" ]; then
    echo "nothing was checked" >&2
    exit 3
fi
