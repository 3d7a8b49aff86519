//! The kernels of `kernels/`: compiled by `build.rs` where there was an nvcc, and their sources.

include!(concat!(env!("OUT_DIR"), "/kernel_image.rs"));

/// Every kernel.
pub const NAMES: [&str; 27] = [
    "add_runs",
    "centroid_biases",
    "channel_mean",
    "channel_ranked",
    "count_codes",
    "distance_sums",
    "draw",
    "fixed_sums",
    "gather_rows",
    "halve_centroids",
    "halve_rows",
    "hand_over",
    "inertia",
    "largest",
    "move_centroids",
    "nearest_fast",
    "nearest_listed",
    "place_centroids",
    "second_moment",
    "settle",
    "sign_sums",
    "square_sums",
    "start_rows",
    "subtract",
    "sum_rows",
    "take_over",
    "whiten",
];

/// The files of the module, by the name in their `#include`.
const FILES: [(&str, &str); 10] = [
    ("common.h", include_str!("../../../kernels/common.h")),
    ("assignment.cu", include_str!("../../../kernels/assignment.cu")),
    (
        "channel_statistic.cu",
        include_str!("../../../kernels/channel_statistic.cu"),
    ),
    ("draw.cu", include_str!("../../../kernels/draw.cu")),
    ("means.cu", include_str!("../../../kernels/means.cu")),
    ("nearest.cu", include_str!("../../../kernels/nearest.cu")),
    (
        "nearest_fast.cu",
        include_str!("../../../kernels/nearest_fast.cu"),
    ),
    (
        "second_moment.cu",
        include_str!("../../../kernels/second_moment.cu"),
    ),
    ("sign_sums.cu", include_str!("../../../kernels/sign_sums.cu")),
    ("whiten.cu", include_str!("../../../kernels/whiten.cu")),
];

/// What was compiled when this program was built: machine code for compute capability 8.0 and 9.0, and PTX
/// for later ones.
pub fn image() -> Option<&'static [u8]> {
    IMAGE
}

/// All kernels as one source without `#include`s of ours.
pub fn source() -> String {
    let ours = |line: &&str| !line.starts_with("#include \"") && !line.starts_with("#pragma once");
    let mut out = String::new();
    for line in FILES.iter().flat_map(|(_, text)| text.lines().filter(ours)) {
        out.push_str(line);
        out.push('\n');
    }
    out
}
