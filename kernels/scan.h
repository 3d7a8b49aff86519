// Functions that the selection kernels share: sort keys of scores, prefix sums over a block, and the scan that lists
// the taken positions in ascending order. Blocks have 256 threads unless a function says otherwise.
#pragma once
#include "common.h"

// Positions that a block of the scan covers, eight per thread; the most codewords of a KV head that are taken in part.
constexpr u32 SCAN = 2048, PARTS = 16;

// Maps a float to an unsigned number that sorts as `f32::total_cmp` does: the sort key of a score.
DEVICE u32 order_of(float v) {
    u32 bits = __float_as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Inverts `order_of`.
DEVICE float number_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// Returns the sum over all lower threads of a block of `THREADS` threads.
template <class T, u32 THREADS = 256>
DEVICE T typed_sum_before(T v) {
    SHARED(T, warps, THREADS / 32);
    T sum = v;
    for (u32 step = 1; step < 32; step *= 2) {
        T other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane() >= step) sum += other;
    }
    if (lane() == 31) warps[warp()] = sum;
    __syncthreads();
    T before = sum - v;
    if (THREADS <= 256) {
        for (u32 i = 0; i < warp(); i++) before += warps[i];
    } else {
        // Each warp sums what the warps before it hold.
        before += warp_sum(lane() < warp() ? warps[lane()] : (T)0);
    }
    __syncthreads();
    return before;
}

DEVICE u32 sum_before(u32 v) { return typed_sum_before(v); }

// Returns the mark of a thread's i-th position: 0 means not taken; 1 means taken; 2 + p means of kind p, of which only
// the first few positions are taken.
DEVICE u32 mark_at(u64 marks, u32 i) { return (u32)(marks >> (8 * i) & 255); }

DEVICE u32 count_marks(u64 marks, u32 mark) {
    u32 count = 0;
UNROLL
    for (u32 i = 0; i < 8; i++) count += mark_at(marks, i) == mark;
    return count;
}

// Counts the block's marks into totals `[b,g,blocks,1 + PARTS]`: first the marks of 1, then the marks of every kind.
DEVICE void count_block(u64 mine, u32* totals) {
    SHARED(u32, sums, 1 + PARTS);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    if (threadIdx.x <= PARTS) sums[threadIdx.x] = 0;
    __syncthreads();
    u32 whole = warp_sum(count_marks(mine, 1));
    if (lane() == 0) atomicAdd(&sums[0], whole);
    for (u32 i = 0; i < 8; i++) {
        u32 mark = mark_at(mine, i);
        if (mark > 1) atomicAdd(&sums[mark - 1], 1);
    }
    __syncthreads();
    if (threadIdx.x <= PARTS) totals[((u64)at * gridDim.x + blockIdx.x) * (1 + PARTS) + threadIdx.x] = sums[threadIdx.x];
}

// Lists the block's taken positions in lists `[b,g,most]`, and writes their number to listed `[b,g]`; `from` is the
// thread's first position. Of kind p, the first takes[p * stride] positions are taken; a zero ends the list of kinds.
DEVICE void list_block(u64 mine, u32 from, const u32* takes, u32 stride, const u32* totals, u32* lists, u32* listed,
                       u32 most) {
    SHARED(u32, before, 1 + PARTS);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    if (threadIdx.x <= PARTS) before[threadIdx.x] = 0;
    __syncthreads();
    // 255 is a multiple of 17, so each thread adds to only one of the 17 counters.
    totals += (u64)at * gridDim.x * (1 + PARTS);
    u32 earlier = 0;
    if (threadIdx.x < 255) {
        for (u32 i = threadIdx.x; i < blockIdx.x * (1 + PARTS); i += 255) earlier += totals[i];
        if (earlier > 0) atomicAdd(&before[threadIdx.x % (1 + PARTS)], earlier);
    }
    __syncthreads();
    u32 base = before[0];
    for (u32 p = 0; p < PARTS; p++) {
        u32 take = takes[p * stride], seen = before[1 + p];
        if (take == 0) break;
        base += smaller(take, seen);
        u32 rank = seen + sum_before(count_marks(mine, 2 + p));
        for (u32 i = 0; i < 8; i++) {
            if (mark_at(mine, i) != 2 + p) continue;
            u64 taken = rank++ < take;
            mine = (mine & ~(255ull << (8 * i))) | taken << (8 * i);
        }
    }
    u32 count = count_marks(mine, 1), to = base + sum_before(count);
    for (u32 i = 0; i < 8; i++) {
        if (mark_at(mine, i) == 1 && to < most) lists[(u64)at * most + to++] = from + i;
    }
    if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 255) listed[at] = smaller(to, most);
}
