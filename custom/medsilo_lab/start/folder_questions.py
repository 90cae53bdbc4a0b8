"""Ask which names in a folder of images stand for patients, hospitals, classes, parts of the data or sessions.

Each question about ambiguous names shows evidence. The result of this module is a list of cases. Each case has an
image, a patient, and a mask or a class.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from medsilo.core.errors import DataError
from medsilo.core.files import leads_out
from medsilo.core.text import counted
from medsilo.tasks.case_index import TABLE, CaseIndex
from medsilo.tasks.image_formats import SUFFIXES
from medsilo.tasks.own.folder import FolderTask
from medsilo.tasks.sources import DataSource
from medsilo.tasks.table_reader import TableReader
from medsilo_lab.start.dataset_facts import LEAST_PATIENTS, facts_of_cases, names_patients, patient_in
from medsilo_lab.start.dataset_json import DatasetNames, dataset_names
from medsilo_lab.start.dataset_layout import DatasetLayout
from medsilo_lab.start.file_table import PATIENTS as PATIENT_WORDS
from medsilo_lab.start.file_table import FileTable, called, is_called
from medsilo_lab.start.folder_layout import (
    HOSPITAL_WORDS,
    HOW,
    IMAGE_WORDS,
    LABEL_WORDS,
    PART_WORDS,
    FolderLayout,
    items_of,
    layout_of,
    sites_of,
    suffix_of,
    tables_in,
)
from medsilo_lab.start.questions import Proposal, Question, listed
from medsilo_lab.start.table_questions import plain_spelling
from medsilo_lab.start.wording import is_common, names_a_person

Ask = Callable[[Question], str]
MASKS = LABEL_WORDS | {"dseg", "annotation", "annotations", "groundtruth", "gt"}
HOSPITAL_COLUMNS = ("site", "hospital", "center", "centre", "clinic", "institution", "klinik", "zentrum")
# maximum number of different values in a label column, and minimum number of images in a class folder
MOST_CLASSES, LEAST_OF_CLASS = 20, 3
# COVERED: minimum fraction of all images that a table must name. NAMED: if less than this fraction of a table's lines
# have an image, the user is asked.
COVERED, NAMED = 0.2, 0.8
RUNS = re.compile(r"\d+ \d+( \d+ \d+)*")  # matches masks in Kaggle's run-length format
LARGEST_JSON = 1 << 28
SESSION = re.compile(r"(ses|session|visit|study|scan|exam|series|view|tp|timepoint|time)[-_ ]?\w{0,12}", re.IGNORECASE)
# if the median number of patients per folder is above this number, the user is not asked about patients in headers
MOST_NAMES = 5
BY_HEADER = "each name in headers is a patient"
NEITHER, EACH_FOLDER = "neither", "each folder is a patient"
WHERE = frozenset(
    """
    hospital hospitals site sites center centre centers clinic clinics ward wards klinik klinikum krankenhaus zentrum
    standort hopital hôpital centro ospedale university universität uniklinik institution institute lab laboratory
    scanner device cohort study st sankt saint north south east west nord süd sued ost sud est ouest norte sur oeste
    noord zuid oost central city rural urban private public hier here there
    left right links rechts case cases
    """.split()  # noqa: SIM905 - one word beside the other
)  # words from COMMON that name places or sides of the body
ORDINALS = ("first", "second", "third", "fourth", "last")
PATIENTS, HOSPITALS, CLASSES = "patients", "hospitals", "classes"
EACH, ONE_HOSPITAL, DRAWN, LEFT_OUT = "each image is a patient", "one hospital", "drawn anew", "left out"


@dataclass(frozen=True)
class FoundCase:
    """A case: an image, its mask or its class, the patient and the hospital. Paths are relative to the data folder."""

    image: str
    label: str = ""
    patient: str = ""
    hospital: str = ""


@dataclass
class FoundCases:
    """The cases of a folder, which were found from file names and from answers of the user."""

    kind: str
    segments: bool
    cases: list[FoundCase]
    patients_by: str = ""  # description of the source of the patients' names; empty if each image counts as a patient
    told: bool = False
    left_out: dict[str, int] = field(default_factory=dict)
    named: DatasetNames | None = None
    unused: tuple[str, ...] = ()

    def leave_out(self, why: str, count: int) -> None:
        if count:
            self.left_out[why] = self.left_out.get(why, 0) + count

    def sites(self) -> dict[str, list[FoundCase]]:
        """Return a dictionary with the cases of each hospital; the keys are the hospitals' names in the plan. If there
        is a single hospital, its key is "".
        """
        tops = {case.hospital for case in self.cases}
        if tops == {""}:
            return {"": self.cases}
        named = sites_of(tops, self.told)
        return {site: [case for case in self.cases if case.hospital == top] for site, top in named.items()}

    def listings(self, folder: Path) -> dict[str, CaseIndex]:
        found = {}
        for site, cases in self.sites().items():
            found[site] = CaseIndex()
            for case in cases:
                label = folder / case.label if self.segments else case.label
                found[site].take(case.image, (folder / case.image,), label, case.patient)
        return found

    def layout(self) -> FolderLayout:
        known = None if self.patients_by else FileTable("", "image", "label", None)
        hospitals = tuple(sorted({case.hospital for case in self.cases} - {""}))
        return FolderLayout(
            self.kind, hospitals=hospitals, unused=self.unused, named=self.named, table=known, told=self.told
        )


@dataclass(frozen=True)
class Images:
    root: Path
    files: Mapping[str, Path]
    images: tuple[str, ...]
    masks: tuple[str, ...]
    target: str | None = None

    def levels(self, names: Iterable[str]) -> list[list[str]]:
        """For each depth in the folder tree that all images have, return a list with the folder name of each image."""
        rows = [PurePosixPath(name).parts[:-1] for name in names]
        deep = min(map(len, rows), default=0)
        return [[row[level] for row in rows] for level in range(deep)]


def found_cases(folder: Path, target: str | None, ask: Ask) -> FoundCases | None:
    """Return the cases in a folder of images, and ask the user about ambiguous names. If no name is ambiguous, return
    None.

    `ask` receives a question and returns the answer.
    """
    if not folder.is_dir():
        return None
    files, problems = CaseIndex.files_below(folder)
    every = [name for name in files if suffix_of(name) in SUFFIXES]
    if not every or any(name.endswith("/") or suffix_of(name) == ".dcm" for name in items_of(files)):
        return None
    if any(PurePosixPath(name).name == TABLE and _is_usual(path) for name, path in files.items()):
        return None
    inside, out = _inside(folder, files, every)
    if not inside:
        raise DataError(
            "all images are links that lead out of the data folder, so medsilo reads none; give the folder of the "
            "files, or copy the files",
            ", ".join(out[:6]),
        )
    masks = tuple(name for name in inside if _is_mask(name))
    seen = Images(folder, files, tuple(name for name in inside if name not in {*masks}), masks, target)
    found = _found(seen, ask)
    if found:
        found.named = dataset_names(files)
        found.leave_out("images are links that lead out of the data folder; copy them there", len(out))
        for problem in problems:
            found.leave_out(problem.what, problem.count)
    return found


def sight_of(cases: FoundCases, folder: DatasetLayout) -> DatasetLayout:
    source = DataSource(folder=folder.path)
    facts = facts_of_cases(cases.layout(), source, cases.listings(folder.path), cases.segments)
    if cases.layout().hospitals:
        facts.left_out.update(cases.left_out)
    return replace(folder, hospitals=cases.told).choose_for(facts)


def _found(seen: Images, ask: Ask) -> FoundCases | None:
    if any(PurePosixPath(name).parts[0].startswith("sub-") for name in seen.images):
        return _bids(seen, ask)
    if not seen.images:
        return None
    tables = _tables(seen)
    if seen.masks:
        return _with_masks(seen, tables, ask)
    if tables and not (tables[0].patient and not seen.target and not _columns_of_classes(tables[0])):
        return _with_table(seen, tables[0], ask)
    found = _in_folders(seen, tables[0] if tables else None, ask)
    return found if found or not tables else _with_table(seen, tables[0], ask)


def _is_usual(path: Path) -> bool:
    head = (TableReader.first_lines(path, 1) or [[]])[0]
    return {"image", "label", "patient"} <= {own.lower() for own in head} or {"t1", "t2"} <= {*head}


def _inside(root: Path, files: Mapping[str, Path], names: Sequence[str]) -> tuple[list[str], list[str]]:
    top = root.resolve()
    out = [name for name in names if leads_out(files[name], top)]
    return [name for name in names if name not in {*out}], out


def _words(name: str) -> list[str]:
    """Return the names of a file's folders in lower case. If the file name consists of several words, also return the
    last word of the file name.
    """
    *folders, last = PurePosixPath(name).parts
    stem = last[: len(last) - len(suffix_of(last))]
    tail = re.split(r"[-_. ]", stem)
    return [*map(str.lower, folders), *([tail[-1].lower()] if len(tail) > 1 or stem.lower() in MASKS else [])]


def _is_mask(name: str) -> bool:
    return any(word in MASKS for word in _words(name)) or PurePosixPath(name).parts[0] == "derivatives"


def _stem(name: str) -> str:
    last = PurePosixPath(name).name
    return last[: len(last) - len(suffix_of(last))]


def _key(name: str) -> tuple[str, ...]:
    """Return a path without words such as "images" or "mask". The result is the same for an image and its mask."""
    folders = [part for part in PurePosixPath(name).parts[:-1] if part.lower() not in IMAGE_WORDS | MASKS]
    words = re.split(r"([-_. ])", _stem(name))
    while len(words) > 2 and words[-1].lower() in IMAGE_WORDS | MASKS:
        words = words[:-2]
    stem = "" if len(words) == 1 and words[0].lower() in IMAGE_WORDS | MASKS else "".join(words)
    return (*folders, stem)


# ---------------------------------------------------------------------------------------------------- tables
@dataclass(frozen=True)
class Lines:
    name: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    key: str
    by: str  # "file" if the column `key` contains images, "patient" if `key` contains patients
    line_of: Mapping[str, int]  # path of an image → index of the image's line in the table
    named: Mapping[str, str]  # path of an image → patient; only if the column `key` contains patients

    def cell(self, image: str, column: str) -> str:
        """Return the value in a column for an image, or an empty text if the table has no line for the image."""
        place = self.line_of.get(image)
        return "" if place is None else self.lines[place][self.head.index(column)].strip()

    def values(self, column: str) -> Counter[str]:
        place = self.head.index(column)
        return Counter(line[place].strip() for line in self.lines if line[place].strip())

    @property
    def patient(self) -> str | None:
        """The column that contains patients. If several columns have names that are usual for patients, the column with
        the most reliable name. If no column has a usual name, the column with which images were matched to patients.
        """
        own = called([own for own in self.head if self.by == "patient" or own != self.key], PATIENT_WORDS)
        return own or (self.key if self.by == "patient" else None)

    @property
    def is_sure(self) -> bool:
        """True if there is a patient column, and its name or its values confirm that the column contains patients."""
        return self.patient is not None and (is_called(self.patient) or names_patients(self.named.values()))

    @property
    def like_names(self) -> list[str]:
        """The columns that may be patient columns: such columns have more different values than classes, and contain no
        measurements.
        """
        found = []
        for column in self.head:
            values = self.values(column)
            names = re.search(r"(?i)(?:id|nr|no)$", column) or not any(map(_is_number, values))
            if names and column != self.key and MOST_CLASSES < len(values) < values.total():
                found.append(column)
        return [self.key, *found] if self.by == "patient" else found


def _tables(seen: Images) -> list[Lines]:
    """Return the tables that name images or patients, sorted by the number of named images."""
    found: dict[tuple[str, ...], tuple[str, list[tuple[str, ...]], list[str]]] = {}
    for name in tables_in(seen.files):
        head, *lines = TableReader.first_lines(seen.files[name], TableReader.MOST_LINES) or [[]]
        whole = [tuple(line) for line in lines if len(line) == len(head)]
        # if two tables have the same columns, such as tables of training and test cases, the tables are joined
        if len(head) > 1 and whole:
            _, lines_, places = found.setdefault(tuple(head), (name, [], []))
            lines_.extend(whole)
            places.extend([name.rpartition("/")[0]] * len(whole))
    known = [
        own for head, (name, lines_, places) in found.items() if (own := _named_by(seen, name, head, lines_, places))
    ]
    return sorted(known, key=lambda own: -len(own.line_of))


def _named_by(
    seen: Images, name: str, head: tuple[str, ...], lines: list[tuple[str, ...]], columns: list[str]
) -> Lines | None:
    """Find the table column that names the most images or patients. If no column names enough images or patients,
    return None.

    Args:
        columns: for each line, the folder of the table's file
    """
    below = {place: [own for own in seen.images if not place or own.startswith(f"{place}/")] for place in {*columns}}
    by_file = {place: _ways_to_name(own) for place, own in below.items()}
    by_patient = {image: _names_of_patient(image) for image in seen.images}
    home = {image: place for place, own in below.items() for image in own}
    best: Lines | None = None
    for place, column in enumerate(head):
        cells = [line[place].strip().replace("\\", "/") for line in lines]
        if len({*cells}) < 2:
            continue
        line_of = {image: at for at, cell in enumerate(cells) if (image := _image_of(cell, by_file[columns[at]]))}
        if len(line_of) >= max(2, COVERED * min(len(seen.images), len(lines))) and (
            best is None or len(line_of) > len(best.line_of)
        ):
            best = Lines(name, head, tuple(lines), column, "file", line_of, {})
    if best:
        return best
    for place, column in enumerate(head):
        at = {(columns[n], line[place].strip()): n for n, line in enumerate(lines) if line[place].strip()}
        named = {
            image: own
            for image, ways in by_patient.items()
            if image in home and (own := next((way for way in ways if (home[image], way) in at), ""))
        }
        enough = len({*named.values()}) >= max(2, COVERED * len(at))
        if enough and len(named) >= COVERED * len(seen.images) and (not best or len(named) > len(best.line_of)):
            lines_of = {image: at[home[image], own] for image, own in named.items()}
            best = Lines(name, head, tuple(lines), column, "patient", lines_of, named)
    return best


def _ways_to_name(images: Sequence[str]) -> dict[str, str]:
    """Return a dictionary from names to images. A table may name an image by the last parts of its path, if no other
    image's path ends in these parts.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for image in images:
        parts = PurePosixPath(image).parts
        for start in range(len(parts)):
            end = "/".join(parts[start:])
            for own in {end, end[: len(end) - len(suffix_of(end))]}:
                found[own].add(image)
    return {own: next(iter(several)) for own, several in found.items() if len(several) == 1}


def _image_of(cell: str, known: Mapping[str, str]) -> str | None:
    parts = [part for part in cell.split("/") if part not in ("", ".")]
    return next((known[end] for start in range(len(parts)) if (end := "/".join(parts[start:])) in known), None)


def _names_of_patient(image: str) -> list[str]:
    """Return possible names of the patient of an image: the image's folders, and beginnings of the image's file
    name.
    """
    stem = _stem(image)
    ends = [match.start() for match in re.finditer(r"[-_. ]", stem)]
    return [*PurePosixPath(image).parts[:-1], *(stem[:end] for end in reversed(ends))]


def _with_table(seen: Images, table: Lines, ask: Ask) -> FoundCases:
    label = _label_column(seen, table, ask)
    named = [image for image in seen.images if image in table.line_of]
    cases = [FoundCase(image, table.cell(image, label)) for image in named]
    found = FoundCases(f"images, and a table of them, {table.name}", False, cases)
    _check_lines(found, seen, table, label, ask)
    found.cases = [case for case in found.cases if case.label]
    _hospitals_in(found, table, ask)
    if "/" in table.name:
        _ask_folders(found, ask, [], whose=not table.is_sure)
    if table.patient and table.is_sure:
        _by_column(found, table, table.patient)
        _once(found, ask)
    elif "/" not in table.name or table.by == "patient":
        _ask_patients(found, ask, table=table)
    return found


def _once(cases: FoundCases, ask: Ask) -> None:
    """If a patient occurs at several hospitals, keep only the patient's cases at the first hospital."""
    first = {case.patient: case.hospital for case in sorted(cases.cases, key=lambda own: own.hospital, reverse=True)}
    again = [case for case in cases.cases if case.hospital != first[case.patient]]
    if again:
        shown = f"{len({case.patient for case in again})} patients are at several hospitals, as the table names them"
        ask(Question("same patients", f"{shown}. Leave them out at all but the first?", {LEFT_OUT: {}}, safe=True))
        cases.leave_out("images of patients who are at another hospital, too", len(again))
        cases.cases = [case for case in cases.cases if case.hospital == first[case.patient]]


def _by_column(cases: FoundCases, table: Lines, column: str) -> None:
    whose = {case.image: table.cell(case.image, column) for case in cases.cases}
    known = [replace(case, patient=whose.get(case.image, "")) for case in cases.cases]
    cases.leave_out(f"images without a patient in {table.name}", sum(not case.patient for case in known))
    cases.cases, cases.patients_by = [case for case in known if case.patient], f"column {column!r}"


def _is_number(text: str) -> bool:
    return TableReader.number(text) is not None


def _check_lines(cases: FoundCases, seen: Images, table: Lines, label: str, ask: Ask) -> None:
    """Ask the user about table lines without an image, reject patients with two labels, and leave out images without a
    table line.
    """
    lone = len(table.lines) - len({*table.line_of.values()})
    if table.by == "file" and lone > (1 - NAMED) * len(table.lines):
        text = f"{lone} of {len(table.lines)} lines of {table.name} name images that are not there"
        ask(Question("lines without images", f"{text}. Leave them out?", {LEFT_OUT: {}}, safe=True))
    if table.by == "patient":
        own: defaultdict[str, set[str]] = defaultdict(set)
        for line in table.lines:
            own[line[table.head.index(table.key)].strip()].add(line[table.head.index(label)].strip())
        if several := sorted(who for who, labels in own.items() if len(labels) > 1):
            raise DataError(
                f"{len(several)} patients have lines with different {label} in {table.name}; add a column with the "
                "images' names, because no column names the image of a line",
                ", ".join(several[:6]),
            )
    cases.leave_out(f"lines of {table.name} without an image", lone)
    cases.leave_out(f"images without a line in {table.name}", len(seen.images) - len(table.line_of))
    cases.leave_out(f"images without a {label} in {table.name}", sum(not case.label for case in cases.cases))


def _columns_of_classes(table: Lines) -> list[str]:
    others = [
        own for own in table.head if own not in (table.key, table.patient) and not is_called(own, HOSPITAL_COLUMNS)
    ]
    return [other for other in others if 2 <= len(table.values(other)) <= min(MOST_CLASSES, len(table.lines) / 2)]


def _label_column(seen: Images, table: Lines, ask: Ask) -> str:
    others = [own for own in table.head if own not in (table.key, table.patient)]
    if seen.target:
        if (own := next((name for name in table.head if name.lower() == seen.target.lower()), None)) is None:
            raise DataError(f"--target {seen.target!r} is no column of {table.name}; there are {listed(others)}")
        return own
    fits = _columns_of_classes(table)
    if not fits and (
        runs := [other for other in others if any(RUNS.fullmatch(value) for value in table.values(other))]
    ):
        raise DataError(
            f"{table.name} has masks as run lengths (column {runs[0]!r}), which medsilo does not read; write each mask "
            "into masks/, as a PNG of the image's name"
        )
    if not fits:
        raise DataError(f"no column of {table.name} has 2 to {MOST_CLASSES} classes; the columns are {listed(others)}")
    usual = [fit for fit in fits if is_called(fit, LABEL_COLUMNS)]
    if len(usual) == 1:
        return usual[0]
    order = sorted(fits, key=lambda own: own not in usual)
    shown = "; ".join(f"{own}: {_shown(table.values(own))}" for own in order[:6])
    text = f"which column of {table.name} is to be learned? {shown}"
    return ask(Question("target", text, {own: {} for own in order}))


LABEL_COLUMNS = ("label", "target", "outcome", "diagnosis", "class", "dx", "group", "benignmalignant")


def _shown(values: Mapping[str, int]) -> str:
    return ", ".join(f"{value} ({count})" for value, count in sorted(values.items(), key=lambda own: -own[1])[:4])


def _hospitals_in(cases: FoundCases, table: Lines, ask: Ask) -> None:
    """If a column has a name that is usual for hospitals, ask whether the values of the column are hospitals."""
    column = next((own for own in table.head if is_called(own, HOSPITAL_COLUMNS) and own != table.key), None)
    if not column or len(values := Counter(table.cell(case.image, column) for case in cases.cases)) < 2:
        return
    text = f"column {column!r} of {table.name} has {len(values)} values ({_shown(values)}): several hospitals in one"
    answers: dict[str, Mapping[str, str]] = {ONE_HOSPITAL: {}, HOSPITALS: {}}
    if ask(Question("hospitals", f"{text} folder, as in research, or one?", answers, safe=True)) == HOSPITALS:
        cases.cases = [replace(case, hospital=table.cell(case.image, column)) for case in cases.cases]
        cases.leave_out(f"images without a {column}", sum(not case.hospital for case in cases.cases))
        cases.cases, cases.told = [case for case in cases.cases if case.hospital], True


# ---------------------------------------------------------------------------------------------------- masks
def _with_masks(seen: Images, tables: Sequence[Lines], ask: Ask) -> FoundCases | None:
    """Return the cases of images with masks. If images have several channels, or if the function `layout_of` recognises
    the layout, return None.
    """
    table = next((own for own in tables if own.patient), None)
    try:
        usual = layout_of(items_of(seen.files))
    except DataError:
        usual = None
    if usual and usual.labels and not usual.hospitals and not table:
        return None
    masks = {_key(mask): mask for mask in seen.masks}
    keys = Counter(map(_key, seen.images))
    if usual and usual.hospitals and len(usual.images) > 1:
        _refuse_visits(usual.hospitals, seen, ask)
        return None
    if max(keys.values()) > 1 or len(masks) < len(seen.masks):
        raise DataError(f"several images have the same mask, or an image has several masks; {HOW}")
    cases = [FoundCase(image, masks[key]) for image in seen.images if (key := _key(image)) in masks]
    if not cases:
        if usual and usual.hospitals:
            _refuse_visits(usual.hospitals, seen, ask)
        return None
    found = FoundCases("images, and masks of them", True, cases)
    found.leave_out("images without a mask", len(seen.images) - len(cases))
    found.leave_out("masks without an image", len(masks) - len(cases))
    if table:
        _hospitals_in(found, table, ask)
        _by_column(found, table, str(table.patient))
        return found
    found.unused = tables_in(seen.files)
    _ask_folders(found, ask, [])
    return found


def _refuse_visits(tops: Sequence[str], seen: Images, ask: Ask) -> None:
    """Ask whether the folders are patients or hospitals. If the folders are patients, each patient has several visits,
    so raise DataError.
    """
    if all(top.lower().startswith(HOSPITAL_WORDS) for top in tops):
        return
    counts = Counter(PurePosixPath(name).parts[0] for name in seen.images)
    text = f"{listed(tops)}: {len(tops)} folders of {_range(counts.values())}. Are they patients or hospitals?"
    if ask(Question("folders", text, {PATIENTS: {}, HOSPITALS: {}})) == PATIENTS:
        raise DataError(
            "patients have several visits, each a folder with several images; call the folders of visits PATIENT_VISIT "
            "and put all of them beside each other"
        )


# ---------------------------------------------------------------------------------------------------- BIDS
def _bids(seen: Images, ask: Ask) -> FoundCases:
    """Return the cases of all sessions in a BIDS folder. Masks come from the folder derivatives; without masks, labels
    come from participants.tsv.
    """
    own = [name for name in seen.images if PurePosixPath(name).parts[0].startswith("sub-")]
    kinds = Counter(_stem(name).rsplit("_", 1)[-1] for name in own)
    kind = kinds.most_common(1)[0][0]
    if len(kinds) > 1:
        text = f"the images of subjects are {', '.join(f'{name} ({count})' for name, count in kinds.most_common())}"
        kind = ask(Question("image", f"{text}. Which are read?", {name: {} for name, _ in kinds.most_common()}))
    images = tuple(name for name in own if _stem(name).rsplit("_", 1)[-1] == kind)
    chosen = replace(seen, images=images)
    masks = {_entities(mask): mask for mask in seen.masks}
    if len(masks) < len(seen.masks):
        raise DataError(
            "the folder derivatives has several masks of one image; keep one mask of each image, such as one rater's",
            ", ".join(seen.masks[:6]),
        )
    paired = [FoundCase(name, masks[key], _subject(name)) for name in images if (key := _entities(name)) in masks]
    if paired:
        found = FoundCases("BIDS, masks in derivatives", True, paired)
        found.leave_out("images without a mask", len(images) - len(paired))
    else:
        tables = _tables(chosen)
        if not tables:
            raise DataError(
                "a BIDS folder needs masks in derivatives, or labels in participants.tsv, and this folder has neither; "
                "add a column with the label of each subject"
            )
        label = _label_column(seen, tables[0], ask)
        cases = [FoundCase(name, tables[0].cell(name, label), _subject(name)) for name in images]
        found = FoundCases(f"BIDS, {tables[0].name}", False, [case for case in cases if case.label])
        _check_lines(found, chosen, tables[0], label, ask)
        _hospitals_in(found, tables[0], ask)
    found.patients_by = "BIDS: the folder sub-..., over all sessions"
    return found


def _subject(name: str) -> str:
    return PurePosixPath(name).parts[0]


def _entities(name: str) -> tuple[str, ...]:
    """Return the entities subject, session and run from the name of a BIDS file."""
    return tuple(part for part in _stem(name).split("_") if re.match(r"(sub|ses|run)-", part))


# ---------------------------------------------------------------------------------------------------- folders
def _in_folders(seen: Images, table: Lines | None, ask: Ask) -> FoundCases | None:
    found_ = FoundCases("images in folders named after their classes", False, [FoundCase(name) for name in seen.images])
    levels = seen.levels(seen.images)
    _ask_parts(levels, ask)
    level = _class_level(levels, ask)
    if level is None:
        _refuse_coco(seen)
        return None
    found_.cases = [replace(case, label=levels[level][place]) for place, case in enumerate(found_.cases)]
    if len({case.label for case in found_.cases}) < 2:
        raise DataError(f"all images are from one class, {found_.cases[0].label}; add the other classes")
    _ask_folders(found_, ask, [level], whose=table is None)
    if table:
        _by_column(found_, table, str(table.patient))
    return found_


def _ask_parts(levels: Sequence[Sequence[str]], ask: Ask) -> None:
    for level in levels:
        if len({*level}) > 1 and {name.lower() for name in level} <= PART_WORDS:
            text = f"folders {listed(sorted({*level}))} are an existing split; medsilo makes its own, by patient"
            ask(Question("parts", f"{text}. Is that right?", {DRAWN: {}}, safe=True))


def _class_level(levels: Sequence[Sequence[str]], ask: Ask) -> int | None:
    """Return the depth in the folder tree at which folders are named after classes. If no folders are named after
    classes, return None.
    """
    several = [
        at
        for at, level in enumerate(levels)
        if len({*level}) > 1 and not {name.lower() for name in level} <= PART_WORDS
    ]
    several = [at for at in several if not all(SESSION.fullmatch(name) and not name.isalpha() for name in levels[at])]
    if not several:
        return None
    if len(several) > 1:
        above, below = levels[several[0]], levels[several[1]]
        tops: defaultdict[str, set[str]] = defaultdict(set)
        for top, inner in zip(above, below, strict=True):
            tops[inner.casefold()].add(top)
        shared = sum(len(own) > 1 for own in tops.values()) >= len(tops) / 2
        hospitals = all(name.lower().startswith(HOSPITAL_WORDS) for name in above)
        if hospitals or (shared and len(tops) <= len({*above})):
            return _if_classes(sorted(tops), several[1], ask)
        if shared:
            first, second = listed(sorted({*above})), listed(sorted(tops))
            text = f"folders {first} hold folders {second}: which of the two are the classes of images?"
            likely = (first, second) if all(name.isdecimal() for name in tops) else (second, first)
            said = ask(Question("classes", text, {name: {} for name in likely}))
            return several[0] if said == first else several[1]
    counts = Counter(levels[several[0]])
    tops_ = sorted(counts)
    if all(name.lower().startswith(HOSPITAL_WORDS) for name in tops_):
        raise DataError(f"folders {listed(tops_)} look like hospitals, and their images have no labels; {HOW}")
    words = all(_is_finding(name) for name in tops_)
    if len(tops_) <= MOST_CLASSES and words:
        return several[0]
    images = _range(counts.values())
    text = f"{listed(tops_)}: {len(tops_)} folders of {images}. Are they patients, classes or hospitals?"
    like_patients = len(tops_) > MOST_CLASSES or any(char.isdigit() for name in tops_ for char in name)
    order: Sequence[str] = (PATIENTS, CLASSES, HOSPITALS) if like_patients else (CLASSES, PATIENTS, HOSPITALS)
    said = ask(Question("folders", text, {name: {} for name in order}))
    if said != CLASSES:
        raise DataError(
            f"folders are {said}, so that no name has the class of an image; write labels.csv beside them, with the "
            f"columns {'patient' if said == PATIENTS else 'image'} and label"
        )
    return several[0]


def _if_classes(names: Sequence[str], level: int, ask: Ask) -> int:
    """Ask whether folders are classes, unless the names of the folders are clearly names of classes."""
    if all(map(_is_finding, names)):
        return level
    text = f"folders {listed(names)}: are they the classes of images?"
    if ask(Question("classes", text, {"yes": {}, "no": {}})) == "no":
        raise DataError(
            "no name has the class of an image; write labels.csv beside the folders (columns: image, label)"
        )
    return level


def _is_finding(name: str) -> bool:
    """Return True if the name of a folder is usual for a class, and not usual for a place or for a patient's number."""
    words = re.findall(r"[^\W\d_]+", name.lower())
    numbered = sum(char.isdigit() for char in name) > 1 or not (len(name) == 1 or any(len(word) > 1 for word in words))
    return is_common(name) and not numbered and not {*words} & WHERE


def _range(counts: Iterable[int]) -> str:
    least, most = min(own := list(counts)), max(own)
    return counted(most, "image") if least == most else f"{least} to {most} images"


def _ask_folders(cases: FoundCases, ask: Ask, taken: Collection[int], whose: bool = True) -> None:
    """Ask whether folders are patients or hospitals. Folders at a depth that `taken` contains are not asked about. If
    no folder names patients, ask how to find the patient of each image.
    """
    rows = [PurePosixPath(case.image).parts[:-1] for case in cases.cases]
    deep = min(map(len, rows))
    free = [
        level
        for level in range(deep)
        if level not in taken
        and len(own := {row[level] for row in rows}) > 1
        and not {name.lower() for name in own} <= PART_WORDS | IMAGE_WORDS
    ]
    if not free:
        if whose:
            _ask_patients(cases, ask)
        return
    level = free[0]
    counts = Counter(row[level] for row in rows)
    tops = sorted(counts)
    hospitals = all(name.lower().startswith(HOSPITAL_WORDS) for name in tops)
    above_class = not taken or level < min(taken)
    if hospitals:
        said = HOSPITALS
    elif not above_class:  # folders inside a folder of a class are patients or series, but never hospitals
        said = PATIENTS
    else:
        text = f"{listed(tops)}: {len(tops)} folders of {_range(counts.values())}. Patients, hospitals or neither?"
        words = len(tops) <= MOST_CLASSES and not any(names_a_person(name) or re.search(r"\d", name) for name in tops)
        order = (HOSPITALS, PATIENTS) if words else (PATIENTS, HOSPITALS)
        said = ask(Question("folders", text, {name: {} for name in (*order, NEITHER)}))
    if said == NEITHER:
        _ask_patients(cases, ask, without=[level])
        return
    if said == HOSPITALS:
        cases.cases = [replace(case, hospital=row[level]) for case, row in zip(cases.cases, rows, strict=True)]
        cases.told = True
        if free[1:] and whose:
            _patients_at(cases, free[1], ask)
        elif whose:
            _ask_patients(cases, ask)
    elif whose:
        _patients_at(cases, level, ask)


def _patients_at(cases: FoundCases, level: int, ask: Ask) -> None:
    """The patient of each case is the name of the case's folder at the depth `level` of the folder tree. Folders with
    the same name are the same patient, even if their paths differ.
    """
    named = [PurePosixPath(case.image).parts[level] for case in cases.cases]
    if expression := _prefix({"": sorted({*named})}):
        begun = {own: match[1] for own in named if (match := re.search(expression, own))}
        least = len({*begun.values()})
        text = f"folders {listed(sorted({*named}))}: {len({*named})} patients, or {least} by {expression}?"
        if ask(Question(PATIENTS, text, {expression: {}, EACH_FOLDER: {}})) == expression:
            named = [begun[own] for own in named]
    cases.cases = [replace(case, patient=own) for case, own in zip(cases.cases, named, strict=True)]
    cases.patients_by = _folder_at(level)


def _folder_at(level: int) -> str:
    return f"the {ORDINALS[min(level, len(ORDINALS) - 1)]} folder in its path"


def _ask_patients(cases: FoundCases, ask: Ask, without: Collection[int] = (), table: Lines | None = None) -> None:
    """Ask the user how to find the patient of each image.

    In the possible answers, the patient is a folder in the path, a part of the file name, or a value in a table column.
    In the last possible answer, each image belongs to a different patient.
    """
    names: defaultdict[str, list[str]] = defaultdict(list)
    for case in cases.cases:
        names[case.hospital].append(_path_of(case))
    if names_patients(_stem(case.image) for case in cases.cases):
        cases.cases = [replace(case, patient=_stem(case.image)) for case in cases.cases]
        cases.patients_by = f"its name, as {_stem(cases.cases[0].image)}"
        return
    folders = [PurePosixPath(case.image).parts[:-1] for case in cases.cases]
    ways: dict[str, dict[str, str]] = {}
    for level in (own for own in range(min(map(len, folders))) if own not in without):
        values = {row[level] for row in folders}
        other = {case.label for case in cases.cases} | {case.hospital for case in cases.cases}
        if len(values) > 1 and not values & other and not {name.lower() for name in values} <= PART_WORDS | IMAGE_WORDS:
            way = _folder_at(level)
            ways[way] = {case.image: row[level] for case, row in zip(cases.cases, folders, strict=True)}
    stems = {site: [_stem(own) for own in several] for site, several in names.items()}
    guesses = () if ways else (patient_in(stems), *(_prefix(stems, own) for own in (PREFIX, ALL_BUT_LAST)))
    for expression in dict.fromkeys(filter(None, guesses)):
        fits = {case.image: re.search(expression, _stem(case.image)) for case in cases.cases}
        ways[expression] = {image: (match[1] if match else image) for image, match in fits.items()}
    columns = {f"column {own!r}": own for own in (table.like_names if table else ())}
    for way, own in columns.items():
        assert table
        ways[way] = {case.image: table.cell(case.image, own) for case in cases.cases}
    sizes = {way: len({*whose.values()}) for way, whose in ways.items()}
    # Answers with few patients come first, because merging two patients costs little. Answers with very few patients
    # are unlikely, so they come last.
    ways = dict(sorted(ways.items(), key=lambda way: (sizes[way[0]] < LEAST_PATIENTS, sizes[way[0]])))

    def named(answer: str) -> Mapping[str, str]:
        return {}

    each = f"{len(cases.cases)} images, such as {listed([case.image for case in cases.cases])}"
    way = next(iter(ways), "")
    if ways:
        count = sizes[way]
        text = f"{each}: are they of {count} patients, by {way}?"
    else:
        text = f"nothing names the patient of {each}. Is each image a patient? Else give a pattern of its path"
    answers: dict[str, Mapping[str, str]] = {way: {} for way in (*ways, EACH)}
    safe = bool(ways) and not columns and sizes[way] == min(sizes.values())
    said = ask(Question(PATIENTS, text, answers, safe=safe, free=named))
    if table and (column := columns.get(said) or next((own for own in table.head if own == said), None)):
        _by_column(cases, table, column)
        return
    if said == EACH:
        cases.cases = [replace(case, patient=case.image) for case in cases.cases]
        return
    whose = ways.get(said) or _by_expression(cases.cases, said)
    cases.cases = [replace(case, patient=whose[case.image]) for case in cases.cases]
    cases.patients_by = said if said.startswith("the folder") else f"the pattern {said!r} in names"


def _path_of(case: FoundCase) -> str:
    return case.image[: len(case.image) - len(suffix_of(case.image))]


PREFIX, ALL_BUT_LAST = r"^(.*?\d+)[-_. ].+$", r"^(.*\d.*)[-_. ][^-_. ]+$"


def _prefix(stems: Mapping[str, Sequence[str]], expression: str = PREFIX) -> str | None:
    """Return `expression` if the expression matches every file name, and if several file names have the same match.
    Otherwise, return None.
    """
    found = {site: [re.search(expression, stem) for stem in own] for site, own in stems.items()}
    every = [match for own in found.values() for match in own]
    values = {match[1] for match in every if match}
    return expression if all(every) and 1 < len(values) < len(every) else None


def _by_expression(cases: Sequence[FoundCase], expression: str) -> dict[str, str]:
    try:
        asked = re.compile(expression)
    except re.error as error:
        raise DataError(f"patients: {expression!r} is no regular expression ({error}); correct it") from error
    fits = {case.image: asked.search(_path_of(case)) for case in cases}
    if strangers := [_path_of(case) for case in cases if fits[case.image] is None]:
        told = f"patients: {len(strangers)} of {len(cases)} images, by paths without endings, do not fit {expression!r}"
        told += "; correct it"
        raise DataError(told, ", ".join(strangers[:6]))
    return {image: (match[1] if asked.groups else match[0]) or image for image, match in fits.items() if match}


def _refuse_coco(seen: Images) -> None:
    if found := [name for name in seen.files if name.lower().endswith(".json") and _is_coco(seen.files[name])]:
        raise DataError(
            f"{found[0]} is COCO, which medsilo does not read; write each mask as a PNG of the image's name into "
            "masks/ (pycocotools: annToMask)"
        )


def _is_coco(path: Path) -> bool:
    try:
        if path.stat().st_size > LARGEST_JSON:
            return True
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and {"images", "annotations"} <= values.keys()


# --------------------------------------------------------------------------------------------------- for any layout
def guessed_patients(seen: Proposal) -> Iterator[Question]:
    expression = seen.data.get("patient")
    if not expression or not seen.survey.patients_named:
        return
    cases = sum(part.cases for part in seen.survey.parts.values())
    patients = sum(part.patients for part in seen.survey.parts.values())
    recorded = [name for name in seen.names if name.lower().endswith(CaseIndex.RECORDINGS)]
    names = [name for name in seen.names if suffix_of(name)] or recorded
    begun = {match[1] for name in names if (match := re.search(PREFIX, _stem(name)))}
    what = counted(cases, "image") if names is not recorded else counted(len(recorded), "recording")
    text = f"{what}, such as {listed(names)}: are they of {patients} patients, by {expression}?"

    def named(answer: str) -> Mapping[str, str]:
        return {"patient": answer}

    yield Question(
        PATIENTS, text, {expression: {}, EACH: {"patient": None}}, safe=not 1 < len(begun) < patients, free=named
    )


def _alike_in_folders(whose: Mapping[str, str]) -> Iterator[Question]:
    """If two folders contain a patient with the same name, ask whether both patients are the same person. `whose` is
    the patient of each image.
    """
    folders: defaultdict[str, set[str]] = defaultdict(set)
    for name, patient in whose.items():
        if "/" in name:
            folders[name.partition("/")[0]].add(patient)
    large = {folder: own for folder, own in sorted(folders.items()) if len(own) > 1}
    counts = Counter(patient for own in large.values() for patient in own)
    if alike := sorted(patient for patient, count in counts.items() if count > 1):
        shown = listed([f"{folder} ({len(own)} patients)" for folder, own in large.items()])
        yield Question(
            "hospitals",
            f"{counted(len(alike), 'name')} of patients in images' headers ({listed(alike)}) are in several of the "
            f"folders {shown}. Are these the same people, or is each folder a hospital's, which numbers its own?",
            {"the same people": {}, HOSPITALS: {"table.hospitals": True}},
        )


def patients_of_headers(seen: Proposal) -> Iterator[Question]:
    """Ask about the patients that image headers name, as in DICOM. A question is asked if a folder contains several
    patients, or if the names of patients are similar.
    """
    told = seen.data.get("patient") or seen.data.get("table")
    if told or not seen.survey.patients_named or not isinstance(seen.task, FolderTask):
        return
    source = DataSource.from_values(dict(seen.data), "data")
    whose = {entry.name: entry.patient for entry in seen.task.listing_of(source, source.folder).entries}
    depth = min((name.count("/") for name in whose), default=0)
    yield from _alike_in_folders(whose)
    for level in range(depth):
        folders: defaultdict[str, set[str]] = defaultdict(set)
        for name, patient in whose.items():
            folders["/".join(name.split("/")[: level + 1])].add(patient)
        several = {folder: own for folder, own in folders.items() if len(own) > 1}
        counts = sorted(map(len, folders.values()))
        if len(several) > 1 and counts[len(counts) // 2] <= MOST_NAMES:
            shown = [f"{folder}: {', '.join(sorted(own))}" for folder, own in sorted(several.items())]
            expression = "^" + "[^/]+/" * level + "([^/]+)/"
            yield Question(
                PATIENTS,
                f"{counted(len(several), 'folder')} have images of several patients by their headers "
                f"({'; '.join(shown[:3])}). Is each such name a patient? Else {expression} takes the folders, or give "
                "another pattern that finds the patient in a path",
                {BY_HEADER: {}, expression: {"patient": expression}},
                free=lambda answer: {"patient": answer},
            )
            break
    alike: defaultdict[str, set[str]] = defaultdict(set)
    for patient in whose.values():
        alike[plain_spelling(patient)].add(patient)
    if pairs := [" and ".join(sorted(own)) for _, own in sorted(alike.items()) if len(own) > 1]:
        yield Question(
            "spelling",
            f"{counted(len(pairs), 'name')} of patients in images' headers differ by letters' size, punctuation or "
            f"zeros alone: {listed(pairs)}. Are they different people? If not, correct the headers first, or name "
            "the patient in folders",
            {"they are different people": {}},
        )
