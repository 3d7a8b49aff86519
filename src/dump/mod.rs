//! The dump folder: captured states of every layer, their tokens, and the query moments.

mod layer;
pub mod moments;
mod read;
mod shards;
mod write;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

pub use self::layer::{LayerDump, State};
pub use self::read::{Dump, DumpSummary, summary};
pub use self::write::{DumpJob, NewDump, is_done, write};
use crate::corpus::Origin;
use crate::disk::FolderKind;
use crate::float::Float;
use crate::model::Sizes;
use crate::store::{FileDigest, Spec};

/// Version of the folder's format.
pub const FORMAT: u64 = 1;
/// Name of the file that completes a dump.
pub const MANIFEST: &str = "manifest.json";
/// Name of the file of the tokens.
pub const TOKENS: &str = "tokens.safetensors";
/// Name of the file of the query moments.
pub const MOMENTS: &str = "moments.safetensors";

/// Which states a dump keeps, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpOptions {
    /// Keep `q_pre`.
    pub queries: bool,
    /// Keep `v`.
    pub values: bool,
    /// Element type of the states.
    pub dtype: Float,
    /// The WRoPE position of the query moments.
    pub wrope_position: usize,
}

/// The content of `manifest.json`.
#[derive(Serialize, Deserialize)]
struct DumpManifest {
    format: u64,
    kind: String,
    tool_version: String,
    /// The device that ran the model.
    device: String,
    /// Length and digest of every other file.
    files: BTreeMap<String, FileDigest>,
    /// The model and the whole text, also in the dump of a shard.
    #[serde(flatten)]
    origin: Origin,
    #[serde(flatten)]
    options: DumpOptions,
    /// The part of the text that this folder has; absent if it has all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shard: Option<Shard>,
}

/// The most shards of a text.
pub const MAX_SHARDS: usize = 1 << 20;

/// The part of a text that one task of several dumps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Number of the shard, from 0.
    pub index: usize,
    /// Number of shards.
    pub count: usize,
    /// Its blocks, as numbered in the whole text.
    pub blocks: Range<usize>,
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

/// How unfinished dump folders are named and marked, and which files they hold.
static UNFINISHED: FolderKind = FolderKind {
    name: "dump",
    mark: "unfinished.json",
    holds: |name| [TOKENS, MOMENTS, MANIFEST].contains(&name) || is_layer_file(name),
};

/// Names a layer's file.
pub fn layer_file(layer: usize) -> String {
    format!("layer-{layer:05}.safetensors")
}

/// Tells whether a name is one that [`layer_file`] gives.
pub fn is_layer_file(name: &str) -> bool {
    let number = name
        .strip_prefix("layer-")
        .and_then(|rest| rest.strip_suffix(".safetensors"));
    let layer = number.and_then(|number| number.parse().ok());
    layer.is_some_and(|layer| layer_file(layer) == name)
}

/// Describes the sums of one layer's file of a shard of `blocks` blocks.
pub fn sum_specs(sizes: Sizes, blocks: usize) -> Vec<Spec> {
    let (g, d) = (sizes.n_kv_heads, sizes.head_dim);
    let [pre, rope, count] = layer::BLOCK_SUMS;
    vec![
        Spec::new::<f64>(pre, &[blocks, g, d, d]),
        Spec::new::<f64>(rope, &[blocks, g, d, d]),
        Spec::new::<u64>(count, &[blocks, g]),
    ]
}

/// Describes the states of one layer's file.
pub fn layer_specs(sizes: Sizes, n: usize, options: &DumpOptions) -> Vec<Spec> {
    let (h, g, d) = (sizes.n_heads, sizes.n_kv_heads, sizes.head_dim);
    let dtype = match options.dtype {
        Float::F32 => Dtype::F32,
        Float::F16 => Dtype::F16,
        Float::Bf16 => Dtype::BF16,
    };
    let mut specs = vec![Spec::with_dtype("k_pre", dtype, &[g, n, d])];
    if options.queries {
        specs.push(Spec::with_dtype("q_pre", dtype, &[h, n, d]));
    }
    if options.values {
        specs.push(Spec::with_dtype("v", dtype, &[g, n, d]));
    }
    specs
}
