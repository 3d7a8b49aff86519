//! What `build.rs` reads and writes, in files that tests read too.

// A test reads a part of it.
#![allow(dead_code)]

pub mod kernels;
pub mod launches;
pub mod shaders;
