"""The power of a comparison: the gain that such a study finds in 80 of 100 cases, and what more seeds find."""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass

from scipy import stats

from medsilo.study.evidence import LEVEL, Difference, Variance, critical

POWER = 0.8
MOST_SEEDS = 30
WORTH = 0.8  # more seeds are proposed if they bring the gain down to this share of what it is at least


@dataclass(frozen=True)
class Sensitivity:
    """The gain that would have been found in 80 % of such studies, and with how many seeds which smaller one would."""

    seeds: int
    gain: float
    more_seeds: int
    smaller_gain: float


def sensitivity(found: Collection[Difference]) -> Sensitivity | None:
    """Return what a study with these differences could have seen; None with one seed, or where no spread is known."""
    known = [one for one in found if one.seeds > 1 and one.luck.variance > 0]
    if not known:
        return None
    seeds = max(one.seeds for one in known)
    gains = {more: statistics.median(_gain(one, more, len(found)) for one in known) for more in _numbers(seeds)}
    gain = gains[seeds]
    enough = (more for more, smaller in gains.items() if smaller <= gain / 2)
    more = next(enough, max(gains))
    return Sensitivity(seeds, gain, more, gains[more])


def in_words(found: Sensitivity) -> str:
    """Return one sentence, in points of the score."""
    gain, smaller = (_points(value) for value in (found.gain, found.smaller_gain))
    text = (
        f"With {found.seeds} seeds and this spread, a gain of {gain} points would have been found in "
        f"{POWER:.0%} of such studies".replace("%", " %")
    )
    if found.smaller_gain > WORTH * found.gain:
        return f"{text}; more seeds would hardly help, as the test patients are too few."
    return f"{text}; {found.more_seeds} seeds would find {smaller} points."


def _numbers(seeds: int) -> range:
    return range(seeds, max(MOST_SEEDS, 2 * seeds) + 1)


def _gain(one: Difference, seeds: int, questions: int) -> float:
    """The critical value for the smallest of so many p-values, and as much again as 80 % of studies exceed (Lachin
    1981)."""
    degrees = one.luck.degrees / (one.seeds - 1) * (seeds - 1)
    parts = [one.patients, Variance(one.luck.variance / seeds, degrees)]
    parts = [part for part in parts if part.degrees]
    error = math.sqrt(sum(part.variance for part in parts))
    return error * (critical((1 - LEVEL) / questions, parts) + float(stats.norm.isf(1 - POWER)))


def _points(value: float) -> str:
    points = 100 * value
    return f"{points:.0f}" if points >= 10 else f"{points:.2g}"
