//! Benchmarks of lfps, whose tables are filled by a random prompt.

use super::LfpsMethod;
use crate::error::Result;
use crate::method::bench::{Bench, Fill, NewHead, TimedLayer};
use crate::method::params::MethodParams;

/// Benchmarks whose tables are filled by a random prompt.
pub(super) struct LfpsBench;

impl Bench for LfpsBench {
    fn heads(&self, _: &TimedLayer, params: &MethodParams) -> Result<Box<NewHead>> {
        let (setup, rows) = (LfpsMethod::new(&params.lfps, None)?, params.lfps.lfps_rows);
        let fill = Fill::Prompt(rows);
        Ok(Box::new(move |place, _| (Box::new(setup.head(place)), fill)))
    }
}
