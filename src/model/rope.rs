//! Rotary position embedding in the "rotate half" layout: channel i is paired with i + d/2.
//!
//! `(x R_p)[i] = x[i] cos(p w_i) - x[i + d/2] sin(p w_i)`, `(x R_p)[i + d/2] = x[i + d/2] cos(p w_i) + x[i] sin(p w_i)`.

mod config;

pub use config::{RopeConfig, RopeScaling, SUPPORTED_ROPES};
use ndarray::{Array2, ArrayViewMut1};
use rayon::prelude::*;

use crate::error::{Error, Result};

/// Largest frequency or factor that is accepted; those of real models are at most a few units.
const LARGEST: f32 = 1e6;

/// A rotary embedding: angular frequencies and the factor on cos and sin.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Angular frequencies w_i, i in 0..d/2, in f32 as the model computes them.
    inv_freq: Vec<f32>,
    /// Factor on cos and sin (YaRN); 1 for the other types.
    attention_factor: f32,
}

impl Rope {
    /// Returns the number of channels of a head.
    pub fn head_dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Returns the angular frequency of each pair of channels, in radians per position.
    pub fn frequencies(&self) -> &[f32] {
        &self.inv_freq
    }

    /// Returns the factor on cos and sin.
    pub fn attention_factor(&self) -> f32 {
        self.attention_factor
    }

    /// Computes the frequencies for heads of `head_dim` channels.
    ///
    /// # Source
    /// Llama 3.1's and YaRN's (arXiv 2309.00071, section 3.2) scaling, as in transformers.
    pub fn new(config: &RopeConfig, head_dim: usize) -> Self {
        let plain = (0..head_dim / 2).map(|i| config.theta.powf(-2.0 * i as f64 / head_dim as f64));
        let scaled = config.scaling.scale(plain.collect(), config.theta);
        let attention_factor = match config.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        };
        Self {
            inv_freq: scaled.iter().map(|w| *w as f32).collect(),
            attention_factor: attention_factor as f32,
        }
    }

    /// Fails if the settings give frequencies or a factor beyond any model's, which would make angles that are not
    /// finite.
    pub fn check(&self) -> Result<()> {
        let values = self.inv_freq.iter().chain([&self.attention_factor]);
        match values.into_iter().find(|x| x.is_nan() || x.abs() > LARGEST) {
            None => Ok(()),
            Some(x) => Err(Error::invalid(format!(
                "the rope settings give a frequency or factor of {x:e}, which is out of range"
            ))
            .hint("compare `rope_theta` and `rope_scaling` in config.json with those of the model's source")),
        }
    }

    /// Computes the cosines and sines of positions, such as a range.
    pub fn table(&self, positions: impl IntoIterator<Item = usize>) -> RopeTable {
        let half = self.inv_freq.len();
        let positions = positions.into_iter();
        let floats = positions.size_hint().0 * half;
        let (mut cos, mut sin) = (Vec::with_capacity(floats), Vec::with_capacity(floats));
        for p in positions {
            for w in &self.inv_freq {
                // The angle is rounded to f32, as in the models; its sine and cosine are not rounded further.
                let angle = f64::from(p as f32 * w);
                cos.push(angle.cos() as f32 * self.attention_factor);
                sin.push(angle.sin() as f32 * self.attention_factor);
            }
        }
        RopeTable { cos, sin, half }
    }

    /// Computes the rotation by one distance, of any length of vectors: without the attention factor, and with angles
    /// that are not rounded to f32.
    pub fn turns(&self, distance: usize) -> RopeTable {
        let angle = |w: &f32| distance as f64 * f64::from(*w);
        RopeTable {
            cos: self.inv_freq.iter().map(|w| angle(w).cos() as f32).collect(),
            sin: self.inv_freq.iter().map(|w| angle(w).sin() as f32).collect(),
            half: self.inv_freq.len(),
        }
    }

    /// Returns this embedding with another attention factor.
    #[cfg(test)]
    pub fn with_factor(self, attention_factor: f32) -> Self {
        Self {
            attention_factor,
            ..self
        }
    }

    /// Computes the mean rotations over ranges of distances: row i of the table is the mean of R_p over p in
    /// `edges[i]..edges[i + 1]`, which rotates every pair of channels and shortens it.
    ///
    /// # Numerics
    /// f64 of unrounded angles, rounded to f32 at the end. [`Rope::table`] rounds every angle to f32.
    ///
    /// # Source
    /// Ours. R_p multiplies a pair of channels of frequency w, taken as a complex number, by e^{ipw}. The mean of these
    /// factors over p from l to u - 1 is, as a geometric series,
    /// m = e^{i (l + u - 1) w / 2} sin((u - l) w / 2) / ((u - l) sin(w / 2)), and 1 for w = 0.
    pub fn mean_table(&self, edges: &[u32]) -> RopeTable {
        let half = self.inv_freq.len();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for range in edges.windows(2) {
            for w in &self.inv_freq {
                let (re, im) = mean_rotation(f64::from(*w), range[0].into(), range[1].into());
                cos.push(re as f32 * self.attention_factor);
                sin.push(im as f32 * self.attention_factor);
            }
        }
        RopeTable { cos, sin, half }
    }

    /// Rotates rows `[n,d]` by their positions within their blocks; `block_start` holds the first row of
    /// each block, then n.
    ///
    /// # Errors
    /// Rows that are not contiguous.
    pub fn rotate_blocks(&self, rows: &mut Array2<f32>, block_start: &[u32]) -> Result<()> {
        let d = rows.ncols();
        let rows = rows
            .as_slice_mut()
            .ok_or_else(|| Error::internal("internal: rows to rotate are not contiguous"))?;
        let longest = block_start.windows(2).map(|b| b[1] - b[0]).max().unwrap_or(0);
        let table = self.table(0..longest as usize);
        for block in block_start.windows(2) {
            let part = &mut rows[block[0] as usize * d..block[1] as usize * d];
            let parts = part.par_chunks_exact_mut(d).enumerate();
            parts.for_each(|(position, row)| table.rotate(row, position));
        }
        Ok(())
    }
}

/// The rotary embeddings of a model's layers.
///
/// A layer without one has the rotation by angles of 0, which changes nothing: x cos 0 - y sin 0 is x to the last bit.
pub type Ropes = PerLayer<Rope>;

/// Something that depends on a layer's rotary embedding alone.
#[derive(Clone, Debug)]
pub struct PerLayer<T> {
    /// For the layers that rotate.
    rotating: T,
    /// For the others, if there are any.
    still: Option<T>,
    /// The layers that do not rotate.
    without: Vec<usize>,
}

impl<T> PerLayer<T> {
    /// Returns what a layer has.
    pub fn layer(&self, layer: usize) -> &T {
        let still = self.still.as_ref().filter(|_| self.without.contains(&layer));
        still.unwrap_or(&self.rotating)
    }

    /// Computes something from what the layers have.
    pub fn map<U>(&self, compute: impl Fn(&T) -> U) -> PerLayer<U> {
        PerLayer {
            rotating: compute(&self.rotating),
            still: self.still.as_ref().map(compute),
            without: self.without.clone(),
        }
    }
}

impl Ropes {
    /// Computes the frequencies of a model with heads of `head_dim` channels, whose layers `without` do not rotate.
    pub fn new(config: &RopeConfig, head_dim: usize, without: Vec<usize>) -> Self {
        let none = Rope {
            inv_freq: vec![0.0; head_dim / 2],
            attention_factor: 1.0,
        };
        Self {
            rotating: Rope::new(config, head_dim),
            still: (!without.is_empty()).then_some(none),
            without,
        }
    }

    /// Gives every layer the same rotary embedding.
    pub fn same(rope: Rope) -> Self {
        Self {
            rotating: rope,
            still: None,
            without: Vec::new(),
        }
    }

    /// Computes the cosines and sines of positions, such as a range.
    pub fn tables(&self, positions: impl IntoIterator<Item = usize> + Clone) -> PerLayer<RopeTable> {
        self.map(|rope| rope.table(positions.clone()))
    }
}

/// Returns the mean of e^{ipw} over the whole numbers p from `low` to below `high`: its real part and its imaginary
/// part.
fn mean_rotation(w: f64, low: f64, high: f64) -> (f64, f64) {
    let (n, half) = (high - low, (w / 2.0).sin());
    // If a position makes a whole number of turns, every term of the series is 1.
    let scale = if half == 0.0 {
        1.0
    } else {
        (n * w / 2.0).sin() / (n * half)
    };
    let (sin, cos) = ((low + high - 1.0) * w / 2.0).sin_cos();
    (scale * cos, scale * sin)
}

/// Cosines and sines of consecutive positions, or their means over ranges of distances, multiplied by the attention
/// factor.
#[derive(Clone)]
pub struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RopeTable {
    /// Returns the cosines and the sines, `[positions, d/2]` each.
    pub fn parts(&self) -> [&[f32]; 2] {
        [&self.cos, &self.sin]
    }

    /// Rotates a head vector (d values) in place by the `row`-th position of the table.
    pub fn rotate(&self, x: &mut [f32], row: usize) {
        let (lo, hi) = x.split_at_mut(self.half);
        let cos = &self.cos[row * self.half..(row + 1) * self.half];
        let sin = &self.sin[row * self.half..(row + 1) * self.half];
        for i in 0..self.half {
            let (a, b) = (lo[i], hi[i]);
            lo[i] = a * cos[i] - b * sin[i];
            hi[i] = b * cos[i] + a * sin[i];
        }
    }

    /// Rotates a vector of d sums in place by the `row`-th position of the table, in f64.
    pub fn rotate_f64(&self, mut x: ArrayViewMut1<f64>, row: usize) {
        let at = row * self.half;
        for i in 0..self.half {
            let (cos, sin) = (f64::from(self.cos[at + i]), f64::from(self.sin[at + i]));
            let (a, b) = (x[i], x[i + self.half]);
            x[i] = a * cos - b * sin;
            x[i + self.half] = b * cos + a * sin;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(theta: f64, head_dim: usize) -> Rope {
        let config = RopeConfig {
            theta,
            scaling: RopeScaling::Default,
        };
        Rope::new(&config, head_dim)
    }

    fn rotated(rope: &Rope, x: &[f32], p: usize) -> Vec<f32> {
        let mut y = x.to_vec();
        rope.table(p..p + 1).rotate(&mut y, 0);
        y
    }

    #[test]
    fn micro_example() {
        let y = rotated(&rope(1e4, 4), &[1.0, 2.0, 3.0, 4.0], 3);
        for (a, b) in y.iter().zip([-1.413353, 1.879118, -2.828857, 4.058191]) {
            assert!((a - b).abs() < 2e-6, "{a} {b}");
        }
    }

    #[test]
    fn mean_rotations_are_the_means() {
        // A full turn to within rounding, a pair that is not rotated, and frequencies that models have.
        let rope = Rope {
            inv_freq: vec![std::f32::consts::TAU, 1.0, 0.3, 1e-3, 1e-7, 0.0],
            attention_factor: 1.25,
        };
        for edges in [[0, 1, 2], [0, 3, 64], [5, 6, 1000], [64, 65, 16_384]] {
            let means = rope.mean_table(&edges);
            for (row, range) in edges.windows(2).enumerate() {
                let n = f64::from(range[1] - range[0]);
                for (i, w) in rope.inv_freq.iter().enumerate() {
                    let (mut cos, mut sin) = (0.0, 0.0);
                    for p in range[0]..range[1] {
                        let angle = f64::from(p) * f64::from(*w);
                        cos += 1.25 * angle.cos() / n;
                        sin += 1.25 * angle.sin() / n;
                    }
                    let at = at(row, i, &means);
                    for (actual, exact) in [(means.cos[at], cos), (means.sin[at], sin)] {
                        // Two roundings to f32.
                        let off = (f64::from(actual) - exact).abs();
                        assert!(off < 2f64.powi(-22), "{range:?} {w}: {actual} {exact}");
                    }
                }
                assert_eq!(
                    (means.cos[at(row, 5, &means)], means.sin[at(row, 5, &means)]),
                    (1.25, 0.0)
                );
            }
        }
    }

    /// Returns the index of pair `i` in a row of a table.
    fn at(row: usize, i: usize, table: &RopeTable) -> usize {
        row * table.half + i
    }

    #[test]
    fn a_range_of_one_distance_is_its_rotation() {
        let rope = rope(1e4, 16);
        let means = rope.mean_table(&[0, 1, 2, 300, 301]);
        for (row, p) in [(0, 0), (1, 1), (3, 300)] {
            let exact = rope.table(p..p + 1);
            for i in 0..8 {
                // The angle in f32.
                let bound = 2f32.powi(-24) * (p as f32 + 4.0);
                assert!((means.cos[at(row, i, &means)] - exact.cos[i]).abs() <= bound);
                assert!((means.sin[at(row, i, &means)] - exact.sin[i]).abs() <= bound);
            }
        }
    }

    #[test]
    fn scores_depend_on_the_distance_alone() {
        let rope = rope(1e4, 16);
        let q: Vec<f32> = (0..16).map(|i| (i as f32 * 0.7).sin()).collect();
        let k: Vec<f32> = (0..16).map(|i| (i as f32 * 1.3).cos()).collect();
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
        };
        let both = dot(&rotated(&rope, &q, 17), &rotated(&rope, &k, 5));
        let one = dot(&rotated(&rope, &q, 12), &k);
        assert!((both - one).abs() < 1e-5, "{both} {one}");
    }
}
