"""Two hospitals have the same images, except that one hospital has 40 images of an additional patient. Every disclosed
count of the two hospitals differs by at most one rounding step.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp

import pytest
from torch import Tensor

from medsilo.plan import parse_plan
from medsilo.runs.messages import StudyMessage
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import make_settings
from medsilo.tasks.metrics import CHANCES, CONFUSION, RELIABILITY
from tests import inprocess
from tests.hospital import photograph, write_pixels, write_table
from tests.unit.exchange.test_leaks import Listening
from tests.unit.federation.test_protection import STUDY

PATIENTS, IMAGES = 44, 40
LEAST = STEP = 5
ORDINARY = {f"{n}-{image}.png": n for n in range(3 * PATIENTS) for image in range(1 + n // 3 % 3)}
ODD = [f"odd-{image}.png" for image in range(100)]
Attack = Callable[..., list[StudyMessage]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    for seed, name in enumerate([*ORDINARY, *ODD]):
        write_pixels(folder / "images" / name, photograph(seed)[0])
    return folder


@pytest.fixture
def told(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_key: None) -> Attack:
    def study(odd: str, number: int, *changes: str) -> list[StudyMessage]:
        rows = [(name, f"p{n}", PARTS[n % 3], n // 3 % 2) for name, n in ORDINARY.items()]
        rows += [(name, "odd", odd, 1) for name in ODD[:number]]
        columns = ("image", "patient", "part", "label")
        write_table(
            images / "cases.csv", [dict(zip(columns, (f"images/{row[0]}", *row[1:]), strict=True)) for row in rows]
        )
        monkeypatch.setattr(Listening, "heard", heard := [], raising=False)
        monkeypatch.setattr("medsilo_lab.engines.inprocess.Loop", Listening)
        data = {"folder": str(images), "cache_folder": str(images.parent / "cache")}  # each image is decoded once
        settings = make_settings({"device": "cpu", "data": data}, "x")
        inprocess.run(parse_plan(STUDY, changes), folder=Path(mkdtemp(dir=tmp_path)) / "study", settings=settings)
        return heard

    return study


def counts(answers: list[StudyMessage]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for facts in (message.facts for message in answers):
        found |= {f"{part} cases": [number] for part, number in facts["cases"].items()}
        found |= {f"{part} classes": own for part, own in facts.get("classes", {}).items()}
        found |= {
            f"of {name}": [*own.values()] for name, own in (facts.get("outcome") or {}).items() if name == "chosen"
        }
        found |= {"samples": [facts["samples"]]} if "samples" in facts else {}
        for name, own in facts.get("counts", {}).items():
            found[name] = own if name in (CONFUSION, CHANCES) else own[1:] if name != RELIABILITY else []
    return found


def statistics_in(answers: list[StudyMessage]) -> list[Mapping[str, Tensor]]:
    return [message.groups["statistics"] for message in answers if "statistics" in message.groups]


def moved(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> dict[str, float]:
    assert one.keys() == other.keys()
    return {
        name: max((abs(a - b) for a, b in zip(own, other[name], strict=True)), default=0) for name, own in one.items()
    }


@pytest.mark.parametrize("part", PARTS)
def test_one_patient_with_many_images_moves_each_count_by_its_step(told: Attack, part: str) -> None:
    without, one, having = (counts(told(part, number)) for number in (0, 1, IMAGES))
    assert {CONFUSION, CHANCES, "accuracy", "samples", "train classes"} <= without.keys()
    found = moved(without, having)
    assert max(of_patients(found).values()) <= STEP, found
    assert max(by for name, by in found.items() if name not in of_patients(found)) <= LEAST * IMAGES
    # hospitals count classes from labels, without a network
    by_labels = [name for name in one if name.endswith("classes")]
    assert {name: one[name] for name in by_labels} == {name: having[name] for name in by_labels}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsm", "adafed"])
def test_nor_does_it_in_what_a_method_tells(told: Attack, method: str) -> None:
    """FedSM's hospitals send the number of cases for which each model was chosen, and AdaFed's hospitals send the
    number of cases in their statistics.
    """
    changes = (f"algorithm.name={method}", "training.rounds=2")
    without, having = (told("train", number, *changes) for number in (0, IMAGES))
    assert max(of_patients(moved(counts(without), counts(having))).values()) <= STEP
    rests = [float(own["samples"]) for answers in (without, having) for own in statistics_in(answers)]
    assert len(rests) == 2 * (method == "adafed") and (not rests or abs(rests[0] - rests[1]) <= LEAST * IMAGES)
    without, having = (told("validation", number, *changes) for number in (0, IMAGES))
    assert ("of chosen" in counts(without)) is (method == "fedsm")
    assert max(of_patients(moved(counts(without), counts(having))).values()) <= STEP


def of_patients(found: Mapping[str, float]) -> dict[str, float]:
    return {name: by for name, by in found.items() if not name.endswith(("cases", "samples"))}


def test_a_part_that_is_mostly_one_patients_tells_no_score(told: Attack) -> None:
    """A rounding step wider than the range of scores would round each score to 0."""
    scores = [[facts.facts.get("validation") for facts in told("validation", number)] for number in (IMAGES, 100)]
    assert [any(score is not None for score in each) for each in scores] == [True, False]
