//! Confidence intervals by the bootstrap: blocks of text, or lines of questions, are resampled with replacement.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

/// Fewest units that an interval is computed from.
pub const FEWEST: usize = 20;

/// Number of resamples.
const RESAMPLES: usize = 1000;

/// Resamples of `n` units. Statistics computed on the same resamples are paired: variance that the units give to both
/// statistics does not widen the interval of their difference.
pub struct Bootstrap {
    /// Per resample, `n` indices of units.
    resamples: Vec<Vec<usize>>,
}

impl Bootstrap {
    /// Draws resamples of `n` units; `None` for fewer than [`FEWEST`].
    pub fn new(n: usize, seed: u64) -> Option<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut resample = || (0..n).map(|_| rng.gen_range(0..n)).collect();
        (n >= FEWEST).then(|| Self {
            resamples: (0..RESAMPLES).map(|_| resample()).collect(),
        })
    }

    /// Returns the 2.5th and the 97.5th percentile of a statistic of the units with these indices.
    pub fn interval(&self, statistic: impl Fn(&[usize]) -> f64 + Sync) -> [f64; 2] {
        let [interval] = self.intervals(|units| [statistic(units)]);
        interval
    }

    /// Returns these percentiles for several statistics, all on the same resamples.
    pub fn intervals<const N: usize>(
        &self,
        statistics: impl Fn(&[usize]) -> [f64; N] + Sync,
    ) -> [[f64; 2]; N] {
        let resamples = self.resamples.par_iter();
        let rows: Vec<[f64; N]> = resamples.map(|units| statistics(units)).collect();
        std::array::from_fn(|i| {
            let mut values: Vec<f64> = rows.iter().map(|row| row[i]).collect();
            [0.025, 0.975].map(|share| quantile(&mut values, share))
        })
    }
}

/// Returns the `share` quantile of values, by linear interpolation between the two nearest values; 0 if there are none.
/// The values are reordered.
pub fn quantile(values: &mut [f64], share: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let place = share * (values.len() - 1) as f64;
    let (_, low, above) = values.select_nth_unstable_by(place.floor() as usize, f64::total_cmp);
    let low = *low;
    let high = above.iter().copied().min_by(f64::total_cmp).unwrap_or(low);
    match place.fract() {
        0.0 => low,
        between => low + between * (high - low),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_the_sorted_values() {
        let mut values = [4.0, 1.0, 3.0, 2.0];
        let of = |values: &mut [f64], share| quantile(values, share);
        assert_eq!(of(&mut values, 0.0), 1.0);
        assert_eq!(of(&mut values, 1.0), 4.0);
        assert_eq!(of(&mut values, 0.5), 2.5);
        assert!((of(&mut values, 0.99) - 3.97).abs() < 1e-12);
        assert_eq!(of(&mut [], 0.5), 0.0);
    }

    /// The mean of n values with standard deviation sigma is known to within 1.96 sigma / sqrt(n).
    #[test]
    fn the_interval_of_a_mean_is_that_of_the_normal_law() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let values: Vec<f64> = (0..400)
            .map(|_| (0..12).map(|_| rng.r#gen::<f64>()).sum::<f64>() - 6.0)
            .collect();
        let mean = |units: &[usize]| units.iter().map(|i| values[*i]).sum::<f64>() / units.len() as f64;
        let all: Vec<usize> = (0..400).collect();
        let [low, high] = Bootstrap::new(400, 7).expect("enough units").interval(mean);
        let width = 2.0 * 1.96 / 20.0;
        assert!(low < mean(&all) && mean(&all) < high);
        assert!(((high - low) / width - 1.0).abs() < 0.1, "{low} {high} {width}");
    }

    #[test]
    fn few_units_have_no_interval() {
        assert!(Bootstrap::new(FEWEST - 1, 0).is_none());
        assert!(Bootstrap::new(FEWEST, 0).is_some());
    }
}
