//! The memory of the process: how much it may still take, keeping freed memory, and returning it to the system.

/// Allocations of at least this size get a mapping of their own, which goes back to the system when they are freed. Blocks of
/// text differ in length, so that the states of one may not fit where those of another were; the gaps stay small.
const OWN_MAPPING_BYTES: libc::c_int = 16 << 20;

/// Bytes of freed memory that a program holds on average, after [`keep_freed`].
pub const GAP_BYTES: usize = OWN_MAPPING_BYTES as usize / 2;

/// Makes the allocator keep freed memory for the next allocation, at the end of each thread's space up to 32 MiB, instead of
/// giving it back to the system; called at the start of the program.
///
/// A new page costs a fault, and is zeroed before it is filled. With glibc's initial sizes, a calibration spent a seventh of
/// its time on pages of arrays that live as long as one layer of a block. [`trim`] gives back what is between the
/// allocations in use.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the calls only set numbers in the allocator.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * OWN_MAPPING_BYTES);
    }
}

/// Returns the pages of all freed allocations to the system, including those of small allocations.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the allocator may be trimmed at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Returns the bytes that the process may still take: the free memory, or what is left of the limit of its control group or of
/// its address space if that is less; the largest number where the system does not tell.
pub fn free_bytes() -> usize {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the call only fills the struct.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    // An unlimited address space is reported as the largest number.
    let limit = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX);
    let free = proc_bytes("/proc/meminfo", "MemAvailable:").unwrap_or(usize::MAX);
    let group = group_bytes().unwrap_or(usize::MAX);
    // No allocation can be larger than this.
    free.min(limit).min(group).min(isize::MAX as usize)
}

/// Returns what is left of the memory limit of a container's control group (cgroup v2); `None` without one.
fn group_bytes() -> Option<usize> {
    let number = |name: &str| -> Option<usize> {
        let text = std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?;
        text.trim().parse().ok()
    };
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

/// Reads an amount of memory from a file of `/proc`, in bytes; `None` where the system does not tell.
pub fn proc_bytes(path: &str, label: &str) -> Option<usize> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    let kib: usize = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}
