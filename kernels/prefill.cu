// `causal` of src/compute/reference.rs for m new rows over a cache: rotated queries `[h,m,d]` at positions
// first..first + m; keys and values `[g,capacity,w]` of one sequence, starting at KV head `head_at` of the cache; out
// `[m,h d]`. A `window` of 0 means none. Exponents are base 2: `scale` is log2(e) / sqrt(d).
//
// A block has some rows of one query head. blockIdx.x is the head, so that heads that share keys and values run side by
// side. The last rows, which see the most positions, come first. Tiles of keys that no row of the block sees are
// skipped, and positions are compared only in tiles that some row sees in part.
#include "attend.h"

// Rows per block, and per warp.
constexpr u32 PREFILL_ROWS = 128, PREFILL_OWN = 32;

// Which positions the rows of a block see, counted in tiles of KEYS positions.
template <u32 KEYS>
struct Sight {
    // First row, end of the rows, end of the positions; first position of the first tile; then arguments of the kernel.
    u32 row, rows_end, end, begin, first, window;

    DEVICE Sight(u32 rows, u32 m, u32 at, u32 width) {
        first = at, window = width;
        row = (gridDim.y - 1 - blockIdx.y) * rows;
        rows_end = smaller(row + rows, m);
        end = first + rows_end;
        begin = lowest(first + row) / KEYS * KEYS;
    }

    // Returns the first position that position t sees.
    DEVICE u32 lowest(u32 t) const { return window > 0 && t + 1 > window ? t + 1 - window : 0; }
    DEVICE bool sees(u32 t, u32 position) const { return position <= t && position >= lowest(t); }
    // Says whether any row at positions low to high sees any position of a tile, and whether all these rows see all
    // positions of the tile.
    DEVICE bool any(u32 low, u32 high, u32 tile) const {
        return low < end && tile <= high && tile + KEYS > lowest(low);
    }
    DEVICE bool all(u32 low, u32 high, u32 tile) const {
        return tile + KEYS - 1 <= low && tile >= lowest(high);
    }
};

#define PREFILL_PARAMETERS(T)                                                                                   \
    const float *queries, const T *keys, const T *values, float *out, float scale, u32 m, u32 d, u32 r,         \
        u32 capacity, u32 head_at, u32 first, u32 window

// ---- 16-bit rows, on the tensor cores ----

// A warp's running result. In out[i][n], thread 4 g + t holds rows 16 i + g and 16 i + g + 8, and channels 8 n + 2 t
// and 8 n + 2 t + 1. `top` is the largest score so far.
template <u32 D>
struct PrefillRun {
    float top[2][2], sum[2][2], out[2][D / 8][4];
};

// Adds q k^T for a warp's rows and a tile of keys to scores.
template <bool BFLOAT, u32 D, u32 KEYS>
DEVICE void prefill_scores(float (&scores)[2][KEYS / 8][4], const u16* q, const u16* k) {
UNROLL
    for (u32 step = 0; step < D; step += 16) {
        u32 a[2][4];
UNROLL
        for (u32 i = 0; i < 2; i++) {
            load_matrices(a[i], q + (i * 16 + lane() % 16) * PITCH<D> + step + lane() / 16 * 8);
        }
UNROLL
        for (u32 j = 0; j < KEYS / 8; j += 2) {
            u32 b[4], row = j * 8 + lane() % 8 + lane() / 16 * 8;
            load_matrices(b, k + row * PITCH<D> + step + lane() / 8 % 2 * 8);
UNROLL
            for (u32 i = 0; i < 2; i++) {
                multiply_add<BFLOAT>(scores[i][j], a[i], b[0], b[1]);
                multiply_add<BFLOAT>(scores[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// Turns the scores of rows 16 i + g + 8 half into weights relative to the new running maximum, and rescales the sums so
// far. Rescaling by a factor of one is skipped, since it changes nothing.
template <u32 D, u32 KEYS>
DEVICE void prefill_weights(PrefillRun<D>& run, float (&scores)[2][KEYS / 8][4], u32 i, u32 half,
                            float scale) {
    float top = minus_infinity();
UNROLL
    for (u32 j = 0; j < KEYS / 8; j++) {
        top = fmaxf(top, fmaxf(scores[i][j][half * 2], scores[i][j][half * 2 + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
    top = fmaxf(top * scale, run.top[i][half]);
    float shift = finite(top) ? top : 0, keep = power_of_two(run.top[i][half] - shift), sum = 0;
    run.top[i][half] = top;
UNROLL
    for (u32 j = 0; j < KEYS / 8; j++) {
UNROLL
        for (u32 e = half * 2; e < half * 2 + 2; e++) {
            scores[i][j][e] = power_of_two(fmaf(scores[i][j][e], scale, -shift));
            sum += scores[i][j][e];
        }
    }
    run.sum[i][half] = run.sum[i][half] * keep + sum;
    if (keep == 1) return;
UNROLL
    for (u32 n = 0; n < D / 8; n++) run.out[i][n][half * 2] *= keep, run.out[i][n][half * 2 + 1] *= keep;
}

// Adds the product of the weights and the values v to out.
template <bool BFLOAT, u32 D, u32 KEYS>
DEVICE void prefill_values(PrefillRun<D>& run, const float (&weights)[2][KEYS / 8][4], const u16* v) {
UNROLL
    for (u32 j = 0; j < KEYS / 8; j += 2) {
        u32 a[2][4];
UNROLL
        for (u32 i = 0; i < 2; i++) {
UNROLL
            for (u32 e = 0; e < 4; e++) {
                const float* pair = weights[i][j + e / 2] + e % 2 * 2;
                a[i][e] = pack<BFLOAT>(pair[0], pair[1]);
            }
        }
UNROLL
        for (u32 n = 0; n < D / 16; n++) {
            u32 b[4];
            load_matrices_transposed(b, v + (j * 8 + lane() % 16) * PITCH<D> + n * 16 + lane() / 16 * 8);
UNROLL
            for (u32 i = 0; i < 2; i++) {
                multiply_add<BFLOAT>(run.out[i][2 * n], a[i], b[0], b[1]);
                multiply_add<BFLOAT>(run.out[i][2 * n + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// Replaces infinite values and NaN of a tile by zeros: times a weight of zero, they would otherwise reach rows that do
// not see them. Marks the rows of the block that do see them in refused `[PREFILL_ROWS]`. All threads of the block take
// part.
template <bool BFLOAT, u32 D, u32 KEYS>
DEVICE void prefill_clean(u16* v, u32* refused, const Sight<KEYS>& sight, u32 tile) {
    for (u32 i = threadIdx.x; i < KEYS * D / 2; i += 128) {
        u32 key = i / (D / 2), *pair = (u32*)(v + key * PITCH<D> + i % (D / 2) * 2);
        bool low = finite(widen<BFLOAT>((u16)*pair)), high = finite(widen<BFLOAT>((u16)(*pair >> 16)));
        if (low && high) continue;
        *pair = (low ? *pair & 0xffffu : 0) | (high ? *pair & 0xffff0000u : 0);
        for (u32 row = 0; row < PREFILL_ROWS; row++) {
            if (sight.sees(sight.first + sight.row + row, tile + key)) refused[row] = 1;
        }
    }
    __syncthreads();
}

// Starts copying a tile of keys and of values. Beyond the last position it copies the last one again, which no row sees
// there.
template <u32 D, u32 KEYS>
DEVICE void prefill_fill(u16* k, u16* v, const u16* keys, const u16* values, u32 tile, u32 end) {
    for (u32 i = threadIdx.x; i < KEYS * (D / 8); i += 128) {
        u32 row = i / (D / 8), eighth = i % (D / 8);
        u64 from = (u64)smaller(tile + row, end - 1) * D + eighth * 8;
        copy_16_bytes(k + row * PITCH<D> + eighth * 8, keys + from);
        copy_16_bytes(v + row * PITCH<D> + eighth * 8, values + from);
    }
}

// Stores the weighted means of a warp's rows, from row `first` on; NaN for the rows in `refused`, which starts at the
// warp's first row.
template <u32 D>
DEVICE void prefill_leave(const PrefillRun<D>& run, const u32* refused, float* out, u32 first, u32 m, u32 d) {
UNROLL
    for (u32 i = 0; i < 4; i++) {
        u32 row = first + i / 2 * 16 + lane() / 4 + i % 2 * 8;
        float sum = run.sum[i / 2][i % 2];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        float share = refused[row - first] ? __uint_as_float(0x7fc00000u) : 1 / sum;
        float* to = out + ((u64)row * gridDim.x + blockIdx.x) * d;
UNROLL
        for (u32 n = 0; n < D / 8; n++) {
UNROLL
            for (u32 e = 0; e < 2; e++) {
                u32 c = n * 8 + lane() % 4 * 2 + e;
                if (row < m && c < d) to[c] = run.out[i / 2][n][i % 2 * 2 + e] * share;
            }
        }
    }
}

// Attends a block's rows. Shared memory: the block's queries, then two tiles each of keys and of values, with rows
// PITCH apart.
#define PREFILL_BYTES(D, KEYS) ((128 + 2 * 2 * KEYS) * (D + 8) * 2)
template <bool BFLOAT, u32 D, u32 KEYS>
DEVICE void prefill(u16* shared, const float* queries, const u16* keys, const u16* values, float* out, float scale,
                    u32 m, u32 d, u32 r, u32 capacity, u32 head_at, u32 first, u32 window) {
    constexpr u32 TILE_OF = KEYS * PITCH<D>;
    static_assert(PREFILL_BYTES(D, KEYS) == (PREFILL_ROWS * PITCH<D> + 4 * TILE_OF) * sizeof(u16), "all of them");
    SHARED(u32, refused, PREFILL_ROWS);
    refused[threadIdx.x] = 0;
    Sight<KEYS> sight(PREFILL_ROWS, m, first, window);
    u64 head = (u64)(head_at + blockIdx.x / r) * capacity * D;
    keys += head, values += head;
    u16* const tiles = shared + PREFILL_ROWS * PITCH<D>;
    prefill_fill<D, KEYS>(tiles, tiles + TILE_OF, keys, values, sight.begin, sight.end);
    end_of_copies();
    for (u32 i = threadIdx.x; i < PREFILL_ROWS * (D / 2); i += 128) {
        u32 row = i / (D / 2), c = i % (D / 2) * 2;
        const float* from = queries + ((u64)blockIdx.x * m + sight.row + row) * d + c;
        bool there = sight.row + row < sight.rows_end;
        u32 both = pack<BFLOAT>(there && c < d ? from[0] : 0.0f, there && c + 1 < d ? from[1] : 0.0f);
        *(u32*)(shared + row * PITCH<D> + c) = both;
    }
    PrefillRun<D> run = {};
UNROLL
    for (u32 i = 0; i < 4; i++) run.top[i / 2][i % 2] = minus_infinity();
    u32 low = first + sight.row + warp() * PREFILL_OWN, high = low + PREFILL_OWN - 1, stage = 0;
    for (u32 tile = sight.begin; tile < sight.end; tile += KEYS, stage ^= 1) {
        wait_for_copies<0>();
        // The tile has arrived for all threads, and all have finished the previous one, whose space is free again.
        __syncthreads();
        u16* next = tiles + (stage ^ 1) * 2 * TILE_OF;
        if (tile + KEYS < sight.end) {
            prefill_fill<D, KEYS>(next, next + TILE_OF, keys, values, tile + KEYS, sight.end);
        }
        end_of_copies();
        u16* k = tiles + stage * 2 * TILE_OF;
        u32 block_low = first + sight.row;
        if (!sight.all(block_low, block_low + PREFILL_ROWS - 1, tile)) {
            prefill_clean<BFLOAT, D, KEYS>(k + TILE_OF, refused, sight, tile);
        }
        if (!sight.any(low, high, tile)) continue;
        float scores[2][KEYS / 8][4] = {};
        prefill_scores<BFLOAT, D, KEYS>(scores, shared + warp() * PREFILL_OWN * PITCH<D>, k);
        bool all = sight.all(low, high, tile);
UNROLL
        for (u32 i = 0; i < 4; i++) {
            u32 t = low + i / 2 * 16 + lane() / 4 + i % 2 * 8;
UNROLL
            for (u32 j = 0; j < KEYS / 8 * 2; j++) {
                u32 position = tile + j / 2 * 8 + lane() % 4 * 2 + j % 2;
                float& score = scores[i / 2][j / 2][i % 2 * 2 + j % 2];
                if (!all && !sight.sees(t, position)) score = minus_infinity();
            }
            prefill_weights<D, KEYS>(run, scores, i / 2, i % 2, scale);
        }
        prefill_values<BFLOAT, D, KEYS>(run, scores, k + TILE_OF);
    }
    wait_for_copies<0>();
    prefill_leave<D>(run, refused + warp() * PREFILL_OWN, out, sight.row + warp() * PREFILL_OWN, m, d);
}

#define PREFILL(BF, D, KEYS)                                                                                    \
    DYNAMIC_SHARED(u16, shared);                                                                                \
    prefill<BF, D, KEYS>(shared, queries, keys, values, out, scale, m, d, r, capacity, head_at, first, window)

KERNEL_SHARED(128, 2, PREFILL_BYTES(64, 64), prefill_half_64, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(false, 64, 64);
}
KERNEL_SHARED(128, 2, PREFILL_BYTES(80, 64), prefill_half_80, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(false, 80, 64);
}
KERNEL_SHARED(128, 2, PREFILL_BYTES(96, 64), prefill_half_96, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(false, 96, 64);
}
KERNEL_SHARED(128, 2, PREFILL_BYTES(128, 64), prefill_half_128, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(false, 128, 64);
}
KERNEL_SHARED(128, 2, PREFILL_BYTES(64, 64), prefill_bfloat_64, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(true, 64, 64);
}
KERNEL_SHARED(128, 2, PREFILL_BYTES(80, 64), prefill_bfloat_80, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(true, 80, 64);
}
KERNEL_SHARED(128, 2, PREFILL_BYTES(96, 64), prefill_bfloat_96, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(true, 96, 64);
}
KERNEL_SHARED(128, 2, PREFILL_BYTES(128, 64), prefill_bfloat_128, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(true, 128, 64);
}

// For GPUs that give a block less shared memory than two tiles of 64 rows of 128 channels need: tiles of 32 rows.
KERNEL_SHARED(128, 2, PREFILL_BYTES(128, 32), prefill_narrow_half_128, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(false, 128, 32);
}
KERNEL_SHARED(128, 2, PREFILL_BYTES(128, 32), prefill_narrow_bfloat_128, PREFILL_PARAMETERS(u16)) {
    wait_for_earlier();
    PREFILL(true, 128, 32);
}

// ---- f32 throughout ----

// Rows per block and keys per tile; elements from row to row of weights.
constexpr u32 PREFILL_SIDE = 64, PREFILL_WIDE = PREFILL_SIDE + 4;

// Copies a tile of keys or values. Beyond the last position it copies the last one again, which no row sees there.
DEVICE void prefill_float_fill(float* rows, const float* from, u32 tile, u32 end, u32 w) {
    for (u32 i = threadIdx.x; i < PREFILL_SIDE * w / 4; i += 256) {
        u32 row = i / (w / 4), c = i % (w / 4) * 4;
        *(float4*)(rows + row * (w + 4) + c) = *(const float4*)(from + (u64)smaller(tile + row, end - 1) * w + c);
    }
}

// Adds the scores of four rows of q with the keys b, b + 16, b + 32 and b + 48.
DEVICE void prefill_float_scores(float (&scores)[4][4], const float* q, const float* rows, u32 b, u32 w) {
    for (u32 c = 0; c < w; c += 4) {
        float4 k[4];
UNROLL
        for (u32 j = 0; j < 4; j++) k[j] = *(const float4*)(rows + (b + 16 * j) * (w + 4) + c);
UNROLL
        for (u32 i = 0; i < 4; i++) {
            float4 v = *(const float4*)(q + i * (w + 4) + c);
UNROLL
            for (u32 j = 0; j < 4; j++) {
                scores[i][j] += v.x * k[j].x;
                scores[i][j] += v.y * k[j].y;
                scores[i][j] += v.z * k[j].z;
                scores[i][j] += v.w * k[j].w;
            }
        }
    }
}

// Adds the product of the weights and the values v to acc, for four rows, the first at position t, and for channels b,
// b + 16, b + 32 and so on. In a tile that some rows see in part (ALL is false), positions that a row does not see are
// left out, because zero times an infinite value is NaN.
template <bool ALL>
DEVICE void prefill_float_values(float (&acc)[4][8], const float* weights, const float* rows, u32 b, u32 w,
                                 const Sight<PREFILL_SIDE>& sight, u32 t, u32 tile) {
    for (u32 key = 0; key < PREFILL_SIDE; key += 4) {
        float own[4][4];
UNROLL
        for (u32 i = 0; i < 4; i++) {
            float4 v = *(const float4*)(weights + i * PREFILL_WIDE + key);
            own[i][0] = v.x, own[i][1] = v.y, own[i][2] = v.z, own[i][3] = v.w;
        }
UNROLL
        for (u32 n = 0; n < 8; n++) {
UNROLL
            for (u32 e = 0; e < 4; e++) {
                float value = b + 16 * n < w ? rows[(key + e) * (w + 4) + b + 16 * n] : 0.0f;
UNROLL
                for (u32 i = 0; i < 4; i++) {
                    if (ALL || sight.sees(t + i, tile + key + e)) acc[i][n] += own[i][e] * value;
                }
            }
        }
    }
}

// Attends 64 rows per block. Thread 16 a + b has rows 4 a to 4 a + 3, the keys of each tile whose number modulo 16 is
// b, and the channels of the output whose number modulo 16 is b. Shared memory: queries `[64,w + 4]`, a tile of keys or
// values `[64,w + 4]`, weights `[64,68]`. w <= 128 is a multiple of 16, so rows are an odd number of 16-byte pieces
// apart.
KERNEL_SHARED(256, 2, (2 * 64 * (128 + 4) + 64 * 68) * 4, prefill_float, PREFILL_PARAMETERS(float), u32 w) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, q);
    Sight<PREFILL_SIDE> sight(PREFILL_SIDE, m, first, window);
    u32 a = threadIdx.x / 16, b = threadIdx.x % 16;
    float* const rows = q + PREFILL_SIDE * (w + 4);
    float* const weights = rows + PREFILL_SIDE * (w + 4) + a * 4 * PREFILL_WIDE;
    u64 head = (u64)(head_at + blockIdx.x / r) * capacity * w;
    for (u32 i = threadIdx.x; i < PREFILL_SIDE * w; i += 256) {
        u32 row = sight.row + i / w, c = i % w;
        bool there = row < sight.rows_end && c < d;
        q[i / w * (w + 4) + c] = there ? queries[((u64)blockIdx.x * m + row) * d + c] : 0.0f;
    }
    float top[4], sum[4] = {}, acc[4][8] = {};
UNROLL
    for (u32 i = 0; i < 4; i++) top[i] = minus_infinity();
    for (u32 tile = sight.begin; tile < sight.end; tile += PREFILL_SIDE) {
        __syncthreads();
        prefill_float_fill(rows, keys + head, tile, sight.end, w);
        __syncthreads();
        float scores[4][4] = {};
        prefill_float_scores(scores, q + a * 4 * (w + 4), rows, b, w);
UNROLL
        for (u32 i = 0; i < 4; i++) {
            u32 t = first + sight.row + a * 4 + i;
            float most = top[i];
UNROLL
            for (u32 j = 0; j < 4; j++) {
                scores[i][j] = sight.sees(t, tile + b + 16 * j) ? scores[i][j] * scale : minus_infinity();
                most = fmaxf(most, scores[i][j]);
            }
UNROLL
            for (u32 step = 8; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
            float shift = finite(most) ? most : 0, keep = exp2f(top[i] - shift);
            top[i] = most;
            sum[i] *= keep;
UNROLL
            for (u32 j = 0; j < 4; j++) {
                float weight = exp2f(scores[i][j] - shift);
                sum[i] += weight;
                weights[i * PREFILL_WIDE + b + 16 * j] = weight;
            }
UNROLL
            for (u32 n = 0; n < 8; n++) acc[i][n] *= keep;
        }
        __syncthreads();
        prefill_float_fill(rows, values + head, tile, sight.end, w);
        __syncthreads();
        u32 t = first + sight.row + a * 4;
        if (sight.all(t, t + 3, tile)) prefill_float_values<true>(acc, weights, rows, b, w, sight, t, tile);
        else prefill_float_values<false>(acc, weights, rows, b, w, sight, t, tile);
    }
UNROLL
    for (u32 i = 0; i < 4; i++) {
        u32 row = sight.row + a * 4 + i;
        float total = sum[i];
UNROLL
        for (u32 step = 8; step > 0; step /= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
UNROLL
        for (u32 n = 0; n < 8; n++) {
            u32 c = b + 16 * n;
            if (row < m && c < d) out[((u64)row * gridDim.x + blockIdx.x) * d + c] = acc[i][n] / total;
        }
    }
}
