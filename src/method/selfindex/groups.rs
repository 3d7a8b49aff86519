//! Groups of channels, and the sign patterns that each can have.

/// Name of the section in an artifact.
pub const SECTION: &str = "sign";
/// Channels per pattern.
pub const GROUP: usize = 4;
/// Patterns per group of channels.
pub const PATTERNS: usize = 1 << GROUP;

/// Returns 1 if bit `e` of a pattern is set, else -1.
pub(super) fn sign(pattern: usize, e: usize) -> f64 {
    if pattern >> e & 1 == 1 { 1.0 } else { -1.0 }
}
