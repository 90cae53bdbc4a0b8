"""Train on hospitals' volumes of different shapes and spacings, and predict masks on the grids of these volumes."""

import json
from pathlib import Path

import numpy as np
import pytest
import SimpleITK

from medsilo.cli import main
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import SiteSettings, make_settings
from tests import inprocess
from tests.hospital import Volume, affine_of, ball, photograph, write_balls, write_pixels, write_table, write_volume

HOSPITALS = {
    "north": ((12, 24, 20), (1.5, 1.5, 2.5), "RAS"),
    "south": ((10, 30, 26), (1.2, 1.2, 3.0), "LPI"),
    "west": ((16, 20, 22), (2.0, 1.8, 2.0), "PIR"),
}


def plan_of(method: str, rounds: int, **network) -> Plan:
    return parse_plan(
        {
            "algorithm": {"name": method},
            "task": {
                "name": "nifti-folder",
                "labels": ["ball"],
                "size": [16, 16, 8],
                "target_spacing": [2, 2, 3],
                "augmentation": ["flip-x", "flip-y", "intensity", "noise"],
            },
            "network": {"name": "unet", "dimensions": 3, "features": [4, 8], **network},
            "training": {
                "rounds": rounds,
                "local_epochs": 4,
                "batch_size": 4,
                "optimizer": "adam",
                "learning_rate": 0.01,
            },
            "participation": {"sites": list(HOSPITALS), "timeout": 300},
        }
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hospitals")
    for site, (shape, spacing, stored_as) in HOSPITALS.items():
        write_balls(root / site, [f"{site} {number}" for number in range(8)], shape, spacing, stored_as)
    return root


@pytest.mark.slow
def test_three_hospitals_of_different_spacing_end_with_masks_on_their_own_grids(data: Path, tmp_path: Path) -> None:
    plan, settings = (
        plan_of("fedavg", 4, features=[8, 16]),
        SiteSettings(device="cpu", data=data, min_patients_per_metric=1),
    )
    run = tmp_path / "run"
    inprocess.run(plan, folder=run, settings=settings)
    for site, (shape, spacing, stored_as) in HOSPITALS.items():
        (tmp_path / site).mkdir()
        values, mask = ball(shape, spacing, 999)
        write_volume(tmp_path / site / "scan.nii.gz", Volume(values, affine_of(spacing)), stored_as)
        out = tmp_path / "masks" / site
        assert main(["predict", str(run), str(tmp_path / site / "scan.nii.gz"), "-o", str(out)]) == 0
        write_volume(tmp_path / site / "mask.nii.gz", Volume(mask, affine_of(spacing)), stored_as)
        image, wanted = (SimpleITK.ReadImage(str(tmp_path / site / name)) for name in ("scan.nii.gz", "mask.nii.gz"))
        found = SimpleITK.ReadImage(str(out / "scan_mask.nii.gz"))
        assert found.GetSize() == image.GetSize()
        for name in ("GetSpacing", "GetOrigin", "GetDirection"):
            np.testing.assert_allclose(getattr(found, name)(), getattr(image, name)(), rtol=0, atol=1e-5)
        one, other = (SimpleITK.GetArrayFromImage(each) > 0 for each in (found, wanted))
        assert 2 * (one & other).sum() / (one.sum() + other.sum()) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "network"),
    [("fedbn", {}), ("harmofl", {"norm": "batch-statistics"}), ("adafed", {}), ("fedsm", {})],
)
def test_methods_that_look_at_cases_take_pieces_of_volumes(
    method: str, network: dict, data: Path, tmp_path: Path
) -> None:
    """Whole volumes have different sizes, so methods that need inputs of one size, such as FedSM's selector, use pieces
    of the volumes.
    """
    plan = plan_of(method, 1, **network).with_changes(["training.local_epochs=1"])
    if method == "adafed":
        plan = plan.with_changes(["algorithm.pretraining.epochs=1"])
    settings = SiteSettings(device="cpu", data=data, public_data=True, min_patients_per_metric=1, pictures=True)
    run = inprocess.run(plan, folder=tmp_path / "run", settings=settings)
    assert run.summary.status == "finished"
    scores = [site.test["dice"] for site in run.summary.sites.values()]
    assert all(0 <= score <= 1 for score in scores)


KINDS = {
    "flat, structures": (
        {"name": "image-folder", "labels": ["square"], "size": [32, 32], "augmentation": ["flip-x", "affine"]},
        {"name": "unet", "features": [4, 8]},
        "photos/images/p0.png",
        "pixels_square",
    ),
    "flat, structures, pieces": (
        {"name": "image-folder", "labels": ["square"], "size": [16, 16], "resize": False},
        {"name": "unet", "features": [4, 8]},
        "photos/images/p0.png",
        "pixels_square",
    ),
    "flat, classes": (
        {"name": "image-folder", "kind": "classification", "labels": ["no", "yes"], "size": [32, 32]},
        {"name": "small-cnn", "width": 2},
        "photos/images/p0.png",
        "label",
    ),
    "slices, structures": (
        {"name": "nifti-folder", "dimensions": 2, "labels": ["ball"], "size": [16, 16], "target_spacing": [2, 2]},
        {"name": "unet", "features": [4, 8]},
        "balls/images/p0.nii.gz",
        "volume_ml_ball",
    ),
    "volumes, classes": (
        {"name": "nifti-folder", "kind": "classification", "labels": ["no", "yes"], "size": [16, 16, 8]},
        {"name": "small-cnn", "width": 2, "dimensions": 3},
        "balls/images/p0.nii.gz",
        "label",
    ),
}


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clinic")
    patients = [f"p{number}" for number in range(20)]
    write_balls(root / "balls", patients)
    for number, patient in enumerate(patients):
        for kind, pixels in zip(("images", "labels"), photograph(number), strict=True):
            write_pixels(root / "photos" / kind / f"{patient}.png", pixels)
    for kind, suffix in (("balls", ".nii.gz"), ("photos", ".png")):
        rows = [{"image": f"images/{p}{suffix}", "label": n % 2, "patient": p} for n, p in enumerate(patients)]
        write_table(root / kind / "classes.csv", rows)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_trained_tested_and_predicted(kind: str, clinic: Path, tmp_path: Path) -> None:
    task, network, image, found = KINDS[kind]
    values = {
        "algorithm": {"name": "fedavg"},
        "task": {**task, "partition": {"kind": "iid"}},
        "network": network,
        "training": {"rounds": 1, "batch_size": 4},
        "participation": {"sites": ["a", "b"]},
    }
    plan = parse_plan(values)
    data: dict = {"folder": clinic / Path(image).parts[0]}
    settings = {"data": data, "min_patients_per_metric": 1, "public_data": True}
    if task.get("kind") == "classification":
        data["table"] = "classes.csv"
    run = inprocess.run(plan, folder=tmp_path / "run", settings=make_settings(settings, "x"))
    assert run.summary.status == "finished"
    for site in run.summary.sites.values():
        assert 0 <= site.test[plan.task.goal.metric] <= 1
    known = json.loads((tmp_path / "run/sites/a/data.json").read_text())
    assert sum(part["patients"] for part in known["parts"].values()) == 10
    assert main(["predict", str(tmp_path / "run"), str(clinic / image), "-o", str(tmp_path / "out")]) == 0
    (row,) = json.loads((tmp_path / "out" / "predictions.json").read_text())["cases"]
    assert row["error"] is None and row[found] >= 0
    if plan.task.goal.metric == "dice":
        size, *others = (
            SimpleITK.ReadImage(str(path)).GetSize() for path in (clinic / image, tmp_path / "out" / row["mask"])
        )
        assert others == [size]
