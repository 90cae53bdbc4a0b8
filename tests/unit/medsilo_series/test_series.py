"""Test the task of a hospital's time series: cutting of windows, rejections, training, and predictions."""

import csv
import json
import re
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import medsilo
from medsilo.cli import main
from medsilo.core.errors import DataError, PlanError
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.site.settings import make_settings
from medsilo.tasks.sources import DataSource
from medsilo_lab.start.dataset_layout import DatasetLayout, first_sight
from medsilo_series import recordings
from medsilo_series.recordings import Coded, Recording
from medsilo_series.windows import Cutting, cut
from tests import inprocess
from tests.layouts import nested

SITES = ("a", "b")
SIGNALS = ("x", "y")
HEAD = ("t", "x", "y", "doing")
STEPS, RATE = 16, 20


def rows(patient: int, seconds: float = 20.0) -> list[list[Any]]:
    drawn = np.random.default_rng(patient)
    time = np.arange(int(seconds * RATE)) / RATE
    walks = (time // 4) % 2 == 1
    x = np.where(walks, np.sin(2 * np.pi * 2 * time), 0) + drawn.normal(0, 0.1, len(time))
    y = np.where(walks, np.cos(2 * np.pi * 2 * time), 1) + drawn.normal(0, 0.1, len(time))
    doing = np.where(walks, "WALK", "REST")
    return [list(row) for row in zip(time.round(3), x.round(4), y.round(4), doing, strict=True)]


def write(path: Path, lines: Sequence[Sequence[Any]], head: Sequence[str] = HEAD, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=how.pop("encoding", "utf-8")) as file:
        csv.writer(file, **how).writerows([head, *lines])
    return path


def described(folder: Path, **more: Any) -> dict[str, Any]:
    inside = {"time": "t", "label": "doing"}
    return {
        "folder": str(folder), "recording_columns": inside, "patient": "^[^_]+",
        "label_map": {"REST": "rest", "WALK": "walk"}, **more,
    }  # fmt: skip


def source_of(folder: Path, **more: Any) -> DataSource:
    source = make_settings({"data": described(folder, **more)}, "a test").data
    assert source
    return source


def plan_of(method: str = "fedavg", **task: Any) -> Plan:
    own = {"signals": list(SIGNALS), "labels": ["rest", "walk"], "rate": RATE, "window": STEPS, "step": 8}
    return parse_plan(
        {
            "algorithm": {"name": method},
            "task": {"name": "series-folder", **own, **task},
            "network": {"name": "activity-cnn", "norm": "group"},
            "training": {"rounds": 2, "batch_size": 16, "learning_rate": 0.01, "optimizer": "adam"},
            "participation": {"sites": list(SITES)},
        }
    )


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("series")
    for number, site in enumerate(SITES):
        for person in range(10):
            write(folder / site / f"SECRET{person}_1.csv", rows(100 * number + person))
    return folder


# ---------------------------------------------------------------------------------------------------- windows
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from("ab"), st.booleans(), st.booleans()), min_size=1, max_size=6
    ),
    st.integers(2, 6),
    st.integers(1, 7),
)
def test_windows_hold_no_gap_no_change_and_nothing_twice(
    pieces: list[tuple[int, str, bool, bool]], window: int, step: int
) -> None:
    """Each piece is (number of rows, label, gap before the rows, last value missing)."""
    values, begins, labels = [], [], []
    for length, label, gap, broken in pieces:
        begins += [gap or not begins, *[False] * (length - 1)]
        labels += [label] * length
        values += [*range(len(values), len(values) + length)][: length - broken] + [np.nan] * broken
    numbers = np.array(values, np.float32)[:, None]
    coded = Coded(("a", "b"), np.array(["ab".index(label) for label in labels], np.int32))
    recording = Recording(numbers, np.array(begins), labels=coded)
    found = cut(recording, Cutting(window, step, "split"), np.ones(len(values), bool), [True, True])
    # The expected windows come from maximal stretches of complete rows that have one label and no gap.
    expected, first = [], 0
    for row in range(1, len(values) + 1):
        ends = row == len(values) or begins[row] or labels[row] != labels[first] or np.isnan(values[row])
        if np.isnan(values[first]):
            first = row
        elif ends:
            expected += [(start, "ab".index(labels[first])) for start in range(first, row - window + 1, step)]
            first = row
    assert found.rows.tolist() == [start for start, _ in expected]
    assert found.labels.tolist() == [label for _, label in expected]
    for inputs, (start, _) in zip(found.inputs, expected, strict=True):
        assert inputs.tolist() == [list(range(start, start + window))]


@settings(max_examples=4, deadline=None)
@given(files=st.lists(st.integers(1, 3), min_size=3, max_size=7), split=st.integers(0, 1000))
def test_no_patients_windows_are_in_two_parts(
    files: list[int], split: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    for patient, count in enumerate(files):
        for number in range(count):
            write(folder / f"p{patient}_{number}.csv", rows(10 * patient + number, 2))
    data = plan_of().task.site_data("a", SITES, 0, source_of(folder).drawn_by(split))
    parts = [set(part.patients) for part in (data.train, data.validation, data.test)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(files)
    windows = (2 * RATE - STEPS) // 8 + 1
    assert sum(len(part) for part in (data.train, data.validation, data.test)) == windows * sum(files)


def test_times_are_in_the_unit_that_comes_nearest_to_the_rate(tmp_path: Path) -> None:
    origin = datetime(2026, 3, 29, tzinfo=UTC)
    units: dict[str, Callable[[float], Any]] = {
        "s": lambda time: time,
        "ms": lambda time: round(1000 * time),
        "us": lambda time: round(1e6 * time),
        "dates": lambda time: (origin + timedelta(seconds=time)).isoformat(),
    }
    found = {}
    for name, told in units.items():
        path = write(tmp_path / f"{name}.csv", [[told(time), *rest] for time, *rest in rows(0)])
        found[name] = recordings.Reader(plan_of().task.limits, source_of(tmp_path), RATE).read(path)
    for own in found.values():
        assert own.rate == pytest.approx(RATE) and own.seconds == pytest.approx(found["s"].seconds)
    halved = recordings.Reader(plan_of().task.limits, source_of(tmp_path), 2 * RATE).read(tmp_path / "ms.csv")
    # medsilo first reports and later rejects a sampling rate other than the plan's rate
    assert halved.rate == pytest.approx(RATE)


def test_recordings_become_windows_of_their_patients(hospitals: Path) -> None:
    task = plan_of(standardise="none").task
    data = task.site_data("a", SITES, 0, source_of(hospitals))
    parts = [set(part.patients) for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [6, 2, 2] and not parts[0] & parts[1] | parts[2] & (parts[0] | parts[1])
    each = (80 - STEPS) // 8 + 1
    assert len(data.train) == 6 * 5 * each
    known = np.array([row[1:3] for row in rows(0)], np.float32)
    own = [data.train[n] for n, patient in enumerate(data.train.patients) if patient == "SECRET0"] or [
        part[n] for part in (data.validation, data.test) for n, who in enumerate(part.patients) if who == "SECRET0"
    ]
    starts = [stretch + 8 * n for stretch in range(0, 400, 80) for n in range(each)]
    assert [int(target) for _, target in own] == [(start // 80) % 2 for start in starts]
    for (inputs, _), start in zip(own, starts, strict=True):
        assert np.array_equal(inputs, known[start : start + STEPS].T)


def test_signals_are_standardised_by_the_training_part_also_of_a_fold(hospitals: Path) -> None:
    for fold in (None, {"number": 2, "of": 3}):
        raw = plan_of(standardise="none", fold=fold).task.site_data("a", SITES, 0, source_of(hospitals))
        data = plan_of(fold=fold).task.site_data("a", SITES, 0, source_of(hospitals))
        values = torch.cat([raw.train[n][0] for n in range(len(raw.train))], 1).double()
        means, deviations = values.mean(1), values.std(1)
        assert data.survey.scales["y"] == pytest.approx((float(means[1]), float(deviations[1])))
        expected = (raw.test[3][0].double() - means[:, None]) / deviations[:, None]
        assert torch.allclose(data.test[3][0].double(), expected, atol=1e-6)
        assert data.test.patients == raw.test.patients


def test_kept_on_the_disk_or_read_again_windows_are_the_same(hospitals: Path, tmp_path: Path) -> None:
    inside = {"label": "doing", "patient": "who", "time": "t"}
    lines = [[*row, f"p{person}"] for person in range(6) for row in rows(person)]
    write(tmp_path / "data/all.csv", lines, (*HEAD, "who"))
    task = plan_of().task
    more: list[dict[str, Any]] = [
        {},
        {"cache_memory": 0},
        *[{"cache_folder": str(tmp_path / "kept")}] * 2,
    ]
    found = [
        task.site_data("a", SITES, 0, source_of(tmp_path / "data", recording_columns=inside, patient=None, **own))
        for own in more
    ]
    assert len(set(found[0].train.patients)) == 4
    for other in found[1:]:
        assert other.train.patients == found[0].train.patients
        for place in (0, 70, len(other.train) - 1):
            assert torch.equal(other.train[place][0], found[0].train[place][0])


# ---------------------------------------------------------------------------------------------------- odd files
def cell(row: int, column: int, value: Any) -> Callable[[Path], Any]:
    def spoil(folder: Path) -> None:
        lines = rows(50)
        lines[row][column] = value
        write(folder / "SECRETbad_1.csv", lines)

    return spoil


def text(content: bytes, name: str = "SECRETbad_1.csv") -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


ODD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a text among numbers": (cell(5, 1, "broken"), "cells that are not numbers"),
    "Python's own number": (cell(5, 1, "1_0"), "cells that are not numbers"),
    "a missing value": (cell(5, 2, ""), "missing or impossible values"),
    "an infinite value": (cell(5, 2, "-inf"), "missing or impossible values"),
    "a number beyond all": (cell(5, 2, "1e300"), "missing or impossible values"),
    "a time that goes back": (cell(5, 0, 0.01), "times that repeat or go back"),
    "a time that is there twice": (cell(5, 0, 0.2), "times that repeat or go back"),
    "a row without time": (cell(5, 0, ""), "rows without a time"),
    "a surplus cell": (lambda folder: cell(5, 1, "1,1")(folder) or ragged(folder), "more or fewer cells"),
    "a gap in time": (lambda folder: write(folder / "SECRETbad_1.csv", rows(50)[:60] + rows(50)[80:]), "gaps in time"),
    "another rate": (lambda folder: write(folder / "SECRETbad_1.csv", rows(50)[::2]), "say about 10 Hz"),
    "too short": (lambda folder: write(folder / "SECRETbad_1.csv", rows(50)[:9]), "16 complete steps"),
    "Latin-1": (text("t,x,y,doing\n0,1,2,M\x81de\n".encode("latin-1")), "not in UTF-8"),
    "a decimal comma": (
        text("\n".join([";".join(HEAD), *(f"0,{n:02};1,5;2,0;REST" for n in range(40))]).encode()),
        "cells that are not numbers; name them under data.missing, or set data.decimal",
    ),
    "no header": (text(b"0,1,2,REST\n1,1,2,REST\n"), "a recording lacks"),
    "a column twice": (text(b"t,x,y,doing,x\n0,1,2,REST,1\n"), "two columns of one name"),
    "no rows": (lambda folder: write(folder / "SECRETbad_1.csv", []), "no rows"),
    "nothing": (text(b""), "a recording lacks"),
    "no text at all": (text(bytes(range(256)) * 9), "not in UTF-8"),
    "a line without end": (text(b"t,x,y,doing" + b",1" * 2**22), "a line of more than"),
}  # fmt: skip


def ragged(folder: Path) -> None:
    lines = rows(50)
    lines[7] = [*lines[7], 3]
    write(folder / "SECRETbad_1.csv", lines)


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_recording_is_left_out_and_named_at_the_site_only(kind: str, tmp_path: Path) -> None:
    spoil, words = ODD[kind]
    for person in range(4):
        write(tmp_path / f"SECRET{person}_1.csv", rows(person, 4))
    spoil(tmp_path)
    source = source_of(tmp_path)
    survey = plan_of().task.survey("a", SITES, 0, source)
    left = [problem for problem in survey.problems if problem.severity == "left out"]
    assert [problem.count for problem in left] == [1] and words in left[0].what and "\n" not in left[0].what
    assert left[0].private[0].startswith("SECRETbad") and "SECRET" not in json.dumps([p.what for p in survey.problems])
    assert survey.usable and sum(part.cases for part in survey.parts.values()) == 4 * 9


def test_what_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for person in range(4):
        write(tmp_path / f"SECRET{person}_1.csv", rows(person, 4))
    task = plan_of().task

    def words(**more: Any) -> str:
        with pytest.raises(DataError) as told:
            task.site_data("a", SITES, 0, source_of(tmp_path, **more))
        assert "SECRET" not in str(told.value) and str(tmp_path) not in str(told.value)
        return str(told.value)

    assert "(rest, walk) (4); add" in words(label_map={})
    assert "not among the plan's labels" in words(label_map={"REST": "sleep"})
    inside = {"time": "t", "label": "doing"}
    assert "'x', which this site reads as label, patient, time" in words(recording_columns={**inside, "x": "doing"})
    assert "have one name here" in words(recording_columns={**inside, "x": "y"})
    assert "a column that the plan does not read" in words(recording_columns={**inside, "z": "y"})
    assert "data: recordings have no images" in words(images="*.png")
    assert "times say about 20 Hz where data.rate says 40" in words(rate=40)
    # earlier versions read milliseconds in this column as seconds
    for person in range(4):
        late = [[1000 * time, *own] for time, *own in rows(person, 4)]
        write(tmp_path / f"ms/SECRET{person}_1.csv", late, ("time_s", "x", "y", "doing"))
    with pytest.raises(DataError, match="times say about 0.02 Hz where the plan reads 20"):
        task.site_data(
            "a", SITES, 0, source_of(tmp_path / "ms", recording_columns={"time": "time_s", "label": "doing"})
        )
    shutil.rmtree(tmp_path / "ms")
    assert "can't be resampled to 20 by whole numbers" in words(rate=19.99999, recording_columns={"label": "doing"})
    monkeypatch.setattr(recordings.TableReader, "MOST_CELLS", 3)
    assert "more than 3 numbers (4); divide a recording" in words()
    monkeypatch.setattr(recordings, "MOST_NAMES", 0)
    assert "more than 0 different values (4); correct it" in words()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"signals": ["x", "x"]}, "name each once"),
        ({"signals": [{"name": "x", "levels": ["a", "b"]}]}, "signals are numbers"),
        ({"labels": ["1", "1.0"]}, "name each once"),
        ({"standardise": "plan"}, "needs mean and deviation"),
        ({"window": 2}, "too small"),
    ],
)
def test_plans_that_make_no_sense_are_refused(numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(**numbers)


# ---------------------------------------------------------------------------------------------------- a study
@pytest.fixture(scope="module")
def studied(hospitals: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    run, local = tmp_path_factory.mktemp("run") / "fedavg-series", tmp_path_factory.mktemp("local")
    settings = make_settings(
        {"data": described(hospitals), "min_patients_per_metric": 1, "public_data": True}, "a test"
    )
    study = inprocess.run(plan_of(), folder=run, settings=settings)
    assert study.summary.pooled["accuracy"] > 0.9
    (local / "medsilo.yaml").write_text(json.dumps({"data": described(hospitals / "a")}))
    return run, local


def test_a_study_learns_and_names_nobody(studied: tuple[Path, Path]) -> None:
    run, _ = studied
    assert "SECRET" not in (run / "summary.json").read_text() + (run / "rounds.jsonl").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert {"balanced_accuracy", "auroc", "sensitivity"} <= summary["pooled"].keys()


def test_a_model_says_what_each_window_and_each_recording_shows(
    studied: tuple[Path, Path], hospitals: Path, tmp_path: Path
) -> None:
    run, local = studied
    write(tmp_path / "new/one.csv", rows(77, 8))
    write(tmp_path / "new/other.csv", [[0, "x", 1, "REST"]])
    out = tmp_path / "out"
    command = ["predict", str(run), str(tmp_path / "new"), "-o", str(out), "--settings", str(local)]
    assert main([*command, "--site", "a"]) == 1
    found = list(csv.DictReader((out / "predictions.csv").open()))
    assert "not numbers" in found[-1]["error"] and found[-1]["recording"] == "other.csv"
    assert [(row["window"], row["row"], row["seconds"]) for row in found[:2]] == [("1", "1", "0.0"), ("2", "9", "0.4")]
    assert len(found) - 1 == (160 - STEPS) // 8 + 1 and (found[0]["class"], found[-2]["class"]) == ("rest", "walk")
    plan = plan_of()
    network = plan.algorithm.whole(plan.build_networks())
    network.load_state_dict(load_file(run / "sites/a/best.safetensors"))
    scales = json.loads((run / "sites/a/data.json").read_text())["scales"]
    values = np.array([row[1:3] for row in rows(77, 8)[8 : 8 + STEPS]], np.float32).T
    means, deviations = np.array([scales[name] for name in SIGNALS]).T[:, :, None]
    inputs = torch.from_numpy((values - means) / deviations).float()
    expected = network.eval()(inputs[None])[0].softmax(0).detach()
    assert float(found[1]["probability_walk"]) == pytest.approx(float(expected[1]), abs=1e-5)
    (whole,) = csv.DictReader((out / "recordings.csv").open())
    mean = np.mean([float(row["probability_walk"]) for row in found[:-1]])
    assert whole["recording"] == "one.csv" and float(whole["probability_walk"]) == pytest.approx(mean, abs=1e-6)
    assert main([*command[:2], str(tmp_path / "new/one.csv"), "-o", str(tmp_path / "again"), *command[5:]]) == 0
    cases = medsilo.predict(run, tmp_path / "new", tmp_path / "python", site="a", device="cpu", settings=local)
    assert cases == json.loads((out / "predictions.json").read_text())["cases"]


# ---------------------------------------------------------------------------------------------------- as it is written
def test_the_example_of_the_documentation_is_read_as_it_stands(root: Path, tmp_path: Path) -> None:
    text = (root / "docs/start/your-data.md").read_text(encoding="utf-8").partition("## Time series")[2]
    task, own = (load_yaml(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[:2])
    own["data"]["folder"] = str(tmp_path)
    motions = ("resting", "walking", "transition", "climbing")
    for person in range(5):
        lines = [f"{20 * n};0,5;1,25;-{n + person};{motions[n // 150]}" for n in range(600)]
        (tmp_path / f"P{person}_monday.csv").write_text("\n".join(["ms;AccX;AccY;AccZ;activity", *lines]))
    plan = parse_plan({"algorithm": {"name": "local"}, "participation": {"sites": ["a"]}, **task})
    data = plan.task.site_data("a", ["a"], 0, make_settings(own, "a test").data)
    assert data.survey.parts["train"].classes == {"rest": 3, "walk": 3, "stairs": 3} and not data.survey.problems
    inputs, target = (
        plan.with_changes(["task.standardise=none"])
        .task.site_data("a", ["a"], 0, make_settings(own, "a test").data)
        .train[1]
    )
    assert target == 1 and inputs[:2, 0].tolist() == [0.5, 1.25] and inputs[2, 0] - inputs[2, -1] == 127


def test_recordings_are_resampled_to_the_plans_rate(tmp_path: Path) -> None:
    for person in range(3):
        lines = [[n / 40, np.sin(n / 40), 1, "REST"] for n in range(120)]
        write(tmp_path / f"p{person}.csv", lines)
    task = plan_of(standardise="none", signals=["x"]).task
    inputs, _ = task.site_data("a", SITES, 0, source_of(tmp_path, rate=40)).train[1]
    assert np.allclose(inputs[0], np.sin((8 + np.arange(STEPS)) / RATE), atol=0.01)
    left = task.survey("a", SITES, 0, source_of(tmp_path)).problems
    assert "where the plan reads 20; say data.rate" in left[0].what


# ---------------------------------------------------------------------------------------------------- init
def test_a_first_look_tells_how_recordings_are_laid_out(tmp_path: Path) -> None:
    for person in range(8):
        for kind in ("sinus", "afib"):
            beats = [f"2026-01-01T00:00:{n / 50:09.6f};0,{n % 9};1,5" for n in range(200)]
            path = tmp_path / "ecg" / kind / f"p{person}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(["Timestamp;I;II", *beats]))
        write(tmp_path / f"several/hospital-a/{person}.csv", rows(person), ("time_ms", "x", "y", "Activity"))
        write(tmp_path / f"several/hospital-b/{person}.csv", rows(person), ("time_ms", "x", "y", "Activity"))

    def drafted(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        seen = first_sight(DatasetLayout(tmp_path / name, "a"))
        parse_plan(nested(seen.choices.plan))
        make_settings(nested(seen.choices.settings), "a test")
        return nested(seen.choices.plan)["task"], nested(seen.choices.settings)["data"]

    task, data = drafted("ecg")
    assert (task["signals"], task["labels"], task["rate"], task["window"]) == (
        ["I", "II"],
        ["afib", "sinus"],
        50.0,
        128,
    )
    assert (data["recording_columns"], data["decimal"]) == ({"time": "Timestamp"}, ",")
    task, data = drafted("several")
    assert (
        data["recording_columns"] == {"time": "time_ms", "label": "Activity"} and task["rate"] == 1000 * RATE
    )  # the file's name selects the reader
    for site in ("clinic-a", "clinic-b"):
        for ward in range(3):
            whole = [[f"{site}{ward}{who}", *own] for who in range(8) for own in rows(who)]
            write(tmp_path / f"wards/{site}/{ward}.csv", whole, ("who", "time_ms", "x", "y", "Activity"))
    seen = first_sight(DatasetLayout(tmp_path / "wards", "a"))
    assert "6 recordings of 48 patients" in seen.summary[0] and "6 recordings were opened" in seen.summary[2]
    for person in range(8):  # times in milliseconds at 20 Hz; the column's name shows no unit
        late = [[1000 * time, *own] for time, *own in rows(person)]
        write(tmp_path / f"untold/{person}.csv", late, ("time", "x", "y", "Activity"))
    rate, why = first_sight(DatasetLayout(tmp_path / "untold", "a")).choices.plan["task.rate"]
    assert rate == RATE / 1000 and f"{RATE:g} if they are milliseconds" in why
    (tmp_path / "odd").mkdir()
    write(tmp_path / "odd/a.csv", [["?", "?"]], ("t", "label"))
    with pytest.raises(DataError, match=r"'label' of a\.csv.*value at most"):
        drafted("odd")


@pytest.mark.slow
def test_from_a_folder_to_predictions(hospitals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, run, out = (str(tmp_path / name) for name in ("study", "run", "out"))
    for site in SITES:
        for person in range(10):
            lines = rows(person)
            write(tmp_path / f"data/{site}/ward/p{person}.csv", lines, ("t", "x", "y", "activity"))
    assert main(["init", str(tmp_path / "data"), "-o", study, "--set", "patients=each case is a patient"]) == 0
    told = capsys.readouterr().out
    assert "2 hospitals, each a folder" in told and "task.rate: 20.0" in told
    goal = load_plan(Path(study, "job/app/config/plan.yaml")).task.goal
    assert goal.metric == ("auroc" if goal.classes == 2 else "balanced_accuracy") and f"test {goal.metric}" in told
    job = f"{study}/job"
    short = ["--set", "training.rounds=2", "--engine", "inprocess"]
    assert main(["run", job, "--settings", study, *short, "-o", run]) == 0
    new = str(tmp_path / "data/a/ward/p1.csv")
    (run,) = map(str, (tmp_path / "run").iterdir())
    assert main(["predict", run, new, "-o", out, "--settings", study, "--site", "a"]) == 0
    found = list(csv.DictReader((tmp_path / "out/predictions.csv").open()))
    assert sum(row["class"] == ("REST", "WALK")[int(float(row["seconds"])) // 4 % 2] for row in found) > len(found) / 2
