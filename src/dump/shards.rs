//! Checks that folders are the shards of one dump, and joins their tokens.

use super::read::Part;
use super::{DumpManifest, DumpOptions};
use crate::corpus::{Corpus, CorpusManifest, Documents};
use crate::error::{Error, Result};

/// Checks that folders, sorted by shard, are one dump, or all shards of one dump.
pub(super) fn check_shards(parts: &[Part]) -> Result<()> {
    let [first, others @ ..] = parts else {
        return Ok(());
    };
    let Some(shard) = &first.manifest.shard else {
        let Some(other) = others.first() else {
            return Ok(());
        };
        let error = Error::mismatch(format!(
            "{} and {} are not shards of one dump",
            first.dir.display(),
            other.dir.display()
        ));
        return Err(error.hint("give one dump folder, or all folders of `kvsmith dump ⟨shard=I/N⟩`"));
    };
    for other in others {
        let (a, b) = (&first.manifest, &other.manifest);
        let count = |manifest: &DumpManifest| manifest.shard.as_ref().map(|shard| shard.count);
        for (what, same) in [
            ("the model", a.origin.model == b.origin.model),
            ("the text", a.origin.calibration == b.origin.calibration),
            ("⟨precision⟩", a.origin.precision == b.origin.precision),
            ("the version of kvsmith", a.tool_version == b.tool_version),
            ("the device", a.device == b.device),
            (
                "⟨queries⟩, ⟨values⟩, ⟨dtype⟩ or ⟨wrope_position⟩",
                a.options == b.options,
            ),
            ("the number of shards", count(a) == count(b)),
        ] {
            if !same {
                let error = Error::mismatch(format!(
                    "{} and {} are of different dumps: {what} differs",
                    first.dir.display(),
                    other.dir.display()
                ));
                return Err(error.hint(again(b, "SHARD")));
            }
        }
    }
    let indices = parts
        .iter()
        .flat_map(|part| &part.manifest.shard)
        .map(|of| of.index);
    let indices: Vec<usize> = indices.collect();
    if let Some(i) = indices.windows(2).position(|pair| pair[0] == pair[1]) {
        let [a, b] = [&parts[i].dir, &parts[i + 1].dir].map(|dir| dir.display());
        let error = Error::mismatch(format!(
            "{a} and {b} are both shard {}/{}",
            indices[i], shard.count
        ));
        return Err(error.hint("give each shard once"));
    }
    let missing = || (0..shard.count).filter(|index| indices.binary_search(index).is_err());
    let Some(index) = missing().next() else {
        return Ok(());
    };
    let named: Vec<String> = missing().take(8).map(|index| index.to_string()).collect();
    let more = if missing().count() > named.len() {
        ", .."
    } else {
        ""
    };
    let error = Error::not_found(format!(
        "{} of {} shards of the dump are missing: {}{more}",
        missing().count(),
        shard.count,
        named.join(", ")
    ));
    Err(error.hint(again(&first.manifest, &format!("{index}/{}", shard.count))))
}

/// Says how to make a shard again.
fn again(manifest: &DumpManifest, shard: &str) -> String {
    let DumpOptions {
        queries,
        values,
        dtype,
        wrope_position,
    } = manifest.options;
    let text = &manifest.origin.calibration;
    let flag = |given: bool, flag: &'static str| if given { flag } else { "" };
    let precision = manifest.origin.precision.map_or_else(String::new, |precision| {
        format!(" ⟨precision={}⟩", precision.as_str())
    });
    format!(
        "make it with `kvsmith dump ⟨model=DIR⟩ TEXT{}{}{precision} ⟨dtype={}⟩ ⟨wrope_position={wrope_position}⟩ ⟨seq_len={}⟩ ⟨seed={}⟩ ⟨shard={shard}⟩ ⟨output=DIR⟩`, and the same model and text as for the others",
        flag(queries, " ⟨queries⟩"),
        flag(values, " ⟨values⟩"),
        dtype.name().to_lowercase(),
        text.seq_len,
        text.seed,
    )
}

/// Joins the tokens of all parts, and checks them against the manifest.
pub(super) fn join_blocks(
    parts: &[Part],
    text: &CorpusManifest,
) -> std::result::Result<(Vec<bool>, Corpus), &'static str> {
    let (mut ids, mut block_start, mut held_out) = (Vec::new(), vec![0], Vec::new());
    for part in parts {
        let blocks = block_start.len() - 1..block_start.len() + part.block_start.len() - 2;
        if part
            .manifest
            .shard
            .as_ref()
            .is_some_and(|shard| shard.blocks != blocks)
        {
            return Err("`shard` does not match tokens.safetensors");
        }
        let first = u32::try_from(ids.len()).map_err(|_| "the shards have more than 2^32 tokens")?;
        let starts = part.block_start[1..].iter().map(|start| start.checked_add(first));
        let starts: Option<Vec<u32>> = starts.collect();
        block_start.extend(starts.ok_or("the shards have more than 2^32 tokens")?);
        ids.extend_from_slice(&part.ids);
        held_out.extend_from_slice(&part.held_out);
    }
    let documents = Documents::from_manifest(text, block_start.len() - 1);
    let corpus = Corpus {
        ids,
        block_start,
        held_out: text.held_out.clone(),
        seq_len: text.seq_len,
        seed: text.seed,
        documents,
    };
    let kept: Vec<bool> = held_out.iter().map(|held_out| *held_out == 0).collect();
    let is_right = || {
        let own = corpus.manifest();
        own == *text && (&own.kinds, &own.documents) == (&text.kinds, &text.documents)
    };
    if corpus.is_consistent() && is_right() && corpus.kept() == kept {
        Ok((kept, corpus))
    } else {
        Err("`calibration` does not match tokens.safetensors")
    }
}
