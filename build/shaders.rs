//! Reads the compute shaders of `shaders/` and writes the Rust file that `src/compute/wgpu/kernels.rs`
//! includes: for each entry point a struct of its parameters and buffers.

use std::collections::BTreeSet;
use std::path::Path;

use naga::front::wgsl;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{
    AddressSpace, Block, Expression, Function, GlobalVariable, Handle, Module, Scalar, Statement,
    StructMember, TypeInner,
};

/// An entry point of a shader.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The file's name without `.wgsl`.
    pub stem: String,
    /// Its name.
    pub name: String,
    /// The fields of the shader's uniform after `first_group`, and whether the entry point uses each.
    pub parameters: Vec<(String, bool)>,
    /// Binding numbers and names of the buffers that the entry point uses.
    pub bindings: Vec<(u32, String)>,
}

/// Reads the entry points of every shader, in the order of files.
///
/// # Errors
/// An unreadable or invalid shader. The fields of its uniform must be u32, and the first one `first_group`.
pub fn read_folder(folder: &Path) -> Result<Vec<Entry>, String> {
    let files = std::fs::read_dir(folder).map_err(|e| e.to_string())?;
    let mut paths: Vec<_> = files.filter_map(|file| Some(file.ok()?.path())).collect();
    paths.sort();
    let mut entries = Vec::new();
    for path in paths {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{stem}: {e}"))?;
        entries.extend(read(&stem, &text).map_err(|e| format!("{stem}: {e}"))?);
    }
    Ok(entries)
}

/// Reads the entry points of one shader.
///
/// # Errors
/// Those of [`read_folder`].
pub fn read(stem: &str, text: &str) -> Result<Vec<Entry>, String> {
    let module = wgsl::parse_str(text).map_err(|e| e.emit_to_string(text))?;
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
    let info = validator.validate(&module).map_err(|e| e.emit_to_string(text))?;
    let (params, fields) = parameters(&module)?;
    let mut bound = module
        .global_variables
        .iter()
        .filter_map(|(_, variable)| variable.binding);
    if bound.any(|binding| binding.group != 0) {
        return Err("a binding outside group 0".to_owned());
    }
    let entries = module.entry_points.iter().enumerate().map(|(i, entry)| {
        let mut used = Used::default();
        used.add(&module, params, &entry.function)?;
        // The first is `first_group`.
        let fields = fields.iter().enumerate().skip(1);
        let variables = module.global_variables.iter();
        let buffers =
            variables.filter(|(handle, _)| *handle != params && !info.get_entry_point(i)[*handle].is_empty());
        Ok(Entry {
            stem: stem.to_owned(),
            name: entry.name.clone(),
            parameters: fields
                .map(|(field, name)| (name.clone(), used.fields.contains(&field)))
                .collect(),
            bindings: buffers
                .filter_map(|(_, buffer)| Some((buffer.binding?.binding, buffer.name.clone()?)))
                .collect(),
        })
    });
    entries.collect()
}

/// Finds the uniform variable, and the names of its fields.
fn parameters(module: &Module) -> Result<(Handle<GlobalVariable>, Vec<String>), String> {
    let mut variables = module.global_variables.iter();
    let uniform = variables.find(|(_, variable)| variable.space == AddressSpace::Uniform);
    let (params, variable) = uniform.ok_or("no uniform variable")?;
    let TypeInner::Struct { members, .. } = &module.types[variable.ty].inner else {
        return Err("the uniform variable is not a struct".to_owned());
    };
    let name = |(i, member): (u32, &StructMember)| {
        let name = member.name.clone().unwrap_or_default();
        match module.types[member.ty].inner {
            TypeInner::Scalar(Scalar::U32) if member.offset == 4 * i => Ok(name),
            TypeInner::Scalar(Scalar::U32) => Err(format!("`{name}` does not follow the field before")),
            _ => Err(format!("`{name}` is not a u32")),
        }
    };
    let fields: Vec<String> = (0..).zip(members).map(name).collect::<Result<_, _>>()?;
    match fields.first() {
        Some(first) if first == "first_group" => Ok((params, fields)),
        _ => Err("the first field of the uniform variable is not first_group".to_owned()),
    }
}

/// The fields of `Params` that a function uses, itself or through others.
#[derive(Default)]
struct Used {
    fields: BTreeSet<usize>,
    /// The functions that were looked at.
    seen: BTreeSet<Handle<Function>>,
}

impl Used {
    /// # Errors
    /// `Params` is used as a whole, so that its fields cannot be told apart.
    fn add(
        &mut self,
        module: &Module,
        params: Handle<GlobalVariable>,
        function: &Function,
    ) -> Result<(), String> {
        let expressions = &function.expressions;
        let is_params = |at: Handle<Expression>| matches!(expressions[at], Expression::GlobalVariable(of) if of == params);
        for (_, expression) in expressions.iter() {
            match expression {
                Expression::AccessIndex { base, index } if is_params(*base) => {
                    self.fields.insert(*index as usize);
                }
                Expression::Load { pointer } if is_params(*pointer) => {
                    return Err("the uniform variable is read as a whole".to_owned());
                }
                _ => {}
            }
        }
        self.add_calls(module, params, &function.body)
    }

    fn add_calls(
        &mut self,
        module: &Module,
        params: Handle<GlobalVariable>,
        block: &Block,
    ) -> Result<(), String> {
        block.iter().try_for_each(|statement| match statement {
            Statement::Call { function, .. } if self.seen.insert(*function) => {
                self.add(module, params, &module.functions[*function])
            }
            Statement::Block(block) => self.add_calls(module, params, block),
            Statement::If { accept, reject, .. } => {
                self.add_calls(module, params, accept)?;
                self.add_calls(module, params, reject)
            }
            Statement::Switch { cases, .. } => {
                let mut bodies = cases.iter().map(|case| &case.body);
                bodies.try_for_each(|body| self.add_calls(module, params, body))
            }
            Statement::Loop { body, continuing, .. } => {
                self.add_calls(module, params, body)?;
                self.add_calls(module, params, continuing)
            }
            _ => Ok(()),
        })
    }
}

/// Writes the sources and the structs of these entry points as Rust source.
pub fn write(entries: &[Entry]) -> String {
    let mut out =
        "/// Sources and names of all entry points.\nconst ENTRIES: &[(&str, &str)] = &[\n".to_owned();
    for Entry { stem, name, .. } in entries {
        out += &format!(
            "    (include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/shaders/{stem}.wgsl\")), {name:?}),\n"
        );
    }
    out += "];\n";
    for (at, entry) in entries.iter().enumerate() {
        out += &entry.write(at);
    }
    out
}

impl Entry {
    fn write(&self, at: usize) -> String {
        let (stem, name) = (&self.stem, &self.name);
        let words = stem.split('_').chain((name != "main").then_some(&name[..]));
        let title: String = words.map(|w| w[..1].to_uppercase() + &w[1..]).collect();
        let (mut fields, mut parameters, mut buffers) = (String::new(), String::new(), String::new());
        for (name, used) in &self.parameters {
            if *used {
                fields += &format!("    pub {name}: usize,\n");
                parameters += &format!("self.{name}, ");
            } else {
                parameters += "0, ";
            }
        }
        for (i, name) in &self.bindings {
            fields += &format!("    pub {name}: &'b wgpu::Buffer,\n");
            buffers += &format!("({i}, self.{name}), ");
        }
        format!(
            "
/// `{name}` of `shaders/{stem}.wgsl`.
pub(super) struct {title}<'b> {{
{fields}}}

impl {title}<'_> {{
    /// See [`Batch::run`].
    pub fn run(&self, batch: &mut Batch, groups: usize, cost: usize) {{
        batch.run({at}, &[{parameters}], &[{buffers}], groups, cost);
    }}
}}
"
        )
    }
}
