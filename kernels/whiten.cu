// `whiten` of src/compute/reference.rs, in f32; A2ATS, Eq. 15. A block computes 64 rows x 64 channels.
#include "common.h"

// x `[b,n,w]`, chol `[b,d,d]`; out `[b,n,w]`.
KERNEL(256, 2, whiten, const float* x, const float* chol, float* out, u32 n, u32 d, u32 w) {
    wait_for_earlier();
    SHARED(float, rows, 16 * 68);
    SHARED(float, columns, 16 * 64);
    u32 row_at = blockIdx.x * 64, column_at = blockIdx.z * 64;
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    x += (u64)blockIdx.y * n * w;
    out += (u64)blockIdx.y * n * w;
    chol += (u64)blockIdx.y * d * d;
    float sum[4][4] = {};
    for (u32 start = 0; start < w; start += 16) {
        for (u32 i = threadIdx.x; i < 16 * 64; i += 256) {
            u32 row = row_at + i / 16, k = start + i % 16;
            rows[i % 16 * 68 + i / 16] = row < n ? x[(u64)row * w + k] : 0.0f;
            u32 from = start + i / 64, to = column_at + i % 64;
            columns[i] = from < d && to < d ? chol[from * d + to] : 0.0f;
        }
        __syncthreads();
        for (u32 k = 0; k < 16; k++) {
            float4 a = *(const float4*)&rows[k * 68 + ty * 4], b = *(const float4*)&columns[k * 64 + tx * 4];
            float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
UNROLL
            for (u32 i = 0; i < 4; i++) {
UNROLL
                for (u32 j = 0; j < 4; j++) sum[i][j] = fmaf(as[i], bs[j], sum[i][j]);
            }
        }
        __syncthreads();
    }
UNROLL
    for (u32 i = 0; i < 4; i++) {
UNROLL
        for (u32 j = 0; j < 4; j++) {
            u32 row = row_at + ty * 4 + i, channel = column_at + tx * 4 + j;
            if (row < n && channel < w) out[(u64)row * w + channel] = sum[i][j];
        }
    }
}
