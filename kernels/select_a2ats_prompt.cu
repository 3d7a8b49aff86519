// Encoding of keys: the code is the argmin over codewords c of ||z - c||² with z = k L - mean, in f32; the lower
// codeword wins a tie. A single key per head uses `whiten_last`, `codeword_scores` and `encode_last`. A prompt uses the
// other kernels below and gets the same codes: f16 products on the tensor cores leave a few candidates per row (see
// nearest_fast.cu), and the exact scores of `codeword_scores` decide among them. A row with too many candidates is
// scored against all codewords.
//
// Rows are `[b,g,n,w]`, where w is d rounded up to a multiple of 16; codebook `[g,M,w]` f16, norms `[g,M]` ||c||²/2.
// blockIdx.y is the KV head, blockIdx.z the sequence.
#include "common.h"
#include "scan.h"
#include "tensor.h"

// Channels that are summed in order into one partial sum; the partial sums are then added in order.
constexpr u32 CHAIN = 32;

// Computes z of one key per head: keys `[b,g,d]`, factors L `[g,d,d]`, means `[g,d]`; out `[b,g,d]`, d <= 128. Each
// block has 64 channels, each thread a partial sum.
KERNEL(256, 1, whiten_last, const float* keys, const float* factors, const float* means, float* out, u32 d) {
    wait_for_earlier();
    SHARED(float, chains, 4 * 64);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, chain = threadIdx.x / 64, i = blockIdx.x * 64 + threadIdx.x % 64;
    factors += (u64)blockIdx.y * d * d;
    keys += (u64)at * d;
    float sum = 0;
    for (u32 j = chain * CHAIN; j < smaller(d, (chain + 1) * CHAIN) && i < d; j++) {
        sum = fmaf(keys[j], factors[j * d + i], sum);
    }
    chains[threadIdx.x] = sum;
    __syncthreads();
    if (chain > 0 || i >= d) return;
    for (u32 c = 1; c * CHAIN < d; c++) sum += chains[c * 64 + threadIdx.x];
    out[at * d + i] = sum - means[blockIdx.y * d + i];
}

// Computes z of n rows, from row `first` on, of keys `[b,g,m,d]`: out `[b,g,n,w]`. A block computes 64 rows x 64
// channels, a thread 4 x 4 of them. blockIdx.z is the tile of channels plus ceil(w / 64) times the sequence.
KERNEL(256, 2, whiten_keys, const float* keys, const float* factors, const float* means, float* out, u32 first, u32 n,
       u32 m, u32 d, u32 w) {
    wait_for_earlier();
    SHARED(float, rows, 16 * 68);
    SHARED(float, columns, 16 * 64);
    u32 across = (w + 63) / 64, at = blockIdx.z / across * gridDim.y + blockIdx.y;
    u32 row_at = blockIdx.x * 64, column_at = blockIdx.z % across * 64;
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    keys += ((u64)at * m + first) * d;
    factors += (u64)blockIdx.y * d * d;
    out += (u64)at * n * w;
    float total[4][4] = {}, sum[4][4] = {};
    for (u32 start = 0; start < d; start += 16) {
        for (u32 i = threadIdx.x; i < 16 * 64; i += 256) {
            u32 row = row_at + i / 16, k = start + i % 16;
            rows[i % 16 * 68 + i / 16] = row < n && k < d ? keys[(u64)row * d + k] : 0.0f;
            u32 from = start + i / 64, to = column_at + i % 64;
            columns[i] = from < d && to < d ? factors[from * d + to] : 0.0f;
        }
        __syncthreads();
        for (u32 k = 0; k < smaller(16, d - start); k++) {
            float4 a = *(const float4*)&rows[k * 68 + ty * 4], b = *(const float4*)&columns[k * 64 + tx * 4];
            float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
UNROLL
            for (u32 i = 0; i < 4; i++) {
UNROLL
                for (u32 j = 0; j < 4; j++) sum[i][j] = fmaf(as[i], bs[j], sum[i][j]);
            }
        }
        __syncthreads();
        if ((start + 16) % CHAIN > 0 && start + 16 < d) continue;
UNROLL
        for (u32 i = 0; i < 4; i++) {
UNROLL
            for (u32 j = 0; j < 4; j++) total[i][j] = start < CHAIN ? sum[i][j] : total[i][j] + sum[i][j], sum[i][j] = 0;
        }
    }
UNROLL
    for (u32 i = 0; i < 4; i++) {
UNROLL
        for (u32 j = 0; j < 4; j++) {
            u32 row = row_at + ty * 4 + i, channel = column_at + tx * 4 + j;
            if (row >= n || channel >= w) continue;
            out[(u64)row * w + channel] = channel < d ? total[i][j] - means[blockIdx.y * d + channel] : 0.0f;
        }
    }
}

// Finds, for each row, the codewords that may be the nearest: candidates `[b,g,n]` in the form that `settle` reads.
// rows and norms are those of halve_rows. biases `[g,padded]` are -||c||²/2, and minus infinity beyond the last
// codeword; bounds `[g,2]` hold the largest ||c|| and the largest ||c||²/2. w <= 128.
KERNEL_SHARED(256, 2, SEARCH_BYTES(2), nearest_codewords, const u16* rows, const float* norms, const u32* largest,
       const u16* codebook, const float* biases, const float* bounds, u64* candidates, u32 n, u32 w, u32 size,
       u32 padded) {
    wait_for_earlier();
    DYNAMIC_SHARED(u16, shared);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * TILE;
    float scale = half_scale(largest[at]);
    FoundOfRows found = search(shared, rows + (u64)at * n * w, codebook + (u64)blockIdx.y * size * w,
                               biases + (u64)blockIdx.y * padded, scale, start, n, size, size, w);
    u32 i = threadIdx.x, row = start + i;
    if (i >= TILE || row >= n) return;
    // Codewords are stored in f16, so they have no rounding error.
    const float* of = bounds + 2 * blockIdx.y;
    float bound = bound_of(norms + 2 * ((u64)at * n + row), of[0], 0, of[1] * scale, w);
    candidates[(u64)at * n + row] = candidates_of(found.best + i, found.second + i, found.code + i, bound);
}

// Returns a sort key of a codeword: the better of two codewords has the larger sort key.
DEVICE u64 code_order(float score, u32 code) { return (u64)order_of(score) << 32 | (0xffffffffu - code); }

// Computes z·c in the same order as `codeword_scores`: four partial sums, each of every fourth run of eight channels.
DEVICE float codeword_score(const float* z, const u16* codeword, u32 d) {
    float sums[4] = {};
    for (u32 k = 0; k < d; k += 8) {
        float sum = 0;
UNROLL
        for (u32 i = 0; i < 4; i++) {
            if (k / 8 % 4 == i) sum = sums[i];
        }
UNROLL
        for (u32 i = 0; i < 8; i++) sum = fmaf(widen<false>(codeword[k + i]), z[k + i], sum);
UNROLL
        for (u32 i = 0; i < 4; i++) {
            if (k / 8 % 4 == i) sums[i] = sum;
        }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Encodes rows, given their candidates, into codes `[b,g,capacity]`: of the last m positions of lens `[b]`, the rows
// from `first` on. Rows that need all scores are listed in list `[b,g,n]` and listed `[b,g]`, zeroed before.
KERNEL(256, 1, settle_codes, const float* z, const u16* codebook, const float* norms, const u64* candidates,
       const u32* lens, u16* codes, u32* list, u32* listed, u32 first, u32 n, u32 m, u32 size, u32 d, u32 w,
       u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, row = blockIdx.x * 256 + threadIdx.x;
    if (row >= n) return;
    u64 of = candidates[(u64)at * n + row];
    if (of == UNSETTLED) {
        list[(u64)at * n + atomicAdd(&listed[at], 1)] = row;
        return;
    }
    u32 code = (u32)(of & 0xffff);
    if ((of >> 16 & 0xffff) != 0xffff) {
        u64 best = 0;
        for (u32 i = 0; i < 4; i++) {
            u32 c = (u32)(of >> (16 * i) & 0xffff);
            if (c == 0xffff) break;
            const u16* codeword = codebook + ((u64)blockIdx.y * size + c) * w;
            float score = codeword_score(z + ((u64)at * n + row) * w, codeword, d) - norms[blockIdx.y * size + c];
            u64 order = code_order(score, c);
            if (order > best) best = order;
        }
        code = 0xffffffffu - (u32)best;
    }
    codes[(u64)at * capacity + lens[blockIdx.z] - m + first + row] = (u16)code;
}

// Encodes the listed rows by their scores with all codewords, eight rows per block.
KERNEL(256, 2, encode_listed, const float* z, const u16* codebook, const float* norms, const u32* list,
       const u32* listed, const u32* lens, u16* codes, u32 first, u32 n, u32 m, u32 size, u32 d, u32 w,
       u32 capacity) {
    wait_for_earlier();
    SHARED(float, rows, 8 * 128);
    SHARED(u64, best, 8 * 8);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, total = listed[at], start = blockIdx.x * 8;
    if (start >= total) return;
    list += (u64)at * n + start;
    u32 count = smaller(8, total - start);
    for (u32 i = threadIdx.x; i < count * d; i += 256) {
        rows[i] = z[((u64)at * n + list[i / d]) * w + i % d];
    }
    __syncthreads();
    u64 mine[8] = {};
    codebook += (u64)blockIdx.y * size * w;
    for (u32 tile = 0; tile < size; tile += 64) {
        u32 c = tile + threadIdx.x / 4;
        float scores[8];
        codeword_products<8>(scores, c < size ? codebook + (u64)c * w : 0, rows, count, d);
        if (c >= size) continue;
UNROLL
        for (u32 a = 0; a < 8; a++) {
            u64 order = code_order(scores[a] - norms[blockIdx.y * size + c], c);
            if (order > mine[a]) mine[a] = order;
        }
    }
UNROLL
    for (u32 a = 0; a < 8; a++) {
        for (u32 step = 16; step > 0; step /= 2) {
            u64 other = __shfl_xor_sync(ALL_LANES, mine[a], step);
            if (other > mine[a]) mine[a] = other;
        }
        if (lane() == 0) best[warp() * 8 + a] = mine[a];
    }
    __syncthreads();
    if (threadIdx.x >= count) return;
    u64 most = best[threadIdx.x];
    for (u32 i = 1; i < 8; i++) {
        if (best[i * 8 + threadIdx.x] > most) most = best[i * 8 + threadIdx.x];
    }
    u32 position = lens[blockIdx.z] - m + first + list[threadIdx.x];
    codes[(u64)at * capacity + position] = (u16)(0xffffffffu - (u32)most);
}
