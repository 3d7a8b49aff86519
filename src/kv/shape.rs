//! The sizes of a layer's cache.

/// The heads, channels and positions of a layer that several sequences pass.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of sequences, b.
    pub sequences: usize,
    /// Number of KV heads, g.
    pub kv_heads: usize,
    /// Number of query heads per KV head, r.
    pub group: usize,
    /// Number of channels per head, d.
    pub head_dim: usize,
    /// Most positions per sequence.
    pub capacity: usize,
}

impl Shape {
    /// Counts the KV heads of all sequences.
    pub fn heads(&self) -> usize {
        self.sequences * self.kv_heads
    }

    /// Counts the query heads of all sequences.
    pub fn query_heads(&self) -> usize {
        self.heads() * self.group
    }
}
