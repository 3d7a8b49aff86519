//! `kvsmith bench encode`: keys to codewords, against a plain matrix product in the same run.

use super::product::{Comparison, MAX_MATRIX};
use super::report::{check_memory, free_bytes, random_matrix};
use crate::cmd::args::Global;
use crate::cmd::flags::at_least_one;
use crate::error::{Error, Result};
use crate::stats::kmeans::{Codebook, MAX_SIZE};

#[derive(clap::Args, Debug)]
pub struct EncodeArgs {
    /// Number of keys, such as 8192 or 8K
    #[arg(long, value_name = "N", default_value = "8K", value_parser = super::layer_step::parse_context)]
    n: usize,
    /// Channels per key
    #[arg(long, value_name = "D", default_value_t = 128, value_parser = at_least_one)]
    dim: usize,
    /// Number of codewords
    #[arg(long, value_name = "M", default_value_t = 4096, value_parser = at_least_one)]
    size: usize,
    /// Number of timed runs
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = at_least_one)]
    runs: usize,
}

/// The hint for sizes that are too large.
const SMALLER: &str = "reduce --n, --dim or --size";

/// Runs `bench encode`.
pub fn run(args: &EncodeArgs, global: &Global) -> Result<()> {
    let (n, d, size) = (args.n, args.dim, args.size);
    let most = MAX_MATRIX / d.max(1);
    if size > MAX_SIZE || n > most || size > most {
        return Err(Error::usage(format!("--n {n} x --dim {d} x --size {size} is too large")).hint(SMALLER));
    }
    let shape = format!("{n} x {d}, {size} codewords");
    // The keys, and the codebook in two forms; then codes and distances.
    let need = 4.0 * (n as f64 + 2.0 * size as f64) * d as f64 + 8.0 * n as f64;
    check_memory(&shape, need, free_bytes(), SMALLER)?;
    let mut comparison = Comparison::new("encode", args.runs, global)?;
    let keys = random_matrix(n, d, global.seed);
    let codebook = Codebook::new(random_matrix(size, d, global.seed.wrapping_add(1)));
    let (mut codes, mut distances) = (vec![0; n], vec![0.0; n]);
    let flop = 2.0 * (n * d) as f64 * size as f64;
    comparison.add("encode", &shape, flop, || {
        codebook.nearest(keys.view(), &mut codes, &mut distances);
        std::hint::black_box(&codes);
    })?;
    comparison.finish()
}
