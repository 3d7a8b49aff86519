//! The parameters of lfps.

use super::threshold::Threshold;
use crate::parameters::{Choice, NOT_NEGATIVE, SHARE, Values, WHOLE, parameters};

parameters! {
    /// The parameters of lfps.
    pub struct LfpsParams, "Method lfps" {
        /// Number of last prompt queries that fill the tables; 0 = start from the calibrated priors alone
        lfps_rows: usize = 32, "N" in WHOLE;
        /// Weight of the calibrated priors, expressed as a number of prompt queries (at least 0)
        lfps_prior: f64 = 8.0, "N" in NOT_NEGATIVE;
        /// Distance of the threshold above the mean, in standard deviations (at least 0); a larger value gives fewer
        /// candidates (default: the calibrated value, else 0.2)
        lfps_alpha: Option<f64> = None, "A" in NOT_NEGATIVE;
        /// Skip the cache for a query head when the sinks receive more than this estimated share of its attention (above
        /// 0, at most 1; 1 = never skip; the paper's value is 0.85)
        lfps_theta: f64 = 1.0, "F" in SHARE;
        /// Rule that sets the thresholds of the tables
        lfps_threshold: Threshold = Threshold::Kurtosis, "NAME" in Values::OneOf(Threshold::WORDS);
    }
}
