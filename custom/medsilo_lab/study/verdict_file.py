"""verdict.json, the result of a comparison, as a typed model."""

from pathlib import Path
from typing import Literal

from pydantic import Field

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

AGAIN = "other repetitions of the training"
REFERENCES = ("local", "central")  # what no federation makes: federations are held against them


class Level(RecordPart):
    """A row's score over its seeds."""

    mean: Score = Field(description="mean over seeds")
    sd: Number | None = Field(None, description="standard deviation over seeds; `null` with one seed")
    low: Score = Field(description="lower end of the 95 % interval")
    high: Score = Field(description="upper end")
    by_seed: list[Score] = Field([], description="one score per seed")


class PairedDifference(RecordPart):
    """A row's score minus another's, with its interval and its test."""

    mean: Difference = Field(description="mean over seeds")
    low: Difference = Field(description="lower end of the 95 % interval by itself")
    high: Difference = Field(description="upper end")
    corrected_low: Difference | None = Field(
        None,
        description="lower end of the interval corrected for the questions asked together, on which the verdict rests; "
        "pages show this one",
    )
    corrected_high: Difference | None = Field(None, description="upper end")
    p: Share = Field(description="p-value by itself")
    seeds: Count = Field(description="seeds that both rows have")
    patients: Count | None = Field(None, description="test patients behind it")
    adjusted: Share = Field(description="p-value after Holm's correction")
    sure: bool = Field(
        strict=True,
        description="significant: the corrected interval leaves zero out; never with fewer than "
        "four seeds, one patient, or seeds or patients that are all alike",
    )

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that the verdict rests on."""
        low, high = self.corrected_low, self.corrected_high
        return (self.low if low is None else low, self.high if high is None else high)

    @property
    def corrected(self) -> bool:
        """Return whether that is another than the difference has by itself."""
        return self.interval != (self.low, self.high)


class Differences(RecordPart):
    """A row's differences from the row that all are compared with."""

    mean: PairedDifference | None = Field(None, description="of the mean over sites")
    pooled: PairedDifference | None = Field(None, description="of the mean over all cases")
    worst: PairedDifference | None = Field(None, description="of the score at each row's own worst site")
    sites: dict[str, PairedDifference | None] = Field({}, description="at each site")


class Needed(RecordPart):
    """Patients or seeds that an inconclusive comparison lacks."""

    of: Literal["test patients", "seeds"] = Field(description="`test patients` or `seeds`")
    number: Count | None = Field(
        None, description="as many would show the difference in four of five such studies; `null`: more than 1,000"
    )
    difference: Difference | None = Field(
        None, description="the difference that they would show; `null`: fewer seeds give no verdict"
    )


class HospitalGain(RecordPart):
    """One hospital's difference from single-site training, and the verdict on it."""

    word: Literal["better", "worse", "inconclusive"] = Field(
        description="`better` or `worse`: the difference is significant; else `inconclusive`"
    )
    method: Text = Field(description="the row whose difference it is")
    gain: PairedDifference = Field(description="that row's model minus the one that the site trains alone")
    needed: Needed | None = Field(None, description="what is missing where it is inconclusive, if known")


class VerdictRow(RecordPart):
    """One row of a comparison."""

    title: Text = Field(description="the row's title")
    method: Text = Field(description="the method's name in plans")
    changes: list[Text] = Field([], description="the row's changes to the plan")
    seeds: list[Seed] = Field([], description="seeds with a finished run")
    score: Level | None = Field(None, description="mean test score over sites, see below")
    pooled: Level | None = Field(None, description="the same over all cases")
    sites: dict[str, Level | None] = Field({}, description="the same at each site")
    against: Text | None = Field(None, description="the row that this one is compared with; `null` if there is none")
    unlike: Text | None = Field(
        None, description="in what the two networks differ, if they do: then the difference is not the method's alone"
    )
    difference: Differences = Field(
        Differences(), description="`mean`, `pooled`, `worst` and `sites`: differences from that row"
    )
    joining: dict[str, PairedDifference | None] = Field(
        {}, description="site → this method's model minus the one that the site trains alone"
    )


class About(RecordPart):
    """The words on a comparison's page beside its numbers."""

    title: str = Field(description="the page's title")
    machine: str = Field("", description="the machine in words")
    cells: Count = Field(0, description="runs that were asked for")
    failures: list[str] = Field([], description="what failed, one line each")


class RunOfRow(RecordPart):
    """A run, with the row and the seed that it belongs to."""

    row: Text
    seed: Seed
    run: str
    fold: Count | None = None


class Verdict(RecordPart):
    """verdict.json: what a comparison says."""

    form: Literal[1] = Field(default=SCHEMA, alias="schema", description="the version of this table")
    task: Text = Field(description="the task's name in plans")
    task_title: Text = Field(description="the task's name for readers")
    synthetic: bool = Field(strict=True, description="whether the data were drawn by the computer")
    metric: Text = Field(description="the name of the score")
    network: Text = Field(description="the network's name")
    seeds: list[Seed] = Field(description="the seeds that were asked for")
    folds: Count | None = Field(None, description="how often patients took turns in the test part; `null`: never")
    sites: list[str] = Field(description="the sites with a score")
    patients: dict[str, Count] = Field({}, description="site → its test patients")
    level: Share = Field(description="how sure the intervals are, 0.95")
    against: Text | None = Field(None, description="the row that all are compared with")
    single: list[str] = Field(
        [], description="sites whose test cases are all one patient's: their own intervals are for other seeds alone"
    )
    headline: str = Field(description="the answer to the first question in words")
    between: str = Field("", description="which methods are better than the row that all are compared with, in words")
    first: PairedDifference | None = Field(
        None,
        description="the first question, declared before: the row that all are compared with, minus training alone; "
        "`null` without either",
    )
    declared: Text | None = Field(None, description="the row of which this is asked; `null`: every federation is")
    gains: dict[str, HospitalGain] = Field({}, description="site → the verdict on joining, see below")
    rows: list[VerdictRow] = Field(description="the rows, see below")
    about: About = Field(description="`title`, `command`, `machine`, `cells`, `failures`")
    runs: list[RunOfRow] = Field(
        description="`row`, `seed`, folder (`run`) and, if there are folds, `fold` of each finished run"
    )

    @property
    def other_networks(self) -> list[str]:
        """Return for each federated configuration with another network that its difference may be the network's."""
        return [
            f"{row.title} differs from {row.against} in more than the method: {row.unlike}."
            for row in self.rows
            if row.unlike and row.method not in REFERENCES
        ]

    @property
    def holds_for(self) -> str:
        """Return for whom the intervals are, in words: patients count only where a site tests several."""
        if not self.single:
            return f"other patients and {AGAIN} (whole patients count)"
        if self.single == self.sites:
            return f"other people and {AGAIN} (a site is one person); at one site for these alone, so nothing is sure"
        return f"other patients and {AGAIN}, at {', '.join(self.single)} for these alone (one patient each)"


def read_verdict(folder: Path) -> Verdict:
    """Read a comparison's verdict.json."""
    if not (folder / paths.VERDICT).is_file():
        raise MedsiloError(f"{folder.name} holds no {paths.VERDICT}: run medsilo compare with --out {folder}")
    return read_versioned(Verdict, folder, paths.VERDICT, "comparison")
