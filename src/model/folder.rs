//! Where a checkpoint is: the path of its folder or GGUF file, or the id of a model in the cache of the Hugging Face hub.
//! Nothing is downloaded.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::gguf::is_gguf;
use crate::disk::user_cache;
use crate::error::{Error, Result};

/// What `--model` takes.
const TAKES: &str = "give ⟨model⟩ the folder of a Hugging Face checkpoint (it contains config.json), a GGUF file, or the id \
                     of a model in the Hugging Face cache, such as Qwen/Qwen3-0.6B";

/// Finds the folder or GGUF file that `--model` means: the path itself, the only GGUF file in a folder without checkpoint, the
/// snapshot of a model's folder in the hub's cache, or the snapshot of a hub id (`org/name`, `org/name@revision`). A path
/// that is none of these is returned unchanged; [`check`] then says what is wrong with it.
pub fn find(given: PathBuf) -> PathBuf {
    if given.is_dir() {
        if let ([only], false) = (&gguf_files(&given)[..], given.join("config.json").exists()) {
            return only.clone();
        }
        return match &models(&given, false)[..] {
            [(_, dir)] => dir.clone(),
            _ => given,
        };
    }
    let found = given.to_str().and_then(HubId::parse).and_then(|id| {
        let folder = hub_cache()?.join(id.folder());
        snapshot(&folder, id.revision)
    });
    found.unwrap_or(given)
}

/// Lists the GGUF files in a folder.
fn gguf_files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|of| of == "gguf"))
        .collect();
    files.sort();
    files
}

/// Names the model in a folder or file: the id of a snapshot in the hub's cache, else the name of the folder, or that of the
/// file without its extension.
pub fn name(dir: &Path) -> String {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let folders = dir.ancestors().filter_map(Path::file_name);
    let mut ids = folders.filter_map(|name| name.to_str()?.strip_prefix("models--"));
    match (dir.parent().and_then(Path::file_name), ids.next()) {
        (Some(parent), Some(id)) if parent == "snapshots" => id.replacen("--", "/", 1),
        _ => if dir.is_file() {
            dir.file_stem()
        } else {
            dir.file_name()
        }
        .map_or(String::new(), |name| name.to_string_lossy().into_owned()),
    }
}

/// Lists the models that a folder without config.json contains, each with what `--model` takes for it and its folder: the
/// folder of a model in the hub's cache has one, the cache itself, or the folder above it, has those that were
/// downloaded, and `snapshots` has the versions of one. Of other folders, the checkpoints in them count if `any` is true.
fn models(dir: &Path, any: bool) -> Vec<(String, PathBuf)> {
    if dir.join("config.json").exists() {
        return Vec::new();
    }
    if dir.join("snapshots").is_dir() {
        let found = snapshot(dir, None).map(|found| (dir.display().to_string(), found));
        return found.into_iter().collect();
    }
    let folders = |dir: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut folders: Vec<PathBuf> = entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect();
        folders.sort();
        folders
    };
    let name = |path: &Path| {
        path.file_name()
            .map_or(String::new(), |name| name.to_string_lossy().into_owned())
    };
    let cache = if dir.join("hub").is_dir() {
        dir.join("hub")
    } else {
        dir.to_owned()
    };
    let is_hub = hub_cache().is_some_and(|hub| hub == cache);
    let mut out = Vec::new();
    for folder in folders(&cache) {
        if let Some(id) = name(&folder).strip_prefix("models--") {
            // An id is looked up in the hub's cache, a path anywhere.
            let named = if is_hub {
                id.replace("--", "/")
            } else {
                folder.display().to_string()
            };
            out.extend(snapshot(&folder, None).map(|found| (named, found)));
        } else if (any || name(dir) == "snapshots") && folder.join("config.json").exists() {
            out.push((folder.display().to_string(), folder));
        }
    }
    out
}

/// The id of a model on the hub.
struct HubId<'a> {
    name: &'a str,
    revision: Option<&'a str>,
}

impl<'a> HubId<'a> {
    /// Parses `name` or `org/name`, with or without `@revision`; `None` for text that can only be a path.
    fn parse(text: &'a str) -> Option<Self> {
        let (name, revision) = match text.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (text, None),
        };
        let is_part = |part: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !part.is_empty() && !part.starts_with('.') && part.chars().all(is_plain)
        };
        let is_id = name.split('/').count() <= 2 && name.split('/').all(is_part);
        (is_id && revision.is_none_or(is_part)).then_some(Self { name, revision })
    }

    /// Names the model's folder in the cache.
    fn folder(&self) -> String {
        format!("models--{}", self.name.replace('/', "--"))
    }
}

/// Returns the hub's cache, found as the hub's own tools find it: by `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME` or the
/// home folder.
fn hub_cache() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("HF_HUB_CACHE").or_else(|| {
        let home = variable("HF_HOME").or_else(|| Some(user_cache()?.join("huggingface")));
        Some(home?.join("hub"))
    })
}

/// Returns the snapshot of the given revision; without a revision, that of `main`, or else the latest.
fn snapshot(model: &Path, revision: Option<&str>) -> Option<PathBuf> {
    let snapshots = model.join("snapshots");
    let named = |revision: &str| {
        let commit = std::fs::read_to_string(model.join("refs").join(revision)).ok();
        let dir = snapshots.join(commit.as_deref().map_or(revision, str::trim));
        dir.is_dir().then_some(dir)
    };
    if let Some(revision) = revision {
        return named(revision);
    }
    named("main").or_else(|| {
        let entries = std::fs::read_dir(&snapshots).ok()?;
        let folders = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_dir());
        folders.max_by_key(|dir| (dir.metadata().and_then(|of| of.modified()).ok(), dir.clone()))
    })
}

/// Fails if `dir` cannot be the folder of a checkpoint that this program runs; the error says what it is instead.
///
/// # Errors
/// No folder; a file or a folder of another format.
pub fn check(dir: &Path) -> Result<()> {
    let shown = dir.display();
    if dir.is_file() {
        return Err(match other_format(dir) {
            Some((what, hint)) => Error::invalid(format!("model {shown} is {what}")).hint(hint),
            None => Error::not_found(format!("model folder {shown} is not a folder")).hint(TAKES),
        });
    }
    if !dir.exists() {
        return Err(absent(dir));
    }
    if !dir.join("config.json").exists() {
        return match foreign(dir) {
            Some((what, hint)) => {
                Err(Error::invalid(format!("model folder {shown} contains {what}")).hint(hint))
            }
            None => Err(no_checkpoint(dir)),
        };
    }
    Ok(())
}

/// Fails if `config`, the content of config.json, says that the weights are quantised.
///
/// # Errors
/// Quantised weights.
pub fn check_weights(dir: &Path, config: &Value) -> Result<()> {
    let quantised = config.get("quantization_config").filter(|value| !value.is_null());
    match quantised {
        Some(how) => Err(quantisation(dir, how["quant_method"].as_str())),
        None => Ok(()),
    }
}

/// Makes the error for quantised weights.
fn quantisation(dir: &Path, method: Option<&str>) -> Error {
    let name = match method.unwrap_or("unknown method") {
        "awq" => "AWQ",
        "gptq" => "GPTQ",
        "bitsandbytes" => "bitsandbytes",
        "fp8" | "fbgemm_fp8" => "FP8",
        other => other,
    };
    Error::unsupported(format!("the weights in {} are quantised ({name})", dir.display()))
        .hint("give the f32, f16 or bf16 checkpoint from which it was made, or a GGUF file")
}

/// Most models that a hint names.
const NAMED: usize = 5;

/// Says that a folder is not a checkpoint, and which models it contains.
fn no_checkpoint(dir: &Path) -> Error {
    let error = Error::not_found(format!(
        "{} is not the folder of a checkpoint: it has no config.json",
        dir.display()
    ));
    let models = models(dir, true);
    if models.is_empty() {
        return error.hint(TAKES);
    }
    let names: Vec<&str> = models.iter().take(NAMED).map(|(name, _)| &name[..]).collect();
    let more = match models.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    error.hint(format!(
        "give ⟨model⟩ a checkpoint in it: {}{more}",
        names.join(", ")
    ))
}

/// Says why there is no folder of this name.
fn absent(dir: &Path) -> Error {
    let absent = format!("model {} does not exist", dir.display());
    let Some(id) = dir
        .to_str()
        .and_then(HubId::parse)
        .filter(|id| id.name.contains('/'))
    else {
        return Error::not_found(absent).hint(TAKES);
    };
    let cache = hub_cache().map_or(String::new(), |cache| {
        format!(
            ", and the Hugging Face cache at {} does not contain it",
            cache.display()
        )
    });
    let revision = id
        .revision
        .map_or(String::new(), |of| format!(" --revision {of}"));
    Error::not_found(format!("{absent}{cache}")).hint(format!(
        "download it with `hf download {}{revision}` (kvsmith downloads nothing), or give the folder of a checkpoint",
        id.name
    ))
}

/// A file of another format and what to do with it.
type Foreign = (&'static str, &'static str);

const GGUF: Foreign = ("weights in GGUF", "give ⟨model⟩ the GGUF file itself");
const PICKLE: Foreign = (
    "weights in PyTorch's .bin format",
    "convert pytorch_model.bin to safetensors first, with AutoModelForCausalLM.from_pretrained(..).save_pretrained(..)",
);
const ORIGINAL: Foreign = (
    "weights in PyTorch's .pth format",
    "give the model's Hugging Face version (config.json and .safetensors), or make it with the conversion script of transformers",
);
const ADAPTER: Foreign = (
    "a PEFT adapter without the weights of its model",
    "merge it first, with PeftModel.from_pretrained(..).merge_and_unload().save_pretrained(..)",
);

/// Fails if a file that should be an artifact has weights of another format.
///
/// # Errors
/// A file in GGUF or of PyTorch.
pub fn check_artifact(path: &Path) -> Result<()> {
    let has = |extension| path.extension().is_some_and(|e| e == extension);
    let found = if is_gguf(path) || path.is_file() && has("gguf") {
        Some("a GGUF file")
    } else {
        other_format(path)
            .filter(|_| path.is_file() && !has("safetensors"))
            .map(|(what, _)| what)
    };
    match found {
        Some(what) => Err(
            Error::invalid(format!("{} is {what}, not an artifact", path.display()))
                .hint("give an artifact made by `kvsmith calibrate`"),
        ),
        None => Ok(()),
    }
}

/// Recognises a file that is given in place of a folder.
fn other_format(path: &Path) -> Option<Foreign> {
    let mut start = [0; 4];
    let _ = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    match (&start, extension) {
        (_, "gguf") => Some((
            "no GGUF file, although its name says so",
            "the file is damaged or its download is incomplete; download it again",
        )),
        (b"PK\x03\x04", "bin") => Some(("a PyTorch file", PICKLE.1)),
        (_, "pth" | "pt") => Some(("a PyTorch file", ORIGINAL.1)),
        (_, "safetensors") => Some((
            "a single file of a checkpoint",
            "give the folder that contains this file and config.json",
        )),
        _ => None,
    }
}

/// Recognises weights of another format in a folder.
pub fn foreign(dir: &Path) -> Option<Foreign> {
    let entries = std::fs::read_dir(dir).ok()?;
    let names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let any = |is: &dyn Fn(&str) -> bool| names.iter().any(|name| is(name));
    let is_original = |name: &str| name.ends_with(".pth") || name.ends_with(".pt");
    let is_pickle = |name: &str| name.starts_with("pytorch_model") && name.ends_with(".bin");
    if any(&|name| name == "adapter_config.json") {
        Some(ADAPTER)
    } else if any(&|name| name.ends_with(".gguf")) {
        Some(GGUF)
    } else if any(&is_pickle) {
        Some(PICKLE)
    } else if any(&is_original) {
        Some(ORIGINAL)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_paths() {
        let id = |text: &str| HubId::parse(text).map(|id| (id.folder(), id.revision.map(str::to_owned)));
        assert_eq!(
            id("meta-llama/Llama-3.1-8B"),
            Some(("models--meta-llama--Llama-3.1-8B".to_owned(), None))
        );
        assert_eq!(
            id("gpt2@v1.0"),
            Some(("models--gpt2".to_owned(), Some("v1.0".to_owned())))
        );
        for path in [
            "./model", "../model", "/model", "a/b/c", "a//b", "", "a b", "org/", "a/b@", "~/model",
        ] {
            assert_eq!(id(path), None, "{path}");
        }
    }
}
