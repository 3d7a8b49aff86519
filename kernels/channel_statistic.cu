// `channel_statistic` of src/compute/reference.rs, and other kernels over whole channels. In the first two kernels, a
// block of 8 warps handles 32 channels of one head, one per lane; each warp takes every eighth row.
#include "common.h"

// Computes the means of rows first..first + count, summed in f64 in a fixed order: out `[b,w]`.
KERNEL(256, 1, channel_mean, const float* x, float* out, u32 n, u32 w, u32 first, u32 count) {
    wait_for_earlier();
    SHARED(double, sums, 8 * 32);
    u32 channel = blockIdx.x * 32 + lane();
    double sum = 0;
    if (channel < w) {
        const float* at = x + ((u64)blockIdx.y * n + first) * w + channel;
        for (u32 row = warp(); row < count; row += 8) sum += at[(u64)row * w];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp() > 0 || channel >= w) return;
    for (u32 i = 1; i < 8; i++) sum += sums[i * 32 + lane()];
    out[blockIdx.y * w + channel] = (float)(sum / (count > 0 ? count : 1));
}

// Maps a float, or its magnitude, to an integer that sorts as f32::total_cmp does.
DEVICE u32 sort_key(float v, u32 magnitude) {
    u32 bits = __float_as_uint(v);
    if (magnitude) bits &= 0x7fffffffu;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Finds the value of a given rank in each channel by radix select: each of four passes counts, by their next eight
// bits, the values that match the bits found so far. rank < count; out `[b,w]`.
KERNEL(256, 1, channel_ranked, const float* x, float* out, u32 n, u32 w, u32 first, u32 count, u32 rank,
       u32 magnitude) {
    wait_for_earlier();
    SHARED(u32, histogram, 256 * 32);
    SHARED(u32, prefix, 32);
    u32 channel = blockIdx.x * 32 + lane();
    const float* at = x + ((u64)blockIdx.y * n + first) * w + channel;
    if (warp() == 0) prefix[lane()] = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < 256 * 32; i += 256) histogram[i] = 0;
        __syncthreads();
        u32 found = prefix[lane()];
        if (channel < w) {
            for (u32 row = warp(); row < count; row += 8) {
                u32 key = sort_key(at[(u64)row * w], magnitude);
                // The first pass takes every value; a shift by 32 would be undefined.
                if (shift == 24 || key >> (shift + 8) == found) {
                    atomicAdd(&histogram[(key >> shift & 255) * 32 + lane()], 1);
                }
            }
        }
        __syncthreads();
        if (warp() == 0) {
            u32 digit = 0;
            while (digit < 255 && rank >= histogram[digit * 32 + lane()]) {
                rank -= histogram[digit * 32 + lane()];
                digit++;
            }
            prefix[lane()] = found << 8 | digit;
        }
        __syncthreads();
    }
    if (warp() > 0 || channel >= w) return;
    u32 key = prefix[lane()];
    out[blockIdx.y * w + channel] = __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Subtracts center `[b,w]` from rows first..first + count.
KERNEL(256, 1, subtract, float* x, const float* centers, u32 n, u32 w, u32 first, u32 count) {
    wait_for_earlier();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= (u64)count * w) return;
    x[((u64)blockIdx.y * n + first) * w + i] -= centers[blockIdx.y * w + i % w];
}

// Sums the squares of runs of 2^16 values per head in f64: out `[b,runs]`.
KERNEL(256, 1, square_sums, const float* x, double* out, u64 size) {
    wait_for_earlier();
    const float* at = x + blockIdx.y * size;
    u64 start = (u64)blockIdx.x << 16;
    double sum = 0;
    for (u64 i = start + threadIdx.x; i < size && i < start + (1 << 16); i += 256) {
        double v = at[i];
        sum += v * v;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// Finds the bits of each head's largest magnitude (the bits sort as the magnitudes do): out `[b]`, zeroed before. rows
// `[b,stride,w]`; only the rows in the head's range count, or the first n rows if `ranges` is null.
KERNEL(256, 1, largest, const float* rows, u32* out, OPTIONAL const u32* ranges, u32 n, u32 stride, u32 w) {
    wait_for_earlier();
    u32 first = ranges ? ranges[2 * blockIdx.y] : 0, count = ranges ? ranges[2 * blockIdx.y + 1] : n;
    const float* at = rows + ((u64)blockIdx.y * stride + first) * w;
    u64 size = (u64)count * w;
    u32 most = 0;
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < size; i += (u64)gridDim.x * 256) {
        u32 bits = __float_as_uint(at[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    for (u32 step = 16; step > 0; step /= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, most, step);
        most = other > most ? other : most;
    }
    if (lane() == 0) atomicMax(&out[blockIdx.y], most);
}
