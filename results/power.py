"""Simulate the power and the false alarms of a comparison of six methods with three seeds, for a table of
results/intervals.csv.

A separate score is simulated for each row and seed. If each row is judged alone, 11 % of studies find a difference of 6
points, and 27 % find a difference of 10 points. For each seed, the same random number is added to the scores of all
rows. To count false alarms, the program simulates rows of which none is better; one row may have a larger spread. The
variance of training is estimated in four ways. The first estimate uses each row alone, and the second estimate always
pools all rows. The third estimate uses all rows as `compare` does (medsilo_lab.study.training_luck), and the fourth
estimate combines all rows with the row itself. The fourth estimate weighs the pooled variance like four degrees of
freedom (Smyth 2004). P-values are corrected for all rows (Holm), and a row is significant at the level of 5 %.
"""

from collections.abc import Callable

import numpy as np
from scipy import stats

from medsilo_lab.study.training_luck import luck_beside
from results.result_files import Table

ROWS, SEEDS, SPREAD, LEVEL = 6, 3, 0.0225, 0.05
TIMES = 4000
UNSTEADY = (1, 2, 3, 5, 10)
BASELINE = (2, 3, 4)
# maps scores [times, rows, seeds] to p-values of each row except the first row
Judge = Callable[[np.ndarray], np.ndarray]


def studies(
    random: np.random.Generator, difference: float, unsteady: float = 1.0, times: int = TIMES, row: int = 1
) -> np.ndarray:
    """Simulate studies [times, rows, seeds]; one row has a larger spread than the other rows, and row 2 has better
    scores.
    """
    drawn = random.normal(0, SPREAD, (times, ROWS, SEEDS))
    drawn[:, row] *= unsteady
    drawn[:, 2] += difference
    return drawn + random.normal(0, 0.05, (times, 1, SEEDS))


def p_values(scores: np.ndarray, variance: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Return the p-value of each row's difference from the first row, [times, rows - 1]."""
    ways = scores[:, 1:] - scores[:, :1]
    return 2 * stats.t.sf(np.abs(ways.mean(-1)) / np.sqrt(variance / SEEDS), degrees)


def of_its_own(scores: np.ndarray) -> np.ndarray:
    return (scores[:, 1:] - scores[:, :1]).var(-1, ddof=1)


def alone(scores: np.ndarray) -> np.ndarray:
    """Return p-values for which the variance of each row is estimated from this row alone."""
    own = of_its_own(scores)
    return p_values(scores, own, np.full(own.shape, SEEDS - 1.0))


def unchecked(scores: np.ndarray) -> np.ndarray:
    common, degrees = residual(scores)
    return p_values(scores, common[:, None], degrees)


def residual(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Estimate, from all rows, the variance of the difference between two rows in one seed; also return the estimate's
    degrees of freedom.
    """
    rest = scores - scores.mean(-1, keepdims=True)
    rest = rest - rest.mean(-2, keepdims=True)
    degrees = (ROWS - 1) * (SEEDS - 1)
    return 2 * (rest**2).sum((-2, -1)) / degrees, np.array(degrees)


def checked(scores: np.ndarray) -> np.ndarray:
    own = of_its_own(scores)
    common, known, steady = luck_beside(scores, 0)
    variance = np.where(steady, np.maximum(common[:, None], own), own)
    return p_values(scores, variance, np.where(steady, known[:, None], SEEDS - 1.0))


def moderated(scores: np.ndarray, prior: float = 4.0) -> np.ndarray:
    """Return p-values whose variance combines the row's own variance and the common variance; the common variance
    counts as `prior` degrees of freedom.
    """
    own, (common, _) = of_its_own(scores), residual(scores)
    degrees = np.full(own.shape, prior + SEEDS - 1)
    return p_values(scores, (prior * common[:, None] + (SEEDS - 1) * own) / degrees, degrees)


JUDGES: dict[str, Judge] = {
    "each row alone": alone,
    "all rows, unchecked": unchecked,
    "all rows, checked (medsilo compare)": checked,
    "all rows, moderated": moderated,
}


def sure(p: np.ndarray) -> np.ndarray:
    """Return a mask of the significant rows after Holm's correction, [times, rows - 1]."""
    ordered = np.sort(p, 1) * np.arange(p.shape[1], 0, -1)
    adjusted = np.maximum.accumulate(ordered, 1)
    return np.take_along_axis(adjusted, p.argsort(1).argsort(1), 1) < LEVEL


def covered(judge: Judge, unsteady: float, times: int = TIMES) -> float:
    """Return the coverage of a 95 % interval if the first row has a larger spread than all other rows."""
    return float((judge(studies(np.random.default_rng(2), 0.0, unsteady, times, row=0)) >= LEVEL).mean())


def measured(judge: Judge, times: int = TIMES) -> tuple[list[float], list[float]]:
    """Return the power for differences of 6 and 10 points, and the rate of false alarms for each ratio in UNSTEADY."""
    random = np.random.default_rng(1)
    power = [float(sure(judge(studies(random, difference, times=times)))[:, 1].mean()) for difference in (0.06, 0.1)]
    return power, [float(sure(judge(studies(random, 0.0, by, times))).any(1).mean()) for by in UNSTEADY]


def table() -> Table:
    alarms = [f"false alarms, a row {by}x as unsteady" for by in UNSTEADY]
    heads = ["", "found, 6 points", "found, 10 points", *alarms]
    heads += [f"covered, baseline {by}x as unsteady" for by in BASELINE]
    rows = []
    for name, judge in JUDGES.items():
        found, false = measured(judge, TIMES)
        shares = [*found, *false, *(covered(judge, by, TIMES) for by in BASELINE)]
        rows.append([name, *(f"{share:.3f}" for share in shares)])
    return Table(heads, rows, "six rows, three seeds")


WORDS = (
    f"Six rows, three seeds: {TIMES} drawn studies. A false alarm is a significant difference where no row gains. To "
    "be sure of the baseline's own luck costs power; add seeds where a row varies that much."
)
