"""Questions to the user about a folder or a table. A question is asked if a wrong guess could disclose data, count one
patient as two patients, or invert a label.

Each question shows evidence for its proposed answer. `--yes` accepts only safe proposed answers. A safe answer that is
wrong may reduce accuracy or omit patients, but discloses no data and inflates no test score.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medsilo.core.errors import DataError
from medsilo.core.text import counted
from medsilo.tasks.case_index import TABLE, CaseIndex
from medsilo.tasks.image_formats import SUFFIXES
from medsilo.tasks.own.folder import FolderTask
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.survey import Survey
from medsilo.tasks.task import Task
from medsilo_lab.start.dataset_layout import DatasetLayout
from medsilo_lab.start.file_table import SURELY, is_called

# new values of keys: subkeys of `data`, such as `data.columns.patient`, are a hospital's settings; subkeys of `task`,
# such as `task.target`, are in the plan
Values = Mapping[str, Any]
ANNOTATIONS = (".atr", ".qrs")  # suffixes of WFDB's files with annotated rhythms and beats
SHOWN = 5  # largest number of examples in a question
BY_RHYTHMS, BY_FOLDERS = "rhythms", "names of folders"


@dataclass(frozen=True)
class Question:
    key: str
    text: str
    # each possible answer, with the new values of keys that the answer sets; the first answer is proposed to the user
    answers: Mapping[str, Values]
    safe: bool = False  # true if the proposed answer may be accepted without asking a person
    # returns the new values of keys for a free answer, which is not in `answers`; None if free answers are not allowed
    free: Callable[[str], Values] | None = None
    of_all: bool = False

    @property
    def proposed(self) -> str:
        return next(iter(self.answers))

    def changes(self, answer: str) -> Values:
        """Return the values of keys that an answer sets; raise DataError for an invalid answer."""
        if answer in self.answers:
            return self.answers[answer]
        if self.free is None:
            valid = " or ".join(map(repr, self.answers))
            raise DataError(f"{self.key}: {answer!r} is not a valid answer; give {valid}")
        return self.free(answer)


@dataclass(frozen=True)
class Proposal:
    sight: DatasetLayout
    task: Task
    site: str
    data: Values  # keys of the hospital's section `data`, without the prefix `data.`
    survey: Survey
    names: Sequence[str] = ()
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def takes_files_as_patients(self) -> bool:
        """True if the patient column is the column of file names, and if its name is not usual for a patient column."""
        own = self.data.get("columns", {})
        file = own.get("image", "recording")
        return "table" in self.data and own.get("patient") == file and not is_called(file, SURELY)


Detector = Callable[[Proposal], Iterator[Question]]


def listed(examples: Sequence[str], count: int | None = None) -> str:
    more = (len(examples) if count is None else count) - min(len(examples), SHOWN)
    return ", ".join(examples[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def unknown_patients(seen: Proposal) -> Iterator[Question]:
    """If neither a column nor the file name identifies the patient of a case, ask how to find the patient."""
    if seen.survey.patients_named and not seen.takes_files_as_patients:
        return
    cases = sum(part.cases for part in seen.survey.parts.values())
    each = "line" if isinstance(seen.task, PatientTable) else "image" if isinstance(seen.task, FolderTask) else "case"
    tables = {seen.data.get("table")}
    ends = SUFFIXES if isinstance(seen.task, FolderTask) else CaseIndex.RECORDINGS
    files = [name for name in seen.names if name.lower().endswith(ends) and name not in tables]
    files = files or list(seen.names)
    example = f", such as {listed([*seen.columns] or files)}" if seen.columns or seen.names else ""
    of = "column" if isinstance(seen.task, PatientTable) or seen.takes_files_as_patients else "pattern"

    def named(answer: str) -> Values:
        return {"columns.patient" if of == "column" else "patient": answer}

    yield Question(
        "patients",
        f"nothing names the patient of {counted(cases, each)}{example}. Is each {each} of a patient of its own? Else "
        f"name the {of} that says whose it is",
        {f"each {each} is a patient": {}},
        free=named,
    )


def annotations(seen: Proposal) -> Iterator[Question]:
    """Ask whether the rhythms in annotation files are the labels of recordings. If no annotation file has rhythms, ask
    whether the names of folders are the labels of recordings.
    """
    label = str(seen.data.get("recording_columns", {}).get("label", ""))
    beside = [name for name in seen.names if name.lower().endswith(label if label.startswith(".") else ANNOTATIONS)]
    labelled = label or any(name.rpartition("/")[2] in (seen.data.get("table"), TABLE) for name in seen.names)
    if label.startswith("."):
        windows = Counter[str]()
        for part in seen.survey.parts.values():
            windows.update(part.classes)
        shown = ", ".join(f"{name} ({counted(number, 'window')})" for name, number in windows.items())
        tops = {name.rpartition("/")[0] for name in beside}
        folders: dict[str, Values] = {BY_FOLDERS: {"table.annotations": False}} if len(tops) > 1 else {}
        yield Question(
            "annotations",
            f"{counted(len(beside), 'recording')} have annotations with rhythms ({listed(beside)}). Is the class of a "
            f"window the rhythm that covers it: {shown}? A window with a change of rhythm is never used, and beats "
            "are not read. For other labels, write cases.csv: recording, label, patient",
            {BY_RHYTHMS: {}, **folders},
            safe=not folders,
        )
    elif beside and not labelled:
        labels = sorted(map(str, seen.data.get("label_map") or ()))
        yield Question(
            "annotations",
            f"{counted(len(beside), 'recording')} have annotations ({listed(beside)}), in which medsilo reads only "
            f"rhythms, and found none. Labels are the names of folders, {listed(labels)}. Are these to be learned? "
            "Else write each recording's label, such as its rhythm, into cases.csv: recording, label, patient",
            {BY_FOLDERS: {}},
        )


DETECTORS: list[Detector] = [unknown_patients, annotations]
