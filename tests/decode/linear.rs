//! Products with checkpoint weights against f64: whole numbers to the bit, others within a derived bound.

use kvsmith::internal::compute::cuda::buffer::Buffer;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::compute::cuda::linear::{FEW, Linear, Matrix, Products, relative_error};
use kvsmith::internal::float::Float;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::cases::{Named, bits, normals, round, upload};

/// Values behind the output that must stay.
const BEHIND: usize = 16;

/// A weight, and how often it is used.
pub struct Case {
    name: String,
    kind: Float,
    exact: bool,
    m: usize,
    n: usize,
    k: usize,
    bias: bool,
    accumulate: bool,
}

impl Named for Case {
    fn name(&self) -> &str {
        &self.name
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [Float::F32, Float::F16, Float::Bf16] {
        let mut add = |exact, [m, n, k]: [usize; 3], bias, accumulate| {
            let mode = if exact { "exact" } else { "fast" };
            cases.push(Case {
                name: format!("{kind:?}::m{m}_n{n}_k{k}_{mode}").to_lowercase(),
                kind,
                exact,
                m,
                n,
                k,
                bias,
                accumulate,
            });
        };
        for (i, m) in [1, 2, 4, 5, 16, 17, 130].into_iter().enumerate() {
            // One slab with a tail; edges of every tile; more slabs than are in flight; channels in odd numbers.
            for (j, [n, k]) in [[70, 40], [129, 200], [3, 72], [33, 75]].into_iter().enumerate() {
                add((i + j) % 3 == 0, [m, n, k], j % 2 == 0, (i + j) % 2 == 0);
                if m > FEW {
                    add((i + j) % 3 != 0, [m, n, k], i % 2 == 0, i % 2 == 0);
                }
            }
        }
        // Rows that several warps share, and parts of them that are short.
        for (m, k) in [(1, 2056), (1, 5000), (3, 2056), (9, 4104), (2, 1033)] {
            add(false, [m, 9, k], true, false);
        }
        // Whole tiles; more tiles of rows than a band has.
        add(false, [128, 256, 64], false, false);
        add(false, [2180, 130, 8], false, false);
        add(true, [64, 64, 16], false, false);
    }
    cases
}

/// Numbers of one product.
struct Numbers {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    before: Vec<f32>,
}

impl Numbers {
    fn draw(case: &Case, mut draw: impl FnMut(usize) -> Vec<f32>) -> Self {
        let mut weight = draw(case.n * case.k);
        weight.iter_mut().for_each(|w| *w = round(case.kind, *w));
        Self {
            x: draw(case.m * case.k),
            weight,
            bias: if case.bias { draw(case.n) } else { Vec::new() },
            // Without accumulation nothing of it may be left.
            before: if case.accumulate {
                draw(case.m * case.n)
            } else {
                vec![f32::NAN; case.m * case.n]
            },
        }
    }

    /// What the device makes of them.
    fn run(&self, driver: &dyn Driver, case: &Case) -> Vec<f32> {
        let products = Products::new(driver, case.exact, case.m * case.k).unwrap();
        let linear = linear(driver, case.kind, [case.n, case.k], &self.weight, &self.bias);
        let x = upload(driver, &self.x);
        let behind = vec![-77.0; BEHIND];
        let out = upload(driver, &[&self.before[..], &behind].concat());
        products
            .forward(&x, case.m, &[(&linear, &out)], case.accumulate)
            .unwrap();
        let mut out = out.read().unwrap();
        assert_eq!(
            out.split_off(case.m * case.n),
            behind,
            "what lies behind the output"
        );
        out
    }

    /// Exactly, and the sum of the magnitudes.
    fn exactly(&self, case: &Case, row: usize, column: usize) -> (f64, f64) {
        let (mut sum, mut magnitude) = (0.0f64, 0.0f64);
        let mut add = |term: f64| {
            sum += term;
            magnitude += term.abs();
        };
        let x = &self.x[row * case.k..(row + 1) * case.k];
        let w = &self.weight[column * case.k..(column + 1) * case.k];
        x.iter()
            .zip(w)
            .for_each(|(x, w)| add(f64::from(*x) * f64::from(*w)));
        self.bias.get(column).iter().for_each(|b| add(f64::from(**b)));
        if case.accumulate {
            add(f64::from(self.before[row * case.n + column]));
        }
        (sum, magnitude)
    }
}

fn linear<'d>(
    driver: &'d dyn Driver,
    kind: Float,
    [n, k]: [usize; 2],
    weight: &[f32],
    bias: &[f32],
) -> Linear<'d> {
    let mut bytes = Vec::new();
    kind.write(weight, &mut bytes);
    let bias = (!bias.is_empty()).then(|| upload(driver, bias));
    Linear {
        weight: Matrix::new(driver, kind, n, k, &bytes).unwrap(),
        bias,
    }
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64((case.n * case.k + case.m) as u64);
    // Whole numbers of up to 5 have sums that f32 has, whatever the order.
    let whole = Numbers::draw(case, |n| (0..n).map(|_| rng.gen_range(-5..=5) as f32).collect());
    let out = whole.run(driver, case);
    for (i, out) in out.iter().enumerate() {
        let (exact, _) = whole.exactly(case, i / case.n, i % case.n);
        assert_eq!(f64::from(*out), exact, "row {} column {}", i / case.n, i % case.n);
    }

    let mut random = Numbers::draw(case, |n| normals(&mut rng, n));
    // One channel is much larger than the others, as in the activations of language models.
    random.x.iter_mut().step_by(case.k).for_each(|x| *x *= 300.0);
    let out = random.run(driver, case);
    assert_eq!(bits(&out), bits(&random.run(driver, case)), "the same again");
    let tensor = !case.exact && case.kind != Float::F32 && case.m > FEW && case.k.is_multiple_of(8);
    if tensor {
        random.x.iter_mut().for_each(|x| *x = round(case.kind, *x));
    }
    let relative = relative_error(case.k, tensor);
    assert!(relative < 2e-3, "a bound that says nothing");
    for (i, out) in out.iter().enumerate() {
        let (exact, magnitude) = random.exactly(case, i / case.n, i % case.n);
        let (off, bound) = ((f64::from(*out) - exact).abs(), relative * magnitude);
        assert!(
            off <= bound,
            "row {} column {}: {out}, exact {exact}, bound {bound}",
            i / case.n,
            i % case.n
        );
    }
}

/// Several projections of the same rows are the projections one by one, whatever types they have.
pub fn check_together(driver: &dyn Driver) {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let (m, k) = (20, 48);
    let products = Products::new(driver, false, m * k).unwrap();
    let x = upload(driver, &normals(&mut rng, m * k));
    let kinds = [Float::Bf16, Float::Bf16, Float::F16, Float::F32, Float::Bf16];
    let linears = kinds.map(|kind| linear(driver, kind, [24, k], &normals(&mut rng, 24 * k), &[]));
    let outs = kinds.map(|_| Buffer::<f32>::new(driver, "outputs", m * 24).unwrap());
    let all: Vec<_> = linears.iter().zip(&outs).collect();
    products.forward(&x, m, &all, false).unwrap();
    for (linear, out) in all {
        let alone = Buffer::<f32>::new(driver, "outputs", m * 24).unwrap();
        products.forward(&x, m, &[(linear, &alone)], false).unwrap();
        assert_eq!(bits(&out.read().unwrap()), bits(&alone.read().unwrap()));
    }
}

/// Sizes that do not fit are refused before anything runs.
pub fn check_refused(driver: &dyn Driver) {
    let refused = |n, k, bytes: usize| Matrix::new(driver, Float::F16, n, k, &vec![0; bytes]).is_err();
    assert!(!refused(4, 6, 48));
    assert!(refused(4, 6, 47) && refused(0, 6, 0) && refused(4, 0, 0));
    let small = linear(driver, Float::F16, [4, 8], &[0.0; 32], &[]);
    let biased = linear(driver, Float::F16, [4, 8], &[0.0; 32], &[0.0; 3]);
    let buffer = |n| Buffer::<f32>::zeros(driver, "numbers", n).unwrap();
    let (x, out) = (buffer(20 * 8), buffer(20 * 4));
    let products = Products::new(driver, false, 20 * 8).unwrap();
    let tight = Products::new(driver, false, 20 * 8 - 1).unwrap();
    assert!(products.forward(&x, 20, &[(&small, &out)], false).is_ok());
    assert!(products.forward(&x, 21, &[(&small, &out)], false).is_err());
    assert!(
        products
            .forward(&buffer(159), 20, &[(&small, &out)], false)
            .is_err()
    );
    assert!(products.forward(&x, 20, &[(&small, &buffer(79))], false).is_err());
    assert!(tight.forward(&x, 20, &[(&small, &out)], false).is_err());
    assert!(products.forward(&x, 20, &[(&biased, &out)], false).is_err());
}
