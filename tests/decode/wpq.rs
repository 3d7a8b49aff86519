//! wpq on the GPU, along a few steps: its codes and tables against f64, its probabilities against f64 over these tables,
//! its choice against a sort of the probabilities and against the CPU's.

use std::rc::Rc;
use std::sync::Arc;

use half::f16;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::cuda::float::LayerRows;
use kvsmith::internal::kv::cuda::rows::CudaRows;
use kvsmith::internal::kv::packed::{Center, Layout, Packed};
use kvsmith::internal::kv::{Budget, KvHead, KvType};
use kvsmith::internal::method::wpq::cuda::{Quantisers, RefinedKeys, Sizes, Wpq, WpqWorkspace};
use kvsmith::internal::method::wpq::{HeadCodebook, MeanPath, Wpq as CpuWpq};
use kvsmith::internal::method::{Prompt, Retriever};
use ndarray::{Array1, Array2, Array3, Array4, ArrayView2};
use rand_chacha::ChaCha8Rng;

use super::cases::{self, Batch, Rows, UNIT, best, matrix, normal, normals, twice, upload};
use super::held::packed_layer;
use crate::common::{plain_rope, rotated_to};

/// Stages of a code.
const STAGES: usize = 2;
/// Keys that are encoded together with the first ones of a prompt: the others are a second chunk.
const SECOND_CHUNK: usize = 7;

#[derive(Clone)]
pub struct Special {
    groups: usize,
    words: usize,
    /// Whether codes describe only half of the principal directions.
    half: bool,
    /// Whether codes describe the keys around the path of their mean.
    path: bool,
    /// Whether the cache is in 2 bits.
    packed: bool,
}

pub type Case = cases::Case<Special>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, sizes, [groups, words]: [usize; 2], n, budget| {
        let special = Special {
            groups,
            words,
            half: false,
            path: false,
            packed: false,
        };
        let case = Case::new(name, sizes, n, 9, special);
        case.static_set(4, 64).budget(budget)
    };
    let share = Budget::Fraction;
    let usual = [8, 16];
    vec![
        case("llama", [1, 2, 4, 128], usual, 2600, share(0.06)),
        case("batch", [3, 1, 5, 64], usual, 700, share(0.1)).float(Float::F16),
        case("bf16", [1, 2, 4, 64], usual, 600, share(0.1)).float(Float::Bf16),
        case("d80", [1, 2, 1, 80], [4, 16], 500, share(0.2)),
        // Groups of three channels, some with an empty one.
        case("d20", [1, 1, 2, 20], usual, 300, share(0.1)),
        case("half", [2, 2, 4, 64], usual, 700, share(0.1)).with(|s| s.half = true),
        case("half_of_d20", [1, 1, 2, 20], usual, 300, share(0.1)).with(|s| s.half = true),
        case("full_group", [1, 1, 16, 96], usual, 400, share(0.05)),
        case("one_byte", [1, 2, 4, 64], [2, 16], 400, share(0.1)),
        case("words_256", [1, 2, 6, 64], [4, 256], 400, share(0.1)),
        case("words_256_d40", [2, 1, 4, 40], [4, 256], 300, share(0.1)),
        case("one_group", [1, 1, 2, 128], [1, 256], 200, share(0.1)),
        case("budget_1", [1, 2, 4, 64], usual, 400, share(1.0)),
        case("one_position", [1, 2, 8, 64], usual, 600, share(1e-6)),
        // All candidates are refined, and some chosen.
        case("all_refined", [2, 1, 4, 64], usual, 300, Budget::Count(80)),
        case("no_candidates", [1, 1, 4, 64], usual, 20, share(0.5)),
        case("ties", [1, 2, 4, 64], usual, 2300, share(0.1)).ties(),
        // All weight is left to a few positions.
        case("peaked", [1, 2, 4, 64], usual, 600, share(0.1)).scale(20.0),
        case("long_window", [1, 1, 2, 64], usual, 400, share(0.1)).static_set(3, 150),
        case("sliding", [2, 1, 4, 64], usual, 500, share(0.1)).model_window(300),
        case("path", [1, 2, 4, 64], usual, 700, share(0.1)).with(|s| s.path = true),
        case("path_of_a_batch", [3, 1, 5, 128], usual, 300, share(0.1)).with(|s| s.path = true),
        case("path_d20", [1, 2, 16, 20], [4, 256], 300, share(0.1)).with(|s| s.path = true),
        case("path_sliding", [2, 1, 4, 64], usual, 500, share(0.1))
            .model_window(300)
            .with(|s| s.path = true),
        case("packed", [2, 2, 4, 64], usual, 400, share(0.1)).with(|s| s.packed = true),
        case("packed_d40", [1, 1, 3, 40], usual, 300, share(0.1)).with(|s| s.packed = true),
    ]
}

/// A random quantiser with the tensors that it is made of; the last word of a group equals the second.
struct Quantiser {
    head: Arc<HeadCodebook>,
    /// `[2,m,words,dim]`.
    words: Array4<f64>,
    mean: Vec<f64>,
    /// The mean before rotation, if its path is subtracted.
    mean_pre: Option<Vec<f64>>,
    /// L V, and L^-T V rounded to half precision: `[d,d]`.
    key_map: Array2<f64>,
    query_map: Array2<f64>,
}

impl Quantiser {
    fn random(special: &Special, d: usize, rng: &mut ChaCha8Rng) -> Self {
        let Special {
            groups,
            words: size,
            half,
            ..
        } = *special;
        let directions = if half { d / 2 } else { d };
        let mut words = Array4::zeros((STAGES, groups, size, directions.div_ceil(groups)));
        for (stage, mut words) in words.outer_iter_mut().enumerate() {
            let factor = 1.0 / (1 + 2 * stage) as f32;
            words.mapv_inplace(|_: f32| f16::from_f32(factor * normal(rng)).to_f32());
            for mut group in words.outer_iter_mut() {
                let row = group.row(1).to_owned();
                group.row_mut(size - 1).assign(&row);
            }
        }
        let mean = Array1::from(normals(rng, d)) * 0.3;
        let chol = Array2::from_shape_fn((d, d), |(i, j)| match i.cmp(&j) {
            std::cmp::Ordering::Less => 0.0,
            std::cmp::Ordering::Equal => 1.0 + 0.2 * normal(rng).abs(),
            std::cmp::Ordering::Greater => 0.3 / (d as f32).sqrt() * normal(rng),
        });
        // A reflection.
        let axis = Array1::from(normals(rng, d));
        let square = axis.dot(&axis);
        let rotation = Array2::from_shape_fn((d, d), |(i, j)| {
            f32::from(u8::from(i == j)) - 2.0 * axis[i] * axis[j] / square
        });
        let (wide_chol, wide_rotation) = (chol.mapv(f64::from), rotation.mapv(f64::from));
        let mut head = HeadCodebook::new(words.view(), mean.view(), chol.view(), rotation.view()).unwrap();
        let mean_pre = special.path.then(|| normals(rng, d));
        if let Some(mean) = &mean_pre {
            head = head.around(MeanPath::new(Array1::from(mean.clone()), &plain_rope(d)));
        }
        Self {
            head: Arc::new(head),
            mean_pre: mean_pre.map(|mean| wide(&mean)),
            words: words.mapv(f64::from),
            mean: mean.iter().map(|v| f64::from(*v)).collect(),
            key_map: wide_chol.dot(&wide_rotation),
            query_map: solve_transposed(&wide_chol, wide_rotation).mapv(|v| f16::from_f64(v).to_f64()),
        }
    }

    /// The mean before rotation, rotated to a position, and how far each of its channels may be off in f32: most of that
    /// comes from rounded angles.
    fn path(&self, position: usize) -> (Vec<f64>, Vec<f64>) {
        let d = self.mean.len();
        let Some(mean) = &self.mean_pre else {
            return (vec![0.0; d], vec![0.0; d]);
        };
        rotated_to(mean, position)
    }

    /// The score of a query with the path at a position, and how far it may be off in f32.
    fn path_score(&self, query: &[f32], position: usize) -> (f64, f64) {
        let d = query.len() as f64;
        let scale = std::f64::consts::LOG2_E / d.sqrt();
        let (path, bounds) = self.path(position);
        let query = wide(query);
        let off: f64 = query.iter().zip(&bounds).map(|(q, bound)| q.abs() * bound).sum();
        let half = query.len() / 2;
        let length = |x: &[f64], pair: usize| x[pair].hypot(x[half + pair]);
        // No rotation of both changes this sum, which is at least that of the magnitudes of the products.
        let size: f64 = (0..half)
            .map(|pair| length(&query, pair) * length(&path, pair))
            .sum();
        // Each factor is the sum of two bf16 numbers but for 2^-18 of it, and the product of the two smaller ones, at most
        // 2^-18 of the product, is left out.
        let parts = 3.1 * (-18f64).exp2();
        (
            dot(&query, &path) * scale,
            (off + (parts + 4.0 * (d + 8.0) * UNIT) * size) * scale,
        )
    }

    /// The channels of group j: columns j, j + m, j + 2 m and so on; zero if there is none.
    fn group(&self, all: &[f64], j: usize) -> Vec<f64> {
        let (_, m, _, dim) = self.words.dim();
        (0..dim)
            .map(|i| all.get(j + i * m).copied().unwrap_or(0.0))
            .collect()
    }

    fn word(&self, stage: usize, group: usize, word: usize) -> Vec<f64> {
        self.words.slice(ndarray::s![stage, group, word, ..]).to_vec()
    }
}

/// L^-T V for a lower triangular L.
fn solve_transposed(chol: &Array2<f64>, mut v: Array2<f64>) -> Array2<f64> {
    let d = chol.nrows();
    for i in (0..d).rev() {
        for c in 0..d {
            let known: f64 = (i + 1..d).map(|j| chol[[j, i]] * v[[j, c]]).sum();
            v[[i, c]] = (v[[i, c]] - known) / chol[[i, i]];
        }
    }
    v
}

/// x map, and the sums of the magnitudes of its terms.
fn mapped(x: &[f64], map: &Array2<f64>) -> (Vec<f64>, Vec<f64>) {
    let column = |c: usize| {
        x.iter()
            .zip(map.column(c))
            .map(|(x, v)| x * v)
            .collect::<Vec<_>>()
    };
    let sums = |terms: Vec<f64>| {
        (
            terms.iter().sum::<f64>(),
            terms.iter().map(|t| t.abs()).sum::<f64>(),
        )
    };
    (0..map.ncols()).map(|c| sums(column(c))).unzip()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}

/// The numbers of a code's words, per stage and group.
fn numbers(
    codes: &[u8],
    sizes: Sizes,
    heads: usize,
    capacity: usize,
    at: usize,
    p: usize,
) -> Vec<Vec<usize>> {
    let width = sizes.width();
    let per_byte = sizes.groups / width;
    let number = |stage: usize, j: usize| {
        let byte = codes[((stage * heads + at) * capacity + p) * width + j / per_byte];
        usize::from(byte) >> (j % per_byte * 8 / per_byte) & (sizes.words - 1)
    };
    (0..STAGES)
        .map(|stage| (0..sizes.groups).map(|j| number(stage, j)).collect())
        .collect()
}

/// Each word is the nearest up to rounding, and the lowest of equals.
fn check_code(of: &Quantiser, key: &[f32], position: usize, code: &[Vec<usize>]) {
    let d = key.len() as f64;
    let (path, bounds) = of.path(position);
    let centered = key.iter().zip(&of.mean).zip(&path);
    let centered: Vec<f64> = centered.map(|((k, m), path)| f64::from(*k) - m - path).collect();
    let (z, sizes) = mapped(&centered, &of.key_map);
    let (_, of_path) = mapped(&bounds, &of.key_map);
    let off = sizes
        .iter()
        .zip(&of_path)
        .map(|(s, path)| (4.0 * (d + 8.0) * UNIT * s + path).powi(2))
        .sum::<f64>()
        .sqrt();
    let words = of.words.len_of(ndarray::Axis(2));
    for j in 0..code[0].len() {
        let mut left = of.group(&z, j);
        for (stage, code) in code.iter().enumerate() {
            let distances: Vec<f64> = (0..words)
                .map(|w| {
                    let word = of.word(stage, j, w);
                    left.iter().zip(&word).map(|(x, y)| (x - y).powi(2)).sum()
                })
                .collect();
            let least = distances.iter().copied().fold(f64::INFINITY, f64::min);
            let own = code[j];
            let size = dot(&left, &left) + 16.0 * left.len() as f64;
            let slack = 4.0 * off * (least.sqrt() + off) + 8.0 * (left.len() + 4) as f64 * UNIT * size;
            assert!(
                distances[own] <= least + slack,
                "stage {stage}, group {j}: {own} has {}, the nearest {least}",
                distances[own]
            );
            assert!(own != words - 1, "the lowest of equals");
            let word = of.word(stage, j, own);
            left.iter_mut().zip(word).for_each(|(x, y)| *x -= y);
        }
    }
}

/// The device's tables of a step, of every query head.
struct Tables {
    sizes: Sizes,
    group: usize,
    lines: Vec<f32>,
    entries: Vec<u32>,
}

impl Tables {
    /// The line of query head a of KV head `at`: the mean's score, then the least sum and the step of each stage.
    fn line(&self, at: usize, a: usize) -> Vec<f64> {
        wide(&self.lines[(at * self.group + a) * 5..][..5])
    }

    fn entry(&self, [at, a, stage, j, word]: [usize; 5]) -> f64 {
        let Sizes { groups, words, .. } = self.sizes;
        let quad = at * self.group.div_ceil(4) + a / 4;
        let i = (((quad * STAGES + stage) * groups + j) * words + word) * 4 + a % 4;
        match words {
            16 => f64::from(self.entries[i / 2] >> (16 * (i % 2)) & 0xffff),
            _ => f64::from(f32::from_bits(self.entries[i])),
        }
    }

    /// The score of a code's first stages and of the mean's path, and how far f32 may be off.
    fn estimate(&self, at: usize, a: usize, code: &[Vec<usize>], path: (f64, f64)) -> (f64, f64) {
        let line = self.line(at, a);
        let (mut score, mut size) = (line[0] + path.0, line[0].abs() + path.0.abs());
        for (stage, code) in code.iter().enumerate() {
            let entries = code.iter().enumerate();
            let entries: Vec<f64> = entries.map(|(j, w)| self.entry([at, a, stage, j, *w])).collect();
            let (least, step) = (line[1 + 2 * stage], line[2 + 2 * stage]);
            score += least + step * entries.iter().sum::<f64>();
            size += least.abs() + step * entries.iter().map(|e| e.abs()).sum::<f64>();
        }
        (score, (self.sizes.groups + 8) as f64 * 2.0 * UNIT * size + path.1)
    }

    /// Entries are the products of words and query: rounded, within half a step.
    fn check(&self, of: &Quantiser, at: usize, a: usize, query: &[f32]) {
        let d = query.len() as f64;
        let query: Vec<f64> = wide(query)
            .iter()
            .map(|q| q * std::f64::consts::LOG2_E / d.sqrt())
            .collect();
        let (y, y_sizes) = mapped(&query, &of.query_map);
        let unit = 4.0 * (d + 8.0) * UNIT;
        let line = self.line(at, a);
        let mean_size: f64 = query.iter().zip(&of.mean).map(|(q, m)| (q * m).abs()).sum();
        assert!(
            (line[0] - dot(&query, &of.mean)).abs() <= unit * mean_size,
            "the mean's score"
        );
        for stage in 0..STAGES {
            let group = |j: usize| {
                let (y, sizes) = (of.group(&y, j), of.group(&y_sizes, j));
                let of_word = |w: usize| {
                    let word = of.word(stage, j, w);
                    let size: f64 = word.iter().zip(&sizes).map(|(w, s)| w.abs() * s).sum();
                    (dot(&word, &y), unit * size)
                };
                (0..self.sizes.words).map(of_word).unzip()
            };
            let groups: Vec<(Vec<f64>, Vec<f64>)> = (0..self.sizes.groups).map(group).collect();
            let least = |x: &[f64]| x.iter().copied().fold(f64::INFINITY, f64::min);
            let most = |x: &[f64]| x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let off = groups.iter().map(|(_, bounds)| most(bounds)).fold(0.0, f64::max);
            let ranges = groups.iter().map(|(x, _)| most(x) - least(x));
            let (step, sum) = match self.sizes.words {
                16 => (
                    ranges.fold(0.0, f64::max) / 255.0,
                    groups.iter().map(|(x, _)| least(x)).sum(),
                ),
                _ => (1.0, 0.0),
            };
            let m = self.sizes.groups as f64;
            assert!(
                (line[2 + 2 * stage] - step).abs() <= off / 64.0 + 4.0 * UNIT * step,
                "the step"
            );
            assert!(
                (line[1 + 2 * stage] - sum).abs() <= 2.0 * m * off,
                "the least entries: {sum}"
            );
            for (j, (x, bounds)) in groups.iter().enumerate() {
                for (word, (x_of, bound)) in x.iter().zip(bounds).enumerate() {
                    let entry = self.entry([at, a, stage, j, word]);
                    let (exact, bound) = match self.sizes.words {
                        16 => ((x_of - least(x)) / step, 0.5 + 4.0 * off / step + 1e-4),
                        _ => (*x_of, *bound),
                    };
                    assert!(
                        (entry - exact).abs() <= bound,
                        "word {word} of group {j}: {entry}, exact {exact}"
                    );
                }
            }
        }
    }
}

/// The probabilities of one KV head's candidates, summed over its query heads, as far as f32 may have them.
struct Masses {
    /// By position from `first` on.
    first: usize,
    masses: Vec<f64>,
    relative: f64,
}

impl Masses {
    /// Exact scores of the static set per query head, and estimates of the candidates from `first` on, with their bounds;
    /// `removed` is the share of an earlier denominator in the new one that is subtracted again.
    fn new(fixed: &[Vec<(f64, f64)>], estimates: &[Vec<(f64, f64)>], first: usize, removed: &[f64]) -> Self {
        let (mut masses, mut relative) = (vec![0.0; estimates[0].len()], 0.0f64);
        for ((fixed, own), removed) in fixed.iter().zip(estimates).zip(removed) {
            let all = fixed.iter().chain(own);
            let delta = all.clone().map(|(_, bound)| *bound).fold(0.0, f64::max);
            let total = log_sum(all.map(|(score, _)| *score)).exp2();
            let n = (fixed.len() + own.len() + 64) as f64;
            relative = relative.max((2.0 * delta).exp_m1() + n * 2.0 * UNIT * (1.0 + removed));
            let weights = own.iter().map(|(score, _)| score.exp2() / total);
            masses
                .iter_mut()
                .zip(weights)
                .for_each(|(mass, weight)| *mass += weight);
        }
        assert!(relative < 0.1, "a bound that says nothing: {relative}");
        Self {
            first,
            masses,
            relative,
        }
    }

    fn mass(&self, p: usize) -> f64 {
        self.masses[p - self.first]
    }

    fn check(&self, p: usize, key: u32) {
        let (weight, exact) = (f64::from(f32::from_bits(key & 0x7fff_ffff)), self.mass(p));
        // Small numbers of f32 have a step of 2^-149.
        let bound = self.relative * exact + 0.5f64.powi(120);
        assert!(
            (weight - exact).abs() <= bound,
            "position {p}: {weight}, exact {exact}"
        );
    }
}

/// The logarithm of the sum of powers of two.
fn log_sum(scores: impl Iterator<Item = f64> + Clone) -> f64 {
    let top = scores.clone().fold(f64::NEG_INFINITY, f64::max);
    top + scores.map(|s| (s - top).exp2()).sum::<f64>().log2()
}

/// One KV head on the CPU.
struct Head {
    kv: KvHead,
    /// The rows of `kv` if they are in 2 bits.
    packed: Option<Packed>,
    index: CpuWpq,
    /// The keys as they were encoded.
    keys: Vec<f32>,
}

impl Head {
    fn prompt(case: &Case, of: Arc<HeadCodebook>, keys: ArrayView2<f32>, query: &[f32]) -> Self {
        let (n, d) = keys.dim();
        let layout = Layout::from(Center::Median);
        let packed = case.special.packed.then(|| {
            let mut packed = Packed::new(d, layout, n);
            packed.prompt(keys, keys, query, 0..n);
            packed
        });
        let mut kv = match packed {
            Some(_) => KvHead::new(KvType::TWO_BIT, d, n, layout),
            None => case.kv_head(),
        };
        kv.prompt(keys, keys, query, 0..n);
        let mut index = CpuWpq::new(of);
        let queries = Array3::zeros((case.shape.group, n, d));
        index.prefill(&Prompt {
            first: 0,
            k_pre: keys.view(),
            q_rope: queries.view(),
            keys: keys.view(),
            values: keys.view(),
            kv: &kv,
        });
        Self {
            kv,
            packed,
            index,
            keys: keys.iter().copied().collect(),
        }
    }

    fn append(&mut self, key: &[f32]) {
        let row = matrix(key, 0, [1, key.len()]);
        self.kv.extend(row, row);
        if let Some(packed) = &mut self.packed {
            packed.extend(row, row);
        }
        self.index.append(row, row);
        self.keys.extend(key);
    }

    /// The exact score of a query with a position of the cache, and how far f32 may be off.
    fn score(&self, query: &[f32], p: usize) -> (f64, f64) {
        let d = query.len();
        let key = wide(self.kv.keys().row(p, &mut vec![0.0; d]));
        let scale = std::f64::consts::LOG2_E / (d as f64).sqrt();
        let size: f64 = key
            .iter()
            .zip(query)
            .map(|(k, q)| (k * f64::from(*q)).abs())
            .sum();
        (
            dot(&key, &wide(query)) * scale,
            2.0 * (d as f64 + 8.0) * UNIT * size * scale,
        )
    }
}

/// The device's cache of all heads after a prompt.
fn cache_of<'d>(driver: &'d dyn Driver, case: &Case, heads: &[Head]) -> Box<dyn CudaRows + 'd> {
    if let Some(all) = heads
        .iter()
        .map(|head| head.packed.as_ref())
        .collect::<Option<Vec<&Packed>>>()
    {
        return Box::new(packed_layer(driver, case.shape, &all));
    }
    Box::new(LayerRows::new(driver, case.shape, case.float).unwrap())
}

/// Rows `range` of every head of keys `[b,g,n,d]`.
fn chunk(keys: &[f32], n: usize, d: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    let heads = keys.chunks(n * d);
    heads
        .flat_map(|head| head[range.start * d..range.end * d].to_vec())
        .collect()
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let ([b, g, r, d], shape, n) = (case.sizes(), case.shape, case.n);
    let quantisers: Vec<Quantiser> = (0..g)
        .map(|_| Quantiser::random(&case.special, d, &mut rng))
        .collect();
    let heads: Vec<&HeadCodebook> = quantisers.iter().map(|of| &*of.head).collect();
    let on_device = Quantisers::new(driver, &heads).unwrap();
    let sizes = on_device.sizes;
    let mut space = WpqWorkspace::new(driver, shape, &case.limits, sizes).unwrap();
    if case.special.path {
        // Only the rotation of this path counts.
        let path = MeanPath::new(Array1::zeros(d), &plain_rope(d));
        space = space.with_paths(&path).unwrap();
    }
    let space = Rc::new(space);
    let index = Wpq::new(driver, shape, &case.limits, on_device, Rc::clone(&space)).unwrap();
    let keys = Rows::new(&mut rng, case.ties, 30, d).draw(&mut rng, b * g * n);
    let lens: Vec<usize> = case.lens(5);
    let query = normals(&mut rng, d);
    let head = |at: usize| {
        let own = matrix(&keys, at, [n, d]);
        let own = own.slice(ndarray::s![..lens[at / g], ..]);
        Head::prompt(case, Arc::clone(&quantisers[at % g].head), own, &query)
    };
    let mut heads: Vec<Head> = (0..b * g).map(head).collect();
    let cache = cache_of(driver, case, &heads);
    let mut batch = Batch::new(driver, case);
    for range in [0..n - SECOND_CHUNK, n - SECOND_CHUNK..n] {
        batch.advance(range.len());
        let rows = upload(driver, &chunk(&keys, n, d, range.clone()));
        if !case.special.packed {
            cache.append(&rows, &rows, range.len(), &batch.positions).unwrap();
        }
        index.extend(&rows, range.len(), &batch.positions).unwrap();
    }
    batch.set(&lens);
    for step in 0..2 {
        batch.advance(1);
        let keys = normals(&mut rng, b * g * d);
        let rows = upload(driver, &keys);
        cache.append(&rows, &rows, 1, &batch.positions).unwrap();
        index.extend(&rows, 1, &batch.positions).unwrap();
        heads
            .iter_mut()
            .zip(keys.chunks(d))
            .for_each(|(head, key)| head.append(key));
        let mut queries = normals(&mut rng, b * g * r * d);
        queries.iter_mut().for_each(|q| *q *= case.scale);
        let uploaded = upload(driver, &queries);
        let (chosen, first_keys, refined) = twice(|| {
            let chosen = index.select(&uploaded, cache.as_ref(), &batch.positions).unwrap();
            (
                chosen.read().unwrap(),
                space.keys().unwrap(),
                space.refined().unwrap(),
            )
        });
        let (lines, entries) = space.tables().unwrap();
        let codes = index.codes.read().unwrap();
        let tables = Tables {
            sizes,
            group: r,
            lines,
            entries,
        };
        for (at, head) in heads.iter_mut().enumerate() {
            let found = Found {
                at,
                step,
                codes: (0..batch.lens[at / g])
                    .map(|p| numbers(&codes, sizes, b * g, shape.capacity, at, p))
                    .collect(),
                keys: &first_keys[at * shape.capacity..(at + 1) * shape.capacity],
                refined: &refined[at],
                chosen: &chosen[at],
            };
            let queries = &queries[at * r * d..(at + 1) * r * d];
            found.check(case, &batch, head, &quantisers[at % g], &tables, queries);
        }
    }
}

/// What the device found for one KV head in a step.
struct Found<'a> {
    at: usize,
    step: usize,
    /// Per position, stage and group.
    codes: Vec<Vec<Vec<usize>>>,
    /// Sort keys by the first stage.
    keys: &'a [u32],
    refined: &'a RefinedKeys,
    chosen: &'a [u32],
}

impl Found<'_> {
    fn check(
        &self,
        case: &Case,
        batch: &Batch<'_>,
        head: &mut Head,
        of: &Quantiser,
        tables: &Tables,
        queries: &[f32],
    ) {
        let (d, at) = (case.shape.head_dim, self.at);
        for (position, (code, key)) in self.codes.iter().zip(head.keys.chunks(d)).enumerate() {
            check_code(of, key, position, code);
        }
        for (a, query) in queries.chunks(d).enumerate() {
            tables.check(of, at, a, query);
        }
        let (set, budget) = batch.set_of(at);
        let candidates = set.candidates.clone();
        if candidates.is_empty() {
            assert!(self.chosen.is_empty(), "no candidates");
            return;
        }
        let fixed: Vec<Vec<(f64, f64)>> = queries
            .chunks(d)
            .map(|query| {
                let others = set.visible().filter(|p| !candidates.contains(p));
                others.map(|p| head.score(query, p)).collect()
            })
            .collect();
        let r = fixed.len();
        let path =
            |query| -> Vec<(f64, f64)> { candidates.clone().map(|p| of.path_score(query, p)).collect() };
        let paths: Vec<Vec<(f64, f64)>> = queries.chunks(d).map(path).collect();
        let estimates = |stages: &dyn Fn(usize) -> usize| -> Vec<Vec<(f64, f64)>> {
            let of = |a: usize| {
                let path = |p: usize| paths[a][p - candidates.start];
                let of = |p: usize| tables.estimate(at, a, &self.codes[p][..stages(p)], path(p));
                candidates.clone().map(of).collect()
            };
            (0..r).map(of).collect()
        };
        let by_first = estimates(&|_| 1);
        let first = Masses::new(&fixed, &by_first, candidates.start, &vec![0.0; r]);
        candidates.clone().for_each(|p| first.check(p, self.keys[p]));
        let RefinedKeys {
            positions: list,
            keys,
        } = self.refined;
        assert_eq!(
            *list,
            best(self.keys, candidates.clone(), 4 * budget),
            "refined, head {at}"
        );
        let is_refined = |p: usize| list.binary_search(&(p as u32)).is_ok();
        let both = estimates(&|p| if is_refined(p) { 2 } else { 1 });
        let removed: Vec<f64> = fixed
            .iter()
            .zip(&by_first)
            .zip(&both)
            .map(|((fixed, first), both)| {
                let total = |own: &[(f64, f64)]| log_sum(fixed.iter().chain(own).map(|(s, _)| *s));
                (total(first) - total(both)).exp2()
            })
            .collect();
        let masses = Masses::new(&fixed, &both, candidates.start, &removed);
        list.iter()
            .zip(keys)
            .for_each(|(p, key)| masses.check(*p as usize, *key));
        let expected = best(keys, 0..list.len(), budget).into_iter();
        let expected: Vec<u32> = expected.map(|i| list[i as usize]).collect();
        assert_eq!(self.chosen, expected, "head {at}");
        self.compare(case, batch, head, tables, queries, &masses);
    }

    /// The CPU chooses the same but for near ties: an entry of a table may be off by a step where it lies between two.
    fn compare(
        &self,
        case: &Case,
        batch: &Batch<'_>,
        head: &mut Head,
        tables: &Tables,
        queries: &[f32],
        masses: &Masses,
    ) {
        let (at, r) = (self.at, case.shape.group);
        let queries = matrix(queries, 0, [r, case.shape.head_dim]);
        let step = batch.step(at, self.step, queries, &head.kv);
        let mut theirs = head.index.select(&step).positions;
        theirs.sort_unstable();
        assert_eq!(theirs.len(), self.chosen.len());
        let only = |a: &[u32], b: &[u32]| -> Vec<usize> {
            let other = a.iter().filter(|p| b.binary_search(p).is_err());
            other.map(|p| *p as usize).collect()
        };
        let (ours, theirs) = (only(self.chosen, &theirs), only(&theirs, self.chosen));
        let steps = |a: usize| tables.line(at, a).into_iter().skip(2).step_by(2).sum::<f64>();
        let step = match tables.sizes.words {
            16 => (0..r).map(steps).fold(0.0, f64::max),
            _ => 0.0,
        };
        let slack = 2.0 * (masses.relative + step.exp2() - 1.0);
        for (a, b) in ours.iter().flat_map(|a| theirs.iter().map(move |b| (*a, *b))) {
            let (x, y) = (masses.mass(a), masses.mass(b));
            assert!((x - y).abs() <= slack * (x + y), "{a} for {b}: {x}, {y}");
        }
    }
}
