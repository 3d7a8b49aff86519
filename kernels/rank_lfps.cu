// LFPS, the order of the candidates of all query heads and the choice by it: `select` of src/method/lfps.rs. Grid and
// spans are those of select_lfps.cu.
#include "common.h"
#include "lfps.h"
#include "scan.h"

// ---- ranks ----

// Lists the candidates of a query head in ascending order: entries `[b,h,capacity]`, with the score in the high half
// and the position in the low half; listed `[b,h]`. counts and blocks as in lfps_marks.
KERNEL(256, 1, lfps_entries, const u32* scores, const u32* counts, u64* entries, u32* listed, u32 capacity) {
    wait_for_earlier();
    SHARED(u32, earlier, 1);
    u32 head = blockIdx.z * gridDim.y + blockIdx.y, p = blockIdx.x * SCORED + threadIdx.x, sum = 0;
    counts += (u64)head * gridDim.x;
    if (threadIdx.x == 0) earlier[0] = 0;
    __syncthreads();
    for (u32 block = threadIdx.x; block < blockIdx.x; block += 256) sum += counts[block];
    if (sum > 0) atomicAdd(&earlier[0], sum);
    u32 score = p < capacity ? scores[(u64)head * capacity + p] : 0;
    // The barriers of sum_before complete `earlier`.
    u32 before = sum_before(score != 0);
    before += earlier[0];
    if (score != 0) entries[(u64)head * capacity + before] = (u64)score << 32 | p;
    if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0) listed[head] = earlier[0] + counts[blockIdx.x];
}

// Sorts the candidates of a query head: the highest score comes first, and of equal scores the lower position. This is
// a stable radix sort, 4 bits at a time from the lowest; `other` is as large as the entries. Then joins
// `[b,g,capacity]` gets, for every position, its best rank in any query head of the group.
KERNEL(512, 1, lfps_sort, u64* entries, u64* other, const u32* listed, u32* joins, u32 r, u32 capacity) {
    wait_for_earlier();
    SHARED(u32, bins, 16 * SORTERS);  // `[16,SORTERS]`
    SHARED(u32, warps, SORTERS / 32);
    u32 head = blockIdx.z * gridDim.y + blockIdx.y, n = listed[head], t = threadIdx.x;
    u32 each = (n + SORTERS - 1) / SORTERS, start = smaller(t * each, n), end = smaller(start + each, n);
    entries += (u64)head * capacity, other += (u64)head * capacity;
    u64 *from = entries, *to = other;
    for (u32 shift = 32; shift < 64 && n > 1; shift += 4) {
UNROLL
        for (u32 digit = 0; digit < 16; digit++) bins[digit * SORTERS + t] = 0;
        for (u32 i = start; i < end; i++) bins[(15 - (u32)(from[i] >> shift & 15)) * SORTERS + t]++;
        __syncthreads();
        // Replaces the counts by prefix sums; each thread has 16 consecutive bins.
        u32 own = 0;
        for (u32 i = 0; i < 16; i++) own += bins[t * 16 + i];
        u32 sum = own;
        for (u32 step = 1; step < 32; step *= 2) {
            u32 before = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane() >= step) sum += before;
        }
        if (lane() == 31) warps[warp()] = sum;
        __syncthreads();
        sum -= own;
        for (u32 i = 0; i < warp(); i++) sum += warps[i];
        for (u32 i = 0; i < 16; i++) {
            u32 count = bins[t * 16 + i];
            bins[t * 16 + i] = sum;
            sum += count;
        }
        __syncthreads();
        for (u32 i = start; i < end; i++) {
            u64 entry = from[i];
            to[bins[(15 - (u32)(entry >> shift & 15)) * SORTERS + t]++] = entry;
        }
        __syncthreads();
        u64* swap = from;
        from = to, to = swap;
    }
    // After eight passes, the result is back in `entries`.
    joins += (u64)(head / r) * capacity;
    for (u32 i = t; i < n; i += SORTERS) atomicMin(&joins[(u32)entries[i]], i);
}

// ---- choice ----

// Finds the largest union of top ranks within the budget, as `union_within` of src/method/union.rs: choice
// `[b,g,CHOICE]`.
KERNEL(256, 1, lfps_limit, const u64* entries, const u32* listed, const u32* joins, const u32* scores,
       const u32* budgets, u32* choice, u32 r, u32 capacity) {
    wait_for_earlier();
    SHARED(u32, found, 2);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, budget = budgets[blockIdx.z], longest = 0, total = 0;
    entries += (u64)at * r * capacity, listed += at * r, scores += (u64)at * r * capacity;
    joins += (u64)at * capacity;
    for (u32 a = 0; a < r; a++) longest = longest > listed[a] ? longest : listed[a];
    if (threadIdx.x == 0) found[0] = NONE;
    for (u32 first = 0; first < longest; first += 256) {
        // Counts the positions whose best rank is that of the thread.
        u32 rank = first + threadIdx.x, count = 0;
        for (u32 a = 0; a < r; a++) {
            if (rank >= listed[a]) continue;
            u32 p = (u32)entries[(u64)a * capacity + rank];
            bool counts = joins[p] == rank;
            for (u32 b = 0; b < a && counts; b++) {
                counts = rank >= listed[b] || (u32)entries[(u64)b * capacity + rank] != p;
            }
            count += counts;
        }
        u32 before = total + sum_before(count);
        if (before <= budget && before + count > budget) found[0] = rank;
        if (threadIdx.x == 255) found[1] = before + count;
        __syncthreads();
        total = found[1];
        bool done = found[0] != NONE;
        __syncthreads();
        if (done) break;
    }
    if (threadIdx.x > 0) return;
    u32* to = choice + at * CHOICE;
    to[0] = found[0], to[1] = 0;
    if (found[0] != 0) return;
    // Even the query heads' single best positions are too many: takes the ones with the highest scores.
    while (to[1] < budget) {
        u32 best = 0, place = NONE;
        for (u32 a = 0; a < r; a++) {
            if (listed[a] == 0) continue;
            u32 p = (u32)entries[(u64)a * capacity], score = 0;
            bool taken = false;
            for (u32 i = 0; i < to[1]; i++) taken = taken || to[2 + i] == p;
            for (u32 b = 0; b < r; b++) {
                u32 other = scores[(u64)b * capacity + p];
                score = score > other ? score : other;
            }
            if (!taken && (score > best || (score == best && p < place))) best = score, place = p;
        }
        if (place == NONE) break;
        to[2 + to[1]++] = place;
    }
}

// Returns the marks of a thread's eight positions.
DEVICE u64 chosen_marks(const u32* joins, const u32* choice, const u32* span, bool exact, u32 from) {
    u64 out = 0;
    for (u32 i = 0; i < 8; i++) {
        u32 p = from + i;
        if (p < span[0] + span[1] || p >= span[2]) continue;
        bool taken = exact || joins[p] < choice[0];
        for (u32 k = 0; k < choice[1] && !exact; k++) taken = taken || choice[2 + k] == p;
        out |= (u64)taken << (8 * i);
    }
    return out;
}

// Counts the marks of each block; see count_block.
KERNEL(256, 1, lfps_count, const u32* joins, const u32* choice, const u32* spans, const u32* budgets, u32* totals,
       u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * SCAN + threadIdx.x * 8;
    const u32* span = spans + 4 * blockIdx.z;
    bool exact = is_exact(span, budgets[blockIdx.z]);
    count_block(chosen_marks(joins + (u64)at * capacity, choice + at * CHOICE, span, exact, from), totals);
}

// Lists the chosen positions; see list_block.
KERNEL(256, 1, lfps_list, const u32* joins, const u32* choice, const u32* spans, const u32* budgets,
       const u32* totals, u32* lists, u32* listed, u32 capacity, u32 most) {
    wait_for_earlier();
    SHARED(u32, none, 1);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * SCAN + threadIdx.x * 8;
    const u32* span = spans + 4 * blockIdx.z;
    bool exact = is_exact(span, budgets[blockIdx.z]);
    if (threadIdx.x == 0) none[0] = 0;
    __syncthreads();
    u64 mine = chosen_marks(joins + (u64)at * capacity, choice + at * CHOICE, span, exact, from);
    list_block(mine, from, none, 1, totals, lists, listed, most);
}
