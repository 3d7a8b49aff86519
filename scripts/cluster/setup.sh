#!/bin/sh
# Sees to Slurm's daemons for `make cluster-test`. Debian's start nothing of Slurm without a configuration in /etc.
set -eu

PATH=$PATH:/usr/sbin
found() { command -v slurmctld >/dev/null 2>&1 && command -v slurmd >/dev/null 2>&1 && command -v sbatch >/dev/null 2>&1; }

[ "$(uname)" = Linux ] || exit 0
found && exit 0

packages="slurmctld slurmd slurm-client"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing $packages"
    apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null &&
        exit 0
fi
echo "note: no Slurm: its test will be skipped" >&2
echo "hint: on Debian or Ubuntu: sudo apt-get install $packages" >&2
