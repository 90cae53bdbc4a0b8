"""Calibration, thresholds, sensitivity and specificity equal independent computations, and are rounded before
disclosure.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, recall_score, roc_curve

from medsilo.core.errors import Refused
from medsilo.core.rounding import Resolution
from medsilo.exchange.acceptance import check_counts, check_threshold
from medsilo.federation.coarse_counts import coarse_chances, coarse_reliability
from medsilo.federation.disclosure import CLASS
from medsilo.federation.protection import planned_answers
from medsilo.federation.site_stack import TrainingSite
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Counted
from medsilo.runs.schema import Summary
from medsilo.site.settings import SiteSettings
from medsilo.tasks.decisions import PLACED, ClassCounts, calibration_error, on_a_place
from medsilo.tasks.measuring import chances, decided, judged, places_of, rates_of, reliability, threshold_of
from medsilo.tasks.metrics import BINS, BROAD, CHANCES, RELIABILITY, added
from medsilo_lab.engines.inprocess import Loop
from medsilo_lab.study.scores import read_measures
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.sites import site_of

A, B, C = SITES


def two(probabilities: list[float] | np.ndarray) -> torch.Tensor:
    second = torch.as_tensor(probabilities, dtype=torch.float64)
    return torch.stack([1 - second, second], 1)


def drawn(cases: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, cases)
    return labels, 1 / (1 + np.exp(-random.normal(2.5 * labels - 1.5, 1.5)))


def error_of(labels: torch.Tensor, told: torch.Tensor) -> float | None:
    counts = ClassCounts(told.shape[1]).with_derived(
        {CHANCES: chances(labels, told), RELIABILITY: reliability(told)}, None
    )
    return calibration_error(counts[RELIABILITY], counts[PLACED])


# ---------------------------------------------------------------------------------------------------- by hand


def test_of_several_classes_each_is_held_against_the_rest() -> None:
    labels, told = torch.tensor([0, 1, 2]), torch.eye(3, dtype=torch.float64) * 0.7 + 0.1
    assert list(judged(3)) == [0, 1, 2] and len(reliability(told)) == 3 * BROAD
    assert error_of(labels, told) == pytest.approx((0.2 + 0.1 + 0.1) / 3)


# ---------------------------------------------------------------------------------------------------- scikit-learn
@pytest.mark.parametrize("seed", range(3))
def test_calibration_is_scikit_learns(seed: int) -> None:
    labels, told = drawn(400, seed)
    share, mean = calibration_curve(labels, told, n_bins=BROAD, strategy="uniform")
    cases = np.histogram(told, BROAD, (0, 1))[0]
    wanted = float((np.abs(share - mean) * cases[cases > 0]).sum() / cases.sum())
    one = torch.from_numpy(labels)
    found = error_of(one, two(told))
    assert found == pytest.approx(wanted)
    assert found**2 <= brier_score_loss(labels, told)  # the squared calibration error is never above the Brier score
    first, second = (
        ClassCounts(2).with_derived(
            {CHANCES: chances(one[part], two(told[part])), RELIABILITY: reliability(two(told[part]))}, None
        )
        for part in (slice(0, 150), slice(150, 400))
    )
    both = added([first, second])
    assert calibration_error(both[RELIABILITY], both[PLACED]) == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(3))
def test_rates_and_youdens_threshold_are_scikit_learns(seed: int) -> None:
    labels, told = drawn(300, seed)
    # scikit-learn compares probabilities with the same rounded thresholds
    told = (told * BINS).astype(int) / BINS + 0.5 / BINS
    counts = chances(torch.from_numpy(labels), two(told))
    for cut in (0.2, 0.5, 0.835):
        sensitivity, specificity = rates_of(decided(counts, cut))
        assert sensitivity == recall_score(labels, told >= cut)
        assert specificity == recall_score(labels, told >= cut, pos_label=0)
    wrong, right, _ = roc_curve(labels, told, drop_intermediate=False)
    assert sum(rates_of(decided(counts, threshold_of(counts, BINS)))) - 1 == pytest.approx(max(right - wrong))


# ---------------------------------------------------------------------------------------------------- of patients
def test_what_is_told_of_patients_is_coarse_and_near() -> None:
    """A hospital discloses a rounded mean for a bin with many cases, and the bin's centre for a bin with few cases."""
    labels, told = drawn(400, 5)
    exact, one = reliability(two(told)), torch.from_numpy(labels)
    counts, resolution = chances(one, two(told)), Resolution(1 / 400, 2, 5)
    shown = coarse_chances(counts, 2, resolution)
    sums = coarse_reliability(exact, counts, shown, 2, resolution)
    cases = places_of(shown, 2).sum(1).flatten().tolist()
    assert all(
        low / BROAD * n <= total <= (low + 1) / BROAD * n
        for low, (n, total) in enumerate(zip(cases, sums, strict=True))
    )
    rough = calibration_error(sums, places_of(shown, 2).flatten().tolist())
    assert rough == pytest.approx(error_of(one, two(told)), abs=0.02)
    few = coarse_reliability(exact, counts, shown, 2, Resolution(1 / 400, 200, 5))
    assert few == pytest.approx([(place + 0.5) / BROAD * n for place, n in enumerate(cases)])


def test_one_patients_cases_do_not_show_in_what_is_told() -> None:
    """If the probability of one of 400 patients moves within its bin, the disclosed mean moves by at most one rounding
    step.
    """
    labels, told = drawn(400, 6)
    place = int((told < 0.1).nonzero()[0][0])
    resolution, found = Resolution(1 / 400, 2, 5), set()
    for own in np.linspace(0.0, 0.0999, 25):
        told[place] = own
        counts = chances(torch.from_numpy(labels), two(told))
        shown = coarse_chances(counts, 2, resolution)
        sums = coarse_reliability(reliability(two(told)), counts, shown, 2, resolution)
        found.add(round(sums[0] / places_of(shown, 2).sum(1)[0, 0].item(), 9))
    share = float((told < 0.1).mean())
    assert len(found) <= 2 and max(found) - min(found) in (0, pytest.approx(resolution.among(share).step(0, 0.1)))


# ---------------------------------------------------------------------------------------------------- a study
def histology(*changes: str) -> Plan:
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": "synthetic-histology", "patients": 100, "patches": 2, "size": 32},
            "training": {"rounds": 1, "batch_size": 16, "learning_rate": 0.2, "momentum": 0.9},
            "participation": {"sites": SITES[:2], "timeout": 120},
        },
        changes,
    )


def study(root: Path, plan: Plan, **settings: Any) -> tuple[Summary, dict[str, TrainingSite]]:
    own = {A: SiteSettings(device="cpu"), B: SiteSettings(device="cpu", **settings)}
    sites = {
        site: site_of(plan, site, SITES[:2], given, root / "sites" / site, plan.task.load(site, SITES[:2], 0, None))
        for site, given in own.items()
    }
    return Coordinator(plan, SITES[:2], Loop(sites), Record(root), "in-process").run(), sites


def of_validation(root: Path, site: TrainingSite) -> tuple[np.ndarray, np.ndarray]:
    measures = site.participant.evaluation.evaluate(
        site.participant.data.validation,
        lambda: None,
        site.participant.state.model,
        site.participant.context.plan.task.goal.measuring,
    )[2]
    return measures["label"].numpy(), measures["p1"].numpy()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary, dict[str, TrainingSite]]:
    root = tmp_path_factory.mktemp("study") / "run"
    return root, *study(root, histology(), min_patients_per_metric=999)


def test_a_threshold_comes_from_validation_cases_and_is_judged_on_test_cases(told: Any) -> None:
    root, summary, sites = told
    decisions, figures = summary.sites[A].decisions, summary.sites[A].figures
    labels, chance = of_validation(root, sites[A])
    youden = {cut / BINS: sum(_rates(labels, chance >= cut / BINS)) for cut in range(1, BINS)}
    assert youden[decisions.threshold] == max(youden.values())
    measures, _ = read_measures(root / "sites" / A)
    truth, found = measures["label"].numpy(), measures["p1"].numpy() >= decisions.threshold
    assert (figures["sensitivity"], figures["specificity"]) == pytest.approx(_rates(truth, found))
    assert decisions.decided == [int(((truth == c) & (found == f)).sum()) for c in (0, 1) for f in (False, True)]
    argmax = measures["found"].numpy()
    assert decisions.confusion == [[int(((truth == c) & (argmax == f)).sum()) for f in (0, 1)] for c in (0, 1)]
    assert [sum(column) for column in zip(*decisions.reliability[0], strict=True)] == pytest.approx(
        [len(truth), int(truth.sum()), float(measures["p1"].sum())]
    )


def _rates(labels: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    return float(found[labels == 1].mean()), float(1 - found[labels == 0].mean())


def test_a_hospital_with_too_few_patients_tells_neither_threshold_nor_calibration(told: Any) -> None:
    root, summary, _ = told
    site = summary.sites[B]
    assert site.decisions is None and RELIABILITY in site.suppressed
    assert site.figures.keys().isdisjoint({"calibration_error", "sensitivity"})
    for name in ("sensitivity", "specificity", "calibration_error"):
        assert summary.pooled[name] == summary.sites[A].figures[name]
    assert (root / "summary.json").read_text().count('"threshold"') == 1


def test_of_patients_only_places_of_a_tenth_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disclosed sums and counts are rounded, and the threshold is a multiple of 0.1.

    A hospital with 40 validation patients discloses a threshold only if its settings do not demand more patients.
    """
    plan = histology("task.patients=200")
    monkeypatch.setattr(type(plan.task), "synthetic", False)
    assert planned_answers(plan)["validation"] == plan.rounds + 2
    summary, sites = study(tmp_path / "run", plan, min_patients_per_metric=6)
    decisions = summary.sites[A].decisions
    assert decisions.threshold * BROAD == pytest.approx(round(decisions.threshold * BROAD))
    assert all(count % 5 == 0 for count in decisions.decided) and sum(decisions.decided) == 60
    assert sites[A].participant.data.validation.targets.bincount().tolist() == [2 * CLASS * 5] * 2
    other = summary.sites[B].decisions
    assert other.threshold is None and other.reliability and "sensitivity" not in summary.sites[B].figures
    books = {
        site: own.participant.trainer.protection.budget.used(own.participant.trainer.protection.requester.data)[""]
        for site, own in sites.items()
    }
    assert books[A]["validation"] == planned_answers(plan)["validation"] == books[B]["validation"] + 1


def test_impossible_sums_and_thresholds_are_refused() -> None:
    labels, told = torch.tensor([0, 1, 1]), two([0.05, 0.35, 0.95])
    plan, cases = histology(), Counted(train=3, validation=3, test=3)
    counts = {CHANCES: chances(labels, told), RELIABILITY: reliability(told)}
    check_counts(counts, plan, cases)
    check_threshold(0.5, counts, plan)
    wrong = {
        "but 1 cases in this bin have a sum from 0 to 0.1": counts | {RELIABILITY: [0.2, *counts[RELIABILITY][1:]]},
        "but 0 cases in this bin have a sum from 0 to 0": counts | {RELIABILITY: [0.05, 0.1, *counts[RELIABILITY][2:]]},
        "contain reliability, but not chances": {RELIABILITY: counts[RELIABILITY]},
        "of reliability are not 10 numbers": counts | {RELIABILITY: [0.5]},
        "of chances are not 800 numbers": {RELIABILITY: counts[RELIABILITY], CHANCES: [1.0]},
        "of chances are not whole numbers that add up to 3": counts | {CHANCES: [6.0] + [0.0] * 799},
    }
    for words, values in wrong.items():
        with pytest.raises(Refused, match=words):
            check_counts(values, plan, cases)
    with pytest.raises(Refused, match="not a multiple of 1/200"):
        check_threshold(0.5021, counts, plan)
    for asked, given in ((plan, {}), (make_plan("fedavg"), counts)):
        with pytest.raises(Refused, match="unexpected field: threshold"):
            check_threshold(0.5, given, asked)
    assert not on_a_place(1e-9) and on_a_place(1 / BINS)
