//! Arbitrary numbers for tests.

/// Returns a linear congruential generator; its upper bits are more random than its lower bits.
pub fn numbers(seed: u32) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state
    }
}

/// Returns `n` numbers in [-1, 1).
pub fn values(n: usize, seed: u32) -> Vec<f32> {
    let mut next = numbers(seed);
    (0..n)
        .map(|_| (next() >> 8) as f32 / (1 << 23) as f32 - 1.0)
        .collect()
}
