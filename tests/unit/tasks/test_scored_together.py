"""A classification may be judged by its AUROC or its balanced accuracy, so that a frequent class does not hide a rare
class.
"""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from scipy import stats

import medsilo
from medsilo.check.data import score_findings
from medsilo.core.errors import PlanError
from medsilo.plan import parse_plan
from medsilo.registry import TASKS
from medsilo.site.settings import make_settings
from medsilo.tasks.scored_together import Classifying, ScoredTogether, contributions
from medsilo.tasks.site_data import Cases, SiteData
from medsilo_lab.study.evidence import Scores, compare
from medsilo_lab.study.scores import SiteTest
from tests import inprocess
from tests.hospital import write_table
from tests.patient_scores import scores
from tests.unit.medsilo_lab.test_report_scores import concluded

TASK = {"name": "table", "labels": ["alive", "dead"], "columns": ["marker"], "target": "outcome"}
RARE = 0.07  # fraction of patients who die


def registry(folder: Path, seed: int, patients: int = 400) -> Path:
    drawn, rows = np.random.default_rng(seed), []
    for number in range(patients):
        dead = number < RARE * patients
        rows.append(
            {
                "patient": f"P-{seed}-{number}",
                "marker": round(float(drawn.normal(1.2 * dead, 1)), 3),
                "outcome": "dead" if dead else "alive",
            }
        )
    write_table(folder / "cases.csv", rows)
    return folder


def drawn_cases(seed: int, number: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    labels = torch.tensor(random.integers(0, classes, number))
    logits = torch.tensor(random.normal(size=(number, classes)).round(1)) + torch.nn.functional.one_hot(labels, classes)
    return labels, logits.softmax(1).float()


# ---------------------------------------------------------------------------------------------------- by hand
def test_an_auroc_is_the_fraction_of_ordered_pairs() -> None:
    labels, chances = drawn_cases(0, 40, 2)
    parts = contributions("auroc", labels, chances)
    ill, well = chances[labels == 1, 1], chances[labels == 0, 1]
    theirs = stats.mannwhitneyu(ill, well).statistic / len(ill) / len(well)
    assert float(parts.mean()) == pytest.approx(theirs)


@pytest.mark.parametrize("metric", ["auroc", "balanced_accuracy"])
@pytest.mark.parametrize(("classes", "rare"), [(2, 12), (2, 1), (3, 7), (3, 1)])
def test_a_case_counts_as_much_as_its_absence_changes_the_score(metric: str, classes: int, rare: int) -> None:
    """In earlier versions, patients of a rare class counted too little, so intervals were too narrow. Without a class's
    only patient, the score is undefined, and the test takes 0.5.
    """
    labels, chances = drawn_cases(1, 60, classes)
    labels[:] = torch.tensor([0] * rare + [1 + place % (classes - 1) for place in range(60 - rare)])
    parts, rest = contributions(metric, labels, chances), np.arange(60)
    left = [
        float(contributions(metric, labels[rest != one], chances[rest != one]).mean().nan_to_num(0.5)) for one in rest
    ]
    assert float(parts.var()) / 60 == pytest.approx(np.var(left) * 59, rel=1e-6 if classes == 2 else 0.1)


def test_an_aurocs_variance_is_delongs_with_more_weight_on_a_class_of_few_cases() -> None:
    labels, chances = drawn_cases(1, 60, 2)
    parts = contributions("auroc", labels, chances)
    ill, well = (chances[labels == side, 1].double().numpy() for side in (1, 0))
    order = (ill[:, None] > well) + 0.5 * (ill[:, None] == well)
    delong = [order.mean(1).var(ddof=1) / len(ill), order.mean(0).var(ddof=1) / len(well)]
    more = [len(side) / (len(side) - 1) for side in (ill, well)]
    assert float(parts.var()) / 60 == pytest.approx(59 / 60 * np.dot(delong, more))


def test_scores_of_several_classes_are_means_over_classes() -> None:
    labels, chances = drawn_cases(2, 50, 3)
    areas = [
        stats.mannwhitneyu(chances[labels == one, one], chances[labels != one, one]).statistic
        / int((labels == one).sum())
        / int((labels != one).sum())
        for one in range(3)
    ]
    assert float(contributions("auroc", labels, chances).mean()) == pytest.approx(np.mean(areas))
    found = chances.argmax(1)
    right = [float((found[labels == one] == one).float().mean()) for one in range(3)]
    assert float(contributions("balanced_accuracy", labels, chances).mean()) == pytest.approx(np.mean(right))
    for metric in ("auroc", "balanced_accuracy"):
        assert contributions(metric, labels * 0, chances).isnan().all() and len(labels) == 50
    chances[3, 1] = torch.nan
    assert contributions("auroc", labels, chances).isnan().all()


def test_always_the_frequent_class_is_a_coin() -> None:
    goal, target = ScoredTogether(("alive", "dead"), 1, "balanced_accuracy"), torch.tensor([0] * 93 + [1] * 7)
    assert goal.score(goal.case_scores(torch.full((100, 1), -1.0), target)) == 0.5
    measures = goal.measures(torch.full((100, 1), -1.0), target)
    figures = goal.figures(goal.counts(measures, [f"{one}" for one in range(100)], 1))
    assert (
        figures["balanced_accuracy"] == 0.5 and figures["accuracy"] == pytest.approx(0.93) and figures["auroc"] == 0.5
    )


@pytest.mark.parametrize("metric", ["auroc", "balanced_accuracy"])
def test_a_patients_sway_is_the_fraction_of_the_score_that_the_patient_determines(metric: str) -> None:
    goal, random, names = ScoredTogether(2, metric=metric), np.random.default_rng(0), "aabbcdefgh"
    for _ in range(20):
        labels = random.integers(0, 2, 10)
        if labels.min() == labels.max():
            continue
        own = {name: [place for place, other in enumerate(names) if other == name] for name in names}
        if metric == "auroc":
            pairs = [(i, j) for i, j in product(range(10), repeat=2) if labels[i] > labels[j]]
            most = max(sum(bool({*pair} & {*places}) for pair in pairs) / len(pairs) for places in own.values())
        else:
            sizes = np.bincount(labels)
            most = max(sum(0.5 / sizes[labels[place]] for place in places) for places in own.values())
        cases = Cases(torch.zeros(10, 1), torch.tensor(labels), names)
        assert goal.sway(cases, names) == pytest.approx(min(1.0, most))
    alike = Cases(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long), "abcd")
    assert goal.sway(alike, "abcd") == math.inf
    three = ScoredTogether(3, metric=metric)
    none, one = (Cases(torch.zeros(40, 1), torch.tensor([0, 1] * 19 + [0, last]), range(40)) for last in (1, 2))
    assert three.sway(none, range(40), 5) == pytest.approx(three.sway(one, range(40), 5), abs=0.005)
    assert three.sway(none, range(40), 5) > 1 / 3 > three.sway(none, range(40))


def test_only_a_classification_has_a_score_of_classes() -> None:
    plan = {"algorithm": {"name": "fedavg"}, "participation": {"sites": ["a", "b"]}}
    with pytest.raises(PlanError, match="leave out task.score"):
        parse_plan({**plan, "task": {"name": "table", "columns": ["age"], "kind": "survival", "score": "auroc"}})
    private = {"epsilon": 8, "delta": 0.001, "clip": 1}
    with pytest.raises(PlanError, match="set task.score=accuracy"):
        parse_plan({**plan, "task": {**TASK, "standardise": "none", "score": "auroc"}, "privacy": private})


CLASSIFICATIONS = {
    "synthetic-histology": {},
    "synthetic-activity": {},
    "activity-windows": {},
    "series-folder": {},
    "table": {"columns": ["age"]},
    "image-folder": {"kind": "classification", "labels": ["well", "ill"]},
    "nifti-folder": {"kind": "classification", "labels": ["well", "ill"]},
    "dicom-folder": {"kind": "classification", "labels": ["well", "ill"]},
}


def test_every_classification_declares_the_score_that_decides() -> None:
    ours = {name for name in TASKS if not name.startswith("own-data-")}
    assert {name for name in ours if issubclass(TASKS[name], Classifying)} == CLASSIFICATIONS.keys()
    for name, keys in CLASSIFICATIONS.items():
        for score in ("accuracy", "balanced_accuracy", "auroc"):
            task = TASKS[name].model_validate({**keys, "score": score})
            assert task.goal.metric == score and task.goal is task.goal
            assert ("score" in task.model_dump()) == (score != "accuracy")
            plain = TASKS[name].model_validate(keys).goal
            assert (task.goal.label_names, task.goal.outputs) == (plain.label_names, plain.outputs)
    with pytest.raises(ValidationError, match="the score of this task is dice; leave out task.score"):
        TASKS["image-folder"].model_validate({"score": "auroc"})


def test_a_programs_classification_may_be_judged_by_its_auroc(tmp_path: Path) -> None:
    random, sites = np.random.default_rng(0), {}
    for site in "ab":
        labels = (np.arange(60) % 15 == 0).astype(int)
        sites[site] = random.normal(labels[:, None], 1, (60, 1)).astype(np.float32), labels
    given = {"sites": sites, "rounds": 2, "device": "cpu", "loss": torch.nn.CrossEntropyLoss()}
    run = medsilo.run("fedavg", changes={"task.score": "auroc"}, folder=tmp_path / "run", **given)  # type: ignore[arg-type]
    assert run.summary.metric == "auroc"
    for site in "ab":
        test = SiteTest.read(tmp_path / "run", site, "auroc")
        ill, risk = test.measures["label"].numpy() == 1, test.measures["p1"].numpy()
        area = stats.mannwhitneyu(risk[ill], risk[~ill]).statistic / ill.sum() / (~ill).sum()
        assert run.summary.sites[site].test["auroc"] == pytest.approx(area)


# ---------------------------------------------------------------------------------------------------- a comparison
@pytest.mark.slow
@pytest.mark.parametrize(("patients", "ill"), [(40, 12), (100, 30), (100, 7), (100, 3)])
def test_an_interval_of_a_difference_between_aurocs_covers_it(patients: int, ill: int) -> None:
    """Patients and seeds are crossed: the patients of all seeds are the same, and a seed changes all patients.

    In earlier versions, the interval with 7 of 100 patients ill covered the difference in 91 % of studies, because a
    class of few patients counted too little.
    """
    random, covered, times = np.random.default_rng(patients), 0, 400
    labels = (np.arange(patients) < ill).astype(int)

    def rank(better: float) -> list[dict[str, Scores]]:
        each = []
        for _ in range(4):
            risk = shared + (1.2 + better + random.normal(0, 0.15)) * labels + random.normal(0, 0.5, len(labels))
            chances = torch.tensor(1 / (1 + np.exp(-risk)))
            parts = contributions("auroc", torch.tensor(labels), torch.stack([1 - chances, chances], 1))
            each.append({"a": scores(parts.numpy())})
        return each

    spread = np.sqrt(1 + 0.25)
    truth = float(
        np.mean(stats.norm.cdf((1.6 + 0.15 * stats.norm.ppf((np.arange(999) + 0.5) / 999)) / spread / np.sqrt(2)))
        - np.mean(stats.norm.cdf((1.2 + 0.15 * stats.norm.ppf((np.arange(999) + 0.5) / 999)) / spread / np.sqrt(2)))
    )
    for _ in range(times):
        shared = random.normal(0, 1, patients)
        found = compare(rank(0.4), rank(0.0))
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / times <= 0.98


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, runs = tmp_path_factory.mktemp("registry"), {}
    for seed, site in enumerate("ab"):
        registry(root / "data" / site, seed)
    reading = {"table": "cases.csv", "columns": {"patient": "patient"}, "outcome": ["outcome"]}
    settings = make_settings(
        {"data": {"folder": root / "data", **reading}, "device": "cpu", "public_data": True}, "a test"
    )
    for score in ("accuracy", "auroc"):
        plan = {"algorithm": {"name": "fedavg"}, "task": {**TASK, "score": score}}
        plan |= {"training": {"rounds": 4, "learning_rate": 0.3}, "participation": {"sites": ["a", "b"]}}
        inprocess.run(parse_plan(plan), folder=root / score, settings=settings)
        runs[score] = root / score
    return runs


def test_a_registry_with_few_deaths_is_judged_by_its_auroc(judged: dict[str, Path]) -> None:
    """With 7 % deaths, a model that always predicts "alive" has the accuracy .93."""
    concluded(judged["auroc"])
    run = medsilo.Run(judged["auroc"])
    told = json.loads((judged["auroc"] / "summary.json").read_text("utf-8"))
    assert told["metric"] == "auroc" and 0.6 < told["scores"]["mean"]["value"] < 0.95
    for site in "ab":
        test = SiteTest.read(judged["auroc"], site, "auroc")
        dead = test.measures["label"].numpy() == 1
        risk = test.measures["p1"].numpy()
        area = stats.mannwhitneyu(risk[dead], risk[~dead]).statistic / dead.sum() / (~dead).sum()
        assert told["sites"][site]["test"]["auroc"] == pytest.approx(area)
        assert told["sites"][site]["figures"]["auroc"] == pytest.approx(area)
        assert told["sites"][site]["figures"]["accuracy"] == pytest.approx(float(test.measures["accuracy"].mean()))
        assert (
            test.interval and test.interval[0] < area < test.interval[1] and test.interval[1] - test.interval[0] > 0.05
        )
    assert not [one for one in run.warnings if one.word == "Not learned"]
    page = (judged["auroc"] / "report.html").read_text("utf-8")
    assert "test auroc" in page and "validation auroc" in page


def test_a_warning_names_the_score_that_can_decide(judged: dict[str, Path]) -> None:
    """Every round predicts "alive" for everybody, so all accuracies are equal and the first round is selected, although
    its AUROC is below 0.5.
    """
    areas = {score: medsilo.Run(run).summary.sites["a"].figures["auroc"] or 0.0 for score, run in judged.items()}
    assert areas["accuracy"] < 0.5 and areas["auroc"] > 0.75
    [found] = [one for one in medsilo.Run(judged["accuracy"]).warnings if one.word == "Not learned"]
    assert "always saying the most frequent class (0.9" in found.text
    assert found.text.endswith("; with task.score=auroc, the AUROC selects the round")


def test_the_auroc_decides_a_comparison(judged: dict[str, Path], tmp_path: Path) -> None:
    reading = {"table": "cases.csv", "columns": {"patient": "patient"}, "outcome": ["outcome"]}
    plan = {"algorithm": {"name": "fedavg"}, "task": {**TASK, "score": "auroc"}}
    plan |= {"training": {"rounds": 1, "learning_rate": 0.3}, "participation": {"sites": ["a", "b"]}}
    found = medsilo.compare(
        ["local", "fedavg"],
        plan=parse_plan(plan),
        seeds=range(4),
        data={"folder": judged["auroc"].parent / "data", **reading},
        folder=tmp_path / "out",
        device="cpu",
    )
    verdict = json.loads((tmp_path / "out/verdict.json").read_text("utf-8"))
    assert verdict["metric"] == "auroc" and "auroc is" in verdict["headline"]
    [row] = [one for one in verdict["rows"] if one["title"] == "fedavg"]
    assert row["score"]["low"] < row["score"]["mean"] < row["score"]["high"] <= 1
    assert (
        verdict["first"]["patients"] and verdict["first"]["low"] < verdict["first"]["mean"] < verdict["first"]["high"]
    )
    assert "auroc" in found.report(tmp_path / "page.html").read_text("utf-8")


def test_a_check_says_where_a_score_cannot_decide(tmp_path: Path) -> None:
    def found(patients: int, score: str) -> list[str]:
        folder = registry(tmp_path / f"{patients}" / "a", 0, patients).parent
        reading = {"table": "cases.csv", "columns": {"patient": "patient"}, "outcome": ["outcome"]}
        settings = make_settings({"data": {"folder": folder, **reading}, "device": "cpu"}, "a test")
        plan = {"algorithm": {"name": "fedavg"}, "task": {**TASK, "score": score}}
        own = parse_plan({**plan, "participation": {"sites": ["a", "b"]}})
        data = own.task.site_data("a", ["a", "b"], 0, settings.data)
        return [one.what for one in score_findings(data, own, settings)]

    few, told = "the rarest class has 6 patients, so the", "too coarse to tell models apart"
    parts = ("validation", "test")
    assert found(400, "auroc") == [f"{part}: {few} AUROC leaves in steps of 0.5, {told}" for part in parts]
    assert found(400, "balanced_accuracy") == [
        f"{part}: {few} balanced accuracy leaves in steps of 0.2, {told}" for part in parts
    ]
    held = "the rarest class has fewer than 5 patients, so the AUROC stays here"
    assert found(60, "auroc") == [f"{part}: {held}" for part in parts]
    assert found(400, "accuracy") == found(2000, "auroc") == []


def test_a_check_says_that_a_score_is_undefined() -> None:
    """Only a hospital with public data reports a missing class; other hospitals give the message for a class of few
    patients.
    """
    plan = parse_plan(
        {"algorithm": {"name": "fedavg"}, "task": {**TASK, "score": "auroc"}, "participation": {"sites": ["a"]}}
    )
    cases = Cases(torch.zeros(40, 1), torch.zeros(40, dtype=torch.long), [f"{number}" for number in range(40)])

    def found(public: bool) -> list[str]:
        settings = make_settings({"device": "cpu", "public_data": public}, "a test")
        return [one.what for one in score_findings(SiteData(cases, cases, cases), plan, settings)]

    parts = ("validation", "test")
    undefined = "one class only, so the AUROC is undefined, and means leave it out"
    assert found(public=True) == [f"{part}: {undefined}" for part in parts]
    held = "the rarest class has fewer than 5 patients, so the AUROC stays here"
    assert found(public=False) == [f"{part}: {held}" for part in parts]


# ---------------------------------------------------------------------------------------------------- images
@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the images of each class; the rarer class has 7 % of all images, which are somewhat brighter."""
    root, runs = tmp_path_factory.mktemp("images"), {}
    for seed, site in enumerate("ab"):
        drawn = np.random.default_rng(seed)
        for number in range(200):
            ill = number < RARE * 200
            path = root / "data" / site / ("ill" if ill else "well") / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            grey = np.clip(100 + 20 * ill + drawn.normal(0, 10) + drawn.normal(0, 20, (8, 8)), 0, 255)
            Image.fromarray(grey.astype(np.uint8)).save(path)
    settings = make_settings({"data": {"folder": root / "data"}, "device": "cpu", "public_data": True}, "a test")
    for name, score in (("accuracy", "accuracy"), ("auroc", "auroc"), ("again", "auroc")):
        task = {"name": "image-folder", "kind": "classification", "labels": ["well", "ill"], "colours": "grey"}
        plan = {"algorithm": {"name": "fedavg"}, "task": {**task, "size": [8, 8], "score": score}}
        plan |= {"network": {"name": "small-cnn", "width": 4, "norm": "none"}, "seed": 1}
        plan |= {"training": {"rounds": 4, "batch_size": 8, "learning_rate": 0.5}}
        plan |= {"participation": {"sites": ["a", "b"]}}
        inprocess.run(parse_plan(plan), folder=root / name, settings=settings)
        runs[name] = root / name
    return runs


def test_images_of_a_rare_class_are_judged_by_their_auroc(classified: dict[str, Path]) -> None:
    """The AUROC is computed over all test images, because a batch of 16 has about one image of the rare class."""
    told = {name: json.loads((run / "summary.json").read_text("utf-8")) for name, run in classified.items()}
    assert told["auroc"]["metric"] == "auroc" and told["accuracy"]["metric"] == "accuracy"
    for site in "ab":
        test = SiteTest.read(classified["auroc"], site, "auroc")
        ill, risk = test.measures["label"].numpy() == 1, test.measures["p1"].numpy()
        area = stats.mannwhitneyu(risk[ill], risk[~ill]).statistic / ill.sum() / (~ill).sum()
        assert len(ill) > 16 and told["auroc"]["sites"][site]["test"]["auroc"] == pytest.approx(area)
    chosen = {name: one["selected"]["rounds"]["a"] for name, one in told.items()}
    assert chosen["accuracy"] == 0 and chosen["auroc"] == 3
    curve = medsilo.Run(classified["auroc"]).rounds.groupby("round")["validation"].mean()
    assert curve.idxmax() == 4 and curve[4] > curve[1] + 0.3  # round 4 begins with the model of round 3


def test_images_judged_by_their_auroc_give_the_same_bits_again(classified: dict[str, Path]) -> None:
    first, again = (classified[name] for name in ("auroc", "again"))
    same = [*first.rglob("best.safetensors"), *first.rglob("test.csv")]
    assert len(same) == 5
    for path in same:
        assert path.read_bytes() == (again / path.relative_to(first)).read_bytes()
    scores = [medsilo.Run(run).rounds["validation"].tolist() for run in (first, again)]
    assert scores[0] == scores[1]
