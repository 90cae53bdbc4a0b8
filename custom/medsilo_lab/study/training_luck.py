"""Estimate the between-seed variance of a difference between two configurations, from all configurations of a study."""

import numpy as np
import scipy

from medsilo_lab.study.law import Variance

# significance level of the test that excludes configurations which vary more than all other configurations
UNSTEADY = 0.02


def pooled_luck(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the between-seed variance of a difference between two configurations, and its degrees of freedom. Also
    return a mask of the configurations for which the variance is valid.

    All configurations use the same seeds, so if a seed changes all scores equally, the change cancels in differences.
    The variance is the residual variance of a repeated-measures analysis of variance with configurations and seeds
    (Winer 1971). The estimate assumes that configurations have similar variances. An F test therefore compares the
    variance of each configuration with the residual variance of all other configurations. If the variance of a
    configuration is significantly larger, the configuration is excluded from the estimate. If the observed between-seed
    variance of a difference is larger than the estimated variance, the function `compare` uses the observed variance.

    Args:
        scores: [..., configurations, seeds]
    """
    rows, seeds = scores.shape[-2:]
    steady = np.ones(scores.shape[:-1], dtype=bool)
    for row in range(rows) if rows > 2 and seeds > 1 else ():
        others = np.delete(scores, row, axis=-2)
        squares, degrees = _residual(others, np.ones(others.shape[:-1], dtype=bool))
        own = (scores[..., row, :] - others.mean(-2)).var(-1, ddof=1) * (rows - 1) / rows
        ratio = own * degrees / np.maximum(squares, np.finfo(float).tiny)
        steady[..., row] = scipy.special.fdtrc(seeds - 1, degrees, ratio) >= UNSTEADY
    squares, degrees = _residual(scores, steady)
    return 2 * squares / np.maximum(degrees, 1), degrees, steady


def luck_beside(scores: np.ndarray, base: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each configuration, return the between-seed variance of its difference from the configuration `base`, and the
    degrees of freedom. Also return a mask of the configurations for which the variance is valid.

    The baseline is part of every difference, and may vary more than all other configurations. The baseline's
    between-seed variance around the mean of all other configurations is therefore estimated separately. The variance of
    a difference is the sum of two variances: of the baseline and of the other configuration (Welch, Satterthwaite). In
    simulations, the variance of the baseline was up to ten times the variance of each other configuration. With three
    or more seeds, the 95 % intervals contained the true difference in at least 93 % of simulated studies. With two
    seeds, the 95 % intervals contained the true difference in 91 % of simulated studies.
    """
    others = np.delete(scores, base, axis=-2)
    twice, degrees, steady = pooled_luck(others)
    number, seeds = np.maximum(steady.sum(-1), 1), scores.shape[-1]
    mean = (steady[..., None] * others).sum(-2) / number[..., None]
    own = (scores[..., base, :] - mean).var(-1, ddof=1)
    rest = twice / 2 * (1 - 1 / number)
    parts = own**2 / (seeds - 1) + rest**2 / np.maximum(degrees, 1)
    return own + rest, (own + rest) ** 2 / np.maximum(parts, np.finfo(float).tiny), steady


def luck_of(scores: np.ndarray, base: int) -> list[Variance | None]:
    """For each configuration, return the between-seed variance of its difference from the configuration `base`. For
    `base` itself, and for configurations that are excluded from the estimate, return None.
    """
    variance, degrees, steady = luck_beside(scores, base)
    usable = int(steady.sum()) > 1 and float(variance) > 0
    luck = Variance(float(variance), float(degrees)) if usable else None
    return [luck if alike else None for alike in np.insert(steady, base, False)]


def _residual(scores: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From the scores, subtract the mean of each chosen configuration and the mean of each seed. Return the sum of
    squares of the remainders, and the degrees of freedom.
    """
    weight = chosen[..., None].astype(float)
    number = chosen.sum(-1)
    centred = scores - scores.mean(-1, keepdims=True)
    by_seed = (weight * centred).sum(-2) / np.maximum(number, 1)[..., None]
    squares = (weight * (centred - by_seed[..., None, :]) ** 2).sum((-2, -1))
    return squares, np.maximum(number - 1, 0) * (scores.shape[-1] - 1)
