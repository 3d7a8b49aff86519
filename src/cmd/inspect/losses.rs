//! The verdict of an artifact as text: what to use, what each method loses, and which heads are weak.

use super::paragraph;
use crate::artifact::{Artifact, FormatLoss, Measured, MethodLoss, OtherLosses, USUAL_KL, Verdict, share};
use crate::cmd::verdict::{cache, cautions};
use crate::error::Result;
use crate::method::registry::plain_window;
use crate::wording::counted;

/// The losses, in nats, for which a method is recommended; a verdict with another limit takes this one in place of the
/// second.
pub(in crate::internal::cmd) const LOSSES: [f64; 3] = [0.1, USUAL_KL, 0.01];

/// A head with at least this share of its attention in the sinks and the window has nothing to gain from an index.
const SETTLED: f64 = 0.99;

/// How many heads are listed as the weakest.
const WORST: usize = 5;

/// How many heads are listed by layer and KV head.
const LISTED: usize = 8;

/// Lists the losses for which a verdict has recommendations, the largest first.
pub(in crate::internal::cmd) fn losses(verdict: &Verdict) -> Vec<f64> {
    let mut losses = [LOSSES[0], verdict.limit(), LOSSES[2]].to_vec();
    losses.sort_by(|a, b| b.total_cmp(a));
    losses.dedup();
    losses
}

/// Says what to use for some losses, and what that rests on.
pub fn recommendation(verdict: &Verdict) -> String {
    let usual = verdict.usual();
    let limit = verdict.limit();
    if verdict.dropped_all() {
        return paragraph(
            "recommended",
            "nothing: every method was dropped after the first blocks",
        );
    }
    let mut out = String::new();
    let losses = losses(verdict);
    let setting = |loss: f64| verdict.within(loss).map(|(row, of)| flags(row, of));
    for (i, &loss) in losses.iter().enumerate() {
        // What serves for a smaller loss is said there alone.
        let below = losses.get(i + 1).and_then(|below| setting(*below));
        if below.is_some() && below == setting(loss) {
            continue;
        }
        let heading = if out.is_empty() { "recommended" } else { "" };
        let usual = setting(limit);
        let is_usual = usual.is_some() && setting(loss) == usual;
        let nothing = || "nothing measured; measure larger --verdict-reads".to_owned();
        let what = setting(loss).unwrap_or_else(nothing);
        let mark = if is_usual { " *" } else { "" };
        out += &format!("{heading:<12} KL <= {loss:<5} {what}{mark}\n");
    }
    out += &match usual {
        Some((row, of)) if verdict.within(limit).is_none() => format!(
            "{0:<12} by default, `run` uses the smallest KL, {1}:\n{0:<12} {2}\n",
            "",
            of.kl,
            flags(row, of)
        ),
        _ => String::new(),
    };
    if let Some((_, of)) = usual {
        let mark = if verdict.within(limit).is_some() {
            "* is "
        } else {
            ""
        };
        out += &paragraph(
            "",
            &format!(
                "{mark}the setting that `run` uses by default: in {:.0}% of the steps, it changes the most probable token (KL is in nats)",
                100.0 * (1.0 - of.top1_equal)
            ),
        );
        for line in cache(verdict, of).into_iter().chain(cautions(verdict)) {
            out += &paragraph("", &line);
        }
    }
    out
}

/// Names a row by the flags of `run`.
fn flags(row: &MethodLoss, of: &Measured) -> String {
    let (name, tail) = match row.method.strip_suffix("+tail") {
        Some(name) => (name, " --tail"),
        None => (row.method.as_str(), ""),
    };
    format!(
        "--method {name}{tail} --budget {}, reads {:.1}%",
        of.budget,
        100.0 * row.bytes_read_fraction
    )
}

/// Lists what every method lost, and the heads that are weak.
pub fn table(verdict: &Verdict, artifact: &Artifact) -> Result<String> {
    let mut out = format!(
        "\nmethods: {} of text, {} steps, {} cache, {} sinks, window of {}\n",
        counted(verdict.blocks, "block"),
        verdict.steps,
        verdict.kv,
        verdict.sinks,
        verdict.window
    );
    out += "method          budget   read      KL (95% interval)    KL p99   top-1 answered\n";
    let mut rows: Vec<&MethodLoss> = verdict.rows.iter().collect();
    let loss = |row: &MethodLoss| row.measured.as_ref().map_or(f64::INFINITY, |of| of.kl);
    rows.sort_by(|a, b| {
        let target = a.reads_target.total_cmp(&b.reads_target);
        target
            .then(b.oracle.cmp(&a.oracle))
            .then(loss(a).total_cmp(&loss(b)))
    });
    for row in rows {
        let name = named(row);
        out += &match &row.measured {
            Some(of) => measured(&name, row, of),
            None => format!(
                "{:<15}      - smallest budget reads {:.1}%, above the target of {:.1}%\n",
                row.method,
                100.0 * row.bytes_read_fraction,
                100.0 * row.reads_target
            ),
        };
    }
    out += &formats(verdict);
    out += &others(verdict);
    out += &heads(verdict, artifact)?;
    Ok(out)
}

/// Lists what full attention lost over caches of other formats.
fn formats(verdict: &Verdict) -> String {
    if verdict.formats.is_empty() {
        return String::new();
    }
    let mut out = "\nfull attention over caches of other types\n".to_owned()
        + "--kv                     size      KL (95% interval)    KL p99   top-1 answered\n";
    for FormatLoss {
        kv,
        size_fraction,
        measured,
    } in &verdict.formats
    {
        out += &format!("{kv:<22} {:>5.1}% {}", 100.0 * size_fraction, losses_of(measured));
    }
    out
}

/// Formats what a row lost on the blocks of text.
fn measured(name: &str, row: &MethodLoss, of: &Measured) -> String {
    let read = 100.0 * row.bytes_read_fraction;
    format!("{name:<15} {:.4} {read:>5.1}% {}", of.budget, losses_of(of))
}

/// Formats losses on the blocks of text, and answers.
fn losses_of(of: &Measured) -> String {
    let interval = of.intervals.map_or(String::new(), |of| {
        let digits = if of.kl[1] < 10.0 { 4 } else { 1 };
        format!("({:.digits$} to {:.digits$})", of.kl[0], of.kl[1])
    });
    let answered = match (&of.probe, of.dropped_after) {
        (Some(probe), _) => format!("{:.1}%", 100.0 * probe.accuracy),
        (None, Some(_)) => "dropped".to_owned(),
        (None, None) => "-".to_owned(),
    };
    format!(
        "{:>7.4} {interval:<18} {:>5.3} {:>6.1}% {answered:>8}\n",
        of.kl,
        of.kl_p99,
        100.0 * of.top1_equal,
    )
}

/// Lists the means on the other texts.
fn others(verdict: &Verdict) -> String {
    let mut out = String::new();
    for texts in verdict.texts.iter().skip(1) {
        let kind = if texts.kind == "uuid" { "UUIDs" } else { "text" };
        out += &format!(
            "\nmeans on {} of {} tokens of {kind}, {} steps\n",
            counted(texts.blocks, "block"),
            texts.length,
            texts.steps
        );
        out += "method          budget   read      KL  KL p99   top-1\n";
        for row in &verdict.rows {
            let Some(of) = &row.measured else {
                continue;
            };
            let is_same = |of: &&OtherLosses| (&of.kind, of.length) == (&texts.kind, texts.length);
            if let Some(loss) = of.others.iter().find(is_same) {
                out += &format!(
                    "{:<15} {:.4} {:>5.1}% {:>7.4} {:>7.3} {:>6.1}%\n",
                    named(row),
                    of.budget,
                    100.0 * loss.bytes_read_fraction,
                    loss.kl,
                    loss.kl_p99,
                    100.0 * loss.top1_equal
                );
            }
        }
    }
    out
}

/// Names the method of a row.
fn named(row: &MethodLoss) -> String {
    format!("{}{}", row.method, if row.oracle { " bound" } else { "" })
}

/// Shows what every method lost at one KV head.
pub fn of_head(verdict: &Verdict, layer: usize, head: usize) -> String {
    let mut out = format!("\nmethods at layer {layer}, KV head {head}\n");
    out += "method          budget   read  recall    mass  output error\n";
    for row in &verdict.rows {
        let Some(of) = &row.measured else {
            continue;
        };
        let name = named(row);
        let at = |values: &[Vec<f64>]| 100.0 * values[layer][head];
        out += &format!(
            "{name:<15} {:.4} {:>5.1}% {:>6.1}% {:>6.1}% {:>12.1}%\n",
            of.budget,
            100.0 * row.bytes_read_fraction,
            at(&of.heads.recall),
            at(&of.heads.mass),
            at(&of.heads.output_error),
        );
    }
    out
}

/// Lists the heads that lose most with the recommended method, and those for which nothing is to be gained.
fn heads(verdict: &Verdict, artifact: &Artifact) -> Result<String> {
    let mut out = String::new();
    if let Some((row, of)) = verdict.usual() {
        let mut ranked: Vec<(f64, usize, usize)> = Vec::new();
        for (layer, errors) in of.heads.output_error.iter().enumerate() {
            ranked.extend(
                errors
                    .iter()
                    .enumerate()
                    .map(|(head, error)| (*error, layer, head)),
            );
        }
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        out += &format!(
            "\nheads with the largest output error, with {} --budget {}\n",
            row.method, of.budget
        );
        for (error, layer, head) in ranked.into_iter().take(WORST) {
            out += &format!(
                "  layer {layer}  head {head}  output error {}, attends to {} of the attention mass\n",
                share(error),
                share(of.heads.mass[layer][head])
            );
        }
    }
    let least = verdict
        .rows
        .iter()
        .filter(|row| row.method == plain_window().as_str());
    let least = least.filter_map(|row| row.measured.as_ref());
    let least = least.min_by(|a, b| a.budget.total_cmp(&b.budget));
    if let Some(of) = least {
        let settled = places(&of.heads.mass, |mass| *mass >= SETTLED);
        out += &list(
            "that gain nothing from an index (first and last positions get 99% of attention)",
            &settled,
        );
    }
    for section in artifact.sections() {
        if let Some((what, heads)) = section.kind.notable_heads(&section.reports())? {
            out += &list(what, &heads);
        }
    }
    Ok(out)
}

/// Lists layer and KV head of the heads whose values are wanted.
fn places(values: &[Vec<f64>], wanted: fn(&f64) -> bool) -> Vec<(usize, usize)> {
    let layers = values.iter().enumerate();
    let heads = layers.flat_map(|(layer, heads)| {
        let heads = heads.iter().enumerate().filter(move |(_, value)| wanted(value));
        heads.map(move |(head, _)| (layer, head))
    });
    heads.collect()
}

/// Counts heads and names the first ones, as layer/KV head.
fn list(what: &str, heads: &[(usize, usize)]) -> String {
    if heads.is_empty() {
        return String::new();
    }
    let shown = heads
        .iter()
        .take(LISTED)
        .map(|(layer, head)| format!("{layer}/{head}"));
    let shown: Vec<String> = shown.collect();
    let more = if heads.len() > LISTED { " .." } else { "" };
    format!(
        "KV heads {what}: {}\n  layer/head {}{more}\n",
        heads.len(),
        shown.join(" ")
    )
}
