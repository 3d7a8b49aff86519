//! Where cuBLAS is looked for. NVIDIA ships it with its toolkit and in Python packages, but not with the driver.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};

use libloading::Library;

/// The environment variable that names the library or its folder; if it is empty, no library is used.
const VARIABLE: &str = "KVSMITH_CUBLAS";
/// The major versions whose functions have the signatures used here.
pub const MAJORS: [i32; 3] = [13, 12, 11];
/// Where Python packages keep the library, relative to the folder of all packages: NVIDIA's own packages and older ones
/// of PyTorch.
const PACKAGES: [&str; 4] = [
    "nvidia/cu13/lib",
    "nvidia/cublas/lib",
    "nvidia/cu12/lib",
    "torch/lib",
];

/// Where the library may be.
pub enum Places {
    /// Nowhere: the variable is empty.
    Unwanted,
    /// The variable names it. No other library takes its place.
    Given(PathBuf),
    /// Anywhere.
    Any,
}

impl Places {
    /// Reads the environment variable.
    pub fn wanted() -> Self {
        match env::var_os(VARIABLE) {
            Some(given) if given.is_empty() => Self::Unwanted,
            Some(given) => Self::Given(absolute(PathBuf::from(given))),
            None => Self::Any,
        }
    }

    /// Lists names, for the loader to find, and paths of files, best first. Files whose names have a major version above
    /// `newest` are left out.
    pub fn files(&self, newest: i32) -> Vec<PathBuf> {
        let majors = || MAJORS.into_iter().filter(|major| *major <= newest);
        let of = |major: i32, folder: &Path| folder.join(format!("libcublas.so.{major}"));
        match self {
            Self::Unwanted => Vec::new(),
            Self::Given(folder) if folder.is_dir() => majors()
                .map(|major| of(major, folder))
                .filter(|file| file.is_file())
                .collect(),
            Self::Given(file) => file.is_file().then(|| file.clone()).into_iter().collect(),
            Self::Any => {
                let named = cudarc::get_lib_name_candidates("cublas").into_iter();
                let folders = folders();
                let found = majors().flat_map(|major| folders.iter().map(move |folder| of(major, folder)));
                named
                    .map(PathBuf::from)
                    .chain(found.filter(|file| file.is_file()))
                    .collect()
            }
        }
    }
}

/// Returns a path that the loader does not take for a name.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// Lists the folders of toolkits and Python packages that may hold the library.
fn folders() -> Vec<PathBuf> {
    let variable = |name: &str| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let toolkit = variable("CUDA_HOME")
        .into_iter()
        .chain([PathBuf::from("/usr/local/cuda")]);
    let toolkits = toolkit.map(|toolkit| toolkit.join("lib64"));
    let conda = variable("CONDA_PREFIX").map(|prefix| prefix.join("lib"));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    let user = variable("HOME").map(|home| home.join(".local"));
    let prefixes = environments
        .chain(pythons())
        .chain(user)
        .chain(["/usr/local".into(), "/usr".into()]);
    let packages = prefixes.flat_map(|prefix| packages(&prefix));
    let inside = packages.flat_map(|folder| PACKAGES.map(|place| folder.join(place)));
    toolkits.chain(conda).chain(inside).collect()
}

/// Returns the prefix of the first python3 in the path, and that of the file it links to: those of an environment and of
/// the Python it was made from.
fn pythons() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let python = env::split_paths(&path)
        .map(|folder| folder.join("python3"))
        .find(|file| file.is_file());
    let linked = python.as_ref().and_then(|file| file.canonicalize().ok());
    let prefix = |file: PathBuf| Some(file.parent()?.parent()?.to_owned());
    python.into_iter().chain(linked).filter_map(prefix).collect()
}

/// Returns the folders that hold the packages of the Pythons with this prefix, in a fixed order.
fn packages(prefix: &Path) -> Vec<PathBuf> {
    let lib = prefix.join("lib");
    let entries = lib.read_dir().into_iter().flatten().filter_map(Result::ok);
    let mut versions: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path())
        .collect();
    versions.sort();
    let folders = versions
        .iter()
        .flat_map(|version| ["site-packages", "dist-packages"].map(|name| version.join(name)));
    folders.filter(|folder| folder.is_dir()).collect()
}

/// Loads a library, for as long as the program runs: its own clean-up may come after everything else.
///
/// # Errors
/// What the loader says.
pub fn load(file: &Path) -> Result<&'static Library, String> {
    // libcublas needs libcublasLt, which the loader does not look for beside it; once loaded, it is found by its name.
    let name = file.file_name().and_then(|name| name.to_str());
    let beside = name.map(|name| file.with_file_name(name.replacen("cublas", "cublasLt", 1)));
    if let Some(beside) = beside.filter(|beside| file.is_absolute() && beside.is_file()) {
        open(&beside)?;
    }
    open(file)
}

fn open(file: &Path) -> Result<&'static Library, String> {
    // SAFETY: NVIDIA's library; loading it runs only its own initialisation.
    match unsafe { Library::new(file) } {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        // The loader's own message, which names the file.
        Err(e) => Err(e
            .source()
            .map_or_else(|| e.to_string(), |source| source.to_string())),
    }
}
