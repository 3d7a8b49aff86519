//! The sampler: chooses the next token from logits.

use std::collections::BTreeSet;

use ndarray::ArrayView1;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::{Error, Result};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the largest.
    pub temperature: f64,
    /// Draw from at most this many of the most probable tokens.
    pub top_k: Option<usize>,
    /// Draw from the fewest most probable tokens with at least this share of the probability.
    pub top_p: f64,
    /// Draw from tokens with at least this share of the probability of the most probable one.
    pub min_p: f64,
    /// Divisor of positive logits, and factor of negative ones, of tokens that were in the prompt or the reply
    /// (arXiv 1909.05858, section 4.1, as transformers has it).
    pub repetition_penalty: f64,
}

impl Default for Sampling {
    /// Returns greedy sampling.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
        }
    }
}

/// Chooses tokens greedily, or draws them.
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
    /// The tokens to which the repetition penalty applies, if there is a penalty.
    seen: BTreeSet<u32>,
}

impl Sampler {
    /// Makes a sampler whose draws follow `seed`.
    pub fn new(sampling: Sampling, seed: u64) -> Self {
        Self {
            sampling,
            rng: ChaCha8Rng::seed_from_u64(seed),
            seen: BTreeSet::new(),
        }
    }

    /// Says whether the sampler takes the largest logit, after the penalty.
    pub fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0
    }

    /// Says whether the sampler does nothing but temperature and nucleus (`top_p`), which a GPU can do too.
    pub fn is_plain(&self) -> bool {
        let Sampling {
            top_k,
            min_p,
            repetition_penalty,
            ..
        } = self.sampling;
        top_k.is_none() && min_p == 0.0 && repetition_penalty == 1.0
    }

    /// Returns the divisor of logits; 0 means greedy.
    pub fn temperature(&self) -> f64 {
        self.sampling.temperature
    }

    /// Returns the smallest probability that the nucleus must reach (`top_p`).
    pub fn top_p(&self) -> f64 {
        self.sampling.top_p
    }

    /// Draws a number in [0, 1); drawing a token takes one number.
    pub fn uniform(&mut self) -> f64 {
        self.rng.r#gen()
    }

    /// Records tokens of the prompt or the reply, to which the repetition penalty applies from now on.
    pub fn observe(&mut self, ids: &[u32]) {
        if self.sampling.repetition_penalty != 1.0 {
            self.seen.extend(ids);
        }
    }

    /// Chooses the next token id; greedy takes the lowest id on ties.
    ///
    /// # Errors
    /// No logits.
    pub fn next(&mut self, logits: ArrayView1<f32>) -> Result<u32> {
        let mut logits = logits.to_owned();
        let penalty = self.sampling.repetition_penalty as f32;
        for id in &self.seen {
            if let Some(x) = logits.get_mut(*id as usize) {
                *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
            }
        }
        let best = greedy(logits.view())?;
        if self.is_greedy() {
            return Ok(best);
        }
        let Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            ..
        } = self.sampling;
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_unstable_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        order.truncate(top_k.unwrap_or(usize::MAX).max(1));
        let top = f64::from(logits[order[0]]);
        let weight = |i: &usize| ((f64::from(logits[*i]) - top) / temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        // The nucleus: the fewest most probable tokens with at least top_p of the probability.
        let mut mass = 0.0;
        let last = weights.iter().position(|w| {
            mass += w / total;
            mass >= top_p
        });
        weights.truncate(last.map_or(weights.len(), |last| last + 1));
        // The largest weight is 1.
        weights.truncate(weights.partition_point(|w| *w >= min_p).max(1));
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
    let (id, _) = best.ok_or_else(|| Error::internal("there are no logits"))?;
    Ok(id as u32)
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let next = Sampler::new(Sampling::default(), 0).next(array![1.0, 3.0, 3.0].view());
        assert_eq!(next.unwrap(), 1);
    }

    #[test]
    fn nothing_is_chosen_from_no_logits() {
        for temperature in [0.0, 1.0] {
            let error = Sampler::new(
                Sampling {
                    temperature,
                    ..Sampling::default()
                },
                0,
            )
            .next(array![].view())
            .unwrap_err();
            assert_eq!(error.to_string(), "there are no logits");
        }
    }

    #[test]
    fn draws_follow_the_probabilities_within_the_nucleus() {
        let logits = array![0.0f32, 2f32.ln(), 4f32.ln(), -20.0];
        let sampling = Sampling {
            temperature: 1.0,
            top_p: 0.8,
            ..Sampling::default()
        };
        let mut sampler = Sampler::new(sampling, 7);
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

    /// The tokens that are ever drawn from these logits.
    fn drawn(sampling: Sampling, logits: &ndarray::Array1<f32>) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling, 3);
        let drawn: BTreeSet<u32> = (0..3000).map(|_| sampler.next(logits.view()).unwrap()).collect();
        drawn.into_iter().collect()
    }

    #[test]
    fn few_tokens_are_drawn_from_if_asked() {
        // Probabilities in the ratio 1 : 2 : 4 : 8.
        let logits = array![0.0f32, 2f32.ln(), 4f32.ln(), 8f32.ln()];
        let all = Sampling {
            temperature: 1.0,
            ..Sampling::default()
        };
        assert_eq!(drawn(all, &logits), [0, 1, 2, 3]);
        assert_eq!(
            drawn(
                Sampling {
                    top_k: Some(2),
                    ..all
                },
                &logits
            ),
            [2, 3]
        );
        assert_eq!(drawn(Sampling { min_p: 0.2, ..all }, &logits), [1, 2, 3]);
        assert_eq!(drawn(Sampling { min_p: 0.9, ..all }, &logits), [3]);
        // Of the best two, the first has two thirds of the probability.
        assert_eq!(
            drawn(
                Sampling {
                    top_k: Some(2),
                    top_p: 0.6,
                    ..all
                },
                &logits
            ),
            [3]
        );
        assert_eq!(
            drawn(
                Sampling {
                    top_k: Some(2),
                    top_p: 0.7,
                    ..all
                },
                &logits
            ),
            [2, 3]
        );
    }

    #[test]
    fn repeated_tokens_are_held_back() {
        let penalised = Sampling {
            repetition_penalty: 2.0,
            ..Sampling::default()
        };
        let mut sampler = Sampler::new(penalised, 0);
        let positive = array![3.0, 2.0, 1.0];
        assert_eq!(sampler.next(positive.view()).unwrap(), 0);
        sampler.observe(&[0, 9]);
        assert_eq!(sampler.next(positive.view()).unwrap(), 1);
        sampler.observe(&[1]);
        assert_eq!(sampler.next(positive.view()).unwrap(), 0);
        let negative = array![-1.0, -1.5, -1.7];
        assert_eq!(sampler.next(negative.view()).unwrap(), 2);
    }
}
