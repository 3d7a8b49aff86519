//! The forward pass of calibration text with the weights of only one layer on the device at a time, for models larger
//! than the GPU's memory.

use ndarray::{Array3, ArrayView2, ArrayViewMut2, Axis, s};

use super::ROWS;
use super::context::LayerContext;
use super::sizes::{LayerSizes, check_model};
use super::weights::LayerWeights;
use super::work::{Rotation, RowPositions, Workspace};
use crate::compute::Precision;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::layout::{elements, elements_mut};
use crate::error::Result;
use crate::model::forward::{BlockLayer, Layers};
use crate::model::{Decoder, Layer, States};

/// The [`Layers`] of a model on an NVIDIA GPU. Each layer is copied to the device when it is opened.
pub struct CudaLayers<'a> {
    driver: &'a dyn Driver,
    decoder: &'a Decoder,
    precision: Precision,
}

impl<'a> CudaLayers<'a> {
    /// Checks the model. No weights are copied until a layer is opened.
    ///
    /// # Errors
    /// A model whose attention the kernels do not support.
    pub fn new(driver: &'a dyn Driver, decoder: &'a Decoder, precision: Precision) -> Result<Self> {
        check_model(&decoder.config)?;
        Ok(Self {
            driver,
            decoder,
            precision,
        })
    }
}

impl Layers for CudaLayers<'_> {
    fn decoder(&self) -> &Decoder {
        self.decoder
    }

    fn open<'s>(&'s self, index: usize) -> Result<Box<dyn BlockLayer + 's>> {
        let layer = self.decoder.layer(index)?;
        Ok(Box::new(CudaLayer {
            model: self,
            weights: LayerWeights::upload(self.driver, &layer)?,
            sizes: LayerSizes::from_config(&self.decoder.config),
            layer,
        }))
    }
}

/// A layer on the device. Dropping it releases the pages of its weights' file.
struct CudaLayer<'a> {
    model: &'a CudaLayers<'a>,
    layer: Layer,
    weights: LayerWeights<'a>,
    sizes: LayerSizes,
}

impl CudaLayer<'_> {
    /// Computes queries, keys and values of hidden states `[m, hidden]`. Also runs the rest of the layer if the hidden
    /// states are to change.
    fn run(&self, mut hidden: Hidden<'_>) -> Result<States> {
        let (driver, s) = (self.model.driver, &self.sizes);
        let m = hidden.view().nrows();
        let chunk = ROWS.min(m).max(1);
        let work = Workspace::new(driver, *s, self.model.precision, chunk)?;
        let rotation = Rotation::new(driver, self.model.decoder.ropes.layer(self.layer.index), 0, m)?;
        let rows = Buffer::<f32>::new(driver, "hidden states", chunk * s.hidden)?;
        let float = self.model.precision.attended(self.layer.k.weight.float());
        let mut context = match hidden {
            Hidden::Changed(_) => Some(LayerContext::new(driver, s.heads.shape(1, m), float)?),
            Hidden::Read(_) => None,
        };
        let heads = |heads| Array3::zeros((heads, m, s.heads.head_dim));
        let mut states = States {
            q: heads(s.heads.n_heads),
            k: heads(s.heads.n_kv_heads),
            v: heads(s.heads.n_kv_heads),
        };
        for first in (0..m).step_by(chunk) {
            let n = chunk.min(m - first);
            let part = hidden.view().slice_move(s![first..first + n, ..]);
            rows.write(elements(&part))?;
            let at = RowPositions::At { first, apart: 1 };
            work.project(&self.weights, &rows, n, n, &rotation, at)?;
            fetch(&work.heads.q.pre, &mut states.q, first, n)?;
            fetch(&work.heads.k.pre, &mut states.k, first, n)?;
            fetch(&work.heads.v, &mut states.v, first, n)?;
            let (Hidden::Changed(hidden), Some(context)) = (&mut hidden, &mut context) else {
                continue;
            };
            context.append(&work.heads.k.rope, &work.heads.v, n)?;
            context
                .rows
                .attend_prompt(&work.heads.q.rope, first, n, self.weights.window, &work.attended)?;
            work.finish(&self.weights, &rows, n)?;
            let values = rows.read_part(0, n * s.hidden)?;
            let mut part = hidden.slice_mut(s![first..first + n, ..]);
            elements_mut(&mut part).copy_from_slice(&values);
        }
        Ok(states)
    }
}

/// Hidden states that a layer either only reads or replaces by its output.
enum Hidden<'h> {
    Read(ArrayView2<'h, f32>),
    Changed(ArrayViewMut2<'h, f32>),
}

impl Hidden<'_> {
    fn view(&self) -> ArrayView2<'_, f32> {
        match self {
            Self::Read(x) => x.view(),
            Self::Changed(x) => x.view(),
        }
    }
}

impl BlockLayer for CudaLayer<'_> {
    fn project(&self, hidden: ArrayView2<f32>) -> Result<States> {
        let states = self.run(Hidden::Read(hidden))?;
        self.model.decoder.check_states(&self.layer, &states)?;
        Ok(states)
    }

    fn forward(
        &self,
        mut hidden: ArrayViewMut2<f32>,
        tap: &mut dyn FnMut(&States) -> Result<()>,
    ) -> Result<()> {
        let states = self.run(Hidden::Changed(hidden.view_mut()))?;
        // A NaN is reported with the weights that caused it, before the tap can find it in the states.
        self.model.decoder.check_finite(&self.layer, hidden.view())?;
        tap(&states)
    }

    fn finish(&self, mut hidden: ArrayViewMut2<f32>, attended: ArrayView2<f32>) -> Result<()> {
        let (driver, s) = (self.model.driver, &self.sizes);
        let chunk = ROWS.min(hidden.nrows()).max(1);
        let work = Workspace::new(driver, *s, self.model.precision, chunk)?;
        let rows = Buffer::<f32>::new(driver, "hidden states", chunk * s.hidden)?;
        let attended = attended.axis_chunks_iter(Axis(0), chunk);
        for (mut part, attended) in hidden.axis_chunks_iter_mut(Axis(0), chunk).zip(attended) {
            rows.write(elements(&part))?;
            work.attended.write(elements(&attended))?;
            work.finish(&self.weights, &rows, part.nrows())?;
            let values = rows.read_part(0, part.len())?;
            elements_mut(&mut part).copy_from_slice(&values);
        }
        self.model.decoder.check_finite(&self.layer, hidden.view())
    }
}

impl Drop for CudaLayer<'_> {
    fn drop(&mut self) {
        self.layer.release();
    }
}

/// Copies `n` rows of every head, `[heads,n,d]`, from the device into `out`, `[heads,m,d]`, from row `first` on.
pub(crate) fn fetch(from: &Buffer<'_, f32>, out: &mut Array3<f32>, first: usize, n: usize) -> Result<()> {
    let (heads, _, d) = out.dim();
    let values = from.read_part(0, heads * n * d)?;
    for (mut head, values) in out.axis_iter_mut(Axis(0)).zip(values.chunks_exact(n * d)) {
        let mut rows = head.slice_mut(s![first..first + n, ..]);
        elements_mut(&mut rows).copy_from_slice(values);
    }
    Ok(())
}
