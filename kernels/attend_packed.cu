// `attention` of src/compute/reference.rs for one token over the 2-bit cache of packed.h, whose rows are dequantised on
// the way to the tensor cores; see attend.h. Values beyond the range of f16 become the largest f16.
#include "attend.h"
#include "packed.h"

template <u32 D>
struct PackedRows {
    static constexpr bool BFLOAT = false, CENTERED = true;
    PackedArrays of;
    u32 d, pitch, n_full, is_signed;

    DEVICE float weight(u32 c) const { return c < d ? of.alpha[c] : 0.0f; }
    DEVICE float center(u32 c) const { return c < d ? of.centers[c] : 0.0f; }

    // Dequantise a tile, two threads per row. Beyond the last item they dequantise the last item again.
    DEVICE void fill_keys(u16* to, const Attended& span, u32 start, u32 end) const {
        u32 row = threadIdx.x / 2, p = span.position(smaller(start + row, end - 1)), slot = of.find_full(p, n_full);
        for (u32 c = threadIdx.x % 2 * 8; c < D; c += 16) {
            u32 packed[4] = {};
            if (c < d && slot < n_full) {
                for (u32 i = 0; i < 8; i += 2) {
                    const u16* key = of.full_keys + slot * d + c + i;
                    packed[i / 2] = (u32)to_half(widen<false>(key[0]) / of.alpha[c + i]) |
                                    (u32)to_half(widen<false>(key[1]) / of.alpha[c + i + 1]) << 16;
                }
            } else if (c < d) {
                u32 sign = of.signs[(u64)p * (pitch / 4) + c / 32] >> (c % 32);
                dequantise(packed, of.key_bits, of.key_params, p, c, is_signed ? ~sign : 0);
            }
            *(uint4*)&to[row * PITCH<D> + c] = {packed[0], packed[1], packed[2], packed[3]};
        }
    }
    DEVICE void fill_values(u16* to, const Attended& span, u32 start, u32 end) const {
        u32 row = threadIdx.x / 2, p = span.position(smaller(start + row, end - 1)), slot = of.find_full(p, n_full);
        for (u32 c = threadIdx.x % 2 * 8; c < D; c += 16) {
            u32 packed[4] = {};
            if (c < d && slot < n_full) {
                const u16* value = of.full_values + slot * d + c;
                for (u32 i = 0; i < 8; i += 2) packed[i / 2] = value[i] | (u32)value[i + 1] << 16;
            } else if (c < d) {
                dequantise(packed, of.value_bits, of.value_params, p, c, 0);
            }
            *(uint4*)&to[row * PITCH<D> + c] = {packed[0], packed[1], packed[2], packed[3]};
        }
    }

    // Dequantises eight channels of a row from channel c on; those whose bit of `negative` is set change their sign.
    DEVICE void dequantise(u32 (&out)[4], const u16* bits, const u32* params, u32 p, u32 c, u32 negative) const {
        u32 own = bits[(u64)p * (d / 8) + c / 8], param = params[(u64)p * ((d + 31) / 32) + c / 32];
        float scale = widen<false>((u16)param), zero = widen<false>((u16)(param >> 16));
UNROLL
        for (u32 i = 0; i < 8; i++) {
            float x = fmaf((float)(own >> (2 * i) & 3), scale, zero);
            out[i / 2] |= (u32)to_half(negative >> i & 1 ? -x : x) << (i % 2 * 16);
        }
    }
};

#define PACKED_PARAMETERS                                                                                       \
    const float *queries, const u32 *signs, const u16 *key_bits, const u16 *value_bits, const u32 *key_params,  \
        const u32 *value_params, const float *centers, const float *alpha, const u32 *full,                      \
        const u32 *full_count, const u16 *full_keys, const u16 *full_values, const u32 *spans,                  \
        OPTIONAL const u32 *lists, OPTIONAL const u32 *listed, float *outs, float *sums, float scale, u32 r,    \
        u32 d, u32 pitch, u32 capacity, u32 most, u32 is_signed
#define ATTEND_PACKED(D)                                                                                        \
    DYNAMIC_SHARED(u16, shared);                                                                                \
    u64 at = blockIdx.z * gridDim.y + blockIdx.y, first = at * capacity, groups = (d + 31) / 32;                \
    PackedRows<D> rows = {{signs + first * (pitch / 4), key_bits + first * (d / 8),                             \
                           value_bits + first * (d / 8), key_params + first * groups,                           \
                           value_params + first * groups, centers + at * d, alpha + at * d, full + at * FULL,    \
                           full_count + at, full_keys + at * FULL * d, full_values + at * FULL * d},            \
                          d, pitch, smaller(full_count[at], FULL), is_signed};                                  \
    attend<PackedRows<D>, D>(rows, shared, queries, spans, lists, listed, outs, sums, scale, r, most)

KERNEL_SHARED(128, 2, ATTEND_BYTES(64), attend_packed_64, PACKED_PARAMETERS) { wait_for_earlier(); ATTEND_PACKED(64); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(80), attend_packed_80, PACKED_PARAMETERS) { wait_for_earlier(); ATTEND_PACKED(80); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(96), attend_packed_96, PACKED_PARAMETERS) { wait_for_earlier(); ATTEND_PACKED(96); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(128), attend_packed_128, PACKED_PARAMETERS) { wait_for_earlier(); ATTEND_PACKED(128); }
