//! The folder from which a stopped calibration resumes: one file per finished layer, and the hidden states after the
//! last finished layer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ndarray::{Array2, Axis};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::artifact::{LayerPart, LayerParts, Report, Section};
use crate::disk::{Folder, FolderKind, Output};
use crate::dump::{is_layer_file, layer_file};
use crate::error::{Error, Result};
use crate::store::{self, Spec, Store, Tensor, Writer, hex};

/// The folder of one run; locked while it is open.
pub struct WorkFolder {
    folder: Folder,
    identity: String,
    /// Each section's name, and the tensors of one of its layers.
    sections: Vec<(&'static str, Vec<Spec>)>,
}

/// The manifest of a file of the folder.
#[derive(Serialize, Deserialize)]
struct WorkManifest<T> {
    /// Digest of the run's inputs and options.
    identity: String,
    /// Digest of each tensor's data.
    sha256: BTreeMap<String, String>,
    #[serde(flatten)]
    content: T,
}

#[derive(Serialize, Deserialize)]
struct FinishedLayer {
    layer: usize,
    /// The quality reports: per section, in the order that the identity fixes, and per KV head.
    quality: Vec<Vec<Report>>,
}

#[derive(Serialize, Deserialize)]
struct HiddenStates {
    next_layer: usize,
}

/// How work folders are named and marked, and which files they hold.
static KIND: FolderKind = FolderKind {
    name: "work folder",
    mark: "state.json",
    holds: |name| name == HIDDEN || is_layer_file(name),
};

const HIDDEN: &str = "hidden.safetensors";
/// Rows of hidden states per write.
const ROWS: usize = 1024;

/// Counts the finished layers of a work folder, and all of its layers; `None` for other folders.
pub fn progress(dir: &Path) -> Option<[usize; 2]> {
    let files = Folder::marked(dir, &KIND)?;
    let layers = files.iter().filter(|name| is_layer_file(name));
    let done = layers.clone().filter(|name| dir.join(name).is_file());
    Some([done.count(), layers.count()])
}

impl WorkFolder {
    /// Opens the folder for a run with this `identity` on a model with `n_layers` layers.
    ///
    /// # Errors
    /// The folder holds another run, or this run although `resume` is not set, or files that no run of kvsmith wrote;
    /// or another process uses the folder.
    pub fn open(
        dir: &Path,
        identity: &Value,
        resume: bool,
        sections: &[Section],
        n_layers: usize,
    ) -> Result<Self> {
        let identity = hex(&Sha256::digest(identity.to_string().as_bytes()));
        // The hidden states come first, so that they are removed first: without them, a run starts from the beginning.
        let files: Vec<String> = [HIDDEN.to_owned()]
            .into_iter()
            .chain((0..n_layers).map(layer_file))
            .collect();
        let (folder, is_new) = Folder::claim(dir, &KIND, files.clone(), &json!(identity))?;
        if !is_new && !resume {
            return Err(
                Error::invalid(format!("{} contains an unfinished run", dir.display()))
                    .hint("add ⟨resume⟩ to continue it, or choose another ⟨work⟩ folder"),
            );
        }
        if *folder.run() != json!(identity) || folder.files() != files {
            return Err(Error::mismatch(format!(
                "{} contains a run with other inputs or options",
                dir.display()
            ))
            .hint(
                "use the same model, text, seed and options as that run, or choose another ⟨work⟩ folder",
            ));
        }
        let of = |section: &Section| (section.kind.name(), section.layer_specs());
        Ok(Self {
            folder,
            identity,
            sections: sections.iter().map(of).collect(),
        })
    }

    fn layer_path(&self, layer: usize) -> PathBuf {
        self.folder.file(&layer_file(layer))
    }

    /// Saves a finished layer, then, unless it is the last, the hidden states after it.
    pub fn save(&self, layer: usize, parts: &LayerParts, hidden: &Array2<f32>, last: bool) -> Result<()> {
        let missing = |what: &str| Error::internal(format!("internal: layer {layer} has no {what}"));
        let (mut tensors, mut quality) = (Vec::new(), Vec::new());
        for (name, specs) in &self.sections {
            let part = parts.get(name).ok_or_else(|| missing(name))?;
            for spec in specs {
                let bytes = part.tensors.get(&spec.name).ok_or_else(|| missing(&spec.name))?;
                tensors.push(Tensor {
                    spec: spec.clone(),
                    bytes: bytes.clone(),
                });
            }
            quality.push(part.quality.clone());
        }
        let digests = tensors.iter().map(|t| (t.spec.name.clone(), t.digest()));
        let manifest = self.manifest(digests.collect(), FinishedLayer { layer, quality });
        let output = Output::create(&self.layer_path(layer))?;
        store::write(output, &tensors, Some(&manifest))?;
        if last {
            Ok(())
        } else {
            self.save_hidden(hidden, layer + 1)
        }
    }

    /// Returns the text of the manifest of a file whose tensors have these digests.
    fn manifest(&self, sha256: BTreeMap<String, String>, content: impl Serialize) -> String {
        let identity = self.identity.clone();
        let manifest = WorkManifest {
            identity,
            sha256,
            content,
        };
        let mut manifest = json!(manifest);
        store::seal(&mut manifest);
        manifest.to_string()
    }

    /// Saves the input of `next_layer`, a few rows at a time.
    fn save_hidden(&self, hidden: &Array2<f32>, next_layer: usize) -> Result<()> {
        let blocks = || {
            let chunks = hidden.axis_chunks_iter(Axis(0), ROWS);
            chunks.map(|rows| store::to_bytes(&rows.into_iter().copied().collect::<Vec<f32>>()))
        };
        let mut hash = Sha256::new();
        blocks().for_each(|bytes| hash.update(bytes));
        let digests = BTreeMap::from([("hidden".to_string(), hex(&hash.finalize()))]);
        let manifest = self.manifest(digests, HiddenStates { next_layer });
        let output = Output::create(&self.folder.file(HIDDEN))?;
        let specs = [Spec::new::<f32>("hidden", hidden.shape())];
        let writer = Writer::new(output, &specs, Some(&manifest))?;
        let mut at = 0;
        for bytes in blocks() {
            writer.put("hidden", at, &bytes)?;
            at += bytes.len();
        }
        writer.finish()
    }

    /// Opens a file of this run and checks its digests; returns it with the rest of its manifest.
    fn read<T: DeserializeOwned>(&self, path: &Path) -> Result<(Store, T)> {
        let store = Store::open(path).map_err(|e| e.hint(self.advice()))?;
        let manifest = store.manifest()?;
        let sealed = store
            .metadata()
            .is_some_and(|text| store::seal_holds(text, &manifest));
        let manifest = serde_json::from_value(manifest).ok();
        let intact = manifest.filter(|manifest: &WorkManifest<T>| {
            sealed
                && manifest.identity == self.identity
                && store
                    .specs()
                    .all(|s| store.digest(&s.name).as_ref() == manifest.sha256.get(&s.name))
        });
        let content = intact.ok_or_else(|| self.damaged(path))?.content;
        Ok((store, content))
    }

    /// Makes the error for a file that differs from what this run wrote.
    fn damaged(&self, path: &Path) -> Error {
        Error::damaged(format!("{} is damaged or does not belong here", path.display())).hint(self.advice())
    }

    fn advice(&self) -> String {
        format!(
            "remove {} and start again without ⟨resume⟩",
            self.folder.path().display()
        )
    }

    /// Reads the hidden states before the next layer, and the finished layers, of a stopped run; `None` if the run
    /// stopped before it had saved hidden states.
    pub fn load(&self, shape: [usize; 2]) -> Result<Option<(Array2<f32>, Vec<LayerParts>)>> {
        let path = self.folder.file(HIDDEN);
        if !path.is_file() {
            return Ok(None);
        }
        let (store, HiddenStates { next_layer }) = self.read(&path)?;
        if !(1..self.n_layers()).contains(&next_layer) {
            return Err(self.damaged(&path));
        }
        let values: Vec<f32> = store.read("hidden", &shape)?;
        let hidden = Array2::from_shape_vec(shape, values)?;
        let layers = (0..next_layer).map(|layer| self.load_layer(layer));
        Ok(Some((hidden, layers.collect::<Result<_>>()?)))
    }

    /// Reads the parts of a finished layer.
    fn load_layer(&self, layer: usize) -> Result<LayerParts> {
        let path = self.layer_path(layer);
        let (store, finished): (_, FinishedLayer) = self.read(&path)?;
        let quality = finished.quality;
        if finished.layer != layer || quality.len() != self.sections.len() {
            return Err(self.damaged(&path));
        }
        let part = |((name, specs), quality): (&(&'static str, Vec<Spec>), Vec<Report>)| {
            let bytes = |spec: &Spec| Ok((spec.name.clone(), store.checked(spec)?.to_vec()));
            let tensors = specs.iter().map(bytes).collect::<Result<_>>()?;
            Ok((*name, LayerPart { tensors, quality }))
        };
        self.sections.iter().zip(quality).map(part).collect()
    }

    /// Counts the layers of the model.
    fn n_layers(&self) -> usize {
        // Every file except the hidden states is that of a layer.
        self.folder.files().len() - 1
    }

    /// Removes the folder's files, which a finished run no longer needs.
    pub fn clear(self) {
        self.folder.remove();
    }
}
