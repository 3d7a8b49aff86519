// `attention` of src/compute/reference.rs for one token over f32 rows; see attend_f32.h. Keys and values are
// `[b,g,capacity,w]`.
#include "attend_f32.h"

// The rows of one KV head.
struct FloatRows {
    const float *keys, *values;
    u32 w;

    DEVICE float key(u32 p, u32 c) const { return keys[(u64)p * w + c]; }
    DEVICE float value(u32 p, u32 c) const { return values[(u64)p * w + c]; }
};

KERNEL_SHARED(128, 1, ATTEND_F32_BYTES, attend_float, const float* queries, const float* keys, const float* values,
       const u32* spans, OPTIONAL const u32* lists, OPTIONAL const u32* listed, float* outs, float* sums, float scale,
       u32 r, u32 capacity, u32 most, u32 w) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, shared);
    u64 first = (u64)(blockIdx.z * gridDim.y + blockIdx.y) * capacity * w;
    FloatRows rows = {keys + first, values + first, w};
    attend_f32(rows, shared, queries, spans, lists, listed, outs, sums, scale, r, most, w);
}
