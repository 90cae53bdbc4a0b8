"""How sure a difference between two methods is: paired by test case, over patients and over seeds.

By hand for a reason: scipy's bootstrap draws single cases, and here whole patients are drawn, the same for all seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

DRAWS = 2000
LEVEL = 0.95
SMALLEST_P = 1e-9


@dataclass(frozen=True)
class Scores:
    """One method's scores on one site's test cases: [cases], and each case's patient, 0 to P-1: [cases]."""

    values: np.ndarray
    patients: np.ndarray
    summed_up: int | None = None  # the cases that one value stands for, where a site keeps its cases' scores

    def __post_init__(self) -> None:
        if len(self.values) != len(self.patients) or not len(self.values):
            raise ValueError(f"{len(self.values)} scores of {len(self.patients)} cases")

    @property
    def cases(self) -> int:
        return len(self.values) if self.summed_up is None else self.summed_up

    def as_mean(self) -> "Scores":
        """All that is known of a site that keeps its cases' scores: their mean."""
        return Scores(self.values.mean(keepdims=True), np.zeros(1, dtype=int), self.cases)


Study = Sequence[Mapping[str, Scores]]  # for every seed: scores by site


@dataclass(frozen=True)
class Difference:
    """A method minus the one it is held against, in the score's unit."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int

    @property
    def decides(self) -> bool:
        """Whether the interval leaves zero on one side. One seed says nothing about the luck of training."""
        return self.seeds > 1 and (self.low > 0 or self.high < 0)


def compare(
    method: Study, baseline: Study, sites: Sequence[str] | None = None, *, pooled: bool = False, seed: int = 0
) -> Difference:
    """The mean over sites, or over their cases together, of the paired difference, for other patients and other seeds.

    The variance is the sum of two: that of the mean under resampled patients (whole patients, the same ones for all
    seeds, so that nothing is gained by testing the same patients again), and that between seeds. Each has a Student's t
    of its own; the interval reaches as far as their mean, weighted by the variances (Cochran and Cox 1950): with few
    seeds that errs to the side of caution. With one seed only the patients count. A site that keeps its cases' scores
    brings its mean: then the patients' part is missing.
    """
    if len(method) != len(baseline) or not method:
        raise ValueError(f"{len(method)} seeds against {len(baseline)}: a paired comparison needs the same ones")
    names = sorted(sites or method[0])
    random = np.random.default_rng(seed)
    by_seed, drawn, spare = np.zeros(len(method)), np.zeros(DRAWS), 0
    shares = [_shares([own[name].cases if pooled else 1 for name in names]) for own in method]
    for column, name in enumerate(names):
        pairs = [_per_patient(mine[name], theirs[name]) for mine, theirs in zip(method, baseline, strict=True)]
        spare += min(len(sums) for sums, _ in pairs) - 1
        weights: dict[int, np.ndarray] = {}
        for place, (sums, cases) in enumerate(pairs):
            patients, share = len(sums), shares[place][column]
            if patients not in weights:
                weights[patients] = random.multinomial(patients, np.full(patients, 1 / patients), DRAWS)
            drawn += share * (weights[patients] @ sums) / (weights[patients] @ cases) / len(pairs)
            by_seed[place] += share * sums.sum() / cases.sum()
    parts = [(float(drawn.var(ddof=1)), spare), (float(by_seed.var()) / max(len(by_seed) - 1, 1), len(by_seed) - 1)]
    parts = [(part, degrees) for part, degrees in parts if degrees]
    variance, mean = sum(part for part, _ in parts), float(by_seed.mean())
    if not parts:  # one number tells nothing of others
        return Difference(mean, -math.inf, math.inf, 1.0, len(by_seed))
    if not variance:
        return Difference(mean, mean, mean, float(mean == 0), len(by_seed))
    error = math.sqrt(variance)
    weighted = [(part / variance, degrees) for part, degrees in parts if part]
    reach = _critical(1 - LEVEL, weighted) * error
    p = _p_value(abs(mean) / error, weighted)
    return Difference(mean, mean - reach, mean + reach, p, len(by_seed))


def _critical(p: float, weighted: Sequence[tuple[float, int]]) -> float:
    """How many standard errors are exceeded with probability p, to either side."""
    return sum(share * float(stats.t.isf(p / 2, degrees)) for share, degrees in weighted)


def _p_value(errors: float, weighted: Sequence[tuple[float, int]]) -> float:
    """The probability with which so many standard errors are exceeded."""
    if errors >= _critical(SMALLEST_P, weighted):
        return SMALLEST_P
    return float(optimize.brentq(lambda p: _critical(p, weighted) - errors, SMALLEST_P, 1.0, xtol=1e-12))


def level(method: Study, sites: Sequence[str] | None = None, *, pooled: bool = False) -> Difference:
    """A method's own score with its interval: its difference from nothing."""
    nothing = [
        {site: Scores(np.zeros_like(own.values), own.patients, own.summed_up) for site, own in study.items()}
        for study in method
    ]
    return compare(method, nothing, sites, pooled=pooled)


def interval(scores: Scores, seed: int = 0) -> tuple[float, float]:
    """The percentile interval of one model's mean score for other patients."""
    sums = np.bincount(scores.patients, scores.values.astype(np.float64))
    cases = np.bincount(scores.patients).astype(np.float64)
    weights = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), DRAWS)
    low, high = np.quantile((weights @ sums) / (weights @ cases), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _shares(counts: Sequence[int]) -> np.ndarray:
    return np.asarray(counts, dtype=np.float64) / sum(counts)


def _per_patient(mine: Scores, theirs: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Per patient: the sum of the differences, and the cases."""
    if mine.summed_up is not None or theirs.summed_up is not None:
        mine, theirs = mine.as_mean(), theirs.as_mean()
    if mine.cases != theirs.cases or not np.array_equal(mine.patients, theirs.patients):
        raise ValueError("the two methods were not tested on the same cases")
    difference = mine.values.astype(np.float64) - theirs.values
    return np.bincount(mine.patients, difference), np.bincount(mine.patients).astype(np.float64)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction for asking many questions at once."""
    adjusted: dict[str, float] = {}
    highest = 0.0
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[name]))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def better(differences: Mapping[str, Difference]) -> list[str]:
    """The methods that are surely better than what all are held against, the best first."""
    adjusted = holm({name: difference.p for name, difference in differences.items()})
    sure = [
        name
        for name, difference in differences.items()
        if difference.decides and difference.mean > 0 and adjusted[name] < 1 - LEVEL
    ]
    return sorted(sure, key=lambda name: -differences[name].mean)


def winner(differences: Mapping[str, Difference]) -> str | None:
    """The method that is surely better than the one all are held against, and by the most; None when none is."""
    return next(iter(better(differences)), None)
