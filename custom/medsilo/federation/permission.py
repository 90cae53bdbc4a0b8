"""A hospital's permission for a study: needed before its data are read, between batches, before an answer leaves."""

import time
from collections.abc import Callable, Sequence

from medsilo.core.errors import MedsiloError, Refused, Undecided
from medsilo.federation.protection import book_of
from medsilo.federation.sealed.identity import KitFiles, signer_of
from medsilo.federation.seams import Place, Site
from medsilo.learning.loop import Stop
from medsilo.runs.messages import Parcel, Request
from medsilo.sealing.signing import Certified
from medsilo.site.approvals import Approvals, AskingPlan
from medsilo.site.book import Book
from medsilo.site.settings import FILE_NAME

LOOK = 1.0  # seconds between two looks at whether a decision has changed


class Permission:
    """A site that answers what its hospital has approved. Where `approval` is `none`, there is nothing to ask for."""

    inner: Site  # behind it, put there when permission was given: it reads data

    def __init__(self, place: Place) -> None:
        """Raises Refused where approval is required and no kit is there, with whose key decisions are signed."""
        self.place = place
        self.approvals: Approvals | None = None
        self._looked = time.monotonic()
        if place.settings.approval == "none":
            return
        if place.kit is None:
            raise Refused(
                f"this hospital wants plans to be approved (approval in its {FILE_NAME}) with the key of its kit, and "
                "here is none"
            )
        self.approvals = approvals_of(book_of(place.settings, place.site, place.folder), place.site, place.kit)

    def answer(self, parcel: Parcel, stop: Stop = lambda: None) -> Parcel:
        asked = Request.read(parcel.facts)

        def look() -> None:
            stop()
            self.look(asked.round)

        self.check(asked.sites, asked.round)
        reply = self.inner.answer(parcel, look)
        self.check(asked.sites, asked.round)  # the last thing before it leaves
        return reply

    def check(self, sites: Sequence[str] | None = None, number: int = 0) -> None:
        """Raise Refused unless the plan is approved with these sites up to this round; keep a plan that is new."""
        if self.approvals is None:
            return
        self._looked = time.monotonic()
        try:
            decision = self.approvals.last(self.place.plan.hash)
        except MedsiloError as error:
            raise Refused(str(error), private=error.private) from error
        if decision is None:
            self._keep()
            raise Undecided(self._refusal("has not approved"))
        method, named = self.place.plan.algorithm.name, self.place.sites if sites is None else sites
        if objection := decision.objection(method, named, number, time.time()):
            raise Refused(self._refusal(objection))

    def look(self, number: int) -> None:
        """The same now and then, between batches."""
        if time.monotonic() - self._looked >= LOOK:
            self.check(number=number)

    def wait(self, stop: Callable[[], None]) -> None:
        """Wait as long as the hospital wants for somebody to decide; raises Refused. `stop` raises to end it."""
        if self.approvals is None:
            return
        self._keep()  # also what was approved before it asked, for whoever looks at the study
        until = time.monotonic() + 60 * self.place.settings.approval_wait
        while True:
            try:
                return self.check()
            except Undecided:
                if time.monotonic() >= until:
                    raise
            stop()
            time.sleep(min(LOOK, max(0.0, until - time.monotonic())))

    def _refusal(self, objection: str) -> str:
        return (
            f"this hospital {objection} plan {self.place.plan.hash}; its engineer decides there: "
            f"medsilo approve {self.place.plan.hash} --kit KIT"
        )

    def _keep(self) -> None:
        assert self.approvals
        asked = AskingPlan(
            plan=self.place.plan.resolved(),
            hash=self.place.plan.hash,
            study=self.place.study[:200],
            lead=self.place.lead[:200],
            sites=tuple(self.place.sites),
            at=int(time.time()),
        )
        self.approvals.keep(asked)


def approvals_of(book: Book, site: str, kit: KitFiles) -> Approvals:
    """Return a site's approvals, which it signs with the key of its kit."""
    signer = signer_of(kit)
    assert isinstance(signer, Certified)
    return Approvals(book.folder, site, signer)
