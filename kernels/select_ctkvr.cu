// CTkvr, select and update of src/method/ctkvr.rs: finds the centroids most similar to the queries, builds the union of
// their lists with the fresh positions (which left the window recently), and keeps the ring of centroids.
// select_topk.cu and best.cu rank the union.
//
// centroids `[b,g,slots,r,d]` are f16 rows of unit length. lists `[b,g,slots,longest]` and lens `[b,g,slots]` hold
// their positions, ascending. ring `[b,4]`: the slot of the oldest centroid, the number of centroids, the first
// position that no list covers, and the number of decode steps. limits `[n,2]`: for a cache of n positions, the most
// centroids and the length of a list. blockIdx.y is the KV head, blockIdx.z the sequence.
#include "common.h"
#include "scan.h"
#include "tensor.h"

// Centroids per block of recall_centroids; list entries that a block copies or marks.
constexpr u32 RECALLED = 64, LIST_PIECE = 1024;
// For how many steps a position that has left the window is fresh: every query ranks it.
constexpr u32 FRESH = 256;

// Divides rows of d numbers, `stride` apart, by their length: unit `[r,d]`; a zero row stays zero. Each warp has a row.
DEVICE void unit_rows(const float* rows, u64 stride, float* unit, u32 r, u32 d) {
    for (u32 a = warp(); a < r; a += 8) {
        double squares = 0;
        for (u32 c = lane(); c < d; c += 32) squares += (double)rows[a * stride + c] * rows[a * stride + c];
        squares = warp_sum(squares);
        double scale = squares > 0 ? 1 / sqrt(squares) : 0;
        for (u32 c = lane(); c < d; c += 32) unit[a * d + c] = (float)(rows[a * stride + c] * scale);
    }
}

// Computes, for each centroid, the largest cosine with the group's queries `[b,h,d]`: cosines `[b,g,slots]` as sort
// keys, the oldest centroid first.
KERNEL_SHARED(256, 2, QUERY_BYTES, recall_centroids, const float* queries, const u32* ring, const u16* centroids,
       u32* cosines, u32 r, u32 d, u32 slots) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, unit);  // `[r,d]`
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * RECALLED;
    u32 oldest = ring[4 * blockIdx.z], count = ring[4 * blockIdx.z + 1];
    if (start >= count) return;
    unit_rows(queries + (u64)at * r * d, d, unit, r, d);
    __syncthreads();
    for (u32 i = start + warp(); i < smaller(count, start + RECALLED); i += 8) {
        const u16* centroid = centroids + ((u64)at * slots + (oldest + i) % slots) * r * d;
        float best = minus_infinity();
        for (u32 a = 0; a < r; a++) {
            float sum = 0;
            for (u32 c = lane(); c < d; c += 32) sum = fmaf(widen<false>(centroid[a * d + c]), unit[a * d + c], sum);
            best = fmaxf(best, warp_sum(sum));
        }
        if (lane() == 0) cosines[(u64)at * slots + i] = order_of(best);
    }
}

// Lists the slots of the `probes` best centroids: recalled `[b,g,probes]`. The older centroid wins a tie. Each thread
// has a centroid.
KERNEL(256, 2, rank_centroids, const u32* ring, const u32* cosines, u32* recalled, u32 probes, u32 slots) {
    wait_for_earlier();
    SHARED(u32, tile, 256);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
    u32 oldest = ring[4 * blockIdx.z], count = ring[4 * blockIdx.z + 1];
    if (blockIdx.x * 256 >= count) return;
    cosines += (u64)at * slots;
    u32 own = i < count ? cosines[i] : 0, rank = 0;
    for (u32 start = 0; start < count; start += 256) {
        __syncthreads();
        if (start + threadIdx.x < count) tile[threadIdx.x] = cosines[start + threadIdx.x];
        __syncthreads();
        for (u32 j = 0; j < smaller(256, count - start); j++) {
            rank += tile[j] > own || (tile[j] == own && start + j < i);
        }
    }
    if (i < count && rank < probes) recalled[(u64)at * probes + rank] = (oldest + i) % slots;
}

// Sets marks `[b,g,capacity]` for the positions that a step ranks: the candidates on the recalled lists and the fresh
// positions. If the budget covers all candidates (at most `longest`), all candidates are marked. Each block has
// LIST_PIECE entries of each list. Threads that mark the same position write the same value.
KERNEL(256, 2, mark_union, const u32* ring, const u32* recalled, const u32* lists, const u32* lens, const u32* spans,
       const u32* budgets, u8* marks, u32 probes, u32 slots, u32 longest, u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * LIST_PIECE;
    const u32 *span = spans + 4 * blockIdx.z, *state = ring + 4 * blockIdx.z;
    u32 start = span[0] + span[1], end = span[2];
    marks += (u64)at * capacity;
    if (end - start <= budgets[blockIdx.z]) {
        for (u32 i = start + from + threadIdx.x; i < smaller(end, start + from + LIST_PIECE); i += 256) marks[i] = 1;
        return;
    }
    for (u32 p = 0; p < smaller(probes, state[1]); p++) {
        u64 slot = (u64)at * slots + recalled[(u64)at * probes + p];
        const u32* list = lists + slot * longest;
        for (u32 i = from + threadIdx.x; i < smaller(lens[slot], from + LIST_PIECE); i += 256) {
            if (list[i] >= start && list[i] < end) marks[list[i]] = 1;
        }
    }
    u32 fresh = end > FRESH ? end - FRESH : 0;
    if (state[2] > fresh) fresh = state[2];
    if (start > fresh) fresh = start;
    if (blockIdx.x == 0 && fresh + threadIdx.x < end) marks[fresh + threadIdx.x] = 1;
}

// Counts the marks of each block; see count_block.
KERNEL(256, 2, count_union, const u8* marks, u32* totals, u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * SCAN + threadIdx.x * 8;
    count_block(from < capacity ? *(const u64*)(marks + (u64)at * capacity + from) : 0, totals);
}

// Lists the marked positions in ascending order, items `[b,g,room]` and counts `[b,g]`, and clears the marks. The
// ranking kernels treat each KV head's items as a sequence of its own. For this sequence, item_spans `[b,g,4]` get its
// span, and wants `[2,b,g]` how many items to take: first the budget, then the length of a list. ranked `[b,g]` gets
// the number of keys that are ranked, 0 if all candidates are taken.
KERNEL(256, 2, list_union, u8* marks, const u32* totals, const u32* spans, const u32* budgets, const u32* limits,
       u32* items, u32* counts, u32* item_spans, u32* wants, u32* ranked, u32 room, u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * SCAN + threadIdx.x * 8, none = 0;
    u64 mine = 0;
    if (from < capacity) {
        u64* own = (u64*)(marks + (u64)at * capacity + from);
        mine = *own;
        *own = 0;
    }
    list_block(mine, from, &none, 1, totals, items, counts, room);
    // Only the thread that wrote the count continues.
    if (blockIdx.x + 1 < gridDim.x || threadIdx.x < 255) return;
    const u32* span = spans + 4 * blockIdx.z;
    u32 count = counts[at], heads = gridDim.y * gridDim.z, budget = budgets[blockIdx.z];
    u32* own = item_spans + 4 * at;
    own[0] = 0, own[1] = 0, own[2] = count, own[3] = count;
    wants[at] = budget, wants[heads + at] = limits[2 * span[3] + 1];
    ranked[at] = span[2] - span[0] - span[1] <= budget ? 0 : count;
}

// Replaces the indices in lists `[b,g,most]`, of which there are listed `[b,g]`, by the items `[b,g,room]` with these
// indices. Clears all histograms of best.cu except the first.
KERNEL(256, 2, name_items, const u32* items, u32* lists, const u32* listed, u32* histograms, u32 room, u32 most) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
    if (i < listed[at]) lists[(u64)at * most + i] = items[(u64)at * room + lists[(u64)at * most + i]];
    if (blockIdx.x > 0) return;
    for (u32 j = threadIdx.x; j < 2 * BINS; j += 256) histograms[((u64)at * 3 + 1) * BINS + j] = 0;
}

// Makes every `update`-th step a centroid. Its queries are `[b,h,d]`, and its list consists of the items whose indices
// are in chosen `[b,g,longest]`, of which there are chosen_count `[b,g]`.
KERNEL_SHARED(256, 2, QUERY_BYTES, push_centroid, const float* queries, const u32* ring, const u32* items,
       const u32* chosen, const u32* chosen_count, u16* centroids, u32* lists, u32* lens, u32 update, u32 r, u32 d,
       u32 slots, u32 longest, u32 room) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, unit);  // `[r,d]`
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * LIST_PIECE, n = chosen_count[at];
    const u32* state = ring + 4 * blockIdx.z;
    if (state[3] % update > 0) return;
    u64 to = (u64)at * slots + (state[0] + state[1]) % slots;
    for (u32 i = from + threadIdx.x; i < smaller(n, from + LIST_PIECE); i += 256) {
        lists[to * longest + i] = items[(u64)at * room + chosen[(u64)at * longest + i]];
    }
    if (blockIdx.x > 0) return;
    if (threadIdx.x == 0) lens[to] = n;
    unit_rows(queries + (u64)at * r * d, d, unit, r, d);
    __syncthreads();
    for (u32 i = threadIdx.x; i < r * d; i += 256) centroids[to * r * d + i] = round_to<false>(unit[i]);
}

// Counts the step. If the step made a centroid, counts the centroid or, at the limit, drops the oldest one. With
// `update` 0, no step makes a centroid.
KERNEL(256, 1, advance_ring, u32* ring, const u32* spans, const u32* limits, u32 update, u32 slots, u32 b) {
    wait_for_earlier();
    u32 s = blockIdx.x * 256 + threadIdx.x;
    if (s >= b) return;
    u32* state = ring + 4 * s;
    if (update > 0 && state[3] % update == 0) {
        if (state[1] < limits[2 * spans[4 * s + 3]]) state[1]++;
        else state[0] = (state[0] + 1) % slots;
    }
    state[3]++;
}

// Takes rows at[x] of a prompt's queries `[h,m,d]`: copies them unchanged to out `[rows,h,d]`, and stores them as
// centroids in the slots from `slot` on. blockIdx.x is the row.
KERNEL_SHARED(256, 2, QUERY_BYTES, take_queries, const float* queries, const u32* at, float* out, u16* centroids,
       u32 slot, u32 m, u32 r, u32 d, u32 slots) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, unit);  // `[r,d]`
    const float* from = queries + ((u64)blockIdx.y * r * m + at[blockIdx.x]) * d;
    unit_rows(from, (u64)m * d, unit, r, d);
    __syncthreads();
    out += ((u64)blockIdx.x * gridDim.y + blockIdx.y) * r * d;
    centroids += ((u64)blockIdx.y * slots + (slot + blockIdx.x) % slots) * r * d;
    for (u32 i = threadIdx.x; i < r * d; i += 256) {
        out[i] = from[(u64)(i / d) * m * d + i % d];
        centroids[i] = round_to<false>(unit[i]);
    }
}

// Stores the lists of these centroids: chosen `[rows,g,longest]`, chosen_count `[rows,g]`. blockIdx.z is the row.
KERNEL(256, 2, keep_lists, const u32* chosen, const u32* chosen_count, u32* lists, u32* lens, u32 slot, u32 slots,
       u32 longest) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, from = blockIdx.x * LIST_PIECE, n = chosen_count[at];
    u64 to = (u64)blockIdx.y * slots + (slot + blockIdx.z) % slots;
    for (u32 i = from + threadIdx.x; i < smaller(n, from + LIST_PIECE); i += 256) {
        lists[to * longest + i] = chosen[(u64)at * longest + i];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) lens[to] = n;
}
