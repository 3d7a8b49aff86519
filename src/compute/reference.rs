//! The contract of each operation: naive, in f64, one line of mathematics after the other.
//!
//! The kernels of this crate are tested against these functions; nothing else calls them. Inputs
//! are f32, as the kernels get them; everything after is f64.

use std::ops::Range;

use ndarray::{Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayView3, s};

/// Softmax attention of one query over the rows `positions`.
///
/// # Shapes
/// q `[d]`, k and v `[n,d]`; result `[d]`. No position gives zeros.
pub fn attention(
    q: ArrayView1<f32>,
    k: ArrayView2<f32>,
    v: ArrayView2<f32>,
    positions: impl Iterator<Item = usize> + Clone,
) -> Array1<f64> {
    let d = q.len();
    let scale = 1.0 / (d as f64).sqrt();
    let score = |j: usize| scale * dot(q, k.row(j));
    let max = positions.clone().map(score).fold(f64::NEG_INFINITY, f64::max);
    let mut out = Array1::zeros(d);
    let mut sum = 0.0;
    for j in positions {
        let weight = (score(j) - max).exp();
        sum += weight;
        for (o, x) in out.iter_mut().zip(v.row(j)) {
            *o += weight * f64::from(*x);
        }
    }
    if sum > 0.0 { out / sum } else { out }
}

/// Causal grouped-query attention; see [`super::attention::causal`] for the shapes.
pub fn causal(
    q: ArrayView3<f32>,
    k: ArrayView3<f32>,
    v: ArrayView3<f32>,
    first: usize,
    window: Option<usize>,
) -> Array2<f64> {
    let (h, m, d) = q.dim();
    let r = h / k.dim().0;
    let mut out = Array2::zeros((m, h * d));
    for a in 0..h {
        let (k, v) = (k.slice(s![a / r, .., ..]), v.slice(s![a / r, .., ..]));
        for i in 0..m {
            let visible = visible(first + i, window);
            let o = attention(q.slice(s![a, i, ..]), k, v, visible);
            out.slice_mut(s![i, a * d..(a + 1) * d]).assign(&o);
        }
    }
    out
}

/// The positions that the token at `t` sees: the last `window` ones, itself included.
pub fn visible(t: usize, window: Option<usize>) -> Range<usize> {
    window.map_or(0, |w| (t + 1).saturating_sub(w))..t + 1
}

/// Index of the centroid with the least squared distance to `x`, the lowest on ties, and that
/// distance.
///
/// # Shapes
/// x `[d]`, centroids `[M,d]`.
pub fn nearest(x: ArrayView1<f32>, centroids: ArrayView2<f32>) -> (usize, f64) {
    let mut best = (0, f64::INFINITY);
    for (m, c) in centroids.rows().into_iter().enumerate() {
        let distance = x
            .iter()
            .zip(c)
            .map(|(x, c)| (f64::from(*x) - f64::from(*c)).powi(2))
            .sum();
        if distance < best.1 {
            best = (m, distance);
        }
    }
    best
}

/// Sum over the kept rows and the group's query heads of qt^T qt, with `rotate` giving qt = q R_b.
///
/// # Shapes
/// q_pre `[h,m,d]`; result `[g,d,d]`.
///
/// # Source
/// A2ATS, arXiv 2502.12665, Eq. 10 and 13.
pub fn second_moment(
    q_pre: ArrayView3<f32>,
    n_kv_heads: usize,
    kept: &[bool],
    rotate: &dyn Fn(ArrayView1<f32>) -> Array1<f64>,
) -> Array3<f64> {
    let (h, m, d) = q_pre.dim();
    let r = h / n_kv_heads;
    let mut sum = Array3::zeros((n_kv_heads, d, d));
    for a in 0..h {
        for i in (0..m).filter(|i| kept[*i]) {
            let qt = rotate(q_pre.slice(s![a, i, ..]));
            for x in 0..d {
                for y in 0..d {
                    sum[[a / r, x, y]] += qt[x] * qt[y];
                }
            }
        }
    }
    sum
}

/// A2ATS selection within a budget: the largest k such that the union of each query head's top-k
/// tokens has at most `budget`; where even k = 1 has more, the best of that union by highest score.
///
/// Tokens rank by (score descending, codeword, position); the result is ascending positions.
///
/// # Shapes
/// scores `[r,M]`; `codes` holds the codeword of each candidate, the first at position `first`.
pub fn select(scores: ArrayView2<f32>, codes: &[u16], first: u32, budget: usize) -> Vec<u32> {
    let ranked: Vec<Vec<usize>> = scores
        .rows()
        .into_iter()
        .map(|row| {
            let mut order: Vec<usize> = (0..codes.len()).collect();
            order.sort_by(|i, j| {
                let (a, b) = (codes[*i], codes[*j]);
                row[b as usize]
                    .total_cmp(&row[a as usize])
                    .then(a.cmp(&b))
                    .then(i.cmp(j))
            });
            order
        })
        .collect();
    let union = |k: usize| {
        let mut all: Vec<usize> = ranked
            .iter()
            .flat_map(|order| order[..k].iter().copied())
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let mut chosen: Vec<usize> = Vec::new();
    for k in 1..=codes.len() {
        let all = union(k);
        if all.len() > budget {
            break;
        }
        chosen = all;
    }
    if chosen.is_empty() && !codes.is_empty() {
        chosen = union(1);
        let best = |i: &usize| {
            scores
                .column(codes[*i] as usize)
                .fold(f32::NEG_INFINITY, |m, s| m.max(*s))
        };
        chosen.sort_by(|i, j| best(j).total_cmp(&best(i)).then(i.cmp(j)));
        chosen.truncate(budget);
        chosen.sort_unstable();
    }
    chosen.into_iter().map(|i| first + i as u32).collect()
}

/// Dot product in f64.
pub fn dot(a: ArrayView1<f32>, b: ArrayView1<f32>) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}
