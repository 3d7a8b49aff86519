//! What an artifact's verdict recommends.

use super::options::DecodeOptions;
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};
use crate::method::Method;
use crate::method::declaration::Ask;
use crate::method::named::Named;
use crate::method::params::MethodParams;
use crate::model::Model;

/// Prepares the method that an artifact recommends for a model, with the budget and the type of the cache that it was measured
/// with.
///
/// # Errors
/// The artifact is for another model, has no verdict, or one that recommends nothing.
pub fn recommended(
    artifact: &Artifact,
    model: &Model,
    seed: u64,
) -> Result<(Box<dyn Method>, DecodeOptions)> {
    let decoder = &model.decoder;
    artifact.check_model(&model.fingerprint()?, decoder.config.sizes())?;
    let verdict = artifact.manifest.quality.methods.as_ref().ok_or_else(|| {
        Error::not_found("the artifact has no verdict").hint("measure one, or choose a method and a budget")
    })?;
    let (row, of) = verdict.usual().ok_or_else(|| {
        let why = if verdict.dropped_all() {
            "every method was dropped after the first blocks"
        } else {
            "no method reads as little as was asked for"
        };
        Error::not_found(format!("the artifact's verdict recommends nothing: {why}"))
            .hint("measure larger shares of the bytes or longer blocks, or choose a method and a budget")
    })?;
    let params = MethodParams::default();
    let ask = Ask {
        artifact: Some(artifact),
        ropes: &decoder.ropes,
        sizes: decoder.config.sizes(),
        params: &params,
        seed,
    };
    let method = Named::of_row(row)?.prepare(&ask)?;
    let kv = KvType::named(&verdict.kv).unwrap_or(KvType::BF16);
    let options = DecodeOptions {
        packed: params.selfindex.layout(Some(artifact))?,
        ..DecodeOptions::new(Budget::Fraction(of.budget), kv)
    };
    Ok((method, options))
}
