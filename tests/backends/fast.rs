//! The tensor cores' part of `nearest` settles nothing that the f32 scores would not: the same codes, bit for
//! bit, as without them, above all where centroids are nearly alike.

use kvsmith::internal::compute::device::{Clusters, Device, Points};
use ndarray::Array3;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How centroids resemble each other.
#[derive(Clone, Copy, Debug)]
pub enum Near {
    /// Copies whose channels differ in their last bits.
    LastBits,
    /// Copies that differ by about what f16 rounds off.
    HalfBits,
    /// Two copies of some, five of others: more than there are candidates.
    Copies,
    /// Magnitudes from 2^-40 to 2^40.
    Spread,
    /// Channels so small beside one of them that f16 loses them.
    Lopsided,
    /// Rows that are not finite.
    NotFinite,
}

/// All kinds.
pub const ALL: [Near; 6] = [
    Near::LastBits,
    Near::HalfBits,
    Near::Copies,
    Near::Spread,
    Near::Lopsided,
    Near::NotFinite,
];

/// Rows, `[2,n,d]`, and centroids, `[2,M,d]`, near which the rows lie.
fn data(near: Near, n: usize, d: usize, size: usize) -> (Array3<f32>, Array3<f32>) {
    let mut rng = ChaCha8Rng::seed_from_u64(9 + near as u64);
    let mut centroids = Array3::from_shape_simple_fn((2, size, d), || rng.gen_range(-1.0..1.0f32));
    for head in 0..2 {
        for m in 0..size {
            let original = (head, m % (size / 5).max(1));
            for k in 0..d {
                let v = centroids[[original.0, original.1, k]];
                let step = rng.gen_range(-2.0..2.0f32).round();
                centroids[[head, m, k]] = match near {
                    Near::LastBits => v * (1.0 + step * f32::EPSILON),
                    Near::HalfBits => v * (1.0 + step * 2f32.powi(-11)),
                    Near::Copies if m < size / 2 => v,
                    Near::Copies => centroids[[head, m / 2, k]],
                    Near::Spread => v * 2f32.powi((m * 80 / size) as i32 - 40),
                    Near::Lopsided if k == 0 => 1000.0 + step,
                    Near::Lopsided => v * 1e-3,
                    Near::NotFinite => v,
                };
            }
        }
    }
    let mut x = Array3::zeros((2, n, d));
    for head in 0..2 {
        for i in 0..n {
            // Between two centroids, or beside one.
            let (a, b) = (rng.gen_range(0..size), rng.gen_range(0..size));
            for k in 0..d {
                let (a, b) = (centroids[[head, a, k]], centroids[[head, b, k]]);
                x[[head, i, k]] = if i % 2 == 0 {
                    (a + b) / 2.0
                } else {
                    a * rng.gen_range(0.9..1.1f32)
                };
            }
        }
    }
    if let Near::NotFinite = near {
        x[[0, 0, 0]] = f32::INFINITY;
        x[[0, n - 1, 0]] = f32::NAN;
    }
    (x, centroids)
}

/// Everything that a device makes of it: an assignment, a pass, and a seeding.
fn run(device: &dyn Device, x: &Array3<f32>, centroids: &Array3<f32>) -> Vec<Clusters> {
    let mut out = Vec::new();
    let mut points: Box<dyn Points> = device.points(x.clone()).expect("room for the points");
    let heads = x.dim().0;
    let mut keep = |points: &mut Box<dyn Points + '_>| {
        (0..heads).for_each(|head| out.push(points.clusters(head).expect("clusters")));
    };
    points.assign(centroids.view()).expect("assigned");
    keep(&mut points);
    points.update().expect("updated");
    keep(&mut points);
    let size = centroids.dim().1;
    points.seed(size, &vec![0; heads]).expect("seeded");
    let mut drawn = 1;
    for batch in [1, 2, 4, 8] {
        // Never more in all than there are to be.
        let batch = batch.min((size - drawn) / 2);
        drawn += batch;
        let uniforms: Vec<f64> = (0..40).map(|i| f64::from(i * 7 % 40) / 40.0).collect();
        points
            .draw(&vec![batch; heads], &vec![uniforms; heads])
            .expect("drawn");
        keep(&mut points);
    }
    out
}

/// Both ways agree on centroids that are nearly alike.
pub fn check_near(fast: &dyn Device, plain: &dyn Device, near: Near) {
    for (n, d, size) in [(130, 64, 150), (40, 20, 60)] {
        let (x, centroids) = data(near, n, d, size);
        check(fast, plain, &x, &centroids);
    }
}

/// Both ways agree.
pub fn check(fast: &dyn Device, plain: &dyn Device, x: &Array3<f32>, centroids: &Array3<f32>) {
    let (fast, plain) = (run(fast, x, centroids), run(plain, x, centroids));
    for (at, (fast, plain)) in fast.iter().zip(&plain).enumerate() {
        assert_eq!(fast.codes, plain.codes, "codes, step {at}");
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(
            bits(&fast.distances),
            bits(&plain.distances),
            "distances, step {at}"
        );
        assert!(
            plain
                .codes
                .iter()
                .all(|code| (*code as usize) < centroids.dim().1)
        );
    }
}
