//! NVIDIA GPUs as a [`Device`].
//!
//! The kernels are `kernels/*.cu`; each operation is a few launches over all heads at once. Rows, codes and distances
//! stay on the GPU. The trait [`Driver`] covers everything that is used of CUDA: [`nvidia::Nvidia`] implements it for a
//! GPU, and the tests implement it by running the same kernels on the CPU (`kernels/emulate.h`).
//!
//! Sums do not depend on the order in which threads run: rows are added as 64-bit integers, and all other sums have a
//! fixed order.

pub mod buffer;
pub(crate) mod clusters;
pub mod driver;
pub mod fill;
pub mod kernels;
mod launches;
pub mod ledger;
pub mod linear;
#[cfg(feature = "cuda")]
pub mod nvidia;
#[cfg(not(feature = "cuda"))]
#[path = "cuda/absent.rs"]
pub mod nvidia;
mod points;
pub(crate) mod rows;
mod start;
pub mod watched;

use ndarray::{Array3, ArrayView3};

use super::device::{Device, Points};
use super::layout::elements;
use crate::error::Result;
use buffer::Buffer;
use driver::Driver;
use points::CudaPoints;

/// Rows that one block of `second_moment` sums.
const MOMENT_ROWS: usize = 2048;

/// A GPU that runs the kernels.
pub struct Cuda {
    driver: Box<dyn Driver>,
}

impl Cuda {
    /// Opens the first NVIDIA GPU of this machine, without the vendor's library for products.
    ///
    /// # Errors
    /// There is no driver or no GPU, the GPU is too old, or there are no kernels for it: exit code 3.
    pub fn open() -> Result<Self> {
        Ok(Self::new(Box::new(nvidia::Nvidia::open()?)))
    }

    /// Opens the first NVIDIA GPU with the vendor's library, if it is found, and calls `tell` with its place.
    ///
    /// # Errors
    /// Those of [`Cuda::open`].
    pub fn open_for_models(tell: &dyn Fn(&str)) -> Result<Self> {
        let gpu = nvidia::Nvidia::open()?.with_library(tell)?;
        Ok(Self::new(Box::new(gpu)))
    }

    /// Returns the driver of the GPU.
    pub fn driver(&self) -> &dyn Driver {
        self.driver.as_ref()
    }

    /// Makes a device from a driver.
    pub fn new(driver: Box<dyn Driver>) -> Self {
        Self { driver }
    }
}

impl Device for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn adapter(&self) -> Option<String> {
        Some(self.driver.adapter())
    }

    fn cuda(&self) -> Option<&dyn Driver> {
        Some(self.driver())
    }

    /// As many heads as fit into nine tenths of the free memory and into one grid.
    fn heads_at_once(&self, n: usize, d: usize, size: usize) -> usize {
        let free = self.driver.free_bytes().unwrap_or(0) as usize / 10 * 9;
        (free / clusters::head_bytes(n, width(d), size).max(1)).clamp(1, 65_535)
    }

    fn second_moment(&self, q_rope: ArrayView3<f32>) -> Result<Array3<f64>> {
        let (b, m, d) = q_rope.dim();
        let driver = self.driver.as_ref();
        let q = Buffer::from_slice(driver, "queries", elements(&q_rope.as_standard_layout()))?;
        let count = m.div_ceil(MOMENT_ROWS).max(1);
        let runs = Buffer::<f64>::new(driver, "partial second moments", count * b * d * d)?;
        let sums = Buffer::<f64>::new(driver, "second moments", b * d * d)?;
        let tiles = d.div_ceil(64);
        kernels::SecondMoment {
            q_rope: q.ptr(),
            runs: runs.ptr(),
            m,
            d,
            run_rows: MOMENT_ROWS,
        }
        .launch(driver, [tiles * tiles, b, count])?;
        kernels::AddRuns {
            runs: runs.ptr(),
            sums: sums.ptr(),
            size: sums.len(),
            count,
        }
        .launch(driver, [sums.len().div_ceil(256), 1, 1])?;
        Ok(Array3::from_shape_vec((b, d, d), sums.read()?)?)
    }

    fn points(&self, x: Array3<f32>) -> Result<Box<dyn Points + '_>> {
        Ok(Box::new(CudaPoints::new(self.driver.as_ref(), &x)?))
    }
}

/// Returns the number of floats per row on the device: d rounded up, so that a row in f16 consists of whole 16-byte
/// loads and whole steps of the tensor cores.
pub(crate) fn width(d: usize) -> usize {
    d.next_multiple_of(16)
}
