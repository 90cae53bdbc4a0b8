"""Sums over all hospitals that an inquiry takes sealed: the server reads a sum, and no hospital's part of it.

All hospitals agree on keys, and then seal sums in a row. Masks are those of a pairwise round of a sealed study with the
highest threshold: it takes every hospital to open a sum, so nobody can drop out, and the server learns no other sum.
Nothing is kept on a disk: a hospital that stops begins anew with fresh keys.
"""

from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from medsilo.core.errors import Refused
from medsilo.core.tensors import Tensors
from medsilo.federation.bounds import BESIDE, PER_TENSOR, SLACK, Bounds
from medsilo.runs.messages import Message, Parcel
from medsilo.sealing.fixed_point import CHECK, FixedPoint, Flat
from medsilo.sealing.keeping import SumMemory
from medsilo.sealing.letters import Assembly, Deal, Introduction, Offer, Reveal, UnmaskingRequest
from medsilo.sealing.member import SERVER_SAYS, Member
from medsilo.sealing.relay import Gathering, MaskedSums
from medsilo.sealing.signing import Signer
from medsilo.sealing.terms import SERVER, SealedBlock, Terms

WORD = 8  # bytes

Step = Literal["keys", "meet", "seal", "open"]
Shapes = Mapping[str, tuple[int, ...]]  # of the counts of one sum, by name


class SumRequest(Message):
    """The part of a server's question that sealed sums need."""

    study: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    sum: Annotated[int, Field(ge=1)] = 1  # its number
    letter: dict[str, Any] = {}


def _terms(study: str, about: str, sites: Sequence[str]) -> Terms:
    if not sites:
        raise Refused("the question names no hospitals, so whoever is connected would count as one; set sites in it")
    return Terms(study, about, tuple(sorted(sites)), threshold=len(sites))


def _block(shapes: Shapes, most: float, sites: int) -> SealedBlock:
    like = {name: torch.empty(shape, dtype=torch.float64, device="meta") for name, shape in shapes.items()}
    # Counts are whole numbers far below 2^53, and a word's unit is a power of two: nothing is rounded.
    return SealedBlock("counts", Flat.of(like), FixedPoint(64, most, sites), reader=SERVER)


class SummedSite:
    """A hospital's side of sealed sums."""

    def __init__(self, name: str, signer: Signer, about: str, sites: Sequence[str]) -> None:
        """about: a hash of what all hospitals were asked; sites: those that the question names, whatever the server
        says."""
        self.name, self.signer, self.about, self.sites, self.memory = name, signer, about, sites, SumMemory()
        self._member: Member | None = None
        self.blocks: dict[int, SealedBlock] = {}  # as they were sealed, by the sum

    def introduction(self, asked: SumRequest) -> dict[str, Any]:
        """Return fresh keys, with which all begins anew."""
        self._member = Member.begin(_terms(asked.study, self.about, self.sites), self.name, self.signer, self.memory)
        self.blocks = {}
        return self._member.introduction().facts()

    def check(self, asked: SumRequest) -> Member:
        """Return the keys that are in use; raises Refused where the server goes on with others."""
        if self._member is None or self._member.terms != _terms(asked.study, self.about, self.sites):
            raise Refused("the server: it goes on with sums that this hospital is not in; begin again")
        return self._member

    def meet(self, asked: SumRequest) -> Parcel:
        """Take the keys of all hospitals; return those for the first sum."""
        member = self.check(asked)
        member.meet(Assembly.read(SERVER_SAYS, asked.letter))
        return Parcel(facts=member.offer(1).facts())

    def seal(self, asked: SumRequest, group: str, counts: Tensors, most: float) -> Parcel:
        """Return this hospital's counts sealed, as a group of tensors. most: no count is above it."""
        deal = Deal.read(SERVER_SAYS, asked.letter)
        if deal.round != asked.sum or asked.sum in self.blocks:
            raise Refused("the server: it asks for a sum twice, or for another one than it deals; begin again")
        block = _block({name: tuple(own.shape) for name, own in counts.items()}, most, len(self.sites))
        sealed = self.check(asked).seal(deal, [block], {block.name: counts})
        self.blocks[asked.sum] = block
        return Parcel({group: sealed})

    def open(self, asked: SumRequest) -> Parcel:
        """Return this hospital's share in opening a sum, and keys for the next one."""
        if asked.sum not in self.blocks:
            raise Refused("the server: it opens a sum that this hospital has not sealed")
        request = UnmaskingRequest.read(SERVER_SAYS, asked.letter)
        member = self.check(asked)
        share = member.unmask(request, [self.blocks[asked.sum]])
        return Parcel(facts={"share": share.facts(), "next": member.offer(asked.sum + 1).facts()})


class SealedSums:
    """The server's side: it relays letters, and reads sums."""

    def __init__(self, about: str, sites: Sequence[str], ask: Callable[..., None]) -> None:
        """ask(step, receive, letters, **more): puts a step to all hospitals, to each with its letter."""
        self._terms, self._ask = _terms(token_hex(16), about, sites), ask
        self.study, self.sites = self._terms.study, self._terms.sites
        self._gathering = Gathering(self._terms)
        self._offers: dict[str, Offer] = {}  # of the next sum

    def introduce(self, site: str, introduction: dict[str, Any]) -> None:
        """Take a hospital's answer to `keys`."""
        self._gathering.add(site, Introduction.read(site, introduction))

    def meet(self) -> None:
        """Relay the keys of all to all."""

        def met(site: str, reply: Parcel) -> None:
            self._offers[site] = Offer.read(site, reply.facts)

        self._assembly = self._gathering.assembly()
        self._ask("meet", met, dict.fromkeys(self.sites, self._assembly.facts()))

    def sum(self, number: int, group: str, shapes: Shapes, most: float, **more: Any) -> Tensors:
        """Return the sum of what all hospitals seal. Sums have the numbers 1, 2, ... in turn.

        more: what a hospital is told when it seals.
        """
        block = _block(shapes, most, len(self.sites))
        sums = MaskedSums(self._terms, self._assembly, number, [block])
        for site, offer in self._offers.items():
            sums.offer(site, offer)

        def sealed(site: str, reply: Parcel) -> None:
            sums.add(site, reply.groups.get(group, {}))

        def revealed(site: str, reply: Parcel) -> None:
            sums.reveal(site, Reveal.read(site, reply.facts.get("share")))
            self._offers[site] = Offer.read(site, reply.facts.get("next"))

        self._ask("seal", sealed, {site: deal.facts() for site, deal in sums.deals().items()}, sum=number, **more)
        self._ask("open", revealed, dict.fromkeys(self.sites, sums.request().facts()), sum=number)
        return sums.read(block, sums.open()[1])


def sealed_bounds(counts: int, values: int = 0) -> Bounds:
    """Return the bounds of an answer with so many sealed counts. values: that it tells in clear beside them."""
    return Bounds(SLACK + WORD * (counts + CHECK), BESIDE + PER_TENSOR + values)
