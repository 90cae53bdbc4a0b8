"""Built-in tasks and readers pass the tests of TaskTester."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medsilo.tasks.site_data import CaseSubset
from medsilo_lab.testing import TaskTester
from tests.hospital import photograph, write_balls, write_pixels, write_table
from tests.hospital import write_photos as write_classified

PATIENTS = [f"patient-{number:02}" for number in range(10)]


class TestActivity(TaskTester):
    task = {"name": "synthetic-activity", "persons": 8, "windows": 10, "steps": 32}


class TestHistology(TaskTester):
    task = {"name": "synthetic-histology", "patients": 10, "patches": 2, "size": 32}


class TestProstate(TaskTester):
    task = {"name": "synthetic-prostate", "patients": 10, "slices": 3, "size": 48}


class TestPhotographs(TaskTester):
    task = {"name": "image-folder", "labels": ["square"], "size": [32, 32]}

    def write(self, folder: Path, site: str) -> Any:
        for place, patient in enumerate(PATIENTS):
            for number in range(2):
                pixels, mask = photograph(100 * place + number)
                write_pixels(folder / "images" / patient / f"{number}.png", pixels)
                write_pixels(folder / "labels" / patient / f"{number}.png", mask)
        return {"folder": folder, "images": "images/*/*.png", "labels": "labels/*/*.png", "patient": "^[^/]+"}


class TestClasses(TaskTester):
    task = {"name": "image-folder", "kind": "classification", "labels": ["benign", "malignant"], "size": [64, 64]}

    def write(self, folder: Path, site: str) -> Any:
        write_classified(folder, PATIENTS)
        return {"folder": folder, "label_map": {"0": "benign", "1": "malignant"}}


class TestVolumes(TaskTester):
    task = {"name": "nifti-folder", "labels": ["ball"], "size": [16, 16, 8], "target_spacing": [2, 2, 3]}

    def write(self, folder: Path, site: str) -> Any:
        return write_balls(folder, PATIENTS)


class TestTable(TaskTester):
    task = {
        "name": "table",
        "kind": "classification",
        "columns": [{"name": "age"}, {"name": "creatinine"}],
        "target": "died",
        "labels": ["no", "yes"],
    }

    def write(self, folder: Path, site: str) -> Any:
        drawn = np.random.default_rng(len(site))
        rows = [
            {
                "patient": f"{site}-{n}",
                "age": 40 + n,
                "creatinine": f"{drawn.normal(80, 9):.1f}",
                "died": ["no", "yes"][n % 2],
            }
            for n in range(40)
        ]
        write_table(folder / "cases.csv", rows)
        return {"folder": folder, "columns": {"patient": "patient"}}


class Restless(TestClasses):
    """A faulty reader that returns the training cases in a new order at each call."""

    __test__ = False

    def read(self, settings: Any, *changes: str, site: str = "hospital-a") -> Any:
        data = super().read(settings, *changes, site=site)
        order = np.random.default_rng().permutation(len(data.train))
        return replace(data, train=CaseSubset(data.train, [*map(int, order)], data.train.patients, None))


def test_a_reader_with_another_order_each_time_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="other cases"):
        Restless().test_the_same_cases_are_read_twice(tmp_path)
