// `nearest` of src/compute/reference.rs, under the contract of `Points::assign`: the argmax of the score x·c - ||c||²/2
// in f32; the lowest index wins a tie.
//
// A score is `-||c||²/2`, summed in f64 and rounded, plus one f32 multiply-add per channel, in order, so it depends
// only on the row and the centroid. `nearest_listed` computes all scores. `nearest_fast` (nearest_fast.cu) leaves up
// to four candidates per row, among which `settle` finds the same winner; rows that it cannot settle are listed for
// `nearest_listed`.
//
// Each head searches a range of centroids, whose first index and number are ranges[2 head] and ranges[2 head + 1]. If
// `scores` (the scores of the present codes) are given, a row changes its code only if a centroid scores strictly
// higher.
#include "common.h"

// Marks in place of candidates: for a row that needs all scores, and for a row that keeps its code.
constexpr u64 UNSETTLED = 0xffffull, KEEPS = ~0ull;

DEVICE float score(const float* x, const float* c, float bias, u32 w) {
    for (u32 k = 0; k < w; k += 4) {
        float4 a = *(const float4*)&x[k], b = *(const float4*)&c[k];
        bias = fmaf(a.x, b.x, bias);
        bias = fmaf(a.y, b.y, bias);
        bias = fmaf(a.z, b.z, bias);
        bias = fmaf(a.w, b.w, bias);
    }
    return bias;
}

// Computes -||c||²/2 of the centroids in range, one per warp: biases `[b,size]`.
KERNEL(256, 1, centroid_biases, const float* centroids, const u32* ranges, float* biases, u32 w, u32 size) {
    wait_for_earlier();
    u32 first = ranges[2 * blockIdx.y], count = ranges[2 * blockIdx.y + 1], i = blockIdx.x * 8 + warp();
    if (i >= count) return;
    u64 at = (u64)blockIdx.y * size + first + i;
    double sum = 0;
    for (u32 k = lane(); k < w; k += 32) {
        double v = centroids[at * w + k];
        sum += v * v;
    }
    sum = warp_sum(sum);
    if (lane() == 0) biases[at] = (float)(sum * -0.5);
}

// Scores 128 rows per block against the centroids in range, 128 centroids at a time; a thread has 8 x 8 scores. The
// rows are the first listed[head] rows of `list`, or all n rows if list is null. next `[b,n]` gets their codes.
KERNEL(256, 2, nearest_listed, const float* x, const float* centroids, const float* biases, const u32* ranges,
       OPTIONAL const u32* list, OPTIONAL const u32* listed, OPTIONAL float* scores, const u32* codes, u32* next,
       u32 n, u32 w, u32 size) {
    wait_for_earlier();
    SHARED(float, left, 16 * 132);
    SHARED(float, right, 16 * 132);
    u32 head = blockIdx.y, first = ranges[2 * head], count = ranges[2 * head + 1];
    u32 total = list ? listed[head] : n, start = blockIdx.x * 128;
    if (start >= total) return;
    x += (u64)head * n * w;
    centroids += ((u64)head * size + first) * w;
    biases += (u64)head * size + first;
    if (list) list += (u64)head * n;
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;

    // Thread t loads half of 16 channels per slab, of row t / 2 and of centroid t / 2 of the tile.
    u32 loads = threadIdx.x / 2, half = threadIdx.x % 2 * 8;
    u32 row = smaller(start + loads, total - 1);
    const float* from = x + (u64)(list ? list[row] : row) * w + half;
    float best[8];
    u32 code[8];
UNROLL
    for (u32 i = 0; i < 8; i++) {
        best[i] = minus_infinity();
        code[i] = 0xffffffffu;
    }
    for (u32 tile = 0; tile < count; tile += 128) {
        float sum[8][8];
UNROLL
        for (u32 j = 0; j < 8; j++) {
            u32 c = tile + j / 4 * 64 + tx * 4 + j % 4;
            float bias = c < count ? biases[c] : minus_infinity();
UNROLL
            for (u32 i = 0; i < 8; i++) sum[i][j] = bias;
        }
        const float* against = centroids + (u64)smaller(tile + loads, count - 1) * w + half;
        for (u32 slab = 0; slab < w; slab += 16) {
            float4 a[2] = {*(const float4*)&from[slab], *(const float4*)&from[slab + 4]};
            float4 b[2] = {*(const float4*)&against[slab], *(const float4*)&against[slab + 4]};
            __syncthreads();
UNROLL
            for (u32 i = 0; i < 2; i++) {
                u32 to = (half + i * 4) * 132 + loads;
                left[to] = a[i].x, left[to + 132] = a[i].y, left[to + 264] = a[i].z, left[to + 396] = a[i].w;
                right[to] = b[i].x, right[to + 132] = b[i].y, right[to + 264] = b[i].z, right[to + 396] = b[i].w;
            }
            __syncthreads();
            for (u32 k = 0; k < 16; k++) {
                float4 l[2] = {*(const float4*)&left[k * 132 + ty * 4], *(const float4*)&left[k * 132 + 64 + ty * 4]};
                float4 r[2] = {*(const float4*)&right[k * 132 + tx * 4],
                               *(const float4*)&right[k * 132 + 64 + tx * 4]};
                float as[8] = {l[0].x, l[0].y, l[0].z, l[0].w, l[1].x, l[1].y, l[1].z, l[1].w};
                float bs[8] = {r[0].x, r[0].y, r[0].z, r[0].w, r[1].x, r[1].y, r[1].z, r[1].w};
UNROLL
                for (u32 i = 0; i < 8; i++) {
UNROLL
                    for (u32 j = 0; j < 8; j++) sum[i][j] = fmaf(as[i], bs[j], sum[i][j]);
                }
            }
        }
        // A thread meets its centroids in ascending order, so the first of several equal scores wins.
UNROLL
        for (u32 j = 0; j < 8; j++) {
UNROLL
            for (u32 i = 0; i < 8; i++) {
                if (sum[i][j] > best[i]) {
                    best[i] = sum[i][j];
                    code[i] = tile + j / 4 * 64 + tx * 4 + j % 4;
                }
            }
        }
    }
UNROLL
    for (u32 i = 0; i < 8; i++) {
        for (u32 step = 8; step > 0; step /= 2) {
            float other = __shfl_xor_sync(ALL_LANES, best[i], step);
            u32 its = __shfl_xor_sync(ALL_LANES, code[i], step);
            if (other > best[i] || (other == best[i] && its < code[i])) {
                best[i] = other;
                code[i] = its;
            }
        }
        u32 place = start + i / 4 * 64 + ty * 4 + i % 4;
        if (tx != 0 || place >= total) continue;
        u64 at = (u64)head * n + (list ? list[place] : place);
        bool found = code[i] != 0xffffffffu;
        if (!scores) {
            next[at] = found ? first + code[i] : first;
        } else if (found && best[i] > scores[at]) {
            next[at] = first + code[i];
            scores[at] = best[i];
        } else {
            next[at] = codes[at];
        }
    }
}

// Scores the candidates of each row in f32 and lists the rows that need all scores: list `[b,n]`, listed `[b]`, zeroed
// before. candidates `[b,n]`: four 16-bit numbers within the range; 0xffff means none.
KERNEL(256, 1, settle, const float* x, const float* centroids, const float* biases, const u32* ranges,
       const u64* candidates, OPTIONAL float* scores, const u32* codes, u32* next, u32* list, u32* listed, u32 n,
       u32 w, u32 size) {
    wait_for_earlier();
    u32 row = blockIdx.x * 256 + threadIdx.x, head = blockIdx.y, first = ranges[2 * head];
    if (row >= n) return;
    u64 at = (u64)head * n + row, of = candidates[at];
    if (of == UNSETTLED) {
        list[(u64)head * n + atomicAdd(&listed[head], 1)] = row;
        return;
    }
    u32 code = (u32)(of & 0xffff);
    if (!scores && (of >> 16 & 0xffff) == 0xffff) {
        next[at] = first + code;
        return;
    }
    float best = minus_infinity();
    code = 0xffff;
    for (u32 i = 0; i < 4; i++) {
        u32 other = (u32)(of >> (16 * i) & 0xffff);
        if (other == 0xffff) break;
        u64 c = (u64)head * size + first + other;
        float s = score(x + at * w, centroids + c * w, biases[c], w);
        if (s > best || (s == best && other < code)) {
            best = s;
            code = other;
        }
    }
    if (!scores) {
        next[at] = first + code;
    } else if (code != 0xffff && best > scores[at]) {
        next[at] = first + code;
        scores[at] = best;
    } else {
        next[at] = codes[at];
    }
}

// Assigns all rows to centroid 0: codes and scores.
KERNEL(256, 1, start_rows, const float* x, const float* centroids, const float* biases, u32* codes, float* scores,
       u32 n, u32 w, u32 size) {
    wait_for_earlier();
    u32 row = blockIdx.x * 256 + threadIdx.x;
    if (row >= n) return;
    u64 at = (u64)blockIdx.y * n + row, c = (u64)blockIdx.y * size;
    codes[at] = 0;
    scores[at] = score(x + at * w, centroids + c * w, biases[c], w);
}

// Replaces codes by `next`, and updates the distances of rows whose code changed, or of every row if `all` is set; each
// warp has a row. changed `[b]` becomes 1 if a code of the head changed.
KERNEL(256, 1, take_over, const float* x, const float* centroids, const u32* next, u32* codes, float* distances,
       u32* changed, u32 n, u32 w, u32 size, u32 all) {
    wait_for_earlier();
    u32 row = blockIdx.x * 8 + warp();
    if (row >= n) return;
    u64 at = (u64)blockIdx.y * n + row;
    u32 code = next[at];
    bool differs = code != codes[at];
    if (!differs && !all) return;
    const float* a = x + at * w;
    const float* c = centroids + ((u64)blockIdx.y * size + code) * w;
    float sum = 0;
    for (u32 k = lane() * 4; k < w; k += 128) {
        float4 p = *(const float4*)&a[k], q = *(const float4*)&c[k];
        float d0 = p.x - q.x, d1 = p.y - q.y, d2 = p.z - q.z, d3 = p.w - q.w;
        sum = fmaf(d3, d3, fmaf(d2, d2, fmaf(d1, d1, fmaf(d0, d0, sum))));
    }
    sum = warp_sum(sum);
    if (lane() > 0) return;
    distances[at] = sum;
    if (differs) {
        codes[at] = code;
        atomicMax(&changed[blockIdx.y], 1);
    }
}
