// The rows of the 2-bit cache of src/kv/packed.rs.
//
// Per KV head: signs as in select_signs.cu; bits of keys and values, `[capacity,d/4]` bytes, lowest bits first; params
// `[capacity,groups]` with groups = ceil(d/32), an f16 scale in the low half and an f16 zero point in the high half;
// center and alpha `[d]`. The full-precision tokens are at the ascending positions full `[FULL]`; their rows are in
// full_keys (minus the center) and full_values, `[FULL,d]` f16.
#pragma once
#include "tensor.h"

struct PackedArrays {
    const u32* signs;
    const u16 *key_bits, *value_bits;
    const u32 *key_params, *value_params;
    const float *centers, *alpha;
    const u32 *full, *full_count;
    const u16 *full_keys, *full_values;

    // Returns the index of a position among the first n_full full-precision tokens, or n_full.
    DEVICE u32 find_full(u32 position, u32 n_full) const {
        u32 low = 0, high = n_full;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (full[middle] < position) low = middle + 1;
            else high = middle;
        }
        return low < n_full && full[low] == position ? low : n_full;
    }
};
