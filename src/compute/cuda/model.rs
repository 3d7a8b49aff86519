//! The forward pass on an NVIDIA GPU: the same as [`crate::model::decoder`].
//!
//! [`LayerWeights`] are one layer's weights on the device, in the type that the checkpoint stores; [`Workspace`] is
//! where some rows pass through a layer. [`forward::CudaForward`] runs prompts and tokens with the caches on the host,
//! [`layers::CudaLayers`] calibration text with one layer's weights on the device at a time.

mod cache;
pub mod forward;
pub mod host;
mod index;
pub mod layers;
pub mod session;
mod tables;

use super::buffer::Buffer;
use super::decode::attend::LayerRows;
use super::decode::{Limits, Positions, Shape};
use super::driver::{self, Arg, Driver};
use super::linear::{Linear, Matrix, Products};
use crate::compute::linear;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model::rope::{Rope, RopeTable};
use crate::model::weights::Float as Stored;
use crate::model::{Decoder, Layer, ModelConfig};
use crate::runner::budget::Budget;
use crate::runner::kv::Float;

/// Rows that pass a layer together.
pub const ROWS: usize = 4096;

/// How inputs of products with 16-bit weights are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Precision {
    /// To the weights' type, for the tensor cores.
    #[default]
    Auto,
    /// Not at all.
    F32,
}

/// Where a layer's rows stand in their sequences.
#[derive(Clone, Copy)]
pub enum Standing<'s, 'd> {
    /// Row i of each sequence of `rows` at `first + i * apart`.
    At {
        /// Of the first row.
        first: usize,
        /// Between a row and the next.
        apart: usize,
    },
    /// At the ends of these caches, which count the rows already.
    Last(&'s Positions<'d>),
}

/// A decoder layer's weights on the device.
pub struct LayerWeights<'d> {
    input_norm: Buffer<'d, f32>,
    qkv: Linear<'d>,
    q_norm: Option<Buffer<'d, f32>>,
    k_norm: Option<Buffer<'d, f32>>,
    o: Linear<'d>,
    mlp_norm: Buffer<'d, f32>,
    gate_up: Linear<'d>,
    down: Linear<'d>,
    /// Visible positions, the current one included; `None` = all.
    pub window: Option<usize>,
}

impl<'d> LayerWeights<'d> {
    /// Copies a layer to the device.
    ///
    /// # Errors
    /// No memory.
    pub fn upload(driver: &'d dyn Driver, layer: &Layer) -> Result<Self> {
        let joined = |linears: &[&linear::Linear]| upload(driver, linears);
        let vector = |values: &[f32]| Buffer::of(driver, "norms", values);
        let head_norm = |norm: &Option<Vec<f32>>| norm.as_deref().map(vector).transpose();
        Ok(Self {
            input_norm: vector(&layer.input_norm)?,
            qkv: joined(&[&layer.q, &layer.k, &layer.v])?,
            q_norm: head_norm(&layer.q_norm)?,
            k_norm: head_norm(&layer.k_norm)?,
            o: joined(&[&layer.o])?,
            mlp_norm: vector(&layer.mlp_norm)?,
            gate_up: joined(&[&layer.gate, &layer.up])?,
            down: joined(&[&layer.down])?,
            window: layer.window,
        })
    }

    /// Random weights in bf16, for a benchmark.
    ///
    /// # Errors
    /// No memory.
    pub fn random(driver: &'d dyn Driver, s: &LayerSizes, window: Option<usize>, seed: u32) -> Result<Self> {
        let matrix = |rows, cols, seed| random(driver, rows, cols, seed);
        let ones = || Buffer::of(driver, "norms", &vec![1.0; s.hidden]);
        Ok(Self {
            input_norm: ones()?,
            qkv: matrix(s.qkv(), s.hidden, seed)?,
            q_norm: None,
            k_norm: None,
            o: matrix(s.hidden, s.attended(), seed + 1)?,
            mlp_norm: ones()?,
            gate_up: matrix(2 * s.intermediate, s.hidden, seed + 2)?,
            down: matrix(s.hidden, s.intermediate, seed + 3)?,
            window,
        })
    }

    /// Bytes that [`LayerWeights::upload`] takes.
    pub fn bytes(layer: &Layer) -> usize {
        let weights = layer.weights().into_iter();
        weights.map(|w| w.rows() * w.cols() * w.dtype().bytes()).sum()
    }
}

/// A projection of random numbers in bf16.
fn random<'d>(driver: &'d dyn Driver, rows: usize, cols: usize, seed: u32) -> Result<Linear<'d>> {
    Ok(Linear {
        weight: Matrix::random(driver, Stored::Bf16, rows, cols, seed)?,
        bias: None,
    })
}

/// Copies projections of the same inputs to the device as one, their rows one after the other.
fn upload<'d>(driver: &'d dyn Driver, linears: &[&linear::Linear]) -> Result<Linear<'d>> {
    let Some(first) = linears.first() else {
        return Err(Error::failed("CUDA: no weights to join"));
    };
    let (kind, cols) = (first.weight.dtype(), first.weight.cols());
    let rows = linears.iter().map(|l| l.weight.rows()).sum();
    let mut bytes = Vec::new();
    for linear in linears {
        let weight = &linear.weight;
        if weight.dtype() == kind {
            bytes.extend_from_slice(weight.row_bytes(0, weight.rows()));
        } else {
            // Projections of several types become one of the first one's.
            let (from, to) = (weight.dtype().name(), kind.name());
            if kind != Stored::F32 {
                let names = [first.weight.name(), weight.name()];
                return Err(Error::failed(format!(
                    "CUDA: `{}` is {to} and `{}` {from}; they must have one type",
                    names[0], names[1]
                ))
                .hint("store the checkpoint in one type, or use --device cpu"));
            }
            kind.write(&weight.to_vec(), &mut bytes);
        }
    }
    let bias: Vec<f32> = linears
        .iter()
        .filter_map(|l| l.bias.as_deref())
        .flatten()
        .copied()
        .collect();
    let weight = Matrix::new(driver, kind, rows, cols, &bytes)?;
    let bias = match bias.len() {
        0 => None,
        n if n == rows => Some(Buffer::of(driver, "biases", &bias)?),
        n => return Err(Error::failed(format!("CUDA: {n} biases for {rows} channels"))),
    };
    Ok(Linear { weight, bias })
}

/// Cosines and sines of the positions from 0 on.
pub struct Rotation<'d> {
    cosines: Buffer<'d, f32>,
    sines: Buffer<'d, f32>,
    /// The position of the table's first row.
    first: usize,
}

impl<'d> Rotation<'d> {
    /// Of `n` positions from `first` on.
    ///
    /// # Errors
    /// No memory.
    pub fn new(driver: &'d dyn Driver, rope: &Rope, first: usize, n: usize) -> Result<Self> {
        let table: RopeTable = rope.table(first..first + n);
        let [cosines, sines] = table.parts();
        Ok(Self {
            cosines: Buffer::of(driver, "rotation", cosines)?,
            sines: Buffer::of(driver, "rotation", sines)?,
            first,
        })
    }
}

/// Where up to `rows` rows pass through a layer, one layer after the other.
pub struct Workspace<'d> {
    driver: &'d dyn Driver,
    sizes: LayerSizes,
    /// Rows that there is room for.
    rows: usize,
    /// `[rows, hidden]`.
    normed: Buffer<'d, f32>,
    /// `[rows, (h + 2 g) d]`.
    qkv: Buffer<'d, f32>,
    /// `[b,h,m,d]`.
    pub q_pre: Buffer<'d, f32>,
    /// `[b,h,m,d]`.
    pub q_rope: Buffer<'d, f32>,
    /// `[b,g,m,d]`.
    pub k_pre: Buffer<'d, f32>,
    /// `[b,g,m,d]`.
    pub k_rope: Buffer<'d, f32>,
    /// `[b,g,m,d]`.
    pub v: Buffer<'d, f32>,
    /// `[rows, h d]`.
    pub attended: Buffer<'d, f32>,
    /// `[rows, 2 intermediate]`.
    gate_up: Buffer<'d, f32>,
    /// `[rows, intermediate]`.
    activated: Buffer<'d, f32>,
    products: Products<'d>,
}

/// The sizes that all layers have in common.
#[derive(Clone, Copy, Debug)]
pub struct LayerSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// h.
    pub n_heads: usize,
    /// g.
    pub n_kv_heads: usize,
    /// d.
    pub head_dim: usize,
    /// Of every norm.
    pub eps: f32,
}

impl LayerSizes {
    /// Those of a model.
    pub fn of(c: &ModelConfig) -> Self {
        Self {
            hidden: c.hidden_size,
            intermediate: c.intermediate_size,
            n_heads: c.n_heads,
            n_kv_heads: c.n_kv_heads,
            head_dim: c.head_dim,
            eps: c.rms_norm_eps,
        }
    }

    /// Checks that the kernels are made for a model's attention.
    ///
    /// # Errors
    /// What they are not made for.
    pub fn check(&self) -> Result<()> {
        self.shape(1, 1).checked().map(drop)
    }

    /// The shape of one sequence's attention with room for `capacity` positions.
    pub fn shape(&self, sequences: usize, capacity: usize) -> Shape {
        Shape {
            sequences,
            kv_heads: self.n_kv_heads,
            group: self.n_heads / self.n_kv_heads,
            head_dim: self.head_dim,
            capacity,
        }
    }

    /// Width of the joined projection.
    fn qkv(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Width of what the attention gives.
    pub fn attended(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Bytes of a workspace per row.
    pub fn bytes_per_row(&self) -> usize {
        let own = self.hidden + self.qkv() + 3 * self.attended() + 3 * self.n_kv_heads * self.head_dim;
        4 * (own + 3 * self.intermediate) + 2 * self.widest()
    }

    fn widest(&self) -> usize {
        self.hidden.max(self.intermediate).max(self.attended())
    }
}

impl<'d> Workspace<'d> {
    /// Room for so many rows.
    ///
    /// # Errors
    /// No memory.
    pub fn new(driver: &'d dyn Driver, sizes: LayerSizes, precision: Precision, rows: usize) -> Result<Self> {
        let (kv, ffn) = (sizes.n_kv_heads * sizes.head_dim, sizes.intermediate);
        let buffer = |width: usize| Buffer::new(driver, "activations", rows * width);
        Ok(Self {
            driver,
            sizes,
            rows,
            normed: buffer(sizes.hidden)?,
            qkv: buffer(sizes.qkv())?,
            q_pre: buffer(sizes.attended())?,
            q_rope: buffer(sizes.attended())?,
            k_pre: buffer(kv)?,
            k_rope: buffer(kv)?,
            v: buffer(kv)?,
            attended: buffer(sizes.attended())?,
            gate_up: buffer(2 * ffn)?,
            activated: buffer(ffn)?,
            products: Products::new(driver, precision == Precision::F32, rows * sizes.widest())?,
        })
    }

    /// Projects `rows` rows of hidden states, `[b m, hidden]`, m being those of a sequence, and rotates them.
    pub fn project(
        &self,
        weights: &LayerWeights<'_>,
        hidden: &Buffer<'_, f32>,
        rows: usize,
        m: usize,
        rotation: &Rotation<'_>,
        standing: Standing<'_, '_>,
    ) -> Result<()> {
        let s = &self.sizes;
        self.norm(hidden, &weights.input_norm, &self.normed, rows)?;
        self.multiply(&weights.qkv, &self.normed, rows, &self.qkv, false)?;
        let (h, g) = (s.n_heads, s.n_kv_heads);
        let null = Arg::address(0);
        let norm = |norm: &Option<Buffer<'_, f32>>| norm.as_ref().map_or(null, Buffer::arg);
        let (lens, first, apart) = match standing {
            Standing::At { first, apart } => (null, first - rotation.first, apart),
            Standing::Last(positions) => (positions.lens(), 0, 0),
        };
        let args = [
            self.qkv.arg(),
            norm(&weights.q_norm),
            norm(&weights.k_norm),
            rotation.cosines.arg(),
            rotation.sines.arg(),
            lens,
            self.q_pre.arg(),
            self.q_rope.arg(),
            self.k_pre.arg(),
            self.k_rope.arg(),
            self.v.arg(),
            Arg::u32(rows),
            Arg::u32(m),
            Arg::u32(h),
            Arg::u32(g),
            Arg::u32(s.head_dim),
            Arg::u32(first),
            Arg::u32(apart),
            Arg::f32(s.eps),
        ];
        let blocks = (rows * (h + 2 * g)).div_ceil(8);
        driver::launch(self.driver, "split_heads", [blocks, 1, 1], &args)
    }

    /// Adds the attention output, `attended`, and the MLP to `rows` rows of hidden states.
    pub fn finish(&self, weights: &LayerWeights<'_>, hidden: &Buffer<'_, f32>, rows: usize) -> Result<()> {
        self.multiply(&weights.o, &self.attended, rows, hidden, true)?;
        self.norm(hidden, &weights.mlp_norm, &self.normed, rows)?;
        self.multiply(&weights.gate_up, &self.normed, rows, &self.gate_up, false)?;
        let ffn = self.sizes.intermediate;
        let args = [
            self.gate_up.arg(),
            self.activated.arg(),
            Arg::u64(rows * ffn),
            Arg::u32(ffn),
        ];
        let blocks = blocks_for(self.driver, rows * ffn);
        driver::launch(self.driver, "silu_rows", [blocks, 1, 1], &args)?;
        self.multiply(&weights.down, &self.activated, rows, hidden, true)
    }

    fn multiply(
        &self,
        linear: &Linear<'_>,
        x: &Buffer<'_, f32>,
        rows: usize,
        out: &Buffer<'_, f32>,
        accumulate: bool,
    ) -> Result<()> {
        linear.forward(&self.products, x, rows, out, accumulate)
    }

    /// RMS norm of rows, `[rows, hidden]`.
    fn norm(
        &self,
        x: &Buffer<'_, f32>,
        weight: &Buffer<'_, f32>,
        out: &Buffer<'_, f32>,
        rows: usize,
    ) -> Result<()> {
        let args = [
            x.arg(),
            weight.arg(),
            out.arg(),
            Arg::u32(self.sizes.hidden),
            Arg::f32(self.sizes.eps),
        ];
        driver::launch(self.driver, "rms_rows", [rows, 1, 1], &args)
    }
}

/// What comes before and after the layers: the embedding and the output projection.
pub struct Ends<'d> {
    driver: &'d dyn Driver,
    /// `None` where the embedding is the output projection.
    embedding: Option<Linear<'d>>,
    norm: Buffer<'d, f32>,
    head: Linear<'d>,
    vocab: usize,
}

impl<'d> Ends<'d> {
    /// Copies them to the device.
    ///
    /// # Errors
    /// No memory.
    pub fn upload(driver: &'d dyn Driver, decoder: &Decoder) -> Result<Self> {
        let tied = decoder.config.tie_word_embeddings;
        let embedding = linear::Linear {
            weight: decoder.embedding.clone(),
            bias: None,
        };
        Ok(Self {
            driver,
            embedding: match tied {
                true => None,
                false => Some(upload(driver, &[&embedding])?),
            },
            norm: Buffer::of(driver, "norms", &decoder.norm)?,
            head: upload(driver, &[&decoder.head])?,
            vocab: decoder.config.vocab_size,
        })
    }

    /// Bytes that [`Ends::upload`] takes.
    pub fn bytes(decoder: &Decoder) -> usize {
        let bytes = |w: &crate::model::weights::Weight| w.rows() * w.cols() * w.dtype().bytes();
        let embedding = match decoder.config.tie_word_embeddings {
            true => 0,
            false => bytes(&decoder.embedding),
        };
        embedding + bytes(&decoder.head.weight)
    }

    /// Embeds `n` ids: `[n, hidden]`.
    pub fn embed(&self, ids: &Buffer<'_, u32>, n: usize, hidden: &Buffer<'_, f32>) -> Result<()> {
        let table = &self.embedding.as_ref().unwrap_or(&self.head).weight;
        let kind = match table.kind() {
            Stored::F32 => 0,
            Stored::F16 => 1,
            Stored::Bf16 => 2,
        };
        let args = [
            ids.arg(),
            table.values().arg(),
            hidden.arg(),
            Arg::u32(kind),
            Arg::u32(table.cols()),
        ];
        driver::launch(self.driver, "embed_rows", [n, 1, 1], &args)
    }

    /// The logits of `rows` rows of hidden states: `[rows, vocab]`.
    pub fn logits(
        &self,
        work: &Workspace<'_>,
        hidden: &Buffer<'_, f32>,
        rows: usize,
        logits: &Buffer<'_, f32>,
    ) -> Result<()> {
        work.norm(hidden, &self.norm, &work.normed, rows)?;
        work.multiply(&self.head, &work.normed, rows, logits, false)
    }

    /// The greedy choice of each row of logits: `[rows]`.
    pub fn choose(&self, logits: &Buffer<'_, f32>, rows: usize, ids: &Buffer<'_, u32>) -> Result<()> {
        let args = [logits.arg(), ids.arg(), Arg::u32(self.vocab)];
        driver::launch(self.driver, "largest_of_rows", [rows, 1, 1], &args)
    }
}

/// The type in which a layer's keys and values are attended: that of its weights, or f32.
pub fn row_type(layer: &Layer, precision: Precision) -> Float {
    match (precision, layer.k.weight.dtype()) {
        (Precision::F32, _) | (_, Stored::F32) => Float::F32,
        (_, Stored::F16) => Float::F16,
        (_, Stored::Bf16) => Float::Bf16,
    }
}

/// One layer's rows of one sequence, to be attended by its own queries.
pub struct Prompted<'d> {
    rows: LayerRows<'d>,
    positions: Positions<'d>,
}

impl<'d> Prompted<'d> {
    /// Room for `n` positions.
    ///
    /// # Errors
    /// A model whose attention the kernels are not made for; no memory.
    pub fn new(driver: &'d dyn Driver, sizes: &LayerSizes, float: Float, n: usize) -> Result<Self> {
        let shape = sizes.shape(1, n).checked()?;
        let limits = Limits {
            sinks: 0,
            window: 1,
            model_window: None,
            budget: Budget::Count(1),
        };
        Ok(Self {
            rows: LayerRows::new(driver, shape, float)?,
            positions: Positions::new(driver, shape, limits)?,
        })
    }

    /// Forgets all positions.
    pub fn clear(&mut self) -> Result<()> {
        self.positions.set(&[0])
    }

    /// Takes in the keys and values of the next `m` positions, `[g,m,d]`.
    pub fn append(&mut self, keys: &Buffer<'_, f32>, values: &Buffer<'_, f32>, m: usize) -> Result<()> {
        self.positions.advance(m)?;
        self.rows.append(keys, values, m, &self.positions)
    }

    /// Attends queries `[h,m,d]` at the positions from `first` on; out `[m, h d]`.
    pub fn attend(
        &self,
        queries: &Buffer<'_, f32>,
        m: usize,
        first: usize,
        window: Option<usize>,
        out: &Buffer<'_, f32>,
    ) -> Result<()> {
        self.rows.attend_prompt(queries, first, m, window, out)
    }
}

/// Blocks for a loop over n numbers in strides of the whole grid.
fn blocks_for(driver: &dyn Driver, n: usize) -> usize {
    n.div_ceil(256).min(32 * driver.multiprocessors())
}

/// A whole model's weights on the device.
pub struct Body<'a> {
    driver: &'a dyn Driver,
    /// Where they come from; `None` for random ones.
    decoder: Option<&'a Decoder>,
    config: ModelConfig,
    rope: Rope,
    precision: Precision,
    layers: Vec<LayerWeights<'a>>,
    ends: Ends<'a>,
}

impl<'a> Body<'a> {
    /// Copies all weights of a checkpoint to the device.
    ///
    /// # Errors
    /// Less memory than they need; a model whose attention the kernels are not made for.
    pub fn load(driver: &'a dyn Driver, decoder: &'a Decoder, precision: Precision) -> Result<Self> {
        let config = decoder.config.clone();
        let sizes = LayerSizes::of(&config);
        sizes.check()?;
        let views = (0..config.n_layers).map(|i| decoder.layer(i));
        let views = views.collect::<Result<Vec<_>>>()?;
        let weights: usize = views.iter().map(LayerWeights::bytes).sum();
        let space = 16 * (sizes.bytes_per_row() + 4 * config.vocab_size);
        check_room(driver, weights + Ends::bytes(decoder) + space)?;
        let mut layers = Vec::new();
        for view in &views {
            interrupt::check()?;
            layers.push(LayerWeights::upload(driver, view)?);
            // What is on the device is not needed in the page cache.
            view.release();
        }
        Ok(Self {
            ends: Ends::upload(driver, decoder)?,
            rope: decoder.rope.clone(),
            decoder: Some(decoder),
            driver,
            config,
            precision,
            layers,
        })
    }

    /// Random weights in the sizes of a model, in bf16 and with one matrix as embedding and output projection; for a
    /// benchmark.
    ///
    /// # Errors
    /// As [`Body::load`].
    pub fn random(driver: &'a dyn Driver, config: ModelConfig, seed: u32) -> Result<Self> {
        let sizes = LayerSizes::of(&config);
        sizes.check()?;
        check_room(driver, Self::random_bytes(&config))?;
        let windows = config.windows.iter().enumerate();
        let layers =
            windows.map(|(i, window)| LayerWeights::random(driver, &sizes, *window, seed + 8 + 4 * i as u32));
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self {
            ends: Ends {
                driver,
                embedding: None,
                norm: Buffer::of(driver, "norms", &vec![1.0; config.hidden_size])?,
                head: random(driver, config.vocab_size, config.hidden_size, seed)?,
                vocab: config.vocab_size,
            },
            decoder: None,
            rope: Rope::new(&config.rope, config.head_dim),
            precision: Precision::Auto,
            driver,
            config,
            layers,
        })
    }

    /// Bytes of the weights of [`Body::random`], all of which a step reads.
    pub fn random_bytes(config: &ModelConfig) -> usize {
        let s = LayerSizes::of(config);
        let layer = s.hidden * (s.qkv() + s.attended() + 3 * s.intermediate);
        2 * (config.n_layers * layer + config.vocab_size * s.hidden)
    }

    /// The sizes of its layers.
    pub fn sizes(&self) -> LayerSizes {
        LayerSizes::of(&self.config)
    }

    /// The type of rows that are attended and not kept: that of the weights, or f32.
    fn row_type(&self) -> Float {
        match (self.precision, self.layers.first().map(|l| l.qkv.weight.kind())) {
            (Precision::F32, _) | (_, None | Some(Stored::F32)) => Float::F32,
            (_, Some(Stored::F16)) => Float::F16,
            (_, Some(Stored::Bf16)) => Float::Bf16,
        }
    }

    /// A workspace for so many rows.
    fn workspace(&self, rows: usize) -> Result<Workspace<'a>> {
        Workspace::new(self.driver, self.sizes(), self.precision, rows)
    }

    /// Checks that every id is in the vocabulary.
    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match self.decoder {
            Some(decoder) => decoder.check_ids(ids),
            None if ids.iter().all(|id| (*id as usize) < self.config.vocab_size) => Ok(()),
            None => Err(Error::failed("a token id is outside the vocabulary")),
        }
    }
}

/// Numbers that are not finite, by the stage that had them.
pub struct Watch<'d> {
    driver: &'d dyn Driver,
    noted: Buffer<'d, u32>,
}

impl<'d> Watch<'d> {
    /// Nothing noted yet.
    pub fn new(driver: &'d dyn Driver) -> Result<Self> {
        Ok(Self {
            driver,
            noted: Buffer::zeros(driver, "a note", 1)?,
        })
    }

    /// Looks at `n` numbers after layer `layer`; one beyond the last is for the logits.
    pub fn look(&self, x: &Buffer<'_, f32>, n: usize, layer: usize) -> Result<()> {
        let args = [
            x.arg(),
            Arg::u64(n),
            self.noted.arg(),
            Arg::u32(u32::MAX as usize - layer),
        ];
        let blocks = blocks_for(self.driver, n);
        driver::launch(self.driver, "note_not_finite", [blocks, 1, 1], &args)
    }

    /// Fails if a stage was noted, naming the culprit of the first; waits for the device.
    pub fn check(&self, body: &Body<'_>) -> Result<()> {
        let noted = self.noted.read()?.first().copied().unwrap_or(0);
        if noted == 0 {
            return Ok(());
        }
        self.noted.zero()?;
        let layer = (u32::MAX - noted) as usize;
        let Some(decoder) = body.decoder else {
            return Err(Error::failed(format!(
                "the hidden states after layer {layer} are not finite"
            )));
        };
        if layer >= decoder.config.n_layers {
            return Err(decoder.diagnose(&[&decoder.head.weight], "the output logits"));
        }
        let weights = decoder.layer(layer)?;
        let place = format!("the hidden states after layer {layer}");
        Err(decoder.diagnose(&weights.weights(), &place))
    }
}

/// Says that a model does not fit, before anything is copied.
///
/// # Errors
/// Less free memory than `bytes`.
pub fn check_room(driver: &dyn Driver, bytes: usize) -> Result<()> {
    let free = driver.free_bytes()?;
    if bytes as u64 <= free {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    Err(Error::failed(format!(
        "out of GPU memory: the model's weights need {:.1} GiB, and {:.1} GiB are free",
        gib(bytes as u64),
        gib(free)
    ))
    .hint("end what else uses the GPU, take a smaller model, or use --device cpu"))
}
