//! Whether the machine's memory has room for caches, before they are allocated.

use super::options::Options;
use crate::error::{Error, Result};
use crate::heap::free_bytes;
use crate::model::ModelConfig;
use crate::wording::size;

/// Returns the bytes of the keys and values of some positions, without the method's index.
pub fn bytes(config: &ModelConfig, options: &Options, positions: usize) -> usize {
    let heads = config.n_layers() * config.n_kv_heads;
    let position = options.kv.bytes_per_position(config.head_dim);
    heads.saturating_mul(position).saturating_mul(positions)
}

/// Checks that there is memory for keys and values of `needed` bytes, if `promised` bytes will be taken by others.
///
/// # Errors
/// The process may take less.
pub fn check(needed: usize, promised: usize) -> Result<()> {
    let free = free_bytes().saturating_sub(promised);
    match needed > free {
        false => Ok(()),
        true => Err(Error::memory(format!(
            "keys and values take {}, but only {} of memory are free",
            size(needed),
            size(free)
        ))
        .hint("use a smaller type for the cache, fewer positions, or fewer sequences at a time")),
    }
}
