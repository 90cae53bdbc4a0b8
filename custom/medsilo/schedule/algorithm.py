"""Define the base class of federated methods."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import PlanError
from medsilo.core.section import Section
from medsilo.core.tensors import Modules, precision_of
from medsilo.learning.training import Training
from medsilo.schedule.additions import INPUT, Amplitude, Perturbation
from medsilo.schedule.declared import Private
from medsilo.schedule.outcome import OneModel, Outcome, OwnModels
from medsilo.schedule.phase import Group, ModelFactory, Phase, Schedule
from medsilo.schedule.weighting import Weighting
from medsilo.tasks.task import Task

if TYPE_CHECKING:
    from medsilo.schedule.train_context import TrainContext

# Represents the value of a key if the plan lacks the key's section.
MISSING = object()


class Algorithm(Section):
    """A federated method, as a section of the plan.

    A method object contains only settings, because the method's state is in the sites' networks and the server's
    aggregators. A subclass declares its name, title, paper and settings.

    Subclasses override `groups` (the exchanged tensors and their aggregation), `train_round` (training at a site) and
    `networks` (a site's networks). A subclass overrides `phases` if its rounds are not all equal. The final models are
    one model for all hospitals, or personal models (`personal`, `outcome`).

    >>> from medsilo.extend.methods import network
    >>> class HalfRounds(Algorithm):
    ...     name: str = "half-rounds"
    ...     def groups(self): return (Group("model", network("model")),)
    ...     def train_round(self, context): return context.train(share=0.5)
    >>> [(phase.name, phase.rounds) for phase in HalfRounds().phases(rounds=3)]
    [('train', 3)]
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    # Texts for `medsilo list`, which shows them if a method's own class states `suits`.
    sends: ClassVar[str]  # titles of the groups that leave a hospital; remarks follow after a semicolon
    stays: ClassVar[str] = "the state of the optimizer"  # training state that stays at a hospital
    bytes_sent: ClassVar[str] = "1"  # bytes per round compared with FedAvg
    extra_work: ClassVar[str] = "none"  # extra computation at a site
    suits: ClassVar[str]  # situations in which the method is worth a try
    pooled: ClassVar[bool] = False  # whether the method is a baseline on pooled data, which can't run on NVFlare
    # Names of networks that a site does not save, because the site rebuilds them in every round from the received
    # networks.
    made_anew: ClassVar[frozenset[str]] = frozenset()
    # For each protocol, the values that the protocol prescribes, by the plan's dotted keys. The protocol "default"
    # prescribes no value and is always allowed.
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    personal: ClassVar[bool] = False  # whether each hospital ends with a personal model
    # names of networks that train without noise even under differential privacy
    exact_networks: ClassVar[tuple[str, ...]] = ()
    # whether a round's training depends on how many rounds the study has
    paced: ClassVar[bool] = False
    # whether the method has its own training step; such a method can't use perturbed steps
    own_step: ClassVar[bool] = False
    # True if no user's script can replace the method's training loop, because the loop needs more for each batch than a
    # loss and a step.
    own_loop: ClassVar[bool] = False

    name: str
    weighting: Weighting | None = Field(
        None,
        description="weight of a site's update in a weighted mean: the site's number of `patients` or of `cases`, or "
        "the same weight for all sites (`uniform`). `null`: `patients` if a patient may have several "
        "cases, as in a hospital's own data; otherwise `cases`. The weights are computed from the "
        "disclosed numbers, which may be rounded",
    )
    # Additions that a plan can make to any method
    amplitude: Amplitude | None = Field(
        None,
        description="normalises images so that all images have the same amplitude spectrum. `{}` switches the "
        "amplitude normalisation on with default values; HarmoFL normalises by default",
    )
    perturbation: Perturbation | None = Field(
        None,
        description="computes gradients at perturbed weights. `{}` switches the perturbation on; HarmoFL perturbs by "
        "default. medsilo rejects the perturbation for Per-FedAvg, which has its own training step",
    )

    @model_validator(mode="after")
    def _step_is_free(self) -> Self:
        if self.perturbation and self.own_step:
            raise PlanError(f"algorithm.perturbation: {self.name} has its own training step; set the key to null")
        return self

    # The Python methods that a subclass overrides to define a federated method
    def phases(self, rounds: int) -> Sequence[Phase]:
        """Return the phases of a study in order, by default a single phase of training rounds."""
        return [Phase("train", rounds, self.groups(), self.train_round)]

    def groups(self) -> tuple[Group, ...]:
        return ()

    def train_round(self, context: "TrainContext") -> float:
        """Train a site's networks for one round, and return the training loss, or NaN if training computes no loss."""
        return context.train()

    @property
    def outcome(self) -> Outcome:
        """The kind of final models: one model for all hospitals, or a personal model for each hospital."""
        return OwnModels() if self.personal else OneModel()

    def networks(self, build: ModelFactory) -> Modules:
        """Return a site's networks by name. The network named "model" is evaluated.

        Args:
            build: makes a new instance of the plan's network
        """
        return {"model": build()}

    def make_optimizer(self, name: str, module: nn.Module, training: Training) -> Optimizer:
        """Return the optimizer of a network.

        Args:
            name: the network's name
            module: the network
            training: the plan's training settings
        """
        return training.make_optimizer(module.parameters())

    def personalise(self, context: "TrainContext") -> None:
        """Adapt the received networks to a site before validation. For adapting the networks, the method may use only
        the site's training data.
        """

    def measure_unseen(self, modules: Modules, inputs: Callable[[], Iterable[Tensor]]) -> None:
        """At an evaluation site, measure image statistics; training sites measure them during training.

        Args:
            modules: the site's networks by name
            inputs: a function that returns an iterator over batches of the site's training images, or of its test
                images if it has no training images
        """

    def private(self) -> Private | tuple[str, ...]:
        """Return the method's privacy mechanism; for most methods, it is enough to return the names of the networks
        that train with noisy steps.

        The tensors that a site sends must depend on its data only through the networks that train with noisy steps.
        Raises PlanError if the method's settings exclude differential privacy. A subclass must override this method,
        because an inherited privacy mechanism does not cover training that the subclass adds.
        """
        raise NotImplementedError

    @classmethod
    def declares_account(cls) -> bool:
        """Return True if this class itself, and not only a base class, declares a privacy mechanism."""
        return "private" in vars(cls)

    # Warnings about useless plans
    def warnings(self, sites: Sequence[str]) -> list[str]:
        """Return the warnings for the study's lead, one line each."""
        return []

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        """Yield each conflict between the plan and this method: the plan's key, the cause, and the remedy.

        Args:
            plan: the whole plan, a `medsilo.Plan`
            networks: the method's networks, on PyTorch's meta device
        """
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
        """Raise a PlanError if the method does not work with the plan's training settings."""

    def check_task(self, task: Task) -> None:
        """Raise a PlanError if the method does not work for the plan's task."""

    def check(self, modules: Modules) -> None:
        """Raise a PlanError if the method does not work with the given networks, which may be on PyTorch's meta
        device.
        """

    # Interface to the engine
    def course(self, training: Training) -> Schedule:
        """Return the study's schedule, which includes the exchange of amplitudes if the plan adds amplitudes."""
        phases = self.phases(training.rounds)
        if self.amplitude:
            if training.local_steps:
                raise PlanError(
                    "training.local_steps: an amplitude averages whole passes over the data; set the key to null"
                )
            phases = self.amplitude.over(phases)
        return Schedule(phases, self.outcome.delivery(phases[-1]))

    def modules(self, build: ModelFactory) -> Modules:
        """Return a site's networks; if the plan adds amplitudes, also return the input layer that normalises
        amplitudes.
        """
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
        # the layer has at least single precision, because half precision could overflow in the sum over an image's
        # pixels
        precision = torch.promote_types(precision_of(modules["model"]), torch.float32)
        return modules | {INPUT: self.amplitude.layer(build.shape).to(precision)}

    def privacy_mechanism(self, able: Iterable[str]) -> Private:
        """Return the plan's privacy mechanism, or raise PlanError if the method has no privacy mechanism.

        Args:
            able: the names of the methods that support differential privacy, for the error message
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
        """Return the plan's input layer, which transforms all inputs of training and evaluation, or None if the plan
        has no input layer.
        """
        return modules[INPUT] if self.amplitude else None

    def whole(self, modules: Modules, name: str = "model") -> nn.Module:
        """Return the module that is evaluated and saved: the plan's input layer, followed by a network.

        Args:
            modules: the site's networks by name
            name: the network's name
        """
        layer = self.input_layer(modules)
        model = modules[name]
        return model if layer is None else nn.Sequential(OrderedDict(input=layer, model=model))


def _value_at(plan: Any, key: str, wanted: Any) -> Any:
    """Return the value of a dotted key in a plan, or MISSING if the plan lacks the key's section.

    Args:
        wanted: the value that the protocol prescribes, which is returned if the section has no such key
    """
    own = plan
    for part in key.split("."):
        if own is None:
            return MISSING
        own = getattr(own, part, wanted)
    return own


# The values that the protocol "paper" prescribes for a method whose paper uses neither amplitudes nor perturbation.
BY_ITSELF: Mapping[str, Any] = {"algorithm.amplitude": None, "algorithm.perturbation": None}
