"""A plan's `transport`: precision of tensors on their way, and secure aggregation with what it promises.

How the groups of a phase are sealed, their mixers declare.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.core.section import Feature
from medsilo.core.tensors import Modules
from medsilo.course.participation import Participation
from medsilo.course.phase import Group, Phase, ServerSide, views
from medsilo.learning.compute import Compute
from medsilo.learning.training import Training
from medsilo.mixing.forms import Form, Unsealable, form_of
from medsilo.tasks.task import Task

LEAST_SEALED = 3  # hospitals in a sealed round
Sealing = Literal["none", "pairwise"]

SEALING: dict[Sealing, str] = {
    "none": "Nothing is sealed: the server, and anyone who reads its disk, sees every tensor that leaves a hospital.",
    "pairwise": "Secure aggregation (pairwise): a server that follows the protocol and reads everything learns sums "
    "over hospitals and nothing of a single one, as long as fewer hospitals than the threshold help it. Against a "
    "server that lies only differential privacy protects.",
}
OPEN = (
    "Sealed or not, the server knows the means, the numbers of cases, scores and losses, who answered when, and whole "
    "numbers among the tensors such as batch norm's counters of batches; all hospitals but one, put together, can work "
    "out that one from a sum."
)
MEASURED_LINE = 4000  # kbit/s: the value that stands for "as measured"


class TransportSettings(Feature):
    """Settings of the tensors on their way: precision and sealing."""

    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="`bfloat16` halves the bytes and rounds every tensor that is sent"
    )
    slowest: int = Field(
        MEASURED_LINE,
        ge=8,
        le=1_000_000,
        description="kbit/s of the slowest line, of which ten seconds' worth is sent in one piece. Leave 4000, the "
        "default, and pieces have 1 MiB, of which two seconds' worth of the line's own speed are on their way",
    )
    sealing: Sealing = Field(
        "none",
        description="whether hospitals send what the server cannot read "
        "([secure-aggregation.md](secure-aggregation.md)). `pairwise`: it learns sums only",
    )
    sealing_threshold: int | None = Field(
        None,
        ge=2,
        le=256,
        description="of `pairwise`: how many (t) of the K hospitals have to stay until a round is opened, more than "
        "half; t - 1 may help a server that follows the protocol, and it learns no more than they know; `null`: 2K/3, "
        "rounded down, and one",
    )
    sealing_bound: float = Field(
        65536.0,
        gt=0,
        le=1e11,  # with it, the sealed numbers of as many hospitals as there can be are 1e-5 apart at most
        description="the largest number that is sealed, whatever its sign; a hospital with a larger one is refused",
    )

    @property
    def rate(self) -> float | None:
        """The bytes a second of the slowest line, as the plan sets it; None where lines are measured."""
        return None if self.slowest == MEASURED_LINE else self.slowest * 1000 / 8

    @property
    def sealed(self) -> bool:
        """Return whether hospitals seal what they send."""
        return self.sealing != "none"

    @property
    def promises(self) -> list[str]:
        """Return what sealing protects against, and against whom it does not: the same wherever it is said."""
        return [SEALING[self.sealing], *([OPEN] if self.sealed else [])]

    def threshold(self, hospitals: int) -> int:
        """Return how many of so many hospitals open a sum."""
        return self.sealing_threshold or 2 * hospitals // 3 + 1

    @property
    def times_as_large(self) -> int:
        """Return how many times its bytes a tensor may take when it is sealed, at most."""
        return 4 if self.sealed else 1  # of half precision

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor as it travels: float32 is rounded when the plan says so, all else stays as it is."""
        return tensor.bfloat16() if self.precision == "bfloat16" and tensor.dtype == torch.float32 else tensor

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        """Nothing that sites send needs a server that can read it."""
        if not self.sealed:
            return
        name = plan.algorithm.name
        yield from self._hospitals_that_cannot(plan.participation)
        if plan.mixing.robust or plan.mixing.share_cap:
            yield (
                "mixing: robust rules and shares compare what single hospitals sent, which sealing hides from the "
                "server; set mixing.robust and mixing.share_cap to null, or transport.sealing=none"
            )
        if plan.algorithm.pooled or not any(phase.sent for phase in plan.course.phases):
            yield f"transport.sealing: {name} sends no tensors, so there is nothing to seal; set none"
        for phase in plan.course.phases:
            forms = forms_of(phase, plan.participation.sites, plan.task, plan.training, plan.seed)
            for group in views(phase.sent, networks):
                if isinstance(form := forms[group], Unsealable):
                    yield (
                        f"transport.sealing: {name}'s {group} can't be sealed: {form.why}; choose another method "
                        "(fedbn, fedsm), or set transport.sealing=none"
                    )

    def leaves(self, plan: Any) -> Iterable[str]:
        yield from self.promises
        if self.sealed and any(group.at_home for group in plan.course.delivery.given):
            yield "No personal model goes to another hospital, whatever share_personal_model says."

    def _hospitals_that_cannot(self, participation: Participation) -> Iterable[str]:
        """Yield why these hospitals can't seal so."""
        named = len(participation.sites)
        if not named:
            yield (
                "transport.sealing: name the hospitals in participation.sites: else every connected site counts as one"
            )
        if min(named, participation.required) < LEAST_SEALED:
            yield (
                f"transport.sealing: {participation.required} hospitals are enough for this plan, and sealing needs "
                f"{LEAST_SEALED} in every round: of two, each can tell the other's model from the sum; name more "
                "hospitals, raise participation.minimum, or set transport.sealing=none"
            )
        if self.precision == "bfloat16":
            yield "transport.precision: sealed numbers are integers, so bfloat16 only costs digits; set float32"
        threshold = self.threshold(named)
        if not named < 2 * threshold <= 2 * named:
            yield (
                f"transport.sealing_threshold: {threshold}; for {named} hospitals it must be from {named // 2 + 1} to "
                f"{named}: then some hospital has helped with any two sums of a round, and refuses the second"
            )
        if participation.required < threshold:
            yield (
                f"participation.minimum: {participation.required} hospitals can't open a sum whose threshold is "
                f"{threshold}; raise it"
            )


def forms_of(phase: Phase, sites: tuple[str, ...], task: Task, training: Training, seed: int) -> dict[str, Form]:
    """Return the form of every group that sites send in a phase.

    Mixers are made for it as at the beginning of a study; what a form says may not depend on what came before.
    """
    server = ServerSide(sites, {}, {}, frozenset, task, training, seed, Compute(), None, lambda: None)
    return {group.name: _form(group, server) for group in phase.sent}


def _form(group: Group, server: ServerSide) -> Form:
    try:
        return form_of(group.mix(server))
    except (LookupError, AttributeError, MedsiloError):
        return Unsealable("its mixer is made of what came before, so how it is sealed is not known beforehand")
