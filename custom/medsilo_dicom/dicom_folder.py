"""Read a hospital's exported DICOM studies: series in any folders, with segmentations or contours."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from medsilo.extend import CaseIndex, DataError, DataSource, Inference, Scan, VolumeFolder
from medsilo_dicom.dicom_masks import mask_of_contours, mask_of_segmentation
from medsilo_dicom.header import STRUCTURES, Header, Tree, as_compared, library, read_headers, read_tree
from medsilo_dicom.series import ImageSeries, make_series, mask_as_scanned, read_again, scan_of_series

REST = "*"  # key in label_map for all structures that label_map does not name
UNREADABLE = "DICOM files are damaged, and their series is unknown; copy or export them again"
UNREFERENCED = "segmentations or contours name no series that they belong to"
ABSENT = "segmentations or contours belong to a series that is not in the folder"
SEVERAL = "series have several segmentations or sets of contours; keep one, or name it by data.labels"
UNLABELLED = "series have no label: no segmentation and no contours refer to them"
DAMAGED = "segmentations or contours are damaged; copy or export them again"
NOBODY = "series have no PatientID, so that one patient's might train and test; give one (a pseudonym) or data.patient"
NO_FRAME = "series have no frame of reference, as de-identifiers leave them; look whether labels lie where they should"
IDENTIFIED = "series have headers that identify a patient; training keeps no header, and none leaves"


class DicomFolder(VolumeFolder):
    """A folder of DICOM files with any names, in any subfolders.

    Labels are DICOM segmentations (SEG) or contours (RTSTRUCT).

    The files of a series form one volume, sorted by their position in space. In classification, the class is the name
    of the top folder. A series is left out if its slices form no volume, for example because a slice is missing. In a
    segmentation task, a series is left out unless exactly one file contains a mask of the series.
    """

    title: ClassVar[str] = "A hospital's own DICOM studies: segmentation or classification, 3-D or slices"

    name: Literal["dicom-folder"] = "dicom-folder"

    @model_validator(mode="after")
    def _one_series(self) -> Self:
        if len(self.modalities) > 1:
            raise ValueError(f"modalities {list(self.modalities)}: a case is one series; name one modality")
        return self

    def across_patients(self) -> str:
        return super().across_patients()

    def check_source(self, source: DataSource | None) -> None:
        super().check_source(source)
        library()

    @property
    def use(self) -> Inference:
        return Inference("dicom", self.inputs_of, self.in_monai())

    def scan_of(self, files: tuple[Path, ...]) -> Scan:
        return scan_of_series(read_again(files))

    def mask_reader(self, source: DataSource) -> Callable[[Scan, Path], np.ndarray]:
        return partial(mask_of_series, _structures(self, source))

    def mask_values(self, source: DataSource) -> dict[int, int]:
        return {number: number for number in range(self.goal.classes)} if self.segments else {}

    def listing_of(self, source: DataSource, folder: Path) -> CaseIndex:
        if source.table or not (source.images is None or isinstance(source.images, str)):
            raise DataError(
                "task dicom-folder reads one channel and no table; give data.images as one pattern, or leave "
                "data.images out"
            )
        files, problems = CaseIndex.files_below(folder)
        listing = self.listed(read_tree(files.values()), {path: name for name, path in files.items()}, source)
        listing.problems += problems
        return listing

    def listed(self, tree: Tree, names: Mapping[Path, str], source: DataSource) -> CaseIndex:
        listing = CaseIndex()
        if not tree.images:
            listing.add("left out", UNREADABLE, [names[path] for path in tree.unreadable])
            raise DataError("no DICOM series of images in the data folder; correct 'data' in the site's medsilo.yaml")
        _narrow(tree, names, source)
        listing.add("left out", UNREADABLE, [names[path] for path in tree.unreadable])
        listing.add("note", UNREFERENCED, [names[path] for path in tree.unreferenced])
        for series, headers in tree.images.items():
            self._add(listing, names, headers, tree.annotations.get(series, []), source)
        absent = [series for series in tree.annotations if series not in tree.images]
        listing.add("note", ABSENT, [names[one.path] for series in absent for one in tree.annotations[series]])
        _tell_identifiers(listing, tree, names)
        if source.patient is not None:
            listing.tell_patients(source)
        return listing.ordered(source)

    def _add(
        self,
        listing: CaseIndex,
        names: Mapping[Path, str],
        headers: list[Header],
        annotations: list[Header],
        source: DataSource,
    ) -> None:
        place = Path(names[headers[0].path]).parent
        name = f"{place.as_posix()} {headers[0].series}"
        try:
            if self.segments and len(annotations) != 1:
                raise DataError(SEVERAL if annotations else UNLABELLED)
            series = make_series(headers)
            if self.segments and annotations[0].wrong:
                raise DataError(DAMAGED, str(annotations[0].path))
            if not headers[0].patient and source.patient is None:
                raise DataError(NOBODY)
        except DataError as error:
            listing.add("left out", str(error), [f"{name} {error.private}".strip()])
            return
        label: Path | str = annotations[0].path if self.segments else place.parts[0] if place.parts else ""
        if not series.frame_of_reference:
            listing.add("note", NO_FRAME, [name])
        listing.take(name, series.files, label, headers[0].patient)


def _narrow(tree: Tree, names: Mapping[Path, str], source: DataSource) -> None:
    def kept(pattern: str | None, headers: Mapping[str, list[Header]]) -> dict[str, list[Header]]:
        fits = source.expression(pattern).fullmatch if pattern else lambda name: True
        several = {series: [one for one in header if fits(names[one.path])] for series, header in headers.items()}
        return {series: own for series, own in several.items() if own}

    assert source.images is None or isinstance(source.images, str)
    tree.images, tree.annotations = kept(source.images, tree.images), kept(source.labels, tree.annotations)
    if not tree.images:
        raise DataError("no DICOM series fits data.images; correct it", private=str(source.images))


def _tell_identifiers(listing: CaseIndex, tree: Tree, names: Mapping[Path, str]) -> None:
    counted: Counter[str] = Counter()
    for headers in tree.images.values():
        counted.update(set().union(*(header.identifiers for header in headers)))
    listing.identifiers = dict(sorted(counted.items()))
    several = [image for image in tree.images.values() if any(header.identifiers for header in image)]
    listing.add("note", IDENTIFIED, [names[headers[0].path] for headers in several])


def _structures(task: DicomFolder, source: DataSource) -> dict[str, int]:
    if not task.segments:
        return {}
    own = {name.lower(): number for number, name in enumerate(task.goal.label_names)}
    return own | {as_compared(str(name)).lower(): task.number_of(label) for name, label in source.label_map.items()}


def mask_of_series(structures: Mapping[str, int], scan: Scan, path: Path) -> np.ndarray:
    """Read the mask of a series from a segmentation or contour file. `structures` maps the lower-case names of
    structures to labels.
    """
    series: ImageSeries = scan.source
    headers = read_headers(path)
    if not headers or headers[0].wrong:
        raise DataError(DAMAGED, str(path))
    read = mask_of_contours if headers[0].kind == STRUCTURES else mask_of_segmentation
    return mask_as_scanned(read(path, series, partial(_label_of, structures)), series)


def _label_of(structures: Mapping[str, int], name: str) -> int:
    own = structures.get(as_compared(name).lower(), structures.get(REST))
    if own is None:
        what = "structures have a name that is not in the plan; say in data.label_map what they are ('*': the rest)"
        raise DataError(what, private=name)
    return own
