//! The decoder's passes, with the caches left to the caller: a prompt with exact attention, and one
//! token of one or more trajectories.

use ndarray::{Array1, Array2, Array3, ArrayViewMut3, Axis, s};

use crate::compute::attention;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model::decoder::{rotate, rotated};
use crate::model::rope::RopeTable;
use crate::model::{Decoder, Layer};

/// A model with the views of its layers.
pub struct Trunk<'a> {
    /// The model.
    pub decoder: &'a Decoder,
    /// Its layers.
    pub layers: Vec<Layer>,
}

/// States of m rows of one layer, on both sides of the rotation.
pub struct Rows {
    /// `[h,m,d]`; empty in a prompt pass, which reads the rotated ones alone.
    pub q_pre: Array3<f32>,
    /// `[h,m,d]`.
    pub q_rope: Array3<f32>,
    /// `[g,m,d]`.
    pub k_pre: Array3<f32>,
    /// `[g,m,d]`.
    pub k_rope: Array3<f32>,
    /// `[g,m,d]`.
    pub v: Array3<f32>,
}

/// What a prompt's queries attend: keys and values of every position, `[g, first + m, d]`.
pub struct Context {
    /// Rotated queries of the prompt, `[h,m,d]`.
    pub q_rope: Array3<f32>,
    /// Rotated keys.
    pub keys: Array3<f32>,
    /// Values.
    pub values: Array3<f32>,
}

/// Fills the attention output of a layer, `[trajectories,h,d]`, from its index and its rows.
pub type Attend<'f> = dyn FnMut(usize, &Layer, &Rows, ArrayViewMut3<f32>) -> Result<()> + 'f;

impl<'a> Trunk<'a> {
    /// The layers of a model.
    pub fn new(decoder: &'a Decoder) -> Result<Self> {
        let layers = (0..decoder.config.n_layers).map(|i| decoder.layer(i));
        Ok(Self {
            decoder,
            layers: layers.collect::<Result<_>>()?,
        })
    }

    /// Runs a prompt whose first row stands at position `first`; `cache` takes in the rows of each layer
    /// and gives back what they attend. Returns the logits after the last row: `[vocab]`.
    ///
    /// # Errors
    /// An empty prompt, an id outside the vocabulary, activations that are not finite.
    pub fn prompt(
        &self,
        ids: &[u32],
        first: usize,
        cache: &mut dyn FnMut(usize, Rows) -> Context,
    ) -> Result<Array1<f32>> {
        if ids.is_empty() {
            return Err(Error::failed("the prompt has no tokens"));
        }
        let m = ids.len();
        let mut hidden = self.decoder.embed(ids)?;
        let table = self.decoder.rope.table(first..first + m);
        for (index, layer) in self.layers.iter().enumerate() {
            interrupt::check()?;
            let mut states = layer.project(hidden.view());
            self.decoder.check_states(layer, &states)?;
            let k_rope = rotated(&states.k_pre, &table, 0..m);
            rotate(&mut states.q_pre, &table, 0..m);
            let context = cache(
                index,
                Rows {
                    q_pre: Array3::zeros((0, 0, 0)),
                    q_rope: states.q_pre,
                    k_pre: states.k_pre,
                    k_rope,
                    v: states.v,
                },
            );
            // Of the last layer, only the last position is read.
            let skipped = if index + 1 == self.layers.len() { m - 1 } else { 0 };
            let mut attended = Array2::zeros((m - skipped, context.q_rope.len() / m));
            attention::causal(
                context.q_rope.slice(s![.., skipped.., ..]),
                context.keys.view(),
                context.values.view(),
                first + skipped,
                layer.window,
                attended.view_mut(),
            );
            drop(context);
            let mut rows = hidden.slice_mut(s![skipped.., ..]);
            layer.finish(rows.view_mut(), attended.view());
            self.decoder.check_finite(layer, rows.view())?;
        }
        self.decoder.logits(hidden.row(m - 1))
    }

    /// Feeds one token per trajectory, all at position `t`; `attend` fills the attention output of each
    /// layer, `[trajectories,h,d]`. Returns the last hidden states, `[trajectories, hidden]`.
    pub fn step(&self, ids: &[u32], t: usize, attend: &mut Attend) -> Result<Array2<f32>> {
        let mut hidden = self.decoder.embed(ids)?;
        let table = self.decoder.rope.table(t..t + 1);
        for (index, layer) in self.layers.iter().enumerate() {
            let states = layer.project(hidden.view());
            let rows = Rows {
                q_rope: at_first(&states.q_pre, &table),
                k_rope: at_first(&states.k_pre, &table),
                q_pre: states.q_pre,
                k_pre: states.k_pre,
                v: states.v,
            };
            let (h, _, d) = rows.q_rope.dim();
            let mut attended = Array3::<f32>::zeros((ids.len(), h, d));
            attend(index, layer, &rows, attended.view_mut())?;
            let attended = attended
                .into_shape_with_order((ids.len(), h * d))
                .map_err(|e| Error::failed(e.to_string()))?;
            layer.finish(hidden.view_mut(), attended.view());
            self.decoder.check_finite(layer, hidden.view())?;
        }
        Ok(hidden)
    }
}

/// Every vector rotated to the first position of the table.
fn at_first(x: &Array3<f32>, table: &RopeTable) -> Array3<f32> {
    let mut y = x.clone();
    for mut vector in y.lanes_mut(Axis(2)) {
        if let Some(vector) = vector.as_slice_mut() {
            table.rotate(vector, 0);
        }
    }
    y
}
