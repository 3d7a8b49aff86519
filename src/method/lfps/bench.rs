//! Benchmarks of lfps, whose tables are filled by a random prompt.

use super::{LfpsMethod, LfpsParams};
use crate::error::Result;
use crate::method::bench::{Bench, BenchParams, Fill, NewHead, TimedLayer};
use crate::parameters::{ParameterSet, Parameters};

/// Benchmarks whose tables are filled by a random prompt.
pub(super) struct LfpsBench;

impl Bench for LfpsBench {
    fn parameters(&self) -> ParameterSet {
        LfpsParams::set()
    }

    fn is_estimated(&self) -> bool {
        true
    }

    fn prompt_queries(&self, layer: &TimedLayer, params: &BenchParams) -> usize {
        params.read::<LfpsParams>().lfps_rows.min(layer.context())
    }

    fn heads(&self, _: &TimedLayer, params: &BenchParams) -> Result<Box<NewHead>> {
        let params: LfpsParams = params.read();
        let (setup, rows) = (LfpsMethod::new(&params, None)?, params.lfps_rows);
        let fill = Fill::Prompt(rows);
        Ok(Box::new(move |place, _| (Box::new(setup.head(place)), fill)))
    }
}
