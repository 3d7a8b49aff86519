//! The sampler: chooses the next token from logits.

use ndarray::ArrayView1;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::{Error, Result};

/// Chooses tokens greedily, or draws them with a temperature from the nucleus.
pub struct Sampler {
    temperature: f64,
    top_p: f64,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// Makes a sampler; `temperature` 0 means greedy.
    pub fn new(temperature: f64, top_p: f64, seed: u64) -> Self {
        Self {
            temperature,
            top_p,
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    /// Says whether the sampler takes the largest logit.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Returns the divisor of logits; 0 means greedy.
    pub fn temperature(&self) -> f64 {
        self.temperature
    }

    /// Returns the least share of probability in the nucleus.
    pub fn top_p(&self) -> f64 {
        self.top_p
    }

    /// Draws a number in [0, 1); each draw of a token uses one.
    pub fn uniform(&mut self) -> f64 {
        self.rng.r#gen()
    }

    /// Chooses the next token id; greedy takes the lowest id on ties.
    ///
    /// # Errors
    /// No logits.
    pub fn next(&mut self, logits: ArrayView1<f32>) -> Result<u32> {
        let best = greedy(logits)?;
        if self.is_greedy() {
            return Ok(best);
        }
        let logits = logits.to_vec();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_unstable_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let top = f64::from(logits[order[0]]);
        let weight = |i: &usize| ((f64::from(logits[*i]) - top) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        // The nucleus: the fewest most probable tokens with at least top_p of the probability.
        let mut mass = 0.0;
        let last = weights.iter().position(|w| {
            mass += w / total;
            mass >= self.top_p
        });
        weights.truncate(last.map_or(weights.len(), |last| last + 1));
        let mut left = self.uniform() * weights.iter().sum::<f64>();
        for (w, i) in weights.iter().zip(&order) {
            left -= w;
            if left <= 0.0 {
                return Ok(*i as u32);
            }
        }
        Ok(order[weights.len() - 1] as u32)
    }
}

/// Returns the token with the largest logit, the lowest id on ties.
///
/// # Errors
/// No logits.
pub fn greedy(logits: ArrayView1<f32>) -> Result<u32> {
    let larger = |best: (usize, _), token: (usize, _)| if token.1 > best.1 { token } else { best };
    let best = logits.iter().enumerate().reduce(larger);
    let (id, _) = best.ok_or_else(|| Error::failed("there are no logits"))?;
    Ok(id as u32)
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let next = Sampler::new(0.0, 1.0, 0).next(array![1.0, 3.0, 3.0].view());
        assert_eq!(next.unwrap(), 1);
    }

    #[test]
    fn nothing_is_chosen_from_no_logits() {
        for temperature in [0.0, 1.0] {
            let error = Sampler::new(temperature, 1.0, 0)
                .next(array![].view())
                .unwrap_err();
            assert_eq!(error.to_string(), "there are no logits");
        }
    }

    #[test]
    fn draws_follow_the_probabilities_within_the_nucleus() {
        let logits = array![0.0f32, 2f32.ln(), 4f32.ln(), -20.0];
        let mut sampler = Sampler::new(1.0, 0.8, 7);
        let mut counts = [0usize; 4];
        for _ in 0..6000 {
            counts[sampler.next(logits.view()).unwrap() as usize] += 1;
        }
        // Probabilities 1/7, 2/7, 4/7: the nucleus of 0.8 keeps the last two.
        assert_eq!((counts[0], counts[3]), (0, 0));
        let share = counts[2] as f64 / 6000.0;
        // Six standard deviations of a binomial with p = 2/3.
        assert!(
            (share - 2.0 / 3.0).abs() < 6.0 * (2.0 / 9.0 / 6000.0f64).sqrt(),
            "{share}"
        );
    }
}
