"""Promises and outcomes of frameworks, each with the tests that show it: tables beside this file.

`promises.csv` is written from docs/privacy.md (`python -m docs.tables`); the others by hand: `outcomes.csv`, and what
a record itself is made of, the entries of `forms.csv` and the vocabularies' names in `prefixes.csv`. A test of the
suite holds every test that is named to one that exists, and `python -m tests.claims` to one that ran and passed in this
build.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

from medsilo.core.package import package_facts

HERE = Path(__file__).parent
HEADS = ("framework", "outcome", "what it asks for", "state", "shown by", "remark", "build")
SHOWN, LEFT, GAP = "shown by test", "left to you", "gap"


@dataclass(frozen=True)
class ShownPromise:
    """A promise of docs/privacy.md. when: the condition under which it is made (`Case.lacks`); "" is always."""

    says: str
    against: str
    tests: tuple[str, ...]
    not_covered: str
    when: str


@dataclass(frozen=True)
class FrameworkOutcome:
    """An outcome that a framework asks for, in our own words. tests: what shows it where `when` holds."""

    framework: str
    id: str
    title: str
    when: str
    tests: tuple[str, ...]
    remark: str

    def state(self, lacks: Mapping[str, str]) -> tuple[str, str, str]:
        """Return its state, what shows it, and what is said of that. lacks: conditions that do not hold, in words."""
        if self.tests and self.when not in lacks:
            return SHOWN, " ".join(self.tests), self.remark
        if self.tests:
            return GAP, "", lacks[self.when]
        gap = self.remark.startswith(GAP)
        return (GAP, "", self.remark.removeprefix(f"{GAP}: ")) if gap else (LEFT, "", self.remark)


@cache
def promises() -> tuple[ShownPromise, ...]:
    """Return the promises in their order."""
    rows = table("promises.csv")
    return tuple(ShownPromise(says, to, tuple(tests.split()), *more) for says, to, tests, *more in rows)


@cache
def outcomes() -> tuple[FrameworkOutcome, ...]:
    """Return the outcomes in their order."""
    return tuple(
        FrameworkOutcome(of, key, title, when, tuple(tests.split()), said)
        for of, key, title, when, tests, said in table("outcomes.csv")
    )


def table(name: str) -> list[list[str]]:
    """Return the rows of a table beside this file."""
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def outcomes_csv(lacks: Mapping[str, str]) -> str:
    """Return outcomes.csv of a record. It gives no verdict."""
    text, build = StringIO(newline=""), package_facts()["hash"]
    writer = csv.writer(text)
    writer.writerow(HEADS)
    writer.writerows([one.framework, one.id, one.title, *one.state(lacks), build] for one in outcomes())
    return text.getvalue()
