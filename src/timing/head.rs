//! Heads with random data, for steps on the CPU.

use ndarray::{Array2, Array3, Axis, concatenate};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::setting::LayerSetting;
use crate::error::Result;
use crate::kv::map::{FittedMap, HeadMaps, RowMap};
use crate::kv::packed::{Center, Layout};
use crate::kv::{KvHead, Shape};
use crate::method::bench::{Fill, NewHead};
use crate::method::{Place, Prompt, Retriever};

/// Rows that are drawn together.
const CHUNK: usize = 4096;
/// Number of queries of a head; its steps use them in turn.
const QUERIES: usize = 8;
/// Factor on random queries, so that the scaled scores of random keys have a standard deviation of 3.
const SHARPNESS: f32 = 9.0;
/// Weight of the part that all queries of a head have in common. The cosine of two queries is about its square.
const OWN: f32 = 0.95;

/// One KV head of one sequence.
pub struct BenchHead {
    pub kv: KvHead,
    pub retriever: Box<dyn Retriever>,
    /// The queries, `[r,d]` each, which serve as queries before and after rotation.
    pub queries: Vec<Array2<f32>>,
    pub out: Array2<f32>,
}

/// Draws values from -1 to 1.
pub fn uniform(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Array2<f32> {
    Array2::from_shape_simple_fn((n, d), || rng.r#gen::<f32>() * 2.0 - 1.0)
}

/// Draws a query for every query head, `[r,d]`, most of which is `own`, the part that all queries of the head share.
fn query(rng: &mut ChaCha8Rng, own: &Array2<f32>) -> Array2<f32> {
    let new = uniform(rng, own.nrows(), own.ncols());
    (own * OWN + new * (1.0 - OWN * OWN).sqrt()) * SHARPNESS
}

impl BenchHead {
    /// Draws a head: the rows of its cache, if its method or attention reads them, and its method's state.
    pub fn new(setting: &LayerSetting, new: &NewHead, kv_head: usize, seed: u64) -> Result<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let Shape {
            group,
            head_dim: d,
            capacity: n,
            ..
        } = setting.layer.shape;
        let place = Place {
            layer: 0,
            kv_head,
            group,
            head_dim: d,
            limits: setting.limits,
            kv: setting.kv,
        };
        let (mut retriever, fill) = new(&place, &mut rng);
        let holds_rows = setting.holds_rows();
        let room = if holds_rows { n } else { 0 };
        // As with an artifact; what the maps do to the rows does not matter here.
        let map = RowMap::Fitted(FittedMap::hadamard(d).into());
        let maps = HeadMaps {
            keys: map.clone(),
            values: map,
        };
        let mut kv = KvHead::mapped(place.kv, d, room, Layout::from(Center::Median), &maps);
        // The keys of the prompt that the method gets.
        let mut prompted = Vec::new();
        if holds_rows || fill == Fill::Keys {
            for first in (0..n).step_by(CHUNK) {
                let rows = CHUNK.min(n - first);
                let keys = uniform(&mut rng, rows, d);
                if fill == Fill::Keys {
                    retriever.append(keys.view(), keys.view());
                }
                if holds_rows {
                    kv.extend(keys.view(), uniform(&mut rng, rows, d).view());
                }
                if matches!(fill, Fill::Prompt(_)) {
                    prompted.push(keys);
                }
            }
        }
        let own = uniform(&mut rng, group, d);
        if let Fill::Prompt(rows) = fill {
            let keys: Vec<_> = prompted.iter().map(|part| part.view()).collect();
            let keys = concatenate(Axis(0), &keys)?;
            let mut q_rope = Array3::zeros((group, rows.min(n), d));
            for mut row in q_rope.axis_iter_mut(Axis(1)) {
                row.assign(&query(&mut rng, &own));
            }
            retriever.prefill(&Prompt {
                first: n - rows.min(n),
                k_pre: keys.view(),
                q_rope: q_rope.view(),
                // The values are in the cache; no method reads them here.
                values: keys.view(),
                keys: keys.view(),
                kv: &kv,
            });
        }
        Ok(Self {
            kv,
            retriever,
            queries: (0..QUERIES).map(|_| query(&mut rng, &own)).collect(),
            out: Array2::zeros((group, d)),
        })
    }

    /// Copies the head: the same data at other addresses, made much faster than new data.
    pub fn copied(&self) -> Self {
        Self {
            kv: self.kv.clone(),
            retriever: self.retriever.fork(),
            queries: self.queries.clone(),
            out: self.out.clone(),
        }
    }
}
