"""Statistics of paired losses: intervals from resamples of blocks, p-values of sign flips, and Holm's correction."""

import numpy as np

SEED = 20262
RESAMPLES = 2000
# Fewer blocks or texts give no interval.
FEWEST = 20
# Blocks up to which every combination of signs is tried.
EXACT = 20


def picked(count, seed=SEED):
    """Return the resamples of `count` blocks, as indices [RESAMPLES, count]."""
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def interval(of):
    """Return the 95% interval of a statistic of resampled blocks; `of` takes indices [RESAMPLES, count] and a count."""
    return [float(end) for end in np.percentile(of, [2.5, 97.5])]


def mean_interval(losses):
    """Return the 95% interval of the mean, or None for too few blocks."""
    losses = np.asarray(losses, float)
    return interval(losses[picked(len(losses))].mean(1)) if len(losses) >= FEWEST else None


def fits_interval(losses):
    """Return the 95% interval of the mean over fits and blocks, from resamples of both: losses [fits, blocks]."""
    losses = np.asarray(losses, float)
    fits, blocks = losses.shape
    if blocks < FEWEST:
        return None
    rows = np.random.default_rng(SEED + 1).integers(fits, size=(RESAMPLES, fits))
    return interval(losses[rows[:, :, None], picked(blocks)[:, None, :]].mean((1, 2)))


def paired(losses, reference):
    """Return the mean over blocks of losses - reference, and its 95% interval, or None for too few blocks."""
    difference = np.asarray(losses, float) - np.asarray(reference, float)
    return float(difference.mean()), mean_interval(difference)


def ratio_interval(losses, reference):
    """Return the 95% interval of the ratio of two means over the same blocks, or None for too few blocks."""
    losses, reference = np.asarray(losses, float), np.asarray(reference, float)
    if len(losses) < FEWEST:
        return None
    rows = picked(len(losses))
    return interval(losses[rows].mean(1) / reference[rows].mean(1))


def sign_flip(difference):
    """Return the two-sided p-value of a mean difference: the share of all changes of signs with a mean at least as far from 0.

    More than EXACT blocks are flipped at random.
    """
    difference = np.asarray(difference, float)
    if len(difference) <= EXACT:
        sums = np.zeros(1)
        for value in difference:
            sums = np.concatenate([sums + value, sums - value])
    else:
        signs = np.random.default_rng(SEED).choice([-1.0, 1.0], size=(100_000, len(difference)))
        sums = np.append(signs @ difference, difference.sum())
    # Sums of the same terms in another order differ by rounding.
    least = abs(difference.sum()) - 1e-12 * np.abs(difference).sum()
    return float((np.abs(sums) >= least).mean())


def holm(values):
    """Return the p-values of several claims corrected by Holm's method."""
    order = np.argsort(values, kind="stable")
    corrected, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


def largest_share(difference):
    """Return the share of the sum of the differences that the largest of them makes; above a half, one block makes the mean."""
    difference = np.asarray(difference, float)
    total = difference.sum()
    if total == 0:
        return 0.0
    # Of the sum's own sign, so that the share of a block is positive.
    return float((difference / total).max())
