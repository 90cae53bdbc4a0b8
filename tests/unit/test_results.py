"""The files of results/: each study is made at a tiny size; what is not done is said; the induced shift; the index."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medsilo.core.errors import DataError
from medsilo_lab.study.cells import Row
from results import __main__ as command_line
from results import result_files
from results.har import in_order, shifted, write_windows
from results.making import Comparison, Places, comparisons, make
from results.page import changed, command, study
from results.pages import (
    BRAINS,
    BRCA,
    CELLS,
    HEART,
    LOOKS,
    PAGES,
    Page,
    Part,
)
from results.result_files import parsed
from tests.conftest import slow_but, wanted
from tests.patients import write_hearts, write_survival
from tests.unit.test_nuclei import draw

THREE = "participation.sites=[a,b,c]"
SMALL = {
    "activity-windows": ("participation.sites=[subject_01,subject_02,subject_03]",),
    "image-folder": ("task.size=[16, 16]", "network.features=[2, 4]"),
    "nnunet": ("training.local_steps=1", "task.shares=[0.2, 0.2, 0.6]"),
    "nuclei": ("task.size=16", "network.features=[2, 4]"),
    "table": (),
    "synthetic-activity": ("task.persons=3", "task.windows=4", "task.steps=32", THREE),
    "synthetic-histology": ("task.patients=4", "task.patches=4", "task.size=32", THREE),
    "synthetic-prostate": ("task.patients=3", "task.slices=3", "task.size=32", "network.features=[2, 4]", THREE),
}
TINY = Page("Tiny", "drawn", "Words.", (PAGES["baselines"].parts[1],))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Drawn data in the form of the real ones."""
    data = tmp_path_factory.mktemp("data")
    draw(data / "nuclei_he", images=9)
    write_hearts(data / HEART)
    write_survival(data / BRCA)
    for laboratory in ("cellavision", "jiangxi"):
        write_cells(data / CELLS / laboratory)
    (data / "har_uci").mkdir()
    for number in range(1, 4):
        np.savez(data / "har_uci" / f"subject_{number:02}.npz", **people(number))
    return Places(tmp_path_factory.mktemp("cells"), data)


def write_cells(folder: Path, images: int = 10) -> None:
    """Pictures of white blood cells in the layout of the real ones: masks have the values 0, 1 and 2."""
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for number in range(images):
        picture = np.random.default_rng(number).integers(150, 250, (20, 20, 3)).astype(np.uint8)
        mask = np.zeros((20, 20), np.uint8)
        mask[4:16, 4:16], mask[7:12, 7:12] = 1, 2
        picture[mask > 0] -= np.uint8(20) * mask[mask > 0, None]
        Image.fromarray(picture).save(folder / "images" / f"{number:03}.png")
        Image.fromarray(mask).save(folder / "labels" / f"{number:03}.png")


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
    task = part.task or {
        "nuclei_he": "nuclei",
        HEART: "table",
        BRCA: "table",
        BRAINS: "nnunet",
        CELLS: "image-folder",
    }.get(part.data, "")
    named = [change.removeprefix("task.name=") for change in part.changes if change.startswith("task.name=")]
    task = task or (named[0] if named else "synthetic-histology")
    changes = (*part.changes, *SMALL[task], "training.rounds=1")
    beside = part.beside and ("local",)
    folds = part.folds and 3
    return replace(part, rows=kept, against=against, changes=changes, seeds=seeds, folds=folds, beside=beside)


@pytest.mark.long
def test_every_plan_of_every_page_is_in_order(places: Places) -> None:
    for name, page in PAGES.items():
        for part in page.parts:
            one = replace(part, seeds=1, folds=None)
            comparison = Comparison.of(name, one, places)
            titles = {cell.row.title for cell in comparison.cells}
            assert {"local", part.against, *part.beside} <= titles
            assert ("HarmoFL, whole" in titles) == ("HarmoFL, mean" in titles)  # neither stands alone


def test_every_study_has_a_file_whose_command_makes_it(root: Path) -> None:
    files = {path.stem: result_files.header_of(path) for path in (root / "results").glob("*.csv")}
    assert {*PAGES} <= {*files}
    for name in PAGES:
        assert files[name]["command"] == [f"python -m results {name} --write"]
        assert {"title", "data", "date", "declared", "runs"} <= {*files[name]}


def test_the_index_is_that_of_the_files(root: Path) -> None:
    """`python -m results.result_files` writes it again."""
    assert (root / "results/README.md").read_text("utf-8") == result_files.index(root / "results")


def test_files_of_results_have_the_columns_and_numbers(root: Path) -> None:
    for path in (root / "results").glob("*.csv"):
        rows = result_files.rows_of(path)
        assert rows and {*rows[0]} == {*result_files.COLUMNS}, path.name
        for row in rows:
            told = [row[name] for name in ("value", "spread", "low", "high")]
            assert any(told) or row["text"], f"{path.name}: {row}"
            assert all(abs(float(value)) >= 0 for value in told if value), row
            assert not row["low"] or not row["high"] or float(row["low"]) <= float(row["high"]), row


@pytest.mark.parametrize(
    "text, told",
    [
        ("53.4 ± 0.5", {"value": "53.4", "spread": "0.5"}),
        ("+1.7 (−3.9 to +7.3)", {"value": "+1.7", "low": "-3.9", "high": "+7.3"}),
        ("**+9.9 (+5.8 to +13.9)**", {"value": "+9.9", "low": "+5.8", "high": "+13.9", "significant": "yes"}),
        ("never, 3, 4", {"text": "never, 3, 4"}),
        ("5.70 s, 5.25 s", {"text": "5.70 s, 5.25 s"}),
        ("93.5; 12", {"value": "93.5", "text": "93.5; 12"}),
        ("488,394", {"value": "488394"}),
        ("–", {}),
    ],
)
def test_a_cell_is_read_as_numbers(text: str, told: dict[str, str]) -> None:
    assert parsed(text) == told


def rows_of(found: result_files.Study) -> set[str]:
    """The configurations of a study's file."""
    return {line["configuration"] for table in found.tables for line in table.lines()}


@pytest.mark.long
@pytest.mark.parametrize("name", slow_but((), [name for name in PAGES if name != "shift"], ["study-nuclei"]))
def test_every_page_is_made(name: str, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "nnunet":
        pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
        monkeypatch.setattr("benchmarks.brains.HEADS", 9)
        monkeypatch.setattr("benchmarks.brains.WIDTH", 24.0)
    page = replace(PAGES[name], parts=tuple(tiny(part) for part in PAGES[name].parts))
    parts = comparisons(name, page, places)
    assert make(parts, places, None) == []
    found = study(name, page, parts)
    assert found.header["title"] == page.title and found.header["command"].endswith(f" {name} --write")
    assert len(found.header["declared"]) == len(parts) == sum("1 of 1 seeds" in one for one in found.header["runs"])
    lines = [line for table in found.tables for line in table.lines()]
    for part in parts:
        own = [line for line in lines if line["part"] == part.part.title and line["configuration"] == "local"]
        assert {line["quantity"] for line in own} > {"mean over sites", "worst site"}
        assert part.part.against == "local" or any(line["baseline"] == part.part.against for line in own)


@pytest.fixture
def activity(tmp_path: Path, places: Places) -> tuple[Page, list[Comparison], Places]:
    """Two seeds of local, fedavg and fedprox, and later fedbn."""
    part = replace(tiny(TINY.parts[0], 2, ("fedprox", "fedbn")), later=("fedbn",))
    page, own = replace(TINY, parts=(part,)), Places(tmp_path, places.data)
    return page, comparisons("tiny", page, own), own


@pytest.mark.long
def test_a_page_that_was_stopped_says_what_is_missing_and_goes_on(
    activity: tuple[Page, list[Comparison], Places],
) -> None:
    page, parts, own = activity
    make(parts, own, time.monotonic())  # no time at all
    nothing = study("tiny", page, parts)
    assert "0 of 2 seeds; 0 of 8 runs" in nothing.header["runs"][0] and not nothing.tables
    assert nothing.header["unfinished"] == "0 of 8 runs"
    make(parts, own, None, seeds=1)
    assert comparisons("tiny", page, own)[0].whole_seeds() == [0]  # as the command finds it the next time
    (half,) = study("tiny", page, parts).header["runs"]
    assert "1 of 2 seeds; 4 of 8 runs" in half and "not done" not in half
    for cell in parts[0].cells:
        if cell.seed == 1 and cell.row.title in ("local", "fedavg"):
            make([replace(parts[0], cells=[cell])], own, None)
    assert parts[0].whole_seeds() == [0]  # half a seed is not compared
    for cell in parts[0].first:
        make([replace(parts[0], cells=[cell])], own, None)
    later = study("tiny", page, parts)
    assert "2 of 2 seeds; 7 of 8 runs" in later.header["runs"][0]
    assert "not done with these seeds: fedbn; p is" in later.header["runs"][0]
    assert "fedprox" in rows_of(later) and "fedbn" not in rows_of(later)
    make(parts, own, None)
    assert "fedbn" in rows_of(whole := study("tiny", page, parts)) and "unfinished" not in whole.header


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let files be written to a folder of the test."""
    monkeypatch.setattr(command_line, "FOLDER", tmp_path)
    yield tmp_path


@pytest.mark.long
def test_a_file_is_written_from_three_seeds_on_and_keeps_its_remarks(
    folder: Path, places: Places, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = folder / "harmofl-synthetic.csv"
    old = "# title: old\n# remark: measured otherwise\n"
    page.write_text(old, "utf-8")
    options = ["--minutes", "0", "--write", "--cells", str(folder / "cells"), "--data", str(places.data)]
    assert command_line.main(["harmofl-synthetic", *options]) == 1  # all is left to be done
    assert page.read_text("utf-8") == old
    assert "0 seeds are done" in capsys.readouterr().err
    monkeypatch.setattr(command_line, "LEAST_SEEDS", 0)
    assert command_line.main(["harmofl-synthetic", *options]) == 1
    text = page.read_text("utf-8")
    assert text == capsys.readouterr().out.removesuffix("\n") and "# remark: measured otherwise\n" in text
    assert "old" not in text and "0 of 10 seeds" in text
    assert "harmofl-synthetic.csv" in (folder / "README.md").read_text("utf-8")


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


def test_without_files_it_says_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="har_uci"):
        write_windows(tmp_path, tmp_path / "out", None)
