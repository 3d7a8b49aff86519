//! The lists of `inspect` of the heads that a section serves worst.

use serde::de::DeserializeOwned;

use crate::artifact::{HeadReport, parse, worst_heads};
use crate::error::Result;

/// A share that is shown as 0.0%.
const NOTHING: f64 = 0.0005;

/// Lists the heads for which `of` is largest under a heading; leaves out heads for which it is shown as zero.
pub(super) fn worst_of<R: DeserializeOwned>(
    heading: &str,
    reports: &[HeadReport],
    of: fn(&R) -> Option<f64>,
) -> Result<String> {
    let mut told = Vec::new();
    for head in reports {
        let what = format!("quality, layer {}, KV head {}", head.layer, head.head);
        if of(&parse(&what, head.report)?).is_some_and(|value| value >= NOTHING) {
            let HeadReport { layer, head, report } = *head;
            told.push(HeadReport { layer, head, report });
        }
    }
    if told.is_empty() {
        Ok(String::new())
    } else {
        Ok(format!("\n{heading}\n{}", worst_heads(&told, of)?))
    }
}
