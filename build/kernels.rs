//! Reads the declarations of CUDA kernels, `KERNEL(threads, blocks, name, parameters...)` and
//! `KERNEL_SHARED(threads, blocks, bytes, name, parameters...)`, which `kernels/common.h` describes.

use std::collections::{HashMap, HashSet};
use std::path::Path;

/// A kernel as its source declares it.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// The file that declares it, such as `attend.cu`.
    pub file: String,
    /// Its name.
    pub name: String,
    /// Threads per block.
    pub threads: usize,
    /// Blocks that must fit on a multiprocessor.
    pub blocks: usize,
    /// Most bytes of dynamic shared memory per block; 0 for none.
    pub shared_bytes: usize,
    /// Its parameters, in order.
    pub parameters: Vec<Parameter>,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Its type in the source without `const`; of a pointer, the type that it points to.
    pub of: String,
    /// Whether it is a pointer.
    pub is_pointer: bool,
    /// Whether the pointer may be null.
    pub is_optional: bool,
}

/// Lines of one file.
#[derive(Debug)]
struct Piece {
    file: String,
    text: String,
}

/// Reads the kernels of `<folder>/kvsmith.cu`, and joins the sources into one text without local `#include`s.
///
/// # Errors
/// A malformed declaration; a file that cannot be read or that nothing includes.
pub fn read_folder(folder: &Path) -> Result<(Vec<Kernel>, String), String> {
    let (mut files, mut pieces) = (Vec::new(), Vec::new());
    include(folder, "kvsmith.cu", &mut files, &mut pieces)?;
    let found = std::fs::read_dir(folder).map_err(|e| e.to_string())?;
    for name in found.filter_map(|file| file.ok()?.file_name().into_string().ok()) {
        if name.ends_with(".cu") && !files.contains(&name) {
            return Err(format!("{name} is not included by kvsmith.cu"));
        }
    }
    let source = pieces.iter().map(|piece| piece.text.as_str()).collect();
    Ok((read_pieces(&pieces)?, source))
}

/// Appends a file to `pieces`, after the files that it includes; each file only once.
fn include(
    folder: &Path,
    name: &str,
    files: &mut Vec<String>,
    pieces: &mut Vec<Piece>,
) -> Result<(), String> {
    // GPU compilers do not see the emulation.
    if name == "emulate.h" || files.iter().any(|file| file == name) {
        return Ok(());
    }
    files.push(name.to_owned());
    let text = std::fs::read_to_string(folder.join(name)).map_err(|e| format!("{name}: {e}"))?;
    for line in text.lines().filter(|line| *line != "#pragma once") {
        match line.strip_prefix("#include \"") {
            Some(included) => include(folder, included.trim_end_matches('"'), files, pieces)?,
            None => match pieces.last_mut() {
                Some(piece) if piece.file == name => piece.text += &format!("{line}\n"),
                _ => pieces.push(Piece {
                    file: name.to_owned(),
                    text: format!("{line}\n"),
                }),
            },
        }
    }
    Ok(())
}

/// Reads the kernels that the text of a file declares, in order.
///
/// # Errors
/// A malformed declaration.
pub fn read(file: &str, text: &str) -> Result<Vec<Kernel>, String> {
    read_pieces(&[Piece {
        file: file.to_owned(),
        text: text.to_owned(),
    }])
}

/// Reads the kernels that the pieces declare, in order; each may use the macros of all.
fn read_pieces(pieces: &[Piece]) -> Result<Vec<Kernel>, String> {
    let texts: Vec<String> = pieces.iter().map(|p| p.text.replace("\\\n", " ")).collect();
    let split = texts.iter().map(|text| {
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or(line));
        lines.partition(|line| line.starts_with("#define "))
    });
    let (defines, code): (Vec<Vec<&str>>, Vec<Vec<&str>>) = split.unzip();
    let macros = Macros(defines.into_iter().flatten().filter_map(Macro::parse).collect());
    let mut kernels = Vec::new();
    for (piece, code) in pieces.iter().zip(code) {
        let code = code.join("\n");
        for (at, _) in code.match_indices("KERNEL") {
            let line = code[at..].lines().next().unwrap_or_default();
            let declared = arguments(&code[at..]).filter(|_| at == 0 || code[..at].ends_with('\n'));
            let kernel = declared.ok_or("a declaration stands at the start of a line".to_owned());
            let kernel =
                kernel.and_then(|(keyword, declared)| Kernel::parse(&piece.file, keyword, declared, &macros));
            kernels.push(kernel.map_err(|e| format!("{line}: {e}"))?);
        }
    }
    let mut names = HashSet::new();
    match kernels.iter().find(|kernel| !names.insert(&kernel.name)) {
        Some(twice) => Err(format!("{} is declared twice", twice.name)),
        None => Ok(kernels),
    }
}

impl Kernel {
    /// Parses the arguments of a declaration in `file`.
    fn parse(file: &str, keyword: &str, declared: Vec<&str>, macros: &Macros) -> Result<Self, String> {
        let n = match keyword {
            "KERNEL" => 2,
            "KERNEL_SHARED" => 3,
            _ => return Err("not a kind of kernel".to_owned()),
        };
        let (numbers, rest) = declared.split_at_checked(n).ok_or("too short")?;
        let number = |i: usize| numbers.get(i).map_or(Ok(0), |text| value(&macros.expand(text)));
        let (name, parameters) = rest.split_first().ok_or("no name")?;
        let parameters = macros.expand(&parameters.join(","));
        let kernel = Self {
            file: file.to_owned(),
            name: (*name).to_owned(),
            threads: number(0)?,
            blocks: number(1)?,
            shared_bytes: number(2)?,
            parameters: split(&parameters, ',')
                .into_iter()
                .map(Parameter::parse)
                .collect::<Result<_, _>>()?,
        };
        if is_name(name) && kernel.threads.is_multiple_of(32) && (1..=1024).contains(&kernel.threads) {
            Ok(kernel)
        } else {
            Err(format!("no kernel: {kernel:?}"))
        }
    }
}

impl Parameter {
    fn parse(text: &str) -> Result<Self, String> {
        let spaced = text.replace('*', " * ");
        let mut words = spaced.split_whitespace().peekable();
        let is_optional = words.next_if_eq(&"OPTIONAL").is_some();
        let is_const = words.next_if_eq(&"const").is_some();
        let of = words.next().unwrap_or_default();
        let is_pointer = words.next_if_eq(&"*").is_some();
        let name = words.next().unwrap_or_default();
        let types: &[&str] = if is_pointer {
            &["void", "u8", "u16", "u32", "u64", "float", "double", "uint4"]
        } else {
            &["u32", "u64", "float", "double"]
        };
        let is_whole = words.next().is_none() && is_name(name) && (is_pointer || !is_const && !is_optional);
        if is_whole && types.contains(&of) {
            Ok(Self {
                name: name.to_owned(),
                of: of.to_owned(),
                is_pointer,
                is_optional,
            })
        } else {
            Err(format!("no parameter that a launch knows: `{}`", text.trim()))
        }
    }
}

/// The macros of a source, by name.
struct Macros(HashMap<String, Macro>);

/// A macro: its parameters, if it has any, and its replacement text.
struct Macro {
    parameters: Option<Vec<String>>,
    text: String,
}

impl Macro {
    /// Parses the name and the macro of a `#define` line; ignores `OPTIONAL`, which is only a mark.
    fn parse(line: &str) -> Option<(String, Self)> {
        let line = line.strip_prefix("#define ")?.trim();
        let end = line.find(|c| !is_letter(c)).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        let (parameters, text) = match rest.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
            Some((parameters, text)) => {
                let names = parameters.split(',').map(|name| name.trim().to_owned());
                (Some(names.collect()), text)
            }
            None => (None, rest),
        };
        let text = text.trim().to_owned();
        (name != "OPTIONAL").then(|| (name.to_owned(), Self { parameters, text }))
    }
}

impl Macros {
    /// Expands all macros in a text.
    fn expand(&self, text: &str) -> String {
        let (mut out, mut rest) = (String::new(), text);
        while let Some(c) = rest.chars().next() {
            let end = rest
                .find(|c| !is_letter(c))
                .unwrap_or(rest.len())
                .max(c.len_utf8());
            let (word, after) = rest.split_at(end);
            rest = after;
            match self.0.get(word) {
                Some(Macro {
                    parameters: None,
                    text,
                }) => out += &self.expand(text),
                Some(Macro {
                    parameters: Some(names),
                    text,
                }) => {
                    let given = arguments(&format!("{word}{after}")).map_or(Vec::new(), |(_, given)| {
                        given.into_iter().map(str::to_owned).collect::<Vec<_>>()
                    });
                    let own = names.iter().cloned().zip(given.into_iter().map(|text| Macro {
                        parameters: None,
                        text,
                    }));
                    out += &self.expand(&Self(own.collect()).expand(text));
                    rest = &after[closing(after).map_or(after.len(), |end| end + 1)..];
                }
                None => out += word,
            }
        }
        out
    }
}

/// Splits `name(a, b)` into the name and its arguments.
fn arguments(text: &str) -> Option<(&str, Vec<&str>)> {
    let (name, _) = text.split_once('(')?;
    let inside = &text[name.len() + 1..name.len() + closing(&text[name.len()..])?];
    Some((name.trim(), split(inside, ',')))
}

/// Finds the parenthesis that closes the one at the start of a text.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (i, c) in text.char_indices() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth == 0 {
            return Some(i);
        }
    }
    None
}

/// Splits a text at this sign outside of parentheses.
fn split(text: &str, sign: char) -> Vec<&str> {
    let mut depth = 0;
    let outside = move |c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == sign && depth == 0
    };
    text.split(outside).map(str::trim).collect()
}

fn is_letter(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn is_name(text: &str) -> bool {
    text.chars().all(is_letter) && text.starts_with(|c: char| !c.is_ascii_digit())
}

/// Evaluates an expression of numbers, `+`, `*` and parentheses.
fn value(text: &str) -> Result<usize, String> {
    let (terms, factors) = (split(text, '+'), split(text, '*'));
    if terms.len() > 1 {
        return terms.into_iter().map(value).sum();
    }
    if factors.len() > 1 {
        return factors.into_iter().map(value).product();
    }
    match terms[0].strip_prefix('(').and_then(|text| text.strip_suffix(')')) {
        Some(inside) => value(inside),
        None => terms[0].parse().map_err(|_| format!("no number: `{text}`")),
    }
}
