"""Read the names of channels and structures from dataset.json, in the formats of nnU-Net and the Medical Segmentation
Decathlon.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medsilo.core.errors import DataError
from medsilo.core.files import read_bounded
from medsilo.core.text import latin

FILE = "dataset.json"
LARGEST = 1 << 24  # maximum size of dataset.json in bytes; the Decathlon's files list every case


class _DatasetFile(BaseModel):
    model_config = ConfigDict(extra="ignore")

    labels: dict[str, Any] = Field(max_length=1000)
    channel_names: dict[str, str] | list[str] = Field([], max_length=100)
    modality: dict[str, str] | list[str] = Field([], max_length=100)


@dataclass(frozen=True)
class DatasetNames:
    channels: tuple[str, ...]
    structures: tuple[tuple[int, str], ...]


def dataset_names(files: Mapping[str, Path]) -> DatasetNames | None:
    """Read the names of channels and structures from the dataset.json of a folder, or of each hospital's subfolder.
    Return None if there is no dataset.json.

    If one name in dataset.json stands for several mask values, all names of mask values are ignored.
    """
    found = {_read(path) for name, path in files.items() if name.count("/") < 2 and Path(name).name == FILE}
    if len(found) > 1:
        raise DataError(f"hospitals have {FILE} with different names; use the same names in all, or remove the files")
    return found.pop() if found else None


def _read(path: Path) -> DatasetNames:
    try:
        file = _DatasetFile.model_validate_json(read_bounded(path, LARGEST))
    except (OSError, ValueError, ValidationError) as error:
        raise DataError(f"{FILE} can't be read; correct or remove it", f"{path}: {error}") from error
    named = file.channel_names or file.modality
    pairs = named.items() if isinstance(named, dict) else enumerate(named)
    ordered = sorted(pairs, key=lambda pair: int(pair[0]) if str(pair[0]).isdecimal() else 0)
    channels = tuple(latin(name).lower() for _, name in ordered)
    by_value = {value: name for name, value in file.labels.items() if isinstance(value, int)} or {
        int(value): name for value, name in file.labels.items() if value.isdecimal() and isinstance(name, str)
    }
    whole = len(by_value) == len(file.labels)
    structures = tuple(sorted((value, latin(name)) for value, name in by_value.items() if value)) if whole else ()
    return DatasetNames(channels, structures)
