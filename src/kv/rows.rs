//! The key-value cache of one KV head on the CPU, in a float type or in 2 bits.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use ndarray::{ArrayView2, s};

use super::KvType;
use super::lines::AlignedVec;
use super::packed::{Layout, Packed, SignRows};
use crate::compute::attention::{self, CachedRows, GroupQueries, LANES, OutputSums, Run, StoredRows};
use crate::float::Float;

/// Rows of d values in a float type, contiguous; forks share their first rows.
#[derive(Clone)]
pub struct RowStore {
    float: Float,
    d: usize,
    /// The first rows, shared with forks: the store that holds them, and how many of its rows belong to this store.
    shared: Option<(Arc<RowStore>, usize)>,
    data: Data,
}

#[derive(Clone)]
enum Data {
    F32(AlignedVec<f32>),
    F16(AlignedVec<f16>),
    Bf16(AlignedVec<bf16>),
}

impl RowStore {
    /// Makes an empty store with space for `capacity` rows.
    pub fn new(float: Float, d: usize, capacity: usize) -> Self {
        let data = match float {
            Float::F32 => Data::F32(AlignedVec::with_capacity(capacity * d)),
            Float::F16 => Data::F16(AlignedVec::with_capacity(capacity * d)),
            Float::Bf16 => Data::Bf16(AlignedVec::with_capacity(capacity * d)),
        };
        Self {
            float,
            d,
            shared: None,
            data,
        }
    }

    /// Returns a new store that starts with the rows of this store; both stores share these rows from here on.
    pub fn fork(&mut self) -> Self {
        if self.own_len() > 0 {
            let rows = self.len();
            let base = std::mem::replace(self, Self::new(self.float, self.d, 0));
            self.shared = Some((Arc::new(base), rows));
        }
        self.clone()
    }

    /// Appends rows `[m,d]`, rounded to the stored type.
    pub fn extend(&mut self, rows: ArrayView2<f32>) {
        assert_eq!(rows.ncols(), self.d, "channels of the rows");
        let values = rows.iter().copied();
        match &mut self.data {
            Data::F32(v) => v.extend(values),
            Data::F16(v) => v.extend(values.map(f16::from_f32)),
            Data::Bf16(v) => v.extend(values.map(bf16::from_f32)),
        }
    }

    /// Counts the rows.
    pub fn len(&self) -> usize {
        self.shared_len() + self.own_len()
    }

    fn shared_len(&self) -> usize {
        self.shared.as_ref().map_or(0, |(_, rows)| *rows)
    }

    fn own_len(&self) -> usize {
        let values = match &self.data {
            Data::F32(v) => v.len(),
            Data::F16(v) => v.len(),
            Data::Bf16(v) => v.len(),
        };
        values / self.d
    }

    /// Says whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits ascending positions into those of shared rows and those of own rows.
    fn split<'a>(&self, positions: &'a [u32]) -> (&'a [u32], &'a [u32]) {
        let shared = self.shared_len();
        positions.split_at(positions.partition_point(|p| (*p as usize) < shared))
    }

    /// Calls `f` with positions of own rows, which are counted from the first own row.
    fn own(&self, run: &Run, f: impl FnOnce(&Run)) {
        let shared = self.shared_len() as u32;
        if shared == 0 {
            return f(run);
        }
        let own = |positions: &[u32]| -> Vec<u32> { positions.iter().map(|p| p - shared).collect() };
        let next = &run.next[..run.next.len().min(attention::AHEAD)];
        f(&Run {
            now: &own(run.now),
            next: &own(next),
        });
    }

    /// Returns own rows in the form that kernels take; d must be a multiple of [`LANES`].
    fn stored<'a, E>(&self, values: &'a [E]) -> StoredRows<'a, E> {
        StoredRows {
            rows: values.as_chunks().0,
            chunks: self.d / LANES,
        }
    }

    /// Returns the bytes held, including reserved space and shared rows.
    pub fn bytes(&self) -> usize {
        let own = match &self.data {
            Data::F32(v) => v.bytes(),
            Data::F16(v) => v.bytes(),
            Data::Bf16(v) => v.bytes(),
        };
        own + self.shared.as_ref().map_or(0, |(rows, _)| rows.bytes())
    }
}

impl CachedRows for RowStore {
    fn dim(&self) -> usize {
        self.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        if let Some((rows, n)) = &self.shared
            && position < *n
        {
            return rows.row(position, scratch);
        }
        let own = position - self.shared_len();
        let at = own * self.d..(own + 1) * self.d;
        match &self.data {
            Data::F32(v) => &v[at],
            Data::F16(v) => widened(&v[at], scratch),
            Data::Bf16(v) => widened(&v[at], scratch),
        }
    }

    fn prefetch(&self, positions: &[u32]) {
        if !self.d.is_multiple_of(LANES) {
            return;
        }
        let (shared, own) = self.split(&positions[..positions.len().min(attention::AHEAD)]);
        if let Some((rows, _)) = &self.shared {
            rows.prefetch(shared);
        }
        self.own(&Run::new(own, own.len()), |run| match &self.data {
            Data::F32(v) => attention::prefetch_first(self.stored(v), run.now),
            Data::F16(v) => attention::prefetch_first(self.stored(v), run.now),
            Data::Bf16(v) => attention::prefetch_first(self.stored(v), run.now),
        });
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        if !self.d.is_multiple_of(LANES) {
            return attention::widened_scores(self, queries, run, out, stride);
        }
        let ((shared, own), (next_shared, next)) = (self.split(run.now), self.split(run.next));
        let at = shared.len();
        if let Some((rows, _)) = &self.shared {
            let run = Run {
                now: shared,
                next: next_shared,
            };
            rows.scores(queries, &run, out, stride);
        }
        if own.is_empty() {
            return;
        }
        self.own(&Run { now: own, next }, |run| {
            let out = &mut out[at..];
            match &self.data {
                Data::F32(v) => attention::scores(queries, self.stored(v), run, out, stride),
                Data::F16(v) => attention::scores(queries, self.stored(v), run, out, stride),
                Data::Bf16(v) => attention::scores(queries, self.stored(v), run, out, stride),
            }
        });
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        if !self.d.is_multiple_of(LANES) {
            return attention::widened_add(self, weights, stride, run, sums);
        }
        let ((shared, own), (next_shared, next)) = (self.split(run.now), self.split(run.next));
        let at = shared.len();
        if let Some((rows, _)) = &self.shared {
            let run = Run {
                now: shared,
                next: next_shared,
            };
            rows.add(weights, stride, &run, sums);
        }
        if own.is_empty() {
            return;
        }
        self.own(&Run { now: own, next }, |run| {
            let weights = &weights[at..];
            match &self.data {
                Data::F32(v) => attention::add(weights, stride, self.stored(v), run, sums),
                Data::F16(v) => attention::add(weights, stride, self.stored(v), run, sums),
                Data::Bf16(v) => attention::add(weights, stride, self.stored(v), run, sums),
            }
        });
    }
}

/// Widens a row into `out`.
fn widened<'o, E: Copy + Into<f32>>(row: &[E], out: &'o mut [f32]) -> &'o [f32] {
    out.iter_mut().zip(row).for_each(|(o, x)| *o = (*x).into());
    out
}

/// Rotated keys and values of one KV head; row p belongs to position p.
#[derive(Clone)]
pub enum KvHead {
    /// In a float type.
    Plain {
        /// Rotated keys.
        keys: RowStore,
        /// Values.
        values: RowStore,
    },
    /// In 2 bits.
    Packed(Box<Packed>),
}

impl KvHead {
    /// Makes an empty cache with space for `capacity` positions; only the 2-bit type uses `layout`.
    pub fn new(kind: KvType, d: usize, capacity: usize, layout: impl Into<Layout>) -> Self {
        match kind.float() {
            Some(float) => Self::Plain {
                keys: RowStore::new(float, d, capacity),
                values: RowStore::new(float, d, capacity),
            },
            None => Self::Packed(Box::new(Packed::new(d, layout, capacity))),
        }
    }

    /// Appends the rows of a prompt. `keys` and `values`, `[n,d]`, are the rows of every position, earlier
    /// ones as read from the cache; `query`, `[d]`, is the prompt's last query averaged over the query
    /// group, and `visible` the positions that this query sees.
    pub fn prompt(
        &mut self,
        keys: ArrayView2<f32>,
        values: ArrayView2<f32>,
        query: &[f32],
        visible: Range<usize>,
    ) {
        match self {
            Self::Plain { .. } => {
                let new = s![self.len().., ..];
                self.extend(keys.slice(new), values.slice(new));
            }
            Self::Packed(packed) => packed.prompt(keys, values, query, visible),
        }
    }

    /// Appends keys and values, `[m,d]` each.
    pub fn extend(&mut self, new_keys: ArrayView2<f32>, new_values: ArrayView2<f32>) {
        match self {
            Self::Plain { keys, values } => {
                keys.extend(new_keys);
                values.extend(new_values);
            }
            Self::Packed(packed) => packed.extend(new_keys, new_values),
        }
    }

    /// Returns a cache that starts with the rows of this cache; rows in a float type are shared, 2-bit rows are copied.
    pub fn fork(&mut self) -> Self {
        match self {
            Self::Plain { keys, values } => Self::Plain {
                keys: keys.fork(),
                values: values.fork(),
            },
            Self::Packed(packed) => Self::Packed(packed.clone()),
        }
    }

    /// Counts the positions.
    pub fn len(&self) -> usize {
        match self {
            Self::Plain { keys, .. } => keys.len(),
            Self::Packed(packed) => packed.len(),
        }
    }

    /// Says whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the rotated keys.
    pub fn keys(&self) -> &dyn CachedRows {
        match self {
            Self::Plain { keys, .. } => keys,
            Self::Packed(packed) => &packed.keys,
        }
    }

    /// Returns the values.
    pub fn values(&self) -> &dyn CachedRows {
        match self {
            Self::Plain { values, .. } => values,
            Self::Packed(packed) => &packed.values,
        }
    }

    /// Returns the type of the rows; `None` for 2 bits.
    pub fn float(&self) -> Option<Float> {
        match self {
            Self::Plain { keys, .. } => Some(keys.float),
            Self::Packed(_) => None,
        }
    }

    /// Returns the keys with their signs; `None` for rows in a float type.
    pub fn signs(&self) -> Option<&SignRows> {
        match self {
            Self::Plain { .. } => None,
            Self::Packed(packed) => Some(&packed.keys),
        }
    }

    /// Returns the bytes held.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Plain { keys, values } => keys.bytes() + values.bytes(),
            Self::Packed(packed) => packed.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::compute::products::{TILE, all_products, products};
    use crate::kv::packed::Center;

    #[test]
    fn a_fork_is_attended_as_a_store_of_its_own() {
        for (kind, d) in [
            (KvType::F32, 32),
            (KvType::F16, 80),
            (KvType::Bf16, 64),
            (KvType::Bf16, 20),
        ] {
            let rows = |first: usize, n: usize, salt: f32| {
                Array2::from_shape_fn((n, d), |(i, j)| (((first + i) * d + j) as f32 * salt).sin())
            };
            let mut whole = KvHead::new(kind, d, 0, Center::Median);
            let mut parts = KvHead::new(kind, d, 0, Center::Median);
            for (first, n) in [(0, 150), (150, 1), (151, 140)] {
                let (keys, values) = (rows(first, n, 0.7), rows(first, n, 0.3));
                whole.extend(keys.view(), values.view());
                parts.extend(keys.view(), values.view());
                if n < 140 {
                    parts = parts.fork();
                }
            }
            let q = rows(0, 6, 0.9);
            let attend = |kv: &KvHead, positions: &[u32]| {
                let mut out = Array2::zeros((6, d));
                let (keys, values) = (kv.keys(), kv.values());
                let (weights, lse) =
                    attention::decode_with_weights(q.view(), keys, values, positions, out.view_mut());
                (out, weights, lse)
            };
            let all: Vec<u32> = (0..291).collect();
            let some: Vec<u32> = (100..291).step_by(3).collect();
            for positions in [&all[..], &all[..150], &all[150..], &all[151..], &some] {
                let expected = attend(&whole, positions);
                assert_eq!(attend(&parts, positions), expected, "{kind:?} {d}");
                assert!(expected.0.iter().any(|x| *x != 0.0));
            }
        }
    }

    /// Every position is visited once and in order; products match f64 within the rounding of d fused sums.
    #[test]
    fn products_are_those_of_the_rows() {
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 * 0.004 - 2.0;
        for (d, r) in [(1, 1), (63, 4), (64, 5), (80, 3), (128, 16)] {
            let n = 2 * TILE + 7;
            let keys = Array2::from_shape_fn((n, d), |(i, c)| bf16::from_f32(value(i * d + c)).to_f32());
            let queries = Array2::from_shape_fn((r, d), |(a, c)| value(a * 131 + c * 7));
            let mut rows = RowStore::new(Float::Bf16, d, n);
            rows.extend(keys.view());
            let positions: Vec<u32> = (0..n as u32).filter(|p| p % 3 != 1).collect();
            let all = all_products(queries.view(), 0.5, &rows, &positions);
            assert_eq!(all.dim(), (r, positions.len()));
            let mut next = 0;
            products(queries.view(), 0.5, &rows, &positions, |place, products| {
                assert_eq!(place, next);
                assert_eq!(all.column(place).to_vec(), products);
                next += 1;
                let key = keys.row(positions[place] as usize);
                for (query, product) in queries.rows().into_iter().zip(products) {
                    let terms = query
                        .iter()
                        .zip(key)
                        .map(|(q, k)| f64::from(*q) * 0.5 * f64::from(*k));
                    let size: f64 = terms.clone().map(f64::abs).sum();
                    let error = (f64::from(*product) - terms.sum::<f64>()).abs();
                    assert!(
                        error <= (d as f64 + 2.0) * 2f64.powi(-24) * size,
                        "{d} {r} {place}: {error}"
                    );
                }
            });
            assert_eq!(next, positions.len());
        }
    }
}
