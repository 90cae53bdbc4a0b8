"""Define models of summary.json, in which the server records a study.

The reference page of a run's folder is generated from the field descriptions in this module (`python -m tools.tables`).
"""

from collections.abc import Iterator
from operator import mul
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
from medsilo.runs.score import SUPPRESSED, UNDEFINED, UNIT_RANGE, Interval, Score
from medsilo.runs.site_files import Package, Readiness

SEE_LOG = "see the server's log"  # end of the reason if an unexpected error ended the run
STOPPED = "stopped"  # the reason if somebody stopped the run


# ---------------------------------------------------------------------------------------------------- summary.json


class RoundCount(RecordPart):
    planned: Count
    done: Count


class Agreement(RecordPart):
    sites: list[str] = Field([], description="the sites that train")
    minimum: Count | None = Field(None, description="minimum number of sites that must contribute to each round")
    when_missing: str | None = Field(None, description="`stop`, `wait` or `continue`")


class Selection(RecordPart):
    """The round whose model each site tested."""

    by: str | None = Field(None, description="`mean`: one round for all sites; `site`: each site chose its own round")
    rounds: dict[str, Count | None] = Field(
        {},
        description="site → the round after which the tested model was saved; `validation[round]` is this model's "
        "validation score",
    )


ReliabilityBin = tuple[Count, Count, Number]
TENTHS = 10  # number of bins for predicted probabilities


class Decisions(RecordPart):
    confusion: list[list[Count]] = Field(description="confusion matrix: row = true class, column = most probable class")
    threshold: Share | None = Field(
        None,
        description="with two classes: threshold on the second class's probability, chosen on the site's validation "
        "cases; `null` if the site does not disclose the threshold",
    )
    decided: list[Count] | None = Field(
        None,
        description="numbers of true negatives, false positives, false negatives and true positives at `threshold`",
    )
    reliability: list[list[ReliabilityBin]] | None = Field(
        None,
        description="for each class (of two, only the second) and each tenth of the predicted probability: all cases, "
        "cases of the class, sum of probabilities",
    )

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if any(len(row) != len(self.confusion) for row in self.confusion):
            raise ValueError("confusion must have one row and one column per class")
        if self.decided is not None and len(self.decided) != 4:
            raise ValueError("decided must be four counts")
        judged = 1 if len(self.confusion) == 2 else len(self.confusion)
        if self.reliability is not None and [len(places) for places in self.reliability] != [TENTHS] * judged:
            raise ValueError(f"reliability must have {TENTHS} bins for each class")
        return self


class SubgroupResult(RecordPart):
    subgroup: Text = Field(description="the subgroup's name, such as `sex`, as the hospital's data set declares it")
    level: Text = Field(description="the level's name, such as `female`")
    patients: Count = Field(
        0, description="number of test patients, rounded like all counts; 0 if the site suppresses the score"
    )
    score: Metric | None = Field(
        None,
        description="test score. `null` if the site suppresses it, because it covers too few patients, or because "
        "other scores would disclose the score of too few patients",
    )
    spread: Amount | None = Field(None, description="upper bound on the variance of one patient's score")
    step: Amount = Field(0.0, description="step to which the score is rounded; 0: no rounding")


class SiteResult(RecordPart):
    """A site's contributions and scores in the whole run; None: missing."""

    cases: dict[str, Count | None] | None = Field(
        None,
        description="part (`train`, `validation`, `test`) → number of cases; `null` if the site does not disclose "
        "this number",
    )
    patients: dict[str, Count | None] | None = Field(
        None,
        description="part → number of patients; `null` if the site never answered or does not disclose this number",
    )
    classes: dict[str, list[Count] | None] | None = Field(
        None,
        description="part (`train`, `validation`, `test`) → number of cases of each class, in the order of "
        "`labels`. If the site rounds counts, the numbers count patients, and a class with fewer patients than "
        "`min_patients_per_metric` has 0. `null` if the site does not disclose the numbers of a part, or if the task "
        "has no classes",
    )
    machine: dict[str, Text] = Field(
        {},
        description="versions of `python`, `nvflare`, `torch`, `numpy` and `monai`, and the instruction set of the "
        "`processor`, as the site reported when it joined",
    )
    absent: list[Text] = Field(
        [], description="the plan's structures and columns that the site lacks, as the site reported when it joined"
    )
    steps: dict[str, Amount] = Field({}, description="`validation` or `test` → step to which the site rounds scores")
    contributed: Count | None = Field(None, description="number of rounds to which the site contributed")
    missed: dict[Annotated[int, Field(ge=0)], Text] = Field({}, description="round → why the site did not contribute")
    missed_ends: dict[str, Text] = Field({}, description="`join`, `deliver` or `test` → why the site did not answer")
    warnings: dict[str, list[Text]] = Field(
        {},
        description="round, `join`, `deliver` or `test` → warnings in the site's answer, for example that the site "
        "has lost its local state",
    )
    validation: list[Metric | None] = Field(
        [],
        description="validation scores of the models after 0, 1, 2, ... rounds; `null` if a model has no score",
    )
    test: dict[str, Figure | None] | None = Field(
        None,
        description="the metric, `loss` and `cases` on test data; `null` if the site was not tested. Metric and loss "
        "are `null` if they cover too few patients (`min_patients_per_metric`). The metric is also `null` "
        "if "
        "it is undefined, as the AUROC is if all test cases have one class",
    )
    figures: dict[str, Number | None] = Field(
        {},
        description="further metrics on the test cases; `null` if a metric is undefined, for example for a structure "
        "that no case has",
    )
    figure_ranges: dict[str, tuple[Number, Number]] = Field(
        {},
        description="if the site rounds scores: metric → the smallest and the largest value that the exact metric may "
        "have",
    )
    suppressed: list[str] = Field(
        [],
        description="scores and counts that the site suppressed because they cover too few patients. Metrics that "
        "need them are missing in `figures`. Means over sites leave the site out, and it does not affect "
        "the choice of the best round",
    )
    decisions: Decisions | None = Field(None, description="a classifier's decisions on the test cases, see below")
    subgroups: list[SubgroupResult] = Field(
        [], description="the test score of each level of the subgroups that the site's data set declares, see below"
    )
    bytes_up: Count | None = Field(None, description="bytes of the tensors that the site sent in all rounds")
    bytes_down: Count | None = Field(None, description="bytes of the tensors that the site received in all rounds")
    seconds: Seconds | None = Field(None, description="seconds that the site worked in all rounds")
    memory: Count | None = Field(None, description="peak memory of the site's process in bytes, over all rounds")
    readiness: Readiness | None = Field(
        None,
        description="in a canary study: whether the site can read its data, and the site's resources, see below",
    )

    @model_validator(mode="after")
    def _counts_its_test_cases(self) -> Self:
        cases = None if self.test is None else self.test.get("cases")
        if cases is not None and (cases < 0 or cases != int(cases)):
            raise ValueError(f"test.cases is {cases}, not a number of cases")
        return self


class Similarity(RecordPart):
    sites: list[str] = Field(description="the order of the sites in the rows and columns of `weights`")
    weights: list[list[Number]] = Field(description="row i: the weights of all sites in site i's model")

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        count = len(self.sites)
        if len(self.weights) != count or any(len(row) != count for row in self.weights):
            raise ValueError("weights must have one row and one column per site")
        return self


class SuperModelFacts(RecordPart):
    """FedSM's super model: the rule that chooses a model for an image, and how often each model was chosen."""

    rule: str = Field(description="the rule that chooses a model for an image")
    sites: list[str] = Field(description="the order of the model selector's outputs")
    agreed: list[str] = Field([], description="the sites whose personal models the super model contains")
    threshold: Share | None = Field(None, description="the chosen γ")
    plateau: tuple[Share, Share] | None = Field(
        None, description="range of γ in which the mean score is best; `threshold` is its middle"
    )
    curve: list[tuple[Share, Count, Number]] = Field(
        [], description="for each tested γ: γ, number of validation cases of all sites, mean score"
    )
    validated: dict[str, dict[str, Count]] = Field(
        {}, description="site → model → number of validation cases for which this model was chosen, with γ = 0"
    )
    tested: dict[str, dict[str, Count]] = Field(
        {},
        description="site → model → number of test cases (or windows) for which this model was chosen, with γ = "
        "`threshold`",
    )


class SecureAggregationFacts(RecordPart):
    mode: Literal["pairwise"] = Field(description="`secure_aggregation.mode` of the plan")
    keys: Text = Field(description="how the sites verify that a public key belongs to a hospital")
    protects: list[Text] = Field(
        description="parties against which secure aggregation does or does not protect, and numbers that are not masked"
    )


class Details(RecordPart):
    """Results that only some methods have; each method may add keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    similarity: Similarity | None = Field(None, description="AdaFed's weights")
    pretraining: dict[str, JsonValue] | None = Field(
        None,
        description="AdaFed's pre-trained network f: `source`, `data` (in words), `start` (whether the sites' models "
        "began with f). If the source is `share`, the further keys are `cases`, `epochs` and "
        "`train_loss`. If the source is `file`, the further key is `sha256`",
    )
    super_model: SuperModelFacts | None = Field(None, description="FedSM's super model")
    warnings: list[Text] = Field([], description="warnings about unusual settings of the plan")
    secure_aggregation: SecureAggregationFacts | None = Field(
        None, description="how secure aggregation protects, and against which parties"
    )

    def as_json(self) -> dict[str, Any]:
        """Return only those results that the method has set."""
        return self.model_dump(mode="json", exclude_unset=True)


class StudyFacts(RecordPart):
    title: str = Field("", description="the study's title")
    purpose: str = Field("", description="the purpose of the model")
    contact: str = Field("", description="the contact for questions")


class Summary(RecordPart):
    form: Literal[1] = Field(default=SCHEMA, alias="schema", description="schema version of this file")
    status: Literal["finished", "failed"] = Field(description="how the run ended")
    reason: Text | None = Field(None, description="why the run failed, in one line")
    passing: bool = Field(
        False,
        strict=True,
        description="whether the failure may be temporary; medsilo then may restart the study",
    )
    method: Text = Field(description="the method's name in plans")
    title: Text = Field(description="the method's name in reports")
    task: Text | None = Field(None, description="the task's name in plans")
    task_title: Text | None = Field(None, description="the task's name in reports")
    synthetic: bool = Field(False, strict=True, description="whether the data are synthetic")
    sliced: bool = Field(False, strict=True, description="whether a case is a slice of a patient's volume")
    engine: Text | None = Field(None, description="`simulator`, `in-process` or `nvflare`")
    metric: Text = Field(description="the name of the score, such as `accuracy` or `dice`")
    seed: Seed | None = Field(None, description="the plan's seed")
    protocol: Text | None = Field(
        None, description="whether the plan follows the `paper`, the authors' `released-code`, or neither (`default`)"
    )
    plan_hash: Text | None = Field(None, description="SHA-256 of the resolved plan")
    packages: dict[Text, Package] = Field(
        {}, description="package whose code ran → `version` and `hash` of the package"
    )
    study: Text | None = Field(None, description="the run's name")
    description: StudyFacts = Field(StudyFacts(), description="`title`, `purpose`, `contact`: the study in words")
    labels: list[Text] = Field([], description="the names of the classes or structures, in their order")
    network: Text | None = Field(None, description="the network's name")
    parameters: Count | None = Field(None, description="number of trainable parameters of the network")
    rounds: RoundCount = Field(description="`planned` and `done`")
    agreed: Agreement = Field(Agreement(), description="`sites`, `minimum`, `when_missing`: the terms of participation")
    selected: Selection = Field(Selection(), description="the choice of the tested model, see below")
    sites: dict[str, SiteResult] = Field(description="site → the site's results, see below")
    evaluation_sites: dict[str, SiteResult] = Field(
        {},
        description="evaluation site → the site's results. Evaluation sites do not train, and means over sites leave "
        "them out",
    )
    mean_test: Metric | None = Field(
        None,
        description="mean test score over the sites that disclose it; `null` if none does. If sites annotated "
        "different structures, this is the mean over structures of each structure's mean over the sites "
        "that annotated it",
    )
    pooled_test: Metric | None = Field(None, description="mean test score over sites, weighted by number of test cases")
    pooled: dict[str, Number | None] = Field(
        {},
        description="`figures` of all sites together, from the sums of their counts. A site that does not disclose "
        "counts of classes affects `accuracy`, but not `balanced_accuracy`",
    )
    details: Details = Field(
        Details(), description="results that are specific to the method, and warnings about the plan, see below"
    )
    seconds: Seconds | None = Field(None, description="seconds that the study took")
    memory: Count | None = Field(
        None,
        description="peak memory of the server's process in bytes. If the sites run in the same process, the peak "
        "since the last answer",
    )
    started: Text | None = Field(None, description="when the study began, UTC")
    ended: Text | None = Field(None, description="when it ended, UTC")

    @model_validator(mode="after")
    def _has_the_same_classes(self) -> Self:
        told = [site.decisions for site in (*self.sites.values(), *self.evaluation_sites.values()) if site.decisions]
        if len({len(one.confusion) for one in told}) > 1:
            raise ValueError("the sites' confusion tables have different numbers of classes")
        return self

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def never_began(self) -> bool:
        """True if the run failed before training because too few sites joined."""
        to_all = self.agreed.when_missing == "stop"
        asked = [*self.sites.values(), *(self.evaluation_sites.values() if to_all else [])]
        needed = max(len(asked) if to_all else 0, self.agreed.minimum or 1)
        joined = sum(site.cases is not None for site in asked)
        return not self.finished and self.rounds.done == 0 and joined < needed

    def score(self, site: str) -> float | None:
        result = self.sites.get(site) or self.evaluation_sites.get(site)
        return None if result is None or result.test is None else result.test[self.metric]

    def score_at(self, site: str) -> Score:
        result = self.sites.get(site) or self.evaluation_sites.get(site) or SiteResult()
        told = result.test or {}
        cases = told.get("cases")
        undefined = self.metric in result.figures and result.figures[self.metric] is None
        return Score.told(
            told.get(self.metric),
            None if cases is None else int(cases),
            result.steps.get("test", 0.0),
            trained=self.selected.rounds.get(site) != 0,
            absent="suppressed" if self.metric in result.suppressed else "undefined" if undefined else "missing",
            bounds=self.bounds,
        )

    def validated_at(self, site: str, rounds: int) -> Score:
        own = self.sites.get(site) or SiteResult()
        value = own.validation[rounds] if rounds < len(own.validation) else None
        cases = (own.cases or {}).get("validation")
        return Score.told(value, cases, own.steps.get("validation", 0.0), bounds=self.bounds)

    @property
    def bounds(self) -> Interval:
        return (-FURTHEST, FURTHEST) if self.task == SCRIPT else UNIT_RANGE

    @property
    def mean_score(self) -> Score:
        """Mean of the disclosed test scores; each site counts equally."""
        return self._mean(self.mean_test)

    @property
    def pooled_score(self) -> Score:
        """Mean of the disclosed test scores; each site counts in proportion to its number of test cases."""
        return self._mean(self.pooled_test, by_cases=True)

    def _mean(self, reported: float | None, by_cases: bool = False) -> Score:
        """Return a mean as a score: a range that contains the exact mean if sites round their scores."""
        scores = {site: self.score_at(site) for site in self.sites}
        known = [(score, self.score(site) or 0.0) for site, score in scores.items() if score.known]
        if reported is None or not known:
            kinds = {score.kind for score in scores.values()}
            return Score(kind=SUPPRESSED if SUPPRESSED in kinds else UNDEFINED if UNDEFINED in kinds else "missing")
        cases = [float(score.n or 0) for score, _ in known]
        weights = cases if by_cases and any(cases) else [1.0] * len(known)
        ends = [(value - (score.low or 0.0), (score.high or 0.0) - value) for score, value in known]
        below, above = (sum(map(mul, weights, own)) / sum(weights) for own in zip(*ends, strict=True))
        return Score.mean(reported - below, reported + above, [score for score, _ in known])

    @property
    def telling(self) -> list[str]:
        """The training sites that disclosed their test score."""
        return [site for site in self.sites if self.score(site) is not None]

    def as_json(self) -> dict[str, Any]:
        of_sites = {site: self.score_at(site).as_json() for site in (*self.sites, *self.evaluation_sites)}
        scores = {"mean": self.mean_score.as_json(), "pooled": self.pooled_score.as_json(), "sites": of_sites}
        return {**super().as_json(), "details": self.details.as_json(), "scores": scores}

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
        """Yield the path and the value of every score in summary.json."""
        yield from (("mean_test", self.mean_test), ("pooled_test", self.pooled_test))
        for name, site in {**self.sites, **self.evaluation_sites}.items():
            yield from ((f"sites.{name}.validation", score) for score in site.validation)
            if site.test is not None:
                yield f"sites.{name}.test.{self.metric}", site.test[self.metric]
