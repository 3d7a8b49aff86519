//! Which methods can be timed, and how, as the methods themselves say.

use crate::cmd::args::Global;
use crate::cmd::parameters::flag_names;
pub(super) use crate::cmd::reading::listed;
use crate::compute::DeviceKind;
use crate::error::{Error, Result};
use crate::method::Ranking;
use crate::method::bench::{Bench, TimedOnCuda};
use crate::method::registry::{METHODS, MethodName};

/// Lists the methods that have a property.
pub fn methods(holds: impl Fn(&'static dyn Bench) -> bool) -> Vec<&'static str> {
    let named = METHODS.iter().filter(|m| m.bench().is_some_and(&holds));
    named.map(|m| m.as_str()).collect()
}

/// Returns the name of the first method without a property.
pub fn without(methods: &[MethodName], holds: impl Fn(&'static dyn Bench) -> bool) -> Option<&'static str> {
    let other = methods.iter().find(|m| !m.bench().is_some_and(&holds));
    other.map(|m| m.as_str())
}

/// Warns of flags that apply to methods that are not timed.
pub fn warn_of_unused(asked: &[MethodName], global: &Global) {
    for method in METHODS.iter().filter(|method| !asked.contains(method)) {
        let flags = method.bench().map(|bench| flag_names(&bench.parameters()));
        for flag in flags
            .unwrap_or_default()
            .iter()
            .filter(|flag| global.given.contains(flag))
        {
            let name = method.as_str();
            let warning = format!("--{flag} has no effect here: it applies to method {name} only");
            global.log().warn(&warning);
        }
    }
}

/// Tells whether one layer is timed on a GPU, and so on the CPU too.
fn on_cuda(bench: &dyn Bench) -> bool {
    bench.timed_on_cuda() == TimedOnCuda::LayerAndModel
}

/// Tells whether one layer is timed on the CPU, but not on a GPU.
fn on_cpu_alone(bench: &dyn Bench) -> bool {
    !on_cuda(bench)
}

/// Writes the help of `--methods`.
pub fn methods_help() -> String {
    let attend_alone = methods(|bench| on_cuda(bench) && !bench.retrieves());
    let of = |name: &&str| {
        if attend_alone.contains(name) {
            format!("{name} (`bench attend` only)")
        } else {
            (*name).to_owned()
        }
    };
    let both: Vec<String> = methods(on_cuda).iter().map(of).collect();
    let more = listed(&methods(on_cpu_alone));
    format!("Methods to time: {}; on the CPU also {more}", both.join(", "))
}

/// Writes the help of `--ranking`.
pub fn ranking_help() -> String {
    let two = listed(&methods(Bench::has_plain_ranking));
    format!("Algorithm with which {two} find the best positions on the CPU")
}

/// Checks that every method can be timed on the device and with the ranking asked for.
pub fn check(asked: &[MethodName], ranking: Ranking, device: DeviceKind) -> Result<()> {
    let is_cuda = device == DeviceKind::Cuda;
    let supported = |bench: &dyn Bench| on_cuda(bench) || on_cpu_alone(bench) && !is_cuda;
    if let Some(name) = without(asked, supported) {
        let (both, more) = (listed(&methods(on_cuda)), listed(&methods(on_cpu_alone)));
        return Err(Error::usage(format!("`bench` does not time method `{name}`"))
            .hint(format!("--methods accepts {both}; on the CPU also {more}")));
    }
    if ranking == Ranking::Fast {
        return Ok(());
    }
    if let Some(name) = without(asked, Bench::has_plain_ranking) {
        let two = methods(Bench::has_plain_ranking).join(", ");
        return Err(Error::usage(format!(
            "`--ranking plain`: method `{name}` has only one ranking algorithm"
        ))
        .hint(format!("use only the methods {two} with --ranking plain")));
    }
    if is_cuda {
        Err(Error::device("`--ranking plain` is available on the CPU only").hint("use --device cpu"))
    } else {
        Ok(())
    }
}
