"""Canaries are test jobs that collect technical facts about each hospital for the lead, and send no patient data."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nvflare.fuel.flare_api.api_spec import MonitorReturnCode

from medsilo.check.canary import BYTES, LineMeter, data_state
from medsilo.check.disclosure import left_in_short
from medsilo.core.errors import PlanError, Refused
from medsilo.federation.permission import Permission, is_canary
from medsilo.plan import load_plan, parse_plan
from medsilo.runs.messages import StudyMessage
from medsilo.runs.schema import SiteResult
from medsilo.runs.site_files import Readiness
from medsilo.site.approvals import AskingPlan
from medsilo.site.settings import make_settings
from medsilo_lab.consortium import lead
from medsilo_lab.consortium.canary import CanaryResult, _plan_for, _sent, _why_not
from medsilo_lab.engines import inprocess
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan

READY = {"data": "readable", "device": "cpu", "gpus_promised": 0, "gpus": 0, "memory": 12, "disk": 80, "line": 3e6}


def settings_with(folder: Path) -> Any:
    return make_settings({"device": "cpu", "data": {"folder": str(folder)}}, "medsilo.yaml")


def test_each_hospital_says_that_it_is_ready(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "kidney-7.nii.gz").write_bytes(b"x")
    inprocess.run(_plan_for(SITES, []), folder=tmp_path / "run", settings=settings_with(data))
    summary = Record(tmp_path / "run").summary()
    assert summary and summary.finished and summary.rounds.done == 1
    for own in summary.sites.values():
        told = own.readiness
        assert told and told.data == "readable" and told.device == "cpu" and told.line and told.memory is not None
        assert _why_not(own) == ""
    assert "kidney" not in (tmp_path / "run/summary.json").read_text()


def test_data_that_can_not_be_read_are_told_as_such_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    states = [data_state(settings_with(tmp_path / name)) for name in ("empty", "absent")]
    assert states == ["not readable", "not readable"]
    assert data_state(make_settings({"device": "cpu"}, "x")) == "not set"
    os.mkfifo(tmp_path / "empty/pipe")  # opening a pipe without a writer would wait forever
    assert data_state(settings_with(tmp_path / "empty")) == "not readable"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e9, "fast", None])
def test_a_hospital_that_lies_about_its_time_changes_no_more_than_its_own_line(seconds: Any) -> None:
    class Lying:
        def ask(self, sites: Any, outgoing: Any, receive: Any, timeout: float) -> dict[str, Any]:
            for site in sites:
                outgoing(site)
                receive(site, StudyMessage(facts={"seconds": seconds}))
            return {}

    heard: dict[str, StudyMessage] = {}
    going = StudyMessage(facts={"task": "deliver"})
    LineMeter(Lying()).ask(["a"], lambda site: going, heard.__setitem__, 1.0)
    line = heard["a"].facts["readiness"]["line"]
    assert 0 < line <= 1000 * BYTES


def test_the_lead_reads_what_is_wrong_at_each_hospital() -> None:
    def why(missed: dict[str, str] | None = None, **told: Any) -> str:
        readiness = Readiness.model_validate(READY | told)
        return _why_not(SiteResult(missed_ends=missed or {}, readiness=readiness))

    assert why() == "" and "data" in why(data="not readable") and "2 GPUs, and 1" in why(gpus_promised=2, gpus=1)
    assert why(device="none: there is no GPU here") == "none: there is no GPU here"
    assert why({"join": "refused: not approved"}) == "refused: not approved"
    line = CanaryResult(True, "", Readiness.model_validate(READY)).line("north")
    assert line.startswith("north: ready") and "24 Mbit/s" in line and "12 GiB" in line
    assert CanaryResult(False, "it is not connected").line("south").startswith("south: not reached")


@pytest.mark.slow
def test_a_canary_is_for_synthetic_data(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="canary is for synthetic data"):
        load_plan("jobs/fedavg/plans/image-folder.yaml", ['layers=[{"name": "canary"}]'])
    plan = _plan_for(["one"], [])
    assert plan.participation.when_missing == "stop" and plan.study.title and plan.study.purpose
    assert not [line for line in left_in_short(plan) if "patients" in line], (
        "the officer who approves a canary reads that no patient data leave"
    )
    own = load_plan("jobs/fedavg/plans/image-folder.yaml")
    assert "this hospital's patients" in left_in_short(own)[0]
    assert _plan_for(["one", "two"], []).participation.when_missing == "continue"


class TooLate:
    def __init__(self) -> None:
        self.aborted: list[str] = []

    def submit_job(self, folder: str) -> str:
        return "job"

    def monitor_job(self, *given: Any) -> MonitorReturnCode:
        return MonitorReturnCode.TIMEOUT

    def get_job_meta(self, job: str) -> dict[str, str]:
        return {"status": "FINISHED:ABORTED"}


@pytest.mark.parametrize("left", [None, {"a": SiteResult(missed_ends={"join": "lost: stopped"})}])
def test_a_canary_that_took_too_long_says_so_and_not_that_somebody_ended_it(
    left: dict[str, SiteResult] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(lead, "cancel_in", lambda session, job: ended.append(job))
    monkeypatch.setattr(lead, "outcome_left", lambda *_: (left and SimpleNamespace(sites=left), [], "stopped"))
    found = _sent(cast(Any, TooLate()), _plan_for(["a"], []), ["a"])
    assert ended == ["job"] and not found["a"].ready and found["a"].reason.startswith("no answer within 110 s")
    refused = SiteResult(missed_ends={"join": "refused: not approved"})
    assert _why_not(refused, late=True) == "refused: not approved"


def test_a_hospital_lets_canaries_in_by_one_line_and_nothing_else() -> None:
    """One setting lets a hospital run canaries without an approval.

    A study that pretends to be a canary still needs an approval.
    """
    canary = _plan_for(["a"], [])
    assert is_canary(canary)
    assert not is_canary(_plan_for(["a"], ["training.rounds=2"])) and not is_canary(make_plan("fedavg"))
    values = canary.resolved()
    # a canary must not contain a file of weights from the server
    begun = {"file": "x.pt", "sha256": "0" * 64, "bytes": 1 << 30}
    assert not is_canary(parse_plan({**values, "network": {"name": "tuned", "of": values["network"], "from": begun}}))
    asked = AskingPlan(plan=canary.resolved(), hash=canary.hash, at=0)
    assert asked.is_canary and not AskingPlan(plan={"layers": []}, hash=canary.hash, at=0).is_canary
    where = {"site": "a", "folder": Path("x"), "kit": None, "job_code": None, "trains": True}
    for value, runs in {"except-canary": True, "required": False}.items():
        place = SimpleNamespace(asked=canary, settings=make_settings({"approval": value}, "x"), **where)
        with nullcontext() if runs else pytest.raises(Refused, match="demands approvals"):
            Permission(cast(Any, place))
