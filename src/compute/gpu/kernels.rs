//! The shaders, `shaders/<stem>.wgsl`, and their bindings.

/// A compute shader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    SecondMoment,
    Whiten,
    ChannelSums,
    ChannelHistogram,
    ChannelPick,
    Subtract,
    SignSums,
    Nearest,
    Means,
}

/// Where a kernel comes from, and the bindings of its buffers; binding 0 has the parameters.
struct Entry {
    source: &'static str,
    name: &'static str,
    bindings: &'static [u32],
}

const CHANNEL_STATISTIC: &str = include_str!("../../../shaders/channel_statistic.wgsl");

impl Kernel {
    /// In the order in which they are declared.
    const ALL: [Self; 9] = [
        Self::SecondMoment,
        Self::Whiten,
        Self::ChannelSums,
        Self::ChannelHistogram,
        Self::ChannelPick,
        Self::Subtract,
        Self::SignSums,
        Self::Nearest,
        Self::Means,
    ];

    fn entry(self) -> Entry {
        let (source, name, bindings): (&str, &str, &[u32]) = match self {
            Self::SecondMoment => (
                include_str!("../../../shaders/second_moment.wgsl"),
                "main",
                &[1, 2],
            ),
            Self::Whiten => (include_str!("../../../shaders/whiten.wgsl"), "main", &[1, 2, 3]),
            Self::ChannelSums => (CHANNEL_STATISTIC, "sums", &[1, 2]),
            Self::ChannelHistogram => (CHANNEL_STATISTIC, "histogram", &[1, 3, 4]),
            Self::ChannelPick => (CHANNEL_STATISTIC, "pick", &[3, 4]),
            Self::Subtract => (include_str!("../../../shaders/subtract.wgsl"), "main", &[1, 2]),
            Self::SignSums => (include_str!("../../../shaders/sign_sums.wgsl"), "main", &[1, 2]),
            Self::Nearest => (
                include_str!("../../../shaders/nearest.wgsl"),
                "main",
                &[1, 2, 3, 4],
            ),
            Self::Means => (include_str!("../../../shaders/means.wgsl"), "main", &[1, 2, 3, 4]),
        };
        Entry {
            source,
            name,
            bindings,
        }
    }
}

/// The compiled shaders.
pub(super) struct Kernels(Vec<wgpu::ComputePipeline>);

impl Kernels {
    /// Compiles all of them; errors go to the error scopes.
    pub fn compile(device: &wgpu::Device) -> Self {
        let compile = |kernel: Kernel| {
            let Entry { source, name, .. } = kernel.entry();
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
        Self(Kernel::ALL.into_iter().map(compile).collect())
    }

    /// A kernel and its bindings.
    pub fn get(&self, kernel: Kernel) -> (&wgpu::ComputePipeline, &'static [u32]) {
        (&self.0[kernel as usize], kernel.entry().bindings)
    }
}
