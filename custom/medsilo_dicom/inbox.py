"""A folder for DICOM objects that come from elsewhere: bounded, and no name in it is theirs."""

import hashlib
import re
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from threading import Lock

from medsilo.extend import DataError, Full, headers, write_bytes
from medsilo_dicom.header import SEGMENTATIONS, SLICES, STRUCTURES, library

UID = re.compile(r"[0-2](\.(0|[1-9][0-9]*))+")
LONGEST = 64
KINDS = (*SLICES, *SEGMENTATIONS, STRUCTURES)


def is_uid(text: str) -> bool:
    """Return whether a text is a unique identifier as the standard writes it."""
    return len(text) <= LONGEST and UID.fullmatch(text) is not None


@dataclass
class Inbox:
    """The folder. quota: bytes that all its files may take; largest: bytes of one object; only: studies, or any."""

    folder: Path
    quota: int
    largest: int
    only: frozenset[str] = frozenset()
    kept: int = 0  # objects that came
    refused: int = 0
    _taken: int = field(init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._taken = sum(path.stat().st_size for path in self.folder.rglob("*.dcm"))

    def keep(self, content: bytes) -> Path:
        """Check an object and write it whole, or raise a DataError; return where it is."""
        try:
            if len(content) > self.largest:
                raise Full("an object is larger than --largest allows")
            place = self.folder / _name(content, self.only)
            with self._lock:
                self._write(place, content)
        except DataError:
            self.refused += 1
            raise
        self.kept += 1
        return place

    def _write(self, place: Path, content: bytes) -> None:
        if place.exists():
            if place.read_bytes() != content:
                raise DataError("another object of the same UID is there already; the first one stays")
            return
        if self._taken + len(content) > self.quota:
            raise Full("the folder has taken what --quota allows")
        write_bytes(place, content)
        self._taken += len(content)


def _name(content: bytes, only: frozenset[str]) -> Path:
    """Return a name made of hashes of an object's UIDs."""
    names = ("SOPClassUID", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
    try:
        headers.tags_in(content)
        elements = library().dcmread(BytesIO(content), stop_before_pixels=True, specific_tags=names)
        kind, *uids = (str(elements.get(name) or "") for name in names)
    except Exception as error:  # pydicom raises anything over damaged files
        raise DataError("an object is no whole DICOM file", str(error)) from error
    if kind not in KINDS:
        raise DataError("an object is neither a slice of CT, MR or PET nor a segmentation nor contours", kind)
    if not all(map(is_uid, uids)):
        raise DataError("an object has a UID that is none")
    if only and uids[0] not in only:
        raise DataError("an object is of a study that was not asked for")
    study, series, instance = (hashlib.sha256(uid.encode()).hexdigest()[:32] for uid in uids)
    return Path(study[:16], series[:16], f"{instance}.dcm")
