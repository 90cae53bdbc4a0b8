"""Tables of plans and seeds: rows, cells that are kept, failures that are told."""

from pathlib import Path

import pytest

from medsilo.study.table import Row, cells_of, main
from tests.conftest import make_plan

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.rounds=1"]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(make_plan("fedavg", *SMALL).to_yaml())
    return path


def test_rows_are_methods_or_changes() -> None:
    assert Row.parse("fedbn") == Row("fedbn", ("algorithm.name=fedbn",))
    row = Row.parse("+ amplitude, mean: algorithm.band=0.0 seed=1")
    assert row == Row("+ amplitude, mean", ("algorithm.band=0.0", "seed=1"))
    assert row.folder == "--amplitude--mean"


def test_cells_go_seed_by_seed(plan: Path, tmp_path: Path) -> None:
    cells = cells_of(plan, [Row.parse("fedavg"), Row.parse("local")], [3, 4], tmp_path, ["training.rounds=2"])
    assert [(cell.row.title, cell.plan.seed) for cell in cells] == [
        ("fedavg", 3),
        ("local", 3),
        ("fedavg", 4),
        ("local", 4),
    ]
    assert all(cell.plan.rounds == 2 for cell in cells)


def test_a_table_is_filled_once_and_says_what_failed(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = tmp_path / "page.md"
    rows = ["fedavg", "diverging: algorithm.name=fedavg training.learning_rate=1000 training.rounds=30"]
    arguments = [str(plan), str(page), "--rows", *rows, "--seeds", "0", "--runs", str(tmp_path / "cells")]
    arguments += ["--processes", "1", "--machine", "a test"]
    assert main(arguments) == 1
    text = page.read_text()
    assert "1 of 2 runs are finished" in text and "Machine: a test" in text
    assert "| diverging | – | – |" in text and "training diverged" in text
    assert "| fedavg | " in text and '--rows fedavg "diverging: ' in text
    made = (tmp_path / "cells/fedavg-0/summary.json").stat().st_mtime_ns
    assert main(arguments) == 1
    assert (tmp_path / "cells/fedavg-0/summary.json").stat().st_mtime_ns == made
    assert main([str(plan), str(page), "--rows", "fedsum"]) == 1
    assert "fedsum" in capsys.readouterr().err
