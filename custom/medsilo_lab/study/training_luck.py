"""Estimate the between-seed variance of a difference between two configurations, from all configurations of a study."""

import numpy as np
import scipy

from medsilo_lab.study.law import Variance

# significance level of the test that excludes a configuration with a larger variance than the other configurations
UNSTEADY = 0.02


def pooled_luck(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the between-seed variance of a difference between two configurations, its degrees of freedom, and a mask
    of the configurations with this variance.

    Configurations are paired by seed, so an effect of a seed on all configurations cancels. The variance is estimated
    from the residual of configurations x seeds in a repeated-measures analysis of variance (Winer 1971). The estimate
    assumes that configurations have similar variances. An F test therefore compares each configuration's variance with
    the residual of all other configurations. A configuration with a much larger variance is excluded from the estimate.
    If the observed variance of a difference is larger than the estimate, `compare` uses the observed variance.

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
    """Return the between-seed variance of each difference from the configuration `base`, its degrees of freedom, and a
    mask of the configurations with this variance.

    Every difference contains the baseline's variance, which may be larger than the variance of other configurations.
    The variance of the baseline's deviation from the mean of all other configurations is therefore estimated
    separately. The baseline's variance is added to the variance of another configuration's deviation from the same mean
    (Welch, Satterthwaite). In simulations, the baseline varied up to ten times as much as other configurations. With
    three or more seeds, 95 % intervals covered the true difference in at least 93 % of simulated studies. With two
    seeds, the intervals covered the true difference in 91 % of simulated studies.
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
    """Return the between-seed variance of each configuration's difference from `base`. Return None for `base` itself,
    and for configurations that are excluded from the estimate.
    """
    variance, degrees, steady = luck_beside(scores, base)
    usable = int(steady.sum()) > 1 and float(variance) > 0
    luck = Variance(float(variance), float(degrees)) if usable else None
    return [luck if alike else None for alike in np.insert(steady, base, False)]


def _residual(scores: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Subtract the means of the chosen configurations, and the means of seeds, from the scores. Return the sum of
    squares of the residuals and its degrees of freedom.
    """
    weight = chosen[..., None].astype(float)
    number = chosen.sum(-1)
    centred = scores - scores.mean(-1, keepdims=True)
    by_seed = (weight * centred).sum(-2) / np.maximum(number, 1)[..., None]
    squares = (weight * (centred - by_seed[..., None, :]) ** 2).sum((-2, -1))
    return squares, np.maximum(number - 1, 0) * (scores.shape[-1] - 1)
