//! The formats that caches on the GPU can have. A new format whose rows do not depend on one another is one file with a
//! [`PartFormat`] and its rows, its kernels, and one line in `PARTS`; any other is one file with a [`CudaFormat`] and its
//! [`CudaRows`], its kernels, and one line in `TOGETHER`.

use std::sync::LazyLock;

use super::attend::{Attention, KernelPlaces};
use super::pair::{Pair, PartFormat};
use super::rows::{CudaFormat, CudaRows};
use super::{Shape, float, int8, packed};
use crate::compute::cuda::driver::Driver;
use crate::error::{Error, Result};
use crate::kv::KvType;

/// Formats that keys and values have together.
static TOGETHER: [&dyn CudaFormat; 4] = [
    &float::Floats::F32,
    &float::Floats::F16,
    &float::Floats::BF16,
    &packed::TwoBits,
];

/// Formats that keys or values have, whatever the format of the others.
static PARTS: [&dyn PartFormat; 4] = [
    &float::Floats::F32,
    &float::Floats::F16,
    &float::Floats::BF16,
    &int8::Int8s,
];

/// Every other pair of a format of keys and a format of values.
static PAIRS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    let is_other = |pair: &Pair| TOGETHER.iter().all(|format| format.kv() != pair.kv());
    let with = |keys| {
        PARTS.iter().map(move |values| Pair {
            keys,
            values: *values,
        })
    };
    PARTS
        .iter()
        .flat_map(|keys| with(*keys))
        .filter(is_other)
        .collect()
});

/// Lists all formats.
pub fn formats() -> impl Iterator<Item = &'static dyn CudaFormat> {
    let pairs = PAIRS.iter().map(|pair| pair as &dyn CudaFormat);
    TOGETHER.iter().copied().chain(pairs)
}

/// Returns the format that holds keys and values of this type; `None` if they cannot be on the GPU.
pub fn holding(kv: KvType) -> Option<&'static dyn CudaFormat> {
    formats().find(|format| format.kv() == kv)
}

/// Returns the format that holds keys and values of this type.
///
/// # Errors
/// No format holds this type.
pub fn find(kv: KvType) -> Result<&'static dyn CudaFormat> {
    holding(kv).ok_or_else(|| Error::internal(format!("CUDA: there is no cache of type {kv}")))
}

/// Allocates the empty cache of a layer.
///
/// # Errors
/// Sizes that the kernels do not support; a type that no format [holds](holding); out of memory.
pub fn cache<'d>(driver: &'d dyn Driver, shape: Shape, kv: KvType) -> Result<Box<dyn CudaRows + 'd>> {
    find(kv)?.cache(driver, shape)
}

impl<'d> Attention<'d> {
    /// Allocates the buffers of one step over rows of any format.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let mut kernels: Vec<KernelPlaces> = Vec::new();
        for format in formats() {
            let (kernel, shared_bytes) = format.kernel(&shape)?;
            if kernels.iter().all(|known| known.kernel.name != kernel.name) {
                let places = driver.blocks_at_once(kernel, shared_bytes)?;
                kernels.push(KernelPlaces { kernel, places });
            }
        }
        Self::with(driver, shape, &kernels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::format;

    fn shapes() -> impl Iterator<Item = Shape> {
        [20, 64, 80, 96, 128].into_iter().map(|head_dim| Shape {
            sequences: 1,
            kv_heads: 2,
            group: 4,
            head_dim,
            capacity: 100,
        })
    }

    #[test]
    fn a_type_has_one_format() {
        for (at, format) in formats().enumerate() {
            let kv = format.kv();
            assert_eq!(formats().position(|other| other.kv() == kv), Some(at), "{kv}");
        }
        let floats_and_bytes = ["f32", "f16", "bf16", "int8"];
        for keys in floats_and_bytes {
            for values in floats_and_bytes {
                assert!(holding(KvType::named(&format!("k={keys},v={values}")).unwrap()).is_some());
            }
        }
        let without = KvType {
            keys: format::RowFormat::F16,
            values: format::RowFormat::TWO_BIT,
        };
        assert!(holding(without).is_none() && find(without).is_err());
    }

    #[test]
    fn a_format_has_a_kernel_for_every_shape() {
        for format in formats() {
            for shape in shapes() {
                let (kernel, shared_bytes) = format.kernel(&shape).unwrap();
                assert!(shared_bytes <= kernel.shared_bytes, "{} {shape:?}", format.kv());
            }
        }
    }

    #[test]
    fn a_position_takes_at_least_the_bytes_of_its_rows() {
        for format in formats() {
            for shape in shapes() {
                let (kv, bytes) = (format.kv(), format.bytes_per_position(&shape));
                assert!(bytes >= kv.bytes_per_position(shape.head_dim), "{kv} {shape:?}");
                let padded = kv.bytes_per_position(shape.width());
                assert!(bytes <= padded, "{kv} {shape:?}");
            }
        }
    }
}
