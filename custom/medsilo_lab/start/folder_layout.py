"""Tell from the names in a folder what lies there: which files are images, which are labels, and whose they are.

No image is opened here. One more kind of folder is one more function in `KINDS`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from medsilo.core.errors import DataError
from medsilo.core.text import is_safe_name
from medsilo.tasks.case_index import SUFFIXES, TABLE, CaseIndex
from medsilo.tasks.headers import check_dicom, is_dicom
from medsilo_lab.start.dataset_json import DatasetNames, dataset_names
from medsilo_lab.start.file_table import FileTable, table_of_files
from medsilo_lab.start.wording import plain

DICOM = ".dcm"
IMAGE_WORDS = {"image", "images", "imagestr", "img", "imgs", "scan", "scans", "volume", "volumes"}
LABEL_WORDS = {"label", "labels", "labelstr", "mask", "masks", "seg", "segs", "segmentation", "segmentations", "gt"}
PART_WORDS = {"train", "training", "val", "valid", "validation", "test", "testing"}
HOSPITAL_WORDS = ("hospital", "site", "center", "centre", "clinic")
REGULAR = 0.8  # share of the cases' folders that have a file, so that it counts as one of each case's
LEAST_OF_CLASS = 3  # images of a class, on average: else folders are patients rather than classes
MOST_CLASSES = 254
SHOWN = 6  # names that an error shows
READ = (
    "NIfTI, MHA, NRRD, DICOM, PNG, JPEG, TIFF and BMP, and tables (CSV, Parquet, Excel, Stata, SAS) whose first line "
    "names the columns"
)
HOW = (
    "put images into images/ and masks of the same names into labels/, or images into folders named after their "
    f"classes, or write {TABLE} (docs/start/your-data.md)"
)


@dataclass(frozen=True)
class FolderLayout:
    """The places of images and labels below a folder, or below each hospital's folder in it, as patterns of names."""

    kind: str  # in words
    images: tuple[str, ...] = ()  # a pattern for each channel; none where a table names the files
    labels: str | None = None  # a pattern of masks; None where classes are names of folders
    channels: tuple[str, ...] = ("image",)
    classes: tuple[str, ...] = ()
    hospitals: tuple[str, ...] = ()  # their folders; none: the folder is one hospital's
    unused: tuple[str, ...] = ()  # folders that are not looked at
    named: DatasetNames | None = None  # by the folder's dataset.json
    table: FileTable | None = None  # that names the files, where it is not called as usual

    @property
    def by_table(self) -> bool:
        """Return whether a table names the files."""
        return not self.images


def layout_of_folder(folder: Path, target: str | None = None) -> FolderLayout:
    """Return what lies in a folder; a DataError says what is missing there and what to do. target: the column of a
    table beside the images that has the labels."""
    if folder.is_file() and folder.suffix.lower() in (".csv", ".tsv"):
        raise DataError(
            "the table has no column names; write them into its first line, or give the folder that holds the images",
            private=str(folder),
        )
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"the folder {what}; give the one that holds the images", private=str(folder))
    names, problems = CaseIndex.files_below(folder)
    also = "".join(f"; {problem.what} ({problem.count})" for problem in problems)
    items = items_of(names)
    try:
        if not items:
            there = Counter(Path(name).suffix.lower() or "no suffix" for name in names)
            found = ", ".join(f"{count} {suffix}" for suffix, count in there.most_common(SHOWN)) or "nothing"
            raise DataError(f"no image lies in the folder, which has {found}; medsilo reads {READ}", str(folder))
        return replace(layout_of(items), named=dataset_names(names))
    except DataError as error:
        if table := table_of_files(names, items, target):
            return FolderLayout(f"images, and a table of them, {table.name}", table=table)
        raise DataError(f"{error}{also}", error.private) from error


def items_of(names: Mapping[str, Path]) -> list[str]:
    """Return the images, labels and tables among files by name; a folder of one DICOM series ends in a slash."""
    items = [name for name in names if name == TABLE or name.endswith(f"/{TABLE}") or suffix_of(name) in SUFFIXES]
    slices: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in names.items():
        if (name.lower().endswith(DICOM) or "." not in path.name) and _says_dicom(path):
            slices[name.rpartition("/")[0]].append(name)
    for place, several in slices.items():
        items += _series_in(place, several, names[several[0]].parent)
    return sorted(items)


def _says_dicom(path: Path) -> bool:
    try:
        return path.is_file() and is_dicom(path)
    except OSError:  # nobody may read it
        return False


def _series_in(place: str, files: list[str], folder: Path) -> list[str]:
    """Return a folder's one DICOM series as that folder; or its files, where each is an image by itself."""
    import SimpleITK

    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        for file in files:
            check_dicom(folder / file.rpartition("/")[2])
        series = len(SimpleITK.ImageSeriesReader.GetGDCMSeriesIDs(str(folder)))
    except DataError:  # this image is told of, and left out, when it is opened
        series = 1
    if series == len(files) or not place:
        return files
    if series == 1:
        return [f"{place}/"]
    what = f"a folder has {len(files)} DICOM files of {series} series; give every series a folder of its own"
    raise DataError(what, private=str(folder))


def suffix_of(name: str) -> str:
    """Return the ending of an image's name that says its format, in small letters; empty where none is known."""
    return next((suffix for suffix in (*SUFFIXES, DICOM) if name.lower().endswith(suffix)), "")


def layout_of(items: Sequence[str]) -> FolderLayout:
    """Return what items are, those of one hospital or of several in folders of their own."""
    whole = _of_one(items)
    if whole:
        return whole
    below = _below(items)
    _refuse_parts(below)
    found = {top: _of_one(inner) for top, inner in below.items()}
    known = {top: own for top, own in found.items() if own}
    if not known:
        raise DataError(_why_not(items))
    if lacking := [top for top in below if not found[top]]:
        told = f"folders {_shown(known)} look like hospitals and {_shown(lacking)} does not"
        raise DataError(f"{told}: {_why_not(below[lacking[0]])}")
    return _together(known)


def _together(known: Mapping[str, FolderLayout]) -> FolderLayout:
    """Return the one layout of several hospitals, which must agree in all but their classes."""
    first = next(iter(known.values()))
    odd = [
        top
        for top, own in known.items()
        if replace(own, classes=(), unused=()) != replace(first, classes=(), unused=())
    ]
    if odd:
        told = "; ".join(
            f"{top} has {_shown([*known[top].images, known[top].labels or 'classes'])}"
            for top in (next(iter(known)), odd[0])
        )
        raise DataError(f"hospitals' folders are built in different ways: {told}; give all the same files and folders")
    sites_of(known)
    classes = tuple(sorted({name for own in known.values() for name in own.classes}))
    unused = tuple(f"{top}/{name}" for top, own in known.items() for name in own.unused)
    return replace(first, classes=classes, unused=unused, hospitals=tuple(sorted(known)))


def sites_of(tops: Iterable[str]) -> dict[str, str]:
    """Return hospitals' folders by the hospitals' names, which have no spaces and umlauts."""
    found: dict[str, str] = {}
    for top in tops:
        site = safe_name(top)
        if not site or site in found:
            raise DataError(f"{top!r} can't be a hospital's name; use letters, digits, '.', '_' and '-' for its folder")
        found[site] = top
    return dict(sorted(found.items()))


# ---------------------------------------------------------------------------------------------------- kinds of folders
def _of_one(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout of one hospital's items; None where no kind fits."""
    return next((found for kind in KINDS if (found := kind(items))), None)


def a_table(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout of a table of cases that lies in the folder."""
    return FolderLayout(f"a table of cases, {TABLE}") if TABLE in items else None


def images_and_labels(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout of a folder of images and one of masks; nnU-Net's numbers of channels are understood."""
    below = _below(items)
    images = [top for top in below if top.lower() in IMAGE_WORDS]
    labels = [top for top in below if top.lower() in LABEL_WORDS]
    if len(images) != 1 or len(labels) != 1:
        return None
    [place], [masks] = images, labels
    unused = tuple(top for top in below if top not in (place, masks))
    tails = ["", ""]
    if not {_stem(name) for name in below[place]} & {_stem(name) for name in below[masks]}:
        tails = [_tail(below[top], words) for top, words in ((place, IMAGE_WORDS), (masks, LABEL_WORDS))]
    cases = {_stem(name).removesuffix(tails[1]) for name in below[masks]}
    patterns, channels = _by_channel(place, below[place], cases, tails[0])
    labelled = _pattern(masks, below[masks], tails[1])
    return FolderLayout("images, and masks of them", patterns, labelled, channels, unused=unused)


def _tail(names: Sequence[str], words: Collection[str]) -> str:
    """Return what all names have after the case's, where it says what the files are: _mask of p01_mask.nii.gz."""
    found = {match[0] if (match := re.search(r"[-_. ][A-Za-z]+$", _stem(name))) else "" for name in names}
    tail = found.pop() if len(found) == 1 else ""
    return tail if tail[1:].lower() in words else ""


def _by_channel(
    place: str, names: Sequence[str], masks: Collection[str], tail: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the patterns and names of the channels: case_0000 and case_0001 are one case's if its mask is case."""
    parts = [re.fullmatch(r"(.+)_(\d{4})", _stem(name)) for name in names]
    whole = {_stem(name).removesuffix(tail) for name in names}
    if whole & set(masks) or not all(part and part[1] in masks for part in parts):
        return (_pattern(place, names, tail),), ("image",)
    endings = sorted({name[len(part[1]) :] for name, part in zip(names, parts, strict=True) if part})
    channels = tuple(f"channel-{number}" for number in range(len(endings))) if len(endings) > 1 else ("image",)
    return tuple(f"{place}/*{ending}" for ending in endings), channels


def folder_per_case(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout of folders of single cases, in which the files of all have the same names."""
    below = _below(items)
    if len(below) < 2 or any("/" in name for inner in below.values() for name in inner):
        return None
    known = [(name, top) for top, inner in below.items() for name in inner]  # with a star for the folder's name
    endings = Counter(f"*{name.removeprefix(top)}" if name.startswith(top) else name for name, top in known)
    regular = [ending for ending, count in endings.items() if count >= REGULAR * len(below)]
    labels = [ending for ending in regular if _word(ending) in LABEL_WORDS]
    images = sorted(ending for ending in regular if ending not in labels)
    if len(labels) != 1 or not images:
        return None
    channels = tuple(_word(ending) or f"channel-{place}" for place, ending in enumerate(images))
    distinct = channels if len(set(channels)) == len(channels) else tuple(f"channel-{n}" for n in range(len(images)))
    patterns = tuple(f"*/{ending}" for ending in images)
    return FolderLayout("a folder for each case", patterns, f"*/{labels[0]}", distinct)


def _word(ending: str) -> str:
    """Return the last word of a file's name: t1 of *_t1.nii.gz."""
    return re.split(r"[^A-Za-z0-9]+", _stem(ending))[-1].lower()


def _stem(name: str) -> str:
    """Return a name without its ending."""
    return name[: len(name) - len(suffix_of(name))]


def folders_of_classes(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout of images in folders that are named after their classes."""
    below = _below(items)
    names = [name for inner in below.values() for name in inner]
    flat = all("/" not in name.rstrip("/") for name in names) and len(names) == len(items)
    many = 2 <= len(below) <= MOST_CLASSES and len(names) >= LEAST_OF_CLASS * len(below)
    words = {top.lower() for top in below}
    if not flat or not many or words & (IMAGE_WORDS | LABEL_WORDS):
        return None
    _refuse_parts(below)
    if all(word.startswith(HOSPITAL_WORDS) for word in words):
        raise DataError(f"folders {_shown(below)} look like hospitals, and their images have no labels; {HOW}")
    pattern = _pattern("*", names)
    return FolderLayout("images in folders named after their classes", (pattern,), classes=tuple(below))


KINDS: tuple[Callable[[Sequence[str]], FolderLayout | None], ...] = (
    a_table,
    images_and_labels,
    folder_per_case,
    folders_of_classes,
)


# ---------------------------------------------------------------------------------------------------- names
def by_hospital(names: Collection[str]) -> dict[str, list[str]]:
    """Return names by the folder at the top, where these are called hospitals or all have folders themselves; else all
    names under "", as those of one hospital."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition("/")[0]].append(name)
    called = all(top.lower().startswith(HOSPITAL_WORDS) for top in found)
    least = min((name.count("/") for name in names), default=0)
    return dict(sorted(found.items())) if len(found) > 1 and least >= 2 - called else {"": [*names]}


def _below(items: Iterable[str]) -> dict[str, list[str]]:
    """Return the items of each folder at the top, by their names from there."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for item in items:
        top, slash, rest = item.partition("/")
        if slash and rest:
            found[top].append(rest)
    return dict(found)


def _pattern(place: str, names: Sequence[str], tail: str = "") -> str:
    """Return the pattern of items in a folder; the ending is part of it where all have the same. tail: of all names,
    before the ending."""
    deep = "**/" if any("/" in name.rstrip("/") for name in names) else ""
    if all(name.endswith("/") for name in names):
        return f"{place}/{deep}*/"
    endings = {name[len(name) - len(suffix_of(name)) :] for name in names}
    return f"{place}/{deep}*{tail}{endings.pop() if len(endings) == 1 else ('.*' if tail else '')}"


def _refuse_parts(tops: Iterable[str]) -> None:
    parts = sorted(top for top in tops if top.lower() in PART_WORDS)
    if parts:
        raise DataError(
            f"folders {_shown(parts)} are parts, not hospitals or classes; write {TABLE} with a column 'part', or "
            f"put all cases together: medsilo divides them by patient"
        )


def _why_not(items: Sequence[str]) -> str:
    """Return why items are no layout, and what to do."""
    below = _below(items)
    images = [top for top in below if top.lower() in IMAGE_WORDS]
    labels = [top for top in below if top.lower() in LABEL_WORDS]
    if labels and not images:
        return f"there are labels ({_shown(labels)}) and no folder of images beside them; {HOW}"
    if images and not labels:
        count = sum(len(below[top]) for top in images)
        return f"there are {count} images ({_shown(images)}) and no labels; {HOW}"
    if len(images) > 1 or len(labels) > 1:
        many = _shown([*images, *labels])
        return f"folders {many} are too many: images and labels are not distinguishable; keep one of each"
    if len(below) == 1 and not any("/" not in item for item in items):
        return f"all images lie in one folder, {_shown(below)}; {HOW}"
    return f"{len(items)} images lie there in no order that medsilo knows; {HOW}"


def _shown(names: Iterable[str]) -> str:
    known = list(names)
    return ", ".join(known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")


def safe_name(text: str) -> str:
    """Return a name of a folder for the name of a hospital's; empty where nothing is left of it.

    >>> safe_name("Süd Klinik"), safe_name("st-anna")
    ('Sued-Klinik', 'st-anna')
    """
    return text if is_safe_name(text) else plain(text, "_-")
