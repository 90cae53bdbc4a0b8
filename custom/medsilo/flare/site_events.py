"""What a site writes of a study into its kit's events.log."""

import re
import time
from pathlib import Path

from medsilo.flare.study_events import StudyEvents
from medsilo.runs.event_reading import RUNNING, fates

QUIET = 600.0  # seconds: an error that a site reported is reported again only after so long without it
MOST_KINDS = 20  # of errors that one job may write down, so that a server which provokes them fills no log


class SiteEvents(StudyEvents):
    """Writes how a study goes at this site."""

    def __init__(self, kit: Path | None, job: str = "", study: str = "") -> None:
        super().__init__(kit, job, study)
        self.runs = False  # this site's last word was that it began
        self.wrong = dict[str, float]()  # what keeps this site from its answers, and when it did last

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
