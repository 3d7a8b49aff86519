// Subtracts a center from a range of rows: `Points::subtract` in src/compute/device.rs. One thread per value.

struct Params {
    first_group: u32,
    first_row: u32,
    rows: u32,
    d: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
// [n,d]
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
// [d]
@group(0) @binding(2) var<storage, read> centers: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let index = (p.first_group + id.x) * 256u + t;
    if index < p.rows * p.d {
        x[p.first_row * p.d + index] -= centers[index % p.d];
    }
}
