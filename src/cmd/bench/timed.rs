//! Which methods can be timed, and how: asked of the methods.

use crate::error::{Error, Result};
use crate::flags::DeviceFlag;
use crate::method::Ranking;
use crate::method::bench::Bench;
use crate::method::registry::{METHODS, MethodName};

/// Lists the methods that have a property.
pub fn methods(holds: impl Fn(&dyn Bench) -> bool) -> Vec<MethodName> {
    let named = METHODS.iter().filter(|m| m.bench().is_some_and(&holds));
    named.copied().collect()
}

/// Returns the name of the first method without a property.
pub fn without(methods: &[MethodName], holds: impl Fn(&dyn Bench) -> bool) -> Option<&'static str> {
    let other = methods.iter().find(|m| !m.bench().is_some_and(&holds));
    other.map(|m| m.as_str())
}

/// Joins names as in "a, b and c".
pub fn listed(methods: &[MethodName]) -> String {
    let names: Vec<&str> = methods.iter().map(|m| m.as_str()).collect();
    match names.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}

/// Tells whether one layer is timed on a GPU, and so on the CPU too.
fn on_cuda(bench: &dyn Bench) -> bool {
    bench.timed().layer_on_cuda
}

fn on_cpu_alone(bench: &dyn Bench) -> bool {
    bench.timed().layer_on_cpu && !on_cuda(bench)
}

fn has_plain_ranking(bench: &dyn Bench) -> bool {
    bench.has_plain_ranking()
}

/// Writes the help of `--methods`.
pub fn methods_help() -> String {
    let of = |method: &MethodName| match method.bench().is_some_and(Bench::retrieves) {
        true => method.as_str().to_owned(),
        false => format!("{} (attend alone)", method.as_str()),
    };
    let both: Vec<String> = methods(on_cuda).iter().map(of).collect();
    let more = listed(&methods(on_cpu_alone));
    format!("What to time: {}; on the CPU {more} too", both.join(", "))
}

/// Writes the help of `--ranking`.
pub fn ranking_help() -> String {
    let two = listed(&methods(has_plain_ranking));
    format!("How {two} look for the best positions on the CPU")
}

/// Checks that every method can be timed there and in that way.
pub fn check(asked: &[MethodName], ranking: Ranking, device: DeviceFlag) -> Result<()> {
    let is_cuda = device == DeviceFlag::Cuda;
    let supported = |bench: &dyn Bench| on_cuda(bench) || on_cpu_alone(bench) && !is_cuda;
    if let Some(name) = without(asked, supported) {
        let (both, more) = (methods(on_cuda), methods(on_cpu_alone));
        let hint = format!(
            "--methods takes {}; on the CPU {} too",
            listed(&both),
            listed(&more)
        );
        return Err(Error::usage(format!("`bench` does not time method `{name}`")).hint(hint));
    }
    if ranking == Ranking::Fast {
        return Ok(());
    }
    if let Some(name) = without(asked, has_plain_ranking) {
        let two: Vec<&str> = methods(has_plain_ranking).iter().map(|m| m.as_str()).collect();
        return Err(
            Error::usage(format!("`--ranking plain`: method `{name}` has one ranking"))
                .hint(format!("give --methods {} or both", two.join(", "))),
        );
    }
    match is_cuda {
        true => Err(Error::device("`--ranking plain` is for the CPU").hint("use --device cpu")),
        false => Ok(()),
    }
}
