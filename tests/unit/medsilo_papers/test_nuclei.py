"""Test the nuclei task with synthetic and real tiles: reading tiles, splitting patients who occur at several sites,
rejecting faulty data.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
import torch

from medsilo.core.errors import DataError
from medsilo.plan import load_plan
from medsilo.site.settings import SiteSettings
from medsilo_papers.nuclei import Nuclei, part_of, patient_of
from tests import inprocess

ROOT = Path(__file__).resolve().parents[3]
REAL = Path(os.environ.get("MEDSILO_DATA", ROOT.parent / "shared" / "data")) / "nuclei_he"
SETS = ["monusac2020", "monuseg2018", "tnbc"]
PARTS = ("train", "validation", "test")
SHARED = "TCGA-G9-6356"

needs_data = pytest.mark.skipif(
    not REAL.is_dir(), reason="the nuclei tiles are absent: set MEDSILO_DATA to their parent folder"
)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = SimpleITK.GetImageFromArray(pixels, isVector=pixels.ndim == 3)
    SimpleITK.WriteImage(image, str(path))


def draw(folder: Path, sets: list[str] = SETS, images: int = 12, size: int = 32) -> Path:
    random = np.random.default_rng(0)
    for position, chosen in enumerate(sets):
        for image in range(images):
            patient = SHARED if image == 0 and chosen != "tnbc" else f"TCGA-{position:02}-{image:04}"
            stem = f"{1000 + image}" if chosen == "tnbc" else f"{patient}-01Z-00-DX1"
            for tile in range(2):
                mask = np.zeros((size, size), np.uint8)
                down, across = random.integers(4, size - 12, 2)
                mask[down : down + 8, across : across + 8] = 255
                noise = random.integers(0, 60, (size, size, 3))
                pixels = (noise + 40 * position + (mask[..., None] // 2)).astype(np.uint8)
                save(folder / chosen / "images" / f"{stem}_{tile}.png", pixels)
                save(folder / chosen / "masks" / f"{stem}_{tile}.png", mask)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("nuclei"))


def test_tiles_become_rgb_in_0_to_1_and_masks_of_two_classes(folder: Path) -> None:
    data = Nuclei(size=32).load("tnbc", SETS, 0, folder)
    assert data.train.inputs.shape[1:] == (3, 32, 32) == Nuclei(size=32).shape
    for part in PARTS:
        cases = getattr(data, part)
        assert cases.inputs.min() >= 0 and cases.inputs.max() <= 1
        assert set(cases.targets.unique().tolist()) == {0, 1}
        inside = cases.inputs.mean(1)[cases.targets == 1].mean()
        assert inside > cases.inputs.mean(1)[cases.targets == 0].mean() + 0.2
        assert (cases.targets.sum((1, 2)) == 64).all()
    first = Path(folder / "tnbc" / "images" / f"{data.train.patients[0]}_0.png")
    pixels = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(first)))
    assert torch.equal(data.train.inputs[0], torch.from_numpy(pixels.transpose(2, 0, 1) / np.float32(255)).float())


def test_tiles_are_resized_to_one_size(folder: Path) -> None:
    small = Nuclei(size=16).load("tnbc", SETS, 0, folder).test
    assert small.inputs.shape[1:] == (3, 16, 16)
    # a pixel belongs to a nucleus if the nucleus covers more than half of the pixel's area
    areas = small.targets.sum((1, 2))
    assert ((areas >= 9) & (areas <= 16)).all()


def test_each_site_takes_the_set_of_its_name_and_all_take_the_only_one(folder: Path, tmp_path: Path) -> None:
    task = Nuclei(size=32)
    means = [task.load(site, SETS, 0, folder).train.inputs.mean() for site in SETS]
    assert means[0] < means[1] - 0.1 < means[2] - 0.2
    with pytest.raises(DataError, match="with the site's name"):
        task.load("hospital-a", SETS, 0, folder)
    alone = draw(tmp_path, ["tnbc"])
    assert len(task.load("hospital-a", ["hospital-a"], 0, alone).train)


def test_no_patient_is_in_two_parts_of_any_site_and_the_seed_changes_nothing(folder: Path) -> None:
    assert_no_leak(folder, Nuclei(size=32))


def assert_no_leak(folder: Path, task: Nuclei) -> None:
    where: dict[str, set[str]] = {}
    for site in SETS:
        data, again = (task.load(site, SETS, seed, folder) for seed in (0, 1))
        for part in PARTS:
            assert getattr(data, part).patients == getattr(again, part).patients
            for patient in getattr(data, part).patients:
                where.setdefault(patient, set()).add(part)
    assert all(len(parts) == 1 for parts in where.values())
    assert SHARED in where


def test_patients_and_source_images_are_told_by_the_names() -> None:
    tiles = [Path(f"images/{name}.png") for name in ("TCGA-G9-6356-01Z-00-DX1_0", "TCGA-G9-6356-01Z-00-DX1_4_1")]
    assert patient_of(tiles[0]) == patient_of(tiles[1]) == SHARED
    tiles = [Path(f"images/{name}.png") for name in ("1001_0", "1001_1")]
    assert patient_of(tiles[0]) == patient_of(tiles[1]) == "1001"
    assert part_of(tiles[0]) == part_of(tiles[1])


SPOILT = {
    "png": "damaged",
    "shape": "pixels",
    "mask": "a mask is absent",
    "absent": "expected tiles",
    "few": "leave a part empty",
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_unusable_data_are_refused_without_names_of_files(spoil: str, tmp_path: Path) -> None:
    folder = draw(tmp_path, ["tnbc"], images=3 if spoil == "few" else 8)
    tile = folder / "tnbc" / "images" / "1001_0.png"
    if spoil == "png":
        tile.write_bytes(b"no picture")
    elif spoil == "shape":
        save(tile, np.zeros((30, 32, 3), np.uint8))
    elif spoil == "mask":
        (folder / "tnbc" / "masks" / "1001_0.png").unlink()
    elif spoil == "absent":
        (folder / "tnbc" / "images").rename(folder / "tnbc" / "pictures")
    with pytest.raises(DataError, match=SPOILT[spoil]) as caught:
        Nuclei(size=32).load("tnbc", SETS, 0, folder)
    assert "1001" not in str(caught.value) and str(tmp_path) not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_harmofl_runs_on_drawn_tiles(folder: Path, tmp_path: Path) -> None:
    changes = ["task.size=32", "training.rounds=2", "network.features=[4, 8]"]
    plan = load_plan(ROOT / "jobs/harmofl/plans/nuclei-small.yaml", changes)
    settings = SiteSettings(device="cpu", data=folder, public_data=True, min_patients_per_metric=1)
    run = inprocess.run(plan, folder=tmp_path / "run", settings=settings)
    assert run.summary.status == "finished"
    assert not list(
        (tmp_path / "run").glob("sites/*/pictures")
    )  # this hospital has not allowed the use of its images for pictures
    allowed = settings.model_copy(update={"pictures": True})
    inprocess.run(plan, folder=tmp_path / "allowed", settings=allowed)
    assert len(list((tmp_path / "allowed").glob("sites/*/pictures/*.png"))) == 3 * 3 * 3


@pytest.mark.slow
@needs_data
def test_the_real_tiles_are_split_without_leaks_and_near_the_shares() -> None:
    task = Nuclei(size=16)
    assert_no_leak(REAL, task)
    for site in SETS:
        data = task.load(site, SETS, 0, REAL)
        sizes = np.array([len(getattr(data, part)) for part in PARTS])
        assert np.abs(sizes / sizes.sum() - [0.55, 0.2, 0.25]).max() < 0.1
