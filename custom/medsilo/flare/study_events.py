"""What the processes of a study write into a kit's events.log; kit_events.py has what the kit's own process writes."""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from nvflare.apis.fl_context import FLContext

from medsilo.flare.workspace import kit_folder, kit_of, submitter_of
from medsilo.runs.events import RUNNING, Event, What, fates, write

QUIET = 600.0  # seconds: an error that a site reported is reported again only after so long without it
MOST_KINDS = 20  # of errors that one job may write down, so that a server which provokes them fills no log

EVIDENCE: tuple[What, ...] = ("refused", "failed", "resumed", "began")  # of who asked for what


class StudyEvents:
    """Writes how a study goes at this party. kit: none in a simulation, where nothing is written."""

    def __init__(self, kit: Path | None, job: str = "", study: str = "") -> None:
        self.kit, self.job, self.study = kit, job, study
        self.lead = self.plan = ""  # who submitted the job, and its plan's hash, where these are known
        self.out = set[str]()  # sites that the last round was without
        self.runs = False  # this site's last word was that it began
        self.wrong = dict[str, float]()  # what keeps this site from its answers, and when it did last

    @classmethod
    def of(cls, fl_ctx: FLContext, party: str) -> "StudyEvents":
        """Return what writes for the job of a process. party: client or server."""
        found = cls(kit_folder(fl_ctx) if kit_of(fl_ctx, party) else None, fl_ctx.get_job_id())
        found.lead = submitter_of(fl_ctx) or ""
        return found

    def tell(self, what: What, text: str, who: str = "", needs_somebody: bool = False) -> None:
        """Write one event; one that is evidence, with the plan's hash and its lead."""
        if what in EVIDENCE:
            asked = [f"{name} {value}" for name, value in (("plan", self.plan), ("of", self.lead)) if value]
            text = ": ".join(([" ".join(asked)] if asked else []) + [text])
        if self.kit:
            write(self.kit, Event(what, text, who, self.study, self.job, needs_somebody))

    def begin(self, text: str) -> None:
        """Write that a site begins with a job, or goes on with one; and that its process ended, if without a word."""
        before = fates(self.kit).get(self.job) if self.kit else None
        if before in RUNNING:
            self.tell("failed", "this site's process for the job was ended; another goes on")
        self.tell("resumed" if before else "began", text)
        self.runs = True

    def end(self, text: str) -> None:
        """Write once that this site's part in the job is over."""
        if self.runs:
            self.runs = False
            self.tell("ended", text)

    def on_answer(self, wrong: str = "", died: bool = False, passing: bool = False) -> None:
        """Write why this site can't answer, once until it can again for a while. wrong: why, where it could not.

        died, passing: the kind of error, told once whatever its text: a full disk fails at another file each time.
        """
        now = time.monotonic()
        if not wrong:
            self.wrong = {kind: then for kind, then in self.wrong.items() if now - then < QUIET}
            return
        kind = "died" if died else "passing" if passing else re.sub(r"\d+", "", wrong)  # numbers differ each time
        if kind not in self.wrong:
            if len(self.wrong) == MOST_KINDS:
                return
            self.tell("failed" if died else "refused", wrong, needs_somebody=True)
        self.wrong[kind] = now

    def on_round(self, number: int, absences: Mapping[str, str | None]) -> None:
        """Write which sites fell out of the study in a round, and which are back. absences: site → why, or None."""
        for site, reason in absences.items():
            if reason and site not in self.out:
                self.out.add(site)
                self.tell(
                    "refused" if reason.startswith("refused") else "away", f"round {number}: {reason}", site, True
                )
            elif site in self.out and not reason:
                self.out.remove(site)
                self.tell("back", f"round {number}", site)
