// The cache in 8 bits, with the codes and scales of src/kv/int8.rs. Keys and values each have codes `[b,g,capacity,d]`, and
// scales in f16 `[b,g,capacity,groups]`, one per 64 channels: groups = ceil(d / 64). A code times its scale is exact in f32.
#include "attend_f32.h"
#include "static_scores.h"
#include "tensor.h"

// Channels that share a scale: two per lane of a warp.
constexpr u32 INT8_GROUP = 64;
constexpr float INT8_MOST = 127;

// Keys or values of one KV head.
struct Int8Rows {
    const u8* codes;
    const u16* scales;
    u32 d;

    DEVICE Int8Rows(const u8* codes, const u16* scales, u32 d, u32 capacity) : d(d) {
        u64 first = (u64)(blockIdx.z * gridDim.y + blockIdx.y) * capacity;
        this->codes = codes + first * d, this->scales = scales + first * groups();
    }
    DEVICE u32 groups() const { return (d + INT8_GROUP - 1) / INT8_GROUP; }
    DEVICE float channel(u32 p, u32 c) const {
        if (c >= d) return 0;
        return (float)(signed char)codes[(u64)p * d + c] * widen<false>(scales[(u64)p * groups() + c / INT8_GROUP]);
    }
    // Eight channels from a multiple of eight on.
    DEVICE void load(float (&out)[8], u32 p, u32 c) const {
UNROLL
        for (u32 i = 0; i < 8; i++) out[i] = channel(p, c + i);
    }
};

struct Int8Pairs {
    Int8Rows keys, values;

    DEVICE float key(u32 p, u32 c) const { return keys.channel(p, c); }
    DEVICE float value(u32 p, u32 c) const { return values.channel(p, c); }
};

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

// `attention` of src/compute/reference.rs for one token; see attend_f32.h.
KERNEL_SHARED(128, 1, ATTEND_F32_BYTES, attend_int8, const float* queries, const u8* keys, const u16* key_scales,
       const u8* values, const u16* value_scales, const u32* spans, OPTIONAL const u32* lists,
       OPTIONAL const u32* listed, float* outs, float* sums, float scale, u32 r, u32 d, u32 capacity, u32 most, u32 w) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, shared);
    Int8Pairs rows = {Int8Rows(keys, key_scales, d, capacity), Int8Rows(values, value_scales, d, capacity)};
    attend_f32(rows, shared, queries, spans, lists, listed, outs, sums, scale, r, most, w);
}

// See static_scores.h.
KERNEL(256, 1, static_scores_int8, const float* queries, const u8* keys, const u16* key_scales, const u32* spans,
       float* parts, float scale, u32 r, u32 d, u32 w, u32 capacity, u32 n_parts) {
    wait_for_earlier();
    static_softmax(Int8Rows(keys, key_scales, d, capacity), queries, spans, parts, scale, r, d, w, n_parts);
}
