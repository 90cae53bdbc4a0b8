"""From an exported bundle, MONAI's runner makes the same predictions as `medsilo predict`, without medsilo."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
import torch

from medsilo.cli import main
from medsilo.tasks.scans import Scan
from tests.conftest import make_plan
from tests.hospital import Volume, photograph, write_pixels, write_volume
from tests.unit.deploy.test_predict import GRIDS, drawn, oblique, write_run
from tests.unit.medsilo_lab.test_bundle import RunBundle, in_monai, make_images, run_bundle

__all__ = ["run_bundle"]
pytestmark = in_monai
VOLUMES = ["task.name=nifti-folder", 'task.labels=["organ","tumour"]', 'task.intensity={"kind":"z-score"}']
SEGMENTS = {
    "volumes resized": ["task.size=[16,16,8]", "network.dimensions=3"],
    "volumes in windows": ["task.size=[16,16,8]", "task.target_spacing=[1.0,1.1,3.0]", "network.dimensions=3"],
    "slices resized": ["task.dimensions=2", "task.size=[16,24]", 'task.intensity={"kind":"percentiles"}'],
    "slices in windows": ["task.dimensions=2", "task.size=[16,16]", "task.target_spacing=[0.9,0.8]"],
}
PHOTOS = ["task.name=image-folder", 'task.labels=["square","disc"]']
PICTURES = ["rgb resized", "rgb cut", "grey resized", "grey cut"]
U_NET = ["network.name=unet", "network.features=[4,8]"]


def before_a_release(slow: list[str], kinds: Iterable[str]) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.slow if kind in slow else pytest.mark.long) for kind in kinds]


def whole(task: list[str], own: list[str], network: list[str]) -> list[str]:
    return [*task, *network, *own]


def export(tmp_path: Path, changes: list[str]) -> tuple[Path, Path]:
    torch.manual_seed(7)
    write_run(tmp_path / "run", make_plan("fedavg", *changes), "global/best.safetensors")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "images"), "-o", str(tmp_path / "ours")]) == 0
    assert main(["release", "export", str(tmp_path / "run"), "-o", str(tmp_path / "bundle")]) == 0
    return tmp_path / "ours", tmp_path / "bundle"


def values_of(folder: Path, name: str) -> np.ndarray:
    return SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(*folder.glob(f"{name}_mask.*"))))


# Each value of a parameter runs in the slow tests, and all pairs of values run before a release.
@pytest.mark.long
@pytest.mark.parametrize("kind", before_a_release(["volumes in windows", "slices resized"], SEGMENTS))
def test_masks_of_volumes_are_the_same_voxel_by_voxel(kind: str, tmp_path: Path, run_bundle: RunBundle) -> None:
    make_images(tmp_path / "images")
    ours, bundle = export(tmp_path, whole(VOLUMES, SEGMENTS[kind], U_NET))
    run_bundle(bundle, tmp_path / "images", tmp_path / "theirs", without_medsilo=True)
    shown = set()
    for number in range(len(GRIDS)):
        first, second = (values_of(folder, f"scan{number}") for folder in (ours, tmp_path / "theirs"))
        assert np.array_equal(first, second)
        shown |= set(np.unique(first))
        one, other = (
            SimpleITK.ReadImage(str(*folder.glob(f"scan{number}_mask.*"))) for folder in (ours, tmp_path / "theirs")
        )
        for name in ("GetSpacing", "GetOrigin", "GetDirection"):
            np.testing.assert_allclose(getattr(one, name)(), getattr(other, name)(), rtol=0, atol=1e-4)
    assert len(shown) > 1
    facts = json.loads((bundle / "configs/metadata.json").read_text())
    assert "medsilo" not in facts["required_packages_version"]
    assert facts["network_data_format"]["outputs"]["pred"]["channel_def"]["2"] == "tumour"


@pytest.mark.long
@pytest.mark.parametrize("kind", before_a_release(["rgb resized", "grey cut"], PICTURES))
def test_masks_of_photographs_are_the_same_pixel_by_pixel(kind: str, tmp_path: Path, run_bundle: RunBundle) -> None:
    """The photographs include opaque alpha channels, grey images of 16 bits, and grey images among colour images."""
    colours, fit = kind.split()
    for number in range(4):
        pixels = photograph(number, (30 + 7 * number, 41 - 5 * number))[0]
        if colours == "grey":
            pixels = pixels[..., 0] if number != 2 else pixels[..., 0].astype(np.uint16) * np.uint16(250)
        elif number == 2:
            pixels = np.concatenate([pixels, np.full_like(pixels[..., :1], 255)], 2)
        elif number == 1:
            pixels = pixels[..., 0]
        write_pixels(tmp_path / f"images/{number}.{'tiff' if number == 3 else 'png'}", pixels)
    own = ["task.size=[16,24]", f"task.resize={str(fit == 'resized').lower()}", f"task.colours={colours}"]
    ours, bundle = export(tmp_path, whole(PHOTOS, own, U_NET))
    run_bundle(bundle, tmp_path / "images", tmp_path / "theirs", without_medsilo=True)
    shown = set()
    for number in range(4):
        first, second = (values_of(folder, str(number)) for folder in (ours, tmp_path / "theirs"))
        assert np.array_equal(first, second)
        shown |= set(np.unique(first))
    assert len(shown) > 1


CLASSES = ['task.labels=["benign","malignant","other"]', "task.kind=classification", "network.name=small-cnn"]
CLASSIFIES = {
    "photographs": ["task.name=image-folder", "task.size=[16,24]", *CLASSES],
    "photographs cut": ["task.name=image-folder", "task.size=[33,16]", "task.resize=false", *CLASSES],
    "volumes": ["task.name=nifti-folder", "task.size=[16,16,8]", *CLASSES, "network.dimensions=3"],
    "volumes cut": [
        *("task.name=nifti-folder", "task.size=[21,16,8]", "task.target_spacing=[1.0,1.1,3.0]"),
        *(*CLASSES, "network.dimensions=3"),
    ],
    "slices": ["task.name=nifti-folder", "task.dimensions=2", "task.size=[16,16]", *CLASSES],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", before_a_release(["photographs cut", "volumes cut", "slices"], CLASSIFIES))
def test_classes_have_the_same_probabilities(kind: str, tmp_path: Path, run_bundle: RunBundle) -> None:
    if kind.startswith("photographs"):
        for number in range(3):
            write_pixels(tmp_path / f"images/{number}.png", photograph(number, (30 + number, 40 - number))[0])
    else:
        make_images(tmp_path / "images")
    ours, bundle = export(tmp_path, CLASSIFIES[kind])
    run_bundle(bundle, tmp_path / "images", tmp_path / "theirs", without_medsilo=False)
    with (tmp_path / "theirs/predictions.csv").open() as file:
        theirs = {Path(line[0]).name: np.array(line[1:], float) for line in csv.reader(file)}
    found = json.loads((ours / "predictions.json").read_text())["cases"]
    assert len(found) == len(theirs) > 2
    for row in found:
        own_probabilities = theirs[row["image"]]
        assert own_probabilities.argmax() == row["label"]
        assert own_probabilities.max() == pytest.approx(row["probability"], abs=2e-6)


@pytest.mark.slow
def test_several_channels_lie_in_folders_of_their_own(tmp_path: Path, run_bundle: RunBundle) -> None:
    """`predict` reads one file with all channels, and MONAI's runner reads one file for each channel."""
    (tmp_path / "images").mkdir()
    for place, channel in enumerate(("t1", "t2")):
        (tmp_path / channel).mkdir()
        for number in range(2):
            volume = Volume(drawn((6, 20 + number, 18), 10 * place + number), oblique((0.9, 0.8, 3.0)))
            write_volume(tmp_path / channel / f"scan{number}.nii.gz", volume)
    for number in range(2):
        images = [SimpleITK.ReadImage(str(tmp_path / channel / f"scan{number}.nii.gz")) for channel in ("t1", "t2")]
        SimpleITK.WriteImage(SimpleITK.Compose(images), str(tmp_path / f"images/scan{number}.nrrd"))
    assert Scan.read(tmp_path / "images/scan0.nrrd").values.shape[0] == 2
    ours, bundle = export(
        tmp_path, whole(VOLUMES, [*SEGMENTS["volumes resized"], 'task.modalities=["t1","t2"]'], U_NET)
    )
    run_bundle(bundle, tmp_path, tmp_path / "theirs", without_medsilo=True)
    for number in range(2):
        assert np.array_equal(values_of(ours, f"scan{number}"), values_of(tmp_path / "theirs", f"scan{number}"))
