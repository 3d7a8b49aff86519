// `sign_sums` of src/compute/reference.rs; Self-Indexing KVCache, Eq. 4. Sums are 64-bit fixed point, so the order of
// the additions does not matter. A lane has a group of four channels, a warp every eighth row.
#include "common.h"

// Adds to sums `[b,d/4,16,4]` and counts `[b,d/4,16]`, zeroed before. A block adds `run_rows` rows for 32 groups.
KERNEL(256, 1, sign_sums, const float* x, u64* sums, u32* counts, const u32* largest, u32 n, u32 d, u32 w,
       u32 run_rows) {
    wait_for_earlier();
    SHARED(u64, part, 16 * 4 * 32);
    SHARED(u32, rows, 16 * 32);
    for (u32 i = threadIdx.x; i < 16 * 4 * 32; i += 256) part[i] = 0;
    for (u32 i = threadIdx.x; i < 16 * 32; i += 256) rows[i] = 0;
    __syncthreads();
    u32 groups = d / 4, group = blockIdx.z * 32 + lane();
    double scale = fixed_point(largest[blockIdx.y], n);
    u32 first = blockIdx.x * run_rows, end = smaller(n, first + run_rows);
    if (group < groups) {
        for (u32 row = first + warp(); row < end; row += 8) {
            float4 v = *(const float4*)&x[((u64)blockIdx.y * n + row) * w + group * 4];
            u32 pattern = (v.x > 0) | (v.y > 0) << 1 | (v.z > 0) << 2 | (v.w > 0) << 3;
            atomicAdd(&rows[pattern * 32 + lane()], 1);
            float values[4] = {v.x, v.y, v.z, v.w};
UNROLL
            for (u32 e = 0; e < 4; e++) {
                atomicAdd(&part[(pattern * 4 + e) * 32 + lane()], to_fixed(values[e], scale));
            }
        }
    }
    __syncthreads();
    if (group >= groups) return;
    u64 cell = ((u64)blockIdx.y * groups + group) * 16;
    for (u32 i = warp(); i < 16 * 4; i += 8) atomicAdd(&sums[cell * 4 + i], part[i * 32 + lane()]);
    for (u32 i = warp(); i < 16; i += 8) atomicAdd(&counts[cell + i], rows[i * 32 + lane()]);
}

// Converts sums to f64: out[i] = sums[i]; a head has `per_head` sums.
KERNEL(256, 1, fixed_sums, const u64* sums, double* out, const u32* largest, u32 n, u32 per_head) {
    wait_for_earlier();
    u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= per_head) return;
    u64 at = (u64)blockIdx.y * per_head + i;
    out[at] = from_fixed(sums[at], fixed_point(largest[blockIdx.y], n));
}
