"""Sums over all hospitals that an inquiry takes sealed: the server reads a sum, and no hospital's part of it.

All hospitals agree on keys, and then seal sums in a row: each adds to its numbers the masks that it has with others.
These cancel in the sum of all and in no other, so nobody can drop out, and nothing is taken off afterwards.
Masks depend on all that a hospital was asked: where the server asks one for something else, its sum does not open.
Nothing is kept on a disk: a hospital that stops starts again with fresh keys.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from medsilo.core.errors import Refused
from medsilo.core.tensors import Tensors
from medsilo.federation.bounds import BESIDE, PER_TENSOR, SLACK, Bounds
from medsilo.runs.messages import Message, Parcel
from medsilo.sealing.fixed_point import CHECK, FixedPoint, Flat, as_tensor, as_words
from medsilo.sealing.keeping import SumMemory
from medsilo.sealing.letters import Assembly, Introduction
from medsilo.sealing.member import SERVER_SAYS, Member
from medsilo.sealing.relay import Gathering
from medsilo.sealing.signing import Signer
from medsilo.sealing.streams import digest
from medsilo.sealing.terms import SERVER, SealedBlock, Terms

WORD = 8  # bytes

Shapes = Mapping[str, tuple[int, ...]]  # of the counts of one sum, by name


class SumRequest(Message):
    """The part of a server's question that sealed sums need."""

    study: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    sum: Annotated[int, Field(ge=1)] = 1  # its number
    letter: dict[str, Any] = {}  # the keys of all hospitals, with the first sum

    @property
    def digest(self) -> bytes:
        """Bytes that stand for all that is asked: the same for all hospitals."""
        return digest("asked", json.dumps(self.model_dump(mode="json", exclude={"letter"}), sort_keys=True))


def _terms(study: str, about: str, sites: Sequence[str]) -> Terms:
    if not sites:
        raise Refused("the question names no hospitals, so every connected site would count; set sites in it")
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
        """Return fresh keys, with which all starts again."""
        self._member = Member.begin(_terms(asked.study, self.about, self.sites), self.name, self.signer, self.memory)
        self.blocks = {}
        return self._member.introduction().facts()

    def check(self, asked: SumRequest) -> Member:
        """Return the keys that are in use; raises Refused where the server goes on with others."""
        if self._member is None or self._member.terms != _terms(asked.study, self.about, self.sites):
            raise Refused("the server: it goes on with sums that this hospital is not in; begin again")
        return self._member

    def seal(self, asked: SumRequest, group: str, counts: Tensors, most: float) -> Parcel:
        """Return this hospital's counts sealed, as a group of tensors. most: no count is above it."""
        member = self.check(asked)
        if asked.sum in self.blocks:
            raise Refused("the server: it asks for a sum twice; begin again")
        if asked.letter:
            member.meet(Assembly.read(SERVER_SAYS, asked.letter))
        block = _block({name: tuple(own.shape) for name, own in counts.items()}, most, len(self.sites))
        sealed = member.seal_for_all(asked.sum, block, counts, asked.digest)
        self.blocks[asked.sum] = block
        return Parcel({group: {block.name: as_tensor(sealed)}})


class SealedSums:
    """The server's side: it relays keys, and reads sums."""

    def __init__(self, about: str, sites: Sequence[str], ask: Callable[..., None]) -> None:
        """ask(step, receive, letters, **more): puts a step to all hospitals, to each with its letter."""
        self._terms, self._ask = _terms(token_hex(16), about, sites), ask
        self.study, self.sites = self._terms.study, self._terms.sites
        self._gathering = Gathering(self._terms)

    def introduce(self, site: str, introduction: dict[str, Any]) -> None:
        """Take a hospital's keys."""
        self._gathering.add(site, Introduction.read(site, introduction))

    def sum(self, number: int, group: str, shapes: Shapes, most: float, **more: Any) -> Tensors:
        """Return the sum of what all hospitals seal. Sums have the numbers 1, 2, ... in turn.

        more: what a hospital is told when it seals.
        """
        block, came = _block(shapes, most, len(self.sites)), set[str]()
        words = np.zeros(block.flat.words, np.uint64)

        def sealed(site: str, reply: Parcel) -> None:
            own = reply.groups.get(group, {}).get(block.name)
            if site in came:
                raise Refused(f"{site}: it has already sent what it sealed")
            np.add(words, as_words(site, own, block.flat.words, block.fixed.bits), out=words)
            came.add(site)

        keys = self._gathering.assembly().facts() if number == 1 else {}
        self._ask("seal", sealed, dict.fromkeys(self.sites, keys), sum=number, **more)
        if len(came) < len(self.sites):
            raise Refused("a hospital of the question has sent nothing, and a sum needs all of them")
        return block.read(words, None, ())


def sealed_bounds(counts: int, values: int = 0) -> Bounds:
    """Return the bounds of an answer with so many sealed counts. values: that it tells in clear beside them."""
    return Bounds(SLACK + WORD * (counts + CHECK), BESIDE + PER_TENSOR + values)
