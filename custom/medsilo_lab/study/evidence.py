"""The evidence for a difference between two methods, or for one method's score: over patients and over seeds.

What is estimated is the mean over hospitals of the mean over a hospital's patients, averaged over seeds of training.
Patients and seeds are both drawn, and crossed: every seed is tested on the same patients.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import scipy  # which loads its parts when they are used

LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
LEAST_SEEDS = 4  # with which a verdict is given: of fewer nobody knows training's luck
SMALLEST_P = 2e-4  # what the draws below can tell
FEW = 8  # patients of a site that may be alike by chance
ALIKE = 1e-12  # seeds whose differences are nearer to each other than this tell nothing of training's luck
DRAWS, NUMBERS = 8_000, 1_000_000  # of resampled patients; and the numbers drawn for them at most
GUARD = 2.0  # times a tail, of differences: a failure that nobody saw lies to one side, where all may be spent
GRID = np.linspace(0.0, 1.0, 4001)

Key = TypeVar("Key", bound=Hashable)
Endpoint = Literal["mean", "pooled", "worst-site"]
Interval = tuple[float, float]
Reach = Callable[[float], tuple[float, float]]  # below the mean, and above it


@dataclass(frozen=True)
class Scores:
    """One method's scores on one site's test cases: [cases], and each case's patient, 0 to P-1: [cases]."""

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
        """The number of patients."""
        return int(self.patients.max()) + 1


Study = Sequence[Mapping[str, Scores]]  # for every seed: scores by site


class Variance(NamedTuple):
    """A variance and the degrees of freedom with which it was estimated."""

    variance: float
    degrees: float


NOTHING = Variance(0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """A method minus the one it is held against, in the score's unit."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    people: int = field(default=0, compare=False)  # test patients behind it
    patients: Variance = field(default=NOTHING, compare=False)  # the mean's variance for other patients
    between: Variance = field(default=NOTHING, compare=False)  # one seed's variance
    cells: float = field(default=0.0, compare=False)  # as much of it is in the patients' part already
    alike: bool = field(default=False, compare=False)  # no seed differs from another, so their luck is not known
    reach: Reach | None = field(default=None, compare=False, repr=False)  # of an interval, by how often it may miss

    @property
    def decides(self) -> bool:
        """Return whether the interval leaves zero on one side, and enough is known for a verdict.

        Few seeds, or seeds or patients that are all alike, say nothing about others.
        """
        known = self.seeds >= LEAST_SEEDS and not self.alike and self.patients.variance > 0
        return known and (self.low > 0 or self.high < 0)

    @property
    def luck(self) -> Variance:
        """One seed's variance beyond the patients' part."""
        return self.between._replace(variance=max(self.between.variance - self.cells, 0.0))

    def within(self, error: float) -> Interval:
        """Return the interval that misses with this probability."""
        if self.reach is None:
            return self.low, self.high
        below, above = self.reach(error)
        return self.mean - below, self.mean + above

    def reversed(self) -> "Difference":
        """Return the same difference the other way round."""
        reach = self.reach
        back = None if reach is None else lambda error: reach(error)[::-1]
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low, reach=back)


def joined(folds: Sequence[Scores]) -> Scores:
    """Return the scores of a seed's folds as those of one test. Nobody is tested twice, so no patient is in two."""
    if len(folds) == 1:
        return folds[0]
    starts = np.cumsum([0, *(own.people for own in folds)])
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
    """The paired difference, for other patients and other seeds: of the mean over sites, of the mean over their cases
    together ("pooled"), or of each method's score at its own worst site.

    The interval is the wider of two. One is Student's t with the variance of patients and seeds crossed, as in studies
    of several readers and cases (Obuchowski and Rockette 1995, Hillis 2007): what a seed does to single patients is in
    the patients' part already and is not counted again. Each part has its own t, weighted by its variance (Cochran and
    Cox 1950). The other one resamples patients and adds one who may be as bad, or as good, as scores can be
    (`_Resampled`): so it covers where a few patients fail and none of them was among those tested.
    luck: one seed's variance as it is known from all rows of the study; the seeds' own is taken if that is more.
    """
    if len(method) != len(baseline) or not method:
        raise ValueError(f"{len(method)} seeds against {len(baseline)}: a paired comparison needs the same ones")
    return _Analysis(method, baseline, sorted(sites or method[0]), endpoint, luck, (-1.0, 1.0)).difference()


def level(method: Study, sites: Sequence[str] | None = None, *, endpoint: Endpoint = "mean") -> Difference:
    """A method's own score with its interval, between 0 and 1: its difference from nothing."""
    nothing = [
        {site: Scores(np.zeros_like(own.values), own.patients) for site, own in study.items()} for study in method
    ]
    found = _Analysis(method, nothing, sorted(sites or method[0]), endpoint, None, (0.0, 1.0)).difference()
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))


def interval(scores: Scores) -> Interval | None:
    """The interval of one model's mean score for other patients; None with fewer than two.

    For a share of patients it is between Clopper and Pearson's and the mid-P interval (`_Resampled`).
    In simulations it covers at least 93 % from two patients on, also where a few patients fail.
    """
    if len(_moves(scores)) < 2:
        return None
    found = level([{"": scores}])
    return found.low, found.high


class _Part(NamedTuple):
    """Moves of the result by a site's patients, [seeds, patients] with mean 0 in every seed, and how much the site
    counts."""

    moves: np.ndarray
    weight: float

    @property
    def patients(self) -> int:
        return self.moves.shape[1]

    @property
    def variance(self) -> float:
        """One patient's, over seeds."""
        return float(self.moves.mean(0).var(ddof=1)) / self.weight**2 if self.patients > 1 else 0.0

    @property
    def of_cells(self) -> float:
        """One seed's variance of the result from what it does to single patients: the interaction of both."""
        seeds, patients = self.moves.shape
        if seeds < 2 or patients < 2:
            return 0.0
        rest = self.moves - self.moves.mean(0)
        return float((rest**2).sum()) / ((seeds - 1) * (patients - 1) * patients)


class _Analysis:
    """One difference, and all that its interval is made of."""

    def __init__(
        self,
        method: Study,
        baseline: Study,
        names: Sequence[str],
        endpoint: Endpoint,
        luck: Variance | None,
        ends: tuple[float, float],
    ) -> None:
        self.ends, self.luck = ends, luck
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
        """The result's variance for other patients, with the degrees of freedom of Welch and Satterthwaite.

        A site of a few patients may find them alike by chance. So none counts with less than the variance that all
        sites have together; a site with a single patient has that of the others with one degree.
        """
        degrees = sum(part.patients - 1 for part in self.parts)
        if not degrees:
            return NOTHING
        together = sum(part.variance * (part.patients - 1) for part in self.parts) / degrees
        each = [
            Variance(
                max(part.variance, together if part.patients < FEW else 0.0) * part.weight**2 / part.patients,
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
        """One seed's variance."""
        if self.seeds < 2:
            return NOTHING
        seen = float(self.by_seed.var(ddof=1))
        return (
            Variance(max(seen, self.luck.variance), self.luck.degrees) if self.luck else Variance(seen, self.seeds - 1)
        )

    @cached_property
    def cells(self) -> float:
        """One seed's variance from what it does to single patients, which is in the patients' part."""
        return sum(part.of_cells for part in self.parts)

    @cached_property
    def variances(self) -> list[Variance]:
        """The parts of the mean's variance that are known."""
        return [part for part in (self.patients, self.of_seeds) if part.variance > 0]

    @cached_property
    def of_seeds(self) -> Variance:
        """The mean's variance for other seeds, beyond the patients' part."""
        return self.between._replace(variance=max(self.between.variance - self.cells, 0.0) / self.seeds)

    @cached_property
    def resampled(self) -> "_Resampled | None":
        """The patients drawn anew; None with a single one."""
        if self.people < 2 or not self.patients.degrees:
            return None
        moves = [_stretched(part, self.people) for part in self.parts]
        return _Resampled(self.mean + np.concatenate(moves), *self.ends)

    def reach(self, p: float) -> tuple[float, float]:
        """Return how far the interval that misses with this probability goes below the mean, and above it."""
        normal = 0.0
        if self.variances and (self.ends[0] < 0 or self.resampled is None):
            normal = critical(p, self.variances) * math.sqrt(sum(part.variance for part in self.variances))
        if self.resampled is None:
            return normal, normal
        tail = min((GUARD if self.ends[0] < 0 else 1.0) * p / 2, 0.5)
        seeds = (
            critical(2 * tail, [self.of_seeds]) * math.sqrt(self.of_seeds.variance) if self.of_seeds.variance else 0.0
        )
        low, high = self.resampled.ends(tail)
        return max(normal, math.hypot(self.mean - low, seeds)), max(normal, math.hypot(high - self.mean, seeds))

    def difference(self) -> Difference:
        """Return the difference with its interval and its p-value."""
        mean, seeds = self.mean, self.seeds
        alike = seeds > 1 and self.between.variance <= ALIKE**2
        low, high, p, reach = -math.inf, math.inf, 1.0, None
        if self.variances or self.resampled:  # one number tells nothing of others
            below, above = self.reach(1 - LEVEL)
            low, high, reach = mean - below, mean + above, self.reach
            p = self._p_value() if self.ends[0] < 0 else 1.0  # a score is held against nothing
        return Difference(mean, low, high, p, seeds, self.people, self.patients, self.between, self.cells, alike, reach)

    def _p_value(self) -> float:
        """The probability at which the interval just touches zero."""
        side = 0 if self.mean > 0 else 1

        def beyond(p: float) -> float:
            return abs(self.mean) - self.reach(p)[side]

        if beyond(SMALLEST_P) >= 0:
            return SMALLEST_P
        return float(scipy.optimize.brentq(beyond, SMALLEST_P, 1.0, xtol=1e-6)) if beyond(1.0) > 0 else 1.0


class _Resampled:
    """Means of patients who are drawn anew with weights, by Bayes' bootstrap (Rubin 1981), sorted, for either end.

    One more patient is among them. For the lower end it is as bad as can be in three of four draws, and as good as can
    be in the others. With the bad one in all draws the end is Gaffke's (2005), which for a share is Clopper and
    Pearson's, too wide by what is discrete in shares; with the bad one in half of them it is the mid-P interval
    (Lancaster 1961), which misses up to 9 %. This one misses less than 7 % of any share of 2 to 20 patients.
    """

    def __init__(self, values: np.ndarray, worst: float, best: float) -> None:
        weights, further = _drawn_weights(len(values))
        sums, whole, turn = weights @ values, weights.sum(1) + further, np.arange(len(further)) % 4 > 0
        self.lows = np.sort((sums + further * np.where(turn, worst, best)) / whole)
        self.highs = np.sort((sums + further * np.where(turn, best, worst)) / whole)[::-1]

    def ends(self, tail: float) -> tuple[float, float]:
        """Return the values that are passed in this share of the draws, at either end."""
        place = tail * (len(self.lows) - 1)
        first, part = int(place), place % 1
        low, high = (own[first] + part * (own[first + 1] - own[first]) for own in (self.lows, self.highs))
        return float(low), float(high)


@lru_cache(maxsize=4)
def _drawn_weights(patients: int) -> tuple[np.ndarray, np.ndarray]:
    random, draws = np.random.default_rng(patients), min(DRAWS, max(NUMBERS // patients, 2000))
    return random.standard_exponential((draws, patients)), random.standard_exponential(draws)


def _stretched(part: _Part, people: int) -> np.ndarray:
    """Return each patient's move on the scale of the mean over all patients, with the variance that their site has."""
    if part.patients < 2:
        return np.zeros(part.patients)
    centred = math.sqrt(part.patients * (people - 1) / ((part.patients - 1) * people))  # a site's mean was taken out
    return part.moves.mean(0) * people / part.patients * centred


def _part(pairs: Sequence[tuple[Scores, Scores]], a: np.ndarray, b: np.ndarray) -> _Part:
    """Return how far single patients move the difference.

    A mean over cases is a ratio where patients have several: what each patient adds to it is linear to first order
    (Cochran, Sampling Techniques, 1977, chapter 6). a, b: how much the site counts for either method, in each seed.
    """
    if not all(np.array_equal(x.patients, y.patients) for x, y in pairs):
        raise ValueError("the two methods were not tested on the same cases")
    moves = [w * _moves(x) - v * _moves(y) for w, v, (x, y) in zip(a, b, pairs, strict=True)]
    patients = min(map(len, moves))  # other seeds may test others
    kept = np.array([own[:patients] for own in moves])
    return _Part(kept - kept.mean(1, keepdims=True), float(np.maximum(a, b).mean()))


def _moves(scores: Scores) -> np.ndarray:
    values = scores.values.astype(np.float64)
    sums = np.bincount(scores.patients, values - values.mean())
    return sums * len(sums) / len(values)


def _of_people(ways: np.ndarray, shares: np.ndarray) -> _Part:
    """The same where each site is one person: [people, seeds], who are a sample themselves."""
    moves = (ways - shares[:, None] * ways.sum(0)) * len(ways)
    return _Part(moves.T - moves.T.mean(1, keepdims=True), 1.0)


def seeds_of(study: Study, sites: Sequence[str] | None = None, endpoint: Endpoint = "mean") -> np.ndarray:
    """Return one score per seed: [seeds]."""
    names = sorted(sites or study[0])
    means = np.array([[own[name].values.mean() for name in names] for own in study])
    return (_shares(study, names, endpoint) * means).sum(1)


def worst_site(study: Study, sites: Sequence[str] | None = None) -> str:
    """Return the site whose mean over all seeds is lowest."""
    return min(sorted(sites or study[0]), key=lambda name: float(np.mean([own[name].values.mean() for own in study])))


def _shares(study: Study, names: Sequence[str], endpoint: Endpoint) -> np.ndarray:
    """Return how much each site counts: [seeds, sites]."""
    if endpoint == "worst-site":
        worst = worst_site(study, names)
        return np.array([[float(name == worst) for name in names]] * len(study))
    counts = np.array([[own[name].cases if endpoint == "pooled" else 1 for name in names] for own in study])
    return counts / counts.sum(1, keepdims=True)


def critical(p: float, parts: Sequence[Variance]) -> float:
    """Return how many standard errors are exceeded with probability p, to either side."""
    variance = sum(part.variance for part in parts)
    return sum(part.variance / variance * -float(scipy.special.stdtrit(part.degrees, p / 2)) for part in parts)


# ---------------------------------------------------------------------------------------------------- concordance
def interval_of_concordance(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> Interval | None:
    """The interval of Harrell's concordance for other patients; None without two cases that can be compared.

    It is the wider of two: Newcombe's (2006, method 5), who solves Hanley and McNeil's variance for the concordance
    itself, and Wilson's with the variance that patients show, each by all pairs that it is in. Both take Student's t.
    With time 1 for the cases of a class and 2 for the others it is that of the area under the ROC curve.
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


def parts_of_concordance(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> np.ndarray:
    """Return how each case moves the concordance, by all its pairs: [cases]; their mean is the concordance."""
    right, pairs = _roles(time, event, risk)
    whole = float(pairs.sum()) / 2
    if not whole:
        return np.full(len(time), 0.5)  # a coin
    mean = float(right.sum()) / 2 / whole
    return mean + len(time) * (right - mean * pairs) / whole


def _later(time: np.ndarray, event: np.ndarray, case: int) -> np.ndarray:
    """Return which cases were seen longer than one with an event, or as long and had none."""
    return (time > time[case]) | ((time == time[case]) & (event == 0))


def _roles(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return of each case, as first or second, the pairs that are in the right order, and all of them."""
    right, pairs = np.zeros(len(time)), np.zeros(len(time))
    for first in np.flatnonzero(event).tolist():
        later = _later(time, event, first)
        better = later * ((risk[first] > risk) + 0.5 * (risk[first] == risk))
        for sums, own in ((right, better), (pairs, later.astype(float))):
            sums += own
            sums[first] += own.sum()
    return right, pairs


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's correction for asking many questions at once."""
    names = sorted(p_values, key=lambda name: p_values[name])
    each = (min(1.0, (len(names) - place) * p_values[name]) for place, name in enumerate(names))
    adjusted = dict(zip(names, accumulate(each, max), strict=True))
    return {name: adjusted[name] for name in p_values}


def errors_of(p_values: Mapping[Key, float], error: float) -> dict[Key, float]:
    """Return how often the interval of each question may miss, so that it leaves out zero exactly where the difference
    is significant after Holm's correction."""
    adjusted, names = holm(p_values), sorted(p_values, key=lambda name: p_values[name])
    left = {name: len(names) - place for place, name in enumerate(names)}
    return {name: error / max(left[name], adjusted[name] / max(p, SMALLEST_P)) for name, p in p_values.items()}
