"""Commands that compare methods on one machine, and that go on with what stopped: demo, compare, resume."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.cli import options
from medsilo.cli.options import option, several
from medsilo.cli.running import conclude, run_study
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.runs import paths

if TYPE_CHECKING:
    from medsilo_lab.study.verdict_file import Verdict


def row_of(value: object) -> str:
    """Return a row: its title and changes of the plan."""
    if "=" not in str(value).partition(": ")[2]:
        raise ValueError(f"{str(value)!r} is not 'TITLE: KEY=VALUE ...', like 'slow: training.learning_rate=0.001'")
    return str(value)


USUAL_SEEDS, DEMO_SEEDS = "0,1,2,3", "0,1,2,3,4,5"


def seeds_of(value: object) -> tuple[int, ...]:
    """Return the different numbers of a list like 0,1,2."""
    parts = str(value).split(",")
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"{str(value)!r} is not a list of different numbers, like 0,1,2")
    return tuple(map(int, parts))


def demo(
    screen: Console,
    *,
    rounds: Annotated[int, option("N", "of each study", min=1)] = 12,
    seeds: Annotated[Any, option("N,N,N", "seeds of data, weights and order", parser=seeds_of)] = DEMO_SEEDS,
    out: options.OutFolder = Path("runs"),
) -> int:
    """Show on one page whether federated training helps three synthetic hospitals.

    Seven methods over several seeds, in this process. Takes minutes.
    """
    screen.begin(f"demo with seeds {','.join(map(str, seeds))}: loading PyTorch")
    from medsilo_lab.report.study_page import write_demo
    from medsilo_lab.study.demo import HARMONISED, demo_study

    with screen.busy("running the demo") as tell_more:
        study = demo_study(out, rounds, seeds, screen.say)
        screen.goes_on = f"finished runs are in {study.folder}; the same command starts again"
        tell_more(study.under_way)
        failures = study.run()
    screen.doing("writing the page")
    page = write_demo(study.folder, HARMONISED)
    _say_answer(screen, study.folder, page, "now with your data: medsilo init FOLDER -o study")
    screen.answer(report=page, failures=failures)
    for failure in failures:
        screen.warn(failure)
    return 1 if failures else 0


def compare(
    screen: Console,
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
            parser=row_of,
        ),
    ],
    seeds: Annotated[Any, option("N,N,N", "every row runs with each", parser=seeds_of)] = USUAL_SEEDS,
    folds: Annotated[
        int | None,
        option(
            "K",
            "run every seed K times, each time with other test patients (default: the task's own parts)",
            min=3,
            max=100,
        ),
    ] = None,
    baseline: Annotated[
        str | None, option("ROW", "the configuration that all others are compared with (default: fedavg)")
    ] = None,
    changes: options.Changes,
    out: options.OutFolder = Path("runs/compare"),
    again: Annotated[bool, typer.Option("--again", help="if --out exists, write beside it: compare-2")] = False,
    at_once: Annotated[int | None, option("N", "runs side by side (default: 2 if they fit)", min=1)] = None,
    device: options.Device = None,
    data: options.Data = None,
    site_config: options.SiteConfigs = None,
) -> int:
    """Run methods and seeds on one task and write a table with intervals.

    Every row runs with every seed. Called again, it skips what is finished; a run that fails stops no other. The
    command rejects a folder with runs of another plan, other settings or another medsilo.
    """
    shown_rows = ", ".join([*methods, *(one.partition(":")[0] for one in row)])
    shown_seeds = ",".join(map(str, seeds))
    screen.begin(f"comparing {shown_rows or 'methods'} with seeds {shown_seeds}: reading the rows' plans")
    screen.goes_on = "what is finished is kept, and the same command goes on"
    import os
    from functools import partial

    from medsilo_lab.report.study_page import write_study
    from medsilo_lab.study.compare import Asked, Study, most_at_once
    from medsilo_lab.study.reuse import beside
    from medsilo_lab.study.verdict_file import About

    out = beside(out) if again else out
    cells = Asked(task, plan, methods, row, seeds, changes, out, folds).all_cells()
    about = About(title=cells[0].plan.study.title or "Comparison", machine=f"{os.cpu_count()} CPU cores")
    settings = options.settings_of_owner(device, data, site_config)
    show, side_by_side = partial(write_study, out), at_once or most_at_once()
    study = Study(out, about, cells, baseline, show, settings, side_by_side, screen.say)
    with screen.busy("comparing") as tell_more:
        tell_more(study.under_way)
        failures = study.run()
    screen.doing("writing the page")
    page = write_study(out)
    verdict = _say_answer(screen, out, page, f"a decision sheet for each hospital: medsilo report {out} --hospitals")
    rows = verdict.as_json()["rows"]
    screen.answer(report=page, verdict=out / paths.VERDICT, failures=failures, rows=rows)
    for failure in failures:
        screen.warn(failure)
    return 1 if failures else 0


def _say_answer(screen: Console, folder: Path, page: Path, following: str) -> "Verdict":
    """Say what a comparison found, for each hospital its verdict, and the next command; return it."""
    from medsilo_lab.study.verdict_file import read_verdict
    from medsilo_lab.study.words import verdict_in_words

    verdict = read_verdict(folder)
    screen.say(f"\n{verdict.headline}")
    for site, one in verdict.gains.items():
        screen.say(f"  {site}: {verdict_in_words(one)}")
    if verdict.between and verdict.between != verdict.headline:
        screen.say(verdict.between)
    screen.say(*verdict.other_networks)
    screen.say(f"\nverdict: {folder / paths.VERDICT}\nreport: {page}\n{following}")
    return verdict


def resume(
    screen: Console,
    run: Annotated[str, typer.Argument(help="the run's folder; with --kit also the id of the job that ended")],
    *,
    kit: Annotated[Path | None, option("KIT", "your own kit: continue in the consortium, not on this machine")] = None,
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
        from medsilo_lab.consortium import lead

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

    Record(folder).check_unfinished()
    plan = load_plan(folder / "plan.yaml")
    settings = options.settings_of_owner(device, data, site_config, options.run_settings(folder))
    job = folder / paths.JOB  # which a run with --engine inprocess has not
    run_study(screen, plan, folder, settings, job=job if job.is_dir() else None, threads=threads, resumes=True)
    conclude(screen, folder)


DEMO = Command(demo, "--seeds 0,1,2,3", "To begin with")
COMPARE = Command(
    compare, "--methods local,fedavg,harmofl --seeds 0,1,2,3 --set training.rounds=10", "With all data on one machine"
)
RESUME = Command(resume, "runs/fedavg-synthetic-histology-20261120-120000", "With all data on one machine")
