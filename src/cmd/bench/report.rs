//! What benchmarks share: timed runs, the rows of their results, random matrices, amounts of memory.

use std::io::IsTerminal;

use serde_json::{Value, json};

use crate::cmd::args::Global;
use crate::cmd::terminal::columns;
use crate::cmd::{merge, print, print_json};
use crate::error::{Error, Result};
pub use crate::heap::free_bytes;
use crate::heap::proc_bytes;
pub use crate::timing::{measure, median, random_matrix, random_points};
use crate::wording::{size, wrapped};

/// The seconds of several runs.
pub struct Times {
    pub min: f64,
    pub median: f64,
    pub max: f64,
    runs: usize,
}

impl From<Vec<f64>> for Times {
    /// Summarises the seconds of one or more runs.
    fn from(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        Self {
            min: seconds[0],
            max: seconds[seconds.len() - 1],
            runs: seconds.len(),
            median: median(seconds),
        }
    }
}

/// The results of a benchmark: printed one by one, or together as the document of `--json`.
pub struct Results<'a> {
    global: &'a Global,
    /// The shape that was printed last.
    shape: String,
    rows: Vec<Value>,
}

impl<'a> Results<'a> {
    /// Starts with no results.
    pub fn new(global: &'a Global) -> Self {
        Self {
            global,
            shape: String::new(),
            rows: Vec::new(),
        }
    }

    /// Adds a result and prints it, with `--json` on stderr; `more` has the members that only this benchmark gives, and
    /// `says` gives the numbers in words, one fact per line.
    pub fn add(
        &mut self,
        [name, shape, device]: [&str; 3],
        times: &Times,
        more: &Value,
        says: &[String],
    ) -> Result<()> {
        let mut row = json!({
            "name": name,
            "shape": shape,
            "device": device,
            "min_s": times.min,
            "max_s": times.max,
            "runs": times.runs,
            "median_s": times.median,
            "peak_bytes": proc_bytes("/proc/self/status", "VmHWM:").unwrap_or(0),
        });
        merge(&mut row, more);
        self.rows.push(row);
        // One row per result, under a line for each shape.
        let heading = if self.shape == shape {
            String::new()
        } else {
            format!("{shape}\n")
        };
        shape.clone_into(&mut self.shape);
        let row = format!("  {name:<22} {}", says.join("; "));
        let text = if std::io::stdout().is_terminal() {
            heading + &wrapped(&row, columns())
        } else {
            heading + &row
        };
        if self.global.json {
            self.global.log().note(&text);
            return Ok(());
        }
        print(&format!("{text}\n"))
    }

    /// Tells whether there is no result yet.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Prints the document of `--json`.
    pub fn finish(self) -> Result<()> {
        self.finish_after(Ok(()))
    }

    /// Prints the document of `--json` with the results up to an error, and passes the error on.
    pub fn finish_after(self, outcome: Result<()>) -> Result<()> {
        if self.global.json && (outcome.is_ok() || !self.rows.is_empty()) {
            print_json(self.global, &json!({ "rows": self.rows }))?;
        }
        outcome
    }
}

/// Compares the rate of reading `bytes` in some seconds with `bandwidth`, that of a plain read loop in GB/s: as members
/// of a result and in words.
pub fn against_read_loop(bytes: f64, seconds: f64, bandwidth: f64) -> (Value, String) {
    let rate = bytes / seconds * 1e-9;
    let share = rate / bandwidth;
    let more = json!({
        "gbytes_per_s": rate, "read_loop_gbytes_per_s": bandwidth, "bandwidth_share": share,
    });
    (
        more,
        format!(
            "{rate:.1} GB/s, {:.0}% of the bandwidth of a plain read loop",
            100.0 * share
        ),
    )
}

/// Fails if data of the sizes that flags give need more than the `free` bytes; `need` is an f64, in which no product of
/// sizes overflows.
pub fn check_memory(what: &str, need: f64, free: usize, hint: &str) -> Result<()> {
    if need <= free as f64 {
        return Ok(());
    }
    // A need beyond the largest number is shown as that number.
    let (need, free) = (size(need as usize), size(free));
    Err(Error::usage(format!("{what}: the data needs {need}, but only {free} are free")).hint(hint))
}
