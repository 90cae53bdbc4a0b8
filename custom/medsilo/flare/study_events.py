"""Write events about a study to the events.log of a startup kit. kit_events.py writes events of the kit's process."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from nvflare.apis.fl_context import FLContext

from medsilo.flare.workspace import kit_folder, kit_of, submitter_of
from medsilo.runs.events import Event, What, write

EVIDENCE: tuple[What, ...] = ("refused", "failed", "resumed", "began")  # kinds of events that name the plan and lead
HOUR, OFTEN = 3600.0, 5  # for each site, at most OFTEN events about repeated requests are written in an hour


class StudyEvents:
    """Writes events about a study at this party to the events.log of the party's startup kit.

    Args:
        kit: The kit's folder. None: a simulation, which writes no events.
    """

    def __init__(self, kit: Path | None, job: str = "", study: str = "") -> None:
        self.kit, self.job, self.study = kit, job, study
        self.lead = self.plan = ""  # the name of the job's submitter, and the plan's hash; empty until known
        self.out = set[str]()  # the sites that were absent in the last round
        # the sites with an event about a repeated request, but without a later event about the answer
        self.again = set[str]()
        self.told: dict[str, list[float]] = {}  # for each site, the times of the events about repeated requests

    @classmethod
    def of(cls, fl_ctx: FLContext, party: str) -> Self:
        """Return the object that writes events about the job of this process.

        Args:
            party: "client" or "server".
        """
        found = cls(kit_folder(fl_ctx) if kit_of(fl_ctx, party) else None, fl_ctx.get_job_id())
        found.lead = submitter_of(fl_ctx) or ""
        return found

    def tell(self, kind: What, text: str, who: str = "", needs_somebody: bool = False) -> None:
        """Write an event. Events of the kinds in EVIDENCE also name the plan's hash and the lead."""
        if kind in EVIDENCE:
            asked = [f"{name} {value}" for name, value in (("plan", self.plan), ("of", self.lead)) if value]
            text = ": ".join(([" ".join(asked)] if asked else []) + [text])
        if self.kit:
            by = who or self.lead or "the server"
            write(self.kit, Event(kind, text, who, self.study, self.job, needs_somebody, by))

    def on_round(self, number: int, absences: Mapping[str, str | None]) -> None:
        """Write an event for each site that has become absent in a round, and for each site that has returned.

        Args:
            absences: For each site, the reason why it was absent, or None if it took part.
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
        """If a site rejected a request, so that the server repeats the request, write an event for the site.

        When the site has answered the repeated request, write another event for the site.
        """
        now = time.monotonic()
        for site in sorted(again.keys() - self.again):
            lately = [at for at in self.told.get(site, []) if now - at < HOUR]
            if self.kit and len(lately) < OFTEN:
                self.told[site] = [*lately, now]
                self.again.add(site)
                text = f"{again[site]}; the server asks it again by itself"
                write(self.kit, Event("refused", text, site, self.study, self.job, needs_somebody=True))
        for site in sorted(self.again - again.keys()):
            self.again.remove(site)
            if site not in self.out:
                self.tell("back", "it answers again", site)
