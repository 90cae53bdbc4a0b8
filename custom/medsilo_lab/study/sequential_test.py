"""Bounds of a comparison that is looked at again and again while seeds come in.

Each look spends a part of the error of 5 % (Lan and DeMets, Biometrika 1983), next to nothing at first, as O'Brien and
Fleming's bounds do. Seeds are tested on the same patients, so looks are more alike than the bounds suppose, which errs
to the side of caution.
"""

import math
from functools import cache

import numpy as np
import scipy  # which loads its parts when they are used

from medsilo_lab.study.evidence import LEAST_SEEDS, LEVEL

LEAST, MOST = LEAST_SEEDS, 30  # seeds that are planned; the first look is at the least of them
NOTHING = 1e-12  # of the error: a look that may spend less decides nothing
SPENT = 0.044  # of the error of 5 %: Student's t takes the rest, as simulations show (tests/unit/test_boundaries.py)
POINTS = 401  # of the grid between the bounds
FAR = 8.0  # standard errors


def error_at(seeds: int, planned: int | None) -> float:
    """Return the p-value below which a difference is significant after so many seeds; planned: at most."""
    if planned is None or planned < LEAST:
        return 1 - LEVEL
    known = max(LEAST, min(seeds, planned))
    return errors_of(tuple(number / planned for number in range(LEAST, planned + 1)), SPENT)[known - LEAST]


def seeds_within(minutes: float, seconds: float) -> int:
    """Return the seeds that have room in so many minutes, where one takes so many seconds."""
    return min(MOST, int(60 * minutes / max(seconds, 1e-3)))


def enough_minutes(seconds: float) -> int:
    """Return the whole hours, in minutes, in which two methods side by side that take so many seconds may be compared.

    >>> enough_minutes(1500), enough_minutes(0)
    (120, 60)
    """
    return 60 * max(1, math.ceil(LEAST * seconds / 3600))


@cache
def errors_of(shares: tuple[float, ...], error: float) -> tuple[float, ...]:
    """Return the p-value, to both sides, at each look; shares: of all information that is there at each; error: of all.

    The sum of what came in has independent steps. Its density among the studies that go on is carried from look to
    look (Armitage, McPherson and Rowe 1969), and each bound is where so many leave as may.
    """
    normal = scipy.stats.norm
    found, spent, before = [], 0.0, 0.0
    grid, density = np.zeros(1), np.ones(1)  # density: with the weights of the grid
    for share in shares:
        step, root = np.sqrt(share - before), np.sqrt(share)
        may = 4 * normal.sf(normal.isf(error / 4) / root)
        bound = FAR * root
        if may - spent > NOTHING:
            bound = scipy.optimize.brentq(_leave, 0.0, FAR * root, (grid, density, step, may - spent), xtol=1e-9)
            spent = may
        found.append(float(2 * normal.sf(bound / root)))
        places = np.linspace(-bound, bound, POINTS)
        kernel = normal.pdf((places[:, None] - grid) / step) / step
        density, grid, before = _weights(places) * (kernel @ density), places, share
    return tuple(found)


def _leave(bound: float, grid: np.ndarray, density: np.ndarray, step: float, may: float) -> float:
    """Return how many studies are beyond a bound after a step, less those that may be."""
    normal = scipy.stats.norm
    return float(density @ (normal.sf((bound - grid) / step) + normal.cdf((-bound - grid) / step))) - may


def _weights(places: np.ndarray) -> np.ndarray:
    """Return Simpson's weights."""
    weights = np.where(np.arange(len(places)) % 2, 4.0, 2.0)
    weights[[0, -1]] = 1.0
    return weights * (places[1] - places[0]) / 3
