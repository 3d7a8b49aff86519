// `means` of src/compute/reference.rs. The rows of a centroid are summed in 64-bit fixed point, so the order of the
// additions does not matter; the step is at most 2^-61 n of the head's largest magnitude.
#include "common.h"

// Adds rows to sums `[b,size,w]` and counts `[b,size]`, zeroed before; each warp has a row.
KERNEL(256, 4, sum_rows, const float* x, const u32* codes, u64* sums, u32* counts, const u32* largest, u32 n,
       u32 w, u32 size) {
    wait_for_earlier();
    u32 row = blockIdx.x * 8 + warp();
    if (row >= n) return;
    u64 at = (u64)blockIdx.y * n + row, to = (u64)blockIdx.y * size + codes[at];
    double scale = fixed_point(largest[blockIdx.y], n);
    for (u32 k = lane(); k < w; k += 32) atomicAdd(&sums[to * w + k], to_fixed(x[at * w + k], scale));
    if (lane() == 0) atomicAdd(&counts[to], 1);
}

// Moves each centroid that has rows to their mean.
KERNEL(256, 4, move_centroids, float* centroids, const u64* sums, const u32* counts, const u32* largest, u32 n,
       u32 w, u32 size) {
    wait_for_earlier();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= (u64)size * w) return;
    u32 count = counts[(u64)blockIdx.y * size + i / w];
    if (count == 0) return;
    u64 at = (u64)blockIdx.y * size * w + i;
    centroids[at] = (float)(from_fixed(sums[at], fixed_point(largest[blockIdx.y], n)) / count);
}
