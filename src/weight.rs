//! A weight matrix that stays in the type that its checkpoint stores, as a view of a memory-mapped file or of a copy.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use memmap2::{Advice, UncheckedAdvice};
use ndarray::ArrayView2;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::float::Float;
use crate::heap::free_bytes;
use crate::large::{self, Filled};
use crate::mapped::Mapped;
use crate::quant::Quant;

/// Bytes of a cache line, at which copies of weights begin.
const LINE: usize = 64;
/// Copies of fewer bytes than these are not worth their pages.
const LARGE: usize = 4 * large::PAGE;

/// How a weight's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As numbers.
    Float(Float),
    /// In blocks of integer codes.
    Quant(Quant),
}

impl Stored {
    /// Returns the bytes of so many values; those of a quantised type fill whole blocks.
    pub fn bytes(self, values: usize) -> usize {
        match self {
            Self::Float(float) => values * float.bytes(),
            Self::Quant(quant) => quant.bytes(values),
        }
    }

    /// Returns the type's name in checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(float) => float.name(),
            Self::Quant(quant) => quant.name(),
        }
    }
}

/// A tensor within a checkpoint file.
#[derive(Clone)]
pub struct Weight {
    pub(crate) file: Arc<Shard>,
    /// First byte of the tensor in its file.
    pub(crate) start: usize,
    pub(crate) stored: Stored,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The rows of a head, if the file alternates between the rows of a head's first and second half.
    pub(crate) alternating: Option<usize>,
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
        let rows = values.rows().into_iter().map(|row| {
            let mut bytes = Vec::new();
            dtype.write(&row.to_vec(), &mut bytes);
            bytes
        });
        Self::in_file(rows, Stored::Float(dtype), values.ncols(), "")
    }

    /// Writes rows of stored bytes to a temporary file and maps it.
    fn in_file(rows: impl Iterator<Item = Vec<u8>>, stored: Stored, cols: usize, name: &str) -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::system(format!("cannot write a temporary file: {e}")).hint("set TMPDIR to another folder")
        };
        let mut file = BufWriter::new(tempfile::tempfile().map_err(failed)?);
        let mut count = 0;
        for bytes in rows {
            file.write_all(&bytes).map_err(failed)?;
            count += 1;
        }
        let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
        let map = Mapped::new(&file, Path::new("a temporary file")).map_err(failed)?;
        Ok(Self {
            file: Arc::new(Shard {
                path: PathBuf::new(),
                file: None,
                bytes: Bytes::Mapped(map),
            }),
            start: 0,
            stored,
            rows: count,
            cols,
            alternating: None,
            name: name.into(),
        })
    }

    /// Rounds the values to a quantised type, in a temporary file; without a type, nothing changes.
    ///
    /// # Errors
    /// Rows that are not whole blocks; a temporary file that cannot be written.
    pub fn rounded(&self, quant: Option<Quant>) -> Result<Self> {
        let Some(quant) = quant else {
            return Ok(self.clone());
        };
        let (values, _) = quant.block();
        if !self.cols.is_multiple_of(values) {
            return Err(Error::invalid(format!(
                "tensor `{}` has rows of {} values, which are not whole blocks of {}",
                self.name,
                self.cols,
                quant.name()
            ))
            .hint("omit ⟨weights⟩"));
        }
        self.check_finite()?;
        let mut wide = vec![0.0; self.cols];
        let rows = (0..self.rows).map(|row| {
            self.read(row, 0, &mut wide);
            quant.round(&wide)
        });
        Self::in_file(rows, Stored::Quant(quant), self.cols, &self.name)
    }

    /// Counts the rows: the output channels of a projection; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Counts the columns: the input channels of a projection.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the type in which the values are stored.
    pub fn stored(&self) -> Stored {
        self.stored
    }

    /// Returns the float type in which a device keeps the values: the stored one, or f16 for quantised values.
    pub fn float(&self) -> Float {
        match self.stored {
            Stored::Float(float) => float,
            Stored::Quant(_) => Float::F16,
        }
    }

    /// Returns the tensor's name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the bytes of the tensor in its file.
    pub fn bytes(&self) -> usize {
        self.rows * self.stored.bytes(self.cols)
    }

    /// Returns the stored bytes of a row, in the file or in the copy.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let size = self.stored.bytes(self.cols);
        let first = self.start + stored_row(row, self.alternating) * size;
        &self.file.bytes[first..first + size]
    }

    /// Returns the rows as bf16, or `None` if they are stored in another type or not aligned.
    pub fn bf16_rows(&self) -> Option<Bf16Rows<'_>> {
        let Stored::Float(Float::Bf16) = self.stored else {
            return None;
        };
        Some(Bf16Rows {
            values: bytemuck::try_cast_slice(self.all_bytes()).ok()?,
            cols: self.cols,
            alternating: self.alternating,
        })
    }

    /// Returns the stored bytes that have the values `columns` of a row.
    pub fn part(&self, row: usize, columns: Range<usize>) -> &[u8] {
        let bytes = self.row_bytes(row);
        match self.stored {
            Stored::Float(float) => &bytes[columns.start * float.bytes()..columns.end * float.bytes()],
            Stored::Quant(quant) => {
                let (values, size) = quant.block();
                &bytes[columns.start / values * size..columns.end.div_ceil(values) * size]
            }
        }
    }

    /// Widens the values of a row from column `first` on to f32; of quantised rows, `first` and the values are whole chunks of
    /// 32.
    pub fn read(&self, row: usize, first: usize, out: &mut [f32]) {
        match self.stored {
            Stored::Float(float) => float.read(self.part(row, first..first + out.len()), out),
            Stored::Quant(quant) => read_quantised(quant, self.row_bytes(row), first, out),
        }
    }

    /// Returns all values, row-major, as f32.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (row, out) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.read(row, 0, out);
        }
        out
    }

    /// Appends all values, row-major, as little-endian numbers of a float type.
    pub fn append(&self, kind: Float, out: &mut Vec<u8>) {
        if self.stored == Stored::Float(kind) {
            (0..self.rows).for_each(|row| out.extend_from_slice(self.row_bytes(row)));
        } else {
            kind.write(&self.to_vec(), out);
        }
    }

    /// Fails at the first NaN or infinite element.
    pub fn check_finite(&self) -> Result<()> {
        let mut row = vec![0.0; self.cols];
        for r in 0..self.rows {
            self.read(r, 0, &mut row);
            if let Some(c) = row.iter().position(|v| !v.is_finite()) {
                return Err(Error::damaged(format!(
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
            let Bytes::Mapped(map) = &w.file.bytes else {
                continue;
            };
            // SAFETY: the mapping is read-only and file-backed: dropped pages come back with the same
            // contents on the next access.
            let advised =
                unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, w.start, w.bytes()) };
            // Advice that the system ignores costs memory, never correctness.
            let _ = advised;
        }
    }

    /// Tells the system that rows are read in random order, so that it does not read ahead.
    pub fn scattered(&self) {
        if let Bytes::Mapped(map) = &self.file.bytes {
            let _ = map.advise_range(Advice::Random, self.start, self.bytes());
        }
    }

    /// Copies weights that are read again and again to large pages, if the system has such pages and enough free memory.
    ///
    /// The pages of a file are small ones. As much memory as the copy takes must stay free, because the system cannot take it
    /// back as it can take the pages of a file.
    pub fn hold(weights: Vec<&mut Self>) {
        let total: usize = weights.iter().map(|weight| weight.room()).sum();
        if total >= LARGE && total <= free_bytes() / 2 && large::available() {
            Self::copy(weights, total);
        }
    }

    /// Copies weights to large pages; `total` is the sum of their [`Weight::room`].
    fn copy(mut weights: Vec<&mut Self>, total: usize) {
        let held = Filled::new(total, |mut rest| {
            let parts = weights.iter().map(|weight| {
                let part = rest.split_off_mut(..weight.room()).expect("the sum of all");
                (part, weight.all_bytes())
            });
            let parts: Vec<(&mut [u8], &[u8])> = parts.collect();
            let copies = parts.into_par_iter();
            copies.for_each(|(part, bytes)| part[..bytes.len()].copy_from_slice(bytes));
        });
        // Without the copy, the weights are read from their files.
        let Ok(held) = held else { return };
        let shard = Arc::new(Shard {
            path: PathBuf::new(),
            file: None,
            bytes: Bytes::Held(held),
        });
        let mut next = 0;
        for weight in &mut weights {
            Self::release(&[weight]);
            weight.file = Arc::clone(&shard);
            weight.start = next;
            next += weight.room();
        }
    }

    /// Returns the bytes that a copy takes, up to the start of the next copy.
    fn room(&self) -> usize {
        self.bytes().next_multiple_of(LINE)
    }

    fn all_bytes(&self) -> &[u8] {
        &self.file.bytes[self.start..self.start + self.bytes()]
    }
}

/// The rows of a weight that is stored in bf16.
pub struct Bf16Rows<'a> {
    values: &'a [bf16],
    cols: usize,
    alternating: Option<usize>,
}

impl<'a> Bf16Rows<'a> {
    /// Counts the columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns a row.
    #[inline]
    pub fn row(&self, row: usize) -> &'a [bf16] {
        &self.values[stored_row(row, self.alternating) * self.cols..][..self.cols]
    }
}

/// Returns where a file has a row, if it alternates between the rows of the two halves of each head, of `rows` rows.
pub(crate) fn stored_row(row: usize, alternating: Option<usize>) -> usize {
    let Some(rows) = alternating else {
        return row;
    };
    let (head, row) = (row / rows, row % rows);
    let (half, row) = (row / (rows / 2), row % (rows / 2));
    head * rows + 2 * row + half
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"))]
fn read_quantised(quant: Quant, row: &[u8], first: usize, out: &mut [f32]) {
    quant.read(row, first, out);
}

/// One file of a checkpoint, or copies of weights.
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    /// The file, which is read where mapping would be slow; `None` for copies, and for temporary files, of which there can be
    /// thousands.
    pub(crate) file: Option<File>,
    pub(crate) bytes: Bytes,
}

/// The bytes of a file, or of copies.
pub(crate) enum Bytes {
    Mapped(Mapped),
    Held(Filled),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Held(held) => held,
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::testing::values;

    #[test]
    fn copies_have_the_rows_of_the_weights() {
        let sizes = [(3, 5), (4, 64), (1, 33), (8, 96)];
        let made = sizes.into_iter().zip(1..).map(|((rows, cols), seed)| {
            let values = Array2::from_shape_vec((rows, cols), values(rows * cols, seed)).expect("as many");
            let mut weight = Weight::from_values(values.view(), Float::Bf16).expect("a weight");
            weight.alternating = rows.is_multiple_of(4).then_some(4);
            weight
        });
        let mut weights: Vec<Weight> = made.collect();
        weights.push(weights[1].rounded(Some(Quant::Q8_0)).expect("whole blocks"));
        let before = weights.clone();
        let total = weights.iter().map(Weight::room).sum();
        Weight::copy(weights.iter_mut().collect(), total);
        let shards: Vec<*const Shard> = weights.iter().map(|of| Arc::as_ptr(&of.file)).collect();
        assert!(shards.iter().all(|of| *of == shards[0]), "one copy of all");
        for (copy, of) in weights.iter().zip(&before) {
            assert!(!Arc::ptr_eq(&copy.file, &of.file));
            assert_eq!(copy.all_bytes().as_ptr() as usize % LINE, 0);
            for row in 0..of.rows() {
                assert_eq!(copy.row_bytes(row), of.row_bytes(row));
            }
        }
    }
}
