//! Cached rows of floats.

use half::{bf16, f16};
use ndarray::ArrayView1;

use super::layout::Layout;
use super::map::RowMap;
use super::qkv::Part;
use super::rows::{Format, RowCache, RowForm, RowStore, RowUnits};
use crate::compute::attention::{LANES, Segment, StoredRows};
use crate::float::Float;
use crate::parameters::Word;

/// Rows of a float type.
pub(super) struct Floats {
    float: Float,
    word: Word,
}

/// 32-bit floats.
pub(super) static F32: Floats = Floats {
    float: Float::F32,
    word: Word {
        name: "f32",
        help: "32-bit floats",
    },
};

/// 16-bit floats.
pub(super) static F16: Floats = Floats {
    float: Float::F16,
    word: Word {
        name: "f16",
        help: "16-bit floats (IEEE half precision)",
    },
};

/// bfloat16.
pub(super) static BF16: Floats = Floats {
    float: Float::Bf16,
    word: Word {
        name: "bf16",
        help: "16-bit floats (bfloat16)",
    },
};

impl Format for Floats {
    fn word(&self) -> Word {
        self.word
    }

    fn arrays(&self, _: Part, d: usize) -> [Option<usize>; 2] {
        [Some(d * self.float.bytes()), None]
    }

    fn float(&self) -> Option<Float> {
        Some(self.float)
    }

    fn cache(&self, _: Part, d: usize, capacity: usize, _: Layout, _: &RowMap) -> Box<dyn RowCache> {
        cache(self.float, d, capacity)
    }
}

/// Makes an empty cache of rows of d floats, with space for `capacity` rows.
pub fn cache(float: Float, d: usize, capacity: usize) -> Box<dyn RowCache> {
    match float {
        Float::F32 => Box::new(RowStore::<f32>::new(d, capacity)),
        Float::F16 => Box::new(RowStore::<f16>::new(d, capacity)),
        Float::Bf16 => Box::new(RowStore::<bf16>::new(d, capacity)),
    }
}

/// Implements [`RowUnits`] and [`RowForm`] for a float type: how to round an f32 to it, and how to read a row.
macro_rules! row_form {
    ($float:ty, $round:expr, $read:expr) => {
        impl RowUnits for $float {
            type Unit = Self;

            fn width(d: usize) -> usize {
                d
            }
        }

        impl RowForm for $float {
            type Rows<'a> = StoredRows<'a, Self>;

            fn is_chunked(d: usize) -> bool {
                d.is_multiple_of(LANES)
            }

            fn store(row: ArrayView1<f32>, to: &mut [Self]) {
                to.iter_mut().zip(row).for_each(|(to, x)| *to = $round(*x));
            }

            fn read<'o>(row: &'o [Self], scratch: &'o mut [f32]) -> &'o [f32] {
                $read(row, scratch)
            }

            fn rows<'a>(segments: &'a [Segment<'a, Self>], d: usize) -> StoredRows<'a, Self> {
                StoredRows {
                    rows: segments[0].rows.as_chunks().0,
                    chunks: d / LANES,
                }
            }
        }
    };
}

row_form!(f32, same, as_they_are);
row_form!(f16, f16::from_f32, widened);
row_form!(bf16, bf16::from_f32, widened);

fn same(x: f32) -> f32 {
    x
}

fn as_they_are<'o>(row: &'o [f32], _: &'o mut [f32]) -> &'o [f32] {
    row
}

/// Widens a row into `out`.
fn widened<'o, E: Copy + Into<f32>>(row: &[E], out: &'o mut [f32]) -> &'o [f32] {
    out.iter_mut().zip(row).for_each(|(o, x)| *o = (*x).into());
    out
}
