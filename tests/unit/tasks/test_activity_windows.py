"""The reader of sensor windows reads and splits a hospital's files, and its errors reveal no patient's name."""

from pathlib import Path

import numpy as np
import pytest
import torch

from medsilo.core.errors import DataError
from medsilo.site.settings import SiteSettings
from medsilo.tasks.sources import DataSource
from medsilo_papers.activity_windows import ActivityWindows
from tests import inprocess
from tests.conftest import make_plan

TASK = ActivityWindows(sensors=3, activities=4)
SITES = ["person-a", "person-b"]


def arrays(seed: int = 0, train: int = 20, test: int = 6) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x_train": random.normal(size=(train, 3, 16)).astype(np.float16),
        "y_train": random.integers(4, size=train).astype(np.uint8),
        "x_test": random.normal(size=(test, 3, 16)).astype(np.float16),
        "y_test": random.integers(4, size=test).astype(np.uint8),
    }


def write(folder: Path, site: str, **changes: np.ndarray | None) -> None:
    content = {name: array for name, array in (arrays() | changes).items() if array is not None}
    np.savez(folder / f"{site}.npz", **content)


def test_all_windows_are_in_one_part_and_the_same_at_every_call(tmp_path: Path) -> None:
    write(tmp_path, "person-a")
    data = TASK.load("person-a", SITES, 3, tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (16, 4, 6)
    assert data.train.inputs.dtype == torch.float32 and data.train.targets.dtype == torch.int64
    own = arrays()
    together = torch.cat([data.train.inputs, data.validation.inputs]).flatten(1)
    expected = torch.from_numpy(own["x_train"].astype(np.float32)).flatten(1)
    assert sorted(together.tolist()) == sorted(expected.tolist())
    np.testing.assert_array_equal(data.test.inputs, own["x_test"])
    again, other = TASK.load("person-a", SITES, 3, tmp_path), TASK.load("person-a", SITES, 4, tmp_path)
    assert torch.equal(data.validation.inputs, again.validation.inputs)
    assert not torch.equal(data.validation.inputs, other.validation.inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "has no y_test; add it"),
        ({"x_train": np.zeros((20, 5, 16), np.float16)}, r"x_train is float16 \[20, 5, 16\], expected"),
        ({"x_train": np.zeros((20, 3, 16), np.int16)}, "x_train is int16"),
        ({"x_test": np.zeros((6, 3, 9), np.float16)}, "windows of different length"),
        ({"y_train": np.zeros(19, np.uint8)}, "expected 20 whole numbers"),
        ({"y_train": np.zeros(20)}, "expected 20 whole numbers"),
        ({"y_train": np.full(20, 4)}, "labels outside 0 to 3"),
        ({"y_train": np.full(20, -1)}, "labels outside 0 to 3"),
        ({"x_train": np.full((20, 3, 16), np.nan)}, "x_train holds NaN or infinity"),
        ({"x_train": np.zeros((1, 3, 16)), "y_train": np.zeros(1, int)}, "too few for training and validation"),
        ({"x_train": np.array([{"an": "object"}])}, "can't be read"),
    ],
)
def test_files_that_are_wrong_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    write(tmp_path, "person-a", **changes)
    with pytest.raises(DataError, match=message) as caught:
        TASK.load("person-a", SITES, 0, tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_an_absent_folder_or_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="set 'data' in the site's"):
        TASK.load("person-a", SITES, 0, None)
    with pytest.raises(DataError, match=r"expected <site>\.npz in the data folder") as caught:
        TASK.load("person-a", SITES, 0, tmp_path)
    assert str(tmp_path) not in str(caught.value)
    (tmp_path / "person-a.npz").write_text("no numbers")
    with pytest.raises(DataError, match="can't be read"):
        TASK.load("person-a", SITES, 0, tmp_path)


def test_a_study_over_recorded_windows(tmp_path: Path) -> None:
    for place, site in enumerate(SITES):
        write(tmp_path, site, **arrays(place, train=40))
    task = ["task.name=activity-windows", "task.sensors=3", "task.activities=4"]
    plan = make_plan("adafed", *task, "algorithm.pretraining.epochs=1", sites=SITES)
    run = inprocess.run(plan, settings=SiteSettings(device="cpu", data=tmp_path))
    assert run.summary.details.pretraining["cases"] == 14  # each of two sites uses 20 % of 32 cases, rounded up to 7
    assert set(run.models) == set(SITES)


def test_real_windows_if_they_are_there(shared_data: Path) -> None:
    folder = shared_data / "har_uci"
    if not folder.is_dir():
        pytest.skip("no real windows: the data folder has no har_uci")
    task = ActivityWindows()
    sites = sorted(path.stem for path in folder.glob("*.npz"))
    assert len(sites) == 20
    for site in sites:
        data = task.load(site, sites, 0, folder)
        assert data.train.inputs.shape[1:] == (9, 128)
        assert data.train.targets.unique().tolist() == [0, 1, 2, 3, 4, 5]
        assert len(data.validation) == round(0.2 * (len(data.train) + len(data.validation)))


def test_a_survey_does_not_mind_that_a_site_is_one_person(tmp_path: Path) -> None:
    write(tmp_path, "person-a")
    survey = TASK.survey("person-a", SITES, 0, DataSource(folder=tmp_path))
    assert survey.usable and survey.parts["train"].patients == 1
    assert [problem.severity for problem in survey.problems if "two parts" in problem.what] == ["note"]
