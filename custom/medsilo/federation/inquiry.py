"""Questions to all hospitals by a job of their own, before there is a plan."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.text import plain
from medsilo.federation.bounds import Bounds
from medsilo.federation.protection import book_of
from medsilo.federation.sealed.identity import KitFiles, approvals_of, ledger_of
from medsilo.federation.seams import Channel, Missing, Outgoing, Receive, Site
from medsilo.privacy.mechanisms import Charge
from medsilo.registry import INQUIRIES, check_allowed
from medsilo.runs.messages import Message
from medsilo.runs.paths import site_folder
from medsilo.sealing.signing import Signer, Unsigned
from medsilo.site.approvals import AskingPlan
from medsilo.site.book import Asker, Book, data_set
from medsilo.site.ledger import CountedStudy, Spending
from medsilo.site.settings import FILE_NAME, SiteSettings


@dataclass(frozen=True)
class SiteOfInquiry:
    """A hospital, as it knows itself when it is asked.

    >>> from pathlib import Path
    >>> SiteOfInquiry("st-anna", None, Path("kept"), signer=None).name
    'st-anna'
    """

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
        return data_set(self.settings.data.folder if self.settings.data else None, "")

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
    >>> inquiry = Inquiry(read=Path.read_text, bounds=None, collect=None, site=None)
    >>> inquiry.sealed
    False
    """

    read: Callable[[Path], Any]  # reads and checks the question that all hospitals get
    bounds: Callable[[Any], Bounds]  # of what a hospital may answer
    collect: Callable[[Any, Channel, Sequence[str], float], Mapping[str, Message]]  # asks; answers by name of file
    site: Callable[[Any, SiteOfInquiry], Site]
    sealed: bool = False  # whether the server reads sums alone
    leaves: Callable[[Any], list[str]] | None = None  # what leaves a hospital, a line each, for the leak report

    def here(self, question: Any, sites: Mapping[str, SiteSettings], folder: Path) -> Mapping[str, Message]:
        """Ask hospitals whose data are on this machine, one after the other; answers by name of file.

        folder: of this inquiry, for what hospitals keep; they are not asked for approval, as nothing leaves.
        """
        asked = {
            name: self.site(question, SiteOfInquiry(name, settings, site_folder(folder, name), Unsigned))
            for name, settings in sorted(sites.items())
        }
        return self.collect(question, _Line(asked), sorted(sites), 86_400.0)


class _Line:
    """The channel to hospitals in this process."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = sites

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        missing = {}
        for name in sites:
            if name not in self.sites:
                missing[name] = Missing("lost", "its data are not here")
                continue
            try:
                receive(name, self.sites[name].answer(outgoing(name), lambda: None))
            except MedsiloError as error:
                missing[name] = Missing.refused(error)
        return missing

    def pause(self, seconds: float) -> None:
        """Nothing comes back in one process by waiting."""


def inquiry_of(name: str, sealed: bool, allowed: Collection[str]) -> Inquiry:
    """Return the inquiry of a job; raises Refused for one of another kind, or of a package that is not allowed here."""
    if name not in INQUIRIES:
        raise Refused(f"the inquiry {plain(name, 60)!r} is not known here; install the medsilo that the lead has")
    if package := INQUIRIES.package_of(name):
        check_allowed(package, allowed)
    inquiry: Inquiry = INQUIRIES[name]
    if inquiry.sealed != sealed:
        raise Refused(f"the job asks {name} {'in clear' if sealed else 'sealed'}, and its classes say otherwise")
    return inquiry
