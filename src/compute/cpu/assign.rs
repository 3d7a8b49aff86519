//! The assignment of rows to centroids, and the bounds that tell which rows need another full search.

use rayon::prelude::*;

use super::distances::{squared_distance, squared_distances};
use super::scan::{BestTwo, FEW, Panels, row, scan, score, with_scratch};

/// Rows per task; a constant, because results must not depend on the number of threads.
pub(crate) const CHUNK: usize = 512;

/// The assignment of one row, with a bound that tells whether it needs a full search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Assigned {
    /// The centroid.
    pub code: u32,
    /// The score of that centroid.
    pub score: f32,
    /// An upper bound on the score of every other centroid that has stayed in place since the bound was set.
    pub rival: f32,
    /// The squared distance to the centroid.
    pub distance: f32,
}

impl Assigned {
    /// A row that has no centroid yet.
    pub const NOWHERE: Self = Self {
        code: 0,
        score: f32::NEG_INFINITY,
        rival: f32::NEG_INFINITY,
        distance: f32::INFINITY,
    };

    /// Moves the row to the best of some other centroids if that one scores higher, and updates the bound.
    fn challenge(&mut self, best: &BestTwo) {
        if best.score > self.score || (best.score == self.score && best.id < self.code) {
            self.rival = self.score.max(best.second);
            (self.code, self.score) = (best.id, best.score);
        } else {
            self.rival = self.rival.max(best.score);
        }
    }
}

/// Assigns rows to the new centroids `fresh`, numbered from `first`, where these are nearer than the row's own
/// centroid.
pub(super) fn absorb(x: &[f32], dim: usize, rows: &mut [Assigned], fresh: &[f32], first: u32) {
    let ids = (first..first + (fresh.len() / dim) as u32).collect();
    let panels = Panels::pack(fresh, dim, first, ids);
    let chunks = x.par_chunks(CHUNK * dim).zip(rows.par_chunks_mut(CHUNK));
    chunks.for_each(|(x, rows)| {
        let all: Vec<u32> = (0..rows.len() as u32).collect();
        with_scratch(|scratch| {
            scan(x, &all, &panels, scratch);
            for ((x, r), best) in x.chunks_exact(dim).zip(rows).zip(&scratch.out) {
                let before = r.code;
                r.challenge(best);
                if r.code != before || first == 0 {
                    r.distance = squared_distance(x, row(fresh, r.code - first, dim));
                }
            }
        });
    });
}

/// Assigns every row to its nearest centroid; `moved` says which centroids have moved since the last assignment.
///
/// The result is that of a full search for every row, bit for bit. If a row's own centroid stayed in place, or moved
/// but still scores above `rival`, no centroid that stayed in place is better, and the row is compared with the moved
/// centroids only.
pub(super) fn reassign(x: &[f32], dim: usize, rows: &mut [Assigned], centroids: &[f32], moved: &[bool]) {
    if moved.len() <= FEW {
        return search_all(x, dim, rows, centroids);
    }
    let ids = 0..moved.len() as u32;
    let all = Panels::pack(centroids, dim, 0, ids.clone().collect());
    let some = Panels::pack(centroids, dim, 0, ids.filter(|&c| moved[c as usize]).collect());
    let chunks = x.par_chunks(CHUNK * dim).zip(rows.par_chunks_mut(CHUNK));
    chunks.for_each(|(x, rows)| {
        let before: Vec<u32> = rows.iter().map(|r| r.code).collect();
        let (mut against_all, mut against_moved) = (Vec::new(), Vec::new());
        for (i, (x, r)) in (0..).zip(x.chunks_exact(dim).zip(rows.iter_mut())) {
            let own_moved = moved[r.code as usize];
            if own_moved {
                r.score = score(x, row(centroids, r.code, dim), all.bias(r.code as usize));
            }
            // A centroid that stayed in place has already won its ties; a moved centroid may lose a tie now.
            let safe = r.score > r.rival || (r.score == r.rival && !own_moved);
            if safe {
                &mut against_moved
            } else {
                &mut against_all
            }
            .push(i);
        }
        with_scratch(|scratch| {
            scan(x, &against_all, &all, scratch);
            for (&i, best) in against_all.iter().zip(&scratch.out) {
                let r = &mut rows[i as usize];
                (r.code, r.score, r.rival) = (best.id, best.score, best.second);
            }
            scan(x, &against_moved, &some, scratch);
            for (&i, best) in against_moved.iter().zip(&scratch.out) {
                let r = &mut rows[i as usize];
                if moved[r.code as usize] {
                    // The row's own centroid is among the moved ones, so the best of the moved centroids is the best of
                    // all.
                    (r.code, r.score, r.rival) = (best.id, best.score, r.rival.max(best.second));
                } else {
                    r.challenge(best);
                }
            }
        });
        for ((x, r), before) in x.chunks_exact(dim).zip(rows).zip(before) {
            if r.code != before || moved[r.code as usize] {
                r.distance = squared_distance(x, row(centroids, r.code, dim));
            }
        }
    });
}

/// Assigns every row by a full search: with few centroids, this takes less time than finding out which rows need it.
fn search_all(x: &[f32], dim: usize, rows: &mut [Assigned], centroids: &[f32]) {
    let panels = Panels::pack(centroids, dim, 0, (0..(centroids.len() / dim) as u32).collect());
    let all: Vec<u32> = (0..CHUNK as u32).collect();
    let chunks = x.par_chunks(CHUNK * dim).zip(rows.par_chunks_mut(CHUNK));
    chunks.for_each(|(x, rows)| {
        let (mut codes, mut distances) = ([0; CHUNK], [0.0; CHUNK]);
        let (codes, distances) = (&mut codes[..rows.len()], &mut distances[..rows.len()]);
        with_scratch(|scratch| {
            scan(x, &all[..rows.len()], &panels, scratch);
            for (code, best) in codes.iter_mut().zip(&scratch.out) {
                *code = best.id;
            }
            squared_distances(x, dim, centroids, codes, distances);
            for ((r, best), distance) in rows.iter_mut().zip(&scratch.out).zip(distances) {
                *r = Assigned {
                    code: best.id,
                    score: best.score,
                    rival: best.second,
                    distance: *distance,
                };
            }
        });
    });
}

/// Finds the nearest centroid of each row of a chunk `x`, `[.., d]`.
pub(crate) fn search(x: &[f32], panels: &Panels, codes: &mut [u32]) {
    let rows: Vec<u32> = (0..codes.len() as u32).collect();
    with_scratch(|scratch| {
        scan(x, &rows, panels, scratch);
        for (code, best) in codes.iter_mut().zip(&scratch.out) {
            *code = best.id;
        }
    });
}

/// Computes the squared distances of the rows of a chunk `x`, `[.., d]`, to the centroids that their codes name.
pub(crate) fn distances_to(x: &[f32], dim: usize, centroids: &[f32], codes: &[u32], distances: &mut [f32]) {
    squared_distances(x, dim, centroids, codes, distances);
}
