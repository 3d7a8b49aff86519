//! `kvsmith report`: one page that shows what an artifact costs, what each method loses, and what each head does.

mod data;
mod evals;
mod heads;
mod page;
mod rows;

use std::path::{Path, PathBuf};

use serde_json::json;

use super::args::Global;
use super::{finish, output};
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::method::sections::SECTIONS;
use crate::wording::size;
use evals::Measured;

/// Arguments of `report`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Artifact, or section file
    #[arg(value_name = "ART")]
    artifact: PathBuf,
    /// What `kvsmith eval --json` printed with this artifact; may be given several times
    #[arg(long, value_name = "EVAL.json")]
    eval: Vec<PathBuf>,
    /// Another artifact of the same model, to list the differences
    #[arg(long, value_name = "ART2")]
    against: Option<PathBuf>,
    /// Page to write
    #[arg(short, long, value_name = "REPORT.html")]
    output: PathBuf,
}

/// Runs `report`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    global.without_device("report")?;
    let inputs: Vec<&Path> = [&args.artifact]
        .into_iter()
        .chain(&args.eval)
        .chain(&args.against)
        .map(PathBuf::as_path)
        .collect();
    let output = output::create(&args.output, &inputs, global)?;
    check_name(&args.output)?;
    let artifact = open(&args.artifact)?;
    let against = args.against.as_deref().map(open).transpose()?;
    if let Some(other) = &against {
        let model = &artifact.manifest.origin.model;
        other.check_model(&model.fingerprint, model.sizes).map_err(|e| {
            Error::invalid(e.to_string())
                .hint("--against compares two artifacts of one model; give another one")
        })?;
    }
    let read = |path: &PathBuf| Measured::read(path, &args.artifact, &artifact, global.log());
    let evals: Vec<Measured> = args.eval.iter().map(read).collect::<Result<_>>()?;
    let data = data::Sources {
        path: &args.artifact,
        artifact: &artifact,
        evals: &evals,
        against: args.against.as_deref().zip(against.as_ref()),
    };
    let sections = data.sections();
    let page = page::write(&data.json()?, &data.summary());
    output.finish(page.as_bytes())?;
    let shown = args.output.display().to_string();
    let document = json!({
        "device": "cpu", "report": shown, "bytes": page.len(), "sections": sections,
    });
    let note = format!("wrote {shown}, {}", size(page.len()));
    finish(global, &note, &args.output, &document)
}

/// Fails if the name of a page says that it is something else.
fn check_name(path: &Path) -> Result<()> {
    let Some(ending) = path.extension().and_then(|ending| ending.to_str()) else {
        return Ok(());
    };
    if ["html", "htm"].contains(&ending.to_ascii_lowercase().as_str()) {
        Ok(())
    } else {
        Err(Error::usage(format!(
            "a report is an HTML page, but {} ends in .{ending}",
            path.display()
        ))
        .hint("give a name that ends in .html; a browser prints the page as PDF"))
    }
}

/// Opens an artifact and checks every digest and every value of it.
fn open(path: &Path) -> Result<Artifact> {
    let artifact = Artifact::open(path, SECTIONS)?;
    artifact.verify()?;
    Ok(artifact)
}
