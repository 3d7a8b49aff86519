//! Points on the GPU: operations that change or describe the rows. The clusters are in [`super::clusters`].

use std::ops::Range;

use ndarray::{Array2, Array3, ArrayView2, ArrayView3, s};

use super::buffer::Buffer;
use super::clusters::Clustering;
use super::driver::Driver;
use super::rows::HeadRows;
use super::{kernels, width};
use crate::compute::device::{Assignment, Clusters, Drawn, Points, SignSums, Statistic};
use crate::compute::layout::elements;
use crate::error::{Error, Result};

/// Values per block of the kernel that sums squares.
const SQUARES: usize = 1 << 16;

/// The rows of some heads, `[b,n,w]` on the device.
pub(super) struct PointRows<'d> {
    pub driver: &'d dyn Driver,
    pub b: usize,
    pub n: usize,
    pub d: usize,
    /// The row width: d rounded up by [`width`]. The padding is zero.
    pub w: usize,
    pub x: Buffer<'d, f32>,
}

impl<'d> PointRows<'d> {
    /// Returns the grid of `[x, z]` blocks for each head; the heads lie along y.
    pub fn grid(&self, [x, z]: [usize; 2]) -> [usize; 3] {
        [x, self.b, z]
    }

    /// Returns the rows in the form that the kernels shared with prompts and indexes take.
    pub fn heads(&self) -> HeadRows<'_> {
        HeadRows {
            driver: self.driver,
            x: self.x.ptr(),
            heads: self.b,
            n: self.n,
            w: self.w,
        }
    }

    /// Computes the bits of the largest magnitude of each head, on the device: `[b]`.
    pub fn largest(&self) -> Result<Buffer<'d, u32>> {
        let out = Buffer::new(self.driver, "magnitudes", self.b)?;
        self.heads().largest(&out)?;
        Ok(out)
    }

    /// Fails if `found`, the number of values, is not the number that a kernel reads, `expected`.
    pub fn check(&self, what: &str, found: usize, expected: usize) -> Result<()> {
        if found == expected {
            Ok(())
        } else {
            Err(Error::internal(format!(
                "CUDA: {found} {what} instead of {expected}"
            )))
        }
    }

    /// Copies some rows of one head to the host, `[rows,d]`.
    fn read(&self, head: usize, rows: &[u32]) -> Result<Array2<f32>> {
        if let Some(row) = rows.iter().find(|row| **row as usize >= self.n) {
            return Err(Error::internal(format!("row {row} of {}", self.n)));
        }
        let of = Buffer::from_slice(self.driver, "row numbers", rows)?;
        let out = Buffer::<f32>::new(self.driver, "rows", rows.len() * self.w)?;
        let blocks = out.len().div_ceil(256);
        kernels::GatherRows {
            x: self.x.ptr(),
            rows: of.ptr(),
            out: out.ptr(),
            count: rows.len(),
            first: head * self.n,
            w: self.w,
        }
        .launch(self.driver, [blocks, 1, 1])?;
        self.unpadded(out.read()?)
    }

    /// Removes the padding of rows: of every w values, the first d stay.
    pub fn unpadded(&self, values: Vec<f32>) -> Result<Array2<f32>> {
        let rows = values.len() / self.w;
        let all = Array2::from_shape_vec((rows, self.w), values)?;
        Ok(if self.d == self.w {
            all
        } else {
            all.slice(s![.., ..self.d]).to_owned()
        })
    }

    /// Pads rows `[..,d]` with zeros to w values.
    pub fn padded(&self, x: ArrayView2<f32>) -> Vec<f32> {
        let mut out = Array2::zeros((x.nrows(), self.w));
        out.slice_mut(s![.., ..self.d]).assign(&x);
        out.into_raw_vec_and_offset().0
    }
}

/// The [`Points`] of a [`super::Cuda`] device.
pub(super) struct CudaPoints<'d> {
    rows: PointRows<'d>,
    clusters: Option<Clustering<'d>>,
}

impl<'d> CudaPoints<'d> {
    /// Copies rows `[b,n,d]` to the device.
    pub fn new(driver: &'d dyn Driver, x: &Array3<f32>) -> Result<Self> {
        let ((b, n, d), w) = (x.dim(), width(x.dim().2));
        let rows = PointRows {
            driver,
            b,
            n,
            d,
            w,
            x: Buffer::new(driver, &format!("{b} heads of {n} x {d} points"), b * n * w)?,
        };
        let x = x.as_standard_layout();
        if d == w {
            rows.x.write(elements(&x))?;
        } else {
            let all = x.view().into_shape_with_order((b * n, d))?;
            rows.x.write(&rows.padded(all))?;
        }
        Ok(Self { rows, clusters: None })
    }

    fn clusters(&mut self) -> Result<(&PointRows<'d>, &mut Clustering<'d>)> {
        match &mut self.clusters {
            Some(clusters) => Ok((&self.rows, clusters)),
            None => Err(Error::internal("the points have no clusters yet")),
        }
    }

    /// Returns the rows, and clusters of `size` centroids; present buffers of the same size are reused.
    fn start(&mut self, size: usize) -> Result<(&PointRows<'d>, &mut Clustering<'d>)> {
        if self.clusters.as_ref().is_none_or(|c| c.size != size) {
            self.clusters = None;
            self.clusters = Some(Clustering::new(&self.rows, size)?);
        }
        self.clusters()
    }
}

impl Points for CudaPoints<'_> {
    fn dim(&self) -> (usize, usize, usize) {
        (self.rows.b, self.rows.n, self.rows.d)
    }

    fn whiten(&mut self, chol: ArrayView3<f32>) -> Result<()> {
        self.clusters = None;
        let rows = &mut self.rows;
        rows.check("values of factors", chol.len(), rows.b * rows.d * rows.d)?;
        let chol = Buffer::from_slice(
            rows.driver,
            "factors of the metric",
            elements(&chol.as_standard_layout()),
        )?;
        let out = Buffer::<f32>::new(rows.driver, "whitened points", rows.x.len())?;
        kernels::Whiten {
            x: rows.x.ptr(),
            chol: chol.ptr(),
            out: out.ptr(),
            n: rows.n,
            d: rows.d,
            w: rows.w,
        }
        .launch(rows.driver, rows.grid([rows.n.div_ceil(64), rows.w.div_ceil(64)]))?;
        rows.x = out;
        Ok(())
    }

    fn channel_statistic(&mut self, range: Range<usize>, what: Statistic) -> Result<Array2<f32>> {
        let rows = &self.rows;
        let out = Buffer::<f32>::zeros(rows.driver, "channel statistics", rows.b * rows.w)?;
        // If the rank is beyond the rows, `out` keeps its zeros.
        rows.heads().channel_statistic(range, what, &out)?;
        rows.unpadded(out.read()?)
    }

    fn subtract(&mut self, range: Range<usize>, centers: ArrayView2<f32>) -> Result<()> {
        self.clusters = None;
        let rows = &self.rows;
        rows.check("values of centers", centers.len(), rows.b * rows.d)?;
        let centers = Buffer::from_slice(rows.driver, "centers", &rows.padded(centers))?;
        kernels::Subtract {
            x: rows.x.ptr(),
            centers: centers.ptr(),
            n: rows.n,
            w: rows.w,
            first: range.start,
            count: range.len(),
        }
        .launch(rows.driver, rows.grid([(range.len() * rows.w).div_ceil(256), 1]))
    }

    fn square_sum(&mut self) -> Result<Vec<f64>> {
        let rows = &self.rows;
        let runs = (rows.n * rows.w).div_ceil(SQUARES);
        let out = Buffer::<f64>::new(rows.driver, "sums of squares", rows.b * runs)?;
        kernels::SquareSums {
            x: rows.x.ptr(),
            out: out.ptr(),
            size: rows.n * rows.w,
        }
        .launch(rows.driver, rows.grid([runs, 1]))?;
        Ok(out.read()?.chunks(runs.max(1)).map(|r| r.iter().sum()).collect())
    }

    fn sign_sums(&mut self) -> Result<Vec<SignSums>> {
        let rows = &self.rows;
        // Four channels have 16 patterns, and each pattern has four sums.
        let (patterns, sums) = (rows.d / 4 * 16, rows.d / 4 * 64);
        let largest = rows.largest()?;
        let fixed = Buffer::<u64>::zeros(rows.driver, "sign sums", rows.b * sums)?;
        let counts = Buffer::<u32>::zeros(rows.driver, "sign counts", rows.b * patterns)?;
        rows.heads().sign_sums(rows.d, &largest, &fixed, &counts)?;
        let out = Buffer::<f64>::new(rows.driver, "sign sums", fixed.len())?;
        kernels::FixedSums {
            sums: fixed.ptr(),
            out: out.ptr(),
            largest: largest.ptr(),
            n: rows.n,
            per_head: sums,
        }
        .launch(rows.driver, rows.grid([sums.div_ceil(256), 1]))?;
        let (all, counts) = (out.read()?, counts.read()?);
        let heads = all.chunks(sums.max(1)).zip(counts.chunks(patterns.max(1)));
        let head = |(sums, counts): (&[f64], &[u32])| SignSums {
            sums: sums.to_vec(),
            counts: counts.iter().map(|c| u64::from(*c)).collect(),
        };
        Ok(heads.map(head).collect())
    }

    fn seed(&mut self, size: usize, first: &[u32]) -> Result<()> {
        let (rows, clusters) = self.start(size)?;
        clusters.seed(rows, first)
    }

    fn draw(&mut self, batch: &[usize], uniforms: &[Vec<f64>]) -> Result<Vec<Drawn>> {
        let (rows, clusters) = self.clusters()?;
        clusters.draw(rows, batch, uniforms)
    }

    fn assign(&mut self, centroids: ArrayView3<f32>) -> Result<()> {
        let (rows, clusters) = self.start(centroids.dim().1)?;
        clusters.assign(rows, centroids)
    }

    fn update(&mut self) -> Result<()> {
        let (rows, clusters) = self.clusters()?;
        clusters.update(rows)
    }

    fn hand_over(&mut self, head: usize, given: &[(u32, u32)]) -> Result<()> {
        let (rows, clusters) = self.clusters()?;
        clusters.hand_over(rows, head, given)
    }

    fn assignment(&mut self) -> Result<Vec<Assignment>> {
        let (rows, clusters) = self.clusters()?;
        clusters.assignment(rows)
    }

    fn clusters(&mut self, head: usize) -> Result<Clusters> {
        let (rows, clusters) = CudaPoints::clusters(self)?;
        clusters.read(rows, head)
    }

    fn rows(&mut self, head: usize, rows: &[u32]) -> Result<Array2<f32>> {
        self.rows.read(head, rows)
    }
}
