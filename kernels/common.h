// The base of every kernel: short type names, macros that let one source run under nvcc, NVRTC and emulate.h,
// and a few small functions.
//
// In kernels for b heads (blockIdx.y is the head), rows are `[b,n,w]`: n rows of w floats, where w is the head
// dimension rounded up to a multiple of 16 and the rest is zero.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Marks a kernel's pointer parameter that may be null.
#define OPTIONAL

#ifdef KVSMITH_EMULATE
#include "emulate.h"
#else
// Declares a kernel with `threads` threads per block, `blocks` of which must fit on a multiprocessor. The declaration
// must be at the start of a line, because build/kernels.rs reads it there.
#define KERNEL(threads, blocks, name, ...) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
// Declares a kernel with at most `bytes` of DYNAMIC_SHARED; `bytes` is an expression of numbers, +, * and macros of
// these.
#define KERNEL_SHARED(threads, blocks, bytes, name, ...) KERNEL(threads, blocks, name, __VA_ARGS__)
// Unrolls the next loop. An array that only unrolled loops index stays in registers.
#define UNROLL _Pragma("unroll")
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define DYNAMIC_SHARED(type, name)                                       \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];      \
    type* const name = reinterpret_cast<type*>(dynamic_shared)
#endif

#define DEVICE __device__ inline

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 INFINITE = 0x7f800000u;
// Bytes of dynamic shared memory for a query group: 16 heads of 128 channels.
#define QUERY_BYTES (16 * 128 * 4)
// Most full-precision tokens of a 2-bit cache per KV head.
constexpr u32 FULL = 64;

// The first statement of every kernel. In a recorded step, the blocks of a kernel take their places on the multiprocessors
// while the kernel before it still runs (programmatic dependent launch, from compute capability 9.0 on); here they wait
// for its end, after which all that it wrote is there, and let the next kernel's blocks take their places in turn.
DEVICE void wait_for_earlier() {
#ifdef KVSMITH_OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// The lowest finite float. Running maxima start here, so that a score of minus infinity is not NaN relative to them. A
// score of plus infinity is NaN relative to itself.
constexpr float LOWEST = -3.402823466e38f;

DEVICE u32 lane() { return threadIdx.x % 32; }
DEVICE u32 warp() { return threadIdx.x / 32; }
DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

DEVICE bool finite(float v) { return (__float_as_uint(v) & INFINITE) != INFINITE; }

// Sums over the lanes of a warp in a fixed order; every lane gets the sum.
template <class T>
DEVICE T warp_sum(T v) {
    for (u32 step = 16; step > 0; step /= 2) v += __shfl_xor_sync(ALL_LANES, v, step);
    return v;
}

// Sums over a block of 256 threads in a fixed order; thread 0 gets the sum.
DEVICE double block_sum(double v) {
    SHARED(double, warps, 8);
    v = warp_sum(v);
    if (lane() == 0) warps[warp()] = v;
    __syncthreads();
    double sum = 0;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 8; i++) sum += warps[i];
    }
    __syncthreads();
    return sum;
}

// Returns a power of two. A sum of n numbers up to `largest` (the bits of a float), multiplied by it, stays below 2^62.
DEVICE double fixed_point(u32 largest, u32 n) {
    // largest < 2^(exponent - 126), n < 2^bits
    int exponent = (int)(largest >> 23);
    int bits = 32 - __clz((int)n);
    int power = 62 - bits - (exponent - 126);
    return __longlong_as_double((i64)(power + 1023) << 52);
}

// Converts a number to a multiple of 1 / scale. Values that are not finite become 0.
DEVICE u64 to_fixed(float v, double scale) { return finite(v) ? (u64)__double2ll_rn(v * scale) : 0; }
DEVICE double from_fixed(u64 v, double scale) { return (double)(i64)v / scale; }
