//! The folder of a stopped calibration with changes: what is resumed has the layers and the shapes of the run.
#![no_main]

use std::collections::BTreeMap;
use std::sync::LazyLock;

use kvsmith::internal::artifact::{
    Facts, Fit, FitInput, FitText, HeadDone, HeadReport, LayerPart, LayerStates, MomentsRead, Section,
    SectionKind, SectionView,
};
use kvsmith::internal::compute::cpu::Cpu;
use kvsmith::internal::error::Result;
use kvsmith::internal::model::Sizes;
use kvsmith::internal::store::Spec;
use kvsmith::internal::work::WorkFolder;
use kvsmith_fuzz::{Folder, Input, TensorFile, edit, one_thread};
use libfuzzer_sys::fuzz_target;
use ndarray::Array2;
use serde_json::{Map, Value, json};

const SIZES: Sizes = Sizes {
    n_layers: 3,
    n_heads: 2,
    n_kv_heads: 2,
    head_dim: 4,
};
const FILES: [&str; 3] = [
    "layer-00000.safetensors",
    "layer-00001.safetensors",
    "hidden.safetensors",
];

/// A section with one small tensor.
#[derive(Debug)]
struct Small;

impl SectionKind for Small {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: "small",
            command: "small",
            about: "",
            stage: "",
            moments: MomentsRead::Nothing,
            reads_queries: false,
            reads_values: false,
            cpu_only: true,
            position_bound: false,
            on_request: false,
        }
    }

    fn fit(&self, _: Map<String, Value>, _: &FitInput) -> Result<Box<dyn Fit>> {
        Ok(Box::new(Small))
    }

    fn specs(&self, _: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        let Sizes {
            n_layers, n_kv_heads, ..
        } = sizes;
        Ok(vec![
            Spec::new::<f32>("small.a", &[n_layers, n_kv_heads, 2]),
            Spec::new::<u64>("small.b", &[n_layers, 1]),
        ])
    }

    fn check(&self, _: &SectionView) -> Result<()> {
        Ok(())
    }

    fn describe(&self, _: &SectionView) -> Result<String> {
        Ok(String::new())
    }

    fn table(&self, _: &[HeadReport]) -> Result<String> {
        Ok(String::new())
    }
}

impl Fit for Small {
    fn kind(&self) -> &'static dyn SectionKind {
        &Small
    }

    fn params(&self) -> Result<Map<String, Value>> {
        Ok(Map::new())
    }

    fn working_bytes(&self, _: &FitText) -> usize {
        0
    }

    fn layer(&self, _: &LayerStates, _: HeadDone) -> Result<LayerPart> {
        Ok(part())
    }
}

/// One layer of the section.
fn part() -> LayerPart {
    let mut part = LayerPart::default();
    part.put("small.a", &[0.5f32; 4]);
    part.put("small.b", &[7u64]);
    part.quality = vec![Map::from_iter([("error".to_string(), json!(0.25))]); 2];
    part
}

fn section() -> Section {
    Section::new(&Small, SIZES, &Cpu).expect("a section")
}

fn open(folder: &Folder) -> Result<WorkFolder> {
    WorkFolder::open(
        &folder.path("work"),
        &json!("a run"),
        true,
        &[section()],
        SIZES.n_layers,
    )
}

struct Base {
    folder: Folder,
    state: Value,
    files: [TensorFile; 3],
}

static BASE: LazyLock<Base> = LazyLock::new(|| {
    one_thread();
    let folder = Folder::new();
    let work = open(&folder).expect("a new folder");
    let parts = BTreeMap::from([("small", part())]);
    for layer in 0..2 {
        work.save(layer, &parts, &Array2::ones((3, 4)), false)
            .expect("a layer");
    }
    let read = |name: &str| folder.read(&format!("work/{name}"));
    let state = serde_json::from_slice(&read("state.json")).expect("a state");
    let files = FILES.map(|name| TensorFile::read(&read(name)));
    Base { folder, state, files }
});

fuzz_target!(|data: &[u8]| {
    let base = &*BASE;
    let mut input = Input::new(data);
    let how = input.byte();
    let mut state = base.state.clone();
    let mut files = base.files.clone();
    while input.change() {
        let at = input.below(files.len());
        match input.byte() % 8 {
            0 => edit(&mut state, &mut input),
            1 => files[at] = files[input.below(FILES.len())].clone(),
            2..5 => files[at].metadata.iter_mut().for_each(|m| edit(m, &mut input)),
            _ => files[at].edit(&mut input),
        }
    }
    for (name, file) in FILES.iter().zip(&mut files) {
        if how % 8 != 0 {
            file.reseal();
        }
        base.folder.write(&format!("work/{name}"), &file.bytes());
    }
    base.folder.write("work/state.json", state.to_string().as_bytes());
    let Ok(work) = open(&base.folder) else {
        return;
    };
    let Ok(Some((hidden, layers))) = work.load([3, 4]) else {
        return;
    };
    assert_eq!(hidden.dim(), (3, 4));
    assert!(layers.len() < SIZES.n_layers, "{} layers", layers.len());
    let mut section = section();
    for mut parts in layers {
        let part = parts.remove("small").expect("the section");
        // Values that no fit gives are refused here.
        if section.add(part).is_err() {
            return;
        }
    }
});
