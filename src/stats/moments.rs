//! The second moment of the queries per KV head, rotated to one fixed relative position or to their own.
//!
//! # Source
//! A2ATS, arXiv 2502.12665, Eq. 10 and 13: H = E[qt^T qt] with qt = q R_b. The paper's ablation without
//! windowed RoPE takes the moment of the rotated queries instead.

use std::fmt;

use ndarray::{Array3, ArrayView3, Axis, s};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::compute::device::Device;
use crate::compute::layout::elements_mut;
use crate::error::Result;
use crate::model::rope::{Rope, RopeTable};

/// Rows of a block that are rotated and sent to the device at once.
const ROWS: usize = 2048;

/// The position to which the queries are rotated; in manifests a number, or null for each query's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Option<usize>", from = "Option<u32>")]
pub enum Position {
    /// The fixed relative position b of windowed RoPE.
    Windowed(usize),
    /// Each query's own position: standard RoPE.
    Own,
}

impl Position {
    /// Returns the relative position b of windowed RoPE; `None` for standard RoPE.
    pub fn windowed(self) -> Option<usize> {
        match self {
            Self::Windowed(b) => Some(b),
            Self::Own => None,
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Windowed(b) => write!(f, "position {b}"),
            Self::Own => f.write_str("the queries' own positions"),
        }
    }
}

impl From<Position> for Option<usize> {
    fn from(position: Position) -> Self {
        position.windowed()
    }
}

impl From<Option<u32>> for Position {
    fn from(position: Option<u32>) -> Self {
        position.map_or(Self::Own, |b| Self::Windowed(b as usize))
    }
}

/// The second moments of one layer, as a fit reads them: raw sums and counts.
#[derive(Clone, Debug)]
pub struct LayerMoments {
    /// Sum of qt^T qt over kept rows and the query heads of each group: `[g,d,d]`.
    pub sum_qq: Array3<f64>,
    /// Number of query vectors in each sum: `[g]`.
    pub count: Vec<u64>,
}

/// The sums over one layer's queries from which the second moments at every position follow; they merge by addition.
#[derive(Clone, Debug)]
pub struct QuerySums {
    /// Sum of q^T q before rotation, over kept rows and the query heads of each group: `[g,d,d]`.
    pub pre: Array3<f64>,
    /// The same sum with each query rotated to its own position: `[g,d,d]`.
    pub rope: Array3<f64>,
    /// Number of query vectors in each sum: `[g]`.
    pub count: Vec<u64>,
}

impl QuerySums {
    /// Makes empty sums for g KV heads of d channels.
    pub fn new(n_kv_heads: usize, head_dim: usize) -> Self {
        let empty = Array3::zeros((n_kv_heads, head_dim, head_dim));
        Self {
            pre: empty.clone(),
            rope: empty,
            count: vec![0; n_kv_heads],
        }
    }

    /// Sums the queries of one block.
    ///
    /// # Shapes
    /// q_pre `[h,m,d]`, all rows of the block; `kept` says for each of the m rows whether it counts.
    ///
    /// # Numerics
    /// Those of [`Device::second_moment`]; the result does not depend on the number of threads.
    pub fn of_block(
        device: &dyn Device,
        n_kv_heads: usize,
        q_pre: ArrayView3<f32>,
        kept: &[bool],
        rope: &Rope,
    ) -> Result<Self> {
        let (h, _, d) = q_pre.dim();
        let g = n_kv_heads;
        let r = h / g;
        let mut sums = Self::new(g, d);
        let table = rope.table(0..kept.len());
        let rows: Vec<usize> = (0..kept.len()).filter(|i| kept[*i]).collect();
        for rows in rows.chunks(ROWS) {
            let mut queries = vec![0.0; h * rows.len() * d];
            let heads = queries.par_chunks_exact_mut(rows.len() * d).enumerate();
            heads.for_each(|(head, queries)| {
                for (q, row) in queries.chunks_exact_mut(d).zip(rows) {
                    let from = q_pre.slice(s![head, *row, ..]);
                    q.iter_mut().zip(from).for_each(|(q, from)| *q = *from);
                }
            });
            let mut queries = Array3::from_shape_vec((g, r * rows.len(), d), queries)?;
            sums.pre += &device.second_moment(queries.view())?;
            let vectors = elements_mut(&mut queries).par_chunks_exact_mut(d).enumerate();
            vectors.for_each(|(i, q)| table.rotate(q, rows[i % rows.len()]));
            sums.rope += &device.second_moment(queries.view())?;
        }
        sums.count.fill((r * rows.len()) as u64);
        Ok(sums)
    }

    /// Adds the sums of another block.
    ///
    /// # Numerics
    /// Sums over many blocks are added in the order of the blocks, wherever each block was summed: the last bits
    /// therefore do not depend on how a text was divided among machines.
    pub fn add(&mut self, block: &Self) {
        self.pre += &block.pre;
        self.rope += &block.rope;
        let counts = self.count.iter_mut().zip(&block.count);
        counts.for_each(|(count, more)| *count += more);
    }

    /// Returns the second moments of the queries rotated to a position.
    ///
    /// # Numerics
    /// The sum before rotation is rotated in f64, by the cosines and sines that rotate f32 queries.
    ///
    /// # Source
    /// With qt = q R_b, the sum of qt^T qt is R_b^T S R_b, where S is the sum of q^T q: linear in S, so one S serves
    /// every position. Ours; the paper rotates the queries.
    pub fn at(&self, position: Position, rope: &Rope) -> LayerMoments {
        let sum_qq = match position {
            Position::Own => self.rope.clone(),
            Position::Windowed(b) => self.rotated(&rope.table(b..b + 1), 0),
        };
        LayerMoments {
            sum_qq,
            count: self.count.clone(),
        }
    }

    /// Returns the weighted mean of the second moments of the queries under each rotation of a table.
    ///
    /// # Numerics
    /// As [`QuerySums::at`].
    ///
    /// # Source
    /// Ours: with qt = q R_u in bucket u of distances and the bucket's weight p_u, E[qt^T qt] is the sum over u of
    /// p_u R_u^T S R_u.
    pub fn over(&self, rotations: &RopeTable, weights: &[f64]) -> LayerMoments {
        let mut sum_qq = Array3::zeros(self.pre.dim());
        for (row, weight) in weights.iter().enumerate() {
            sum_qq.scaled_add(*weight, &self.rotated(rotations, row));
        }
        LayerMoments {
            sum_qq,
            count: self.count.clone(),
        }
    }

    /// Returns R^T S R for the `row`-th rotation R of a table, `[g,d,d]`.
    fn rotated(&self, table: &RopeTable, row: usize) -> Array3<f64> {
        let mut sums = self.pre.clone();
        for axis in [Axis(2), Axis(1)] {
            let vectors = sums.lanes_mut(axis).into_iter();
            vectors.for_each(|vector| table.rotate_f64(vector, row));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::cpu::Cpu;
    use crate::model::rope::{RopeConfig, RopeScaling};
    use crate::testing::values;

    /// The moment of buckets against queries that are rotated to every distance of a bucket and averaged.
    #[test]
    fn moments_of_buckets_are_those_of_mean_queries() {
        let (h, g, m, d) = (4, 2, 11, 8);
        let config = RopeConfig {
            theta: 1e4,
            scaling: RopeScaling::Default,
        };
        let rope = Rope::new(&config, d);
        let queries = Array3::from_shape_vec((h, m, d), values(h * m * d, 5)).unwrap();
        let kept: Vec<bool> = (0..m).map(|i| i % 4 != 1).collect();
        let sums = QuerySums::of_block(&Cpu, g, queries.view(), &kept, &rope).unwrap();
        let (edges, weights) = ([0, 1, 30, 400], [0.5, 0.2, 0.3]);
        let found = sums.over(&rope.mean_table(&edges), &weights);
        let mut exact = Array3::<f64>::zeros((g, d, d));
        for (range, weight) in edges.windows(2).zip(weights) {
            let table = rope.table(range[0] as usize..range[1] as usize);
            let n = (range[1] - range[0]) as usize;
            for (head, row) in (0..h).flat_map(|head| (0..m).map(move |row| (head, row))) {
                let mut mean = vec![0.0; d];
                for distance in 0..n {
                    let mut q = queries.slice(s![head, row, ..]).to_vec();
                    table.rotate(&mut q, distance);
                    mean.iter_mut()
                        .zip(q)
                        .for_each(|(mean, q)| *mean += f64::from(q) / n as f64);
                }
                for (i, j) in (0..d).flat_map(|i| (0..d).map(move |j| (i, j))) {
                    exact[[head / (h / g), i, j]] +=
                        f64::from(u8::from(kept[row])) * weight * mean[i] * mean[j];
                }
            }
        }
        // Angles of up to 400 and 18 products of values below 1 in f32.
        let bound = 18.0 * 400.0 * 2f64.powi(-24);
        for (found, exact) in found.sum_qq.iter().zip(&exact) {
            assert!((found - exact).abs() < bound, "{found} {exact}");
        }
        assert!(exact.iter().any(|v| v.abs() > 100.0 * bound));
        assert_eq!(found.count, [2 * 8; 2]);
    }
}
