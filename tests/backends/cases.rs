//! Data that breaks kernels: sizes off the tile, duplicates and ties, outliers, offsets, extremes.

use ndarray::{Array3, Axis};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::common::random::normal;

/// What the rows look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Data {
    /// Sums of uniform numbers, channels of unequal scale.
    Normal,
    /// Small whole numbers, so that all arithmetic is exact and ties are many.
    Ties,
    /// Every row four times.
    Duplicates,
    /// One row a thousand times as long as the others.
    Outlier,
    /// A common offset of a hundred times the spread.
    Offset,
    /// All rows alike.
    Constant,
    /// Well-separated groups, as many as centroids.
    Planted,
}

/// One input.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub heads: usize,
    pub n: usize,
    pub d: usize,
    /// Centroids.
    pub size: usize,
    pub data: Data,
}

impl Case {
    fn new(heads: usize, n: usize, d: usize, size: usize, data: Data) -> Self {
        let name = format!("{data:?}_{heads}x{n}x{d}_{size}").to_lowercase();
        Self {
            name,
            heads,
            n,
            d,
            size,
            data,
        }
    }

    /// Whether an operation makes sense on this case.
    pub fn takes(&self, operation: &str) -> bool {
        match operation {
            "sign_sums" => self.d.is_multiple_of(4),
            // Naive in n d², or sorts all channels.
            "second_moment" | "whiten" | "channel_statistic" => self.n * self.d * self.d <= 1 << 26,
            // Scores of points far off the origin are approximate, so two devices take other ways.
            "cluster" => self.n >= self.size && self.data != Data::Offset,
            _ => true,
        }
    }

    fn rng(&self, stream: u64) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64((self.n * 31 + self.d * 7 + self.size) as u64);
        rng.set_stream(stream);
        rng
    }

    /// `[b,n,d]`.
    pub fn points(&self) -> Array3<f32> {
        let mut rng = self.rng(1);
        let (heads, n, d) = (self.heads, self.n, self.d);
        let mut x = Array3::from_shape_simple_fn((heads, n, d), || normal(&mut rng));
        match self.data {
            Data::Normal => {
                for (j, mut channel) in x.axis_iter_mut(Axis(2)).enumerate() {
                    channel *= 1.0 / (1.0 + j as f32 / 16.0);
                }
            }
            Data::Ties => x.mapv_inplace(|v| v.round().clamp(-2.0, 2.0)),
            Data::Duplicates => {
                for mut x in x.outer_iter_mut() {
                    for i in 0..n {
                        let first = x.row(i / 4 * 4).to_owned();
                        x.row_mut(i).assign(&first);
                    }
                }
            }
            Data::Outlier => {
                for mut x in x.outer_iter_mut() {
                    x.row_mut(n / 2).mapv_inplace(|v| v * 1000.0);
                }
            }
            Data::Offset => x += 100.0,
            Data::Constant => x.fill(0.75),
            Data::Planted => {
                let centers = self.planted();
                for (mut x, centers) in x.outer_iter_mut().zip(centers.outer_iter()) {
                    for (i, mut row) in x.rows_mut().into_iter().enumerate() {
                        row *= 0.1;
                        row += &centers.row(i % self.size);
                    }
                }
            }
        }
        x
    }

    /// The centers of planted groups, `[b,M,d]`.
    fn planted(&self) -> Array3<f32> {
        let mut rng = self.rng(2);
        Array3::from_shape_simple_fn((self.heads, self.size, self.d), || 10.0 * normal(&mut rng))
    }

    /// Centroids to search, `[b,M,d]`: rows of the points and others, some of them twice.
    pub fn centroids(&self) -> Array3<f32> {
        let x = self.points();
        let mut rng = self.rng(3);
        let mut centroids = Array3::zeros((self.heads, self.size, self.d));
        for (mut centroids, x) in centroids.outer_iter_mut().zip(x.outer_iter()) {
            for m in 0..self.size {
                let row = x.row(rng.gen_range(0..self.n)).to_owned();
                let row = match m % 3 {
                    0 => row,
                    1 => row * 0.5,
                    _ => centroids.row(m / 2).to_owned(),
                };
                centroids.row_mut(m).assign(&row);
            }
        }
        match self.data {
            Data::Ties => centroids.mapv(f32::round),
            _ => centroids,
        }
    }

    /// Lower triangular factors, `[b,d,d]`.
    pub fn factors(&self) -> Array3<f32> {
        let mut rng = self.rng(4);
        Array3::from_shape_fn((self.heads, self.d, self.d), |(_, i, j)| {
            if j <= i { normal(&mut rng) } else { 0.0 }
        })
    }

    /// Numbers of [0,1) for a batch of draws, per head.
    pub fn uniforms(&self, batch: usize) -> Vec<Vec<f64>> {
        let mut rng = self.rng(5 + batch as u64);
        let mut numbers = || (0..2 * (2 * batch + 1)).map(|_| rng.r#gen()).collect();
        (0..self.heads).map(|_| numbers()).collect()
    }
}

/// The list; a `slow` device gets the small ones.
pub fn all(slow: bool) -> Vec<Case> {
    let mut cases = vec![
        Case::new(1, 1, 1, 1, Data::Normal),
        Case::new(1, 2, 4, 2, Data::Normal),
        Case::new(2, 3, 5, 2, Data::Normal),
        // Sizes at and beside tiles of 16 to 256, and the head sizes of real models.
        Case::new(1, 64, 64, 32, Data::Normal),
        Case::new(3, 65, 64, 33, Data::Normal),
        Case::new(1, 127, 80, 31, Data::Normal),
        Case::new(2, 257, 96, 70, Data::Normal),
        Case::new(2, 300, 128, 129, Data::Normal),
        Case::new(1, 40, 256, 17, Data::Normal),
        Case::new(1, 600, 20, 1, Data::Normal),
        Case::new(2, 200, 8, 60, Data::Ties),
        Case::new(1, 300, 64, 70, Data::Ties),
        Case::new(2, 256, 32, 64, Data::Duplicates),
        Case::new(1, 200, 64, 40, Data::Outlier),
        Case::new(2, 200, 80, 40, Data::Offset),
        Case::new(2, 100, 16, 10, Data::Constant),
        Case::new(3, 320, 24, 16, Data::Planted),
    ];
    if !slow {
        cases.extend([
            Case::new(1, 100_000, 16, 1, Data::Normal),
            Case::new(1, 100_000, 4, 50, Data::Ties),
            Case::new(2, 5_000, 128, 1024, Data::Normal),
            Case::new(1, 20_000, 64, 300, Data::Planted),
        ]);
    }
    cases
}
