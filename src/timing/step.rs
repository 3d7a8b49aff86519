//! A decode step of one layer on the CPU, with random data.

use std::time::Instant;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde_json::{Value, json};

use super::head::BenchHead;
use super::setting::{LayerSetting, ROTATED_BYTES};
use super::{median, seconds};
use crate::compute::attention::AHEAD;
use crate::error::Result;
use crate::kv::Shape;
use crate::kv::lines::AlignedVec;
use crate::method::{CPU_GRANULE, Reads, Selection};
use crate::prefetch::prefetch_later;
use crate::runner::{Counts, add_rows, attend};

/// A scattered read takes one in this many rows.
const APART: usize = 16;

/// Measures a loop that only reads, on all threads, in GB/s.
pub fn bandwidth(runs: usize) -> f64 {
    let values = numbers(ROTATED_BYTES / 8);
    let read = || {
        let parts = values.par_chunks(1 << 16);
        let sums = parts.map(|part| part.iter().fold(0, |a, b| a ^ b));
        std::hint::black_box(sums.reduce(|| 0, |a, b| a ^ b));
    };
    let times = (0..runs.clamp(3, 50)).map(|_| seconds(read)).collect();
    ROTATED_BYTES as f64 / median(times) * 1e-9
}

/// Makes numbers in the same kind of memory as caches.
fn numbers(n: usize) -> AlignedVec<u64> {
    let mut values = AlignedVec::with_capacity(n);
    values.extend((0..n).map(|i| i as u64));
    values
}

/// Measures a loop that reads scattered rows of `bytes`, one in 16, on all threads, in GB/s. Every row is read
/// before any is read again, so that none is still in the processor's caches.
pub fn scattered(bytes: usize, runs: usize) -> f64 {
    let width = bytes / 8;
    let values = numbers(ROTATED_BYTES / 8);
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut parts = vec![Vec::new(); APART];
    for i in 0..(values.len() / width) as u32 {
        parts[rng.r#gen::<usize>() % APART].push(i);
    }
    let row = |i: u32| &values[i as usize * width..][..width];
    let sum = |part: &[u32]| {
        let coming = part.iter().skip(AHEAD).map(Some).chain(std::iter::repeat(None));
        part.iter().zip(coming).fold(0, |sum, (i, coming)| {
            if let Some(i) = coming {
                prefetch_later(row(*i));
            }
            row(*i).iter().fold(sum, |a, b| a ^ b)
        })
    };
    let rate = |rows: &Vec<u32>| {
        let time = seconds(|| {
            let sums = rows.par_chunks(1 << 10).map(sum);
            std::hint::black_box(sums.reduce(|| 0, |a, b| a ^ b));
        });
        (rows.len() * bytes) as f64 / time * 1e-9
    };
    let timed = parts.iter().cycle().take(runs.clamp(APART, 50));
    median(timed.map(rate).collect())
}

/// Decode steps of one layer.
pub struct CpuSteps<'a> {
    setting: &'a LayerSetting,
    /// Copies of a layer's heads.
    copies: Vec<Vec<BenchHead>>,
    /// Steps so far.
    steps: usize,
    /// Bytes that the last step read.
    pub bytes: usize,
    /// Counts of what the last step read, without the keys that the oracle reads.
    counts: Counts,
    /// Number of exact scores that the last step's retrieval computed.
    scored: usize,
}

impl<'a> CpuSteps<'a> {
    /// Prepares the steps of a setting.
    pub fn new(setting: &'a LayerSetting) -> Result<Self> {
        let new = setting.bench.heads(&setting.layer, &setting.params)?;
        let shape = setting.layer.shape;
        let seed = |i: usize| setting.layer.seed.wrapping_add(i as u64);
        let heads = (0..shape.heads()).into_par_iter();
        let heads = heads.map(|i| BenchHead::new(setting, &new, i % shape.kv_heads, seed(i)));
        let mut copies = vec![heads.collect::<Result<Vec<_>>>()?];
        for _ in 1..setting.copies() {
            copies.push(copies[0].par_iter().map(BenchHead::copied).collect());
        }
        let mut steps = Self {
            copies,
            setting,
            steps: 0,
            bytes: 0,
            counts: Counts::NONE,
            scored: 0,
        };
        // The first step of a method may build state that later steps only extend.
        if setting.bench.retrieves() {
            for _ in 0..setting.copies() {
                steps.run()?;
            }
        }
        Ok(steps)
    }

    /// Runs a step on the next copy; returns its seconds.
    pub fn run(&mut self) -> Result<f64> {
        let (setting, set) = (self.setting, self.setting.static_set());
        let (copy, steps) = (self.steps % self.copies.len(), self.steps / self.copies.len());
        self.steps += 1;
        let start = Instant::now();
        let heads = self.copies[copy].par_iter_mut();
        let chosen = heads.map(|head| {
            let step = setting.step(&set, steps, &head.queries, &head.kv);
            let chosen = head.retriever.select(&step);
            if setting.attends {
                attend(&step, &set, &chosen, head.retriever.as_mut(), head.out.view_mut());
            }
            std::hint::black_box((&chosen, &head.out));
            chosen
        });
        let chosen: Vec<Selection> = chosen.collect();
        let seconds = start.elapsed().as_secs_f64();
        (self.bytes, self.counts, self.scored) = (0, Counts::NONE, 0);
        for (head, chosen) in self.copies[copy].iter().zip(&chosen) {
            let step = setting.step(&set, steps, &head.queries, &head.kv);
            let mut reads = Reads::new(CPU_GRANULE);
            head.retriever.reads(&step, chosen, &mut reads);
            self.bytes += setting.read_bytes(&reads, chosen);
            self.scored += chosen.products;
            let Shape { group, head_dim, .. } = setting.layer.shape;
            if setting.attends {
                add_rows(&mut reads, chosen, &set, group, setting.kv, head_dim)
            } else {
                reads.rows(setting.kv, head_dim, &[], &[], &chosen.ranked)
            }
            self.counts.add(chosen, &reads, &set, group, setting.kv, head_dim);
        }
        Ok(seconds)
    }

    /// Returns the bytes of the index of one copy of the layer.
    pub fn index_bytes(&self) -> usize {
        let heads = self.copies[0].iter();
        heads.map(|head| head.retriever.state_bytes()).sum()
    }

    /// Returns the shares of what the last step read in the bytes of all keys and values. Unless the chosen positions were
    /// attended, only the rows that were read to choose count.
    pub fn shares(&self) -> Value {
        let layer = &self.setting.layer;
        let mut counts = self.counts;
        if !self.setting.attends {
            counts.rows = 0;
            counts.ends[1] = 0;
            counts.upper_rows = 0;
        }
        let counts = counts.in_rows(self.setting.cached(), layer.shape.head_dim);
        json!({
            "bytes_read_fraction": counts.bytes_fraction(),
            "granule": CPU_GRANULE,
            "bytes_moved_fraction": counts.moved_fraction(),
            "uncompressed_read_fraction": counts.uncompressed_fraction(),
            "uncompressed_moved_fraction": counts.uncompressed_moved_fraction(),
            "scratch_bytes_fraction": counts.scratch_fraction(),
        })
    }

    /// Returns the share of all scores that the last step's retrieval computed exactly.
    pub fn scored_share(&self) -> f64 {
        let layer = self.setting.layer;
        self.scored as f64 / (layer.shape.query_heads() * layer.context()) as f64
    }
}
