//! What prompts are answered with, and the session that answers them.

use super::args::Args;
use super::choice::Choice;
use super::conversation::{Conversation, End};
use super::turns::Turns;
use crate::artifact::Artifact;
use crate::cmd::args::Global;
use crate::cmd::output;
use crate::cmd::reading::in_full;
use crate::compute::device::Device;
use crate::cuda::ROWS;
use crate::cuda::backend::CudaBackend;
use crate::cuda::host::HostBackend;
use crate::cuda::room::{Extent, Source};
use crate::error::Result;
use crate::kv::sample::Sampler;
use crate::method::Method;
use crate::model::Decoder;
use crate::runner::{CpuBackend, Options, Session};

/// What prompts are answered with.
pub(super) struct Ready<'a> {
    pub args: &'a Args,
    pub global: &'a Global,
    pub device: &'a dyn Device,
    pub decoder: &'a Decoder,
    pub artifact: Option<&'a Artifact>,
    pub method: &'a dyn Method,
    pub options: Options,
    pub choice: Choice,
    /// What to say if the model runs on the CPU although there is a GPU.
    pub on_cpu: Option<&'static str>,
}

impl Ready<'_> {
    /// Answers one prompt, or the turns of a conversation.
    pub fn converse(&self, mut turns: Turns) -> Result<()> {
        let Ready {
            args,
            global,
            decoder,
            method,
            options,
            choice,
            ..
        } = *self;
        let log = global.log();
        // Opened before the weights are loaded, and dropped after the session that writes to it.
        let create = |path| output::Lines::create(path, &args.inputs(), global);
        let mut lines = args.trace.as_ref().map(|path| create(path)).transpose()?;
        loop {
            let known = turns.known();
            let (mut session, fallback) =
                open_session(args, global, self.device, decoder, method, options, known)?;
            let of_device = [self.on_cpu, fallback].into_iter().flatten().map(str::to_owned);
            if let Some(lines) = &mut lines {
                session.trace(std::io::BufWriter::new(lines));
            }
            let mut conversation = Conversation {
                args,
                global,
                kv: options.kv,
                fallbacks: of_device.chain(in_full(method)).collect(),
                choice,
                artifact: self.artifact,
                full_heads: method.full_heads(),
                session,
                turns: &mut turns,
                sampler: Sampler::new(args.sampling(), global.seed),
                replies: Vec::new(),
                steps_s: Vec::new(),
                full_step_s: None,
            };
            let end = conversation.run();
            conversation.session.finish_trace()?;
            if matches!(end, Ok(End::Reset)) {
                conversation.note()?;
                log.note("starting a new conversation");
                continue;
            }
            // The replies so far are reported, however the conversation ended.
            if end.is_ok() || !conversation.replies.is_empty() {
                if end.is_ok() {
                    conversation.time_in_full()?;
                }
                conversation.report(self.device.name())?;
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
pub(super) fn open_session<'a>(
    args: &Args,
    global: &Global,
    device: &'a dyn Device,
    decoder: &'a Decoder,
    method: &dyn Method,
    options: Options,
    known: usize,
) -> Result<(Session<'a>, Option<&'static str>)> {
    let reserved = known + args.max_new.min(RESERVED);
    let Some(driver) = device.cuda() else {
        return Ok((Session::on_cpu(decoder, method, options, reserved)?, None));
    };
    let log = global.log();
    let source = Source {
        driver,
        decoder,
        precision: global.precision,
    };
    // Caches and indexes on the device do not grow.
    let expected = known + args.max_new;
    let extent = match args.chat {
        true => {
            let capacity = expected.max(decoder.config.max_position_embeddings);
            // How long messages will be is not known; the last one ends the context.
            let prompt = capacity - known.max(ROWS).min(capacity)..capacity;
            Extent { capacity, prompt }
        }
        false => Extent {
            capacity: expected,
            prompt: 0..known,
        },
    };
    let tell = |text: &str| log.detail(text);
    match args.reading.on_host() {
        false if CudaBackend::can(method, &options, args.chat) => {
            let backend = source.session(method, options, &extent, &tell)?;
            Ok((Session::new(backend), None))
        }
        true if HostBackend::can(method, &options, args.chat) => {
            log.note("the KV cache is in the machine's memory, the index on the device");
            let backend = source.host_session(method, options, expected, &extent, &tell)?;
            Ok((Session::new(backend), None))
        }
        _ => {
            let fallback = "the KV cache and the selection are on the CPU";
            log.note(fallback);
            let forward = Box::new(source.forward(&extent, &tell)?);
            let backend = CpuBackend::new(forward, method, options, reserved);
            Ok((Session::new(backend), Some(fallback)))
        }
    }
}
