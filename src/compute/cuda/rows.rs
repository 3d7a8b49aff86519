//! Operations on the rows of several heads that k-means, prompts and indexes share.

use std::ops::Range;

use super::buffer::{Buffer, Ptr};
use super::driver::Driver;
use super::kernels;
use crate::compute::device::Statistic;
use crate::error::Result;

/// Rows per block of the kernel `sign_sums`.
const SIGN_ROWS: usize = 4096;

/// Rows of some heads on the device, `[heads,n,w]`.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'b> {
    pub driver: &'b dyn Driver,
    pub x: Ptr<'b, f32>,
    pub heads: usize,
    pub n: usize,
    pub w: usize,
}

impl HeadRows<'_> {
    /// Computes the bits of each head's largest magnitude: `[heads]`.
    pub fn largest(&self, out: &Buffer<'_, u32>) -> Result<()> {
        out.zero()?;
        let blocks = (self.n * self.w).div_ceil(1 << 12).min(1 << 10);
        kernels::Largest {
            rows: self.x,
            out: out.ptr(),
            ranges: None,
            n: self.n,
            stride: self.n,
            w: self.w,
        }
        .launch(self.driver, [blocks, self.heads, 1])
    }

    /// Scales the rows by a power of two that follows from their head's largest magnitude, rounds them to f16,
    /// `[heads,n,w]`, and computes two norms of each row.
    pub fn halve(
        &self,
        largest: &Buffer<'_, u32>,
        halves: &Buffer<'_, u16>,
        norms: &Buffer<'_, f32>,
    ) -> Result<()> {
        kernels::HalveRows {
            x: self.x,
            largest: largest.ptr(),
            halves: halves.ptr(),
            norms: norms.ptr(),
            n: self.n,
            w: self.w,
        }
        .launch(self.driver, [self.n.div_ceil(8), self.heads, 1])
    }

    /// Computes a statistic of every channel over the rows in `range`, `[heads,w]`. A rank beyond the range leaves
    /// `out` unchanged.
    pub fn channel_statistic(
        &self,
        range: Range<usize>,
        what: Statistic,
        out: &Buffer<'_, f32>,
    ) -> Result<()> {
        let (n, w, first, count) = (self.n, self.w, range.start, range.len());
        let grid = [w.div_ceil(32), self.heads, 1];
        let (rank, magnitude) = match what {
            Statistic::Mean => {
                return kernels::ChannelMean {
                    x: self.x,
                    out: out.ptr(),
                    n,
                    w,
                    first,
                    count,
                }
                .launch(self.driver, grid);
            }
            Statistic::Ranked(rank) => (rank, 0),
            Statistic::RankedMagnitude(rank) => (rank, 1),
        };
        if rank >= count {
            return Ok(());
        }
        kernels::ChannelRanked {
            x: self.x,
            out: out.ptr(),
            n,
            w,
            first,
            count,
            rank,
            magnitude,
        }
        .launch(self.driver, grid)
    }

    /// Adds the first `d` channels of the rows of each sign pattern, in fixed point, to the sums `[heads,d/4,16,4]`,
    /// and counts the rows, `[heads,d/4,16]`.
    pub fn sign_sums(
        &self,
        d: usize,
        largest: &Buffer<'_, u32>,
        sums: &Buffer<'_, u64>,
        counts: &Buffer<'_, u32>,
    ) -> Result<()> {
        kernels::SignSums {
            x: self.x,
            sums: sums.ptr(),
            counts: counts.ptr(),
            largest: largest.ptr(),
            n: self.n,
            d,
            w: self.w,
            run_rows: SIGN_ROWS,
        }
        .launch(
            self.driver,
            [self.n.div_ceil(SIGN_ROWS), self.heads, (d / 4).div_ceil(32)],
        )
    }
}
