"""Define typed models of those files of a study that never leave the hospital."""

from typing import Literal

from pydantic import Field

from medsilo.runs.fields import Amount, Count, RecordPart, Seconds, Share, Text


class Spent(RecordPart):
    """The privacy cost ε of a study for a hospital's patients."""

    study: Amount | None  # ε of this study; None if ε has no bound
    all_studies: Amount | None
    delta: Share
    allowed: Amount | None  # allowed total ε of all studies
    entries: Count  # number of entries about this study in the privacy ledger


FAR_OFF = 0.1  # if the relative error of the disclosed weight exceeds this number, the hospital gets a warning


class Weighed(RecordPart):
    """The disclosed and the exact aggregation weight of a hospital's updates."""

    by: Text = Field(description="`algorithm.weighting` of the plan")
    patients: Count = Field(description="exact number of training patients")
    told_patients: Count = Field(description="disclosed number of training patients")
    cases: Count = Field(description="exact number of training cases")
    told_cases: Count = Field(description="disclosed number of training cases")
    weight: Count = Field(
        description="weight that the site's update has if the site trains on all its training cases, computed "
        "from exact counts"
    )
    told_weight: Count = Field(
        description="weight that the site's update has if the site trains on all its training cases, computed "
        "from disclosed counts"
    )

    @property
    def off(self) -> float:
        return abs(self.told_weight - self.weight) / self.weight if self.weight else 0.0

    @property
    def warning(self) -> str:
        """A warning for the hospital, or an empty string if the disclosed weight is nearly exact."""
        if self.off < FAR_OFF:
            return ""
        return (
            f"This hospital's updates count by a weight of {self.told_weight:,} {self._unit}, and {self.weight:,} is "
            f"exact: {self.off:.0%} off, because numbers leave rounded."
        )

    @property
    def _unit(self) -> str:
        return "" if self.by == "uniform" else self.by


Deed = Literal["starting", "training", "measuring", "validating", "testing", "sending", "refused"]


class SiteActivity(RecordPart):
    """A site's status.json, which describes the site's present work in a study."""

    task: Text = Field(description="task that the server requested")
    round: Count = Field(description="index of the round")
    at: Seconds = Field(description="time at which the file was written, in seconds since 1970")
    deed: Deed = Field(description="present work of the site")
    share: Share | None = Field(
        None, description="fraction of the training that is finished; `null` during work other than training"
    )
    memory: Seconds = Field(0.0, description="bytes of memory that the work on this answer has used so far")
    device: Text = Field("", description="training device of the site")


class LogEntry(RecordPart):
    """A line of a site's log.jsonl: about an answer that the site sent, or about why the site sent none."""

    at: Seconds = Field(description="time of the log line, in seconds since 1970")
    kind: Literal["began", "answered", "refused", "died", "ended"]
    task: Text = ""
    round: Count = 0
    bytes: Count = Field(0, description="bytes of the tensors that the site sent")
    seconds: Seconds = 0.0
    memory: Seconds = Field(0.0, description="bytes of memory that the work on the answer used")
    reason: Text = ""
    plan: Text = ""
    method: Text = ""
    rounds: Count = Field(0, description="number of rounds in the plan")
    lead: Text = ""
