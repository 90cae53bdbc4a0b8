"""The command that says which method a consortium should try first."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.given_settings import settings_of
from medsilo.cli.show import Screen
from medsilo.core.errors import MedsiloError
from medsilo.site.owner import ALL_MINE

if TYPE_CHECKING:
    from medsilo.study.adviser import Advice


def advise(
    screen: Screen,
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUNS]",
            default_factory=list,
            help="folders of finished measuring runs, or one that holds them",
            show_default=False,
        ),
    ],
    *,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", autocompletion=options.complete_job, help="make the measuring runs of this job here first"
        ),
    ] = None,
    plan: options.PlanFile = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=options.positive,
            help="of each measuring run (default: half of the plan's); of longer runs, the first ones count",
        ),
    ] = None,
    changes: options.Changes,
    out: Annotated[
        Path,
        typer.Option(
            *options.OUT, metavar="FOLDER", parser=options.output_folder, help="where measuring runs are kept"
        ),
    ] = Path("runs/advise"),
    engine: options.Engine = "inprocess",
    device: options.Device = None,
    data: options.Data = None,
    site_config: options.SiteConfigs = None,
) -> int:
    """Say which method to train, or which ones, why, and how sure that is.

    From the records of short runs of one plan with up to seven methods, together some three and a half trainings: the
    method with the least validation loss, or where none is clearly ahead the best four, whose models answer together.
    Only what hospitals told is read, and no test score. docs/evidence.md has the rules.
    """
    if bool(runs) == bool(measure):
        raise MedsiloError("give folders of measuring runs, or --measure JOB, and not both")
    screen.note("reading the runs")
    from medsilo.report.read import runs_within
    from medsilo.study.adviser import advise, measuring_cells, tried_together
    from medsilo.study.cells import fill
    from medsilo.study.measurement import read_measured

    notes: list[str] = []
    if measure:
        from medsilo.flare.jobs import find_job, plan_of

        cells, notes = measuring_cells(plan_of(find_job(measure), changes, plan), rounds, out)
        settings = settings_of(device, data, site_config, **ALL_MINE)
        with screen.busy("measuring"):
            fill(cells, engine, settings, 1, lambda cell, failure: screen.say(f"{cell.name}: {failure or 'measured'}"))
        runs = [cell.folder for cell in cells if cell.summary()]
    found = [run for folder in runs for run in runs_within(folder)]
    told = advise(read_measured(found, rounds))
    _show(screen, told, notes)
    right, asked = tried_together()
    screen.say(f"all rules: right on {right} of {asked} federations that none was made from; compare before you decide")
    rows = [(name, "not known" if loss is None else f"{loss:.3g}") for name, loss in told.losses.items()]
    screen.table(("method", "loss"), rows, [f"{name}: {loss}" for name, loss in rows])
    screen.answer(**vars(told), not_measured=notes, runs=found)
    return 0


def _show(screen: Screen, told: "Advice", notes: list[str]) -> None:
    """Show the answer, its reason and what it rests on."""
    several = len(told.train) > 1
    methods = " and ".join((", ".join(told.train[:-1]), told.train[-1])) if several else "".join(told.train)
    screen.say(f"{told.answer}: train {methods}" if methods else "it cannot be known")
    if several:
        screen.say(
            "how: a study of each; medsilo committee tests them, medsilo predict MODEL IMAGES --with OTHER uses them"
        )
        screen.say(f"if it can be one only: {told.first}, then {told.second}")
    screen.say(f"why: {told.reason}")
    screen.say(
        f"how sure: {told.sure}; rule '{told.rule}' was {told.evidence}" if told.rule else "how sure: not at all"
    )
    for line in (*told.unknown, *notes):
        screen.say(f"not known: {line}")
