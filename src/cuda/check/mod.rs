//! Checks a GPU: at least one case of every kernel, against the CPU or against f64 within a derived bound.
//!
//! Cases are small, and the same on every machine. The whole check takes less than a minute.

mod attention;
mod case;
mod choices;
mod fits;
mod methods;
mod model;
mod products;
mod tokens;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::compute::comparison::{Comparison, Failure};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::watched::Watched;
use crate::env;
use crate::error::{ErrorKind, Result};
pub use case::Case;

/// Kernels that no case launches, because only benchmarks use them.
pub const UNCHECKED: [&str; 2] = ["fill_random", "read_all"];

/// What a check found.
#[derive(Debug, Default)]
pub struct Report {
    /// The areas in the order in which they were checked, up to a failure.
    pub areas: Vec<Area>,
    /// The case that failed.
    pub failure: Option<FailedCase>,
    /// The kernels that were launched.
    pub launched: BTreeSet<&'static str>,
}

/// Cases of one kind.
#[derive(Debug)]
pub struct Area {
    /// The name.
    pub name: &'static str,
    /// How many cases passed.
    pub cases: usize,
    /// How many results were compared.
    pub results: usize,
    /// The largest difference as a share of its bound.
    pub worst: f64,
    /// The time that the cases took.
    pub seconds: f64,
}

/// A case that failed.
#[derive(Debug)]
pub struct FailedCase {
    /// The name of its area.
    pub area: &'static str,
    /// The case, with its shape.
    pub case: String,
    /// The kernels that the case had launched.
    pub kernels: BTreeSet<&'static str>,
    /// The first result that is wrong.
    pub failure: Failure,
}

/// Lists the cases in the order in which they are checked.
pub fn cases() -> Vec<Case> {
    let areas = [
        fits::cases(),
        products::cases(),
        attention::cases(),
        tokens::cases(),
        methods::cases(),
        model::cases(),
    ];
    areas.into_iter().flatten().collect()
}

/// Checks a device. Ends at the first case that fails; an error of the device, or a case after which more time than
/// `limit` has passed, is a failure, too.
///
/// # Errors
/// Interrupted by the user.
pub fn run(device: Arc<dyn Driver>, limit: Duration) -> Result<Report> {
    let (start, watched) = (Instant::now(), Watched::new(device));
    let mut report = Report::default();
    for case in cases() {
        env::check()?;
        let began = Instant::now();
        let found = (case.check)(&watched);
        let kernels = watched.take_launched();
        report.launched.extend(&kernels);
        let mut found = found.or_else(|e| match e.kind() {
            ErrorKind::Interrupted => Err(e),
            _ => Ok(broken("no error", e.to_string())),
        })?;
        let took = start.elapsed();
        if found.failure.is_none() && took > limit {
            let most = format!("at most {} seconds", limit.as_secs());
            found.add(broken(&most, format!("{:.1} seconds", took.as_secs_f64())));
        }
        report.add(&case, found, kernels, began.elapsed());
        if report.failure.is_some() {
            break;
        }
    }
    Ok(report)
}

/// Returns the comparison of a case that could not be run as it should.
fn broken(expected: &str, found: String) -> Comparison {
    let failure = Failure {
        what: "the run".to_owned(),
        expected: expected.to_owned(),
        found,
        bound: None,
    };
    Comparison {
        failure: Some(failure),
        ..Comparison::default()
    }
}

impl Report {
    fn add(&mut self, case: &Case, found: Comparison, kernels: BTreeSet<&'static str>, took: Duration) {
        if self.areas.last().is_none_or(|area| area.name != case.area) {
            self.areas.push(Area {
                name: case.area,
                cases: 0,
                results: 0,
                worst: 0.0,
                seconds: 0.0,
            });
        }
        if let Some(area) = self.areas.last_mut() {
            area.cases += usize::from(found.failure.is_none());
            area.results += found.count;
            area.worst = area.worst.max(found.worst);
            area.seconds += took.as_secs_f64();
        }
        self.failure = found.failure.map(|failure| FailedCase {
            area: case.area,
            case: case.name.clone(),
            kernels,
            failure,
        });
    }
}
