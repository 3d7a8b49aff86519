//! Blocked causal attention of a prompt.

use ndarray::{ArrayView2, ArrayView3, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use crate::compute::{gemm, pieces, simd};

/// Stacked query rows of one task (positions times query heads of the group).
const QUERY_TILE: usize = 256;
/// Keys of one tile.
const KEY_TILE: usize = 256;

/// Causal attention of a run of queries, grouped-query, with an optional sliding window.
///
/// # Shapes
/// q `[h,m,d]` rotated, k `[g,n,d]` rotated, v `[g,n,d]`; query row i stands at position `first + i`,
/// key row j at position j, and n >= first + m. out `[m, h d]`, head-major within a row.
/// With `window` W a query at position t sees positions t-W+1..=t.
///
/// # Numerics
/// f32; the softmax is taken tile by tile with a running maximum. NaN in gives NaN out.
pub fn causal(
    q: ArrayView3<f32>,
    k: ArrayView3<f32>,
    v: ArrayView3<f32>,
    first: usize,
    window: Option<usize>,
    mut out: ArrayViewMut2<f32>,
) {
    let (h, _, d) = q.dim();
    let g = k.len_of(Axis(0));
    let r = h / g;
    let rows = (QUERY_TILE / r).max(8);
    let mut tasks = Vec::new();
    for (c, columns) in out.axis_chunks_iter_mut(Axis(1), r * d).enumerate() {
        for (tile, part) in pieces(columns, Axis(0), rows).into_iter().enumerate() {
            tasks.push((c, tile * rows, part));
        }
    }
    // Late tiles see the most keys: begin with them, so that threads finish together.
    tasks.reverse();
    tasks
        .into_par_iter()
        .for_each_init(Scratch::default, |scratch, (c, start, part)| {
            let q = q.slice(s![c * r..(c + 1) * r, start..start + part.nrows(), ..]);
            let k = k.index_axis(Axis(0), c);
            let v = v.index_axis(Axis(0), c);
            causal_tile(q, k, v, first + start, window, part, scratch);
        });
}

#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    scores: Vec<f32>,
    out: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

/// One query tile of one KV head; `first` is the position of its first row.
fn causal_tile(
    q: ArrayView3<f32>,
    k: ArrayView2<f32>,
    v: ArrayView2<f32>,
    first: usize,
    window: Option<usize>,
    mut part: ArrayViewMut2<f32>,
    scratch: &mut Scratch,
) {
    let (r, m, d) = q.dim();
    let stacked = r * m;
    let scale = 1.0 / (d as f32).sqrt();
    scratch.q.clear();
    for a in 0..r {
        for i in 0..m {
            scratch.q.extend(q.slice(s![a, i, ..]).iter().map(|x| x * scale));
        }
    }
    scratch.scores.resize(stacked * KEY_TILE, 0.0);
    scratch.out.clear();
    scratch.out.resize(stacked * d, 0.0);
    scratch.max.clear();
    scratch.max.resize(stacked, f32::NEG_INFINITY);
    scratch.sum.clear();
    scratch.sum.resize(stacked, 0.0);
    let end = first + m;
    let begin = window.map_or(0, |w| (first + 1).saturating_sub(w));
    let mut tile = begin;
    while tile < end {
        let width = KEY_TILE.min(end - tile);
        let keys = k.slice(s![tile..tile + width, ..]);
        let values = v.slice(s![tile..tile + width, ..]);
        let scores = &mut scratch.scores[..stacked * width];
        // Sizes match by construction; the views cannot fail.
        let (Ok(queries), Ok(mut scores_view)) = (
            ArrayView2::from_shape((stacked, d), &scratch.q[..]),
            ArrayViewMut2::from_shape((stacked, width), &mut *scores),
        ) else {
            unreachable!("tile sizes")
        };
        gemm(scores_view.view_mut(), false, queries, keys.t());
        for row in 0..stacked {
            let t = first + row % m;
            let low = window
                .map_or(0, |w| (t + 1).saturating_sub(w))
                .clamp(tile, tile + width)
                - tile;
            let high = (t + 1).clamp(tile, tile + width) - tile;
            let line = &mut scores[row * width..(row + 1) * width];
            line[..low.min(high)].fill(0.0);
            line[high..].fill(0.0);
            if low >= high {
                line.fill(0.0);
                continue;
            }
            let seen = &mut line[low..high];
            let old = scratch.max[row];
            let new = simd::max(seen).max(old);
            let rescale = if old == f32::NEG_INFINITY {
                0.0
            } else {
                simd::exp(old - new)
            };
            if rescale != 1.0 {
                simd::scale(&mut scratch.out[row * d..(row + 1) * d], rescale);
            }
            scratch.max[row] = new;
            scratch.sum[row] = scratch.sum[row] * rescale + simd::exp_shifted(seen, new);
        }
        let (Ok(weights), Ok(acc)) = (
            ArrayView2::from_shape((stacked, width), &*scores),
            ArrayViewMut2::from_shape((stacked, d), &mut scratch.out[..]),
        ) else {
            unreachable!("tile sizes")
        };
        gemm(acc, true, weights, values);
        tile += width;
    }
    for a in 0..r {
        for i in 0..m {
            let row = a * m + i;
            let inv = 1.0 / scratch.sum[row];
            let values = &scratch.out[row * d..(row + 1) * d];
            let mut target = part.slice_mut(s![i, a * d..(a + 1) * d]);
            for (o, x) in target.iter_mut().zip(values) {
                *o = x * inv;
            }
        }
    }
}
