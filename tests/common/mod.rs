//! What the test files share.
#![allow(dead_code, missing_docs, reason = "each test file uses a part of it")]

use std::path::{Path, PathBuf};

use ndarray::{ArrayBase, Data, Dimension};

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

pub fn golden(name: &str) -> PathBuf {
    root().join("tests/fixtures/golden").join(name)
}

/// Every golden checkpoint, by name.
pub fn all_golden() -> impl Iterator<Item = PathBuf> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(root().join("tests/fixtures/golden"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
    dirs.sort();
    assert_eq!(dirs.len(), 10, "golden checkpoints");
    dirs.into_iter()
}

pub fn relative_error<S, T, D>(actual: &ArrayBase<S, D>, expected: &ArrayBase<T, D>) -> f64
where
    S: Data<Elem = f32>,
    T: Data<Elem = f32>,
    D: Dimension,
{
    assert_eq!(actual.shape(), expected.shape());
    let mut difference = 0.0;
    let mut norm = 0.0;
    for (a, b) in actual.iter().zip(expected.iter()) {
        difference += (f64::from(*a) - f64::from(*b)).powi(2);
        norm += f64::from(*b).powi(2);
    }
    (difference / norm).sqrt()
}

/// A copy of a folder of plain files.
pub fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
}
