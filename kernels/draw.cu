// k-means++ draws: `draw` of src/compute/reference.rs. One block draws the batch of one head. Running sums are kept
// once per run of 1024 distances; within a run, block_scan computes them.
#include "common.h"

// Scans the four values of each of 256 threads: returns the sum of the values of all lower threads, and the sum of all.
struct Scan {
    double before, all;
};

DEVICE Scan block_scan(const double (&values)[4]) {
    SHARED(double, warps, 8);
    double own = ((values[0] + values[1]) + values[2]) + values[3];
    double sum = own;
    for (u32 step = 1; step < 32; step *= 2) {
        double other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane() >= step) sum += other;
    }
    if (lane() == 31) warps[warp()] = sum;
    __syncthreads();
    double before = 0, all = 0;
    for (u32 i = 0; i < 8; i++) {
        if (i < warp()) before += warps[i];
        all += warps[i];
    }
    double left = __shfl_up_sync(ALL_LANES, sum, 1);
    __syncthreads();
    return {before + (lane() > 0 ? left : 0), all};
}

// Loads this thread's four distances of a run; zeros beyond the end.
DEVICE void load_run(const float* distances, u32 run, u32 n, double (&values)[4]) {
    for (u32 e = 0; e < 4; e++) {
        u64 i = (u64)run * 1024 + threadIdx.x * 4 + e;
        values[e] = i < n ? distances[i] : 0;
    }
}

// Sums each run of 1024 distances: out `[b,runs]`.
KERNEL(256, 1, distance_sums, const float* distances, double* out, u32 n) {
    wait_for_earlier();
    double values[4];
    load_run(distances + (u64)blockIdx.y * n, blockIdx.x, n, values);
    Scan scan = block_scan(values);
    if (threadIdx.x == 0) out[blockIdx.y * gridDim.x + blockIdx.x] = scan.all;
}

// Finds the first row of a run whose running sum exceeds `at`, where `base` is the sum before the run. If there is
// none, takes the last row of the run.
DEVICE u32 find_row(const float* distances, u32 run, u32 n, double base, double at) {
    SHARED(u32, found, 1);
    double values[4];
    load_run(distances, run, n, values);
    if (threadIdx.x == 0) found[0] = n - run * 1024 < 1024 ? n - 1 : run * 1024 + 1023;
    double sum = block_scan(values).before;
    for (u32 e = 0; e < 4; e++) {
        sum += values[e];
        u32 i = run * 1024 + threadIdx.x * 4 + e;
        if (i < n && base + sum > at) {
            atomicMin(&found[0], i);
            break;
        }
    }
    __syncthreads();
    u32 row = found[0];
    __syncthreads();
    return row;
}

// Computes the smallest squared distance of row `i` to the rows `fresh`, in f64, or `least` if that is smaller.
DEVICE double nearest_fresh(const float* x, u32 w, u32 i, const u32* fresh, u32 count, double least) {
    SHARED(double, warps, 8);
    for (u32 j = warp(); j < count; j += 8) {
        double sum = 0;
        for (u32 k = lane(); k < w; k += 32) {
            double away = (double)x[(u64)i * w + k] - x[(u64)fresh[j] * w + k];
            sum += away * away;
        }
        sum = warp_sum(sum);
        least = sum < least ? sum : least;
    }
    if (lane() == 0) warps[warp()] = least;
    __syncthreads();
    for (u32 j = 0; j < 8; j++) least = warps[j] < least ? warps[j] : least;
    __syncthreads();
    return least;
}

// Draws each head's batch of rows, batch `[b]`, with uniforms `[b,n_uniforms]`. runs `[b,n_runs]` hold the sums of the
// runs and become running sums. Results: fresh `[b,most]`, the rows drawn; ranges[2 head + 1], the number of rows
// drawn; used `[b]`, the number of uniform numbers used.
KERNEL(256, 1, draw, const float* x, const float* distances, double* runs, const double* uniforms,
       const u32* batch, u32* fresh, u32* ranges, u32* used, u32 n, u32 w, u32 n_runs, u32 n_uniforms, u32 most) {
    wait_for_earlier();
    u32 head = blockIdx.y;
    x += (u64)head * n * w;
    distances += (u64)head * n;
    runs += (u64)head * n_runs;
    uniforms += (u64)head * n_uniforms;
    fresh += (u64)head * most;
    if (threadIdx.x == 0) {
        for (u32 i = 1; i < n_runs; i++) runs[i] += runs[i - 1];
    }
    __syncthreads();
    double total = runs[n_runs - 1];
    bool even = total == 0 || !(total < __longlong_as_double(0x7ff0000000000000ll));
    u32 wanted = batch[head], drawn = 0, next = 0, rejected = 0;
    while (drawn < wanted && rejected <= wanted) {
        double u = uniforms[next++];
        u32 row;
        bool kept = true;
        if (even) {
            row = smaller((u32)(u * n), n - 1);
        } else {
            // Finds the first run that ends above u * total.
            u32 run = 0, end = n_runs - 1;
            while (run < end) {
                u32 middle = (run + end) / 2;
                if (runs[middle] > u * total) end = middle;
                else run = middle + 1;
            }
            row = find_row(distances, run, n, run > 0 ? runs[run - 1] : 0, u * total);
            double stale = distances[row];
            double now = nearest_fresh(x, w, row, fresh, drawn, stale);
            kept = uniforms[next++] * stale < now;
        }
        if (kept) {
            if (threadIdx.x == 0) fresh[drawn] = row;
            drawn++;
        } else {
            rejected++;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        ranges[2 * head + 1] = drawn;
        used[head] = next;
    }
}

// Copies the drawn rows into each head's range of centroids: centroids `[b,size,w]`.
KERNEL(256, 1, place_centroids, const float* x, const u32* fresh, const u32* ranges, float* centroids, u32 n,
       u32 w, u32 size, u32 most) {
    wait_for_earlier();
    u32 head = blockIdx.y, first = ranges[2 * head], count = ranges[2 * head + 1];
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < (u64)count * w; i += (u64)gridDim.x * 256) {
        u32 row = fresh[(u64)head * most + i / w];
        centroids[((u64)head * size + first) * w + i] = x[((u64)head * n + row) * w + i % w];
    }
}
