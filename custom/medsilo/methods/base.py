"""What a federated method is: what is shared, how it is merged, what is trained."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import PlanError
from medsilo.core.section import Section
from medsilo.learning.harmony import Amplitude, Perturbation
from medsilo.learning.loop import Compute, Lesson, LossFunction, Objective, lesson, objective_of
from medsilo.learning.steps import Step, plain_step
from medsilo.learning.training import Training
from medsilo.methods.headquarters import Headquarters
from medsilo.mixing.mixers import Mixer, WeightedMean
from medsilo.models.network import Network

Tensors = dict[str, Tensor]
Groups = dict[str, Tensors]
Modules = dict[str, nn.Module]


@dataclass
class Parcel:
    """What travels between the server and one site: named groups of tensors and the facts beside them."""

    groups: Groups = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)

    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for group in self.groups.values() for tensor in group.values())


@dataclass(frozen=True)
class Phase:
    """A stretch of rounds in which the same groups travel."""

    name: str
    rounds: int
    trains: bool = True  # whether sites pass their training batches in it


@dataclass(frozen=True)
class Blueprint:
    """Makes the plan's network, as often as called; knows the shape of one case, where all have the same."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] | None
    channels: int
    sites: Sequence[str]  # that train, in sorted order; empty when the plan names none

    def __call__(self) -> nn.Module:
        return self.make()


@dataclass(frozen=True)
class Choice:
    """How a super model, made of the groups "global", "personal" and "selector", chooses among its models."""

    selector: Network
    rule: Literal["threshold", "argmax", "mixture"]


@dataclass(frozen=True)
class Workbench:
    """What a method finds at a site when it trains: the networks, their optimizers, and passes over the data."""

    site: str
    sites: Sequence[str]  # all that train, in sorted order
    modules: Modules
    optimizers: Mapping[str, Optimizer]
    training: Training
    loss: LossFunction  # the task's
    compute: Compute
    epoch: Callable[..., float]  # (lessons, number of the epoch, most batches) -> mean loss of the first
    data: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # the training data once, in their order
    samples: int  # training cases
    steps: int  # mini-batches in an epoch
    random: Generator  # for what a method draws at this site in this round
    perturbation: Perturbation | None  # the plan's

    def lesson(self, name: str = "model", objective: Objective | None = None, step: Step | None = None) -> Lesson:
        """One network learns from a batch; by default the task, by the plan's step: plain or perturbed."""
        model, optimizer = self.modules[name], self.optimizers[name]
        if step is None:
            step = self.perturbation.step(model, optimizer) if self.perturbation else plain_step
        return lesson(model, objective or objective_of(self.loss), optimizer, self.compute, step)

    def train(self, *lessons: Lesson, share: float = 1.0) -> float:
        """The plan's local epochs, by default on "model" alone: each batch is loaded once and serves every lesson.

        Returns the first lesson's mean loss in the last epoch. share: of all its mini-batches, only the first.
        """
        lessons = lessons or (self.lesson(),)
        most = max(1, math.ceil(share * self.training.local_epochs * self.steps))
        epochs = enumerate(range(0, most, self.steps))
        return [self.epoch(lessons, number, most - done) for number, done in epochs][-1]


class Algorithm(Section):
    """A method of the plan. Holds its numbers and no state: that lies in the site's networks and the server's mixers.

    Subclasses declare `name: Literal["..."] = "..."`, their own numbers, and override the piece that makes them what
    they are. Without overriding, this is federated averaging.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    travels: ClassVar[str]  # for the table of methods: what leaves a site
    pooled: ClassVar[bool] = False  # needs all data in one place, so it never runs on NVFlare
    passing: ClassVar[frozenset[str]] = frozenset()  # networks that a site needs within one round and never keeps
    # What a protocol says of the plan, by dotted key; a plan that declares the protocol may not say otherwise.
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    own_step: ClassVar[bool] = False  # the step is the method itself, so it can't be a perturbed one
    ending: ClassVar[str | None] = None  # the phase in which the outcome is delivered, when it is not the last round's
    # A group that is personal, and the one that stands for it where a site has none or does not let others have it.
    stand_in: ClassVar[Mapping[str, str]] = {}

    name: str
    amplitude: Amplitude | None = None  # the input layer of HarmoFL; see Harmonised
    perturbation: Perturbation | None = None  # its step

    @model_validator(mode="after")
    def _step_is_free(self) -> Self:
        if self.perturbation and self.own_step:
            raise PlanError(f"algorithm.perturbation: {self.name} has a step of its own; set it to null")
        return self

    def phases(self, training: Training) -> Sequence[Phase]:
        """The stretches of rounds, in order."""
        return [Phase("train", training.rounds)]

    def networks(self, build: Blueprint) -> Modules:
        """Every network a site holds; `build` makes the plan's network. "model" is the one that is evaluated."""
        return {"model": build()}

    def input_layer(self, modules: Modules) -> nn.Module | None:
        """What every batch passes through, once, before a network sees it, in training as in evaluation."""
        return None

    def whole(self, modules: Modules) -> nn.Module:
        """What is evaluated, saved and given to the hospital: "model", behind the input layer if there is one."""
        return modules["model"]

    def cautions(self, sites: Sequence[str]) -> list[str]:
        """What whoever starts the study should know of its numbers, one line each."""
        return []

    def make_optimizer(self, name: str, module: nn.Module, training: Training) -> Optimizer:
        """The optimizer of a network that learns."""
        return training.make_optimizer(module.parameters())

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        """The tensors that travel in a phase, by group: views into the site's networks, never copies."""
        return {"model": modules["model"].state_dict()}

    def given(self, modules: Modules, phase: str) -> Groups:
        """The tensors that a site is given in a phase, in the same form; by default those that it sends back.

        A group that is given and not sent back stays as it is: each site gets it once in a phase and keeps it.
        """
        return self.shared(modules, phase)

    def received(self, modules: Modules, groups: Collection[str], phase: str) -> None:
        """These groups have just been put into the networks; raises Refused when the site can't go on with them."""

    def averages(self, images: int, training: Training) -> int | None:
        """The fewest of a site's images whose average leaves the site; None when no average of images does."""
        return None

    # How it is merged
    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        """The server's mixer for a group in a phase that begins; `sites` are all the study's, in sorted order.

        `earlier` are the mixers of the groups that travelled before. The group's own hands over its state, so it
        must be of the same type.
        """
        return WeightedMean()

    def prepare(self, modules: Modules, at: Headquarters) -> dict[str, Any]:
        """Change the initial weights of groups that are about to travel for the first time. Server only, never on
        resuming. Returns facts for the summary's `details`."""
        return {}

    def examine(self, groups: Groups, phase: str) -> None:
        """Raises Refused when what a site sends has the right form but impossible values."""

    def found(self, mixers: Mapping[str, Mixer], sites: Sequence[str]) -> dict[str, Any]:
        """What the method found out about the sites, for the summary's `details`: a value that JSON can hold."""
        return {}

    def leaves(self, modules: Modules) -> list[str]:
        """What leaves a site besides its trained weights and scores, one line each, for the hospital's leak report."""
        return []

    def choice(self, modules: Modules) -> Choice | None:
        """How the super model chooses that is made at the end; None when the method makes none."""
        return None

    # What is trained
    def train(self, bench: Workbench, phase: str) -> float:
        """A site's work in one round; returns the training loss."""
        return bench.train()

    def personalise(self, bench: Workbench) -> None:
        """Make "model" of what a site has just received, where it is another network; on training data, if on any."""

    def personal(self, modules: Modules, phase: str) -> bool:
        """Whether sites end with models of their own: something of "model" stays behind."""
        travelling = memory_of(self.shared(modules, phase))
        return any(tensor.data_ptr() not in travelling for tensor in modules["model"].state_dict().values())

    def common(self, modules: Modules, phase: str) -> Modules | None:
        """The networks whose `whole` the lead gets, a model that all share; None where every site has only its own."""
        return None if self.personal(modules, phase) else modules

    def suits(self, training: Training) -> None:
        """Raises a PlanError when the method makes no sense with this training."""

    def check(self, modules: Modules) -> None:
        """Raises a PlanError when the method makes no sense on these networks (they may lie on the meta device)."""


def memory_of(groups: Groups) -> set[int]:
    """Where the tensors of these groups lie in memory: tells whether another view is the same tensor."""
    return {tensor.data_ptr() for tensors in groups.values() for tensor in tensors.values()}


def without(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensors:
    """The tensors that are not named."""
    kept_back = set(names)
    return {name: tensor for name, tensor in tensors.items() if name not in kept_back}


def require(names: Sequence[str], method: str, layer: str, remedy: str) -> None:
    """A method that keeps a kind of layer at the sites needs a network that has it."""
    if not names:
        raise PlanError(f"algorithm.name: {method} keeps {layer} at the sites, but this network has none; {remedy}")
