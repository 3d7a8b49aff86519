//! The WGSL shaders, without an adapter: what the build reads of them, and the limits that every adapter offers. The
//! build itself stops at a shader that naga refuses, with the features of core WebGPU alone.

use naga::AddressSpace;

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

/// What an entry point uses through other functions counts; what it does not use is left out.
#[test]
fn an_entry_point_is_read_with_what_it_calls() {
    let text = "struct Params { first_group: u32, n: u32, unused: u32 }
        @group(0) @binding(0) var<uniform> p: Params;
        @group(0) @binding(1) var<storage, read> x: array<f32>;
        @group(0) @binding(2) var<storage, read_write> y: array<f32>;
        @group(0) @binding(3) var<storage, read> other: array<f32>;
        fn inner(i: u32) -> f32 { return x[i + p.n]; }
        fn outer(i: u32) { for (var k = 0u; k < 2u; k++) { if k == 1u { y[i] = inner(i); } } }
        @compute @workgroup_size(256) fn main(@builtin(global_invocation_id) at: vec3u) { outer(at.x); }
        @compute @workgroup_size(256) fn rest() { y[0] = other[p.first_group]; }";
    let entries = crate::build::shaders::read("s", text).unwrap();
    let names: Vec<&str> = entries.iter().map(|entry| &entry.name[..]).collect();
    assert_eq!(names, ["main", "rest"]);
    let parameters = |used: bool| [("n".to_owned(), used), ("unused".to_owned(), false)];
    assert_eq!(entries[0].parameters, parameters(true));
    assert_eq!(entries[1].parameters, parameters(false));
    let named = |bindings: [(u32, &str); 2]| bindings.map(|(i, name)| (i, name.to_owned()));
    assert_eq!(entries[0].bindings, named([(1, "x"), (2, "y")]));
    assert_eq!(entries[1].bindings, named([(2, "y"), (3, "other")]));
}

/// A shader that launches could not serve is refused.
#[test]
fn a_shader_that_the_build_cannot_read_is_refused() {
    let whole = "struct Params { first_group: u32, n: u32 }
        @group(0) @binding(0) var<uniform> p: Params;
        @group(0) @binding(1) var<storage, read_write> x: array<f32>;
        @compute @workgroup_size(256) fn main() { x[p.n] = 1.0; }";
    assert!(crate::build::shaders::read("s", whole).is_ok());
    for (from, to, expected) in [
        ("var<uniform> p", "var<storage, read> p", "no uniform variable"),
        ("first_group", "group", "is not first_group"),
        ("group: u32, n", "group: f32, n", "`first_group` is not a u32"),
        ("u32, n", "u32, @align(16) n", "`n` does not follow"),
        ("x[p.n] = 1.0", "let q = p; x[q.n] = 1.0", "as a whole"),
        (
            "@group(0) @binding(1)",
            "@group(1) @binding(1)",
            "outside group 0",
        ),
        ("fn main", "fun main", "error"),
        ("x[p.n] = 1.0", "x[p.n] = true", "error"),
    ] {
        let e = crate::build::shaders::read("s", &whole.replace(from, to)).unwrap_err();
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
