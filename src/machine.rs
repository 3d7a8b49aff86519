//! The device that does the work, and what happens if it cannot run a model.

use std::sync::Once;

use crate::compute::cuda::driver::Driver;
use crate::compute::device::Device;
use crate::compute::{Precision, pairs};
use crate::cuda::check_model;
use crate::cuda::layers::CudaLayers;
pub use crate::cuda::room::Extent;
use crate::cuda::room::Source;
pub use crate::cuda::sequences::RowsIn;
use crate::env::Reporter;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::method::Method;
use crate::model::Decoder;
use crate::model::forward::{CpuForward, CpuLayers, Forward, Layers};
use crate::runner::{DecodeOptions, Engine};
use crate::weight::Stored;

/// What users are told where a model runs on a GPU, but its caches do not.
pub const ON_CPU: &str = "the KV cache and the selection are on the CPU";

/// A device, and how models run on it.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    /// The device.
    pub device: &'a dyn Device,
    /// Whether a model that the GPU cannot run runs on the CPU; if not, that is an error.
    pub falls_back: bool,
    /// The type in which prompts are multiplied.
    pub precision: Precision,
    /// Which memory holds the cached rows of a model that runs on a GPU.
    pub rows: RowsIn,
    /// Whom to tell where the model runs.
    pub reporter: &'a dyn Reporter,
}

impl<'a> Machine<'a> {
    /// Takes a device that is used whatever the model.
    pub fn new(device: &'a dyn Device, reporter: &'a dyn Reporter) -> Self {
        Self {
            device,
            falls_back: true,
            precision: Precision::Auto,
            rows: RowsIn::Device,
            reporter,
        }
    }

    /// Tells whether the device is a GPU that can run the model.
    ///
    /// # Errors
    /// The GPU cannot run the model, and no other device may; a precision that is not that of the model's weights.
    pub fn can_run(&self, decoder: &Decoder) -> Result<bool> {
        self.check_precision(decoder)?;
        let Some(driver) = self.device.cuda() else {
            return Ok(false);
        };
        match check_model(&decoder.config) {
            Ok(()) => {
                self.warn_of_library(driver, decoder);
                Ok(true)
            }
            Err(e) if self.falls_back => {
                self.reporter.note(&format!("the model runs on the CPU: {e}"));
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Returns the precision for a model on the CPU.
    ///
    /// # Errors
    /// bf16 on a processor that has no instruction for it.
    pub fn on_cpu(&self) -> Result<Precision> {
        if self.precision == Precision::Bf16 {
            pairs::check()?;
        }
        Ok(self.precision)
    }

    /// Fails if what is multiplied with the weights is to be rounded to another type than theirs.
    ///
    /// # Errors
    /// bf16 for weights in another type.
    pub fn check_precision(&self, decoder: &Decoder) -> Result<()> {
        if self.precision != Precision::Bf16 {
            return Ok(());
        }
        let stored = decoder.stored()?;
        if stored != Stored::Float(Float::Bf16) {
            let name = stored.name();
            let wrong =
                format!("⟨precision=bf16⟩ needs weights in BF16, and those of this model are in {name}");
            return Err(Error::usage(wrong).hint("omit ⟨precision⟩"));
        }
        Ok(())
    }

    /// Warns once if the GPU's library for products is missing and the model would use it: products in f32 do not.
    fn warn_of_library(&self, driver: &dyn Driver, decoder: &Decoder) {
        static WARNED: Once = Once::new();
        let is_used = self.precision != Precision::F32 && decoder.embedding.float() != Float::F32;
        if let Some(missing) = driver.missing_library().filter(|_| is_used) {
            WARNED.call_once(|| self.reporter.warn(missing));
        }
    }

    /// Prepares a model to run layer by layer: on the device if that is a GPU that can run it, else on the CPU.
    ///
    /// # Errors
    /// As [`Machine::can_run`]; too little memory on the GPU.
    pub fn layers<'l>(&self, decoder: &'l Decoder) -> Result<Box<dyn Layers + 'l>>
    where
        'a: 'l,
    {
        let on_gpu = self.can_run(decoder)?;
        Ok(match self.device.cuda().filter(|_| on_gpu) {
            Some(driver) => Box::new(CudaLayers::new(driver, decoder, self.precision)?),
            None => Box::new(CpuLayers(decoder, self.on_cpu()?)),
        })
    }

    /// Returns which memory holds the cached rows of a model on the GPU, and tells it if it is not the GPU's; `None` if the
    /// method's caches and selection cannot be there and are on the CPU. `turns` says whether there may be more than one prompt.
    pub fn rows_for(&self, method: &dyn Method, options: &DecodeOptions, turns: bool) -> Option<RowsIn> {
        let rows = Some(self.rows).filter(|rows| rows.can(method, options, turns));
        match rows {
            None => self.reporter.note(ON_CPU),
            Some(RowsIn::Host) => self
                .reporter
                .note("the KV cache is in the machine's memory, the index on the device"),
            Some(RowsIn::Device) => {}
        }
        rows
    }

    /// Opens an engine. On a GPU that can run the model, caches and selection are there too if the method can run there, and rows
    /// where the machine says; otherwise both are on the CPU.
    ///
    /// # Errors
    /// As [`Machine::forward`].
    pub fn engine<'l>(
        &self,
        decoder: &'l Decoder,
        method: &'l dyn Method,
        options: DecodeOptions,
        extent: &Extent,
    ) -> Result<Engine<'l>>
    where
        'a: 'l,
    {
        if self.can_run(decoder)?
            && let Some(driver) = self.device.cuda()
            && let Some(rows) = self.rows_for(method, &options, extent.later_prompts)
        {
            let source = Source {
                driver,
                decoder,
                precision: self.precision,
            };
            let tell = |text: &str| self.reporter.detail(text);
            let sequences = source.sequences((method, options.clone()), rows, extent, &tell)?;
            return Ok(Engine::on_device(Box::new(sequences), options));
        }
        let forward = self.forward(decoder, extent.prompt.end)?;
        Ok(Engine::new(forward, method, options))
    }

    /// Prepares a model for inference with prompts of up to `longest` tokens: on the device if that is a GPU that can run it,
    /// else on the CPU.
    ///
    /// # Errors
    /// As [`Machine::can_run`]; weights that cannot be read; too little memory on the GPU.
    pub fn forward<'l>(&self, decoder: &'l Decoder, longest: usize) -> Result<Box<dyn Forward + 'l>>
    where
        'a: 'l,
    {
        let extent = Extent::up_to(longest);
        let source = |driver| Source {
            driver,
            decoder,
            precision: self.precision,
        };
        let on_gpu = self.can_run(decoder)?;
        Ok(match self.device.cuda().filter(|_| on_gpu) {
            Some(driver) => Box::new(source(driver).forward(&extent, &|text| self.reporter.detail(text))?),
            None => Box::new(CpuForward::with_precision(decoder, self.on_cpu()?)?),
        })
    }
}
