// The fast part of the nearest-centroid search: scores rows against centroids in f16 on the tensor cores, accumulated
// in f32, and keeps for each row the centroids that may be the nearest.
//
// Rows and centroids are scaled by a power of two per head, so that the largest magnitude lies in [2^13, 2^14), and
// rounded to f16: x = y + r. Let R >= ||r||, C >= ||c||, S >= the norm of every centroid's rounding error, and B the
// largest ||c||²/2. An approximate score then differs from the f32 score of nearest.cu by at most
//
//     E = ||x|| S + R (C + S) + 5 (w + 16) 2^-24 (||x|| C + B).
//
// The first two terms bound the rounding to f16, the last one both f32 sums (tensor cores truncate: 2^-22 per
// addition). A centroid whose score is more than 2 E below the best cannot win. A row with scores that are not finite
// stays unsettled.
#include "common.h"
#include "tensor.h"

// Rows, and centroids, per tile; channels per slab; slabs in flight.
constexpr u32 TILE = 128, SLAB = 64, SEARCH_STAGES = 4;
// Bytes of dynamic shared memory of `search`: the slabs of the rows, and the slabs of centroids in flight.
#define SEARCH_BYTES(slabs) ((slabs + 4) * 128 * 64 * 2)
static_assert(SEARCH_BYTES(1) == (1 + SEARCH_STAGES) * TILE * SLAB * sizeof(u16), "slabs of f16");
// Factor that covers the f32 rounding of the bounds themselves.
constexpr float SLACK = 1.01f;

// Returns the power of two that brings `largest` (the bits of a float) into [2^13, 2^14), or the closest that f32 has.
DEVICE float half_scale(u32 largest) {
    if (largest == 0 || largest >= INFINITE) return 1;
    u32 exponent = 267 - (largest >> 23);
    return __uint_as_float(smaller(exponent, 254) << 23);
}

// ---- scores ----

// Returns the place of the `eighth`-th eight channels of a row in a slab `[TILE,SLAB]`. The eighths of a row are
// permuted, so that the eight rows that ldmatrix reads at once lie in different banks.
DEVICE u32 place(u32 row, u32 eighth) { return row * SLAB + ((eighth ^ (row & 7)) * 8); }

// Adds the products of the `step`-th 16 channels of a slab for a warp's 32 rows x 64 centroids. In sum[i][j], thread
// 4 g + t holds rows 16 i + g and 16 i + g + 8, and centroids 8 j + 2 t and 8 j + 2 t + 1.
DEVICE void add_products(float (&sum)[2][8][4], const u16* rows, const u16* centroids, u32 row_at, u32 centroid_at,
                         u32 step) {
#if defined(TENSOR_CORES) || defined(KVSMITH_PERTURB)
    u32 a[2][4];
UNROLL
    for (u32 i = 0; i < 2; i++) {
        load_matrices(a[i], rows + place(row_at + i * 16 + lane() % 16, step * 2 + lane() / 16));
    }
UNROLL
    for (u32 j = 0; j < 8; j += 2) {
        u32 b[4], row = centroid_at + j * 8 + lane() % 8 + lane() / 16 * 8;
        load_matrices(b, centroids + place(row, step * 2 + lane() / 8 % 2));
UNROLL
        for (u32 i = 0; i < 2; i++) {
            multiply_add<false>(sum[i][j], a[i], b[0], b[1]);
            multiply_add<false>(sum[i][j + 1], a[i], b[2], b[3]);
        }
    }
#else
    // Fragments are read from the slabs, since passing them between emulated lanes would take several times as long.
    for (u32 i = 0; i < 2; i++) {
        for (u32 j = 0; j < 8; j++) {
            for (u32 e = 0; e < 4; e++) {
                u32 row = row_at + i * 16 + lane() / 4 + e / 2 * 8;
                u32 centroid = centroid_at + j * 8 + lane() % 4 * 2 + e % 2;
                // There is no centroid here; skipped only to save time.
                if (sum[i][j][e] == minus_infinity()) continue;
                for (u32 k = 0; k < 16; k++) {
                    u32 eighth = step * 2 + k / 8;
                    float a = widen<false>(rows[place(row, eighth) + k % 8]);
                    sum[i][j][e] += a * widen<false>(centroids[place(centroid, eighth) + k % 8]);
                }
            }
        }
    }
#endif
}

// ---- rows and centroids as f16 ----

// Scales and rounds rows, one per warp: halves `[b,n,w]`; norms `[b,n,2]`, the norms of the scaled row and of its
// rounding error.
KERNEL(256, 1, halve_rows, const float* x, const u32* largest, u16* halves, float* norms, u32 n, u32 w) {
    wait_for_earlier();
    u32 row = blockIdx.x * 8 + warp();
    if (row >= n) return;
    u64 at = (u64)blockIdx.y * n + row;
    float scale = half_scale(largest[blockIdx.y]), norm = 0, lost = 0;
    for (u32 k = lane(); k < w; k += 32) {
        float v = x[at * w + k] * scale;
        u16 half = round_to<false>(v);
        float off = v - widen<false>(half);
        halves[at * w + k] = half;
        norm += v * v;
        lost += off * off;
    }
    norm = warp_sum(norm);
    lost = warp_sum(lost);
    if (lane() > 0) return;
    norms[2 * at] = sqrtf(norm) * SLACK;
    norms[2 * at + 1] = sqrtf(lost) * SLACK;
}

// Scales and rounds the centroids in range, which are numbered from 0 and padded to whole tiles: halves
// `[b,capacity,w]`, biases `[b,capacity]`. bounds `[b,3]`, zeroed before, get the bits of C, S and B of the head of
// this file.
KERNEL(256, 1, halve_centroids, const float* centroids, const u32* ranges, const u32* largest,
       const u32* largest_centroid, u16* halves, float* biases, u32* bounds, u32 w, u32 size, u32 capacity) {
    wait_for_earlier();
    u32 head = blockIdx.y, first = ranges[2 * head], count = ranges[2 * head + 1];
    u32 i = blockIdx.x * 8 + warp();
    if (i >= (count + TILE - 1) / TILE * TILE) return;
    u64 at = (u64)head * capacity + i, from = (u64)head * size + first + i;
    float scale = half_scale(largest_centroid[head]), norm = 0, lost = 0;
    double exact = 0;
    for (u32 k = lane(); k < w; k += 32) {
        float c = i < count ? centroids[from * w + k] : 0.0f;
        float v = c * scale;
        u16 half = round_to<false>(v);
        float off = v - widen<false>(half);
        halves[at * w + k] = half;
        norm += v * v;
        lost += off * off;
        exact += (double)c * c;
    }
    norm = sqrtf(warp_sum(norm)) * SLACK;
    lost = sqrtf(warp_sum(lost)) * SLACK;
    exact = warp_sum(exact);
    if (lane() > 0) return;
    if (i >= count) {
        biases[at] = minus_infinity();
        return;
    }
    float bias = (float)(exact * -0.5 * scale * half_scale(largest[head]));
    biases[at] = bias;
    atomicMax(&bounds[3 * head], __float_as_uint(norm));
    atomicMax(&bounds[3 * head + 1], __float_as_uint(lost));
    atomicMax(&bounds[3 * head + 2], __float_as_uint(-bias));
}

// ---- the search ----

// Starts copying a slab of rows first..first + TILE. Beyond row `end - 1` it copies that row again.
DEVICE void copy_slab(u16* to, const u16* rows, u32 first, u32 end, u32 slab, u32 w) {
    u32 eighths = smaller(SLAB, w - slab * SLAB) / 8;
    for (u32 i = threadIdx.x; i < TILE * (SLAB / 8); i += 256) {
        u32 row = i / (SLAB / 8), eighth = i % (SLAB / 8);
        if (eighth < eighths) {
            const u16* from = rows + (u64)smaller(first + row, end - 1) * w + slab * SLAB + eighth * 8;
            copy_16_bytes(to + place(row, eighth), from);
        }
    }
}

// What a thread has found for each of its rows: the best centroid, its score, and the second best score.
struct Found {
    float best[4], second[4];
    u32 code[4];
};

DEVICE void fold(Found& found, const float (&sum)[2][8][4], u32 centroid_at) {
UNROLL
    for (u32 i = 0; i < 2; i++) {
UNROLL
        for (u32 j = 0; j < 8; j++) {
UNROLL
            for (u32 e = 0; e < 4; e++) {
                u32 r = i * 2 + e / 2;
                float s = sum[i][j][e];
                found.second[r] = fmaxf(found.second[r], fminf(s, found.best[r]));
                if (s > found.best[r]) {
                    found.best[r] = s;
                    found.code[r] = centroid_at + j * 8 + e % 2;
                }
            }
        }
    }
}

// Returns a row's candidates, four numbers, from the results of the eight threads that share the row.
DEVICE u64 candidates_of(const float* best, const float* second, const u32* code, float bound) {
    float top = minus_infinity();
    for (u32 i = 0; i < 8; i++) top = fmaxf(top, best[i * TILE]);
    float least = top - 2 * bound;
    if (!finite(least)) return 0xffffull;
    u64 out = 0;
    u32 count = 0;
    for (u32 i = 0; i < 8; i++) {
        if (second[i * TILE] >= least) return 0xffffull;
        if (best[i * TILE] < least) continue;
        if (count == 4) return 0xffffull;
        out |= (u64)code[i * TILE] << (16 * count++);
    }
    return count < 4 ? out | ~0ull << (16 * count) : out;
}

// The results of the eight threads that share each row, `[8,TILE]` each.
struct FoundOfRows {
    const float *best, *second;
    const u32* code;
};

// Searches 128 rows per block, from `start` on. The rows stay in shared memory. `count` centroids pass by, 128 at a
// time, in slabs of 64 channels; three slabs are in flight while one is used. Of the eight warps, four divide the rows
// and two the centroids. There are n rows and `present` centroids of w channels; biases, which are multiplied by
// `scale`, are padded to whole tiles.
DEVICE FoundOfRows search(u16* shared, const u16* rows, const u16* centroids, const float* biases, float scale,
                          u32 start, u32 n, u32 count, u32 present, u32 w) {
    u32 tiles = (count + TILE - 1) / TILE, slabs = (w + SLAB - 1) / SLAB;
    u16* const queue = shared + slabs * TILE * SLAB;
    u32 row_at = warp() / 2 * 32, centroid_at = warp() % 2 * 64;

    for (u32 slab = 0; slab < slabs; slab++) copy_slab(shared + slab * TILE * SLAB, rows, start, n, slab, w);
    u32 ahead = 0;
    for (; ahead < SEARCH_STAGES - 1; ahead++) {
        if (ahead < tiles * slabs) {
            u32 first = ahead / slabs * TILE;
            copy_slab(queue + ahead * TILE * SLAB, centroids, first, present, ahead % slabs, w);
        }
        end_of_copies();
    }
    Found found;
UNROLL
    for (u32 r = 0; r < 4; r++) {
        found.best[r] = found.second[r] = minus_infinity();
        found.code[r] = 0;
    }
    u32 stage = 0, tile_ahead = ahead / slabs, slab_ahead = ahead % slabs;
    for (u32 tile = 0; tile < tiles; tile++) {
        float sum[2][8][4];
        u32 first = tile * TILE + centroid_at + lane() % 4 * 2;
UNROLL
        for (u32 j = 0; j < 8; j++) {
            float2 bias = *(const float2*)&biases[first + j * 8];
UNROLL
            for (u32 i = 0; i < 2; i++) {
                sum[i][j][0] = sum[i][j][2] = bias.x * scale;
                sum[i][j][1] = sum[i][j][3] = bias.y * scale;
            }
        }
        for (u32 slab = 0; slab < slabs; slab++) {
            wait_for_copies<SEARCH_STAGES - 2>();
            // The slab has arrived for all threads, and all have finished the previous one, whose space is free again.
            __syncthreads();
            if (tile_ahead < tiles) {
                u32 to = (stage + SEARCH_STAGES - 1) % SEARCH_STAGES;
                copy_slab(queue + to * TILE * SLAB, centroids, tile_ahead * TILE, present, slab_ahead, w);
                if (++slab_ahead == slabs) {
                    slab_ahead = 0;
                    tile_ahead++;
                }
            }
            end_of_copies();
            const u16* against = queue + stage * TILE * SLAB;
            u32 steps = smaller(SLAB, w - slab * SLAB) / 16;
UNROLL
            for (u32 step = 0; step < SLAB / 16; step++) {
                if (step < steps) {
                    add_products(sum, shared + slab * TILE * SLAB, against, row_at, centroid_at, step);
                }
            }
            stage = (stage + 1) % SEARCH_STAGES;
        }
        fold(found, sum, first);
    }

    // The eight threads of a row store their results where the slabs were: `[8,TILE]` each.
    wait_for_copies<0>();
    __syncthreads();
    float* best = (float*)shared;
    float* second = best + 8 * TILE;
    u32* code = (u32*)(second + 8 * TILE);
UNROLL
    for (u32 r = 0; r < 4; r++) {
        u32 to = (warp() % 2 * 4 + lane() % 4) * TILE + row_at + r / 2 * 16 + r % 2 * 8 + lane() / 4;
        best[to] = found.best[r];
        second[to] = found.second[r];
        code[to] = found.code[r];
    }
    __syncthreads();
    return {best, second, code};
}

// Returns the bound E defined at the head of this file; norms are the norms of the row.
DEVICE float bound_of(const float* norms, float most, float lost, float largest_bias, u32 w) {
    float sums = 5.0f * (w + 16) * 0x1p-24f * (norms[0] * most + largest_bias);
    return SLACK * (norms[0] * lost + norms[1] * (most + lost) + sums);
}

// Searches the centroids in range; w <= 256. candidates `[b,n]` as `settle` reads them.
KERNEL_SHARED(256, 2, SEARCH_BYTES(4), nearest_fast, const u16* rows, const float* norms, const u16* centroids,
       const float* biases, const u32* bounds, const u32* ranges, const u32* largest, const u32* largest_centroid,
       OPTIONAL const float* scores, u64* candidates, u32 n, u32 w, u32 capacity) {
    wait_for_earlier();
    DYNAMIC_SHARED(u16, shared);
    u32 head = blockIdx.y, count = ranges[2 * head + 1], start = blockIdx.x * TILE;
    FoundOfRows found = search(shared, rows + (u64)head * n * w, centroids + (u64)head * capacity * w,
                               biases + (u64)head * capacity, 1.0f, start, n, count, capacity, w);
    u32 i = threadIdx.x, row = start + i;
    if (i >= TILE || row >= n) return;
    u64 at = (u64)head * n + row;
    float bound = bound_of(norms + 2 * at, __uint_as_float(bounds[3 * head]), __uint_as_float(bounds[3 * head + 1]),
                           __uint_as_float(bounds[3 * head + 2]), w);
    u64 of = count == 0 ? ~0ull : candidates_of(found.best + i, found.second + i, found.code + i, bound);
    if (scores && count > 0) {
        // If even the best falls short of the present score, the row keeps its code.
        float present = (float)((double)scores[at] * half_scale(largest[head]) * half_scale(largest_centroid[head]));
        float top = minus_infinity();
        for (u32 j = 0; j < 8; j++) top = fmaxf(top, found.best[i + j * TILE]);
        if (top + bound < present) of = ~0ull;
    }
    candidates[at] = of;
}
