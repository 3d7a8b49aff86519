//! The declaration of a section, and a section under construction.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;

use half::f16;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{HeadReport, LayerStates, Report, SectionManifest, SectionView};
use crate::compute::cpu::Cpu;
use crate::compute::device::Device;
use crate::env::Reporter;
use crate::error::{Error, Result};
use crate::model::Sizes;
use crate::parameters::ParameterSet;
use crate::stats::moments::Position;
use crate::store::{Element, Spec, to_bytes};

/// The sections that an artifact may have, in the order in which calibration makes them.
pub type Sections = &'static [&'static dyn SectionKind];

/// Which query moments a fit reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentsRead {
    /// No moments.
    Nothing,
    /// The moments at the position that the user chose.
    Chosen,
    /// The moments with each query rotated to its own position.
    Own,
}

/// The fixed facts of a section.
#[derive(Debug)]
pub struct Facts {
    /// Name in the manifest and prefix of the tensors.
    pub name: &'static str,
    /// Command that makes the section from a dump.
    pub command: &'static str,
    /// Summary of that command.
    pub about: &'static str,
    /// What `calibrate` calls the section while it works on it.
    pub stage: &'static str,
    /// Which query moments the fit reads.
    pub moments: MomentsRead,
    /// Whether the fit reads queries, namely the rows of [`Fit::query_rows`].
    pub reads_queries: bool,
    /// Whether the fit reads values.
    pub reads_values: bool,
    /// Whether the fit runs on the CPU whatever the device.
    pub cpu_only: bool,
    /// Whether the section knows only positions, or distances, within the blocks of the calibration.
    pub position_bound: bool,
    /// Whether `calibrate` makes the section only if it is asked for the sections of peers.
    pub on_request: bool,
}

/// What some heads are, and their layers and KV heads.
pub type Notable = (&'static str, Vec<(usize, usize)>);

/// The declaration of a section: everything that commands and files need to know of it.
pub trait SectionKind: Debug + Sync {
    /// The fixed facts.
    fn facts(&self) -> &'static Facts;

    /// The parameters of the fit.
    fn parameters(&self) -> ParameterSet {
        ParameterSet::NONE
    }

    /// Names the parameter whose null leaves the section out of a calibration, if there is one.
    fn left_out_by(&self) -> Option<&'static str> {
        None
    }

    /// Prepares the fit with these parameters, which are by name; absent ones have their defaults. Warns if the text is too
    /// short for it.
    ///
    /// # Errors
    /// Parameters out of range, too few rows.
    fn fit(&self, values: Map<String, Value>, input: &FitInput) -> Result<Box<dyn Fit>>;

    /// The tensors, layer axis in front.
    ///
    /// # Errors
    /// Parameters that are not valid.
    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>>;

    /// Checks the values of the tensors.
    ///
    /// # Errors
    /// Values that no fit can produce.
    fn check(&self, section: &SectionView) -> Result<()>;

    /// Describes the fit in a few words, for the summary of `inspect`.
    fn describe(&self, section: &SectionView) -> Result<String>;

    /// Shows the quality reports as the table of `inspect`.
    fn table(&self, reports: &[HeadReport]) -> Result<String>;

    /// Lists the heads that the section serves worst, for `inspect`; empty if no report has anything to say.
    ///
    /// # Errors
    /// A quality report or a parameter that is not valid.
    fn weak_heads(&self, _section: &SectionView, _reports: &[HeadReport]) -> Result<String> {
        Ok(String::new())
    }

    /// Lists heads that `inspect` names for another reason, by layer and KV head, and says what they are, if the section knows
    /// of any kind.
    ///
    /// # Errors
    /// A quality report that is not valid.
    fn notable_heads(&self, _reports: &[HeadReport]) -> Result<Option<Notable>> {
        Ok(None)
    }

    /// Returns whether the section marks heads whose calibration keys are all equal, so that its method attends these
    /// heads in full.
    fn marks_constant_heads(&self) -> bool {
        true
    }

    /// Name in the manifest and prefix of the tensors.
    fn name(&self) -> &'static str {
        self.facts().name
    }

    /// Makes the error about a parameter of a section whose form was removed after an earlier version.
    fn removed(&self, parameter: &str, value: &Value) -> Error {
        let (name, command) = (self.name(), self.facts().command);
        let message = format!("`sections.{name}.{parameter}` is {value}, a form that was removed");
        Error::unsupported(message).hint(format!(
            "fit the section again with `kvsmith {command} ⟨dump=DIR⟩ ⟨output=FILE⟩`, or the artifact with `kvsmith calibrate`"
        ))
    }

    /// Chooses the device of the fit for a calibration on `device`.
    fn device<'a>(&self, device: &'a dyn Device) -> &'a dyn Device {
        if self.facts().cpu_only { &Cpu } else { device }
    }
}

/// What a fit knows before the first layer.
pub struct FitInput<'a> {
    /// Seeds every random choice.
    pub seed: u64,
    /// The position to which the queries of the moments are rotated.
    pub position: Position,
    /// The first row of each block, then n.
    pub block_start: &'a [u32],
    /// Most rows per block.
    pub seq_len: usize,
    /// Which rows take part in the fit, `[n]`; the others are held out.
    pub kept: &'a [bool],
    /// The sliding window of every layer.
    pub windows: &'a [Option<usize>],
    /// Number of channels per head, d.
    pub head_dim: usize,
    /// Number of codewords of a codebook whose size no flag sets.
    pub codewords: usize,
    /// Receives warnings.
    pub reporter: &'a dyn Reporter,
}

/// A section's fit with its parameters.
pub trait Fit {
    /// The section.
    fn kind(&self) -> &'static dyn SectionKind;

    /// The section's parameters in the manifest.
    fn params(&self) -> Result<Map<String, Value>>;

    /// The rows of the text whose queries the fit reads, ascending.
    fn query_rows(&self) -> &[usize] {
        &[]
    }

    /// Returns how many times the fit of a layer reads the keys of each head.
    fn key_reads(&self) -> usize {
        1
    }

    /// Returns whether the fit reads the sums over queries before rotation, in addition to the moments or in place of
    /// them.
    fn reads_pre_sums(&self) -> bool {
        false
    }

    /// Returns the command that makes the section from a dump, with the settings that it needs to give the section
    /// that `calibrate` gives by default.
    fn command(&self) -> String {
        self.kind().facts().command.to_owned()
    }

    /// Returns the bytes of memory that the fit of a layer takes, besides the layer's states and the results.
    fn working_bytes(&self, text: &FitText) -> usize;

    /// Fits one layer.
    ///
    /// # Errors
    /// The states cannot be read, the device fails, or the section cannot hold a value.
    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart>;
}

/// The sizes of a calibration, from which the memory of a fit follows.
pub struct FitText<'a> {
    /// Rows of the text.
    pub n: usize,
    /// Rows that take part in the fit.
    pub n_kept: usize,
    /// Rows of the longest block.
    pub longest_block: usize,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// The device of the calibration.
    pub device: &'a dyn Device,
    /// Threads of the CPU.
    pub threads: usize,
    /// Bytes that reading a head takes besides its rows as f32: those of its file.
    pub read_bytes: usize,
    /// Bytes that reading the queries of a head takes besides the rows that the fit asks for.
    pub query_read_bytes: usize,
}

impl FitText<'_> {
    /// Returns the peak bytes of reading the keys of `heads` heads into kept and held-out rows.
    pub fn split_bytes(&self, heads: usize) -> usize {
        let rows = self.n * size_of::<usize>();
        let keys = self.n * self.sizes.head_dim * size_of::<f32>();
        // The head that is being read is in memory twice.
        rows + (heads + 1) * keys + self.read_bytes
    }
}

/// Called after each fitted KV head, with the head's index and, if there is something to say, a line for `-v`.
pub type HeadDone<'a> = &'a mut dyn FnMut(usize, Option<String>);

/// The entry that marks the report of a head whose keys are all equal; reports of other heads lack it.
pub(super) const CONSTANT: &str = "constant";

/// One layer's part of a section.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerPart {
    /// Little-endian data by tensor name.
    pub tensors: BTreeMap<String, Vec<u8>>,
    /// Quality reports, per KV head.
    pub quality: Vec<Report>,
}

/// The parts of one layer by section name.
pub type LayerParts = BTreeMap<&'static str, LayerPart>;

impl LayerPart {
    /// Appends the values of the next head to a tensor.
    pub fn put<T: Element>(&mut self, tensor: &str, values: &[T]) {
        let data = self.tensors.entry(tensor.to_string()).or_default();
        data.extend(to_bytes(values));
    }

    /// Marks heads whose keys are all equal.
    pub fn mark_constant(&mut self, heads: &[usize]) {
        for head in heads {
            self.quality[*head].insert(CONSTANT.to_owned(), true.into());
        }
    }
}

/// A section under construction; it is complete once each of its layers has been added.
pub struct Section {
    /// Its declaration.
    pub kind: &'static dyn SectionKind,
    /// The layers that it has: all of them, or a part that `pack` joins with others.
    pub layers: Range<usize>,
    /// What the manifest says about the section; the digests are added when it is written.
    pub manifest: SectionManifest,
    /// Its tensors, layer axis in front.
    pub specs: Vec<Spec>,
    /// Data of the layers so far, in the order of `specs`.
    pub(super) data: Vec<Vec<u8>>,
    /// Quality reports of the layers so far.
    pub(super) quality: Vec<Vec<Report>>,
}

impl Section {
    /// Makes a section without layers, to be fitted on `device`, or on the CPU if the fit runs there only.
    pub fn new(fit: &dyn Fit, sizes: Sizes, device: &dyn Device) -> Result<Self> {
        Self::of_layers(fit, sizes, 0..sizes.n_layers, device)
    }

    /// Does what [`Section::new`] does for some of the layers.
    pub fn of_layers(fit: &dyn Fit, sizes: Sizes, layers: Range<usize>, device: &dyn Device) -> Result<Self> {
        let (kind, params) = (fit.kind(), fit.params()?);
        let device = kind.device(device);
        let specs = part_specs(kind.specs(&params, sizes)?, layers.len());
        Ok(Self {
            kind,
            layers,
            manifest: SectionManifest {
                device: device.name().to_string(),
                adapter: device.adapter(),
                sha256: BTreeMap::new(),
                params,
            },
            data: vec![Vec::new(); specs.len()],
            specs,
            quality: Vec::new(),
        })
    }

    /// Describes the tensors of one layer, with a leading axis of 1.
    pub fn layer_specs(&self) -> Vec<Spec> {
        part_specs(self.specs.clone(), 1)
    }

    /// Adds the next layer.
    ///
    /// # Errors
    /// A part that does not have exactly the section's tensors.
    pub fn add(&mut self, mut part: LayerPart) -> Result<()> {
        for (spec, data) in self.layer_specs().iter().zip(&mut self.data) {
            let bytes = part.tensors.remove(&spec.name).unwrap_or_default();
            if Some(bytes.len()) != spec.bytes() {
                return Err(Error::internal(format!(
                    "internal: a layer gives {} bytes for tensor `{}`",
                    bytes.len(),
                    spec.name
                )));
            }
            check_finite(spec, &bytes, self.layers.start + self.quality.len())?;
            data.extend(bytes);
        }
        if let Some(name) = part.tensors.keys().next() {
            return Err(Error::internal(format!(
                "internal: section `{}` has no tensor `{name}`",
                self.kind.name()
            )));
        }
        let layer = self.layers.start + self.quality.len();
        check_observed(self.kind.name(), layer, &part.quality)?;
        self.quality.push(part.quality);
        Ok(())
    }
}

/// Describes the same tensors for a part of the layers.
pub(super) fn part_specs(mut specs: Vec<Spec>, layers: usize) -> Vec<Spec> {
    specs.iter_mut().for_each(|spec| spec.shape[0] = layers);
    specs
}

/// Fails if a tensor with axes (layer, head, ...) has a value that is not finite. `bytes` begins at layer `first`.
pub(super) fn check_finite(spec: &Spec, bytes: &[u8], first: usize) -> Result<()> {
    let finite = |bytes: &[u8]| match spec.dtype {
        Dtype::F16 => values::<f16>(bytes).all(f16::is_finite),
        Dtype::F32 => values::<f32>(bytes).all(f32::is_finite),
        _ => true,
    };
    let heads = spec.shape.get(1).copied().unwrap_or(1);
    let size = spec.shape.iter().skip(2).product::<usize>() * spec.dtype.bitsize() / 8;
    let Some(at) = bytes.chunks(size.max(1)).position(|head| !finite(head)) else {
        return Ok(());
    };
    let (layer, head) = (first + at / heads.max(1), at % heads.max(1));
    Err(Error::damaged(format!(
        "tensor `{}` contains a NaN or infinite value in layer {layer}, head {head}",
        spec.name
    ))
    .hint("the keys, queries or values of this head are not finite or have extreme outliers; check the model and the text"))
}

/// Reads little-endian values.
fn values<T: Element>(bytes: &[u8]) -> impl Iterator<Item = T> {
    let values = bytes.chunks_exact(size_of::<T>());
    values.map(bytemuck::pod_read_unaligned)
}

/// Fails if the report of a head says that the fit saw no keys of it.
pub(super) fn check_observed(section: &str, layer: usize, reports: &[Report]) -> Result<()> {
    match reports
        .iter()
        .position(|report| report.get("keys") == Some(&json!(0)))
    {
        None => Ok(()),
        Some(head) => Err(Error::invalid(format!(
            "section `{section}`: no keys were observed for layer {layer}, KV head {head}"
        ))
        .hint("calibrate with more text or a smaller ⟨holdout⟩, so that not everything is held out")),
    }
}
