//! What an artifact's section holds.

use half::f16;
use serde_json::Value;

use super::{MAX_SIZE, SECTION};
use crate::artifact::Artifact;
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::store::Spec;

/// Tensors of the section.
pub fn specs(sizes: Sizes, m: usize) -> Vec<Spec> {
    let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
    vec![
        Spec::new::<f16>("a2ats.codebook", &[l, g, m, d]),
        Spec::new::<f32>("a2ats.mean", &[l, g, d]),
        Spec::new::<f32>("a2ats.chol", &[l, g, d, d]),
        Spec::new::<u32>("a2ats.count", &[l, g, m]),
    ]
}

/// M of a section's parameters.
pub fn codebook_size(params: &Value) -> Result<usize> {
    match params.get("codebook_size").and_then(Value::as_u64) {
        Some(m) if (1..=MAX_SIZE as u64).contains(&m) => Ok(m as usize),
        _ => Err(Error::failed("`sections.a2ats.codebook_size` is not valid")),
    }
}

/// Checks the values of the section: finite, L lower triangular with a positive diagonal, counts
/// that add up to the kept keys.
pub fn check_values(artifact: &Artifact) -> Result<()> {
    let m = codebook_size(artifact.section(SECTION)?)?;
    let specs = specs(artifact.sizes, m);
    let wrong = |what: String| {
        Error::failed(format!("{}: {what}", artifact.store.path().display()))
            .hint("the file is damaged; make it again")
    };
    for (spec, values) in [
        (&specs[0], artifact.f16s(&specs[0])?),
        (&specs[1], artifact.f32s(&specs[1])?),
        (&specs[2], artifact.f32s(&specs[2])?),
    ] {
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            return Err(wrong(format!(
                "`{}` has a value that is not finite (element {i})",
                spec.name
            )));
        }
    }
    let d = artifact.sizes.head_dim;
    let heads = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
    let chol = artifact.f32s(&specs[2])?;
    for (head, l) in chol.chunks_exact(d * d).enumerate() {
        let lower =
            (0..d).all(|i| l[i * d + i] > 0.0 && l[i * d + i + 1..(i + 1) * d].iter().all(|v| *v == 0.0));
        if !lower {
            return Err(wrong(format!(
                "`a2ats.chol` of head {head} is not a Cholesky factor"
            )));
        }
    }
    let kept = artifact.kept_keys();
    let counts: Vec<u32> = artifact.store.read(&specs[3].name, &specs[3].shape)?;
    for head in 0..heads {
        let sum: u64 = counts[head * m..(head + 1) * m]
            .iter()
            .map(|c| u64::from(*c))
            .sum();
        if sum != kept {
            return Err(wrong(format!(
                "`a2ats.count` of head {head} adds up to {sum} keys of {kept}"
            )));
        }
    }
    Ok(())
}
