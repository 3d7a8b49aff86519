//! The pictures of the small model in `docs/dev/replication.md`.

use std::collections::BTreeMap;
use std::path::Path;

use SeriesLabelPosition::{LowerRight, UpperRight};
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::method::sections::SECTIONS;
use plotters::coord::Shift;
use plotters::prelude::*;
use serde_json::Value;

use crate::{Error, in_folder};

const SIZE: (u32, u32) = (720, 420);
const COLOURS: [RGBColor; 10] = [
    RGBColor(0, 0, 0),
    RGBColor(23, 190, 207),
    RGBColor(31, 119, 180),
    RGBColor(255, 127, 14),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(227, 119, 194),
    RGBColor(127, 127, 127),
];

/// A named line.
type Line = (String, Vec<(f64, f64)>);

/// Draws all pictures.
pub fn all(results: &BTreeMap<String, Value>, artifact: &Path) -> Result<(), Error> {
    let methods = &results["methods"][0]["rows"];
    let reads = by_method(methods, "kv_read_fraction", "recall");
    chart(
        "recall.svg",
        "share of the KV rows read",
        "recall",
        &reads,
        Some(LowerRight),
    )?;
    let reads = by_method(methods, "kv_read_fraction", "kl");
    chart(
        "kl.svg",
        "share of the KV rows read",
        "KL of the next token, nats",
        &reads,
        Some(UpperRight),
    )?;
    let budget = by_method(methods, "budget", "needle_accuracy");
    chart(
        "needles.svg",
        "budget",
        "needles answered",
        &budget,
        Some(LowerRight),
    )?;
    let artifact = Artifact::open(artifact, SECTIONS)?;
    moment(&artifact)?;
    let (layers, heads) = (artifact.sizes.n_layers, artifact.sizes.n_heads);
    let specs: BTreeMap<String, Vec<usize>> = artifact
        .store
        .specs()
        .map(|s| (s.name.clone(), s.shape.clone()))
        .collect();
    let slash: Vec<f32> = artifact.store.read("lfps.slash", &specs["lfps.slash"])?;
    let buckets = slash.len() / (layers * heads);
    let profile = |layer: usize| -> Line {
        let row = &slash[layer * heads * buckets..][..buckets];
        let points = row.iter().enumerate().take(512).filter(|(_, y)| **y > 1e-7);
        let points = points.map(|(x, y)| ((x + 1) as f64, f64::from(*y)));
        (format!("layer {layer}, head 0"), points.collect())
    };
    let lines: Vec<Line> = (0..layers).map(profile).collect();
    chart("slash.svg", "distance + 1", "mean attention", &lines, None)?;
    let count: Vec<u32> = artifact.store.read("a2ats.count", &specs["a2ats.count"])?;
    let size = specs["a2ats.count"][2];
    let usage = |layer: usize| -> Line {
        let mut row = count[layer * artifact.sizes.n_kv_heads * size..][..size].to_vec();
        row.sort_unstable_by(|a, b| b.cmp(a));
        let points = row.iter().enumerate().filter(|(_, y)| **y > 0);
        let points = points.map(|(x, y)| ((x + 1) as f64, f64::from(*y)));
        (format!("layer {layer}, KV head 0"), points.collect())
    };
    let lines: Vec<Line> = (0..layers).map(usage).collect();
    chart("usage.svg", "codeword, by use", "keys", &lines, None)
}

/// Returns a line per method, in the order of the rows.
fn by_method(rows: &Value, x: &str, y: &str) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for row in rows.as_array().into_iter().flatten() {
        let name = row["method"].as_str().unwrap_or("").to_string();
        let (Some(x), Some(y)) = (row[x].as_f64(), row[y].as_f64()) else {
            continue;
        };
        match lines.iter_mut().find(|(n, _)| *n == name) {
            Some((_, points)) => points.push((x, y)),
            None => lines.push((name, vec![(x, y)])),
        }
    }
    lines
}

/// Draws a chart of lines. `linear` is the place of the legend on linear axes; `None` draws logarithmic axes.
fn chart(
    file: &str,
    x: &str,
    y: &str,
    lines: &[Line],
    linear: Option<SeriesLabelPosition>,
) -> Result<(), Error> {
    let path = in_folder(file);
    let area = SVGBackend::new(&path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let points = || lines.iter().flat_map(|(_, p)| p);
    let most = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(f64::MIN_POSITIVE, f64::max);
    let least = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(f64::INFINITY, f64::min);
    let (right, top) = (most(|p| p.0) * 1.02, most(|p| p.1) * 1.05);
    let mut builder = ChartBuilder::on(&area);
    builder.margin(12).x_label_area_size(44).y_label_area_size(64);
    macro_rules! draw {
        ($x:expr, $y:expr) => {{
            let mut chart = builder.build_cartesian_2d($x, $y)?;
            chart
                .configure_mesh()
                .x_desc(x)
                .y_desc(y)
                .light_line_style(WHITE)
                .draw()?;
            for (i, (name, line)) in lines.iter().enumerate() {
                let colour = COLOURS[i % COLOURS.len()];
                chart
                    .draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(2)))?
                    .label(name.clone())
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
            }
            chart
                .configure_series_labels()
                .background_style(WHITE.mix(0.8))
                .border_style(BLACK.mix(0.3))
                .position(linear.clone().unwrap_or(UpperRight))
                .draw()?;
        }};
    }
    if linear.is_none() {
        let (left, bottom) = (least(|p| p.0), least(|p| p.1));
        draw!((left..right).log_scale(), (bottom..top).log_scale());
    } else {
        draw!(0.0..right, 0.0..top);
    }
    area.present()?;
    Ok(())
}

/// Draws the second moment of the queries of one head, computed from its Cholesky factor.
fn moment(artifact: &Artifact) -> Result<(), Error> {
    let sizes = artifact.sizes;
    let d = sizes.head_dim;
    let chol: Vec<f32> = artifact
        .store
        .read("a2ats.chol", &[sizes.n_layers, sizes.n_kv_heads, d, d])?;
    let layer = sizes.n_layers / 2;
    let l = &chol[layer * sizes.n_kv_heads * d * d..][..d * d];
    let entry = |i: usize, j: usize| -> f32 { (0..d).map(|k| l[i * d + k] * l[j * d + k]).sum() };
    let path = in_folder("moment.svg");
    let area = SVGBackend::new(&path, (560, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!("second moment of the queries, layer {layer}, KV head 0 (log of the magnitude)");
    let area: DrawingArea<_, Shift> = area.titled(&title, ("sans-serif", 14))?;
    let most = (0..d).map(|i| entry(i, i)).fold(0.0, f32::max);
    let cells = area.split_evenly((d, d));
    for (cell, (i, j)) in cells.iter().zip((0..d).flat_map(|i| (0..d).map(move |j| (i, j)))) {
        // Four decades, from white to blue.
        let level = (1.0 + (entry(i, j).abs() / most).max(1e-4).log10() / 4.0).clamp(0.0, 1.0);
        let fade = |c: f32| (255.0 - level * (255.0 - c)) as u8;
        cell.fill(&RGBColor(fade(8.0), fade(48.0), fade(107.0)))?;
    }
    area.present()?;
    Ok(())
}
