//! Seeds that do not depend on the order of the work.

/// Derives the seed of a head, so that the order of fitting does not matter (splitmix64).
pub fn head_seed(seed: u64, layer: usize, head: usize) -> u64 {
    let mut x = seed
        .wrapping_add((layer as u64) << 32)
        .wrapping_add(head as u64)
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
