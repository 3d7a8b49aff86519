//! The baselines against their definitions, computed naively in f64.

use kvsmith::internal::compute::attention::visible;
use kvsmith::internal::compute::reference::dot;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{Budget, KvHead, KvType, Limits};
use kvsmith::internal::method::pqcache::{PqCache, PqCacheParams};
use kvsmith::internal::method::quest::{PAGE, Quest};
use kvsmith::internal::method::snapkv::{POOL, QUERIES, SnapKv};
use kvsmith::internal::method::{Place, Prompt, Reads, Retriever, Step};
use ndarray::{Array2, Array3, ArrayView1, Axis, s};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

struct Case {
    kv: KvHead,
    keys: Array2<f32>,
    queries: Array3<f32>,
}

impl Case {
    /// n keys and, for each, r queries.
    fn new(rng: &mut ChaCha8Rng, r: usize, n: usize, d: usize) -> Self {
        let keys = Array2::from_shape_simple_fn((n, d), || rng.gen_range(-1.0..1.0f32));
        let queries = Array3::from_shape_simple_fn((r, n, d), || rng.gen_range(-2.0..2.0f32));
        let mut kv = KvHead::new(KvType::F32, d, n, Center::Median);
        kv.extend(keys.view(), keys.view());
        Self { kv, keys, queries }
    }

    fn prefilled<R: Retriever>(&self, mut retriever: R) -> R {
        retriever.prefill(&Prompt {
            first: 0,
            k_pre: self.keys.view(),
            q_rope: self.queries.view(),
            keys: self.keys.view(),
            values: self.keys.view(),
            kv: &self.kv,
        });
        retriever
    }

    fn step<'a>(&'a self, t: usize, candidates: &std::ops::Range<usize>, budget: usize) -> Step<'a> {
        let q = self.queries.slice(s![.., t, ..]);
        Step {
            step: 0,
            visible: 0..self.keys.nrows(),
            candidates: candidates.clone(),
            budget,
            q_pre: q,
            q_rope: q,
            kv: &self.kv,
        }
    }

    fn select(
        &self,
        retriever: &mut dyn Retriever,
        t: usize,
        candidates: &std::ops::Range<usize>,
        budget: usize,
    ) -> Vec<u32> {
        retriever.select(&self.step(t, candidates, budget)).positions
    }
}

/// `chosen` must be the best of `items` by score, up to what f32 can tell apart.
#[track_caller]
fn best(chosen: &[usize], items: impl Iterator<Item = usize>, score: impl Fn(usize) -> f64, tolerance: f64) {
    let worst_chosen = chosen.iter().map(|i| score(*i)).fold(f64::INFINITY, f64::min);
    let best_left = items
        .filter(|i| !chosen.contains(i))
        .map(&score)
        .fold(f64::NEG_INFINITY, f64::max);
    assert!(
        worst_chosen >= best_left - tolerance,
        "{worst_chosen} {best_left}"
    );
}

#[test]
fn quest_takes_the_pages_with_the_largest_bounds() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for (n, r, d) in [(100, 1, 16), (333, 4, 64), (160, 5, 80)] {
        let case = Case::new(&mut rng, r, n, d);
        let mut quest = case.prefilled(Quest::default());
        for (candidates, budget) in [(4..n - 20, 40), (16..n - 33, 16), (5..n - 1, 15), (30..60, 17)] {
            let bound = |page: usize| -> f64 {
                let rows = case.keys.slice(s![page * PAGE..((page + 1) * PAGE).min(n), ..]);
                let of = |query: ArrayView1<f32>| -> f64 {
                    let channel = |(i, q): (usize, &f32)| {
                        let products = rows.column(i).mapv(|k| f64::from(*q) * f64::from(k));
                        products.fold(f64::NEG_INFINITY, |m, p| m.max(*p))
                    };
                    query.iter().enumerate().map(channel).sum()
                };
                (0..r).map(|a| of(case.queries.slice(s![a, n - 1, ..]))).sum()
            };
            let step = case.step(n - 1, &candidates, budget);
            let choice = quest.select(&step);
            let read = candidates.end.div_ceil(PAGE) - candidates.start / PAGE;
            let mut reads = Reads::new(1);
            quest.reads(&step, &choice, &mut reads);
            assert_eq!(reads.index_bytes, Some(read * 2 * d * 4));
            let selected = choice.positions;
            let mut pages: Vec<usize> = selected.iter().map(|p| *p as usize / PAGE).collect();
            pages.dedup();
            assert_eq!(pages.len(), budget / PAGE);
            let whole: Vec<u32> = candidates
                .clone()
                .filter(|p| pages.contains(&(p / PAGE)))
                .map(|p| p as u32)
                .collect();
            assert_eq!(
                selected, whole,
                "pages are taken whole, as far as they are candidates"
            );
            let all = candidates.start / PAGE..candidates.end.div_ceil(PAGE);
            best(&pages, all, bound, 1e-4);
            // A bound is above every score of its page.
            for page in pages {
                for row in case
                    .keys
                    .slice(s![page * PAGE..((page + 1) * PAGE).min(n), ..])
                    .rows()
                {
                    let score: f64 = (0..r)
                        .map(|a| dot(case.queries.slice(s![a, n - 1, ..]), row))
                        .sum();
                    assert!(score <= bound(page) + 1e-9);
                }
            }
        }
    }
}

#[test]
fn quest_pages_grow_with_the_cache() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let case = Case::new(&mut rng, 2, 90, 16);
    let mut at_once = case.prefilled(Quest::default());
    let mut grown = Quest::default();
    let mut kv = KvHead::new(KvType::F32, 16, 0, Center::Median);
    for row in case.keys.rows() {
        kv.extend(row.insert_axis(Axis(0)), row.insert_axis(Axis(0)));
        let n = kv.len();
        let q = case.queries.slice(s![.., 0, ..]);
        grown.select(&Step {
            step: 0,
            visible: 0..n,
            candidates: 0..n,
            budget: 1,
            q_pre: q,
            q_rope: q,
            kv: &kv,
        });
    }
    for t in 0..90 {
        let select = |quest: &mut Quest| case.select(quest, t, &(0..90), 32);
        assert_eq!(select(&mut at_once), select(&mut grown));
    }
}

#[test]
fn words_of_pqcache_are_those_of_the_prompt_without_its_sinks() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let (n, d, sinks) = (300, 16, 4);
    let mut case = Case::new(&mut rng, 2, n, d);
    let words = |case: &Case, layer: usize, seed: u64| -> Vec<Array2<f32>> {
        let place = Place {
            layer,
            kv_head: 1,
            group: 2,
            head_dim: d,
            limits: Limits {
                sinks,
                window: 8,
                ..Limits::new(Budget::Count(9))
            },
            kv: KvType::F32,
        };
        let head = case.prefilled(PqCache::new(&place, &PqCacheParams::default(), seed));
        head.words().map(|words| words.to_owned()).collect()
    };
    let usual = words(&case, 0, 1);
    assert_eq!(usual.len(), 2);
    assert!(usual.iter().all(|words| words.dim() == (64, 8)));
    assert_eq!(words(&case, 0, 1), usual);
    // Every head and every seed draws its own first words.
    assert_ne!(words(&case, 1, 1), usual);
    assert_ne!(words(&case, 0, 2), usual);
    case.keys.slice_mut(s![..sinks, ..]).fill(100.0);
    assert_eq!(words(&case, 0, 1), usual);
    case.keys.row_mut(sinks).fill(100.0);
    assert_ne!(words(&case, 0, 1), usual);
}

#[test]
fn snapkv_keeps_what_the_last_queries_attended() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for (n, r, d, window) in [(200, 2, 16, None), (90, 1, 64, Some(50)), (20, 3, 16, None)] {
        let case = Case::new(&mut rng, r, n, d);
        let mut votes = vec![0.0; n];
        for t in n.saturating_sub(QUERIES)..n {
            for a in 0..r {
                let seen = visible(t, window);
                let score =
                    |j: usize| dot(case.queries.slice(s![a, t, ..]), case.keys.row(j)) / (d as f64).sqrt();
                let sum: f64 = seen.clone().map(|j| score(j).exp()).sum();
                seen.for_each(|j| votes[j] += score(j).exp() / sum);
            }
        }
        let pooled = |i: usize| -> f64 {
            let half = (POOL / 2) as isize;
            let around = (i as isize - half..=i as isize + half).filter(|j| (0..n as isize).contains(j));
            around.map(|j| votes[j as usize]).sum::<f64>() / POOL as f64
        };
        let mut snapkv = case.prefilled(SnapKv::new(window));
        let candidates = 2..n - 5;
        let budget = n / 10;
        let first = case.select(&mut snapkv, n - 1, &candidates, budget);
        assert_eq!(first.len(), budget);
        let chosen: Vec<usize> = first.iter().map(|p| *p as usize).collect();
        best(&chosen, candidates.clone(), pooled, 1e-5);
        // Another query, later: the choice stands, but for what is not visible any more.
        let later = case.select(&mut snapkv, 0, &(6..n - 3), budget);
        let expected: Vec<u32> = first.into_iter().filter(|p| *p >= 6).collect();
        assert_eq!(later, expected);
    }
}
