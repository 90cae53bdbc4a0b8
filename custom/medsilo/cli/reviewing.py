"""Commands that say what there is and what leaves, before anything runs: list, leak-report."""

from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from medsilo.cli import options
from medsilo.cli.given_settings import folder_of_settings
from medsilo.cli.show import Screen
from medsilo.core.errors import MedsiloError


def leak_report(
    screen: Screen,
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            help="a job's folder, the name of a job in ./jobs, or the file of a question; with --out several jobs "
            "(default: all in ./jobs)",
            autocompletion=options.complete_job,
        ),
    ] = None,
    *,
    plan: options.PlanFile = None,
    changes: options.Changes,
    data: options.Data = None,
    kit: options.SiteKit = None,
    local: options.SiteConfig = None,
    out: Annotated[
        Path | None,
        typer.Option(
            *options.OUT,
            metavar="FOLDER",
            parser=options.output_folder,
            help="write the reports, with what is installed and who sends what to whom",
        ),
    ] = None,
) -> int:
    """Say what leaves a site under a job, before anything runs; with --out all that a review asks for.

    Every group of tensors with its bytes, every number that is told, and what can be done about each. With --out a
    folder for a data protection officer: index.html shows who sends what to whom, and what is installed; beside it lie
    the leak reports and the list of packages (SBOM). docs/privacy.md has the promises, and their tests.
    """
    if out:
        if data or local or kit:
            raise MedsiloError("--data, --kit and --settings belong to a report that is printed; leave --out out")
        return _write_evidence(screen, out, jobs or [], changes, plan)
    if len(jobs or []) != 1:
        raise MedsiloError("which job? give one, or --out with a folder for the reports of several")
    if data and not data.is_dir():
        raise MedsiloError("there is no such data folder; correct --data", str(data))
    if (question := Path((jobs or [""])[0])).is_file():
        return _print_question(screen, question)
    return _print(screen, (jobs or [""])[0], changes, plan, data, folder_of_settings(local, kit))


def _print_question(screen: Screen, file: Path) -> int:
    from medsilo.registry import INQUIRIES

    told = [own for own in (INQUIRIES[name] for name in INQUIRIES) if own.leaves and not own.sealed]
    for inquiry in told:
        question = inquiry.read(file)
        lines = [
            f"What leaves a hospital under the question {file.name} ({question.hash[:12]})",
            *inquiry.leaves(question),
        ]
        for line in lines:
            screen.say(line)
        screen.answer(question=question.hash, lines=lines)
        return 0
    raise MedsiloError(f"{file} is no job but a file; give the job's folder, and a plan with --plan")


def _print(
    screen: Screen, job: str, changes: list[str], plan: Path | None, data: Path | None, local: Path | None
) -> int:
    screen.note("reading the plan")
    import dataclasses

    from medsilo.check.leaks import averages_images, describe, leaks
    from medsilo.federation.protection import read_for
    from medsilo.flare.jobs import find_job, plan_of, stated
    from medsilo.site.policy import Policy, read_policy
    from medsilo.site.settings import SiteSettings, read_settings
    from medsilo.tasks.sources import DataSource

    found, folder = find_job(job), local
    settings = read_settings(folder) if folder else SiteSettings()
    study = plan_of(found, changes, plan, settings.packages) if folder else plan_of(found, changes, plan)
    policy = read_policy(folder, stated(found)[1]) if folder else Policy()
    source = read_for(study, DataSource(folder=data) if data else settings.data)
    images: dict[str, int | str] = {}
    for site in study.participation.sites if averages_images(study) else ():
        try:
            data_of = study.task.site_data(site, study.participation.sites, study.seed, source)
            images[site] = len(data_of.train)  # type: ignore[arg-type]
        except MedsiloError as error:
            images[site] = str(error)
    lines = describe(study, images, settings, policy)
    for line in lines:
        screen.say(line)
    groups = [{**dataclasses.asdict(leak), "leaves": policy.lets_out(leak.group)} for leak in leaks(study)]
    screen.answer(plan=study.hash, groups=groups, images_averaged=images, lines=lines)
    return 0


def _write_evidence(screen: Screen, out: Path, jobs: list[str], changes: list[str], plan: Path | None) -> int:
    screen.note("reading the jobs")
    from medsilo.flare.jobs import JOBS, PLAN, find_job, plan_of
    from medsilo.review import SBOM, write_evidence, write_sbom

    shipped = sorted(path.relative_to(JOBS).parts[0] for path in JOBS.glob(f"*/{PLAN}"))
    plans = {Path(job).name: plan_of(find_job(job), changes, plan) for job in jobs or shipped}
    out.mkdir(parents=True, exist_ok=True)
    with screen.busy("gathering"):
        write_sbom(out / SBOM)
        page = write_evidence(out, plans)
    screen.say(f"evidence: {page}")
    screen.answer(page=page, jobs=list(plans))
    return 0


def list_(screen: Screen) -> int:
    """List the methods, each with its paper and what leaves a hospital, and the tasks, each with its metric.

    A plan names them as algorithm.name and task.name.
    """
    screen.note("loading the methods and tasks")
    from medsilo.check.leaks import leaving
    from medsilo.registry import METHODS, TASKS

    methods = [(name, method.title, method.paper, leaving(method())) for name, method in METHODS.items()]
    width = max(len(paper) for _, _, paper, _ in methods)
    lines = [f"{name:<14} {paper:<{width}} leaves: {leaves}" for name, _, paper, leaves in methods]
    _table(screen, "methods", ("name", "title", "paper", "leaves"), methods, lines)
    screen.say("run central with --engine inprocess, or beside others: medsilo compare --methods central,fedavg")
    tasks = [(name, task.title, _metric_of(task)) for name, task in TASKS.items()]
    lines = [f"{name:<19} {title} ({metric})" for name, title, metric in tasks]
    _table(screen, "tasks", ("name", "title", "metric"), tasks, lines)
    return 0


def _metric_of(task: Any) -> str:
    """Return the metric of a class of tasks, by its goal or the kind of that; else as without a plan."""
    kind = get_type_hints(task.goal.fget)["return"] if isinstance(task.goal, property) else task.goal
    return getattr(kind, "metric", None) or task().goal.metric


def _table(screen: Screen, kind: str, columns: tuple[str, ...], rows: list[tuple], lines: list[str]) -> None:
    screen.table(columns, rows, lines)
    screen.answer(**{kind: [dict(zip(columns, row, strict=True)) for row in rows]})
