"""Inspect DICOM studies from an archive. Propose a plan, and settings with which a hospital reads the studies."""

import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np

from medsilo.core.errors import DataError
from medsilo.tasks.case_index import CaseIndex
from medsilo.tasks.scans import Scan
from medsilo.tasks.sources import DataSource
from medsilo_dicom.dicom_folder import REST, DicomFolder, mask_of_series
from medsilo_dicom.dicom_masks import OVERLAP
from medsilo_dicom.header import Header, Tree, as_compared, library, read_tree
from medsilo_dicom.series import read_again, scan_of_series
from medsilo_lab.start.dataset_layout import DatasetLayout

# minimum number of patients in a hospital's folder, and minimum number of studies that contain a structure
LEAST = 3
TRIED = 2  # number of studies of each hospital that are checked for overlapping structures
OFTEN = 0.5  # a structure is learned only if at least this fraction of a hospital's studies contain the structure
# names of structures that contain other structures
OUTLINES = {"body", "external", "skin", "patient", "outline", "couch", "couchsurface"}
KIND = "DICOM series, with segmentations or contours that refer to them"
Files = tuple[tuple[Path, ...], Path | str]


def look(folder: DatasetLayout) -> DatasetLayout | None:
    """Propose a plan for a folder of studies, or return None if the folder has no segmentations and contours."""
    tree, names = read_tree(folder.files.values()), {path: name for name, path in folder.files.items()}
    if not tree.annotations:
        return None
    if not tree.images:
        raise DataError("the folder has segmentations or contours without their image series; export the series, too")
    tops = _hospitals(tree, names, folder.hospitals)
    source = DataSource.model_validate({"folder": folder.path})
    task = DicomFolder.model_validate({"labels": ["structure"], "modalities": ["image"]})
    sites = folder.sites_of(tops) if folder.hospitals else {top: top for top in tops}
    parts = {site: _of(tree, names, top) for site, top in sites.items()} or {"": tree}
    listings = {site: task.listed(part, names, source) for site, part in parts.items()}
    if not any(listing.entries for listing in listings.values()):
        faults = [
            problem.counted for own in listings.values() for problem in own.problems if problem.severity != "note"
        ]
        raise DataError(f"no study can be used: {'; '.join(dict.fromkeys(faults))}")
    labels, label_map, counts = _structures(listings)
    seen = partial(_opened, [own.lower() for own in label_map])
    said = ", ".join(f"{name} {counts[name]}" for name in labels)
    rest = {REST: "background"} if len(counts) > len(labels) else {}
    told = f"structures in the files: names in the plan{'; what is rare or lies over these is background' * bool(rest)}"
    plan = {"task.labels": (labels, f"as the files name them, and how many studies have each: {said}")}
    settings = {"data.label_map": (label_map | rest, told)}
    return folder.choose_for_images("dicom-folder", KIND, source, listings, seen, plan, settings, tops)


def _top(headers: list[Header], names: Mapping[Path, str]) -> str:
    return names[headers[0].path].partition("/")[0]


def _hospitals(tree: Tree, names: Mapping[Path, str], told: bool) -> tuple[str, ...]:
    """Return the subfolders, if each subfolder contains the studies of one hospital. Each subfolder must have several
    patients, and no patient may be in two subfolders. If the user has said that hospitals number their patients
    separately, the same patient number may occur in two subfolders.
    """
    patients: dict[str, set[str]] = {}
    for headers in tree.images.values():
        patients.setdefault(_top(headers, names), set()).add(headers[0].patient)
    apart = sum(map(len, patients.values())) == len(set().union(*patients.values()))
    if len(patients) < 2 or not (told or (apart and min(map(len, patients.values())) >= LEAST)):
        return ()
    return tuple(sorted(patients))


def _of(tree: Tree, names: Mapping[Path, str], top: str) -> Tree:
    images = {series: image for series, image in tree.images.items() if _top(image, names) == top}
    return Tree(images, {series: annotation for series, annotation in tree.annotations.items() if series in images})


def _structures(listings: Mapping[str, CaseIndex]) -> tuple[list[str], dict[str, str], Counter[str]]:
    counts, often = Counter[str](), set[str]()
    called: dict[str, str] = {}
    for listing in listings.values():
        own = Counter(name.lower() for entry in listing.entries for name in _named(Path(entry.label or ""), called))
        often |= {name for name, count in own.items() if count >= max(LEAST, OFTEN * len(listing.entries))}
        counts += own
    some = [(one.images, one.label) for listing in listings.values() for one in listing.entries[:TRIED]]
    learned = _apart(sorted(often - OUTLINES, key=lambda name: (-counts[name], name)), some)
    if not learned:
        raise DataError(
            f"no structure is in half of a hospital's studies and in at least {LEAST} studies; "
            "write the plan by hand (medsilo docs start/dicom)"
        )
    names = {called[name]: re.sub(r"[^A-Za-z0-9._+ -]+ *", "-", called[name]).strip("-._+ ")[:63] for name in learned}
    if len(set(names.values())) < len(names) or not all(names.values()):
        raise DataError(
            "structures have names that differ in punctuation only; write the plan by hand (medsilo docs start/dicom)"
        )
    own_counts = Counter({names.get(called[name], called[name]): count for name, count in counts.items()})
    return list(names.values()), names, own_counts


def _apart(names: list[str], some: list[Files]) -> list[str]:
    """Return the names of structures, and leave out each structure that overlaps an earlier structure. For example, a
    target volume overlaps the tumour inside the target volume.
    """
    if not any(_overlap(names, one) for one in some):
        return names
    kept: list[str] = []
    for name in names:
        if not any(_overlap([*kept, name], one) for one in some):
            kept.append(name)
    return kept


def _opened(names: list[str], files: tuple[Path, ...], label: Path | str) -> tuple[Scan, np.ndarray]:
    """Read a series, and the mask of the series from a segmentation file or a contour file. The structures in `names`
    get the labels 1, 2, and so on, in the order of `names`.
    """
    scan = scan_of_series(read_again(files))
    numbered = {name: number for number, name in enumerate(names, 1)} | {REST: 0}
    return scan, mask_of_series(numbered, scan, Path(label or ""))


def _overlap(names: list[str], files: Files) -> bool:
    try:
        _opened(names, *files)
    # other faults than overlapping structures are ignored here, because reading the case reports these faults
    except DataError as error:
        return str(error) == OVERLAP
    return False


def _named(path: Path, called: dict[str, str]) -> set[str]:
    try:
        # The whole DICOM file is read into memory first, so that a wrong length in its header cannot make pydicom
        # allocate too much memory.
        elements = library().dcmread(BytesIO(path.read_bytes()), stop_before_pixels=True)
        drawn = {int(one.ReferencedROINumber) for one in elements.get("ROIContourSequence") or ()}
        found = [str(one.SegmentLabel) for one in elements.get("SegmentSequence") or ()]
        found += [str(one.ROIName) for one in elements.get("StructureSetROISequence") or () if one.ROINumber in drawn]
    except Exception:  # pydicom can raise any error for damaged files, and reading the case reports the reason later
        return set()
    return {called.setdefault(name.lower(), name) for name in map(as_compared, found) if name}
