"""What a curious lead reads of one patient: by differencing two studies, by asking often, by asking for odd splits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from medsilo.federation import inprocess
from medsilo.plan import parse_plan
from medsilo.runs.schema import Summary
from medsilo.site.settings import make_settings
from tests.hospital import photograph, write_pixels, write_table

PATIENTS = 60
STUDY = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "image-folder", "kind": "classification", "labels": ["no", "yes"], "size": [8, 8]},
    "network": {"name": "small-cnn", "width": 2},
    "training": {"rounds": 1, "batch_size": 64},
    "participation": {"sites": ["a"]},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of sixty patients, one each."""
    folder = tmp_path_factory.mktemp("photos")
    rows = []
    for number in range(PATIENTS):
        write_pixels(folder / f"images/p{number}.png", photograph(number)[0])
        rows.append({"image": f"images/p{number}.png", "label": number % 2, "patient": f"p{number}"})
    write_table(folder / "cases.csv", rows)
    return folder


Asks = Callable[..., Summary]


@pytest.fixture
def asks(photos: Path, tmp_path: Path) -> Asks:
    """A lead, who asks a hospital for a study; its records are in the same folder as its studies."""

    def study(*changes: str, name: str = "", **settings) -> Summary:
        values = {"device": "cpu", "data": {"folder": photos}, **settings}
        folder = tmp_path / (name or f"study-{len(list(tmp_path.glob('study-*')))}")
        return inprocess.run(parse_plan(STUDY, changes), folder=folder, settings=make_settings(values, "x")).summary

    return study


def validation_loss(folder: Path) -> float:
    """What was told after the first round's arrival, before anything was trained."""
    (line,) = [one for one in (folder / "rounds.jsonl").read_text().splitlines()]
    import json

    return float(json.loads(line)["sites"]["a"]["validation_loss"])


def neighbours(photos: Path) -> tuple[str, str, int]:
    """Two `task.shares` that differ in one patient of validation, and the larger part's size."""
    from medsilo.tasks.splits import parts_by_hash

    names = [f"p{number}" for number in range(PATIENTS)]

    def size(train: float) -> int:
        return sum(part == "validation" for part in parts_by_hash(names, (train, 0.8 - train, 0.2), 0).values())

    shares = np.arange(0.30, 0.70, 0.001)
    for low, high in zip(shares, shares[1:], strict=False):
        if size(low) - size(high) == 1 and size(high) >= 10:
            return *(f"task.shares=[{train:.6f},{0.8 - train:.6f},0.2]" for train in (low, high)), size(low)
    raise AssertionError


def attack(asks: Asks, photos: Path, tmp_path: Path, **settings) -> tuple[float, float, float]:
    """n L' - (n - 1) L; the two losses."""
    one, other, cases = neighbours(photos)
    asks(one, name="one", **settings)
    asks(other, name="other", **settings)
    losses = [validation_loss(tmp_path / name) for name in ("one", "other")]
    return cases * losses[0] - (cases - 1) * losses[1], losses[0], losses[1]


def moved(photos: Path) -> str:
    from medsilo.tasks.splits import parts_by_hash

    names = [f"p{number}" for number in range(PATIENTS)]
    one, other, _ = neighbours(photos)
    import json

    parts = [parts_by_hash(names, json.loads(text.partition("=")[2]), 0) for text in (one, other)]
    (patient,) = [name for name in names if parts[0][name] == "validation" != parts[1][name]]
    return patient


def loss_of(photos: Path, patient: str) -> float:
    """The loss of the initial network on one patient's image."""
    plan = parse_plan(STUDY)
    model = plan.algorithm.whole(plan.build_networks()).eval()
    data = plan.task.read("a", ["a"], 0, make_settings({"data": photos}, "x").data)
    for part in (data.train, data.validation, data.test):
        for place, name in enumerate(part.patients):
            if name == patient:
                inputs, target = part[place]
                with torch.no_grad():
                    return float(plan.task.loss(model(inputs[None]), target[None]))
    raise AssertionError


def test_without_protection_two_studies_tell_a_patients_loss_to_five_digits(
    asks: Asks, photos: Path, tmp_path: Path
) -> None:
    found, *_ = attack(asks, photos, tmp_path, public_data=True)
    assert found == pytest.approx(loss_of(photos, moved(photos)), abs=1e-5)


def test_by_default_they_tell_nothing_since_the_hospital_divides_its_patients_itself(
    asks: Asks, photos: Path, tmp_path: Path
) -> None:
    _, one, other = attack(asks, photos, tmp_path)
    assert one == other  # the same patients, whatever the plan says
