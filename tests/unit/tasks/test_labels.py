"""Hospitals that annotated different structures share a study: files, loss, aggregation and predicted masks."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import nibabel
import numpy as np
import pytest
import torch
from monai.losses import DiceLoss
from torch.nn import functional

from medsilo.check.data import HELD, data_tables
from medsilo.core.errors import DataError, MedsiloError
from medsilo.deploy.supermodel import SuperModel
from medsilo.learning.class_weights import weighted
from medsilo.learning.compute import labels_in, marks_in
from medsilo.learning.partial_labels import absent_in, mark_of
from medsilo.mixing.aggregators import WeightedMean
from medsilo.models.architectures import UNet
from medsilo.plan import Plan, parse_plan
from medsilo.runs.paths import SUPER_MODEL, site_folder
from medsilo.schedule import structures
from medsilo.schedule.phase import ServerSide
from medsilo.schedule.structures import mix_by_structure, outputs_of
from medsilo.site.settings import EachSites, SiteSettings, make_settings
from medsilo.tasks.objective import judged_by, says_of
from medsilo.tasks.own.augmentation import augmented
from medsilo.tasks.own.folder import segmentation
from medsilo.tasks.own.image_patches import patch
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.own.volume_folder import NiftiFolder
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.sources import DataSource
from medsilo_lab.cli.starting import hospitals_table
from medsilo_lab.deploy.image_files import ImagePredictor
from medsilo_lab.deploy.model_card import card_facts, write_card
from medsilo_lab.deploy.source import Source
from medsilo_lab.report.read import read
from medsilo_lab.report.run_warnings import of_run
from medsilo_zoo.condistfl import distilled
from tests.inprocess import StudyResult, run
from tests.mixed import result_of

GRID = (16, 16, 4)
TASK = {
    "name": "nifti-folder",
    "labels": ["ant", "post"],
    "modalities": ["t1", "flair"],
    "size": [16, 16],
    "dimensions": 2,
    "slices": "all",
    "intensity": {"kind": "z-score"},
}
OWN: dict[str, dict[str, Any]] = {
    "a": {"unannotated": ["post"]},
    "b": {"unannotated": ["ant"], "label_map": {1: "post"}},
    "c": {},
}
PATTERNS = {"images": ["t1/*.nii.gz", "flair/*.nii.gz"], "labels": "labels/*.nii.gz"}


def write(folder: Path, drew: Mapping[int, int], seed: int, cases: int = 6) -> None:
    """Write volumes with two bright discs in both channels; `drew` maps a structure's index to the structure's value
    in the masks.
    """
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
    # in each round, the server averages the weight and the bias of each hospital's last layer by structure
    assert weighed.call_count == 6 * len(OWN) * 2
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
    # the Dice loss uses only the structure that the hospital annotated
    only = DiceLoss(include_background=False, to_onehot_y=True, softmax=True)
    dice = Segmentation(NAMES, lambda found, right: only(found, right[:, None]), STRUCTURES)
    right = (labels[0] == 1).double()
    by_hand = 1 - (2 * (p[0, 1] * right).sum() + 1e-5) / ((p[0, 1] + right).sum() + 1e-5)
    torch.testing.assert_close(dice.loss(output[:1], target[:1]), by_hand)
    # only labels that this hospital separates have class weights
    doubled = weighted(entropy.loss, torch.tensor([1.0, 2.0, 9.0]), 1.0)
    heavy = (-together.gather(0, labels[:1]) * (1 + (labels[:1] == 1))).mean()
    torch.testing.assert_close(doubled(output[:1], target[:1]), heavy)
    # the loss does not change if probability moves between the background and an unannotated label
    moved = torch.stack([(p[0, 0] + p[0, 2]) / 2, p[0, 1], (p[0, 0] + p[0, 2]) / 2]).log()[None]
    for goal in (entropy, dice, segmentation(("ant", "post"))):
        torch.testing.assert_close(goal.loss(moved, target[:1]), goal.loss(output[:1], target[:1]))
        assert torch.equal(goal.loss(output, labels), goal.criterion(output, labels))  # type: ignore[attr-defined]


def test_a_mark_travels_through_pieces_and_augmentation_and_scores_heed_it() -> None:
    image, labels = torch.rand(1, 6, 6), torch.zeros(6, 6, dtype=torch.long)
    labels[2:4, 2:4] = 1
    case = image, labels | mark_of([2, 15])
    piece = patch(case, (8, 8), 1.0, 3)
    _, moved = augmented((piece[0][None], piece[1][None].clone()), ("flip-x", "rotate90", "affine"), True, [5])
    for target in (piece[1], moved[0]):
        assert marks_in(target[None]) == [mark_of([2, 15])] and absent_in(mark_of([2, 15])) == [2, 15]
        assert labels_in(target).unique().tolist() == [0, 1]
    goal = segmentation(("ant", "post"))
    found = functional.one_hot(torch.zeros(1, 6, 6, dtype=torch.long), 3).permute(0, 3, 1, 2).float()
    target = (labels | mark_of([2]))[None]
    measures = goal.measures(found, target)
    assert measures["dice"].tolist() == [0.0] and measures["dice_ant"].tolist() == [0.0]
    assert all(measures[name].isnan().all() for name in ("dice_post", "hd95_post", "surface_dice_post"))
    assert goal.case_scores(found, target).tolist() == [0.0] != goal.case_scores(found, labels[None]).tolist()


def test_conditional_distillation_by_hand() -> None:
    """Distillation excludes an annotated pixel, and a pixel for which the teacher predicts an annotated structure."""
    output, taught = torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4)
    taught[0, 1, 0, 1], taught[0, 2, 0, 2], output[0, 2, 0, 3] = 9.0, 1.0, -1.0
    target = torch.tensor([[[1, 0, 0, 0]]]) | mark_of([2])
    own, right = [0.5, 1 / (1 + np.exp(2))], [1 / (1 + np.exp(-2)), 0.5]
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
    # a transposed convolution has its output channels on the second axis
    assert sorted(axes.values()) == [0, 1] and outputs_of(model, 4) == {}
    goal = NiftiFolder(**TASK)
    joined = {"a": Answer("post"), "b": Answer("ant"), "c": Answer()}
    server = ServerSide(["a", "b", "c"], {}, joined, set, goal, None, 0, None, None, None)  # type: ignore[arg-type]
    mixers, tensors = {"model": WeightedMean()}, model.state_dict()
    mix_by_structure(mixers, {"model": tensors}, model, server)
    aggregator = mixers["model"]
    aggregator.start(["a", "b", "c"], {name: torch.zeros_like(one) for name, one in tensors.items()})
    for site, value, samples in (("a", 1.0, 1), ("b", 2.0, 1), ("c", 4.0, 2)):
        aggregator.add(site, {name: torch.full_like(one, value) for name, one in tensors.items()}, samples)
    found = result_of(aggregator, "a")
    for name, axis in axes.items():
        rows = found[name].movedim(axis, 0)
        for place, mean in enumerate(((1 + 2 + 8) / 4, (1 + 8) / 3, (2 + 8) / 3)):
            torch.testing.assert_close(rows[place], torch.full_like(rows[place], mean))
    others = next(name for name in tensors if name not in axes and tensors[name].is_floating_point())
    torch.testing.assert_close(found[others], torch.full_like(found[others], 11 / 4))
    plain = {"model": WeightedMean()}
    alone = ServerSide(["c"], {}, {"c": Answer()}, *server_rest(server))
    mix_by_structure(plain, {"model": tensors}, model, alone)
    assert type(plain["model"]) is WeightedMean


def server_rest(server: ServerSide) -> Any:
    return server.contributed, server.task, server.training, 0, server.compute, None, server.stop


# ------------------------------------------------------------------------------------------------ a study
@pytest.mark.slow
def test_hospitals_that_drew_different_structures_learn_all(study: tuple[StudyResult, Path]) -> None:
    summary = study[0].summary
    assert {site: own.absent for site, own in summary.sites.items()} == {"a": ["post"], "b": ["ant"], "c": []}
    told = {
        site: {name for name, value in own.figures.items() if value is not None} for site, own in summary.sites.items()
    }
    assert "dice_post" not in told["a"] and "dice_ant" not in told["b"] and {"dice_ant", "dice_post"} <= told["c"]
    assert min(summary.pooled["dice_ant"], summary.pooled["dice_post"]) > 0.5  # type: ignore[type-var]
    # each structure's Dice is averaged over the hospitals that annotated the structure, and then over the structures
    dice = {
        name: {site: own.figures[f"dice_{name}"] for site, own in summary.sites.items()} for name in ("ant", "post")
    }
    ant, post = (dice["ant"][site] for site in "ac"), (dice["post"][site] for site in "bc")
    assert summary.mean_test == pytest.approx((sum(ant) / 2 + sum(post) / 2) / 2)  # type: ignore[arg-type]
    assert summary.mean_test != pytest.approx(sum(own.test["dice"] for own in summary.sites.values()) / 3)


def test_structures_count_alike_when_a_round_is_chosen() -> None:
    goal = segmentation(("ant", "post"))
    assert judged_by(goal, {"a": ["post"], "c": []}) == {"dice_ant": ["a", "c"], "dice_post": ["c"]}
    # three hospitals annotated ant and one hospital annotated post, and both structures have the same weight in the
    # score
    assert says_of(goal, {"a": ["post"], "b": ["post"], "d": ["post"], "c": ["ant"]}) == pytest.approx(
        {"a": 1 / 3, "b": 1 / 3, "d": 1 / 3, "c": 1}
    )
    assert says_of(goal, {"a": ["post"], "c": []}) == {"a": 0.5, "c": 1.5}
    assert says_of(goal, {"a": [], "c": []}) == {"a": 1, "c": 1}


def test_predicting_gives_all_structures_where_one_was_drawn(
    study: tuple[StudyResult, Path], hospitals: Path, tmp_path: Path
) -> None:
    _, folder = study
    data = each(hospitals, OWN).of("b").data
    source = Source.open(folder, "")
    image = tmp_path / "c0.nii.gz"
    channels = [nibabel.load(hospitals / "b" / name / "c0.nii.gz").get_fdata(dtype="f4") for name in ("t1", "flair")]
    nibabel.save(nibabel.Nifti1Image(np.stack(channels, -1), np.eye(4)), image)
    asked = ImagePredictor(
        source, [image], tmp_path / "out", torch.device("cpu"), lambda line: None, data=data, site_part=folder
    )
    assert asked.predict() == 0
    mask = np.asarray(nibabel.load(next((tmp_path / "out").glob("*mask.nii.gz"))).dataobj)
    values = source.plan.task.use.own_values(data)
    assert values[2] == 1 and values[1] not in (0, 1)
    assert set(np.unique(mask)) == {0, values[1], values[2]}
    assert card_facts(source)["absent"] == {"a": ["post"], "b": ["ant"]}


def test_check_says_what_is_not_here_and_stops_where_masks_disagree(hospitals: Path) -> None:
    def survey(site: str, **own: Any) -> Any:
        return NiftiFolder(**TASK).survey(site, [site], 0, each(hospitals, {site: own}).of(site).data)

    def said(site: str, **own: Any) -> str:
        return " ".join(problem.what for problem in survey(site, **own).problems if problem.severity != "left out")

    plan = plan_of()
    tables = {table.title: table.rows for table in data_tables(survey("b", **OWN["b"]), plan, 1)}
    assert [row for row in tables["Slices that show each label"] if row[0] == "ant"] == [["ant", *["not drawn"] * 3]]
    assert tables[f"Slices{HELD}"] == [["ant", 0, 0, 24], ["post", 24, 0, 0]]
    assert "'post': name it in data.unannotated" in said("a")
    assert "no mask shows" not in said("a", unannotated=["post"])
    assert "masks show a structure that data.unannotated names" in said("c", unannotated=["post"])
    assert "names all structures" in said("c", unannotated=["ant", "post"])
    assert "'liver' can't be absent; ant, post" in said("c", unannotated=["liver"])


@pytest.mark.slow
def test_one_table_says_which_hospital_has_what_and_tells_no_small_count_by_a_sum(
    hospitals: Path, tmp_path: Path
) -> None:
    def tables(site: str, least: int, **own: Any) -> Any:
        task = NiftiFolder(**TASK | {"dimensions": 3, "size": [16, 16, 4]})
        return data_tables(task.survey(site, [site], 0, each(hospitals, {site: own}).of(site).data), plan_of(), least)

    write(hospitals / "d", {1: 1}, 7, cases=12)
    # the hospital annotated post, but three of its twelve cases show no post
    write(hospitals / "d", {1: 1, 2: 2}, 7, cases=9)
    told = hospitals_table({site: tables(site, 1, **OWN.get(site, {})) for site in "abd"})
    assert told.columns == ("name", "a", "b", "d")
    assert [list(row) for row in told.rows] == [
        ["ant", 6, "lacks it (6)", 12],
        ["post", "lacks it (6)", 6, "9, none in 3"],
    ]
    few = hospitals_table({"d": tables("d", 9)})
    assert dict(few.rows)["ant"] == "suppressed", "a sum would say at least 0"
    few = {row[0]: row[1:] for table in tables("d", 4) if table.title.endswith(HELD) for row in table.rows}
    assert all(str(count).startswith(("at least", "at most")) for count in few["ant"][:2])


@pytest.mark.long
def test_cards_say_what_a_hospitals_own_model_never_saw_drawn(
    hospitals: Path, study: tuple[StudyResult, Path], tmp_path: Path
) -> None:
    never = "it never learned post there"

    def card(folder: Path, site: str) -> str:
        out = tmp_path / f"{folder.parent.name}-{folder.name}-{site}"
        out.mkdir()
        write_card(Source.open(folder, site), out)
        return (out / "MODEL_CARD.md").read_text()

    # the model card of the global model does not reveal which structures a single hospital left unannotated
    assert never not in card(study[1], "")
    short = ["training.rounds=1", "training.local_epochs=1"]
    for method, sites in (("local", {"a": True, "b": False}), ("fedsm", {"": True})):
        run(plan_of(method).with_changes(short), folder=tmp_path / method, settings=each(hospitals, OWN))
        for site, says in sites.items():
            text = card(tmp_path / method, site)
            assert (never in text) is says, (method, site)
    assert "personal model is in this super model" in text
    for place in (tmp_path / "fedsm", site_folder(tmp_path / "fedsm", "c")):
        model = SuperModel.load(place / SUPER_MODEL)
        assert model.origin and model.origin.absent == {"a": ("post",), "b": ("ant",)}
        told = card(place / SUPER_MODEL, "")
        assert "a has not: post. " in told and "b has not: ant. " in told and "c has not" not in told
        assert never in told


@pytest.mark.long
@pytest.mark.parametrize("method", [pytest.param("fedbn", marks=pytest.mark.long), "fedsm"])
def test_methods_with_personal_models_find_structures_that_their_hospital_did_not_draw(
    method: str, hospitals: Path, tmp_path: Path
) -> None:
    """Hospital a did not annotate the structure post, but its model still segments post in the images of hospital c,
    which did.
    """
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
    with pytest.raises(MedsiloError, match="data lack liver; under this plan, every hospital needs"):
        run(plan_of(), settings=each(hospitals, OWN))


@pytest.mark.slow
def test_what_nobody_has_ends_the_study_and_the_page_says_whose_scores_differ(
    hospitals: Path, study: tuple[StudyResult, Path]
) -> None:
    nobody = {site: {"unannotated": ["post"], "label_map": {1: "ant", 2: "ant"}} for site in "abc"}
    for sealing in ("none", "pairwise"):
        plan = plan_of().with_changes([f"secure_aggregation.mode={sealing}"])
        with pytest.raises(MedsiloError, match="no hospital that.*post; remove it from the plan"):
            run(plan, settings=each(hospitals, nobody))
    told = [notice.text for notice in of_run(read(study[1]))]
    assert any("a not post, b not ant" in text for text in told)


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
    with pytest.raises(DataError, match="lacks 1 column of the plan, first 'bmi'"):
        read("mark", source(["age"]))
