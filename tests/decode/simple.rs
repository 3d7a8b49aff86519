//! streaming and random on the GPU: the positions of the CPU's methods, and what the host knows of a step.

use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::method::random::RandomDraws;
use kvsmith::internal::method::random::cuda::Draws;
use kvsmith::internal::method::streaming::cuda::Streaming;
use kvsmith::internal::method::{Retriever, streaming};
use ndarray::Array2;

use super::cases::{self, Batch, span};

/// With the positions of every sequence.
pub type Case = cases::Case<Vec<usize>>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, lens: &[usize], budget| {
        let n = *lens.iter().max().unwrap();
        let case = Case::new(name, [lens.len(), 3, 2, 8], n, 2, lens.to_vec());
        case.static_set(4, 10).budget(budget)
    };
    vec![
        case("share", &[700, 333], Budget::Fraction(0.5)),
        case("count", &[1200], Budget::Count(600)),
        case("sliding", &[300, 90], Budget::Fraction(0.1)).model_window(80),
        // The budget covers all candidates, or there are none.
        case("all", &[200, 15], Budget::Count(5000)),
        case("none", &[1, 0, 9], Budget::Fraction(0.3)),
    ]
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let (shape, limits) = (case.shape, &case.limits);
    let mut batch = Batch::new(driver, case);
    batch.set(&case.special);
    let recent = Streaming::new(driver, shape, limits).unwrap();
    let (seed, layer) = (7, 5);
    let drawn = Draws::new(driver, shape, limits, seed, layer, 0..shape.kv_heads).unwrap();
    let (kv, queries) = (case.kv_head(), Array2::zeros((2, 8)));
    for index in 0..2 {
        batch.advance(1);
        let sets: Vec<_> = (0..shape.sequences)
            .map(|s| batch.set_of(s * shape.kv_heads))
            .collect();
        assert_eq!(
            batch.positions.sets().collect::<Vec<_>>(),
            sets,
            "what the host knows"
        );
        assert_eq!(batch.positions.known(), batch.lens);
        let spans: Vec<_> = sets.iter().map(|(set, _)| span(set)).collect();
        assert_eq!(batch.positions.spans().unwrap(), spans, "what the device knows");
        let recent = recent.select(&batch.positions).unwrap().read().unwrap();
        let drawn = drawn.select(index, &batch.positions).unwrap().read().unwrap();
        for at in 0..shape.heads() {
            let step = batch.step(at, index, queries.view(), &kv);
            assert_eq!(recent[at], streaming::Streaming.select(&step).positions);
            let theirs = RandomDraws::new(seed, layer, at % shape.kv_heads)
                .select(&step)
                .positions;
            assert_eq!(drawn[at], theirs, "step {index}, head {at}");
            assert_eq!(theirs.len(), step.budget.min(step.candidates.len()));
        }
    }
}
