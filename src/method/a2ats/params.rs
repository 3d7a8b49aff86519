//! The parameters of a2ats, as flags.

/// The parameters of a2ats.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Method a2ats")]
pub struct A2atsParams {
    /// Choose as the paper does: each query head takes the best F of the context (above 0, at most 1), and --budget
    /// is ignored (default: off)
    #[arg(long, value_name = "F", value_parser = crate::flags::share)]
    pub topk_per_query_head: Option<f64>,
}
