//! Compiles the kernels at run time, by NVRTC.

use std::ffi::{CString, c_char};

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys::{self, nvrtcProgram};

use super::super::kernels;
use crate::error::{Error, Result};

/// The first compute capability on which the blocks of a recorded kernel can take their places before the kernel before
/// it has ended; `wait_for_earlier` in kernels/common.h then waits for its end.
pub const OVERLAPPING: (i32, i32) = (9, 0);

/// Compiles all kernels to machine code for a chip of this compute capability.
///
/// # Errors
/// NVRTC is missing, or does not know the chip: exit code 3.
pub fn compile(capability: (i32, i32)) -> Result<Vec<u8>> {
    // SAFETY: looks for the library and closes it again.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::device(
            "CUDA: kvsmith was built without nvcc, and NVRTC (libnvrtc) is not available to compile the kernels",
        )
        .hint("build kvsmith with nvcc (`make cuda all` fetches one), install NVRTC, or use ⟨device=cpu⟩"));
    }
    let source = CString::new(kernels::SOURCE).map_err(|e| Error::device(e.to_string()))?;
    let program =
        result::create_program(&source, Some(c"kvsmith.cu")).map_err(|e| failed("does not start", e))?;
    let out = machine_code(program, capability);
    // SAFETY: created above, and not used afterwards. That it is gone either way is all that matters.
    let _ = unsafe { result::destroy_program(program) };
    out
}

fn machine_code(program: nvrtcProgram, capability: (i32, i32)) -> Result<Vec<u8>> {
    let (major, minor) = capability;
    let mut options = vec![
        format!("--gpu-architecture=sm_{major}{minor}"),
        "--std=c++17".to_owned(),
    ];
    if capability >= OVERLAPPING {
        options.push("--define-macro=KVSMITH_OVERLAP".to_owned());
    }
    // SAFETY: the program was created and not destroyed.
    if let Err(e) = unsafe { result::compile_program(program, &options) } {
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
        let log: Vec<u8> = log.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        let log = String::from_utf8_lossy(&log);
        return Err(failed(
            &format!("cannot compile the kernels for sm_{major}{minor}: {}", log.trim()),
            e,
        ));
    }
    let mut size = 0;
    // SAFETY: as above; writes a number to where the pointer points.
    unsafe { sys::nvrtcGetCUBINSize(program, &mut size) }
        .result()
        .map_err(|e| failed("has no machine code", e))?;
    // The driver reads the image as 64-bit words, so it is stored in whole words.
    let mut words = vec![0u64; size.div_ceil(8)];
    // SAFETY: the words have room for `size` bytes.
    unsafe { sys::nvrtcGetCUBIN(program, words.as_mut_ptr().cast::<c_char>()) }
        .result()
        .map_err(|e| failed("has no machine code", e))?;
    Ok(bytemuck::cast_slice(&words).to_vec())
}

fn failed(what: &str, e: NvrtcError) -> Error {
    Error::device(format!("CUDA: NVRTC {what} ({:?})", e.0))
        .hint("build kvsmith with nvcc (`make cuda all` fetches one), or use ⟨device=cpu⟩")
}
