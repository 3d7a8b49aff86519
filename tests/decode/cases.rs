//! What the cases of all files are built from: sizes, limits and seeds, and a batch of sequences with its rows, queries
//! and positions.

use std::ops::Range;

use half::{bf16, f16};
pub use kvsmith::internal::compute::comparison::UNIT;
use kvsmith::internal::compute::cuda::buffer::Buffer;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::cuda::rows::CudaRows;
use kvsmith::internal::kv::cuda::{Positions, Shape};
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{Budget, KvHead, KvType, Limits, StaticSet};
use kvsmith::internal::method::{Place, Step};
use ndarray::ArrayView2;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub use super::common::random::{normal, normals};
use super::gpus::Check;

/// Sizes of a layer and of what is asked of it, with what only the cases of one file have.
#[derive(Clone)]
pub struct Case<S = ()> {
    pub name: String,
    pub shape: Shape,
    /// Positions of the first sequence; later sequences may have fewer.
    pub n: usize,
    /// Type of the cached rows.
    pub float: Float,
    pub limits: Limits,
    /// Rows are copies of a few, so that scores tie.
    pub ties: bool,
    /// Factor on keys or queries; large ones leave all weight to a few positions.
    pub scale: f32,
    pub special: S,
}

impl<S> Case<S> {
    /// Sequences, KV heads, query heads of a group and channels, with `n` positions and room for some more; f32, a few
    /// sinks and a short window.
    pub fn new(name: impl Into<String>, sizes: [usize; 4], n: usize, room: usize, special: S) -> Self {
        let [sequences, kv_heads, group, head_dim] = sizes;
        let shape = Shape {
            sequences,
            kv_heads,
            group,
            head_dim,
            capacity: n + room,
        };
        Self {
            name: name.into(),
            shape: shape.checked().unwrap(),
            n,
            float: Float::F32,
            limits: Limits {
                sinks: 4,
                window: 16,
                model_window: None,
                budget: Budget::Count(5),
            },
            ties: false,
            scale: 1.0,
            special,
        }
    }

    pub fn float(self, float: Float) -> Self {
        Self { float, ..self }
    }

    pub fn budget(mut self, budget: Budget) -> Self {
        self.limits.budget = budget;
        self
    }

    /// What is always attended.
    pub fn static_set(mut self, sinks: usize, window: usize) -> Self {
        (self.limits.sinks, self.limits.window) = (sinks, window);
        self
    }

    pub fn model_window(mut self, positions: usize) -> Self {
        self.limits.model_window = Some(positions);
        self
    }

    pub fn ties(self) -> Self {
        Self { ties: true, ..self }
    }

    pub fn scale(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    pub fn with(mut self, change: impl FnOnce(&mut S)) -> Self {
        change(&mut self.special);
        self
    }

    /// Random numbers of its own.
    pub fn rng(&self) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(self.n as u64)
    }

    /// Positions of every sequence, each with `fewer` than the one before it.
    pub fn lens(&self, fewer: usize) -> Vec<usize> {
        (0..self.shape.sequences).map(|s| self.n - fewer * s).collect()
    }

    /// Sequences, KV heads, query heads of a group and channels.
    pub fn sizes(&self) -> [usize; 4] {
        let shape = &self.shape;
        [shape.sequences, shape.kv_heads, shape.group, shape.head_dim]
    }

    /// The type of the cache on the CPU.
    pub fn kv(&self) -> KvType {
        match self.float {
            Float::F32 => KvType::F32,
            Float::F16 => KvType::F16,
            Float::Bf16 => KvType::BF16,
        }
    }

    /// An empty cache of one KV head on the CPU.
    pub fn kv_head(&self) -> KvHead {
        KvHead::new(
            self.kv(),
            self.shape.head_dim,
            self.shape.capacity,
            Center::Median,
        )
    }

    /// Where the CPU's method for KV head `at` of all sequences stands.
    pub fn place(&self, at: usize) -> Place {
        Place {
            layer: 0,
            kv_head: at % self.shape.kv_heads,
            group: self.shape.group,
            head_dim: self.shape.head_dim,
            limits: self.limits,
            kv: self.kv(),
        }
    }

    /// Values as the cache rounds them.
    pub fn rounded(&self, values: Vec<f32>) -> Vec<f32> {
        values.into_iter().map(|v| round(self.float, v)).collect()
    }
}

/// Sizes in the name of a case.
pub fn sizes_name(float: Float, [b, g, r, d]: [usize; 4]) -> String {
    format!("{float:?}::b{b}_g{g}_r{r}_d{d}").to_lowercase()
}

pub fn round(float: Float, x: f32) -> f32 {
    match float {
        Float::F32 => x,
        Float::F16 => f16::from_f32(x).to_f32(),
        Float::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Random rows of so many channels, or copies of a few of them.
pub struct Rows {
    few: Option<Vec<f32>>,
    d: usize,
}

impl Rows {
    /// Copies of `few` random rows where there are to be ties.
    pub fn new(rng: &mut ChaCha8Rng, ties: bool, few: usize, d: usize) -> Self {
        let few = normals(rng, few * d);
        Self {
            few: ties.then_some(few),
            d,
        }
    }

    pub fn draw(&self, rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
        let Some(few) = &self.few else {
            return normals(rng, n * self.d);
        };
        let copy = |_| few[rng.r#gen::<usize>() % (few.len() / self.d) * self.d..][..self.d].to_vec();
        (0..n).flat_map(copy).collect()
    }
}

/// Matrix `at` of `[..,rows,columns]`.
pub fn matrix(values: &[f32], at: usize, [rows, columns]: [usize; 2]) -> ArrayView2<'_, f32> {
    let size = rows * columns;
    ArrayView2::from_shape((rows, columns), &values[at * size..(at + 1) * size]).unwrap()
}

/// At most `count` of the positions, ascending.
pub fn some_of(rng: &mut ChaCha8Rng, positions: Range<usize>, count: usize) -> Vec<u32> {
    let mut all: Vec<u32> = positions.map(|p| p as u32).collect();
    all.shuffle(rng);
    all.truncate(count);
    all.sort_unstable();
    all
}

/// The `count` candidates of the largest keys, the lower position of two equals, ascending.
pub fn best(keys: &[u32], candidates: Range<usize>, count: usize) -> Vec<u32> {
    let mut order: Vec<usize> = candidates.collect();
    order.sort_by(|a, b| keys[*b].cmp(&keys[*a]).then(a.cmp(b)));
    order.truncate(count);
    order.sort_unstable();
    order.into_iter().map(|p| p as u32).collect()
}

/// What `run` gives, twice the same.
#[track_caller]
pub fn twice<T: PartialEq + std::fmt::Debug>(run: impl Fn() -> T) -> T {
    let found = run();
    assert_eq!(found, run(), "the same twice");
    found
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

pub fn upload<'d>(driver: &'d dyn Driver, values: &[f32]) -> Buffer<'d, f32> {
    Buffer::from_slice(driver, "rows", values).unwrap()
}

/// Sequences of a layer: their lengths on the device, and counted here from what the test does to them.
pub struct Batch<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    limits: Limits,
    pub positions: Positions<'d>,
    pub lens: Vec<usize>,
}

impl<'d> Batch<'d> {
    /// Empty sequences.
    pub fn new<S>(driver: &'d dyn Driver, case: &Case<S>) -> Self {
        Self {
            driver,
            shape: case.shape,
            limits: case.limits,
            positions: Positions::new(driver, case.shape, case.limits).unwrap(),
            lens: vec![0; case.shape.sequences],
        }
    }

    /// Takes the sequences to be this long.
    pub fn set(&mut self, lens: &[usize]) {
        let all: Vec<u32> = lens.iter().map(|n| *n as u32).collect();
        self.positions.set(&all).unwrap();
        self.lens = lens.to_vec();
    }

    /// Begins a step of so many tokens.
    pub fn advance(&mut self, tokens: usize) {
        self.positions.advance(tokens).unwrap();
        self.lens.iter_mut().for_each(|n| *n += tokens);
    }

    /// Begins a step with the keys and values `[b,g,m,d]` of its tokens.
    pub fn append(&mut self, cache: &dyn CudaRows, keys: &[f32], values: &[f32]) {
        let m = keys.len() / self.shape.heads() / self.shape.head_dim;
        self.advance(m);
        let (keys, values) = (upload(self.driver, keys), upload(self.driver, values));
        cache.append(&keys, &values, m, &self.positions).unwrap();
    }

    /// What the last token of KV head `at` of all sequences always attends, and how much it may choose besides.
    pub fn set_of(&self, at: usize) -> (StaticSet, usize) {
        let limits = &self.limits;
        let t = self.lens[at / self.shape.kv_heads] - 1;
        let set = StaticSet::at(t, limits.model_window, limits.sinks, limits.window);
        let budget = limits.budget.positions(set.visible().len());
        (set, budget)
    }

    /// All positions that KV head `at` attends with these chosen; without any chosen, all that are visible.
    pub fn attended(&self, at: usize, chosen: Option<&[u32]>) -> Vec<usize> {
        let (set, _) = self.set_of(at);
        let visible = set.visible();
        let Some(chosen) = chosen else {
            return visible.collect();
        };
        let chosen = chosen.iter().map(|p| *p as usize);
        let sinks = visible.start..set.candidates.start;
        sinks
            .chain(chosen)
            .chain(set.candidates.end..visible.end)
            .collect()
    }

    /// The step of the CPU's method for KV head `at`, with the queries of its group.
    pub fn step<'a>(&self, at: usize, step: usize, queries: ArrayView2<'a, f32>, kv: &'a KvHead) -> Step<'a> {
        let (set, budget) = self.set_of(at);
        Step {
            step,
            visible: set.visible(),
            candidates: set.candidates,
            budget,
            q_pre: queries,
            q_rope: queries,
            kv,
        }
    }
}

/// A static set as the device has it: first visible position, number of sinks, first of the window, end.
pub fn span(set: &StaticSet) -> [u32; 4] {
    let (visible, candidates) = (set.visible(), &set.candidates);
    let sinks = candidates.start - visible.start;
    [visible.start, sinks, candidates.end, visible.end].map(|x| x as u32)
}

/// A case of a file, or of another kind.
pub trait Named {
    fn name(&self) -> &str;
}

impl<S> Named for Case<S> {
    fn name(&self) -> &str {
        &self.name
    }
}

/// A check of each case, named after the file and the case.
pub fn trials<C: Named + Send + 'static>(
    file: &str,
    cases: Vec<C>,
    check: fn(&dyn Driver, &C),
) -> Vec<(String, Check)> {
    let trial = |case: C| {
        let name = format!("{file}::{}", case.name());
        let run: Check = Box::new(move |driver| check(driver, &case));
        (name, run)
    };
    cases.into_iter().map(trial).collect()
}
