//! Products with weights of every type, with few rows and with many.

use super::case::{Case, normals, rng, rounded, upload};
use crate::compute::comparison::Comparison;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::linear::{FEW, Linear, Matrix, Products, relative_error};
use crate::error::Result;
use crate::float::Float;

const AREA: &str = "products";

/// A product `[m,k] x [n,k]`, with a bias.
#[derive(Clone, Copy)]
struct Product {
    kind: Float,
    /// Whether inputs stay in f32.
    exact: bool,
    m: usize,
    n: usize,
    k: usize,
    /// Whether the results are added to what is there.
    accumulate: bool,
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [Float::F32, Float::F16, Float::Bf16] {
        for (i, m) in [1, 5, FEW, FEW + 1, 150].into_iter().enumerate() {
            for exact in [false, true] {
                let (n, k) = if i % 2 == 0 { (70, 200) } else { (129, 1032) };
                let accumulate = i % 2 == 0;
                let product = Product {
                    kind,
                    exact,
                    m,
                    n,
                    k,
                    accumulate,
                };
                let mode = if exact { "f32" } else { "rounded" };
                let name = format!("{m} x {k} inputs ({mode}), weight {n} x {k} in {}", kind.name());
                // By the kernels of kvsmith, and as the device does it.
                cases.push(Case::new(AREA, name, move |watched| {
                    let mut all = product.check(&watched.without_library())?;
                    all.add(product.check(watched)?);
                    Ok(all)
                }));
            }
        }
    }
    cases.push(Case::new(
        AREA,
        "biases of 70 channels added to 33 rows",
        |watched| biases(watched, 33, 70),
    ));
    cases
}

impl Product {
    fn check(&self, driver: &dyn Driver) -> Result<Comparison> {
        let Self {
            kind,
            exact,
            m,
            n,
            k,
            accumulate,
        } = *self;
        let mut rng = rng((m * n) as u64);
        let (mut x, bias) = (normals(&mut rng, m * k), normals(&mut rng, n));
        // One channel is much larger than the others, as in the activations of language models.
        x.iter_mut().step_by(k).for_each(|x| *x *= 30.0);
        let mut stored = Vec::new();
        kind.write(&normals(&mut rng, n * k), &mut stored);
        let before = if accumulate {
            normals(&mut rng, m * n)
        } else {
            vec![f32::NAN; m * n]
        };
        let linear = Linear {
            weight: Matrix::new(driver, kind, n, k, &stored)?,
            bias: Some(upload(driver, &bias)?),
        };
        let out = upload(driver, &before)?;
        let products = Products::new(driver, exact, m * k)?;
        products.forward(&upload(driver, &x)?, m, &[(&linear, &out)], accumulate)?;
        let found = out.read()?;
        let rounds = !exact && kind != Float::F32 && m > FEW && k.is_multiple_of(8);
        let x = if rounds { rounded(kind, &x) } else { x };
        let mut weight = vec![0.0; n * k];
        kind.read(&stored, &mut weight);
        let mut all = Comparison::default();
        for (at, found) in found.iter().enumerate() {
            let (row, column) = (at / n, at % n);
            let inputs = &x[row * k..(row + 1) * k];
            let products = inputs.iter().zip(&weight[column * k..(column + 1) * k]);
            let terms = products.map(|(x, w)| f64::from(*x) * f64::from(*w));
            let others = [bias[column], if accumulate { before[at] } else { 0.0 }];
            let terms = terms.chain(others.map(f64::from));
            let magnitude: f64 = terms.clone().map(f64::abs).sum();
            let bound = relative_error(k, rounds) * magnitude;
            all.close(f64::from(*found), terms.sum(), bound, || {
                format!("row {row}, column {column}")
            });
        }
        Ok(all)
    }
}

/// Checks the kernel that follows the vendor's products.
fn biases(driver: &dyn Driver, m: usize, n: usize) -> Result<Comparison> {
    let mut rng = rng(7);
    let (rows, bias) = (normals(&mut rng, m * n), normals(&mut rng, n));
    let linear = Linear {
        weight: Matrix::empty(driver, Float::F32, n, 8)?,
        bias: Some(upload(driver, &bias)?),
    };
    let out = upload(driver, &rows)?;
    linear.add_bias(driver, m, &out)?;
    let mut all = Comparison::default();
    for (at, (found, row)) in out.read()?.iter().zip(&rows).enumerate() {
        all.equal(&found.to_bits(), &(row + bias[at % n]).to_bits(), || {
            format!("bits of row {}, channel {}", at / n, at % n)
        });
    }
    Ok(all)
}
