//! Decode steps on the GPU, emulated and real, against f64 references and the CPU's own selection. Cases of all files
//! are built in `cases.rs`.

mod a2ats;
mod attend;
mod cases;
#[path = "../common/mod.rs"]
mod common;
mod ctkvr;
#[path = "../backends/emulated.rs"]
mod emulated;
mod encode;
mod formats;
#[path = "../backends/gpus.rs"]
mod gpus;
mod held;
mod lfps;
mod linear;
mod not_finite;
mod packed;
mod pairs;
mod prefill;
mod prompt;
mod sample;
mod signs;
mod simple;
mod topk;
mod wpq;

use std::process::ExitCode;

use cases::trials;
use gpus::Check;

fn main() -> ExitCode {
    gpus::run(|| {
        let alone: [(&str, Check); 6] = [
            ("formats", Box::new(formats::check)),
            ("linear::together", Box::new(linear::check_together)),
            ("linear::refused", Box::new(linear::check_refused)),
            ("prefill::refused", Box::new(prefill::check_refused)),
            ("not_finite::join", Box::new(not_finite::check_join)),
            ("not_finite::nothing", Box::new(not_finite::check_nothing)),
        ];
        let others = alone.map(|(name, check)| (name.to_owned(), check));
        [
            trials("attend", attend::cases(), attend::check),
            trials("attend_packed", packed::cases(), packed::check),
            trials("pairs", pairs::cases(), pairs::check),
            trials("not_finite", not_finite::cases(), not_finite::check),
            trials(
                "not_finite_packed",
                not_finite::packed_cases(),
                not_finite::check_packed,
            ),
            trials("linear", linear::cases(), linear::check),
            trials("sample", sample::cases(), sample::check),
            trials("prefill", prefill::cases(), prefill::check),
            trials("prefill_narrow", prefill::narrow_cases(), prefill::check_narrow),
            trials("prompt", prompt::cases(), prompt::check),
            trials("a2ats", a2ats::cases(), a2ats::check),
            trials("encode", encode::cases(), encode::check),
            trials("lfps", lfps::cases(), lfps::check),
            trials("selfindex", signs::cases(), signs::check),
            trials("topk", topk::cases(), topk::check),
            trials("wpq", wpq::cases(), wpq::check),
            trials("ctkvr", ctkvr::cases(), ctkvr::check),
            trials("simple", simple::cases(), simple::check),
        ]
        .into_iter()
        .flatten()
        .chain(others)
        .collect()
    })
}
