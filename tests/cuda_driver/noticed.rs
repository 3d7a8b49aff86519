//! What `gpu-check` notices: its cases on an emulation in which a block of one kernel's launches does nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::thread;

use kvsmith::internal::compute::cuda::watched::Watched;
use kvsmith::internal::cuda::check;

use super::checked::launched;
use super::common::root;
use super::emulated::{ENDED, Emulated};

/// Kernels that are tried by default, each with the beginning of a case that launches it.
const TRIED: [(&str, &str); 6] = [
    ("channel_mean", "statistics"),
    ("linear_bfloat", "150 x 200 inputs (rounded)"),
    ("attend_half_80", "a step over a choice of 2/8 heads x 80"),
    ("draw_of_rows", "3 rows of "),
    ("lfps_update", "lfps, 2/8 heads x 64"),
    ("silu_rows", "states of qwen2"),
];

/// Kernels of which the last block decides nothing: the counts of the last positions are not used, and there are blocks for
/// more rows than are listed. The first block is left out in its place.
const IDLE_AT_THE_END: [&str; 4] = ["count_taken", "count_union", "encode_listed", "lfps_count"];

/// Kernels that write indices. Those that a block leaves out point beyond a buffer, which may end the emulation.
const INDICES: [&str; 5] = [
    "begin_step",
    "largest_of_parts",
    "lfps_marks",
    "nearest_fast",
    "rank_centroids",
];

/// Kernels that may leave out a block unnoticed: results are the same with another scale.
const UNNOTICED: [&str; 1] = ["largest"];

/// Whether every kernel is tried.
fn tries_all() -> bool {
    std::env::var_os("KVSMITH_ALL_WRONG").is_some()
}

/// The kernels that are made wrong, one per test.
pub fn kernels() -> Vec<&'static str> {
    if tries_all() {
        launched().collect()
    } else {
        TRIED.map(|(kernel, _)| kernel).into()
    }
}

/// What became of a wrong kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Found {
    Noticed,
    Unnoticed,
    /// The emulation has ended.
    Ended,
}

/// The numbers of the cases that launch a kernel, those with the fewest kernels first.
fn launching(kernel: &str) -> Vec<usize> {
    static ALL: OnceLock<BTreeMap<&'static str, Vec<usize>>> = OnceLock::new();
    let all = || {
        let mut runs = Vec::new();
        for (at, case) in check::cases().iter().enumerate() {
            let watched = watched();
            let found = (case.check)(&watched).unwrap();
            assert!(found.failure.is_none(), "{}: {:?}", case.name, found.failure);
            let kernels = watched.take_launched();
            runs.push((kernels.len(), at, kernels));
        }
        runs.sort();
        let mut all: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
        for (_, at, kernels) in runs {
            kernels
                .into_iter()
                .for_each(|kernel| all.entry(kernel).or_default().push(at));
        }
        all
    };
    if tries_all() {
        return ALL.get_or_init(all)[kernel].clone();
    }
    let (_, beginning) = TRIED.iter().find(|(tried, _)| *tried == kernel).unwrap();
    let cases = check::cases().into_iter().enumerate();
    let numbers: Vec<usize> = cases
        .filter_map(|(at, case)| case.name.starts_with(beginning).then_some(at))
        .collect();
    assert!(!numbers.is_empty(), "no case begins with {beginning}");
    numbers
}

fn watched() -> Watched {
    Watched::new(Arc::new(Emulated::new(true).unwrap()))
}

/// Runs cases with a wrong kernel until one fails. A thread of its own has an emulation of its own.
fn attempt(kernel: &'static str, first: bool, numbers: &[usize]) -> Found {
    let run = || {
        Emulated::new(true).unwrap().break_kernel(kernel, first).unwrap();
        let cases = check::cases();
        for at in numbers {
            match (cases[*at].check)(&watched()) {
                Ok(found) if found.failure.is_none() => {}
                Err(error) if error.to_string().contains(ENDED) => return Found::Ended,
                Ok(_) | Err(_) => return Found::Noticed,
            }
        }
        Found::Unnoticed
    };
    thread::scope(|scope| scope.spawn(run).join().expect("cases do not panic"))
}

/// A case fails if a kernel leaves out a block, or docs/dev/gpu.md says otherwise.
pub fn check(kernel: &'static str) {
    let numbers = launching(kernel);
    let last = attempt(kernel, false, &numbers);
    if INDICES.contains(&kernel) {
        return assert_ne!(last, Found::Unnoticed, "{kernel} without its last block");
    }
    let (is_idle, is_missed) = (IDLE_AT_THE_END.contains(&kernel), UNNOTICED.contains(&kernel));
    let expected = |is_noticed: bool| {
        if is_noticed {
            Found::Noticed
        } else {
            Found::Unnoticed
        }
    };
    assert_eq!(
        last,
        expected(!is_idle && !is_missed),
        "{kernel} without its last block"
    );
    if is_idle || is_missed {
        let first = attempt(kernel, true, &numbers);
        assert_eq!(first, expected(is_idle), "{kernel} without its first block");
    }
}

/// docs/dev/gpu.md lists what is not noticed, and how the others are tried.
pub fn is_documented() {
    let page = std::fs::read_to_string(root().join("docs/dev/gpu.md")).unwrap();
    let text = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let count = format!("each of the {} kernels", launched().count());
    assert!(text.contains(&count), "docs/dev/gpu.md: {count}");
    for (names, words) in [
        (&UNNOTICED[..], "notices every one but"),
        (&IDLE_AT_THE_END, "the first block is left out of"),
        (&INDICES, "the indices that are written by"),
    ] {
        let listed: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let sentence = format!("{words} {}", listed.join(", "));
        assert!(text.contains(&sentence), "docs/dev/gpu.md: {sentence}");
    }
}
