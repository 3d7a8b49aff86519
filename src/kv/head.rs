//! The key-value cache of one KV head on the CPU, in any formats.

use std::ops::Range;

use ndarray::{ArrayView2, s};

use super::format::{KvType, RowFormat};
use super::layered::Layered;
use super::layout::Layout;
use super::map::HeadMaps;
use super::qkv::Part;
use super::rows::{LayeredCache, Prompted, RowCache, Signs};
use crate::compute::attention::CachedRows;

/// Rotated keys and values of one KV head; row p belongs to position p.
#[derive(Clone)]
pub struct KvHead {
    kind: KvType,
    held: Held,
}

/// How keys and values are held.
#[derive(Clone)]
enum Held {
    Apart {
        keys: Box<dyn RowCache>,
        values: Box<dyn RowCache>,
    },
    /// Both in layers, side by side.
    Pair(Box<Layered>),
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
        let held = if kind.is_layered_pair() {
            Held::Pair(Box::new(Layered::pair(d, capacity, layout, maps)))
        } else {
            Held::Apart {
                keys: cache(kind.keys, Part::Keys),
                values: cache(kind.values, Part::Values),
            }
        };
        Self { kind, held }
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
        match &mut self.held {
            Held::Apart { keys, values } => {
                keys.prompt(Part::Keys, &prompted);
                values.prompt(Part::Values, &prompted);
            }
            Held::Pair(layered) => {
                let new = s![layered.len().., ..];
                layered.append(&[prompted.keys.slice(new), prompted.values.slice(new)]);
            }
        }
    }

    /// Appends keys and values, `[m,d]` each.
    pub fn extend(&mut self, keys: ArrayView2<f32>, values: ArrayView2<f32>) {
        match &mut self.held {
            Held::Apart {
                keys: own_keys,
                values: own_values,
            } => {
                own_keys.extend(keys);
                own_values.extend(values);
            }
            Held::Pair(layered) => layered.append(&[keys.reborrow(), values.reborrow()]),
        }
    }

    /// Returns a cache that starts with the rows of this cache; they are shared if the formats
    /// [share rows](KvType::shares_rows), else copied.
    pub fn fork(&mut self) -> Self {
        let held = match &mut self.held {
            Held::Apart { keys, values } => Held::Apart {
                keys: keys.fork(),
                values: values.fork(),
            },
            Held::Pair(layered) => Held::Pair(Box::new(layered.forked())),
        };
        Self {
            kind: self.kind,
            held,
        }
    }

    /// Counts the positions.
    pub fn len(&self) -> usize {
        match &self.held {
            Held::Apart { keys, .. } => keys.len(),
            Held::Pair(layered) => layered.len(),
        }
    }

    /// Says whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the rotated keys.
    pub fn keys(&self) -> &dyn CachedRows {
        match &self.held {
            Held::Apart { keys, .. } => keys.as_ref(),
            Held::Pair(layered) => &**layered,
        }
    }

    /// Returns the values.
    pub fn values(&self) -> &dyn CachedRows {
        match &self.held {
            Held::Apart { values, .. } => values.as_ref(),
            Held::Pair(layered) => layered.second(),
        }
    }

    /// Returns keys or values as a step reads them that reads both layers of the rows at `whole` (ascending), and only the upper one
    /// of others; `None` if they are not in layers.
    pub fn in_layers<'a>(&'a self, part: Part, whole: &'a [u32]) -> Option<Box<dyn CachedRows + 'a>> {
        match (&self.held, part) {
            (Held::Pair(layered), Part::Keys) => Some(layered.reading(whole)),
            (Held::Pair(layered), Part::Values) => Some(Box::new(layered.part(1, Some(whole)))),
            (Held::Apart { keys: rows, .. }, Part::Keys)
            | (Held::Apart { values: rows, .. }, Part::Values) => {
                rows.layered().map(|layered| layered.reading(whole))
            }
        }
    }

    /// Returns how many of the rows that a step chooses it reads whole; `None` if all of them.
    pub fn whole_rows(&self, chosen: usize) -> Option<usize> {
        match &self.held {
            Held::Apart { keys, values } => {
                let layered = keys.layered().or_else(|| values.layered());
                layered.and_then(|layered| layered.whole_rows(chosen))
            }
            Held::Pair(layered) => layered.whole_rows(chosen),
        }
    }

    /// Returns the signs of the keys, if their format has signs.
    pub fn signs(&self) -> Option<Signs<'_>> {
        match &self.held {
            Held::Apart { keys, .. } => keys.signs(),
            Held::Pair(_) => None,
        }
    }

    /// Returns the bytes held.
    pub fn bytes(&self) -> usize {
        match &self.held {
            Held::Apart { keys, values } => keys.bytes() + values.bytes(),
            Held::Pair(layered) => layered.bytes(),
        }
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
            (KvType::both(RowFormat::INT4_4), 64),
            (KvType::both(RowFormat::INT4_4), 20),
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
