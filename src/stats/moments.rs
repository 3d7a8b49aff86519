//! The second moment of the queries per KV head, at one fixed relative position or at their own.
//!
//! # Source
//! A2ATS, arXiv 2502.12665, Eq. 10 and 13: H = E[qt^T qt] with qt = q R_b; the paper's ablation
//! without windowed RoPE has the rotated queries instead.

use std::ops::Range;

use ndarray::{Array3, ArrayView3, Axis, s};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

use crate::compute::device::Device;
use crate::compute::layout::elements_mut;
use crate::error::{Error, Result};
use crate::model::rope::Rope;
use crate::store::{self, Output, Store, Tensor};

/// Rows of a block that are rotated and handed to the device at once.
const ROWS: usize = 2048;

/// Where the queries are rotated to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The relative position b of windowed RoPE.
    Windowed(usize),
    /// Each query's own position: standard RoPE.
    Own,
}

impl Position {
    /// The relative position b, if it is a fixed one.
    pub fn windowed(self) -> Option<usize> {
        match self {
            Self::Windowed(b) => Some(b),
            Self::Own => None,
        }
    }
}

/// Raw sums of one layer, so that runs merge by adding.
#[derive(Clone, Debug)]
pub struct LayerMoments {
    /// Sum of qt^T qt over kept rows and the query heads of each group: `[g,d,d]`.
    pub sum_qq: Array3<f64>,
    /// Query vectors in each sum: `[g]`.
    pub count: Vec<u64>,
}

impl LayerMoments {
    /// Empty sums for g KV heads of d channels.
    pub fn new(n_kv_heads: usize, head_dim: usize) -> Self {
        Self {
            sum_qq: Array3::zeros((n_kv_heads, head_dim, head_dim)),
            count: vec![0; n_kv_heads],
        }
    }

    /// Adds the queries of one block.
    ///
    /// # Shapes
    /// q_pre `[h,m,d]`, the whole block; `kept` has m entries.
    ///
    /// # Numerics
    /// [`Device::second_moment`]; the same bytes for any thread count.
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
            let mut q_rope = Array3::zeros((g, r * rows.len(), d));
            let heads = q_rope.axis_iter_mut(Axis(0)).into_par_iter().enumerate();
            heads.for_each(|(c, mut q_rope)| {
                for (a, mut q_rope) in q_rope.axis_chunks_iter_mut(Axis(0), rows.len()).enumerate() {
                    for (mut q, row) in q_rope.rows_mut().into_iter().zip(rows) {
                        q.assign(&q_pre.slice(s![c * r + a, *row, ..]));
                        table.rotate(elements_mut(&mut q), position.windowed().map_or(*row, |_| 0));
                    }
                }
            });
            self.sum_qq += &device.second_moment(q_rope.view())?;
        }
        let vectors = (r * rows.len()) as u64;
        self.count.iter_mut().for_each(|count| *count += vectors);
        Ok(())
    }
}

/// The moments of all layers and what they were taken from.
pub struct Moments {
    /// One entry per layer.
    pub layers: Vec<LayerMoments>,
    /// Where the queries were rotated to.
    pub position: Position,
    /// The `model` and `calibration` objects of the manifest.
    pub origin: Value,
}

impl Moments {
    /// Writes `sum_qq` f64 `[layers,g,d,d]` and `count` u64 `[layers,g]`.
    pub fn write(&self, output: Output) -> Result<()> {
        let (g, d) = match self.layers.first() {
            Some(l) => (l.sum_qq.len_of(Axis(0)), l.sum_qq.len_of(Axis(1))),
            None => (0, 0),
        };
        let n = self.layers.len();
        let sums: Vec<f64> = self
            .layers
            .iter()
            .flat_map(|l| l.sum_qq.iter().copied())
            .collect();
        let counts: Vec<u64> = self.layers.iter().flat_map(|l| l.count.iter().copied()).collect();
        let mut manifest = self.origin.clone();
        manifest["kind"] = json!("moments");
        manifest["wrope_position"] = json!(self.position.windowed());
        let tensors = [
            Tensor::new("sum_qq", &[n, g, d, d], &sums),
            Tensor::new("count", &[n, g], &counts),
        ];
        store::write(output, &tensors, Some(&manifest.to_string()))
    }

    /// Reads a moments file for a model with these sizes.
    ///
    /// # Errors
    /// Another kind of file, other sizes, sums that are not finite.
    pub fn read(path: &Path, n_layers: usize, g: usize, d: usize) -> Result<Self> {
        let store = Store::open(path)?;
        let manifest = store.manifest()?;
        let position = manifest.get("wrope_position").and_then(position_of);
        let (Some("moments"), Some(position)) = (manifest.get("kind").and_then(Value::as_str), position)
        else {
            return Err(Error::failed(format!("{} is not a moments file", path.display())));
        };
        let sums: Vec<f64> = store.read("sum_qq", &[n_layers, g, d, d])?;
        let counts: Vec<u64> = store.read("count", &[n_layers, g])?;
        if let Some(i) = sums.iter().position(|v| !v.is_finite()) {
            return Err(Error::failed(format!(
                "{}: `sum_qq` has a value that is not finite (element {i})",
                path.display()
            ))
            .hint("make the dump again; if this happens again, the model overflows"));
        }
        let layers = split(n_layers, g * d * d)
            .zip(split(n_layers, g))
            .map(|(s, c)| LayerMoments {
                sum_qq: Array3::from_shape_fn((g, d, d), |(a, i, j)| sums[s.start + (a * d + i) * d + j]),
                count: counts[c].to_vec(),
            })
            .collect();
        Ok(Self {
            layers,
            position,
            origin: json!({ "model": manifest["model"], "calibration": manifest["calibration"] }),
        })
    }
}

/// The position of a manifest: a number, or null for the queries' own.
pub fn position_of(value: &Value) -> Option<Position> {
    match value {
        Value::Null => Some(Position::Own),
        value => {
            let b = value.as_u64().filter(|b| *b <= u64::from(u32::MAX))?;
            Some(Position::Windowed(b as usize))
        }
    }
}

fn split(parts: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..parts).map(move |i| i * len..(i + 1) * len)
}
