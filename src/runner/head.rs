//! One KV head: caches the rows of prompts and tokens, and attends what its method chooses.

use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use crate::compute::attention::{self, Partial};
use crate::kv::packed::last_query;
use crate::kv::{Budget, KvHead, KvType, Part, Qkv, Rotated, RotatedQkv, StaticSet};
use crate::method::tail::Tail;
use crate::method::{Method, Place, Prompt, Reads, Retriever, Selection, Step};
use crate::model::forward::{PromptRows, Rows};
use crate::runner::shares::{Counts, add_rows};

/// One KV head along one trajectory.
pub(super) struct Head {
    pub kv: KvHead,
    pub chooser: Chooser,
}

/// What a method keeps for one KV head: its index, and the tail if steps estimate what they leave out.
pub(super) struct Chooser {
    pub retriever: Box<dyn Retriever>,
    pub tail: Option<Tail>,
    /// How many positions a step may choose.
    pub budget: Budget,
}

impl Chooser {
    /// Makes the empty state of a head.
    pub fn new(method: &dyn Method, place: Place) -> Self {
        Self {
            retriever: method.head(&place),
            tail: method.tail(&place),
            budget: place.limits.budget,
        }
    }

    /// Returns a copy for a new trajectory.
    pub fn fork(&self) -> Self {
        Self {
            retriever: self.retriever.fork(),
            tail: self.tail.clone(),
            budget: self.budget,
        }
    }

    /// Restarts the sums of the tail, if there is one, with what the last position of a prompt sees.
    pub fn restart_tail(&mut self, kv: &KvHead, model_window: Option<usize>) {
        if let Some(tail) = &mut self.tail {
            tail.restart(kv, attention::visible(kv.len() - 1, model_window));
        }
    }
}

impl Head {
    /// Feeds one token and writes the attention output, `[r,d]`. `granule` is how many bytes the memory moves at once.
    pub fn step(
        &mut self,
        token: &Token,
        step: usize,
        set: &StaticSet,
        granule: usize,
        out: ArrayViewMut2<f32>,
    ) -> Stepped {
        token.cache(&mut self.kv);
        let step = token.step(step, set, self.chooser.budget, &self.kv);
        let mut reads = Reads::new(granule);
        let selection = decode_head(token, &step, set, &mut self.chooser, out, &mut reads);
        let (r, d) = step.q_rope.dim();
        let kv = self.kv.kind();
        add_rows(&mut reads, &selection, set, r, kv, d);
        Stepped {
            selection,
            reads,
            kv,
            head_dim: d,
        }
    }
}

/// What a KV head did in a step.
pub(super) struct Stepped {
    pub selection: Selection,
    pub reads: Reads,
    /// The formats of its rows.
    kv: KvType,
    head_dim: usize,
}

impl Stepped {
    /// Adds the selection, for `group` query heads, and what was read for it.
    pub fn count(&self, counts: &mut Counts, set: &StaticSet, group: usize) {
        counts.add(&self.selection, &self.reads, set, group, self.kv, self.head_dim);
    }
}

/// Adds a prompt's rows of one layer to its heads; returns what the prompt attends.
pub(super) fn prefill_heads(
    mut heads: Vec<&mut Head>,
    rows: PromptRows,
    model_window: Option<usize>,
) -> PromptRows {
    let caches: Vec<&KvHead> = heads.iter().map(|head| &head.kv).collect();
    let rows = rows.join(&caches);
    heads.par_iter_mut().enumerate().for_each(|(c, head)| {
        cache_prompt(&rows, c, model_window, &mut head.kv);
        head.chooser.retriever.prefill(&prompt(&rows, c, &head.kv));
        head.chooser.restart_tail(&head.kv, model_window);
    });
    rows
}

/// Appends the new rows of KV head `c` to its cache; `rows` are joined with those that it has.
pub(super) fn cache_prompt(rows: &PromptRows, c: usize, model_window: Option<usize>, kv: &mut KvHead) {
    let (keys, values) = rows.attended(c);
    let seen = attention::visible(keys.nrows() - 1, model_window);
    kv.prompt(keys, values, &last_query(rows.queries(c)), seen);
}

/// Returns the prompt of KV head `c` as methods see it; the cache already holds its rows.
pub(super) fn prompt<'a>(rows: &'a PromptRows, c: usize, kv: &'a KvHead) -> Prompt<'a> {
    let (keys, values) = rows.attended(c);
    let k_pre = rows.k.pre.index_axis(Axis(0), c);
    Prompt {
        first: keys.nrows() - k_pre.nrows(),
        k_pre,
        q_rope: rows.queries(c),
        keys,
        values,
        kv,
    }
}

/// One token's rows of one KV head: queries `[r,d]`, key and value `[1,d]`.
pub(super) type Token<'a> = RotatedQkv<ArrayView2<'a, f32>>;

impl<'a> Token<'a> {
    /// Takes the rows of KV head `c` with its `r` query heads from one trajectory.
    pub fn from_rows(rows: &'a Rows, c: usize, r: usize, trajectory: usize) -> Self {
        let own = s![c, trajectory..trajectory + 1, ..];
        let group = s![c * r..(c + 1) * r, trajectory, ..];
        Qkv {
            q: Rotated {
                pre: rows.q.pre.slice(group),
                rope: rows.q.rope.slice(group),
            },
            k: Rotated {
                pre: rows.k.pre.slice(own),
                rope: rows.k.rope.slice(own),
            },
            v: rows.v.slice(own),
        }
    }

    /// Appends the key and the value to a cache.
    pub fn cache(&self, kv: &mut KvHead) {
        kv.extend(self.k.rope.view(), self.v.view());
    }

    /// Describes the step to a method; the cache already holds the token.
    pub fn step<'b>(&'b self, step: usize, set: &StaticSet, budget: Budget, kv: &'b KvHead) -> Step<'b> {
        Step {
            step,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: budget.positions(set.visible().len()),
            q_pre: self.q.pre.view(),
            q_rope: self.q.rope.view(),
            kv,
        }
    }
}

/// Runs one decode step of one KV head: the method records the key, chooses, and sees what was attended; then the tail
/// is joined. Returns the selection, and adds what was read besides the rows attended.
pub(super) fn decode_head(
    token: &Token,
    step: &Step,
    set: &StaticSet,
    chooser: &mut Chooser,
    mut out: ArrayViewMut2<f32>,
    reads: &mut Reads,
) -> Selection {
    let retriever = chooser.retriever.as_mut();
    retriever.append(token.k.pre.view(), token.k.rope.view());
    let mut selection = retriever.select(step);
    let is_choice = selection.positions.len() < step.candidates.len();
    if chooser.tail.is_some() {
        // The tail reads all rows that are attended.
        selection.whole = None;
    } else if is_choice
        && selection.whole.is_none()
        && selection.products == 0
        && step.whole_rows() == Some(0)
    {
        // No row is to be read whole, though the method estimates no attention. If it has read keys to rank them, they were.
        selection.whole = Some(Vec::new());
    }
    if retriever.ranks(step) {
        retriever.reads(step, &selection, reads);
    }
    let lse = attend(step, set, &selection, retriever, out.view_mut());
    if let Some(tail) = &mut chooser.tail {
        join_tail(tail, step, &set.merge(&selection.positions), &lse, out, reads);
    }
    selection
}

/// Joins the outputs `[r,d]` of a step, which attended some of the positions, with the estimate of the others; `lse` is
/// what [`attend`] returns. Adds what was read for the estimate.
fn join_tail(
    tail: &mut Tail,
    step: &Step,
    attended: &[u32],
    lse: &[Option<f32>],
    mut out: ArrayViewMut2<f32>,
    reads: &mut Reads,
) {
    if lse.iter().all(Option::is_none) {
        return;
    }
    let Some(partials) = tail.estimate(step, attended, reads) else {
        return;
    };
    for ((partial, lse), mut row) in partials.iter().zip(lse).zip(out.rows_mut()) {
        if let (Some(partial), Some(lse)) = (partial, lse) {
            join(&mut row, *lse, partial);
        }
    }
}

/// Joins an attention output `row`, whose log-sum-exp is `lse`, with a partial result over other positions.
fn join(row: &mut ArrayViewMut1<f32>, lse: f32, other: &Partial) {
    let mut joined = row.to_vec();
    attention::merge(&mut joined, lse, other);
    row.assign(&ArrayView1::from(&joined));
}

/// Attends the static set and the chosen positions, and writes the output, `[r,d]`. Bypassed heads attend the sinks
/// alone, joined with the partial result of their method. Returns the log-sum-exp of each query head's scores, `[r]`;
/// `None` for a bypassed head.
pub(crate) fn attend(
    step: &Step,
    set: &StaticSet,
    selection: &Selection,
    retriever: &mut dyn Retriever,
    mut out: ArrayViewMut2<f32>,
) -> Vec<Option<f32>> {
    let positions = set.merge(&selection.positions);
    let whole = selection.whole.as_ref().map(|whole| set.merge(whole));
    let in_layers = |part| whole.as_ref().and_then(|whole| step.kv.in_layers(part, whole));
    let (keys, values) = (in_layers(Part::Keys), in_layers(Part::Values));
    let keys = keys.as_deref().unwrap_or(step.kv.keys());
    let values = values.as_deref().unwrap_or(step.kv.values());
    let own = |a: usize| selection.bypassed.get(a).and_then(Option::as_ref);
    let (r, d) = step.q_rope.dim();
    let attending: Vec<usize> = (0..r).filter(|a| own(*a).is_none()).collect();
    if attending.len() == r && !retriever.observes(step) {
        let lse = attention::decode(step.q_rope, keys, values, &positions, out);
        return lse.into_iter().map(Some).collect();
    }
    if attending.len() == r {
        let (weights, lse) = attention::decode_with_weights(step.q_rope, keys, values, &positions, out);
        retriever.observe(step, &positions, weights.view());
        return lse.into_iter().map(Some).collect();
    }
    let mut weights = Array2::zeros((r, positions.len()));
    let mut rows = Array2::zeros((attending.len(), d));
    let queries = step.q_rope.select(Axis(0), &attending);
    // If no head attends the positions, their rows are not read.
    let read = if attending.is_empty() { &[] } else { &positions[..] };
    let (seen, sums) = attention::decode_with_weights(queries.view(), keys, values, read, rows.view_mut());
    let mut lse = vec![None; r];
    for (i, &a) in attending.iter().enumerate() {
        out.row_mut(a).assign(&rows.row(i));
        weights.row_mut(a).assign(&seen.row(i));
        lse[a] = Some(sums[i]);
    }
    let sinks: Vec<u32> = set.sinks.clone().map(|p| p as u32).collect();
    for a in 0..r {
        if let Some(rest) = own(a) {
            let mut row = out.slice_mut(s![a..a + 1, ..]);
            let query = step.q_rope.slice(s![a..a + 1, ..]);
            let lse = attention::decode(query, keys, values, &sinks, row.view_mut());
            join(&mut row.row_mut(0), lse[0], rest);
        }
    }
    retriever.observe(step, &positions, weights.view());
    lse
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::packed::Center;
    use crate::kv::{KvType, RowFormat};
    use crate::testing::values;

    /// A method that records what it is told.
    #[derive(Clone)]
    struct Witness {
        observes: bool,
        told: Vec<(Vec<u32>, Array2<f32>)>,
    }

    impl Witness {
        fn new(observes: bool) -> Self {
            let told = Vec::new();
            Self { observes, told }
        }
    }

    impl Retriever for Witness {
        fn select(&mut self, _: &Step) -> Selection {
            Selection::default()
        }

        fn observes(&self, _: &Step) -> bool {
            self.observes
        }

        fn observe(&mut self, _: &Step, positions: &[u32], weights: ArrayView2<f32>) {
            self.told.push((positions.to_vec(), weights.to_owned()));
        }
    }

    /// Chosen rows in layers are read whole where the method says so; the static set always is.
    #[test]
    fn a_step_reads_one_layer_of_other_rows() {
        let (n, r, d) = (400, 3, 32);
        let of = |rows: usize, seed| Array2::from_shape_vec((rows, d), values(rows * d, seed)).unwrap();
        let kind = KvType::both(RowFormat::INT4_4);
        let mut kv = KvHead::new(kind, d, n, Center::Median);
        kv.extend(of(n, 1).view(), of(n, 2).view());
        // A set with more rows than the cache keeps in bf16.
        let (q, set) = (of(r, 3), StaticSet::at(n - 1, None, 6, 80));
        let step = Step {
            step: 0,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: 9,
            q_pre: q.view(),
            q_rope: q.view(),
            kv: &kv,
        };
        assert_eq!(step.whole_rows(), Some(3));
        let chosen = vec![10, 20, 150, 200];
        let run = |whole: Option<Vec<u32>>| {
            let mut witness = Witness::new(false);
            let selection = Selection {
                positions: chosen.clone(),
                whole,
                ..Selection::default()
            };
            let mut out = Array2::zeros((r, d));
            attend(&step, &set, &selection, &mut witness, out.view_mut());
            out
        };
        let expected = |whole: &[u32]| {
            let whole = set.merge(whole);
            let rows = |part| kv.in_layers(part, &whole).unwrap();
            let mut out = Array2::zeros((r, d));
            let positions = set.merge(&chosen);
            let (keys, values) = (rows(Part::Keys), rows(Part::Values));
            attention::decode(
                q.view(),
                keys.as_ref(),
                values.as_ref(),
                &positions,
                out.view_mut(),
            );
            out
        };
        let all = run(None);
        assert_eq!(all, expected(&chosen));
        assert_eq!(run(Some(vec![20, 200])), expected(&[20, 200]));
        assert_eq!(run(Some(Vec::new())), expected(&[]));
        assert!(all != expected(&[20, 200]) && expected(&[]) != expected(&[20, 200]));
    }

    #[test]
    fn a_method_is_told_what_was_attended_where_it_asks() {
        let (n, r, d) = (40, 3, 16);
        let of = |rows: usize, seed| Array2::from_shape_vec((rows, d), values(rows * d, seed)).unwrap();
        let mut kv = KvHead::new(KvType::F32, d, n, Center::Median);
        kv.extend(of(n, 1).view(), of(n, 2).view());
        let (q, set) = (of(r, 3), StaticSet::at(n - 1, None, 4, 8));
        let step = Step {
            step: 0,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: 2,
            q_pre: q.view(),
            q_rope: q.view(),
            kv: &kv,
        };
        let run = |observes: bool, bypassed: Vec<Option<Partial>>| {
            let mut witness = Witness::new(observes);
            let selection = Selection {
                positions: vec![10, 20],
                bypassed,
                ..Selection::default()
            };
            let mut out = Array2::zeros((r, d));
            attend(&step, &set, &selection, &mut witness, out.view_mut());
            (out, witness.told)
        };
        let positions = set.merge(&[10, 20]);
        let (plain, told) = run(false, Vec::new());
        assert!(told.is_empty() && plain.iter().all(|x| *x != 0.0));
        let (out, told) = run(true, Vec::new());
        assert_eq!(out, plain);
        let [(attended, weights)] = &told[..] else {
            panic!("told {} times", told.len())
        };
        assert_eq!((attended, weights.dim()), (&positions, (r, positions.len())));
        assert!(
            weights
                .rows()
                .into_iter()
                .all(|row| (row.sum() - 1.0).abs() < 1e-6)
        );
        // A bypassed head attended the sinks alone, and its method is not told of that.
        let rest = Partial {
            output: vec![0.5; d],
            lse: 0.0,
        };
        let (out, told) = run(true, vec![None, Some(rest), None]);
        let seen = &told[0].1;
        assert_eq!((seen.row(0), seen.row(2)), (weights.row(0), weights.row(2)));
        assert!(seen.row(1).iter().all(|w| *w == 0.0));
        assert_eq!((out.row(0), out.row(2)), (plain.row(0), plain.row(2)));
        assert_ne!(out.row(1), plain.row(1));
    }
}
