//! The folder that lets a stopped calibration go on: a file per finished layer, and the hidden
//! states after the last of them.

use std::fs::File;
use std::path::{Path, PathBuf};

use ndarray::{Array2, Axis};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::artifact::{LayerPart, Section};
use crate::error::{Error, Result};
use crate::model::fields::read_json;
use crate::store::hex;
use crate::store::{self, Output, Spec, Store, Tensor, Writer};

/// The folder of one run; locked while it is open.
pub struct Work {
    dir: PathBuf,
    identity: String,
    /// Tensors of each section.
    specs: Vec<Vec<Spec>>,
    /// Held until the run ends, however it ends.
    _lock: File,
}

/// Where a stopped run goes on: the hidden states before the next layer, and for each finished layer
/// a part per section.
pub type Resumed = (Array2<f32>, Vec<Vec<LayerPart>>);

const STATE: &str = "state.json";
const HIDDEN: &str = "hidden.safetensors";
const LOCK: &str = "lock";
/// Rows of hidden states that are written together.
const ROWS: usize = 1024;

impl Work {
    /// Opens the folder for a run with this `identity`.
    ///
    /// # Errors
    /// It holds another run, or this one while `resume` is not set, or another process works in it.
    pub fn open(dir: &Path, identity: &Value, resume: bool, sections: &[Section]) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, "make the folder", &e))?;
        let path = dir.join(LOCK);
        let lock = File::create(&path).map_err(|e| Error::io(&path, "write", &e))?;
        if matches!(lock.try_lock(), Err(std::fs::TryLockError::WouldBlock)) {
            return Err(
                Error::failed(format!("another process works in {}", dir.display()))
                    .hint("wait for it, or choose another --work folder"),
            );
        }
        remove_leftovers(dir);
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
            specs: sections.iter().map(|s| s.specs.clone()).collect(),
            _lock: lock,
        })
    }

    fn layer_path(&self, layer: usize) -> PathBuf {
        self.dir.join(format!("layer-{layer:05}.safetensors"))
    }

    /// Specs of one layer's parts, section by section: one layer on the leading axis.
    fn part_specs(&self) -> Vec<Vec<Spec>> {
        let mut specs = self.specs.clone();
        for spec in specs.iter_mut().flatten() {
            spec.shape[0] = 1;
        }
        specs
    }

    /// Saves a finished layer, a part per section, then the hidden states after it.
    pub fn save(&self, layer: usize, parts: &[LayerPart], hidden: &Array2<f32>, last: bool) -> Result<()> {
        let bytes = parts.iter().flat_map(|p| &p.tensors).cloned();
        let tensors: Vec<Tensor> = self
            .part_specs()
            .into_iter()
            .flatten()
            .zip(bytes)
            .map(|(spec, bytes)| Tensor { spec, bytes })
            .collect();
        let quality: Vec<&Vec<Value>> = parts.iter().map(|p| &p.quality).collect();
        self.write(
            &self.layer_path(layer),
            &tensors,
            json!({ "layer": layer, "quality": quality }),
        )?;
        if last {
            return Ok(());
        }
        self.save_hidden(hidden, layer + 1)
    }

    /// Saves the input of `next_layer`, row block by row block.
    fn save_hidden(&self, hidden: &Array2<f32>, next_layer: usize) -> Result<()> {
        let blocks = || {
            hidden.axis_chunks_iter(Axis(0), ROWS).map(|rows| {
                let values: Vec<f32> = rows.iter().copied().collect();
                store::to_bytes(&values)
            })
        };
        let mut hash = Sha256::new();
        blocks().for_each(|bytes| hash.update(bytes));
        let manifest = json!({
            "identity": self.identity,
            "next_layer": next_layer,
            "sha256": { "hidden": hex(&hash.finalize()) },
        });
        let output = Output::create(&self.dir.join(HIDDEN))?;
        let specs = vec![Spec::new::<f32>("hidden", hidden.shape())];
        let writer = Writer::new(output, specs, Some(&manifest.to_string()))?;
        let mut at = 0;
        for bytes in blocks() {
            writer.put("hidden", at, &bytes)?;
            at += bytes.len();
        }
        writer.finish()
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
    pub fn load(&self, shape: [usize; 2]) -> Result<Option<Resumed>> {
        let path = self.dir.join(HIDDEN);
        if !path.is_file() {
            return Ok(None);
        }
        let (store, manifest) = self.read(&path)?;
        let values: Vec<f32> = store.read("hidden", &shape)?;
        let hidden = Array2::from_shape_vec(shape, values).map_err(|e| Error::failed(e.to_string()))?;
        let next = manifest["next_layer"].as_u64().unwrap_or(0) as usize;
        let layers = (0..next)
            .map(|layer| self.load_layer(layer))
            .collect::<Result<_>>()?;
        Ok(Some((hidden, layers)))
    }

    /// The parts of a finished layer, one per section.
    fn load_layer(&self, layer: usize) -> Result<Vec<LayerPart>> {
        let (store, manifest) = self.read(&self.layer_path(layer))?;
        let part = |(section, specs): (usize, Vec<Spec>)| {
            let bytes = |spec: &Spec| Ok(store.checked(spec)?.to_vec());
            Ok(LayerPart {
                tensors: specs.iter().map(bytes).collect::<Result<_>>()?,
                quality: manifest["quality"][section]
                    .as_array()
                    .cloned()
                    .unwrap_or_default(),
            })
        };
        self.part_specs().into_iter().enumerate().map(part).collect()
    }

    /// Removes what a finished run does not need any more.
    pub fn clear(&self, n_layers: usize) {
        let files = (0..n_layers).map(|i| self.layer_path(i));
        for path in files.chain([HIDDEN, STATE, LOCK].map(|f| self.dir.join(f))) {
            // The artifact is safe; a file left behind costs disk space alone.
            let _ = std::fs::remove_file(path);
        }
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// Removes temporary files of a run that was killed.
fn remove_leftovers(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(store::TEMP_PREFIX) && name.ends_with(store::TEMP_SUFFIX) {
            // Harmless but for the space that it takes.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
