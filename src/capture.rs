//! The calibration pass: all blocks go through one layer before the first goes through the next.
//!
//! Memory holds the hidden states of all tokens and the weights of one layer, however many layers the model has.

use std::ops::Range;

use ndarray::{Array2, s};

use crate::corpus::Corpus;
use crate::env::{self, Progress};
use crate::error::Result;
use crate::model::States;
use crate::model::forward::Layers;

/// A calibration pass between two layers: the hidden states so far, and the layer to run next.
pub struct Capture<'a> {
    layers: &'a dyn Layers,
    corpus: &'a Corpus,
    /// Input of `next_layer`: `[tokens, hidden]`.
    pub hidden: Array2<f32>,
    /// The layer that the next call of [`Capture::layer`] runs.
    pub next_layer: usize,
}

impl<'a> Capture<'a> {
    /// Starts before layer 0, with the tokens' embeddings.
    pub fn start(layers: &'a dyn Layers, corpus: &'a Corpus) -> Result<Self> {
        let hidden = layers.decoder().embed(&corpus.ids)?;
        Ok(Self::at(layers, corpus, hidden, 0))
    }

    /// Resumes before `next_layer`, whose input is `hidden`.
    pub fn at(layers: &'a dyn Layers, corpus: &'a Corpus, hidden: Array2<f32>, next_layer: usize) -> Self {
        Self {
            layers,
            corpus,
            hidden,
            next_layer,
        }
    }

    /// Runs the next layer; `tap` gets each block's range of rows and its pre-RoPE states.
    ///
    /// Of the last layer, only the projections are computed, since nothing reads its output.
    ///
    /// # Errors
    /// An error of `tap`; activations that are not finite; an interrupt.
    pub fn layer(
        &mut self,
        progress: &dyn Progress,
        tap: &mut dyn FnMut(Range<usize>, &States) -> Result<()>,
    ) -> Result<()> {
        let layer = self.layers.open(self.next_layer)?;
        let last = self.next_layer + 1 == self.layers.decoder().config.n_layers();
        for b in 0..self.corpus.n_blocks() {
            env::check()?;
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
