// Statistics of each channel over a range of rows: `channel_statistic` in src/compute/reference.rs.
//
// `sums` adds blocks of 256 rows in f32, for the mean; the host adds the results of the blocks in f64. The value of a
// given rank is found by radix select, 4 bits at a time from the top, over integers that sort as the values do.
// `histogram` counts, by their next digit, the values that share the digits found so far; `pick` finds the digit of the
// value with the given rank. Counts are integers, so the order of the additions does not matter.

struct Params {
    first_group: u32,
    // The first row of the range, and the number of rows.
    first_row: u32,
    rows: u32,
    d: u32,
    // For `sums`: 1 to sum the squares. For `histogram`: 1 to rank the magnitudes.
    variant: u32,
    // The lowest bit of the digit, and a mask of the bits above the digit.
    shift: u32,
    above: u32,
}

// The digits found so far, and the rank among the values that share these digits.
struct Search {
    key: u32,
    rank: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
// [n,d]
@group(0) @binding(1) var<storage, read> x: array<f32>;
// [ceil(rows / 256),d], the bits of f32
@group(0) @binding(2) var<storage, read_write> partial: array<u32>;
// [d]
@group(0) @binding(3) var<storage, read_write> search: array<Search>;
// [d,16]
@group(0) @binding(4) var<storage, read_write> counts: array<atomic<u32>>;

const BLOCK = 256u;
const DIGITS = 16u;
const CHANNELS = 64u;

// One thread per block and channel. A block with a value that is not finite gets the bits of NaN, because arithmetic in
// WGSL may assume that there are no such values.
@compute @workgroup_size(256)
fn sums(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let index = (p.first_group + id.x) * 256u + t;
    let block = index / p.d;
    let start = block * BLOCK;
    if start >= p.rows {
        return;
    }
    let end = min(p.rows, start + BLOCK);
    var sum = 0.0;
    var finite = true;
    for (var i = start; i < end; i++) {
        let value = x[(p.first_row + i) * p.d + index % p.d];
        finite = finite && (bitcast<u32>(value) & 0x7f800000u) != 0x7f800000u;
        sum += select(value, value * value, p.variant == 1u);
    }
    partial[index] = select(0x7fc00000u, bitcast<u32>(sum), finite);
}

// Maps a float to an integer that sorts as `f32::total_cmp` does.
fn sort_key(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if p.variant == 1u {
        return bits & 0x7fffffffu;
    }
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

var<workgroup> local_counts: array<atomic<u32>, 1024>;

// Each workgroup counts a block of rows for 64 channels.
@compute @workgroup_size(256)
fn histogram(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let group = p.first_group + id.x;
    let across = (p.d + CHANNELS - 1u) / CHANNELS;
    let channel = group % across * CHANNELS + t % CHANNELS;
    let start = group / across * BLOCK;
    let end = min(p.rows, start + BLOCK);
    for (var i = t; i < CHANNELS * DIGITS; i += 256u) {
        atomicStore(&local_counts[i], 0u);
    }
    workgroupBarrier();
    if channel < p.d {
        let found = search[channel].key;
        for (var i = start + t / CHANNELS; i < end; i += 256u / CHANNELS) {
            let key = sort_key(x[(p.first_row + i) * p.d + channel]);
            if (key & p.above) == found {
                atomicAdd(&local_counts[t % CHANNELS * DIGITS + (key >> p.shift) % DIGITS], 1u);
            }
        }
    }
    workgroupBarrier();
    for (var i = t; i < CHANNELS * DIGITS; i += 256u) {
        let cell = group % across * CHANNELS * DIGITS + i;
        let count = atomicLoad(&local_counts[i]);
        if cell < p.d * DIGITS && count > 0u {
            atomicAdd(&counts[cell], count);
        }
    }
}

// One thread per channel; it resets its counts to zero.
@compute @workgroup_size(256)
fn pick(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let channel = (p.first_group + id.x) * 256u + t;
    if channel >= p.d {
        return;
    }
    var rank = search[channel].rank;
    var digit = DIGITS;
    for (var i = 0u; i < DIGITS; i++) {
        let count = atomicExchange(&counts[channel * DIGITS + i], 0u);
        if digit == DIGITS {
            if rank < count {
                digit = i;
            } else {
                rank -= count;
            }
        }
    }
    search[channel] = Search(search[channel].key | (digit << p.shift), rank);
}
