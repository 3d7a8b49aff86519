//! Where cuBLAS is found, and what is said without it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::command;
use super::common::{Outcome, kvsmith, root};

/// Builds the stand-in for cuBLAS of a major version into a folder.
pub fn build_cublas(folder: &Path, major: u32) {
    std::fs::create_dir_all(folder).unwrap();
    for (name, needs) in [("libcublasLt", None), ("libcublas", Some("libcublasLt"))] {
        let file = |name: &str| format!("{name}.so.{major}");
        let mut compiler = Command::new("g++");
        compiler
            .args(["-std=c++20", "-O2", "-shared", "-fPIC"])
            .arg(format!("-DVERSION={major}"))
            .arg(format!("-Wl,-soname,{}", file(name)))
            .arg(root().join(format!("tests/cuda_driver/{name}.cpp")))
            .args(needs.map(|needs| folder.join(file(needs))))
            .arg("-o")
            .arg(folder.join(file(name)));
        let made = compiler.output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
}

/// A machine with Python packages in one folder.
struct Machine<'d> {
    driver: &'d Path,
    home: tempfile::TempDir,
}

impl<'d> Machine<'d> {
    fn new(driver: &'d Path) -> Self {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(
            home.path().join("ids"),
            "[[3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21]]",
        )
        .unwrap();
        Self { driver, home }
    }

    fn at(&self, place: &str) -> PathBuf {
        self.home.path().join(place)
    }

    /// A command that looks for cuBLAS in `variables` and in no other place of the user's.
    fn command(&self, arguments: &str, variables: &[(&str, &Path)]) -> Command {
        let mut command = command(self.driver, arguments);
        for variable in ["KVSMITH_CUBLAS", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME"] {
            command.env_remove(variable);
        }
        command
            .env("HOME", self.at("nothing"))
            .env("PATH", self.at("nothing"));
        command.envs(variables.iter().copied());
        command
    }

    /// Dumps the states of 19 tokens, which is a product of more than 16 rows.
    fn dump(&self, more: &str, variables: &[(&str, &Path)]) -> Outcome {
        let at = self.home.path().display();
        let arguments = format!(
            "dump -v --model tests/fixtures/golden/llama_default --tokens {at}/ids --wrope-position 64 --device cuda \
             -o {at}/dump {more}"
        );
        let outcome = Outcome::from_output(self.command(&arguments, variables).output().unwrap()).ok();
        std::fs::remove_dir_all(self.at("dump")).unwrap();
        outcome
    }
}

/// The library is found where a variable says and in the packages of Python environments, the newest first, and brings
/// what it needs along.
pub fn places(driver: &Path) {
    let machine = Machine::new(driver);
    let at = |place: &str| machine.at(place);
    build_cublas(&at("given"), 12);
    build_cublas(&at("venv/lib/python3.9/site-packages/nvidia/cublas/lib"), 12);
    build_cublas(&at("conda/lib/python3.12/site-packages/torch/lib"), 11);
    build_cublas(&at("system/lib/python3.11/dist-packages/nvidia/cu13/lib"), 13);
    build_cublas(
        &at("nothing/.local/lib/python3.13/site-packages/nvidia/cublas/lib"),
        11,
    );
    for place in ["system/bin", "venv/bin"] {
        std::fs::create_dir_all(at(place)).unwrap();
    }
    std::fs::write(at("system/bin/python3"), "").unwrap();
    std::os::unix::fs::symlink(at("system/bin/python3"), at("venv/bin/python3")).unwrap();
    let (given, file) = (at("given"), at("given/libcublas.so.12"));
    let (venv, conda) = (at("venv"), at("conda"));
    let (bin, venv_bin) = (at("system/bin"), at("venv/bin"));
    let cases: [(&[(&str, &Path)], u32); 8] = [
        (&[("KVSMITH_CUBLAS", &given), ("PATH", &bin)], 12),
        (&[("KVSMITH_CUBLAS", &file), ("PATH", &bin)], 12),
        (&[("VIRTUAL_ENV", &venv)], 12),
        (&[("CONDA_PREFIX", &conda)], 11),
        (&[("PATH", &bin)], 13),
        (&[("PATH", &venv_bin)], 13),
        (&[("VIRTUAL_ENV", &venv), ("PATH", &bin)], 13),
        (&[], 11),
    ];
    for (variables, major) in cases {
        let text = machine.dump("", variables).stderr;
        let started = format!("stand-in cuBLAS {major} with libcublasLt {major}\n");
        assert!(text.contains(&started), "{variables:?}: {text}");
        assert!(
            text.contains(&format!(", products by cuBLAS {major}.4)")),
            "{text}"
        );
        assert!(!text.contains("warning"), "{text}");
    }
    // An older driver gets a library that it can run.
    let mut command = machine.command(
        "run --model tests/fixtures/golden/llama_default --tokens calib-data/none --device cuda",
        &[("VIRTUAL_ENV", &venv), ("PATH", &bin)],
    );
    let text = Outcome::from_output(command.env("FAKE_CUDA_VERSION", "12040").output().unwrap()).stderr;
    assert!(text.contains("stand-in cuBLAS 12"), "{text}");
}

/// What the library costs where it is missing is said once, by commands that would use it.
pub fn missing(driver: &Path) {
    let machine = Machine::new(driver);
    let nowhere = machine.at("nowhere");
    let variables: [(&str, &Path); 1] = [("KVSMITH_CUBLAS", &nowhere)];
    let warning = format!(
        "warning: cuBLAS was not found at {} (KVSMITH_CUBLAS): ",
        nowhere.display()
    );
    let text = machine.dump("", &variables).stderr;
    assert_eq!(text.matches("warning: ").count(), 1, "{text}");
    assert!(
        text.contains(&warning) && text.contains("`pip install nvidia-cublas`"),
        "{text}"
    );
    assert!(text.contains(", products by kvsmith)"), "{text}");
    // Products in f32 do not use it.
    assert!(
        !machine
            .dump("--precision f32", &variables)
            .stderr
            .contains("warning")
    );
    // Nobody who turned it off is told.
    assert!(
        !machine
            .dump("", &[("KVSMITH_CUBLAS", Path::new(""))])
            .stderr
            .contains("warning")
    );
    // What is there and is not the library is named.
    std::fs::create_dir(&nowhere).unwrap();
    std::fs::write(nowhere.join("libcublas.so.12"), "no library").unwrap();
    let text = machine.dump("", &variables).stderr;
    let says = text.contains("warning: cuBLAS does not load: ") && text.contains("nowhere/libcublas.so.12");
    assert!(says, "{text}");
}

/// Sections name neither the library, which their fits do not use, nor its place: a calibration equals the chain by hand,
/// whose fits do not open it.
pub fn recorded(driver: &Path) {
    let machine = Machine::new(driver);
    let folder = machine.at("given");
    build_cublas(&folder, 12);
    let variables: [(&str, &Path); 1] = [("KVSMITH_CUBLAS", &folder)];
    let out = machine.at("a.safetensors");
    let arguments = format!(
        "calibrate -q --model tests/fixtures/golden/llama_default --tokens {}/ids --uuid-tokens 0 --size 4 \
         --wrope-position 64 --wpq-bits none --no-verdict --iterations 1 --device cuda -o {}",
        machine.home.path().display(),
        out.display()
    );
    Outcome::from_output(machine.command(&arguments, &variables).output().unwrap()).ok();
    let manifest = kvsmith(&format!("inspect --json {}", out.display())).ok().stdout;
    assert!(
        manifest.contains("Fake GPU") && !manifest.contains("cuBLAS"),
        "{manifest}"
    );
    let bytes = std::fs::read(&out).unwrap();
    let path = folder.to_str().unwrap().as_bytes();
    assert!(!bytes.windows(path.len()).any(|window| window == path));
    let arguments =
        "bench kmeans -v --device cuda --heads 1 --n 64 --dim 16 --size 4 --iterations 1 --runs 1";
    let text = Outcome::from_output(machine.command(arguments, &variables).output().unwrap())
        .ok()
        .stderr;
    assert!(text.contains("Fake GPU") && !text.contains("cuBLAS"), "{text}");
}
