//! The start of a fit: chooses the initial centroids (k-means++, random rows or given ones) and assigns
//! the rows to them.

use ndarray::{Array3, Axis};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Init, KMeansParams};
use crate::compute::device::Points;
use crate::error::Result;

/// Most centroids drawn between two refreshes of the seeding distances.
const BATCH: usize = 256;

/// Sets every head's initial centroids and assigns the head's rows to them.
pub(super) fn start(points: &mut dyn Points, params: &KMeansParams, seeds: &[u64]) -> Result<()> {
    let (heads, n, d) = points.dim();
    let mut rngs: Vec<ChaCha8Rng> = seeds.iter().map(|s| ChaCha8Rng::seed_from_u64(*s)).collect();
    let mut centroids = Array3::zeros((heads, params.size, d));
    match &params.init {
        Init::KMeansPlusPlus => return plus_plus(points, params.size, &mut rngs),
        Init::Random => {
            for (head, (mut centroids, rng)) in centroids.outer_iter_mut().zip(&mut rngs).enumerate() {
                let chosen = rand::seq::index::sample(rng, n, params.size);
                let chosen: Vec<u32> = chosen.iter().map(|i| i as u32).collect();
                centroids.assign(&points.rows(head, &chosen)?);
            }
        }
        Init::Precomputed(given) => centroids.assign(&given.view().insert_axis(Axis(0))),
    }
    points.assign(centroids.view())
}

/// Seeds all heads by k-means++, refreshing the distances once per batch.
///
/// A row is drawn by its distance at the last refresh, `stale`, and kept with probability
/// `now / stale`, where `now` is its distance with the centroids drawn since. Each centroid is
/// therefore drawn with probability proportional to its current squared distance.
///
/// # Source
/// Arthur and Vassilvitskii 2007, "k-means++: the advantages of careful seeding", section 2.2.
fn plus_plus(points: &mut dyn Points, size: usize, rngs: &mut [ChaCha8Rng]) -> Result<()> {
    let n = points.dim().1 as u32;
    let first: Vec<u32> = rngs.iter_mut().map(|rng| rng.gen_range(0..n)).collect();
    points.seed(size, &first)?;
    let mut drawn = vec![1; first.len()];
    while drawn.iter().any(|drawn| *drawn < size) {
        // A batch larger than the number of centroids so far would be drawn by outdated distances.
        let batch: Vec<usize> = drawn.iter().map(|d| BATCH.min(*d).min(size - d)).collect();
        let ahead = |(rng, batch): (&ChaCha8Rng, &usize)| {
            let mut ahead = rng.clone();
            (0..2 * (2 * batch + 1)).map(|_| ahead.r#gen::<f64>()).collect()
        };
        let uniforms: Vec<Vec<f64>> = rngs.iter().zip(&batch).map(ahead).collect();
        let made = points.draw(&batch, &uniforms)?;
        for ((drawn, rng), made) in drawn.iter_mut().zip(rngs.iter_mut()).zip(made) {
            *drawn += made.centroids;
            (0..made.used).for_each(|_| {
                rng.r#gen::<f64>();
            });
        }
    }
    Ok(())
}
