//! streaming and random on the GPU: the positions of the CPU's methods, and what the host knows of a step.

use kvsmith::compute::cuda::driver::Driver;
use kvsmith::kv::Budget;
use kvsmith::kv::cuda::{Limits, Positions, Shape};
use kvsmith::kv::packed::Center;
use kvsmith::kv::{KvHead, KvType};
use kvsmith::method::random::Random;
use kvsmith::method::random::cuda::Draws;
use kvsmith::method::streaming::cuda::Streaming;
use kvsmith::method::{Retriever, Step, streaming};
use ndarray::Array2;

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub lens: Vec<u32>,
    pub limits: Limits,
}

pub fn cases() -> Vec<Case> {
    let case = |name, lens: &[u32], model_window, budget| Case {
        name,
        lens: lens.to_vec(),
        limits: Limits {
            sinks: 4,
            window: 10,
            model_window,
            budget,
        },
    };
    vec![
        case("share", &[700, 333], None, Budget::Fraction(0.5)),
        case("count", &[1200], None, Budget::Count(600)),
        case("sliding", &[300, 90], Some(80), Budget::Fraction(0.1)),
        // The budget covers all candidates, or there are none.
        case("all", &[200, 15], None, Budget::Count(5000)),
        case("none", &[1, 0, 9], None, Budget::Fraction(0.3)),
    ]
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let shape = Shape {
        sequences: case.lens.len(),
        kv_heads: 3,
        group: 2,
        head_dim: 8,
        capacity: *case.lens.iter().max().unwrap() as usize + 2,
    };
    let mut positions = Positions::new(driver, shape, case.limits).unwrap();
    positions.set(&case.lens).unwrap();
    let recent = Streaming::new(driver, shape, &case.limits).unwrap();
    let (seed, layer) = (7, 5);
    let drawn = Draws::new(driver, shape, &case.limits, seed, layer).unwrap();
    let kv = KvHead::new(KvType::F32, 8, 0, Center::Median);
    let queries = Array2::zeros((2, 8));
    for index in 0..2 {
        positions.advance(1).unwrap();
        let recent = recent.select(&positions).unwrap().read().unwrap();
        let drawn = drawn.select(index, &positions).unwrap().read().unwrap();
        let spans = positions.spans().unwrap();
        for (s, (set, budget)) in positions.sets().enumerate() {
            assert_eq!(positions.known()[s], case.lens[s] as usize + index + 1);
            let (seen, candidates) = (set.visible(), set.candidates.clone());
            let sinks = candidates.start - seen.start;
            let span = [seen.start, sinks, candidates.end, seen.end].map(|x| x as u32);
            assert_eq!(spans[s], span, "what the host knows");
            for head in 0..shape.kv_heads {
                let step = Step {
                    step: index,
                    visible: seen.clone(),
                    candidates: candidates.clone(),
                    budget,
                    q_pre: queries.view(),
                    q_rope: queries.view(),
                    kv: &kv,
                };
                let at = s * shape.kv_heads + head;
                assert_eq!(recent[at], streaming::Streaming.select(&step).positions);
                let theirs = Random::new(seed, layer, head).select(&step).positions;
                assert_eq!(drawn[at], theirs, "step {index}, head {at}");
                assert_eq!(theirs.len(), budget.min(candidates.len()));
            }
        }
    }
}
