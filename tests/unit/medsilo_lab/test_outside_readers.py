"""Another package's reader reads a hospital's files in a format that medsilo does not know."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import medsilo
from medsilo.extend import DataSource, Scan, VolumeFolder
from medsilo.registry import TASKS
from medsilo.site.settings import make_settings
from medsilo.tasks.site_data import records_of
from tests.conftest import SITES, make_plan
from tests.outside import installed_as

ENTRIES = "[medsilo.tasks]\ncurves = curves:Curves\n"
STEPS = 40  # each curve has two windows of 16 steps, and further steps that fill no window


installed = installed_as("outside-curves", ENTRIES)


def curve(wild: float, seed: str) -> str:
    drawn = random.Random(seed)
    return "".join(f"{drawn.gauss(0, 1) * wild}\n" for _ in range(STEPS))


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    for number in range(10):
        kind = "calm" if number % 2 else "uneven"
        (tmp_path / "data" / kind).mkdir(parents=True, exist_ok=True)
        for time in (1, 2):
            text = curve(1.0 if number % 2 else 3.0, f"{number} {time}")
            (tmp_path / "data" / kind / f"p{number}-{time}.txt").write_text(text)
    (tmp_path / "data/calm/p1-3.txt").write_text("high\n")
    (tmp_path / "data/calm/p3-3.txt").write_text("1\n")
    return tmp_path / "data"


def source(folder: Path, **data: object) -> DataSource:
    found = make_settings({"data": {"folder": str(folder), **data}}, "x").data
    assert found
    return found


OWN = {"label_map": {"calm": "even"}, "patient": r"(p\d+)-"}


def test_a_hospital_describes_files_of_an_outside_format(hospital: Path) -> None:
    task = TASKS["curves"]()
    survey = task.survey("a", ["a"], 0, source(hospital, **OWN))
    assert survey.usable and survey.patients_named
    assert {problem.severity: problem.count for problem in survey.problems} == {"left out": 1}
    told = " ".join(problem.what for problem in survey.problems)
    assert "no numbers; export them again" in told and "fewer than 16 numbers" in told
    assert {part: (one.patients, one.cases) for part, one in survey.parts.items()} == {
        "train": (6, 24),
        "validation": (2, 8),
        "test": (2, 8),
    }
    data = task.site_data("a", ["a"], 0, source(hospital, **OWN))
    inputs, target = data.train[0]
    name = records_of(data.train)[0]  # type: ignore[index]
    first = [float(line) for line in (hospital / name).read_text().split()[:16]]
    assert inputs.tolist() == [pytest.approx(first)] and int(target) == int(name.startswith("uneven"))
    strange = task.survey("a", ["a"], 0, source(hospital, patient=OWN["patient"]))
    assert not strange.usable and "plan's (even, uneven)" in str(strange)


def test_a_table_and_the_disk_serve_an_outside_format(hospital: Path, tmp_path: Path) -> None:
    rows = [
        f"{path.relative_to(hospital)},{path.parent.name},{path.stem[:2]},{'test' if path.stem[1] in '01' else 'train'}"
        for path in sorted(hospital.glob("*/p?-[12].txt"))
    ]
    (hospital / DataSource.TABLE).write_text("\n".join(["image,label,patient,part", *rows]))
    own = source(hospital, label_map=OWN["label_map"], cache_folder=str(tmp_path / "ready"))
    task = TASKS["curves"]()
    survey = task.survey("a", ["a"], 0, own)
    assert survey.fixed and survey.parts["test"].patients == 2 and not survey.parts["validation"].cases
    kept = sorted((tmp_path / "ready").iterdir())
    assert len(kept) == 20
    before = [path.stat().st_mtime_ns for path in kept]
    task.survey("a", ["a"], 0, own)
    assert [path.stat().st_mtime_ns for path in kept] == before


def test_a_study_learns_from_an_outside_format(hospital: Path, tmp_path: Path) -> None:
    for kind, site in ((kind, site) for site in SITES for kind in ("even", "uneven")):
        (tmp_path / "all" / site / kind).mkdir(parents=True)
        for number in range(6):
            text = curve(1.0 if kind == "even" else 3.0, f"{site} {number}")
            (tmp_path / "all" / site / kind / f"{kind}{number}.txt").write_text(text)
    plan = make_plan("fedavg", "task.name=curves", "training.rounds=2", "training.batch_size=8")
    run = medsilo.run(plan, folder=tmp_path / "run", data=tmp_path / "all", device="cpu", engine="inprocess")
    assert run.plan.packages["outside-curves"].version == "1.0" and run.plan.network.name == "activity-cnn"
    # the reader declares that a patient's inputs do not depend on other patients
    assert run.plan.task.not_private == ""


class Stored(VolumeFolder):
    name: str = "stored"

    def scan_of(self, files: tuple[Path, ...]) -> Scan:
        return Scan(np.load(files[0])[None], np.eye(4), (1.0, 1.0, 1.0), header=None)

    def mask_reader(self, source: DataSource) -> Callable[[Scan, Path], np.ndarray]:
        return lambda scan, path: np.load(path)


def test_volumes_of_an_outside_format_are_read_as_volumes_are(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    for number in range(6):
        image = drawn.normal(size=(4, 8, 8)).astype(np.float32)
        for kind, values in {"images": image, "masks": (image > 0).astype(np.int64)}.items():
            (tmp_path / kind).mkdir(exist_ok=True)
            np.save(tmp_path / kind / f"p{number}.npy", values)
    task = Stored(labels=["high"], size=[8, 8, 4])  # type: ignore[arg-type]
    data = task.site_data("a", ["a"], 0, source(tmp_path, images="images/*.npy", labels="masks/*.npy"))
    parts = [data.train, data.validation, data.test]
    assert sum(map(len, parts)) == 6  # type: ignore[arg-type]
    image, mask = data.train[0]
    assert image.shape == (1, 4, 8, 8) and mask.shape == (4, 8, 8)
    name = records_of(data.train)[0]  # type: ignore[index]
    assert np.array_equal(mask.numpy(), np.load(tmp_path / "masks" / f"{name}.npy"))
