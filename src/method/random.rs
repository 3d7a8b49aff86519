//! Positions drawn uniformly without replacement: what a budget gives without knowledge.

use rand::SeedableRng;
use rand::seq::index;
use rand_chacha::ChaCha8Rng;

use super::{Choice, Retriever, Step, everything};

/// Uniform choice, fixed by seed, layer, head and step.
#[derive(Clone)]
pub struct Random {
    seed: u64,
    stream: u64,
}

impl Random {
    /// The generator of one head.
    pub fn new(seed: u64, layer: usize, kv_head: usize) -> Self {
        Self {
            seed,
            stream: ((layer as u64) << 32) | kv_head as u64,
        }
    }
}

impl Retriever for Random {
    fn select(&mut self, step: &Step) -> Choice {
        let c = &step.candidates;
        if step.is_exact() {
            return everything(step).into();
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed.wrapping_add(step.step as u64));
        rng.set_stream(self.stream);
        let mut chosen: Vec<u32> = index::sample(&mut rng, c.len(), step.budget)
            .into_iter()
            .map(|i| (c.start + i) as u32)
            .collect();
        chosen.sort_unstable();
        chosen.into()
    }

    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}
