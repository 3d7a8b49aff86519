//! What an artifact's verdict recommends.

use super::options::DecodeOptions;
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};
use crate::method::Method;
use crate::method::declaration::Ask;
use crate::method::params::MethodParams;
use crate::method::plan::Plan;
use crate::method::rotation;
use crate::model::Model;

/// Prepares the methods of an artifact's head plan for a model, with the budgets and the row formats of the plan. A file
/// without a plan is served as its verdict recommends.
///
/// # Errors
/// The artifact is for another model, or has neither a plan nor a verdict that recommends something.
pub fn recommended(
    artifact: &Artifact,
    model: &Model,
    seed: u64,
) -> Result<(Box<dyn Method>, DecodeOptions)> {
    let decoder = &model.decoder;
    artifact.check_model(&model.fingerprint()?, decoder.config.sizes())?;
    let plan = plan(artifact)?;
    let params = MethodParams::default();
    let ask = Ask {
        artifact: Some(artifact),
        ropes: &decoder.ropes,
        sizes: decoder.config.sizes(),
        params: &params,
        seed,
    };
    // What all KV heads have in common; a plan in which they differ has its own for each.
    let options = DecodeOptions {
        limits: plan.limits(Budget::USUAL),
        packed: params.selfindex.layout(Some(artifact))?,
        maps: rotation::maps(Some(artifact), plan.formats())?,
        ..DecodeOptions::new(Budget::USUAL, plan.kv().unwrap_or(KvType::BF16))
    };
    Ok((plan.prepare(&ask)?, options))
}

/// Returns the artifact's head plan; of a file without one, what its verdict recommends.
fn plan(artifact: &Artifact) -> Result<Plan> {
    if let Some(plan) = Plan::of_artifact(artifact)? {
        return Ok(plan);
    }
    let verdict = artifact.manifest.quality.methods.as_ref().ok_or_else(|| {
        Error::not_found("the artifact has no verdict").hint("measure one, or choose a method and a budget")
    })?;
    Plan::recommended(verdict, artifact.sizes)?.ok_or_else(|| {
        let why = if verdict.dropped_all() {
            "every method was dropped after the first blocks"
        } else {
            "no method reads as little as was asked for"
        };
        Error::not_found(format!("the artifact's verdict recommends nothing: {why}"))
            .hint("measure larger shares of the bytes or longer blocks, or choose a method and a budget")
    })
}
