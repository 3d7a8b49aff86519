//! The parameters of quest, as flags.

/// Positions per page by default, as in the paper.
pub const PAGE: usize = 16;

/// The parameters of quest.
#[derive(Clone, Copy, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Method quest")]
pub struct QuestParams {
    /// Positions per page, of which there is a smallest and a largest value per channel: 16, 32 or 64
    #[arg(long, value_name = "N", default_value_t = PAGE, value_parser = parse_page)]
    pub page: usize,
}

impl Default for QuestParams {
    fn default() -> Self {
        Self { page: PAGE }
    }
}

/// Parses a number of positions per page.
fn parse_page(text: &str) -> std::result::Result<usize, String> {
    match text.trim() {
        "16" => Ok(16),
        "32" => Ok(32),
        "64" => Ok(64),
        _ => Err("expected 16, 32 or 64".to_owned()),
    }
}
