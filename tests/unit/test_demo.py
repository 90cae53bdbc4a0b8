"""The demo: one question and its page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from docs.screenshots import NUMBERS
from medsilo.cli import main
from medsilo_lab.cli.comparing import DEMO_SEEDS, seeds_of
from medsilo_lab.report.study_page import write_demo
from medsilo_lab.report.template import HERE
from medsilo_lab.study.cells import Row, plan_of
from medsilo_lab.study.demo import ALONE, HARMONISED, ROWS, RUNNING, SMALL, TOGETHER, demo_plan, demo_study
from results.result_files import rows_of
from tests import inprocess
from tests.unit.test_report import Page


def test_all_rows_fit_the_plan_and_have_the_titles_of_the_story() -> None:
    rows = [Row.parse(text) for text in ROWS]
    plans = {row.title: plan_of(demo_plan(2), row, []) for row in rows}
    assert {ALONE, TOGETHER, RUNNING, HARMONISED} <= set(plans)
    assert plans[ALONE].network == plans[TOGETHER].network != plans[RUNNING].network


def test_the_numbers_of_other_studies_are_those_of_their_pages(root: Path) -> None:
    """Numbers that the page gives of where the three methods help."""
    told = re.findall(r"\+[\d.]+ points over FedAvg|\+[\d.]+", (HERE / "demo.html").read_text("utf-8"))
    lines = [
        line for name in ("study-nuclei", "baselines", "patients") for line in rows_of(root / f"results/{name}.csv")
    ]
    known = {(line["value"], line["low"], line["high"]) for line in lines if line["baseline"] == "fedavg"}
    gains = {(told[at].split()[0], told[at + 1], told[at + 2]) for at in (0, 3, 6)}
    assert len(told) == 9 and gains <= known


def pictured(root: Path) -> dict[str, Any]:
    """Return what the README's picture shows, as it was taken."""
    with Image.open(root / "docs/pictures/demo.png") as picture:
        told: dict[str, Any] = json.loads(picture.info[NUMBERS])
    return told


def test_the_picture_in_the_readme_is_of_this_demo(root: Path) -> None:
    told = pictured(root)
    assert (told["rows"], told["changes"], told["seeds"]) == (list(ROWS), list(SMALL), list(seeds_of(DEMO_SEEDS)))


@pytest.mark.long
def test_the_picture_in_the_readme_shows_what_a_fresh_run_gives(root: Path, tmp_path: Path) -> None:
    """FedAvg with the demo's first seed. Another processor may give other last bits, and so a few other cases."""
    run = inprocess.run(plan_of(demo_plan(12), Row.parse(ROWS[1]), []), folder=tmp_path / "fresh")
    assert run.summary.mean_test == pytest.approx(pictured(root)["scores"][TOGETHER][0], abs=0.1)


@pytest.mark.parametrize(
    ("command", "halts", "told"),
    [
        (["demo"], "medsilo_lab.study.compare.Study.run", "starts again"),
        (["compare", "--methods", "local"], "medsilo_lab.study.compare.Asked.all_cells", "the same command goes on"),
        (["kits", "rehearse"], "medsilo_lab.rehearsal.walk.Walk.study", "is stopped"),
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
    assert {"why", "methods", "yours", "joining"} <= set(page.ids)
    assert text.count('alt="training image') >= 3 and "three synthetic hospitals" in text
