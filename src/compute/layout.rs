//! Returns arrays in standard layout (row by row without gaps) as slices.

use ndarray::{ArrayBase, Data, DataMut, Dimension};

/// The message of the panic.
const PROMISE: &str = "an array in standard layout";

/// Returns the elements of an array in standard layout.
///
/// # Panics
/// The array has another layout.
#[track_caller]
pub fn elements<T, D: Dimension>(x: &ArrayBase<impl Data<Elem = T>, D>) -> &[T] {
    x.as_slice().expect(PROMISE)
}

/// Returns the elements of an array in standard layout, to be changed.
///
/// # Panics
/// The array has another layout.
#[track_caller]
pub fn elements_mut<T, D: Dimension>(x: &mut ArrayBase<impl DataMut<Elem = T>, D>) -> &mut [T] {
    x.as_slice_mut().expect(PROMISE)
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use ndarray::{Array2, s};

    use super::*;

    #[test]
    fn rows_are_slices_and_columns_are_refused() {
        let mut x = Array2::from_shape_fn((3, 4), |(i, j)| 4 * i + j);
        elements_mut(&mut x.row_mut(1)).fill(7);
        assert_eq!(elements(&x), [0, 1, 2, 3, 7, 7, 7, 7, 8, 9, 10, 11]);
        assert!(elements(&x.slice(s![1..1, ..])).is_empty());
        assert!(catch_unwind(|| elements(&x.t()).len()).is_err());
        assert!(catch_unwind(|| elements(&x.slice(s![.., 1..])).len()).is_err());
        assert!(catch_unwind(|| elements_mut(&mut x.clone().column_mut(2)).fill(0)).is_err());
    }
}
