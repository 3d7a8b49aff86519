// The next token from logits, as in `Sampler::next` of src/kv/sample.rs: the greedy one, or one drawn by temperature
// and nucleus.
//
// For a draw, probabilities are rounded to multiples of 2^-44 of the largest, so that their sums are exact in any
// order; a token whose probability is below half of this step is never drawn. Nothing is sorted. To find where the
// cumulative mass reaches a target, three histograms give the sort key there: the mass by the first 11 bits of the sort
// keys gives the first bits, the mass by the next 11 bits the next, and the mass by the last 10 bits the rest. Many
// blocks per row make the first histogram, and one block per row the other two.
#include "scan.h"

// Finds the largest of the block's 256 numbers and its place, the lowest place on ties; thread 0 gets both.
DEVICE void largest_of_block(float& value, u32& place) {
    SHARED(float, values, 256);
    SHARED(u32, places, 256);
    values[threadIdx.x] = value, places[threadIdx.x] = place;
    for (u32 step = 128; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x >= step) continue;
        u32 other = threadIdx.x + step;
        bool wins = values[other] > values[threadIdx.x] ||
                    (values[other] == values[threadIdx.x] && places[other] < places[threadIdx.x]);
        if (wins) values[threadIdx.x] = values[other], places[threadIdx.x] = places[other];
    }
    value = values[threadIdx.x], place = places[threadIdx.x];
}

// Finds the largest number of each block's share of rows `[rows,width]` and its index, the lowest index on ties: tops
// and places `[rows,blocks]`. blockIdx.y is the row; the blocks along x take the numbers in turns.
KERNEL(256, 2, largest_of_parts, const float* x, float* tops, u32* places, u32 width) {
    wait_for_earlier();
    x += (u64)blockIdx.y * width;
    float best = minus_infinity();
    u32 place = 0xffffffffu;
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < width; i += gridDim.x * 256) {
        if (x[i] > best || place == 0xffffffffu) best = x[i], place = i;
    }
    largest_of_block(best, place);
    u32 to = blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) tops[to] = best, places[to] = place;
}

// Merges the results of at most 256 blocks of `largest_of_parts`: out `[rows]`. Each block has a row.
KERNEL(256, 2, largest_of_rows, const float* tops, const u32* places, u32* out, u32 parts) {
    wait_for_earlier();
    u32 at = blockIdx.x * parts + threadIdx.x;
    float best = threadIdx.x < parts ? tops[at] : minus_infinity();
    u32 place = threadIdx.x < parts ? places[at] : 0xffffffffu;
    largest_of_block(best, place);
    if (threadIdx.x == 0) out[blockIdx.x] = place;
}

// Bins of a histogram; threads of a block that searches one.
constexpr u32 DRAW_BINS = 2048, DRAW_THREADS = 1024, DRAW_EACH = DRAW_BINS / DRAW_THREADS;

// A place in the order of logits: larger logits come first, and of equal logits the one with the lowest id.
struct DrawPlace {
    u32 key;    // sort key, see `order_of`
    u32 rank;   // number among equal logits, counted from 1
    u64 above;  // mass of the places before this one
};

// A histogram of masses in shared memory, split into low and high halves: GPUs add 32-bit numbers in shared memory in
// one instruction, but 64-bit numbers in a loop of compare-and-swap.
struct Masses {
    u32 *low, *high;

    DEVICE u64 operator[](u32 bin) const { return (u64)high[bin] << 32 | low[bin]; }
    DEVICE void set(u32 bin, u64 mass) const { low[bin] = (u32)mass, high[bin] = (u32)(mass >> 32); }
    // Adds a mass. Sums are exact in any order, since every addition that wraps the low half carries one into the high
    // half.
    DEVICE void add(u32 bin, u64 mass) const {
        u32 part = (u32)mass, carried = 0;
        if (part > 0) carried = atomicAdd(low + bin, part) > 0xffffffffu - part;
        u32 rest = (u32)(mass >> 32) + carried;
        if (rest > 0) atomicAdd(high + bin, rest);
    }
};

// Returns exp((v - top) / temperature) as a multiple of 2^-44.
DEVICE u64 draw_weight(float v, double top, double temperature) {
    return (u64)__double2ll_rn(exp(((double)v - top) / temperature) * 17592186044416.0);
}

// Sums the mass of each block's share of logits `[rows,width]` by the first 11 bits of the sort keys: parts
// `[rows,blocks,2048]`. ids holds the greedy choices. blockIdx.y is the row.
KERNEL(256, 2, draw_masses, const float* x, const u32* ids, u64* parts, u32 width, double temperature) {
    wait_for_earlier();
    SHARED(u32, low, DRAW_BINS);
    SHARED(u32, high, DRAW_BINS);
    Masses bins = {low, high};
    x += (u64)blockIdx.y * width;
    parts += ((u64)blockIdx.y * gridDim.x + blockIdx.x) * DRAW_BINS;
    double top = x[ids[blockIdx.y]];
    for (u32 i = threadIdx.x; i < DRAW_BINS; i += 256) bins.set(i, 0);
    __syncthreads();
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < width; i += gridDim.x * 256) {
        u64 weight = draw_weight(x[i], top, temperature);
        if (weight > 0) bins.add(order_of(x[i]) >> 21, weight);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < DRAW_BINS; i += 256) parts[i] = bins[i];
}

// Sums, for each value of some bits of the sort key, the mass of the keys that start with `prefix`.
DEVICE void masses_after(const float* x, u32 width, double top, double temperature, u32 prefix, u32 bits_before,
                         u32 shift, const Masses& bins) {
    for (u32 i = threadIdx.x; i < DRAW_BINS; i += DRAW_THREADS) bins.set(i, 0);
    __syncthreads();
    for (u32 i = threadIdx.x; i < width; i += DRAW_THREADS) {
        u32 key = order_of(x[i]);
        if (key >> (32 - bits_before) != prefix) continue;
        u64 weight = draw_weight(x[i], top, temperature);
        u32 bin = (key >> shift) % DRAW_BINS;
        if (bits_before + 11 > 32) bin %= 1024;
        if (weight > 0) bins.add(bin, weight);
    }
    __syncthreads();
}

// Finds the bin, from the last one down, at which `above` plus the masses so far reaches `target`, and the mass before
// this bin.
DEVICE void draw_bin(const Masses& bins, u64 target, u64 above, DrawPlace* found) {
    u64 mine = 0;
    u32 last = DRAW_BINS - 1 - DRAW_EACH * threadIdx.x;
    for (u32 i = 0; i < DRAW_EACH; i++) mine += bins[last - i];
    u64 before = above + typed_sum_before<u64, DRAW_THREADS>(mine);
    if (before < target && target <= before + mine) {
        u32 bin = last;
        for (; before + bins[bin] < target; bin--) before += bins[bin];
        found->key = bin, found->above = before;
    }
    __syncthreads();
}

// Finds the place at which the cumulative mass reaches `target`; `first` holds the masses by the first bits.
DEVICE DrawPlace draw_place(const float* x, u32 width, double top, double temperature, u64 target,
                            const Masses& first, const Masses& bins) {
    SHARED(DrawPlace, found, 1);
    if (threadIdx.x == 0) found[0] = {0, 1, 0};
    __syncthreads();
    draw_bin(first, target, 0, found);
    DrawPlace place = found[0];
    masses_after(x, width, top, temperature, place.key, 11, 10, bins);
    draw_bin(bins, target, place.above, found);
    place.key = place.key << 11 | found[0].key, place.above = found[0].above;
    masses_after(x, width, top, temperature, place.key, 22, 0, bins);
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

// Draws an id per row of logits `[rows,width]` with the uniform numbers `[rows]` and the masses `[rows,parts,2048]` of
// `draw_masses`. ids holds the greedy choices and receives the drawn ids. Each block has a row.
KERNEL(1024, 1, draw_of_rows, const float* x, const double* uniforms, const u64* masses, u32* ids, u32 width,
       u32 parts, double temperature, double top_p) {
    wait_for_earlier();
    SHARED(u32, first_low, DRAW_BINS);
    SHARED(u32, first_high, DRAW_BINS);
    SHARED(u32, low, DRAW_BINS);
    SHARED(u32, high, DRAW_BINS);
    SHARED(u64, total, 1);
    Masses first = {first_low, first_high}, bins = {low, high};
    x += (u64)blockIdx.x * width;
    masses += (u64)blockIdx.x * parts * DRAW_BINS;
    double top = x[ids[blockIdx.x]];
    u64 mine = 0;
    for (u32 i = threadIdx.x; i < DRAW_BINS; i += DRAW_THREADS) {
        u64 mass = 0;
        for (u32 p = 0; p < parts; p++) mass += masses[(u64)p * DRAW_BINS + i];
        first.set(i, mass);
        mine += mass;
    }
    u64 before = typed_sum_before<u64, DRAW_THREADS>(mine);
    if (threadIdx.x == DRAW_THREADS - 1) total[0] = before + mine;
    __syncthreads();
    // The nucleus: the fewest most probable tokens with at least top_p of the mass.
    DrawPlace last = draw_place(x, width, top, temperature, draw_share(top_p, total[0]), first, bins);
    u64 kept = last.above + draw_weight(number_of(last.key), top, temperature);
    u64 target = draw_share(uniforms[blockIdx.x], kept);
    DrawPlace drawn = draw_place(x, width, top, temperature, target, first, bins);
    // Equal logits are in the order of ids.
    u32 each = (width + DRAW_THREADS - 1) / DRAW_THREADS;
    u32 start = smaller(each * threadIdx.x, width), end = smaller(start + each, width), equal = 0;
    for (u32 i = start; i < end; i++) equal += order_of(x[i]) == drawn.key;
    u32 rank = typed_sum_before<u32, DRAW_THREADS>(equal);
    for (u32 i = start; i < end; i++) {
        if (order_of(x[i]) != drawn.key) continue;
        rank++;
        if (rank == drawn.rank) ids[blockIdx.x] = i;
    }
}
