"""Run a study with secure aggregation in one process, with messages as JSON."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from medsilo.core.tensors import Groups, Tensors
from medsilo_secagg.fixed_point import FixedPoint, Flat
from medsilo_secagg.identity import Signer, Unsigned
from medsilo_secagg.letters import Roster, SecAggMessage
from medsilo_secagg.member import Member
from medsilo_secagg.streams import Words
from medsilo_secagg.terms import SealedBlock, Terms
from medsilo_server.masked_sums import KeyCollection, MaskedSums

Kind = TypeVar("Kind", bound=SecAggMessage)


def sent(letter: Kind) -> Kind:
    return type(letter).read("somebody", json.loads(json.dumps(letter.facts())))


def names(count: int) -> tuple[str, ...]:
    return tuple(f"site-{place}" for place in range(count))


def terms(count: int, threshold: int = 0, study: str = "s", **more: Any) -> Terms:
    return Terms(study, "plan", more.pop("sites", names(count)), threshold or count // 2 + 1, **more)


def numbers(count: int, size: int = 5, seed: int = 0) -> dict[str, Tensors]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        site: {"a": torch.randn(size, generator=drawn), "b": torch.randn(2, 2, generator=drawn)}
        for site in names(count)
    }


def block(models: Mapping[str, Tensors], name: str = "model", one: int = 1) -> SealedBlock:
    return SealedBlock(name, Flat.of(next(iter(models.values()))), FixedPoint(16.0, len(models) * one, one))


def mean_of(
    models: Mapping[str, Tensors], sites: Collection[str], weights: Mapping[str, float] | None = None
) -> Tensors:
    weights = weights or dict.fromkeys(sites, 1.0)
    total = sum(weights[site] for site in sites)
    share = {site: weights[site] / total for site in sites}
    return {name: sum(share[site] * models[site][name].double() for site in sites) for name in ("a", "b")}  # type: ignore[misc]


def close(got: Tensors, wanted: Tensors, most: float = 1e-6) -> bool:
    return got.keys() == wanted.keys() and all(bool((got[n] - wanted[n]).abs().max() <= most) for n in got)


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.double().reshape(-1), other.double().reshape(-1)]))[0, 1].abs())


@dataclass
class Hospitals:
    terms: Terms
    signers: Mapping[str, Signer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = {site: Member.begin(self.terms, site, self.signer(site)) for site in self.terms.sites}
        self.gathering = KeyCollection(self.terms)
        for site, member in self.members.items():
            self.gathering.add(site, sent(member.introduction()))
        self.assembly: Roster = sent(self.gathering.assembly())
        for member in self.members.values():
            member.meet(self.assembly)

    def signer(self, site: str) -> Signer:
        return self.signers.get(site, Unsigned())

    def restart(self, site: str) -> None:
        self.members[site] = Member.load(self.terms, self.signer(site), self.members[site].saved())

    # ------------------------------------------------------------------ a round
    def begin(self, number: int, blocks: Sequence[SealedBlock], without: Collection[str] = ()) -> MaskedSums:
        server = MaskedSums(self.terms, number, blocks)
        for site, member in self.members.items():
            if site not in without:
                server.offer(site, sent(member.offer(number)))
        return server

    def seal(
        self,
        server: MaskedSums,
        groups: Mapping[str, Groups],
        without: Collection[str] = (),
        weights: Mapping[str, Mapping[str, int]] | None = None,
    ) -> dict[str, Tensors]:
        uploads = {}
        for site, deal in server.deals().items():
            if site not in without:
                if site == self.terms.sites[0]:
                    self.restart(site)
                uploads[site] = self.members[site].seal(
                    sent(deal), server.blocks, groups[site], (weights or {}).get(site)
                )
                server.add(site, uploads[site])
        return uploads

    def open(self, server: MaskedSums, silent: Collection[str] = ()) -> dict[str, Words]:
        request = sent(server.survivors())
        for site in request.sites:
            if site not in silent:
                if site == self.terms.sites[-1]:
                    self.restart(site)
                server.reveal(site, sent(self.members[site].unmask(request)))
        return server.open()


def as_groups(models: Mapping[str, Tensors], *blocks: str) -> dict[str, Groups]:
    return {site: dict.fromkeys(blocks or ("model",), model) for site, model in models.items()}
