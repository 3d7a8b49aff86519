//! The candidates, grouped by codeword: their counts, and lists of their positions.

use std::ops::Range;

use super::quotas::Quotas;
use crate::kv::lines::grow;
use crate::method::best::Places;
use crate::method::reads::Reads;

/// Positions per chunk: together with the index of the next chunk they fill half a cache line.
const CHUNK: usize = 7;
/// With fewer candidates per codeword than this, the codes are scanned, because most of a list's chunks would be nearly
/// empty.
const LEAST_PER_CODEWORD: usize = 4;
/// If more than one in this many candidates is chosen, the codes are scanned.
const SCANNED_SHARE: usize = 3;

/// Some positions of one codeword, and the index of the next chunk.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct ListChunk {
    positions: [u32; CHUNK],
    next: u32,
}

const EMPTY: ListChunk = ListChunk {
    positions: [0; CHUNK],
    next: 0,
};

/// The list of one codeword's positions.
#[derive(Clone, Copy, Default)]
struct List {
    first: u32,
    last: u32,
    /// How many positions at the start of the first chunk are no longer candidates.
    skip: u32,
    count: u32,
}

/// Lists of ascending positions in linked chunks, so that a list need not be moved when it grows.
#[derive(Clone, Default)]
struct LinkedLists {
    heads: Vec<List>,
    chunks: Vec<ListChunk>,
    free: Vec<u32>,
}

impl LinkedLists {
    /// Makes the lists from the codes `[n]`; `codes[0]` is at position `first`, and `counts` `[M]` is the number of
    /// tokens of each codeword. The chunks of a list are consecutive.
    fn new(codes: &[u16], first: usize, counts: &[u32]) -> Self {
        let mut chunks = 0u32;
        let mut head = |count: &u32| {
            let own = count.div_ceil(CHUNK as u32);
            chunks += own;
            List {
                first: chunks - own,
                last: (chunks - own) + own.saturating_sub(1),
                skip: 0,
                count: 0,
            }
        };
        let heads = counts.iter().map(&mut head).collect();
        let chunk = |i: u32| ListChunk { next: i + 1, ..EMPTY };
        let mut lists = Self {
            heads,
            chunks: (0..chunks).map(chunk).collect(),
            free: Vec::new(),
        };
        for (position, code) in (first as u32..).zip(codes) {
            let head = &mut lists.heads[usize::from(*code)];
            let at = head.count as usize;
            head.count += 1;
            lists.chunks[head.first as usize + at / CHUNK].positions[at % CHUNK] = position;
        }
        lists
    }

    fn push(&mut self, code: u16, position: usize) {
        let Self { heads, chunks, free } = self;
        let head = &mut heads[usize::from(code)];
        let at = match head.count {
            0 => 0,
            count => (head.skip + count) as usize % CHUNK,
        };
        if at == 0 {
            let chunk = free.pop().unwrap_or_else(|| {
                grow(chunks, 1).push(EMPTY);
                (chunks.len() - 1) as u32
            });
            match head.count {
                0 => (head.first, head.skip) = (chunk, 0),
                _ => chunks[head.last as usize].next = chunk,
            }
            head.last = chunk;
        }
        chunks[head.last as usize].positions[at] = position as u32;
        head.count += 1;
    }

    /// Removes the first position of a list, which is not empty.
    fn pop(&mut self, code: u16) {
        let head = &mut self.heads[usize::from(code)];
        head.skip += 1;
        head.count -= 1;
        if head.count == 0 || head.skip as usize == CHUNK {
            self.free.push(head.first);
            (head.first, head.skip) = (self.chunks[head.first as usize].next, 0);
        }
    }

    /// Calls `each` with the first `count` positions of a list, which must have at least `count`, and `read` with each
    /// chunk that holds them.
    fn first(&self, code: usize, count: usize, mut each: impl FnMut(u32), mut read: impl FnMut(u32)) {
        let head = &self.heads[code];
        let (mut chunk, mut skip, mut left) = (head.first, head.skip as usize, count);
        while left > 0 {
            let of = &self.chunks[chunk as usize];
            read(chunk);
            let here = &of.positions[skip..];
            here.iter().take(left).for_each(|p| each(*p));
            left = left.saturating_sub(here.len());
            (chunk, skip) = (of.next, 0);
        }
    }
}

/// Returns whether a choice of `chosen` of `n` candidates, with `size` codewords, reads lists instead of scanning the
/// codes.
fn is_listed(n: usize, size: usize, chosen: usize) -> bool {
    n >= LEAST_PER_CODEWORD * size && chosen * SCANNED_SHARE <= n
}

/// The candidates, grouped by codeword.
#[derive(Clone)]
pub(super) struct Postings {
    /// The range of the candidates' positions.
    range: Range<usize>,
    /// Number of candidates per codeword, `[M]`.
    counts: Vec<u32>,
    /// The lists; made when a choice first reads them.
    lists: Option<LinkedLists>,
    /// The chunks of the lists that the last choice read; `None` if it scanned the codes.
    read: Option<Vec<u32>>,
}

impl Postings {
    /// Makes empty lists for `size` codewords.
    pub fn new(size: usize) -> Self {
        Self {
            range: 0..0,
            counts: vec![0; size],
            lists: None,
            read: None,
        }
    }

    /// Returns the number of candidates of each codeword: `[M]`.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// Estimates the bytes of `lists` lists that together hold `n` positions: the last chunk of each is half full.
    pub fn bytes_for(n: usize, lists: usize) -> usize {
        let listed = n >= LEAST_PER_CODEWORD * lists;
        let chunks = if listed { n / CHUNK + lists / 2 } else { 0 };
        chunks * size_of::<ListChunk>()
    }

    /// Returns the bytes of the lists.
    pub fn bytes(&self) -> usize {
        let of = |lists: &LinkedLists| {
            lists.chunks.capacity() * size_of::<ListChunk>() + lists.free.capacity() * 4
        };
        self.lists.as_ref().map_or(0, of)
    }

    /// Returns whether the last choice scanned the codes of the candidates instead of reading lists.
    pub fn has_scanned(&self) -> bool {
        self.read.is_none()
    }

    /// Adds what the last choice read besides codes: the counts and, unless it scanned the codes, chunks of lists.
    pub fn add_reads(&self, reads: &mut Reads) {
        // The paper's index has no counts, which follow from its codes.
        reads.array_held(0, size_of_val(&self.counts[..]));
        if let Some(chunks) = &self.read {
            let mut chunks: Vec<usize> = chunks.iter().map(|chunk| *chunk as usize).collect();
            chunks.sort_unstable();
            reads.items(size_of::<ListChunk>(), chunks);
            reads.scratch(8 * self.range.len().div_ceil(64));
        }
    }

    /// Updates counts and lists to cover `candidates`; `codes` holds the codes of all positions.
    pub fn cover(&mut self, candidates: &Range<usize>, codes: &[u16]) {
        self.read = None;
        let old = self.range.clone();
        if candidates.start < old.start || candidates.end < old.end || candidates.start > old.end {
            self.counts.fill(0);
            self.lists = None;
            self.range = candidates.start..candidates.start;
        }
        for (p, code) in (self.range.end..).zip(&codes[self.range.end..candidates.end]) {
            self.counts[usize::from(*code)] += 1;
            if let Some(lists) = &mut self.lists {
                lists.push(*code, p);
            }
        }
        for code in &codes[self.range.start..candidates.start] {
            self.counts[usize::from(*code)] -= 1;
            if let Some(lists) = &mut self.lists {
                lists.pop(*code);
            }
        }
        self.range = candidates.clone();
    }

    /// Returns the candidates that the quotas take, ascending; `codes` holds the codes of all positions.
    pub fn positions(&mut self, quotas: Quotas, codes: &[u16]) -> Vec<u32> {
        let (n, chosen) = (self.range.len(), quotas.total());
        if !is_listed(n, self.counts.len(), chosen) {
            return quotas.positions(&codes[self.range.clone()], self.range.start as u32);
        }
        let (first, counts) = (self.range.start, &self.counts);
        let lists = self
            .lists
            .get_or_insert_with(|| LinkedLists::new(&codes[self.range.clone()], first, counts));
        let (mut places, mut read) = (Places::new(n), Vec::new());
        for (code, take) in quotas.takes() {
            let insert = |p| places.insert(p as usize - first);
            lists.first(code, take, insert, |chunk| read.push(chunk));
        }
        self.read = Some(read);
        places.ascending(first as u32)
    }

    /// Returns the first candidate of a codeword, if it has one.
    pub fn first_of(&self, code: usize, codes: &[u16]) -> Option<u32> {
        if let (Some(lists), 1..) = (&self.lists, self.counts[code]) {
            let mut found = None;
            lists.first(code, 1, |p| found = Some(p), |_| {});
            return found;
        }
        let mut codes = codes[self.range.clone()].iter();
        let place = codes.position(|c| usize::from(*c) == code);
        place.map(|place| (self.range.start + place) as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::testing::numbers;

    /// Makes codes that use some codewords more often than others, and never use the last one.
    fn codes(n: usize, size: usize, seed: u32) -> Vec<u16> {
        let mut number = numbers(seed);
        let mut next = || (number() >> 8) as usize;
        (0..n)
            .map(|_| (next() % (1 + next() % (size - 1))) as u16)
            .collect()
    }

    #[test]
    fn lists_follow_the_candidates() {
        let codes = &codes(3000, 9, 1)[..];
        let mut postings = Postings::new(9);
        let (mut start, mut end) = (4, 400);
        for step in 0..2000 {
            postings.cover(&(start..end), codes);
            let listed = |c: usize| {
                (start..end)
                    .filter(move |p| usize::from(codes[*p]) == c)
                    .map(|p| p as u32)
            };
            for code in 0..9 {
                assert_eq!(postings.counts()[code] as usize, listed(code).count());
                assert_eq!(
                    postings.first_of(code, codes),
                    listed(code).next(),
                    "{step} {code}"
                );
            }
            let take: Vec<u32> = (0..9)
                .map(|c| postings.counts()[c] * ((step + c as u32) % 4) / 12)
                .collect();
            let mut expected: Vec<u32> = (0..9).flat_map(|c| listed(c).take(take[c] as usize)).collect();
            expected.sort_unstable();
            assert_eq!(
                postings.positions(Quotas::from(take.clone()), codes),
                expected,
                "{step}"
            );
            assert!(postings.lists.is_some());
            // Each list is read from its first position on, chunk by chunk.
            let lists = postings.lists.as_ref().unwrap();
            let expected = take.iter().enumerate().flat_map(|(code, take)| {
                let List { first, skip, .. } = lists.heads[code];
                let chunks = if *take > 0 {
                    (skip + take).div_ceil(CHUNK as u32)
                } else {
                    0
                };
                let next = |chunk: &u32| Some(lists.chunks[*chunk as usize].next);
                std::iter::successors(Some(first), next).take(chunks as usize)
            });
            let expected: BTreeSet<usize> = expected.map(|chunk| chunk as usize).collect();
            let mut reads = Reads::new(64);
            postings.add_reads(&mut reads);
            let lines: BTreeSet<usize> = expected.iter().map(|chunk| chunk / 2).collect();
            let counts = 64 * (4usize * 9).div_ceil(64);
            assert_eq!(reads.index_bytes, Some(32 * expected.len()), "{step}");
            assert_eq!(reads.moved_bytes, Some(64 * lines.len() + counts), "{step}");
            // The range moves as in decoding, with and without a sliding window, and now and then back.
            match step % 500 {
                499 => (start, end) = (0, 300 + step as usize / 4),
                i if i < 200 => end += 1,
                i if i < 300 => (start, end) = (start + 1, end + 1),
                i if i < 320 => start += 9,
                _ => end += 3,
            }
        }
        assert!(end <= codes.len());
    }

    #[test]
    fn a_list_that_runs_empty_starts_anew() {
        let mut postings = Postings::new(2);
        // In turn, codeword 1 has 7, no, and 8 positions.
        let codes: Vec<u16> = [vec![1; 7], vec![0; 30], vec![1; 8], vec![0; 60]].concat();
        for start in 0..60 {
            let range = start..start + 45;
            postings.cover(&range, &codes);
            let ones: Vec<u32> = range.filter(|p| codes[*p] == 1).map(|p| p as u32).collect();
            assert_eq!(
                postings.positions(Quotas::from(vec![0, ones.len() as u32]), &codes),
                ones
            );
        }
        // No more chunks than were ever in use at once, plus one.
        assert!(postings.lists.unwrap().chunks.len() <= 10);
    }
}
