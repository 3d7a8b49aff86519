// Whitened product quantisation: `choose` of src/method/wpq/choose.rs. blockIdx.y is the KV head, blockIdx.z the
// sequence; r <= 16. Exponents are base 2: `scale` is log2(e) / sqrt(d). codes are those of encode_wpq.cu, spans
// `[b,4]` and budgets `[b]` those of begin_step.
//
// A step passes over the codes of the first stage twice: once for the denominators of the softmax, and once for the
// probabilities. Both passes compute the estimates, because computing them again from a code of a few bytes is cheaper
// than storing them for each query head. best.cu chooses. With two stages, it first chooses the keys to refine, whose
// estimates from both stages are computed once and kept, and then chooses among these keys.
//
// - word_tables: one block per query head applies the query's map and then computes the products with all words.
// - static_scores.cu: the exact scores of the static set.
// - path_scores: the scores of the mean at every candidate, if codes describe the keys around the path of their mean;
//   arcs and turns are those of encode_wpq.cu.
// - word_parts: per block of SCAN candidates, the largest estimate and the sum of the exponentials.
// - word_keys: the denominators from all parts, and the probabilities summed over the query heads.
// - refined_parts, refined_keys: the same for the refined keys, whose first estimates are removed from the
//   denominators.
//
// tables `[b,g,ceil(r/4),stages,m,WORDS,4]`: the entries of four query heads lie side by side, so that one read of
// shared memory serves all four. With 16 words, the entries are 16-bit integers of at most 255: one 64-bit addition
// adds four of them, and the entries of a table lie in different banks. With 256 words, the entries are f32. lines
// `[b,h,LINE]` turn sums of entries into scores: they hold the score of the mean key, then per stage the sum of the
// least entries and the step.
#include "common.h"
#include "scan.h"
#include "tensor.h"

constexpr u32 LINE = 5;
// Query heads whose entries lie side by side; the most groups of 16 words in all stages; keys refined per key of the
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

// Loads a code of 1, 2, 4 or 8 bytes.
DEVICE u64 load_code(const u8* codes, u64 at, u32 width) {
    if (width == 8) return ((const u64*)codes)[at];
    if (width == 4) return ((const u32*)codes)[at];
    return width == 2 ? ((const u16*)codes)[at] : codes[at];
}

// ---- tables ----

// Computes the projected query y `[channels + 1]` in shared memory; its last element is the product with the mean.
// query_maps `[g,channels,d]` in half precision, means `[g,d]`. Each warp has a channel.
DEVICE void project_query(float* y, const float* query, const u16* query_maps, const float* means, float scale,
                          u32 channels, u32 d) {
    const u16* map = query_maps + (u64)blockIdx.y * channels * d;
    const float* mean = means + blockIdx.y * d;
    for (u32 i = warp(); i <= channels; i += 8) {
        float sum = 0;
        for (u32 c = lane(); c < d; c += 32) {
            float factor = i < channels ? widen<false>(map[i * d + c]) : mean[c];
            sum = fmaf(factor, query[c], sum);
        }
        sum = warp_sum(sum);
        if (lane() == 0) y[i] = sum * scale;
    }
}

// Returns the product with y of word `i % WORDS` of group `i / WORDS`, where groups are counted over all stages.
template <u32 WORDS>
DEVICE float word_product(const u16* words, const float* y, u32 i, u32 groups, u32 dim) {
    u32 group = i / WORDS;
    const u16* word = words + ((u64)blockIdx.y * groups + group) * dim * WORDS + i % WORDS;
    float sum = 0;
    for (u32 e = 0; e < dim; e++) sum = fmaf(widen<false>(word[e * WORDS]), y[e], sum);
    return sum;
}

// Rounds the products of the words, 16 per group and one per thread, to multiples of a step above the least product of
// their group. In each stage, the step is 1/255 of the range of the widest group. Gives each thread its entry, and
// fills the line of the query head.
DEVICE u32 rounded_entry(float product, float* line, u32 stages, u32 groups) {
    SHARED(float, leasts, SMALL_GROUPS);
    SHARED(float, ranges, SMALL_GROUPS);
    float least = product, largest = product;
    for (u32 step = 8; step > 0; step /= 2) {
        least = fminf(least, __shfl_xor_sync(ALL_LANES, least, step));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    }
    u32 group = threadIdx.x / 16, stage = group / groups;
    if (threadIdx.x % 16 == 0) leasts[group] = least, ranges[group] = largest - least;
    __syncthreads();
    if (stage >= stages) return 0;
    float range = 0, sum = 0;
    for (u32 j = stage * groups; j < (stage + 1) * groups; j++) range = fmaxf(range, ranges[j]), sum += leasts[j];
    float step = range / 255.0f, inverse = step > 0 ? 1.0f / step : 0.0f;
    if (threadIdx.x == stage * groups * 16) line[1 + 2 * stage] = sum, line[2 + 2 * stage] = step;
    float number = (product - least) * inverse;
    return number < 255 ? (u32)roundf(number) : 255;
}

// Clears both choices' histograms, and sets the number of keys to refine, wants `[b]`, with the span of their list,
// item_spans `[b,4]`.
DEVICE void begin_choice(const u32* spans, const u32* budgets, u32* histograms, u32* refined_histograms, u32* wants,
                         u32* item_spans) {
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < 3 * BINS; i += gridDim.x * 256) {
        histograms[(u64)at * 3 * BINS + i] = 0;
        if (refined_histograms) refined_histograms[(u64)at * 3 * BINS + i] = 0;
    }
    if (blockIdx.x + blockIdx.y + threadIdx.x > 0 || !refined_histograms) return;
    const u32* span = spans + 4 * blockIdx.z;
    u32 want = REFINED * budgets[blockIdx.z], count = smaller(want, span[2] - span[0] - span[1]);
    wants[blockIdx.z] = want;
    item_spans += 4 * blockIdx.z;
    item_spans[0] = item_spans[1] = 0, item_spans[2] = item_spans[3] = count;
}

// Builds the tables of a query head, blockIdx.x, for queries `[b,h,d]`. The last four parameters but one are for
// begin_choice; refined_histograms, wants and item_spans are null with one stage.
#define TABLE_PARAMETERS                                                                                        \
    const float *queries, const u16 *query_maps, const float *means, const u16 *words, const u32 *spans,        \
        const u32 *budgets, void *tables, float *lines, u32 *histograms, OPTIONAL u32 *refined_histograms,      \
        OPTIONAL u32 *wants, OPTIONAL u32 *item_spans, float scale, u32 stages, u32 groups, u32 dim, u32 d
template <class Tables>
DEVICE void build_tables(TABLE_PARAMETERS) {
    constexpr u32 WORDS = Tables::WORDS;
    SHARED(float, y, 128 + 1);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, head = at * gridDim.x + blockIdx.x, channels = groups * dim;
    u32 all = stages * groups, quads = (gridDim.x + QUAD - 1) / QUAD;
    begin_choice(spans, budgets, histograms, refined_histograms, wants, item_spans);
    project_query(y, queries + (u64)head * d, query_maps, means, scale, channels, d);
    __syncthreads();
    lines += (u64)head * LINE;
    if (threadIdx.x == 0) lines[0] = y[channels];
    u64 to = ((u64)at * quads + blockIdx.x / QUAD) * all * WORDS * QUAD + blockIdx.x % QUAD;
    if constexpr (WORDS == 16) {
        u32 i = threadIdx.x;
        bool there = i < all * WORDS;
        float product = there ? word_product<WORDS>(words, y + i / WORDS % groups * dim, i, all, dim) : 0.0f;
        u32 entry = rounded_entry(product, lines, stages, groups);
        if (there) ((u16*)tables)[to + i * QUAD] = (u16)entry;
    } else {
        for (u32 i = threadIdx.x; i < all * WORDS; i += 256) {
            float product = word_product<WORDS>(words, y + i / WORDS % groups * dim, i, all, dim);
            ((float*)tables)[to + i * QUAD] = product;
        }
        if (threadIdx.x < stages) lines[1 + 2 * threadIdx.x] = 0, lines[2 + 2 * threadIdx.x] = 1;
    }
}

#define TABLE_ARGUMENTS                                                                                         \
    queries, query_maps, means, words, spans, budgets, tables, lines, histograms, refined_histograms, wants,    \
        item_spans, scale, stages, groups, dim, d
KERNEL(256, 2, word_tables_16, TABLE_PARAMETERS) { build_tables<RoundedTables>(TABLE_ARGUMENTS); }
KERNEL(256, 2, word_tables_256, TABLE_PARAMETERS) { build_tables<ExactTables>(TABLE_ARGUMENTS); }

// Scores the mean's path at every candidate for queries `[b,h,d]`: paths `[b,g,ceil(r/4),capacity,4]`, whose last axis has
// the scores of four query heads side by side, and zeros beyond the last. A block covers PATH_ARCS arcs, and a thread one
// position.
constexpr u32 PATH_ARCS = 256 / ARC;
KERNEL(256, 2, path_scores, const float* queries, const float* arcs, const float* turns, const u32* spans, float* paths,
       float scale, u32 r, u32 d, u32 capacity) {
    SHARED(float, turned, PATH_ARCS * QUAD * KEY_CHANNELS);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * 256, half = d / 2;
    const u32* span = spans + 4 * blockIdx.z;
    u32 from = span[0] + span[1], to = span[2], p = start + threadIdx.x, quads = (r + QUAD - 1) / QUAD;
    if (start >= to || start + 256 <= from) return;
    const float *arc = arcs + (u64)blockIdx.y * d * ARC + threadIdx.x % ARC, *own = turned + threadIdx.x / ARC * QUAD * d;
    for (u32 first = 0; first < r; first += QUAD) {
        u32 count = smaller(QUAD, r - first);
        __syncthreads();
        // The queries, turned back by the start of each arc.
        for (u32 i = threadIdx.x; i < PATH_ARCS * count * half; i += 256) {
            u32 c = i % half, e = i / half % count, a = i / half / count;
            const float *query = queries + ((u64)at * r + first + e) * d, *turn = turns + (u64)(start / ARC + a) * d;
            float low = query[c] * scale, high = query[half + c] * scale, cosine = turn[c], sine = turn[half + c];
            float* result = turned + (a * QUAD + e) * d;
            result[c] = low * cosine + high * sine, result[half + c] = high * cosine - low * sine;
        }
        __syncthreads();
        float sums[QUAD] = {};
        for (u32 c = 0; c < d; c++) {
            float mean = arc[c * ARC];
UNROLL
            for (u32 e = 0; e < QUAD; e++) {
                if (e < count) sums[e] = fmaf(own[e * d + c], mean, sums[e]);
            }
        }
        if (p < from || p >= to) continue;
        ((float4*)paths)[((u64)at * quads + first / QUAD) * capacity + p] = {sums[0], sums[1], sums[2], sums[3]};
    }
}

// Returns the scores of the mean's path for four query heads, from `first` on, `[capacity]`; null without a path.
DEVICE const float4* path_of(const float* paths, u32 first, u32 r, u32 capacity) {
    u64 quad = (u64)(blockIdx.z * gridDim.y + blockIdx.y) * ((r + QUAD - 1) / QUAD) + first / QUAD;
    return paths ? (const float4*)paths + quad * capacity : nullptr;
}

// Adds the scores of the mean's path at a position to the scores of four query heads.
DEVICE void add_path(float (&scores)[QUAD], const float4* path, u32 p) {
    if (!path) return;
    float4 own = path[p];
    scores[0] += own.x, scores[1] += own.y, scores[2] += own.z, scores[3] += own.w;
}

// ---- scans ----

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

// Estimates the scores of a block's candidates by the first stage. From part 1 on, parts `[b,h,1 + blocks,2]` get the
// largest score of each block and the sum of the exponentials relative to it.
#define SCAN_PARAMETERS(PARTS)                                                                                  \
    const u8 *codes, const void *tables, const float *lines, OPTIONAL const float *paths, const u32 *spans,     \
        PARTS, u32 stages, u32 groups, u32 width, u32 r, u32 capacity
#define SUM_PARAMETERS SCAN_PARAMETERS(float *parts)
template <class Tables>
DEVICE void sum_words(SUM_PARAMETERS) {
    SHARED(typename Tables::Four, table, Tables::MOST);
    SHARED(float, line, 16 * LINE);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * SCAN;
    const u32* span = spans + 4 * blockIdx.z;
    u32 from = span[0] + span[1], to = span[2], stride = (1 + gridDim.x) * 2;
    parts += (u64)at * r * stride + 2 * (1 + blockIdx.x);
    if (start >= to || start + SCAN <= from) {
        if (threadIdx.x < r) parts[threadIdx.x * stride] = minus_infinity(), parts[threadIdx.x * stride + 1] = 0;
        return;
    }
    load_lines(line, lines, r);
    u64 code[8];
UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 p = start + i * 256 + threadIdx.x;
        code[i] = p >= from && p < to ? load_code(codes, (u64)at * capacity + p, width) : 0;
    }
    for (u32 first = 0; first < r; first += QUAD) {
        load_tables<Tables>(table, tables, first / QUAD, (r + QUAD - 1) / QUAD, groups * Tables::WORDS,
                            stages * groups * Tables::WORDS);
        const float4* path = path_of(paths, first, r, capacity);
        float held[8][QUAD], top, sum;
UNROLL
        for (u32 i = 0; i < 8; i++) {
            u32 p = start + i * 256 + threadIdx.x;
            bool there = p >= from && p < to;
UNROLL
            for (u32 e = 0; e < QUAD; e++) held[i][e] = there ? line[(first + e) * LINE] : minus_infinity();
            if (there) add_path(held[i], path, p);
            add_stage<Tables>(held[i], table, code[i], groups, line + first * LINE, 0);
        }
        block_softmax(held, top, sum);
        u32 a = first + threadIdx.x;
        if (threadIdx.x < QUAD && a < r) parts[a * stride] = top, parts[a * stride + 1] = sum;
    }
}

KERNEL(256, 3, word_parts_16, SUM_PARAMETERS) {
    sum_words<RoundedTables>(codes, tables, lines, paths, spans, parts, stages, groups, width, r, capacity);
}
KERNEL(256, 2, word_parts_256, SUM_PARAMETERS) {
    sum_words<ExactTables>(codes, tables, lines, paths, spans, parts, stages, groups, width, r, capacity);
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

// Computes the sort keys of the candidates, from the sum of their probabilities over the query heads, and the first
// histogram. totals `[b,h,2]` gets the denominator of each query head: the largest score, and the sum relative to it.
#define RANK_PARAMETERS SCAN_PARAMETERS(const float *parts), float *totals, u32 *keys, u32 *histograms
template <class Tables>
DEVICE void rank_words(RANK_PARAMETERS) {
    SHARED(typename Tables::Four, table, Tables::MOST);
    SHARED(float, line, 16 * LINE);
    SHARED(float, tops, 16);
    SHARED(float, inverses, 16);
    SHARED(u32, own, BINS);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * SCAN;
    const u32* span = spans + 4 * blockIdx.z;
    u32 from = span[0] + span[1], to = span[2], n_parts = 1 + gridDim.x;
    if (blockIdx.x > 0 && (start >= to || start + SCAN <= from)) return;
    load_lines(line, lines, r);
    for (u32 i = threadIdx.x; i < BINS; i += 256) own[i] = 0;
    for (u32 a = warp(); a < 16; a += 8) {
        float top = 0, sum = 0;
        if (a < r) join_parts(parts + ((u64)at * r + a) * n_parts * 2, n_parts, 2, top, sum);
        if (lane() > 0) continue;
        tops[a] = top, inverses[a] = a < r ? 1.0f / sum : 0.0f;
        if (a < r && blockIdx.x == 0) totals[((u64)at * r + a) * 2] = top, totals[((u64)at * r + a) * 2 + 1] = sum;
    }
    u64 code[8];
    float mass[8] = {};
UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 p = start + i * 256 + threadIdx.x;
        code[i] = p >= from && p < to ? load_code(codes, (u64)at * capacity + p, width) : 0;
    }
    for (u32 first = 0; first < r; first += QUAD) {
        load_tables<Tables>(table, tables, first / QUAD, (r + QUAD - 1) / QUAD, groups * Tables::WORDS,
                            stages * groups * Tables::WORDS);
        const float4* path = path_of(paths, first, r, capacity);
UNROLL
        for (u32 i = 0; i < 8; i++) {
            u32 p = start + i * 256 + threadIdx.x;
            float scores[QUAD];
UNROLL
            for (u32 e = 0; e < QUAD; e++) scores[e] = line[(first + e) * LINE];
            if (p >= from && p < to) add_path(scores, path, p);
            add_stage<Tables>(scores, table, code[i], groups, line + first * LINE, 0);
UNROLL
            for (u32 e = 0; e < QUAD; e++) mass[i] += exp2f(scores[e] - tops[first + e]) * inverses[first + e];
        }
    }
UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 p = start + i * 256 + threadIdx.x, key = order_of(mass[i]);
        if (p < from || p >= to) continue;
        keys[(u64)at * capacity + p] = key;
        atomicAdd(&own[key >> 21], 1);
    }
    add_histogram(own, histograms + (u64)at * 3 * BINS);
}

#define RANK_ARGUMENTS                                                                                          \
    codes, tables, lines, paths, spans, parts, stages, groups, width, r, capacity, totals, keys, histograms
KERNEL(256, 3, word_keys_16, RANK_PARAMETERS) { rank_words<RoundedTables>(RANK_ARGUMENTS); }
KERNEL(256, 2, word_keys_256, RANK_PARAMETERS) { rank_words<ExactTables>(RANK_ARGUMENTS); }

// ---- refinement ----

// Scores by both stages the keys in the lists items `[b,g,room]`, of which there are listed `[b,g]`: scores
// `[b,h,room]`. A block covers SCAN of them. parts `[b,h,blocks,3]`: the largest of these scores, the sum of the
// exponentials relative to it, and the sum of the exponentials of the first estimates relative to the largest score in
// totals. A code has at most 4 bytes.
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
    u32 quads = (r + QUAD - 1) / QUAD, all = 2 * groups * Tables::WORDS, stride = gridDim.x * 3;
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
        u64 p = (u64)at * capacity + item[i];
        code[i] = j < n ? load_code(codes, p, width) | load_code(codes, second + p, width) << 32 : 0;
    }
    for (u32 first = 0; first < r; first += QUAD) {
        load_tables<Tables>(table, tables, first / QUAD, quads, all, all);
        const float4* path = path_of(paths, first, r, capacity);
        float held[8][QUAD], gone[QUAD] = {}, top, sum;
UNROLL
        for (u32 i = 0; i < 8; i++) {
            u32 j = start + i * 256 + threadIdx.x;
UNROLL
            for (u32 e = 0; e < QUAD; e++) held[i][e] = j < n ? line[(first + e) * LINE] : minus_infinity();
            if (j < n) add_path(held[i], path, item[i]);
            add_stage<Tables>(held[i], table, code[i] & 0xffffffffu, groups, line + first * LINE, 0);
UNROLL
            for (u32 e = 0; e < QUAD; e++) {
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
KERNEL(256, 2, refined_parts_16, REFINE_PARAMETERS) { refine<RoundedTables>(REFINE_ARGUMENTS); }
KERNEL(256, 2, refined_parts_256, REFINE_PARAMETERS) { refine<ExactTables>(REFINE_ARGUMENTS); }

// Computes the sort keys of the refined keys, keys `[b,g,room]`, from the sum of their probabilities over the query
// heads, and the first histogram.
KERNEL(256, 2, refined_keys, const float* scores, const float* totals, const float* parts, const u32* item_spans,
       u32* keys, u32* histograms, u32 r, u32 room) {
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
