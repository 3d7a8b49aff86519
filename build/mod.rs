//! The code generators of `build.rs` and `make launches`, in files that tests include too.

// A test uses only part of it.
#![allow(dead_code)]

pub mod kernels;
pub mod launches;
#[cfg(feature = "wgpu")]
pub mod shaders;
