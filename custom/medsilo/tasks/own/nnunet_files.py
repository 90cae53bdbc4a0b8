"""A hospital's data in nnU-Net's own layout: which cases there are, and with which class nnU-Net reads them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast, get_args

from medsilo.core.errors import DataError, MedsiloError
from medsilo.models.nnunet_network import needing_nnunet
from medsilo.tasks.own.nnunet_plans_file import Reader
from medsilo.tasks.own.question import SegmentationQuestion

SETTINGS = "dataset.json"


@dataclass(frozen=True)
class RawCase:
    """The files of one case."""

    images: tuple[Path, ...]  # one per channel
    label: Path


@dataclass(frozen=True)
class RawData:
    """A folder with dataset.json, imagesTr (<case>_0000.nii.gz for the first channel, ...) and labelsTr."""

    folder: Path
    reader: Reader  # nnU-Net's class that reads the files
    cases: Mapping[str, RawCase]

    @classmethod
    def of(cls, folder: Path, question: SegmentationQuestion) -> Self:
        """Look through a folder; raises DataError where it does not hold what the study is about."""
        try:
            settings = json.loads((folder / SETTINGS).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"the data folder has no {SETTINGS} of nnU-Net's that can be read", str(error)) from error
        question.check(settings)
        ending = settings.get("file_ending")
        if not isinstance(ending, str) or not ending.startswith("."):
            raise DataError(f"{SETTINGS} names no file_ending; add it, for example .nii.gz")
        cases = dict(_cases(folder, ending, len(question.channels)))
        if not cases:
            raise DataError(f"labelsTr has no file *{ending}; put each case's labels there")
        return cls(folder, _reader(settings, cases), cases)


def _cases(folder: Path, ending: str, channels: int) -> Iterator[tuple[str, RawCase]]:
    for label in sorted((folder / "labelsTr").glob(f"*{ending}")):
        name = label.name.removesuffix(ending)
        images = tuple(folder / "imagesTr" / f"{name}_{channel:04}{ending}" for channel in range(channels))
        if absent := [image.name for image in images if not image.is_file()]:
            raise DataError("a case lacks an image of a channel in imagesTr; add it", ", ".join(absent))
        yield name, RawCase(images, label)


def _reader(settings: Mapping[str, Any], cases: Mapping[str, RawCase]) -> Reader:
    """Return the name of the class that nnU-Net chooses for these files."""
    with needing_nnunet():
        from nnunetv2.imageio.reader_writer_registry import determine_reader_writer_from_dataset_json

    example = next(iter(cases.values())).images[0]
    try:
        reader = determine_reader_writer_from_dataset_json(dict(settings), str(example), verbose=False)
    except RuntimeError as error:
        raise MedsiloError("nnU-Net has no reader for these images; check file_ending", str(error)) from error
    name = str(reader.__name__)
    if name not in get_args(Reader):
        raise DataError(f"nnU-Net reads these files with {name}; plans know {', '.join(get_args(Reader))}")
    return cast(Reader, name)
