"""The record of a study's rounds as typed models: rounds.jsonl, and the state of a study that runs."""

from typing import Annotated

from pydantic import Field

from medsilo.runs.fields import Amount, Count, Metric, Number, RecordPart, Seconds, Share, Text

Cosine = Annotated[float, Field(strict=True, ge=-1, le=1)]


class SentUpdate(RecordPart):
    """Figures about one group of tensors that a site sent, without looking into it."""

    norm: Amount = Field(description="how far the trained weights are from what the site was given")
    cosine: Cosine | None = Field(
        None,
        description="of the way there and the mean way of the other sites, each of which counts as if it were of "
        "length one: 1 the same way, 0 across, −1 back. To about 0.02. `null` where nothing changed or nobody else "
        "answered",
    )
    agreement: Cosine | None = Field(
        None, description="mean cosine of two of the others; `null` where fewer than two others answered"
    )


class SiteRound(RecordPart):
    """Numbers of one site in one round."""

    train_loss: Number | None = Field(None, description="mean loss over the round's training batches")
    validation: Metric | None = Field(
        None, description="score of the model as it arrived, so after round − 1; `null` where the site withholds it"
    )
    validation_loss: Number | None = Field(None, description="loss of that model")
    samples: Count | None = Field(None, description="training cases; the weight in a mean by samples")
    seconds: Seconds = Field(0.0, description="time that the site worked")
    memory: Count | None = Field(None, description="bytes that the site's process held at most")
    bytes_up: Count = Field(0, description="bytes of the tensors that the site sent")
    bytes_down: Count = Field(0, description="bytes of the tensors that the site got")
    updates: dict[str, SentUpdate] = Field(
        {}, description="group of tensors → `norm` and `cosine` of the site's update, see below"
    )
    share: Share | None = Field(
        None,
        description="how much the site counted in the round's mean; `null` where that is not one number, as in medians",
    )


class Round(RecordPart):
    """One line of rounds.jsonl: who was asked, who answered, who was refused or lost and why."""

    round: Count = Field(description="from 1, through all phases")
    phase: Text | None = Field(None, description="the phase that the round belongs to")
    seconds: Seconds | None = Field(None, description="time from asking to mixing, at the server")
    asked: list[str] = Field([], description="the sites that were asked")
    answered: list[str] = Field([], description="the sites whose answer was accepted")
    refused: dict[str, Text] = Field({}, description="site → reason: it refused, or its answer was refused")
    lost: dict[str, Text] = Field({}, description="site → reason: no answer came")
    warnings: dict[str, list[Text]] = Field({}, description="site → lines that it had to say beside its answer")
    sites: dict[str, SiteRound] = Field({}, description="site → its numbers")
    weights: list[list[Number]] | None = Field(
        None,
        description="AdaFed's weights W, where they differ from those of the rounds before: row i, what site i takes "
        "from each site, in the order of `asked`",
    )

    def absence(self, site: str) -> str | None:
        """Return why a site is missing from the round, or None."""
        kinds = {"refused": self.refused, "lost": self.lost}
        return next((f"{kind}: {missing[site]}" for kind, missing in kinds.items() if site in missing), None)


class SiteTurn(RecordPart):
    """One site's part in what is being asked of all sites, as the server sees it."""

    asked: Seconds | None = Field(None, description="seconds since the site was asked; `null` while it has to wait")
    answered: Seconds | None = Field(None, description="seconds that it took to answer; `null` while it has not")


class Turns(RecordPart):
    """status.json of a run: who has been asked and who has answered, while the study runs."""

    task: Text = Field(description="`join`, `round`, `deliver`, `test`, or a step of secure aggregation")
    round: Count = Field(description="the round")
    at: Seconds = Field(description="when this was written, in seconds since 1970")
    sites: dict[str, SiteTurn] = Field(description="site → its turn")


class Progress(RecordPart):
    """The state of a study while it runs, as the server tells it and `medsilo status ID --watch` shows it."""

    study: str | None = Field(None, description="the run's name")
    planned: Count = Field(description="rounds of the plan")
    metric: str = Field(description="the name of the score")
    absent: dict[str, Text] | None = Field(None, description="site → why it did not join; `null` before all were asked")
    away: dict[str, Text] = Field({}, description="site → why it can't answer now, and since when")
    steps: dict[str, Amount] = Field({}, description="site → the steps of its validation scores, where it rounds them")
    rounds: list[Round] = Field([], description="the rounds so far")
    turns: Turns | None = Field(None, description="who has been asked at the moment and who has answered")
    reason: Text | None = Field(None, description="why the study failed")
