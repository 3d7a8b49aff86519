//! The adapter, its buffers and dispatches, and reading results back.
//!
//! Everything that can fail in a driver happens in [`WgpuContext::work`], within error scopes: a validation
//! error, a lack of memory or a lost device becomes an [`Error`], never a panic and never zeros that look
//! like a result.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use wgpu::BufferUsages;

use super::kernels::Kernels;
use crate::error::{Error, Result};

/// The hint for a machine without an adapter.
const NO_ADAPTER: &str = "install the Vulkan driver of your GPU (Debian, Ubuntu: apt-get install libvulkan1 \
                          mesa-vulkan-drivers, which includes a driver for machines without a GPU), or use \
                          ⟨device=cpu⟩";

/// The most multiply-adds per submission: about a tenth of a second on a slow GPU, well below the time after which
/// drivers consider a GPU hung.
const SUBMISSION: u64 = 1 << 34;

/// The sizes that fit into one binding and one dispatch; larger work is cut into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WgpuLimits {
    /// The most bytes of one storage buffer.
    pub buffer_bytes: u64,
    /// The most workgroups of one dispatch.
    pub groups: u32,
}

impl WgpuLimits {
    /// No limits beyond the adapter's own.
    pub const NONE: Self = Self {
        buffer_bytes: u64::MAX,
        groups: u32::MAX,
    };

    /// Returns the smaller of each of these limits and the adapter's own limits.
    fn within(self, own: &wgpu::Limits) -> Self {
        let own_bytes = own.max_storage_buffer_binding_size.min(own.max_buffer_size);
        Self {
            buffer_bytes: self.buffer_bytes.min(own_bytes),
            groups: self.groups.min(own.max_compute_workgroups_per_dimension),
        }
    }
}

/// A failure that was reported outside of any call: a lost device, or an error outside of the error scopes.
type Fault = Arc<Mutex<Option<String>>>;

/// An open adapter.
pub(super) struct WgpuContext {
    pub device: wgpu::Device,
    queue: wgpu::Queue,
    pub adapter: String,
    /// Whether the adapter is this machine's CPU.
    pub software: bool,
    pub limits: WgpuLimits,
    kernels: Kernels,
    fault: Fault,
}

impl WgpuContext {
    /// Opens the fastest adapter and compiles the shaders.
    pub fn open(limits: WgpuLimits) -> Result<Self> {
        let mut instance = wgpu::InstanceDescriptor::new_without_display_handle();
        // Makes the same calls in every build, whatever validation layers are installed.
        instance.flags = wgpu::InstanceFlags::empty();
        let request = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        let adapter = pollster::block_on(wgpu::Instance::new(instance).request_adapter(&request))
            .map_err(|e| no_adapter(&e))?;
        let offered = adapter.limits();
        let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
            required_limits: offered.clone(),
            ..Default::default()
        }))
        .map_err(|e| Error::device(format!("wgpu cannot open the adapter: {e}")).hint(NO_ADAPTER))?;
        let fault = watch(&device);
        let info = adapter.get_info();
        let adapter = describe(&info);
        let kernels = scoped(&device, &fault, "compile the shaders", || {
            Ok(Kernels::compile(&device))
        })
        .map_err(|e| e.context(&adapter))?;
        Ok(Self {
            device,
            queue,
            adapter,
            software: info.device_type == wgpu::DeviceType::Cpu,
            limits: limits.within(&offered),
            kernels,
            fault,
        })
    }

    /// Runs allocations and dispatches in `f`; `doing` completes "wgpu cannot ..." in the message of a failure.
    pub fn work<T>(&self, doing: &str, f: impl FnOnce(&mut Batch) -> Result<T>) -> Result<T> {
        scoped(&self.device, &self.fault, doing, || {
            let mut batch = Batch {
                context: self,
                encoder: self.device.create_command_encoder(&Default::default()),
                cost: 0,
            };
            let result = f(&mut batch)?;
            batch.submit();
            Ok(result)
        })
        .map_err(|e| e.context(&self.adapter))
    }

    /// Allocates a storage buffer of zeros. To be called inside [`WgpuContext::work`].
    pub fn buffer(&self, bytes: u64) -> Result<wgpu::Buffer> {
        if bytes > self.limits.buffer_bytes {
            let (found, most) = (bytes, self.limits.buffer_bytes);
            let error =
                format!("a buffer of {found} bytes is needed, but the adapter supports at most {most} bytes");
            return Err(Error::device(error).hint("use ⟨device=cpu⟩"));
        }
        Ok(self.allocate(
            bytes,
            BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
        ))
    }

    fn allocate(&self, size: u64, usage: BufferUsages) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage,
            mapped_at_creation: false,
        })
    }

    /// Allocates a storage buffer with these values. To be called inside [`WgpuContext::work`].
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<wgpu::Buffer> {
        let buffer = self.buffer(size_of_val(values) as u64)?;
        self.write(&buffer, 0, values);
        Ok(buffer)
    }

    /// Overwrites values from element `first` on, before the next submission runs.
    pub fn write<T: Pod>(&self, buffer: &wgpu::Buffer, first: usize, values: &[T]) {
        let offset = (first * size_of::<T>()) as u64;
        self.queue
            .write_buffer(buffer, offset, bytemuck::cast_slice(values));
    }

    /// Returns how many values of `bytes` bytes each fit into a buffer.
    ///
    /// # Errors
    /// Not even one value fits.
    pub fn capacity(&self, bytes: usize) -> Result<usize> {
        match self.limits.buffer_bytes / bytes.max(1) as u64 {
            0 => self.buffer(bytes as u64).map(|_| 0),
            n => Ok(n as usize),
        }
    }
}

/// Commands that are being recorded.
pub(super) struct Batch<'a> {
    context: &'a WgpuContext,
    encoder: wgpu::CommandEncoder,
    /// Multiply-adds recorded since the last submission.
    cost: u64,
}

impl Batch<'_> {
    /// Runs an entry point of [`super::kernels`], which fills in the arguments, on `groups` workgroups. Splits them
    /// into several dispatches if the adapter takes fewer per dispatch.
    ///
    /// `params` are the shader's parameters after `first_group`, each buffer comes with the number of its binding, and
    /// `cost` is the number of multiply-adds per workgroup.
    pub fn run(
        &mut self,
        entry: usize,
        params: &[usize],
        buffers: &[(u32, &wgpu::Buffer)],
        groups: usize,
        cost: usize,
    ) {
        let WgpuContext {
            device,
            kernels,
            limits,
            ..
        } = self.context;
        let pipeline = &kernels.0[entry];
        let layout = pipeline.get_bind_group_layout(0);
        let affordable = (SUBMISSION / (cost as u64).max(1)).clamp(1, u64::from(limits.groups)) as usize;
        for first in (0..groups).step_by(affordable) {
            let count = affordable.min(groups - first);
            let mut words = vec![first as u32];
            words.extend(params.iter().map(|p| *p as u32));
            // The size of a uniform buffer is a multiple of 16 bytes.
            words.resize(words.len().next_multiple_of(4), 0);
            let usage = BufferUsages::UNIFORM | BufferUsages::COPY_DST;
            let uniform = self.context.allocate((words.len() * 4) as u64, usage);
            self.context.write(&uniform, 0, &words);
            let given = [(0, &uniform)].into_iter().chain(buffers.iter().copied());
            let entries = given.map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.as_entire_binding(),
            });
            let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &layout,
                entries: &entries.collect::<Vec<_>>(),
            });
            let mut pass = self.encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(count as u32, 1, 1);
            drop(pass);
            self.cost += (count * cost) as u64;
            if self.cost >= SUBMISSION {
                self.submit();
            }
        }
    }

    /// Fills a buffer with zeros.
    pub fn clear(&mut self, buffer: &wgpu::Buffer) {
        self.encoder.clear_buffer(buffer, 0, None);
    }

    /// Submits the recorded commands.
    pub fn submit(&mut self) {
        let next = self.context.device.create_command_encoder(&Default::default());
        let recorded = std::mem::replace(&mut self.encoder, next);
        self.context.queue.submit([recorded.finish()]);
        self.cost = 0;
    }

    /// Submits the recorded commands, waits for them, and reads the buffers back.
    pub fn read<'b, T: Pod>(
        &mut self,
        buffers: impl IntoIterator<Item = &'b wgpu::Buffer>,
    ) -> Result<Vec<Vec<T>>> {
        let context = self.context;
        let mut copies = Vec::new();
        for buffer in buffers {
            let copy = context.allocate(buffer.size(), BufferUsages::COPY_DST | BufferUsages::MAP_READ);
            self.encoder
                .copy_buffer_to_buffer(buffer, 0, &copy, 0, buffer.size());
            copies.push(copy);
        }
        self.submit();
        let (sender, receiver) = mpsc::channel();
        for copy in &copies {
            let sender = sender.clone();
            copy.map_async(wgpu::MapMode::Read, .., move |result| {
                // The receiver is gone only if an earlier read failed.
                let _ = sender.send(result);
            });
        }
        drop(sender);
        context.wait()?;
        let failed = |what: &dyn std::fmt::Display| {
            Error::device(format!("reading results back from the GPU failed: {what}"))
        };
        for _ in &copies {
            receiver.recv().map_err(|e| failed(&e))?.map_err(|e| failed(&e))?;
        }
        let view = |copy: &wgpu::Buffer| {
            let view = copy.get_mapped_range(..).map_err(|e| failed(&e))?;
            Ok(bytemuck::pod_collect_to_vec(&view))
        };
        copies.iter().map(view).collect()
    }
}

impl WgpuContext {
    /// Waits until all submissions are done.
    fn wait(&self) -> Result<()> {
        let poll = || self.device.poll(wgpu::PollType::wait_indefinitely());
        // wgpu panics if the driver reports a lost device during the wait.
        match catch_unwind(AssertUnwindSafe(poll)) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(e)) => Err(Error::device(e.to_string())),
            Err(_) => Err(Error::device("the GPU driver failed")),
        }
    }
}

/// Runs `f` in error scopes and returns the first failure of the device, or the result of `f`.
fn scoped<T>(device: &wgpu::Device, fault: &Fault, doing: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let result = f();
    let mut caught = [validation, internal, memory].map(|scope| pollster::block_on(scope.pop()));
    let failed = |why: String| Error::device(format!("wgpu cannot {doing}: {why}"));
    if let Some(why) = fault.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        return Err(failed(why.clone()).hint("use ⟨device=cpu⟩"));
    }
    // Out of memory first: the other errors follow from the missing buffer.
    caught.reverse();
    match caught.into_iter().flatten().next() {
        Some(wgpu::Error::OutOfMemory { .. }) => {
            Err(failed("out of memory".to_owned()).hint("free GPU memory, or use ⟨device=cpu⟩"))
        }
        Some(e) => Err(failed(one_line(&e.to_string())).hint("use ⟨device=cpu⟩")),
        None => result,
    }
}

/// Makes the error for a machine without an adapter. wgpu's own message would also list every backend that was not
/// built in.
fn no_adapter(e: &wgpu::RequestAdapterError) -> Error {
    let why = match e {
        wgpu::RequestAdapterError::NotFound { .. } => "there is no driver or no device".to_owned(),
        other => one_line(&other.to_string()),
    };
    Error::device(format!("wgpu found no adapter: {why}")).hint(NO_ADAPTER)
}

/// Stores the first report of a lost device or of an error outside of the error scopes.
fn watch(device: &wgpu::Device) -> Fault {
    let fault = Fault::default();
    let note = |fault: &Fault, what: String| {
        let mut fault = fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.get_or_insert(what);
    };
    let lost = fault.clone();
    device.set_device_lost_callback(move |reason, message| {
        note(
            &lost,
            format!("the device is lost ({reason:?}): {}", one_line(&message)),
        );
    });
    let uncaught = fault.clone();
    device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| {
        note(&uncaught, one_line(&e.to_string()));
    }));
    fault
}

/// Returns the name, the backend and the driver of an adapter.
fn describe(info: &wgpu::AdapterInfo) -> String {
    let driver = [info.driver.as_str(), info.driver_info.as_str()];
    let driver: Vec<&str> = driver.into_iter().filter(|s| !s.is_empty()).collect();
    format!("{}, {}, {}", info.name, info.backend, driver.join(" "))
}

/// Joins the lines of a message; wgpu's messages are multi-line trees.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(": ")
}
