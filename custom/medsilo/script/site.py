"""A site whose networks a user's own script trains. It answers the coordinator as any site does.

The method's own `train_round` runs here, unchanged. Where it would pass over the data, the script's loop takes its
place: the work waits in a thread of its own until the script has trained each network.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.tensors import Tensors
from medsilo.core.text import is_safe_name
from medsilo.federation.file_supply import take_files
from medsilo.federation.site_context import Site, SiteContext
from medsilo.federation.site_stack import training_site
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Request, StudyMessage
from medsilo.schedule.algorithm import Algorithm
from medsilo.script.data import Data, Metrics
from medsilo.script.handover import Work
from medsilo.script.network import ScriptNetwork
from medsilo.script.participant import ScriptParticipant, scored
from medsilo.script.state import ScriptState, has_own_steps
from medsilo.site.settings import SiteSettings


def _refuse_optimizer(method: Algorithm, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise MedsiloError for an optimizer by which the method would not train the model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MedsiloError("join: LBFGS looks at the loss many times in a step; take another optimizer, as SGD")
    steps = {id(own) for group in optimizer.param_groups for own in group["params"]}
    learning = {name: id(own) in steps for name, own in model.named_parameters() if own.requires_grad}
    if not any(learning.values()):
        raise MedsiloError("join: the optimizer has none of the model's weights; make it of model.parameters()")
    if lacks := next((name for name, own in learning.items() if not own), ""):
        told = f"join: the optimizer lacks {lacks}; give one of all weights that learn, or freeze the others"
        if has_own_steps(method):
            raise MedsiloError(f"{told} by requires_grad_(False): {method.title} needs it")
        logging.getLogger(__name__).warning("%s: a restart loses the state of any other optimizer", told)


def _refuse_lacking(plan: Plan, data: Data) -> None:
    """Raise MedsiloError before the first round where the study's end needs what the script does not give."""
    method, outcome = plan.algorithm, plan.algorithm.outcome
    if outcome.one_network:
        return
    if data.validation is None:
        raise MedsiloError(f"join: {method.title} needs validation=, a loader of validation batches with their labels")
    if not outcome.scores_besides and data.loss is None:  # without a threshold its selector learns by the loss
        raise MedsiloError(f"join: {method.title} needs loss=, the function of (output, target) that you train with")


# As of data that need no protection: what leaves is decided by the script.
SETTINGS = SiteSettings(device="cpu", public_data=True, min_patients_per_metric=1, share_personal_model=True)


class ScriptSite:
    """A site of a study, without NVFlare: it is asked, and the script trains in between."""

    def __init__(
        self,
        plan: Plan,
        site: str,
        output: Path,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        scheduler: Any = None,
    ) -> None:
        """output: the folder under which this site keeps its studies."""
        self.plan, self.site, self.output, self.data = plan, site, output, data
        assert isinstance(plan.network, ScriptNetwork)
        _refuse_optimizer(plan.algorithm, model, optimizer)
        _refuse_lacking(plan, data)
        plan.network.make_by(model)
        self._make = lambda folder: ScriptState(self.plan, site, folder, model, optimizer, scheduler, data.loss)
        self.state: ScriptState
        self.asked: Request | None = None
        self.waiting: Any = None  # what the script receives, until it has sent
        self.work = Work()
        self._inner: Site | None = None

    def ask(self, parcel: StudyMessage) -> StudyMessage | None:
        """Answer a parcel; None where the script has to train first. Raises Lacks without the initial weights."""
        asked = self.asked = Request.received(parcel.facts)
        if not is_safe_name(asked.study):  # it becomes the name of a folder here
            raise Refused("the study's name has odd characters")
        self.plan = self.plan.among(asked.sites)
        if asked.plan != self.plan.hash:
            raise Refused("the job's plan at this site differs from the server's; submit the job again")
        folder = paths.site_folder(self.output / asked.study, self.site)
        sites = sorted(self.plan.participation.sites or asked.sites)
        place = SiteContext(self.plan, self.site, sites, SETTINGS, folder)
        model_folders.look_in(place.models)
        order = take_files(place, parcel)
        if self._inner is None:
            self.state = self._make(folder)
            self._inner = training_site(place, partial(ScriptParticipant, self.data, self.work, self.state))
        self.state.follow()
        self.state.refuse_other_learning()
        self.data.passing = False
        self.work.begin(partial(self._answer, order))
        return self.work.answer

    def _answer(self, order: StudyMessage) -> StudyMessage:
        """Answer a request. Where a method's own pass over the data fails, the error says which argument to change."""
        assert self._inner
        try:
            return self._inner.answer(order, lambda: None)
        except Exception as error:
            if isinstance(error, MedsiloError) or not self.data.passing:
                raise
            raise MedsiloError(
                f"join: {type(error).__name__}: {error}. {self.plan.algorithm.title} calls net(inputs) and loss(output,"
                " targets) in a pass of its own; give batch= and loss= that fit"
            ) from error

    def weights(self) -> Tensors:
        """Return the model's weights as they are now, in memory of their own."""
        return {name: own.detach().to("cpu", copy=True) for name, own in self.state.module.state_dict().items()}

    def networks(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        """Yield each network that is to be trained in this round, and the optimizer to step with."""
        while turn := self.work.now:
            yield self.state.modules[turn.name], self.state.stepping(turn.name)
            self._go_on()

    def _go_on(self, score: float | None = None) -> None:
        """Let the site go on: the script has trained the network whose turn it was, or has sent."""
        self.state.follow()
        self.work.go_on(score)

    def finish(self, metrics: Metrics | float | None = None) -> StudyMessage:
        """Answer the round that was asked, now that the script has trained. metrics: of the model as it arrived."""
        work = self.work
        if not work.now and not work.sends:
            raise MedsiloError("send: there is no round to answer; call is_running() first")
        score = None if metrics is None or self.data.evaluate else scored(self.plan.task, metrics)
        if work.now:
            trained = work.now.name
            self._go_on()
            if work.now:
                raise MedsiloError(
                    f"send: {self.plan.algorithm.title} has two networks, and this round trained only {trained!r}; put "
                    "'for net, optimizer in flare.networks():' around your loop, and train net"
                )
        self._go_on(score)
        assert work.answer
        return work.answer
