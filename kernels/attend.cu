// attention of src/compute/reference.rs for one token over rows of 16 bits, on the tensor cores: keys and values
// `[b,g,capacity,D]`; see attend.h. Weights are rounded to the rows' type before they meet the values.
#include "attend.h"

template <bool BF, u32 D>
struct PlainRows {
    static constexpr bool BFLOAT = BF, CENTRED = false;
    const u16 *keys, *values;

    DEVICE float weight(u32) const { return 1; }
    DEVICE float centre(u32) const { return 0; }

    // Starts copying a tile; beyond the last item the last one again, which its score leaves out.
    DEVICE void fill(u16* k, u16* v, const Attended& span, u32 start, u32 end) const {
        for (u32 i = threadIdx.x; i < ITEMS * (D / 8); i += 128) {
            u32 row = i / (D / 8), eighth = i % (D / 8);
            u64 from = (u64)span.position(smaller(start + row, end - 1)) * D + eighth * 8;
            copy_16_bytes(k + row * PITCH<D> + eighth * 8, keys + from);
            copy_16_bytes(v + row * PITCH<D> + eighth * 8, values + from);
        }
    }
};

#define ATTEND_PARAMETERS                                                                                       \
    const float *queries, const u16 *keys, const u16 *values, const u32 *spans, const u32 *lists,               \
        const u32 *listed, float *outs, float *sums, float scale, u32 r, u32 capacity, u32 most
#define ATTEND(BF, D)                                                                                           \
    DYNAMIC_SHARED(u16, shared);                                                                                \
    u64 first = (u64)(blockIdx.z * gridDim.y + blockIdx.y) * capacity * D;                                      \
    attend<PlainRows<BF, D>, D>({keys + first, values + first}, shared, queries, spans, lists, listed, outs,    \
                                sums, scale, r, most)

KERNEL(128, 2, attend_half_64, ATTEND_PARAMETERS) { ATTEND(false, 64); }
KERNEL(128, 2, attend_half_80, ATTEND_PARAMETERS) { ATTEND(false, 80); }
KERNEL(128, 2, attend_half_96, ATTEND_PARAMETERS) { ATTEND(false, 96); }
KERNEL(128, 2, attend_half_128, ATTEND_PARAMETERS) { ATTEND(false, 128); }
KERNEL(128, 2, attend_bfloat_64, ATTEND_PARAMETERS) { ATTEND(true, 64); }
KERNEL(128, 2, attend_bfloat_80, ATTEND_PARAMETERS) { ATTEND(true, 80); }
KERNEL(128, 2, attend_bfloat_96, ATTEND_PARAMETERS) { ATTEND(true, 96); }
KERNEL(128, 2, attend_bfloat_128, ATTEND_PARAMETERS) { ATTEND(true, 128); }

// Puts the parts together by their log-sum-exp: out `[b,h,w]`, lse `[b,h]` in natural units; zeros and minus
// infinity for nothing. A block has a query head.
KERNEL(128, 1, merge_parts, const float* outs, const float* sums, float* out, float* lse, u32 parts, u32 r, u32 w) {
    u32 at = blockIdx.x / r, row = blockIdx.x % r;
    float top = minus_infinity(), sum = 0;
    for (u32 p = 0; p < parts; p++) top = fmaxf(top, sums[2 * (((u64)at * parts + p) * r + row)]);
    for (u32 p = 0; p < parts; p++) {
        const float* part = sums + 2 * (((u64)at * parts + p) * r + row);
        if (finite(part[0])) sum += exp2f(part[0] - top) * part[1];
    }
    for (u32 j = threadIdx.x; j < w; j += 128) {
        float value = 0;
        for (u32 p = 0; p < parts; p++) {
            u64 i = ((u64)at * parts + p) * r + row;
            if (finite(sums[2 * i])) value += exp2f(sums[2 * i] - top) * outs[i * w + j];
        }
        out[(u64)blockIdx.x * w + j] = sum > 0 ? value / sum : 0.0f;
    }
    if (threadIdx.x == 0) lse[blockIdx.x] = sum > 0 ? (top + log2f(sum)) * 0.693147180559945f : minus_infinity();
}
