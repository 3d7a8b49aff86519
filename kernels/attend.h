// Functions that the decode attention kernels share: the positions of a block, the products on the tensor cores, and
// the partial results that `merge_parts` joins.
//
// The contract is `attention` of src/compute/reference.rs, for one token and the r <= 16 query heads of each KV head.
// blockIdx.y is the KV head, blockIdx.z the sequence; the blocks along x split the positions. Each row of K and V is
// read once for its whole query group. Queries are `[b,h,D]`: D is the head dimension rounded up to one that has a
// kernel, and the rest is zero. Exponents are base 2: `scale` is log2(e) / sqrt(d).
#pragma once
#include "common.h"
#include "tensor.h"

// Positions per tile, and query rows per tile: a query group, padded.
constexpr u32 ITEMS = 64, QUERIES = 16;
// Bytes of dynamic shared memory of `attend`: two tiles each of keys and of values, with rows PITCH elements apart.
#define ATTEND_BYTES(D) (2 * 2 * 64 * (D + 8) * 2)

// The `total` positions that one KV head attends, in ascending order: `sinks` positions from `first` on, then those of
// a list, then those from `window_at` on.
struct Attended {
    u32 first, sinks, listed, window_at, total;
    const u32* list;

    DEVICE u32 position(u32 i) const {
        if (i < sinks) return first + i;
        i -= sinks;
        return i < listed ? list[i] : window_at + (i - listed);
    }
};

// Reads which positions a KV head attends. spans `[b,4]`: first, sinks, window_at, end of the window. lists
// `[b,g,most]`, listed `[b,g]`; if listed is null, all positions between sinks and window are attended.
DEVICE Attended attended(const u32* spans, const u32* lists, const u32* listed, u32 most) {
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    const u32* span = spans + 4 * blockIdx.z;
    Attended out;
    out.first = span[0], out.sinks = span[1], out.window_at = span[2];
    if (!listed) out.window_at = out.first + out.sinks;
    out.listed = listed ? smaller(listed[at], most) : 0;
    out.list = lists + (u64)at * most;
    out.total = out.sinks + out.listed + span[3] - out.window_at;
    return out;
}

// Returns this block's share of `total` items; shares are whole tiles, except for the last.
DEVICE void part_of(u32 total, u32& start, u32& end) {
    u32 tiles = (total + ITEMS - 1) / ITEMS, each = (tiles + gridDim.x - 1) / gridDim.x;
    start = smaller(blockIdx.x * each * ITEMS, total);
    end = smaller(start + each * ITEMS, total);
}

// A warp's running result. Thread 4 g + t holds query rows g and g + 8, and channels 2 t and 2 t + 1 of every eight.
template <u32 D>
struct Running {
    float most[2], sum[2], out[D / 8][4];
};

// Elements from one row of a tile to the next in shared memory. In 16-byte pieces this is an odd number, so that the
// eight rows that ldmatrix reads at once lie in different banks.
template <u32 D>
constexpr u32 PITCH = D + 8;

// Scores a warp's 16 items from `item_at` on, folds their exponentials into its running sums, scales its running outputs
// to them, and returns them as the weights of the values; items from `items` on get a weight of zero. A score is the
// product times `scale[row]`, plus `offset[row]`. A score of NaN or infinity makes the sum and the outputs NaN.
template <bool BFLOAT, u32 D>
DEVICE void score_items(u32 (&weights)[4], Running<D>& run, const u32 (&q)[D / 16][4], const u16* k, u32 item_at,
                        u32 items, const float (&scale)[2], const float (&offset)[2]) {
    float scores[2][4] = {};
    u32 row = item_at + lane() % 8 + lane() / 16 * 8;
UNROLL
    for (u32 step = 0; step < D / 16; step++) {
        u32 b[4];
        load_matrices(b, k + row * PITCH<D> + step * 16 + lane() / 8 % 2 * 8);
        multiply_add<BFLOAT>(scores[0], q[step], b[0], b[1]);
        multiply_add<BFLOAT>(scores[1], q[step], b[2], b[3]);
    }
    float p[2][4];
UNROLL
    for (u32 r = 0; r < 2; r++) {
        float most = run.most[r];
UNROLL
        for (u32 j = 0; j < 4; j++) {
            u32 item = item_at + j / 2 * 8 + lane() % 4 * 2 + j % 2;
            float s = fmaf(scores[j / 2][r * 2 + j % 2], scale[r], offset[r]);
            p[r][j] = item < items ? s : minus_infinity();
            most = fmaxf(most, p[r][j]);
        }
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        float keep = exp2f(run.most[r] - most), sum = 0;
UNROLL
        for (u32 j = 0; j < 4; j++) {
            p[r][j] = exp2f(p[r][j] - most);
            sum += p[r][j];
        }
        run.most[r] = most;
        run.sum[r] = run.sum[r] * keep + sum;
UNROLL
        for (u32 n = 0; n < D / 8; n++) {
            run.out[n][r * 2] *= keep;
            run.out[n][r * 2 + 1] *= keep;
        }
    }
    weights[0] = pack<BFLOAT>(p[0][0], p[0][1]), weights[1] = pack<BFLOAT>(p[1][0], p[1][1]);
    weights[2] = pack<BFLOAT>(p[0][2], p[0][3]), weights[3] = pack<BFLOAT>(p[1][2], p[1][3]);
}

// Adds the values of a warp's 16 items from `item_at` on to its running outputs, by their weights.
template <bool BFLOAT, u32 D>
DEVICE void add_values(Running<D>& run, const u32 (&weights)[4], const u16* v, u32 item_at) {
    u32 row = item_at + lane() % 16;
UNROLL
    for (u32 n = 0; n < D / 16; n++) {
        u32 b[4];
        load_matrices_transposed(b, v + row * PITCH<D> + n * 16 + lane() / 16 * 8);
        multiply_add<BFLOAT>(run.out[2 * n], weights, b[0], b[1]);
        multiply_add<BFLOAT>(run.out[2 * n + 1], weights, b[2], b[3]);
    }
}

// Merges the four warps' results in shared memory and stores them for `merge_parts`: outs `[b,g,parts,r,D]`, sums
// `[b,g,parts,r,2]` (the maximum, which is minus infinity in a part without positions and LOWEST or more in any other,
// and the sum of the exponentials relative to it).
template <u32 D>
DEVICE void leave_part(Running<D>& run, float* shared, float* outs, float* sums, u32 r, bool has_positions) {
    float* parts = shared;
    float* outputs = shared + 4 * QUERIES * 2;
UNROLL
    for (u32 i = 0; i < 2; i++) {
        u32 row = warp() * QUERIES + lane() / 4 + i * 8;
        float sum = run.sum[i];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (lane() % 4 == 0) parts[2 * row] = run.most[i], parts[2 * row + 1] = sum;
UNROLL
        for (u32 n = 0; n < D / 8; n++) {
            outputs[row * D + n * 8 + lane() % 4 * 2] = run.out[n][i * 2];
            outputs[row * D + n * 8 + lane() % 4 * 2 + 1] = run.out[n][i * 2 + 1];
        }
    }
    __syncthreads();
    u64 to = ((u64)(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * r;
    for (u32 i = threadIdx.x; i < r * D; i += 128) {
        u32 row = i / D;
        float top = LOWEST, sum = 0, out = 0;
        for (u32 w = 0; w < 4; w++) top = fmaxf(top, parts[2 * (w * QUERIES + row)]);
        for (u32 w = 0; w < 4; w++) {
            const float* part = parts + 2 * (w * QUERIES + row);
            float weight = exp2f(part[0] - top);
            sum += weight * part[1];
            out += weight * outputs[(w * QUERIES + row) * D + i % D];
        }
        outs[to * D + i] = out;
        if (i % D == 0) {
            sums[2 * (to + row)] = has_positions ? top : minus_infinity();
            sums[2 * (to + row) + 1] = sum;
        }
    }
}

// Attends a block's share of the positions with 128 threads. `Store` fills tiles of K and V, `[ITEMS,PITCH]` each, and
// tells, per channel, how its stored keys relate to the true ones: k = center + weight * stored. Two tiles of each have
// a place, which is filled again as soon as all warps are done with it, so that the memory is never idle.
template <class Store, u32 D>
DEVICE void attend(const Store& store, u16* shared, const float* queries, const u32* spans, const u32* lists,
                   const u32* listed, float* outs, float* sums, float scale, u32 r, u32 most) {
    constexpr u32 TILE_OF = ITEMS * PITCH<D>;
    static_assert(ATTEND_BYTES(D) == 4 * TILE_OF * sizeof(u16), "two tiles of both");
    static_assert(ATTEND_BYTES(D) >= 4 * QUERIES * (D + 2) * sizeof(float), "the results of four warps");
    Attended span = attended(spans, lists, listed, most);
    u32 start, end;
    part_of(span.total, start, end);
    queries += (u64)(blockIdx.z * gridDim.y + blockIdx.y) * r * D;

    // Weights may have any size, so the weighted queries are scaled to magnitudes of at most one.
    float scales[2] = {scale, scale}, offsets[2] = {0, 0}, unit[2] = {1, 1};
    if (Store::CENTERED) {
UNROLL
        for (u32 i = 0; i < 2; i++) {
            u32 row = lane() / 4 + i * 8;
            float largest = 0, offset = 0;
            for (u32 c = lane() % 4; c < D && row < r; c += 4) {
                float v = queries[row * D + c];
                largest = fmaxf(largest, fabsf(v * store.weight(c)));
                offset = fmaf(v, store.center(c), offset);
            }
UNROLL
            for (u32 step = 1; step < 4; step *= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
                offset += __shfl_xor_sync(ALL_LANES, offset, step);
            }
            if (largest > 0) unit[i] = 1 / largest;
            scales[i] = largest * scale;
            offsets[i] = offset * scale;
        }
    }
    u32 q[D / 16][4];
UNROLL
    for (u32 step = 0; step < D / 16; step++) {
UNROLL
        for (u32 i = 0; i < 4; i++) {
            u32 row = lane() / 4 + i % 2 * 8, c = step * 16 + i / 2 * 8 + lane() % 4 * 2;
            float low = row < r ? queries[row * D + c] : 0.0f, high = row < r ? queries[row * D + c + 1] : 0.0f;
            if (Store::CENTERED) {
                low *= store.weight(c) * unit[i % 2];
                high *= store.weight(c + 1) * unit[i % 2];
            }
            q[step][i] = pack<Store::BFLOAT>(low, high);
        }
    }
    Running<D> run;
UNROLL
    for (u32 i = 0; i < 2; i++) run.most[i] = LOWEST, run.sum[i] = 0;
UNROLL
    for (u32 n = 0; n < D / 8; n++) {
UNROLL
        for (u32 i = 0; i < 4; i++) run.out[n][i] = 0;
    }
    u16* const values = shared + 2 * TILE_OF;
    if (start < end) store.fill_keys(shared, span, start, end);
    end_of_copies();
    if (start < end) store.fill_values(values, span, start, end);
    end_of_copies();
    if (start + ITEMS < end) store.fill_keys(shared + TILE_OF, span, start + ITEMS, end);
    end_of_copies();
    u32 stage = 0;
    for (u32 tile = start; tile < end; tile += ITEMS, stage ^= 1) {
        // The keys have arrived for all threads, and all are done with the values of the tile before.
        wait_for_copies<2>();
        __syncthreads();
        if (tile + ITEMS < end) store.fill_values(values + (stage ^ 1) * TILE_OF, span, tile + ITEMS, end);
        end_of_copies();
        u32 weights[4];
        score_items<Store::BFLOAT, D>(weights, run, q, shared + stage * TILE_OF, warp() * 16,
                                      smaller(ITEMS, end - tile), scales, offsets);
        // The values have arrived, and all are done with the keys.
        wait_for_copies<2>();
        __syncthreads();
        if (tile + 2 * ITEMS < end) store.fill_keys(shared + stage * TILE_OF, span, tile + 2 * ITEMS, end);
        end_of_copies();
        add_values<Store::BFLOAT, D>(run, weights, values + stage * TILE_OF, warp() * 16);
    }
    wait_for_copies<0>();
    __syncthreads();
    leave_part<D>(run, (float*)shared, outs, sums, r, start < end);
}
