//! What a prompt is taken from, and in which parts.

use std::ffi::c_void;

use super::super::attend::LayerRows;
use crate::compute::cuda::buffer::{Buffer, Ptr};

/// Keys or values of every position of a prompt.
#[derive(Clone, Copy)]
pub struct Rows<'b> {
    pub(crate) from: Ptr<'b, u8>,
    /// As kernels number it: f32, f16, bf16.
    pub(crate) kind: usize,
    /// Rows of a KV head, and channels of a row.
    pub(crate) stride: usize,
    pub(crate) pitch: usize,
}

impl<'b> Rows<'b> {
    /// The keys of a cache.
    pub fn keys(rows: &'b LayerRows<'_>) -> Self {
        Self::cached(rows, &rows.keys)
    }

    /// The values of a cache.
    pub fn values(rows: &'b LayerRows<'_>) -> Self {
        Self::cached(rows, &rows.values)
    }

    /// `[b,g,n,d]`, all there is of every sequence.
    pub fn of(rows: &'b Buffer<'_, f32>, n: usize, d: usize) -> Self {
        Self {
            from: rows.ptr().cast(),
            kind: 0,
            stride: n,
            pitch: d,
        }
    }

    fn cached(rows: &'b LayerRows<'_>, buffer: &'b Buffer<'_, u8>) -> Self {
        Self {
            from: buffer.ptr(),
            kind: rows.kind(),
            stride: rows.shape.capacity,
            pitch: rows.shape.width(),
        }
    }

    /// The rows of KV head number `head`, for a kernel.
    pub(crate) fn of_head(&self, head: usize) -> Ptr<'b, c_void> {
        let bytes = self.stride * self.pitch * if self.kind == 0 { 4 } else { 2 };
        self.from.after(head * bytes).cast()
    }
}

/// The last queries of a prompt.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// After rotation, `[b,h,m,d]`.
    pub rows: &'a Buffer<'a, f32>,
    /// Of which the last counts.
    pub m: usize,
}

/// Some KV heads of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub sequence: usize,
    /// The first one's number over all sequences, and how many there are.
    pub at: usize,
    pub count: usize,
    /// Positions.
    pub n: usize,
}
