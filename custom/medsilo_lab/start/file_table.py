"""A table beside images or recordings: which of its columns names the files, the label and the patient."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medsilo.core.errors import DataError
from medsilo.tasks.case_index import files_by_short_name
from medsilo.tasks.table_reader import ENDINGS, TableReader

NAMED = 0.8  # share of a column's cells that name files which lie there
LABELS = ("label", "target", "outcome", "diagnosis", "class", "dx", "rhythm", "benign_malignant")  # the surest first
PATIENTS = ("patient", "patient_id", "patientid", "subject", "subject_id", "participant_id", "pid", "pseudonym")
SHOWN = 20  # columns that an error names


@dataclass(frozen=True)
class FileTable:
    """A table whose lines name files."""

    name: str
    file: str  # the columns
    label: str
    patient: str | None

    def described(self, usual: str = "image") -> dict[str, Any]:
        """Return what a hospital's settings say of it. usual: the name of the column with files."""
        file = {} if self.file == usual else {"image": self.file}
        columns = {"label": self.label, "patient": self.patient or self.file}
        named = {part: name for part, name in columns.items() if part != name}
        return {"table": self.name, "columns": {**file, **named}}

    @property
    def why(self) -> str:
        """Say what is guessed."""
        alone = "; no column names patients, so each file counts as one of its own: correct it" * (not self.patient)
        return f"what these are called in {self.name}: a guess by the names{alone}"


def table_of_files(files: Mapping[str, Path], named: Collection[str], target: str | None) -> FileTable | None:
    """Return the table in a folder, and not below it, that names files there; None where none does.

    named: the images or recordings by their path; target: the column of the label, where somebody said it.
    """
    for name, path in files.items():
        if "/" in name or not name.lower().endswith(ENDINGS):
            continue
        others = {other for other in named if other != name}
        known = files_by_short_name({other: files.get(other, path) for other in others})
        head, *lines = TableReader.first_lines(path, TableReader.MOST_LINES) or [[]]
        cells = {own: [line[at].replace("\\", "/") for line in lines if len(line) > at] for at, own in enumerate(head)}
        shares = {column: sum(cell in known for cell in own) / max(len(own), 1) for column, own in cells.items()}
        file = max(shares, key=lambda column: shares[column], default="")
        if file and shares[file] >= NAMED and len(set(cells[file])) > 1:
            return FileTable(
                name, file, _label(name, [one for one in head if one != file], target), _called(head, PATIENTS)
            )
    return None


def _label(table: str, columns: list[str], target: str | None) -> str:
    found = _called(columns, (target.lower(),) if target else LABELS)
    if found is None:
        there = ", ".join(columns[:SHOWN])
        what = f"--target {target!r} is no column of {table}" if target else f"no column of {table} says the label"
        raise DataError(f"{what}; name one with --target COLUMN. There are {there}")
    return found


def _called(columns: Collection[str], words: Collection[str]) -> str | None:
    return next((name for word in words for name in columns if name.lower() == word), None)
