//! Squared distances of rows to centroids.

use multiversion::multiversion;

use super::scan::row;

/// Returns the squared distance `sum (a - b)²`, summed in 16 partial sums.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2+fma", "aarch64+neon"))]
pub(crate) fn squared_distance(a: &[f32], b: &[f32]) -> f32 {
    distance(a, b)
}

/// Computes the squared distances of the rows of `x`, `[n,d]`, to the centroids that their codes name, bit for bit as
/// [`squared_distance`].
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2+fma", "aarch64+neon"))]
pub(super) fn squared_distances(
    x: &[f32],
    dim: usize,
    centroids: &[f32],
    codes: &[u32],
    distances: &mut [f32],
) {
    // Rows of few coordinates are the most, and their loops are unrolled.
    match dim {
        4 => short_distances::<4>(x, centroids, codes, distances),
        8 => short_distances::<8>(x, centroids, codes, distances),
        _ => {
            for ((x, code), out) in x.chunks_exact(dim).zip(codes).zip(distances) {
                *out = distance(x, row(centroids, *code, dim));
            }
        }
    }
}

/// Computes [`squared_distances`] of at most 16 coordinates: each is a partial sum of its own, and these are added in order.
#[inline(always)]
fn short_distances<const D: usize>(x: &[f32], centroids: &[f32], codes: &[u32], distances: &mut [f32]) {
    const { assert!(D <= LANES) };
    let (x, centroids) = (x.as_chunks::<D>().0, centroids.as_chunks::<D>().0);
    for ((x, code), out) in x.iter().zip(codes).zip(distances) {
        let c = &centroids[*code as usize];
        let mut sum = 0.0;
        for l in 0..D {
            sum += (x[l] - c[l]) * (x[l] - c[l]);
        }
        *out = sum;
    }
}

/// Partial sums of a squared distance.
const LANES: usize = 16;

#[inline(always)]
fn distance(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            sums[l] += (a[l] - b[l]) * (a[l] - b[l]);
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += (a - b) * (a - b);
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    #[test]
    fn distances_of_rows_are_those_of_each_row() {
        for dim in [1, 3, 4, 5, 8, 16, 17, 40] {
            let (n, size) = (37, 9);
            let (x, c) = (values(n * dim, 5), values(size * dim, 6));
            let codes: Vec<u32> = (0..n as u32).map(|i| i * 7 % size as u32).collect();
            let mut found = vec![0.0; n];
            squared_distances(&x, dim, &c, &codes, &mut found);
            for ((x, code), found) in x.chunks(dim).zip(codes).zip(found) {
                let expected = squared_distance(x, row(&c, code, dim));
                assert_eq!(found.to_bits(), expected.to_bits(), "{dim}");
            }
        }
    }
}
