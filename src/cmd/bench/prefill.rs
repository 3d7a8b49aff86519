//! `kvsmith bench prefill`: a layer's projections and causal attention, against a plain matrix product in the same run.

use ndarray::Array2;

use super::layer_step::parse_context;
use super::product::{Comparison, MAX_MATRIX};
use super::report::{check_memory, free_bytes, random_matrix, random_points};
use crate::cmd::args::Global;
use crate::cmd::flags::{at_least_one, parse_float};
use crate::compute::attention::causal;
use crate::compute::linear::Linear;
use crate::compute::{Precision, pairs};
use crate::error::{Error, Result};
use crate::float::Float;
use crate::weight::Weight;

#[derive(clap::Args, Debug)]
pub struct PrefillArgs {
    /// Numbers of prompt tokens, such as 2048 or 2K
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "512,2K", value_parser = parse_context)]
    tokens: Vec<usize>,
    /// Number of query heads
    #[arg(long, value_name = "H", default_value_t = 32, value_parser = at_least_one)]
    heads: usize,
    /// Number of KV heads
    #[arg(long, value_name = "G", default_value_t = 8, value_parser = at_least_one)]
    kv_heads: usize,
    /// Channels per head
    #[arg(long, value_name = "D", default_value_t = 128, value_parser = at_least_one)]
    head_dim: usize,
    /// Channels of the hidden state
    #[arg(long, value_name = "D", default_value_t = 4096, value_parser = at_least_one)]
    hidden: usize,
    /// Channels inside the MLP
    #[arg(long, value_name = "D", default_value_t = 14_336, value_parser = at_least_one)]
    intermediate: usize,
    /// Element type of the weights: f32, f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = parse_float)]
    weights: Float,
    /// Number of timed runs
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    runs: usize,
}

/// The hint for sizes that are too large.
const SMALLER: &str = "reduce --tokens, --hidden, --intermediate, --heads or --head-dim";

impl PrefillArgs {
    /// Lists the projections of a layer: name, input and output channels.
    fn projections(&self) -> [(&'static str, usize, usize); 7] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let (hidden, inner) = (self.hidden, self.intermediate);
        [
            ("q", hidden, q),
            ("k", hidden, kv),
            ("v", hidden, kv),
            ("o", q, hidden),
            ("gate", hidden, inner),
            ("up", hidden, inner),
            ("down", inner, hidden),
        ]
    }

    fn check(&self) -> Result<()> {
        let (h, g, d) = (self.heads, self.kv_heads, self.head_dim);
        if !h.is_multiple_of(g) {
            return Err(Error::usage(format!(
                "--heads {h} is not a multiple of --kv-heads {g}"
            )));
        }
        // The largest matrices: activations, and weights.
        let longest = self.tokens.iter().copied().max().unwrap_or(1);
        let heads = h.max(g).saturating_mul(d);
        let inner = heads.max(self.intermediate);
        let activations = longest.checked_mul(inner.max(self.hidden));
        let weights = self.hidden.checked_mul(inner);
        if [activations, weights]
            .iter()
            .any(|n| n.is_none_or(|n| n > MAX_MATRIX))
        {
            return Err(Error::usage(format!(
                "--tokens {longest}, --hidden {} and {inner} channels are too large",
                self.hidden
            ))
            .hint(SMALLER));
        }
        // A projection takes weights, inputs and their packed form, and outputs; attention takes queries, keys, values
        // and outputs.
        let n = longest as f64;
        let project = |(_, input, output): (_, usize, usize)| {
            let (input, output) = (input as f64, output as f64);
            4.0 * (input * output + n * (2.0 * input + output))
        };
        let attend = 8.0 * n * (h as f64 + g as f64) * d as f64;
        let need = self.projections().into_iter().map(project).fold(attend, f64::max);
        check_memory(&format!("{longest} positions"), need, free_bytes(), SMALLER)
    }
}

/// Runs `bench prefill`.
pub fn run(args: &PrefillArgs, global: &Global) -> Result<()> {
    args.check()?;
    let rounds = global.precision == Precision::Bf16;
    if rounds {
        pairs::check()?;
        if args.weights != Float::Bf16 {
            return Err(Error::usage("--precision bf16 needs --weights bf16").hint("omit --weights"));
        }
    }
    let mut comparison = Comparison::new("prefill", args.runs, global)?;
    for &tokens in &args.tokens {
        for (name, input, output) in args.projections() {
            let name = format!("prefill {name}");
            project(
                &mut comparison,
                &name,
                tokens,
                [input, output],
                (args.weights, rounds),
                global.seed,
            )?;
        }
        attend(&mut comparison, tokens, args, rounds, global.seed)?;
    }
    comparison.finish()
}

/// Times one projection of a prompt.
fn project(
    comparison: &mut Comparison,
    name: &str,
    tokens: usize,
    [input, output]: [usize; 2],
    (kind, rounds): (Float, bool),
    seed: u64,
) -> Result<()> {
    let mut linear = Linear::new(
        Weight::from_values(random_matrix(output, input, seed).view(), kind)?,
        None,
    );
    linear.rounds = rounds;
    let x = random_matrix(tokens, input, seed.wrapping_add(1));
    let mut out = Array2::zeros((tokens, output));
    let shape = format!("{tokens} x {input} to {output}, {}", kind.name().to_lowercase());
    let flop = 2.0 * (tokens * input) as f64 * output as f64;
    comparison.add(name, &shape, flop, || {
        linear.forward(x.view(), out.view_mut());
        std::hint::black_box(&out);
    })
}

/// Times the causal attention of a prompt. About half of the products with keys are masked; only the others count as
/// operations.
fn attend(
    comparison: &mut Comparison,
    tokens: usize,
    args: &PrefillArgs,
    rounds: bool,
    seed: u64,
) -> Result<()> {
    let (h, g, d) = (args.heads, args.kv_heads, args.head_dim);
    let states = |heads, more| random_points(heads, tokens, d, seed.wrapping_add(more));
    let (q, k, v) = (states(h, 2), states(g, 3), states(g, 4));
    let mut out = Array2::zeros((tokens, h * d));
    let shape = format!("{tokens} positions, {h}/{g}x{d}");
    let flop = 4.0 * (h * d) as f64 * (tokens as f64 * (tokens as f64 + 1.0) / 2.0);
    comparison.add("prefill attention", &shape, flop, || {
        causal(q.view(), k.view(), v.view(), 0, None, rounds, out.view_mut());
        std::hint::black_box(&out);
    })
}
