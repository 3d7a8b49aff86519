//! Rotary position embedding in the "rotate half" layout: channel i is paired with i + d/2.
//!
//! `(x R_p)[i] = x[i] cos(p w_i) - x[i + d/2] sin(p w_i)`, `(x R_p)[i + d/2] = x[i + d/2] cos(p w_i) + x[i] sin(p w_i)`.

use std::ops::Range;

use super::config::{RopeConfig, RopeScaling};

/// The angular frequencies of one model and the factor on cos and sin.
#[derive(Clone, Debug)]
pub struct Rope {
    /// w_i for i in 0..d/2, f32 as the model computes it.
    inv_freq: Vec<f32>,
    /// Multiplies cos and sin (YaRN); 1 for the other types.
    attention_factor: f32,
}

impl Rope {
    /// Frequencies for heads of `head_dim` channels.
    ///
    /// # Source
    /// Llama 3.1's and YaRN's (arXiv 2309.00071, section 3.2) scaling, as in transformers.
    pub fn new(config: &RopeConfig, head_dim: usize) -> Self {
        let half = head_dim / 2;
        let plain: Vec<f64> = (0..half)
            .map(|i| config.theta.powf(-2.0 * i as f64 / head_dim as f64))
            .collect();
        let mut attention_factor = 1.0;
        let scaled: Vec<f64> = match config.scaling {
            RopeScaling::Default => plain,
            RopeScaling::Linear { factor } => plain.iter().map(|w| w / factor).collect(),
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => plain
                .iter()
                .map(|&w| {
                    let wavelength = 2.0 * std::f64::consts::PI / w;
                    if wavelength < original / high {
                        w
                    } else if wavelength > original / low {
                        w / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * w / factor + smooth * w
                    }
                })
                .collect(),
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention_factor: a,
                truncate,
            } => {
                attention_factor = a;
                // The dimension that turns `rotations` times within the original context.
                let dimension = |rotations: f64| {
                    head_dim as f64 * (original / (rotations * 2.0 * std::f64::consts::PI)).ln()
                        / (2.0 * config.theta.ln())
                };
                let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min(head_dim as f64 - 1.0);
                if low == high {
                    high += 0.001;
                }
                let ramp = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain
                    .iter()
                    .enumerate()
                    .map(|(i, w)| w / factor * ramp(i) + w * (1.0 - ramp(i)))
                    .collect()
            }
        };
        Self {
            inv_freq: scaled.iter().map(|w| *w as f32).collect(),
            attention_factor: attention_factor as f32,
        }
    }

    /// Cosines and sines of a range of positions.
    pub fn table(&self, positions: Range<usize>) -> RopeTable {
        let half = self.inv_freq.len();
        let mut cos = Vec::with_capacity(positions.len() * half);
        let mut sin = Vec::with_capacity(positions.len() * half);
        for p in positions {
            for w in &self.inv_freq {
                // The angle is rounded to f32, as models do; its sine and cosine are then exact.
                let angle = f64::from(p as f32 * w);
                cos.push(angle.cos() as f32 * self.attention_factor);
                sin.push(angle.sin() as f32 * self.attention_factor);
            }
        }
        RopeTable { cos, sin, half }
    }
}

/// Cosines and sines, attention factor included, for consecutive positions.
pub struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RopeTable {
    /// Rotates one head vector (d values) in place to the `row`-th position of the table.
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
