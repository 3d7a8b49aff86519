// The softmax of a step's queries over the static set alone, for a method that estimates the scores of all other
// positions and adds their part. blockIdx.y is the KV head, blockIdx.z the sequence; r <= 16. Exponents are base 2:
// `scale` is log2(e) / sqrt(d). spans `[b,4]` are those of begin_step.
//
// parts `[b,h,n_parts,2]`: part 0 of each query head becomes the largest score and the sum of the exponentials relative
// to it. As in select_topk.cu, four lanes share a position and multiply its key with all query heads of the group.
#pragma once
#include "common.h"

// Positions per tile.
constexpr u32 STATIC_TILE = 64;

// Computes part 0. Rows have w channels, with zeros from channel d on; w is a multiple of 8, at most 128.
template <class Keys>
DEVICE void static_softmax(const Keys& keys, const float* queries, const u32* spans, float* parts, float scale, u32 r,
                           u32 d, u32 w, u32 n_parts) {
    SHARED(float, q, 16 * 128);
    SHARED(float, scores, 16 * STATIC_TILE);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, i = threadIdx.x / 4, quarter = threadIdx.x % 4;
    const u32* span = spans + 4 * blockIdx.z;
    u32 sinks = span[1], n = sinks + span[3] - span[2];
    for (u32 j = threadIdx.x; j < r * w; j += 256) {
        q[j] = j % w < d ? queries[((u64)at * r + j / w) * d + j % w] * scale : 0.0f;
    }
    // The results of query heads warp() and warp() + 8.
    float tops[2] = {minus_infinity(), minus_infinity()}, totals[2] = {};
    for (u32 start = 0; start < n; start += STATIC_TILE) {
        __syncthreads();
        bool there = start + i < n;
        u32 p = start + i < sinks ? span[0] + start + i : span[2] + start + i - sinks;
        float sums[16] = {};
        for (u32 c = quarter * 8; c < w && there; c += 32) {
            float key[8];
            keys.load(key, p, c);
UNROLL
            for (u32 a = 0; a < 16; a++) {
                if (a >= r) continue;
UNROLL
                for (u32 e = 0; e < 8; e++) sums[a] = fmaf(key[e], q[a * w + c + e], sums[a]);
            }
        }
UNROLL
        for (u32 a = 0; a < 16; a++) {
            if (a >= r) continue;
            float sum = sums[a];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            if (quarter == 0) scores[a * STATIC_TILE + i] = there ? sum : minus_infinity();
        }
        __syncthreads();
UNROLL
        for (u32 half = 0; half < 2; half++) {
            u32 a = half * 8 + warp();
            if (a >= r) continue;
            float low = scores[a * STATIC_TILE + lane()], high = scores[a * STATIC_TILE + 32 + lane()];
            float top = fmaxf(tops[half], fmaxf(low, high));
            for (u32 step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
            if (!finite(top)) continue;
            float sum = warp_sum(exp2f(low - top) + exp2f(high - top));
            totals[half] = totals[half] * exp2f(tops[half] - top) + sum;
            tops[half] = top;
        }
    }
UNROLL
    for (u32 half = 0; half < 2; half++) {
        u32 a = half * 8 + warp();
        if (a >= r || lane() > 0) continue;
        float* part = parts + ((u64)at * r + a) * n_parts * 2;
        part[0] = tops[half], part[1] = totals[half];
    }
}
