"""Predicted masks have the grid of their image, and equal the network's directly computed output.

A fault in one image does not change the predictions for other images.
"""

import csv
import json
import os
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK
import torch
from torch.nn import functional

from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import save_tensors, write_text
from medsilo.deploy.supermodel import Origin, SuperModel, assemble
from medsilo.models.architectures import SmallCnn
from medsilo.tasks.scans import Scan
from medsilo_lab.deploy.image_files import masks_for, write_mask
from medsilo_lab.deploy.predict import predict
from medsilo_lab.deploy.source import Source
from tests.conftest import make_plan
from tests.hospital import Volume, write_volume
from tests.unit.core.test_files import files_of_at_most

SITES = ["hospital-a", "hospital-b", "hospital-c"]
SMALL = ("task.name=synthetic-prostate", "task.size=32", "training.rounds=1")
SECRET = "patient-jane-doe"


def small_plan(method="fedavg", *changes):
    return make_plan(method, *SMALL, "network.name=unet", "network.features=[4,8]", *changes)


def make_super_model() -> SuperModel:
    plan, section = small_plan(), SmallCnn(width=2, norm="group")
    torch.manual_seed(4)

    def expert():
        return plan.network.build(1, 2).state_dict()

    chooser = section.build(1, 3).state_dict()
    *_, head = [name for name in chooser if name.endswith("weight")]
    chooser[head] *= 30
    personal = {site: expert() for site in SITES[:2]}
    return assemble(Origin(plan, section), expert(), personal, chooser, 0.5, sites=SITES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "supermodel"
    make_super_model().save(folder)
    return folder


def oblique(spacing, tilt=17.0, turn=8.0) -> np.ndarray:
    """Return an affine matrix [4, 4] in LPS coordinates, with rotations about two axes and a shifted origin."""
    a, b = np.deg2rad([tilt, turn])
    about_x = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    about_z = np.array([[np.cos(b), -np.sin(b), 0], [np.sin(b), np.cos(b), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = about_x @ about_z * np.array(spacing)
    affine[:3, 3] = (-15.3, 12.7, 230.1)
    return affine


def drawn(shape, seed=0) -> np.ndarray:
    random = np.random.default_rng(seed)
    steps = np.linspace(-2, 2, shape[0])[:, None, None]
    return (random.normal(size=shape) * (0.3 + abs(steps)) + steps).astype(np.float32)


GRIDS = [
    ((6, 32, 32), (0.6, 0.6, 3.0), "LPS"),
    ((5, 32, 32), (0.5, 0.7, 3.3), "RAS"),
    ((19, 37, 41), (0.5, 0.8, 3.3), "PIR"),
    ((7, 25, 61), (0.7, 0.45, 2.5), "ASL"),
    ((1, 33, 29), (0.6, 0.6, 3.0), "SRA"),
]


@pytest.mark.parametrize(("shape", "spacing", "stored_as"), GRIDS)
def test_the_mask_is_the_models_and_lies_where_the_image_lies(shape, spacing, stored_as, folder, tmp_path) -> None:
    values = drawn(shape)
    write_volume(tmp_path / "scan.nii.gz", Volume(values, oblique(spacing)), stored_as)
    assert main(["predict", str(folder), str(tmp_path / "scan.nii.gz"), "-o", str(tmp_path / "out")]) == 0

    image = SimpleITK.ReadImage(str(tmp_path / "scan.nii.gz"))
    mask = SimpleITK.ReadImage(str(tmp_path / "out" / "scan_mask.nii.gz"))
    assert mask.GetSize() == image.GetSize()
    for name in ("GetSpacing", "GetOrigin", "GetDirection"):
        np.testing.assert_allclose(getattr(mask, name)(), getattr(image, name)(), rtol=0, atol=1e-5)

    model = SuperModel.load(folder)
    cases = torch.from_numpy(values)[:, None]
    if shape[1:] != (32, 32):
        cases = functional.interpolate(cases, (32, 32), mode="bilinear")
    with torch.no_grad():
        output, (names, confidence) = model(cases), model.choose(cases)
    if shape[1:] != (32, 32):
        output = functional.interpolate(output, shape[1:], mode="bilinear")
    expected = output.argmax(1).numpy()
    assert 0.02 < expected.mean() < 0.98
    found = Scan.of_mask(tmp_path / "out" / "scan_mask.nii.gz").values[0]
    assert np.array_equal(found, expected)

    (row,) = json.loads((tmp_path / "out" / "predictions.json").read_text())["cases"]
    assert row["experts"] == {name: names.count(name) for name in set(names)}
    assert row["expert"] == max(sorted(set(names)), key=names.count)
    assert row["confidence"] == pytest.approx(float(confidence.mean()), abs=1e-6)
    assert row["volume_ml_1"] == pytest.approx(expected.sum() * np.prod(spacing) / 1000, rel=1e-5)
    (line,) = csv.DictReader((tmp_path / "out" / "predictions.csv").open())
    assert line["mask"] == "scan_mask.nii.gz"
    assert float(line["volume_ml_1"]) == row["volume_ml_1"]


@pytest.mark.parametrize("suffix", [".mha", ".nrrd", ".nii"])
def test_other_formats_give_the_same_mask(suffix, folder, tmp_path) -> None:
    write_volume(tmp_path / "scan.nii.gz", Volume(drawn((6, 37, 41)), oblique((0.5, 0.7, 3.0))), "PIR")
    image = SimpleITK.ReadImage(str(tmp_path / "scan.nii.gz"))
    SimpleITK.WriteImage(image, str(tmp_path / f"same{suffix}"))
    assert main(["predict", str(folder), *map(str, tmp_path.glob("s*.*")), "-o", str(tmp_path / "out")]) == 0
    masks = [SimpleITK.ReadImage(str(tmp_path / "out" / name)) for name in ("scan_mask.nii.gz", f"same_mask{suffix}")]
    assert np.array_equal(*map(SimpleITK.GetArrayFromImage, masks))
    np.testing.assert_allclose(masks[1].GetDirection(), image.GetDirection(), atol=1e-6)


def write_series(folder: Path, values: np.ndarray, without: int | None = None) -> None:
    folder.mkdir()
    for number, pixels in enumerate(values):
        if number == without:
            continue
        image = SimpleITK.GetImageFromArray((pixels * 100).astype(np.int16)[None])
        image.SetSpacing((0.5, 0.7, 3.0))
        image.SetMetaData("0020|000e", "1.2.3.4")
        image.SetMetaData("0020|0032", f"-10\\20\\{3.0 * number}")
        image.SetMetaData("0020|0037", "1\\0\\0\\0\\1\\0")
        image.SetMetaData("0020|0013", str(number))
        image.SetMetaData("0008|0060", "MR")
        writer = SimpleITK.ImageFileWriter()
        writer.KeepOriginalImageUIDOn()
        writer.SetFileName(str(folder / f"{number}.dcm"))
        writer.Execute(image)


def test_a_dicom_series_is_one_case_and_a_gap_in_it_is_refused(folder, tmp_path) -> None:
    write_series(tmp_path / "series", drawn((5, 37, 41)))
    write_series(tmp_path / "gap", drawn((5, 37, 41)), without=2)
    cases = ["predict", str(folder), str(tmp_path / "series"), str(tmp_path / "gap"), "-o", str(tmp_path / "out")]
    assert main(cases) == 1
    whole, gap = json.loads((tmp_path / "out" / "predictions.json").read_text())["cases"]
    assert "3 to 6 mm apart" in gap["error"]
    mask = SimpleITK.ReadImage(str(tmp_path / "out" / whole["mask"]))
    assert mask.GetSize() == (41, 37, 5)
    np.testing.assert_allclose(mask.GetSpacing(), (0.5, 0.7, 3.0), atol=1e-6)
    np.testing.assert_allclose(mask.GetOrigin(), (-10, 20, 0), atol=1e-6)


def test_bad_files_stop_no_other_and_no_name_reaches_the_screen(folder, tmp_path, capfd) -> None:
    images = tmp_path / "images"
    images.mkdir()
    good = Volume(drawn((6, 32, 32)), oblique((0.6, 0.6, 3.0)))
    for name in ("1", "7"):
        write_volume(images / f"{SECRET}-{name}.nii", good)
    whole = (images / f"{SECRET}-1.nii").read_bytes()
    (images / f"{SECRET}-2.nii").write_bytes(whole[: len(whole) // 2])
    (images / f"{SECRET}-3.nii.gz").write_text("no image")
    (images / f"{SECRET}-4.txt").write_text("a letter")
    colours = SimpleITK.GetImageFromArray(np.zeros((4, 32, 32, 3), np.float32), isVector=True)
    SimpleITK.WriteImage(colours, str(images / f"{SECRET}-5.mha"))
    holes = Volume(np.where(good.values > 3, np.nan, good.values).astype(np.float32), good.affine)
    write_volume(images / f"{SECRET}-6.nii", holes)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(np.zeros((32, 32), np.uint8)), str(images / f"{SECRET}-8.png"))
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(holes.values), str(images / f"{SECRET}-9.mha"))

    assert main(["predict", str(folder), str(images), "-o", str(tmp_path / "out")]) == 1
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    errors = [row["error"] for row in rows]
    assert [bool(error) for error in errors] == [False, True, True, True, True, False, True, True]
    assert all("damaged or no image" in error for error in errors[1:3])
    assert "3 channels, but the task reads 1" in errors[3]
    assert "NaN or infinite" in errors[4] and "NaN or infinite" in errors[7]
    assert "the image is flat" in errors[6]
    masks = sorted(path.name for path in (tmp_path / "out").glob("*mask*"))
    assert masks == [f"{SECRET}-1_mask.nii", f"{SECRET}-7_mask.nii"]
    first, last = (nibabel.load(tmp_path / "out" / name).get_fdata() for name in masks)
    assert np.array_equal(first, last)
    screen = capfd.readouterr()
    assert "left out: 1 files" in screen.out
    assert "4/8  FAILED: the image has 3 channels" in screen.out
    assert "6 of the images failed" in screen.err
    assert SECRET not in screen.out + screen.err


def test_a_broken_image_is_refused_in_training_too(tmp_path) -> None:
    """SimpleITK itself would silently read the missing voxels of a truncated image as zeros."""
    for name in ("cut.nii", "cut.nii.gz"):
        write_volume(tmp_path / name, Volume(drawn((6, 32, 32)), np.eye(4)))
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
        assert SimpleITK.ReadImage(str(tmp_path / name)).GetSize() == (32, 32, 6)
        with pytest.raises(DataError):
            Scan.read(tmp_path / name)
    write_volume(tmp_path / "holes.nii", Volume(np.full((6, 32, 32), np.nan, np.float32), np.eye(4)))
    with pytest.raises(DataError, match="6144 values that are NaN"):
        Scan.read(tmp_path / "holes.nii")


# ---------------------------------------------------------------------------------------------------- single models
def write_run(folder: Path, plan, file: str):
    torch.manual_seed(8)
    network = plan.algorithm.whole(plan.build_networks())
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_tensors(folder / file, network.state_dict(), {"plan_hash": plan.hash})
    write_text(folder / "plan.yaml", plan.to_yaml())
    return network.eval()


@pytest.mark.parametrize(
    ("method", "file", "options"),
    [
        ("fedavg", "global/best.safetensors", []),
        ("fedbn", "sites/hospital-b/best.safetensors", ["--site", "hospital-b"]),
        ("harmofl", "global/best.safetensors", []),
        ("fedbn", "best.safetensors", []),
    ],
)
def test_every_methods_model_predicts(method, file, options, tmp_path) -> None:
    network = write_run(tmp_path / "run", small_plan(method), file)
    values = drawn((6, 32, 32))
    write_volume(tmp_path / "scan.nii", Volume(values, oblique((0.6, 0.6, 3.0))), "PIR")
    out = tmp_path / "out"
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "scan.nii"), "-o", str(out), *options]) == 0
    with torch.no_grad():
        expected = network(torch.from_numpy(values)[:, None]).argmax(1)
    assert np.array_equal(Scan.of_mask(out / "scan_mask.nii").values[0], expected)
    (row,) = json.loads((out / "predictions.json").read_text())["cases"]
    assert (row["expert"], row["confidence"]) == ("model", None)


def test_a_models_test_score_stands_beside_what_it_predicts(tmp_path, capsys) -> None:
    """The command prints the model's test score, because masks of a poor model look like any other masks."""
    write_run(tmp_path / "run", small_plan("fedbn"), "sites/hospital-b/best.safetensors")
    site = {"test": {"dice": 0.152, "loss": 1.0, "cases": 9}}
    summary = {"status": "finished", "method": "fedbn", "title": "FedBN", "metric": "dice", "pooled_test": 0.31}
    summary |= {"schema": 1, "rounds": {"planned": 1, "done": 1}, "sites": {"hospital-b": site}}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    write_volume(tmp_path / "scan.nii", Volume(drawn((6, 32, 32)), oblique((0.6, 0.6, 3.0))), "PIR")
    asked = ["predict", str(tmp_path / "run"), str(tmp_path / "scan.nii"), "-o", str(tmp_path / "out")]
    assert main([*asked, "--site", "hospital-b"]) == 0
    assert "test score: 0.15 (dice)" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["scan_mask.nii", "predictions.csv"])
def test_masks_that_are_there_stay(there: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """`medsilo predict` never overwrites existing masks, because experts' masks often have the same names."""
    write_run(tmp_path / "run", small_plan("fedavg"), "global/best.safetensors")
    write_volume(tmp_path / "scan.nii", Volume(drawn((6, 32, 32)), oblique((0.6, 0.6, 3.0))), "PIR")
    out = tmp_path / "masks"
    out.mkdir()
    (out / there).write_text("drawn by hand")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "scan.nii"), "-o", str(out)]) == 1
    assert "-o" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(there, "drawn by hand")]


def test_a_flat_image_goes_through_the_tasks_own_preprocessing(tmp_path) -> None:
    plan = make_plan("fedavg", "task.name=nuclei", "task.size=32", "network.name=unet", "network.features=[4,8]")
    network = write_run(tmp_path / "run", plan, "global/best.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, (41, 50, 3), np.uint8)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(pixels, isVector=True), str(tmp_path / "tile.png"))
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "tile.png"), "-o", str(tmp_path / "out")]) == 0
    cases = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    cases = functional.interpolate(cases, (32, 32), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = functional.interpolate(network(cases), (41, 50), mode="bilinear").argmax(1)[0].numpy()
    mask = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(tmp_path / "out" / "tile_mask.png")))
    assert np.array_equal(mask, expected)
    (row,) = json.loads((tmp_path / "out" / "predictions.json").read_text())["cases"]
    assert row["pixels_1"] == expected.sum()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}", "nowhere.nii"], "does not exist"),
        (["{folder}", "{tmp}/pipe.nii"], "is not a file"),
        (["{tmp}", "{tmp}"], "no super model and no run"),
        (["{tmp}/run", "{tmp}"], "choose a hospital with --site: hospital-b"),
        (["{tmp}/run", "{tmp}", "--site", "../x"], "no model of that hospital"),
        (["{folder}", "{tmp}", "--device", "tpu"], "not known"),
        (["{folder}", "{tmp}/empty"], "no images; give"),
        (["{folder}", "{tmp}/out/a.nii"], "the images are in the output folder"),
    ],
)
def test_what_can_not_begin_says_why(arguments, words, folder, tmp_path, capsys) -> None:
    write_run(tmp_path / "run", small_plan("fedbn"), "sites/hospital-b/best.safetensors")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.nii")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.nii").touch()
    filled = [argument.format(folder=folder, tmp=tmp_path) for argument in arguments]
    assert main(["predict", *filled, "-o", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_a_model_of_another_plan_is_refused(tmp_path) -> None:
    write_run(tmp_path, small_plan(), "global/best.safetensors")
    write_text(tmp_path / "plan.yaml", small_plan("fedavg", "task.size=64").to_yaml())
    with pytest.raises(MedsiloError, match="the plan.yaml beside it"):
        Source.open(tmp_path)


def test_a_task_without_images_is_refused_before_anything_is_read(tmp_path, capsys) -> None:
    write_run(tmp_path / "run", make_plan(), "global/best.safetensors")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path), "-o", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "synthetic-activity reads no files" in told


def test_images_of_one_name_get_their_folders_name() -> None:
    paths = [Path("a/scan.nii.gz"), Path("b/scan.nii.gz"), Path("b/other.nii")]
    assert [mask for _, mask in masks_for(paths)] == ["a_scan_mask.nii.gz", "b_scan_mask.nii.gz", "other_mask.nii"]
    with pytest.raises(MedsiloError, match="the same mask"):
        masks_for([Path("a/scan.nii"), Path("a/scan.nii")])


def test_a_row_says_which_of_two_images_of_one_name_it_is_about(folder: Path, tmp_path: Path) -> None:
    for name in ("a/scan", "b/scan", "b/other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_volume(tmp_path / f"{name}.nii.gz", Volume(drawn((1, 32, 32)), oblique((1, 1, 1))))
    given = [str(tmp_path / name) for name in ("a", "b")]
    assert main(["predict", str(folder), *given, "-o", str(tmp_path / "out")]) == 0
    rows = csv.DictReader((tmp_path / "out" / "predictions.csv").open())
    assert [row["image"] for row in rows] == ["a/scan.nii.gz", "other.nii.gz", "b/scan.nii.gz"]


class Classifier(torch.nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :2] * 3


def test_a_classification_gives_label_and_probability(tmp_path) -> None:
    plan = make_plan("fedavg", "task.name=nuclei", "task.size=32")
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[0, 1] = 255
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(pixels, isVector=True), str(tmp_path / "tile.png"))
    found = predict(Source(Classifier(), plan, {}), Scan.read(tmp_path / "tile.png"), torch.device("cpu"))
    assert found.labels is None
    assert found.result["label"] == 1
    assert found.result["probability"] == pytest.approx(1 / (1 + np.exp(-3)), abs=1e-6)


@pytest.mark.parametrize("name", ["mask.nii.gz", "mask.mha", "mask.nrrd"])
def test_a_mask_that_does_not_fit_on_the_disk_is_not_written(name: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 3, (20, 30, 40))
    write_volume(tmp_path / "image.nii.gz", Volume(values.astype(np.float32), np.eye(4)))
    scan = Scan.read(tmp_path / "image.nii.gz")
    with pytest.raises(MedsiloError, match="disk full"), files_of_at_most(3000):
        write_mask(scan, values, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["image.nii.gz"]
    write_mask(scan, values, tmp_path / name)
    assert np.array_equal(SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(tmp_path / name))), values)
