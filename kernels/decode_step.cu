// The start of a decode step on the device: lengths, static set and budget; also the storing of the cache's new rows.
#include "common.h"
#include "tensor.h"

// Adds `tokens` to lens `[b]`, and computes for the last token: spans `[b,4]`, which hold the first visible position,
// the number of sinks, the first position of the window, and the end; and budgets `[b]`. A budget is `count` or, if
// `count` is 0, the share `fraction` of the visible positions, at least 1. A model_window of 0 means none. Same results
// as StaticSet::at and Budget::positions.
KERNEL(256, 1, begin_step, u32* lens, u32* spans, u32* budgets, double fraction, u32 count, u32 tokens, u32 sinks,
       u32 window, u32 model_window, u32 b) {
    wait_for_earlier();
    u32 s = blockIdx.x * 256 + threadIdx.x;
    if (s >= b) return;
    u32 end = lens[s] + tokens, start = model_window > 0 && end > model_window ? end - model_window : 0;
    u32 window_at = end > window && end - window > start ? end - window : start;
    u32 sinks_end = smaller(sinks, window_at) > start ? smaller(sinks, window_at) : start;
    lens[s] = end;
    spans[4 * s] = start, spans[4 * s + 1] = sinks_end - start, spans[4 * s + 2] = window_at, spans[4 * s + 3] = end;
    u32 share = (u32)floor(fraction * (end - start));
    budgets[s] = count > 0 ? count : share > 0 ? share : 1;
}

// Stores rows `[b,g,m,d]` as the last m rows of the cache `[b,g,capacity,w]`, in f32 (kind 0), f16 (1) or bf16 (2),
// with zeros from channel d on. lens `[b]` already counts these rows.
KERNEL(256, 1, append_rows, const float* rows, void* cache, const u32* lens, u32 kind, u32 m, u32 d, u32 w,
       u32 capacity) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
    if (i >= m * w) return;
    u32 row = i / w, c = i % w, position = lens[blockIdx.z] - m + row;
    float v = c < d ? rows[((u64)at * m + row) * d + c] : 0.0f;
    u64 to = ((u64)at * capacity + position) * w + c;
    if (kind == 0) ((float*)cache)[to] = v;
    if (kind == 1) ((u16*)cache)[to] = round_to<false>(v);
    if (kind == 2) ((u16*)cache)[to] = round_to<true>(v);
}

// Pads queries `[b h,d]` to w channels.
KERNEL(256, 1, pad_rows, const float* rows, float* out, u32 n, u32 d, u32 w) {
    wait_for_earlier();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < (u64)n * w) out[i] = i % w < d ? rows[i / w * d + i % w] : 0.0f;
}

// Lists the last candidates, those right before the window, as many as the budget allows: lists `[b,g,most]`, listed
// `[b,g]`. blockIdx.y is the KV head, blockIdx.z the sequence.
KERNEL(256, 1, list_recent, const u32* spans, const u32* budgets, u32* lists, u32* listed, u32 most) {
    wait_for_earlier();
    u32 at = blockIdx.z * gridDim.y + blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
    const u32* span = spans + 4 * blockIdx.z;
    u32 end = span[2], count = smaller(smaller(budgets[blockIdx.z], end - span[0] - span[1]), most);
    if (i < count) lists[(u64)at * most + i] = end - count + i;
    if (i == 0) listed[at] = count;
}
