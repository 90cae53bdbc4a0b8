"""Prepare FLamby's two tables of patients, and the studies of IMPACT as hospitals that train and test.

A fifth of each hospital's training cases of heart disease are validation cases; TCGA-BRCA has too few deaths for
validation cases.
"""

import csv
from pathlib import Path

from medsilo.core.errors import DataError
from results.flamby import HEART, TABLES, Lines, write_tables
from results.pages import IMPACT

EACH = 5  # in the file's order, every EACH-th training case becomes a validation case
PARTS = ("train", "test", "train", "test", "validation")
COVARIATES = ("age", "motor_score", "pupil", "ct", "hypox", "hypots", "tsah", "edh")


def validated(lines: Lines) -> Lines:
    found: Lines = {}
    for site, own in lines.items():
        trained = [place for place, line in enumerate(own) if line["part"] == "train"]
        held = set(trained[EACH - 1 :: EACH])
        found[site] = [line | {"part": "validation"} if place in held else line for place, line in enumerate(own)]
    return found


def write_patients(source: Path, target: Path) -> Path:
    benchmark = next(one for one in TABLES if one.folder == source.name)
    if lacking := benchmark.lacking(source.parent):
        raise DataError(f"no {', '.join(lacking)} in the data folder; --data names the folder with {source.name}")
    if not target.exists():
        lines = benchmark.read(source)
        write_tables(validated(lines) if benchmark is HEART else lines, target)
    return target


def write_studies(source: Path, target: Path) -> Path:
    file = source / f"{IMPACT}.csv"
    if not file.is_file():
        raise DataError(f"no {file.name} in the data folder; --data names the folder with {source.name}")
    if not target.exists():
        studies: Lines = {}
        with file.open(encoding="utf-8", newline="") as rows:
            for row in csv.DictReader(rows):
                own = studies.setdefault(row["name"].replace(" ", "-"), [])
                read = {name: row[name] for name in COVARIATES}
                own.append({**read, "outcome": int(row["mort"]), "part": PARTS[len(own) % len(PARTS)]})
        write_tables(dict(sorted(studies.items())), target)
    return target
