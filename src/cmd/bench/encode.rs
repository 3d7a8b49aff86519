//! `kvsmith bench encode`: keys to codewords, against a plain matrix product in the same run.

use ndarray::Axis;
use serde_json::json;

use super::product::{Product, print_rate, seconds, set_against};
use super::report::{random_points, row};
use crate::cmd::args::Global;
use crate::cmd::print_json;
use crate::error::{Error, Result};
use crate::flags::{DeviceFlag, at_least_one};
use crate::interrupt;
use crate::stats::kmeans::{Codebook, MAX_SIZE};

/// Most values of a matrix: 4 GB.
const MOST: usize = 1 << 30;

#[derive(clap::Args, Debug)]
pub struct EncodeArgs {
    /// Keys, in numbers or as 8K
    #[arg(long, value_name = "N", default_value = "8K", value_parser = super::decode::parse_context)]
    n: usize,
    /// Channels
    #[arg(long, value_name = "D", default_value_t = 128, value_parser = at_least_one)]
    dim: usize,
    /// Codewords
    #[arg(long, value_name = "M", default_value_t = 4096, value_parser = at_least_one)]
    size: usize,
    /// Timed runs
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = at_least_one)]
    runs: usize,
}

/// Runs `bench encode`.
pub fn run(args: &EncodeArgs, global: &Global) -> Result<()> {
    let (n, d, size) = (args.n, args.dim, args.size);
    if !matches!(global.device, DeviceFlag::Auto | DeviceFlag::Cpu) {
        return Err(Error::device("`bench encode` runs on the CPU alone").hint("use --device cpu"));
    }
    let most = MOST / d.max(1);
    if size > MAX_SIZE || n > most || size > most {
        return Err(Error::usage(format!(
            "--n {n} x --dim {d} x --size {size} is too large"
        )));
    }
    let keys = random_points(1, n, d, global.seed).index_axis_move(Axis(0), 0);
    let codebook = random_points(1, size, d, global.seed + 1).index_axis_move(Axis(0), 0);
    let ready = Codebook::new(codebook.clone());
    let (mut codes, mut distances) = (vec![0; n], vec![0.0; n]);
    let (mut encode, mut product, mut rates) = (Vec::new(), Product::new(global.seed), Vec::new());
    // Taken in turns, so that what else the machine does hits both; the first ones warm up.
    for _ in 0..=args.runs {
        interrupt::check()?;
        encode.push(seconds(|| ready.nearest(keys.view(), &mut codes, &mut distances)));
        std::hint::black_box(&codes);
        rates.push(product.rate());
    }
    let flop = 2.0 * (n * d) as f64 * size as f64;
    let shape = format!("{n} x {d}, {size} codewords");
    let mut result = row("encode", &shape, "cpu", encode.split_off(1));
    set_against(&mut result, flop, rates.split_off(1));
    match global.json {
        true => print_json(&json!({ "rows": [result] })),
        false => print_rate(&result),
    }
}
