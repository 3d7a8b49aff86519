//! Sessions: caches that grow, and prompts that continue one.

use crate::common::{Calibrated, all_golden, documents, prepared, relative_error};
use kvsmith::internal::env::Env;
use kvsmith::internal::error::ErrorKind;
use kvsmith::internal::kv::budget::Budget;
use kvsmith::internal::kv::map::ModelMaps;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{KvType, Limits};
use kvsmith::internal::method::Method;
use kvsmith::internal::method::registry::{METHODS, MethodName};
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::forward::CpuForward;
use kvsmith::internal::runner::eval::{Done, Evaluation, Variant};
use kvsmith::internal::runner::{DecodeOptions, Engine, SequenceId, Session};
use ndarray::Array1;

impl Calibrated {
    /// Every golden checkpoint, with 150 ids.
    fn all() -> impl Iterator<Item = Self> {
        all_golden().map(|dir| Self::new(&dir, 150))
    }

    fn session(&self, method: MethodName, budget: Budget, kv: KvType, capacity: usize) -> Session<'_> {
        let method = self.prepared(method);
        Session::on_cpu(&self.decoder, method.as_ref(), options(budget, kv), capacity).unwrap()
    }

    fn prepared(&self, method: MethodName) -> Box<dyn Method> {
        prepared(method, Some(&self.artifact), &self.decoder)
    }

    fn engine<'a>(&'a self, method: &'a dyn Method, options: DecodeOptions) -> Engine<'a> {
        Engine::new(Box::new(CpuForward::new(&self.decoder).unwrap()), method, options)
    }
}

fn options(budget: Budget, kv: KvType) -> DecodeOptions {
    DecodeOptions {
        limits: Limits {
            sinks: 2,
            window: 4,
            ..Limits::new(budget)
        },
        kv,
        packed: Center::Median.into(),
        maps: ModelMaps::HADAMARD,
        granule: 64,
    }
}

/// What a sequence alone computes: its logits after the prompt and after each of `steps` tokens.
fn alone(mut session: Session, ids: &[u32], steps: usize) -> Vec<Array1<f32>> {
    let (prompt, tokens) = ids.split_at(ids.len() - steps);
    let mut logits = vec![session.prefill(prompt).unwrap()];
    logits.extend(tokens.iter().map(|id| session.step(*id).unwrap()));
    logits
}

/// Sequences of different lengths, of which one is opened later and one is closed earlier, give what each gives alone.
#[test]
fn sequences_that_are_stepped_together_do_not_touch_each_other() {
    for model in Calibrated::all() {
        for name in ["full", "topk", "wpq", "lfps", "selfindex"] {
            let method = MethodName::named(name).unwrap();
            let (budget, kv) = (Budget::Count(9), KvType::BF16);
            let prompts = [30, 57, 41].map(|n| &model.ids[n - 20..n + 10]);
            let steps = [10, 10, 4];
            let expected: Vec<_> = (0..3)
                .map(|i| {
                    alone(
                        model.session(method, budget, kv, 64),
                        &prompts[i][..20 + steps[i]],
                        steps[i],
                    )
                })
                .collect();
            let prepared = model.prepared(method);
            let mut engine = model.engine(prepared.as_ref(), options(budget, kv));
            let open = |engine: &mut Engine, i: usize| {
                let id = engine.open(1).unwrap();
                assert_eq!(engine.prefill(id, &prompts[i][..20]).unwrap(), expected[i][0]);
                id
            };
            let (first, last) = (open(&mut engine, 0), open(&mut engine, 2));
            let token = |i: usize, step: usize| prompts[i][20 + step];
            for step in 0..4 {
                // The order of the tokens is the caller's, not that in which sequences were opened.
                let fed = [(last, token(2, step)), (first, token(0, step))];
                let logits = engine.step(&fed).unwrap();
                assert_eq!(logits[0], expected[2][step + 1], "{name}, step {step}");
                assert_eq!(logits[1], expected[0][step + 1], "{name}, step {step}");
            }
            engine.close(last).unwrap();
            let second = open(&mut engine, 1);
            for step in 0..6 {
                let fed = [(first, token(0, step + 4)), (second, token(1, step))];
                let logits = engine.step(&fed).unwrap();
                assert_eq!(logits[0], expected[0][step + 5], "{name}, step {step}");
                assert_eq!(logits[1], expected[1][step + 1], "{name}, step {step}");
            }
            assert_eq!(engine.positions(first).unwrap(), 30);
            let mut session = model.session(method, budget, kv, 64);
            session.prefill(&prompts[0][..20]).unwrap();
            (0..10).for_each(|step| drop(session.step(token(0, step)).unwrap()));
            assert_eq!(engine.counts(first).unwrap(), session.counts().unwrap(), "{name}");
            assert_eq!(engine.shares(first).unwrap().read, session.shares().unwrap().read);
        }
    }
}

/// Also of more tokens than the model takes together.
#[test]
fn many_sequences_give_what_each_gives_alone() {
    for model in Calibrated::all() {
        let method = MethodName::named("full").unwrap();
        let (budget, kv) = (Budget::Fraction(1.0), KvType::F32);
        let prepared = model.prepared(method);
        let mut engine = model.engine(prepared.as_ref(), options(budget, kv));
        let prompts: Vec<&[u32]> = (0..7).map(|i| &model.ids[i..i + 12 + 3 * i]).collect();
        let ids: Vec<SequenceId> = prompts
            .iter()
            .map(|prompt| {
                let id = engine.open(40).unwrap();
                engine.prefill(id, prompt).unwrap();
                id
            })
            .collect();
        let fed: Vec<(SequenceId, u32)> = ids.iter().map(|id| (*id, model.ids[5])).collect();
        let together = engine.step(&fed).unwrap();
        for (prompt, logits) in prompts.iter().zip(&together) {
            let ids = [*prompt, &model.ids[5..6]].concat();
            let expected = &alone(model.session(method, budget, kv, 64), &ids, 1)[1];
            assert_eq!(logits, expected);
        }
    }
}

/// What is compared with the free memory before a sequence is opened is about what it then holds.
#[test]
fn the_memory_of_a_sequence_is_known_before_it_is_opened() {
    const N: usize = 140;
    let mut wrong = Vec::new();
    for model in Calibrated::all() {
        for method in METHODS {
            for kv in [KvType::BF16, KvType::TWO_BIT, KvType::INT8] {
                let prepared = model.prepared(*method);
                let mut engine = model.engine(prepared.as_ref(), options(Budget::Fraction(0.1), kv));
                let [rows, index] = engine.bytes_for(N + 1).unwrap().map(|bytes| bytes as f64);
                let id = engine.open(N + 1).unwrap();
                engine.prefill(id, &model.ids[..N]).unwrap();
                engine.step(&[(id, 1)]).unwrap();
                let [held_rows, held] = engine.bytes().map(|bytes| bytes as f64);
                let name = format!("{} {kv:?} {}", method.as_str(), model.decoder.config.head_dim);
                // A cache grows by an eighth at a time; a 2-bit cache also holds some positions in full.
                let full = if kv == KvType::TWO_BIT { 4.0 } else { 1.2 };
                // a2ats makes its lists when a choice first reads them, and a short prompt has few full-precision tokens,
                // whose places selfindex lists.
                let most = match method.as_str() {
                    "a2ats" => 4.0,
                    "selfindex" if kv == KvType::TWO_BIT => 4.0,
                    _ => 2.0,
                };
                if !(rows..=full * rows).contains(&held_rows) {
                    wrong.push(format!("{name}: holds {held_rows} of rows, not {rows}"));
                }
                if held > 1.3 * index + 64.0 || index > most * held {
                    wrong.push(format!("{name}: holds {held}, not {index}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_an_engine_cannot_do_is_refused_and_changes_nothing() {
    let model = Calibrated::all().next().unwrap();
    let prepared = model.prepared(MethodName::named("topk").unwrap());
    let options = options(Budget::Count(9), KvType::BF16);
    let mut engine = model.engine(prepared.as_ref(), options.clone());
    let [a, b] = [(); 2].map(|()| engine.open(32).unwrap());
    engine.prefill(a, &model.ids[..20]).unwrap();
    engine.prefill(b, &model.ids[..25]).unwrap();
    engine.close(b).unwrap();
    let vocab = u32::try_from(model.decoder.config.vocab_size).unwrap();
    for (fed, said) in [
        (vec![(a, 1), (b, 1)], "is not open"),
        (vec![(a, 1), (a, 2)], "twice"),
        (vec![(a, vocab)], "vocabulary"),
    ] {
        let error = engine.step(&fed).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    assert!(engine.close(b).unwrap_err().to_string().contains("is not open"));
    assert!(
        engine
            .prefill(a, &[])
            .unwrap_err()
            .to_string()
            .contains("no tokens")
    );
    let error = engine.open(usize::MAX / 2).unwrap_err().to_string();
    assert!(error.contains("of memory are free"), "{error}");
    // A step that is cancelled is not begun; a prompt that is cancelled closes its sequence.
    let env = Env::default();
    env.cancel.cancel();
    let cancelled = env.during(|| engine.step(&[(a, 1)]));
    assert_eq!(cancelled.unwrap_err().kind(), ErrorKind::Interrupted);
    assert_eq!(engine.positions(a).unwrap(), 20);
    let cancelled = env.during(|| engine.prefill(a, &model.ids[..20]));
    assert_eq!(cancelled.unwrap_err().kind(), ErrorKind::Interrupted);
    assert_eq!(engine.sequences().count(), 0);
    let c = engine.open(32).unwrap();
    let expected = alone(
        model.session(
            MethodName::named("topk").unwrap(),
            options.limits.budget,
            options.kv,
            32,
        ),
        &model.ids[..21],
        1,
    );
    assert_eq!(engine.prefill(c, &model.ids[..20]).unwrap(), expected[0]);
    assert_eq!(engine.step(&[(c, model.ids[20])]).unwrap()[0], expected[1]);
}

#[test]
fn caches_grow_past_what_was_reserved() {
    for model in Calibrated::all() {
        for method in METHODS {
            let mixed = KvType::named("k=int8,v=int4").unwrap();
            for kv in [KvType::F32, KvType::F16, KvType::TWO_BIT, mixed] {
                let run = |capacity: usize| {
                    let mut session = model.session(*method, Budget::Count(9), kv, capacity);
                    let mut logits = vec![session.prefill(&model.ids[..30]).unwrap()];
                    for id in &model.ids[30..50] {
                        logits.push(session.step(*id).unwrap());
                    }
                    logits.push(session.prefill(&model.ids[50..80]).unwrap());
                    logits.push(session.step(model.ids[80]).unwrap());
                    assert_eq!(session.positions(), 81);
                    logits
                };
                assert_eq!(run(1), run(81), "{} {kv:?}", method.as_str());
            }
        }
    }
}

/// A long prompt goes through a layer in parts: progress shows between them, and the result is that of two prompts.
#[test]
fn a_long_prompt_tells_its_progress_within_a_layer() {
    let decoder = Decoder::open(&crate::common::golden("llama_default")).unwrap();
    let ids = documents(&[5000], 4).remove(0);
    let session = || {
        let method = prepared(METHODS[0], None, &decoder);
        let options = DecodeOptions {
            limits: Limits {
                sinks: 2,
                window: 4,
                ..Limits::new(Budget::Fraction(1.0))
            },
            kv: KvType::F32,
            packed: Center::Median.into(),
            maps: ModelMaps::HADAMARD,
            granule: 64,
        };
        Session::on_cpu(&decoder, method.as_ref(), options, ids.len()).unwrap()
    };
    let mut told = Vec::new();
    let whole = session().prefill_watched(&ids, &mut |n| told.push(n)).unwrap();
    let layers = decoder.config.n_layers();
    assert_eq!(told.iter().sum::<usize>(), layers * ids.len(), "{told:?}");
    // Every layer but the last, of which only one position is needed, has three parts.
    let parts = told.iter().filter(|n| (1..=2048).contains(*n)).count();
    assert_eq!(parts, 3 * (layers - 1) + 1, "{told:?}");
    let mut two = session();
    two.prefill(&ids[..2000]).unwrap();
    let last = two.prefill(&ids[2000..]).unwrap();
    assert!(relative_error(&whole, &last) < 1e-4);
}

/// A step with full attention on the side gives the logits of a session with full attention, and changes nothing: not the
/// logits after it, and not what is held or counted.
#[test]
fn a_look_at_full_attention_changes_nothing() {
    for model in Calibrated::all() {
        let (ids, all) = (&model.ids, Budget::Fraction(1.0));
        let mixed = KvType::named("k=int4,v=int8").unwrap();
        for kv in [KvType::F32, KvType::BF16, mixed] {
            // With every position in the budget, a session's own steps are with full attention.
            let mut full = model.session(METHODS[0], all, kv, 80);
            full.prefill(&ids[..60]).unwrap();
            let expected = full.step(ids[60]).unwrap();
            for method in METHODS {
                let mut sessions = [(); 2].map(|()| model.session(*method, Budget::Count(5), kv, 80));
                for session in &mut sessions {
                    session.prefill(&ids[..60]).unwrap();
                }
                let [plain, looked] = &mut sessions;
                let first = looked.peek_in_full(ids[60]).unwrap().unwrap();
                assert_eq!(first, expected, "{}", method.as_str());
                for id in &ids[60..70] {
                    assert_eq!(
                        plain.step(*id).unwrap(),
                        looked.step(*id).unwrap(),
                        "{}",
                        method.as_str()
                    );
                    looked.peek_in_full(7).unwrap().unwrap();
                }
                for session in [&*plain, looked] {
                    assert_eq!(session.positions(), 70);
                }
                assert_eq!(plain.counts().unwrap(), looked.counts().unwrap());
                // A look may leave room for rows behind.
                assert!(looked.kv_bytes() < 2 * plain.kv_bytes());
                assert_eq!(plain.index_bytes(), looked.index_bytes());
            }
        }
        let mut packed = model.session(METHODS[0], all, KvType::TWO_BIT, 80);
        packed.prefill(&ids[..60]).unwrap();
        assert!(packed.peek_in_full(ids[60]).unwrap().is_none());
    }
}

/// The work of an evaluation adds up to what it says beforehand, prompts of later turns included.
#[test]
fn an_evaluation_tells_its_progress() {
    for model in Calibrated::all() {
        let options = DecodeOptions {
            limits: Limits {
                sinks: 2,
                window: 4,
                ..Limits::new(Budget::Count(9))
            },
            kv: KvType::BF16,
            packed: Center::Median.into(),
            maps: ModelMaps::HADAMARD,
            granule: 64,
        };
        let method = prepared(METHODS[0], Some(&model.artifact), &model.decoder);
        let variants = [3, 9].map(|count| Variant {
            method: method.as_ref(),
            number: 0,
            budget: Budget::Count(count),
            kv: None,
        });
        let forward = Box::new(CpuForward::new(&model.decoder).unwrap());
        let mut evaluation = Evaluation::new(forward, variants.into(), options);
        for (turns, decode) in [(1, 10), (3, 4)] {
            let (mut units, mut prompts, mut steps) = (0, 0, 0);
            let (layers, of_step) = (evaluation.n_layers(), evaluation.tokens_of_step());
            let all = evaluation.tokens(60, turns, decode) * layers;
            let mut done = |what| match what {
                Done::Prompt(tokens) => {
                    prompts += 1;
                    units += tokens;
                }
                Done::Step => {
                    steps += 1;
                    units += of_step * layers;
                }
            };
            evaluation
                .block(&model.ids[..60], turns, decode, true, &mut done)
                .unwrap();
            assert_eq!((units, steps), (all, turns * decode), "{turns} turns");
            assert!(prompts >= layers, "{prompts} parts of prompts");
        }
    }
}

#[test]
fn a_later_prompt_continues_the_cache() {
    for model in Calibrated::all() {
        for method in METHODS {
            // One prompt, or two with some steps between; then steps. All attention is exact.
            let whole = Budget::Fraction(1.0);
            let mut one = model.session(*method, whole, KvType::F32, 150);
            let mut two = model.session(*method, whole, KvType::F32, 150);
            let mut last = one.prefill(&model.ids[..120]).unwrap();
            two.prefill(&model.ids[..50]).unwrap();
            for id in &model.ids[50..60] {
                two.step(*id).unwrap();
            }
            let mut other = two.prefill(&model.ids[60..120]).unwrap();
            for id in &model.ids[120..130] {
                let error = relative_error(&other, &last);
                assert!(error < 1e-4, "{}: {error}", method.as_str());
                last = one.step(*id).unwrap();
                other = two.step(*id).unwrap();
            }
            assert_eq!(two.shares().unwrap().read, 1.0, "{}", method.as_str());
        }
    }
}

/// Methods that choose positions of a later prompt in its first steps already.
const CHOOSE_LATER: [&str; 12] = [
    "full",
    "topk",
    "random",
    "streaming",
    "quest",
    "pqcache",
    "randsign",
    "snapkv",
    "a2ats",
    "selfindex",
    "lfps",
    "ctkvr",
];

#[test]
fn a_later_prompt_can_be_chosen_from() {
    for model in Calibrated::all() {
        let sliding = model.decoder.config.windows().iter().any(Option::is_some);
        for method in METHODS {
            let mut trace = Vec::new();
            let mut session = model.session(*method, Budget::Count(20), KvType::F32, 150);
            session.trace(&mut trace);
            session.prefill(&model.ids[..60]).unwrap();
            session.step(model.ids[60]).unwrap();
            session.prefill(&model.ids[61..110]).unwrap();
            for id in &model.ids[110..130] {
                session.step(*id).unwrap();
            }
            drop(session);
            let rows: Vec<serde_json::Value> = String::from_utf8(trace)
                .unwrap()
                .lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect();
            assert_eq!(rows.last().unwrap()["step"], 20, "steps go on counting");
            let chosen: Vec<u64> = rows
                .iter()
                .filter(|row| row["step"].as_u64() > Some(0))
                .flat_map(|row| serde_json::from_value::<Vec<u64>>(row["positions"].clone()).unwrap())
                .collect();
            let from = |range: std::ops::Range<u64>| chosen.iter().any(|p| range.contains(p));
            if CHOOSE_LATER.contains(&method.as_str()) {
                assert!(from(61..110), "{}: nothing of the later prompt", method.as_str());
            }
            if !sliding && method.as_str() != "streaming" {
                assert!(from(2..60), "{}: nothing of the first prompt", method.as_str());
            }
        }
    }
}
