//! Statistics of captured states: second moments of queries, whitening, and k-means codebooks.

pub mod kmeans;
pub mod linalg;
pub mod moments;
pub mod sampling;
pub mod seeds;
pub mod whiten;
