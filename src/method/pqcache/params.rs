//! The parameters of pqcache.

use crate::error::{Error, Result};
use crate::parameters::{AT_LEAST_ONE, Values, parameters};

parameters! {
    /// The parameters of pqcache; by default those of the authors' scripts.
    pub struct PqCacheParams, "Method pqcache" {
        /// Groups that the channels of a key are cut into; must divide their number
        pq_groups: usize = 2, "M" in AT_LEAST_ONE;
        /// Bits of a key's code per group, 4 to 8: each group has 2^B words. The paper's other form is 4 groups of 8 bits
        pq_bits: u8 = 6, "B" in Values::Whole(4, 8);
    }
}

impl PqCacheParams {
    /// Checks that the groups divide the `d` channels of a head.
    pub(super) fn check(&self, d: usize) -> Result<()> {
        if d.is_multiple_of(self.pq_groups) {
            return Ok(());
        }
        let groups = self.pq_groups;
        Err(Error::usage(format!(
            "⟨pq_groups={groups}⟩ does not divide the {d} channels of a head"
        ))
        .hint(format!("choose a divisor of {d}, such as 2 or 4")))
    }
}
