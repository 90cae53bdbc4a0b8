"""Run a study with dishonest hospitals, with real participants and the real coordinator in one process."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.deploy.supermodel import SuperModel
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.participant import participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Request, StudyMessage
from medsilo.runs.paths import site_folder
from medsilo.runs.rounds import Round
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import Cases, SiteData
from medsilo.tasks.task import Task
from medsilo_lab.engines.inprocess import Loop
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from results.attacks.attackers import Attack, Backdoor, Turn, patched

CPU = SiteSettings(device="cpu")


@dataclass(frozen=True)
class Outcome:
    score: float | None  # mean test score, or None if the study ended before the test
    sites: dict[str, float]
    # fraction of the honest hospitals' test images of other classes that models assign to the target class when the
    # images have the patch
    patched: float | None
    refused: int  # rounds in which the server rejected a dishonest hospital's answer
    reason: str | None
    rounds: list[Round] = field(repr=False, compare=False)


class LoopWithBad(Loop):
    """Exchange messages within one process; dishonest hospitals can collude, because they answer before honest
    hospitals.
    """

    def __init__(self, participants: Mapping[str, TrainingSite], attack: Attack, bad: Collection[str]) -> None:
        super().__init__(participants)
        self.attack, self.bad = attack, bad

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        asked = {site: outgoing(site) for site in sites if site in self.bad}
        missing: dict[str, Missing] = {}
        forged: dict[str, StudyMessage] = {}
        for site, message in asked.items():
            try:
                forged[site] = self.participants[site].answer(message)
            except MedsiloError as error:
                missing[site] = Missing.refused(error)
        if forged:
            self._forge(asked, forged)
        for site in sites:
            if site in missing:
                continue
            try:
                receive(site, forged.get(site) or self.participants[site].answer(outgoing(site)))
            except MedsiloError as error:
                missing[site] = Missing.refused(error)
        return missing

    def _forge(self, asked: Mapping[str, StudyMessage], answers: Mapping[str, StudyMessage]) -> None:
        first = min(answers)
        request = Request.received(asked[first].facts)
        self.attack.forge(
            Turn(self.participants[first].participant.context.plan, request.task, request.round, asked, answers)
        )


def run(plan: Plan, attack: Attack | None = None, bad: Collection[str] = ()) -> Outcome:
    sites = plan.participation.sites
    with TemporaryDirectory(prefix="medsilo-attacks-") as place:
        root = Path(place) / "study"
        participants = {}
        for site in sites:
            data = data_of(plan.task, site, sites, plan.seed)
            if attack and site in bad:
                data = attack.poison(data, plan.task)
            participants[site] = TrainingSite(
                participant_of(SiteContext(plan, site, sites, CPU, site_folder(root, site)), data)
            )
        loop = LoopWithBad(participants, attack, bad) if attack else Loop(participants)
        coordinator = Coordinator(plan, sites, loop, Record(root), "in-process", settings=CPU)
        reason = None
        try:
            coordinator.run()
        except MedsiloError as error:
            reason = str(error)
        return _outcome(plan, root, coordinator, bad, reason)


@cache
def data_of(task: Task, site: str, sites: tuple[str, ...], seed: int) -> SiteData:
    return task.read(site, list(sites), seed, None)


def _outcome(plan: Plan, root: Path, coordinator: Coordinator, bad: Collection[str], reason: str | None) -> Outcome:
    honest = [site for site in plan.participation.sites if site not in bad]
    rounds = coordinator.rounds
    refused = sum(1 for line in rounds if set(line.refused) & set(bad))
    tested: Mapping[str, Any] = coordinator.ends["test"].replies if "test" in coordinator.ends else {}
    scores = {site: float(tested[site].test) for site in honest if site in tested and tested[site].test is not None}
    if reason or len(scores) < len(honest):
        return Outcome(None, {}, None, refused, reason or "a hospital was not tested", rounds)
    mean = sum(scores.values()) / len(scores)
    return Outcome(mean, scores, success_of_patch(plan, root, honest), refused, None, rounds)


# ---------------------------------------------------------------------------------------------------- the backdoor
def success_of_patch(plan: Plan, root: Path, honest: Sequence[str]) -> float | None:
    """Return the fraction of test images that the honest hospitals' models assign to the target class when the images
    have the patch.

    Images whose true class is the target class don't count. Return None if the task has no classes.
    """
    if not plan.task.goal.classifies or len(plan.task.shape or ()) != 3:
        return None
    turned, counted = 0, 0
    for site in honest:
        cases = data_of(plan.task, site, plan.participation.sites, plan.seed).test
        assert isinstance(cases, Cases)
        images = patched(cases.inputs[cases.targets != Backdoor.target])
        with torch.no_grad():
            found = tested_model(plan, site_folder(root, site))(images).argmax(1)
        turned, counted = turned + int((found == Backdoor.target).sum()), counted + len(images)
    return turned / counted


def tested_model(plan: Plan, folder: Path) -> nn.Module:
    if (folder / paths.SUPER_MODEL).is_dir():
        return SuperModel.load(folder / paths.SUPER_MODEL)
    model = plan.algorithm.whole(plan.build_networks())
    model.load_state_dict(load_tensors(folder / paths.BEST)[0])
    return model.eval()
