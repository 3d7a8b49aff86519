//! The tables of `inspect`: quality reports of a section, averaged per layer.

use serde::de::DeserializeOwned;

use super::{Report, parse};
use crate::error::Result;

/// How many heads are listed as the worst.
const WORST: usize = 5;
/// Smallest width of a column.
const WIDTH: usize = 6;

/// A quality report and the KV head that it is about.
pub struct HeadReport<'a> {
    /// Layer of the head.
    pub layer: usize,
    /// Index of the KV head in its layer.
    pub head: usize,
    /// How well the section fits it.
    pub report: &'a Report,
}

/// A column of a table of reports `R`.
pub struct Column<R> {
    heading: &'static str,
    show: fn(f64) -> String,
    value: fn(&R) -> Option<f64>,
}

impl<R> Column<R> {
    /// Makes a column with this heading that shows the mean of a value.
    pub const fn new(heading: &'static str, show: fn(f64) -> String, value: fn(&R) -> Option<f64>) -> Self {
        Self { heading, show, value }
    }
}

/// Shows the mean of every column over the heads of each layer; a dash stands for a layer without values.
///
/// # Errors
/// A report that is not an `R`.
pub fn table<R: DeserializeOwned>(columns: &[Column<R>], reports: &[HeadReport]) -> Result<String> {
    let mut out = String::from("\nlayer");
    for column in columns {
        out += &format!("  {:>WIDTH$}", column.heading);
    }
    out += "\n";
    for layer in reports.chunk_by(|a, b| a.layer == b.layer) {
        let parsed: Vec<R> = layer.iter().map(read).collect::<Result<_>>()?;
        out += &format!("{:>5}", layer[0].layer);
        for column in columns {
            let values: Vec<f64> = parsed.iter().filter_map(column.value).collect();
            let text = match values.len() {
                0 => "-".to_string(),
                n => (column.show)(values.iter().sum::<f64>() / n as f64),
            };
            out += &format!("  {text:>width$}", width = column.heading.len().max(WIDTH));
        }
        out += "\n";
    }
    Ok(out)
}

/// Lists the heads for which `of` is largest, as percentages.
///
/// # Errors
/// A report that is not an `R`.
pub fn worst_heads<R: DeserializeOwned>(reports: &[HeadReport], of: fn(&R) -> Option<f64>) -> Result<String> {
    let mut ranked = Vec::new();
    for report in reports {
        ranked.extend(of(&read(report)?).map(|value| (value, report)));
    }
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    let line = |(value, at): &(f64, &HeadReport)| {
        format!("  layer {}  head {}  {}\n", at.layer, at.head, share(*value))
    };
    Ok(ranked.iter().take(WORST).map(line).collect())
}

/// Formats a share as a percentage.
pub fn share(value: f64) -> String {
    format!("{:.1}%", 100.0 * value)
}

fn read<R: DeserializeOwned>(head: &HeadReport) -> Result<R> {
    parse(
        &format!("quality, layer {}, KV head {}", head.layer, head.head),
        head.report,
    )
}
