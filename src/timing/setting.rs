//! What decode steps of one layer with random data are made with.

use ndarray::Array2;

use crate::kv::{KvHead, KvType, Limits, Shape, StaticSet};
use crate::method::bench::{Bench, BenchParams, TimedLayer};
use crate::method::registry::MethodName;
use crate::method::{Ranking, Reads, Selection, Step};

/// Least bytes of all copies of a layer's data, which steps read in turn; the processor's caches hold less.
pub const ROTATED_BYTES: usize = 256 << 20;

/// One combination of shape, caches and method.
#[derive(Clone)]
pub struct LayerSetting {
    /// The static set, and how many positions a step may choose.
    pub limits: Limits,
    /// Type of the cache.
    pub kv: KvType,
    /// Parameters of the index.
    pub params: BenchParams,
    /// The layer.
    pub layer: TimedLayer,
    /// The method.
    pub method: MethodName,
    /// Its benchmark.
    pub bench: &'static dyn Bench,
    /// Whether the chosen positions are attended too.
    pub attends: bool,
}

impl LayerSetting {
    /// Returns the steps of one method that choose and attend.
    pub fn attending(
        (limits, kv): (Limits, KvType),
        params: BenchParams,
        layer: TimedLayer,
        method: MethodName,
        bench: &'static dyn Bench,
    ) -> Self {
        Self {
            limits,
            kv,
            params,
            layer,
            method,
            bench,
            attends: true,
        }
    }

    /// Returns the static set of the last position.
    pub fn static_set(&self) -> StaticSet {
        self.limits.static_set(self.layer.context() - 1)
    }

    /// Describes step number `step` of a head; the queries serve in turn.
    pub fn step<'s>(
        &self,
        set: &StaticSet,
        step: usize,
        queries: &'s [Array2<f32>],
        kv: &'s KvHead,
    ) -> Step<'s> {
        let query = &queries[step % queries.len()];
        Step {
            step,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: self.budget(),
            q_pre: query.view(),
            q_rope: query.view(),
            kv,
        }
    }

    /// Counts the positions that a step may choose.
    pub fn budget(&self) -> usize {
        self.limits.budget.positions(self.layer.context())
    }

    /// Tells whether a step reads cached rows.
    pub fn holds_rows(&self) -> bool {
        self.attends || self.bench.reads_rows(self.kv)
    }

    /// Counts the bytes of a cached key.
    pub fn key_bytes(&self) -> usize {
        self.cached().bytes_per_key(self.layer.shape.head_dim)
    }

    /// Returns the formats that rows have in this context.
    pub fn cached(&self) -> KvType {
        self.kv.in_context(self.layer.context(), self.static_set().len())
    }

    /// Counts the bytes of a cached key and value.
    pub fn position_bytes(&self) -> usize {
        self.cached().bytes_per_position(self.layer.shape.head_dim)
    }

    /// Counts the bytes of all keys and values of one layer.
    pub fn visible_bytes(&self) -> usize {
        self.position_bytes() * self.layer.shape.heads() * self.layer.context()
    }

    /// Counts the bytes of the cached rows of one layer; 0 if none is read.
    pub fn row_bytes(&self) -> usize {
        if self.holds_rows() {
            self.visible_bytes()
        } else {
            0
        }
    }

    /// Counts the bytes of the layer's index that a step on a GPU reads.
    fn index_bytes(&self) -> usize {
        self.bench.index_bytes(&self.layer, &self.params)
    }

    /// Counts the bytes of one copy of the layer's data: cached rows, and the index that a step on a GPU reads.
    pub fn copy_bytes(&self) -> usize {
        self.row_bytes() + self.index_bytes()
    }

    /// Counts the copies of the layer's data that together exceed the processor's caches.
    pub fn copies(&self) -> usize {
        ROTATED_BYTES.div_ceil(self.copy_bytes().max(1)).clamp(2, 64)
    }

    /// Counts the bytes of all copies and of the prompts' queries, which one thread per core draws; as an f64, in which
    /// no product overflows. The flags' limits keep all other sizes below 2^64.
    pub fn bytes(&self) -> f64 {
        let queries = self.layer.shape.group * self.bench.prompt_queries(&self.layer, &self.params);
        let drawn = 4.0 * (queries * self.layer.shape.head_dim * rayon::current_num_threads()) as f64;
        self.copies() as f64 * self.copy_bytes() as f64 + drawn
    }

    /// Counts the bytes that a step of one KV head reads on the CPU: the index, the keys that are ranked, and
    /// each row that is attended once.
    pub fn read_bytes(&self, reads: &Reads, selection: &Selection) -> usize {
        let (ranked, attended) = if self.attends {
            (
                reads.unattended_keys,
                self.static_set().len() + selection.positions.len(),
            )
        } else {
            (reads.keys, 0)
        };
        let whole = selection.whole.as_ref().unwrap_or(&selection.positions);
        let upper = if self.attends {
            selection.positions.len() - whole.len()
        } else {
            0
        };
        let rows =
            self.position_bytes() * attended - self.cached().lower_bytes(self.layer.shape.head_dim) * upper;
        reads.index_bytes.unwrap_or(0) + self.key_bytes() * ranked + rows
    }

    /// Counts the bytes that a step on a GPU has to move: the index, and each row that is attended once.
    pub fn moved_bytes(&self) -> usize {
        let set = self.static_set();
        let attended = if self.bench.retrieves() {
            set.len() + self.budget().min(set.candidates.len())
        } else {
            self.layer.context()
        };
        self.index_bytes() + self.row_bytes() / self.layer.context() * attended
    }

    /// Names what is timed.
    pub fn name(&self) -> String {
        let what = if self.attends { "attend" } else { "retrieve" };
        let how = match self.layer.ranking {
            Ranking::Fast => "",
            Ranking::Plain => ", plain ranking",
        };
        format!("{what} {}{how}", self.method.as_str())
    }

    /// Describes the sizes.
    pub fn shape(&self) -> String {
        let Shape {
            sequences: b,
            kv_heads: g,
            group: r,
            head_dim: d,
            capacity: n,
        } = self.layer.shape;
        let (kv, budget) = (self.kv, self.limits.budget.value());
        let h = r * g;
        format!("batch {b}, {h}/{g} heads x {d}, {n} positions, {kv}, budget {budget}")
    }
}
