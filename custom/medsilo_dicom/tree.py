"""A folder with DICOM files in any nesting and under any name: which series lie there, and what belongs to them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from medsilo.extend import is_dicom
from medsilo_dicom.header import SEGMENTATIONS, SLICES, STRUCTURES, Header, read_headers


@dataclass
class Tree:
    """The series of a folder by their UIDs, and the files that can't be told to any."""

    images: dict[str, list[Header]] = field(default_factory=dict)
    annotations: dict[str, list[Header]] = field(default_factory=dict)  # of each series
    unreferenced: list[Path] = field(default_factory=list)  # annotations that name no series
    unreadable: list[Path] = field(default_factory=list)  # files that say they are DICOM, and nothing else


def read_tree(files: Iterable[Path]) -> Tree:
    """Read the headers of all DICOM files among these; others are passed over."""
    tree = Tree()
    images: defaultdict[str, list[Header]] = defaultdict(list)
    annotations: defaultdict[str, list[Header]] = defaultdict(list)
    for path in files:
        for header in _headers(path, tree):
            if header.kind in (*SEGMENTATIONS, STRUCTURES):
                for series in header.refers:
                    annotations[series].append(header)
                if not header.refers:
                    tree.unreferenced.append(path)
            else:
                images[header.series].append(header)
    # A study has other objects beside its images: reports, settings of viewers, dose maps.
    tree.images = {
        series: headers
        for series, headers in sorted(images.items())
        if series in annotations or any(one.kind in SLICES or _looks_like_images(one) for one in headers)
    }
    tree.annotations = dict(sorted(annotations.items()))
    return tree


def _headers(path: Path, tree: Tree) -> tuple[Header, ...]:
    try:
        if not is_dicom(path):
            return ()
        headers = read_headers(path)
    except OSError:
        headers = ()
    if not headers and not path.name.upper().startswith("DICOMDIR"):
        tree.unreadable.append(path)
    return headers


def _looks_like_images(header: Header) -> bool:
    """Return whether a file is an image of another class, which is told of and not passed over."""
    return header.kind.startswith("1.2.840.10008.5.1.4.1.1.") and not header.kind.startswith(OTHER_OBJECTS)


OTHER_OBJECTS = (  # presentation states, waveforms, registrations, reports, encapsulated documents, radiotherapy
    *(f"1.2.840.10008.5.1.4.1.1.{group}" for group in ("11.", "9.", "66.", "88.", "104.", "481.", "67", "68.")),
)
