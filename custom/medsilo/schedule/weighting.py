"""Compute a site's weight in a weighted mean, by its patients, by its cases, or the same for all sites."""

from typing import Literal

Weighting = Literal["patients", "cases", "uniform"]


def update_weight(weighting: Weighting, samples: int, cases: int, patients: int) -> int:
    """Return the weight of an update.

    Args:
        samples: number of training cases in the update.
        cases: number of all training cases of the site.
        patients: number of patients of all these cases.

    >>> [update_weight(weighting, 80, 80, 20) for weighting in ("patients", "cases", "uniform")]
    [20, 80, 1]
    """
    if weighting == "uniform":
        return 1
    if weighting == "cases" or not cases:
        return samples
    return max(1, round(patients * samples / cases))
