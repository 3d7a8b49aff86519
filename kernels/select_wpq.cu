// Whitened product quantisation: `choose` of src/method/wpq/choose.rs. blockIdx.y is the KV head, blockIdx.z the
// sequence; r <= 16. Exponents are base 2: `scale` is log2(e) / sqrt(d). codes are those of encode_wpq.cu, spans
// `[b,4]` and budgets `[b]` those of begin_step.
//
// A step passes over the codes of the first stage twice: once for the denominators of the softmax, and once for the
// probabilities. Both passes compute the estimates, because computing them again from a code of a few bytes is cheaper
// than storing them for each query head. best.cu first chooses the keys to refine, whose estimates from both stages are
// computed once and kept, and then chooses among these keys.
//
// - word_tables: one block per query head applies the query's map and then computes the products with all words.
// - static_scores.cu: the exact scores of the static set.
// - path_wpq.cu: the scores of the mean at every candidate, if codes describe the keys around the path of their mean.
// - word_parts: per block of SCAN candidates, the largest estimate and the sum of the exponentials.
// - word_keys: the denominators from all parts, and the probabilities summed over the query heads.
// - refine_wpq.cu: the same for the refined keys, whose first estimates are removed from the denominators.
#include "common.h"
#include "scan.h"
#include "tensor.h"
#include "wpq.h"

// ---- tables ----

// Computes the projected query y `[channels + 1]` in shared memory; its last element is the product with the mean.
// query_maps `[g,channels,d]` in half precision, means `[g,d]`. Each warp has a channel.
DEVICE void project_query(float* y, const float* query, const u16* query_maps, const float* means, float scale,
                          u32 channels, u32 d) {
    const u16* map = query_maps + (u64)blockIdx.y * channels * d;
    const float* mean = means + blockIdx.y * d;
    float q[4], means_of[4], product = 0;
UNROLL
    for (u32 j = 0; j < 4; j++) {
        u32 c = smaller(lane() + 32 * j, d - 1);
        q[j] = lane() + 32 * j < d ? query[c] : 0.0f, means_of[j] = mean[c];
    }
    // Four channels at a time, of which all factors are asked for before the first is used.
    for (u32 first = warp(); first < channels; first += 32) {
        u16 factors[4][4];
UNROLL
        for (u32 n = 0; n < 4; n++) {
            const u16* row = map + smaller(first + 8 * n, channels - 1) * d;
UNROLL
            for (u32 j = 0; j < 4; j++) factors[n][j] = row[smaller(lane() + 32 * j, d - 1)];
        }
UNROLL
        for (u32 n = 0; n < 4; n++) {
            float sum = 0;
UNROLL
            for (u32 j = 0; j < 4; j++) sum = fmaf(widen<false>(factors[n][j]), q[j], sum);
            sum = warp_sum(sum);
            if (lane() == 0 && first + 8 * n < channels) y[first + 8 * n] = sum * scale;
        }
    }
    if (warp() > 0) return;
UNROLL
    for (u32 j = 0; j < 4; j++) product = fmaf(means_of[j], q[j], product);
    product = warp_sum(product);
    if (lane() == 0) y[channels] = product * scale;
}

// Returns the product with y of word `i % WORDS` of group `i / WORDS`, where groups are counted over both stages.
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
DEVICE u32 rounded_entry(float product, float* line, u32 groups) {
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
    if (stage >= STAGES) return 0;
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
        refined_histograms[(u64)at * 3 * BINS + i] = 0;
    }
    if (blockIdx.x + blockIdx.y + threadIdx.x > 0) return;
    const u32* span = spans + 4 * blockIdx.z;
    u32 want = REFINED * budgets[blockIdx.z], count = smaller(want, span[2] - span[0] - span[1]);
    wants[blockIdx.z] = want;
    item_spans += 4 * blockIdx.z;
    item_spans[0] = item_spans[1] = 0, item_spans[2] = item_spans[3] = count;
}

// Builds the tables of a query head, blockIdx.x, for queries `[b,h,d]`. The histograms, wants and item_spans are for
// begin_choice.
#define TABLE_PARAMETERS                                                                                        \
    const float *queries, const u16 *query_maps, const float *means, const u16 *words, const u32 *spans,        \
        const u32 *budgets, void *tables, float *lines, u32 *histograms, u32 *refined_histograms, u32 *wants,   \
        u32 *item_spans, float scale, u32 groups, u32 dim, u32 d
template <class Tables>
DEVICE void build_tables(TABLE_PARAMETERS) {
    constexpr u32 WORDS = Tables::WORDS;
    SHARED(float, y, 128 + 1);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, head = at * gridDim.x + blockIdx.x, channels = groups * dim;
    u32 all = STAGES * groups, quads = (gridDim.x + QUAD - 1) / QUAD;
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
        u32 entry = rounded_entry(product, lines, groups);
        if (there) ((u16*)tables)[to + i * QUAD] = (u16)entry;
    } else {
        for (u32 i = threadIdx.x; i < all * WORDS; i += 256) {
            float product = word_product<WORDS>(words, y + i / WORDS % groups * dim, i, all, dim);
            ((float*)tables)[to + i * QUAD] = product;
        }
        if (threadIdx.x < STAGES) lines[1 + 2 * threadIdx.x] = 0, lines[2 + 2 * threadIdx.x] = 1;
    }
}

#define TABLE_ARGUMENTS                                                                                         \
    queries, query_maps, means, words, spans, budgets, tables, lines, histograms, refined_histograms, wants,    \
        item_spans, scale, groups, dim, d
KERNEL(256, 2, word_tables_16, TABLE_PARAMETERS) { wait_for_earlier(); build_tables<RoundedTables>(TABLE_ARGUMENTS); }
KERNEL(256, 2, word_tables_256, TABLE_PARAMETERS) { wait_for_earlier(); build_tables<ExactTables>(TABLE_ARGUMENTS); }

// ---- scans ----

// Estimates the scores of a block's candidates by the first stage. From part 1 on, parts `[b,h,1 + blocks,2]` get the
// largest score of each block and the sum of the exponentials relative to it.
#define SCAN_PARAMETERS(PARTS)                                                                                  \
    const u8 *codes, const void *tables, const float *lines, OPTIONAL const float *paths, const u32 *spans,     \
        PARTS, u32 groups, u32 width, u32 r, u32 capacity
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
                            STAGES * groups * Tables::WORDS);
        const float4* path = path_of(paths, first, r, capacity);
        float held[8][QUAD], top, sum;
        u32 positions[8];
UNROLL
        for (u32 i = 0; i < 8; i++) positions[i] = smaller(start + i * 256 + threadIdx.x, to - 1);
        begin_scores(held, line + first * LINE, path, positions);
UNROLL
        for (u32 i = 0; i < 8; i++) {
            u32 p = start + i * 256 + threadIdx.x;
            add_stage<Tables>(held[i], table, code[i], groups, line + first * LINE, 0);
UNROLL
            for (u32 e = 0; e < QUAD; e++) held[i][e] = p >= from && p < to ? held[i][e] : minus_infinity();
        }
        block_softmax(held, top, sum);
        u32 a = first + threadIdx.x;
        if (threadIdx.x < QUAD && a < r) parts[a * stride] = top, parts[a * stride + 1] = sum;
    }
}

KERNEL(256, 3, word_parts_16, SUM_PARAMETERS) {
    wait_for_earlier();
    sum_words<RoundedTables>(codes, tables, lines, paths, spans, parts, groups, width, r, capacity);
}
KERNEL(256, 2, word_parts_256, SUM_PARAMETERS) {
    wait_for_earlier();
    sum_words<ExactTables>(codes, tables, lines, paths, spans, parts, groups, width, r, capacity);
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
                            STAGES * groups * Tables::WORDS);
        const float4* path = path_of(paths, first, r, capacity);
UNROLL
        for (u32 half = 0; half < 8; half += 4) {
            float scores[4][QUAD];
            u32 positions[4];
UNROLL
            for (u32 i = 0; i < 4; i++) positions[i] = smaller(start + (half + i) * 256 + threadIdx.x, to - 1);
            begin_scores(scores, line + first * LINE, path, positions);
UNROLL
            for (u32 i = 0; i < 4; i++) {
                add_stage<Tables>(scores[i], table, code[half + i], groups, line + first * LINE, 0);
UNROLL
                for (u32 e = 0; e < QUAD; e++) {
                    mass[half + i] += exp2f(scores[i][e] - tops[first + e]) * inverses[first + e];
                }
            }
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
    codes, tables, lines, paths, spans, parts, groups, width, r, capacity, totals, keys, histograms
KERNEL(256, 3, word_keys_16, RANK_PARAMETERS) { wait_for_earlier(); rank_words<RoundedTables>(RANK_ARGUMENTS); }
KERNEL(256, 2, word_keys_256, RANK_PARAMETERS) { wait_for_earlier(); rank_words<ExactTables>(RANK_ARGUMENTS); }
