//! PQCache: product quantisation of the prompt's own keys, arXiv 2407.12820.
//!
//! After the first prompt, the channels of its rotated keys are cut into m groups of neighbours, and the keys are
//! clustered into 2^b words in each group. A key's code is the number of the nearest word of each group; keys that are
//! appended later get their codes from the same words.
//!
//! Decoding: a query gives a score to every word of every group, and the sum over a key's words estimates the score of
//! the key. A KV head attends the candidates with the largest estimated probability, summed over the query heads of its
//! group. As in the authors' code, the probabilities of a query head are a softmax over the candidates alone: the static
//! set is not part of the denominator.
//!
//! Where we differ from the authors' code: they stop k-means when the GPU is estimated to be ready with a layer, after 3
//! to 300 passes; here it ends once no key changes its word, after [`PASSES`] passes at the latest, so that the words
//! depend on no clock. A word that loses all its keys moves to the key that is farthest from its own word. Scores are
//! f32 sums of products with words in half precision; theirs are in half precision throughout. They fit new words to
//! every prompt; here the words stay for later prompts, unless fewer than 128 positions were cached before. The system
//! around the method (keys on the host, prefetching, a block cache on the GPU) is not part of it here.

mod bench;
mod codes;
pub mod params;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use half::f16;
use ndarray::{Array3, ArrayView1, ArrayView2, s};

use super::declaration::{Ask, Declaration, InVerdict};
use super::{Method, Place, Prompt, Reads, Retriever, Selection, Step, add_probabilities, everything};
use crate::compute::cpu::Cpu;
use crate::compute::device::Device;
use crate::error::Result;
use crate::kv::packed::REFIT;
use crate::stats::kmeans::{self, Codebook, Init, KMeansParams};
use crate::stats::seeds::head_seed;
use codes::PackedCodes;
pub use params::PqCacheParams;

/// The declaration of `pqcache`.
pub static METHOD: Declaration = Declaration {
    name: "pqcache",
    help: "Positions ranked by estimated attention, from keys that are product-quantised by words of their own prompt (PQCache, arXiv 2407.12820)",
    section: None,
    verdict: InVerdict::IfCalibrated,
    prepare,
    bench: Some(&bench::PqCacheBench),
};

/// The most passes of k-means over a prompt's keys: the default of faiss, within the 3 to 300 of the authors' code.
pub const PASSES: usize = 25;

fn prepare(ask: &Ask) -> Result<Box<dyn Method>> {
    let (params, seed) = (ask.params.pqcache.clone(), ask.seed);
    params.check(ask.sizes.head_dim)?;
    Ok(Box::new(move |place: &Place| PqCache::new(place, &params, seed)))
}

/// The index of one KV head: the words of its prompt, and the code of every key.
#[derive(Clone)]
pub struct PqCache {
    place: Place,
    seed: u64,
    groups: usize,
    bits: u8,
    /// The words of each group, `[words,d/m]`, rounded to half precision; empty before the first prompt.
    words: Arc<Vec<Codebook>>,
    /// The numbers of the words of every key, `[n,m]`.
    codes: PackedCodes,
}

impl PqCache {
    /// Makes an empty head. The number of groups must divide the number of channels.
    pub fn new(place: &Place, params: &PqCacheParams, seed: u64) -> Self {
        Self {
            place: *place,
            seed,
            groups: params.pq_groups,
            bits: params.pq_bits,
            words: Arc::default(),
            codes: PackedCodes::new(params.pq_bits),
        }
    }

    /// Returns the words of each group, `[words,d/m]`.
    pub fn words(&self) -> impl Iterator<Item = ArrayView2<'_, f32>> {
        self.words.iter().map(|group| group.centroids().view())
    }

    /// Clusters the rotated keys of a prompt, `[n,d]`, except the sinks, which are never ranked.
    ///
    /// # Numerics
    /// The words are means of keys, rounded to half precision; beyond its range, they become its largest value.
    fn fit(&self, keys: ArrayView2<f32>) -> Vec<Codebook> {
        let sinks = if keys.nrows() > self.place.limits.sinks {
            self.place.limits.sinks
        } else {
            0
        };
        let keys = keys.slice(s![sinks.., ..]);
        let (n, d) = keys.dim();
        let mut points = Array3::zeros((self.groups, n, d / self.groups));
        for (group, mut points) in points.outer_iter_mut().enumerate() {
            points.assign(&keys.slice(s![.., self.channels(group)]));
        }
        let params = KMeansParams {
            size: n.min(1 << self.bits),
            iterations: PASSES,
            min_gain: 0.0,
            init: Init::Random,
            seed: self.seed,
        };
        let first = self.place.kv_head * self.groups;
        let seed = |group| head_seed(self.seed, self.place.layer, first + group);
        let seeds: Vec<u64> = (0..self.groups).map(seed).collect();
        let mut points = Cpu.points(points).expect("the CPU takes any points");
        let fits = kmeans::cluster(points.as_mut(), &params, &seeds, &mut |_, _| {
            ControlFlow::Continue(())
        });
        let fits = fits.expect("at least one key, and no more words than keys");
        let half = |x: f32| f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())).to_f32();
        fits.into_iter()
            .map(|fit| Codebook::new(fit.codebook.mapv(half)))
            .collect()
    }

    /// Returns the channels of a group.
    fn channels(&self, group: usize) -> Range<usize> {
        let dim = self.place.head_dim / self.groups;
        group * dim..(group + 1) * dim
    }

    /// Appends the codes of rotated keys, `[n,d]`. The lowest number wins a tie.
    fn take_in(&mut self, k_rope: ArrayView2<f32>) {
        let (n, m) = (k_rope.nrows(), self.groups);
        let mut codes = vec![0; m * n];
        let groups = self.words.iter().zip(codes.chunks_exact_mut(n.max(1)));
        for (group, (words, codes)) in groups.enumerate() {
            words.codes(k_rope.slice(s![.., self.channels(group)]), codes);
        }
        let of_keys = (0..m * n).map(|i| codes[i % m * n + i / m] as u8);
        self.codes.extend(of_keys);
    }

    /// Returns the scaled products of a query with the words of each group.
    fn tables(&self, query: ArrayView1<f32>) -> Vec<Vec<f32>> {
        let query = &query / (self.place.head_dim as f32).sqrt();
        let groups = self.words.iter().enumerate();
        let table = |(group, words): (usize, &Codebook)| {
            words
                .centroids()
                .dot(&query.slice(s![self.channels(group)]))
                .to_vec()
        };
        groups.map(table).collect()
    }

    /// Returns the bytes of the words in half precision.
    fn word_bytes(&self) -> usize {
        2 * self.words().map(|words| words.len()).sum::<usize>()
    }
}

impl Retriever for PqCache {
    fn prefill(&mut self, prompt: &Prompt) {
        // While few positions are cached, a prompt fits the words again, to all of them.
        let refit = prompt.first < REFIT || self.words.is_empty();
        if refit {
            self.words = Arc::new(self.fit(prompt.keys));
            self.codes.clear();
        }
        let first = if refit { 0 } else { prompt.first };
        self.take_in(prompt.keys.slice(s![first.., ..]));
    }

    fn append(&mut self, _: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        self.take_in(k_rope);
    }

    fn select(&mut self, step: &Step) -> Selection {
        if step.is_exact() {
            return everything(step).into();
        }
        let c = step.candidates.clone();
        let codes = self.codes.get(c.start * self.groups..c.end * self.groups);
        let mut mass = vec![0.0; c.len()];
        for query in step.q_rope.outer_iter() {
            let tables = self.tables(query);
            let score = |code: &[u8]| -> f32 {
                let entries = tables.iter().zip(code);
                entries.map(|(table, number)| table[usize::from(*number)]).sum()
            };
            let mut scores: Vec<f32> = codes.chunks_exact(self.groups).map(score).collect();
            add_probabilities(&mut scores, &mut mass);
        }
        Selection::of_mass(step, &mass)
    }

    fn reads(&self, step: &Step, _: &Selection, reads: &mut Reads) {
        let (c, m) = (&step.candidates, self.groups);
        // The words are held in f32, in which their products with a query are computed.
        reads.array_held(self.word_bytes(), 2 * self.word_bytes());
        reads.range(self.codes.span(c.start * m..c.end * m));
        // The codes in bytes, the scores of each query head, and the mass.
        let scores = step.q_rope.nrows() * size_of::<f32>();
        reads.scratch(c.len() * (m + scores + size_of::<f64>()));
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        let words = positions.min(1 << self.bits) * self.place.head_dim * size_of::<f16>();
        (positions * self.groups * usize::from(self.bits)).div_ceil(8) + words
    }

    fn state_bytes(&self) -> usize {
        self.codes.bytes() + self.word_bytes()
    }
}
