"""The numbers that a study seals in a round, the same at the server and at every site: from the plan and the
agreement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Modules, Tensors, hash_of
from medsilo.course.phase import Group, Phase, views
from medsilo.mixing.forms import Exchanged, Form, Pulled, Rows, Summed
from medsilo.plan import Plan
from medsilo.runs.messages import MOST_CASES
from medsilo.sealing import letters
from medsilo.sealing.channels import KEY_BOX, LOCKED
from medsilo.sealing.fixed_point import CARRIER, FixedPoint, Flat, integer_weights
from medsilo.sealing.letters import Letter, Names, RoundNumber, SiteName
from medsilo.sealing.streams import digest
from medsilo.sealing.terms import MOST_SITES, SERVER, SealedBlock, Terms

WORDS = "@sealed"  # under which a group's sealed numbers travel, beside its whole numbers
ALIKE = 1e-9  # weights that two machines compute differ by less
ROW_TOTAL = 1 << 24  # what the integer weights of a row add up to

Row = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(max_length=256, strict=False)]
Matrix = Mapping[str, Sequence[float]]  # site → its row of weights, in the order of the sites


AgreementNumber = Annotated[int, Field(ge=1, le=1_000_000)]
MOST_GROUPS = 16  # of a phase
MOST_AHEAD = 1000  # that a site's last number may be beyond the server's, which stopped before it could write its own


class KeyAgreement(Letter):
    """The terms on which a study begins to seal.

    number: counts the times that it started again, with fresh keys. heaviest: no site has more training cases.
    """

    number: AgreementNumber
    sites: Names
    heaviest: Annotated[int, Field(ge=1, le=2 * MOST_CASES)]


class Held(Letter):
    """The facts that a site needs to open a group's tensors: the keys, the round, and whose numbers are in it."""

    agreement: AgreementNumber
    claim: letters.SumClaim


class OwnWeights(Letter):
    """The weights that a hospital made of what all told each other in a round: a row for each of these sites."""

    round: RoundNumber
    sites: Names
    weights: Annotated[tuple[Row, ...], Field(max_length=256, strict=False)]

    def check(self, sender: str) -> None:
        """Raise Refused unless these are weights of its sites."""
        count = len(self.sites)
        if len(self.weights) != count or any(len(row) != count or abs(fsum(row) - 1) > ALIKE for row in self.weights):
            raise Refused(f"{sender}: its weights are not a row for each site that adds up to 1")

    def is_like(self, other: "OwnWeights") -> bool:
        """Return whether two hospitals have computed the same, but for what machines make different in rounding."""
        if (self.round, self.sites) != (other.round, other.sites):
            return False
        mine, theirs = (torch.tensor(own.weights, dtype=torch.float64) for own in (self, other))
        return bool((mine - theirs).abs().max() <= ALIKE)


class ServerLetter(Letter):
    """All that the server may tell a site beside a request; the task decides which of it the site needs.

    current: the agreement that it belongs to. rows: of weights of the round, by group and site, told before anything of
        it is sealed. among: all sites that train, in order, those that have not agreed on keys included.
    """

    current: AgreementNumber | None = None
    agreement: KeyAgreement | None = None
    assembly: letters.Assembly | None = None
    rows: Annotated[dict[SiteName, Annotated[dict[SiteName, Row], letters.BySite]], Field(max_length=MOST_GROUPS)] = {}
    deal: letters.Deal | None = None
    accusations: Annotated[tuple[letters.Accusation, ...], Field(max_length=MOST_SITES, strict=False)] = ()
    survivors: letters.Survivors | None = None
    request: letters.UnmaskingRequest | None = None
    among: Names = ()
    held: Annotated[dict[SiteName, Held], Field(max_length=MOST_GROUPS)] = {}


class SiteLetter(Letter):
    """All that a site may answer to a letter; the task decides which of it the server needs.

    last: the last agreement, where the site knows a later one. unmasked: the last sums that it helped to open before
        the study started again, each a round and the sites in it. complaints: its signature for each sender of a box
        that it can't use. keys: the one-time private keys of its own boxes that readers complain of, by reader.
    """

    last: AgreementNumber | None = None
    introduction: letters.Introduction | None = None
    unmasked: Annotated[
        tuple[Annotated[tuple[RoundNumber, Names], Field(strict=False)], ...],
        Field(max_length=letters.TOLD_SUMS, strict=False),
    ] = ()
    offer: letters.Offer | None = None
    complaints: letters.Signatures = {}
    keys: Annotated[dict[SiteName, letters.Bytes32], letters.BySite] = {}
    confirmation: letters.Bytes64 | None = None
    reveal: letters.Reveal | None = None
    comparison: OwnWeights | None = None


@dataclass(frozen=True)
class SealedGroup:
    """A group in a round: how it is mixed, and the blocks in which its numbers travel, by the name of their tensor."""

    group: Group
    form: Form
    like: dict[str, Tensor]  # the group's tensors, for their shapes and types
    blocks: dict[str, SealedBlock]
    readers: int = 0  # hospitals that read what each of them tells

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    @property
    def beside(self) -> dict[str, Tensor]:
        """The whole numbers that travel open, which tell of cases; a site keeps its own of a personal group."""
        if not isinstance(self.form, Summed):
            return {}
        return {name: tensor for name, tensor in self.like.items() if not tensor.is_floating_point()}

    def weight(self, samples: int) -> int:
        """Return what a site multiplies its numbers by, where weights are not public."""
        return samples if isinstance(self.form, Summed) and self.form.weighted else 1

    def expected(self) -> dict[str, Tensor]:
        """Return the layout of what a site sends."""
        if isinstance(self.form, Exchanged):
            content = sum(tensor.nbytes for tensor in self.like.values())
            told = content + LOCKED + self.readers * KEY_BOX
            return {WORDS: torch.empty(told, dtype=torch.uint8, device="meta")}
        words = {
            name: torch.empty(block.flat.words, dtype=CARRIER, device="meta") for name, block in self.blocks.items()
        }
        return {**self.beside, **words}


class Blocks:
    """Makes the blocks of a study's rounds.

    Rows have a weight for every site of the plan, those that have not agreed on keys included: so a round that is
    repeated after another agreement has the same ones.
    """

    def __init__(self, plan: Plan, terms: Terms, heaviest: int) -> None:
        self.plan, self.terms, self.heaviest = plan, terms, heaviest
        self.named = sorted(plan.participation.sites)

    def of(self, phase: Phase, layout: Modules, rows: Mapping[str, Matrix]) -> dict[str, SealedGroup]:
        """Return what sites seal in a round of a phase, by group.

        layout: the networks, with or without values. rows: those of the round, by group; alike where they are not told.
        """
        alike: Matrix = {site: [1.0] * len(self.named) for site in self.named}
        forms, tensors = self.plan.sealed_forms(phase), views(phase.sent, layout)
        return {
            group.name: self._group(group, forms[group.name], layout, tensors[group.name], rows.get(group.name, alike))
            for group in phase.sent
            if group.name in forms and any(t.is_floating_point() for t in tensors.get(group.name, {}).values())
        }

    def _group(
        self, group: Group, form: Form, layout: Modules, tensors: dict[str, Tensor], rows: Matrix
    ) -> SealedGroup:
        if isinstance(form, Exchanged):
            return SealedGroup(group, form, dict(tensors), {}, readers=len(self.terms.sites))
        flat = Flat.of({name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()})
        fixed = FixedPoint(self._bound(group, layout), *self._weights(form))
        weights = (1,) * len(self.terms.sites) if isinstance(form, Pulled) else None
        blocks = {WORDS: SealedBlock(group.name, flat, fixed, SERVER, weights)}
        if isinstance(form, Rows):
            blocks = {
                words_for(site): SealedBlock(
                    f"{group.name} for {site}", flat, fixed, site, self._row(rows[site], fixed.weights)
                )
                for site in self.terms.sites
            }
        return SealedGroup(group, form, dict(tensors), blocks)

    def _row(self, row: Sequence[float], total: int) -> tuple[int, ...]:
        """Return the whole weights of those that have agreed on keys."""
        whole = dict(zip(self.named, integer_weights(row, total), strict=True))
        return tuple(whole[site] for site in self.terms.sites)

    def _weights(self, form: Form) -> tuple[int, int]:
        """Return what all weights add up to, at most, and the largest."""
        if isinstance(form, Rows):
            return ROW_TOTAL, ROW_TOTAL
        one = self.heaviest if isinstance(form, Summed) and form.weighted else 1
        return len(self.terms.sites) * one, one

    def _bound(self, group: Group, layout: Modules) -> float:
        """Return the plan's bound, or the range of a wide group where that is more."""
        ranges = group.ranges(layout, self.plan.task) if group.wide else {}
        widest = max((max(abs(low), abs(high)) for low, high in ranges.values()), default=0.0)
        return max(self.plan.transport.sealing_bound, widest)


def words_for(site: str) -> str:
    """Return the name under which a site's own row travels."""
    return f"{WORDS} {site}"


def bound_groups(plan: Plan, phase: Phase) -> list[str]:
    """Return the groups of which all sites are given the same in a phase, or had the same when they got their first.

    What is mixed for each site by a row of its own has a first one only; a group in clear that is each site's own has
    none.
    """
    sealed = plan.sealed_forms(phase)
    return [group.name for group in phase.given if not group.at_home and (not group.personal or group.name in sealed)]


def given_of(plan: Plan, phase: Phase, marks: Mapping[str, str]) -> bytes:
    """Return what stands for all that sites were given in common, from the marks of the groups that they had."""
    return digest("given", *(part for name in bound_groups(plan, phase) for part in (name, marks.get(name, ""))))


def mark_of(tensors: Tensors, held: "Held | None" = None) -> str:
    """Return what stands for a group that all are given, and for whose mean it is, where that is told."""
    mark = hash_of(tensors)
    return digest("mean", mark, held.claim.round, *held.claim.sites).hex() if held else mark


def terms_of(plan: Plan, study: str, sites: Sequence[str]) -> Terms:
    """Return the terms of these sites, those of the plan that are there; raises Refused where they are others, or fewer
    than the plan requires. The threshold is that of all hospitals of the plan."""
    transport, named, required = plan.transport, plan.participation.sites, plan.participation.required
    if not set(sites) <= set(named):
        raise Refused("the server: it names other sites than the plan does")
    if len(sites) < required:
        raise Refused(f"the server: it lets {len(sites)} hospitals agree on keys, and the plan requires {required}")
    return Terms(study, plan.hash, tuple(sites), transport.threshold(len(named)), required)


def sealed_layout(plan: Plan, phase: Phase, layout: Modules) -> dict[str, dict[str, Tensor]]:
    """Return what travels in place of the groups that sites seal in a phase."""
    if not plan.transport.sealed:
        return {}
    blocks = Blocks(plan, terms_of(plan, "", sorted(plan.participation.sites)), 1)
    return {name: own.expected() for name, own in blocks.of(phase, layout, {}).items()}


PREFIX = "@sealed"  # of keys in a checkpoint; no group has such a name


@dataclass(frozen=True)
class SealedResult:
    """One sealed result: its tensors, and what whoever opens it is told."""

    tensors: dict[str, Tensor]
    held: Held


class SealedStore:
    """Sealed results by group and site, of the last round that concerns each site."""

    def __init__(self) -> None:
        self.agreement = 0  # how often the study has agreed on keys
        self.proofs: list[dict[str, Any]] = []  # who spoilt what: each site has the keys with which it can be checked
        self._kept: dict[str, list[tuple[list[str], SealedResult]]] = {}  # by group: whose each result is

    def keep(self, group: str, sites: Sequence[str], kept: SealedResult) -> None:
        """Take the place of these sites' earlier results."""
        older = [([site for site in own if site not in sites], one) for own, one in self._kept.get(group, [])]
        self._kept[group] = [*((own, one) for own, one in older if own), (list(sites), kept)]

    def find(self, group: str, site: str) -> SealedResult | None:
        """Return a site's result of a group; None before the first round of it has ended."""
        return next((one for own, one in self._kept.get(group, ()) if site in own), None)

    def told(self, groups: Mapping[str, Tensors], site: str) -> dict[str, Held]:
        """Return what a site is told of the sealed results among what it is sent."""
        found = {group: self.find(group, site) for group in groups}
        return {group: kept.held for group, kept in found.items() if kept}

    # ------------------------------------------------------------------ checkpoints
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what must outlive the process; nothing in a study that does not seal."""
        if not self.agreement:
            return {}, {}
        tensors: dict[str, Tensor] = {}
        facts: list[dict[str, Any]] = []
        for group, kept in sorted(self._kept.items()):
            for sites, own in kept:
                tensors |= {f"{PREFIX}/{len(facts)}/{name}": tensor for name, tensor in own.tensors.items()}
                facts.append({"group": group, "sites": sites, "held": own.held.facts()})
        return tensors, {"sealed": {"agreement": self.agreement, "kept": facts, "proofs": self.proofs}}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        sealed = facts.get("sealed", {"agreement": 0, "kept": [], "proofs": []})
        self.agreement, self._kept, self.proofs = sealed["agreement"], {}, sealed["proofs"]
        for place, told in enumerate(sealed["kept"]):
            prefix = f"{PREFIX}/{place}/"
            own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            self.keep(told["group"], told["sites"], SealedResult(own, Held.read("the checkpoint", told["held"])))
