//! How many tokens of each codeword a choice takes.

use ndarray::ArrayView2;

use super::postings::Postings;
use crate::method::best::best_positions;

/// Number of classes into which scores are sorted. Tokens are counted per class, so that only some codewords need to be
/// sorted.
const CLASSES: usize = 1024;

/// What limits a choice.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    /// The union over the query heads has at most this many tokens.
    Union(usize),
    /// Each query head takes this many tokens.
    PerQueryHead(u64),
}

/// Returns the positions of the tokens with the best codewords, ascending; `codes[0]` is at position `first`.
///
/// # Shapes
/// scores `[r,M]`; counts `[M]`, the number of tokens of each codeword.
pub fn choose(scores: ArrayView2<f32>, counts: &[u32], codes: &[u16], first: u32, bound: Bound) -> Vec<u32> {
    choose_in_runs(scores, counts, &[(first, codes)], bound)
}

/// Makes the choice of [`choose`] among the tokens of k runs of positions, where each run has scores of its own. Pairs
/// of run and codeword are ranked, numbered run by run, so that the earlier run wins a tie.
///
/// # Shapes
/// scores `[r,k M]`; counts `[k M]`; runs `[k]`, ascending, each with the position of its first code.
pub(super) fn choose_in_runs(
    scores: ArrayView2<f32>,
    counts: &[u32],
    runs: &[(u32, &[u16])],
    bound: Bound,
) -> Vec<u32> {
    let size = counts.len() / runs.len();
    match quotas(scores, counts, bound) {
        Ok(quotas) => {
            let runs = quotas.by_run(size).zip(runs);
            runs.flat_map(|(quotas, (first, codes))| quotas.positions(codes, *first))
                .collect()
        }
        Err(budget) => best_of_union(scores, counts, budget, |c| {
            let (first, codes) = runs[c / size];
            let place = codes.iter().position(|code| usize::from(*code) == c % size);
            place.map(|place| first + place as u32)
        }),
    }
}

/// Makes the same choice as [`choose_in_runs`] among the tokens of `postings`, which has one entry per run; `codes`
/// holds the codes of all positions.
pub(super) fn choose_listed(
    scores: ArrayView2<f32>,
    postings: &mut [Postings],
    codes: &[u16],
    bound: Bound,
) -> Vec<u32> {
    let counts = postings.iter().map(Postings::counts).collect::<Vec<_>>().concat();
    let size = counts.len() / postings.len();
    match quotas(scores, &counts, bound) {
        Ok(quotas) => {
            let runs = quotas.by_run(size).zip(postings);
            runs.flat_map(|(quotas, postings)| postings.positions(quotas, codes))
                .collect()
        }
        Err(budget) => best_of_union(scores, &counts, budget, |c| {
            postings[c / size].first_of(c % size, codes)
        }),
    }
}

/// Returns the quotas within a bound; if not even k = 1 fits the budget, returns the budget as the error.
fn quotas(scores: ArrayView2<f32>, counts: &[u32], bound: Bound) -> Result<Quotas, usize> {
    match bound {
        Bound::PerQueryHead(k) => Ok(Quotas::for_k(&ranks(scores, counts, k), counts, k)),
        Bound::Union(budget) => Quotas::within(scores, counts, budget).ok_or(budget),
    }
}

/// The number of tokens of each codeword that are in the union of the query heads' top-k sets. If scores also depend on
/// the bucket of distances, read "codeword" as "pair of bucket and codeword".
///
/// For query head a, let R_a(c) be the number of tokens whose codewords rank above c (by score; the lower codeword wins
/// a tie), rho(c) = min over a of R_a(c), and o(j) the rank of token j by position within its codeword. The union of
/// the top-k sets is { j : rho(code_j) + o(j) < k }, so its size follows from the counts alone.
///
/// # Source
/// Ours; the paper and its code score every token and take the union of the lists.
pub struct Quotas {
    take: Vec<u32>,
}

impl Quotas {
    /// Returns the quotas for the largest k whose union has at most `budget` tokens; `None` if not even k = 1
    /// fits.
    ///
    /// # Shapes
    /// scores `[r,M]`, counts `[M]`.
    pub fn within(scores: ArrayView2<f32>, counts: &[u32], budget: usize) -> Option<Self> {
        let total: u64 = counts.iter().map(|c| u64::from(*c)).sum();
        // A union of top-k sets has at least k tokens, so k is at most the budget.
        let most = total.min(budget as u64);
        let ranks = ranks(scores, counts, most);
        let size = |k: u64| -> u64 { ranks.iter().map(|(c, rho)| taken(*rho, counts[*c], k)).sum() };
        // The size grows with k, so a bisection finds the last k that fits.
        let (mut fits, mut too_many) = (0, most + 1);
        while too_many - fits > 1 {
            let k = (fits + too_many) / 2;
            if size(k) <= budget as u64 {
                fits = k;
            } else {
                too_many = k;
            }
        }
        (fits > 0).then(|| Self::for_k(&ranks, counts, fits))
    }

    /// Returns the quotas for k, given the codewords and their rho.
    fn for_k(ranks: &[(usize, u64)], counts: &[u32], k: u64) -> Self {
        let mut take = vec![0; counts.len()];
        for (c, rho) in ranks {
            take[*c] = taken(*rho, counts[*c], k) as u32;
        }
        Self { take }
    }

    /// Divides the quotas into those of each run, which has `size` codewords.
    fn by_run(&self, size: usize) -> impl Iterator<Item = Self> {
        self.take.chunks(size).map(|take| Self { take: take.to_vec() })
    }

    /// Returns the number of tokens taken.
    pub fn total(&self) -> usize {
        self.take.iter().map(|t| *t as usize).sum()
    }

    /// Returns the codewords of which tokens are taken, each with the number of tokens taken.
    pub fn takes(&self) -> impl Iterator<Item = (usize, usize)> {
        let takes = self.take.iter().map(|t| *t as usize).enumerate();
        takes.filter(|(_, take)| *take > 0)
    }

    /// Returns the positions of the tokens taken, ascending; `codes[0]` is at position `first`.
    pub(super) fn positions(mut self, codes: &[u16], first: u32) -> Vec<u32> {
        let mut out = Vec::with_capacity(self.total());
        for (p, code) in (first..).zip(codes) {
            let left = &mut self.take[*code as usize];
            if *left > 0 {
                *left -= 1;
                out.push(p);
            }
        }
        out
    }
}

#[cfg(test)]
impl From<Vec<u32>> for Quotas {
    fn from(take: Vec<u32>) -> Self {
        Self { take }
    }
}

/// Returns the codewords whose rho is below `most`, each with its rho: see [`Quotas`].
///
/// # Shapes
/// scores `[r,M]`, counts `[M]`.
fn ranks(scores: ArrayView2<f32>, counts: &[u32], most: u64) -> Vec<(usize, u64)> {
    let mut rho = vec![u64::MAX; counts.len()];
    for row in scores.rows() {
        let mut above = 0;
        for c in best_codewords(&row.to_vec(), counts, most) {
            if above >= most {
                break;
            }
            rho[c] = rho[c].min(above);
            above += u64::from(counts[c]);
        }
    }
    let ranked = rho.into_iter().enumerate();
    ranked.filter(|(_, rho)| *rho != u64::MAX).collect()
}

/// Returns the best codewords that have tokens, by score; the lower codeword wins a tie. Returns all of them, or as
/// many of the best as together have `most` tokens.
fn best_codewords(row: &[f32], counts: &[u32], most: u64) -> Vec<usize> {
    let used = (0..counts.len()).filter(|c| counts[*c] > 0);
    let mut order: Vec<usize> = match classes(row, counts) {
        Some(classes) => {
            let mut tokens = [0u64; CLASSES];
            for (class, count) in classes.iter().zip(counts) {
                tokens[usize::from(*class) % CLASSES] += u64::from(*count);
            }
            let mut above = 0;
            let enough = tokens.iter().rposition(|tokens| {
                above += tokens;
                above >= most
            });
            let from = enough.unwrap_or(0);
            used.filter(|c| usize::from(classes[*c]) >= from).collect()
        }
        None => used.collect(),
    };
    order.sort_unstable_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
    order
}

/// Sorts scores into classes, which are equal intervals between the smallest and the largest score; the last class is
/// the best. `None` if a score is not finite or all scores are equal.
fn classes(row: &[f32], counts: &[u32]) -> Option<Vec<u16>> {
    let (mut low, mut high, mut is_finite) = (f32::INFINITY, f32::NEG_INFINITY, true);
    for (x, count) in row.iter().zip(counts) {
        if *count > 0 {
            (low, high) = (low.min(*x), high.max(*x));
            is_finite &= x.is_finite();
        }
    }
    let scale = (CLASSES - 1) as f32 / (high - low);
    let class = |x: &f32| ((x - low) * scale).clamp(0.0, (CLASSES - 1) as f32) as u16;
    (is_finite && scale.is_finite() && scale > 0.0).then(|| row.iter().map(class).collect())
}

/// Returns how many of a codeword's `count` tokens are in the union of the top-k sets.
fn taken(rho: u64, count: u32, k: u64) -> u64 {
    k.saturating_sub(rho).min(u64::from(count))
}

/// Returns the best `budget` tokens, by their highest scores, among each query head's single best token. `first_of`
/// returns the first token of a codeword.
fn best_of_union(
    scores: ArrayView2<f32>,
    counts: &[u32],
    budget: usize,
    first_of: impl Fn(usize) -> Option<u32>,
) -> Vec<u32> {
    let mut best: Vec<(f32, u32)> = Vec::new();
    for row in scores.rows() {
        let used = (0..counts.len()).filter(|c| counts[*c] > 0);
        let top = used.min_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        if let Some((c, p)) = top.and_then(|c| Some((c, first_of(c)?))) {
            let highest = scores.column(c).fold(f32::NEG_INFINITY, |m, s| m.max(*s));
            best.push((highest, p));
        }
    }
    // Equal positions have equal highest scores, whichever query head they come from.
    best.sort_unstable_by_key(|(_, p)| *p);
    best.dedup_by_key(|(_, p)| *p);
    best_positions(best, budget)
}
