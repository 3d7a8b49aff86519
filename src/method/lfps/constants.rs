//! Constants of lfps.

/// The decay per step if none is calibrated.
pub const GAMMA: f64 = 0.95;
/// The number of most recent positions that make the local estimate; they are always candidates.
pub const LOCAL: usize = 5;
/// A head is not tested for the bypass if its calibrated bypass rate is below this.
pub(super) const LEAST_BYPASS: f32 = 0.02;
