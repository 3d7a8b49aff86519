// Scores of candidates by their signs, up to the sort keys for best.cu: `select` of src/method/selfindex.rs. A score is
// a sum over groups of four channels; each group has a score table of 16 entries, one for each sign pattern.
//
// signs `[b,g,capacity,pitch]`: bit i of byte B is the sign of channel 8 B + i; pitch is the number of bytes per row, a
// multiple of 4, and bits beyond the last channel are zero. centroids `[b,g,d/4,16,4]`. tables `[b,g,2 pitch,16]`, zero
// beyond the last group. blockIdx.y is the KV head, blockIdx.z the sequence.
#include "common.h"
#include "scan.h"

// PER_FULL: one full-precision token is chosen first per this many positions of the budget, as in
// src/method/selfindex/choose.rs.
constexpr u32 PER_FULL = 38;

// Computes the score of a row; adds byte by byte, in the same order as the CPU.
DEVICE float sign_score(const u32* row, const float* table, u32 words) {
    float sum = 0;
    for (u32 w = 0; w < words; w++) {
        u32 bits = row[w];
UNROLL
        for (u32 b = 0; b < 4; b++) {
            const float* pair = table + (w * 4 + b) * 32;
            sum += pair[bits >> (8 * b) & 15] + pair[16 + (bits >> (8 * b + 4) & 15)];
        }
    }
    return sum;
}

// Builds the score tables for the mean of the group's queries `[b,h,d]`. Then chooses the full-precision tokens that
// are taken first: of full `[b,g,FULL]`, of which there are full_count `[b,g]`, the ones with the best scores, one for
// every PER_FULL positions of the budget. first `[b,g,FULL]` gets these positions, and 0xffffffff in the other entries.
// Clears the histograms of best.cu.
KERNEL_SHARED(256, 1, 16 * 32 * 4, sign_tables, const float* queries, const float* centroids, const u32* signs,
       const u32* full, const u32* full_count, const u32* spans, const u32* budgets, float* tables, u32* first,
       u32* histograms, u32 r, u32 d, u32 pitch, u32 capacity) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, table);
    SHARED(u32, orders, FULL);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, entries = pitch * 32;
    const u32* span = spans + 4 * blockIdx.z;
    queries += (u64)at * r * d;
    for (u32 i = threadIdx.x; i < entries; i += 256) {
        float sum = 0;
        for (u32 e = 0; e < 4 && i / 16 * 4 < d; e++) {
            u32 channel = i / 16 * 4 + e;
            float q = 0;
            for (u32 a = 0; a < r; a++) q += queries[a * d + channel];
            sum += q / r * centroids[((u64)at * (d / 4) * 16 + i) * 4 + e];
        }
        table[i] = tables[(u64)at * entries + i] = sum;
    }
    for (u32 i = threadIdx.x; i < 3 * BINS; i += 256) histograms[(u64)at * 3 * BINS + i] = 0;
    __syncthreads();
    u32 i = threadIdx.x, count = smaller(full_count[at], FULL);
    full += at * FULL;
    bool visible = i < count && full[i] >= span[0] + span[1] && full[i] < span[2];
    if (i < FULL) {
        const u32* row = signs + ((u64)at * capacity + (visible ? full[i] : 0)) * (pitch / 4);
        orders[i] = visible ? order_of(sign_score(row, table, pitch / 4)) : 0;
    }
    __syncthreads();
    if (i >= FULL) return;
    // The positions are ascending, so the lower index is the lower position.
    u32 rank = 0;
    for (u32 j = 0; j < count; j++) rank += orders[j] > orders[i] || (orders[j] == orders[i] && j < i);
    first[at * FULL + i] = visible && rank < budgets[blockIdx.z] / PER_FULL ? full[i] : 0xffffffffu;
}

// Computes the sort keys of the candidates and their first histogram. A block covers SCAN positions. One look-up per byte
// of the signs has half as many bank conflicts as one per group.
KERNEL_SHARED(256, 1, 16 * (256 + 32) * 4, sign_keys, const u32* signs, const float* tables, const u32* first,
       const u32* spans, u32* keys, u32* histograms, u32 pitch, u32 capacity) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, table);
    SHARED(u32, own, BINS);
    SHARED(u32, is_first, SCAN / 32);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * SCAN;
    const u32* span = spans + 4 * blockIdx.z;
    float* const pairs = table + pitch * 256;
    for (u32 i = threadIdx.x; i < pitch * 32; i += 256) pairs[i] = tables[(u64)at * pitch * 32 + i];
    for (u32 i = threadIdx.x; i < BINS; i += 256) own[i] = 0;
    if (threadIdx.x < SCAN / 32) is_first[threadIdx.x] = 0;
    __syncthreads();
    // `[pitch,256]`: the sum of the entries of both groups of a byte, as sign_score adds them.
    for (u32 b = 0; b < pitch; b++) {
        const float* pair = pairs + b * 32;
        table[b * 256 + threadIdx.x] = pair[threadIdx.x & 15] + pair[16 + (threadIdx.x >> 4)];
    }
    if (threadIdx.x < FULL) {
        u32 p = first[at * FULL + threadIdx.x];
        if (p >= start && p - start < SCAN) atomicAdd(&is_first[(p - start) / 32], 1u << (p - start) % 32);
    }
    __syncthreads();
    signs += ((u64)at * capacity + start) * (pitch / 4);
    // The same word of all of a thread's positions is asked for at once.
    float sums[8] = {};
    for (u32 w = 0; w < pitch / 4; w++) {
        u32 bits[8];
UNROLL
        for (u32 i = 0; i < 8; i++) {
            u32 at_row = i * 256 + threadIdx.x;
            bits[i] = start + at_row < span[2] ? signs[at_row * (pitch / 4) + w] : 0;
        }
UNROLL
        for (u32 b = 0; b < 4; b++) {
UNROLL
            for (u32 i = 0; i < 8; i++) sums[i] += table[(w * 4 + b) * 256 + (bits[i] >> (8 * b) & 255)];
        }
    }
UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 at_row = i * 256 + threadIdx.x, p = start + at_row;
        if (p < span[0] + span[1] || p >= span[2]) continue;
        u32 key = order_of(sums[i]);
        if (is_first[at_row / 32] >> at_row % 32 & 1) key = 0xffffffffu;
        keys[(u64)at * capacity + p] = key;
        atomicAdd(&own[key >> 21], 1);
    }
    add_histogram(own, histograms + (u64)at * 3 * BINS);
}

// Stores the sign bits of the last m rows `[b,g,m,w]`, of which the first d channels are used, relative to center
// `[b,g,d]`; zero counts as negative. lens `[b]` already counts these rows. Each thread makes one word.
KERNEL(256, 1, append_signs, const float* rows, const float* centers, const u32* lens, u32* signs, u32 m, u32 d, u32 w,
       u32 pitch, u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, i = blockIdx.x * 256 + threadIdx.x, words = pitch / 4;
    if (i >= m * words) return;
    u32 row = i / words, word = i % words, bits = 0;
    for (u32 c = word * 32; c < smaller(d, word * 32 + 32); c++) {
        float x = rows[((u64)at * m + row) * w + c] - centers[at * d + c];
        bits |= (u32)(x > 0) << (c % 32);
    }
    signs[((u64)at * capacity + lens[blockIdx.z] - m + row) * words + word] = bits;
}
