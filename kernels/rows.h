// Cached keys or values in any format whose rows do not depend on one another, read as f32.
#pragma once
#include "tensor.h"

// Channels that share a scale in 8 bits.
constexpr u32 INT8_GROUP = 64;
// The formats: those of load_eight (f32, f16, bf16), and 8 bits.
constexpr u32 INT8_ROWS = 3;

// The rows of one KV head. Floats are `[b,g,capacity,w]`, with zeros from channel d on. 8 bits are codes
// `[b,g,capacity,d]` in two's complement, and scales in f16 `[b,g,capacity,groups]`, one per 64 channels: groups =
// ceil(d / 64). A code times its scale is exact in f32.
struct CachedRows {
    const void* rows;
    const u16* scales;
    u32 kind, d, w;
    u64 first;

    DEVICE CachedRows(const void* rows, const u16* scales, u32 kind, u32 d, u32 w, u32 capacity)
        : rows(rows), scales(scales), kind(kind), d(d), w(w),
          first((u64)(blockIdx.z * gridDim.y + blockIdx.y) * capacity) {}
    // Channel c < w of the row at position p.
    DEVICE float channel(u32 p, u32 c) const {
        if (kind != INT8_ROWS) return load_one(rows, (first + p) * w + c, kind);
        if (c >= d) return 0;
        u32 groups = (d + INT8_GROUP - 1) / INT8_GROUP;
        float code = (float)((const signed char*)rows)[(first + p) * d + c];
        return code * widen<false>(scales[(first + p) * groups + c / INT8_GROUP]);
    }
    // Eight channels from a multiple of eight on.
    DEVICE void load(float (&out)[8], u32 p, u32 c) const {
        if (kind != INT8_ROWS) return load_eight(out, rows, (first + p) * w + c, kind);
UNROLL
        for (u32 i = 0; i < 8; i++) out[i] = channel(p, c + i);
    }
};
