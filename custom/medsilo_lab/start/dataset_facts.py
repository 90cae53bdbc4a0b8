"""Open a sample of images in a folder, and collect sizes, spacings, intensities, channels and mask values."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from medsilo.core.errors import DataError, MedsiloError
from medsilo.tasks.case_index import CaseIndex, Entry
from medsilo.tasks.scans import Scan
from medsilo.tasks.sources import DataSource
from medsilo_lab.start.folder_layout import FolderLayout, sites_of

MOST = 60  # maximum number of cases in the opened sample; each hospital in turn contributes a case
TAIL = (0.5, 99.5)
# maximum number of different values in a mask. In a mask with more values, each object has a separate value, or the
# file is no mask
MOST_VALUES = 50
LEAST_PATIENTS = 6  # minimum number of patients that a pattern must find in each hospital's file names
TELLING = (
    r"(.*?[^_/])(?:_\d+)+$",
    r"(.*[^_/])_\d+$",
    r"([^/]+)/[^/]+$",
    r"((?:.*/)?[^\d_/]*\d+)_[^\W\d_][^/]*$",
)  # patterns for a patient's name in file names
# words that precede a patient's number in a file name
SAYING = r"(?:.*/)?((?i:patient|pat|subject|subj|participant|proband|paciente|paziente)[-_ .]?\d+)$"
# pattern of a class folder, which is not part of a patient's name, because a patient may have several classes
CLASS = r"[^/]+/"


@dataclass(frozen=True)
class CaseFacts:
    size: tuple[int, ...]
    spacing: tuple[float, ...]
    channels: int
    kind: str
    low: float
    high: float
    # percentiles of the intensities inside the structures, or of all intensities if the mask has no structures
    tail: tuple[float, float]
    values: tuple[int, ...] = ()


Case = TypeVar("Case", Path, Entry)
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class DatasetFacts:
    """The properties of a folder: each hospital's numbers of patients and of cases, and the properties of a sample of
    cases.
    """

    layout: FolderLayout
    source: DataSource
    patients: dict[str, int]
    cases: dict[str, int]
    patients_of: dict[str, int]
    looked: tuple[CaseFacts, ...]
    left_out: dict[str, int]
    segments: bool
    # true if a table names the patient of each case; false if patients are only known from file names
    patients_known: bool = False

    @property
    def flat(self) -> bool:
        return len(self.looked[0].size) == 2

    @property
    def channels(self) -> int:
        """The number of channels. In a mixture of grey images and colour images, the number of channels of a colour
        image.
        """
        return max(look.channels for look in self.looked)

    def middle(self, axis: int) -> float:
        return float(np.median([look.size[axis] for look in self.looked]))

    def spaced(self, axis: int) -> float:
        return float(np.median([look.spacing[axis] for look in self.looked]))

    @property
    def summary(self) -> list[str]:
        kind, unit = ("flat images", "pixels") if self.flat else ("volumes", "voxels")
        task = "segmentation" if self.segments else "classification"
        cases, patients = sum(self.cases.values()), sum(self.patients.values())
        lines = [f"{task}: {cases} {kind} of {patients} patients ({self.layout.kind})"]
        if self.layout.hospitals:
            told = ", ".join(f"{site} {count}" for site, count in self.cases.items())
            lines.append(f"{len(self.layout.hospitals)} hospitals, each a folder: {told}")
        sizes = ranges([look.size for look in self.looked])
        spacing = "" if self.flat else f", {ranges([look.spacing for look in self.looked])} mm apart"
        lines.append(f"{len(self.looked)} {kind} were opened: {sizes} {unit}{spacing}")
        lines += [f"left out: {what} ({count})" for what, count in self.left_out.items()]
        if self.layout.unused:
            lines.append(f"not looked at: {', '.join(self.layout.unused)}")
        return lines


def ranges(rows: Sequence[Sequence[float]]) -> str:
    axes = []
    for axis in zip(*rows, strict=True):
        low, high = min(axis), max(axis)
        axes.append(f"{low:.4g}" if low == high else f"{low:.4g}-{high:.4g}")
    return " x ".join(axes)


def look_at(folder: Path, layout: FolderLayout) -> DatasetFacts:
    """Open a sample of the cases in a folder with a known layout; raise DataError if the cases are unusable."""
    patterns = {"images": layout.images or None, "labels": layout.labels if layout.images else None}
    source = DataSource.model_validate({"folder": folder, **(layout.table.described() if layout.table else patterns)})
    segments = layout.labels is not None or (layout.by_table and _names_files(source, folder, layout))
    places = {site: folder / top for site, top in sites_of(layout.hospitals, layout.told).items()} or {"": folder}
    listings = {site: CaseIndex.of_cases(source, place, segments) for site, place in places.items()}
    for listing in listings.values():
        listing.refuse_unusable()
    names = {site: [entry.name for entry in own.entries] for site, own in listings.items()}
    if layout.images and (patient := patient_in(names, bool(layout.classes))):
        source = source.model_copy(update={"patient": patient})
        listings = {site: CaseIndex.of_cases(source, place, segments) for site, place in places.items()}
    return facts_of_cases(layout, source, listings, segments)


def facts_of_cases(
    layout: FolderLayout, source: DataSource, listings: Mapping[str, CaseIndex], segments: bool
) -> "DatasetFacts":
    """Open a sample of the hospitals' cases, and return the properties of the folder; raise DataError if the cases are
    unusable.
    """
    facts = dataset_facts_of(layout, source, listings, _look, segments)
    _refuse_labels(facts)
    return facts


def dataset_facts_of(
    layout: FolderLayout,
    source: DataSource,
    listings: Mapping[str, CaseIndex],
    look: Callable[[Entry], CaseFacts],
    segments: bool,
) -> DatasetFacts:
    """Open a sample of the hospitals' cases with the function `look`, and return the properties of the folder. If the
    folder belongs to a single hospital, `listings` has the single key "".
    """
    entries = {site: listing.entries for site, listing in listings.items()}
    left_out = {site: own.left_out for site, own in listings.items()}
    looked, wrong = opened(entries, lambda entry: (look(entry), entry.name), left_out)
    _refuse_mixtures(looked)
    every = [(site, entry) for site, own in listings.items() for entry in own.entries]
    labels = Counter(label for _, _, label in {(site, entry.patient, str(entry.label)) for site, entry in every})
    return DatasetFacts(
        layout,
        source,
        {site: len({entry.patient for entry in own.entries}) for site, own in listings.items()},
        {site: len(own.entries) for site, own in listings.items()},
        {} if segments else dict(sorted(labels.items())),
        tuple(look for look, _ in looked),
        dict(wrong),
        segments,
        layout.by_table and (layout.table is None or layout.table.patient is not None),
    )


def _names_files(source: DataSource, folder: Path, layout: FolderLayout) -> bool:
    place = folder / layout.hospitals[0] if layout.hospitals else folder
    entries = CaseIndex.of_cases(source, place, masks=False).entries
    return bool(entries) and all((place / str(entry.label)).is_file() for entry in entries)


def names_patients(names: Iterable[str]) -> bool:
    """Return True if each name contains a patient's name, such as patient-07."""
    return all(re.search(f"^{SAYING}", name) for name in names)


def patient_in(names: Mapping[str, Sequence[str]], classes: bool = False) -> str | None:
    """Return a regular expression that finds the patient in the names of cases, or None if every case may be from a
    different patient.

    `names` contains the names of each hospital's cases. If `classes` is true, each name of a case begins with the name
    of a class folder.

    Expressions that find few patients are tried first, because merging two patients costs little, but splitting a
    patient inflates the test score.
    """
    for telling in (SAYING, *TELLING):
        expression = f"^{CLASS if classes else ''}{telling}"
        fits = {site: [re.search(expression, name) for name in own] for site, own in names.items()}
        if not all(match for fit in fits.values() for match in fit):
            continue
        patients = {site: len({match[1] for match in own if match}) for site, own in fits.items()}
        several = telling == SAYING or sum(map(len, names.values())) > sum(patients.values())
        asked = [count for site, count in patients.items() if len(names[site]) >= LEAST_PATIENTS]
        if several and min(asked, default=0) >= LEAST_PATIENTS:
            return expression
    return None


# ---------------------------------------------------------------------------------------------------- images
def opened(
    cases: Mapping[str, Sequence[Case]],
    look: Callable[[Case], Seen],
    left_out: Mapping[str, Mapping[str, int]] | None = None,
) -> tuple[list[Seen], Counter[str]]:
    """Open a sample of each hospital's cases with the function `look`; raise DataError if no case is usable. Return the
    results of the function `look`, and for each reason the number of cases that were omitted for this reason.

    Args:
        look: opens a case, or raises DataError
        left_out: for each hospital, the number of cases that were omitted earlier, by reason
    """
    total = sum(map(len, cases.values()))
    looked, wrong, names = list[Seen](), Counter[str](), list[str]()
    for site, own in cases.items():
        wrong.update((left_out or {}).get(site, {}))
        share = max(1, MOST * len(own) // total) if total else 0
        places = np.unique(np.linspace(0, len(own) - 1, min(share, len(own))).astype(int))
        for case in (own[place] for place in places):
            try:
                looked.append(look(case))
            except MedsiloError as error:
                wrong[str(error)] += 1
                names.append(f"{site}/{case.name}".lstrip("/"))
    if not looked:
        why = "; ".join(f"{what} ({count})" for what, count in wrong.items()) or "there is none"
        raise DataError(f"no case can be used: {why}", private=", ".join(names[:6]))
    return looked, wrong


def _look(entry: Entry) -> CaseFacts:
    scan = Scan.read(entry.images[0])
    mask = scan.mask(entry.label) if isinstance(entry.label, Path) else None
    return look_of(scan, mask, len(entry.images))


def look_of(scan: Scan, mask: np.ndarray | None, files: int = 1) -> CaseFacts:
    """Return the properties of an image, and of its mask if there is a mask. `files` is the number of files per image;
    an image with several files has one channel in each file.
    """
    values, inside = scan.values, scan.values[0]
    if not np.isfinite(values).all():
        raise DataError("images have values that are NaN or infinite")
    if mask is not None and mask.any():
        inside = inside[mask > 0]
    low, high = np.percentile(inside, TAIL)
    return CaseFacts(
        tuple(values.shape[:0:-1]),
        tuple(float(length) for length in scan.spacing),
        files if files > 1 else len(values),
        values.dtype.name,
        float(values.min()),
        float(values.max()),
        (float(low), float(high)),
        () if mask is None else tuple(np.unique(mask).tolist()),
    )


# -------------------------------------------------------------------------------------------------- rejections
def _refuse_mixtures(looked: Sequence[tuple[CaseFacts, str]]) -> None:
    """Raise DataError unless all images have the same number of axes and the same number of channels. Only grey and
    coloured 2-D images may be mixed.
    """
    for what, of, remedy in (
        ("axes", lambda look: len(look.size), "keep flat images and volumes in folders of their own"),
        ("channels", _channels_of, "save all images in grey, or all in colours without transparency"),
    ):
        counts = Counter(of(look) for look, _ in looked)
        if len(counts) > 1:
            told = " and ".join(f"{number} {what} ({count})" for number, count in sorted(counts.items()))
            rarest = min(counts, key=lambda number: (counts[number], number))
            names = [name for look, name in looked if of(look) == rarest]
            raise DataError(f"images have {told}; {remedy}", private=", ".join(names[:6]))


def _channels_of(look: CaseFacts) -> int:
    return 3 if len(look.size) == 2 and look.channels == 1 else look.channels


def _refuse_labels(facts: DatasetFacts) -> None:
    """Raise DataError if there is only one class, if masks are empty, or if masks have too many values."""
    values = {value for look in facts.looked for value in look.values}
    if not facts.segments:
        if len(facts.patients_of) < 2:
            raise DataError(
                f"all images are from one class, {next(iter(facts.patients_of), 'none')}; add the other classes"
            )
        return
    if not values - {0}:
        raise DataError(f"the masks of all {len(facts.looked)} cases that were opened are empty; export them again")
    if len(values) > MOST_VALUES:
        told = f"masks have {len(values)} different values, so that they count single objects or are pictures"
        raise DataError(f"{told}; save one number for each kind of structure, in PNG or NIfTI and not in JPEG")
