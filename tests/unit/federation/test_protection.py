"""A curious lead tries to learn one patient's data from two studies, from many requests, and from unusual splits."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from medsilo.check.demands import source_of
from medsilo.core.errors import DataError, Refused
from medsilo.core.files import load_tensors
from medsilo.core.rounding import Resolution, step_of_at_least
from medsilo.federation.disclosure import Disclosure
from medsilo.plan import parse_plan
from medsilo.runs.messages import MOST_LOSS
from medsilo.runs.schema import Summary
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.splits import parts_by_rank
from medsilo_server.record import Record
from tests import inprocess
from tests.hospital import NAMES, photograph, write_photos, write_pixels, write_table
from tests.sites import site_of

STUDY = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "image-folder", "kind": "classification", "labels": ["no", "yes"], "size": [8, 8]},
    "network": {"name": "small-cnn", "width": 2},
    "training": {"rounds": 1, "batch_size": 64},
    "participation": {"sites": ["a"]},
}


Asks = Callable[..., Summary]


@pytest.fixture
def asks(tmp_path: Path) -> Asks:
    """All studies share the hospital's query budget, which is stored beside the studies' folders."""

    def study(name: str, data: Path | dict, *changes: str, **settings: object) -> Summary:
        own = make_settings({"device": "cpu", "data": data, **settings}, "x")
        return inprocess.run(parse_plan(STUDY, changes), folder=tmp_path / name, settings=own).summary

    return study


# ----------------------------------------------------------------------------------------------------------- the attack
def validated(shares: str) -> set[str]:
    classes = {name: str(number % 2) for number, name in enumerate(NAMES)}
    parts = parts_by_rank(classes, json.loads(shares), 0)
    return {name for name, part in parts.items() if part == "validation"}


def two_shares() -> tuple[str, str]:
    texts = [f"[{train:.6f},{0.8 - train:.6f},0.2]" for train in np.arange(0.4, 0.7, 0.001)]
    return next(pair for pair in pairwise(texts) if len(validated(pair[0]) - validated(pair[1])) == 1)


def attack(asks: Asks, photos: Path, root: Path, **settings: object) -> tuple[list[float], int]:
    for name, shares in zip(("one", "other"), two_shares(), strict=True):
        asks(name, photos, f"task.shares={shares}", **settings)
    told = [Record(root / name).rounds()[0].sites["a"].validation_loss for name in ("one", "other")]
    return told, len(validated(two_shares()[0]))


def true_loss(photos: Path) -> float:
    (patient,) = validated(two_shares()[0]) - validated(two_shares()[1])
    plan = parse_plan(STUDY)
    model = plan.algorithm.whole(plan.build_networks()).eval()
    data = plan.task.read("a", ["a"], 0, make_settings({"data": photos}, "x").data)
    parts = [data.train, data.validation, data.test]
    (inputs, target), *_ = [part[part.patients.index(patient)] for part in parts if patient in part.patients]
    with torch.no_grad():
        return float(plan.task.goal.loss(model(inputs[None]), target[None]))


@pytest.mark.slow
def test_without_protection_two_studies_tell_a_patients_loss_to_five_digits(
    asks: Asks, photos: Path, tmp_path: Path
) -> None:
    (one, other), cases = attack(asks, photos, tmp_path, public_data=True)
    assert cases * one - (cases - 1) * other == pytest.approx(true_loss(photos), abs=1e-5)


def test_by_default_both_studies_tell_of_the_same_patients(asks: Asks, photos: Path, tmp_path: Path) -> None:
    (one, other), _ = attack(asks, photos, tmp_path)
    assert one == other
    warnings = Record(tmp_path / "one").summary().sites["a"].warnings["join"]
    assert len(warnings) == 1 and "(0.6, 0.2, 0.2); task.shares" in warnings[0]


@pytest.mark.slow
def test_exact_numbers_and_another_seed_move_nobody_either(
    asks: Asks, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hospital's split of patients depends on neither the rounding of scores nor the plan."""
    monkeypatch.setattr("medsilo.site.settings.SCORE_ROUNDING", 0)
    (one, other), _ = attack(asks, photos, tmp_path, min_patients_per_metric=1)
    asks("third", photos, "task.split=7", "seed=0", min_patients_per_metric=1)
    third = Record(tmp_path / "third").rounds()[0].sites["a"].validation_loss
    assert one == other == third and one != round(one, 4)


def test_another_hospital_has_another_split(photos: Path, tmp_path: Path) -> None:
    settings = make_settings({"device": "cpu", "data": photos}, "x")
    patients = [
        site_of(
            parse_plan(STUDY), "a", ["a"], settings, tmp_path / own / "study/sites/a"
        ).participant.disclosure.patients
        for own in ("one", "other")
    ]
    assert patients[0]["validation"] != patients[1]["validation"]


# ------------------------------------------------------------------------------------------------------------- rounding
@pytest.mark.parametrize("patients", [5, 12, 17, 60, 400])
def test_one_patient_moves_a_told_mean_by_one_step_at_most_and_mostly_not_at_all(patients: int) -> None:
    """One patient's value moves the exact mean by at most half a rounding step, and the disclosed mean by at most one
    step.
    """
    random = np.random.default_rng(patients)
    told = Resolution(1 / patients, 2)
    step = told.step(0, 1)
    assert 2 / patients <= step <= 5 / patients
    moved = 0
    for _ in range(400):
        others = random.random(patients - 1).sum()
        least, most = (told.mean((others + value) / patients, 0, 1) for value in (0.0, 1.0))
        assert most - least <= step * 1.000001
        moved += least != most
    # one patient changes the mean by at most half a rounding step, so about half of the rounded means change
    assert moved / 400 < 0.58


@pytest.mark.parametrize("patients", [12, 17, 60])
def test_differencing_told_means_is_off_by_up_to_two_ranges(patients: int) -> None:
    """The attack computes a patient's loss from the rounded mean losses of two groups that differ only in this
    patient.
    """
    random = np.random.default_rng(0)
    larger, smaller = Resolution(1 / patients, 2), Resolution(1 / (patients - 1), 2)
    bound = (patients * larger.step(0, MOST_LOSS) + (patients - 1) * smaller.step(0, MOST_LOSS)) / 2
    assert bound >= 2 * MOST_LOSS
    errors = []
    for _ in range(400):
        values = random.uniform(0, MOST_LOSS, patients)
        told = larger.mean(values.mean(), 0, MOST_LOSS), smaller.mean(values[1:].mean(), 0, MOST_LOSS)
        errors.append(patients * told[0] - (patients - 1) * told[1] - values[0])
    assert max(map(abs, errors)) <= bound + 1e-9
    # a random guess, uniform within the range of losses, would have a smaller error than the attack
    assert np.std(errors) > MOST_LOSS / np.sqrt(12)


def test_a_patient_with_many_images_makes_steps_larger() -> None:
    alone = Resolution.over([f"p{number}" for number in range(100)], 2, 5)
    many = Resolution.over([f"p{number}" for number in range(50)] + ["p0"] * 50, 2, 5)
    assert alone.step(0, 1) == 0.02 and many.step(0, 1) == 2.0 >= 2 * many.weight
    assert alone.among(0.5).step(0, 1) == 0.05


@pytest.mark.parametrize(("width", "step"), [(0, 0), (0.02, 0.02), (0.021, 0.05), (0.06, 0.1), (3, 5), (1, 1)])
def test_steps_are_numbers_that_people_read(width: float, step: float) -> None:
    assert step_of_at_least(width) == step


def test_counts_make_up_the_told_whole() -> None:
    told = Resolution(0.1, 2, 5)
    assert [told.count(number) for number in (0, 1, 7, 8, 12, 13, 60)] == [0, 5, 5, 10, 10, 15, 60]
    assert told.shared_out([8, 1, 2, 6]) == [10, 0, 0, 5]
    random = np.random.default_rng(0)
    for _ in range(200):
        counts = random.integers(0, 30, 6).tolist()
        out = told.shared_out(counts)
        assert sum(out) == told.count(sum(counts)) and all(count % 5 == 0 for count in out)
        assert all(abs(count - own) <= 5 + own / 10 for count, own in zip(out, counts, strict=True))


def test_one_cases_loss_counts_for_no_more_than_most(asks: Asks, photos: Path, tmp_path: Path) -> None:
    """A lead could choose a network with an extreme loss for one patient, which rounding does not hide.

    The hospital limits each patient's loss before averaging, so that the mean hides an extreme loss.
    """
    plan = parse_plan(STUDY)
    settings = make_settings({"device": "cpu", "data": photos}, "x")
    site = site_of(plan, "a", ["a"], settings, tmp_path / "study/sites/a")
    model = site.participant.state.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(100)
    loss, _, measures = site.participant.evaluation.evaluate(site.participant.data.validation, lambda: None, model)
    assert loss > 10 * MOST_LOSS
    assert site.participant.disclosure.loss("validation", loss, measures) <= MOST_LOSS


# ---------------------------------------------------------------------------------------------------- disclosed numbers
@pytest.mark.slow
def test_told_figures_are_right_within_their_step(asks: Asks, tmp_path: Path) -> None:
    """The hospital's table determines the split, so exact and rounded scores are of the same patients."""
    parts = {f"p{number}": ("train", "train", "validation", "test", "test")[number % 5] for number in range(240)}
    data = {"folder": str(write_photos(tmp_path / "photos", [*parts], parts))}
    changes = ["training.learning_rate=0.05", "training.rounds=2"]
    exact = asks("exact", data, *changes, public_data=True)
    coarse = asks("coarse", data, *changes)
    one, other = exact.sites["a"], coarse.sites["a"]
    step = Resolution(1 / one.cases["test"], 2).step(0, 1)
    assert abs(one.test["accuracy"] - other.test["accuracy"]) <= step / 2 + 1e-9
    assert abs(coarse.pooled["accuracy"] - exact.pooled["accuracy"]) <= step / 2 + 1e-9
    assert abs(coarse.pooled["balanced_accuracy"] - exact.pooled["balanced_accuracy"]) <= 0.1
    assert abs(coarse.pooled["auroc"] - exact.pooled["auroc"]) <= 0.2
    for part, cases in one.cases.items():
        assert other.cases[part] % 5 == 0 and abs(other.cases[part] - cases) <= 2
        assert sum(other.classes[part]) == other.cases[part]
    assert all(score == pytest.approx(round(score / step) * step) for score in other.validation)
    assert one.test["loss"] == pytest.approx(other.test["loss"], abs=0.1)


def test_a_part_of_few_patients_tells_nothing_however_many_images(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    rows = []
    for number in range(60):
        write_pixels(folder / f"images/{number}.png", photograph(number)[0])
        part = ("train", "validation", "test")[number % 3]
        patient = f"{part} {number % (12 if part == 'validation' else 60)}"
        rows.append({"image": f"images/{number}.png", "label": number % 2, "patient": patient, "part": part})
    write_table(folder / "cases.csv", rows)
    settings = make_settings({"device": "cpu", "data": folder}, "x")
    site = site_of(parse_plan(STUDY), "a", ["a"], settings, tmp_path / "study/sites/a")
    assert (
        site.participant.disclosure.cases["validation"] == 20
        and len(set(site.participant.disclosure.patients["validation"])) == 4
    )
    assert site.participant.disclosure.suppressed == ["validation"]
    assert list(site.participant.disclosure.steps) == ["test"]  # no rounding step belongs to a suppressed score


@pytest.mark.slow
def test_of_models_that_tie_by_rounding_the_last_is_kept_and_of_equal_ones_the_first(
    asks: Asks, photos: Path, tmp_path: Path
) -> None:
    """The models hardly change, so all rounds have the same rounded score.

    A hospital that rounds scores reports the rounding step, and selects the last round.
    """
    still = ("training.rounds=3", "training.learning_rate=1e-5")
    coarse, exact = asks("coarse", photos, *still), asks("exact", photos, *still, public_data=True)
    assert len({*coarse.sites["a"].validation}) == len({*exact.sites["a"].validation}) == 1
    assert coarse.sites["a"].steps == {"validation": 0.2, "test": 0.2} and exact.sites["a"].steps == {}
    assert (coarse.selected.rounds, exact.selected.rounds) == ({"a": 3}, {"a": 0})
    assert load_tensors(tmp_path / "coarse/global/best.safetensors")[1]["round"] == 3


@pytest.mark.parametrize(("far", "told"), [(3.0, False), (60.0, True)])
def test_a_distance_that_is_rounded_to_nothing_is_withheld(far: float, told: bool) -> None:
    """The hospital suppresses a distance that rounds to 0 mm, because 0 mm would claim a perfect mask.

    If the hospital suppresses the distance between surfaces, the disclosed overlap is 0, the worst value.
    """
    disclosure = object.__new__(Disclosure)
    names = [f"p{number}" for number in range(5)]
    organ = {"name": "image-folder", "kind": "segmentation", "labels": ["organ"], "size": [8, 8]}
    disclosure.task = parse_plan({**STUDY, "task": organ, "network": {"name": "unet"}}).task
    disclosure.least, disclosure.cases = SiteSettings().least(synthetic=False), {"test": 5}
    disclosure.resolution, disclosure.patients = {"test": Resolution.over(names, 2, 5)}, {"test": names}
    measures = {"dice": torch.full((5,), 0.1), "hd95": torch.full((5,), far), "surface_dice": torch.full((5,), 0.1)}
    counts = disclosure.counts(measures)
    assert ("hd95" in counts) is told and counts["dice"] == counts["surface_dice"] == [0.0, 5.0]


def test_a_super_model_is_found_from_coarse_counts(asks: Asks, photos: Path) -> None:
    for rule in ("fedsm", "fedsm-ensemble"):
        summary = asks(rule, photos, f"algorithm.name={rule}", "training.rounds=2")
        assert summary.status == "finished"
        chosen = summary.details.super_model
        assert chosen and all(count % 5 == 0 for counts in chosen.tested.values() for count in counts.values())


# ----------------------------------------------------------------------------------------------------------- neighbours
def test_groups_that_differ_in_a_few_patients_do_not_both_tell(asks: Asks, tmp_path: Path) -> None:
    """A hospital suppresses scores if one to four patients have moved between training, validation and test since an
    earlier study.
    """
    parts = {name: ("train", "validation", "test")[number % 3] for number, name in enumerate(NAMES)}
    photos = write_photos(tmp_path / "photos", NAMES, parts)

    def study(name: str, moved: int) -> Summary:
        write_photos(photos, NAMES, {**parts, **dict.fromkeys(NAMES[1 : 3 * moved : 3], "train")})
        return asks(name, photos)

    first, second, third = study("first", 0), study("second", 1), study("third", 5)
    assert first.sites["a"].validation != [None, None] and not first.sites["a"].warnings
    assert second.sites["a"].validation == [None, None]
    assert second.sites["a"].test["accuracy"] is not None
    assert Record(tmp_path / "second").rounds()[0].sites["a"].train_loss is None
    assert any("fewer than 5 patients" in line for line in second.sites["a"].warnings["join"])
    assert None not in third.sites["a"].validation


def test_a_plan_that_deals_patients_out_is_refused(asks: Asks, photos: Path) -> None:
    with pytest.raises(Refused, match=r"task\.partition"):
        asks("dealt", photos, "task.partition={kind: iid}", "participation.sites=[a,b]")


def test_patients_take_turns_only_in_the_parts_that_the_hospital_names(
    asks: Asks, photos: Path, tmp_path: Path
) -> None:
    for own in ({}, {"folds": 4}):
        with pytest.raises(Refused, match=r"data\.folds: 5 in its medsilo\.yaml"):
            asks("refused", {"folder": photos, "table": "cases.csv", **own}, "task.fold={number: 1, of: 5}")
    summary = asks("agreed", {"folder": photos, "table": "cases.csv", "folds": 5}, "task.fold={number: 1, of: 5}")
    assert summary.finished and summary.sites["a"].test["accuracy"] is not None


@pytest.mark.slow
def test_sites_of_one_size_are_cut_in_steps_and_always_alike(photos: Path, tmp_path: Path) -> None:
    settings = make_settings({"device": "cpu", "data": photos}, "x")
    kept = []
    for seed, cases in ((0, 17), (0, 16), (1, 19), (0, 1)):
        plan = parse_plan(STUDY, ["training.truncate=true", f"seed={seed}"])
        site = site_of(plan, "a", ["a"], settings, tmp_path / f"study-{seed}-{cases}/sites/a")
        site.participant.trainer.truncate(cases)
        kept.append(site.participant.trainer.train.indices)
    assert kept[0] == kept[1] == kept[2] and len(kept[0]) == 15 and len(kept[3]) == 5 and set(kept[3]) < set(kept[0])


def test_synthetic_hospitals_are_as_before() -> None:
    settings = SiteSettings()
    assert not settings.protects(True) and settings.resolution([], True).exact and settings.count_unit(True) == 1
    assert settings.protects(False) and settings.resolution([], False).patients == 2 and settings.count_unit(False) == 5


# ------------------------------------------------------------------------------------------------------------ newcomers
def parts_at(data: Path, study: Path) -> dict[str, str]:
    settings = make_settings({"device": "cpu", "data": data, "answers": 20_000}, "x")
    site = site_of(parse_plan(STUDY), "a", ["a"], settings, study / "sites/a")
    return {name: part for part, names in site.participant.disclosure.patients.items() for name in names}


def test_patients_who_come_later_move_nobody(tmp_path: Path) -> None:
    """New patients do not change the split of earlier patients, so no test patient becomes a training patient.

    The hospital's file of the split contains no patient's name.
    """
    place = tmp_path / "photos"
    first = parts_at(write_photos(place, NAMES[:25]), tmp_path / "first")
    assert [list(first.values()).count(part) for part in ("train", "validation", "test")] == [15, 5, 5]
    later = parts_at(write_photos(place, NAMES), tmp_path / "later")
    assert all(later[name] == part for name, part in first.items())
    assert [list(later.values()).count(part) for part in ("train", "validation", "test")] == [36, 12, 12]
    kept = tmp_path / "_hospital/a/parts.jsonl"
    kept.write_bytes(kept.read_bytes() + b'{"parts": {"a')
    fewer = parts_at(write_photos(place, NAMES[10:]), tmp_path / "fewer")
    assert all(later[name] == part for name, part in fewer.items())
    assert kept.stat().st_mode & 0o077 == 0 and not any(name in kept.read_text() for name in NAMES)


def test_a_study_that_is_refused_draws_nothing_for_good(tmp_path: Path) -> None:
    """A hospital that rejects a plan, for example for its labels or for lack of patients, stores no split."""
    place = write_photos(tmp_path / "photos", NAMES)
    settings = make_settings({"device": "cpu", "data": place}, "x")
    strange = parse_plan(STUDY, ['task.labels=["left","right","up"]'])
    write_table(place / "cases.csv", [{"image": "images/p0.png", "label": "elsewhere", "patient": "p0"}])
    for plan in (strange, parse_plan(STUDY)):
        with pytest.raises(DataError):
            site_of(plan, "a", ["a"], settings, tmp_path / "study/sites/a")
    assert not (tmp_path / "_hospital/a/parts.jsonl").exists()


@pytest.mark.slow
def test_check_foretells_the_split_and_writes_none(photos: Path, tmp_path: Path) -> None:
    settings = make_settings({"device": "cpu", "data": photos}, "x")
    book, plan = QueryBudget(tmp_path / "_hospital/a"), parse_plan(STUDY)
    book.key()
    source = source_of(plan, settings, book)
    foretold = plan.task.survey("a", ["a"], 0, source)
    assert not (tmp_path / "_hospital/a/parts.jsonl").exists()
    data = plan.task.read("a", ["a"], 0, source)
    parts = parts_at(photos, tmp_path / "study")
    assert all(parts[name] == part for part in ("train", "test") for name in getattr(data, part).patients)
    assert foretold.parts["test"].patients == 12
