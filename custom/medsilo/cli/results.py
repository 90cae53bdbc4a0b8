"""Commands for people who have finished runs: report, cross."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.given_settings import settings_of
from medsilo.cli.show import Screen
from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo.site.owner import ALL_MINE

if TYPE_CHECKING:
    from medsilo.report.sheet_page import Leaving

MOST_NAMED = 3  # runs in the title of a page


def report(
    screen: Screen,
    runs: options.Runs,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            *options.OUT,
            metavar="PAGE",
            parser=options.output_file,
            help="the page (default: report.html in the first run)",
        ),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="an answer of 'medsilo statistics' about these hospitals, to show beside"),
    ] = None,
    hospitals: Annotated[
        bool,
        typer.Option("--hospitals", help="also a printed page for each hospital, which may be mailed to it"),
    ] = False,
) -> int:
    """Write one HTML page about one or more runs.

    A folder with several runs means all of them; that of a comparison gives the comparison's page. The page
    needs no network. A hospital's sheet is one printed page with its own numbers and the means of all. It names no
    other hospital; of a comparison it is a decision sheet.
    """
    screen.note("reading the runs")
    from medsilo.report.page import write
    from medsilo.report.read import runs_within
    from medsilo.report.study_page import write_study

    found = [run for folder in runs for run in runs_within(folder)]
    compared = len(runs) == 1 and (runs[0] / paths.VERDICT).exists()
    if compared:
        written = write_study(runs[0], out, statistics=statistics)
    else:
        page = out or runs[0] / paths.REPORT
        title = f"{len(found)} runs" if len(found) > MOST_NAMED else ", ".join(run.resolve().name for run in found)
        written = write(found, page, title, statistics)
    screen.say(f"report: {written}")
    own = []
    if hospitals:
        from medsilo.report.sheet_page import write_sheets

        own = [page for folder in (runs if compared else found) for page in write_sheets(folder, _leaving)]
        if not own:
            raise MedsiloError("--hospitals: no gain over training alone is known; compare with the method local, too")
    for page in own:
        screen.say(f"hospital's sheet: {page}")
    screen.answer(report=written, runs=found, hospitals=own)
    return 0


def _leaving(run: Path) -> "Leaving":
    from medsilo.check.leaks import left_in_short
    from medsilo.plan import load_plan
    from medsilo.report.sheet_page import Leaving

    return Leaving(*left_in_short(load_plan(run / paths.PLAN)))


def cross(
    screen: Screen,
    runs: Annotated[
        list[Path],
        typer.Argument(help="a run's folder, or those of several runs of one task, with all their sites here"),
    ],
    *,
    device: options.DeviceOfRun = None,
    data: options.DataOfRun = None,
    site_config: options.SiteConfigs = None,
) -> int:
    """Test every site's model of a run on every site's data; of several runs, models that answer together.

    Of one run it prints the table, and adds it to the run as cross.json and to its report. Of several the mean of
    the models' probabilities decides, shown beside the score of each run's model alone; such models predict by
    `medsilo predict MODEL IMAGES --with OTHER`.
    """
    screen.begin(f"reading {', '.join(map(str, runs))}")
    from medsilo.report.page import write
    from medsilo.report.read import read
    from medsilo.report.table import committee_table, cross_table
    from medsilo.study import cross as crossing

    with screen.busy("testing every model on every site's data"):
        settings = settings_of(device, data, site_config, crossing.run_settings(runs[0]), **ALL_MINE)
        if len(runs) > 1:
            together, alone = crossing.committee_scores(runs, settings)
        else:
            scores = crossing.cross(runs[0], settings)
    if len(runs) > 1:
        screen.say(committee_table(together, alone))
        screen.answer(runs=runs, together=together, alone=alone)
        return 0
    [run] = runs
    screen.say(cross_table(read(run)))
    page = write([run], run / paths.REPORT, run.resolve().name)
    screen.say(f"\nreport: {page}")
    screen.answer(run=run, scores=scores, report=page)
    return 0
