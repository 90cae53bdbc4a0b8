"""Examine a folder of tables with one line per patient. Choose a plan, and settings with which a hospital reads its
table.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from medsilo.core.errors import DataError
from medsilo.core.text import counted, safe_name
from medsilo.tasks.case_index import OTHER_NAMES, CaseIndex
from medsilo.tasks.cells import LIMIT, THOUSANDS, as_written, without_thousands
from medsilo.tasks.columns import TextColumn, at_limits, filled, lines_of_totals, numbers_in, read_columns, span
from medsilo.tasks.shares import PARTS
from medsilo.tasks.sources import DataSource
from medsilo.tasks.table_reader import ENDINGS, TableReader, spelling
from medsilo_lab.start.choices import ADAMS_RATE, Choices, trained_of
from medsilo_lab.start.dataset_layout import DatasetLayout
from medsilo_lab.start.wording import (
    LEAST_NAMED,
    OTHER,
    may_be_a_person,
    names_a_person,
    names_somebody,
    plans_words,
    renamed,
    renamed_words,
    yes_last,
)

PATIENTS = (
    *("patient", "patid", "patnr", "pseudonym", "subject", "participant", "person", "pid", "mrn", "id"),
    *("proband", "paciente", "paziente", "fallnr", "dossier", "ipp", "nhc"),
)
# names of patient columns, without blanks and punctuation; columns with these names may have few different values
SURE = frozenset(
    """
    patient patientid patid patnr patno patientnr patientno patientnumber patientcode patientkey ptid ptno pt pnr pid
    subject subjectid subjid usubjid subjectno subjectkey participant participantid person personid recordid studyid
    studyno studynumber caseid caseno casenr casenumber enrolid enrollmentid screeningid screeningno randomisationno
    randono mrn mrnumber medicalrecordnumber medrecno hospitalnumber nhsnumber chinumber nhsno ssn cprnr cpr bsn
    memberid beneid desynpuf idpatient patientpseudonym pseudonym pseudonymid pseudid fallid fallnr fallnummer
    patientennummer patientnummer patientenid patientennr patientin probandid proband probandennummer probandennr
    kvnr ipp nip numeropatient iddupatient idpatiente nhc idpaciente paciente numerodepaciente idpaziente paziente
    codicepaziente idpacjenta pacjent pesel hastano hastaid hasta patientnr potilas potilasid personnummer prontuario
    patmrn patmrnid epatid submitterid bcrpatientbarcode
    """.split()  # noqa: SIM905 - one word beside the other
)
SITES = (
    "dataaccessgroup",
    "redcapdataaccessgroup",
    "dag",
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
SAID = {  # keys of the user's answers about a table, except the keys left, patient, survival, alone and event
    "codes": "values that mean 'not known'",
    "limits": "columns in which <0.5 stands for 0.5, what could be measured",
    "spans": "days from one date to another",
    "fill": "columns whose value a patient's later lines have, too",
}
LOOKALIKES = frozenset({"stage", "percentage", "dosage", "voltage", "clinical", "composite", "instrument", "opposite"})
# Medical words in column names: for example, the column "tumor site" names a place in the body and not a hospital.
BODY = re.compile("tumou?r|primary|lesion|anatom|metasta|biops|infect|surg|cancer", re.IGNORECASE)
MEASUREMENTS = ("gene", "feature", "marker", "parameter", "variable", "measurement", "analyte", "protein", "probe")
DATE = re.compile(r"\d{1,4}([-./])\d{1,2}\1\d{1,4}\b")
WORDS = "has lines that are no numbers: write NA there, or remove lines of units and totals"
DAY = re.compile(r"(19|20)\d\d(0[1-9]|1[0-2])([0-2]\d|3[01])")
MOST_DATES = 200
MANY = "has too many different values for a category"
DATES = "has dates: write days, or an age"
ONE_VALUE = "has one value at most, as '-', NA and the like stand for none"
MISSING = frozenset(DataSource.model_fields["missing"].default)
MOST_GRADES, MOST_CLASSES, MOST_LEVELS = 5, 10, 20
FOLDS = frozenset(("fold", "folds", "cv", "cvfold", "kfold", "split", "partition", "trainval", "istest", "istrain"))
SHOWN = 4
RARE = 0.5  # a column is left out if it has values in less than this fraction of the lines
# if more than this fraction of patients have rare values in a text column, the column contains free-text notes
NOTES = 0.1
# numbers in a column count as record numbers if the fraction of different numbers is above UNIQUE, and no number is
# below LONG
UNIQUE, LONG = 0.95, 1e5
SOME = 0.02  # a column counts as empty if it has values in less than this fraction of the lines with an outcome
LATER = 0.2  # if more than this fraction of lines have no outcome, baseline and follow-up are in separate lines
STEADY = 0.05  # if the label changes in less than this fraction of lines, the lines are time steps of a recording
FEW = 1000  # if the largest hospital has fewer patients than this number, the network has a single layer
BATCH, LARGE_BATCH = 32, 128


@dataclass(frozen=True)
class CaseTable:
    path: Path
    lines: int
    columns: Mapping[str, TextColumn]
    decimal: str
    asked: str | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    _facts: dict[str, "_ColumnFacts"] = field(default_factory=dict, repr=False, compare=False)

    def of(self, name: str) -> "_ColumnFacts":
        if name not in self._facts:
            codes = self.said.get("codes", {}).get(name, ())
            self._facts[name] = _ColumnFacts(self.columns[name].shown(), self.decimal, codes)
        return self._facts[name]

    def changed(self, columns: Mapping[str, TextColumn], **others: Any) -> "CaseTable":
        """Return a copy of the table with the columns `columns`. If a column is unchanged, the copy keeps the cached
        properties of the column.
        """
        own = replace(self, columns=columns, **others)
        codes, before = own.said.get("codes", {}), self.said.get("codes", {})
        kept = {name: facts for name, facts in self._facts.items() if columns.get(name) is self.columns[name]}
        kept = {name: facts for name, facts in kept.items() if codes.get(name) == before.get(name)}
        return replace(own, _facts=kept)

    def without_totals(self) -> "CaseTable":
        """Return the table without its lines of totals, whose values are no classes and belong to no patient."""
        named = [self.columns[name] for name in (self.patient, self.site) if name]
        lines = np.flatnonzero(~lines_of_totals(named, self.lines))
        if len(lines) == self.lines:
            return self
        columns = {name: column[lines] for name, column in self.columns.items()}
        return CaseTable(self.path, len(lines), columns, self.decimal, self.asked, self.said)

    def is_numbers(self, name: str) -> bool:
        own = self.of(name)
        return not np.isnan(own.numbers[own.known]).any()

    def called(self, words: Sequence[str], fits: Callable[[str], bool] = lambda name: True) -> list[str]:
        """Return the columns whose names match a word in `words`. First come the columns whose names equal a word, then
        the columns whose names only match a word.
        """
        found = [name for word in words for name in self.columns if _says(name, word) and fits(name)]
        return sorted(dict.fromkeys(found), key=lambda name: name.lower() not in words)

    def distinct(self, name: str) -> list[str]:
        return self.of(name).distinct

    def patients_by(self, name: str) -> Counter[str]:
        own, patients = self.of(name), self.patient_codes
        known = own.codes >= 0
        width = 1 + int(patients.max(initial=0))
        pairs = np.unique(own.codes[known].astype(np.int64) * width + patients[known])
        counts = np.bincount(pairs // width, minlength=len(own.distinct))
        return Counter({level: int(count) for level, count in zip(own.distinct, counts, strict=True) if count})

    @cached_property
    def patient(self) -> str | None:
        """The patient column: the first column with many different values whose name is usual for a patient column. A
        column of people's names is the last choice, because two patients may have the same name.
        """
        if "patient" in self.said:
            return self.said["patient"] or None
        return min(self.patients_called, key=lambda name: "name" in name.lower(), default=None)

    @cached_property
    def patients_called(self) -> list[str]:
        """The columns with many different values whose names are usual for patient columns. A column whose name is
        among the most reliable names needs only a few different values.
        """
        sure = [name for name in self.columns if plain_name(name) in SURE]
        found = [*sure, *self.called(PATIENTS, lambda name: len(self.distinct(name)) > self.lines / 10)]
        least = min(LEAST_NAMED, self.lines / 10)
        return [name for name in dict.fromkeys(found) if len(self.distinct(name)) > least]

    @property
    def patient_codes(self) -> np.ndarray:
        """For each line, a number that identifies the patient. Without a patient column, each line counts as a
        different patient.
        """
        return self.columns[self.patient].codes if self.patient else np.arange(self.lines)

    @cached_property
    def patients(self) -> int:
        return int(np.count_nonzero(np.bincount(self.patient_codes)))

    @property
    def names_patients(self) -> bool:
        """True if the table shows which lines belong to the same patient. If a column `id` has a different value in
        every line, the result is False, because the column may number the lines.
        """
        if self.patient is None or "patient" in self.said:
            return self.patient is not None
        return self.patient.lower() != "id" or self.patients < self.lines

    @cached_property
    def site(self) -> str | None:
        if "site" in self.said:
            return str(self.said["site"])
        found = self.called(SITES, lambda name: 1 < len(self.distinct(name)) <= self.lines / 3)
        return next((name for name in found if not BODY.search(name)), None)

    @cached_property
    def survival(self) -> tuple[str, str] | None:
        """The names of the column of times and the column of events, or None if one of these columns is missing."""
        if "survival" in self.said:
            return tuple(self.said["survival"])
        if self.asked:
            return None
        most = min(MOST_CLASSES, self.lines / 3)
        times = self.called(TIMES, lambda name: self.is_numbers(name) and len(self.distinct(name)) > most)
        events = self.called(EVENTS, lambda name: len(self.distinct(name)) == 2 or self.lines < MOST_LEVELS)
        place = list(self.columns).index
        near = [(abs(place(time) - place(event)), place(time), time, event) for event in events for time in times]
        # chooses the time column and the event column that are nearest to each other in the table
        return min(near)[2:] if near else None

    @cached_property
    def target(self) -> str | None:
        """The outcome column: the column that the user named, or the first column with a usual name for an outcome."""
        if "survival" in self.said:
            return None
        return self.asked or next(iter(self.called(TARGETS, lambda name: len(self.distinct(name)) > 1)), None)

    @property
    def event(self) -> str | None:
        """The event column. If the table has no column of times, the task is a classification: event or no event."""
        return next(iter(self.called(EVENTS, lambda name: len(self.distinct(name)) == 2)), None)

    @property
    def learned(self) -> tuple[str, ...]:
        """The outcome columns, which are recognised by their names or known from the user's answers."""
        if self.target:
            return (self.target,)
        return self.survival or ((self.event,) if self.event else ())

    def has_outcome(self) -> np.ndarray:
        return (
            np.all([self.of(name).codes >= 0 for name in self.learned], axis=0) if self.learned else np.zeros(0, bool)
        )

    def in_earlier_lines(self) -> list[str]:
        """Return the columns that have values in lines without an outcome, but are empty in nearly all lines with an
        outcome.
        """
        learned = self.has_outcome()
        if not len(learned) or learned.mean() > 1 - LATER or not learned.any() or self.patients == self.lines:
            return []
        found = []
        for name in self.columns:
            there = self.of(name).codes >= 0
            if name not in self.learned and there.any() and there[learned].mean() < SOME:
                found.append(name)
        return found

    @property
    def is_recording(self) -> bool:
        """True if the table is a recording, whose lines are time steps. A table counts as a recording if its times
        never decrease, or if labels recur but rarely change from line to line.
        """
        for name in self.called(("time", "timestamp", "datetime", "ms", "seconds", "t")):
            numbers = self.of(name).of_lines
            cells = self.columns[name].texts()
            grows = (
                all(a <= b for a, b in pairwise(cells)) if np.isnan(numbers).any() else (np.diff(numbers) >= 0).all()
            )
            if self.lines > 2 and grows:
                return True
        label = self.target or next(iter(self.called(("activity", "rhythm", "state"))), None)
        if self.survival or self.patient or not label:
            return False
        changes = int((np.diff(self.columns[label].codes) != 0).sum())
        return len(self.distinct(label)) <= changes < STEADY * self.lines


class _ColumnFacts:
    def __init__(self, column: TextColumn, decimal: str, codes: Sequence[str] = ()) -> None:
        self.column = column
        known = (value not in MISSING and not (codes and TableReader.level(value) in codes) for value in column.values)
        self.known = np.fromiter(known, bool, len(column.values))
        # the distinct texts of the column as numbers; NaN if a text is no number
        self.numbers = numbers_in(column.values, decimal)
        whole = np.isfinite(self.numbers) & (self.numbers == np.floor(self.numbers))
        levels = [
            str(int(number)) if plain else as_written(value, decimal)
            for value, number, plain in zip(column.values, self.numbers.tolist(), whole.tolist(), strict=True)
        ]
        by_size = {
            level: (bool(np.isnan(number)), 0.0 if np.isnan(number) else number, level)
            for level, number, known in zip(levels, self.numbers.tolist(), self.known.tolist(), strict=True)
            if known
        }
        self.distinct = sorted(by_size, key=by_size.__getitem__)
        place = {level: number for number, level in enumerate(self.distinct)}
        own = [place[level] if known else -1 for level, known in zip(levels, self.known.tolist(), strict=True)]
        # for each line, the index in `distinct` of the line's value; -1 if the line has no value
        self.codes = np.array(own, int)[column.codes]

    @property
    def of_lines(self) -> np.ndarray:
        return self.numbers[self.column.codes]

    @property
    def filled(self) -> int:
        return int((self.codes >= 0).sum())

    @property
    def texts(self) -> int:
        return int(((self.codes >= 0) & np.isnan(self.of_lines)).sum())


@cache
def plain_name(name: str) -> str:
    """Return a column name in lower case, without blanks, punctuation and ambiguous words.

    >>> plain_name("Pat.-Nr."), plain_name("caseID")
    ('patnr', 'caseid')
    """
    parts = re.split(r"[\W_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    text = "".join(part for part in parts if part not in LOOKALIKES)
    return text.replace("eventname", "visitname")  # REDCap's column of visits


def _says(name: str, word: str) -> bool:
    """Return True if a column name equals a word, begins with the word, or ends with the word. For example, rfstime
    ends with the word time.
    """
    text = plain_name(name)
    return text == word or (len(word) > 3 and (text.endswith(word) or text.startswith(word)))


def tables_in(folder: DatasetLayout) -> dict[str, CaseTable]:
    """Return the table of each hospital in a folder, or the single table of the folder. If the folder is not a folder
    of tables, return an empty dictionary.
    """
    recordings = [name for name in folder.files if name.lower().endswith(CaseIndex.RECORDINGS)]
    if folder.table_of(recordings, labelled=False):
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
        if table and (spelling(table.columns)(folder.target) if folder.target else table.called(TARGETS + EVENTS))
    }
    if not known and any("/" in name for name in files):
        return {}
    return known or {site: table for site, table in found.items() if table}


def _refuse_parts(files: Sequence[Path], target: str | None) -> None:
    """Raise DataError if two tables contain the same patients, and only one of the tables contains the outcome.

    The function compares each of the first MOST_LEVELS files with the next file. The function never raises the error
    for recordings, because recordings have no patient column.
    """
    words = [target] if target else [*TARGETS, *EVENTS]
    pairs = [pair for pair in pairwise(files[:MOST_LEVELS]) if pair[0].parent == pair[1].parent]
    for pair in pairs:
        heads = [(TableReader.first_lines(path, 1) or [[]])[0] for path in pair]
        known = [any(_says(name, word) for name in head for word in words) for head in heads]
        shared = any(_says(name, word) for name in {*heads[0]} & {*heads[1]} for word in PATIENTS)
        if shared and known[0] != known[1]:
            both = " and ".join(path.name for path in pair)
            raise DataError(f"only one of {both} has the outcome; join tables of the same patients into one table")


def _asked_of(table: CaseTable, target: str) -> CaseTable:
    if (column := spelling(table.columns)(target)) is None:
        names = ", ".join([*table.columns][:MOST_LEVELS])
        raise DataError(f"--target {target!r} is no column of {table.path.name}; there are {names}")
    return replace(table, asked=column)


def _table(path: Path) -> CaseTable | None:
    """Read a table. If the table has a single column, or if the lines of the table name files, return None."""
    table = read_columns(path)
    head = table.names
    if not table.count and len(head) > 1:
        raise DataError(f"{path.name} has no line with as many cells as the first line; export it again, or remove it")
    if len(head) < 2 or "image" in head or "recording" in head:
        return None
    if sum(map(bool, head)) < len(head) / 2:
        raise DataError(f"{path.name} has few names in its first line; remove titles above the names of the columns")
    if all(TableReader.number(cell) is not None for cell in head):
        raise DataError(f"{path.name} has numbers in the first line; add a line with the names of columns above it")
    if twice := [name for name, times in Counter(filter(None, head)).items() if times > 1]:
        raise DataError(f"{path.name} has {head.count(twice[0])} columns {twice[0]!r}; give each of them another name")
    columns = {name: table.column(name) for name in head if name}
    commas = (LIMIT.sub("", value, 1) for column in columns.values() for value in column.values if "," in value)
    written = any(THOUSANDS.fullmatch(value) or TableReader.number(value, ",") is not None for value in commas)
    decimal = "," if written else "."
    for name, own in columns.items():
        if decimal == "," and not any(_says(name, word) for word in PATIENTS):
            columns[name] = replace(own, values=tuple(without_thousands(name, own.values, decimal)))
    return CaseTable(path, table.count, columns, decimal).without_totals()


@dataclass(frozen=True)
class TableFacts:
    folder: Path
    # table of each hospital; if all hospitals are in one table, the only key is the name of the table
    tables: Mapping[str, CaseTable]
    kind: str
    outcomes: Mapping[str, tuple[str, ...]]
    labels: Mapping[str, int]  # in a classification, number of patients with each label
    words: Mapping[str, Mapping[str, str]]  # categorical column → value in the column → name of the value in plans
    columns: tuple[Any, ...]
    left: Mapping[str, str]  # column that is left out → reason
    sites: Mapping[str, int]
    by_column: str | None
    small: Mapping[str, str] = field(default_factory=dict)  # hospital that is left out → reason
    # name of a hospital in the table → name in plans
    called: Mapping[str, str] = field(default_factory=dict)

    def outcome_of(self, table: CaseTable) -> tuple[str, ...]:
        return next(outcome for site, outcome in self.outcomes.items() if self.tables.get(site) is table)

    @property
    def classes(self) -> list[str]:
        return yes_last(_in_order(set(self.words[self.target].values())))

    @property
    def target(self) -> str:
        return self.outcomes[next(iter(self.tables))][0]


def look_at_tables(folder: Path, tables: Mapping[str, CaseTable], site: str) -> TableFacts:
    """Find the outcome and the inputs in tables; raise DataError if there is no outcome or no input."""
    several = len(tables) > 1
    tables = _spelt_alike(tables)
    _refuse_patients_in_columns(tables)
    kind, outcomes = _outcomes(tables)
    first = next(iter(tables.values()))
    by_column = None if several or first.said.get("alone") else first.site
    labels = _labels(tables, outcomes) if kind == "classification" else {}
    if _are_measured([*labels]):
        kind, labels = "regression", {}
    if len(labels) > MOST_LEVELS:
        raise DataError(
            f"column {outcomes[next(iter(tables))][0]!r} has {len(labels)} different values, too many for classes, and "
            "not all are numbers; name another column with --target"
        )
    known = all(table.names_patients for table in tables.values())
    words = {outcomes[next(iter(tables))][0]: _words(labels, known)} if labels else {}
    columns, left = _read(tables, outcomes, words, known)
    if by_column:
        patients = first.patients_by(by_column)
        sites = {name: patients[name] for name in first.distinct(by_column)}
    else:
        sites = {name: table.patients for name, table in tables.items()} if several else {}
        sites = sites or {site: first.patients}
    small = {}
    if kind == "survival":  # with few test cases, the concordance says little about a survival model
        few = {name: count for name, count in sites.items() if name not in trained_of(sites)}
        small = {name: f"a hospital of {count} patients, too few for a concordance" for name, count in few.items()}
        events = _events(tables, outcomes, by_column)
        rare = {name: count for name, count in sites.items() if name not in few and events[name] < LEAST_NAMED}
        if len(few) + len(rare) < len(sites) - 1:
            small |= dict.fromkeys(rare, f"a hospital of fewer than {LEAST_NAMED} events, too few for a concordance")
            few |= rare
        sites = {name: count for name, count in sites.items() if name not in few}
        tables = {name: table for name, table in tables.items() if name not in few}
    called = _called_safely([*sites], by_column)
    sites = {called[name]: count for name, count in sites.items()}
    return TableFacts(folder, tables, kind, outcomes, labels, words, columns, left, sites, by_column, small, called)


def _called_safely(hospitals: Sequence[str], column: str | None) -> dict[str, str]:
    """Return the names of hospitals as they are written in plans, without blanks and umlauts. If two hospitals would
    get the same name, raise DataError.
    """
    called = {name: safe_name(name) for name in hospitals}
    if wrong := [name for name, own in called.items() if not own or [*called.values()].count(own) > 1]:
        where = f" in column {column!r}" if column else ""
        raise DataError(
            f"{wrong[0]!r}{where} can't be a hospital's name, or differs from another name only in punctuation; "
            "use letters, digits, '.', '_' and '-'"
        )
    return called


def _refuse_patients_in_columns(tables: Mapping[str, CaseTable]) -> None:
    """Raise DataError if columns of a table may be patients, or if each line contains only one measurement."""
    for table in tables.values():
        first = next(iter(table.columns))
        names = {plain_name(name) for name in table.columns}
        if names & {*MEASUREMENTS, "test", "item"} and names & {"value", "result", "wert", "valeur"} and len(names) < 9:
            raise DataError(
                f"{table.path.name} has a line for each measurement; give each patient a line, with a column for each "
                "kind of measurement"
            )
        measured = first.lower() in MEASUREMENTS and not table.is_numbers(first)
        turned = measured and len(table.of(first).column.values) == table.lines
        if people := [name for name in table.columns if names_a_person(name)]:
            turned = turned or len(people) > 1 or people[0] == table.target
        if turned:
            raise DataError(
                f"columns of {table.path.name} may be patients; write each patient into a line, and name the columns "
                "after measurements",
                private=", ".join(people),
            )


def _spelt_alike(tables: Mapping[str, CaseTable]) -> dict[str, CaseTable]:
    """If column names of several tables differ only in case, use the spelling of the first table in all tables."""
    spelt: dict[str, str] = {}
    found = {}
    for site, table in tables.items():
        once = Counter(map(str.casefold, table.columns))
        low = {name: name.casefold() for name in table.columns}
        plans = {name: spelt.setdefault(own, name) if once[own] == 1 else name for name, own in low.items()}
        columns = {plans[name]: column for name, column in table.columns.items()}
        said = _respelt(table.said, plans.__getitem__)
        found[site] = table.changed(columns, asked=plans.get(table.asked or ""), said=said)
    return found


def _outcomes(tables: Mapping[str, CaseTable]) -> tuple[str, dict[str, tuple[str, ...]]]:
    survivals = {site: table.survival for site, table in tables.items()}
    targets = {site: table.target for site, table in tables.items()}
    if all(survivals.values()) and not all(targets.values()):
        return "survival", {site: survival for site, survival in survivals.items() if survival}
    targets = {site: targets[site] or table.event for site, table in tables.items()}
    learned = sorted(filter(None, targets.values()))
    for site, table in tables.items():
        # if a hospital's table has only healthy people, the outcome column may have a single value, so the other tables
        # determine this column
        targets[site] = targets[site] or next((name for name in learned if name in table.columns), None)
        if targets[site] is None:
            if named := table.called(TARGETS):
                raise DataError(f"column {named[0]!r} of {table.path.name} {ONE_VALUE}; nothing can be learned")
            names = ", ".join(list(table.columns)[:MOST_LEVELS])
            raise DataError(
                f"medsilo does not know which column of {table.path.name} to learn; give --target COLUMN, or "
                f"name two columns 'time' and 'event', without empty cells or totals. The columns are {names}"
            )
    return "classification", {site: (str(target),) for site, target in targets.items()}


def _events(
    tables: Mapping[str, CaseTable], outcomes: Mapping[str, Sequence[str]], by_column: str | None
) -> Counter[str]:
    """Return the number of patients with the event at each hospital, if the outcome is survival."""
    found = Counter[str]()
    for site, table in tables.items():
        column = outcomes[site][1]
        happened = yes_last(table.distinct(column))[-1]
        came = table.of(column).codes == table.distinct(column).index(happened)
        if not by_column:
            found[site] += len(np.unique(table.patient_codes[came]))
            continue
        sites = table.of(by_column)
        came &= sites.codes >= 0
        pairs = np.unique(np.stack([sites.codes[came], table.patient_codes[came]]), axis=1)
        found.update(sites.distinct[place] for place in pairs[0].tolist())
    return found


def _labels(tables: Mapping[str, CaseTable], outcomes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    counts = sum((table.patients_by(outcomes[site][0]) for site, table in tables.items()), Counter[str]())
    return {level: counts[level] for level in _in_order(set(counts))}


def _words(labels: Mapping[str, int], known: bool) -> dict[str, str]:
    """Return the name that each class has in plans. The classes 0 and 1 get the names "no" and "yes". `known` is true
    if the patient of each line is known.
    """
    if tuple(labels) == ("0", "1"):
        return {"0": "no", "1": "yes"}
    words = plans_words(labels, known)
    rest = sum(count for level, count in labels.items() if words[level] == OTHER)
    if len({*words.values()} - {OTHER}) + (rest >= LEAST_NAMED) < 2:
        raise DataError(
            f"fewer than two values of the target have {LEAST_NAMED} patients, so values may be names; name another "
            f"column with --target, or fill in empty cells"
        )
    return words


def _are_measured(labels: Sequence[str]) -> bool:
    """Return True if the values of the outcome are measurements or counts, and not classes.

    Grades count as classes. Grades are numbers with few different values, mostly in steps of 1.
    """
    numbers = [number for label in labels if (number := TableReader.number(label)) is not None]
    ones = sum(after - before == 1 for before, after in pairwise(numbers))
    grades = MOST_CLASSES if ones >= len(numbers) / 2 else MOST_GRADES
    return len(numbers) == len(labels) > grades


def _in_order(levels: set[str]) -> list[str]:
    return sorted(
        levels, key=lambda level: (TableReader.number(level) is None, TableReader.number(level) or 0.0, level)
    )


def _read(
    tables: Mapping[str, CaseTable],
    outcomes: Mapping[str, Sequence[str]],
    words: dict[str, dict[str, str]],
    known: bool,
) -> tuple[tuple[Any, ...], dict[str, str]]:
    """Return the input columns, and the reasons for omitting other columns.

    Args:
        words: a dictionary, which receives the name in plans of each value of each categorical column
        known: true if the patient of each line is known
    """
    columns, left = list[Any](), dict[str, str]()
    telling = [table for table in tables.values() if table.lines >= MOST_LEVELS] or list(tables.values())
    for name in dict.fromkeys(name for table in tables.values() for name in table.columns):
        if any(name in outcome for outcome in outcomes.values()):
            continue
        if lacking := [site for site, table in tables.items() if name not in table.columns]:
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
            own = plans_words(patients, known, "level")
            if any(map(may_be_a_person, {level for level in own if own[level] != OTHER})):
                left[name] = "has values that look like people's names"
                continue
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
    """Return the reason why a column is left out, or an empty text if the column is used."""
    values = table.distinct(name)
    if why := table.said.get("left", {}).get(name):
        return str(why)
    if plain_name(name).startswith(("redcap", "visitname")):
        return "says which visit a line is"
    if (
        name in (table.patient, table.site)
        or names_somebody(name)
        or names_a_person(name)
        or name in table.patients_called
        or any(_says(name, word) for word in PATIENTS)
    ):
        return "names patients or hospitals"
    if not table.asked and (name.lower() in TARGETS or any(_says(name, word) for word in EVENTS + TIMES)):
        return "may reveal the answer"
    if plain_name(name) in FOLDS or ({value.lower() for value in values} <= {*PARTS, *OTHER_NAMES} and values):
        return "says who is trained on"
    if table.of(name).filled < RARE * table.lines:
        return "is empty in most lines"
    if table.is_numbers(name):
        if values and all(map(DAY.fullmatch, values[:MOST_DATES])):
            return DATES
        return "numbers the lines" if _are_numbers_of_lines(table, name) else ""
    if any(map(DATE.match, values)):
        return DATES
    if len(values) <= MOST_LEVELS:
        return ""
    texts = table.of(name).texts
    if texts < RARE * table.lines:
        return WORDS
    units = all(value[:1].isdigit() for value in values)
    return MANY + (": write numbers without units" if units else "")


def _are_numbers_of_lines(table: CaseTable, name: str) -> bool:
    """Return True if the values of a column are numbers of lines or of records. Numbers of lines or of records are all
    different, or are large and nearly all different.
    """
    own = table.of(name)
    numbers = np.unique(own.numbers[own.known])
    if table.lines <= MOST_LEVELS or (numbers != np.floor(numbers)).any():
        return False
    return len(numbers) == table.lines or bool(len(numbers) > UNIQUE * table.lines and numbers.min() >= LONG)


# ---------------------------------------------------------------------------------------------------- choices
def choose_tables(facts: TableFacts, folder: DatasetLayout) -> DatasetLayout:
    several, trained = len(facts.sites) > 1, sorted(facts.sites[site] for site in trained_of(facts.sites))
    batch = BATCH, "lines are small: any machine has room"
    if facts.kind == "survival":
        batch = LARGE_BATCH, "Cox's loss compares the cases of a batch, so it is large"
    dealt = (
        f"one table for all, dealt by its column {facts.by_column!r}; leave it out where each has a table of its own"
    )
    left = f", without {counted(len(facts.left), 'column')} (in data.yaml: which, and why)" if facts.left else ""
    few = max(trained) < FEW
    plan = {
        "task.kind": (facts.kind, _why(facts)),
        **_learned(facts),
        "task.columns": (list(facts.columns), f"all that hospitals have alike{left}"),
        "task.missing": ("mean", "the site's mean takes the place of a value that is not known"),
        "task.standardise": ("site", "each hospital by its own training cases"),
        **({"task.partition": ({"kind": "column"}, dealt)} if facts.by_column else {}),
        "network.name": ("linear" if few else "mlp", "few patients: one layer" if few else "patients enough"),
        **({} if few else {"network.norm": ("none", "small numbers need none")}),
        "training.batch_size": batch,
        **({"training.learning_rate": (0.01, ADAMS_RATE)} if few else {}),
    }
    own = {site: _settings(facts, site, table) for site, table in facts.tables.items()}
    return replace(folder, path=facts.folder, site=next(iter(facts.sites))).choose(
        "table",
        found_lines(facts),
        facts.sites if several else {"": trained[0]},
        plan,
        next(iter(own.values())) if len(own) == 1 else {},
        # number of patients of the hospital of median size; with an even number of hospitals, of the larger of the two
        # middle hospitals
        examples=dict.fromkeys([*facts.sites, ""], trained[len(trained) // 2]),
        sites=own if len(own) > 1 else None,
    )


def _why(facts: TableFacts) -> str:
    if facts.kind == "regression":
        return "many numbers; for classes write classification, and labels in place of range"
    if facts.labels and all(TableReader.number(name) is not None for name in facts.classes):
        return (
            "few numbers; to learn a number write regression, and range: [least, greatest] in place of labels and score"
        )
    return "by the column that is learned"


def _learned(facts: TableFacts) -> Choices:
    """Return the plan's keys that name the outcome columns. If the spelling of a column name differs between tables,
    the spelling of the first table is used.
    """
    names = facts.outcomes[next(iter(facts.tables))]
    if facts.kind == "survival":
        why = "a guess by the names: correct it, and data.columns where a hospital has others"
        return {"task.time": (names[0], why), "task.event": (names[1], "1 where it came, 0 where not yet")}
    asked = next(iter(facts.tables.values())).asked
    target = names[0], "as --target asked for" if asked else "a guess by its name: correct it"
    if facts.kind == "regression":
        known = [
            TableReader.number(value) or 0.0
            for site, table in facts.tables.items()
            for value in table.distinct(facts.outcomes[site][0])
        ]
        why = "round numbers around what is there: an outcome outside is cut, so widen it where others may have more"
        return {"task.target": target, "task.range": (list(_around(min(known), max(known))), why)}
    return {
        "task.target": target,
        "task.labels": (facts.classes, "the column's values" + renamed_words(facts.classes)),
    }


def _around(least: float, most: float) -> tuple[float, float]:
    """Widen a range to round numbers, so that the range reveals no patient's value."""
    step = 10.0 ** math.floor(math.log10(max(abs(least), abs(most), 1e-9)))
    return (0.0 if least >= 0 else step * math.floor(least / step)), step * math.floor(most / step + 1)


def _settings(facts: TableFacts, site: str, table: CaseTable) -> Choices:
    found: dict[str, tuple[Any, str]] = {
        "data.table": (table.path.relative_to(facts.folder).as_posix(), "a line per case")
    }
    roles = {role: name for role, name in (("patient", table.patient), ("site", facts.by_column)) if name}
    plans, own = facts.outcomes[next(iter(facts.tables))], facts.outcomes[site]
    read = [column["name"] if isinstance(column, dict) else column for column in facts.columns]
    if called := renamed(roles | dict(zip(plans, own, strict=True))):
        found["data.columns"] = called, "what these, and the plan's columns, are called here: a guess by the names"
    levels = {name: _here(words, table, name) for name, words in facts.words.items() if name in read}
    if levels := {name: words for name, words in levels.items() if words}:
        found["data.levels"] = levels, f"values here that the plan calls otherwise, as {OTHER} where they are rare"
    if facts.kind == "survival" and ((values := table.distinct(own[1])) != ["0", "1"] or "event" in table.said):
        came = table.said.get("event", yes_last(values)[-1])
        both = {_number(value): "event" if value == came else "censored" for value in values}
        found["data.label_map"] = both, "values of the event's column; a guess: correct it"
    if facts.kind == "classification" and (words := _here(facts.words[facts.target], table, own[0])):
        both = {_number(value): name for value, name in words.items()}
        found["data.label_map"] = both, "the column's values: names in the plan"
    for key, why in SAID.items():
        if own_words := table.said.get(key):
            found[f"data.{key}"] = own_words, why
    if table.decimal == ",":
        found["data.decimal"] = ",", "numbers are written with a comma"
    return found


def _here(words: Mapping[str, str], table: CaseTable, name: str) -> dict[str, str]:
    """Return a dictionary from values of a column to their names in the plan. Values that have the same name in the
    plan as in the column are left out.
    """
    own = table.distinct(name)
    return {value: plans for value, plans in renamed(words).items() if value in own}


def _number(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


def found_lines(facts: TableFacts) -> list[str]:
    patients, lines = sum(facts.sites.values()), sum(table.lines for table in facts.tables.values())
    if facts.by_column:
        first = next(iter(facts.tables.values())).of(facts.by_column)
        known = {place for place, name in enumerate(first.distinct) if facts.called.get(name) in facts.sites}
        lines = int(np.isin(first.codes, [*known]).sum())
    learned = " and ".join(facts.outcomes[next(iter(facts.tables))])
    found = [
        f"{facts.kind} by a table: {counted(lines, 'line')} of {counted(patients, 'patient')}, "
        f"{learned} told by {counted(len(facts.columns), 'column')}"
    ]
    if len(facts.sites) > 1:
        how = f"by column {facts.by_column!r}" if facts.by_column else "each with a table"
        told = ", ".join(f"{site} ({count})" for site, count in facts.sites.items())
        found.append(f"{len(facts.sites)} hospitals, {how}: {told}")
    found += [f"hospital {name!r} is called {own} in the plan" for name, own in facts.called.items() if own != name]
    found += [f"left out: hospital {name!r} ({why.removeprefix('a hospital ')})" for name, why in facts.small.items()]
    return [*found, *(f"not read: {name} ({why})" for name, why in facts.left.items())]


def look(folder: DatasetLayout) -> DatasetLayout | None:
    """Propose a plan for a folder of tables or for a single table; return None for other data."""
    if folder.path.is_file() and folder.path.suffix.lower() in ENDINGS:
        table = _table(folder.path)
        tables = {folder.path.stem: table} if table else {}
    else:
        tables = tables_in(folder)
    if not tables:
        return None
    if folder.said.get("alone") and len(tables) > 1:
        _refuse_several(tables)
    place = folder.path.parent if folder.path.is_file() else folder.path
    for site, table in tables.items():
        said = {"target": folder.target, **folder.said, **folder.said_of.get(site, {})}
        asked = said.pop("target")
        tables[site] = with_answers(_asked_of(table, asked) if asked else table, said)
    facts = look_at_tables(place, tables, folder.site)
    return replace(choose_tables(facts, folder), facts=facts)


def _refuse_several(tables: Mapping[str, CaseTable]) -> None:
    """Raise a DataError whose message explains how to make data sets from several tables. The message also contains the
    number of patients who occur in two tables.
    """
    names = [table.path.name for table in tables.values()]
    many = Counter(
        value for table in tables.values() for value in (table.distinct(table.patient) if table.patient else ())
    )
    twice = [value for value, count in many.items() if count > 1]
    shared = f"; {counted(len(twice), 'patient')} are in two of them, so look whether these are copies" if twice else ""
    raise DataError(
        f"{len(tables)} tables ({', '.join(names[:SHOWN])}): make a data set of each hospital's table; join tables of "
        f"single patients into one, with a column that names the patient{shared}",
        private=", ".join(twice[:SHOWN]),
    )


def with_answers(table: CaseTable, said: Mapping[str, Any]) -> CaseTable:
    said = _respelt(said, lambda name: _there(table, name))
    columns = dict(table.columns)
    for name, (first, last) in said.get("spans", {}).items():
        columns[name] = span(columns[first], columns[last])
    columns |= {name: at_limits(columns[name]) for name in said.get("limits", ())}
    own = table.changed(columns, said=said).without_totals()
    if own.patient is None:
        return own
    fill = said.get("fill", own.in_earlier_lines())
    columns, patients = dict(own.columns), own.columns[own.patient]
    columns = {name: filled(column, patients, MISSING) if name in fill else column for name, column in columns.items()}
    return own.changed(columns, said={**said, "fill": list(fill)})


def _there(table: CaseTable, name: str) -> str:
    if (own := spelling(table.columns)(name)) is None:
        raise DataError(f"{name!r} is no column of {table.path.name}; there are {', '.join([*table.columns][:SHOWN])}")
    return own


def _respelt(said: Mapping[str, Any], of: Callable[[str], str]) -> dict[str, Any]:
    found, drawn = dict(said), said.get("spans", {})
    for key in ("patient", "site"):
        if said.get(key):
            found[key] = of(said[key])
    for key in ("left", "codes"):
        if key in said:
            found[key] = {of(name): own for name, own in said[key].items()}
    for key in ("fill", "limits"):
        if key in said:
            found[key] = [of(name) for name in said[key]]
    if drawn:
        found["spans"] = {name: [of(first), of(last)] for name, (first, last) in drawn.items()}
    if "survival" in said:
        found["survival"] = [name if name in drawn else of(name) for name in said["survival"]]
    return found
