// Chooses, per KV head and within a budget, the positions with the largest sort keys, that is, with the best scores.
// The lower position wins a tie. The chosen positions are listed in ascending order. Sort keys are `[b,g,capacity]`;
// candidates lie between the sinks and the window of spans `[b,4]`.
//
// The smallest key that is taken is found by a radix select of 11, 11 and 10 bits. histograms `[b,g,3,BINS]`, zeroed
// before, count the keys that match the bits known so far, by their next bits. found `[b,g,3,4]` holds, after each
// pass, the bits known and how many of the keys that match these bits are still to be taken; its other entries are
// zero.
#include "common.h"
#include "scan.h"

constexpr u32 BINS = 2048;

// Loads eight sort keys or counts; the address is a multiple of 16 bytes.
DEVICE void load_eight_keys(u32 (&out)[8], const u32* from) {
    uint4 low = ((const uint4*)from)[0], high = ((const uint4*)from)[1];
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

// Adds a block's histogram, in shared memory, to the histogram of all blocks.
DEVICE void add_histogram(const u32* own, u32* histogram) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < BINS; i += 256) {
        if (own[i] > 0) atomicAdd(&histogram[i], own[i]);
    }
}

// Finds the bin that holds the `want`-th largest key (bin 0 if there are fewer keys) and how many keys of this bin are
// among the `want` largest; every thread gets both.
DEVICE void find_bin(const u32* histogram, u32 want, u32& bin, u32& left) {
    SHARED(u32, found, 2);
    // A thread has eight bins.
    u32 top = BINS - 1 - threadIdx.x * 8, counts[8], own = 0, down = 0;
    load_eight_keys(counts, histogram + top - 7);
UNROLL
    for (u32 i = 0; i < 8; i++) own += counts[i];
    u32 before = sum_before(own);
    if (before < want && (before + own >= want || threadIdx.x == 255)) {
UNROLL
        for (u32 i = 0; i < 7; i++) {
            if (down == i && before + counts[7 - i] < want) before += counts[7 - i], down++;
        }
        found[0] = top - down, found[1] = want - before;
    }
    __syncthreads();
    bin = found[0], left = found[1];
}

// Fills the second histogram (pass 1) or the third (pass 2) from the keys in the bin that the previous pass found.
KERNEL(256, 1, narrow_keys, const u32* keys, const u32* spans, const u32* budgets, u32* histograms, u32* found,
       u32 pass, u32 capacity) {
    wait_for_earlier();
    SHARED(u32, own, BINS);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, known = 0, want = budgets[blockIdx.z], bin, left;
    const u32* span = spans + 4 * blockIdx.z;
    histograms += (u64)at * 3 * BINS;
    found += at * 12;
    if (pass == 2) known = found[0] << 11, want = found[1];
    for (u32 i = threadIdx.x; i < BINS; i += 256) own[i] = 0;
    // All keys are asked for before the first is used.
    u32 mine[8], first = blockIdx.x * SCAN + threadIdx.x;
    keys += (u64)at * capacity;
UNROLL
    for (u32 i = 0; i < 8; i++) mine[i] = first + i * 256 < span[2] ? keys[first + i * 256] : 0;
    find_bin(histograms + (pass - 1) * BINS, want, bin, left);
    known |= bin;
    if (blockIdx.x == 0 && threadIdx.x == 0) found[4 * (pass - 1)] = known, found[4 * (pass - 1) + 1] = left;
    // Bits 31 to 21 are known in pass 1, bits 31 to 10 in pass 2.
    u32 shift = pass == 1 ? 21 : 10, next = pass == 1 ? 10 : 0, mask = pass == 1 ? 2047 : 1023;
UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 p = first + i * 256;
        if (p < span[0] + span[1] || p >= span[2]) continue;
        if (mine[i] >> shift == known) atomicAdd(&own[mine[i] >> next & mask], 1);
    }
    add_histogram(own, histograms + pass * BINS);
}

// Returns the marks of a thread's eight positions, of which these are the keys: 1 for keys above the smallest taken key,
// 2 for keys equal to it.
DEVICE u64 marks_of_keys(const u32 (&keys)[8], u32 least, u32 from, u32 start, u32 end) {
    u64 out = 0;
UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 p = from + i;
        if (p < start || p >= end) continue;
        u64 mark = keys[i] > least ? 1 : keys[i] == least ? 2 : 0;
        out |= mark << (8 * i);
    }
    return out;
}

// Finds the smallest taken key and counts marks; see count_block.
KERNEL(256, 1, count_best, const u32* keys, const u32* spans, const u32* histograms, u32* found, u32* totals,
       u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * SCAN + threadIdx.x * 8, bin, left;
    const u32* span = spans + 4 * blockIdx.z;
    u32 mine[8] = {};
    if (from < span[2]) load_eight_keys(mine, keys + (u64)at * capacity + from);
    found += at * 12;
    find_bin(histograms + ((u64)at * 3 + 2) * BINS, found[5], bin, left);
    u32 least = found[4] << 10 | bin;
    if (blockIdx.x == 0 && threadIdx.x == 0) found[8] = least, found[9] = left;
    count_block(marks_of_keys(mine, least, from, span[0] + span[1], span[2]), totals);
}

// Lists the chosen positions; see list_block.
KERNEL(256, 1, list_best, const u32* keys, const u32* spans, const u32* found, const u32* totals, u32* lists,
       u32* listed, u32 capacity, u32 most) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * SCAN + threadIdx.x * 8;
    const u32* span = spans + 4 * blockIdx.z;
    u32 mine[8] = {};
    if (from < span[2]) load_eight_keys(mine, keys + (u64)at * capacity + from);
    found += at * 12;
    u64 marks = marks_of_keys(mine, found[8], from, span[0] + span[1], span[2]);
    list_block(marks, from, found + 9, 1, totals, lists, listed, most);
}
