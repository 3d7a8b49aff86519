//! Writes a dump: runs the model over the text once, layer by layer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ndarray::{Array3, ArrayView3, Axis};
use serde_json::{Value, json};

use super::layer::BLOCK_SUMS;
use super::moments::Moments;
use super::read::read_manifest;
use super::{
    DumpManifest, DumpOptions, FORMAT, MANIFEST, MOMENTS, Shard, TOKENS, UNFINISHED, layer_file, layer_specs,
    sum_specs,
};
use crate::capture::Capture;
use crate::compute::device::Device;
use crate::corpus::{Corpus, Origin};
use crate::disk::{self, Folder, Output};
use crate::env::Reporter;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::fields::read_json;
use crate::model::forward::Layers;
use crate::stats::moments::{Position, QuerySums};
use crate::store::{self, FileDigest, Spec, Tensor, Writer};
use crate::wording::size;

/// Runs the model over the corpus, which is the whole text or the blocks of `job.shard`, and fills the dump folder.
///
/// # Errors
/// The disk has too little space for the dump, or the model fails.
pub fn write(
    layers: &dyn Layers,
    device: &dyn Device,
    corpus: &Corpus,
    job: DumpJob,
    new: NewDump,
    reporter: &dyn Reporter,
) -> Result<()> {
    let decoder = layers.decoder();
    let sizes = decoder.config.sizes();
    let n = corpus.n_tokens();
    let options = &job.options;
    let mut specs = layer_specs(sizes, n, options);
    if job.shard.is_some() {
        specs.extend(sum_specs(sizes, corpus.n_blocks()));
    }
    check_space(new.folder.path(), &specs, sizes.n_layers)?;
    write_tokens(corpus, new.output(TOKENS)?)?;

    let kept = corpus.kept();
    let mut moments = Vec::with_capacity(sizes.n_layers);
    let progress = reporter.progress((n * sizes.n_layers) as u64, "tokens x layers");
    let mut capture = Capture::start(layers, corpus)?;
    for i in 0..sizes.n_layers {
        progress.layer(i, sizes.n_layers, "capture");
        let writer = Writer::new(new.output(&layer_file(i))?, &specs, None)?;
        let mut sums = QuerySums::new(sizes.n_kv_heads, sizes.head_dim);
        let mut blocks = 0..corpus.n_blocks();
        capture.layer(progress.as_ref(), &mut |rows, states| {
            let (q, kept) = (states.q.view(), &kept[rows.clone()]);
            let block = QuerySums::of_block(device, sizes.n_kv_heads, q, kept, decoder.ropes.layer(i))?;
            sums.add(&block);
            if let Some(i) = blocks.next().filter(|_| job.shard.is_some()) {
                put_sums(&writer, i, &block)?;
            }
            let put = |name, x: &Array3<f32>| put_rows(&writer, name, x.view(), rows.start, n, options.dtype);
            put("k_pre", &states.k)?;
            if options.queries {
                put("q_pre", &states.q)?;
            }
            if options.values {
                put("v", &states.v)?;
            }
            Ok(())
        })?;
        writer.finish()?;
        moments.push(sums);
    }
    let mut moments = Moments::new(moments, Position::Windowed(options.wrope_position), job.origin);
    moments.shard = job.shard;
    moments.write(new.output(MOMENTS)?)?;
    let manifest = DumpManifest {
        format: FORMAT,
        kind: UNFINISHED.name.to_string(),
        tool_version: env!("CARGO_PKG_VERSION").to_string(),
        device: device.name().to_string(),
        files: new.digests()?,
        origin: moments.origin,
        options: job.options,
        shard: moments.shard,
    };
    new.complete(&manifest)
}

/// What decides a dump.
#[derive(Clone, Debug)]
pub struct DumpJob {
    /// The model and the whole text.
    pub origin: Origin,
    /// Which states the dump keeps, and how.
    pub options: DumpOptions,
    /// The part of the text to dump; `None` for all of it.
    pub shard: Option<Shard>,
}

/// Tells whether `dir` is the complete dump of this job.
///
/// # Errors
/// The folder holds another dump.
pub fn is_done(dir: &Path, job: &DumpJob, device: &str) -> Result<bool> {
    if !dir.join(MANIFEST).exists() {
        return Ok(false);
    }
    let found = read_manifest(dir)?;
    let same = [
        ("model", found.origin.model == job.origin.model),
        ("text", found.origin.calibration == job.origin.calibration),
        ("⟨precision⟩", found.origin.precision == job.origin.precision),
        (
            "version of kvsmith",
            found.tool_version == env!("CARGO_PKG_VERSION"),
        ),
        ("device", found.device == device),
        (
            "⟨queries⟩, ⟨values⟩, ⟨dtype⟩ or ⟨wrope_position⟩",
            found.options == job.options,
        ),
        ("shard", found.shard == job.shard),
    ];
    match same.iter().find(|(_, same)| !same) {
        None => Ok(true),
        Some((what, _)) => {
            let error = Error::mismatch(format!(
                "{} contains another dump: its {what} differs",
                dir.display()
            ));
            Err(error.hint("remove it, or choose another folder with ⟨output⟩"))
        }
    }
}

/// A dump folder that is not complete yet; dropping it removes what was written.
pub struct NewDump {
    folder: Folder,
    /// The place of a complete dump, to which its folder is then renamed.
    place: Option<PathBuf>,
    /// Whether a dump at this place is replaced.
    replaces: bool,
    complete: bool,
}

impl NewDump {
    /// Claims a folder for the dump of a model with `n_layers` layers. With `overwrite`, it may hold a dump, which is
    /// replaced when the new one is complete, and other files, which stay.
    ///
    /// # Errors
    /// The folder holds a dump or other files without `overwrite`, or files with the names of a dump's files that belong to
    /// none, or cannot be written.
    pub fn create(dir: &Path, n_layers: usize, overwrite: bool) -> Result<Self> {
        if dir.as_os_str().is_empty() {
            return Err(Error::usage("⟨output⟩ does not name a folder")
                .hint("give the name of a new folder with ⟨output⟩"));
        }
        if dir.join(MANIFEST).exists() {
            if overwrite {
                // Nothing but a dump is replaced.
                super::read::summary(dir)?;
                let mut new = Self::attempt(dir, n_layers)?;
                new.replaces = true;
                return Ok(new);
            }
            let error = Error::usage(format!("{} already contains a dump", dir.display()));
            return Err(error.hint("add ⟨overwrite⟩ to replace it, or choose another folder with ⟨output⟩"));
        }
        let is_empty = std::fs::read_dir(dir).map_or(true, |mut files| files.next().is_none());
        if !is_empty && !overwrite && Folder::marked(dir, &UNFINISHED).is_none() {
            let error = Error::usage(format!("{} contains other files than a dump", dir.display()));
            return Err(error
                .hint("choose a new folder, or add ⟨overwrite⟩: the files that are there stay as they are"));
        }
        let files = files(n_layers);
        let claim = || Folder::claim(dir, &UNFINISHED, files.clone(), &Value::Null);
        let (mut folder, is_new) = claim()?;
        if !is_new {
            // Removes the files that a killed process left.
            folder.remove();
            drop(folder);
            folder = claim()?.0;
        }
        Ok(Self {
            folder,
            place: None,
            replaces: false,
            complete: false,
        })
    }

    /// Claims a folder under a temporary name beside `dir` for a shard. The folder gets its name by one rename when it
    /// is complete: several attempts at one shard, on one machine or on several, do not disturb each other.
    ///
    /// # Errors
    /// The folder of `dir` cannot be written.
    pub fn attempt(dir: &Path, n_layers: usize) -> Result<Self> {
        let claim = || {
            Folder::claim(
                &disk::attempt(dir, &UNFINISHED)?,
                &UNFINISHED,
                files(n_layers),
                &Value::Null,
            )
        };
        // Before it has its mark, another process may take a new folder for one that was left, and remove it.
        let (folder, _) = claim().or_else(|_| claim())?;
        Ok(Self {
            folder,
            place: Some(dir.to_path_buf()),
            replaces: false,
            complete: false,
        })
    }

    /// Starts a file of the folder.
    fn output(&self, name: &str) -> Result<Output> {
        Output::create(&self.folder.file(name))
    }

    /// Computes the digests of all files.
    fn digests(&self) -> Result<BTreeMap<String, FileDigest>> {
        let files = self.folder.files().iter();
        files
            .map(|name| Ok((name.clone(), store::file_digest(&self.folder.file(name))?)))
            .collect()
    }

    /// Writes the manifest, sealed with its own digest, which makes the dump complete.
    fn complete(mut self, manifest: &DumpManifest) -> Result<()> {
        let mut manifest = json!(manifest);
        store::seal(&mut manifest);
        let text = serde_json::to_vec_pretty(&manifest).map_err(|e| Error::system(e.to_string()))?;
        self.folder.complete(MANIFEST, &text)?;
        let Some(place) = &self.place else {
            self.complete = true;
            return Ok(());
        };
        if self.replaces {
            replace(self.folder.path(), place, self.folder.files())?;
            self.complete = true;
            return Ok(());
        }
        match disk::rename_folder(self.folder.path(), place) {
            Ok(()) => {
                self.complete = true;
                Ok(())
            }
            // Another attempt was faster: what is there must be the same.
            Err(_) if same_content(place, &manifest) => Ok(()),
            Err(e) => Err(Error::io(place, "write", &e)),
        }
    }
}

/// Puts a complete dump in the place of another, file by file. Files at that place that belong to no dump stay.
///
/// Meanwhile the manifest has the name of the mark of an unfinished dump: if the process is killed, the next dump takes the
/// folder over.
fn replace(new: &Path, place: &Path, files: &[String]) -> Result<()> {
    let (manifest, mark) = (place.join(MANIFEST), place.join(UNFINISHED.mark));
    let failed = |e| Error::io(place, "write", &e);
    disk::rename(&manifest, &mark).map_err(failed)?;
    let old = Folder::marked(place, &UNFINISHED).unwrap_or_default();
    for name in old.iter().filter(|name| (UNFINISHED.holds)(name)) {
        disk::remove_file(&place.join(name)).map_err(failed)?;
    }
    disk::rename(&new.join(MANIFEST), &mark).map_err(failed)?;
    for name in files {
        disk::rename(&new.join(name), &place.join(name)).map_err(failed)?;
    }
    disk::rename(&mark, &manifest).map_err(failed)?;
    std::fs::remove_dir(new).map_err(failed)
}

/// Tells whether a complete dump has the same files as this manifest says, byte for byte.
fn same_content(dir: &Path, manifest: &Value) -> bool {
    read_json(&dir.join(MANIFEST)).is_ok_and(|there| there == *manifest)
}

/// Lists the files of a dump, besides its manifest.
fn files(n_layers: usize) -> Vec<String> {
    let first = [TOKENS, MOMENTS].map(str::to_owned).into_iter();
    first.chain((0..n_layers).map(layer_file)).collect()
}

/// Writes the sums of the `i`-th block of a shard.
fn put_sums(writer: &Writer, i: usize, block: &QuerySums) -> Result<()> {
    let [pre, rope, count] = BLOCK_SUMS;
    for (name, sum) in [(pre, &block.pre), (rope, &block.rope)] {
        let bytes = store::to_bytes(&sum.iter().copied().collect::<Vec<f64>>());
        writer.put(name, i * bytes.len(), &bytes)?;
    }
    let bytes = store::to_bytes(&block.count);
    writer.put(count, i * bytes.len(), &bytes)
}

impl Drop for NewDump {
    fn drop(&mut self) {
        if !self.complete {
            self.folder.remove();
            // The complete folder of a slower attempt has its manifest in place of the mark.
            if self.place.is_some() {
                self.folder.remove_completed(MANIFEST);
            }
        }
    }
}

/// Fails early if the disk cannot hold the dump.
fn check_space(dir: &Path, specs: &[Spec], n_layers: usize) -> Result<()> {
    let needed = store::total_bytes(specs) as u128 * n_layers as u128;
    if let Some(free) = free_bytes(dir)
        && needed > u128::from(free)
    {
        return Err(Error::system(format!(
            "the dump needs {} of disk space, but {} has only {} free",
            size(usize::try_from(needed).unwrap_or(usize::MAX)),
            dir.display(),
            size(usize::try_from(free).unwrap_or(usize::MAX))
        ))
        .hint(
            "use fewer tokens or ⟨dtype=bf16⟩, omit ⟨queries⟩, or use `kvsmith calibrate`, which writes no dump",
        ));
    }
    Ok(())
}

/// Returns the bytes that this user can still write on the file system of `dir`, if the system tells.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(dir.as_os_str().as_bytes()).ok()?;
    // SAFETY: statvfs is a plain struct of integers, filled by the call; the path is a valid C string.
    let stat = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        if libc::statvfs(path.as_ptr(), &mut stat) != 0 {
            return None;
        }
        stat
    };
    Some(stat.f_bavail as u64 * stat.f_frsize as u64)
}

fn write_tokens(corpus: &Corpus, output: Output) -> Result<()> {
    let n = corpus.n_tokens();
    let held_out: Vec<u8> = corpus.kept().iter().map(|kept| u8::from(!kept)).collect();
    let tensors = [
        Tensor::new("ids", &[n], &corpus.ids),
        Tensor::new("position", &[n], &corpus.positions()),
        Tensor::new("block_start", &[corpus.block_start.len()], &corpus.block_start),
        Tensor::new("held_out", &[n], &held_out),
    ];
    store::write(output, &tensors, None)
}

/// Writes `[heads, m, d]` into rows `first..first + m` of a `[heads, n, d]` tensor.
fn put_rows(
    writer: &Writer,
    name: &str,
    x: ArrayView3<f32>,
    first: usize,
    n: usize,
    dtype: Float,
) -> Result<()> {
    let (_, m, d) = x.dim();
    let mut bytes = Vec::with_capacity(m * d * dtype.bytes());
    for (head, rows) in x.axis_iter(Axis(0)).enumerate() {
        bytes.clear();
        let values: Vec<f32> = rows.iter().copied().collect();
        dtype.write(&values, &mut bytes);
        writer.put(name, (head * n + first) * d * dtype.bytes(), &bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;

    #[test]
    fn rows_that_are_not_contiguous_are_written_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let specs = vec![Spec::new::<f32>("x", &[2, 5, 3])];
        let writer = Writer::new(Output::create(&path).unwrap(), &specs, None).unwrap();
        let value = |head: usize, row: usize, channel: usize| (100 * head + 10 * row + channel + 1) as f32;
        // In memory, the channels are the leading axis.
        let x = Array3::from_shape_fn((3, 2, 4), |(c, head, row)| value(head, row + 1, c));
        put_rows(&writer, "x", x.view().permuted_axes([1, 2, 0]), 1, 5, Float::F32).unwrap();
        writer.finish().unwrap();
        let stored: Vec<f32> = Store::open(&path).unwrap().read("x", &[2, 5, 3]).unwrap();
        let expected = Array3::from_shape_fn((2, 5, 3), |(head, row, c)| match row {
            0 => 0.0,
            _ => value(head, row, c),
        });
        assert_eq!(stored, expected.iter().copied().collect::<Vec<_>>());
    }
}
