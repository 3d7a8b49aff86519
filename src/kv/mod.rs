//! The key-value cache: its rows in every type, the positions that a step always attends, and the budget for
//! the positions that a method chooses.
//!
//! [`rows`] and [`packed`] hold the rows of one KV head on the CPU, [`cuda`] those of a layer on an NVIDIA
//! GPU.

pub mod budget;
pub mod cuda;
pub mod lines;
pub mod packed;
pub mod rows;
pub mod sample;
pub mod static_set;
pub mod types;

pub use budget::Budget;
pub use rows::{KvHead, RowStore};
pub use static_set::StaticSet;
pub use types::KvType;
