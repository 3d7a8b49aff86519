//! How many codewords a codebook has by default.

/// Number of codewords that `codebook` fits by default.
pub const CODEWORDS: usize = 4096;

/// The longest context that `calibrate` takes a size for by default, in tokens.
pub const LONGEST_CONTEXT: usize = 32_768;

/// With fewer calibration keys per codeword than this, a codebook fits its own text better than other text. It always
/// does, and the more so the fewer the keys.
pub(super) const KEYS_PER_CODEWORD: usize = 15;

/// Returns the share of the bytes of a cache with `context` positions that a codebook of `size` codewords takes: `size`
/// codewords of d channels, over the keys and values of d channels each. Both are in 16 bits per number, so the share
/// does not depend on d.
pub fn share_of_bytes(size: usize, context: usize) -> f64 {
    size as f64 / (2 * context.max(1)) as f64
}

/// Returns the number of codewords that `calibrate` fits by default: the power of two from 256 to 4,096 whose codebook
/// takes nearest to 1.5% of the bytes ([`share_of_bytes`]) of a cache with `context` positions, but at most one
/// codeword per 15 of the `kept` tokens of the fit. Of two sizes equally near to 1.5%, takes the smaller one. If the
/// text limits the size, takes the largest power of two within the limit, which may be below 256.
pub fn codewords(context: usize, kept: usize) -> usize {
    // 200 N times the distance of M / 2N from 3 / 200.
    let distance = |size: &usize| (100 * size).abs_diff(context.saturating_mul(3));
    let nearest = (8..=12).map(|bits| 1 << bits).min_by_key(distance);
    let most = (kept / KEYS_PER_CODEWORD).max(1);
    nearest.unwrap_or(CODEWORDS).min(1 << most.ilog2())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enough text for any size.
    const MUCH: usize = 15 << 12;

    #[test]
    fn a_codebook_takes_nearest_to_1_5_percent_of_the_bytes() {
        let sizes = [1, 2048, 8192, 16_384, 32_768, 65_536, 131_072, usize::MAX].map(|n| codewords(n, MUCH));
        assert_eq!(sizes, [256, 256, 256, 512, 1024, 2048, 4096, 4096]);
        // By trying every size.
        for context in (100..200_000).step_by(97) {
            let far = |size: usize| (share_of_bytes(size, context) - 0.015).abs();
            let chosen = far(codewords(context, MUCH));
            let sizes = [256, 512, 1024, 2048, 4096];
            assert!(sizes.iter().all(|size| chosen <= far(*size) + 1e-15), "{context}");
        }
        // 12,800 positions are equally far from 256 and 512 codewords: 1% and 2%.
        assert_eq!(
            [12_799, 12_800, 12_801].map(|n| codewords(n, MUCH)),
            [256, 256, 512]
        );
        assert_eq!(share_of_bytes(256, 8192), 1.0 / 64.0);
    }

    #[test]
    fn every_codeword_has_15_tokens() {
        for (kept, size) in [
            (MUCH - 1, 2048),
            (15 * 1024, 1024),
            (15 * 1024 - 1, 512),
            (3840, 256),
            (3839, 128),
            (59, 2),
            (29, 1),
            (0, 1),
        ] {
            assert_eq!(codewords(1 << 20, kept), size, "{kept}");
            assert!(codewords(8192, kept) <= size);
        }
        assert_eq!(codewords(8192, 3840), 256);
    }
}
