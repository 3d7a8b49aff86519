//! What a step reads in order to choose, in bytes and in granules of memory.

use std::borrow::Cow;
use std::ops::Range;

use crate::kv::{KvType, Part};

/// The bytes that memory moves at once: a cache line of the CPU.
pub const CPU_GRANULE: usize = 64;
/// The bytes that memory moves at once on an NVIDIA GPU: a sector of a cache line.
pub const CUDA_GRANULE: usize = 32;

/// What one KV head reads in a step in order to choose, besides the rows that it then attends.
///
/// A method calls one function for each array that it reads, and every array is counted twice:
///
/// - [`Reads::index_bytes`] counts each byte that is read once, in the type in which the index could be stored without
///   loss. It does not depend on the device, and `bytes_read_fraction` comes from it.
/// - [`Reads::moved_bytes`] counts what memory moves. Memory moves whole granules, 64 bytes on the CPU and 32 on an NVIDIA
///   GPU: each granule of which a byte is read counts once, with all its bytes, and in the type in which the array is
///   held. Every array is taken to begin at a granule. `bytes_moved_fraction` comes from it, with the rows attended.
///
/// [`Reads::scratch_bytes`] is beside both: the buffers that the step itself fills and reads again. Neither number has what
/// a step writes to the cache and to the index, nor what it reads to add its own token to the index.
///
/// On an NVIDIA GPU, the host does not know what a step chooses on the device. An index that reads at places which depend on
/// that calls [`Reads::unlisted`], and the bytes moved are then `None`, null in JSON; if not even the number of bytes is
/// known, it calls [`Reads::unknown`]. Scratch is not reported there for any method that has an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reads {
    granule: usize,
    /// Bytes of the index that are read, each counted once; `None` if only the device knows them.
    pub index_bytes: Option<usize>,
    /// Bytes that memory moves; `None` if only the device knows them.
    pub moved_bytes: Option<usize>,
    /// Bytes of the buffers that the step fills and then reads; each counts once, however often it is read. Of buffers, only
    /// those count that have an entry per candidate, page, codeword or ranked key; what is chosen is no buffer.
    pub scratch_bytes: Option<usize>,
    /// Number of cached keys that are ranked exactly.
    pub keys: usize,
    /// How many of these keys are not attended afterwards.
    pub unattended_keys: usize,
}

impl Reads {
    /// Makes an empty count for a memory that moves `granule` bytes at once, a power of two.
    pub fn new(granule: usize) -> Self {
        Self {
            granule,
            index_bytes: Some(0),
            moved_bytes: Some(0),
            scratch_bytes: Some(0),
            keys: 0,
            unattended_keys: 0,
        }
    }

    /// Adds an array of `bytes` bytes that is read whole.
    pub fn array(&mut self, bytes: usize) {
        self.range(0..bytes);
    }

    /// Adds an array that is read whole: `bytes` if it were stored in the narrowest type without loss, but `held` bytes
    /// in memory.
    pub fn array_held(&mut self, bytes: usize, held: usize) {
        add(&mut self.index_bytes, bytes);
        self.moved(std::iter::once(0..held));
    }

    /// Adds a contiguous part of an array, in bytes from its start.
    pub fn range(&mut self, bytes: Range<usize>) {
        self.spans(std::iter::once(bytes));
    }

    /// Adds items of `width` bytes of an array, at ascending places.
    pub fn items(&mut self, width: usize, places: impl IntoIterator<Item = usize>) {
        let each = self.granule / width.max(1);
        if each * width != self.granule {
            return self.spans(places.into_iter().map(|place| place * width..(place + 1) * width));
        }
        // No item lies in two granules. There may be as many items as candidates.
        let shift = each.trailing_zeros();
        let (mut items, mut granules, mut last) = (0, 0, usize::MAX);
        for place in places {
            let granule = place >> shift;
            granules += usize::from(granule != last);
            last = granule;
            items += 1;
        }
        add(&mut self.index_bytes, items * width);
        add(&mut self.moved_bytes, granules * self.granule);
    }

    /// Adds several parts of an array, in bytes from its start. They ascend and do not overlap.
    pub fn spans(&mut self, spans: impl IntoIterator<Item = Range<usize>>) {
        let mut bytes = 0;
        self.moved(spans.into_iter().inspect(|span| bytes += span.len()));
        add(&mut self.index_bytes, bytes);
    }

    /// Adds `bytes` bytes of an index at places that only the device knows.
    pub fn unlisted(&mut self, bytes: usize) {
        add(&mut self.index_bytes, bytes);
        self.moved_bytes = None;
    }

    /// Says that only the device knows what is read of the index.
    pub fn unknown(&mut self) {
        (self.index_bytes, self.moved_bytes) = (None, None);
    }

    /// Adds a buffer of `bytes` bytes that the step fills and reads again.
    pub fn scratch(&mut self, bytes: usize) {
        add(&mut self.scratch_bytes, bytes);
    }

    /// Returns whether no two rows of a cache share a granule.
    pub fn moves_whole_rows(&self, kv: KvType, head_dim: usize) -> bool {
        let widths = kv.row_arrays(head_dim).into_iter().flatten().flatten();
        widths.into_iter().all(|width| width.is_multiple_of(self.granule))
    }

    /// Adds rows of a cache, keys and values, that are read as a part of the index.
    pub fn index_rows(&mut self, kv: KvType, head_dim: usize, positions: Range<usize>) {
        add(
            &mut self.index_bytes,
            positions.len() * kv.bytes_per_position(head_dim),
        );
        for width in kv.row_arrays(head_dim).into_iter().flatten().flatten() {
            self.moved(std::iter::once(positions.start * width..positions.end * width));
        }
    }

    /// Adds what memory moves of a cache: the rows at `attended`, and the keys at `ranked`. Both ascend and have no
    /// position in common. Of rows in layers, the lower layer is read at `whole`, some of the attended positions.
    pub fn rows(&mut self, kv: KvType, head_dim: usize, attended: &[u32], whole: &[u32], ranked: &[u32]) {
        if !attended.is_empty() || !ranked.is_empty() {
            self.moved(std::iter::once(0..kv.shared_bytes(head_dim)));
        }
        if kv.is_layered_pair() {
            // The bytes of a layer of a key, and of a key and its value.
            let (key, both) = (
                kv.bytes_per_key(head_dim) / 2,
                kv.bytes_per_position(head_dim) / 2,
            );
            let span = |p: &u32, bytes: usize| *p as usize * both..*p as usize * both + bytes;
            for attended in [attended, whole] {
                let rows = attended.iter().map(|p| span(p, both));
                let mut spans: Vec<_> = rows.chain(ranked.iter().map(|p| span(p, key))).collect();
                // The sort detects the two ascending runs.
                spans.sort_by_key(|span| span.start);
                self.moved(spans.into_iter());
            }
            return;
        }
        for (format, part) in [(kv.keys, Part::Keys), (kv.values, Part::Values)] {
            let [first, second] = format.arrays(part, head_dim);
            let of_second = if format.is_layered() { whole } else { attended };
            for (width, attended) in [(first, attended), (second, of_second)] {
                let Some(width) = width else { continue };
                let mut positions = Cow::from(attended);
                if part == Part::Keys && !ranked.is_empty() {
                    // The sort detects the two ascending runs.
                    positions.to_mut().extend(ranked);
                    positions.to_mut().sort();
                }
                let runs = positions.chunk_by(|p, q| p + 1 == *q);
                let bytes = |run: &[u32]| run[0] as usize * width..(run[0] as usize + run.len()) * width;
                self.moved(runs.map(bytes));
            }
        }
    }

    /// Adds what memory moves of the ends of a cache that holds them [in another way](KvType::has_ends): so many sinks, and so many
    /// rows of the window. A format that holds all rows alike counts as if its ends were arrays of their own.
    pub fn end_rows(&mut self, kv: KvType, head_dim: usize, rows: [usize; 2]) {
        for (format, part) in [(kv.keys, Part::Keys), (kv.values, Part::Values)] {
            let width = format
                .end_bytes(head_dim)
                .unwrap_or_else(|| format.bytes(part, head_dim));
            for rows in rows {
                self.moved(std::iter::once(0..rows * width));
            }
        }
    }

    /// Adds what memory moves of a cache of which `rows` rows and the keys of `ranked` further positions are read, at
    /// places that are not listed. The bytes moved become unknown if rows share granules.
    pub fn unlisted_rows(&mut self, kv: KvType, head_dim: usize, rows: usize, ranked: usize) {
        let is_known = self.moves_whole_rows(kv, head_dim);
        let bytes = rows * kv.bytes_per_position(head_dim) + ranked * kv.bytes_per_key(head_dim);
        self.moved_bytes = self.moved_bytes.filter(|_| is_known);
        add(&mut self.moved_bytes, bytes);
    }

    /// Adds the granules in which ascending spans of one array lie.
    fn moved(&mut self, spans: impl Iterator<Item = Range<usize>>) {
        let shift = self.granule.trailing_zeros();
        // The first granule that has not been counted.
        let (mut granules, mut next) = (0, 0);
        for span in spans.filter(|span| !span.is_empty()) {
            let (first, end) = (span.start >> shift, ((span.end - 1) >> shift) + 1);
            granules += end.saturating_sub(first.max(next));
            next = end;
        }
        add(&mut self.moved_bytes, granules << shift);
    }
}

/// Adds bytes to a number, if it is known.
fn add(sum: &mut Option<usize>, bytes: usize) {
    *sum = sum.map(|sum| sum + bytes);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::kv::RowFormat;
    use crate::testing::numbers;

    /// Counts granules byte by byte.
    fn naive(granule: usize, spans: &[Range<usize>]) -> usize {
        let granules = spans.iter().cloned().flatten().map(|byte| byte / granule);
        granules.collect::<BTreeSet<_>>().len() * granule
    }

    #[test]
    fn granules_are_those_of_the_bytes() {
        let mut number = numbers(3);
        let mut next = |n: usize| (number() >> 8) as usize % n;
        for case in 0..400 {
            let granule = 1 << next(9);
            let (mut at, mut spans) = (next(100), Vec::new());
            for _ in 0..next(12) {
                let len = next(90);
                spans.push(at..at + len);
                at += len + next(3) * next(200);
            }
            let mut reads = Reads::new(granule);
            reads.spans(spans.iter().cloned());
            let bytes = spans.iter().map(Range::len).sum();
            assert_eq!(reads.index_bytes, Some(bytes), "{case}");
            assert_eq!(reads.moved_bytes, Some(naive(granule, &spans)), "{case}");
            let mut items = Reads::new(granule);
            let (width, places) = (1 + next(40), [2, 3, 40, 41, 90]);
            items.items(width, places);
            let of_item = |place: usize| place * width..(place + 1) * width;
            assert_eq!(items.index_bytes, Some(5 * width));
            assert_eq!(items.moved_bytes, Some(naive(granule, &places.map(of_item))));
        }
    }

    #[test]
    fn rows_move_whole_granules_wherever_they_are() {
        let (attended, ranked) = ([0u32, 1, 2, 30, 31, 200], [3u32, 77]);
        for (kv, d, key_widths, value_width) in [
            (KvType::BF16, 64, [128, 0], 128),
            (KvType::F32, 10, [40, 0], 40),
            (KvType::TWO_BIT, 64, [24, 8], 24),
            (KvType::F16, 8, [16, 0], 16),
        ] {
            for granule in [1, 32, 64, 128] {
                let mut reads = Reads::new(granule);
                reads.rows(kv, d, &attended, &attended, &ranked);
                let spans = |positions: &[u32], width: usize| -> usize {
                    let mut sorted = positions.to_vec();
                    sorted.sort();
                    let span = |p: &u32| *p as usize * width..(*p as usize + 1) * width;
                    naive(granule, &sorted.iter().map(span).collect::<Vec<_>>())
                };
                let keys = [&attended[..], &ranked].concat();
                let expected = spans(&keys, key_widths[0]) + spans(&keys, key_widths[1]);
                let expected = expected + spans(&attended, value_width);
                assert_eq!(reads.moved_bytes, Some(expected), "{kv:?} {d} {granule}");
                // Without the places, the same is known if no two rows share a granule.
                let mut unlisted = Reads::new(granule);
                unlisted.unlisted_rows(kv, d, attended.len(), ranked.len());
                let is_whole = unlisted.moves_whole_rows(kv, d);
                assert_eq!(
                    unlisted.moved_bytes,
                    is_whole.then_some(expected),
                    "{kv:?} {d} {granule}"
                );
            }
        }
    }

    #[test]
    fn rows_in_layers_move_the_lower_layer_where_they_are_read_whole() {
        let (attended, whole, ranked) = ([0u32, 1, 9, 30, 31], [1u32, 30], [3u32, 8]);
        let pair = KvType::both(RowFormat::INT4_4);
        let keys_only = KvType {
            values: RowFormat::BF16,
            ..pair
        };
        let span = |p: u32, width: usize, bytes: usize| p as usize * width..p as usize * width + bytes;
        let spans = |positions: &[u32], ranked: &[u32], width: usize, key: usize| -> Vec<Range<usize>> {
            let rows = positions.iter().map(|p| span(*p, width, width));
            rows.chain(ranked.iter().map(|p| span(*p, width, key))).collect()
        };
        let whole_array = |bytes: usize, granule: usize| bytes.next_multiple_of(granule);
        for (granule, d) in [(1, 64), (32, 64), (64, 64), (64, 80), (128, 64)] {
            let half = d / 2;
            let mut reads = Reads::new(granule);
            reads.rows(pair, d, &attended, &whole, &ranked);
            // Least and step of every channel, in 16 bits, of keys and of values.
            let ranges = whole_array(8 * d, granule);
            let upper = naive(granule, &spans(&attended, &ranked, 2 * half, half));
            let lower = naive(granule, &spans(&whole, &ranked, 2 * half, half));
            assert_eq!(reads.moved_bytes, Some(ranges + upper + lower), "{granule} {d}");
            let mut reads = Reads::new(granule);
            reads.rows(keys_only, d, &attended, &whole, &ranked);
            let ranges = whole_array(4 * d, granule);
            let upper = naive(granule, &spans(&attended, &ranked, half, half));
            let lower = naive(granule, &spans(&whole, &ranked, half, half));
            let values = naive(granule, &spans(&attended, &[], 2 * d, 0));
            assert_eq!(
                reads.moved_bytes,
                Some(ranges + upper + lower + values),
                "{granule} {d}"
            );
        }
    }

    #[test]
    fn what_only_a_device_knows_stays_unknown() {
        let mut reads = Reads::new(32);
        reads.array_held(10, 100);
        assert_eq!((reads.index_bytes, reads.moved_bytes), (Some(10), Some(128)));
        reads.unlisted(4);
        reads.array(32);
        assert_eq!((reads.index_bytes, reads.moved_bytes), (Some(46), None));
        reads.unknown();
        reads.array(32);
        reads.scratch(8);
        assert_eq!((reads.index_bytes, reads.moved_bytes), (None, None));
        assert_eq!(reads.scratch_bytes, Some(8));
    }
}
