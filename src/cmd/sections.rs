//! The commands that make one section from a dump (`codebook`, `signs`, `priors`, ...), and the flags of all
//! sections. What differs between sections is in their declarations.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches, value_parser};
use ndarray::Axis;
use serde_json::{Map, Value, json};

use super::parameters::{flag_names, flags, values};
use super::share::{LayerShare, environment, parse_layers};
use super::task::Task;
use super::{finish, output};
use crate::artifact::{
    self, Artifact, Facts, Fit, FitInput, LayerStates, MomentsRead, Section, SectionKind, SectionManifest,
};
use crate::calibration::{SectionChoice, fit_layer};
use crate::cmd::args::Global;
use crate::cmd::flags::parse_count;
use crate::cmd::terminal::{Log, with_flags};
use crate::compute::Workload;
use crate::compute::cpu::Cpu;
use crate::compute::device::Device;
use crate::corpus::Origin;
use crate::dump::moments::Moments;
use crate::dump::{Dump, LayerDump, State};
use crate::env::Progress as _;
use crate::error::{Error, Result};
use crate::heap;
use crate::method::a2ats::CODEWORDS;
use crate::method::sections::SECTIONS;
use crate::model::rope::Rope;
use crate::stats::moments::{LayerMoments, Position, QuerySums};

/// Name of the flag for the position of the moments.
const WROPE_POSITION: &str = "wrope-position";
/// Name of the flag for the layers to fit.
const LAYERS: &str = "layers";
/// Name of the flag that asks for the sections that are made on request.
const PEERS: &str = "peers";

/// The flag that names the sections to make.
const NAMED: &str = "sections";

type ParseResult<T> = std::result::Result<T, clap::Error>;

/// The flags of the fits of all sections.
#[derive(Clone, Debug)]
pub struct SectionFlags(pub SectionChoice);

/// Lists the flags of each section, without their dashes.
pub fn section_flags() -> impl Iterator<Item = (&'static str, Vec<String>)> {
    SECTIONS
        .iter()
        .map(|kind| (kind.name(), flag_names(&kind.parameters())))
}

impl clap::Args for SectionFlags {
    fn augment_args(command: Command) -> Command {
        let named = SECTIONS.iter().map(|kind| kind.facts());
        let (peers, usual): (Vec<_>, Vec<_>) = named.partition(|facts| facts.on_request);
        let names = |of: &[&Facts]| of.iter().map(|facts| facts.name).collect::<Vec<_>>();
        let all = PossibleValuesParser::new([names(&usual), names(&peers)].concat());
        let sections = Arg::new(NAMED)
            .long(NAMED)
            .value_name("A,B")
            .value_delimiter(',')
            .value_parser(all)
            .help(format!("Sections to make (default: {})", names(&usual).join(",")));
        let command = command.arg(sections.help_heading("Sections"));
        let named = names(&peers);
        let help = format!(
            "Also make the sections of methods that are here to be compared with: {}",
            named.join(", ")
        );
        let peers = Arg::new(PEERS).long(PEERS).action(ArgAction::SetTrue).help(help);
        let command = command.arg(peers.help_heading("Sections"));
        SECTIONS
            .iter()
            .fold(command, |command, kind| flags(command, &kind.parameters()))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SectionFlags {
    fn from_arg_matches(matches: &ArgMatches) -> ParseResult<Self> {
        let values = |kind: &&dyn SectionKind| (kind.name().to_owned(), values(&kind.parameters(), matches));
        Ok(Self(SectionChoice {
            named: matches.get_many(NAMED).map(|names| names.cloned().collect()),
            peers: matches.get_flag(PEERS),
            parameters: SECTIONS.iter().map(values).collect(),
        }))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> ParseResult<()> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// A command that makes one section from a dump.
#[derive(Debug)]
pub struct SectionCommand {
    kind: &'static dyn SectionKind,
    dump: Vec<PathBuf>,
    layers: Option<LayerShare>,
    moments: Option<PathBuf>,
    wrope_position: Option<usize>,
    output: PathBuf,
    /// The parameters of the fit.
    values: Map<String, Value>,
}

impl clap::Subcommand for SectionCommand {
    fn augment_subcommands(command: Command) -> Command {
        let commands = SECTIONS.iter().map(|kind| describe(*kind));
        command.subcommands(commands)
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        SECTIONS.iter().any(|kind| kind.facts().command == name)
    }
}

/// Describes the command of a section.
fn describe(kind: &dyn SectionKind) -> Command {
    let facts = kind.facts();
    let file = |name: &'static str, value: &'static str| {
        let arg = Arg::new(name).long(name).value_name(value);
        arg.value_parser(value_parser!(PathBuf))
    };
    let dump = match (facts.reads_queries, facts.reads_values) {
        (true, true) => "Dump folder, or the folders of all shards of a dump; made with --queries --values",
        (true, false) => {
            "Dump folder, or the folders of all shards of a dump; made with --queries (values are not read)"
        }
        (false, _) => "Dump folder, or the folders of all shards of a dump",
    };
    let layers = Arg::new(LAYERS)
        .long(LAYERS)
        .value_name("A..B|J/M|auto|auto/M")
        .value_parser(parse_layers)
        .help("Fit only layers A to B - 1, as one task of many; `pack` joins the parts. J/M takes the J-th of M parts of about equal length, from 0. auto takes J and M from a Slurm job array; auto/M takes J from Slurm or from a Kubernetes Indexed Job. If the output is already this part, the command ends without work");
    let moments = "Moments file made from this dump, such as one made on another device (default: the dump's own moments)";
    let moments = file("moments", "FILE").help(moments);
    let position = Arg::new(WROPE_POSITION)
        .long(WROPE_POSITION)
        .value_name("P")
        .value_parser(parse_count)
        .help("WRoPE position: relative position, in tokens, to which queries are rotated (default: the position of the moments)");
    let command = Command::new(facts.command)
        .arg(file("dump", "DIR").help(dump).required(true).num_args(1..))
        .arg(layers)
        .args((facts.moments != MomentsRead::Nothing).then_some(moments))
        .args((facts.moments == MomentsRead::Chosen).then_some(position))
        .arg(
            file("output", "FILE")
                .short('o')
                .help("Section file to write")
                .required(true),
        );
    flags(command, &kind.parameters()).about(with_flags(facts.about).into_owned())
}

impl FromArgMatches for SectionCommand {
    fn from_arg_matches(matches: &ArgMatches) -> ParseResult<Self> {
        let unknown = || clap::Error::new(clap::error::ErrorKind::InvalidSubcommand);
        let missing = || clap::Error::new(clap::error::ErrorKind::MissingRequiredArgument);
        let (name, flags) = matches.subcommand().ok_or_else(unknown)?;
        let kind = SECTIONS.iter().find(|kind| kind.facts().command == name);
        let kind = *kind.ok_or_else(unknown)?;
        let file = |name: &str| flags.get_one::<PathBuf>(name).cloned();
        let read = kind.facts().moments;
        let moments = (read != MomentsRead::Nothing).then(|| file("moments"));
        let position = (read == MomentsRead::Chosen).then(|| flags.get_one(WROPE_POSITION).copied());
        Ok(Self {
            kind,
            dump: flags.get_many("dump").ok_or_else(missing)?.cloned().collect(),
            layers: flags.get_one(LAYERS).cloned(),
            moments: moments.flatten(),
            wrope_position: position.flatten(),
            output: file("output").ok_or_else(missing)?,
            values: values(&kind.parameters(), flags),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> ParseResult<()> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl SectionCommand {
    /// Runs the command.
    pub fn run(&self, global: &Global) -> Result<()> {
        heap::return_large_allocations();
        let Some(layers) = &self.layers else {
            return self.fit(global, None);
        };
        let part = layers.number(&environment)?;
        let mut task = Task::new(&self.output, self.kind.facts().command, part);
        let outcome = self.fit(global, Some((layers, &mut task)));
        task.end(outcome)
    }

    /// Fits the section to all layers, or to those of a task.
    fn fit(&self, global: &Global, share: Option<(&LayerShare, &mut Task)>) -> Result<()> {
        let facts = self.kind.facts();
        let device: Box<dyn Device> = match facts.cpu_only {
            true => global.cpu_only(facts.command).map(|()| Box::new(Cpu))?,
            false => global.open_device(Workload::Fits)?,
        };
        let dump = Dump::open(&self.dump)?;
        if facts.reads_queries {
            dump.check_queries()?;
        }
        if facts.reads_values {
            dump.check_values()?;
        }
        let moments = self.moments(&dump)?;
        let fit = self.kind.fit(
            self.values.clone(),
            &FitInput {
                seed: global.seed,
                position: moments.position(&dump),
                block_start: &dump.corpus.block_start,
                seq_len: dump.origin.calibration.seq_len,
                kept: &dump.kept,
                windows: &dump.origin.model.windows,
                head_dim: dump.sizes.head_dim,
                codewords: CODEWORDS,
                reporter: &global.log(),
            },
        )?;
        let n_layers = dump.sizes.n_layers;
        let layers = share
            .as_ref()
            .map(|(layers, _)| layers.resolve(n_layers, &environment));
        let layers = layers.transpose()?.unwrap_or(0..n_layers);
        let mut section = Section::of_layers(fit.as_ref(), dump.sizes, layers, device.as_ref())?;
        let shown = self.output.display();
        let document = |skipped: bool| json!({ "section": shown.to_string(), "device": device.name(), "skipped": skipped });
        let keeps = self.layers.is_some() && !global.overwrite;
        if keeps && is_done(&self.output, &dump.origin, &section)? {
            let note = format!("{shown} is already complete");
            return finish(global, &note, &self.output, &document(true));
        }
        let inputs: Vec<&Path> = self
            .moments
            .iter()
            .chain(&self.dump)
            .map(PathBuf::as_path)
            .collect();
        let output = output::create(&self.output, &inputs, global)?;
        if let Some((_, task)) = share {
            task.set_part(format!("{}..{}", section.layers.start, section.layers.end));
            task.begin();
        }
        fit_dump(
            fit.as_ref(),
            &mut section,
            &dump,
            &moments,
            device.as_ref(),
            global.log(),
        )?;
        artifact::write(output, dump.origin, vec![section])?;
        finish(global, &format!("wrote {shown}"), &self.output, &document(false))
    }

    /// Finds where the moments come from: the file that was given, or the dump.
    fn moments(&self, dump: &Dump) -> Result<MomentsSource> {
        let read = self.kind.facts().moments;
        let position = match (read, self.wrope_position) {
            (MomentsRead::Nothing, _) => return Ok(MomentsSource::Nothing),
            (MomentsRead::Own, _) => Some(Position::Own),
            (MomentsRead::Chosen, b) => b.map(Position::Windowed),
        };
        let moments = match &self.moments {
            None if dump.is_sharded() => {
                let own = Position::Windowed(dump.options.wrope_position);
                return Ok(MomentsSource::Blocks(position.unwrap_or(own)));
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
        match position {
            Some(position) => Ok(MomentsSource::File(Box::new(moments.at(position)?))),
            None => Ok(MomentsSource::File(Box::new(moments))),
        }
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

/// Tells whether `path` is the complete file of this section and these layers.
///
/// # Errors
/// The file is another one, or damaged.
fn is_done(path: &Path, origin: &Origin, section: &Section) -> Result<bool> {
    if !path.exists() {
        return Ok(false);
    }
    let found = Artifact::open_part(path, SECTIONS)?;
    found.verify()?;
    let manifest = &found.manifest;
    let params = |of: &SectionManifest| (of.device.clone(), of.adapter.clone(), of.params.clone());
    let own = manifest.sections.get(section.kind.name()).map(params);
    let same = [
        ("model", manifest.origin.model == origin.model),
        ("text", manifest.origin.calibration == origin.calibration),
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
    match same.iter().find(|(_, same)| !same) {
        None => Ok(true),
        Some((what, _)) => {
            let error = Error::usage(format!("{} exists, and its {what} differs", path.display()));
            Err(error.hint("remove it, or choose another name with -o"))
        }
    }
}

/// Fits the layers of a section to the states of a dump.
fn fit_dump(
    fit: &dyn Fit,
    section: &mut Section,
    dump: &Dump,
    moments: &MomentsSource,
    device: &dyn Device,
    log: Log,
) -> Result<()> {
    let (sizes, model) = (dump.sizes, &dump.origin.model);
    let ropes = model.ropes();
    let layers = section.layers.clone();
    let progress = log.progress((layers.len() * sizes.n_kv_heads) as u64, "heads");
    for layer in layers {
        progress.layer(layer, sizes.n_layers, fit.kind().facts().stage);
        let (file, rope) = (dump.layer(layer)?, ropes.of(layer));
        let (moments, sums) = moments.of_layer(layer, &file, fit.reads_pre_sums(), rope)?;
        let states = LayerStates {
            layer,
            sizes,
            window: model.windows[layer],
            device,
            keys: &|head| file.read(State::KPre, head, 0, dump.n),
            queries: &|head| {
                let all = file.read(State::QPre, head, 0, dump.n)?;
                Ok(all.select(Axis(0), fit.query_rows()))
            },
            values: &|head| file.read(State::V, head, 0, dump.n),
            moments: moments.as_ref(),
            sums: sums.as_ref(),
            block_start: &dump.corpus.block_start,
            kept: &dump.kept,
            rope,
        };
        section.add(fit_layer(fit, &states, &progress, 1)?)?;
    }
    Ok(())
}
