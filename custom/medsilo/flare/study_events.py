"""Log events of a study's processes in a startup kit's events.log; kit_events.py logs events of the kit's own
process."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from nvflare.apis.fl_context import FLContext

from medsilo.flare.workspace import kit_folder, kit_of, submitter_of
from medsilo.runs.events import Event, What, write

EVIDENCE: tuple[What, ...] = ("refused", "failed", "resumed", "began")  # events that name the plan and the lead
HOUR, OFTEN = 3600.0, 5  # at most 5 events per hour about one site's repeated requests


class StudyEvents:
    """Logs a study's progress at this party as events of its startup kit. kit: None in a simulation, which logs no
    events."""

    def __init__(self, kit: Path | None, job: str = "", study: str = "") -> None:
        self.kit, self.job, self.study = kit, job, study
        self.lead = self.plan = ""  # the job's submitter and the plan's hash, if known
        self.out = set[str]()  # sites absent in the last round
        self.again = set[str]()  # sites with a logged repeated request
        self.told: dict[str, list[float]] = {}  # times of logged repeated requests, by site

    @classmethod
    def of(cls, fl_ctx: FLContext, party: str) -> Self:
        """Return the event log of this process's job. party: client or server."""
        found = cls(kit_folder(fl_ctx) if kit_of(fl_ctx, party) else None, fl_ctx.get_job_id())
        found.lead = submitter_of(fl_ctx) or ""
        return found

    def tell(self, what: What, text: str, who: str = "", needs_somebody: bool = False) -> None:
        """Log an event; an event about a request also names the plan's hash and the lead."""
        if what in EVIDENCE:
            asked = [f"{name} {value}" for name, value in (("plan", self.plan), ("of", self.lead)) if value]
            text = ": ".join(([" ".join(asked)] if asked else []) + [text])
        if self.kit:
            by = who or self.lead or "the server"
            write(self.kit, Event(what, text, who, self.study, self.job, needs_somebody, by))

    def on_round(self, number: int, absences: Mapping[str, str | None]) -> None:
        """Log which sites dropped out of the study in a round, and which are back.

        absences: each site's reason of absence, or None.
        """
        for site, reason in absences.items():
            if reason and site not in self.out:
                self.out.add(site)
                self.tell(
                    "refused" if reason.startswith("refused") else "away", f"round {number}: {reason}", site, True
                )
            elif site in self.out and not reason:
                self.out.remove(site)
                self.tell("back", f"round {number}", site)

    def on_asking(self, again: Mapping[str, str]) -> None:
        """Log which sites rejected a request that is repeated, and which have answered since.

        again: the reason of each rejection, by site.
        """
        now = time.monotonic()
        for site in sorted(again.keys() - self.again):
            lately = [at for at in self.told.get(site, []) if now - at < HOUR]
            if self.kit and len(lately) < OFTEN:
                self.told[site] = [*lately, now]
                self.again.add(site)
                text = f"{again[site]}; it is asked again"
                write(self.kit, Event("refused", text, site, self.study, self.job, needs_somebody=True))
        for site in sorted(self.again - again.keys()):
            self.again.remove(site)
            if site not in self.out:
                self.tell("back", "it answers again", site)
