"""The command for people who have finished runs: report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.show import Screen
from medsilo.core.errors import MedsiloError
from medsilo.runs import paths

if TYPE_CHECKING:
    from medsilo.report.hospital_page import Leaving

MOST_NAMED = 3  # runs in the title of a page


def report(
    screen: Screen,
    runs: options.Runs,
    *,
    out: options.OutFileOrNone = None,
    hospitals: Annotated[
        bool,
        typer.Option("--hospitals", help="also a page for each hospital, which may be mailed to it"),
    ] = False,
) -> int:
    """Write one HTML page about one or more runs.

    A folder that holds several runs stands for all of them; that of a comparison gives the comparison's page. The page
    needs no network. A hospital's page shows its own numbers beside the means of all, and names no other hospital;
    of a comparison it is a decision sheet, one printed page.
    """
    screen.note("reading the runs")
    from medsilo.report.page import write
    from medsilo.report.read import runs_within
    from medsilo.report.study_page import write_study

    found = [run for folder in runs for run in runs_within(folder)]
    compared = len(runs) == 1 and (runs[0] / paths.VERDICT).exists()
    if compared:
        written = write_study(runs[0], out)
    else:
        page = out or runs[0] / paths.REPORT
        title = f"{len(found)} runs" if len(found) > MOST_NAMED else ", ".join(run.resolve().name for run in found)
        written = write(found, page, title)
    screen.say(f"report: {written}")
    own = []
    if hospitals:
        own = decision_sheets(runs[0]) if compared else [page for run in found for page in hospital_pages(run)]
    for page in own:
        screen.say(f"hospital's page: {page}")
    screen.answer(report=written, runs=found, hospitals=own)
    return 0


def hospital_pages(run: Path) -> list[Path]:
    """Write the pages of a run's hospitals and return where they are."""
    from medsilo.report.hospital_page import write_hospitals

    return write_hospitals(run, _leaving(run))


def decision_sheets(comparison: Path) -> list[Path]:
    """Write a sheet for each hospital of a comparison and return where they are."""
    from medsilo.report.sheet_page import write_sheets

    if sheets := write_sheets(comparison, _leaving):
        return sheets
    raise MedsiloError("--hospitals: no gain over training alone is known there; compare with the method local, too")


def _leaving(run: Path) -> "Leaving":
    from medsilo.check.leaks import left_in_short
    from medsilo.plan import load_plan
    from medsilo.report.hospital_page import Leaving

    return Leaving(*left_in_short(load_plan(run / paths.PLAN)))
