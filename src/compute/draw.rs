//! Rows drawn by their distances, on the host: k-means++ on the devices that keep their distances there too.

use super::cpu::squared_distance;

/// The distances of one refresh, ready to draw rows by them.
pub struct Wheel {
    /// Their running sums.
    sums: Vec<f64>,
    /// All distances are zero or their sum is not finite: rows are drawn evenly, and all are kept.
    even: bool,
}

impl Wheel {
    /// Sums up `distances`, of which there is at least one.
    pub fn new(distances: &[f32]) -> Self {
        let sums = distances.iter().scan(0.0, |sum, distance| {
            *sum += f64::from(*distance);
            Some(*sum)
        });
        let sums: Vec<f64> = sums.collect();
        let even = sums.last().is_none_or(|sum| *sum == 0.0 || !sum.is_finite());
        Self { sums, even }
    }

    /// The row that a number of [0,1) falls on.
    fn row(&self, u: f64) -> u32 {
        let last = self.sums.len() - 1;
        let row = match self.even {
            true => (u * self.sums.len() as f64) as usize,
            false => self.sums.partition_point(|sum| *sum <= u * self.sums[last]),
        };
        row.min(last) as u32
    }

    /// All rows that [`draw_rows`] can meet, in its order: `batch` of them are kept and up to `batch`
    /// rejected before the last one.
    pub fn candidates(&self, batch: usize, uniforms: &[f64]) -> impl Iterator<Item = u32> {
        let (step, count) = if self.even { (1, batch) } else { (2, 2 * batch) };
        let uniforms = uniforms.iter().step_by(step).take(count);
        uniforms.map(|u| self.row(*u))
    }
}

/// Rows drawn as further centroids, and the uniform numbers used: [`super::reference::draw`]. `row` gives
/// the values of a row.
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
