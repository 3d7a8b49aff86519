//! The float types of stored values: weights, captured states and cached rows.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// An element type of stored values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Float {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
}

/// Rounds to the nearest f16; values beyond its range become the largest.
pub fn saturating_f16(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Rounds a number that is not negative up to f16; numbers beyond its range become the largest.
pub fn f16_at_least(x: f32) -> f16 {
    let near = saturating_f16(x);
    if near.to_f32() < x && near < f16::MAX {
        f16::from_bits(near.to_bits() + 1)
    } else {
        near
    }
}

impl Float {
    /// Returns the bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns the number that stands for the type in the CUDA kernels.
    pub fn number(self) -> usize {
        self as usize
    }

    /// Widens little-endian `bytes` of this type, `out.len()` elements, to f32.
    pub fn read(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), out.len() * self.bytes(), "bytes of the values");
        match self {
            Self::F32 => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
            Self::Bf16 => widen_bf16(bytes, out),
            Self::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
                Ok(values) => values.convert_to_f32_slice(out),
                // The bytes are not aligned: a tensor may begin at any offset of its file.
                Err(_) => {
                    for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                        *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
                    }
                }
            },
        }
    }

    /// Appends the values as little-endian bytes of this type, rounding to nearest even.
    pub fn write(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend_from_slice(bytemuck::cast_slice(values)),
            Self::F16 => out.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
            Self::Bf16 => out.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
        }
    }

    /// Returns the type's name in safetensors files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }

    /// Converts a safetensors type; `None` for types that kvsmith does not read.
    pub fn from_dtype(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::F16 => Some(Self::F16),
            Dtype::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"))]
fn widen_bf16(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    }
}
