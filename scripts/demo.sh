#!/bin/sh
# The whole pipeline on the bundled model: calibrate, inspect, generate from one prompt with three methods.
set -eu

kvsmith=$1
out=$2
model=calib-data/model
mkdir -p "$out"

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() { say "\$ kvsmith $*"; "$kvsmith" "$@"; }

# Positions beyond the model's context of 2048 do not occur, so the fixed distance is half of it.
show calibrate --model $model --text calib-data/text.txt --max-tokens 49152 --uuid-tokens 8192 \
    --size 1024 --wrope-position 1024 --overwrite -o "$out/demo.safetensors"
show inspect "$out/demo.safetensors" --verify --model $model
say "The prompt holds a list of words in random order and ends with its first ones again."
echo "A model that recalls the list goes on: goodness common bowels place walls sound seat ashamed ..."
show run --model $model --prompt-file calib-data/demo-prompt.txt --max-new 48 --method full
say "Without --method and --budget, run takes what the artifact recommends:"
show run --model $model --prompt-file calib-data/demo-prompt.txt --max-new 48 \
    --artifact "$out/demo.safetensors"
show run --model $model --prompt-file calib-data/demo-prompt.txt --max-new 48 --method a2ats \
    --artifact "$out/demo.safetensors" --budget 0.06
