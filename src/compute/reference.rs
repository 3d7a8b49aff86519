//! The contract of each operation, as a naive function in f64.
//!
//! The kernels of this crate are checked against these functions, in tests and by `gpu-check`; nothing else calls them.
//! Inputs are f32, as for the kernels; the arithmetic is f64.

use super::attention::visible;
use super::device::{SignSums, Statistic};
use std::collections::BTreeSet;

use ndarray::{Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayView3, s};

/// Computes softmax attention of one query over the rows `positions`.
///
/// # Shapes
/// q `[d]`, k and v `[n,d]`; result `[d]`, zeros if there are no positions.
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

/// Computes causal grouped-query attention; see [`super::attention::causal`] for the shapes.
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

/// Finds the centroid with the smallest squared distance to `x`, and returns its index and the distance. The lowest
/// index wins a tie.
///
/// # Shapes
/// x `[d]`, centroids `[M,d]`.
pub fn nearest(x: ArrayView1<f32>, centroids: ArrayView2<f32>) -> (usize, f64) {
    let mut best = (0, f64::INFINITY);
    for (m, c) in centroids.rows().into_iter().enumerate() {
        let distance = squared_distance(x, c);
        if distance < best.1 {
            best = (m, distance);
        }
    }
    best
}

/// Sums q^T q over the rows of each head.
///
/// # Shapes
/// q_rope `[b,m,d]`; result `[b,d,d]`.
///
/// # Source
/// A2ATS, arXiv 2502.12665, Eq. 10 and 13.
pub fn second_moment(q_rope: ArrayView3<f32>) -> Array3<f64> {
    let (b, m, d) = q_rope.dim();
    let mut sum = Array3::zeros((b, d, d));
    for head in 0..b {
        for i in 0..m {
            let q = q_rope.slice(s![head, i, ..]);
            for x in 0..d {
                for y in 0..d {
                    sum[[head, x, y]] += f64::from(q[x]) * f64::from(q[y]);
                }
            }
        }
    }
    sum
}

/// Returns the rows in the metric of the queries, `x L`.
///
/// # Shapes
/// x `[n,d]`, chol `[d,d]`; result `[n,d]`.
///
/// # Source
/// A2ATS, arXiv 2502.12665, Eq. 15.
pub fn whiten(x: ArrayView2<f32>, chol: ArrayView2<f32>) -> Array2<f64> {
    x.mapv(f64::from).dot(&chol.mapv(f64::from))
}

/// Returns a statistic of each channel of `x`, `[n,d]`; zeros for no rows.
pub fn channel_statistic(x: ArrayView2<f32>, what: Statistic) -> Array1<f64> {
    let of = |channel: ArrayView1<f32>| {
        let mut values = channel.to_vec();
        let rank = match what {
            Statistic::Mean => {
                return channel.iter().map(|v| f64::from(*v)).sum::<f64>() / channel.len().max(1) as f64;
            }
            Statistic::Ranked(rank) => rank,
            Statistic::RankedMagnitude(rank) => {
                values.iter_mut().for_each(|v| *v = v.abs());
                rank
            }
        };
        values.sort_by(f32::total_cmp);
        values.get(rank).map_or(0.0, |v| f64::from(*v))
    };
    x.columns().into_iter().map(of).collect()
}

/// Sums and counts the rows by sign pattern, for each group of four channels. Bit e of the pattern of group g is set
/// where `x[4 g + e] > 0`.
///
/// # Shapes
/// x `[n,d]`, d a multiple of 4.
///
/// # Source
/// Self-Indexing KVCache, arXiv 2603.14224, Eq. 4.
pub fn sign_sums(x: ArrayView2<f32>) -> SignSums {
    let d = x.ncols();
    let (mut sums, mut counts) = (vec![0.0; d * 16], vec![0; d * 4]);
    for row in x.rows() {
        for g in 0..d / 4 {
            let pattern: usize = (0..4).map(|e| usize::from(row[4 * g + e] > 0.0) << e).sum();
            counts[g * 16 + pattern] += 1;
            for e in 0..4 {
                sums[(g * 16 + pattern) * 4 + e] += f64::from(row[4 * g + e]);
            }
        }
    }
    SignSums { sums, counts }
}

/// Returns the mean of the rows of each centroid; a centroid without rows stays as it is.
///
/// # Shapes
/// x `[n,d]`, codes `[n]`, centroids `[M,d]`; result `[M,d]`.
pub fn means(x: ArrayView2<f32>, codes: &[u32], centroids: ArrayView2<f32>) -> Array2<f64> {
    let mut sums = Array2::<f64>::zeros(centroids.dim());
    let mut counts = vec![0u32; centroids.nrows()];
    for (row, code) in x.rows().into_iter().zip(codes) {
        let code = *code as usize;
        counts[code] += 1;
        sums.row_mut(code).zip_mut_with(&row, |s, v| *s += f64::from(*v));
    }
    for (m, count) in counts.iter().enumerate() {
        match count {
            0 => sums.row_mut(m).assign(&centroids.row(m).mapv(f64::from)),
            count => sums.row_mut(m).mapv_inplace(|s| s / f64::from(*count)),
        }
    }
    sums
}

/// Draws up to `batch` rows with probabilities proportional to their squared distances to the nearest centroid, and
/// counts the uniform numbers used.
///
/// `distances` are the distances before the batch. A candidate is the first row whose running sum of distances exceeds
/// the next uniform number times the total distance (the last row if none does). The candidate is kept if the following
/// uniform number, times the candidate's distance, is below the smallest of its distance and its distances to the rows
/// drawn in this batch. Every row is thus drawn in proportion to its present distance. The batch ends early after
/// `batch + 1` rejections. If all distances are zero, or their sum is not finite, the candidates are the rows
/// `floor(u n)`, which use one uniform number each, and all are kept.
///
/// # Shapes
/// x `[n,d]`, distances `[n]`; result: rows in the order drawn.
///
/// # Source
/// Arthur and Vassilvitskii 2007, "k-means++: the advantages of careful seeding", section 2.2; the
/// rejection is ours.
pub fn draw(x: ArrayView2<f32>, distances: &[f32], batch: usize, uniforms: &[f64]) -> (Vec<u32>, usize) {
    let total: f64 = distances.iter().map(|v| f64::from(*v)).sum();
    let (mut drawn, mut used, mut rejected) = (Vec::<u32>::new(), 0, 0);
    while drawn.len() < batch && rejected <= batch {
        let u = uniforms[used];
        used += 1;
        if total == 0.0 || !total.is_finite() {
            drawn.push((u * distances.len() as f64) as u32);
            continue;
        }
        let mut sum = 0.0;
        let found = distances.iter().position(|v| {
            sum += f64::from(*v);
            sum > u * total
        });
        let i = found.unwrap_or(distances.len() - 1);
        let away = |c: &u32| squared_distance(x.row(i), x.row(*c as usize));
        let stale = f64::from(distances[i]);
        let now = drawn.iter().map(away).fold(stale, f64::min);
        let kept = uniforms[used] * stale < now;
        used += 1;
        if kept { drawn.push(i as u32) } else { rejected += 1 }
    }
    (drawn, used)
}

/// Selects tokens within a budget as A2ATS does: takes the union of the query heads' top-k tokens for the largest k at
/// which the union has at most `budget` tokens. If the union has more even for k = 1, takes its tokens with the highest
/// scores.
///
/// Tokens rank by (score descending, codeword, position); the result is in ascending order of position.
///
/// # Shapes
/// scores `[r,M]`; `codes` holds the codeword of each candidate, and the first candidate is at position `first`.
pub fn select(scores: ArrayView2<f32>, codes: &[u16], first: u32, budget: usize) -> Vec<u32> {
    let rank = |row: ArrayView1<f32>| {
        let mut order: Vec<usize> = (0..codes.len()).collect();
        order.sort_by(|i, j| {
            let (a, b) = (codes[*i], codes[*j]);
            let by_score = row[b as usize].total_cmp(&row[a as usize]);
            by_score.then((a, i).cmp(&(b, j)))
        });
        order
    };
    let ranked: Vec<Vec<usize>> = scores.rows().into_iter().map(rank).collect();
    let union = |k: usize| {
        let all: BTreeSet<usize> = ranked.iter().flat_map(|order| &order[..k]).copied().collect();
        Vec::from_iter(all)
    };
    let fitting = (1..=codes.len())
        .map(&union)
        .take_while(|all| all.len() <= budget);
    let mut chosen = fitting.last().unwrap_or_default();
    if chosen.is_empty() && !codes.is_empty() {
        chosen = union(1);
        let best = |i: &usize| {
            let column = scores.column(codes[*i] as usize);
            column.fold(f32::NEG_INFINITY, |m, s| m.max(*s))
        };
        chosen.sort_by(|i, j| best(j).total_cmp(&best(i)).then(i.cmp(j)));
        chosen.truncate(budget);
        chosen.sort_unstable();
    }
    chosen.into_iter().map(|i| first + i as u32).collect()
}

/// Returns the squared Euclidean distance.
fn squared_distance(a: ArrayView1<f32>, b: ArrayView1<f32>) -> f64 {
    let differences = a.iter().zip(b).map(|(x, y)| f64::from(*x) - f64::from(*y));
    differences.map(|difference| difference.powi(2)).sum()
}

/// Returns the dot product in f64.
pub fn dot(a: ArrayView1<f32>, b: ArrayView1<f32>) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}
