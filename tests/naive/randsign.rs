//! Votes over the signs of randomly rotated keys.

use std::sync::Arc;

use kvsmith::internal::method::randsign::{RandSign, RandomRotation};

use super::head::cases;
use super::*;

/// Checks random histories with rotations of several seeds.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _| {
        let rotation = RandomRotation::new(place.head_dim, rng.r#gen());
        let model = NaiveRandSign::new(&rotation, place.head_dim);
        (RandSign::new(Arc::new(rotation)), model)
    };
    cases(500, make, |_| ());
}

/// Channels of a block.
const BLOCK: usize = 8;
/// The share of the candidates in each tier, in thousandths. No history is as long as 5,000 positions, so the last tier
/// holds half of them.
const TIERS: [usize; 6] = [25, 75, 150, 250, 375, 500];

struct NaiveRandSign {
    /// What each channel of a row adds to a channel of the rotated row, `[d][d]`, the channels of the rotated row first.
    matrix: Matrix,
    /// Per position, the numbers of the patterns, and whether a channel may have the other sign in f32.
    codes: Vec<(Vec<usize>, bool)>,
}

impl NaiveRandSign {
    /// Takes the signs of the channels from the program, and everything else from the definition: an entry of a Hadamard
    /// matrix is negative if the numbers of its row and column have an odd number of bits in common.
    fn new(rotation: &RandomRotation, d: usize) -> Self {
        let run = (0..)
            .map(|i| 1 << i)
            .take_while(|size| d.is_multiple_of(*size))
            .last()
            .unwrap();
        let sign = |i: usize| {
            let mut image = vec![0.0; d];
            image[i] = 1.0;
            rotation.apply(&mut image);
            if image[i / run * run] < 0.0 { -1.0 } else { 1.0 }
        };
        let signs: Vec<f64> = (0..d).map(sign).collect();
        let entry = |i: usize, j: usize| match (i / run == j / run, ((i % run) & (j % run)).count_ones() % 2)
        {
            (false, _) => 0.0,
            (true, 0) => signs[i] / (run as f64).sqrt(),
            (true, _) => -signs[i] / (run as f64).sqrt(),
        };
        Self {
            matrix: (0..d).map(|j| (0..d).map(|i| entry(i, j)).collect()).collect(),
            codes: Vec::new(),
        }
    }

    /// A rotated row, and how far each channel may be off in f32.
    fn rotated(&self, x: &[f64]) -> Vec<(f64, f64)> {
        let of = |row: &Vec<f64>| (dot(x, row), dot_bound(x, row));
        self.matrix.iter().map(of).collect()
    }

    /// The numbers of a key's patterns, and whether a channel may have the other sign.
    fn code(&self, key: &[f64]) -> (Vec<usize>, bool) {
        let rotated = self.rotated(key);
        let bit = |(i, (x, _)): (usize, &(f64, f64))| usize::from(*x >= 0.0) << i;
        let blocks = rotated.chunks(BLOCK);
        let code = blocks
            .map(|block| block.iter().enumerate().map(bit).sum())
            .collect();
        (
            code,
            rotated.iter().any(|(x, bound)| x.abs() <= *bound && *bound > 0.0),
        )
    }

    /// How many tiers each pattern of a block is in, given how many candidates have it, and whether that is certain.
    fn votes(block: &[(f64, f64)], counts: &[usize], n: usize) -> (Vec<usize>, bool) {
        let sign = |number: usize, i: usize| if number >> i & 1 == 1 { 1.0 } else { -1.0 };
        let product = |number: usize| {
            block
                .iter()
                .enumerate()
                .map(|(i, (q, _))| sign(number, i) * q)
                .sum::<f64>()
        };
        let products: Vec<f64> = (0..1 << block.len()).map(product).collect();
        let mut order: Vec<usize> = (0..products.len()).collect();
        order.sort_by(|a, b| products[*b].total_cmp(&products[*a]).then(a.cmp(b)));
        let size: f64 = block.iter().map(|(q, bound)| bound + 16.0 * UNIT * q.abs()).sum();
        let sure = order
            .windows(2)
            .all(|w| products[w[0]] - products[w[1]] > 2.0 * size);
        let mut votes = vec![0; order.len()];
        for (rank, number) in order.iter().enumerate() {
            let better: usize = order[..rank].iter().map(|number| counts[*number]).sum();
            // A tier is full once its patterns have n * tier / 1000 keys.
            votes[*number] = TIERS.iter().filter(|tier| better * 1000 < n * **tier).count();
        }
        (votes, sure)
    }
}

impl Model for NaiveRandSign {
    type Program = RandSign;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let mut keys: Vec<&[f64]> = Vec::new();
        for event in &history.events {
            match event {
                Event::Turn(turn) => keys.extend(turn.keys[turn.first..].iter().map(Vec::as_slice)),
                Event::Decode(step) => keys.push(&step.key),
            }
        }
        let candidates: Vec<usize> = step.candidates.clone().collect();
        for key in &keys[self.codes.len()..] {
            self.codes.push(self.code(key));
        }
        let codes = &self.codes[step.candidates.clone()];
        let mut unsure = codes.iter().any(|(_, unsure)| *unsure);
        let mut sums = vec![0; codes.len()];
        for (j, block) in self.rotated(&step.mean_query()).chunks(BLOCK).enumerate() {
            let mut counts = vec![0; 1 << block.len()];
            codes.iter().for_each(|(code, _)| counts[code[j]] += 1);
            let (votes, sure) = Self::votes(block, &counts, codes.len());
            unsure |= !sure;
            sums.iter_mut()
                .zip(codes)
                .for_each(|(sum, (code, _))| *sum += votes[code[j]]);
        }
        let item = |(position, sum): (&usize, &usize)| Item {
            position: *position,
            score: *sum as f64,
            bound: 0.0,
            class: *sum,
        };
        let items: Vec<Item> = candidates.iter().zip(&sums).map(item).collect();
        match (check_best(&items, &step.chosen(), step.budget), unsure) {
            (Ok(()), _) => Ok(Agreement::Same),
            (Err(_), true) => Ok(Agreement::NearTie),
            (Err(e), false) => Err(e),
        }
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let blocks = history.place.head_dim.div_ceil(BLOCK);
        let codes = Array::items(blocks, history.step().candidates.clone());
        // A count of 4 bytes for each of 256 patterns.
        Some(vec![codes, Array::whole(4 * 256 * blocks)])
    }
}
