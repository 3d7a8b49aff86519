// For benchmarks: kernels that fill memory with random numbers, and that only read memory.
#include "common.h"
#include "tensor.h"

// Mixes the bits of a number (the finaliser of MurmurHash3).
DEVICE u32 mix(u32 x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// Fills n numbers: f32 (kind 0), f16 (1) or bf16 (2) from -1 to 1, u16 below `below` (3), u32 (4).
KERNEL(256, 1, fill_random, void* out, u64 n, u32 kind, u32 below, u32 seed) {
    wait_for_earlier();
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < n; i += (u64)gridDim.x * 256) {
        u32 bits = mix((u32)i ^ mix((u32)(i >> 32) + seed));
        float v = (float)(bits >> 8) * 0x1p-23f - 1;
        if (kind == 0) ((float*)out)[i] = v;
        if (kind == 1) ((u16*)out)[i] = round_to<false>(v);
        if (kind == 2) ((u16*)out)[i] = round_to<true>(v);
        if (kind == 3) ((u16*)out)[i] = (u16)(bits % below);
        if (kind == 4) ((u32*)out)[i] = bits;
    }
}

// Reads n pieces of 16 bytes; sums `[blocks,256]` keep the compiler from removing the reads.
KERNEL(256, 4, read_all, const uint4* from, u64 n, u32* sums) {
    wait_for_earlier();
    u32 sum = 0;
    u64 stride = (u64)gridDim.x * 256, i = (u64)blockIdx.x * 256 + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += stride) sum ^= from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
    sums[(u64)blockIdx.x * 256 + threadIdx.x] = sum;
}
