//! The kernel behind k-means and encoding: finds the best and the second-best centroid of each row.
//!
//! The scores of a tile of rows against a panel of centroids are formed in the vector registers and folded into the
//! rows' running results without being stored. The loops are plain Rust over fixed-size arrays, compiled once per
//! instruction set. They use indices on purpose: with iterators, the compiler does not keep the tile in registers and
//! the loops take ten times as long.
//!
//! # Numerics
//!
//! A score starts at `-||c||²/2`, summed in f64 and rounded, and takes one f32 multiply-add per coordinate, in order.
//! It depends only on the row and the centroid, not on the other rows of the tile or the other centroids of the panel.

use std::cell::Cell;

use multiversion::multiversion;
use multiversion::target::match_target;

use super::super::blocks::{PANEL, PanelLine};

/// Returns row `i` of `x`, `[n, d]`.
pub(super) fn row(x: &[f32], i: u32, dim: usize) -> &[f32] {
    &x[i as usize * dim..][..dim]
}

/// Centroids in panels of [`PANEL`], stored coordinate by coordinate, as the kernel reads them.
#[derive(Clone, Debug)]
pub(crate) struct Panels {
    dim: usize,
    /// `[panels, d]`, the last panel padded with zeros.
    data: Vec<PanelLine>,
    /// `-||c||²/2` per slot, `[panels]`; minus infinity in the padding, so that a padding slot never wins.
    biases: Vec<PanelLine>,
    /// The number of the centroid in each slot, ascending, `[slots]`; padding has no entry.
    pub(super) ids: Vec<u32>,
}

impl Panels {
    /// Packs the centroids whose numbers are `ids` (ascending). The first row of `centroids` is centroid number
    /// `first`.
    pub fn pack(centroids: &[f32], dim: usize, first: u32, ids: Vec<u32>) -> Self {
        let count = ids.len().div_ceil(PANEL);
        let mut data = vec![PanelLine::ZERO; count * dim];
        let mut biases = vec![PanelLine([f32::NEG_INFINITY; PANEL]); count];
        for (slot, &id) in ids.iter().enumerate() {
            let (panel, lane) = (slot / PANEL, slot % PANEL);
            let c = row(centroids, id - first, dim);
            for (line, &v) in data[panel * dim..].iter_mut().zip(c) {
                line.0[lane] = v;
            }
            biases[panel].0[lane] = (c.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() * -0.5) as f32;
        }
        Self {
            dim,
            data,
            biases,
            ids,
        }
    }

    pub(super) fn bias(&self, slot: usize) -> f32 {
        self.biases[slot / PANEL].0[slot % PANEL]
    }
}

/// The best and the second-best score of one row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BestTwo {
    /// The centroid with the highest score; the lowest number wins a tie; 0 if there are no centroids.
    pub(super) id: u32,
    pub(super) score: f32,
    /// The highest score among the other centroids.
    pub(super) second: f32,
}

/// The running result of one row: the best and the second-best score in each lane over the panels so far.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct LaneBests {
    best: [f32; PANEL],
    second: [f32; PANEL],
    panel: [u32; PANEL],
}

impl LaneBests {
    const START: Self = Self {
        best: [f32::NEG_INFINITY; PANEL],
        second: [f32::NEG_INFINITY; PANEL],
        panel: [0; PANEL],
    };

    /// Takes the scores of W lanes of a panel, whose place among all such lanes is `part`.
    #[inline(always)]
    fn fold<const W: usize>(&mut self, scores: &[f32; W], part: usize, panel: u32) {
        let bests = &mut self.best.as_chunks_mut::<W>().0[part];
        let seconds = &mut self.second.as_chunks_mut::<W>().0[part];
        let panels = &mut self.panel.as_chunks_mut::<W>().0[part];
        for l in 0..W {
            let (s, best) = (scores[l], bests[l]);
            let better = s > best;
            let loser = if better { best } else { s };
            seconds[l] = if loser > seconds[l] { loser } else { seconds[l] };
            bests[l] = if better { s } else { best };
            panels[l] = if better { panel } else { panels[l] };
        }
    }

    #[expect(clippy::needless_range_loop, reason = "iterators keep it from vectorising")]
    #[inline(always)]
    fn finish(&self, ids: &[u32]) -> BestTwo {
        let score = largest(self.best);
        let mut slots = [u32::MAX; PANEL];
        for l in 0..PANEL {
            let at = self.panel[l] * PANEL as u32 + l as u32;
            slots[l] = if self.best[l] == score { at } else { u32::MAX };
        }
        let slot = least(slots);
        let mut others = self.best;
        for l in 0..PANEL {
            others[l] = if slots[l] == slot {
                self.second[l]
            } else {
                others[l]
            };
        }
        BestTwo {
            id: ids.get(slot as usize).copied().unwrap_or(0),
            score,
            second: largest(others),
        }
    }
}

/// Returns the largest of the lanes, reduced by halves.
#[inline(always)]
fn largest(mut lanes: [f32; PANEL]) -> f32 {
    let mut width = PANEL / 2;
    while width > 0 {
        for l in 0..width {
            let other = lanes[l + width];
            lanes[l] = if other > lanes[l] { other } else { lanes[l] };
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the smallest of the lanes, reduced by halves.
#[inline(always)]
fn least(mut lanes: [u32; PANEL]) -> u32 {
    let mut width = PANEL / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = lanes[l].min(lanes[l + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The buffers of one worker. `out` holds the results of the last scan.
#[derive(Default)]
pub(super) struct ScanScratch {
    packed: Vec<f32>,
    lanes: Vec<LaneBests>,
    pub(super) out: Vec<BestTwo>,
}

thread_local! {
    static SCRATCH: Cell<ScanScratch> = Cell::default();
}

/// Calls a function with buffers that the thread keeps. Allocating them for every chunk would take a good part of the
/// time of a scan, because the operating system has to supply their pages each time.
pub(super) fn with_scratch<R>(work: impl FnOnce(&mut ScanScratch) -> R) -> R {
    let mut scratch = SCRATCH.take();
    let result = work(&mut scratch);
    SCRATCH.set(scratch);
    result
}

/// Scores the rows of `x` listed in `rows` against all panels, and puts the best two centroids of each row into
/// `scratch.out`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2+fma", "aarch64+neon"))]
pub(super) fn scan(x: &[f32], rows: &[u32], panels: &Panels, scratch: &mut ScanScratch) {
    if panels.ids.len() <= FEW {
        return match_target! {
            "x86_64+avx512f" => scan_few::<true>(x, rows, panels, scratch),
            "x86_64+avx2+fma" => scan_few::<true>(x, rows, panels, scratch),
            "aarch64+neon" => scan_few::<true>(x, rows, panels, scratch),
            _ => scan_few::<false>(x, rows, panels, scratch),
        };
    }
    // Rows and lanes per tile: its scores, a line of its lanes and a value of a row fit into the vector registers.
    match_target! {
        "x86_64+avx512f" => scan_tiles::<12, 32, true>(x, rows, panels, scratch),
        "x86_64+avx2+fma" => scan_tiles::<6, 16, true>(x, rows, panels, scratch),
        "aarch64+neon" => scan_tiles::<4, 16, true>(x, rows, panels, scratch),
        _ => scan_tiles::<1, 32, false>(x, rows, panels, scratch),
    }
}

#[inline(always)]
fn scan_tiles<const R: usize, const W: usize, const FMA: bool>(
    x: &[f32],
    rows: &[u32],
    panels: &Panels,
    scratch: &mut ScanScratch,
) {
    let dim = panels.dim;
    let ScanScratch { packed, lanes, out } = scratch;
    let packed = pack_rows::<R>(x, rows, dim, packed);
    lanes.clear();
    lanes.resize(rows.len().next_multiple_of(R), LaneBests::START);
    for ((panel, bias), p) in panels.data.chunks_exact(dim).zip(&panels.biases).zip(0..) {
        for (tile, lanes) in packed.chunks_exact(dim).zip(lanes.chunks_exact_mut(R)) {
            for part in 0..PANEL / W {
                let scores = score_tile::<R, W, FMA>(tile, panel, bias, part);
                for (lanes, scores) in lanes.iter_mut().zip(&scores) {
                    lanes.fold(scores, part, p);
                }
            }
        }
    }
    out.clear();
    out.resize(rows.len(), BestTwo::default());
    // A loop, because a closure would not be compiled for the instruction set.
    for (out, lanes) in out.iter_mut().zip(lanes.iter()) {
        *out = lanes.finish(&panels.ids);
    }
}

/// Copies the rows of `x` listed in `rows` to tiles of R rows, `[tiles, d, R]`; the last tile is padded with zeros.
#[inline(always)]
fn pack_rows<'p, const R: usize>(
    x: &[f32],
    rows: &[u32],
    dim: usize,
    packed: &'p mut Vec<f32>,
) -> &'p [[f32; R]] {
    packed.clear();
    packed.resize(rows.len().div_ceil(R) * dim * R, 0.0);
    for (tile, rows) in packed.chunks_exact_mut(dim * R).zip(rows.chunks(R)) {
        for (r, &i) in rows.iter().enumerate() {
            tile[r..]
                .iter_mut()
                .step_by(R)
                .zip(row(x, i, dim))
                .for_each(|(to, &v)| *to = v);
        }
    }
    packed.as_chunks().0
}

/// The most centroids with which rows fill the lanes: most lanes of a panel would be padding.
pub(super) const FEW: usize = PANEL / 2;
/// Rows per tile with few centroids.
const FEW_ROWS: usize = 16;

/// Computes [`scan`] for few centroids; a lane holds a row.
#[inline(always)]
fn scan_few<const FMA: bool>(x: &[f32], rows: &[u32], panels: &Panels, scratch: &mut ScanScratch) {
    const R: usize = FEW_ROWS;
    let dim = panels.dim;
    let ScanScratch { packed, out, .. } = scratch;
    let packed = pack_rows::<R>(x, rows, dim, packed);
    out.clear();
    out.resize(rows.len(), BestTwo::default());
    for (tile, out) in packed.chunks_exact(dim).zip(out.chunks_mut(R)) {
        let (mut best, mut second) = ([f32::NEG_INFINITY; R], [f32::NEG_INFINITY; R]);
        let mut slots = [0u32; R];
        for slot in 0..panels.ids.len() {
            let mut scores = [panels.biases[0].0[slot]; R];
            for (x, line) in tile.iter().zip(&panels.data) {
                let c = line.0[slot];
                for l in 0..R {
                    scores[l] = multiply_add::<FMA>(x[l], c, scores[l]);
                }
            }
            for l in 0..R {
                let better = scores[l] > best[l];
                let loser = if better { best[l] } else { scores[l] };
                second[l] = if loser > second[l] { loser } else { second[l] };
                best[l] = if better { scores[l] } else { best[l] };
                slots[l] = if better { slot as u32 } else { slots[l] };
            }
        }
        for (l, out) in out.iter_mut().enumerate() {
            *out = BestTwo {
                id: panels.ids.get(slots[l] as usize).copied().unwrap_or(0),
                score: best[l],
                second: second[l],
            };
        }
    }
}

#[inline(always)]
fn score_tile<const R: usize, const W: usize, const FMA: bool>(
    tile: &[[f32; R]],
    panel: &[PanelLine],
    bias: &PanelLine,
    part: usize,
) -> [[f32; W]; R] {
    let mut scores = [bias.0.as_chunks::<W>().0[part]; R];
    for (x, c) in tile.iter().zip(panel) {
        let c = &c.0.as_chunks::<W>().0[part];
        for r in 0..R {
            for l in 0..W {
                scores[r][l] = multiply_add::<FMA>(x[r], c[l], scores[r][l]);
            }
        }
    }
    scores
}

/// Returns the score of one centroid, bit for bit as [`scan`] computes it.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2+fma", "aarch64+neon"))]
pub(super) fn score(x: &[f32], c: &[f32], bias: f32) -> f32 {
    match_target! {
        "x86_64+avx512f" => score_one::<true>(x, c, bias),
        "x86_64+avx2+fma" => score_one::<true>(x, c, bias),
        "aarch64+neon" => score_one::<true>(x, c, bias),
        _ => score_one::<false>(x, c, bias),
    }
}

#[inline(always)]
fn score_one<const FMA: bool>(x: &[f32], c: &[f32], bias: f32) -> f32 {
    x.iter()
        .zip(c)
        .fold(bias, |score, (&x, &c)| multiply_add::<FMA>(x, c, score))
}

/// Returns `x c + sum`, rounded once with `FMA` and twice without it, where `mul_add` would be a function call.
#[inline(always)]
fn multiply_add<const FMA: bool>(x: f32, c: f32, sum: f32) -> f32 {
    if FMA { x.mul_add(c, sum) } else { x * c + sum }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    fn bits(scratch: &ScanScratch) -> Vec<(u32, u32, u32)> {
        let of = |best: &BestTwo| (best.id, best.score.to_bits(), best.second.to_bits());
        scratch.out.iter().map(of).collect()
    }

    #[test]
    fn every_tile_gives_the_same_bits() {
        let mut scratch = ScanScratch::default();
        for (n, size, dim) in [
            (1, 1, 1),
            (25, 70, 5),
            (40, 33, 128),
            (70, 16, 8),
            (33, 5, 3),
            (20, 17, 8),
        ] {
            let (x, c) = (values(n * dim, 1), values(size * dim, 2));
            let panels = Panels::pack(&c, dim, 0, (0..size as u32).collect());
            let rows: Vec<u32> = (0..n as u32).rev().step_by(2).collect();
            scan_tiles::<1, 32, true>(&x, &rows, &panels, &mut scratch);
            let expected = bits(&scratch);
            scan_tiles::<6, 16, true>(&x, &rows, &panels, &mut scratch);
            assert_eq!(bits(&scratch), expected);
            scan_tiles::<4, 16, true>(&x, &rows, &panels, &mut scratch);
            assert_eq!(bits(&scratch), expected);
            scan_tiles::<12, 32, true>(&x, &rows, &panels, &mut scratch);
            assert_eq!(bits(&scratch), expected);
            if size <= FEW {
                scan_few::<true>(&x, &rows, &panels, &mut scratch);
                assert_eq!(bits(&scratch), expected);
            }
            // `scan` and `score` agree bit for bit on every instruction set.
            scan(&x, &rows, &panels, &mut scratch);
            for (&i, best) in rows.iter().zip(&scratch.out) {
                let x = row(&x, i, dim);
                let of = |id: u32| score(x, row(&c, id, dim), panels.bias(id as usize));
                assert_eq!(of(best.id), best.score);
                let others = (0..size as u32).filter(|&id| id != best.id);
                assert_eq!(others.map(of).fold(f32::NEG_INFINITY, f32::max), best.second);
            }
        }
    }

    #[test]
    fn without_a_fused_multiply_add_the_scores_are_close() {
        let (dim, size, n) = (80, 50, 20);
        let (x, c) = (values(n * dim, 3), values(size * dim, 4));
        let panels = Panels::pack(&c, dim, 0, (0..size as u32).collect());
        let rows: Vec<u32> = (0..n as u32).collect();
        let mut scratch = ScanScratch::default();
        scan_tiles::<1, 32, false>(&x, &rows, &panels, &mut scratch);
        for (&i, best) in rows.iter().zip(&scratch.out) {
            let c = row(&c, best.id, dim);
            let terms = row(&x, i, dim)
                .iter()
                .zip(c)
                .map(|(&x, &c)| f64::from(x) * f64::from(c));
            let half: f64 = c.iter().map(|&c| f64::from(c).powi(2) / 2.0).sum();
            let size = terms.clone().map(f64::abs).sum::<f64>() + half;
            let error = (f64::from(best.score) - (terms.sum::<f64>() - half)).abs();
            assert!(error <= 2.0 * (dim as f64 + 2.0) * 2f64.powi(-24) * size);
        }
    }

    #[test]
    fn the_runner_up_may_share_a_lane_with_the_best() {
        // Scores 0.5, 0.375, 0 at slots 0, 32 (the same lane) and 1.
        let mut c = vec![0.0f32; 40];
        (c[0], c[32]) = (1.0, 0.5);
        let panels = Panels::pack(&c, 1, 0, (0..40).collect());
        let mut scratch = ScanScratch::default();
        scan(&[1.0], &[0], &panels, &mut scratch);
        let best = scratch.out[0];
        assert_eq!((best.id, best.score, best.second), (0, 0.5, 0.375));
    }
}
