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

// A running log-sum-exp; `top` starts at LOWEST, and `sum` at zero.
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
