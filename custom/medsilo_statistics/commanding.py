"""`medsilo statistics`, and `medsilo.statistics` in Python."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.cli import options
from medsilo.cli.show import Command, Screen
from medsilo.core.errors import MedsiloError

if TYPE_CHECKING:
    from medsilo.site.settings import SiteSettings
    from medsilo_statistics.asked_question import Question
    from medsilo_statistics.found import StatisticsFound

NARROW = 0.05  # half width of the interval of a share, for which a plan's cases are counted
SIZE = {"range": [0, 4096], "step": 1, "unit": "voxels"}


def statistics(
    screen: Screen,
    question: Annotated[
        Path,
        typer.Argument(
            metavar="QUESTION", help="YAML file with what is asked; or a job's folder: who has how many cases"
        ),
    ],
    hospitals: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDERS", help="hospitals on this machine: a folder each, with medsilo.yaml or cases.csv"
        ),
    ] = None,
    *,
    kit: Annotated[Path | None, typer.Option(metavar="KIT", help=options.OWN_KIT)] = None,
    local: options.SiteConfig = None,
    engine: options.Engine = "inprocess",
    out: options.OutFolder,
) -> int:
    """Ask hospitals for counts, Table 1, survival curves and regressions: of sums alone, sealed for three or more.

    With --kit all hospitals that the question names are asked by a job, else those whose folders are given. Written
    are report.html, answers.json, and each table as CSV and LaTeX.
    """
    from medsilo_statistics.showing import TABLE_ONE, needed, tables, write_all

    asked = question_at(question)
    if (kit is not None) + bool(hospitals) + (local is not None) != 1:
        raise MedsiloError("whom to ask? Give hospitals' folders on this machine, or --kit for a consortium's")
    if kit and not asked.sites:
        raise MedsiloError("the question names no hospitals, and they agree on whose sums are added; set sites in it")
    with screen.busy("asking"):
        if kit:
            from medsilo.consortium import lead

            found = _read(lead.inquire(asked.job, asked.in_yaml(), kit, out, screen.say))
        elif local:  # as 'medsilo init' writes settings
            settings = options.settings_of(None, None, local)
            found = asked_here(asked, {site: settings.of(site) for site in asked.sites}, out, engine)
        else:
            found = asked_here(asked, _in_folders(hospitals or []), out, engine)
    for path in (written := write_all(found, out)):
        screen.note(f"written: {path}")
    for remark in found.remarks:
        screen.warn(remark)
    for first in (own for own in tables(found) if own.name == TABLE_ONE):
        widths = [max(map(len, column)) for column in zip(first.heads, *first.rows, strict=True)]
        for row in (first.heads, *first.rows):
            screen.say("  ".join(map(str.ljust, row, widths)).rstrip())
    for line in needed(found):
        screen.say(line)
    kind = "sealed" if found.sealed else "in clear"
    screen.say(f"{len(found.sites)} hospitals, {kind}; the page: {out / 'report.html'}")
    screen.answer(files=[str(path) for path in written], sites=found.sites, remarks=found.remarks)
    return 0


def question_at(path: Path) -> "Question":
    """Return the question of a file; or of a job's folder, who has how many cases of what its plan learns."""
    from medsilo.flare.jobs import plan_of
    from medsilo_statistics.asked_question import Question, read_question

    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return read_question(path)
    plan = plan_of(path)
    task = plan.task
    if task.deals:
        raise MedsiloError("the plan deals one table to hospitals, which is for trying out; ask each hospital's own")
    levels = list(getattr(task, "counted", task.goal.label_names))
    counted = "label" if task.goal.classifies or not task.goal.by_case else "size_x"  # those of survival are events
    values = {
        "title": f"Cases for {plan.algorithm.title}, task {task.name}",
        "sites": list(plan.participation.sites),
        "task": task.model_dump(mode="json"),
        "variables": {counted: {"levels": levels} if counted == "label" else SIZE},
        "table": [counted],
        "by_hospital": True,
        "wanted": {"label": NARROW} if counted == "label" else {},
    }
    return Question.from_values(values, "the plan's question")


def _read(files: Sequence[Path]) -> "StatisticsFound":
    from medsilo_statistics.found import StatisticsFound

    (file,) = files
    return StatisticsFound.received(json.loads(file.read_text("utf-8")))


def _in_folders(folders: Sequence[Path]) -> dict[str, "SiteSettings"]:
    """Return the settings of hospitals whose folders these are: its medsilo.yaml, or its table alone."""
    from medsilo.site.settings import SiteSettings
    from medsilo.tasks.sources import DataSource

    if len({folder.resolve().name for folder in folders}) < len(folders):
        raise MedsiloError("two folders have the same name, which is the hospital's; rename one")
    settings = {}
    for folder in folders:
        own = SiteSettings.read(folder) if (folder / SiteSettings.FILE).is_file() else SiteSettings(public_data=True)
        data = own.data or DataSource(folder=Path())
        local = data.model_copy(update={"folder": (folder / data.folder).resolve()})
        settings[folder.resolve().name] = own.model_copy(update={"data": local, "approval": "none"})
    return settings


def asked_here(
    question: "Question", settings: Mapping[str, "SiteSettings"], out: Path, engine: str = "inprocess"
) -> "StatisticsFound":
    """Ask hospitals whose data are on this machine."""
    from medsilo.flare.inquiry_job import ask_in_simulator
    from medsilo_statistics.asking_hospitals import FILE, INQUIRY
    from medsilo_statistics.found import StatisticsFound

    kept = out / "inquiry" / question.hash[:12]
    if engine == "simulator":
        return _read(ask_in_simulator(question.job, question.in_yaml(), settings, kept))
    found = INQUIRY.here(question, settings, kept)[FILE]
    assert isinstance(found, StatisticsFound)
    return found


def in_python(
    question: Mapping[str, Any] | Path | str, hospitals: Sequence[Path | str], *, folder: Path | str | None = None
) -> "StatisticsFound":
    """Ask hospitals whose folders are on this machine, and return the answer; with `folder` its page is written there.

    question: a dictionary, or a YAML file.
    """
    from medsilo_statistics.asked_question import Question, read_question
    from medsilo_statistics.showing import write_all

    own = (
        Question.from_values(question, "the question")
        if isinstance(question, Mapping)
        else read_question(Path(question))
    )
    with TemporaryDirectory(prefix="medsilo-") as kept:
        found = asked_here(own, _in_folders([Path(one) for one in hospitals]), Path(folder or kept))
        if folder:
            write_all(found, Path(folder))
    return found


STATISTICS = Command(statistics, "question.yaml --kit KIT -o answer", "For a consortium's lead")
