//! The key-value cache: its rows in every type, the positions that a step always attends, and the budget for
//! the positions that a method chooses.
//!
//! [`mod@format`] lists the formats of rows, of which each is a file: [`mod@float`], `int8`, `low_bit` and `layered` (with `ends` and [`map`]), [`packed`]. [`rows`] and
//! [`head`] hold the rows of one KV head on the CPU, [`cuda`] those of a layer on an NVIDIA GPU. [`Qkv`]
//! holds queries, keys and values everywhere.

pub mod budget;
pub mod cuda;
mod ends;
pub mod float;
pub mod format;
pub mod head;
mod int8;
mod layered;
pub mod layout;
pub mod limits;
pub mod lines;
pub(crate) mod low_bit;
pub mod map;
pub mod packed;
pub mod qkv;
pub mod rows;
pub mod sample;
pub mod shape;
pub mod static_set;

pub use budget::Budget;
pub use format::{KvType, RowFormat};
pub use head::KvHead;
pub use limits::Limits;
pub use qkv::{Part, Qkv, Rotated, RotatedQkv};
pub use rows::{Format, Prompted, RowCache, RowStore, Signs};
pub use shape::Shape;
pub use static_set::StaticSet;
