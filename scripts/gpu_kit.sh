#!/bin/sh
# Puts the program, its GPU tests and the libraries they link into one folder, for a machine without Rust.
#
#     scripts/gpu_kit.sh KIT
#
# makes the folder KIT, and KIT.tar.xz of it.
set -eu

kit=$1
tests="backends cmd_device cuda_model decode"
rm -rf "$kit"
mkdir -p "$kit/lib" "$kit/calib-data" "$kit/tests/fixtures"
cargo build --release --locked
# The path of each test program is the last word of cargo's line about it, in brackets.
programs=$(cargo test --release --locked --no-run $(printf -- '--test %s ' $tests) 2>&1 |
    sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
cp target/release/kvsmith "$kit/"
for program in $programs; do
    name=$(basename "$program")
    cp "$program" "$kit/${name%-*}"
done
for name in $tests; do
    [ -x "$kit/$name" ] || { echo "error: the test program $name was not built" >&2; exit 1; }
done
(cd "$kit" && strip kvsmith $tests 2>/dev/null) || true
# All but the C library's own, which must be the target machine's.
ldd "$kit/kvsmith" | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | grep -E 'openblas|gfortran|quadmath|blas|lapack' |
    while read -r library; do cp -L "$library" "$kit/lib/"; done
cp -r calib-data/model calib-data/text.txt "$kit/calib-data/"
cp -r tests/fixtures/golden "$kit/tests/fixtures/"
cp scripts/gpu_check.sh benches/attention_peers.py benches/kernel_times.py benches/make_random_model.py "$kit/"
# NVIDIA's checker of kernels, from PyPI, less its documentation.
if python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps \
    --target "$kit/wheel" 'nvidia-cuda-sanitizer-api==13.0.*'; then
    mkdir "$kit/compute-sanitizer"
    mv "$kit/wheel/nvidia/cu13/bin" "$kit/wheel/nvidia/cu13/lib" "$kit/compute-sanitizer/"
    chmod +x "$kit/compute-sanitizer/bin/compute-sanitizer"
else
    echo "note: compute-sanitizer could not be fetched: its part will be left out" >&2
fi
rm -rf "$kit/wheel"
# A window as large as all programs together finds what they have in common.
XZ_OPT=--lzma2=preset=6,dict=128MiB tar -C "$(dirname "$kit")" -cJf "$kit.tar.xz" "$(basename "$kit")"
bytes=$(stat -c %s "$kit.tar.xz")
echo "$kit.tar.xz: $((bytes >> 20)) MiB"
if [ "$bytes" -gt $((60 << 20)) ]; then
    echo "error: $kit.tar.xz has more than 60 MiB, the most that the machines it is for take" >&2
    exit 1
fi
