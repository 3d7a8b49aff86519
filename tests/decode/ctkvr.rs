//! ctkvr on the GPU against the CPU's, over prompts and steps: what is chosen, how much is ranked, and the lists.

use std::rc::Rc;

use half::{bf16, f16};
use kvsmith::compute::attention;
use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::float::Float;
use kvsmith::kv::Budget;
use kvsmith::kv::StaticSet;
use kvsmith::kv::cuda::attend::LayerRows;
use kvsmith::kv::cuda::{Limits, Positions, Shape};
use kvsmith::kv::packed::Center;
use kvsmith::kv::{KvHead, KvType};
use kvsmith::method::ctkvr::cuda::{Centroid, Ctkvr, Lists, Space};
use kvsmith::method::ctkvr::{self as cpu, Choose, Params};
use kvsmith::method::{Choice, Place, Prompt, Retriever, Step};
use ndarray::{Array2, ArrayView2, ArrayView3};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::normals;

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub float: Float,
    pub shape: Shape,
    pub limits: Limits,
    pub params: Params,
    /// Every query and every key from a few: equal cosines and weights.
    pub ties: bool,
    /// Lengths of what is fed: prompts, each followed by steps.
    pub turns: Vec<[usize; 2]>,
}

pub fn cases() -> Vec<Case> {
    let case = |name, float, [b, g, r, d]: [usize; 4], turns: &[[usize; 2]], budget| Case {
        name,
        float,
        shape: Shape {
            sequences: b,
            kv_heads: g,
            group: r,
            head_dim: d,
            capacity: turns.iter().flatten().sum::<usize>() + 3,
        },
        limits: Limits {
            sinks: 4,
            window: 16,
            model_window: None,
            budget,
        },
        params: Params::default(),
        ties: false,
        turns: turns.to_vec(),
    };
    let share = Budget::Fraction;
    let with = |mut case: Case, change: &dyn Fn(&mut Params)| {
        change(&mut case.params);
        case
    };
    vec![
        case("llama", Float::Bf16, [1, 2, 4, 128], &[[700, 6]], share(0.06)),
        // The second sequence has its own ring.
        with(
            case("batch", Float::F16, [2, 1, 5, 64], &[[400, 7]], share(0.1)),
            &|p| p.ct_update = 3,
        ),
        Case {
            ties: true,
            ..case("ties", Float::F32, [1, 2, 2, 64], &[[400, 8]], share(0.05))
        },
        case("d80", Float::F32, [1, 2, 1, 80], &[[300, 5]], share(0.1)),
        case("d40", Float::Bf16, [1, 1, 16, 40], &[[300, 5]], share(0.05)),
        case(
            "one_position",
            Float::F16,
            [1, 2, 8, 64],
            &[[300, 5]],
            share(1e-6),
        ),
        case("no_candidates", Float::F16, [1, 1, 4, 64], &[[14, 4]], share(0.5)),
        case("budget_1", Float::F32, [1, 1, 4, 64], &[[200, 5]], share(1.0)),
        // The budget covers everything at first, then no longer; the lists are of both.
        case("grows", Float::F32, [1, 2, 4, 64], &[[90, 30]], Budget::Count(84)),
        // Lists of several pieces, more centroids than a tile, positions of several blocks.
        with(
            case("long", Float::F16, [1, 1, 2, 64], &[[4300, 3]], share(0.12)),
            &|p| (p.ct_centroids, p.ct_cap, p.ct_probes) = (Some(270), 1.0, 3),
        ),
        {
            let mut sliding = case("sliding", Float::Bf16, [2, 1, 4, 64], &[[400, 8]], share(0.1));
            sliding.limits.model_window = Some(300);
            sliding
        },
        // More probes than centroids.
        with(
            case("few", Float::F32, [1, 2, 4, 64], &[[300, 12]], share(0.1)),
            &|p| (p.ct_centroids, p.ct_probes) = (Some(3), 50),
        ),
        with(
            case("even", Float::F32, [1, 1, 4, 64], &[[300, 3]], share(0.05)),
            &|p| p.ct_choose = Choose::Even,
        ),
        with(
            case("fixed", Float::F32, [1, 1, 4, 64], &[[300, 5]], share(0.05)),
            &|p| (p.ct_update, p.ct_choose) = (0, Choose::Random),
        ),
        // A short later prompt adds to the ring, a long one replaces it.
        case(
            "turns",
            Float::F32,
            [1, 2, 2, 64],
            &[[250, 4], [3, 4], [200, 20]],
            share(0.05),
        ),
        with(
            case(
                "kept",
                Float::F32,
                [1, 1, 4, 64],
                &[[250, 4], [50, 4]],
                share(0.05),
            ),
            &|p| p.ct_keep = true,
        ),
    ]
}

fn stored(float: Float, x: f32) -> f32 {
    match float {
        Float::F32 => x,
        Float::F16 => f16::from_f32(x).to_f32(),
        Float::Bf16 => bf16::from_f32(x).to_f32(),
    }
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
        let rows = ArrayView2::from_shape((keys.len() / d, d), keys).unwrap();
        self.kv.extend(rows, rows);
        self.keys.extend_from_slice(keys);
    }

    /// Queries `[r,m,d]`.
    fn prefill(&mut self, queries: &[f32], [r, m, d]: [usize; 3]) {
        let n = self.keys.len() / d;
        let keys = ArrayView2::from_shape((n, d), &self.keys).unwrap();
        self.retriever.prefill(&Prompt {
            first: n - m,
            k_pre: keys,
            q_rope: ArrayView3::from_shape((r, m, d), queries).unwrap(),
            keys,
            values: keys,
            kv: &self.kv,
        });
    }

    /// Step number `step` of the queries `[r,d]`; and how much was ranked.
    fn step(&mut self, queries: &[f32], step: usize, d: usize, limits: &Limits) -> (Choice, bool) {
        let n = self.keys.len() / d;
        let set = StaticSet::at(n - 1, limits.model_window, limits.sinks, limits.window);
        let queries = ArrayView2::from_shape((queries.len() / d, d), queries).unwrap();
        let step = Step {
            step,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: limits.budget.positions(set.visible().len()),
            q_pre: queries,
            q_rope: queries,
            kv: &self.kv,
        };
        let choice = self.retriever.select(&step);
        let positions = set.merge(&choice.positions);
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
        (choice, step.is_exact())
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
        let (shape, d, float) = (&case.shape, case.shape.head_dim, case.float);
        let few = normals(&mut ChaCha8Rng::seed_from_u64(1), 5 * d);
        let mut rows = |n: usize| match case.ties {
            true => (0..n)
                .flat_map(|_| few[rng.r#gen::<usize>() % 5 * d..][..d].to_vec())
                .collect(),
            false => normals(rng, n * d),
        };
        let (keys, queries) = (rows(shape.heads() * m), rows(shape.query_heads() * m));
        Self {
            keys: keys.into_iter().map(|k| stored(float, k)).collect(),
            queries: queries.into_iter().map(|q| q * SPREAD).collect(),
            m,
        }
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
    shape: Shape,
    limits: Limits,
    rows: LayerRows<'d>,
    positions: Positions<'d>,
    /// Two layers, which are fed the same.
    layers: [Ctkvr<'d>; 2],
    heads: Vec<Head>,
}

impl<'d> Sides<'d> {
    fn new(driver: &'d dyn Driver, case: &Case) -> Self {
        let shape = case.shape.checked().unwrap();
        let kv = match case.float {
            Float::F32 => KvType::F32,
            Float::F16 => KvType::F16,
            Float::Bf16 => KvType::Bf16,
        };
        let limits = case.limits;
        let place = Place {
            layer: 0,
            kv_head: 0,
            group: shape.group,
            head_dim: shape.head_dim,
            model_window: limits.model_window,
            sinks: limits.sinks,
            window: limits.window,
            budget: limits.budget,
            kv,
        };
        let head = |_| Head {
            retriever: cpu::Ctkvr::new(&place, &case.params),
            kv: KvHead::new(kv, shape.head_dim, shape.capacity, Center::Median),
            keys: Vec::new(),
        };
        let space = Rc::new(Space::new(driver, shape, &limits, &case.params, kv).unwrap());
        let layer = || Ctkvr::new(driver, shape, &limits, Rc::clone(&space)).unwrap();
        Self {
            driver,
            shape,
            limits,
            rows: LayerRows::new(driver, shape, case.float).unwrap(),
            positions: Positions::new(driver, shape, limits).unwrap(),
            layers: [layer(), layer()],
            heads: (0..shape.heads()).map(head).collect(),
        }
    }

    fn append(&mut self, fed: &Fed, part: [usize; 2]) {
        let d = self.shape.head_dim;
        let keys = fed.rows(&fed.keys, d, part);
        let uploaded = Buffer::of(self.driver, "rows", &keys).unwrap();
        self.positions.advance(part[1]).unwrap();
        self.rows
            .append(&uploaded, &uploaded, part[1], &self.positions)
            .unwrap();
        for (head, keys) in self.heads.iter_mut().zip(keys.chunks(part[1] * d)) {
            head.append(keys, d);
        }
    }

    /// A prompt in two parts.
    fn prompt(&mut self, fed: &Fed) {
        let (b, m, d) = (self.shape.sequences, fed.m, self.shape.head_dim);
        let first = self.positions.longest();
        let lists: Vec<Lists<'_>> = (0..b)
            .map(|s| Lists::new(self.driver, &self.layers[0], s, first..first + m).unwrap())
            .collect();
        let cut = m * 2 / 3;
        for part in [[0, cut], [cut, m - cut]] {
            self.append(fed, part);
            let queries = fed.rows(&fed.queries, d, part);
            for (lists, queries) in lists.iter().zip(queries.chunks(queries.len() / b)) {
                let queries = Buffer::of(self.driver, "queries", queries).unwrap();
                for layer in &self.layers {
                    layer
                        .extend(&queries, part[1], &self.rows, &self.positions, lists)
                        .unwrap();
                }
            }
        }
        for (lists, layer) in lists.iter().flat_map(|l| self.layers.iter().map(move |x| (l, x))) {
            layer.end_of_prompt(lists).unwrap();
        }
        let group = self.shape.group * m * d;
        for (head, queries) in self.heads.iter_mut().zip(fed.queries.chunks(group)) {
            head.prefill(queries, [self.shape.group, m, d]);
        }
    }

    /// Whether more was ranked than chosen.
    fn step(&mut self, fed: &Fed, step: usize) -> bool {
        self.append(fed, [0, 1]);
        let queries = Buffer::of(self.driver, "queries", &fed.queries).unwrap();
        let (r, d) = (self.shape.group, self.shape.head_dim);
        let chosen = self.layers.each_ref().map(|layer| {
            let chosen = layer.select(&queries, &self.rows, &self.positions).unwrap();
            (chosen.read().unwrap(), chosen.ranked().unwrap().unwrap())
        });
        assert_eq!(chosen[0], chosen[1], "the same twice");
        let (positions, ranked) = &chosen[0];
        let mut is_sparse = false;
        for (at, head) in self.heads.iter_mut().enumerate() {
            let queries = &fed.queries[at * r * d..][..r * d];
            let (choice, exact) = head.step(queries, step, d, &self.limits);
            assert_eq!(positions[at], choice.positions, "step {step}, head {at}");
            let expected = match exact {
                true => 0,
                false => choice.ranked_rows + choice.positions.len(),
            };
            assert_eq!(ranked[at] as usize, expected, "step {step}, head {at}");
            assert_eq!(choice.products, r * expected, "step {step}, head {at}");
            is_sparse |= choice.ranked_rows > 0;
        }
        is_sparse
    }

    fn check(&self, newest: Option<&Fed>) {
        let (r, d) = (self.shape.group, self.shape.head_dim);
        let held = self.layers.each_ref().map(|layer| layer.held().unwrap());
        assert_eq!(held[0], held[1], "the same twice");
        for (at, (held, head)) in held[0].iter().zip(&self.heads).enumerate() {
            let newest = newest.map(|fed| &fed.queries[at * r * d..][..r * d]);
            check_held(held, head, newest, d);
        }
    }
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64(case.shape.capacity as u64);
    let mut sides = Sides::new(driver, case);
    let every = case.params.ct_update;
    let (mut step, mut sparse) = (0, 0);
    for [prompt, steps] in &case.turns {
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
    let covered = ["no_candidates", "budget_1"].contains(&case.name);
    assert_eq!(sparse == 0, covered, "{sparse} of {step} steps rank");
}
