"""Hospitals with structures, channels and columns of their own: from their files to the loss, the mean and the mask."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import nibabel
import numpy as np
import pytest
import torch
from monai.losses import DiceLoss
from PIL import Image
from torch.nn import functional

from medsilo.check.data import HELD, data_tables, hospitals_table
from medsilo.core.errors import DataError, MedsiloError
from medsilo.deploy.supermodel import SuperModel
from medsilo.learning.class_weights import weighted
from medsilo.learning.compute import is_marked, labels_in, marks_in
from medsilo.learning.partial_labels import ALIKE, absent_in, mark_of, marks_of_classes
from medsilo.mixing.mixers import WeightedMean
from medsilo.models.architectures import UNet
from medsilo.plan import Plan, parse_plan
from medsilo.runs.paths import SUPER_MODEL, site_folder
from medsilo.schedule import structures
from medsilo.schedule.phase import ServerSide
from medsilo.schedule.structures import mix_by_structure, outputs_of
from medsilo.site.settings import EachSites, SiteSettings, make_settings
from medsilo.tasks.classification import Classification
from medsilo.tasks.objective import judged_by, says_of
from medsilo.tasks.own.augmentation import augmented
from medsilo.tasks.own.folder import goal_of
from medsilo.tasks.own.image_patches import patch
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.own.volume_folder import NiftiFolder
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.site_data import class_counts
from medsilo.tasks.sources import DataSource
from medsilo_lab.deploy.image_files import ImagePredictor
from medsilo_lab.deploy.model_card import card_facts, write_card
from medsilo_lab.deploy.source import Source
from medsilo_lab.report.findings import notices
from medsilo_lab.report.read import read
from medsilo_zoo.condistfl import distilled
from tests.inprocess import StudyResult, run
from tests.mixed import result_of

GRID = (16, 16, 4)
TASK = {
    "name": "nifti-folder",
    "labels": ["ant", "post"],
    "modalities": ["t1", "flair"],
    "lacking": 0.5,
    "size": [16, 16],
    "dimensions": 2,
    "slices": "all",
    "intensity": {"kind": "z-score"},
}
OWN: dict[str, dict[str, Any]] = {
    "a": {"unannotated": ["post"]},
    "b": {
        "unannotated": ["ant", "t1"],
        "label_map": {1: "post"},
        "images": ["flair/*.nii.gz"],
        "labels": "labels/*.nii.gz",
    },
    "c": {},
}
PATTERNS = {"images": ["t1/*.nii.gz", "flair/*.nii.gz"], "labels": "labels/*.nii.gz"}


def write(folder: Path, drew: Mapping[int, int], seed: int, cases: int = 6) -> None:
    """Write volumes in which two discs shine in both channels. drew: a structure -> its value in these masks."""
    random = np.random.default_rng(seed)
    places = np.stack(np.meshgrid(*map(np.arange, GRID), indexing="ij"), -1)[..., :2]
    for case in range(cases):
        discs = [((places - random.uniform(low, low + 3, 2)) ** 2).sum(-1) < 9 for low in (3, 9)]
        mask, seen = np.zeros(GRID, np.uint8), np.zeros(GRID)
        for number, disc in enumerate(discs, 1):
            seen[disc] = number
            mask[disc] = drew.get(number, 0)
        files = {channel: (seen + random.normal(0, 0.3, GRID)).astype("f4") for channel in ("t1", "flair")}
        for name, values in {**files, "labels": mask}.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / name / f"c{case}.nii.gz")


def each(folder: Path, own: Mapping[str, Mapping[str, Any]]) -> EachSites:
    known = make_settings(
        {"public_data": True, "min_patients_per_metric": 1, "device": "cpu", "share_personal_model": True}, "test"
    )
    sites = {
        site: known.model_copy(update={"data": DataSource(folder=folder / site, **{**PATTERNS, **values})})
        for site, values in own.items()
    }
    return EachSites(**{name: getattr(known, name) for name in SiteSettings.model_fields}, sites=sites)


def plan_of(method: str = "fedavg", **task: Any) -> Plan:
    return parse_plan(
        {
            "algorithm": {"name": method},
            "task": {**TASK, **task},
            "network": {"name": "unet", "features": [4, 8]},
            "training": {"rounds": 6, "local_epochs": 4, "batch_size": 4, "learning_rate": 0.02, "optimizer": "adam"},
            "participation": {"sites": sorted(OWN)},
        }
    )


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hospitals")
    for seed, (site, drew) in enumerate({"a": {1: 1}, "b": {2: 1}, "c": {1: 1, 2: 2}}.items()):
        write(folder / site, drew, seed)
    return folder


@pytest.fixture(scope="module")
def study(hospitals: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResult, Path]:
    folder = tmp_path_factory.mktemp("runs") / "study"
    with mock.patch.object(structures, "_along", wraps=structures._along) as weighed:
        found = run(plan_of(), folder=folder, settings=each(hospitals, OWN))
    assert weighed.call_count == 6 * len(OWN) * 2  # in each round every hospital's weight and bias of the last layer
    return found, folder


# ------------------------------------------------------------------------------------------------ the loss
NAMES, STRUCTURES = ("background", "ant", "post"), {"ant": (1,), "post": (2,)}


def test_what_was_not_drawn_is_one_with_the_background_in_every_loss() -> None:
    output = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.tensor([[[0, 1], [0, 1]], [[2, 1], [0, 0]]])
    target = labels | torch.tensor([mark_of([2]), 0])[:, None, None]
    p = output.softmax(1)
    together = torch.stack([p[0, 0] + p[0, 2], p[0, 1]]).log()
    entropy = Segmentation(NAMES, functional.cross_entropy, STRUCTURES, cross_entropy=1.0)
    first = -together.gather(0, labels[:1]).mean()
    second = functional.cross_entropy(output[1:], labels[1:])
    torch.testing.assert_close(entropy.loss(output, target), (first + second) / 2)
    torch.testing.assert_close(entropy.case_losses(output, target), torch.stack([first, second]))
    # Dice is that of the drawn structure alone
    only = DiceLoss(include_background=False, to_onehot_y=True, softmax=True)
    dice = Segmentation(NAMES, lambda found, right: only(found, right[:, None]), STRUCTURES)
    right = (labels[0] == 1).double()
    by_hand = 1 - (2 * (p[0, 1] * right).sum() + 1e-5) / ((p[0, 1] + right).sum() + 1e-5)
    torch.testing.assert_close(dice.loss(output[:1], target[:1]), by_hand)
    # weights of classes are those of the labels that are told apart
    doubled = weighted(entropy.loss, torch.tensor([1.0, 2.0, 9.0]), 1.0)
    heavy = (-together.gather(0, labels[:1]) * (1 + (labels[:1] == 1))).mean()
    torch.testing.assert_close(doubled(output[:1], target[:1]), heavy)
    # nothing that the hospital can't tell moves the loss: mass between background and the undrawn
    moved = torch.stack([(p[0, 0] + p[0, 2]) / 2, p[0, 1], (p[0, 0] + p[0, 2]) / 2]).log()[None]
    for goal in (entropy, dice, goal_of("segmentation", ("ant", "post"))):
        torch.testing.assert_close(goal.loss(moved, target[:1]), goal.loss(output[:1], target[:1]))
        assert torch.equal(goal.loss(output, labels), goal.criterion(output, labels))  # type: ignore[attr-defined]


def test_a_mark_travels_through_pieces_and_augmentation_and_scores_heed_it() -> None:
    image, labels = torch.rand(1, 6, 6), torch.zeros(6, 6, dtype=torch.long)
    labels[2:4, 2:4] = 1
    case = image, labels | mark_of([2, 15])
    piece = patch(case, (8, 8), 1.0, 3)  # larger than the image: filled up
    _, moved = augmented((piece[0][None], piece[1][None].clone()), ("flip-x", "rotate90", "affine"), True, [5])
    for target in (piece[1], moved[0]):
        assert marks_in(target[None]) == [mark_of([2, 15])] and absent_in(mark_of([2, 15])) == [2, 15]
        assert labels_in(target).unique().tolist() == [0, 1]
    goal = goal_of("segmentation", ("ant", "post"))
    found = functional.one_hot(torch.zeros(1, 6, 6, dtype=torch.long), 3).permute(0, 3, 1, 2).float()
    target = (labels | mark_of([2]))[None]
    measures = goal.measures(found, target)
    assert measures["dice"].tolist() == [0.0] and measures["dice_ant"].tolist() == [0.0]
    assert all(measures[name].isnan().all() for name in ("dice_post", "hd95_post", "surface_dice_post"))
    assert goal.case_scores(found, target).tolist() == [0.0] != goal.case_scores(found, labels[None]).tolist()


def test_conditional_distillation_by_hand() -> None:
    """Of four places one is drawn and one the teacher takes for a drawn structure; the others teach."""
    output, taught = torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4)
    taught[0, 1, 0, 1], taught[0, 2, 0, 2], output[0, 2, 0, 3] = 9.0, 1.0, -1.0
    target = torch.tensor([[[1, 0, 0, 0]]]) | mark_of([2])
    own, right = [0.5, 1 / (1 + np.exp(2))], [1 / (1 + np.exp(-2)), 0.5]  # τ = 0.5; places 2 and 3
    dice = 2 * np.dot(own, right) / (sum(own) + sum(right))
    assert float(distilled(output, taught, target, 0.5)) == pytest.approx(1 - dice, rel=1e-4)
    assert float(distilled(output, taught, labels_in(target), 0.5)) == 0.0


# ------------------------------------------------------------------------------------------------ mixing
def test_a_structure_is_mixed_by_the_hospitals_that_drew_it() -> None:
    class Answer:
        def __init__(self, *absent: str) -> None:
            self.absent = list(absent)

    model = UNet(features=(4, 8)).build(1, 3)
    axes = outputs_of(model, 3)
    assert sorted(axes.values()) == [0, 1] and outputs_of(model, 4) == {}  # a transposed convolution has outputs second
    goal = NiftiFolder(**TASK)
    joined = {"a": Answer("post"), "b": Answer("ant", "t1"), "c": Answer()}
    server = ServerSide(["a", "b", "c"], {}, joined, set, goal, None, 0, None, None, None)  # type: ignore[arg-type]
    mixer = WeightedMean()
    tensors = model.state_dict()
    mix_by_structure({"model": mixer}, {"model": tensors}, model, server)
    mixer.start(["a", "b", "c"], {name: torch.zeros_like(one) for name, one in tensors.items()})
    for site, value, samples in (("a", 1.0, 1), ("b", 2.0, 1), ("c", 4.0, 2)):
        mixer.add(site, {name: torch.full_like(one, value) for name, one in tensors.items()}, samples)
    found = result_of(mixer, "a")
    for name, axis in axes.items():
        rows = found[name].movedim(axis, 0)
        for place, mean in enumerate(((1 + 2 + 8) / 4, (1 + 8) / 3, (2 + 8) / 3)):
            torch.testing.assert_close(rows[place], torch.full_like(rows[place], mean))
    others = next(name for name in tensors if name not in axes and tensors[name].is_floating_point())
    torch.testing.assert_close(found[others], torch.full_like(found[others], 11 / 4))
    plain = WeightedMean()
    alone = ServerSide(["c"], {}, {"c": Answer()}, *server_rest(server))
    mix_by_structure({"model": plain}, {"model": tensors}, model, alone)
    assert plain.weigh is None


def server_rest(server: ServerSide) -> Any:
    return server.contributed, server.task, server.training, 0, server.compute, None, server.stop


# ------------------------------------------------------------------------------------------------ a study
def test_hospitals_that_drew_different_structures_learn_all(study: tuple[StudyResult, Path]) -> None:
    summary = study[0].summary
    assert {site: own.absent for site, own in summary.sites.items()} == {"a": ["post"], "b": ["ant", "t1"], "c": []}
    told = {
        site: {name for name, value in own.figures.items() if value is not None} for site, own in summary.sites.items()
    }
    assert "dice_post" not in told["a"] and "dice_ant" not in told["b"] and {"dice_ant", "dice_post"} <= told["c"]
    assert min(summary.pooled["dice_ant"], summary.pooled["dice_post"]) > 0.5  # type: ignore[type-var]
    # a mean over structures, each over the hospitals that drew it
    dice = {
        name: {site: own.figures[f"dice_{name}"] for site, own in summary.sites.items()} for name in ("ant", "post")
    }
    ant, post = (dice["ant"][site] for site in "ac"), (dice["post"][site] for site in "bc")
    assert summary.mean_test == pytest.approx((sum(ant) / 2 + sum(post) / 2) / 2)  # type: ignore[arg-type]
    assert summary.mean_test != pytest.approx(sum(own.test["dice"] for own in summary.sites.values()) / 3)


def test_structures_count_alike_when_a_round_is_chosen() -> None:
    goal = goal_of("segmentation", ("ant", "post"))
    assert judged_by(goal, {"a": ["post"], "c": ["t1"]}) == {"dice_ant": ["a", "c"], "dice_post": ["c"]}
    # three drew ant and one post, of which the one hospital's score says as much as three of ant
    assert says_of(goal, {"a": ["post"], "b": ["post"], "d": ["post"], "c": ["ant"]}) == pytest.approx(
        {"a": 1 / 3, "b": 1 / 3, "d": 1 / 3, "c": 1}
    )
    assert says_of(goal, {"a": ["post"], "c": []}) == {"a": 0.5, "c": 1.5}
    assert says_of(goal, {"a": ["t1"], "c": []}) == {"a": 1, "c": 1}


def test_predicting_gives_all_structures_where_one_was_drawn_and_a_channel_is_lacking(
    study: tuple[StudyResult, Path], hospitals: Path, tmp_path: Path
) -> None:
    _, folder = study
    data = each(hospitals, OWN).of("b").data
    source = Source.open(folder, "")
    image = hospitals / "b" / "flair" / "c0.nii.gz"
    asked = ImagePredictor(
        source, [image], tmp_path / "out", torch.device("cpu"), lambda line: None, data=data, site_part=folder
    )
    assert asked.predict() == 0
    mask = np.asarray(nibabel.load(next((tmp_path / "out").glob("*mask.nii.gz"))).dataobj)
    values = source.plan.task.use.own_values(data)
    assert values[2] == 1 and values[1] not in (0, 1)  # its own word for post; ant has a value that means nothing else
    assert set(np.unique(mask)) == {0, values[1], values[2]}
    assert card_facts(source)["absent"] == {"a": ["post"], "b": ["ant", "t1"]}


def test_lacking_channels_are_zero_and_say_so_and_one_is_always_left(hospitals: Path) -> None:
    task = NiftiFolder(**TASK)
    data = task.read("b", ["b"], 0, each(hospitals, OWN).of("b").data)
    image, target = data.train[0]
    assert image.shape[0] == task.channels == 4 and marks_in(target[None]) == [mark_of([1])]
    assert not image[0].any() and image[1].any() and image[2].all() and not image[3].any()
    whole = task.read("c", ["c"], 0, each(hospitals, OWN).of("c").data).train[0]
    seen = set()
    for varied in task.augmented((torch.stack([whole[0]] * 40), torch.stack([whole[1]] * 40)), range(40))[0]:
        gone = tuple(bool(one.all()) for one in varied[2:])
        assert all(not varied[place].any() for place in (0, 1) if gone[place])
        assert torch.equal(varied[0] if not gone[0] else varied[1], whole[0][0] if not gone[0] else whole[0][1])
        seen.add(gone)
    assert seen == {(False, False), (True, False), (False, True)}
    left, _ = task.augmented((image[None].clone(), target[None].clone()), [1])
    assert left[0, 1].any()  # the only one that is there stays


def test_check_says_what_is_not_here_and_stops_where_masks_disagree(hospitals: Path) -> None:
    def survey(site: str, **own: Any) -> Any:
        return NiftiFolder(**TASK).survey(site, [site], 0, each(hospitals, {site: own}).of(site).data)

    def said(site: str, **own: Any) -> str:
        return " ".join(problem.what for problem in survey(site, **own).problems if problem.severity != "left out")

    plan = plan_of()
    tables = {table.title: table.rows for table in data_tables(survey("b", **OWN["b"]), plan, 1)}
    assert [row for row in tables["Slices that show each label"] if row[0] == "ant"] == [["ant", *["not drawn"] * 3]]
    assert tables[f"Slices{HELD}"] == [["ant", 0, 0, 24], ["post", 24, 0, 0], ["t1", 0, 0, 24], ["flair", 24, 0, 0]]
    assert "'post': name it in data.unannotated" in said("a")
    assert "no mask shows" not in said("a", unannotated=["post"])
    assert "masks show a structure that data.unannotated names" in said("c", unannotated=["post"])
    assert "names all structures" in said("c", unannotated=["ant", "post"])
    assert "names all modalities" in said("c", unannotated=["t1", "flair"])
    assert "'liver' can't be absent; ant, post" in said("c", unannotated=["liver"])
    assert NiftiFolder(**{**TASK, "lacking": None}).may_be_absent == ("ant", "post")


def test_one_table_says_which_hospital_has_what_and_tells_no_small_count_by_a_sum(
    hospitals: Path, tmp_path: Path
) -> None:
    def tables(site: str, least: int, **own: Any) -> Any:
        task = NiftiFolder(**TASK | {"dimensions": 3, "size": [16, 16, 4]})
        return data_tables(task.survey(site, [site], 0, each(hospitals, {site: own}).of(site).data), plan_of(), least)

    write(hospitals / "d", {1: 1}, 7, cases=12)
    write(hospitals / "d", {1: 1, 2: 2}, 7, cases=9)  # three of twelve show no post, which was looked for
    told = hospitals_table({site: tables(site, 1, **OWN.get(site, {})) for site in "abd"})
    assert told.columns == ("name", "a", "b", "d")
    assert [list(row) for row in told.rows] == [
        ["ant", 6, "lacks it (6)", 12],
        ["post", "lacks it (6)", 6, "9, none in 3"],
        ["t1", 6, "lacks it (6)", 12],
        ["flair", 6, 6, 12],
    ]
    few = hospitals_table({"d": tables("d", 9)})
    assert dict(few.rows)["ant"] == "suppressed", "a sum would say at least 0"
    few = {row[0]: row[1:] for table in tables("d", 4) if table.title.endswith(HELD) for row in table.rows}
    assert all(str(count).startswith(("at least", "at most")) for count in few["ant"][:2])


def test_cards_say_what_a_hospitals_own_model_never_saw_drawn(
    hospitals: Path, study: tuple[StudyResult, Path], tmp_path: Path
) -> None:
    never = "it never learned post there"

    def card(folder: Path, site: str) -> str:
        out = tmp_path / f"{folder.parent.name}-{folder.name}-{site}"
        out.mkdir()
        write_card(Source.open(folder, site), out)
        return (out / "MODEL_CARD.md").read_text()

    assert never not in card(study[1], "")  # the hospitals' common model is nobody's own
    short = ["training.rounds=1", "training.local_epochs=1"]
    for method, sites in (("local", {"a": True, "b": False}), ("fedsm", {"": True})):
        run(plan_of(method).with_changes(short), folder=tmp_path / method, settings=each(hospitals, OWN))
        for site, says in sites.items():
            text = card(tmp_path / method, site)
            assert (never in text) is says and "never learned t1" not in text, (method, site)
    assert "personal model is in this super model" in text
    for place in (tmp_path / "fedsm", site_folder(tmp_path / "fedsm", "c")):
        model = SuperModel.load(place / SUPER_MODEL)
        assert model.origin and model.origin.absent == {"a": ("post",), "b": ("ant", "t1")}
        told = card(place / SUPER_MODEL, "")
        assert "a has not: post. " in told and "b has not: ant, t1. " in told and "c has not" not in told
        assert never in told


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("fedbn", marks=pytest.mark.long), "fedsm"])
def test_methods_with_personal_models_find_structures_that_their_hospital_did_not_draw(
    method: str, hospitals: Path, tmp_path: Path
) -> None:
    """Hospital a drew no post; its own model finds it in c's images, whose masks show it."""
    found = run(plan_of(method), folder=tmp_path / method, settings=each(hospitals, OWN))
    pooled = found.summary.pooled
    assert pooled["dice_ant"] is not None and pooled["dice_post"] is not None
    assert min(pooled["dice_ant"], pooled["dice_post"]) > 0.5
    task = NiftiFolder(**TASK)
    cases = task.read("c", ["c"], 0, each(hospitals, OWN).of("c").data).test
    inputs, targets = map(torch.stack, zip(*(cases[place] for place in range(len(cases))), strict=True))
    for site, own in (("a", "post"), ("b", "ant")):
        model = Source.open(tmp_path / method, site if method == "fedbn" else "").network.eval()
        with torch.no_grad():
            measures = task.goal.measures(model(inputs), targets)
        assert float(measures[f"dice_{own}"].mean()) > 0.4, site


def test_a_hospital_that_lacks_what_the_plan_has_not_is_refused(
    hospitals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medsilo.tasks.own.folder.FolderTask.absent", lambda self, source: ("liver",))
    with pytest.raises(MedsiloError, match="lacks liver; every hospital needs"):
        run(plan_of(), settings=each(hospitals, OWN))


def test_what_nobody_has_ends_the_study_and_the_page_says_whose_scores_differ(
    hospitals: Path, study: tuple[StudyResult, Path]
) -> None:
    nobody = {site: {"unannotated": ["post"], "label_map": {1: "ant", 2: "ant"}} for site in "abc"}
    for sealing in ("none", "pairwise"):
        plan = plan_of().with_changes([f"secure_aggregation.mode={sealing}"])
        with pytest.raises(MedsiloError, match="no hospital that.*post; take it out"):
            run(plan, settings=each(hospitals, nobody))
    told = [notice.text for notice in notices([read(study[1])])]
    assert any("a not post, b not ant and t1" in text for text in told)


# ------------------------------------------------------------------------------------------------ a table
def test_a_table_without_a_column_is_read_as_one_that_is_missing_everywhere(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def source(columns: Sequence[str], **own: Any) -> DataSource:
        folder = tmp_path / "-".join(columns)
        folder.mkdir(exist_ok=True)
        with (folder / "cases.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow([*columns, "outcome", "patient"])
            lines.writerows([*random.normal(size=len(columns)), case % 2, case] for case in range(12))
        return DataSource(folder=folder, **own)

    def read(missing: str, given: DataSource) -> Any:
        task = PatientTable(columns=["age", "bmi"], labels=["0", "1"], missing=missing)  # type: ignore[arg-type]
        return task.read("a", ["a"], 0, given)

    lacks = source(["age"], unannotated=["bmi"])
    inputs = read("mark", lacks).train.inputs
    assert inputs.shape[1] == 4 and inputs[:, 1:].unique(dim=0).tolist() == [[0.0, 0.0, 1.0]]
    assert read("mean", lacks).survey.absent == ("bmi",)
    with pytest.raises(DataError, match="nothing in this task can"):
        read("leave-out", lacks)
    with pytest.raises(DataError, match="lacks 1 columns of the plan, first 'bmi'"):
        read("mark", source(["age"]))


# ------------------------------------------------------------------------------------------------ classes
CLASSES = ("nevus", "keratosis", "melanoma", "other")
SCORES = ((0.3, -1.2, 2.0, 0.7), (1.5, 0.2, -0.4, 1.9), (-0.6, 0.8, 0.1, 0.9))


def chance(scores: Sequence[float], may: Sequence[int], of: Sequence[int]) -> float:
    """Return by hand the share of classes among others."""
    return sum(math.exp(scores[one]) for one in may) / sum(math.exp(scores[one]) for one in of)


def test_classes_that_a_hospital_does_not_tell_apart_by_hand() -> None:
    """Nobody looks for melanoma (2); keratosis (1) counts as other (3). What is labelled nevus (0) is nevus."""
    marks = marks_of_classes(4, absent=[2], alike=[[3, 1]])
    output, labels = torch.tensor(SCORES, dtype=torch.float64), torch.tensor([0, 3, 3])
    target, here = labels | torch.tensor(marks)[labels], (0, 1, 3)
    goal = Classification(CLASSES)
    by_hand = [-math.log(chance(own, may, here)) for own, may in zip(SCORES, ((0,), (1, 3), (1, 3)), strict=True)]
    torch.testing.assert_close(goal.case_losses(output, target).tolist(), by_hand)
    torch.testing.assert_close(float(goal.loss(output, target)), sum(by_hand) / 3)
    heavy = weighted(goal.loss, torch.tensor([1.0, 5.0, 7.0, 2.0]), 1.0)
    torch.testing.assert_close(float(heavy(output, target)), (by_hand[0] + 2 * by_hand[1] + 2 * by_hand[2]) / 3)
    # nothing is learned of what nobody looked for, and only the sum of what is one there
    output.requires_grad_()
    goal.loss(output, target).backward()
    slope = output.grad
    assert slope is not None and not slope[:, 2].any() and (slope[1:, [1, 3]] < 0).all()
    shares = [math.exp(SCORES[1][one]) for one in (1, 3)]
    torch.testing.assert_close(float(slope[1, 1] / slope[1, 3]), shares[0] / shares[1])
    # found: among what is looked for; either of what is one is right
    measures = goal.measures(output.detach(), target)
    assert measures["found"].tolist() == [3, 3, 3] and measures["accuracy"].tolist() == [0, 1, 1]
    assert measures["label"].tolist() == [0, 3, 3] and not measures["p2"].any()
    torch.testing.assert_close(measures["p0"][0].item(), chance(SCORES[0], (0,), here))
    told = goal.counts(measures, ["a", "b", "c"], 1)
    assert told["confusion"][3] == 1 and told["confusion"][15] == 2 and "chances" not in told
    plain = goal.measures(output.detach(), labels)
    assert {"confusion", "chances", "reliability"} <= set(goal.counts(plain, ["a", "b", "c"], 1))
    assert marks_of_classes(4, [], []) == [0] * 4 and not is_marked(labels)


def photographs(folder: Path, classes: Mapping[str, int], seed: int) -> None:
    """Write grey images that are the brighter the higher the class's number."""
    random = np.random.default_rng(seed)
    for name, level in classes.items():
        (folder / name).mkdir(parents=True)
        for case in range(8):
            pixels = random.normal(40 + 60 * level, 12, (16, 16)).clip(0, 255).astype("u1")
            Image.fromarray(pixels).save(folder / name / f"{name}{case}.png")


@pytest.mark.slow
def test_images_of_hospitals_that_tell_other_classes_apart(tmp_path: Path) -> None:
    photographs(tmp_path / "a", {"nevus": 0, "keratosis": 1, "melanoma": 2}, 1)
    photographs(tmp_path / "b", {"nevus": 0, "keratosis": 1}, 2)  # nobody looked for melanoma
    photographs(tmp_path / "c", {"nevus": 0, "lesion": 1}, 3)
    for case, path in enumerate(sorted((tmp_path / "c" / "lesion").iterdir())[4:]):
        photographs(tmp_path / f"more{case}", {"melanoma": 2}, case)
        path.write_bytes((tmp_path / f"more{case}" / "melanoma" / "melanoma0.png").read_bytes())
    own: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"unannotated": ["melanoma"]},
        "c": {"label_map": {"lesion": ["keratosis", "melanoma"]}},
    }
    task = {
        "name": "image-folder",
        "kind": "classification",
        "labels": list(CLASSES[:3]),
        "size": [16, 16],
        "colours": "grey",
    }

    def source(site: str, **values: Any) -> DataSource:
        return DataSource(folder=tmp_path / site, **{"cache_memory": 0, **values})

    plan = parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": task,
            "network": {"name": "small-cnn"},
            "training": {"rounds": 5, "local_epochs": 4, "batch_size": 4, "learning_rate": 0.01, "optimizer": "adam"},
            "participation": {"sites": ["a", "b", "c"]},
        }
    )
    known = make_settings({"public_data": True, "min_patients_per_metric": 1, "device": "cpu"}, "test")
    sites = {site: known.model_copy(update={"data": source(site, **values)}) for site, values in own.items()}
    settings = EachSites(**{name: getattr(known, name) for name in SiteSettings.model_fields}, sites=sites)
    found = run(plan, settings=settings).summary
    assert {site: one.absent for site, one in found.sites.items()} == {"a": [], "b": ["melanoma"], "c": ["melanoma"]}
    assert found.mean_test is not None and found.mean_test > 0.7
    assert found.sites["a"].figures.get("auroc") is not None and "auroc" not in found.sites["c"].figures

    def read(site: str, **values: Any) -> Any:
        return plan.task.site_data(site, ["a", "b", "c"], 0, source(site, **values))

    lesion = next(target for _, target in read("c", **own["c"]).train if int(target) & 255)
    assert labels_in(lesion) == 1 and lesion >> ALIKE == 1 << 2
    assert class_counts(read("c", **own["c"]).train, plan.task.goal.classes)[2] == 0
    survey = plan.task.survey("c", ["c"], 0, source("c", **own["c"]))
    rows = {row[0]: row[1:] for row in data_tables(survey, plan, 1)[1].rows}
    assert rows["melanoma"] == ["not told apart"] * 3 and sum(rows["keratosis"]) == 8
    for site, values, why in (
        ("a", own["b"], r"not among the plan's \(nevus, keratosis\)"),
        ("b", {"unannotated": ["melanoma", "keratosis"]}, "distinguishes no two"),
        ("b", {"label_map": {"keratosis": ["keratosis", "melanoma"], "x": "melanoma"}}, "more than once"),
        ("c", {"label_map": {"lesion": ["keratosis", "liver"]}}, "data.label_map: 'liver' can't be absent"),
    ):
        with pytest.raises(DataError, match=why):
            read(site, **values)
    with pytest.raises(DataError, match="only classes of cases can share"):
        NiftiFolder(**TASK).read("a", ["a"], 0, source("a", label_map={1: ["ant", "post"]}))


def test_lines_of_a_hospital_that_tells_other_classes_apart(tmp_path: Path) -> None:
    with (tmp_path / "cases.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["age", "outcome", "patient"])
        lines.writerows([case, ("none", "some")[case % 2], case] for case in range(12))
    task = PatientTable(columns=["age"], labels=["none", "mild", "severe"])  # type: ignore[arg-type]

    def read(**own: Any) -> Any:
        return task.site_data("a", ["a"], 0, DataSource(folder=tmp_path, **own))

    both: dict[str, Any] = {"label_map": {"some": ["mild", "severe"]}}
    targets = read(**both).train.targets
    assert {*labels_in(targets).tolist()} == {0, 1} and {*(targets >> ALIKE).tolist()} == {0, 1 << 2}
    survey = read(**both).survey
    assert survey.absent == ("severe",) and sum(part.classes["mild"] for part in survey.parts.values()) == 6
    alone = read(unannotated=["severe"], label_map={"some": "mild"}).train.targets
    assert not (alone >> ALIKE).any() and all(absent_in(int(own))[:1] == [2] for own in alone)
    with pytest.raises(DataError, match=r"not the plan's \(none, severe\)"):
        read(unannotated=["mild"], label_map={"some": "mild"})
