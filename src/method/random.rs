//! Positions drawn uniformly without replacement: the baseline that ignores the keys.

pub mod cuda;

use std::ops::Range;

use rand::SeedableRng;
use rand::seq::index;
use rand_chacha::ChaCha8Rng;

use super::cuda::CudaMethod;
use super::declaration::{Declaration, InVerdict};
use super::{Method, Place, Retriever, Selection, Step};

/// The declaration of `random`.
pub static METHOD: Declaration = Declaration {
    name: "random",
    help: "Positions drawn uniformly at random",
    section: None,
    verdict: InVerdict::IfCalibrated,
    prepare: |ask| Ok(Box::new(Seed(ask.seed))),
    bench: None,
};

/// The method with the seed of a run's draws.
struct Seed(u64);

impl Method for Seed {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        Box::new(RandomDraws::new(self.0, place.layer, place.kv_head))
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(self)
    }
}

/// Uniform draws that depend only on seed, layer, head and step.
#[derive(Clone)]
pub struct RandomDraws {
    seed: u64,
    stream: u64,
}

impl RandomDraws {
    /// Makes the generator of a head.
    pub fn new(seed: u64, layer: usize, kv_head: usize) -> Self {
        Self {
            seed,
            stream: ((layer as u64) << 32) | kv_head as u64,
        }
    }

    /// Draws `budget` of the candidates, ascending; all of them if the budget covers them.
    pub fn draw(&self, step: usize, candidates: Range<usize>, budget: usize) -> Vec<u32> {
        if budget >= candidates.len() {
            return candidates.map(|p| p as u32).collect();
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed.wrapping_add(step as u64));
        rng.set_stream(self.stream);
        let drawn = index::sample(&mut rng, candidates.len(), budget).into_iter();
        let mut chosen: Vec<u32> = drawn.map(|i| (candidates.start + i) as u32).collect();
        chosen.sort_unstable();
        chosen
    }
}

impl Retriever for RandomDraws {
    fn select(&mut self, step: &Step) -> Selection {
        self.draw(step.step, step.candidates.clone(), step.budget).into()
    }
}
