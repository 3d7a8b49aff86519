//! The CUDA kernels on the CPU: `kernels/emulate.cpp`, built by g++, behind the host code of the CUDA device.
//!
//! There are two builds: the kernels as written, and a stricter one with the sanitizers for addresses and undefined
//! behaviour, which takes twice the time and also does what else a GPU may do.
//!
//! The emulation is a program of its own, which is told what to do through its stdin: the sanitizers want a
//! process for themselves, and a kernel that goes wrong ends that process alone.

use std::cell::RefCell;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvsmith::internal::compute::cuda::driver::{Address, Arg, Driver, Launch};
use kvsmith::internal::compute::cuda::kernels;
use kvsmith::internal::error::{Error, Result};

use super::common::{kept, root};

/// See [`Driver`]. Each thread has a process of its own; what is allocated stays with the thread.
pub struct Emulated {
    program: PathBuf,
    tensor_cores: bool,
}

thread_local! {
    static PROCESS: RefCell<Process> = const { RefCell::new(Process { pipes: None, live: 0 }) };
    static NOTES: RefCell<Notes> = const { RefCell::new(Notes { noting: None, noted: Vec::new() }) };
}

/// What is said of a faulty kernel, which ends the process.
pub const ENDED: &str = "the emulated GPU has ended, see above";

type Noted = (&'static str, Launch, Vec<Arg>);

/// Launches that are noted, and that were.
struct Notes {
    noting: Option<Vec<Noted>>,
    noted: Vec<Vec<Noted>>,
}

struct Process {
    pipes: Option<(Child, BufWriter<ChildStdin>, BufReader<ChildStdout>)>,
    /// Allocations that have not been given back. While there are some a process that ended is not
    /// replaced: their addresses mean nothing to another.
    live: usize,
}

impl Emulated {
    /// Builds the emulation, if that was not done before.
    ///
    /// # Errors
    /// Why there is none.
    pub fn new(tensor_cores: bool) -> std::result::Result<Self, String> {
        Self::with_program(build(&[])?, tensor_cores)
    }

    /// The same with sanitizers and with what else a GPU may do: fused multiply-adds, other rounding of exponentials,
    /// blocks in any order, fragments of all tensor-core products passed between lanes.
    ///
    /// # Errors
    /// Why there is none.
    #[allow(dead_code)]
    pub fn perturbed(tensor_cores: bool) -> std::result::Result<Self, String> {
        let mut flags = vec![
            "-ffp-contract=fast",
            "-DKVSMITH_PERTURB",
            "-fsanitize=address,undefined",
            // What is left of these the former finds, and they double the time.
            "-fno-sanitize=null,object-size,vptr",
            "-fno-sanitize-recover",
        ];
        // Other processors fuse products into sums without being asked for their instructions.
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("fma") {
            flags.push("-mfma");
        }
        Self::with_program(build(&flags)?, tensor_cores)
    }

    fn with_program(program: PathBuf, tensor_cores: bool) -> std::result::Result<Self, String> {
        let emulated = Self {
            program,
            tensor_cores,
        };
        let compiled = emulated.kernels().map_err(|e| e.to_string())?;
        assert_eq!(
            compiled,
            declared(),
            "kernels as they are compiled, and as build.rs read them"
        );
        Ok(emulated)
    }

    /// Every kernel that was compiled, as [`declared`] has it.
    fn kernels(&self) -> Result<String> {
        self.ask(&[kind('k')], &[], |from| {
            let mut text = vec![0; number(from)? as usize];
            from.read_exact(&mut text)?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        })
    }

    /// Makes a kernel wrong for this thread: from now on, the first or the last block of its launches does nothing.
    ///
    /// # Errors
    /// The emulation has ended.
    #[allow(dead_code)]
    pub fn break_kernel(&self, kernel: &str, first: bool) -> Result<()> {
        let bytes = [kernel.as_bytes(), &u64::from(first).to_le_bytes()].concat();
        self.ask(&[kind('b'), kernel.len() as u64], &bytes, number)?;
        Ok(())
    }

    /// Sends a request; `answer` reads the reply.
    fn ask<T>(
        &self,
        request: &[u64],
        bytes: &[u8],
        answer: impl FnOnce(&mut dyn Read) -> std::io::Result<T>,
    ) -> Result<T> {
        PROCESS.with_borrow_mut(|process| {
            if process.pipes.is_none() && process.live == 0 {
                process.pipes = Some(start(&self.program));
            }
            let ended = || Error::internal(ENDED);
            let (child, to, from) = process.pipes.as_mut().ok_or_else(ended)?;
            let talk = || {
                request.iter().try_for_each(|v| to.write_all(&v.to_le_bytes()))?;
                to.write_all(bytes)?;
                to.flush()?;
                answer(from)
            };
            let result = talk();
            if result.is_err() {
                child.kill().ok();
                child.wait().ok();
                process.pipes = None;
            }
            result.map_err(|_| ended())
        })
    }
}

/// Every kernel of the table, in the order of their names: threads, dynamic shared memory and bytes of each argument.
fn declared() -> String {
    let mut lines: Vec<String> = kernels::ALL
        .iter()
        .map(|kernel| {
            let numbers = [kernel.threads as usize, kernel.shared_bytes].into_iter();
            let numbers = numbers.chain(kernel.argument_bytes.iter().copied());
            let numbers: String = numbers.map(|n| format!(" {n}")).collect();
            format!("{}{numbers}\n", kernel.name)
        })
        .collect();
    lines.sort();
    lines.concat()
}

/// One character as a request.
fn kind(c: char) -> u64 {
    c as u64
}

fn number(from: &mut dyn Read) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

impl Driver for Emulated {
    fn adapter(&self) -> String {
        "emulated".to_owned()
    }

    fn shared_bytes(&self) -> usize {
        227 << 10
    }

    fn searches_on_tensor_cores(&self) -> bool {
        self.tensor_cores
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(1 << 30)
    }

    fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        if bytes > 1 << 30 {
            return Ok(None);
        }
        let address = self.ask(&[kind('a'), bytes as u64], &[], number)?;
        PROCESS.with_borrow_mut(|process| process.live += 1);
        Ok(Some(address))
    }

    fn free(&self, address: Address) {
        // Of a process that has ended nothing is left to be freed.
        let _ = self.ask(&[kind('f'), address], &[], number);
        PROCESS.with_borrow_mut(|process| process.live -= 1);
    }

    fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        not_while_recording()?;
        self.ask(&[kind('w'), to, bytes.len() as u64], bytes, number)?;
        Ok(())
    }

    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        not_while_recording()?;
        let request = [kind('r'), from, bytes.len() as u64];
        self.ask(&request, &[], |reply| reply.read_exact(bytes))
    }

    fn zero(&self, at: Address, bytes: usize) -> Result<()> {
        not_while_recording()?;
        self.ask(&[kind('s'), at, 0, bytes as u64], &[], number)?;
        Ok(())
    }

    fn multiprocessors(&self) -> usize {
        4
    }

    fn blocks_at_once(&self, kernel: &'static kernels::Kernel, _: usize) -> Result<usize> {
        Ok(self.multiprocessors() * kernel.blocks as usize)
    }

    fn record(&self) -> Result<bool> {
        NOTES.with_borrow_mut(|notes| notes.noting = Some(Vec::new()));
        Ok(true)
    }

    fn recorded(&self) -> Result<u64> {
        NOTES.with_borrow_mut(|notes| {
            let noted = notes.noting.take();
            notes
                .noted
                .push(noted.ok_or_else(|| Error::internal("nothing was recorded"))?);
            Ok(notes.noted.len() as u64 - 1)
        })
    }

    fn replay(&self, recording: u64) -> Result<()> {
        let noted = NOTES.with_borrow(|notes| notes.noted[recording as usize].clone());
        noted
            .iter()
            // SAFETY: the emulation compares the arguments with what it compiled.
            .try_for_each(|(kernel, shape, args)| unsafe { self.launch(kernel, *shape, args) })
    }

    unsafe fn launch(&self, kernel: &'static str, shape: Launch, args: &[Arg]) -> Result<()> {
        let is_noted = NOTES.with_borrow_mut(|notes| {
            let noting = notes.noting.as_mut();
            noting
                .map(|launches| launches.push((kernel, shape, args.to_vec())))
                .is_some()
        });
        if is_noted {
            return Ok(());
        }
        // The name comes between two runs of numbers; so all of this goes as bytes.
        let mut bytes = kernel.as_bytes().to_vec();
        let numbers = shape.grid.map(u64::from).into_iter();
        let block = [
            u64::from(shape.threads),
            shape.shared_bytes as u64,
            args.len() as u64,
        ];
        let numbers = numbers.chain(block);
        let numbers = numbers.chain(args.iter().flat_map(|arg| [arg.bytes as u64, arg.value]));
        bytes.extend(numbers.flat_map(u64::to_le_bytes));
        self.ask(&[kind('l'), kernel.len() as u64], &bytes, number)?;
        Ok(())
    }
}

/// Copies run at once, launches that are recorded later.
fn not_while_recording() -> Result<()> {
    if NOTES.with_borrow(|notes| notes.noting.is_some()) {
        Err(Error::internal("a copy while launches are recorded"))
    } else {
        Ok(())
    }
}

/// Of this many cases one runs perturbed: all of them if KVSMITH_ALL_PERTURBED is set, as before a change lands.
#[allow(dead_code)]
pub fn perturbed_one_in(usual: usize) -> usize {
    match std::env::var_os("KVSMITH_ALL_PERTURBED") {
        Some(_) => 1,
        None => usual,
    }
}

fn start(program: &Path) -> (Child, BufWriter<ChildStdin>, BufReader<ChildStdout>) {
    let mut child = Command::new(program)
        .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
        .env("UBSAN_OPTIONS", "print_stacktrace=1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the emulation starts");
    let to = BufWriter::new(child.stdin.take().expect("a pipe"));
    let from = BufReader::new(child.stdout.take().expect("a pipe"));
    (child, to, from)
}

/// The program, named after what it is made of.
fn build(more: &[&str]) -> std::result::Result<PathBuf, String> {
    const FLAGS: [&str; 9] = [
        "-std=c++20",
        "-O2",
        "-g1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-ffp-contract=off",
        "-DKVSMITH_EMULATE",
    ];
    // Where the tests run without the sources there is none.
    let kernels = root().join("kernels");
    let mut files: Vec<PathBuf> = kernels
        .read_dir()
        .map_err(|e| e.to_string())?
        .map_while(|entry| Some(entry.ok()?.path()))
        .collect();
    files.sort();
    let sources: Vec<Vec<u8>> = files
        .iter()
        .map(std::fs::read)
        .collect::<std::io::Result<_>>()
        .map_err(|e| e.to_string())?;
    kept("emulate", (FLAGS, more, sources), |program| {
        let output = Command::new("g++")
            .args(FLAGS)
            .args(more)
            .arg(kernels.join("emulate.cpp"))
            .arg("-o")
            .arg(program)
            .output()
            .map_err(|e| format!("g++ does not run ({e}); on Debian or Ubuntu: apt-get install g++"))?;
        assert!(
            output.status.success(),
            "the kernels do not compile:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    })
}
