//! The states of one layer of a dump, head by head, and the sums of its blocks.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use ndarray::{Array2, Array3};

use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::Sizes;
use crate::stats::moments::QuerySums;
use crate::store::Store;

/// Names of the sums over the queries of each block, in the layers' files of a shard: before rotation, and rotated to
/// their own positions, f64 `[blocks,g,d,d]`; and of the numbers of queries, u64 `[blocks,g]`.
pub(super) const BLOCK_SUMS: [&str; 3] = ["sum_qq_pre", "sum_qq_rope", "count"];

/// The kinds of states of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Pre-RoPE keys.
    KPre,
    /// Pre-RoPE queries.
    QPre,
    /// Values.
    V,
}

/// The states of one layer, which are read head by head.
pub struct LayerDump {
    files: Vec<LayerFile>,
    sizes: Sizes,
    dtype: Float,
}

/// The file of a layer in one folder.
pub(super) struct LayerFile {
    /// The header of the file, which tells where the tensors are.
    store: Store,
    file: File,
    /// Its rows among those of all folders.
    rows: Range<usize>,
    /// Number of its blocks.
    blocks: usize,
}

impl LayerDump {
    /// Makes a layer of the files of all folders, in the order of their rows.
    pub(super) fn new(files: Vec<LayerFile>, sizes: Sizes, dtype: Float) -> Self {
        Self { files, sizes, dtype }
    }

    /// Reads rows `first..first + count` of one head of a state, as f32: `[count, d]`.
    ///
    /// # Errors
    /// The dump does not keep this state, or a value is not finite.
    pub fn read(&self, state: State, head: usize, first: usize, count: usize) -> Result<Array2<f32>> {
        let d = self.sizes.head_dim;
        let mut values = vec![0.0; count * d];
        for file in &self.files {
            let rows = file.rows.start.max(first)..file.rows.end.min(first + count);
            if !rows.is_empty() {
                let own = rows.start - file.rows.start..rows.end - file.rows.start;
                let values = &mut values[(rows.start - first) * d..(rows.end - first) * d];
                file.read(state, head, own, self.dtype, values)?;
            }
        }
        Ok(Array2::from_shape_vec((count, d), values)?)
    }

    /// Adds up the sums over the queries of all blocks, in their order.
    ///
    /// # Errors
    /// The files are not those of shards; a sum is not finite.
    pub fn sums(&self) -> Result<QuerySums> {
        let Sizes {
            n_kv_heads: g,
            head_dim: d,
            ..
        } = self.sizes;
        let mut sums = QuerySums::new(g, d);
        for file in &self.files {
            file.add_sums(&mut sums)?;
        }
        Ok(sums)
    }
}

impl LayerFile {
    /// Makes the file that has `rows` of all rows, in `blocks` blocks.
    pub(super) fn new(store: Store, rows: Range<usize>, blocks: usize) -> Result<Self> {
        let file = File::open(store.path()).map_err(|e| Error::io(store.path(), "open", &e))?;
        Ok(Self {
            store,
            file,
            rows,
            blocks,
        })
    }

    /// Reads rows of one head of a state.
    fn read(
        &self,
        state: State,
        head: usize,
        rows: Range<usize>,
        dtype: Float,
        values: &mut [f32],
    ) -> Result<()> {
        let name = match state {
            State::KPre => "k_pre",
            State::QPre => "q_pre",
            State::V => "v",
        };
        let start = self.store.data_start(name).ok_or_else(|| {
            Error::not_found(format!("the dump contains no `{name}`"))
                .hint("recreate the dump with ⟨queries⟩ and ⟨values⟩")
        })?;
        let d = values.len() / rows.len();
        let row = d * dtype.bytes();
        let mut bytes = vec![0; rows.len() * row];
        self.file
            .read_exact_at(
                &mut bytes,
                (start + (head * self.rows.len() + rows.start) * row) as u64,
            )
            .map_err(|e| Error::io(self.store.path(), "read", &e))?;
        dtype.read(&bytes, values);
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            return Err(Error::damaged(format!(
                "{}: `{name}` of head {head} contains a NaN or infinite value in row {}",
                self.store.path().display(),
                rows.start + i / d
            ))
            .hint("recreate the dump with ⟨dtype=f32⟩; it is damaged, or its dtype has too small a range for this model"));
        }
        Ok(())
    }

    /// Adds the sums of every block.
    fn add_sums(&self, sums: &mut QuerySums) -> Result<()> {
        let (g, d, _) = sums.pre.dim();
        let [pre, rope, count] = BLOCK_SUMS;
        let blocks = self.blocks;
        let read = |name: &str| self.store.read::<f64>(name, &[blocks, g, d, d]);
        let (pre, rope) = (read(pre)?, read(rope)?);
        let counts: Vec<u64> = self.store.read(count, &[blocks, g])?;
        if pre.iter().chain(&rope).any(|v| !v.is_finite()) {
            let what = format!(
                "{}: a sum over queries is NaN or infinite",
                self.store.path().display()
            );
            return Err(
                Error::damaged(what).hint("recreate the shard; if the error persists, the model overflows")
            );
        }
        let of = |values: &[f64], i: usize| {
            let values = values[i * g * d * d..(i + 1) * g * d * d].to_vec();
            Array3::from_shape_vec((g, d, d), values)
        };
        for i in 0..blocks {
            sums.add(&QuerySums {
                pre: of(&pre, i)?,
                rope: of(&rope, i)?,
                count: counts[i * g..(i + 1) * g].to_vec(),
            });
        }
        Ok(())
    }
}
