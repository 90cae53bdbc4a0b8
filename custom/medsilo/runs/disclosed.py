"""Declare each value that leaves a hospital in an answer to the server.

The declaration is part of the field's type in the answer's class (messages.py). If a field lacks a declaration, the
import of messages.py fails. The following modules read the declaration:

    federation/disclosure.py    rounds a mean
    federation/private_site.py  computes the privacy charge
    federation/script_bits.py   counts the bits that a training script can hide in the value
    airlock/border.py           checks or replaces a script's value
    exchange/acceptance.py      compares a score with the range of the task's metric
    check/disclosure.py         describes the value in the disclosure report
    tools/tables.py             writes the table of privacy costs in the documentation
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from medsilo.core.text import enumerated
from medsilo.site.settings import DataPart, Told

Form = Literal["mean", "threshold", "cases", "count", "round", "numbers", "time", "warnings", "outside", "other"]
CASES: Mapping[DataPart, str] = {"train": "training", "validation": "validation", "test": "test"}


@dataclass(frozen=True)
class Disclosed:
    """The declaration of a value that leaves a hospital.

    Args:
        form: `mean`: a mean over cases, such as a score or a loss. `threshold`: a number in a range that the task
            limits. `cases`: a count for each part of the data. `count`: a count of at most all training cases. `round`:
            the index of a round. `numbers`: a nested value, whose numbers count one by one. `time`: seconds, or another
            number that differs between two runs with the same seed. `warnings`: a list of warnings. `outside`: a value
            that the hospital adds to the answer of the training process. `other`: a value that is not computed from
            patients' data, or that medsilo alone writes
        words: the value's name in the disclosure report; "" if the report describes the value in a line of its own
        of: the cases from which the value is computed. Under differential privacy, the value leaves only if the
            hospital declares these numbers public, or if the plan adds noise to them
        between: the range to which a mean clips the value of each case; None for a score, which has the range of the
            task's metric
        by_script: whether a training script may write the value; the hospital replaces or removes all other values
        private: whether the value may leave in a study that promises differential privacy
    """

    form: Form
    words: str
    of: Told | None = None
    between: tuple[float, float] | None = None
    by_script: bool = False
    private: bool = True

    def __post_init__(self) -> None:
        if self.form == "mean" and (not self.words or self.of in (None, "counts")):
            raise TypeError("a mean needs words for the disclosure report, and the part of the data (of)")

    @property
    def part(self) -> DataPart | None:
        """The part of the data from which a score, loss or count is computed."""
        return None if self.of == "counts" else self.of


def declarations(kind: type[BaseModel]) -> dict[str, Disclosed]:
    """Return the declaration of each field of an answer's class; a redefined field may inherit its declaration."""
    return {name: _declared(kind, name) for name in kind.model_fields}


def _declared(kind: type[BaseModel], name: str) -> Disclosed:
    for base in kind.__mro__:
        field = base.model_fields.get(name) if issubclass(base, BaseModel) else None
        for declared in field.metadata if field else []:
            if isinstance(declared, Disclosed):
                return declared
    raise TypeError(f"{kind.__name__}.{name} has no declaration (Disclosed), so it must not leave a hospital")


def merged(answers: Iterable[Mapping[str, Disclosed]]) -> dict[str, Disclosed]:
    """Return the declarations of several classes of answers; raises TypeError if a name has two declarations."""
    found: dict[str, Disclosed] = {}
    for answer in answers:
        if odd := [name for name, declared in answer.items() if found.get(name, declared) != declared]:
            raise TypeError(f"two declarations of {odd[0]} differ")
        found |= answer
    return found


def words_of(declared: Iterable[Disclosed]) -> str:
    """Return the names of values as a list in a sentence, such as "score, loss and counts"."""
    return enumerated(own.words for own in declared if own.words)
