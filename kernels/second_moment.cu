// `second_moment` of src/compute/reference.rs. A block computes a tile of 64 x 64 products of one head over one run of
// rows: up to 256 rows are summed in f32, and these sums are added in f64. add_runs adds the runs in order.
#include "common.h"

KERNEL(256, 2, second_moment, const float* q_rope, double* runs, u32 m, u32 d, u32 run_rows) {
    wait_for_earlier();
    SHARED(float, left, 16 * 64);
    SHARED(float, right, 16 * 64);
    u32 tiles = (d + 63) / 64;
    u32 left_at = blockIdx.x / tiles * 64, right_at = blockIdx.x % tiles * 64;
    u32 first = blockIdx.z * run_rows, end = smaller(m, first + run_rows);
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const float* q = q_rope + (u64)blockIdx.y * m * d;
    float part[4][4] = {};
    double sum[4][4] = {};
    for (u32 start = first; start < end; start += 16) {
        for (u32 i = threadIdx.x; i < 16 * 64; i += 256) {
            u32 row = start + i / 64, channel = i % 64;
            bool in_left = row < end && left_at + channel < d, in_right = row < end && right_at + channel < d;
            left[i] = in_left ? q[(u64)row * d + left_at + channel] : 0.0f;
            right[i] = in_right ? q[(u64)row * d + right_at + channel] : 0.0f;
        }
        __syncthreads();
        for (u32 k = 0; k < 16; k++) {
            float4 a = *(const float4*)&left[k * 64 + ty * 4], b = *(const float4*)&right[k * 64 + tx * 4];
            float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
UNROLL
            for (u32 i = 0; i < 4; i++) {
UNROLL
                for (u32 j = 0; j < 4; j++) part[i][j] = fmaf(as[i], bs[j], part[i][j]);
            }
        }
        __syncthreads();
        if ((start - first) % 256 == 240 || start + 16 >= end) {
UNROLL
            for (u32 i = 0; i < 4; i++) {
UNROLL
                for (u32 j = 0; j < 4; j++) {
                    sum[i][j] += part[i][j];
                    part[i][j] = 0;
                }
            }
        }
    }
    double* out = runs + ((u64)blockIdx.z * gridDim.y + blockIdx.y) * d * d;
UNROLL
    for (u32 i = 0; i < 4; i++) {
UNROLL
        for (u32 j = 0; j < 4; j++) {
            u32 x = left_at + ty * 4 + i, y = right_at + tx * 4 + j;
            if (x < d && y < d) out[x * d + y] = sum[i][j];
        }
    }
}

// sums[i] = runs[0][i] + runs[1][i] + ...
KERNEL(256, 1, add_runs, const double* runs, double* sums, u64 size, u32 count) {
    wait_for_earlier();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    double sum = 0;
    for (u32 run = 0; run < count; run++) sum += runs[run * size + i];
    sums[i] = sum;
}
