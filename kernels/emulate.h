// Runs the kernels of this folder on a CPU, for tests: g++ -DKVSMITH_EMULATE.
//
// The threads of a block are fibers that take turns at barriers and shuffles; blocks run one after the other. Shared
// memory is allocated per array, filled with NaN patterns, and, like buffers, guarded where a sanitizer is built in.
// Every barrier of a block reverses the order of its warps, and every barrier of a warp that of its lanes, so that a
// missing barrier changes results. Lanes of even warps begin forwards, those of odd warps backwards. A barrier that only
// some of the threads reach ends the program.
//
// With KVSMITH_PERTURB the blocks of a launch run in another order each time, exponentials are off by up to two units
// in the last place, and nearest_fast.cu passes its fragments between lanes; with -ffp-contract=fast, products are
// fused into sums. GPUs may do all of this too, so it must not change what the tests compare exactly.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __device__
#define UNROLL
#define KERNEL(threads, blocks, name, ...) KERNEL_SHARED(threads, blocks, 0, name, __VA_ARGS__)
#define KERNEL_SHARED(threads, blocks, bytes, name, ...)                   \
    void name(__VA_ARGS__);                                                \
    static emulate::Register register_##name(#name, threads, bytes, name); \
    void name(__VA_ARGS__)
#define SHARED(type, name, count) type* const name = emulate::shared<type>(count)
#define DYNAMIC_SHARED(type, name) type* const name = emulate::shared<type>(emulate::dynamic_bytes / sizeof(type))

struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Dim { unsigned x, y, z; };

namespace emulate {

[[noreturn]] inline void fail(const std::string& what) {
    fprintf(stderr, "emulation: %s\n", what.c_str());
    exit(70);
}

// ---- fibers ----

#if defined(__x86_64__)
// Saves the callee-saved registers and the stack pointer, then resumes another stack.
extern "C" void emulate_switch(void** from, void* to);
asm(R"(
.text
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    // A processor predicts the target of a `ret` from the last calls. Here that would always be wrong, hence a jump.
    popq %rcx
    jmp *%rcx
)");
struct Context {
    void* at = nullptr;
    void start(char* stack, size_t size, void (*entry)()) {
        // Above the saved registers lies the address of the code. Once it is popped, the stack pointer is an odd
        // multiple of 8, as after a call.
        void** top = (void**)(stack + size);
        top[-1] = nullptr;
        top[-2] = (void*)entry;
        at = top - 8;
    }
    void yield_to(Context& other) { emulate_switch(&at, other.at); }
};
#else
struct Context {
    ucontext_t at;
    void start(char* stack, size_t size, void (*entry)()) {
        getcontext(&at);
        at.uc_stack.ss_sp = stack;
        at.uc_stack.ss_size = size;
        makecontext(&at, entry, 0);
    }
    void yield_to(Context& other) { swapcontext(&at, &other.at); }
};
#endif

enum class State { AtWarp, AtBlock, Done };

// An asynchronous copy of 16 bytes into shared memory (zeros if `from` is null), with the number of its group.
struct Copy {
    void* to;
    const void* from;
    unsigned group;
};

struct Thread {
    Context context;
    State state;
    unsigned line, arrays, exchanges, groups;
    Dim index;
    std::vector<Copy> copies;
};

constexpr size_t STACK = 64 << 10;
// From one stack to the next. At a multiple of a large power of two, the ends of all stacks would compete for the same few
// lines of the processor's cache.
constexpr size_t STRIDE = STACK + 5 * 64;
constexpr unsigned MOST_THREADS = 1024;

inline Thread threads[MOST_THREADS];
inline Thread* self;
inline unsigned n_threads;
inline Dim block_index, grid_size, block_size;
inline Context scheduler;
inline size_t dynamic_bytes;
// The most shared memory that a block may have, including its own arrays.
inline size_t most_shared_bytes = SIZE_MAX;
// A kernel that is wrong, for tests of what notices it: the first or the last block of each launch does nothing.
inline std::string wrong_kernel;
inline bool first_is_missing = false;
inline std::vector<std::pair<void*, size_t>> arrays;
// Per warp, two alternating sets of slots through which its lanes pass values.
constexpr size_t MOST_PASSED = 64;
alignas(16) inline char exchange[MOST_THREADS / 32][2][32][MOST_PASSED];
inline void (*body)();
// How many lanes of the running warp have still to take their turn, and the step from one to the next: 1 or -1.
inline unsigned lanes_left;
inline int lane_step;

// Ends the turn of the running lane: the next lane of its warp runs, or after the last one the scheduler.
inline void wait(State state, unsigned line) {
    Thread* waits = self;
    waits->state = state;
    waits->line = line;
    if (lanes_left == 0) return waits->context.yield_to(scheduler);
    lanes_left--;
    self += lane_step;
    waits->context.yield_to(self->context);
}

inline void enter() {
    body();
    wait(State::Done, 0);
}

// Says whether threads first..end are all in `state`, at the same line; fails if only some of them are.
inline bool all_in(State state, unsigned first, unsigned end, const char* name) {
    unsigned count = 0, line = 0;
    for (unsigned i = first; i < end; i++) {
        if (threads[i].state != state) continue;
        if (count++ > 0 && threads[i].line != line) {
            fail(std::string("threads at different ") + name + " barriers, lines " + std::to_string(line) + " and " +
                 std::to_string(threads[i].line));
        }
        line = threads[i].line;
    }
    if (count > 0 && count < end - first) {
        fail(std::string("divergent ") + name + " barrier, line " + std::to_string(line));
    }
    return count > 0;
}

// Runs a warp until its lanes reach a barrier of the block or end. Every round resumes every lane once: none is left out,
// since a barrier that only some of them reach is a failure.
inline void run_warp(unsigned first, unsigned end) {
    for (bool backwards = first / 32 % 2;; backwards = !backwards) {
        self = &threads[backwards ? end - 1 : first];
        lane_step = backwards ? -1 : 1;
        lanes_left = end - first - 1;
        scheduler.yield_to(self->context);
        if (!all_in(State::AtWarp, first, end, "warp")) return;
    }
}

inline void run_block() {
    static char* stacks = (char*)malloc(STRIDE * MOST_THREADS);
    for (unsigned i = 0; i < n_threads; i++) {
        threads[i].arrays = threads[i].exchanges = threads[i].groups = 0;
        threads[i].copies.clear();
        threads[i].index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        threads[i].context.start(stacks + i * STRIDE, STACK, enter);
    }
    for (bool backwards = false;; backwards = !backwards) {
        for (unsigned i = 0; i < n_threads; i += 32) {
            unsigned first = backwards ? n_threads - 32 - i : i;
            run_warp(first, first + 32);
        }
        if (!all_in(State::AtBlock, 0, n_threads, "block")) break;
    }
    for (auto& array : arrays) free(array.first);
    arrays.clear();
}

template <class T>
T* shared(size_t count) {
    size_t bytes = count * sizeof(T);
    if (self->arrays == arrays.size()) {
        size_t all = bytes;
        for (auto& array : arrays) all += array.second;
        if (all > most_shared_bytes) fail("a block has " + std::to_string(all) + " bytes of shared memory");
        arrays.push_back({memset(malloc(bytes), 0xff, bytes), bytes});
    }
    auto array = arrays[self->arrays++];
    if (array.second != bytes) fail("threads declare different shared arrays");
    return (T*)array.first;
}

// The values that the lanes of a warp have passed; valid until the second exchange after this one.
template <class T>
struct Passed {
    const char (*slots)[MOST_PASSED];
    const T& operator[](unsigned lane) const { return *(const T*)slots[lane % 32]; }
};

// Passes a value to the other lanes; all lanes of the warp must take part.
template <class T>
Passed<T> pass(const T& v, unsigned line = __builtin_LINE()) {
    static_assert(sizeof(T) <= MOST_PASSED);
    unsigned i = self - threads;
    auto& slots = exchange[i / 32][self->exchanges++ % 2];
    memcpy(slots[i % 32], &v, sizeof(T));
    wait(State::AtWarp, line);
    return {slots};
}

// Returns the value of another lane.
template <class T>
T from_lane(T v, unsigned source, unsigned line) {
    return pass(v, line)[source];
}

// ---- asynchronous copies ----

inline void arrive(const Copy& copy) {
    copy.from ? memcpy(copy.to, copy.from, 16) : memset(copy.to, 0, 16);
}

// Copies of even threads arrive at once; copies of odd threads arrive only when they are waited for.
inline void copy_16_bytes(void* to, const void* from) {
    if (((uintptr_t)to | (uintptr_t)from) % 16 != 0) fail("a copy of 16 bytes that is not aligned");
    Copy copy = {to, from, self->groups};
    if ((self - threads) % 2 == 0) return arrive(copy);
    self->copies.push_back(copy);
}

// Waits for all groups except for the last `later`.
inline void wait_for_copies(unsigned later) {
    size_t kept = 0;
    for (const Copy& copy : self->copies) {
        if (copy.group + later < self->groups) arrive(copy);
        else self->copies[kept++] = copy;
    }
    self->copies.resize(kept);
}

// ---- launches ----

struct Kernel {
    unsigned threads;
    size_t most_shared;
    std::vector<size_t> sizes;
    std::function<void(const uint64_t*)> call;
};

inline std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

template <class T>
T argument(const uint64_t* at) {
    T v;
    memcpy(&v, at, sizeof(T));
    return v;
}

struct Register {
    template <class... P>
    Register(const char* name, unsigned threads, size_t most_shared, void (*kernel)(P...)) {
        kernels()[name] = {threads, most_shared, {sizeof(P)...}, [kernel](const uint64_t* arguments) {
            [&]<size_t... I>(std::index_sequence<I...>) { kernel(argument<P>(arguments + I)...); }
            (std::index_sequence_for<P...>());
        }};
    }
};

inline void launch(const std::string& name, Dim grid, unsigned block, size_t shared_bytes,
                   const std::vector<uint64_t>& arguments, const std::vector<size_t>& sizes) {
    auto found = kernels().find(name);
    if (found == kernels().end()) fail("no kernel " + name);
    static Kernel* kernel;
    static const uint64_t* values;
    kernel = &found->second;
    values = arguments.data();
    if (kernel->sizes != sizes) fail(name + ": arguments of other sizes");
    if (shared_bytes > kernel->most_shared) fail(name + ": more dynamic shared memory than it declares");
    if (kernel->threads != block || block % 32 != 0) fail(name + ": a block of another size");
    if (grid.y > 65535 || grid.z > 65535 || grid.x > 0x7fffffff) fail(name + ": too large a grid");
    n_threads = block;
    block_size = {block, 1, 1};
    grid_size = grid;
    dynamic_bytes = shared_bytes;
    body = [] { kernel->call(values); };
    uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z, start = 0, step = 1;
#ifdef KVSMITH_PERTURB
    static uint64_t random = 1;
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    start = (random >> 33) % blocks;
    // A step that has no common divisor with the number of blocks visits every block; a step of blocks - 1 goes
    // backwards.
    for (step = random >> 40 & 1 ? blocks - 1 : (random >> 41) % blocks; std::gcd(step, blocks) != 1;) step++;
#endif
    uint64_t missing = name != wrong_kernel ? blocks : first_is_missing ? 0 : blocks - 1;
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t at = (start + i * step) % blocks;
        if (at == missing) continue;
        block_index = {(unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y), (unsigned)(at / grid.x / grid.y)};
        run_block();
    }
}

}  // namespace emulate

// ---- what CUDA offers ----

#define threadIdx (emulate::self->index)
#define blockIdx emulate::block_index
#define gridDim emulate::grid_size

inline void __syncthreads(unsigned line = __builtin_LINE()) { emulate::wait(emulate::State::AtBlock, line); }
template <class T>
T __shfl_xor_sync(unsigned, T v, unsigned mask, unsigned line = __builtin_LINE()) {
    return emulate::from_lane(v, (threadIdx.x % 32) ^ mask, line);
}
template <class T>
T __shfl_sync(unsigned, T v, unsigned source, unsigned line = __builtin_LINE()) {
    return emulate::from_lane(v, source, line);
}
template <class T>
T __shfl_up_sync(unsigned, T v, unsigned step, unsigned line = __builtin_LINE()) {
    unsigned lane = threadIdx.x % 32;
    return emulate::from_lane(v, lane < step ? lane : lane - step, line);
}
template <class T, class V>
T atomicAdd(T* at, V v) {
    T old = *at;
    *at += (T)v;
    return old;
}
template <class T, class V>
T atomicMax(T* at, V v) {
    T old = *at;
    if ((T)v > old) *at = (T)v;
    return old;
}
template <class T, class V>
T atomicMin(T* at, V v) {
    T old = *at;
    if ((T)v < old) *at = (T)v;
    return old;
}
template <class To, class From>
To same_bits(From v) {
    To out;
    static_assert(sizeof(To) == sizeof(From));
    memcpy(&out, &v, sizeof(To));
    return out;
}
inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline double __longlong_as_double(long long v) { return same_bits<double>(v); }
#ifdef KVSMITH_PERTURB
// Moves a number by up to two units in the last place, depending on its bits; 0, 1 and values that are not finite stay.
template <class T, class Bits>
T nudged(T v, Bits bits) {
    return v == 0 || v == 1 || !std::isfinite(v) ? v : same_bits<T>(bits + (Bits)((unsigned)bits * 2654435761u >> 16) % 5 - 2);
}
inline float perturbed_exp2f(float v) { return nudged(exp2f(v), same_bits<unsigned>(exp2f(v))); }
inline float perturbed_expf(float v) { return nudged(expf(v), same_bits<unsigned>(expf(v))); }
inline double perturbed_exp(double v) { return nudged(std::exp(v), same_bits<unsigned long long>(std::exp(v))); }
#define exp2f perturbed_exp2f
#define expf perturbed_expf
#define exp perturbed_exp
#endif
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz((unsigned)v); }
inline long long __double2ll_rn(double v) { return llrint(v); }
