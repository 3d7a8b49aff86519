//! The calibration pass: all blocks go through layer i before any goes through layer i + 1.
//!
//! Resident are the hidden states of all tokens and the pages of one layer's weights, whatever
//! the model's size.

use std::ops::Range;

use ndarray::{Array2, s};

use crate::corpus::Corpus;
use crate::error::Result;
use crate::interrupt;
use crate::model::{Decoder, States};
use crate::progress::Progress;

/// A calibration pass between two layers.
pub struct Capture<'a> {
    decoder: &'a Decoder,
    corpus: &'a Corpus,
    /// Input of `next_layer`: `[tokens, hidden]`.
    pub hidden: Array2<f32>,
    /// The layer that [`Capture::layer`] runs next.
    pub next_layer: usize,
}

impl<'a> Capture<'a> {
    /// Starts at layer 0 with the embedded tokens.
    pub fn start(decoder: &'a Decoder, corpus: &'a Corpus) -> Result<Self> {
        Ok(Self::at(decoder, corpus, decoder.embed(&corpus.ids)?, 0))
    }

    /// Goes on at `next_layer`, whose input is `hidden`.
    pub fn at(decoder: &'a Decoder, corpus: &'a Corpus, hidden: Array2<f32>, next_layer: usize) -> Self {
        Self {
            decoder,
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
        let layer = self.decoder.layer(self.next_layer)?;
        let last = self.next_layer + 1 == self.decoder.config.n_layers;
        for b in 0..self.corpus.n_blocks() {
            interrupt::check()?;
            let rows = self.corpus.block(b);
            let mut hidden = self.hidden.slice_mut(s![rows.clone(), ..]);
            let mut tapped = Ok(());
            if last {
                let states = layer.project(hidden.view());
                self.decoder.check_states(&layer, &states)?;
                tapped = tap(rows.clone(), &states);
            } else {
                layer.forward(&self.decoder.rope, hidden.view_mut(), |states, _| {
                    tapped = tap(rows.clone(), states);
                });
            }
            // The culprit of a NaN is named rather than what the tap found of it.
            self.decoder.check_finite(&layer, hidden.view())?;
            tapped?;
            progress.advance(rows.len() as u64);
        }
        layer.release();
        self.next_layer += 1;
        Ok(())
    }
}
