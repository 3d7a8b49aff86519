//! `kvsmith inspect`: shows what is in an artifact, and checks whether it is intact.

pub(super) mod losses;

use std::path::PathBuf;

use serde_json::{Value, json};

use super::{open_model, print, print_json};
use crate::artifact::{Artifact, HeadReport, SectionView, short};
use crate::calibration::model_manifest;
use crate::cmd::args::Global;
use crate::cmd::terminal::columns;
use crate::error::{Error, Result};
use crate::method::plan::Plan;
use crate::method::sections::SECTIONS;
use crate::model::folder;
use crate::wording::{counted, harmless, size, wrapped};

/// Arguments of `inspect`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Artifact or section file to show
    #[arg(value_name = "ART")]
    artifact: PathBuf,
    /// Show only this layer, counted from 0, with a table for each section (-v: these tables for all layers)
    #[arg(long, value_name = "I")]
    layer: Option<usize>,
    /// Show only this KV head of each layer, counted from 0; together with --layer, show all values of that head
    /// and what each method loses there
    #[arg(long, value_name = "C")]
    head: Option<usize>,
    /// Check all digests and values in the file
    #[arg(long)]
    verify: bool,
    /// With --verify: also check that the file was made for the model in this folder
    #[arg(long, value_name = "DIR", requires = "verify")]
    model: Option<PathBuf>,
}

/// Runs `inspect`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    global.without_device("inspect")?;
    folder::check_artifact(&args.artifact)?;
    let artifact = Artifact::open(&args.artifact, SECTIONS)?;
    let sizes = artifact.sizes;
    let asked = [
        ("layer", args.layer, sizes.n_layers),
        ("head", args.head, sizes.n_kv_heads),
    ];
    for (what, given, count) in asked {
        if let Some(i) = given.filter(|i| *i >= count) {
            let message = format!("--{what} {i} is out of range: the artifact has {count}, numbered from 0");
            return Err(Error::usage(message));
        }
    }
    if args.verify {
        artifact.verify()?;
        if let Some(dir) = &args.model {
            let model = model_manifest(&open_model(dir, global.log())?, &global.log())?;
            artifact.check_model(&model.fingerprint, model.sizes)?;
        }
    }
    let sections: Vec<(SectionView, Vec<HeadReport>)> = artifact
        .sections()
        .map(|section| (section, reports(&section, args)))
        .collect();
    if global.json {
        return print_json(global, &document(&artifact, args.verify, &sections));
    }
    let whole = args.layer.is_none() && args.head.is_none();
    let verdict = artifact.manifest.quality.methods.as_ref().filter(|_| whole);
    let is_brief = whole && !global.verbose;
    let mut text = summary(&artifact, args, is_brief)?;
    if let Some(verdict) = verdict.filter(|_| !is_brief) {
        text += &losses::table(verdict, &artifact)?;
    }
    if let (Some(layer), Some(head), Some(verdict)) =
        (args.layer, args.head, &artifact.manifest.quality.methods)
    {
        text += &losses::of_head(verdict, layer, head);
    }
    for (section, reports) in &sections {
        if args.layer.is_some() && args.head.is_some() {
            reports.iter().for_each(|head| text += &detail(section, head));
            continue;
        }
        if global.verbose || args.layer.is_some() {
            text += &section.kind.table(reports)?;
        }
        if !is_brief {
            text += &section.kind.weak_heads(section, reports)?;
        }
    }
    if let Some(verdict) = verdict {
        text += if is_brief { "" } else { "\n" };
        text += &losses::recommendation(verdict);
    }
    if is_brief {
        text += "(-v shows what every method loses, and the heads that are weak)\n";
    }
    if args.verify {
        text += "verified: all digests and values are correct\n";
    }
    print(&harmless(&text))
}

/// Lists the quality reports of a section that the flags ask for.
fn reports<'a>(section: &SectionView<'a>, args: &Args) -> Vec<HeadReport<'a>> {
    let asked = |of: &HeadReport| {
        args.layer.is_none_or(|layer| layer == of.layer) && args.head.is_none_or(|head| head == of.head)
    };
    section.reports().into_iter().filter(asked).collect()
}

/// Builds the document of `--json`.
pub(super) fn document(
    artifact: &Artifact,
    verified: bool,
    sections: &[(SectionView, Vec<HeadReport>)],
) -> Value {
    let rows = sections.iter().flat_map(|(section, reports)| {
        reports.iter().map(|head| {
            let mut row = json!(head.report);
            row["section"] = json!(section.kind.name());
            row["layer"] = json!(head.layer);
            row["head"] = json!(head.head);
            row
        })
    });
    let manifest = &artifact.manifest;
    let mut document = json!({
        "model": manifest.origin.model,
        "calibration": manifest.origin.calibration,
        "precision": manifest.origin.precision,
        "sections": manifest.sections,
        "tool_version": manifest.tool_version,
        "device": manifest.device,
        "file_bytes": artifact.store.file_bytes(),
        "verified": verified,
        "methods": manifest.quality.methods,
        "rows": rows.collect::<Vec<Value>>(),
    });
    if let Some(plan) = &manifest.head_plan {
        document["head_plan"] = plan.clone();
    }
    document
}

/// Describes model, calibration and sections.
fn summary(artifact: &Artifact, args: &Args, is_brief: bool) -> Result<String> {
    let manifest = &artifact.manifest;
    let (model, text) = (&manifest.origin.model, &manifest.origin.calibration);
    let sizes = model.sizes;
    // The path is the user's, and is not broken into lines.
    let mut out = format!("{:<INDENT$}{}", "artifact", args.artifact.display());
    let made = format!(
        "{}, made by kvsmith {} on {}{}",
        size(artifact.store.file_bytes()),
        manifest.tool_version,
        manifest.device,
        match manifest.origin.precision {
            None => String::new(),
            Some(precision) => format!(" with --precision {precision}"),
        },
    );
    out += &if out.chars().count() + 2 + made.chars().count() <= columns() {
        format!(", {made}\n")
    } else {
        format!("\n{}", paragraph("", &made))
    };
    out += &paragraph(
        "model",
        &format!(
            "{}{}, {} layers, {} query and {} KV heads of {} channels{}",
            match model.name.as_str() {
                "" => String::new(),
                name => format!("{}: ", harmless(name)),
            },
            model.model_type,
            sizes.n_layers,
            sizes.n_heads,
            sizes.n_kv_heads,
            sizes.head_dim,
            if is_brief {
                String::new()
            } else {
                format!(
                    ", rope {}{}, fingerprint {}",
                    model.rope.scaling.name(),
                    match model.no_rope_layers.len() {
                        0 => String::new(),
                        n => format!(" ({} without)", counted(n, "layer")),
                    },
                    short(&model.fingerprint)
                )
            }
        ),
    );
    out += &paragraph(
        "calibration",
        &format!(
            "{} in {}, {} held out, seed {}",
            counted(text.tokens, "token"),
            counted(text.blocks, "block"),
            counted(text.held_out_tokens, "token"),
            text.seed
        ),
    );
    let used = Some(text.used()).filter(|used| !used.is_empty());
    let by_document = text.used_by_document().into_iter().filter(|_| !is_brief);
    for line in used.into_iter().chain(by_document) {
        out += &paragraph("", &line);
    }
    if let Some(plan) = Plan::of_artifact(artifact)? {
        let repeats = Plan::given(artifact)?.is_none();
        if !repeats {
            out += &paragraph("head plan", &plan.text());
        } else if !is_brief {
            out += &paragraph("head plan", &format!("{} (as recommended)", plan.text()));
        }
    }
    if is_brief {
        let sections = artifact.sections();
        let named = sections.map(|section| format!("{} ({})", section.kind.name(), size(section.bytes())));
        out += &paragraph("sections", &named.collect::<Vec<_>>().join(", "));
        return Ok(out);
    }
    for section in artifact.sections() {
        let (name, bytes) = (section.kind.name(), size(section.bytes()));
        let what = format!("{name}, {bytes}: {}", section.kind.describe(&section)?);
        out += &paragraph("section", &what);
        let constant = section.constant_heads().into_iter();
        let constant: Vec<String> = constant.map(|(layer, head)| format!("{layer}/{head}")).collect();
        if !constant.is_empty() {
            let heads = constant.join(", ");
            let what = format!("layer/KV head {heads}: all keys are equal, so full attention is used");
            out += &paragraph("constant", &what);
        }
    }
    Ok(out)
}

/// Width of the headings of paragraphs.
const INDENT: usize = 13;

/// Formats words in a paragraph beside a heading, in lines of at most 80 characters.
fn paragraph(heading: &str, text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        let room = columns() - INDENT;
        match lines[last].is_empty() || lines[last].chars().count() + 1 + word.chars().count() <= room {
            true if lines[last].is_empty() => lines[last] = word.to_owned(),
            true => lines[last] += &format!(" {word}"),
            false => lines.push(word.to_owned()),
        }
    }
    let lines = lines.iter().enumerate();
    let line =
        |(i, line): (usize, &String)| format!("{:<INDENT$}{line}\n", if i == 0 { heading } else { "" });
    lines.map(line).collect()
}

/// Lists every value of one head's report.
fn detail(section: &SectionView, head: &HeadReport) -> String {
    let mut out = format!(
        "\n{}, layer {}, KV head {}\n",
        section.kind.name(),
        head.layer,
        head.head
    );
    for (name, value) in head.report {
        let text = match value {
            Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(" "),
            Value::Object(items) => {
                let items = items.iter().map(|(key, value)| format!("{key} {}", shown(value)));
                items.collect::<Vec<_>>().join(", ")
            }
            other => shown(other),
        };
        out += &wrapped(&format!("  {name:<20} {text}"), columns());
        out.push('\n');
    }
    out
}

/// Shows a value of a report; four significant digits of a number that is not whole.
fn shown(value: &Value) -> String {
    match value.as_f64().filter(|_| value.is_f64()) {
        Some(x) => significant(x),
        None => value.to_string(),
    }
}

/// Formats a finite number with four significant digits.
fn significant(x: f64) -> String {
    // Rounding comes first: 9.9999 has the exponent of 10.
    let short = format!("{x:.3e}");
    let exponent: i32 = short
        .split_once('e')
        .and_then(|(_, e)| e.parse().ok())
        .unwrap_or(0);
    match exponent {
        -4..=3 => format!("{x:.*}", (3 - exponent) as usize),
        4..=6 => format!("{x:.0}"),
        _ => short,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_significant_digits() {
        for (x, expected) in [
            (0.0, "0.000"),
            (0.123_456_789, "0.1235"),
            (-0.001_234_56, "-0.001235"),
            (9.999_96, "10.00"),
            (123.456, "123.5"),
            (123_456.7, "123457"),
            (1.234_56e9, "1.235e9"),
            (1.234_56e-7, "1.235e-7"),
        ] {
            assert_eq!(significant(x), expected, "{x}");
        }
    }
}
