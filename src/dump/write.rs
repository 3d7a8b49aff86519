//! Writes a dump: runs the model over the text once, layer by layer.

use std::collections::BTreeMap;
use std::path::Path;

use ndarray::{Array3, ArrayView3, Axis};
use serde_json::{Value, json};

use super::moments::Moments;
use super::{
    DumpManifest, DumpOptions, FORMAT, MANIFEST, MOMENTS, TOKENS, UNFINISHED, layer_file, layer_specs,
};
use crate::capture::Capture;
use crate::compute::device::Device;
use crate::corpus::{Corpus, Origin};
use crate::disk::{Folder, Output};
use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::forward::Layers;
use crate::progress::{Log, size};
use crate::stats::moments::{Position, QuerySums};
use crate::store::{self, FileDigest, Spec, Tensor, Writer};

/// Runs the model over the corpus and fills the dump folder.
///
/// # Errors
/// The disk has too little space for the dump, or the model fails.
pub fn write(
    layers: &dyn Layers,
    device: &dyn Device,
    corpus: &Corpus,
    origin: Origin,
    new: NewDump,
    options: &DumpOptions,
    log: Log,
) -> Result<()> {
    let decoder = layers.decoder();
    let sizes = decoder.config.sizes();
    let n = corpus.n_tokens();
    let specs = layer_specs(sizes, n, options);
    check_space(new.folder.path(), &specs, sizes.n_layers)?;
    write_tokens(corpus, new.output(TOKENS)?)?;

    let kept = corpus.kept();
    let mut moments = Vec::with_capacity(sizes.n_layers);
    let progress = log.progress((n * sizes.n_layers) as u64, "tokens x layers");
    let mut capture = Capture::start(layers, corpus)?;
    for i in 0..sizes.n_layers {
        progress.layer(i, sizes.n_layers, "capture");
        let writer = Writer::new(new.output(&layer_file(i))?, &specs, None)?;
        let mut sums = QuerySums::new(sizes.n_kv_heads, sizes.head_dim);
        capture.layer(&progress, &mut |rows, states| {
            let (q_pre, kept) = (states.q_pre.view(), &kept[rows.clone()]);
            sums.add(device, q_pre, kept, &decoder.rope)?;
            let put = |name, x: &Array3<f32>| put_rows(&writer, name, x.view(), rows.start, n, options.dtype);
            put("k_pre", &states.k_pre)?;
            if options.queries {
                put("q_pre", &states.q_pre)?;
            }
            if options.values {
                put("v", &states.v)?;
            }
            Ok(())
        })?;
        writer.finish()?;
        moments.push(sums);
    }
    let moments = Moments::new(moments, Position::Windowed(options.wrope_position), origin);
    moments.write(new.output(MOMENTS)?)?;
    let manifest = DumpManifest {
        format: FORMAT,
        kind: UNFINISHED.name.to_string(),
        tool_version: env!("CARGO_PKG_VERSION").to_string(),
        device: device.name().to_string(),
        files: new.digests()?,
        origin: moments.origin,
        options: *options,
    };
    new.complete(&manifest)
}

/// A dump folder that is not complete yet; dropping it removes what was written.
pub struct NewDump {
    folder: Folder,
    complete: bool,
}

impl NewDump {
    /// Claims a folder for the dump of a model with `n_layers` layers.
    ///
    /// # Errors
    /// The folder holds a dump or files with the names of a dump's files, or cannot be written.
    pub fn create(dir: &Path, n_layers: usize) -> Result<Self> {
        if dir.as_os_str().is_empty() {
            return Err(
                Error::usage("-o does not name a folder").hint("give the name of a new folder with -o")
            );
        }
        if dir.join(MANIFEST).exists() {
            let error = Error::usage(format!("{} already contains a dump", dir.display()));
            return Err(error.hint("remove it, or choose another folder with -o"));
        }
        let layers = (0..n_layers).map(layer_file);
        let files: Vec<String> = [TOKENS, MOMENTS]
            .map(str::to_owned)
            .into_iter()
            .chain(layers)
            .collect();
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
        let text = serde_json::to_vec_pretty(&manifest).map_err(|e| Error::failed(e.to_string()))?;
        self.folder.complete(MANIFEST, &text)?;
        self.complete = true;
        Ok(())
    }
}

impl Drop for NewDump {
    fn drop(&mut self) {
        if !self.complete {
            self.folder.remove();
        }
    }
}

/// Fails early if the disk cannot hold the dump.
fn check_space(dir: &Path, specs: &[Spec], n_layers: usize) -> Result<()> {
    let needed = store::total_bytes(specs) as u128 * n_layers as u128;
    if let Some(free) = free_bytes(dir)
        && needed > u128::from(free)
    {
        return Err(Error::failed(format!(
            "the dump needs {} of disk space, but {} has only {} free",
            size(usize::try_from(needed).unwrap_or(usize::MAX)),
            dir.display(),
            size(usize::try_from(free).unwrap_or(usize::MAX))
        ))
        .hint(
            "use fewer tokens or --dtype bf16, omit --queries, or use `kvsmith calibrate`, which writes no dump",
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
