//! Which module may import which: the floors of ARCHITECTURE.md, lowest first. A file imports from its own floor and
//! from lower floors. `cargo test --test suite layers -- --nocapture` prints figures about the source tree.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::source::{Module, Tree};
use kvsmith::internal::method::registry::METHODS;

/// The floors from the ground up, with the modules of each. A module belongs where its longest prefix stands.
const FLOORS: [&[&str]; 13] = [
    &[
        "error",
        "heap",
        "large",
        "env",
        "mapped",
        "prefetch",
        "slots",
        "unfinished",
        "numbers",
        "parameters",
        "wording",
        "sandbox",
        "float",
        "quant",
        "weight",
    ],
    &["disk", "store"],
    &["compute"],
    &["kv"],
    &["model"],
    &["stats"],
    &["corpus", "capture", "dump"],
    &["artifact", "work"],
    &["method"],
    &["runner"],
    &["cuda"],
    &["machine", "calibration", "timing", "estimate", "tune"],
    // The crate's root declares modules and names what is public; `main.rs` is beside it.
    &["", "cli", "cmd"],
];

/// Most files that may import each other in a circle.
const MAX_CIRCLE: usize = 5;

/// The floor of a module.
fn floor(module: &Module) -> Option<usize> {
    let path = module.join("::");
    let within = |name: &str| path == name || !name.is_empty() && path.starts_with(&format!("{name}::"));
    let lengths = FLOORS.iter().enumerate().flat_map(|(floor, names)| {
        let known = names.iter().filter(|name| within(name));
        known.map(move |name| (name.len(), floor))
    });
    lengths.max().map(|(_, floor)| floor)
}

/// An import that should not be, in words.
fn complaint(file: &str, module: &Module, target: &str, target_module: &Module) -> Option<String> {
    let (from, to) = (floor(module)?, floor(target_module)?);
    let part = |module: &Module| module.first().cloned().unwrap_or_default();
    let above = ["kv", "model", "method", "runner", "cli", "cmd"];
    let rule = if part(module) == "compute" && above.contains(&part(target_module).as_str()) {
        "src/compute knows nobody above it".to_string()
    } else if target == "cli.rs" && part(module) != "cmd" && file != "main.rs" {
        "only cmd and main.rs know the command line".to_string()
    } else if from < to {
        format!("floor {from} imports from floor {to}")
    } else {
        return None;
    };
    Some(rule)
}

/// Every import that should not be.
fn bad_imports(tree: &Tree) -> Vec<String> {
    let mut found = Vec::new();
    for (path, file) in &tree.files {
        for (target, name) in &file.imports {
            let rule = complaint(path, &file.module, target, &tree.files[target].module);
            found.extend(rule.map(|rule| format!("{path}: {name} ({target}): {rule}")));
        }
    }
    found
}

/// Files that no floor has.
fn homeless(tree: &Tree) -> Vec<String> {
    let files = tree
        .files
        .iter()
        .filter(|(_, file)| floor(&file.module).is_none());
    files
        .map(|(path, _)| format!("{path} is on no floor: add its module to FLOORS"))
        .collect()
}

/// Groups of files in which each reaches all others by imports, the largest first.
fn circles(tree: &Tree) -> Vec<BTreeSet<&String>> {
    let reached = |start| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(path) = open.pop() {
            let imports = tree.files[path].imports.keys();
            open.extend(imports.filter(|target| seen.insert(*target)));
        }
        seen
    };
    let reach: BTreeMap<&String, BTreeSet<&String>> = tree.files.keys().map(|p| (p, reached(p))).collect();
    let circle = |path: &String| -> BTreeSet<&String> {
        let others = reach[path].iter().filter(|other| reach[**other].contains(path));
        others.copied().collect()
    };
    let circles: BTreeSet<_> = tree.files.keys().map(circle).filter(|c| c.len() > 1).collect();
    let mut circles: Vec<_> = circles.into_iter().collect();
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    circles
}

/// Whether all files stand in one folder, or all below one of them.
fn is_one_folder(tree: &Tree, circle: &BTreeSet<&String>) -> bool {
    let modules = || circle.iter().map(|path| &tree.files[*path].module);
    let parents: BTreeSet<&[String]> = modules()
        .map(|module| &module[..module.len().saturating_sub(1)])
        .collect();
    let is_above_all = |head: &Module| !head.is_empty() && modules().all(|module| module.starts_with(head));
    parents.len() == 1 || modules().any(is_above_all)
}

/// Circles that should not be, with the imports that close them.
fn bad_circles(tree: &Tree) -> Vec<String> {
    let bad = |circle: &BTreeSet<&String>| circle.len() > MAX_CIRCLE || !is_one_folder(tree, circle);
    let circles = circles(tree).into_iter().filter(bad);
    circles
        .map(|circle| {
            let mut text = format!("{} files import each other in a circle:", circle.len());
            for path in &circle {
                let inside = tree.files[*path]
                    .imports
                    .iter()
                    .filter(|(target, _)| circle.contains(target));
                let names: Vec<&str> = inside.map(|(_, name)| name.as_str()).collect();
                text += &format!("\n    {path}: {}", names.join(", "));
            }
            text
        })
        .collect()
}

/// The repository, or the folder that `KVSMITH_ROOT` names.
fn root() -> PathBuf {
    let root = std::env::var_os("KVSMITH_ROOT");
    root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}

/// Prints what can be compared between two versions.
fn print_figures(tree: &Tree) {
    let files = || tree.files.iter();
    let floor_of = |path: &String| floor(&tree.files[path].module);
    let upward = files().flat_map(|(path, file)| file.imports.keys().map(move |target| (path, target)));
    let upward = upward
        .filter(|(path, target)| floor_of(path) < floor_of(target))
        .count();
    let circle = circles(tree).first().map_or(0, BTreeSet::len);
    println!(
        "{} files, {circle} in the largest circle, {upward} imports of a higher floor",
        files().count()
    );
    let (lines, code) = files().fold((0, 0), |(n, code), (_, f)| (n + f.lines, code + f.code_lines));
    println!(
        "{lines} lines without tests, {code} without comments; {} of kernels, {} of shaders",
        lines_of("kernels"),
        lines_of("shaders")
    );
    let long = |file: &crate::source::File| file.lines > 400;
    println!(
        "{} files over 400 lines",
        files().filter(|(_, file)| long(file)).count()
    );
    let functions = files().flat_map(|(path, file)| {
        file.functions
            .iter()
            .map(move |(name, lines)| (lines, name, path))
    });
    let mut functions: Vec<_> = functions.filter(|(lines, ..)| **lines > 60).collect();
    functions.sort_by(|a, b| b.cmp(a));
    println!("{} functions over 60 lines:", functions.len());
    functions
        .iter()
        .for_each(|(lines, name, path)| println!("    {lines} {name} in {path}"));
    let mut names: BTreeMap<&String, usize> = BTreeMap::new();
    files()
        .flat_map(|(_, file)| &file.types)
        .for_each(|name| *names.entry(name).or_default() += 1);
    let types: usize = names.values().sum();
    names.retain(|_, count| *count > 1);
    println!(
        "{types} types, {} of them share {} names:",
        names.values().sum::<usize>(),
        names.len()
    );
    println!(
        "    {}",
        names
            .iter()
            .map(|(name, count)| format!("{name} {count}"))
            .collect::<Vec<_>>()
            .join(", ")
    );
}

/// Lines of all files of a folder.
fn lines_of(folder: &str) -> usize {
    let files = std::fs::read_dir(root().join(folder)).unwrap();
    let lines = |path: PathBuf| std::fs::read_to_string(path).unwrap().lines().count();
    files
        .map(|file| file.unwrap().path())
        .filter(|path| path.is_file())
        .map(lines)
        .sum()
}

#[test]
fn imports_only_look_down() {
    let tree = Tree::read(&root());
    print_figures(&tree);
    let found = [homeless(&tree), bad_imports(&tree), bad_circles(&tree)].concat();
    assert!(
        found.is_empty(),
        "{} complaints:\n{}",
        found.len(),
        found.join("\n")
    );
    let floors = FLOORS.iter().copied().flatten().filter(|name| !name.is_empty());
    let is_there = |name: &str| tree.files.values().any(|file| file.module.join("::") == name);
    let gone: Vec<_> = floors.filter(|name| !is_there(name)).collect();
    assert!(gone.is_empty(), "FLOORS names modules that are nowhere: {gone:?}");
}

/// Files outside `method` that may name the module of a method, and that module: what they say is of this method alone, or is
/// not behind a declaration yet.
const NAME_METHODS: [(&str, &str); 10] = [
    ("calibration/dumped.rs", "a2ats"),
    ("calibration/mod.rs", "a2ats"),
    ("calibration/sections.rs", "a2ats"),
    ("cmd/bench/model_on_cpu.rs", "full"),
    ("cmd/calibrate.rs", "a2ats"),
    ("cmd/plan.rs", "a2ats"),
    ("cmd/report/heads.rs", "lfps"),
    // The check of a GPU makes small indexes of these two.
    ("cuda/check/methods.rs", "a2ats"),
    ("cuda/check/methods.rs", "wpq"),
    ("runner/caches.rs", "full"),
];

/// Imports of the modules of methods by files outside `method`. The modules of methods are those that the registry imports,
/// besides what all methods share. `lib.rs` makes parameters of methods public by their names.
fn named_methods(tree: &Tree) -> BTreeSet<(String, String)> {
    let shared = ["mod.rs", "bench.rs", "declaration.rs"];
    let module = |target: &str| {
        let within = target.strip_prefix("method/")?;
        let name = within.split(['/', '.']).next()?;
        (!shared.contains(&within)).then(|| name.to_owned())
    };
    let registry = &tree.files["method/registry.rs"].imports;
    let methods: BTreeSet<String> = registry.keys().filter_map(|target| module(target)).collect();
    let outside = tree
        .files
        .iter()
        .filter(|(path, _)| !path.starts_with("method/") && *path != "lib.rs");
    outside
        .flat_map(|(path, file)| file.imports.keys().map(move |target| (path, target)))
        .filter_map(|(path, target)| Some((path.clone(), module(target)?)))
        .filter(|(_, name)| methods.contains(name))
        .collect()
}

/// A new method touches its folder and the registry; what else knows a method by name stands in a list that only shrinks.
#[test]
fn methods_are_known_by_their_declarations() {
    let found = named_methods(&Tree::read(&root()));
    let listed: BTreeSet<_> = NAME_METHODS
        .map(|(path, name)| (path.to_owned(), name.to_owned()))
        .into();
    assert_eq!(found, listed);
}

/// Files outside `method` that may write the name of a method: those with examples, or with names of commands, and the check
/// of a GPU, whose cases are of methods.
const WRITE_METHODS: [&str; 4] = [
    "cmd/examples.rs",
    "cmd/removed.rs",
    "cuda/check/methods.rs",
    "cuda/check/model.rs",
];

/// Returns the methods whose names stand as texts in a file, besides its comments and its tests.
fn written_methods(text: &str) -> Vec<&'static str> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let code: Vec<&str> = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let names = METHODS.iter().map(|method| method.as_str());
    names
        .filter(|name| code.iter().any(|line| line.contains(&format!("\"{name}\""))))
        .collect()
}

#[test]
fn methods_are_named_by_the_registry() {
    let tree = Tree::read(&root());
    let outside = tree.files.keys().filter(|path| !path.starts_with("method/"));
    let outside =
        outside.filter(|path| !path.ends_with("tests.rs") && !WRITE_METHODS.contains(&path.as_str()));
    for path in outside {
        let text = std::fs::read_to_string(root().join("src").join(path)).unwrap();
        assert_eq!(written_methods(&text), Vec::<&str>::new(), "{path}");
    }
    for path in WRITE_METHODS {
        let text = std::fs::read_to_string(root().join("src").join(path)).unwrap();
        assert!(!written_methods(&text).is_empty(), "{path} need not be listed");
    }
    let made_up = "// \"wpq\"\nif name == \"lfps\" {}\n#[cfg(test)]\nlet a = \"topk\";";
    assert_eq!(written_methods(made_up), ["lfps"]);
}

/// Lines of the library that name a flag of the command line; flags of other programs are allowed.
fn lines_with_flags(file: &str, text: &str) -> Vec<String> {
    const OTHERS: [&str; 5] = [
        "--merge",
        "--gpu-architecture",
        "--std",
        "--define-macro",
        "--revision",
    ];
    let is_flag = |word: &str| {
        let name = word
            .strip_prefix("--")
            .filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()));
        name.is_some() && !OTHERS.iter().any(|other| word.starts_with(other))
    };
    let names_one = |line: &str| {
        line.split(|c: char| !c.is_alphanumeric() && c != '-')
            .any(is_flag)
    };
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.filter(|line| names_one(line))
        .map(|line| format!("{file}: {}", line.trim()))
        .collect()
}

/// A setting stands in a text of the library as `⟨seq_len⟩`; the command line writes it as a flag.
#[test]
fn texts_of_the_library_name_no_flags() {
    let tree = Tree::read(&root());
    let is_library =
        |file: &&String| !file.starts_with("cmd/") && !["cli.rs", "main.rs"].contains(&file.as_str());
    let found = tree.files.keys().filter(is_library).flat_map(|file| {
        let text = std::fs::read_to_string(root().join("src").join(file)).unwrap();
        lines_with_flags(file, &text)
    });
    assert_eq!(found.collect::<Vec<_>>(), Vec::<String>::new());
    let broken = [
        "let a = \"use --device cpu\";",
        "// --device\nhint(\"a smaller `--seq-len`\")",
    ];
    broken
        .iter()
        .for_each(|text| assert_eq!(lines_with_flags("a.rs", text).len(), 1, "{text}"));
    assert_eq!(
        lines_with_flags(
            "a.rs",
            "\"models--gpt2\", \"`llama-gguf-split --merge`\", i--; \"a -- b\""
        ),
        Vec::<String>::new()
    );
}

/// Lines that declare a function called `of`, which says nothing where it is called.
fn functions_called_of(file: &str, text: &str) -> Vec<String> {
    let declares = |line: &&str| ["fn of(", "fn of<"].iter().any(|start| line.contains(start));
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.filter(declares)
        .map(|line| format!("{file}: {}", line.trim()))
        .collect()
}

#[test]
fn functions_say_what_they_do() {
    let tree = Tree::read(&root());
    let found = tree.files.keys().flat_map(|file| {
        let text = std::fs::read_to_string(root().join("src").join(file)).unwrap();
        functions_called_of(file, &text)
    });
    assert_eq!(found.collect::<Vec<_>>(), Vec::<String>::new());
    let made_up = "pub fn of<T>(x: T) {}\n    fn of(&self);\n// fn of()\nfn off() {}\nlet of = |x| x;";
    assert_eq!(functions_called_of("a.rs", made_up).len(), 2);
}

/// A tree of made-up files.
fn made_up(files: &[(&str, &str)]) -> Tree {
    Tree::from_texts(
        &files
            .iter()
            .map(|(path, text)| (path.to_string(), text.to_string()))
            .collect(),
    )
}

/// What is imported by the first of the files.
fn imports(files: &[(&str, &str)]) -> Vec<String> {
    made_up(files).files[files[0].0].imports.keys().cloned().collect()
}

#[test]
fn every_way_to_name_a_file_is_an_import() {
    let others = [
        ("a/mod.rs", "mod b; mod c;"),
        ("a/c.rs", ""),
        ("a/c/d.rs", ""),
        ("e.rs", ""),
        ("lib.rs", ""),
    ];
    let of = |text: &'static str| imports(&[&[("a/b.rs", text)], &others[..]].concat());
    for (text, expected) in [
        ("use crate::e::Thing;", vec!["e.rs"]),
        ("pub(crate) use crate::e as other;", vec!["e.rs"]),
        ("use crate::a::Thing;", vec!["a/mod.rs"]),
        ("use crate::a::c::d::Thing;", vec!["a/c/d.rs"]),
        ("use crate::a::c::Kind::{self, One};", vec!["a/c.rs"]),
        ("use super::c;", vec!["a/c.rs"]),
        (
            "use super::{c::{self, d::{X, Y}}, Thing};",
            vec!["a/c.rs", "a/c/d.rs", "a/mod.rs"],
        ),
        ("use super::super::e::*;", vec!["e.rs"]),
        ("mod inner { use super::super::c::X; }", vec!["a/c.rs"]),
        ("mod inner { use super::X; }", vec![]),
        ("fn f() { if true { crate::e::f() } }", vec!["e.rs"]),
        ("#[arg(value_parser = crate::e::parse)] struct S;", vec!["e.rs"]),
        (
            "use crate::a; fn f() -> a::c::X { a::c::f::<u8>() }",
            vec!["a/c.rs", "a/mod.rs"],
        ),
        (
            "use super::c as see; fn f() { see::d::f() }",
            vec!["a/c.rs", "a/c/d.rs"],
        ),
        ("#[doc(hidden)] pub use crate::e::Thing;", vec!["e.rs"]),
        ("use crate::Thing;", vec!["lib.rs"]),
        ("pub(in crate::internal::e) fn f() {}", vec!["e.rs"]),
        ("use std::e::Thing; fn f() { e::f() }", vec![]),
        (
            "/// See [`crate::e`].\n// crate::e::f()\n/* crate::e /* */ crate::e::f() */ fn f() {}",
            vec![],
        ),
        (
            r##"const A: &str = "crate::e::f"; const B: &str = r#"" crate::e::f"#; const C: char = '"';"##,
            vec![],
        ),
        (
            "fn f<'a>(x: &'a str) -> char { '\\'' } fn g() { crate::e::f() }",
            vec!["e.rs"],
        ),
        ("#[cfg(test)]\nmod tests { use crate::e::X; }", vec![]),
        ("#[cfg(test)]\nuse crate::e::X;\nuse super::c;", vec!["a/c.rs"]),
    ] {
        assert_eq!(of(text), expected, "{text}");
    }
}

#[test]
fn files_of_tests_may_look_anywhere() {
    let tree = made_up(&[
        ("compute/a.rs", "#[cfg(test)]\nmod tests;\n"),
        ("compute/a/tests.rs", "use crate::cli::X;"),
        ("cli.rs", ""),
    ]);
    assert_eq!(tree.files.keys().collect::<Vec<_>>(), ["cli.rs", "compute/a.rs"]);
}

/// What an embedding program may use is named in `lib.rs` alone.
#[test]
fn the_crate_has_no_public_module_but_the_hidden_one() {
    let text = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let public: Vec<&str> = text.lines().filter(|line| line.starts_with("pub mod")).collect();
    assert_eq!(public, ["pub mod internal {"]);
    assert!(text.contains("#[doc(hidden)]\n#[path = \"\"]\npub mod internal {"));
    let names = text.lines().skip_while(|line| !line.starts_with("pub use"));
    let names: usize = names
        .filter(|line| !line.starts_with("//"))
        .map(|line| line.matches(',').count().max(1))
        .sum();
    assert!(names < 160, "{names} names are many to learn");
}

#[test]
fn each_rule_can_be_broken() {
    let complaints = |files: &[(&str, &str)]| {
        let tree = made_up(files);
        [homeless(&tree), bad_imports(&tree), bad_circles(&tree)].concat()
    };
    let broken = |files: &[(&str, &str)], expected: &str| {
        let found = complaints(files);
        assert!(
            found.len() == 1 && found[0].contains(expected),
            "{expected}: {found:?}"
        );
    };
    broken(&[("shed.rs", "")], "shed.rs is on no floor");
    broken(
        &[("model/a.rs", "use crate::method::b;"), ("method/b.rs", "")],
        "floor 4 imports from floor 8",
    );
    for above in ["kv", "model", "method", "runner", "cmd"] {
        let (import, file) = (format!("use crate::{above}::X;"), format!("{above}.rs"));
        broken(
            &[("compute/cpu.rs", &import), (&file, "")],
            "compute knows nobody",
        );
    }
    broken(
        &[("compute/cpu.rs", "use crate::cli::X;"), ("cli.rs", "")],
        "compute knows nobody",
    );
    broken(
        &[("cuda/a.rs", "use crate::cli::X;"), ("cli.rs", "")],
        "only cmd and main.rs",
    );
    broken(
        &[("lib.rs", "use cli::X;"), ("cli.rs", "")],
        "only cmd and main.rs",
    );
    broken(
        &[("store.rs", "use crate::Thing;"), ("lib.rs", "")],
        "floor 1 imports from floor 12",
    );
    let ring = |paths: &[&str]| -> Vec<(String, String)> {
        let module = |path: &str| path.trim_end_matches(".rs").replace('/', "::");
        let next = paths.iter().cycle().skip(1);
        let file =
            |(path, next): (&&str, &&str)| (path.to_string(), format!("use crate::{}::X;", module(next)));
        paths.iter().zip(next).map(file).collect()
    };
    let complaints_of = |paths: &[&str]| {
        let ring = ring(paths);
        complaints(
            &ring
                .iter()
                .map(|(path, text)| (path.as_str(), text.as_str()))
                .collect::<Vec<_>>(),
        )
    };
    let six = ["kv/a.rs", "kv/b.rs", "kv/c.rs", "kv/d.rs", "kv/e.rs", "kv/f.rs"];
    assert!(
        complaints_of(&six)[0].starts_with("6 files import each other in a circle:\n    kv/a.rs: kv::b::X")
    );
    assert_eq!(complaints_of(&six[1..]), [""; 0]);
    assert_eq!(complaints_of(&["kv.rs", "kv/a.rs", "kv/a/b.rs"]), [""; 0]);
    assert_eq!(
        complaints_of(&["method/b.rs", "method/a.rs", "method/a/c.rs"]).len(),
        1
    );
    assert_eq!(complaints_of(&["corpus.rs", "capture.rs"]), [""; 0]);
    assert_eq!(
        complaints(&[
            ("main.rs", "use kvsmith::internal::cli::X;"),
            ("cli.rs", "use crate::cmd::X;"),
            ("cmd/a.rs", "")
        ]),
        [""; 0]
    );
}

#[test]
fn figures_are_what_they_say() {
    let tree = made_up(&[(
        "kv.rs",
        "// A comment.\nstruct A;\nenum B {}\ntrait C {\n    fn declared();\n}\nfn f() {\n    fn g() {}\n}\n\n#[cfg(test)]\nmod t {\n    struct D;\n}\n",
    )]);
    let file = &tree.files["kv.rs"];
    assert_eq!(file.types, ["A", "B", "C"]);
    assert_eq!(file.functions, [("f".to_string(), 3), ("g".to_string(), 1)]);
    assert_eq!((file.lines, file.code_lines), (10, 8));
}
