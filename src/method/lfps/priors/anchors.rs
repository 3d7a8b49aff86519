//! Measures how well the tables made from the 32 rows before a row predict its attention. This gives the split between
//! the two tables, their decay and the threshold, and how long top positions persist.

use std::ops::Range;

use rayon::prelude::*;

use super::super::constants::{GAMMA, LOCAL};
use super::super::threshold::{TableStats, balanced, expanded};
use super::fit::{SampledHead, softmax};
use super::sample::Tile;
use super::{ALPHAS, GAMMAS, HISTORY, LAGS, MIN_TOP_K, SHARE, TOP_DIVISOR};
use crate::compute::attention::visible;
use crate::compute::simd;

/// The smallest mass whose logarithm is taken; a smaller mass counts as this one.
pub const MASS_FLOOR: f64 = 1e-6;

/// The scalars of a head whose measurement needs the rows before an anchor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Dynamic {
    /// lv / (lv + ls), where lv and ls are the masses that the vertical and the slash table, undecayed, capture with
    /// their best 2% of positions.
    pub lambda: f64,
    /// The decay with the largest mean log mass on the 2% of positions that are best by both tables together.
    pub gamma: f64,
    /// The largest alpha whose candidates keep 95% of the mass of the true top-k.
    pub alpha: f64,
    /// Mean share of the non-sinks that hold 95% of the non-sinks' mass.
    pub k_fraction: f64,
    /// Mean overlap of the top 2% of positions at each lag.
    pub persist: [f64; LAGS.len()],
}

/// Measures a head at its anchors.
///
/// A larger alpha gives fewer candidates, so the largest alpha that keeps enough mass is the cheapest.
pub(super) fn measure(head: &SampledHead) -> Dynamic {
    let anchors = &head.sample.anchors;
    let mut out = Dynamic {
        lambda: 0.5,
        gamma: GAMMAS[0],
        alpha: 0.2,
        k_fraction: 0.0,
        persist: [0.0; LAGS.len()],
    };
    if anchors.is_empty() {
        return out;
    }
    let n = anchors.len() as f64;
    let measured = |tile: &Tile| AnchorWeights::new(head, tile).measure();
    let measured: Vec<Measured> = anchors.par_iter().map(measured).collect();
    let mean = |value: &dyn Fn(&Measured) -> f64| measured.iter().map(value).sum::<f64>() / n;
    let (lv, ls) = (mean(&|m| m.vertical), mean(&|m| m.slash));
    if lv + ls > 0.0 {
        out.lambda = lv / (lv + ls);
    }
    let enough = (0..ALPHAS.len()).rev().find(|i| mean(&|m| m.kept[*i]) >= SHARE);
    out.alpha = ALPHAS[enough.unwrap_or(0)];
    out.k_fraction = mean(&|m| m.k_fraction);
    out.persist = std::array::from_fn(|i| mean(&|m| m.persist[i]));

    let caught = |tile: &Tile| AnchorWeights::new(head, tile).caught(out.lambda);
    let caught: Vec<[f64; GAMMAS.len()]> = anchors.par_iter().map(caught).collect();
    let mut best = f64::NEG_INFINITY;
    for (i, gamma) in GAMMAS.iter().enumerate() {
        let value = caught.iter().map(|c| c[i]).sum::<f64>();
        if value > best {
            (best, out.gamma) = (value, *gamma);
        }
    }
    out
}

/// The measurements at one anchor.
struct Measured {
    /// The masses on the positions that are best by each table.
    vertical: f64,
    slash: f64,
    /// For each alpha, the share of the top-k mass that the expanded candidates hold.
    kept: [f64; ALPHAS.len()],
    k_fraction: f64,
    persist: [f64; LAGS.len()],
}

/// The softmax weights of an anchor and of the rows before it.
struct AnchorWeights {
    /// The weights over the span, `[33, span]`, oldest row first; zero at sinks and at positions that a row does not
    /// see.
    weights: Vec<f32>,
    /// Number of positions of the span.
    width: usize,
    /// The non-sinks that each row sees, as a range within the span.
    seen: Vec<Range<usize>>,
    /// Number of positions that the anchor sees, sinks included.
    n_visible: usize,
}

impl AnchorWeights {
    fn new(head: &SampledHead, tile: &Tile) -> Self {
        let positions = head.positions(tile);
        let (oldest, p) = (positions[0], positions[HISTORY]);
        let span = head.non_sinks(oldest).start..p + 1;
        let mut weights = head.scores(tile, span.clone());
        let mut seen = Vec::with_capacity(positions.len());
        for (line, position) in weights.chunks_exact_mut(span.len()).zip(&positions) {
            let own = head.non_sinks(*position);
            let own = own.start - span.start..own.end - span.start;
            line[..own.start].fill(0.0);
            line[own.end..].fill(0.0);
            softmax(&mut line[own.clone()]);
            seen.push(own);
        }
        Self {
            weights,
            width: span.len(),
            seen,
            n_visible: visible(p, head.window).len(),
        }
    }

    /// Returns the weights of the row `lag` steps before the anchor, over the whole span.
    fn line(&self, lag: usize) -> &[f32] {
        let row = HISTORY - lag;
        &self.weights[row * self.width..(row + 1) * self.width]
    }

    /// Returns the non-sinks that the anchor sees, as a range within the span.
    fn own(&self) -> Range<usize> {
        self.seen[HISTORY].clone()
    }

    /// Returns the vertical and the slash table as they are before the anchor, at the non-sinks that the anchor sees.
    ///
    /// # Source
    /// The tables of arXiv 2506.15704 (Eq. 4, 10) in offset form, filled with exact weights.
    fn tables(&self, decay: f64) -> (Vec<f32>, Vec<f32>) {
        let width = self.width;
        let (mut vertical, mut slash) = (vec![0.0; width], vec![0.0; width]);
        for lag in (1..=HISTORY).rev() {
            let factor = decay.powi(lag as i32 - 1) as f32;
            let line = self.line(lag);
            simd::axpy(factor, line, &mut vertical);
            // A position at some offset from the earlier row corresponds to the position `lag` further on for the
            // anchor.
            if lag < width {
                simd::axpy(factor, &line[..width - lag], &mut slash[lag..]);
            }
        }
        (vertical[self.own()].to_vec(), slash[self.own()].to_vec())
    }

    fn measure(&self) -> Measured {
        let weights = &self.line(0)[self.own()];
        let n = weights.len();
        let m = top_size(n);
        let mass = |at: &[u32]| -> f64 { at.iter().map(|i| f64::from(weights[*i as usize])).sum() };
        let (vertical, slash) = self.tables(1.0);
        let own_top = top(weights, m);
        let persist = LAGS.map(|lag| {
            let seen = self.seen[HISTORY - lag].clone();
            let before = top(&self.line(lag)[seen.clone()], top_size(seen.len()));
            let mut marked = vec![false; self.width];
            let places = before.iter().map(|i| seen.start + *i as usize);
            places.for_each(|place| marked[place] = true);
            let start = self.own().start;
            let both = own_top.iter().filter(|i| marked[start + **i as usize]).count();
            both as f64 / m as f64
        });
        Measured {
            vertical: mass(&top(&vertical, m)),
            slash: mass(&top(&slash, m)),
            kept: self.kept(weights),
            k_fraction: count_of_mass(weights) as f64 / n as f64,
            persist,
        }
    }

    /// Returns, for each alpha, the share of the mass of the true top-k that the expanded candidates hold.
    fn kept(&self, weights: &[f32]) -> [f64; ALPHAS.len()] {
        let (vertical, slash) = self.tables(GAMMA);
        let wide = |table: Vec<f32>| -> Vec<f64> { table.into_iter().map(f64::from).collect() };
        let (vertical, slash) = (wide(vertical), wide(slash));
        let k = (self.n_visible / TOP_DIVISOR).max(MIN_TOP_K).min(weights.len());
        let best = top(weights, k);
        let (of_vertical, of_slash) = (
            TableStats::from_values(&vertical),
            TableStats::from_values(&slash),
        );
        let weight = |i: &u32| f64::from(weights[*i as usize]);
        let all: f64 = best.iter().map(weight).sum();
        ALPHAS.map(|alpha| {
            let limits = balanced(of_vertical, of_slash, alpha);
            let mut found = expanded(&vertical, &slash, limits, (of_vertical.mean, of_slash.mean));
            let recent = found.len().saturating_sub(LOCAL);
            found[recent..].fill(true);
            let inside = best.iter().filter(|i| found[**i as usize]);
            inside.map(weight).sum::<f64>() / all
        })
    }

    /// Returns, for each decay, the log of the mass on the positions that are best by both tables together.
    fn caught(&self, lambda: f64) -> [f64; GAMMAS.len()] {
        let weights = &self.line(0)[self.own()];
        GAMMAS.map(|gamma| {
            let (vertical, slash) = self.tables(gamma);
            let both = vertical.iter().zip(&slash);
            let both = both.map(|(v, s)| (lambda * f64::from(*v) + (1.0 - lambda) * f64::from(*s)) as f32);
            let best = top(&both.collect::<Vec<_>>(), top_size(weights.len()));
            let mass: f64 = best.iter().map(|i| f64::from(weights[*i as usize])).sum();
            mass.max(MASS_FLOOR).ln()
        })
    }
}

/// Returns the size of the top set among n positions.
fn top_size(n: usize) -> usize {
    (n / TOP_DIVISOR).max(1)
}

/// Returns the places of the m largest values in no particular order; the lower place wins a tie.
fn top(values: &[f32], m: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..values.len() as u32).collect();
    let value = |i: u32| values[i as usize];
    if m < places.len() {
        places.select_nth_unstable_by(m, |a, b| value(*b).total_cmp(&value(*a)).then(a.cmp(b)));
        places.truncate(m);
    }
    places
}

/// Returns how many of the largest weights it takes to hold 95% of the sum.
fn count_of_mass(weights: &[f32]) -> usize {
    let mut descending = weights.to_vec();
    descending.sort_unstable_by(|a, b| b.total_cmp(a));
    let enough = SHARE * descending.iter().map(|w| f64::from(*w)).sum::<f64>();
    let mut sum = 0.0;
    let reached = descending.iter().position(|w| {
        sum += f64::from(*w);
        sum >= enough
    });
    reached.map_or(weights.len(), |i| i + 1)
}
