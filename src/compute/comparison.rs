//! Compares what a device computes with what it should, within derived bounds: for tests, and for the check of a GPU.

use std::fmt::Debug;

/// Half the distance of two f32 numbers near 1: the relative rounding of one operation in f32.
pub const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// Results that were compared, and the first of them that is wrong.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// How many results were compared.
    pub count: usize,
    /// The largest difference as a share of its bound; zero if all results had to be equal.
    pub worst: f64,
    /// The first result that is wrong.
    pub failure: Option<Failure>,
}

/// A result that is wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What was compared.
    pub what: String,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub found: String,
    /// The largest difference that rounding may cause; `None` if it should be equal.
    pub bound: Option<f64>,
}

impl Comparison {
    /// Compares numbers that may differ by `bound`; a NaN is wrong. `what` names them if they differ by more.
    pub fn close(&mut self, found: f64, expected: f64, bound: f64, what: impl FnOnce() -> String) {
        self.count += 1;
        let difference = (found - expected).abs();
        if difference <= bound {
            // Numbers that must be equal are, and have no share.
            let share = if bound > 0.0 { difference / bound } else { 0.0 };
            self.worst = self.worst.max(share);
            return;
        }
        let failure = || Failure {
            what: what(),
            expected: format!("{expected}"),
            found: format!("{found}"),
            bound: Some(bound),
        };
        self.failure.get_or_insert_with(failure);
    }

    /// Compares values that must be equal.
    pub fn equal<T: PartialEq + Debug>(&mut self, found: &T, expected: &T, what: impl FnOnce() -> String) {
        self.count += 1;
        if found == expected {
            return;
        }
        let failure = || Failure {
            what: what(),
            expected: short(expected),
            found: short(found),
            bound: None,
        };
        self.failure.get_or_insert_with(failure);
    }

    /// Notes a result of which a property holds or not; `expected` names the property.
    pub fn holds(&mut self, holds: bool, found: &dyn Debug, expected: &str, what: impl FnOnce() -> String) {
        self.count += 1;
        let failure = || Failure {
            what: what(),
            expected: expected.to_owned(),
            found: short(found),
            bound: None,
        };
        if !holds {
            self.failure.get_or_insert_with(failure);
        }
    }

    /// Adds the results of another comparison.
    pub fn add(&mut self, other: Self) {
        self.count += other.count;
        self.worst = self.worst.max(other.worst);
        self.failure = self.failure.take().or(other.failure);
    }

    /// Panics with the first result that is wrong: for tests.
    #[track_caller]
    pub fn assert(&self) {
        assert!(self.failure.is_none(), "{:?}", self.failure);
    }
}

/// The most characters of a value that a failure shows.
const SHOWN: usize = 200;

fn short(value: &(impl Debug + ?Sized)) -> String {
    let text = format!("{value:?}");
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_wrong_result_is_kept() {
        let mut all = Comparison::default();
        all.close(1.0, 1.25, 0.5, || unreachable!());
        all.equal(&3, &3, || unreachable!());
        all.holds(true, &(), "", || unreachable!());
        assert!(all.failure.is_none() && all.worst == 0.5 && all.count == 3);
        all.assert();
        let mut wrong = Comparison::default();
        wrong.close(f64::NAN, 1.0, f64::INFINITY, || "a NaN".to_owned());
        wrong.equal(&vec![7; 1000], &vec![], || "a list".to_owned());
        all.add(wrong);
        let failure = all.failure.unwrap();
        assert_eq!((&failure.what[..], &failure.found[..]), ("a NaN", "NaN"));
        let mut list = Comparison::default();
        list.equal(&vec![7; 1000], &vec![], || "a list".to_owned());
        assert!(list.failure.unwrap().found.len() < 300);
    }
}
