//! `kvsmith pack`: merges section files into one artifact.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::{finish, open_model, output};
use crate::artifact::{self, Artifact};
use crate::calibration::model_manifest;
use crate::cmd::args::{Global, model_folder};
use crate::cmd::reading::read_plan;
use crate::error::Result;
use crate::method::plan::Plan;
use crate::method::sections::SECTIONS;

/// Arguments of `pack`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Section files to combine: one per section, or several that together have each layer of it once
    #[arg(required = true, value_name = "SECTION_FILE")]
    sections: Vec<PathBuf>,
    /// The model from which the sections were made: checkpoint folder, GGUF file, or id in the Hugging Face cache
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    model: PathBuf,
    /// How each KV head is to be served: a JSON file as of `run --head-plan`, which `run` then follows. Without it, the plan of
    /// the first section file that has one
    #[arg(long, value_name = "FILE.json")]
    head_plan: Option<PathBuf>,
    /// Artifact file to write
    #[arg(short, long, value_name = "ART.safetensors")]
    output: PathBuf,
}

/// Returns the first head plan of the files that does not only repeat a verdict, since verdicts are left out.
fn first_given(parts: &[Artifact]) -> Result<Option<Plan>> {
    for part in parts {
        if let Some(plan) = Plan::given(part)? {
            return Ok(Some(plan));
        }
    }
    Ok(None)
}

/// Runs `pack`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    global.cpu_only("pack")?;
    let inputs: Vec<&Path> = args
        .sections
        .iter()
        .chain([&args.model])
        .chain(&args.head_plan)
        .map(PathBuf::as_path)
        .collect();
    let output = output::create(&args.output, &inputs, global)?;
    let parts = args
        .sections
        .iter()
        .map(|path| Artifact::open_part(path, SECTIONS));
    let parts: Vec<Artifact> = parts.collect::<Result<_>>()?;
    let model = model_manifest(&open_model(&args.model, log)?, &log)?;
    for part in &parts {
        part.check_model(&model.fingerprint, model.sizes)?;
    }
    let plan = match &args.head_plan {
        Some(path) => Some(read_plan(path, model.sizes)?),
        None => first_given(&parts)?,
    };
    artifact::pack(output, &parts, plan.map(|plan| plan.json()))?;
    let sections = parts.iter().flat_map(Artifact::sections);
    let mut names: Vec<&str> = Vec::new();
    for section in sections {
        if !names.contains(&section.kind.name()) {
            names.push(section.kind.name());
        }
    }
    finish(
        global,
        &format!("wrote {}", args.output.display()),
        &args.output,
        &json!({ "artifact": args.output.display().to_string(), "sections": names, "device": "cpu" }),
    )
}
