"""Simulate comparisons that resemble an observed comparison. The simulations estimate a comparison's power, smallest
detectable difference and necessary sample.

Each simulated study samples patients at random from the tested patients. The effect of the method on a sampled patient
is the effect that was observed for this patient. The effects of seeds vary in a simulated study as much as in the
observed study. Variances that are estimated from few patients and seeds are uncertain. Each simulated study therefore
uses random variances from a distribution of likely values. If a study has the power 0.8 for a difference, the
difference is significant in four of five studies.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import scipy

from medsilo_lab.study.evidence import LEAST_PATIENTS, LEAST_SEEDS, Difference, Study, by_patient, seeds_of
from medsilo_lab.study.law import Variance, Variances, crossed, straightened
from medsilo_lab.study.verdict_file import MOST_PATIENTS, MOST_SEEDS

POWER = 0.8  # fraction of studies in which a difference must be significant
# number of seeds that is tried if neither more patients alone nor more seeds alone are sufficient
MORE_SEEDS = 12
STUDIES = 400
STEP = 0.001  # step between two differences whose power is simulated
Unit = Literal["test patients", "seeds"]


class Design(NamedTuple):
    patients: tuple[int, ...]
    seeds: int


@dataclass(frozen=True)
class Pilot:
    found: Difference
    # for each hospital: each patient's difference minus the hospital's mean difference
    ways: Sequence[np.ndarray]
    scores: Sequence[np.ndarray]  # for each hospital: each patient's mean score with the method
    assumed: Design | None = None  # the assumed sample, if there is no finished comparison
    # fraction of the between-seed variance that shrinks if the method's score rises; 0 if the score is a mean
    share: float = 0.0

    @classmethod
    def of(cls, difference: Difference, method: Study, baseline: Study, names: Sequence[str]) -> "Pilot | None":
        mine, theirs = ([by_patient(study, name).mean(0) for name in names] for study in (method, baseline))
        ways = [one - other for one, other in zip(mine, theirs, strict=True)]
        if not difference.patients.variance or difference.seeds < 2 or any(len(way) < 2 for way in ways):
            return None
        changes, stays = (float(seeds_of(study, names).var()) for study in (method, baseline))
        share = changes / (changes + stays) if changes and any(map(_ranks, mine)) else 0.0
        return cls(difference, [own - own.mean() for own in ways], mine, share=share)

    @property
    def design(self) -> Design:
        return self.assumed or Design(tuple(map(len, self.ways)), self.found.seeds)

    def power(self, difference: float, design: Design, error: float) -> float:
        """Return the fraction of simulated studies in which the difference is significant at the level `error`.
        `design` is the number of patients and seeds in each simulated study.

        The simulation adds `difference` to the patients' mean score, and keeps all scores between 0 and 1.
        """
        if design.seeds < LEAST_SEEDS or sum(design.patients) < LEAST_PATIENTS or min(design.patients) < 2:
            return 0.0
        random, number = np.random.default_rng(1), len(self.ways)
        known = self.found.patients.degrees
        scale = np.sqrt(known / random.chisquare(known, STUDIES))
        means, variance, square, cube = (np.zeros(STUDIES) for _ in range(4))
        factors = [_narrower(scores, difference - self.found.mean) for scores in self.scores]
        narrower = [factor for factor in factors if factor is not None]
        if len(narrower) < number:
            return 0.0
        for ways, scores, size, factor in zip(self.ways, self.scores, design.patients, narrower, strict=True):
            own = _drawn(random, ways + (scores - scores.mean()) * (factor - 1), size, scale) / number
            middle = own.mean(1)
            far = own - middle[:, None]
            mine = (far**2).sum(1) / (size - 1) / size
            means, variance, square = means + middle, variance + mine, square + mine**2 / (size - 1)
            cube = cube + (far**3).mean(1) / size**2
        patients = Variances(variance, variance**2 / np.maximum(square, np.finfo(float).tiny))
        of_seeds = 1 + self.share * (float(np.mean(np.square(narrower))) - 1)
        return float(self._sure(random, difference + means, patients, cube, of_seeds, design, error).mean())

    def _sure(
        self,
        random: np.random.Generator,
        means: np.ndarray,
        patients: Variances,
        cube: np.ndarray,
        of_seeds: float,
        design: Design,
        error: float,
    ) -> np.ndarray:
        """Add random effects of seeds to the mean difference of each simulated study. Return a mask of the studies
        whose difference is significant. All variances between seeds are multiplied by `of_seeds`.
        """
        found, known, cells = self.found, self.found.between.degrees, self._cells(design) * of_seeds
        between = found.between.variance * known / random.chisquare(known, STUDIES)
        luck = np.maximum(between - found.cells, 0.0) / design.seeds * of_seeds
        means = means + random.normal(0, 1, STUDIES) * np.sqrt(luck)
        # number of configurations from which the between-seed variance was estimated
        rows = 1.0 if self.assumed else known / (found.seeds - 1)
        degrees = rows * (design.seeds - 1)
        seen = Variances((luck + cells) * random.chisquare(degrees, STUDIES) / degrees, np.full(STUDIES, degrees))
        whole = crossed(patients, seen, Variance(cells, self._freedom(design)))
        spread = np.sqrt(np.maximum(whole.variance, np.finfo(float).tiny))
        straight = straightened(means / spread, cube / spread**3)
        return 2 * scipy.special.stdtr(whole.degrees, -np.abs(straight)) < error

    def _cells(self, design: Design) -> float:
        """Return the part of the variance of the mean that comes from the interaction of seeds and patients."""
        here = sum(1 / len(way) for way in self.ways)
        return self.found.cells / design.seeds * sum(1 / size for size in design.patients) / here

    @staticmethod
    def _freedom(design: Design) -> int:
        return max(design.seeds - 1, 1) * max(sum(design.patients) - len(design.patients), 1)

    def reach(self, design: Design, error: float) -> float:
        """Return half of the expected width of the confidence interval of the difference."""
        each = [float(way.var(ddof=1)) / max(size, 1) for way, size in zip(self.ways, design.patients, strict=True)]
        variance = sum(each) / len(each) ** 2
        freedom = [max(size - 1, 1) for size in design.patients]
        square = sum(own**2 / free for own, free in zip(each, freedom, strict=True)) / len(each) ** 4
        patients = Variance(variance, variance**2 / square if square else 1.0)
        cells, degrees = self._cells(design), max(design.seeds - 1, 1)
        luck = (self.found.between.variance - self.found.cells) / design.seeds
        seeds = Variance(max(luck + cells, 0.0), degrees)
        whole = crossed(patients, seeds, Variance(cells, self._freedom(design)))
        return -float(scipy.special.stdtrit(whole.degrees, error / 2)) * math.sqrt(float(whole.variance))

    def least(self, design: Design, error: float) -> float | None:
        """Return the smallest difference that would be significant in four of five studies. If even the largest
        possible difference would not be significant, return None.
        """
        room = min(float((1 - score).mean()) for score in self.scores) + self.found.mean
        steps = range(1, max(int(min(room, 1.0) / STEP), 1))
        place = bisect_left(steps, True, key=lambda step: self.power(step * STEP, design, error) >= POWER)
        return steps[place] * STEP if place < len(steps) else None

    def needed(self, difference: float, error: float) -> "Missing":
        """Return the sample with which the difference is significant with the probability `POWER`.

        First, the number of patients at each hospital is increased, but not the number of seeds. If no number of
        patients is sufficient, the number of seeds is increased, but not the number of patients. If no number of seeds
        is sufficient, the number of patients is increased in studies with MORE_SEEDS seeds.
        """

        def fewest(design_of: Callable[[int], Design], first: int, last: int) -> int | None:
            holds = [design_of(number) for number in range(first, last + 1)]
            place = bisect_left(holds, True, key=lambda design: self.power(difference, design, error) >= POWER)
            return first + place if place < len(holds) else None

        here, hospitals = self.design, len(self.ways)
        seeds, first = max(here.seeds, LEAST_SEEDS), min(here.patients)
        if people := fewest(lambda each: Design((each,) * hospitals, seeds), first, MOST_PATIENTS):
            return Missing("test patients", people)
        if more := fewest(lambda number: here._replace(seeds=number), here.seeds + 1, MOST_SEEDS):
            return Missing("seeds", more)
        if here.seeds < MORE_SEEDS and (
            people := fewest(lambda each: Design((each,) * hospitals, MORE_SEEDS), first, MOST_PATIENTS)
        ):
            return Missing("test patients", people, MORE_SEEDS)
        return Missing("test patients", None)


class Missing(NamedTuple):
    """The sample that a comparison needs for a significant difference. `number` is None if none of the tested sample
    sizes is sufficient.
    """

    of: Unit
    number: int | None
    seeds: int | None = None


def _narrower(scores: np.ndarray, more: float) -> float | None:
    """Return a factor for the scores' deviations from their mean, so that the mean can rise by `more` and all scores
    stay between 0 and 1. If scores between 0 and 1 cannot have the new mean, return None.

    In a rank statistic such as the AUROC, a patient's contribution may be below 0 or above 1. The closer the statistic
    is to 0 or 1, the less the contributions vary: we use Hanley and McNeil's (1982) variance for two equal classes.
    """
    if not more:
        return 1.0
    mean, new = float(scores.mean()), float(scores.mean()) + more
    if _ranks(scores):
        return math.sqrt(_of_ranks(new) / _of_ranks(mean)) if 0 < mean < 1 and 0 < new < 1 else None
    room = 1 - mean if more > 0 else mean
    return 1 - abs(more) / room if abs(more) <= room else None


def _ranks(scores: np.ndarray) -> bool:
    """Return True if the scores are contributions to a rank statistic, because some are below 0 or above 1."""
    return bool(scores.min() < 0 or scores.max() > 1)


def _of_ranks(area: float) -> float:
    return area * (1 - area) * ((1 - area) / (2 - area) + area / (1 + area))


def _drawn(random: np.random.Generator, ways: np.ndarray, size: int, scale: np.ndarray) -> np.ndarray:
    """Sample patients at random for each simulated study. Return the sampled patients' deviations from the mean as an
    array [studies, patients], multiplied by the scale of the study.
    """
    # this factor corrects the variance, because the hospital's mean was subtracted from the differences
    wide = math.sqrt(len(ways) / (len(ways) - 1))
    return ways[random.integers(0, len(ways), (STUDIES, size))] * (wide * scale[:, None])
