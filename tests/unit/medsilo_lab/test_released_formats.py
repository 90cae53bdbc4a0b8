"""Without a kit, the tests run released models for NIfTI, DICOM, time series and tables.

The report of drift finds no drift in the training patients.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from medsilo import cli
from medsilo.plan import parse_plan
from medsilo.site.settings import ALL_MINE, make_settings
from medsilo_lab.engines import inprocess
from tests.commands import lead_of
from tests.dicoms import write_segmentation, write_series
from tests.hospital import affine_of, ball, write_balls
from tests.unit.medsilo_series import test_series

PATIENTS = 30
TINY = {"name": "unet", "dimensions": 3, "features": [4, 8], "norm": "instance"}
VOLUMES = {"labels": ["ball"], "size": [16, 16, 8], "target_spacing": [2, 2, 3]}


def nifti(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    write_balls(folder, [f"p{number:02}" for number in range(PATIENTS)])
    data = {"folder": str(folder), "images": "images/*.nii.gz", "labels": "labels/*.nii.gz"}
    return {"task": {"name": "nifti-folder", **VOLUMES}, "network": TINY}, data, [folder / "images"]


def dicom(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    pytest.importorskip("highdicom")
    for number in range(PATIENTS):
        image, mask = ball((12, 24, 20), (1.5, 1.5, 2.5), number)
        values = (100 * image).round().astype(int)
        machine = {"ManufacturerModelName": f"CT {number // 15}"}
        files = write_series(folder / f"p{number}" / "ct", values, affine_of((1.5, 1.5, 2.5)), f"p{number}", **machine)
        write_segmentation(folder / f"p{number}" / "seg.dcm", files, mask, {1: "ball"})
    return {"task": {"name": "dicom-folder", **VOLUMES}, "network": TINY}, {"folder": str(folder)}, [folder]


def series(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    for person in range(PATIENTS):
        for doing in ("REST", "WALK"):
            lines = [row for row in test_series.rows(person, 12.0) if row[3] == doing]
            apart = [[round(place / test_series.RATE, 3), *row[1:3]] for place, row in enumerate(lines)]
            test_series.write(folder / doing / f"person{person}_1.csv", apart, test_series.HEAD[:3])
    plan = test_series.plan_of(standardise="none")
    study = {"task": plan.task.model_dump(mode="json"), "network": plan.network.model_dump(mode="json")}
    named = {"recording_columns": {"time": "t"}, "patient": "person[0-9]+"}
    return study, test_series.described(folder, **named), [folder]


def table(folder: Path, patients: int, seed: int, shift: float = 0.0) -> Path:
    drawn, lines = random.Random(seed), ["patient,age,marker,outcome"]
    for number in range(patients):
        sick = drawn.randrange(2)
        lines.append(f"person-{seed}-{number},{drawn.gauss(shift, 1):.4f},{drawn.gauss(1.6 * sick, 1):.4f},{sick}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.csv").write_text("\n".join(lines) + "\n")
    (folder / "medsilo.yaml").write_text(f"data:\n  folder: {folder}\n  table: cases.csv\n")
    return folder


def lines(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    table(folder, PATIENTS, 3)
    task = {"name": "table", "columns": ["age", "marker"], "standardise": "none"}
    return {"task": task}, {"folder": str(folder), "table": "cases.csv"}, [folder / "cases.csv"]


SLOW = [pytest.param(nifti, marks=pytest.mark.slow), pytest.param(dicom, marks=pytest.mark.long)]


@pytest.mark.long
@pytest.mark.parametrize("kind", [*SLOW, series, lines])
def test_a_hospital_without_a_kit_validates_and_predicts(
    kind: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    study, data, files = kind(tmp_path / "patients")
    own = {"training": {"rounds": 1, "batch_size": 8}, "model_selection": {"keep": "last"}}
    plan = parse_plan({"algorithm": {"name": "fedavg"}, "participation": {"sites": ["a"]}, **own, **study})
    settings = make_settings({**ALL_MINE, "data": data, "device": "cpu"}, "a test")
    inprocess.run(plan, folder=tmp_path / "study", settings=settings)
    assert cli.main(["release", "make", "study", "-o", "release"]) == 0
    (tmp_path / "local").mkdir()
    (tmp_path / "local/medsilo.yaml").write_text(yaml.safe_dump({"data": data, "device": "cpu", "pictures": True}))
    words = ["release", "test", "release", "--as", "new", "--settings", "local", "-o", "validation"]
    lead = lead_of("release")
    capsys.readouterr()
    assert cli.main([*words, "--lead", lead, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["told"]
    assert told["cases"] and told["score"] is not None and (kind is series or abs(told["cases"] - PATIENTS) <= 5)
    page = (tmp_path / "validation/validation.html").read_text()
    assert ("<img" in page) == (kind in (nifti, dicom))
    given = [str(path) for path in files]
    assert (
        cli.main(["predict", "release/model-1", *given, "-o", "found", "--settings", "local", "--device", "cpu"]) == 0
    )
