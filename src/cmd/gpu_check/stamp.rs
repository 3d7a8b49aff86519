//! The file in the user's cache that says which GPU has passed `gpu-check`, with which driver and which program.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::compute::cuda::nvidia::Found;
use crate::disk::{self, Output};
use crate::error::{Error, Result};
use crate::store::hex;

/// What passed, as the file says it in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// The GPU and its compute capability.
    pub gpu: String,
    /// The versions of the driver.
    pub driver: String,
    /// The version of kvsmith.
    pub program: String,
    /// The GPU as the program names it once it is open, and what multiplies.
    pub adapter: String,
}

impl Stamp {
    /// Describes a GPU with its driver and this program.
    pub fn new(found: &Found, adapter: String) -> Self {
        Self {
            gpu: found.gpu.clone(),
            driver: found.driver(),
            program: program(),
            adapter,
        }
    }

    /// Reads the stamp of a GPU; `None` if it has not passed with this driver and this program.
    pub fn read(found: &Found) -> Option<Self> {
        let text = std::fs::read(path(found).ok()?).ok()?;
        let stamp: Self = serde_json::from_slice(&text).ok()?;
        let expected = Self::new(found, stamp.adapter.clone());
        (stamp == expected).then_some(stamp)
    }

    /// Tells whether an open GPU has passed, with what multiplies on it now if it was opened for products.
    pub fn has_passed(gpu: &dyn Driver) -> bool {
        let stamp = Found::first().ok().and_then(|found| Self::read(&found));
        stamp.is_some_and(|stamp| gpu.products().is_none() || stamp.adapter == gpu.described())
    }

    /// Completes the file that [`create`] began.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, to: Output) -> Result<()> {
        let text = serde_json::to_string(self).map_err(|e| Error::system(e.to_string()))?;
        to.finish((text + "\n").as_bytes())
    }
}

/// Begins the file of a GPU, in a folder that is made if it is not there.
///
/// # Errors
/// There is no folder for caches, or it cannot be written.
pub fn create(found: &Found) -> Result<Output> {
    let path = path(found)?;
    disk::make_folder(disk::folder_of(&path)).map_err(|e| Error::io(&path, "write", &e))?;
    Output::create(&path)
}

/// Removes the file of a GPU, if there is one.
///
/// # Errors
/// The file cannot be removed.
pub fn remove(found: &Found) -> Result<()> {
    let path = path(found)?;
    disk::remove_file(&path).map_err(|e| Error::io(&path, "remove", &e))
}

/// Returns the path of a GPU's file, which also depends on the driver: machines with other ones may share the folder.
///
/// # Errors
/// There is no folder for caches.
fn path(found: &Found) -> Result<PathBuf> {
    let folder = disk::user_cache().ok_or_else(|| {
        Error::system("there is no folder for the result: neither XDG_CACHE_HOME nor HOME is set")
            .hint("set XDG_CACHE_HOME to a folder that can be written")
    })?;
    let digest = Sha256::digest(format!("{}\n{}", found.gpu, found.driver()));
    Ok(folder
        .join("kvsmith")
        .join(format!("gpu-check-{}.json", hex(&digest[..6]))))
}

/// Returns the version of this program, with its commit and a digest of its kernels: builds outside of `make` know no
/// commit.
pub fn program() -> String {
    let commit = option_env!("KVSMITH_COMMIT").unwrap_or("unknown");
    let kernels = Sha256::digest(kernels::SOURCE);
    format!(
        "{}, commit {commit}, kernels {}",
        env!("CARGO_PKG_VERSION"),
        hex(&kernels[..6])
    )
}
