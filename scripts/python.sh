#!/bin/sh
# Makes a virtual environment in $1 with what the file $2 names.
set -eu

target=$1
requirements=$2
rm -rf "$target"
# Half an environment would look like a whole one the next time.
trap '[ -e "$target/complete" ] || rm -rf "$target"' EXIT
if ! python3 -m venv "$target" >/dev/null 2>&1; then
    packages="python3 python3-venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing $packages"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
        python3 -m venv "$target"
    else
        echo "error: python3 cannot make a virtual environment" >&2
        echo "hint: on Debian or Ubuntu: sudo apt-get install $packages" >&2
        exit 1
    fi
fi
"$target/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
touch "$target/complete"
