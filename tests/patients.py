"""Write files in the formats of FLamby's two tables of patients and of IMPACT's studies."""

import csv
from pathlib import Path

from medsilo.plan import load_plan
from medsilo.tasks.own.patient_table import PatientTable
from results.flamby import HOSPITALS
from results.patients import COVARIATES

ROOT = Path(__file__).resolve().parents[1]


def write_hearts(folder: Path) -> None:
    """Write twelve complete rows and two incomplete rows for each hospital."""
    folder.mkdir(parents=True)
    for name in HOSPITALS:
        rows = [[50 + n, 1, 1 + n % 4, 130, 200, 0, n % 3, 150, 0, 1.5, 2, 0, 3, n % 2] for n in range(12)]
        rows += [[60, 1, 1, "?", 200, 0, 0, 150, 0, 1.5, 2, 0, 3, 0], [60, 1, 1, 0, 200, 0, 0, 150, 0, 1.5, 2, 0, 3, 0]]
        with (folder / f"processed.{name}.data").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def write_studies(folder: Path) -> None:
    """Write 25 patients for each of IMPACT's studies, every third of whom died."""
    folder.mkdir(parents=True)
    names = load_plan(ROOT / "results/plans/impact.yaml").participation.sites
    with (folder / "impact.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["name", *COVARIATES, "mort"])
        for name in names:
            for n in range(25):
                yes = [(n // step) % 2 for step in (1, 2, 3, 4)]
                values = [20 + n, ("1/2", "3", "4", "5/6")[n % 4], ("Both", "One", "None")[n % 3], "III", *yes]
                table.writerow([name.replace("HIT-", "HIT "), *values, int(n % 3 == 0)])


def write_survival(folder: Path) -> None:
    """Write 24 patients for each of six regions, every third of whom is a test patient."""
    folder.mkdir(parents=True)
    task = load_plan(ROOT / "results/plans/brca.yaml").task
    assert isinstance(task, PatientTable)
    people = [(f"{region}-{n}", region, n) for region in range(6) for n in range(24)]
    with (folder / "train_test_split.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["pid", "fold2"])
        table.writerows([pid, f"{'test' if n % 3 == 0 else 'train'}_{region}"] for pid, region, n in people)
    with (folder / "brca.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["pid", *(column.name for column in task.columns), "E", "T"])
        for pid, _, n in people:
            table.writerow(
                [pid, *((n + place) % 5 for place in range(len(task.columns))), n % 2, 100 + 7 * (n * 5 % 24)]
            )
