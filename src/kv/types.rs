//! The element types of cached keys and values.

use super::packed;
use crate::float::Float;
use crate::parameters::choices;

choices! {
    /// Element type of cached keys and values.
    pub enum KvType {
        /// 32-bit floats.
        F32 = "f32",
        /// 16-bit floats (IEEE half precision).
        F16 = "f16",
        /// 16-bit floats (bfloat16).
        Bf16 = "bf16",
        /// Signs, 2-bit magnitudes and 2-bit values, and up to 64 positions in f16 (Self-Indexing KVCache).
        TwoBit = "2bit",
    }
}

impl KvType {
    /// Returns the bytes of a key and a value of d channels.
    pub fn bytes_per_position(self, d: usize) -> usize {
        let of_float = |float: Float| 2 * d * float.bytes();
        self.float().map_or_else(|| packed::row_bytes(d), of_float)
    }

    /// Returns the bytes of a key of d channels.
    pub fn bytes_per_key(self, d: usize) -> usize {
        match self {
            Self::TwoBit => packed::row_bytes(d).midpoint(packed::sign_bytes(d)),
            _ => self.bytes_per_position(d) / 2,
        }
    }

    /// Returns the bytes per position of each array that holds keys, then of each that holds values.
    pub fn row_arrays(self, d: usize) -> [[Option<usize>; 2]; 2] {
        let value = self.bytes_per_position(d) - self.bytes_per_key(d);
        let signs = (self == Self::TwoBit).then(|| packed::sign_bytes(d));
        [[Some(value), signs], [Some(value), None]]
    }

    /// Returns the float type; `None` for 2-bit rows.
    pub fn float(self) -> Option<Float> {
        match self {
            Self::F32 => Some(Float::F32),
            Self::F16 => Some(Float::F16),
            Self::Bf16 => Some(Float::Bf16),
            Self::TwoBit => None,
        }
    }
}

impl From<Float> for KvType {
    fn from(float: Float) -> Self {
        match float {
            Float::F32 => Self::F32,
            Float::F16 => Self::F16,
            Float::Bf16 => Self::Bf16,
        }
    }
}
