"""Measure HarmoFL's drift Γ (Eq. 9): the distance of sites' models from the server's model within a round.

Γ also falls when the loss falls, because a collapsed or overfitted model hardly changes. Therefore, compare Γ of two
methods at equal training loss instead of in the same round.
"""

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.core.tensors import Modules
from medsilo.federation.participant import Participant, parts_of
from medsilo.federation.site_context import SiteContext, UpdateCodec
from medsilo.federation.trainer import Trainer
from medsilo.learning.compute import Stop
from medsilo.plan import Plan
from medsilo.runs.schema import Summary
from medsilo.schedule.phase import Phase, places_of, views
from medsilo.schedule.train_context import TrainContext
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import SiteData
from results.analyses.analysis import AnalysisResult, Question
from results.analyses.figures import panels, style
from results.analyses.finished import FinishedRun
from tests import inprocess


class WatchedTrainer(Trainer):
    """Measure ‖θ_{i,k} − θ^t‖² after each of a site's K training steps in a round.

    θ contains the trained weights of one network that the site sends in the round; θ does not contain batch norm's
    running statistics.
    """

    network = "model"
    rounds: dict[int, dict[str, Any]]
    squares: list[float]
    sent: Sequence[tuple[Tensor, Tensor]] = ()

    def train_context(self, purpose: str, number: int, stop: Stop) -> TrainContext:
        context = super().train_context(purpose, number, stop)
        if self.sent:
            self.hook = context.optimizers[self.network].register_step_post_hook(self._measure)
        return context

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        weights = travelling_weights(phase, self.state.modules, self.network)
        self.sent, self.squares = [(weight, weight.detach().clone()) for weight in weights], []
        loss = super().work(number, phase, stop)
        if self.sent:
            self.hook.remove()
        self.sent = []
        if self.squares:
            gamma = sum(self.squares) / len(self.squares)
            self.rounds[number] = {"gamma": gamma, "steps": len(self.squares), "train_loss": loss}
        return loss

    @torch.no_grad()
    def _measure(self, *_: Optimizer | tuple | dict) -> None:
        self.squares.append(sum(float((weight - before).square().sum()) for weight, before in self.sent))


class WatchedParticipant(Participant):
    trainer: WatchedTrainer

    def __init__(
        self, network: str, context: SiteContext, data: SiteData | None = None, codec: UpdateCodec | None = None
    ) -> None:
        super().__init__(context, parts_of(context, data, WatchedTrainer), codec)
        self.trainer.network, self.trainer.rounds = network, {}


def replay(
    plan: Plan, sites: Sequence[str], settings: SiteSettings, network: str
) -> tuple[list[WatchedParticipant], Summary]:
    watched: list[WatchedParticipant] = []

    def site(*given: Any, **more: Any) -> WatchedParticipant:
        watched.append(WatchedParticipant(network, *given, **more))
        return watched[-1]

    plan = plan.with_changes([f"participation.sites={list(sites)}"])
    return watched, inprocess.run(plan, settings=settings, kind=site).summary


def drifts(runs: Sequence[FinishedRun], asked: Question) -> AnalysisResult:
    """Train each plan once more in this process; return Γ and the training loss of every round and site."""
    found: list[dict[str, Any]] = []
    lines = []
    for run in runs:
        network = _travelling(run.plan, asked.network)
        watched, summary = replay(run.plan, run.sites, asked.settings, network)
        same = all(
            (mine.validation, mine.test) == (theirs.validation, theirs.test)
            for mine, theirs in ((summary.sites[site], run.summary.sites[site]) for site in run.sites)
        )
        rounds = [
            {
                "round": number,
                "gamma": sum(site.trainer.rounds[number]["gamma"] for site in trained) / len(trained),
                "train_loss": sum(site.trainer.rounds[number]["train_loss"] for site in trained) / len(trained),
                "sites": {site.context.site: site.trainer.rounds[number] for site in trained},
            }
            for number in range(1, run.plan.rounds + 1)
            if (trained := [site for site in watched if number in site.trainer.rounds])
        ]
        if not rounds:
            raise MedsiloError(
                f"{run.label}: no optimizer moves the weights that travel, so there are no steps to measure"
            )
        found.append({"run": run.label, "network": network, "equals_the_run": same, "rounds": rounds})
        first, last = rounds[0], rounds[-1]
        ends = [f"{end['gamma']:.4g} at training loss {end['train_loss']:.3f}" for end in (first, last)]
        lines.append(f"{run.label}: Γ {ends[0]} in round {first['round']}, {ends[1]} in round {last['round']}")
        if not same:
            lines.append(f"{run.label}: the replay's scores are not the run's (another machine, or sites were missing)")
    figure, ((by_round, by_loss),) = panels(1, 2, 4.2, 3.4)
    for place, one in enumerate(found):
        gammas = [line["gamma"] for line in one["rounds"]]
        by_round.plot([line["round"] for line in one["rounds"]], gammas, label=one["run"], markersize=4, **style(place))
        by_loss.plot([line["train_loss"] for line in one["rounds"]], gammas, markersize=4, **style(place))
    by_round.set(xlabel="round", ylabel="Γ, mean over sites (Eq. 9)", ylim=(0, None))
    by_loss.set(xlabel="training loss of the round", ylim=(0, None), title="compare where losses are equal")
    by_loss.invert_xaxis()
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_round.legend(fontsize=8)
    return AnalysisResult({"drifts": found}, {"drift": figure}, lines)


def travelling_weights(phase: Phase, modules: Modules, name: str) -> list[nn.Parameter]:
    sent = {place for tensors in views(phase.sent, modules).values() for place in places_of(tensors.values())}
    return [weight for weight in modules[name].parameters() if weight.data_ptr() in sent] if name in modules else []


def _travelling(plan: Plan, asked: str | None) -> str:
    """Return the name of the network whose trained weights a site sends to the server. The default name is "global" for
    methods with personal models, and "model" for all other methods.
    """
    if plan.algorithm.pooled:
        raise MedsiloError(f"{plan.algorithm.name} has no rounds between sites, so nothing drifts; give another run")
    modules = plan.build_networks()
    for name in [asked] if asked else ["global", "model"]:
        if travelling_weights(plan.course.last, modules, name):
            return name
    which = f" of {asked}" if asked else ""
    raise MedsiloError(f"{plan.algorithm.name} sends no trained weights{which}, so nothing drifts; give another run")
