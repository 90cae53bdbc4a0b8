"""Training's luck: one seed's variance of a difference between two rows, as all rows of a study tell it."""

import numpy as np
import scipy  # which loads its parts when they are used

from medsilo_lab.study.evidence import Variance

UNSTEADY = 0.02  # a row is on its own when chance alone makes it as unsteady as this with this probability


def pooled_luck(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One seed's variance of a difference between two rows, its degrees of freedom, and which rows it holds for.

    scores: [..., rows, seeds]. Rows are paired by seed, so a seed that is good for all rows does not count: what is
    left is the residual of rows x seeds, the error of an analysis of variance with repeated measures (Winer 1971). It
    needs rows that are about equally steady. Each is therefore held against all others by an F test of its own residual
    (a row's difference from the mean of the others does not depend on how the others differ), and one that is far
    unsteadier is left out: it keeps the variance that it has by itself. `compare` also takes no row for steadier than
    it was seen.
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
    """One seed's variance of a row's difference from the row `base`, its degrees of freedom, and which of the other
    rows it holds for.

    The base's luck is in every difference, and it may be the unsteady one: its spread around the mean of the others is
    taken by itself, and theirs together (Welch, Satterthwaite). In simulations 95 % intervals cover at least 93 % from
    three seeds on where it varies up to ten times as much, and 91 % with two.
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
    """For each row, one seed's variance of its difference from the row `base`; None where the row's own has to do."""
    variance, degrees, steady = luck_beside(scores, base)
    usable = int(steady.sum()) > 1 and float(variance) > 0
    luck = Variance(float(variance), float(degrees)) if usable else None
    return [luck if alike else None for alike in np.insert(steady, base, False)]


def _residual(scores: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum of squares of the chosen rows without the rows' and the seeds' means, and its degrees of freedom."""
    weight = chosen[..., None].astype(float)
    number = chosen.sum(-1)
    centred = scores - scores.mean(-1, keepdims=True)
    by_seed = (weight * centred).sum(-2) / np.maximum(number, 1)[..., None]
    squares = (weight * (centred - by_seed[..., None, :]) ** 2).sum((-2, -1))
    return squares, np.maximum(number - 1, 0) * (scores.shape[-1] - 1)
