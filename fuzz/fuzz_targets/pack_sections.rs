//! Section files with changes, their digests made right again: what `pack` joins is an artifact that verifies.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::artifact::{Artifact, pack};
use kvsmith::internal::disk::Output;
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith_fuzz::{Folder, Input, TensorFile, edit, made, one_thread};
use libfuzzer_sys::fuzz_target;

const NAMES: [&str; 5] = ["codebook", "signs", "priors", "wpq", "tail"];

static BASE: LazyLock<(Folder, [TensorFile; 5])> = LazyLock::new(|| {
    one_thread();
    let folder = made(&[
        "dump INPUT --queries --values --wrope-position 16 -o DIR/dump",
        "codebook --dump DIR/dump --size 4 -o DIR/codebook",
        "signs --dump DIR/dump -o DIR/signs",
        "priors --dump DIR/dump -o DIR/priors",
        "wpq --dump DIR/dump -o DIR/wpq",
        "tail --dump DIR/dump -o DIR/tail",
    ]);
    let files = NAMES.map(|name| TensorFile::read(&folder.read(name)));
    (folder, files)
});

fuzz_target!(|data: &[u8]| {
    let (folder, files) = &*BASE;
    let mut input = Input::new(data);
    let mut parts = Vec::new();
    let mut chosen: Vec<TensorFile> = (0..1 + input.byte() % 5)
        .map(|_| files[input.below(files.len())].clone())
        .collect();
    while input.change() {
        let at = input.below(chosen.len());
        match input.byte() % 4 {
            0 => chosen[at].edit(&mut input),
            _ => chosen[at].metadata.iter_mut().for_each(|m| edit(m, &mut input)),
        }
    }
    for (i, mut file) in chosen.into_iter().enumerate() {
        file.reseal();
        let path = folder.write(&format!("part-{i}"), &file.bytes());
        match Artifact::open(&path, SECTIONS) {
            Ok(part) => parts.push(part),
            Err(_) => return,
        }
    }
    let path = folder.path("packed");
    let _ = std::fs::remove_file(&path);
    let output = Output::create(&path).expect("TMPDIR can be written to");
    if pack(output, &parts, None).is_ok() {
        let packed = Artifact::open(&path, SECTIONS).expect("an artifact");
        packed.verify().expect("an artifact that verifies");
    }
});
