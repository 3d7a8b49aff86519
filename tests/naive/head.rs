//! One KV head with its method, driven through prompts, turns and decode steps in random order.

use kvsmith::internal::compute::attention::{self, CachedRows};
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{Budget, KvHead, KvType, Limits, StaticSet};
use kvsmith::internal::method::{Place, Prompt, Retriever, Selection, Step};
use ndarray::{Array2, Array3, ArrayView2, Axis};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::inputs::{CHANNELS, GROUP, Inputs};
use super::quantiser::NaivePacked;
use super::{Agreement, Decode, Event, History, Matrix, Model, Turn, check_reads, pick};

/// Rows of `d` channels.
fn rows(rows: Vec<Vec<f32>>, d: usize) -> Array2<f32> {
    Array2::from_shape_vec((rows.len(), d), rows.concat()).unwrap()
}

pub fn wide(x: ArrayView2<f32>) -> Matrix {
    x.rows()
        .into_iter()
        .map(|r| r.iter().map(|v| f64::from(*v)).collect())
        .collect()
}

pub fn cached(rows: &dyn CachedRows, n: usize, d: usize) -> Array2<f32> {
    let mut scratch = vec![0.0; d];
    let values = (0..n).flat_map(|p| rows.row(p, &mut scratch).to_vec());
    Array2::from_shape_vec((n, d), values.collect()).unwrap()
}

/// One KV head, run as the runner does, beside its history.
pub struct Head<M: Model> {
    rng: ChaCha8Rng,
    inputs: Inputs,
    kv: KvHead,
    center: Center,
    pub program: M::Program,
    pub model: M,
    pub history: History,
    /// Positions and decode steps so far.
    len: usize,
    steps: usize,
    pub near_ties: usize,
    /// Steps that left something out.
    sparse: usize,
    /// Those of them whose reads were checked.
    counted: usize,
    /// The model of the cache, where it is checked.
    packed: Option<NaivePacked>,
}

fn random_place(rng: &mut ChaCha8Rng) -> Place {
    let kind = rng.gen_range(0..6);
    let budget = match kind {
        0 => Budget::Fraction(1.0),
        1 | 2 => Budget::Fraction(rng.gen_range(0.02..0.5)),
        3 => Budget::Count(rng.gen_range(1..5)),
        4 => Budget::Count(rng.gen_range(2..60)),
        _ => Budget::Fraction(0.01),
    };
    let (mut group, mut head_dim) = (pick(rng, &[1, 2, 3, 5, 8]), pick(rng, &[8, 16, 20, 64, 80]));
    if rng.gen_bool(0.3) {
        (group, head_dim) = (GROUP, CHANNELS);
    }
    Place {
        layer: 0,
        kv_head: rng.gen_range(0..3),
        group,
        head_dim,
        limits: Limits {
            model_window: rng.gen_bool(0.3).then(|| rng.gen_range(12..=60)),
            sinks: rng.gen_range(0..=5),
            window: rng.gen_range(1..=20),
            budget,
        },
        kv: pick(rng, &[KvType::F32, KvType::F32, KvType::F16, KvType::TWO_BIT]),
    }
}

impl<M: Model> Head<M> {
    pub fn new(mut rng: ChaCha8Rng, place: Place, center: Center, program: M::Program, model: M) -> Self {
        Self {
            inputs: Inputs::new(&mut rng, &place),
            rng,
            kv: KvHead::new(place.kv, place.head_dim, 0, center),
            center,
            program,
            model,
            history: History {
                place,
                events: Vec::new(),
            },
            len: 0,
            steps: 0,
            near_ties: 0,
            sparse: 0,
            counted: 0,
            packed: (place.kv == KvType::TWO_BIT).then(NaivePacked::default),
        }
    }

    pub fn prefill(&mut self, m: usize) -> Result<(), String> {
        let place = self.history.place;
        let (r, d, first) = (place.group, place.head_dim, self.len);
        let k_pre = self.inputs.k_pre(&mut self.rng, first..first + m);
        let new_values = self.inputs.values(&mut self.rng, first..first + m);
        let key = |i| self.inputs.key(&mut self.rng, first + i);
        let new_keys = rows((0..m).map(key).collect(), d);
        let mut q_rope = Array3::zeros((r, m, d));
        for (a, mut head) in q_rope.outer_iter_mut().enumerate() {
            let query = |i| self.inputs.query(&mut self.rng, a, first + i);
            head.assign(&rows((0..m).map(query).collect(), d));
        }
        let joined = |old: &dyn CachedRows, new: &Array2<f32>| {
            ndarray::concatenate(Axis(0), &[cached(old, first, d).view(), new.view()]).unwrap()
        };
        let keys = joined(self.kv.keys(), &new_keys);
        let values = joined(self.kv.values(), &new_values);
        let query = q_rope.index_axis(Axis(1), m - 1).mean_axis(Axis(0)).unwrap();
        let seen = attention::visible(first + m - 1, place.limits.model_window);
        self.kv.prompt(keys.view(), values.view(), &query.to_vec(), seen);
        self.program.prefill(&Prompt {
            first,
            k_pre: k_pre.view(),
            q_rope: q_rope.view(),
            keys: keys.view(),
            values: values.view(),
            kv: &self.kv,
        });
        self.len += m;
        self.history.events.push(Event::Turn(Turn {
            first,
            queries: q_rope.outer_iter().map(wide).collect(),
            keys: wide(keys.view()),
            k_pre: wide(k_pre.view()),
        }));
        if let Some(packed) = &mut self.packed {
            let known = packed.prompt(&self.history, &wide(values.view()), self.center);
            self.packed = known.and(self.packed.take());
        }
        self.model.prompted(&self.history, &self.program)
    }

    pub fn step(&mut self) -> Result<(), String> {
        let place = self.history.place;
        let (r, d, t) = (place.group, place.head_dim, self.len);
        let key = rows(vec![self.inputs.key(&mut self.rng, t)], d);
        let k_pre = self.inputs.k_pre(&mut self.rng, t..t + 1);
        let value = self.inputs.values(&mut self.rng, t..t + 1);
        let queries = |of: fn(&Inputs, &mut ChaCha8Rng, usize, usize) -> Vec<f32>, rng: &mut ChaCha8Rng| {
            rows((0..r).map(|a| of(&self.inputs, rng, a, t)).collect(), d)
        };
        let q_pre = queries(Inputs::q_pre, &mut self.rng);
        let q_rope = queries(Inputs::query, &mut self.rng);
        self.kv.extend(key.view(), value.view());
        self.program.append(k_pre.view(), key.view());
        let set = StaticSet::at(
            t,
            place.limits.model_window,
            place.limits.sinks,
            place.limits.window,
        );
        let step = Step {
            step: self.steps,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: place.limits.budget.positions(set.visible().len()),
            q_pre: q_pre.view(),
            q_rope: q_rope.view(),
            kv: &self.kv,
        };
        let selection = self.program.select(&step);
        let attended: Vec<u32> = (set.visible())
            .filter(|p| !set.candidates.contains(p) || selection.positions.contains(&(*p as u32)))
            .map(|p| p as u32)
            .collect();
        let weights = observed_weights(&step, &selection, &attended);
        let (keys, values) = (
            cached(self.kv.keys(), t + 1, d),
            cached(self.kv.values(), t + 1, d),
        );
        self.history.events.push(Event::Decode(Box::new(Decode {
            step: self.steps,
            t,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: step.budget,
            q_pre: wide(q_pre.view()),
            q_rope: wide(q_rope.view()),
            k_pre: wide(k_pre.view()).remove(0),
            key: wide(key.view()).remove(0),
            keys: wide(keys.view()),
            values: wide(values.view()),
            selection,
            attended: attended.iter().map(|p| *p as usize).collect(),
        })));
        let checked = check_choice(&mut self.model, &self.history)?;
        self.sparse += usize::from(checked.is_some());
        self.near_ties += usize::from(checked == Some(Agreement::NearTie));
        if checked == Some(Agreement::Same)
            && let Some(arrays) = self.model.read(&self.history)
        {
            let selection = &self.history.step().selection;
            check_reads(&arrays, |reads| self.program.reads(&step, selection, reads))?;
            self.counted += 1;
        }
        if self.program.observes(&step) {
            self.program.observe(&step, &attended, weights.view());
        }
        if let Some(packed) = &mut self.packed {
            packed.push(&wide(key.view())[0], &wide(value.view())[0]);
            packed.check(&wide(keys.view()), &wide(values.view()))?;
        }
        self.len += 1;
        self.steps += 1;
        self.model.observed(&self.history, &self.program)
    }

    /// A prompt, then steps and turns in random order.
    fn run(&mut self) -> Result<(), String> {
        let longest = pick(&mut self.rng, &[6, 40, 100, 200]);
        let first = self.rng.gen_range(1..=longest);
        self.prefill(first)?;
        for _ in 0..self.rng.gen_range(4..14) {
            if self.rng.gen_bool(0.12) {
                let m = self.rng.gen_range(1..=40);
                self.prefill(m)?;
            } else {
                self.step()?;
            }
        }
        Ok(())
    }
}

/// What holds for every method, then what the model says of a step that leaves something out.
fn check_choice<M: Model>(model: &mut M, history: &History) -> Result<Option<Agreement>, String> {
    let step = history.step();
    let positions = &step.selection.positions;
    if !positions.windows(2).all(|w| w[0] < w[1]) {
        return Err(format!("not ascending: {positions:?}"));
    }
    let all: Vec<u32> = step.candidates.clone().map(|p| p as u32).collect();
    if step.is_exact() {
        let attending = step.selection.bypassed.iter().all(Option::is_none);
        return if *positions == all && attending {
            Ok(None)
        } else {
            Err(format!("not everything: {:?}", step.selection))
        };
    }
    let most = if M::BOUNDED { step.budget } else { all.len() };
    if positions.len() > most || !positions.iter().all(|p| all.contains(p)) {
        return Err(format!("{positions:?} of {:?}", step.candidates));
    }
    model.chose(history).map(Some)
}

/// The weights that the runner hands to a method: those of a bypassed head are zeros.
fn observed_weights(step: &Step, selection: &Selection, attended: &[u32]) -> Array2<f32> {
    let mut out = Array2::zeros(step.q_rope.dim());
    let (mut weights, _) = attention::decode_with_weights(
        step.q_rope,
        step.kv.keys(),
        step.kv.values(),
        attended,
        out.view_mut(),
    );
    for (a, own) in selection.bypassed.iter().enumerate() {
        if own.is_some() {
            weights.row_mut(a).fill(0.0);
        }
    }
    weights
}

/// What the cases of a method went through.
#[derive(Default)]
struct Tally {
    sparse: usize,
    counted: usize,
    near_ties: usize,
}

/// Runs `cases` random histories; `make` gives the program and its model, with the center of the case.
pub fn cases<M: Model>(
    cases: u64,
    mut make: impl FnMut(&mut ChaCha8Rng, &Place, Center) -> (M::Program, M),
    mut done: impl FnMut(&M),
) {
    let mut tally = Tally::default();
    for seed in 0..cases {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let place = random_place(&mut rng);
        let center = pick(&mut rng, &[Center::Median, Center::Mean]);
        let (program, model) = make(&mut rng, &place, center);
        let mut head = Head::new(rng, place, center, program, model);
        if let Err(what) = head.run() {
            panic!(
                "case {seed} ({:?}, {center:?}, {place:?}), {} positions, step {}: {what}",
                head.inputs.kind, head.len, head.steps
            );
        }
        tally.sparse += head.sparse;
        tally.counted += head.counted;
        tally.near_ties += head.near_ties;
        done(&head.model);
    }
    let Tally {
        sparse,
        counted,
        near_ties,
    } = tally;
    println!("{sparse} sparse steps, {near_ties} near ties, {counted} with known reads");
    assert!(
        sparse >= 2 * cases as usize,
        "{sparse} sparse steps in {cases} cases"
    );
    assert!(counted * 2 > sparse, "the reads of {counted} of {sparse} steps");
    assert!(near_ties * 50 < sparse, "{near_ties} of {sparse} steps unchecked");
}
