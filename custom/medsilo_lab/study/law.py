"""The distribution of an estimate over repeated choices of patients and seeds, and the confidence interval that follows
from it.
"""

import math
from typing import NamedTuple, TypeVar

import numpy as np
import scipy

STRAIGHT = 1e-9  # skewness below which an estimate counts as symmetric
Interval = tuple[float, float]
Number = TypeVar("Number", float, np.ndarray)


class Variance(NamedTuple):
    variance: float
    degrees: float


NOTHING = Variance(0.0, 0.0)


class Variances(NamedTuple):
    variance: np.ndarray
    degrees: np.ndarray


class Law(NamedTuple):
    mean: float
    variance: float
    degrees: float
    skewness: float

    def within(self, error: float) -> Interval:
        """Return the confidence interval with the error rate `error`. The interval is Student's t interval of the ratio
        of estimate and standard error, after the transformation `straightened`.
        """
        if not self.variance:
            return -math.inf, math.inf
        reach, spread = -float(scipy.special.stdtrit(self.degrees, error / 2)), math.sqrt(self.variance)
        return self.mean - spread * self._back(reach), self.mean - spread * self._back(-reach)

    @property
    def p(self) -> float:
        """The p-value: the error rate for which one end of the confidence interval is zero."""
        if not self.variance:
            return 1.0
        straight = straightened(self.mean / math.sqrt(self.variance), self.skewness)
        return 2 * float(scipy.special.stdtr(self.degrees, -abs(straight)))

    def _back(self, value: float) -> float:
        skew, moved = self.skewness, value - self.skewness / 6
        if abs(skew) <= STRAIGHT:
            return value
        return moved - skew * moved**2 / 3 if skew * moved < 0 else 3 / skew * (math.cbrt(1 + skew * moved) - 1)

    def reversed(self) -> "Law":
        return self._replace(mean=-self.mean, skewness=-self.skewness)


def straightened(ratio: Number, skewness: Number) -> Number:
    """Transform a ratio so that most of its skewness disappears. The transformation is an increasing function.

    Usually, the transformation is Hall's cubic function (1992). The slope of Hall's function is zero at the ratio -3 /
    skewness, so Hall's function has no inverse near this ratio. If the skewness and the ratio have opposite signs,
    Johnson's transformation (1978) replaces Hall's function. Hall's and Johnson's transformations are accurate to the
    same order, because their first terms are equal.
    """
    moved = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27
    bent = np.abs(skewness) * np.abs(ratio) * 4 / 3
    level = np.sign(ratio) * 2 * np.abs(ratio) / (1 + np.sqrt(1 + bent))
    straight = np.where(skewness * ratio < 0, level, moved) + skewness / 6
    return straight if isinstance(ratio, np.ndarray) or isinstance(skewness, np.ndarray) else float(straight)


def crossed(patients: Variance | Variances, seeds: Variance | Variances, cells: Variance) -> Variances:
    """Return the variance of a mean due to the choice of patients and seeds, with Satterthwaite's degrees of freedom
    (1946).

    The variances of patients and of seeds both contain the variance `cells` of their interaction, so `cells` is
    subtracted once from the sum. A variance that is smaller than `cells` is replaced by `cells`. If the arguments are
    arrays, each element belongs to one study.
    """
    own, luck = np.maximum(patients.variance, cells.variance), np.maximum(seeds.variance, cells.variance)
    variance = own + luck - cells.variance
    parts = (patients, seeds, cells)
    spread = sum(part.variance**2 / np.maximum(part.degrees, 1) for part in parts)
    least = np.minimum(*(np.where(part.variance > 0, part.degrees, np.inf) for part in (patients, seeds)))
    degrees = variance**2 / np.maximum(spread, np.finfo(float).tiny)
    return Variances(variance, np.maximum(degrees, np.where(np.isfinite(least), least, 1.0)))
