"""Estimate a confidence interval that allows for an untested kind of patients for whom a method fails."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

from medsilo_lab.study.law import Interval, Law


class Share(NamedTuple):
    """The fraction of patients for whom only one of two methods fails, and the number of patients from whom this
    fraction was estimated.
    """

    known: float
    patients: float

    def within(self, error: float) -> Interval:
        """Return the Clopper-Pearson interval (1934) of the fraction of patients for whom only one method fails."""
        failing, right = self.known * self.patients, (1 - self.known) * self.patients
        low = float(scipy.special.betaincinv(failing, right + 1, error / 2)) if failing > 0 else 0.0
        high = float(scipy.special.betaincinv(failing + 1, right, 1 - error / 2)) if right > 0 else 1.0
        return low, high

    @classmethod
    def learned(cls, shares: Sequence[float], patients: Sequence[int], included: Sequence[bool]) -> "Share":
        """Estimate the fraction of failures at some hospitals with a beta-binomial model, from the fractions at all
        hospitals. `included` is true for the hospitals whose fraction is estimated.

        If the fractions of hospitals differ by more than chance, the patients of a hospital are correlated, and count
        as fewer independent patients. The correlation is the intraclass correlation of an analysis of variance (Ridout
        1999). The higher the correlation is, the less the estimate uses the hospitals for which `included` is false.
        """
        each, sizes, here = np.array(shares), np.array(patients, dtype=float), np.array(included)
        akin = _correlation(each, sizes)
        count = sizes / (1 + (sizes - 1) * akin)
        own, others = count[here].sum(), count[~here].sum()
        # if the fraction of a single hospital is estimated, the hospital's patients count as independent
        least = own if here.sum() > 1 else sizes[here].sum()
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
    """Patients for whom only one of two methods fails. The fields are the fraction of such patients, their mean loss,
    and the loss that is assumed for an untested failing patient.
    """

    share: Share
    lost: float
    most: float

    def within(self, error: float) -> tuple[float, Interval]:
        """Return the change of the mean score by patients for whom only one method fails. Also return the distances by
        which the true change may lie below and above this estimate.
        """
        low, high = self.share.within(error)
        less, more = max(self.share.known - low, 0.0), max(high - self.share.known, 0.0)
        return self.lost * self.share.known, (self.lost * less, max(self.lost, self.most) * more)


class Unseen(NamedTuple):
    """A difference between two methods, which is the sum of three parts. The first part comes from patients for whom
    only the method fails, the second from patients for whom only the baseline fails. The third part comes from all
    other patients.

    The errors of the three parts are combined as if the parts were independent (Zou and Donner 2008). If a method fails
    for an untested patient, the score is assumed to be zero.
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
        """Return an upper limit for the fraction of patients for whom only one of two methods fails."""
        return max(one.share.within(error)[1] for one in (self.method, self.baseline))

    def reversed(self) -> "Unseen":
        return Unseen(self.usual.reversed(), self.baseline, self.method)
