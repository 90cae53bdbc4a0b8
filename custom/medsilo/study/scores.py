"""The scores of a finished run's test cases, as they lie in its folder."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from medsilo.core.errors import MedsiloError
from medsilo.federation.exact import read_measures
from medsilo.runs.paths import CASES, site_folder
from medsilo.study.evidence import Interval, Scores, interval, interval_of_concordance
from medsilo.tasks.metrics import Measures

CONCORDANCE = "concordance"  # a mean over pairs, not over cases
CLOSENESS = "closeness"  # of a number to the right one


def scores_in(run: Path, metric: str, tests: Mapping[str, tuple[float, int]]) -> dict[str, Scores]:
    """By site: every test case's score, or only their mean, as told, where the site keeps them."""
    found = {}
    for site, (score, cases) in tests.items():
        folder = site_folder(run, site)
        if not (folder / CASES).exists():
            found[site] = Scores(np.array([score]), np.zeros(1, dtype=int), cases)
            continue
        try:
            measures, patients = read_measures(folder)
            found[site] = Scores(measures[metric].numpy(), np.unique(patients, return_inverse=True)[1])
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise MedsiloError(
                f"{CASES} of {site} in run '{run.resolve().name}' is damaged: repeat the run", str(error)
            ) from error
    return found


def interval_in(run: Path, site: str, metric: str, scores: Scores) -> Interval | None:
    """The interval of a site's score for other patients; None where too few patients allow one."""
    return interval_over(metric, scores, lambda: read_measures(site_folder(run, site))[0])


def interval_over(metric: str, scores: Scores, measures: Callable[[], Measures]) -> Interval | None:
    """The interval of these cases' score for other patients, by whatever was measured of them."""
    if metric != CONCORDANCE:
        return interval(scores)
    return interval_of_concordance(*(measures()[name].numpy() for name in ("time", "event", "risk")))


def cases_in(run: Path, site: str) -> list[dict[str, float]]:
    """The test cases with the number of their patient and all that was measured of them."""
    measures, patients = read_measures(site_folder(run, site))
    rows = zip(patients, *(values.tolist() for values in measures.values()), strict=True)
    return [dict(zip(("patient", *measures), row, strict=True)) for row in rows]


def mean_in(run: Path, site: str, metric: str) -> float | None:
    """The score of the test cases' mean, where a number is learned: closeness is 1 less a share of the error."""
    if metric != CLOSENESS:
        return None
    measures = read_measures(site_folder(run, site))[0]
    values, error = measures["value"], float(measures["mae"].mean())
    scale = float(1 - measures[metric].mean()) / error if error else 0.0
    return 1 - scale * float((values - values.mean()).abs().mean())


def ranks(scores: Scores) -> dict[str, float]:
    """The scores of the worst, the median and the best case."""
    ordered = np.sort(scores.values)
    places = {"worst": 0, "median": len(ordered) // 2, "best": len(ordered) - 1}
    return {which: float(ordered[place]) for which, place in places.items()}
