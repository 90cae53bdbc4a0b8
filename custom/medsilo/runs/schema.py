"""The record of a study as typed models: what is in a run's JSON files at the server.

`docs/reference/run-folder.md` is made from the descriptions below: `python -m docs.tables`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from medsilo.runs.fields import (
    FURTHEST,
    SCHEMA,
    SCRIPT,
    SLACK,
    Amount,
    Count,
    Figure,
    Metric,
    Number,
    RecordPart,
    Seconds,
    Seed,
    Share,
    Text,
)
from medsilo.runs.site_files import Package, Readiness

SEE_LOG = "see the server's log"  # the end of the reason of a run that an error ended that nobody foresaw
STOPPED = "stopped"  # why a run ended that somebody or something stopped in its middle


# ---------------------------------------------------------------------------------------------------- summary.json


class RoundCount(RecordPart):
    """The number of rounds: planned, and done."""

    planned: Count
    done: Count


class Agreement(RecordPart):
    """The sites that were to take part, and what was to happen when one is missing."""

    sites: list[str] = Field([], description="the sites that train")
    minimum: Count | None = Field(None, description="contributors that a round needs")
    when_missing: str | None = Field(None, description="`stop`, `wait` or `continue`")


class Selection(RecordPart):
    """The round whose model was tested at each site."""

    by: str | None = Field(None, description="`mean`: one round for all sites; `site`: each site chose its own")
    rounds: dict[str, Count | None] = Field(
        {}, description="site → round of the model that it tested, so `validation[round]` is its validation score"
    )


ReliabilityBin = tuple[Count, Count, Number]
TENTHS = 10  # of a probability


class Decisions(RecordPart):
    """The decisions and probabilities of a classification on one site's test cases."""

    confusion: list[list[Count]] = Field(description="row: a case's class; column: the class with most probability")
    threshold: Share | None = Field(
        None,
        description="with two classes: the probability of the second from which on a case counts as found, chosen on "
        "the site's validation cases; `null` where it was not disclosed",
    )
    decided: list[Count] | None = Field(
        None, description="true negatives, false positives, false negatives, true positives at that threshold"
    )
    reliability: list[list[ReliabilityBin]] | None = Field(
        None,
        description="class (of two the second alone) → for each tenth of its probability: cases, those of the class, "
        "the sum of its probability",
    )

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if any(len(row) != len(self.confusion) for row in self.confusion):
            raise ValueError("confusion is not one row and one column per class")
        if self.decided is not None and len(self.decided) != 4:
            raise ValueError("decided must be four counts")
        judged = 1 if len(self.confusion) == 2 else len(self.confusion)
        if self.reliability is not None and [len(places) for places in self.reliability] != [TENTHS] * judged:
            raise ValueError(f"reliability is not {TENTHS} places for each class")
        return self


class SiteResult(RecordPart):
    """One site's contributions and results over the whole run. A value that is missing is None, never 0."""

    cases: dict[str, Count | None] | None = Field(
        None,
        description="part (`train`, `validation`, `test`) → cases; `null`: the site never answered, or states none",
    )
    classes: dict[str, list[Count] | None] | None = Field(
        None,
        description="part → the cases of each class, in the classes' order. `null` for a part where cases have no "
        "class or where a class that occurs has fewer patients than the site's `min_patients_per_metric`; `null` for "
        "all if the site did not join",
    )
    machine: dict[str, Text] = Field(
        {},
        description="`python`, `nvflare`, `torch`, `numpy`, `monai` → version, and the `processor`'s instructions, "
        "as the site reported them on joinings warnings",
    )
    absent: list[Text] = Field(
        [], description="the plan's structures and columns that the site lacks, as it reported on joining"
    )
    steps: dict[str, Amount] = Field(
        {}, description="`validation` and `test` → the steps in which the site's scores leave, where it rounds them"
    )
    contributed: Count | None = Field(None, description="rounds that the site is part of")
    missed: dict[Annotated[int, Field(ge=0)], Text] = Field({}, description="round → why the site is not part of it")
    missed_ends: dict[str, Text] = Field({}, description="`join`, `deliver` or `test` → why the site has no part in it")
    warnings: dict[str, list[Text]] = Field(
        {},
        description="round, `join`, `deliver` or `test` → lines that the site had to say beside its answer, for "
        "instance that its own state is no longer on its disk",
    )
    validation: list[Metric | None] = Field(
        [],
        description="score by the number of rounds that the model has gone through, from 0; `null` where there is none",
    )
    test: dict[str, Figure | None] | None = Field(
        None,
        description="the metric, `loss` and `cases` on test data; `null` if the site was not tested. Metric and loss "
        "are `null` where they cover fewer cases than the site's `min_patients_per_metric`",
    )
    figures: dict[str, Number | None] = Field(
        {},
        description="what else was measured on the test cases; `null` where there is nothing to "
        "measure, such as a structure that no case has",
    )
    suppressed: list[str] = Field(
        [],
        description="counts that the site suppressed because they cover too few cases. What follows from them is "
        "missing in `figures`; it is never 0. Means leave such a site out, and the other sites choose the best round",
    )
    decisions: Decisions | None = Field(
        None, description="a classification's decisions on the test cases, where classes are distinguished, see below"
    )
    bytes_up: Count | None = Field(None, description="bytes of the tensors that the site sent in all rounds")
    bytes_down: Count | None = Field(None, description="bytes of the tensors that it got in all rounds")
    seconds: Seconds | None = Field(None, description="time that it worked in all rounds")
    memory: Count | None = Field(
        None, description="bytes that the site's process held at most while it answered, the most of all rounds"
    )
    readiness: Readiness | None = Field(
        None, description="of a canary: whether its own data can be read, its GPUs, memory, disk and line, see below"
    )

    @model_validator(mode="after")
    def _counts_its_test_cases(self) -> Self:
        cases = None if self.test is None else self.test.get("cases")
        if cases is not None and (cases < 0 or cases != int(cases)):
            raise ValueError(f"test.cases is {cases}, not a number of cases")
        return self


class Similarity(RecordPart):
    """AdaFed's mixing weights W."""

    sites: list[str] = Field(description="the order of rows and columns")
    weights: list[list[Number]] = Field(description="row i: what site i takes from each site")

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        count = len(self.sites)
        if len(self.weights) != count or any(len(row) != count for row in self.weights):
            raise ValueError("weights are not one row and one column per site")
        return self


class SuperModelFacts(RecordPart):
    """FedSM's super model: which threshold was best, and how often each model answered for each site's cases."""

    rule: str = Field(description="how a model is chosen for an image")
    sites: list[str] = Field(description="the selector's outputs")
    agreed: list[str] = Field([], description="the sites whose personal models it holds")
    threshold: Share | None = Field(None, description="the chosen γ")
    plateau: tuple[Share, Share] | None = Field(
        None, description="the ends of the range of γ with the best score, of which the chosen one is the middle"
    )
    curve: list[tuple[Share, Count, Number]] = Field([], description="(γ, pooled validation cases, mean score)")
    validated: dict[str, dict[str, Count]] = Field(
        {}, description="site → model → how often it was chosen for validation cases, with γ = 0"
    )
    tested: dict[str, dict[str, Count]] = Field(
        {}, description="the same for test cases with the chosen γ; windows count where images are seen through windows"
    )


class SecureAggregationFacts(RecordPart):
    """What a study with secure aggregation says of itself."""

    mode: Literal["pairwise"] = Field(description="`secure_aggregation.mode` of the plan")
    keys: Text = Field(description="what the hospitals' keys rest on")
    protects: list[Text] = Field(description="against whom it protects and against whom not, and what stays open")


class Details(RecordPart):
    """The method's own findings. Methods may add keys of their own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    similarity: Similarity | None = Field(None, description="AdaFed's weights")
    pretraining: dict[str, JsonValue] | None = Field(
        None,
        description="AdaFed's pre-trained network f: `source`, `data` (in words), `start` (whether the models began "
        "with it), and `share`'s `cases`, `epochs`, `train_loss`, or the `file`'s `sha256`",
    )
    super_model: SuperModelFacts | None = Field(None, description="FedSM's super model")
    warnings: list[Text] = Field([], description="what is unusual about the plan's numbers")
    secure_aggregation: SecureAggregationFacts | None = Field(None, description="what it protects, and against whom")

    def as_json(self) -> dict[str, Any]:
        """Return the keys that this method has."""
        return self.model_dump(mode="json", exclude_unset=True)


class StudyFacts(RecordPart):
    """The study in its lead's words, as the plan has them."""

    title: str = Field("", description="the study's title")
    purpose: str = Field("", description="what the model is for")
    contact: str = Field("", description="who answers questions")


class Summary(RecordPart):
    """summary.json: the outcome of a run."""

    form: Literal[1] = Field(default=SCHEMA, alias="schema", description="the version of this table")
    status: Literal["finished", "failed"] = Field(description="how the run ended")
    reason: Text | None = Field(None, description="why it failed, in one line")
    passing: bool = Field(
        False, strict=True, description="whether what ended it passes, so that it may go on by itself"
    )
    method: Text = Field(description="the method's name in plans")
    title: Text = Field(description="the method's name for readers")
    task: Text | None = Field(None, description="the task's name in plans")
    task_title: Text | None = Field(None, description="the task's name for readers")
    synthetic: bool = Field(False, strict=True, description="whether the data were drawn by the computer")
    sliced: bool = Field(False, strict=True, description="whether a case is a slice of a patient's volume")
    engine: Text | None = Field(None, description="`simulator`, `in-process` or `nvflare`")
    metric: Text = Field(description="the name of the score, such as `accuracy` or `dice`")
    seed: Seed | None = Field(None, description="the plan's seed")
    protocol: Text | None = Field(None, description="what the plan's numbers follow")
    plan_hash: Text | None = Field(None, description="SHA-256 of the resolved plan")
    packages: dict[Text, Package] = Field({}, description="package whose code ran → its `version` and `hash`")
    study: Text | None = Field(None, description="the run's name")
    description: StudyFacts = Field(StudyFacts(), description="`title`, `purpose`, `contact`: the study in words")
    labels: list[Text] = Field([], description="the names of the classes or structures, in their order")
    network: Text | None = Field(None, description="the network's name")
    parameters: Count | None = Field(None, description="how many numbers the network learns")
    rounds: RoundCount = Field(description="`planned` and `done`")
    agreed: Agreement = Field(Agreement(), description="`sites`, `minimum`, `when_missing`: the terms of participation")
    selected: Selection = Field(Selection(), description="whose model was tested, see below")
    sites: dict[str, SiteResult] = Field(description="site → its results, see below")
    evaluation_sites: dict[str, SiteResult] = Field(
        {}, description="the same for sites that were tested and did not train; the means below leave them out"
    )
    mean_test: Metric | None = Field(
        None,
        description="mean over the sites that disclose their test score; `null` if none does. Where sites drew "
        "different "
        "structures: of each structure over the sites that drew it, and then over structures",
    )
    pooled_test: Metric | None = Field(None, description="the mean weighted by test cases")
    pooled: dict[str, Number | None] = Field(
        {},
        description="`figures` over the test cases of all sites together; their counts are added first. A site that "
        "withholds its classes is part of `accuracy` and not of `balanced_accuracy`",
    )
    details: Details = Field(Details(), description="what the method found out or rests on, see below")
    seconds: Seconds | None = Field(None, description="time that the study took")
    memory: Count | None = Field(
        None,
        description="bytes that the server's process held at most (without processes of their own: since the last "
        "answer)",
    )
    started: Text | None = Field(None, description="when the study began, UTC")
    ended: Text | None = Field(None, description="when it ended, UTC")

    @model_validator(mode="after")
    def _has_the_same_classes(self) -> Self:
        told = [site.decisions for site in (*self.sites.values(), *self.evaluation_sites.values()) if site.decisions]
        if len({len(one.confusion) for one in told}) > 1:
            raise ValueError("the sites' decisions are of different classes")
        return self

    @property
    def finished(self) -> bool:
        """Return whether the run ended well."""
        return self.status == "finished"

    @property
    def never_began(self) -> bool:
        """Return whether the run failed before any site was asked to train, since too few had joined."""
        to_all = self.agreed.when_missing == "stop"
        asked = [*self.sites.values(), *(self.evaluation_sites.values() if to_all else [])]
        needed = max(len(asked) if to_all else 0, self.agreed.minimum or 1)
        joined = sum(site.cases is not None for site in asked)
        return not self.finished and self.rounds.done == 0 and joined < needed

    def score(self, site: str) -> float | None:
        """Return the test score of a site, of those that train or of the others; None where it is not known."""
        result = self.sites.get(site) or self.evaluation_sites.get(site)
        return None if result is None or result.test is None else result.test[self.metric]

    @property
    def telling(self) -> list[str]:
        """Return the sites that train and tell their test score."""
        return [site for site in self.sites if self.score(site) is not None]

    def as_json(self) -> dict[str, Any]:
        """Return the values as they stand in the file; of the details, those that there are."""
        return {**super().as_json(), "details": self.details.as_json()}

    @model_validator(mode="after")
    def _tested_with_the_metric(self) -> Self:
        for name, site in {**self.sites, **self.evaluation_sites}.items():
            if site.test is None:
                continue
            if self.metric not in site.test:
                raise ValueError(f"sites.{name}.test has no '{self.metric}', which 'metric' names")
        low, high = (-FURTHEST, FURTHEST) if self.task == SCRIPT else (-SLACK, 1 + SLACK)
        for where, score in self._scores():
            if score is not None and not low <= score <= high:
                raise ValueError(f"{where} is {score:g}, not between {low:.0f} and {high:.0f}")
        return self

    def _scores(self) -> Iterator[tuple[str, float | None]]:
        """Yield every score with where it stands."""
        yield from (("mean_test", self.mean_test), ("pooled_test", self.pooled_test))
        for name, site in {**self.sites, **self.evaluation_sites}.items():
            yield from ((f"sites.{name}.validation", score) for score in site.validation)
            if site.test is not None:
                yield f"sites.{name}.test.{self.metric}", site.test[self.metric]
