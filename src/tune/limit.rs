//! What a plan is bounded by.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::error::Error;
use crate::numbers::plain;
use crate::parameters::choices;

choices! {
    /// A number that a plan has.
    pub enum Quantity {
        /// What memory moves in a step for rows and indexes, as a share of all visible rows in bf16.
        Bytes = "bytes",
        /// What rows and indexes take, as a share of all rows in bf16.
        Memory = "memory",
        /// The milliseconds of a step.
        Ms = "ms",
        /// The mean KL divergence of the predictions from those of full attention, in nats.
        Kl = "kl",
    }
}

impl Quantity {
    /// Says how much of it there is.
    pub fn text(self, value: f64) -> String {
        match self {
            Self::Kl => format!("KL {value:.4} nats"),
            Self::Bytes => format!("moves {:.2}% of the bytes", 100.0 * value),
            Self::Memory => format!("takes {:.1}% of the memory", 100.0 * value),
            Self::Ms => format!("{value:.1} ms a step"),
        }
    }
}

/// The most that a plan may have of one quantity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Limit {
    /// Of what.
    pub of: Quantity,
    /// How much: nats, a share, or milliseconds; above 0.
    pub most: f64,
}

impl FromStr for Limit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::usage(format!("limit `{text}` is invalid")).hint(
                "kl=X (nats), bytes=X or memory=X (shares of what full attention over bf16 takes, such as 0.05 or 5%) or ms=X (milliseconds of a step), X above 0",
            )
        };
        let (name, value) = text.split_once('=').ok_or_else(wrong)?;
        let of = Quantity::named(name.trim()).ok_or_else(wrong)?;
        let most: f64 = plain(value).parse().map_err(|_| wrong())?;
        let is_valid = most.is_finite() && most > 0.0;
        is_valid.then_some(Self { of, most }).ok_or_else(wrong)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.of, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_name_a_quantity() {
        let of = |text: &str| text.parse::<Limit>().map(|limit| (limit.of, limit.most));
        assert_eq!(of("kl=0.01").unwrap(), (Quantity::Kl, 0.01));
        assert_eq!(of(" bytes = 5% ").unwrap(), (Quantity::Bytes, 0.05));
        assert_eq!(of("memory=0.4").unwrap(), (Quantity::Memory, 0.4));
        assert_eq!(of("ms=20").unwrap(), (Quantity::Ms, 20.0));
        for wrong in [
            "0.01",
            "kl=",
            "ms=0",
            "bytes=-1",
            "memory=inf",
            "kl=nan",
            "rows=3",
            "=",
        ] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
