//! The calibration pass: all blocks go through layer i before any goes through layer i + 1.
//!
//! Resident are the hidden states of all tokens and the pages of one layer's weights, whatever
//! the model's size.

use std::ops::Range;

use ndarray::{Array2, s};

use crate::corpus::Corpus;
use crate::error::Result;
use crate::interrupt;
use crate::model::States;
use crate::model::forward::Layers;
use crate::progress::Progress;

/// A calibration pass between two layers.
pub struct Capture<'a> {
    layers: &'a dyn Layers,
    corpus: &'a Corpus,
    /// Input of `next_layer`: `[tokens, hidden]`.
    pub hidden: Array2<f32>,
    /// The layer that [`Capture::layer`] runs next.
    pub next_layer: usize,
}

impl<'a> Capture<'a> {
    /// Starts at layer 0 with the embedded tokens.
    pub fn start(layers: &'a dyn Layers, corpus: &'a Corpus) -> Result<Self> {
        let hidden = layers.decoder().embed(&corpus.ids)?;
        Ok(Self::at(layers, corpus, hidden, 0))
    }

    /// Goes on at `next_layer`, whose input is `hidden`.
    pub fn at(layers: &'a dyn Layers, corpus: &'a Corpus, hidden: Array2<f32>, next_layer: usize) -> Self {
        Self {
            layers,
            corpus,
            hidden,
            next_layer,
        }
    }

    /// Runs one layer; `tap` gets each block's rows and its pre-RoPE states.
    ///
    /// The last layer only projects: nothing reads its output.
    ///
    /// # Errors
    /// What `tap` returns; activations that are not finite; an interrupt.
    pub fn layer(
        &mut self,
        progress: &Progress,
        tap: &mut dyn FnMut(Range<usize>, &States) -> Result<()>,
    ) -> Result<()> {
        let layer = self.layers.open(self.next_layer)?;
        let last = self.next_layer + 1 == self.layers.decoder().config.n_layers;
        for b in 0..self.corpus.n_blocks() {
            interrupt::check()?;
            let rows = self.corpus.block(b);
            let mut hidden = self.hidden.slice_mut(s![rows.clone(), ..]);
            if last {
                tap(rows.clone(), &layer.project(hidden.view())?)?;
            } else {
                layer.forward(hidden.view_mut(), &mut |states| tap(rows.clone(), states))?;
            }
            progress.advance(rows.len() as u64);
        }
        self.next_layer += 1;
        Ok(())
    }
}
