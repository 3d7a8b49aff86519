//! The parameters of doublesparsity, as flags.

/// The parameters of doublesparsity.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Method doublesparsity")]
pub struct DoubleSparsityParams {
    /// Number of channels per key in the label cache, at 4 bits each [default: one eighth of the head's channels]
    #[arg(long, value_name = "N", value_parser = crate::flags::parse_positive_count)]
    pub ds_channels: Option<usize>,
}
