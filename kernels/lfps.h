// What the kernels of LFPS share: sizes, and sums and scores in the precision of the method.
#pragma once
#include "common.h"
#include "tensor.h"

// LOCAL: number of most recent positions in the local estimate, as in src/method/lfps/constants.rs. SCORED: positions
// per scoring block. SORTERS: threads per sorting block. CHOICE: how many numbers describe a KV head's choice, namely
// the first rank that is left out; the number of positions that are listed because even rank 0 is too many; and these
// positions.
constexpr u32 LOCAL = 5, SCORED = 256, SORTERS = 512, CHOICE = 2 + 16, NONE = 0xffffffffu;
// Numbers of a query head in constants.
constexpr u32 OF_HEAD = 6;

// Sums over a block of 256 threads; every thread gets the sum.
DEVICE double block_total(double v) {
    SHARED(double, total, 1);
    v = block_sum(v);
    if (threadIdx.x == 0) total[0] = v;
    __syncthreads();
    v = total[0];
    __syncthreads();
    return v;
}

// Says whether the budget covers all candidates.
DEVICE bool is_exact(const u32* span, u32 budget) { return budget >= span[2] - span[0] - span[1]; }

// Computes the scaled product of a query and a key with a warp; every lane gets it.
DEVICE double warp_score(const float* q, const void* keys, u64 row, double scale, u32 kind, u32 d, u32 w) {
    float sum = 0;
    for (u32 c = lane(); c < d; c += 32) sum = fmaf(q[c], load_one(keys, row * w + c, kind), sum);
    return scale * (double)warp_sum(sum);
}

// Computes the products of a key with its group's queries `[r,w]` with four lanes; each lane gets all products. Every
// lane of the warp must take part, even without a key.
DEVICE void group_products(float (&out)[16], const float* q, const void* keys, u64 row, bool there, u32 kind, u32 r,
                           u32 w) {
UNROLL
    for (u32 a = 0; a < 16; a++) out[a] = 0;
    for (u32 k = threadIdx.x % 4 * 8; k < w && there; k += 32) {
        float key[8];
        load_eight(key, keys, row * w + k, kind);
UNROLL
        for (u32 a = 0; a < 16; a++) {
            if (a >= r) continue;
            float4 low = *(const float4*)&q[a * w + k], high = *(const float4*)&q[a * w + k + 4];
            out[a] = fmaf(key[3], low.w, fmaf(key[2], low.z, fmaf(key[1], low.y, fmaf(key[0], low.x, out[a]))));
            out[a] = fmaf(key[7], high.w, fmaf(key[6], high.z, fmaf(key[5], high.y, fmaf(key[4], high.x, out[a]))));
        }
    }
UNROLL
    for (u32 a = 0; a < 16; a++) {
        if (a >= r) continue;
        out[a] += __shfl_xor_sync(ALL_LANES, out[a], 1);
        out[a] += __shfl_xor_sync(ALL_LANES, out[a], 2);
    }
}

// A running log-sum-exp.
struct LogSum {
    double top, sum;

    DEVICE void add(double s) {
        if (s > top) {
            sum = sum * exp(top - s) + 1, top = s;
        } else {
            sum += exp(s - top);
        }
    }
    DEVICE double log_of() const { return top + log(sum); }
};
