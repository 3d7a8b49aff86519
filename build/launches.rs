//! Writes the Rust file that `src/compute/cuda/kernels.rs` includes: the table of the kernels, and for each
//! kernel or family of kernels a struct of its arguments with a function that launches it.

use super::kernels::{Kernel, Parameter};

/// A kernel, or kernels that differ only in the float type or the width that they are made for; for example,
/// `attend_half_64` is the member of `attend` for f16 and width 64.
struct Family<'k> {
    /// The name without type and width; of a single kernel, its whole name.
    name: &'k str,
    /// Whether the members differ by type, and whether by width.
    by: [bool; 2],
    /// Each member's index in the table, and its type, width or both.
    members: Vec<(usize, Vec<String>)>,
    parameters: Vec<Parameter>,
    /// Whether its blocks have dynamic shared memory.
    is_shared: bool,
}

/// Writes the table and the launches of these kernels as Rust source.
///
/// # Errors
/// Kernels of a family whose parameters differ.
pub fn write(kernels: &[Kernel]) -> Result<String, String> {
    let mut out = "/// Every kernel.\npub const ALL: &[Kernel] = &[\n".to_owned();
    for k in kernels {
        let bytes: Vec<usize> = k.parameters.iter().map(bytes).collect();
        out += &format!(
            "    Kernel {{ name: {:?}, threads: {}, blocks: {}, shared_bytes: {}, argument_bytes: &{bytes:?} }},\n",
            k.name, k.threads, k.blocks, k.shared_bytes
        );
    }
    out += "];\n";
    families(kernels)?
        .iter()
        .for_each(|family| out += &family.write());
    Ok(out)
}

/// Groups the kernels into families.
fn families(kernels: &[Kernel]) -> Result<Vec<Family<'_>>, String> {
    let mut families: Vec<Family<'_>> = Vec::new();
    for (at, kernel) in kernels.iter().enumerate() {
        let (name, values) = made_for(&kernel.name);
        let by = values.each_ref().map(Option::is_some);
        let values = values.into_iter().flatten().collect();
        match families
            .iter_mut()
            .find(|f| f.name == name && f.by == by && by != [false; 2])
        {
            Some(family) => family.add(at, kernel, values)?,
            None => families.push(Family {
                name,
                by,
                members: vec![(at, values)],
                parameters: kernel.parameters.clone(),
                is_shared: kernel.shared_bytes > 0,
            }),
        }
    }
    for family in families.iter_mut().filter(|family| family.members.len() == 1) {
        family.name = &kernels[family.members[0].0].name;
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

impl Family<'_> {
    /// Adds a kernel to the family. A pointer parameter whose type differs among members becomes untyped.
    fn add(&mut self, at: usize, kernel: &Kernel, values: Vec<String>) -> Result<(), String> {
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
        let (own, others) = (&self.parameters, &kernel.parameters);
        if own.len() != others.len() || !own.iter().zip(others).all(alike) {
            return Err(format!(
                "{} has other parameters than the rest of {}",
                kernel.name, self.name
            ));
        }
        self.members.push((at, values));
        Ok(())
    }

    fn write(&self) -> String {
        let words = self.name.split('_');
        let name: String = words.map(|w| w[..1].to_uppercase() + &w[1..]).collect();
        let lines = |line: fn(&Parameter) -> String| self.parameters.iter().map(line).collect::<String>();
        let (fields, arguments) = (
            lines(|p| format!("    pub {}: {},\n", p.name, field(p))),
            lines(|p| format!("            {},\n", argument(p))),
        );
        let (choice, given, kernel, shared_bytes) = match &self.members[..] {
            [(at, _)] => self.alone(*at),
            _ => self.chosen(),
        };
        format!(
            "
/// The arguments of `{}`.
#[derive(Clone, Copy)]
pub(crate) struct {name}<'b> {{
{fields}}}

impl {name}<'_> {{
{choice}    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, {given}) -> Result<()> {{
        let kernel = {kernel};
        let arguments = [
{arguments}        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe {{ start(driver, kernel, grid, {shared_bytes}, &arguments) }}
    }}
}}
",
            self.name
        )
    }

    /// Returns, for a single kernel: the constant to declare, the parameters of a launch, the kernel, and the
    /// dynamic shared memory, which the caller gives.
    fn alone(&self, at: usize) -> (String, &'static str, &'static str, &'static str) {
        let constant = format!("    pub const KERNEL: &'static Kernel = &ALL[{at}];\n\n");
        let (given, shared_bytes) = if self.is_shared {
            ("grid: [usize; 3], shared_bytes: usize", "shared_bytes")
        } else {
            ("grid: [usize; 3]", "0")
        };
        (constant, given, "Self::KERNEL", shared_bytes)
    }

    /// Returns the same for a family: a member is picked by type or width, with its declared shared memory.
    fn chosen(&self) -> (String, &'static str, &'static str, &'static str) {
        let (asked, given, kernel) = match self.by {
            [true, true] => (
                "(float, width)",
                "float: Float, width: usize, grid: [usize; 3]",
                "Self::kernel(float, width)?",
            ),
            [true, false] => ("float", "float: Float, grid: [usize; 3]", "Self::kernel(float)?"),
            _ => ("width", "width: usize, grid: [usize; 3]", "Self::kernel(width)?"),
        };
        let mut cases = String::new();
        for (at, values) in &self.members {
            let case = asked
                .replace("float", &values[0])
                .replace("width", values.last().unwrap_or(&values[0]));
            cases += &format!("            {case} => Ok(&ALL[{at}]),\n");
        }
        let choice = format!(
            "    /// Returns the kernel for a type or a width.
    pub fn kernel({}) -> Result<&'static Kernel> {{
        match {asked} {{
{cases}            #[allow(unreachable_patterns)]
            _ => Err(Error::internal(format!(\"CUDA: no kernel {} for {{:?}}\", {asked}))),
        }}
    }}

",
            given.replace(", grid: [usize; 3]", ""),
            self.name
        );
        (choice, given, kernel, "kernel.shared_bytes")
    }
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
