//! The methods that choose on the device.

use std::sync::Arc;

use half::f16;
use ndarray::{Array1, Array2, Array4};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::case::{Case, normal, normals, rng};
use super::choices::{self, Setting};
use crate::error::{Error, Result};
use crate::kv::{KvType, RowFormat};
use crate::method::Method;
use crate::method::declaration::Ask;
use crate::method::params::MethodParams;
use crate::method::registry::METHODS;
use crate::method::{a2ats, wpq};
use crate::model::Sizes;
use crate::model::rope::{Rope, RopeConfig, RopeScaling, Ropes};

const AREA: &str = "methods";

/// KV heads, and query heads per KV head.
const HEADS: [usize; 2] = [2, 4];

/// Keys and values in two formats.
const PAIR: KvType = KvType {
    keys: RowFormat::INT8,
    values: RowFormat::BF16,
};

/// Positions of a prompt that a scan covers with several blocks.
const LONG: usize = 2500;

/// Makes a method for heads of this many channels.
type Make = fn(usize) -> Result<Box<dyn Method>>;

pub fn cases() -> Vec<Case> {
    let named: [(&str, Make); 10] = [
        ("streaming", |d| prepared("streaming", d)),
        ("random", |d| prepared("random", d)),
        ("topk", |d| prepared("topk", d)),
        ("a2ats", |d| a2ats(d, 200, 1)),
        ("a2ats with codewords that repeat", |d| a2ats(d, 150, 5)),
        ("selfindex", |d| prepared("selfindex", d)),
        ("lfps", |d| prepared("lfps", d)),
        ("ctkvr", |d| prepared("ctkvr", d)),
        ("wpq", |d| wpq(d, [8, 16], true)),
        ("wpq around the mean with 256 words", |d| wpq(d, [4, 256], false)),
    ];
    let on = [
        ("streaming", KvType::F16, 64, 300),
        ("random", KvType::BF16, 80, 300),
        ("topk", KvType::F32, 96, 300),
        ("topk", KvType::BF16, 128, 300),
        ("a2ats", KvType::BF16, 128, 300),
        ("a2ats", KvType::TWO_BIT, 80, 300),
        ("a2ats", KvType::INT8, 128, 300),
        ("a2ats with codewords that repeat", KvType::F16, 64, 300),
        ("selfindex", KvType::F16, 96, 300),
        ("selfindex", KvType::INT8, 64, 300),
        ("selfindex", KvType::TWO_BIT, 64, 300),
        ("selfindex", KvType::TWO_BIT, 80, 300),
        ("selfindex", KvType::TWO_BIT, 96, 300),
        ("selfindex", KvType::TWO_BIT, 128, 300),
        ("lfps", KvType::F32, 64, 300),
        ("lfps", KvType::BF16, 128, 300),
        ("ctkvr", KvType::F32, 64, 300),
        ("ctkvr", KvType::BF16, 128, 300),
        ("wpq", KvType::BF16, 128, 300),
        ("wpq", KvType::TWO_BIT, 64, 300),
        ("wpq", KvType::INT8, 80, 300),
        ("wpq", PAIR, 64, 300),
        ("wpq", KvType::F32, 64, 300),
        ("wpq around the mean with 256 words", KvType::F16, 64, 300),
        // Several blocks of positions.
        ("topk", KvType::F16, 64, LONG),
        ("a2ats", KvType::BF16, 64, LONG),
        ("lfps", KvType::F16, 64, LONG),
        ("ctkvr", KvType::F16, 64, LONG),
        ("wpq", KvType::F16, 64, LONG),
    ];
    let mut cases = Vec::new();
    for (name, kv, d, n) in on {
        let [g, r] = HEADS;
        let setting = Setting {
            sizes: [g, r, d],
            kv,
            n,
            steps: 5,
            budget: 0.1,
            sinks_lead: if name == "lfps" { 8.0 } else { 0.0 },
        };
        let shape = format!("{g}/{} heads x {d}, {n} positions in {kv}", g * r);
        let make = named
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, make)| *make);
        cases.push(Case::new(AREA, format!("{name}, {shape}"), move |watched| {
            let unknown = || Error::internal(format!("no method {name}"));
            let method = make.ok_or_else(unknown)?(d)?;
            choices::check(watched, method.as_ref(), &setting)
        }));
    }
    cases
}

fn rope(d: usize) -> Rope {
    let config = RopeConfig {
        theta: 1e4,
        scaling: RopeScaling::Default,
    };
    Rope::new(&config, d)
}

/// Prepares a method that needs no artifact.
fn prepared(name: &str, d: usize) -> Result<Box<dyn Method>> {
    let [g, r] = HEADS;
    let mut params = MethodParams::default();
    // So few that what the steps teach decides.
    params.lfps.lfps_rows = 2;
    // The paper's value, with which some heads are bypassed.
    params.lfps.lfps_theta = 0.85;
    let ask = Ask {
        artifact: None,
        ropes: &Ropes::same(rope(d)),
        sizes: Sizes {
            n_layers: 1,
            n_heads: g * r,
            n_kv_heads: g,
            head_dim: d,
        },
        params: &params,
        seed: 0,
    };
    let method = METHODS.iter().find(|method| method.as_str() == name);
    let unknown = || Error::internal(format!("no method {name}"));
    method.ok_or_else(unknown)?.prepare(&ask)
}

/// Draws a lower triangular factor near the identity.
fn factor(rng: &mut ChaCha8Rng, d: usize) -> Array2<f32> {
    Array2::from_shape_fn((d, d), |(i, j)| match i.cmp(&j) {
        std::cmp::Ordering::Equal => 1.0 + rng.r#gen::<f32>(),
        std::cmp::Ordering::Greater => normal(rng) * 0.05,
        std::cmp::Ordering::Less => 0.0,
    })
}

/// Makes random codebooks in which each codeword occurs `copies` times.
fn a2ats(d: usize, size: usize, copies: usize) -> Result<Box<dyn Method>> {
    let mut rng = rng(size as u64);
    let head = |_| {
        let values = normals(&mut rng, size / copies * d);
        let value = |(c, j): (usize, usize)| f16::from_f32(values[c % (size / copies) * d + j]).to_f32();
        let codebook = Array2::from_shape_fn((size, d), value);
        let mean = Array1::from(normals(&mut rng, d)) * 0.1;
        let chol = factor(&mut rng, d);
        Ok(Arc::new(a2ats::HeadCodebook::new(
            codebook,
            mean,
            chol,
            &rope(d),
            2048,
        )?))
    };
    let heads: Vec<_> = (0..HEADS[0]).map(head).collect::<Result<_>>()?;
    Ok(a2ats::with_codebooks(a2ats::Codebooks::from_heads(
        HEADS[0], heads,
    )))
}

/// Makes random quantisers with this many groups per stage and words; with `path`, of keys around the path of a mean.
fn wpq(d: usize, [groups, words]: [usize; 2], path: bool) -> Result<Box<dyn Method>> {
    let mut rng = rng((groups * words) as u64);
    let head = |_| {
        let mut all = Array4::zeros((2, groups, words, d.div_ceil(groups)));
        for (stage, mut words) in all.outer_iter_mut().enumerate() {
            let scale = 1.0 / (1 + 2 * stage) as f32;
            words.mapv_inplace(|_: f32| f16::from_f32(scale * normal(&mut rng)).to_f32());
        }
        let mean = Array1::from(normals(&mut rng, d)) * 0.3;
        let chol = factor(&mut rng, d);
        let head = wpq::HeadCodebook::new(all.view(), mean.view(), chol.view(), Array2::eye(d).view())?;
        let head = if path {
            head.around(wpq::MeanPath::new(Array1::from(normals(&mut rng, d)), &rope(d)))
        } else {
            head
        };
        Ok(Arc::new(head))
    };
    let heads: Vec<_> = (0..HEADS[0]).map(head).collect::<Result<_>>()?;
    Ok(Box::new(wpq::HeadCodebooks::of_heads(HEADS[0], heads)))
}
