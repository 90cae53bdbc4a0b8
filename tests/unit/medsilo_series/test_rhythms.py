"""Test the way from rhythms in WFDB annotation files to a trained model; the rhythms become the labels of windows."""

import csv
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medsilo.cli import main
from medsilo.core.errors import DataError
from medsilo.site.data_set import DataSet
from medsilo.tasks.sources import DataSource
from medsilo_series.recordings import Reader
from medsilo_series.rhythms import LARGEST, rhythm_of_rows, rhythms_in
from medsilo_series.series_folder import SeriesFolder
from medsilo_series.waves import Wave
from tests.unit.medsilo_lab.test_odd_recordings_and_studies import asked, made
from tests.unit.medsilo_series.test_series_waves import write_wfdb

WAVE = Wave(("ECG1",), 250.0, 500_000)
# The program wrann of wfdb 4.3.1 has written the content of both files. Of the eight annotations, four are of rhythms.
# The annotations have subtypes, channels, numbers and distances of more than 1,023 samples. The times of the second
# file are in steps of 2 ms.
BY_RATE = (
    "127003fc284e00003b04251501f401f800ec00005e06007003f000f806fc284146494200ff3b00f0fff401fc630000ec00000004000400ec0200"
    "71fd007005fc2841464c000000ec0400c045007002fc284e0000"
)
BY_RESOLUTION = (
    "005817fc23232074696d65207265736f6c7574696f6e3a203530300000ecffffffff0100247003fc284e000076044a1600ec0000bc0c007006fc"
    "28414649420000ec0000fe07003801fc630000ec00000008000400ec0500e2fa007005fc2841464c000000ec0800808b007002fc284e0000"
)
RHYTHMS = [(18, "N"), (2000, "AFIB"), (200_000, "AFL"), (480_000, "N")]
EACH = "patients=each case is a patient"


def write_annotations(path: Path, begins: Sequence[tuple[int, str]]) -> None:
    """Write an annotation file in which a rhythm begins at each given row, and the next row has a beat of type 1."""
    words, before = b"", 0
    for row, text in begins:
        words += struct.pack("<HhH", 59 << 10, (row - before) >> 16, (row - before) & 0xFFFF)
        words += struct.pack("<HH", 28 << 10, 63 << 10 | len(text)) + text.encode() + bytes(len(text) % 2)
        words += struct.pack("<H", 1 << 10 | 1)
        before = row + 1
    path.write_bytes(words + bytes(2))


def write_holter(folder: Path, count: int, rows: int = 6000, names: Sequence[str] = ("ECG1",)) -> None:
    """Write recordings of 60 s at 100 Hz in three thirds: either AFIB, N, AFIB or N, AFIB, N.

    The signal is a sine of 2 Hz in N and of 5 Hz in AFIB. No rhythm is annotated in the first 0.5 s. Every third
    recording also has VT for one second.
    """
    for number in range(count):
        first, second = ("N", "AFIB") if number % 2 else ("AFIB", "N")
        begins = [(50, first), (rows // 3, second), (2 * rows // 3, first)]
        begins += [(rows - 100, "VT")] if number % 3 == 0 else []
        names_of = np.zeros(rows, int)
        for row, name in begins:
            names_of[row:] = {"N": 2, "AFIB": 5, "VT": 3}[name]
        time, drawn = np.arange(rows) / 100, np.random.default_rng(number)
        values = np.sin(2 * np.pi * names_of * time) + drawn.normal(0, 0.1, rows)
        stored = np.rint(1000 * values).astype(int)[:, None] * np.ones((1, len(names)), int)
        path = folder / f"{100 + number}.hea"
        write_wfdb(path, stored, names=tuple(names))
        write_annotations(path.with_suffix(".atr"), [(row, f"({name}\0") for row, name in begins])


# ---------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("content", [BY_RATE, BY_RESOLUTION], ids=["by rate", "by resolution"])
def test_the_rhythms_are_those_that_wfdb_wrote(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.atr").write_bytes(bytes.fromhex(content))
    assert rhythms_in(tmp_path / "a.atr", WAVE) == RHYTHMS
    names, rows = rhythm_of_rows(tmp_path / "a.atr", WAVE)
    edges = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist()]
    assert [(row, names[rows[row]]) for row in edges] == [(0, ""), *RHYTHMS]


def test_damaged_annotation_files_are_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.atr", bytes.fromhex(BY_RATE)
    resolutions = [bytes.fromhex(BY_RESOLUTION).replace(b" 500", own) for own in (b" 0.0", b" nan", b" ten")]
    for bad in [*(whole[:end] for end in range(len(whole))), *resolutions, whole]:
        path.write_bytes(bad)
        if bad == whole:
            os.truncate(path, LARGEST + 1)
        with pytest.raises(DataError, match="damaged"):
            rhythms_in(path, WAVE)
    drawn = np.random.default_rng(0)
    for _ in range(200):
        path.write_bytes(drawn.bytes(40) + bytes(2))
        try:
            rhythm_of_rows(path, WAVE)
        except DataError as error:
            assert "damaged" in str(error) or "no rhythm" in str(error)


def source_of(folder: Path, **more: Any) -> DataSource:
    return DataSource(folder=folder, recording_columns={"label": ".atr"}, **more)


def task_of(*labels: str, **more: Any) -> SeriesFolder:
    own = {"signals": ["ECG1"], "labels": labels, "rate": 100, "window": 512, **more}
    return SeriesFolder.model_validate(own)


def test_windows_have_the_rhythm_that_covers_them(tmp_path: Path) -> None:
    """Rows before the first rhythm and stretches that are shorter than a window are in no window."""
    write_holter(tmp_path, 6)
    task = task_of("AFIB", "N", "VT")
    survey = task.survey("a", ["a"], 0, source_of(tmp_path))
    classes = {name: sum(part.classes[name] for part in survey.parts.values()) for name in task.labels}
    # each stretch of one rhythm lasts 19 s to 20 s, and therefore contains three windows of 5.12 s
    assert classes == {"AFIB": 27, "N": 27, "VT": 0}
    notes = {problem.what: problem.private for problem in survey.problems if "shorter than a window" in problem.what}
    assert [*notes.values()] == [("100", "103")]
    data = task.site_data("a", ["a"], 0, source_of(tmp_path))
    for part in (data.train, data.validation, data.test):
        for inputs, label in (part[place] for place in range(len(part))):
            strength = np.abs(np.fft.rfft(inputs[0].numpy()))
            assert abs(np.argmax(strength[1:]) + 1 - 5.12 * (5 if label == 0 else 2)) < 1


def test_recordings_without_rhythms_are_left_out_and_named(tmp_path: Path) -> None:
    write_holter(tmp_path, 7)
    (tmp_path / "100.atr").unlink()
    write_annotations(tmp_path / "101.atr", [(50, "MISSB")])
    (tmp_path / "102.atr").write_bytes(b"\1")
    survey = task_of("AFIB", "N", "VT").survey("a", ["a"], 0, source_of(tmp_path))
    left = {problem.private: problem.what for problem in survey.problems if problem.severity == "left out"}
    assert {*left} == {("100",), ("101",), ("102",)}
    assert "no annotation file" in left["100",] and "no rhythm" in left["101",] and "damaged" in left["102",]
    for label in ("../101.atr", "rhythm"):
        own = DataSource(folder=tmp_path, recording_columns={"label": label})
        assert not task_of("AFIB", "N").survey("a", ["a"], 0, own).usable
    reader = Reader(task_of("AFIB", "N").limits, source_of(tmp_path), 100, label=False)
    assert reader.read(tmp_path / "100.hea").labels is None  # for predictions, no annotation is needed


def test_windows_in_the_cache_are_of_the_present_annotations(tmp_path: Path) -> None:
    write_holter(tmp_path / "data", 6)
    (tmp_path / "cache").mkdir()
    task, source = task_of("AFIB", "N", "VT"), source_of(tmp_path / "data", cache_folder=tmp_path / "cache")

    def labels() -> list[int]:
        data = task.site_data("a", ["a"], 0, source)
        return sorted(
            int(part[place][1]) for part in (data.train, data.validation, data.test) for place in range(len(part))
        )

    before = labels()
    assert labels() == before and 2 not in before
    write_annotations(tmp_path / "data/100.atr", [(0, "(VT")])
    assert labels().count(2) == 6000 // 512


def test_the_windows_of_a_long_recording_are_cut_once(tmp_path: Path) -> None:
    """Earlier, a data set of 12 recordings of half an hour took minutes, because medsilo cut the whole recording again
    for each window.
    """
    write_holter(tmp_path, 2)
    make = task_of("AFIB", "N", "VT").maker(source_of(tmp_path))
    made_once = make((tmp_path / "100.hea",), 0, "100")
    assert make((tmp_path / "100.hea",), 0, "100") is made_once
    other = make((tmp_path / "101.hea",), 0, "101")
    assert other is not made_once and other.facts.digest != made_once.facts.digest


def test_rows_without_a_label_are_of_no_rare_class(tmp_path: Path) -> None:
    """Earlier, the few recordings that have rows without a label were left out, as if these rows had a rare label."""
    write_holter(tmp_path, 12)
    for number in range(3, 12):
        write_annotations(tmp_path / f"{100 + number}.atr", [(0, "(N"), (2000, "(AFIB")])
    listing = task_of("AFIB", "N").listing_of(source_of(tmp_path).drawn_by(1), tmp_path)
    assert [*listing.left_out.values()] == [1] and len(listing.entries) == 11  # one recording has VT


# ---------------------------------------------------------------------------------------------------- data sets
def test_a_data_set_says_that_rhythms_are_its_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "afdb"
    write_holter(folder, 24)
    # recording 099 has signals that the recordings of write_holter lack
    write_wfdb(folder / "099.hea", np.zeros((6000, 2), int), names=("V5", "V2"))
    write_annotations(folder / "099.atr", [(0, "(N")])
    own = made(folder, EACH)
    assert own.reading["recording_columns"] == {"label": ".atr"} and own.answers["annotations"] == "rhythms"
    assert own.learns["labels"] == ["AFIB", "N", "VT"] and {"AFIB", "N", "VT", "ECG1"} == {*own.words}
    assert own.patients.count == 24 and not own.patients.known
    assert any("lack a signal" in what and count == 1 for what, count in own.left_out.items())
    assert any("shorter than a window" in what and count == 8 for what, count in own.notes.items())
    assert "labels are in files .atr beside recordings" in own.found[0]
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "set")]) == 0
    assert "label: .atr" in capsys.readouterr().out
    assert "# the ending of the files whose rhythms are" in (tmp_path / "set" / DataSet.FILE).read_text("utf-8")


def test_a_table_names_the_patients_of_annotated_recordings(tmp_path: Path) -> None:
    """In a well-known database, two recordings are of one person, which only a table can show."""
    folder = tmp_path / "mitdb"
    write_holter(folder, 24)
    lines = [("recording", "patient"), *((f"{100 + number}", f"p{number // 2}") for number in range(24))]
    with (folder / "cases.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    own = made(folder)
    assert own.patients.known and own.patients.count == 12
    assert own.reading["recording_columns"] == {"label": ".atr"} and own.answers["annotations"] == "rhythms"


@pytest.mark.slow
def test_two_folders_of_annotated_recordings_are_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ecg"
    write_holter(folder / "afdb", 12)
    write_holter(folder / "mitdb", 12)
    text = asked(folder, capsys, EACH)
    assert "annotations: 24 recordings have annotations with rhythms" in text and "VT (0 windows)" in text
    assert made(folder, EACH, "annotations=rhythms").learns["labels"] == ["AFIB", "N", "VT"]
    own = made(folder, EACH, "annotations=names of folders")
    assert {*own.reading["label_map"]} == {"afdb", "mitdb"} and "recording_columns" not in own.reading


def test_a_rhythm_with_an_unknown_code_is_not_named(tmp_path: Path) -> None:
    """A text in an annotation may be a name, but a code of PhysioNet's databases is not a name."""
    folder = tmp_path / "ecg"
    write_holter(folder, 24)
    for number in range(12):
        write_annotations(folder / f"{100 + number}.atr", [(0, "(Quast"), (3000, "(N")])
    own = made(folder, EACH)
    assert "Quast" not in own.words and own.learns["labels"] == ["AFIB", "N", "class-1", "other"]


@pytest.mark.slow
def test_a_model_learns_the_rhythms(tmp_path: Path) -> None:
    write_holter(tmp_path / "afdb", 30)
    study, run = str(tmp_path / "study"), str(tmp_path / "run")
    assert main(["init", str(tmp_path / "afdb"), "-o", study, "--set", EACH, "--yes"]) == 0
    assert DataSet.read(tmp_path / "study/data-set").learns["labels"] == ["AFIB", "N", "VT"]
    short = ["--set", "training.rounds=4", "--engine", "inprocess"]
    assert main(["run", f"{study}/job", "--settings", study, *short, "-o", run]) == 0
    (folder,) = (tmp_path / "run").iterdir()
    assert json.loads((folder / "summary.json").read_text())["pooled"]["accuracy"] > 0.9
