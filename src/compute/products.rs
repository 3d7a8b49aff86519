//! Scores of rows of a cache for the queries of a group.

use multiversion::multiversion;

use super::attention::Rows;

/// Lanes of a sum: see [`super::simd::dot`].
const LANES: usize = 64;
/// Queries whose sums share the loads of a row.
const QUERIES: usize = 4;

/// Calls `each` with the place of every position and its products with the queries, `[r,d]`.
///
/// # Numerics
/// Bit for bit those of [`super::simd::dot`].
pub fn products(
    queries: &[Vec<f32>],
    rows: &dyn Rows,
    positions: impl Iterator<Item = usize>,
    mut each: impl FnMut(usize, &[f32]),
) {
    let d = queries.first().map_or(0, Vec::len);
    let mut scratch = vec![0.0; d];
    let mut out = vec![0.0; queries.len()];
    for (place, position) in positions.enumerate() {
        let row = rows.row(position, &mut scratch);
        dots(queries, row, &mut out);
        each(place, &out);
    }
}

/// Products of a row `[d]` with queries `[r,d]`: `[r]`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn dots(queries: &[Vec<f32>], row: &[f32], out: &mut [f32]) {
    for (queries, out) in queries.chunks(QUERIES).zip(out.chunks_mut(QUERIES)) {
        match queries {
            [a, b, c, d] => some([a, b, c, d], row, out),
            [a, b, c] => some([a, b, c], row, out),
            [a, b] => some([a, b], row, out),
            [a] => some([a], row, out),
            _ => (),
        }
    }
}

#[inline(always)]
fn some<const R: usize>(queries: [&Vec<f32>; R], row: &[f32], out: &mut [f32]) {
    let n = queries.iter().fold(row.len(), |n, q| n.min(q.len()));
    let (blocks, tail) = row[..n].as_chunks::<LANES>();
    let queries: [(&[[f32; LANES]], &[f32]); R] =
        std::array::from_fn(|r| queries[r][..n].as_chunks::<LANES>());
    let mut sums = [[0.0f32; LANES]; R];
    for (i, x) in blocks.iter().enumerate() {
        for r in 0..R {
            let y = &queries[r].0[i];
            for l in 0..LANES {
                sums[r][l] += x[l] * y[l];
            }
        }
    }
    for r in 0..R {
        let mut width = LANES / 2;
        while width > 0 {
            for l in 0..width {
                sums[r][l] += sums[r][l + width];
            }
            width /= 2;
        }
        let mut rest = 0.0;
        for (x, y) in tail.iter().zip(queries[r].1) {
            rest += x * y;
        }
        out[r] = sums[r][0] + rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::simd;

    #[test]
    fn products_are_those_of_the_vector_loop() {
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 * 0.37 - 185.0;
        for d in [0, 1, 63, 64, 65, 80, 128, 200, 256] {
            for r in 0..10 {
                let query = |a: usize| (0..d).map(|i| value(i * 7 + a * 131)).collect();
                let queries: Vec<Vec<f32>> = (0..r).map(query).collect();
                let row: Vec<f32> = (0..d).map(|i| value(i + 5)).collect();
                let mut out = vec![f32::NAN; r];
                dots(&queries, &row, &mut out);
                for (query, product) in queries.iter().zip(&out) {
                    assert_eq!(product.to_bits(), simd::dot(query, &row).to_bits(), "{d} {r}");
                }
            }
        }
    }
}
