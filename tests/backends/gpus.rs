//! The GPUs that checks run on: the CUDA kernels on the CPU, as written and perturbed under sanitizers, and an NVIDIA GPU.

use std::process::ExitCode;
use std::sync::Arc;

use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::compute::cuda::nvidia::Nvidia;
use libtest_mimic::{Arguments, Trial};

use super::emulated::{Emulated, perturbed_one_in};

/// What is checked on a GPU.
pub type Check = Box<dyn Fn(&dyn Driver) + Send>;

/// Runs the named checks on all of them; those of a GPU that is not there show as ignored, with the reason above the list.
pub fn run(checks: impl Fn() -> Vec<(String, Check)>) -> ExitCode {
    let mut trials = Vec::new();
    let emulated = Emulated::new(true).map(|driver| Arc::new(driver) as Arc<dyn Driver>);
    let perturbed = Emulated::perturbed(true).map(|driver| Arc::new(driver) as Arc<dyn Driver>);
    let real = Nvidia::open().and_then(|gpu| gpu.with_library(&|text| eprintln!("{text}")));
    let real = real.map(|driver| Arc::new(driver) as Arc<dyn Driver>);
    for (device, driver, one_in) in [
        ("emulated", emulated, 1),
        ("perturbed", perturbed, perturbed_one_in(8)),
        ("cuda", real.map_err(|e| e.to_string()), 1),
    ] {
        if let Err(reason) = &driver {
            eprintln!("{device}: ignored, {reason}");
        }
        for (name, check) in checks().into_iter().step_by(one_in) {
            let (missing, driver) = (driver.is_err(), driver.clone());
            let trial = Trial::test(format!("{device}::{name}"), move || {
                check(driver?.as_ref());
                Ok(())
            });
            trials.push(trial.with_ignored_flag(missing));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
