//! Sequences over weights that are on the device once: for each, a backend of its own.

use std::ops::Range;
use std::sync::Arc;

use super::backend::CudaBackend;
use super::body::Body;
use super::host::HostBackend;
use super::room::{Extent, Source, rehearsed, shown};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::ledger::Needs;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::model::Decoder;
use crate::runner::{Backend, DecodeOptions, Opener, room};

/// The memory that holds the cached rows of a model on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsIn {
    /// The GPU's.
    Device,
    /// The machine's, while the index is on the GPU.
    Host,
}

impl RowsIn {
    /// Returns whether caches and selection of the method can be there; `turns` says whether there may be more than one
    /// prompt.
    pub fn can(self, method: &dyn Method, options: &DecodeOptions, turns: bool) -> bool {
        match self {
            Self::Device => CudaBackend::can(method, options, turns),
            Self::Host => HostBackend::can(method, options, turns),
        }
    }

    /// Opens empty caches for one sequence of up to `capacity` positions; in host memory, space for `expected` positions is
    /// reserved from the start.
    ///
    /// # Errors
    /// Those of [`CudaBackend::new`] and [`HostBackend::new`].
    pub fn open<'a>(
        self,
        body: Arc<Body<'a>>,
        (method, options): (&dyn Method, DecodeOptions),
        [expected, capacity]: [usize; 2],
    ) -> Result<Box<dyn Backend + 'a>> {
        Ok(match self {
            Self::Device => Box::new(CudaBackend::new(body, method, options, 1, capacity)?),
            Self::Host => Box::new(HostBackend::new(body, method, options, [expected, capacity])?),
        })
    }

    /// Allocates what a sequence and its prompt take, and frees it: see [`room`](super::room).
    pub(super) fn rehearse<'d>(
        self,
        body: Arc<Body<'d>>,
        (method, options): (&dyn Method, DecodeOptions),
        capacity: usize,
        prompt: Range<usize>,
    ) -> Result<()> {
        match self {
            Self::Device => CudaBackend::new(body, method, options, 1, capacity)?.rehearse(prompt),
            Self::Host => HostBackend::new(body, method, options, [0, capacity])?.rehearse(prompt),
        }
    }

    /// Returns the hint for sessions that would fit with fewer positions.
    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::Device => "give fewer tokens, or keep the cache in the machine's memory with ⟨kv=host⟩",
            Self::Host => "give fewer tokens",
        }
    }
}

/// A model whose weights are on the device once, for any number of sequences, each with caches and buffers of its own.
pub struct Sequences<'a> {
    source: Source<'a>,
    body: Arc<Body<'a>>,
    with: (&'a dyn Method, DecodeOptions),
    rows: RowsIn,
    extent: Extent,
}

impl<'a> Sequences<'a> {
    pub(super) fn new(
        source: Source<'a>,
        body: Arc<Body<'a>>,
        with: (&'a dyn Method, DecodeOptions),
        rows: RowsIn,
        extent: Extent,
    ) -> Self {
        Self {
            source,
            body,
            with,
            rows,
            extent,
        }
    }

    /// Returns what a sequence needs of the device's memory, besides the weights, which are there.
    fn needs(&self, capacity: usize) -> Result<Needs> {
        let rehearse = |driver: &dyn Driver, capacity: usize| {
            let body = Arc::new(Body::load(driver, self.source.decoder, self.source.precision)?);
            let prompt = self.extent.prompt_within(capacity);
            self.rows.rehearse(body, self.with.clone(), capacity, prompt)
        };
        let needs = rehearsed(self.source.driver, capacity, &rehearse)?;
        Ok(Needs { weights: 0, ..needs })
    }

    /// Returns the bytes of the rows of so many positions in host memory.
    fn host_bytes(&self, positions: usize) -> usize {
        match self.rows {
            RowsIn::Device => 0,
            RowsIn::Host => {
                room::row_bytes(&self.source.decoder.config, self.with.0, &self.with.1, positions)
            }
        }
    }
}

impl<'a> Opener<'a> for Sequences<'a> {
    fn decoder(&self) -> &Decoder {
        self.source.decoder
    }

    fn takes_later_prompts(&self) -> bool {
        self.extent.later_prompts
    }

    fn bytes_for(&self, capacity: usize) -> Result<[usize; 2]> {
        let needs = self.needs(capacity)?;
        let rows = needs.caches as usize + self.host_bytes(capacity);
        Ok([rows, needs.indexes as usize])
    }

    fn check_room(&self, capacity: usize, to_come: usize) -> Result<()> {
        room::check(self.host_bytes(capacity), self.host_bytes(to_come))?;
        let (needs, free) = (self.needs(capacity)?, self.source.driver.free_bytes()?);
        if needs.total() <= free {
            return Ok(());
        }
        let up = |bytes| shown(bytes, true);
        Err(Error::gpu_memory(format_args!(
            "the KV cache of a sequence of {capacity} positions needs {}, its index {} and its workspaces {}, together {}, but \
             only {} are free",
            up(needs.caches),
            up(needs.indexes),
            up(needs.workspaces),
            up(needs.total()),
            shown(free, false)
        ))
        .hint("give fewer tokens, or fewer sequences at a time"))
    }

    fn open(&self, capacity: usize) -> Result<Box<dyn Backend + 'a>> {
        self.rows
            .open(Arc::clone(&self.body), self.with.clone(), [capacity; 2])
    }
}
