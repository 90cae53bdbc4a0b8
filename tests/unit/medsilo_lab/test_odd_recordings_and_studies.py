"""`medsilo data` reads DICOM studies and recordings as hospitals' systems export them, and asks the user when the files
do not identify the patient.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from medsilo.cli import main
from medsilo.site.data_set import DataSet
from tests.dicoms import write_segmentation, write_series
from tests.unit.medsilo_series.test_series_waves import write_wfdb

AFFINE = np.diag([2.0, 2.0, 3.0, 1.0])


def write_visit(folder: Path, patient: str, seed: int) -> None:
    values, mask = np.random.default_rng(seed).integers(-200, 200, (6, 16, 16)), np.zeros((6, 16, 16), np.uint8)
    mask[2:4, 4:10, 5:11] = 1
    write_segmentation(folder / "seg.dcm", write_series(folder / "CT", values, AFFINE, patient), mask, {1: "Tumour"})


def made(folder: Path, *answers: str) -> DataSet:
    out = folder.parent / "set"
    said = [part for answer in answers for part in ("--set", answer)]
    assert main(["data", str(folder), "-o", str(out), "--yes", *said]) == 0
    return DataSet.read(out)


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *answers: str) -> str:
    capsys.readouterr()
    said = [part for answer in answers for part in ("--set", answer)]
    assert main(["data", str(folder), "-o", str(folder.parent / "none"), "--yes", *said]) == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_pseudonym_for_each_visit_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In earlier versions, a patient with a different PatientID in each study was in both training and test data."""
    folder = tmp_path / "export"
    for visit in range(16):
        write_visit(folder / f"PAT{visit // 2:02}" / f"visit{visit % 2}", f"ANON{visit}", visit)
    text = asked(folder, capsys)
    assert "patients: 8 folders have images of several patients" in text and "PAT00: ANON0, ANON1" in text
    assert made(folder, "patients=^([^/]+)/").patients.count == 8
    assert made(folder, "patients=each name in headers is a patient").patients.count == 16


def test_names_in_headers_that_are_nearly_alike_are_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for visit in range(12):
        write_visit(tmp_path / "export" / f"study{visit}", f"{visit // 2:04}" if visit % 2 else f"{visit // 2}", visit)
    assert "spelling: 6 names of patients" in (text := asked(tmp_path / "export", capsys)) and "0001 and 1" in text
    assert made(tmp_path / "export", "spelling=they are different people").patients.count == 12


def test_studies_of_which_each_folder_is_one_patient_s_are_not_asked_about(tmp_path: Path) -> None:
    for visit in range(12):
        write_visit(tmp_path / "export" / f"P{visit // 2:02}" / f"visit{visit % 2}", f"P{visit // 2:02}", visit)
    assert made(tmp_path / "export").patients.count == 6


@pytest.mark.slow
def test_patients_of_one_number_at_two_hospitals_are_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In earlier versions, medsilo merged 24 patients of two hospitals into 12 patients with the same numbers."""
    for visit in range(24):
        write_visit(tmp_path / f"export/Klinik {visit // 12}/study{visit}", f"{visit % 12 + 1}", visit)
    text = asked(tmp_path / "export", capsys)
    assert "hospitals: 12 names of patients" in text and "Klinik 0 (12 patients), Klinik 1 (12 patients)" in text
    assert made(tmp_path / "export", "hospitals=the same people").patients.count == 12
    out = tmp_path / "apart"
    assert main(["data", str(tmp_path / "export"), "-o", str(out), "--yes", "--set", "hospitals=hospitals"]) == 0
    sets = [DataSet.read(out / f"Klinik-{number}") for number in range(2)]
    assert [own.patients.count for own in sets] == [12, 12]
    assert {own.inventory.files for own in sets} == {12 * 7} and sets[0].inventory != sets[1].inventory


def write_recordings(folder: Path, head: tuple[str, ...], named: bool = True) -> None:
    folder.mkdir()
    lines = []
    for number in range(24):
        drawn, label = np.random.default_rng(number), number // 2 % 2
        signal = np.sin(2 * np.pi * (1 + label) * np.arange(1000) / 100) + drawn.normal(0, 0.1, 1000)
        name = f"rec{number:03}"
        write_wfdb(folder / f"{name}.hea", (1000 * signal[:, None]).astype(int), names=("I",))
        told = {"record": name, "diagnosis": ("AF", "normal")[label], "patient_id": f"pt{number // 2}"}
        lines.append([told[column] for column in head])
    with (folder / "records.csv").open("w", newline="") as file:
        csv.writer(file).writerows([head, *lines] if named else lines)


def test_a_recording_is_no_patient_unless_somebody_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In earlier versions, medsilo silently used file names in a column `record` as patients' numbers."""
    write_recordings(tmp_path / "ecg", ("record", "diagnosis"))
    text = asked(tmp_path / "ecg", capsys)
    assert "patients: nothing names the patient" in text and "rec000.hea" in text
    own = made(tmp_path / "ecg", "patients=each case is a patient")
    assert not own.patients.known and own.patients.count == 24


def test_names_of_folders_are_no_labels_of_annotated_recordings_unless_somebody_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In earlier versions, two databases in a folder silently became two classes. The annotations in this test contain
    no rhythms.
    """
    folder = tmp_path / "ecg"
    for number in range(24):
        signal = np.random.default_rng(number).normal(0, 1, 1000)
        path = folder / ("mitdb", "afdb")[number // 12] / f"{100 + number}.hea"
        write_wfdb(path, (1000 * signal[:, None]).astype(int), names=("MLII",))
        path.with_suffix(".atr").write_bytes(b"\x00\x70\x00\x00")
    each = "patients=each case is a patient"
    text = asked(folder, capsys, each)
    assert "annotations: 24 recordings" in text and "folders, afdb, mitdb" in text and "cases.csv" in text
    own = made(folder, each, "annotations=names of folders")
    assert {*own.reading["label_map"]} == {"afdb", "mitdb"}
    text = asked(folder / "mitdb", capsys, each)
    assert "100.atr" in text and "cases.csv" in text and "one label" not in text


def test_labels_in_a_table_without_names_of_columns_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PhysioNet's challenges list recordings in rows such as A0001,N without a header.

    In earlier versions, medsilo read the first row of a table without a header as the header.
    """
    write_recordings(tmp_path / "ecg", ("record", "diagnosis"), named=False)
    (tmp_path / "ecg/records.csv").rename(tmp_path / "ecg/REFERENCE.csv")
    assert "patients: nothing names the patient of" in asked(tmp_path / "ecg", capsys)
    own = made(tmp_path / "ecg", "patients=each case is a patient")
    # medsilo renames the label AF to class-1, because AF could be a person's name
    assert own.patients.count == 24 and own.learns["labels"] == ["class-1", "normal"]
    assert own.reading["label_map"]["AF"] == "class-1" and own.inventory.files == 49
    assert any("labels are in REFERENCE.csv beside the names" in line for line in own.found)
    write_recordings(tmp_path / "more", ("record", "patient_id", "diagnosis"), named=False)
    assert "has no names of columns in its first line" in asked(tmp_path / "more", capsys)


def test_a_column_of_patients_beside_recordings_is_taken(tmp_path: Path) -> None:
    write_recordings(tmp_path / "ecg", ("record", "patient_id", "diagnosis"))
    own = made(tmp_path / "ecg")
    assert own.patients.known and own.patients.count == 12
