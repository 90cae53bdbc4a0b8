"""Secure aggregation does not protect hospitals from a dishonest server. The test carries out the attack that
docs/trust/secure-aggregation.md describes.

The server repeats round 1 without one hospital, and subtracts the repeated round's sum from the first sum. Because
training is deterministic, subtracting the second sum from the first leaves the missing hospital's model.

No check at a hospital prevents a repeated round. The test measures the attack's precision, and shows that noise limits
this precision.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medsilo.plan import Plan
from medsilo.runs.messages import StudyMessage
from medsilo.site.settings import SiteSettings
from medsilo_secagg.sealed_rounds import SealedGroup
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from medsilo_server.sealed_server import SealedServer
from tests.conftest import make_plan
from tests.sealed import correlation
from tests.sites import sites_of
from tests.unit.medsilo_server.test_coordinator import LOST, SMALL, Answers, Scripted, honest

HOSPITALS = ["a", "b", "c", "d"]
STUDY = [
    *SMALL,
    "training.batch_size=64",
    "training.momentum=0",
    "network.norm=group",
]
GO_ON = ["participation.when_missing=continue", "participation.minimum=3"]
NOISE = 'privacy={"epsilon": 2.0, "delta": 0.001}'
Model = dict[str, Tensor]


class LyingServer(Scripted):
    """A dishonest server that starts round 2 from round 1's weights and leaves out hospital d."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        settings = SiteSettings(device="cpu", public_data=True)
        super().__init__(sites_of(plan, folder, HOSPITALS, settings=settings), self.lie)
        self.first: dict[str, Model] = {}
        self.trained: Model = {}  # the true model of hospital d in round 1, which the server must not learn

    def lie(self, site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        task, number = asked.facts["task"], asked.facts["round"]
        if number == 2 and task in ("offer", "round", "unmask"):
            if site == "d":
                return LOST
            if task == "round":
                asked = replace(asked, groups=self.first)
                return [(site, self.participants[site].answer(asked))]
        if (task, number) == ("round", 1):
            self.first = {group: {n: t.clone() for n, t in own.items()} for group, own in asked.groups.items()}
        answer = honest(site, asked, work)
        if (site, task, number) == ("d", "round", 1):
            state = self.participants[site].participant.state.modules["model"].state_dict()
            self.trained = {name: tensor.clone() for name, tensor in state.items()}
        return answer


def difference(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    sums: list[tuple[tuple[str, ...], Model, int]] = []
    take = SealedServer._hand_over

    def noted(server: SealedServer, own: SealedGroup, mean: Mapping[str, Tensor], sites: Sequence[str]) -> None:
        sums.append((tuple(sites), {n: t.double() for n, t in mean.items()}, sum(server._weights(own, sites).values())))
        take(server, own, mean, sites)

    with monkeypatch.context() as patch:
        patch.setattr(SealedServer, "_hand_over", noted)
        server = LyingServer(plan, folder)
        Coordinator(plan, HOSPITALS, server, Record(folder), "scripted").run()
    (all_sites, whole, cases), (rest_sites, rest, fewer) = sums
    assert (all_sites, rest_sites) == (tuple(HOSPITALS), tuple(HOSPITALS[:3])), "nothing was refused"
    begun = server.first["model"]
    found = [(whole[n] * cases - rest[n] * fewer) / (cases - fewer) - begun[n] for n in sorted(whole)]
    true = [server.trained[n].double() - begun[n] for n in sorted(whole)]
    return torch.cat([t.reshape(-1) for t in found]), torch.cat([t.reshape(-1) for t in true])


def test_a_server_that_sends_old_weights_again_reads_one_hospitals_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("fedavg", *STUDY, "secure_aggregation.mode=pairwise", *GO_ON, sites=HOSPITALS)
    found, true = difference(plan, tmp_path / "sealed", monkeypatch)
    assert float((found - true).abs().max()) < 1e-6 < 1e-3 < float(true.abs().max())
    found, _ = difference(plan.with_changes([NOISE]), tmp_path / "noisy", monkeypatch)
    assert correlation(found, true) < 0.2, "under differential privacy it is noise"
