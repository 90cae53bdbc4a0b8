"""Test the study of IMPACT: statistics, training sets, the results file, and some runs if the data are available."""

from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from results.impact import METHODS, POOLED, PRIVATE, WHOLE, Work, deaths, read
from results.impact.__main__ import FILE, drawn
from results.impact.page import DISCRIMINATION
from results.impact.statistics import auc, calibration_in_the_large, calibration_slope
from results.result_files import rows_of

DRAW = np.random.default_rng(0)
SCORES = np.round(DRAW.normal(-1, 1, 150), 1)
DIED = (DRAW.random(150) < expit(0.3 + 0.7 * SCORES)).astype(float)


def test_an_area_and_its_variance_are_those_of_all_pairs() -> None:
    """DeLong's variance is the variance over patients of the fraction of correctly ordered pairs."""
    pairs = np.sign(SCORES[DIED == 1][:, None] - SCORES[DIED == 0][None]) / 2 + 0.5
    error = sum(pairs.mean(axis).var(ddof=1) / pairs.shape[1 - axis] for axis in (0, 1)) ** 0.5
    found = auc(SCORES, DIED)
    assert found.value == pytest.approx(pairs.mean(), abs=1e-12)
    assert found.high - found.value == pytest.approx(1.959964 * error, rel=1e-6)


def test_calibrations_solve_their_equations_and_have_walds_interval() -> None:
    """Calibration gives the right number of deaths; calibration with a slope also gives the right sum of scores over
    the patients who died.

    The expected confidence interval is computed from the information matrix.
    """
    one = np.ones(len(SCORES))
    large, slope = calibration_in_the_large(SCORES, DIED), calibration_slope(SCORES, DIED)
    chances = expit(SCORES + large.value)
    assert chances.sum() == pytest.approx(DIED.sum(), abs=1e-6)
    assert large.high - large.value == pytest.approx(1.959964 / (chances * (1 - chances)).sum() ** 0.5, rel=1e-6)
    constant = calibration_in_the_large(slope.value * SCORES, DIED).value
    chances, design = expit(constant + slope.value * SCORES), np.stack([SCORES, one], 1)
    assert design.T @ chances == pytest.approx(design.T @ DIED, abs=1e-5)
    information = (design * (chances * (1 - chances))[:, None]).T @ design
    assert slope.high - slope.value == pytest.approx(1.959964 * np.linalg.inv(information)[0, 0] ** 0.5, rel=1e-5)


def test_a_study_that_is_left_out_is_tested_whole_and_trains_nothing(tmp_path: Path) -> None:
    work = Work(drawn(3, 60), tmp_path)
    for configuration in (*METHODS, *PRIVATE):
        plan = work.plan(configuration, "study-1")
        assert plan.participation.sites == ("study-0", "study-2")
        assert plan.participation.evaluation_sites == (() if configuration.ensemble else ("study-1" + WHOLE,))
    parts = {
        site: [line.split(",")[-1] for line in (tmp_path / site / "cases.csv").read_text().splitlines()[1:]]
        for site in ("study-0", "study-1" + WHOLE)
    }
    counts = {site: [own.count(part) for part in ("train", "validation", "test")] for site, own in parts.items()}
    assert counts == {"study-0": [48, 12, 12], "study-1" + WHOLE: [0, 0, 60]}


@pytest.mark.long
def test_three_studies_come_out_again(shared_data: Path, tmp_path: Path) -> None:
    """FedAvg equals pooled regression for the smallest study, the largest study and the study with the most deaths."""
    studies = read(shared_data / "impact" / "impact.csv")
    assert (len(studies), sum(map(len, studies.values()))) == (15, 11_022)
    work = Work(studies, tmp_path / "tables")
    told = {
        (row["configuration"], row["quantity"]): float(row["value"]) / 100
        for row in rows_of(FILE)
        if row["part"] == DISCRIMINATION and not row["baseline"]
    }
    for left_out in ("SKB", "PEG", "UK4"):
        found = {POOLED: work.pooled(left_out, everybody=False)}
        found["FedAvg"] = work.predicted(METHODS[0], left_out, tmp_path / "cells")
        values = {name: auc(np.array(own["scores"]), deaths(studies[left_out])).value for name, own in found.items()}
        assert values["FedAvg"] == pytest.approx(values[POOLED], abs=0.01)
        assert values == pytest.approx({name: told[name, left_out] for name in values}, abs=0.002)
