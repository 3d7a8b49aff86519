// `attention` of src/compute/reference.rs for one token, in f32 throughout, over keys and values in two formats that have
// nothing to do with one another; see rows.h and attend_f32.h.
#include "attend_f32.h"
#include "rows.h"

// The rows of one KV head.
struct RowPairs {
    CachedRows keys, values;

    DEVICE float key(u32 p, u32 c) const { return keys.channel(p, c); }
    DEVICE float value(u32 p, u32 c) const { return values.channel(p, c); }
};

KERNEL_SHARED(128, 1, ATTEND_F32_BYTES, attend_rows, const float* queries, const void* keys,
       OPTIONAL const u16* key_scales, const void* values, OPTIONAL const u16* value_scales, const u32* spans,
       OPTIONAL const u32* lists, OPTIONAL const u32* listed, float* outs, float* sums, float scale, u32 key_kind,
       u32 value_kind, u32 r, u32 d, u32 capacity, u32 most, u32 w) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, shared);
    RowPairs rows = {CachedRows(keys, key_scales, key_kind, d, w, capacity),
                     CachedRows(values, value_scales, value_kind, d, w, capacity)};
    attend_f32(rows, shared, queries, spans, lists, listed, outs, sums, scale, r, most, w);
}
