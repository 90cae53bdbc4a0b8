"""A number leaves a hospital only if the type of its field in an answer declares the number."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from torch import nn

from medsilo.airlock.border import Border, HeldBack
from medsilo.core.errors import Refused
from medsilo.core.tensors import Groups
from medsilo.federation.participant import Participant, parts_of
from medsilo.federation.raw_results import ExactRound
from medsilo.federation.script_bits import bits_of
from medsilo.federation.site_context import SiteContext, UpdateCodec
from medsilo.learning.compute import Stop
from medsilo.runs.disclosed import Disclosed, declarations, merged
from medsilo.runs.messages import DISCLOSED, Delivered, Number, Request, StudyMessage, Trained
from medsilo.runs.rounds import SiteRound
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import SiteData
from medsilo_lab.script_plan import plan_of_script
from tests.conftest import make_plan
from tests.sites import site_of

ENTROPY = 0.5772156649


class Talkative(Participant):
    """A participant whose training computes one more number in each round."""

    name = "entropy"

    def find(self, asked: Request, groups: Groups, stop: Stop) -> Any:
        found = super().find(asked, groups, stop)
        if isinstance(found, ExactRound):
            return replace(found, trained={**found.trained, self.name: ENTROPY})
        return found


def talkative(context: SiteContext, data: SiteData | None, codec: UpdateCodec) -> Talkative:
    return Talkative(context, parts_of(context, data), codec)


@pytest.mark.parametrize("name", ["entropy", "validation", "seconds", "test_loss"])
def test_an_undeclared_number_of_a_round_is_not_sent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number may also not use the name of a value with other rules of disclosure."""
    monkeypatch.setattr(Talkative, "name", name)
    plan = make_plan("fedavg", sites=["a"])
    site = site_of(plan, "a", ["a"], SiteSettings(device="cpu"), tmp_path, kind=talkative)
    groups = {group.name: group.of(site.participant.state.modules) for group in plan.course.phase_of(1).sent}
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",))
    with pytest.raises(Refused, match=f"the value {name} is not declared"):
        site.answer(asked.message(groups))


def test_a_class_of_answers_declares_each_of_its_fields() -> None:
    class Undeclared(Trained):
        entropy: Number | None = None

    class Declared(Trained):
        entropy: Annotated[Number | None, Disclosed("mean", "entropy", of="train", between=(0, 1))] = None

    with pytest.raises(TypeError, match="Undeclared.entropy has no declaration"):
        declarations(Undeclared)
    assert declarations(Declared).keys() - DISCLOSED["round"].keys() == {"entropy"}
    with pytest.raises(TypeError, match="two declarations of train_loss differ"):
        merged([DISCLOSED["round"], {"train_loss": DISCLOSED["round"]["validation"]}])
    for mean in ({"words": ""}, {"of": None}, {"of": "counts"}):
        with pytest.raises(TypeError, match="a mean needs words"):
            replace(DISCLOSED["round"]["train_loss"], **mean)


def test_the_record_has_each_mean_of_a_round() -> None:
    means = {name for name, own in DISCLOSED["round"].items() if own.form == "mean"}
    assert {"train_loss", "validation", "validation_loss"} <= means <= SiteRound.model_fields.keys()


def test_a_training_script_writes_only_declared_values(tmp_path: Path) -> None:
    """The hospital itself writes all values that the declaration does not leave to the script, and holds back an answer
    with an undeclared value.
    """
    plan = plan_of_script(nn.Linear(2, 2), tmp_path, {"name": "fedavg"}, rounds=2, minimum=1, sites=["a"])
    counted = {"train": 53, "validation": 20, "test": 10}
    facts: dict[str, Any] = {
        **{"task": "deliver", "round": 2, "study": "other", "packages": {"odd": 1}, "cases": counted},
        **{
            "patients": {},
            "by_patient": True,
            "seconds": 1e8,
            "memory": 1e8,
            "suppressed": ["test"],
            "noisy": ["test"],
        },
        **{"warnings": [{"kind": "near", "numbers": [1, 2]}], "ledger": "Erna", "readiness": "Erna"},
        **{"validation": 0.123456, "validation_loss": 0.7, "outcome": None},
    }
    settings = SiteSettings(device="cpu", approval="none")
    border = Border(SiteContext(plan, "a", ["a"], settings, tmp_path / "study/sites/a"))
    (tmp_path / "study/sites/a").mkdir(parents=True)
    asked = Request(task="deliver", round=2, study="study", plan=plan.hash, sites=("a",))
    left = border.answer(asked, {}, facts, {}, seconds=1.0, memory=2.0).facts
    assert left.keys() <= Delivered.model_fields.keys()
    assert (left["study"], left["packages"], left["seconds"], left["memory"]) == ("study", plan.code, 1.0, 2.0)
    assert left["warnings"] == left["suppressed"] == [] and not left.keys() & {"noisy", "ledger", "readiness"}
    assert left["cases"] == left["patients"] == {"train": 50, "validation": 20, "test": 10}
    assert left["validation"] != facts["validation"]
    with pytest.raises(HeldBack):
        border.answer(asked, {}, {**facts, "entropy": ENTROPY}, {}, seconds=1.0, memory=2.0)
    with pytest.raises(Refused, match="entropy is not declared"):
        bits_of(StudyMessage({}, {**left, "entropy": ENTROPY}))
