"""Hospitals get pictures of predicted masks in their reports and from `medsilo predict`."""

import base64
import csv
import json
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
from PIL import Image

from medsilo.cli import main
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import make_settings
from medsilo.tasks.overlays import FOUND, THERE
from medsilo.tasks.scans import Scan
from medsilo_lab.deploy.montage import COLOURS, TILE, tile
from medsilo_lab.deploy.source import Source
from medsilo_lab.engines import inprocess
from medsilo_lab.report.page import write
from medsilo_lab.study.scores import read_measures
from tests.hospital import photograph, write_balls, write_pixels
from tests.unit.deploy.test_predict import write_run

PATIENTS = [f"p{number}" for number in range(9)]
# the test needs a fixed split of the patients, which depends on this key
pytestmark = pytest.mark.usefixtures("known_key")
U_NET = {"name": "unet", "features": [4, 8]}
TASKS = {
    "volumes": {"name": "nifti-folder", "labels": ["ball", "tumour"], "size": [16, 16, 8], "target_spacing": [2, 2, 3]},
    "slices": {"name": "nifti-folder", "labels": ["ball"], "size": [16, 16], "dimensions": 2},
    "photographs": {"name": "image-folder", "labels": ["square", "disc"], "size": [32, 32]},
}


def plan_of(kind: str) -> Plan:
    network = {**U_NET, "dimensions": 3 if kind == "volumes" else 2}
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": TASKS[kind],
            "network": network,
            "training": {"rounds": 1, "batch_size": 4},
            "participation": {"sites": ["a"]},
        }
    )


def data_of(kind: str, folder: Path) -> dict:
    if kind != "photographs":
        return {"folder": str(write_balls(folder, PATIENTS)), "label_map": {"1": "ball"}}
    for number, patient in enumerate(PATIENTS):
        for place, values in zip(("images", "labels"), photograph(number), strict=True):
            write_pixels(folder / place / f"{patient}.png", values)
    return {"folder": str(folder), "label_map": {"255": "disc"}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_a_hospital_sees_its_best_median_and_worst_test_case(kind: str, tmp_path: Path) -> None:
    own = {"device": "cpu", "pictures": True, "min_patients_per_metric": 1}
    settings = make_settings({**own, "data": data_of(kind, tmp_path / "data")}, "x")
    inprocess.run(plan_of(kind), folder=tmp_path / "run", settings=settings)
    folder = tmp_path / "run/sites/a"
    pictures = {path.stem: np.array(Image.open(path)) for path in (folder / "pictures").iterdir()}
    assert set(pictures) == {"test-best", "test-median", "test-worst"}
    for pixels in pictures.values():
        assert (pixels == THERE).all(2).any() and min(pixels.shape[:2]) >= 192
    if kind != "slices":  # after one round, the network predicts no structure in single slices
        assert any((pixels == FOUND).all(2).any() for pixels in pictures.values())
    scores = read_measures(folder)[0]["dice"].sort().values
    page = write([tmp_path / "run"], tmp_path / "page.html", "A run").read_text()
    for score in (scores[-1], scores[len(scores) // 2], scores[0]):
        assert f'<span class="score">{score:.3f}</span>' in page
    best = base64.b64encode((folder / "pictures/test-best.png").read_bytes()).decode()
    assert best in page


def test_a_hospital_that_allows_no_pictures_has_none(tmp_path: Path) -> None:
    settings = make_settings({"device": "cpu", "data": data_of("slices", tmp_path / "data")}, "x")
    inprocess.run(plan_of("slices"), folder=tmp_path / "run", settings=settings)
    assert not list((tmp_path / "run").rglob("*.png"))


def predicted(kind: str, tmp_path: Path, *options: str) -> tuple[Path, list[dict]]:
    write_run(tmp_path / "run", plan_of(kind), "global/best.safetensors")
    images = tmp_path / "data/images"
    assert main(["predict", str(tmp_path / "run"), str(images), "-o", str(tmp_path / "out"), *options]) == 0
    return tmp_path / "out", json.loads((tmp_path / "out/predictions.json").read_text())["cases"]


@pytest.mark.slow
def test_structures_have_their_names_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data_of("volumes", tmp_path / "data")
    out, rows = predicted("volumes", tmp_path)
    assert {key for row in rows for key in row if "volume" in key} == {"volume_ml_ball", "volume_ml_tumour"}
    with (out / "predictions.csv").open() as file:
        assert {"volume_ml_ball", "volume_ml_tumour"} <= set(next(csv.DictReader(file)))
    assert "tumour: " in capsys.readouterr().out


@pytest.mark.slow
def test_masks_have_the_hospitals_own_values(tmp_path: Path) -> None:
    """Predicted masks have the pixel values of the hospital's reference masks, and these values may exceed 255."""
    data_of("volumes", tmp_path / "data")
    (tmp_path / "local").mkdir()
    (tmp_path / "local/medsilo.yaml").write_text("data: {folder: /x, label_map: {7: ball, 300: tumour, 301: tumour}}\n")
    out, rows = predicted("volumes", tmp_path, "--settings", str(tmp_path / "local"))
    task, values = Source.open(tmp_path / "run").plan.task, set()
    for row in rows:
        mask = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(out / row["mask"])))
        values |= set(np.unique(mask).tolist())
        counted = np.prod(Scan.read(out / row["mask"]).spacing) / 1000 * np.array([(mask == v).sum() for v in (7, 300)])
        assert counted == pytest.approx([row["volume_ml_ball"], row["volume_ml_tumour"]], abs=1e-4)
    assert task.labels == ("ball", "tumour") and {0} < values <= {0, 7, 300}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_predict_draws_what_it_found(kind: str, tmp_path: Path) -> None:
    data_of(kind, tmp_path / "data")
    out, rows = predicted(kind, tmp_path)
    picture = np.array(Image.open(out / "overview.png"))
    assert picture.shape[0] > 3 * TILE and picture.shape[1:] == (4 * TILE, 3)
    assert any((picture == colour).all(2).sum() > 50 for colour in COLOURS[: len(TASKS[kind]["labels"])])
    assert len(rows) == 9


def test_a_tile_shows_the_fullest_slice_in_the_right_proportions() -> None:
    values, labels = np.random.default_rng(0).random((1, 5, 20, 40)).astype(np.float32), np.zeros((5, 20, 40), np.uint8)
    labels[3, 5:15, 10:30] = 1
    labels[1, 5:8, 10:12] = 2
    pixels = tile(values, labels, (1.0, 1.0, 5.0))
    assert pixels.shape == (TILE, TILE, 3) and not pixels[: TILE // 4 - 1].any()
    places = np.argwhere((pixels == COLOURS[0]).all(2))
    assert np.abs(places.min(0) - [64 + 32, 64]).max() <= 2 and np.abs(places.max(0) - [64 + 95, 191]).max() <= 2
    assert not (pixels == COLOURS[1]).all(2).any()
    tall = tile(values, labels, (0.5, 2.0, 5.0))
    assert not tall[:, : TILE // 4 - 1].any() and tall[0, TILE // 2].any()
