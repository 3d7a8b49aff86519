//! The shaders, `shaders/<stem>.wgsl`. `build.rs` reads their entry points and writes a struct for each, whose fields
//! are the parameters and the buffers of the entry point.

use super::context::Batch;

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

/// The compiled entry points, by number.
pub(super) struct Kernels(pub Vec<wgpu::ComputePipeline>);

impl Kernels {
    /// Compiles all entry points; compilation errors go to the error scopes.
    pub fn compile(device: &wgpu::Device) -> Self {
        let compile = |&(source, name): &(&'static str, &str)| {
            let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(name),
                source: wgpu::ShaderSource::Wgsl(source.into()),
            });
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout: None,
                module: &module,
                entry_point: Some(name),
                compilation_options: Default::default(),
                cache: None,
            })
        };
        Self(ENTRIES.iter().map(compile).collect())
    }
}
