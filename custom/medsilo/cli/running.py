"""Commands for a person with all the data on one machine: demo, run, compare, resume."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.cli import options
from medsilo.cli.options import option, several
from medsilo.cli.show import Screen
from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted
from medsilo.runs import paths
from medsilo.site.owner import ALL_MINE
from medsilo.study.progress import StudyProgress

if TYPE_CHECKING:
    from medsilo.plan import Plan
    from medsilo.runs.schema import Verdict
    from medsilo.site.settings import SiteSettings


def demo(
    screen: Screen,
    *,
    rounds: Annotated[int, option("N", "of each study", min=1)] = 12,
    seeds: Annotated[Any, option("N,N,N", "of data, weights and order", parser=options.seeds)] = options.DEMO_SEEDS,
    out: options.OutFolder = Path("runs"),
) -> int:
    """Show on one page whether federated training helps three synthetic hospitals.

    Seven methods over several seeds, in this process. Takes minutes.
    """
    screen.begin(f"demo with seeds {','.join(map(str, seeds))}: loading PyTorch")
    from medsilo.report.study_page import write_demo
    from medsilo.study.demo import HARMONISED, demo_study

    with screen.busy("running the demo") as tell_more:
        study = demo_study(out, rounds, seeds, screen.say)
        tell_more(study.under_way)
        failures = study.run()
    screen.doing("writing the page")
    page = write_demo(study.folder, HARMONISED)
    _say_answer(screen, study.folder, page, "now with your data: medsilo init FOLDER -o study")
    screen.answer(report=page, failures=failures)
    for failure in failures:
        screen.warn(failure)
    return 1 if failures else 0


def run(
    screen: Screen,
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

    Prints a line per site and round; leaves a folder with models, scores and report.html (docs/run-tree.md). With
    --more a finished run goes on from its last round, with all that server and sites remember.
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
    settings = options.settings_of(device, data, site_config, **ALL_MINE)
    screen.say(*(f"caution: {line}" for line in study.cautions(study.participation.sites)))
    _study(screen, study, folder, settings, job=found if engine == "simulator" else None, threads=threads)
    conclude(screen, folder)


def _train_further(
    screen: Screen,
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
    from medsilo.study.judging import run_settings

    longer = Longer(run, more)
    folder = out / (name or f"{run.resolve().name}-to-{longer.plan.rounds}")
    settings = options.settings_of(*given, run_settings(run), **ALL_MINE)
    job = folder / paths.JOB if (run / paths.JOB).is_dir() and engine == "simulator" else None
    longer.begin(folder)
    if job:
        from medsilo.flare.simulator import prepare_longer

        prepare_longer(run, longer.plan, folder)
    told = longer.difference
    screen.say(f"goes on after round {longer.done} of {run}" + (f"; caution: {told}" if told else ""))
    _study(screen, longer.plan, folder, settings, job=job, threads=threads, resumes=True)
    conclude(screen, folder)


def _study(
    screen: Screen,
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
    from medsilo.study.progress import Moment

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


def compare(
    screen: Screen,
    *,
    task: Annotated[str | None, option("TASK", "the task, of 'medsilo list' (default: synthetic-histology)")] = None,
    plan: Annotated[Path | None, typer.Option(help="a plan or a job's folder that the rows change")] = None,
    methods: Annotated[
        list[str],
        several("M,M:KEY=VALUE", "rows: methods, each with changes of its own section: local,fedavg,fedprox:mu=0.1"),
    ],
    row: Annotated[
        list[str],
        several(
            "'TITLE: KEY=VALUE ...'",
            "a row with changes anywhere in the plan: 'slow: algorithm.name=fedavg training.learning_rate=0.001'",
            parser=options.row,
        ),
    ],
    seeds: Annotated[
        Any, option("N,N,N", f"every row runs with each (default: {options.USUAL_SEEDS})", parser=options.seeds)
    ] = None,
    minutes: Annotated[
        float | None,
        option(
            "N",
            "instead of --seeds: as many as fit into this time, estimated from the first; ends earlier once it "
            "is answered whether federated training helps",
            min=0.1,
        ),
    ] = None,
    folds: Annotated[
        int | None,
        option(
            "K",
            "every seed K times, each time with other patients in the test part (default: the task's own parts)",
            min=3,
            max=100,
        ),
    ] = None,
    against: Annotated[str | None, option("ROW", "the row that all are compared with (default: fedavg)")] = None,
    changes: options.Changes,
    out: options.OutFolder = Path("runs/compare"),
    again: Annotated[bool, typer.Option("--again", help="write beside --out if that is there: compare-2")] = False,
    at_once: Annotated[int | None, option("N", "runs side by side (default: 2 if they fit)", min=1)] = None,
    title: Annotated[str, typer.Option(help="of the page")] = "Comparison",
    device: options.Device = None,
    data: options.Data = None,
    site_config: options.SiteConfigs = None,
) -> int:
    """Run methods and seeds on one task and write a table with intervals.

    Every row runs with every seed. Called again, it skips what is finished; a run that fails stops no other. A folder
    with runs of another plan, other settings or another medsilo is refused.
    """
    shown_rows = ", ".join([*methods, *(one.partition(":")[0] for one in row)])
    from medsilo.study.boundaries import MOST

    if seeds and minutes:
        raise MedsiloError("--minutes plans the seeds by itself; leave out --seeds")
    numbers = tuple(range(MOST)) if minutes else seeds or options.seeds(options.USUAL_SEEDS)
    asked_for = f"seeds {','.join(map(str, numbers))}"
    if minutes:
        asked_for = f"as many seeds as have room in {minutes:g} minutes"
    screen.begin(f"comparing {shown_rows or 'methods'} with {asked_for}: reading the rows' plans")
    import os
    from functools import partial

    from medsilo.report.study_page import write_study
    from medsilo.runs.schema import About
    from medsilo.study.compare import Asked, Study, most_at_once
    from medsilo.study.reuse import beside

    out = beside(out) if again else out
    cells = Asked(task, plan, methods, row, numbers, changes, out, folds).all_cells()
    about = About(title=title, machine=f"{os.cpu_count()} CPU cores")
    settings = options.settings_of(device, data, site_config, **ALL_MINE)
    show, side_by_side = partial(write_study, out), at_once or most_at_once()
    study = Study(out, about, cells, against, show, settings, side_by_side, screen.say)
    screen.goes_on = "what is finished is kept, and the same command goes on"
    with screen.busy("comparing") as tell_more:
        tell_more(study.under_way)
        failures = study.run_within(minutes) if minutes else study.run()
    screen.doing("writing the page")
    page = write_study(out)
    verdict = _say_answer(screen, out, page, f"a decision sheet for each hospital: medsilo report {out} --hospitals")
    rows = verdict.as_json()["rows"]
    screen.answer(report=page, verdict=out / paths.VERDICT, failures=failures, rows=rows)
    for failure in failures:
        screen.warn(failure)
    return 1 if failures else 0


def _say_answer(screen: Screen, folder: Path, page: Path, following: str) -> "Verdict":
    """Say what a comparison found, for each hospital its verdict, and the next command; return it."""
    from medsilo.runs.reading import read_verdict
    from medsilo.study.words import verdict_in_words

    verdict = read_verdict(folder)
    screen.say(f"\n{verdict.headline}")
    for site, one in verdict.gains.items():
        screen.say(f"  {site}: {verdict_in_words(one)}")
    if verdict.between and verdict.between != verdict.headline:
        screen.say(verdict.between)
    screen.say(f"\nverdict: {folder / paths.VERDICT}\nreport: {page}\n{following}")
    return verdict


def resume(
    screen: Screen,
    run: Annotated[str, typer.Argument(help="the run's folder; with --kit also the id of the job that ended")],
    *,
    kit: Annotated[Path | None, option("KIT", "your own kit: go on in the consortium, not here")] = None,
    threads: options.Threads = None,
    device: options.DeviceOfRun = None,
    data: options.DataOfRun = None,
    site_config: options.SiteConfigs = None,
) -> None:
    """Go on with a run that stopped, from its last finished round.

    The numbers are those of a run that never stopped. In a consortium: waits as submit does, prints the new id.
    """
    screen.in_lines = True
    if kit:
        screen.note("connecting to the server")
        from medsilo.consortium import lead

        submitted = lead.resume(run, kit, screen.warn)
        screen.say(submitted)
        screen.answer(job=submitted)
        return
    folder = Path(run)
    if not (folder / "plan.yaml").is_file():
        if any(folder.glob("*/plan.yaml")):
            raise MedsiloError(
                f"{run} is a comparison, or a folder of runs; call the same 'medsilo compare ... -o {run}' again, "
                "which goes on with it, or give one of its runs"
            )
        raise MedsiloError(
            f"{run} is no run's folder; give one under runs/, or --kit with the id of a consortium's job"
        )
    screen.begin(f"reading {run}")
    from medsilo.plan import load_plan
    from medsilo.runs.record import Record
    from medsilo.study.judging import run_settings

    Record(folder).check_unfinished()
    plan = load_plan(folder / "plan.yaml")
    settings = options.settings_of(device, data, site_config, run_settings(folder), **ALL_MINE)
    job = folder / paths.JOB  # which a run with --engine inprocess has not
    _study(screen, plan, folder, settings, job=job if job.is_dir() else None, threads=threads, resumes=True)
    conclude(screen, folder)


def conclude(screen: Screen, folder: Path) -> None:
    """Show the table of a run's scores, write its page, and say where it is."""
    from medsilo.report.formats import text_table
    from medsilo.report.page import write
    from medsilo.report.read import read
    from medsilo.runs.reading import read_summary

    screen.doing("writing the report")
    screen.say("\n" + text_table(read(folder)))
    summary = read_summary(folder)
    screen.say(*(f"stands out: {line}" for lines in summary.stands_out.values() for line in lines))
    page = write([folder], folder / paths.REPORT, folder.name)
    screen.say(f"\nreport: {page}")
    screen.answer(run=folder, report=page, summary=summary.as_json())
