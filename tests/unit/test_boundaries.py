"""A comparison that is looked at while seeds come in: its bounds and its error."""

import numpy as np
import pytest
from scipy import stats

from medsilo_lab.study.sequential_test import LEAST, error_at, errors_of, seeds_within

BOUNDS = [4.8769, 3.3569, 2.6803, 2.2898, 2.0310]  # of five looks, as Lan and DeMets' papers and programs tell them
STUDIES = 20_000


def test_the_bounds_are_the_published_ones() -> None:
    found = [float(stats.norm.isf(error / 2)) for error in errors_of((0.2, 0.4, 0.6, 0.8, 1.0), 0.05)]
    assert found == pytest.approx(BOUNDS, abs=2e-4)
    assert errors_of((1.0,), 0.05) == pytest.approx((0.05,), abs=1e-9)
    assert error_at(5, None) == pytest.approx(0.05) and error_at(4, 12) < 1e-3 < error_at(12, 12) < 0.05


@pytest.mark.parametrize("planned", [4, 8, 20])
def test_studies_without_a_difference_are_significant_in_five_of_a_hundred(planned: int) -> None:
    """With the luck of training estimated from the seeds so far, by Student's t."""
    drawn = np.random.default_rng(planned).normal(size=(STUDIES, planned))
    sure, every = np.zeros(STUDIES, bool), np.zeros(STUDIES, bool)
    for seeds in range(LEAST, planned + 1):
        own = drawn[:, :seeds]
        t = own.mean(1) / (own.std(1, ddof=1) / np.sqrt(seeds))
        p = 2 * stats.t.sf(np.abs(t), seeds - 1)
        sure |= p < error_at(seeds, planned)
        every |= p < 0.05
    assert 0.04 < sure.mean() < 0.0515  # three standard errors of the simulation above 5 %
    assert planned == LEAST or every.mean() > sure.mean() + 0.01  # what looking again and again would cost


def test_as_many_seeds_as_have_room() -> None:
    assert (seeds_within(1, 20), seeds_within(60, 1e-9), seeds_within(1, 61)) == (3, 30, 0)
