"""Extracts of the OMOP common data model as a hospital's table: every form alike, worked out by hand, and attacked."""

import csv
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import dump_yaml
from medsilo.tasks.sheet import Sheet
from tests.conftest import SITES

DIABETES, STROKE, HBA1C, PERCENT, MMOL = 201826, 381316, 3004410, 8554, 9579
COHORT: dict[str, Any] = {
    "index": [DIABETES],
    "columns": {
        "age": {"person": "age"},
        "sex": {"person": "sex"},
        "hba1c": {"measurement": [HBA1C], "days": [-365, 0]},
        "worst": {"measurement": [HBA1C], "take": "greatest", "days": [-365, 0]},
        "outcome": {"condition": [STROKE], "days": [1, 365]},
    },
}
# Three persons with diabetes and one without: what each line is worth is worked out by hand.
PERSONS = [(11, 1950, 8507), (12, 1961, 8532), (13, 1970, 8532), (14, 1980, 8507)]
CONDITIONS = [
    (11, DIABETES, "2020-06-01"),
    (11, DIABETES, "2019-06-01"),  # the first one counts
    (11, STROKE, "2019-07-01"),
    (12, DIABETES, "2020-01-10"),
    (12, STROKE, "2020-01-10"),  # on the index date: not after it
    (13, DIABETES, "2021-03-03"),
    (13, STROKE, "2022-03-03"),  # day 365
    (14, STROKE, "2020-01-01"),
]
MEASUREMENTS = [
    (11, HBA1C, "2019-05-01", 8.5, PERCENT),
    (11, HBA1C, "2019-02-01", 9.5, PERCENT),
    (11, HBA1C, "2019-06-02", 1.0, PERCENT),  # after the index date
    (11, HBA1C, "2017-01-01", 99.0, PERCENT),  # too early
    (12, HBA1C, "2020-01-10", 7.0, PERCENT),
    (12, HBA1C, "2020-01-09", None, PERCENT),
    (12, 1, "2020-01-09", 50.0, PERCENT),  # another code
    (14, HBA1C, "2020-01-01", 5.0, PERCENT),
]
EXPECTED = [
    ["11", "69", "8507", "8.5", "9.5", "1"],
    ["12", "59", "8532", "7.0", "7.0", "0"],
    ["13", "51", "8532", "", "", "1"],
]
HEADS = {
    "person": ("person_id", "year_of_birth", "gender_concept_id", "person_source_value"),
    "condition_occurrence": ("person_id", "condition_concept_id", "condition_start_date", "condition_source_value"),
    "measurement": (
        "person_id",
        "measurement_concept_id",
        "measurement_date",
        "value_as_number",
        "unit_concept_id",
        "measurement_source_value",
    ),
}
SECRET = "Erika Mustermann"  # free text beside every code
Tables = Mapping[str, Sequence[tuple]]


def tables(**changed: Sequence[tuple]) -> Tables:
    own = {"person": PERSONS, "condition_occurrence": CONDITIONS, "measurement": MEASUREMENTS, **changed}
    return {name: [(*row, SECRET) for row in rows] for name, rows in own.items()}


def as_csv(folder: Path, content: Tables) -> None:
    for name, rows in content.items():
        with (folder / f"{name.upper()}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([HEADS[name], *rows])


def as_parquet(folder: Path, content: Tables) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, rows in content.items():
        columns = {head: [row[place] for row in rows] for place, head in enumerate(HEADS[name])}
        parquet.write_table(arrow.table(columns), folder / f"{name}.parquet")


def fill(base: Any, content: Tables) -> None:
    for name, rows in content.items():
        kinds = ", ".join(
            f"{head} {'TEXT' if 'date' in head or 'source' in head else 'DOUBLE'}" for head in HEADS[name]
        )
        base.execute(f"CREATE TABLE {name} ({kinds})")
        base.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(HEADS[name]))})", rows)


def as_sqlite(folder: Path, content: Tables) -> None:
    with sqlite3.connect(folder / "cdm.sqlite") as base:
        fill(base, content)
    base.close()


def as_duckdb(folder: Path, content: Tables) -> None:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(str(folder / "cdm.duckdb")) as base:
        fill(base, content)


def extract(
    folder: Path, write: Callable[[Path, Tables], None] = as_csv, cohort: Any = COHORT, **changed: Sequence[tuple]
) -> Path:
    folder.mkdir(exist_ok=True)
    write(folder, tables(**changed))
    path = folder / "cohort.omop.yaml"
    path.write_text(dump_yaml(cohort))
    return path


def read(path: Path) -> list[list[str]]:
    names = ("patient", *COHORT["columns"])
    return [cells for _, cells in Sheet().read(path, dict(zip(names, names, strict=True))).lines]


@pytest.mark.parametrize("write", [as_csv, as_parquet, as_sqlite, as_duckdb])
def test_every_form_gives_the_lines_worked_out_by_hand(tmp_path: Path, write: Callable) -> None:
    assert read(extract(tmp_path / "in", write)) == EXPECTED


def many(first: int) -> dict[str, list[tuple]]:
    """A hundred persons with diabetes; a stroke followed where HbA1c was high."""
    whom = range(first, first + 100)
    high = {who: 5 + (7 * who) % 8 for who in whom}
    return {
        "person": [(who, 1900 + who % 80, 8507) for who in whom],
        "condition_occurrence": [
            row
            for who in whom
            for row in [(who, DIABETES, "2020-01-01"), *([(who, STROKE, "2020-02-01")] if high[who] > 8 else [])]
        ],
        "measurement": [(who, HBA1C, "2019-12-31", high[who], PERCENT) for who in whom],
    }


def test_two_hospitals_train_from_csv_and_duckdb_by_the_command(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture
) -> None:
    """The whole way, from extracts to a score; another form of the same extract gives the same bits."""
    pytest.importorskip("duckdb")
    task = {"name": "table", "columns": ["age", "hba1c"], "target": "outcome", "labels": ["0", "1"]}
    training = {"rounds": 8, "batch_size": 16, "learning_rate": 0.1}
    two = {"algorithm": {"name": "fedavg"}, "task": task, "training": training, "participation": {"sites": SITES[:2]}}
    (tmp_path / "plan.yaml").write_text(dump_yaml(two))

    def run(name: str, forms: Sequence[Callable[[Path, Tables], None]]) -> Path:
        for number, (site, write) in enumerate(zip(SITES[:2], forms, strict=True)):
            data, place = tmp_path / name / site, tmp_path / f"{name}-settings" / site
            data.parent.mkdir(exist_ok=True)
            path = extract(data, write, **many(1000 * (number + 1)))
            place.mkdir(parents=True)
            source = {"folder": str(data), "table": path.name}
            (place / "medsilo.yaml").write_text(dump_yaml({"device": "cpu", "data": source}))
        given = ["--settings", str(tmp_path / f"{name}-settings"), "--out", str(tmp_path / "runs"), "--name", name]
        given += ["--engine", "inprocess", "--plan", str(tmp_path / "plan.yaml")]
        assert main(["run", str(root / "jobs/fedavg"), *given]) == 0
        return tmp_path / "runs" / name

    first, second = run("one", (as_csv, as_duckdb)), run("two", (as_parquet, as_csv))
    scores = [site["test"]["accuracy"] for site in json.loads((first / "summary.json").read_text())["sites"].values()]
    assert len(scores) == 2 and min(scores) > 0.8, scores
    models = [(run / "global/last.safetensors").read_bytes() for run in (first, second)]
    assert models[0] == models[1]
    everything = "".join(path.read_text("utf-8", "replace") for path in first.rglob("*") if path.is_file())
    assert SECRET not in everything + capsys.readouterr().out


BAD: dict[str, Any] = {
    "several units": ({"measurement": [*MEASUREMENTS, (11, HBA1C, "2019-04-01", 60.0, MMOL)]}, {}, "unit"),
    "no date": ({"condition_occurrence": [(11, DIABETES, "last spring")]}, {}, "YYYY-MM-DD"),
    "text for a number": ({"measurement": [(11, HBA1C, "2019-05-01", "high", PERCENT)]}, {}, "a text where a number"),
    "no such person": ({"person": PERSONS[1:]}, {}, "not in person"),
    "two in one": ({}, {"index": [1], "columns": {"a": {"person": "age", "condition": [1]}}}, "name one of"),
    "free text": ({}, {"index": ["diabetes"], "columns": {"a": {"person": "age"}}}, "index"),
    "a path": ({}, {"index": [1], "database": "/etc/passwd", "columns": {"a": {"person": "age"}}}, "database"),
    "a source value": ({}, {"index": [1], "columns": {"a": {"person": "person_source_value"}}}, "person"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line_without_a_value_of_a_patient(tmp_path: Path, name: str) -> None:
    changed, cohort, said = BAD[name]
    with pytest.raises(MedsiloError, match=said) as told:
        read(extract(tmp_path / "in", cohort=cohort or COHORT, **changed))
    assert "\n" not in str(told.value) and "last spring" not in str(told.value) and "high" not in str(told.value)


def test_one_unit_can_be_chosen(tmp_path: Path) -> None:
    columns = {
        **COHORT["columns"],
        "hba1c": {**COHORT["columns"]["hba1c"], "unit": PERCENT},
        "worst": {"person": "age"},
    }
    more = [*MEASUREMENTS, (11, HBA1C, "2019-05-20", 60.0, MMOL)]
    assert read(extract(tmp_path / "in", cohort={**COHORT, "columns": columns}, measurement=more))[0][3] == "8.5"


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    """A link among the tables, and a view of a database that reads another file."""
    path = extract(tmp_path / "in")
    elsewhere = tmp_path / "person.csv"
    (path.parent / "PERSON.csv").rename(elsewhere)
    (path.parent / "PERSON.csv").symlink_to(elsewhere)
    with pytest.raises(DataError, match="there is no person"):
        read(path)
    duckdb = pytest.importorskip("duckdb")
    path = extract(tmp_path / "base", as_duckdb)
    with duckdb.connect(str(path.parent / "cdm.duckdb")) as base:
        base.execute(f"DROP TABLE person; CREATE VIEW person AS SELECT * FROM read_csv('{elsewhere}')")
    with pytest.raises(DataError, match="person can't be read"):
        read(path)
