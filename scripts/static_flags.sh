#!/bin/sh
# Prints the flags with which cargo links OpenBLAS and the Fortran runtime into the program, on Linux.
#   cargo build --release $(sh scripts/static_flags.sh [TARGET])
set -eu

host=$(rustc -vV | sed -n 's/^host: //p')
target=${1:-$host}
case $target in
*-linux-gnu) ;;
*)
    echo "error: $target: only Linux with glibc can be linked this way" >&2
    exit 1
    ;;
esac
arch=${target%%-*}
if [ "$target" = "$host" ]; then
    cc=cc packages="libopenblas-dev libgfortran-VERSION-dev"
else
    cc=$arch-linux-gnu-gcc
    debian=$(echo "$arch" | sed 's/aarch64/arm64/; s/x86_64/amd64/')
    packages="libopenblas-dev:$debian libgfortran-VERSION-dev-$debian-cross"
fi
command -v "$cc" >/dev/null 2>&1 || {
    echo "error: $cc is not installed" >&2
    echo "hint: on Debian or Ubuntu: sudo apt-get install gcc-$(echo "$arch" | tr _ -)-linux-gnu" >&2
    exit 1
}

libraries="openblas gfortran"
# GCC has 128-bit floats in a library of their own on x86 alone.
if [ "$arch" = x86_64 ]; then libraries="$libraries quadmath"; fi
names=''
folders=''
for library in $libraries; do
    file=$("$cc" -print-file-name="lib$library.a")
    # A cross compiler does not look where Debian keeps the libraries of a second architecture.
    if [ "$file" = "lib$library.a" ]; then file=/usr/lib/$arch-linux-gnu/lib$library.a; fi
    [ -f "$file" ] || {
        gcc=$("$cc" -dumpversion | cut -d. -f1)
        echo "error: lib$library.a is missing" >&2
        echo "hint: on Debian or Ubuntu: sudo apt-get install $packages" | sed "s/VERSION/$gcc/" >&2
        exit 1
    }
    names="$names,\"static=$library\""
    folders="$folders,\"native=$(cd "$(dirname "$file")" && pwd)\""
done
# Replaces what the build script of openblas-src would say, which links the shared library.
key=target.$target.openblas
printf '%s\n' --config "$key.rustc-link-lib=[${names#,}]" --config "$key.rustc-link-search=[${folders#,}]"
