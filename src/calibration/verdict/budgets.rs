//! The budgets with which methods read given shares of the bytes.

/// Budgets, as fractions of the context, whose reads are measured to find the budgets that read given shares.
pub const GRID: [f64; 9] = [0.0001, 0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.22, 0.35];

/// Steps in which these reads are measured; they change little from step to step.
pub const SAMPLED_STEPS: usize = 8;

/// A share counts as reached if a budget reads at most this much more than the share, as a fraction of the share.
const TOLERANCE: f64 = 0.02;

/// The budget of one method for one share of the bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// Index of the method.
    pub method: usize,
    /// The share.
    pub target: f64,
    /// The budget; `None` if even the smallest budget reads more.
    pub budget: Option<f64>,
    /// The share that the smallest budget reads.
    pub least: f64,
}

impl Planned {
    /// Plans to read everything.
    pub fn everything(method: usize) -> Self {
        Self {
            method,
            target: 1.0,
            budget: Some(1.0),
            least: 1.0,
        }
    }

    /// Finds the budget that reads `target`, given what the budgets of [`GRID`] read: by linear interpolation between
    /// two of them, or the largest budget if none reads that much.
    pub fn new(method: usize, target: f64, reads: &[f64]) -> Self {
        let least = reads[0];
        let budget = match reads.iter().position(|read| *read >= target) {
            None => GRID.last().copied(),
            Some(0) => (least <= target * (1.0 + TOLERANCE)).then_some(GRID[0]),
            Some(i) => {
                let part = (target - reads[i - 1]) / (reads[i] - reads[i - 1]);
                Some(GRID[i - 1] + part * (GRID[i] - GRID[i - 1]))
            }
        };
        // Four decimals are few enough for a user to type.
        let budget = budget.map(|budget| (budget * 1e4).round().max(1.0) / 1e4);
        Self {
            method,
            target,
            budget,
            least,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_lie_between_those_that_were_measured() {
        let reads = GRID.map(|budget| 0.03 + budget);
        let of = |target| Planned::new(2, target, &reads).budget;
        assert_eq!(of(0.02), None);
        assert_eq!(of(0.03), Some(0.0001));
        assert_eq!(of(0.1), Some(0.07));
        assert_eq!(of(0.085), Some(0.055));
        // A method whose reads stop growing below the share gets the largest budget.
        assert_eq!(Planned::new(0, 0.2, &[0.05; GRID.len()]).budget, Some(0.35));
    }
}
