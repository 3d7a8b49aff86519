//! The header of a safetensors file, as kvsmith's own files and as a checkpoint. An input is the whole file, or, if its
//! first byte is above ASCII, a length of the data and then the header's JSON.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::model::weights::Checkpoint;
use kvsmith::internal::store::Store;
use kvsmith_fuzz::{Folder, Input, one_thread};
use libfuzzer_sys::fuzz_target;

static FOLDER: LazyLock<Folder> = LazyLock::new(|| {
    one_thread();
    Folder::new()
});

fn file(data: &[u8]) -> Vec<u8> {
    let mut input = Input::new(data);
    if data.first().is_none_or(u8::is_ascii) {
        return data.to_vec();
    }
    input.byte();
    let n = input.below(4096);
    let header = input.rest();
    let len = (header.len() as u64).to_le_bytes();
    [&len[..], header, &vec![0x3f; n]].concat()
}

fuzz_target!(|data: &[u8]| {
    let path = FOLDER.write("model.safetensors", &file(data));
    if let Ok(store) = Store::open(&path) {
        for spec in store.specs() {
            let bytes = store.bytes(&spec.name).expect("its data");
            assert_eq!(spec.bytes(), Some(bytes.len()));
            assert!(
                store
                    .data_start(&spec.name)
                    .is_some_and(|at| at + bytes.len() <= store.file_bytes())
            );
            assert!(store.checked(spec).is_ok());
            let _ = store.read::<f32>(&spec.name, &spec.shape);
        }
        let _ = store.check_canonical();
        let _ = store.manifest();
        let checkpoint = Checkpoint::open(FOLDER.dir()).expect("a valid header");
        assert!(checkpoint.total_bytes() <= store.file_bytes());
        for spec in store.specs() {
            if let Ok(weight) = checkpoint.weight(&spec.name, &spec.shape) {
                let finite = weight.check_finite().is_ok();
                assert_eq!(finite, weight.to_vec().iter().all(|x| x.is_finite()));
            }
        }
    } else {
        let _ = Checkpoint::open(FOLDER.dir());
    }
});
