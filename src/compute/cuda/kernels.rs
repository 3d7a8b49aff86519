//! The kernels of `kernels/`: compiled by `build.rs` where there was an nvcc, and their sources.

include!(concat!(env!("OUT_DIR"), "/kernel_images.rs"));

/// Most codewords of a KV head: those listed stay in shared memory.
pub const MOST_CODEWORDS: usize = 12_288;
/// Kernels whose blocks have more dynamic shared memory than 48 KiB, and the most that they have.
pub const LARGE_BLOCKS: &[(&str, usize)] = &[
    ("attend_half_64", shared::attend(64)),
    ("attend_half_80", shared::attend(80)),
    ("attend_half_96", shared::attend(96)),
    ("attend_half_128", shared::attend(128)),
    ("attend_bfloat_64", shared::attend(64)),
    ("attend_bfloat_80", shared::attend(80)),
    ("attend_bfloat_96", shared::attend(96)),
    ("attend_bfloat_128", shared::attend(128)),
    ("attend_packed_64", shared::attend(64)),
    ("attend_packed_80", shared::attend(80)),
    ("attend_packed_96", shared::attend(96)),
    ("attend_packed_128", shared::attend(128)),
    ("linear_bfloat", super::linear::SHARED_BYTES),
    ("linear_half", super::linear::SHARED_BYTES),
    ("prefill_bfloat_64", shared::prefill(64)),
    ("prefill_bfloat_80", shared::prefill(80)),
    ("prefill_bfloat_96", shared::prefill(96)),
    ("prefill_bfloat_128", shared::prefill(128)),
    ("prefill_float", shared::prefill_float(128)),
    ("prefill_half_64", shared::prefill(64)),
    ("prefill_half_80", shared::prefill(80)),
    ("prefill_half_96", shared::prefill(96)),
    ("prefill_half_128", shared::prefill(128)),
    ("nearest_codewords", super::clusters::search_bytes(128)),
    ("rank_codewords", 8 * MOST_CODEWORDS),
];

/// Every kernel.
pub const NAMES: &[&str] = &[
    "add_biases",
    "add_runs",
    "advance_ring",
    "append_rows",
    "append_signs",
    "attend_bfloat_128",
    "attend_bfloat_64",
    "attend_bfloat_80",
    "attend_bfloat_96",
    "attend_float",
    "attend_half_128",
    "attend_half_64",
    "attend_half_80",
    "attend_half_96",
    "attend_packed_128",
    "attend_packed_64",
    "attend_packed_80",
    "attend_packed_96",
    "begin_step",
    "centroid_biases",
    "channel_mean",
    "channel_ranked",
    "clear_rows",
    "codeword_scores",
    "count_best",
    "count_candidates",
    "count_codes",
    "count_taken",
    "count_union",
    "distance_sums",
    "draw",
    "draw_of_rows",
    "embed_rows",
    "encode_last",
    "encode_listed",
    "fill_random",
    "fixed_sums",
    "gather_rows",
    "halve_centroids",
    "halve_rows",
    "hand_over",
    "inertia",
    "join_outputs",
    "join_rest",
    "keep_full",
    "keep_lists",
    "largest",
    "largest_of_rows",
    "lfps_attended",
    "lfps_begin",
    "lfps_count",
    "lfps_entries",
    "lfps_limit",
    "lfps_list",
    "lfps_marks",
    "lfps_moments",
    "lfps_sort",
    "lfps_sums",
    "lfps_tally",
    "lfps_thresholds",
    "lfps_update",
    "linear_bfloat",
    "linear_few_bfloat",
    "linear_few_float",
    "linear_few_half",
    "linear_float_bfloat",
    "linear_float_float",
    "linear_float_half",
    "linear_half",
    "list_best",
    "list_recent",
    "list_taken",
    "list_union",
    "map_rows",
    "mark_union",
    "merge_parts",
    "move_centroids",
    "name_items",
    "narrow_keys",
    "narrow_rows",
    "nearest_codewords",
    "nearest_fast",
    "nearest_listed",
    "note_not_finite",
    "pack_rows",
    "pad_rows",
    "place_centroids",
    "prefill_bfloat_128",
    "prefill_bfloat_64",
    "prefill_bfloat_80",
    "prefill_bfloat_96",
    "prefill_float",
    "prefill_half_128",
    "prefill_half_64",
    "prefill_half_80",
    "prefill_half_96",
    "push_centroid",
    "query_keys",
    "rank_centroids",
    "rank_codewords",
    "read_all",
    "recall_centroids",
    "rms_rows",
    "round_rows",
    "second_moment",
    "settle",
    "settle_codes",
    "sign_centroids",
    "sign_keys",
    "sign_sums",
    "sign_tables",
    "silu_rows",
    "split_heads",
    "square_sums",
    "start_rows",
    "store_channels",
    "subtract",
    "sum_rows",
    "take_codewords",
    "take_over",
    "take_queries",
    "tally_rows",
    "topk_scores",
    "weight_keys",
    "whiten",
    "whiten_keys",
    "whiten_last",
    "widen_rows",
];

/// The files of the module, by the name in their `#include`.
const FILES: &[(&str, &str)] = &[
    ("common.h", include_str!("../../../kernels/common.h")),
    ("tensor.h", include_str!("../../../kernels/tensor.h")),
    ("attend.h", include_str!("../../../kernels/attend.h")),
    ("scan.h", include_str!("../../../kernels/scan.h")),
    ("assignment.cu", include_str!("../../../kernels/assignment.cu")),
    ("attend.cu", include_str!("../../../kernels/attend.cu")),
    (
        "attend_float.cu",
        include_str!("../../../kernels/attend_float.cu"),
    ),
    (
        "attend_packed.cu",
        include_str!("../../../kernels/attend_packed.cu"),
    ),
    ("bench.cu", include_str!("../../../kernels/bench.cu")),
    ("best.cu", include_str!("../../../kernels/best.cu")),
    (
        "channel_statistic.cu",
        include_str!("../../../kernels/channel_statistic.cu"),
    ),
    ("decode_step.cu", include_str!("../../../kernels/decode_step.cu")),
    ("draw.cu", include_str!("../../../kernels/draw.cu")),
    ("layer.cu", include_str!("../../../kernels/layer.cu")),
    ("linear.cu", include_str!("../../../kernels/linear.cu")),
    ("means.cu", include_str!("../../../kernels/means.cu")),
    ("nearest.cu", include_str!("../../../kernels/nearest.cu")),
    (
        "nearest_fast.cu",
        include_str!("../../../kernels/nearest_fast.cu"),
    ),
    ("pack_rows.cu", include_str!("../../../kernels/pack_rows.cu")),
    ("prefill.cu", include_str!("../../../kernels/prefill.cu")),
    ("prompt.cu", include_str!("../../../kernels/prompt.cu")),
    ("sample.cu", include_str!("../../../kernels/sample.cu")),
    (
        "second_moment.cu",
        include_str!("../../../kernels/second_moment.cu"),
    ),
    (
        "select_a2ats.cu",
        include_str!("../../../kernels/select_a2ats.cu"),
    ),
    (
        "select_a2ats_prompt.cu",
        include_str!("../../../kernels/select_a2ats_prompt.cu"),
    ),
    (
        "select_ctkvr.cu",
        include_str!("../../../kernels/select_ctkvr.cu"),
    ),
    ("select_lfps.cu", include_str!("../../../kernels/select_lfps.cu")),
    (
        "select_signs.cu",
        include_str!("../../../kernels/select_signs.cu"),
    ),
    ("select_topk.cu", include_str!("../../../kernels/select_topk.cu")),
    ("sign_sums.cu", include_str!("../../../kernels/sign_sums.cu")),
    ("whiten.cu", include_str!("../../../kernels/whiten.cu")),
];

/// Whether kernels were compiled when this program was built.
pub fn are_built_in() -> bool {
    !IMAGES.is_empty()
}

/// What was compiled for a chip of this compute capability: machine code for 8.0 and 9.0, which the later chips of
/// the same generation run too, and PTX for later generations.
pub fn image(capability: (i32, i32)) -> Option<&'static [u8]> {
    newest(IMAGES, capability)
}

/// The newest of `images` that is no newer than the chip, as 10 times major plus minor.
fn newest<'i>(images: &[(i32, &'i [u8])], (major, minor): (i32, i32)) -> Option<&'i [u8]> {
    let older = images.iter().filter(|(chip, _)| *chip <= 10 * major + minor);
    older.max_by_key(|(chip, _)| *chip).map(|(_, image)| *image)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chip_gets_the_newest_image_that_it_can_run() {
        let images: &[(i32, &[u8])] = &[(80, &[1]), (90, &[2])];
        let cases = [
            ((7, 5), None),
            ((8, 0), Some(1)),
            ((8, 9), Some(1)),
            ((9, 0), Some(2)),
            ((12, 1), Some(2)),
        ];
        for (capability, expected) in cases {
            let found = newest(images, capability).map(|image| image[0]);
            assert_eq!(found, expected, "{capability:?}");
        }
    }
}

/// Dynamic shared memory of a block, by the kernel's family and the channels of a row.
pub mod shared {
    /// Positions of a tile of `attend`.
    const TILE: usize = 64;

    /// Bytes for rows of 16 bits and `w` channels: two tiles of keys and of values, or the results of four warps.
    pub const fn attend(w: usize) -> usize {
        let (tiles, results) = (2 * 2 * TILE * (w + 8) * 2, 4 * 16 * 4 * (w + 2));
        if tiles > results { tiles } else { results }
    }

    /// Bytes for queries and two tiles of keys and of values, in rows of 16 bits and `w` channels.
    pub const fn prefill(w: usize) -> usize {
        (128 + 4 * 64) * (w + 8) * 2
    }

    /// Bytes for queries, a tile of keys or values, and weights, in rows of f32 and `w` channels.
    pub const fn prefill_float(w: usize) -> usize {
        (2 * 64 * (w + 4) + 64 * (64 + 4)) * 4
    }
}
