//! The parameters of lfps, as flags.

use super::threshold::Threshold;

/// The parameters of lfps.
#[derive(Clone, Copy, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Method lfps")]
pub struct LfpsParams {
    /// Number of last prompt queries that fill the tables; 0 = start from the calibrated priors alone
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = crate::flags::parse_count)]
    pub lfps_rows: usize,
    /// Weight of the calibrated priors, expressed as a number of prompt queries (at least 0)
    #[arg(long, value_name = "N", default_value_t = 8.0, value_parser = crate::flags::not_negative)]
    pub lfps_prior: f64,
    /// Distance of the threshold above the mean, in standard deviations (at least 0); a larger value gives fewer
    /// candidates (default: the calibrated value, else 0.2)
    #[arg(long, value_name = "A", value_parser = crate::flags::not_negative)]
    pub lfps_alpha: Option<f64>,
    /// Skip the cache for a query head when the sinks receive more than this estimated share of its attention (above
    /// 0, at most 1; 1 = never skip; the paper's value is 0.85)
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = crate::flags::share)]
    pub lfps_theta: f64,
    /// Rule that sets the thresholds of the tables
    #[arg(long, value_enum, default_value_t = Threshold::Kurtosis)]
    pub lfps_threshold: Threshold,
}

impl Default for LfpsParams {
    fn default() -> Self {
        Self {
            lfps_rows: 32,
            lfps_prior: 8.0,
            lfps_alpha: None,
            lfps_theta: 1.0,
            lfps_threshold: Threshold::Kurtosis,
        }
    }
}
