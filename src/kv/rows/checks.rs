//! What every format of rows must do, as checks that its tests call.

use ndarray::Array2;

use super::{RowCache, RowForm, RowStore};
use crate::compute::attention::kernels::{add_of, scores_of};
use crate::compute::attention::lanes::Plain;
#[cfg(target_arch = "x86_64")]
use crate::compute::attention::lanes::{Avx2, Avx512};
use crate::compute::attention::{
    self, CachedRows, ChunkedRows, GroupQueries, LANES, OutputSums, Run, Segment,
};
use crate::testing::values;

fn matrix(rows: usize, d: usize, seed: u32) -> Array2<f32> {
    Array2::from_shape_vec((rows, d), values(rows * d, seed)).unwrap()
}

/// Scores and weighted sums are the same, to the bit, on every instruction set of this machine and with every number of rows or
/// chunks at a time.
pub fn every_instruction_set_reads_the_same_rows<F: RowForm>()
where
    for<'a> F::Rows<'a>: ChunkedRows,
{
    for (d, r, n) in [(16, 1, 40), (64, 3, 70), (80, 4, 33), (128, 5, 65)] {
        let mut store = RowStore::<F>::new(d, n);
        store.extend(matrix(n, d, 5).view());
        let queries = GroupQueries::new(matrix(r, d, 6).view(), 0.125);
        let weights = values(r * n, 7);
        let positions: Vec<u32> = (0..n as u32).collect();
        macro_rules! on {
            ($simd:expr, [$($rows:literal),+], [$($chunks:literal),+]) => {{
                let segments = [Segment { first: 0, rows: store.units() }];
                let (run, rows) = (Run::new(&positions, n), F::rows(&segments, d));
                let mut scores = vec![0.0; r * n];
                scores_of::<_, _, $($rows),+>($simd, &queries, rows, &run, &mut scores, n);
                let mut values = vec![[0.5; LANES]; r * d / LANES];
                let mut sums = OutputSums { r, values: &mut values };
                add_of::<_, _, $($chunks),+>($simd, &weights, n, rows, &run, &mut sums);
                (scores, values)
            }};
        }
        let expected = on!(Plain::<false>, [1, 1, 1], [1, 1]);
        assert_eq!(on!(Plain::<true>, [2, 1, 1], [2, 4]), expected, "{d} {r}");
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
                // SAFETY: AVX2 and F16C were detected, and every machine with both has FMA.
                let avx2 = unsafe { Avx2::new() };
                assert_eq!(on!(avx2, [4, 2, 1], [2, 1]), expected, "{d} {r}");
            }
            if is_x86_feature_detected!("avx512dq") {
                // SAFETY: AVX-512 DQ was detected, and machines with it have BW and VL.
                let avx512 = unsafe { Avx512::new() };
                assert_eq!(on!(avx512, [8, 4, 4], [4, 4]), expected, "{d} {r}");
            }
        }
    }
}

/// Returns how far attention over caches of d channels is, at most, from attention over the rows that they give back as f32.
pub fn error_of_attention(d: usize, cache: impl Fn(usize) -> Box<dyn RowCache>) -> f32 {
    let (n, r) = (90, 3);
    let filled = |seed| {
        let mut cache = cache(d);
        cache.extend(matrix(n, d, seed).view());
        cache
    };
    let held = |cache: &dyn RowCache| {
        let mut scratch = vec![0.0; d];
        let all = (0..n).flat_map(|p| cache.row(p, &mut scratch).to_vec());
        let all = Array2::from_shape_vec((n, d), all.collect()).unwrap();
        let mut store = RowStore::<f32>::new(d, n);
        store.extend(all.view());
        store
    };
    let (keys, values) = (filled(1), filled(2));
    let q = matrix(r, d, 3);
    let positions: Vec<u32> = (0..n as u32).step_by(2).collect();
    let attend = |keys: &dyn CachedRows, values: &dyn CachedRows| {
        let mut out = Array2::zeros((r, d));
        attention::decode(q.view(), keys, values, &positions, out.view_mut());
        out
    };
    let found = attend(&*keys, &*values);
    let expected = attend(&held(&*keys), &held(&*values));
    (&found - &expected).fold(0.0, |most: f32, x| most.max(x.abs()))
}
