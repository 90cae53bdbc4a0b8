"""The files that only a hospital's own folder of a study has, as typed models."""

from typing import Literal

from pydantic import Field

from medsilo.runs.fields import Amount, Count, RecordPart, Seconds, Share, Text


class Spent(RecordPart):
    """The privacy that a study cost a hospital's patients, in the hospital's own folder."""

    study: Amount | None  # ε by itself; None: no bound holds
    all_studies: Amount | None
    delta: Share
    allowed: Amount | None  # for all studies
    entries: Count  # of the ledger that name the study


Deed = Literal["starting", "training", "measuring", "validating", "testing", "sending", "refused"]


class SiteActivity(RecordPart):
    """status.json of a site: the work that it does at the moment, in the site's own folder."""

    task: Text = Field(description="what it was asked for")
    round: Count = Field(description="the round")
    at: Seconds = Field(description="when this was written, in seconds since 1970")
    deed: Deed = Field(description="the kind of work")
    share: Share | None = Field(None, description="how much of its training is done; `null` in other work")
    memory: Seconds = Field(0.0, description="bytes of memory that this answer has taken so far")
    device: Text = Field("", description="what it trains on")


class LogEntry(RecordPart):
    """A line of log.jsonl of a site: what left, or why nothing did, in the site's own folder."""

    at: Seconds = Field(description="when, in seconds since 1970")
    kind: Literal["began", "answered", "refused", "died", "ended"]
    task: Text = ""
    round: Count = 0
    bytes: Count = Field(0, description="of the tensors that left")
    seconds: Seconds = 0.0
    memory: Seconds = Field(0.0, description="bytes that the answer took")
    reason: Text = ""
    plan: Text = ""
    method: Text = ""
    rounds: Count = Field(0, description="of the plan")
    lead: Text = ""
