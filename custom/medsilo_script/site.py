"""Run a site whose networks a user's script trains; the site answers the server like any other site.

The method's `train_round` runs unchanged in a separate thread. When the method trains a network, the method's thread
waits until the script's loop has trained the network.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.own_code import own_line
from medsilo.core.reused_memory import copied
from medsilo.core.tensors import Tensors
from medsilo.core.text import is_safe_name
from medsilo.federation.file_supply import take_files
from medsilo.federation.permission import Permission
from medsilo.federation.protection import Protection
from medsilo.federation.site_context import Site, SiteContext
from medsilo.federation.site_stack import training_site
from medsilo.learning.compute import Stop
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Request, StudyMessage
from medsilo.schedule.algorithm import Algorithm
from medsilo.site.settings import SiteSettings
from medsilo_script.data import Data, Metrics, refuse_beside_opacus
from medsilo_script.handover import Work
from medsilo_script.network import ScriptNetwork
from medsilo_script.participant import scored, script_participant
from medsilo_script.state import ScriptState, has_own_steps
from medsilo_script.task import ScriptTask

LOG = logging.getLogger(__name__)


def _refuse_optimizer(method: Algorithm, model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MedsiloError("join: LBFGS computes the loss many times in a step; use another optimizer, such as SGD")
    steps = {id(own) for group in optimizer.param_groups for own in group["params"]}
    learning = {name: id(own) in steps for name, own in model.named_parameters() if own.requires_grad}
    if not any(learning.values()):
        raise MedsiloError("join: the optimizer has none of the model's weights; create it from model.parameters()")
    if lacks := next((name for name, own in learning.items() if not own), ""):
        told = f"join: the optimizer lacks {lacks}; give one of all weights that learn, or freeze the others"
        if has_own_steps(method):
            raise MedsiloError(f"{told} by requires_grad_(False), as {method.title} requires")
        LOG.warning("%s: a restart loses the state of any other optimizer", told)


def _refuse_lacking(plan: Plan, data: Data) -> None:
    """Raise MedsiloError before the first round if the method needs an argument of `join` that is missing."""
    method, outcome = plan.algorithm, plan.algorithm.outcome
    data.method = method.title
    if method.own_loop or method.amplitude or method.perturbation or not outcome.one_network:
        refuse_beside_opacus(method.title)
    if outcome.one_network:
        return
    if data.validation is None:
        raise MedsiloError(f"join: {method.title} needs validation=, a loader of validation batches with their labels")
    # a method trains its selector with the script's loss, unless the method computes scores for the selector
    if not outcome.scores_besides and data.loss is None:
        raise MedsiloError(f"join: {method.title} needs loss=, the function of (output, target) that you train with")


# Settings without restrictions, because medsilo cannot restrict the data that a script sends.
SETTINGS = SiteSettings(device="cpu", public_data=True, min_patients_per_metric=1, share_personal_model=True)


class CountedSite:
    """Wraps a script's site, and subtracts each answer from the hospital's query budget."""

    def __init__(self, inner: Site, context: SiteContext) -> None:
        """Raise Refused unless the hospital has approved the study and its query budget permits the study.

        Args:
            inner: The site that answers requests.
        """
        self.inner, self.protection = inner, Protection(context)
        self.protection.admit()

    def answer(self, message: StudyMessage, stop: Stop) -> StudyMessage:
        reply = self.inner.answer(message, stop)
        # the reduced budget is written to the disk before the answer leaves the site
        self.protection.note_script(reply)
        return reply


class ScriptSite:
    """A site that answers requests and waits while the script trains; this class does not depend on NVFlare."""

    def __init__(
        self,
        plan: Plan,
        site: str,
        output: Path,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        scheduler: Any = None,
        home: SiteSettings = SETTINGS,
        hospital: SiteContext | None = None,
    ) -> None:
        """Prepare a site whose networks the script trains.

        Args:
            hospital: The context of the job at a hospital with a startup kit.
        """
        self.plan, self.site, self.output, self.data, self.hospital = plan, site, output, data, hospital
        self.home = hospital.settings if hospital else home
        assert isinstance(plan.network, ScriptNetwork)
        _refuse_optimizer(plan.algorithm, model, optimizer)
        _refuse_lacking(plan, data)
        plan.network.make_by(model)
        self._make = lambda folder: ScriptState(self.plan, site, folder, model, optimizer, scheduler, data.loss)
        self.state: ScriptState
        self.asked: Request | None = None
        self.waiting: Any = None  # the received model, which waits until the script calls `send`
        self.work = Work()
        self._inner: Site | None = None
        self._told: dict[str, int] = {}

    def ask(self, message: StudyMessage) -> StudyMessage | None:
        """Answer a request, or return None if the script must train before the answer.

        Raise `WeightsMissing` if the initial weights are missing.
        """
        asked = self.asked = Request.received(message.facts)
        if not is_safe_name(asked.study):  # a folder is named after the study, so the name must be safe
            raise Refused("the study's name has odd characters")
        self.plan = self.plan.among(asked.sites)
        if asked.plan != self.plan.hash:
            raise Refused("the job's plan at this site differs from the server's; submit the job again")
        if asked.stated != self._told and asked.stated:
            self._told = asked.stated
            told = ", ".join(f"{site} {cases:,}" for site, cases in sorted(asked.stated.items()))
            LOG.info("training cases, as each site states them: %s", told)
        folder = paths.site_folder(self.output / asked.study, self.site)
        sites = sorted(self.plan.participation.sites or asked.sites)
        place = SiteContext(self.plan, self.site, sites, SETTINGS, folder)
        model_folders.look_in(place.models)
        order = take_files(place, message)
        if self._inner is None:
            self.state = self._make(folder)
            kind = partial(script_participant, self.data, self.work, self.state, self.home)
            self._inner = self._permitted(training_site(place, kind), asked)
        self.state.follow()
        self.state.refuse_other_learning()
        self.data.passing = False
        self.work.begin(partial(self._answer, order))
        return self.work.answer

    def _permitted(self, inner: Site, request: Request) -> Site:
        if self.hospital is None:
            return inner
        study = self.hospital.folder.parents[2] / request.study
        place = replace(self.hospital, sites=request.sites, folder=paths.site_folder(study, self.site))
        permission = Permission(place)
        permission.begin()
        permission.inner = CountedSite(inner, place)
        return permission

    def _answer(self, order: StudyMessage) -> StudyMessage:
        """Answer a request. If a method that iterates over the script's data fails, explain the error.

        The explanation names the arguments of `join` that may need a change.
        """
        assert self._inner
        try:
            return self._inner.answer(order, lambda: None)
        except Exception as error:
            if isinstance(error, MedsiloError) or not self.data.passing:
                raise
            raise MedsiloError(
                f"join: {type(error).__name__}: {error}{own_line(error)}. {self.plan.algorithm.title} calls "
                "net(inputs) and loss(output,"
                " targets) in a separate pass over the data; give batch= and loss= that fit"
            ) from error

    @property
    def metric(self) -> str:
        assert isinstance(self.plan.task, ScriptTask)
        return self.plan.task.metric

    @property
    def has_answered(self) -> bool:
        return self.waiting is not None and self.work.answer is not None

    def weights(self) -> Tensors:
        return {name: copied(own) for name, own in self.state.module.state_dict().items()}

    def networks(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        while turn := self.work.now:
            if turn.by_script:
                yield self.state.modules[turn.name], self.state.stepping(turn.name)
            self._go_on()

    def _go_on(self, score: float | None = None) -> None:
        """Continue the site's thread, after the script has trained a network or called `send`."""
        self.state.follow()
        self.work.go_on(score)

    def finish(self, metrics: Metrics | float | None = None) -> StudyMessage:
        """Return the site's answer in the current round. `metrics` are the metrics of the received model before
        training.
        """
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
