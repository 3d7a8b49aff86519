//! A crate's sources as far as tests ask: which file imports which, how long functions are, what types are called.
//! Code under `#[cfg(test)]` is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

/// The path of a module from the crate's root; the root has none.
pub type Module = Vec<String>;

/// The files of a crate by their path below `src`.
pub struct Tree {
    pub files: BTreeMap<String, File>,
}

/// One file.
pub struct File {
    pub module: Module,
    /// Other files that it names, with the path that names each.
    pub imports: BTreeMap<String, String>,
    /// Names of functions that have a body, with their lines.
    pub functions: Vec<(String, usize)>,
    /// Names of structs, enums and traits.
    pub types: Vec<String>,
    pub lines: usize,
    /// Lines with something besides comments.
    pub code_lines: usize,
}

impl Tree {
    /// Reads every file below `root/src`.
    pub fn read(root: &Path) -> Self {
        let mut texts = BTreeMap::new();
        read_folder(&root.join("src"), "", &mut texts);
        Self::from_texts(&texts)
    }

    /// The tree of these texts, by their path below `src`.
    pub fn from_texts(texts: &BTreeMap<String, String>) -> Self {
        let mut parsed: BTreeMap<&String, (Module, Source)> = texts
            .iter()
            .map(|(path, text)| (path, (module_of(path), Source::parse(text))))
            .collect();
        let tests: Vec<Module> = parsed
            .values()
            .flat_map(|(module, source)| source.test_modules.iter().map(|name| child(module, name)))
            .collect();
        parsed.retain(|_, (module, _)| !tests.iter().any(|test| module.starts_with(test)));
        // main.rs is a crate of its own; nobody can import it.
        let modules: BTreeMap<&Module, &String> = parsed
            .iter()
            .filter(|(path, _)| path.as_str() != "main.rs")
            .map(|(path, (module, _))| (module, *path))
            .collect();
        let file = |path: &String, module: &Module, source: &Source| {
            let mut imports = BTreeMap::new();
            for target in source.paths(module, &|m| modules.contains_key(m)) {
                let known = (0..=target.len())
                    .rev()
                    .find_map(|n| modules.get(&target[..n].to_vec()));
                if let Some(other) = known.filter(|other| **other != path) {
                    imports
                        .entry((*other).clone())
                        .or_insert_with(|| target.join("::"));
                }
            }
            File {
                module: module.clone(),
                imports,
                functions: source.functions(),
                types: source.types(),
                lines: source.lines,
                code_lines: source
                    .tokens
                    .iter()
                    .map(|t| t.line)
                    .collect::<BTreeSet<_>>()
                    .len(),
            }
        };
        let files = parsed
            .iter()
            .map(|(path, (module, source))| ((*path).clone(), file(path, module, source)));
        Self {
            files: files.collect(),
        }
    }
}

fn read_folder(folder: &Path, prefix: &str, texts: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
        if path.is_dir() {
            read_folder(&path, &format!("{name}/"), texts);
        } else if name.ends_with(".rs") {
            texts.insert(name, std::fs::read_to_string(&path).unwrap());
        }
    }
}

/// The module of a file: `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module_of(path: &str) -> Module {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    match path {
        "lib" | "main" => Vec::new(),
        _ => path.split('/').map(str::to_string).collect(),
    }
}

fn child(module: &[String], name: &str) -> Module {
    [module, &[name.to_string()]].concat()
}

/// A word or a sign. Comments, literal text and lifetimes have none.
#[derive(Clone, Debug)]
struct Token {
    text: String,
    line: usize,
}

/// A file as tokens.
struct Source {
    tokens: Vec<Token>,
    /// Child modules that exist in tests alone.
    test_modules: Vec<String>,
    /// Lines, less those of tests.
    lines: usize,
}

impl Source {
    fn parse(text: &str) -> Self {
        let all = tokens(text);
        let (mut kept, mut test_modules, mut lines) = (Vec::new(), Vec::new(), text.lines().count());
        let mut at = 0;
        while at < all.len() {
            let item = at + TEST.len();
            if !TEST
                .iter()
                .enumerate()
                .all(|(i, word)| word_at(&all, at + i) == *word)
            {
                kept.push(all[at].clone());
                at += 1;
                continue;
            }
            let end = item_end(&all, item);
            let word = match word_at(&all, item) {
                "pub" if word_at(&all, item + 1) == "(" => item + 4,
                _ => item,
            };
            if word_at(&all, word) == "mod" && word_at(&all, word + 2) == ";" {
                test_modules.push(all[word + 1].text.clone());
            }
            lines -= all[end - 1].line + 1 - all[at].line;
            at = end;
        }
        Self {
            tokens: kept,
            test_modules,
            lines,
        }
    }

    /// Every path of this crate that the file names, from the crate's root. `module` is the file's own.
    fn paths(&self, module: &[String], exists: &dyn Fn(&Module) -> bool) -> Vec<Module> {
        let mut inside = Inside::new(module);
        // What `use` brings in, by the name that it has here.
        let mut names: BTreeMap<String, Module> = BTreeMap::new();
        let mut found = Vec::new();
        let mut rest: Vec<(Module, Range<usize>)> = Vec::new();
        let mut at = 0;
        while at < self.tokens.len() {
            inside.step(&self.tokens, at);
            if self.word(at) == "use" {
                let mut leaves = Vec::new();
                at = use_tree(&self.tokens, at + 1, &[], &mut leaves);
                for (name, path) in leaves {
                    if let Some(path) = resolve(&path, &inside.module(), &BTreeMap::new(), exists) {
                        names.insert(name, path.clone());
                        found.push(path);
                    }
                }
                continue;
            }
            let start = at;
            while is_word(self.word(at)) && self.word(at + 1) == "::" && is_word(self.word(at + 2)) {
                at += 2;
            }
            if at > start {
                rest.push((inside.module(), start..at + 1));
            }
            at += 1;
        }
        for (module, range) in rest {
            let words = self.tokens[range].iter().filter(|t| t.text != "::");
            let path: Module = words.map(|t| t.text.clone()).collect();
            found.extend(resolve(&path, &module, &names, exists));
        }
        found
    }

    fn word(&self, at: usize) -> &str {
        word_at(&self.tokens, at)
    }

    fn functions(&self) -> Vec<(String, usize)> {
        let function = |at: usize| {
            let end = item_end(&self.tokens, at);
            let has_body = self.word(end - 1) == "}";
            let lines = self.tokens[end - 1].line + 1 - self.tokens[at].line;
            has_body.then(|| (self.word(at + 1).to_string(), lines))
        };
        let named = |at: &usize| self.word(*at) == "fn" && is_word(self.word(at + 1));
        (0..self.tokens.len())
            .filter(named)
            .filter_map(function)
            .collect()
    }

    fn types(&self) -> Vec<String> {
        let named =
            |at: &usize| ["struct", "enum", "trait"].contains(&self.word(*at)) && is_word(self.word(at + 1));
        let names = (0..self.tokens.len())
            .filter(named)
            .map(|at| self.word(at + 1).to_string());
        names.collect()
    }
}

const TEST: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];

fn word_at(tokens: &[Token], at: usize) -> &str {
    tokens.get(at).map_or("", |t| &t.text)
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Behind the end of the item that starts at `at`: its `;`, or the brace that closes its body.
fn item_end(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(at) {
        match token.text.as_str() {
            "{" | "(" | "[" => depth += 1,
            ")" | "]" => depth -= 1,
            "}" => {
                depth -= 1;
                if depth == 0 {
                    return i + 1;
                }
            }
            ";" if depth == 0 => return i + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The module at a place of a file: its own, and those written out in braces.
struct Inside {
    module: Module,
    /// Modules in braces, each with the depth at which it ends.
    inner: Vec<(String, usize)>,
    depth: usize,
}

impl Inside {
    fn new(module: &[String]) -> Self {
        Self {
            module: module.to_vec(),
            inner: Vec::new(),
            depth: 0,
        }
    }

    fn step(&mut self, tokens: &[Token], at: usize) {
        match word_at(tokens, at) {
            "mod" if word_at(tokens, at + 2) == "{" => {
                self.inner.push((tokens[at + 1].text.clone(), self.depth))
            }
            "{" => self.depth += 1,
            "}" => {
                self.depth -= 1;
                self.inner.pop_if(|(_, depth)| *depth == self.depth);
            }
            _ => {}
        }
    }

    fn module(&self) -> Module {
        self.module
            .iter()
            .chain(self.inner.iter().map(|(name, _)| name))
            .cloned()
            .collect()
    }
}

/// Adds the leaves of a `use` tree: the name that each has here, and its path. Returns where the tree ends.
fn use_tree(tokens: &[Token], mut at: usize, prefix: &[String], leaves: &mut Vec<(String, Module)>) -> usize {
    let mut path = prefix.to_vec();
    loop {
        match word_at(tokens, at) {
            "{" => {
                at += 1;
                while word_at(tokens, at) != "}" {
                    at = use_tree(tokens, at, &path, leaves);
                    at += usize::from(word_at(tokens, at) == ",");
                }
                return at + 1;
            }
            "self" if !path.is_empty() && path.len() == prefix.len() => {}
            "*" => {}
            word => path.push(word.to_string()),
        }
        at += 1;
        match word_at(tokens, at) {
            "::" => at += 1,
            "as" => {
                leaves.push((tokens[at + 1].text.clone(), path));
                return at + 2;
            }
            _ => {
                leaves.push((path.last().cloned().unwrap_or_default(), path));
                return at;
            }
        }
    }
}

/// A path as seen in `module`, from the crate's root; `None` if it leads to another crate.
fn resolve(
    path: &[String],
    module: &[String],
    names: &BTreeMap<String, Module>,
    exists: &dyn Fn(&Module) -> bool,
) -> Option<Module> {
    let (first, mut rest) = path.split_first()?;
    // The module that hides the others stands for the crate's root.
    if first == "crate" && rest.first().is_some_and(|word| word == "internal") {
        rest = &rest[1..];
    }
    let base = match first.as_str() {
        "crate" | "kvsmith" => Vec::new(),
        "self" => module.to_vec(),
        "super" => {
            let ups = 1 + rest.iter().take_while(|word| *word == "super").count();
            return Some([&module[..module.len().checked_sub(ups)?], &rest[ups - 1..]].concat());
        }
        name if exists(&child(module, name)) => child(module, name),
        name => names.get(name)?.clone(),
    };
    Some([&base, rest].concat())
}

/// The tokens of a text.
fn tokens(text: &str) -> Vec<Token> {
    let mut reader = Reader {
        chars: text.chars().collect(),
        at: 0,
        line: 1,
    };
    let mut out = Vec::new();
    while let Some(c) = reader.peek(0) {
        let line = reader.line;
        match c {
            '/' if reader.peek(1) == Some('/') => reader.skip_while(|c| c != '\n'),
            '/' if reader.peek(1) == Some('*') => reader.skip_comment(),
            '"' => reader.skip_text(0, true),
            '\'' => reader.skip_quote(),
            c if c.is_alphanumeric() || c == '_' => {
                let word = reader.take_word();
                if !reader.skip_prefixed(&word) {
                    out.push(Token { text: word, line });
                }
            }
            ':' if reader.peek(1) == Some(':') => {
                reader.skip(2);
                out.push(Token {
                    text: "::".into(),
                    line,
                });
            }
            c => {
                reader.skip(1);
                if !c.is_whitespace() {
                    out.push(Token { text: c.into(), line });
                }
            }
        }
    }
    out
}

/// A place in a text.
struct Reader {
    chars: Vec<char>,
    at: usize,
    line: usize,
}

impl Reader {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn skip(&mut self, n: usize) {
        for _ in 0..n {
            self.line += usize::from(self.peek(0) == Some('\n'));
            self.at += 1;
        }
    }

    fn skip_while(&mut self, holds: impl Fn(char) -> bool) {
        while self.peek(0).is_some_and(&holds) {
            self.skip(1);
        }
    }

    fn take_word(&mut self) -> String {
        let start = self.at;
        self.skip_while(|c| c.is_alphanumeric() || c == '_');
        self.chars[start..self.at].iter().collect()
    }

    /// Skips a comment that may hold others.
    fn skip_comment(&mut self) {
        let mut depth = 0;
        loop {
            match (self.peek(0), self.peek(1)) {
                (Some('/'), Some('*')) => (depth, _) = (depth + 1, self.skip(2)),
                (Some('*'), Some('/')) => (depth, _) = (depth - 1, self.skip(2)),
                (Some(_), _) => self.skip(1),
                (None, _) => return,
            }
            if depth == 0 {
                return;
            }
        }
    }

    /// Skips a text from its opening quote to the closing one with as many `#`.
    fn skip_text(&mut self, hashes: usize, escapes: bool) {
        self.skip(1);
        while let Some(c) = self.peek(0) {
            let closes = c == '"' && (1..=hashes).all(|i| self.peek(i) == Some('#'));
            self.skip(match c {
                _ if closes => 1 + hashes,
                '\\' if escapes => 2,
                _ => 1,
            });
            if closes {
                return;
            }
        }
    }

    /// Skips a character in quotes, or a lifetime.
    fn skip_quote(&mut self) {
        if self.peek(1) == Some('\\') {
            self.skip(3);
            self.skip_while(|c| c != '\'');
            self.skip(1);
        } else if self.peek(2) == Some('\'') {
            self.skip(3);
        } else {
            self.skip(1);
            self.take_word();
        }
    }

    /// Whether `word` was the prefix of a literal, as in `r#".."#`, `b".."` and `b'x'`, which then is skipped.
    fn skip_prefixed(&mut self, word: &str) -> bool {
        if !["r", "b", "c", "br", "cr"].contains(&word) {
            return false;
        }
        let hashes = (0..).take_while(|i| self.peek(*i) == Some('#')).count();
        match (self.peek(hashes), hashes) {
            (Some('"'), _) => {
                self.skip(hashes);
                self.skip_text(hashes, !word.contains('r'));
                true
            }
            (Some('\''), 0) => {
                self.skip_quote();
                true
            }
            _ => false,
        }
    }
}
