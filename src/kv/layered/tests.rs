//! Rows in layers against the numbers they hold, and attention over them against f64.

use super::super::KvHead;
use super::super::layout::Center;
use super::*;
use crate::compute::attention;
use crate::kv::{KvType, RowFormat};
use crate::testing::{numbers, values};

const SINKS: usize = 4;
const WINDOW: usize = 16;

fn layout() -> Layout {
    Layout {
        sinks: SINKS,
        window: WINDOW,
        ..Center::Median.into()
    }
}

/// Rows `[n,d]` that are floats of bf16; each channel has a size and a middle of its own.
fn rows(n: usize, d: usize, seed: u32) -> Array2<f32> {
    let noise = Array2::from_shape_vec((n, d), values(n * d, seed)).unwrap();
    let of = |(c, x): (usize, f32)| (1.0 + c as f32 * 0.3) * x + 0.1 * c as f32;
    let mut rows = noise;
    for mut row in rows.rows_mut() {
        for (c, x) in row.iter_mut().enumerate() {
            *x = bf16::from_f32(of((c, *x))).to_f32();
        }
    }
    rows
}

fn cache(d: usize, map: &RowMap) -> Layered {
    Layered::new(d, 0, layout(), [map])
}

fn read(rows: &dyn CachedRows, position: usize) -> Vec<f32> {
    let mut scratch = vec![0.0; rows.dim()];
    rows.row(position, &mut scratch).to_vec()
}

/// Codes and what is read of them, computed anew from the rows that fix the ranges.
#[test]
fn a_number_is_read_by_one_layer_or_by_both() {
    let (n, d) = (400, 20);
    let rows = rows(n, d, 3);
    let mut cache = cache(d, &RowMap::Identity);
    cache.extend(rows.view());
    let upper = cache.part(0, Some(&[]));
    for channel in 0..d {
        let first = rows.slice(ndarray::s![SINKS..SINKS + FIRST, channel]);
        let [low, high] = [f32::min, f32::max].map(|of| first.fold(first[0], |a, b| of(a, *b)));
        let span = f64::from(high - low) * 1.2;
        let least = f64::from(low + high) * 0.5 - span * 0.5;
        // Least and step are rounded to 11 bits.
        let (step, rounding) = (span / 255.0, (span + least.abs()) * 2f64.powi(-10));
        for position in [SINKS, 100, SINKS + FIRST + 5, n - WINDOW - 1] {
            let x = f64::from(rows[[position, channel]]);
            let inside = x.clamp(least, least + span);
            let [both, one] =
                [read(&cache, position), read(&upper, position)].map(|row| f64::from(row[channel]));
            assert!(
                (both - inside).abs() <= 0.5 * step + rounding,
                "{channel} {position}"
            );
            assert!(
                (one - inside).abs() <= 8.0 * step + rounding,
                "{channel} {position}"
            );
            // The rest of the code is between -7.5 and 7.5, and a number and a half.
            let rest = (both - one) / step;
            assert!(
                (rest - rest.floor() - 0.5).abs() < 0.05,
                "{channel} {position}: {rest}"
            );
        }
        for position in [0, SINKS - 1, n - WINDOW, n - 1] {
            assert_eq!(read(&upper, position)[channel], rows[[position, channel]]);
        }
    }
}

/// However many rows are appended at a time, and whatever forks there are, rows are read alike.
#[test]
fn rows_do_not_depend_on_how_they_arrive() {
    let (n, d) = (700, 16);
    let mut all = rows(n, d, 5);
    // Rows with numbers far beyond all earlier ones.
    for (position, channel, factor) in [(300, 2, 3.0), (500, 7, -4.0), (501, 7, -4.1)] {
        all[[position, channel]] *= factor;
        all[[position, channel]] += 10.0 * factor;
    }
    let all = all.mapv(|x| bf16::from_f32(x).to_f32());
    let mut whole = cache(d, &RowMap::Hadamard);
    whole.extend(all.view());
    let mut number = numbers(5);
    for most in [1, 7, 300] {
        let mut parts = cache(d, &RowMap::Hadamard);
        while parts.len() < n {
            let more = (1 + number() as usize % most).min(n - parts.len());
            let first = parts.len();
            parts.extend(all.slice(ndarray::s![first..first + more, ..]));
            if number().is_multiple_of(9) {
                parts = parts.forked();
            }
            let packed = parts.len().saturating_sub(SINKS + WINDOW);
            let in_bf16 = if packed < FIRST { parts.len() } else { SINKS };
            assert_eq!(read(&parts, in_bf16 - 1), all.row(in_bf16 - 1).to_vec());
        }
        for position in 0..n {
            assert_eq!(
                read(&parts, position),
                read(&whole, position),
                "{most} {position}"
            );
        }
    }
}

#[test]
fn numbers_beyond_the_range_are_cut_or_begin_new_ranges() {
    let (n, d) = (SINKS + FIRST + WINDOW, 16);
    let mut cache = cache(d, &RowMap::Identity);
    let first = rows(n, d, 8);
    cache.extend(first.view());
    let before: Vec<Vec<f32>> = (0..n).map(|p| read(&cache, p)).collect();
    assert_eq!(cache.parts[0].ranges.len(), 1);
    let [least, step] = cache.parts[0].ranges[0].channels().next().unwrap();
    let mut add = |x: f32| {
        let mut more = first.slice(ndarray::s![..WINDOW + 1, ..]).to_owned();
        more[[0, 0]] = bf16::from_f32(x).to_f32();
        // The window holds the rows after the first one of these.
        cache.extend(more.view());
        let at = cache.len() - WINDOW - 1;
        (more[[0, 0]], read(&cache, at)[0], cache.parts[0].ranges.len())
    };
    let (_, cut, ranges) = add(least + 270.0 * step);
    assert_eq!((cut, ranges), (255.0 * step + least, 1));
    let far = least + 400.0 * step;
    let (x, own, ranges) = add(far);
    assert_eq!(ranges, 2);
    // The new range has everything that was seen.
    assert!((x - own).abs() <= 1.2 * step, "{x} {own}");
    let (x, own, ranges) = add(least - 10.0 * step);
    assert!(ranges == 2 && (x - own).abs() <= 1.2 * step, "{x} {own}");
    for (p, row) in before.iter().enumerate().take(n - WINDOW) {
        assert_eq!(read(&cache, p), *row);
    }
}

/// Channels that never change, and numbers that are not finite, neither begin ranges without end nor spoil later rows.
#[test]
fn odd_rows_leave_the_others_as_they_are() {
    let (n, d) = (SINKS + FIRST + WINDOW + 50, 32);
    for x in [0.59375, 0.703125] {
        let mut cache = cache(d, &RowMap::Hadamard);
        // Only the first channel of the map is not zero: sqrt(32) x, whose nearest float of 16 bits is above it for the first x.
        let same = Array2::from_elem((n, d), x);
        cache.extend(same.view());
        assert_eq!(cache.parts[0].ranges.len(), 1);
        let error = |cache: &Layered| (read(cache, cache.len() - WINDOW - 1)[3] - x).abs();
        assert!(error(&cache) < 1e-3);
        let mut odd = same.slice(ndarray::s![..40, ..]).to_owned();
        odd[[2, 1]] = f32::INFINITY;
        odd[[4, 1]] = f32::NAN;
        cache.extend(odd.view());
        assert_eq!(cache.parts[0].ranges.len(), 1);
        assert!(error(&cache) < 1e-3);
    }
}

/// Keys and values side by side, keys or values alone: attention is that over the rows as they are read.
#[test]
fn rows_are_attended_as_they_are_read() {
    let layered = KvType::both(RowFormat::INT4_4);
    let keys_only = KvType {
        values: RowFormat::BF16,
        ..layered
    };
    let values_only = KvType {
        keys: RowFormat::INT8,
        ..layered
    };
    let (n, r) = (600, 5);
    for (kind, d) in [
        (layered, 64),
        (layered, 80),
        (layered, 20),
        (layered, 128),
        (keys_only, 64),
        (values_only, 64),
    ] {
        let (mut keys, values) = (rows(n, d, 1) * 0.1, rows(n, d, 2));
        keys[[400, 3]] = 20.0;
        let mut kv = KvHead::new(kind, d, 0, layout());
        kv.extend(
            keys.slice(ndarray::s![..550, ..]),
            values.slice(ndarray::s![..550, ..]),
        );
        let mut kv = kv.fork();
        kv.extend(
            keys.slice(ndarray::s![550.., ..]),
            values.slice(ndarray::s![550.., ..]),
        );
        let q = rows(r, d, 4) * 0.05;
        // Queries times steps, and weights, are rounded to 16 bits of the largest; the error of each is at random within half a
        // unit (0.29 units, as a deviation) and is multiplied by codes, 150 in size. Four deviations of a score change the output
        // by as much of the largest value. In a channel of values, 32 weights share a unit, which is at most one of 1.
        let mapped = |rows: &Array2<f32>| {
            let mut rows = rows.clone();
            rows.rows_mut().into_iter().for_each(|mut row| {
                RowMap::Hadamard.apply(row.as_slice_mut().unwrap());
            });
            rows
        };
        let steps = |rows: &Array2<f32>| -> Vec<f64> {
            let channel = |c: ndarray::ArrayView1<f32>| {
                let [low, high] = [f32::min, f32::max].map(|of| c.fold(c[0], |a, b| of(a, *b)));
                f64::from(high - low) * 1.2 / 255.0
            };
            mapped(rows).columns().into_iter().map(channel).collect()
        };
        let (unit, largest_q) = (
            0.29 * 150.0 / 32767.0,
            mapped(&q).fold(0.0, |a: f32, x| a.max(x.abs())),
        );
        let largest_of = |x: Vec<f64>| x.into_iter().fold(0.0, f64::max);
        let largest_v = f64::from(values.fold(0.0, |a: f32, x| a.max(x.abs())));
        let bound = 4.0 * unit * f64::from(largest_q) * largest_of(steps(&keys)) * largest_v
            + 4.0 * unit * 32f64.sqrt() * largest_of(steps(&values));
        let positions: Vec<u32> = (0..n as u32).filter(|p| p % 3 != 1).collect();
        let some: Vec<u32> = positions.iter().copied().filter(|p| p % 4 == 0).collect();
        let mut outputs = Vec::new();
        for whole in [&positions[..], &some, &[]] {
            let part = |part| kv.in_layers(part, whole);
            let (own_keys, own_values) = (part(Part::Keys), part(Part::Values));
            assert_eq!(own_keys.is_some(), kind.keys.is_layered());
            let keys = own_keys.as_deref().unwrap_or(kv.keys());
            let values = own_values.as_deref().unwrap_or(kv.values());
            let mut out = Array2::zeros((r, d));
            attention::decode(q.view(), keys, values, &positions, out.view_mut());
            for (head, found) in out.rows().into_iter().enumerate() {
                let scale = 1.0 / (d as f64).sqrt();
                let score = |p: &u32| -> f64 {
                    let key = read(keys, *p as usize);
                    let products = q.row(head).into_iter().zip(key);
                    products.map(|(q, k)| f64::from(*q) * f64::from(k)).sum::<f64>() * scale
                };
                let powers: Vec<f64> = positions.iter().map(|p| score(p).exp()).collect();
                let sum: f64 = powers.iter().sum();
                let mut expected = vec![0.0; d];
                for (p, power) in positions.iter().zip(&powers) {
                    let row = read(values, *p as usize);
                    expected
                        .iter_mut()
                        .zip(row)
                        .for_each(|(to, x)| *to += power / sum * f64::from(x));
                }
                for (x, y) in found.iter().zip(&expected) {
                    let error = (f64::from(*x) - y).abs();
                    assert!(error < bound, "{kind} {d} {head}: {x} {y}, by {bound}");
                }
            }
            outputs.push(out);
        }
        // The bound is below what the lower layer is worth.
        let apart = |a: &Array2<f32>, b: &Array2<f32>| (a - b).fold(0.0, |a: f32, x| a.max(x.abs()));
        let worth = f64::from(apart(&outputs[0], &outputs[2]));
        assert!(worth > bound, "{kind} {d}: {worth} of {bound}");
        assert!(outputs[0] != outputs[1] && outputs[1] != outputs[2]);
        // What is read of all rows is what is read without a choice.
        let mut out = Array2::zeros((r, d));
        attention::decode(q.view(), kv.keys(), kv.values(), &positions, out.view_mut());
        assert_eq!(out, outputs[0]);
    }
}

/// With 64 channels, a layer of a key and its value is a line of 64 bytes.
#[test]
fn keys_and_values_lie_side_by_side() {
    let d = 64;
    let mut cache = Layered::pair(d, 0, layout(), &HeadMaps::HADAMARD);
    let rows = rows(SINKS + FIRST + WINDOW + 3, d, 6);
    cache.append(&[rows.view(), rows.view()]);
    for layer in &cache.layers {
        let lines = layer.units();
        assert_eq!(lines.len(), 64 * (FIRST + 3));
        assert_eq!(lines[..32], lines[32..64]);
        assert_ne!(lines[..32], lines[64..96]);
    }
}
