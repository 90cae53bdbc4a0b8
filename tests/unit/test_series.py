"""A hospital's own time series: how windows are cut, what is refused, what is learned, and what a model says."""

import csv
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medsilo.cli import main
from medsilo.core.errors import DataError, PlanError
from medsilo.federation import inprocess
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import make_settings
from medsilo.tasks.own import recordings
from medsilo.tasks.own.recordings import Coded, Reader, Recording
from medsilo.tasks.own.series_folder import SeriesFolder
from medsilo.tasks.own.windows import Cutting, cut
from medsilo.tasks.sources import DataSource

SITES = ("a", "b")
SIGNALS = ("x", "y")
HEAD = ("t", "x", "y", "doing")
STEPS, RATE = 16, 20


def rows(patient: int, seconds: float = 20.0) -> list[list[Any]]:
    """A person who rests and walks in turn, four seconds each."""
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
    columns = {"time": "t", "label": "doing"}
    return {
        "folder": str(folder), "recordings": "*.csv", "columns": columns, "patient": "^[^_]+", "split": 0,
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
    """Two hospitals with ten people each, of whom each has one recording."""
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
    """Each piece: its rows, their label, whether a gap lies before it, whether its last row is not known."""
    values, begins, labels = [], [], []
    for length, label, gap, broken in pieces:
        begins += [gap or not begins, *[False] * (length - 1)]
        labels += [label] * length
        values += [*range(len(values), len(values) + length)][: length - broken] + [np.nan] * broken
    whole = [len(values) and 1]
    numbers = np.array(values, np.float32)[:, None]
    coded = Coded(("a", "b"), np.array(["ab".index(label) for label in labels], np.int32))
    recording = Recording(numbers, np.array(begins), labels=coded)
    found = cut(recording, Cutting(window, step, "split"), np.ones(len(values), bool), [True, True])
    # by hand: the longest stretches of whole rows of one label without a gap inside
    expected, first = [], 0
    for row in range(1, len(values) + 1):
        ends = row == len(values) or begins[row] or labels[row] != labels[first] or np.isnan(values[row])
        if np.isnan(values[first]):
            first = row
        elif ends:
            expected += [(start, "ab".index(labels[first])) for start in range(first, row - window + 1, step)]
            first = row
    assert whole and found.rows.tolist() == [start for start, _ in expected]
    assert found.labels.tolist() == [label for _, label in expected]
    for inputs, (start, _) in zip(found.inputs, expected, strict=True):
        assert inputs.tolist() == [list(range(start, start + window))]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 4))
def test_values_are_filled_from_before_and_not_for_long(known: list[bool], longest: int) -> None:
    values = np.where(known, np.arange(len(known)), np.nan).astype(np.float32)[:, None]
    recording = Recording(values, np.arange(len(known)) == 0)
    found = cut(recording, Cutting(1, 1, "fill", longest), np.ones(len(known), bool))
    expected = []
    for row in range(len(known)):
        before = next((back for back in range(min(longest, row) + 1) if known[row - back]), None)
        expected += [] if before is None else [float(row - before)]
    assert found.inputs.ravel().tolist() == expected


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 40), st.integers(0, 1000))
def test_no_patients_windows_are_in_two_parts(patients: int, split: int) -> None:
    from medsilo.tasks.splits import parts_by_rank

    assert len(parts_by_rank({str(n): "" for n in range(patients)}, (0.6, 0.2, 0.2), split)) == patients


def test_recordings_become_windows_of_their_patients(hospitals: Path) -> None:
    task = plan_of(standardise="none").task
    data = task.site_data("a", SITES, 0, source_of(hospitals))
    parts = [set(part.patients) for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [6, 2, 2] and not parts[0] & parts[1] | parts[2] & (parts[0] | parts[1])
    each = (80 - STEPS) // 8 + 1  # windows of four seconds
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
    columns = {"label": "doing", "patient": "who", "time": "t"}
    lines = [[*row, f"p{person}"] for person in range(6) for row in rows(person)]
    write(tmp_path / "data/all.csv", lines, (*HEAD, "who"))
    task = plan_of().task
    more: list[dict[str, Any]] = [{}, {"cache": "none"}, *[{"cache": "disk", "cache_folder": str(tmp_path / "kept")}] * 2]
    found = [
        task.site_data("a", SITES, 0, source_of(tmp_path / "data", columns=columns, patient=None, **own)) for own in more
    ]
    assert len(set(found[0].train.patients)) == 4
    for other in found[1:]:
        assert other.train.patients == found[0].train.patients
        for place in (0, 70, len(other.train) - 1):
            assert torch.equal(other.train[place][0], found[0].train[place][0])
