//! A decode step of one layer on the CPU, with random data.

use std::sync::Arc;
use std::time::Instant;

use half::f16;
use ndarray::{Array1, Array2};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::decode::{ROTATED_BYTES, SINKS, Setting, WINDOW, Work};
use super::median;
use crate::compute::attention;
use crate::error::{Error, Result};
use crate::method::a2ats::{A2ats, HeadCodebook};
use crate::method::selfindex::{SelfIndex, Source};
use crate::method::{MethodName, Place, Retriever, Step, full};
use crate::model::rope::{Rope, RopeConfig, RopeScaling};
use crate::progress::size;
use crate::runner::kv::{KvHead, KvType};
use crate::runner::packed::{Center, Layout};

/// Rows that are made at a time.
const CHUNK: usize = 4096;

/// GB/s of a loop that only reads, on all threads.
pub fn bandwidth(runs: usize) -> f64 {
    let values: Vec<u64> = (0..ROTATED_BYTES as u64 / 8).into_par_iter().collect();
    let time = || {
        let start = Instant::now();
        let sum = values
            .par_chunks(1 << 16)
            .map(|part| part.iter().fold(0, |a, b| a ^ b))
            .reduce(|| 0, |a, b| a ^ b);
        std::hint::black_box(sum);
        start.elapsed().as_secs_f64()
    };
    let times = (0..runs.max(3)).map(|_| time()).collect();
    ROTATED_BYTES as f64 / median(times) * 1e-9
}

/// One KV head of one sequence.
struct Head {
    kv: KvHead,
    retriever: Box<dyn Retriever>,
    /// Before and after rotation, `[r,d]`: the same here.
    query: Array2<f32>,
    out: Array2<f32>,
}

struct CpuStep {
    setting: Setting,
    /// Copies of a layer's heads.
    copies: Vec<Vec<Head>>,
    next: usize,
}

/// The work of a setting.
///
/// # Errors
/// More memory than there is.
pub fn work(setting: Setting) -> Result<Box<dyn Work>> {
    check_room(&setting)?;
    let codebooks = match setting.method {
        MethodName::A2ats => codebooks(&setting)?,
        _ => Vec::new(),
    };
    let g = setting.heads.n_kv_heads;
    let copies = (0..setting.copies()).map(|copy| {
        let heads = (0..setting.batch * g).into_par_iter();
        let seed = setting.seed + (copy * setting.batch * g) as u64;
        heads
            .map(|i| head(&setting, codebooks.get(i % g), i % g, seed + i as u64))
            .collect()
    });
    Ok(Box::new(CpuStep {
        copies: copies.collect(),
        setting,
        next: 0,
    }))
}

/// Says that a setting does not fit, where the system tells how much memory is left.
fn check_room(setting: &Setting) -> Result<()> {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let free = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
    let need = setting.copies() * (setting.row_bytes() + setting.index_bytes());
    match free.map(|kib| kib * 1024) {
        Some(free) if need > free => Err(Error::failed(format!(
            "{}: the data need {}, and {} are free",
            setting.shape(),
            size(need),
            size(free)
        ))
        .hint("give less --context or --batch")),
        _ => Ok(()),
    }
}

fn codebooks(setting: &Setting) -> Result<Vec<Arc<HeadCodebook>>> {
    let d = setting.heads.head_dim;
    let config = RopeConfig {
        theta: 1e4,
        scaling: RopeScaling::Default,
    };
    let rope = Rope::new(&config, d);
    let one = |head: usize| {
        let mut rng = ChaCha8Rng::seed_from_u64(setting.seed + head as u64);
        let codebook = uniform(&mut rng, setting.size, d).mapv(|v| f16::from_f32(v).to_f32());
        let head = HeadCodebook::new(codebook, Array1::zeros(d), Array2::eye(d), &rope, 2048)?;
        Ok(Arc::new(head))
    };
    (0..setting.heads.n_kv_heads).into_par_iter().map(one).collect()
}

/// From -1 to 1.
fn uniform(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Array2<f32> {
    Array2::from_shape_simple_fn((n, d), || rng.r#gen::<f32>() * 2.0 - 1.0)
}

fn head(setting: &Setting, codebook: Option<&Arc<HeadCodebook>>, kv_head: usize, seed: u64) -> Head {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (n, d) = (setting.context, setting.heads.head_dim);
    let kind = KvType::from(setting.kv);
    let place = Place {
        layer: 0,
        kv_head,
        group: setting.group(),
        head_dim: d,
        model_window: None,
        sinks: SINKS,
        window: WINDOW,
        budget: setting.budget,
        kv: kind,
    };
    let mut retriever: Box<dyn Retriever> = match (setting.method, codebook) {
        (MethodName::A2ats, Some(codebook)) => {
            let codes = (0..n)
                .map(|_| (rng.r#gen::<usize>() % setting.size) as u16)
                .collect();
            Box::new(A2ats::with_codes(Arc::clone(codebook), codes))
        }
        (MethodName::Selfindex, _) => Box::new(SelfIndex::new(&place, Center::Median, Source::Signs, None)),
        _ => Box::new(full::Full),
    };
    let room = if setting.attends { n } else { 0 };
    let mut kv = KvHead::new(kind, d, room, Layout::from(Center::Median));
    for first in (0..n).step_by(CHUNK) {
        let rows = CHUNK.min(n - first);
        if setting.method == MethodName::Selfindex {
            let keys = uniform(&mut rng, rows, d);
            retriever.append(keys.view(), keys.view());
        }
        if setting.attends {
            let (keys, values) = (uniform(&mut rng, rows, d), uniform(&mut rng, rows, d));
            kv.extend(keys.view(), values.view());
        }
    }
    Head {
        kv,
        retriever,
        query: uniform(&mut rng, setting.group(), d),
        out: Array2::zeros((setting.group(), d)),
    }
}

impl Work for CpuStep {
    fn run(&mut self) -> Result<f64> {
        let (setting, set) = (self.setting, self.setting.static_set());
        let copy = self.next;
        self.next = (copy + 1) % self.copies.len();
        let start = Instant::now();
        self.copies[copy].par_iter_mut().for_each(|head| {
            let step = Step {
                step: 0,
                visible: set.visible(),
                candidates: set.candidates.clone(),
                budget: setting.budget.positions(setting.context),
                q_pre: head.query.view(),
                q_rope: head.query.view(),
                kv: &head.kv,
            };
            let chosen = head.retriever.select(&step);
            if setting.attends {
                let positions = set.merge(&chosen.positions);
                let (keys, values) = (head.kv.keys(), head.kv.values());
                attention::decode(head.query.view(), keys, values, &positions, head.out.view_mut());
            }
            std::hint::black_box((&chosen, &head.out));
        });
        Ok(start.elapsed().as_secs_f64())
    }
}
