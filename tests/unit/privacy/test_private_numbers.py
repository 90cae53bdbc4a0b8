"""Private counts and scores have the charged noise, and no exact count or score leaves the hospital."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medsilo.check.demands import price_list, privacy_findings
from medsilo.core.errors import PlanError
from medsilo.core.files import load_tensors
from medsilo.core.rounding import Resolution
from medsilo.federation.private_site import PrivateNumbers
from medsilo.plan import Plan, parse_plan
from medsilo.privacy.accounting import epsilon, geometric_for
from medsilo.privacy.guarantees import PrivacyGuarantee
from medsilo.privacy.mechanisms import Charge, Geometric
from medsilo.runs.paths import BEST, NOISY_COUNTS, site_folder
from medsilo.runs.reading import read_summary
from medsilo.runs.schema import SiteResult
from medsilo.site.query_budget import PARTS, QueryBudget, data_set
from medsilo.site.settings import PrivacyRequirements, make_settings
from medsilo.tasks.sources import DataSource
from medsilo_lab.engines import inprocess
from medsilo_server.record import Record
from tests.hospital import NAMES, write_photos
from tests.unit.privacy.test_private_training import promised
from tests.unit.site.test_account import PRIVATE, ask, settings_of, site, standing, weights

pytestmark = pytest.mark.usefixtures("known_key")
NOISY = {**PRIVATE, "privacy": {**PRIVATE["privacy"], "scores": {"epsilon": 0.8}, "counts": {"epsilon": 0.4}}}


def numbers(folder: Path, patients: int = 40, plan: Plan | None = None, **demands: Any) -> PrivateNumbers:
    units = [f"p{n}" for n in range(patients)]
    own = PrivacyRequirements(**{"epsilon": 5.0, "delta": 1e-3, **demands})
    promise = PrivacyGuarantee(epsilon=2.0, delta=1e-3, unit="patient")
    parts = dict.fromkeys(("train", "validation", "test"), units)
    return PrivateNumbers(plan or parse_plan(NOISY), "a", own, promise, True, folder, parts)


# ---------------------------------------------------------------------------------------------------- the noise
@pytest.mark.usefixtures("known_noise")
@pytest.mark.slow
def test_the_noise_on_a_score_has_the_scale_of_its_account(tmp_path: Path) -> None:
    own, values = numbers(tmp_path, public={"counts": "known"}), torch.full((40,), 0.5)
    found = np.array([own.score("validation", 1, values, 0.0, 1.0) for _ in range(4000)])
    scale = own.scoring.scale * 0.5 / 40
    inside = np.abs(found - 0.5) < 0.49
    assert scale < 0.1 and inside.mean() > 0.99
    assert np.abs(found[inside] - 0.5).mean() == pytest.approx(scale, rel=0.08)
    # the tolerance follows from the standard deviation of the Laplace distribution
    assert found[inside].mean() == pytest.approx(0.5, abs=4 * math.sqrt(2 / len(found)) * scale)


@pytest.mark.usefixtures("known_noise")
def test_the_noise_on_counts_has_the_scale_of_its_account_and_is_drawn_once(tmp_path: Path) -> None:
    found, plan = [], parse_plan(NOISY)
    for number in range(600):
        folder = tmp_path / str(number)
        folder.mkdir()
        own = numbers(folder, 400, plan)
        counted = own.counted
        # another process reads the same counts from the disk
        assert counted and numbers(folder, 400, plan).counted == counted
        found += [counted[1][part] - 400 for part in ("train", "validation", "test")]
    scale = own.counting.scale
    assert scale == pytest.approx(1 / 0.4)
    q = math.exp(-1 / scale)
    # the tolerance is five standard deviations of the estimate
    assert np.std(found) == pytest.approx(math.sqrt(2 * q) / (1 - q), rel=0.14)
    assert abs(np.mean(found)) < 0.4


def test_one_patient_moves_a_sum_of_scores_by_half_the_range_at_most(tmp_path: Path) -> None:
    """One patient changes a sum of scores by at most half of the range.

    The noise of a fixed seed cancels in the difference of two sums.
    """
    plan = promised("fedavg", "privacy.scores.epsilon=0.5")
    units = ["a", "a", "a", "b", "c"]
    one, other = (
        PrivateNumbers(plan, "a", None, PrivacyGuarantee(epsilon=2, delta=1e-3), True, tmp_path, {"validation": own})
        for own in (units, units[3:])
    )
    extreme = torch.tensor([1.0, 1.0, float("inf"), 0.4, 0.6])
    told = one.score("validation", 3, extreme, 0, 1), other.score("validation", 3, extreme[3:], 0, 1)
    middle = [(value - 0.5) * size for value, size in zip(told, (3, 2), strict=True)]
    assert middle[0] - middle[1] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("count", [1, 12, 200])
def test_scores_together_cost_what_they_may(count: int) -> None:
    scale = geometric_for(0.5, 1e-5, count, 1000)
    of = Geometric(scale=scale, sensitivity=1000, count=count)
    assert 0.49 < epsilon([Charge(what="scores", of=of)], 1e-5) <= 0.5
    # noise for all scores together is never more than a separate ε for each score would need
    assert scale <= count / 0.5 * 1.01


# -------------------------------------------------------------------------------------------- the privacy account
@pytest.mark.slow
def test_all_that_is_charged_is_what_was_promised(photos: Path, tmp_path: Path) -> None:
    one = site(tmp_path, photos, plan=NOISY, public={})
    private, numbers = one.participant.trainer.private, one.participant.disclosure.numbers
    assert private and numbers
    assert 1.95 < epsilon(one.site.planned(), 1e-3) <= 2.0
    bare = replace(private, numbers=replace(numbers, plan=parse_plan(PRIVATE)))
    assert private.noise > bare.noise  # scores and counts use a fraction of the privacy budget


def test_numbers_may_not_take_all() -> None:
    with pytest.raises(PlanError, match="scores and statistics cost ε = 2 of 2"):
        promised("fedavg", "privacy.scores.epsilon=1.5", "privacy.counts.epsilon=0.5")


# ---------------------------------------------------------------------------------------------------- whole studies
def run(root: Path, data: Path, plan: dict[str, Any] = NOISY, **demands: Any) -> Plan:
    checked = parse_plan(plan)
    inprocess.run(checked, folder=root, settings=settings_of(data, **{"public": {}, **demands}))
    return checked


def _selected(folder: Path) -> int:
    return load_tensors(site_folder(folder, "a") / BEST)[1]["round"]


@pytest.mark.slow
def test_a_study_with_noisy_numbers_tells_nothing_exact_and_is_charged(photos: Path, tmp_path: Path) -> None:
    plan = run(tmp_path / "study", photos)
    record, folder = Record(tmp_path / "study"), site_folder(tmp_path / "study", "a")
    counted = json.loads((folder / NOISY_COUNTS).read_text())["counts"]
    lines = [line.sites["a"] for line in record.rounds()]
    assert all(line.samples == counted["train"] and line.train_loss is None for line in lines)
    assert all(line.validation is not None and line.validation_loss is None for line in lines)
    summary = read_summary(tmp_path / "study")
    told = summary.sites["a"]
    assert told.test and told.test["loss"] is None and told.test["accuracy"] is not None and told.figures == {}
    assert told.cases == counted and set(told.classes.values()) == {None}  # type: ignore[union-attr]
    scores = [score for score in told.validation if score is not None]
    assert len(scores) == plan.rounds + 1 and scores[:2] == [line.validation for line in lines]
    assert scores[_selected(tmp_path / "study")] == max(scores)
    entries = [entry for entry in standing(tmp_path).entries if entry.kind == "charged"]
    kinds = [(entry.what, sorted(charge.of.kind for charge in entry.charges)) for entry in entries]
    assert kinds == [
        ("numbers of cases", ["geometric"]),
        ("join", []),
        ("round 1", ["geometric", "sampled-gaussian"]),
        ("round 2", ["geometric", "sampled-gaussian"]),
        ("deliver", ["geometric"]),
        ("test", ["geometric"]),
    ]
    assert 1.95 < standing(tmp_path).epsilon(1e-3) <= 2.0


@pytest.mark.long
def test_what_a_hospital_declares_public_costs_nothing_beside_noise(photos: Path, tmp_path: Path) -> None:
    run(tmp_path / "study", photos, public={"counts": "known", "test": "agreed"})
    charges = [charge for entry in standing(tmp_path).entries for charge in entry.charges if entry.kind == "charged"]
    assert sum(charge.of.kind == "geometric" for charge in charges) == 3  # the ledger charges only validation scores
    # the ledger charges no counts
    assert {charge.of.sensitivity for charge in charges if charge.of.kind == "geometric"} == {1000}
    assert read_summary(tmp_path / "study").sites["a"].test["loss"] is not None  # type: ignore[index]


@pytest.mark.long
def test_counts_are_drawn_once_whoever_asks_again(photos: Path, tmp_path: Path) -> None:
    told = []
    for shift in (0.0, 0.1, 0.2):
        one = site(tmp_path, photos, plan=NOISY, public={})
        model = {"model": {name: tensor + shift for name, tensor in weights(one)["model"].items()}}
        told.append(one.answer(ask(one.participant.context.plan, model, 1)))
    assert told[0].facts["cases"] == told[1].facts["cases"] and told[0].facts["samples"] == told[1].facts["samples"]
    # some scores may be outside of the range, and are clipped
    assert len({one.facts["validation"] for one in told}) > 1
    entries = standing(tmp_path).entries
    assert sum(entry.what == "numbers of cases" for entry in entries) == 1
    assert sum(entry.what == "round 1" for entry in entries) == 3


@pytest.mark.long
def test_training_rests_on_the_noisy_count(photos: Path, tmp_path: Path) -> None:
    one = site(tmp_path, photos, plan=NOISY, public={})
    assert one.participant.disclosure.numbers and one.participant.disclosure.numbers.counted
    (site_folder(tmp_path / "study", "a") / NOISY_COUNTS).write_text(
        json.dumps({"draw": "x", "counts": {"train": 16, "validation": 9, "test": 9}})
    )
    again = site(tmp_path, photos, plan=NOISY, public={})
    trainer = again.participant.trainer
    assert trainer.private and trainer.private.rate == 0.5 and trainer.private.steps == 2
    sample = trainer.private.sample(trainer.private.numbers.secret(1))
    assert (sample.rate, sample.expected) == (0.5, 8) and len(trainer.train) != 16  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_hospital_chooses_its_own_model_by_what_it_tells(photos: Path, tmp_path: Path) -> None:
    """A hospital selects its model by scores with noise, because the lead learns which round was selected."""
    own = {**NOISY, "algorithm": {"name": "mr-mtl"}}
    run(tmp_path / "noisy", photos, own)
    told = read_summary(tmp_path / "noisy").sites["a"].validation
    assert told[_selected(tmp_path / "noisy")] == max(told)  # type: ignore[type-var]
    silent = {**own, "privacy": {**PRIVATE["privacy"], "counts": {"epsilon": 0.1}}}
    run(tmp_path / "silent", photos, silent)
    assert _selected(tmp_path / "silent") == 2  # the hospital selects the last round if it discloses no score


def test_prices_check_and_cautions_say_so(photos: Path) -> None:
    said = parse_plan(NOISY).warnings(["a"])
    assert "scores have noise for privacy" in said[0] and "numbers of cases have noise" in said[1]
    assert parse_plan(PRIVATE).warnings(["a"]) == []
    plan, own = parse_plan(NOISY), settings_of(photos, public={})
    prices = dict(price_list(plan, own))
    assert prices["numbers of cases"].startswith("geometric noise drawn once; ε = 0.4")
    assert prices["score and loss over validation cases"].startswith("geometric noise on the score")
    assert prices["loss over training cases"] == "0: does not leave"
    assert all(one.severity != "stops" for one in privacy_findings(plan, own, None))
    assert any(one.severity == "stops" for one in privacy_findings(parse_plan(PRIVATE), own, None))


# ----------------------------------------------------------------------------- minimum group sizes of plan and hospital
LOUD = {"epsilon": 1000.0, "delta": 1e-3, "scores": {"epsilon": 400.0}, "counts": {"epsilon": 400.0}}


def parts_of(tests: int, validated: int) -> dict[str, str]:
    return {
        name: "test" if number < tests else "validation" if number < tests + validated else "train"
        for number, name in enumerate(NAMES)
    }


def offered(root: Path, data: Path, epsilon: float = 1000.0, **settings: Any) -> SiteResult:
    share = epsilon / 1000
    noise = {"epsilon": 400.0 * share}
    plan = parse_plan({**PRIVATE, "privacy": {**LOUD, "epsilon": epsilon, "scores": noise, "counts": noise}})
    own = make_settings({"device": "cpu", "data": {"folder": str(data)}, **settings}, "x")
    return inprocess.run(plan, folder=root, settings=own).summary().sites["a"]  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.parametrize("private", [None, {"epsilon": 1000.0, "delta": 1e-3}])
def test_a_plans_noise_lowers_no_floor_of_a_hospital(private: dict | None, tmp_path: Path) -> None:
    """Even if a plan adds noise, and the hospital demands only weak privacy, a score needs the minimum number of
    patients.
    """
    photos = write_photos(tmp_path / "photos", NAMES, parts_of(3, 17))
    told = offered(tmp_path / "study", photos, privacy=private)
    assert told.test and told.test["accuracy"] is None and told.test["loss"] is None
    assert all(count % 5 == 0 for count in told.cases.values())  # the exact counts are 40, 17 and 3 cases
    step = Resolution(1 / 17, 2).step(0, 1)
    scores = [score for score in told.validation if score is not None]
    assert step == 0.2 and scores and all(score == pytest.approx(round(score / step) * step) for score in scores)
    assert (
        QueryBudget(tmp_path / "_hospital/a").used(data_set(DataSource(folder=photos), "image-folder"))[""][
            "validation"
        ]
        == 3
    )


@pytest.mark.usefixtures("known_noise")
@pytest.mark.slow
def test_noise_beside_rounding_can_not_be_averaged_away(tmp_path: Path) -> None:
    """Averaging the answers to many requests for the same score reveals only the rounded score."""
    plan = parse_plan(
        {**PRIVATE, "privacy": {**LOUD, "epsilon": 20.0, "scores": {"epsilon": 8.0}, "counts": {"epsilon": 1.0}}}
    )
    promise = PrivacyGuarantee(epsilon=20.0, delta=1e-3)
    units = {part: [f"p{number}" for number in range(402)] for part in PARTS}
    own = PrivateNumbers(plan, "a", None, promise, True, tmp_path, units, 5)
    values, step = torch.full((402,), 0.47), 0.05
    scores = np.array([own.score("validation", number, values, 0.0, 1.0, step) for number in range(4000)])
    assert np.allclose(scores / step, np.round(scores / step)) and len(set(scores)) > 3
    assert scores.mean() == pytest.approx(0.45, abs=4 * scores.std() / 4000**0.5)
    found: list[int] = []
    for number in range(100):
        (tmp_path / str(number)).mkdir()
        counted = replace(own, folder=tmp_path / str(number)).counted
        found += counted[1].values() if counted else []
    counts = np.array(found)
    assert len(counts) == 300 and set(counts % 5) == {0} and len(set(counts)) > 3
    assert counts.mean() == pytest.approx(400, abs=4 * counts.std() / 300**0.5)


@pytest.mark.long
def test_a_plans_noise_does_not_make_a_hospital_forget_earlier_groups(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", NAMES, parts_of(15, 15))
    assert offered(tmp_path / "one", photos).validation != [None, None, None]
    write_photos(photos, NAMES, parts_of(15, 16))
    told = offered(tmp_path / "other", photos)
    assert told.validation == [None, None, None] and told.test and told.test["accuracy"] is not None
    assert any("fewer than 5 patients" in line for line in told.warnings["join"])


@pytest.mark.usefixtures("known_noise")
@pytest.mark.slow
def test_noise_that_the_hospital_demands_stands_in_the_place_of_its_floors(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", NAMES, parts_of(3, 17))
    demands = {"epsilon": 1000.0, "delta": 1e-3}
    told = offered(tmp_path / "study", photos, epsilon=8.0, privacy=demands)
    assert told.test and told.test["accuracy"] is not None
    exact = {"train": 40, "validation": 17, "test": 3}
    # noise changes about one in five counts
    assert all(abs(told.cases[part] - count) <= 5 for part, count in exact.items())
    assert any(count % 5 for count in told.cases.values())


def test_check_and_disclosure_report_say_whose_floors_hold(photos: Path) -> None:
    plan = parse_plan({**PRIVATE, "privacy": LOUD})
    for own in (None, {"epsilon": 50.0, "delta": 1e-3}):
        settings = make_settings({"data": str(photos), "privacy": own}, "x")
        [note] = [one for one in privacy_findings(plan, settings, None) if "min_patients_per_metric" in one.what]
        assert note.severity == "note" and ("above 10" if own else "privacy") in note.what + note.remedy
        assert "both hold" in dict(price_list(plan, settings))["score, loss and counts over test cases"]
    settings = make_settings({"data": str(photos), "privacy": {"epsilon": 5.0, "delta": 1e-3}}, "x")
    assert not any("min_patients_per_metric" in one.what for one in privacy_findings(plan, settings, None))
    assert "both hold" not in dict(price_list(plan, settings))["score, loss and counts over test cases"]
