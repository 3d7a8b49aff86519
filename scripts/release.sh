#!/bin/sh
# Builds the archive of a release for a target: OUT/kvsmith-VERSION-TARGET.tar.gz and its SHA-256.
#   sh scripts/release.sh TARGET OUT
# On Linux the program carries OpenBLAS and the Fortran runtime inside. RUNNER runs a program of another architecture
# (qemu-aarch64-static); without it, a program that this machine cannot run is only built.
set -eu

target=$1
out=$2
host=$(rustc -vV | sed -n 's/^host: //p')
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
flags=
case $target in
*-linux-gnu) flags=$(sh scripts/static_flags.sh "$target") ;;
esac
if [ "$target" != "$host" ]; then
    arch=${target%%-*}
    linker=CARGO_TARGET_$(echo "$target" | tr 'a-z-' 'A-Z_')_LINKER
    export "$linker=$arch-linux-gnu-gcc"
fi
KVSMITH_COMMIT=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
export KVSMITH_COMMIT
# The flags hold no spaces, and each line is an argument.
# shellcheck disable=SC2086
cargo build --release --locked --target "$target" $flags
program=${CARGO_TARGET_DIR:-target}/$target/release/kvsmith

name=kvsmith-$version-$target
mkdir -p "$out/$name"
cp "$program" README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT "$out/$name"
runner=${RUNNER:-}
# With this the program does not restart itself, which an emulator would not see.
export OPENBLAS_NUM_THREADS=1
if [ "$target" = "$host" ] || [ -n "$runner" ]; then
    # shellcheck disable=SC2086
    $runner "$program" --version
    # shellcheck disable=SC2086
    $runner "$program" run --model calib-data/model --prompt "In the beginning" --max-new 8 --device cpu
    for shell in bash zsh fish; do
        # shellcheck disable=SC2086
        $runner "$program" completions $shell >"$out/$name/kvsmith.$shell"
    done
    # shellcheck disable=SC2086
    $runner "$program" man >"$out/$name/kvsmith.1"
fi
tar -C "$out" -czf "$out/$name.tar.gz" "$name"
rm -r "${out:?}/$name"
if command -v sha256sum >/dev/null 2>&1; then sum=sha256sum; else sum="shasum -a 256"; fi
(cd "$out" && $sum "$name.tar.gz" >"$name.tar.gz.sha256")
ls -l "$out/$name.tar.gz"
