//! The k-means++ draws on the host, for devices that keep a copy of the distances there.

use super::cpu::distances::squared_distance;

/// The running sums of the distances. Rows are drawn from it with probabilities proportional to their distances.
pub struct Wheel {
    sums: Vec<f64>,
    /// Whether all distances are zero or their sum is not finite. Rows are then drawn uniformly, and all are kept.
    even: bool,
}

impl Wheel {
    /// Sums up the distances, of which there must be at least one.
    pub fn new(distances: &[f32]) -> Self {
        let sums = distances.iter().scan(0.0, |sum, distance| {
            *sum += f64::from(*distance);
            Some(*sum)
        });
        let sums: Vec<f64> = sums.collect();
        let even = sums.last().is_none_or(|sum| *sum == 0.0 || !sum.is_finite());
        Self { sums, even }
    }

    /// Returns the row that a uniform number in [0,1) selects.
    fn row(&self, u: f64) -> u32 {
        let last = self.sums.len() - 1;
        let row = if self.even {
            (u * self.sums.len() as f64) as usize
        } else {
            self.sums.partition_point(|sum| *sum <= u * self.sums[last])
        };
        row.min(last) as u32
    }

    /// Returns all rows that [`draw_rows`] may consider, in the order in which it considers them: it keeps at most
    /// `batch` rows and rejects at most `batch` before the last one it considers.
    pub fn candidates(&self, batch: usize, uniforms: &[f64]) -> impl Iterator<Item = u32> {
        let (step, count) = if self.even { (1, batch) } else { (2, 2 * batch) };
        let uniforms = uniforms.iter().step_by(step).take(count);
        uniforms.map(|u| self.row(*u))
    }
}

/// Draws rows as further centroids, and counts the uniform numbers used: [`super::reference::draw`]. `row` returns the
/// values of a row.
pub fn draw_rows<'a>(
    row: impl Fn(u32) -> &'a [f32],
    wheel: &Wheel,
    distances: &[f32],
    batch: usize,
    uniforms: &[f64],
) -> (Vec<u32>, usize) {
    if wheel.even {
        return (wheel.candidates(batch, uniforms).collect(), batch);
    }
    let mut fresh: Vec<u32> = Vec::with_capacity(batch);
    let mut used = 0;
    let accepts = uniforms.iter().skip(1).step_by(2);
    for (i, u) in wheel.candidates(batch, uniforms).zip(accepts) {
        if fresh.len() == batch || used / 2 - fresh.len() > batch {
            break;
        }
        let stale = distances[i as usize];
        let others = fresh.iter().map(|c| squared_distance(row(i), row(*c)));
        let now = others.fold(stale, f32::min);
        used += 2;
        if u * f64::from(stale) < f64::from(now) {
            fresh.push(i);
        }
    }
    (fresh, used)
}
