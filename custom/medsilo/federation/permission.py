"""A hospital's permission for a study.

The site checks the permission before reading data, between batches, and before an answer leaves the site.
"""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from medsilo.core.errors import Refused
from medsilo.federation.protection import budget_of
from medsilo.federation.site_context import Site, SiteContext
from medsilo.learning.compute import Stop
from medsilo.runs.events import NOT_APPROVED
from medsilo.runs.messages import Request, StudyMessage, digest_of
from medsilo.site.accepted_settings import AcceptedSettings
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import CANARY

if TYPE_CHECKING:
    from medsilo.plan import Plan
    from medsilo.site.approvals import Approvals, Decision
    from medsilo.site.job_code import CodeFacts
    from medsilo.site.query_budget import QueryBudget

# For each task: the fields of a request, besides its tensors, that influence the numbers in the answer
ANSWERED_WITH = {
    "round": {"study", "round", "last", "train_cases"},
    "deliver": {"study", "round", "last", "outcome"},
    "test": {"study", "round", "selected", "outcome"},
}
LOOK = 1.0  # seconds between two checks of the hospital's decision


def is_canary(plan: "Plan") -> bool:
    """True if a plan is a canary: one round on synthetic data, without code from other packages and without weight
    files.
    """
    named = [layer.name for layer in plan.layers]
    return plan.task.synthetic and plan.rounds == 1 and named == [CANARY] and not (plan.packages or plan.network.files)


class Permission:
    """A layer around a site: if the hospital requires approval, the site answers only requests that the hospital has
    approved.
    """

    # the wrapped site; creating the wrapped site reads data, so it is created only after the permission was checked
    inner: Site

    def __init__(self, context: SiteContext) -> None:
        """Check whether the hospital's settings allow the study.

        Raises Refused if the hospital takes part in no study, or if the hospital only tests models and the study would
        train there. Raises Refused, too, if approval is required but no startup kit is present, because only the kit's
        key can verify approvals.
        """
        self.context = context
        by_code = (
            context.asked.task.scripted or context.job_code is not None
        )  # a lead's code may train even at a site that only evaluates
        if refusal := context.settings.refuses(context.trains or by_code):
            raise Refused(refusal)
        self._budget: QueryBudget | None = (
            None  # the hospital's query budget; None if the hospital requires no approval
        )
        budget = budget_of(context.settings, context.site, context.folder)
        self.accepted = AcceptedSettings(context.kit, budget.folder) if context.kit else None
        self._looked = time.monotonic()
        wanted = context.settings.approval_of(context.asked.task.synthetic, context.kit is not None)
        if wanted == "none" or (wanted == "except-canary" and is_canary(context.asked)):
            return
        if context.kit is None:
            raise Refused(
                f"this hospital demands approvals (approval in its {FILE_NAME}), but no kit's key is here to check them"
            )
        self._budget = budget

    @property
    def approvals(self) -> "Approvals | None":
        """The hospital's approvals; each access uses the kit's present key, because the kit may be renewed during a
        study.
        """
        context = self.context
        if not self._budget or not context.kit:
            return None
        from medsilo.site.approvals import approvals_of

        return approvals_of(self._budget, context.kit, context.settings)

    def answer(self, message: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        asked = Request.received(message.facts)

        def look() -> None:  # training calls this function between batches
            stop()
            if time.monotonic() - self._looked >= LOOK:
                self.check(number=asked.round)

        decision, approvals = self.check(asked.sites, asked.round), self.approvals
        if approvals and decision and decision.limits.rounds and asked.task in ANSWERED_WITH:
            own = asked.model_dump(mode="json", include=ANSWERED_WITH[asked.task])
            # a repeated request has the same digest, and therefore counts only once
            made = digest_of(StudyMessage(message.groups, own))[:32]
            approvals.count(decision, made, asked.task, self.context.asked.rounds)  # type: ignore[arg-type]
        reply = self.inner.answer(message, look)
        # the permission is checked a second time before the answer leaves the site
        self.check(asked.sites, asked.round)
        return reply

    def check(self, sites: Sequence[str] | None = None, number: int = 0) -> "Decision | None":
        """Raise Refused unless the hospital has approved the plan for the given sites and round.

        Raises Refused, too, if the hospital's settings have changed since the hospital accepted the settings.

        If the hospital has made no decision about a plan, the plan is saved, so that the hospital can review the plan
        and decide.
        """
        self._looked, plan = time.monotonic(), f"plan {self.context.asked.hash[:12]}"
        if self.accepted:
            self.accepted.check()
        approvals = self.approvals
        if approvals is None:
            return None
        decision = approvals.last(self.context.asked.hash)
        if decision is None:
            self._keep()
            brings = ", whose job brings code" if self.context.job_code else ""
            raise Refused(self._refusal(f"{NOT_APPROVED} {plan}{brings}"))
        told = self.context.sites if sites is None else sites
        own = self.context.asked.participation.everyone
        packages = self.context.asked.code
        if objection := decision.objection(
            plan, own, told, number, packages, approvals.data, time.time(), self._job_code
        ):
            if self.context.job_code:
                self._keep()
            raise Refused(self._refusal(objection))
        return decision

    @cached_property
    def _job_code(self) -> "CodeFacts | None":
        return self.context.job_code.facts() if self.context.job_code else None

    def begin(self) -> None:
        """Save the plan in a form that people can review, even if the plan is already approved.

        Raises Refused under the same conditions as `check`.
        """
        if self._budget:
            self._keep()
        self.check()

    def _refusal(self, objection: str) -> str:
        command = f"medsilo approve {self.context.asked.hash[:12]} --kit KIT"
        reads = "reads the code, and decides there" if self.context.job_code else "decides there"
        return f"this hospital {objection}; its engineer {reads}: {command}"

    def _keep(self) -> None:
        from medsilo.site.approvals import AskingPlan

        approvals = self.approvals
        assert approvals
        asked = AskingPlan(
            plan=self.context.asked.resolved(),
            hash=self.context.asked.hash,
            study=self.context.study[:200],
            lead=self.context.lead[:200],
            sites=tuple(self.context.sites),
            at=int(time.time()),
            job_code=self.context.job_code.hash if self.context.job_code else "",
        )
        approvals.keep(asked, self.context.job_code)
