"""ComBat (Johnson, Li and Rabinovic 2007; Fortin et al. 2018): features of hospitals brought to one place and width.

Sums over hospitals give what all have in common: means, slopes of covariates, deviations. Each hospital then finds its
own shift and width by empirical Bayes over the features, and tells them to nobody.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import Field

from medsilo.core.errors import DataError
from medsilo.core.files import read_bounded
from medsilo.core.section import Section
from medsilo.runs.messages import Message
from medsilo.tasks.sheet import Sheet
from medsilo.tasks.sources import DataSource
from medsilo_statistics.asked_question import Harmonised, Question, Text, Variable, Word
from medsilo_statistics.patients import Floats, Patients, read_patients
from medsilo_statistics.sums import whole

LARGEST, TURNS, CLOSE, ENDING, FOUND = 1 << 20, 1000, 1e-10, ".combat.yaml", "combat.json"


class CommonFeatures(Message):
    """The part of ComBat that all hospitals share: combat.json."""

    variables: dict[Word, Variable]  # as the question has them
    asked: Harmonised
    means: list[float] = Field(max_length=100)  # of features, at covariates of 0
    deviations: list[float] = Field(max_length=100)
    slopes: list[list[float]] = Field(max_length=10_000)  # of each column of the covariates, for each feature

    @classmethod
    def of(cls, question: Question, sums: Floats) -> "CommonFeatures | None":
        """Return it of sums over hospitals; None where too few patients are known."""
        asked = question.harmonise
        assert asked
        sizes = asked.sizes(question)
        width, count = sizes[1:3]
        patients, x, y, xx, xy, yy = np.split(sums, np.cumsum(sizes)[:-1])
        if not (patients[0] > width + 1 and np.isfinite(sums).all()):
            return None
        products = xy.reshape(width, count)
        slopes = np.linalg.pinv(whole(xx, width), hermitian=True) @ products
        means = (y - x @ slopes) / patients[0]
        square = np.maximum(yy - (slopes * products).sum(0), 0) / patients[0]
        half, middle = (
            np.array([getattr(question.variables[name], key) for name in asked.features]) for key in ("half", "middle")
        )
        return cls(
            variables={name: own for name, own in question.variables.items() if name in asked.variables},
            asked=asked,
            means=(middle + half * means).tolist(),
            deviations=(half * np.sqrt(square)).tolist(),
            slopes=(half * slopes).tolist(),
        )

    @property
    def question(self) -> Question:
        """A question with these variables alone, by which tables are read."""
        return Question(variables=self.variables, harmonise=self.asked)

    def standardised(self, patients: Patients) -> tuple[Floats, Floats]:
        """Return features less what is common, over the common deviation; and what is common."""
        values = np.stack([patients.values[name] for name in self.asked.features], 1)
        known = patients.known(self.asked.covariates)
        common = np.full(values.shape, np.nan)
        rows = np.isin(patients.names, known.names)
        slopes = np.array(self.slopes).reshape(-1, values.shape[1])
        common[rows] = self.means + known.columns(self.asked.covariates) @ slopes
        return (values - common) / self._widths, common

    @property
    def _widths(self) -> Floats:
        return np.where(np.array(self.deviations) > 0, self.deviations, 1.0)

    def adjusted(self, patients: Patients, reference: Patients) -> Floats:
        """Return features of a hospital's patients, harmonised. reference: whose shift and width are taken out."""
        own, common = self.standardised(patients)
        shift, width = own_place(self.standardised(reference.known(self.asked.variables))[0])
        return (own - shift) / np.sqrt(width) * self._widths + common


def own_place(values: Floats) -> tuple[Floats, Floats]:
    """Return a hospital's shift and squared width of each feature by empirical Bayes. values: [patients, features]."""
    count = len(values)
    if count < 3:
        raise DataError("ComBat needs three patients or more of whom all features and covariates are known")
    shift, spread = values.mean(0), values.var(0, ddof=1)
    centre, tau = shift.mean(), shift.var(ddof=1)
    mean, square = spread.mean(), spread.var(ddof=1)
    if not square > 0:
        raise DataError("ComBat needs features that differ in their deviation; leave out copies")
    a, b = (2 * square + mean**2) / square, (mean * square + mean**3) / square
    own, width = shift, spread
    for _ in range(TURNS):
        moved = (tau * count * shift + width * centre) / (tau * count + width)
        wider = (b + np.square(values - moved).sum(0) / 2) / (count / 2 + a - 1)
        far = max(float(np.abs(moved - own).max()), float(np.abs(wider - width).max()))
        own, width = moved, wider
        if far < CLOSE:
            break
    return own, width


class HarmonisedTable(Section):
    """NAME.combat.yaml: a hospital's table whose features are harmonised as it is read."""

    table: str = Field(max_length=500, description="the table, beside this file")
    reference: str | None = Field(None, max_length=500, description="the table of the question, where it is another")
    names: dict[str, Text] = Field({}, description="variables to this hospital's columns, where they differ")


class HarmonisedSheet:
    """Reads such a table: its columns, and its lines."""

    mixes_patients = True  # a line's cells depend on others

    def __call__(self, path: Path) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
        """Return columns and lines."""
        own = HarmonisedTable.in_file(path, "the harmonised table's definition", "see docs/statistics.md")
        files = [path.parent / name for name in (own.table, own.reference or own.table)]
        if any(file.resolve().parent != path.parent.resolve() or file.name.endswith(ENDING) for file in files):
            raise DataError(f"{path.name}: names a file that is not beside it; copy it there")
        try:
            common = CommonFeatures.model_validate_json(read_bounded(path.parent / FOUND, LARGEST))
            question = common.question
        except (OSError, ValueError) as error:
            raise DataError(f"what the lead's question found can't be read ({FOUND}); copy it here again") from error
        source = DataSource(folder=path.parent, names=own.names)
        patients, reference = (
            read_patients(question, source.model_copy(update={"table": file.name}), "") for file in files
        )
        head = Sheet.first_lines(files[0], 1)[0]
        read = Sheet().read(files[0], dict.fromkeys(head, "a column"))
        features = common.adjusted(patients, reference)
        places = [read.columns[own.names.get(name, name)] for name in common.asked.features]
        return list(read.columns), _lines(read, places, features)


def _lines(read: Sheet, places: list[int], features: Floats) -> Iterator[tuple[str, list[str]]]:
    for (where, cells), own in zip(read.lines, features, strict=True):
        for place, value in zip(places, own.tolist(), strict=True):
            cells[place] = repr(value) if np.isfinite(value) else ""
        yield where, cells


SHEET = HarmonisedSheet()
