// `attention` of src/compute/reference.rs for one token over 16-bit rows, on the tensor cores; see attend.h. Keys and
// values are `[b,g,capacity,D]`. Softmax weights are rounded to the rows' type before the product with the values.
#include "attend.h"

template <bool BF, u32 D>
struct PlainRows {
    static constexpr bool BFLOAT = BF, CENTERED = false;
    const u16 *keys, *values;

    DEVICE float weight(u32) const { return 1; }
    DEVICE float center(u32) const { return 0; }

    DEVICE void fill_keys(u16* to, const Attended& span, u32 start, u32 end) const { fill(to, keys, span, start, end); }
    DEVICE void fill_values(u16* to, const Attended& span, u32 start, u32 end) const { fill(to, values, span, start, end); }

    // Starts copying a tile. Beyond the last item it copies the last item again; score_items gives these copies no
    // weight. All positions are read before the first copy, which no load passes.
    DEVICE static void fill(u16* to, const u16* rows, const Attended& span, u32 start, u32 end) {
        constexpr u32 COPIES = ITEMS * (D / 8) / 128;
        u32 positions[COPIES];
UNROLL
        for (u32 n = 0; n < COPIES; n++) {
            positions[n] = span.position(smaller(start + (n * 128 + threadIdx.x) / (D / 8), end - 1));
        }
UNROLL
        for (u32 n = 0; n < COPIES; n++) {
            u32 i = n * 128 + threadIdx.x, row = i / (D / 8), eighth = i % (D / 8);
            copy_16_bytes(to + row * PITCH<D> + eighth * 8, rows + (u64)positions[n] * D + eighth * 8);
        }
    }
};

#define ATTEND_PARAMETERS                                                                                       \
    const float *queries, const u16 *keys, const u16 *values, const u32 *spans, OPTIONAL const u32 *lists,      \
        OPTIONAL const u32 *listed, float *outs, float *sums, float scale, u32 r, u32 capacity, u32 most
#define ATTEND(BF, D)                                                                                           \
    DYNAMIC_SHARED(u16, shared);                                                                                \
    u64 first = (u64)(blockIdx.z * gridDim.y + blockIdx.y) * capacity * D;                                      \
    attend<PlainRows<BF, D>, D>({keys + first, values + first}, shared, queries, spans, lists, listed, outs,    \
                                sums, scale, r, most)

KERNEL_SHARED(128, 2, ATTEND_BYTES(64), attend_half_64, ATTEND_PARAMETERS) { wait_for_earlier(); ATTEND(false, 64); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(80), attend_half_80, ATTEND_PARAMETERS) { wait_for_earlier(); ATTEND(false, 80); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(96), attend_half_96, ATTEND_PARAMETERS) { wait_for_earlier(); ATTEND(false, 96); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(128), attend_half_128, ATTEND_PARAMETERS) { wait_for_earlier(); ATTEND(false, 128); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(64), attend_bfloat_64, ATTEND_PARAMETERS) { wait_for_earlier(); ATTEND(true, 64); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(80), attend_bfloat_80, ATTEND_PARAMETERS) { wait_for_earlier(); ATTEND(true, 80); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(96), attend_bfloat_96, ATTEND_PARAMETERS) { wait_for_earlier(); ATTEND(true, 96); }
KERNEL_SHARED(128, 2, ATTEND_BYTES(128), attend_bfloat_128, ATTEND_PARAMETERS) { wait_for_earlier(); ATTEND(true, 128); }

// Merges partial results by their log-sum-exps: out `[b,h,w]`, lse `[b,h]` in natural units; zeros and minus infinity
// if nothing was attended. The output is NaN if a score is NaN or infinity, or if all are minus infinity. Each block has
// a query head. The weights of 256 parts at a time go to shared memory; then each warp adds up every eighth of these
// parts, and each lane up to four of the w <= 128 channels.
KERNEL(256, 2, merge_parts, const float* outs, const float* sums, float* out, float* lse, u32 parts, u32 r, u32 w) {
    wait_for_earlier();
    SHARED(float, weights, 256);
    SHARED(float, warps, 2 * 8);
    SHARED(float, outputs, 8 * 128);
    u64 first = (u64)(blockIdx.x / r) * parts * r + blockIdx.x % r;
    float top = minus_infinity(), sum = 0, own[4] = {};
    for (u32 p = threadIdx.x; p < parts; p += 256) top = fmaxf(top, sums[2 * (first + (u64)p * r)]);
    for (u32 step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    if (lane() == 0) warps[warp()] = top;
    __syncthreads();
    for (u32 i = 0; i < 8; i++) top = fmaxf(top, warps[i]);
    float shift = fmaxf(top, LOWEST);
    for (u32 start = 0; start < parts; start += 256) {
        u32 p = start + threadIdx.x, end = smaller(256, parts - start);
        if (p < parts) {
            const float* part = sums + 2 * (first + (u64)p * r);
            float weight = exp2f(part[0] - shift);
            sum += weight * part[1];
            weights[threadIdx.x] = weight;
        }
        __syncthreads();
        for (u32 i = warp(); i < end; i += 8) {
            const float* from = outs + (first + (u64)(start + i) * r) * w;
UNROLL
            for (u32 c = 0; c < 4; c++) {
                if (lane() + 32 * c < w) own[c] += weights[i] * from[lane() + 32 * c];
            }
        }
        __syncthreads();
    }
    sum = warp_sum(sum);
    if (lane() == 0) warps[8 + warp()] = sum;
UNROLL
    for (u32 c = 0; c < 4; c++) outputs[warp() * 128 + lane() + 32 * c] = own[c];
    __syncthreads();
    sum = 0;
    for (u32 i = 0; i < 8; i++) sum += warps[8 + i];
    if (threadIdx.x < w) {
        float value = 0;
        for (u32 i = 0; i < 8; i++) value += outputs[i * 128 + threadIdx.x];
        out[(u64)blockIdx.x * w + threadIdx.x] = top < LOWEST ? 0.0f : value / sum;
    }
    if (threadIdx.x == 0) lse[blockIdx.x] = (top + log2f(sum)) * 0.693147180559945f;
}

// Replaces the outputs of the query heads that are set in `marked` `[b,h]`: their attention to the sinks is merged with
// an estimate for all other visible rows, which is the mean of the values of these rows with the log-sum-exp rest
// `[b,h]`. sums `[b,g,2,d]` are the sums of the keys and of the values of the visible positions from `sinks` on.
// queries `[b,h,w]`, keys and values `[b,g,capacity,w]`. Each block has a query head.
KERNEL(128, 1, join_rest, const float* queries, const void* keys, const void* values, const u32* spans,
       const u32* marked, const float* rest, const double* sums, float* out, float* lse, float scale, u32 kind, u32 g,
       u32 r, u32 d, u32 w, u32 capacity, u32 sinks) {
    wait_for_earlier();
    u32 head = blockIdx.x, at = head / r, c = threadIdx.x;
    if (marked[head] == 0) return;
    const u32* span = spans + 4 * (at / g);
    const float* q = queries + (u64)head * w;
    float top = LOWEST, sum = 0, own = 0;
    for (u32 p = span[0]; p < span[0] + span[1]; p++) {
        u64 row = ((u64)at * capacity + p) * w;
        float s = 0;
        for (u32 i = lane(); i < w; i += 32) s = fmaf(q[i], load_one(keys, row + i, kind), s);
        s = warp_sum(s) * scale;
        float most = fmaxf(top, s), keep = exp2f(top - most), weight = exp2f(s - most);
        sum = sum * keep + weight, top = most;
        if (c < w) own = own * keep + weight * load_one(values, row + c, kind);
    }
    u32 start = span[0] > sinks ? span[0] : sinks;
    double mine = (top + log2f(sum)) * 0.6931471805599453, others = rest[head], most = fmax(mine, others);
    double of_mine = exp(mine - most), of_others = exp(others - most), both = of_mine + of_others;
    if (c < d) {
        float mean = (float)(sums[((u64)at * 2 + 1) * d + c] / (span[3] - start));
        out[(u64)head * w + c] = (float)((of_mine * (own / sum) + of_others * mean) / both);
    }
    if (c == 0) lse[head] = (float)(most + log(both));
}
