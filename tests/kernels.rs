//! The CUDA kernels compile without a warning, and fit the chips that they are launched on.
//!
//! Needs the nvcc that `build.rs` found; where there is none the tests show as ignored.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use kvsmith::compute::cuda::kernels;
use kvsmith::compute::cuda::nvidia::compile;
use libtest_mimic::{Arguments, Failed, Trial};

/// The nvcc of the build.
const NVCC: Option<&str> = option_env!("KVSMITH_FOUND_NVCC");
/// The folder of what it said.
const REPORTS: Option<&str> = option_env!("KVSMITH_KERNEL_REPORTS");

fn main() -> ExitCode {
    let mut trials = Vec::new();
    for chip in [80, 90] {
        let trial = Trial::test(format!("nvcc::sm_{chip}"), move || {
            check_report(chip, &report(chip)?);
            Ok(())
        });
        trials.push(trial.with_ignored_flag(NVCC.is_none()));
    }
    let nvrtc = nvrtc();
    let missing = nvrtc.is_none();
    let trial = Trial::test("nvrtc", move || {
        check_nvrtc(&nvrtc.ok_or("no NVRTC")?);
        Ok(())
    });
    trials.push(trial.with_ignored_flag(missing));
    trials.push(Trial::test("names", || {
        let mut declared: Vec<String> = declared().into_iter().map(|k| k.name).collect();
        declared.sort();
        assert_eq!(declared, kernels::NAMES, "kernels::NAMES lists every kernel");
        Ok(())
    }));
    if NVCC.is_none() {
        eprintln!("nvcc: ignored, the build found none; `make cuda` fetches one");
    }
    if missing {
        eprintln!("nvrtc: ignored, there is none beside nvcc; `make cuda` fetches one");
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// A kernel as its source declares it.
struct Declared {
    name: String,
    threads: u32,
    /// Blocks that are to share a multiprocessor.
    blocks: u32,
}

/// Every `KERNEL(threads, blocks, name, ...)` of the sources.
fn declared() -> Vec<Declared> {
    let mut out = Vec::new();
    for line in kernels::source().lines() {
        let Some(rest) = line.strip_prefix("KERNEL(") else {
            continue;
        };
        let mut words = rest.split(',').map(str::trim);
        let mut word = || words.next().expect("three words");
        let (threads, blocks) = (word().parse().unwrap(), word().parse().unwrap());
        let name = word().to_owned();
        out.push(Declared {
            name,
            threads,
            blocks,
        });
    }
    out
}

/// What the compilers said of each kernel when the build made its images, with warnings as errors.
fn report(chip: u32) -> Result<String, Failed> {
    let folder = REPORTS.ok_or("no reports")?;
    let text = std::fs::read_to_string(Path::new(folder).join(format!("sm_{chip}.txt")))?;
    match kernels::are_built_in() {
        true => Ok(text),
        false => Err(format!("nvcc failed, for sm_{chip} or another chip:\n{text}").into()),
    }
}

/// No kernel keeps anything in local memory, and each has the registers and the shared memory that let its
/// blocks share a multiprocessor as it says.
fn check_report(chip: u32, report: &str) {
    // Registers of a multiprocessor, and bytes of static shared memory that a block may have.
    let (registers, shared_bytes) = (65_536, 48 << 10);
    for kernel in declared() {
        let name = &kernel.name;
        let marker = format!("Function properties for {name}\n");
        let (_, text) = report
            .split_once(&marker)
            .unwrap_or_else(|| panic!("{name} is not in the report"));
        let text = text.split("Function properties").next().expect("a first part");
        assert!(
            text.contains("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"),
            "sm_{chip}: {name} keeps values in local memory:\n{text}"
        );
        let used = number_before(text, " registers").expect("a count of registers");
        // They are handed out eight to a thread.
        let all = used.next_multiple_of(8) * kernel.threads * kernel.blocks;
        assert!(all <= registers, "sm_{chip}: {name} has {used} registers");
        let shared = number_before(text, " bytes smem").unwrap_or(0);
        assert!(
            shared <= shared_bytes,
            "sm_{chip}: {name} has {shared} bytes of shared memory"
        );
    }
}

/// The number right before `unit`.
fn number_before(text: &str, unit: &str) -> Option<u32> {
    let before = &text[..text.find(unit)?];
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// NVRTC as `make cuda` puts it beside nvcc.
fn nvrtc() -> Option<PathBuf> {
    let toolkit = Path::new(NVCC?).parent()?.parent()?;
    let folders = ["lib", "lib64"].map(|lib| toolkit.join(lib));
    let libraries = folders.map(|lib| lib.join("libnvrtc.so.13"));
    libraries.into_iter().find(|library| library.is_file())
}

/// All kernels compile at run time; for one chip, since no source asks which it is compiled for.
fn check_nvrtc(library: &Path) {
    // Once loaded, it is found by its name alone, and so is the library that it loads itself.
    let builtins = library.with_file_name("libnvrtc-builtins.so.13.0");
    let loaded = [builtins.as_path(), library].map(|library| {
        // SAFETY: the libraries have no code that runs when they are loaded.
        unsafe { libloading::Library::new(library) }.expect("NVRTC loads")
    });
    assert!(
        !kernels::source().contains("__CUDA_ARCH__"),
        "one source for all chips"
    );
    let image = compile::compile((9, 0)).unwrap_or_else(|e| panic!("{e}"));
    assert!(image.starts_with(b"\x7fELF"), "machine code");
    for name in kernels::NAMES {
        let section = format!(".text.{name}\0");
        let found = image
            .windows(section.len())
            .any(|part| part == section.as_bytes());
        assert!(found, "{name} is not in the image");
    }
    // They stay loaded: cudarc keeps what it found in them.
    std::mem::forget(loaded);
}
