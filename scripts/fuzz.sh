#!/bin/sh
# Runs fuzz targets, all of them if none is named, FUZZ_SECONDS each; stops at the first finding.
# usage: fuzz.sh OUT [TARGET...]
set -eu

version=0.13.1
seconds=${FUZZ_SECONDS:-60}
out=$1
shift

tools=$out/tools
command -v cargo-fuzz >/dev/null 2>&1 || PATH=$(pwd)/$tools/bin:$PATH
command -v cargo-fuzz >/dev/null 2>&1 ||
    cargo install cargo-fuzz --version $version --locked --root "$tools" --target-dir "$tools/build"

# The files that targets write stay in memory where there is a file system for it.
memory=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/kvsmith-fuzz.XXXXXX")
trap 'rm -rf "$memory"' EXIT
trap 'exit 130' INT TERM

# Without a sanitizer stable Rust suffices: overflow and debug assertions are checked, and panics are findings.
cargo fuzz build -s none --target-dir "$out"
for target in ${*:-$(cargo fuzz list)}; do
    found=$out/found/$target
    mkdir -p "$out/corpus/$target" "$found"
    flags="-max_total_time=$seconds -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=1024 -print_final_stats=1"
    [ ! -f "fuzz/dict/$target.dict" ] || flags="$flags -dict=fuzz/dict/$target.dict"
    echo "fuzzing $target for $seconds s"
    TMPDIR=$memory cargo fuzz run -s none --target-dir "$out" "$target" "$out/corpus/$target" "fuzz/corpus/$target" -- \
        $flags -artifact_prefix="$found/" >"$out/$target.log" 2>&1 || {
        tail -n 30 "$out/$target.log" >&2
        echo "error: a finding in $target" >&2
        echo "hint: again with: cargo fuzz run -s none --target-dir $out $target $(ls -t "$found"/* | head -n 1)" >&2
        exit 1
    }
    grep -E "number_of_executed_units|new_units_added|peak_rss" "$out/$target.log"
done
