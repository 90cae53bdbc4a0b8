"""List the cases in a hospital's folder, by patterns of file names or by a table, without opening images."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import DirEntry, scandir
from os.path import realpath
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal, Self

from medsilo.core.errors import DataError, UnfitData
from medsilo.core.files import uncollected
from medsilo.core.text import composed
from medsilo.tasks.image_formats import SUFFIXES
from medsilo.tasks.shares import PARTS
from medsilo.tasks.sources import RARE, ROLES, DataSource
from medsilo.tasks.survey import Problem, in_two_parts, refuse_what_stops
from medsilo.tasks.table_reader import OLD_LETTERS, WINDOWS, TableReader

TABLE = DataSource.TABLE
IMAGES, LABELS = "images/*", "labels/*"  # default patterns of the file names of images and masks
ANYWHERE = "**/*"  # default pattern of the file names of recordings
OF_CLASSES = "*/*"  # default pattern for a classification: a folder of images for each class
LINKS = "folders are links, which are not followed; copy them into the data folder"
OF_WINDOWS = ("Thumbs.db", "desktop.ini")  # files that Windows Explorer leaves in folders
SPECIAL = "files are pipes, sockets or devices, which are not opened; remove them from the data folder"
CLOSED = "folders can't be opened; let the account of this process read them"
OTHER_NAMES = {"training": "train", "val": "validation", "valid": "validation", "testing": "test"}


@dataclass(frozen=True)
class Entry:
    """One image or recording, with its files, its label and its patient.

    The label is the path of a mask, or the name of a class as the site spells it.
    """

    name: str
    images: tuple[Path, ...]
    label: Path | str
    patient: str
    part: str = ""  # train, validation or test, if a table assigns it
    site: str = ""  # the site, if a simulation's table assigns it


@dataclass
class CaseIndex:
    """The usable cases in a folder, sorted by name, and the problems of all other files.

    >>> from pathlib import Path
    >>> listing = CaseIndex()
    >>> listing.take("p1/a", (Path("p1/a.nii"),), Path("p1/mask.nii"), "p1")
    >>> listing.add("left out", "images have no label; draw one", ["p2/a"])
    >>> [entry.patient for entry in listing.usable], listing.left_out
    (['p1'], {'images have no label; draw one': 1})
    """

    RECORDINGS: ClassVar[tuple[str, ...]] = (".csv", ".tsv", ".parquet", ".pq", ".hea", ".edf", ".bdf")

    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    patients_named: bool = True
    # for each DICOM element that identifies patients, the number of series that contain it
    identifiers: dict[str, int] = field(default_factory=dict)

    @property
    def usable(self) -> list[Entry]:
        """All usable cases. Raises DataError if a problem of the data stops training."""
        refuse_what_stops(self.problems)
        return self.entries

    @property
    def fixed(self) -> bool:
        """True if a table assigns cases to training, validation or test."""
        return any(entry.part for entry in self.entries)

    @property
    def left_out(self) -> dict[str, int]:
        """The number of cases that are left out, by the reason."""
        return {problem.what: problem.count for problem in self.problems if problem.severity == "left out"}

    def refuse_unusable(self) -> None:
        if not self.usable:
            left = next(iter(self.problems), Problem("stops", "there is none"))
            told = "no image has a label of its name; give each image and its label the same name"
            raise UnfitData(
                told if "no label" in left.what else f"no case can be used: {left.what}", ", ".join(left.private[:6])
            )

    def take(self, name: str, files: tuple[Path, ...], label: Path | str, patient: str) -> None:
        """Add a case.

        Args:
            name: the case's name
            files: the case's files
            label: the path of a mask, or the name of a class as the site spells it
            patient: the patient's name
        """
        self.entries.append(Entry(name, files, label, patient))

    def add(self, severity: str, subject: str, names: Sequence[str]) -> None:
        """Record a problem.

        Args:
            severity: "stops" if training rejects the data, "left out" if training leaves out the cases, or "note"
            subject: the problem and its remedy, without names of files and patients
            names: names of the affected cases; if there are no names, nothing is recorded
        """
        if not names:
            return
        same = [problem for problem in self.problems if (problem.severity, problem.what) == (severity, subject)]
        several = sorted([*names, *(name for problem in same for name in problem.private)])
        self.problems = [problem for problem in self.problems if problem not in same]
        self.problems.append(Problem(severity, subject, len(several), tuple(several)))  # type: ignore[arg-type]

    def drop(self, subject: str, bad: Sequence[Entry]) -> None:
        """Leave out cases, and record the reason.

        Args:
            subject: the reason and its remedy, as for `add`
            bad: the cases
        """
        self.add("left out", subject, [entry.name for entry in bad])
        names = {entry.name for entry in bad}
        self.entries = [entry for entry in self.entries if entry.name not in names]

    def leave_out_rare(self, source: DataSource, labels: Mapping[str, Collection[str]]) -> None:
        """Leave out the cases with a label that too few patients have.

        Args:
            source: the data source, whose settings name labels that are never left out
            labels: the labels of each case, by the name of the case
        """
        who: defaultdict[str, set[str]] = defaultdict(set)
        for entry in self.entries:
            for label in labels[entry.name]:
                who[label].add(entry.patient)
        rare = source.rare(who)
        self.drop(RARE, [entry for entry in self.entries if rare & {*labels[entry.name]}])

    @staticmethod
    @uncollected()
    def files_below(folder: Path, missing: bool = True) -> tuple[dict[str, Path], list[Problem]]:
        """Map the relative paths of all regular files in a folder and its subfolders to the files. Hidden files are
        ignored.

        Return also the problems: unreadable folders, linked folders, and entries that are not regular files.

        Args:
            folder: the folder
            missing: whether to return symbolic links to missing files, too, so that the caller can report these links
        """
        found: dict[str, Path] = {}
        links, special, closed = list[str](), list[str](), list[str]()
        places = [(str(folder), "")]
        while places:
            place, before = places.pop()
            try:
                with scandir(place) as listed:
                    entries = [entry for entry in listed if not entry.name.startswith(".")]
            except OSError:
                closed.append(Path(place).name)
                continue
            for entry in entries:
                kind = _kind_of(entry)
                if (kind == "file" or (kind == "missing" and missing)) and entry.name not in OF_WINDOWS:
                    found[composed(before + entry.name)] = Path(entry.path)
                elif kind == "folder":
                    places.append((entry.path, f"{before}{entry.name}/"))
                elif kind == "link":
                    links.append(entry.name)
                elif kind == "other":
                    special.append(entry.name)
        passed_by = {LINKS: links, SPECIAL: special, CLOSED: closed}
        problems = [Problem("left out", why, len(own), tuple(sorted(own))) for why, own in passed_by.items() if own]
        return dict(sorted(found.items())), problems

    @staticmethod
    def of_cases(source: DataSource, folder: Path, masks: bool) -> "CaseIndex":
        """List the cases in a folder according to the site's settings.

        Args:
            source: the site's settings
            folder: the folder
            masks: whether the labels of cases are paths of masks; otherwise, they are names of classes
        """
        source.check_columns()
        names, problems = CaseIndex.files_below(folder)
        if table := table_of(source, names, source.images or source.labels):
            columns = source.columns.get("image", "image")
            images = (columns,) if isinstance(columns, str) else columns
            return _by_table(source, folder, table, names, images, masks).ordered(source, problems)
        return _by_pattern(source, names, masks).ordered(source, problems)

    @staticmethod
    def of_recordings(source: DataSource, folder: Path) -> "CaseIndex":
        """List the recordings that a table names.

        Without a table, list all files with a recording's suffix; the name of a recording's folder is then its label.

        Args:
            source: the site's settings
            folder: the folder
        """
        source.check_columns()
        names, problems = CaseIndex.files_below(folder)
        if table := table_of(source, names, None):
            within = [source.column(role) for role in ("label", "patient") if role in source.recording_columns]
            if not isinstance(file := source.columns.get("image", "recording"), str):
                raise DataError("data.columns.image: a recording is one file; name one column")
            return _by_table(source, folder, table, names, (file,), False, within).ordered(source, problems)
        listing = CaseIndex()
        known = {name: path for name, path in names.items() if name.lower().endswith(CaseIndex.RECORDINGS)}
        for name, path in _matching(ANYWHERE, known, listing).items():
            listing.take(name, (path,), path.parent.name, name)
        if not listing.entries:
            raise DataError("there is no recording in the data folder; put CSV, Parquet, WFDB or EDF there")
        if "patient" not in source.recording_columns:
            listing.tell_patients(source)
        return listing.ordered(source, problems)

    def ordered(self, source: DataSource, further: Sequence[Problem] = ()) -> Self:
        """Sort the cases by name; leave out cases of excluded patients and cases whose files are outside the data
        folder.

        Args:
            source: the site's settings
            further: problems of folders, which are added to the problems of cases
        """
        self.entries.sort(key=lambda entry: entry.name)
        self.problems += further
        refuse_links(self, source.folder)
        self.check_patients(source)
        return self

    def tell_patients(self, source: DataSource) -> None:
        """Determine the patient of each case.

        The regular expression `data.patient` of the site's settings finds the patient in a case's name. Without this
        setting, each case counts as a separate patient.
        """
        if source.patient is None:
            self.patients_named = False
            if self.entries:
                what = (
                    "every case counts as one patient; if a patient has several, set data.patient to find the "
                    "patient in names, or use a table"
                )
                self.problems.append(Problem("note", what, len(self.entries)))
            return
        try:
            expression = re.compile(composed(source.patient))
        except re.error as error:
            raise DataError(f"data.patient is not a regular expression ({error}); correct it") from error
        found = {entry.name: expression.search(entry.name) for entry in self.entries}
        strangers = [name for name, match in found.items() if match is None]
        self.add("stops", "names of cases don't fit data.patient; correct it", strangers)
        self.entries = [
            replace(entry, patient=(match.group(1) if expression.groups else match.group()) or "")
            for entry in self.entries
            if (match := found[entry.name])
        ]

    def check_patients(self, source: DataSource) -> None:
        """Leave out excluded patients, and record a problem if the table assigns a patient to two parts of the data."""
        without_who_left(self, source)
        fixed = {part: [entry.patient for entry in self.entries if entry.part == part] for part in PARTS}
        what = "patients are in two parts by the table, so that the test would be of known patients; give each one part"
        self.add("stops", what, sorted(in_two_parts(fixed)))


def _kind_of(entry: DirEntry[str]) -> Literal["file", "missing", "folder", "link", "other"]:
    """Return the kind of a directory entry; a symbolic link to a file counts as a file."""
    try:
        if entry.is_dir():
            return "link" if entry.is_symlink() else "folder"
        return "file" if entry.is_file() else "other" if Path(entry).exists() else "missing"
    except OSError:  # a circular symbolic link raises OSError
        return "missing"


def table_of(source: DataSource, names: Collection[str], patterns: object) -> str | None:
    """Return the name of the table that lists the cases, or None if patterns of file names do."""
    if source.table and patterns:
        raise DataError("data: a table and patterns of files are given; give only one of the two")
    return source.table or (None if patterns or TABLE not in names else TABLE)


def files_of(image: Path) -> list[Path]:
    """Return the files of an image; a folder with one DICOM series is an image with several files."""
    return sorted(image.iterdir()) if image.is_dir() else [image]


# ------------------------------------------------------------------------------------------------ patterns
def _by_pattern(source: DataSource, names: dict[str, Path], masks: bool) -> CaseIndex:
    listing = CaseIndex()
    usual = IMAGES if masks else OF_CLASSES
    if isinstance(source.images, dict):  # a task with named channels has replaced the dictionary by a list before
        raise DataError(
            "data.images: patterns by channel are given, but this task has no named channels; give one pattern"
        )
    patterns = (source.images,) if isinstance(source.images, str) else source.images or (usual,)
    channels = [_matching(pattern, names, listing) for pattern in patterns]
    labels = _matching(source.labels or LABELS, names, listing) if masks else {}
    cases = dict.fromkeys(name for channel in channels for name in channel)
    if not cases:
        place = "there" if masks else "into folders named after their classes"
        hint = (
            "correct it in the site's medsilo.yaml"
            if source.images
            else f"it is {usual}; put them {place}, or write {TABLE}"
        )
        raise DataError(f"no file in the data folder fits data.images; {hint}", private=" ".join(patterns))
    whole = [name for name in cases if all(name in channel for channel in channels)]
    listing.add("left out", "cases lack a channel's image", [name for name in cases if name not in set(whole)])
    unlabelled = [name for name in whole if masks and name not in labels]
    listing.add("left out", "images have no label; add the labels' files or correct 'labels'", unlabelled)
    alone = [name for name in labels if name not in cases]
    listing.add("note", "labels have no image", alone)
    for name in whole:
        if name not in set(unlabelled):
            images = tuple(channel[name] for channel in channels)
            listing.take(name, images, labels[name] if masks else images[0].parent.name, name)
    listing.tell_patients(source)
    return listing


def _matching(pattern: str, names: dict[str, Path], listing: CaseIndex) -> dict[str, Path]:
    """Map names of cases to the files that match a pattern.

    A case's name is the text that the pattern's stars match. Thus, an image and a label with the same name belong
    together.

    A pattern that ends with a slash matches folders, each with one DICOM series.
    """
    expression = DataSource.expression(pattern)
    if pattern.endswith("/"):
        names = {f"{PurePosixPath(name).parent}/": path.parent for name, path in names.items()}
    found: dict[str, Path] = {}
    doubled = []
    for name, path in names.items():
        match = expression.fullmatch(name)
        if match is None:
            continue
        case = "/".join(part for part in map(_without_suffix, match.groups()) if part) or _without_suffix(path.name)
        if case in found:
            doubled.append(case)
        found[case] = path
    what = "files have one and the same name but for its ending; remove one, or let the pattern name one ending"
    listing.add("stops", what, doubled)
    return found


def _without_suffix(name: str) -> str:
    stripped = name.rstrip("/")
    # the last star of *.nii* matches "" or .gz, which is no part of the case's name
    if stripped.lower() in ("", ".gz"):
        return ""
    suffix = next((suffix for suffix in (*SUFFIXES, *CaseIndex.RECORDINGS) if stripped.lower().endswith(suffix)), "")
    return stripped[: len(stripped) - len(suffix)]


# ------------------------------------------------------------------------------------------------ a table
def _by_table(
    source: DataSource,
    folder: Path,
    table: str,
    names: dict[str, Path],
    images: Sequence[str],
    masks: bool,
    within: Collection[str] = (),
) -> CaseIndex:
    """List the cases in a table; each row is a case.

    Args:
        images: the columns that name a case's image files
        masks: true if labels are paths of masks, and False if labels are names of classes
        within: columns that the table may lack, because the recordings contain their values
    """
    path = folder / table if (folder / table).is_file() else source.folder / table
    listing, (of_label, of_patient, of_part, of_site) = CaseIndex(), map(source.column, ROLES[1:])
    needed = [name for name in (*images, of_label, of_patient) if name not in within]
    sheet = TableReader(head=source.head).read(path, {}, [*needed, *within, of_part, of_site])
    if missing := [column for column in needed if column not in sheet.columns]:
        hint = "name yours under data.columns in the site's medsilo.yaml, or add it"
        raise DataError(f"the table has no column {', '.join(missing)}; {hint}", private=str(path))
    short = files_by_short_name(names)
    counted: Counter[str] = Counter()
    empty: defaultdict[str, list[str]] = defaultdict(list)
    absent = []
    for place, cells in sheet.lines:
        given = dict(zip(sheet.columns, cells, strict=True))
        lacking = [column for column in needed if not given[column]]
        for column in lacking:
            empty[column].append(place)
        if lacking:
            continue
        files = [_file(given[column], folder, names, short) for column in (*images, *([of_label] if masks else []))]
        name = given[images[0]]
        if any(file is None for file in files):
            absent.append(name)
            continue
        counted[name] += 1
        label = files[-1] if masks else given.get(of_label, "")
        part, site = given.get(of_part, "").lower(), given.get(of_site, "")
        known = tuple(file for file in files[: len(images)] if file)
        patient = given.get(of_patient, "")
        listing.entries.append(Entry(name, known, label or "", patient, OTHER_NAMES.get(part, part), site))
    for column, places in empty.items():
        listing.add("left out", f"lines of the table have an empty {column}; fill it in", places)
    listing.add("left out", "lines of the table name a file that is not in the data folder", absent)
    doubled = [name for name, count in counted.items() if count > 1]
    listing.add("stops", "files are in several lines of the table; give each one line", doubled)
    tell_sheet(listing, sheet)
    check_parts(listing)
    return listing


def tell_sheet(listing: CaseIndex, sheet: TableReader) -> None:
    """Record as problems the rows that can't be read, and an old encoding whose letters may be decoded wrongly."""
    listing.add("left out", "lines have more or fewer cells than the first; export the table again", sheet.uneven)
    listing.add("left out", "lines have a cell that is too long", sheet.long)
    if sheet.coding == WINDOWS:
        listing.problems.append(Problem("note", OLD_LETTERS, len(sheet.lines)))


def _file(name: str, folder: Path, names: dict[str, Path], short: Mapping[str, Path]) -> Path | None:
    """Return the file that a table's cell names by a relative or absolute path, or None if the file does not exist."""
    name = name.removeprefix("./")
    found = names.get(name) or names.get(name.replace("\\", "/").removeprefix("./")) or short.get(name)
    if found is None and (folder / name).is_file():
        found = folder / name
    return found


def files_by_short_name(names: Mapping[str, Path]) -> dict[str, Path]:
    """Map the names by which a table may refer to a file to this file.

    These are its path, and, if unique, its file name with or without suffix.
    """
    found: defaultdict[str, set[Path]] = defaultdict(set)
    for name, path in names.items():
        last = PurePosixPath(name).name
        if last.lower().endswith((*SUFFIXES, *CaseIndex.RECORDINGS)):
            for own in {last, _without_suffix(last)}:
                found[own].add(path)
    return {own: paths.pop() for own, paths in found.items() if len(paths) == 1} | dict(names)


def check_parts(listing: CaseIndex) -> None:
    """If a table has a column of parts, record the cases whose part is not train, validation or test."""
    parts = [entry.part for entry in listing.entries]
    if any(parts):
        wrong = [entry.name for entry in listing.entries if entry.part not in PARTS]
        listing.add("stops", "lines of the table have a part that is not train, validation or test", wrong)


# ------------------------------------------------------------------------------------------------ for all tasks
def refuse_links(listing: CaseIndex, root: Path) -> None:
    """Leave out and record the cases whose files lie outside the data folder, because symbolic links lead there."""
    inside = root.resolve()

    def leads_out(entry: Entry) -> bool:
        files = (*entry.images, *([entry.label] if isinstance(entry.label, Path) else []))
        return not all(
            Path(realpath(file)).is_relative_to(inside) for image in files for file in (image, *files_of(image))
        )

    what = "files are not in the data folder but lead out of it; copy them there, or make 'folder' the one they are in"
    listing.drop(what, [entry for entry in listing.entries if leads_out(entry)])


def without_who_left(listing: CaseIndex, source: DataSource) -> None:
    """Leave out the cases of excluded patients, without recording a problem."""
    gone = source.without()
    listing.entries = [entry for entry in listing.entries if entry.patient not in gone]
