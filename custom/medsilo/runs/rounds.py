"""Define typed models of a study's rounds (rounds.jsonl) and of the state of a running study."""

from typing import Annotated

from pydantic import Field

from medsilo.runs.fields import Amount, Count, Metric, Number, RecordPart, Seconds, Share, Text
from medsilo.runs.score import Score

Cosine = Annotated[float, Field(strict=True, ge=-1, le=1)]


class SentUpdate(RecordPart):
    """The size and direction of a site's update in one tensor group."""

    norm: Amount = Field(description="L2 distance between the trained weights and the weights that the site received")
    cosine: Cosine | None = Field(
        None,
        description="cosine between the site's update and the mean of the other sites' updates, each scaled to length "
        "1. The cosine is exact to about 0.02. `null` if no weight changed, or if no other site answered",
    )
    agreement: Cosine | None = Field(
        None,
        description="mean cosine between the updates of two other sites, over all pairs; `null` if fewer than two "
        "other sites answered",
    )


class SiteRound(RecordPart):
    train_loss: Number | None = Field(None, description="mean loss over the round's training batches")
    validation: Metric | None = Field(
        None,
        description="validation score of the model that the site received in this round, before training; "
        "`null` if the site does not disclose the score",
    )
    step: Amount = Field(0.0, description="step to which the site rounds `validation`; 0: no rounding")
    validated: Count | None = Field(
        None, description="number of validation cases; `null` if the site does not disclose this number"
    )
    validation_loss: Number | None = Field(None, description="validation loss of the received model")
    samples: Count | None = Field(
        None, description="number of training cases. If the plan weights updates by cases, this is the site's weight"
    )
    seconds: Seconds = Field(0.0, description="seconds that the site worked")
    memory: Count | None = Field(None, description="peak memory of the site's process in bytes")
    bytes_up: Count = Field(0, description="bytes of the tensors that the site sent")
    bytes_down: Count = Field(0, description="bytes of the tensors that the site received")
    updates: dict[str, SentUpdate] = Field(
        {}, description="group of tensors → `norm` and `cosine` of the site's update, see below"
    )
    share: Share | None = Field(
        None,
        description="the site's weight in the round's mean; `null` if the site has no single weight, as in a median",
    )

    @property
    def score(self) -> Score:
        """The validation score, either exact or as a range."""
        return Score.told(self.validation, self.validated, self.step)


class Round(RecordPart):
    """A line of rounds.jsonl about one round: the sites that answered, and, for each missing site, the reason."""

    round: Count = Field(description="index of the round, counted from 1 over all phases")
    phase: Text | None = Field(None, description="the phase that the round belongs to")
    seconds: Seconds | None = Field(
        None, description="seconds from the server's first request of the round to the end of aggregation"
    )
    asked: list[str] = Field([], description="the sites from which the server requested an answer")
    answered: list[str] = Field([], description="the sites whose answers the server accepted")
    refused: dict[str, Text] = Field(
        {}, description="site → reason why the site declined, or why the server rejected the site's answer"
    )
    lost: dict[str, Text] = Field({}, description="site → reason why no answer arrived")
    warnings: dict[str, list[Text]] = Field({}, description="site → warnings in the site's answer")
    sites: dict[str, SiteRound] = Field({}, description="site → the site's numbers of this round, see below")
    weights: list[list[Number]] | None = Field(
        None,
        description="AdaFed's weights W, which only lines after a change of W contain. Row i has the weights of all "
        "sites in the model of site i, in the order of `asked`",
    )

    def absence(self, site: str) -> str | None:
        kinds = {"refused": self.refused, "lost": self.lost}
        return next((f"{kind}: {missing[site]}" for kind, missing in kinds.items() if site in missing), None)


class SiteTurn(RecordPart):
    asked: Seconds | None = Field(
        None, description="seconds since the server sent the request to the site; `null` before that"
    )
    answered: Seconds | None = Field(
        None, description="seconds from the request to the site's answer; `null` before the answer"
    )


class RequestStatus(RecordPart):
    """The content of a run's status.json while the study runs: the sites that were asked and the sites that have
    answered.
    """

    task: Text = Field(
        description="the server's request: `join`, `round`, `deliver`, `test`, or a step of secure aggregation"
    )
    round: Count = Field(description="the round")
    at: Seconds = Field(description="when the file was written, in seconds since 1970")
    sites: dict[str, SiteTurn] = Field(description="site → the state of its request")


class Progress(RecordPart):
    """The state of a running study, which the server sends to the lead on request."""

    study: str | None = Field(None, description="the run's name")
    planned: Count = Field(description="rounds of the plan")
    metric: str = Field(description="name of the metric")
    absent: dict[str, Text] | None = Field(
        None, description="site → why the site did not join; `null` before the server has asked all sites"
    )
    away: dict[str, Text] = Field({}, description="site → why the site can't answer at present, and since when")
    rounds: list[Round] = Field([], description="the rounds so far")
    turns: RequestStatus | None = Field(None, description="for each site, whether it has answered the current request")
    reason: Text | None = Field(None, description="why the study failed")
