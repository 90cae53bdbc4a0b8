"""Compare the statistics on medsilo's pages with statsmodels and scikit-survival: intervals, tests, power, survival,
concordance.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from medsilo.runs.score import Score
from medsilo.tasks.survival import Survival
from medsilo_lab.deploy.model_card import interval_of
from medsilo_lab.study.detectable import POWER, Pilot
from medsilo_lab.study.evidence import (
    compare,
    holm,
    interval,
    interval_of_concordance,
)
from tests.patient_scores import scores

WHY = "needs statsmodels, from pyproject.toml's group dev"
proportion = pytest.importorskip("statsmodels.stats.proportion", reason=WHY)
multitest = pytest.importorskip("statsmodels.stats.multitest", reason=WHY)
ranks = pytest.importorskip("statsmodels.stats.nonparametric", reason=WHY)
power = pytest.importorskip("statsmodels.stats.power", reason=WHY)
formulas = pytest.importorskip("statsmodels.formula.api", reason=WHY)
anova = pytest.importorskip("statsmodels.stats.anova", reason=WHY)
duration = pytest.importorskip("statsmodels.duration.api", reason=WHY)
survival = pytest.importorskip("sksurv", reason="needs scikit-survival, from pyproject.toml's group dev")


# ---------------------------------------------------------------------------------------------------- shares
@pytest.mark.parametrize(("right", "cases"), [(0, 5), (3, 7), (19, 20), (40, 40), (812, 1000)])
def test_a_cards_interval_is_statsmodels_wilson(right: int, cases: int) -> None:
    theirs = proportion.proportion_confint(right, cases, method="wilson")
    assert interval_of("accuracy", Score.told(right / cases, cases)) == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("patients", [10, 30, 200])
def test_a_shares_interval_is_between_jeffreys_and_clopper_and_pearsons(patients: int) -> None:
    for right in range(0, patients + 1, patients // 10):
        values = np.array([1.0] * right + [0.0] * (patients - right))
        low, high = interval(scores(values)) or (np.nan, np.nan)
        narrow = proportion.proportion_confint(right, patients, method="jeffreys")
        wide = proportion.proportion_confint(right, patients, method="beta")
        assert wide[0] - 0.01 <= low <= narrow[0] + 0.01
        assert narrow[1] - 0.01 <= high <= wide[1] + 0.01


# ---------------------------------------------------------------------------------------------------- differences
@pytest.mark.slow
def test_holms_correction_is_statsmodels() -> None:
    random = np.random.default_rng(1)
    for number in (1, 3, 12):
        values = random.uniform(size=number) ** 3
        theirs = multitest.multipletests(values, method="holm")[1]
        assert list(holm(dict(enumerate(values))).values()) == pytest.approx(theirs.tolist())


def test_the_variances_of_patients_and_seeds_are_those_of_an_analysis_of_variance() -> None:
    """In a crossed design of patients and seeds, variances follow from the mean squares of patients, seeds and
    residual.
    """
    random, patients, seeds = np.random.default_rng(2), 25, 4
    cells = (
        random.normal(0, 0.1, patients) + random.normal(0, 0.05, (seeds, 1)) + random.normal(0, 0.2, (seeds, patients))
    )
    found = compare(
        [{"a": scores(0.5 + one)} for one in cells],
        [{"a": scores(np.full(patients, 0.5))}] * seeds,
    )
    table = pd.DataFrame(
        {"y": cells.ravel(), "seed": np.repeat(range(seeds), patients), "patient": [*range(patients)] * seeds}
    )
    squares = anova.anova_lm(formulas.ols("y ~ C(patient) + C(seed)", table).fit())["mean_sq"]
    assert found.patients.variance == pytest.approx(squares["C(patient)"] / seeds / patients)
    assert found.between.variance == pytest.approx(squares["C(seed)"] / patients)
    assert found.cells == pytest.approx(squares["Residual"] / patients)
    assert found.patients.degrees == patients - 1 and found.between.degrees == seeds - 1


def test_an_interval_over_patients_is_statsmodels_students_for_many() -> None:
    random, patients = np.random.default_rng(3), 500
    values = random.normal(0.05, 0.15, patients)
    found = compare([{"a": scores(values)}], [{"a": scores(np.zeros(patients))}])
    low, high = formulas.ols("y ~ 1", pd.DataFrame({"y": values})).fit().conf_int().loc["Intercept"]
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.05 * (high - low))


@pytest.mark.parametrize("patients", [60, 200])
def test_a_difference_that_is_told_as_found_is_statsmodels(patients: int) -> None:
    """If there are many patients, and all variance comes from them, the power equals the power of a paired t-test."""
    values = 0.15 * stats.norm.ppf((np.arange(patients) + 0.5) / patients)
    mine, theirs = [{"a": scores(0.5 + values)}] * 5, [{"a": scores(np.full(patients, 0.5))}] * 5
    pilot = Pilot.of(compare(mine, theirs), mine, theirs, ["a"])
    theory = values.std(ddof=1) * power.TTestPower().solve_power(nobs=patients, alpha=0.05, power=POWER)
    assert pilot and pilot.least(pilot.design, 0.05) == pytest.approx(theory, rel=0.1)


# ---------------------------------------------------------------------------------------------------- curves
@pytest.mark.parametrize(("positives", "negatives"), [(60, 60), (40, 200), (300, 150)])
def test_an_interval_of_the_area_under_the_curve_is_near_statsmodels(positives: int, negatives: int) -> None:
    """statsmodels has Brunner and Munzel's interval, whose variance is DeLong's variance. Medsilo's interval is shifted
    towards the middle like Wilson's interval, and is at most a quarter wider than Wilson's interval.
    """
    random = np.random.default_rng(positives)
    ill, well = random.normal(1.2, 1.0, positives).round(1), random.normal(0.0, 1.0, negatives).round(1)
    theirs = ranks.rank_compare_2indep(ill, well)
    time = np.array([1.0] * positives + [2.0] * negatives)
    low, high = interval_of_concordance(time, (time == 1).astype(float), np.concatenate([ill, well])) or (0, 0)
    below, above = theirs.conf_int()
    assert low < theirs.prob1 < high
    assert low <= below + 0.015 and above - 0.015 <= high
    assert above - below <= high - low <= 1.25 * (above - below)
    area = stats.mannwhitneyu(ill, well).statistic / positives / negatives
    assert theirs.prob1 == pytest.approx(area)


# ---------------------------------------------------------------------------------------------------- survival
def followed(seed: int, patients: int = 80) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return survival times, events and risks; several patients have the same time or the same risk."""
    random = np.random.default_rng(seed)
    risk = random.normal(size=patients).round(1)
    time = np.ceil(20 * random.exponential(np.exp(-0.7 * risk))) + 1
    return time, (random.uniform(size=patients) < 0.6).astype(float), risk


@pytest.mark.parametrize("seed", range(4))
def test_concordance_is_scikit_survivals(seed: int) -> None:
    from sksurv.metrics import concordance_index_censored

    time, event, risk = followed(seed)
    theirs = concordance_index_censored(event == 1, time, risk)[0]
    goal, target = Survival(), torch.tensor(np.stack([time, event], 1))
    scores = goal.case_scores(torch.tensor(risk)[:, None], target)
    assert goal.score(scores) == pytest.approx(theirs)


@pytest.mark.parametrize("seed", range(4))
def test_coxs_loss_is_statsmodels_partial_likelihood(seed: int) -> None:
    time, event, risk = followed(seed)
    theirs = duration.PHReg(time, risk[:, None], status=event, ties="breslow").loglike(np.ones(1))
    losses = Survival().case_losses(torch.tensor(risk)[:, None], torch.tensor(np.stack([time, event], 1)))
    assert float(losses.sum()) == pytest.approx(-theirs)
