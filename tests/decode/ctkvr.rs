//! ctkvr on the GPU against the CPU's, over prompts and steps: what is chosen, how much is ranked, and the lists.

use std::rc::Rc;

use kvsmith::internal::compute::attention;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::kv::KvHead;
use kvsmith::internal::kv::cuda::float::LayerRows;
use kvsmith::internal::method::ctkvr::cuda::{Ctkvr, CtkvrWorkspace, Lists};
use kvsmith::internal::method::ctkvr::{self as cpu, Centroid, Choose, CtkvrParams};
use kvsmith::internal::method::cuda::OnDevice;
use kvsmith::internal::method::{Prompt, Retriever, Selection};
use ndarray::{Array2, ArrayView2, ArrayView3};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::cases::{self, Batch, Rows, matrix, upload};
use super::held::centroids;

#[derive(Clone)]
pub struct Special {
    params: CtkvrParams,
    /// Lengths of what is fed: prompts, each followed by steps.
    turns: Vec<[usize; 2]>,
}

pub type Case = cases::Case<Special>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, float, sizes, turns: &[[usize; 2]], budget| {
        let special = Special {
            params: CtkvrParams::default(),
            turns: turns.to_vec(),
        };
        let case = Case::new(name, sizes, turns.iter().flatten().sum(), 3, special);
        case.float(float).budget(budget)
    };
    let share = Budget::Fraction;
    let f32 = Float::F32;
    vec![
        case("llama", Float::Bf16, [1, 2, 4, 128], &[[700, 6]], share(0.06)),
        // The second sequence has its own ring.
        case("batch", Float::F16, [2, 1, 5, 64], &[[400, 7]], share(0.1)).with(|s| s.params.ct_update = 3),
        case("ties", f32, [1, 2, 2, 64], &[[400, 8]], share(0.05)).ties(),
        case("d80", f32, [1, 2, 1, 80], &[[300, 5]], share(0.1)),
        case("d40", Float::Bf16, [1, 1, 16, 40], &[[300, 5]], share(0.05)),
        case(
            "one_position",
            Float::F16,
            [1, 2, 8, 64],
            &[[300, 5]],
            share(1e-6),
        ),
        case("no_candidates", Float::F16, [1, 1, 4, 64], &[[14, 4]], share(0.5)),
        case("budget_1", f32, [1, 1, 4, 64], &[[200, 5]], share(1.0)),
        // The budget covers everything at first, then no longer; the lists are of both.
        case("grows", f32, [1, 2, 4, 64], &[[90, 30]], Budget::Count(84)),
        // Lists of several pieces, more centroids than a tile, positions of several blocks.
        case("long", Float::F16, [1, 1, 2, 64], &[[4300, 3]], share(0.12)).with(|s| {
            let p = &mut s.params;
            (p.ct_centroids, p.ct_probes) = (Some(270), 3);
        }),
        case("sliding", Float::Bf16, [2, 1, 4, 64], &[[400, 8]], share(0.1)).model_window(300),
        // More probes than centroids.
        case("few", f32, [1, 2, 4, 64], &[[300, 12]], share(0.1))
            .with(|s| (s.params.ct_centroids, s.params.ct_probes) = (Some(3), 50)),
        case("even", f32, [1, 1, 4, 64], &[[300, 3]], share(0.05))
            .with(|s| s.params.ct_choose = Choose::Even),
        case("fixed", f32, [1, 1, 4, 64], &[[300, 5]], share(0.05))
            .with(|s| (s.params.ct_update, s.params.ct_choose) = (0, Choose::Random)),
        // A short later prompt adds to the ring, a long one replaces it.
        case(
            "turns",
            f32,
            [1, 2, 2, 64],
            &[[250, 4], [3, 4], [200, 20]],
            share(0.05),
        ),
        case("kept", f32, [1, 1, 4, 64], &[[250, 4], [50, 4]], share(0.05)).with(|s| s.params.ct_keep = true),
    ]
}

/// The CPU's head, and the keys so far.
struct Head {
    retriever: cpu::Ctkvr,
    kv: KvHead,
    keys: Vec<f32>,
}

impl Head {
    /// New keys `[m,d]`.
    fn append(&mut self, keys: &[f32], d: usize) {
        let rows = matrix(keys, 0, [keys.len() / d, d]);
        self.kv.extend(rows, rows);
        self.keys.extend_from_slice(keys);
    }

    /// Queries `[r,m,d]`.
    fn prefill(&mut self, queries: &[f32], [r, m, d]: [usize; 3]) {
        let n = self.keys.len() / d;
        let keys = matrix(&self.keys, 0, [n, d]);
        self.retriever.prefill(&Prompt {
            first: n - m,
            k_pre: keys,
            q_rope: ArrayView3::from_shape((r, m, d), queries).unwrap(),
            keys,
            values: keys,
            kv: &self.kv,
        });
    }

    /// Step number `index` of KV head `at` with the queries `[r,d]`; and whether everything was chosen.
    fn step(
        &mut self,
        batch: &Batch,
        at: usize,
        index: usize,
        queries: ArrayView2<f32>,
    ) -> (Selection, bool) {
        let step = batch.step(at, index, queries.reborrow(), &self.kv);
        let selection = self.retriever.select(&step);
        let positions = batch.set_of(at).0.merge(&selection.positions);
        let mut out = Array2::zeros(queries.dim());
        let (weights, _) = attention::decode_with_weights(
            queries,
            self.kv.keys(),
            self.kv.values(),
            &positions,
            out.view_mut(),
        );
        if self.retriever.observes(&step) {
            self.retriever.observe(&step, &positions, weights.view());
        }
        (selection, step.is_exact())
    }
}

/// The device's centroids: their lists are the CPU's, and the newest has these queries `[r,d]`.
fn check_held(held: &[Centroid], head: &Head, newest: Option<&[f32]>, d: usize) {
    let lists: Vec<&[u32]> = held.iter().map(|c| &c.list[..]).collect();
    assert_eq!(lists, head.retriever.lists().collect::<Vec<_>>());
    let Some(queries) = newest else { return };
    let rows = held[held.len() - 1].queries.chunks(d);
    for (row, query) in rows.zip(queries.chunks(d)) {
        let length = query.iter().map(|q| f64::from(*q).powi(2)).sum::<f64>().sqrt();
        for (x, q) in row.iter().zip(query) {
            // Half a step of f16 and of f32 below 1, and f16's own least step.
            let (unit, bound) = (f64::from(*q) / length, 0.5f64.powi(12) + 0.5f64.powi(25));
            assert!((f64::from(x.to_f32()) - unit).abs() <= bound, "{x} {unit}");
        }
    }
}

/// What queries are scaled by. Weights of neighbouring ranks then differ by far more than the last bits in which the
/// exponentials of two devices do.
const SPREAD: f32 = 8.0;

/// What is fed, `[b,g,m,d]` keys and `[b,h,m,d]` queries.
struct Fed {
    keys: Vec<f32>,
    queries: Vec<f32>,
    m: usize,
}

impl Fed {
    fn new(rng: &mut ChaCha8Rng, case: &Case, m: usize) -> Self {
        let shape = &case.shape;
        let rows = Rows::new(&mut ChaCha8Rng::seed_from_u64(1), case.ties, 5, shape.head_dim);
        let keys = case.rounded(rows.draw(rng, shape.heads() * m));
        let mut queries = rows.draw(rng, shape.query_heads() * m);
        queries.iter_mut().for_each(|q| *q *= SPREAD);
        Self { keys, queries, m }
    }

    /// Rows `[heads,m,d]`: of each head those from `start` on.
    fn rows(&self, all: &[f32], d: usize, [start, count]: [usize; 2]) -> Vec<f32> {
        let heads = all.chunks(self.m * d);
        heads
            .flat_map(|rows| rows[start * d..][..count * d].to_vec())
            .collect()
    }
}

/// Both sides of a case.
struct Sides<'d> {
    driver: &'d dyn Driver,
    case: Case,
    rows: LayerRows<'d>,
    batch: Batch<'d>,
    /// Two layers, which are fed the same.
    layers: [Ctkvr<'d>; 2],
    heads: Vec<Head>,
}

impl<'d> Sides<'d> {
    fn new(driver: &'d dyn Driver, case: &Case) -> Self {
        let (shape, params) = (case.shape, &case.special.params);
        let head = |_| Head {
            retriever: cpu::Ctkvr::new(&case.place(0), params),
            kv: case.kv_head(),
            keys: Vec::new(),
        };
        let kv = case.kv();
        let space =
            Rc::new(CtkvrWorkspace::new(OnDevice { driver, shape, kv }, &case.limits, params).unwrap());
        let layer = || Ctkvr::new(driver, shape, &case.limits, Rc::clone(&space)).unwrap();
        Self {
            driver,
            case: case.clone(),
            rows: LayerRows::new(driver, shape, case.float).unwrap(),
            batch: Batch::new(driver, case),
            layers: [layer(), layer()],
            heads: (0..shape.heads()).map(head).collect(),
        }
    }

    fn append(&mut self, fed: &Fed, part: [usize; 2]) {
        let d = self.case.shape.head_dim;
        let keys = fed.rows(&fed.keys, d, part);
        self.batch.append(&self.rows, &keys, &keys);
        for (head, keys) in self.heads.iter_mut().zip(keys.chunks(part[1] * d)) {
            head.append(keys, d);
        }
    }

    /// A prompt in two parts.
    fn prompt(&mut self, fed: &Fed) {
        let ([b, _, r, d], m) = (self.case.sizes(), fed.m);
        let first = self.batch.lens[0];
        let lists: Vec<Lists<'_>> = (0..b)
            .map(|s| Lists::new(&self.layers[0], s, first..first + m).unwrap())
            .collect();
        let cut = m * 2 / 3;
        for part in [[0, cut], [cut, m - cut]] {
            self.append(fed, part);
            let queries = fed.rows(&fed.queries, d, part);
            for (lists, queries) in lists.iter().zip(queries.chunks(queries.len() / b)) {
                let queries = upload(self.driver, queries);
                for layer in &self.layers {
                    layer
                        .extend(&queries, part[1], &self.rows, &self.batch.positions, lists)
                        .unwrap();
                }
            }
        }
        for (lists, layer) in lists.iter().flat_map(|l| self.layers.iter().map(move |x| (l, x))) {
            layer.end_of_prompt(lists).unwrap();
        }
        for (head, queries) in self.heads.iter_mut().zip(fed.queries.chunks(r * m * d)) {
            head.prefill(queries, [r, m, d]);
        }
    }

    /// Whether more was ranked than chosen.
    fn step(&mut self, fed: &Fed, step: usize) -> bool {
        self.append(fed, [0, 1]);
        let queries = upload(self.driver, &fed.queries);
        let [_, _, r, d] = self.case.sizes();
        let chosen = self.layers.each_ref().map(|layer| {
            let chosen = layer.select(&queries, &self.rows, &self.batch.positions).unwrap();
            (
                chosen.read().unwrap(),
                chosen.ranked.as_ref().unwrap().read().unwrap(),
            )
        });
        assert_eq!(chosen[0], chosen[1], "the same twice");
        let (positions, ranked) = &chosen[0];
        let mut is_sparse = false;
        for (at, head) in self.heads.iter_mut().enumerate() {
            let queries = matrix(&fed.queries, at, [r, d]);
            let (selection, exact) = head.step(&self.batch, at, step, queries);
            assert_eq!(positions[at], selection.positions, "step {step}, head {at}");
            let expected = if exact {
                0
            } else {
                selection.ranked.len() + selection.positions.len()
            };
            assert_eq!(ranked[at] as usize, expected, "step {step}, head {at}");
            assert_eq!(selection.products, r * expected, "step {step}, head {at}");
            is_sparse |= !selection.ranked.is_empty();
        }
        is_sparse
    }

    fn check(&self, newest: Option<&Fed>) {
        let [_, _, r, d] = self.case.sizes();
        let held = self
            .layers
            .each_ref()
            .map(|layer| centroids(layer, self.case.shape));
        assert_eq!(held[0], held[1], "the same twice");
        for (at, (held, head)) in held[0].iter().zip(&self.heads).enumerate() {
            let newest = newest.map(|fed| &fed.queries[at * r * d..][..r * d]);
            check_held(held, head, newest, d);
        }
    }
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64(case.n as u64 + 3);
    let mut sides = Sides::new(driver, case);
    let every = case.special.params.ct_update;
    let (mut step, mut sparse) = (0, 0);
    for [prompt, steps] in &case.special.turns {
        sides.prompt(&Fed::new(&mut rng, case, *prompt));
        sides.check(None);
        for _ in 0..*steps {
            let fed = Fed::new(&mut rng, case, 1);
            sparse += usize::from(sides.step(&fed, step));
            let is_update = every > 0 && step % every == 0;
            sides.check(is_update.then_some(&fed));
            step += 1;
        }
    }
    let covered = ["no_candidates", "budget_1"].contains(&&case.name[..]);
    assert_eq!(sparse == 0, covered, "{sparse} of {step} steps rank");
}
