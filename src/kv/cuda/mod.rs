//! The key-value cache on an NVIDIA GPU, and decode attention that chooses and attends without the host.
//!
//! The state of a step lives on the device: [`Positions`] holds the lengths of the caches, a [`CudaSelection`]
//! the chosen positions, [`float::LayerRows`] and [`packed::PackedLayer`] the cached rows of a layer. A step
//! is a fixed sequence of kernel launches: sizes that depend on the context are bounded by the capacity, so
//! that every step makes the same launches.

pub mod attend;
pub(crate) mod best;
pub mod bounds;
pub mod float;
pub mod format;
pub mod int8;
pub mod packed;
pub mod pair;
pub mod prefill;
pub mod prompt;
pub mod rows;
pub mod signs;

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{Driver, Part};
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
pub use crate::kv::Shape;
use crate::kv::{Budget, Limits, StaticSet};

/// Most query heads that share a KV head: the rows of a tensor-core product.
pub const MOST_GROUP: usize = 16;
/// Positions that a block of a scan covers.
pub(crate) const SCAN: usize = 2048;
/// Counters per block of a scan: positions taken, and one for each of up to 16 partly taken codewords.
pub(crate) const KINDS: usize = 17;

impl Shape {
    /// Checks the sizes, and rounds the capacity up to a multiple of 8, since kernels read eight codes at once.
    ///
    /// # Errors
    /// Sizes that the kernels do not support.
    pub fn checked(mut self) -> Result<Self> {
        if self.group == 0 || self.group > MOST_GROUP {
            return Err(Error::unsupported(format!(
                "CUDA: the model has {} query heads per KV head; 1 to {MOST_GROUP} are supported",
                self.group
            ))
            .hint("use ⟨device=cpu⟩"));
        }
        if self.head_dim == 0 || self.head_dim > 128 {
            return Err(Error::unsupported(format!(
                "CUDA: the model has a head dimension of {}; 1 to 128 are supported",
                self.head_dim
            ))
            .hint("use ⟨device=cpu⟩"));
        }
        self.capacity = self.capacity.next_multiple_of(8).max(8);
        let fits = self.sequences > 0 && self.sequences <= 65_535 && self.kv_heads * self.group <= 65_535;
        if !fits || u32::try_from(self.capacity * 128).is_err() {
            return Err(Error::internal(format!("CUDA: sizes out of range: {self:?}")));
        }
        Ok(self)
    }

    /// Returns the channels of a padded row: the next head dimension that has an attention kernel.
    pub fn width(&self) -> usize {
        [64, 80, 96, 128]
            .into_iter()
            .find(|w| *w >= self.head_dim)
            .unwrap_or(128)
    }

    /// Returns the factor that turns a dot product into an exponent of base 2: log2(e) / sqrt(d).
    pub(crate) fn exponent(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt()
    }

    /// Returns the grid of a launch with `blocks` blocks per KV head of every sequence.
    pub(crate) fn grid(&self, blocks: usize) -> [usize; 3] {
        [blocks, self.kv_heads, self.sequences]
    }
}

/// The lengths of the caches, and the last token's static set and budget; [`StaticSet::at`] on the device.
pub struct Positions<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    pub(crate) limits: Limits,
    /// Lengths, `[b]`.
    pub(crate) lens: Buffer<'d, u32>,
    /// `[b,4]`: first visible position, number of sinks, first position of the window, end.
    pub(crate) spans: Buffer<'d, u32>,
    /// Budgets, `[b]`.
    pub budgets: Buffer<'d, u32>,
    /// The lengths, as counted on the host.
    known: Vec<usize>,
}

impl<'d> Positions<'d> {
    /// Makes the positions of empty caches.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, limits: Limits) -> Result<Self> {
        let shape = shape.checked()?;
        let b = shape.sequences;
        Ok(Self {
            driver,
            shape,
            limits,
            lens: Buffer::zeros(driver, "lengths", b)?,
            spans: Buffer::zeros(driver, "spans", b * 4)?,
            budgets: Buffer::zeros(driver, "budgets", b)?,
            known: vec![0; b],
        })
    }

    /// Lists all candidates, for each KV head of every sequence.
    pub fn between(&self) -> Vec<Vec<u32>> {
        let all = self.sets().flat_map(|(set, _)| {
            let positions: Vec<u32> = set.candidates.map(|p| p as u32).collect();
            std::iter::repeat_n(positions, self.shape.kv_heads)
        });
        all.collect()
    }

    /// Sets the lengths of the caches, one per sequence.
    ///
    /// # Errors
    /// A length beyond the capacity.
    pub fn set(&mut self, lens: &[u32]) -> Result<()> {
        let longest = lens.iter().copied().max().unwrap_or(0) as usize;
        if lens.len() != self.shape.sequences || longest > self.shape.capacity {
            return Err(full(self.shape.capacity));
        }
        self.known = lens.iter().map(|n| *n as usize).collect();
        self.lens.write(lens)
    }

    /// Returns the length of each sequence, from the host's count.
    pub fn known(&self) -> &[usize] {
        &self.known
    }

    /// Returns the length of the longest sequence, from the host's count.
    pub fn longest(&self) -> usize {
        self.known.iter().copied().max().unwrap_or(0)
    }

    /// Returns the static set and the budget of each sequence's last token, computed on the host; every
    /// sequence must have a token.
    pub fn sets(&self) -> impl Iterator<Item = (StaticSet, usize)> + '_ {
        let limits = &self.limits;
        self.known.iter().map(|n| {
            let set = limits.static_set(n.saturating_sub(1));
            let budget = limits.budget.positions(set.visible().len());
            (set, budget)
        })
    }

    /// Copies to the host, per sequence, the first visible position, the number of sinks, the first position
    /// of the window, and the end; waits for the device.
    pub fn spans(&self) -> Result<Vec<[u32; 4]>> {
        let spans = self.spans.read()?;
        Ok(spans.chunks_exact(4).map(|s| [s[0], s[1], s[2], s[3]]).collect())
    }

    /// Starts a step of every sequence: one more token each, or a prompt of `tokens`.
    ///
    /// # Errors
    /// The caches are full.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        self.count(tokens)?;
        self.begin(tokens)
    }

    /// Does the host's part of [`Positions::advance`]: counts the tokens.
    ///
    /// # Errors
    /// The caches are full.
    pub fn count(&mut self, tokens: usize) -> Result<()> {
        if self.longest() + tokens > self.shape.capacity {
            return Err(full(self.shape.capacity));
        }
        self.known.iter_mut().for_each(|n| *n += tokens);
        Ok(())
    }

    /// Does the device's part of [`Positions::advance`]: updates lengths, spans and budgets.
    pub fn begin(&self, tokens: usize) -> Result<()> {
        let limits = &self.limits;
        let (fraction, count) = match limits.budget {
            Budget::Fraction(x) => (x, 0),
            Budget::Count(n) => (0.0, n.min(self.shape.capacity)),
        };
        let b = self.shape.sequences;
        // A number above the capacity means the same as the capacity.
        let bounded = |n: usize| n.min(self.shape.capacity);
        kernels::BeginStep {
            lens: self.lens.ptr(),
            spans: self.spans.ptr(),
            budgets: self.budgets.ptr(),
            fraction,
            count,
            tokens,
            sinks: bounded(limits.sinks),
            window: bounded(limits.window),
            model_window: bounded(limits.model_window.unwrap_or(0)),
            b,
        }
        .launch(self.driver, [b.div_ceil(256), 1, 1])
    }
}

fn full(capacity: usize) -> Error {
    Error::memory(format!(
        "the KV cache on the GPU has room for {capacity} positions only"
    ))
    .hint("give fewer tokens, or use ⟨device=cpu⟩")
}

/// The chosen positions of each KV head, ascending, between the sinks and the window.
pub struct CudaSelection<'d> {
    /// Positions, `[b,g,most]`.
    pub(crate) lists: Buffer<'d, u32>,
    /// Number of positions, `[b,g]`.
    pub(crate) listed: Buffer<'d, u32>,
    /// Sums of each block of a scan, `[b,g,blocks,17]`.
    pub(crate) totals: Buffer<'d, u32>,
    /// How many keys got an exact product, the chosen keys included: `[b,g]`; `None` if the method computes no exact
    /// products.
    pub ranked: Option<Buffer<'d, u32>>,
    pub(crate) most: usize,
    pub(crate) blocks: usize,
}

/// Host memory into which a [`CudaSelection`] is fetched.
#[derive(Debug, Default)]
pub struct Arriving {
    /// Positions, `[b,g,most]`.
    lists: Vec<u32>,
    /// Number of positions, `[b,g]`.
    listed: Vec<u32>,
}

impl Arriving {
    /// Returns the positions of every KV head.
    pub fn positions(&self) -> Vec<Vec<u32>> {
        let most = self.lists.len() / self.listed.len().max(1);
        let lists = self.lists.chunks(most.max(1)).zip(&self.listed);
        lists
            .map(|(list, n)| list[..most.min(*n as usize)].to_vec())
            .collect()
    }
}

impl<'d> CudaSelection<'d> {
    /// Allocates space for `most` positions per KV head.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, shape: &Shape, most: usize) -> Result<Self> {
        let (heads, blocks) = (shape.heads(), shape.capacity.div_ceil(SCAN));
        Ok(Self {
            lists: Buffer::new(driver, "chosen positions", heads * most)?,
            listed: Buffer::zeros(driver, "numbers of positions", heads)?,
            totals: Buffer::new(driver, "sums of the scan", heads * blocks * KINDS)?,
            ranked: None,
            most,
            blocks,
        })
    }

    /// Replaces the positions by one ascending list per KV head of every sequence.
    ///
    /// # Errors
    /// Another number of lists.
    pub fn write(&self, lists: &[Vec<u32>]) -> Result<()> {
        if lists.len() != self.listed.len() {
            let (found, expected) = (lists.len(), self.listed.len());
            return Err(Error::internal(format!(
                "CUDA: {found} lists of positions for {expected} KV heads"
            )));
        }
        let mut all = vec![0; self.lists.len()];
        for (to, list) in all.chunks_mut(self.most).zip(lists) {
            to.iter_mut().zip(list).for_each(|(to, p)| *to = *p);
        }
        self.lists.write(&all)?;
        let listed = lists.iter().map(|list| list.len().min(self.most) as u32);
        self.listed.write(&listed.collect::<Vec<_>>())
    }

    /// Copies the positions of every KV head to the host; waits for the device.
    pub fn read(&self) -> Result<Vec<Vec<u32>>> {
        let arrived = Arriving {
            lists: self.lists.read()?,
            listed: self.listed.read()?,
        };
        Ok(arrived.positions())
    }

    /// Allocates host memory for [`CudaSelection::parts`].
    pub fn arriving(&self) -> Arriving {
        Arriving {
            lists: vec![0; self.lists.len()],
            listed: vec![0; self.listed.len()],
        }
    }

    /// Returns the positions as parts of a [`Driver::fetch`] into `to`.
    pub fn parts<'v>(&self, to: &'v mut Arriving) -> [Part<'v>; 2] {
        [self.lists.to(&mut to.lists), self.listed.to(&mut to.listed)]
    }
}
