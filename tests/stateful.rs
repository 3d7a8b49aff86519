//! Every method against its naive model, through prompts, turns and decode steps in random order; and some golden
//! numbers.

mod common;
mod naive;

use std::process::ExitCode;
use std::sync::Arc;

use common::random::noise;
use common::{methods, plain_rope, trials};
use kvsmith::internal::compute::attention::{self, CachedRows, Partial};
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{Budget, KvHead, KvType, Limits, RowCache, RowStore};
use kvsmith::internal::method::a2ats::{A2ats, HeadCodebook};
use kvsmith::internal::method::ctkvr::{Ctkvr, CtkvrParams};
use kvsmith::internal::method::{Place, Prompt, Retriever, Step};
use libtest_mimic::{Arguments, Trial};
use naive::ctkvr::NaiveCtkvr;
use naive::head::{Head, cached, wide};
use naive::quantiser::NaivePacked;
use naive::{Event, History, Turn};
use ndarray::{Array1, Array2, Axis, s};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn main() -> ExitCode {
    let of_method = |method: &'static str| {
        Trial::test(method, move || {
            naive::check(method);
            Ok(())
        })
    };
    let others = trials![
        ctkvr_ranks_what_left_the_window_for_256_steps,
        ctkvr_recalls_everything_where_its_lists_hold_everything,
        triattention_scores_again_after_128_positions,
        centring_the_keys_changes_no_attention,
        what_half_precision_cannot_hold_saturates,
        golden_merge_of_two_parts,
        golden_a2ats_budget_per_query_head,
        golden_bits_of_the_two_bit_cache,
        golden_bytes_of_ctkvr_lists,
    ];
    let tails: [(&str, fn()); 2] = [
        ("tail", naive::tail::check_tail),
        ("tail_exact", naive::tail::check_exact_tails),
    ];
    let tails = tails.map(|(name, check)| {
        Trial::test(name, move || {
            check();
            Ok(())
        })
    });
    let methods = methods().map(|method| of_method(method.as_str()));
    let trials = methods.chain(tails).chain(others).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// A place for the tests that need a certain one.
fn place(group: usize, head_dim: usize, budget: Budget) -> Place {
    Place {
        layer: 0,
        kv_head: 0,
        group,
        head_dim,
        limits: Limits {
            sinks: 4,
            window: 8,
            ..Limits::new(budget)
        },
        kv: KvType::F32,
    }
}

/// A ctkvr head beside its model.
fn ctkvr_head(seed: u64, place: Place, params: CtkvrParams) -> Head<NaiveCtkvr> {
    let program = Ctkvr::new(&place, &params);
    let rng = ChaCha8Rng::seed_from_u64(seed);
    Head::new(rng, place, Center::Median, program, NaiveCtkvr::new(params))
}

fn ctkvr_ranks_what_left_the_window_for_256_steps() {
    // Generated tokens alone outnumber those that every query ranks.
    for update in [0, 1] {
        let params = CtkvrParams {
            ct_update: update,
            ..CtkvrParams::default()
        };
        let mut head = ctkvr_head(7, place(2, 8, Budget::Count(6)), params);
        head.prefill(20).unwrap();
        (0..300).for_each(|_| head.step().unwrap());
        let last = head.history.step();
        assert!(last.candidates.len() > 270 && last.selection.ranked.len() < 256 + 4 * 15);
        assert_eq!(head.near_ties, 0);
    }
}

fn ctkvr_recalls_everything_where_its_lists_hold_everything() {
    let params = CtkvrParams {
        ct_centroids: Some(40),
        ct_probes: 40,
        ct_update: 1,
        ..CtkvrParams::default()
    };
    // rho = 2.5 * 0.4 n = n.
    let mut head = ctkvr_head(8, place(1, 64, Budget::Fraction(0.4)), params);
    head.prefill(100).unwrap();
    for _ in 0..50 {
        head.step().unwrap();
        let step = head.history.step();
        let ranked = step.selection.ranked.len() + step.selection.positions.len();
        assert_eq!(ranked, step.candidates.len());
        assert_eq!(
            head.program.lists().count(),
            40,
            "the oldest makes room for the newest"
        );
    }
}

fn triattention_scores_again_after_128_positions() {
    let mut rng = ChaCha8Rng::seed_from_u64(12);
    // More steps than the window has positions are new at the end of a round, and sometimes more than the budget.
    for (model_window, budget) in [(None, 60), (Some(190), 150), (None, 7)] {
        let mut place = place(3, 16, Budget::Count(budget));
        place.limits.model_window = model_window;
        let (program, model) = naive::triattention::make(&mut rng, &place);
        let mut head = Head::new(rng.clone(), place, Center::Median, program, model);
        head.prefill(100).unwrap();
        (0..300).for_each(|_| head.step().unwrap());
        assert_eq!((head.model.rounds, head.near_ties), (2, 0));
        // A prompt is scored at once.
        head.prefill(20).unwrap();
        (0..130).for_each(|_| head.step().unwrap());
        assert_eq!(head.model.rounds, 3);
    }
}

fn centring_the_keys_changes_no_attention() {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    for center in [Center::Median, Center::Mean] {
        let (n, r, d) = (150, 3, 64);
        let mut random =
            |rows: usize, shift: f32| Array2::from_shape_simple_fn((rows, d), || noise(&mut rng) + shift);
        let (queries, keys, values) = (random(r, 0.0), random(n, 2.0), random(n, 0.0));
        let centered = &keys - &Array1::from(center.of_channels(keys.view()));
        let positions: Vec<u32> = (0..n as u32).collect();
        let attended = |keys: &Array2<f32>| {
            let store = |rows: &Array2<f32>| {
                let mut store = RowStore::<f32>::new(d, n);
                store.extend(rows.view());
                store
            };
            let mut out = Array2::zeros((r, d));
            attention::decode(
                queries.view(),
                &store(keys),
                &store(&values),
                &positions,
                out.view_mut(),
            );
            out
        };
        for (a, b) in attended(&keys).iter().zip(attended(&centered)) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }
}

fn what_half_precision_cannot_hold_saturates() {
    let (n, d) = (90, 40);
    let mut rng = ChaCha8Rng::seed_from_u64(10);
    let mut random = |scale: f32| Array2::from_shape_simple_fn((n, d), || scale * noise(&mut rng));
    for scale in [1e-6, 1.0, 1e5, 1e9] {
        let (keys, values) = (random(scale), random(scale));
        let query = random(1.0).row(0).to_vec();
        let mut kv = KvHead::new(KvType::TWO_BIT, d, n, Center::Median);
        kv.prompt(keys.view(), values.view(), &query, 0..n);
        let mut history = History {
            place: place(1, d, Budget::Count(2)),
            events: Vec::new(),
        };
        history.events.push(Event::Turn(Turn {
            first: 0,
            queries: vec![
                (0..n)
                    .map(|_| query.iter().map(|q| f64::from(*q)).collect())
                    .collect(),
            ],
            keys: wide(keys.view()),
            k_pre: Vec::new(),
        }));
        let mut packed = NaivePacked::default();
        packed
            .prompt(&history, &wide(values.view()), Center::Median)
            .unwrap();
        let rows = |rows: &dyn CachedRows| wide(cached(rows, n, d).view());
        packed.check(&rows(kv.keys()), &rows(kv.values())).unwrap();
        assert!(
            rows(kv.keys())
                .concat()
                .iter()
                .chain(&rows(kv.values()).concat())
                .all(|x| x.is_finite())
        );
    }
}

fn golden_merge_of_two_parts() {
    let mut out = [2.0f32, 0.0];
    let other = Partial {
        output: vec![0.0, 4.0],
        lse: 0.0,
    };
    let lse = attention::merge(&mut out, 1.0, &other);
    for (x, expected) in out.iter().chain([&lse]).zip([1.462117, 1.075766, 1.313262]) {
        assert!((x - expected).abs() < 1e-6, "{out:?} {lse}");
    }
}

fn golden_a2ats_budget_per_query_head() {
    // Every query head has a codeword of its own, which a quarter of the keys has.
    let (d, n) = (4, 1000);
    let eye = Array2::<f32>::eye(d);
    let head = HeadCodebook::new(eye.clone(), Array1::zeros(d), eye.clone(), &plain_rope(d), 0).unwrap();
    let mut a2ats = A2ats::new(Arc::new(head), Some(0.03));
    for p in 0..n {
        a2ats.append(
            eye.slice(s![p % d..p % d + 1, ..]),
            eye.slice(s![p % d..p % d + 1, ..]),
        );
    }
    let choice = a2ats.select(&Step {
        step: 0,
        visible: 0..n,
        candidates: 4..n - 64,
        budget: 1,
        q_pre: eye.view(),
        q_rope: eye.view(),
        kv: &KvHead::new(KvType::F32, d, 0, Center::Median),
    });
    // 30 each, the lowest positions of each head's codeword.
    assert_eq!(choice.positions, (4..124).collect::<Vec<u32>>());
}

fn golden_bits_of_the_two_bit_cache() {
    for (d, bits) in [(128, 896), (64, 448)] {
        assert_eq!(8 * KvType::TWO_BIT.bytes_per_position(d), bits);
    }
}

fn golden_bytes_of_ctkvr_lists() {
    let (n, m, d) = (2700, 512, 256);
    let place = place(1, d, Budget::Count(1024));
    let params = CtkvrParams {
        ct_centroids: Some(512),
        ..CtkvrParams::default()
    };
    let mut ctkvr = Ctkvr::new(&place, &params);
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let keys = Array2::from_shape_simple_fn((n, d), || noise(&mut rng));
    let first = n - m;
    let mut kv = KvHead::new(KvType::F32, d, n, Center::Median);
    kv.extend(keys.view(), keys.view());
    ctkvr.prefill(&Prompt {
        first,
        k_pre: keys.slice(s![first.., ..]),
        q_rope: keys.slice(s![first.., ..]).insert_axis(Axis(0)),
        keys: keys.view(),
        values: keys.view(),
        kv: &kv,
    });
    assert_eq!(ctkvr.lists().count(), 512);
    let full = ctkvr.lists().last().unwrap().len();
    assert_eq!((ctkvr.list_len(n), full), (2560, 2560));
    assert_eq!(512 * 2560 * size_of::<u32>(), 5_242_880);
    // The first queries see fewer positions than a list may hold; each centroid has 2 d bytes besides.
    let lists: usize = ctkvr.lists().map(|l| 4 * l.len()).sum();
    assert!(lists <= 5_242_880 && ctkvr.state_bytes() >= lists + 512 * 2 * d);
}
