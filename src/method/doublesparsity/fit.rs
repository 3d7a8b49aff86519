//! The order of a layer's channels.

use ndarray::{Array2, Axis};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::section::{CHANNELS, DoubleSparsityQuality, DoubleSparsitySection};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, SectionKind, object};
use crate::env;
use crate::error::{Error, Result};
use crate::model::rope::RopeTable;
use crate::stats::sampling::TextBlocks;

/// The most rows that a fit takes, evenly spaced among the kept ones.
pub(super) const MAX_ROWS: usize = 65_536;
/// Rows whose products are summed by one task.
const CHUNK: usize = 1024;

/// The fit of the section `doublesparsity`: the channels of each KV head, by the sum of |q_i k_i|.
///
/// Every product is that of a row's query with the key of the same row, both rotated to the row's position. The sum runs
/// over the rows and the query heads of the group; the lower channel wins a tie.
///
/// # Numerics
/// Products and sums in f64. Chunks of rows are summed in the order of the text, so the result depends neither on the
/// number of threads nor on how the text was divided among machines.
///
/// # Source
/// arXiv 2408.07092, and the authors' code for the pairs: every token with itself.
pub(super) struct DoubleSparsityFit {
    /// The rows whose queries and keys are multiplied.
    pub rows: Vec<usize>,
    /// The blocks of the text.
    pub blocks: TextBlocks,
}

impl Fit for DoubleSparsityFit {
    fn kind(&self) -> &'static dyn SectionKind {
        &DoubleSparsitySection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        object(&json!({
            "max_rows": MAX_ROWS,
            "pairs": "same-row",
            "rope_space": "post",
            "granularity": "kv-head-sum",
        }))
    }

    fn query_rows(&self) -> &[usize] {
        &self.rows
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        let row = text.sizes.head_dim * size_of::<f32>();
        // All keys of a head, those of the rows, the queries of one query head, and the rotations.
        (text.n + 2 * self.rows.len() + text.longest_block) * row + text.query_read_bytes
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        let table = states.rope.table(0..self.blocks.longest());
        for kv_head in 0..states.sizes.n_kv_heads {
            env::check()?;
            let sums = self.sums(states, &table, kv_head)?;
            if sums.iter().any(|sum| !sum.is_finite()) {
                let what = format!("KV head {kv_head}: a sum of products is not finite");
                return Err(Error::invalid(what)
                    .hint("the queries or keys of this head are not finite; check the model and the text"));
            }
            let mut order: Vec<u32> = (0..sums.len() as u32).collect();
            order.sort_by(|a, b| sums[*b as usize].total_cmp(&sums[*a as usize]));
            let all: f64 = sums.iter().sum();
            let share = |channels: usize| {
                let first = order.iter().take(channels.max(1));
                let sum: f64 = first.map(|channel| sums[*channel as usize]).sum();
                if all > 0.0 { sum / all } else { 1.0 }
            };
            let quality = DoubleSparsityQuality {
                share_eighth: share(sums.len() / 8),
                share_quarter: share(sums.len() / 4),
                keys: self.rows.len(),
            };
            part.put(CHANNELS, &order);
            part.quality.push(object(&quality)?);
            let line = format!(
                "{:.1}% of the products are in one eighth of the channels",
                100.0 * quality.share_eighth
            );
            done(kv_head, Some(line));
        }
        Ok(part)
    }
}

impl DoubleSparsityFit {
    /// Returns the sum of |q_i k_i| for each channel i of a KV head, `[d]`.
    fn sums(&self, states: &LayerStates, table: &RopeTable, kv_head: usize) -> Result<Vec<f64>> {
        let r = states.sizes.group();
        let mut keys = (states.read.k)(kv_head)?.select(Axis(0), &self.rows);
        self.blocks.rotate(&mut keys, &self.rows, table, 1.0)?;
        let mut sums = vec![0.0; keys.ncols()];
        for query_head in kv_head * r..(kv_head + 1) * r {
            let mut queries = (states.read.q)(query_head)?;
            self.blocks.rotate(&mut queries, &self.rows, table, 1.0)?;
            add_magnitudes(&queries, &keys, &mut sums);
        }
        Ok(sums)
    }
}

/// Adds the magnitudes of the products of rows, `[n,d]` each, to the sums of their channels, `[d]`.
fn add_magnitudes(queries: &Array2<f32>, keys: &Array2<f32>, sums: &mut [f64]) {
    let chunks = queries.axis_chunks_iter(Axis(0), CHUNK).into_par_iter();
    let parts = chunks
        .zip(keys.axis_chunks_iter(Axis(0), CHUNK))
        .map(|(queries, keys)| {
            let mut part = vec![0.0; queries.ncols()];
            for (query, key) in queries.outer_iter().zip(keys.outer_iter()) {
                for ((sum, q), k) in part.iter_mut().zip(query).zip(key) {
                    *sum += (f64::from(*q) * f64::from(*k)).abs();
                }
            }
            part
        });
    for part in parts.collect::<Vec<_>>() {
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
}
