//! An artifact with changes, its digests made right again: what opens and verifies can be shown and decoded with.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{Budget, KvType, Limits, RowFormat};
use kvsmith::internal::method::declaration::Ask;
use kvsmith::internal::method::params::MethodParams;
use kvsmith::internal::method::plan::Plan;
use kvsmith::internal::method::registry::METHODS;
use kvsmith::internal::method::rotation;
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::model::Decoder;
use kvsmith::internal::runner::{DecodeOptions, Session};
use kvsmith_fuzz::{Folder, Input, TensorFile, decoder, edit, made, one_thread};
use libfuzzer_sys::fuzz_target;

struct Base {
    folder: Folder,
    file: TensorFile,
    decoder: Decoder,
}

static BASE: LazyLock<Base> = LazyLock::new(|| {
    one_thread();
    let folder = made(&["calibrate INPUT --size 4 --wrope-position 16 -o DIR/a.safetensors"]);
    let file = TensorFile::read(&folder.read("a.safetensors"));
    let decoder = decoder();
    Base {
        folder,
        file,
        decoder,
    }
});

fuzz_target!(|data: &[u8]| {
    let base = &*BASE;
    let mut input = Input::new(data);
    let (how, method) = (input.byte(), input.byte());
    let mut file = base.file.clone();
    while input.change() {
        match input.byte() % 4 {
            0 => file.edit(&mut input),
            _ => file.metadata.iter_mut().for_each(|m| edit(m, &mut input)),
        }
    }
    // Few inputs keep the old digests.
    if how % 16 != 1 {
        file.reseal();
    }
    let path = base.folder.write("b.safetensors", &file.bytes());
    let Ok(artifact) = Artifact::open(&path, SECTIONS) else {
        return;
    };
    for section in artifact.sections() {
        let _ = (
            section.kind.describe(&section),
            section.kind.table(&section.reports()),
        );
    }
    let _ = Plan::of_artifact(&artifact);
    let config = &base.decoder.config;
    // Decoding takes as long as a hundred checks.
    if artifact.verify().is_err() || artifact.sizes != config.sizes() || how < 252 {
        return;
    }
    let ask = Ask {
        artifact: Some(&artifact),
        ropes: &base.decoder.ropes,
        sizes: config.sizes(),
        params: &MethodParams::default(),
        seed: 0,
    };
    let Ok(method) = METHODS[usize::from(method) % METHODS.len()].prepare(&ask) else {
        return;
    };
    let kv = KvType::both([RowFormat::F32, RowFormat::INT4][usize::from(how % 2)]);
    let Ok(maps) = rotation::maps(Some(&artifact), [kv].into_iter()) else {
        return;
    };
    let options = DecodeOptions {
        limits: Limits {
            sinks: 1,
            window: 1,
            ..Limits::new(Budget::Count(2))
        },
        kv,
        packed: Center::Median.into(),
        maps,
        granule: 64,
    };
    let mut session = Session::on_cpu(&base.decoder, method.as_ref(), options, 16).expect("a session");
    let _ = session
        .prefill(&[3, 1, 4, 1, 5, 9, 2, 6])
        .and_then(|_| session.step(5));
});
