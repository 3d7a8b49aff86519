//! Tokens that a device chooses, against the CPU's, where the order of sums may decide between two of them.

use kvsmith::internal::kv::sample::greedy;
use kvsmith::internal::model::Decoder;
use ndarray::{Array1, ArrayView1};

/// How far rounding may move the margin of two logits, in standard deviations.
const DEVIATIONS: f64 = 8.0;

/// Bounds, for a model in f32, the difference between two logits that two devices may see in opposite orders. `logits`
/// are those after position `n - 1`.
///
/// Both devices compute the same sums, in orders of their own. A sum of k products in f32, each addition rounded to a
/// relative u = 2^-24 and the roundings independent of each other, is off by about u sqrt(k) of the norm of its terms
/// (Higham and Mary 2019, "A new approach to probabilistic rounding error analysis"). From an embedding to a logit, a
/// number passes in each layer sums of `hidden` (q, k, v), `head_dim` (scores), n (softmax and values),
/// `heads head_dim` (output), `hidden` (gate and up) and `intermediate` terms (down), and at the end one of `hidden`
/// terms. With K terms in all, and since the squares of independent errors add up, a logit is off by u sqrt(K) of a
/// logit's size, which is the root of the mean square of all. A margin has two logits on each of two devices: twice
/// that. The logits of the emulation and of the CPU differ by u sqrt(K) of this size on average, if the largest
/// difference of each step is taken, and by up to 5.5 times as much.
pub fn bound(decoder: &Decoder, n: usize, logits: &Array1<f32>) -> f64 {
    let c = &decoder.config;
    let layer = 2 * c.hidden_size + c.head_dim + n + c.n_heads * c.head_dim + c.intermediate_size;
    let terms = (c.n_layers() * layer + c.hidden_size) as f64;
    let squares: f64 = logits.iter().map(|x| f64::from(*x).powi(2)).sum();
    let size = (squares / logits.len() as f64).sqrt();
    DEVIATIONS * 2.0 * terms.sqrt() * 0.5f64.powi(24) * size
}

/// How a token that a device chose relates to the CPU's.
#[derive(Debug, PartialEq)]
enum Choice {
    Same,
    NearTie,
    Other,
}

impl Choice {
    /// Judges a token by the CPU's logits, from which `choose` takes the CPU's token. Another token is a near tie if it is
    /// the choice once the logits above its own, or those below, or all others are lower by `bound`: then it is the
    /// largest, or the limit between it and its neighbours passes the number that is drawn.
    fn judge(found: u32, logits: &Array1<f32>, bound: f64, choose: &dyn Fn(ArrayView1<f32>) -> u32) -> Self {
        if choose(logits.view()) == found {
            return Self::Same;
        }
        let own = logits[found as usize];
        let lowered: [fn(f32, f32) -> bool; 3] = [|x, own| x > own, |x, own| x < own, |_, _| true];
        let is_near = lowered.iter().any(|is_lowered| {
            let mut moved = logits.clone();
            for (i, x) in moved.iter_mut().enumerate() {
                if i != found as usize && is_lowered(*x, own) {
                    *x = (f64::from(*x) - bound) as f32;
                }
            }
            choose(moved.view()) == found
        });
        if is_near { Self::NearTie } else { Self::Other }
    }
}

/// Says whether a device chose the token that `choose` takes from the CPU's logits; prints a near tie with its margin.
/// Any other token is an error.
#[track_caller]
pub fn agrees(found: u32, logits: &Array1<f32>, bound: f64, choose: impl Fn(ArrayView1<f32>) -> u32) -> bool {
    let expected = choose(logits.view());
    let [own, larger] = [found, expected].map(|token| f64::from(logits[token as usize]));
    let margin = larger - own;
    let what = format!("token {found} instead of {expected}, with a margin of {margin}; rounding: {bound}");
    match Choice::judge(found, logits, bound, &choose) {
        Choice::Same => true,
        Choice::NearTie => {
            eprintln!("{what}");
            false
        }
        Choice::Other => panic!("{what}"),
    }
}

/// Counts how many of a device's greedy tokens are the CPU's, which come from these logits: all of them, or those before
/// the first near tie, since the device goes on from another token than the CPU. `n` is the number of positions before
/// the first token.
#[track_caller]
pub fn greedy_agreeing(decoder: &Decoder, found: &[u32], logits: &[Array1<f32>], n: usize) -> usize {
    assert_eq!(found.len(), logits.len());
    for (i, (found, logits)) in found.iter().zip(logits).enumerate() {
        let bound = bound(decoder, n + i, logits);
        if !agrees(*found, logits, bound, |logits| greedy(logits).unwrap()) {
            return i;
        }
    }
    found.len()
}

/// Margins within the bound are near ties, and larger ones are not, of the largest logit as of a drawn number.
pub fn check() {
    use Choice::{NearTie, Other, Same};
    let logits = Array1::from(vec![1.0, 2.0, 2.0 - 1e-6, 1.5]);
    let found =
        [0, 1, 2, 3].map(|token| Choice::judge(token, &logits, 2e-6, &|logits| greedy(logits).unwrap()));
    assert_eq!(found, [Other, Same, NearTie, Other]);
    // The first of two tokens has half of the probability.
    let logits = Array1::from(vec![0.0, -1e-9]);
    for (uniform, expected) in [
        (0.4, [Same, Other]),
        (0.5 - 1e-7, [Same, NearTie]),
        (0.5 + 1e-7, [NearTie, Same]),
        (0.6, [Other, Same]),
    ] {
        let draw = |logits: ArrayView1<f32>| {
            let odds = f64::from(logits[1] - logits[0]).exp();
            u32::from(uniform > 1.0 / (1.0 + odds))
        };
        let found = [0, 1].map(|token| Choice::judge(token, &logits, 2e-6, &draw));
        assert_eq!(found, expected, "{uniform}");
    }
}
