//! The WGSL shaders, without an adapter: naga accepts them, and they stay within the limits that every adapter offers.

use naga::AddressSpace;
use naga::valid::{Capabilities, ValidationFlags, Validator};

use crate::common::root;

/// Stem and source of every shader.
fn shaders() -> Vec<(String, String)> {
    let files = std::fs::read_dir(root().join("shaders")).unwrap();
    let mut shaders: Vec<_> = files
        .map(|file| file.unwrap().path())
        .map(|path| {
            assert_eq!(path.extension().unwrap(), "wgsl");
            let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (stem, std::fs::read_to_string(path).unwrap())
        })
        .collect();
    shaders.sort();
    assert!(shaders.len() >= 7, "shaders");
    shaders
}

#[test]
fn every_shader_is_valid() {
    for (stem, source) in shaders() {
        let module = naga::front::wgsl::parse_str(&source)
            .unwrap_or_else(|e| panic!("{stem}: {}", e.emit_to_string(&source)));
        // No capability beyond the core of WebGPU: no subgroups, no 64-bit or 16-bit types.
        Validator::new(ValidationFlags::all(), Capabilities::empty())
            .validate(&module)
            .unwrap_or_else(|e| panic!("{stem}: {}", e.emit_to_string(&source)));
    }
}

/// WebGPU's default limits, which every adapter has.
#[test]
fn every_shader_fits_every_adapter() {
    for (stem, source) in shaders() {
        let module = naga::front::wgsl::parse_str(&source).unwrap();
        let size = |space| -> u32 {
            let variables = module.global_variables.iter();
            let variables = variables.filter(|(_, variable)| variable.space == space);
            variables
                .map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx()))
                .sum()
        };
        assert!(
            size(AddressSpace::WorkGroup) <= 16_384,
            "{stem}: workgroup memory"
        );
        assert!(size(AddressSpace::Uniform) <= 65_536, "{stem}: uniforms");
        let buffers = module.global_variables.iter();
        let buffers = buffers.filter(|(_, v)| matches!(v.space, AddressSpace::Storage { .. }));
        assert!(buffers.count() <= 8, "{stem}: storage buffers");
        assert!(!module.entry_points.is_empty(), "{stem}");
        for entry in &module.entry_points {
            let threads: u32 = entry.workgroup_size.iter().product();
            assert_eq!(threads, 256, "{stem}: threads of `{}`", entry.name);
        }
    }
}

/// What the build reads of a shader is what naga reads: the fields of `Params`, and the buffers of each entry point.
#[test]
fn entry_points_are_read_as_naga_reads_them() {
    let entries = crate::build::shaders::read_folder(&root().join("shaders")).unwrap();
    let mut compiled = Vec::new();
    for (stem, source) in shaders() {
        let module = naga::front::wgsl::parse_str(&source).unwrap();
        let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
        let info = validator.validate(&module).unwrap();
        let params = module
            .types
            .iter()
            .find(|(_, ty)| ty.name.as_deref() == Some("Params"));
        let naga::TypeInner::Struct { members, .. } = &params.unwrap().1.inner else {
            panic!("{stem}: Params are no struct");
        };
        let names = members.iter().map(|member| member.name.clone().unwrap());
        let names: Vec<String> = names.skip(1).collect();
        assert!(
            (0..).zip(members).all(|(i, member)| member.offset == 4 * i),
            "{stem}"
        );
        for (i, entry) in module.entry_points.iter().enumerate() {
            let used = module.global_variables.iter().filter(|(handle, variable)| {
                let own = info.get_entry_point(i)[*handle];
                !own.is_empty() && matches!(variable.space, AddressSpace::Storage { .. })
            });
            let bindings = used.map(|(_, variable)| {
                let binding = variable.binding.as_ref().unwrap();
                (binding.binding, variable.name.clone().unwrap())
            });
            let bindings: Vec<(u32, String)> = bindings.collect();
            compiled.push(format!("{stem} {}: {names:?} {bindings:?}", entry.name));
        }
    }
    let read = entries.iter().map(|e| {
        let names: Vec<&String> = e.parameters.iter().map(|(name, _)| name).collect();
        format!("{} {}: {names:?} {:?}", e.stem, e.name, e.bindings)
    });
    let read: Vec<String> = read.collect();
    assert_eq!(read, compiled);
}

/// A shader that is written otherwise is refused, not read in part.
#[test]
fn a_shader_that_the_build_cannot_read_is_refused() {
    let whole = "\nstruct Params {\n    first_group: u32,\n    n: u32,\n}\n\
                 @group(0) @binding(1) var<storage, read> x: array<f32>;\n\
                 @compute @workgroup_size(256)\nfn main() {\n    f();\n}\nfn f() {\n    x[p.n];\n}\n";
    let entries = crate::build::shaders::read("s", whole).unwrap();
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].parameters, [("n".to_owned(), true)]);
    assert_eq!(entries[0].bindings, [(1, "x".to_owned())]);
    for (from, to, expected) in [
        ("struct Params", "struct Sizes", "no Params"),
        ("first_group", "group", "do not begin with first_group"),
        ("n: u32", "n: f32", "`n: f32` is no u32"),
        ("@group(0)", "@group(1)", "no binding: `@group(1)"),
        ("fn main", "fun main", "without a function"),
    ] {
        let text = whole
            .replace(from, to)
            .replace("fn f()", if from == "fn main" { "fun f()" } else { "fn f()" });
        let e = crate::build::shaders::read("s", &text).unwrap_err();
        assert!(e.contains(expected), "{from}: {e}");
    }
}

/// A shader says whose contract it keeps, and that function exists.
#[test]
fn every_shader_names_its_contract() {
    let reference = std::fs::read_to_string(root().join("src/compute/reference.rs")).unwrap();
    for (stem, source) in shaders() {
        if stem == "subtract" {
            continue;
        }
        assert!(
            source.contains(&format!("`{stem}` in\n// src/compute/reference.rs"))
                || source.contains(&format!("`{stem}` in src/compute/reference.rs")),
            "{stem}"
        );
        assert!(reference.contains(&format!("pub fn {stem}(")), "{stem}");
    }
}
