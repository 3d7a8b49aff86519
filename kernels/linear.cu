// Products with checkpoint weights: out = x W^T + bias, or out += x W^T + bias. x `[m,k]`, W `[n,k]` as the checkpoint
// stores it, bias `[n]` or null, out `[m,n]`. The contract is src/compute/linear.rs; sums are f32.
#include "common.h"
#include "tensor.h"

// ---- 16-bit inputs, on the tensor cores ----

// Rows of x, and of W, per tile; channels per slab; slabs in flight; elements from one row of a slab to the next, which
// is an odd number of 16-byte pieces.
constexpr u32 LINEAR_TILE = 128, LINEAR_SLAB = 32, LINEAR_STAGES = 4, LINEAR_PITCH = LINEAR_SLAB + 8;
// Bytes of dynamic shared memory: the slabs of both matrices in flight.
#define LINEAR_BYTES (4 * 2 * 128 * (32 + 8) * 2)
// Tiles of x that neighbouring blocks share, so that the tiles they read stay in the L2 cache.
constexpr u32 LINEAR_BAND = 16;

// The part of each slab of a matrix `[n,k]` that one thread copies: eight channels of two rows, from row `first` on.
// Beyond the last row it copies the last row again; beyond the last channel it fills in zeros.
struct SlabCopy {
    const u16* rows[2];
    u32 to, channel, k;

    DEVICE SlabCopy(const u16* matrix, u32 first, u32 n, u32 width) {
        u32 row = threadIdx.x / 4;
        channel = threadIdx.x % 4 * 8;
        to = row * LINEAR_PITCH + channel;
        k = width;
        for (u32 i = 0; i < 2; i++) rows[i] = matrix + (u64)smaller(first + row + i * 64, n - 1) * k;
    }

    DEVICE void start(u16* slab, u32 number) const {
        u32 at = number * LINEAR_SLAB + channel;
        bool there = at < k;
UNROLL
        for (u32 i = 0; i < 2; i++) {
            copy_16_bytes_if(there, slab + to + i * 64 * LINEAR_PITCH, rows[i] + (there ? at : 0));
        }
    }
};

DEVICE void leave_sum(float* out, const float* bias, u32 row, u32 column, u32 n, float sum, u32 accumulate) {
    u64 at = (u64)row * n + column;
    if (bias) sum += bias[column];
    out[at] = accumulate ? out[at] + sum : sum;
}

// Computes a tile of 128 x 128 per block, 32 rows x 64 columns per warp. In sum[i][j], thread 4 g + t holds rows
// 16 i + g and 16 i + g + 8, and columns 8 j + 2 t and 8 j + 2 t + 1.
template <bool BFLOAT>
DEVICE void linear_tile(u16* slabs, const u16* x, const u16* weight, const float* bias, float* out, u32 m, u32 n,
                        u32 k, u32 accumulate) {
    constexpr u32 HALF = LINEAR_TILE * LINEAR_PITCH;
    static_assert(LINEAR_BYTES == LINEAR_STAGES * 2 * HALF * sizeof(u16), "all slabs");
    u32 tiles_m = (m + LINEAR_TILE - 1) / LINEAR_TILE, tiles_n = (n + LINEAR_TILE - 1) / LINEAR_TILE;
    u32 band = blockIdx.x / (LINEAR_BAND * tiles_n) * LINEAR_BAND, place = blockIdx.x % (LINEAR_BAND * tiles_n);
    u32 high = smaller(LINEAR_BAND, tiles_m - band);
    u32 row_at = (band + place % high) * LINEAR_TILE, column_at = place / high * LINEAR_TILE;
    SlabCopy rows(x, row_at, m, k), columns(weight, column_at, n, k);
    u32 count = (k + LINEAR_SLAB - 1) / LINEAR_SLAB;
    for (u32 slab = 0; slab < LINEAR_STAGES - 1; slab++) {
        u16* to = slabs + slab * 2 * HALF;
        if (slab < count) rows.start(to, slab), columns.start(to + HALF, slab);
        end_of_copies();
    }
    float sum[2][8][4] = {};
    u32 warp_row = warp() % 4 * 32, warp_column = warp() / 4 * 64;
    for (u32 slab = 0; slab < count; slab++) {
        wait_for_copies<LINEAR_STAGES - 2>();
        // The slab has arrived for all threads, and all have finished the previous one, whose space is free again.
        __syncthreads();
        u32 next = slab + LINEAR_STAGES - 1;
        u16* to = slabs + next % LINEAR_STAGES * 2 * HALF;
        if (next < count) rows.start(to, next), columns.start(to + HALF, next);
        end_of_copies();
        const u16* from = slabs + slab % LINEAR_STAGES * 2 * HALF;
UNROLL
        for (u32 step = 0; step < LINEAR_SLAB; step += 16) {
            u32 a[2][4];
UNROLL
            for (u32 i = 0; i < 2; i++) {
                u32 row = warp_row + i * 16 + lane() % 16;
                load_matrices(a[i], from + row * LINEAR_PITCH + step + lane() / 16 * 8);
            }
UNROLL
            for (u32 j = 0; j < 8; j += 2) {
                u32 b[4], row = warp_column + j * 8 + lane() % 8 + lane() / 16 * 8;
                load_matrices(b, from + HALF + row * LINEAR_PITCH + step + lane() / 8 % 2 * 8);
UNROLL
                for (u32 i = 0; i < 2; i++) {
                    multiply_add<BFLOAT>(sum[i][j], a[i], b[0], b[1]);
                    multiply_add<BFLOAT>(sum[i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
    wait_for_copies<0>();
UNROLL
    for (u32 i = 0; i < 2; i++) {
UNROLL
        for (u32 j = 0; j < 8; j++) {
UNROLL
            for (u32 e = 0; e < 4; e++) {
                u32 row = row_at + warp_row + i * 16 + lane() / 4 + e / 2 * 8;
                u32 column = column_at + warp_column + j * 8 + lane() % 4 * 2 + e % 2;
                if (row < m && column < n) leave_sum(out, bias, row, column, n, sum[i][j][e], accumulate);
            }
        }
    }
}

#define LINEAR_PARAMETERS(X, W)                                                                                 \
    const X *x, const W *weight, OPTIONAL const float *bias, float *out, u32 m, u32 n, u32 k, u32 accumulate

// k must be a multiple of 8.
KERNEL_SHARED(256, 2, LINEAR_BYTES, linear_half, LINEAR_PARAMETERS(u16, u16)) {
    wait_for_earlier();
    DYNAMIC_SHARED(u16, slabs);
    linear_tile<false>(slabs, x, weight, bias, out, m, n, k, accumulate);
}
KERNEL_SHARED(256, 2, LINEAR_BYTES, linear_bfloat, LINEAR_PARAMETERS(u16, u16)) {
    wait_for_earlier();
    DYNAMIC_SHARED(u16, slabs);
    linear_tile<true>(slabs, x, weight, bias, out, m, n, k, accumulate);
}

// Rounds n numbers to f16 or bf16, to nearest even. Numbers beyond the range of f16 become infinite.
KERNEL(256, 1, round_rows, const float* x, u16* out, u64 n, u32 bfloat) {
    wait_for_earlier();
    u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * 2;
    if (i + 1 < n) {
        float2 v = *(const float2*)(x + i);
        *(u32*)(out + i) = bfloat ? pack<true>(v.x, v.y) : pack<false>(v.x, v.y);
    } else if (i < n) {
        out[i] = bfloat ? round_to<true>(x[i]) : round_to<false>(x[i]);
    }
}

// ---- f32 throughout ----

// The types of checkpoint weights and their conversion to f32.
struct FloatWeight {
    typedef float Stored;
    static DEVICE float value(float v) { return v; }
    // Converts weight i of a run of weights in registers.
    template <u32 N>
    static DEVICE float number(const u32 (&words)[N], u32 i) { return __uint_as_float(words[i]); }
};
template <bool BFLOAT>
struct HalfWeight {
    typedef u16 Stored;
    static DEVICE float value(u16 bits) { return widen<BFLOAT>(bits); }
    template <u32 N>
    static DEVICE float number(const u32 (&words)[N], u32 i) { return value((u16)(words[i / 2] >> i % 2 * 16)); }
};

// Computes a tile of 64 x 64 per block, 4 x 4 per thread.
template <class Weight>
DEVICE void linear_float_tile(const float* x, const typename Weight::Stored* weight, const float* bias, float* out,
                              u32 m, u32 n, u32 k, u32 accumulate) {
    constexpr u32 SIDE = 64, DEPTH = 16, WIDE = SIDE + 4;
    SHARED(float, rows, DEPTH * WIDE);
    SHARED(float, columns, DEPTH * WIDE);
    u32 tiles_m = (m + SIDE - 1) / SIDE;
    u32 row_at = blockIdx.x % tiles_m * SIDE, column_at = blockIdx.x / tiles_m * SIDE;
    float sum[4][4] = {};
    for (u32 first = 0; first < k; first += DEPTH) {
UNROLL
        for (u32 i = 0; i < SIDE; i += 16) {
            u32 c = threadIdx.x % DEPTH, row = i + threadIdx.x / DEPTH, to = c * WIDE + row;
            bool there = first + c < k;
            u64 a = (u64)smaller(row_at + row, m - 1) * k + first + c;
            u64 b = (u64)smaller(column_at + row, n - 1) * k + first + c;
            rows[to] = there ? x[a] : 0.0f;
            columns[to] = there ? Weight::value(weight[b]) : 0.0f;
        }
        __syncthreads();
UNROLL
        for (u32 c = 0; c < DEPTH; c++) {
            float4 a = *(const float4*)(rows + c * WIDE + threadIdx.x / 16 * 4);
            float4 b = *(const float4*)(columns + c * WIDE + threadIdx.x % 16 * 4);
            float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
UNROLL
            for (u32 i = 0; i < 4; i++) {
UNROLL
                for (u32 j = 0; j < 4; j++) sum[i][j] += left[i] * right[j];
            }
        }
        __syncthreads();
    }
UNROLL
    for (u32 i = 0; i < 4; i++) {
UNROLL
        for (u32 j = 0; j < 4; j++) {
            u32 row = row_at + threadIdx.x / 16 * 4 + i, column = column_at + threadIdx.x % 16 * 4 + j;
            if (row < m && column < n) leave_sum(out, bias, row, column, n, sum[i][j], accumulate);
        }
    }
}

KERNEL(256, 2, linear_float_float, LINEAR_PARAMETERS(float, float)) {
    wait_for_earlier();
    linear_float_tile<FloatWeight>(x, weight, bias, out, m, n, k, accumulate);
}
KERNEL(256, 2, linear_float_half, LINEAR_PARAMETERS(float, u16)) {
    wait_for_earlier();
    linear_float_tile<HalfWeight<false>>(x, weight, bias, out, m, n, k, accumulate);
}
KERNEL(256, 2, linear_float_bfloat, LINEAR_PARAMETERS(float, u16)) {
    wait_for_earlier();
    linear_float_tile<HalfWeight<true>>(x, weight, bias, out, m, n, k, accumulate);
}

// ---- few rows ----

// Rows of W that a warp processes together, so that it reads x once for all of them.
constexpr u32 FEW_ROWS = 4;

// Loads weights without caching them in L1: weights are read only once, and L1 is left to x.
template <class T>
DEVICE void load_weights(u32 (&out)[4], const T* at) {
#ifdef TENSOR_CORES
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "l"(at));
#else
    memcpy(out, at, 16);
#endif
}
template <class T>
DEVICE void load_weights(u32 (&out)[2], const T* at) {
#ifdef TENSOR_CORES
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "l"(at));
#else
    memcpy(out, at, 8);
#endif
}
DEVICE void load_weights(u32 (&out)[1], const float* at) { out[0] = __float_as_uint(*at); }
DEVICE void load_weights(u32 (&out)[1], const u16* at) { out[0] = *at; }

DEVICE void load_inputs(float (&out)[1], const float* at) { out[0] = *at; }
template <u32 N>
DEVICE void load_inputs(float (&out)[N], const float* at) {
UNROLL
    for (u32 i = 0; i < N; i += 4) {
        float4 v = *(const float4*)(at + i);
        out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
}

// Computes m <= M rows. `split` warps of a block share FEW_ROWS rows of W; each of them takes every split-th run of 32
// x PIECE x AHEAD channels. A lane loads AHEAD pieces of PIECE channels before it uses them; k is a multiple of PIECE.
// Sums run over the lanes and then over the warps, in a fixed order; `sums` is `[8,M,FEW_ROWS]`.
template <class Weight, u32 M, u32 PIECE, u32 AHEAD>
DEVICE void linear_few(float* sums, const float* x, const typename Weight::Stored* weight, const float* bias,
                       float* out, u32 m, u32 n, u32 k, u32 accumulate, u32 split) {
    constexpr u32 WORDS = (PIECE * sizeof(typename Weight::Stored) + 3) / 4, ALL = M * FEW_ROWS;
    u32 first = blockIdx.x * (8 / split) * FEW_ROWS, own = first + warp() / split * FEW_ROWS;
    const typename Weight::Stored* rows[FEW_ROWS];
UNROLL
    for (u32 r = 0; r < FEW_ROWS; r++) rows[r] = weight + (u64)smaller(own + r, n - 1) * k;
    float sum[M][FEW_ROWS] = {};
    for (u32 run = warp() % split * 32 * PIECE * AHEAD; run < k; run += split * 32 * PIECE * AHEAD) {
        u32 words[AHEAD][FEW_ROWS][WORDS];
UNROLL
        for (u32 a = 0; a < AHEAD; a++) {
            u32 at = run + (a * 32 + lane()) * PIECE;
UNROLL
            for (u32 r = 0; r < FEW_ROWS; r++) {
UNROLL
                for (u32 i = 0; i < WORDS; i++) words[a][r][i] = 0;
                if (at < k) load_weights(words[a][r], rows[r] + at);
            }
        }
UNROLL
        for (u32 a = 0; a < AHEAD; a++) {
            u32 at = run + (a * 32 + lane()) * PIECE;
            float w[FEW_ROWS][PIECE];
UNROLL
            for (u32 r = 0; r < FEW_ROWS; r++) {
UNROLL
                for (u32 i = 0; i < PIECE; i++) w[r][i] = Weight::number(words[a][r], i);
            }
UNROLL
            for (u32 j = 0; j < M; j++) {
                float v[PIECE] = {};
                if (at < k) load_inputs(v, x + (u64)smaller(j, m - 1) * k + at);
UNROLL
                for (u32 i = 0; i < PIECE; i++) {
UNROLL
                    for (u32 r = 0; r < FEW_ROWS; r++) sum[j][r] += v[i] * w[r][i];
                }
            }
        }
    }
UNROLL
    for (u32 j = 0; j < M; j++) {
UNROLL
        for (u32 r = 0; r < FEW_ROWS; r++) {
            float total = warp_sum(sum[j][r]);
            if (lane() == 0) sums[warp() * ALL + j * FEW_ROWS + r] = total;
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 8 / split * ALL; i += 256) {
        u32 j = i % ALL / FEW_ROWS, row = first + i / ALL * FEW_ROWS + i % FEW_ROWS;
        if (j >= m || row >= n) continue;
        float total = 0;
        for (u32 part = 0; part < split; part++) total += sums[(i / ALL * split + part) * ALL + i % ALL];
        leave_sum(out, bias, j, row, n, total, accumulate);
    }
}

// With one row, lanes read 16-bit W in pieces of 16 bytes. With more rows, reading x costs as much as reading W, and
// pieces of four channels make the lanes' reads of x contiguous.
#define FEW(WEIGHT, M, PIECE, AHEAD)                                                                            \
    linear_few<WEIGHT, M, PIECE, AHEAD>(sums, x, weight, bias, out, m, n, k, accumulate, split)
#define LINEAR_FEW(WEIGHT, PIECE, AHEAD)                                                                        \
    SHARED(float, sums, 8 * 16 * FEW_ROWS);                                                                     \
    if (k % 8 != 0) {                                                                                           \
        if (m == 1) FEW(WEIGHT, 1, 1, 4);                                                                       \
        else FEW(WEIGHT, 16, 1, 1);                                                                             \
    } else if (m == 1) {                                                                                        \
        FEW(WEIGHT, 1, PIECE, 2);                                                                               \
    } else if (m == 2) {                                                                                        \
        FEW(WEIGHT, 2, 4, AHEAD);                                                                               \
    } else if (m <= 4) {                                                                                        \
        FEW(WEIGHT, 4, 4, AHEAD);                                                                               \
    } else if (m <= 8) {                                                                                        \
        FEW(WEIGHT, 8, 4, 1);                                                                                   \
    } else {                                                                                                    \
        FEW(WEIGHT, 16, 4, 1);                                                                                  \
    }

// m <= 16; split must be 1, 2, 4 or 8.
KERNEL(256, 2, linear_few_float, LINEAR_PARAMETERS(float, float), u32 split) { wait_for_earlier(); LINEAR_FEW(FloatWeight, 4, 2) }
KERNEL(256, 2, linear_few_half, LINEAR_PARAMETERS(float, u16), u32 split) { wait_for_earlier(); LINEAR_FEW(HalfWeight<false>, 8, 4) }
KERNEL(256, 2, linear_few_bfloat, LINEAR_PARAMETERS(float, u16), u32 split) { wait_for_earlier(); LINEAR_FEW(HalfWeight<true>, 8, 4) }
