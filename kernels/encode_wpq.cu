// Product-quantised codes of keys: `HeadCodebook::encode` of src/method/wpq/codebook.rs, in f32.
//
// A stage has m groups of dim channels, and a group has WORDS words, 16 or 256: words `[g,STAGES,m,dim,WORDS]` in f16,
// norms `[g,STAGES,m,WORDS]`, half of the words' squared norms. A code holds the numbers of the nearest words in the
// order of the groups, in width bytes per stage; of two 4-bit numbers in a byte, the first is in the low bits. codes
// `[STAGES,b,g,capacity,width]`.
//
// A block projects ENCODED keys, so that it reads the map once for all of them. Then each warp takes one byte of one
// code at a time. The warp's lanes share the words of the byte's group; with 16 words a byte has two groups, and each
// half of the warp shares the words of one of them. The words of a channel lie side by side, so the lanes read
// contiguous memory. What the first stage leaves of a key is computed on the fly from the number of the key's word.
//
// If codes describe the keys around the path of their mean (src/method/wpq/path.rs), arcs `[g,d,ARC]` hold the mean at
// the first ARC positions, and turns `[arcs,d]` the rotation to the start of each arc: its cosines, then its sines.
#include "common.h"
#include "scan.h"
#include "tensor.h"
#include "wpq.h"

// Keys per block; keys whose sums a thread holds.
constexpr u32 ENCODED = 16, ENCODED_AT_ONCE = 8;

// Finds the word with the smallest distance from z `[dim]`. The lower number wins a tie. Words are `[dim,WORDS]`. If
// `before` is given, the word it points to is subtracted from z first. All lanes that share a group get the number of
// the nearest word.
template <u32 WORDS>
DEVICE u32 nearest_word(const float* z, const u16* words, const float* norms, const u16* before, u32 dim) {
    u64 best = 0;
    for (u32 w = lane() % WORDS; w < WORDS; w += 32) {
        float score = 0;
        for (u32 e = 0; e < dim; e++) {
            float x = before ? z[e] - widen<false>(before[e * WORDS]) : z[e];
            score = fmaf(x, widen<false>(words[e * WORDS + w]), score);
        }
        u64 key = (u64)order_of(score - norms[w]) << 32 | (0xffffffffu - w);
        if (key > best) best = key;
    }
    for (u32 step = smaller(WORDS, 32) / 2; step > 0; step /= 2) {
        u64 other = __shfl_xor_sync(ALL_LANES, best, step);
        if (other > best) best = other;
    }
    return 0xffffffffu - (u32)best;
}

// Projects the centered keys in x `[ENCODED,padded]` by map `[padded,channels]`: z `[ENCODED,channels]`.
DEVICE void project_keys(const float* x, const float* map, float* z, u32 count, u32 padded, u32 channels) {
    u32 parts = (count + ENCODED_AT_ONCE - 1) / ENCODED_AT_ONCE;
    for (u32 i = threadIdx.x; i < parts * channels; i += 256) {
        u32 channel = i % channels, first = i / channels * ENCODED_AT_ONCE;
        float sums[ENCODED_AT_ONCE] = {};
        for (u32 j = 0; j < padded; j += 4) {
            const float* column = map + j * channels + channel;
            float a = column[0], b = column[channels], c = column[2 * channels], d = column[3 * channels];
UNROLL
            for (u32 e = 0; e < ENCODED_AT_ONCE; e++) {
                float4 v = *(const float4*)&x[(first + e) * padded + j];
                sums[e] = fmaf(v.w, d, fmaf(v.z, c, fmaf(v.y, b, fmaf(v.x, a, sums[e]))));
            }
        }
UNROLL
        for (u32 e = 0; e < ENCODED_AT_ONCE; e++) z[(first + e) * channels + channel] = sums[e];
    }
}

// Returns channel c of the mean at position p, from the arcs `[d,ARC]` of a KV head; 0 without a path.
DEVICE float mean_at(const float* arcs, const float* turns, u32 p, u32 c, u32 d) {
    if (!turns) return 0;
    u32 half = d / 2, i = c % half;
    const float *arc = arcs + p % ARC, *turn = turns + (u64)(p / ARC) * d;
    float low = arc[i * ARC], high = arc[(half + i) * ARC], cosine = turn[i], sine = turn[half + i];
    return c < half ? low * cosine - high * sine : high * cosine + low * sine;
}

// Encodes the last n keys `[b,g,n,d]`. key_maps `[g,padded,m dim]`, where padded is d rounded up to a multiple of 4 and
// the padding is zero; means `[g,d]`. lens `[b]` already counts the keys. blockIdx.y is the KV head, blockIdx.z the
// sequence.
#define ENCODE_PARAMETERS                                                                                       \
    const float *keys, const float *key_maps, const float *means, OPTIONAL const float *arcs,                   \
        OPTIONAL const float *turns, const u16 *words, const float *norms, const u32 *lens, u8 *codes,          \
        u32 groups, u32 dim, u32 n, u32 d, u32 capacity
template <u32 WORDS>
DEVICE void encode_keys(ENCODE_PARAMETERS) {
    SHARED(float, x, ENCODED * KEY_CHANNELS);
    SHARED(float, z, ENCODED * KEY_CHANNELS);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, first = blockIdx.x * ENCODED, count = smaller(ENCODED, n - first);
    u32 padded = (d + 3) / 4 * 4, channels = groups * dim, width = WORDS == 16 ? groups / 2 : groups;
    const float* own_arcs = arcs ? arcs + (u64)blockIdx.y * d * ARC : arcs;
    for (u32 i = threadIdx.x; i < ENCODED * padded; i += 256) {
        u32 row = i / padded, c = i % padded, p = lens[blockIdx.z] - n + first + row;
        bool there = row < count && c < d;
        float mean = there ? means[blockIdx.y * d + c] + mean_at(own_arcs, turns, p, c, d) : 0.0f;
        x[i] = there ? keys[((u64)at * n + first + row) * d + c] - mean : 0.0f;
    }
    __syncthreads();
    project_keys(x, key_maps + (u64)blockIdx.y * padded * channels, z, count, padded, channels);
    __syncthreads();
    u64 to = (u64)at * capacity + lens[blockIdx.z] - n + first, stride = (u64)gridDim.y * gridDim.z * capacity;
    for (u32 i = warp(); i < count * width; i += 8) {
        u32 row = i / width, byte = i % width, group = WORDS == 16 ? 2 * byte + lane() / 16 : byte;
        const u16* before = 0;
        for (u32 stage = 0; stage < STAGES; stage++) {
            u64 table = ((u64)blockIdx.y * STAGES + stage) * groups + group;
            const u16* own = words + table * dim * WORDS;
            const float* from = z + row * channels + group * dim;
            u32 code = nearest_word<WORDS>(from, own, norms + table * WORDS, before, dim);
            before = own + code;
            if (WORDS == 16) code |= __shfl_xor_sync(ALL_LANES, code, 16) << 4;
            if (lane() == 0) codes[(stage * stride + to + row) * width + byte] = (u8)code;
        }
    }
}

KERNEL(256, 2, encode_keys_16, ENCODE_PARAMETERS) {
    wait_for_earlier();
    encode_keys<16>(keys, key_maps, means, arcs, turns, words, norms, lens, codes, groups, dim, n, d, capacity);
}
KERNEL(256, 2, encode_keys_256, ENCODE_PARAMETERS) {
    wait_for_earlier();
    encode_keys<256>(keys, key_maps, means, arcs, turns, words, norms, lens, codes, groups, dim, n, d, capacity);
}
