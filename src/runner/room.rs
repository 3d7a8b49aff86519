//! Whether the machine's memory has room for caches, before they are allocated.

use super::options::DecodeOptions;
use crate::error::{Error, Result};
use crate::heap::free_bytes;
use crate::kv::Limits;
use crate::method::{Method, Place};
use crate::model::ModelConfig;
use crate::wording::size;

/// More positions than any memory holds the keys of.
const LONGEST: usize = 1 << 40;

/// Lists the KV heads of a model as their method sees them.
fn places<'a>(
    config: &'a ModelConfig,
    method: &'a dyn Method,
    options: &'a DecodeOptions,
) -> impl Iterator<Item = Place> + 'a {
    let heads =
        (0..config.n_layers()).flat_map(|layer| (0..config.n_kv_heads).map(move |head| (layer, head)));
    heads.map(move |(layer, head)| options.place(config, method, layer, head))
}

/// Returns the bytes of the keys and values of some positions.
pub fn row_bytes(
    config: &ModelConfig,
    method: &dyn Method,
    options: &DecodeOptions,
    positions: usize,
) -> usize {
    let of = |place: Place| {
        let Limits { sinks, window, .. } = place.limits;
        let (ends, d) = (sinks.saturating_add(window), place.head_dim);
        let kv = place.kv.in_context(positions, ends);
        let more = kv.more_per_end(d).saturating_mul(ends.min(positions));
        more.saturating_add(kv.bytes_per_position(d).saturating_mul(positions))
    };
    places(config, method, options)
        .map(of)
        .fold(0, usize::saturating_add)
}

/// Estimates the bytes of the method's indexes of some positions.
pub fn index_bytes(
    config: &ModelConfig,
    method: &dyn Method,
    options: &DecodeOptions,
    positions: usize,
) -> usize {
    let positions = positions.min(LONGEST);
    let of = |place: Place| method.head(&place).bytes_for(&place, positions);
    places(config, method, options)
        .map(of)
        .fold(0, usize::saturating_add)
}

/// Checks that there is memory for keys, values and indexes of `needed` bytes, if `promised` bytes will be taken by others.
///
/// # Errors
/// The process may take less.
pub fn check(needed: usize, promised: usize) -> Result<()> {
    let free = free_bytes().saturating_sub(promised);
    if needed <= free {
        Ok(())
    } else {
        Err(Error::memory(format!(
            "keys, values and indexes take {}, but only {} of memory are free",
            size(needed),
            size(free)
        ))
        .hint("use a smaller type for the cache, fewer positions, or fewer sequences at a time"))
    }
}
