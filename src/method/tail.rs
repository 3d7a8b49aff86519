//! The tail: the positions that a step does not attend, estimated by their means. Ours.
//!
//! Let T be the visible positions that a step leaves out. Their mean key and mean value, k_T and v_T, give
//!
//! ```text
//! k_T = mean of the keys in T      l_T = ln |T| + q . k_T / sqrt(d) + b
//! v_T = mean of the values in T    o   = (e^l_S o_S + e^l_T v_T) / (e^l_S + e^l_T)
//! ```
//!
//! where o_S and l_S are the output and the log-sum-exp of the attended positions. The means cost hardly any reads:
//! they come from the sums over everything visible, which the cache keeps, minus the rows that were just attended. By
//! Jensen's inequality, l_T without b is never above the true log mass of T. The shift b of a query head makes up for
//! the difference. Calibration fits the shift, or finds that the head is better off without a tail, and stores it in
//! the artifact's section `tail`.

mod choices;
mod fit;
mod section;

use std::ops::Range;

use super::declaration::Ask;
use super::{Method, Place, Reads, Retriever, Step};
use crate::artifact::Artifact;
use crate::compute::attention::{CachedRows, Partial};
use crate::error::{Error, Result};
use crate::kv::{KvHead, KvType};
pub use section::{SECTION, SHIFT, TailSection, USED};

/// The shifts of all query heads of a model.
pub struct Shifts {
    n_heads: usize,
    /// The shift of each query head, `[L,h]`; `None` where calibration turned the tail off.
    shifts: Vec<Option<f32>>,
}

impl Shifts {
    /// Reads the section and checks its digests and values.
    ///
    /// # Errors
    /// The artifact has no section `tail`, or a damaged one.
    pub fn load(artifact: &Artifact) -> Result<Self> {
        let section = artifact.checked_section(SECTION)?;
        let (shift, used) = (section.read::<f32>(SHIFT)?, section.read::<u8>(USED)?);
        let shifts = shift.into_iter().zip(used);
        Ok(Self {
            n_heads: artifact.sizes.n_heads,
            shifts: shifts.map(|(shift, used)| (used == 1).then_some(shift)).collect(),
        })
    }

    /// Returns the shifts of a KV head's query heads, `[r]`.
    fn at(&self, place: &Place) -> &[Option<f32>] {
        let first = place.layer * self.n_heads + place.kv_head * place.group;
        &self.shifts[first..first + place.group]
    }
}

/// A method whose steps estimate what they leave out; on the CPU only.
struct WithTail {
    method: Box<dyn Method>,
    shifts: Shifts,
}

/// Adds the artifact's tails to a prepared method.
///
/// # Errors
/// There is no artifact, or it has no section `tail`; the section is damaged.
pub fn with_tail(method: Box<dyn Method>, ask: &Ask) -> Result<Box<dyn Method>> {
    let with = ask.artifact.filter(|artifact| artifact.has(SECTION));
    let artifact = with.ok_or_else(|| {
        Error::usage("⟨tail⟩ and +tail need ⟨artifact⟩ with the section `tail`")
            .hint("make an artifact with `kvsmith calibrate ⟨model=DIR⟩ ⟨text=FILE⟩ ⟨output=ART.safetensors⟩`, or omit ⟨tail⟩ and +tail")
    })?;
    artifact.check_sizes(ask.sizes)?;
    let shifts = Shifts::load(artifact)?;
    Ok(Box::new(WithTail { method, shifts }))
}

/// Returns the bytes that tails need whatever the context: those of the section.
///
/// # Errors
/// The artifact has no section `tail`.
pub fn constant_bytes(artifact: &Artifact) -> Result<usize> {
    Ok(artifact.section(SECTION)?.bytes())
}

impl Method for WithTail {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        self.method.head(place)
    }

    fn full_heads(&self) -> &[(usize, usize)] {
        self.method.full_heads()
    }

    fn tail(&self, place: &Place) -> Option<Tail> {
        let shifts = self.shifts.at(place);
        let is_used = shifts.iter().any(Option::is_some);
        is_used.then(|| Tail::new(shifts.to_vec(), place.head_dim, place.kv))
    }
}

/// The tail of one KV head along one trajectory.
#[derive(Clone)]
pub struct Tail {
    /// The shift of each query head; `None` if the head has no tail.
    shifts: Vec<Option<f32>>,
    /// Element type of the cache.
    kv: KvType,
    sums: RowSums,
}

impl Tail {
    /// Makes the tail of an empty cache of type `kv` with d channels; `shifts` has one entry per query head.
    pub fn new(shifts: Vec<Option<f32>>, d: usize, kv: KvType) -> Self {
        Self {
            shifts,
            kv,
            sums: RowSums::new(d),
        }
    }

    /// Sums the rows of the `visible` positions anew. Needed after every prompt, since a prompt may change how a cache
    /// holds earlier rows.
    pub fn restart(&mut self, cache: &KvHead, visible: Range<usize>) {
        self.sums = RowSums::new(self.sums.keys.len());
        self.sums.cover(cache, visible);
    }

    /// Estimates what a step that attends `attended` (ascending) leaves out: a partial result per query head, or `None`
    /// for a head without a tail. Returns `None` if the step attends everything visible. Adds what was read.
    ///
    /// # Numerics
    /// Sums and means in f64, from the rows as the cache gives them back.
    pub fn estimate(
        &mut self,
        step: &Step,
        attended: &[u32],
        reads: &mut Reads,
    ) -> Option<Vec<Option<Partial>>> {
        let left_out = step.visible.len().saturating_sub(attended.len());
        if left_out == 0 {
            return None;
        }
        let dropped = self.sums.cover(step.kv, step.visible.clone());
        let [key, value] = self.sums.means_without(step.kv, attended, left_out);
        let size = (left_out as f64).ln();
        let scale = 1.0 / (key.len() as f64).sqrt();
        let output: Vec<f32> = value.iter().map(|x| *x as f32).collect();
        let queries = step.q_rope.rows().into_iter().zip(&self.shifts);
        let partials = queries.map(|(query, shift)| {
            let product: f64 = query.iter().zip(&key).map(|(q, k)| f64::from(*q) * k).sum();
            shift.map(|shift| Partial {
                output: output.clone(),
                lse: (size + product * scale + f64::from(shift)) as f32,
            })
        });
        let d = key.len();
        (0..2).for_each(|_| reads.array(d * size_of::<f64>()));
        reads.index_rows(self.kv, d, dropped);
        Some(partials.collect())
    }
}

/// The sums of the rows over a range of positions.
#[derive(Clone)]
struct RowSums {
    positions: Range<usize>,
    /// The sum of the keys, `[d]`.
    keys: Vec<f64>,
    /// The sum of the values, `[d]`.
    values: Vec<f64>,
}

impl RowSums {
    fn new(d: usize) -> Self {
        Self {
            positions: 0..0,
            keys: vec![0.0; d],
            values: vec![0.0; d],
        }
    }

    /// Moves the sums to the range `to`, whose ends may only move forward. Returns the positions that left the sums.
    fn cover(&mut self, cache: &KvHead, to: Range<usize>) -> Range<usize> {
        if to.start >= self.positions.end {
            *self = Self::new(self.keys.len());
            self.positions = to.start..to.start;
        }
        let dropped = self.positions.start..to.start;
        for (sums, rows) in [(&mut self.keys, cache.keys()), (&mut self.values, cache.values())] {
            add_rows(sums, 1.0, rows, self.positions.end..to.end);
            add_rows(sums, -1.0, rows, dropped.clone());
        }
        self.positions = to;
        dropped
    }

    /// Returns the mean key and the mean value of the `left` covered positions that are not in `attended`.
    fn means_without(&self, cache: &KvHead, attended: &[u32], left: usize) -> [Vec<f64>; 2] {
        let parts = [(&self.keys, cache.keys()), (&self.values, cache.values())];
        parts.map(|(sums, rows)| {
            let mut rest = sums.clone();
            add_rows(&mut rest, -1.0, rows, attended.iter().map(|p| *p as usize));
            rest.iter_mut().for_each(|x| *x /= left as f64);
            rest
        })
    }
}

/// Adds `sign` times the rows at some positions to sums.
fn add_rows(sums: &mut [f64], sign: f64, rows: &dyn CachedRows, positions: impl IntoIterator<Item = usize>) {
    let mut scratch = vec![0.0; sums.len()];
    for p in positions {
        let row = rows.row(p, &mut scratch);
        sums.iter_mut()
            .zip(row)
            .for_each(|(s, x)| *s += sign * f64::from(*x));
    }
}
