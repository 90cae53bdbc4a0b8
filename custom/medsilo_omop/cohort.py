"""A cohort of an OMOP extract as a table: `data.table: cohort.omop.yaml`, and person, condition_occurrence and
measurement beside it, as CSV or Parquet or in one SQLite or DuckDB file. Codes are read, and never free text.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from medsilo.extend import DataError, Section, Sheet

PERSON = ("person_id", "year_of_birth", "gender_concept_id")
CONDITION = ("person_id", "condition_concept_id", "condition_start_date")
MEASUREMENT = ("person_id", "measurement_concept_id", "measurement_date", "value_as_number", "unit_concept_id")
TABLES = {"person": PERSON, "condition_occurrence": CONDITION, "measurement": MEASUREMENT}
DATABASES = (".sqlite", ".db", ".duckdb")
EVER = 100_000  # days
TAKES: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
    "least": min,
    "greatest": max,
    "mean": fmean,
}


class CohortColumn(Section):
    """A column of the table: one of a person, a condition or a measurement, within days of the index date."""

    person: Literal["age", "sex"] | None = None  # years at the index date; gender_concept_id
    condition: tuple[int, ...] = ()  # 1 where one of these concepts was recorded, else 0
    measurement: tuple[int, ...] = ()  # a number of these concepts
    take: Literal["last", "first", "least", "greatest", "mean"] = "last"
    unit: int | None = None  # concept of the unit; needed where a measurement has several
    days: tuple[int, int] = Field((-EVER, 0))  # from and to, both included; 0 is the index date

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(map(bool, (self.person, self.condition, self.measurement))) != 1:
            raise ValueError("name one of person, condition and measurement")
        return self


class Cohort(Section):
    """cohort.omop.yaml. A person's index date is the first day with one of the index conditions."""

    index: tuple[int, ...] = Field(min_length=1)  # condition concepts; descendants have to be listed
    columns: dict[str, CohortColumn] = Field(min_length=1)


def read_cohort(path: Path) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """Return the columns of a cohort, and its persons in the order of their numbers."""
    remedy = "write YAML as docs/your-data.md shows"
    cohort = Cohort.in_file(path, "the cohort's definition", remedy)
    return ["patient", *cohort.columns], _persons(cohort, path.parent)


SHEET = read_cohort


def _persons(cohort: Cohort, folder: Path) -> Iterator[tuple[str, list[str]]]:
    starts: dict[int, date] = {}
    had: dict[int, list[tuple[date, int, float, int]]] = defaultdict(list)  # person: day, concept, value, unit
    wanted = {*cohort.index, *(code for one in cohort.columns.values() for code in one.condition)}
    for person, concept, day in _rows(folder, "condition_occurrence"):
        if (code := _whole(concept)) in wanted:
            when, who = _day(day), _whole(person)
            had[who].append((when, code, 1.0, 0))
            if code in cohort.index:
                starts[who] = min(when, starts.get(who, when))
    wanted = {code for one in cohort.columns.values() for code in one.measurement}
    for person, concept, day, value, unit in _rows(folder, "measurement") if wanted else ():
        if value and (code := _whole(concept)) in wanted and _whole(person) in starts:
            had[_whole(person)].append((_day(day), code, _number(value), _whole(unit or "0")))
    people = {_whole(cells[0]): cells[1:] for cells in _rows(folder, "person")}
    if strangers := starts.keys() - people.keys():
        raise DataError(f"{len(strangers)} persons with an index condition are not in person; extract both again")
    for number, who in enumerate(sorted(starts), 1):
        cells = (_cell(name, one, people[who], starts[who], had[who]) for name, one in cohort.columns.items())
        yield f"person {number}", [str(who), *cells]


def _cell(
    name: str, one: CohortColumn, person: Sequence[str], start: date, had: list[tuple[date, int, float, int]]
) -> str:
    """Return a column's text for one person; "" where nothing was measured."""
    if one.person:
        return str(_whole(person[1])) if one.person == "sex" else str(start.year - _whole(person[0]))
    low, high = one.days
    found = sorted(row for row in had if row[1] in (*one.condition, *one.measurement))
    found = [row for row in found if low <= (row[0] - start).days <= high and one.unit in (None, row[3])]
    if one.condition:
        return str(int(bool(found)))
    if len({row[3] for row in found}) > 1:
        raise DataError(f"measurements of {name!r} have several units; say which in the cohort's definition (unit)")
    return repr(TAKES[one.take]([row[2] for row in found])) if found else ""


def _rows(folder: Path, table: str) -> Iterator[Sequence[str]]:
    """Yield some columns of a table of the extract, as texts."""
    beside = sorted(path for path in folder.iterdir() if path.is_file() and path.resolve().parent == folder.resolve())
    names = TABLES[table]
    for path in beside:
        if path.stem.lower() == table and path.suffix.lower() in Sheet.PLAIN:
            found = Sheet().read(path, dict(zip(names, names, strict=True)))
            if found.uneven or found.long:
                raise DataError(
                    f"{table} has {len(found.uneven + found.long)} lines that can't be read; extract it again"
                )
            yield from (cells for _, cells in found.lines)
            return
    if not (base := next((path for path in beside if path.suffix.lower() in DATABASES), None)):
        raise DataError(f"there is no {table} beside the cohort's definition; put CSV, Parquet, SQLite or DuckDB there")
    read_only = f"{base.resolve().as_uri()}?mode=ro&immutable=1"
    is_duckdb = base.suffix.lower() == ".duckdb"
    with closing(_duckdb(base) if is_duckdb else sqlite3.connect(read_only, uri=True)) as opened:
        try:
            answer = opened.execute(f"SELECT {', '.join(names)} FROM {table} LIMIT {Sheet.MOST_LINES + 1}")
            for number, cells in enumerate(iter(answer.fetchone, None)):
                if number == Sheet.MOST_LINES:
                    raise DataError(Sheet.TOO_MANY)
                yield ["" if cell is None else str(cell) for cell in cells]
        except DataError:
            raise
        except Exception as error:  # either library's own
            raise DataError(f"{table} can't be read from the database; extract it again", str(error)) from error


def _duckdb(path: Path) -> Any:
    try:
        import duckdb

        opened = duckdb.connect(str(path), read_only=True)
        opened.execute("SET enable_external_access=false")  # a view must not read other files
    except ImportError as error:
        raise DataError("a DuckDB file needs the package duckdb: install medsilo[duckdb], or save Parquet") from error
    except Exception as error:  # duckdb's own
        raise DataError("the DuckDB file can't be opened; extract it again", str(error)) from error
    return opened


def _whole(text: str) -> int:
    number = _number(text)
    if number != int(number):
        raise DataError("a person, a concept or a year of the extract is no whole number; extract it again", text)
    return int(number)


def _number(text: str) -> float:
    try:
        if abs(number := float(text)) < 1e15:
            return number
    except ValueError:
        pass
    raise DataError("the extract has a text where a number belongs; extract it again", text)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text[:10])
    except ValueError as error:
        raise DataError("the extract has a date that is not written YYYY-MM-DD; extract it again", text) from error
