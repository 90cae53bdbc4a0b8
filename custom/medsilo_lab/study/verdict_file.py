"""The data model of verdict.json, the result of a comparison."""

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field

from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo.runs.fields import (
    SCHEMA,
    Count,
    Difference,
    Number,
    RecordPart,
    Score,
    Seed,
    Share,
    Text,
)
from medsilo.runs.reading import read_versioned
from medsilo.runs.score import Score as ShownScore
from medsilo_lab.study.subgroup_tables import SubgroupTable

AGAIN = "other repetitions of the training"
# advice about a larger sample names at most this number of seeds, and at most this number of patients per hospital
MOST_SEEDS, MOST_PATIENTS = 30, 300
REFERENCES = ("local", "central")  # names of the reference methods, with which federated methods are compared


class Level(RecordPart):
    mean: Score = Field(description="mean over seeds")
    sd: Number | None = Field(None, description="standard deviation over seeds; `null` with one seed")
    low: Score = Field(description="lower end of the 95 % interval of the mean")
    high: Score = Field(description="upper end of the 95 % interval of the mean")
    by_seed: list[Score] = Field([], description="one score per seed")
    n: Count | None = Field(None, description="number of test patients, which determines the digits of the score")
    trained: bool = Field(
        True,
        strict=True,
        description=(
            "whether most of the tested models had been trained; `false`: most of them are initial models of round 0"
        ),
    )

    def __str__(self) -> str:
        return str(ShownScore.told(self.mean, self.n, trained=self.trained))


class PairedDifference(RecordPart):
    mean: Difference = Field(description="mean difference over seeds")
    low: Difference = Field(
        description="lower end of the 95 % interval of the difference, for patients similar to the test "
        "patients; -1 if the interval cannot be estimated"
    )
    high: Difference = Field(
        description="upper end of the 95 % interval of the difference, for patients "
        "similar to the test patients; 1 if the interval cannot be estimated"
    )
    corrected_low: Difference | None = Field(
        None,
        description=(
            "lower end of the interval after correction for multiple comparisons; the corrected interval "
            "decides the verdict, and pages show this interval"
        ),
    )
    corrected_high: Difference | None = Field(
        None, description=("upper end of the interval after correction for multiple comparisons")
    )
    unseen_low: Difference | None = Field(
        None,
        description=(
            "lower end of a wider interval, which allows that a method fails for an untested kind of patient. "
            "The interval is corrected for multiple comparisons; `null` if unknown"
        ),
    )
    unseen_high: Difference | None = Field(
        None,
        description=(
            "upper end of the wider interval, which allows that a method fails for an untested kind of patient"
        ),
    )
    failing: Share | None = Field(
        None,
        description=(
            "upper limit of the share of patients for whom one method fails, estimated from all hospitals' failures"
        ),
    )
    p: Share = Field(description="p-value without correction for multiple comparisons")
    seeds: Count = Field(description="number of seeds that both configurations have")
    patients: Count | None = Field(None, description="number of test patients")
    adjusted: Share = Field(description="p-value after Holm's correction")
    sure: bool = Field(
        strict=True,
        description=(
            "whether the difference is significant. It is significant if the corrected interval excludes zero, "
            "with at least four seeds and eight patients. Also, the difference must not be the same for all patients"
        ),
    )

    @property
    def interval(self) -> tuple[float, float]:
        low, high = self.corrected_low, self.corrected_high
        return (self.low if low is None else low, self.high if high is None else high)

    @property
    def unseen(self) -> tuple[float, float] | None:
        """The confidence interval that allows for an untested kind of patients for whom a method fails."""
        low, high = self.unseen_low, self.unseen_high
        return None if low is None or high is None else (low, high)

    @property
    def open(self) -> bool:
        """True if there is no confidence interval, because the variance of patients or of seeds is unknown."""
        return self.low <= -1 and self.high >= 1

    @property
    def corrected(self) -> bool:
        """True if the correction for multiple comparisons changes the confidence interval."""
        return self.interval != (self.low, self.high)


class Differences(RecordPart):
    mean: PairedDifference | None = Field(None, description="difference between the means over sites")
    pooled: PairedDifference | None = Field(None, description="difference between the means over all cases")
    worst: PairedDifference | None = Field(
        None, description="difference between the scores at each configuration's worst site"
    )
    sites: dict[str, PairedDifference | None] = Field({}, description="difference at each site")


class Needed(RecordPart):
    of: Literal["test patients", "seeds"] = Field(
        description="unit of the key `number`: `test patients` of each hospital, or `seeds`"
    )
    number: Count | None = Field(
        None,
        description=(
            "sample size with which four of five studies would detect the difference; `null` if neither 300 test "
            "patients of each hospital nor 30 seeds are enough"
        ),
    )
    seeds: Count | None = Field(
        None,
        description=(
            "number of seeds that a study with `number` test patients needs; `null` if this study has enough seeds"
        ),
    )
    difference: Difference | None = Field(
        None,
        description=(
            "difference for which `number` is calculated; `null` if this study has too few seeds or test patients for "
            "any verdict"
        ),
    )
    reach: Difference | None = Field(
        None,
        description=(
            "expected half width of the confidence interval in a study with `number` test patients; `null` if unknown"
        ),
    )
    hospitals: Count = Field(1, description="number of hospitals to which the difference refers")


class HospitalVerdict(RecordPart):
    word: Literal["better", "worse", "inconclusive"] = Field(
        description="`better` or `worse` if the difference is significant, else `inconclusive`"
    )
    method: Text = Field(description="the configuration that the verdict is about")
    difference: PairedDifference = Field(
        validation_alias=AliasChoices("difference", "gain"),
        description="score of the configuration's model minus the score of the single-site model",
    )
    needed: Needed | None = Field(
        None,
        description=(
            "if the verdict is inconclusive: the number of patients or seeds that a conclusive verdict needs, if known"
        ),
    )


class VerdictRow(RecordPart):
    title: Text = Field(description="title of the configuration")
    method: Text = Field(description="name of the method in plans")
    changes: list[Text] = Field(
        [], description="the keys of the plan that the configuration changes, with their values"
    )
    seeds: list[Seed] = Field([], description="seeds with a finished run")
    score: Level | None = Field(None, description="mean test score over sites")
    pooled: Level | None = Field(None, description="mean test score over all cases")
    sites: dict[str, Level | None] = Field({}, description="test score at each site")
    baseline: Text | None = Field(
        None,
        validation_alias=AliasChoices("baseline", "against"),
        description="the baseline of this configuration; `null` if the configuration has no baseline",
    )
    unlike: Text | None = Field(
        None,
        description="how the network or the normalisation layers differ from those of the baseline. This "
        "difference can change the score, but is not an effect of the method",
    )
    difference: Differences = Field(
        Differences(), description="differences from the baseline: `mean`, `pooled`, `worst` and `sites`"
    )
    from_single_site: dict[str, PairedDifference | None] = Field(
        {},
        validation_alias=AliasChoices("from_single_site", "joining"),
        description="site → score of the method's model minus the score of the single-site model",
    )


class Notice(RecordPart):
    """A warning that pages show above all numbers."""

    kind: Literal["failed", "missing", "caution", "synthetic"] = Field(
        description="`failed` (a run), `missing` (a site in a round), `caution`, or `synthetic` (the data)"
    )
    word: Text = Field(description="the subject of the warning, such as `Untrained`, `Not learned` or `Rounded scores`")
    text: Text = Field(description="the warning; it begins with the configurations or runs to which it applies")

    def __str__(self) -> str:
        return f"{self.word}: {self.text}"


class About(RecordPart):
    title: str = Field(description="title of the page")
    machine: str = Field("", description="description of the machine")
    cells: Count = Field(0, description="number of requested runs")
    failures: list[str] = Field([], description="a line of text for each failed run")


class RunOfRow(RecordPart):
    row: Text
    seed: Seed
    run: str
    fold: Count | None = None


class Verdict(RecordPart):
    form: Literal[1] = Field(default=SCHEMA, alias="schema", description="version of this format")
    task: Text = Field(description="name of the task in plans")
    task_title: Text = Field(description="name of the task for readers")
    synthetic: bool = Field(strict=True, description="whether the data are synthetic")
    metric: Text = Field(description="name of the score")
    network: Text = Field(description="name of the network")
    seeds: list[Seed] = Field(description="the requested seeds")
    folds: Count | None = Field(None, description="number of cross-validation folds; `null` without cross-validation")
    sites: list[str] = Field(description="the sites that have a score in the comparison")
    patients: dict[str, Count] = Field({}, description="site → number of test patients")
    level: Share = Field(description="confidence level of the intervals, 0.95")
    baseline: Text | None = Field(
        None,
        validation_alias=AliasChoices("baseline", "against"),
        description="the configuration with which all other configurations are compared",
    )
    single: list[str] = Field(
        [],
        description="sites with a single test patient; the intervals of these sites cover only the variation "
        "between seeds",
    )
    headline: str = Field(
        description="the answer to the comparison's first question: whether federated training is better than "
        "single-site training"
    )
    between: str = Field("", description="the methods that are better than the baseline, in words")
    first: PairedDifference | None = Field(
        None,
        description=(
            "the difference that answers the comparison's first question: the score of the baseline minus "
            "the score of single-site training. `null` if the score of the baseline or of single-site "
            "training is missing"
        ),
    )
    needed: Needed | None = Field(
        None,
        description="if the answer to the first question is inconclusive: the number of patients or seeds that a "
        "conclusive answer needs, if known",
    )
    declared: Text | None = Field(
        None,
        description=(
            "the configuration that the comparison's first question is about; `null` if the question is "
            "about every federated configuration"
        ),
    )
    hospitals: dict[str, HospitalVerdict] = Field(
        {},
        validation_alias=AliasChoices("hospitals", "gains"),
        description="site → the verdict on federated training at this site",
    )
    rows: list[VerdictRow] = Field(description="the configurations")
    subgroups: list[SubgroupTable] = Field(
        [],
        description=(
            "scores of the declared configuration by subgroup of patients; without a declared configuration, "
            "scores of the baseline or of the first federated method"
        ),
    )
    about: About = Field(
        description="facts about the comparison: `title`, `command`, `machine`, `cells` and `failures`"
    )
    warnings: list[Notice] = Field([], description="warnings to read before any number, most serious first")
    runs: list[RunOfRow] = Field(
        description="for each finished run: `row`, `seed`, folder (`run`) and, in cross-validation, `fold`"
    )

    @property
    def other_networks(self) -> list[str]:
        """A line of text for each federated configuration whose network differs from the baseline's network. Different
        networks may be the reason for a difference in scores.
        """
        return [
            f"{row.title} differs from {row.baseline} in more than the method: {row.unlike}."
            for row in self.rows
            if row.unlike and row.method not in REFERENCES
        ]

    @property
    def holds_for(self) -> str:
        """A description of the population for which the confidence intervals are valid. At a site, the intervals are
        valid for other patients only if the site tested several patients.
        """
        if not self.single:
            return f"other patients and {AGAIN} (whole patients count)"
        if self.single == self.sites:
            return f"other people and {AGAIN} (a site is one person); at one site for these alone, so nothing is sure"
        return f"other patients and {AGAIN}, at {', '.join(self.single)} for these alone (one patient each)"


def read_verdict(folder: Path) -> Verdict:
    if not (folder / paths.VERDICT).is_file():
        raise MedsiloError(f"{folder.name} has no {paths.VERDICT}: run medsilo compare with --out {folder}")
    return read_versioned(Verdict, folder, paths.VERDICT, "comparison")
