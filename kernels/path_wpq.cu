// The scores of the mean's path of wpq, `MeanPath::scores` of src/method/wpq/path.rs: those of the mean key before
// rotation at every candidate. With the query q and the mean m, q . R_p m at position p = c + o is (R_-c q) . R_o m,
// where c is the start of the position's arc. So the scores of a KV head are one product of matrices: of the queries
// turned back by the start of each arc, and of the mean on the first arc, which is the same for all arcs.
//
// Numerics: both factors are the sum of two bf16 numbers, and of the four products the smallest is left out. A score is
// off by at most 3 x 2^-18 of the sum of the magnitudes of its products, and by the rounding of their f32 sum.
#include "tensor.h"
#include "wpq.h"

// Arcs that a block scores at a time, and that a warp does, in tiles of four query heads at two arcs.
constexpr u32 BLOCK_ARCS = 32, WARP_ARCS = BLOCK_ARCS / 8, TILES = WARP_ARCS / 2;

// The rotations of two channel pairs, c and c + 4, to the starts of a warp's arcs.
struct PathTurns {
    float cosine[2][TILES], sine[2][TILES];

    DEVICE void load(const float* turns, u32 first_arc, u32 c, u32 d) {
UNROLL
        for (u32 i = 0; i < 2; i++) {
UNROLL
            for (u32 n = 0; n < TILES; n++) {
                const float* turn = turns + (u64)(first_arc + 2 * n) * d + c + 4 * i;
                bool there = c + 4 * i < d / 2;
                cosine[i][n] = there ? turn[0] : 0.0f, sine[i][n] = there ? turn[d / 2] : 0.0f;
            }
        }
    }
};

// Scores the path at every candidate for queries `[b,h,d]`: paths `[b,g,ceil(r/4),capacity,4]`, whose last axis has the
// scores of four query heads side by side, and zeros beyond the last. arcs `[g,2,ARC,k]` has the larger and the smaller
// bf16 parts of the mean on the first arc; channels c and d/2 + c, which rotate together, lie side by side, and k is d
// rounded up to a multiple of 16, with zeros. turns `[arcs,d]` are those of encode_wpq.cu. A block scores BLOCK_ARCS
// arcs `passes` times. blockIdx.y is the KV head, blockIdx.z the sequence.
KERNEL(256, 2, path_scores, const float* queries, const u16* arcs, const float* turns, const u32* spans, float* paths,
       float scale, u32 r, u32 d, u32 k, u32 capacity, u32 passes) {
    wait_for_earlier();
    SHARED(u16, mean, 2 * ARC * (KEY_CHANNELS + 8));
    SHARED(float2, query, QUAD * KEY_CHANNELS / 2);
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, start = blockIdx.x * passes * BLOCK_ARCS * ARC, half = d / 2;
    const u32* span = spans + 4 * blockIdx.z;
    u32 from = span[0] + span[1], to = span[2], quads = (r + QUAD - 1) / QUAD, pitch = k + 8;
    if (start >= to || start + passes * BLOCK_ARCS * ARC <= from) return;
    const u16* own = arcs + (u64)blockIdx.y * 2 * ARC * k;
    for (u32 i = threadIdx.x; i < 2 * ARC * (k / 8); i += 256) {
        copy_16_bytes(mean + i / (k / 8) * pitch + i % (k / 8) * 8, own + i * 8);
    }
    end_of_copies();
    // Thread 4 g + t turns query head g % 4 back, and has the scores of heads 2 t % 4 and 2 t % 4 + 1.
    u32 t = lane() % 4, e = lane() / 4 % 4;
    for (u32 first = 0; first < r; first += QUAD) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < QUAD * k / 2; i += 256) {
            u32 head = first + i / (k / 2), c = i % (k / 2);
            const float* q = queries + ((u64)at * r + head) * d;
            bool there = head < r && c < half;
            query[i] = {there ? q[c] * scale : 0.0f, there ? q[half + c] * scale : 0.0f};
        }
        wait_for_copies<0>();
        __syncthreads();
        float2* out = (float2*)paths + ((u64)at * quads + first / QUAD) * capacity * 2 + t % 2;
        for (u32 pass = 0; pass < passes; pass++) {
            u32 first_arc = start / ARC + pass * BLOCK_ARCS + warp() * WARP_ARCS;
            if (first_arc * ARC >= to) break;
            float sums[TILES][ARC / 16][4] = {};
            PathTurns next;
            next.load(turns, first_arc + lane() / 16, t, d);
            for (u32 step = 0; step < k / 16; step++) {
                u32 large[TILES][2], small[TILES][2];
UNROLL
                for (u32 i = 0; i < 2; i++) {
                    float2 q = query[e * k / 2 + step * 8 + i * 4 + t];
UNROLL
                    for (u32 n = 0; n < TILES; n++) {
                        float cosine = next.cosine[i][n], sine = next.sine[i][n];
                        float low = q.x * cosine + q.y * sine, high = q.y * cosine - q.x * sine;
                        u32 bits = pack<true>(low, high);
                        large[n][i] = bits;
                        small[n][i] = pack<true>(low - widen<true>((u16)bits), high - widen<true>((u16)(bits >> 16)));
                    }
                }
                next.load(turns, first_arc + lane() / 16, (step + 1) * 8 + t, d);
                // Products that add to the same sums are far apart.
                u32 a[ARC / 16][4];
                const u16* rows = mean + lane() % 16 * pitch + step * 16 + lane() / 16 * 8;
UNROLL
                for (u32 m = 0; m < ARC / 16; m++) load_matrices(a[m], rows + m * 16 * pitch);
UNROLL
                for (u32 i = 0; i < TILES * ARC / 16; i++) {
                    multiply_add<true>(sums[i % TILES][i / TILES], a[i / TILES], large[i % TILES][0], large[i % TILES][1]);
                }
UNROLL
                for (u32 i = 0; i < TILES * ARC / 16; i++) {
                    multiply_add<true>(sums[i % TILES][i / TILES], a[i / TILES], small[i % TILES][0], small[i % TILES][1]);
                }
UNROLL
                for (u32 m = 0; m < ARC / 16; m++) load_matrices(a[m], rows + (ARC + m * 16) * pitch);
UNROLL
                for (u32 i = 0; i < TILES * ARC / 16; i++) {
                    multiply_add<true>(sums[i % TILES][i / TILES], a[i / TILES], large[i % TILES][0], large[i % TILES][1]);
                }
            }
UNROLL
            for (u32 n = 0; n < TILES; n++) {
UNROLL
                for (u32 i = 0; i < ARC / 8; i++) {
                    u32 p = (first_arc + 2 * n + t / 2) * ARC + i * 8 + lane() / 4;
                    const float(&sum)[4] = sums[n][i / 2];
                    if (p >= from && p < to) out[2 * (u64)p] = {sum[i % 2 * 2], sum[i % 2 * 2 + 1]};
                }
            }
        }
    }
}
