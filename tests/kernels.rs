//! The CUDA kernels compile without a warning, fit the GPUs that they are launched on, and are the kernels that
//! `build.rs` found in their sources and that the committed launches are for.
//!
//! Tests that need the nvcc that `build.rs` found show as ignored if there is none.

#[path = "../build/mod.rs"]
mod build;
mod common;
#[path = "backends/emulated.rs"]
mod emulated;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use common::{kept, table};
use emulated::Emulated;
use kvsmith::internal::compute::cuda::kernels;
use kvsmith::internal::compute::cuda::nvidia::compile;
use kvsmith::internal::kv::cuda::attend::parts;
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
    for chip in [80, 90] {
        let disassembler = disassembler();
        let missing = disassembler.is_none() || NVCC.is_none();
        let trial = Trial::test(format!("machine_code::sm_{chip}"), move || {
            check_machine_code(chip, &disassembler.ok_or("no cuobjdump")?);
            Ok(())
        });
        trials.push(trial.with_ignored_flag(missing));
    }
    trials.push(Trial::test("emulation", || Ok(Emulated::new(true).map(drop)?)));
    for (name, check) in [
        ("parser", parser as fn()),
        ("parser::refuses", parser_refuses),
        ("parser::files", parser_files),
        ("families", families),
        ("launches", launches),
    ] {
        trials.push(Trial::test(name, move || {
            check();
            Ok(())
        }));
    }
    if NVCC.is_none() {
        eprintln!("nvcc: ignored, the build found none; `make cuda` fetches one");
    }
    if disassembler().is_none() {
        eprintln!("machine_code: ignored, there is no cuobjdump; `make cuda` fetches one");
    }
    if missing {
        eprintln!("nvrtc: ignored, there is none beside nvcc; `make cuda` fetches one");
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Numbers, macros, families and every kind of parameter.
fn parser() {
    let source = "// KERNEL\n#define KERNEL(threads, blocks, name, ...) void name(__VA_ARGS__)\n#define OPTIONAL\n\
                  #define BYTES(d, n) (4 * (d + 8) \\\n    * n)\n#define ROWS(T) const T *rows, u64 n\n\
                  KERNEL(256, 2, first, const float* x, OPTIONAL u32* y, // a comment, (\n    double eps) {\n\
                  KERNEL_SHARED(32, 1, 1 + BYTES(64, 2), second_half_64, ROWS(u16), float scale) {}\n";
    let kernels = build::kernels::read("", source).unwrap();
    let read = kernels.iter().map(|k| {
        let parameters = k.parameters.iter().map(|p| {
            let marks = (p.is_pointer, p.is_optional);
            format!("{} {} {marks:?}", p.of, p.name)
        });
        let parameters: Vec<String> = parameters.collect();
        (
            &k.name[..],
            k.threads,
            k.blocks,
            k.shared_bytes,
            parameters.join(", "),
        )
    });
    let first = "float x (true, false), u32 y (true, true), double eps (false, false)";
    let second = "u16 rows (true, false), u64 n (false, false), float scale (false, false)";
    let expected = [
        ("first", 256, 2, 0, first.to_owned()),
        ("second_half_64", 32, 1, 1 + 4 * 72 * 2, second.to_owned()),
    ];
    assert_eq!(read.collect::<Vec<_>>(), expected);
}

/// A declaration that cannot be read whole is no kernel of another shape.
fn parser_refuses() {
    const CASES: &str = "
        KERNEL(256, 1, k, u32 n                   | at the start of a line
        KERNELS(256, 1, k, u32 n) {               | not a kind of kernel
        KERNEL(256, 1) {                          | no name
        KERNEL(many, 1, k, u32 n) {               | no number: `many`
        KERNEL(48, 1, k, u32 n) {                 | no kernel
        KERNEL(2048, 1, k, u32 n) {               | no kernel
        KERNEL(256, 1, a b, u32 n) {              | no kernel
        KERNEL_SHARED(256, 1, sizeof(n), k, u32 n) { | no number: `sizeof(n)`
        KERNEL_SHARED(256, 1, 4 * (2, k, u32 n) { | at the start of a line
        KERNEL(256, 1, k) {                       | no parameter
        KERNEL(256, 1, k, UNKNOWN) {              | no parameter that a launch knows: `UNKNOWN`
        KERNEL(256, 1, k, u32) {                  | no parameter that a launch knows: `u32`
        KERNEL(256, 1, k, int n) {                | no parameter that a launch knows: `int n`
        KERNEL(256, 1, k, u16 n) {                | no parameter that a launch knows: `u16 n`
        KERNEL(256, 1, k, u32** x) {              | no parameter that a launch knows: `u32** x`
        KERNEL(256, 1, k, u32& x) {               | no parameter that a launch knows: `u32& x`
        KERNEL(256, 1, k, u32 x[4]) {             | no parameter that a launch knows: `u32 x[4]`
        KERNEL(256, 1, k, OPTIONAL u32 n) {       | no parameter
    ";
    let twice = "KERNEL(256, 1, k, u32 n) {}\nKERNEL(256, 1, k, u32 n) {}";
    let others = [
        ["  KERNEL(256, 1, k, u32 n) {", "at the start of a line"],
        [twice, "k is declared twice"],
    ];
    for [source, expected] in table(CASES).into_iter().chain(others) {
        let e = build::kernels::read("", source).expect_err(source);
        assert!(e.contains(expected), "{source}: {e}");
    }
}

/// What a file includes comes before it, once; a file that is left out is an error.
fn parser_files() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("kvsmith.cu", "#include \"a.cu\"\n#include \"b.cu\"\n");
    write(
        "a.h",
        "#pragma once\n#include \"emulate.h\"\n#define PARAMETERS u32 n\n",
    );
    write("a.cu", "#include \"a.h\"\nKERNEL(32, 1, a, PARAMETERS) {}\n");
    write("b.cu", "#include \"a.h\"\nKERNEL(32, 1, b, PARAMETERS) {}\n");
    let (kernels, source) = build::kernels::read_folder(dir.path()).unwrap();
    let files = kernels.iter().map(|kernel| [&kernel.name[..], &kernel.file]);
    assert_eq!(files.collect::<Vec<_>>(), [["a", "a.cu"], ["b", "b.cu"]]);
    assert_eq!(
        source,
        "#define PARAMETERS u32 n\nKERNEL(32, 1, a, PARAMETERS) {}\nKERNEL(32, 1, b, PARAMETERS) {}\n"
    );
    write("c.cu", "");
    let e = build::kernels::read_folder(dir.path()).unwrap_err();
    assert_eq!(e, "c.cu is not included by kvsmith.cu");
}

/// Kernels that are launched by one struct have the same parameters.
fn families() {
    let write = |second: &str| {
        let source = format!("KERNEL(32, 1, k_half_64, const u16* x, u32 n) {{}}\n{second} {{}}\n");
        build::launches::write(&build::kernels::read("k.cu", &source).unwrap())
    };
    let files = write("KERNEL(32, 1, k_float_64, const float* x, u32 n)").unwrap();
    let names: Vec<&str> = files.iter().map(|(name, _)| &name[..]).collect();
    assert_eq!(names, ["mod.rs", "k.rs"]);
    let launches = &files[1].1;
    assert!(launches.contains("pub(crate) struct K<'b>"), "{launches}");
    assert!(
        launches.contains("pub x: Ptr<'b, c_void>,\n    pub n: usize,"),
        "{launches}"
    );
    for other in [
        "const u16* x",
        "const u16* x, u64 n",
        "const u16* y, u32 n",
        "const u16* x, OPTIONAL const u16* n",
    ] {
        let e = write(&format!("KERNEL(32, 1, k_bfloat_64, {other})")).unwrap_err();
        assert_eq!(e, "k_bfloat_64 has other parameters than the rest of k");
    }
}

/// The committed launches are those of the kernels, and other ones are noticed and written anew.
fn launches() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut kernels, _) = build::kernels::read_folder(&root.join(build::launches::KERNELS)).unwrap();
    build::launches::check(&kernels, &root.join(build::launches::LAUNCHES)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("launches");
    let stale = |kernels: &[_], file: &str| {
        let e = build::launches::check(kernels, &folder).unwrap_err();
        let expected =
            format!("src/compute/cuda/launches/{file} is not what kernels/*.cu declare: run `make launches`");
        assert_eq!(e, expected);
    };
    let written = |kernels: &[_]| {
        build::launches::update(kernels, &folder).unwrap();
        build::launches::check(kernels, &folder).unwrap();
    };
    written(&kernels);
    std::fs::write(folder.join("gone.rs"), "").unwrap();
    stale(&kernels, "gone.rs");
    written(&kernels);
    std::fs::remove_file(folder.join("draw.rs")).unwrap();
    stale(&kernels, "draw.rs");
    written(&kernels);
    let kernel = kernels.iter_mut().find(|kernel| kernel.name == "draw").unwrap();
    kernel.parameters.pop();
    stale(&kernels, "draw.rs");
    written(&kernels);
}

/// What the compilers said of each kernel when the build made its images, with warnings as errors.
fn report(chip: u32) -> Result<String, Failed> {
    let folder = REPORTS.ok_or("no reports")?;
    let text = std::fs::read_to_string(Path::new(folder).join(format!("sm_{chip}.txt")))?;
    if kernels::are_built_in() {
        Ok(text)
    } else {
        Err(format!("nvcc failed, for sm_{chip} or another chip:\n{text}").into())
    }
}

/// No kernel keeps anything in local memory, and each has the registers and the shared memory that let its
/// blocks share a multiprocessor as it says.
fn check_report(chip: u32, report: &str) {
    // Registers of a multiprocessor; bytes of shared memory of a block on 8.0, and on 8.6, 8.9 and 12.0.
    let (registers, most, least) = (65_536, 163 << 10, 99 << 10);
    let compiled = report.split("Function properties for ").skip(1);
    let mut compiled: Vec<&str> = compiled.filter_map(|text| text.lines().next()).collect();
    compiled.sort_unstable();
    let mut names: Vec<&str> = kernels::ALL.iter().map(|kernel| kernel.name).collect();
    names.sort_unstable();
    assert_eq!(
        compiled, names,
        "kernels as nvcc compiled them, and as build.rs read them"
    );
    for kernel in kernels::ALL {
        let name = kernel.name;
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
        let own = number_before(text, " bytes smem").unwrap_or(0);
        let shared = own + kernel.shared_bytes as u32;
        // What takes the place of these where they do not fit: slower kernels.
        let replaced = ["nearest_fast", "prefill_half_128", "prefill_bfloat_128"].contains(&name);
        assert!(
            shared <= if replaced { most } else { least },
            "sm_{chip}: {name} has {shared} bytes of shared memory"
        );
        if name.starts_with("attend_") {
            check_waves(chip, name, used, kernel.threads, shared);
        }
    }
}

/// For every number of KV heads, the blocks of a decode attention run at the same time where the GPU has a place for
/// each head.
fn check_waves(chip: u32, name: &str, registers: u32, threads: u32, shared: u32) {
    // Multiprocessors of an A100, an RTX 3090 and an H200; most threads and shared memory of each multiprocessor.
    let gpus: &[(u32, u32, u32)] = match chip {
        80 => &[(108, 2048, 164 << 10), (82, 1536, 100 << 10)],
        _ => &[(132, 2048, 228 << 10)],
    };
    for &(multiprocessors, most_threads, shared_each) in gpus {
        let by_registers = 65_536 / (registers.next_multiple_of(8) * threads);
        // A block takes 1 KiB more than it asks for.
        let each = by_registers
            .min(most_threads / threads)
            .min(shared_each / (shared + 1024));
        assert!(each > 0, "sm_{chip}: {name} does not run");
        let places = (each * multiprocessors) as usize;
        for heads in 1..=128 {
            let parts = parts(places, heads, usize::MAX);
            assert!(
                parts * heads <= places || heads > places,
                "{name}: {parts} x {heads} of {places}"
            );
            assert!(
                (parts + 1) * heads > places,
                "{name}: {parts} x {heads} leave room of {places}"
            );
        }
    }
}

/// cuobjdump where it is on the path, or as `make cuda` puts it beside nvcc, with nvdisasm.
fn disassembler() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let beside = Path::new(NVCC?).parent()?.to_owned();
    let folders = std::iter::once(beside).chain(std::env::split_paths(&path));
    let has_both = |folder: &PathBuf| {
        ["cuobjdump", "nvdisasm"]
            .iter()
            .all(|name| folder.join(name).is_file())
    };
    folders.into_iter().find(has_both)
}

/// No kernel of a decode step adds in shared memory by a loop of compare-and-swap, as 64-bit additions are, and none has
/// local memory.
fn check_machine_code(chip: u32, folder: &Path) {
    let image = Path::new(REPORTS.expect("a folder")).join(format!("sm_{chip}.cubin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&path));
    let output = Command::new(folder.join("cuobjdump"))
        .arg("-sass")
        .arg(image)
        .env("PATH", std::env::join_paths(folders).expect("a path"))
        .output()
        .expect("cuobjdump runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let functions: Vec<&str> = text.split("Function : ").skip(1).collect();
    assert_eq!(
        functions.len(),
        kernels::ALL.len(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for function in functions {
        let name = function.lines().next().expect("a name").trim();
        // Sums of a prompt's signs, once per prompt.
        assert!(
            !function.contains("ATOMS.CAS") || name == "sign_sums",
            "sm_{chip}: {name}"
        );
        assert!(
            !function.contains(" STL") && !function.contains(" LDL"),
            "sm_{chip}: {name}"
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
    assert!(
        !kernels::SOURCE.contains("__CUDA_ARCH__"),
        "one source for all chips"
    );
    let image = compiled(library);
    assert!(image.starts_with(b"\x7fELF"), "machine code");
    for kernels::Kernel { name, .. } in kernels::ALL {
        let section = format!(".text.{name}\0");
        let found = image
            .windows(section.len())
            .any(|part| part == section.as_bytes());
        assert!(found, "{name} is not in the image");
    }
}

/// The machine code of this NVRTC, which takes half a minute to compile.
fn compiled(library: &Path) -> Vec<u8> {
    let made_by = include_str!("../src/compute/cuda/nvidia/compile.rs");
    let age = library.metadata().and_then(|of| of.modified()).expect("an age");
    let image = kept("nvrtc", (kernels::SOURCE, made_by, library, age), |path| {
        // Once loaded, it is found by its name alone, and so is the library that it loads itself.
        let builtins = library.with_file_name("libnvrtc-builtins.so.13.0");
        let loaded = [builtins.as_path(), library].map(|library| {
            // SAFETY: the libraries have no code that runs when they are loaded.
            unsafe { libloading::Library::new(library) }.expect("NVRTC loads")
        });
        let image = compile::compile((9, 0)).map_err(|e| e.to_string())?;
        // They stay loaded: cudarc keeps what it found in them.
        std::mem::forget(loaded);
        std::fs::write(path, image).map_err(|e| e.to_string())
    });
    std::fs::read(image.unwrap_or_else(|e| panic!("{e}"))).expect("an image")
}
