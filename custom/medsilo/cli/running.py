"""The command for a person with all the data on one machine, and what other commands that run studies share: run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted
from medsilo.registry import PluginTable
from medsilo.runs import paths
from medsilo.runs.progress import StudyProgress

if TYPE_CHECKING:
    from medsilo.plan import Plan
    from medsilo.site.settings import SiteSettings

# What reports of a finished run: gets its folder, and returns a table for the terminal and the page that it wrote.
REPORTS = PluginTable("medsilo.reports", "types:FunctionType", {})


def run(
    screen: Console,
    job: options.Job,
    *,
    plan: options.PlanFile = None,
    changes: options.Changes,
    name: Annotated[str, typer.Option(help="name of the run's folder (default: method, task and time)")] = "",
    out: options.OutFolder = Path("runs"),
    engine: options.Engine = "simulator",
    threads: options.Threads = None,
    device: options.Device = None,
    data: options.Data = None,
    site_config: options.SiteConfigs = None,
    more: Annotated[
        int | None, option("N", "JOB is a finished run: train it so many rounds further, in a new folder", min=1)
    ] = None,
) -> None:
    """Run a job in NVFlare's simulator, with all its sites on this machine.

    Prints a line per site and round. Writes a folder with models, scores and report.html
    (docs/reference/run-folder.md). With --more a finished run goes on from its last round, with all that server and
    sites remember.
    """
    screen.in_lines = True
    if more:
        if plan or changes:
            raise MedsiloError("--more trains a run further as it was; leave out --plan and --set, or run the job anew")
        _train_further(screen, Path(job), more, out, name, engine, (device, data, site_config), threads)
        return
    screen.begin(f"reading the plan of {job}")
    from medsilo.core.text import is_safe_name
    from medsilo.flare.jobs import find_job, plan_of
    from medsilo.runs.record import new_study

    found = find_job(job)
    study = plan_of(found, changes, plan, here=True)
    if plan:
        screen.say(f"{plan} with the job's method, {study.algorithm.title}")
    if name and not is_safe_name(name):
        raise MedsiloError(f"--name {name!r} has odd characters; use letters, digits, '.', '_' and '-'")
    folder = out / (name or new_study(study))
    settings = options.settings_of_owner(device, data, site_config)
    screen.say(*(f"warning: {line}" for line in study.warnings(study.participation.sites)))
    run_study(screen, study, folder, settings, job=found if engine == "simulator" else None, threads=threads)
    conclude(screen, folder)


def _train_further(
    screen: Console,
    run: Path,
    more: int,
    out: Path,
    name: str,
    engine: str,
    given: tuple[Any, Any, Any],
    threads: int | None,
) -> None:
    """Train a finished run further, in a folder of its own, where it was run before. given: device, data, settings."""
    screen.begin(f"reading {run}")
    from medsilo.runs.longer import Longer

    longer = Longer(run, more)
    folder = out / (name or f"{run.resolve().name}-to-{longer.plan.rounds}")
    settings = options.settings_of_owner(*given, options.run_settings(run))
    job = folder / paths.JOB if (run / paths.JOB).is_dir() and engine == "simulator" else None
    longer.begin(folder)
    if job:
        from medsilo.flare.simulator import prepare_longer

        prepare_longer(run, longer.plan, folder)
    told = longer.difference
    screen.say(f"goes on after round {longer.done} of {run}" + (f"; caution: {told}" if told else ""))
    run_study(screen, longer.plan, folder, settings, job=job, threads=threads, resumes=True)
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
) -> None:
    """Run or go on with a study, as NVFlare's job or, without one, in this process, and show its rounds."""
    from functools import partial

    from medsilo.federation import inprocess
    from medsilo.runs.progress import Moment

    sites = plan.participation.sites
    where = "starting NVFlare" if job else "starting in this process"
    screen.say(f"{where}: {counted(len(sites), 'hospital')}, {counted(plan.rounds, 'round')}")
    progress = StudyProgress(sites, plan.rounds, plan.task.goal.metric, look=partial(Moment.of_run, folder))
    screen.goes_on = f"what is finished is kept: medsilo resume {folder}"
    with screen.rounds(progress) as on_round:
        if job is None:
            inprocess.run(plan, folder=folder, resume=resumes, settings=settings, on_round=on_round)
            return
        from medsilo.flare import simulator  # which brings NVFlare

        if resumes:
            simulator.resume(folder, settings, threads, on_round, screen.say)
        else:
            simulator.run(plan, folder, settings, job, threads, on_round, screen.say)


def conclude(screen: Console, folder: Path) -> None:
    """Say how a run ended: what is installed to report of runs writes its page and its table, else the score."""
    from medsilo.runs.outliers import standing_out
    from medsilo.runs.reading import read_rounds, read_summary

    screen.doing("writing the report")
    summary, outliers = read_summary(folder), standing_out(read_rounds(folder, growing=True))
    told = [report(folder) for report in REPORTS.values()]
    screen.say(*(f"\n{table}" for table, _ in told))
    if not told and summary.pooled_test is not None:
        screen.say(f"\ntest score: {summary.pooled_test:.3f} ({summary.metric})")
    screen.say(*(f"outlier: {line}" for lines in outliers.values() for line in lines))
    screen.say(f"\nsummary: {folder / paths.SUMMARY}", *(f"report: {page}" for _, page in told))
    screen.answer(run=folder, report=told[0][1] if told else None, summary=summary.as_json(), outliers=outliers)
