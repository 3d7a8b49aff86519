// The sign centroids of src/method/selfindex.rs and the 2-bit cache of src/kv/packed.rs, from a first prompt's rows.
// A launch covers some consecutive KV heads of one sequence. Pointers point to the arrays of the first of these heads,
// and blockIdx.y counts from it. Rows x `[heads,n,w]` are f32.
#include "common.h"
#include "scan.h"
#include "tensor.h"

// Widens rows `[heads,stride,pitch]` of type f32 (kind 0), f16 (1) or bf16 (2) to x, with zeros from channel d on.
// Subtracts a center `[heads,d]` unless it is null.
KERNEL(256, 1, widen_rows, const void* rows, OPTIONAL const float* centers, float* x, u32 kind, u32 stride, u32 pitch,
       u32 n, u32 d, u32 w) {
    wait_for_earlier();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x, row = i / w, at = blockIdx.y;
    u32 c = (u32)(i % w);
    if (row >= n) return;
    u64 from = (at * stride + row) * pitch + c;
    float v = 0;
    if (c < d) {
        if (kind == 0) v = ((const float*)rows)[from];
        if (kind == 1) v = widen<false>(((const u16*)rows)[from]);
        if (kind == 2) v = widen<true>(((const u16*)rows)[from]);
        if (centers) v -= centers[at * d + c];
    }
    x[(at * n + row) * w + c] = v;
}

// Copies statistics `[heads,w]` to `[heads,d]`; zeros become `instead`.
KERNEL(256, 1, store_channels, const float* from, float* to, float instead, u32 d, u32 w) {
    wait_for_earlier();
    u32 c = threadIdx.x;
    if (c >= d) return;
    float v = from[blockIdx.y * w + c];
    to[blockIdx.y * d + c] = v == 0 ? instead : v;
}

// Scores all visible positions by the mean of the group's last queries: sort keys for best.cu, `[heads,capacity]`, and
// their first histogram. queries `[heads r,m,d]`, of whose m rows only the last is used; spans `[4]` are those of the
// sequence. Four lanes share a position; a block covers SCAN positions.
KERNEL(256, 1, query_keys, const float* queries, const float* x, const u32* spans, u32* keys, u32* histograms, u32 r,
       u32 m, u32 n, u32 d, u32 w, u32 capacity) {
    wait_for_earlier();
    SHARED(float, query, 128);
    SHARED(u32, own, BINS);
    u32 at = blockIdx.y;
    queries += (u64)at * r * m * d;
    for (u32 i = threadIdx.x; i < BINS; i += 256) own[i] = 0;
    if (threadIdx.x < w) {
        float sum = 0;
        for (u32 a = 0; a < r && threadIdx.x < d; a++) sum += queries[((u64)a * m + m - 1) * d + threadIdx.x];
        query[threadIdx.x] = sum / r;
    }
    __syncthreads();
    for (u32 i = threadIdx.x / 4; i < SCAN; i += 64) {
        u32 p = blockIdx.x * SCAN + i;
        bool visible = p >= spans[0] && p < spans[2];
        float sum = 0;
        for (u32 k = threadIdx.x % 4 * 4; k < w && visible; k += 16) {
            float4 v = *(const float4*)&x[((u64)at * n + p) * w + k], q = *(const float4*)&query[k];
            sum = fmaf(v.w, q.w, fmaf(v.z, q.z, fmaf(v.y, q.y, fmaf(v.x, q.x, sum))));
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (!visible || threadIdx.x % 4 > 0) continue;
        u32 key = order_of(sum);
        keys[(u64)at * capacity + p] = key;
        atomicAdd(&own[key >> 21], 1);
    }
    add_histogram(own, histograms + (u64)at * 3 * BINS);
}

// Returns how many full-precision rows the scale and the centroids leave out: none if fewer than FULL other rows
// remain.
DEVICE u32 left_out(const u32* full_count, u32 n) {
    u32 count = full_count[blockIdx.y];
    return n - count < FULL ? 0 : count;
}

// Zeroes the rows of full `[heads,FULL]` that the statistics leave out. Each block has a row.
KERNEL(128, 1, clear_rows, float* x, const u32* full, const u32* full_count, u32 n, u32 w) {
    wait_for_earlier();
    if (blockIdx.x >= left_out(full_count, n) || threadIdx.x >= w) return;
    x[((u64)blockIdx.y * n + full[blockIdx.y * FULL + blockIdx.x]) * w + threadIdx.x] = 0;
}

// Computes centroids `[heads,d/4,16,4]` from the sums `[heads,d/4,16,4]` and counts `[heads,d/4,16]` of sign_sums,
// whose input had zeros in the rows that are left out. A centroid is a mean. A pattern that no key has gets plus or
// minus the mean magnitude of its channels.
KERNEL(256, 1, sign_centroids, const u64* sums, const u32* counts, const u32* largest, const u32* full_count,
       float* centroids, u32 n, u32 d) {
    wait_for_earlier();
    u32 i = blockIdx.x * 256 + threadIdx.x, e = i % 4, cell = i / 4, p = cell % 16, zeros = left_out(full_count, n);
    if (i >= d * 16) return;
    u64 first = (u64)blockIdx.y * d * 16;
    double scale = fixed_point(largest[blockIdx.y], n), sum = from_fixed(sums[first + i], scale), mean;
    // The zeroed rows were counted under pattern 0, from which they are taken off here.
    u32 count = counts[(u64)blockIdx.y * d * 4 + cell] - (p == 0 ? zeros : 0);
    if (count > 0) {
        mean = sum / count;
    } else {
        u64 magnitude = 0;
        for (u32 other = 0; other < 16; other++) {
            u64 part = sums[first + (cell - p + other) * 4 + e];
            magnitude += other >> e & 1 ? part : 0 - part;
        }
        mean = from_fixed(magnitude, scale) / (n - zeros);
        if (!(p >> e & 1)) mean = -mean;
    }
    centroids[first + i] = (float)mean;
}

// Stores the rows of the positions full `[heads,FULL]` in f16, out `[heads,FULL,d]`; center `[heads,d]` is subtracted
// from keys, and is null for values. Each block has a row.
KERNEL(128, 1, keep_full, const float* x, OPTIONAL const float* centers, const u32* full, const u32* full_count,
       u16* out, u32 n, u32 d, u32 w) {
    wait_for_earlier();
    u32 at = blockIdx.y, i = blockIdx.x, c = threadIdx.x;
    if (i >= full_count[at] || c >= d) return;
    float v = x[((u64)at * n + full[at * FULL + i]) * w + c];
    out[((u64)at * FULL + i) * d + c] = to_half(centers ? v - centers[at * d + c] : v);
}
