//! Launches that are recorded once and started together, as CUDA graphs.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::ptr;
use std::thread::{self, ThreadId};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUcontext, CUfunction, CUgraph, CUgraphExec, CUgraphNode};

use super::failed;
use crate::compute::cuda::driver::Launch;
use crate::error::{Error, Result};

/// The first CUDA version of the driver that has the functions used here.
const OLDEST: i32 = 12_000;
/// The first one whose graphs have edges across which a kernel may begin before the one before it has ended.
const OVERLAPPING: i32 = 12_030;

/// A recorded launch with everything that it needs.
pub struct Noted {
    /// The name of the kernel, for errors.
    pub kernel: &'static str,
    pub function: CUfunction,
    pub shape: Launch,
    /// Whether it may run at the same time as the launch before it.
    pub beside: bool,
    /// The arguments; each value is in the low bytes.
    pub values: Vec<u64>,
}

impl Noted {
    /// Returns a pointer to each argument. The driver copies as many bytes from each pointer as the kernel declares;
    /// these are the low bytes, since host and device are both little-endian.
    fn pointers(&mut self) -> Vec<*mut c_void> {
        let values = self.values.iter_mut();
        values.map(|v| ptr::from_mut(v).cast::<c_void>()).collect()
    }

    /// Starts the launch now.
    ///
    /// # Safety
    /// See [`Driver::launch`](crate::compute::cuda::driver::Driver::launch).
    pub unsafe fn start(mut self) -> Result<()> {
        let mut pointers = self.pointers();
        let ([x, y, z], block) = (self.shape.grid, (self.shape.threads, 1, 1));
        let (grid, shared, stream) = ((x, y, z), self.shape.shared_bytes as u32, ptr::null_mut());
        // SAFETY: the function is one of the module, and its arguments are those that it declares, as the caller
        // promises. The values outlive the call, which copies them.
        unsafe { result::launch_kernel(self.function, grid, block, shared, stream, &mut pointers) }
            .map_err(|e| failed(&format!("{} did not start", self.kernel), e))
    }
}

/// The recording in progress of each thread, and the finished recordings. Each thread records its own launches, while
/// other threads go on starting theirs.
#[derive(Default)]
pub struct Recordings {
    noting: HashMap<ThreadId, Vec<Noted>>,
    /// The threads whose next launch may run at the same time as the one before it.
    beside: HashSet<ThreadId>,
    graphs: HashMap<u64, Graph>,
    next: u64,
    /// Whether the kernels wait themselves for the end of the kernel before.
    kernels_wait: bool,
}

struct Graph {
    graph: CUgraph,
    /// Null until the graph is instantiated.
    started: CUgraphExec,
}

impl Recordings {
    /// Starts without recordings; `kernels_wait` says whether kernels wait themselves for the end of the kernel before.
    pub fn new(kernels_wait: bool) -> Self {
        Self {
            kernels_wait,
            ..Self::default()
        }
    }

    /// Starts recording this thread's launches; returns false if the driver is too old.
    pub fn begin(&mut self) -> bool {
        if version() >= OLDEST {
            self.noting.insert(thread::current().id(), Vec::new());
        }
        self.is_noting()
    }

    /// Returns whether this thread's launches are being recorded.
    pub fn is_noting(&self) -> bool {
        self.noting.contains_key(&thread::current().id())
    }

    /// Says whether this thread's next launch may run at the same time as the one before it.
    pub fn set_beside(&mut self, beside: bool) {
        let thread = thread::current().id();
        if beside {
            self.beside.insert(thread)
        } else {
            self.beside.remove(&thread)
        };
    }

    /// Records a launch; gives it back, to be started, if this thread is not recording.
    pub fn note(&mut self, mut launch: Noted) -> Option<Noted> {
        let thread = thread::current().id();
        let Some(launches) = self.noting.get_mut(&thread) else {
            return Some(launch);
        };
        launch.beside = self.beside.remove(&thread) && !launches.is_empty();
        launches.push(launch);
        None
    }

    /// Ends this thread's recording, in which each launch depends on the one before it unless it may run beside that
    /// one, and returns its number.
    pub fn end(&mut self, context: CUcontext) -> Result<u64> {
        let launches = self.noting.remove(&thread::current().id());
        let launches = launches.ok_or_else(|| Error::internal("CUDA: no launches were recorded"))?;
        let graph = Graph::new(launches, context, self.kernels_wait && version() >= OVERLAPPING)?;
        self.next += 1;
        self.graphs.insert(self.next, graph);
        Ok(self.next)
    }

    /// Starts the launches of a recording.
    pub fn replay(&self, number: u64) -> Result<()> {
        let graph = self.graphs.get(&number);
        let graph = graph.ok_or_else(|| Error::internal(format!("CUDA: no recording {number}")))?;
        // SAFETY: made in `Graph::new` and not destroyed before it leaves the map.
        unsafe { result::graph::launch(graph.started, ptr::null_mut()) }
            .map_err(|e| failed("recorded launches did not start", e))
    }

    /// Frees a recording.
    pub fn forget(&mut self, number: u64) {
        self.graphs.remove(&number);
    }

    /// Frees all recordings.
    pub fn clear(&mut self) {
        self.graphs.clear();
    }
}

/// Returns the CUDA version of the driver, such as 13000; 0 if it does not tell.
fn version() -> i32 {
    let mut version = 0;
    // SAFETY: writes a number to where the pointer points.
    match unsafe { sys::cuDriverGetVersion(&mut version) }.result() {
        Ok(()) => version,
        Err(_) => 0,
    }
}

/// Lets the blocks of `node` begin once all blocks of the node `before` have called `wait_for_earlier`.
fn overlap(graph: CUgraph, before: CUgraphNode, node: CUgraphNode) -> Result<()> {
    let edge = sys::CUgraphEdgeData {
        from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
        to_port: 0,
        type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
        reserved: [0; 5],
    };
    // SAFETY: both are nodes of the graph.
    unsafe { sys::cuGraphAddDependencies_v2(graph, &before, &node, &edge, 1) }
        .result()
        .map_err(|e| failed("recorded launches have no order", e))
}

impl Graph {
    /// Makes a graph of launches: one that may run beside the launch before it depends on what that one depends on, any
    /// other on all launches since then. In a plain chain, a launch may take its places early if `overlaps`.
    fn new(launches: Vec<Noted>, context: CUcontext, overlaps: bool) -> Result<Self> {
        let sides: Vec<bool> = launches.iter().map(|launch| launch.beside).collect();
        let next_is_beside = |i: usize| sides.get(i + 1) == Some(&true);
        let mut graph = ptr::null_mut();
        // SAFETY: writes a handle to where the pointer points.
        unsafe { sys::cuGraphCreate(&mut graph, 0) }
            .result()
            .map_err(|e| failed("no graph of launches", e))?;
        let mut made = Self {
            graph,
            started: ptr::null_mut(),
        };
        // The launches that the latest ones depend on, and the latest ones, which may run at the same time.
        let (mut before, mut latest): (Vec<CUgraphNode>, Vec<CUgraphNode>) = Default::default();
        for (i, mut launch) in launches.into_iter().enumerate() {
            if !launch.beside {
                before = std::mem::take(&mut latest);
            }
            let is_chain = before.len() == 1 && !launch.beside && !next_is_beside(i);
            let mut pointers = launch.pointers();
            let [x, y, z] = launch.shape.grid;
            let params = sys::CUDA_KERNEL_NODE_PARAMS {
                func: launch.function,
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: launch.shape.threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: launch.shape.shared_bytes as u32,
                kernelParams: pointers.as_mut_ptr(),
                extra: ptr::null_mut(),
                kern: ptr::null_mut(),
                ctx: context,
            };
            let early = overlaps && is_chain;
            let waits = if early { 0 } else { before.len() };
            let mut node = ptr::null_mut();
            // SAFETY: as in `Noted::start`, by the promise of who launched it; the call copies the arguments.
            unsafe { sys::cuGraphAddKernelNode_v2(&mut node, graph, before.as_ptr(), waits, &params) }
                .result()
                .map_err(|e| failed(&format!("{} was not recorded", launch.kernel), e))?;
            if early {
                overlap(graph, before[0], node)?;
            }
            latest.push(node);
        }
        // SAFETY: the graph was made above.
        made.started = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) }
            .map_err(|e| failed("recorded launches are not accepted", e))?;
        Ok(made)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `of`, destroyed once. An error at the end changes nothing.
        unsafe {
            if !self.started.is_null() {
                let _ = result::graph::exec_destroy(self.started);
            }
            let _ = result::graph::destroy(self.graph);
        }
    }
}

// SAFETY: handles of CUDA's driver may be used from any thread that has made their context current, which every call
// of `Nvidia` does; a mutex is around them.
unsafe impl Send for Recordings {}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch() -> Noted {
        Noted {
            kernel: "bench",
            function: ptr::null_mut(),
            shape: Launch {
                grid: [1; 3],
                threads: 32,
                shared_bytes: 0,
            },
            beside: false,
            values: Vec::new(),
        }
    }

    #[test]
    fn a_thread_notes_its_own_launches() {
        let mut recordings = Recordings::default();
        recordings.noting.insert(thread::current().id(), Vec::new());
        assert!(recordings.note(launch()).is_none());
        thread::scope(|scope| {
            let other = scope.spawn(|| !recordings.is_noting() && recordings.note(launch()).is_some());
            assert!(other.join().unwrap());
        });
        assert!(recordings.is_noting());
        assert_eq!(recordings.noting[&thread::current().id()].len(), 1);
    }
}
