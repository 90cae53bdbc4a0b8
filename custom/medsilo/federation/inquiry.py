"""Questions to all hospitals by a job of their own, before there is a plan; and sums that they seal for such questions.

Of sealed numbers the server reads a sum, and no hospital's part of it. All hospitals agree on keys, and then seal sums
in a row: each adds to its numbers the masks that it has with others. These cancel in the sum of all and in no other, so
nobody can drop out, and nothing is taken off afterwards. Masks depend on all that a hospital was asked: where the
server asks one for something else, its sum does not open. Nothing is kept on a disk: a hospital that stops starts again
with new keys.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from medsilo.core.errors import Refused
from medsilo.core.package import package_facts
from medsilo.core.section import Section
from medsilo.core.tensors import Tensors
from medsilo.core.text import plain
from medsilo.federation.accepting import check_package
from medsilo.federation.bounds import BESIDE, PER_TENSOR, SLACK, Bounds
from medsilo.federation.protection import book_of
from medsilo.federation.sealed.identity import KitFiles, approvals_of, ledger_of
from medsilo.federation.seams import Channel, Line, Site
from medsilo.privacy.mechanisms import Charge
from medsilo.registry import INQUIRIES, check_allowed
from medsilo.runs.messages import Message, Parcel
from medsilo.runs.paths import site_folder
from medsilo.sealing.fixed_point import CHECK, FixedPoint, Flat, as_tensor, as_words
from medsilo.sealing.letters import Assembly, Introduction
from medsilo.sealing.member import SERVER_SAYS, Member
from medsilo.sealing.relay import Gathering
from medsilo.sealing.signing import Signer, Unsigned
from medsilo.sealing.streams import digest
from medsilo.sealing.terms import SealedBlock, Terms
from medsilo.site.approvals import AskingPlan
from medsilo.site.book import Asker, Book, data_set
from medsilo.site.ledger import CountedStudy, Spending
from medsilo.site.settings import FILE_NAME, SiteSettings


@dataclass(frozen=True)
class SiteOfInquiry:
    """A hospital, as it knows itself when it is asked."""

    name: str
    settings: SiteSettings
    folder: Path  # for what it keeps of this inquiry
    signer: Callable[[], Signer]  # with its kit's key
    lead: str = ""  # who asks, as far as it is known
    kit: KitFiles | None = None

    @property
    def study(self) -> str:
        """The inquiry's name, which is that of its job."""
        return self.folder.parents[1].name

    @cached_property
    def book(self) -> Book:
        """The hospital's memory."""
        return book_of(self.settings, self.name, self.folder)

    @property
    def data(self) -> str:
        """A name of the hospital's data that tells nothing of them."""
        return data_set(self.settings.data, "")

    def check_package(self, server: Mapping[str, Any]) -> None:
        """Raise Refused unless the server runs this hospital's own medsilo."""
        check_package(package_facts(), server)

    def summed(self, about: str, sites: Sequence[str]) -> "SummedSite":
        """Return what seals sums. about: a hash of what all hospitals were asked; sites: those that the question names,
        whatever the server says."""
        return SummedSite(self.name, self.signer(), about, sites)

    def check_approved(self, question: str, sites: Sequence[str], told: Mapping[str, Any]) -> None:
        """Raise Refused unless the hospital approved the question with this hash, where it wants to approve.

        sites: those that the question names; told: its title, and what
        `medsilo approve` says of it before somebody decides.
        """
        if self.settings.approval == "none":
            return
        where = f"its engineer decides there: medsilo approve {question} --kit KIT"
        if self.kit is None:
            raise Refused(
                f"this hospital wants to approve questions (approval in its {FILE_NAME}), and has no kit here"
            )
        approvals = approvals_of(self.book, self.kit, self.settings)
        decision = approvals.last(question)
        own = f"question {question}"
        if decision is None:
            about = {"study": self.study[:200], "lead": self.lead[:200], "sites": tuple(sites), "at": int(time.time())}
            approvals.keep(AskingPlan(plan={"question": dict(told)}, hash=question, **about))
            raise Refused(f"this hospital has not approved {own}; {where}")
        if objection := decision.objection(own, sites, sites, 0, self.data, time.time()):
            raise Refused(f"this hospital {objection}; {where}")

    def count_answer(self) -> None:
        """Count an answer about training cases that is about to leave; raises Refused when the lead has none left."""
        if self.settings.protects(synthetic=False):
            self.book.note(Asker(self.lead, self.data, self.study), {"train": 1}, self.settings.limits)

    def charge(
        self, question: str, method: str, attempt: str, charges: Sequence[Charge], planned: bool = False
    ) -> None:
        """Enter into the ledger what is about to leave, or what all of it will cost; raises Refused."""
        ledger = ledger_of(self.book, self.data, self.kit)
        spending = Spending(study=self.study[:200], plan=question, method=method, lead=self.lead[:200])
        study = CountedStudy(spending, self.settings.privacy)
        if planned:
            ledger.plan(study, charges)
        else:
            ledger.charge(study, method, attempt, charges)


@dataclass(frozen=True)
class Inquiry:
    """A question to all hospitals. Its name among the entry points `medsilo.inquiries` is that of its job.

    >>> from pathlib import Path
    >>> inquiry = Inquiry(read=Path.read_text, most=None, collect=None, site=None)
    >>> inquiry.sealed
    False
    """

    read: Callable[[Path], Any]  # reads and checks the question that all hospitals get
    most: Callable[[Any], tuple[int, int]]  # of what a hospital may answer: sealed numbers, and others in clear
    collect: Callable[[Any, Channel, Sequence[str], float], Mapping[str, Section]]  # asks; answers by name of file
    site: Callable[[Any, SiteOfInquiry], Site]  # answers for a hospital: it gets the name, settings and a folder
    sealed: bool = False  # whether the server reads sums alone
    leaves: Callable[[Any], list[str]] | None = None  # what leaves a hospital, a line each, for the leak report

    def bounds(self, question: Any) -> Bounds:
        """Return the bounds of a hospital's answer."""
        sealed, told = self.most(question)
        return Bounds(SLACK + WORD * (sealed + CHECK), BESIDE + PER_TENSOR + told)

    def here(self, question: Any, sites: Mapping[str, SiteSettings], folder: Path) -> Mapping[str, Section]:
        """Ask hospitals whose data are on this machine, one after the other; answers by name of file.

        folder: of this inquiry, for what hospitals keep; they are not asked for approval, as nothing leaves.
        """
        asked = {
            name: self.site(question, SiteOfInquiry(name, settings, site_folder(folder, name), Unsigned))
            for name, settings in sorted(sites.items())
        }
        return self.collect(question, Line(asked), sorted(sites), 86_400.0)


def inquiry_of(name: str, sealed: bool | None, allowed: Collection[str]) -> Inquiry:
    """Return the inquiry of a job; raises Refused for one of a package that is not allowed here, or of another kind.

    sealed: whether the server has to read sums alone; None where both are answered.
    """
    if name not in INQUIRIES:
        raise Refused(f"the inquiry {plain(name, 60)!r} is not known here; install the medsilo that the lead has")
    if package := INQUIRIES.package_of(name):
        check_allowed(package, allowed)
    inquiry: Inquiry = INQUIRIES[name]
    if sealed not in (None, inquiry.sealed):
        raise Refused(f"the job asks {name} {'in clear' if sealed else 'sealed'}, and its classes say otherwise")
    return inquiry


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
    return SealedBlock("counts", Flat.of(like), FixedPoint(most, sites))


class SummedSite:
    """A hospital's side of sealed sums."""

    def __init__(self, name: str, signer: Signer, about: str, sites: Sequence[str]) -> None:
        self.name, self.signer, self.about, self.sites = name, signer, about, sites
        self._member: Member | None = None
        self.blocks: dict[int, SealedBlock] = {}  # as they were sealed, by the sum

    def introduction(self, asked: SumRequest) -> dict[str, Any]:
        """Return new keys; all steps start again with them."""
        self._member = Member.begin(_terms(asked.study, self.about, self.sites), self.name, self.signer)
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
        sealed = member.seal_for_all(asked.sum, block, counts, digest("counts", asked.digest, *block.flat.names))
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
            np.add(words, as_words(site, own, block.flat.words), out=words)
            came.add(site)

        keys = self._gathering.assembly().facts() if number == 1 else {}
        self._ask("seal", sealed, dict.fromkeys(self.sites, keys), sum=number, **more)
        if len(came) < len(self.sites):
            raise Refused("a hospital of the question has sent nothing, and a sum needs all of them")
        return block.read(words)
