//! Opens sessions that fit the device's memory: before anything is copied, a session is made on a driver that only counts
//! bytes, and what it needs is compared with the free memory.

use std::ops::Range;
use std::sync::Arc;

use super::body::Body;
use super::forward::CudaForward;
use super::sequences::{RowsIn, Sequences};
use crate::compute::Precision;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::ledger::{Ledger, Needs};
use crate::env;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::model::Decoder;
use crate::runner::{Backend, DecodeOptions};

/// A checkpoint and the device that is to run it.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// The device.
    pub driver: &'a dyn Driver,
    /// The checkpoint.
    pub decoder: &'a Decoder,
    /// The type of what is multiplied with the weights.
    pub precision: Precision,
}

/// The positions that the memory of a session, or of each sequence of an engine, must suffice for.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Most positions in the caches.
    pub capacity: usize,
    /// The positions of the prompt that takes the most memory.
    pub prompt: Range<usize>,
    /// Whether there may be more than one prompt, which some indexes on a GPU cannot take in.
    pub later_prompts: bool,
}

impl Extent {
    /// Takes up to so many positions, of which prompts may be any part.
    pub fn up_to(positions: usize) -> Self {
        Self {
            capacity: positions,
            prompt: 0..positions,
            later_prompts: true,
        }
    }

    /// Returns the positions of the prompt within a capacity that may be smaller.
    pub(super) fn prompt_within(&self, capacity: usize) -> Range<usize> {
        let end = self.prompt.end.min(capacity);
        end - self.prompt.len().min(end)..end
    }
}

/// Makes what a session of up to this many positions allocates.
pub type Rehearsal<'r> = dyn for<'d> Fn(&'d dyn Driver, usize) -> Result<()> + 'r;

impl<'a> Source<'a> {
    /// Opens a session with the index on the device and its rows there too or in host memory, where space for `expected`
    /// positions is reserved from the start. `tell` gets a line that says what it needs of the device's memory.
    ///
    /// # Errors
    /// The device has less free memory than the session needs; those of [`RowsIn::open`].
    pub fn session(
        &self,
        (method, options): (&dyn Method, DecodeOptions),
        rows: RowsIn,
        expected: usize,
        extent: &Extent,
        tell: &dyn Fn(&str),
    ) -> Result<Box<dyn Backend + 'a>> {
        tell(&self.check((method, &options), rows, extent)?);
        rows.open(self.load()?, (method, options), [expected, extent.capacity])
    }

    /// Copies the weights to the device, to open sequences there one by one. `tell` gets a line that says what the weights and
    /// one sequence of the extent need.
    ///
    /// # Errors
    /// As [`Source::session`].
    pub fn sequences(
        &self,
        (method, options): (&'a dyn Method, DecodeOptions),
        rows: RowsIn,
        extent: &Extent,
        tell: &dyn Fn(&str),
    ) -> Result<Sequences<'a>> {
        tell(&self.check((method, &options), rows, extent)?);
        let body = self.load()?;
        Ok(Sequences::new(
            *self,
            body,
            (method, options),
            rows,
            extent.clone(),
        ))
    }

    /// Checks that the weights and a session fit.
    fn check(
        &self,
        (method, options): (&dyn Method, &DecodeOptions),
        rows: RowsIn,
        extent: &Extent,
    ) -> Result<String> {
        let rehearse = |driver: &dyn Driver, capacity: usize| {
            let body = Arc::new(Body::load(driver, self.decoder, self.precision)?);
            rows.rehearse(
                body,
                (method, options.clone()),
                capacity,
                extent.prompt_within(capacity),
            )
        };
        check(self.driver, extent.capacity, &rehearse, rows.hint())
    }

    /// Opens the model alone, with caches and indexes on the CPU. `tell` gets a line that says what it needs.
    ///
    /// # Errors
    /// The device has less free memory than the model needs; those of [`CudaForward::new`].
    pub fn forward(&self, extent: &Extent, tell: &dyn Fn(&str)) -> Result<CudaForward<'a>> {
        let rehearse = |driver: &dyn Driver, positions: usize| {
            let forward = CudaForward::new(driver, self.decoder, self.precision)?;
            forward.rehearse(extent.prompt_within(positions))
        };
        tell(&check(
            self.driver,
            extent.prompt.end,
            &rehearse,
            "give fewer tokens",
        )?);
        CudaForward::new(self.driver, self.decoder, self.precision)
    }

    fn load(&self) -> Result<Arc<Body<'a>>> {
        Ok(Arc::new(Body::load(self.driver, self.decoder, self.precision)?))
    }
}

/// Checks that what `make` allocates for `capacity` positions fits into the free memory, and returns a line that says how
/// much it is. The hint is for sessions that would fit with fewer positions.
///
/// # Errors
/// There is less free memory: the error says how much of it weights, caches, indexes and workspaces need, and how many
/// positions would fit. Any error of `make`.
pub fn check(driver: &dyn Driver, capacity: usize, make: &Rehearsal<'_>, hint: &str) -> Result<String> {
    let needs = rehearsed(driver, capacity, make)?;
    let free = driver.free_bytes()?;
    let said = listed(&needs, capacity);
    if needs.total() <= free {
        return Ok(format!("GPU memory: {said}; {} are free", shown(free, false)));
    }
    let fitting = fitting(free, [capacity as u64, needs.total()], &|n| {
        Ok(rehearsed(driver, n, make)?.total())
    })?;
    let (fitting, hint) = match fitting {
        0 => (
            "no".to_owned(),
            "stop other programs that use the GPU, use a smaller model, or use ⟨device=cpu⟩",
        ),
        n => (format!("about {n}"), hint),
    };
    Err(Error::gpu_memory(format_args!(
        "{said}, but only {} are free; {fitting} positions would fit",
        shown(free, false)
    ))
    .hint(hint))
}

pub(super) fn rehearsed(driver: &dyn Driver, capacity: usize, make: &Rehearsal<'_>) -> Result<Needs> {
    env::check()?;
    let ledger = Ledger::new(driver);
    make(&ledger, capacity)?;
    Ok(ledger.most())
}

/// Finds about the most positions whose need is at most `free`, given a number of positions that need more.
fn fitting(free: u64, beyond: [u64; 2], need: &dyn Fn(usize) -> Result<u64>) -> Result<usize> {
    let (mut low, mut high) = ([1, need(1)?], beyond);
    if low[1] > free {
        return Ok(0);
    }
    // Beyond a few positions the need is almost linear: guesses on the line through the last two, one a little below and
    // one a little above, usually enclose the answer. If they do not, halving does.
    let mut last = [low, high];
    for round in 0..8 {
        let width = high[0] - low[0];
        if width <= (high[0] / 32).max(1) {
            break;
        }
        let [a, b] = last.map(|point| point.map(|n| n as f64));
        let slope = ((b[1] - a[1]) / (b[0] - a[0])).max(1.0);
        let on_line = b[0] + (free as f64 - b[1]) / slope;
        let guess = match round {
            0 | 2 => (0.99 * on_line) as u64,
            1 | 3 => (1.01 * on_line) as u64,
            _ => low[0] + width / 2,
        };
        let guess = guess.clamp(low[0] + 1, high[0] - 1);
        let bytes = need(guess as usize)?;
        if bytes <= free {
            low = [guess, bytes]
        } else {
            high = [guess, bytes]
        }
        last = [last[1], [guess, bytes]];
    }
    Ok(low[0] as usize)
}

/// Lists what a session for this many positions needs.
fn listed(needs: &Needs, capacity: usize) -> String {
    let up = |bytes| shown(bytes, true);
    let (weights, workspaces, total) = (up(needs.weights), up(needs.workspaces), up(needs.total()));
    match (needs.caches, needs.indexes) {
        (0, 0) => format!(
            "the model's weights need {weights} and the workspaces of {capacity} positions {workspaces}, together {total}"
        ),
        (caches, indexes) => format!(
            "the model's weights need {weights}, the KV cache of {capacity} positions {}, the index {} and the workspaces \
             {workspaces}, together {total}",
            up(caches),
            up(indexes)
        ),
    }
}

/// Formats an amount of memory, rounded up or down.
pub(super) fn shown(bytes: u64, up: bool) -> String {
    let (unit, name, steps) = match bytes {
        0..0x4000_0000 => (1u64 << 20, "MiB", 10),
        _ => (1 << 30, "GiB", 100),
    };
    let scaled = u128::from(bytes) * steps;
    let rounded = if up {
        scaled.div_ceil(unit.into())
    } else {
        scaled / u128::from(unit)
    };
    format!("{} {name}", rounded as f64 / steps as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shown_in_units_of_its_size() {
        assert_eq!(shown(0, true), "0 MiB");
        assert_eq!(shown(1, true), "0.1 MiB");
        assert_eq!(shown((3 << 20) + 1, false), "3 MiB");
        assert_eq!(shown((3 << 20) + 1, true), "3.1 MiB");
        assert_eq!(shown(5 << 29, true), "2.5 GiB");
        assert_eq!(shown((5 << 29) + 1, true), "2.51 GiB");
    }

    /// The answer is at most the true one, and by little less.
    #[test]
    fn the_positions_that_fit_are_found() {
        let page = 2 << 20;
        let linear = |n: usize| n as u64 * 5000 + 7_000_000;
        let stepped = move |n: usize| (n as u64 * 300).next_multiple_of(page) + 7_000_000;
        let curved = |n: usize| (n * n) as u64 / 100 + n as u64 * 50 + 1000;
        // Most of the workspaces of a prompt of up to 300 positions.
        let jumps = |n: usize| n.min(300) as u64 * 20_000 + n as u64 * 600 + 1_000_000;
        let needs: [&dyn Fn(usize) -> u64; 4] = [&linear, &stepped, &curved, &jumps];
        for (at, need) in needs.into_iter().enumerate() {
            for free in [10_000_000, 20_000_000, 900_000_000] {
                let capacity = 3_100_000;
                assert!(need(capacity) > free, "{at}");
                let found = fitting(free, [capacity as u64, need(capacity)], &|n| Ok(need(n))).unwrap();
                assert!(found > 0 && need(found) <= free, "{at}: {found}");
                let more = found + found / 8 + page as usize / 300;
                assert!(at == 2 || need(more) > free, "{at}: {found} of {free}");
            }
            assert_eq!(fitting(50, [9, need(9)], &|n| Ok(need(n))).unwrap(), 0);
        }
    }
}
