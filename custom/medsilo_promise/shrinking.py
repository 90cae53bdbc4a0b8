"""The mathematics of a promise: which cut keeps a hospital's risk below what is allowed.

A curve is what a hospital's n patients lose together at each of rising cuts, k(1) >= k(2) >= ... >= 0, each patient
between 0 and 1. At one cut, the hospital's risk is bounded by

    θ ~ Beta(a + k + w, b + n − k),   w = n / (n + a + b)

where Beta(a, b) says what other hospitals' patients tell. Without them (a = b = 0, w = 1) its mean is conformal risk
control's (k + 1) / (n + 1) (Angelopoulos et al. 2024), which for losses of 0 and 1 is split conformal prediction, and
its quantiles are the exact bounds of Clopper and Pearson. w is the finite sample's correction, one patient too many,
for as much of the bound as rests on the hospital's own patients.

The others' risks are taken as drawn from a Beta(μκ, (1 − μ)κ). At the cut where they lose together what is allowed, μ
and 1 / √(κ + 1) are uniform beforehand; what they lost gives a posterior over both, a new hospital's risk has this
mixture, and κ is the one number that gives a Beta the mixture's variance. It holds at every cut, with the mean of the
others' risks there, weighted by n / (n + κ): a = μκ, b = (1 − μ)κ. So few hospitals, or such that differ, give a small
κ, and the hospital's own cases decide. That is empirical Bayes' shrinkage with the uncertainty of the variance between
hospitals in it.
"""

import math
from typing import Any

import numpy as np

Values = np.ndarray[Any, np.dtype[np.float64]]
FEWEST = 3  # other hospitals, below which they tell nothing of how hospitals differ
SPREADS = np.linspace(0.02, 0.98, 17)  # 1 / √(κ + 1): the standard deviation between hospitals over its greatest
ROOTS = (np.arange(60) + 0.5) / 60  # of means, so that they are dense where risks are small
MEANS, STRENGTHS = (ROOTS**2)[:, None], (1 / SPREADS**2 - 1)[None]  # μ and κ of each Beta that is thought of
FIRST = MEANS * STRENGTHS  # its parameters' first, μκ


def others(losses: Values, numbers: Values, risk: float) -> tuple[Values, Values]:
    """Return κ, [hospitals + 1], and the mean risk at every cut, [hospitals + 1, cuts]: of each hospital's others, and
    last of all hospitals, for one that is new.

    losses: what the patients lose together, [hospitals, cuts]; numbers: of patients, [hospitals]. κ is 0 where too few
    others are there.
    """
    hospitals, cuts = losses.shape
    strengths, means = np.zeros(hospitals + 1), np.zeros((hospitals + 1, cuts))
    likely: dict[int, Values] = {}  # by the cut, of each hospital: the logarithm of what it lost, by μ and κ
    for place in range(hospitals + 1):
        kept = np.arange(hospitals) != place
        if kept.sum() < FEWEST:
            continue
        patients = numbers[kept]
        cut = int(np.argmin(np.abs(losses[kept].sum(0) / patients.sum() - risk)))
        if cut not in likely:
            likely[cut] = _likely(losses[:, cut], numbers)
        strengths[place] = strength = _strength(likely[cut][kept].sum(0))
        weights = 1 / (patients + strength)  # of losses, which are n times the risks
        means[place] = weights @ losses[kept] / (weights @ patients)
    return strengths, means


def _likely(losses: Values, numbers: Values) -> Values:
    from scipy.special import betaln

    second = STRENGTHS - FIRST
    k, n = losses[:, None, None], numbers[:, None, None]
    return np.asarray(betaln(FIRST + k, second + n - k) - betaln(FIRST, second))


def _strength(likely: Values) -> float:
    """Return the κ of a new hospital's risk."""
    weight = likely + np.log(ROOTS)[:, None]
    weight = np.exp(weight - np.max(weight))
    weight /= weight.sum()
    mean = float((weight * MEANS).sum())
    square = float((weight * FIRST * (FIRST + 1) / (STRENGTHS * (STRENGTHS + 1))).sum())
    return (mean - square) / (square - mean**2)


def bound(losses: Values, patients: float, a: Values, b: Values, confidence: float | None) -> Values:
    """Return the risk's bound at each cut: the mean of its Beta, or that quantile."""
    from scipy.special import betaincinv

    own = patients / np.maximum(patients + a + b, 1e-12) if patients else np.where(a + b > 0, 0.0, 1.0)
    if confidence is None:
        return (a + losses + own) / (a + b + patients + own)
    if not np.allclose(losses, np.round(losses)):
        # Bentkus 2004: a sum of shares is at most e times as likely to be so small as one of counts, rounded up.
        losses, confidence = np.minimum(np.ceil(losses - 1e-9), patients), 1 - (1 - confidence) / math.e
    left = b + patients - losses
    found = betaincinv(a + losses + own, np.maximum(left, 1e-12), confidence)
    return np.where(left > 0, found, 1.0)


def smallest(bounds: Values, risk: float) -> int | None:
    """Return the first cut from which on every bound is within the risk; None where only the last of all, at which
    nothing is left out, keeps it."""
    beyond = np.flatnonzero(bounds[:-1] > risk)
    first = int(beyond[-1]) + 1 if len(beyond) else 0
    return None if first >= len(bounds) - 1 else first


def needed(risk: float, confidence: float | None) -> int:
    """Return the patients that a hospital alone needs, if none of them loses anything."""
    if confidence is None:
        return math.ceil(1 / risk - 1e-9) - 1
    return math.ceil(math.log(1 - confidence) / math.log(1 - risk) - 1e-9)
