//! A dump folder with changes: whatever opens can be read, and takes no more memory than its files have bytes.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::dump::{Dump, State};
use kvsmith_fuzz::{Folder, Input, TensorFile, digest, edit, made, one_thread, seal};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

const FILES: [&str; 4] = [
    "tokens.safetensors",
    "moments.safetensors",
    "layer-00000.safetensors",
    "layer-00001.safetensors",
];

struct Base {
    folder: Folder,
    manifest: Value,
    files: [TensorFile; 4],
}

static BASE: LazyLock<Base> = LazyLock::new(|| {
    one_thread();
    let folder = made(&["dump INPUT --queries --values --wrope-position 16 -o DIR/dump"]);
    let read = |name: &str| folder.read(&format!("dump/{name}"));
    let manifest = serde_json::from_slice(&read("manifest.json")).expect("a manifest");
    let files = FILES.map(|name| TensorFile::read(&read(name)));
    Base {
        folder,
        manifest,
        files,
    }
});

fuzz_target!(|data: &[u8]| {
    let base = &*BASE;
    let mut input = Input::new(data);
    let how = input.byte();
    let mut manifest = base.manifest.clone();
    let mut files = base.files.clone();
    while input.change() {
        let at = input.below(files.len());
        match input.byte() % 8 {
            0..4 => edit(&mut manifest, &mut input),
            4 => files[at].metadata.iter_mut().for_each(|m| edit(m, &mut input)),
            _ => files[at].edit(&mut input),
        }
    }
    for (name, file) in FILES.iter().zip(&mut files) {
        if how % 8 != 0 {
            file.reseal();
        }
        let bytes = file.bytes();
        if let Some(of) = manifest.get_mut("files").and_then(Value::as_object_mut)
            && how % 8 != 1
        {
            of.insert(
                (*name).to_string(),
                json!({ "bytes": bytes.len(), "sha256": digest(&bytes) }),
            );
        }
        base.folder.write(&format!("dump/{name}"), &bytes);
    }
    if how % 8 != 2 {
        seal(&mut manifest, "manifest_sha256");
    }
    base.folder
        .write("dump/manifest.json", manifest.to_string().as_bytes());
    let Ok(dump) = Dump::open(&[base.folder.path("dump")]) else {
        return;
    };
    assert_eq!(
        (dump.kept.len(), dump.corpus.block_start.last()),
        (dump.n, Some(&(dump.n as u32)))
    );
    let _ = dump.moments();
    for i in 0..dump.sizes.n_layers.min(FILES.len()) {
        let Ok(layer) = dump.layer(i) else {
            return;
        };
        let _ = layer.sums();
        for head in 0..dump.sizes.n_kv_heads.min(4) {
            let read = |state| layer.read(state, head, 0, dump.n).map(drop);
            let _ = [State::KPre, State::QPre, State::V].map(read);
        }
    }
    let ropes = dump.origin.model.ropes();
    let _ = ropes.layer(0).table(0..dump.n.min(4));
});
