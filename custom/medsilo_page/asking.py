"""Describe a plan that waits for approval, for the first screen of the plan's page: purpose, disclosures, cost and
decision.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from medsilo.check.approval import Change, approved_before, changes_since, standing
from medsilo.check.demands import answers_wanted, privacy_findings
from medsilo.check.disclosure import BESIDE, BY_CODE, STAYS, Leak, leaks, through_features
from medsilo.check.hospital_checks import KitAtHome
from medsilo.check.own_data_set import data_set_words
from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted, plain
from medsilo.plan import Plan
from medsilo.site.approvals import AskingPlan, Decision
from medsilo.site.policy import Policy

NO_PRIVACY = "none: neither the plan nor this hospital demands it, so nothing that leaves has noise"


@dataclass(frozen=True)
class ShownRequest:
    """A plan that waits for approval, with the facts that a person needs for the decision."""

    asked: AskingPlan
    plan: Plan
    title: str
    purpose: str
    contact: str
    standing: str
    # pairs: a kind of disclosure, and True if the hospital's privacy.json allows disclosures of this kind
    leaks: list[tuple[Leak, bool]]
    beside: list[str]  # disclosures other than tensors, or the reason why medsilo can't determine these disclosures
    terms: list[tuple[str, str]]
    before: Decision | None
    changes: list[Change]
    decisions: list[Decision]

    @classmethod
    def read(cls, home: KitAtHome, pending: AskingPlan) -> "ShownRequest":
        """Read a plan that waits for approval. Raises MedsiloError if the plan is unreadable or its code is damaged."""
        plan = home.plan_of(pending)
        code, study = home.approvals.code_of(pending), plan.study
        policy, before = Policy.read(home.local), approved_before(home, pending, plan)
        told, runs = standing(home, plan, pending.sites, code)
        decided = [one for one in reversed(home.approvals.decisions()) if one.plan == pending.hash]
        carries_code = code is not None or plan.task.scripted
        return cls(
            asked=pending,
            plan=plan,
            title=plain(study.title) or f"{plan.algorithm.title}, {counted(plan.rounds, 'round')}",
            purpose=plain(study.purpose) or "The plan states no purpose (study.purpose).",
            contact=plain(study.contact),
            standing=f"{told[0].upper()}{told[1:]}: it {'may run' if runs else 'does not run'} here.",
            leaks=[(leak, policy.lets_out(leak.group)) for leak in leaks(plan)],
            beside=[*through_features(plan), BY_CODE if carries_code else f"{BESIDE} {STAYS}"],
            terms=[*_terms(home, plan, pending.lead)],
            before=before[0] if before else None,
            changes=changes_since(before[1], plan) if before else [],
            decisions=decided,
        )

    @property
    def bytes(self) -> int:
        return sum(leak.bytes * leak.rounds for leak, leaves in self.leaks if leaves)


def _terms(home: KitAtHome, plan: Plan, lead: str) -> Iterator[tuple[str, str]]:
    if plan.task.synthetic:
        yield "Data", "synthetic: no patient's data are read"
    elif words := dict(data_set_words(home.settings, home.files)):
        yield "Data set", f"{words['data set']}; patients: {words['patients']}; accepted {words['accepted']}"
    else:
        source = home.settings.data
        yield "Data set", "none that a person accepted" if source else "none: medsilo.yaml names no data"
    found = [*privacy_findings(plan, home.settings, home.budget, home.files)]
    yield "Privacy", "; ".join(one.what for one in found) or NO_PRIVACY
    yield "Answers with scores", answers_wanted(plan, home.settings, home.budget, lead)


def read_all(home: KitAtHome, several: list[AskingPlan]) -> Iterator[tuple[AskingPlan, ShownRequest | None, str]]:
    """Read each plan. If a plan is unreadable, yield the reason and raise no error, so that the page can still show all
    other plans.
    """
    for asked in several:
        try:
            yield asked, ShownRequest.read(home, asked), ""
        except MedsiloError as error:
            yield asked, None, f"{error} {error.private}".strip()
