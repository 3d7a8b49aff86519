//! Linear maps of rows that formats of few bits round: a Hadamard rotation, or a map that calibration fitted.
//!
//! A map changes no product: keys are stored as `(k - mean) A`, and queries are multiplied by the inverse transpose of A, so that
//! `q . k = q . mean + (q A^-T) . ((k - mean) A)`. A weighted sum of mapped values is mapped back once per run of rows.

use std::sync::Arc;

use ndarray::NdFloat;

use super::qkv::Part;
use crate::compute::simd;

/// A linear map of the d channels of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum RowMap {
    /// No map.
    Identity,
    /// A Hadamard rotation, [`hadamard`].
    Hadamard,
    /// A fitted map.
    Fitted(Arc<FittedMap>),
}

/// An invertible affine map, `x -> (x - mean) A`.
#[derive(Debug, PartialEq)]
pub struct FittedMap {
    /// A, `[d,d]`, by rows.
    forward: Vec<f32>,
    /// The inverse of A, `[d,d]`, by rows.
    back: Vec<f32>,
    /// Its transpose, for queries.
    back_transposed: Vec<f32>,
    /// Subtracted before the map, `[d]`.
    mean: Vec<f32>,
}

impl FittedMap {
    /// Makes a map from A and its inverse, `[d,d]` each, and the mean, `[d]`.
    pub fn new(forward: Vec<f32>, back: Vec<f32>, mean: Vec<f32>) -> Self {
        let d = mean.len();
        assert_eq!([forward.len(), back.len()], [d * d; 2], "values of a map");
        Self {
            back_transposed: (0..d * d).map(|i| back[i % d * d + i / d]).collect(),
            forward,
            back,
            mean,
        }
    }

    /// Returns the Hadamard rotation of d channels as a map whose matrix is stored: it takes as long as one that was fitted.
    pub fn hadamard(d: usize) -> Self {
        let mut matrix = vec![0.0; d * d];
        for (i, row) in matrix.chunks_exact_mut(d).enumerate() {
            row[i] = 1.0;
            hadamard(row);
        }
        Self::new(matrix.clone(), matrix, vec![0.0; d])
    }
}

impl RowMap {
    /// Maps a row.
    pub fn apply(&self, row: &mut [f32]) {
        match self {
            Self::Identity => {}
            Self::Hadamard => hadamard(row),
            Self::Fitted(map) => {
                let centered: Vec<f32> = row.iter().zip(&map.mean).map(|(x, mean)| x - mean).collect();
                simd::row_product(&centered, &map.forward, row);
            }
        }
    }

    /// Maps a row back.
    pub fn undo(&self, row: &mut [f32]) {
        self.undo_sum(row, 1.0);
    }

    /// Maps a weighted sum of mapped rows back, given the sum of the weights.
    pub fn undo_sum(&self, sum: &mut [f32], weight: f32) {
        match self {
            Self::Identity => {}
            Self::Hadamard => hadamard(sum),
            Self::Fitted(map) => {
                let mapped = sum.to_vec();
                simd::row_product(&mapped, &map.back, sum);
                simd::axpy(weight, &map.mean, sum);
            }
        }
    }

    /// Changes a query so that its products with mapped rows are those with the rows, less [`RowMap::constant`].
    pub fn apply_to_query(&self, query: &mut [f32]) {
        match self {
            Self::Identity => {}
            Self::Hadamard => hadamard(query),
            Self::Fitted(map) => {
                let own = query.to_vec();
                simd::row_product(&own, &map.back_transposed, query);
            }
        }
    }

    /// Returns the product of a query with the mean, which the products with mapped rows lack.
    pub fn constant(&self, query: &[f32]) -> f32 {
        match self {
            Self::Identity | Self::Hadamard => 0.0,
            Self::Fitted(map) => simd::dot(query, &map.mean),
        }
    }

    /// Returns whether products lack a constant, and sums of values a multiple of the mean.
    pub fn has_mean(&self) -> bool {
        matches!(self, Self::Fitted(_))
    }
}

/// Rotates a row by the Hadamard matrix of its length, whose inverse it is itself. A length that is no power of two is cut into
/// powers of two, the largest first.
pub fn hadamard<F: NdFloat>(row: &mut [F]) {
    let mut rest = row;
    while !rest.is_empty() {
        let (block, others) = rest.split_at_mut(1 << rest.len().ilog2());
        let mut half = 1;
        while half < block.len() {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        let scale = F::from(block.len()).map_or(F::one(), |n| F::one() / n.sqrt());
        block.iter_mut().for_each(|x| *x *= scale);
        rest = others;
    }
}

/// The maps of a KV head's keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadMaps {
    /// The map of keys.
    pub keys: RowMap,
    /// The map of values.
    pub values: RowMap,
}

impl HeadMaps {
    /// The Hadamard rotation of both.
    pub const HADAMARD: Self = Self {
        keys: RowMap::Hadamard,
        values: RowMap::Hadamard,
    };

    /// Returns the map of keys or of values.
    pub fn part(&self, part: Part) -> &RowMap {
        match part {
            Part::Keys => &self.keys,
            Part::Values => &self.values,
        }
    }
}

/// The maps of all KV heads of a model.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelMaps {
    /// The same maps for all heads.
    Same(HeadMaps),
    /// By layer and KV head, `[L,g]`.
    Heads {
        /// KV heads of a layer, g.
        n_kv_heads: usize,
        /// The maps.
        maps: Arc<[HeadMaps]>,
    },
}

impl ModelMaps {
    /// The Hadamard rotation of all rows.
    pub const HADAMARD: Self = Self::Same(HeadMaps::HADAMARD);
    /// No map.
    pub const IDENTITY: Self = Self::Same(HeadMaps {
        keys: RowMap::Identity,
        values: RowMap::Identity,
    });

    /// Returns the maps of a KV head.
    pub fn head(&self, layer: usize, kv_head: usize) -> &HeadMaps {
        match self {
            Self::Same(maps) => maps,
            Self::Heads { n_kv_heads, maps } => &maps[layer * n_kv_heads + kv_head],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    fn product(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }

    #[test]
    fn a_rotation_keeps_products_and_is_its_own_inverse() {
        for d in [1, 2, 16, 64, 80, 96, 100, 128] {
            let (a, b) = (values(d, 1), values(d, 2));
            let (mut x, mut y) = (a.clone(), b.clone());
            hadamard(&mut x);
            hadamard(&mut y);
            assert!((product(&a, &b) - product(&x, &y)).abs() < 1e-4 * d as f64, "{d}");
            hadamard(&mut x);
            assert!(a.iter().zip(&x).all(|(a, x)| (a - x).abs() < 1e-5), "{d}");
        }
        let mut row = [1.0, 0.0, 0.0, 0.0];
        hadamard(&mut row);
        assert_eq!(row, [0.5; 4]);
    }

    /// A = [[2, 0, 0], [1, 4, 0], [0, 0, 0.5]], whose inverse is exact in f32.
    fn fitted() -> RowMap {
        let forward = vec![2.0, 0.0, 0.0, 1.0, 4.0, 0.0, 0.0, 0.0, 0.5];
        let back = vec![0.5, 0.0, 0.0, -0.125, 0.25, 0.0, 0.0, 0.0, 2.0];
        let map = FittedMap::new(forward, back, vec![1.0, -2.0, 3.0]);
        RowMap::Fitted(Arc::new(map))
    }

    #[test]
    fn a_fitted_map_keeps_products_and_sums() {
        let map = fitted();
        let (query, key) = ([3.0f32, 1.0, -2.0], [5.0f32, 2.0, 1.0]);
        let mut mapped = key;
        map.apply(&mut mapped);
        // (4, 4, -2) A
        assert_eq!(mapped, [12.0, 16.0, -1.0]);
        let mut own = query;
        map.apply_to_query(&mut own);
        assert_eq!(
            product(&own, &mapped) + f64::from(map.constant(&query)),
            product(&query, &key)
        );
        let mut back = mapped;
        map.undo(&mut back);
        assert_eq!(back, key);
        // Three quarters of the row and a quarter of another, whose weights add up to one.
        let other = [1.0, 0.0, 7.0];
        let mut mapped_other = other;
        map.apply(&mut mapped_other);
        let mut sum: [f32; 3] = std::array::from_fn(|i| 0.75 * mapped[i] + 0.25 * mapped_other[i]);
        map.undo_sum(&mut sum, 1.0);
        assert_eq!(sum, std::array::from_fn(|i| 0.75 * key[i] + 0.25 * other[i]));
    }

    #[test]
    fn a_stored_rotation_is_the_rotation() {
        for d in [16, 80] {
            let stored = RowMap::Fitted(FittedMap::hadamard(d).into());
            for change in [RowMap::apply, RowMap::undo, RowMap::apply_to_query] {
                let (mut found, mut expected) = (values(d, 3), values(d, 3));
                change(&stored, &mut found);
                change(&RowMap::Hadamard, &mut expected);
                let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
                assert!(off.fold(0.0, f32::max) < 1e-6 * d as f32, "{d}");
            }
        }
    }
}
