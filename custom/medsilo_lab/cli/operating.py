"""The command 'report', which writes a page about finished runs."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.runs import paths

MOST_NAMED = 3


def report(
    screen: Console,
    runs: options.Runs,
    *,
    out: options.OutFileOrNone = None,
    hospitals: Annotated[
        bool, typer.Option("--hospitals", help="for a comparison: also write a decision sheet for each hospital")
    ] = False,
) -> None:
    """Write an HTML page about one or several runs.

    If you give a folder that contains runs, the page covers all of them. For the folder of a comparison, the command
    writes the comparison's page. Pages can be read offline. With --hospitals, each hospital gets a decision sheet: one
    printable page about the benefit of federated training for this hospital. You may mail the sheet to the hospital,
    because it names no other hospital.
    """
    screen.note("reading the runs")
    from medsilo_lab.report.page import write
    from medsilo_lab.report.read import runs_within
    from medsilo_lab.report.study_page import write_study

    found = [run for folder in runs for run in runs_within(folder)]
    compared = len(runs) == 1 and (runs[0] / paths.VERDICT).exists()
    if hospitals and not compared:
        raise MedsiloError("--hospitals needs the folder of one comparison (medsilo compare -o)", str(runs[0]))
    if compared:
        written = write_study(runs[0], out)
    else:
        page = out or runs[0] / paths.REPORT
        title = f"{len(found)} runs" if len(found) > MOST_NAMED else ", ".join(run.resolve().name for run in found)
        written = write(found, page, title)
    screen.say(f"report: {written}")
    own: list[Path] = []
    if hospitals:
        from medsilo.check.disclosure import left_in_short
        from medsilo.plan import load_plan
        from medsilo_lab.report.differences import write_sheets

        own = write_sheets(runs[0], lambda run: left_in_short(load_plan(run / paths.PLAN)))
    screen.say(*(f"hospital's sheet: {page}" for page in own))
    screen.answer(report=written, runs=found, hospitals=own)


REPORT = Command(report, "runs/one runs/other -o comparison.html", "Of finished runs")
