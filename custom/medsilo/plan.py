"""The plan: the one description of a study. Checked before anything starts, resolved, hashed."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError, PlanError, YamlError
from medsilo.core.files import dump_yaml, load_tensors, load_yaml, why_unread
from medsilo.core.package import package_facts
from medsilo.core.section import SHOWN, Section, added, checked, in_words
from medsilo.core.tensors import hash_of
from medsilo.core.text import is_safe_name, plain
from medsilo.course.algorithm import Algorithm
from medsilo.course.declared import PrivacyOffer, Private
from medsilo.course.group import Group, views
from medsilo.course.phase import Course, Phase
from medsilo.course.promises import Sealing, promises
from medsilo.course.sealable import forms_of, means_of
from medsilo.course.workbench import Blueprint
from medsilo.learning.private import GradientBounds, mixes_cases
from medsilo.learning.seeds import seed_for
from medsilo.learning.training import Training
from medsilo.mixing.defence import Shield
from medsilo.mixing.forms import Exchanged, Form, Summed, Unsealable
from medsilo.mixing.rules import Robust
from medsilo.models.network import Network
from medsilo.registry import ANY, METHODS, NETWORKS, TABLES, TASKS, Registry, check_packages
from medsilo.tasks.task import Task

MOST_SITES = 4096
LEAST_SEALED = 3  # hospitals in a sealed round
BOUNDS = "privacy"  # the name of what holds the bounds on gradients among a site's networks
MOST_PARAMETERS = 500_000_000  # of all networks of a method together
FROM_FILES = ("question", "plans", "first_stage")  # keys of a task that may name a file beside the plan
HASH = re.compile(r"[0-9a-f]{64}")


class Participation(Section):
    """The hospitals that the study needs, and what happens when one is missing."""

    sites: tuple[str, ...] = Field(
        (),
        max_length=MOST_SITES,
        description="names of the agreed sites; empty: whoever is connected when the job starts",
    )
    unseen: tuple[str, ...] = Field(
        (),
        max_length=MOST_SITES,
        description="names of sites that do not train and are tested with the outcome: the global model or the super "
        "model",
    )
    minimum: int | None = Field(
        None, ge=1, description="how many sites have to contribute to each round; `null`: all named sites"
    )
    when_missing: Literal["stop", "wait", "continue"] = Field(
        "stop",
        description="`stop`: retry once if the training process crashed; if a site is still missing, the study ends. "
        "`wait`: ask a site that is lost or whose training process crashed again until `patience` is over (a refusal "
        "is final). `continue`: go on without it. All three end the study when fewer than `minimum` sites contribute",
    )
    timeout: int = Field(600, ge=1, le=86_400, description="seconds that a site has for one answer")
    patience: int = Field(
        3600, ge=1, le=604_800, description="seconds that a round waits for missing sites under `wait`"
    )
    silence: int = added(
        420,
        ge=1,
        le=86_400,
        description="seconds that a site's line may be down within that time, so that all goes on where it was",
    )
    groups: dict[str, tuple[str, ...]] = added(
        {},
        max_length=MOST_SITES,
        description="names of groups of sites, such as countries, each with its sites: every mean over sites is taken "
        "within each group first, then over the groups ([below](#groups-of-hospitals)). Each site stands in one group; "
        "`sites` may be left out then",
    )
    sums_at: dict[str, str] = added(
        {},
        max_length=MOST_SITES,
        description="by group: which of its sites adds up what all of them send, so that the server gets one mean from "
        "it ([below](#groups-of-hospitals)). That site reads the others' tensors, as far as their settings allow it",
    )

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

    @field_validator("groups")
    @classmethod
    def _grouped(cls, groups: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, sites in groups.items():
            if not is_safe_name(name):
                raise ValueError(f"group name {name!r} has odd characters; use letters, digits, '.', '_' and '-'")
            if not sites:
                raise ValueError(f"group {name} has no sites; name them, or leave it out")
            cls._names(sites)
        return {name: tuple(sorted(sites)) for name, sites in sorted(groups.items())}

    @model_validator(mode="after")
    def _sums_at_a_member(self) -> Self:
        for name, site in self.sums_at.items():
            if site not in self.groups.get(name, ()):
                raise ValueError(f"sums_at: {site} is not a site of a group {name}; name one of the group's own")
        return self

    @model_validator(mode="after")
    def _each_in_a_group(self) -> Self:
        if not self.groups:
            return self
        grouped = [site for sites in self.groups.values() for site in sites]
        if not self.sites:
            object.__setattr__(self, "sites", self._names(tuple(grouped)))
        for site in sorted({*grouped, *self.sites}):
            if (count := grouped.count(site)) != 1:
                stands = "in no group" if count == 0 else f"{count} times in participation.groups"
                raise ValueError(f"{site} stands {stands}; name every site in one group")
            if site not in self.sites:
                raise ValueError(f"{site} stands in a group and not under sites; add it, or leave sites out")
        return self

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
    def group_of(self) -> dict[str, str]:
        """The group of each site, where there are groups."""
        return {site: name for name, sites in self.groups.items() for site in sites}

    def adder_of(self, site: str) -> str | None:
        """Return the site that adds up what this one sends; None where the server does."""
        return self.sums_at.get(self.group_of.get(site, ""))

    @property
    def everyone(self) -> tuple[str, ...]:
        """All named hospitals, those that train and those that don't."""
        return tuple(sorted({*self.sites, *self.unseen}))

    @property
    def required(self) -> int:
        """The contributors that every round needs."""
        return self.minimum if self.minimum is not None else len(self.sites)


class Mixing(Section):
    """The server's defence against hospitals that send wrong or harmful tensors."""

    robust: Robust | None = Field(
        None,
        description="what takes the place of every mean over hospitals, so that a few dishonest ones can't bend the "
        "model ([robust.md](robust.md)). Hospitals count alike in it, unless `share_cap` is given with `norm-bound` or "
        "`geometric-median`. Groups of which every hospital has values of its own stay as the method mixes them",
    )
    share_cap: float | None = Field(
        None,
        gt=0,
        le=1,
        description="the most that one hospital may count for in a mean, whatever number of cases it claims; what is "
        "cut off goes to the others",
    )

    def shield(self, apart: Collection[str]) -> Shield | None:
        """Return what mixers are defended by; None where the plan asks for nothing."""
        return Shield(self.robust, self.share_cap, apart) if self.robust or self.share_cap else None

    def suits(self, method: str, sent: Iterable[Group], hospitals: int) -> None:
        """Raise a PlanError where it makes no sense with what a method's hospitals send, or with so few of them."""
        means = [group for group in sent if not group.personal]
        if not means:
            raise PlanError(
                f"mixing: {method} takes no mean over hospitals that a robust rule could take the place of; use "
                "fedavg, fedbn or ditto, or leave mixing.robust and mixing.share_cap out"
            )
        for group in means:
            if group.undefended:
                raise PlanError(group.undefended)
        if self.robust and hospitals < self.robust.fewest:
            raise PlanError(
                f"mixing.robust: {self.robust.name} needs {self.robust.fewest} hospitals in every round, and "
                f"{hospitals} are enough for this plan; raise participation.minimum, or lower what the rule asks for"
            )
        if self.share_cap and self.robust and not self.robust.weighs:
            raise PlanError(f"mixing.share_cap: all hospitals count alike in {self.robust.name}; set it to null")
        if self.share_cap and self.share_cap * hospitals < 1:
            raise PlanError(
                f"mixing.share_cap: shares of at most {self.share_cap:g} make no whole with {hospitals} hospitals; "
                f"give {1 / hospitals:.3g} or more"
            )

    def cautions(self, groups: Iterable[Group]) -> list[str]:
        """Return what stays undefended, one line each."""
        if not (self.robust or self.share_cap):
            return []
        mixed = sorted({group.title or group.name for group in groups if group.personal and group.travels == "both"})
        return [
            f"mixing: the {title} of every hospital is mixed as the method says, so what a dishonest hospital sends of "
            "it reaches the others"
            for title in mixed
        ]


class TransportSettings(Section):
    """Settings of the tensors on their way: precision and sealing."""

    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="`bfloat16` halves the bytes and rounds every tensor that is sent"
    )
    slowest: int = added(
        4000,
        ge=8,
        le=1_000_000,
        description="kbit/s of the slowest line, of which ten seconds' worth is sent at once: a cut costs no more",
    )
    delta: bool = added(
        False,
        description="for slow lines: a tensor that has changed goes over NVFlare as its difference to what the site "
        "was given last, without loss ([reliability.md](reliability.md#tensors-that-have-changed))",
    )
    sealing: Sealing = added(
        "none",
        description="whether hospitals send what the server cannot read ([privacy.md](privacy.md)). `pairwise`: it "
        "learns sums only. `group`: it learns nothing, as long as no hospital helps it",
    )
    sealing_threshold: int | None = added(
        None,
        ge=2,
        le=256,
        description="of `pairwise`: how many hospitals have to stay until a round is opened, and one more than may "
        "help the server without learning more; `null`: half of them and one",
    )
    sealing_confirm: bool = added(
        True,
        description="of `pairwise`: hospitals first sign whose numbers are added, against a server that lies",
    )
    sealing_bits: Literal[32, 64] = added(
        64,
        description="bits of a sealed number: 64, twice the bytes, or 32, with fewer digits",
    )
    sealing_bound: float | None = added(
        None,
        gt=0,
        le=1e12,
        description="the largest number that is sealed, whatever its sign; a hospital with a larger one is refused. "
        "`null`: 65536 with 64 bits, 64 with 32",
    )
    sealing_counts: int | None = added(
        None,
        ge=1,
        le=10_000_000,
        description="seal the hospitals' numbers of training cases, too, by which means are weighted; no hospital may "
        "have more than so many. `null`: they are told",
    )
    sealing_clear: tuple[str, ...] = added(
        (),
        max_length=16,
        description="groups of tensors that the server reads all the same, by name: those that cannot be sealed, and "
        "AdaFed's `statistics`, which hospitals tell each other otherwise",
    )

    @property
    def sealed(self) -> bool:
        """Return whether hospitals seal what they send."""
        return self.sealing != "none"

    @property
    def promises(self) -> list[str]:
        """Return what sealing protects against, and against whom it does not."""
        return promises(self.sealing, self.sealing_clear, bool(self.sealing_counts))

    @property
    def bound(self) -> float:
        """The largest number that is sealed."""
        return self.sealing_bound or (65536.0 if self.sealing_bits == 64 else 64.0)

    def threshold(self, hospitals: int) -> int:
        """Return how many of so many hospitals open a pairwise sum; 0 in the mode group."""
        return (self.sealing_threshold or hospitals // 2 + 1) if self.sealing == "pairwise" else 0

    def times_as_large(self, hospitals: int) -> int:
        """Return how many times its bytes a tensor may take when it is sealed, at most: once for each reader."""
        return {"none": 1, "group": 2, "pairwise": 2 * hospitals}[self.sealing]

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor as it travels: float32 is rounded when the plan says so, all else stays as it is."""
        return tensor.bfloat16() if self.precision == "bfloat16" and tensor.dtype == torch.float32 else tensor

    def check_sealing(self, participation: Participation, unseen: bool) -> None:
        """Raise a PlanError where these hospitals can't seal so."""
        named = len(participation.sites)
        if (named and named < LEAST_SEALED) or participation.required < LEAST_SEALED:
            raise PlanError(
                f"transport.sealing: {participation.required} hospitals are enough for this plan, and sealing needs "
                f"{LEAST_SEALED} in every round: of two, each can tell the other's model from the sum; name more "
                "hospitals, raise participation.minimum, or set transport.sealing=none"
            )
        if self.delta:
            raise PlanError(
                "transport.delta: what is sealed looks like noise, of which no difference is smaller; set it to false, "
                "or transport.sealing=none"
            )
        if self.precision == "bfloat16":
            raise PlanError(
                "transport.precision: sealed numbers are integers, so bfloat16 only costs digits; set float32, and "
                "transport.sealing_bits=32 for half of the bytes"
            )
        if self.sealing_counts and self.sealing_clear:
            raise PlanError(
                f"transport.sealing_counts: {self.sealing_clear[0]} leaves in clear and tells numbers of cases; take "
                "it out of transport.sealing_clear, or leave sealing_counts out"
            )
        if self.sealing == "group":
            if self.sealing_threshold:
                raise PlanError("transport.sealing_threshold: belongs to pairwise; leave it out")
            if unseen:
                raise PlanError(
                    "participation.unseen: hospitals that do not train have no key to what 'group' seals; use pairwise"
                )
            return
        threshold = self.threshold(named or participation.required)
        if named and not named < 2 * threshold <= 2 * named:
            raise PlanError(
                f"transport.sealing_threshold: {threshold}; for {named} hospitals it must be from {named // 2 + 1} to "
                f"{named}: with half of them or fewer a server could have both of a hospital's masks taken off"
            )
        if participation.required < threshold:
            raise PlanError(
                f"participation.minimum: {participation.required} hospitals can't open a sum whose threshold is "
                f"{threshold}; raise it"
            )

    def check_form(self, method: str, group: str, form: Form) -> None:
        """Raise a PlanError where a group that sites send can't be sealed so."""
        if group in self.sealing_clear:
            if not isinstance(form, Unsealable | Exchanged):
                raise PlanError(f"transport.sealing_clear: {group} of {method} can be sealed; take it out")
            return
        if isinstance(form, Unsealable):
            raise PlanError(
                f"transport.sealing: {method}'s {group} can't be sealed: {form.why}; let it leave in clear "
                f"(transport.sealing_clear=[{group}]), choose another method, or set transport.sealing=none"
            )
        if self.sealing == "group" and isinstance(form, Summed) and form.steps:
            raise PlanError(
                f"transport.sealing: the server makes a step of its own with {method}'s {group}, so it has to read the "
                "mean, which 'group' hides from it; use pairwise"
            )


class Tracking(Section):
    """The round whose model is tested and kept as the result, and who is shown the rounds beside TensorBoard."""

    select: Literal["best", "last"] = Field(
        "best",
        description="the round whose model is tested and kept as `best`: the best on validation data (a later round "
        "has to be strictly better), or the last",
    )
    sensitivity: float | None = added(
        None,
        gt=0,
        le=1,
        description="with two classes: the sensitivity that each hospital's threshold has to reach on its validation "
        "cases. `null`: the threshold with the greatest sensitivity + specificity there (Youden's)",
    )
    validate_every: int = added(
        1,
        ge=1,
        le=10_000,
        description="sites validate the model before the first round, after every so many rounds and after the last; "
        "only such rounds can be the best one",
    )
    mlflow: bool = Field(
        False, description="write `mlflow.db` beside TensorBoard's files; needs the package `mlflow` at the server"
    )


class OutsidePackage(Section):
    """An installed package that a plan uses beside medsilo."""

    version: str
    hash: str  # SHA-256 over its files


def _made_by(registry: Registry) -> BeforeValidator:
    """The section whose class its `name` decides."""

    def make(values: Any) -> Any:
        if isinstance(values, Section):
            return values
        if not isinstance(values, Mapping) or "name" not in values:
            raise PydanticCustomError("name_missing", "it has no name")
        name = registry.spelled(values["name"])
        if name is None or name not in registry:
            told = {"name": values["name"], "remedy": registry.remedy(values["name"])}
            raise PydanticCustomError("name_not_known", "{name} is not known", told)
        text = json.dumps({**values, "name": name}, default=str)  # as JSON, strictly, as the plan around it is read
        return registry[name].model_validate_json(text, strict=True)

    return BeforeValidator(make)


class Plan(Section):
    """A study: method, task, network, training, participation, seed."""

    algorithm: Annotated[SerializeAsAny[Algorithm], _made_by(METHODS)]
    task: Annotated[SerializeAsAny[Task], _made_by(TASKS)]
    network: Annotated[SerializeAsAny[Network], _made_by(NETWORKS)] = Field(None)  # type: ignore[assignment]  # by default the task's own
    training: Training = Training()
    participation: Participation
    mixing: Mixing = added(Mixing())
    transport: TransportSettings = TransportSettings()
    tracking: Tracking = Tracking()
    privacy: PrivacyOffer | None = added(
        None,
        description="what the study promises of every hospital's records ([privacy.md](privacy.md)): differential "
        "privacy against everybody outside it. `null`: nothing",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="decides everything random")
    protocol: Literal["paper", "released-code", "clinical"] = Field(
        "clinical",
        description="what the plan's numbers follow; it is stated in every output. A plan that contradicts what its "
        "method says of the word is refused, and so is a word of which the method says nothing",
    )
    packages: dict[str, OutsidePackage] = added(
        {},
        description="installed packages that bring the method, task or network, where these are not medsilo's own; "
        "filled in by itself: version and hash of each ([extend.md](extend.md))",
    )

    @cached_property
    def course(self) -> Course:
        """The study's phases and what is delivered at its end."""
        return self.algorithm.course(self.training)

    def __getstate__(self) -> dict[Any, Any]:
        """Return what another process needs; it works out the course itself, whose functions can't travel."""
        state = super().__getstate__()
        return {**state, "__dict__": {name: value for name, value in state["__dict__"].items() if name != "course"}}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.network is None:
            object.__setattr__(self, "network", self.task.default_network())
        _ = self.course  # raises where these rounds are too few
        with torch.device("meta"):
            networks = self.algorithm.modules(self._blueprint())
        if (parameters := _parameters(networks)) > MOST_PARAMETERS:
            raise PlanError(f"network: has {parameters} parameters with all of the method's; {MOST_PARAMETERS} may be")
        self.algorithm.check(networks)
        self.algorithm.suits(self.training)
        if self.tracking.sensitivity and not self.has_threshold:
            raise PlanError(
                "tracking.sensitivity: a threshold is chosen in classifications into two classes, without a promise of "
                "privacy; remove it"
            )
        self.algorithm.fits(self.task)
        self._keeps_masks_as_they_are(networks)
        if self.task.postprocessings and not self.algorithm.outcome.one_network:
            raise PlanError(f"task.postprocessing: {self.algorithm.name} puts several networks together; set false")
        self._has_data_for_its_sites()
        self._can_weigh_classes()
        self._network_reads_task(networks["model"])
        if self.participation.unseen:
            self._can_be_tested_elsewhere()
        if self.mixing != Mixing():
            sent = [group for phase in self.course.phases for group in phase.sent]
            self.mixing.suits(self.algorithm.name, sent, self.participation.required)
        if self.participation.groups:
            self._can_be_grouped(networks)
        if self.transport.sealed:
            self._can_be_sealed(networks)
        if self.privacy:
            self._keeps_its_promise(networks)
        self._keeps_its_protocol()
        return self

    @property
    def has_threshold(self) -> bool:
        """Return whether hospitals choose a threshold on validation cases: not where each number has its price."""
        return self.task.decides and self.privacy is None

    @property
    def trials(self) -> int:
        """Return of how many trials of postprocessing a hospital tells; for a model of its own it chooses at home."""
        every = None if self.algorithm.outcome.personal else self.task.postprocessings
        return every.number if every else 0

    def _network_reads_task(self, model: nn.Module) -> None:
        """One case of the task's shape goes through the network, without values."""
        shape = self.task.shape
        if shape is None:
            return
        try:
            with torch.no_grad():
                found = tuple(model.eval()(torch.zeros(2, *shape, device="meta")).shape[1:])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise PlanError(
                f"network.name: {self.network.name} can't read the inputs of task {self.task.name}, of shape "
                f"{list(shape)}; choose another network, its numbers or task.size"
            ) from error
        needed = self.task.output_of(shape)
        if needed not in (None, found):
            raise PlanError(
                f"network.name: {self.network.name} gives {_described(found)}, and task {self.task.name} needs "
                f"{_described(needed)}; choose another network, for example {self.task.default_network().name}"
            )

    def _keeps_masks_as_they_are(self, networks: Mapping[str, nn.Module]) -> None:
        if self.task.refines and self.algorithm.input_layer(dict(networks)) is not None:
            raise PlanError(
                f"task: {self.algorithm.name} changes a network's inputs by their intensities, and some of this task's "
                "are masks of a first stage; choose another method, or leave algorithm.amplitude out"
            )

    def _has_data_for_its_sites(self) -> None:
        most, named = self.task.most_sites, len(self.participation.everyone)
        if most is not None and named > most:
            raise PlanError(f"participation.sites: {named} sites, but task {self.task.name} has {most}; name fewer")

    def _can_weigh_classes(self) -> None:
        """The loss has a part that class weights change, and there is one for each class."""
        weights, classes = self.training.class_weights, self.task.classes
        if weights == "none":
            return
        if not self.task.cross_entropy:
            instead = ", or task.criterion=dice-ce" if hasattr(self.task, "criterion") else ""
            raise PlanError(
                f"training.class_weights: the loss of task {self.task.name} has no cross entropy over classes, which "
                f"they would change; set none{instead}"
            )
        if isinstance(weights, tuple) and len(weights) != classes:
            raise PlanError(
                f"training.class_weights: {len(weights)} numbers, but task {self.task.name} has {classes} classes; "
                "give one for each (of masks: the background first)"
            )

    def _can_be_tested_elsewhere(self) -> None:
        """Something is there for a hospital that did not train: one model for all, or a super model."""
        if not self.algorithm.outcome.for_others:
            name = self.algorithm.name
            raise PlanError(f"participation.unseen: {name} leaves no model for hospitals that did not train")

    def _can_be_grouped(self, networks: Mapping[str, nn.Module]) -> None:
        """Every mean over sites can be taken in parts."""
        name, participation = self.algorithm.name, self.participation
        if self.mixing != Mixing():
            raise PlanError(
                "participation.groups: robust rules and shares compare what all sites sent, so no mean within a group "
                "takes their place; leave groups out, or set mixing.robust and mixing.share_cap to null"
            )
        if self.transport.sealed:
            raise PlanError(
                "participation.groups: sealed numbers are integers, whose sum is the same in any order; leave groups "
                "out, or set transport.sealing=none"
            )
        sent, means = set[str](), dict[str, Summed | None]()
        for phase in self.course.phases:
            own = views(phase.sent, dict(networks)).keys()
            sent |= own
            means |= {group: form for group, form in self.means_of(phase).items() if group in own}
        if self.algorithm.pooled or not means:
            raise PlanError(f"participation.groups: {name} takes no mean over sites; leave groups out")
        if whole := sorted(group for group, form in means.items() if form is None):
            raise PlanError(
                f"participation.groups: the mean of {name}'s {whole[0]} needs every site's tensors at once; leave "
                "groups out, or choose another method"
            )
        single = sorted(group for group in sent if (form := means.get(group)) is None or form.enter)
        if participation.sums_at and single:
            raise PlanError(
                f"participation.sums_at: the server needs every site's own {single[0]} in {name}, so no site can add "
                "it up; leave sums_at out, or choose another method"
            )

    def _can_be_sealed(self, networks: Mapping[str, nn.Module]) -> None:
        """Nothing that sites send needs a server that can read it."""
        transport, name = self.transport, self.algorithm.name
        if transport.sealing_counts and self.training.truncate:
            raise PlanError(
                "training.truncate: needs the smallest hospital's number of cases, which transport.sealing_counts "
                "seals; leave one of them out"
            )
        transport.check_sealing(self.participation, bool(self.participation.unseen))
        if self.mixing != Mixing():
            raise PlanError(
                "mixing: robust rules and shares compare what single hospitals sent, which sealing hides from the "
                "server; set mixing.robust and mixing.share_cap to null, or transport.sealing=none"
            )
        if self.algorithm.pooled or not any(phase.sent for phase in self.course.phases):
            raise PlanError(f"transport.sealing: {name} sends no tensors, so there is nothing to seal; set none")
        known = set()
        for phase in self.course.phases:
            tensors, forms = views(phase.sent, dict(networks)), self._forms(phase)
            for group in tensors:
                known.add(group)
                transport.check_form(name, group, forms[group])
                if group not in transport.sealing_clear and any(t.is_complex() for t in tensors[group].values()):
                    raise PlanError(f"transport.sealing: {name}'s {group} has complex numbers, which can't be sealed")
        if strangers := sorted(set(transport.sealing_clear) - known):
            raise PlanError(f"transport.sealing_clear: {name} sends no group {strangers[0]}; take it out")

    def _keeps_its_promise(self, networks: Mapping[str, nn.Module]) -> None:
        """All that leaves a hospital follows from noisy gradients of single cases."""
        if self.task.unbounded:
            raise PlanError(f"privacy: {self.task.unbounded}, or leave privacy out")
        if self.training.truncate:
            raise PlanError(
                "training.truncate: which cases a hospital trains on would depend on the others' numbers of cases; set "
                "it to false where the plan promises privacy"
            )
        if self.training.class_weights == "balanced":
            raise PlanError(
                "training.class_weights: balanced weights follow from each hospital's own numbers of cases, which no "
                "noise hides; give numbers that all hospitals know, for example [1, 4]"
            )
        assert self.privacy
        releases = any(phase.releases for phase in self.course.phases)
        if releases != (self.privacy.statistics is not None):
            raise PlanError(
                "privacy.statistics: means over a hospital's cases leave before training, and need an account of their "
                "own; set privacy.statistics.epsilon"
                if releases
                else "privacy.statistics: nothing leaves before training under this plan; remove it"
            )
        for name in self.private.networks:
            if layer := mixes_cases(networks[name]):
                raise PlanError(
                    f"privacy: {layer} of network {name} lets cases of a batch change each other's gradients, so no "
                    "bound holds for one; choose network.norm=group, or instance for a U-Net"
                )

    @property
    def private(self) -> Private:
        """Return how the method keeps the plan's promise of privacy; raises PlanError where it can't."""
        return self.algorithm.privately()

    @property
    def gradients(self) -> int:
        """The noisy gradients that are taken of each batch, where the plan promises privacy."""
        return len(self.private.networks) * (2 if self.algorithm.perturbation else 1)

    def _forms(self, phase: Phase) -> dict[str, Form]:
        sites = self.participation.sites or ("a", "b", "c")
        return forms_of(phase, sites, self.task, self.training, self.seed)

    def means_of(self, phase: Phase) -> dict[str, Summed | None]:
        """Return the form of every group that is a mean over sites; None where it needs all their tensors at once."""
        return means_of(phase, self.participation.sites, self.task, self.training, self.seed)

    def sealed_forms(self, phase: Phase) -> dict[str, Form]:
        """Return how each group is sealed that sites seal in a phase."""
        if not self.transport.sealed:
            return {}
        return {name: form for name, form in self._forms(phase).items() if name not in self.transport.sealing_clear}

    def _keeps_its_protocol(self) -> None:
        """A plan that declares a protocol follows it in all that the method says of it."""
        name, protocols = self.algorithm.name, self.algorithm.protocols
        if self.protocol != "clinical" and self.protocol not in protocols:
            told = " or ".join(["clinical", *protocols])
            raise PlanError(f"protocol: {self.protocol!r} says nothing of {name}; declare {told}")
        for key, wanted in protocols.get(self.protocol, {}).items():
            own: Any = self
            for part in key.split("."):
                if own is None:
                    raise PlanError(
                        f"{key}: there is none, but protocol '{self.protocol}' of {name} has {wanted!r}; "
                        "set it, or declare protocol: clinical"
                    )
                own = getattr(own, part, wanted)  # what is not there, as a network's norms, can't break the rule
            if own != wanted:
                raise PlanError(
                    f"{key}: {own!r}, but protocol '{self.protocol}' of {self.algorithm.name} has {wanted!r}; "
                    "change it, or declare protocol: clinical"
                )

    def _blueprint(self) -> Blueprint:
        task = self.task
        make = partial(self.network.build, task.channels, task.outputs)
        return Blueprint(make, task.shape, task.channels, self.participation.sites)

    def cautions(self, sites: Sequence[str]) -> list[str]:
        """Return what whoever starts the study should know of its numbers, one line each."""
        groups = [group for phase in self.course.phases for group in phase.groups]
        noisy = self.privacy.cautions() if self.privacy else []
        return [*self.algorithm.cautions(sites), *self.mixing.cautions(groups), *noisy]

    def build_networks(self) -> dict[str, nn.Module]:
        """The method's networks with the initial weights of this plan: the same at the server and at every site."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self.seed, "initial weights"))
            networks = self.algorithm.modules(self._blueprint())
        if self.privacy:
            networks[BOUNDS] = GradientBounds(self.private.networks, self.privacy.clip, self.privacy.adaptive)
        return networks

    @property
    def parameters(self) -> int:
        """The parameters of all the method's networks at a site, counted without making them."""
        with torch.device("meta"):
            return _parameters(self.algorithm.modules(self._blueprint()))

    @property
    def rounds(self) -> int:
        """The rounds of all phases."""
        return self.course.rounds

    def validates(self, rounds: int) -> bool:
        """Return whether sites validate the model that has gone through so many rounds."""
        return rounds % self.tracking.validate_every == 0 or rounds == self.rounds

    @property
    def validations(self) -> int:
        """The number of times that each site validates."""
        return sum(self.validates(rounds) for rounds in range(self.rounds + 1))

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, defaults included."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved plan as it is written to every run."""
        return _as_yaml(json.dumps(self.resolved()))

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved plan."""
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()

    @property
    def code(self) -> dict[str, Any]:
        """The medsilo and the other packages that run this plan, as sites report them."""
        others = {name: package.model_dump() for name, package in self.packages.items()}
        return {**package_facts(), **({"packages": others} if others else {})}

    def with_changes(self, changes: Iterable[str]) -> "Plan":
        """This plan with `a.b=value` changes."""
        return parse_plan(self.resolved(), changes)


@lru_cache(maxsize=4)
def _as_yaml(plan: str) -> str:
    """Return JSON as YAML: each of a thousand sites in a process writes a plan that names them all."""
    return dump_yaml(json.loads(plan))


def _described(output: Sequence[int] | None) -> str:
    """Return what a network finds in one case, in words."""
    classes, *grid = output or (0,)
    return (
        f"a map of {' × '.join(map(str, grid))} with {classes} classes" if grid else f"{classes} scores, one per class"
    )


def _parameters(networks: Mapping[str, nn.Module]) -> int:
    return sum(tensor.numel() for network in networks.values() for tensor in network.parameters())


def load_plan(
    path: Path | str, changes: Iterable[str] = (), allowed: Collection[str] = ANY, method: Algorithm | None = None
) -> Plan:
    """Read a plan.yaml, apply `a.b=value` changes, and check everything.

    allowed: the installed packages that may bring a method, task or network beside medsilo's; by default all.
    method: takes the place of the plan's where that is another.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: the plan cannot be read: {why_unread(error, 'a plan.yaml')}") from error
    try:
        values = load_yaml(text)
    except YamlError as error:
        raise PlanError(f"{path.name}: {error}; correct it") from error
    if method and isinstance(values, dict) and TABLES["algorithm"].named_in(values.get("algorithm")) != method.name:
        values["algorithm"] = method.model_dump(mode="json")
    return parse_plan(_with_files(values, path.parent), changes, allowed)


def _with_files(values: Any, folder: Path) -> Any:
    """Return a plan's values with the content of the files that its task names in place of their names."""
    task = values.get("task") if isinstance(values, dict) else None
    if not isinstance(task, dict):
        return values
    named = {key: task[key] for key in FROM_FILES if isinstance(task.get(key), str) and not HASH.fullmatch(task[key])}
    return {**values, "task": {**task, **{key: _content_of(folder, key, name) for key, name in named.items()}}}


def _content_of(folder: Path, key: str, name: str) -> Any:
    if not is_safe_name(name):
        raise PlanError(f"task.{key}: {name!r} has odd characters; name a file in the plan's own folder")
    try:
        if name.endswith(".safetensors"):
            return hash_of(load_tensors(folder / name)[0])
        text = (folder / name).read_text(encoding="utf-8")
        return json.loads(text) if name.endswith(".json") else load_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"task.{key}: {name}: {why_unread(error, 'a file beside the plan')}") from error
    except (MedsiloError, ValueError, RecursionError) as error:
        raise PlanError(f"task.{key}: {name} can't be read ({error}); correct it") from error


def parse_plan(values: Any, changes: Iterable[str] = (), allowed: Collection[str] = ANY) -> Plan:
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
    names = {key: table.named_in(values.get(key)) for key, table in TABLES.items()}
    check_packages(names, values.get("packages"), allowed)  # before anything of them is imported
    _complete_network(values, names["task"])
    try:
        plan = checked(Plan, values, "the plan")
    except ValidationError as error:
        chosen = {key: TABLES[key].get(name) for key, name in names.items()}
        raise PlanError(in_words(error, Plan, chosen)) from error
    return plan.model_copy(update={"packages": _packages(plan, values.get("packages"), allowed)})


def _complete_network(values: dict[str, Any], task: str) -> None:
    """Take keys of a network without its name for changes of the task's own network."""
    network = values.get("network")
    if not isinstance(network, dict) or "name" in network or task not in TASKS:
        return
    try:
        own = checked(TASKS[task], {**values["task"], "name": task}, "the task").default_network()
    except ValidationError:
        return  # what is wrong with the task is said when the plan is checked
    values["network"] = {**own.model_dump(mode="json"), **network}


def _packages(plan: Plan, given: Any, allowed: Collection[str]) -> dict[str, OutsidePackage]:
    """The packages that the checked plan uses beside medsilo; its network may have come with the task."""
    if NETWORKS.get(plan.network.name) is not type(plan.network):
        raise PlanError(
            f"network: task {plan.task.name} brings network {plan.network.name!r}, which no package lists under that "
            "name; list it in the entry points 'medsilo.networks' of its package"
        )
    names = {"algorithm": plan.algorithm.name, "task": plan.task.name, "network": plan.network.name}
    return {name: OutsidePackage(**facts) for name, facts in check_packages(names, given, allowed).items()}


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
    if last == "name" and len(path) == 1 and path[0] in TABLES:
        value = TABLES[path[0]].spelled(value) or value
    if last == "name" and place.get("name") != value:
        place.clear()  # another method, task or network: the numbers of the one before don't carry over
        if path == ["task"]:
            values.pop("network", None)  # it was the other task's
    place[last] = value
