//! Whether the machine's memory has room for caches, before they are allocated.

use super::options::Options;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::wording::size;

/// Returns the bytes of the keys and values of some positions.
pub fn bytes(config: &ModelConfig, options: &Options, positions: usize) -> usize {
    let heads = config.n_layers() * config.n_kv_heads;
    let position = options.kv.bytes_per_position(config.head_dim);
    heads.saturating_mul(position).saturating_mul(positions)
}

/// Checks that there is memory for caches of `needed` bytes, if `promised` bytes will be taken by others.
///
/// # Errors
/// The machine has less free memory. Where it does not tell how much it has, nothing is checked.
pub fn check(needed: usize, promised: usize) -> Result<()> {
    let free = available().map(|free| free.saturating_sub(promised));
    match free {
        Some(free) if needed > free => Err(Error::failed(format!(
            "keys and values take {}, but only {} of memory are free",
            size(needed),
            size(free)
        ))
        .hint("use a smaller type for the cache, fewer positions, or fewer sequences at a time")),
        _ => Ok(()),
    }
}

/// Returns the bytes of memory that the system can give without swapping, if it tells.
fn available() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: usize = line.split_whitespace().next()?.parse().ok()?;
    kilobytes.checked_mul(1024)
}
