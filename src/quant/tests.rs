use super::products::plain;
#[cfg(target_arch = "x86_64")]
use super::products::{AT_ONCE, vnni, x86};
use super::*;
use crate::testing::{numbers, values};

/// Computes the products of one row with at most four rows of inputs.
type Form = fn(Quant, &[u8], &[RoundedRow], &mut [f32]);

/// Returns the forms of [`dots`] that this machine has, with their names.
fn forms() -> Vec<(&'static str, Form)> {
    let mut forms: Vec<(&str, Form)> = vec![("plain", plain)];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            // SAFETY: the machine has AVX2 and F16C.
            forms.push(("AVX2", |quant, row, x, out| unsafe {
                x86::dots(quant, row, x, out)
            }));
        }
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
        {
            forms.push(("VNNI", |quant, row, x, out| {
                // SAFETY: the machine has AVX-512 F, BW, VL and VNNI, and with them F16C.
                let products = unsafe { vnni::dots(quant, &[row; AT_ONCE], x) };
                out.iter_mut().zip(products).for_each(|(out, of)| *out = of[0]);
            }));
        }
    }
    forms
}

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

/// Returns the products of rows with inputs, `[inputs][rows]`.
fn products(quant: Quant, rows: &[&[u8]], inputs: &[RoundedRow]) -> Vec<Vec<f32>> {
    let mut out = vec![vec![f32::NAN; rows.len()]; inputs.len()];
    let mut outs: Vec<&mut [f32]> = out.iter_mut().map(Vec::as_mut_slice).collect();
    dots(quant, rows, inputs, &mut outs);
    out
}

#[test]
fn products_are_those_of_the_values() {
    for (quant, _) in Quant::ALL {
        let (values_of, _) = quant.block();
        for blocks in [1, 3, 10] {
            let rows: Vec<Vec<u8>> = (0..6).map(|seed| row(quant, blocks, seed + 7)).collect();
            let n = blocks * values_of;
            // More rows and more inputs than are multiplied at once.
            let inputs = (0..6).map(|seed| RoundedRow::new(&values(n, seed + 1)));
            let inputs: Vec<RoundedRow> = inputs.collect();
            for count in 1..=rows.len() {
                let rows: Vec<&[u8]> = rows[..count].iter().map(Vec::as_slice).collect();
                let found = products(quant, &rows, &inputs);
                for (found, x) in found.iter().zip(&inputs) {
                    for (found, row) in found.iter().zip(&rows) {
                        check_product(quant, row, x, *found);
                    }
                }
            }
        }
    }
}

/// Checks a product against the values, and its bits against the product of the row and the input alone, on every instruction
/// set that this machine has.
fn check_product(quant: Quant, row: &[u8], x: &RoundedRow, found: f32) {
    let (sum, size) = exact(quant, row, x);
    // A term is rounded with its scale, its product and the sum of the inputs, and in each later addition.
    let bound = (x.codes.len() + 8) as f64 * 2f64.powi(-24) * size;
    assert!(
        (f64::from(found) - sum).abs() <= bound,
        "{quant:?}: {found} {sum}"
    );
    let x = std::slice::from_ref(x);
    let alone = products(quant, &[row], x)[0][0];
    assert_eq!(alone.to_bits(), found.to_bits(), "{quant:?}");
    for (name, of) in forms() {
        let mut out = [f32::NAN];
        of(quant, row, x, &mut out);
        assert_eq!(out[0].to_bits(), found.to_bits(), "{quant:?} {name}");
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
        for (name, of) in forms() {
            let mut out = [f32::NAN];
            of(Quant::Q8_0, &row, std::slice::from_ref(&x), &mut out);
            assert_eq!(f64::from(out[0]), exact(Quant::Q8_0, &row, &x).0, "{name}");
        }
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
        for (name, of) in forms() {
            let mut out = [0.0];
            of(Quant::Q8_0, &row, &[RoundedRow::new(&x)], &mut out);
            assert!(!out[0].is_finite(), "{bad} {name}: {out:?}");
        }
    }
    for (name, of) in forms() {
        let mut out = [f32::NAN];
        of(Quant::Q8_0, &row, &[RoundedRow::new(&[0.0; 64])], &mut out);
        assert_eq!(out, [0.0], "{name}");
    }
}
