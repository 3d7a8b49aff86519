//! The 2-bit cache, methods.md 2.2.

use half::f16;
use kvsmith::internal::kv::packed::Center;

use super::selfindex::{centered, centers, full_after};
use super::*;

/// Half a unit in the last place of an f16, and the smallest step it has.
const HALF: f64 = 1.0 / 2048.0;
const LEAST: f64 = 6e-8;

fn half(x: f64) -> f64 {
    f16::from_f64(x.clamp(-65504.0, 65504.0)).to_f64()
}

/// Values that 32 channels may read as (two where the code is within rounding of another), and how far
/// off.
fn groups_of_32(x: &[f64]) -> Vec<(Vec<f64>, f64)> {
    let mut out = Vec::new();
    for group in x.chunks(32) {
        let low = group.iter().copied().fold(f64::INFINITY, f64::min);
        let high = group.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let step = (high - low) / 3.0;
        let step = if step < 1e-8 { 0.0 } else { step };
        // Scale and zero point computed in f32 may round to the other f16.
        let off = 4.0 * HALF * (half(low).abs() + 3.0 * half(step)) * 1e-3 + 1e-7;
        let flip = 2.0 * HALF * (half(low).abs() + 3.0 * half(step)) + LEAST;
        for v in group {
            let code = |x: f64| (x + 0.5).floor().clamp(0.0, 3.0);
            let exact = if step == 0.0 { 0.0 } else { (v - low) / step };
            let mut codes = vec![code(exact), code(exact - 1e-4), code(exact + 1e-4)];
            codes.dedup();
            let reads = codes.iter().map(|q| q * half(step) + half(low)).collect();
            // A flip needs a value within 1e-3 of the middle of two f16.
            let near_flip = [low, step].iter().any(|p| {
                let moved = |by: f64| half(p * (1.0 + by));
                moved(-3e-7) != moved(3e-7)
            });
            out.push((reads, if near_flip { flip } else { off }));
        }
    }
    out
}

/// What the cache holds of a position.
#[derive(Clone)]
struct Row {
    /// As it came.
    key: Vec<f64>,
    value: Vec<f64>,
    /// Its halves, while it is in full precision.
    full: bool,
}

#[derive(Default)]
pub struct NaivePacked {
    rows: Vec<Row>,
    full: BTreeSet<usize>,
    centers: Vec<f32>,
    alpha: Vec<f64>,
}

impl NaivePacked {
    /// After a prompt, with the values of every position; `None` if the full-precision positions are too close to tell.
    pub fn prompt(&mut self, history: &History, values: &Matrix, center: Center) -> Option<()> {
        let turn = history.turn();
        let (full, close) = full_after(history, turn, &self.full);
        if close {
            return None;
        }
        self.full = full;
        let fit = turn.first < 128;
        let first = if fit { 0 } else { turn.first };
        self.rows.truncate(first);
        for (key, value) in turn.keys[first..].iter().zip(&values[first..]) {
            self.push(key, value);
        }
        for (p, row) in self.rows.iter_mut().enumerate() {
            row.full = self.full.contains(&p);
        }
        if fit {
            self.centers = centers(history, center);
            let others: Vec<&Row> = self.rows.iter().filter(|r| !r.full).collect();
            let used: Vec<&Row> = if others.len() < 64 {
                self.rows.iter().collect()
            } else {
                others
            };
            let largest = |i: usize| {
                let magnitudes = used.iter().map(|r| centered(&r.key, &self.centers)[i].abs());
                match magnitudes.fold(0.0, f64::max) {
                    0.0 => 1.0,
                    alpha => alpha,
                }
            };
            self.alpha = (0..history.place.head_dim).map(largest).collect();
        }
        Some(())
    }

    pub fn push(&mut self, key: &[f64], value: &[f64]) {
        self.rows.push(Row {
            key: key.to_vec(),
            value: value.to_vec(),
            full: false,
        });
    }

    /// Checks what the cache gives for every position.
    pub fn check(&self, keys: &Matrix, values: &Matrix) -> Result<(), String> {
        for (p, row) in self.rows.iter().enumerate() {
            let x = centered(&row.key, &self.centers);
            if row.full {
                for i in 0..x.len() {
                    let c = f64::from(self.centers[i]);
                    let key = half(x[i]) + c;
                    near("full key", keys[p][i], key, 2e-7 * key.abs().max(c.abs()))?;
                    near("full value", values[p][i], half(row.value[i]), 0.0)?;
                }
                continue;
            }
            let relative: Vec<f64> = x.iter().zip(&self.alpha).map(|(x, a)| x.abs() / a).collect();
            let any = |what: &str, actual: f64, reads: Vec<f64>, bound: f64| {
                if reads.iter().any(|r| (r - actual).abs() <= bound) {
                    Ok(())
                } else {
                    Err(format!(
                        "{what} at {p}: {actual} instead of {reads:?} (bound {bound:e})"
                    ))
                }
            };
            for (i, (reads, off)) in groups_of_32(&relative).into_iter().enumerate() {
                let c = f64::from(self.centers[i]);
                let sign = if x[i] > 0.0 { 1.0 } else { -1.0 };
                let scale = self.alpha[i];
                let reads: Vec<f64> = reads.iter().map(|r| c + sign * r * scale).collect();
                let size = c.abs() + scale;
                any("key", keys[p][i], reads, off * scale + 4e-7 * size)?;
            }
            for (i, (reads, off)) in groups_of_32(&row.value).into_iter().enumerate() {
                let size = row.value.iter().fold(0.0f64, |m, v| m.max(v.abs()));
                any("value", values[p][i], reads, off + 4e-7 * size)?;
            }
        }
        Ok(())
    }
}
