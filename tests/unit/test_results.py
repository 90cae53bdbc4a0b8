"""The pages of docs/results: every one is made here at a tiny size; what is not done is said; the induced shift."""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.results import __main__ as command_line
from benchmarks.results.har import in_order, shifted, write_windows
from benchmarks.results.looks import looking
from benchmarks.results.making import Comparison, Places, comparisons, make
from benchmarks.results.page import END, changed, command, document
from benchmarks.results.pages import ANATOMY, BRAINS, BRCA, HEART, LOOKS, PAGES, SENSORS, Page, Part, Shift
from benchmarks.results.shifts import picture
from benchmarks.results.sites import apart, differing
from medsilo.core.errors import DataError
from medsilo.tasks.synthetic.activity import COMMON, FAMILIES
from medsilo.tasks.synthetic.histology import SyntheticHistology
from medsilo.tasks.synthetic.prostate import SyntheticProstate
from medsilo_lab.study.cells import Row
from tests.conftest import slow_but, wanted
from tests.patients import write_hearts, write_survival
from tests.unit.test_nuclei import draw

THREE = "participation.sites=[a,b,c]"
SMALL = {
    "activity-windows": ("participation.sites=[subject_01,subject_02,subject_03]",),
    "nnunet": ("training.local_steps=1", "task.shares=[0.2, 0.2, 0.6]"),
    "nuclei": ("task.size=16", "network.features=[2, 4]"),
    "table": (),
    "synthetic-activity": ("task.persons=3", "task.windows=4", "task.steps=32", THREE),
    "synthetic-histology": ("task.patients=4", "task.patches=4", "task.size=32", THREE),
    "synthetic-prostate": ("task.patients=3", "task.slices=3", "task.size=32", "network.features=[2, 4]", THREE),
}
TINY = Page("Tiny", "Words.", (PAGES["baselines"].parts[1],))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Drawn data in the form of the real ones."""
    data = tmp_path_factory.mktemp("data")
    draw(data / "nuclei_he", images=9)
    write_hearts(data / HEART)
    write_survival(data / BRCA)
    (data / "har_uci").mkdir()
    for number in range(1, 4):
        np.savez(data / "har_uci" / f"subject_{number:02}.npz", **people(number))
    return Places(tmp_path_factory.mktemp("cells"), data)


def waves(number: int, count: int) -> np.ndarray:
    """Windows [n, sensors, steps] of slow movements, each sensor at its own height."""
    draw = np.random.default_rng(number)
    phase = draw.uniform(0, 6, (count, 9, 1)) + np.linspace(0, 3, 128)
    return (np.sin(phase) + np.arange(9)[:, None]).astype(np.float32)


def people(number: int) -> dict[str, np.ndarray]:
    """One person's file as it is stored: [steps, sensors] under the shape [sensors, steps]."""
    stored = {}
    for part, count in (("train", 12), ("test", 6)):
        stored[f"x_{part}"] = waves(number, count).transpose(0, 2, 1).reshape(count, 9, 128).astype(np.float16)
        stored[f"y_{part}"] = (np.arange(count) % 6).astype(np.uint8)
    return stored


def tiny(part: Part, seeds: int = 1, rows: tuple[str, ...] = ()) -> Part:
    """A part with a round of two rows: the one that all are held against, and the local one.

    HarmoFL averages more images than a site of a tiny part has; FedAvg stands for it.
    """
    against = "FedAvg" if part.against.startswith("HarmoFL") else part.against
    chosen = {against, *rows, "local"}
    kept = tuple(row for row in part.rows if Row.parse(row).title in chosen)
    task = part.task or {"nuclei_he": "nuclei", HEART: "table", BRCA: "table", BRAINS: "nnunet"}.get(part.data, "")
    named = [change.removeprefix("task.name=") for change in part.changes if change.startswith("task.name=")]
    task = task or (named[0] if named else "synthetic-histology")
    changes = (*part.changes, *SMALL[task], "training.rounds=1")
    beside = part.beside and ("local",)
    folds = part.folds and 3
    return replace(part, rows=kept, against=against, changes=changes, seeds=seeds, folds=folds, beside=beside)


@pytest.mark.slow
def test_every_plan_of_every_page_is_in_order(places: Places) -> None:
    for name, page in PAGES.items():
        for part in page.parts:
            one = replace(part, seeds=1, folds=None)
            comparison = Comparison.of(name, one, places)
            titles = {cell.row.title for cell in comparison.cells}
            assert {"local", part.against, *part.beside} <= titles
            assert ("HarmoFL, whole" in titles) == ("HarmoFL, mean" in titles)  # neither stands alone


def test_every_page_that_compares_methods_is_in_the_table(root: Path) -> None:
    others = {"adapters", "attacks", "heart-dp", "labels"}  # which have commands of their own
    assert {path.stem for path in (root / "docs" / "results").glob("*.md")} == {*PAGES, *others}


@pytest.mark.parametrize("name", slow_but(["study-nuclei"], [name for name in PAGES if name != "shift"]))
def test_every_page_is_made(name: str, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "nnunet":
        pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
        monkeypatch.setattr("benchmarks.brains.HEADS", 9)
        monkeypatch.setattr("benchmarks.brains.WIDTH", 24.0)
    page = replace(PAGES[name], parts=tuple(tiny(part) for part in PAGES[name].parts))
    parts = comparisons(name, page, places)
    assert make(parts, places, None) == []
    text = document(name, page, parts)
    assert text.startswith(f"# {page.title}\n") and f"python -m benchmarks.results {name} --write" in text
    assert text.count("1 of 1 seeds done") == text.count("Declared before any run") == len(parts)
    assert text.count("| local |") >= sum(1 + (part.part.against != "local") for part in parts)


@pytest.mark.slow
def test_a_page_of_shifts_has_each_gain_by_power(places: Places, tmp_path: Path) -> None:
    ends = [part for part in PAGES["shift"].parts if part.made_up.kind == SENSORS and part.made_up.power in (0, 2)]
    changes = (*SMALL["synthetic-activity"], "training.rounds=3")
    page = replace(
        PAGES["shift"], parts=tuple(replace(part, changes=(*part.changes, *changes), seeds=2) for part in ends)
    )
    parts = comparisons("shift", page, places)
    assert make(parts, places, None) == []
    text = document("shift", page, parts)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| 0 |", "| 2 |"))]
    assert [row[0] for row in rows] == ["0", "2"] and rows[0][1:] != rows[1][1:]  # the power changes the data
    first = next(line for line in text.splitlines() if line.startswith("| distance of the sensors"))
    others = [head.removeprefix("less ") for head in first.strip("| ").split(" | ")[2:]]
    assert len(others) == 4
    for comparison, row in zip(parts, rows, strict=True):
        scores = defaultdict[str, list[float]](list)
        for cell in comparison.cells:
            scores[cell.row.title].append(cell.summary().mean_test)
        gains = [100 * (np.mean(scores["adafed"]) - np.mean(scores[other])) for other in others]
        told = [float(gain.strip("*").partition(" ")[0].replace("−", "-")) for gain in row[2:]]
        assert told == pytest.approx(gains, abs=0.06) and any(gains)
    assert picture(parts, tmp_path / "shift.png").stat().st_size > 5000


def test_hospitals_differ_by_the_power_that_is_given() -> None:
    assert [apart(family, 0.0) for family in FAMILIES] == [COMMON] * 2
    assert all(np.allclose(apart(family, 1.0).gains, family.gains) for family in FAMILIES)
    assert apart(FAMILIES[1], 2.0).gains[0] == pytest.approx(2 * FAMILIES[1].gains[0] - 1)
    task, sites = SyntheticProstate(patients=3, slices=3, size=32), ["a", "b", "c"]
    for power in (0, 2):
        with differing(Shift(ANATOMY, power, "", "")):
            cases = [task.load(site, sites, 0, None).train for site in sites]
        bright = [bool(one.inputs[:, 0][one.targets == 1].mean() > one.inputs.mean()) for one in cases]
        assert bright == [power == 0, power == 0, True]


def test_generated_pictures_are_centred_where_a_row_says_so() -> None:
    task = SyntheticHistology(patients=4, patches=2, size=32)
    with looking("FedAvg, centred"):
        centred = task.load("a", ["a"], 0, None).train.inputs
    plain = task.load("a", ["a"], 0, None).train.inputs
    assert torch.allclose(centred, plain - plain.mean((2, 3), keepdim=True), atol=1e-6) and plain.mean() > 0.1


@pytest.fixture
def activity(tmp_path: Path, places: Places) -> tuple[Page, list[Comparison], Places]:
    """Two seeds of local, fedavg and fedprox, and later fedbn."""
    part = replace(tiny(TINY.parts[0], 2, ("fedprox", "fedbn")), later=("fedbn",))
    page, own = replace(TINY, parts=(part,)), Places(tmp_path, places.data)
    return page, comparisons("tiny", page, own), own


def test_a_page_that_was_stopped_says_what_is_missing_and_goes_on(
    activity: tuple[Page, list[Comparison], Places],
) -> None:
    page, parts, own = activity
    make(parts, own, time.monotonic())  # no time at all
    nothing = document("tiny", page, parts)
    assert "0 of 2 seeds done; 0 of 8 runs" in nothing and "nothing is compared" in nothing
    make(parts, own, None, seeds=1)
    half = document("tiny", page, parts)
    assert "1 of 2 seeds done; 4 of 8 runs" in half and "Rows not done" not in half
    for cell in parts[0].cells:
        if cell.seed == 1 and cell.row.title in ("local", "fedavg"):
            make([replace(parts[0], cells=[cell])], own, None)
    assert parts[0].whole_seeds() == [0]  # half a seed is not compared
    for cell in parts[0].first:
        make([replace(parts[0], cells=[cell])], own, None)
    later = document("tiny", page, parts)
    assert "2 of 2 seeds done; 7 of 8 runs" in later and "Rows not done with these seeds: fedbn; p is" in later
    assert "| fedprox |" in later and "| fedbn |" not in later
    make(parts, own, None)
    assert "| fedbn |" in document("tiny", page, parts)


@pytest.mark.slow
def test_later_rows_come_after_all_seeds_of_the_others(
    activity: tuple[Page, list[Comparison], Places], capsys: pytest.CaptureFixture[str]
) -> None:
    _, parts, own = activity
    parts = [replace(part, part=replace(part.part, later=("fedbn", "fedprox"))) for part in parts]
    make(parts, own, None)
    lines = [line.split(" ", 3)[3] for line in capsys.readouterr().err.splitlines()]
    order = [tuple(line.split(": ")[0].split(", seed ")) for line in lines]
    early = [(row, seed) for seed in "01" for row in ("local", "fedavg")]
    assert order == [*early, *((row, seed) for row in ("fedbn", "fedprox") for seed in "01")]


def test_people_are_compared_where_each_site_is_one(places: Places) -> None:
    part = tiny(PAGES["adafed-har"].parts[1], 2)
    parts = [Comparison.of("people", part, places)]
    make(parts, places, None)
    text = document("people", replace(TINY, parts=(part,)), parts)
    assert "### For other people" in text and "mean over 3 people" in text and "### Against local, to explore" in text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let pages be written to a folder of the test."""
    monkeypatch.setattr(command_line, "FOLDER", tmp_path)
    yield tmp_path


@pytest.mark.slow
def test_a_page_is_written_from_three_seeds_on_and_keeps_what_stands_below_it(
    folder: Path, places: Places, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = folder / "harmofl-synthetic.md"
    page.write_text(f"old\n{END}\n\n## Measured otherwise\n", "utf-8")
    options = ["--minutes", "0", "--write", "--cells", str(folder / "cells"), "--data", str(places.data)]
    assert command_line.main(["harmofl-synthetic", *options]) == 1  # all is left to be done
    assert page.read_text("utf-8").startswith("old\n")
    assert "0 seeds are done; a page is written from 3 on" in capsys.readouterr().err
    monkeypatch.setattr(command_line, "LEAST_SEEDS", 0)
    assert command_line.main(["harmofl-synthetic", *options]) == 1
    text = page.read_text("utf-8")
    assert text == capsys.readouterr().out.removesuffix("\n") + "\n## Measured otherwise\n"
    assert "old" not in text and "0 of 10 seeds done" in text


def test_the_command_asks_for_the_very_same_cells(places: Places) -> None:
    import shlex

    for name, page in PAGES.items():
        part = replace(page.parts[0], seeds=1, folds=page.parts[0].folds and 3)
        asked = wanted(shlex.split(command(part))[1:])
        assert asked.folds == part.folds and list(asked.seeds) == [0] and list(asked.changes) == list(part.changes)
        rows = [*",".join(asked.methods).split(","), *asked.row]
        assert sorted(rows) == sorted(row for row in part.rows if not changed(row)), name
    assert sum(map(changed, PAGES["controls"].parts[0].rows)) == 2 * len(LOOKS)


# ------------------------------------------------------------------ recorded activity
def test_windows_are_put_in_order_and_left_so() -> None:
    right = waves(0, 4)
    stored = people(0)["x_train"]
    assert np.allclose(in_order(stored)[:4], waves(0, 12)[:4], atol=0.01)
    assert np.array_equal(in_order(right), right)


def test_the_shift_follows_from_the_seed_and_the_site_alone() -> None:
    windows = waves(0, 4)
    one = shifted(windows, 1, "subject_01")
    assert np.array_equal(one, shifted(windows, 1, "subject_01"))
    assert not np.allclose(one, shifted(windows, 2, "subject_01"))
    assert not np.allclose(one, shifted(windows, 1, "subject_02"))


def test_the_shift_moves_axes_turns_signs_and_scales_kinds_of_sensors() -> None:
    windows = waves(0, 4)
    moved = shifted(windows, 5, "subject_03").reshape(4, 3, 3, 128)
    kinds = windows.reshape(4, 3, 3, 128)
    orders = set()
    for kind in range(3):
        ratios = moved[0, kind, :, None] / kinds[0, kind, None]  # [new axis, old axis, steps]
        even = np.argwhere(ratios.std(2) < 1e-4)
        assert len(even) == 3 and set(even[:, 0]) == set(even[:, 1]) == {0, 1, 2}
        factors = np.array([ratios[new, old].mean() for new, old in even])
        assert np.allclose(abs(factors), abs(factors[0]), rtol=1e-3) and 0.5 <= abs(factors[0]) <= 2
        orders.add((tuple(even[:, 1]), tuple(np.sign(factors))))
    assert len(orders) == 1  # one way of mounting for all sensors of a device


def test_another_seed_of_the_shift_has_cells_of_its_own(places: Places) -> None:
    page = replace(PAGES["adafed-har"], parts=tuple(tiny(part) for part in PAGES["adafed-har"].parts))
    usual, other = (comparisons("adafed-har", page, places, shift) for shift in (None, 7))
    assert [part.folder.name for part in usual] == ["recorded", "shifted-1"]
    assert [part.folder.name for part in other] == ["recorded", "shifted-7"]


def test_without_files_it_says_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="har_uci"):
        write_windows(tmp_path, tmp_path / "out", None)
