"""A hospital's approvals of plans, signed with a key of its startup kit.

One signed file contains all decisions, so any change to the file invalidates all decisions. The name of the file of
approvals depends on the kit's key, so a hospital with a new key has no approvals. If the kit was renewed, the new key
signs the approvals that the old key had signed. The folder of approvals also contains waiting plans and the code of
jobs, each in a file whose name is a hash. The signature of approvals does not protect against somebody who can read the
key. If somebody replaces the file of approvals by an earlier version, medsilo does not notice the replacement.
"""

import hashlib
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from operator import not_
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import read_bounded, write_text
from medsilo.core.package import in_words, name_that_differs
from medsilo.core.section import Section
from medsilo.core.text import counted, plain
from medsilo.site.accepted_settings import moment
from medsilo.site.job_code import CodeFacts, JobCode, drop_code
from medsilo.site.kit import KitFiles
from medsilo.site.query_budget import LockedFolder, QueryBudget, data_set
from medsilo.site.settings import CANARY, SiteSettings
from medsilo.site.signed import read_own, write_signed
from medsilo.site.signing import UseKey, public_text

# name of a subfolder of the query budget's folder, and name of the lock file in this subfolder
FOLDER_NAME, LOCK = "approvals", "approvals.lock"
ASKED, ANSWERED, CODE = "asked", "answered", "code"
WAIT = 60.0  # seconds to wait for another process's lock
MOST_DECISIONS, MOST_SITES, MOST_ROUNDS, MOST_PACKAGES = 10_000, 1000, 100_000, 100
LARGEST = 8 << 20  # limit on the bytes of a plan that waits for approval
# limit on the number of stored plans that wait for approval; beyond this number, the oldest plans are deleted
MOST_ASKED = 50
MOST_KEPT = 50  # limit on the number of approvals whose code is stored; beyond this number, the oldest code is deleted
LATEST = 253_402_300_799  # the end of the year 9999, in seconds since 1970
MADE_ANEW = "decide again once somebody has found out why, and moved that file away"

Asked = Annotated[str, Field(max_length=64)]
PlanHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=200)]
When = Annotated[int, Field(ge=0, le=LATEST)]  # seconds since 1970
PlanCode = Mapping[str, Mapping[str, str]]  # version and hash of each package whose code a plan uses
NOTHING: PlanCode = {}
CountedTask = Literal["round", "deliver", "test"]
DecisionKind = Literal["approved", "declined", "withdrawn"]


class ApprovalLimits(Section):
    """The limits of an approval on time, rounds and sites. Without a limit on time, rounds or sites, the approval is
    unlimited in that respect.
    """

    expires: When | None = None
    # limit on the number of answered rounds, in all studies with this plan together
    rounds: int | None = Field(None, ge=1, le=MOST_ROUNDS)
    # the sites that may take part; if empty, any site may take part
    sites: tuple[Text, ...] = Field((), max_length=MOST_SITES)

    @classmethod
    def lasting(cls, hours: int | None, rounds: int | None, sites: str) -> Self:
        """Return the limits of an approval that begins now; raise MedsiloError if a limit is invalid.

        Args:
            hours: hours from now until the approval expires
            sites: names, separated by commas
        """
        expires = None if hours is None else int(time.time()) + 3600 * hours
        names = sorted({name.strip() for name in sites.split(",")} - {""})
        return cls.from_values({"expires": expires, "rounds": rounds, "sites": names}, "the limits of the approval")

    def words(self) -> list[str]:
        return [
            *([f"until {moment(self.expires)}"] if self.expires is not None else []),
            *([f"at most {counted(self.rounds, 'round')}"] if self.rounds is not None else []),
            *([f"with no other sites than {', '.join(self.sites)}"] if self.sites else []),
        ]


class ApprovedPackage(Section):
    version: Text
    hash: Text


class Decision(Section):
    plan: PlanHash
    verdict: DecisionKind
    at: When
    by: Text
    limits: ApprovalLimits = ApprovalLimits()
    packages: dict[Text, ApprovedPackage] = Field({}, max_length=MOST_PACKAGES)
    data: Text = ""
    # the code in the job of an approved plan, if the job has code
    job_code: CodeFacts | None = Field(None, exclude_if=not_)

    def objection(
        self,
        plan: str,
        named: Collection[str],
        sites: Collection[str],
        number: int,
        code: PlanCode,
        data: str,
        now: float,
        job_code: CodeFacts | None = None,
    ) -> str:
        """Return the reason why the plan must not run. The reason is worded as the end of the sentence "this hospital
        ...". If the plan may run, the returned reason is empty.

        Args:
            plan: the plan's name in the reason
            named: the sites that the plan names
            sites: the sites that the server names, which may be fewer
            code: the plan's packages as installed now
            job_code: the code in the job, with its packages as installed now
        """
        own = self.limits
        if self.verdict != "approved":
            return f"has {'declined' if self.verdict == 'declined' else 'withdrawn its approval of'} {plan}"
        if own.expires is not None and now >= own.expires:
            return f"approved {plan} until {moment(own.expires)}, and no longer"
        if own.rounds is not None and number > own.rounds:
            return f"approved at most {counted(own.rounds, 'round')} of {plan}"
        if own.sites and not named:
            return f"approved {plan} for named sites only, and the plan names none"
        if own.sites and (others := sorted({*named, *sites} - set(own.sites))):
            return f"approved {plan} only for studies without {plain(', '.join(others), 200)}, and this one has them"
        approved = {name: package.model_dump() for name, package in self.packages.items()}
        if (name := name_that_differs({name: approved.get(name) for name in code}, code)) is not None:
            before, now_is = (in_words(packages.get(name)) for packages in (approved, code))
            return f"approved {plan} with {name} {before}, and runs {now_is} now"
        if objection := _code_objection(plan, self.job_code, job_code):
            return objection
        return f"approved {plan} for other data than it has now" if self.data != data else ""


def _code_objection(plan: str, approved: CodeFacts | None, now: CodeFacts | None) -> str:
    """If the job's code differs from the approved code, return an objection; otherwise, return an empty string."""
    if approved is None or now is None:
        told = "without code, and this job brings code" if now else "with code, and this job brings none"
        return "" if approved is now else f"approved {plan} {told}"
    if approved.hash != now.hash:
        return f"approved {plan} with other code ({approved.hash[:12]}) than this job brings ({now.hash[:12]})"
    if (name := name_that_differs(approved.versions, now.versions)) is not None:
        before, now_is = (plain(own.versions.get(name, "no such package"), 60) for own in (approved, now))
        return f"approved {plan} for its code with {plain(name, 60)} {before}, and here is {now_is} now"
    return ""


class AskingPlan(Section):
    """A plan that waits for this hospital's approval, or about which the hospital has decided."""

    plan: dict[str, Any]  # the plan's values; the code that reads the values must check the plan's hash
    hash: PlanHash
    study: Text = ""
    lead: Text = ""
    sites: tuple[Text, ...] = Field((), max_length=MOST_SITES)
    at: When
    job_code: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = Field("", exclude_if=not_)  # hash of the job's code

    def waits(self, last: Decision | None) -> bool:
        if last is None:
            return True
        approved = last.job_code.hash if last.job_code else ""
        return last.verdict == "approved" and self.job_code != approved and self.at >= last.at

    @property
    def is_canary(self) -> bool:
        return any(layer.get("name") == CANARY for layer in self.plan.get("layers") or [])


class _RoundsRecord(Section):
    since: When
    rounds: tuple[Asked, ...] = Field((), max_length=MOST_ROUNDS)
    # The requests at the end of a study: to deliver a model, and to test a model
    deliver: tuple[Asked, ...] = Field((), max_length=MOST_ROUNDS)
    test: tuple[Asked, ...] = Field((), max_length=MOST_ROUNDS)


class _Register(Section):
    """All decisions of a hospital, which are signed together."""

    decisions: tuple[Decision, ...] = Field((), max_length=MOST_DECISIONS)


class Approvals:
    def __init__(self, folder_of_budget: Path, key: UseKey, data: str = "") -> None:
        """Prepare the approvals of a hospital.

        Args:
            folder_of_budget: folder of the hospital's query budget
        """
        self.folder, self.data, self._key = folder_of_budget / FOLDER_NAME, data, key
        public = bytes.fromhex(public_text(key))
        self.file = self.folder / f"{hashlib.sha256(public).hexdigest()[:16]}.json"
        self._folder = LockedFolder(self.folder, LOCK, WAIT, "this hospital's approvals", "nothing is decided")

    # ------------------------------------------------------------------ decisions
    def decisions(self) -> tuple[Decision, ...]:
        """Return all decisions, the earliest first; raise Refused if the file of decisions was not signed with this
        key.
        """
        if not self.file.exists():
            return ()
        try:
            return read_own(self.file, _Register, self._key).decisions
        except MedsiloError as error:
            raise Refused(
                f"this hospital's approvals are damaged or not signed by its key, so none counts; {MADE_ANEW}",
                private=f"{self.file}: {error}",
            ) from error

    def last(self, plan: str) -> Decision | None:
        return next((one for one in reversed(self.decisions()) if one.plan == plan), None)

    def decide(
        self,
        plan: str,
        verdict: DecisionKind,
        by: str,
        limits: ApprovalLimits | None = None,
        code: PlanCode = NOTHING,
        job_code: JobCode | None = None,
    ) -> Decision:
        """Sign a decision and write it to disk; raise MedsiloError if the decision withdraws an approval that does not
        exist.

        Args:
            code: for an approval, the packages that the plan may use
        """
        decision = Decision(
            plan=plan,
            verdict=verdict,
            at=int(time.time()),
            by=plain(by, 200),
            limits=limits or ApprovalLimits(),
            packages={name: ApprovedPackage(**facts) for name, facts in code.items()},
            data=self.data,
            job_code=job_code.facts() if job_code else None,
        )
        with self._folder.alone():
            if job_code:
                job_code.keep(self.folder / CODE)
            before = self.decisions()
            stands = next((one.verdict for one in reversed(before) if one.plan == plan), None)
            if verdict == "withdrawn" and stands != "approved":
                raise MedsiloError(f"plan {plan[:12]} is not approved here, so there is nothing to withdraw")
            if len(before) >= MOST_DECISIONS:
                raise MedsiloError(f"there are {MOST_DECISIONS} decisions, which is the limit; {MADE_ANEW}")
            write_signed(self.file, _Register(decisions=(*before, decision)), self._key)
        return decision

    def take_over(self, before: "Approvals") -> None:
        """After a kit's renewal, use the new key to sign all decisions and plans that the old key signed. The files
        with the old signatures remain.
        """
        with self._folder.alone():
            if self.file.exists() or not (decisions := before.decisions()):
                return
            for asked in before.asked():
                write_signed(self.folder / ASKED / f"{asked.hash}.json", asked, self._key)
            write_signed(self.file, _Register(decisions=decisions), self._key)

    def count(self, decision: Decision, asked: str, task: CountedTask = "round", each: int = 1) -> None:
        """Count a request before it is answered, or raise Refused if the approval's limit on rounds is reached.

        Args:
            asked: the request's digest, because a repeated request counts only once
            each: the number of rounds in a study, because each study is delivered and tested only once
        """
        most = decision.limits.rounds
        if most is None:
            return
        file = self.folder / ANSWERED / f"{decision.plan}.json"
        with self._folder.alone():
            so_far = _RoundsRecord(since=decision.at)
            try:
                if file.exists():
                    so_far = _RoundsRecord.model_validate_json(read_bounded(file, LARGEST))
            except (OSError, ValueError) as error:
                told = f"this hospital's count of answered rounds is damaged, so nothing is answered; {MADE_ANEW}"
                raise Refused(told, private=f"{file}: {error}") from error
            if so_far.since != decision.at:
                so_far = _RoundsRecord(since=decision.at)
            key = "rounds" if task == "round" else task
            before: tuple[str, ...] = getattr(so_far, key)
            if asked in before:
                return
            if task == "round" and len(before) >= most:
                raise Refused(f"this hospital answered all {most} rounds that it approved of plan {decision.plan}")
            if task != "round" and len(before) >= max(most // each, 1):
                raise Refused(
                    f"this hospital approved {counted(most, 'round')} of plan {decision.plan}, and answered "
                    f"'{task}' for all studies that so many rounds allow"
                )
            write_text(file, so_far.model_copy(update={key: (*before, asked)}).model_dump_json(exclude_defaults=True))

    # ----------------------------------------------------------------- plans that wait for approval
    def keep(self, pending: AskingPlan, job_code: JobCode | None = None) -> None:
        """Store a plan that waits for approval, so that a person can review the plan. Among the plans without a
        decision, only the latest plans are stored.
        """
        folder = self.folder / ASKED
        with self._folder.alone():
            if job_code:
                job_code.keep(self.folder / CODE)
            write_signed(folder / f"{pending.hash}.json", pending, self._key)
            decisions = self.decisions()
            decided = {decision.plan for decision in decisions}
            others = [path for path in folder.glob("*.json") if path.stem not in decided | {pending.hash}]
            for old in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: -MOST_ASKED + 1 or None]:
                old.unlink(missing_ok=True)
            if job_code:
                approved = [one.job_code.hash for one in decisions if one.job_code]
                drop_code(self.folder / CODE, {*approved[-MOST_KEPT:], *(one.job_code for one in self.asked())})

    def asked(self, beginning: str = "") -> list[AskingPlan]:
        """Return the stored plans whose hash begins with the given text, the latest plan first. Plans with an invalid
        signature are left out.
        """
        found = []
        for path in (self.folder / ASKED).glob("*.json"):
            with suppress(MedsiloError):
                found.append(read_own(path, AskingPlan, self._key))
        return sorted((one for one in found if one.hash.startswith(beginning)), key=lambda one: (-one.at, one.hash))

    # ------------------------------------------------------------------ code of jobs
    def code_of(self, pending: AskingPlan) -> JobCode | None:
        """Return the code of a plan's job, or None if the job has no code. Raises MedsiloError if the stored code is
        missing.
        """
        return JobCode.kept(self.folder / CODE, pending.job_code) if pending.job_code else None

    def code_approved(self, pending: AskingPlan, title: str = "") -> tuple[Decision, JobCode] | None:
        """Return the approved code to compare a plan's code with, and the decision that approved it.

        The first choice is approved code of the same plan, the second is code of the same lead or title, the third is
        any code. The method returns None if no approved code is stored.
        """
        plans = {one.hash: one for one in self.asked()}

        def nearness(decision: Decision) -> int:
            kept = plans.get(decision.plan)
            same_lead = kept is not None and bool(pending.lead) and kept.lead == pending.lead
            same_study = kept is not None and bool(title) and (kept.plan.get("study") or {}).get("title") == title
            return 2 if decision.plan == pending.hash else 1 if same_lead or same_study else 0

        approved = [one for one in reversed(self.decisions()) if one.verdict == "approved" and one.job_code]
        for decision in sorted(approved, key=nearness, reverse=True):
            with suppress(MedsiloError):
                assert decision.job_code
                return decision, JobCode.kept(self.folder / CODE, decision.job_code.hash)
        return None


def study_in_words(study: Mapping[str, Any]) -> list[tuple[str, str]]:
    said = ((name, plain(study.get(name) or "")) for name in ("title", "purpose", "contact"))
    return [(name, words or f"not stated (study.{name} in the plan)") for name, words in said]


def approvals_of(budget: QueryBudget, kit: KitFiles, settings: SiteSettings) -> Approvals:
    """Return a hospital's approvals, which are signed with a key of the hospital's kit."""
    found = Approvals(budget.folder, kit.key_for("approvals"), data_set(settings.data, "") if settings.data else "")
    if not found.file.exists() and (before := kit.earlier_key_for("approvals")):
        found.take_over(Approvals(budget.folder, before))
    return found
