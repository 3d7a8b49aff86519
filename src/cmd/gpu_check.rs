//! `kvsmith gpu-check`: checks every kernel on this machine's NVIDIA GPU, after which `--device auto` uses it.

pub mod stamp;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::args::Global;
use super::{print, print_json};
use crate::cmd::flags::parse_count;
use crate::compute::DeviceKind;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::compute::cuda::nvidia::{Found, Nvidia};
use crate::cuda::check::{self, FailedCase, Report};
use crate::error::{Error, Result};
use crate::wording::duration;
use stamp::Stamp;

/// Arguments of `gpu-check`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Most seconds that the check may take; a GPU that takes longer has not passed
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = parse_count)]
    seconds: usize,
}

/// Runs `gpu-check`.
///
/// # Errors
/// There is no NVIDIA GPU: exit code 3. A case failed: exit code 1.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    if matches!(global.device, DeviceKind::Cpu | DeviceKind::Wgpu) {
        return Err(
            Error::device("`gpu-check` checks an NVIDIA GPU").hint("remove --device, or use --device cuda")
        );
    }
    let start = Instant::now();
    let found = Found::first()?;
    // Begun before the work, so that a folder that cannot be written is known at once.
    let file = stamp::create(&found)?;
    let log = global.log();
    let gpu = Arc::new(Nvidia::open()?.with_library(&|text| log.detail(text))?);
    let stamp = Stamp::new(&found, gpu.described());
    log.note(&format!("device: cuda ({})", stamp.adapter));
    let report = check::run(gpu, Duration::from_secs(args.seconds as u64))?;
    let path = file.path().display().to_string();
    match &report.failure {
        None => stamp.write(file)?,
        Some(_) => stamp::remove(&found)?,
    }
    let seconds = start.elapsed().as_secs_f64();
    if global.json {
        print_json(global, &document(&report, &stamp, &path, seconds))?
    } else {
        print(&table(&report, seconds))?
    }
    match &report.failure {
        None => {
            log.note("--device auto uses this GPU from now on");
            Ok(())
        }
        Some(failed) => Err(refusal(failed)),
    }
}

fn refusal(failed: &FailedCase) -> Error {
    let FailedCase {
        area,
        case,
        kernels,
        failure,
    } = failed;
    let names: Vec<&str> = kernels.iter().copied().collect();
    let bound = failure
        .bound
        .map_or(String::new(), |bound| format!(" with a bound of {bound:e}"));
    Error::internal(format!(
        "the GPU failed the check of {area}: {case}: {}: expected {}{bound}, found {}; kernels launched: {}",
        failure.what,
        failure.expected,
        failure.found,
        names.join(", ")
    ))
    .hint("use --device cpu, and please report this with the output of `kvsmith gpu-check --json`")
}

fn table(report: &Report, seconds: f64) -> String {
    let mut text = format!(
        "{:<10} {:>5} {:>9} {:>18} {:>8}\n",
        "area", "cases", "results", "largest difference", "time"
    );
    for area in &report.areas {
        let worst = format!("{:.2} of bound", area.worst);
        text += &format!(
            "{:<10} {:>5} {:>9} {worst:>18} {:>8}\n",
            area.name,
            area.cases,
            area.results,
            duration(area.seconds)
        );
    }
    let verdict = if report.failure.is_some() {
        "failed"
    } else {
        "passed"
    };
    text + &format!(
        "{verdict}: {} of {} kernels launched, {}\n",
        report.launched.len(),
        kernels::ALL.len(),
        duration(seconds)
    )
}

fn document(report: &Report, stamp: &Stamp, path: &str, seconds: f64) -> Value {
    let areas = report.areas.iter().map(|area| {
        json!({
            "name": area.name, "cases": area.cases, "results": area.results, "worst": area.worst,
            "seconds": area.seconds,
        })
    });
    let failure = report.failure.as_ref().map(|failed| {
        json!({
            "area": failed.area, "case": failed.case, "kernels": failed.kernels, "what": failed.failure.what,
            "expected": failed.failure.expected, "found": failed.failure.found, "bound": failed.failure.bound,
        })
    });
    json!({
        "device": "cuda", "adapter": stamp.adapter, "driver": stamp.driver, "program": stamp.program,
        "passed": failure.is_none(), "seconds": seconds, "areas": areas.collect::<Vec<_>>(),
        "kernels": report.launched, "all_kernels": kernels::ALL.len(), "failure": failure,
        "stamp": report.failure.is_none().then_some(path),
    })
}
