"""A hospital's permission for a study: needed before its data are read, between batches, before an answer leaves."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from medsilo.core import optional
from medsilo.core.errors import Refused
from medsilo.federation.protection import book_of
from medsilo.federation.site_context import Site, SiteContext
from medsilo.learning.compute import Stop
from medsilo.runs.messages import Request, StudyMessage, digest_of
from medsilo.site.accepted_settings import AcceptedSettings
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import CANARY

if TYPE_CHECKING:
    from medsilo.plan import Plan
    from medsilo.site.approvals import Approvals, Decision

LOOK = 1.0  # seconds between two looks at whether a decision has changed


def is_canary(plan: "Plan") -> bool:
    """Return whether a plan is a canary: one round on synthetic data, of medsilo's own code and no files."""
    named = [layer.name for layer in plan.layers]
    return plan.task.synthetic and plan.rounds == 1 and named == [CANARY] and not (plan.packages or plan.network.files)


class Permission:
    """A site that answers what its hospital has approved. Where `approval` is `none`, there is nothing to ask for."""

    inner: Site  # behind it, put there when permission was given: it reads data

    def __init__(self, place: SiteContext) -> None:
        """Raises Refused where approval is required and no kit is there, with whose key decisions are signed."""
        self.place = place
        self.approvals: Approvals | None = None
        self.accepted = AcceptedSettings(place.kit) if place.kit else None
        self._looked = time.monotonic()
        if place.settings.approval == "none" or (place.settings.approval == "except-canary" and is_canary(place.asked)):
            return
        if place.kit is None:
            raise Refused(
                f"this hospital demands approvals (approval in its {FILE_NAME}), and no kit's key is here to check them"
            )
        book = book_of(place.settings, place.site, place.folder)
        self.approvals = optional.approvals_of(book, place.kit, place.settings)

    def answer(self, parcel: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        asked = Request.received(parcel.facts)

        def look() -> None:  # now and then, between batches
            stop()
            if time.monotonic() - self._looked >= LOOK:
                self.check(number=asked.round)

        decision = self.check(asked.sites, asked.round)
        if self.approvals and decision and decision.limits.rounds and asked.task == "round":
            own = asked.model_dump(include={"study", "round", "last", "train_cases"})  # on what training rests
            self.approvals.count(decision, digest_of(StudyMessage(parcel.groups, own))[:32])  # the same is no other
        reply = self.inner.answer(parcel, look)
        self.check(asked.sites, asked.round)  # the last thing before it leaves
        return reply

    def check(self, sites: Sequence[str] | None = None, number: int = 0) -> "Decision | None":
        """Raise Refused unless the plan is approved with these sites up to this round, and the settings are as they
        were accepted; keep a plan that is new."""
        self._looked, plan = time.monotonic(), f"plan {self.place.asked.hash[:12]}"
        if self.accepted:
            self.accepted.check()
        if self.approvals is None:
            return None
        decision = self.approvals.last(self.place.asked.hash)
        if decision is None:
            self._keep()
            raise Refused(self._refusal(f"has not approved {plan}"))
        told = self.place.sites if sites is None else sites
        own = self.place.asked.participation.everyone
        code = self.place.asked.code
        if objection := decision.objection(plan, own, told, number, code, self.approvals.data, time.time()):
            raise Refused(self._refusal(objection))
        return decision

    def begin(self) -> None:
        """Keep the plan for people to read, also one that is approved already; raises Refused as `check` does."""
        if self.approvals:
            self._keep()
        self.check()

    def _refusal(self, objection: str) -> str:
        command = f"medsilo approve {self.place.asked.hash[:12]} --kit KIT"
        return f"this hospital {objection}; its engineer decides there: {command}"

    def _keep(self) -> None:
        assert self.approvals
        asked = optional.AskingPlan(
            plan=self.place.asked.resolved(),
            hash=self.place.asked.hash,
            study=self.place.study[:200],
            lead=self.place.lead[:200],
            sites=tuple(self.place.sites),
            at=int(time.time()),
        )
        self.approvals.keep(asked)
