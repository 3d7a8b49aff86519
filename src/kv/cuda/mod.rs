//! Decode steps on the GPU: what a token attends is chosen and attended without the host in between.
//!
//! The state of a step lives on the device: [`Positions`] knows how long the caches are, a [`Selection`] what was
//! chosen; [`attend::LayerRows`] and [`packed::PackedLayer`] are the cached
//! rows of a layer. A step is a fixed run of launches. Sizes that
//! depend on the context are bounded by the capacity, so the launches are the same for every step.

pub mod attend;
pub(crate) mod best;
pub mod cache;
pub mod packed;
pub mod prefill;
pub mod prompt;
pub mod signs;

use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::{Driver, Part};
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::{Budget, StaticSet};

/// Query heads that share a KV head, at most: the rows of a tensor-core product.
pub const MOST_GROUP: usize = 16;
/// Positions that a block of a scan looks at.
pub(crate) const SCAN: usize = 2048;
/// Codewords of a KV head that may be taken in part, and one for those taken whole.
pub(crate) const KINDS: usize = 17;

/// The sizes of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences, b.
    pub sequences: usize,
    /// KV heads, g.
    pub kv_heads: usize,
    /// Query heads per KV head, r.
    pub group: usize,
    /// Channels, d.
    pub head_dim: usize,
    /// Positions that there is room for, per sequence.
    pub capacity: usize,
}

impl Shape {
    /// The same with room for whole reads of eight codes.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for.
    pub fn checked(mut self) -> Result<Self> {
        if self.group == 0 || self.group > MOST_GROUP {
            return Err(Error::failed(format!(
                "CUDA: {} query heads per KV head; 1 to {MOST_GROUP} are supported",
                self.group
            ))
            .hint("use --device cpu"));
        }
        if self.head_dim == 0 || self.head_dim > 128 {
            return Err(Error::failed(format!(
                "CUDA: a head dimension of {}; 1 to 128 are supported",
                self.head_dim
            ))
            .hint("use --device cpu"));
        }
        self.capacity = self.capacity.next_multiple_of(8).max(8);
        let fits = self.sequences > 0 && self.sequences <= 65_535 && self.kv_heads * self.group <= 65_535;
        if !fits || u32::try_from(self.capacity * 128).is_err() {
            return Err(Error::failed(format!("CUDA: sizes out of range: {self:?}")));
        }
        Ok(self)
    }

    /// Channels of a row on the device: what there is an attention kernel for.
    pub fn width(&self) -> usize {
        [64, 80, 96, 128]
            .into_iter()
            .find(|w| *w >= self.head_dim)
            .unwrap_or(128)
    }

    /// What a product of a query and a key is multiplied by for an exponent of base 2: log2(e) / sqrt(d).
    pub(crate) fn exponent(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt()
    }

    /// KV heads of all sequences.
    pub fn heads(&self) -> usize {
        self.sequences * self.kv_heads
    }

    /// Query heads of all sequences.
    pub fn query_heads(&self) -> usize {
        self.heads() * self.group
    }
}

/// What is always attended, and how much may be chosen besides; as in [`crate::runner::Options`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// First positions.
    pub sinks: usize,
    /// Last positions, the current one included.
    pub window: usize,
    /// The model's own sliding window.
    pub model_window: Option<usize>,
    /// What may be chosen.
    pub budget: Budget,
}

impl Limits {
    /// Most positions that can be chosen with room for `capacity`.
    pub(crate) fn most(&self, capacity: usize) -> usize {
        let visible = self.model_window.map_or(capacity, |w| w.min(capacity));
        self.budget.positions(visible).clamp(1, capacity)
    }
}

/// How long the caches are, and what follows for the last token: `StaticSet::at` of the runner.
pub struct Positions<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    pub(crate) limits: Limits,
    /// `[b]`.
    pub(crate) lens: Buffer<'d, u32>,
    /// `[b,4]`: first visible, number of sinks, first of the window, end.
    pub(crate) spans: Buffer<'d, u32>,
    /// `[b]`.
    pub(crate) budgets: Buffer<'d, u32>,
    /// The same lengths, as the host counts along.
    known: Vec<usize>,
}

impl<'d> Positions<'d> {
    /// Empty caches.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
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

    /// The lengths on the device, `[b]`, for a kernel.
    pub fn lens(&self) -> Ptr<'_, u32> {
        self.lens.ptr()
    }

    /// See [`Positions::spans`], for a kernel.
    pub fn span_ptr(&self) -> Ptr<'_, u32> {
        self.spans.ptr()
    }

    /// All that may be chosen, for each KV head of every sequence; waits for the device.
    pub fn between(&self) -> Result<Vec<Vec<u32>>> {
        let spans = self.spans()?;
        let all = spans.iter().flat_map(|[first, sinks, window, _]| {
            let positions: Vec<u32> = (first + sinks..*window).collect();
            std::iter::repeat_n(positions, self.shape.kv_heads)
        });
        Ok(all.collect())
    }

    /// Takes the caches to be this long, one number per sequence.
    ///
    /// # Errors
    /// Longer than the capacity.
    pub fn set(&mut self, lens: &[u32]) -> Result<()> {
        let longest = lens.iter().copied().max().unwrap_or(0) as usize;
        if lens.len() != self.shape.sequences || longest > self.shape.capacity {
            return Err(full(self.shape.capacity));
        }
        self.known = lens.iter().map(|n| *n as usize).collect();
        self.lens.write(lens)
    }

    /// Positions of each sequence, without asking the device.
    pub fn known(&self) -> &[usize] {
        &self.known
    }

    /// Positions of the longest sequence, without asking the device.
    pub fn longest(&self) -> usize {
        self.known.iter().copied().max().unwrap_or(0)
    }

    /// Of each sequence what its last token always attends and what it may choose from, and how much it may choose,
    /// without asking the device; there is a last token.
    pub fn sets(&self) -> impl Iterator<Item = (StaticSet, usize)> + '_ {
        let limits = &self.limits;
        self.known.iter().map(|n| {
            let set = StaticSet::at(
                n.saturating_sub(1),
                limits.model_window,
                limits.sinks,
                limits.window,
            );
            let budget = limits.budget.positions(set.visible().len());
            (set, budget)
        })
    }

    /// Of each sequence the first visible position, the number of sinks, the first position of the window, and the
    /// end; waits for the device.
    pub fn spans(&self) -> Result<Vec<[u32; 4]>> {
        let spans = self.spans.read()?;
        Ok(spans.chunks_exact(4).map(|s| [s[0], s[1], s[2], s[3]]).collect())
    }

    /// How much may be chosen, per sequence; waits for the device.
    pub fn budgets(&self) -> Result<Vec<u32>> {
        self.budgets.read()
    }

    /// Begins a step of every sequence: one more token each, or a prompt of `tokens`.
    ///
    /// # Errors
    /// The caches are full.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        self.count(tokens)?;
        self.begin(tokens)
    }

    /// The host's part of [`Positions::advance`].
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

    /// The device's part of [`Positions::advance`].
    pub fn begin(&self, tokens: usize) -> Result<()> {
        let limits = &self.limits;
        let (fraction, count) = match limits.budget {
            Budget::Fraction(x) => (x, 0),
            Budget::Count(n) => (0.0, n.min(self.shape.capacity)),
        };
        let b = self.shape.sequences;
        // Beyond the capacity they mean the same.
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

/// Queries or keys of some positions, `[b,heads,m,d]`, before and after rotation.
#[derive(Clone, Copy)]
pub struct Rotated<'a> {
    /// Before.
    pub pre: &'a Buffer<'a, f32>,
    /// After.
    pub rope: &'a Buffer<'a, f32>,
}

fn full(capacity: usize) -> Error {
    Error::failed(format!("the GPU's cache has room for {capacity} positions"))
}

/// What was chosen for each KV head: ascending positions between the sinks and the window.
pub struct Selection<'d> {
    /// `[b,g,most]`.
    pub(crate) lists: Buffer<'d, u32>,
    /// `[b,g]`.
    pub(crate) listed: Buffer<'d, u32>,
    /// Of each block of a scan, `[b,g,blocks,17]`.
    pub(crate) totals: Buffer<'d, u32>,
    /// `[b,g]`: positions whose keys were ranked exactly, those chosen among them; none where nothing was.
    pub(crate) ranked: Option<Buffer<'d, u32>>,
    pub(crate) most: usize,
    pub(crate) blocks: usize,
}

/// A [`Selection`] on its way to the host.
#[derive(Debug, Default)]
pub struct Arriving {
    /// `[b,g,most]`.
    lists: Vec<u32>,
    /// `[b,g]`.
    listed: Vec<u32>,
}

impl Arriving {
    /// The positions of every KV head.
    pub fn positions(&self) -> Vec<Vec<u32>> {
        let most = self.lists.len() / self.listed.len().max(1);
        let lists = self.lists.chunks(most.max(1)).zip(&self.listed);
        lists
            .map(|(list, n)| list[..most.min(*n as usize)].to_vec())
            .collect()
    }
}

impl<'d> Selection<'d> {
    /// Room for `most` positions per KV head.
    pub(crate) fn new(driver: &'d dyn Driver, shape: &Shape, most: usize) -> Result<Self> {
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

    /// Positions that were chosen elsewhere: `most` per KV head, ascending.
    ///
    /// # Errors
    /// No memory.
    pub fn of(driver: &'d dyn Driver, shape: Shape, most: usize, lists: &[Vec<u32>]) -> Result<Self> {
        let selection = Self::new(driver, &shape.checked()?, most.max(1))?;
        selection.write(lists)?;
        Ok(selection)
    }

    /// Takes these positions, one ascending list per KV head of every sequence.
    pub(crate) fn write(&self, lists: &[Vec<u32>]) -> Result<()> {
        let mut all = vec![0; self.lists.len()];
        for (to, list) in all.chunks_mut(self.most).zip(lists) {
            to.iter_mut().zip(list).for_each(|(to, p)| *to = *p);
        }
        self.lists.write(&all)?;
        let listed = lists.iter().map(|list| list.len().min(self.most) as u32);
        self.listed.write(&listed.collect::<Vec<_>>())
    }

    /// The number of positions of each KV head, `[b,g]`, for a kernel.
    pub fn listed_ptr(&self) -> Ptr<'_, u32> {
        self.listed.ptr()
    }

    /// How many keys of each KV head were ranked exactly, `[b,g]`, for a kernel; `None` where none are.
    pub fn ranked_ptr(&self) -> Option<Ptr<'_, u32>> {
        self.ranked.as_ref().map(Buffer::ptr)
    }

    /// The same; waits for the device.
    pub fn ranked(&self) -> Result<Option<Vec<u32>>> {
        self.ranked.as_ref().map(Buffer::read).transpose()
    }

    /// The positions of every KV head; waits for the device.
    pub fn read(&self) -> Result<Vec<Vec<u32>>> {
        let arrived = Arriving {
            lists: self.lists.read()?,
            listed: self.listed.read()?,
        };
        Ok(arrived.positions())
    }

    /// Room for what [`Selection::parts`] fetches.
    pub fn arriving(&self) -> Arriving {
        Arriving {
            lists: vec![0; self.lists.len()],
            listed: vec![0; self.listed.len()],
        }
    }

    /// The positions as parts of a [`Driver::fetch`].
    pub fn parts<'v>(&self, to: &'v mut Arriving) -> [Part<'v>; 2] {
        [self.lists.to(&mut to.lists), self.listed.to(&mut to.listed)]
    }
}
