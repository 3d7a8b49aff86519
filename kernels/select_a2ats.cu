// Selection of the tokens with the best codewords, within a budget per KV head: `select` of src/method/a2ats.rs.
//
// For query head a, let R_a(c) be the number of tokens in codewords ranked above c (by score; the lower codeword wins
// ties), rho(c) the smallest R_a(c) in the query group, and o(j) the rank of token j by position within its codeword.
// The union of the query heads' k best tokens is { j : rho(code_j) + o(j) < k }. So k follows from the counts of the
// codewords alone, and a single scan over the codes lists the positions in ascending order. At most r codewords of a KV
// head are taken in part; o(j) is needed only for these.
//
// Unless stated otherwise, blockIdx.y is the KV head and blockIdx.z the sequence; r <= 16. spans `[b,4]` and budgets
// `[b]` are those of begin_step; candidates lie between the sinks and the window.
#include "common.h"
#include "scan.h"
#include "tensor.h"

constexpr u32 NO_RANK = 0xffffffffu;
// The most codewords of a KV head: rank_codewords lists them in shared memory.
#define MOST_CODEWORDS 12288
// Threads that rank and take the codewords of a head, and codewords per thread, which stay in registers.
#define RANKERS 1024
constexpr u32 EACH = MOST_CODEWORDS / RANKERS;

// Multiplies rows by matrices `[g,d,d]`: out `[b,g,r,d]`, out_i = sum_j matrix_ij x_j. Each warp has a row of the
// matrix, block x eight of them.
KERNEL(256, 1, map_rows, const float* x, const float* matrices, float* out, u32 r, u32 d) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, i = blockIdx.x * 8 + warp();
    if (i >= d) return;
    const float* row = matrices + ((u64)blockIdx.y * d + i) * d;
    for (u32 a = 0; a < r; a++) {
        float sum = 0;
        for (u32 j = lane(); j < d; j += 32) sum = fmaf(row[j], x[((u64)at * r + a) * d + j], sum);
        sum = warp_sum(sum);
        if (lane() == 0) out[((u64)at * r + a) * d + i] = sum;
    }
}

// Updates counts `[b,g,M]`, which cover the codes of the positions in counted `[b,g,2]`, to the present candidates:
// adds and removes the difference, or starts over if the candidates have moved back. codes `[b,g,capacity]`. Each block
// has a KV head.
KERNEL(256, 1, count_candidates, const u16* codes, const u32* spans, u32* counts, u32* counted, u32 capacity,
       u32 size) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    const u32* span = spans + 4 * blockIdx.z;
    u32 start = span[0] + span[1], end = span[2], old_start = counted[2 * at], old_end = counted[2 * at + 1];
    codes += (u64)at * capacity;
    counts += (u64)at * size;
    __syncthreads();
    if (start < old_start || end < old_end || start > old_end) {
        for (u32 c = threadIdx.x; c < size; c += 256) counts[c] = 0;
        __syncthreads();
        old_start = old_end = start;
    }
    for (u32 p = old_end + threadIdx.x; p < end; p += 256) atomicAdd(&counts[codes[p]], 1);
    for (u32 p = old_start + threadIdx.x; p < start; p += 256) atomicAdd(&counts[codes[p]], 0xffffffffu);
    if (threadIdx.x == 0) counted[2 * at] = start, counted[2 * at + 1] = end;
}

// Computes the products of rows y `[rows,d]`, in shared memory, with a codeword; zeros if the codeword is null. Four
// lanes share a codeword, and all four get the sums.
template <u32 MOST>
DEVICE void codeword_products(float (&sums)[MOST], const u16* codeword, const float* y, u32 rows, u32 d) {
UNROLL
    for (u32 a = 0; a < MOST; a++) sums[a] = 0;
    // All of the codeword is asked for before its first channel is used; d is at most 128.
    uint4 bits[4];
    u32 first = threadIdx.x % 4 * 8;
UNROLL
    for (u32 j = 0; j < 4; j++) {
        if (codeword && first + 32 * j < d) bits[j] = *(const uint4*)&codeword[first + 32 * j];
    }
UNROLL
    for (u32 j = 0; j < 4; j++) {
        u32 k = first + 32 * j;
        if (!codeword || k >= d) break;
        float c[8];
        widen_eight<false>(c, bits[j]);
UNROLL
        for (u32 a = 0; a < MOST; a++) {
            if (a >= rows) continue;
            float4 low = *(const float4*)&y[a * d + k], high = *(const float4*)&y[a * d + k + 4];
            sums[a] = fmaf(c[3], low.w, fmaf(c[2], low.z, fmaf(c[1], low.y, fmaf(c[0], low.x, sums[a]))));
            sums[a] = fmaf(c[7], high.w, fmaf(c[6], high.z, fmaf(c[5], high.y, fmaf(c[4], high.x, sums[a]))));
        }
    }
UNROLL
    for (u32 a = 0; a < MOST; a++) {
        if (a >= rows) continue;
        sums[a] += __shfl_xor_sync(ALL_LANES, sums[a], 1);
        sums[a] += __shfl_xor_sync(ALL_LANES, sums[a], 2);
    }
}

// Scores the codewords, y·c: `[b,h,M]`. Each block has 64 codewords of a KV head. Whitened queries y_w `[b,h,d]`,
// codebook `[g,M,w]` f16; d is a multiple of 8.
KERNEL_SHARED(256, 2, QUERY_BYTES, codeword_scores, const float* y_w, const u16* codebook, float* scores, u32 r,
       u32 size, u32 d, u32 w) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, y);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    for (u32 i = threadIdx.x; i < r * d; i += 256) y[i] = y_w[(u64)at * r * d + i];
    __syncthreads();
    u32 c = blockIdx.x * 64 + threadIdx.x / 4;
    float sums[16];
    codeword_products<16>(sums, c < size ? codebook + ((u64)blockIdx.y * size + c) * w : 0, y, r, d);
UNROLL
    for (u32 a = 0; a < 16; a++) {
        if (a < r && threadIdx.x % 4 == 0 && c < size) scores[((u64)at * r + a) * size + c] = sums[a];
    }
}

// Computes ranks `[b,h,M]`: R_a(c) if it is below `budget`, else NO_RANK. Each block has a query head, blockIdx.y. By
// radix select with digits of 11, 11 and 10 bits, it finds the lowest score such that the codewords down to this score
// hold `budget` tokens; it lists these codewords and counts the tokens above each, four lanes per codeword. Codewords
// without tokens are left out.
KERNEL_SHARED(RANKERS, 1, 2 * MOST_CODEWORDS * 4, rank_codewords, const float* scores, const u32* counts,
       const u32* budgets, u32* ranks, u32 r, u32 size) {
    wait_for_earlier();
    // First the tokens of each digit, `[2 RANKERS]`; then `[2,M]`: order and codeword of each listed codeword.
    DYNAMIC_SHARED(u32, listed);
    SHARED(u32, found, 3);
    u32* const tokens = listed;
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, budget = budgets[blockIdx.z], orders[EACH], own[EACH];
    scores += (u64)at * size;
    counts += (u64)(at / r) * size;
    ranks += (u64)at * size;
UNROLL
    for (u32 e = 0; e < EACH; e++) {
        u32 c = smaller(e * RANKERS + threadIdx.x, size - 1);
        orders[e] = 0, own[e] = 0;
        if (e * RANKERS >= size) continue;
        orders[e] = order_of(scores[c]);
        own[e] = e * RANKERS + threadIdx.x < size ? counts[c] : 0;
    }
    for (u32 c = threadIdx.x; c < size; c += RANKERS) ranks[c] = NO_RANK;
    if (budget == 0) return;
    // The smallest sort key that is listed, found from its highest digit down, and the number of tokens above it.
    u32 prefix = 0, above = 0;
    for (u32 digit = 0; digit < 3; digit++) {
        u32 shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bins = digit == 2 ? 1024 : 2048;
        tokens[threadIdx.x] = tokens[RANKERS + threadIdx.x] = 0;
        __syncthreads();
UNROLL
        for (u32 e = 0; e < EACH; e++) {
            if (e * RANKERS >= size) break;
            bool inside = digit == 0 || orders[e] >> (digit == 1 ? 21 : 10) == prefix >> (digit == 1 ? 21 : 10);
            if (own[e] > 0 && inside) atomicAdd(&tokens[orders[e] >> shift & (bins - 1)], own[e]);
        }
        __syncthreads();
        // The digit at which the budget is reached, or the last one; a thread has two digits, the larger one first.
        u32 large = 2 * RANKERS - 1 - 2 * threadIdx.x, first = tokens[large], second = tokens[large - 1];
        u32 sum = above + typed_sum_before<u32, RANKERS>(first + second), next = sum + first;
        if (sum < budget && next >= budget) found[0] = large, found[1] = sum;
        if (next < budget && (next + second >= budget || large == 1)) found[0] = large - 1, found[1] = next;
        __syncthreads();
        prefix |= found[0] << shift;
        above = found[1];
    }
    // The tokens of digits are read by all before the list takes their place.
    if (threadIdx.x == 0) found[2] = 0;
    __syncthreads();
UNROLL
    for (u32 e = 0; e < EACH; e++) {
        if (own[e] == 0 || orders[e] < prefix) continue;
        u32 i = atomicAdd(&found[2], 1);
        listed[i] = orders[e], listed[size + i] = e * RANKERS + threadIdx.x;
    }
    __syncthreads();
    u32 all = found[2];
    for (u32 start = 0; start < all; start += RANKERS / 4) {
        u32 i = start + threadIdx.x / 4, order = i < all ? listed[i] : 0, c = i < all ? listed[size + i] : 0, rank = 0;
        for (u32 j = threadIdx.x % 4; j < all; j += 4) {
            u32 other = listed[size + j], count = counts[other];
            if (listed[j] > order || (listed[j] == order && other < c)) rank += count;
        }
        rank += __shfl_xor_sync(ALL_LANES, rank, 1);
        rank += __shfl_xor_sync(ALL_LANES, rank, 2);
        if (i < all && threadIdx.x % 4 == 0) ranks[c] = rank < budget ? rank : NO_RANK;
    }
}

DEVICE u32 taken(u32 rho, u32 count, u32 k) { return rho == NO_RANK || k <= rho ? 0 : smaller(k - rho, count); }

// Handles a budget that is smaller than the union of the query heads' best tokens: takes the best tokens of this union
// by their highest score. The lower position wins a tie. chosen `[r]` gets the codewords of these tokens; each of these
// codewords gives its first token.
DEVICE void best_of_union(u32* chosen, const u32* ranks, const u32* counts, const float* scores, const u16* codes,
                          u32 start, u32 end, u32 budget, u32 r, u32 size) {
    SHARED(u32, tops, 16);
    SHARED(u32, firsts, 16);
    if (threadIdx.x < 16) tops[threadIdx.x] = chosen[threadIdx.x] = firsts[threadIdx.x] = NO_RANK;
    __syncthreads();
    for (u32 i = threadIdx.x; i < r * size; i += RANKERS) {
        if (ranks[i] == 0 && counts[i % size] > 0) tops[i / size] = i % size;
    }
    __syncthreads();
    for (u32 p = start + threadIdx.x; p < end; p += RANKERS) {
        for (u32 a = 0; a < r; a++) {
            if (codes[p] == tops[a]) atomicMin(&firsts[a], p);
        }
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (u32 n = 0; n < smaller(budget, r); n++) {
        u32 best = NO_RANK, best_order = 0;
        for (u32 a = 0; a < r; a++) {
            if (tops[a] == NO_RANK) continue;
            u32 order = 0;
            for (u32 other = 0; other < r; other++) {
                u32 of = order_of(scores[other * size + tops[a]]);
                if (of > order) order = of;
            }
            bool better = best == NO_RANK || order > best_order || (order == best_order && firsts[a] < firsts[best]);
            if (better) best = a, best_order = order;
        }
        if (best == NO_RANK) break;
        u32 code = chosen[n] = tops[best];
        for (u32 a = 0; a < r; a++) {
            if (tops[a] == code) tops[a] = NO_RANK;
        }
    }
}

// Finds, per KV head, the largest k whose union has at most `budget` tokens (with `per_query_head`, k is the budget),
// and marks the tokens that it takes. marks `[b,g,M]`: 0 if none of a codeword's tokens are taken, 1 if all are, and
// 2 + i if only its first tokens are; entry i of parts `[b,g,16,2]` then holds the codeword and the number of tokens.
KERNEL(RANKERS, 1, take_codewords, const u32* ranks, const u32* counts, const float* scores, const u16* codes,
       const u32* spans, const u32* budgets, u8* marks, u32* parts, u32 r, u32 size, u32 capacity,
       u32 per_query_head) {
    wait_for_earlier();
    constexpr u32 TRIED = 4, WARPS = RANKERS / 32;
    SHARED(u32, partial, TRIED * WARPS);
    SHARED(u32, totals, TRIED);
    SHARED(u32, chosen, 16);
    SHARED(u32, n_parts, 1);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, budget = budgets[blockIdx.z], rho[EACH], own[EACH];
    const u32* span = spans + 4 * blockIdx.z;
    counts += (u64)at * size;
    ranks += (u64)at * r * size;
UNROLL
    for (u32 e = 0; e < EACH; e++) {
        u32 c = smaller(e * RANKERS + threadIdx.x, size - 1);
        rho[e] = NO_RANK, own[e] = 0;
        if (e * RANKERS >= size) continue;
        own[e] = e * RANKERS + threadIdx.x < size ? counts[c] : 0;
        for (u32 a = 0; a < r; a++) rho[e] = smaller(rho[e], ranks[a * size + c]);
    }
    // k = fits stays within the budget, and k = too_many does not: even a single query head may not have more than the
    // budget. Each round tries several k in between.
    u32 fits = per_query_head ? budget : 0, too_many = budget + 1;
    while (too_many - fits > 1) {
        u32 step = (too_many - fits + TRIED) / (TRIED + 1), sums[TRIED] = {};
UNROLL
        for (u32 i = 0; i < TRIED; i++) {
UNROLL
            for (u32 e = 0; e < EACH; e++) {
                if (e * RANKERS >= size) break;
                sums[i] += taken(rho[e], own[e], fits + step * (i + 1));
            }
        }
UNROLL
        for (u32 half = 16; half > 0; half /= 2) {
UNROLL
            for (u32 i = 0; i < TRIED; i++) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], half);
        }
        if (lane() == 0) {
UNROLL
            for (u32 i = 0; i < TRIED; i++) partial[i * WARPS + warp()] = sums[i];
        }
        __syncthreads();
        if (warp() < TRIED) {
            u32 sum = warp_sum(partial[warp() * WARPS + lane()]);
            if (lane() == 0) totals[warp()] = sum;
        }
        __syncthreads();
        u32 low = fits, high = too_many;
        for (u32 i = 0; i < TRIED; i++) {
            u32 tried = fits + step * (i + 1);
            if (tried >= too_many) break;
            if (totals[i] > budget) {
                high = tried;
                break;
            }
            low = tried;
        }
        fits = low, too_many = high;
    }
    if (fits == 0 && !per_query_head) {
        best_of_union(chosen, ranks, counts, scores + (u64)at * r * size, codes + (u64)at * capacity,
                      span[0] + span[1], span[2], budget, r, size);
    }
    if (threadIdx.x == 0) n_parts[0] = 0;
    if (threadIdx.x < 2 * PARTS) parts[at * 2 * PARTS + threadIdx.x] = 0;
    __syncthreads();
UNROLL
    for (u32 e = 0; e < EACH; e++) {
        u32 c = e * RANKERS + threadIdx.x, take = taken(rho[e], own[e], fits);
        if (c >= size) continue;
        for (u32 a = 0; a < 16 && fits == 0 && !per_query_head; a++) take += chosen[a] == c;
        u8 mark = take > 0;
        if (take > 0 && take < own[e]) {
            u32 i = atomicAdd(&n_parts[0], 1);
            parts[(at * PARTS + i) * 2] = c, parts[(at * PARTS + i) * 2 + 1] = take;
            mark = (u8)(2 + i);
        }
        marks[(u64)at * size + c] = mark;
    }
}

// Returns the marks of a thread's eight codes, one byte each; 0 for positions that are not candidates. All marks are
// asked for before the first is used.
DEVICE u64 marks_of(const u16* codes, const u8* marks, u32 from, u32 start, u32 end, u32 size) {
    if (from >= end) return 0;
    uint4 bits = *(const uint4*)&codes[from];
    u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
    u8 own[8];
UNROLL
    for (u32 i = 0; i < 8; i++) own[i] = marks[smaller(pairs[i / 2] >> (i % 2 * 16) & 0xffff, size - 1)];
    u64 out = 0;
UNROLL
    for (u32 i = 0; i < 8; i++) out |= (u64)(from + i >= start && from + i < end ? own[i] : 0) << (8 * i);
    return out;
}

// Counts the marks of each block; see count_block. capacity is a multiple of 8.
KERNEL(256, 1, count_taken, const u16* codes, const u8* marks, const u32* spans, u32* totals, u32 capacity,
       u32 size) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * SCAN + threadIdx.x * 8;
    const u32* span = spans + 4 * blockIdx.z;
    count_block(marks_of(codes + (u64)at * capacity, marks + (u64)at * size, from, span[0] + span[1], span[2], size),
                totals);
}

// Lists the chosen positions; see list_block.
KERNEL(256, 1, list_taken, const u16* codes, const u8* marks, const u32* parts, const u32* spans, const u32* totals,
       u32* lists, u32* listed, u32 capacity, u32 size, u32 most) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * SCAN + threadIdx.x * 8;
    const u32* span = spans + 4 * blockIdx.z;
    u64 mine = marks_of(codes + (u64)at * capacity, marks + (u64)at * size, from, span[0] + span[1], span[2], size);
    list_block(mine, from, parts + at * 2 * PARTS + 1, 2, totals, lists, listed, most);
}

// Encodes each head's new key, which is at the last position of lens `[b]`. Given the scores z·c `[b,g,M]`, takes the
// codeword with the largest z·c - norms[c]; the lower codeword wins a tie. norms `[g,M]`: ||c||²/2.
KERNEL(256, 1, encode_last, const float* scores, const float* norms, const u32* lens, u16* codes, u32 size,
       u32 capacity) {
    wait_for_earlier();
    SHARED(u64, best, 8);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    u64 mine = 0;
    for (u32 c = threadIdx.x; c < size; c += 256) {
        float score = scores[(u64)at * size + c] - norms[blockIdx.y * size + c];
        u64 key = (u64)order_of(score) << 32 | (0xffffffffu - c);
        if (key > mine) mine = key;
    }
    for (u32 step = 16; step > 0; step /= 2) {
        u64 other = __shfl_xor_sync(ALL_LANES, mine, step);
        if (other > mine) mine = other;
    }
    if (lane() == 0) best[warp()] = mine;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (u32 i = 1; i < 8; i++) {
        if (best[i] > mine) mine = best[i];
    }
    codes[(u64)at * capacity + lens[blockIdx.z] - 1] = (u16)(0xffffffffu - (u32)mine);
}
