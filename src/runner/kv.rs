//! The key-value cache of one KV head, in the element type asked for.

use half::{bf16, f16};
use ndarray::ArrayView2;

use crate::compute::attention::Rows;

/// Element type of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KvType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl KvType {
    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Rows of d values, stored one after the other.
pub struct RowStore {
    d: usize,
    data: Data,
}

enum Data {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl RowStore {
    /// An empty store with room for `capacity` rows.
    pub fn new(kind: KvType, d: usize, capacity: usize) -> Self {
        let data = match kind {
            KvType::F32 => Data::F32(Vec::with_capacity(capacity * d)),
            KvType::F16 => Data::F16(Vec::with_capacity(capacity * d)),
            KvType::Bf16 => Data::Bf16(Vec::with_capacity(capacity * d)),
        };
        Self { d, data }
    }

    /// Appends rows, rounding to the stored type: `[m,d]`.
    pub fn extend(&mut self, rows: ArrayView2<f32>) {
        let values = rows.iter().copied();
        match &mut self.data {
            Data::F32(v) => grow(v, rows.len()).extend(values),
            Data::F16(v) => grow(v, rows.len()).extend(values.map(f16::from_f32)),
            Data::Bf16(v) => grow(v, rows.len()).extend(values.map(bf16::from_f32)),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        let values = match &self.data {
            Data::F32(v) => v.len(),
            Data::F16(v) => v.len(),
            Data::Bf16(v) => v.len(),
        };
        values / self.d
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes really held, reserved ones included.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(v) => v.capacity() * 4,
            Data::F16(v) => v.capacity() * 2,
            Data::Bf16(v) => v.capacity() * 2,
        }
    }
}

/// Makes room for `more` values; grows by an eighth, since doubling a cache would waste half of it.
pub fn grow<T>(v: &mut Vec<T>, more: usize) -> &mut Vec<T> {
    if v.capacity() - v.len() < more {
        v.reserve_exact(more.max(v.len() / 8));
    }
    v
}

impl Rows for RowStore {
    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        let at = position * self.d..(position + 1) * self.d;
        match &self.data {
            Data::F32(v) => &v[at],
            Data::F16(v) => {
                for (s, x) in scratch.iter_mut().zip(&v[at]) {
                    *s = x.to_f32();
                }
                scratch
            }
            Data::Bf16(v) => {
                for (s, x) in scratch.iter_mut().zip(&v[at]) {
                    *s = x.to_f32();
                }
                scratch
            }
        }
    }
}

/// Rotated keys and values of one KV head; row p is position p.
pub struct KvHead {
    /// After rotation.
    pub keys: RowStore,
    /// Values.
    pub values: RowStore,
}

impl KvHead {
    /// An empty cache with room for `capacity` positions.
    pub fn new(kind: KvType, d: usize, capacity: usize) -> Self {
        Self {
            keys: RowStore::new(kind, d, capacity),
            values: RowStore::new(kind, d, capacity),
        }
    }

    /// Bytes really held.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }
}
