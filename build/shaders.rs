//! Reads the compute shaders of `shaders/` and writes the Rust file that `src/compute/gpu/kernels.rs`
//! includes: for each entry point a struct of its parameters and buffers.

use std::collections::BTreeSet;
use std::path::Path;

/// An entry point of a shader.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The file's name without `.wgsl`.
    pub stem: String,
    /// Its name.
    pub name: String,
    /// The fields of the shader's `Params` after `first_group`, and whether the entry point uses each.
    pub parameters: Vec<(String, bool)>,
    /// Binding numbers and names of the buffers that the entry point uses.
    pub bindings: Vec<(u32, String)>,
}

/// Reads the entry points of every shader, in the order of files.
///
/// # Errors
/// An unreadable shader. `Params` must be u32 and start with `first_group`, and the brace that ends a function
/// must have its own line.
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
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or(line).trim_end());
    let text = lines.collect::<Vec<_>>().join("\n");
    let (_, params) = text.split_once("\nstruct Params {").ok_or("no Params")?;
    let (params, _) = params.split_once("\n}").ok_or("Params have no end")?;
    let fields = params.split(',').map(str::trim).filter(|field| !field.is_empty());
    let fields = fields.map(|field| field.strip_suffix(": u32").ok_or(format!("`{field}` is no u32")));
    let fields = fields.collect::<Result<Vec<_>, _>>()?;
    let Some(("first_group", fields)) = fields.split_first().map(|(first, rest)| (*first, rest)) else {
        return Err("Params do not begin with first_group".to_owned());
    };
    let mut bindings = Vec::new();
    for line in text.lines().filter(|line| line.contains("@binding")) {
        bindings.push(binding(line).ok_or_else(|| format!("no binding: `{line}`"))?);
    }
    let functions: Vec<(&str, BTreeSet<&str>)> = text.split("\nfn ").skip(1).filter_map(function).collect();
    let marks = text.match_indices("\n@compute").map(|(at, _)| &text[at..]);
    let names = marks.map(|rest| rest.split_once("\nfn ")?.1.split('(').next());
    let mut entries = Vec::new();
    for name in names {
        let name = name.ok_or("an entry point without a function")?;
        let used = reached(name, &functions);
        let parameter = |f: &&str| ((*f).to_owned(), used.contains(&format!("p.{f}")[..]));
        let is_used = |(i, name): &&(u32, String)| *i > 0 && used.contains(&name[..]);
        entries.push(Entry {
            stem: stem.to_owned(),
            name: name.to_owned(),
            parameters: fields.iter().map(parameter).collect(),
            bindings: bindings.iter().filter(is_used).cloned().collect(),
        });
    }
    Ok(entries)
}

/// Parses the number and the name in a line like `@group(0) @binding(1) var<storage, read> x: array<f32>;`.
fn binding(line: &str) -> Option<(u32, String)> {
    let (number, rest) = line.strip_prefix("@group(0) @binding(")?.split_once(") var<")?;
    let (name, _) = rest.split_once("> ")?.1.split_once(':')?;
    Some((number.parse().ok()?, name.to_owned()))
}

/// Returns the name of a function and the words of its body.
fn function(text: &str) -> Option<(&str, BTreeSet<&str>)> {
    let (head, body) = text.split_once("{\n")?;
    let body = body.split("\n}").next()?;
    let words = body.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '.');
    Some((head.split('(').next()?, words.collect()))
}

/// Returns the words of a function and of all functions that it calls, directly or not.
fn reached<'t>(name: &'t str, functions: &[(&'t str, BTreeSet<&'t str>)]) -> BTreeSet<&'t str> {
    let mut used = BTreeSet::from([name]);
    loop {
        let known = used.len();
        for (name, words) in functions {
            if used.contains(name) {
                used.extend(words);
            }
        }
        if used.len() == known {
            return used;
        }
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
