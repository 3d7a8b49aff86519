#!/bin/sh
# Finds out whether a C compiler and OpenBLAS can be linked, and whether there is the g++ that runs the CUDA
# kernels on the CPU in tests; installs them on Debian when root.
set -eu

links() {
    dir=$(mktemp -d)
    echo 'int main(void) { return 0; }' >"$dir/probe.c"
    result=1
    if cc "$dir/probe.c" -lopenblas -o "$dir/probe" >"$dir/log" 2>&1; then result=0; fi
    rm -rf "$dir"
    return $result
}

command -v cargo >/dev/null 2>&1 || {
    echo "error: cargo is not installed" >&2
    echo "hint: install Rust 1.89 or later" >&2
    exit 1
}
compiles() { command -v g++ >/dev/null 2>&1; }
links && compiles && exit 0

packages="gcc g++ libc6-dev libopenblas-dev"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing $packages"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
    links && compiles && exit 0
fi
if links; then
    echo "note: without g++ the tests of the CUDA kernels are left out" >&2
    echo "hint: on Debian or Ubuntu: sudo apt-get install g++" >&2
    exit 0
fi
echo "error: a C compiler or OpenBLAS is missing" >&2
echo "hint: on Debian or Ubuntu: sudo apt-get install $packages" >&2
exit 1
