//! The model on the GPU, emulated and real, against the goldens of transformers and the CPU: one list of cases. A
//! device that is not there shows as ignored.

#[path = "../common/mod.rs"]
mod common;
#[path = "../backends/emulated.rs"]
mod emulated;
mod forward;
mod golden;
mod rounded;
mod session;

use std::process::ExitCode;
use std::sync::Arc;

use kvsmith::compute::cuda::driver::Driver;
use kvsmith::compute::cuda::nvidia::Nvidia;
use libtest_mimic::{Arguments, Trial};

/// A check of one case.
type Check = Box<dyn Fn(&dyn Driver) + Send>;

fn main() -> ExitCode {
    let mut trials = Vec::new();
    let emulated = emulated::Emulated::new(true).map(|driver| Arc::new(driver) as Arc<dyn Driver>);
    let real = Nvidia::open().map(|driver| Arc::new(driver) as Arc<dyn Driver>);
    for (device, driver) in [("emulated", emulated), ("cuda", real.map_err(|e| e.to_string()))] {
        if let Err(reason) = &driver {
            eprintln!("{device}: ignored, {reason}");
        }
        for (name, check) in forward::cases().into_iter().chain(session::cases()) {
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
