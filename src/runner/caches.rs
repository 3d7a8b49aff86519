//! The caches and indexes of one sequence on the CPU, and a decode step of several sequences.

use ndarray::{Array1, ArrayViewMut3, Axis};

use super::head::{Chooser, Head, Stepped, Token, prefill_heads};
use super::options::DecodeOptions;
use super::session::StepAt;
use super::shares::{Counts, Shares};
use super::trace::Trace;

use crate::compute::team;
use crate::error::Result;
use crate::kv::{Budget, KvHead, KvType, StaticSet};
use crate::method::full::Full;
use crate::method::{Method, Retriever};
use crate::model::ModelConfig;
use crate::model::forward::{Forward, Rows};

/// A KV head whose cache is filled already.
pub struct FilledHead {
    /// The cache.
    pub kv: KvHead,
    /// The index of its rows.
    pub retriever: Box<dyn Retriever>,
    /// How many positions a step may choose.
    pub budget: Budget,
}

/// The caches and indexes of every KV head of one sequence, and what its decode steps read.
pub(super) struct Caches {
    /// The KV heads of each layer.
    heads: Vec<Vec<Head>>,
    /// The shares of each decode step, averaged over layers and summed over steps.
    shares: Shares,
    /// What was read, per layer.
    pub counts: Vec<Counts>,
}

impl Caches {
    /// Makes empty caches with space for `capacity` positions; they grow beyond it.
    pub fn new(c: &ModelConfig, method: &dyn Method, options: &DecodeOptions, capacity: usize) -> Self {
        let head = |layer: usize, kv_head: usize| {
            let place = options.place(c, method, layer, kv_head);
            Head {
                kv: options.cache(place.kv, c.head_dim, capacity, [layer, kv_head]),
                chooser: Chooser::new(method, place),
            }
        };
        let layer = |layer: usize| (0..c.n_kv_heads).map(|kv_head| head(layer, kv_head)).collect();
        Self::from_heads((0..c.n_layers()).map(layer).collect())
    }

    /// Takes caches and indexes that are filled already, by layer and KV head.
    pub fn filled(heads: Vec<Vec<FilledHead>>) -> Self {
        let head = |of: FilledHead| Head {
            kv: of.kv,
            chooser: Chooser {
                retriever: of.retriever,
                tail: None,
                budget: of.budget,
            },
        };
        let heads = heads.into_iter();
        Self::from_heads(heads.map(|layer| layer.into_iter().map(head).collect()).collect())
    }

    fn from_heads(heads: Vec<Vec<Head>>) -> Self {
        Self {
            counts: vec![Counts::NONE; heads.len()],
            heads,
            shares: Shares::default(),
        }
    }

    /// Runs a prompt with exact attention; returns the logits after its last token, `[vocab]`.
    ///
    /// # Errors
    /// As [`Forward::prompt`].
    pub fn prompt(
        &mut self,
        forward: &dyn Forward,
        ids: &[u32],
        first: usize,
        done: &mut dyn FnMut(usize),
    ) -> Result<Array1<f32>> {
        let blocks = &forward.decoder().config.blocks;
        let heads = &mut self.heads;
        let cache = &mut |layer: usize, rows| {
            prefill_heads(heads[layer].iter_mut().collect(), rows, blocks[layer].window)
        };
        forward.prompt(ids, first, cache, done)
    }

    /// Returns whether forks of these caches share their rows.
    pub fn shares_rows(&self) -> bool {
        let heads = self.heads.iter().flatten();
        heads.map(|head| head.kv.kind()).all(KvType::shares_rows)
    }

    /// Returns caches that share the rows of these, for a step that attends everything and leaves these as they are.
    pub fn in_full(&mut self) -> Self {
        let in_full = |head: &mut Head| Head {
            kv: head.kv.fork(),
            chooser: Chooser {
                retriever: Box::new(Full),
                tail: None,
                budget: head.chooser.budget,
            },
        };
        let layers = self.heads.iter_mut();
        Self::from_heads(
            layers
                .map(|heads| heads.iter_mut().map(in_full).collect())
                .collect(),
        )
    }

    /// Returns the means over `steps` decode steps and all layers.
    pub fn mean_shares(&self, steps: usize) -> Shares {
        self.shares.mean(steps)
    }

    /// Counts the bytes held for keys and values.
    pub fn kv_bytes(&self) -> usize {
        self.heads.iter().flatten().map(|head| head.kv.bytes()).sum()
    }

    /// Counts the bytes held for the method's indexes.
    pub fn index_bytes(&self) -> usize {
        let heads = self.heads.iter().flatten();
        heads.map(|head| head.chooser.retriever.state_bytes()).sum()
    }
}

/// A token that a sequence is fed in a decode step.
pub(super) struct Fed<'a> {
    pub id: u32,
    pub at: StepAt,
    pub caches: &'a mut Caches,
}

/// Runs one decode step of several sequences: each is fed its token. Returns the logits after each, `[vocab]`. What each KV head
/// chose goes to `trace`.
///
/// # Errors
/// As [`Forward::prompt`]; a trace that cannot be written. The caches of all sequences are then in no defined state.
pub(super) fn step(
    forward: &dyn Forward,
    options: &DecodeOptions,
    fed: &mut [Fed],
    mut trace: Option<&mut Trace<'_>>,
) -> Result<Vec<Array1<f32>>> {
    let blocks = &forward.decoder().config.blocks;
    let ids: Vec<u32> = fed.iter().map(|fed| fed.id).collect();
    let positions: Vec<usize> = fed.iter().map(|fed| fed.at.position).collect();
    let mut shares = vec![Shares::default(); fed.len()];
    let attend = &mut |index: usize, rows: &Rows, out: ArrayViewMut3<f32>| {
        let set = |position: &usize| {
            options
                .limits
                .in_layer(blocks[index].window)
                .static_set(*position)
        };
        let sets: Vec<StaticSet> = positions.iter().map(set).collect();
        let stepped = step_layer(fed, index, rows, &sets, options, out);
        let sequences = fed.iter_mut().zip(&sets).zip(&mut shares);
        for (((fed, set), shares), stepped) in sequences.zip(stepped) {
            let r = rows.q.rope.len_of(Axis(0)) / stepped.len();
            let chosen = stepped.iter().map(|stepped| &stepped.selection);
            shares.add_layer(chosen.clone(), set, r);
            let counts = &mut fed.caches.counts[index];
            stepped.iter().for_each(|stepped| stepped.count(counts, set, r));
            if let Some(trace) = trace.as_deref_mut() {
                trace.layer(fed.at.step, index, chosen.map(|choice| &choice.positions))?;
            }
        }
        Ok(())
    };
    let logits = team::through(|| forward.step(&ids, &positions, attend))?;
    for (fed, shares) in fed.iter_mut().zip(&shares) {
        let layers = fed.caches.heads.len();
        fed.caches.shares.add_step(shares, layers);
    }
    Ok(logits)
}

/// Runs a step of a layer's KV heads of all sequences and writes the attention's output, `[sequences,h,d]`; returns what each
/// head of each sequence chose and read.
fn step_layer(
    fed: &mut [Fed],
    index: usize,
    rows: &Rows,
    sets: &[StaticSet],
    options: &DecodeOptions,
    mut out: ArrayViewMut3<f32>,
) -> Vec<Vec<Stepped>> {
    let (mut tasks, mut counts) = (Vec::new(), Vec::with_capacity(fed.len()));
    for (i, (fed, out)) in fed.iter_mut().zip(out.outer_iter_mut()).enumerate() {
        let heads = &mut fed.caches.heads[index];
        counts.push(heads.len());
        let r = rows.q.rope.len_of(Axis(0)) / heads.len();
        // The outputs of a sequence's heads are in one piece, so that each task can take its own.
        let mut rest = out;
        for (c, head) in heads.iter_mut().enumerate() {
            let (own, others) = rest.split_at(Axis(0), r);
            tasks.push((i, c, r, fed.at.step, head, own));
            rest = others;
        }
    }
    let stepped = team::map(tasks, |(i, c, r, step, head, out)| {
        head.step(
            &Token::from_rows(rows, c, r, i),
            step,
            &sets[i],
            options.granule,
            out,
        )
    });
    let mut stepped = stepped.into_iter();
    counts
        .into_iter()
        .map(|n| stepped.by_ref().take(n).collect())
        .collect()
}
