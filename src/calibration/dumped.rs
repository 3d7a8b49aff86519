//! One section, fitted to the states of a dump.

use std::ops::Range;
use std::path::Path;

use ndarray::Axis;
use serde_json::{Map, Value};

use super::sections::fit_layer;
use crate::artifact::{
    Artifact, Fit, FitInput, LayerStates, MomentsRead, Section, SectionKind, SectionManifest,
};
use crate::compute::device::Device;
use crate::dump::moments::Moments;
use crate::dump::{Dump, LayerDump, State};
use crate::env::Reporter;
use crate::error::{Error, Result};
use crate::kv::Qkv;
use crate::method::a2ats::CODEWORDS;
use crate::method::sections::SECTIONS;
use crate::model::rope::Rope;
use crate::stats::moments::{LayerMoments, Position, QuerySums};

/// What decides a section that is fitted to a dump.
#[derive(Clone, Debug)]
pub struct DumpSettings<'a> {
    /// The section.
    pub kind: &'static dyn SectionKind,
    /// The parameters of its fit by name; those that are missing have their defaults.
    pub values: Map<String, Value>,
    /// The file of the queries' moments; by default they are those of the dump.
    pub moments: Option<&'a Path>,
    /// The relative position to which queries are rotated, where the section chooses it; by default that of the moments.
    pub wrope_position: Option<usize>,
    /// The seed of all random choices.
    pub seed: u64,
}

/// A section of a dump that is ready to be fitted.
pub struct DumpFit<'a> {
    dump: &'a Dump,
    moments: MomentsSource,
    fit: Box<dyn Fit>,
    reporter: &'a dyn Reporter,
}

impl<'a> DumpFit<'a> {
    /// Prepares the fit.
    ///
    /// # Errors
    /// A dump without the states that the section is made of; moments of another dump; parameters out of range; too little
    /// text.
    pub fn new(dump: &'a Dump, settings: &DumpSettings, reporter: &'a dyn Reporter) -> Result<Self> {
        let facts = settings.kind.facts();
        if facts.reads_queries {
            dump.check_queries()?;
        }
        if facts.reads_values {
            dump.check_values()?;
        }
        let moments = MomentsSource::find(dump, settings)?;
        let input = FitInput {
            seed: settings.seed,
            position: moments.position(dump),
            block_start: &dump.corpus.block_start,
            seq_len: dump.origin.calibration.seq_len,
            kept: &dump.kept,
            windows: &dump.origin.model.windows,
            head_dim: dump.sizes.head_dim,
            codewords: CODEWORDS,
            reporter,
        };
        Ok(Self {
            dump,
            fit: settings.kind.fit(settings.values.clone(), &input)?,
            moments,
            reporter,
        })
    }

    /// Returns the section of some layers, still empty.
    ///
    /// # Errors
    /// As [`Section::of_layers`].
    pub fn section(&self, layers: Range<usize>, device: &dyn Device) -> Result<Section> {
        Section::of_layers(self.fit.as_ref(), self.dump.sizes, layers, device)
    }

    /// Tells whether `path` is the complete file of this section.
    ///
    /// # Errors
    /// The file is another one, or damaged.
    pub fn is_done(&self, path: &Path, section: &Section) -> Result<bool> {
        if !path.exists() {
            return Ok(false);
        }
        let (found, origin) = (Artifact::open_part(path, SECTIONS)?, &self.dump.origin);
        found.verify()?;
        let manifest = &found.manifest;
        let params = |of: &SectionManifest| (of.device.clone(), of.adapter.clone(), of.params.clone());
        let own = manifest.sections.get(section.kind.name()).map(params);
        let is_same = [
            ("model", manifest.origin.model == origin.model),
            ("text", manifest.origin.calibration == origin.calibration),
            ("precision", manifest.origin.precision == origin.precision),
            (
                "version of kvsmith",
                manifest.tool_version == env!("CARGO_PKG_VERSION"),
            ),
            ("layers", found.layers == section.layers),
            (
                "section, options or device",
                own == Some(params(&section.manifest)),
            ),
        ];
        match is_same.iter().find(|(_, same)| !same) {
            None => Ok(true),
            Some((what, _)) => {
                let error = Error::usage(format!("{} exists, and its {what} differs", path.display()));
                Err(error.hint("remove it, or choose another name with ⟨output⟩"))
            }
        }
    }

    /// Fits the layers of a section.
    ///
    /// # Errors
    /// States that are damaged or not finite; the device fails; cancelled work.
    pub fn run(&self, section: &mut Section, device: &dyn Device) -> Result<()> {
        let (dump, fit) = (self.dump, self.fit.as_ref());
        let (sizes, model) = (dump.sizes, &dump.origin.model);
        let ropes = model.ropes();
        let layers = section.layers.clone();
        let progress = self
            .reporter
            .progress((layers.len() * sizes.n_kv_heads) as u64, "heads");
        for layer in layers {
            progress.layer(layer, sizes.n_layers, fit.kind().facts().stage);
            let (file, rope) = (dump.layer(layer)?, ropes.layer(layer));
            let (moments, sums) = self.moments.of_layer(layer, &file, fit.reads_pre_sums(), rope)?;
            let states = LayerStates {
                layer,
                sizes,
                window: model.windows[layer],
                device,
                read: Qkv {
                    q: &|head| {
                        let all = file.read(State::QPre, head, 0, dump.n)?;
                        Ok(all.select(Axis(0), fit.query_rows()))
                    },
                    k: &|head| file.read(State::KPre, head, 0, dump.n),
                    v: &|head| file.read(State::V, head, 0, dump.n),
                },
                moments: moments.as_ref(),
                sums: sums.as_ref(),
                block_start: &dump.corpus.block_start,
                kept: &dump.kept,
                rope,
            };
            section.add(fit_layer(fit, &states, progress.as_ref(), 1)?)?;
        }
        Ok(())
    }
}

/// Where a fit's query moments come from.
enum MomentsSource {
    /// The fit reads none.
    Nothing,
    /// A file with those of all layers.
    File(Box<Moments>),
    /// The sums of every block, which the shards of a dump have beside the states; taken at this position.
    Blocks(Position),
}

impl MomentsSource {
    /// Finds where the moments come from: the file that was given, or the dump.
    fn find(dump: &Dump, settings: &DumpSettings) -> Result<Self> {
        let position = match (settings.kind.facts().moments, settings.wrope_position) {
            (MomentsRead::Nothing, _) => return Ok(Self::Nothing),
            (MomentsRead::Own, _) => Some(Position::Own),
            (MomentsRead::Chosen, b) => b.map(Position::Windowed),
        };
        let moments = match settings.moments {
            None if dump.is_sharded() => {
                let own = Position::Windowed(dump.options.wrope_position);
                return Ok(Self::Blocks(position.unwrap_or(own)));
            }
            None => dump.moments()?,
            Some(path) => {
                let moments = Moments::read(path, dump.sizes)?;
                if moments.origin != dump.origin || moments.shard.is_some() {
                    let error = Error::mismatch(format!("{} was not made from this dump", path.display()));
                    return Err(error.hint("give a moments file that was made from the same dump"));
                }
                moments
            }
        };
        let moments = match position {
            Some(position) => moments.at(position)?,
            None => moments,
        };
        Ok(Self::File(Box::new(moments)))
    }

    /// Returns the position to which the queries are rotated; that of the dump if the fit reads no moments.
    fn position(&self, dump: &Dump) -> Position {
        match self {
            Self::Nothing => Position::Windowed(dump.options.wrope_position),
            Self::File(moments) => moments.position,
            Self::Blocks(position) => *position,
        }
    }

    /// Returns the moments of a layer, and the sums from which those under other rotations follow if `with_sums` is set.
    fn of_layer(
        &self,
        layer: usize,
        states: &LayerDump,
        with_sums: bool,
        rope: &Rope,
    ) -> Result<(Option<LayerMoments>, Option<QuerySums>)> {
        match self {
            Self::Nothing => Ok((None, None)),
            Self::File(moments) => {
                let sums = with_sums.then(|| moments.sums()).transpose()?;
                Ok((
                    Some(moments.layers[layer].clone()),
                    sums.map(|sums| sums[layer].clone()),
                ))
            }
            Self::Blocks(position) => {
                let sums = states.sums()?;
                Ok((Some(sums.at(*position, rope)), Some(sums)))
            }
        }
    }
}
