"""Estimate the between-seed variance of a difference between two configurations, from all configurations of a study."""

import numpy as np
import scipy  # loads its parts on first use

from medsilo_lab.study.law import Variance

# a configuration is estimated separately if its variance is larger than expected by chance at this level
UNSTEADY = 0.02


def pooled_luck(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the between-seed variance of a difference between two configurations, its degrees of freedom, and a mask
    of the configurations with this variance.

    scores: [..., configurations, seeds]. Configurations are paired by seed, so effects of a seed on all configurations
    cancel. The variance is the residual of configurations x seeds in an analysis of variance with repeated measures
    (Winer 1971). The estimate assumes similar variances. An F test therefore compares each configuration's residual
    with the others; their mean is independent of the others' residual. Configurations with a much larger variance are
    excluded and keep their own variance. `compare` never uses less than a configuration's observed variance.
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
    mask of the other configurations with this variance.

    The baseline's variance is in every difference, and the baseline may be the unstable configuration. The baseline's
    deviation from the mean of the others is therefore estimated separately, and added to the variance of the others
    (Welch, Satterthwaite). In simulations, 95 % intervals cover at least 93 % from three seeds on, if the baseline
    varies up to ten times as much. With two seeds, they cover 91 %.
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
    """Return the between-seed variance of each configuration's difference from `base`. Return None for `base` itself
    and for configurations with another variance.
    """
    variance, degrees, steady = luck_beside(scores, base)
    usable = int(steady.sum()) > 1 and float(variance) > 0
    luck = Variance(float(variance), float(degrees)) if usable else None
    return [luck if alike else None for alike in np.insert(steady, base, False)]


def _residual(scores: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the residual sum of squares of the chosen configurations, without configuration and seed means, and its
    degrees of freedom.
    """
    weight = chosen[..., None].astype(float)
    number = chosen.sum(-1)
    centred = scores - scores.mean(-1, keepdims=True)
    by_seed = (weight * centred).sum(-2) / np.maximum(number, 1)[..., None]
    squares = (weight * (centred - by_seed[..., None, :]) ** 2).sum((-2, -1))
    return squares, np.maximum(number - 1, 0) * (scores.shape[-1] - 1)
