//! The commands that make one section from a dump (`codebook`, `signs`, `priors`, ...), and the flags of all
//! sections. What differs between sections is in their declarations.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Command, FromArgMatches, value_parser};
use ndarray::Axis;
use serde_json::json;

use super::{finish, output};
use crate::artifact::{self, Fit, FitInput, LayerPart, LayerStates, MomentsRead, Section, SectionKind};
use crate::cmd::args::Global;
use crate::compute::cpu::Cpu;
use crate::compute::device::Device;
use crate::dump::moments::Moments;
use crate::dump::{Dump, State};
use crate::error::{Error, Result};
use crate::flags::parse_count;
use crate::method::sections::SECTIONS;
use crate::progress::{Log, Progress, Verbosity};
use crate::stats::moments::Position;

/// Name of the flag for the position of the moments.
const WROPE_POSITION: &str = "wrope-position";

type ParseResult<T> = std::result::Result<T, clap::Error>;

/// The flags of the fits of all sections.
#[derive(Clone, Debug)]
pub struct SectionFlags(ArgMatches);

impl SectionFlags {
    /// Returns the number of codewords of a codebook; a text must have at least as many tokens.
    pub fn codewords(&self) -> usize {
        self.0.get_one("size").copied().unwrap_or_default()
    }

    /// Prepares the fit of every section that is wanted.
    pub fn fits(&self, input: &FitInput) -> Result<Vec<Box<dyn Fit>>> {
        let wanted = SECTIONS.iter().filter(|kind| kind.is_wanted(&self.0));
        wanted.map(|kind| kind.fit(&self.0, input)).collect()
    }
}

impl clap::Args for SectionFlags {
    fn augment_args(command: Command) -> Command {
        SECTIONS.iter().fold(command, |command, kind| kind.flags(command))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SectionFlags {
    fn from_arg_matches(matches: &ArgMatches) -> ParseResult<Self> {
        Ok(Self(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> ParseResult<()> {
        self.0 = matches.clone();
        Ok(())
    }
}

/// A command that makes one section from a dump.
#[derive(Debug)]
pub struct SectionCommand {
    kind: &'static dyn SectionKind,
    dump: PathBuf,
    moments: Option<PathBuf>,
    wrope_position: Option<usize>,
    output: PathBuf,
    flags: ArgMatches,
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
        (true, true) => "Dump folder; it must have been made with --queries --values",
        (true, false) => "Dump folder; it must have been made with --queries (values are not read)",
        (false, _) => "Dump folder",
    };
    let moments = "Moments file made from this dump, such as one made on another device (default: the dump's own moments)";
    let moments = file("moments", "FILE").help(moments);
    let position = Arg::new(WROPE_POSITION)
        .long(WROPE_POSITION)
        .value_name("P")
        .value_parser(parse_count)
        .help("WRoPE position: relative position, in tokens, to which queries are rotated (default: the position of the moments)");
    let command = Command::new(facts.command)
        .arg(file("dump", "DIR").help(dump).required(true))
        .args((facts.moments != MomentsRead::Nothing).then_some(moments))
        .args((facts.moments == MomentsRead::Chosen).then_some(position))
        .arg(
            file("output", "FILE")
                .short('o')
                .help("Section file to write")
                .required(true),
        );
    kind.flags(command).about(facts.about)
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
            dump: file("dump").ok_or_else(missing)?,
            moments: moments.flatten(),
            wrope_position: position.flatten(),
            output: file("output").ok_or_else(missing)?,
            flags: flags.clone(),
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
        let facts = self.kind.facts();
        let device: Box<dyn Device> = match facts.cpu_only {
            true => global.cpu_only(facts.command).map(|()| Box::new(Cpu))?,
            false => global.open_device()?,
        };
        let dump = Dump::open(&self.dump)?;
        if facts.reads_queries {
            dump.check_queries()?;
        }
        if facts.reads_values {
            dump.check_values()?;
        }
        let moments = self.moments(&dump)?;
        let own = Position::Windowed(dump.options.wrope_position);
        let fit = self.kind.fit(
            &self.flags,
            &FitInput {
                seed: global.seed,
                position: moments.as_ref().map_or(own, |moments| moments.position),
                block_start: &dump.corpus.block_start,
                seq_len: dump.origin.calibration.seq_len,
                kept: &dump.kept,
                windows: &dump.origin.model.windows,
                log: global.log(),
            },
        )?;
        let inputs: Vec<&Path> = self
            .moments
            .iter()
            .chain([&self.dump])
            .map(PathBuf::as_path)
            .collect();
        let output = output::create(&self.output, &inputs, global)?;
        let section = fit_dump(
            fit.as_ref(),
            &dump,
            moments.as_ref(),
            device.as_ref(),
            global.log(),
        )?;
        artifact::write(output, dump.origin, vec![section])?;
        finish(
            global,
            &format!("wrote {}", self.output.display()),
            &self.output,
            &json!({ "section": self.output.display().to_string(), "device": device.name() }),
        )
    }

    /// Reads the moments that were given, or the dump's, and takes them at the position asked for; `None` if the fit does
    /// not need them.
    fn moments(&self, dump: &Dump) -> Result<Option<Moments>> {
        let read = self.kind.facts().moments;
        if read == MomentsRead::Nothing {
            return Ok(None);
        }
        let moments = match &self.moments {
            None => dump.moments()?,
            Some(path) => {
                let moments = Moments::read(path, dump.sizes)?;
                if moments.origin != dump.origin {
                    return Err(Error::failed(format!(
                        "{} was not made from {}",
                        path.display(),
                        self.dump.display()
                    ))
                    .hint("give a moments file that was made from the same dump"));
                }
                moments
            }
        };
        match (read, self.wrope_position) {
            (MomentsRead::Own, _) => moments.at(Position::Own).map(Some),
            (_, Some(b)) => moments.at(Position::Windowed(b)).map(Some),
            (_, None) => Ok(Some(moments)),
        }
    }
}

/// Fits a section to the states of a dump.
fn fit_dump(
    fit: &dyn Fit,
    dump: &Dump,
    moments: Option<&Moments>,
    device: &dyn Device,
    log: Log,
) -> Result<Section> {
    let (sizes, model) = (dump.sizes, &dump.origin.model);
    let rope = model.rope();
    let sums = moments.filter(|_| fit.reads_pre_sums()).map(Moments::sums);
    let sums = sums.transpose()?;
    let mut section = Section::new(fit, sizes, device)?;
    let progress = log.progress((sizes.n_layers * sizes.n_kv_heads) as u64, "heads");
    for layer in 0..sizes.n_layers {
        progress.layer(layer, sizes.n_layers, fit.kind().facts().stage);
        let file = dump.layer(layer)?;
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
            moments: moments.map(|moments| &moments.layers[layer]),
            sums: sums.map(|sums| &sums[layer]),
            block_start: &dump.corpus.block_start,
            kept: &dump.kept,
            rope: &rope,
        };
        section.add(fit_layer(fit, &states, &progress, 1, log)?)?;
    }
    Ok(section)
}

/// Fits one layer of a section; each head advances the progress by `units` and, under `-v`, prints its line.
pub(super) fn fit_layer(
    fit: &dyn Fit,
    states: &LayerStates,
    progress: &Progress,
    units: u64,
    log: Log,
) -> Result<LayerPart> {
    let mut part = fit.layer(states, &mut |head, line| {
        progress.advance(units);
        if let Some(line) = line.filter(|_| log.verbosity >= Verbosity::Verbose) {
            progress.line(&format!("layer {} head {head}: {line}", states.layer));
        }
    })?;
    if !fit.kind().marks_constant_heads() {
        return Ok(part);
    }
    let (section, layer) = (fit.kind().name(), states.layer);
    let constant = states.constant_heads()?;
    part.mark_constant(&constant);
    for head in constant {
        progress.line(&format!(
            "warning: section `{section}`, layer {layer}, KV head {head}: all keys are equal, so full attention is used"
        ));
    }
    Ok(part)
}
