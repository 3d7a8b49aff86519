//! Double Sparsity: a few channels of every key in 4 bits.

use half::f16;
use kvsmith::internal::method::doublesparsity::DoubleSparsity;
use rand::seq::SliceRandom;

use super::head::cases;
use super::wpq::items;
use super::*;

/// Checks random histories with random channels.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _| {
        let d = place.head_dim;
        let mut channels: Vec<usize> = (0..d).collect();
        channels.shuffle(rng);
        channels.truncate(pick(rng, &[1, 2, d / 8, 7, 8, 16, d]).min(d));
        let program = DoubleSparsity::new(channels.clone().into());
        (program, NaiveDoubleSparsity { channels })
    };
    cases::<NaiveDoubleSparsity>(300, make, |_| ());
}

struct NaiveDoubleSparsity {
    channels: Vec<usize>,
}

/// What the cache knows of a key: its codes, the minimum and the step.
type Label = (Vec<u8>, f64, f64);

impl NaiveDoubleSparsity {
    /// The label of a key, with the roundings that the rule names: f32, and f16 for minimum and step.
    fn label(&self, key: &[f64]) -> Label {
        let values: Vec<f32> = self.channels.iter().map(|i| key[*i] as f32).collect();
        let low = values.iter().copied().fold(f32::INFINITY, f32::min);
        let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let step = (high - low) / 15.0;
        let code = |x: &f32| {
            if step > 0.0 {
                ((x - low) / step).round() as u8
            } else {
                0
            }
        };
        let half = |x: f32| f64::from(f16::from_f32(x.clamp(-65504.0, 65504.0)));
        (values.iter().map(code).collect(), half(low), half(step))
    }

    /// The labels of all keys, which were made before the cache rounded the keys.
    fn labels(&self, history: &History) -> Vec<Label> {
        let mut labels = Vec::new();
        for event in &history.events {
            match event {
                Event::Turn(turn) => labels.extend(turn.keys[turn.first..].iter().map(|key| self.label(key))),
                Event::Decode(step) => labels.push(self.label(&step.key)),
            }
        }
        labels
    }

    /// The scaled product of a query with a label, and how far the program's may be off.
    fn product(&self, q: &[f64], (codes, low, step): &Label) -> (f64, f64) {
        let (q, root) = (self.channels.iter().map(|i| q[*i]), (q.len() as f64).sqrt());
        let q: Vec<f64> = q.collect();
        let key: Vec<f64> = codes.iter().map(|code| low + step * f64::from(*code)).collect();
        // The minimum and the codes are summed apart, after the query was scaled.
        let sizes = q.iter().zip(codes);
        let size: f64 = sizes
            .map(|(q, code)| q.abs() * (low.abs() + step * f64::from(*code)))
            .sum();
        let bound = (q.len() + 8) as f64 * UNIT * size;
        (dot(&q, &key) / root, bound / root)
    }
}

impl Model for NaiveDoubleSparsity {
    type Program = DoubleSparsity;

    fn chose(&mut self, history: &History) -> Verdict {
        let (step, labels) = (history.step(), self.labels(history));
        let seen: Vec<usize> = step.visible.clone().collect();
        let estimates = step.q_rope.iter().map(|q| {
            let of = |p: &usize| {
                if step.candidates.contains(p) {
                    self.product(q, &labels[*p])
                } else {
                    (score(q, &step.keys[*p]), score_bound(q, &step.keys[*p]))
                }
            };
            seen.iter().map(of).collect::<Vec<_>>()
        });
        let estimates: Vec<Vec<(f64, f64)>> = estimates.collect();
        let bits = |(codes, low, step): &Label| (codes.clone(), low.to_bits(), step.to_bits());
        let mut ranked = items(&seen, &estimates, &classes(labels.iter().map(bits)));
        ranked.retain(|item| step.candidates.contains(&item.position));
        check_best(&ranked, &step.chosen(), step.budget)?;
        Ok(Agreement::Same)
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let (step, count) = (history.step(), self.channels.len());
        // Codes of half a byte, and minimum and step in half precision.
        let labels = Array::items(count.div_ceil(2) + 4, step.candidates.clone());
        Some(vec![labels, Array::held(4 * count, 8 * count)])
    }
}
