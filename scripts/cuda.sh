#!/bin/sh
# Fetches NVIDIA's CUDA compiler from PyPI into $1, where there is no nvcc: 90 MB to fetch, 271 MB on disk.
# `build.rs` finds it there. Nothing of it is part of kvsmith.
set -eu

target=$1
if [ -n "${KVSMITH_NVCC:-}" ] || command -v nvcc >/dev/null 2>&1 || [ -x "${CUDA_HOME:-/nowhere}/bin/nvcc" ]; then
    exit 0
fi
[ -e "$target/complete" ] && exit 0
rm -rf "$target"
# Half a compiler would look like a whole one the next time.
trap '[ -e "$target/complete" ] || rm -rf "$target"' EXIT
if ! python3 -m pip --version >/dev/null 2>&1; then
    packages="python3 python3-pip"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing $packages"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
    else
        echo "error: python3 has no pip, which fetches the CUDA compiler" >&2
        echo "hint: on Debian or Ubuntu: sudo apt-get install $packages; or set KVSMITH_NVCC to an nvcc" >&2
        exit 1
    fi
fi
# The first five in these versions, or ptxas refuses the PTX; NVRTC and the disassembler are for tests.
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --target "$target" \
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 'nvidia-cuda-runtime==13.0.*' \
    'nvidia-cuda-cccl==13.0.*' nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-cuobjdump==13.5.37 nvidia-cuda-nvdisasm==13.5.37
chmod +x "$target"/nvidia/cu13/bin/cuobjdump "$target"/nvidia/cu13/bin/nvdisasm
touch "$target/complete"
# The next build looks for an nvcc again.
touch build.rs
