//! Statistics of captured states: query second moments, whitening and codebooks.

pub mod kmeans;
pub mod linalg;
pub mod moments;
pub mod whiten;
