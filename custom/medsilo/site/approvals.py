"""A hospital's approvals: which plans may run here, under which settings, signed with the key of its kit.

One file holds all decisions and one signature over them: a change anywhere makes all of them void. Its name is that of
the key, so with another key a hospital starts again. Beside it lie the plans that asked.

What is not noticed: whoever may read the key can sign, and the file can be put back to an earlier state as a whole.
"""

import hashlib
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import read_bounded, write_text
from medsilo.core.package import in_words, name_that_differs
from medsilo.core.section import Section
from medsilo.core.text import counted, plain
from medsilo.site.accepted_settings import moment
from medsilo.site.kit import KitFiles
from medsilo.site.query_budget import LockedFolder, QueryBudget, data_set
from medsilo.site.settings import CANARY, SiteSettings
from medsilo.site.signed import read_own, write_signed
from medsilo.site.signing import UseKey, public_text

FOLDER_NAME, LOCK = "approvals", "approvals.lock"  # the folder is beside a hospital's book
ASKED, ANSWERED = "asked", "answered"
WAIT = 60.0  # seconds that another process may hold the lock
MOST_DECISIONS, MOST_SITES, MOST_ROUNDS, MOST_PACKAGES = 10_000, 1000, 100_000, 100
LARGEST = 8 << 20  # bytes of a plan that asked
MOST_ASKED = 50  # plans without a decision that are kept, the last ones
LATEST = 253_402_300_799  # the end of the year 9999
MADE_ANEW = "decide again once somebody has found out why, and moved that file away"

PlanHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=200)]
When = Annotated[int, Field(ge=0, le=LATEST)]  # seconds since 1970
PlanCode = Mapping[str, Mapping[str, str]]  # version and hash of each package whose code a plan runs
NOTHING: PlanCode = {}
DecisionKind = Literal["approved", "declined", "withdrawn"]


class ApprovalLimits(Section):
    """The limits of an approval. A limit that is not given does not hold."""

    expires: When | None = None
    rounds: int | None = Field(None, ge=1, le=MOST_ROUNDS)  # rounds that are answered, of all studies of the plan
    sites: tuple[Text, ...] = Field((), max_length=MOST_SITES)  # nobody else may take part

    @classmethod
    def lasting(cls, hours: int | None, rounds: int | None, sites: str) -> Self:
        """Return limits that begin now; raises MedsiloError. sites: their names, with commas between them."""
        expires = None if hours is None else int(time.time()) + 3600 * hours
        names = sorted({name.strip() for name in sites.split(",")} - {""})
        return cls.from_values({"expires": expires, "rounds": rounds, "sites": names}, "the limits of the approval")

    def words(self) -> list[str]:
        """Return each limit in words."""
        return [
            *([f"until {moment(self.expires)}"] if self.expires is not None else []),
            *([f"at most {counted(self.rounds, 'round')}"] if self.rounds is not None else []),
            *([f"with no other sites than {', '.join(self.sites)}"] if self.sites else []),
        ]


class ApprovedPackage(Section):
    """A package whose code a plan runs, as it was installed at the decision."""

    version: Text
    hash: Text  # of its files


class Decision(Section):
    """A hospital's decision about a plan."""

    plan: PlanHash
    verdict: DecisionKind
    at: When
    by: Text
    limits: ApprovalLimits = ApprovalLimits()
    packages: dict[Text, ApprovedPackage] = Field({}, max_length=MOST_PACKAGES)  # of an approval: those that run it
    data: Text = ""  # what stands for the hospital's data set

    def objection(
        self,
        plan: str,
        named: Collection[str],
        sites: Collection[str],
        number: int,
        code: PlanCode,
        data: str,
        now: float,
    ) -> str:
        """Return why the plan may not go on here, as the rest of "this hospital ..."; nothing where it may.

        plan: what the sentence calls it; named: the plan's own sites; sites: those that the server tells, which may be
        fewer; number: the round's; code: the plan's packages as they are installed; data: the data set.
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
        return f"approved {plan} for other data than it has now" if self.data != data else ""


class AskingPlan(Section):
    """A plan that asked to run here."""

    plan: dict[str, Any]  # whoever reads it checks that it has this hash
    hash: PlanHash
    study: Text = ""
    lead: Text = ""
    sites: tuple[Text, ...] = Field((), max_length=MOST_SITES)
    at: When

    @property
    def is_canary(self) -> bool:
        """Return whether it calls itself a canary."""
        return any(layer.get("name") == CANARY for layer in self.plan.get("layers") or [])


class _RoundsRecord(Section):
    """The rounds that were answered under one approval, each by what it was asked."""

    since: When
    rounds: tuple[Annotated[str, Field(max_length=64)], ...] = Field((), max_length=MOST_ROUNDS)


class _Register(Section):
    """The content that is signed."""

    decisions: tuple[Decision, ...] = Field((), max_length=MOST_DECISIONS)


class Approvals:
    """A site's decisions, and the plans that asked for one."""

    def __init__(self, book: Path, key: UseKey, data: str = "") -> None:
        """book: the folder of what the hospital remembers; data: what stands for its data set."""
        self.folder, self.data, self._key = book / FOLDER_NAME, data, key
        public = bytes.fromhex(public_text(key))
        self.file = self.folder / f"{hashlib.sha256(public).hexdigest()[:16]}.json"
        self._folder = LockedFolder(self.folder, LOCK, WAIT, "this hospital's approvals", "nothing is decided")

    # ------------------------------------------------------------------ decisions
    def decisions(self) -> tuple[Decision, ...]:
        """Return all decisions in their order; raises Refused where the file is not as this key signed it."""
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
        """Return what was last decided about a plan."""
        return next((one for one in reversed(self.decisions()) if one.plan == plan), None)

    def decide(
        self,
        plan: str,
        verdict: DecisionKind,
        by: str,
        limits: ApprovalLimits | None = None,
        code: PlanCode = NOTHING,
    ) -> Decision:
        """Sign a decision, and return when it is on the disk; raises MedsiloError. code: of an approval, the packages
        that may run the plan."""
        decision = Decision(
            plan=plan,
            verdict=verdict,
            at=int(time.time()),
            by=plain(by, 200),
            limits=limits or ApprovalLimits(),
            packages={name: ApprovedPackage(**facts) for name, facts in code.items()},
            data=self.data,
        )
        with self._folder.alone():
            before = self.decisions()
            stands = next((one.verdict for one in reversed(before) if one.plan == plan), None)
            if verdict == "withdrawn" and stands != "approved":
                raise MedsiloError(f"plan {plan[:12]} is not approved here, so there is nothing to withdraw")
            if len(before) >= MOST_DECISIONS:
                raise MedsiloError(f"there are {MOST_DECISIONS} decisions, as many as are kept; {MADE_ANEW}")
            write_signed(self.file, _Register(decisions=(*before, decision)), self._key)
        return decision

    def count(self, decision: Decision, asked: str) -> None:
        """Enter a round that is about to be answered; raises Refused beyond the limit of the approval.

        asked: what stands for the request: the same one costs nothing more.
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
            rounds = so_far.rounds if so_far.since == decision.at else ()
            if asked in rounds:
                return
            if len(rounds) >= most:
                raise Refused(f"this hospital answered all {most} rounds that it approved of plan {decision.plan}")
            write_text(file, _RoundsRecord(since=decision.at, rounds=(*rounds, asked)).model_dump_json())

    # ------------------------------------------------------------------ plans that asked
    def keep(self, asked: AskingPlan) -> None:
        """Keep a plan that asks, so that somebody can read it and decide; of those without a decision the last ones."""
        folder = self.folder / ASKED
        with self._folder.alone():
            write_signed(folder / f"{asked.hash}.json", asked, self._key)
            decided = {one.plan for one in self.decisions()}
            others = [path for path in folder.glob("*.json") if path.stem not in decided | {asked.hash}]
            for old in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: -MOST_ASKED + 1 or None]:
                old.unlink(missing_ok=True)

    def asked(self, beginning: str = "") -> list[AskingPlan]:
        """Return the plans that asked whose hash begins so, the last one first; a file that this key did not sign so is
        left out."""
        found = []
        for path in (self.folder / ASKED).glob("*.json"):
            with suppress(MedsiloError):
                found.append(read_own(path, AskingPlan, self._key))
        return sorted((one for one in found if one.hash.startswith(beginning)), key=lambda one: (-one.at, one.hash))


def study_in_words(study: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lead's own words about a study: title, purpose and contact. study: that section of a plan."""
    said = ((name, plain(study.get(name) or "")) for name in ("title", "purpose", "contact"))
    return [(name, words or f"not stated (study.{name} in the plan)") for name, words in said]


def approvals_of(book: QueryBudget, kit: KitFiles, settings: SiteSettings) -> Approvals:
    """Return a site's approvals, which it signs with a key of its kit."""
    return Approvals(book.folder, kit.key_for("approvals"), data_set(settings.data, "") if settings.data else "")
