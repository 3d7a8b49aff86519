//! What prompts are answered with, and the session that answers them.

use super::args::Args;
use super::conversation::{Conversation, End};
use super::setting::RunSetting;
use super::turns::Turns;
use crate::artifact::Artifact;
use crate::cmd::args::Global;
use crate::cmd::output;
use crate::cmd::reading::in_full;
use crate::compute::device::Device;
use crate::cuda::ROWS;
use crate::cuda::room::{Extent, Source};
use crate::error::Result;
use crate::kv::sample::Sampler;
use crate::machine::ON_CPU;
use crate::method::Method;
use crate::model::Decoder;
use crate::model::forward::CpuForward;
use crate::runner::room::row_bytes;
use crate::runner::{CpuBackend, DecodeOptions, Session};

/// What is opened before it is known by which method prompts are answered.
#[derive(Clone, Copy)]
pub(super) struct Opened<'a> {
    pub args: &'a Args,
    pub global: &'a Global,
    pub device: &'a dyn Device,
    pub decoder: &'a Decoder,
    pub artifact: Option<&'a Artifact>,
    /// What to say if the model runs on the CPU although there is a GPU.
    pub on_cpu: Option<&'static str>,
}

impl Opened<'_> {
    /// Prepares the method of a setting, and the options of its steps.
    pub fn prepare(&self, setting: RunSetting) -> Result<(Box<dyn Method>, DecodeOptions)> {
        let (reading, artifact) = (&self.args.reading, self.artifact);
        if let Some(plan) = setting.plan {
            let method = reading.planned(plan, artifact, self.decoder, self.global)?;
            let options =
                reading.options(setting.budget, setting.kv, Some(plan), &[], artifact, self.device)?;
            return Ok((method, options));
        }
        let params = reading.params();
        let (name, tail) = (setting.method, setting.tail);
        let method = reading.method(name, tail, params, artifact, self.decoder, self.global)?;
        let options = reading.options(setting.budget, setting.kv, None, &[], artifact, self.device)?;
        Ok((method, options))
    }
}

/// What prompts are answered with.
pub(super) struct Ready<'a> {
    pub opened: &'a Opened<'a>,
    pub method: &'a dyn Method,
    pub options: DecodeOptions,
    pub setting: RunSetting<'a>,
}

impl Ready<'_> {
    /// Opens a session for a conversation.
    pub fn conversation<'t, 'd>(&'t self, turns: &'t mut Turns<'d>) -> Result<Conversation<'t, 'd>> {
        let Opened {
            args,
            global,
            device,
            decoder,
            artifact,
            on_cpu,
        } = *self.opened;
        let (method, options) = (self.method, &self.options);
        let known = turns.known();
        let (session, fallback) =
            open_session(args, global, device, decoder, method, options.clone(), known)?;
        let of_device = [on_cpu, fallback].into_iter().flatten().map(str::to_owned);
        Ok(Conversation {
            args,
            global,
            kv: options.kv,
            row_bytes: Box::new(|positions| row_bytes(&decoder.config, method, options, positions)),
            fallbacks: of_device.chain(in_full(method)).collect(),
            setting: self.setting,
            artifact,
            full_heads: method.full_heads(),
            session,
            turns,
            sampler: Sampler::new(args.sampling(), global.seed),
            replies: Vec::new(),
            steps_s: Vec::new(),
            full_step_s: None,
        })
    }

    /// Answers one prompt, or the turns of a conversation.
    pub fn converse(&self, mut turns: Turns) -> Result<()> {
        let Opened {
            args, global, device, ..
        } = *self.opened;
        // Opened before the weights are loaded, and dropped after the session that writes to it.
        let create = |path| output::Lines::create(path, &args.inputs(), global);
        let mut lines = args.trace.as_ref().map(|path| create(path)).transpose()?;
        loop {
            let mut conversation = self.conversation(&mut turns)?;
            if let Some(lines) = &mut lines {
                conversation.session.trace(std::io::BufWriter::new(lines));
            }
            let end = conversation.run();
            conversation.session.finish_trace()?;
            if matches!(end, Ok(End::Reset)) {
                conversation.note()?;
                global.log().note("starting a new conversation");
                continue;
            }
            // The replies so far are reported, however the conversation ended.
            if end.is_ok() || !conversation.replies.is_empty() {
                if end.is_ok() {
                    conversation.time_in_full()?;
                }
                conversation.report(device.name())?;
            }
            drop(conversation);
            return match end {
                Ok(_) => lines.map_or(Ok(()), output::Lines::finish),
                Err(e) => Err(e),
            };
        }
    }
}

/// Generated positions for which caches on the CPU reserve room; they grow when it is used up.
const RESERVED: usize = 4096;

/// Opens a session on a device, for prompts of which `known` tokens are known already. With a GPU, caches and selection
/// are on it if the method can run there; otherwise they are on the CPU, which the second value then says.
fn open_session<'a>(
    args: &Args,
    global: &Global,
    device: &'a dyn Device,
    decoder: &'a Decoder,
    method: &dyn Method,
    options: DecodeOptions,
    known: usize,
) -> Result<(Session<'a>, Option<&'static str>)> {
    let reserved = known + args.max_new.min(RESERVED);
    let log = global.log();
    let machine = args.reading.machine(global, device, &log);
    machine.check_precision(decoder)?;
    let Some(driver) = device.cuda() else {
        let forward = Box::new(CpuForward::with_precision(decoder, machine.on_cpu()?)?);
        let backend = CpuBackend::new(forward, method, options, reserved);
        return Ok((Session::new(backend), None));
    };
    let source = Source {
        driver,
        decoder,
        precision: global.precision,
    };
    // Caches and indexes on the device do not grow.
    let expected = known + args.max_new;
    let (capacity, prompt) = if args.chat {
        let capacity = expected.max(decoder.config.max_position_embeddings);
        // How long messages will be is not known; the last one ends the context.
        (capacity, capacity - known.max(ROWS).min(capacity)..capacity)
    } else {
        (expected, 0..known)
    };
    let extent = Extent {
        capacity,
        prompt,
        later_prompts: args.chat,
    };
    let tell = |text: &str| log.detail(text);
    let Some(rows) = machine.rows_for(method, &options, args.chat) else {
        let forward = Box::new(source.forward(&extent, &tell)?);
        let backend = CpuBackend::new(forward, method, options, reserved);
        return Ok((Session::new(backend), Some(ON_CPU)));
    };
    let backend = source.session((method, options), rows, expected, &extent, &tell)?;
    Ok((Session::boxed(backend), None))
}
