//! The trace of a session: the choice of every KV head in every decode step.

use std::io::Write;
use std::path::Path;

use serde_json::json;

use crate::error::{Error, Result};

/// Writes the choices of decode steps, one JSON line per step, layer and KV head.
pub struct Trace<'a> {
    sink: Box<dyn Write + 'a>,
}

impl<'a> Trace<'a> {
    /// Starts a trace.
    pub fn new(sink: impl Write + 'a) -> Self {
        Self { sink: Box::new(sink) }
    }

    /// Writes the lines of one step and layer; `chosen` has the positions of each KV head.
    pub fn layer<'c>(
        &mut self,
        step: usize,
        layer: usize,
        chosen: impl Iterator<Item = &'c Vec<u32>>,
    ) -> Result<()> {
        for (kv_head, positions) in chosen.enumerate() {
            let line = json!({ "step": step, "layer": layer, "kv_head": kv_head, "positions": positions });
            writeln!(self.sink, "{line}").map_err(failed)?;
        }
        Ok(())
    }

    /// Flushes the lines that are still buffered.
    pub fn finish(&mut self) -> Result<()> {
        self.sink.flush().map_err(failed)
    }
}

fn failed(e: std::io::Error) -> Error {
    Error::io(Path::new("the trace"), "write", &e).or_hint("write the file of ⟨trace⟩ elsewhere")
}
