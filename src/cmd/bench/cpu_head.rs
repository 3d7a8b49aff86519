//! Heads with random data, for steps on the CPU.

use std::sync::Arc;

use half::f16;
use ndarray::{Array1, Array2, Array3, Axis, concatenate};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::decode::{SINKS, Setting, WINDOW};
use crate::error::{Error, Result};
use crate::kv::KvHead;
use crate::kv::packed::{Center, Layout};
use crate::method::a2ats::{A2ats, HeadCodebook};
use crate::method::ctkvr::{self, Ctkvr};
use crate::method::lfps;
use crate::method::selfindex::{SelfIndex, Source};
use crate::method::{MethodName, Place, Prompt, Retriever, full, topk};
use crate::model::rope::{Rope, RopeConfig, RopeScaling};

/// Rows that are made at a time.
const CHUNK: usize = 4096;
/// Queries of a head; steps take them in turn.
const QUERIES: usize = 8;
/// Length of a query, in lengths of a random one: scaled scores of random keys deviate by 3.
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
    /// Bytes that a step reads of centroids and lists.
    pub index_bytes: usize,
}

pub fn codebooks(setting: &Setting) -> Result<Vec<Arc<HeadCodebook>>> {
    let d = setting.heads.head_dim;
    let config = RopeConfig {
        theta: 1e4,
        scaling: RopeScaling::Default,
    };
    let rope = Rope::new(&config, d);
    let one = |head: usize| {
        let mut rng = ChaCha8Rng::seed_from_u64(setting.seed + head as u64);
        let codebook = uniform(&mut rng, setting.size, d).mapv(|v| f16::from_f32(v).to_f32());
        let head = HeadCodebook::new(codebook, Array1::zeros(d), Array2::eye(d), &rope, 2048)?;
        Ok(Arc::new(head))
    };
    (0..setting.heads.n_kv_heads).into_par_iter().map(one).collect()
}

/// From -1 to 1.
fn uniform(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Array2<f32> {
    Array2::from_shape_simple_fn((n, d), || rng.r#gen::<f32>() * 2.0 - 1.0)
}

/// A query of every query head, `[r,d]`, most of it `own`.
fn query(rng: &mut ChaCha8Rng, own: &Array2<f32>) -> Array2<f32> {
    let new = uniform(rng, own.nrows(), own.ncols());
    (own * OWN + new * (1.0 - OWN * OWN).sqrt()) * SHARPNESS
}

/// A head with `n` rows in its cache, where its method or attention reads them, and its method's state.
pub fn head(
    setting: &Setting,
    codebook: Option<&Arc<HeadCodebook>>,
    kv_head: usize,
    seed: u64,
) -> Result<Head> {
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
        budget: setting.budget,
        kv: setting.kv,
    };
    let mut retriever: Box<dyn Retriever> = match (setting.method, codebook) {
        (MethodName::A2ats, Some(codebook)) => {
            let codes = (0..n).map(|_| (rng.r#gen::<usize>() % setting.size) as u16);
            let head = A2ats::with_codes(Arc::clone(codebook), codes.collect());
            Box::new(head.ranking(setting.ranking))
        }
        (MethodName::Selfindex, _) => {
            let head = SelfIndex::new(&place, Center::Median, Source::Signs, None);
            Box::new(head.ranking(setting.ranking))
        }
        (MethodName::Topk, _) => Box::new(topk::TopK),
        (MethodName::Lfps, _) => Box::new(lfps::Setup::new(&setting.lfps, None)?.head(&place)),
        (MethodName::Ctkvr, _) => Box::new(Ctkvr::new(&place, &ctkvr::Params::default())),
        _ => Box::new(full::Full),
    };
    let room = if setting.holds_rows() { n } else { 0 };
    let mut kv = KvHead::new(setting.kv, d, room, Layout::from(Center::Median));
    // Keys that a prompt is taken in from.
    let mut prompted = Vec::new();
    for first in (0..n).step_by(CHUNK) {
        let rows = CHUNK.min(n - first);
        let keys = match setting.holds_rows() || setting.method == MethodName::Selfindex {
            true => uniform(&mut rng, rows, d),
            false => continue,
        };
        if setting.method == MethodName::Selfindex {
            retriever.append(keys.view(), keys.view());
        }
        if setting.holds_rows() {
            kv.extend(keys.view(), uniform(&mut rng, rows, d).view());
        }
        if setting.learns() {
            prompted.push(keys);
        }
    }
    let own = uniform(&mut rng, setting.group(), d);
    if setting.learns() {
        prefill(setting, &place, retriever.as_mut(), &prompted, &kv, &mut || {
            query(&mut rng, &own)
        })?;
    }
    Ok(Head {
        kv,
        retriever,
        queries: (0..QUERIES).map(|_| query(&mut rng, &own)).collect(),
        out: Array2::zeros((setting.group(), d)),
        index_bytes: match setting.method {
            MethodName::Ctkvr => {
                let (params, index) = (
                    ctkvr::Params::default(),
                    Ctkvr::new(&place, &ctkvr::Params::default()),
                );
                2 * setting.group() * d * index.capacity(n) + 4 * params.ct_probes * index.list_len(n)
            }
            _ => 0,
        },
    })
}

/// Takes in a prompt of which the last queries are known: as many as a method learns from.
fn prefill(
    setting: &Setting,
    place: &Place,
    retriever: &mut dyn Retriever,
    keys: &[Array2<f32>],
    kv: &KvHead,
    query: &mut dyn FnMut() -> Array2<f32>,
) -> Result<()> {
    let shape = |e: ndarray::ShapeError| Error::failed(e.to_string());
    let (n, d) = (setting.context, place.head_dim);
    let rows = match setting.method {
        MethodName::Ctkvr => Ctkvr::new(place, &ctkvr::Params::default()).capacity(n),
        _ => setting.lfps.lfps_rows,
    };
    let rows = rows.min(n);
    let keys: Vec<_> = keys.iter().map(|part| part.view()).collect();
    let keys = concatenate(Axis(0), &keys).map_err(shape)?;
    let mut q_rope = Array3::zeros((place.group, rows, d));
    for mut row in q_rope.axis_iter_mut(Axis(1)) {
        row.assign(&query());
    }
    retriever.prefill(&Prompt {
        first: n - rows,
        k_pre: keys.view(),
        q_rope: q_rope.view(),
        // The cache has the values; what is taken in here needs none.
        values: keys.view(),
        keys: keys.view(),
        kv,
    });
    Ok(())
}
