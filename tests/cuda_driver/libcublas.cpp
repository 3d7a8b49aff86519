// The product of cuBLAS that the program calls, on the CPU: for tests of the call and of where the library is found.
// VERSION is the major version. As the real one, it needs libcublasLt, without saying where that is.
#include <cstdint>
#include <cstdio>
#include <cstring>

static float widen(const void* at, size_t i, int type) {
    uint16_t bits = ((const uint16_t*)at)[i];
    if (type == 14) {
        uint32_t wide = (uint32_t)bits << 16;
        float v;
        memcpy(&v, &wide, 4);
        return v;
    }
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}

extern "C" int cublasLtStandIn();

// Which of the version's parts is asked for: 0 major, 1 minor.
extern "C" int cublasGetProperty(int part, int* value) {
    *value = part == 0 ? VERSION : part == 1 ? 4 : 5;
    return 0;
}

extern "C" int cublasCreate_v2(void** handle) {
    fprintf(stderr, "stand-in cuBLAS %d with libcublasLt %d\n", VERSION, cublasLtStandIn());
    *handle = (void*)8;
    return 0;
}

extern "C" int cublasDestroy_v2(void*) { return 0; }

// Matrices are column after column: C = alpha op(A) op(B) + beta C, m x n; f16 (2) or bf16 (14) in, f32 (0) out.
extern "C" int cublasGemmEx(void*, int transposed_a, int transposed_b, int m, int n, int k, const void* alpha,
                            const void* a, int type_a, int lda, const void* b, int type_b, int ldb, const void* beta,
                            void* c, int type_c, int ldc, int compute, int) {
    bool known = (type_a == 2 || type_a == 14) && type_b == type_a && type_c == 0 && compute == 68;
    bool fits = lda >= (transposed_a ? k : m) && ldb >= (transposed_b ? n : k) && ldc >= m;
    if (!known || !fits) return 7;
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < m; i++) {
            float sum = 0;
            for (int l = 0; l < k; l++) {
                size_t at_a = transposed_a ? (size_t)i * lda + l : (size_t)l * lda + i;
                size_t at_b = transposed_b ? (size_t)l * ldb + j : (size_t)j * ldb + l;
                sum += widen(a, at_a, type_a) * widen(b, at_b, type_b);
            }
            float& to = ((float*)c)[(size_t)j * ldc + i];
            float add = *(const float*)beta;
            to = *(const float*)alpha * sum + (add == 0 ? 0 : add * to);
        }
    }
    return 0;
}
