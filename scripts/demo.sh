#!/bin/sh
# The whole pipeline on the bundled model: calibrate, inspect, generate with full and with sparse attention, report.
set -eu

kvsmith=$1
out=$2
model=calib-data/model
mkdir -p "$out"

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() { say "\$ kvsmith $*"; "$kvsmith" "$@"; }

# Positions beyond the model's context of 2048 do not occur, so the WRoPE position is half of it.
show calibrate --model $model --text calib-data/text.txt --max-tokens 32K --uuid-tokens 6K \
    --size 1024 --wrope-position 1024 --overwrite -o "$out/demo.safetensors"
show inspect "$out/demo.safetensors" --verify --model $model
say "The prompt is a list of words in random order, followed by its first words again."
echo "A model that recalls the list continues: goodness common bowels place walls sound seat ashamed ..."
show run --model $model --prompt-file calib-data/demo-prompt.txt --max-new 48 --method full
say "Without --method and --budget, run uses what the artifact recommends:"
show run --model $model --prompt-file calib-data/demo-prompt.txt --max-new 48 \
    --artifact "$out/demo.safetensors"
show report "$out/demo.safetensors" --overwrite -o "$out/report.html"
say "Open $out/report.html in a browser to see what each method loses, and where."
say "What one setting costs, and what it gains: the loss of wpq at a fifth of the bytes of 2,048 positions ..."
show eval --model $model --artifact "$out/demo.safetensors" --text calib-data/heldout.txt --max-tokens 8K --seq-len 2K \
    --decode 16 --kv bf16 --methods topk,wpq,streaming --reads 20%
say "... and its tokens per second at that budget, beside those of full attention:"
show bench decode --model $model --context 1900 --methods full,wpq --budget 0.13 --device cpu --runs 5
