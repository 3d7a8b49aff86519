//! Prompts, turns and decode steps in random order: every method against its naive model.

mod common;
mod naive;

use std::ops::Range;
use std::sync::OnceLock;

use kvsmith::compute::attention::{self, CachedRows, Partial};
use kvsmith::float::Float;
use kvsmith::kv::Budget;
use kvsmith::kv::StaticSet;
use kvsmith::kv::packed::Center;
use kvsmith::kv::{KvHead, KvType, RowStore};
use kvsmith::method::a2ats::{A2ats, HeadCodebook};
use kvsmith::method::ctkvr::{self, Ctkvr};
use kvsmith::method::lfps::{self, Threshold};
use kvsmith::method::quest::Quest;
use kvsmith::method::selfindex::{CentroidSource, SelfIndex};
use kvsmith::method::snapkv::SnapKv;
use kvsmith::method::streaming::Streaming;
use kvsmith::method::{Choice, Place, Prompt, Ranking, Retriever, Step};
use kvsmith::model::Decoder;
use kvsmith::model::decoder::rotated;
use kvsmith::model::tokenizer::Tokenizer;
use naive::baselines::{NaiveA2ats, NaiveQuest, NaiveSnapKv, NaiveStreaming, random_codebook};
use naive::ctkvr::NaiveCtkvr;
use naive::lfps::NaiveLfps;
use naive::quantiser::NaivePacked;
use naive::selfindex::NaiveSelfIndex;
use naive::{Agreement, Decode, Event, History, Matrix, Model, Turn};
use ndarray::{Array2, Array3, ArrayView2, Axis, s};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// About normal: the sum of four uniform numbers, scaled to unit variance.
fn noise(rng: &mut ChaCha8Rng) -> f32 {
    (0..4).map(|_| rng.gen_range(-1.0..1.0f32)).sum::<f32>() * 0.75f32.sqrt()
}

fn pick<T: Copy>(rng: &mut ChaCha8Rng, from: &[T]) -> T {
    from[rng.gen_range(0..from.len())]
}

/// What keys and queries look like.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Gaussian,
    /// Queries look at the sinks, some more than the rest.
    Sinks,
    /// Keys are copies of a few, and so are queries.
    Repeated,
    /// Queries are near one of a few, keys have a common offset.
    Clustered,
    /// States of the bundled model on held-out text.
    Captured,
}

/// States of one layer of the bundled model: `[heads, positions, 64]`.
struct Captured {
    q_pre: Array3<f32>,
    q_rope: Array3<f32>,
    k_pre: Array3<f32>,
    k_rope: Array3<f32>,
    v: Array3<f32>,
}

/// Query heads of a group, KV heads, channels and positions of [`captured`].
const GROUP: usize = 2;
const KV_HEADS: usize = 2;
const CHANNELS: usize = 64;
const POSITIONS: usize = 800;

/// The layers of the bundled model.
fn captured() -> &'static [Captured] {
    static LAYERS: OnceLock<Vec<Captured>> = OnceLock::new();
    LAYERS.get_or_init(|| {
        let data = common::root().join("calib-data");
        let decoder = Decoder::open(&data.join("model")).unwrap();
        let text = std::fs::read_to_string(data.join("heldout.txt")).unwrap();
        let tokenizer = Tokenizer::open(&data.join("model"), &decoder.config).unwrap();
        let ids = tokenizer.encode_prefix(&text, POSITIONS).unwrap();
        let mut hidden = decoder.embed(&ids).unwrap();
        let table = decoder.rope.table(0..POSITIONS);
        let layer = |i: usize| {
            let mut out = None;
            let layer = decoder.layer(i).unwrap();
            layer.forward(&decoder.rope, hidden.view_mut(), |s, k_rope| {
                out = Some(Captured {
                    q_pre: s.q_pre.clone(),
                    q_rope: rotated(&s.q_pre, &table, 0..POSITIONS),
                    k_pre: s.k_pre.clone(),
                    k_rope: k_rope.clone(),
                    v: s.v.clone(),
                });
            });
            out.unwrap()
        };
        (0..decoder.config.n_layers).map(layer).collect()
    })
}

/// Where rows come from.
struct Inputs {
    kind: Kind,
    sinks: usize,
    d: usize,
    /// Rows that keys or queries are made from.
    pool: Vec<Vec<f32>>,
    /// Direction of the sinks, and how much each query head looks there.
    towards: Vec<f32>,
    strength: Vec<f32>,
    /// The layer of captured states, and the KV head.
    layer: &'static Captured,
    kv_head: usize,
}

impl Inputs {
    fn new(rng: &mut ChaCha8Rng, place: &Place) -> Self {
        let d = place.head_dim;
        let row = |rng: &mut ChaCha8Rng| (0..d).map(|_| noise(rng)).collect::<Vec<f32>>();
        let mut kind = pick(
            rng,
            &[Kind::Gaussian, Kind::Sinks, Kind::Repeated, Kind::Clustered],
        );
        if (place.group, place.head_dim) == (GROUP, CHANNELS) && place.kv_head < KV_HEADS {
            kind = Kind::Captured;
        }
        let layers = captured();
        let centre = if rng.gen_bool(0.5) { 2.0 } else { 4.0 };
        Self {
            kind,
            sinks: place.sinks,
            d,
            pool: (0..rng.gen_range(2..7)).map(|_| row(rng)).collect(),
            towards: row(rng),
            strength: (0..place.group)
                .map(|_| centre * rng.gen_range(0.2..1.6f32))
                .collect(),
            layer: &layers[rng.gen_range(0..layers.len())],
            kv_head: place.kv_head,
        }
    }

    fn key(&self, rng: &mut ChaCha8Rng, position: usize) -> Vec<f32> {
        let sink = matches!(self.kind, Kind::Sinks) && position < self.sinks;
        let from = rng.gen_range(0..self.pool.len());
        let mut of = |i: usize| match self.kind {
            Kind::Repeated => self.pool[from][i],
            Kind::Captured => self.layer.k_rope[[self.kv_head, position, i]],
            Kind::Sinks if sink => self.towards[i] + 0.1 * noise(rng),
            Kind::Clustered => 3.0 * self.towards[i] + noise(rng),
            _ => noise(rng),
        };
        (0..self.d).map(&mut of).collect()
    }

    fn query(&self, rng: &mut ChaCha8Rng, a: usize, position: usize) -> Vec<f32> {
        let from = rng.gen_range(0..self.pool.len());
        // Scores with a sink of about the head's strength times a little more than one.
        let pull = self.strength[a] * rng.gen_range(0.8..1.2) * 1.3 / (self.d as f32).sqrt();
        let of = |(i, noise): (usize, f32)| match self.kind {
            Kind::Sinks => pull * self.towards[i] * 1.5 + 0.5 * noise,
            Kind::Repeated => 0.7 * self.pool[from][i],
            Kind::Clustered => 2.0 * self.pool[from][i] + 0.2 * noise,
            Kind::Captured => self.layer.q_rope[[self.kv_head * GROUP + a, position, i]],
            _ => 1.5 * noise,
        };
        (0..self.d).map(|i| (i, noise(rng))).map(of).collect()
    }

    /// Rows that nothing but their own use ties to the others: noise, or captured ones of `head`.
    fn other(
        &self,
        rng: &mut ChaCha8Rng,
        states: fn(&Captured) -> &Array3<f32>,
        head: usize,
        positions: Range<usize>,
    ) -> Array2<f32> {
        match self.kind {
            Kind::Captured => states(self.layer).slice(s![head, positions, ..]).to_owned(),
            _ => Array2::from_shape_simple_fn((positions.len(), self.d), || noise(rng)),
        }
    }

    /// Values.
    fn values(&self, rng: &mut ChaCha8Rng, positions: Range<usize>) -> Array2<f32> {
        self.other(rng, |l| &l.v, self.kv_head, positions)
    }

    /// Keys before rotation.
    fn k_pre(&self, rng: &mut ChaCha8Rng, positions: Range<usize>) -> Array2<f32> {
        self.other(rng, |l| &l.k_pre, self.kv_head, positions)
    }

    /// A query before rotation.
    fn q_pre(&self, rng: &mut ChaCha8Rng, a: usize, position: usize) -> Vec<f32> {
        let head = self.kv_head * GROUP + a;
        self.other(rng, |l| &l.q_pre, head, position..position + 1)
            .into_iter()
            .collect()
    }
}

fn rows(rows: Vec<Vec<f32>>, d: usize) -> Array2<f32> {
    Array2::from_shape_vec((rows.len(), d), rows.concat()).unwrap()
}

fn wide(x: ArrayView2<f32>) -> Matrix {
    x.rows()
        .into_iter()
        .map(|r| r.iter().map(|v| f64::from(*v)).collect())
        .collect()
}

fn cached(rows: &dyn CachedRows, n: usize, d: usize) -> Array2<f32> {
    let mut scratch = vec![0.0; d];
    let values = (0..n).flat_map(|p| rows.row(p, &mut scratch).to_vec());
    Array2::from_shape_vec((n, d), values.collect()).unwrap()
}

/// One KV head, run as the runner does, beside its history.
struct Head<M: Model> {
    rng: ChaCha8Rng,
    inputs: Inputs,
    kv: KvHead,
    center: Center,
    program: M::Program,
    model: M,
    history: History,
    /// Positions and decode steps so far.
    len: usize,
    steps: usize,
    near_ties: usize,
    /// Steps that left something out.
    sparse: usize,
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
        model_window: rng.gen_bool(0.3).then(|| rng.gen_range(12..=60)),
        sinks: rng.gen_range(0..=5),
        window: rng.gen_range(1..=20),
        budget,
        kv: pick(rng, &[KvType::F32, KvType::F32, KvType::F16, KvType::TwoBit]),
    }
}

impl<M: Model> Head<M> {
    fn new(mut rng: ChaCha8Rng, place: Place, center: Center, program: M::Program, model: M) -> Self {
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
            packed: (place.kv == KvType::TwoBit).then(NaivePacked::default),
        }
    }

    fn prefill(&mut self, m: usize) -> Result<(), String> {
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
        let seen = attention::visible(first + m - 1, place.model_window);
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

    fn step(&mut self) -> Result<(), String> {
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
        let set = StaticSet::at(t, place.model_window, place.sinks, place.window);
        let step = Step {
            step: self.steps,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: place.budget.positions(set.visible().len()),
            q_pre: q_pre.view(),
            q_rope: q_rope.view(),
            kv: &self.kv,
        };
        let choice = self.program.select(&step);
        let attended: Vec<u32> = (set.visible())
            .filter(|p| !set.candidates.contains(p) || choice.positions.contains(&(*p as u32)))
            .map(|p| p as u32)
            .collect();
        let weights = observed_weights(&step, &choice, &attended);
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
            choice,
            attended: attended.iter().map(|p| *p as usize).collect(),
        })));
        let checked = check_choice(&mut self.model, &self.history)?;
        self.sparse += usize::from(checked.is_some());
        self.near_ties += usize::from(checked == Some(Agreement::NearTie));
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
    let positions = &step.choice.positions;
    if !positions.windows(2).all(|w| w[0] < w[1]) {
        return Err(format!("not ascending: {positions:?}"));
    }
    let all: Vec<u32> = step.candidates.clone().map(|p| p as u32).collect();
    if step.is_exact() {
        let attending = step.choice.bypassed.iter().all(Option::is_none);
        return match *positions == all && attending {
            true => Ok(None),
            false => Err(format!("not everything: {:?}", step.choice)),
        };
    }
    if positions.len() > step.budget || !positions.iter().all(|p| all.contains(p)) {
        return Err(format!("{positions:?} of {:?}", step.candidates));
    }
    model.chose(history).map(Some)
}

/// The weights that the runner hands to a method: those of a bypassed head are zeros.
fn observed_weights(step: &Step, choice: &Choice, attended: &[u32]) -> Array2<f32> {
    let mut out = Array2::zeros(step.q_rope.dim());
    let (mut weights, _) = attention::decode_with_weights(
        step.q_rope,
        step.kv.keys(),
        step.kv.values(),
        attended,
        out.view_mut(),
    );
    for (a, own) in choice.bypassed.iter().enumerate() {
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
    near_ties: usize,
}

/// Runs `cases` random histories; `make` gives the program and its model, with the centre of the case.
fn cases<M: Model>(
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
        tally.near_ties += head.near_ties;
        done(&head.model);
    }
    let Tally { sparse, near_ties } = tally;
    println!("{sparse} sparse steps, {near_ties} near ties");
    assert!(
        sparse >= 2 * cases as usize,
        "{sparse} sparse steps in {cases} cases"
    );
    assert!(near_ties * 50 < sparse, "{near_ties} of {sparse} steps unchecked");
}

#[test]
fn streaming() {
    cases(200, |_, _, _| (Streaming, NaiveStreaming), |_| ());
}

#[test]
fn quest() {
    cases(500, |_, _, _| (Quest::default(), NaiveQuest), |_| ());
}

#[test]
fn snapkv() {
    cases(
        500,
        |_, place, _| (SnapKv::new(place.model_window), NaiveSnapKv),
        |_| (),
    );
}

#[test]
fn a2ats() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let m = rng.gen_range(1..40);
        let rotated_to = pick(rng, &[0, 100, 2048]);
        let model = random_codebook(place.head_dim, rotated_to, || noise(rng), m);
        let ranking = pick(rng, &[Ranking::Fast, Ranking::Plain]);
        (A2ats::new(model.head.clone(), None).ranking(ranking), model)
    };
    cases::<NaiveA2ats>(500, make, |_| ());
}

#[test]
fn selfindex() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, center: Center| {
        let source = pick(
            rng,
            &[
                CentroidSource::OnePass,
                CentroidSource::Offline,
                CentroidSource::Hybrid,
                CentroidSource::Signs,
            ],
        );
        let calibrated = matches!(source, CentroidSource::Offline | CentroidSource::Hybrid)
            .then(|| (0..place.head_dim * 16).map(|_| noise(rng)).collect::<Vec<f32>>());
        let ranking = pick(rng, &[Ranking::Fast, Ranking::Plain]);
        let program = SelfIndex::new(place, center, source, calibrated.clone()).ranking(ranking);
        (program, NaiveSelfIndex::new(center, source, calibrated))
    };
    cases(500, make, |_| ());
}

#[test]
fn lfps() {
    let (mut bypassed, mut attending) = (0, 0);
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let params = lfps::Params {
            lfps_rows: pick(rng, &[1, 5, 32]),
            lfps_alpha: pick(rng, &[None, Some(0.0), Some(0.5)]),
            lfps_theta: pick(rng, &[0.85, 0.85, 0.6, 1.0]),
            lfps_threshold: pick(rng, &[Threshold::Kurtosis, Threshold::MeanStd]),
            ..lfps::Params::default()
        };
        let program = lfps::Setup::new(&params, None).unwrap().head(place);
        (program, NaiveLfps::new(params))
    };
    cases(500, make, |model| {
        bypassed += model.bypassed;
        attending += model.attending;
    });
    println!("{bypassed} heads bypassed, {attending} attending");
    assert!(bypassed > 200 && attending > 1000, "{bypassed} {attending}");
}

#[test]
fn ctkvr() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let params = ctkvr::Params {
            ct_centroids: pick(rng, &[None, None, Some(1), Some(7), Some(40)]),
            ct_probes: pick(rng, &[1, 2, 4]),
            ct_update: pick(rng, &[1, 1, 3, 0]),
            ct_cap: pick(rng, &[0.1, 0.5, 1.0]),
            ct_list: pick(rng, &[2.5, 2.5, 1.0, 6.5]),
            ct_keep: pick(rng, &[false, false, true]),
            ..ctkvr::Params::default()
        };
        (Ctkvr::new(place, &params), NaiveCtkvr::new(params))
    };
    cases(500, make, |_| ());
}

/// A place for the tests that need a certain one.
fn place(group: usize, head_dim: usize, budget: Budget) -> Place {
    Place {
        layer: 0,
        kv_head: 0,
        group,
        head_dim,
        model_window: None,
        sinks: 4,
        window: 8,
        budget,
        kv: KvType::F32,
    }
}

/// A ctkvr head beside its model.
fn ctkvr_head(seed: u64, place: Place, params: ctkvr::Params) -> Head<NaiveCtkvr> {
    let program = Ctkvr::new(&place, &params);
    let rng = ChaCha8Rng::seed_from_u64(seed);
    Head::new(rng, place, Center::Median, program, NaiveCtkvr::new(params))
}

#[test]
fn ctkvr_ranks_what_left_the_window_for_256_steps() {
    // Generated tokens alone outnumber those that every query ranks.
    for update in [0, 1] {
        let params = ctkvr::Params {
            ct_update: update,
            ..ctkvr::Params::default()
        };
        let mut head = ctkvr_head(7, place(2, 8, Budget::Count(6)), params);
        head.prefill(20).unwrap();
        (0..300).for_each(|_| head.step().unwrap());
        let last = head.history.step();
        assert!(last.candidates.len() > 270 && last.choice.ranked_rows < 256 + 4 * 15);
        assert_eq!(head.near_ties, 0);
    }
}

#[test]
fn ctkvr_recalls_everything_where_its_lists_hold_everything() {
    let params = ctkvr::Params {
        ct_centroids: Some(40),
        ct_probes: 40,
        ct_update: 1,
        ct_cap: 1.0,
        ..ctkvr::Params::default()
    };
    // rho = 2.5 * 0.4 n = n.
    let mut head = ctkvr_head(8, place(1, 64, Budget::Fraction(0.4)), params);
    head.prefill(100).unwrap();
    for _ in 0..50 {
        head.step().unwrap();
        let step = head.history.step();
        let ranked = step.choice.ranked_rows + step.choice.positions.len();
        assert_eq!(ranked, step.candidates.len());
        assert_eq!(head.program.len(), 40, "the oldest makes room for the newest");
    }
}

#[test]
fn centring_the_keys_changes_no_attention() {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    for center in [Center::Median, Center::Mean] {
        let (n, r, d) = (150, 3, 64);
        let mut random =
            |rows: usize, shift: f32| Array2::from_shape_simple_fn((rows, d), || noise(&mut rng) + shift);
        let (queries, keys, values) = (random(r, 0.0), random(n, 2.0), random(n, 0.0));
        let centred = &keys - &ndarray::Array1::from(center.of_channels(keys.view()));
        let positions: Vec<u32> = (0..n as u32).collect();
        let attended = |keys: &Array2<f32>| {
            let store = |rows: &Array2<f32>| {
                let mut store = RowStore::new(Float::F32, d, n);
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
        for (a, b) in attended(&keys).iter().zip(attended(&centred)) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }
}

#[test]
fn what_half_precision_cannot_hold_saturates() {
    let (n, d) = (90, 40);
    let mut rng = ChaCha8Rng::seed_from_u64(10);
    let mut random = |scale: f32| Array2::from_shape_simple_fn((n, d), || scale * noise(&mut rng));
    for scale in [1e-6, 1.0, 1e5, 1e9] {
        let (keys, values) = (random(scale), random(scale));
        let query = random(1.0).row(0).to_vec();
        let mut kv = KvHead::new(KvType::TwoBit, d, n, Center::Median);
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

#[test]
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

#[test]
fn golden_a2ats_budget_per_query_head() {
    // Every query head has a codeword of its own, which a quarter of the keys has.
    let (d, n) = (4, 1000);
    let eye = Array2::<f32>::eye(d);
    let config = kvsmith::model::rope::RopeConfig {
        theta: 1e4,
        scaling: kvsmith::model::rope::RopeScaling::Default,
    };
    let rope = kvsmith::model::rope::Rope::new(&config, d);
    let head = HeadCodebook::new(eye.clone(), ndarray::Array1::zeros(d), eye.clone(), &rope, 0).unwrap();
    let mut a2ats = A2ats::new(std::sync::Arc::new(head), Some(0.03));
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

#[test]
fn golden_bits_of_the_two_bit_cache() {
    for (d, bits) in [(128, 896), (64, 448)] {
        assert_eq!(8 * KvType::TwoBit.bytes_per_position(d), bits);
    }
}

#[test]
fn golden_bytes_of_ctkvr_lists() {
    let (n, m, d) = (2700, 512, 256);
    let place = place(1, d, Budget::Count(1024));
    let params = ctkvr::Params {
        ct_centroids: Some(512),
        ct_cap: 1.0,
        ..ctkvr::Params::default()
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
    assert_eq!(ctkvr.len(), 512);
    let full = ctkvr.lists().last().unwrap().len();
    assert_eq!((ctkvr.list_len(n), full), (2560, 2560));
    assert_eq!(512 * 2560 * size_of::<u32>(), 5_242_880);
    // The first queries see fewer positions than a list may hold; each centroid has 2 d bytes besides.
    let lists: usize = ctkvr.lists().map(|l| 4 * l.len()).sum();
    assert!(lists <= 5_242_880 && ctkvr.state_bytes() >= lists + 512 * 2 * d);
}
