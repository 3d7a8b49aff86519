// The next token from logits, as `Sampler::next` of src/kv/sample.rs: greedy, or drawn by temperature and nucleus.
//
// For a draw, probabilities are rounded to multiples of 2^-44 of the largest, so that their sums are exact in any
// order; a token below half a step is never drawn. Nothing is sorted: to find where the cumulative mass reaches a
// target, a histogram of the mass by the first 11 bits of the sort keys gives the first bits, one of the next 11 bits
// the next, and one of the last 10 bits the key.
#include "scan.h"

// Finds the index of the largest of each row's `width` numbers, the lowest on ties. Each block has a row.
KERNEL(256, 1, largest_of_rows, const float* x, u32* out, u32 width) {
    SHARED(float, values, 256);
    SHARED(u32, places, 256);
    x += (u64)blockIdx.x * width;
    float best = minus_infinity();
    u32 place = 0;
    for (u32 i = threadIdx.x; i < width; i += 256) {
        if (x[i] > best || i == threadIdx.x) best = x[i], place = i;
    }
    values[threadIdx.x] = threadIdx.x < width ? best : minus_infinity();
    places[threadIdx.x] = threadIdx.x < width ? place : 0xffffffffu;
    for (u32 step = 128; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x >= step) continue;
        u32 other = threadIdx.x + step;
        bool wins = values[other] > values[threadIdx.x] ||
                    (values[other] == values[threadIdx.x] && places[other] < places[threadIdx.x]);
        if (wins) values[threadIdx.x] = values[other], places[threadIdx.x] = places[other];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = places[0];
}

constexpr u32 DRAW_BINS = 2048;

// A place in the order of logits: the largest first; among equal ones, the lowest id first.
struct DrawPlace {
    u32 key;    // sort key, see `order_of`
    u32 rank;   // number among equal logits, from 1
    u64 above;  // mass of the places before this one
};

// Returns exp((v - top) / temperature) in multiples of 2^-44.
DEVICE u64 draw_weight(float v, double top, double temperature) {
    return (u64)__double2ll_rn(exp(((double)v - top) / temperature) * 17592186044416.0);
}

// Sums, for each value of some bits of the sort key, the mass of the keys that start with `prefix`.
DEVICE void draw_masses(const float* x, u32 width, double top, double temperature, u32 prefix, u32 bits_before,
                        u32 shift, u64* bins) {
    for (u32 i = threadIdx.x; i < DRAW_BINS; i += 256) bins[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < width; i += 256) {
        u32 key = order_of(x[i]);
        if (bits_before > 0 && key >> (32 - bits_before) != prefix) continue;
        u64 weight = draw_weight(x[i], top, temperature);
        u32 bin = (key >> shift) % DRAW_BINS;
        if (bits_before + 11 > 32) bin %= 1024;
        if (weight > 0) atomicAdd(bins + bin, weight);
    }
    __syncthreads();
}

// Finds the bin at which `above` plus the masses from the last bin down reaches `target`, and the mass before this bin.
DEVICE void draw_bin(const u64* bins, u64 target, u64 above, DrawPlace* found) {
    u64 mine = 0;
    for (u32 i = 0; i < 8; i++) mine += bins[DRAW_BINS - 1 - (8 * threadIdx.x + i)];
    u64 before = above + typed_sum_before(mine);
    if (before < target && target <= before + mine) {
        u32 bin = DRAW_BINS - 1 - 8 * threadIdx.x;
        for (; before + bins[bin] < target; bin--) before += bins[bin];
        found->key = bin, found->above = before;
    }
    __syncthreads();
}

// Finds the place at which the cumulative mass reaches `target`; `first` has the masses by the first bits.
DEVICE DrawPlace draw_place(const float* x, u32 width, double top, double temperature, u64 target, const u64* first,
                            u64* bins) {
    SHARED(DrawPlace, found, 1);
    if (threadIdx.x == 0) found[0] = {0, 1, 0};
    __syncthreads();
    draw_bin(first, target, 0, found);
    DrawPlace place = found[0];
    draw_masses(x, width, top, temperature, place.key, 11, 10, bins);
    draw_bin(bins, target, place.above, found);
    place.key = place.key << 11 | found[0].key, place.above = found[0].above;
    draw_masses(x, width, top, temperature, place.key, 22, 0, bins);
    draw_bin(bins, target, place.above, found);
    place.key = place.key << 10 | found[0].key, place.above = found[0].above;
    __syncthreads();
    u64 weight = draw_weight(number_of(place.key), top, temperature);
    u64 missing = target > place.above ? target - place.above : 1;
    place.rank = weight > 0 ? (u32)((missing + weight - 1) / weight) : 1;
    if (place.rank == 0) place.rank = 1;
    place.above += (u64)(place.rank - 1) * weight;
    return place;
}

// Returns a share of a mass: at least 1, at most all of it.
DEVICE u64 draw_share(double share, u64 mass) {
    u64 part = (u64)ceil(share * (double)mass);
    return part < 1 ? 1 : part > mass ? mass : part;
}

// Draws an id per row of logits `[rows,width]` with the uniform numbers `[rows]`. ids holds the greedy choices and
// receives the drawn ids. Each block has a row.
KERNEL(256, 1, draw_of_rows, const float* x, const double* uniforms, u32* ids, u32 width, double temperature,
       double top_p) {
    SHARED(u64, first, DRAW_BINS);
    SHARED(u64, bins, DRAW_BINS);
    SHARED(u64, total, 1);
    x += (u64)blockIdx.x * width;
    double top = x[ids[blockIdx.x]];
    draw_masses(x, width, top, temperature, 0, 0, 21, first);
    u64 mine = 0;
    for (u32 i = 0; i < 8; i++) mine += first[8 * threadIdx.x + i];
    u64 before = typed_sum_before(mine);
    if (threadIdx.x == 255) total[0] = before + mine;
    __syncthreads();
    // The nucleus: the fewest most probable tokens with at least top_p of the mass.
    DrawPlace last = draw_place(x, width, top, temperature, draw_share(top_p, total[0]), first, bins);
    u64 kept = last.above + draw_weight(number_of(last.key), top, temperature);
    u64 target = draw_share(uniforms[blockIdx.x], kept);
    DrawPlace drawn = draw_place(x, width, top, temperature, target, first, bins);
    // Equal logits are in the order of ids.
    u32 each = (width + 255) / 256, start = smaller(each * threadIdx.x, width), end = smaller(start + each, width);
    u32 equal = 0;
    for (u32 i = start; i < end; i++) equal += order_of(x[i]) == drawn.key;
    u32 rank = sum_before(equal);
    for (u32 i = start; i < end; i++) {
        if (order_of(x[i]) != drawn.key) continue;
        rank++;
        if (rank == drawn.rank) ids[blockIdx.x] = i;
    }
}
