//! How much of the visible context decode steps read and compute.

use std::iter::Sum;
use std::ops::AddAssign;

use crate::kv::{KvType, StaticSet};
use crate::method::{Reads, Selection};

/// Shares of the visible context: those of one decode step, their sum over steps, or its mean.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shares {
    /// K and V rows read, static set included.
    pub read: f64,
    /// Exact products of a query with a key that the method computes in order to choose.
    pub products: f64,
    /// Query heads that bypass their selection.
    pub bypassed: f64,
}

impl Shares {
    /// Those before the first step: everything counts as read.
    pub(super) const UNSTEPPED: Self = Self {
        read: 1.0,
        products: 0.0,
        bypassed: 0.0,
    };

    /// Adds the choices of the KV heads of one layer, each for `group` query heads.
    pub(crate) fn add_layer<'c>(
        &mut self,
        choices: impl ExactSizeIterator<Item = &'c Selection>,
        set: &StaticSet,
        group: usize,
    ) {
        let (visible, heads) = (set.visible().len() as f64, choices.len());
        let query_heads = (group * heads) as f64;
        let mut rows = 0.0;
        for selection in choices {
            let bypassed = selection.bypassed.iter().flatten().count();
            rows += attended(selection, set, group) as f64 + selection.ranked.len() as f64 / 2.0;
            self.bypassed += bypassed as f64 / query_heads;
            self.products += selection.products as f64 / (visible * query_heads);
        }
        self.read += rows / (visible * heads as f64);
    }

    /// Adds a step; `sum` is its sum over layers.
    pub(super) fn add_step(&mut self, sum: &Self, layers: usize) {
        self.add(&sum.mean(layers));
    }

    /// Adds other shares.
    pub(super) fn add(&mut self, other: &Self) {
        self.read += other.read;
        self.products += other.products;
        self.bypassed += other.bypassed;
    }

    /// Divides a sum by its number of terms, `count`; zero without a term.
    pub(crate) fn mean(&self, count: usize) -> Self {
        let n = count.max(1) as f64;
        Self {
            read: self.read / n,
            products: self.products / n,
            bypassed: self.bypassed / n,
        }
    }
}

/// Counts the K and V rows that a selection for `group` query heads attends, static set included.
fn attended(selection: &Selection, set: &StaticSet, group: usize) -> usize {
    if selection.bypassed.iter().flatten().count() == group {
        set.sinks.len()
    } else {
        set.len() + selection.positions.len()
    }
}

/// Returns the chosen positions whose rows are read whole.
fn read_whole(selection: &Selection) -> &[u32] {
    selection.whole.as_deref().unwrap_or(&selection.positions)
}

/// Adds what memory moves of the cache for a selection for `group` query heads.
pub(crate) fn add_rows(
    reads: &mut Reads,
    selection: &Selection,
    set: &StaticSet,
    group: usize,
    kv: KvType,
    head_dim: usize,
) {
    let rows = attended(selection, set, group);
    let kv = kv.in_context(set.visible().end, set.len());
    if kv.has_ends() {
        let (sinks, is_whole) = (set.sinks.len(), rows > set.sinks.len());
        // The array of the other rows begins behind the sinks.
        let others = |positions: &[u32]| -> Vec<u32> {
            positions.iter().map(|p| p.saturating_sub(sinks as u32)).collect()
        };
        let (chosen, whole) = if is_whole {
            (others(&selection.positions), others(read_whole(selection)))
        } else {
            (Vec::new(), Vec::new())
        };
        reads.rows(kv, head_dim, &chosen, &whole, &others(&selection.ranked));
        return reads.end_rows(kv, head_dim, [sinks, if is_whole { set.window.len() } else { 0 }]);
    }
    if reads.moves_whole_rows(kv, head_dim) {
        return reads.unlisted_rows(kv, head_dim, rows, selection.ranked.len());
    }
    let attended: Vec<u32> = if rows == set.sinks.len() {
        set.sinks.clone().map(|p| p as u32).collect()
    } else {
        set.merge(&selection.positions)
    };
    reads.rows(kv, head_dim, &attended, &attended, &selection.ranked);
}

/// What the decode steps of one layer really read: sums over the choices of its KV heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Choices: one per step and KV head.
    pub choices: u64,
    /// Positions that were visible to these choices.
    pub visible: u64,
    /// K and V rows attended, static set included.
    pub rows: u64,
    /// Rows of the static set: all of them, and how many of them were attended.
    pub ends: [u64; 2],
    /// Attended rows in layers of which only the upper layer was read.
    pub upper_rows: u64,
    /// Keys that were read to rank positions and then not attended.
    pub ranked_keys: u64,
    /// Bytes of these rows and keys.
    pub kv_bytes: u64,
    /// Bytes of all visible keys and values, in the formats in which they are cached.
    pub visible_bytes: u64,
    /// Bytes of all visible keys and values in floats ([`KvType::uncompressed_bytes`]).
    pub uncompressed_bytes: u64,
    /// Choices that take everything visible.
    pub full: u64,
    /// Query heads that bypassed their selection.
    pub bypassed_heads: u64,
    /// Bytes of the index; `None` if the device does not report them.
    pub index_bytes: Option<u64>,
    /// Bytes that memory moves, of the cache and of the index; `None` if the device does not report them.
    pub moved_bytes: Option<u64>,
    /// Bytes of buffers that steps fill and read again; `None` if the device does not report them.
    pub scratch_bytes: Option<u64>,
}

impl Counts {
    /// Counts before the first step.
    pub const NONE: Self = Self {
        choices: 0,
        visible: 0,
        rows: 0,
        ends: [0, 0],
        upper_rows: 0,
        ranked_keys: 0,
        kv_bytes: 0,
        visible_bytes: 0,
        uncompressed_bytes: 0,
        full: 0,
        bypassed_heads: 0,
        index_bytes: Some(0),
        moved_bytes: Some(0),
        scratch_bytes: Some(0),
    };

    /// Adds a selection for `group` query heads, and what was read for it besides the rows of a cache of type `kv` with `head_dim`
    /// channels.
    pub(crate) fn add(
        &mut self,
        selection: &Selection,
        reads: &Reads,
        set: &StaticSet,
        group: usize,
        kv: KvType,
        head_dim: usize,
    ) {
        let bypassed = selection.bypassed.iter().flatten().count();
        let rows = attended(selection, set, group);
        let kv = kv.in_context(set.visible().end, set.len());
        let upper = if rows > set.sinks.len() {
            selection.positions.len() - read_whole(selection).len()
        } else {
            0
        };
        let known = Self {
            choices: 1,
            upper_rows: upper as u64,
            visible: set.visible().len() as u64,
            rows: rows as u64,
            // Bypassed heads attend the sinks alone.
            ends: [set.len(), rows.min(set.len())].map(|rows| rows as u64),
            ranked_keys: selection.ranked.len() as u64,
            ..Self::NONE
        };
        *self += Self {
            full: u64::from(bypassed == 0 && rows == set.visible().len()),
            bypassed_heads: bypassed as u64,
            index_bytes: reads.index_bytes.map(|bytes| bytes as u64),
            moved_bytes: reads.moved_bytes.map(|bytes| bytes as u64),
            scratch_bytes: reads.scratch_bytes.map(|bytes| bytes as u64),
            ..known.in_rows(kv, head_dim)
        };
    }

    /// Returns the bytes of all visible keys and values of `head_dim` channels in bf16.
    pub fn bytes_in_bf16(&self, head_dim: usize) -> f64 {
        self.visible as f64 * KvType::BF16.bytes_per_position(head_dim) as f64
    }

    /// Returns the same counts with the bytes of rows and keys in a cache of type `kv` with `head_dim` channels.
    pub(crate) fn in_rows(self, kv: KvType, head_dim: usize) -> Self {
        let (row, key, more, lower) = (
            kv.bytes_per_position(head_dim) as u64,
            kv.bytes_per_key(head_dim) as u64,
            kv.more_per_end(head_dim) as u64,
            kv.lower_bytes(head_dim) as u64,
        );
        let shared = self.choices * kv.shared_bytes(head_dim) as u64;
        let [ends, attended] = self.ends;
        Self {
            kv_bytes: shared + self.rows * row + attended * more + self.ranked_keys * key
                - self.upper_rows * lower,
            visible_bytes: shared + self.visible * row + ends * more,
            uncompressed_bytes: self.visible * kv.uncompressed_bytes(head_dim) as u64,
            ..self
        }
    }

    /// Returns all bytes read, those of the index included; `None` if the device does not report the index's bytes.
    pub fn bytes(&self) -> Option<u64> {
        self.index_bytes.map(|index| index + self.kv_bytes)
    }

    /// Returns [`Counts::bytes`] over the bytes of all visible keys and values in the same cache; `None` also if there
    /// was no selection.
    pub fn bytes_fraction(&self) -> Option<f64> {
        over(self.bytes(), self.visible_bytes)
    }

    /// Returns [`Counts::bytes`] over the bytes of all visible keys and values in floats, with which reads of caches of
    /// different formats can be compared.
    pub fn uncompressed_fraction(&self) -> Option<f64> {
        over(self.bytes(), self.uncompressed_bytes)
    }

    /// Returns [`Counts::moved_bytes`] over the same bytes as [`Counts::uncompressed_fraction`].
    pub fn uncompressed_moved_fraction(&self) -> Option<f64> {
        over(self.moved_bytes, self.uncompressed_bytes)
    }

    /// Returns [`Counts::moved_bytes`] over the same bytes as [`Counts::bytes_fraction`].
    pub fn moved_fraction(&self) -> Option<f64> {
        over(self.moved_bytes, self.visible_bytes)
    }

    /// Returns [`Counts::scratch_bytes`] over the same bytes as [`Counts::bytes_fraction`].
    pub fn scratch_fraction(&self) -> Option<f64> {
        over(self.scratch_bytes, self.visible_bytes)
    }
}

/// Returns bytes over others; `None` without any, as before the first selection.
fn over(bytes: Option<u64>, all: u64) -> Option<f64> {
    bytes.filter(|_| all > 0).map(|bytes| bytes as f64 / all as f64)
}

impl Default for Counts {
    fn default() -> Self {
        Self::NONE
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.choices += other.choices;
        self.visible += other.visible;
        self.rows += other.rows;
        self.ends = [0, 1].map(|i| self.ends[i] + other.ends[i]);
        self.upper_rows += other.upper_rows;
        self.ranked_keys += other.ranked_keys;
        self.kv_bytes += other.kv_bytes;
        self.visible_bytes += other.visible_bytes;
        self.uncompressed_bytes += other.uncompressed_bytes;
        self.full += other.full;
        self.bypassed_heads += other.bypassed_heads;
        let both = |a: Option<u64>, b: Option<u64>| a.zip(b).map(|(a, b)| a + b);
        self.index_bytes = both(self.index_bytes, other.index_bytes);
        self.moved_bytes = both(self.moved_bytes, other.moved_bytes);
        self.scratch_bytes = both(self.scratch_bytes, other.scratch_bytes);
    }
}

impl Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::NONE, |mut sum, one| {
            sum += one;
            sum
        })
    }
}
