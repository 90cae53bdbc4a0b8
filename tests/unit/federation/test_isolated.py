"""Sites that train in separate processes give the same models, and a site whose training process dies loses one
round.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from medsilo.core.errors import Aborted, ParticipationError, ProcessDied, Refused
from medsilo.federation.participant import Participant, participant_of
from medsilo.federation.process import isolated
from medsilo.federation.process.isolated import IsolatedParticipant, receive, send
from medsilo.federation.site_context import SiteContext
from medsilo.federation.trainer import Trainer
from medsilo.plan import Plan
from medsilo.runs.schema import Summary
from medsilo.schedule.phase import Phase
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines.inprocess import Loop
from medsilo_lab.testing import assert_same_run
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.sites import CPU, site_of
from tests.unit.federation.test_participant import SMALL, Server
from tests.unit.trainers import fragile, hungry, troubled

A, B = SITES[:2]
GO_ON = ["participation.when_missing=continue", "participation.minimum=1"]
Sites = Callable[..., IsolatedParticipant]


@pytest.fixture
def isolated_site(tmp_path: Path) -> Iterator[Sites]:
    made: list[IsolatedParticipant] = []

    def make(plan: Plan, site: str = A, settings: SiteSettings = CPU, **options: Any) -> IsolatedParticipant:
        folder = options.pop("folder", tmp_path / "run") / "sites" / site
        made.append(IsolatedParticipant(SiteContext(plan, site, plan.participation.sites, settings, folder), **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


def lead(plan: Plan, folder: Path, participants: dict[str, Any]) -> Summary:
    return Coordinator(plan, plan.participation.sites, Loop(participants), Record(folder), "in-process").run()


def of(trainer: type[Trainer]) -> Callable[..., Participant]:
    return partial(participant_of, trainer=trainer)


class Refusing(Trainer):
    def work(self, number: int, phase: Phase, stop: Any) -> float:
        loss = super().work(number, phase, stop)
        if number == 2 and self.context.site == B:
            self.state.begin()
            raise Refused("killed")
        return loss


@pytest.mark.slow
def test_a_killed_trainer_costs_its_round_and_the_numbers_are_the_same(tmp_path: Path, isolated_site: Sites) -> None:
    """If a site's process is killed in round 2, the tensors equal those of a one-process study that lacks the site's
    answer.
    """
    plan = make_plan("fedbn", *SMALL, *GO_ON, "training.rounds=4", sites=[A, B])
    folder = tmp_path / "run"
    sites = {A: isolated_site(plan), B: isolated_site(plan, B, kind=fragile)}
    summary = lead(plan, folder, sites)
    assert summary.status == "finished"
    assert [line.answered for line in Record(folder).rounds()] == [[A, B], [A], [A, B], [A, B]]
    missed = summary.sites[B].missed
    assert list(missed) == [2] and "the training process died (SIGKILL)" in missed[2]
    assert "memory" in missed[2] and "site's saved state" in missed[2]

    kind = of(Refusing)
    plain = {s: site_of(plan, s, [A, B], CPU, tmp_path / "plain/sites" / s, kind=kind) for s in (A, B)}
    lead(plan, tmp_path / "plain", plain)
    for run in (folder, tmp_path / "plain"):
        for name in ("summary.json", "rounds.jsonl"):
            text = (run / name).read_text()
            (run / name).write_text(text.replace(missed[2].removeprefix("refused: "), "killed"))
    for log in folder.glob("sites/*/worker.log"):
        assert log.read_text() == ""
        log.unlink()
    assert_same_run(folder, tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["wait", pytest.param("stop", marks=pytest.mark.long)])
def test_a_killed_trainer_is_asked_again_and_costs_nothing(rule: str, tmp_path: Path, isolated_site: Sites) -> None:
    plan = make_plan("fedbn", *SMALL, f"participation.when_missing={rule}", "training.rounds=3", sites=[A, B])
    here = site_of(plan, A, [A, B], CPU, tmp_path / "run/sites" / A)
    summary = lead(plan, tmp_path / "run", {A: here, B: isolated_site(plan, B, kind=fragile)})
    assert (tmp_path / f"{B}-was-killed").exists()
    assert summary.status == "finished" and summary.sites[B].missed == {}
    lead(plan, tmp_path / "plain", {s: site_of(plan, s, [A, B], CPU, tmp_path / "plain/sites" / s) for s in (A, B)})
    for log in (tmp_path / "run").glob("sites/*/worker.log"):
        log.unlink()
    assert_same_run(tmp_path / "run", tmp_path / "plain")


class Dying(Trainer):
    def work(self, number: int, phase: Phase, stop: Any) -> float:
        raise ProcessDied("killed")


def test_under_stop_a_trainer_that_dies_twice_ends_the_study(tmp_path: Path) -> None:
    plan = make_plan("fedbn", *SMALL, "training.rounds=3", sites=[A, B])
    kinds = {A: participant_of, B: of(Dying)}
    sites = {s: site_of(plan, s, [A, B], CPU, tmp_path / "run/sites" / s, kind=kind) for s, kind in kinds.items()}
    asked: list[str] = []
    answer = sites[B].answer
    sites[B].answer = lambda *given: (asked.append(given[0].facts["task"]), answer(*given))[1]  # type: ignore[method-assign]
    with pytest.raises(ParticipationError, match=f"{B} refused: killed"):
        lead(plan, tmp_path / "run", sites)
    assert asked == ["join", "round", "round"]


@pytest.mark.slow
def test_a_memory_limit_is_a_refusal_and_the_next_round_is_well(isolated_site: Sites) -> None:
    plan = make_plan("fedavg", *SMALL, "training.rounds=3")
    server, limited = Server(plan), SiteSettings(device="cpu", memory_limit=700)
    site = isolated_site(plan, settings=limited, kind=hungry)
    server.take(site.answer(server.ask("round", 1)))
    first = site.process
    with pytest.raises(Refused, match="out of memory.*lower training.batch_size"):
        site.answer(server.ask("round", 2))
    assert first and not psutil.pid_exists(first.pid)
    site.answer(server.ask("round", 3))
    assert site.process and site.process.pid != first.pid
    with pytest.raises(Refused, match="died .exit code 1.: .*worker.log"):
        site.answer(server.ask("round", 3, {"model": {"w": torch.zeros(2**28)}}))


@pytest.mark.slow
def test_a_trainer_that_dies_between_two_rounds_costs_nothing_and_is_told(isolated_site: Sites) -> None:
    plan, told = make_plan("fedavg", *SMALL), list[str]()
    server, site = Server(plan), isolated_site(plan, tell=told.append)
    server.take(site.answer(server.ask("round", 1)))
    assert site.process and not told
    site.process.kill()
    site.process.wait()
    server.take(site.answer(server.ask("round", 2)))
    assert len(told) == 1 and "SIGKILL" in told[0]


@pytest.mark.slow
def test_stops_hangs_and_failures(tmp_path: Path, isolated_site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("fedavg", *SMALL, "training.rounds=4")
    server = Server(plan)
    site = isolated_site(plan, kind=troubled)

    def stop_after(seconds: float) -> Callable[[], None]:
        until = time.monotonic() + seconds

        def stop() -> None:
            if time.monotonic() > until:
                raise Aborted("stopped")

        return stop

    site.answer(server.ask("join", 0))
    assert site.process
    first = site.process.pid
    with pytest.raises(Aborted):  # an abort during training ends the current batch, but not the process
        site.answer(server.ask("round", 1), stop_after(0.5))
    site.answer(server.ask("join", 0))
    assert site.process.pid == first

    monkeypatch.setattr(isolated, "STOP_LIMIT", 0.5)
    with pytest.raises(Aborted):  # the site kills a process that ignores the abort
        site.answer(server.ask("round", 2), stop_after(0.5))
    assert not psutil.pid_exists(first)

    with pytest.raises(Refused) as caught:
        site.answer(server.ask("round", 3))
    assert str(caught.value).startswith("ValueError; errors.log") or "ValueError in" in str(caught.value)
    assert "MUELLER" not in str(caught.value) and "MUELLER" in caught.value.private

    os.kill(site.process.pid, signal.SIGSEGV)
    site.process.wait()
    monkeypatch.setattr(isolated, "STALL", 3.0)
    assert site.answer(server.ask("join", 0)).facts["task"] == "join"

    os.kill(site.process.pid, signal.SIGSTOP)  # a stopped process cannot receive a large message
    with pytest.raises(Refused, match="the training process died \\(it stalled\\)"):
        site.answer(server.ask("round", 3, {"model": {"w": torch.zeros(2**22)}}))
    assert site.answer(server.ask("join", 0)).facts["task"] == "join"


ORPHAN = """
import sys, time
from pathlib import Path
from tests.conftest import make_plan
from tests.unit.federation.test_isolated import CPU, SMALL, IsolatedParticipant, SiteContext, Server

plan = make_plan("fedavg", *SMALL)
site = IsolatedParticipant(SiteContext(plan, "hospital-a", plan.participation.sites, CPU, Path(sys.argv[1])))
site.answer(Server(plan).ask("join", 0))
print(site.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_no_orphan_survives_its_parent(tmp_path: Path, root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "custom"), str(root)])}
    command = [sys.executable, "-c", ORPHAN, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert parent.stdout
        worker = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait()
    worker.wait(timeout=600)


def test_frames_carry_every_kind_of_tensor() -> None:
    near, far = isolated.socketpair()
    groups = {
        "model": {
            "w": torch.randn(3, 4).t(),
            "b": torch.randn(5).bfloat16(),
            "n": torch.tensor(7),
            "mask": torch.tensor([True, False]),
            "z": torch.zeros(0, 3),
        },
        "empty": {},
    }
    with near, far:
        send(near, {"facts": {"loss": 0.1}}, groups)
        message, arrived = receive(far)
        assert message == {"facts": {"loss": 0.1}} and arrived.keys() == groups.keys()
        for name, tensor in groups["model"].items():
            assert arrived["model"][name].dtype == tensor.dtype and torch.equal(arrived["model"][name], tensor)
        near.close()
        with pytest.raises(EOFError):
            receive(far)
