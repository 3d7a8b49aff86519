//! Generates typed launches for the kernels of `kernels/` and `shaders/`, and compiles `kernels/` with nvcc
//! to embed the machine code in the program.
//!
//! nvcc is `KVSMITH_NVCC`, else the first found in `CUDA_HOME`, in `PATH` and where `make cuda` puts it.
//! Without nvcc, the program compiles its kernels at run time.

#[path = "build/mod.rs"]
mod build;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use build::{kernels, launches, shaders};

/// Compute capabilities (times ten) that get machine code: A100 and H100.
const CHIPS: [u32; 2] = [80, 90];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-env-changed=KVSMITH_NVCC");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    watch_sources();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    write_launches(&out);
    println!("cargo:rerun-if-changed=shaders");
    let entries = shaders::read_folder(Path::new("shaders")).unwrap_or_else(|e| panic!("shaders/: {e}"));
    std::fs::write(out.join("shaders.rs"), shaders::write(&entries)).expect("OUT_DIR can be written to");
    let images = find().is_some_and(|nvcc| {
        // tests/kernels.rs reads the compiler's path and its output.
        println!("cargo:rustc-env=KVSMITH_FOUND_NVCC={}", nvcc.display());
        println!("cargo:rustc-env=KVSMITH_KERNEL_REPORTS={}", out.display());
        compile_all(&nvcc, &out)
    });
    let mut text = String::new();
    let mut list = String::new();
    for chip in CHIPS.iter().filter(|_| images) {
        let path = image(&out, *chip);
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

/// Writes the table of the kernels with their typed launches, and their sources as one file.
fn write_launches(out: &Path) {
    let read = kernels::read_folder(Path::new("kernels"));
    let (kernels, source) = read.unwrap_or_else(|e| panic!("kernels/: {e}"));
    let launches = launches::write(&kernels).unwrap_or_else(|e| panic!("kernels/: {e}"));
    for (name, text) in [("kernels.rs", launches), ("kernels.cu", source)] {
        std::fs::write(out.join(name), text).expect("OUT_DIR can be written to");
    }
}

/// Finds nvcc. An empty `KVSMITH_NVCC` means that none is used.
fn find() -> Option<PathBuf> {
    if let Some(nvcc) = env::var_os("KVSMITH_NVCC") {
        return Some(PathBuf::from(nvcc)).filter(|nvcc| !nvcc.as_os_str().is_empty());
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR")?);
    let path = env::var_os("PATH").unwrap_or_default();
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin"));
    let folders = home.into_iter().chain(env::split_paths(&path));
    let fetched = root.join("target/cuda/nvidia/cu13/bin");
    let programs = folders.chain([fetched]).map(|folder| folder.join("nvcc"));
    programs.into_iter().find(|nvcc| nvcc.is_file())
}

fn image(out: &Path, chip: u32) -> PathBuf {
    out.join(format!("sm_{chip}.fatbin"))
}

/// Compiles the images of all chips in parallel; false if one fails.
fn compile_all(nvcc: &Path, out: &Path) -> bool {
    let compiled: Vec<bool> = thread::scope(|scope| {
        let jobs = CHIPS.map(|chip| scope.spawn(move || compile(nvcc, out, chip)));
        let done = jobs.into_iter().map(|job| job.join().expect("no panic"));
        done.collect()
    });
    compiled.into_iter().all(|done| done)
}

/// Compiles one chip's image; the compilers' output, with each kernel's resources, goes to `sm_<chip>.txt`.
fn compile(nvcc: &Path, out: &Path, chip: u32) -> bool {
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v"]);
    command.args(["-gencode", &format!("arch=compute_{chip},code=sm_{chip}")]);
    if chip >= 90 {
        // See wait_for_earlier() in kernels/common.h.
        command.arg("-DKVSMITH_OVERLAP");
    }
    if CHIPS.last() == Some(&chip) {
        // PTX, which the driver compiles for later chips.
        command.args(["-gencode", &format!("arch=compute_{chip},code=compute_{chip}")]);
    }
    command
        .arg("-fatbin")
        .arg("-o")
        .arg(image(out, chip))
        .arg("kernels/kvsmith.cu");
    let (done, said) = match command.output() {
        Ok(output) => (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ),
        Err(e) => (false, e.to_string()),
    };
    std::fs::write(out.join(format!("sm_{chip}.txt")), &said).expect("OUT_DIR can be written to");
    if !done {
        println!(
            "cargo:warning=CUDA kernels are not built in: {} failed",
            nvcc.display()
        );
        said.lines().for_each(|line| println!("cargo:warning={line}"));
    }
    done
}
