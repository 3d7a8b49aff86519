// The parts of a decoder layer other than its products and its attention, in f32, as in src/model/decoder.rs. The rows
// of all sequences are stored one sequence after the other.
#include "common.h"
#include "tensor.h"

// Looks up embeddings in a table `[vocab,width]` of type f32 (kind 0), f16 (1) or bf16 (2). Each block has a row.
KERNEL(256, 1, embed_rows, const u32* ids, const void* table, float* out, u32 kind, u32 width) {
    wait_for_earlier();
    u64 from = (u64)ids[blockIdx.x] * width, to = (u64)blockIdx.x * width;
    for (u32 i = threadIdx.x; i < width; i += 256) {
        float v;
        if (kind == 0) {
            v = ((const float*)table)[from + i];
        } else {
            u16 bits = ((const u16*)table)[from + i];
            v = kind == 1 ? widen<false>(bits) : widen<true>(bits);
        }
        out[to + i] = v;
    }
}

// RMS norm: out = x / sqrt(mean(x^2) + eps) * weight, with the mean in f64. Each block has a row.
KERNEL(256, 1, rms_rows, const float* x, const float* weight, float* out, u32 width, float eps) {
    wait_for_earlier();
    SHARED(float, factor, 1);
    x += (u64)blockIdx.x * width, out += (u64)blockIdx.x * width;
    double squares = 0;
    for (u32 i = threadIdx.x; i < width; i += 256) squares += (double)x[i] * (double)x[i];
    squares = block_sum(squares);
    if (threadIdx.x == 0) factor[0] = (float)(1 / sqrt(squares / width + (double)eps));
    __syncthreads();
    for (u32 i = threadIdx.x; i < width; i += 256) out[i] = x[i] * factor[0] * weight[i];
}

// Splits rows `[b m,(h + 2 g) d]` of the joined q, k and v projection into heads `[b,heads,m,d]`. Queries and keys pass
// an RMS norm if it has a weight `[d]`, and are written both as they are and rotated; an output that is null is
// skipped. cosines and sines are `[positions,d/2]`. Row i of a sequence is at position lens[sequence] - m + i, or, if
// lens is null, at first + i * apart. Each warp has one head's vector.
KERNEL(256, 1, split_heads, const float* flat, OPTIONAL const float* q_norm, OPTIONAL const float* k_norm,
       const float* cosines, const float* sines, OPTIONAL const u32* lens, float* q_pre, float* q_rope, float* k_pre,
       float* k_rope, float* v, u32 rows, u32 m, u32 h, u32 g, u32 d, u32 first, u32 apart, float eps) {
    wait_for_earlier();
    u64 vector = (u64)blockIdx.x * 8 + warp();
    u32 all = h + 2 * g;
    if (vector >= (u64)rows * all) return;
    u32 row = (u32)(vector / all), head = (u32)(vector % all), sequence = row / m, i = row % m;
    const float* x = flat + vector * d;
    u32 heads = head < h ? h : g, own = head < h ? head : head < h + g ? head - h : head - h - g;
    const float* norm = head < h ? q_norm : head < h + g ? k_norm : nullptr;
    float* pre = head < h ? q_pre : head < h + g ? k_pre : v;
    float* rope = head < h ? q_rope : head < h + g ? k_rope : nullptr;
    float factor = 1;
    if (norm) {
        double squares = 0;
        for (u32 c = lane(); c < d; c += 32) squares += (double)x[c] * (double)x[c];
        squares = warp_sum(squares);
        factor = (float)(1 / sqrt(squares / d + (double)eps));
    }
    u64 to = (((u64)sequence * heads + own) * m + i) * d;
    u32 position = lens ? lens[sequence] - m + i : first + i * apart, half = d / 2;
    const float* cosine = cosines + (u64)position * half;
    const float* sine = sines + (u64)position * half;
    for (u32 c = lane(); c < half; c += 32) {
        float low = norm ? x[c] * factor * norm[c] : x[c];
        float high = norm ? x[half + c] * factor * norm[half + c] : x[half + c];
        if (pre) pre[to + c] = low, pre[to + half + c] = high;
        if (rope) {
            rope[to + c] = low * cosine[c] - high * sine[c];
            rope[to + half + c] = high * cosine[c] + low * sine[c];
        }
    }
}

// Adds a bias `[width]` to every row.
KERNEL(256, 1, add_biases, float* rows, const float* bias, u64 n, u32 width) {
    wait_for_earlier();
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < n; i += (u64)gridDim.x * 256) rows[i] += bias[i % width];
}

// Computes out `[m,width]` = silu(gate) * up from rows `[m,2 width]`, in which the gate comes first.
KERNEL(256, 1, silu_rows, const float* gate_up, float* out, u64 n, u32 width) {
    wait_for_earlier();
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < n; i += (u64)gridDim.x * 256) {
        u64 at = i / width * 2 * width + i % width;
        float gate = gate_up[at];
        out[i] = gate / (1 + expf(-gate)) * gate_up[at + width];
    }
}

// Takes the rows of some heads: all `[b,heads,values]`, some `[b,n group,values]`. list `[n]` has numbers of groups of
// `group` heads. Each block has values of one head: y is its number in `some`, z the sequence.
KERNEL(256, 1, gather_heads, const float* all, const u32* list, float* some, u32 heads, u32 group, u32 values) {
    wait_for_earlier();
    u32 i = blockIdx.x * 256 + threadIdx.x, head = list[blockIdx.y / group] * group + blockIdx.y % group;
    if (i >= values) return;
    u64 from = ((u64)blockIdx.z * heads + head) * values, to = ((u64)blockIdx.z * gridDim.y + blockIdx.y) * values;
    some[to + i] = all[from + i];
}

// Puts the outputs of some heads, some `[rows,own]` with own = n group d, among those of all heads, all `[rows,width]`;
// list is as in gather_heads. Each block has values of one row.
KERNEL(256, 1, scatter_heads, const float* some, const u32* list, float* all, u32 group, u32 d, u32 own, u32 width) {
    wait_for_earlier();
    u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= own) return;
    u32 head = i / d, to = (list[head / group] * group + head % group) * d + i % d;
    all[(u64)blockIdx.y * width + to] = some[(u64)blockIdx.y * own + i];
}

// Cuts rows of w channels to their first d channels.
KERNEL(256, 1, narrow_rows, const float* rows, float* out, u64 n, u32 w, u32 d) {
    wait_for_earlier();
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < n; i += (u64)gridDim.x * 256) {
        out[i] = rows[i / d * w + i % d];
    }
}

// Merges attention over two disjoint sets of positions by their log-sum-exps: ours `[n,w]` with ours_lse `[n]`, others
// `[n,d + 1]` with their log-sum-exp last; out `[n,d]`. An empty set has zeros and a log-sum-exp of minus infinity; if
// both sets are empty, the output is zeros. A NaN in either set stays NaN. Each warp has a row.
KERNEL(256, 1, join_outputs, const float* ours, const float* ours_lse, const float* others, float* out, u32 n, u32 w,
       u32 d) {
    wait_for_earlier();
    u32 row = blockIdx.x * 8 + warp();
    if (row >= n) return;
    float mine = ours_lse[row], theirs = others[(u64)row * (d + 1) + d], top = fmaxf(fmaxf(mine, theirs), LOWEST);
    float a = expf(mine - top), b = expf(theirs - top), sum = a + b;
    for (u32 c = lane(); c < d; c += 32) {
        float v = a * ours[(u64)row * w + c] + b * others[(u64)row * (d + 1) + c];
        out[(u64)row * d + c] = sum == 0 ? v : v / sum;
    }
}

// Records `stage` if a value is not finite; the largest stage stays.
KERNEL(256, 1, note_not_finite, const float* x, u64 n, u32* noted, u32 stage) {
    wait_for_earlier();
    bool bad = false;
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < n; i += (u64)gridDim.x * 256) bad = bad || !finite(x[i]);
    if (bad) atomicMax(noted, stage);
}

// Adds figures of a step to `sum`. As means over sequences and KV heads: to sum[0] the share of visible rows that is
// read, and to sum[1] the share of keys that got an exact product. As sums: to sum[3] the rows attended, to sum[4] the
// keys that got a product but are not listed, and to sum[5] the KV heads that attend everything. spans and listed are
// as in attend.h. ranked `[b,g]`, or null, says how many keys got a product, including the listed ones; such a key that
// is not listed counts as half a row in sum[0].
KERNEL(32, 1, tally_rows, const u32* spans, OPTIONAL const u32* listed, OPTIONAL const u32* ranked, double* sum,
       u32 b, u32 g) {
    wait_for_earlier();
    double share = 0, exact = 0, rows = 0, unlisted = 0, full = 0;
    for (u32 i = lane(); i < b * g; i += 32) {
        const u32* span = spans + 4 * (i / g);
        u32 visible = span[3] - span[0], read = listed ? span[1] + listed[i] + span[3] - span[2] : visible;
        u32 keys = ranked ? ranked[i] : 0, others = keys > 0 ? keys - listed[i] : 0;
        share += (read + others / 2.0) / visible;
        exact += (double)keys / visible;
        rows += read, unlisted += others, full += read == visible;
    }
    share = warp_sum(share), exact = warp_sum(exact);
    rows = warp_sum(rows), unlisted = warp_sum(unlisted), full = warp_sum(full);
    if (lane() > 0) return;
    sum[0] += share / (b * g), sum[1] += exact / (b * g);
    sum[3] += rows, sum[4] += unlisted, sum[5] += full;
}
