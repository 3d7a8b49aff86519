// The nearest centroid of each row and the squared distance to it: `nearest` in src/compute/reference.rs.
//
// The nearest centroid has the highest score x.c - |c|^2 / 2. For few centroids, a thread scores all of them against
// its row (`few`). For more, a workgroup scores 64 rows against 64 centroids at a time, over 16 channels at a time in
// workgroup memory, with 4 x 4 scores per thread. Only the best score of each row is kept, so the `n x M` matrix is
// never stored. The centroids of a dispatch challenge the present owner of each row. The owner has a lower number
// than these centroids, so only a strictly higher score wins.

struct Params {
    first_group: u32,
    rows: u32,
    d: u32,
    // The number of the first centroid in the buffer.
    base: u32,
    // The range of the buffer's centroids that take part.
    start: u32,
    end: u32,
}

// The best centroid of a row so far.
struct Owner {
    // The number of the centroid plus 1; 0 for no centroid.
    centroid: u32,
    score: f32,
    distance: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
// [rows,d]
@group(0) @binding(1) var<storage, read> x: array<f32>;
// [M,d]
@group(0) @binding(2) var<storage, read> centroids: array<f32>;
// -|c|^2 / 2, [M]
@group(0) @binding(3) var<storage, read> biases: array<f32>;
// [rows]
@group(0) @binding(4) var<storage, read_write> owners: array<Owner>;

const TILE = 64u;
const DEPTH = 16u;
const LANES = 16u;
const LOWEST = -3.40282347e+38;

// A tile of rows and a tile of centroids, [DEPTH,TILE / 4], four rows or centroids per vector.
var<workgroup> left: array<vec4<f32>, 256>;
var<workgroup> right: array<vec4<f32>, 256>;
// The best score and centroid of each of a row's 16 threads, [TILE,LANES].
var<workgroup> found_score: array<f32, 1024>;
var<workgroup> found: array<u32, 1024>;

fn row_value(row: u32, k: u32) -> f32 {
    if row < p.rows && k < p.d {
        return x[row * p.d + k];
    }
    return 0.0;
}

// Returns channel k of four rows.
fn row_values(row: u32, k: u32) -> vec4<f32> {
    return vec4<f32>(
        row_value(row, k),
        row_value(row + 1u, k),
        row_value(row + 2u, k),
        row_value(row + 3u, k),
    );
}

fn centroid_value(c: u32, k: u32) -> f32 {
    if c < p.end && k < p.d {
        return centroids[c * p.d + k];
    }
    return 0.0;
}

// Returns channel k of four centroids.
fn centroid_values(c: u32, k: u32) -> vec4<f32> {
    return vec4<f32>(
        centroid_value(c, k),
        centroid_value(c + 1u, k),
        centroid_value(c + 2u, k),
        centroid_value(c + 3u, k),
    );
}

// Returns a centroid's bias or, beyond the last centroid, a score that never wins.
fn bias(c: u32) -> f32 {
    if c < p.end {
        return biases[c];
    }
    return LOWEST;
}

// The best scores of four rows, and the centroids that have them.
struct Best {
    score: vec4<f32>,
    at: vec4<u32>,
}

fn fold(best: Best, scores: vec4<f32>, c: u32) -> Best {
    let better = scores > best.score;
    return Best(select(best.score, scores, better), select(best.at, vec4<u32>(c), better));
}

// Finds the best of this thread's share of the centroids, taken in ascending order, for each of the thread's four rows.
fn best_of_tile(row0: u32, t: u32) -> Best {
    var best = Best(vec4<f32>(LOWEST), vec4<u32>(p.start));
    for (var c0 = p.start; c0 < p.end; c0 += TILE) {
        let c = c0 + t % LANES * 4u;
        var s0 = vec4<f32>(bias(c), bias(c + 1u), bias(c + 2u), bias(c + 3u));
        var s1 = s0;
        var s2 = s0;
        var s3 = s0;
        for (var k0 = 0u; k0 < p.d; k0 += DEPTH) {
            left[t] = row_values(row0 + t % LANES * 4u, k0 + t / LANES);
            right[t] = centroid_values(c0 + t % LANES * 4u, k0 + t / LANES);
            workgroupBarrier();
            for (var k = 0u; k < DEPTH; k++) {
                let l = left[k * LANES + t / LANES];
                let r = right[k * LANES + t % LANES];
                s0 += l.x * r;
                s1 += l.y * r;
                s2 += l.z * r;
                s3 += l.w * r;
            }
            workgroupBarrier();
        }
        best = fold(best, vec4<f32>(s0.x, s1.x, s2.x, s3.x), c);
        best = fold(best, vec4<f32>(s0.y, s1.y, s2.y, s3.y), c + 1u);
        best = fold(best, vec4<f32>(s0.z, s1.z, s2.z, s3.z), c + 2u);
        best = fold(best, vec4<f32>(s0.w, s1.w, s2.w, s3.w), c + 3u);
    }
    return best;
}

// Lets the best of a row's 16 threads challenge the owner of the row; the lowest number wins a tie. Returns the
// winner's number plus 1, or 0 if the owner stays.
fn challenge(row0: u32, row: u32) -> u32 {
    if row0 + row >= p.rows {
        return 0u;
    }
    var score = found_score[row * LANES];
    var at = found[row * LANES];
    for (var l = row * LANES + 1u; l < (row + 1u) * LANES; l++) {
        if found_score[l] > score || (found_score[l] == score && found[l] < at) {
            score = found_score[l];
            at = found[l];
        }
    }
    let owner = owners[row0 + row];
    if owner.centroid != 0u && !(score > owner.score) {
        return 0u;
    }
    owners[row0 + row] = Owner(p.base + at + 1u, score, 0.0);
    return at + 1u;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row0 = (p.first_group + id.x) * TILE;
    let lane = t % LANES;
    let best = best_of_tile(row0, t);
    for (var i = 0u; i < 4u; i++) {
        found_score[(t / LANES * 4u + i) * LANES + lane] = best.score[i];
        found[(t / LANES * 4u + i) * LANES + lane] = best.at[i];
    }
    workgroupBarrier();
    var winner = 0u;
    if t < TILE {
        winner = challenge(row0, t);
    }
    workgroupBarrier();
    if t < TILE {
        found[t] = winner;
    }
    workgroupBarrier();
    // The distance to a new owner, sum (x - c)^2. Each thread sums every 16th channel.
    for (var row = t / LANES; row < TILE; row += 256u / LANES) {
        var sum = 0.0;
        if found[row] != 0u {
            let c = (found[row] - 1u) * p.d;
            for (var k = lane; k < p.d; k += LANES) {
                let difference = x[(row0 + row) * p.d + k] - centroids[c + k];
                sum += difference * difference;
            }
        }
        found_score[row * LANES + lane] = sum;
    }
    workgroupBarrier();
    if winner != 0u {
        var sum = 0.0;
        for (var l = t * LANES; l < (t + 1u) * LANES; l++) {
            sum += found_score[l];
        }
        owners[row0 + t].distance = sum;
    }
}

// As `main`, for few centroids, which would leave most of a tile empty: a thread scores one row against all of them.
@compute @workgroup_size(256)
fn few(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = (p.first_group + id.x) * 256u + t;
    if row >= p.rows {
        return;
    }
    var score = LOWEST;
    var at = p.start;
    for (var c = p.start; c < p.end; c++) {
        var s = biases[c];
        for (var k = 0u; k < p.d; k++) {
            s += x[row * p.d + k] * centroids[c * p.d + k];
        }
        // Of equal scores, the lowest number wins.
        if s > score {
            score = s;
            at = c;
        }
    }
    let owner = owners[row];
    if owner.centroid != 0u && !(score > owner.score) {
        return;
    }
    var sum = 0.0;
    for (var k = 0u; k < p.d; k++) {
        let difference = x[row * p.d + k] - centroids[at * p.d + k];
        sum += difference * difference;
    }
    owners[row] = Owner(p.base + at + 1u, score, sum);
}
