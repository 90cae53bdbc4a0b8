"""The choice of postprocessing in a federation, against nnU-Net's own on all validation cases in one place."""

import copy
import json
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from medsilo.check.leaks import describe
from medsilo.cli import main
from medsilo.core.coarse import Resolution
from medsilo.core.errors import PlanError, Refused
from medsilo.core.files import load_facts
from medsilo.deploy.predict import predict
from medsilo.deploy.source import Source, open_source
from medsilo.federation import inprocess
from medsilo.federation.accepting import check_trials
from medsilo.federation.around import TrainingSite
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.inprocess import Loop
from medsilo.federation.participant import Participant
from medsilo.federation.protection import planned_answers
from medsilo.federation.scoring import read_measures
from medsilo.federation.seams import Place
from medsilo.flare import simulator
from medsilo.learning.loop import Compute, Stop
from medsilo.plan import Plan
from medsilo.runs.messages import Counted, Parcel, Request, Tried
from medsilo.runs.record import Record
from medsilo.site.settings import SiteSettings
from medsilo.study.cross import cross
from medsilo.tasks.metrics import Counts, added
from medsilo.tasks.sources import DataSource
from medsilo_nnunet.nnunet_postprocessing import LargestComponents
from medsilo_nnunet.question import SegmentationQuestion
from tests.brains import QUESTION, narrow, plans_of, study, write_hospitals
from tests.federation.test_simulator import assert_same_outcome
from tests.sites import site_of

pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")

LESION = {"lesion": 1}
ORGANS = {"liver": 2, "kidney": 1, "spleen": 3}  # not in the order of their values
TUMOUR = {"whole": [1, 2, 3], "core": [2, 3], "enhancing": 3}
CHAIN = {"first": [1, 2], "second": [2, 3], "third": [3, 4], "alone": 5}  # each shares a value with the next
BETWEEN = {"outer": [1, 2], "other": [1, 3], "inner": 2}  # the second changes the first, when its turn is over
WRITTEN = {"whole": [1, 2, 3], "first": [1, 2, 3, 5], "outer": [1, 3, 2]}
Case = tuple[np.ndarray, np.ndarray]  # what was found, and what is right


def question_of(labels: dict[str, Any], ignored: bool = False) -> SegmentationQuestion:
    last = max(max(own) if isinstance(own, list) else own for own in labels.values())
    named = {"background": 0, **labels, **({"ignore": last + 1} if ignored else {})}
    order = WRITTEN.get(next(iter(labels)))
    given = {"name": QUESTION.name, "channels": ["FLAIR"], "labels": named, "regions_class_order": order}
    return SegmentationQuestion.model_validate(given)


def box(labels: np.ndarray, value: int, corner: Sequence[int], size: int) -> None:
    labels[tuple(slice(start, start + size) for start in corner)] = value


def drawn(question: SegmentationQuestion, seed: int, cases: int = 7) -> list[Case]:
    """Return cases of structures side by side: some missing, some in two parts, as they are, as found, or both."""
    chance = np.random.default_rng(seed)
    values = sorted({value for own in question.regions.values() for value in own})
    parts = {value: (chance.choice([0, 0.2, 0.9]), chance.choice([0.1, 0.6, 0.9])) for value in values}
    every = []
    for _ in range(cases):
        right, found = (np.zeros((6, 4 * len(values) + 4, 22), np.uint8) for _ in range(2))
        for value in values:
            for labels, there, second in ((right, 0.85, parts[value][0]), (found, 0.95, parts[value][1])):
                if chance.random() < there:
                    box(labels, value, (int(chance.integers(2)), 4 * value - 4, int(chance.integers(3))), 4)
                if chance.random() < second:
                    box(labels, value, (1, 4 * value - 4, 12 + int(chance.integers(6))), 3)
        if question.ignored:
            right[:, :, 16:] = question.ignored
        every.append((found, right))
    return every


def trials_of(question: SegmentationQuestion, cases: Sequence[Case]) -> Counts:
    """Return what a hospital with these validation cases tells."""
    every = LargestComponents(question)
    each = [every.tried_on(torch.from_numpy(found), torch.from_numpy(right)) for found, right in cases]
    return every.sums({name: torch.tensor([one[name] for one in each], dtype=torch.float64) for name in each[0]}, 1)


def chosen(question: SegmentationQuestion, cases: Sequence[Case]) -> dict[str, Any]:
    """Return what hospitals choose that have these cases by turns."""
    sites = min(3, len(cases))
    return LargestComponents(question).chosen(added(trials_of(question, cases[site::sites]) for site in range(sites)))


def federated(question: SegmentationQuestion, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the same in nnU-Net's words."""
    every = LargestComponents(question)
    return every.in_nnunet(every.read(chosen(question, cases)))


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return nnU-Net's own choice on all cases, and these after it. Its pools have threads: a process starts slowly."""
    SimpleITK = pytest.importorskip("SimpleITK")
    from nnunetv2.postprocessing.remove_connected_components import determine_postprocessing

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: SimpleNamespace(Pool=ThreadPool))

    def determined(question: SegmentationQuestion, cases: Sequence[Case]) -> tuple[dict[str, Any], list[np.ndarray]]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        for number, (found, right) in enumerate(cases):
            for place, labels in (("found", found), ("right", right)):
                (folder / place).mkdir(parents=True, exist_ok=True)
                SimpleITK.WriteImage(SimpleITK.GetImageFromArray(labels), folder / place / f"case{number:03}.nii.gz")
        plans = {"image_reader_writer": "SimpleITKIO", "label_manager": "LabelManager", "configurations": {}}
        settings = question.in_nnunet() | {"file_ending": ".nii.gz"}
        functions, given = determine_postprocessing(str(folder / "found"), str(folder / "right"), plans, settings, 1)
        after = [SimpleITK.ReadImage(file) for file in sorted((folder / "found" / "postprocessed").glob("*.nii.gz"))]
        words = {"postprocessing_fns": [one.__name__ for one in functions], "postprocessing_kwargs": given}
        return words, [SimpleITK.GetArrayFromImage(image) for image in after]

    return determined


def organs(more_right: Sequence[int], more_found: Sequence[int]) -> list[Case]:
    """Return cases of three organs that are found as they are, but for second parts that are there, or found."""
    found, right = (np.zeros((6, 16, 22), np.uint8) for _ in range(2))
    for value in (1, 2, 3):
        for labels, more in ((right, more_right), (found, more_found)):
            box(labels, value, (0, 4 * value - 4, 0), 4)
            if value in more:
                box(labels, value, (1, 4 * value - 4, 12), 3)
    return [(found, right)] * 3


def missing(cases: Sequence[Case], value: int) -> list[Case]:
    return [(np.where(found == value, 0, found), np.where(right == value, 0, right)) for found, right in cases]


@pytest.mark.parametrize(
    ("cases", "kept"),
    [
        pytest.param(organs((), (1, 2, 3)), [[1, 2, 3]], id="of all foreground"),
        pytest.param(organs((1,), (1, 2)), [2], id="of one label, as another has two parts"),
        pytest.param(organs((1,), (1, 2, 3)), [2, 3], id="of two labels"),
        pytest.param(organs((1, 2), (1, 2)), [], id="of none, as all is right"),
        pytest.param(organs((), ()), [], id="of none, as nothing changes"),
        pytest.param(missing(organs((), (1, 2)), 3), [1, 2], id="of labels, as nobody has a spleen: the mean is NaN"),
        pytest.param([*organs((), (1,)), *organs((1,), (1,))], [], id="of none, as both are as frequent"),
    ],
)
def test_hospitals_choose_what_can_be_worked_out_by_hand(
    cases: list[Case], kept: list[Any], pooled: Callable[..., Any]
) -> None:
    question = question_of(ORGANS)
    found = federated(question, cases)
    assert [one["labels_or_regions"] for one in found["postprocessing_kwargs"]] == kept
    assert found == pooled(question, cases)[0]


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
@pytest.mark.parametrize("labels", [LESION, ORGANS, TUMOUR, CHAIN, BETWEEN], ids=lambda labels: "-".join(labels))
def test_hospitals_choose_what_nnunet_chooses_on_all_cases(
    labels: dict[str, Any], ignored: bool, pooled: Callable[..., Any]
) -> None:
    question = question_of(labels, ignored)
    every, seen = LargestComponents(question), set()
    for seed in range(8):
        cases = drawn(question, seed)
        wanted, after = pooled(question, cases)
        choice = every.read(chosen(question, cases))
        assert every.in_nnunet(choice) == wanted
        own = [every.applied(choice, torch.from_numpy(found)).numpy() for found, _ in cases]
        assert all(map(np.array_equal, own, after))
        seen.add(choice)
    assert len(seen) > 1


def test_a_structure_depends_on_those_before_it_that_share_values_with_it() -> None:
    assert LargestComponents(question_of(LESION)).steps == {"lesion": ("",)}  # nnU-Net decides on all foreground alone
    assert LargestComponents(question_of(ORGANS)).steps == {name: ("", name) for name in ("kidney", "liver", "spleen")}
    assert LargestComponents(question_of(CHAIN)).steps["third"] == ("", "first", "second", "third")
    assert LargestComponents(question_of(CHAIN)).steps["alone"] == ("", "alone")
    assert LargestComponents(question_of(BETWEEN)).steps["inner"] == ("", "outer", "inner")


def test_a_structure_with_values_in_too_few_cases_is_left_out_in_all_its_trials() -> None:
    every = LargestComponents(question_of({"liver": 1, "spleen": 2}))
    trials = [trial for trials in every.trials.values() for trial in trials]
    measures = {trial: torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64) for trial in trials}
    measures["10 spleen"][0] = torch.nan  # found where it isn't, which is mended; then it is neither there nor found
    assert every.sums(measures, 2) == {**{trial: [2.1, 3.0] for trial in trials}, "10 spleen": [1.6, 2.0]}
    assert set(every.sums(measures, 3)) == set(every.trials["liver"])
    measures |= {trial: torch.full((3,), torch.nan) for trial in every.trials["spleen"]}
    assert every.sums(measures, 3)["10 spleen"] == [0.0, 0.0]
    assert every.chosen({}) == {"all_foreground": False, "structures": []}


def test_a_choice_of_other_structures_is_refused() -> None:
    every = LargestComponents(question_of(TUMOUR))
    assert every.read({}) == every.read(every.chosen({}))
    for wrong in ({"structures": ["liver"]}, {"structures": ["core", "whole"]}, {"all_foreground": 1}, {"more": True}):
        with pytest.raises(Refused, match="postprocessing"):
            every.read(wrong)
    with pytest.raises(Refused, match="other structures"):
        LargestComponents(question_of(LESION)).read({"structures": ["lesion"]})


# ------------------------------------------------------------------------------------------------------ in a study
SITES = ("brno", "graz", "oslo")
TRAINING = {"rounds": 2, "batch_size": 4, "local_steps": 12, "learning_rate": 0.02, "momentum": 0.9}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of hospitals where only the largest lesion of each head is marked; and plans."""
    folder = tmp_path_factory.mktemp("brains")
    from acvl_utils.morphology.morphology_helper import remove_all_but_largest_component

    write_hospitals(folder, SITES, 6, width=32)
    for path in folder.glob("*/labels/*.nii.gz"):
        mask: Any = nibabel.load(path)
        largest = remove_all_but_largest_component(np.asanyarray(mask.dataobj) > 0)
        nibabel.save(nibabel.Nifti1Image(largest.astype(np.uint8), mask.affine), path)
    return folder, narrow(plans_of(folder, SITES, 2000), 16)


def study_of(plans: dict[str, Any], method: str = "fedavg", **others: Any) -> Plan:
    task = {"mirror": False, "postprocessing": True}
    return study(plans, SITES, {"name": method}, **{"training": TRAINING, "task": task, **others})


def settings_of(folder: Path, **others: Any) -> SiteSettings:
    return SiteSettings(data=DataSource(folder=folder), device="cpu", **{"public_data": True, **others})


@pytest.fixture(scope="module")
def trained(hospitals: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose hospitals share one model and its postprocessing."""
    run = tmp_path_factory.mktemp("run") / "run"
    inprocess.run(study_of(hospitals[1]), folder=run, settings=settings_of(hospitals[0], smallest_metric=1))
    return run


def masks_by(source: Source, folder: Path, part: str, site: str) -> list[Case]:
    """Return what a model finds in the cases of a part, and their masks."""
    task: Any = source.plan.task
    cases = []
    for name in getattr(task.site_data(site, SITES, 0, DataSource(folder=folder)), part).patients:
        scan = task.use.scan_of((folder / site / "images" / f"{name}.nii.gz",))
        found = predict(source, scan, torch.device("cpu")).labels
        cases.append((found, task.parts.own_labels(folder / site / "labels" / f"{name}.nii.gz").numpy()))
    return cases


def raw(source: Source) -> Source:
    """Return the model without its postprocessing."""
    return replace(source, plan=source.plan.model_copy(update={"task": source.plan.task.with_postprocessing({})}))


@pytest.mark.slow
def test_a_study_chooses_what_nnunet_would_on_all_validation_cases(
    trained: Path, hospitals: tuple[Path, Any], pooled: Callable[..., Any]
) -> None:
    source = open_source(trained)
    cases = [case for site in SITES for case in masks_by(raw(source), hospitals[0], "validation", site)]
    assert source.plan.task.postprocessing_in_nnunet == pooled(QUESTION, cases)[0]
    told = {"all_foreground": True, "structures": []}
    details = Record(trained).summary().details
    assert details.postprocessing.as_json() == {**told, "sites": list(SITES)} and not details.cautions
    for path in (trained / "global", *(trained / "sites" / site for site in SITES)):
        assert load_facts(path / "best.safetensors")["postprocessing"] == told


@pytest.mark.slow
def test_the_test_is_measured_with_it(trained: Path, hospitals: tuple[Path, Any]) -> None:
    source, changed = open_source(trained), False
    for site in SITES:
        scores = []
        for own in (source, raw(source)):
            cases = masks_by(own, hospitals[0], "test", site)
            counts = trials_of(QUESTION, cases)["0 lesion"]
            scores.append(counts[0] / counts[1])
        measures, _ = read_measures(trained / "sites" / site)
        assert float(measures["dice"].mean()) == pytest.approx(scores[0], abs=1e-6)
        changed = changed or scores[0] != scores[1]
    assert changed
    assert cross(trained, settings_of(hospitals[0], smallest_metric=1))  # which finds the same scores again


@pytest.mark.slow
def test_it_goes_with_the_model(trained: Path, hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    """Masks of medsilo, of nnU-Net's predictor with what postprocessing.json says are equal."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.postprocessing import remove_connected_components as nnunet

    images, model, own, theirs = (tmp_path / name for name in ("images", "model", "own", "theirs"))
    for folder in (images, theirs):
        folder.mkdir()
    for path in hospitals[0].glob("*/images/*-000.nii.gz"):
        (images / path.name.replace(".nii", "_0000.nii")).hardlink_to(path)
    assert main(["predict", str(trained), str(images), "-o", str(own)]) == 0
    assert main(["export", str(trained), "--to", "nnunet", "-o", str(model)]) == 0
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".pkl"]
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), ("all",))
    predictor.predict_from_files_sequential(str(images), str(theirs))
    told = json.loads((model / "postprocessing.json").read_text())
    functions = [getattr(nnunet, name) for name in told["postprocessing_fns"]]
    changed = False
    for path in sorted(theirs.glob("*.nii.gz")):
        mask = np.asanyarray(nibabel.load(path).dataobj)  # type: ignore[attr-defined]
        wanted = nnunet.apply_postprocessing(mask, functions, told["postprocessing_kwargs"])
        changed = changed or not np.array_equal(mask, wanted)
        ours = own / path.name.replace(".nii", "_0000_mask.nii")
        assert np.array_equal(np.asanyarray(nibabel.load(ours).dataobj), wanted)  # type: ignore[attr-defined]
    assert changed
    assert (
        "| only the largest component is kept of | all foreground together |" in (model / "MODEL_CARD.md").read_text()
    )


class Watched(TrainingSite):
    """A site that notes what it answers."""

    def __init__(self, plan: Plan, site: str, folder: Path, settings: SiteSettings) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        super().__init__(Participant(Place(plan, site, SITES, settings, folder / "sites" / site)))

    def answer(self, parcel: Parcel, stop: Stop = lambda: None) -> Parcel:
        reply = super().answer(parcel, stop)
        self.answers[parcel.facts["task"]] = reply.facts
        return reply


def watched(plan: Plan, folder: Path, settings: SiteSettings) -> dict[str, Watched]:
    """Let a study run; returns its sites."""
    sites = {site: Watched(plan, site, folder, settings) for site in SITES}
    Coordinator(plan, SITES, Loop(dict(sites)), Record(folder), "in-process").run()
    return sites


@pytest.mark.slow
def test_the_model_that_was_selected_is_the_one_that_is_tried(hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    """That of the first round here: the second one's steps are too long."""
    plan = study_of(hospitals[1], training=TRAINING | {"learning_rate": 0.5})
    sites = watched(plan, tmp_path, settings_of(hospitals[0], smallest_metric=1))
    assert set(Record(tmp_path).summary().selected.rounds.values()) == {1}
    for site, own in sites.items():
        cases = masks_by(raw(open_source(tmp_path)), hospitals[0], "validation", site)
        assert own.answers["try"]["trials"] == trials_of(QUESTION, cases)


@pytest.mark.slow
def test_a_hospital_chooses_for_its_own_model_at_home(hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    folder, plan = hospitals[0], study_of(hospitals[1], "local")
    sites = watched(plan, tmp_path, settings_of(folder))
    assert not plan.trials and not any("try" in own.answers for own in sites.values())
    assert Record(tmp_path).summary().details.postprocessing is None
    for site in SITES:
        source = open_source(tmp_path, site)
        wanted = chosen(QUESTION, masks_by(raw(source), folder, "validation", site))
        assert source.facts["postprocessing"] == wanted


@pytest.mark.slow
def test_central_training_chooses_on_all_cases(hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    run, folder = tmp_path / "run", hospitals[0]
    inprocess.run(study_of(hospitals[1], "central"), folder=run, settings=settings_of(folder))
    source = open_source(run / "sites" / "pooled")
    cases = [case for site in SITES for case in masks_by(raw(source), folder, "validation", site)]
    assert source.facts["postprocessing"] == chosen(QUESTION, cases)


@pytest.mark.slow
def test_where_nothing_may_be_told_nothing_is_chosen_and_that_is_said(
    hospitals: tuple[Path, Any], tmp_path: Path
) -> None:
    plan = study_of(hospitals[1], training=TRAINING | {"local_steps": 1})
    inprocess.run(plan, folder=tmp_path / "run", settings=settings_of(hospitals[0], smallest_metric=5))
    details = Record(tmp_path / "run").summary().details
    assert details.postprocessing.as_json() == {"all_foreground": False, "structures": [], "sites": []}
    assert details.cautions == ["no hospital may tell enough of its validation cases, so no postprocessing was chosen"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("threads", "rate"), [(None, 0.5), (1, 0.02)], ids=["the model of an earlier round", "a process for each task"]
)
def test_the_simulator_chooses_the_same(
    hospitals: tuple[Path, Any], tmp_path: Path, threads: int | None, rate: float
) -> None:
    plan = study_of(hospitals[1], training=TRAINING | {"learning_rate": rate})
    settings = settings_of(hospitals[0], smallest_metric=1)
    inprocess.run(plan, folder=tmp_path / "loop", settings=settings)
    simulator.run(plan, tmp_path / "simulator", settings, threads=threads)
    assert_same_outcome(tmp_path / "loop", tmp_path / "simulator")
    assert Record(tmp_path / "simulator").summary().details.postprocessing.all_foreground


# ------------------------------------------------------------------------------------------------------ what is told
def tried(trials: dict[str, Any], **others: Any) -> Tried:
    told = {"cases": Counted(train=20, validation=8, test=8), "withheld": [], "warnings": [], "package": {}, **others}
    return Tried(task="try", round=2, study="a", seconds=1.0, memory=0.0, trials=trials, **told)


@pytest.mark.slow
def test_what_is_told_of_the_trials_is_checked(hospitals: tuple[Path, Any]) -> None:
    plan, right = study_of(hospitals[1]), {"0 lesion": [3.5, 8.0], "1 lesion": [3.75, 7.0]}
    check_trials(tried(right), plan)
    check_trials(tried({}, withheld=["validation"]), plan)
    for wrong, why in (
        ({"0 lesion": [3.5, 8.0]}, "lacks 1 lesion"),
        ({**right, "11 lesion": [0.0, 0.0]}, "surplus 11 lesion"),
        ({**right, "0 lesion": [8.5, 8.0]}, "is not one of 8 values from 0 to 1"),
        ({**right, "0 lesion": [-0.5, 8.0]}, "is not one of 8 values"),
        ({**right, "0 lesion": [3.5, 9.0]}, "cover 9 cases, and it has 8"),
        ({**right, "0 lesion": [3.5, 7.5]}, "cover 7.5 cases"),
    ):
        with pytest.raises(Refused, match=why):
            check_trials(tried(wrong), plan)
    with pytest.raises(Refused, match="withholds"):
        check_trials(tried(right, withheld=["validation"]), plan)
    for form in ({"0 lesion": [3.5]}, {"0 lesion": [float("nan"), 8.0]}, {"x" * 201: [0.0, 0.0]}):
        with pytest.raises(Refused):
            Tried.read({**tried({}).model_dump(), "trials": form})
    without = study(hospitals[1], SITES, {"name": "fedavg"})
    with pytest.raises(Refused, match="surplus 0 lesion"):
        check_trials(tried(right), without)


@pytest.mark.slow
def test_of_patients_gains_are_told_in_coarse_steps(hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    plan, patients = study_of(hospitals[1]), 40
    settings = settings_of(hospitals[0], public_data=False, smallest_metric=1)
    own = site_of(plan, "brno", SITES, settings, tmp_path / "sites" / "brno").participant.disclosure
    own.cases["validation"] = patients
    own.resolution["validation"] = Resolution.over([str(patient) for patient in range(patients)], 2, 5)
    plain = torch.full((patients,), 0.6, dtype=torch.float64)
    plain[:5] = torch.nan  # neither there nor found
    for more, told in ((0.012, 0.02), (0.008, 0.0), (-0.025, -0.02), (0.3, 0.1), (torch.nan, 0.1)):
        sums = own.trials({"0 lesion": plain, "1 lesion": plain + more})  # NaN: all that was found is gone
        assert sums == {"0 lesion": [17.5, 35.0], "1 lesion": [pytest.approx((0.5 + told) * 35), 35.0]}
        check_trials(tried(sums, cases=Counted(train=20, validation=40, test=8)), plan)
    few = torch.tensor([0.6, 0.7, *[torch.nan] * (patients - 2)], dtype=torch.float64)
    assert own.trials({"0 lesion": few, "1 lesion": few + 0.05})["1 lesion"][0] == 2.5  # two patients, and no gain
    one = plain.clone()
    one[10] += 0.4
    assert own.trials({"0 lesion": plain, "1 lesion": one})["1 lesion"] == [17.5, 35.0]  # nobody shows


@pytest.mark.slow
def test_a_hospital_reads_what_it_tells_and_the_plan_says_what_is_asked(
    hospitals: tuple[Path, Any], tmp_path: Path
) -> None:
    without, shared, own = (
        study(hospitals[1], SITES, {"name": "fedavg"}, task={"mirror": False}),
        study_of(hospitals[1]),
        study_of(hospitals[1], "local"),
    )
    assert shared.hash != without.hash
    answers = [planned_answers(plan)["validation"] - plan.validations for plan in (without, shared, own)]
    assert answers == [0, 2, 0]
    reports = ["\n".join(describe(plan, {}, settings_of(hospitals[0]))) for plan in (without, shared, own)]
    assert "postprocessing" not in reports[0]
    assert "in 2 trials of postprocessing" in reports[1] and "is chosen here; nothing is told" in reports[2]
    with pytest.raises(PlanError, match="task.postprocessing: fedsm puts several networks together"):
        study_of(hospitals[1], "fedsm")
    for place, plan in (("without", without), ("own", own)):
        site = site_of(plan, "brno", SITES, settings_of(hospitals[0]), tmp_path / place / "sites" / "brno")
        ask = Request(task="try", round=2, study=place, plan=plan.hash, sites=SITES)
        with pytest.raises(Refused, match="no trials of postprocessing"):
            site.answer(ask.parcel({}))
    with pytest.raises(Refused, match="no postprocessing"):
        without.task.with_postprocessing({"all_foreground": True})
    task: Any = shared.task.with_postprocessing({"all_foreground": True})
    for other in (copy.deepcopy(task), task.beside(None, None, Compute())):  # as a process or a device gets it
        assert len(other.postprocessing_in_nnunet["postprocessing_fns"]) == 1


@pytest.mark.slow
def test_so_many_trials_that_they_cannot_be_counted_are_not(hospitals: tuple[Path, Any]) -> None:
    rings = {"background": 0, **{f"ring {n}": list(range(n, 256)) for n in range(1, 255)}, "last": 255}
    question = {"name": QUESTION.name, "channels": ["FLAIR"], "labels": rings, "regions_class_order": [*range(1, 256)]}
    assert not study(hospitals[1], SITES, {"name": "fedavg"}, task={"question": question}).trials
    with pytest.raises(PlanError, match="than 1024 would be tried"):
        study(hospitals[1], SITES, {"name": "fedavg"}, task={"question": question, "postprocessing": True})
