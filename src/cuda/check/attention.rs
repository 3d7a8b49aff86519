//! Attention of decode steps and of prompts, for every type of rows and every head dimension that has a kernel.

use ndarray::Array2;
use rand::seq::SliceRandom;

use super::case::{Case, matrix, normals, rng, rounded, upload, within};
use crate::compute::attention::{self, visible};
use crate::compute::comparison::Comparison;
use crate::compute::cuda::driver::Driver;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::bounds::{self, Pair, Precision};
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::prefill::{self, Piece};
use crate::kv::cuda::rows::CudaRows;
use crate::kv::cuda::{CudaSelection, Positions, Shape};
use crate::kv::packed::Center;
use crate::kv::{Budget, KvHead, KvType, Limits, StaticSet};

const AREA: &str = "attention";

/// Shared memory of a block on chips of compute capability 8.6, 8.9 and 12.0, in bytes.
const NARROW: usize = 99 << 10;

/// KV heads and query heads per KV head.
const HEADS: [usize; 2] = [2, 4];

/// One layer's rows of one sequence.
#[derive(Clone, Copy)]
struct Layer {
    float: Float,
    d: usize,
    /// Number of positions.
    n: usize,
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let [g, r] = HEADS;
    for float in [Float::F32, Float::F16, Float::Bf16] {
        for d in [64, 80, 96, 128, 40] {
            let layer = Layer { float, d, n: 300 };
            let rows = format!("{g}/{} heads x {d}, 300 positions in {}", g * r, float.name());
            for most in [None, Some(70)] {
                let what = if most.is_some() { "a choice of" } else { "all of" };
                cases.push(Case::new(
                    AREA,
                    format!("a step over {what} {rows}"),
                    move |watched| layer.step(watched, most),
                ));
            }
            for window in [None, Some(50)] {
                let what = if window.is_some() {
                    ", sliding window 50"
                } else {
                    ""
                };
                let name = format!("the last 70 rows of a prompt, {rows}{what}");
                cases.push(Case::new(AREA, name, move |watched| {
                    layer.prompt(watched, window)
                }));
            }
            if d == 128 {
                let name = format!("the last 70 rows of a prompt, {rows}, with 99 KiB of shared memory");
                cases.push(Case::new(AREA, name, move |watched| {
                    layer.prompt(&watched.narrow(NARROW), None)
                }));
            }
        }
    }
    let layer = Layer {
        float: Float::F32,
        d: 64,
        n: 200,
    };
    let name = format!(
        "a step that the host shares, {g}/{} heads x 64, 200 positions",
        g * r
    );
    cases.push(Case::new(AREA, name, move |watched| layer.shared(watched)));
    cases
}

/// The rows of a layer, on the host as the cache rounds them and on the device.
struct Filled<'d> {
    keys: Vec<f32>,
    values: Vec<f32>,
    rows: LayerRows<'d>,
    positions: Positions<'d>,
}

impl Layer {
    fn shape(&self) -> Result<Shape> {
        let [kv_heads, group] = HEADS;
        let shape = Shape {
            sequences: 1,
            kv_heads,
            group,
            head_dim: self.d,
            capacity: self.n,
        };
        shape.checked()
    }

    fn fill<'d>(&self, driver: &'d dyn Driver, limits: Limits) -> Result<Filled<'d>> {
        let mut rng = rng((self.n * self.d) as u64);
        let mut draw = || rounded(self.float, &normals(&mut rng, HEADS[0] * self.n * self.d));
        let (keys, values) = (draw(), draw());
        let rows = LayerRows::new(driver, self.shape()?, self.float)?;
        let mut positions = Positions::new(driver, self.shape()?, limits)?;
        positions.advance(self.n)?;
        rows.append(
            &upload(driver, &keys)?,
            &upload(driver, &values)?,
            self.n,
            &positions,
        )?;
        Ok(Filled {
            keys,
            values,
            rows,
            positions,
        })
    }

    /// Queries `[h,m,d]`, rounded as the device rounds them.
    fn queries(&self, m: usize) -> Vec<f32> {
        let [g, r] = HEADS;
        rounded(self.float, &normals(&mut rng(self.d as u64), g * r * m * self.d))
    }

    /// Attends with one query per head: all positions, or the static set and up to `most` others.
    fn step(&self, driver: &dyn Driver, most: Option<usize>) -> Result<Comparison> {
        let ([g, r], d, n) = (HEADS, self.d, self.n);
        let limits = Limits {
            sinks: 4,
            window: 33,
            model_window: None,
            budget: Budget::Count(most.unwrap_or(1)),
        };
        let filled = self.fill(driver, limits)?;
        let set = StaticSet::at(n - 1, None, limits.sinks, limits.window);
        let lists: Vec<Vec<u32>> = match most {
            None => vec![set.candidates.clone().map(|p| p as u32).collect(); g],
            // The second head chooses fewer.
            Some(most) => (0..g).map(|head| some_of(&set, most - 20 * head, head)).collect(),
        };
        let chosen = most.map(|most| {
            let selection = CudaSelection::new(driver, &self.shape()?, most)?;
            selection.write(&lists)?;
            Ok::<_, Error>(selection)
        });
        let chosen = chosen.transpose()?;
        let queries = self.queries(1);
        let attention = Attention::new(driver, self.shape()?)?;
        let Filled { rows, positions, .. } = &filled;
        rows.attend(&attention, &upload(driver, &queries)?, positions, chosen.as_ref())?;
        let (out, lse) = (attention.output()?, attention.lse.read()?);
        let mut all = Comparison::default();
        let precision = Precision::plain(self.float);
        for (a, query) in queries.chunks(d).enumerate() {
            let pairs: Vec<Pair> = set
                .merge(&lists[a / r])
                .into_iter()
                .map(|p| filled.pair(self, a / r, p as usize))
                .collect();
            let mut head = Comparison::default();
            bounds::attended(
                &mut head,
                &precision,
                query,
                &pairs,
                &out[a * d..(a + 1) * d],
                Some(lse[a]),
            );
            all.add(within(head, &format!("query head {a}")));
        }
        Ok(all)
    }

    /// Attends with the last rows as queries, each over what it sees.
    fn prompt(&self, driver: &dyn Driver, window: Option<usize>) -> Result<Comparison> {
        let ([g, r], d, m) = (HEADS, self.d, 70);
        let (h, first) = (g * r, self.n - m);
        let filled = self.fill(driver, Limits::last(1))?;
        let queries = self.queries(m);
        let out = upload(driver, &vec![f32::NAN; h * m * d])?;
        let piece = Piece {
            sequence: 0,
            first,
            rows: m,
            window,
        };
        prefill::attend(driver, &upload(driver, &queries)?, &filled.rows, piece, &out)?;
        let out = out.read()?;
        let mut all = Comparison::default();
        let precision = Precision::plain(self.float);
        for a in 0..h {
            let pairs: Vec<Pair> = (0..self.n).map(|p| filled.pair(self, a / r, p)).collect();
            // A part of the rows, the last one among them.
            for i in (0..m).rev().step_by(3) {
                let query = &queries[(a * m + i) * d..][..d];
                let mut row = Comparison::default();
                let seen = &pairs[visible(first + i, window)];
                bounds::attended(
                    &mut row,
                    &precision,
                    query,
                    seen,
                    &out[(i * h + a) * d..][..d],
                    None,
                );
                all.add(within(row, &format!("query head {a}, row {i}")));
            }
        }
        Ok(all)
    }

    /// Attends some positions on the device and the others on the host, and merges the results on the device.
    fn shared(&self, driver: &dyn Driver) -> Result<Comparison> {
        let ([g, r], d, n) = (HEADS, self.d, self.n);
        let filled = self.fill(driver, Limits::last(50))?;
        let set = StaticSet::at(n - 1, None, 0, 50);
        let none = CudaSelection::new(driver, &self.shape()?, 1)?;
        none.write(&vec![Vec::new(); g])?;
        let (queries, attention) = (self.queries(1), Attention::new(driver, self.shape()?)?);
        let Filled { rows, positions, .. } = &filled;
        rows.attend(&attention, &upload(driver, &queries)?, positions, Some(&none))?;
        let others: Vec<u32> = set.candidates.clone().map(|p| p as u32).collect();
        let mut theirs = Vec::new();
        for head in 0..g {
            let own = |values| matrix(values, head, [n, d]);
            let mut kv = KvHead::new(KvType::F32, d, n, Center::Median);
            kv.extend(own(&filled.keys)?, own(&filled.values)?);
            let (group, mut out) = (matrix(&queries, head, [r, d])?, Array2::zeros((r, d)));
            let lse = attention::decode(group, kv.keys(), kv.values(), &others, out.view_mut());
            for (row, lse) in out.rows().into_iter().zip(lse) {
                theirs.extend(row.iter().chain([&lse]));
            }
        }
        let joined = upload(driver, &vec![f32::NAN; g * r * d])?;
        attention.join_rows(&upload(driver, &theirs)?, &joined)?;
        let (joined, own) = (joined.read()?, upload(driver, &vec![f32::NAN; g * r * d])?);
        attention.output_rows(&own)?;
        let mut all = Comparison::default();
        all.equal(&own.read()?, &attention.output()?, || {
            "outputs without padding".to_owned()
        });
        let precision = Precision::plain(self.float);
        for (a, query) in queries.chunks(d).enumerate() {
            let pairs: Vec<Pair> = (0..n).map(|p| filled.pair(self, a / r, p)).collect();
            let mut head = Comparison::default();
            bounds::attended(
                &mut head,
                &precision,
                query,
                &pairs,
                &joined[a * d..(a + 1) * d],
                None,
            );
            all.add(within(head, &format!("query head {a}")));
        }
        Ok(all)
    }
}

impl Filled<'_> {
    fn pair(&self, layer: &Layer, head: usize, p: usize) -> Pair {
        let row = |of: &[f32]| of[(head * layer.n + p) * layer.d..][..layer.d].to_vec();
        (row(&self.keys), row(&self.values))
    }
}

/// Draws some candidates, ascending.
fn some_of(set: &StaticSet, count: usize, seed: usize) -> Vec<u32> {
    let mut all: Vec<u32> = set.candidates.clone().map(|p| p as u32).collect();
    all.shuffle(&mut rng(seed as u64));
    all.truncate(count);
    all.sort_unstable();
    all
}
