"""Define the plan, the only description of a study. Before a study starts, medsilo checks the plan, fills in default
values, and hashes the plan.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator
from torch import nn

from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.package import ALWAYS, facts_of, is_here, is_ours, ours_behind
from medsilo.core.section import Feature, Section, checked
from medsilo.core.text import STEERING, counted, plain
from medsilo.core.yaml_text import dump_yaml, read_yaml
from medsilo.learning.seeds import seed_for, seed_torch
from medsilo.learning.training import Training
from medsilo.mixing.mean_forms import Form
from medsilo.mixing.robust import AggregationSettings
from medsilo.models.network import Network, parameters_of
from medsilo.registry import AGGREGATIONS, ANY, LAYERS, METHODS, NETWORKS, TABLES, TASKS, check_packages, table_of
from medsilo.schedule.algorithm import Algorithm
from medsilo.schedule.declared import PrivacyOffer, Private
from medsilo.schedule.layer import Layer
from medsilo.schedule.participation import Participation, names_for
from medsilo.schedule.phase import ModelFactory, Phase, Schedule
from medsilo.schedule.weighting import Weighting
from medsilo.tasks.task import Task

if TYPE_CHECKING:  # an optional package defines SecureAggregation
    from medsilo.schedule.sealing import SecureAggregation

NAMING = ("from", "question", "plans")  # keys of network and task that may name a file in the plan's folder
LONGEST_LINE = 300  # maximum bytes of one line in the lead's description of a study
MEASURED_LINE = 4000  # default value; with this value, medsilo measures the speed of the slowest connection
CLEAR = "No secure aggregation: the server, and anyone who reads its disk, sees every update that leaves a hospital."


class ModelSelection(Feature):
    """The plan's choice of a round; the model of this round is the study's final model, which the sites test."""

    keep: Literal["best", "last"] = Field(
        "best",
        description="the round whose model is tested and kept as `best`: the last round, or the round with the best "
        "validation score. If several rounds share the best score, the first of them is chosen",
    )
    validate_every: int = Field(
        1,
        ge=1,
        le=10_000,
        description="number of rounds from one validation to the next; sites also validate before the first round and "
        "after the last round. Only a validated round can be the best round",
    )


def _one_line(text: str) -> str:
    if text != plain(text, LONGEST_LINE):
        raise ValueError(f"the text is not one line of at most {LONGEST_LINE} bytes; shorten it, without line breaks")
    return text


Line = Annotated[str, AfterValidator(_one_line)]


class TransportSettings(Feature):
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="`bfloat16`: every tensor is rounded to bfloat16 before it is sent, which halves "
        "the number of bytes",
    )
    slowest: int = Field(
        MEASURED_LINE,
        ge=8,
        le=1_000_000,
        description="speed of the slowest connection in kbit/s; a chunk of a tensor has at most the size that this "
        "connection sends in ten seconds. With the default of 4000 kbit/s, a chunk has 1 MiB. At any time, the "
        "chunks in transit have together as many bytes as the connection sends in two seconds at its measured speed",
    )

    @property
    def rate(self) -> float | None:
        """Return the speed of the slowest connection, in bytes per second, as the plan states it; return None if
        medsilo measures the speed.
        """
        return None if self.slowest == MEASURED_LINE else self.slowest * 1000 / 8


class SecureAggregationSettings(Feature):
    """A plan's settings of secure aggregation, by which hospitals mask their updates, so that the server reads only
    sums.
    """

    mode: Literal["none", "pairwise"] = Field(
        "none",
        description="whether hospitals mask their updates, so that the server cannot read a single hospital's update. "
        "With `pairwise`, the server learns only sums over hospitals",
    )
    threshold: int | None = Field(
        None,
        ge=2,
        le=256,
        description="with `pairwise`: the number t. The sum of a round can be unmasked only if at least t of the K "
        "hospitals stay. t is above K/2. Even with the help of t - 1 hospitals, a server that follows the protocol "
        "learns no other hospital's update. `null`: t is 2K/3, rounded down, plus one",
    )
    clip: float = Field(
        65536.0,
        gt=0,
        le=1e11,  # for numbers up to this limit, masking rounds to 1e-5 or finer, for any number of hospitals
        description="the largest absolute value of a masked number; the server rejects a hospital with a larger number",
    )

    @property
    def implementation(self) -> "SecureAggregation | None":
        """Return the protocol of secure aggregation, or None if sites send unmasked tensors.

        Raises PlanError if the package of the protocol is not installed.
        """
        if self.mode == "none":
            return None
        if self.mode not in AGGREGATIONS:
            raise PlanError(
                f"secure_aggregation.mode: {self.mode} is in no package that is installed here; install "
                "medsilo_secagg, or set secure_aggregation.mode=none"
            )
        found: SecureAggregation = AGGREGATIONS[self.mode]()
        return found

    @property
    def promises(self) -> list[str]:
        """Return the threats that secure aggregation prevents, and the threats that it does not prevent."""
        return [*self.implementation.promises] if self.implementation else [CLEAR]

    @property
    def times_as_large(self) -> int:
        """Return the largest ratio of a masked tensor's bytes to the unmasked tensor's bytes."""
        return self.implementation.times_as_large if self.implementation else 1

    def leaves(self, plan: Any) -> Iterable[str]:
        if self.mode == "none":
            yield CLEAR


class StudyDescription(Section):
    """The lead's description of the study, which every hospital reads before it approves the study."""

    title: Line = Field("", description="the study's title, in one line; every page shows it")
    purpose: Line = Field(
        "", description="the purpose of the model, and why the study needs the hospitals' data; one line"
    )
    contact: Line = Field("", description="the contact for questions: a name, a role, an address; one line")


class OutsidePackage(Section):
    """An installed package that a plan uses in addition to medsilo."""

    version: str
    hash: str  # the SHA-256 of the package's files


class Plan(Section):
    """The plan of a study, with method, task, network, training, participation and seed.

    >>> from medsilo.plan import parse_plan
    >>> sections = {"algorithm": {"name": "fedbn"}, "task": {"name": "synthetic-activity"}}
    >>> plan = parse_plan({**sections, "participation": {"sites": ["a", "b"]}}, ["training.rounds=3"])
    >>> plan.training.rounds, plan.network.name
    (3, 'activity-cnn')
    """

    study: StudyDescription = StudyDescription()
    algorithm: Annotated[SerializeAsAny[Algorithm], BeforeValidator(METHODS.read)]
    task: Annotated[SerializeAsAny[Task], BeforeValidator(TASKS.read)]
    # By default, the network is the task's network.
    network: Annotated[SerializeAsAny[Network], BeforeValidator(NETWORKS.read)] = Field(None)  # type: ignore[assignment]
    training: Training = Training()
    participation: Participation
    aggregation: AggregationSettings = AggregationSettings()
    secure_aggregation: SecureAggregationSettings = SecureAggregationSettings()
    transport: TransportSettings = TransportSettings()
    model_selection: ModelSelection = ModelSelection()
    privacy: PrivacyOffer | None = Field(
        None,
        description="the study's promise for every hospital's records: differential privacy  against everybody "
        "outside the hospital. `null`: no promise",
    )
    layers: tuple[Annotated[SerializeAsAny[Layer], BeforeValidator(LAYERS.read)], ...] = Field(
        (),
        max_length=8,
        description="layers of other packages that wrap each site and the server, outermost layer first; each entry "
        "has a layer's `name` and its keys",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="the seed of all random numbers")
    protocol: Literal["paper", "released-code", "default"] = Field(
        "default",
        description="the paper or default that the plan's settings follow; every output of the study states the "
        "protocol. medsilo rejects a plan that contradicts its protocol, and a protocol that the method "
        "does not have",
    )
    packages: dict[str, OutsidePackage] = Field(
        {},
        description="packages besides medsilo that define the plan's method, task, network or layers; medsilo adds "
        "the version and hash of each package",
    )

    def __repr__(self) -> str:
        sites = f"{counted(len(self.participation.sites), 'site')}, " if self.participation.sites else ""
        rounds = counted(self.rounds, "round")
        return f"<Plan {self.algorithm.title} on {self.task.name}, {sites}{rounds}, hash {self.hash[:12]}>"

    @cached_property
    def course(self) -> Schedule:
        """Return the study's phases, and the phase in which the server delivers the study's outcome."""
        return self.algorithm.course(self.training)

    def __getstate__(self) -> dict[Any, Any]:
        """Return the plan's state for another process; the state lacks the schedule, whose functions can't be
        pickled.
        """
        state = super().__getstate__()
        return {**state, "__dict__": {name: value for name, value in state["__dict__"].items() if name != "course"}}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.network is None:
            object.__setattr__(self, "network", _default_network(self.task))
        _ = self.course  # a function that raises an error if the plan has too few rounds
        networks = self.layout()
        self.algorithm.check(networks)
        self.algorithm.check_training(self.training)
        self.algorithm.check_task(self.task)
        own: list[Feature | Algorithm] = [self.model_selection, self.algorithm, self.training, self.network]
        for part in (*own, *self.features):
            for conflict in part.conflicts(self, dict(networks)):
                raise PlanError(conflict)
        return self

    @property
    def features(self) -> list[Feature]:
        """Return the plan's optional features in the order in which medsilo checks the features."""
        secure = self.secure_aggregation
        own = (self.participation, self.aggregation, self.transport, secure, secure.implementation, self.privacy)
        return [feature for feature in (*own, *self.layers) if feature is not None]

    @property
    def has_threshold(self) -> bool:
        """Return True if hospitals choose a decision threshold on their validation cases. Under a privacy promise,
        hospitals choose no threshold, because each disclosed number costs privacy.
        """
        return self.task.goal.decides and self.privacy is None

    @property
    def weighting(self) -> Weighting:
        return self.algorithm.weighting or ("patients" if self.task.by_patient else "cases")

    @property
    def weighs_cases(self) -> bool:
        """Return True if a site's weight depends on its number of cases or patients."""
        is_mean = any(not group.personal for phase in self.course.phases for group in phase.sent)
        return is_mean and self.weighting != "uniform" and not (self.aggregation.robust or self.aggregation.max_weight)

    @property
    def private(self) -> Private:
        """Return the method's privacy mechanism, or raise PlanError if the method has no privacy mechanism."""
        return self.algorithm.privacy_mechanism(name for name in METHODS.ours if METHODS[name].declares_account())

    @property
    def gradients(self) -> int:
        """Return the number of noisy gradients per batch if the plan promises privacy."""
        return len(self.private.networks) * (2 if self.algorithm.perturbation else 1)

    @property
    def sealed(self) -> bool:
        return self.secure_aggregation.mode != "none"

    def sealed_forms(self, phase: Phase) -> dict[str, Form]:
        """For each tensor group that secure aggregation masks in a phase, return the kind of aggregation."""
        secure = self.secure_aggregation.implementation if self.sealed else None
        return dict(secure.forms(self, phase)) if secure else {}

    def _blueprint(self) -> ModelFactory:
        task = self.task
        make = partial(self.network.build, task.channels, task.goal.outputs)
        sites = self.participation.sites or names_for(self.participation.required)
        return ModelFactory(make, task.shape, task.channels, sites)

    def warnings(self, sites: Sequence[str]) -> list[str]:
        """Return the warnings for the person who starts the study, one line each."""
        own = (caution for feature in self.features for caution in feature.warnings(self))
        return [*self.algorithm.warnings(sites), *own]

    def build_networks(self) -> dict[str, nn.Module]:
        """Return the method's networks with the plan's initial weights, which are the same at the server and at every
        site.
        """
        with torch.random.fork_rng(devices=[]):
            seed_torch(seed_for(self.seed, "initial weights"))
            return self.algorithm.modules(self._blueprint())

    def layout(self) -> dict[str, nn.Module]:
        """Return the networks with names, shapes and types, but without values; the method uses no random numbers."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return self.algorithm.modules(self._blueprint())

    @cached_property
    def parameters(self) -> int:
        """Return the number of parameters of all networks at a site, without creating the networks."""
        return parameters_of(self.layout())

    @property
    def rounds(self) -> int:
        return self.course.rounds

    def validates(self, rounds: int) -> bool:
        """Return True if sites validate the model after the given number of completed rounds."""
        return rounds % self.model_selection.validate_every == 0 or rounds == self.rounds

    @property
    def validations(self) -> int:
        return sum(self.validates(rounds) for rounds in range(self.rounds + 1))

    def resolved(self) -> dict[str, Any]:
        """Return every key of the plan with its value, including defaults."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the resolved plan as YAML, in the form in which medsilo writes it into the folder of every run."""
        return _as_yaml(json.dumps(self.resolved()))

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()

    @property
    def code(self) -> dict[str, dict[str, str]]:
        """Return the version and hash of every package whose code runs this plan, in the form in which sites report
        versions and hashes.
        """
        others = {name: package.model_dump() for name, package in self.packages.items()}
        return {**{name: facts_of(name) for name in sorted(self.own_packages)}, **others}

    @cached_property
    def own_packages(self) -> set[str]:
        """Return the names of medsilo's packages whose code runs this plan."""
        parts: list[Any] = [self.algorithm, self.task, *self.features]
        network: Any = self.network
        while network is not None:
            parts.append(network)
            network = getattr(network, "of", None)  # the inner network of a network that wraps another network
        named = [table_of(key).code_of(name) for key, name in _names_in(self.resolved()).items()]
        return {*filter(is_here, ALWAYS), *filter(is_ours, named)}.union(*map(ours_behind, parts))

    def among(self, sites: Iterable[str]) -> "Plan":
        """If the plan names no hospitals, return the plan for the hospitals that are connected at the study's
        beginning.
        """
        if self.participation.sites:
            return self
        names, values = sorted(sites), self.resolved()
        least = None if self.participation.minimum == len(names) else self.participation.minimum
        values["participation"] |= {"sites": names, "minimum": least}
        return parse_plan(values)

    @property
    def on_one_machine(self) -> "Plan":
        """If the plan names no hospitals, return the plan with names for simulated hospitals."""
        return self.among(names_for(self.participation.required))

    def with_changes(self, changes: Iterable[str]) -> "Plan":
        return parse_plan(self.resolved(), changes)


def keys_of(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a nested mapping; a dotted key joins the keys of nested mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from keys_of(inner, f"{where}.{key}" if where else str(key))
    else:
        yield where, value


@lru_cache(maxsize=4)
def _as_yaml(plan: str) -> str:
    """Convert JSON to YAML. The result is cached, because a process may have a thousand sites that all write the same
    long plan.
    """
    return dump_yaml(json.loads(plan))


def load_plan(
    path: Path | str, changes: Iterable[str] = (), allowed: Collection[str] = ANY, method: Algorithm | None = None
) -> Plan:
    """Read a plan.yaml, apply `a.b=value` changes, and check the plan.

    Args:
        path: the plan.yaml
        changes: changes such as "training.rounds=3"
        allowed: the installed packages that may define a method, task or network beside medsilo's; by default all
        method: a method that replaces the plan's method, if the plan has another method

    >>> load_plan("jobs/fedavg/app/config/plan.yaml", ["training.rounds=3"]).rounds
    3
    """
    return parse_plan(read_plan(path, method), changes, allowed)


def read_plan(path: Path | str, method: Algorithm | None = None, beside: bool = False) -> Any:
    """Read a plan.yaml and the files that the plan names; the function does not check the values.

    Args:
        beside: True if the plan may only name files in the plan's folder, because another party wrote the plan
    """
    path = Path(path)
    try:
        values = read_yaml(path, f"{path.name}: the plan", "a plan.yaml")
    except MedsiloError as error:
        raise PlanError(str(error)) from error
    if method and isinstance(values, dict) and TABLES["algorithm"].named_in(values.get("algorithm")) != method.name:
        values["algorithm"] = method.model_dump(mode="json")
    model_folders.look_in(path.parent, path.parent / model_folders.FOLDER)
    sections = [values.get(key) for key in ("task", "network")] if isinstance(values, dict) else []
    named = any(key in section for section in sections if isinstance(section, dict) for key in NAMING)
    if not named:
        return values
    from medsilo.schedule.plan_files import with_files

    return with_files(values, path.parent, beside)


def parse_plan(values: Any, changes: Iterable[str] = (), allowed: Collection[str] = ANY, local: bool = False) -> Plan:
    """Apply changes to a plan that is given as nested dicts, and check the plan.

    Args:
        local: True if all hospitals are simulated on this machine, so that hospitals without names get names before the
            changes
    """
    if not isinstance(values, dict):
        raise PlanError("this is not a plan; give a plan.yaml, which has the keys algorithm, task, participation, ...")
    try:
        values = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise PlanError(f"a plan holds texts, numbers, lists and mappings only ({error}); quote such values") from error
    if local:
        from medsilo.schedule.plan_changes import name_hospitals

        name_hospitals(values)
    if changes := [*changes]:
        from medsilo.schedule.plan_changes import change

        change(values, changes)
    if values.get("network") is None:  # a change may set the network to null; then the plan uses the task's network
        values.pop("network", None)
    names, given = _names_in(values), values.get("packages")
    check_packages(names, given, allowed)  # packages are checked before any code of them is imported
    _complete_network(values, names["task"])
    try:
        plan = checked(Plan, values, "the plan")
    except ValidationError as error:
        chosen = {key: table.get(names[key]) for key, table in TABLES.items()}
        from medsilo.core.wording import in_words

        raise PlanError(in_words(error, Plan, chosen)) from error
    _check_texts(values, "")
    if NETWORKS.get(plan.network.name) is not type(plan.network):
        raise PlanError(
            f"network: task {plan.task.name} brings network {plan.network.name!r}, which no package lists under that "
            "name; list it in the entry points 'medsilo.networks' of its package"
        )
    # packages are checked a second time, because the task may have added a network of another package to the plan
    used = check_packages(_names_in(plan.resolved()), given, allowed)
    return plan.model_copy(update={"packages": {name: OutsidePackage(**facts) for name, facts in used.items()}})


def _check_texts(value: Any, where: str) -> None:
    """Raise PlanError for a text of several lines, because a person could mistake the lines for messages of medsilo."""
    if isinstance(value, str) and STEERING.search(value):
        raise PlanError(f"{where}: a text has a line break or a control character; write it in one line")
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        _check_texts(key, f"a key of {where}")
        _check_texts(inner, f"{where}.{key}" if where else str(key))


def _names_in(values: dict[str, Any]) -> dict[str, str]:
    """Return a mapping from the plan's keys to names: of the method, task, networks, layers and secure aggregation."""
    names = {key: table.named_in(values.get(key)) for key, table in TABLES.items()}
    layers, network, key = values.get("layers"), values.get("network"), "network"
    secure = values.get("secure_aggregation")
    if isinstance(secure, dict) and isinstance(mode := secure.get("mode"), str) and mode != "none":
        names["secure_aggregation.mode"] = mode
    for place, layer in enumerate(layers if isinstance(layers, list) else []):
        names[f"layers.{place}"] = LAYERS.named_in(layer)
    while isinstance(network, dict) and "of" in network:  # a network that wraps another network
        key, network = f"{key}.of", network["of"]
        names[key] = NETWORKS.named_in(network)
    return names


def _default_network(task: Task) -> Network:
    own = task.default_network()
    return NETWORKS[own]() if isinstance(own, str) else own


def _complete_network(values: dict[str, Any], task: str) -> None:
    """If a plan's network has keys but no name, apply the keys to the task's network."""
    network = values.get("network")
    if not isinstance(network, dict) or "name" in network or task not in TASKS:
        return
    try:
        own = _default_network(checked(TASKS[task], {**values["task"], "name": task}, "the task"))
    except ValidationError:
        return  # invalid settings of the task are reported later, by the check of the whole plan
    values["network"] = {**own.model_dump(mode="json"), **network}
