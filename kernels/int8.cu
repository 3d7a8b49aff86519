// Rows in 8 bits, with the codes and scales of src/kv/int8.rs: see rows.h.
#include "rows.h"

constexpr float INT8_MOST = 127;

// Rounds x >= 0 up to f16; numbers beyond its range become the largest f16.
DEVICE u16 half_at_least(float x) {
    u16 near = to_half(x);
    return widen<false>(near) < x && near < 0x7bff ? near + 1 : near;
}

// Stores the last m rows `[b,g,m,d]`; lens `[b]` already counts them. Each warp has a group of a row. NaN gets code 0.
KERNEL(256, 1, append_int8, const float* rows, const u32* lens, u8* codes, u16* scales, u32 m, u32 d, u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, groups = (d + INT8_GROUP - 1) / INT8_GROUP;
    u32 i = blockIdx.x * 8 + warp(), row = i / groups, group = i % groups;
    if (row >= m) return;
    float x[2], largest = 0;
UNROLL
    for (u32 j = 0; j < 2; j++) {
        u32 c = group * INT8_GROUP + j * 32 + lane();
        x[j] = c < d ? rows[((u64)at * m + row) * d + c] : 0.0f;
        largest = fmaxf(largest, fabsf(x[j]));
    }
    for (u32 step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    u16 scale = half_at_least(largest / INT8_MOST);
    float step = widen<false>(scale);
    u64 position = (u64)at * capacity + lens[blockIdx.z] - m + row;
UNROLL
    for (u32 j = 0; j < 2; j++) {
        u32 c = group * INT8_GROUP + j * 32 + lane();
        float code = step > 0 && x[j] == x[j] ? fminf(fmaxf(roundf(x[j] / step), -INT8_MOST), INT8_MOST) : 0.0f;
        if (c < d) codes[position * d + c] = (u8)(int)code;
    }
    if (lane() == 0) scales[position * groups + group] = scale;
}
