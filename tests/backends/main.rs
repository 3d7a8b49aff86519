//! Every operation of the device seam on every device, against the f64 references: one list of cases.
//!
//! `cargo test --test backends` runs what this machine has; a device that is not there shows as ignored,
//! with the reason above the list. `KVSMITH_TIMING=1` times the cases instead:
//! `KVSMITH_TIMING=1 cargo test --release --test backends -- cpu::`.

mod cases;
mod checks;
#[path = "../common/mod.rs"]
mod common;
mod devices;
mod emulated;
mod fast;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use kvsmith::internal::compute::device::Device;
use libtest_mimic::{Arguments, Failed, Trial};

use cases::Case;

/// A check of one operation on one case.
type Check = fn(&dyn Device, &Case);

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    let timing = std::env::var_os("KVSMITH_TIMING").is_some();
    if timing {
        args.test_threads = Some(1);
    }
    let mut trials = Vec::new();
    for entry in devices::all() {
        if let Err(reason) = &entry.device {
            eprintln!("{}: ignored, {reason}", entry.name);
        }
        let cases = || cases::all(entry.slow).into_iter().step_by(entry.one_in);
        for case in cases().filter(|case| case.d <= entry.most_channels) {
            for (operation, check) in checks::ALL.iter().filter(|(name, _)| case.takes(name)) {
                let (device, case) = (entry.device.clone(), case.clone());
                let name = format!("{}::{operation}::{}", entry.name, case.name);
                let missing = device.is_err();
                let trial = Trial::test(name.clone(), move || {
                    let device = device.map_err(Failed::from)?;
                    let start = Instant::now();
                    check(device.as_ref(), &case);
                    if timing {
                        // The check's own work counts too: compare devices, not operations.
                        println!("{name} {:.4} s", start.elapsed().as_secs_f64());
                    }
                    Ok(())
                });
                trials.push(trial.with_ignored_flag(missing));
            }
        }
        if let (Ok(device), Some(plain)) = (entry.device, entry.plain) {
            trials.extend(fast_trials(entry.name, &device, &plain, cases().collect()));
        }
    }
    libtest_mimic::run(&args, trials).exit_code()
}

/// A device with its tensor cores against the same without.
fn fast_trials(
    name: &str,
    device: &Arc<dyn Device>,
    plain: &Arc<dyn Device>,
    cases: Vec<Case>,
) -> Vec<Trial> {
    let mut trials = Vec::new();
    for near in fast::ALL {
        let (device, plain) = (device.clone(), plain.clone());
        trials.push(Trial::test(
            format!("{name}::fast::{near:?}").to_lowercase(),
            move || {
                fast::check_near(device.as_ref(), plain.as_ref(), near);
                Ok(())
            },
        ));
    }
    for case in cases {
        let (device, plain) = (device.clone(), plain.clone());
        trials.push(Trial::test(format!("{name}::fast::{}", case.name), move || {
            fast::check(device.as_ref(), plain.as_ref(), &case.points(), &case.centroids());
            Ok(())
        }));
    }
    trials
}
