//! Numbers as people write them: `6%`, `8K`, `1M`.

use std::borrow::Cow;

/// Writes a number as Rust reads it: without spaces around it, `6%` as 0.06, `8K` as 8192 and `1M` as 1048576.
pub fn plain(text: &str) -> Cow<'_, str> {
    let text = text.trim();
    let scaled = |units: &[char], by: f64| {
        let x: f64 = text.strip_suffix(units)?.trim_end().parse().ok()?;
        Some(Cow::Owned((x * by).to_string()))
    };
    // Divided rather than multiplied, a percentage is the number that its digits would give.
    let share = || {
        let x: f64 = text.strip_suffix('%')?.trim_end().parse().ok()?;
        Some(Cow::Owned((x / 100.0).to_string()))
    };
    share()
        .or_else(|| scaled(&['K', 'k'], 1024.0))
        .or_else(|| scaled(&['M', 'm'], 1024.0 * 1024.0))
        .unwrap_or(Cow::Borrowed(text))
}

/// Rounds to five significant digits, so that the last bits of sums, which depend on order and threads, are not stored.
pub fn five_digits(x: f64) -> f64 {
    format!("{x:.4e}").parse().unwrap_or(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_digits_stay() {
        assert_eq!(five_digits(0.123_456_78), 0.12346);
        assert_eq!(five_digits(0.0), 0.0);
        assert_eq!(five_digits(12_345_678.0), 12_346_000.0);
    }
}
