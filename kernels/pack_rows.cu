// Quantises rows to 2 bits, with the same bits as src/kv/packed.rs: z = min x, s = (max x - min x) / 3 and
// Q = round((x - z) / s) per 32 channels. packed.h describes the arrays.
#include "common.h"
#include "tensor.h"

// Channels that share a scale and a zero point; one per lane of a warp.
constexpr u32 QUANT_GROUP = 32;
// A smaller step counts as zero, that is, the values of the group count as equal.
constexpr float LEAST_STEP = 1e-8f;

// Stores the last m rows `[b,g,m,w]`, of which the first d channels are used: bits `[b,g,capacity,d/4]` bytes, params
// `[b,g,capacity,groups]`. For keys, center and alpha are `[b,g,d]`; for values they are null. With is_signed, only the
// magnitudes of keys are stored. lens `[b]` already counts the rows. Each warp has a group of a row; d is a multiple of
// 4.
KERNEL(256, 1, pack_rows, const float* rows, OPTIONAL const float* centers, OPTIONAL const float* alpha,
       const u32* lens, u8* bits, u32* params, u32 is_signed, u32 m, u32 d, u32 w, u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, groups = (d + QUANT_GROUP - 1) / QUANT_GROUP;
    u32 i = blockIdx.x * 8 + warp(), row = i / groups, c = i % groups * QUANT_GROUP + lane();
    if (row >= m) return;
    float x = c < d ? rows[((u64)at * m + row) * w + c] : 0.0f;
    if (centers && c < d) {
        x = (x - centers[at * d + c]) / alpha[at * d + c];
        if (is_signed) x = fabsf(x);
    }
    float low = c < d ? x : -minus_infinity(), high = c < d ? x : minus_infinity();
    for (u32 step = 16; step > 0; step /= 2) {
        low = fminf(low, __shfl_xor_sync(ALL_LANES, low, step));
        high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, step));
    }
    float step = (high - low) / 3.0f;
    if (step < LEAST_STEP) step = 0;
    u32 code = 0;
    if (c < d && step != 0) code = (u32)fminf(fmaxf(roundf((x - low) / step), 0.0f), 3.0f);
    // Four channels per byte, the first in the lowest bits.
    u32 byte = code << (2 * (lane() % 4));
    byte |= __shfl_xor_sync(ALL_LANES, byte, 1);
    byte |= __shfl_xor_sync(ALL_LANES, byte, 2);
    u64 position = (u64)at * capacity + lens[blockIdx.z] - m + row;
    if (lane() % 4 == 0 && c < d) bits[position * (d / 4) + c / 4] = (u8)byte;
    if (lane() == 0) params[position * groups + i % groups] = to_half(step) | (u32)to_half(low) << 16;
}
