"""The luck of training, estimated from all rows of a comparison together: with three seeds one row knows little."""

import numpy as np
from scipy import stats

from medsilo.study.evidence import Variance

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
    whole = np.ones(scores.shape[:-1], dtype=bool)
    if rows < 3 or seeds < 2:
        squares, degrees = _residual(scores, whole)
        return 2 * squares / np.maximum(degrees, 1), degrees, whole
    steady = whole.copy()
    for row in range(rows):
        others = whole.copy()
        others[..., row] = False
        squares, degrees = _residual(scores, others)
        rest = np.delete(scores, row, axis=-2).mean(-2)
        own = (scores[..., row, :] - rest).var(-1, ddof=1) * (rows - 1) / rows
        ratio = own * degrees / np.maximum(squares, np.finfo(float).tiny)
        steady[..., row] = stats.f.sf(ratio, seeds - 1, degrees) >= UNSTEADY
    squares, degrees = _residual(scores, steady)
    return 2 * squares / np.maximum(degrees, 1), degrees, steady


def luck_of(scores: np.ndarray, base: int) -> list[Variance | None]:
    """For each row, one seed's variance of its difference from the row `base`; None where the row's own has to do."""
    variance, degrees, steady = pooled_luck(scores)
    usable = bool(steady[base]) and int(steady.sum()) > 2 and float(variance) > 0
    return [Variance(float(variance), float(degrees)) if usable and alike else None for alike in steady]


def _residual(scores: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum of squares of the chosen rows without the rows' and the seeds' means, and its degrees of freedom."""
    weight = chosen[..., None].astype(float)
    number = chosen.sum(-1)
    centred = scores - scores.mean(-1, keepdims=True)
    by_seed = (weight * centred).sum(-2) / np.maximum(number, 1)[..., None]
    squares = (weight * (centred - by_seed[..., None, :]) ** 2).sum((-2, -1))
    return squares, np.maximum(number - 1, 0) * (scores.shape[-1] - 1)
