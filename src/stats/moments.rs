//! The second moment of the queries per KV head, rotated to one fixed relative position or to their own.
//!
//! # Source
//! A2ATS, arXiv 2502.12665, Eq. 10 and 13: H = E[qt^T qt] with qt = q R_b. The paper's ablation without
//! windowed RoPE takes the moment of the rotated queries instead.

use ndarray::{Array3, ArrayView3, s};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::compute::device::Device;
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

/// The second moments of one layer as raw sums and counts, which merge by addition.
#[derive(Clone, Debug)]
pub struct LayerMoments {
    /// Sum of qt^T qt over kept rows and the query heads of each group: `[g,d,d]`.
    pub sum_qq: Array3<f64>,
    /// Number of query vectors in each sum: `[g]`.
    pub count: Vec<u64>,
}

impl LayerMoments {
    /// Makes empty sums for g KV heads of d channels.
    pub fn new(n_kv_heads: usize, head_dim: usize) -> Self {
        Self {
            sum_qq: Array3::zeros((n_kv_heads, head_dim, head_dim)),
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
        position: Position,
    ) -> Result<()> {
        let (h, _, d) = q_pre.dim();
        let g = self.count.len();
        let r = h / g;
        let table = match position {
            Position::Windowed(b) => rope.table(b..b + 1),
            Position::Own => rope.table(0..kept.len()),
        };
        let rows: Vec<usize> = (0..kept.len()).filter(|i| kept[*i]).collect();
        for rows in rows.chunks(ROWS) {
            let mut q_rope = vec![0.0; h * rows.len() * d];
            let heads = q_rope.par_chunks_exact_mut(rows.len() * d).enumerate();
            heads.for_each(|(head, q_rope)| {
                for (q, row) in q_rope.chunks_exact_mut(d).zip(rows) {
                    let from = q_pre.slice(s![head, *row, ..]);
                    q.iter_mut().zip(from).for_each(|(q, from)| *q = *from);
                    table.rotate(q, position.windowed().map_or(*row, |_| 0));
                }
            });
            let q_rope = Array3::from_shape_vec((g, r * rows.len(), d), q_rope)?;
            self.sum_qq += &device.second_moment(q_rope.view())?;
        }
        let vectors = (r * rows.len()) as u64;
        self.count.iter_mut().for_each(|count| *count += vectors);
        Ok(())
    }
}
