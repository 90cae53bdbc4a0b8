"""Define a study's question for nnU-Net: the channels and labels on which all hospitals agree before they measure their
data.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from medsilo.extend import DataError, Section

Named = Annotated[str, Field(min_length=1, max_length=100)]
Label = Annotated[int, Field(ge=0, le=65_535)]


BACKGROUND, IGNORE = "background", "ignore"  # label names that nnU-Net reserves


def several(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size,)


class SegmentationQuestion(Section):
    """The name, channels and labels of a study, as in nnU-Net's dataset.json."""

    name: str = Field(pattern=r"^Dataset\d{3}_[A-Za-z0-9_-]{1,60}$", description="nnU-Net's name of the data set")
    channels: tuple[Named, ...] = Field(
        min_length=1,
        max_length=32,
        description="names of the channels in order; `CT` is normalised as nnU-Net normalises CT images",
    )
    labels: dict[Named, Label | tuple[Label, ...]] = Field(
        min_length=2,
        max_length=256,
        description="the value of each label in masks; a label with several values is a region",
    )
    regions_class_order: tuple[Label, ...] | None = Field(
        None,
        max_length=256,
        description="for regions: the label value of each region in a predicted mask, in the order in which regions "
        "are written",
    )

    @model_validator(mode="after")
    def _is_one_of_nnunets(self) -> Self:
        if IGNORE in self.labels:
            raise ValueError("labels: medsilo does not support nnU-Net's ignore label; leave such cases out")
        values = [label for own in self.labels.values() for label in several(own)]
        if self.labels.get(BACKGROUND) != 0 or set(values) != set(range(max(values) + 1)):
            raise ValueError("labels: give background: 0, and 1, 2, 3, ... without a gap")
        if not self.has_regions:
            if len(values) != len(set(values)) or self.regions_class_order is not None:
                raise ValueError(
                    "labels: two labels have the same value, or regions_class_order is given without a region"
                )
            return self
        regions, written = list(self.regions.values()), self.regions_class_order or ()
        if len(written) != len(regions) or len(set(written)) != len(written):
            raise ValueError("regions_class_order: give one value for each region, in order and without repetition")
        for place, (region, value) in enumerate(zip(regions, written, strict=True)):
            if value not in region or any(set(region) <= set(other) for other in regions[place + 1 :]):
                raise ValueError(
                    "regions_class_order: give each region one of its own values, after all regions around it"
                )
        return self

    @property
    def has_regions(self) -> bool:
        """True if the question's structures are regions, which may overlap; False if the structures are labels, which
        can't overlap.
        """
        return any(len(several(label)) > 1 for label in self.labels.values())

    @property
    def regions(self) -> dict[str, tuple[int, ...]]:
        return {name: several(label) for name, label in self.labels.items() if name != BACKGROUND}

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each label value 0, 1, ...; a value N without a name is called "label N"."""
        alone = {label: name for name, label in self.labels.items() if isinstance(label, int)}
        alone |= {region[0]: name for name, region in self.regions.items() if len(region) == 1}
        last = max(value for own in self.labels.values() for value in several(own))
        return tuple(alone.get(value, f"label {value}") for value in range(last + 1))

    def in_nnunet(self) -> dict[str, Any]:
        words: dict[str, Any] = {
            "channel_names": {str(number): name for number, name in enumerate(self.channels)},
            "labels": {name: list(label) if isinstance(label, tuple) else label for name, label in self.labels.items()},
        }
        if self.regions_class_order is not None:
            words["regions_class_order"] = list(self.regions_class_order)
        return words

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def check(self, settings: Any) -> None:
        """Raise DataError if the channels or labels in a dataset.json differ from this question."""
        if not isinstance(settings, Mapping):
            raise DataError("dataset.json is not a mapping; see nnU-Net's dataset format")
        for key, wanted in self.in_nnunet().items():
            if settings.get(key) != wanted:
                raise DataError(f"{key} in dataset.json differs from the study's; the study has {wanted}")


def read_question(path: Path) -> SegmentationQuestion:
    return SegmentationQuestion.in_file(path, path.name, "give the question of the study")
