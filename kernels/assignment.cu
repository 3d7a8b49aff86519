// Reports on an assignment of rows to centroids (inertia, counts), and applies the host's changes to it.
#include "common.h"

// Sums runs of 4096 distances per head in f64, in a fixed order: out `[b,runs]`.
KERNEL(256, 1, inertia, const float* distances, double* out, u32 n) {
    wait_for_earlier();
    u32 start = blockIdx.x * 4096, end = n - start < 4096 ? n : start + 4096;
    double sum = 0;
    for (u32 i = threadIdx.x; i < end - start; i += 256) sum += distances[(u64)blockIdx.y * n + start + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// Counts the rows of each centroid: counts `[b,size]`, zeroed before.
KERNEL(256, 1, count_codes, const u32* codes, u32* counts, u32 n, u32 size) {
    wait_for_earlier();
    u32 row = blockIdx.x * 256 + threadIdx.x;
    if (row < n) atomicAdd(&counts[(u64)blockIdx.y * size + codes[(u64)blockIdx.y * n + row]], 1);
}

// Reassigns rows of one head: pairs `[count,2]` of row and new code.
KERNEL(256, 1, hand_over, const u32* pairs, u32* codes, u32* changed, u32 count, u32 head, u32 n) {
    wait_for_earlier();
    u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    codes[(u64)head * n + pairs[2 * i]] = pairs[2 * i + 1];
    changed[head] = 1;
}

// Copies rows of x, numbered from row `first` on: out `[count,w]`.
KERNEL(256, 1, gather_rows, const float* x, const u32* rows, float* out, u32 count, u64 first, u32 w) {
    wait_for_earlier();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < (u64)count * w) out[i] = x[(first + rows[i / w]) * w + i % w];
}
