"""The command 'init', which makes a data set and a job from a folder of data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.runs.progress import StudyProgress
from medsilo_lab.cli import asking

if TYPE_CHECKING:
    from medsilo.check.result import Report, Table
    from medsilo.plan import Plan
    from medsilo.site.settings import SiteSettings


def init(
    screen: Console,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help=(
                "one hospital's images and labels, tables or recordings; or a folder with a subfolder for each hospital"
            )
        ),
    ] = None,
    *,
    out: options.OutFolder = Path("study"),
    site: Annotated[str, option("SITE", "this hospital's name, if the folder belongs to one hospital")] = "hospital-a",
    target: asking.Target = None,
    slices: Annotated[bool, typer.Option("--slices", help="train a 2-D network on the slices of volumes")] = False,
    hospitals: Annotated[
        bool,
        typer.Option(
            "--hospitals",
            help=("each subfolder or table belongs to one hospital, and gives the hospital its name in the plan"),
        ),
    ] = False,
    said: asking.Said = None,
    answers: asking.AnswersFile = None,
    yes: asking.Yes = False,
    call: asking.Called = None,
    no_train: Annotated[bool, typer.Option("--no-train", help="skip the trial training")] = False,
    device: options.Device = None,
) -> int:
    """Make a data set and a job from a folder of images, tables or recordings, and explain each choice.

    The command asks the same questions as 'medsilo data' and writes the same files. The command then checks the data
    set, trains every hospital separately for twelve rounds, and writes a report of that run. The command overwrites
    nothing (medsilo docs start/tutorial).
    """
    if folder is None:
        missing = "give the folder of your data; 'medsilo example FOLDER' writes synthetic hospitals to try out"
        return screen.fail(MedsiloError(missing), 2)
    screen.note("loading PyTorch")
    from tempfile import TemporaryDirectory

    from medsilo.core.text import duration
    from medsilo.runs import paths
    from medsilo_lab.start import dataset_layout
    from medsilo_lab.start.making import make_each
    from medsilo_lab.start.trial import alone, try_methods
    from medsilo_lab.study.reading_once import keeping_ready

    dataset_layout.refuse_to_overwrite(out, folder)
    screen.begin(f"looking at {folder}")
    gpu = options.settings_of(device, None).compute().device.type == "cuda"
    own = dataset_layout.DatasetLayout(folder.resolve(), site, device, gpu, slices, target, hospitals)
    # the preprocessed images in this folder are used by the check and by the trial training
    with TemporaryDirectory(prefix="medsilo-") as ready:
        made = make_each(
            own,
            asking.asker(screen, yes),
            said=asking.answers_of(said, answers),
            progress=asking.progress_on(screen),
            ready=Path(ready),
            called=asking.called_by(call),
        )
        sight = made.sight
        found, choices = sight.summary, sight.choices
        plan, told = dataset_layout.write_start(out, choices, made.sets), dataset_layout.rows(choices)
        screen.goes_on = f"the data set and the plan are in {out}; to start again, remove it first"
        screen.say(*found, "", *dataset_layout.shown_lines(choices))
        for name, one in made.sets.items():
            screen.say(*(f"{name}, {line}" if name else line for line in asking.lines_of(one.data_set)[1:2]))
        screen.say(f"with their reasons, all choices: {out / dataset_layout.DATA_SET}, {out / dataset_layout.JOB}")
        checked = _checked(screen, plan, out, Path(ready))
        stopped = [name for name, report in checked.items() if not report.go]
        go = not stopped
        # the durations are added, because the hospitals train one after the other
        a_round = sum(sum(report.seconds) for report in checked.values())
        trial = out / dataset_layout.TRIAL if go and not no_train else None
        steps = dataset_layout.advice(sight.several, out, stopped)
        if trial:
            settings = keeping_ready(options.settings_of_owner(device, None, out), plan.task, Path(ready))
            if sight.several:
                with screen.busy("trying one round by each method"):
                    try_methods(plan, dataset_layout.COMPARED, settings)
            tried = alone(plan)
            about = f": about {duration(tried.rounds * a_round)}" if a_round else ""
            screen.say(f"\n{tried.rounds} rounds, every hospital alone and one after the other{about}")
            _tried(screen, tried, settings, trial)
    page = trial / paths.REPORT if trial else None
    screen.say("", *(f"{what}\n    {command}" if command else what for what, command in steps))
    screen.say(*([f"\nreport: {page}"] if page else []))
    screen.answer(
        found=found,
        choices=[{"file": file, "key": key, "value": value, "why": why} for file, key, value, why in told],
        check={name: report.as_json() for name, report in checked.items()},
        data_sets={name or one.data_set.name: one.data_set.model_dump(mode="json") for name, one in made.sets.items()},
        settings=out / "medsilo.yaml",
        job=out / dataset_layout.JOB,
        trial=trial,
        report=page,
        next=[command for _, command in steps if command],
    )
    return 0 if go else 1


def example(
    screen: Console,
    folder: Annotated[Path, typer.Argument(help="path of the new folder", parser=options.output_folder)],
) -> None:
    """Write a folder with the data of three synthetic hospitals, as an example for 'medsilo init'.

    Each hospital has volumes in images/ and masks of the same names in labels/.
    """
    screen.begin("drawing hospitals")
    from medsilo_lab.start.example import write_example

    patients = write_example(folder)
    screen.say(f"three synthetic hospitals with {patients} patients: {folder}\nnow: medsilo init {folder} -o study")
    screen.answer(example=folder, patients=patients)


def _checked(screen: Console, plan: "Plan", out: Path, ready: Path) -> dict[str, "Report"]:
    """Check the plan at each hospital. For each hospital, a subfolder of `out` gets the private list of the problems
    that the check found.
    """
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
    from medsilo.runs import paths
    from medsilo_lab.engines import inprocess
    from medsilo_lab.report.formats import text_table
    from medsilo_lab.report.page import write
    from medsilo_lab.report.read import read
    from medsilo_lab.report.run_warnings import of_run

    sites = trial.participation.sites
    with screen.rounds(StudyProgress(sites, trial.rounds, trial.task.goal.metric)) as on_round:
        inprocess.run(trial, folder=folder, settings=settings, on_round=on_round)
    write([folder], folder / paths.REPORT, "Every hospital alone")
    done = read(folder)
    screen.say(f"\n{text_table(done)}", "", *(f"warning: {one}" for one in of_run(done)))


INIT = Command(init, "/data/kidney -o study", "To begin with")
EXAMPLE = Command(example, "data", "To begin with")


def hospitals_table(each: "Mapping[str, Sequence[Table]]") -> "Table":
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
