"""Estimate the difference between two methods, or the score of a method. The confidence intervals are valid for
patients and seeds that were not tested.

The estimand is a mean over the patients of each hospital, then over hospitals, then over seeds of training. Every seed
is tested on the same patients, so patients and seeds are crossed random effects. A difference has two confidence
intervals, for two populations of patients. The docstring of the function `compare` describes both populations.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import scipy  # importing scipy itself is fast, because scipy loads its submodules on first use

from medsilo_lab.study.law import NOTHING, Interval, Law, Variance, crossed
from medsilo_lab.study.unseen import Failing, Share, Unseen

LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
LEAST_SEEDS = 4  # minimum number of seeds for a verdict, because fewer seeds do not show the variance of training
# minimum number of patients for a verdict, because the interval for fewer patients with skewed scores is too narrow
LEAST_PATIENTS = 8
# if the standard deviation of the seeds' results is below this number, all seeds count as having the same result
ALIKE = 1e-12
# number of bootstrap resamples, and maximum number of random numbers for all resamples together
DRAWS, NUMBERS = 8_000, 1_000_000
GRID = np.linspace(0.0, 1.0, 4001)
CHANCE = 0.5  # concordance of a random order

Key = TypeVar("Key", bound=Hashable)
Endpoint = Literal["mean", "pooled", "worst-site"]


@dataclass(frozen=True)
class Scores:
    """The scores of a method on a site's test cases, and the patient of each case as a number from 0. Both arrays have
    the shape [cases].
    """

    values: np.ndarray
    patients: np.ndarray

    def __post_init__(self) -> None:
        if len(self.values) != len(self.patients) or not len(self.values):
            raise ValueError(f"{len(self.values)} scores of {len(self.patients)} cases")

    @property
    def cases(self) -> int:
        return len(self.values)

    @property
    def people(self) -> int:
        return int(self.patients.max()) + 1


Study = Sequence[Mapping[str, Scores]]  # for each seed: site → scores at this site


@dataclass(frozen=True)
class Difference:
    mean: float
    low: float
    high: float
    p: float
    seeds: int
    people: int = field(default=0, compare=False)
    patients: Variance = field(default=NOTHING, compare=False)
    between: Variance = field(default=NOTHING, compare=False)
    # variance from the interaction of seeds and patients, which is a part of the between-seed variance and of the
    # variance of patients
    cells: float = field(default=0.0, compare=False)
    # true if all seeds have the same result, so that the between-seed variance is unknown
    alike: bool = field(default=False, compare=False)
    # the distribution that determines the confidence interval for similar patients
    law: Law | None = field(default=None, compare=False, repr=False)
    # the estimate that determines the confidence interval for untested kinds of patients
    unseen: Unseen | None = field(default=None, compare=False, repr=False)

    @property
    def decides(self) -> bool:
        """True if the confidence interval excludes zero and the sample is large enough for a verdict.

        A sample is too small if it has too few seeds or patients, or if all seeds or all patients have the same result.
        """
        known = self.seeds >= LEAST_SEEDS and self.people >= LEAST_PATIENTS
        return known and not self.alike and self.patients.variance > 0 and (self.low > 0 or self.high < 0)

    @property
    def luck(self) -> Variance:
        """The between-seed variance minus the variance from the interaction of seeds and patients."""
        return self.between._replace(variance=max(self.between.variance - self.cells, 0.0))

    def within(self, error: float) -> Interval:
        """Return the confidence interval with the error rate `error`, for patients who are similar to the tested
        patients.
        """
        return self.law.within(error) if self.law else (self.low, self.high)

    def if_unseen(self, error: float) -> Interval:
        """Return a confidence interval with the error rate `error`, which allows for patients of an untested kind, for
        whom a method may fail.

        The returned interval contains the interval that `within` returns.
        """
        low, high = self.within(error)
        further = self.unseen.within(error) if self.unseen else (low, high)
        return min(low, further[0]), max(high, further[1])

    def reversed(self) -> "Difference":
        law, unseen = self.law and self.law.reversed(), self.unseen and self.unseen.reversed()
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low, law=law, unseen=unseen)


def joined(folds: Sequence[Scores]) -> Scores:
    """Combine the scores of all cross-validation folds of a seed. Each patient must be in one fold only."""
    if len(folds) == 1:
        return folds[0]
    starts = np.cumsum([0, *(fold.people for fold in folds)])
    patients = [own.patients + start for own, start in zip(folds, starts, strict=False)]
    return Scores(np.concatenate([own.values for own in folds]), np.concatenate(patients))


# ---------------------------------------------------------------------------------------------------- the analysis
def compare(
    method: Study,
    baseline: Study,
    sites: Sequence[str] | None = None,
    *,
    endpoint: Endpoint = "mean",
    luck: Variance | None = None,
) -> Difference:
    """Return the difference between two methods, whose scores are paired by seeds and test cases. The endpoint that is
    compared is the mean over sites, the mean over all cases ("pooled"), or the score at each method's worst site.

    `low` and `high` are the ends of the confidence interval for other seeds and for patients who are similar to the
    tested patients. In the variance of the difference, patients and seeds are crossed random effects. Satterthwaite's
    formula (1946) gives the degrees of freedom of the variance. Hall's transformation (1992) corrects for the skewness
    of the patients' scores. Johnson's transformation (1978) is used where Hall's transformation can't be inverted.

    The interval from `low` to `high` ignores kinds of patients that were not tested. The method `if_unseen` returns a
    wider interval, which includes untested kinds of patients. The interval of `if_unseen` is estimated from the
    failures of both methods at all hospitals.

    Args:
        luck: between-seed variance that was estimated from all configurations; if the observed variance is larger, the
            observed variance is used
    """
    if len(method) != len(baseline) or not method:
        raise ValueError(f"{len(method)} seeds against {len(baseline)}: a paired comparison needs the same seeds")
    names = sorted(sites or method[0])
    return _Analysis(method, baseline, names, endpoint, luck).difference(unseen_of(method, baseline, names, endpoint))


def unseen_of(method: Study, baseline: Study, names: Sequence[str], endpoint: Endpoint) -> Unseen | None:
    """Estimate the fraction of patients for whom a method fails, from the patients of all hospitals. Return None if the
    endpoint is not a mean over patients.

    A method fails for a patient if the patient's score is below half the median score of both methods.
    """
    if endpoint == "worst-site":
        return None
    sites = sorted(set.intersection(*(set(own) for own in [*method, *baseline])))
    mine, theirs = ({name: by_patient(study, name) for name in sites} for study in (method, baseline))
    limit = float(np.median(np.concatenate([own.ravel() for own in [*mine.values(), *theirs.values()]]))) / 2
    lost = {name: (mine[name] < limit) & (theirs[name] >= limit) for name in sites}
    saved = {name: (theirs[name] < limit) & (mine[name] >= limit) for name in sites}
    usual, gone = [], {True: [0.0], False: [0.0]}
    for seed, study in enumerate(method):
        changed = {}
        for name in names:
            values, way = study[name].values.astype(np.float64), mine[name][seed] - theirs[name][seed]
            odd = lost[name][seed] | saved[name][seed]
            middle = float(way[~odd].mean()) if not odd.all() else 0.0
            for kind, which in ((True, lost[name][seed]), (False, saved[name][seed])):
                gone[kind] += [abs(float(one) - middle) for one in way[which]]
            here = study[name].patients
            at = np.append(odd, np.zeros(study[name].people - len(odd), bool))[here]
            changed[name] = Scores(np.where(at, baseline[seed][name].values + middle, values), here)
        usual.append(changed)
    law = _Analysis(usual, baseline, names, endpoint, None).law
    sizes, asked = [mine[name].shape[1] for name in sites], [name in names for name in sites]
    parts = []
    for kind, found, own in ((True, lost, mine), (False, saved, theirs)):
        share = Share.learned([float(found[name].mean()) for name in sites], sizes, asked)
        high = float(
            np.mean([values[values >= limit].mean() for values in own.values() if (values >= limit).any()] or [1.0])
        )
        each = gone[kind][1:]
        parts.append(Failing(share, float(np.mean(each)) if each else high, high))
    return Unseen(law, *parts)


def by_patient(study: Study, name: str) -> np.ndarray:
    """Return the mean score of each patient in each seed, as an array [seeds, patients]. Each seed must have the same
    number of patients in the array, so only the smallest number of patients over all seeds is kept.
    """
    means = [np.bincount(own[name].patients, own[name].values) / np.bincount(own[name].patients) for own in study]
    return np.array([mean[: min(map(len, means))] for mean in means])


def level(method: Study, sites: Sequence[str] | None = None, *, endpoint: Endpoint = "mean") -> Difference:
    """Return the score of a method as a difference from zero, with a confidence interval between 0 and 1."""
    nothing = [
        {site: Scores(np.zeros_like(own.values), own.patients) for site, own in study.items()} for study in method
    ]
    found = _Analysis(method, nothing, sorted(sites or method[0]), endpoint, None)
    low, high = found.of_a_score(1 - LEVEL)
    return replace(found.difference(None), low=max(low, 0.0), high=min(high, 1.0))


def interval(scores: Scores) -> Interval | None:
    """Return the confidence interval of a model's mean score over other patients, or None if fewer than two patients
    were tested.

    If the score is a proportion, the interval is narrower than the Clopper-Pearson interval and wider than the mid-P
    interval (see `_Resampled`). In simulations with two or more patients, the interval covers the true score in at
    least 93 % of studies. This is also true for models that fail for only a few patients.
    """
    if len(_moves(scores)) < 2:
        return None
    found = level([{"": scores}])
    return found.low, found.high


class _Part(NamedTuple):
    """A site's weight, and an array [seeds, patients] with the contributions of the site's patients to the difference.
    For each seed, the mean of the contributions of a site's patients is 0.
    """

    moves: np.ndarray
    weight: float

    @property
    def patients(self) -> int:
        return self.moves.shape[1]

    @property
    def variance(self) -> float:
        """The variance between the site's patients, where each patient's contribution is a mean over seeds."""
        return float(self.moves.mean(0).var(ddof=1)) / self.weight**2 if self.patients > 1 else 0.0

    @property
    def cube(self) -> float:
        """The third central moment of the site's contribution to the estimate, over repeated sampling of patients."""
        return float((self.moves.mean(0) ** 3).mean()) / self.patients**2

    @property
    def of_cells(self) -> float:
        """The variance that the interaction of patients with a single seed adds to the site's contribution to the
        estimate.
        """
        seeds, patients = self.moves.shape
        if seeds < 2 or patients < 2:
            return 0.0
        rest = self.moves - self.moves.mean(0)
        return float((rest**2).sum()) / ((seeds - 1) * (patients - 1) * patients)


class _Analysis:
    def __init__(
        self,
        method: Study,
        baseline: Study,
        names: Sequence[str],
        endpoint: Endpoint,
        luck: Variance | None,
    ) -> None:
        self.luck = luck
        shares = [_shares(study, names, endpoint) for study in (method, baseline)]
        parts, ways, used = [], [], []
        for column, name in enumerate(names):
            a, b = (share[:, column] for share in shares)
            if a.any() or b.any():
                pairs = [(one[name], other[name]) for one, other in zip(method, baseline, strict=True)]
                parts.append(_part(pairs, a, b))
                means = [(x.values.mean(), y.values.mean()) for x, y in pairs]
                ways.append([w * x - v * y for w, v, (x, y) in zip(a, b, means, strict=True)])
                used.append(column)
        self.by_seed = np.sum(ways, axis=0)
        self.mean, self.seeds = float(self.by_seed.mean()), len(self.by_seed)
        if endpoint != "worst-site" and len(parts) > 1 and all(part.patients == 1 for part in parts):
            parts = [_of_people(np.array(ways), (shares[0] + shares[1])[:, used].mean(0) / 2)]
        self.parts = parts
        self.people = sum(part.patients for part in parts)

    @cached_property
    def patients(self) -> Variance:
        """The variance of the difference due to the sampling of patients, with the degrees of freedom of Welch and
        Satterthwaite.

        For a site with a single patient, the pooled variance of all other sites is used, with one degree of freedom.
        """
        degrees = sum(part.patients - 1 for part in self.parts)
        if not degrees:
            return NOTHING
        together = sum(part.variance * (part.patients - 1) for part in self.parts) / degrees
        each = [
            Variance(
                (part.variance if part.patients > 1 else together) * part.weight**2 / part.patients,
                max(part.patients - 1, 1),
            )
            for part in self.parts
        ]
        variance = sum(one.variance for one in each)
        if not variance:
            return Variance(0.0, degrees)
        return Variance(variance, variance**2 / sum(one.variance**2 / one.degrees for one in each))

    @cached_property
    def between(self) -> Variance:
        if self.seeds < 2:
            return NOTHING
        seen = float(self.by_seed.var(ddof=1))
        return (
            Variance(max(seen, self.luck.variance), self.luck.degrees) if self.luck else Variance(seen, self.seeds - 1)
        )

    @cached_property
    def cells(self) -> float:
        """The variance from the interaction of seeds and patients. The variance due to patients includes the variance
        from the interaction.
        """
        return sum(part.of_cells for part in self.parts)

    @cached_property
    def of_seeds(self) -> Variance:
        """The variance of the mean due to the choice of seeds, without the variance from the interaction of seeds and
        patients.
        """
        return self.between._replace(variance=max(self.between.variance - self.cells, 0.0) / self.seeds)

    @cached_property
    def law(self) -> Law:
        seeds = self.between._replace(variance=self.between.variance / self.seeds)
        rest = Variance(self.cells / self.seeds, (self.seeds - 1) * max(self.people - len(self.parts), 1))
        whole = crossed(self.patients, seeds, rest)
        variance = float(whole.variance)
        skewness = sum(part.cube for part in self.parts) / variance**1.5 if variance else 0.0
        return Law(self.mean, variance, float(whole.degrees), skewness)

    def difference(self, unseen: Unseen | None) -> Difference:
        law, alike = self.law, self.seeds > 1 and self.between.variance <= ALIKE**2
        low, high = law.within(1 - LEVEL)
        found = Difference(
            self.mean, low, high, law.p, self.seeds, self.people, self.patients, self.between, self.cells
        )
        return replace(found, alike=alike, law=law, unseen=unseen)

    def of_a_score(self, error: float) -> Interval:
        if self.people < 2 or not self.patients.degrees:
            return self.law.within(error)
        found = _Resampled(self.mean + np.concatenate([_stretched(part, self.people) for part in self.parts]))
        seeds, (low, high) = self.of_seeds, found.ends(error / 2)
        reach = -float(scipy.special.stdtrit(seeds.degrees, error / 2)) if seeds.variance else 0.0
        reach *= math.sqrt(seeds.variance)
        return self.mean - math.hypot(self.mean - low, reach), self.mean + math.hypot(high - self.mean, reach)


class _Resampled:
    """Resampled mean scores from a Bayesian bootstrap over patients (Rubin 1981). The sorted resampled means give both
    ends of a confidence interval.

    Each resample consists of the sample and an added patient. For the lower end of the interval, the added patient has
    the score 0 in three of four resamples, otherwise the score 1. If the added patient always had the score 0, the
    result would be Gaffke's interval (2005). For a proportion, Gaffke's interval is the Clopper-Pearson interval, which
    is too wide because proportions are discrete. If the added patient had the score 0 in half of the resamples, the
    result would be the mid-P interval (Lancaster 1961). The error rate of the mid-P interval is up to 9 %. If the added
    patient has the score 0 in three of four resamples, the error rate is below 7 % for all proportions of 2 to 20
    patients.
    """

    def __init__(self, values: np.ndarray) -> None:
        weights, further = _drawn_weights(len(values))
        sums, whole, turn = weights @ values, weights.sum(1) + further, np.arange(len(further)) % 4 > 0
        # at the lower end, the added patient has the score 1 in every fourth resample, and the score 0 in all other
        # resamples
        self.lows = np.sort((sums + further * ~turn) / whole)
        self.highs = np.sort((sums + further * turn) / whole)[::-1]

    def ends(self, tail: float) -> tuple[float, float]:
        """Return both ends of the confidence interval, whose tails each have the probability `tail`."""
        place = tail * (len(self.lows) - 1)
        first, part = int(place), place % 1
        low, high = (own[first] + part * (own[first + 1] - own[first]) for own in (self.lows, self.highs))
        return float(low), float(high)


@lru_cache(maxsize=16)
def _drawn_weights(patients: int) -> tuple[np.ndarray, np.ndarray]:
    random, draws = np.random.default_rng(patients), min(DRAWS, max(NUMBERS // patients, 2000))
    return random.standard_exponential((draws, patients)), random.standard_exponential(draws)


def _stretched(part: _Part, people: int) -> np.ndarray:
    """Convert the contributions of a site's patients to contributions to the mean over the patients of all sites. The
    conversion does not change the variance within the site.
    """
    if part.patients < 2:
        return np.zeros(part.patients)
    # this factor corrects the variance, because the mean of the site was subtracted from the contributions
    centred = math.sqrt(part.patients * (people - 1) / ((part.patients - 1) * people))
    return part.moves.mean(0) * people / part.patients * centred


def _part(pairs: Sequence[tuple[Scores, Scores]], a: np.ndarray, b: np.ndarray) -> _Part:
    """Return the contributions of a site's patients to the difference.

    If patients have several cases, a mean over cases is a ratio of two sums over patients. A patient's contribution to
    the ratio is calculated in first order (Cochran, Sampling Techniques, 1977, chapter 6).

    Args:
        pairs: the scores of both methods, for each seed. The weights of the site for the two methods are `a` and `b`,
            by seed.
    """
    if not all(np.array_equal(x.patients, y.patients) for x, y in pairs):
        raise ValueError("the two methods were not tested on the same cases")
    moves = [w * _moves(x) - v * _moves(y) for w, v, (x, y) in zip(a, b, pairs, strict=True)]
    patients = min(map(len, moves))  # runs with different seeds may have different numbers of test patients
    kept = np.array([move[:patients] for move in moves])
    return _Part(kept - kept.mean(1, keepdims=True), float(np.maximum(a, b).mean()))


def _moves(scores: Scores) -> np.ndarray:
    values = scores.values.astype(np.float64)
    sums = np.bincount(scores.patients, values - values.mean())
    return sums * len(sums) / len(values)


def _of_people(ways: np.ndarray, shares: np.ndarray) -> _Part:
    """Return the contributions of single persons to the difference, for a study in which each site is one person.

    Args:
        ways: the contribution of each person to the difference, [people, seeds]
        shares: weight of each person
    """
    moves = (ways - shares[:, None] * ways.sum(0)) * len(ways)
    return _Part(moves.T - moves.T.mean(1, keepdims=True), 1.0)


def seeds_of(study: Study, sites: Sequence[str] | None = None, endpoint: Endpoint = "mean") -> np.ndarray:
    names = sorted(sites or study[0])
    means = np.array([[own[name].values.mean() for name in names] for own in study])
    return (_shares(study, names, endpoint) * means).sum(1)


def worst_site(study: Study, sites: Sequence[str] | None = None) -> str:
    return min(sorted(sites or study[0]), key=lambda name: float(np.mean([own[name].values.mean() for own in study])))


def _shares(study: Study, names: Sequence[str], endpoint: Endpoint) -> np.ndarray:
    if endpoint == "worst-site":
        worst = worst_site(study, names)
        return np.array([[float(name == worst) for name in names]] * len(study))
    counts = np.array([[own[name].cases if endpoint == "pooled" else 1 for name in names] for own in study])
    return counts / counts.sum(1, keepdims=True)


# ---------------------------------------------------------------------------------------------------- concordance
def interval_of_concordance(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> Interval | None:
    """Return the confidence interval of Harrell's concordance over other patients. If no two cases are comparable,
    return None.

    The result is the smallest interval that contains Newcombe's and Wilson's intervals, which both use Student's t.
    Newcombe's interval (2006, method 5) uses the variance of Hanley and McNeil. Wilson's interval uses the variance of
    the contributions of single cases to the concordance. For the AUROC of a class, give the time 1 to the cases of the
    class, and the time 2 to all other cases.
    """
    right, pairs = _roles(time, event, risk)
    whole = float(pairs.sum()) / 2
    if not whole:
        return None
    mean, degrees = float(right.sum()) / 2 / whole, len(time) - 1
    first = sum(_later(time, event, case).any() for case in np.flatnonzero(event).tolist())
    beyond = max((first + whole / first) / 2 - 1, 0.0)
    square = float(scipy.special.stdtrit(degrees, TAIL)) ** 2
    spread = GRID * (1 - GRID) * (1 + beyond * ((1 - GRID) / (2 - GRID) + GRID / (1 + GRID))) / whole
    within = GRID[(GRID - mean) ** 2 <= square * spread + 1e-12]
    low, high = (float(within.min()), float(within.max())) if len(within) else (mean, mean)
    variance = float(((right - mean * pairs) ** 2).sum()) / whole**2 * len(time) / max(degrees, 1)
    if variance:
        number = mean * (1 - mean) / variance
        middle = (mean * number + square / 2) / (number + square)
        reach = math.sqrt(square * (number * mean * (1 - mean) + square / 4)) / (number + square)
        low, high = min(low, middle - reach), max(high, middle + reach)
    return max(low, 0.0), min(high, 1.0)


def mean_of_intervals(levels: Sequence[tuple[float, Interval]], independent: bool) -> Interval:
    """Return the confidence interval of a mean of several scores, from each score and its interval.

    The distances between a score and the ends of its interval are combined by Zou and Donner's method (2008) if the
    scores are independent. Otherwise, the mean distance is used, as if the scores were perfectly correlated.
    """
    means, ends = np.array([mean for mean, _ in levels]), np.array([ends for _, ends in levels])
    apart = np.abs(ends - means[:, None])
    less, more = np.hypot.reduce(apart) / len(levels) if independent else apart.mean(0)
    return max(float(means.mean() - less), 0.0), min(float(means.mean() + more), 1.0)


def parts_of_concordance(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> np.ndarray:
    """Return an array [cases] with the contribution of each case to the concordance. A case's contribution is
    calculated from the change of the concordance if the case is left out. The mean of the contributions is the
    concordance, and their variance is the jackknife's. If no two cases are comparable, the contributions are NaN.
    """
    right, pairs = _roles(time, event, risk)
    whole = float(pairs.sum()) / 2
    if not whole:
        return np.full(len(time), np.nan)
    mean, left = float(right.sum()) / 2 / whole, whole - pairs
    moved = np.where(left > 0, (right - mean * pairs) / np.maximum(left, 1), mean - CHANCE)
    return mean + (len(time) - 1) * (moved - moved.mean())


def _later(time: np.ndarray, event: np.ndarray, case: int) -> np.ndarray:
    """Return a mask of the cases that outlive `case`: cases with a longer time, and cases with the same time but
    without the event.
    """
    return (time > time[case]) | ((time == time[case]) & (event == 0))


def _roles(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each case, return the number of concordant pairs and the number of comparable pairs that contain the case."""
    right, pairs = np.zeros(len(time)), np.zeros(len(time))
    for first in np.flatnonzero(event).tolist():
        later = _later(time, event, first)
        better = later * ((risk[first] > risk) + 0.5 * (risk[first] == risk))
        for sums, own in ((right, better), (pairs, later.astype(float))):
            sums += own
            sums[first] += own.sum()
    return right, pairs


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    names = sorted(p_values, key=lambda name: p_values[name])
    each = (min(1.0, (len(names) - place) * p_values[name]) for place, name in enumerate(names))
    adjusted = dict(zip(names, accumulate(each, max), strict=True))
    return {name: adjusted[name] for name in p_values}


def errors_of(p_values: Mapping[Key, float], error: float) -> dict[Key, float]:
    """Return an error rate for the confidence interval of each difference. At the returned error rate, the interval
    excludes zero if and only if the difference is significant after Holm's correction.
    """
    adjusted, names = holm(p_values), sorted(p_values, key=lambda name: p_values[name])
    left = {name: len(names) - place for place, name in enumerate(names)}
    return {name: error / max(left[name], adjusted[name] / p if p else 1.0) for name, p in p_values.items()}
