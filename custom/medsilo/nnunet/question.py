"""The question of a study of nnU-Net's: channels and labels, on which all hospitals agree before they measure."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from medsilo.core.errors import DataError
from medsilo.core.section import Section

Named = Annotated[str, Field(min_length=1, max_length=100)]
Label = Annotated[int, Field(ge=0, le=65_535)]


class Question(Section):
    """Name, channels and labels as nnU-Net's dataset.json names them."""

    name: str = Field(pattern=r"^Dataset\d{3}_[A-Za-z0-9_-]{1,60}$", description="nnU-Net's name of the data set")
    channels: tuple[Named, ...] = Field(
        min_length=1, max_length=32, description="names of the channels in order; `CT` is scaled as nnU-Net scales CT"
    )
    labels: dict[Named, Label | tuple[Label, ...]] = Field(
        min_length=2, max_length=256, description="the value of each label; several values make a region"
    )
    regions_class_order: tuple[Label, ...] | None = Field(
        None, max_length=256, description="with regions: the value that each is written with, in order"
    )

    def in_nnunet(self) -> dict[str, Any]:
        """Return it in the words of dataset.json."""
        words = {
            "channel_names": {str(number): name for number, name in enumerate(self.channels)},
            "labels": {name: list(label) if isinstance(label, tuple) else label for name, label in self.labels.items()},
        }
        return (
            words
            if self.regions_class_order is None
            else words | {"regions_class_order": list(self.regions_class_order)}
        )

    def check(self, settings: Any) -> None:
        """Raise DataError unless a dataset.json asks the same question."""
        if not isinstance(settings, Mapping):
            raise DataError("dataset.json is not a mapping; see nnU-Net's dataset format")
        for key, wanted in self.in_nnunet().items():
            if settings.get(key) != wanted:
                raise DataError(f"{key} in dataset.json differs from the study's; the study has {wanted}")
