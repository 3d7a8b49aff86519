//! The priors of a layer: the quantities of single rows, and the result of combining them with those of the anchors.

use std::ops::Range;

use ndarray::{Array2, ArrayView2, Axis, s};
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::super::constants::LOCAL;
use super::anchors::{self, Dynamic};
use super::sample::{Sample, TILE, Tile};
use super::section::{self, LfpsSection};
use super::{EXACT, RELATIVE, SCALARS, SLASH, STRUCTURAL_END, THETAS, VERT, slash_start};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, Report, SectionKind};
use crate::compute::attention::visible;
use crate::compute::{gemm, simd};
use crate::env;
use crate::error::{Error, Result};
use crate::kv::static_set::SINKS;

/// Scores whose exponentials are summed in f32 before the result is added to an f64 sum.
const SUM_TILE: usize = 256;

/// The fit of the section `lfps`.
///
/// # Numerics
/// Scores and weights in f32, sums over positions and rows in f64, in an order that does not depend
/// on the number of threads.
pub(super) struct PriorsFit {
    pub sample: Sample,
}

impl Fit for PriorsFit {
    fn kind(&self) -> &'static dyn SectionKind {
        &LfpsSection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        section::manifest()
    }

    fn query_rows(&self) -> &[usize] {
        &self.sample.rows
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        let (d, float) = (text.sizes.head_dim, size_of::<f32>());
        let keys = text.n * (d * float + size_of::<usize>());
        let queries = self.sample.rows.len() * d * float + text.query_read_bytes;
        // The scores of a tile of rows with all positions of a block, and the rotations of the block.
        let scores = text.threads * TILE * text.longest_block * float;
        keys + queries + scores + text.longest_block * d * float
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        let table = states.rope.table(0..self.sample.blocks.longest());
        let (r, scale) = (states.sizes.group(), 1.0 / (states.sizes.head_dim as f32).sqrt());
        for kv_head in 0..states.sizes.n_kv_heads {
            let mut keys = (states.read.k)(kv_head)?;
            let rows: Vec<usize> = (0..keys.nrows()).collect();
            self.sample.blocks.rotate(&mut keys, &rows, &table, 1.0)?;
            let mut fits = Vec::with_capacity(r);
            for query_head in kv_head * r..(kv_head + 1) * r {
                env::check()?;
                let mut queries = (states.read.q)(query_head)?;
                self.sample
                    .blocks
                    .rotate(&mut queries, &self.sample.rows, &table, scale)?;
                let head = SampledHead {
                    keys: keys.view(),
                    queries: queries.view(),
                    sample: &self.sample,
                    window: states.window,
                };
                let at = |e: Error| e.context(format!("priors of query head {query_head}"));
                fits.push(fit_head(&head).map_err(at)?);
            }
            for fit in &fits {
                let narrow = |x: &[f64]| x.iter().map(|v| *v as f32).collect::<Vec<_>>();
                part.put(section::SLASH, &narrow(&fit.slash));
                part.put(section::VERT, &narrow(&fit.vert));
                part.put(section::SCALARS, &narrow(&fit.scalars));
            }
            part.quality.push(self.report(&fits));
            done(kv_head, None);
        }
        Ok(part)
    }
}

impl PriorsFit {
    /// Makes the quality report of a KV head; each quantity is an array over its query heads.
    fn report(&self, fits: &[HeadFit]) -> Report {
        let of = |i: usize| fits.iter().map(|fit| fit.scalars[i]).collect::<Value>();
        let shown = SCALARS.iter().enumerate().filter_map(|(i, name)| match *name {
            "p_bypass_0.85" => Some(("p_bypass", of(i))),
            "lambda" | "sink_mean" | "alpha" | "gamma" | "k_fraction" | "persist_1" | "persist_8"
            | "persist_32" => Some((*name, of(i))),
            _ => None,
        });
        let (rows, anchors) = (self.sample.n_rows(), self.sample.n_anchors());
        let counts = [("rows", rows.into()), ("anchors", anchors.into())];
        let all = counts.into_iter().chain(shown);
        all.map(|(name, value)| (name.to_string(), value)).collect()
    }
}

/// The sampled queries of one query head, with the keys of its KV head.
pub(super) struct SampledHead<'a> {
    /// Rotated keys of the whole text: `[n,d]`.
    pub keys: ArrayView2<'a, f32>,
    /// Rotated queries of `sample.rows`, divided by sqrt(d): `[rows,d]`.
    pub queries: ArrayView2<'a, f32>,
    pub sample: &'a Sample,
    pub window: Option<usize>,
}

impl SampledHead<'_> {
    /// Returns the position of each row of a tile within its block.
    pub fn positions(&self, tile: &Tile) -> Vec<usize> {
        let rows = tile.at.iter().map(|at| self.sample.rows[*at]);
        rows.map(|row| row - tile.block.start).collect()
    }

    /// Returns the non-sinks that the row at position `p` sees.
    pub fn non_sinks(&self, p: usize) -> Range<usize> {
        visible(p, self.window).start.max(SINKS)..p + 1
    }

    /// Returns the scores of a tile's rows with a span of positions of the block: `[rows, span]`, row by row.
    pub fn scores(&self, tile: &Tile, span: Range<usize>) -> Vec<f32> {
        let queries = self.queries.select(Axis(0), &tile.at);
        let (first, end) = (tile.block.start + span.start, tile.block.start + span.end);
        let mut scores = Array2::zeros((tile.at.len(), span.len()));
        let keys = self.keys.slice(s![first..end, ..]);
        gemm(scores.view_mut(), false, queries.view(), keys.t());
        scores.into_raw_vec_and_offset().0
    }
}

/// Turns scores into softmax weights and returns their log-sum-exp.
pub(super) fn softmax(x: &mut [f32]) -> f64 {
    let max = simd::max(x);
    let parts = x.chunks_mut(SUM_TILE);
    let sum: f64 = parts.map(|part| f64::from(simd::exp_shifted(part, max))).sum();
    simd::scale(x, (1.0 / sum) as f32);
    f64::from(max) + sum.ln()
}

/// Returns the log-sum-exp of a few scores; negative infinity if there are none.
fn lse(x: &[f32]) -> f64 {
    let max = f64::from(simd::max(x));
    let sum: f64 = x.iter().map(|v| (f64::from(*v) - max).exp()).sum();
    if x.is_empty() { max } else { max + sum.ln() }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The quantities of one row, other than its mass per bucket.
struct RowStats {
    /// The log mass of the sinks.
    sink: f64,
    /// The log mass of all other positions.
    rest: f64,
    /// The log mass of the most recent of these other positions.
    local: f64,
    /// ln(number of non-sinks) + mean score: the log-normal estimate of `rest` without the variance.
    flat: f64,
    /// The squared norm of the query.
    norm: f64,
    /// The variance of the scores divided by `norm`.
    rho: f64,
}

/// The masses of a tile, summed over its rows, and the quantities of each row.
struct TileSums {
    slash: Vec<f64>,
    vert: Vec<f64>,
    rows: Vec<RowStats>,
}

impl TileSums {
    fn new(head: &SampledHead, tile: &Tile) -> Self {
        let positions = head.positions(tile);
        let span = visible(positions[0], head.window).start..positions[positions.len() - 1] + 1;
        let mut scores = head.scores(tile, span.clone());
        let mut sums = Self {
            slash: vec![0.0; SLASH],
            vert: vec![0.0; VERT],
            rows: Vec::with_capacity(positions.len()),
        };
        let lines = scores.chunks_exact_mut(span.len());
        for ((line, &p), &at) in lines.zip(&positions).zip(&tile.at) {
            let (seen, rest) = (visible(p, head.window), head.non_sinks(p));
            let sink = lse(&line[seen.start - span.start..rest.start - span.start]);
            let x = &mut line[rest.start - span.start..rest.end - span.start];
            let n = x.len() as f64;
            let local = lse(&x[x.len().saturating_sub(LOCAL)..]);
            let (sum, squares) = simd::sums(x);
            let mean = sum / n;
            let query = head.queries.row(at);
            let scaled: f64 = query.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            let norm = scaled * query.len() as f64;
            let variance = (squares / n - mean * mean).max(0.0);
            sums.rows.push(RowStats {
                sink,
                rest: softmax(x),
                local,
                flat: n.ln() + mean,
                norm,
                rho: if norm > 0.0 { variance / norm } else { 0.0 },
            });
            add_slash(&mut sums.slash, x);
            add_vert(&mut sums.vert, x, rest);
        }
        sums
    }
}

/// Adds a row's weights to the buckets of their offsets. The last weight has offset 0, the one before it offset 1.
fn add_slash(slash: &mut [f64], weights: &[f32]) {
    for (sum, w) in slash[..EXACT].iter_mut().zip(weights.iter().rev()) {
        *sum += f64::from(*w);
    }
    let n = weights.len();
    for (bucket, sum) in slash.iter_mut().enumerate().skip(EXACT) {
        let start = slash_start(bucket);
        if start >= n {
            break;
        }
        let end = match bucket + 1 {
            SLASH => n,
            next => slash_start(next).min(n),
        };
        *sum += simd::sums(&weights[n - end..n - start]).0;
    }
}

/// Adds a row's weights to the buckets of their positions i: one bucket each for positions 4..63, then by i/p, where p
/// is the row's position. There, bucket b holds 2^-(b+1) < i/p <= 2^-b, and the last bucket all smaller shares.
fn add_vert(vert: &mut [f64], weights: &[f32], positions: Range<usize>) {
    let (first, p) = (positions.start, positions.end - 1);
    for (i, w) in positions.take_while(|i| *i < STRUCTURAL_END).zip(weights) {
        vert[i - SINKS] += f64::from(*w);
    }
    let least = first.max(STRUCTURAL_END);
    for (b, sum) in vert[STRUCTURAL_END - SINKS..].iter_mut().enumerate() {
        let end = (p >> b) + 1;
        let start = match b + 1 {
            RELATIVE => least,
            next => least.max((p >> next) + 1),
        };
        if start < end {
            *sum += simd::sums(&weights[start - first..end - first]).0;
        }
    }
}

/// The priors of one query head, before rounding.
struct HeadFit {
    slash: Vec<f64>,
    vert: Vec<f64>,
    /// The scalars in the order of [`SCALARS`].
    scalars: Vec<f64>,
}

fn fit_head(head: &SampledHead) -> Result<HeadFit> {
    let sums_of = |tile: &Tile| TileSums::new(head, tile);
    let tiles: Vec<TileSums> = head.sample.tiles.par_iter().map(sums_of).collect();
    let (mut slash, mut vert) = (vec![0.0; SLASH], vec![0.0; VERT]);
    let mut rows = Vec::with_capacity(head.sample.n_rows());
    for tile in tiles {
        slash.iter_mut().zip(&tile.slash).for_each(|(s, t)| *s += t);
        vert.iter_mut().zip(&tile.vert).for_each(|(s, t)| *s += t);
        rows.extend(tile.rows);
    }
    for mass in [&mut slash, &mut vert] {
        match rows.len() {
            0 => *mass = vec![1.0 / mass.len() as f64; mass.len()],
            n => mass.iter_mut().for_each(|m| *m /= n as f64),
        }
    }
    let scalars = scalars(&rows, &anchors::measure(head));
    if slash.iter().chain(&vert).chain(&scalars).all(|v| v.is_finite()) {
        return Ok(HeadFit { slash, vert, scalars });
    }
    Err(Error::invalid("a score is NaN or infinite")
        .hint("the keys or queries of this head have extreme outliers; check the model and the text"))
}

/// Computes the scalars in the order of [`SCALARS`].
///
/// # Source
/// Eq. 5, 6 and 11 to 14 of arXiv 2506.15704 for l_sink, l_glob, l_loc and spars. The correction `glob_bias` is ours.
fn scalars(rows: &[RowStats], dynamic: &Dynamic) -> Vec<f64> {
    let sink: Vec<f64> = rows.iter().map(|row| sigmoid(row.sink - row.rest)).collect();
    let (sink_mean, sink_std) = mean_std(&sink);
    let (rho0, rho_std) = mean_std(&rows.iter().map(|row| row.rho).collect::<Vec<_>>());
    let glob = |row: &RowStats| row.flat + rho0 * row.norm / 2.0;
    let (glob_bias, _) = mean_std(&rows.iter().map(|row| row.rest - glob(row)).collect::<Vec<_>>());
    let sparsity = |row: &RowStats| sigmoid(row.sink - (glob(row) + glob_bias).max(row.local));
    let mut ascending = sink;
    ascending.sort_unstable_by(f64::total_cmp);
    let mut out = vec![dynamic.lambda, sink_mean, sink_std];
    out.extend([5, 25, 50, 75, 95].map(|percent| quantile(&ascending, percent)));
    out.extend([glob_bias, rho0, rho_std]);
    out.extend([dynamic.gamma, dynamic.alpha, dynamic.k_fraction]);
    out.extend(THETAS.map(|theta| {
        let above = rows.iter().filter(|row| sparsity(row) > theta).count();
        above as f64 / rows.len().max(1) as f64
    }));
    out.extend(dynamic.persist);
    out
}

/// Returns the mean and the population standard deviation; zeros if there are no values.
fn mean_std(x: &[f64]) -> (f64, f64) {
    let n = x.len().max(1) as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
    (mean, variance.sqrt())
}

/// Returns the smallest of the ascending values that at least `percent` percent of them do not exceed; zero if there
/// are no values.
fn quantile(ascending: &[f64], percent: usize) -> f64 {
    let rank = (ascending.len() * percent).div_ceil(100);
    rank.checked_sub(1).map_or(0.0, |i| ascending[i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_local_estimate_has_five_positions() {
        // One block of 14 rows, of which rows from 7 on are sampled. Position i has the score i/10 under every query.
        let kept = [true; 14];
        let sample = Sample::new(&[0, 14], &kept);
        let keys = Array2::from_shape_fn((14, 1), |(i, _)| i as f32 / 10.0);
        let queries = Array2::ones((sample.rows.len(), 1));
        for window in [None, Some(9), Some(4)] {
            let head = SampledHead {
                keys: keys.view(),
                queries: queries.view(),
                sample: &sample,
                window,
            };
            let rows = TileSums::new(&head, &sample.tiles[0]).rows;
            assert_eq!(rows.len(), 7);
            for (p, row) in (7..14).zip(rows) {
                let least = (p + 1_usize).saturating_sub(window.unwrap_or(14));
                let lse = |positions: Range<usize>| -> f64 {
                    let scores = positions.map(|i| i as f64 / 10.0);
                    scores.map(f64::exp).sum::<f64>().ln()
                };
                for (name, actual, expected) in [
                    ("local", row.local, lse((p - 4).max(4).max(least)..p + 1)),
                    ("rest", row.rest, lse(least.max(4)..p + 1)),
                    ("sink", row.sink, lse(least..4)),
                ] {
                    let equal = actual == expected || (actual - expected).abs() < 1e-5;
                    assert!(equal, "{name} of {p}: {actual} {expected}");
                }
            }
        }
    }
}
