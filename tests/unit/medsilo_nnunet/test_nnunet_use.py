"""A model of the task nnunet predicts the same masks in medsilo as in nnU-Net after the model's export.

Studies of the task nnunet may be interrupted, and may use folds of cross-validation.
"""

from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from shutil import copy
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor

import medsilo
from medsilo.cli import main
from medsilo.core.errors import DataError, PlanError, ProcessDied
from medsilo.core.tensors import Tensors
from medsilo.federation.participant import participant_of
from medsilo.federation.site_stack import TrainingSite
from medsilo.federation.trainer import Trainer
from medsilo.learning.compute import Stop
from medsilo.schedule.phase import Phase
from medsilo.site.settings import SiteSettings
from medsilo.tasks.sources import DataSource
from medsilo_lab.deploy.source import Source
from medsilo_lab.engines.inprocess import Loop
from medsilo_lab.study.scores import read_measures
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.nnunet_folder import NnUNetFolder
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.brains import HOSPITALS, QUESTION, narrow, plans_of, study, write_brain, write_hospitals
from tests.sites import site_of

pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
pytestmark = pytest.mark.slow

SITES = ("brno", "graz")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("brains")
    write_hospitals(folder, SITES, 4, width=32)
    return folder, plans_of(folder, SITES, 2000)


@pytest.fixture(scope="module")
def trained(hospitals: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, plans = hospitals
    run = tmp_path_factory.mktemp("run") / "run"
    training = {"rounds": 2, "batch_size": 8, "local_steps": 10, "learning_rate": 0.02, "momentum": 0.9}
    medsilo.run(study(narrow(plans, 16), SITES, {"name": "fedavg"}, training, task={}), data=folder, folder=run)
    return run


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of new images with rotated axes and an empty border, which nnU-Net crops."""
    folder = tmp_path_factory.mktemp("new")
    for number, site in enumerate(SITES):
        write_brain(folder, f"{site}_0000", HOSPITALS[site], 100 + number, 40)
    turned = nibabel.load(folder / "images" / "brno_0000.nii.gz")
    affine = np.array([[0, 0, 3.0, 5], [-1.1, 0, 0, 7], [0, 1.0, 0, -3], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(turned.get_fdata(), affine), folder / "images" / "turned_0000.nii.gz")
    return folder / "images"


def values_in(path: Path) -> tuple[np.ndarray, np.ndarray]:
    image: Any = nibabel.load(path)
    return np.asanyarray(image.dataobj), image.affine


@pytest.mark.long
def test_nnunet_and_medsilo_find_the_same_masks(trained: Path, images: Path, tmp_path: Path) -> None:
    masks_are_nnunets(trained, images, tmp_path)


@pytest.mark.long
def test_so_do_they_in_three_dimensions(images: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    for site in SITES:
        for case in range(4):
            scanner = replace(HOSPITALS[site], spacing=(1.2, 1.0, 1.1))
            write_brain(data / site, f"{site}-{case}", scanner, 10 * SITES.index(site) + case, 44)
    plans = narrow(plans_of(data, SITES, 2000), 8, "3d_fullres")
    training = {"rounds": 2, "batch_size": 2, "local_steps": 6, "learning_rate": 0.02, "momentum": 0.9}
    whole = study(plans, SITES, {"name": "fedavg"}, training, task={"configuration": "3d_fullres"})
    medsilo.run(whole, data=data, folder=run)
    masks_are_nnunets(run, images, tmp_path)


def masks_are_nnunets(trained: Path, images: Path, tmp_path: Path) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    model, own, theirs = tmp_path / "model", tmp_path / "own", tmp_path / "theirs"
    assert main(["release", "export", str(trained), "--to", "nnunet", "-o", str(model)]) == 0
    assert main(["predict", str(trained), str(images), "-o", str(own)]) == 0
    theirs.mkdir()
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), ("all",))
    predictor.predict_from_files_sequential(str(images), str(theirs))
    found = []
    for image in sorted(images.iterdir()):
        name = image.name.removesuffix("_0000.nii.gz")
        mask, place = values_in(own / f"{name}_0000_mask.nii.gz")
        wanted, there = values_in(theirs / f"{name}.nii.gz")
        assert np.array_equal(mask, wanted) and np.allclose(place, there)
        assert np.allclose(place, values_in(image)[1], atol=1e-4)
        found.append(mask.mean())
    assert all(0 < share < 1 for share in found)


def test_the_test_scores_what_nnunet_would_score(trained: Path, hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    from nnunetv2.evaluation.evaluate_predictions import compute_metrics
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO

    folder, run = hospitals[0], Source.open(trained)
    data = run.plan.task.site_data("graz", SITES, 0, DataSource(folder=folder))
    names = list(data.test.patients)
    (tmp_path / "images").mkdir()
    for name in names:
        (tmp_path / "images" / f"{name}.nii.gz").hardlink_to(folder / "graz" / "images" / f"{name}.nii.gz")
    assert main(["predict", str(trained), str(tmp_path / "images"), "-o", str(tmp_path / "masks")]) == 0
    right = {name: str(folder / "graz" / "labels" / f"{name}.nii.gz") for name in names}
    found = [
        compute_metrics(right[name], str(tmp_path / "masks" / f"{name}_mask.nii.gz"), SimpleITKIO(), [1])
        for name in names
    ]
    measures, _ = read_measures(trained / "sites" / "graz")
    assert measures["dice"].tolist() == pytest.approx([one["metrics"][1]["Dice"] for one in found], abs=1e-6)


def test_an_image_of_several_channels_is_put_together(hospitals: tuple[Path, Any]) -> None:
    task = study(hospitals[1], SITES, {"name": "fedavg"}).task
    two = task.model_copy(update={"question": QUESTION.model_copy(update={"channels": ("T1", "FLAIR")})})
    files = [Path("new", name) for name in ("b_0001.nii.gz", "a_0000.nii.gz", "a_0001.nii.gz", "b_0000.nii.gz")]
    assert task.use.images_among(files) == [(file,) for file in files]
    assert two.use.images_among(files) == [(files[3], files[0]), (files[1], files[2])]
    for wrong, told in ((files[1:], "lacks a channel"), ([Path("a.nii.gz")], "case_0000.nii.gz")):
        with pytest.raises(DataError, match=told):
            two.use.images_among(wrong)


def test_a_file_of_two_channels_is_no_image_of_a_study_with_one(hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    task, path = study(hospitals[1], SITES, {"name": "fedavg"}).task, tmp_path / "new_0000.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((8, 8, 4, 2), np.float32), np.eye(4)), path)
    with pytest.raises(DataError, match="2 channels"):
        task.use.scan_of((path,))


def test_the_checkpoint_runs_no_code(trained: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert main(["release", "export", str(trained), "--to", "nnunet", "-o", str(model)]) == 0
    held = torch.load(model / "fold_all" / "checkpoint_final.pth", weights_only=True)
    assert held["init_args"] == {"configuration": "2d"} and held["inference_allowed_mirroring_axes"] == [0, 1]
    assert main(["release", "export", str(trained), "--to", "nnunet", "-o", str(model)]) == 1


def test_each_tensor_travels_once(hospitals: tuple[Path, Any]) -> None:
    model = study(hospitals[1], SITES, {"name": "fedavg"}).build_networks()["model"]
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state) < len(model.network.state_dict())
    other = study(hospitals[1], SITES, {"name": "fedavg"}, seed=1).build_networks()["model"]
    other.load_state_dict(state)
    wanted = model.network.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.network.state_dict().items())
    state.pop(next(iter(state)))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------ the engine


class Watched(Trainer):
    dies_in = 0
    begins: dict[int, Tensors]
    ends: dict[int, tuple[Tensors, float]]

    def _momentum(self) -> Tensors:
        return {name: tensor for name, tensor in self._all().items() if name.startswith("optimizer")}

    def _all(self) -> Tensors:
        found = {
            f"module/{module}/{name}": tensor.clone()
            for module, network in self.state.modules.items()
            for name, tensor in network.state_dict().items()
        }
        for name, optimizer in self.state.optimizers.items():
            for place, kept in optimizer.state_dict()["state"].items():
                found |= {
                    f"optimizer/{name}/{place}/{key}": own.clone() for key, own in kept.items() if own is not None
                }
        return found

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        batches = count()

        def dies() -> None:
            if number == self.dies_in and next(batches) == 1:
                raise ProcessDied("killed")

        self.begins[number] = self._all()
        loss = super().work(number, phase, dies)
        self.ends[number] = self._momentum(), self.state.optimizers["model"].param_groups[0]["lr"]
        return loss


@pytest.mark.long
def test_a_site_that_dies_within_a_round_loses_that_round_alone(
    hospitals: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site whose process dies within a round takes part again in the next round.

    After its process died, a site uses the shared model, the saved momentum, and the next round's learning rate and
    patches.
    """
    patches: dict[str, list[Tensor]] = {}
    draw = NnUNetFolder.draw_batches

    def drawn(task: NnUNetFolder, *given: Any) -> Any:
        own = draw(task, *given)
        patches[running[0]].append(own[0][0])
        return own

    monkeypatch.setattr(NnUNetFolder, "draw_batches", drawn)
    folder, plans = hospitals[0], narrow(hospitals[1])
    training = {"rounds": 4, "batch_size": 2, "local_steps": 3, "momentum": 0.9, "schedule": "poly"}
    agreed = {"sites": list(SITES), "when_missing": "continue", "minimum": 1}
    plan = study(plans, SITES, {"name": "fedavg"}, training, participation=agreed)
    settings = SiteSettings(data=DataSource(folder=folder), min_patients_per_metric=1)
    sites: dict[str, dict[str, TrainingSite]] = {}
    for name, dies_in in (("whole", 0), ("lost", 2)):
        running = [name]
        patches[name] = []
        place = tmp_path / name
        sites[name] = {
            site: site_of(
                plan, site, SITES, settings, place / "sites" / site, kind=partial(participant_of, trainer=Watched)
            )
            for site in SITES
        }
        for site, own in sites[name].items():
            own.participant.trainer.__dict__ |= {"begins": {}, "ends": {}, "dies_in": dies_in if site == "graz" else 0}
        assert Coordinator(plan, SITES, Loop(sites[name]), Record(place), "in-process").run().finished
    rounds = Record(tmp_path / "lost").rounds()
    assert [line.answered for line in rounds] == [list(SITES), ["brno"], list(SITES), list(SITES)]

    watched = {name: {site: own.participant.trainer for site, own in there.items()} for name, there in sites.items()}
    graz, brno = watched["lost"]["graz"], watched["lost"]["brno"]
    begins, (momentum, _), (_, rate) = graz.begins[3], graz.ends[1], graz.ends[3]
    assert momentum and all(torch.equal(begins[name], tensor) for name, tensor in momentum.items())
    model = {name: tensor for name, tensor in begins.items() if name.startswith("module")}
    assert all(torch.equal(tensor, brno.begins[3][name]) for name, tensor in model.items())
    assert any(not torch.equal(tensor, graz.begins[2][name]) for name, tensor in model.items())
    assert rate == pytest.approx(plan.training.learning_rate * (1 - 2 / 4) ** 0.9)
    # Brno and Graz sample different patches in each round. Graz had sampled patches even in the round in which its
    # process died.
    whole, lost = patches["whole"], patches["lost"]
    assert len(whole) == len(lost) == 8 and all(map(torch.equal, whole, lost))


def test_each_patient_is_tested_in_one_fold(hospitals: tuple[Path, Any]) -> None:
    folder, plans = hospitals
    tested: list[str] = []
    for number in (1, 2, 3, 4):
        task = study(plans, SITES, {"name": "fedavg"}, task={"fold": {"number": number, "of": 4}}).task
        data = task.site_data("graz", SITES, 0, DataSource(folder=folder))
        tested += data.test.patients
    assert sorted(tested) == [f"graz-{case:03}" for case in range(4)]


@pytest.mark.long
def test_folds_are_exported_into_one_model_whose_networks_answer_together(
    hospitals: tuple[Path, Any], images: Path, tmp_path: Path
) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    folder, plans = hospitals[0], narrow(hospitals[1], 8)
    model, theirs, training = tmp_path / "model", tmp_path / "theirs", {"rounds": 1, "batch_size": 4, "local_steps": 4}
    folds: list[dict[str, Any]] = [{"number": number, "of": 4} for number in (1, 2)]
    for number, fold in enumerate(folds):
        run = tmp_path / str(number)
        medsilo.run(study(plans, SITES, {"name": "fedavg"}, training, {"fold": fold}), data=folder, folder=run)
        assert main(["release", "export", str(run), "--to", "nnunet", "-o", str(model)]) == 0
        assert main(["release", "export", str(run), "--to", "nnunet", "-o", str(model)]) == 1
    assert sorted(path.name for path in model.glob("fold_*/checkpoint_final.pth")) == ["checkpoint_final.pth"] * 2
    other = study(plans, SITES, {"name": "fedavg"}, training, {"fold": {"number": 3, "of": 4}, "mirror": False})
    medsilo.run(other, data=folder, folder=tmp_path / "other")
    assert main(["release", "export", str(tmp_path / "other"), "--to", "nnunet", "-o", str(model)]) == 1
    assert not (model / "fold_2").exists()

    sources = [Source.open(tmp_path / str(number)) for number in range(2)]
    task = sources[0].plan.task
    image = next(iter(task.use.images_among(sorted(images.iterdir()))))
    for place in (theirs, one := tmp_path / "one"):
        place.mkdir()
    for channel in image:
        copy(channel, one)
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), (0, 1))
    predictor.predict_from_files_sequential(str(one), str(theirs))
    scan = task.use.scan_of(image)
    inputs = task.use.inputs_of(scan)
    with torch.no_grad():
        each = [task.infer(source.network.eval(), inputs) for source in sources]
    wanted = task.use.labels_on(scan, torch.stack(each).mean(0))
    found, _ = values_in(theirs / image[0].name.replace("_0000", ""))
    assert np.array_equal(found.transpose(2, 1, 0), wanted.numpy()) and 0 < found.mean() < 1
    assert all(not torch.equal(own, each[0]) for own in each[1:])


# ------------------------------------------------------------------------------------------------------ the data
def test_a_patient_with_several_cases_is_in_one_part(hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    for patient in range(4):
        for visit in range(2):
            write_brain(tmp_path, f"p{patient}-v{visit}", HOSPITALS["oslo"], 10 * patient + visit, 32)
    source = DataSource(folder=tmp_path, patient=r"^p\d+")
    task = study(hospitals[1], SITES, {"name": "fedavg"}).task
    data = task.site_data("oslo", SITES, 0, source)
    parts = [set(part.patients) for part in (data.train, data.validation, data.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 4
    assert sum(len(part) for part in (data.train, data.validation, data.test)) == 8
    assert RawData.of(tmp_path, QUESTION, source).most_of_a_patient == 2


def test_what_is_wrong_with_a_folder_is_said(hospitals: tuple[Path, Any], tmp_path: Path) -> None:
    task = study(hospitals[1], SITES, {"name": "fedavg"}).task
    for case in range(4):
        write_brain(tmp_path, f"case{case}", HOSPITALS["oslo"], case, 32)
    (tmp_path / "labels" / "case0.nii.gz").unlink()
    wrong: Any = nibabel.load(tmp_path / "labels" / "case1.nii.gz")
    nibabel.save(nibabel.Nifti1Image(np.full(wrong.shape, 7, np.uint8), wrong.affine), wrong.get_filename())
    told = [problem.what for problem in task.survey("oslo", SITES, 0, DataSource(folder=tmp_path)).problems]
    assert any("have no label" in what for what in told) and any("values above 1" in what for what in told)
    with pytest.raises(DataError, match="label_map"):
        task.site_data("oslo", SITES, 0, DataSource(folder=tmp_path, label_map={255: 1}))


def test_privacy_is_refused_when_the_plan_is_read(hospitals: tuple[Path, Any]) -> None:
    with pytest.raises(PlanError, match="one of whole batches"):
        study(hospitals[1], SITES, {"name": "fedavg"}, privacy={"epsilon": 8, "delta": 1e-5})
