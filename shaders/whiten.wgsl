// Whitens rows into the metric of the queries, x L (A2ATS, Eq. 15): `whiten` in src/compute/reference.rs.
//
// A workgroup computes a tile of 64 rows by 64 channels, over 16 terms of the sum at a time in workgroup memory, with 4
// x 4 values per thread. Terms are summed in f32, in order.

struct Params {
    first_group: u32,
    rows: u32,
    d: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
// [rows,d]
@group(0) @binding(1) var<storage, read> x: array<f32>;
// [d,d]
@group(0) @binding(2) var<storage, read> chol: array<f32>;
// [rows,d]
@group(0) @binding(3) var<storage, read_write> whitened: array<f32>;

const TILE = 64u;
const DEPTH = 16u;

var<workgroup> left: array<f32, 1024>;
var<workgroup> right: array<f32, 1024>;

fn row_value(row: u32, k: u32) -> f32 {
    if row < p.rows && k < p.d {
        return x[row * p.d + k];
    }
    return 0.0;
}

fn factor(k: u32, channel: u32) -> f32 {
    if k < p.d && channel < p.d {
        return chol[k * p.d + channel];
    }
    return 0.0;
}

fn store(row: u32, channel: u32, values: vec4<f32>) {
    for (var j = 0u; j < 4u; j++) {
        if row < p.rows && channel + j < p.d {
            whitened[row * p.d + channel + j] = values[j];
        }
    }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let group = p.first_group + id.x;
    let tiles = (p.d + TILE - 1u) / TILE;
    let row0 = group / tiles * TILE;
    let channel0 = group % tiles * TILE;
    let row = t / 16u * 4u;
    let channel = t % 16u * 4u;
    var s0 = vec4<f32>();
    var s1 = vec4<f32>();
    var s2 = vec4<f32>();
    var s3 = vec4<f32>();
    for (var k0 = 0u; k0 < p.d; k0 += DEPTH) {
        for (var i = t; i < TILE * DEPTH; i += 256u) {
            left[i] = row_value(row0 + i % TILE, k0 + i / TILE);
            right[i] = factor(k0 + i / TILE, channel0 + i % TILE);
        }
        workgroupBarrier();
        for (var k = 0u; k < DEPTH; k++) {
            let a = k * TILE + row;
            let b = k * TILE + channel;
            let r = vec4<f32>(right[b], right[b + 1u], right[b + 2u], right[b + 3u]);
            s0 += left[a] * r;
            s1 += left[a + 1u] * r;
            s2 += left[a + 2u] * r;
            s3 += left[a + 3u] * r;
        }
        workgroupBarrier();
    }
    store(row0 + row, channel0 + channel, s0);
    store(row0 + row + 1u, channel0 + channel, s1);
    store(row0 + row + 2u, channel0 + channel, s2);
    store(row0 + row + 3u, channel0 + channel, s3);
}
