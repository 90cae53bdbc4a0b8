"""Estimate the confidence interval of a difference, for the case that a method fails for an untested kind of
patients.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

from medsilo_lab.study.law import Interval, Law


class Share(NamedTuple):
    """The fraction of patients for whom only one method fails, and the number of patients from whom this fraction was
    estimated.
    """

    known: float
    patients: float

    def within(self, error: float) -> Interval:
        """Return the Clopper-Pearson interval (1934) of the fraction."""
        failing, right = self.known * self.patients, (1 - self.known) * self.patients
        low = float(scipy.special.betaincinv(failing, right + 1, error / 2)) if failing > 0 else 0.0
        high = float(scipy.special.betaincinv(failing + 1, right, 1 - error / 2)) if right > 0 else 1.0
        return low, high

    @classmethod
    def learned(cls, shares: Sequence[float], patients: Sequence[int], asked: Sequence[bool]) -> "Share":
        """Estimate the fraction at some hospitals from the fractions at all hospitals, by a beta-binomial model.
        `asked` is true for the hospitals for which the fraction is estimated.

        If the fractions of hospitals differ by more than chance, the patients of a hospital are correlated, and count
        as fewer independent patients. The correlation is the intraclass correlation of an analysis of variance (Ridout
        1999). The higher the correlation, the less the other hospitals contribute to the estimate.
        """
        each, sizes, here = np.array(shares), np.array(patients, dtype=float), np.array(asked)
        akin = _correlation(each, sizes)
        count = sizes / (1 + (sizes - 1) * akin)
        own, others = count[here].sum(), count[~here].sum()
        least = own if here.sum() > 1 else sizes[here].sum()  # the patients of a single hospital count as independent
        told = min(others, (1 - akin) / akin) if akin else others
        mean = _mean(each[here], count[here]) * least + _mean(each[~here], count[~here]) * told
        return cls(float(mean / (least + told)), float(least + told))


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    return float((values * weights).sum() / weights.sum()) if len(values) else 0.0


def _correlation(shares: np.ndarray, sizes: np.ndarray) -> float:
    number, whole = len(shares), sizes.sum()
    if number < 2 or whole <= number:
        return 0.0
    mean = _mean(shares, sizes)
    between = float((sizes * (shares - mean) ** 2).sum()) / (number - 1)
    rest = float((sizes * shares * (1 - shares)).sum()) / (whole - number)
    each = (whole - float((sizes**2).sum()) / whole) / (number - 1)
    whole_variance = between + (each - 1) * rest
    return min(max((between - rest) / whole_variance, 0.0), 0.95) if whole_variance > 0 else 0.0


class Failing(NamedTuple):
    """Patients for whom only one method fails: their fraction, their mean loss, and the loss of a further failing
    patient.
    """

    share: Share
    lost: float
    most: float

    def within(self, error: float) -> tuple[float, Interval]:
        """Return the effect on the mean score of patients for whom only one method fails, and the errors of this effect
        in both directions.
        """
        low, high = self.share.within(error)
        less, more = max(self.share.known - low, 0.0), max(high - self.share.known, 0.0)
        return self.lost * self.share.known, (self.lost * less, max(self.lost, self.most) * more)


class Unseen(NamedTuple):
    """A difference in three parts: for patients with the same outcome of both methods, for failures of the method, and
    for failures of the baseline.

    The errors of the three parts are combined as if the parts were independent (Zou and Donner 2008). A further patient
    for whom a method fails is assumed to have the score zero.
    """

    usual: Law
    method: Failing
    baseline: Failing

    def within(self, error: float) -> Interval:
        mean, (low, high) = self.usual.mean, self.usual.within(error) if self.usual.variance else (self.usual.mean,) * 2
        taken, (less, more) = self.method.within(error)
        given, (fewer, further) = self.baseline.within(error)
        middle = mean - taken + given
        return (
            middle - math.hypot(mean - low, more, fewer),
            middle + math.hypot(high - mean, less, further),
        )

    def most(self, error: float) -> float:
        """Return the upper limit of the fraction of patients for whom only one method fails."""
        return max(one.share.within(error)[1] for one in (self.method, self.baseline))

    def reversed(self) -> "Unseen":
        return Unseen(self.usual.reversed(), self.baseline, self.method)
