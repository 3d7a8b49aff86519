//! The WGSL shaders without an adapter: naga finds them valid, and within what every adapter offers.

mod common;

use naga::AddressSpace;
use naga::valid::{Capabilities, ValidationFlags, Validator};

use common::root;

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
