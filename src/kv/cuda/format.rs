//! The formats that caches on the GPU can have. A new format is one file with a [`CudaFormat`] and its [`CudaRows`], its
//! kernels, and one line in [`FORMATS`].

use super::attend::{Attention, FormatPlaces};
use super::rows::{CudaFormat, CudaRows};
use super::{Shape, float, int8, packed};
use crate::compute::cuda::driver::Driver;
use crate::error::{Error, Result};
use crate::kv::KvType;

/// All formats.
pub static FORMATS: &[&dyn CudaFormat] = &[
    &float::Floats::F32,
    &float::Floats::F16,
    &float::Floats::BF16,
    &int8::Int8s,
    &packed::TwoBits,
];

/// Returns the format that holds keys and values of this type; `None` if they cannot be on the GPU.
pub fn holding(kv: KvType) -> Option<&'static dyn CudaFormat> {
    FORMATS.iter().copied().find(|format| format.kv() == kv)
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
    /// Allocates the buffers of one step over rows of any of the [`FORMATS`].
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let places_of = |format: &&dyn CudaFormat| {
            let (kernel, shared_bytes) = format.kernel(&shape)?;
            let places = driver.blocks_at_once(kernel, shared_bytes)?;
            Ok(FormatPlaces {
                kv: format.kv(),
                places,
            })
        };
        let formats: Vec<FormatPlaces> = FORMATS.iter().map(places_of).collect::<Result<_>>()?;
        Self::with(driver, shape, &formats)
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
        for (at, format) in FORMATS.iter().enumerate() {
            let kv = format.kv();
            assert_eq!(
                FORMATS.iter().position(|other| other.kv() == kv),
                Some(at),
                "{kv}"
            );
            assert_eq!(find(kv).unwrap().kv(), kv);
        }
        let without = KvType {
            keys: format::RowFormat::F16,
            values: format::RowFormat::TWO_BIT,
        };
        assert!(holding(without).is_none() && find(without).is_err());
    }

    #[test]
    fn a_format_has_a_kernel_for_every_shape() {
        for format in FORMATS {
            for shape in shapes() {
                let (kernel, shared_bytes) = format.kernel(&shape).unwrap();
                assert!(shared_bytes <= kernel.shared_bytes, "{} {shape:?}", format.kv());
            }
        }
    }

    #[test]
    fn a_position_takes_at_least_the_bytes_of_its_rows() {
        for format in FORMATS {
            for shape in shapes() {
                let (kv, bytes) = (format.kv(), format.bytes_per_position(&shape));
                assert!(bytes >= kv.bytes_per_position(shape.head_dim), "{kv} {shape:?}");
                let padded = kv.bytes_per_position(shape.width());
                assert!(bytes <= padded, "{kv} {shape:?}");
            }
        }
    }
}
