"""Create scores of cases at a site, for tests of statistics."""

import numpy as np

from medsilo_lab.study.evidence import Scores


def scores(values: list[float] | np.ndarray, patients: list[int] | None = None) -> Scores:
    values = np.asarray(values, dtype=np.float64)
    return Scores(values, np.arange(len(values)) if patients is None else np.asarray(patients))
