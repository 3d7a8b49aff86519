use super::products::plain;
use super::*;
use crate::testing::{numbers, values};

/// A row of so many random blocks, with scales that are ordinary numbers.
fn row(quant: Quant, blocks: usize, seed: u32) -> Vec<u8> {
    let mut next = numbers(seed);
    let (_, bytes) = quant.block();
    let mut out: Vec<u8> = (0..blocks * bytes).map(|_| (next() >> 24) as u8).collect();
    let scales: &[usize] = match quant {
        Quant::Q4_0 | Quant::Q5_0 | Quant::Q8_0 => &[0],
        Quant::Q6K => &[208],
        _ => &[0, 2],
    };
    for block in out.chunks_exact_mut(bytes) {
        for at in scales {
            // From 2^-8 to 2^-4, of either sign.
            let exponent = 7 + (next() >> 30) as u16;
            let bits = (block[*at + 1] as u16 & 0x80) << 8 | exponent << 10 | u16::from(block[*at]);
            block[*at..*at + 2].copy_from_slice(&bits.to_le_bytes());
        }
    }
    out
}

/// Returns the exact product of a row and rounded inputs, and the sum of the sizes of its terms.
fn exact(quant: Quant, row: &[u8], x: &RoundedRow) -> (f64, f64) {
    let (values, bytes) = quant.block();
    let (mut sum, mut size) = (0.0, 0.0);
    for (i, (codes, scale)) in x.codes.iter().zip(&x.scales).enumerate() {
        let block = &row[i * CHUNK / values * bytes..][..bytes];
        let chunk = quant.chunk(block, i * CHUNK % values / CHUNK);
        for (j, code) in codes.iter().enumerate() {
            let x = f64::from(*scale) * f64::from(*code);
            let own = f64::from(chunk.scales[2 * j / CHUNK]) * f64::from(chunk.codes[j]);
            sum += (own + f64::from(chunk.offset)) * x;
            size += (own.abs() + f64::from(chunk.offset).abs()) * x.abs();
        }
    }
    (sum, size)
}

#[test]
fn products_are_those_of_the_values() {
    for (quant, _) in Quant::ALL {
        let (values_of, _) = quant.block();
        for blocks in [1, 3, 10] {
            let row = row(quant, blocks, 7);
            let n = blocks * values_of;
            // More rows than are multiplied at once.
            let inputs = (0..6).map(|seed| RoundedRow::new(&values(n, seed + 1)));
            let inputs: Vec<RoundedRow> = inputs.collect();
            let mut out = vec![f32::NAN; inputs.len()];
            dots(quant, &row, &inputs, &mut out);
            for (found, x) in out.iter().zip(&inputs) {
                let (sum, size) = exact(quant, &row, x);
                // A term is rounded with its scale, its product and the sum of the inputs, and in each later addition.
                let bound = (n / CHUNK + 8) as f64 * 2f64.powi(-24) * size;
                assert!(
                    (f64::from(*found) - sum).abs() <= bound,
                    "{quant:?} {blocks}: {found} {sum}"
                );
                // Alone, and in plain Rust, the bits are the same.
                let (mut alone, mut in_plain) = ([f32::NAN], [f32::NAN]);
                let x = std::slice::from_ref(x);
                dots(quant, &row, x, &mut alone);
                plain(quant, &row, x, &mut in_plain);
                assert_eq!(
                    [alone[0], in_plain[0]].map(f32::to_bits),
                    [found.to_bits(); 2],
                    "{quant:?}"
                );
            }
        }
    }
}

/// Codes at the ends of their range overflow no intermediate sum.
#[test]
fn the_largest_codes_are_multiplied_exactly() {
    let (values_of, bytes) = Quant::Q8_0.block();
    for (code, x) in [(-128i8, 1.0), (-128, -1.0), (127, 1.0)] {
        let mut row = vec![code as u8; 3 * bytes];
        for block in row.chunks_exact_mut(bytes) {
            block[..2].copy_from_slice(&f16::ONE.to_le_bytes());
        }
        let x = RoundedRow::new(&vec![x * 127.0; 3 * values_of]);
        let mut out = [f32::NAN];
        dots(Quant::Q8_0, &row, std::slice::from_ref(&x), &mut out);
        assert_eq!(f64::from(out[0]), exact(Quant::Q8_0, &row, &x).0);
    }
}

#[test]
fn inputs_are_rounded_to_the_nearest_point() {
    let x = values(320, 1);
    let rounded = RoundedRow::new(&x);
    for ((x, codes), scale) in x.chunks(CHUNK).zip(&rounded.codes).zip(&rounded.scales) {
        for (x, code) in x.iter().zip(codes) {
            // Half a point, and roundings of the scale, its inverse and the quotient, of at most 127 points.
            let off = (f64::from(*x) / f64::from(*scale) - f64::from(*code)).abs();
            assert!(off <= 0.5 + 3.0 * 127.0 * 2f64.powi(-24), "{x} {code}");
        }
    }
}

#[test]
fn types_are_listed_in_their_order() {
    for (i, (quant, _)) in Quant::ALL.iter().enumerate() {
        assert_eq!(*quant as usize, i);
    }
}

#[test]
fn parts_of_a_row_are_those_of_the_row() {
    for (quant, _) in Quant::ALL {
        let (values_of, _) = quant.block();
        let row = row(quant, 3, 5);
        let mut all = vec![f32::NAN; 3 * values_of];
        quant.read(&row, 0, &mut all);
        for first in (0..all.len()).step_by(CHUNK) {
            let mut part = [f32::NAN; CHUNK];
            quant.read(&row, first, &mut part);
            assert_eq!(part, all[first..first + CHUNK]);
        }
    }
}

#[test]
fn inputs_that_are_not_finite_make_products_that_are_not() {
    let row = row(Quant::Q8_0, 2, 3);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = vec![1.0; 64];
        x[40] = bad;
        let mut out = [0.0];
        dots(Quant::Q8_0, &row, &[RoundedRow::new(&x)], &mut out);
        assert!(!out[0].is_finite(), "{bad}: {out:?}");
    }
    let mut out = [f32::NAN];
    dots(Quant::Q8_0, &row, &[RoundedRow::new(&[0.0; 64])], &mut out);
    assert_eq!(out, [0.0]);
}
