"""The question of a study of nnU-Net's: channels and labels, on which all hospitals agree before they measure."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from medsilo.core.errors import DataError, MedsiloError, YamlError
from medsilo.core.files import load_yaml, why_unread
from medsilo.core.section import Section, checked, in_words

Named = Annotated[str, Field(min_length=1, max_length=100)]
Label = Annotated[int, Field(ge=0, le=65_535)]


class SegmentationQuestion(Section):
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

    def in_yaml(self) -> str:
        """Return the file on which hospitals agree."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @property
    def hash(self) -> str:
        """SHA-256 of the question."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def check(self, settings: Any) -> None:
        """Raise DataError unless a dataset.json asks the same question."""
        if not isinstance(settings, Mapping):
            raise DataError("dataset.json is not a mapping; see nnU-Net's dataset format")
        for key, wanted in self.in_nnunet().items():
            if settings.get(key) != wanted:
                raise DataError(f"{key} in dataset.json differs from the study's; the study has {wanted}")


def read_question(path: Path) -> SegmentationQuestion:
    """Read the file on which a study's hospitals have agreed."""
    try:
        return checked(SegmentationQuestion, load_yaml(path.read_text("utf-8")), path.name)
    except YamlError as error:
        raise MedsiloError(f"{path.name}: {error}; correct it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise MedsiloError(f"{path.name}: {why_unread(error, 'the question of the study')}") from error
    except ValidationError as error:
        raise MedsiloError(f"{path.name}: {in_words(error, SegmentationQuestion)}") from error
