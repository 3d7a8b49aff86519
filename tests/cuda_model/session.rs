//! Conversations with caches and selection on the device.

use kvsmith::internal::compute::Precision;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::compute::cuda::ledger::Ledger;
use kvsmith::internal::cuda::Body;
use kvsmith::internal::cuda::backend::CudaBackend;
use kvsmith::internal::cuda::host::HostBackend;
use kvsmith::internal::cuda::room::{Extent, Source};
use kvsmith::internal::cuda::sequences::RowsIn;
use kvsmith::internal::kv::KvType;
use kvsmith::internal::kv::sample::{Sampler, Sampling, greedy};
use kvsmith::internal::method::Method;
use kvsmith::internal::method::declaration::Ask;
use kvsmith::internal::method::params::MethodParams;
use kvsmith::internal::method::plan::Plan;
use kvsmith::internal::runner::{Backend, DecodeOptions, Engine, Session};
use serde_json::{Value, json};

use super::Check;
use super::common::golden::{Golden, for_cuda, generate, options};
use super::common::{json_lines, same_in_first_layer};
use super::forward::same_replies;
use super::near_ties::{self, greedy_agreeing};

pub fn cases() -> Vec<(String, Check)> {
    let mut cases: Vec<(String, Check)> = Vec::new();
    for (name, dir) in for_cuda() {
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| full(driver, &Golden::open(&golden));
        cases.push((format!("session::{name}"), Box::new(check)));
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| everything(driver, &Golden::open(&golden));
        cases.push((format!("everything::{name}"), Box::new(check)));
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| engine(driver, &Golden::open(&golden));
        cases.push((format!("engine::{name}"), Box::new(check)));
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| planned(driver, &Golden::open(&golden));
        cases.push((format!("planned::{name}"), Box::new(check)));
        if name.starts_with("llama_default") || name.contains("sliding") {
            let check = move |driver: &dyn Driver| batch(driver, &Golden::open(&dir));
            cases.push((format!("batch::{name}"), Box::new(check)));
        }
    }
    cases
}

/// KV heads of a layer that have methods, budgets and row formats of their own choose what each method alone chooses on the
/// device, to the bit. The inputs of the first layer are the same; those of the others depend on what was chosen before.
fn planned(driver: &dyn Driver, golden: &Golden) {
    let sizes = golden.decoder.config.sizes();
    if sizes.n_kv_heads < 2 || !sizes.head_dim.is_multiple_of(4) {
        return;
    }
    let after_one_prompt = [
        ("topk", "0.3", KvType::F32),
        ("streaming", "0.2", KvType::F16),
        ("selfindex", "0.25", KvType::TWO_BIT),
        ("streaming", "0.2", KvType::INT8),
        ("ctkvr", "0.3", KvType::BF16),
        ("full", "0.1", KvType::F32),
    ];
    check_planned(driver, golden, &after_one_prompt, 50..50);
    let after_two = [
        ("topk", "0.3", KvType::F32),
        ("streaming", "0.2", KvType::F16),
        ("ctkvr", "0.3", KvType::BF16),
    ];
    check_planned(driver, golden, &after_two, 35..50);
}

/// Checks plans of these methods, with budgets and types of the cache. The tokens `later` of 60 are a second prompt.
fn check_planned(
    driver: &dyn Driver,
    golden: &Golden,
    served: &[(&str, &str, KvType)],
    later: std::ops::Range<usize>,
) {
    let (decoder, sizes) = (&golden.decoder, golden.decoder.config.sizes());
    let vocab = decoder.config.vocab_size as u32;
    let ids: Vec<u32> = (0..60).map(|i| (i * 37 + 11) % vocab).collect();
    let has_later = !later.is_empty();
    let run = |method: &dyn Method, options: DecodeOptions| {
        let body = Body::load(driver, decoder, Precision::F32).unwrap();
        let mut lines = Vec::new();
        let mut session = Session::new(CudaBackend::new(body, method, options, 1, 64).unwrap());
        session.trace(&mut lines);
        session.prefill(&ids[..30]).unwrap();
        ids[30..later.start]
            .iter()
            .for_each(|id| drop(session.step(*id).unwrap()));
        if has_later {
            session.prefill(&ids[later.clone()]).unwrap();
        }
        ids[later.end..]
            .iter()
            .for_each(|id| drop(session.step(*id).unwrap()));
        let counts = session.counts().unwrap()[0];
        drop(session);
        (json_lines(&String::from_utf8(lines).unwrap()), counts)
    };
    let steps = 30 - later.len();
    let alone: Vec<_> = served
        .iter()
        .map(|(name, budget, kv)| run(golden.method(name).as_ref(), options(budget, *kv)))
        .collect();
    for shift in 0..served.len() {
        let of = |kv_head: usize| (kv_head + shift) % served.len();
        let head = |kv_head: usize| {
            let (name, budget, kv) = served[of(kv_head)];
            json!({"method": name, "budget": budget, "keys": kv.keys, "values": kv.values})
        };
        let heads: Vec<Value> = (0..sizes.n_kv_heads).map(head).collect();
        // The last layer has one method.
        let last = json!({"heads": [{"repeat": sizes.n_kv_heads, "method": "topk", "budget": "0.3", "keys": "f32", "values": "f32"}]});
        let layers = json!([{"repeat": sizes.n_layers - 1, "heads": heads}, last]);
        let plan = Plan::read(json!({ "layers": layers })).unwrap();
        let method = plan.prepare(&Ask {
            artifact: None,
            ropes: &decoder.ropes,
            sizes,
            params: &MethodParams::default(),
            seed: 0,
        });
        let (method, options) = (method.unwrap(), options("0.5", KvType::F32));
        assert!(CudaBackend::can(method.as_ref(), &options, has_later));
        let (found, counts) = run(method.as_ref(), options.clone());
        let compared = same_in_first_layer(&found, |kv_head| &alone[of(kv_head)].0);
        assert_eq!(compared, steps * sizes.n_kv_heads);
        assert_eq!(counts.choices, (steps * sizes.n_kv_heads) as u64);
        // Besides what was chosen, every head reads sinks and window in each step.
        let chosen = |kv_head: usize| {
            let own = alone[of(kv_head)].0.iter();
            let own = own.filter(|line| line["layer"] == 0 && line["kv_head"] == kv_head);
            own.map(|line| line["positions"].as_array().unwrap().len())
                .sum::<usize>()
        };
        let static_rows = steps * sizes.n_kv_heads * (options.limits.sinks + options.limits.window);
        let rows = static_rows + (0..sizes.n_kv_heads).map(chosen).sum::<usize>();
        if decoder.config.windows()[0].is_none() {
            assert_eq!(counts.rows, rows as u64);
        }
    }
}

/// Several sequences at once are what each is alone, from empty caches on, but for near ties: products of three rows may
/// be summed in another order than those of one.
fn batch(driver: &dyn Driver, golden: &Golden) {
    const STEPS: usize = 20;
    let vocab = golden.decoder.config.vocab_size as u32;
    let token = |sequence: usize, step: usize| (7 + 13 * sequence + 5 * step) as u32 % vocab;
    let sizes = golden.decoder.config.sizes();
    let heads: Vec<Value> = (0..sizes.n_kv_heads)
        .map(|head| if head % 2 == 0 { "topk" } else { "full" })
        .map(|method| json!({"method": method, "budget": 0.3, "keys": "f32", "values": "f32"}))
        .collect();
    let plan = json!({"layers": [{"repeat": sizes.n_layers, "heads": heads}]});
    let planned = Plan::read(plan).unwrap().prepare(&Ask {
        artifact: None,
        ropes: &golden.decoder.ropes,
        sizes,
        params: &MethodParams::default(),
        seed: 0,
    });
    let methods = [("full", "1.0"), ("topk", "0.3"), ("streaming", "0.3")];
    let methods = methods.map(|(name, budget)| (golden.method(name), budget));
    for (method, budget) in methods.into_iter().chain([(planned.unwrap(), "0.3")]) {
        let options = options(budget, KvType::F32);
        let backend = |sequences| {
            let body = Body::load(driver, &golden.decoder, Precision::F32).unwrap();
            CudaBackend::new(body, method.as_ref(), options.clone(), sequences, STEPS + 4).unwrap()
        };
        let mut together = backend(3);
        let mut alone: Vec<_> = (0..3).map(|_| backend(1)).collect();
        for step in 0..STEPS {
            let ids: Vec<u32> = (0..3).map(|s| token(s, step)).collect();
            together.feed(&ids, step, None).unwrap();
            let found = together.choices().unwrap();
            for ((one, id), found) in alone.iter_mut().zip(&ids).zip(found) {
                one.feed(&[*id], step, None).unwrap();
                let (logits, own) = (one.logits().unwrap(), one.choices().unwrap()[0]);
                let bound = near_ties::bound(&golden.decoder, step + 1, &logits);
                near_ties::agrees(found, &logits, bound, |logits| greedy(logits).unwrap());
                assert_eq!(own, greedy(logits.view()).unwrap(), "step {step}");
            }
        }
        let read = together.shares(STEPS).unwrap().read;
        let expected: f64 = alone.iter().map(|one| one.shares(STEPS).unwrap().read).sum();
        assert!((read - expected / 3.0).abs() < 1e-9, "{read} {expected}");
    }
}

/// An engine for sequences of up to 24 positions with one prompt.
fn on_device<'a>(
    driver: &'a dyn Driver,
    golden: &'a Golden,
    (method, options): (&'a dyn Method, DecodeOptions),
    rows: RowsIn,
) -> Engine<'a> {
    let source = Source {
        driver,
        decoder: &golden.decoder,
        precision: Precision::F32,
    };
    let extent = Extent {
        capacity: 24,
        prompt: 0..12,
        later_prompts: false,
    };
    let opener = source.sequences((method, options.clone()), rows, &extent, &|_| ());
    Engine::on_device(Box::new(opener.unwrap()), options)
}

/// Sequences of different lengths over the same weights, of which one is opened later and one closed earlier, give what a
/// session gives that has the device for itself.
fn engine(driver: &dyn Driver, golden: &Golden) {
    let d = golden.decoder.config.head_dim;
    for (name, rows) in [
        ("full", RowsIn::Device),
        ("topk", RowsIn::Device),
        ("selfindex", RowsIn::Device),
        ("full", RowsIn::Host),
    ] {
        if name == "selfindex" && !d.is_multiple_of(4) {
            continue;
        }
        let (method, options) = (golden.method(name), options("0.3", KvType::F32));
        let mut engine = on_device(driver, golden, (method.as_ref(), options.clone()), rows);
        let alone = |prompt: &[u32], tokens: &[u32]| {
            let body = Body::load(driver, &golden.decoder, Precision::F32).unwrap();
            let mut session = match rows {
                RowsIn::Device => {
                    Session::new(CudaBackend::new(body, method.as_ref(), options.clone(), 1, 24).unwrap())
                }
                RowsIn::Host => {
                    Session::new(HostBackend::new(body, method.as_ref(), options.clone(), [24; 2]).unwrap())
                }
            };
            let mut logits = vec![session.prefill(prompt).unwrap()];
            logits.extend(tokens.iter().map(|id| session.step(*id).unwrap()));
            (logits, session.shares().unwrap().read)
        };
        let ids = &golden.ids;
        let prompts = [&ids[..3], &ids[..6], &ids[1..6]];
        let open = |engine: &mut Engine, i: usize| {
            let id = engine.open(24).unwrap();
            (id, vec![engine.prefill(id, prompts[i]).unwrap()])
        };
        let (mut first, mut last) = (open(&mut engine, 0), open(&mut engine, 2));
        for token in &ids[..2] {
            let fed = [(last.0, *token), (first.0, *token)];
            let [of_last, of_first] = <[_; 2]>::try_from(engine.step(&fed).unwrap()).unwrap();
            last.1.push(of_last);
            first.1.push(of_first);
        }
        assert_eq!(engine.positions(last.0).unwrap(), 7);
        let (expected, read) = alone(prompts[2], &ids[..2]);
        assert_eq!(last.1, expected, "{name} {rows:?}");
        assert_eq!(engine.shares(last.0).unwrap().read, read);
        engine.close(last.0).unwrap();
        let mut second = open(&mut engine, 1);
        for token in &ids[2..5] {
            let fed = [(first.0, *token), (second.0, *token)];
            let [of_first, of_second] = <[_; 2]>::try_from(engine.step(&fed).unwrap()).unwrap();
            first.1.push(of_first);
            second.1.push(of_second);
        }
        assert_eq!(first.1, alone(prompts[0], &ids[..5]).0, "{name} {rows:?}");
        assert_eq!(second.1, alone(prompts[1], &ids[2..5]).0, "{name} {rows:?}");

        // What is refused, and what closes a sequence.
        let later = engine.prefill(first.0, &ids[..2]).unwrap_err().to_string();
        assert!(later.contains("takes in only one"), "{later}");
        let mut full = None;
        while full.is_none() && engine.positions(first.0).unwrap() < 30 {
            full = engine.step(&[(first.0, 3)]).err();
        }
        if rows == RowsIn::Device {
            let full = full.expect("the caches do not grow").to_string();
            assert!(full.contains("has room for"), "{full}");
            assert!(engine.positions(first.0).is_err());
        }

        // The weights are there once, however many sequences are open.
        let weights = |sequences: usize| {
            let ledger = Ledger::new(driver);
            let mut engine = on_device(&ledger, golden, (method.as_ref(), options.clone()), rows);
            for _ in 0..sequences {
                engine.open(24).unwrap();
            }
            let needs = ledger.most();
            (needs.weights, needs.caches + needs.indexes + needs.workspaces)
        };
        let ((one, of_one), (three, of_three)) = (weights(1), weights(3));
        assert!(one > 0 && one == three, "{one} {three}");
        assert!(of_three > of_one, "{of_one} {of_three}");
    }
}

/// A budget of everything, and caches that are full.
fn everything(driver: &dyn Driver, golden: &Golden) {
    let exact = golden.method("full");
    let mut on_cpu =
        Session::on_cpu(&golden.decoder, exact.as_ref(), options("1.0", KvType::F32), 80).unwrap();
    let (tokens, expected) = generate(&mut on_cpu, &golden.ids, 24);
    assert_eq!(tokens, golden.greedy(), "the CPU's");
    for method in ["topk", "streaming", "random", "selfindex"] {
        let d = golden.decoder.config.head_dim;
        if method == "selfindex" && !d.is_multiple_of(4) {
            continue;
        }
        let method = golden.method(method);
        let body = Body::load(driver, &golden.decoder, Precision::F32).unwrap();
        let room = golden.ids.len() + 23;
        let backend = CudaBackend::new(body, method.as_ref(), options("1.0", KvType::F32), 1, room).unwrap();
        let mut session = Session::new(backend);
        let (tokens, _) = generate(&mut session, &golden.ids, 24);
        greedy_agreeing(&golden.decoder, &tokens, &expected, golden.ids.len());
        assert_eq!(session.shares().unwrap().read, 1.0);
        let mut full = None;
        for _ in 0..9 {
            full = session.step(3).err();
            if full.is_some() {
                break;
            }
        }
        let error = full.expect("the cache is full").to_string();
        assert!(error.contains("has room for"), "{error}");
    }
}

/// Tokens and logits of full attention in f32, over two turns.
fn full(driver: &dyn Driver, golden: &Golden) {
    let method = golden.method("full");
    let options = options("1.0", KvType::F32);
    let body = Body::load(driver, &golden.decoder, Precision::F32).unwrap();
    let mut session = Session::new(CudaBackend::new(body, method.as_ref(), options.clone(), 1, 80).unwrap());
    let mut twin = Session::on_cpu(&golden.decoder, method.as_ref(), options.clone(), 80).unwrap();
    if !same_replies(&mut session, &mut twin, golden) {
        return;
    }
    assert_eq!(session.positions(), twin.positions());
    assert_eq!(session.shares().unwrap().read, 1.0);
    // The choice on the device is that on the host.
    let nucleus = |temperature| Sampling {
        temperature,
        top_p: 0.9,
        ..Sampling::default()
    };
    // The last two are drawn on the host.
    let (few, penalised) = (
        Sampling {
            top_k: Some(3),
            ..nucleus(1.5)
        },
        Sampling {
            repetition_penalty: 1.5,
            ..nucleus(0.0)
        },
    );
    for sampling in [nucleus(0.0), nucleus(0.8), few, penalised] {
        let sampler = || {
            let mut sampler = Sampler::new(sampling, 5);
            sampler.observe(&golden.ids);
            sampler
        };
        let next = session.next(9, &mut sampler()).unwrap();
        let logits = twin.step(9).unwrap();
        let bound = near_ties::bound(&golden.decoder, twin.positions(), &logits);
        near_ties::agrees(next, &logits, bound, |logits| sampler().next(logits).unwrap());
    }
}
