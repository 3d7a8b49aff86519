// LFPS, select and observe of src/method/lfps.rs for one token. `at` is a KV head of a sequence, `head` a query head
// of a sequence; blockIdx.z is the sequence, blockIdx.y the KV head or the query head. Candidates lie between the
// sinks and the window of spans `[b,4]`. Sums over blocks are taken in a fixed order.
//
// A table `[capacity]` holds f32 entries that share an f64 factor. tables `[b,h,2,capacity]`: by position, and by
// distance from the last position; factors `[b,h,2]`. constants `[b,h,6]`: gamma, lambda, alpha, rho, the bias of the
// global estimate, and whether the bypass is tested.
#include "attend.h"
#include "common.h"
#include "lfps.h"
#include "scan.h"
#include "tensor.h"

// ---- bypass ----

// Updates the sums of the keys and values of the non-sinks, `[b,g,2,d]`, to the last position, and tests the query
// heads of a KV head for the bypass: bypassed `[b,h]`, and rest `[b,h]`, the estimated log-sum-exp of all rows except
// sinks. counters `[b,g,4]`: keys read for ranking, products computed for ranking, heads bypassed, rows of the local
// estimate; `lfps_marks` adds to the first two.
KERNEL(256, 1, lfps_begin, const float* queries, const void* keys, const void* values, const u32* spans,
       const u32* budgets, const double* constants, double* sums, u32* bypassed, float* rest, u32* counters,
       double scale, double theta, u32 kind, u32 r, u32 d, u32 w, u32 capacity, u32 sinks, u32 model_window) {
    wait_for_earlier();
    SHARED(u32, counts, 2);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y;
    const u32* span = spans + 4 * blockIdx.z;
    u32 first = span[0], end = span[3], last = end - 1;
    u32 first_before = model_window > 0 && last > model_window ? last - model_window : 0;
    u64 rows = (u64)at * capacity;
    sums += (u64)at * 2 * d;
    for (u32 i = threadIdx.x; i < 2 * d; i += 256) {
        const void* from = i < d ? keys : values;
        double sum = sums[i];
        if (last >= sinks) sum += (double)load_one(from, (rows + last) * w + i % d, kind);
        for (u32 p = first_before > sinks ? first_before : sinks; p < first; p++) {
            sum -= (double)load_one(from, (rows + p) * w + i % d, kind);
        }
        sums[i] = sum;
    }
    if (threadIdx.x < 2) counts[threadIdx.x] = 0;
    __syncthreads();
    u32 start = first > sinks ? first : sinks;
    start = smaller(start, end);
    u32 local = end - start > LOCAL ? end - LOCAL : start;
    bool tests = !is_exact(span, budgets[blockIdx.z]) && span[1] > 0;
    for (u32 a = warp(); a < r; a += 8) {
        u32 head = at * r + a;
        const double* own = constants + (u64)head * OF_HEAD;
        const float* q = queries + (u64)head * d;
        bool is_tested = tests && own[5] > 0;
        u32 result = 0;
        if (is_tested) {
            LogSum sink = {(double)LOWEST, 0}, near = {(double)LOWEST, 0};
            for (u32 p = first; p < first + span[1]; p++) sink.add(warp_score(q, keys, rows + p, scale, kind, d, w));
            for (u32 p = local; p < end; p++) near.add(warp_score(q, keys, rows + p, scale, kind, d, w));
            double norm = 0, mean = 0, n = end - start;
            for (u32 c = lane(); c < d; c += 32) {
                norm += (double)q[c] * (double)q[c];
                mean += (double)q[c] * sums[c] / n;
            }
            norm = warp_sum(norm), mean = warp_sum(mean);
            // The log of n E[exp x] for a normally distributed x, plus the bias.
            double global = log(n) + scale * mean + own[3] * norm / 2 + own[4];
            double others = fmax(global, near.log_of());
            result = 1 / (1 + exp(others - sink.log_of())) > theta;
            if (lane() == 0) rest[head] = (float)others, atomicAdd(&counts[0], 1);
        }
        if (lane() == 0) {
            bypassed[head] = result;
            if (result) atomicAdd(&counts[1], 1);
        }
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    u32* to = counters + 4 * at;
    to[0] = 0, to[1] = counts[0] * (end - local + span[1]), to[2] = counts[1], to[3] = end - local;
}

// ---- thresholds ----

// The entries of a query head's two tables for position p, where t is the last position.
struct Tables {
    const float *vertical, *slash;
    double of_vertical, of_slash;
    u32 t;

    DEVICE double by_position(u32 p) const { return (double)vertical[p] * of_vertical; }
    DEVICE double by_distance(u32 p) const { return (double)slash[t - p] * of_slash; }
};

DEVICE Tables tables_of(const float* tables, const double* factors, const u32* span, u32 head, u32 capacity) {
    const float* own = tables + (u64)head * 2 * capacity;
    return {own, own + capacity, factors[2 * head], factors[2 * head + 1], span[3] - 1};
}

// Sums column i of parts `[blocks,stride]`; every thread gets the sum.
DEVICE double total_of(const double* parts, u32 blocks, u32 stride, u32 i) {
    double sum = 0;
    for (u32 block = threadIdx.x; block < blocks; block += 256) sum += parts[block * stride + i];
    return block_total(sum);
}

// The positions `[from,to)` over which mean, deviation and kurtosis are taken: every visible position that is no sink.
struct Population {
    u32 from, to;

    DEVICE bool has(u32 p) const { return p >= from && p < to; }
    DEVICE u32 size() const { return to - from; }
};

DEVICE Population population_of(const u32* span, u32 sinks) {
    return {smaller(span[0] > sinks ? span[0] : sinks, span[3]), span[3]};
}

// Sums both tables over a block's part of the population: parts `[b,h,blocks,2]`.
KERNEL(256, 1, lfps_sums, const float* tables, const double* factors, const u32* spans, double* parts, u32 capacity,
       u32 sinks) {
    wait_for_earlier();
    u32 head = blockIdx.z * gridDim.y + blockIdx.y;
    const u32* span = spans + 4 * blockIdx.z;
    Population population = population_of(span, sinks);
    Tables own = tables_of(tables, factors, span, head, capacity);
    double vertical = 0, slash = 0;
    for (u32 i = threadIdx.x; i < SCAN; i += 256) {
        u32 p = blockIdx.x * SCAN + i;
        if (!population.has(p)) continue;
        vertical += own.by_position(p), slash += own.by_distance(p);
    }
    vertical = block_sum(vertical), slash = block_sum(slash);
    double* to = parts + ((u64)head * gridDim.x + blockIdx.x) * 2;
    if (threadIdx.x == 0) to[0] = vertical, to[1] = slash;
}

// Sums the second and fourth powers of the deviations from the means, which follow from parts `[b,h,blocks,2]`: moments
// `[b,h,blocks,4]`.
KERNEL(256, 1, lfps_moments, const float* tables, const double* factors, const u32* spans, const double* parts,
       double* moments, u32 capacity, u32 sinks) {
    wait_for_earlier();
    u32 head = blockIdx.z * gridDim.y + blockIdx.y;
    const u32* span = spans + 4 * blockIdx.z;
    Population population = population_of(span, sinks);
    Tables own = tables_of(tables, factors, span, head, capacity);
    parts += (u64)head * gridDim.x * 2;
    double n = population.size(), sums[4] = {};
    double vertical = total_of(parts, gridDim.x, 2, 0) / n, slash = total_of(parts, gridDim.x, 2, 1) / n;
    for (u32 i = threadIdx.x; i < SCAN; i += 256) {
        u32 p = blockIdx.x * SCAN + i;
        if (!population.has(p)) continue;
        double v = own.by_position(p) - vertical, s = own.by_distance(p) - slash;
        v *= v, s *= s;
        sums[0] += v, sums[1] += v * v, sums[2] += s, sums[3] += s * s;
    }
    double* to = moments + ((u64)head * gridDim.x + blockIdx.x) * 4;
UNROLL
    for (u32 i = 0; i < 4; i++) {
        double sum = block_sum(sums[i]);
        if (threadIdx.x == 0) to[i] = sum;
    }
}

// Returns the kurtosis m4 / m2^2, or that of a normal distribution if all values are equal.
DEVICE double kurtosis(double m2, double m4) {
    double out = m4 / (m2 * m2);
    return out - out == 0 ? out : 3;
}

// Computes thresholds `[b,h,4]`: for each table, the value that an entry must exceed to make a candidate; then the
// means of the tables. The table with the larger kurtosis gets the lower threshold.
KERNEL(256, 1, lfps_thresholds, const double* constants, const u32* spans, const double* parts, const double* moments,
       double* thresholds, u32 blocks, u32 sinks) {
    wait_for_earlier();
    u32 head = blockIdx.z * gridDim.y + blockIdx.y;
    const u32* span = spans + 4 * blockIdx.z;
    double n = population_of(span, sinks).size(), means[2], powers[4];
    if (n == 0) n = 1;
UNROLL
    for (u32 i = 0; i < 2; i++) means[i] = total_of(parts + (u64)head * blocks * 2, blocks, 2, i) / n;
UNROLL
    for (u32 i = 0; i < 4; i++) powers[i] = total_of(moments + (u64)head * blocks * 4, blocks, 4, i) / n;
    if (threadIdx.x > 0) return;
    double alpha = constants[(u64)head * OF_HEAD + 2];
    double kv = kurtosis(powers[0], powers[1]), ks = kurtosis(powers[2], powers[3]), both = kv + ks;
    double of_vertical = alpha * 2 * ks / both, of_slash = alpha * 2 * kv / both;
    double* to = thresholds + (u64)head * 4;
    to[0] = means[0] + of_vertical * sqrt(powers[0]), to[1] = means[1] + of_slash * sqrt(powers[2]);
    to[2] = means[0], to[3] = means[1];
}

// ---- candidates ----

// Decides which of a block's SCORED positions are candidates of which query heads, and scores the candidates: scores
// `[b,h,capacity]` as sort keys, 0 for a position that is no candidate; counts `[b,h,blocks]`. Resets joins
// `[b,g,capacity]`. queries `[b,h,d]`. Position p is a candidate if, in either table, an entry of a position from p - 2
// to p + 1 exceeds the threshold, and in either table the entry of p exceeds the mean, or if p is among the last LOCAL
// positions. Four lanes share a product.
KERNEL_SHARED(256, 1, QUERY_BYTES, lfps_marks, const float* queries, const void* keys, const u32* spans,
       const u32* budgets, const float* tables, const double* factors, const double* thresholds, const u32* bypassed,
       u32* scores, u32* joins, u32* counts, u32* counters, float scale, u32 kind, u32 r, u32 d, u32 w,
       u32 capacity) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, q);  // `[r,w]`
    SHARED(u32, hot, SCORED + 3);
    SHARED(u32, wanted, SCORED);
    SHARED(u32, marks, SCORED);
    SHARED(u32, sums, 16 + 1);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * SCORED, p = start + threadIdx.x;
    const u32* span = spans + 4 * blockIdx.z;
    u32 from = span[0] + span[1], to = span[2], end = span[3], active = 0, warm = 0;
    bool exact = is_exact(span, budgets[blockIdx.z]);
    for (u32 a = 0; a < r && !exact; a++) active |= (u32)(bypassed[at * r + a] == 0) << a;
    for (u32 i = threadIdx.x; i < r * w; i += 256) {
        q[i] = i % w < d ? queries[((u64)at * r + i / w) * d + i % w] : 0.0f;
    }
    if (threadIdx.x < 17) sums[threadIdx.x] = 0;
    for (u32 i = threadIdx.x; i < SCORED + 3; i += 256) {
        // hot[i + 2] belongs to position i of the block.
        u32 other = start + i - 2, bits = 0;
        bool inside = start + i >= 2 && other >= from && other < to;
        for (u32 a = 0; a < r && inside; a++) {
            if ((active >> a & 1) == 0) continue;
            Tables own = tables_of(tables, factors, span, at * r + a, capacity);
            const double* limit = thresholds + (u64)(at * r + a) * 4;
            bits |= (u32)(own.by_position(other) > limit[0] || own.by_distance(other) > limit[1]) << a;
        }
        hot[i] = bits;
    }
    __syncthreads();
    u32 mine = 0, i = threadIdx.x;
    if (p >= from && p < to) {
        mine = hot[i] | hot[i + 1] | hot[i + 2] | hot[i + 3];
        for (u32 a = 0; a < r; a++) {
            if ((mine >> a & 1) == 0) continue;
            Tables own = tables_of(tables, factors, span, at * r + a, capacity);
            const double* limit = thresholds + (u64)(at * r + a) * 4;
            warm |= (u32)(own.by_position(p) > limit[2] || own.by_distance(p) > limit[3]) << a;
        }
        mine &= warm;
        if (p + LOCAL >= end) mine |= active;
    }
    marks[i] = mine;
    u32 to_list = sum_before(mine != 0);
    if (mine != 0) wanted[to_list] = i;
    for (u32 a = 0; a < r; a++) {
        u32 bit = mine >> a & 1, count = warp_sum(bit);
        if (lane() == 0 && count > 0) atomicAdd(&sums[a], count);
        if (bit == 0 && p < capacity) scores[((u64)at * r + a) * capacity + p] = 0;
    }
    u32 count = warp_sum((u32)(mine != 0));
    if (lane() == 0 && count > 0) atomicAdd(&sums[16], count);
    if (p < capacity) joins[(u64)at * capacity + p] = NONE;
    __syncthreads();
    if (i < r) counts[(u64)(at * r + i) * gridDim.x + blockIdx.x] = sums[i];
    if (i == 0 && sums[16] > 0) {
        u32 products = 0;
        for (u32 a = 0; a < r; a++) products += sums[a];
        atomicAdd(&counters[4 * at], sums[16]), atomicAdd(&counters[4 * at + 1], products);
    }
    // Whole warps stay in the loop, because group_products shuffles.
    for (u32 item = i / 4; item < (sums[16] + 63) / 64 * 64; item += 64) {
        bool there = item < sums[16];
        u32 place = there ? wanted[item] : 0, bits = there ? marks[place] : 0;
        float out[16];
        group_products(out, q, keys, (u64)at * capacity + start + place, there, kind, r, w);
UNROLL
        for (u32 a = 0; a < 16; a++) {
            if (i % 4 == 0 && (bits >> a & 1)) {
                scores[((u64)at * r + a) * capacity + start + place] = order_of(scale * out[a]);
            }
        }
    }
}

// ---- tables after the step ----

// Scores the attended positions that are no sinks, as exponents of base 2: scores `[b,h,room]`, in the order of the
// list followed by the window; minus infinity for a sink in the window. Each block has 64 positions; four lanes share a
// product.
KERNEL_SHARED(256, 1, QUERY_BYTES, lfps_attended, const float* queries, const void* keys, const u32* spans,
       const u32* lists, const u32* listed, float* scores, float scale, u32 kind, u32 r, u32 d, u32 w, u32 capacity,
       u32 most, u32 room, u32 sinks) {
    wait_for_earlier();
    DYNAMIC_SHARED(float, q);  // `[r,w]`
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, item = blockIdx.x * 64 + threadIdx.x / 4;
    Attended span = attended(spans, lists, listed, most);
    u32 n = span.total - span.sinks;
    if (blockIdx.x * 64 >= n) return;
    for (u32 i = threadIdx.x; i < r * w; i += 256) {
        q[i] = i % w < d ? queries[((u64)at * r + i / w) * d + i % w] * scale : 0.0f;
    }
    __syncthreads();
    u32 p = item < n ? span.position(span.sinks + item) : 0;
    float out[16];
    group_products(out, q, keys, (u64)at * capacity + p, item < n, kind, r, w);
UNROLL
    for (u32 a = 0; a < 16; a++) {
        if (a < r && threadIdx.x % 4 == 0 && item < n && item < room) {
            scores[((u64)at * r + a) * room + item] = p < sinks ? minus_infinity() : out[a];
        }
    }
}

// Decays the tables of each query head that was not bypassed, and adds the softmax weights of these scores to them. A
// common factor that becomes tiny is multiplied into the entries, as on the CPU.
KERNEL(256, 1, lfps_update, const float* scores, const double* constants, const u32* bypassed, const u32* spans,
       const u32* lists, const u32* listed, float* tables, double* factors, u32 r, u32 capacity, u32 most, u32 room) {
    wait_for_earlier();
    SHARED(float, tops, 8);
    u32 head = blockIdx.z * gridDim.y + blockIdx.y, at = head / r;
    const u32* span = spans + 4 * blockIdx.z;
    u32 count = smaller(listed[at], most), n = smaller(count + span[3] - span[2], room), t = span[3] - 1;
    if (bypassed[head]) return;
    scores += (u64)head * room, lists += (u64)at * most, tables += (u64)head * 2 * capacity;
    float top = minus_infinity();
    for (u32 i = threadIdx.x; i < n; i += 256) top = fmaxf(top, scores[i]);
    for (u32 step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    if (lane() == 0) tops[warp()] = top;
    __syncthreads();
    for (u32 i = 0; i < 8; i++) top = fmaxf(top, tops[i]);
    if (!finite(top)) return;
    double sum = 0;
    for (u32 i = threadIdx.x; i < n; i += 256) sum += (double)exp2f(scores[i] - top);
    sum = block_total(sum);
    const double* own = constants + (u64)head * OF_HEAD;
    double by_table[2] = {own[1], 1 - own[1]};
UNROLL
    for (u32 table = 0; table < 2; table++) {
        float* entries = tables + (u64)table * capacity;
        double factor = factors[2 * head + table] * own[0];
        if (factor < 1e-20) {
            for (u32 i = threadIdx.x; i < capacity; i += 256) entries[i] *= (float)factor;
            factor = 1;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += 256) {
            u32 p = i < count ? lists[i] : span[2] + (i - count);
            float weight = exp2f(scores[i] - top);
            if (weight > 0) entries[table == 0 ? p : t - p] += (float)(by_table[table] * ((double)weight / sum) / factor);
        }
        if (threadIdx.x == 0) factors[2 * head + table] = factor;
    }
}

// ---- counters ----

// Adds a step's figures to sums `[7]`, as `CudaIndex::tally` of src/method/cuda.rs says: as means over sequences and
// heads, the rows read, the products computed for ranking, and the query heads bypassed; as sums, the rows attended,
// the keys ranked but not attended, the choices of everything, and the query heads bypassed.
KERNEL(32, 1, lfps_tally, const u32* spans, const u32* listed, const u32* counters, double* sums, u32 b, u32 g, u32 r) {
    wait_for_earlier();
    double read = 0, products = 0, bypassed = 0, rows = 0, unlisted = 0, full = 0, heads = 0;
    for (u32 i = lane(); i < b * g; i += 32) {
        const u32* span = spans + 4 * (i / g);
        const u32* own = counters + 4 * i;
        double visible = span[3] - span[0];
        bool all = own[2] == r, exact = own[0] == 0;
        u32 attended = all ? span[1] : span[1] + listed[i] + span[3] - span[2];
        u32 ranked = all ? own[3] : exact ? 0 : own[0] - listed[i];
        read += (attended + ranked / 2.0) / visible;
        products += own[1] / (visible * r);
        bypassed += (double)own[2] / r;
        rows += attended, unlisted += ranked, full += own[2] == 0 && attended == visible, heads += own[2];
    }
    read = warp_sum(read), products = warp_sum(products), bypassed = warp_sum(bypassed);
    rows = warp_sum(rows), unlisted = warp_sum(unlisted), full = warp_sum(full), heads = warp_sum(heads);
    if (lane() > 0) return;
    sums[0] += read / (b * g), sums[1] += products / (b * g), sums[2] += bypassed / (b * g);
    sums[3] += rows, sums[4] += unlisted, sums[5] += full, sums[6] += heads;
}
