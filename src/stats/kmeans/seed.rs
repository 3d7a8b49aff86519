//! The initial centroids, and the assignment to them.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::assign::{Assigned, absorb};
use super::scan::{row, squared_distance};
use super::{Init, KMeansParams};

/// Centroids drawn at most between two refreshes of the seeding distances.
const BATCH: usize = 256;

/// The initial centroids, `[M, d]`, and the assignment of `x`, `[n, d]`, to them.
pub(super) fn start(x: &[f32], dim: usize, params: &KMeansParams) -> (Vec<f32>, Vec<Assigned>) {
    let n = x.len() / dim;
    let mut rng = ChaCha8Rng::seed_from_u64(params.seed);
    let centroids: Vec<f32> = match &params.init {
        Init::KMeansPlusPlus => return plus_plus(x, dim, params.size, &mut rng),
        Init::Random => {
            let chosen = rand::seq::index::sample(&mut rng, n, params.size);
            chosen
                .iter()
                .flat_map(|i| row(x, i as u32, dim))
                .copied()
                .collect()
        }
        Init::Precomputed(centroids) => centroids.iter().copied().collect(),
    };
    let mut rows = vec![Assigned::NOWHERE; n];
    absorb(x, dim, &mut rows, &centroids, 0);
    (centroids, rows)
}

/// k-means++ with refreshes in batches.
///
/// Distances are brought up to date once a batch. In between, a row is drawn by the distances of
/// the last refresh, `stale`, and kept with probability `now / stale`, where `now` takes in the
/// centroids drawn since: each centroid is still drawn with probability proportional to its current
/// squared distance.
///
/// # Source
/// Arthur and Vassilvitskii 2007, "k-means++: the advantages of careful seeding", section 2.2.
fn plus_plus(x: &[f32], dim: usize, size: usize, rng: &mut ChaCha8Rng) -> (Vec<f32>, Vec<Assigned>) {
    let n = x.len() / dim;
    let mut rows = vec![Assigned::NOWHERE; n];
    let mut centroids = row(x, rng.gen_range(0..n as u32), dim).to_vec();
    absorb(x, dim, &mut rows, &centroids, 0);
    while centroids.len() < size * dim {
        let drawn = centroids.len() / dim;
        // Early on a batch as large as what is there already would go stale.
        let batch = BATCH.min(drawn).min(size - drawn);
        let fresh = draw(x, dim, &rows, batch, rng);
        absorb(x, dim, &mut rows, &fresh, drawn as u32);
        centroids.extend(fresh);
    }
    (centroids, rows)
}

/// Draws 1 to `batch` further centroids, `[.., d]`: fewer than `batch` where so many draws are
/// rejected that a refresh is cheaper.
fn draw(x: &[f32], dim: usize, rows: &[Assigned], batch: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    let sums = rows.iter().scan(0.0, |sum, r| {
        *sum += f64::from(r.distance);
        Some(*sum)
    });
    let sums: Vec<f64> = sums.collect();
    let last = rows.len() - 1;
    let mut fresh = Vec::with_capacity(batch * dim);
    if sums[last] == 0.0 || !sums[last].is_finite() {
        // Every row sits on a centroid: what is left to draw are duplicates, which stay empty.
        // (Or the distances overflow, and any row is as good as another.)
        (0..batch).for_each(|_| fresh.extend(row(x, rng.gen_range(0..=last as u32), dim)));
        return fresh;
    }
    let mut rejected = 0;
    while fresh.len() < batch * dim && (fresh.is_empty() || rejected <= batch) {
        let at = rng.r#gen::<f64>() * sums[last];
        let i = sums.partition_point(|&sum| sum <= at).min(last);
        let candidate = row(x, i as u32, dim);
        let stale = rows[i].distance;
        let distances = fresh.chunks_exact(dim).map(|c| squared_distance(candidate, c));
        let now = distances.fold(stale, f32::min);
        if rng.r#gen::<f64>() * f64::from(stale) < f64::from(now) {
            fresh.extend_from_slice(candidate);
        } else {
            rejected += 1;
        }
    }
    fresh
}
