"""Commands that say what there is and what leaves, before anything runs: list, leak-report."""

from pathlib import Path
from typing import Any, get_type_hints

from medsilo.cli import options
from medsilo.cli.options import folder_of_settings
from medsilo.cli.show import Screen
from medsilo.core.errors import MedsiloError


def leak_report(
    screen: Screen,
    job: options.Job,
    *,
    plan: options.PlanFile = None,
    changes: options.Changes,
    data: options.Data = None,
    kit: options.SiteKit = None,
    local: options.SiteConfig = None,
) -> int:
    """Say what leaves a site under a job, or a hospital under a question's file, before anything runs.

    Every group of tensors with its bytes, every number that is told, and what can be done about each. docs/privacy.md
    has the promises, and their tests; `medsilo record` writes what a data protection officer files.
    """
    if data and not data.is_dir():
        raise MedsiloError("there is no such data folder; correct --data", str(data))
    if (question := Path(job)).is_file():
        return _print_question(screen, question)
    return _print(screen, job, changes, plan, data, folder_of_settings(local, kit))


def _print_question(screen: Screen, file: Path) -> int:
    from medsilo.registry import INQUIRIES

    (inquiry,) = (own for own in map(INQUIRIES.__getitem__, INQUIRIES) if own.leaves)
    question = inquiry.read(file)
    lines = [f"What leaves a hospital under the question {question.hash[:12]}", "", *inquiry.leaves(question)]
    for line in lines:
        screen.say(line)
    screen.answer(question=question.hash, lines=lines)
    return 0


def _print(
    screen: Screen, job: str, changes: list[str], plan: Path | None, data: Path | None, local: Path | None
) -> int:
    screen.note("reading the plan")
    import dataclasses

    from medsilo.check.leaks import averages_images, describe, leaks
    from medsilo.federation.protection import read_for
    from medsilo.flare.jobs import find_job, plan_of, scope_of
    from medsilo.site.policy import Policy, read_policy
    from medsilo.site.settings import SiteSettings, read_settings
    from medsilo.tasks.sources import DataSource

    found, folder = find_job(job), local
    settings = read_settings(folder) if folder else SiteSettings()
    study = plan_of(found, changes, plan, settings.packages) if folder else plan_of(found, changes, plan)
    policy = read_policy(folder, scope_of(found)) if folder else Policy()
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
    for line in lines:
        screen.say(line)
    screen.answer(**{kind: [dict(zip(columns, row, strict=True)) for row in rows]})
