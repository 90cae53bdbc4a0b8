"""What the processes of a study write into a kit's events.log; kit_events.py has what the kit's own process writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from nvflare.apis.fl_context import FLContext

from medsilo.flare.workspace import kit_folder, kit_of, submitter_of
from medsilo.runs.events import Event, What, write

EVIDENCE: tuple[What, ...] = ("refused", "failed", "resumed", "began")  # of who asked for what


class StudyEvents:
    """Writes how a study goes at this party. kit: none in a simulation, where nothing is written."""

    def __init__(self, kit: Path | None, job: str = "", study: str = "") -> None:
        self.kit, self.job, self.study = kit, job, study
        self.lead = self.plan = ""  # who submitted the job, and its plan's hash, where these are known
        self.out = set[str]()  # sites that the last round was without

    @classmethod
    def of(cls, fl_ctx: FLContext, party: str) -> Self:
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
