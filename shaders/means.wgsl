// Sums of rows, for the mean of the rows of each centroid: `means` in src/compute/reference.rs.
//
// Rows come sorted by centroid, in segments of up to 256 rows of the same centroid. One thread per segment and channel
// sums in f32; the host adds the sums of the segments in f64. The sum of a segment of one row is that row, bit for bit.

struct Params {
    first_group: u32,
    count: u32,
    d: u32,
}

// A segment's range of `members`, which holds the numbers of the rows sorted by centroid.
struct Segment {
    start: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
// [n,d]
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> members: array<u32>;
@group(0) @binding(3) var<storage, read> segments: array<Segment>;
// [segments,d]
@group(0) @binding(4) var<storage, read_write> sums: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let index = (p.first_group + id.x) * 256u + t;
    let channel = index % p.d;
    if index / p.d >= p.count {
        return;
    }
    let segment = segments[index / p.d];
    var sum = x[members[segment.start] * p.d + channel];
    for (var i = segment.start + 1u; i < segment.end; i++) {
        sum += x[members[i] * p.d + channel];
    }
    sums[index] = sum;
}
