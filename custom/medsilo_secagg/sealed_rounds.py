"""Derive the blocks of numbers that a study masks in a round. The server and all sites derive the same blocks from the
plan and the sites' agreement on keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Modules
from medsilo.mixing.mean_forms import Form, MeanForm
from medsilo.plan import Plan, SecureAggregationSettings
from medsilo.runs.messages import MOST_CASES
from medsilo.schedule.phase import Group, Phase, views
from medsilo_secagg import letters
from medsilo_secagg.fixed_point import CARRIER, FixedPoint, Flat
from medsilo_secagg.letters import Names, SecAggMessage, SiteName
from medsilo_secagg.terms import LEAST, MOST_SITES, SealedBlock, Terms

# a message contains a group's masked numbers under this key, and the group's integer tensors under their usual keys
WORDS = "@sealed"
MOST_GROUPS = 16  # maximum number of groups in a phase
AgreementMark = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class KeyAgreement(SecAggMessage):
    """An agreement of the sites on keys, with which a study begins or continues secure aggregation.

    Args:
        mark: A random identifier of the agreement.
        heaviest: The largest number of training cases of a site.
    """

    mark: AgreementMark
    sites: Names
    heaviest: Annotated[int, Field(ge=1, le=2 * MOST_CASES)]


class MaskedMessage(SecAggMessage):
    """The round of a received mean, and the number of sites in this mean; a site needs both to move its tensors towards
    the mean.
    """

    round: Annotated[int, Field(ge=1, le=10_000_000)]
    sites: Annotated[int, Field(ge=LEAST, le=MOST_SITES)]


class ServerMessage(SecAggMessage):
    """The values for secure aggregation in the server's request to a site. The request's task determines which fields
    are set. `current` identifies the key agreement.
    """

    current: AgreementMark | None = None
    agreement: KeyAgreement | None = None
    assembly: letters.Roster | None = None
    deal: letters.KeyShares | None = None
    request: letters.UnmaskingRequest | None = None
    means: Annotated[dict[SiteName, MaskedMessage], Field(max_length=MOST_GROUPS)] = {}


class SiteMessage(SecAggMessage):
    """The values for secure aggregation in a site's answer. The request's task determines which fields are set.

    If a round is repeated, `opened` names the sites in the sum of this round that the site already helped to unmask.
    """

    introduction: letters.Introduction | None = None
    opened: Names = ()
    offer: letters.Offer | None = None
    reveal: letters.Reveal | None = None


@dataclass(frozen=True)
class SealedGroup:
    """A group of tensors in a round, the kind of the group's aggregation, and the block that contains the group's
    numbers.
    """

    group: Group
    form: Form
    like: dict[str, Tensor]
    block: SealedBlock

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def beside(self) -> dict[str, Tensor]:
        """The group's integer tensors, such as counters, which are sent unmasked."""
        if not isinstance(self.form, MeanForm):
            return {}
        return {name: tensor for name, tensor in self.like.items() if not tensor.is_floating_point()}

    def weight(self, samples: int) -> int:
        return samples if isinstance(self.form, MeanForm) and self.form.weighted else 1

    def expected(self) -> dict[str, Tensor]:
        return {**self.beside, WORDS: torch.empty(self.block.flat.words, dtype=CARRIER, device="meta")}


class Blocks:
    def __init__(self, plan: Plan, terms: Terms, heaviest: int) -> None:
        self.plan, self.terms, self.heaviest = plan, terms, heaviest

    def of(self, phase: Phase, layout: Modules) -> dict[str, SealedGroup]:
        """Return, by name, the groups that sites mask in a phase; the tensors in `layout` need no values."""
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
        """Return the bound on the absolute values of a group's numbers: the plan's bound, or a larger range that the
        group declares.
        """
        ranges = group.ranges(layout, self.plan.task) if group.unclipped else {}
        widest = max((max(abs(low), abs(high)) for low, high in ranges.values()), default=0.0)
        return max(self.plan.secure_aggregation.clip, widest)


def terms_of(plan: Plan, study: str, sites: Sequence[str]) -> Terms:
    """Return the terms of a study with the given sites; raise Refused if the plan does not name all given sites or
    requires more sites. The threshold for unmasking a sum follows from the number of hospitals in the plan.
    """
    named, required = plan.participation.sites, plan.participation.required
    if not set(sites) <= set(named):
        raise Refused("the server: it names other sites than the plan does")
    if len(sites) < required:
        raise Refused(f"the server: it lets {len(sites)} hospitals agree on keys, and the plan requires {required}")
    return Terms(study, plan.hash, tuple(sites), threshold_of(plan.secure_aggregation, len(named)), required)


def threshold_of(settings: SecureAggregationSettings, hospitals: int) -> int:
    return settings.threshold or 2 * hospitals // 3 + 1
