// The second stage of whitened product quantisation: `Scratch::second_stage` of src/method/wpq/choose.rs. Grid and
// exponents are those of select_wpq.cu.
#include "common.h"
#include "scan.h"
#include "wpq.h"

// Scores by both stages the keys in the lists items `[b,g,room]`, of which there are listed `[b,g]`: scores
// `[b,h,room]`. A block covers SCAN of them. parts `[b,h,blocks,3]`: the largest of these scores, the sum of the
// exponentials relative to it, and the sum of the exponentials of the first estimates relative to the largest score in
// totals.
#define REFINE_PARAMETERS                                                                                       \
    const u8 *codes, const void *tables, const float *lines, OPTIONAL const float *paths, const float *totals,  \
        const u32 *items, const u32 *listed, float *scores, float *parts, u32 groups, u32 width, u32 r, u32 room,   \
        u32 capacity
template <class Tables>
DEVICE void refine(REFINE_PARAMETERS) {
    SHARED(typename Tables::Four, table, Tables::MOST);
    SHARED(float, line, 16 * LINE);
    SHARED(float, removed, QUAD * 8);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * SCAN, n = smaller(listed[at], room);
    u32 quads = (r + QUAD - 1) / QUAD, all = STAGES * groups * Tables::WORDS, stride = gridDim.x * 3;
    parts += (u64)at * r * stride + 3 * blockIdx.x;
    if (start >= n) {
        if (threadIdx.x >= r) return;
        float* part = parts + threadIdx.x * stride;
        part[0] = minus_infinity(), part[1] = part[2] = 0;
        return;
    }
    load_lines(line, lines, r);
    u64 code[8], second = (u64)gridDim.y * gridDim.z * capacity;
    u32 item[8];
UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 j = start + i * 256 + threadIdx.x;
        item[i] = j < n ? items[(u64)at * room + j] : 0;
    }
UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 j = start + i * 256 + threadIdx.x;
        u64 p = (u64)at * capacity + item[i];
        code[i] = j < n ? load_code(codes, p, width) | load_code(codes, second + p, width) << 32 : 0;
    }
    for (u32 first = 0; first < r; first += QUAD) {
        load_tables<Tables>(table, tables, first / QUAD, quads, all, all);
        const float4* path = path_of(paths, first, r, capacity);
        float held[8][QUAD], gone[QUAD] = {}, top, sum;
        begin_scores(held, line + first * LINE, path, item);
UNROLL
        for (u32 i = 0; i < 8; i++) {
            u32 j = start + i * 256 + threadIdx.x;
            add_stage<Tables>(held[i], table, code[i] & 0xffffffffu, groups, line + first * LINE, 0);
UNROLL
            for (u32 e = 0; e < QUAD; e++) {
                if (j >= n) held[i][e] = minus_infinity();
                u32 a = first + e;
                if (a < r) gone[e] += exp2f(held[i][e] - totals[((u64)at * r + a) * 2]);
            }
            add_stage<Tables>(held[i], table, code[i] >> 32, groups, line + first * LINE, 1);
UNROLL
            for (u32 e = 0; e < QUAD; e++) {
                if (j < n && first + e < r) scores[((u64)at * r + first + e) * room + j] = held[i][e];
            }
        }
UNROLL
        for (u32 e = 0; e < QUAD; e++) {
            float own = warp_sum(gone[e]);
            if (lane() == 0) removed[e * 8 + warp()] = own;
        }
        // Its barriers make the sums visible to all threads.
        block_softmax(held, top, sum);
        u32 a = first + threadIdx.x;
        if (threadIdx.x >= QUAD || a >= r) continue;
        float* part = parts + a * stride;
        part[0] = top, part[1] = sum, part[2] = 0;
        for (u32 i = 0; i < 8; i++) part[2] += removed[threadIdx.x * 8 + i];
    }
}

#define REFINE_ARGUMENTS                                                                                        \
    codes, tables, lines, paths, totals, items, listed, scores, parts, groups, width, r, room, capacity
KERNEL(256, 2, refined_parts_16, REFINE_PARAMETERS) { wait_for_earlier(); refine<RoundedTables>(REFINE_ARGUMENTS); }
KERNEL(256, 2, refined_parts_256, REFINE_PARAMETERS) { wait_for_earlier(); refine<ExactTables>(REFINE_ARGUMENTS); }

// Computes the sort keys of the refined keys, keys `[b,g,room]`, from the sum of their probabilities over the query
// heads, and the first histogram.
KERNEL(256, 2, refined_keys, const float* scores, const float* totals, const float* parts, const u32* item_spans,
       u32* keys, u32* histograms, u32 r, u32 room) {
    wait_for_earlier();
    SHARED(float, tops, 16);
    SHARED(float, inverses, 16);
    SHARED(u32, own, BINS);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * SCAN, n = item_spans[4 * blockIdx.z + 2];
    if (start >= n) return;
    for (u32 i = threadIdx.x; i < BINS; i += 256) own[i] = 0;
    for (u32 a = warp(); a < r; a += 8) {
        const float *mine = parts + ((u64)at * r + a) * gridDim.x * 3, *total = totals + ((u64)at * r + a) * 2;
        float top, sum, gone = 0;
        join_parts(mine, gridDim.x, 3, top, sum);
        for (u32 i = lane(); i < gridDim.x; i += 32) gone += mine[3 * i + 2];
        float left = fmaxf(total[1] - warp_sum(gone), 0.0f), largest = fmaxf(top, total[0]);
        sum = left * exp2f(total[0] - largest) + sum * exp2f(top - largest);
        if (lane() == 0) tops[a] = largest, inverses[a] = 1.0f / sum;
    }
    __syncthreads();
    scores += (u64)at * r * room;
    for (u32 i = threadIdx.x; i < smaller(SCAN, n - start); i += 256) {
        float mass = 0;
        for (u32 a = 0; a < r; a++) mass += exp2f(scores[(u64)a * room + start + i] - tops[a]) * inverses[a];
        u32 key = order_of(mass);
        keys[(u64)at * room + start + i] = key;
        atomicAdd(&own[key >> 21], 1);
    }
    add_histogram(own, histograms + (u64)at * 3 * BINS);
}
