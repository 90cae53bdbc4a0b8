"""For overlapping regions, compare the task nnunet with nnU-Net's loss, data loader and label manager."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import nibabel
import numpy as np
import pytest
import torch
from pydantic import ValidationError

import medsilo
from medsilo.core.errors import DataError, PlanError
from medsilo.learning import partial_labels
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import EachSites, SiteSettings
from medsilo.tasks.cache import held_case
from medsilo.tasks.sources import DataSource
from medsilo_nnunet.question import SegmentationQuestion
from medsilo_zoo import condistfl
from tests.brains import QUESTION, narrow, plans_of, write_hospitals
from tests.inprocess import run

LABELS = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3}
TUMOUR = {"name": QUESTION.name, "channels": ["FLAIR"], "labels": LABELS, "regions_class_order": [1, 2, 3]}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"labels": {"background": 0, "lesion": 2}}, "without a gap"),
        ({"labels": {"lesion": 1, "other": 0}}, "background: 0"),
        ({"labels": {"background": 0, "lesion": 1, "ignore": 2}}, "leave such cases out"),
        ({"labels": {"background": 0, "lesion": 1, "other": 1}}, "two labels have the same value"),
        ({"labels": {"background": 0, "lesion": 1}, "regions_class_order": [1]}, "without a region"),
        ({**TUMOUR, "regions_class_order": None}, "one value for each region"),
        ({**TUMOUR, "regions_class_order": [1, 2, 2]}, "without repetition"),
        ({**TUMOUR, "regions_class_order": [1, 3, 2]}, "one of its own values"),
        (
            {**TUMOUR, "labels": {"background": 0, "core": [2, 3], "whole": [1, 2, 3], "enhancing": 3}},
            "after all regions around it",
        ),
    ],
)
def test_a_question_that_nnunet_could_not_answer_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SegmentationQuestion.model_validate({"name": QUESTION.name, "channels": ["FLAIR"], **changes})


def test_what_masks_hold_has_names() -> None:
    question = SegmentationQuestion.model_validate(TUMOUR)
    assert question.has_regions
    assert question.names == ("background", "label 1", "label 2", "enhancing")
    assert question.regions == {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    assert SegmentationQuestion.model_validate(json.loads(question.model_dump_json())) == question


# ------------------------------------------------------------------------------------------------------ in training
@pytest.fixture(scope="module")
def tumours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
    folder = tmp_path_factory.mktemp("tumours")
    write_hospitals(folder, ["brno", "graz"], 4, width=32)
    plans = narrow(plans_of(folder, ["brno", "graz"], 2000))
    for path in folder.glob("*/labels/*.nii.gz"):
        mask: Any = nibabel.load(path)
        values = np.asanyarray(mask.dataobj).copy()
        values[values > 0] = 1 + np.arange((values > 0).sum()) % 3
        nibabel.save(nibabel.Nifti1Image(values, mask.affine), path)
    return folder, plans


def plan_of(plans: dict[str, Any], question: dict[str, Any], method: str = "fedavg", **more: str) -> Plan:
    task = {"name": "nnunet", "question": question, "plans": plans, "mirror": False, **more}
    training = {"rounds": 2, "batch_size": 2, "local_steps": 1}
    sites = {"sites": ["brno", "graz"]}
    return parse_plan({"algorithm": {"name": method}, "task": task, "training": training, "participation": sites})


SEVERAL = {"name": QUESTION.name, "channels": ["FLAIR"]}
SEVERAL["labels"] = {"background": 0, "edema": 1, "core": 2, "enhancing": 3}  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize("question", [TUMOUR, SEVERAL], ids=["regions", "labels"])
def test_the_loss_is_that_of_nnunets_trainer(
    tumours: tuple[Path, Any], question: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    plans = tumours[1]
    plan = plan_of(plans, question)
    settings = plan.task.question.in_nnunet() | {"file_ending": ".nii.gz"}  # type: ignore[attr-defined]
    trainer = nnUNetTrainer(plans | {"continue_training": False}, "2d", 0, settings, torch.device("cpu"))
    labels = trainer.label_manager
    network = plan.build_networks()["model"].train()
    image = torch.randn(2, 1, *trainer.configuration_manager.patch_size)
    target = torch.randint(-1, 4, (2, *image.shape[2:]))
    regions = labels.foreground_regions if labels.has_regions else None
    scales = trainer._get_deep_supervision_scales()
    # nnU-Net applies its last training transforms to each patch after augmentation
    last = trainer.get_validation_transforms(scales, regions=regions)
    each = [last(image=image[0], segmentation=one[None].short())["segmentation"] for one in target]
    wanted = trainer._build_loss()(network(image), [torch.stack(own) for own in zip(*each, strict=True)])
    assert torch.equal(plan.task.goal.loss(network(image), target), wanted)


@pytest.mark.slow
def test_regions_are_learned_found_and_measured(tumours: tuple[Path, Any]) -> None:
    folder, plans = tumours
    plan = plan_of(plans, TUMOUR)
    task: Any = plan.task
    data = task.site_data("brno", plan.participation.sites, 0, DataSource(folder=folder))
    held, place = held_case(data.train, 0)
    _, labels, places = held.kept(place)
    assert places is not None and set(places[:, 0].tolist()) == {1, 2, 3}
    where = tuple(places[places[:, 0] == 2][:, 1:].T.long())
    assert set(labels[where].tolist()) == {2, 3}
    output = torch.full((1, 3, *labels.shape), -9.0)
    output[:, 0], output[:, 1] = 9.0, torch.where(labels == 2, 9.0, -9.0)
    found = task.goal.predicted(output, labels[None].long())
    assert set(found[labels[None] == 2].tolist()) == {2}
    perfect = torch.stack([torch.isin(labels, labels.new_tensor(own)) for own in task.goal.structures.values()])[None]
    assert float(task.goal.case_scores(18.0 * perfect - 9, labels[None].long())) == 1
    run = medsilo.run(plan, data=folder)
    assert run.models["brno"].state_dict()["network.decoder.seg_layers.0.weight"].shape[0] == 3
    measured = (run.summary.sites["brno"].test, run.summary.sites["graz"].test)
    assert all(one is not None for one in measured)


def redraw(folder: Path, to: Path, drawn: int, as_if: int) -> None:
    for path in folder.glob("*/**/*.nii.gz"):
        image: Any = nibabel.load(path)
        values = np.asanyarray(image.dataobj).copy()
        if path.parent.name == "labels":
            values[values == drawn] = as_if if "brno" in path.parts else drawn
        (to / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(values, image.affine), to / path.relative_to(folder))


@pytest.mark.slow
def test_structures_that_a_hospital_did_not_draw_are_left_open_to_nnunet(
    tumours: tuple[Path, Any], tmp_path: Path
) -> None:
    """The hospital Brno did not annotate the core of lesions, so the core is background in Brno's masks."""
    folder, plans = tumours
    redraw(folder, tmp_path, 2, 0)
    plan = plan_of(plans, SEVERAL)
    task: Any = plan.task

    def read(absent: tuple[str, ...], site: str = "brno") -> Any:
        return task.site_data(site, ["brno", "graz"], 0, DataSource(folder=tmp_path, unannotated=absent))

    marked, naive = read(("core",)), read(())
    for one, other in ((task.draw_batches(data.train, 2, 3, 5) for data in (marked, naive)),):
        for number in range(6):
            (image, target), (same, labels) = one[number], other[number]
            assert torch.equal(image, same) and partial_labels.marks_in(target[None]) == [partial_labels.mark_of([2])]
            assert torch.equal(partial_labels.labels_in(target), labels.clamp(min=0))
    # Moving probability from the background to the unannotated core must not change the loss.
    target = torch.stack([one[number][1] for number in range(2)])
    network = plan.build_networks()["model"].train()
    outputs = network(torch.stack([one[number][0] for number in range(2)]))
    assert isinstance(outputs, list) and len(outputs) > 1
    moved = []
    for output in outputs:
        both = output[:, [0, 2]].logsumexp(1) - np.log(2)
        moved.append(torch.stack([both, output[:, 1], both, output[:, 3]], 1))
    loss = task.goal.loss(outputs, target)
    torch.testing.assert_close(task.goal.loss(moved, target), loss)
    torch.testing.assert_close(task.goal.loss(moved[0], target), task.goal.loss(outputs[0], target))
    assert abs(task.goal.loss(moved, labels_of(target)) - task.goal.loss(outputs, labels_of(target))) > 1e-4
    assert task.goal.loss(outputs, target | partial_labels.mark_of([2])).requires_grad
    # The loss equals the loss of a task that has only the three labels that Brno separates.
    told = plan_of(plans, {**SEVERAL, "labels": {"background": 0, "edema": 1, "enhancing": 2}})
    merged = [torch.cat([one[:, [0, 2]].logsumexp(1, keepdim=True), one[:, [1, 3]]], 1) for one in outputs]
    labels = labels_of(target)
    assert torch.equal(loss, told.task.goal.loss(merged, torch.where(labels == 3, 2, labels)))  # type: ignore[arg-type]
    known = {"public_data": True, "min_patients_per_metric": 1, "device": "cpu"}
    sites = {
        site: SiteSettings(**known, data=DataSource(folder=tmp_path, unannotated=absent))
        for site, absent in (("brno", ("core",)), ("graz", ()))
    }
    found = run(plan, settings=EachSites(**known, sites=sites)).summary.sites
    assert found["brno"].absent == ["core"] and found["graz"].absent == []
    assert found["brno"].figures["dice_core"] is None and found["graz"].figures["dice_core"] is not None
    assert found["brno"].figures["dice_edema"] is not None
    with mock.patch.object(condistfl, "distilled", wraps=condistfl.distilled) as distilled:
        run(plan_of(plans, SEVERAL, "condistfl"), settings=EachSites(**known, sites=sites))
    sizes = {tuple(one.shape[2:]) for call in distilled.call_args_list for one in call.args[:2]}
    assert sizes == {tuple(outputs[0].shape[2:])} and outputs[0].shape > outputs[1].shape
    for absent, words in (
        (("FLAIR",), "'FLAIR' can't be absent; .*core.* can"),
        (tuple(task.may_be_absent), "names all"),
    ):
        with pytest.raises(DataError, match=words):
            task.absent(DataSource(folder=tmp_path, unannotated=absent))
    with pytest.raises(DataError, match="masks show a structure that data.unannotated names"):
        read(("core",), "graz")


@pytest.mark.slow
def test_regions_that_a_hospital_did_not_draw_are_left_out(tumours: tuple[Path, Any], tmp_path: Path) -> None:
    """The hospital Brno did not annotate the enhancing region, so Brno's loss and scores leave out this region."""
    folder, plans = tumours
    redraw(folder, tmp_path, 3, 2)
    plan = plan_of(plans, TUMOUR)
    task: Any = plan.task

    def read(*absent: str, site: str = "brno") -> Any:
        return task.site_data(site, ["brno", "graz"], 0, DataSource(folder=tmp_path, unannotated=absent))

    drawn = task.draw_batches(read("enhancing").train, 2, 2, 5)
    images, target = (torch.stack([drawn[number][part] for number in range(2)]) for part in (0, 1))
    assert partial_labels.marks_in(target) == [partial_labels.mark_of([3])] * 2
    outputs = plan.build_networks()["model"].train()(images)
    loss = task.goal.loss(outputs, target)
    # the loss equals the loss of a task that has only the two regions that Brno annotated
    two = {"background": 0, "whole": [1, 2], "core": 2}
    told: Any = plan_of(plans, {**TUMOUR, "labels": two, "regions_class_order": [1, 2]}).task
    labels = labels_of(target)
    assert torch.equal(loss, told.goal.loss([one[:, :2] for one in outputs], labels))
    assert torch.equal(task.goal.loss(outputs[0], target), told.goal.loss(outputs[0][:, :2], labels))
    mixed = torch.stack([target[0], labels[1]])
    apart = [task.goal.loss([out[n : n + 1] for out in outputs], mixed[n : n + 1]) for n in range(2)]
    torch.testing.assert_close(task.goal.loss(outputs, mixed), (apart[0] + apart[1]) / 2)
    assert task.goal.judged(mixed).tolist() == [[True, True, False], [True, True, True]]
    known = {"public_data": True, "min_patients_per_metric": 1, "device": "cpu"}
    sites = {
        site: SiteSettings(**known, data=DataSource(folder=tmp_path, unannotated=absent))
        for site, absent in (("brno", ("enhancing",)), ("graz", ()))
    }
    found = run(plan, settings=EachSites(**known, sites=sites)).summary.sites
    assert found["brno"].absent == ["enhancing"] and found["brno"].figures["dice_enhancing"] is None
    assert None not in (found["brno"].figures["dice_core"], found["graz"].figures["dice_enhancing"])
    with pytest.raises(DataError, match="masks show a structure that data.unannotated names"):
        read("whole")
    with pytest.raises(DataError, match="masks show a structure that data.unannotated names"):
        read("enhancing", site="graz")
    with pytest.raises(PlanError, match="structures that do not overlap"):
        plan_of(plans, TUMOUR, "condistfl")


def labels_of(target: torch.Tensor) -> torch.Tensor:
    return partial_labels.labels_in(target)


@pytest.mark.slow
def test_an_ensemble_of_regions_is_refused(tumours: tuple[Path, Any]) -> None:
    with pytest.raises(PlanError, match="regions that overlap"):
        plan_of(tumours[1], TUMOUR, "fedsm-ensemble")


def test_a_cascade_is_refused(tumours: tuple[Path, Any]) -> None:
    with pytest.raises(PlanError, match="configuration"):
        plan_of(tumours[1], TUMOUR, configuration="3d_cascade_fullres")
