"""Find the columns of files, labels and patients in a table that names images or recordings."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medsilo.core.errors import DataError
from medsilo.tasks.case_index import files_by_short_name
from medsilo.tasks.table_reader import ENDINGS, TableReader

NAMED = 0.8  # minimum fraction of the cells of a file column that must name a file in the folder
# names of label columns, sorted from the most reliable to the least reliable name
LABELS = ("label", "target", "outcome", "diagnosis", "class", "dx", "rhythm", "benign_malignant")
PATIENTS = (
    *("patient", "patientid", "patientno", "patientnr", "patientnumber", "patid", "patno", "patnr", "ptid", "pid"),
    *("subject", "subjectid", "subjid", "participant", "participantid", "person", "personid", "pseudonym", "mrn"),
    *("case", "caseid", "patientname", "proband", "probandid", "fallnr", "fallnummer", "patientennummer", "record"),
    *("recordid", "studyid", "usubjid", "medicalrecordnumber", "paciente", "paziente", "nhc", "ipp"),
)  # names of patient columns without punctuation, sorted from the most reliable to the least reliable name
# a column with a name in SURELY is a patient column, even if the cells of the column are file names
SURELY = [word for word in PATIENTS if not word.startswith(("case", "record", "study"))]
FILE, LABEL = "recording", "label"  # column names of a table without a header
SHOWN = 20


@dataclass(frozen=True)
class FileTable:
    name: str
    file: str  # name of the column of files
    label: str  # name of the label column; empty if no column has labels
    patient: str | None
    head: tuple[str, ...] = ()  # names of the columns, if the table has no header

    def described(self, usual: str = "image") -> dict[str, Any]:
        """Return the keys of a hospital's settings that describe the table. `usual` is the default name of the column
        with file names.
        """
        file = {} if self.file == usual else {"image": self.file}
        columns = {"label": self.label, "patient": self.patient or self.file}
        named = {part: name for part, name in columns.items() if name not in ("", part)}
        return {"table": self.name, "columns": {**file, **named}, **({"head": self.head} if self.head else {})}

    @property
    def why(self) -> str:
        alone = "; no column names patients, so each file counts as one of its own: correct it" * (not self.patient)
        return f"what these are called in {self.name}: a guess by the names{alone}"


def table_of_files(
    files: Mapping[str, Path], named: Collection[str], target: str | None, labelled: bool = True
) -> FileTable | None:
    """At the top level of a folder, find the table whose lines name files in the folder. Return None if no table names
    files.

    Args:
        named: paths of images or recordings
        target: label column, if the user named it
        labelled: whether the table must have a label column
    """
    for name, path in files.items():
        if "/" in name or not name.lower().endswith(ENDINGS):
            continue
        if not (items := {other for other in named if other != name}):
            continue
        known = files_by_short_name({other: files.get(other, path) for other in items})
        head, *lines = TableReader.first_lines(path, TableReader.MOST_LINES) or [[]]
        cells = {own: [line[at].replace("\\", "/") for line in lines if len(line) > at] for at, own in enumerate(head)}
        shares = {column: sum(cell in known for cell in own) / max(len(own), 1) for column, own in cells.items()}
        file = max(shares, key=lambda column: shares[column], default="")
        if file and shares[file] >= NAMED and len(set(cells[file])) > 1:
            if file in known:
                return _without_head(name, [own == file for own in head])
            others = [one for one in head if one != file]
            label = _label(name, others, target) if labelled or target else called(others, LABELS) or ""
            return FileTable(name, file, label, called(head, PATIENTS))
    return None


def _without_head(table: str, names_files: list[bool]) -> FileTable:
    """Describe a table without column names. In a table without column names, the first line is a case, such as A0001,N
    in PhysioNet's challenges.
    """
    if len(names_files) != 2:
        raise DataError(
            f"{table} has no names of columns in its first line; write them into a new first line: recording,label,..."
        )
    return FileTable(table, FILE, LABEL, None, tuple(FILE if names_file else LABEL for names_file in names_files))


def _label(table: str, columns: list[str], target: str | None) -> str:
    found = called(columns, (target.lower(),) if target else LABELS)
    if found is None:
        there = ", ".join(columns[:SHOWN])
        what = f"--target {target!r} is no column of {table}" if target else f"no column of {table} says the label"
        raise DataError(f"{what}; name the label column with --target COLUMN. There are {there}")
    return found


def called(columns: Collection[str], words: Collection[str]) -> str | None:
    """Return a column whose name is in `words`. If several columns match, return the column whose name comes first in
    `words`.
    """
    return next((name for word in words for name in columns if is_called(name, (word,))), None)


def is_called(column: str, words: Collection[str] = PATIENTS) -> bool:
    """Return True if the column's name is in `words`. By default, `words` are the usual names of patient columns.
    Blanks, punctuation and case are ignored.

    >>> [is_called(name) for name in ("Patient ID", "PAT.-NR.", "age")]
    [True, True, False]
    """
    return re.sub(r"[\W_]+", "", column.lower()) in {re.sub(r"[\W_]+", "", word.lower()) for word in words}
