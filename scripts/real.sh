#!/bin/sh
# Makes a real checkpoint and texts for it in $1, with the Python there; what is complete stays as it is.
set -eu

target=$1
"$target/python/bin/python" scripts/real.py "$target"
