//! The inputs of [`super::Prompts`]: a prompt's rows and queries, and the KV heads of a run.

use std::ffi::c_void;

use super::super::attend::LayerRows;
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::float::Float;

/// The keys or the values of every position of a prompt, on the device.
#[derive(Clone, Copy)]
pub struct PromptRows<'b> {
    pub(crate) from: Ptr<'b, u8>,
    pub(crate) float: Float,
    /// Rows per KV head, then channels per row.
    pub(crate) stride: usize,
    pub(crate) pitch: usize,
}

impl<'b> PromptRows<'b> {
    /// Takes the keys of a cache.
    pub fn keys(rows: &'b LayerRows<'_>) -> Self {
        Self::cached(rows, &rows.keys)
    }

    /// Takes the values of a cache.
    pub fn values(rows: &'b LayerRows<'_>) -> Self {
        Self::cached(rows, &rows.values)
    }

    /// Takes the rows `[b,g,n,d]` of whole sequences from a buffer.
    pub fn of(rows: &'b Buffer<'_, f32>, n: usize, d: usize) -> Self {
        Self {
            from: rows.ptr().cast(),
            float: Float::F32,
            stride: n,
            pitch: d,
        }
    }

    fn cached(rows: &'b LayerRows<'_>, buffer: &'b Buffer<'_, u8>) -> Self {
        Self {
            from: buffer.ptr(),
            float: rows.float,
            stride: rows.shape.capacity,
            pitch: rows.shape.width(),
        }
    }

    /// Returns the rows from KV head `head` on, as a kernel argument.
    pub(crate) fn of_head(&self, head: usize) -> Ptr<'b, c_void> {
        let bytes = self.stride * self.pitch * self.float.bytes();
        self.from.after(head * bytes).cast()
    }
}

/// The last queries of a prompt.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// Rotated queries, `[b,h,m,d]`.
    pub rows: &'a Buffer<'a, f32>,
    /// Number of queries per head, m; only the last is used.
    pub m: usize,
}

/// Consecutive KV heads of a sequence that are processed at once.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub sequence: usize,
    /// Index of the first head among those of all sequences, then the number of heads.
    pub at: usize,
    pub count: usize,
    /// Number of positions.
    pub n: usize,
}
