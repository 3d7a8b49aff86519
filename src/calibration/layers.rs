//! The pass over the layers: each is captured, then fitted while its states are in memory.

use ndarray::{Array3, Axis, s};

use super::sections::fit_layer;
use super::stages::{CAPTURE, Stages};
use crate::artifact::{Fit, LayerParts, LayerStates, MomentsRead, Section};
use crate::capture::Capture;
use crate::compute::device::Device;
use crate::corpus::Corpus;
use crate::env::{Progress, Reporter};
use crate::error::{Error, Result};
use crate::heap;
use crate::kv::Qkv;
use crate::model::Decoder;
use crate::model::forward::Layers;
use crate::stats::moments::{LayerMoments, Position, QuerySums};
use crate::work::WorkFolder;

/// The pass over the layers: the model, the text and the fits.
pub(super) struct Pass<'a> {
    pub device: &'a dyn Device,
    pub decoder: &'a Decoder,
    pub corpus: &'a Corpus,
    /// Which rows of the text the fits use.
    pub kept: &'a [bool],
    /// The position to which queries are rotated for the query moments.
    pub position: Position,
    pub fits: Vec<Box<dyn Fit>>,
    /// The rows whose queries any fit reads, ascending.
    pub query_rows: Vec<usize>,
    pub reporter: &'a dyn Reporter,
}

/// The states of one layer, as far as the fits read them.
struct Captured {
    /// Queries of `query_rows`, `[h,rows,d]`, and keys, `[g,n,d]`, before rotation; values, `[g,n,d]`, without heads unless a
    /// fit reads values.
    states: Qkv<Array3<f32>>,
    /// Moments at the position asked for.
    moments: LayerMoments,
    /// Moments with each query at its own position.
    own_moments: LayerMoments,
    sums: QuerySums,
}

impl Pass<'_> {
    /// Captures and fits layer by layer, starting after the layers that `work` has; returns how long each stage took.
    pub fn run(
        &self,
        layers: &dyn Layers,
        work: Option<&WorkFolder>,
        sections: &mut [Section],
    ) -> Result<Stages> {
        let mut stages = Stages::default();
        let sizes = self.decoder.config.sizes();
        let mut capture = self.start(layers, work, sections)?;
        let remaining = sizes.n_layers - capture.next_layer;
        // A unit of progress is a captured token, or a key that was fitted for a section.
        let per_layer = self.corpus.n_tokens() * (1 + sections.len() * sizes.n_kv_heads);
        let progress = self.reporter.progress((remaining * per_layer) as u64, "states");
        while capture.next_layer < sizes.n_layers {
            let layer = capture.next_layer;
            let states = self.time(&mut stages, layer, CAPTURE, || {
                self.capture(&mut capture, progress.as_ref())
            })?;
            heap::trim();
            let parts = self.fit(layer, &states, progress.as_ref(), &mut stages)?;
            if let Some(work) = work {
                let last = capture.next_layer == sizes.n_layers;
                work.save(layer, &parts, &capture.hidden, last)?;
            }
            add_layer(sections, parts)?;
            drop(states);
            heap::trim();
        }
        Ok(stages)
    }

    /// Starts the capture at the first layer, or after the last one that `work` has.
    fn start<'a>(
        &'a self,
        layers: &'a dyn Layers,
        work: Option<&WorkFolder>,
        sections: &mut [Section],
    ) -> Result<Capture<'a>> {
        let c = &self.decoder.config;
        let resumed = work.map(|w| w.load([self.corpus.n_tokens(), c.hidden_size]));
        let Some((hidden, finished)) = resumed.transpose()?.flatten() else {
            return Capture::start(layers, self.corpus);
        };
        let done = finished.len();
        self.reporter
            .note(&format!("resuming at layer {done} (0-{})", c.n_layers() - 1));
        for parts in finished {
            add_layer(sections, parts)?;
        }
        Ok(Capture::at(layers, self.corpus, hidden, done))
    }

    /// Runs the next layer of the model and keeps the states that the fits read.
    fn capture(&self, capture: &mut Capture, progress: &dyn Progress) -> Result<Captured> {
        self.stage(progress, capture.next_layer, "capture");
        let rope = self.decoder.ropes.layer(capture.next_layer);
        let c = &self.decoder.config;
        let rows = &self.query_rows;
        let rows_of = |heads: usize| Array3::zeros((heads, self.corpus.n_tokens(), c.head_dim));
        let mut read = Qkv {
            q: Array3::zeros((c.n_heads, rows.len(), c.head_dim)),
            k: rows_of(c.n_kv_heads),
            v: rows_of(self.value_heads()),
        };
        let mut sums = QuerySums::new(c.n_kv_heads, c.head_dim);
        capture.layer(progress, &mut |block, states| {
            let (q, kept) = (states.q.view(), &self.kept[block.clone()]);
            sums.add(&QuerySums::of_block(self.device, c.n_kv_heads, q, kept, rope)?);
            let first = rows.partition_point(|row| *row < block.start);
            let within = rows[first..].iter().take_while(|row| **row < block.end);
            for (i, row) in (first..).zip(within) {
                let query = q.slice(s![.., row - block.start, ..]);
                read.q.slice_mut(s![.., i, ..]).assign(&query);
            }
            if !read.v.is_empty() {
                read.v.slice_mut(s![.., block.clone(), ..]).assign(&states.v);
            }
            read.k.slice_mut(s![.., block, ..]).assign(&states.k);
            Ok(())
        })?;
        Ok(Captured {
            states: read,
            moments: sums.at(self.position, rope),
            own_moments: sums.at(Position::Own, rope),
            sums,
        })
    }

    /// Returns the number of KV heads whose values are kept: all of them if a fit reads values, else none.
    fn value_heads(&self) -> usize {
        let reads = self.fits.iter().any(|fit| fit.kind().facts().reads_values);
        if reads { self.decoder.config.n_kv_heads } else { 0 }
    }

    /// Fits every section to one layer.
    fn fit(
        &self,
        layer: usize,
        captured: &Captured,
        progress: &dyn Progress,
        stages: &mut Stages,
    ) -> Result<LayerParts> {
        let mut fit = |fit: &dyn Fit| {
            let kind = fit.kind();
            self.stage(progress, layer, kind.facts().stage);
            let at = |row: &usize| self.query_rows.partition_point(|r| r < row);
            let query_rows: Vec<usize> = fit.query_rows().iter().map(at).collect();
            let states = LayerStates {
                layer,
                sizes: self.decoder.config.sizes(),
                window: self.decoder.config.blocks[layer].window,
                device: kind.device(self.device),
                read: Qkv {
                    q: &|head| {
                        let queries = captured.states.q.index_axis(Axis(0), head);
                        Ok(queries.select(Axis(0), &query_rows))
                    },
                    k: &|head| Ok(captured.states.k.index_axis(Axis(0), head).to_owned()),
                    v: &|head| Ok(captured.states.v.index_axis(Axis(0), head).to_owned()),
                },
                moments: match kind.facts().moments {
                    MomentsRead::Nothing => None,
                    MomentsRead::Chosen => Some(&captured.moments),
                    MomentsRead::Own => Some(&captured.own_moments),
                },
                sums: Some(&captured.sums),
                block_start: &self.corpus.block_start,
                kept: self.kept,
                rope: self.decoder.ropes.layer(layer),
            };
            let units = self.corpus.n_tokens() as u64;
            let part = self.time(stages, layer, kind.facts().stage, || {
                fit_layer(fit, &states, progress, units)
            })?;
            Ok((kind.name(), part))
        };
        self.fits.iter().map(|of| fit(of.as_ref())).collect()
    }

    /// Does the work of a stage for one layer, adds its time to the stage, and prints it with `-v`.
    fn time<T>(
        &self,
        stages: &mut Stages,
        layer: usize,
        stage: &'static str,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let before = stages.get(stage);
        let out = stages.time(stage, work)?;
        let seconds = stages.get(stage) - before;
        self.reporter
            .detail(&format!("layer {layer}: {stage} {seconds:.3} s"));
        Ok(out)
    }

    /// Shows in the progress bar what is being done.
    fn stage(&self, progress: &dyn Progress, layer: usize, what: &str) {
        let n_layers = self.decoder.config.n_layers();
        progress.layer(layer, n_layers, what);
    }
}

/// Adds a layer to every section.
fn add_layer(sections: &mut [Section], mut parts: LayerParts) -> Result<()> {
    for section in sections {
        let name = section.kind.name();
        let part = parts
            .remove(name)
            .ok_or_else(|| Error::internal(format!("internal: a layer has no part for section `{name}`")))?;
        section.add(part)?;
    }
    Ok(())
}
