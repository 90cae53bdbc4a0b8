"""The command for people who have a folder of images or recordings and nothing else yet: init."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.runs.progress import StudyProgress

if TYPE_CHECKING:
    from medsilo.check.result import Report, Table
    from medsilo.plan import Plan
    from medsilo.site.settings import SiteSettings


def init(
    screen: Console,
    folder: Annotated[
        Path | None,
        typer.Argument(help="images and labels, tables or recordings; of one hospital or with a folder for each"),
    ] = None,
    *,
    out: options.OutFolder = Path("study"),
    site: Annotated[str, option("SITE", "this hospital's name, if the folder belongs to one hospital")] = "hospital-a",
    target: Annotated[str | None, option("COLUMN", "the table's column that is to be learned")] = None,
    slices: Annotated[bool, typer.Option("--slices", help="learn volumes slice by slice, in 2-D")] = False,
    no_train: Annotated[bool, typer.Option("--no-train", help="leave out the trial")] = False,
    example: Annotated[
        Path | None,
        option(
            "FOLDER",
            "write a folder of three synthetic hospitals there to try out, and end",
            parser=options.output_folder,
        ),
    ] = None,
    device: options.Device = None,
) -> int:
    """Look at a folder of images, tables or recordings; write medsilo.yaml and a job, each choice with its reason.

    Checks them, trains every hospital alone over twelve rounds, and writes that run's page. Overwrites nothing
    (docs/start/tutorial.md).
    """
    if (folder is None) == (example is None):
        return screen.fail(MedsiloError("give the folder of your data, or --example FOLDER without one"), 2)
    screen.note("loading PyTorch")
    if example:
        _write_example(screen, example)
    if folder is None:
        return 0
    from tempfile import TemporaryDirectory

    from medsilo.core.text import duration
    from medsilo.runs import paths
    from medsilo_lab.start import dataset_layout
    from medsilo_lab.start.trial import alone
    from medsilo_lab.study.reading_once import keeping_ready

    dataset_layout.refuse_to_overwrite(out, folder)
    screen.say(f"looking at {folder}")
    with screen.busy("opening files"):
        gpu = options.settings_of(device, None).compute().device.type == "cuda"
        own = dataset_layout.DatasetLayout(folder.resolve(), site, device, gpu, by_slices=slices, target=target)
        sight = dataset_layout.first_sight(own)
    found, choices = sight.summary, sight.choices
    plan, told = dataset_layout.write_start(out, choices), dataset_layout.rows(choices)
    screen.goes_on = f"the settings and the plan are in {out}; to start again, remove it first"
    screen.say(*found, "", *dataset_layout.shown_lines(choices))
    screen.say(f"with their reasons, all choices: {out / 'medsilo.yaml'}, {out / dataset_layout.JOB}")
    with TemporaryDirectory(prefix="medsilo-") as ready:  # so that images are prepared once
        checked = _checked(screen, plan, out, Path(ready))
        stopped = [name for name, report in checked.items() if not report.go]
        go = not stopped
        a_round = sum(sum(report.seconds) for report in checked.values())  # one hospital after the other
        trial = out / dataset_layout.TRIAL if go and not no_train else None
        steps = dataset_layout.advice(sight.several, out, stopped)
        if trial:
            tried = alone(plan)
            about = f": about {duration(tried.rounds * a_round)}" if a_round else ""
            screen.say(f"\n{tried.rounds} rounds, every hospital alone and one after the other{about}")
            settings = keeping_ready(options.settings_of_owner(device, None, out), plan.task, Path(ready))
            _tried(screen, tried, settings, trial)
    page = trial / paths.REPORT if trial else None
    screen.say("", *(f"{what}\n    {command}" if command else what for what, command in steps))
    screen.say(*([f"\nreport: {page}"] if page else []))
    screen.answer(
        found=found,
        choices=[{"file": file, "key": key, "value": value, "why": why} for file, key, value, why in told],
        check={name: report.as_json() for name, report in checked.items()},
        settings=out / "medsilo.yaml",
        job=out / dataset_layout.JOB,
        trial=trial,
        report=page,
        next=[command for _, command in steps if command],
    )
    return 0 if go else 1


def _write_example(screen: Console, folder: Path) -> None:
    screen.begin("drawing hospitals")
    from medsilo_lab.start.example import write_example

    patients = write_example(folder)
    screen.say(f"three synthetic hospitals with {patients} patients: {folder}\nnow: medsilo init {folder} -o study")
    screen.answer(example=folder, patients=patients)


def _checked(screen: Console, plan: "Plan", out: Path, ready: Path) -> dict[str, "Report"]:
    """Return what 'medsilo check' says of each hospital; names of files for each lie beside."""
    from medsilo.check.result import MARKS
    from medsilo_lab.start.dataset_layout import CHECKS
    from medsilo_lab.start.trial import checked

    reports: dict[str, Report] = {}
    if getattr(plan.task, "deals", False):
        screen.say("\nnot checked: the plan deals one table to hospitals, which is for trying out on this machine")
        return reports
    screen.doing("checking")
    for site in plan.participation.everyone:
        reports[site] = report = checked(site, plan, out, ready)
        report.write_private(out / CHECKS / f"{site}-private.txt")
        screen.say(f"\ncheck of {site}: {report.verdict}")
        for finding in (one for one in report.findings if one.severity != "ok" or one.where == "data"):
            screen.say(f"  {MARKS[finding.severity]}  {finding.where}: {finding.what}")
            if finding.severity == "stops" and finding.remedy:
                screen.say(f"    -> {finding.remedy}")
    held = hospitals_table({site: report.tables for site, report in reports.items()})
    if len(reports) > 1 and held.rows:
        screen.say("", *held.as_text())
    return reports


def _tried(screen: Console, trial: "Plan", settings: "SiteSettings", folder: Path) -> None:
    """Run the trial, show its scores, and write its page."""
    from medsilo.federation import inprocess
    from medsilo.runs import paths
    from medsilo_lab.report.formats import text_table
    from medsilo_lab.report.page import write
    from medsilo_lab.report.read import read

    sites = trial.participation.sites
    with screen.rounds(StudyProgress(sites, trial.rounds, trial.task.goal.metric)) as on_round:
        inprocess.run(trial, folder=folder, settings=settings, on_round=on_round)
    write([folder], folder / paths.REPORT, "Every hospital alone")
    screen.say("\n" + text_table(read(folder)))


INIT = Command(init, "/data/kidney -o study", "To begin with")


def hospitals_table(each: "Mapping[str, Sequence[Table]]") -> "Table":
    """Return one table of what hospitals have, by structure and column, of the tables of each."""
    from medsilo.check.data import HELD, in_words
    from medsilo.check.result import Table

    told = {site: [table for table in own if table.title.endswith(HELD)] for site, own in each.items()}
    title = next((table.title for own in told.values() for table in own), HELD)
    held = {site: {row[0]: row[1:] for table in own for row in table.rows} for site, own in told.items()}
    names = dict.fromkeys(name for own in held.values() for name in own)
    return Table(
        title,
        ("name", *held),
        [[name, *(in_words(own.get(name), bool(each[site])) for site, own in held.items())] for name in names],
    )
