"""The demo's page answers a single question."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from medsilo.cli import main, show
from medsilo.cli.show import Console
from medsilo_lab.cli import comparing
from medsilo_lab.cli.comparing import DEMO_SEEDS, seeds_of
from medsilo_lab.comparison import demo as demonstration
from medsilo_lab.comparison.demo import ALONE, HARMONISED, ROWS, RUNNING, SMALL, TOGETHER, demo_plan, demo_study
from medsilo_lab.report.study_page import write_demo
from medsilo_lab.report.template import HERE
from medsilo_lab.study.cells import Row, plan_of
from results.result_files import rows_of
from tests import inprocess
from tests.unit.medsilo_lab.test_report import Page
from tools.screenshots import NUMBERS


def test_all_rows_fit_the_plan_and_have_the_titles_of_the_story() -> None:
    rows = [Row.parse(text) for text in ROWS]
    plans = {row.title: plan_of(demo_plan(2), row, []) for row in rows}
    assert {ALONE, TOGETHER, RUNNING, HARMONISED} <= set(plans)
    assert plans[ALONE].network == plans[TOGETHER].network != plans[RUNNING].network


def test_the_numbers_of_other_studies_are_declared_contrasts(root: Path) -> None:
    """The demo's page cites three differences between methods from results/contrasts.csv."""
    told = re.findall(r"([+−][\d.]+) points \(([+−][\d.]+) to ([+−][\d.]+)\)", (HERE / "demo.html").read_text("utf-8"))
    lines = [line for line in rows_of(root / "results/contrasts.csv") if line["quantity"] == "mean over sites"]
    known = {tuple(line[of].replace("-", "−") for of in ("value", "low", "high")) for line in lines if line["baseline"]}
    assert len(told) == 3 and {*told} <= known


def pictured(root: Path) -> dict[str, Any]:
    with Image.open(root / "docs/pictures/demo.png") as picture:
        told: dict[str, Any] = json.loads(picture.info[NUMBERS])
    return told


def test_the_picture_in_the_readme_is_of_this_demo(root: Path) -> None:
    told = pictured(root)
    assert (told["rows"], told["changes"], told["seeds"]) == (list(ROWS), list(SMALL), list(seeds_of(DEMO_SEEDS)))


@pytest.mark.long
def test_the_picture_in_the_readme_shows_what_a_fresh_run_gives(root: Path, tmp_path: Path) -> None:
    """The README's picture shows the model that FedAvg trained with the demo's first seed.

    Processors round differently, so a few cases may have different predictions on different processors.
    """
    run = inprocess.run(plan_of(demo_plan(12), Row.parse(ROWS[1]), []), folder=tmp_path / "fresh")
    assert run.summary.mean_test == pytest.approx(pictured(root)["scores"][TOGETHER][0], abs=0.1)


@pytest.mark.parametrize(
    ("command", "halts", "told"),
    [
        (["demo"], "medsilo_lab.comparison.compare.Study.run", "starts again"),
        (
            ["compare", "--methods", "local"],
            "medsilo_lab.comparison.compare.Asked.all_cells",
            "the same command goes on",
        ),
    ],
)
def test_who_stops_a_command_is_told_how_it_goes_on(
    command: list[str],
    halts: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(halts, stop)
    assert main([*command, "-o", str(tmp_path / "out")]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert told in last and ("out" in last or command[0] == "compare")


@pytest.mark.slow
def test_a_short_demo_ends_with_its_page(tmp_path: Path) -> None:
    lines: list[str] = []
    study = demo_study(tmp_path, 1, (0, 1), lines.append)
    folder = study.folder
    assert not study.run()
    text = write_demo(folder, HARMONISED).read_text()
    page = Page(text)
    assert {"why", "methods", "yours", "single-site"} <= set(page.ids)
    assert text.count('alt="training image') >= 3 and "three synthetic hospitals" in text


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_has_one_live_line_and_a_pipe_a_line_for_each_run(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In earlier versions, the demo's output mixed progress bars with lines of progress."""
    screen, said = Console(), list[str]()
    screen.watched = terminal
    monkeypatch.setattr(show, "_spinning", lambda words: nullcontext(said.append))
    monkeypatch.setattr(screen, "say", lambda *lines: said.extend(lines))
    monkeypatch.setattr(demonstration, "ROWS", ROWS[:2])
    monkeypatch.setattr(demonstration, "AT_ONCE", 1)
    monkeypatch.setattr(screen, "doing", lambda words, aside=False: None)
    assert comparing.demo(screen, rounds=1, seeds=(0,), out=tmp_path) == 0
    bars = [line for line in said if re.match(r"\[#+\.*\] \d/2  ", line)]
    assert len(bars) == (0 if terminal else 2)


def test_the_live_line_says_how_many_runs_are_finished(tmp_path: Path) -> None:
    study = demo_study(tmp_path, 1, (0,), lambda line: None)
    assert study.under_way() == ""
    study.finished = "[###.................] 1/7, about 3 min left"
    assert study.under_way() == study.finished
