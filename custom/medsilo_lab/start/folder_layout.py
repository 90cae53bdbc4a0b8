"""Find images, labels and hospitals in a folder by file names only.

The module does not read the pixels of images. Each function in `KINDS` recognises one kind of folder.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from medsilo.core.errors import DataError
from medsilo.core.text import safe_name
from medsilo.tasks.case_index import TABLE, CaseIndex
from medsilo.tasks.headers import check_dicom, is_dicom
from medsilo.tasks.image_formats import FORMATS, SUFFIXES
from medsilo.tasks.table_reader import ENDINGS
from medsilo_lab.start.dataset_json import DatasetNames, dataset_names
from medsilo_lab.start.file_table import FileTable, table_of_files
from medsilo_lab.start.wording import names_a_person, names_a_place

DICOM = ".dcm"
IMAGE_WORDS = {"image", "images", "imagestr", "img", "imgs", "scan", "scans", "volume", "volumes"}
LABEL_WORDS = {"label", "labels", "labelstr", "mask", "masks", "seg", "segs", "segmentation", "segmentations", "gt"}
PART_WORDS = {"train", "training", "val", "valid", "validation", "test", "testing"}
HOSPITAL_WORDS = ("hospital", "site", "center", "centre", "clinic")
# a file name is regular if a file of this name is in at least this fraction of the cases' folders
REGULAR = 0.8
# minimum mean number of images in class folders; if there are fewer images per folder, the folders are patients
LEAST_OF_CLASS = 3
MOST_CLASSES = 254
# maximum number of hospitals whose folders do not have names of places; if there are more such folders, the folders may
# be patients
MOST_HOSPITALS = 8
TELL = "if each is a hospital's, say --hospitals"
SHOWN = 6
READ = (
    f"{', '.join(one.name for one in FORMATS[:-1])} and {FORMATS[-1].name}, and tables (CSV, Parquet, Excel, Stata, "
    "SAS) whose first line names the columns"
)
HOW = (
    "put images into images/ and masks of the same names into labels/, or images into folders named after their "
    f"classes, or write {TABLE} (medsilo docs start/your-data)"
)


@dataclass(frozen=True)
class FolderLayout:
    """The file name patterns of images and masks. The patterns are relative to the folder, or to each hospital's
    subfolder.
    """

    kind: str
    images: tuple[str, ...] = ()  # a file name pattern for each channel; empty if a table names the image files
    labels: str | None = None  # pattern of masks; None if folders are named after classes
    channels: tuple[str, ...] = ("image",)
    classes: tuple[str, ...] = ()
    hospitals: tuple[str, ...] = ()  # folders of the hospitals; empty if the folder belongs to a single hospital
    unused: tuple[str, ...] = ()
    named: DatasetNames | None = None
    table: FileTable | None = None  # the table that names the files, if its file name is not TABLE
    told: bool = False

    @property
    def by_table(self) -> bool:
        return not self.images


def layout_of_folder(folder: Path, target: str | None = None, told: bool = False) -> FolderLayout:
    """Find the layout of a folder. If images or labels are missing, raise DataError with a remedy.

    Args:
        target: label column of a table
        told: true if the user declared that each folder belongs to a hospital
    """
    if folder.is_file() and folder.suffix.lower() in (".csv", ".tsv"):
        raise DataError(
            "the table has no column names; write them into its first line, or give the folder that holds the images",
            private=str(folder),
        )
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"the folder {what}; give the folder that contains the images", private=str(folder))
    names, problems = CaseIndex.files_below(folder)
    also = "".join(f"; {problem.what} ({problem.count})" for problem in problems)
    items = items_of(names)
    try:
        if not items:
            there = Counter(Path(name).suffix.lower() or "no suffix" for name in names)
            found = ", ".join(f"{count} {suffix}" for suffix, count in there.most_common(SHOWN)) or "nothing"
            raise DataError(f"the folder contains no image, but {found}; medsilo reads {READ}", str(folder))
        layout = layout_of(items, told)
        unused = layout.unused if layout.by_table else (*layout.unused, *tables_in(names))
        return replace(layout, unused=unused, named=dataset_names(names))
    except DataError as error:
        if table := table_of_files(names, items, target):
            return FolderLayout(f"images, and a table of them, {table.name}", table=table)
        raise DataError(f"{error}{also}", error.private) from error


def tables_in(names: Iterable[str]) -> tuple[str, ...]:
    """Return the tables at the top level of a folder and one level below."""
    return tuple(name for name in names if name.count("/") < 2 and name.lower().endswith(ENDINGS))


def items_of(names: Mapping[str, Path]) -> list[str]:
    """Return the paths of images, masks and tables of cases. The path of a DICOM series is the path of the folder of
    the series, and ends in a slash.
    """
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
    except OSError:
        return False


def _series_in(where: str, files: list[str], folder: Path) -> list[str]:
    """Return the folder if the files are a single DICOM series; return the files if each file is a separate image."""
    import SimpleITK

    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        for file in files:
            check_dicom(folder / file.rpartition("/")[2])
        series = len(SimpleITK.ImageSeriesReader.GetGDCMSeriesIDs(str(folder)))
    except DataError:  # a damaged image is reported and left out at a later time, when medsilo opens all images
        series = 1
    if series == len(files) or not where:
        return files
    if series == 1:
        return [f"{where}/"]
    what = f"a folder has {len(files)} DICOM files of {series} series; give every series a folder of its own"
    raise DataError(what, private=str(folder))


def suffix_of(name: str) -> str:
    return next((suffix for suffix in (*SUFFIXES, DICOM) if name.lower().endswith(suffix)), "")


def layout_of(items: Sequence[str], told: bool = False) -> FolderLayout:
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
        unlike = f"folders {_shown(known)} look like hospitals and {_shown(lacking)} does not"
        raise DataError(f"{unlike}: {_why_not(below[lacking[0]])}")
    return _together(known, told)


def _together(known: Mapping[str, FolderLayout], told: bool) -> FolderLayout:
    """Return the common layout of the folders of all hospitals. The hospitals' folders may have different classes of
    images, but must not differ otherwise.
    """
    first = next(iter(known.values()))
    odd = [
        top
        for top, own in known.items()
        if replace(own, classes=(), unused=()) != replace(first, classes=(), unused=())
    ]
    if odd:
        both = "; ".join(
            f"{top} has {_shown([*known[top].images, known[top].labels or 'classes'])}"
            for top in (next(iter(known)), odd[0])
        )
        raise DataError(f"hospitals' folders have different layouts: {both}; give all the same files and folders")
    sites_of(known, told)
    classes = tuple(sorted({name for own in known.values() for name in own.classes}))
    unused = tuple(f"{top}/{name}" for top, own in known.items() for name in own.unused)
    return replace(first, classes=classes, unused=unused, hospitals=tuple(sorted(known)), told=told)


def sites_of(tops: Collection[str], told: bool = False) -> dict[str, str]:
    """Return a dictionary with the folder of each hospital; the keys are the hospitals' names in the plan. Hospitals'
    names in the plan have no spaces or umlauts. `told` is true if the user declared that the folders are hospitals.

    If the user has not declared hospitals, a folder may belong to a patient. If many folders may belong to patients,
    DataError is raised. A hospital whose folder is not named after a place is called hospital-1, hospital-2 and so on.
    A person's name never becomes the name of a hospital in the plan.
    """
    found: dict[str, str] = {}
    hidden = [top for top in sorted(tops) if names_a_person(top) or not (told or names_a_place(top))]
    if len(hidden) > MOST_HOSPITALS and not told:
        raise DataError(
            f"{len(hidden)} similar folders or tables may belong to patients; {TELL}, or put all cases into "
            "one folder or table",
            private=_shown(hidden),
        )
    free = (name for number in count(1) if (name := f"hospital-{number}") not in map(safe_name, tops))
    for top in sorted(tops):
        site = next(free) if top in hidden else safe_name(top)
        if not site or site in found:
            raise DataError(f"{top!r} can't be a hospital's name; use letters, digits, '.', '_' and '-' for its folder")
        found[site] = top
    return dict(sorted(found.items()))


# ---------------------------------------------------------------------------------------------------- kinds of folders
def _of_one(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout of one hospital's files, or None if no function in `KINDS` recognises the layout."""
    return next((found for kind in KINDS if (found := kind(items))), None)


def a_table(items: Sequence[str]) -> FolderLayout | None:
    return FolderLayout(f"a table of cases, {TABLE}") if TABLE in items else None


def images_and_labels(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout if one folder has the images and another folder has the masks. The names of image files may end
    in a channel number, as in nnU-Net.
    """
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
    """If all file names end in the same word and this word is in `words`, return the word. For example, p01_mask.nii.gz
    ends in the word _mask.
    """
    found = {match[0] if (match := re.search(r"[-_. ][A-Za-z]+$", _stem(name))) else "" for name in names}
    tail = found.pop() if len(found) == 1 else ""
    return tail if tail[1:].lower() in words else ""


def _by_channel(
    pattern: str, names: Sequence[str], masks: Collection[str], tail: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the patterns and names of the channels of images. For example, the files case_0000 and case_0001 are
    channels of the image whose mask is `case`.
    """
    parts = [re.fullmatch(r"(.+)_(\d{4})", _stem(name)) for name in names]
    whole = {_stem(name).removesuffix(tail) for name in names}
    if whole & set(masks) or not all(part and part[1] in masks for part in parts):
        return (_pattern(pattern, names, tail),), ("image",)
    endings = sorted({name[len(part[1]) :] for name, part in zip(names, parts, strict=True) if part})
    channels = tuple(f"channel-{number}" for number in range(len(endings))) if len(endings) > 1 else ("image",)
    return tuple(f"{pattern}/*{ending}" for ending in endings), channels


def folder_per_case(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout if each case has a folder, and if all these folders have the same file names."""
    below = _below(items)
    if len(below) < 2 or any("/" in name for inner in below.values() for name in inner):
        return None
    # if a file name begins with the name of its folder, a star replaces the folder's name in the pattern
    endings = Counter(
        f"*{name.removeprefix(top)}" if name.startswith(top) else name for top, inner in below.items() for name in inner
    )
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
    return re.split(r"[^A-Za-z0-9]+", _stem(ending))[-1].lower()


def _stem(name: str) -> str:
    return name[: len(name) - len(suffix_of(name))]


def folders_of_classes(items: Sequence[str]) -> FolderLayout | None:
    """Return the layout if images are in folders that are named after classes."""
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
    """Group paths by top folder, if every path has two folders, or if the top folders have names such as hospital-1.
    Otherwise, return all paths as one group with the key "".
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition("/")[0]].append(name)
    called = all(top.lower().startswith(HOSPITAL_WORDS) for top in found)
    least = min((name.count("/") for name in names), default=0)
    return dict(sorted(found.items())) if len(found) > 1 and least >= 2 - called else {"": [*names]}


def _below(items: Iterable[str]) -> dict[str, list[str]]:
    """Return the items in each top folder, with paths that are relative to the top folder."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for item in items:
        top, slash, rest = item.partition("/")
        if slash and rest:
            found[top].append(rest)
    return dict(found)


def _pattern(pattern: str, names: Sequence[str], tail: str = "") -> str:
    """Return a pattern that matches all given files of a folder. The pattern ends in `tail` and the common suffix of
    the files.
    """
    deep = "**/" if any("/" in name.rstrip("/") for name in names) else ""
    if all(name.endswith("/") for name in names):
        return f"{pattern}/{deep}*/"
    endings = {name[len(name) - len(suffix_of(name)) :] for name in names}
    return f"{pattern}/{deep}*{tail}{endings.pop() if len(endings) == 1 else ('.*' if tail else '')}"


def _refuse_parts(tops: Iterable[str]) -> None:
    parts = sorted(top for top in tops if top.lower() in PART_WORDS)
    if parts:
        raise DataError(
            f"folders {_shown(parts)} look like training and test sets, not hospitals or classes; write {TABLE} "
            f"with a column 'part', or put all cases into one folder"
        )


def _why_not(items: Sequence[str]) -> str:
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
