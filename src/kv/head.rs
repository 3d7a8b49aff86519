//! The key-value cache of one KV head on the CPU, in any formats.

use std::ops::Range;

use ndarray::ArrayView2;

use super::format::{KvType, RowFormat};
use super::layout::Layout;
use super::map::HeadMaps;
use super::rows::{Part, Prompted, RowCache, Signs};
use crate::compute::attention::CachedRows;

/// Rotated keys and values of one KV head; row p belongs to position p.
#[derive(Clone)]
pub struct KvHead {
    kind: KvType,
    keys: Box<dyn RowCache>,
    values: Box<dyn RowCache>,
}

impl KvHead {
    /// Makes an empty cache with space for `capacity` positions; formats of few bits use `layout`.
    pub fn new(kind: KvType, d: usize, capacity: usize, layout: impl Into<Layout>) -> Self {
        Self::mapped(kind, d, capacity, layout, &HeadMaps::HADAMARD)
    }

    /// Does what [`KvHead::new`] does, with other maps than the Hadamard rotation for the formats that map rows.
    pub fn mapped(
        kind: KvType,
        d: usize,
        capacity: usize,
        layout: impl Into<Layout>,
        maps: &HeadMaps,
    ) -> Self {
        let layout = layout.into();
        let cache = |format: RowFormat, part| format.cache(part, d, capacity, layout, maps.part(part));
        Self {
            kind,
            keys: cache(kind.keys, Part::Keys),
            values: cache(kind.values, Part::Values),
        }
    }

    /// Returns the formats of the rows.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Appends the rows of a prompt; the arguments are the fields of [`Prompted`].
    pub fn prompt(
        &mut self,
        keys: ArrayView2<f32>,
        values: ArrayView2<f32>,
        query: &[f32],
        visible: Range<usize>,
    ) {
        let prompted = Prompted {
            keys: keys.reborrow(),
            values: values.reborrow(),
            query,
            visible,
        };
        self.keys.prompt(Part::Keys, &prompted);
        self.values.prompt(Part::Values, &prompted);
    }

    /// Appends keys and values, `[m,d]` each.
    pub fn extend(&mut self, keys: ArrayView2<f32>, values: ArrayView2<f32>) {
        self.keys.extend(keys);
        self.values.extend(values);
    }

    /// Returns a cache that starts with the rows of this cache; they are shared if the formats
    /// [share rows](KvType::shares_rows), else copied.
    pub fn fork(&mut self) -> Self {
        Self {
            kind: self.kind,
            keys: self.keys.fork(),
            values: self.values.fork(),
        }
    }

    /// Counts the positions.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Says whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the rotated keys.
    pub fn keys(&self) -> &dyn CachedRows {
        self.keys.as_ref()
    }

    /// Returns the values.
    pub fn values(&self) -> &dyn CachedRows {
        self.values.as_ref()
    }

    /// Returns the signs of the keys, if their format has signs.
    pub fn signs(&self) -> Option<Signs<'_>> {
        self.keys.signs()
    }

    /// Returns the bytes held.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::compute::attention;
    use crate::kv::packed::Center;

    #[test]
    fn a_fork_is_attended_as_a_store_of_its_own() {
        for (kind, d) in [
            (KvType::F32, 32),
            (KvType::F16, 80),
            (KvType::BF16, 64),
            (KvType::BF16, 20),
            (KvType::INT8, 64),
            (KvType::both(RowFormat::INT4), 80),
            (KvType::both(RowFormat::INT2), 20),
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
}
