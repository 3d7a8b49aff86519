// Generated from kernels/*.cu by `make launches`; do not edit.

//! The launches of the kernels: a module for each file of `kernels/`, with a struct of the arguments of each kernel.

mod assignment;
mod attend;
mod attend_packed;
mod attend_rows;
mod bench;
mod best;
mod channel_statistic;
mod decode_step;
mod draw;
mod encode_wpq;
mod int8;
mod layer;
mod linear;
mod means;
mod nearest;
mod nearest_fast;
mod pack_rows;
mod path_wpq;
mod prefill;
mod prompt;
mod rank_lfps;
mod refine_wpq;
mod sample;
mod second_moment;
mod select_a2ats;
mod select_a2ats_prompt;
mod select_ctkvr;
mod select_lfps;
mod select_signs;
mod select_topk;
mod select_wpq;
mod sign_sums;
mod static_scores;
mod whiten;

pub(crate) use assignment::*;
pub(crate) use attend::*;
pub(crate) use attend_packed::*;
pub(crate) use attend_rows::*;
pub(crate) use bench::*;
pub(crate) use best::*;
pub(crate) use channel_statistic::*;
pub(crate) use decode_step::*;
pub(crate) use draw::*;
pub(crate) use encode_wpq::*;
pub(crate) use int8::*;
pub(crate) use layer::*;
pub(crate) use linear::*;
pub(crate) use means::*;
pub(crate) use nearest::*;
pub(crate) use nearest_fast::*;
pub(crate) use pack_rows::*;
pub(crate) use path_wpq::*;
pub(crate) use prefill::*;
pub(crate) use prompt::*;
pub(crate) use rank_lfps::*;
pub(crate) use refine_wpq::*;
pub(crate) use sample::*;
pub(crate) use second_moment::*;
pub(crate) use select_a2ats::*;
pub(crate) use select_a2ats_prompt::*;
pub(crate) use select_ctkvr::*;
pub(crate) use select_lfps::*;
pub(crate) use select_signs::*;
pub(crate) use select_topk::*;
pub(crate) use select_wpq::*;
pub(crate) use sign_sums::*;
pub(crate) use static_scores::*;
pub(crate) use whiten::*;

use super::start::Kernel;

/// Every kernel, in the order of `kernels/kvsmith.cu`.
pub const ALL: &[Kernel] = &[
    assignment::INERTIA,
    assignment::COUNT_CODES,
    assignment::HAND_OVER,
    assignment::GATHER_ROWS,
    attend::ATTEND_HALF_64,
    attend::ATTEND_HALF_80,
    attend::ATTEND_HALF_96,
    attend::ATTEND_HALF_128,
    attend::ATTEND_BFLOAT_64,
    attend::ATTEND_BFLOAT_80,
    attend::ATTEND_BFLOAT_96,
    attend::ATTEND_BFLOAT_128,
    attend::MERGE_PARTS,
    attend::JOIN_REST,
    attend_packed::ATTEND_PACKED_64,
    attend_packed::ATTEND_PACKED_80,
    attend_packed::ATTEND_PACKED_96,
    attend_packed::ATTEND_PACKED_128,
    attend_rows::ATTEND_ROWS,
    bench::FILL_RANDOM,
    bench::READ_ALL,
    best::NARROW_KEYS,
    best::COUNT_BEST,
    best::LIST_BEST,
    channel_statistic::CHANNEL_MEAN,
    channel_statistic::CHANNEL_RANKED,
    channel_statistic::SUBTRACT,
    channel_statistic::SQUARE_SUMS,
    channel_statistic::LARGEST,
    decode_step::BEGIN_STEP,
    decode_step::APPEND_ROWS,
    decode_step::PAD_ROWS,
    decode_step::LIST_RECENT,
    draw::DISTANCE_SUMS,
    draw::DRAW,
    draw::PLACE_CENTROIDS,
    encode_wpq::ENCODE_KEYS_16,
    encode_wpq::ENCODE_KEYS_256,
    int8::APPEND_INT8,
    layer::EMBED_ROWS,
    layer::RMS_ROWS,
    layer::SPLIT_HEADS,
    layer::ADD_BIASES,
    layer::SILU_ROWS,
    layer::GATHER_HEADS,
    layer::SCATTER_HEADS,
    layer::NARROW_ROWS,
    layer::JOIN_OUTPUTS,
    layer::NOTE_NOT_FINITE,
    layer::TALLY_ROWS,
    linear::LINEAR_HALF,
    linear::LINEAR_BFLOAT,
    linear::ROUND_ROWS,
    linear::LINEAR_FLOAT_FLOAT,
    linear::LINEAR_FLOAT_HALF,
    linear::LINEAR_FLOAT_BFLOAT,
    linear::LINEAR_FEW_FLOAT,
    linear::LINEAR_FEW_HALF,
    linear::LINEAR_FEW_BFLOAT,
    means::SUM_ROWS,
    means::MOVE_CENTROIDS,
    nearest::CENTROID_BIASES,
    nearest::NEAREST_LISTED,
    nearest::SETTLE,
    nearest::START_ROWS,
    nearest::TAKE_OVER,
    nearest_fast::HALVE_ROWS,
    nearest_fast::HALVE_CENTROIDS,
    nearest_fast::NEAREST_FAST,
    pack_rows::PACK_ROWS,
    path_wpq::PATH_SCORES,
    prefill::PREFILL_HALF_64,
    prefill::PREFILL_HALF_80,
    prefill::PREFILL_HALF_96,
    prefill::PREFILL_HALF_128,
    prefill::PREFILL_BFLOAT_64,
    prefill::PREFILL_BFLOAT_80,
    prefill::PREFILL_BFLOAT_96,
    prefill::PREFILL_BFLOAT_128,
    prefill::PREFILL_NARROW_HALF_128,
    prefill::PREFILL_NARROW_BFLOAT_128,
    prefill::PREFILL_FLOAT,
    prompt::WIDEN_ROWS,
    prompt::STORE_CHANNELS,
    prompt::QUERY_KEYS,
    prompt::CLEAR_ROWS,
    prompt::SIGN_CENTROIDS,
    prompt::KEEP_FULL,
    rank_lfps::LFPS_ENTRIES,
    rank_lfps::LFPS_SORT,
    rank_lfps::LFPS_LIMIT,
    rank_lfps::LFPS_COUNT,
    rank_lfps::LFPS_LIST,
    refine_wpq::REFINED_PARTS_16,
    refine_wpq::REFINED_PARTS_256,
    refine_wpq::REFINED_KEYS,
    sample::LARGEST_OF_PARTS,
    sample::LARGEST_OF_ROWS,
    sample::DRAW_MASSES,
    sample::DRAW_OF_ROWS,
    second_moment::SECOND_MOMENT,
    second_moment::ADD_RUNS,
    select_a2ats::MAP_ROWS,
    select_a2ats::COUNT_CANDIDATES,
    select_a2ats::CODEWORD_SCORES,
    select_a2ats::RANK_CODEWORDS,
    select_a2ats::TAKE_CODEWORDS,
    select_a2ats::COUNT_TAKEN,
    select_a2ats::LIST_TAKEN,
    select_a2ats::ENCODE_LAST,
    select_a2ats_prompt::WHITEN_LAST,
    select_a2ats_prompt::WHITEN_KEYS,
    select_a2ats_prompt::NEAREST_CODEWORDS,
    select_a2ats_prompt::SETTLE_CODES,
    select_a2ats_prompt::ENCODE_LISTED,
    select_ctkvr::RECALL_CENTROIDS,
    select_ctkvr::RANK_CENTROIDS,
    select_ctkvr::MARK_UNION,
    select_ctkvr::COUNT_UNION,
    select_ctkvr::LIST_UNION,
    select_ctkvr::NAME_ITEMS,
    select_ctkvr::PUSH_CENTROID,
    select_ctkvr::ADVANCE_RING,
    select_ctkvr::TAKE_QUERIES,
    select_ctkvr::KEEP_LISTS,
    select_lfps::LFPS_BEGIN,
    select_lfps::LFPS_SUMS,
    select_lfps::LFPS_MOMENTS,
    select_lfps::LFPS_THRESHOLDS,
    select_lfps::LFPS_MARKS,
    select_lfps::LFPS_ATTENDED,
    select_lfps::LFPS_UPDATE,
    select_lfps::LFPS_TALLY,
    select_signs::SIGN_TABLES,
    select_signs::SIGN_KEYS,
    select_signs::APPEND_SIGNS,
    select_topk::TOPK_SCORES,
    select_topk::WEIGHT_KEYS,
    select_wpq::WORD_TABLES_16,
    select_wpq::WORD_TABLES_256,
    select_wpq::WORD_PARTS_16,
    select_wpq::WORD_PARTS_256,
    select_wpq::WORD_KEYS_16,
    select_wpq::WORD_KEYS_256,
    sign_sums::SIGN_SUMS,
    sign_sums::FIXED_SUMS,
    static_scores::STATIC_SCORES,
    static_scores::STATIC_SCORES_PACKED,
    whiten::WHITEN,
];
