"""Files in the form of FLamby's two tables of patients, and of its brains."""

import csv
from collections.abc import Mapping
from pathlib import Path

import nibabel
import numpy as np

from benchmarks.flamby import HOSPITALS
from medsilo.plan import load_plan
from medsilo.tasks.own.patient_table import PatientTable

ROOT = Path(__file__).resolve().parents[1]


def write_hearts(folder: Path) -> None:
    """Write twelve usable lines of each hospital and two that are not."""
    folder.mkdir(parents=True)
    for name in HOSPITALS:
        rows = [[50 + n, 1, 1 + n % 4, 130, 200, 0, n % 3, 150, 0, 1.5, 2, 0, 3, n % 2] for n in range(12)]
        rows += [[60, 1, 1, "?", 200, 0, 0, 150, 0, 1.5, 2, 0, 3, 0], [60, 1, 1, 0, 200, 0, 0, 150, 0, 1.5, 2, 0, 3, 0]]
        with (folder / f"processed.{name}.data").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def write_survival(folder: Path) -> None:
    """Write 24 patients of each of six regions, every third of them for the test."""
    folder.mkdir(parents=True)
    task = load_plan(ROOT / "benchmarks/results/plans/brca.yaml").task
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


def write_ixi(folder: Path, subjects: Mapping[str, int], shape: tuple[int, int, int]) -> None:
    """Write heads with a brain in them, so many of each hospital, every fifth for the test, as IXI Tiny has them.

    Axes run to the back, down and to the right, as in the published files.
    """
    drawn, lines, number = np.random.default_rng(0), [], 0
    places = np.stack(np.meshgrid(*(np.linspace(-1, 1, length) for length in shape), indexing="ij"))
    towards = np.array([[0, 0, 3.0, 0], [-2.0, 0, 0, 0], [0, -4.0, 0, 0], [0, 0, 0, 1]])
    for gain, (site, count) in zip((1.0, 1.6, 0.7), subjects.items(), strict=False):
        for n in range(count):
            number += 1
            name = f"IXI{number:03d}-{site}-{1000 + number}"
            size = drawn.uniform(0.5, 0.7, 3)[:, None, None, None]
            brain = (np.square(places / size).sum(0) < 1).astype(np.float32)
            head = np.square(places / (size + 0.25)).sum(0) < 1
            image = gain * 400 * (head + brain) + drawn.normal(0, 20, shape)
            for what, values in (("T1", image), ("label", brain)):
                place = folder / "IXI_sample" / name / what
                place.mkdir(parents=True)
                told = "image" if what == "T1" else what
                nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), towards), place / f"{name}_{told}.nii.gz")
            lines.append([number, list(subjects).index(site), "test" if n % 5 == 4 else "train"])
    with (folder / "metadata_tiny.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["Patient ID", "Manufacturer", "Split"], *lines])
