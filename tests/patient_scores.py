"""Scores of a method at a site, as tests of statistics make them."""

import numpy as np

from medsilo_lab.study.evidence import Scores


def scores(values: list[float] | np.ndarray, patients: list[int] | None = None) -> Scores:
    """Return scores of cases. Each case is another patient, unless `patients` names them."""
    values = np.asarray(values, dtype=np.float64)
    return Scores(values, np.arange(len(values)) if patients is None else np.asarray(patients))
