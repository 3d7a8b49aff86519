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
use crate::model::rope::Rope;

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

    /// Adds the queries of a block.
    ///
    /// # Shapes
    /// q_pre `[h,m,d]`, all rows of the block; `kept` says for each of the m rows whether it counts.
    ///
    /// # Numerics
    /// Those of [`Device::second_moment`]; the result does not depend on the number of threads.
    pub fn add(
        &mut self,
        device: &dyn Device,
        q_pre: ArrayView3<f32>,
        kept: &[bool],
        rope: &Rope,
    ) -> Result<()> {
        let (h, _, d) = q_pre.dim();
        let g = self.count.len();
        let r = h / g;
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
            self.pre += &device.second_moment(queries.view())?;
            let vectors = elements_mut(&mut queries).par_chunks_exact_mut(d).enumerate();
            vectors.for_each(|(i, q)| table.rotate(q, rows[i % rows.len()]));
            self.rope += &device.second_moment(queries.view())?;
        }
        let vectors = (r * rows.len()) as u64;
        self.count.iter_mut().for_each(|count| *count += vectors);
        Ok(())
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
            Position::Windowed(b) => {
                let table = rope.table(b..b + 1);
                let mut sums = self.pre.clone();
                for axis in [Axis(2), Axis(1)] {
                    let vectors = sums.lanes_mut(axis).into_iter();
                    vectors.for_each(|vector| table.rotate_f64(vector, 0));
                }
                sums
            }
        };
        LayerMoments {
            sum_qq,
            count: self.count.clone(),
        }
    }
}
