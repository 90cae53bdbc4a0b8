"""Several processes that train for one site: the same effective batches, one answer, deaths that cost a round."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed

from medsilo.core.errors import Died, MedsiloError, Refused
from medsilo.federation.around import TrainingSite
from medsilo.federation.crew import why_alone
from medsilo.federation.process.isolated import IsolatedParticipant
from medsilo.federation.seams import Place
from medsilo.federation.trainer import SHUFFLE
from medsilo.learning.team import ProcessTeam, Team
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings, make_settings
from tests.conftest import SITES, make_plan, slow_but
from tests.sites import site_of
from tests.unit.test_participant import Server

A = SITES[0]
NEAR = 2e-5  # of weights after two rounds
SMALL = [
    *("task.persons=6", "task.windows=6", "task.steps=32", "network.norm=group"),
    *("training.batch_size=8", "training.learning_rate=0.02"),
]
FEW = [
    ("fedavg", ["algorithm.perturbation.alpha=0.05"]),
    ("scaffold", []),
    ("ditto", []),
    ("fedsm", ["algorithm.selector_sync=server-adam"]),
]
MORE = [
    *FEW,
    *[(method, []) for method in ("fedavg", "fedprox", "fednova", "fedper", "moon", "apfl", "pfedme", "per-fedavg")],
    ("apfl", ["algorithm.adaptive=true"]),
    ("per-fedavg", ["algorithm.variant=hessian-free"]),
    ("scaffold", ["algorithm.option=I"]),
    ("fedsm", []),
    ("fedsm", ["algorithm.selector_sync=server-adam", "algorithm.selector_step=full-batch"]),
    *[(method, []) for method in ("fedala", "feddg-ga", "fedce")],
]


def planned(method: str, *changes: str) -> Plan:
    return make_plan(method, *SMALL, *changes)


def trained(plan: Plan, folder: Path, teams: list[Team]) -> tuple[list[TrainingSite], list[float]]:
    """One site as often as the team has members, after two rounds of training without a server."""
    settings = SiteSettings(device="cpu")
    sites = [site_of(plan, A, SITES, settings, folder / str(rank)) for rank in range(len(teams))]

    def work(site: TrainingSite, team: Team) -> float:
        site.participant.trainer.team = team
        losses = [
            plan.course.phase_of(number).work(site.participant.trainer.bench(SHUFFLE, number, lambda: None))
            for number in (1, 2)
            if plan.course.phase_of(number).trains
        ]
        return losses[-1]

    with ThreadPoolExecutor(len(teams)) as pool:
        return sites, list(pool.map(work, sites, teams))


def teams_of(size: int) -> list[Team]:
    """A team whose members are threads, over gloo."""
    store = distributed.HashStore()

    def member(rank: int) -> Team:
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(minutes=10)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = distributed.ProcessGroupGloo(distributed.PrefixStore("t", store), rank, size, options)
        return ProcessTeam(group, rank, size, torch.device("cpu"))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


@pytest.mark.parametrize(("method", "changes"), slow_but(FEW, MORE), ids=lambda part: str(part)[:60])
def test_shares_of_batches_make_the_same_weights(method: str, changes: list[str], tmp_path: Path) -> None:
    """Of 18 cases three members take 3, 3 and 2 of a batch; of the last one, which has two cases, all take both."""
    plan = planned(method, *changes)
    (alone,), (loss,) = trained(plan, tmp_path / "alone", [Team()])
    assert why_alone(plan, alone.participant.state.modules, False) is None
    sites, losses = trained(plan, tmp_path / "team", teams_of(3))
    expected, first, *others = (site.participant.state.tensors() for site in (alone, *sites))
    begun = site_of(plan, A, SITES, SiteSettings(device="cpu"), tmp_path / "new").participant.state.tensors()
    assert any(
        not torch.allclose(begun[name], tensor, atol=10 * NEAR) for name, tensor in expected.items() if name in begun
    )
    for name, tensor in expected.items():
        assert all(torch.equal(first[name], other[name]) for other in others), name
        torch.testing.assert_close(first[name], tensor, rtol=NEAR, atol=NEAR, msg=name)
    assert losses == pytest.approx([loss] * 3, rel=1e-4)


def test_what_cannot_be_shared_out() -> None:
    def why(*changes: str, private: bool = False, method: str = "fedavg") -> str | None:
        plan = planned(method, *changes)
        return why_alone(plan, plan.build_networks(), private)

    assert why() is None
    assert "BatchNorm1d layers take statistics of whole batches" in (why("network.norm=batch") or "")
    assert "no mean" in (why("training.class_weights=balanced") or "")
    assert "privacy" in (why(private=True) or "")
    assert "input layer" in (why(method="harmofl") or "")


def test_settings_of_devices() -> None:
    for values, words in (
        ({"devices": 2, "isolation": False}, "isolation: true"),
        ({"devices": 2, "device": "cuda:1"}, "device: cuda"),
        ({"devices": 0}, "devices"),
    ):
        with pytest.raises(MedsiloError, match=words):
            make_settings(values, "medsilo.yaml")
    assert SiteSettings(device="cpu", devices="auto").processes == 1
    assert [SiteSettings(device="cpu", devices=2).device_of(rank) for rank in (0, 1)] == ["cpu", "cpu"]


# ---------------------------------------------------------------------------------------------------- real processes
@pytest.mark.slow
def test_two_processes_answer_as_one_and_one_that_dies_is_named(tmp_path: Path) -> None:
    plan = planned("fedavg", "training.rounds=3")
    alone = site_of(plan, A, SITES, SiteSettings(device="cpu"), tmp_path / "alone")
    site = IsolatedParticipant(Place(plan, A, SITES, SiteSettings(device="cpu", devices=2), tmp_path / "sites" / A))
    server = Server(plan)
    try:
        asked = server.ask("round", 1)
        expected, answer = alone.answer(asked), site.answer(asked)
        _assert_near(answer.groups, expected.groups)
        assert answer.metrics == pytest.approx(expected.metrics, rel=1e-4)
        server.take(expected)
        assert site.process
        (member,) = psutil.Process(site.process.pid).children()
        os.kill(member.pid, signal.SIGKILL)
        asked = server.ask("round", 2)
        with pytest.raises(Died, match=r"training process 2 on cpu died \(SIGKILL\)"):
            site.answer(asked)
        _assert_near(site.answer(asked).groups, alone.answer(asked).groups)
        (member,) = psutil.Process(site.process.pid).children()
    finally:
        site.close()
    member.wait(timeout=600)  # it goes with the first, however that ended
    with pytest.raises(Refused, match="network.norm=instance"):
        _first_word(planned("fedavg", "network.norm=batch"), tmp_path / "batch")


def _first_word(plan: Plan, folder: Path) -> Any:
    site = site_of(plan, A, SITES, SiteSettings(device="cpu", devices=2), folder)
    return site.participant.trainer.share_out()


def _assert_near(groups: dict, expected: dict) -> None:
    for group, tensors in expected.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(groups[group][name], tensor, rtol=NEAR, atol=NEAR, msg=name)
