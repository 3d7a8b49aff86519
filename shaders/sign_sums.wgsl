// Sums and counts per sign pattern of four channels (Self-Indexing KVCache, Eq. 4): `sign_sums` in
// src/compute/reference.rs.
//
// One thread per block of 256 rows, group of channels and pattern, so that threads share nothing. The host adds the
// results of the blocks in f64.

struct Params {
    first_group: u32,
    rows: u32,
    d: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
// [rows,d]
@group(0) @binding(1) var<storage, read> x: array<f32>;
// [ceil(rows / 256),d/4,16,5]: the bits of four f32 sums, then the count
@group(0) @binding(2) var<storage, read_write> partial: array<u32>;

const BLOCK = 256u;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let index = (p.first_group + id.x) * 256u + t;
    let pattern = index % 16u;
    let channel = index / 16u % (p.d / 4u) * 4u;
    let start = index / (p.d * 4u) * BLOCK;
    if start >= p.rows {
        return;
    }
    let end = min(p.rows, start + BLOCK);
    var sums = vec4<f32>();
    var count = 0u;
    for (var i = start; i < end; i++) {
        let at = i * p.d + channel;
        let v = vec4<f32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]);
        let bits = select(vec4<u32>(), vec4<u32>(1u, 2u, 4u, 8u), v > vec4<f32>());
        if bits.x + bits.y + bits.z + bits.w == pattern {
            sums += v;
            count += 1u;
        }
    }
    for (var e = 0u; e < 4u; e++) {
        partial[index * 5u + e] = bitcast<u32>(sums[e]);
    }
    partial[index * 5u + 4u] = count;
}
