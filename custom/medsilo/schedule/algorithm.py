"""The definition of a federated method."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import PlanError
from medsilo.core.section import Section
from medsilo.core.tensors import Modules
from medsilo.learning.training import Training
from medsilo.schedule.additions import INPUT, Amplitude, Perturbation
from medsilo.schedule.declared import Private
from medsilo.schedule.outcome import OneModel, Outcome, OwnModels
from medsilo.schedule.phase import Group, ModelFactory, Phase, Schedule
from medsilo.tasks.task import Task

if TYPE_CHECKING:
    from medsilo.schedule.train_context import TrainContext

MISSING = object()  # in place of a value in a section that a plan leaves out


class Algorithm(Section):
    """A method of the plan. Holds its numbers and no state: that lies in the site's networks and the server's mixers.

    A subclass declares `name: Literal["..."] = "..."`, `title`, `paper` and its own numbers, and says in `groups` what
    travels and how it is mixed, in `train_round` what sites do, or in `phases` both where it is not the same in all
    rounds; in `networks` what a site holds; by `personal` or in `outcome` how a study ends.

    >>> from medsilo.registry import METHODS
    >>> fedprox = METHODS["fedprox"](mu=0.1)
    >>> fedprox.title, fedprox.mu, issubclass(METHODS["fedprox"], Algorithm)
    ('FedProx', 0.1, True)
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    pooled: ClassVar[bool] = False  # needs all data in one place, so it never runs on NVFlare
    # Networks that are made in every round from what arrives: a site does not keep them on its disk.
    made_anew: ClassVar[frozenset[str]] = frozenset()
    # What a protocol says of the plan, by dotted key; a plan that declares the protocol may not say otherwise. A
    # protocol that is missing here can't be declared, but for "default", which says nothing.
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    personal: ClassVar[bool] = False  # whether each hospital ends with a model of its own
    exact_networks: ClassVar[tuple[str, ...]] = ()  # networks that learn by exact steps where privacy is promised
    paced: ClassVar[bool] = False  # a round's work depends on how many rounds there are
    own_step: ClassVar[bool] = False  # the step is the method itself, so it can't be a perturbed one

    name: str
    # What a plan may add to any method
    amplitude: Amplitude | None = Field(
        None,
        description="all images take one amplitude spectrum. `{}` switches it on with its defaults; HarmoFL has it on",
    )
    perturbation: Perturbation | None = Field(
        None,
        description="gradients are taken at perturbed weights. `{}` switches it on; HarmoFL has it on. Per-FedAvg, "
        "whose step is its own, refuses it",
    )

    @model_validator(mode="after")
    def _step_is_free(self) -> Self:
        if self.perturbation and self.own_step:
            raise PlanError(f"algorithm.perturbation: {self.name} has its own training step; set it to null")
        return self

    # What makes a method
    def phases(self, rounds: int) -> Sequence[Phase]:
        """Return the phases in order: what travels, how it is mixed, what a site does."""
        return [Phase("train", rounds, self.groups(), self.work)]

    def groups(self) -> tuple[Group, ...]:
        """Return what travels in every round."""
        return ()

    def work(self, bench: "TrainContext") -> float:
        """Train in a round, with a site's networks and passes over its data; returns the training loss, or NaN."""
        return bench.train()

    @property
    def outcome(self) -> Outcome:
        """Return how a study ends: with one model, or with one of each hospital's own."""
        return OwnModels() if self.personal else OneModel()

    def networks(self, build: ModelFactory) -> Modules:
        """Return every network a site holds; `build` makes the plan's network. "model" is the one that is evaluated."""
        return {"model": build()}

    def make_optimizer(self, name: str, module: nn.Module, training: Training) -> Optimizer:
        """Return the optimizer of a network that learns."""
        return training.make_optimizer(module.parameters())

    def personalise(self, bench: "TrainContext") -> None:
        """Make "model" of what a site has just received, where it is another network; on training data, if on any."""

    def measure_unseen(self, modules: Modules, inputs: Callable[[], Iterable[Tensor]]) -> None:
        """Measure, at a hospital that did not train, what all others know of their own images; no label is used.

        inputs: each call goes through its training cases in batches, or through its test cases where it has no others.
        """

    def private(self) -> Private | tuple[str, ...]:
        """Return how the method keeps a promise of privacy: by default by the networks that learn by noisy steps, from
        which all follows that leaves; raises PlanError where it can't with these numbers.

        A method declares that for itself: what it does beside the one that it derives from is not covered by that.
        """
        raise NotImplementedError

    @classmethod
    def declares_account(cls) -> bool:
        """Return whether the method itself says how it keeps a promise of privacy."""
        return "private" in vars(cls)

    # What makes no sense
    def warnings(self, sites: Sequence[str]) -> list[str]:
        """Return what the person who starts the study should know of its numbers, one line each."""
        return []

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        """Yield why the plan can't have this method: where, what, and what to do instead."""
        if plan.protocol != "default" and plan.protocol not in self.protocols:
            told = " or ".join(["default", *self.protocols])
            yield f"protocol: {plan.protocol!r} says nothing of {self.name}; declare {told}"
        for key, wanted in self.protocols.get(plan.protocol, {}).items():
            own = _value_at(plan, key, wanted)
            if own != wanted:
                told, act = ("there is none", "set it") if own is MISSING else (repr(own), "change it")
                yield (
                    f"{key}: {told}, but protocol '{plan.protocol}' of {self.name} has {wanted!r}; {act}, or declare "
                    "protocol: default"
                )

    def check_training(self, training: Training) -> None:
        """Raise a PlanError when the method makes no sense with this training."""

    def check_task(self, task: Task) -> None:
        """Raise a PlanError when the method makes no sense for this task."""

    def check(self, modules: Modules) -> None:
        """Raise a PlanError when the method makes no sense on these networks (they may lie on the meta device)."""

    # What the engine asks
    def course(self, training: Training) -> Schedule:
        """Return the study's phases, with those groups that the plan's input layer adds."""
        phases = self.phases(training.rounds)
        if self.amplitude:
            if training.local_steps:
                raise PlanError(
                    "training.local_steps: an amplitude averages whole passes over the data; set it to null"
                )
            phases = self.amplitude.over(phases)
        return Schedule(phases, self.outcome.delivery(phases[-1]))

    def modules(self, build: ModelFactory) -> Modules:
        """Return every network a site holds, and the input layer if the plan has one."""
        modules = self.networks(build)
        if self.amplitude is None:
            return modules
        if build.shape is None:
            raise PlanError("algorithm.amplitude: needs images of one size; set task.size or algorithm.amplitude=null")
        if len(build.shape) < 2:
            raise PlanError(
                "algorithm.amplitude: a table's columns have no spectrum; set algorithm.amplitude=null (HarmoFL's step "
                "is algorithm.perturbation, which any method takes)"
            )
        return modules | {INPUT: self.amplitude.layer(build.shape)}

    def privacy_mechanism(self, able: Iterable[str]) -> Private:
        """Return how the plan's promise of privacy is kept; raises PlanError where it would be false.

        able: names of methods that declare an account.
        """
        if not self.declares_account():
            raise PlanError(
                f"privacy: {self.name} sends numbers without noise, which breaks the promise; use {', '.join(able)}, "
                f"or leave privacy out"
            )
        if self.amplitude and not self.amplitude.released_alone:
            raise PlanError(
                "algorithm.amplitude: an amplitude measured while training leaves without noise, which breaks the "
                "promise of privacy; set algorithm.amplitude.measured=before, or algorithm.amplitude=null"
            )
        told = self.private()
        return told if isinstance(told, Private) else Private(told, self.exact_networks)

    def input_layer(self, modules: Modules) -> nn.Module | None:
        """Return what every batch passes through once before a network sees it, in training as in evaluation."""
        return modules[INPUT] if self.amplitude else None

    def whole(self, modules: Modules, name: str = "model") -> nn.Module:
        """Return what is evaluated, saved and given to the hospital: a network, behind the input layer if any."""
        layer = self.input_layer(modules)
        model = modules[name]
        return model if layer is None else nn.Sequential(OrderedDict(input=layer, model=model))


def _value_at(plan: Any, key: str, wanted: Any) -> Any:
    """Return a plan's value at a dotted key: `wanted` where there is no such key, which so can't break a rule."""
    own = plan
    for part in key.split("."):
        if own is None:
            return MISSING
        own = getattr(own, part, wanted)
    return own


# What "paper" says of a method that its paper describes without these additions.
BY_ITSELF: Mapping[str, Any] = {"algorithm.amplitude": None, "algorithm.perturbation": None}
