"""Only the class Disclosure discloses numbers from patients' data, so messages contain no exact scores and counts."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.federation.disclosure import Disclosure
from medsilo.federation.evaluation import Evaluation
from medsilo.federation.trainer import Trainer
from medsilo.plan import parse_plan
from medsilo.runs.messages import ANSWERS, LETTERED, StudyMessage
from medsilo.site.settings import SiteSettings, make_settings
from tests import inprocess
from tests.hospital import NAMES, write_photos
from tests.unit.exchange.test_leaks import Listening
from tests.unit.federation.test_protection import STUDY

LOSS, SCORE, EACH = 0.7310585786, 0.6180339887, 0.5772156649  # numbers that occur nowhere else in messages
pytestmark = pytest.mark.usefixtures("known_key")
# fields of an answer that do not depend on patients' data
MACHINE = {"seconds", "memory", "packages", "task", "round", "study"}


def numbers(told: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(told, dict):
        for key, value in told.items():
            if key not in MACHINE:
                yield from numbers(value, f"{name}.{key}")
    elif isinstance(told, list):
        for value in told:
            yield from numbers(value, name)
    elif isinstance(told, int | float) and not isinstance(told, bool):
        yield name, float(told)


def hospital(folder: Path) -> SiteSettings:
    return make_settings({"device": "cpu", "data": str(write_photos(folder, NAMES))}, "x")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[StudyMessage]:
    """Record all answers of the sites; known numbers replace exact scores and losses, so that a test can search for the
    numbers.
    """
    evaluate, heard = Evaluation.evaluate, []

    def exact(self: Evaluation, *given: Any, **more: Any) -> Any:
        _, _, measures = evaluate(self, *given, **more)
        exact = {name: torch.full_like(own, EACH) for name, own in measures.items() if own.is_floating_point()}
        return LOSS, SCORE, measures | exact

    monkeypatch.setattr(Evaluation, "evaluate", exact)
    monkeypatch.setattr(Trainer, "work", lambda self, number, phase, stop: LOSS)
    monkeypatch.setattr(Listening, "heard", heard, raising=False)
    monkeypatch.setattr("medsilo_lab.engines.inprocess.Loop", Listening)
    return heard


def test_no_exact_number_is_in_any_message(heard: list[StudyMessage], tmp_path: Path) -> None:
    settings = hospital(tmp_path / "photos")
    for method in ("fedavg", "fedbn", "ditto"):
        plan = parse_plan({**STUDY, "algorithm": {"name": method}})
        assert inprocess.run(plan, folder=tmp_path / method / "study", settings=settings).summary.finished
    assert {message.facts["task"] for message in heard} == {"join", "round", "deliver", "test"}
    told = [one for message in heard for one in numbers(message.facts)]
    assert {name for name, _ in told} >= {".validation", ".test", ".cases.train"}
    cases = [round(share * len(NAMES)) for share in (0.6, 0.2, 0.2)]
    assert cases == [36, 12, 12]
    for name, value in told:
        assert not any(math.isclose(value, exact, rel_tol=1e-6) for exact in (LOSS, SCORE, EACH)), name
        assert not (name.startswith(".cases") and value in cases), name


def test_a_field_of_an_answer_is_made_in_disclosure_alone(
    heard: list[StudyMessage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class Disclosure writes each field of an answer, except fields that do not depend on patients' data."""
    told: list[set[str]] = []
    tell = Disclosure.disclose

    def noted(self: Disclosure, found: Any) -> dict[str, Any]:
        said = tell(self, found)
        told.append({*said, "cases", "patients", "by_patient", "suppressed", "noisy", "warnings"})
        return said

    monkeypatch.setattr(Disclosure, "disclose", noted)
    settings = hospital(tmp_path / "photos")
    inprocess.run(parse_plan(STUDY), folder=tmp_path / "study", settings=settings)
    assert len(heard) == len(told) == 4
    for message, own in zip(heard, told, strict=True):
        # the privacy ledger adds the field `ledger` to an answer, and a canary adds the field `readiness`
        beside = {"ledger", "readiness"}
        assert set(ANSWERS[message.facts["task"]].model_fields) == own | MACHINE | beside


def test_no_message_is_forgotten() -> None:
    """The test that searches for exact numbers covers all kinds of answers, except the messages of secure
    aggregation.
    """
    assert set(ANSWERS) == {"join", "round", "deliver", "test", *LETTERED}
