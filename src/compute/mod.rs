//! Arithmetic kernels: the naive f64 references that define each operation, and the implementations on CPUs and GPUs.
//!
//! [`device`] has the trait that calibration runs on; [`cpu`], `wgpu` (any GPU, through wgpu) and [`cuda`] implement
//! it.
//!
//! Every parallel kernel cuts its work into pieces whose sizes do not depend on the number of threads, and one thread
//! computes each piece. The results therefore have the same bytes for any number of threads.

pub mod attention;
pub mod blocks;
pub mod checks;
pub mod codewords;
pub mod comparison;
pub mod cpu;
pub mod cuda;
pub mod device;
mod draw;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "other processors use the definition of the products")
)]
mod few;
pub mod layout;
pub mod linear;
pub mod masks;
pub mod pairs;
pub mod products;
pub mod reference;
pub mod signs;
pub mod simd;
pub mod team;
#[cfg(feature = "wgpu")]
pub mod wgpu;

use ndarray::{ArrayView2, ArrayViewMut2, Axis};

#[cfg(not(feature = "wgpu"))]
use crate::error::Error;
use crate::error::Result;
use crate::float::Float;
use crate::parameters::choices;
use cuda::nvidia::Found;

choices! {
    /// The device that does the work.
    pub enum DeviceKind {
        /// An NVIDIA GPU that has passed `kvsmith gpu-check` and can run the command, else the CPU; never wgpu.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// Any GPU with a Vulkan, Metal or DirectX 12 driver, through wgpu.
        Wgpu = "wgpu",
        /// An NVIDIA GPU of compute capability 8.0 or later, through CUDA.
        Cuda = "cuda",
    }
}

choices! {
    /// The type in which prompts are multiplied: what their projections multiply with 16-bit weights, and their attention.
    pub enum Precision {
        /// On a GPU, the type of the weights, so that tensor cores can be used; on the CPU, f32.
        Auto = "auto",
        /// Nothing is rounded.
        F32 = "f32",
        /// For weights in bf16, on GPUs and on CPUs with AVX512-BF16.
        Bf16 = "bf16",
    }
}

impl Precision {
    /// Returns what manifests name: bf16 if it was asked for.
    pub fn recorded(self) -> Option<Self> {
        (self == Self::Bf16).then_some(self)
    }

    /// Returns the type in which attention reads keys and values that no cache keeps; `kind` is the
    /// weights' type.
    pub fn attended(self, kind: Float) -> Float {
        match self {
            Self::F32 => Float::F32,
            Self::Auto | Self::Bf16 => kind,
        }
    }
}

/// What a device is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// The operations of [`device::Device`].
    Fits,
    /// These, and a model. On an NVIDIA GPU, the vendor's library for products is opened too, which takes time and memory.
    Model,
}

/// Opens a device for calibration; `auto` takes an NVIDIA GPU if there is one that `may_use` accepts, else the CPU.
///
/// Calls `tell` with the reason why there is no GPU, or with where the GPU's kernels and its library come from.
///
/// # Errors
/// The requested device is not available.
pub fn open(
    device: DeviceKind,
    workload: Workload,
    may_use: &dyn Fn(&Found) -> bool,
    tell: &dyn Fn(&str),
) -> Result<Box<dyn device::Device>> {
    Ok(match device {
        DeviceKind::Auto => match Found::first() {
            Ok(found) if !may_use(&found) => Box::new(cpu::Cpu),
            found => match found.and_then(|_| open_cuda(workload, tell)) {
                Ok(cuda) => cuda,
                Err(e) => {
                    tell(&format!("device: no NVIDIA GPU: {e}"));
                    Box::new(cpu::Cpu)
                }
            },
        },
        DeviceKind::Cpu => Box::new(cpu::Cpu),
        #[cfg(feature = "wgpu")]
        DeviceKind::Wgpu => Box::new(wgpu::Wgpu::open(wgpu::WgpuLimits::NONE)?),
        #[cfg(not(feature = "wgpu"))]
        DeviceKind::Wgpu => {
            return Err(Error::device("wgpu: this build has no support for it")
                .hint("build kvsmith with the feature `wgpu`, or use the CPU"));
        }
        DeviceKind::Cuda => open_cuda(workload, tell)?,
    })
}

fn open_cuda(workload: Workload, tell: &dyn Fn(&str)) -> Result<Box<dyn device::Device>> {
    let cuda = match workload {
        Workload::Fits => cuda::Cuda::open()?,
        Workload::Model => cuda::Cuda::open_for_models(tell)?,
    };
    tell(if cuda::kernels::are_built_in() {
        "device: the CUDA kernels are built in"
    } else {
        "device: the CUDA kernels were compiled at startup with NVRTC"
    });
    Ok(Box::new(cuda))
}

/// Computes `out = a b`, or `out += a b` with `accumulate`, on the calling thread.
///
/// # Shapes
/// a `[m,k]`, b `[k,n]`, out `[m,n]`; any strides, so a transposed view costs nothing.
///
/// # Numerics
/// f32 products and sums. The order of each sum depends only on the shapes and on the machine (its instruction set and
/// cache sizes), not on threads or load.
pub fn gemm(mut out: ArrayViewMut2<f32>, accumulate: bool, a: ArrayView2<f32>, b: ArrayView2<f32>) {
    let (m, k) = a.dim();
    let n = b.ncols();
    assert_eq!(b.nrows(), k, "inner sizes of a product");
    assert_eq!(out.dim(), (m, n), "output size of a product");
    let (so, sa, sb) = (out.strides().to_vec(), a.strides().to_vec(), b.strides().to_vec());
    // SAFETY: the pointers and strides come from live views whose shapes were just checked, and
    // `out` is borrowed mutably, so it overlaps neither input.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            so[1],
            so[0],
            accumulate,
            a.as_ptr(),
            sa[1],
            sa[0],
            b.as_ptr(),
            sb[1],
            sb[0],
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Cuts a view into consecutive pieces of at most `size` along `axis`.
pub fn pieces<'a>(mut view: ArrayViewMut2<'a, f32>, axis: Axis, size: usize) -> Vec<ArrayViewMut2<'a, f32>> {
    let mut out = Vec::new();
    while view.len_of(axis) > size {
        let (head, rest) = view.split_at(axis, size);
        out.push(head);
        view = rest;
    }
    out.push(view);
    out
}
