"""Look at a folder of tables with a line per patient, and choose what a plan and a hospital's settings say of them."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from medsilo.core.errors import DataError
from medsilo.core.text import counted, is_safe_name
from medsilo.tasks.case_index import OTHER_NAMES, CaseIndex
from medsilo.tasks.cells import THOUSANDS, as_written, without_thousands
from medsilo.tasks.shares import PARTS
from medsilo.tasks.sources import DataSource
from medsilo.tasks.table_reader import ENDINGS, TableReader, spelling
from medsilo_lab.start.choices import ADAMS_RATE, Choices, trained_of
from medsilo_lab.start.dataset_layout import DatasetLayout
from medsilo_lab.start.wording import LEAST_NAMED, OTHER, names_somebody, plans_words, renamed, yes_last

PATIENTS = (
    *("patient", "patid", "patnr", "pseudonym", "subject", "participant", "person", "pid", "mrn", "id"),
    *("proband", "paciente", "paziente", "fallnr", "dossier", "ipp", "nhc"),
)
SITES = (
    *("site", "hospital", "center", "centre", "clinic", "inst", "institution"),
    *("zentrum", "klinik", "krankenhaus", "standort", "hôpital", "hopital", "centro", "ospedale"),
    *("szpital", "hastane", "ziekenhuis", "sjukhus", "sygehus", "sykehus"),
)
TARGETS = ("label", "target", "outcome", "diagnos", "response", "readmitted", "y", "num", "class")
EVENTS = (
    *("event", "status", "death", "dead", "died", "recur", "relapse", "deceased", "censor", "e"),
    *("ereignis", "verstorben", "rezidiv", "décès", "récidive", "fallecido", "deceduto", "recidiva"),
)
TIMES = (
    *("time", "days", "months", "weeks", "duration", "followup", "survival", "t"),
    *("tage", "monate", "überlebenszeit", "jours", "mois", "meses", "giorni", "mesi"),
)
LOOKALIKES = frozenset({"stage", "percentage", "dosage", "voltage", "clinical", "composite", "instrument", "opposite"})
BODY = re.compile("tumou?r|primary|lesion|anatom|metasta|biops|infect|surg|cancer", re.IGNORECASE)  # not a hospital's
DATE = re.compile(r"\d{1,4}([-./])\d{1,2}\1\d{1,4}\b")
ONE_VALUE = "has one value at most, as '-', NA and the like stand for none"
MISSING = frozenset(DataSource.model_fields["missing"].default)
MOST_GRADES, MOST_CLASSES, MOST_LEVELS = 5, 10, 20
RARE = 0.5  # share of lines with a value, below which a column is left out
NOTES = 0.1  # share of patients whose value few others have, above which a column of texts holds notes
UNIQUE, LONG = 0.95, 1e5  # share of different whole numbers, and the least, that number records
STEADY = 0.05  # of lines: where a label changes less often, lines are rows of a recording
FEW = 1000  # patients for whom one layer is enough
BATCH, LARGE_BATCH = 32, 128


@dataclass(frozen=True)
class CaseTable:
    """One hospital's table: where it lies, and its columns. cells: of each, without what stands for no value."""

    path: Path
    lines: int
    cells: Mapping[str, tuple[str, ...]]
    decimal: str
    asked: str | None = None  # the column that --target names

    def known(self, name: str) -> list[str]:
        """Return a column's values where there are some."""
        return [cell for cell in self.cells[name] if cell not in MISSING]

    def is_numbers(self, name: str) -> bool:
        """Return whether all values of a column are numbers."""
        return all(TableReader.number(cell, self.decimal) is not None for cell in self.known(name))

    def called(self, words: Sequence[str], fits: Callable[[str], bool] = lambda name: True) -> list[str]:
        """Return the columns that are called so, the surest first."""
        found = [name for word in words for name in self.cells if _says(name, word) and fits(name)]
        return sorted(dict.fromkeys(found), key=lambda name: name.lower() not in words)

    def distinct(self, name: str) -> list[str]:
        """Return a column's values, each once, numbers by their size."""
        return _in_order({TableReader.level(as_written(cell, self.decimal)) for cell in self.known(name)})

    def patients_by(self, name: str) -> Counter[str]:
        """Return how many patients have each of a column's values."""
        pairs = zip(self.cells[name], _patients(self), strict=True)
        known = {(as_written(cell, self.decimal), who) for cell, who in pairs if cell not in MISSING}
        return Counter(TableReader.level(cell) for cell, _ in known)

    @cached_property
    def patient(self) -> str | None:
        """The column that names patients: the first called so, of many values; names last, as two may have one."""
        found = self.called(PATIENTS, lambda name: len(self.distinct(name)) > self.lines / 10)
        return min(found, key=lambda name: "name" in name.lower(), default=None)

    @cached_property
    def site(self) -> str | None:
        """The column that names hospitals."""
        found = self.called(SITES, lambda name: 1 < len(self.distinct(name)) <= self.lines / 3)
        return next((name for name in found if not BODY.search(name)), None)

    @cached_property
    def survival(self) -> tuple[str, str] | None:
        """The columns of time and event, if there are such."""
        if self.asked:
            return None
        most = min(MOST_CLASSES, self.lines / 3)
        times = self.called(TIMES, lambda name: self.is_numbers(name) and len(self.distinct(name)) > most)
        events = self.called(EVENTS, lambda name: len(self.distinct(name)) == 2 or self.lines < MOST_LEVELS)
        place = list(self.cells).index
        near = [(abs(place(time) - place(event)), place(time), time, event) for event in events for time in times]
        return min(near)[2:] if near else None  # they stand side by side

    @cached_property
    def target(self) -> str | None:
        """The column of what is to be told: one that is called so."""
        return self.asked or next(iter(self.called(TARGETS, lambda name: len(self.distinct(name)) > 1)), None)

    @property
    def event(self) -> str | None:
        """The column of an event without a time, which is told apart as two classes."""
        return next(iter(self.called(EVENTS, lambda name: len(self.distinct(name)) == 2)), None)

    @property
    def is_recording(self) -> bool:
        """Return whether lines are steps in time: times that only grow, or labels that stay the same for long and come
        back, as those of patients who are sorted by their label do not."""
        for name in self.called(("time", "timestamp", "datetime", "ms", "seconds", "t")):
            cells = self.cells[name]
            numbers = [TableReader.number(cell, self.decimal) for cell in cells]
            steps = cells if any(number is None for number in numbers) else numbers
            if len(cells) > 2 and all(a <= b for a, b in pairwise(steps)):  # type: ignore[operator]
                return True
        label = self.target or next(iter(self.called(("activity", "rhythm", "state"))), None)
        if self.survival or self.patient or not label:
            return False
        changes = sum(a != b for a, b in pairwise(self.cells[label]))
        return len(self.distinct(label)) <= changes < STEADY * self.lines


def _says(name: str, word: str) -> bool:
    """Return whether a column's name is a word, or ends or begins with it: rfstime, patient_id."""
    parts = re.split(r"[\W_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    text = "".join(part for part in parts if part not in LOOKALIKES)
    return text == word or (len(word) > 3 and (text.endswith(word) or text.startswith(word)))


def tables_in(folder: DatasetLayout) -> dict[str, CaseTable]:
    """Return a folder's tables by hospital: one table, or one for each hospital; none of another kind of folder."""
    if folder.table_of([name for name in folder.files if name.lower().endswith(CaseIndex.RECORDINGS)]):
        return {}
    files = [name for name in folder.files if PurePosixPath(name).suffix.lower() in ENDINGS]
    tops = {PurePosixPath(name).parts[0]: name for name in files}
    _refuse_parts([folder.path / name for name in files], folder.target)
    if not files or len(tops) < len(files) or any(name.count("/") > 1 for name in files) or folder.images:
        return {}
    stems = folder.sites_of({PurePosixPath(top).stem: top for top in tops})
    named = {stem: site for site, stem in stems.items()}
    found = {named[PurePosixPath(top).stem]: _table(folder.path / name) for top, name in tops.items()}
    if any(table is None or table.is_recording for table in found.values()):
        return {}
    known = {
        site: table
        for site, table in found.items()
        if table and (spelling(table.cells)(folder.target) if folder.target else table.called(TARGETS + EVENTS))
    }
    if not known and any("/" in name for name in files):
        return {}
    return known or {site: table for site, table in found.items() if table}


def _refuse_parts(files: Sequence[Path], target: str | None) -> None:
    """Raise a DataError where of two tables in one folder, with a line for each patient, one alone has what is learned.

    It looks at the first files; recordings name no patients.
    """
    words = [target] if target else [*TARGETS, *EVENTS]
    pairs = [pair for pair in pairwise(files[:MOST_LEVELS]) if pair[0].parent == pair[1].parent]
    for pair in pairs:
        heads = [(TableReader.first_lines(path, 1) or [[]])[0] for path in pair]
        known = [any(_says(name, word) for name in head for word in words) for head in heads]
        shared = any(_says(name, word) for name in {*heads[0]} & {*heads[1]} for word in PATIENTS)
        if shared and known[0] != known[1]:
            both = " and ".join(path.name for path in pair)
            raise DataError(f"of {both} one alone has what is to be learned; join tables of the same patients into one")


def _asked_of(table: CaseTable, target: str) -> CaseTable:
    """Return a table of which somebody said what is to be learned."""
    if (column := spelling(table.cells)(target)) is None:
        names = ", ".join([*table.cells][:MOST_LEVELS])
        raise DataError(f"--target {target!r} is no column of {table.path.name}; there are {names}")
    return replace(table, asked=column)


def _table(path: Path) -> CaseTable | None:
    """Read a table; None where its lines are no cases, as they name files or there is nothing below its first line."""
    head, *lines = TableReader.first_lines(path, TableReader.MOST_LINES) or [[]]
    lines = [line for line in lines if len(line) == len(head)]
    if not lines and len(head) > 1:
        raise DataError(f"{path.name} has no line of as many cells as its first; export it again, or remove it")
    if len(head) < 2 or "image" in head or "recording" in head:
        return None
    if sum(map(bool, head)) < len(head) / 2:
        raise DataError(f"{path.name} has few names in its first line; remove titles above the names of the columns")
    if all(TableReader.number(cell) is not None for cell in head):
        raise DataError(f"{path.name} has numbers in its first line, which has to name the columns; add such a line")
    if twice := [name for name, times in Counter(filter(None, head)).items() if times > 1]:
        raise DataError(f"{path.name} has {head.count(twice[0])} columns {twice[0]!r}; give each its own name")
    cells = {name: tuple(line[place] for line in lines) for place, name in enumerate(head) if name}
    commas = [cell for own in cells.values() for cell in own if "," in cell]
    decimal = (
        "," if any(THOUSANDS.fullmatch(cell) or TableReader.number(cell, ",") is not None for cell in commas) else "."
    )
    for name in cells:
        if not any(_says(name, word) for word in PATIENTS):
            cells[name] = tuple(without_thousands(name, cells[name], decimal))
    return CaseTable(path, len(lines), cells, decimal)


@dataclass(frozen=True)
class TableFacts:
    """The facts of tables that are read alike."""

    folder: Path
    tables: Mapping[str, CaseTable]  # by hospital, or of all together under the folder's own name
    kind: str
    outcomes: Mapping[str, tuple[str, ...]]  # what each table calls what is learned
    labels: Mapping[str, int]  # of a classification, as they stand there, and how many patients have each
    words: Mapping[str, Mapping[str, str]]  # of a column with categories, values there: what the plan calls them
    columns: tuple[Any, ...]
    left: Mapping[str, str]  # columns that are not read, and why
    sites: Mapping[str, int]  # hospital -> patients
    by_column: str | None  # that names hospitals
    small: Mapping[str, str] = field(default_factory=dict)  # hospitals that are left out, and why

    @property
    def classes(self) -> list[str]:
        """The plan's classes."""
        return yes_last(_in_order(set(self.words[self.target].values())))

    @property
    def target(self) -> str:
        """The plan's column of what is learned."""
        return self.outcomes[next(iter(self.tables))][0]


def look_at_tables(folder: Path, tables: Mapping[str, CaseTable], site: str) -> TableFacts:
    """Find in tables what is to be learned, and of what; a DataError says what is missing."""
    several = len(tables) > 1
    tables = _spelt_alike(tables)
    kind, outcomes = _outcomes(tables)
    first = next(iter(tables.values()))
    by_column = None if several else first.site
    labels = _labels(tables, outcomes) if kind == "classification" else {}
    if _are_measured([*labels]):
        kind, labels = "regression", {}
    if len(labels) > MOST_LEVELS:
        raise DataError(
            f"column {outcomes[next(iter(tables))][0]!r} has {len(labels)} different values, too many for classes, and "
            "not all are numbers; name another column with --target"
        )
    words = {outcomes[next(iter(tables))][0]: _words(labels)} if labels else {}
    columns, left = _read(tables, outcomes, words)
    if by_column:
        patients = first.patients_by(by_column)
        sites = {name: patients[name] for name in first.distinct(by_column)}
    else:
        sites = {name: len(set(_patients(table))) for name, table in tables.items()} if several else {}
        sites = sites or {site: len(set(_patients(first)))}
    small = {}
    if kind == "survival":  # where so few are tested, nothing is said of who comes first
        few = {name: count for name, count in sites.items() if name not in trained_of(sites)}
        small = {name: f"a hospital of {count} patients, too few for a concordance" for name, count in few.items()}
        sites = {name: count for name, count in sites.items() if name not in few}
        tables = {name: table for name, table in tables.items() if name not in few}
    if wrong := [name for name in sites if not is_safe_name(name)]:
        where = f" in column {by_column!r}" if by_column else ""
        raise DataError(f"{wrong[0]!r}{where} can't be a hospital's name; use letters, digits, '.', '_' and '-'")
    return TableFacts(folder, tables, kind, outcomes, labels, words, columns, left, sites, by_column, small)


def _spelt_alike(tables: Mapping[str, CaseTable]) -> dict[str, CaseTable]:
    """Return tables whose columns are called as in the first one, where they differ by small and large letters only,
    as they are read."""
    spelt: dict[str, str] = {}
    found = {}
    for site, table in tables.items():
        once = Counter(map(str.casefold, table.cells))
        low = {name: name.casefold() for name in table.cells}
        plans = {name: spelt.setdefault(own, name) if once[own] == 1 else name for name, own in low.items()}
        cells = {plans[name]: own for name, own in table.cells.items()}
        found[site] = replace(table, cells=cells, asked=plans.get(table.asked or ""))
    return found


def _patients(table: CaseTable) -> Sequence[str]:
    """Return the patient of each line."""
    return table.cells[table.patient] if table.patient else [*map(str, range(table.lines))]


def _outcomes(tables: Mapping[str, CaseTable]) -> tuple[str, dict[str, tuple[str, ...]]]:
    survivals = {site: table.survival for site, table in tables.items()}
    targets = {site: table.target for site, table in tables.items()}
    if all(survivals.values()) and not all(targets.values()):
        return "survival", {site: found for site, found in survivals.items() if found}
    targets = {site: targets[site] or table.event for site, table in tables.items()}
    learned = sorted(filter(None, targets.values()))
    for site, table in tables.items():
        # What others learn has one value at a hospital of, say, healthy people.
        targets[site] = targets[site] or next((name for name in learned if name in table.cells), None)
        if targets[site] is None:
            if named := table.called(TARGETS):
                raise DataError(f"column {named[0]!r} of {table.path.name} {ONE_VALUE}; nothing can be learned")
            names = ", ".join(list(table.cells)[:MOST_LEVELS])
            raise DataError(
                f"medsilo does not know which column of {table.path.name} to learn; name it with --target COLUMN, or "
                f"call two 'time' and 'event', without gaps or totals. There are {names}"
            )
    return "classification", {site: (str(target),) for site, target in targets.items()}


def _labels(tables: Mapping[str, CaseTable], outcomes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    counts = sum((table.patients_by(outcomes[site][0]) for site, table in tables.items()), Counter[str]())
    return {level: counts[level] for level in _in_order(set(counts))}


def _words(labels: Mapping[str, int]) -> dict[str, str]:
    """Return what the plan calls classes; those of an outcome that is 0 or 1 are no and yes."""
    if tuple(labels) == ("0", "1"):
        return {"0": "no", "1": "yes"}
    words = plans_words(labels)
    rest = sum(count for level, count in labels.items() if words[level] == OTHER)
    if len({*words.values()} - {OTHER}) + (rest >= LEAST_NAMED) < 2:
        raise DataError(
            f"fewer than two values of the target have {LEAST_NAMED} patients, so they may be names; name another "
            f"column with --target, or fill in empty cells"
        )
    return words


def _are_measured(labels: Sequence[str]) -> bool:
    """Return whether values in order are numbers that were measured or counted. Grades are fewer, and mostly in steps
    of 1."""
    numbers = [number for label in labels if (number := TableReader.number(label)) is not None]
    ones = sum(after - before == 1 for before, after in pairwise(numbers))
    grades = MOST_CLASSES if ones >= len(numbers) / 2 else MOST_GRADES
    return len(numbers) == len(labels) > grades


def _in_order(levels: set[str]) -> list[str]:
    """Return levels in order, numbers first and by their size."""
    return sorted(
        levels, key=lambda level: (TableReader.number(level) is None, TableReader.number(level) or 0.0, level)
    )


def _read(
    tables: Mapping[str, CaseTable], outcomes: Mapping[str, Sequence[str]], words: dict[str, dict[str, str]]
) -> tuple[tuple[Any, ...], dict[str, str]]:
    """Return the columns that a network reads, and why others are left out. words: gets what the plan calls the values
    of each column with categories."""
    columns, left = list[Any](), dict[str, str]()
    telling = [table for table in tables.values() if table.lines >= MOST_LEVELS] or list(tables.values())
    for name in dict.fromkeys(name for table in tables.values() for name in table.cells):
        if any(name in own for own in outcomes.values()):
            continue
        if lacking := [site for site, table in tables.items() if name not in table.cells]:
            left[name] = f"{lacking[0]} lacks it"
        elif why := next((why for table in telling if (why := _why_not(table, name))), ""):
            left[name] = why
        elif len({level for table in tables.values() for level in table.distinct(name)}) < 2:
            left[name] = ONE_VALUE
        elif all(table.is_numbers(name) for table in tables.values()):
            columns.append(name)
        elif any(table.is_numbers(name) for table in tables.values()):
            left[name] = "numbers at one hospital and categories at another"
        else:
            patients = sum((table.patients_by(name) for table in tables.values()), Counter[str]())
            own = plans_words(patients)
            if len(named := {*own.values()} - {OTHER}) < 2:
                left[name] = f"has no two short values that {LEAST_NAMED} patients have, so they may be names or notes"
                continue
            if sum(patients[level] for level in own if own[level] == OTHER) > NOTES * patients.total():
                left[name] = f"has many values that fewer than {LEAST_NAMED} patients have, so they may be notes"
                continue
            words[name] = own
            columns.append({"name": name, "levels": [*sorted(named), *([OTHER] if OTHER in own.values() else [])]})
    if not columns:
        raise DataError(
            "no column can be read: " + ", ".join(f"{name} ({left[name]})" for name in [*left][:MOST_LEVELS])
        )
    return tuple(columns), left


def _why_not(table: CaseTable, name: str) -> str:
    """Return why a column that is so at one hospital is not read."""
    values = table.distinct(name)
    if name in (table.patient, table.site) or names_somebody(name) or any(_says(name, word) for word in PATIENTS):
        return "names patients or hospitals"
    if not table.asked and (name.lower() in TARGETS or any(_says(name, word) for word in EVENTS + TIMES)):
        return "may reveal the answer"
    if {value.lower() for value in values} <= {*PARTS, *OTHER_NAMES} and values:
        return "says who is trained on"
    if len(table.known(name)) < RARE * table.lines:
        return "is empty in most lines"
    if table.is_numbers(name):
        return "numbers the lines" if _are_numbers_of_lines(table, values) else ""
    if any(map(DATE.match, values)):
        return "has dates: write days, or an age"
    if len(values) <= MOST_LEVELS:
        return ""
    texts = sum(TableReader.number(cell, table.decimal) is None for cell in table.known(name))
    if texts < RARE * table.lines:
        return "has lines that are no numbers: write NA there, or remove lines of units and totals"
    units = all(cell[:1].isdigit() for cell in table.known(name))
    return "has too many different values for a category" + (": write numbers without units" if units else "")


def _are_numbers_of_lines(table: CaseTable, values: Sequence[str]) -> bool:
    """Return whether whole numbers are those of lines, or of records: nearly all different, and long."""
    numbers = [TableReader.number(value, table.decimal) or 0.0 for value in values]
    if table.lines <= MOST_LEVELS or any(number != int(number) for number in numbers):
        return False
    return len(numbers) == table.lines or (len(numbers) > UNIQUE * table.lines and min(numbers) >= LONG)


# ---------------------------------------------------------------------------------------------------- choices
def choose_tables(looks: TableFacts, folder: DatasetLayout) -> DatasetLayout:
    """Return what was found in tables, and the choices for them."""
    several, trained = len(looks.sites) > 1, sorted(looks.sites[site] for site in trained_of(looks.sites))
    batch = BATCH, "lines are small: any machine has room"
    if looks.kind == "survival":
        batch = LARGE_BATCH, "Cox's loss compares the cases of a batch, so it is large"
    dealt = (
        f"one table for all, dealt by its column {looks.by_column!r}; leave it out where each has a table of its own"
    )
    left = "; ".join(f"{name}: {why}" for name, why in looks.left.items())
    few = max(trained) < FEW
    plan = {
        "task.kind": (looks.kind, _why(looks)),
        **_learned(looks),
        "task.columns": (list(looks.columns), f"all that hospitals have alike{f', without {left}' if left else ''}"),
        "task.missing": ("mean", "the site's mean takes the place of a value that is not known"),
        "task.standardise": ("site", "each hospital by its own training cases"),
        **({"task.partition": ({"kind": "column"}, dealt)} if looks.by_column else {}),
        "network.name": ("linear" if few else "mlp", "few patients: one layer" if few else "patients enough"),
        **({} if few else {"network.norm": ("none", "small numbers need none")}),
        "training.batch_size": batch,
        **({"training.learning_rate": (0.01, ADAMS_RATE)} if few else {}),
    }
    own = {site: _settings(looks, site, table) for site, table in looks.tables.items()}
    return replace(folder, path=looks.folder, site=next(iter(looks.sites))).choose(
        "table",
        found_lines(looks),
        looks.sites if several else {"": trained[0]},
        plan,
        next(iter(own.values())) if len(own) == 1 else {},
        examples=dict.fromkeys([*looks.sites, ""], trained[len(trained) // 2]),  # the larger of two in the middle
        sites=own if len(own) > 1 else None,
    )


def _why(looks: TableFacts) -> str:
    """Return why numbers are learned as such or as classes, and what to write where that is wrong."""
    if looks.kind == "regression":
        return "many numbers; for classes write classification, and labels in place of range"
    if looks.labels and all(TableReader.number(name) is not None for name in looks.classes):
        return "few numbers; to learn a number write regression, and range: [least, greatest] in place of labels"
    return "by the column that is learned"


def _learned(looks: TableFacts) -> Choices:
    """Return the keys of what is learned; the plan calls it as the first table does."""
    names = looks.outcomes[next(iter(looks.tables))]
    if looks.kind == "survival":
        events = dict.fromkeys(name for table in looks.tables.values() for name in table.called(EVENTS))
        why = f"a guess by the names, of {', '.join(events)}: correct it, and data.columns where a hospital has others"
        return {"task.time": (names[0], why), "task.event": (names[1], "1 where it came, 0 where not yet")}
    asked = next(iter(looks.tables.values())).asked
    target = names[0], "as --target asked for" if asked else "a guess by its name: correct it"
    if looks.kind == "regression":
        known = [
            TableReader.number(value) or 0.0
            for site, table in looks.tables.items()
            for value in table.distinct(looks.outcomes[site][0])
        ]
        why = "round numbers around what is there: a line outside is refused, so widen it where others may have more"
        return {"task.target": target, "task.range": (list(_around(min(known), max(known))), why)}
    return {
        "task.target": target,
        "task.labels": (looks.classes, f"the column's values; what few patients have is {OTHER!r}"),
    }


def _around(least: float, most: float) -> tuple[float, float]:
    """Return round numbers on both sides, which tell of no patient's."""
    step = 10.0 ** math.floor(math.log10(max(abs(least), abs(most), 1e-9)))
    return (0.0 if least >= 0 else step * math.floor(least / step)), step * math.floor(most / step + 1)


def _settings(looks: TableFacts, site: str, table: CaseTable) -> Choices:
    """Return what one table's hospital says of it."""
    found: dict[str, tuple[Any, str]] = {
        "data.table": (table.path.relative_to(looks.folder).as_posix(), "a line per case")
    }
    roles = {role: name for role, name in (("patient", table.patient), ("site", looks.by_column)) if name}
    plans, own = looks.outcomes[next(iter(looks.tables))], looks.outcomes[site]
    read = [column["name"] if isinstance(column, dict) else column for column in looks.columns]
    if called := renamed(roles | dict(zip(plans, own, strict=True))):
        found["data.columns"] = called, "what these, and the plan's columns, are called here: a guess by the names"
    levels = {name: _here(words, table, name) for name, words in looks.words.items() if name in read}
    if levels := {name: words for name, words in levels.items() if words}:
        found["data.levels"] = levels, f"values here that the plan calls otherwise, as {OTHER} where they are rare"
    if looks.kind == "survival" and (values := table.distinct(own[1])) != ["0", "1"]:
        both = {_number(value): "event" if value == yes_last(values)[-1] else "censored" for value in values}
        found["data.label_map"] = both, "values of the event's column; a guess: correct it"
    if looks.kind == "classification" and (words := _here(looks.words[looks.target], table, own[0])):
        both = {_number(value): name for value, name in words.items()}
        found["data.label_map"] = both, "the column's values: names in the plan"
    if table.decimal == ",":
        found["data.decimal"] = ",", "numbers are written with a comma"
    return found


def _here(words: Mapping[str, str], table: CaseTable, name: str) -> dict[str, str]:
    """Return the values of a table's column that the plan calls otherwise."""
    own = table.distinct(name)
    return {value: plans for value, plans in renamed(words).items() if value in own}


def _number(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


def found_lines(looks: TableFacts) -> list[str]:
    """Return what was found, one sentence a line."""
    patients, lines = sum(looks.sites.values()), sum(table.lines for table in looks.tables.values())
    learned = " and ".join(looks.outcomes[next(iter(looks.tables))])
    found = [
        f"{looks.kind} by a table: {counted(lines, 'line')} of {counted(patients, 'patient')}, "
        f"{learned} told by {counted(len(looks.columns), 'column')}"
    ]
    if len(looks.sites) > 1:
        how = f"by column {looks.by_column!r}" if looks.by_column else "each with a table"
        told = ", ".join(f"{site} {count}" for site, count in looks.sites.items())
        found.append(f"{len(looks.sites)} hospitals, {how}: {told}")
    left = {**looks.left, **looks.small}
    return [*found, *(f"not read: {name} ({why})" for name, why in left.items())]


def look(folder: DatasetLayout) -> DatasetLayout | None:
    """Say what suits a folder with tables, or one table; nothing of another."""
    if folder.path.is_file() and folder.path.suffix.lower() in ENDINGS:
        table = _table(folder.path)
        tables = {folder.path.stem: table} if table else {}
    else:
        tables = tables_in(folder)
    if not tables:
        return None
    if folder.target:
        tables = {site: _asked_of(table, folder.target) for site, table in tables.items()}
    place = folder.path.parent if folder.path.is_file() else folder.path
    return choose_tables(look_at_tables(place, tables, folder.site), folder)
