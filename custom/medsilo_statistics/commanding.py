"""`medsilo statistics`, and `medsilo.statistics` in Python."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.extend import Command, MedsiloError, Screen, options

if TYPE_CHECKING:
    from medsilo_statistics.asked_question import Question
    from medsilo_statistics.found import StatisticsFound


def statistics(
    screen: Screen,
    question: Annotated[Path, typer.Argument(metavar="QUESTION", help="YAML file with variables and what is asked")],
    hospitals: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDERS", help="hospitals on this machine: a folder each, with medsilo.yaml or cases.csv"
        ),
    ] = None,
    *,
    kit: Annotated[Path | None, typer.Option(metavar="KIT", help=options.OWN_KIT)] = None,
    out: Annotated[
        Path, typer.Option(*options.OUT, metavar="FOLDER", parser=options.output_folder, help="folder for the answer")
    ],
) -> int:
    """Ask hospitals for counts, Table 1, survival curves and regressions: of sums alone, sealed for three or more.

    With --kit all hospitals that the question names are asked by a job, else those whose folders are given. Written
    are report.html, answers.json, and each table as CSV and LaTeX.
    """
    from medsilo_statistics.asked_question import read_question
    from medsilo_statistics.showing import write_all

    asked = read_question(question)
    if (kit is None) == (not hospitals):
        raise MedsiloError("whom to ask? Give hospitals' folders on this machine, or --kit for a consortium's")
    with screen.busy("asking"):
        found = submitted(asked, kit, out, screen) if kit else of_folders(asked, hospitals or [], out)
    for path in (written := write_all(found, out)):
        screen.note(f"written: {path}")
    for remark in found.remarks:
        screen.warn(remark)
    screen.say(
        f"{len(found.sites)} hospitals, {'sealed' if found.sealed else 'in clear'}; the page: {out / 'report.html'}"
    )
    screen.answer(files=[str(path) for path in written], sites=found.sites, remarks=found.remarks)
    return 0


def submitted(question: "Question", kit: Path, out: Path, screen: Screen) -> "StatisticsFound":
    """Have the hospitals of a consortium asked by a job."""
    from medsilo.extend import lead
    from medsilo_statistics.asked_question import ENOUGH
    from medsilo_statistics.asking_hospitals import FILE
    from medsilo_statistics.found import StatisticsFound

    if not question.sites:
        raise MedsiloError("the question names no hospitals, and they agree on whose sums are added; set sites in it")
    name = "statistics-sealed" if len(question.sites) >= ENOUGH else "statistics"
    (file,) = (path for path in lead.inquire(name, question.in_yaml(), kit, out, screen.say) if path.name == FILE)
    return StatisticsFound.read(json.loads(file.read_text("utf-8")))


def of_folders(question: "Question", folders: Sequence[Path], out: Path) -> "StatisticsFound":
    """Ask hospitals whose folders are on this machine: each with its medsilo.yaml, or with its table alone."""
    from medsilo.extend import FILE_NAME, DataSource, SiteSettings, read_settings
    from medsilo_statistics.asking_hospitals import FILE, INQUIRY
    from medsilo_statistics.found import StatisticsFound

    if len({folder.resolve().name for folder in folders}) < len(folders):
        raise MedsiloError("two folders have the same name, which is the hospital's; rename one")
    settings = {}
    for folder in folders:
        own = read_settings(folder) if (folder / FILE_NAME).is_file() else SiteSettings(public_data=True)
        data = own.data or DataSource(folder=folder)
        local = data.model_copy(update={"folder": (folder / data.folder).resolve()}) if own.data else data
        settings[folder.resolve().name] = own.model_copy(update={"data": local, "approval": "none"})
    found = INQUIRY.here(question, settings, out / "inquiry" / question.hash[:12])[FILE]
    assert isinstance(found, StatisticsFound)
    return found


def in_python(
    question: Mapping[str, Any] | Path | str, hospitals: Sequence[Path | str], *, folder: Path | str | None = None
) -> "StatisticsFound":
    """Ask hospitals whose folders are on this machine, and return the answer; with `folder` its page is written there.

    question: a dictionary, or a YAML file.
    """
    from medsilo_statistics.asked_question import make_question, read_question
    from medsilo_statistics.showing import write_all

    own = make_question(question, "the question") if isinstance(question, Mapping) else read_question(Path(question))
    with TemporaryDirectory(prefix="medsilo-") as kept:
        found = of_folders(own, [Path(one) for one in hospitals], Path(folder or kept))
        if folder:
            write_all(found, Path(folder))
    return found


STATISTICS = Command(statistics, "question.yaml --kit KIT -o answer", "For a consortium's lead")
