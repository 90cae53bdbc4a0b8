"""The numbers that a study seals in a round, the same at the server and at every site: from the plan and the
agreement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Modules
from medsilo.mixing.forms import Form, MeanForm
from medsilo.plan import Plan, SecureAggregationSettings
from medsilo.runs.messages import MOST_CASES
from medsilo.schedule.phase import Group, Phase, views
from medsilo_secagg import letters
from medsilo_secagg.fixed_point import CARRIER, FixedPoint, Flat
from medsilo_secagg.letters import Names, SecAggMessage, SiteName
from medsilo_secagg.terms import LEAST, MOST_SITES, SealedBlock, Terms

WORDS = "@sealed"  # under which a group's masked numbers travel, beside its whole numbers
MOST_GROUPS = 16  # of a phase
AgreementMark = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class KeyAgreement(SecAggMessage):
    """The terms on which a study begins, or goes on, to seal.

    mark: stands for it; each has fresh keys. heaviest: no site has more training cases.
    """

    mark: AgreementMark
    sites: Names
    heaviest: Annotated[int, Field(ge=1, le=2 * MOST_CASES)]


class MaskedMessage(SecAggMessage):
    """The facts that a site needs to move its own tensors towards a mean: its round, and over how many sites it is."""

    round: Annotated[int, Field(ge=1, le=10_000_000)]
    sites: Annotated[int, Field(ge=LEAST, le=MOST_SITES)]


class ServerMessage(SecAggMessage):
    """All that the server may tell a site beside a request; the task decides which of it the site needs.

    current: the mark of the agreement that it belongs to.
    """

    current: AgreementMark | None = None
    agreement: KeyAgreement | None = None
    assembly: letters.Roster | None = None
    deal: letters.KeyShares | None = None
    request: letters.UnmaskingRequest | None = None
    means: Annotated[dict[SiteName, MaskedMessage], Field(max_length=MOST_GROUPS)] = {}


class SiteMessage(SecAggMessage):
    """All that a site may answer to a letter; the task decides which of it the server needs.

    opened: the sites in the sum that it has helped to open of a round that is begun again.
    """

    introduction: letters.Introduction | None = None
    opened: Names = ()
    offer: letters.Offer | None = None
    reveal: letters.Reveal | None = None


@dataclass(frozen=True)
class SealedGroup:
    """A group in a round: how it is mixed, and the block in which its numbers travel."""

    group: Group
    form: Form
    like: dict[str, Tensor]  # the group's tensors, for their shapes and types
    block: SealedBlock

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    @property
    def beside(self) -> dict[str, Tensor]:
        """The whole numbers that travel open, which tell of cases; a site keeps its own of a personal group."""
        if not isinstance(self.form, MeanForm):
            return {}
        return {name: tensor for name, tensor in self.like.items() if not tensor.is_floating_point()}

    def weight(self, samples: int) -> int:
        """Return what a site multiplies its numbers by."""
        return samples if isinstance(self.form, MeanForm) and self.form.weighted else 1

    def expected(self) -> dict[str, Tensor]:
        """Return the layout of what a site sends."""
        return {**self.beside, WORDS: torch.empty(self.block.flat.words, dtype=CARRIER, device="meta")}


class Blocks:
    """Makes the blocks of a study's rounds."""

    def __init__(self, plan: Plan, terms: Terms, heaviest: int) -> None:
        self.plan, self.terms, self.heaviest = plan, terms, heaviest

    def of(self, phase: Phase, layout: Modules) -> dict[str, SealedGroup]:
        """Return what sites seal in a round of a phase, by group. layout: the networks, with or without values."""
        forms, tensors = self.plan.sealed_forms(phase), views(phase.sent, layout)
        return {
            group.name: self._group(group, forms[group.name], layout, tensors[group.name])
            for group in phase.sent
            if group.name in forms and any(t.is_floating_point() for t in tensors.get(group.name, {}).values())
        }

    def _group(self, group: Group, form: Form, layout: Modules, tensors: dict[str, Tensor]) -> SealedGroup:
        flat = Flat.of({name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()})
        one = self.heaviest if isinstance(form, MeanForm) and form.weighted else 1
        fixed = FixedPoint(self._bound(group, layout), len(self.terms.sites) * one, one)
        return SealedGroup(group, form, dict(tensors), SealedBlock(group.name, flat, fixed))

    def _bound(self, group: Group, layout: Modules) -> float:
        """Return the plan's bound, or the range of a wide group where that is more."""
        ranges = group.ranges(layout, self.plan.task) if group.unclipped else {}
        widest = max((max(abs(low), abs(high)) for low, high in ranges.values()), default=0.0)
        return max(self.plan.secure_aggregation.clip, widest)


def terms_of(plan: Plan, study: str, sites: Sequence[str]) -> Terms:
    """Return the terms of these sites, those of the plan that are there; raises Refused where they are others, or fewer
    than the plan requires. The threshold is that of all hospitals of the plan."""
    named, required = plan.participation.sites, plan.participation.required
    if not set(sites) <= set(named):
        raise Refused("the server: it names other sites than the plan does")
    if len(sites) < required:
        raise Refused(f"the server: it lets {len(sites)} hospitals agree on keys, and the plan requires {required}")
    return Terms(study, plan.hash, tuple(sites), threshold_of(plan.secure_aggregation, len(named)), required)


def threshold_of(settings: SecureAggregationSettings, hospitals: int) -> int:
    """Return how many of so many hospitals open a sum."""
    return settings.threshold or 2 * hospitals // 3 + 1
