"""Define models of the study files that never leave a hospital."""

from typing import Literal

from pydantic import Field

from medsilo.runs.fields import Amount, Count, RecordPart, Seconds, Share, Text


class Spent(RecordPart):
    """The privacy cost ε of a study for a hospital's patients."""

    study: Amount | None  # ε of this study; None if ε has no bound
    all_studies: Amount | None
    delta: Share
    allowed: Amount | None  # the hospital's limit on the ε of all studies together
    entries: Count  # number of entries about this study in the privacy ledger


FAR_OFF = 0.1  # the hospital is warned if the relative error of the disclosed weight reaches this


class Weighed(RecordPart):
    """The weight of a hospital's updates in the aggregation, as disclosed and exact."""

    by: Text = Field(description="`algorithm.weighting` of the plan")
    patients: Count = Field(description="exact number of training patients")
    told_patients: Count = Field(description="disclosed number of training patients")
    cases: Count = Field(description="exact number of training cases")
    told_cases: Count = Field(description="disclosed number of training cases")
    weight: Count = Field(description="weight of an update from all training cases, by exact counts")
    told_weight: Count = Field(description="weight of an update from all training cases, by disclosed counts")

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
    """A site's status.json: the site's current work in a study."""

    task: Text = Field(description="task that the server requested")
    round: Count = Field(description="index of the round")
    at: Seconds = Field(description="time at which the file was written, in seconds since 1970")
    deed: Deed = Field(description="the site's current work")
    share: Share | None = Field(None, description="finished fraction of the training; `null` during other work")
    memory: Seconds = Field(0.0, description="bytes of memory used so far for this answer")
    device: Text = Field("", description="training device of the site")


class LogEntry(RecordPart):
    """A line of a site's log.jsonl, about an answer of the site or the reason why there was no answer."""

    at: Seconds = Field(description="time of the log line, in seconds since 1970")
    kind: Literal["began", "answered", "refused", "died", "ended"]
    task: Text = ""
    round: Count = 0
    bytes: Count = Field(0, description="bytes of the tensors that the site sent")
    seconds: Seconds = 0.0
    memory: Seconds = Field(0.0, description="bytes of memory used for this answer")
    reason: Text = ""
    plan: Text = ""
    method: Text = ""
    rounds: Count = Field(0, description="number of rounds in the plan")
    lead: Text = ""
