// Asynchronous copies into shared memory, and products of 16-bit matrices on the tensor cores; also their substitutes
// in the emulation, which pass the same fragments between lanes.
#pragma once
#include "common.h"

#ifndef KVSMITH_EMULATE
#define TENSOR_CORES
#endif

#ifdef TENSOR_CORES

// Rounds f32 to f16 or bf16, to nearest even.
template <bool BFLOAT>
DEVICE u16 round_to(float v) {
    u16 bits;
    if (BFLOAT) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    }
    return bits;
}

// Rounds two values into one register, the first in the low half.
template <bool BFLOAT>
DEVICE u32 pack(float low, float high) {
    u32 bits;
    if (BFLOAT) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    }
    return bits;
}

// Rounds f32 to f16; values beyond its range become the largest f16, and NaN stays NaN.
DEVICE u16 to_half(float v) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(-65504.0f));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(65504.0f));
    return round_to<false>(v);
}

// Approximates 2^v with a relative error of up to 2^-22; zero below 2^-126.
DEVICE float power_of_two(float v) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(v));
    return v;
}

template <bool BFLOAT>
DEVICE float widen(u16 bits) {
    if (BFLOAT) return __uint_as_float((u32)bits << 16);
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
}

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

DEVICE void copy_16_bytes(u16* to, const u16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Copies 16 bytes, or fills in zeros.
DEVICE void copy_16_bytes_if(bool there, u16* to, const u16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <u32 LATER>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Loads four matrices of 8 x 8. Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i; thread 4 g + t gets
// the elements 2 t and 2 t + 1 of row g of each.
DEVICE void load_matrices(u32 (&out)[4], const u16* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(at))
                 : "memory");
}

// Loads the same matrices transposed: thread 4 g + t gets the elements g of rows 2 t and 2 t + 1 of each.
DEVICE void load_matrices_transposed(u32 (&out)[4], const u16* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(at))
                 : "memory");
}

// sum += a b, with a of 16 x 16 and b of 16 x 8.
template <bool BFLOAT>
DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (BFLOAT) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

#else

template <bool BFLOAT>
DEVICE u16 round_to(float v) {
    if (BFLOAT) {
        u32 bits = __float_as_uint(v);
        if (v != v) return 0x7fff;
        return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    _Float16 h = (_Float16)v;
    u16 bits;
    memcpy(&bits, &h, 2);
    return bits;
}

template <bool BFLOAT>
DEVICE u32 pack(float low, float high) {
    return (u32)round_to<BFLOAT>(low) | (u32)round_to<BFLOAT>(high) << 16;
}

DEVICE u16 to_half(float v) { return round_to<false>(v != v ? v : fminf(fmaxf(v, -65504.0f), 65504.0f)); }

DEVICE float power_of_two(float v) { return exp2f(v); }

template <bool BFLOAT>
DEVICE float widen(u16 bits) {
    if (BFLOAT) return __uint_as_float((u32)bits << 16);
    // f32's exponent bias is larger by 127 - 15 = 112. Infinity and NaN have all exponent bits set.
    u32 magnitude = (u32)(bits & 0x7fff) << 13, sign = (u32)(bits >> 15) << 31;
    if (magnitude >= 0x1fu << 23) return __uint_as_float(magnitude | INFINITE | sign);
    return __uint_as_float(__float_as_uint(__uint_as_float(magnitude) * 0x1p112f) | sign);
}

DEVICE void copy_16_bytes(u16* to, const u16* from) { emulate::copy_16_bytes(to, from); }
DEVICE void copy_16_bytes_if(bool there, u16* to, const u16* from) {
    emulate::copy_16_bytes(to, there ? from : nullptr);
}
DEVICE void end_of_copies() { emulate::self->groups++; }
template <u32 LATER>
DEVICE void wait_for_copies() {
    emulate::wait_for_copies(LATER);
}

DEVICE void load_matrices(u32 (&out)[4], const u16* at) {
    auto rows = emulate::pass(at);
    for (u32 i = 0; i < 4; i++) {
        const u16* row = rows[i * 8 + lane() / 4];
        out[i] = row[lane() % 4 * 2] | (u32)row[lane() % 4 * 2 + 1] << 16;
    }
}

DEVICE void load_matrices_transposed(u32 (&out)[4], const u16* at) {
    auto rows = emulate::pass(at);
    for (u32 i = 0; i < 4; i++) {
        const u16* low = rows[i * 8 + lane() % 4 * 2];
        const u16* high = rows[i * 8 + lane() % 4 * 2 + 1];
        out[i] = low[lane() / 4] | (u32)high[lane() / 4] << 16;
    }
}

// A lane's elements of a and b: channels 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows g and g + 8 of a, and of column g
// of b.
struct Fragments {
    float low[4], high[4], b[4];
};

template <bool BFLOAT>
DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Fragments own;
    const u32 packed[3][2] = {{a[0], a[2]}, {a[1], a[3]}, {b0, b1}};
    float* const to[3] = {own.low, own.high, own.b};
    for (u32 i = 0; i < 3; i++) {
        for (u32 j = 0; j < 4; j++) to[i][j] = widen<BFLOAT>((u16)(packed[i][j / 2] >> j % 2 * 16));
    }
    auto all = emulate::pass(own);
    for (u32 j = 0; j < 4; j++) {
        for (u32 t = 0; t < 4; t++) {
            const Fragments& rows = all[lane() / 4 * 4 + t];
            for (u32 e = 0; e < 2; e++) {
                float b = all[(lane() % 4 * 2 + e) * 4 + t].b[j];
                sum[e] += rows.low[j] * b;
                sum[2 + e] += rows.high[j] * b;
            }
        }
    }
}

#endif

template <bool BFLOAT>
DEVICE void widen_eight(float (&out)[8], uint4 bits) {
    u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
UNROLL
    for (u32 i = 0; i < 8; i++) out[i] = widen<BFLOAT>((u16)(pairs[i / 2] >> (i % 2 * 16)));
}

// Loads eight elements of a row of type f32 (kind 0), f16 (1) or bf16 (2).
DEVICE void load_eight(float (&out)[8], const void* rows, u64 at, u32 kind) {
    if (kind == 0) {
        const float* from = (const float*)rows + at;
        float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
        return;
    }
    uint4 bits = *(const uint4*)((const u16*)rows + at);
    if (kind == 1) widen_eight<false>(out, bits);
    else widen_eight<true>(out, bits);
}

// Loads element i of contiguous rows of type f32 (kind 0), f16 (1) or bf16 (2).
DEVICE float load_one(const void* rows, u64 i, u32 kind) {
    if (kind == 0) return ((const float*)rows)[i];
    u16 bits = ((const u16*)rows)[i];
    return kind == 1 ? widen<false>(bits) : widen<true>(bits);
}

// Computes the products of a key with its group's queries `[r,w]` with four lanes; each lane gets all products. Every
// lane of the warp must take part, even without a key.
DEVICE void group_products(float (&out)[16], const float* q, const void* keys, u64 row, bool there, u32 kind, u32 r,
                           u32 w) {
UNROLL
    for (u32 a = 0; a < 16; a++) out[a] = 0;
    for (u32 k = threadIdx.x % 4 * 8; k < w && there; k += 32) {
        float key[8];
        load_eight(key, keys, row * w + k, kind);
UNROLL
        for (u32 a = 0; a < 16; a++) {
            if (a >= r) continue;
            float4 low = *(const float4*)&q[a * w + k], high = *(const float4*)&q[a * w + k + 4];
            out[a] = fmaf(key[3], low.w, fmaf(key[2], low.z, fmaf(key[1], low.y, fmaf(key[0], low.x, out[a]))));
            out[a] = fmaf(key[7], high.w, fmaf(key[6], high.z, fmaf(key[5], high.y, fmaf(key[4], high.x, out[a]))));
        }
    }
UNROLL
    for (u32 a = 0; a < 16; a++) {
        if (a >= r) continue;
        out[a] += __shfl_xor_sync(ALL_LANES, out[a], 1);
        out[a] += __shfl_xor_sync(ALL_LANES, out[a], 2);
    }
}
