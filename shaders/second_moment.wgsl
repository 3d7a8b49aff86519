// Sum of q^T q over blocks of 256 rows: `second_moment` in src/compute/reference.rs.
//
// A workgroup sums a 64 x 64 tile of `[d,d]` over one block of rows, 16 rows at a time in workgroup memory, with 4 x 4
// products per thread. The host adds the results of the blocks in f64.

struct Params {
    first_group: u32,
    rows: u32,
    d: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
// [rows,d]
@group(0) @binding(1) var<storage, read> q: array<f32>;
// [ceil(rows / 256),d,d]
@group(0) @binding(2) var<storage, read_write> partial: array<f32>;

const TILE = 64u;
const DEPTH = 16u;
const BLOCK = 256u;

var<workgroup> left: array<f32, 1024>;
var<workgroup> right: array<f32, 1024>;

fn value(row: u32, end: u32, channel: u32) -> f32 {
    if row < end && channel < p.d {
        return q[row * p.d + channel];
    }
    return 0.0;
}

fn store(block: u32, x: u32, y: u32, sums: vec4<f32>) {
    for (var j = 0u; j < 4u; j++) {
        if x < p.d && y + j < p.d {
            partial[(block * p.d + x) * p.d + y + j] = sums[j];
        }
    }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let group = p.first_group + id.x;
    let tiles = (p.d + TILE - 1u) / TILE;
    let block = group / (tiles * tiles);
    let x0 = (group / tiles) % tiles * TILE;
    let y0 = group % tiles * TILE;
    let end = min(p.rows, (block + 1u) * BLOCK);
    let x = t / 16u * 4u;
    let y = t % 16u * 4u;
    var s0 = vec4<f32>();
    var s1 = vec4<f32>();
    var s2 = vec4<f32>();
    var s3 = vec4<f32>();
    for (var row0 = block * BLOCK; row0 < end; row0 += DEPTH) {
        for (var i = t; i < TILE * DEPTH; i += 256u) {
            left[i] = value(row0 + i / TILE, end, x0 + i % TILE);
            right[i] = value(row0 + i / TILE, end, y0 + i % TILE);
        }
        workgroupBarrier();
        for (var k = 0u; k < DEPTH; k++) {
            let a = k * TILE + x;
            let b = k * TILE + y;
            let r = vec4<f32>(right[b], right[b + 1u], right[b + 2u], right[b + 3u]);
            s0 += left[a] * r;
            s1 += left[a + 1u] * r;
            s2 += left[a + 2u] * r;
            s3 += left[a + 3u] * r;
        }
        workgroupBarrier();
    }
    store(block, x0 + x, y0 + y, s0);
    store(block, x0 + x + 1u, y0 + y, s1);
    store(block, x0 + x + 2u, y0 + y, s2);
    store(block, x0 + x + 3u, y0 + y, s3);
}
