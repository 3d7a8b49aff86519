//! CTkvr: looks up what similar past queries attended, arXiv 2512.15550.
//!
//! The last C prompt queries become centroids; each has a list of the keys with its largest softmax weights. A decode
//! step recalls the lists of the C' centroids most similar to its query, ranks the union of these lists by exact
//! scores, attends the best positions, and becomes a centroid itself in place of the oldest one.
//!
//! Where we differ from the paper, or decide what it leaves open: scores are scaled and causal; the static set is
//! removed from the lists after the softmax; positions that leave the window after the lists were built are ranked for
//! 256 steps (fresh positions), so that new lists can include them; the index is limited to a share of the cache; the
//! queries of a later prompt become centroids with lists over all keys.

mod bench;
pub mod cuda;
pub mod params;

use std::collections::VecDeque;

use half::f16;
use half::slice::HalfFloatSliceExt;
use ndarray::{Array2, ArrayView2, Axis, s};

use super::best::{Places, best_positions, largest};
use super::cuda::CudaMethod;
use super::declaration::{Declaration, InVerdict};
use super::{Method, Place, Prompt, Reads, Retriever, Selection, Step, everything, except, softmax};
use crate::compute::attention::visible;
use crate::compute::layout::elements_mut;
use crate::compute::products::all_products;
use crate::compute::{gemm, simd};
pub use params::{Choose, CtkvrParams};

/// For how many steps every query ranks a position after it has left the window.
pub const FRESH: usize = 256;
/// The most centroids by default; there is one per [`TOKENS_PER_CENTROID`] tokens.
const MOST_CENTROIDS: usize = 2048;
/// Prompt tokens per centroid.
const TOKENS_PER_CENTROID: usize = 16;
/// The largest size of the index by default, and with a given number of centroids, as shares of the cache's bytes.
const MOST_BYTES: [f64; 2] = [0.1, 1.0];
/// Prompt queries whose scores are computed together.
const TILE: usize = 32;

/// The declaration of `ctkvr`.
pub static METHOD: Declaration = Declaration {
    name: "ctkvr",
    help: "Positions that similar past queries attended (CTkvr, arXiv 2512.15550)",
    section: None,
    verdict: InVerdict::Always,
    prepare: |ask| Ok(Box::new(ask.params.ctkvr.clone())),
    bench: Some(&bench::CtkvrBench),
};

impl Method for CtkvrParams {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        Box::new(Ctkvr::new(place, self))
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(self)
    }
}

/// A past query with a list of the positions that it attended most.
#[derive(Clone, Debug, PartialEq)]
pub struct Centroid {
    /// The queries of the group, each scaled to length one: `[r,d]`.
    pub queries: Vec<f16>,
    /// The list of positions, ascending.
    pub list: Vec<u32>,
}

/// The index of one KV head.
#[derive(Clone)]
pub struct Ctkvr {
    place: Place,
    params: CtkvrParams,
    /// The centroids, oldest first.
    centroids: VecDeque<Centroid>,
    /// The lists cover the positions below this one; later positions are fresh.
    indexed: usize,
    /// Number of centroids that the last step compared with its query.
    compared: usize,
    /// The lengths of the lists that it then read.
    recalled: Vec<usize>,
}

impl Ctkvr {
    /// Makes an empty index.
    pub fn new(place: &Place, params: &CtkvrParams) -> Self {
        Self {
            place: *place,
            params: params.clone(),
            centroids: VecDeque::new(),
            indexed: 0,
            compared: 0,
            recalled: Vec::new(),
        }
    }

    /// Returns the length of a list, rho, for `n` visible positions.
    pub fn list_len(&self, n: usize) -> usize {
        (self.params.ct_list * self.place.limits.budget.positions(n).min(n) as f64).ceil() as usize
    }

    /// Returns the number of centroids, C, for a cache of `n` positions: the requested number, reduced to stay within
    /// `MOST_BYTES`, but at least one.
    pub fn capacity(&self, n: usize) -> usize {
        let (r, d) = (self.place.group, self.place.head_dim);
        let by_length = by_length(&self.params, n);
        let [by_default, given] = MOST_BYTES;
        let (wanted, share) = match self.params.ct_centroids {
            Some(count) => (count, given),
            None => (by_length, by_default),
        };
        let seen = visible(n.max(1) - 1, self.place.limits.model_window).len();
        let bytes = self.list_len(seen).saturating_mul(4).saturating_add(2 * r * d);
        let allowed = share * (n * self.place.kv.bytes_per_position(d)) as f64;
        wanted.min((allowed / bytes as f64) as usize).max(1)
    }

    /// Returns the rows, ascending, that become centroids of a prompt of `m` rows, after which the cache has `n`
    /// positions.
    pub fn centroid_rows(&self, m: usize, n: usize) -> Vec<usize> {
        self.params.ct_choose.rows(m, self.capacity(n))
    }

    /// Returns the lists of the centroids, oldest first.
    pub fn lists(&self) -> impl Iterator<Item = &[u32]> {
        self.centroids.iter().map(|c| &c.list[..])
    }

    /// Returns the indices, ascending, of the centroids most similar to the queries `[r,d]`. Similarity is the largest
    /// cosine over the group; the older centroid wins a tie.
    ///
    /// # Source
    /// Algorithm 2: `cos(Qc, q)`, the maximum over the group, the top C'.
    fn recall(&self, q: ArrayView2<f32>) -> Vec<u32> {
        let d = self.place.head_dim;
        let unit = unit_rows(q);
        let mut scratch = vec![0.0; unit.len()];
        let mut ranked: Vec<(f32, u32)> = Vec::with_capacity(self.centroids.len());
        for (centroid, i) in self.centroids.iter().zip(0..) {
            centroid.queries.convert_to_f32_slice(&mut scratch);
            let pairs = scratch.chunks(d).zip(unit.chunks(d));
            let cosines = pairs.map(|(a, b)| simd::dot(a, b));
            ranked.push((cosines.fold(f32::NEG_INFINITY, f32::max), i));
        }
        best_positions(ranked, self.params.ct_probes)
    }

    /// Returns the candidates that a step ranks, ascending: the union of the recalled lists and the fresh positions.
    fn union(&mut self, step: &Step) -> Vec<u32> {
        let c = &step.candidates;
        let mut union = Places::new(c.len());
        self.compared = self.centroids.len();
        self.recalled.clear();
        for i in self.recall(step.q_rope) {
            let list = &self.centroids[i as usize].list;
            self.recalled.push(list.len());
            let listed = list.iter().map(|p| *p as usize).filter(|p| c.contains(p));
            listed.for_each(|p| union.insert(p - c.start));
        }
        let fresh = self.indexed.max(c.end.saturating_sub(FRESH)).max(c.start)..c.end;
        fresh.for_each(|p| union.insert(p - c.start));
        union.ascending(c.start as u32)
    }

    /// Returns whether this step becomes a centroid.
    fn is_update(&self, step: &Step) -> bool {
        self.params.ct_update > 0 && step.step.is_multiple_of(self.params.ct_update)
    }

    /// Makes a centroid of a step whose query gives these softmax weights to `positions`.
    fn update(&mut self, step: &Step, positions: &[u32], weights: &[f32]) {
        let len = self.list_len(step.visible.len());
        let list = heaviest(positions, weights, len);
        let capacity = self.capacity(step.visible.end).max(self.centroids.len());
        self.push(step.q_rope, list, capacity);
    }

    /// Adds queries `[r,d]` with their list as the newest centroid, and removes the oldest centroids beyond `capacity`.
    fn push(&mut self, q: ArrayView2<f32>, mut list: Vec<u32>, capacity: usize) {
        let mut queries: Vec<f16> = unit_rows(q).into_iter().map(f16::from_f32).collect();
        // Both may have been made in a longer vector, whose memory they would keep.
        list.shrink_to_fit();
        queries.shrink_to_fit();
        self.centroids.push_back(Centroid { queries, list });
        while self.centroids.len() > capacity {
            self.centroids.pop_front();
        }
    }
}

/// Returns the rows, each divided by its length; a row of zeros stays zero.
fn unit_rows(q: ArrayView2<f32>) -> Vec<f32> {
    let mut out = Vec::with_capacity(q.len());
    for row in q.rows() {
        let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        let scale = if squares > 0.0 { 1.0 / squares.sqrt() } else { 0.0 };
        out.extend(row.iter().map(|x| (f64::from(*x) * scale) as f32));
    }
    out
}

/// Returns the `count` positions with the largest weights, ascending. The lower position wins a tie.
fn heaviest(positions: &[u32], weights: &[f32], count: usize) -> Vec<u32> {
    let places = largest(weights, count).into_iter();
    places.map(|i| positions[i as usize]).collect()
}

impl Retriever for Ctkvr {
    /// # Source
    /// Algorithm 1: the lists are the top rho keys by the largest softmax weight over the group.
    fn prefill(&mut self, prompt: &Prompt) {
        if prompt.first > 0 && self.params.ct_keep {
            return;
        }
        let (r, m, d) = prompt.q_rope.dim();
        let n = prompt.keys.nrows();
        let capacity = self.capacity(n);
        let (sinks, window) = (
            self.place.limits.sinks,
            n.saturating_sub(self.place.limits.window),
        );
        let scale = 1.0 / (d as f32).sqrt();
        for tile in self.centroid_rows(m, n).chunks(TILE) {
            let (first_row, last_row) = (prompt.first + tile[0], prompt.first + tile[tile.len() - 1]);
            // From the first position that the first row sees up to the last row's own position.
            let seen = visible(first_row, self.place.limits.model_window).start..last_row + 1;
            let model_window = self.place.limits.model_window;
            let own = |i: usize| visible(prompt.first + i, model_window);
            let keys = prompt.keys.slice(s![seen.clone(), ..]);
            let mut weights = Array2::<f32>::zeros((tile.len(), seen.len()));
            let mut scores = weights.clone();
            for a in 0..r {
                let queries = prompt.q_rope.index_axis(Axis(0), a).select(Axis(0), tile);
                let queries = queries * scale;
                gemm(scores.view_mut(), false, queries.view(), keys.t());
                let rows = scores.rows_mut().into_iter().zip(weights.rows_mut());
                for ((mut scores, mut weights), i) in rows.zip(tile) {
                    let own = own(*i).start - seen.start..own(*i).end - seen.start;
                    let scores = &mut elements_mut(&mut scores)[own.clone()];
                    softmax(scores);
                    let weights = &mut elements_mut(&mut weights)[own];
                    weights.iter_mut().zip(scores).for_each(|(w, s)| *w = w.max(*s));
                }
            }
            for (&i, weights) in tile.iter().zip(weights.rows()) {
                let listed = own(i).start.max(sinks)..own(i).end.min(window);
                let positions: Vec<u32> = listed.clone().map(|p| p as u32).collect();
                let row: Vec<f32> = listed.map(|p| weights[p - seen.start]).collect();
                let list = heaviest(&positions, &row, self.list_len(own(i).len()));
                self.push(prompt.q_rope.slice(s![.., i, ..]), list, capacity);
            }
        }
        // After a later prompt that is too short to replace all centroids, older centroids remain whose lists lack the
        // new positions. The new positions then stay fresh.
        if prompt.first == 0 || m >= capacity {
            self.indexed = window;
        }
    }

    fn select(&mut self, step: &Step) -> Selection {
        if step.is_exact() {
            return everything(step).into();
        }
        let (r, d) = step.q_rope.dim();
        let union = self.union(step);
        let scale = 1.0 / (d as f32).sqrt();
        let mut scores = all_products(step.q_rope, scale, step.kv.keys(), &union);
        // A' of Algorithm 2: a softmax over the union alone, then the maximum over the group.
        let mut weights = vec![0.0f32; union.len()];
        for mut row in scores.axis_iter_mut(Axis(0)) {
            let row = elements_mut(&mut row);
            softmax(row);
            weights.iter_mut().zip(row).for_each(|(w, x)| *w = w.max(*x));
        }
        let positions = heaviest(&union, &weights, step.budget);
        if self.is_update(step) {
            self.update(step, &union, &weights);
        }
        Selection {
            whole: None,
            ranked: except(&union, &positions),
            products: r * union.len(),
            positions,
            bypassed: Vec::new(),
        }
    }

    fn reads(&self, step: &Step, selection: &Selection, reads: &mut Reads) {
        // The queries of a centroid and each list are arrays of their own.
        let queries = step.q_rope.len() * size_of::<f16>();
        (0..self.compared).for_each(|_| reads.array(queries));
        self.recalled.iter().for_each(|len| reads.array(4 * len));
        reads.ranked(selection);
        let (r, union) = (
            step.q_rope.nrows(),
            selection.ranked.len() + selection.positions.len(),
        );
        // A bit per candidate; the list of the ranked positions, a score for each query head and a weight for each.
        reads.scratch(8 * step.candidates.len().div_ceil(64) + 4 * union * (r + 2));
    }

    /// If the budget covers all candidates, nothing is ranked, and the weights come from the attention instead.
    fn observes(&self, step: &Step) -> bool {
        step.is_exact() && self.is_update(step)
    }

    fn observe(&mut self, step: &Step, positions: &[u32], weights: ArrayView2<f32>) {
        let place = |p: usize| positions.partition_point(|q| (*q as usize) < p);
        let candidates = place(step.candidates.start)..place(step.candidates.end);
        let mut largest = vec![0.0f32; candidates.len()];
        for row in weights.rows() {
            let row = row.slice(s![candidates.clone()]);
            let sum: f64 = row.iter().map(|w| f64::from(*w)).sum();
            let scale = if sum > 0.0 { 1.0 / sum } else { 0.0 };
            for (l, w) in largest.iter_mut().zip(row) {
                *l = l.max((f64::from(*w) * scale) as f32);
            }
        }
        self.update(step, &positions[candidates], &largest);
    }

    /// The length of the lists depends on the budget.
    fn depends_on_budget(&self) -> bool {
        true
    }

    fn bytes_for(&self, place: &Place, positions: usize) -> usize {
        let visible = visible(positions.max(1) - 1, place.limits.model_window).len();
        let list = self.list_len(visible) * size_of::<u32>();
        self.capacity(positions) * (list + place.group * place.head_dim * size_of::<f16>())
    }

    fn state_bytes(&self) -> usize {
        let of = |c: &Centroid| c.queries.capacity() * 2 + c.list.capacity() * 4;
        self.centroids.iter().map(of).sum()
    }
}

/// Counts the centroids of a context of `n` positions, before their bytes limit them.
fn by_length(params: &CtkvrParams, n: usize) -> usize {
    (n / TOKENS_PER_CENTROID)
        .max(params.ct_probes)
        .min(MOST_CENTROIDS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{Budget, KvType, Limits};

    #[test]
    fn the_cap_follows_the_type_of_the_cache() {
        let capacity = |kv| {
            let place = Place {
                layer: 0,
                kv_head: 0,
                group: 4,
                head_dim: 64,
                limits: Limits::new(Budget::Count(256)),
                kv,
            };
            let index = Ctkvr::new(&place, &CtkvrParams::default());
            let capacity = index.capacity(16384);
            // The bytes of a list of 640 positions and of four queries of 64 channels.
            let bytes = capacity * (640 * 4 + 4 * 64 * 2);
            let cache = 16384 * kv.bytes_per_position(64);
            assert!(
                10 * bytes <= cache && 10 * (bytes + 3072) > cache,
                "{kv:?} {bytes}"
            );
            capacity
        };
        assert_eq!(capacity(KvType::F32), 273);
        assert_eq!(capacity(KvType::BF16), 136);
        assert_eq!(capacity(KvType::F16), 136);
        assert_eq!(capacity(KvType::TWO_BIT), 29);
    }

    #[test]
    fn rows_that_become_centroids() {
        assert_eq!(Choose::Last.rows(10, 3), [7, 8, 9]);
        assert_eq!(Choose::First.rows(10, 3), [0, 1, 2]);
        assert_eq!(Choose::Even.rows(10, 5), [1, 3, 5, 7, 9]);
        for choose in [Choose::Last, Choose::First, Choose::Even, Choose::Random] {
            for (m, count) in [(1, 1), (3, 9), (100, 7), (64, 64)] {
                let rows = choose.rows(m, count);
                assert_eq!(rows.len(), count.min(m), "{choose:?}");
                assert!(
                    rows.windows(2).all(|w| w[0] < w[1]) && rows.iter().all(|i| *i < m),
                    "{choose:?}"
                );
            }
        }
        let random = Choose::Random.rows(1000, 20);
        assert_ne!(random, Choose::Even.rows(1000, 20));
        assert_eq!(random, Choose::Random.rows(1000, 20));
    }
}
