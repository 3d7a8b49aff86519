//! `kvsmith calibrate`: checkpoint and text to artifact, each layer fitted while its states are in
//! memory.

use std::path::{Path, PathBuf};

use ndarray::{Array2, Array3, Axis, s};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{check_points, load_corpus, model_manifest, open_model, print_json, report_head};
use crate::artifact::{self, LayerPart, Origin, Section};
use crate::capture::Capture;
use crate::cli::{Fit, Global, Input, parse_count};
use crate::corpus::Corpus;
use crate::dump::Sizes;
use crate::error::{Error, Kind, Result};
use crate::method::a2ats::{self, FitParams};
use crate::model::weights::hex;
use crate::model::{Decoder, config::read_json};
use crate::progress::{Log, Progress};
use crate::stats::moments::LayerMoments;
use crate::store::{self, Output, Spec, Store, Tensor};

/// Arguments of `calibrate`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Folder of a Hugging Face checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    input: Input,
    /// Artifact to write
    #[arg(short, long, value_name = "ART.safetensors")]
    output: PathBuf,
    /// Folder for what a stopped run needs to go on: finished layers and the hidden states
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Go on after the last finished layer in --work
    #[arg(long, requires = "work")]
    resume: bool,
    /// Relative position at which the query moments are taken
    #[arg(long, value_name = "P", default_value_t = 2048, value_parser = parse_count)]
    wrope_position: usize,
    #[command(flatten)]
    fit: Fit,
}

/// Runs `calibrate`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    calibrate(args, global).map_err(|e| match (e.kind(), &args.work) {
        (Kind::Interrupted, Some(_)) => {
            e.hint("the same command with --resume goes on after the last finished layer")
        }
        (Kind::Interrupted, None) => e.hint("with --work DIR a stopped run can go on"),
        _ => e,
    })
}

fn calibrate(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.cpu_only("calibrate")?;
    let start = std::time::Instant::now();
    let output = Output::create(&args.output)?;
    let decoder = open_model(&args.model, log)?;
    let corpus = load_corpus(&args.model, &decoder, &args.input, global)?;
    let params = FitParams {
        size: args.fit.size,
        iterations: args.fit.iterations,
        seed: global.seed,
        wrope_position: args.wrope_position,
    };
    let kept = corpus.kept();
    let n_kept = kept.iter().filter(|k| **k).count();
    params.check(n_kept)?;
    check_points(n_kept, params.size, log);
    let model = model_manifest(&decoder, log)?;
    let sizes = Sizes::of(&model)?;
    let specs = a2ats::specs(sizes, params.size);
    let origin = Origin {
        model,
        calibration: corpus.manifest(),
        device: device.to_string(),
    };
    let work = match &args.work {
        Some(dir) => {
            let identity = json!({
                "tool_version": env!("CARGO_PKG_VERSION"), "device": device, "model": origin.model,
                "calibration": origin.calibration, "a2ats": params.manifest(),
            });
            Some(Work::open(dir, &identity, args.resume, &specs)?)
        }
        None => None,
    };
    plan(&decoder, &corpus, &specs, log);

    let mut layers = Vec::new();
    let mut capture = match work
        .as_ref()
        .map(|w| w.load(&decoder, &corpus))
        .transpose()?
        .flatten()
    {
        Some((hidden, parts)) => {
            log.note(&format!(
                "going on after layer {} of {}",
                parts.len(),
                sizes.n_layers
            ));
            layers = parts;
            Capture::at(&decoder, &corpus, hidden, layers.len())
        }
        None => Capture::start(&decoder, &corpus)?,
    };
    let remaining = sizes.n_layers - layers.len();
    // One unit per token captured and one per key fitted.
    let per_layer = corpus.n_tokens() * (1 + sizes.n_kv_heads);
    let progress = log.progress((remaining * per_layer) as u64, "states");
    while layers.len() < sizes.n_layers {
        let part = calibrate_layer(&mut capture, &decoder, &corpus, &kept, &params, &progress, log)?;
        if let Some(work) = &work {
            work.save(
                layers.len(),
                &part,
                &capture.hidden,
                layers.len() + 1 == sizes.n_layers,
            )?;
        }
        layers.push(part);
    }
    drop(progress);
    let section = Section {
        name: a2ats::SECTION,
        params: params.manifest(),
        specs,
        layers,
    };
    artifact::write(output, &origin, vec![section])?;
    if let Some(work) = &work {
        work.clear(sizes.n_layers);
    }
    let seconds = start.elapsed().as_secs_f64();
    log.note(&format!("wrote {} in {seconds:.1} s", args.output.display()));
    if global.json {
        print_json(&json!({
            "artifact": args.output, "tokens": corpus.n_tokens(), "layers": sizes.n_layers,
            "seconds": seconds, "device": device,
        }))?;
    }
    Ok(())
}

/// Captures one layer and fits it.
fn calibrate_layer(
    capture: &mut Capture,
    decoder: &Decoder,
    corpus: &Corpus,
    kept: &[bool],
    params: &FitParams,
    progress: &Progress,
    log: Log,
) -> Result<LayerPart> {
    let c = &decoder.config;
    let layer = capture.next_layer;
    progress.stage(format!("layer {} of {}: capture", layer + 1, c.n_layers));
    let mut keys = Array3::<f32>::zeros((c.n_kv_heads, corpus.n_tokens(), c.head_dim));
    let mut sums = LayerMoments::new(c.n_kv_heads, c.head_dim);
    capture.layer(progress, &mut |rows, states| {
        sums.add(
            states.q_pre.view(),
            &kept[rows.clone()],
            &decoder.rope,
            params.wrope_position,
        );
        keys.slice_mut(s![.., rows, ..]).assign(&states.k_pre);
        Ok(())
    })?;
    progress.stage(format!("layer {} of {}: codebooks", layer + 1, c.n_layers));
    let head_keys = |head| Ok(keys.index_axis(Axis(0), head).to_owned());
    let mut done = |head: usize, quality: &Value| {
        progress.advance(corpus.n_tokens() as u64);
        report_head(progress, log, layer, head, quality);
    };
    a2ats::fit_layer(&head_keys, kept, &sums, params, layer, &mut done)
}

/// Says what the run will need.
fn plan(decoder: &Decoder, corpus: &Corpus, specs: &[Spec], log: Log) {
    let c = &decoder.config;
    let n = corpus.n_tokens();
    let longest = (0..corpus.n_blocks())
        .map(|b| corpus.block(b).len())
        .max()
        .unwrap_or(0);
    let per_token = c.hidden_size + c.n_kv_heads * c.head_dim;
    let per_row = 2 * c.n_heads * c.head_dim + 3 * c.n_kv_heads * c.head_dim + c.hidden_size;
    let mlp = longest.min(2048) * (2 * c.intermediate_size + 2 * c.hidden_size);
    let fit = 3 * n * c.head_dim;
    let file: usize = specs
        .iter()
        .map(|s| s.shape.iter().product::<usize>() * s.dtype.bitsize() / 8)
        .sum();
    let memory = 4 * (n * per_token + (longest * per_row + mlp).max(fit)) + file;
    log.note(&format!(
        "plan: about {:.2} GB of memory besides the pages of one layer, {:.1} MB artifact",
        memory as f64 / 1e9,
        file as f64 / 1e6
    ));
}

/// The folder that lets a stopped run go on.
struct Work {
    dir: PathBuf,
    identity: String,
    specs: Vec<Spec>,
}

const STATE: &str = "state.json";
const HIDDEN: &str = "hidden.safetensors";

impl Work {
    /// Opens the folder for a run with this `identity`.
    ///
    /// # Errors
    /// It holds another run, or this one while `resume` is not set.
    fn open(dir: &Path, identity: &Value, resume: bool, specs: &[Spec]) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, "make the folder", &e))?;
        let identity = hex(&Sha256::digest(identity.to_string().as_bytes()));
        let state = dir.join(STATE);
        if state.is_file() {
            let known = read_json(&state)?;
            if !resume {
                return Err(
                    Error::failed(format!("{} holds an unfinished run", dir.display()))
                        .hint("add --resume to go on with it, or choose another --work folder"),
                );
            }
            if known["identity"] != json!(identity) {
                return Err(Error::failed(format!(
                    "{} holds a run with other inputs or options",
                    dir.display()
                ))
                .hint(
                    "use the same model, text, seed and options as before, or choose another --work folder",
                ));
            }
        } else {
            let text = json!({ "identity": identity }).to_string();
            Output::create(&state)?.finish(text.as_bytes())?;
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            identity,
            specs: specs.to_vec(),
        })
    }

    fn layer_path(&self, layer: usize) -> PathBuf {
        self.dir.join(format!("layer-{layer:05}.safetensors"))
    }

    /// Specs of one layer's part: one layer on the leading axis.
    fn part_specs(&self) -> Vec<Spec> {
        let mut specs = self.specs.clone();
        for spec in &mut specs {
            spec.shape[0] = 1;
        }
        specs
    }

    /// Saves a finished layer, then the hidden states after it.
    fn save(&self, layer: usize, part: &LayerPart, hidden: &Array2<f32>, last: bool) -> Result<()> {
        let tensors: Vec<Tensor> = self
            .part_specs()
            .into_iter()
            .zip(&part.tensors)
            .map(|(spec, bytes)| Tensor {
                spec,
                bytes: bytes.clone(),
            })
            .collect();
        self.write(
            &self.layer_path(layer),
            &tensors,
            json!({ "layer": layer, "quality": part.quality }),
        )?;
        if last {
            return Ok(());
        }
        let values: Vec<f32> = hidden.iter().copied().collect();
        let tensors = [Tensor::new("hidden", hidden.shape(), &values)];
        self.write(
            &self.dir.join(HIDDEN),
            &tensors,
            json!({ "next_layer": layer + 1 }),
        )
    }

    fn write(&self, path: &Path, tensors: &[Tensor], mut manifest: Value) -> Result<()> {
        manifest["identity"] = json!(self.identity);
        manifest["sha256"] = tensors
            .iter()
            .map(|t| (t.spec.name.clone(), json!(t.digest())))
            .collect::<serde_json::Map<_, _>>()
            .into();
        store::write(Output::create(path)?, tensors, Some(&manifest.to_string()))
    }

    /// Opens a file of this run and checks its digests.
    fn read(&self, path: &Path) -> Result<(Store, Value)> {
        let store = Store::open(path)?;
        let manifest = store.manifest()?;
        let intact = manifest["identity"] == json!(self.identity)
            && store.specs().all(|s| {
                let digest = store.bytes(&s.name).map(|b| hex(&Sha256::digest(b)));
                digest.is_some_and(|d| manifest["sha256"][&s.name] == json!(d))
            });
        if intact {
            return Ok((store, manifest));
        }
        Err(Error::failed(format!("{} is damaged", path.display()))
            .hint("remove the --work folder and start again without --resume"))
    }

    /// The hidden states and the finished layers of a stopped run, if it got that far.
    fn load(&self, decoder: &Decoder, corpus: &Corpus) -> Result<Option<(Array2<f32>, Vec<LayerPart>)>> {
        let path = self.dir.join(HIDDEN);
        if !path.is_file() {
            return Ok(None);
        }
        let (store, manifest) = self.read(&path)?;
        let shape = [corpus.n_tokens(), decoder.config.hidden_size];
        let values: Vec<f32> = store.read("hidden", &shape)?;
        let hidden = Array2::from_shape_vec(shape, values).map_err(|e| Error::failed(e.to_string()))?;
        let next = manifest["next_layer"].as_u64().unwrap_or(0) as usize;
        let mut parts = Vec::with_capacity(next);
        for layer in 0..next {
            let (store, manifest) = self.read(&self.layer_path(layer))?;
            let tensors = self
                .part_specs()
                .iter()
                .map(|spec| Ok(store.checked(spec)?.to_vec()))
                .collect::<Result<_>>()?;
            let quality = manifest["quality"].as_array().cloned().unwrap_or_default();
            parts.push(LayerPart { tensors, quality });
        }
        Ok(Some((hidden, parts)))
    }

    /// Removes what a finished run does not need any more.
    fn clear(&self, n_layers: usize) {
        let files = (0..n_layers).map(|i| self.layer_path(i));
        for path in files.chain([self.dir.join(HIDDEN), self.dir.join(STATE)]) {
            // The artifact is safe; a file left behind costs disk space alone.
            let _ = std::fs::remove_file(path);
        }
        let _ = std::fs::remove_dir(&self.dir);
    }
}
