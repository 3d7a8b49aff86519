//! Decode steps on the GPU, emulated and real, against f64 references and the CPU's own selection: one list of
//! cases. A device that is not there shows as ignored.

mod a2ats;
mod attend;
mod ctkvr;
#[path = "../backends/emulated.rs"]
mod emulated;
mod encode;
mod lfps;
mod linear;
mod packed;
mod prefill;
mod prompt;
mod sample;
mod signs;
mod simple;
mod topk;

use std::process::ExitCode;
use std::sync::Arc;

use kvsmith::compute::cuda::driver::Driver;
use kvsmith::compute::cuda::nvidia::Nvidia;
use libtest_mimic::{Arguments, Trial};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

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
        let mut add = |name: String, check: Check| {
            let missing = driver.is_err();
            let driver = driver.clone();
            let trial = Trial::test(format!("{device}::{name}"), move || {
                check(driver?.as_ref());
                Ok(())
            });
            trials.push(trial.with_ignored_flag(missing));
        };
        for case in attend::cases() {
            add(
                format!("attend::{}", case.name),
                Box::new(move |driver| attend::check(driver, &case)),
            );
        }
        for case in linear::cases() {
            add(
                format!("linear::{}", case.name),
                Box::new(move |driver| linear::check(driver, &case)),
            );
        }
        add("linear::together".to_owned(), Box::new(linear::check_together));
        add("linear::refused".to_owned(), Box::new(linear::check_refused));
        for case in sample::cases() {
            add(
                format!("sample::{}", case.name),
                Box::new(move |driver| sample::check(driver, &case)),
            );
        }
        for case in prefill::cases() {
            add(
                format!("prefill::{}", case.name),
                Box::new(move |driver| prefill::check(driver, &case)),
            );
        }
        add("prefill::refused".to_owned(), Box::new(prefill::check_refused));
        for case in a2ats::cases() {
            add(
                format!("a2ats::{}", case.name),
                Box::new(move |driver| a2ats::check(driver, &case)),
            );
        }
        for case in encode::cases() {
            add(
                format!("encode::{}", case.name),
                Box::new(move |driver| encode::check(driver, &case)),
            );
        }
        for case in lfps::cases() {
            add(
                format!("lfps::{}", case.name),
                Box::new(move |driver| lfps::check(driver, &case)),
            );
        }
        for case in signs::cases() {
            add(
                format!("selfindex::{}", case.name),
                Box::new(move |driver| signs::check(driver, &case)),
            );
        }
        for case in topk::cases() {
            add(
                format!("topk::{}", case.name),
                Box::new(move |driver| topk::check(driver, &case)),
            );
        }
        for case in ctkvr::cases() {
            add(
                format!("ctkvr::{}", case.name),
                Box::new(move |driver| ctkvr::check(driver, &case)),
            );
        }
        for case in simple::cases() {
            add(
                format!("simple::{}", case.name),
                Box::new(move |driver| simple::check(driver, &case)),
            );
        }
        for case in prompt::cases() {
            add(
                format!("prompt::{}", case.name),
                Box::new(move |driver| prompt::check(driver, &case)),
            );
        }
        for case in packed::cases() {
            add(
                format!("attend_packed::{}", case.name),
                Box::new(move |driver| packed::check(driver, &case)),
            );
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Close to a standard normal.
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..12).map(|_| rng.r#gen::<f32>()).sum::<f32>() - 6.0
}

fn normals(rng: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| normal(rng)).collect()
}
