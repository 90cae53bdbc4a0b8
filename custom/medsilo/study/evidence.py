"""The evidence for a difference between two methods: paired by test case, over patients and over seeds."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import scipy  # which loads its parts when they are used

from medsilo.runs.schema import DetectableGain

AKIN = 0.3  # least correlation of cases of one patient: of few patients nobody sees how alike they are
LEVEL = 0.95
SMALLEST_P = 1e-9
ALIKE = 1e-12  # seeds whose differences are nearer to each other than this tell nothing of training's luck
UNSTEADY = 0.02  # a row is on its own when chance alone makes it as unsteady as this with this probability
TAIL = (1 - LEVEL) / 2
POWER = 0.8  # share of studies in which the gain would be found
MOST_SEEDS = 30
MOST_PATIENTS = 100_000
DRAWS = 2000  # of studies, for their power
WORTH = 0.8  # more seeds are proposed if they bring the gain down to this share of what it is at least

Key = TypeVar("Key", bound=Hashable)
Endpoint = Literal["mean", "pooled", "worst-site"]
Interval = tuple[float, float]


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
    patients: Variance = field(default=NOTHING, compare=False)  # the mean's variance for other patients
    luck: Variance = field(default=NOTHING, compare=False)  # one seed's variance for other seeds
    alike: bool = field(default=False, compare=False)  # no seed differs from another, so their luck is not known

    @property
    def decides(self) -> bool:
        """Return whether the interval leaves zero on one side.

        One seed, or seeds that are all alike, say nothing about the luck of training, and seeds alone nothing about
        other people.
        """
        return self.seeds > 1 and not self.alike and self.patients.degrees > 0 and (self.low > 0 or self.high < 0)


def joined(folds: Sequence[Scores]) -> Scores:
    """Return the scores of a seed's folds as those of one test. Nobody is tested twice, so no patient is in two."""
    if len(folds) == 1:
        return folds[0]
    starts = np.cumsum([0, *(own.people for own in folds)])
    patients = [own.patients + start for own, start in zip(folds, starts, strict=False)]
    return Scores(np.concatenate([own.values for own in folds]), np.concatenate(patients))


def compare(
    method: Study,
    baseline: Study,
    sites: Sequence[str] | None = None,
    *,
    endpoint: Endpoint = "mean",
    luck: Variance | None = None,
    error: float = 1 - LEVEL,
) -> Difference:
    """The paired difference, for other patients and other seeds: of the mean over sites, of the mean over their cases
    together ("pooled"), or of each method's score at its own worst site.

    The variance is the sum of two parts. That of other patients has one part per site (`_of_patients`), put together
    with the degrees of freedom of Welch and Satterthwaite (Satterthwaite 1946, Welch 1947); whole patients count, the
    same ones for all seeds, so that nothing is gained by testing the same patients again. That of other seeds is the
    variance between seeds, or `luck`, if that is more: one seed's variance as it was estimated from all rows of the
    study. It is never smaller than rounding alone makes it (`_rounding`). Each has a Student's t of its own; the
    interval reaches as far as their mean, weighted by the variances (Cochran and Cox 1950): with few seeds that errs to
    the side of caution. With one seed only the patients count. Where each site is one person, these take the patients'
    place.
    error: how often the interval may miss, less where there are more looks.
    """
    if len(method) != len(baseline) or not method:
        raise ValueError(f"{len(method)} seeds against {len(baseline)}: a paired comparison needs the same ones")
    names = sorted(sites or method[0])
    shares = [_shares(study, names, endpoint) for study in (method, baseline)]
    by_seed = np.zeros(len(method))
    of_sites, ways, used, rounding = [], [], [], 0.0
    for column, name in enumerate(names):
        mine, theirs = ([study[name] for study in each] for each in (method, baseline))
        a, b = (share[:, column] for share in shares)
        if not (a.any() or b.any()):
            continue
        pairs = list(zip(mine, theirs, strict=True))
        if not all(np.array_equal(x.patients, y.patients) for x, y in pairs):
            raise ValueError("the two methods were not tested on the same cases")
        ways.append([w * x.values.mean() - v * y.values.mean() for w, v, (x, y) in zip(a, b, pairs, strict=True)])
        by_seed += ways[-1]
        used.append(column)
        of_sites.append(_of_site(pairs, a, b))
        rounding += _rounding([*mine, *theirs]) * float(np.maximum(a, b).mean()) ** 2
    mean, seeds = float(by_seed.mean()), len(by_seed)
    between = Variance(float(by_seed.var(ddof=1)), seeds - 1) if seeds > 1 else NOTHING
    alike = seeds > 1 and between.variance <= ALIKE**2 and luck is None
    own = between
    if seeds > 1:
        least = max(luck.variance if luck else 0.0, rounding if mean else 0.0)
        own = Variance(max(between.variance, least), luck.degrees if luck else between.degrees)
    single = endpoint != "worst-site" and all(site.patients == 1 for site in of_sites)
    patients = _of_people(ways, (shares[0] + shares[1])[:, used].mean(0) / 2) if single else _of_patients(of_sites)
    low, high, p = _interval(mean, [patients, Variance(own.variance / seeds, own.degrees)], error)
    return Difference(mean, low, high, p, seeds, patients, own, alike)


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


class _OfSite(NamedTuple):
    """One patient's variance at a site, the patients, and the square by which it counts in the difference."""

    variance: float
    patients: int
    square: float


def _of_site(pairs: Sequence[tuple[Scores, Scores]], a: np.ndarray, b: np.ndarray) -> _OfSite:
    """Return how far single patients move the difference.

    A mean over cases is a ratio where patients have several: what each patient adds to it is linear to first order
    (Cochran, Sampling Techniques, 1977, chapter 6). Over seeds it is averaged first, as the patients are the same.
    """
    moves = [w * _moves(x) - v * _moves(y) for w, v, (x, y) in zip(a, b, pairs, strict=True)]
    patients = min(map(len, moves))
    square = float(np.maximum(a, b).mean()) ** 2
    if patients < 2:
        return _OfSite(0.0, patients, square)
    if max(map(len, moves)) > patients:  # other patients with other seeds
        variance = float(np.mean([own.var(ddof=1) for own in moves]))
    else:
        variance = float(np.mean(moves, axis=0).var(ddof=1))
    return _OfSite(variance / square, patients, square)


def _moves(scores: Scores) -> np.ndarray:
    values = scores.values.astype(np.float64)
    sums = np.bincount(scores.patients, values - values.mean())
    return sums * len(sums) / len(values)


def _of_patients(sites: Sequence[_OfSite]) -> Variance:
    """The difference's variance for other patients: a part for each site with a variance of its own.

    A site of two or three patients may find them alike by chance. So no site counts with less than the variance that
    all sites have together, each keeps its own degrees of freedom, and a site with a single patient has one of the
    others' variance with one degree. In simulations 95 % intervals then cover at least 93 % even where such a site
    differs more than the others.
    """
    degrees = sum(site.patients - 1 for site in sites)
    if not degrees:
        return NOTHING
    together = sum(site.variance * (site.patients - 1) for site in sites) / degrees
    parts = [
        Variance(max(site.variance, together) * site.square / site.patients, max(site.patients - 1, 1))
        for site in sites
    ]
    return _together(parts) if any(part.variance for part in parts) else Variance(0.0, degrees)


def _of_people(ways: Sequence[Sequence[float]], shares: np.ndarray) -> Variance:
    """The same where each site is one person: each is one number, its mean over seeds."""
    people = np.mean(ways, axis=1)
    moves, number = people - shares * people.sum(), len(people)
    return Variance(number / (number - 1) * float((moves**2).sum()), number - 1) if number > 1 else NOTHING


def _together(parts: Sequence[Variance]) -> Variance:
    """Return the sum with the degrees of freedom of Welch and Satterthwaite."""
    variance = sum(part.variance for part in parts)
    return Variance(variance, variance**2 / sum(part.variance**2 / part.degrees for part in parts))


def _rounding(scores: Sequence[Scores]) -> float:
    """The variance of a difference of two means that comes from their steps alone, such as 1 / cases with accuracy."""
    cases = min(own.cases for own in scores)
    steps = np.diff(np.unique(np.concatenate([own.values for own in scores])))
    step = float(steps.min()) if len(steps) else 0.0
    return 2 * (step / cases) ** 2 / 12


def _interval(mean: float, given: Sequence[Variance], error: float) -> tuple[float, float, float]:
    """The interval's ends and the p-value."""
    parts = [part for part in given if part.degrees]
    variance = sum(part.variance for part in parts)
    if not parts:  # one number tells nothing of others
        return -math.inf, math.inf, 1.0
    if not variance:
        return mean, mean, 1.0
    reach = critical(error, parts) * math.sqrt(variance)
    return mean - reach, mean + reach, _p_value(abs(mean) / math.sqrt(variance), parts)


def critical(p: float, parts: Sequence[Variance]) -> float:
    """Return how many standard errors are exceeded with probability p, to either side."""
    variance = sum(part.variance for part in parts)
    return sum(
        part.variance / variance * -float(scipy.special.stdtrit(part.degrees, p / 2)) for part in parts if part.variance
    )


def _p_value(errors: float, parts: Sequence[Variance]) -> float:
    """The probability with which so many standard errors are exceeded."""
    if errors >= critical(SMALLEST_P, parts):
        return SMALLEST_P
    return float(scipy.optimize.brentq(lambda p: critical(p, parts) - errors, SMALLEST_P, 1.0, xtol=1e-12))


def level(method: Study, sites: Sequence[str] | None = None, *, endpoint: Endpoint = "mean") -> Difference:
    """A method's own score with its interval: its difference from nothing."""
    nothing = [
        {site: Scores(np.zeros_like(own.values), own.patients) for site, own in study.items()} for study in method
    ]
    return compare(method, nothing, sites, endpoint=endpoint)


def interval(scores: Scores) -> Interval | None:
    """The interval of one model's mean score, which is between 0 and 1, for other patients; None with fewer than two.

    It is Wilson's for a share (1927), of as many cases by themselves as tell as much (Kish 1965): what patients are
    seen to differ, but no less than cases of one patient that are alike by `AKIN` would. Student's t has a degree of
    freedom for each patient but one. In simulations it covers at least 93 % from two patients on, also where cases of
    one patient are alike by 0.6.
    """
    moves, cases = _moves(scores), len(scores.values)
    if len(moves) < 2:
        return None
    mean, spread = float(scores.values.mean()), float(scores.values.var())
    design = 1 + AKIN * (float((np.bincount(scores.patients) ** 2).sum()) / cases - 1)
    variance = max(float(moves.var(ddof=1)) / len(moves), spread * design / cases)
    number = mean * (1 - mean) / variance if variance else cases / design
    return _wilson(mean, number, len(moves) - 1)


def interval_of_concordance(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> Interval | None:
    """The same of Harrell's concordance: a case moves it by all pairs that it is in, and it tells no more than as many
    cases by themselves as there are events. None without two cases that can be compared."""
    right, pairs = np.zeros(len(time)), np.zeros(len(time))
    for first in np.flatnonzero(event):
        later = (time > time[first]) | ((time == time[first]) & (event == 0))
        better = later * ((risk[first] > risk) + 0.5 * (risk[first] == risk))
        for sums, own in ((right, better), (pairs, later.astype(float))):
            sums += own
            sums[first] += own.sum()
    if not pairs.any():
        return None
    mean, cases = float(right.sum() / pairs.sum()), len(time)
    variance = 4 * float(((right - mean * pairs) ** 2).sum()) / float(pairs.sum()) ** 2 * cases / (cases - 1)
    most = float(event.sum())
    return _wilson(mean, min(mean * (1 - mean) / variance, most) if variance else most, cases - 1)


def _wilson(mean: float, number: float, degrees: int) -> Interval:
    square = float(scipy.special.stdtrit(degrees, TAIL)) ** 2
    middle = (mean * number + square / 2) / (number + square)
    reach = math.sqrt(square * (number * mean * (1 - mean) + square / 4)) / (number + square)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's correction for asking many questions at once."""
    names = sorted(p_values, key=lambda name: p_values[name])
    each = (min(1.0, (len(names) - place) * p_values[name]) for place, name in enumerate(names))
    adjusted = dict(zip(names, accumulate(each, max), strict=True))
    return {name: adjusted[name] for name in p_values}


# ---------------------------------------------------------------------------------------------------- luck
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


# ---------------------------------------------------------------------------------------------------- power
def sensitivity(found: Collection[Difference]) -> DetectableGain | None:
    """Return what a study with these differences could have seen; None with one seed, or where no spread is known."""
    known = [one for one in found if one.seeds > 1 and one.luck.variance > 0]
    if not known:
        return None
    seeds = max(one.seeds for one in known)
    numbers = range(seeds, max(MOST_SEEDS, 2 * seeds) + 1)
    gains = {more: statistics.median(_gain(one, more, len(found)) for one in known) for more in numbers}
    gain = gains[seeds]
    enough = (more for more, smaller in gains.items() if smaller <= gain / 2)
    more = next(enough, max(gains))
    spreads = [[one.patients, Variance(one.luck.variance / one.seeds, one.seeds - 1)] for one in known]
    degrees = statistics.median(_together([part for part in own if part.variance]).degrees for own in spreads)
    low, high = (gain * math.sqrt(degrees / float(scipy.special.chdtri(degrees, p))) for p in (TAIL, 1 - TAIL))
    told, smaller, least, most = (_points(value) for value in (gain, gains[more], low, high))
    words = (
        f"With {seeds} seeds and this spread, a gain of {told} points would have been found in {POWER:.0%} of such "
        f"studies (the spread is an estimate: {least} to {most} points)".replace("%", " %")
    )
    few = gains[more] > WORTH * gain
    more_words = "more seeds would hardly help, as the test patients are too few"
    words += f"; {more_words if few else f'{more} seeds would find {smaller} points'}."
    return DetectableGain(seeds=seeds, gain=gain, low=low, high=high, words=words)


def needed(
    one: Difference, patients: int, gain: float, error: float
) -> tuple[Literal["patients", "seeds"], int | None]:
    """Return what a study has too little of to find this gain with probability `POWER`, and how many would do, as
    `patients` spread the difference now (Lachin 1981). Seeds cost machine time alone, so they are what is missing only
    where the patients are enough. None: more than `MOST_PATIENTS`, or nobody knows how patients differ."""
    if patients < 2 or not one.patients.degrees:
        return "patients", None

    def enough(people: int, seeds: int | None) -> bool:
        parts = [Variance(one.patients.variance * patients / people, people - 1)]
        parts += [Variance(one.luck.variance / seeds, seeds - 1)] if seeds else []
        parts = [part for part in parts if part.variance]
        errors = statistics.NormalDist().inv_cdf(POWER) + (critical(error, parts) if parts else 0)
        return errors * math.sqrt(sum(part.variance for part in parts)) <= gain

    def fewest(holds: Callable[[int], bool]) -> int | None:
        found = bisect_left(range(MOST_PATIENTS), True, lo=2, key=holds)
        return found if found < MOST_PATIENTS else None

    if enough(patients, None):
        return "seeds", fewest(lambda seeds: enough(patients, seeds))
    return "patients", fewest(lambda people: enough(people, None))


def _parts(one: Difference, seeds: int) -> list[Variance]:
    """The parts of a difference's variance with so many seeds."""
    degrees = one.luck.degrees / (one.seeds - 1) * (seeds - 1)
    return [part for part in (one.patients, Variance(one.luck.variance / seeds, degrees)) if part.variance]


def _gain(one: Difference, seeds: int, questions: int) -> float:
    """The gain with which 80 % of studies exceed the critical value for the smallest of so many p-values (Lachin 1981).
    A noncentral t, drawn: the true spread is known from one study, and `compare` takes the larger of two estimates."""
    random, parts, own = np.random.default_rng(0), _parts(one, seeds), seeds - 1
    true, found = np.zeros(DRAWS), np.zeros(DRAWS)
    for part, now in zip(parts, _parts(one, one.seeds), strict=True):
        variance = part.variance * now.degrees / random.chisquare(now.degrees, DRAWS)
        estimate = random.chisquare(part.degrees, DRAWS) / part.degrees
        if part is parts[-1]:
            estimate = np.maximum(estimate, random.chisquare(own, DRAWS) / own)
        true += variance
        found += variance * estimate
    errors = np.sqrt(true) * random.standard_normal(DRAWS)
    return float(np.quantile(critical((1 - LEVEL) / questions, parts) * np.sqrt(found) - errors, POWER))


def _points(value: float) -> str:
    points = 100 * value
    return f"{points:.0f}" if points >= 10 else f"{points:.2g}"
