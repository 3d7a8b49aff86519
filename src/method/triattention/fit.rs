//! The mean queries of a layer's heads, pair of channels by pair of channels.

use ndarray::{Array2, Axis};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::section::{Q_ABS, Q_MEAN, TriAttentionQuality, TriAttentionSection};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, SectionKind, object};
use crate::env;
use crate::error::{Error, Result};

/// The most rows that a fit takes, evenly spaced among the kept ones.
pub(super) const MAX_ROWS: usize = 65_536;
/// Rows that are summed by one task.
const CHUNK: usize = 1024;

/// The fit of the section `triattention`: for each query head and pair of channels, the mean of the queries before
/// rotation and the mean of their magnitudes. A pair is channels f and f + d/2, taken as a complex number.
///
/// # Numerics
/// Magnitudes and sums in f64. Chunks of rows are summed in the order of the text, so the result depends neither on the
/// number of threads nor on how the text was divided among machines.
///
/// # Source
/// arXiv 2604.04921: E\[q_f\] and E\[|q_f|\].
pub(super) struct TriAttentionFit {
    /// The rows whose queries are averaged.
    pub rows: Vec<usize>,
}

impl Fit for TriAttentionFit {
    fn kind(&self) -> &'static dyn SectionKind {
        &TriAttentionSection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        object(&json!({
            "max_rows": MAX_ROWS,
            "rope_space": "pre",
            "granularity": "query-head",
        }))
    }

    fn query_rows(&self) -> &[usize] {
        &self.rows
    }

    fn key_reads(&self) -> usize {
        0
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        self.rows.len() * text.sizes.head_dim * size_of::<f32>() + text.query_read_bytes
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        let r = states.sizes.group();
        for kv_head in 0..states.sizes.n_kv_heads {
            env::check()?;
            let mut quality = TriAttentionQuality {
                concentration: Vec::with_capacity(r),
                keys: self.rows.len(),
            };
            for query_head in kv_head * r..(kv_head + 1) * r {
                let means = Sums::from_queries(&(states.read.q)(query_head)?).means(self.rows.len());
                if means
                    .iter()
                    .any(|[re, im, abs]| !(re.hypot(*im) + abs).is_finite())
                {
                    let what = format!("query head {query_head}: a mean of the queries is not finite");
                    return Err(Error::invalid(what)
                        .hint("the queries of this head are not finite; check the model and the text"));
                }
                let pairs: Vec<f32> = means
                    .iter()
                    .flat_map(|[re, im, _]| [*re as f32, *im as f32])
                    .collect();
                part.put(Q_MEAN, &pairs);
                part.put(
                    Q_ABS,
                    &means.iter().map(|[_, _, abs]| *abs as f32).collect::<Vec<_>>(),
                );
                let sum = |of: fn(&[f64; 3]) -> f64| means.iter().map(of).sum::<f64>();
                let [of_means, all] = [sum(|[re, im, _]| re.hypot(*im)), sum(|[_, _, abs]| *abs)];
                quality
                    .concentration
                    .push(if all > 0.0 { of_means / all } else { 1.0 });
            }
            let line = quality.mean().map(|share| format!("concentration {share:.3}"));
            part.quality.push(object(&quality)?);
            done(kv_head, line);
        }
        Ok(part)
    }
}

/// Sums over the queries of one head, per pair of channels: real part, imaginary part and magnitude.
struct Sums(Vec<[f64; 3]>);

impl Sums {
    /// Sums queries, `[n,d]`.
    fn from_queries(queries: &Array2<f32>) -> Self {
        let half = queries.ncols() / 2;
        let chunks = queries.axis_chunks_iter(Axis(0), CHUNK).into_par_iter();
        let parts = chunks.map(|queries| {
            let mut part = vec![[0.0; 3]; half];
            for query in queries.outer_iter() {
                for (f, sums) in part.iter_mut().enumerate() {
                    let (re, im) = (f64::from(query[f]), f64::from(query[f + half]));
                    for (sum, x) in sums.iter_mut().zip([re, im, re.hypot(im)]) {
                        *sum += x;
                    }
                }
            }
            part
        });
        let mut all = vec![[0.0; 3]; half];
        for part in parts.collect::<Vec<_>>() {
            for (sums, part) in all.iter_mut().zip(part) {
                sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
        }
        Self(all)
    }

    /// Returns the means over `n` queries.
    fn means(self, n: usize) -> Vec<[f64; 3]> {
        let mean = |sums: [f64; 3]| sums.map(|sum| sum / n.max(1) as f64);
        self.0.into_iter().map(mean).collect()
    }
}
