// Exact top-k, `select` of src/method/topk.rs up to the sort keys for best.cu: the softmax weight of every visible
// position among all visible ones, summed over the query heads of the group, in f32. blockIdx.y is the KV head,
// blockIdx.z the sequence. Exponents are base 2: `scale` is log2(e) / sqrt(d).
//
// The ranking of src/method/ctkvr.rs uses the same kernels, with two options: with items `[b,g,capacity]`, position i
// stands for the i-th item; and the largest weight in the group may replace the sum.
#include "common.h"
#include "scan.h"
#include "tensor.h"

// Positions per block of `topk_scores`.
constexpr u32 SPAN = 256;

// Scores a block's positions: scores `[b,h,capacity]`, minus infinity if not visible; parts `[b,h,blocks,2]`, the
// largest score and the sum of the exponentials relative to it. queries `[b,h,d]`; keys `[b,g,rows,w]`, or
// `[g,rows,w]` for all sequences if `shared_rows` is 1. Four lanes share a position. Clears the histograms of
// best.cu.
KERNEL_SHARED(256, 2, 4 * 16 * (128 + 256), topk_scores, const float* queries, const void* keys,
       OPTIONAL const u32* items, const u32* spans, float* scores, float* parts, u32* histograms, float scale,
       u32 kind, u32 r, u32 d, u32 w, u32 capacity, u32 rows, u32 shared_rows) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, q);  // `[r,w]`, and the scores `[r,SPAN]`
    float* const own = q + r * w;
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * SPAN;
    const u32* span = spans + 4 * blockIdx.z;
    u64 first_row = (u64)(shared_rows ? blockIdx.y : at) * rows;
    if (blockIdx.x == 0) {
        for (u32 i = threadIdx.x; i < 3 * BINS; i += 256) histograms[(u64)at * 3 * BINS + i] = 0;
    }
    for (u32 i = threadIdx.x; i < r * w; i += 256) {
        q[i] = i % w < d ? queries[((u64)at * r + i / w) * d + i % w] * scale : 0.0f;
    }
    __syncthreads();
    for (u32 i = threadIdx.x / 4; i < SPAN; i += 64) {
        u32 p = start + i;
        bool visible = p >= span[0] && p < span[3];
        u64 row = first_row + (items && visible ? items[(u64)at * capacity + p] : p);
        float sums[16];
        group_products(sums, q, keys, row, visible, kind, r, w);
UNROLL
        for (u32 a = 0; a < 16; a++) {
            if (a < r && threadIdx.x % 4 == 0) own[a * SPAN + i] = visible ? sums[a] : minus_infinity();
        }
    }
    __syncthreads();
    for (u32 a = warp(); a < r; a += 8) {
        float top = minus_infinity(), sum = 0;
        for (u32 i = lane(); i < SPAN; i += 32) top = fmaxf(top, own[a * SPAN + i]);
        for (u32 step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        for (u32 i = lane(); i < SPAN; i += 32) {
            if (finite(top)) sum += exp2f(own[a * SPAN + i] - top);
            if (start + i < capacity) scores[((u64)at * r + a) * capacity + start + i] = own[a * SPAN + i];
        }
        sum = warp_sum(sum);
        if (lane() > 0) continue;
        float* part = parts + (((u64)at * r + a) * gridDim.x + blockIdx.x) * 2;
        part[0] = top, part[1] = sum;
    }
}

// Computes the sort keys of the candidates, from the sum of their weights in the group or from the largest of these
// weights, and the first histogram. A block covers SCAN positions; parts `[b,h,n_parts,2]`.
KERNEL(256, 1, weight_keys, const float* scores, const float* parts, const u32* spans, u32* keys, u32* histograms,
       u32 r, u32 n_parts, u32 capacity, u32 largest) {
    wait_for_earlier();
    SHARED(u32, own, BINS);
    SHARED(float, tops, 16);
    SHARED(float, totals, 16);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    const u32* span = spans + 4 * blockIdx.z;
    for (u32 i = threadIdx.x; i < BINS; i += 256) own[i] = 0;
    for (u32 a = warp(); a < r; a += 8) {
        const float* mine = parts + ((u64)at * r + a) * n_parts * 2;
        float top = minus_infinity(), sum = 0;
        for (u32 i = lane(); i < n_parts; i += 32) top = fmaxf(top, mine[2 * i]);
        for (u32 step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        for (u32 i = lane(); i < n_parts; i += 32) {
            if (finite(mine[2 * i])) sum += exp2f(mine[2 * i] - top) * mine[2 * i + 1];
        }
        sum = warp_sum(sum);
        if (lane() == 0) tops[a] = top, totals[a] = sum;
    }
    __syncthreads();
    scores += (u64)at * r * capacity;
    for (u32 i = threadIdx.x; i < SCAN; i += 256) {
        u32 p = blockIdx.x * SCAN + i;
        if (p < span[0] + span[1] || p >= span[2]) continue;
        float weight = 0;
        for (u32 a = 0; a < r; a++) {
            float own = exp2f(scores[(u64)a * capacity + p] - tops[a]) / totals[a];
            weight = largest ? fmaxf(weight, own) : weight + own;
        }
        u32 key = order_of(weight);
        keys[(u64)at * capacity + p] = key;
        atomicAdd(&own[key >> 21], 1);
    }
    add_histogram(own, histograms + (u64)at * 3 * BINS);
}
