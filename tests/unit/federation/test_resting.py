"""If all sites run in one process, each site removes its networks from memory after answering."""

import gc
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from medsilo.federation.participant import Participant
from medsilo.federation.raw_results import ExactResult
from medsilo.federation.site_state import SiteState
from medsilo.learning.compute import Compute
from medsilo.runs.messages import Request
from tests import inprocess
from tests.conftest import make_plan


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "fedsm"])
def test_only_the_site_that_works_has_networks_and_every_bit_is_the_same(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(method, "training.optimizer_state=keep")
    awake = inprocess.run(plan, folder=tmp_path / "awake")
    sites: set[Participant] = set()
    find = Participant.find

    def counted(self: Participant, asked: Request, *arguments: Any) -> ExactResult:
        sites.add(self)
        assert not any(site.state.modules or site.state.optimizers for site in sites - {self})
        found = find(self, asked, *arguments)
        assert self.state.modules or asked.task == "join"
        return found

    monkeypatch.setattr(Participant, "find", counted)
    monkeypatch.setattr("medsilo_lab.engines.inprocess.AWAKE", 0)
    rested = inprocess.run(plan, folder=tmp_path / "rested")
    assert len(sites) == len(plan.participation.sites) == len(rested.models)
    assert rested.summary.mean_test == awake.summary.mean_test
    for site in sites:
        one, other = (run.models[site.context.site].state_dict() for run in (awake, rested))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(KeyError):
        rested.models["nobody"]


@pytest.mark.parametrize("circle", [False, True])
def test_what_a_resting_site_let_go_of_is_free_at_once(
    circle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that has answered releases the memory of the site's networks at once.

    Slow garbage collection runs only if objects of a network form a reference cycle.
    """
    state = SiteState(make_plan(), "hospital-a", tmp_path, Compute())
    if circle:
        state.modules["model"].register_forward_hook(state.modules["model"].forward)
    looked = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: looked.append(collect()))
    weight = ref(next(state.modules["model"].parameters()))
    gc.disable()
    try:
        state.offload()
    finally:
        gc.enable()
    assert weight() is None and len(looked) == circle
