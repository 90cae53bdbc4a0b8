"""Compute a site's weight in a weighted mean: its number of patients, its number of cases, or 1."""

from typing import Literal

Weighting = Literal["patients", "cases", "uniform"]


def update_weight(weighting: Weighting, samples: int, cases: int, patients: int) -> int:
    """Return the weight of a site's update.

    Args:
        samples: The number of cases on which the site trained for this update.
        cases: The number of all training cases of the site.
        patients: The number of patients who have these training cases.

    >>> [update_weight(weighting, 80, 80, 20) for weighting in ("patients", "cases", "uniform")]
    [20, 80, 1]
    """
    if weighting == "uniform":
        return 1
    if weighting == "cases" or not cases:
        return samples
    return max(1, round(patients * samples / cases))
