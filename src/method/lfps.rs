//! LFPS: candidates from decayed histograms of past attention, arXiv 2506.15704.

pub mod priors;
