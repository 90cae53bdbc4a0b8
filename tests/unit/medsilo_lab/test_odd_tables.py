"""For a table that a hospital's program has exported, `medsilo data` reads the table, asks the user, or rejects the
table.

The command asks instead of guessing where a wrong guess could leak data, split a patient or invert a label.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from medsilo.cli import main
from medsilo.registry import TASKS
from medsilo.site.data_set import DataSet

Rows = list[dict[str, Any]]
WHO = 60


def people(count: int = WHO, visits: int = 1, **more: Callable[[int, int], Any]) -> Rows:
    drawn = np.random.default_rng(5)
    rows: Rows = []
    for who in range(count):
        age, ill = int(drawn.integers(30, 89)), int(drawn.random() < 0.4)
        for visit in range(visits):
            row = {"age": age + visit, "bmi": round(float(drawn.normal(25 + ill, 4)), 1), "stage": who % 3 + 1}
            rows.append({**row, "outcome": ("no", "yes")[ill], **{key: of(who, visit) for key, of in more.items()}})
    return rows


def named(
    called: str, visits: int = 2, name: Callable[[int], Any] = lambda who: 8860 + who, count: int = 0, **more: Any
) -> Rows:
    rows = people(count or WHO // visits, visits, who=lambda who, _: name(who), **more)
    return [{called: row.pop("who"), **row} for row in rows]


def without(rows: Rows, *columns: str) -> Rows:
    return [{key: value for key, value in row.items() if key not in columns} for row in rows]


def write(path: Path, rows: Rows, coding: str = "utf-8", above: Sequence[str] = (), **how: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=coding) as file:
        file.writelines(f"{line}\n" for line in above)
        writer = csv.DictWriter(file, list(rows[0]), **how)
        writer.writeheader()
        writer.writerows(rows)


def as_csv(rows: Callable[[], Rows], **how: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder / "export.csv", rows(), **how)


@dataclass(frozen=True)
class Odd:
    make: Callable[[Path], None]
    answers: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    right: Mapping[str, Any] | None = None
    said: Sequence[str] = ()
    asked: str = ""


DAY = date(2020, 1, 1)
DRAWN = np.random.default_rng(9)
TIMES = [int(value) for value in DRAWN.exponential(700, 400) + 30]
DIED = [int(value) for value in DRAWN.random(400) < 0.5]
THIRTY = {"patients": 30, "known": True, "kind": "classification", "reads": {"age", "bmi", "stage"}}


def survival(name: str = "mrn", **codes: Any) -> Rows:
    rows = without(named(name, 1, time=lambda who, _: TIMES[who], status=lambda who, _: DIED[who]), "outcome")
    return [{**row, **{key: of(row) for key, of in codes.items()}} for row in rows]


def dated() -> Rows:
    def last(who: int, _: int) -> str:
        return (DAY + timedelta(who * 3 + TIMES[who])).isoformat()

    columns: dict[str, Any] = {
        "date_of_diagnosis": lambda who, _: (DAY + timedelta(who * 3)).isoformat(),
        "date_last_contact": last,
        "vital_status": lambda who, _: ("alive", "dead")[DIED[who]],
    }
    return without(named("mrn", 1, **columns), "outcome")


def dated_apart(death: str, seen: str) -> Rows:
    """Return survival times as TCGA publishes them, with a patient's time in one of two columns."""
    columns: dict[str, Any] = {
        "vital_status": lambda who, _: ("Alive", "Dead")[DIED[who]],
        death: lambda who, _: TIMES[who] if DIED[who] else "'--",
        seen: lambda who, _: "'--" if DIED[who] else TIMES[who],
    }
    return without(named("mrn", 1, **columns), "outcome")


def renamed(rows: Rows, column: str, called: str) -> Rows:
    return [{called if key == column else key: own for key, own in row.items()} for row in rows]


def crp() -> Rows:
    """Return a column of laboratory values, some of which are below or above the measurable range."""

    def value(who: int, _: int) -> str:
        return "<0,5" if who % 5 == 1 else ">1000" if who == 7 else str(round(0.7 + who * 17 % 41, 1)).replace(".", ",")

    return named("mrn", 1, crp=value)


CRP = {"patients": 60, "reads": {"age", "bmi", "stage", "crp"}}


def american(rows: Rows) -> Rows:
    def written(own: Any) -> Any:
        is_date = isinstance(own, str) and own[4:5] == "-"
        return f"{own[5:7]}/{own[8:]}/{own[:4]}" if is_date else own

    return [{key: written(own) for key, own in row.items()} for row in rows]


def redcap() -> Rows:
    rows: Rows = []
    for row in named("record_id", 1):
        first = {
            "redcap_event_name": "baseline_arm_1",
            "redcap_data_access_group": ("north", "south")[row["stage"] % 2],
        }
        who, group = row["record_id"], first["redcap_data_access_group"]
        rows.append({"record_id": who, **first, **without([row], "record_id")[0], "outcome": ""})
        later = dict.fromkeys(("age", "bmi", "stage"), "")
        for event in ("month_6_arm_1", "month_12_arm_1"):
            told = row["outcome"] if event.startswith("month_12") else ""
            rows.append(
                {
                    "record_id": who,
                    "redcap_event_name": event,
                    "redcap_data_access_group": group,
                    **later,
                    "outcome": told,
                }
            )
    return rows


def counting() -> Rows:
    rows: Rows = []
    for who in range(60):
        middle = 10 + who
        rows.append({"mrn": who, "age": 30 + who % 50, "start": 0, "stop": middle, "transplant": 0, "event": 0})
        rows.append(
            {
                "mrn": who,
                "age": 30 + who % 50,
                "start": middle,
                "stop": middle + 5 + who % 9,
                "transplant": 1,
                "event": who % 2,
            }
        )
    return rows


def sheets(folder: Path, above: int = 0, **frames: Rows) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with pandas.ExcelWriter(folder / "export.xlsx") as book:
        for name, rows in frames.items():
            pandas.DataFrame(rows).to_excel(book, sheet_name=name, index=False, startrow=above)
            if above:
                book.sheets[name]["A1"] = "Export of the registry"


def frame(ending: str, rows: Callable[[], Rows]) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own = pandas.DataFrame(rows())
        if ending == "dta":
            own.to_stata(folder / "export.dta", write_index=False, version=118)
        else:
            own.to_parquet(folder / "export.parquet")

    return written


def coded(**codes: Mapping[int, Any]) -> Callable[[], Rows]:
    def rows() -> Rows:
        found = named("mrn", 1)
        for column, own in codes.items():
            for place, value in own.items():
                found[place][column] = value
        return found

    return rows


def moved() -> Rows:
    rows = named("mrn", center=lambda who, visit: ("north", "south")[(who + (visit if who < 12 else 0)) % 2])
    return rows


def copied() -> Rows:
    half = named("mrn", 1)[:30]
    there = [{**row, "mrn": row["mrn"] + 500, "center": "south"} for row in half]
    return [*({**row, "center": "north"} for row in half), *there]


def two_names() -> Rows:
    return [{**row, "case_id": f"F{place}"} for place, row in enumerate(named("MRN"))]


def crossed() -> Rows:
    return [{**row, "case_id": f"F{(place * 7) % 25}"} for place, row in enumerate(named("MRN"))]


def one_table_each(folder: Path) -> None:
    for who in range(12):
        write(folder / f"P{who:03}.csv", people(1, 6))


def two_hospitals(folder: Path) -> None:
    for name in ("north", "south"):
        write(folder / f"{name}.csv", named("mrn"))


def merged() -> Rows:
    rows = named("Patient", 2)
    return [{**row, "Patient": row["Patient"] if place % 2 == 0 else ""} for place, row in enumerate(rows)]


TABLES: dict[str, Odd] = {
    # ------------------------------------------------------------------------------------------ who is a patient
    **{
        f"patients in {called!r}": Odd(as_csv(lambda called=called: named(called)), right=THIRTY)  # type: ignore[misc]
        for called in (
            "Patient ID",
            "PatID",
            "Pat.-Nr.",
            "MRN",
            "subject",
            "case_id",
            "Study No.",
            "USUBJID",
            "Fall-Nr",
            "PAT_MRN_ID",
            "submitter_id",
        )
    },
    "patients with fifteen lines each": Odd(as_csv(lambda: named("patient_id", 15, count=30)), right=THIRTY),
    "MRN of patients and a number of each stay": Odd(as_csv(two_names), right=THIRTY),
    "two columns of patients that disagree": Odd(
        as_csv(crossed), asked="patients", said=["MRN", "case_id", "30 values"]
    ),
    "the same, answered": Odd(as_csv(crossed), {"patients": "MRN"}, right=THIRTY),
    "id that numbers lines": Odd(
        as_csv(lambda: [{"id": place + 1, **row} for place, row in enumerate(people(30, 2))]),
        asked="patients",
        said=["'id' numbers the lines"],
    ),
    "no patient, but a column that could be": Odd(
        as_csv(lambda: named("KIS")), asked="patients", said=["KIS (8860, 8861", "30 values, 2 lines each"]
    ),
    "the same, answered with its name": Odd(as_csv(lambda: named("KIS")), {"patients": "KIS"}, right=THIRTY),
    "patients' numbers that Excel rounded": Odd(
        as_csv(lambda: named("mrn", 1, name=lambda who: f"{1.2 + who // 3 / 100:.5f}E+11")),
        asked="rounded",
        said=["E+11"],
    ),
    "a group of patients is no patient": Odd(
        as_csv(lambda: named("patient_id", patient_group=lambda who, _: f"G{who % 6}")), right=THIRTY
    ),
    "a line of totals and a note below": Odd(
        as_csv(
            lambda: [
                *named("mrn"),
                {"mrn": "Total", "age": 55, "bmi": 25, "stage": 2, "outcome": "no"},
                {"mrn": "* exported by A", "age": "", "bmi": "", "stage": "", "outcome": ""},
            ]
        ),
        right={**THIRTY, "reading": {"codes": None}},
    ),
    "merged cells": Odd(as_csv(merged), asked="nobody", said=["empty in 30 of 60 lines"]),
    "patients spelt in two ways": Odd(
        as_csv(
            lambda: [{**row, "mrn": (f"P-{row['mrn']}", f"p{row['mrn']}")[n % 2]} for n, row in enumerate(named("mrn"))]
        ),
        asked="spelling",
        said=["P-8860"],
    ),
    # ------------------------------------------------------------------------------------------ hospitals
    "patients at two hospitals": Odd(as_csv(moved), asked="hospitals", said=["12 patients", "8860"]),
    "lines that two hospitals share": Odd(as_csv(copied), asked="copies", said=["30 lines"]),
    "a table for each patient": Odd(
        one_table_each, said=["12 tables", "into one, with a column that names the patient"]
    ),
    "a table for each of two hospitals": Odd(two_hospitals, said=["2 tables", "30 patients are in two of them"]),
    "hospitals with blanks in their names": Odd(
        as_csv(lambda: named("mrn", center=lambda who, _: ("Köln Mitte", "Bad Orb")[who % 2])), right=THIRTY
    ),
    # ------------------------------------------------------------------------------------------ REDCap, visits
    "REDCap: baseline and follow-up": Odd(
        as_csv(redcap),
        right={**THIRTY, "patients": 60, "notes_lack": ["'age'"], "reading": {"fill": ["age", "bmi", "stage"]}},
    ),
    "REDCap, exported with labels": Odd(
        as_csv(lambda: renamed(renamed(redcap(), "redcap_event_name", "Event Name"), "record_id", "Record ID")),
        right={**THIRTY, "patients": 60, "reading": {"fill": ["age", "bmi", "stage"]}},
    ),
    # ------------------------------------------------------------------------------------------ outcomes
    "start, stop, event": Odd(as_csv(counting), asked="entry", said=["times of entry"]),
    "two dates and alive or dead": Odd(as_csv(dated), asked="survival", said=["date_of_diagnosis", "alive: 2", "dead"]),
    "the same, as survival": Odd(
        as_csv(dated),
        {"survival": "survival"},
        right={
            "patients": 60,
            "kind": "survival",
            "reads": {"age", "bmi", "stage"},
            "reading": {"spans": {"time": ["date_of_diagnosis", "date_last_contact"]}},
        },
    ),
    "the times to death and to the last visit": Odd(
        as_csv(
            lambda: dated_apart("days_to_death", "days_to_last_follow_up"),
        ),
        asked="survival",
        said=["days_to_death", "days_to_last_follow_up"],
    ),
    "the same, as classes": Odd(
        as_csv(lambda: dated_apart("days_to_death", "days_to_last_follow_up")),
        {"survival": "classes"},
        right={"patients": 60, "kind": "classification", "reads": {"age", "bmi", "stage"}},
    ),
    "a status of 1 and 2": Odd(
        as_csv(lambda: survival(status=lambda row: row["status"] + 1)), asked="event", said=["1: ", "2: "]
    ),
    "a status of 2 and 1, answered": Odd(
        as_csv(lambda: survival(status=lambda row: 2 - row["status"])),
        {"event": "1"},
        right={"patients": 60, "kind": "survival", "reading": {"label_map": {"1": "event", "2": "censored"}}},
    ),
    "time and status": Odd(
        as_csv(survival), right={"patients": 60, "kind": "survival", "reads": {"age", "bmi", "stage"}}
    ),
    "the two dates in Excel": Odd(
        lambda folder: sheets(folder, Data=dated()),
        {"survival": "survival"},
        right={"patients": 60, "kind": "survival", "reads": {"age", "bmi", "stage"}},
    ),
    "two dates as in America": Odd(
        as_csv(lambda: american(dated())), {"survival": "survival"}, right={"patients": 60, "kind": "survival"}
    ),
    "1 for a censored case": Odd(
        as_csv(
            lambda: [{"censored" if key == "status" else key: own for key, own in row.items()} for row in survival()]
        ),
        asked="event",
        said=["'censored' is the event (0: "],
    ),
    "the same, answered with 0": Odd(
        as_csv(
            lambda: [{"censored" if key == "status" else key: own for key, own in row.items()} for row in survival()]
        ),
        {"event": "0"},
        right={"patients": 60, "kind": "survival", "reading": {"label_map": {"0": "event", "1": "censored"}}},
    ),
    "two kinds of death": Odd(
        as_csv(lambda: [{**row, "status": n % 3} for n, row in enumerate(survival())]),
        said=["which column", "--target"],
    ),
    "an outcome and that of a year later": Odd(
        as_csv(lambda: named("mrn", 1, outcome_12m=lambda who, _: who % 2)), asked="outcome", said=["outcome_12m"]
    ),
    "OMOP's conditions": Odd(
        as_csv(
            lambda: [
                {"person_id": n // 2, "condition_concept_id": 4000 + n % 7, "condition_start_date": "2020-01-01"}
                for n in range(80)
            ]
        ),
        said=["--target"],
    ),
    "a line for each measurement": Odd(
        as_csv(
            lambda: [
                {"mrn": who, "test": test, "value": who % 7 + 3, "outcome": who % 2}
                for who in range(40)
                for test in ("crp", "hb")
            ]
        ),
        said=["a line for each measurement"],
    ),
    "two outcomes": Odd(
        as_csv(lambda: named("mrn", 1, response=lambda who, _: ("CR", "PD")[who % 2])),
        asked="outcome",
        said=["response", "CR: 30 lines"],
    ),
    "no column that could be an outcome": Odd(as_csv(lambda: without(named("mrn"), "outcome")), said=["--target"]),
    "an outcome of 9": Odd(
        as_csv(lambda: [{**row, "outcome": (0, 1, 9)[n % 3]} for n, row in enumerate(named("mrn", 1))]),
        right={"patients": 40, "kind": "classification", "reading": {"codes": {"outcome": ["9"]}}},
    ),
    # ------------------------------------------------------------------------------------------ inputs
    "discharged to the morgue": Odd(
        as_csv(
            lambda: [
                {**row, "discharge_to": ("home", "transferred to morgue")[row["outcome"] == "yes"]}
                for row in named("mrn", 1)
            ]
        ),
        right={**THIRTY, "patients": 60, "never": ["morgue", "discharge_to"]},
    ),
    "a column that alone tells the outcome": Odd(
        as_csv(lambda: [{**row, "k17": (1, 8)[row["outcome"] == "yes"] + row["stage"] / 9} for row in named("mrn", 1)]),
        right={**THIRTY, "patients": 60, "never": ["k17"]},
    ),
    "the same, kept": Odd(
        as_csv(lambda: [{**row, "k17": (1, 8)[row["outcome"] == "yes"] + row["stage"] / 9} for row in named("mrn", 1)]),
        {"telling": "keep them"},
        right={"patients": 60, "reads": {"age", "bmi", "stage", "k17"}},
    ),
    "a line of totals below the patients": Odd(
        as_csv(lambda: [*(rows := named("mrn", 1)), {**dict.fromkeys(rows[0], ""), "mrn": "Total", "outcome": "27"}]),
        right={"patients": 60, "reads": {"age", "bmi", "stage"}, "never": ["Total", "27"]},
    ),
    "a laboratory's value of a later day than the outcome": Odd(
        as_csv(lambda: renamed(named("mrn", 1, crp_d30=lambda who, _: who * 7 % 41), "outcome", "death_d7")),
        right={**THIRTY, "patients": 60, "never": ["crp_d30"]},
    ),
    "the same outcome of a later day": Odd(
        as_csv(lambda: renamed(named("mrn", 1, mort_90d=lambda who, _: who * 7 % 3 // 2), "outcome", "mort_30d")),
        target="mort_30d",
        right={**THIRTY, "patients": 60, "never": ["mort_90d"]},
    ),
    "a response that nobody could tell": Odd(
        as_csv(
            lambda: [{**row, "outcome": "NE" if row["mrn"] % 9 == 0 else row["outcome"]} for row in named("mrn", 1)]
        ),
        right={"reading": {"codes": {"outcome": ["NE"]}}, "never": ["NE"]},
    ),
    "a limit of detection": Odd(
        as_csv(crp, delimiter=";"), right={**CRP, "reading": {"limits": ["crp"], "decimal": ","}}
    ),
    "a limit of detection, as missing": Odd(
        as_csv(crp, delimiter=";"),
        {"limits": "count as missing"},
        right={**CRP, "reading": {"codes": {"crp": ["<0,5", ">1000"]}}},
    ),
    "a limit of detection, left out": Odd(
        as_csv(crp, delimiter=";"), {"limits": "leave the columns out"}, right={**CRP, "reads": {"age", "bmi", "stage"}}
    ),
    "a limit beside a word": Odd(
        as_csv(lambda: [{**row, "crp": "haemolytic" if row["mrn"] == 8861 else row["crp"]} for row in crp()]),
        right={**CRP, "reading": {"limits": ["crp"], "codes": {"crp": ["haemolytic"]}}},
    ),
    "staff": Odd(
        as_csv(
            lambda: named(
                "mrn",
                1,
                attending=lambda who, _: ("Dr. Ali Oezdemir", "Dr. B. Quast")[who % 2],
                seen_by=lambda who, _: ("AO", "BQ")[who % 2],
                Reviewed=lambda who, _: ("AO", "CM")[who % 2],
            )
        ),
        right={**THIRTY, "patients": 60, "never": ["Oezdemir", "AO", "attending", "seen_by"]},
    ),
    "staff in German": Odd(
        as_csv(
            lambda: named(
                "mrn", 1, Arzt=lambda who, _: ("MK", "AB")[who % 2], behandelt_von=lambda who, _: ("MK", "AB")[who % 2]
            )
        ),
        right={**THIRTY, "patients": 60, "never": ["MK", "behandelt_von", "Arzt"]},
    ),
    "days without hyphens": Odd(
        as_csv(
            lambda: named(
                "mrn", 1, seen_on=lambda who, _: f"202{who % 5}0315", ward_day=lambda who, _: 20200301 + who % 9
            )
        ),
        right={**THIRTY, "patients": 60, "never": ["seen_on", "ward_day"]},
    ),
    "a score of another model": Odd(
        as_csv(lambda: [{**row, "ai": (row["outcome"] == "yes") + n / 99} for n, row in enumerate(named("mrn", 1))]),
        right={**THIRTY, "patients": 60, "never": ["ai"]},
    ),
    "filled in for one class alone": Odd(
        as_csv(lambda: [{**row, "drug": "" if row["outcome"] == "no" else row["stage"]} for row in named("mrn", 1)]),
        right={**THIRTY, "patients": 60, "never": ["drug"]},
    ),
    "a note of two lines that many share": Odd(
        as_csv(
            lambda: named("mrn", 1, notes=lambda who, _: ("stable;\nno pain", "worse;\ncall his daughter")[who % 2])
        ),
        right={**THIRTY, "patients": 60, "never": ["daughter", "stable"]},
    ),
    "free text": Odd(
        as_csv(lambda: named("mrn", 1, notes=lambda who, _: f"seen on day {who}, in good health")),
        right={**THIRTY, "patients": 60, "never": ["notes", "health"]},
    ),
    "999 in age and 9 in stage": Odd(
        as_csv(coded(age={3: 999, 4: 999}, stage={5: 9, 6: 9})),
        right={**THIRTY, "patients": 60, "reading": {"codes": {"age": ["999"], "stage": ["9"]}}},
    ),
    "-9 in bmi": Odd(as_csv(coded(bmi={3: -9, 8: -9})), right={"patients": 60, "reading": {"codes": {"bmi": ["-9"]}}}),
    "a patient of 99": Odd(as_csv(coded(age={3: 99})), right={**THIRTY, "patients": 60, "reading": {"codes": None}}),
    "measured where no outcome is": Odd(
        as_csv(
            lambda: [
                {**row, "ct": place if place < 40 else "", "outcome": "" if place < 40 else row["outcome"]}
                for place, row in enumerate(named("mrn", 1, name=lambda who: 7000 + who))
            ]
        ),
        right={"never": ["ct"], "patients": 20},
    ),
    "words among numbers": Odd(
        as_csv(
            lambda: [{**row, "crp": "hemolysed" if n % 9 == 0 else n * 1.5} for n, row in enumerate(named("mrn", 1))]
        ),
        right={"patients": 60, "reads": {"age", "bmi", "stage", "crp"}, "reading": {"codes": {"crp": ["hemolysed"]}}},
    ),
    "99.9 in bmi": Odd(
        as_csv(coded(bmi={3: 99.9, 4: 99.9})), right={"patients": 60, "reading": {"codes": {"bmi": ["99.9"]}}}
    ),
    "no consta and keine Angabe among levels": Odd(
        as_csv(
            lambda: (
                named("mrn", 1, smoker=lambda who, _: ("sí", "no", "No consta")[who % 3])
                + named(
                    "mrn", 1, name=lambda who: 7000 + who, smoker=lambda who, _: ("sí", "no", "keine Angabe")[who % 3]
                )
            )
        ),
        right={
            "patients": 120,
            "never": ["No consta", "keine Angabe"],
            "reading": {"codes": {"smoker": ["No consta", "keine Angabe"]}},
        },
    ),
    "no and open among levels": Odd(  # "ne" means no in Czech
        as_csv(lambda: named("mrn", 1, smoker=lambda who, _: ("ano", "ne", "offen")[who % 3])),
        right={"patients": 60, "reading": {"codes": None}},
    ),
    "unknown among levels that a person keeps": Odd(
        as_csv(lambda: named("mrn", 1, smoker=lambda who, _: ("yes", "no", "Unknown")[who % 3])),
        answers={"codes": "they are values"},
        right={"patients": 60, "reading": {"codes": None}},
    ),
    "folds of another study": Odd(
        as_csv(lambda: named("mrn", 1, fold=lambda who, _: who % 5)),
        right={**THIRTY, "patients": 60, "never": ["fold"]},
    ),
    "an outcome that is not known of some": Odd(
        as_csv(
            lambda: [{**row, "outcome": ("no", "yes", "unknown")[n % 7 % 3]} for n, row in enumerate(named("mrn", 1))]
        ),
        right={**THIRTY, "patients": 43, "never": ["unknown"], "reading": {"codes": {"outcome": ["unknown"]}}},
    ),
    # ------------------------------------------------------------------------------------------ files
    "CSV with titles": Odd(
        as_csv(lambda: named("mrn"), above=["Export of the registry", "made 2026-01-02, page 1", ""]), right=THIRTY
    ),
    "CSV of Excel, with sep=": Odd(
        as_csv(lambda: named("mrn"), above=["sep=;"], delimiter=";", coding="cp1252"), right=THIRTY
    ),
    "TSV in UTF-16": Odd(as_csv(lambda: named("MRN"), coding="utf-16", delimiter="\t"), right=THIRTY),
    "decimal commas": Odd(
        as_csv(lambda: [{**row, "bmi": str(row["bmi"]).replace(".", ",")} for row in named("mrn")], delimiter=";"),
        right=THIRTY,
    ),
    "Excel with title lines": Odd(lambda folder: sheets(folder, 3, Data=named("mrn")), right=THIRTY),
    "Excel with a sheet of keys": Odd(
        lambda folder: sheets(
            folder, Data=named("mrn"), Keys=[{"code": 1, "meaning": "early"}, {"code": 2, "meaning": "late"}]
        ),
        right=THIRTY,
    ),
    "Excel with two tables": Odd(
        lambda folder: sheets(folder, Baseline=named("mrn"), Followup=named("mrn")), said=["2 sheets"]
    ),
    "Stata": Odd(frame("dta", lambda: named("mrn")), right=THIRTY),
    "Parquet": Odd(frame("parquet", lambda: named("mrn")), right=THIRTY),
    "no names of columns": Odd(
        lambda folder: write(folder / "export.csv", [{str(n): n + 5 for n in range(4)} for _ in range(30)]),
        said=["numbers in the first line"],
    ),
}


def reads(own: DataSet, folder: Path) -> set[str]:
    learned = {own.learns.get(key) for key in ("target", "time", "event")}
    return {word for word in own.words if word in HEADS} - learned


HEADS = frozenset(("crp",)) | frozenset(
    ("age", "bmi", "stage", "k17", "ct", "attending", "seen_by", "Reviewed", "notes", "discharge_to", "KIS", "center")
)


@pytest.mark.parametrize("what", TABLES)
def test_no_table_is_taken_for_another(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd, folder, out = TABLES[what], tmp_path / "data", tmp_path / "set"
    odd.make(folder)
    assert len(odd.answers) <= 3
    more = [part for key, value in odd.answers.items() for part in ("--set", f"{key}={value}")]
    code = main(
        ["data", str(folder), "-o", str(out), "--yes", *(["--target", odd.target] if odd.target else []), *more]
    )
    told = capsys.readouterr()
    if odd.said:
        assert code == 1 and not out.exists()
        line = told.err.strip().splitlines()[-1]
        assert all(words in line for words in odd.said), line
        assert not odd.asked or f"{odd.asked}: " in line, line
        return
    assert code == 0, told.err
    own, right = DataSet.read(out), odd.right or {}
    assert own.patients.count == right.get("patients", own.patients.count) and own.patients.known
    assert own.learns.get("kind", "classification") == right.get("kind", own.learns.get("kind", "classification"))
    if "reads" in right:
        assert reads(own, folder) == right["reads"], own.words
    for key, value in right.get("reading", {}).items():
        assert own.reading.get(key) == value, own.reading
    assert not [word for word in right.get("never", ()) if any(word in told for told in own.words)], own.words
    assert not [note for note in own.notes for word in right.get("notes_lack", ()) if word in note], own.notes


def test_a_limit_of_detection_is_a_number_for_the_network(tmp_path: Path) -> None:
    """In earlier versions, medsilo ignored a column with values such as "<0,5", although most cells were numbers."""
    write(tmp_path / "data/export.csv", crp(), delimiter=";")
    assert main(["data", str(tmp_path / "data"), "-o", str(tmp_path / "set"), "--yes"]) == 0
    source = DataSet.read(tmp_path / "set").source(tmp_path / "set")
    values = {"name": "table", "target": "outcome", "labels": ["no", "yes"], "columns": ["crp"], "standardise": "none"}
    task = TASKS["table"].model_validate(values)
    data = task.site_data("a", ["a"], 0, source)
    drawn = np.concatenate([np.asarray(part.inputs)[:, 0] for part in (data.train, data.validation, data.test)])
    assert len(drawn) == 60 and (drawn == 0.5).sum() == 12 and drawn.max() == 1000
