//! `kvsmith bench prefill`: a layer's projections and causal attention, against a plain matrix product in the same run.

use ndarray::{Array2, Array3, Axis};
use serde_json::{Value, json};

use super::decode::parse_context;
use super::product::{Product, print_rate, seconds, set_against};
use super::report::{random_points, row};
use crate::cmd::args::Global;
use crate::cmd::print_json;
use crate::compute::attention::causal;
use crate::compute::linear::Linear;
use crate::error::{Error, Result};
use crate::flags::{DeviceFlag, at_least_one, parse_float};
use crate::float::Float;
use crate::interrupt;
use crate::weight::Weight;

/// Most values of a matrix: 4 GB.
const MOST: usize = 1 << 30;

#[derive(clap::Args, Debug)]
pub struct PrefillArgs {
    /// Positions of the prompt, in numbers or as 2K
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "512,2K", value_parser = parse_context)]
    tokens: Vec<usize>,
    /// Query heads
    #[arg(long, value_name = "H", default_value_t = 32, value_parser = at_least_one)]
    heads: usize,
    /// Key/value heads
    #[arg(long, value_name = "G", default_value_t = 8, value_parser = at_least_one)]
    kv_heads: usize,
    /// Channels of a head
    #[arg(long, value_name = "D", default_value_t = 128, value_parser = at_least_one)]
    head_dim: usize,
    /// Channels between layers
    #[arg(long, value_name = "D", default_value_t = 4096, value_parser = at_least_one)]
    hidden: usize,
    /// Channels inside the MLP
    #[arg(long, value_name = "D", default_value_t = 14_336, value_parser = at_least_one)]
    intermediate: usize,
    /// Type of the weights: f32, f16, bf16
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = parse_float)]
    weights: Float,
    /// Timed runs
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    runs: usize,
}

impl PrefillArgs {
    /// The projections of a layer: name, input and output channels.
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
                "--heads {h} is no multiple of --kv-heads {g}"
            )));
        }
        // The largest matrices: activations, and weights.
        let longest = self.tokens.iter().copied().max().unwrap_or(1);
        let heads = h.max(g).saturating_mul(d);
        let inner = heads.max(self.intermediate);
        let activations = longest.checked_mul(inner.max(self.hidden));
        let weights = self.hidden.checked_mul(inner);
        if [activations, weights].iter().any(|n| n.is_none_or(|n| n > MOST)) {
            return Err(Error::usage(format!(
                "--tokens {longest}, --hidden {} and {inner} channels are too large",
                self.hidden
            )));
        }
        Ok(())
    }
}

/// Runs `bench prefill`.
pub fn run(args: &PrefillArgs, global: &Global) -> Result<()> {
    if !matches!(global.device, DeviceFlag::Auto | DeviceFlag::Cpu) {
        return Err(Error::device("`bench prefill` runs on the CPU alone").hint("use --device cpu"));
    }
    args.check()?;
    let mut bench = Bench {
        args,
        global,
        product: Product::new(global.seed),
    };
    bench.product.rate();
    let mut rows = Vec::new();
    for &tokens in &args.tokens {
        for (name, input, output) in args.projections() {
            rows.push(bench.projection(name, tokens, [input, output])?);
        }
        rows.push(bench.attention(tokens)?);
    }
    match global.json {
        true => print_json(&json!({ "rows": rows })),
        false => Ok(()),
    }
}

/// What is timed, and what it takes turns with.
struct Bench<'a> {
    args: &'a PrefillArgs,
    global: &'a Global,
    product: Product,
}

impl Bench<'_> {
    fn projection(&mut self, name: &str, tokens: usize, [input, output]: [usize; 2]) -> Result<Value> {
        let (seed, kind) = (self.global.seed, self.args.weights);
        let matrix = |rows, cols, seed| random_points(1, rows, cols, seed).index_axis_move(Axis(0), 0);
        let linear = Linear {
            weight: Weight::from_values(matrix(output, input, seed).view(), kind)?,
            bias: None,
        };
        let x = matrix(tokens, input, seed + 1);
        let mut out = Array2::zeros((tokens, output));
        let shape = format!("{tokens} x {input} to {output}, {}", kind.name().to_lowercase());
        let flop = 2.0 * (tokens * input) as f64 * output as f64;
        self.measure(name, &shape, flop, || {
            linear.forward(x.view(), out.view_mut());
            std::hint::black_box(&out);
        })
    }

    /// Of the products with all keys, about half are behind the mask: only the others count.
    fn attention(&mut self, tokens: usize) -> Result<Value> {
        let (h, g, d) = (self.args.heads, self.args.kv_heads, self.args.head_dim);
        let seed = self.global.seed;
        let of = |heads, more| -> Array3<f32> { random_points(heads, tokens, d, seed + more) };
        let (q, k, v) = (of(h, 2), of(g, 3), of(g, 4));
        let mut out = Array2::zeros((tokens, h * d));
        let shape = format!("{tokens} positions, {h}/{g}x{d}");
        let pairs = tokens as f64 * (tokens as f64 + 1.0) / 2.0;
        self.measure("attention", &shape, 4.0 * (h * d) as f64 * pairs, || {
            causal(q.view(), k.view(), v.view(), 0, None, out.view_mut());
            std::hint::black_box(&out);
        })
    }

    /// Takes turns with a plain product, so that what else the machine does hits both.
    fn measure(&mut self, name: &str, shape: &str, flop: f64, mut work: impl FnMut()) -> Result<Value> {
        let (mut times, mut rates) = (Vec::new(), Vec::new());
        work();
        for _ in 0..self.args.runs {
            interrupt::check()?;
            times.push(seconds(&mut work));
            rates.push(self.product.rate());
        }
        let mut result = row(&format!("prefill {name}"), shape, "cpu", times);
        set_against(&mut result, flop, rates);
        if !self.global.json {
            print_rate(&result)?;
        }
        Ok(result)
    }
}
