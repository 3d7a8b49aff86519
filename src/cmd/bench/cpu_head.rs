//! Heads with random data, for steps on the CPU.

use ndarray::{Array2, Array3, Axis, concatenate};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::decode::{SINKS, Setting, WINDOW};
use crate::error::Result;
use crate::kv::KvHead;
use crate::kv::packed::{Center, Layout};
use crate::method::bench::{Fill, NewHead};
use crate::method::{Place, Prompt, Retriever};

/// Rows that are made at a time.
const CHUNK: usize = 4096;
/// Queries of a head; steps take them in turn.
const QUERIES: usize = 8;
/// Length of a query relative to a random one, so that scaled scores of random keys deviate by 3.
const SHARPNESS: f32 = 9.0;
/// Share of a query that is its head's own; the rest is new. The cosine of two queries is about its square.
const OWN: f32 = 0.95;

/// One KV head of one sequence.
pub struct Head {
    pub kv: KvHead,
    pub retriever: Box<dyn Retriever>,
    /// Before and after rotation, `[r,d]`: the same here.
    pub queries: Vec<Array2<f32>>,
    pub out: Array2<f32>,
}

/// Draws values from -1 to 1.
pub fn uniform(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Array2<f32> {
    Array2::from_shape_simple_fn((n, d), || rng.r#gen::<f32>() * 2.0 - 1.0)
}

/// Draws a query of every query head, `[r,d]`, most of it `own`.
fn query(rng: &mut ChaCha8Rng, own: &Array2<f32>) -> Array2<f32> {
    let new = uniform(rng, own.nrows(), own.ncols());
    (own * OWN + new * (1.0 - OWN * OWN).sqrt()) * SHARPNESS
}

/// Makes a head: the rows of its cache, if its method or attention reads them, and its method's state.
pub fn head(setting: &Setting, new: &NewHead, kv_head: usize, seed: u64) -> Result<Head> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (n, d) = (setting.context, setting.heads.head_dim);
    let place = Place {
        layer: 0,
        kv_head,
        group: setting.group(),
        head_dim: d,
        model_window: None,
        sinks: SINKS,
        window: WINDOW,
        budget: setting.caches().budget,
        kv: setting.caches().kv,
    };
    let (mut retriever, fill) = new(&place, &mut rng);
    let room = if setting.holds_rows() { n } else { 0 };
    let mut kv = KvHead::new(setting.caches().kv, d, room, Layout::from(Center::Median));
    // Keys that a prompt is taken in from.
    let mut prompted = Vec::new();
    for first in (0..n).step_by(CHUNK) {
        let rows = CHUNK.min(n - first);
        let keys = match setting.holds_rows() || fill == Fill::Keys {
            true => uniform(&mut rng, rows, d),
            false => continue,
        };
        if fill == Fill::Keys {
            retriever.append(keys.view(), keys.view());
        }
        if setting.holds_rows() {
            kv.extend(keys.view(), uniform(&mut rng, rows, d).view());
        }
        if matches!(fill, Fill::Prompt(_)) {
            prompted.push(keys);
        }
    }
    let own = uniform(&mut rng, setting.group(), d);
    if let Fill::Prompt(rows) = fill {
        let mut query = || query(&mut rng, &own);
        prefill(
            &place,
            retriever.as_mut(),
            &prompted,
            rows.min(n),
            &kv,
            &mut query,
        )?;
    }
    Ok(Head {
        kv,
        retriever,
        queries: (0..QUERIES).map(|_| query(&mut rng, &own)).collect(),
        out: Array2::zeros((setting.group(), d)),
    })
}

/// Takes in a prompt of which the last `rows` queries are known.
fn prefill(
    place: &Place,
    retriever: &mut dyn Retriever,
    keys: &[Array2<f32>],
    rows: usize,
    kv: &KvHead,
    query: &mut dyn FnMut() -> Array2<f32>,
) -> Result<()> {
    let keys: Vec<_> = keys.iter().map(|part| part.view()).collect();
    let keys = concatenate(Axis(0), &keys)?;
    let mut q_rope = Array3::zeros((place.group, rows, place.head_dim));
    for mut row in q_rope.axis_iter_mut(Axis(1)) {
        row.assign(&query());
    }
    retriever.prefill(&Prompt {
        first: keys.nrows() - rows,
        k_pre: keys.view(),
        q_rope: q_rope.view(),
        // The cache has the values; what is taken in here needs none.
        values: keys.view(),
        keys: keys.view(),
        kv,
    });
    Ok(())
}
