// What the kernels of wpq share: the words' tables of a step, the scores that they give, and the softmax over these.
//
// tables `[b,g,ceil(r/4),STAGES,m,WORDS,4]`: the entries of four query heads lie side by side, so that one read of
// shared memory serves all four. With 16 words, the entries are 16-bit integers of at most 255: one 64-bit addition
// adds four of them, and the entries of a table lie in different banks. With 256 words, the entries are f32. lines
// `[b,h,LINE]` turn sums of entries into scores: they hold the score of the mean key, then per stage the sum of the
// least entries and the step.
#pragma once
#include "common.h"

// Positions of an arc: `ARC` of src/method/wpq/path.rs. The most channels of a key, and of all groups of a stage.
constexpr u32 ARC = 64, KEY_CHANNELS = 128;
// Stages of a code; numbers that turn sums of entries into a score.
constexpr u32 STAGES = 2, LINE = 1 + 2 * STAGES;
// Query heads whose entries lie side by side; the most groups of 16 words in both stages; keys refined per key of the
// budget, as in src/method/wpq/choose.rs.
constexpr u32 QUAD = 4, SMALL_GROUPS = 16, REFINED = 4;

// Tables of 16 words: a code has 4 bits per group.
struct RoundedTables {
    typedef u64 Four;
    static constexpr u32 WORDS = 16, MOST = SMALL_GROUPS * 16;

    static DEVICE void sums(float (&out)[QUAD], const u64* table, u64 code, u32 groups) {
        u64 sum = 0;
        for (u32 j = 0; j < groups; j++) sum += table[j * WORDS + (u32)(code >> (4 * j) & 15)];
UNROLL
        for (u32 e = 0; e < QUAD; e++) out[e] = (float)(u32)(sum >> (16 * e) & 0xffff);
    }
};

// Tables of 256 words: a byte per group.
struct ExactTables {
    typedef float4 Four;
    static constexpr u32 WORDS = 256, MOST = 8 * 256;

    static DEVICE void sums(float (&out)[QUAD], const float4* table, u64 code, u32 groups) {
        out[0] = out[1] = out[2] = out[3] = 0;
        for (u32 j = 0; j < groups; j++) {
            float4 entry = table[j * WORDS + (u32)(code >> (8 * j) & 255)];
            out[0] += entry.x, out[1] += entry.y, out[2] += entry.z, out[3] += entry.w;
        }
    }
};

// Loads a code of a stage, of 1, 2 or 4 bytes.
DEVICE u64 load_code(const u8* codes, u64 at, u32 width) {
    if (width == 4) return ((const u32*)codes)[at];
    return width == 2 ? ((const u16*)codes)[at] : codes[at];
}

// Returns the scores of the mean's path for four query heads, from `first` on, `[capacity]`; null without a path.
DEVICE const float4* path_of(const float* paths, u32 first, u32 r, u32 capacity) {
    u64 quad = (u64)(blockIdx.z * gridDim.y + blockIdx.y) * ((r + QUAD - 1) / QUAD) + first / QUAD;
    return paths ? (const float4*)paths + quad * capacity : nullptr;
}

// Starts the scores of four query heads at N positions: that of the mean key, in `line`, and those of its path. All
// positions are asked for before the first is used.
template <u32 N>
DEVICE void begin_scores(float (&scores)[N][QUAD], const float* line, const float4* path, const u32 (&positions)[N]) {
    float4 own[N] = {};
    if (path) {
UNROLL
        for (u32 i = 0; i < N; i++) own[i] = path[positions[i]];
    }
UNROLL
    for (u32 i = 0; i < N; i++) {
        scores[i][0] = line[0] + own[i].x, scores[i][1] = line[LINE] + own[i].y;
        scores[i][2] = line[2 * LINE] + own[i].z, scores[i][3] = line[3 * LINE] + own[i].w;
    }
}

// Copies the lines of r query heads to shared memory, with zeros for the other heads.
DEVICE void load_lines(float* to, const float* lines, u32 r) {
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    for (u32 i = threadIdx.x; i < 16 * LINE; i += 256) to[i] = i < r * LINE ? lines[(u64)at * r * LINE + i] : 0.0f;
}

// Copies the tables of four query heads to shared memory: the first `count` of the `all` entries.
template <class Tables>
DEVICE void load_tables(typename Tables::Four* to, const void* tables, u32 quad, u32 quads, u32 count, u32 all) {
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    const auto* from = (const typename Tables::Four*)tables + ((u64)at * quads + quad) * all;
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += 256) to[i] = from[i];
    __syncthreads();
}

// Adds the estimate of a stage to the scores of four query heads; `line` holds the lines of these heads.
template <class Tables>
DEVICE void add_stage(float (&scores)[QUAD], const typename Tables::Four* table, u64 code, u32 groups,
                      const float* line, u32 stage) {
    float sums[QUAD];
    Tables::sums(sums, table + stage * groups * Tables::WORDS, code, groups);
UNROLL
    for (u32 e = 0; e < QUAD; e++) {
        const float* own = line + e * LINE + 1 + 2 * stage;
        scores[e] += own[0] + own[1] * sums[e];
    }
}

// Computes, for each of four query heads, the largest of the scores that a block's threads hold and the sum of the
// exponentials relative to it; a score of minus infinity stands for none. Thread e gets both for head e.
DEVICE void block_softmax(const float (&held)[8][QUAD], float& top, float& sum) {
    SHARED(float, tops, QUAD * 8);
    SHARED(float, sums, QUAD * 8);
UNROLL
    for (u32 e = 0; e < QUAD; e++) {
        float own = minus_infinity();
UNROLL
        for (u32 i = 0; i < 8; i++) own = fmaxf(own, held[i][e]);
        for (u32 step = 16; step > 0; step /= 2) own = fmaxf(own, __shfl_xor_sync(ALL_LANES, own, step));
        if (lane() == 0) tops[e * 8 + warp()] = own;
    }
    __syncthreads();
UNROLL
    for (u32 e = 0; e < QUAD; e++) {
        float largest = minus_infinity(), own = 0;
        for (u32 i = 0; i < 8; i++) largest = fmaxf(largest, tops[e * 8 + i]);
UNROLL
        for (u32 i = 0; i < 8; i++) own += finite(largest) ? exp2f(held[i][e] - largest) : 0.0f;
        own = warp_sum(own);
        if (lane() == 0) sums[e * 8 + warp()] = own;
        if (threadIdx.x == e) top = largest;
    }
    __syncthreads();
    if (threadIdx.x >= QUAD) return;
    sum = 0;
    for (u32 i = 0; i < 8; i++) sum += sums[threadIdx.x * 8 + i];
}

// Computes, over a warp, the largest score and the sum of the exponentials from parts `[n,stride]`; every lane gets
// both.
DEVICE void join_parts(const float* parts, u32 n, u32 stride, float& top, float& sum) {
    top = minus_infinity(), sum = 0;
    for (u32 i = lane(); i < n; i += 32) top = fmaxf(top, parts[i * stride]);
    for (u32 step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    for (u32 i = lane(); i < n; i += 32) {
        if (finite(parts[i * stride])) sum += exp2f(parts[i * stride] - top) * parts[i * stride + 1];
    }
    sum = warp_sum(sum);
}
