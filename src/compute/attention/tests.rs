use half::{bf16, f16};
use ndarray::{Array2, Array3, s};

use super::kernels::{StoredRows, Widen, add_of, scores_of};
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{LANES, Plain, Simd, fused, widen_f16};
use super::*;
use crate::testing::numbers;

/// Returns bit patterns of floats of every magnitude that a sum may meet; a few are not finite.
fn bits(seed: u32) -> impl Iterator<Item = u32> {
    std::iter::repeat_with(numbers(seed)).map(|state| state ^ state >> 15)
}

/// Returns n values from -1 to 1.
fn values(n: usize, seed: u32) -> Vec<f32> {
    let value = |x: u32| (x >> 8) as f32 / (1 << 23) as f32 - 1.0;
    bits(seed).take(n).map(value).collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn fused_is_mul_add() {
    let mut random = bits(1);
    let mut next = || random.next().unwrap_or(0);
    for i in 0..2_000_000 {
        let [a, b, mut c] = [next(), next(), next()].map(f32::from_bits);
        // Sums that nearly cancel, or that lie halfway between two floats.
        if i % 2 == 0 {
            c = f32::from_bits((-a * b).to_bits().wrapping_add(next() % 5).wrapping_sub(2));
        }
        if i % 16 == 0 {
            c *= 2f32.powi(24);
        }
        let (got, expected) = (fused(a, b, c), a.mul_add(b, c));
        assert!(same(got, expected), "{a:e} {b:e} {c:e}: {got:e} {expected:e}");
    }
    // Exactly halfway between two floats, but for one bit far below.
    let (a, b, c) = (1.0 + 2f32.powi(-12), 2f32.powi(-24) * (1.0 - 2f32.powi(-12)), 1.0);
    assert_eq!(fused(a, b, c), 1.0);
    assert_eq!(
        fused(1.0 + 2f32.powi(-23), 2f32.powi(-24), 1.0),
        1.0 + 2f32.powi(-23)
    );
}

#[test]
fn every_f16_is_widened_exactly() {
    for x in (0..=u16::MAX).map(f16::from_bits) {
        assert!(same(widen_f16(x), x.to_f32()), "{x:?}");
    }
}

/// Some rows, and the queries and weights that are applied to them.
struct Case<E> {
    r: usize,
    chunks: usize,
    rows: Vec<[E; LANES]>,
    queries: GroupQueries,
    q: Vec<f32>,
    positions: Vec<u32>,
    weights: Vec<f32>,
}

impl<E: Widen> Case<E> {
    fn new(r: usize, d: usize, positions: Vec<u32>, special: &[f32], from: fn(f32) -> E) -> Self {
        let chunks = d.div_ceil(LANES);
        let n = positions.last().map_or(0, |p| *p as usize + 1);
        let mut rows = values(n * chunks * LANES, 2);
        for (i, x) in special.iter().enumerate() {
            let at = (i * 37 + 5) % rows.len();
            rows[at] = *x;
        }
        let rows: Vec<E> = rows.into_iter().map(from).collect();
        let q = values(r * d, 3);
        let view = Array2::from_shape_vec((r, d), q.clone()).unwrap_or_default();
        Self {
            r,
            chunks,
            rows: rows.as_chunks().0.to_vec(),
            queries: GroupQueries::new(view.view(), 1.0),
            q: padded(&q, d),
            weights: values(r * positions.len(), 4),
            positions,
        }
    }

    /// Returns the expected scores and sums, computed value by value.
    fn expected(&self) -> (Vec<f32>, Vec<f32>) {
        let (n, width) = (self.positions.len(), self.chunks * LANES);
        let (mut scores, mut sums) = (vec![0.0; self.r * n], vec![0.25f32; self.r * width]);
        for (j, p) in self.positions.iter().enumerate() {
            let row = &self.rows[*p as usize * self.chunks..][..self.chunks];
            let wide = row.iter().flat_map(|x| {
                let simd = Plain::<true>;
                simd.store(E::widen(simd, x))
            });
            let row: Vec<f32> = wide.collect();
            for a in 0..self.r {
                let mut lanes = [0.0f32; LANES];
                for (i, x) in row.iter().enumerate() {
                    lanes[i % LANES] = x.mul_add(self.q[a * width + i], lanes[i % LANES]);
                }
                let by_halves = |lanes: &[f32]| {
                    let (low, high) = lanes.split_at(lanes.len() / 2);
                    low.iter().zip(high).map(|(x, y)| x + y).collect::<Vec<f32>>()
                };
                scores[a * n + j] = (0..4).fold(lanes.to_vec(), |lanes, _| by_halves(&lanes))[0];
                for (i, x) in row.iter().enumerate() {
                    let sum = &mut sums[a * width + i];
                    *sum = x.mul_add(self.weights[a * n + j], *sum);
                }
            }
        }
        (scores, sums)
    }

    fn stored(&self) -> StoredRows<'_, E> {
        StoredRows {
            rows: &self.rows,
            chunks: self.chunks,
        }
    }

    fn check(&self, name: &str, scores: impl Fn(&Self, &mut [f32]), add: impl Fn(&Self, OutputSums)) {
        let (expected, expected_sums) = self.expected();
        let mut got = vec![0.0; expected.len()];
        scores(self, &mut got);
        let shape = (self.r, self.chunks, self.positions.len());
        for (i, (x, y)) in got.iter().zip(&expected).enumerate() {
            assert!(same(*x, *y), "{name} {shape:?} score {i}: {x} {y}");
        }
        let mut got = vec![[0.25; LANES]; self.r * self.chunks];
        add(
            self,
            OutputSums {
                r: self.r,
                values: &mut got,
            },
        );
        for (i, (x, y)) in got.as_flattened().iter().zip(&expected_sums).enumerate() {
            assert!(same(*x, *y), "{name} {shape:?} sum {i}: {x} {y}");
        }
    }

    /// Checks the kernels with the given instruction set, and with tiles of so many rows for two, three and four heads, and of so
    /// many chunks for three and four heads.
    fn check_with<
        S: Simd,
        const ROWS_2: usize,
        const ROWS_3: usize,
        const ROWS_4: usize,
        const CHUNKS_3: usize,
        const CHUNKS_4: usize,
    >(
        &self,
        simd: S,
    ) {
        let n = self.positions.len();
        self.check(
            std::any::type_name::<S>(),
            |case, out| {
                let run = Run::new(&case.positions, n);
                scores_of::<S, _, ROWS_2, ROWS_3, ROWS_4>(simd, &case.queries, case.stored(), &run, out, n);
            },
            |case, mut sums| {
                let run = Run::new(&case.positions, n);
                add_of::<S, _, CHUNKS_3, CHUNKS_4>(simd, &case.weights, n, case.stored(), &run, &mut sums);
            },
        );
    }

    fn check_all(&self) {
        self.check_with::<_, 1, 1, 1, 1, 1>(Plain::<false>);
        self.check_with::<_, 2, 1, 1, 1, 1>(Plain::<true>);
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c") {
                // SAFETY: just asked; every machine with AVX2 and F16C has FMA.
                self.check_with::<_, 4, 2, 1, 2, 1>(unsafe { Avx2::new() });
            }
            if std::arch::is_x86_feature_detected!("avx512dq") {
                // SAFETY: machines with AVX-512 DQ have BW and VL.
                self.check_with::<_, 8, 4, 4, 4, 4>(unsafe { Avx512::new() });
            }
        }
        let n = self.positions.len();
        let run = |case: &Self| Run::new(&case.positions, n).now.to_vec();
        self.check(
            "chosen",
            |case, out| {
                let now = run(case);
                let run = Run {
                    now: &now,
                    next: &[0],
                };
                super::scores(&case.queries, case.stored(), &run, out, n);
            },
            |case, mut sums| {
                let now = run(case);
                let run = Run {
                    now: &now,
                    next: &[0],
                };
                super::add(&case.weights, n, case.stored(), &run, &mut sums);
            },
        );
    }
}

/// Returns rows of d values, padded with zeros to whole chunks.
fn padded(q: &[f32], d: usize) -> Vec<f32> {
    let pad = d.div_ceil(LANES) * LANES - d;
    q.chunks(d)
        .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, pad)))
        .collect()
}

#[test]
fn every_instruction_set_and_tile_gives_the_same_bits() {
    let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, 3e38, -0.0];
    for r in 1..=9 {
        for d in [16, 64, 80, 128] {
            for n in [1, 7, 8, 31, 32, 33, 70] {
                let positions: Vec<u32> = (0..n).map(|i| i * 2 + i / 5).collect();
                let special = if n % 2 == 0 { &special[..] } else { &[] };
                Case::new(r, d, positions.clone(), special, |x| x).check_all();
                if r % 3 == 1 {
                    Case::new(r, d, positions.clone(), special, f16::from_f32).check_all();
                    Case::new(r, d, positions, special, bf16::from_f32).check_all();
                }
            }
        }
    }
}

/// Rows in f32 of any width, which are read only through [`CachedRows::row`].
struct Wide(Array2<f32>);

impl CachedRows for Wide {
    fn dim(&self) -> usize {
        self.0.ncols()
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        scratch
            .iter_mut()
            .zip(self.0.row(position))
            .for_each(|(s, x)| *s = *x);
        scratch
    }
}

#[test]
fn threads_and_pieces_change_nothing_beyond_rounding() {
    let (r, d, n) = (3, 20, 20_000);
    let of = |seed| Array2::from_shape_vec((n, d), values(n * d, seed)).unwrap_or_default();
    let (keys, values_) = (Wide(of(5)), Wide(of(6)));
    let q = Array2::from_shape_vec((r, d), values(r * d, 7)).unwrap_or_default();
    let positions: Vec<u32> = (0..n as u32).filter(|p| p % 7 != 3).collect();
    let run = |threads: usize| {
        let mut out = Array2::zeros((r, d));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let (weights, lse) = pool.expect("threads").install(|| {
            let (q, mut alone) = (q.view(), Array2::zeros((r, d)));
            let lse = decode(q, &keys, &values_, &positions, alone.view_mut());
            let found = decode_with_weights(q, &keys, &values_, &positions, out.view_mut());
            assert_eq!((&alone, &lse), (&out, &found.1), "without weights");
            found
        });
        (out, weights, lse)
    };
    let one = run(1);
    assert_eq!(one, run(3));
    for a in 0..r {
        let score = |p: &u32| -> f64 {
            let products = keys.0.row(*p as usize);
            let sum: f64 = products.iter().zip(q.row(a)).map(|(k, q)| f64::from(k * q)).sum();
            sum / (d as f64).sqrt()
        };
        let scores: Vec<f64> = positions.iter().map(score).collect();
        let sum: f64 = scores.iter().map(|s| s.exp()).sum();
        // Scores below 5 with d + 4 roundings each, exponentials with a relative error of 2e-7, sums of 256 terms in
        // f32.
        let bound = (5.0 * (d as f64 + 4.0) + 20.0 + 256.0) * 2f64.powi(-24);
        for (w, s) in one.1.row(a).iter().zip(&scores) {
            let exact = s.exp() / sum;
            assert!((f64::from(*w) - exact).abs() <= bound * exact);
        }
        assert!((f64::from(one.2[a]) - sum.ln()).abs() <= bound + 1e-6);
        for i in 0..d {
            let terms = positions.iter().zip(&scores);
            let terms = terms.map(|(p, s)| s.exp() / sum * f64::from(values_.0[[*p as usize, i]]));
            let (exact, size) = terms.fold((0.0, 0.0), |(e, s), x| (e + x, s + x.abs()));
            assert!((f64::from(one.0[[a, i]]) - exact).abs() <= bound * size + 1e-9);
        }
    }
}

#[test]
fn what_is_not_finite_in_a_decode_step_shows_unless_it_weighs_nothing() {
    let (d, n) = (16, 20_000);
    let of = |seed| Array2::from_shape_vec((n, d), values(n * d, seed)).unwrap_or_default();
    let q = Array2::ones((1, d));
    let run = |keys: &Array2<f32>, positions: &[u32]| {
        let mut out = Array2::zeros((1, d));
        let (keys, values_) = (Wide(keys.clone()), Wide(of(15)));
        let (weights, lse) = decode_with_weights(q.view(), &keys, &values_, positions, out.view_mut());
        (out, weights, lse)
    };
    let all: Vec<u32> = (0..n as u32).collect();
    // Whole pieces and a part of a piece.
    let mut keys = of(14);
    keys.slice_mut(s![..9000, 3]).fill(f32::NEG_INFINITY);
    let (out, weights, lse) = run(&keys, &all);
    let (rest, rest_weights, rest_lse) = run(&keys, &all[9000..]);
    assert!(weights.slice(s![.., ..9000]).iter().all(|w| *w == 0.0));
    let close = |a: &f32, b: &f32| (a - b).abs() <= 1e-5 * b.abs().max(1e-3);
    assert!(
        weights
            .iter()
            .skip(9000)
            .zip(&rest_weights)
            .all(|(a, b)| close(a, b))
    );
    assert!(out.iter().zip(&rest).all(|(a, b)| close(a, b)));
    assert!(close(&lse[0], &rest_lse[0]));
    for special in [f32::NAN, f32::INFINITY] {
        keys[[n - 1, 0]] = special;
        let (out, _, lse) = run(&keys, &all);
        assert!(lse[0].is_nan() && out.iter().all(|x| x.is_nan()), "{special}");
    }
}

#[test]
fn rows_of_a_prompt_do_not_depend_on_their_company() {
    let (g, m) = (2, 300);
    for (r, d, window) in [
        (4, 64, None),
        (1, 144, None),
        (7, 16, Some(100)),
        (3, 129, Some(130)),
    ] {
        let cube = |heads: usize, seed: u32| {
            Array3::from_shape_vec((heads, m, d), values(heads * m * d, seed)).unwrap_or_default()
        };
        let (q, k, v) = (cube(g * r, 8), cube(g, 9), cube(g, 10));
        for rounds in [false, true] {
            let run = |rows: Range<usize>, threads: usize| {
                let mut out = Array2::from_elem((rows.len(), g * r * d), f32::NAN);
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let q = q.slice(s![.., rows.clone(), ..]);
                pool.expect("threads")
                    .install(|| causal(q, k.view(), v.view(), rows.start, window, rounds, out.view_mut()));
                out
            };
            let all = run(0..m, 1);
            assert!(all.iter().all(|x| x.is_finite()));
            assert_eq!(all, run(0..m, 3));
            for rows in [0..1, 1..77, 128..256, 130..300, 299..300] {
                assert_eq!(
                    run(rows.clone(), 2),
                    all.slice(s![rows, ..]),
                    "{r} {d} {window:?} {rounds}"
                );
            }
        }
    }
}

/// With rounded factors, outputs are those of the rounded queries, keys and values, whose weights are rounded too.
#[test]
fn rounded_factors_of_a_prompt_are_attended_as_they_are() {
    let (g, r, m) = (1, 2, 270);
    for (d, window) in [(64, None), (256, Some(130)), (18, None)] {
        let cube = |heads: usize, seed: u32| {
            Array3::from_shape_vec((heads, m, d), values(heads * m * d, seed)).unwrap_or_default()
        };
        let (q, k, v) = (cube(g * r, 8), cube(g, 9), cube(g, 10));
        let mut out = Array2::from_elem((m, g * r * d), f32::NAN);
        causal(q.view(), k.view(), v.view(), 0, window, true, out.view_mut());
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let round = |x: f32| half::bf16::from_f32(x).to_f64();
        for a in 0..r {
            for t in 0..m {
                let seen = window.map_or(0, |w| (t + 1usize).saturating_sub(w))..t + 1;
                let score = |j: usize| {
                    let each = q.slice(s![a, t, ..]).into_iter().zip(k.slice(s![0, j, ..]));
                    each.map(|(q, k)| round(q * scale) * round(*k)).sum::<f64>()
                };
                let weights: Vec<f64> = seen.clone().map(|j| score(j).exp2()).collect();
                let sum: f64 = weights.iter().sum();
                for c in 0..d {
                    let terms = weights
                        .iter()
                        .zip(seen.clone())
                        .map(|(w, j)| w / sum * round(v[[0, j, c]]));
                    let (expected, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                    let found = f64::from(out[[t, a * d + c]]);
                    // A weight is rounded by at most 2^-8 of it; sums and powers are in f32.
                    let bound = (2f64.powi(-8) + 1e-4) * size;
                    assert!(
                        (found - expected).abs() <= bound,
                        "{d} {t} {c}: {found} {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_in_a_prompt_shows_where_it_is_seen() {
    let (m, d) = (200, 32);
    let cube = |seed| Array3::from_shape_vec((1, m, d), values(m * d, seed)).unwrap_or_default();
    let (q, v) = (cube(11), cube(13));
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut k = cube(12);
        k[[0, 150, 3]] = special;
        let mut out = Array2::zeros((m, d));
        causal(q.view(), k.view(), v.view(), 0, None, false, out.view_mut());
        for (t, row) in out.rows().into_iter().enumerate() {
            // A score of minus infinity has no weight.
            let hidden = t < 150 || special * q[[0, t, 3]] == f32::NEG_INFINITY;
            assert_eq!(row.iter().all(|x| x.is_finite()), hidden, "{special}: {t}");
        }
    }
}
