//! The options of methods and caches that `run` and `eval` share, and the artifact that both read.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValue;
use serde_json::{Map, Value};

use super::args::Global;
use super::named::Named;
use super::parameters::{KvParser, MethodFlags, flags_of_methods, kv_type_or};
use crate::artifact::Artifact;
use crate::cmd::flags::{RotationFlag, WeightsFlag, parse_any_share, parse_count, parse_positive_count};
use crate::cmd::terminal::Log;
use crate::compute::device::Device;
use crate::error::{Error, Result};
use crate::kv::format::FORMATS;
use crate::kv::layout::{Layout, WHOLE};
use crate::kv::map::ModelMaps;
use crate::kv::static_set::{SINKS, WINDOW};
use crate::kv::{Budget, KvType, Limits};
use crate::machine::{Machine, RowsIn};
use crate::method::declaration::Ask;
use crate::method::params::MethodParams;
use crate::method::plan::{FORM, Plan};
use crate::method::registry::MethodName;
use crate::method::rotation;
use crate::method::sections::SECTIONS;
use crate::method::{CPU_GRANULE, Method};
use crate::model::{Decoder, Model, Sizes};
use crate::runner::DecodeOptions;

/// What results name in place of a method if KV heads have methods of their own.
pub(super) const PLANNED: &str = "plan";

/// What `--kv` names for caches in the machine's memory.
const HOST: &str = "host";

/// Where and how keys and values are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kv {
    kind: KvType,
    rows: RowsIn,
}

impl Kv {
    /// Parses `--kv`; `None` for other text.
    fn named(text: &str) -> Option<Self> {
        if text == HOST {
            return Some(Self {
                kind: KvType::BF16,
                rows: RowsIn::Host,
            });
        }
        let rows = RowsIn::Device;
        KvType::named(text).map(|kind| Self { kind, rows })
    }

    /// Returns the parser of `--kv`.
    fn parser() -> KvParser<Self> {
        let help = "With CUDA: bfloat16 in the machine's memory, for contexts that do not fit in GPU memory";
        kv_type_or([PossibleValue::new(HOST).help(help)], Self::named)
    }
}

/// The options of methods and caches that `run` and `eval` share.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
#[command(next_help_heading = "Artifact and cache")]
pub(super) struct Reading {
    /// Artifact of this model, made by `kvsmith calibrate`
    #[arg(long, value_name = "ART.safetensors")]
    artifact: Option<PathBuf>,
    /// Number of first positions that every step reads
    #[arg(long, value_name = "N", default_value_t = SINKS, value_parser = parse_count)]
    sinks: usize,
    /// Number of last positions that every step reads, including the current one
    #[arg(long, value_name = "N", default_value_t = WINDOW, value_parser = parse_positive_count)]
    window: usize,
    /// Type of the KV cache, or k=TYPE,v=TYPE for keys and values apart (default: bf16 on CUDA, and where `run` follows a
    /// recommendation, which was measured with bf16; otherwise f32)
    #[arg(long, value_name = "TYPE", value_parser = Kv::parser())]
    kv: Option<Kv>,
    /// Share of the chosen rows that a step reads in all 8 bits with --kv int4+4: those of the largest estimated attention. Of the
    /// rest, it reads 4 bits. Methods that estimate no attention read 8 bits of all rows; with 0, those that rank no cached keys
    /// read 4 bits
    #[arg(long, value_name = "SHARE", default_value_t = WHOLE, value_parser = parse_any_share)]
    whole_rows: f64,
    /// How keys and values in int4+4, int4 and int2 are turned before they are rounded: by the maps of --artifact, by a Hadamard matrix, or
    /// not at all (default: `artifact` if --artifact has the section `rotation`, otherwise `hadamard`)
    #[arg(long, value_enum, value_name = "NAME")]
    rotation: Option<RotationFlag>,
    /// How each KV head is served: a JSON file with a method, a budget and row formats per layer and KV head. --method,
    /// --budget, --kv, --sinks and --window come before it, for all KV heads
    #[arg(long, value_name = "FILE.json")]
    head_plan: Option<PathBuf>,
    /// Round the weights to 8 or 4 bits when the model is opened, without any calibration of the rounding (default: as the
    /// checkpoint stores them). Embeddings keep their type. It runs on the CPU
    #[arg(long, value_enum)]
    weights: Option<WeightsFlag>,
    /// Add an estimate of the attention to the positions that a step does not read: from the mean of their keys and
    /// values, and a correction from the section `tail` of --artifact. It runs on the CPU
    #[arg(long)]
    tail: bool,
    /// Use the artifact even if it was made for another model, as long as the sizes match
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    methods: MethodFlags,
}

impl Reading {
    /// Returns the parameters of the methods.
    pub(super) fn params(&self) -> &MethodParams {
        &self.methods.0
    }

    /// Opens an artifact and checks that it fits the model.
    pub(super) fn open(&self, path: &Path, decoder: &Decoder, log: Log) -> Result<Artifact> {
        let artifact = Artifact::open(path, SECTIONS)?;
        let fingerprint = decoder.checkpoint.fingerprint(&decoder.config)?;
        if let Err(e) = artifact.check_model(&fingerprint, decoder.config.sizes()) {
            if artifact.sizes != decoder.config.sizes() {
                // --force does not help here.
                return Err(artifact.check_sizes(decoder.config.sizes()).err().unwrap_or(e));
            }
            if !self.force {
                return Err(e.hint(
                    "calibrate this model, or add --force to use the artifact anyway (its sizes match)",
                ));
            }
            log.warn(&format!("{e}; using the artifact anyway because of --force"));
        }
        Ok(artifact)
    }

    /// Returns the options of a session; without --kv, its cache has type `usual`, if that is known. With a head plan, they have
    /// its static set, and its budget and its formats if all KV heads have the same. `also` lists further formats of caches.
    pub(super) fn options(
        &self,
        budget: Budget,
        usual: Option<KvType>,
        plan: Option<&Plan>,
        also: &[KvType],
        artifact: Option<&Artifact>,
        device: &dyn Device,
    ) -> Result<DecodeOptions> {
        let own = Limits {
            sinks: self.sinks,
            window: self.window,
            ..Limits::new(budget)
        };
        let kv = self.kv_type(usual, device);
        let formats = plan.into_iter().flat_map(Plan::formats);
        let formats = formats.chain([kv]).chain(also.iter().copied());
        Ok(DecodeOptions {
            limits: plan.map_or(own, |plan| plan.limits(budget)),
            kv: plan.and_then(Plan::kv).unwrap_or(kv),
            packed: Layout {
                whole: self.whole_rows,
                ..self.methods.0.selfindex.layout(artifact)?
            },
            maps: self.maps(artifact, formats)?,
            granule: CPU_GRANULE,
        })
    }

    /// Returns the maps of rows before formats of few bits round them.
    ///
    /// # Errors
    /// There is no section `rotation` although it was asked for; a damaged one.
    fn maps(&self, artifact: Option<&Artifact>, formats: impl Iterator<Item = KvType>) -> Result<ModelMaps> {
        match self.rotation {
            None => rotation::maps(artifact, formats),
            Some(RotationFlag::Hadamard) => Ok(ModelMaps::HADAMARD),
            Some(RotationFlag::None) => Ok(ModelMaps::IDENTITY),
            Some(RotationFlag::Artifact) => {
                let artifact = artifact.filter(|artifact| artifact.has(rotation::SECTION));
                let missing = || {
                    Error::usage("--rotation artifact needs --artifact with the section `rotation`")
                        .hint("make an artifact with `kvsmith calibrate`, or use --rotation hadamard")
                };
                rotation::maps(Some(artifact.ok_or_else(missing)?), formats)
            }
        }
    }

    /// Names the maps of rows, as `eval` reports them.
    pub(super) fn rotation_name(&self, artifact: Option<&Artifact>) -> &'static str {
        match self.rotation {
            Some(RotationFlag::Hadamard) => "hadamard",
            Some(RotationFlag::None) => "none",
            _ if artifact.is_some_and(|artifact| artifact.has(rotation::SECTION)) => "artifact",
            _ => "hadamard",
        }
    }

    /// Returns whether there is a head plan.
    pub(super) fn has_plan(&self) -> bool {
        self.head_plan.is_some()
    }

    /// Reads the head plan, if one is given, and puts what the flags say for all KV heads in its place. Without one, it is that
    /// which the artifact `follows` was given, if there is one.
    ///
    /// # Errors
    /// A file that is no head plan, or that of a model of other sizes.
    pub(super) fn head_plan(
        &self,
        (method, budget): (Option<Named>, Option<Budget>),
        sizes: Sizes,
        follows: Option<&Artifact>,
        global: &Global,
    ) -> Result<Option<Plan>> {
        let plan = match (&self.head_plan, follows) {
            (Some(path), _) => Some(read_plan(path, sizes)?),
            (None, Some(artifact)) => Plan::given(artifact)?,
            (None, None) => None,
        };
        let Some(mut plan) = plan else {
            return Ok(None);
        };
        let is_given = |flag: &str| global.given.iter().any(|given| given == flag);
        if is_given("sinks") {
            plan.sinks = self.sinks;
        }
        if is_given("window") {
            plan.window = self.window;
        }
        for head in plan.heads_mut() {
            if let Some(method) = method {
                (head.method, head.params) = (method, Map::new());
            }
            head.method.tail |= self.tail;
            head.budget = budget.unwrap_or(head.budget);
            head.kv = self.kv.map_or(head.kv, |kv| kv.kind);
        }
        Ok(Some(plan))
    }

    /// Prepares the methods of a head plan; warns of heads that their methods do not serve.
    pub(super) fn planned(
        &self,
        plan: &Plan,
        artifact: Option<&Artifact>,
        decoder: &Decoder,
        global: &Global,
    ) -> Result<Box<dyn Method>> {
        let method = plan
            .clone()
            .prepare(&self.ask(self.params(), artifact, decoder, global))?;
        for text in in_full(method.as_ref()) {
            global.log().warn(&text);
        }
        Ok(method)
    }

    /// Returns what methods are prepared from.
    fn ask<'a>(
        &self,
        params: &'a MethodParams,
        artifact: Option<&'a Artifact>,
        decoder: &'a Decoder,
        global: &Global,
    ) -> Ask<'a> {
        Ask {
            artifact,
            ropes: &decoder.ropes,
            sizes: decoder.config.sizes(),
            params,
            seed: global.seed,
        }
    }

    /// Returns which memory holds the cached rows of a model that is on a GPU.
    pub(super) fn rows(&self) -> RowsIn {
        self.kv.map_or(RowsIn::Device, |kv| kv.rows)
    }

    /// Returns the device with the memory that holds the cached rows.
    pub(super) fn machine<'a>(&self, global: &Global, device: &'a dyn Device, log: &'a Log) -> Machine<'a> {
        Machine {
            rows: self.rows(),
            ..global.machine(device, log)
        }
    }

    /// Rounds the weights as asked.
    ///
    /// # Errors
    /// A device other than the CPU; a temporary file that cannot be written.
    pub(super) fn rounded(&self, model: Model, device: &dyn Device) -> Result<Model> {
        if self.weights.is_some() && device.cuda().is_some() {
            return Err(Error::usage("--weights is available on the CPU only")
                .hint("omit --weights, or use --device cpu"));
        }
        model.rounded(self.weights.map(WeightsFlag::quant))
    }

    /// Names the type to which the weights are rounded, if they are.
    pub(super) fn weights_name(&self) -> Option<&'static str> {
        self.weights.map(|weights| weights.quant().name())
    }

    /// Returns the share of the chosen rows that are read whole where rows are in layers.
    pub(super) fn whole_rows(&self) -> f64 {
        self.whole_rows
    }

    /// Lists the files that are read: the artifact and the head plan, if they are given.
    pub(super) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.artifact.iter().chain(&self.head_plan)
    }

    /// Returns the artifact's file, if one is given.
    pub(super) fn artifact(&self) -> Option<&PathBuf> {
        self.artifact.as_ref()
    }

    /// Fails if the device cannot hold the caches that were asked for.
    pub(super) fn check(&self, device: &dyn Device) -> Result<()> {
        if self.rows() == RowsIn::Host && device.cuda().is_none() {
            return Err(Error::usage("--kv host is available with --device cuda only")
                .hint("use --kv bf16; on the CPU, every cache is in the machine's memory"));
        }
        Ok(())
    }

    /// Chooses the type of the cache.
    pub(super) fn kv_type(&self, usual: Option<KvType>, device: &dyn Device) -> KvType {
        match self.kv {
            Some(kv) => kv.kind,
            None if device.cuda().is_some() => KvType::BF16,
            None => usual.unwrap_or(KvType::F32),
        }
    }

    /// Tells whether `--tail` gives every method a tail.
    pub(super) fn tail(&self) -> bool {
        self.tail
    }

    /// Warns of flags that have no effect: those of methods that do not run or of caches that are not used, and --force
    /// without an artifact. `also` lists further formats of caches.
    pub(super) fn warn_of_unused(
        &self,
        methods: &[MethodName],
        plan: Option<&Plan>,
        also: &[KvType],
        global: &Global,
    ) {
        let own = self.kv.map(|kv| kv.kind);
        let planned = plan.into_iter().flat_map(Plan::formats);
        let others = planned.chain(also.iter().copied());
        let formats: Vec<KvType> = own.into_iter().chain(others).collect();
        let has_signs = |kv: &KvType| kv.keys.has_signs() || kv.values.has_signs();
        warn_of_methods(methods, formats.iter().any(has_signs), global);
        if self.rotation.is_some() && !formats.iter().any(|kv| kv.maps_rows()) {
            let mapped = FORMATS.iter().filter(|format| format.maps_rows());
            let mapped: Vec<&str> = mapped.map(|format| format.as_str()).collect();
            let warning = format!(
                "--rotation has no effect here: it applies to --kv {} only",
                mapped.join(" or ")
            );
            global.log().warn(&warning);
        }
        if self.whole_rows != WHOLE && !formats.iter().any(|kv| kv.lower_bytes(1) > 0) {
            let warning = "--whole-rows has no effect here: it applies to --kv int4+4 only";
            global.log().warn(warning);
        }
        if self.force && self.artifact.is_none() {
            global.log().warn("--force has no effect without --artifact");
        }
    }

    /// Warns if methods run at more positions than the blocks of the calibration had, and returns whether it did so. Their
    /// sections know nothing of the positions beyond.
    pub(super) fn warn_beyond_calibration(
        methods: &[MethodName],
        artifact: &Artifact,
        positions: usize,
        context: usize,
        log: Log,
    ) -> bool {
        let bound = |method: &&MethodName| {
            let section = method.section(Some(artifact)).map(|(_, name)| name);
            let kind = SECTIONS.iter().find(|kind| Some(kind.name()) == section);
            kind.is_some_and(|kind| kind.facts().position_bound)
        };
        let names: Vec<&str> = methods
            .iter()
            .filter(bound)
            .map(|method| method.as_str())
            .collect();
        let calibrated = artifact.manifest.origin.calibration.seq_len;
        let warns = !names.is_empty() && positions > calibrated;
        if warns {
            let (was, loses) = match names.len() {
                1 => ("was", "loses"),
                _ => ("were", "lose"),
            };
            // Nothing can be calibrated beyond the model's context.
            let advice = if calibrated < context {
                format!("; calibrate with --seq-len {} or more", positions.min(context))
            } else {
                String::new()
            };
            log.warn(&format!(
                "{} {was} calibrated on blocks of at most {calibrated} tokens and {loses} more at {positions} tokens{advice}",
                listed(&names)
            ));
        }
        warns
    }

    /// Prepares a method for this model, with or without a tail; warns of heads that the method does not serve.
    pub(super) fn method(
        &self,
        name: MethodName,
        tail: bool,
        params: &MethodParams,
        artifact: Option<&Artifact>,
        decoder: &Decoder,
        global: &Global,
    ) -> Result<Box<dyn Method>> {
        let ask = self.ask(params, artifact, decoder, global);
        let method = Named { method: name, tail }.prepare(&ask)?;
        for text in in_full(method.as_ref()) {
            global.log().warn(&format!("{}: {text}", name.as_str()));
        }
        Ok(method)
    }
}

/// Says that the head plan of the artifact is followed, and which flags choose otherwise.
pub(super) fn note_of_plan(plan: &Plan, flags: &str, log: Log) {
    log.note(&format!(
        "head plan of the artifact: {}; use {flags} to choose otherwise",
        plan.text()
    ));
}

/// Reads a head plan from a file of JSON.
///
/// # Errors
/// A file that is no head plan, or that of a model of other sizes.
pub(in crate::internal::cmd) fn read_plan(path: &Path, sizes: Sizes) -> Result<Plan> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    let read = || {
        let wrong = |e| Error::invalid(format!("not valid JSON: {e}")).hint(FORM);
        let mut document: Value = serde_json::from_slice(&bytes).map_err(wrong)?;
        let value = document.get_mut("head_plan").map(Value::take);
        let missing = || Error::invalid("there is no key `head_plan`").hint(FORM);
        let plan = Plan::read(value.ok_or_else(missing)?)?;
        plan.check_sizes(sizes)?;
        Ok(plan)
    };
    read().map_err(|e: Error| e.context(path.display()))
}

/// Warns of flags of methods that are not among `methods`; some apply to caches whose keys have signs too, and some to these
/// alone.
pub(in crate::internal::cmd) fn warn_of_methods(methods: &[MethodName], packed: bool, global: &Global) {
    let signed = FORMATS.iter().filter(|format| format.has_signs());
    let signed = listed(&signed.map(|format| format.as_str()).collect::<Vec<_>>());
    for (method, flags) in flags_of_methods() {
        let runs = methods.iter().any(|own| own.as_str() == method);
        for flag in flags.iter().filter(|flag| global.given.contains(flag)) {
            let (acts, place) = match MethodParams::of_caches(&flag.replace('-', "_")) {
                Some(false) => (packed, format!("--kv {signed} only")),
                Some(true) => (runs || packed, format!("method {method} and --kv {signed} only")),
                None => (runs, format!("method {method} only")),
            };
            if !acts {
                let warning = format!("--{flag} has no effect here: it applies to {place}");
                global.log().warn(&warning);
            }
        }
    }
}

/// Joins names as in "a, b and c".
pub(in crate::internal::cmd) fn listed(names: &[&str]) -> String {
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => names.concat(),
    }
}

/// Says, for each head that a method does not serve, what takes the method's place.
pub(super) fn in_full(method: &dyn Method) -> impl Iterator<Item = String> + '_ {
    let heads = method.full_heads().iter();
    heads.map(|(layer, head)| {
        format!("layer {layer}, KV head {head}: all calibration keys are equal, so full attention is used")
    })
}

/// Parses `--budget`.
pub(super) fn parse_budget(text: &str) -> std::result::Result<Budget, String> {
    text.parse().map_err(|e: Error| match e.advice() {
        Some(hint) => format!("{e}: expected {hint}"),
        None => e.to_string(),
    })
}
