"""Test the transport on NVFlare's real task server with a message for each site, repeated requests and late answers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from medsilo.core.errors import Aborted, Refused
from medsilo.exchange.channel import Missing
from medsilo.flare.wire import refusal, to_parcel, to_shareable
from medsilo.runs.messages import StudyMessage
from medsilo_server.flare.transport import POLL, FlareTransport
from nvflare_reliability import forked
from tests.conftest import SITES
from tests.secure.consortium import wait_until


class BareController(Controller):
    def start_controller(self, fl_ctx: FLContext) -> None: ...

    def stop_controller(self, fl_ctx: FLContext) -> None: ...

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None: ...

    def process_result_of_unknown_task(self, client, task_name, client_task_id, result, fl_ctx) -> None:
        self.late = client.name


class Server:
    """NVFlare's task server with its monitor thread; the test sends the sites' requests."""

    def __init__(self) -> None:
        self.clients = {site: Client(site, f"token-{site}") for site in SITES}
        self.communicator = WFCommServer(task_check_period=0.05)
        self.controller = BareController(task_check_period=0.05)
        self.controller.set_communicator(self.communicator)
        engine = SimpleNamespace(get_clients=lambda: list(self.clients.values()), new_context=self._context)
        context = FLContext()
        context.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
        engine.validate_targets = lambda names: ([self.clients[name] for name in names], [])
        self.controller._engine = self.communicator._engine = engine
        self.abort = Signal()
        self.transport = FlareTransport(self.controller, context, self.abort)
        self.monitor = threading.Thread(target=self.communicator._monitor_tasks, daemon=True)
        self.monitor.start()

    @contextmanager
    def _context(self) -> Iterator[FLContext]:
        yield FLContext()

    def fetch(self, site: str) -> tuple[str, Shareable]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            name, task_id, data = self.communicator.process_task_request(self.clients[site], FLContext())
            if name and not name.startswith("__"):
                return task_id, data
            time.sleep(0.01)
        raise AssertionError(f"{site} got no work")

    def submit(self, site: str, task_id: str, reply: Shareable) -> None:
        self.communicator.process_submission(self.clients[site], "medsilo", task_id, reply, FLContext())

    def close(self) -> None:
        self.communicator._all_done = True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def parcel_for(site: str) -> StudyMessage:
    return StudyMessage({"personal": {"w": torch.full((3,), float(SITES.index(site) + 1))}}, {"for": site})


def echo(data: Shareable) -> Shareable:
    return to_shareable(to_parcel(data))


def ask(server: Server, behave, timeout: float = 10.0) -> tuple[dict[str, Missing], dict[str, StudyMessage]]:
    got: dict[str, StudyMessage] = {}
    actor = threading.Thread(target=behave, daemon=True)
    actor.start()
    missing = server.transport.ask(SITES, parcel_for, lambda site, message: got.update({site: message}), timeout)
    actor.join(60)
    return missing, got


def test_every_site_receives_its_own_parcel_and_no_other(server: Server) -> None:
    def behave() -> None:
        work = {site: server.fetch(site) for site in reversed(SITES)}
        for site, (task_id, data) in work.items():
            server.submit(site, task_id, echo(data))

    missing, got = ask(server, behave)
    assert not missing
    for place, site in enumerate(SITES, start=1):
        assert got[site].facts == {"for": site}
        assert torch.equal(got[site].groups["personal"]["w"], torch.full((3,), float(place)))


def test_a_site_that_asks_twice_gets_its_own_parcel_again_and_nothing_hangs(server: Server) -> None:
    """A site that has lost a reply repeats its request; in an earlier version, a repeated request ended NVFlare 2.9's
    monitor thread.
    """

    def behave() -> None:
        work = {site: server.fetch(site) for site in SITES}
        again_id, again = server.fetch("hospital-b")
        assert again_id == work["hospital-b"][0]
        assert to_parcel(again).facts == {"for": "hospital-b"}
        for site, (task_id, data) in work.items():
            server.submit(site, task_id, echo(data))

    missing, got = ask(server, behave)
    assert not missing and got.keys() == set(SITES)
    wait_until(lambda: server.controller.get_num_standing_tasks() == 0, 60, "the end of the tasks")
    assert server.monitor.is_alive()
    missing, got = ask(server, behave)
    assert not missing and got.keys() == set(SITES)


def test_refusals_and_answers_that_are_no_parcel_carry_their_reason(server: Server) -> None:
    def behave() -> None:
        work = {site: server.fetch(site)[0] for site in SITES}
        server.submit("hospital-a", work["hospital-a"], refusal("the disk of this site is full"))
        server.submit("hospital-b", work["hospital-b"], Shareable())
        server.submit("hospital-c", work["hospital-c"], make_reply(ReturnCode.EXECUTION_RESULT_ERROR))

    def die() -> None:
        for site in SITES:
            server.submit(site, server.fetch(site)[0], refusal("the trainer died", passes=site == "hospital-b"))

    missing, got = ask(server, behave)
    assert not got
    assert {gone.kind for gone in missing.values()} == {"refused"}
    assert missing["hospital-a"].reason == "the disk of this site is full"
    assert "not a message of medsilo" in missing["hospital-b"].reason
    assert ReturnCode.EXECUTION_RESULT_ERROR in missing["hospital-c"].reason
    assert not any(gone.passing for gone in missing.values())
    missing, _ = ask(server, die)
    assert {site: gone.passing for site, gone in missing.items()} == {site: site == "hospital-b" for site in SITES}


def test_what_the_coordinator_refuses_is_missing_with_its_reason(server: Server) -> None:
    def behave() -> None:
        for site in SITES:
            task_id, data = server.fetch(site)
            server.submit(site, task_id, echo(data))

    def receive(site: str, message: StudyMessage) -> None:
        if site == "hospital-b":
            raise Refused("holds NaN")
        if site == "hospital-c":
            raise ZeroDivisionError("a fault of the server's own")

    threading.Thread(target=behave, daemon=True).start()
    missing = server.transport.ask(SITES, parcel_for, receive, 10)
    assert missing.keys() == {"hospital-b", "hospital-c"}
    assert missing["hospital-b"].reason == "holds NaN"
    assert missing["hospital-c"].reason.startswith("ZeroDivisionError at the server")


def test_an_answer_that_cannot_be_read_is_refused_at_once_and_not_asked_for_again(server: Server) -> None:
    unread = refusal("its answer can't be read")

    def behave() -> None:
        work = {site: server.fetch(site) for site in SITES}
        server.transport.refuse("hospital-b", unread, FLContext())
        server.submit("hospital-b", work["hospital-b"][0], echo(work["hospital-b"][1]))
        server.transport.refuse("hospital-z", unread, FLContext())
        for site in ("hospital-a", "hospital-c"):
            server.submit(site, work[site][0], echo(work[site][1]))
        server.transport.refuse("hospital-a", unread, FLContext())
        name, _, _ = server.communicator.process_task_request(server.clients["hospital-b"], FLContext())
        tried.append(name)

    tried: list[str] = []
    missing, got = ask(server, behave)
    assert missing == {"hospital-b": Missing("refused", "its answer can't be read")}
    assert got.keys() == {"hospital-a", "hospital-c"} and not tried[0]
    server.transport.refuse("hospital-a", unread, FLContext())


def test_a_silent_site_is_lost_after_the_timeout_and_its_late_answer_dropped(server: Server) -> None:
    late: dict[str, tuple[str, Shareable]] = {}

    def behave() -> None:
        for site in SITES:
            task_id, data = server.fetch(site)
            if site == "hospital-c":
                late[site] = (task_id, data)
            else:
                server.submit(site, task_id, echo(data))

    started = time.monotonic()
    missing, got = ask(server, behave, timeout=2)
    assert 1.5 < time.monotonic() - started < 20
    assert got.keys() == {"hospital-a", "hospital-b"}
    assert missing == {"hospital-c": Missing("lost", "no answer within 2 s")}
    wait_until(lambda: server.controller.get_num_standing_tasks() == 0, 60, "the end of the tasks")
    task_id, data = late["hospital-c"]
    server.submit("hospital-c", task_id, echo(data))
    assert "hospital-c" not in got
    assert server.monitor.is_alive()


def test_a_slow_site_is_waited_for_and_counts(server: Server) -> None:
    def behave() -> None:
        work = {site: server.fetch(site) for site in SITES}
        for site in (SITES[1], SITES[2], SITES[0]):
            time.sleep(1.0 if site == SITES[0] else 0)
            server.submit(site, work[site][0], echo(work[site][1]))

    missing, got = ask(server, behave)
    assert not missing and list(got) == [SITES[1], SITES[2], SITES[0]]


def test_a_site_that_is_not_connected_costs_no_wait(server: Server) -> None:
    del server.clients["hospital-c"]

    def behave() -> None:
        for site in ("hospital-a", "hospital-b"):
            task_id, data = server.fetch(site)
            server.submit(site, task_id, echo(data))

    started = time.monotonic()
    missing, got = ask(server, behave, timeout=30)
    assert missing == {"hospital-c": Missing("lost", "is not connected")}
    assert len(got) == 2
    assert time.monotonic() - started < 20


def test_an_abort_ends_the_wait_within_a_second(server: Server) -> None:
    assert POLL <= 0.5
    threading.Timer(0.3, lambda: server.abort.trigger(True)).start()
    started = time.monotonic()
    with pytest.raises(Aborted):
        server.transport.ask(SITES, parcel_for, lambda site, message: None, 600)
    # time limit in seconds on a loaded machine; an idle machine needs less than one second
    assert time.monotonic() - started < 20
    wait_until(lambda: server.controller.get_num_standing_tasks() == 0, 60, "the end of the tasks")


def test_who_has_died_is_told_while_others_are_still_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare's threads register sites while the study iterates over them."""

    class Dead:
        @property
        def has_died(self) -> bool:
            forked.SITES["late"] = SimpleNamespace(has_died=True)
            return True

    monkeypatch.setattr(forked, "SITES", {SITES[0]: Dead(), SITES[1]: SimpleNamespace(has_died=False)})
    assert forked.died().keys() == {SITES[0]}
    assert forked.died().keys() == {SITES[0], "late"}
