//! The options of caches of few bits: how keys are centered, which rows keep more bits, and ablations.

use super::static_set::{SINKS, WINDOW};
use crate::parameters::choices;
use ndarray::{ArrayView2, Axis};
use rayon::prelude::*;

/// Most positions that keep half precision.
pub const FULL: usize = 64;
/// The usual share of the chosen rows that are read whole.
pub const WHOLE: f64 = 0.25;

choices! {
    /// How the center of a channel is computed; signs are taken relative to it.
    pub enum Center {
        /// The channel's lower median: about half of the signs are positive.
        Median = "median",
        /// The channel's mean.
        Mean = "mean",
    }
}

impl Center {
    /// Computes the center of some values; zero if there are none.
    ///
    /// # Source
    /// Eq. 5 takes the mean; the authors' code takes the lower median.
    pub fn compute(self, values: &mut [f32]) -> f32 {
        if values.is_empty() {
            return 0.0;
        }
        match self {
            Self::Median => {
                let middle = (values.len() - 1) / 2;
                *values.select_nth_unstable_by(middle, f32::total_cmp).1
            }
            Self::Mean => {
                let sum: f64 = values.iter().map(|v| f64::from(*v)).sum();
                (sum / values.len() as f64) as f32
            }
        }
    }

    /// Computes the center of every channel of `rows`, `[n,d]`.
    pub fn of_channels(self, rows: ArrayView2<f32>) -> Vec<f32> {
        rows.axis_iter(Axis(1))
            .into_par_iter()
            .map(|channel| self.compute(&mut channel.to_vec()))
            .collect()
    }
}

/// The options of caches of few bits. Those of the 2-bit cache come first; other values than the defaults are for ablations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    /// How the center of a channel is computed.
    pub center: Center,
    /// Most positions that keep half precision.
    pub full: usize,
    /// Whether a key is stored as signs and quantised magnitudes. If not, the centered key itself is
    /// quantised, as values are, and only the index uses the signs.
    pub signed: bool,
    /// Number of first rows that other formats of few bits keep in bf16.
    pub sinks: usize,
    /// Number of last rows that they keep in bf16.
    pub window: usize,
    /// The share of the chosen rows that a step reads whole where rows are in layers; of the others, it reads the upper layer.
    pub whole: f64,
}

impl From<Center> for Layout {
    fn from(center: Center) -> Self {
        Self {
            center,
            full: FULL,
            signed: true,
            sinks: SINKS,
            window: WINDOW,
            whole: WHOLE,
        }
    }
}
