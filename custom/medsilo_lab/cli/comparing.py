"""Commands that run or continue comparisons on one machine: demo, compare, resume."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.cli import completion, options
from medsilo.cli.options import option, several
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo_lab.cli.running import conclude, run_study
from medsilo_lab.comparison import USUAL_SEEDS

if TYPE_CHECKING:
    from medsilo_lab.study.verdict_file import Verdict


def row_of(value: object) -> str:
    if "=" not in str(value).partition(": ")[2]:
        raise ValueError(f"{str(value)!r} is not 'TITLE: KEY=VALUE ...', like 'slow: training.learning_rate=0.001'")
    return str(value)


USUAL_TASK = "synthetic-histology"
SEEDS, DEMO_SEEDS = ",".join(map(str, USUAL_SEEDS)), "0,1,2,3,4,5"


def seeds_of(value: object) -> tuple[int, ...]:
    """Parse a list of different numbers that are separated by commas, such as 0,1,2."""
    parts = str(value).split(",")
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"{str(value)!r} is not a list of different numbers, like 0,1,2")
    return tuple(map(int, parts))


def demo(
    screen: Console,
    *,
    rounds: Annotated[int, option("N", "number of rounds of each run", min=1)] = 12,
    seeds: Annotated[
        Any, option("N,N,N", "seeds of the random numbers for data, weights and order of cases", parser=seeds_of)
    ] = DEMO_SEEDS,
    out: options.OutFolder = Path("runs"),
) -> int:
    """Compare single-site, federated and centralised training of three synthetic hospitals, on one page.

    Runs seven methods with several seeds in this process, which takes minutes.
    """
    screen.begin(f"demo with seeds {','.join(map(str, seeds))}: loading PyTorch")
    from medsilo_lab.comparison.demo import HARMONISED, demo_study
    from medsilo_lab.report.study_page import write_demo

    with screen.busy("running the demo") as tell_more:
        study = demo_study(out, rounds, seeds, screen.say)
        if screen.watched:  # a progress bar needs a terminal; in other outputs, each run prints a line
            study.each = lambda line: None
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
    task: Annotated[str | None, option("TASK", f"a task that 'medsilo list' shows (default: {USUAL_TASK})")] = None,
    plan: Annotated[
        Path | None, option("PLAN", "plan or job folder that all rows change (default: medsilo's default plan)")
    ] = None,
    methods: Annotated[
        list[str],
        several(
            "M,M:KEY=VALUE",
            "methods to compare, each with optional values of its keys: local,fedavg,fedprox:mu=0.1",
            autocompletion=completion.methods,
        ),
    ],
    row: Annotated[
        list[str],
        several(
            "'TITLE: KEY=VALUE ...'",
            "one more row of the table, with any changes of the plan: 'slow: algorithm.name=fedavg "
            "training.learning_rate=0.001'",
            parser=row_of,
        ),
    ],
    seeds: Annotated[Any, option("N,N,N", "run every method with each of these seeds", parser=seeds_of)] = SEEDS,
    folds: Annotated[
        int | None,
        option(
            "K",
            "cross-validation: run every seed K times, each time with other test patients (default: the task's usual "
            "split)",
            min=3,
            max=100,
        ),
    ] = None,
    baseline: Annotated[
        str | None, option("ROW", "the method or row with which all others are compared (default: fedavg)")
    ] = None,
    changes: options.Changes,
    out: options.OutFolder = Path("runs/compare"),
    again: Annotated[
        bool,
        typer.Option(
            "--again", help=("if the folder --out exists, write into a new folder beside it, such as compare-2")
        ),
    ] = False,
    power: Annotated[
        bool,
        typer.Option(
            "--power",
            help=(
                "do not train: estimate which differences these hospitals can detect, and how many patients or "
                "repetitions smaller differences need"
            ),
        ),
    ] = False,
    difference: Annotated[
        float | None,
        option(
            "POINTS",
            "with --power: estimate how many patients or repetitions this difference needs",
            min=0.1,
            max=99,
        ),
    ] = None,
    at_once: Annotated[
        int | None, option("N", "number of runs at the same time (default: 2 if this machine can hold two)", min=1)
    ] = None,
    device: options.Device = None,
    data: options.Data = None,
    settings_folder: options.SettingsOfSites = None,
    live: options.Live = False,
    tensorboard: options.TensorBoard = False,
) -> int:
    """Run several methods with several seeds on one task, and write a table of scores with intervals.

    Every method runs with every seed, and a failed run does not stop the others. If you repeat the command, it skips
    finished runs. The command rejects a folder with runs of another plan, other settings or another version of medsilo.
    With --power, it only estimates which differences the hospitals can detect, from the scores in --out or from
    assumptions.
    """
    # a configuration with a title sets the method, and may change every key of the plan
    known: dict[str, Any] = {"algorithm": None}
    known |= {"task": {"name": task or USUAL_TASK}, "network": None} if task or not plan else {}
    options.check_changes(changes, plan, **(known | dict.fromkeys(("task", "network")) if row else known))
    if difference is not None and not power:
        raise MedsiloError("--difference: this option needs the option --power; give both")
    if tensorboard:
        from medsilo_lab.engines.tensorboard import check_installed

        check_installed()
    share = None if difference is None else difference / 100
    if power and (out / paths.VERDICT).is_file():
        screen.begin(f"reading {out}")
        return _say_power(screen, share, out)
    shown_rows = ", ".join([*methods, *(one.partition(":")[0] for one in row)])
    shown_seeds = ",".join(map(str, seeds))
    screen.begin(f"comparing {shown_rows or 'methods'} with seeds {shown_seeds}: reading the rows' plans")
    screen.goes_on = "what is finished is kept, and the same command goes on"
    import os
    from functools import partial

    from medsilo_lab.comparison.compare import Asked, Study, most_at_once
    from medsilo_lab.comparison.reuse import beside
    from medsilo_lab.report.study_page import write_study
    from medsilo_lab.study.verdict_file import About

    out = beside(out) if again and not power else out
    cells = Asked(task, plan, methods, row, seeds, changes, out, folds).all_cells()
    about = About(title=cells[0].plan.study.title or "Comparison", machine=f"{os.cpu_count()} CPU cores")
    settings = options.settings_of_owner(device, data, settings_folder)
    if power:
        screen.doing("counting test patients")
        from medsilo_lab.study.planner import tested

        return _say_power(screen, share, patients=tested(cells, settings), seeds=len(seeds))
    show, side_by_side = partial(write_study, out), at_once or most_at_once()
    study = Study(out, about, cells, baseline, show, settings, side_by_side, screen.say, tensorboard=tensorboard)
    with ExitStack() as within:
        if live:
            from medsilo_lab.report.live import shown_live

            within.enter_context(shown_live(out, about.title, screen.say))
        tell_more = within.enter_context(screen.busy("comparing"))
        tell_more(study.under_way)
        failures = study.run()
    screen.doing("writing the page")
    page = write_study(out)
    verdict = _say_answer(screen, out, page, f"a decision sheet for each hospital: medsilo report {out} --hospitals")
    told = verdict.as_json()
    told = {"rows": told["rows"], "warnings": told["warnings"]}
    screen.answer(report=page, verdict=out / paths.VERDICT, failures=failures, **told)
    for failure in failures:
        screen.warn(failure)
    return 1 if failures else 0


def _say_power(
    screen: Console,
    difference: float | None,
    folder: Path | None = None,
    patients: dict[str, int] | None = None,
    seeds: int = 0,
) -> int:
    from medsilo_lab.study import planner
    from medsilo_lab.study.words import LITTLE

    difference = LITTLE if difference is None else difference
    found = planner.after(folder, difference) if folder else planner.before(patients or {}, seeds, difference)
    screen.say(*planner.told(found, folder))
    screen.answer(power=[one.as_json() for one in found])
    return 0


def _say_answer(screen: Console, folder: Path, page: Path, following: str) -> "Verdict":
    from medsilo_lab.study.verdict_file import read_verdict
    from medsilo_lab.study.words import verdict_in_words

    verdict = read_verdict(folder)
    screen.say(f"\n{verdict.headline}")
    for site, hospital in verdict.hospitals.items():
        screen.say(f"  {site}: {verdict_in_words(hospital)}")
    if verdict.between and verdict.between != verdict.headline:
        screen.say(verdict.between)
    screen.say(*verdict.other_networks)
    # failed runs are printed at the end and not among the warnings
    screen.say(*(f"warning: {warning}" for warning in verdict.warnings if warning.kind != "failed"))
    screen.say(f"\nverdict: {folder / paths.VERDICT}\nreport: {page}\n{following}")
    return verdict


def resume(
    screen: Console,
    run: Annotated[str, typer.Argument(help="the run folder; or, with --kit, the id of the ended job")],
    *,
    kit: Annotated[Path | None, option("KIT", "your own kit: continue in the consortium, not on this machine")] = None,
    threads: options.Threads = None,
    device: options.DeviceOfRun = None,
    data: options.DataOfRun = None,
    settings_folder: options.SettingsOfSites = None,
) -> None:
    """Continue a stopped run after its last finished round.

    The result equals that of an uninterrupted run. With --kit, the study continues as a new job, whose id the command
    prints when the hospitals have joined.
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
                f"{run} is a comparison, or a folder of runs; repeat the command 'medsilo compare ... -o {run}' to "
                "continue the comparison, or give the folder of a run"
            )
        raise MedsiloError(
            f"{run} is not a run folder; give a folder under runs/, or --kit with the id of a consortium's job"
        )
    screen.begin(f"reading {run}")
    from medsilo.plan import load_plan
    from medsilo_server.record import Record

    Record(folder).check_unfinished()
    plan = load_plan(folder / "plan.yaml")
    settings = options.settings_of_owner(device, data, settings_folder, options.run_settings(folder))
    job = folder / paths.JOB
    run_study(screen, plan, folder, settings, job=job if job.is_dir() else None, threads=threads, resumes=True)
    conclude(screen, folder)


DEMO = Command(demo, "--seeds 0,1,2,3", "To begin with")
COMPARE = Command(
    compare, "--methods local,fedavg,harmofl --seeds 0,1,2,3 --set training.rounds=10", "With all data on one machine"
)
RESUME = Command(resume, "runs/fedavg-synthetic-histology-20261120-120000", "With all data on one machine")
