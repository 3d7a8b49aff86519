//! Constants of the method.

/// Decay per step if none is calibrated.
pub const GAMMA: f64 = 0.95;
/// The number of most recent positions in the local estimate; they are always candidates.
pub const LOCAL: usize = 5;
/// A head whose calibrated bypass rate is below this is not tested.
pub(super) const LEAST_BYPASS: f32 = 0.02;
