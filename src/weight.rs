//! A weight matrix that stays in its checkpoint's float type, as a view of a memory-mapped file.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Advice, UncheckedAdvice};
use ndarray::ArrayView2;

use crate::error::{Error, Result};
use crate::float::Float;
use crate::mapped::Mapped;

/// A float tensor within a memory-mapped checkpoint file.
#[derive(Clone)]
pub struct Weight {
    pub(crate) file: Arc<Shard>,
    /// First byte of the tensor in its file.
    pub(crate) start: usize,
    pub(crate) dtype: Float,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) name: Arc<str>,
}

impl Weight {
    /// Writes values that come from no checkpoint to a temporary file and maps it.
    ///
    /// # Shapes
    /// values `[rows, cols]`.
    ///
    /// # Errors
    /// A temporary file that cannot be written.
    pub fn from_values(values: ArrayView2<f32>, dtype: Float) -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::failed(format!("cannot write a temporary file: {e}")).hint("set TMPDIR to another folder")
        };
        let mut file = tempfile::tempfile().map_err(failed)?;
        let mut bytes = Vec::new();
        for row in values.rows() {
            bytes.clear();
            dtype.write(&row.to_vec(), &mut bytes);
            file.write_all(&bytes).map_err(failed)?;
        }
        let map = Mapped::new(&file, Path::new("a temporary file")).map_err(failed)?;
        Ok(Self {
            file: Arc::new(Shard {
                path: PathBuf::new(),
                file,
                map,
            }),
            start: 0,
            dtype,
            rows: values.nrows(),
            cols: values.ncols(),
            name: "".into(),
        })
    }

    /// Counts the rows: the output channels of a projection; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Counts the columns: the input channels of a projection.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the stored element type.
    pub fn dtype(&self) -> Float {
        self.dtype
    }

    /// Returns the tensor's name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the stored bytes of rows `first..first + count`.
    pub fn row_bytes(&self, first: usize, count: usize) -> &[u8] {
        let row = self.cols * self.dtype.bytes();
        &self.file.map[self.start + first * row..self.start + (first + count) * row]
    }

    /// Returns all values, row-major, as f32.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        self.dtype.read(self.row_bytes(0, self.rows), &mut out);
        out
    }

    /// Fails at the first NaN or infinite element.
    pub fn check_finite(&self) -> Result<()> {
        let mut row = vec![0.0; self.cols];
        for r in 0..self.rows {
            self.dtype.read(self.row_bytes(r, 1), &mut row);
            if let Some(c) = row.iter().position(|v| !v.is_finite()) {
                return Err(Error::failed(format!(
                    "tensor `{}` contains a NaN or infinite value (element {})",
                    self.name,
                    r * self.cols + c
                ))
                .hint("the checkpoint is damaged; download it again"));
            }
        }
        Ok(())
    }

    /// Tells the system that the memory pages of `weights` are no longer needed.
    ///
    /// A later access reads them from the file again.
    pub fn release(weights: &[&Self]) {
        for w in weights {
            let len = w.rows * w.cols * w.dtype.bytes();
            // SAFETY: the mapping is read-only and file-backed: dropped pages come back with the same
            // contents on the next access.
            let advised = unsafe {
                w.file
                    .map
                    .unchecked_advise_range(UncheckedAdvice::DontNeed, w.start, len)
            };
            // Advice that the system ignores costs memory, never correctness.
            let _ = advised;
        }
    }

    /// Tells the system that rows are read in random order, so that it does not read ahead.
    pub fn scattered(&self) {
        let len = self.rows * self.cols * self.dtype.bytes();
        let _ = self.file.map.advise_range(Advice::Random, self.start, len);
    }
}

/// One mapped file of a checkpoint.
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) map: Mapped,
}
