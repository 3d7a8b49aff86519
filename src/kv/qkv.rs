//! Queries, keys and values that belong together, whatever holds them: arrays, views of arrays, buffers on a device, or
//! functions that read them.

/// Queries, keys and values of a layer or of a KV head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Qkv<Q, K = Q, V = K> {
    /// Queries.
    pub q: Q,
    /// Keys.
    pub k: K,
    /// Values.
    pub v: V,
}

/// What the rows of a cache are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Rotated keys.
    Keys,
    /// Values.
    Values,
}

/// Queries or keys before and after rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotated<T> {
    /// Before rotation.
    pub pre: T,
    /// After rotation.
    pub rope: T,
}

/// Queries, keys and values, the first two before and after rotation.
pub type RotatedQkv<T> = Qkv<Rotated<T>, Rotated<T>, T>;

impl<T> Rotated<T> {
    /// Borrows both.
    pub fn as_ref(&self) -> Rotated<&T> {
        Rotated {
            pre: &self.pre,
            rope: &self.rope,
        }
    }
}

impl<T> RotatedQkv<T> {
    /// Borrows everything.
    pub fn as_ref(&self) -> RotatedQkv<&T> {
        Qkv {
            q: self.q.as_ref(),
            k: self.k.as_ref(),
            v: &self.v,
        }
    }
}
