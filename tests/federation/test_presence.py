"""Find the hospitals that are absent from a job, by reports of the server's main process and by the hospitals'
silence.
"""

from typing import Any

import pytest
from nvflare.fuel.f3.cellnet.defs import ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message

from medsilo.exchange.channel import Missing
from nvflare_reliability import liveness
from nvflare_reliability.liveness import GRACE, SILENCE, Liveness
from tests.conftest import SITES
from tests.federation.test_transport import Server, ask, echo, server  # noqa: F401 (server is a fixture)

B = SITES[1]


class Told:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.synced = 1000.0, 0
        monkeypatch.setattr(liveness, "monotonic", lambda: self.now)
        self.hospital: dict[str, Any] = {"cell": f"relay.{B}", "closed": False, "starts": 0, "problem": ""}
        self.last_heard: dict[str, float] = {}
        self.presence = Liveness(self, self.last_heard, self.sync, silence=420.0)  # type: ignore[arg-type]

    def send_request(self, **asked: Any) -> Message:
        return make_reply(ReturnCode.OK, body={B: self.hospital})

    def sync(self) -> None:
        self.synced += 1

    def after(self, seconds: float, heard: bool = False, **told: Any) -> dict[str, str]:
        self.now += seconds
        self.hospital |= told
        if heard:
            self.last_heard[f"relay.{B}"] = self.now
        self.presence.look()
        return self.presence.away()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_a_closed_connection_is_borne_for_seconds(told: Told) -> None:
    assert not told.after(600, closed=True)
    assert not told.after(1, heard=True, closed=False)
    assert not told.after(1, closed=True) and not told.after(GRACE) and told.after(1)
    assert not told.presence.hopeless()
    assert told.after(60, closed=False)
    assert not told.after(1, heard=True)


def test_a_hospital_may_be_silent_for_twice_as_long_as_it_was(told: Told) -> None:
    told.after(1, heard=True)
    assert not told.after(SILENCE - 1) and told.after(2)
    assert not told.after(100, heard=True)
    assert not told.after(2 * (SILENCE + 100)) and told.after(10)
    assert not told.after(3600, heard=True)
    assert not told.after(419) and told.after(2)
    told.after(1, heard=True)


def test_time_without_a_connection_is_no_silence(told: Told) -> None:
    told.after(1, heard=True)
    told.after(600, closed=True)
    told.after(600)
    told.after(5, closed=False, starts=1)
    assert told.synced == 1 and not told.after(5, heard=True)
    assert told.after(SILENCE + 1)


def test_who_can_not_come_back_is_waited_for_by_nobody(told: Told) -> None:
    told.after(1, heard=True)
    assert told.after(1, problem="the job could not be deployed: BYOC not permitted") == told.presence.hopeless() != {}
    assert "BYOC not permitted (5 s ago)" in (told.after(5), told.presence.absences())[1][B]
    told.after(1, problem="", starts=1)
    assert not told.presence.hopeless() and not told.after(1, heard=True)


def test_who_never_comes_is_waited_for_as_long_as_the_plan_says(told: Told) -> None:
    told.presence.patience = 100.0
    told.after(1)
    told.presence.sites[B].known = told.now
    assert not told.after(100)
    assert "no sign of life (101 s ago)" in told.after(1)[B]
    assert not told.after(1, heard=True), "it came after all"
    told.after(1, closed=True)
    assert told.after(GRACE + 1) and not told.presence.hopeless()
    told.after(101)
    assert B in told.presence.hopeless(), "one that was away for too long is hopeless, too"


def test_a_round_waits_while_fewer_are_there_than_it_needs(told: Told) -> None:
    """The study continues even if all hospitals lose their connections to the server for a moment."""
    told.presence.patience = 100.0
    told.after(1, heard=True)
    told.after(1, closed=True)
    assert told.after(GRACE + 1) == told.presence.left_behind(3, 2) != {}
    assert told.presence.left_behind(3, 3) == {}
    told.after(101)
    assert told.presence.left_behind(3, 3) == told.presence.hopeless() != {}


def test_a_round_does_not_wait_for_a_hospital_that_is_away(server: Server) -> None:  # noqa: F811
    away: dict[str, str] = {}
    server.transport.away = lambda: away

    def behave() -> None:
        work = {site: server.fetch(site) for site in SITES}
        away[B] = "its connection was closed"
        for site in SITES:
            if site != B:
                server.submit(site, work[site][0], echo(work[site][1]))

    missing, got = ask(server, behave, timeout=60.0)
    assert missing == {B: Missing("lost", "its connection was closed")} and got.keys() == {*SITES} - {B}
    missing, got = ask(server, lambda: [server.submit(s, *_echoed(server.fetch(s))) for s in SITES if s != B], 60.0)
    assert missing.keys() == {B} and got.keys() == {*SITES} - {B}


def _echoed(work: tuple[str, Any]) -> tuple[str, Any]:
    return work[0], echo(work[1])
