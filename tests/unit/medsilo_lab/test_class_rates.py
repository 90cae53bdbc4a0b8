"""Confidence intervals of the rates of a class equal statsmodels' intervals, or cover simulated rates."""

import math

import numpy as np
import pytest
from scipy import stats

from medsilo.runs.schema import Decisions
from medsilo.tasks.decisions import average_precisions, best_beside
from medsilo.tasks.metrics import BINS
from medsilo_lab.report.class_rates import interval_of_auroc, interval_of_f1, interval_of_pr_auc, of_class, wilson

proportion = pytest.importorskip("statsmodels.stats.proportion", reason="needs statsmodels, from the group dev")


@pytest.mark.parametrize(("part", "whole"), [(0, 5), (3, 7), (20, 20), (812, 1000)])
def test_a_rates_interval_is_wilsons(part: int, whole: int) -> None:
    assert wilson(part, whole) == pytest.approx(proportion.proportion_confint(part, whole, method="wilson"))


def test_the_interval_of_f1_covers_what_other_patients_give() -> None:
    random, truth, covered = np.random.default_rng(0), 2 * 0.21 / (2 * 0.21 + 0.09 + 0.07), 0
    for _ in range(1000):
        right, missed, wrong, _ = random.multinomial(60, [0.21, 0.09, 0.07, 0.63])
        low, high = interval_of_f1(right, right + missed + wrong)
        covered += low <= truth <= high
    assert 0.93 <= covered / 1000 <= 0.975


@pytest.mark.parametrize("apart", [0.5, 1.5, 2.5])
def test_the_interval_of_an_auroc_covers_what_other_patients_give(apart: float) -> None:
    random, truth, covered = np.random.default_rng(1), stats.norm.cdf(apart / math.sqrt(2)), 0
    for _ in range(1000):
        ill, well = random.normal(apart, 1, 20), random.normal(0, 1, 50)
        low, high = interval_of_auroc(float((ill[:, None] > well).mean()), 20, 50)
        covered += low <= truth <= high
    assert 0.93 <= covered / 1000 <= 0.985


def test_ends_of_intervals_stay_within_0_and_1() -> None:
    for area in (0.0, 1e-16, 0.01, 0.5, 0.99, 1 - 1e-16, 1.0):
        for own, others in ((1, 1), (1, 40), (30, 2)):
            for low, high in (interval_of_auroc(area, own, others), interval_of_pr_auc(area, own)):
                assert 0 <= low <= area <= high <= 1 and high - low > 0.1


def test_a_class_without_cases_has_no_rates() -> None:
    told = of_class(Decisions(confusion=[[5, 0], [0, 0]]), {}, 1, "ill", two=True)
    assert (told.sensitivity, told.precision, told.f1, told.auroc, told.pr_auc) == (None,) * 5
    assert told.specificity == 1 and told.intervals.keys() == {"specificity"}


def test_one_bin_for_all_cases_is_a_model_that_guesses() -> None:
    histograms = np.zeros((2, 2, BINS))
    histograms[0, :, 50], histograms[1, :, 50] = (3, 9), (9, 3)
    assert average_precisions(histograms.ravel().tolist(), 2) == [0.75, 0.25]
    assert best_beside(histograms.ravel().tolist(), 2, 0.9) == [(0.0, 0.0), (0.0, 0.0)]
    histograms[1, 1] = 0
    assert average_precisions(histograms.ravel().tolist(), 2)[1] is best_beside(histograms.ravel().tolist(), 2, 0.9)[1]
