"""How sure a difference between two methods is: paired by test case, over patients and over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Scores:
    """One method's scores on one site's test cases: [cases], and each case's patient, 0 to P-1: [cases]."""

    values: np.ndarray
    patients: np.ndarray

    def __post_init__(self) -> None:
        if len(self.values) != len(self.patients) or not len(self.values):
            raise ValueError(f"{len(self.values)} scores of {len(self.patients)} cases")


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


def compare(method: Study, baseline: Study, sites: Sequence[str] | None = None, seed: int = 0) -> Difference:
    """The mean over sites of the paired difference, with an interval for other patients and other seeds.

    The variance is the sum of two: that of the mean under resampled patients (whole patients, the same ones for all
    seeds, so that nothing is gained by testing the same patients again), and that between seeds. Student's t with
    seeds - 1 degrees of freedom; with one seed only the patients count.
    """
    if len(method) != len(baseline) or not method:
        raise ValueError(f"{len(method)} seeds against {len(baseline)}: a paired comparison needs the same ones")
    names = sorted(sites or method[0])
    random = np.random.default_rng(seed)
    by_seed, drawn = np.zeros(len(method)), np.zeros(DRAWS)
    for name in names:
        pairs = [_per_patient(mine[name], theirs[name]) for mine, theirs in zip(method, baseline, strict=True)]
        weights: dict[int, np.ndarray] = {}
        for place, (sums, cases) in enumerate(pairs):
            patients = len(sums)
            if patients not in weights:
                weights[patients] = random.multinomial(patients, np.full(patients, 1 / patients), DRAWS)
            drawn += (weights[patients] @ sums) / (weights[patients] @ cases) / len(pairs)
            by_seed[place] += sums.sum() / cases.sum()
    by_seed, drawn = by_seed / len(names), drawn / len(names)
    variance = float(drawn.var(ddof=1))
    freedom = math.inf
    if len(by_seed) > 1:
        variance += float(by_seed.var(ddof=1)) / len(by_seed)
        freedom = len(by_seed) - 1
    mean, error = float(by_seed.mean()), math.sqrt(variance)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Difference(mean, mean - reach, mean + reach, p, len(by_seed))


def _per_patient(mine: Scores, theirs: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Per patient: the sum of the differences, and the cases."""
    if not np.array_equal(mine.patients, theirs.patients):
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


def winner(differences: Mapping[str, Difference]) -> str | None:
    """The method that is surely better than the one all are held against, and by the most; None when none is."""
    adjusted = holm({name: difference.p for name, difference in differences.items()})
    sure = [
        name
        for name, difference in differences.items()
        if difference.decides and difference.mean > 0 and adjusted[name] < 1 - LEVEL
    ]
    return max(sure, key=lambda name: differences[name].mean, default=None)
