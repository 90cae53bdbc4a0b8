"""A hospital's folder of images: reading, splitting by patient, the network's inputs, and rejections."""

import ctypes
import json
import shutil
import struct
import subprocess
import sys
import unicodedata
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK
import torch
import yaml
from monai.transforms import Affine
from PIL import Image

from medsilo.core.errors import DataError, MedsiloError, PlanError
from medsilo.learning.compute import Compute
from medsilo.learning.loop import batches
from medsilo.learning.sampling import drawn_cases
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.registry import TASKS
from medsilo.site.settings import make_settings
from medsilo.tasks.cache import Memory
from medsilo.tasks.own.augmentation import augmented
from medsilo.tasks.own.folder import Augmentation, FolderTask
from medsilo.tasks.own.image_patches import from_windows, patch
from medsilo.tasks.scans import Scan
from medsilo.tasks.segmentation import FURTHEST
from medsilo.tasks.shares import PARTS
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import parts_by_rank
from medsilo_lab.deploy.predict import scan_of
from tests.conftest import over_all, slow_but
from tests.hospital import Volume, affine_of, ball, photograph, write_balls, write_pixels, write_table, write_volume

SECRET = "jane-doe"
BALL = {"labels": ["ball"], "size": [16, 16, 8], "target_spacing": [2, 2, 3]}
PHOTO = {"labels": ["square"], "size": [32, 32]}
PATIENTS = [f"p{number}" for number in range(9)]


def volumes(**numbers) -> FolderTask:
    return TASKS["nifti-folder"].model_validate({**BALL, **numbers})


def photos(**numbers) -> FolderTask:
    return TASKS["image-folder"].model_validate({**PHOTO, **numbers})


def write_photos(folder: Path, patients=PATIENTS, images: int = 2) -> Path:
    for place, patient in enumerate(patients):
        for number in range(images):
            pixels, mask = photograph(100 * place + number)
            write_pixels(folder / "images" / patient / f"{number}.png", pixels)
            write_pixels(folder / "labels" / patient / f"{number}.png", mask)
    return folder


def source(folder: Path, **others) -> DataSource:
    return DataSource.model_validate({"folder": folder, **others})


PHOTOS = {"images": "images/*/*.png", "labels": "labels/*/*.png", "patient": "^[^/]+"}


@pytest.fixture(scope="module")
def balls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_balls(tmp_path_factory.mktemp("balls"), PATIENTS)


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("squares"))


def read(task: FolderTask, where: DataSource, site: str = "a", sites=("a",)):
    return task.read(site, list(sites), 0, where)


def told(task: FolderTask, where: DataSource):
    return task.survey("a", ["a"], 0, where)


# -------------------------------------------------------------------------------------------------------------- reading
@pytest.mark.parametrize("stored_as", ["LPS", "RAS", "PIR"])
def test_a_volume_is_turned_resampled_and_normalised(stored_as: str, tmp_path: Path) -> None:
    """A volume's axes may have any order in its file.

    For volumes without resampling, numpy computes the expected values.
    """
    write_balls(tmp_path, PATIENTS, spacing=(2.0, 2.0, 3.0), stored_as=stored_as)
    task = volumes(intensity={"kind": "z-score"})
    data = read(task, source(tmp_path))
    images = {}
    for number, patient in enumerate(PATIENTS):
        values, mask = ball((12, 24, 20), (2.0, 2.0, 3.0), number + 100 * 56)
        images[patient] = (values - values.mean()) / values.std(), mask
    for part in PARTS:
        cases = getattr(data, part)
        for place, patient in enumerate(cases.patients):
            inputs, target = cases[place]
            assert target.dtype == torch.int64
            np.testing.assert_allclose(inputs[0].numpy(), images[patient][0], atol=1e-4)
            assert np.array_equal(target.numpy(), images[patient][1])


def test_the_grid_is_the_plans_spacing_and_covers_the_same_place(balls: Path) -> None:
    resized = volumes(target_spacing=None)
    assert not resized.crops and read(resized, source(balls)).train[0][0].shape == resized.shape == (1, 8, 16, 16)
    inputs, target = read(volumes(), source(balls)).train[0]
    assert inputs.shape == (1, 10, 18, 15) and target.shape == (10, 18, 15)  # 12 x 2.5 / 3, 24 x 1.5 / 2, 20 x 1.5 / 2
    share = float(target.float().mean())
    sizes = [ball((12, 24, 20), (1.5, 1.5, 2.5), number + 5600)[1].mean() for number in range(9)]
    assert min(sizes) * 0.85 < share < max(sizes) * 1.15


def test_intensities_against_numpy(tmp_path: Path) -> None:
    write_balls(tmp_path, PATIENTS, spacing=(2.0, 2.0, 3.0))
    values = {p: ball((12, 24, 20), (2.0, 2.0, 3.0), number + 5600)[0] for number, p in enumerate(PATIENTS)}

    def expected(kind: str, image: np.ndarray) -> np.ndarray:
        low, high = {"percentiles": np.percentile(image, [5, 95]), "window": (-0.1, 1.9)}.get(kind, (0, 1))
        scaled = (image - low) / (high - low)
        return scaled if kind == "none" else scaled.clip(0, 1)

    for intensity in (
        {"kind": "percentiles", "low": 5, "high": 95},
        {"kind": "window", "low": -0.1, "high": 1.9},
        {"kind": "none"},
    ):
        train = read(volumes(intensity=intensity), source(tmp_path)).train
        own = values[train.patients[0]].astype(np.float64)
        np.testing.assert_allclose(train[0][0][0].numpy(), expected(intensity["kind"], own), atol=1e-5)


def test_channels_come_from_several_files_and_must_lie_on_one_grid(tmp_path: Path) -> None:
    write_balls(tmp_path / "t1", PATIENTS)
    write_balls(tmp_path / "t2", PATIENTS)
    where = {"images": ["t1/images/*.nii.gz", "t2/images/*.nii.gz"], "labels": "t1/labels/*.nii.gz"}
    task = volumes(modalities=["t1", "t2"])
    inputs, _ = read(task, source(tmp_path, **where)).train[0]
    assert inputs.shape[0] == 2 and torch.equal(inputs[0], inputs[1])
    write_balls(tmp_path / "t2", PATIENTS[:1], spacing=(1.6, 1.5, 2.5))
    (problem,) = [p for p in told(task, source(tmp_path, **where)).problems if p.severity == "left out"]
    assert problem.what.startswith("channels of a case lie in different places") and problem.private == ("p0",)


def test_channels_are_matched_by_the_plans_names_and_that_is_said(tmp_path: Path) -> None:
    """The hospital may give its image sequences any names, and list the sequences in any order."""
    for number, own in enumerate(("FLAIR", "T1w"), 1):
        write_balls(tmp_path / own, PATIENTS)
        for path in (tmp_path / own / "images").iterdir():
            image = SimpleITK.ReadImage(str(path))
            SimpleITK.WriteImage(image * float(number), str(path))
    labels = {"labels": "T1w/labels/*.nii.gz"}
    task = volumes(modalities=["t1", "flair"], intensity={"kind": "none"})
    listed = {"images": ["T1w/images/*.nii.gz", "FLAIR/images/*.nii.gz"], **labels}
    named = {"images": {"flair": "FLAIR/images/*.nii.gz", "t1": "T1w/images/*.nii.gz"}, **labels}
    one, other = (read(task, source(tmp_path, **where)).train[0][0] for where in (listed, named))
    assert torch.equal(one, other) and torch.allclose(one[0], 2 * one[1]) and not torch.equal(one[0], one[1])
    (note,) = [own for own in told(task, source(tmp_path, **named)).problems if "matched by name" in own.what]
    assert note.severity == "note" and note.private == ("t1: T1w/images/*.nii.gz", "flair: FLAIR/images/*.nii.gz")
    for images, wrong in (
        ({"t1": "T1w/images/*.nii.gz"}, "names no channel 'flair'"),
        ({**named["images"], "T2": "T1w/images/*.nii.gz"}, "names a strange channel 'T2'"),
    ):
        with pytest.raises(DataError, match=wrong):
            read(task, source(tmp_path, images=images, **labels))
    with pytest.raises(DataError, match="this task has no named channels"):
        read(photos(), source(tmp_path, images=named["images"]))


def test_slices_of_a_volume_stay_together_and_empty_ones_can_be_kept(balls: Path) -> None:
    """A ball of 14 mm is visible in five or six of twelve slices, because the distance between slices is 2.5 mm."""
    task = volumes(dimensions=2, size=[16, 16], target_spacing=[2, 2])
    data = read(task, source(balls))
    assert task.shape == (1, 16, 16)
    counted = {}
    for part in PARTS:
        cases = getattr(data, part)
        assert all(cases[place][1].any() for place in range(len(cases)))
        for patient in cases.patients:
            assert counted.setdefault(patient, part) == part
        assert all(5 <= cases.patients.count(patient) <= 6 for patient in cases.patients)
    assert set(counted) == set(PATIENTS)
    every = read(task.model_copy(update={"slices": "all"}), source(balls))
    assert sum(len(getattr(every, part)) for part in PARTS) == 12 * 9


def test_photographs_are_resized_or_keep_their_size(squares: Path) -> None:
    inputs, target = read(photos(), source(squares, **PHOTOS)).train[0]
    assert inputs.shape == (3, 32, 32) and target.shape == (32, 32)
    assert inputs.min() >= 0 and inputs.max() <= 1 and set(target.unique().tolist()) == {0, 1}
    kept = read(photos(resize=False), source(squares, **PHOTOS)).train
    inputs, target = kept[0]
    assert inputs.shape == (3, 30, 40)
    assert target.sum() == 100  # the structure is a square of 10 by 10 pixels
    place = int(kept.held[0].entry.images[0].stem)
    pixels, _ = photograph(100 * PATIENTS.index(kept.patients[0]) + place)
    assert torch.equal(inputs, torch.from_numpy(pixels.transpose(2, 0, 1) / np.float32(255)).float())


def test_classes_come_from_folders_or_from_a_table(tmp_path: Path) -> None:
    task = photos(kind="classification", labels=["benign", "malignant"])
    rows = []
    for number in range(12):
        kind = ("benign", "malignant")[number % 2]
        write_pixels(tmp_path / kind / f"{number}.png", photograph(number)[0])
        rows.append({"image": f"{kind}/{number}.png", "label": ("B", "M")[number % 2], "patient": f"p{number // 2}"})
    by_folder = read(task, source(tmp_path, images="*/*.png"))
    write_table(tmp_path / "list.csv", rows, separator=";")
    by_table = read(task, source(tmp_path, table="list.csv", label_map={"B": "benign", "M": "malignant"}))
    for data in (by_folder, by_table):
        total = 0
        for part in PARTS:
            cases = getattr(data, part)
            total += len(cases)
            for place in range(len(cases)):
                inputs, label = cases[place]
                assert inputs.shape == (3, 32, 32)
                number = int(Path(cases.held[place].entry.name).stem)
                assert int(label) == number % 2
        assert total == 12
    assert by_table.survey.parts["train"].patients * 2 == by_table.survey.parts["train"].cases
    with pytest.raises(DataError, match="not among the plan's .benign, malignant."):
        read(task, source(tmp_path, table="list.csv"))


def test_volumes_are_classified_whole(tmp_path: Path) -> None:
    rows = []
    for number in range(9):
        image, _ = ball((12, 24, 20), (2.0, 2.0, 3.0), number)
        (tmp_path / "scans").mkdir(exist_ok=True)
        write_volume(tmp_path / "scans" / f"{number}.nii.gz", Volume(image, affine_of((2.0, 2.0, 3.0))))
        rows.append({"image": f"scans/{number}.nii.gz", "label": number % 2, "patient": number})
    write_table(tmp_path / "cases.csv", rows)  # the reader finds a table named cases.csv without a setting
    task = volumes(kind="classification", labels=["no", "yes"], size=[32, 16, 8])
    data = read(task, source(tmp_path))
    inputs, label = data.train[0]
    assert inputs.shape == (1, 8, 16, 32) == task.shape
    number = int(data.train.patients[0])
    assert int(label) == number % 2
    image = ball((12, 24, 20), (2.0, 2.0, 3.0), number)[0].astype(np.float64)
    low, high = np.percentile(image, [0.5, 99.5])
    scaled = ((image - low) / (high - low)).clip(0, 1)
    # the rows are cropped to the middle of the image
    np.testing.assert_allclose(inputs[0, :, :, 6:26].numpy(), scaled[2:10, 4:20], atol=1e-5)
    assert (inputs[0, :, :, :6] == 0).all() and (inputs[0, :, :, 26:] == 0).all()  # the columns are padded with zeros


# --------------------------------------------------------------------------------------------------------- who is where
def parts_of(patients: int, split: int = 0, classes: int = 1, shares=(0.6, 0.2, 0.2)) -> dict[str, str]:
    return parts_by_rank({f"p{n}": str(n % classes) for n in range(patients)}, shares, split)


def sizes(parts: dict[str, str]) -> list[int]:
    return [list(parts.values()).count(part) for part in PARTS]


@pytest.mark.slow
@pytest.mark.parametrize("split", range(5))
def test_parts_are_at_their_shares_at_hospital_size(split: int) -> None:
    assert sizes(parts_of(16, split)) == [10, 3, 3] and sizes(parts_of(25, split)) == [15, 5, 5]
    assert sizes(parts_of(300, split)) == [180, 60, 60]
    assert sizes(parts_of(10, split, shares=(0.8, 0.1, 0.1))) == [8, 1, 1]
    for count in (3, 4, 5, 6):  # with at least three patients, no part of the split is empty
        assert min(sizes(parts_of(count, split))) >= 1 == min(sizes(parts_of(count, split, shares=(0.9, 0.05, 0.05))))
    moved = [patient for patient, part in parts_of(300, split).items() if parts_of(300, split + 1)[patient] != part]
    assert len(moved) > 100


@pytest.mark.parametrize("split", range(5))
def test_parts_are_at_their_shares_within_each_class(split: int) -> None:
    """10 of 40 patients are ill, and each split assigns six of the ill patients to training, two to validation and two
    to the test.
    """
    ill = [f"p{n}" for n in range(0, 40, 4)]
    parts = parts_by_rank({f"p{n}": "ill" if n % 4 == 0 else "well" for n in range(40)}, (0.6, 0.2, 0.2), split)
    assert sizes(parts) == [24, 8, 8] and sizes({patient: parts[patient] for patient in ill}) == [6, 2, 2]


def test_where_nothing_is_remembered_a_newcomer_moves_few_and_nobody_from_test_to_training() -> None:
    """docs/start/your-data.md describes how runs on one machine, which store no split, treat new patients."""
    moves = []
    for split in range(100):
        for classes in (1, 2):
            before, after = parts_of(40, split, classes), parts_of(41, split, classes)
            moves.append([(part, after[patient]) for patient, part in before.items() if after[patient] != part])
    assert max(map(len, moves)) <= 2 and sum(map(len, moves)) / len(moves) < 0.7
    assert not any(("test", "train") in several for several in moves)


@pytest.mark.parametrize("classes", [1, 2])
def test_newcomers_fill_up_what_lacks_most_and_move_nobody(classes: int) -> None:
    known = parts_of(16, 0, classes)
    for count in range(17, 101, 7):
        everybody = {f"p{n}": str(n % classes) for n in range(count)}
        found = parts_by_rank(everybody, (0.6, 0.2, 0.2), 0, known)
        assert all(found[patient] == part for patient, part in known.items())
        assert all(abs(size - share * count) < 2 for size, share in zip(sizes(found), (0.6, 0.2, 0.2), strict=True))
        known = found
    alike = sizes({patient: part for patient, part in known.items() if int(patient[1:]) % 2})
    assert all(abs(size - share * sum(alike)) <= 3 for size, share in zip(alike, (0.6, 0.2, 0.2), strict=True))


def test_a_column_may_fix_the_parts(squares: Path, tmp_path: Path) -> None:
    rows = [
        {"file": f"images/{p}/{n}.png", "mask": f"labels/{p}/{n}.png", "pid": p, "set": PARTS[i % 3]}
        for i, p in enumerate(PATIENTS)
        for n in range(2)
    ]
    shutil.copytree(squares, tmp_path / "data")
    columns = {"image": "file", "label": "mask", "patient": "pid", "part": "set"}
    where = source(tmp_path / "data", table="t.csv", columns=columns)
    write_table(tmp_path / "data" / "t.csv", rows)
    data = read(photos(), where)
    for number, part in enumerate(PARTS):
        assert set(getattr(data, part).patients) == set(PATIENTS[number::3])
    mistyped = source(tmp_path / "data", table="t.csv", columns={**columns, "patent": "pid"})
    with pytest.raises(DataError, match=r"data\.columns.*did you mean patient") as caught:
        read(photos(), mistyped)
    assert caught.value.private == "patent"
    rows[0]["set"] = "validation"
    write_table(tmp_path / "data" / "t.csv", rows)
    with pytest.raises(DataError, match="patients are in.*by the table") as caught:
        read(photos(), where)
    assert "p0" in caught.value.private and "p0" not in str(caught.value)
    (problem,) = [one for one in told(photos(), where).problems if one.what.startswith("patients are in two parts")]
    assert problem.count == 1
    rows[0]["set"] = "holdout"
    write_table(tmp_path / "data" / "t.csv", rows)
    assert "not train, validation or test" in told(photos(), where).problems[0].what


def test_a_folder_with_the_sites_name_is_the_sites(tmp_path: Path) -> None:
    for number, site in enumerate(("a", "b")):
        write_balls(tmp_path / site, [f"{site}{n}" for n in range(4)], shape=(12, 24, 20 + number))
    for site in ("a", "b"):
        data = read(volumes(), source(tmp_path), site, ("a", "b"))
        assert all(patient[0] == site for part in PARTS for patient in getattr(data, part).patients)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "column"])
def test_one_folder_is_dealt_to_simulated_sites(kind: str, tmp_path: Path) -> None:
    """Each patient is at one site and in one part of the split, and no patient is missing."""
    rows = []
    for number in range(40):
        write_pixels(tmp_path / f"{number}.png", photograph(number, (16, 16))[0])
        rows.append(
            {"image": f"{number}.png", "label": number // 2 % 2, "patient": number // 2, "site": "abc"[number // 2 % 3]}
        )
    write_table(tmp_path / "cases.csv", rows)
    partition = {"kind": kind, "alpha": 0.3, "minimum": 3}
    task = photos(kind="classification", labels=["no", "yes"], size=[16, 16], partition=partition)
    owners: dict[str, str] = {}
    cases = 0
    for site in "abc":
        data = read(task, source(tmp_path), site, "abc")
        for part in PARTS:
            cases += len(getattr(data, part))
            for patient in set(getattr(data, part).patients):
                assert owners.setdefault(patient, site) == site
    assert cases == 40 and len(owners) == 20
    sizes = [list(owners.values()).count(site) for site in "abc"]
    if kind == "iid":
        assert max(sizes) - min(sizes) <= 1
    if kind == "dirichlet":
        assert min(sizes) >= 3
    if kind == "column":
        assert all(owners[str(row["patient"])] == row["site"] for row in rows)
        with pytest.raises(DataError, match="gives no case to d"):
            read(task, source(tmp_path), "d", "abcd")


# --------------------------------------------------------------------------------------------------------------- pieces
def test_pieces_are_drawn_from_the_seed_and_hold_a_structure_when_they_should() -> None:
    image = torch.arange(6 * 9 * 11).reshape(1, 6, 9, 11).float()
    labels = torch.zeros(6, 9, 11, dtype=torch.int64)
    for voxel in ((0, 0, 0), (5, 8, 10), (3, 4, 5)):
        labels[voxel] = 1
    size, seen, free = (2, 3, 5), [], set()
    for seed in range(300):
        inputs, target = patch((image, labels), size, 1.0, seed)
        assert inputs.shape == (1, *size) and target.shape == size and target.sum() == 1
        start = np.unravel_index(int(inputs[0, 0, 0, 0]), (6, 9, 11))
        cut = tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))
        assert torch.equal(inputs, image[(slice(None), *cut)]) and torch.equal(target, labels[cut])
        seen.append(tuple(map(int, start)))
        again = patch((image, labels), size, 1.0, seed)
        assert torch.equal(again[0], inputs)
        free.add(int(patch((image, labels), size, 0.0, seed)[0][0, 0, 0, 0]))
    counts = [seen.count(start) for start in sorted(set(seen))]
    assert sorted(set(seen)) == [(0, 0, 0), (2, 3, 3), (4, 6, 6)]
    assert min(counts) > 70  # each voxel of the structure is sampled with the same probability
    assert len(free) > 150  # a patch has 5 x 7 x 7 possible positions
    assert patch((image, labels * 0), size, 1.0, 3)[0].shape == (1, *size)


def test_a_volume_smaller_than_a_piece_is_filled_up() -> None:
    image, labels = torch.ones(2, 3, 9, 11), torch.ones(3, 9, 11, dtype=torch.int64)
    image[:, 0, 0, 0] = -1
    inputs, target = patch((image, labels), (5, 9, 4), 0.5, 0)
    assert inputs.shape == (2, 5, 9, 4) and (inputs[:, 3:] == -1).all() and (target[3:] == 0).all()


def test_windows_give_back_what_each_place_would_give_alone() -> None:
    """The network has a receptive field of one voxel, so its output does not depend on the windows.

    Images may have any size, even smaller than a window.
    """
    images = torch.randn(1, 2, 7, 13, 21)
    network = torch.nn.Conv3d(2, 3, 1)
    with torch.no_grad():
        for size in ((4, 8, 8), (8, 8, 32), (7, 13, 21)):
            torch.testing.assert_close(from_windows(network, images, size, 0.25), network(images), atol=1e-5, rtol=0)


AUGMENTED = ["flip-x", "flip-y", "flip-z", "rotate90", "affine", "intensity", "noise"]


@pytest.mark.slow
def test_processes_that_read_cases_without_shared_memory_are_refused_with_the_remedy(root: Path) -> None:
    """Containers have 64 MB of /dev/shm by default, where the data loader's processes store their batches."""
    code = """
import torch
from torch.utils.data import ConcatDataset, TensorDataset
from medsilo.learning.compute import Compute
from medsilo.learning.loop import batches
cases = ConcatDataset([TensorDataset(torch.zeros(4, 1, 512, 512), torch.zeros(4))])
for workers in (0, 2):
    print(sum(len(inputs) for inputs, _ in batches(cases, 2, Compute(workers=workers))), flush=True)
"""
    enter = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"',
    ]
    if subprocess.run([*enter, "sh", "true"], capture_output=True).returncode:
        pytest.skip("no mounts of its own")
    done = subprocess.run([*enter, "sh", sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.split() == ["4"]
    told = done.stderr.splitlines()[-1]
    assert "Refused" in told and "threads: 1" in told and "/dev/shm" in told


def test_training_cases_depend_on_the_seed_alone_and_not_on_workers(balls: Path) -> None:
    task = volumes(augmentation=AUGMENTED)
    train = read(task, source(balls)).train

    def epoch(seed: int, workers: int, size: int = 2) -> list[torch.Tensor]:
        np.random.seed(workers)
        torch.manual_seed(workers)
        cases = drawn_cases(train, task.variation, seed)
        found = list(batches(cases, size, Compute(workers=workers)))
        assert found[0][0].shape == (size, 1, 8, 16, 16) and found[0][1].dtype == torch.int64
        return [torch.cat(column) for column in zip(*found, strict=True)]

    first, same, alone, other = epoch(1, 0), epoch(1, 2), epoch(1, 0, size=1), epoch(2, 0)
    for again in (same, alone):  # a case's augmentation does not depend on other cases in the batch
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("kind", AUGMENTED)
def test_masks_move_with_their_images(kind: str) -> None:
    """After a change of geometry, an image with the same values as its mask still equals the mask."""
    task = volumes(augmentation=[kind], foreground=0.0)
    labels = torch.zeros(8, 16, 16, dtype=torch.int64)
    labels[2:5, 3:10, 3:9] = 1
    moved, many = 0, range(24)
    batch = torch.stack([labels] * len(many))
    for inputs, target in zip(*task.augmented((batch[:, None].float(), batch), many), strict=True):
        assert inputs.shape == (1, 8, 16, 16) and set(target.unique().tolist()) <= {0, 1}
        # images are interpolated linearly between eight voxels, and masks take the value of the nearest voxel
        away = (inputs[0] - target).abs()
        assert away.max() <= {"noise": 0.4, "affine": 0.875}.get(kind, 0.61) and away.mean() < 0.1
        moved += not torch.equal(target, labels)
        if kind in ("intensity", "noise"):
            assert torch.equal(target, labels)
    assert moved > 3 or kind in ("intensity", "noise")
    pictures = photos(kind="classification", labels=["a", "b"], augmentation=["flip-x", "affine"])
    inputs, target = pictures.augmented((torch.rand(1, 3, 32, 32), torch.tensor([1])), [5])
    assert inputs.shape == (1, 3, 32, 32) and target.tolist() == [1]


@pytest.mark.parametrize("grid", [(24, 40), (10, 24, 40)])
def test_turned_and_scaled_images_are_monai_s_by_the_same_matrix(grid: tuple[int, ...]) -> None:
    seeds, axes = range(8), len(grid)
    images, labels = torch.rand(8, 2, *grid), torch.randint(1 << 40, (8, *grid))
    found, picked = augmented((images.clone(), labels.clone()), ["affine"], True, seeds)
    changed = 0
    for case, seed in enumerate(seeds):
        drawn = np.random.default_rng(seed)
        if drawn.random() >= 0.5:
            assert torch.equal(found[case], images[case]) and torch.equal(picked[case], labels[case])
            continue
        turn, scales = drawn.uniform(-0.26, 0.26), drawn.uniform(0.9, 1.1, axes)
        matrix = np.eye(axes + 1)
        matrix[-3:-1, -3:-1] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
        monai = {"affine": matrix @ np.diag([*scales, 1]), "padding_mode": "border", "image_only": True}
        torch.testing.assert_close(found[case], Affine(mode="bilinear", **monai)(images[case]).as_tensor())
        # float32 represents the voxel numbers of this test exactly
        numbers = torch.arange(labels[case].numel()).view(1, *grid)
        places = Affine(mode="nearest", **monai)(numbers.float()).as_tensor().long()[0]
        assert torch.equal(picked[case], labels[case].flatten()[places])
        changed += 1
    assert changed in range(1, 8)


def test_chances_and_strengths_of_augmentation_are_those_that_it_names() -> None:
    images, seeds = torch.rand(1, 1, 6, 6).repeat(400, 1, 1, 1), range(400)

    def changed(kind: Augmentation) -> torch.Tensor:
        return augmented((images.clone(), torch.zeros(400)), [kind], False, seeds)[0]

    def share(whole: torch.Tensor, other: torch.Tensor) -> float:
        return (whole == other).flatten(1).all(1).double().mean().item()

    for kind, axis in (("flip-x", -1), ("flip-y", -2)):
        assert share(changed(kind), images) + share(changed(kind), images.flip(axis)) == 1
        assert 0.4 < share(changed(kind), images) < 0.6
    turned = [share(changed("rotate90"), torch.rot90(images, turns, (-2, -1))) for turns in range(4)]
    assert sum(turned) == 1 and all(0.17 < own < 0.33 for own in turned)
    added = (changed("noise") - images).flatten(1).std(1)
    assert 0.4 < (added == 0).double().mean() < 0.6 and 0.035 < added.max() < 0.08
    values = changed("intensity").flatten(1)
    factor = values.std(1) / images.flatten(1).std(1)
    shift = (values / factor[:, None] - images.flatten(1)).mean(1) / images[0].std(correction=0)
    for drawn in (factor - 1, shift):
        assert -0.1001 < drawn.min() < -0.09 and 0.09 < drawn.max() < 0.1001 and abs(drawn.mean()) < 0.01


# ------------------------------------------------------------------------------------------------------------ the cache
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["memory", "disk", "both", "none", "small"])
def test_every_cache_gives_the_same_cases(cache: str, balls: Path, tmp_path: Path) -> None:
    task = volumes(dimensions=2, size=[16, 16], target_spacing=[2, 2])
    expected = read(task, source(balls))
    memory = {"small": {"cache_memory": 1}, "disk": {"cache_memory": 0}, "none": {"cache_memory": 0}}.get(cache, {})
    kept = {"cache_folder": tmp_path / "cache"} if cache in ("disk", "both") else {}
    data = read(task, source(balls, **memory, **kept))
    for part in PARTS:
        mine, theirs = getattr(data, part), getattr(expected, part)
        assert mine.patients == theirs.patients
        for place in range(len(mine)):
            assert all(torch.equal(a, b) for a, b in zip(mine[place], theirs[place], strict=True))
    assert data.survey == expected.survey
    if kept:
        assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".safetensors"}
        assert len(list((tmp_path / "cache").iterdir())) == 9


def test_the_memory_of_the_cache_is_bounded(tmp_path: Path) -> None:
    # each volume needs 0.28 MB, and each mask needs one byte for each voxel
    write_balls(tmp_path, PATIENTS, shape=(24, 48, 50), spacing=(2, 2, 3))
    data = read(volumes(), source(tmp_path, cache_memory=1))
    held = [one for part in PARTS for one in getattr(data, part).held]
    kept = sum(one.made.inputs.nbytes + one.made.targets.nbytes for one in held if one.made)
    assert 0.7 * 2**20 < kept <= 2**20
    memory = Memory(DataSource(folder=tmp_path, cache_memory=1))
    whole, byte = torch.zeros(2**20, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    assert [memory.takes(one) for one in (whole, byte)] == [True, False]


def test_the_disk_cache_knows_a_file_that_changed_and_mends_one_that_broke(balls: Path, tmp_path: Path) -> None:
    shutil.copytree(balls, tmp_path / "data")
    where = source(tmp_path / "data", cache_folder=tmp_path / "cache")
    before = read(volumes(), where).train
    patient, first = before.patients[0], before[0][0]
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(read(volumes(), where).train[0][0], first)
    image, _ = ball((12, 24, 20), (1.5, 1.5, 2.5), 77)
    write_volume(tmp_path / "data" / "images" / f"{patient}.nii.gz", Volume(image, affine_of((1.5, 1.5, 2.5))), "RAS")
    assert not torch.equal(read(volumes(), where).train[0][0], first)
    assert not torch.equal(read(volumes(target_spacing=[3, 3, 3]), where).train[0][0], first)
    leads_nowhere(tmp_path / "data" / "images" / f"{patient}.nii.gz")
    assert [one.count for one in told(volumes(), where).problems if one.severity == "left out"] == [1]


# ------------------------------------------------------------------------------------------------------------ bad input
def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def with_nan(path: Path) -> None:
    image, _ = ball((12, 24, 20), (1.5, 1.5, 2.5), 1)
    image[3, 4, 5] = np.nan
    write_volume(path, Volume(image, affine_of((1.5, 1.5, 2.5))), "RAS")


def other_size(path: Path) -> None:
    mask = ball((12, 24, 22), (1.5, 1.5, 2.5), 1)[1]
    write_volume(path, Volume(mask, affine_of((1.5, 1.5, 2.5))), "RAS")


def other_place(path: Path) -> None:
    mask = ball((12, 24, 20), (1.5, 1.5, 2.5), 1)[1]
    write_volume(path, Volume(mask, affine_of((1.5, 1.5, 2.6))), "RAS")


def probabilities(path: Path) -> None:
    mask = ball((12, 24, 20), (1.5, 1.5, 2.5), 1)[1] * np.float32(0.5)
    write_volume(path, Volume(mask, affine_of((1.5, 1.5, 2.5))), "RAS")


def leads_out(path: Path) -> None:
    outside = path.parents[2] / "outside.nii.gz"
    path.replace(outside)
    path.symlink_to(outside)


def leads_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nothing.nii.gz"))


BAD_VOLUMES = [
    ("images", cut_off, "an image can't be read"),
    ("labels", cut_off, "a mask can't be read"),
    ("images", with_nan, "an image has values that are NaN"),
    ("labels", other_size, "an image and its mask have different sizes"),
    ("labels", other_place, "an image and its mask lie in different places"),
    ("labels", probabilities, "not whole numbers"),
    ("images", leads_out, "are not in the data folder but lead out of it"),
    ("labels", leads_out, "are not in the data folder but lead out of it"),
    ("labels", Path.unlink, "images have no label"),
    ("images", leads_nowhere, "an image can't be read"),
]


@pytest.mark.parametrize(("kind", "spoil", "words"), slow_but(BAD_VOLUMES[::3], BAD_VOLUMES, BAD_VOLUMES))
def test_a_bad_volume_is_left_out_and_the_rest_goes_on(
    kind: str, spoil, words: str, balls: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(balls, folder)
    for part in ("images", "labels"):
        (folder / part / "p4.nii.gz").rename(folder / part / f"{SECRET}.nii.gz")
    spoil(folder / kind / f"{SECRET}.nii.gz")
    assert_left_out(volumes(), source(folder), words)


def assert_left_out(task: FolderTask, where: DataSource, words: str) -> None:
    survey = told(task, where)
    (problem,) = [problem for problem in survey.problems if problem.severity != "note"]
    assert problem.severity == "left out" and words in problem.what and problem.count == 1
    assert any(SECRET in name for name in problem.private)
    shown = str(replace(survey, problems=tuple(replace(one, private=()) for one in survey.problems)))
    assert SECRET not in shown and str(where.folder) not in shown
    assert survey.usable
    data = read(task, where)
    assert data.survey == survey
    patients = [patient for part in PARTS for patient in getattr(data, part).patients]
    assert not any(SECRET in patient for patient in patients)
    assert len(set(patients)) == len(PATIENTS) - 1


def palette(path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + bytes([0, 1] * 20) for _ in range(30))
    header = struct.pack(">IIBBBBB", 40, 30, 8, 3, 0, 0, 0)
    parts = [(b"IHDR", header), (b"PLTE", bytes([0, 0, 0, 255, 0, 0])), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))


def pixels_of(path: Path, shape: tuple[int, ...], kind: type = np.uint8) -> None:
    write_pixels(path, np.random.default_rng(0).integers(0, 200, shape).astype(kind))


def real_pixels_of(path: Path) -> None:
    """Write a TIFF file with the suffix of another format, because the reader must detect the format by content."""
    write_pixels(path.with_suffix(".tiff"), np.random.default_rng(0).random((30, 40, 3)).astype(np.float32))
    path.with_suffix(".tiff").rename(path)


def turned(path: Path) -> None:
    """Write a photograph as a rotated phone does, with the orientation as an EXIF tag."""
    tag = Image.Exif()
    tag[274] = 6
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(path, "JPEG", exif=tag)


def saved(path: Path, mode: str, kind: str, pictures: int = 1, **how: Any) -> None:
    image = Image.new(mode, (40, 30))
    image.save(
        path, kind, **({"save_all": True, "append_images": [Image.new(mode, (40, 30), 1)]} if pictures > 1 else how)
    )


BAD_PHOTOS = [
    ("images", lambda path: saved(path, "LA", "PNG"), "grey with an alpha channel"),
    ("images", lambda path: saved(path, "RGB", "PNG", 2), "several pictures"),
    ("images", lambda path: saved(path, "LAB", "TIFF"), "LAB colours"),
    ("images", lambda path: saved(path, "RGB", "TIFF", tiffinfo={274: 6}), "stored rotated"),
    ("images", lambda path: saved(path, "L", "TIFF", 2), "the files are volumes, but the plan reads flat images"),
    ("images", lambda path: saved(path, "1", "BMP"), "stored in an unusual way"),
    ("images", lambda path: saved(path, "RGB", "GIF", 2), "stored in an unusual way"),
    ("images", turned, "stored rotated"),
    ("images", palette, "have a palette"),
    ("labels", palette, "have a palette"),
    ("images", real_pixels_of, "32 bits per value and signs, but the plan reads 8 or 16"),
    (
        "images",
        lambda path: pixels_of(path, (30, 40, 4)),
        "4 channels, but the plan reads 3; remove the alpha channel, which is not opaque",
    ),
    ("images", lambda path: pixels_of(path, (30, 41, 3)), "different sizes"),
    ("labels", lambda path: pixels_of(path, (30, 40, 3)), "masks have several channels"),
    ("images", lambda path: path.write_text("a letter"), "an image can't be read"),
]


@pytest.mark.parametrize(("kind", "spoil", "words"), BAD_PHOTOS)
def test_a_bad_photograph_is_left_out_and_the_rest_goes_on(kind: str, spoil, words: str, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "data", [*PATIENTS[1:], SECRET], images=1)
    spoil(folder / kind / SECRET / "0.png")
    assert_left_out(photos(), source(folder, **PHOTOS), words)


def test_what_training_refuses_of_a_palette_is_refused_in_prediction_too(tmp_path: Path) -> None:
    """medsilo raises an error, because prediction would otherwise silently use indices of a palette as pixel values."""
    palette(tmp_path / "new.png")
    with pytest.raises(DataError, match="have a palette"):
        scan_of(photos().use, (tmp_path / "new.png",))


@over_all("mode, ending", [("CMYK", "jpg"), ("YCbCr", "tif"), ("1", "png"), ("I;16", "png"), ("I;16", "tif")])
def test_other_ways_to_store_a_picture_are_read_as_programs_show_it(mode: str, ending: str, tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 2, (30, 40), np.uint8) * 255
    stored = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey)
    if mode in ("CMYK", "YCbCr"):
        stored = stored.convert("RGB")
    stored.convert(mode).save(tmp_path / f"stored.{ending}", **({"quality": 100} if ending == "jpg" else {}))
    write_pixels(tmp_path / "grey.png", grey)
    one, other = (photos().inputs_of(Scan.read(tmp_path / name)) for name in (f"stored.{ending}", "grey.png"))
    assert torch.allclose(one, other, atol=0.02)


def test_opaque_alpha_is_no_reason_to_leave_an_image_out(tmp_path: Path) -> None:
    """Screenshots and many image viewers save PNG files with an opaque alpha channel."""
    folder = write_photos(tmp_path / "rgb", images=1)
    shutil.copytree(folder, tmp_path / "rgba")
    for path in sorted((tmp_path / "rgba/images").glob("*/*.png")):
        pixels = np.array(Image.open(path))
        Image.fromarray(np.dstack([pixels, np.full_like(pixels[..., 0], 255)])).save(path)
    survey = told(photos(), source(tmp_path / "rgba", **PHOTOS))
    assert survey.usable, survey.problems
    assert not [problem for problem in survey.problems if problem.severity == "left out"]
    one, other = (read(photos(), source(tmp_path / kind, **PHOTOS)).train for kind in ("rgb", "rgba"))
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_where_all_images_are_left_out_that_is_said(tmp_path: Path) -> None:
    folder = write_photos(tmp_path, images=1)
    for path in folder.glob("images/*/*.png"):
        pixels_of(path, (30, 40, 4))
    stops = [
        problem.what for problem in told(photos(), source(folder, **PHOTOS)).problems if problem.severity == "stops"
    ]
    assert len(stops) == 3 and all("mend what is left out first" in what for what in stops)


def test_16_bits_are_read_as_8(tmp_path: Path) -> None:
    """The reader reports an image that uses only 12 of its 16 bits, because the image would be nearly black."""
    grey = photos(colours="grey", resize=False)
    for name, step in (("8", 1), ("16", 257), ("12", 16)):
        for number, patient in enumerate(PATIENTS):
            pixels, mask = photograph(number)
            kind = np.uint8 if step == 1 else np.uint16
            write_pixels(tmp_path / name / f"images/{patient}.png", pixels[..., 0].astype(kind) * kind(step))
            write_pixels(tmp_path / name / f"labels/{patient}.png", mask)
    eight, sixteen, twelve = (read(grey, source(tmp_path / name)).train[0][0] for name in ("8", "16", "12"))
    assert torch.allclose(eight, sixteen, atol=1e-6) and eight.max() > 0.4 and twelve.max() < 0.1
    dark = [
        [problem.private for problem in told(grey, source(tmp_path / name)).problems if "nearly black" in problem.what]
        for name in ("8", "16", "12")
    ]
    assert dark == [[], [], [tuple(PATIENTS)]]


@pytest.mark.slow
def test_masks_with_values_that_no_label_stands_for_stop_training_until_they_are_mapped(tmp_path: Path) -> None:
    for number, patient in enumerate(PATIENTS):
        image, mask = ball((12, 24, 20), (2.0, 2.0, 3.0), number)
        for kind, values in (("images", image), ("labels", mask * np.uint8(7) + (image > 1.9) * np.uint8(2))):
            (tmp_path / kind).mkdir(exist_ok=True)
            write_volume(tmp_path / kind / f"{patient}.nii.gz", Volume(values, affine_of((2.0, 2.0, 3.0))))
    survey = told(volumes(), source(tmp_path))
    (problem,) = [problem for problem in survey.problems if problem.severity == "stops"]
    assert "masks' values 7, 9;" in problem.what and problem.count == 9
    assert not [one for one in survey.problems if one.severity == "left out"]
    assert set(survey.label_values) == {"0", "7", "9"}
    with pytest.raises(DataError, match="label_map"):
        read(volumes(), source(tmp_path))
    data = read(volumes(), source(tmp_path, label_map={7: "ball", "9": 1}))
    target = data.train[0][1]
    mask = ball((12, 24, 20), (2.0, 2.0, 3.0), int(data.train.patients[0][1:]))[1]
    assert np.array_equal(target.numpy(), mask)
    without = read(volumes(), source(tmp_path, label_map={7: "ball", 9: "background"})).train[0][1]
    assert 0 < without.sum() < target.sum()
    with pytest.raises(DataError, match="'liver'.*: background, ball"):
        read(volumes(), source(tmp_path, label_map={7: "liver"}))


def test_empty_masks_one_class_and_copies_are_noted(balls: Path, tmp_path: Path) -> None:
    shutil.copytree(balls, tmp_path / "data")
    shutil.copy(tmp_path / "data/images/p1.nii.gz", tmp_path / "data/images/p2.nii.gz")
    empty = Volume(np.zeros((12, 24, 20), np.uint8), affine_of((1.5, 1.5, 2.5)))
    write_volume(tmp_path / "data" / "labels" / "p3.nii.gz", empty, "RAS")
    survey = told(volumes(), source(tmp_path / "data"))
    notes = {problem.what.split(":")[0]: problem for problem in survey.problems}
    assert survey.usable
    assert notes["masks are empty"].private == ("p3",) and notes["masks are empty"].count == 1
    (copies,) = [problem for problem in survey.problems if "there twice" in problem.what]
    data = read(volumes(), source(tmp_path / "data"))
    where = {name: part for part in PARTS for name in getattr(data, part).patients}
    assert copies.private == (f"p1 ({where['p1']}) = p2 ({where['p2']})",)
    assert ("in two parts" in copies.what) == (where["p1"] != where["p2"]) and "p1" not in copies.what
    assert sum(part.classes["ball"] for part in survey.parts.values()) == 8
    for number in range(9):
        write_pixels(tmp_path / "one" / "benign" / f"{number}.png", photograph(number)[0])
    task = photos(kind="classification", labels=["benign", "malignant"])
    one = told(task, source(tmp_path / "one", images="*/*.png"))
    assert one.usable and any("of one class" in problem.what for problem in one.problems)
    assert one.parts["train"].classes["malignant"] == 0 < one.parts["train"].classes["benign"]


def test_ranges_are_those_of_the_files(balls: Path) -> None:
    # MONAI changes its input tensors in place
    on_their_grid = volumes(intensity={"kind": "z-score"}, target_spacing=[1.5, 1.5, 2.5])
    survey = told(on_their_grid, source(balls))
    assert survey.size == ((20, 20), (24, 24), (12, 12))
    np.testing.assert_allclose(survey.spacing, [(1.5, 1.5), (1.5, 1.5), (2.5, 2.5)], atol=1e-5)
    images = [ball((12, 24, 20), (1.5, 1.5, 2.5), number + 5600)[0] for number in range(9)]
    assert survey.intensity == pytest.approx((min(i.min() for i in images), max(i.max() for i in images)))
    assert sum(part.cases for part in survey.parts.values()) == 9


@pytest.mark.parametrize("spelling", ["NFC", "NFD"])
def test_marks_and_spaces_in_names_are_letters(spelling: str, tmp_path: Path) -> None:
    """macOS stores é in a file name as two code points, while a table usually has one code point."""
    folder = write_balls(tmp_path / "data é", [f"Zoé {number}" for number in range(6)])
    for path in folder.glob("images/*"):
        path.rename(path.with_name(unicodedata.normalize(spelling, path.name)))
    data = read(volumes(), source(folder))
    assert sum(len(getattr(data, part)) for part in PARTS) == 6
    rows = [
        {"image": f"images/Zoé {n}.nii.gz", "label": f"labels/Zoé {n}.nii.gz", "patient": f"Zoé {n}"} for n in range(6)
    ]
    write_table(folder / "mes cas.csv", rows)
    assert len(read(volumes(), source(folder, table="mes cas.csv")).train) == len(data.train)


STOPS = [
    ({"patient": None}, "the table has no column patient; name yours under data.columns"),
    ({"label": None, "image": None}, "the table has no column image, label"),
    ("image;label", "the table has no column patient"),
    (b"\xff\xfe\x00", "not in UTF-8"),  # truncated UTF-16
    (None, "the table does not exist"),
]


@pytest.mark.parametrize(("change", "words"), STOPS)
def test_an_unusable_table_is_refused(change, words: str, tmp_path: Path) -> None:
    folder = write_balls(tmp_path, PATIENTS[:3])
    row = {"image": f"images/{SECRET}.nii", "label": "labels/p1.nii.gz", "patient": SECRET}
    if isinstance(change, dict):
        write_table(folder / "t.csv", [{key: value for key, value in row.items() if key not in change} or {"x": 1}])
    elif change is not None:
        (folder / "t.csv").write_bytes(change.encode() if isinstance(change, str) else change)
    where = source(folder, table="t.csv")
    (problem,) = told(volumes(), where).problems
    assert problem.severity == "stops" and words in problem.what
    with pytest.raises(DataError) as caught:
        read(volumes(), where)
    assert words in str(caught.value) and SECRET not in str(caught.value) and str(folder) not in str(caught.value)


def test_lines_that_lack_something_are_left_out(balls: Path, tmp_path: Path) -> None:
    def row(number: int, **others) -> dict:
        files = {kind: f"{kind}s/p{number}.nii.gz" for kind in ("image", "label")}
        return {**files, "patient": f"p{number}", **others}

    outside = write_balls(tmp_path, ["p8"]) / "images" / "p8.nii.gz"
    # an image may have an absolute path in the data set's folder
    rows = [row(n) for n in range(5)] + [row(5, image=str(balls / "images" / "p5.nii.gz"))]
    rows += [row(6, patient=""), row(7, label=""), row(8, image="images/p99.nii.gz"), row(8, image=str(outside))]
    write_table(balls / "some.csv", rows)
    survey = told(volumes(), source(balls, table="some.csv"))
    left = {problem.what: problem.count for problem in survey.problems if problem.severity == "left out"}
    assert survey.usable and list(left.values()) == [1, 1, 1, 1]
    assert sum(part.cases for part in survey.parts.values()) == 6
    write_table(balls / "some.csv", [*rows, row(0)])
    with pytest.raises(DataError, match="in several lines of the table"):
        read(volumes(), source(balls, table="some.csv"))
    (balls / "some.csv").unlink()


def test_two_cases_of_one_name_stop_training(balls: Path, tmp_path: Path) -> None:
    shutil.copytree(balls, tmp_path / "data")
    shutil.copy(tmp_path / "data/images/p1.nii.gz", tmp_path / "data/images/p1.mha")
    survey = told(volumes(), source(tmp_path / "data"))
    (problem,) = [problem for problem in survey.problems if problem.severity == "stops"]
    assert "one and the same name" in problem.what and problem.private == ("p1",)
    with pytest.raises(DataError, match="one and the same name"):
        read(volumes(), source(tmp_path / "data"))
    one_ending = {"images": "images/*.nii.gz", "labels": "labels/*.nii.gz"}
    assert len(read(volumes(), source(tmp_path / "data", **one_ending)).train)


def test_a_folder_that_is_a_link_is_not_entered(balls: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for kind in ("images", "labels"):
        shutil.copytree(balls / kind, tmp_path / "data" / kind)
    (tmp_path / "data" / "old").symlink_to(balls)
    survey = told(volumes(), source(tmp_path / "data", images="**/images/*", labels="**/labels/*"))
    assert sum(part.cases for part in survey.parts.values()) == 9
    assert [p.what.split(",")[0] for p in survey.problems if p.severity == "left out"] == ["folders are links"]


@contextmanager
def bound_by_modes() -> Iterator[None]:
    """Apply file permissions to this thread, although root may normally read every file."""
    kernel, version, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    kernel.capget(version, sets)
    before = sets[0]
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    kernel.capset(version, sets)
    try:
        yield
    finally:
        sets[0] = before
        kernel.capset(version, sets)


def test_what_this_account_may_not_read_is_left_out_and_said(balls: Path, tmp_path: Path) -> None:
    """In earlier versions, cases in an unreadable folder were silently missing, and an unreadable file was called
    damaged.
    """
    for kind in ("images", "labels"):
        shutil.copytree(balls / kind, tmp_path / "data" / kind)
        shutil.copytree(balls / kind, tmp_path / "data/older" / kind)
    (tmp_path / "data/older").chmod(0)
    (tmp_path / "data/images/p1.nii.gz").chmod(0)
    with bound_by_modes():
        survey = told(volumes(), source(tmp_path / "data", images="**/images/*", labels="**/labels/*"))
    (tmp_path / "data/older").chmod(0o700)
    problems = {problem.what: problem.private for problem in survey.problems if problem.severity == "left out"}
    assert sorted(problems.values()) == [("older",), ("p1",)]
    assert all("account" in what for what in problems)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"images": "scans/*"}, "data.images; correct it"),
        ({"patient": "("}, "not a regular expression"),
        ({"patient": "x(.)"}, "names of cases don't fit data.patient"),
        ({"table": "a.csv", "images": "*"}, "give only one of the two"),
        ({"label_map": {"ball": 1}}, "'ball' is not a value of a mask"),
    ],
)
def test_settings_that_fit_nothing_say_so(settings: dict, words: str, balls: Path) -> None:
    assert words in told(volumes(), source(balls, **settings)).problems[0].what
    with pytest.raises(DataError) as caught:
        read(volumes(), source(balls, **settings))
    assert words in str(caught.value)


def test_too_few_patients_leave_a_part_empty(tmp_path: Path) -> None:
    write_balls(tmp_path, PATIENTS[:2])
    with pytest.raises(DataError, match="part has no cases; bring more patients"):
        read(volumes(), source(tmp_path))
    with pytest.raises(DataError, match="does not exist; correct 'data'"):
        read(volumes(), source(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="set 'data' in this site's medsilo.yaml"):
        volumes().read("a", ["a"], 0, None)


def test_volumes_along_a_fourth_axis_are_channels(tmp_path: Path) -> None:
    """The reader takes several volumes along the fourth axis as channels, and rejects a time series."""
    affine = np.array([[-2.0, 0, 0, 10], [0, 0, 3, 5], [0, 1.5, 0, -7], [0, 0, 0, 1]])
    values = np.random.default_rng(0).normal(size=(5, 6, 7, 4)).astype(np.float32)

    def scan(shown: np.ndarray) -> Scan:
        nibabel.save(nibabel.Nifti1Image(shown, affine), tmp_path / "scan.nii.gz")
        return Scan.read(tmp_path / "scan.nii.gz")

    together, alone = scan(values), [scan(values[..., place]) for place in range(4)]
    assert np.array_equal(together.values, np.concatenate([one.values for one in alone]))
    assert all(np.array_equal(together.affine, one.affine) for one in alone)
    assert np.array_equal(scan(values[..., :1]).values, alone[0].values)
    with pytest.raises(DataError, match="40 volumes along its fourth axis"):
        scan(np.repeat(values[..., :1], 40, 3))


def test_where_nothing_is_left_the_error_says_what_was_left_out(balls: Path) -> None:
    with pytest.raises(DataError, match=r"train part has no cases.*flat images \(9\)"):
        read(TASKS["image-folder"](size=(16, 16), colours="grey"), source(balls))


def test_a_classification_s_images_lie_in_their_classes_folders_when_nothing_else_is_said(tmp_path: Path) -> None:
    task = TASKS["image-folder"](kind="classification", labels=("benign", "malignant"), colours="grey", size=(8, 8))
    with pytest.raises(DataError, match=r"it is \*/\*; put them"):
        read(task, source(tmp_path))
    for label in task.labels:
        for number in range(8):
            path = tmp_path / label / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.full((8, 8), 100 * (label == "benign") + number, np.uint8)).save(path)
    data = read(task, source(tmp_path))
    for part in (data.train, data.validation, data.test):
        for inputs, target in part:
            assert (float(inputs.mean()) < 0.2) == (int(target) == 1)
    assert sum(map(len, (data.train, data.validation, data.test))) == 16


def test_other_tasks_take_a_folder_and_no_description(squares: Path) -> None:
    with pytest.raises(DataError, match="prescribes the layout of files"):
        TASKS["nuclei"]().read("a", ["a"], 0, source(squares, images="*"))
    for settings in (None, source(squares, images="*")):
        survey = TASKS["synthetic-prostate"](patients=4).survey("a", ["a", "b"], 0, settings)
        assert survey.usable and survey.parts["train"].cases > 0 and survey.size == ((48, 48), (48, 48))
    assert TASKS["nuclei"]().survey("a", ["a"], 0, source(squares)).problems[0].severity == "stops"


# ------------------------------------------------------------------------------------------------------- settings, plan
def test_data_are_a_folder_or_a_section_of_the_sites_settings(tmp_path: Path) -> None:
    assert make_settings({"data": "/data"}, "x").data == DataSource(folder=Path("/data"))
    described = make_settings({"data": {"folder": "/data", "table": "cases.csv", "label_map": {1: "ball"}}}, "x").data
    assert described is not None and described.table == "cases.csv" and described.is_described
    again = make_settings({"data": json.loads(described.model_dump_json())}, "x").data
    assert again is not None and {str(k): v for k, v in again.label_map.items()} == {"1": "ball"}
    with pytest.raises(MedsiloError, match=r"data\.image: unknown key; .*images"):
        make_settings({"data": {"folder": "/data", "image": "*"}}, "x")


def planned(task: str, **numbers) -> Plan:
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": task, **numbers},
            "participation": {"sites": ["a", "b"]},
        }
    )


@pytest.mark.parametrize(
    ("task", "numbers", "words"),
    [
        ("nifti-folder", {"size": [32, 32]}, "give 3, in the order x, y, z"),
        ("nifti-folder", {"dimensions": 2, "size": [32, 32], "target_spacing": [1, 1, 1]}, "give 2 numbers"),
        ("nifti-folder", {"labels": ["a", "a"]}, "name each label once"),
        ("nifti-folder", {"labels": ["background"]}, "the background not at all"),
        ("nifti-folder", {"kind": "classification", "labels": ["a"]}, "needs two or more"),
        ("nifti-folder", {"shares": [0.5, 0.5, 0.5]}, "three shares above 0 that add up to 1"),
        ("nifti-folder", {"size": [32, 16, 16], "augmentation": ["rotate90"]}, "the same size along x and y"),
        ("image-folder", {"augmentation": ["flip-z"]}, "flip-z needs volumes"),
        ("nifti-folder", {"partition": {"kind": "dirichlet"}}, "dirichlet divides cases by class"),
        ("nifti-folder", {"size": [30, 30, 30]}, "inputs of task nifti-folder"),
    ],
)
def test_plans_that_make_no_sense_are_refused(task: str, numbers: dict, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(task, **numbers)
    assert words in str(caught.value)


# ---------------------------------------------------------------------------------------------------- the documentation
def documented(first: str, root: Path) -> list[dict]:
    blocks = (root / "docs/start/your-data.md").read_text(encoding="utf-8").split("```")[1::2]
    return [yaml.safe_load(block.removeprefix("yaml")) for block in blocks if block.startswith(f"yaml\n{first}")]


def test_the_first_example_works_as_it_stands(root: Path, tmp_path: Path) -> None:
    """The masks have the values 1 and 3 for the structures that the plan names "kidney" and "tumour"."""
    for number in range(1, 7):
        image, mask = ball((12, 24, 20), (2.0, 2.0, 3.0), number)
        mask[:, :12] *= 3
        for kind, values in (("images", image), ("labels", mask)):
            (tmp_path / kind).mkdir(exist_ok=True)
            write_volume(tmp_path / kind / f"case_{number:04}.nii.gz", Volume(values, affine_of((2.0, 2.0, 3.0))))
    settings = make_settings({"data": {**documented("data:", root)[0]["data"], "folder": tmp_path}}, "the example")
    task = planned(
        "nifti-folder", **{k: v for k, v in documented("task:", root)[0]["task"].items() if k != "name"}
    ).task
    survey = task.survey("a", ["a"], 0, settings.data)
    assert survey.usable and set(survey.label_values) == {"0", "1", "3"}
    assert sum(part.classes["tumour"] for part in survey.parts.values()) >= 1
    assert sum(part.classes["kidney"] for part in survey.parts.values()) >= 1


def test_the_second_example_works_as_it_stands(root: Path, tmp_path: Path) -> None:
    """The test adds rows to the table in docs/start/your-data.md, and uses a plan from jobs/."""
    text = (root / "docs/start/your-data.md").read_text(encoding="utf-8")
    lines = text.split("```\nfile,")[1].split("```")[0].strip().splitlines()[1:]
    lines += [f"photos/{n:04}.png,{('naevus', 'melanoma')[n % 2]},P{n},{PARTS[n % 3]}" for n in range(20, 32)]
    for line in lines:
        write_pixels(tmp_path / line.split(",")[0], photograph(1)[0])
    (tmp_path / "cases.csv").write_text("\n".join(["file,diagnosis,pseudonym,split", *lines]), encoding="utf-8")
    settings = make_settings({"data": {**documented("data:", root)[1]["data"], "folder": tmp_path}}, "the example")
    task = load_plan(root / "jobs/fedavg/plans/image-folder.yaml", ["task.size=[32, 32]"]).task
    survey = task.survey("a", ["a"], 0, settings.data)
    assert survey.usable and survey.parts["train"].cases == 6 and survey.parts["train"].patients == 5
    assert survey.parts["test"].classes == {"benign": 3, "malignant": 2}


def test_a_distance_between_surfaces_may_be_many_millimetres() -> None:
    """The upper limit is high enough for distances at real hospitals, which the server must not reject."""
    task = volumes()
    ranges = {name: task.goal.range_of(name) for name, numbers in task.goal.layout.items() if numbers == 2}
    distances = {name for name in ranges if name.startswith("hd95")}
    assert distances and all(ranges[name] == (0.0, FURTHEST) for name in distances)
    assert all(ranges[name] == (0.0, 1.0) for name in ranges.keys() - distances)
