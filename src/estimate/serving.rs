//! What a run would take: the bytes of the cache, the longest context that fits, and the context from which a method is
//! faster than full attention on this machine.

use super::line::Line;
use crate::error::Result;
use crate::heap::free_bytes;
use crate::kv::format::FORMATS;
use crate::kv::{Budget, KvType, RowFormat};
use crate::method::bench::{Bench, BenchParams};
use crate::method::registry::{FULL, METHODS};
use crate::model::{ModelConfig, Sizes};
use crate::timing::{QuickLayer, RUNS, bandwidth};

/// Contexts at which steps are timed.
pub const CONTEXTS: [usize; 2] = [4096, 16_384];
/// A method pays if a step with full attention takes at least this many times as long.
pub const PAYS: f64 = 1.1;
/// The longest context that is reported.
const LONGEST: f64 = (16 << 20) as f64;

/// The costs of a run on the CPU.
#[derive(Clone, Debug)]
pub struct Serving {
    /// Layers with full and with sliding-window attention.
    pub layers: [usize; 2],
    /// The longest context that the model was made for.
    pub context: usize,
    /// The types of the cache.
    pub caches: Vec<CacheCost>,
    /// Seconds to read the weights once; `None` if nothing was timed.
    pub weights_s: Option<f64>,
    /// The methods that were timed.
    pub methods: Vec<TimedMethod>,
}

/// A type of the cache.
#[derive(Clone, Debug)]
pub struct CacheCost {
    /// The type.
    pub kv: KvType,
    /// Bytes per token in the layers that keep all tokens.
    pub token: usize,
    /// Most bytes that the layers with a sliding window keep.
    pub windows: usize,
    /// Tokens that fit into the free memory, next to the weights.
    pub fits: usize,
}

/// Returns the bytes of a position in the cache of one layer.
pub fn position_bytes(sizes: Sizes, kv: KvType) -> usize {
    sizes.n_kv_heads * kv.bytes_per_position(sizes.head_dim)
}

/// Returns the shortest context from which, in all longer ones too, steps with the times `full` take at least [`PAYS`]
/// times as long as steps with `times`, if both take `common` seconds more; `None` if there is none up to [`LONGEST`].
fn pays(times: Line, full: Line, common: f64) -> Option<f64> {
    let behind = PAYS * (common + times.base) - common - full.base;
    let gain = full.slope - PAYS * times.slope;
    let from = if behind <= 0.0 { 0.0 } else { behind / gain };
    Some(from).filter(|from| gain >= 0.0 && *from <= LONGEST)
}

/// A method with the times of its steps in the layers with full attention.
#[derive(Clone, Debug)]
pub struct TimedMethod {
    /// Its name.
    pub name: &'static str,
    /// Seconds of a step at each of the timed contexts.
    pub times: [f64; 2],
    /// Bytes of its index per token, at the longer of these contexts.
    pub index: usize,
    /// The context from which its steps are faster than those of full attention.
    pub pays: Option<f64>,
}

impl Serving {
    /// Computes the bytes, from those of all weights and of those that a step reads; measures the times if the
    /// parameters of the indexes are given and the shape can be timed.
    pub fn estimate(
        config: &ModelConfig,
        [weights, read]: [usize; 2],
        params: Option<&BenchParams>,
        seed: u64,
    ) -> Result<Self> {
        let sliding: Vec<usize> = config.windows().into_iter().flatten().collect();
        let full = config.n_layers() - sliding.len();
        let free = free_bytes().saturating_sub(weights);
        let cache = |kv: KvType| {
            let position = position_bytes(config.sizes(), kv);
            let (token, windows) = (full * position, sliding.iter().sum::<usize>() * position);
            CacheCost {
                kv,
                token,
                windows,
                fits: free.saturating_sub(windows) / token.max(1),
            }
        };
        let mut serving = Self {
            layers: [full, sliding.len()],
            context: config.max_position_embeddings,
            // Rows in f16 take the bytes of those in bf16.
            caches: FORMATS
                .iter()
                .filter(|format| **format != RowFormat::F16)
                .map(|format| cache(KvType::both(*format)))
                .collect(),
            weights_s: None,
            methods: Vec::new(),
        };
        if let Some(params) = params
            && full > 0
            && QuickLayer::can_be_timed(config)
        {
            let weights_s = read as f64 / (1e9 * bandwidth(RUNS));
            serving.weights_s = Some(weights_s);
            serving.methods = timed(config, full, params, weights_s, seed)?;
        }
        Ok(serving)
    }
}

/// Times the methods in one layer.
fn timed(
    config: &ModelConfig,
    layers: usize,
    params: &BenchParams,
    weights_s: f64,
    seed: u64,
) -> Result<Vec<TimedMethod>> {
    let mut lines = Vec::new();
    let estimated = METHODS
        .iter()
        .copied()
        .filter(|method| method.bench().is_some_and(Bench::is_estimated));
    'methods: for method in [FULL].into_iter().chain(estimated) {
        let (mut times, mut index) = ([0.0; 2], 0);
        for (time, context) in times.iter_mut().zip(CONTEXTS) {
            let layer = QuickLayer {
                config,
                context,
                params: params.clone(),
                budget: Budget::Fraction(0.06),
                kv: KvType::BF16,
                seed,
            };
            let Some(step) = layer.fastest(method)? else {
                continue 'methods;
            };
            *time = layers as f64 * step.seconds;
            index = layers * step.index_bytes / context;
        }
        let line = Line::through(CONTEXTS.map(|n| n as f64), times);
        lines.push((method.as_str(), times, index, line));
    }
    let full = lines
        .first()
        .map_or(Line::through([0.0, 1.0], [0.0; 2]), |of| of.3);
    let timed = |(name, times, index, line)| TimedMethod {
        name,
        times,
        index,
        pays: pays(line, full, weights_s),
    };
    Ok(lines.into_iter().map(timed).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_pays_where_its_line_is_low_enough() {
        let full = Line {
            base: 0.0,
            slope: 2.0,
        };
        let method = Line {
            base: 10.0,
            slope: 1.0,
        };
        // 2 n = 1.1 (10 + n) at n = 11 / 0.9.
        let from = pays(method, full, 0.0).unwrap();
        assert!((from - 11.0 / 0.9).abs() < 1e-9);
        // Reading the weights, which both do, moves the point to longer contexts: 100 + 2 n = 1.1 (110 + n).
        let later = pays(method, full, 100.0).unwrap();
        assert!((later - 21.0 / 0.9).abs() < 1e-9);
        assert_eq!(pays(full, full, 0.0), None);
        // A method that is faster at short contexts only.
        assert_eq!(pays(full, method, 0.0), None);
        let free = Line {
            base: 0.0,
            slope: 0.0,
        };
        assert_eq!(
            pays(
                free,
                Line {
                    base: 1.0,
                    slope: 0.0
                },
                0.0
            ),
            Some(0.0)
        );
    }
}
