#!/bin/sh
# Checks every combination of the features: each compiles without a warning, and without `cli`, `cuda` and `wgpu` the library
# depends on none of the crates that they are for.
set -eu
CARGO=${CARGO:-cargo}

for features in "" cuda wgpu cuda,wgpu; do
    "$CARGO" clippy --locked --quiet --no-default-features --features "$features" --lib -- -D warnings
    "$CARGO" clippy --locked --quiet --no-default-features --features "cli,$features" --lib --bins -- -D warnings
done

# Whether the library with these features depends on a crate.
depends() {
    "$CARGO" tree --locked --no-default-features --features "$1" --edges normal,build --prefix none | grep -q "^$2 "
}
check() {
    if depends "" "$2"; then
        echo "error: the library without features depends on $2" >&2
        exit 1
    fi
    if ! depends "$1" "$2"; then
        echo "error: the feature $1 does not bring $2, so that this check says nothing" >&2
        exit 1
    fi
}
for crate in clap clap_complete clap_mangen indicatif console rustyline signal-hook; do
    check cli "$crate"
done
for crate in cudarc libloading; do
    check cuda "$crate"
done
for crate in wgpu pollster naga; do
    check wgpu "$crate"
done
