//! What a run would take, as JSON and in words.

use serde_json::{Value, json};

use crate::estimate::{CONTEXTS, CacheCost, PAYS, Serving, TimedMethod};
use crate::method::registry::FULL;
use crate::wording::{grouped, size};

/// Rounds to two significant digits, since times vary.
fn rounded(context: f64) -> u64 {
    let unit = 10f64.powf(context.log10().floor() - 1.0).max(1.0);
    ((context / unit).ceil() * unit) as u64
}

/// Returns the members for `--json`.
pub fn json(serving: &Serving) -> Value {
    let cache = |of: &CacheCost| {
        json!({
            "kv": of.kv, "bytes_per_token": of.token, "window_bytes": of.windows, "longest_context": of.fits,
        })
    };
    let method = |of: &TimedMethod| {
        json!({
            "method": of.name,
            "index_bytes_per_token": of.index,
            "step_seconds": of.times,
            "pays_from": of.pays.map(|context| context.ceil() as usize),
        })
    };
    json!({
        "model_context": serving.context, "full_layers": serving.layers[0], "window_layers": serving.layers[1],
        "caches": serving.caches.iter().map(cache).collect::<Vec<_>>(),
        "weights_seconds": serving.weights_s, "contexts": CONTEXTS,
        "methods": serving.methods.iter().map(method).collect::<Vec<_>>(),
    })
}

/// Describes the costs in a few lines.
pub fn text(serving: &Serving) -> String {
    let [full, sliding] = serving.layers;
    let mut out = format!("\nrun\n  layers   {full} with full attention, {sliding} with a sliding window\n");
    out += &format!(
        "  context  {} tokens (the model's maximum)\n",
        grouped(serving.context)
    );
    for of in &serving.caches {
        let fits = if of.fits >= serving.context {
            "the whole context fits".to_owned()
        } else {
            format!("{} tokens fit", grouped(of.fits))
        };
        out += &format!(
            "  cache    {:<5} {} per token; {fits} beside the weights\n",
            of.kv.to_string(),
            size(of.token),
        );
        if of.windows > 0 {
            out += &format!(
                "           plus at most {} in the layers with a sliding window\n",
                size(of.windows)
            );
        }
    }
    let Some(weights) = serving.weights_s else {
        return out;
    };
    out += &format!(
        "  step     {:.1} ms to read the weights, plus attention (bf16, budget 6%):\n",
        1e3 * weights
    );
    out += &format!(
        "           {:<10} {:>9} {:>9} {:>12}  {PAYS}x as fast as full\n",
        "", "at 4K", "at 16K", "index"
    );
    for of in &serving.methods {
        let [short, long] = of.times.map(|seconds| format!("{:.1} ms", 1e3 * seconds));
        let pays = match of.pays {
            _ if of.name == FULL.as_str() => String::new(),
            Some(context) if context <= 1.0 => "at any context".to_owned(),
            Some(context) => format!("from {} tokens on", grouped(rounded(context) as usize)),
            None => "never".to_owned(),
        };
        let index = match of.index {
            0 => "none".to_owned(),
            bytes => format!("{}/token", size(bytes).replace(" bytes", " B")),
        };
        let line = format!(
            "           {:<10} {short:>9} {long:>9} {index:>12}  {pays}",
            of.name
        );
        out += line.trim_end();
        out += "\n";
    }
    out + "           (fastest of a few steps; other load on the machine changes them)\n"
}
