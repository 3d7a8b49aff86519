//! The oracle: the positions with the largest true softmax probability, summed over the query
//! heads of the group. It reads every key; the reads are not counted, for it is a yardstick.

use super::{Choice, Retriever, Step, everything};
use crate::compute::simd;

/// Exact top-k.
#[derive(Clone)]
pub struct TopK;

impl Retriever for TopK {
    fn select(&mut self, step: &Step) -> Choice {
        let c = step.candidates.clone();
        if step.is_exact() {
            return everything(step).into();
        }
        let (r, d) = step.q_rope.dim();
        let scale = 1.0 / (d as f32).sqrt();
        let first = step.visible.start;
        let n = step.visible.len();
        let mut scratch = vec![0.0; d];
        let mut scores = vec![0.0f32; r * n];
        let queries: Vec<Vec<f32>> = step
            .q_rope
            .rows()
            .into_iter()
            .map(|q| q.iter().map(|x| x * scale).collect())
            .collect();
        for j in 0..n {
            let key = step.kv.keys().row(first + j, &mut scratch);
            for (a, q) in queries.iter().enumerate() {
                scores[a * n + j] = simd::dot(q, key);
            }
        }
        let mut mass = vec![0.0f64; n];
        for row in scores.chunks_mut(n) {
            let max = simd::max(row);
            simd::exp_shifted(row, max);
            let sum: f64 = row.iter().map(|x| f64::from(*x)).sum();
            for (m, x) in mass.iter_mut().zip(row) {
                *m += f64::from(*x) / sum;
            }
        }
        let mut order: Vec<u32> = c.map(|p| p as u32).collect();
        let rank = |a: &u32, b: &u32| {
            let (ma, mb) = (mass[*a as usize - first], mass[*b as usize - first]);
            mb.total_cmp(&ma).then(a.cmp(b))
        };
        order.select_nth_unstable_by(step.budget, rank);
        order.truncate(step.budget);
        order.sort_unstable();
        Choice {
            positions: order,
            products: r * n,
            ..Choice::default()
        }
    }

    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}
