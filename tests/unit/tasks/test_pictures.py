"""Test PNG files, pictures of the input layer, the report's panel of cases, and the disclosure report."""

import base64
import re
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
import torch

from medsilo import cli
from medsilo.check.disclosure import describe, leaks
from medsilo.flare.jobs import plan_of
from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.plan import load_plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.overlays import FOUND, THERE, draw_found, draw_images
from medsilo_lab.report.page import write
from medsilo_lab.study.scores import read_measures
from tests import inprocess
from tests.conftest import make_plan

JOBS = Path(__file__).resolve().parents[3] / "jobs"
SMALL = ["task.patients=4", "task.slices=3", "task.size=32", "network.name=unet", "network.features=[2, 4]"]
# the task's name comes first, because the name changes the other keys' default values
DRAWN = ["task.name=synthetic-prostate", *SMALL]


def read(path: Path) -> np.ndarray:
    return SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))


@pytest.mark.parametrize("shape", [(3, 16, 12), (1, 16, 12), (2, 4, 16, 12)])
def test_images_before_and_after(shape: tuple[int, ...], tmp_path: Path) -> None:
    norm = AmplitudeNorm(shape)
    images = torch.rand(2, *shape)
    norm(images + 1)
    norm.freeze()
    draw_images(norm, images, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{kind}-{number}.png" for kind in ("after", "before") for number in (1, 2)
    ]
    before = read(tmp_path / "before-1.png")
    assert before.shape == ((16, 12, 3) if shape[0] == 3 else (16, 12))
    middle = images[0] if images.ndim == 4 else images[0][:, 2]
    scaled = (middle[0] - images.min()) / (images.max() - images.min())
    first = before[..., 0] if before.ndim == 3 else before
    assert np.abs(first / 255 - scaled.numpy()).max() < 0.003
    draw_images(norm, torch.rand(2, 3, 9), tmp_path / "signals")
    assert not (tmp_path / "signals").exists()


def test_the_report_shows_them_and_stays_one_file(tmp_path: Path) -> None:
    plan = load_plan(JOBS / "harmofl/app/config/plan.yaml", ["training.rounds=2", "task.patients=6", "task.size=32"])
    inprocess.run(plan, folder=tmp_path / "run")
    page = write([tmp_path / "run"], tmp_path / "page.html", "one").read_text()
    images = re.findall(r'<img [^>]*src="([^"]+)"', page)
    assert len(images) == 3 * 3 * 2
    for image in images:
        assert base64.b64decode(image.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert 'id="harmonised"' in page
    for site in plan.participation.sites:
        assert f"image 1 of {site} before" in page
    (tmp_path / "run/sites/hospital-a/pictures/before-1.png").write_bytes(b"<script>")
    page = write([tmp_path / "run"], tmp_path / "page.html", "one").read_text()
    assert page.count("image 3 of hospital-b before") == 1 and "image 3 of hospital-a before" not in page


def test_methods_without_an_input_layer_have_no_panel(tmp_path: Path) -> None:
    inprocess.run(make_plan("fedavg", "training.rounds=1"), folder=tmp_path / "run")
    assert 'id="harmonised"' not in write([tmp_path / "run"], tmp_path / "page.html", "one").read_text()


# ---------------------------------------------------------------------------------------------------- leaks
def test_the_disclosure_lists_what_really_leaves(tmp_path: Path) -> None:
    for method in ("harmofl", "fedavg", "fedbn", "local"):
        plan = make_plan(method, "training.rounds=3")
        told = [0] * 3
        for leak in leaks(plan):
            for number in range(leak.first, leak.last + 1):
                told[number - 1] += leak.bytes
        sent = [line.sites["hospital-a"].bytes_up for line in inprocess.run(plan).history]
        assert told == sent, method


def test_the_disclosure_says_what_statistics_tell() -> None:
    text = "\n".join(describe(plan_of(JOBS / "adafed"), SiteSettings()))
    assert "mean and variance of 3 layers' inputs" in text
    assert "declared public" in text


def test_the_disclosure_says_when_the_amplitude_leaves() -> None:
    plan = make_plan("harmofl", "training.batch_size=4", "algorithm.amplitude.decay=0.0")
    text = "\n".join(describe(plan, SiteSettings()))
    assert "amplitude" in text and "round 1 only" in text and "no phase" in text
    assert "covers 8 images and patients" in text
    assert "amplitude" not in "\n".join(describe(make_plan("fedavg"), SiteSettings()))
    assert "no tensor" in describe(make_plan("local"), SiteSettings())


def test_the_command(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "medsilo.yaml").write_text("min_patients_per_metric: 1000\n")
    arguments = ["disclosure", str(JOBS / "harmofl"), "--set", "training.rounds=3", "--settings", str(tmp_path)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "covers 1000 images and patients" in text
    assert "2 to 3" in text
    assert cli.main(["disclosure", "nowhere"]) == 1


# The findings


def square(first: int, last: int, size: int = 64) -> torch.Tensor:
    mask = torch.zeros(1, size, size, dtype=torch.bool)
    mask[:, first:last, first:last] = True
    return mask


def test_outlines_lie_where_the_masks_end(tmp_path: Path) -> None:
    image = torch.rand(1, 64, 64)
    for name in ("a", "b"):
        draw_found(image, square(30, 50), square(10, 20), tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    pixels = read(tmp_path / "a.png")
    assert pixels.shape == (192, 192, 3)  # the picture is three times as large as the image, so that outlines look thin
    there, found = ((pixels == colour).all(2) for colour in (THERE, FOUND))
    assert {tuple(edge) for edge in np.argwhere(there)[[0, -1]]} == {(30, 30), (59, 59)}
    assert there[30, 30:60].all() and not there[33:57, 33:57].any()
    assert np.argwhere(found).min() >= 90 and np.argwhere(found).max() <= 149
    assert 0.3 < found[90, 90:150].mean() < 0.7  # readers recognise a dashed line without its colour
    grey = pixels[62:88, 62:88]
    assert (grey[..., 0] == grey[..., 1]).all()


def test_of_a_volume_the_fullest_slice_is_drawn(tmp_path: Path) -> None:
    right = torch.zeros(1, 3, 64, 64, dtype=torch.bool)
    right[0, 2, 10:20, 10:20] = True
    draw_found(torch.rand(1, 3, 64, 64), torch.zeros_like(right), right, tmp_path / "a.png")
    assert (read(tmp_path / "a.png") == THERE).all(2).any()


def test_sites_draw_their_best_median_and_worst_test_case(tmp_path: Path) -> None:
    changes = ["training.rounds=1", "training.batch_size=8", *DRAWN]
    plan = make_plan("fedavg", *changes, sites=["hospital-a", "hospital-b"])
    inprocess.run(plan, folder=tmp_path / "run")
    page = write([tmp_path / "run"], tmp_path / "page.html", "A run").read_text()
    for site in plan.participation.sites:
        folder = tmp_path / "run/sites" / site
        assert {path.name for path in (folder / "pictures").iterdir()} == {
            "test-best.png",
            "test-median.png",
            "test-worst.png",
        }
        scores = read_measures(folder)[0]["dice"].sort().values
        for score in (scores[-1], scores[len(scores) // 2], scores[0]):
            assert f'<span class="score">{score:.3f}</span>' in page
        best = base64.b64encode((folder / "pictures/test-best.png").read_bytes()).decode()
        assert best in page


def test_a_site_that_allows_no_pictures_draws_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("fedavg", "training.rounds=1", *DRAWN, "task.patients=12")
    monkeypatch.setattr(type(plan.task), "synthetic", False)
    inprocess.run(plan, folder=tmp_path / "run", settings=SiteSettings(device="cpu", pictures=False))
    assert not list((tmp_path / "run").glob("sites/*/pictures/*"))
