"""Find the images and masks that nnU-Net reads at a hospital."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast, get_args

from medsilo.extend import CaseIndex, DataError, DataSource, MedsiloError
from medsilo_nnunet import NEEDED
from medsilo_nnunet.nnunet_network import Reader
from medsilo_nnunet.question import SegmentationQuestion

SETTINGS = "dataset.json"


@dataclass(frozen=True)
class RawData:
    """The cases of a data folder, which has nnU-Net's layout or the layout that the site's settings describe."""

    listing: CaseIndex
    reader: Reader

    @classmethod
    def of(cls, folder: Path, question: SegmentationQuestion, source: DataSource | None = None) -> Self:
        """Find the cases in a folder; raise DataError if the folder does not contain data for the study's question.

        If the settings name no files, the folder must have nnU-Net's layout: dataset.json, imagesTr (<case>_0000.nii.gz
        for the first channel, ...) and labelsTr.
        """
        source = source or DataSource(folder=folder)
        settings: Mapping[str, Any] = {}
        if (folder / SETTINGS).is_file() and not (source.images or source.labels or source.table):
            settings = _settings(folder, question)
            source = source.model_copy(update=_in_layout(settings, len(question.channels)))
        if source.label_map:
            raise DataError("data.label_map: nnU-Net reads masks as they are; write them with the question's labels")
        listing = CaseIndex.of_cases(source, folder, masks=True)
        if any(len(entry.images) != len(question.channels) for entry in listing.entries):
            given = f"the study has {len(question.channels)} channels ({', '.join(question.channels)})"
            raise DataError(f"{given}; give a pattern in data.images for each, or a column of the table")
        return cls(listing, _reader(settings, listing))

    @property
    def most_of_a_patient(self) -> int:
        return max(Counter(entry.patient for entry in self.listing.usable).values())


def _settings(folder: Path, question: SegmentationQuestion) -> Mapping[str, Any]:
    try:
        settings = json.loads((folder / SETTINGS).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the data folder has no readable {SETTINGS} in nnU-Net's format", str(error)) from error
    question.check(settings)
    return cast(Mapping[str, Any], settings)


def _in_layout(settings: Mapping[str, Any], channels: int) -> dict[str, Any]:
    ending = settings.get("file_ending")
    if not isinstance(ending, str) or not ending.startswith("."):
        raise DataError(f"{SETTINGS} names no file_ending; add it, for example .nii.gz")
    images = tuple(f"imagesTr/*_{channel:04}{ending}" for channel in range(channels))
    return {"images": images, "labels": f"labelsTr/*{ending}"}


def _reader(settings: Mapping[str, Any], listing: CaseIndex) -> Reader:
    """Return the name of nnU-Net's reader class for these files, which must all have the same type."""
    with MedsiloError.needing(NEEDED):
        from nnunetv2.imageio.reader_writer_registry import determine_reader_writer_from_dataset_json

    files = [path for entry in listing.entries for path in (*entry.images, entry.label) if isinstance(path, Path)]
    endings = {"".join(path.suffixes[-2:]) if path.name.lower().endswith(".nii.gz") else path.suffix for path in files}
    if len(endings) > 1:
        raise DataError(
            f"nnU-Net needs files of a single type, and the folder has {', '.join(sorted(endings))}; convert them"
        )
    if not files:
        raise DataError("no mask has the name of an image; put masks into labels/, or labelsTr/ in nnU-Net's layout")
    stated = {"file_ending": endings.pop(), **settings}
    try:
        reader = determine_reader_writer_from_dataset_json(stated, str(files[0]), verbose=False)
    except RuntimeError as error:
        raise MedsiloError("nnU-Net has no reader for these images; check file_ending", str(error)) from error
    name = str(reader.__name__)
    if name not in get_args(Reader):
        raise DataError(f"nnU-Net reads these files with {name}; medsilo supports {', '.join(get_args(Reader))}")
    return cast(Reader, name)
