//! The states of one layer, as the fit of a section reads them.

use std::ops::Range;

use ndarray::{Array2, Array3, ArrayView1, Axis};

use crate::compute::device::Device;
use crate::error::{Error, Result};
use crate::kv::Qkv;
use crate::model::Sizes;
use crate::model::rope::Rope;
use crate::stats::moments::{LayerMoments, QuerySums};

/// Reads rows of one head, `[rows,d]`.
type ReadHead<'a> = &'a dyn Fn(usize) -> Result<Array2<f32>>;

/// The calibration states of one layer, and the device that works on them.
pub struct LayerStates<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// The layer's sliding window.
    pub window: Option<usize>,
    /// The device for the heavy operations.
    pub device: &'a dyn Device,
    /// Read a head's states: the queries that the fit asked for (`Fit::query_rows`), all keys, `[n,d]`, both before rotation,
    /// and all values, `[n,d]`, which are empty unless the section's facts say that it reads them.
    pub read: Qkv<ReadHead<'a>>,
    /// The query moments, if the section reads them.
    pub moments: Option<&'a LayerMoments>,
    /// The sums from which the moments under other rotations follow, if the fit reads them.
    pub sums: Option<&'a QuerySums>,
    /// The first row of each block, then n.
    pub block_start: &'a [u32],
    /// Which rows take part in the fit, `[n]`; the others are held out.
    pub kept: &'a [bool],
    /// Rotates keys to their own positions.
    pub rope: &'a Rope,
}

impl LayerStates<'_> {
    /// Returns the query moments of the layer.
    ///
    /// # Errors
    /// The section's declaration does not say that it reads them.
    pub fn moments(&self) -> Result<&LayerMoments> {
        self.moments
            .ok_or_else(|| Error::internal("internal: a section reads moments that it did not ask for"))
    }

    /// Returns the sums over the queries of the layer.
    ///
    /// # Errors
    /// The fit does not say that it reads them.
    pub fn sums(&self) -> Result<&QuerySums> {
        self.sums
            .ok_or_else(|| Error::internal("internal: a fit reads sums that it did not ask for"))
    }

    /// Counts the rows that take part in the fit.
    pub fn n_kept(&self) -> usize {
        self.kept.iter().filter(|kept| **kept).count()
    }

    /// Divides the KV heads into ranges of heads that the device can fit together, with `size` centroids per head.
    pub fn head_runs(&self, size: usize) -> impl Iterator<Item = Range<usize>> {
        let (g, d) = (self.sizes.n_kv_heads, self.sizes.head_dim);
        let at_once = self.device.heads_at_once(self.n_kept(), d, size).max(1);
        (0..g)
            .step_by(at_once)
            .map(move |first| first..g.min(first + at_once))
    }

    /// Reads the kept and the held-out keys of a range of KV heads, `[b,kept,d]` and `[b,n - kept,d]`, rotated to their
    /// own positions if `rotated` is set.
    pub fn split(&self, heads: Range<usize>, rotated: bool) -> Result<[Array3<f32>; 2]> {
        self.divide(heads, |keys| {
            if rotated {
                self.rope.rotate_blocks(keys, self.block_start)
            } else {
                Ok(())
            }
        })
    }

    /// Like [`Self::split`] with rotation, after `mean`, `[d]`, is subtracted from the keys: rotation is linear, so the
    /// results are the rotated keys less the mean at their positions.
    pub fn split_around(&self, heads: Range<usize>, mean: ArrayView1<f32>) -> Result<[Array3<f32>; 2]> {
        self.divide(heads, |keys| {
            *keys -= &mean;
            self.rope.rotate_blocks(keys, self.block_start)
        })
    }

    /// Reads the keys of a range of KV heads, changes each head's, and divides them into those of the fit and those that
    /// are held out.
    fn divide(
        &self,
        heads: Range<usize>,
        change: impl Fn(&mut Array2<f32>) -> Result<()>,
    ) -> Result<[Array3<f32>; 2]> {
        let rows = |wanted: bool| -> Vec<usize> {
            (0..self.kept.len()).filter(|i| self.kept[*i] == wanted).collect()
        };
        let rows = [rows(true), rows(false)];
        let of = |rows: &Vec<usize>| Array3::zeros((heads.len(), rows.len(), self.sizes.head_dim));
        let mut out = rows.each_ref().map(of);
        for (i, head) in heads.enumerate() {
            let mut keys = (self.read.k)(head)?;
            change(&mut keys)?;
            for (out, rows) in out.iter_mut().zip(&rows) {
                for (mut to, row) in out.index_axis_mut(Axis(0), i).outer_iter_mut().zip(rows) {
                    to.assign(&keys.row(*row));
                }
            }
        }
        Ok(out)
    }

    /// Lists the KV heads whose keys before rotation are all equal, such as pruned heads: choosing among equal keys
    /// means nothing.
    pub fn constant_heads(&self) -> Result<Vec<usize>> {
        let mut constant = Vec::new();
        for head in 0..self.sizes.n_kv_heads {
            let keys = (self.read.k)(head)?;
            if keys.nrows() > 1 && keys.outer_iter().all(|key| key == keys.row(0)) {
                constant.push(head);
            }
        }
        Ok(constant)
    }

    /// Lists, for each block, the range of its kept rows.
    pub fn kept_blocks(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let blocks = self.block_start.windows(2).map(|block| {
            let start = end;
            let block = block[0] as usize..block[1] as usize;
            end += self.kept[block].iter().filter(|kept| **kept).count();
            start..end
        });
        blocks.collect()
    }
}
