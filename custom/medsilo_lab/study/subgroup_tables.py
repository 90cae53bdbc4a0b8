"""Data classes for the scores of subgroups of patients, which pages, JSON and Python share."""

from pydantic import AliasChoices, Field

from medsilo.runs.fields import Count, Difference, RecordPart, Share, Text
from medsilo.runs.fields import Score as Number
from medsilo.runs.score import Score


class SubgroupPair(RecordPart):
    """A difference between two levels of a subgroup, or between two configurations in one level."""

    first: Text = Field(description="the level or configuration from whose score the score of `second` is subtracted")
    second: Text = Field(description="the level or configuration whose score is subtracted from the score of `first`")
    mean: Difference = Field(description="the difference")
    low: Difference = Field(
        description=("lower end of the 95 % interval, corrected for all differences between subgroups (Holm)")
    )
    high: Difference = Field(
        description="upper end of the 95 % interval, corrected for all differences between subgroups (Holm)"
    )
    adjusted: Share = Field(description="p-value after Holm's correction")
    sure: bool = Field(
        strict=True,
        description=("whether the difference is significant, which means that the corrected interval excludes zero"),
    )


class SubgroupLevel(RecordPart):
    level: Text = Field(description="name of the level")
    patients: Count = Field(0, description="number of test patients with this level")
    hospitals: Count = Field(0, description="number of hospitals that disclose this level")
    score: Score = Field(
        description=(
            "score over the patients with this level at all hospitals; `suppressed` if too few patients have "
            "this level, or too few have another level"
        )
    )
    low: Number | None = Field(None, description="lower end of the 95 % interval of the score")
    high: Number | None = Field(None, description="upper end of the 95 % interval of the score")
    few: bool = Field(
        False, strict=True, description=("whether the level has too few patients for a significant difference")
    )
    difference: SubgroupPair | None = Field(
        None,
        validation_alias=AliasChoices("difference", "gain"),
        description="in a comparison: the score minus the score of the baseline",
    )


class SubgroupTable(RecordPart):
    subgroup: Text = Field(
        description=(
            "name of the subgroup, such as `sex`, as data sets declare it; `hospital` if the levels are the hospitals"
        )
    )
    row: Text = Field("", description="in a comparison: the configuration to which the subgroup's scores belong")
    baseline: Text = Field(
        "",
        validation_alias=AliasChoices("baseline", "against"),
        description="in a comparison: the baseline for the differences",
    )
    levels: list[SubgroupLevel] = Field(description="levels of the subgroup")
    pairs: list[SubgroupPair] = Field([], description="differences between levels")
