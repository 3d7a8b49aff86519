// The softmax of a step's queries over the static set alone, for a method that estimates the scores of all other
// positions and adds their part. blockIdx.y is the KV head, blockIdx.z the sequence; r <= 16. Exponents are base 2:
// `scale` is log2(e) / sqrt(d). spans `[b,4]` are those of begin_step.
//
// parts `[b,h,n_parts,2]`: part 0 of each query head becomes the largest score and the sum of the exponentials relative
// to it. As in select_topk.cu, four lanes share a position and multiply its key with all query heads of the group.
#include "common.h"
#include "packed.h"
#include "tensor.h"

// Positions per tile.
constexpr u32 STATIC_TILE = 64;

// Keys `[b,g,capacity,w]` of a float type; see load_eight.
struct FloatKeys {
    const void* keys;
    u64 first;
    u32 kind, w;

    DEVICE void load(float (&out)[8], u32 p, u32 c) const { load_eight(out, keys, (first + p) * w + c, kind); }
};

// Keys in 2 bits, with the center added.
struct PackedKeys {
    PackedArrays of;
    u32 d, pitch, n_full, is_signed;

    DEVICE void load(float (&out)[8], u32 p, u32 c) const {
        u32 slot = of.find_full(p, n_full);
        u32 bits = of.key_bits[(u64)p * (d / 8) + c / 8], sign = of.signs[(u64)p * (pitch / 4) + c / 32] >> (c % 32);
        u32 param = of.key_params[(u64)p * ((d + 31) / 32) + c / 32];
        float step = widen<false>((u16)param), zero = widen<false>((u16)(param >> 16));
UNROLL
        for (u32 i = 0; i < 8; i++) {
            float x = fmaf((float)(bits >> (2 * i) & 3), step, zero) * of.alpha[c + i];
            if (is_signed && !(sign >> i & 1)) x = -x;
            if (slot < n_full) x = widen<false>(of.full_keys[slot * d + c + i]);
            out[i] = of.centers[c + i] + x;
        }
    }
};

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

KERNEL(256, 1, static_scores, const float* queries, const void* keys, const u32* spans, float* parts, float scale,
       u32 kind, u32 r, u32 d, u32 w, u32 capacity, u32 n_parts) {
    wait_for_earlier();
    u64 first = (u64)(blockIdx.z * gridDim.y + blockIdx.y) * capacity;
    FloatKeys rows = {keys, first, kind, w};
    static_softmax(rows, queries, spans, parts, scale, r, d, w, n_parts);
}

// d is a multiple of 8.
KERNEL(256, 1, static_scores_packed, const float* queries, const u32* signs, const u16* key_bits,
       const u32* key_params, const float* centers, const float* alpha, const u32* full, const u32* full_count,
       const u16* full_keys, const u32* spans, float* parts, float scale, u32 r, u32 d, u32 pitch, u32 capacity,
       u32 n_parts, u32 is_signed) {
    wait_for_earlier();
    u64 at = blockIdx.z * gridDim.y + blockIdx.y, first = at * capacity;
    PackedArrays arrays = {};
    arrays.signs = signs + first * (pitch / 4), arrays.key_bits = key_bits + first * (d / 8);
    arrays.key_params = key_params + first * ((d + 31) / 32);
    arrays.centers = centers + at * d, arrays.alpha = alpha + at * d;
    arrays.full = full + at * FULL, arrays.full_keys = full_keys + at * FULL * d;
    PackedKeys rows = {arrays, d, pitch, smaller(full_count[at], FULL), is_signed};
    static_softmax(rows, queries, spans, parts, scale, r, d, d, n_parts);
}
