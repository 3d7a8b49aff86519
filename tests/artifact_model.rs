//! An artifact against the model it is used with: sizes, values, and heads whose keys were all equal or never seen.

use crate::common::*;
use kvsmith::internal::artifact::{
    Artifact, Fit, FitText, HeadDone, LayerPart, LayerStates, Section, SectionKind,
};
use kvsmith::internal::compute::cpu::Cpu;
use kvsmith::internal::error::Result;
use kvsmith::internal::method::declaration::Ask;
use kvsmith::internal::method::params::MethodParams;
use kvsmith::internal::method::registry::METHODS;
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::model::Decoder;
use serde_json::{Map, Value, json};

/// Sections with the method that reads each.
const READERS: [(&str, &str); 6] = [
    ("a2ats", "a2ats"),
    ("sign", "selfindex"),
    ("lfps", "lfps"),
    ("wpq", "wpq"),
    ("doublesparsity", "doublesparsity"),
    ("triattention", "triattention"),
];

/// A golden checkpoint with its prompt.
struct Files {
    scratch: Scratch,
    model: String,
    tokens: String,
    texts: String,
}

impl Files {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new();
        Self {
            model: scratch.model("model", name),
            tokens: scratch.tokens("prompt.json", &[golden_ids(name, "ids")]),
            texts: scratch.tokens("texts.json", &documents(&[60, 60], 1)),
            scratch,
        }
    }

    fn calibrate(&self) -> String {
        let Self { model, texts, .. } = self;
        let calibrate = format!("calibrate --model {model} --tokens {texts} --size 8 --peers --no-verdict");
        self.scratch.make("art", &calibrate)
    }

    /// The artifact with one section alone.
    fn only(&self, art: &str, section: &str) -> String {
        let bytes = std::fs::read(art).unwrap();
        let (header, start) = header(&bytes);
        let to = self.scratch.path(&format!("{section}-only"));
        let (mut kept, mut data) = (serde_json::Map::new(), Vec::new());
        let mut tensors: Vec<(String, Value)> = header.as_object().unwrap().clone().into_iter().collect();
        tensors.sort_by_key(|(_, info)| info["data_offsets"][0].as_u64());
        for (name, mut info) in tensors {
            if !name.starts_with(&format!("{section}.")) {
                continue;
            }
            let at = |i: usize| start + info["data_offsets"][i].as_u64().unwrap() as usize;
            let bytes = &bytes[at(0)..at(1)];
            info["data_offsets"] = json!([data.len(), data.len() + bytes.len()]);
            data.extend_from_slice(bytes);
            kept.insert(name, info);
        }
        kept.insert("__metadata__".to_owned(), header["__metadata__"].clone());
        let unsealed = self.scratch.path("unsealed");
        std::fs::write(&unsealed, safetensors(&json!(kept).to_string(), &data)).unwrap();
        resealed(&unsealed, &to, |manifest| {
            for of in ["sections", "quality"] {
                manifest[of]
                    .as_object_mut()
                    .unwrap()
                    .retain(|name, _| name == section);
            }
        });
        to
    }

    fn run(&self, artifact: &str, more: &str) -> Outcome {
        let Self { model, tokens, .. } = self;
        kvsmith(&format!(
            "run --json --model {model} --artifact {artifact} --tokens {tokens} --max-new 6 --ignore-eos {more}"
        ))
    }

    fn eval(&self, artifact: &str, more: &str) -> Outcome {
        let Self { model, texts, .. } = self;
        kvsmith(&format!(
            "eval --json --model {model} --artifact {artifact} --tokens {texts} --decode 2 {more}"
        ))
    }
}

/// What every way to use an artifact must say of one that does not fit.
#[track_caller]
fn refused(files: &Files, artifact: &str, method: &str, culprit: &str) {
    for more in ["", "--force"] {
        let more = format!("--method {method} {more}");
        files.run(artifact, &more).fails(1, culprit, "calibrat");
    }
    files
        .eval(artifact, &format!("--methods {method}"))
        .fails(1, culprit, "calibrat");
    let (model, out) = (&files.model, files.scratch.path("packed"));
    kvsmith(&format!("inspect --verify --model {model} {artifact}")).fails(1, culprit, "calibrat");
    kvsmith(&format!("pack --model {model} {artifact} -o {out}")).fails(1, culprit, "calibrat");
}

/// Artifacts with the fingerprint of the model and tensors of another.
#[test]
fn other_sizes_are_refused_in_every_section() {
    let files = Files::new("llama_default");
    let own = Artifact::open(files.calibrate().as_ref(), SECTIONS).unwrap();
    let fingerprint = own.manifest.origin.model.fingerprint.clone();
    let decoder = Decoder::open(files.model.as_ref()).unwrap();
    // 16 channels instead of 128; one KV head instead of two; three layers instead of two.
    for name in ["llama_d128", "mistral_sliding", "qwen2_sliding"] {
        let other = Files::new(name);
        let art = other.calibrate();
        for (section, method) in READERS {
            let crafted = files.scratch.path("crafted");
            let part = other.only(&art, section);
            resealed(&part, &crafted, |m| {
                m["model"]["fingerprint"] = json!(fingerprint)
            });
            refused(&files, &crafted, method, "other sizes");
            // A library's user too, before any method is made.
            let crafted = Artifact::open(crafted.as_ref(), SECTIONS).unwrap();
            for name in METHODS {
                let ask = Ask {
                    artifact: Some(&crafted),
                    ropes: &decoder.ropes,
                    sizes: decoder.config.sizes(),
                    params: &MethodParams::default(),
                    seed: 0,
                };
                let error = name.prepare(&ask).err().unwrap();
                assert!(error.to_string().contains("other sizes"), "{name:?}: {error}");
            }
        }
    }
}

/// Kernels rank codewords, not codewords in buckets: a run on a GPU has such an index on the CPU.
#[test]
fn only_codebooks_without_buckets_have_a_gpu_index() {
    let files = Files::new("llama_default");
    let Files { model, texts, .. } = &files;
    let decoder = Decoder::open(model.as_ref()).unwrap();
    for (positions, expected) in [("window", true), ("buckets", false)] {
        let calibrate = format!(
            "calibrate --model {model} --tokens {texts} --size 8 --positions {positions} --no-verdict"
        );
        let art = files.scratch.make(positions, &calibrate);
        let artifact = Artifact::open(art.as_ref(), SECTIONS).unwrap();
        let ask = Ask {
            artifact: Some(&artifact),
            ropes: &decoder.ropes,
            sizes: decoder.config.sizes(),
            params: &MethodParams::default(),
            seed: 0,
        };
        let method = METHODS.iter().find(|name| name.as_str() == "a2ats").unwrap();
        assert_eq!(
            method.prepare(&ask).unwrap().cuda().is_some(),
            expected,
            "{positions}"
        );
    }
}

/// Sizes in the manifest that are not those of the tensors, and tensors of another shape.
#[test]
fn sizes_that_contradict_the_tensors_are_refused() {
    let files = Files::new("llama_default");
    let art = files.calibrate();
    let crafted = files.scratch.path("crafted");
    for (section, method) in READERS {
        let part = files.only(&art, section);
        files.run(&part, &format!("--method {method}")).ok();
        for field in ["n_layers", "n_heads", "n_kv_heads", "head_dim"] {
            for size in [0u64, 1, 3, 8, 64, 1 << 30, 1 << 40, u64::MAX] {
                resealed(&part, &crafted, |manifest| manifest["model"][field] = json!(size));
                let outcome = files.run(&crafted, &format!("--method {method} --force"));
                outcome.fails(1, "", "");
                assert!(
                    outcome.stderr.contains("hint: "),
                    "{field} {size}: {}",
                    outcome.stderr
                );
            }
        }
        // Axes in another order: the same number of bytes.
        let bytes = std::fs::read(&part).unwrap();
        let (header, start) = header(&bytes);
        for name in header
            .as_object()
            .unwrap()
            .keys()
            .filter(|name| *name != "__metadata__")
        {
            let mut header = header.clone();
            header[name]["shape"].as_array_mut().unwrap().reverse();
            let mut text = header.to_string();
            text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
            std::fs::write(&crafted, safetensors(&text, &bytes[start..])).unwrap();
            let outcome = files.run(&crafted, &format!("--method {method} --force"));
            outcome.fails(1, name, "");
        }
    }
}

#[test]
fn values_that_are_not_finite_are_refused() {
    let files = Files::new("llama_default");
    let art = files.calibrate();
    let crafted = files.scratch.path("crafted");
    let (wide, narrow) = (f32::NAN.to_le_bytes(), f32::INFINITY.to_le_bytes());
    let half: [u8; 2] = 0x7c00u16.to_le_bytes();
    // The last value is of the last head: the last query head where there is one per query head.
    for (tensor, value, method, head) in [
        ("a2ats.codebook", &half[..], "a2ats", 1),
        ("a2ats.mean", &wide[..], "a2ats", 1),
        ("a2ats.chol", &narrow[..], "a2ats", 1),
        (
            "sign.centroid",
            &half[..],
            "selfindex --sign-centroids offline",
            1,
        ),
        ("sign.alpha", &narrow[..], "selfindex --sign-centroids offline", 1),
        (
            "sign.mean_pre",
            &wide[..],
            "selfindex --sign-centroids offline",
            1,
        ),
        ("lfps.slash", &wide[..], "lfps", 3),
        ("lfps.vert", &narrow[..], "lfps", 3),
        ("lfps.scalars", &wide[..], "lfps", 3),
        ("wpq.codebook", &half[..], "wpq", 1),
        ("wpq.mean", &wide[..], "wpq", 1),
        ("wpq.chol", &narrow[..], "wpq", 1),
        ("wpq.rotation", &wide[..], "wpq", 1),
        ("rotation.keys", &wide[..], "full --kv int4", 1),
        ("rotation.mean", &narrow[..], "full --kv int2", 1),
        ("rotation.values", &wide[..], "full --kv k=int8,v=int2", 1),
        ("tail.shift", &wide[..], "topk --tail", 3),
        ("triattention.q_mean", &wide[..], "triattention", 3),
        ("triattention.q_abs", &narrow[..], "triattention", 3),
    ] {
        with_values(&art, &crafted, tensor, value);
        let culprit = format!("tensor `{tensor}` contains a NaN or infinite value in layer 1, head {head}");
        files
            .run(&crafted, &format!("--method {method}"))
            .fails(1, &culprit, "damaged");
        kvsmith(&format!("inspect --verify {crafted}")).fails(1, &culprit, "damaged");
    }
    for section in [
        "a2ats",
        "sign",
        "wpq",
        "rotation",
        "doublesparsity",
        "triattention",
    ] {
        resealed(&art, &crafted, |manifest| {
            manifest["quality"][section][1][0]["keys"] = json!(0)
        });
        let culprit = format!("section `{section}`: no keys were observed for layer 1, KV head 0");
        files.run(&crafted, "").fails(1, &culprit, "calibrate");
        kvsmith(&format!("inspect {crafted}")).fails(1, &culprit, "calibrate");
    }
}

/// Shifts are among those that were tried, and stand where heads have a tail.
#[test]
fn tails_that_no_fit_gives_are_refused() {
    let files = Files::new("llama_default");
    let (art, crafted) = (files.calibrate(), files.scratch.path("crafted"));
    let shift = |value: f32| value.to_le_bytes();
    for (values, culprit) in [
        (
            [("tail.shift", &shift(0.25)[..]), ("tail.used", &[1])],
            "has 0.25 where `tail.used` is 1",
        ),
        (
            [("tail.shift", &shift(0.5)[..]), ("tail.used", &[0])],
            "has 0.5 where `tail.used` is 0",
        ),
        (
            [("tail.shift", &shift(0.0)[..]), ("tail.used", &[2])],
            "`tail.used` has 2",
        ),
    ] {
        let mut from = &art;
        for (tensor, value) in values {
            with_values(from, &crafted, tensor, value);
            from = &crafted;
        }
        files
            .run(&crafted, "--method topk --tail")
            .fails(1, culprit, "damaged");
        kvsmith(&format!("inspect --verify {crafted}")).fails(1, culprit, "damaged");
    }
    for (shifts, culprit) in [
        (json!([]), "`sections.tail.shifts` is invalid"),
        (json!([1.0, 0.5]), "`sections.tail.shifts` is invalid"),
        (json!("all"), "sections.tail"),
    ] {
        resealed(&art, &crafted, |manifest| {
            manifest["sections"]["tail"]["shifts"] = shifts
        });
        files.run(&crafted, "--method topk").fails(1, culprit, "");
    }
}

/// Rows in few bits pass the artifact's maps, unless another rotation is asked for.
#[test]
fn the_rotation_of_rows_is_that_of_the_artifact() {
    let files = Files::new("llama_default");
    let art = files.calibrate();
    let eval = |kv: &str, more: &str| -> Value {
        let Files { model, texts, .. } = &files;
        kvsmith(&format!(
            "eval --json --model {model} --tokens {texts} --decode 9 --methods full --kv {kv} --sinks 0 --window 1 {more}"
        ))
        .json()
    };
    let artifact = format!("--artifact {art}");
    let mut losses = Vec::new();
    for (more, name) in [
        (artifact.clone(), "artifact"),
        (format!("{artifact} --rotation artifact"), "artifact"),
        (format!("{artifact} --rotation hadamard"), "hadamard"),
        (String::new(), "hadamard"),
        (format!("{artifact} --rotation none"), "none"),
    ] {
        let found = eval("int2", &more);
        assert_eq!(found["rotation"], name, "{more}");
        losses.push(found["rows"][0]["kl"].as_f64().unwrap());
        // Other formats turn nothing.
        assert_eq!(
            eval("bf16", &more)["rows"][0]["kl"],
            eval("bf16", "")["rows"][0]["kl"]
        );
    }
    assert_eq!((losses[0], losses[2]), (losses[1], losses[3]));
    assert!(losses[0] != losses[2] && losses[2] != losses[4], "{losses:?}");
    let without = files.only(&art, "wpq");
    for more in ["".to_owned(), format!("--artifact {without}")] {
        let Files { model, tokens, .. } = &files;
        kvsmith(&format!(
            "run --model {model} --tokens {tokens} --method full --kv int4 --rotation artifact {more}"
        ))
        .fails(
            2,
            "--rotation artifact needs --artifact with the section `rotation`",
            "kvsmith calibrate",
        );
    }
}

/// Maps have an inverse and a known form.
#[test]
fn maps_that_no_fit_gives_are_refused() {
    let files = Files::new("llama_default");
    let (art, crafted) = (files.calibrate(), files.scratch.path("crafted"));
    for tensor in ["rotation.values", "rotation.keys"] {
        with_values(&art, &crafted, tensor, &[0; 4 * 16 * 16]);
        let culprit = format!("`{tensor}` of layer 1, KV head 1 has no inverse");
        files
            .run(&crafted, "--method full --kv int4")
            .fails(1, &culprit, "damaged");
        kvsmith(&format!("inspect --verify {crafted}")).fails(1, &culprit, "damaged");
    }
    // Caches in other formats do not read the section.
    files.run(&crafted, "--method full --kv bf16").ok();
    let unused = files
        .run(&crafted, "--method full --kv bf16 --rotation none")
        .ok();
    let warning = "--rotation has no effect here: it applies to --kv int4+4 or int4 or int2 only";
    assert!(unused.stderr.contains(warning), "{}", unused.stderr);
    for (key, value) in [("form", json!("other")), ("key_ridge", json!("small"))] {
        resealed(&art, &crafted, |manifest| {
            manifest["sections"]["rotation"][key] = value
        });
        files
            .run(&crafted, "--method full")
            .fails(1, "sections.rotation", "");
    }
}

/// A fit that others do the work of.
struct Given {
    kind: &'static dyn SectionKind,
    params: Map<String, Value>,
}

impl Fit for Given {
    fn kind(&self) -> &'static dyn SectionKind {
        self.kind
    }

    fn params(&self) -> Result<Map<String, Value>> {
        Ok(self.params.clone())
    }

    fn working_bytes(&self, _: &FitText) -> usize {
        0
    }

    fn layer(&self, _: &LayerStates, _: HeadDone) -> Result<LayerPart> {
        unreachable!("layers are given")
    }
}

/// What a fit must not give is refused before it is written, layer and head by name.
#[test]
fn sections_refuse_layers_that_say_nothing() {
    let files = Files::new("llama_default");
    let art = Artifact::open(files.calibrate().as_ref(), SECTIONS).unwrap();
    for section in art.sections() {
        let fit = Given {
            kind: section.kind,
            params: section.manifest.params.clone(),
        };
        let started = || Section::new(&fit, art.sizes, &Cpu).unwrap();
        let mut good = LayerPart::default();
        for spec in started().layer_specs() {
            good.tensors
                .insert(spec.name.clone(), vec![0; spec.bytes().unwrap()]);
        }
        let seen: Map<String, Value> = json!({"keys": 5}).as_object().unwrap().clone();
        good.quality = vec![seen; art.sizes.n_kv_heads];
        let refused = |part: LayerPart| {
            let mut section = started();
            section.add(good.clone()).unwrap();
            let error = section.add(part).unwrap_err();
            assert!(error.advice().is_some());
            error.to_string()
        };
        for spec in section.specs {
            let heads = spec.shape[1];
            let mut part = good.clone();
            let bytes = part.tensors.get_mut(&spec.name).unwrap();
            // The first value of the last head: infinity in any of the float types, a number in the others.
            let (at, wide) = (
                bytes.len() / heads * (heads - 1),
                bytes.len() / spec.shape[1..].iter().product::<usize>(),
            );
            let infinity = match wide {
                1 => vec![1],
                2 => 0x7c00u16.to_le_bytes().to_vec(),
                _ => f32::INFINITY.to_le_bytes().to_vec(),
            };
            bytes[at..at + infinity.len()].copy_from_slice(&infinity);
            // Whole numbers.
            if wide == 1 || spec.name.ends_with(".count") || spec.name.ends_with(".channels") {
                started().add(part).unwrap();
                continue;
            }
            let expected = format!(
                "tensor `{}` contains a NaN or infinite value in layer 1, head {}",
                spec.name,
                heads - 1
            );
            assert_eq!(refused(part), expected);
        }
        let mut part = good.clone();
        part.quality[1].insert("keys".to_owned(), json!(0));
        let expected = format!(
            "section `{}`: no keys were observed for layer 1, KV head 1",
            section.kind.name()
        );
        assert_eq!(refused(part), expected);
    }
}

/// A pruned head: no key says anything, so that no choice among them can.
#[test]
fn constant_heads_are_marked_and_attended_in_full() {
    let mut files = Files::new("llama_default");
    for name in ["k_proj", "q_proj"] {
        edit_tensors(&files.model, |tensors| {
            let weights = tensors
                .get_mut(&format!("model.layers.1.self_attn.{name}.weight"))
                .unwrap();
            // The second half: KV head 1 and its query heads.
            let half = weights.bytes.len() / 2;
            weights.bytes[half..].fill(0);
        });
    }
    let out = files.scratch.path("art");
    let Files { model, texts, .. } = &files;
    let made = kvsmith(&format!(
        "calibrate --model {model} --tokens {texts} --size 8 --peers -o {out}"
    ))
    .ok();
    for (section, _) in READERS {
        let warning = format!("warning: section `{section}`, layer 1, KV head 1: all keys are equal");
        assert!(made.stderr.contains(&warning), "{}", made.stderr);
    }
    let shown = kvsmith(&format!("inspect -v --verify --model {model} {out}"))
        .ok()
        .stdout;
    assert_eq!(
        shown.matches("constant     layer/KV head 1/1: ").count(),
        READERS.len(),
        "{shown}"
    );
    let rows = kvsmith(&format!("inspect --json {out}")).json();
    let marked = |row: &&Value| row["constant"] == json!(true);
    let rows = rows["rows"].as_array().unwrap().clone();
    assert_eq!(rows.iter().filter(marked).count(), READERS.len());
    files.tokens = files.scratch.tokens("long.json", &documents(&[80], 3));
    let trace = files.scratch.path("trace");
    for (_, method) in READERS {
        for kv in ["f32", "2bit"] {
            let more = format!(
                "--method {method} --budget 3 --sinks 1 --window 4 --kv {kv} --overwrite --trace {trace}"
            );
            let run = files.run(&out, &more);
            let warning = format!("warning: {method}: layer 1, KV head 1: all calibration keys are equal");
            assert!(run.stderr.contains(&warning), "{}", run.stderr);
            let json = run.json();
            assert_eq!(json["fallbacks"].as_array().unwrap().len(), 1, "{json}");
            assert_eq!(json["layers"][1]["full_heads"], json!([1]));
            assert_eq!(json["bypasses"], 0);
            for line in json_lines(&std::fs::read_to_string(&trace).unwrap()) {
                let (step, chosen) = (
                    line["step"].as_u64().unwrap(),
                    line["positions"].as_array().unwrap(),
                );
                let full = [line["layer"].as_u64(), line["kv_head"].as_u64()] == [Some(1), Some(1)];
                let all = 80 + step as usize + 1 - 5;
                assert_eq!(chosen.len() == all, full, "{method} {kv}: {line}");
            }
        }
        let eval = files.eval(&out, &format!("--methods {method} --budgets 3"));
        assert!(eval.stderr.contains("full attention is used"), "{}", eval.stderr);
        let error = &eval.json()["rows"][0]["output_error"];
        assert!(error.as_f64().unwrap().is_finite(), "{error}");
    }
    // A method without the section chooses as ever.
    let topk = files.run(&out, "--method topk --budget 3").ok();
    assert!(!topk.stderr.contains("warning"), "{}", topk.stderr);
}
