//! The data of the page: what `inspect --json` and `eval --json` say, and what only the artifact's tensors tell.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::evals::Measured;
use super::heads;
use crate::artifact::{Artifact, HeadReport, SectionView, USUAL_KL, Verdict};
use crate::cmd::inspect::{self, losses};
use crate::cmd::named::Named;
use crate::error::Result;
use crate::estimate::position_bytes;
use crate::kv::KvType;
use crate::kv::format::FORMATS;
use crate::kv::static_set::{SINKS, WINDOW};
use crate::method::registry::{METHODS, constant_bytes, oracle};
use crate::method::tail;

/// The longest context for which memory is shown.
const LONGEST: usize = 131_072;
/// The shortest context for which memory is shown, unless the model's is shorter.
const SHORTEST: usize = 256;
/// For how many contexts memory is shown at most.
const CONTEXTS: usize = 6;

/// Lists the contexts for which memory is shown: that of the model, if it is known and not above [`LONGEST`], and the
/// next smaller powers of two.
fn contexts(of_model: Option<usize>) -> Vec<usize> {
    let most = of_model.unwrap_or(LONGEST).clamp(1, LONGEST);
    let powers = (0..usize::BITS).map(|i| 1 << i);
    let smaller: Vec<usize> = powers.filter(|n| (SHORTEST..most).contains(n)).collect();
    let skipped = smaller.len().saturating_sub(CONTEXTS - 1);
    smaller.into_iter().skip(skipped).chain([most]).collect()
}

/// Members of a row of `inspect --json` that the page shows, beside its place.
const SHOWN: [&str; 12] = [
    "section",
    "layer",
    "head",
    "inertia",
    "held_out_inertia",
    "variance",
    "inertia_history",
    "iterations",
    "unused_codewords",
    "usage_entropy_bits",
    "sink_mean",
    "constant",
];

/// What the page is made from.
pub struct Sources<'a> {
    /// File of the artifact.
    pub path: &'a Path,
    /// The artifact.
    pub artifact: &'a Artifact,
    /// What was measured with it.
    pub evals: &'a [Measured],
    /// The artifact to compare it with, and its file.
    pub against: Option<(&'a Path, &'a Artifact)>,
}

impl Sources<'_> {
    fn verdict(&self) -> Option<&Verdict> {
        self.artifact.manifest.quality.methods.as_ref()
    }

    /// Returns the data of the page.
    pub fn json(&self) -> Result<Value> {
        let against = self.against.map(|(path, artifact)| {
            let mut document = shown(artifact);
            for row in document["rows"].as_array_mut().into_iter().flatten() {
                row.as_object_mut().map(|row| row.remove("inertia_history"));
            }
            json!({ "file": name(path), "inspect": document, "section_bytes": section_bytes(artifact) })
        });
        let evals = self.evals.iter();
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "file": name(self.path),
            "argument": quoted(&self.path.display().to_string()),
            "inspect": shown(self.artifact),
            "section_bytes": section_bytes(self.artifact),
            "recommended": self.recommended(),
            "usual_kl": self.verdict().map_or(USUAL_KL, Verdict::limit),
            "losses": self.verdict().map_or(losses::LOSSES.to_vec(), losses::losses),
            "oracle": oracle().as_str(),
            "timed": METHODS.iter().filter(|m| m.bench().is_some()).map(|m| m.as_str()).collect::<Vec<_>>(),
            "static_set": [SINKS, WINDOW],
            "serving": self.serving()?,
            "evals": evals.map(|of| json!({ "file": of.file, "document": of.document })).collect::<Vec<_>>(),
            "spectra": heads::spectra(self.artifact)?,
            "slash": heads::slash(self.artifact)?,
            "against": against,
        }))
    }

    /// Describes the recommendation as `inspect` does, for readers without scripts.
    pub fn summary(&self) -> String {
        self.verdict().map_or(String::new(), losses::recommendation)
    }

    /// Returns the number of the verdict's row that `run` takes without `--method` and `--budget`.
    fn recommended(&self) -> Option<usize> {
        let verdict = self.verdict()?;
        let (usual, _) = verdict.usual()?;
        verdict.rows.iter().position(|row| std::ptr::eq(row, usual))
    }

    /// Returns the bytes of caches and indexes, from which the page computes those at each context.
    fn serving(&self) -> Result<Value> {
        let model = &self.artifact.manifest.origin.model;
        let visible = |context: usize| -> usize {
            let layers = model.windows.iter();
            layers
                .map(|window| window.map_or(context, |most| most.min(context)))
                .sum()
        };
        // Those of one format, and the mixed ones that were measured.
        let judged = self.verdict().into_iter().flat_map(|verdict| &verdict.formats);
        let measured = self.evals.iter().filter_map(|of| of.document["kv"].as_str());
        let measured = measured.chain(judged.map(|of| of.kv.as_str()));
        let measured = measured.filter_map(KvType::named);
        let types = FORMATS.iter().map(|format| KvType::both(*format)).chain(measured);
        let caches: BTreeMap<String, usize> = types
            .map(|kv| (kv.to_string(), position_bytes(model.sizes, kv)))
            .collect();
        let mut constant = BTreeMap::new();
        for row in self.verdict().into_iter().flat_map(|verdict| &verdict.rows) {
            if let Some(named) = Named::parse(&row.method) {
                let tail = if named.tail {
                    tail::constant_bytes(self.artifact)?
                } else {
                    0
                };
                let own = constant_bytes(named.method, Some(self.artifact))?;
                constant.insert(row.method.clone(), own + tail);
            }
        }
        let contexts = contexts(model.max_position_embeddings);
        Ok(json!({
            "visible": contexts.iter().map(|n| visible(*n)).collect::<Vec<_>>(),
            "contexts": contexts,
            "position_bytes": caches,
            "constant_bytes": constant,
        }))
    }

    /// Names the parts of the page that have data.
    pub fn sections(&self) -> Vec<&'static str> {
        let rows = || self.evals.iter().flat_map(Measured::rows);
        let has = |key: &str, least: usize| {
            rows().any(|row| row[key].as_array().is_some_and(|list| list.len() >= least))
        };
        let losses = self.verdict().is_some() || rows().any(|row| row["kl"].is_number());
        let heads = heads::are_described(self.artifact);
        let per_head = self.verdict().is_some() || has("per_head", 1);
        [
            ("decision", losses),
            ("front", losses),
            ("lengths", self.lengths() > 1),
            ("positions", has("by_position", 2)),
            ("blocks", has("kl_by_block", 2)),
            ("turns", has("by_turn", 2) || has("needle_accuracy_by_turn", 2)),
            ("questions", rows().any(|row| row["needle_accuracy"].is_number())),
            ("map", heads || per_head),
            ("head", heads),
            ("provenance", true),
            ("differences", self.against.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, is_there)| is_there.then_some(name))
        .collect()
    }

    /// Counts the lengths of text with a loss.
    fn lengths(&self) -> usize {
        let texts = self
            .evals
            .iter()
            .filter(|of| of.rows().any(|row| row["kl"].is_number()));
        let mut lengths: Vec<u64> = texts.filter_map(|of| length(&of.document)).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths.len()
    }
}

/// Returns the tokens of a block; older documents tell them only of all blocks together.
fn length(document: &Value) -> Option<u64> {
    let all = || Some(document["tokens"].as_u64()? / document["blocks"].as_u64()?.max(1));
    document["longest_block"].as_u64().or_else(all)
}

/// Returns what `inspect --json` prints, reduced to what the page shows.
fn shown(artifact: &Artifact) -> Value {
    let sections: Vec<(SectionView, Vec<HeadReport>)> = artifact
        .sections()
        .map(|section| (section, section.reports()))
        .collect();
    let mut document = inspect::document(artifact, true, &sections);
    for row in document["rows"].as_array_mut().into_iter().flatten() {
        if let Some(members) = row.as_object_mut() {
            members.retain(|key, _| SHOWN.contains(&key.as_str()));
        }
    }
    document
}

/// Returns the bytes of each section.
fn section_bytes(artifact: &Artifact) -> BTreeMap<&'static str, usize> {
    let sections = artifact.sections();
    sections
        .map(|section| (section.kind.name(), section.bytes()))
        .collect()
}

/// Returns the name of a file without its folder.
fn name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

/// Quotes an argument for a shell where it needs that.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./+:@,%=".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_do_not_exceed_the_models() {
        let usual = [4096, 8192, 16_384, 32_768, 65_536, 131_072];
        for unlimited in [None, Some(131_072), Some(1 << 20)] {
            assert_eq!(contexts(unlimited), usual);
        }
        assert_eq!(contexts(Some(40_960)), [2048, 4096, 8192, 16_384, 32_768, 40_960]);
        assert_eq!(contexts(Some(2048)), [256, 512, 1024, 2048]);
        assert_eq!(contexts(Some(100)), [100]);
    }

    #[test]
    fn arguments_are_quoted_where_a_shell_would_divide_them() {
        assert_eq!(quoted("lab/main-2.safetensors"), "lab/main-2.safetensors");
        assert_eq!(quoted("my art"), "'my art'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted("$(x)"), "'$(x)'");
    }
}
