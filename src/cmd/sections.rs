//! The commands that make one section from a dump (`codebook`, `signs`, `priors`, ...), and the flags of all
//! sections. What differs between sections is in their declarations.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches, value_parser};
use serde_json::{Map, Value, json};

use super::parameters::{flag_names, flags, values};
use super::share::{LayerShare, environment, parse_layers};
use super::task::Task;
use super::{finish, output};
use crate::artifact::{self, Facts, MomentsRead, SectionKind};
use crate::calibration::{DumpFit, DumpSettings, SectionChoice};
use crate::cmd::args::Global;
use crate::cmd::flags::parse_count;
use crate::cmd::terminal::with_flags;
use crate::compute::Workload;
use crate::compute::cpu::Cpu;
use crate::compute::device::Device;
use crate::dump::Dump;
use crate::error::Result;
use crate::method::sections::SECTIONS;

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
        let device: Box<dyn Device> = if facts.cpu_only {
            global.cpu_only(facts.command).map(|()| Box::new(Cpu))?
        } else {
            global.open_device(Workload::Fits)?
        };
        let (dump, log) = (Dump::open(&self.dump)?, global.log());
        let settings = DumpSettings {
            kind: self.kind,
            values: self.values.clone(),
            moments: self.moments.as_deref(),
            wrope_position: self.wrope_position,
            seed: global.seed,
        };
        let fit = DumpFit::new(&dump, &settings, &log)?;
        let n_layers = dump.sizes.n_layers;
        let layers = share
            .as_ref()
            .map(|(layers, _)| layers.resolve(n_layers, &environment));
        let layers = layers.transpose()?.unwrap_or(0..n_layers);
        let mut section = fit.section(layers, device.as_ref())?;
        let shown = self.output.display();
        let document = |skipped: bool| json!({ "section": shown.to_string(), "device": device.name(), "skipped": skipped });
        let keeps = self.layers.is_some() && !global.overwrite;
        if keeps && fit.is_done(&self.output, &section)? {
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
        fit.run(&mut section, device.as_ref())?;
        artifact::write(output, dump.origin.clone(), vec![section])?;
        finish(global, &format!("wrote {shown}"), &self.output, &document(false))
    }
}
