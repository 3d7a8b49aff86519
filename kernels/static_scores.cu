// The softmax over the static set of rows that do not depend on one another (rows.h), and of rows in 2 bits; see
// static_scores.h.
#include "packed.h"
#include "rows.h"
#include "static_scores.h"

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

KERNEL(256, 1, static_scores, const float* queries, const void* keys, OPTIONAL const u16* key_scales, const u32* spans,
       float* parts, float scale, u32 kind, u32 r, u32 d, u32 w, u32 capacity, u32 n_parts) {
    wait_for_earlier();
    CachedRows rows(keys, key_scales, kind, d, w, capacity);
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
