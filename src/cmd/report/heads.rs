//! What the tensors of an artifact tell about each KV head: the spectrum of its queries, and how its attention falls with
//! distance.

use ndarray::ArrayView2;
use serde_json::{Map, Value, json};

use crate::artifact::{Artifact, SectionView};
use crate::env;
use crate::error::Result;
use crate::method::lfps::priors::{SECTION as LFPS, SLASH, slash_width};
use crate::stats::linalg;

/// The tensor with the mass per bucket of the distance.
const SLASH_TENSOR: &str = "lfps.slash";
/// Shares of the sum of the eigenvalues.
const SHARES: [f64; 2] = [0.9, 0.99];
/// Distances up to here have a bin each; farther on there are [`PER_OCTAVE`] per doubling.
const SINGLE: usize = 8;
const PER_OCTAVE: usize = 4;

/// Returns per section, layer and KV head the eigenvalues of the second moment H = L Lᵀ, the largest first, as shares of their
/// sum, and how many of them make up the shares [`SHARES`].
///
/// # Errors
/// LAPACK has too little memory; an interrupt.
pub fn spectra(artifact: &Artifact) -> Result<Value> {
    let mut out = Map::new();
    for section in artifact.sections() {
        if let Some(factor) = factor_of(&section) {
            out.insert(section.kind.name().to_owned(), spectra_of(&section, &factor)?);
        }
    }
    Ok(Value::Object(out))
}

/// Returns the name of a section's Cholesky factor of the queries' second moment, if it has one.
fn factor_of(section: &SectionView) -> Option<String> {
    let name = format!("{}.chol", section.kind.name());
    let is_there = section.specs.iter().any(|spec| spec.name == name);
    is_there.then_some(name)
}

/// Tells whether an artifact has anything to show for each KV head.
pub fn are_described(artifact: &Artifact) -> bool {
    artifact.has(LFPS) || artifact.sections().any(|section| factor_of(&section).is_some())
}

fn spectra_of(section: &SectionView, factor: &str) -> Result<Value> {
    let sizes = section.artifact.sizes;
    let d = sizes.head_dim;
    let factors = section.read::<f32>(factor)?;
    let mut heads = Vec::new();
    for factor in factors.chunks_exact(d * d) {
        env::check()?;
        heads.push(spectrum(ArrayView2::from_shape((d, d), factor)?)?);
    }
    Ok(heads.chunks(sizes.n_kv_heads).collect())
}

/// Returns the spectrum of one head; null if LAPACK finds none.
fn spectrum(factor: ArrayView2<f32>) -> Result<Value> {
    let l = factor.mapv(f64::from);
    let Some(mut values) = linalg::eigenvalues(l.dot(&l.t()).view())? else {
        return Ok(Value::Null);
    };
    values.iter_mut().for_each(|value| *value = value.max(0.0));
    values.sort_by(|a, b| b.total_cmp(a));
    let sum: f64 = values.iter().sum();
    let held = SHARES.map(|share| {
        let mut part = 0.0;
        let reached = values.iter().position(|value| {
            part += value;
            part >= share * sum
        });
        reached.map_or(values.len(), |last| last + 1)
    });
    let shares: Vec<f64> = values.iter().map(|value| rounded(value / sum)).collect();
    Ok(json!({ "shares": shares, "held": held }))
}

/// Returns the mean share of the attention that a position gets, by its distance from the query: per layer and KV head the
/// mean over the query heads; null without the section `lfps`.
pub fn slash(artifact: &Artifact) -> Result<Value> {
    if !artifact.has(LFPS) {
        return Ok(Value::Null);
    }
    let sizes = artifact.sizes;
    let table = artifact.section(LFPS)?.read::<f32>(SLASH_TENSOR)?;
    let bins = Bins::new();
    let group = sizes.group() * SLASH;
    let mut heads: Vec<Vec<f64>> = table.chunks_exact(group).map(|rows| bins.density(rows)).collect();
    // Distances beyond the calibration text have nothing.
    let last = heads
        .iter()
        .filter_map(|of| of.iter().rposition(|x| *x > 0.0))
        .max();
    let n = last.map_or(0, |last| last + 1);
    heads.iter_mut().for_each(|of| of.truncate(n));
    Ok(json!({
        "first": &bins.first[..n],
        "density": heads.chunks(sizes.n_kv_heads).collect::<Vec<_>>(),
    }))
}

/// Ranges of the distance from a query to a key.
struct Bins {
    /// The first distance of each.
    first: Vec<usize>,
    /// Distances of each.
    width: Vec<usize>,
    /// The bin of each bucket of the section.
    of_bucket: Vec<usize>,
}

impl Bins {
    fn new() -> Self {
        let (mut first, mut width, mut of_bucket): (Vec<usize>, Vec<usize>, Vec<usize>) =
            (Vec::new(), Vec::new(), Vec::new());
        let mut start = 0;
        for bucket in 0..SLASH {
            // The buckets are finer than the bins, and none lies in two of them.
            let step = match start {
                0..SINGLE => 1,
                _ => (1 << usize::ilog2(start)) / PER_OCTAVE,
            };
            if start.is_multiple_of(step) {
                first.push(start);
                width.push(0);
            }
            of_bucket.push(first.len() - 1);
            if let Some(last) = width.last_mut() {
                *last += slash_width(bucket);
            }
            start += slash_width(bucket);
        }
        Self {
            first,
            width,
            of_bucket,
        }
    }

    /// Returns the mean share per position of each bin, over the rows of some query heads.
    fn density(&self, rows: &[f32]) -> Vec<f64> {
        let mut mass = vec![0.0; self.first.len()];
        for row in rows.chunks_exact(SLASH) {
            for (bucket, share) in row.iter().enumerate() {
                mass[self.of_bucket[bucket]] += f64::from(*share);
            }
        }
        let n = (rows.len() / SLASH).max(1) as f64;
        let bins = mass.iter().zip(&self.width);
        bins.map(|(mass, width)| rounded(mass / n / *width as f64))
            .collect()
    }
}

/// Rounds to four significant digits: curves need no more, and the page stays small.
fn rounded(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn the_spectrum_of_a_diagonal_factor_is_its_squares() {
        let found = spectrum(array![[1.0f32, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]].view()).unwrap();
        assert_eq!(found["shares"], json!([0.9, 0.1, 0.0]));
        assert_eq!(found["held"], json!([1, 2]));
    }

    #[test]
    fn bins_have_every_distance_once() {
        let bins = Bins::new();
        assert_eq!(bins.first[..12], [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14]);
        assert_eq!(bins.width[..12], [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]);
        for i in 1..bins.first.len() {
            assert_eq!(bins.first[i - 1] + bins.width[i - 1], bins.first[i]);
        }
        assert_eq!(bins.width.iter().sum::<usize>(), 1 << 20);
        // A head that attends equally up to a distance of 1,024.
        let mut row = vec![0.0f32; SLASH];
        let mut start = 0;
        for (bucket, share) in row.iter_mut().enumerate().filter(|(bucket, _)| *bucket < 520) {
            *share = slash_width(bucket) as f32 / 1024.0;
            start += slash_width(bucket);
        }
        assert_eq!(start, 1024);
        let density = bins.density(&row);
        let within = bins.first.iter().filter(|first| **first < 1024).count();
        assert!(
            density[..within].iter().all(|x| (x * 1024.0 - 1.0).abs() < 1e-3),
            "{density:?}"
        );
        assert!(density[within..].iter().all(|x| *x == 0.0));
    }
}
