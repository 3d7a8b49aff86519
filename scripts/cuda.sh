#!/bin/sh
# Fetches NVIDIA's CUDA compiler from PyPI into $1, where there is no nvcc: 524 MB on disk.
# `build.rs` finds it there. Nothing of it is part of kvsmith.
set -eu

target=$1
if [ -n "${KVSMITH_NVCC:-}" ] || command -v nvcc >/dev/null 2>&1 || [ -x "${CUDA_HOME:-/nowhere}/bin/nvcc" ]; then
    exit 0
fi
# The first five in these versions, or ptxas refuses the PTX. The sixth is for a ptxas whose machine code drivers of CUDA
# 12 take. NVRTC and the disassembler are for tests.
packages="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvcc-cu12==12.9.86
    nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-cuobjdump==13.5.37 nvidia-cuda-nvdisasm==13.5.37"
[ "$(cat "$target/complete" 2>/dev/null)" = "$packages" ] && exit 0
rm -rf "$target"
# Half a compiler would look like a whole one the next time.
trap '[ -e "$target/complete" ] || rm -rf "$target"' EXIT
if ! python3 -m pip --version >/dev/null 2>&1; then
    pip="python3 python3-pip"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing $pip"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $pip >/dev/null
    else
        echo "error: python3 has no pip, which fetches the CUDA compiler" >&2
        echo "hint: on Debian or Ubuntu: sudo apt-get install $pip; or set KVSMITH_NVCC to an nvcc" >&2
        exit 1
    fi
fi
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --target "$target" $packages
rm -r "$target"/nvidia/cuda_nvcc/nvvm "$target"/nvidia/cuda_nvcc/include
chmod +x "$target"/nvidia/cuda_nvcc/bin/ptxas "$target"/nvidia/cu13/bin/cuobjdump "$target"/nvidia/cu13/bin/nvdisasm
printf '%s' "$packages" >"$target/complete"
# The next build looks for an nvcc again.
touch build.rs
