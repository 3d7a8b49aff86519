//! The parameters of pqcache, as flags.

use crate::error::{Error, Result};

/// The parameters of pqcache.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Method pqcache")]
pub struct PqCacheParams {
    /// Groups that the channels of a key are cut into; must divide their number
    #[arg(long, value_name = "M", default_value_t = 2, value_parser = crate::flags::at_least_one)]
    pub pq_groups: usize,
    /// Bits of a key's code per group, 4 to 8: each group has 2^B words. The paper's other form is 4 groups of 8 bits
    #[arg(long, value_name = "B", default_value_t = 6, value_parser = clap::value_parser!(u8).range(4..=8))]
    pub pq_bits: u8,
}

impl PqCacheParams {
    /// Checks that the groups divide the `d` channels of a head.
    pub(super) fn check(&self, d: usize) -> Result<()> {
        if d.is_multiple_of(self.pq_groups) {
            return Ok(());
        }
        let groups = self.pq_groups;
        Err(Error::usage(format!(
            "--pq-groups {groups} does not divide the {d} channels of a head"
        ))
        .hint(format!("choose a divisor of {d}, such as 2 or 4")))
    }
}

impl Default for PqCacheParams {
    /// Returns the parameters of the authors' scripts.
    fn default() -> Self {
        Self {
            pq_groups: 2,
            pq_bits: 6,
        }
    }
}
