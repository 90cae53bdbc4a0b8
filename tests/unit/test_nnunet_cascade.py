"""nnU-Net's cascade over hospitals: a second study refines what the first one's model finds at each of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

import medsilo
from medsilo.cli import main
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.files import load_tensors, save_tensors
from medsilo.core.tensors import hash_of
from medsilo.deploy.source import open_source
from medsilo.learning.loop import Compute
from medsilo.plan import Plan, load_plan
from medsilo.tasks.sources import DataSource
from medsilo_nnunet.nnunet_folder import NnUNetFolder
from medsilo_nnunet.question import SegmentationQuestion
from tests.brains import HOSPITALS, narrow, plans_of, study, write_brain

pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
pytestmark = pytest.mark.slow

SITES = ("brno", "graz")
QUESTION = SegmentationQuestion(
    name="Dataset012_Halves", channels=("FLAIR",), labels={"background": 0, "left": 1, "right": 2}
)
SECOND = "3d_cascade_fullres"
TRAINING = {"rounds": 1, "batch_size": 4, "local_steps": 20, "learning_rate": 0.05, "momentum": 0.9}
SHORTER = TRAINING | {"batch_size": 2, "local_steps": 6}


def write_halves(folder: Path, name: str, site: str, seed: int) -> None:
    """Write a head whose lesions have another label on its other side."""
    write_brain(folder, name, replace(HOSPITALS[site], spacing=(1.2, 1.0, 1.1)), seed, 34)
    path = folder / "labels" / f"{name}.nii.gz"
    labels: Any = nibabel.load(path)
    values = np.asanyarray(labels.dataobj).copy()
    values[: len(values) // 2][values[: len(values) // 2] > 0] = 2
    nibabel.save(nibabel.Nifti1Image(values, labels.affine), path)


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of two hospitals' volumes, and plans as nnU-Net's planner writes them for larger ones."""
    folder = tmp_path_factory.mktemp("halves")
    for site in SITES:
        for case in range(4):
            write_halves(folder / site, f"{site}-{case}", site, 10 * SITES.index(site) + case)
    plans = narrow(plans_of(folder, SITES, 2000, QUESTION), 6, "3d_fullres")
    own = plans["configurations"]
    lower = {"spacing": [1.4 * along for along in own["3d_fullres"]["spacing"]], "next_stage": SECOND}
    own["3d_lowres"] = own["3d_fullres"] | lower
    own[SECOND] = {"inherits_from": "3d_fullres", "previous_stage": "3d_lowres"}
    return folder, plans


def stage(plans: Any, configuration: str, **more: Any) -> Plan:
    own = {"question": QUESTION.model_dump(mode="json"), "configuration": configuration, "foreground": 1.0, **more}
    return study(plans, SITES, {"name": "fedavg"}, SHORTER if configuration == SECOND else TRAINING, task=own)


@pytest.fixture(scope="module")
def runs(hospitals: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs of both stages."""
    folder, plans = hospitals
    place = tmp_path_factory.mktemp("runs")
    medsilo.run(stage(plans, "3d_lowres"), data=folder, folder=place / "first")
    model = hash_of(load_tensors(place / "first" / "global" / "best.safetensors")[0])
    medsilo.run(stage(plans, SECOND, first_stage=model), data=folder, folder=place / "second")
    return place


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images that nobody trained on, of other spacings; one is turned."""
    folder = tmp_path_factory.mktemp("new")
    for number, site in enumerate(SITES):
        write_brain(folder, f"{site}_0000", replace(HOSPITALS[site], spacing=(1.0, 0.9, 1.3)), 100 + number, 36)
    turned: Any = nibabel.load(folder / "images" / "brno_0000.nii.gz")
    affine = np.array([[0, 0, 1.3, 5], [-1.0, 0, 0, 7], [0, 0.9, 0, -3], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(turned.get_fdata(), affine), folder / "images" / "turned_0000.nii.gz")
    return folder / "images"


def values_in(path: Path) -> np.ndarray:
    image: Any = nibabel.load(path)
    return np.asanyarray(image.dataobj)


def test_medsilo_finds_what_nnunets_two_commands_find(runs: Path, images: Path, tmp_path: Path) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    found: dict[str, Path] = {}
    for name in ("first", "second"):
        model, found[name] = tmp_path / f"{name} model", tmp_path / name
        assert main(["export", str(runs / name), "--to", "nnunet", "-o", str(model)]) == 0
        found[name].mkdir()
        predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
        predictor.initialize_from_trained_model_folder(str(model), ("all",))
        before = None if name == "first" else str(found["first"])
        predictor.predict_from_files_sequential(str(images), str(found[name]), folder_with_segs_from_prev_stage=before)
    assert main(["predict", str(runs / "second"), str(images), "-o", str(tmp_path / "own")]) == 0
    differs = []
    for image in sorted(images.iterdir()):
        name = image.name.removesuffix("_0000.nii.gz")
        mask = values_in(tmp_path / "own" / f"{name}_0000_mask.nii.gz")
        assert np.array_equal(mask, values_in(found["second"] / f"{name}.nii.gz"))
        assert 0 < (mask > 0).mean() < 1
        differs.append(bool((mask != values_in(found["first"] / f"{name}.nii.gz")).any()))
    assert any(differs)  # the second stage says something of its own


def second_of(runs: Path, hospitals: tuple[Path, Any]) -> tuple[NnUNetFolder, DataSource]:
    """Return the second study's task, and a hospital's data as the study gives them to it."""
    task = open_source(runs / "second").plan.task
    assert isinstance(task, NnUNetFolder)
    return task, DataSource(folder=hospitals[0]).beside(runs, Compute())


def test_training_reads_what_nnunets_validation_writes_for_the_next_stage(
    runs: Path, hospitals: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnunetv2.inference.export_prediction import resample_and_save
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetNumpy

    task, source = second_of(runs, hospitals)
    data = task.site_data("graz", SITES, 0, source)
    assert main(["export", str(runs / "first"), "--to", "nnunet", "-o", str(tmp_path / "model")]) == 0
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(tmp_path / "model"), ("all",))
    own = predictor.plans_manager, predictor.configuration_manager, predictor.dataset_json
    held, _ = data.test.at(0)  # type: ignore[attr-defined]
    files, mask = list(map(str, held.entry.images)), str(held.entry.label)
    image, _, notes = own[1].preprocessor_class(verbose=False).run_case(files, mask, *own)
    logits = predictor.predict_sliding_window_return_logits(torch.from_numpy(image)).cpu()
    inputs, _ = data.test[0]
    resample_and_save(
        logits, list(inputs.shape[1:]), str(tmp_path / "case"), own[0], own[1], notes, own[2], 1, nnUNetDatasetNumpy
    )
    wanted = np.load(tmp_path / "case.npz")["seg"]
    assert inputs.shape[0] == 2 and np.array_equal(inputs[1].numpy(), wanted) and (wanted > 0).any()


def test_a_patch_follows_from_its_seed_alone(runs: Path, hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    task, source = second_of(runs, hospitals)
    data = task.site_data("brno", SITES, 0, source)
    image, labels, places = data.train.at(0)[0].kept(0)  # type: ignore[attr-defined]
    image = torch.stack([image[0], labels.clamp(min=0).float()])  # a first stage that finds all of it
    case = (image, labels, places)
    patches = [task.parts.drawn(case, seed, True) for seed in range(16)]
    assert {tuple(one.shape) for one, _ in patches} == {task.shape} and task.shape[0] == 3
    assert all(set(one[1:].unique().tolist()) <= {0.0, 1.0} for one, _ in patches)
    for channel in (1, 2):
        changed = [not torch.equal(one[channel] > 0, target == channel) for one, target in patches]
        assert any(changed) and not all(changed)  # now and then, as nnU-Net does it
    for seed in (15, *range(15)):  # nnU-Net's transforms reorder their channels from patch to patch
        assert all(map(torch.equal, task.parts.drawn(case, seed, True), patches[seed]))
    disk = DataSource(folder=hospitals[0], cache="disk", cache_folder=tmp_path).beside(runs, Compute())
    first = task.site_data("brno", SITES, 0, disk)
    again = task.site_data("brno", SITES, 0, disk.beside(None, Compute()))  # what was found lies on the disk
    wanted = task.drawn(data.train, 2, 8, 5)[3]
    for kept in (first, again):
        assert all(map(torch.equal, task.drawn(kept.train, 2, 8, 5)[3], wanted))


def test_the_first_stages_labels_are_augmented_by_nnunet(runs: Path, hospitals: tuple[Path, Any]) -> None:
    task, source = second_of(runs, hospitals)
    data = task.site_data("brno", SITES, 0, source)
    names = [type(one).__name__ for one in _transforms(task.parts.drawing[1])]
    for wanted in ("ApplyRandomBinaryOperatorTransform", "RemoveRandomConnectedComponentFromOneHotEncodingTransform"):
        assert wanted in names
    piece = task.pieces(data.train, 3)[0][0]
    with torch.no_grad():
        network = open_source(runs / "second").network
        assert task.infer(network, piece[None]).shape[1] == 3  # pieces go through as cases do
        assert task.infer(network, data.train[0][0][None]).shape[1] == 3


def _transforms(transform: Any) -> list[Any]:
    inner = [*getattr(transform, "transforms", ()), getattr(transform, "transform", None)]
    return [transform, *(one for own in inner if own is not None for one in _transforms(own))]


def test_a_hospital_takes_the_plans_model_and_no_other(runs: Path, hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    task, _ = second_of(runs, hospitals)
    model = runs / "first" / "global" / "best.safetensors"
    tensors, _ = load_tensors(model)
    name = next(iter(tensors))
    others = {
        "other": tensors | {name: tensors[name] + 1e-3},
        "nan": tensors | {name: tensors[name] * torch.nan},
        "wide": tensors | {name: tensors[name].repeat(2, *(1,) * (tensors[name].ndim - 1))},
        "more": tensors | {"another": torch.zeros(1)},
        "half": {key: value.half() for key, value in tensors.items()},
    }
    for kind, changed in others.items():
        save_tensors(tmp_path / f"{kind}.safetensors", changed)
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x04K\x01.")
    torch.save(tensors, tmp_path / "huge.safetensors")
    unread = "data.first_stage: it can't be read"
    told = {"other": "the first stage's model .* is not here", "pickle": unread, "huge": unread}
    told["nan"] = "data.first_stage: it has numbers that are NaN"
    for path in sorted(tmp_path.iterdir()):
        source = DataSource(folder=hospitals[0], first_stage=path)
        with pytest.raises(MedsiloError, match="^" + told.get(path.stem, "data.first_stage: it has other tensors")):
            task.site_data("graz", SITES, 0, source)
    with pytest.raises(MedsiloError, match=r"is not here; set data.first_stage"):
        task.site_data("graz", SITES, 0, DataSource(folder=hospitals[0]))
    for given in (model, runs / "first", runs / "first" / "sites" / "graz"):
        task.site_data("graz", SITES, 0, DataSource(folder=hospitals[0], first_stage=given))


@pytest.mark.parametrize(
    ("configuration", "more", "told"),
    [
        (SECOND, {}, "needs the model of a finished 3d_lowres study"),
        ("3d_fullres", {"first_stage": "0" * 64}, "refines nothing"),
        (SECOND, {"first_stage": "0" * 63}, "first_stage"),
    ],
)
def test_what_a_plan_says_of_stages_agrees(
    hospitals: tuple[Path, Any], configuration: str, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        stage(hospitals[1], configuration, **more)


def test_plans_have_all_stages_or_are_refused(hospitals: tuple[Path, Any]) -> None:
    for name in ("3d_lowres", "3d_fullres"):
        plans = json.loads(json.dumps(hospitals[1]))
        del plans["configurations"][name]
        with pytest.raises(PlanError, match=f"needs {name}"):
            stage(plans, SECOND, first_stage="0" * 64)


def test_regions_and_places_that_do_not_count_go_through_both_stages(
    hospitals: tuple[Path, Any], tmp_path: Path
) -> None:
    labels = {"background": 0, "whole": [1, 2], "right": 2, "ignore": 3}
    question = {**QUESTION.model_dump(mode="json"), "labels": labels, "regions_class_order": [1, 2]}
    first = stage(hospitals[1], "3d_lowres", question=question)
    tensors = first.build_networks()["model"].state_dict()
    save_tensors(tmp_path / "best.safetensors", tensors)
    plan = stage(hospitals[1], SECOND, question=question, first_stage=hash_of(tensors))
    task = plan.task
    data = task.site_data("graz", SITES, 0, DataSource(folder=hospitals[0], first_stage=tmp_path))
    inputs, labels_there = data.train[0]
    assert inputs.shape == (2, *labels_there.shape) and set(inputs[1].unique().tolist()) <= {0.0, 1.0, 2.0}
    assert inputs[1].any()  # of weights that learned nothing, somewhere above 1/2
    image, target = task.drawn(data.train, 2, 1, 0)[1]
    assert tuple(image.shape) == task.shape == (3, *target.shape)
    network = plan.build_networks()["model"]
    task.goal.loss(network.train()(image[None]), target[None]).backward()
    with torch.no_grad():
        assert task.infer(network.eval(), inputs[None]).shape == (1, 2, *labels_there.shape)


def test_methods_that_change_intensities_are_refused(hospitals: tuple[Path, Any]) -> None:
    own = {"question": QUESTION.model_dump(mode="json"), "configuration": SECOND, "first_stage": "0" * 64}
    with pytest.raises(PlanError, match="masks of a first stage"):
        study(hospitals[1], SITES, {"name": "fedrdn"}, TRAINING, task=own)


def test_a_plan_takes_the_model_from_a_file_beside_it(runs: Path, hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    wanted = open_source(runs / "second").plan
    values = wanted.resolved()
    values["task"]["first_stage"] = "lowres.safetensors"
    (tmp_path / "plan.yaml").write_text(json.dumps(values))
    with pytest.raises(PlanError, match=r"task.first_stage: lowres.safetensors"):
        load_plan(tmp_path / "plan.yaml")
    (tmp_path / "lowres.safetensors").hardlink_to(runs / "first" / "sites" / "graz" / "best.safetensors")
    assert load_plan(tmp_path / "plan.yaml").hash == wanted.hash


def test_a_second_stage_is_no_bundle_and_says_what_it_lacks(
    runs: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(runs / "second"), "-o", str(tmp_path / "bundle")]) == 1
    assert "holds one network" in capsys.readouterr().err and not (tmp_path / "bundle").exists()
    alone = tmp_path / "alone" / "second"
    (alone / "global").mkdir(parents=True)
    for name in ("plan.yaml", "global/best.safetensors"):
        (alone / name).hardlink_to(runs / "second" / name)
    assert main(["predict", str(alone), str(images), "-o", str(tmp_path / "masks")]) == 1
    assert "is not here; set data.first_stage" in (tmp_path / "masks" / "predictions.csv").read_text()
    (tmp_path / "medsilo.yaml").write_text(f"data: {{folder: {images}, first_stage: {runs / 'first'}}}\n")
    assert main(["predict", str(alone), str(images), "-o", str(tmp_path / "m"), "--settings", str(tmp_path)]) == 0
