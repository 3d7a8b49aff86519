//! Products with checkpoint weights, which stay on the device in the type that the checkpoint stores.

use super::buffer::Buffer;
use super::driver::{Driver, Product};
use super::fill::{Random, fill};
use super::kernels;
use crate::error::{Error, Result};
use crate::float::Float;

/// The most rows of x that the kernels `linear_few_*` take.
pub const FEW: usize = 16;
/// Rows of W per warp in `linear_few_*`.
const FEW_ROWS: usize = 4;
/// Warps per multiprocessor that keep the memory busy in `linear_few_*`.
const WARPS_EACH: usize = 16;
/// In `linear_few_*`, a row is split further only while each warp has more channels than this.
const SHORTEST: usize = 1024;
/// Rows and columns of a block's tile on the tensor cores; `FLOAT_TILE` is its counterpart in f32.
const TILE: usize = 128;
const FLOAT_TILE: usize = 64;

/// A weight `[n,k]` on the device, in its stored type.
pub struct Matrix<'d> {
    /// The stored type.
    pub(crate) kind: Float,
    /// Output channels, n.
    pub(crate) rows: usize,
    /// Input channels, k.
    pub(crate) cols: usize,
    /// The stored bytes.
    pub(crate) values: Buffer<'d, u8>,
}

impl<'d> Matrix<'d> {
    /// Copies a weight of `rows` times `cols` values to the device, little-endian and row after row.
    ///
    /// # Errors
    /// `bytes` has another length; the kernels do not support the sizes; out of memory.
    pub fn new(driver: &'d dyn Driver, kind: Float, rows: usize, cols: usize, bytes: &[u8]) -> Result<Self> {
        let weight = Self::empty(driver, kind, rows, cols)?;
        weight.write(bytes)?;
        Ok(weight)
    }

    /// Allocates space for a weight of `rows` times `cols` values.
    ///
    /// # Errors
    /// The kernels do not support the sizes; out of memory.
    pub fn empty(driver: &'d dyn Driver, kind: Float, rows: usize, cols: usize) -> Result<Self> {
        if rows == 0 || cols == 0 || rows.max(cols) > 1 << 30 {
            return Err(Error::internal(format!("CUDA: a weight of {rows} x {cols}")));
        }
        Ok(Self {
            kind,
            rows,
            cols,
            values: Buffer::new(driver, "weights", rows * cols * kind.bytes())?,
        })
    }

    /// Replaces all values, little-endian and row after row.
    ///
    /// # Errors
    /// `bytes` has another length.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let (found, expected) = (bytes.len(), self.values.len());
        if found != expected {
            let Self { kind, rows, cols, .. } = self;
            return Err(Error::internal(format!(
                "CUDA: a weight of {rows} x {cols} {} has {found} bytes instead of {expected}",
                kind.name()
            )));
        }
        self.values.write(bytes)
    }

    /// Makes a weight of random numbers from -1 to 1, for a benchmark.
    ///
    /// # Errors
    /// Out of memory.
    pub fn random(driver: &'d dyn Driver, kind: Float, rows: usize, cols: usize, seed: u32) -> Result<Self> {
        let weight = Self::empty(driver, kind, rows, cols)?;
        fill(driver, &weight.values, rows * cols, Random::Float(kind), seed)?;
        Ok(weight)
    }
}

/// A projection: `y = x W^T + b`.
pub struct Linear<'d> {
    /// W `[n,k]`.
    pub weight: Matrix<'d>,
    /// b `[n]`.
    pub bias: Option<Buffer<'d, f32>>,
}

/// Computes products with weights, and holds the buffer for rounded inputs, which all weights share.
pub struct Products<'d> {
    driver: &'d dyn Driver,
    exact: bool,
    rounded: Buffer<'d, u16>,
}

impl<'d> Products<'d> {
    /// Allocates space for inputs of up to `most` numbers (m times k). With `exact`, no input is rounded below f32.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, exact: bool, most: usize) -> Result<Self> {
        let most = if exact { 0 } else { most };
        Ok(Self {
            driver,
            exact,
            rounded: Buffer::new(driver, "rounded inputs", most)?,
        })
    }

    /// Computes several projections of the same inputs.
    ///
    /// # Shapes
    /// x `[m,k]`, each out `[m,n]`; with `accumulate` the results are added to what is there.
    ///
    /// # Numerics
    /// Weights are widened exactly, and sums are f32, in an order that depends only on the device and the shapes.
    /// Unless `exact` is set, inputs of more than [`FEW`] rows are rounded to the type of 16-bit weights, to nearest
    /// even; numbers beyond the range of f16 become infinite.
    ///
    /// # Errors
    /// The sizes do not fit each other; a launch failed.
    pub fn forward(
        &self,
        x: &Buffer<'_, f32>,
        m: usize,
        projections: &[(&Linear<'_>, &Buffer<'_, f32>)],
        accumulate: bool,
    ) -> Result<()> {
        // The type to which `self.rounded` is rounded at present.
        let mut rounded = None;
        for (linear, out) in projections {
            linear.check(x, m, out)?;
            let (kind, k) = (linear.weight.kind, linear.weight.cols);
            let rounds = m > FEW && !self.exact && kind != Float::F32 && k.is_multiple_of(8);
            if rounds && rounded != Some(kind) {
                self.round(x, m * k, kind)?;
                rounded = Some(kind);
            }
            if rounds {
                self.multiply_rounded(linear, m, out, accumulate)?
            } else {
                self.multiply(linear, x, m, out, accumulate)?
            }
        }
        Ok(())
    }

    /// Computes one projection of the rounded inputs on the tensor cores, by the vendor's library if there is one.
    fn multiply_rounded(
        &self,
        linear: &Linear<'_>,
        m: usize,
        out: &Buffer<'_, f32>,
        accumulate: bool,
    ) -> Result<()> {
        let (driver, weight, x) = (self.driver, &linear.weight, self.rounded.ptr());
        let (n, k) = (weight.rows, weight.cols);
        let product = Product {
            x: x.address(),
            weight: weight.values.ptr().address(),
            out: out.ptr().address(),
            m,
            n,
            k,
            is_bfloat: weight.kind == Float::Bf16,
            accumulate,
        };
        if driver.multiply(&product)? {
            return linear.add_bias(driver, m, out);
        }
        kernels::Linear {
            x,
            weight: weight.values.ptr().cast(),
            bias: linear.bias.as_ref().map(Buffer::ptr),
            out: out.ptr(),
            m,
            n,
            k,
            accumulate: usize::from(accumulate),
        }
        .launch(driver, weight.kind, tiles(m, n, TILE))
    }

    /// Computes one projection of `x` in f32.
    fn multiply(
        &self,
        linear: &Linear<'_>,
        x: &Buffer<'_, f32>,
        m: usize,
        out: &Buffer<'_, f32>,
        accumulate: bool,
    ) -> Result<()> {
        let (driver, weight) = (self.driver, &linear.weight);
        let (n, k, kind) = (weight.rows, weight.cols, weight.kind);
        let (values, bias) = (weight.values.ptr(), linear.bias.as_ref().map(Buffer::ptr));
        let accumulate = usize::from(accumulate);
        // The arguments that both kernels take, and `split`, which only one of them takes.
        macro_rules! arguments {
            ($kernel:ident $(, $more:ident)?) => {
                kernels::$kernel {
                    x: x.ptr(),
                    weight: values.cast(),
                    bias,
                    out: out.ptr(),
                    m,
                    n,
                    k,
                    accumulate,
                    $($more)?
                }
            };
        }
        if m > FEW {
            return arguments!(LinearFloat).launch(driver, kind, tiles(m, n, FLOAT_TILE));
        }
        let (warps, wanted) = (n.div_ceil(FEW_ROWS), driver.multiprocessors() * WARPS_EACH);
        let mut split = 1;
        while split < 8 && warps * split < wanted && split * SHORTEST < k {
            split *= 2;
        }
        arguments!(LinearFew, split).launch(driver, kind, [warps.div_ceil(8 / split), 1, 1])
    }

    /// Rounds the first `n` numbers to the 16-bit type `kind`.
    fn round(&self, x: &Buffer<'_, f32>, n: usize, kind: Float) -> Result<()> {
        if n > self.rounded.len() {
            let most = self.rounded.len();
            return Err(Error::internal(format!("CUDA: {n} inputs, with room for {most}")));
        }
        kernels::RoundRows {
            x: x.ptr(),
            out: self.rounded.ptr(),
            n,
            bfloat: usize::from(kind == Float::Bf16),
        }
        .launch(self.driver, [n.div_ceil(512), 1, 1])
    }
}

/// Returns by how much a result of [`Products::forward`] may differ from the exact product of the rounded inputs, relative
/// to the sum of the magnitudes of its k products, its bias and what it is added to.
///
/// There are k + 2 additions to a sum of at most these magnitudes, and as many products. Tensor cores (`rounds`) truncate,
/// and align what they add to fewer bits than f32 has.
pub fn relative_error(k: usize, rounds: bool) -> f64 {
    (k + 3) as f64 * if rounds { 0.5f64.powi(22) } else { 0.5f64.powi(23) }
}

/// Returns the grid of a kernel whose blocks each compute a square tile of the `m` x `n` results.
fn tiles(m: usize, n: usize, side: usize) -> [usize; 3] {
    [m.div_ceil(side) * n.div_ceil(side), 1, 1]
}

impl Linear<'_> {
    fn check(&self, x: &Buffer<'_, f32>, m: usize, out: &Buffer<'_, f32>) -> Result<()> {
        let (n, k) = (self.weight.rows, self.weight.cols);
        let bias = self.bias.as_ref().map_or(n, Buffer::len);
        // The kernels count rows and tiles in 32 bits.
        let fits = m <= 1 << 24 && m.div_ceil(FLOAT_TILE) * n.div_ceil(FLOAT_TILE) <= i32::MAX as usize;
        if !fits || x.len() < m * k || out.len() < m * n || bias != n {
            return Err(Error::internal(format!(
                "CUDA: {m} rows of {} inputs times a weight of {n} x {k} with {bias} biases into {} outputs",
                x.len(),
                out.len()
            )));
        }
        Ok(())
    }

    /// Adds the bias to `m` rows of results.
    pub(crate) fn add_bias(&self, driver: &dyn Driver, m: usize, out: &Buffer<'_, f32>) -> Result<()> {
        let Some(bias) = &self.bias else {
            return Ok(());
        };
        let n = m * bias.len();
        let blocks = n.div_ceil(256).min(32 * driver.multiprocessors());
        kernels::AddBiases {
            rows: out.ptr(),
            bias: bias.ptr(),
            n,
            width: bias.len(),
        }
        .launch(driver, [blocks, 1, 1])
    }
}
