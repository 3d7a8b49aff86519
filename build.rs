//! Checks that the typed launches of the kernels of `kernels/` are what these declare, generates those of `shaders/`, and
//! compiles `kernels/` with nvcc to embed the machine code in the program.
//!
//! nvcc is `KVSMITH_NVCC`, else the first found in `CUDA_HOME`, in `PATH` and where `make cuda` puts it.
//! Without nvcc, the program compiles its kernels at run time.
//!
//! Drivers of CUDA 12 refuse the machine code and the PTX of CUDA 13. If there is an older ptxas (`KVSMITH_PTXAS`, or
//! where `make cuda` puts it beside its nvcc), nvcc therefore compiles to PTX only. The PTX is marked as that of CUDA
//! 12.4, and this ptxas makes the machine code from it; it refuses what 12.4 did not have.

#[path = "build/mod.rs"]
mod build;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

#[cfg(feature = "wgpu")]
use build::shaders;
use build::{kernels, launches};

/// Compute capabilities (times ten) that get machine code: A100 and H100.
const CHIPS: [u32; 2] = [80, 90];
/// The first compute capability (times ten) on which no machine code of [`CHIPS`] runs.
const LATER: u32 = 100;
/// The version of PTX of CUDA 12.4.
const PTX_VERSION: &str = "8.4";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-env-changed=KVSMITH_NVCC");
    println!("cargo:rerun-if-env-changed=KVSMITH_PTXAS");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    watch_sources();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    read_kernels(&out);
    println!("cargo:rerun-if-changed=shaders");
    #[cfg(feature = "wgpu")]
    {
        let entries = shaders::read_folder(Path::new("shaders")).unwrap_or_else(|e| panic!("shaders/: {e}"));
        std::fs::write(out.join("shaders.rs"), shaders::write(&entries)).expect("OUT_DIR can be written to");
    }
    let tools = Tools::find().filter(|_| cfg!(feature = "cuda"));
    let images = tools.is_some_and(|tools| {
        // tests/kernels.rs reads the compiler's path and its output.
        println!("cargo:rustc-env=KVSMITH_FOUND_NVCC={}", tools.nvcc.display());
        println!("cargo:rustc-env=KVSMITH_KERNEL_REPORTS={}", out.display());
        tools.compile_all(&out)
    });
    let mut text = String::new();
    let mut list = String::new();
    for chip in CHIPS.into_iter().chain([LATER]).filter(|_| images) {
        let path = image(&out, chip);
        text += &format!("static SM_{chip}: &Aligned<[u8]> = &Aligned(*include_bytes!({path:?}));\n");
        list += &format!("({chip}, &SM_{chip}.0), ");
    }
    if images {
        // The driver's loader reads an image as 64-bit words.
        text = format!("#[repr(align(16))]\nstruct Aligned<T: ?Sized>(T);\n{text}");
    }
    text += &format!("const IMAGES: &[(i32, &[u8])] = &[{list}];\n");
    std::fs::write(out.join("kernel_images.rs"), text).expect("OUT_DIR can be written to");
}

/// Makes cargo rebuild when a source that nvcc reads changes; only tests use the emulation's files.
fn watch_sources() {
    let files = std::fs::read_dir("kernels").expect("the kernels are there");
    for path in files.filter_map(|file| Some(file.ok()?.path())) {
        if path.file_stem().is_some_and(|stem| stem != "emulate") {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
}

/// Checks that the committed launches are what the kernels declare, and writes the sources as one file.
fn read_kernels(out: &Path) {
    println!("cargo:rerun-if-changed={}", launches::LAUNCHES);
    let read = kernels::read_folder(Path::new(launches::KERNELS));
    let (kernels, source) = read.unwrap_or_else(|e| panic!("kernels/: {e}"));
    launches::check(&kernels, Path::new(launches::LAUNCHES)).unwrap_or_else(|e| panic!("{e}"));
    std::fs::write(out.join("kernels.cu"), source).expect("OUT_DIR can be written to");
}

/// The compilers.
struct Tools {
    nvcc: PathBuf,
    /// Makes machine code in nvcc's place.
    ptxas: Option<PathBuf>,
}

impl Tools {
    /// Finds nvcc. An empty `KVSMITH_NVCC` means that none is used, an empty `KVSMITH_PTXAS` that nvcc's own is.
    fn find() -> Option<Self> {
        let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR")?);
        let fetched = root.join("target/cuda/nvidia");
        let fetched_nvcc = fetched.join("cu13/bin/nvcc");
        let given = |name: &str| env::var_os(name).map(PathBuf::from);
        let is_given = |path: &PathBuf| !path.as_os_str().is_empty();
        let nvcc = match given("KVSMITH_NVCC") {
            Some(nvcc) => Some(nvcc).filter(is_given),
            None => {
                let path = env::var_os("PATH").unwrap_or_default();
                let home = given("CUDA_HOME").map(|home| home.join("bin"));
                let folders = home.into_iter().chain(env::split_paths(&path));
                let programs = folders.map(|folder| folder.join("nvcc"));
                programs.chain([fetched_nvcc.clone()]).find(|nvcc| nvcc.is_file())
            }
        }?;
        let ptxas = match given("KVSMITH_PTXAS") {
            Some(ptxas) => Some(ptxas).filter(is_given),
            None => Some(fetched.join("cuda_nvcc/bin/ptxas"))
                .filter(|ptxas| nvcc == fetched_nvcc && ptxas.is_file()),
        };
        Some(Self { nvcc, ptxas })
    }

    /// Compiles the images of all chips in parallel; false if one fails.
    fn compile_all(&self, out: &Path) -> bool {
        let compiled: Vec<bool> = thread::scope(|scope| {
            let jobs = CHIPS.map(|chip| scope.spawn(move || self.compile(out, chip)));
            let done = jobs.into_iter().map(|job| job.join().expect("no panic"));
            done.collect()
        });
        compiled.into_iter().all(|done| done)
    }

    /// Compiles one chip's image; the compilers' output, with each kernel's resources, goes to `sm_<chip>.txt`.
    fn compile(&self, out: &Path, chip: u32) -> bool {
        let made = self.make(out, chip);
        let (Ok(said) | Err(said)) = &made;
        std::fs::write(out.join(format!("sm_{chip}.txt")), said).expect("OUT_DIR can be written to");
        if made.is_err() {
            println!(
                "cargo:warning=CUDA kernels are not built in: {} failed",
                self.nvcc.display()
            );
            said.lines().for_each(|line| println!("cargo:warning={line}"));
        }
        made.is_ok()
    }

    /// Makes machine code for a chip, by way of its PTX, which for the last chip is also packed for later ones. Returns
    /// what the compilers said, also if one failed.
    fn make(&self, out: &Path, chip: u32) -> Result<String, String> {
        let ptx = out.join(format!("sm_{chip}.ptx"));
        let virtual_chip = format!("compute_{chip}");
        let mut front = self.nvcc();
        front
            .args(["-std=c++17", "-O3", "-ptx", "-arch", &virtual_chip, "-o"])
            .args([ptx.as_path(), Path::new("kernels/kvsmith.cu")]);
        if chip >= 90 {
            // See wait_for_earlier() in kernels/common.h.
            front.arg("-DKVSMITH_OVERLAP");
        }
        let mut said = run(front)?;
        let mut assembler = match &self.ptxas {
            Some(ptxas) => {
                lower(&ptx).map_err(|e| format!("{}: {e}", ptx.display()))?;
                let mut command = Command::new(ptxas);
                command.args(["-O3", "-Werror", "-v"]);
                command
            }
            None => {
                let mut command = self.nvcc();
                command.args(["-cubin", "-Xptxas", "-v"]);
                command
            }
        };
        assembler
            .args(["-arch", &format!("sm_{chip}"), "-o"])
            .args([&image(out, chip), &ptx]);
        said += &run(assembler)?;
        if CHIPS.last() == Some(&chip) {
            let mut pack = self.nvcc();
            pack.args([
                "-fatbin",
                "-gencode",
                &format!("arch={virtual_chip},code={virtual_chip}"),
                "-o",
            ])
            .args([&image(out, LATER), &ptx]);
            said += &run(pack)?;
        }
        Ok(said)
    }

    fn nvcc(&self) -> Command {
        let mut command = Command::new(&self.nvcc);
        command.args(["-Werror", "all-warnings"]);
        command
    }
}

/// Returns the place of the image for a chip.
fn image(out: &Path, chip: u32) -> PathBuf {
    out.join(match chip {
        LATER => "later.fatbin".to_owned(),
        chip => format!("sm_{chip}.cubin"),
    })
}

/// Marks PTX of a later version as that of [`PTX_VERSION`].
fn lower(ptx: &Path) -> std::io::Result<()> {
    let text = std::fs::read_to_string(ptx)?;
    let lines = text.lines().map(|line| match line.strip_prefix(".version ") {
        Some(version) if is_later(version) => format!(".version {PTX_VERSION}\n"),
        _ => format!("{line}\n"),
    });
    std::fs::write(ptx, lines.collect::<String>())
}

/// Returns whether a version of PTX, such as 9.0, is later than [`PTX_VERSION`].
fn is_later(version: &str) -> bool {
    let parts = |text: &str| {
        text.trim()
            .split('.')
            .map(|part| part.parse().unwrap_or(0))
            .collect::<Vec<u32>>()
    };
    parts(version) > parts(PTX_VERSION)
}

/// Runs a compiler, and returns what it said, also if it failed.
fn run(mut command: Command) -> Result<String, String> {
    let output = command.output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        Ok(said)
    } else {
        Err(said)
    }
}
