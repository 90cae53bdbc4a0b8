"""The plan: the one description of a study. Checked before anything starts, resolved, hashed."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union

import torch
import yaml
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator
from torch import Tensor, nn

from medsilo.core.errors import PlanError, YamlError
from medsilo.core.files import is_safe_name, load_yaml
from medsilo.core.section import SHOWN, Section, in_words
from medsilo.core.text import plain
from medsilo.learning.seeds import seed_for
from medsilo.learning.training import Training
from medsilo.methods import ALGORITHMS
from medsilo.methods.base import Algorithm, Blueprint
from medsilo.methods.harmonised import Harmonised
from medsilo.models import NETWORKS
from medsilo.tasks import TASKS


MOST_SITES = 4096
MOST_PARAMETERS = 500_000_000  # of all networks of a method together


class Participation(Section):
    """Which hospitals the study needs, and what happens when one is missing."""

    sites: tuple[str, ...] = Field((), max_length=MOST_SITES)  # empty: whoever is connected when the job starts
    unseen: tuple[str, ...] = Field(
        (), max_length=MOST_SITES
    )  # hospitals that do not train and are tested with the outcome
    minimum: int | None = Field(None, ge=1)  # contributors a round needs; by default all named sites
    # stop: any missing site ends the run. wait: ask it again until `patience` is over. continue: go on without it.
    # Going on always needs `minimum` contributors.
    when_missing: Literal["stop", "wait", "continue"] = "stop"
    timeout: int = Field(600, ge=1, le=86_400)  # seconds a site has for one answer
    patience: int = Field(3600, ge=1, le=604_800)  # seconds a round waits for missing sites under "wait"

    @field_validator("sites", "unseen")
    @classmethod
    def _names(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        for site in sites:
            if not is_safe_name(site):
                raise ValueError(
                    f"site name {site!r} has odd characters; use letters, digits, '.', '_' and '-' (at most 63)"
                )
        if len(set(sites)) < len(sites):
            raise ValueError(f"a site is named twice in {list(sites)}; name each once")
        return tuple(sorted(sites))

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not self.sites and self.minimum is None:
            raise ValueError("zero sites: name them in participation.sites, or set participation.minimum")
        if self.unseen and not self.sites:
            raise ValueError("unseen hospitals need named sites beside them; name those in participation.sites")
        if both := sorted({*self.sites} & {*self.unseen}):
            raise ValueError(f"{both[0]} stands under sites and under unseen; a hospital either trains or it doesn't")
        if self.sites and self.minimum is not None and self.minimum > len(self.sites):
            raise ValueError(f"minimum {self.minimum} is more than the {len(self.sites)} named sites; lower it")
        if self.sites and self.when_missing == "continue" and self.minimum in (None, len(self.sites)):
            raise ValueError(
                f"when_missing 'continue' can't go on while all {len(self.sites)} sites are required; lower minimum"
            )
        return self

    @property
    def everyone(self) -> tuple[str, ...]:
        """All named hospitals, those that train and those that don't."""
        return tuple(sorted({*self.sites, *self.unseen}))

    @property
    def required(self) -> int:
        """The contributors that every round needs."""
        return self.minimum if self.minimum is not None else len(self.sites)


class Transport(Section):
    """How tensors travel."""

    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16 halves the bytes and rounds every tensor sent

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor as it travels: float32 is rounded when the plan says so, all else stays as it is."""
        return tensor.bfloat16() if self.precision == "bfloat16" and tensor.dtype == torch.float32 else tensor


class Tracking(Section):
    """Which round's model is tested and kept as the result, and who is shown the rounds beside TensorBoard."""

    select: Literal["best", "last"] = "best"  # best on validation data, strictly greater replaces
    mlflow: bool = False  # a database for MLflow in the run's folder


def _one_of(table: Mapping[str, type[Section]]) -> Any:
    """The union of a table's sections, told apart by their `name`."""
    choices = tuple(table.values())
    return choices[0] if len(choices) == 1 else Annotated[Union[choices], Field(discriminator="name")]  # noqa: UP007


class Plan(Section):
    """A study: method, task, network, training, participation, seed."""

    algorithm: SerializeAsAny[_one_of(ALGORITHMS)]  # type: ignore[valid-type]
    task: SerializeAsAny[_one_of(TASKS)]  # type: ignore[valid-type]
    # by default the task's own
    network: SerializeAsAny[_one_of(NETWORKS)] = Field(default=None)  # type: ignore[valid-type]
    training: Training = Training()
    participation: Participation
    transport: Transport = Transport()
    tracking: Tracking = Tracking()
    seed: int = Field(0, ge=0, lt=2**32)
    # What the numbers of this plan follow; declared in every output.
    protocol: Literal["paper", "released-code", "clinical"] = "clinical"

    @property
    def method(self) -> Algorithm | Harmonised:
        """The algorithm with all that the plan adds to it: what server and sites follow."""
        amplitude = self.algorithm.amplitude
        return Harmonised(self.algorithm, amplitude, self.training) if amplitude else self.algorithm

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.network is None:
            object.__setattr__(self, "network", self.task.default_network())
        self.method.phases(self.training)  # raises where these rounds are too few
        with torch.device("meta"):
            networks = self.method.networks(self._blueprint())
        if (parameters := _parameters(networks)) > MOST_PARAMETERS:
            raise PlanError(f"network: has {parameters} parameters with all of the method's; {MOST_PARAMETERS} may be")
        self.method.check(networks)
        self.method.suits(self.training)
        self._network_reads_task(networks["model"])
        if self.participation.unseen:
            self._can_be_tested_elsewhere()
        self._keeps_its_protocol()
        return self

    def _network_reads_task(self, model: nn.Module) -> None:
        """One case of the task's shape goes through the network, without values."""
        shape = self.task.shape
        if shape is None:
            return
        try:
            with torch.no_grad():
                model.eval()(torch.zeros(2, *shape, device="meta"))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise PlanError(
                f"network.name: {self.network.name} can't read the inputs of task {self.task.name}, of shape "
                f"{list(shape)}; choose another network, its numbers or task.size"
            ) from error

    def _can_be_tested_elsewhere(self) -> None:
        """Something is there for a hospital that did not train: one model for all, or a super model."""
        algorithm, networks = self.algorithm, self.build_networks()
        if algorithm.personal(networks, self.last_phase) and not algorithm.choice(networks):
            raise PlanError(f"participation.unseen: {algorithm.name} leaves no model for hospitals that did not train")

    def _keeps_its_protocol(self) -> None:
        """A plan that declares a protocol follows it in all that the method says of it."""
        for key, wanted in self.algorithm.protocols.get(self.protocol, {}).items():
            own: Any = self
            for part in key.split("."):
                own = getattr(own, part, wanted)  # what is not there, as a network's norms, can't break the rule
            if own != wanted:
                raise PlanError(
                    f"{key}: {own!r}, but protocol '{self.protocol}' of {self.algorithm.name} has {wanted!r}; "
                    "change it, or declare protocol: clinical"
                )

    def _blueprint(self) -> Blueprint:
        task = self.task
        make = partial(self.network.build, task.channels, task.classes)
        return Blueprint(make, task.shape, task.channels, self.participation.sites)

    def build_networks(self) -> dict[str, nn.Module]:
        """The method's networks with the initial weights of this plan: the same at the server and at every site."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self.seed, "initial weights"))
            return self.method.networks(self._blueprint())

    @property
    def parameters(self) -> int:
        """The parameters of all the method's networks at a site, counted without making them."""
        with torch.device("meta"):
            return _parameters(self.method.networks(self._blueprint()))

    def phase_of(self, round_number: int) -> str:
        """The phase that a round (from 1) belongs to; after the last round, the last phase, if it has rounds or not."""
        return self.method.phases(self.training)[self.stage_of(round_number)].name

    def stage_of(self, round_number: int) -> int:
        """The place of that phase among all: a phase's name may come again later."""
        phases = self.method.phases(self.training)
        for place, phase in enumerate(phases):
            if round_number <= phase.rounds:
                return place
            round_number -= phase.rounds
        return len(phases) - 1

    @property
    def last_phase(self) -> str:
        """The phase after the last round, in which its outcome is given to the sites."""
        return self.phase_of(self.rounds + 1)

    @property
    def ending(self) -> str:
        """The phase in which the sites are given the outcome."""
        return self.algorithm.ending or self.last_phase

    def may_be_chosen(self, rounds: int) -> bool:
        """Whether the model after so many rounds is used as it was scored: before the last phase it isn't yet."""
        return self.phase_of(rounds + 1) == self.last_phase

    @property
    def rounds(self) -> int:
        """The rounds of all phases."""
        return sum(phase.rounds for phase in self.method.phases(self.training))

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, defaults included."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved plan as it is written to every run."""
        return yaml.safe_dump(self.resolved(), sort_keys=False)

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved plan."""
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()

    def with_changes(self, changes: Iterable[str]) -> "Plan":
        """This plan with `a.b=value` changes."""
        return parse_plan(self.resolved(), changes)


def _parameters(networks: Mapping[str, nn.Module]) -> int:
    return sum(tensor.numel() for network in networks.values() for tensor in network.parameters())


def load_plan(path: Path, changes: Iterable[str] = ()) -> Plan:
    """Read a plan.yaml, apply `a.b=value` changes, and check everything."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: the plan cannot be read ({type(error).__name__}); give a plan.yaml") from error
    try:
        values = load_yaml(text)
    except YamlError as error:
        raise PlanError(f"{path.name}: {error}; correct it") from error
    return parse_plan(values, changes)


def parse_plan(values: Any, changes: Iterable[str] = ()) -> Plan:
    """Check a plan given as nested dicts, with `a.b=value` changes."""
    if not isinstance(values, dict):
        raise PlanError("a plan is a YAML mapping with the keys algorithm, task, participation, ...")
    try:
        values = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise PlanError(f"a plan holds texts, numbers, lists and mappings only ({error}); quote such values") from error
    if values.get("network") is None:
        values.pop("network", None)
    for change in changes:
        _apply(values, change)
    try:
        plan = Plan.model_validate(values)
    except ValidationError as error:
        raise PlanError(in_words(error, Plan, {"algorithm": ALGORITHMS, "task": TASKS, "network": NETWORKS})) from error
    _refuse_truth_as_number(values, plan.resolved())
    return plan


def _refuse_truth_as_number(given: Any, taken: Any, key: str = "") -> None:
    """YAML reads yes as true, and pydantic takes true for 1: nobody means that."""
    if isinstance(given, dict) and isinstance(taken, dict):
        for name, value in given.items():
            _refuse_truth_as_number(value, taken.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(given, bool) and not isinstance(taken, bool):
        raise PlanError(f"{key}: {str(given).lower()} is a truth value (YAML takes yes and no for such); give a number")


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise PlanError(f"--set {change!r}: write it as key.subkey=value, for example training.rounds=3")
    *path, last = key.split(".")
    place = values
    for part in path:
        inner = place.get(part)
        place[part] = place = dict(inner) if isinstance(inner, dict) else {}
    try:
        value = load_yaml(text)
    except YamlError as error:
        shown = plain(repr(text), SHOWN)
        raise PlanError(f"--set {key}: {shown} is not a value that YAML knows: {error.problem}; quote it") from error
    if last == "name" and place.get("name") != value:
        place.clear()  # another method, task or network: the numbers of the one before don't carry over
        if path == ["task"]:
            values.pop("network", None)  # it was the other task's
    place[last] = value
