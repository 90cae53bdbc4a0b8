"""The command 'run', which runs a study on one machine, and functions shared with other commands."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted
from medsilo.registry import PluginTable
from medsilo.runs import paths
from medsilo.runs.progress import StudyProgress

if TYPE_CHECKING:
    from medsilo.plan import Plan
    from medsilo.site.settings import SiteSettings
    from medsilo_lab.report.reported import Reported


# Plug-ins that report a finished run. Each plug-in is a function that takes the run folder, writes a page, and returns
# lines to print.
REPORTS = PluginTable("medsilo.reports", "types:FunctionType", {})


def run(
    screen: Console,
    job: options.Job,
    *,
    plan: options.PlanFile = None,
    changes: options.Changes,
    name: Annotated[str, option("NAME", "name of the run folder (default: method, task and time)")] = "",
    out: options.OutFolder = Path("runs"),
    engine: options.Engine = "simulator",
    threads: options.Threads = None,
    device: options.Device = None,
    data: options.Data = None,
    settings_folder: options.SettingsOfSites = None,
    more: Annotated[
        int | None,
        option("N", "JOB is a finished run: train its model for this many more rounds, in a new folder", min=1),
    ] = None,
    live: options.Live = False,
    tensorboard: options.TensorBoard = False,
) -> None:
    """Run a job in NVFlare's simulator, with all sites on this machine.

    The command prints a line per site and round. The command writes a run folder with models, scores and report.html
    (medsilo docs run-folder). With --more, it continues a finished run after its last round, from the complete state of
    server and sites.
    """
    screen.in_lines = True
    if tensorboard:
        from medsilo_lab.engines.tensorboard import check_installed

        check_installed()
    if more:
        if plan or changes:
            raise MedsiloError(
                "--more continues a run with its own plan; leave out --plan and --set, or start a new run"
            )
        _train_further(
            screen, Path(job), more, out, name, engine, (device, data, settings_folder), threads, live, tensorboard
        )
        return
    options.check_changes(changes, job, plan)
    screen.begin(f"reading the plan of {job}")
    from medsilo.core.text import is_safe_name
    from medsilo.flare.job_source import find_job
    from medsilo.flare.jobs import plan_of
    from medsilo_server.record import new_study

    found = find_job(job)
    study = plan_of(found, changes, plan, local=True)
    if plan:
        screen.say(f"{plan} with the job's method, {study.algorithm.title}")
    if name and not is_safe_name(name):
        raise MedsiloError(f"--name {name!r} has odd characters; use letters, digits, '.', '_' and '-'")
    folder = out / (name or new_study(study))
    settings = options.settings_of_owner(device, data, settings_folder)
    screen.say(*(f"warning: {line}" for line in study.warnings(study.participation.sites)))
    job_there = found if engine == "simulator" else None
    run_study(screen, study, folder, settings, job=job_there, threads=threads, live=live, tensorboard=tensorboard)
    conclude(screen, folder)


def _train_further(
    screen: Console,
    run: Path,
    more: int,
    out: Path,
    name: str,
    engine: str,
    arguments: tuple[Any, Any, Any],
    threads: int | None,
    live: bool,
    tensorboard: bool,
) -> None:
    """Continue a finished run in a new folder with the same engine. `arguments` is a tuple of the user's options for
    device, data and settings.
    """
    screen.begin(f"reading {run}")
    from medsilo_lab.engines.continuation import Longer

    longer = Longer(run, more)
    folder = out / (name or f"{run.resolve().name}-to-{longer.plan.rounds}")
    settings = options.settings_of_owner(*arguments, options.run_settings(run))
    job = folder / paths.JOB if (run / paths.JOB).is_dir() and engine == "simulator" else None
    longer.begin(folder)
    if job:
        from medsilo_lab.engines.simulator import prepare_longer

        prepare_longer(run, longer.plan, folder)
    told = longer.difference
    screen.say(f"goes on after round {longer.done} of {run}" + (f"; caution: {told}" if told else ""))
    run_study(
        screen,
        longer.plan,
        folder,
        settings,
        job=job,
        threads=threads,
        resumes=True,
        live=live,
        tensorboard=tensorboard,
    )
    conclude(screen, folder)


def run_study(
    screen: Console,
    plan: "Plan",
    folder: Path,
    settings: "SiteSettings",
    *,
    job: Path | None = None,
    threads: int | None = None,
    resumes: bool = False,
    live: bool = False,
    tensorboard: bool = False,
) -> None:
    """Run or continue a study, and print its rounds. If `job` is given, the study runs in NVFlare, otherwise in this
    process.
    """
    from functools import partial

    from medsilo.runs.progress import Moment
    from medsilo_lab.engines import inprocess
    from medsilo_lab.engines.tensorboard import event_files

    sites = plan.participation.sites
    where = "starting NVFlare" if job else "starting in this process"
    screen.say(f"{where}: {counted(len(sites), 'hospital')}, {counted(plan.rounds, 'round')}")
    progress = StudyProgress(sites, plan.rounds, plan.task.goal.metric, look=partial(Moment.of_run, folder))
    screen.goes_on = f"what is finished is kept: medsilo resume {folder}"
    with ExitStack() as within:
        if live:
            from medsilo_lab.report.live import shown_live

            within.enter_context(shown_live(folder, plan.study.title or folder.name, screen.say))
        on_round = within.enter_context(screen.rounds(progress))
        on_round = within.enter_context(event_files(folder, plan.task.goal.metric, tensorboard, on_round))
        if job is None:
            inprocess.run(plan, folder=folder, resume=resumes, settings=settings, on_round=on_round)
            return
        from medsilo_lab.engines import simulator

        if resumes:
            simulator.resume(folder, settings, threads, on_round, screen.say)
        else:
            simulator.run(plan, folder, settings, job, threads, on_round, screen.say)


def conclude(screen: Console, folder: Path) -> None:
    """Print the result of a run. If a report plug-in is installed, the plug-in writes a page and a table; otherwise
    only the score is printed.
    """
    from medsilo.runs.outliers import standing_out
    from medsilo.runs.reading import read_rounds, read_summary

    screen.doing("writing the report")
    summary, outliers = read_summary(folder), standing_out(read_rounds(folder, growing=True))
    told: list[Reported] = [report(folder) for report in REPORTS.values()]
    for one in told:
        screen.say(f"\n{one.table}", "", *(f"warning: {said['word']}: {said['text']}" for said in one.warnings))
    if not told and summary.pooled_score.known:
        screen.say(f"\ntest score: {summary.pooled_score} ({summary.metric})")
    screen.say(f"\nsummary: {folder / paths.SUMMARY}", *(f"report: {one.page}" for one in told))
    found = [said for one in told for said in one.warnings]
    page = told[0].page if told else None
    screen.answer(run=folder, report=page, summary=summary.as_json(), warnings=found, outliers=outliers)


RUN = Command(run, "jobs/fedbn --set training.rounds=3 --set seed=1", "With all data on one machine")
