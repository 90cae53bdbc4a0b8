"""'medsilo submit' and 'medsilo resume' wait until all sites of a study have joined."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from medsilo.core.errors import ParticipationError
from medsilo.core.package import machine_facts
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.site_stack import TrainingSite
from medsilo.runs.messages import StudyMessage
from medsilo_lab.engines.inprocess import Loop
from medsilo_lab.report.page import write
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.sites import sites_of

SMALL = ["task.persons=6", "task.windows=6", "task.steps=32", "training.batch_size=8", "training.rounds=1"]
GO_ON = ["participation.when_missing=continue", "participation.minimum=2"]


class LossyLoop(Loop):
    def __init__(self, participants: dict[str, TrainingSite], gone: list[str]) -> None:
        super().__init__(participants)
        self.gone = gone

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        missing = {site: Missing("lost", "no answer") for site in self.gone}
        there = [site for site in sites if site not in self.gone]
        self.gone = []
        return missing | super().ask(there, outgoing, receive, timeout)


class OtherMachine(Loop):
    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        def changed(site: str, reply: StudyMessage) -> str | None:
            machine = reply.facts.get("machine")
            if site == SITES[-1] and machine:
                reply.facts["machine"] = machine | {"torch": "2.12.0"}
            return receive(site, reply)

        return super().ask(sites, outgoing, changed, timeout)


@pytest.mark.parametrize("same", ["", "[nvflare, processor]", "[torch]"])
def test_a_machine_that_differs_is_told_or_refused_as_the_plan_says(same: str, tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL, *GO_ON, *([f"participation.require_same_versions={same}"] if same else []))
    sites = sites_of(plan, tmp_path)
    summary = Coordinator(plan, SITES, OtherMachine(sites), Record(tmp_path / "run"), "inprocess").run()
    one, other = summary.sites[SITES[0]], summary.sites[SITES[-1]]
    assert one.machine == machine_facts() and one.warnings == {}
    if "torch" in same:
        assert "torch 2.12.0" in other.missed_ends["join"] and other.machine == {}
    else:
        assert other.machine == one.machine | {"torch": "2.12.0"} and "torch 2.12.0" in other.warnings["join"][0]
        write([tmp_path / "run"], tmp_path / "page.html", "a study")
        assert "different versions or processors" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("gone", [SITES[1:2], SITES])
def test_a_study_that_nobody_joined_has_not_begun(gone: list[str], tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL, *GO_ON)
    sites = sites_of(plan, tmp_path)
    coordinator = Coordinator(plan, SITES, LossyLoop(sites, gone), Record(tmp_path / "run"), "inprocess")
    assert coordinator.absent is None
    if gone == SITES:
        with pytest.raises(ParticipationError, match="join: 0 of 3 sites answered"):
            coordinator.run()
        assert coordinator.absent is None
    else:
        coordinator.run()
        assert coordinator.absent == {gone[0]: "no answer"}
