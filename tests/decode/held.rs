//! What only the checks need: the CPU's state on the device, and the device's state on the host.

use half::f16;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::kv::cuda::attend::Attention;
use kvsmith::internal::kv::cuda::packed::PackedLayer;
use kvsmith::internal::kv::cuda::signs::{FULL, Signs};
use kvsmith::internal::kv::cuda::{CudaSelection, Shape};
use kvsmith::internal::kv::packed::{Packed, QUANT_GROUP, sign_bytes};
use kvsmith::internal::method::ctkvr::Centroid;
use kvsmith::internal::method::ctkvr::cuda::Ctkvr;
use kvsmith::internal::method::lfps::cuda::{Lfps, LfpsWorkspace};

/// The signs of one KV head's keys, computed on the CPU.
pub struct HeadSigns<'a> {
    /// `sign_bytes(d)` per position.
    pub signs: &'a [u8],
    /// Center of each channel, `[d]`.
    pub centers: &'a [f32],
    /// Positions of the full-precision tokens, ascending.
    pub full: &'a [u32],
}

/// The contents of [`Signs`].
#[derive(Debug, PartialEq)]
pub struct HeldSigns {
    /// Centers, `[b,g,d]`.
    pub centers: Vec<f32>,
    /// `[b,g,capacity,words]`; the lowest bit belongs to the first channel.
    pub signs: Vec<u32>,
    /// Positions of the full-precision tokens of each KV head, ascending.
    pub full: Vec<Vec<u32>>,
}

/// Copies signs computed on the CPU to the device, one set per KV head of every sequence.
pub fn signs_of<'d>(driver: &'d dyn Driver, shape: Shape, heads: &[HeadSigns<'_>]) -> Signs<'d> {
    let shape = shape.checked().unwrap();
    let to = Signs::new(driver, shape).unwrap();
    let (d, words) = (shape.head_dim, shape.head_dim.div_ceil(32));
    assert_eq!(heads.len(), shape.heads());
    let mut signs = vec![0u32; shape.heads() * shape.capacity * words];
    for (to, head) in signs.chunks_mut(shape.capacity * words).zip(heads) {
        assert!(head.signs.len() <= shape.capacity * sign_bytes(d) && head.centers.len() == d);
        for (to, row) in to.chunks_mut(words).zip(head.signs.chunks(sign_bytes(d))) {
            for (i, byte) in row.iter().enumerate() {
                to[i / 4] |= u32::from(*byte) << (8 * (i % 4));
            }
        }
    }
    let full: Vec<u32> = padded(heads.iter().map(|head| head.full), FULL, 0);
    let counts: Vec<u32> = heads.iter().map(|head| head.full.len() as u32).collect();
    let centers: Vec<f32> = heads.iter().flat_map(|head| head.centers).copied().collect();
    to.signs.write(&signs).unwrap();
    to.centers.write(&centers).unwrap();
    to.full.write(&full).unwrap();
    to.full_count.write(&counts).unwrap();
    to
}

pub fn held_signs(signs: &Signs<'_>) -> HeldSigns {
    let (full, counts) = (signs.full.read().unwrap(), signs.full_count.read().unwrap());
    let full = full.chunks(FULL).zip(counts);
    HeldSigns {
        centers: signs.centers.read().unwrap(),
        signs: signs.signs.read().unwrap(),
        full: full
            .map(|(full, n)| full[..FULL.min(n as usize)].to_vec())
            .collect(),
    }
}

/// Copies caches built on the CPU to the device, one per KV head of every sequence.
pub fn packed_layer<'d>(driver: &'d dyn Driver, shape: Shape, heads: &[&Packed]) -> PackedLayer<'d> {
    let shape = shape.checked().unwrap();
    let d = shape.head_dim;
    let mut layer = PackedLayer::new(driver, shape).unwrap();
    let signs = heads.iter().map(|packed| HeadSigns {
        signs: packed.keys.signs(),
        centers: packed.keys.centers(),
        full: packed.keys.full_positions(),
    });
    layer.signs = signs_of(driver, shape, &signs.collect::<Vec<_>>());
    let parts: Vec<_> = heads.iter().map(|packed| packed.parts()).collect();
    let params_len = shape.capacity * d.div_ceil(QUANT_GROUP) * 2;
    for i in 0..2 {
        let bits = parts.iter().map(|part| &part.bits[i][..]);
        let params = parts.iter().map(|part| part.params[i].as_flattened());
        let full = parts.iter().map(|part| part.full[i]);
        let (bits, full) = (
            padded(bits, shape.capacity * d / 4, 0),
            padded(full, FULL * d, f16::ZERO),
        );
        layer.bits[i].write(&bits).unwrap();
        layer.params[i]
            .write(&padded(params, params_len, f16::ZERO))
            .unwrap();
        layer.full[i].write(&full).unwrap();
    }
    let alpha: Vec<f32> = parts.iter().flat_map(|part| part.alpha).copied().collect();
    layer.alpha.write(&alpha).unwrap();
    layer.is_signed = parts.iter().all(|part| part.signed);
    layer
}

/// Keys (`i` = 0) or values (1) as stored: quantised values, scales and zero points, full-precision rows.
pub fn held_rows(layer: &PackedLayer<'_>, i: usize) -> (Vec<u8>, Vec<f16>, Vec<f16>) {
    let (bits, params, full) = (&layer.bits[i], &layer.params[i], &layer.full[i]);
    (bits.read().unwrap(), params.read().unwrap(), full.read().unwrap())
}

/// Concatenates the rows, each padded with `zero` to `len` values.
fn padded<'a, T: Copy + 'a>(rows: impl Iterator<Item = &'a [T]>, len: usize, zero: T) -> Vec<T> {
    let mut out = Vec::new();
    for row in rows {
        assert!(row.len() <= len, "a row of {} does not fit {len}", row.len());
        let end = out.len() + len;
        out.extend_from_slice(row);
        out.resize(end, zero);
    }
    out
}

/// A selection of given positions: up to `most` per KV head, ascending.
pub fn selection<'d>(
    driver: &'d dyn Driver,
    shape: Shape,
    most: usize,
    lists: &[Vec<u32>],
) -> CudaSelection<'d> {
    let selection = CudaSelection::new(driver, &shape.checked().unwrap(), most.max(1)).unwrap();
    selection.write(lists).unwrap();
    selection
}

/// The attention outputs, `[b,h,d]`.
pub fn output(attention: &Attention<'_>) -> Vec<f32> {
    attention.output().unwrap()
}

/// The tables, `[b,h,2,capacity]`: by position and by distance.
pub fn held_tables(lfps: &Lfps<'_>, shape: Shape) -> Vec<f64> {
    let (values, factors) = (lfps.tables.read().unwrap(), lfps.factors.read().unwrap());
    let tables = values.chunks(shape.checked().unwrap().capacity).zip(factors);
    tables
        .flat_map(|(values, factor)| values.iter().map(move |v| f64::from(*v) * factor))
        .collect()
}

/// Which query heads were bypassed in the last step, `[b,h]`.
pub fn held_bypassed(space: &LfpsWorkspace<'_>) -> Vec<bool> {
    let marks = space.bypassed.read().unwrap();
    marks.into_iter().map(|mark| mark != 0).collect()
}

/// The centroids of each KV head `[b,g]`, oldest first.
pub fn centroids(of: &Ctkvr<'_>, shape: Shape) -> Vec<Vec<Centroid>> {
    let values = shape.group * shape.head_dim;
    let (ring, lens) = (of.ring.read().unwrap(), of.lens.read().unwrap());
    let (centroids, lists) = (of.centroids.read().unwrap(), of.lists.read().unwrap());
    let (slots, longest) = (lens.len() / shape.heads(), lists.len() / lens.len());
    let head = |at: usize| {
        let state = &ring[at / shape.kv_heads * 4..];
        let slot = |i: u32| at * slots + (state[0] + i) as usize % slots;
        let held = (0..state[1]).map(|i| {
            let row = &centroids[slot(i) * values..][..values];
            let list = &lists[slot(i) * longest..][..lens[slot(i)] as usize];
            Centroid {
                queries: row.iter().map(|bits| f16::from_bits(*bits)).collect(),
                list: list.to_vec(),
            }
        });
        held.collect()
    };
    (0..shape.heads()).map(head).collect()
}
