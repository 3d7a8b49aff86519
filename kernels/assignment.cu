// What is told of an assignment: the inertia and the rows per centroid.
#include "common.h"

// Sums of runs of 4096 distances of each head, in f64 in a fixed order: out `[b,runs]`.
KERNEL(256, 1, inertia, const float* distances, double* out, u32 n) {
    u32 start = blockIdx.x * 4096, end = n - start < 4096 ? n : start + 4096;
    double sum = 0;
    for (u32 i = threadIdx.x; i < end - start; i += 256) sum += distances[(u64)blockIdx.y * n + start + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// counts `[b,size]`, zeroed before.
KERNEL(256, 1, count_codes, const u32* codes, u32* counts, u32 n, u32 size) {
    u32 row = blockIdx.x * 256 + threadIdx.x;
    if (row < n) atomicAdd(&counts[(u64)blockIdx.y * size + codes[(u64)blockIdx.y * n + row]], 1);
}
