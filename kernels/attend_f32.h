// Attention of one token in f32 throughout, over rows of any format that gives single channels; see attend.h for the
// contract and the arguments.
#pragma once
#include "attend.h"

// Bytes of dynamic shared memory of a block: queries `[r,w]`, a tile of keys or values `[ITEMS,w + 1]`, weights
// `[r,ITEMS]`, for w <= 128.
#define ATTEND_F32_BYTES (4 * (16 * 128 + 64 * 129 + 16 * 64))

// Attends a block's share of one KV head's positions with 128 threads; each sums one channel for every query.
// `from.key(p, c)` and `from.value(p, c)` give channel c < w of the row at position p.
template <class Rows>
DEVICE void attend_f32(const Rows& from, float* shared, const float* queries, const u32* spans, const u32* lists,
                       const u32* listed, float* outs, float* sums, float scale, u32 r, u32 most, u32 w) {
    SHARED(float, tops, QUERIES);
    SHARED(float, keeps, QUERIES);
    SHARED(float, totals, QUERIES);
    float* const q = shared;
    float* const rows = q + r * w;
    float* const weights = rows + ITEMS * (w + 1);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start, end, channel = threadIdx.x;
    Attended span = attended(spans, lists, listed, most);
    part_of(span.total, start, end);
    for (u32 i = threadIdx.x; i < r * w; i += 128) q[i] = queries[(u64)at * r * w + i];
    if (threadIdx.x < QUERIES) tops[threadIdx.x] = LOWEST, totals[threadIdx.x] = 0;
    float out[QUERIES] = {};
    for (u32 tile = start; tile < end; tile += ITEMS) {
        u32 items = smaller(ITEMS, end - tile);
        __syncthreads();
        for (u32 i = threadIdx.x; i < items * w; i += 128) {
            rows[i / w * (w + 1) + i % w] = from.key(span.position(tile + i / w), i % w);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < r * ITEMS; i += 128) {
            u32 a = i / ITEMS, item = i % ITEMS;
            float s = 0;
            for (u32 c = 0; c < w && item < items; c++) s = fmaf(q[a * w + c], rows[item * (w + 1) + c], s);
            weights[i] = item < items ? s * scale : minus_infinity();
        }
        __syncthreads();
        for (u32 a = warp(); a < r; a += 4) {
            float* mine = weights + a * ITEMS;
            float most = fmaxf(mine[lane()], mine[lane() + 32]);
            for (u32 step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
            most = fmaxf(most, tops[a]);
            mine[lane()] = exp2f(mine[lane()] - most);
            mine[lane() + 32] = exp2f(mine[lane() + 32] - most);
            float sum = warp_sum(mine[lane()] + mine[lane() + 32]);
            if (lane() == 0) {
                keeps[a] = exp2f(tops[a] - most);
                totals[a] = totals[a] * keeps[a] + sum;
                tops[a] = most;
            }
        }
        for (u32 i = threadIdx.x; i < items * w; i += 128) {
            rows[i / w * (w + 1) + i % w] = from.value(span.position(tile + i / w), i % w);
        }
        __syncthreads();
        if (channel < w) {
UNROLL
            for (u32 a = 0; a < QUERIES; a++) {
                if (a >= r) continue;
                float sum = out[a] * keeps[a];
                for (u32 i = 0; i < items; i++) sum = fmaf(weights[a * ITEMS + i], rows[i * (w + 1) + channel], sum);
                out[a] = sum;
            }
        }
    }
    __syncthreads();
    u64 to = ((u64)at * gridDim.x + blockIdx.x) * r;
UNROLL
    for (u32 a = 0; a < QUERIES; a++) {
        if (a < r && channel < w) outs[(to + a) * w + channel] = out[a];
    }
    if (channel < r) {
        sums[2 * (to + channel)] = start < end ? tops[channel] : minus_infinity();
        sums[2 * (to + channel) + 1] = totals[channel];
    }
}
