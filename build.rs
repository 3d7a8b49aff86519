//! Compiles `kernels/` into the program where there is an nvcc: `KVSMITH_NVCC`, one of `CUDA_HOME` or the
//! path, or the one that `make cuda` fetched. Without one the program compiles the kernels when it runs.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Machine code for A100 and H100, and PTX for what comes later.
const TARGETS: [&str; 3] = [
    "arch=compute_80,code=sm_80",
    "arch=compute_90,code=sm_90",
    "arch=compute_80,code=compute_80",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rerun-if-env-changed=KVSMITH_NVCC");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let image = out.join("kvsmith.fatbin");
    let nvcc = find();
    if let Some(nvcc) = &nvcc {
        // For tests/kernels.rs.
        println!("cargo:rustc-env=KVSMITH_FOUND_NVCC={}", nvcc.display());
    }
    let text = match nvcc.is_some_and(|nvcc| compile(&nvcc, &image)) {
        // The loader of the driver reads the image as 64-bit words.
        true => format!(
            "#[repr(align(16))]\nstruct Aligned<T: ?Sized>(T);\n\
             static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!({image:?}));\n\
             const IMAGE: Option<&[u8]> = Some(&ALIGNED.0);\n"
        ),
        false => "const IMAGE: Option<&[u8]> = None;\n".to_owned(),
    };
    std::fs::write(out.join("kernel_image.rs"), text).expect("OUT_DIR can be written to");
}

/// The nvcc to use. An empty `KVSMITH_NVCC` asks for none.
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

fn compile(nvcc: &Path, image: &Path) -> bool {
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-Werror", "all-warnings", "-fatbin", "-o"]);
    command.arg(image).arg("kernels/kvsmith.cu");
    TARGETS.iter().for_each(|target| {
        command.args(["-gencode", target]);
    });
    let error = match command.output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(e) => e.to_string(),
    };
    println!(
        "cargo:warning=CUDA kernels are not built in: {} failed",
        nvcc.display()
    );
    error.lines().for_each(|line| println!("cargo:warning={line}"));
    false
}
