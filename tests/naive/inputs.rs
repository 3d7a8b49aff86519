//! Rows that histories are made from: random ones of several kinds, and states of the bundled model.

use std::ops::Range;
use std::sync::OnceLock;

use kvsmith::internal::method::Place;
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::forward::Rows;
use kvsmith::internal::model::tokenizer::Tokenizer;
use ndarray::{Array2, Array3, s};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::pick;
use crate::common::random::noise;
use crate::common::{captured, root};

/// What keys and queries look like.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Gaussian,
    /// Queries look at the sinks, some more than the rest.
    Sinks,
    /// Keys are copies of a few, and so are queries.
    Repeated,
    /// Queries are near one of a few, keys have a common offset.
    Clustered,
    /// States of the bundled model on held-out text.
    Captured,
}

/// Query heads of a group, KV heads, channels and positions of the captured states.
pub const GROUP: usize = 2;
const KV_HEADS: usize = 2;
pub const CHANNELS: usize = 64;
const POSITIONS: usize = 800;

/// The layers of the bundled model.
fn layers() -> &'static [Rows] {
    static LAYERS: OnceLock<Vec<Rows>> = OnceLock::new();
    LAYERS.get_or_init(|| {
        let data = root().join("calib-data");
        let decoder = Decoder::open(&data.join("model")).unwrap();
        let text = std::fs::read_to_string(data.join("heldout.txt")).unwrap();
        let tokenizer = Tokenizer::open(&data.join("model"), &decoder.config).unwrap();
        captured(&decoder, &tokenizer.encode_prefix(&text, POSITIONS).unwrap())
    })
}

/// Where rows come from.
pub struct Inputs {
    pub kind: Kind,
    sinks: usize,
    d: usize,
    /// Rows that keys or queries are made from.
    pool: Vec<Vec<f32>>,
    /// Direction of the sinks, and how much each query head looks there.
    towards: Vec<f32>,
    strength: Vec<f32>,
    /// The layer of captured states, and the KV head.
    layer: &'static Rows,
    kv_head: usize,
}

impl Inputs {
    pub fn new(rng: &mut ChaCha8Rng, place: &Place) -> Self {
        let d = place.head_dim;
        let row = |rng: &mut ChaCha8Rng| (0..d).map(|_| noise(rng)).collect::<Vec<f32>>();
        let mut kind = pick(
            rng,
            &[Kind::Gaussian, Kind::Sinks, Kind::Repeated, Kind::Clustered],
        );
        if (place.group, place.head_dim) == (GROUP, CHANNELS) && place.kv_head < KV_HEADS {
            kind = Kind::Captured;
        }
        let layers = layers();
        let center = if rng.gen_bool(0.5) { 2.0 } else { 4.0 };
        Self {
            kind,
            sinks: place.limits.sinks,
            d,
            pool: (0..rng.gen_range(2..7)).map(|_| row(rng)).collect(),
            towards: row(rng),
            strength: (0..place.group)
                .map(|_| center * rng.gen_range(0.2..1.6f32))
                .collect(),
            layer: &layers[rng.gen_range(0..layers.len())],
            kv_head: place.kv_head,
        }
    }

    pub fn key(&self, rng: &mut ChaCha8Rng, position: usize) -> Vec<f32> {
        let sink = matches!(self.kind, Kind::Sinks) && position < self.sinks;
        let from = rng.gen_range(0..self.pool.len());
        let mut of = |i: usize| match self.kind {
            Kind::Repeated => self.pool[from][i],
            Kind::Captured => self.layer.k.rope[[self.kv_head, position, i]],
            Kind::Sinks if sink => self.towards[i] + 0.1 * noise(rng),
            Kind::Clustered => 3.0 * self.towards[i] + noise(rng),
            _ => noise(rng),
        };
        (0..self.d).map(&mut of).collect()
    }

    pub fn query(&self, rng: &mut ChaCha8Rng, a: usize, position: usize) -> Vec<f32> {
        let from = rng.gen_range(0..self.pool.len());
        // Scores with a sink of about the head's strength times a little more than one.
        let pull = self.strength[a] * rng.gen_range(0.8..1.2) * 1.3 / (self.d as f32).sqrt();
        let of = |(i, noise): (usize, f32)| match self.kind {
            Kind::Sinks => pull * self.towards[i] * 1.5 + 0.5 * noise,
            Kind::Repeated => 0.7 * self.pool[from][i],
            Kind::Clustered => 2.0 * self.pool[from][i] + 0.2 * noise,
            Kind::Captured => self.layer.q.rope[[self.kv_head * GROUP + a, position, i]],
            _ => 1.5 * noise,
        };
        (0..self.d).map(|i| (i, noise(rng))).map(of).collect()
    }

    /// Rows that nothing but their own use ties to the others: noise, or captured ones of `head`.
    fn other(
        &self,
        rng: &mut ChaCha8Rng,
        states: fn(&Rows) -> &Array3<f32>,
        head: usize,
        positions: Range<usize>,
    ) -> Array2<f32> {
        match self.kind {
            Kind::Captured => states(self.layer).slice(s![head, positions, ..]).to_owned(),
            _ => Array2::from_shape_simple_fn((positions.len(), self.d), || noise(rng)),
        }
    }

    /// Values.
    pub fn values(&self, rng: &mut ChaCha8Rng, positions: Range<usize>) -> Array2<f32> {
        self.other(rng, |l| &l.v, self.kv_head, positions)
    }

    /// Keys before rotation.
    pub fn k_pre(&self, rng: &mut ChaCha8Rng, positions: Range<usize>) -> Array2<f32> {
        self.other(rng, |l| &l.k.pre, self.kv_head, positions)
    }

    /// A query before rotation.
    pub fn q_pre(&self, rng: &mut ChaCha8Rng, a: usize, position: usize) -> Vec<f32> {
        let head = self.kv_head * GROUP + a;
        self.other(rng, |l| &l.q.pre, head, position..position + 1)
            .into_iter()
            .collect()
    }
}
