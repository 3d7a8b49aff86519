//! The parameters of selfindex and of the 2-bit cache.

use crate::kv::packed::{Center, FULL};
use crate::parameters::{Choice, SWITCH, Values, WHOLE, choices, parameters};

choices! {
    /// Where the centroids come from.
    pub enum CentroidSource {
        /// From one pass over the prompt, as in the paper.
        OnePass = "one-pass",
        /// From the artifact alone.
        Offline = "offline",
        /// No centroids: only the sign of each channel counts (ablation).
        Signs = "signs",
    }
}

parameters! {
    /// The parameters of selfindex and of the 2-bit cache.
    pub struct SelfIndexParams, "Method selfindex, and 2-bit caches" {
        /// Source of the centroids; offline needs an artifact with the section `sign`
        sign_centroids: CentroidSource = CentroidSource::OnePass, "NAME" in Values::OneOf(CentroidSource::WORDS);
        /// For selfindex and --kv 2bit: value that is subtracted from each channel of the keys before their signs are
        /// taken (default: as in the artifact, else median)
        center: Option<Center> = None, "CENTER" in Values::OneOf(Center::WORDS);
        /// For --kv 2bit: maximum number of positions that are also kept in f16. selfindex always attends some of them:
        /// one for every 38 positions of its budget, before the ranked positions
        sign_full: usize = FULL, "N" in WHOLE;
        /// For --kv 2bit: quantise keys like values, without their signs (ablation)
        plain_keys: bool = false, "" in SWITCH;
    }
}

impl SelfIndexParams {
    /// The parameters that describe caches whose keys have signs, by name, and whether the method itself uses them too.
    pub const OF_CACHES: [(&'static str, bool); 3] =
        [("center", true), ("sign_full", true), ("plain_keys", false)];

    /// Returns these parameters with those of `other` that describe the caches.
    pub fn with_caches_of(self, other: &Self) -> Self {
        Self {
            sign_centroids: self.sign_centroids,
            ..other.clone()
        }
    }
}
