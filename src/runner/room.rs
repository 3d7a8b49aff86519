//! Whether the machine's memory has room for caches, before they are allocated.

use super::options::DecodeOptions;
use crate::error::{Error, Result};
use crate::heap::free_bytes;
use crate::method::Method;
use crate::model::ModelConfig;
use crate::wording::size;

/// More positions than any memory holds the keys of.
const LONGEST: usize = 1 << 40;

/// Returns the bytes of the keys and values of some positions.
pub fn row_bytes(config: &ModelConfig, options: &DecodeOptions, positions: usize) -> usize {
    let heads = config.n_layers() * config.n_kv_heads;
    let position = options.kv.bytes_per_position(config.head_dim);
    heads.saturating_mul(position).saturating_mul(positions)
}

/// Estimates the bytes of the method's indexes of some positions.
pub fn index_bytes(
    config: &ModelConfig,
    method: &dyn Method,
    options: &DecodeOptions,
    positions: usize,
) -> usize {
    let positions = positions.min(LONGEST);
    let heads =
        (0..config.n_layers()).flat_map(|layer| (0..config.n_kv_heads).map(move |head| (layer, head)));
    let of = |(layer, head)| {
        let place = options.place(config, layer, head);
        method.head(&place).bytes_for(&place, positions)
    };
    heads.map(of).fold(0, usize::saturating_add)
}

/// Checks that there is memory for keys, values and indexes of `needed` bytes, if `promised` bytes will be taken by others.
///
/// # Errors
/// The process may take less.
pub fn check(needed: usize, promised: usize) -> Result<()> {
    let free = free_bytes().saturating_sub(promised);
    match needed > free {
        false => Ok(()),
        true => Err(Error::memory(format!(
            "keys, values and indexes take {}, but only {} of memory are free",
            size(needed),
            size(free)
        ))
        .hint("use a smaller type for the cache, fewer positions, or fewer sequences at a time")),
    }
}
