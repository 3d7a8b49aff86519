//! Writes the Rust files of `src/compute/cuda/launches`: for each file of kernels, what the kernels declare, and for each
//! kernel or family of kernels a struct of its arguments with a function that launches it.
//!
//! The files are committed, so that a search finds them, and formatted as rustfmt would. A build fails if they are not what
//! the kernels declare.

use std::path::Path;

use super::kernels::{Kernel, Parameter};

/// A kernel, or kernels that differ only in the float type or the width that they are made for; for example,
/// `attend_half_64` is the member of `attend` for f16 and width 64.
struct Family<'k> {
    /// The name without type and width; of a single kernel, its whole name.
    name: &'k str,
    /// Whether the members differ by type, and whether by width.
    by: [bool; 2],
    /// Its first member.
    first: &'k Kernel,
    /// Each member, and its type, width or both.
    members: Vec<(&'k Kernel, Vec<String>)>,
    parameters: Vec<Parameter>,
    /// Whether its blocks have dynamic shared memory.
    is_shared: bool,
}

/// The folder of the kernels.
pub const KERNELS: &str = "kernels";
/// The folder of their launches.
pub const LAUNCHES: &str = "src/compute/cuda/launches";
/// Most columns of an array that rustfmt leaves on one line, by rustfmt.toml.
const MOST_ARRAY: usize = 66;
/// The sizes of arguments that it puts on one line of a longer array.
const MOST_BYTES: usize = 34;

/// Writes the launches of the kernels into a folder, and removes files that no kernels have.
///
/// # Errors
/// Those of [`write`]; the folder cannot be written to.
pub fn update(kernels: &[Kernel], folder: &Path) -> Result<(), String> {
    let files = write(kernels)?;
    let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
    std::fs::create_dir_all(folder).map_err(failed)?;
    for (name, text) in &files {
        std::fs::write(folder.join(name), text).map_err(failed)?;
    }
    let gone = others(&files, folder)?;
    gone.iter()
        .try_for_each(|name| std::fs::remove_file(folder.join(name)).map_err(failed))
}

/// Checks that a folder has the launches of the kernels and nothing else.
///
/// # Errors
/// Those of [`write`]; a file is missing, is not needed or has another text.
pub fn check(kernels: &[Kernel], folder: &Path) -> Result<(), String> {
    let files = write(kernels)?;
    let is_stale = |(name, text): &&(String, String)| match std::fs::read_to_string(folder.join(name)) {
        Ok(found) => found.replace("\r\n", "\n") != *text,
        Err(_) => true,
    };
    let stale = files.iter().find(is_stale).map(|(name, _)| name.clone());
    let other = || others(&files, folder).ok()?.pop();
    match stale.or_else(other) {
        Some(name) => Err(format!(
            "{LAUNCHES}/{name} is not what {KERNELS}/*.cu declare: run `make launches`"
        )),
        None => Ok(()),
    }
}

/// Lists the Rust files of the folder besides these.
fn others(files: &[(String, String)], folder: &Path) -> Result<Vec<String>, String> {
    let found = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let names = found.filter_map(|file| file.ok()?.file_name().into_string().ok());
    Ok(names
        .filter(|name| name.ends_with(".rs") && files.iter().all(|(own, _)| own != name))
        .collect())
}

/// Writes the launches of these kernels as Rust source: each file's name and text.
///
/// # Errors
/// Kernels of a family whose parameters or files differ.
pub fn write(kernels: &[Kernel]) -> Result<Vec<(String, String)>, String> {
    let families = families(kernels)?;
    let mut stems: Vec<&str> = kernels.iter().map(Kernel::stem).collect();
    stems.sort_unstable();
    stems.dedup();
    let mut files = vec![("mod.rs".to_owned(), write_list(kernels, &stems))];
    for stem in stems {
        let own: Vec<&Family<'_>> = families.iter().filter(|f| f.first.stem() == stem).collect();
        files.push((format!("{stem}.rs"), write_file(stem, &own)));
    }
    Ok(files)
}

/// Writes the file that lists all kernels.
fn write_list(kernels: &[Kernel], stems: &[&str]) -> String {
    let lines = |line: &dyn Fn(&str) -> String| stems.iter().map(|stem| line(stem)).collect::<String>();
    let all: String = kernels
        .iter()
        .map(|k| format!("    {}::{},\n", k.stem(), k.constant()))
        .collect();
    format!(
        "// Generated from {KERNELS}/*.cu by `make launches`; do not edit.

//! The launches of the kernels: a module for each file of `{KERNELS}/`, with a struct of the arguments of each kernel.

{}
{}
use super::start::Kernel;

/// Every kernel, in the order of `{KERNELS}/kvsmith.cu`.
pub const ALL: &[Kernel] = &[
{all}];
",
        lines(&|stem| format!("mod {stem};\n")),
        lines(&|stem| format!("pub(crate) use {stem}::*;\n")),
    )
}

/// Writes the launches of a file's kernels.
fn write_file(stem: &str, families: &[&Family<'_>]) -> String {
    let body: String = families.iter().map(|family| family.write()).collect();
    let uses = |name: &str| body.contains(name);
    let mut imports = String::new();
    if uses("c_void") {
        imports += "use std::ffi::c_void;\n\n";
    }
    for (name, import) in [
        ("Ptr<", "crate::compute::cuda::buffer::Ptr"),
        (
            "Driver",
            if uses("Arg::") {
                "crate::compute::cuda::driver::{Arg, Driver}"
            } else {
                "crate::compute::cuda::driver::Driver"
            },
        ),
        (
            "Kernel",
            if uses("no_kernel(") {
                "crate::compute::cuda::start::{Kernel, no_kernel, start}"
            } else {
                "crate::compute::cuda::start::{Kernel, start}"
            },
        ),
        ("Result<", "crate::error::Result"),
        ("float: Float", "crate::float::Float"),
    ] {
        if uses(name) {
            imports += &format!("use {import};\n");
        }
    }
    format!(
        "// Generated from {KERNELS}/{stem}.cu by `make launches`; do not edit.

//! The launches of the kernels of `{KERNELS}/{stem}.cu`.

{imports}{body}"
    )
}

impl Kernel {
    /// Returns the name of the kernel's file without `.cu`.
    fn stem(&self) -> &str {
        self.file.trim_end_matches(".cu")
    }

    /// Returns the name of the constant that describes it.
    fn constant(&self) -> String {
        self.name.to_uppercase()
    }

    /// Writes this constant.
    fn write(&self) -> String {
        let bytes: Vec<String> = self.parameters.iter().map(|p| bytes(p).to_string()).collect();
        let bytes = match bytes.join(", ") {
            line if line.len() <= MOST_ARRAY => line,
            _ => {
                let lines = bytes.chunks(MOST_BYTES).map(|line| line.join(", "));
                let lines: Vec<String> = lines.collect();
                format!("\n        {},\n    ", lines.join(",\n        "))
            }
        };
        format!(
            "
/// The kernel `{name}` of `{KERNELS}/{file}`.
pub(super) const {constant}: Kernel = Kernel {{
    name: \"{name}\",
    threads: {threads},
    blocks: {blocks},
    shared_bytes: {shared_bytes},
    argument_bytes: &[{bytes}],
}};
",
            name = self.name,
            file = self.file,
            constant = self.constant(),
            threads = self.threads,
            blocks = self.blocks,
            shared_bytes = self.shared_bytes,
        )
    }
}

/// Groups the kernels into families.
fn families(kernels: &[Kernel]) -> Result<Vec<Family<'_>>, String> {
    let mut families: Vec<Family<'_>> = Vec::new();
    for kernel in kernels {
        let (name, values) = made_for(&kernel.name);
        let by = values.each_ref().map(Option::is_some);
        let values = values.into_iter().flatten().collect();
        match families
            .iter_mut()
            .find(|f| f.name == name && f.by == by && by != [false; 2])
        {
            Some(family) => family.add(kernel, values)?,
            None => families.push(Family {
                name,
                by,
                first: kernel,
                members: vec![(kernel, values)],
                parameters: kernel.parameters.clone(),
                is_shared: kernel.shared_bytes > 0,
            }),
        }
    }
    for family in families.iter_mut().filter(|family| family.members.len() == 1) {
        family.name = &family.first.name;
    }
    Ok(families)
}

/// Splits a kernel's name into that of its family, its float type and its width.
fn made_for(name: &str) -> (&str, [Option<String>; 2]) {
    let (name, width) = match name.rsplit_once('_') {
        Some((name, last)) if last.parse::<u32>().is_ok() => (name, Some(last.to_owned())),
        _ => (name, None),
    };
    let (name, float) = match name.rsplit_once('_') {
        Some((name, "half")) => (name, Some("Float::F16")),
        Some((name, "bfloat")) => (name, Some("Float::Bf16")),
        Some((name, "float")) => (name, Some("Float::F32")),
        _ => (name, None),
    };
    (name, [float.map(str::to_owned), width])
}

impl<'k> Family<'k> {
    /// Adds a kernel to the family. A pointer parameter whose type differs among members becomes untyped.
    fn add(&mut self, kernel: &'k Kernel, values: Vec<String>) -> Result<(), String> {
        for (own, other) in self.parameters.iter_mut().zip(&kernel.parameters) {
            if own.is_pointer && own.of != other.of {
                own.of = "void".to_owned();
            }
        }
        let alike = |(own, other): (&Parameter, &Parameter)| {
            let of = if own.is_pointer { &own.of } else { &other.of };
            *own == Parameter {
                of: of.clone(),
                ..other.clone()
            }
        };
        if self.first.file != kernel.file {
            return Err(format!(
                "{} is not in the file of the rest of {}",
                kernel.name, self.name
            ));
        }
        let (own, others) = (&self.parameters, &kernel.parameters);
        if own.len() != others.len() || !own.iter().zip(others).all(alike) {
            return Err(format!(
                "{} has other parameters than the rest of {}",
                kernel.name, self.name
            ));
        }
        self.members.push((kernel, values));
        Ok(())
    }

    fn write(&self) -> String {
        let words = self.name.split('_');
        let name: String = words.map(|w| w[..1].to_uppercase() + &w[1..]).collect();
        let fields: String = self
            .parameters
            .iter()
            .map(|p| format!("    pub {}: {},\n", p.name, field(p)))
            .collect();
        let arguments: Vec<String> = self.parameters.iter().map(argument).collect();
        let arguments = match arguments.join(", ") {
            line if line.len() <= MOST_ARRAY => line,
            _ => format!("\n            {},\n        ", arguments.join(",\n            ")),
        };
        let kernels: String = self.members.iter().map(|(kernel, _)| kernel.write()).collect();
        let Launch {
            asked,
            choice,
            given,
            kernel,
            shared_bytes,
        } = match &self.members[..] {
            [(kernel, _)] => self.alone(kernel),
            _ => self.chosen(),
        };
        format!(
            "{kernels}
/// The arguments of {asked} of `{KERNELS}/{}`.
#[derive(Clone, Copy)]
pub(crate) struct {name}<'b> {{
{fields}}}

impl {name}<'_> {{
{choice}    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, {given}) -> Result<()> {{
        let kernel = {kernel};
        let arguments = [{arguments}];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe {{ start(driver, kernel, grid, {shared_bytes}, &arguments) }}
    }}
}}
",
            self.first.file
        )
    }

    /// Returns how a single kernel is launched; the caller gives its dynamic shared memory.
    fn alone(&self, kernel: &Kernel) -> Launch {
        let (given, shared_bytes) = if self.is_shared {
            ("grid: [usize; 3], shared_bytes: usize", "shared_bytes")
        } else {
            ("grid: [usize; 3]", "0")
        };
        Launch {
            asked: format!("the kernel `{}`", kernel.name),
            choice: format!(
                "    pub const KERNEL: &'static Kernel = &{};\n\n",
                kernel.constant()
            ),
            given,
            kernel: "Self::KERNEL",
            shared_bytes,
        }
    }

    /// Returns how a kernel of a family is launched: picked by type or width, with its declared shared memory.
    fn chosen(&self) -> Launch {
        let (each, asked, given, kernel) = match self.by {
            [true, true] => (
                "type and width",
                "(float, width)",
                "float: Float, width: usize, grid: [usize; 3]",
                "Self::kernel(float, width)?",
            ),
            [true, false] => (
                "type",
                "float",
                "float: Float, grid: [usize; 3]",
                "Self::kernel(float)?",
            ),
            _ => (
                "width",
                "width",
                "width: usize, grid: [usize; 3]",
                "Self::kernel(width)?",
            ),
        };
        let mut cases = String::new();
        for (kernel, values) in &self.members {
            let case = asked
                .replace("float", &values[0])
                .replace("width", values.last().unwrap_or(&values[0]));
            cases += &format!("            {case} => Ok(&{}),\n", kernel.constant());
        }
        let choice = format!(
            "    /// Returns the kernel for a {each}.
    pub fn kernel({}) -> Result<&'static Kernel> {{
        match {asked} {{
{cases}            #[allow(unreachable_patterns)]
            _ => Err(no_kernel(\"{}\", {asked})),
        }}
    }}

",
            given.replace(", grid: [usize; 3]", ""),
            self.name
        );
        Launch {
            asked: format!("the kernels `{}_*`, one for each {each},", self.name),
            choice,
            given,
            kernel,
            shared_bytes: "kernel.shared_bytes",
        }
    }
}

/// How a kernel or a family is launched, as source.
struct Launch {
    /// The kernels, in words.
    asked: String,
    /// The constant with the kernel, or the function that picks it.
    choice: String,
    /// The parameters of the function that launches it.
    given: &'static str,
    /// The kernel.
    kernel: &'static str,
    /// The bytes of dynamic shared memory.
    shared_bytes: &'static str,
}

/// Returns the bytes of an argument.
fn bytes(parameter: &Parameter) -> usize {
    match (parameter.is_pointer, &parameter.of[..]) {
        (false, "u32" | "float") => 4,
        _ => 8,
    }
}

/// Returns the Rust type of a parameter's field.
fn field(parameter: &Parameter) -> String {
    let of = match &parameter.of[..] {
        "float" => "f32",
        "double" => "f64",
        "void" => "c_void",
        "uint4" => "[u32; 4]",
        "u32" | "u64" if !parameter.is_pointer => "usize",
        own => own,
    };
    match (parameter.is_pointer, parameter.is_optional) {
        (false, _) => of.to_owned(),
        (true, false) => format!("Ptr<'b, {of}>"),
        (true, true) => format!("Option<Ptr<'b, {of}>>"),
    }
}

/// Returns the expression that turns a field into an argument.
fn argument(parameter: &Parameter) -> String {
    let name = &parameter.name;
    match (parameter.is_pointer, &parameter.of[..]) {
        (true, _) => format!("self.{name}.into()"),
        (false, "u32") => format!("Arg::u32(self.{name})"),
        (false, "u64") => format!("Arg::u64(self.{name})"),
        (false, "float") => format!("Arg::f32(self.{name})"),
        (false, _) => format!("Arg::f64(self.{name})"),
    }
}
