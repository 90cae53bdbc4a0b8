"""Make nnU-Net's plans for data in several hospitals: each hospital measures its data, and the lead makes the plans."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.extend import Command, Console, MedsiloError

QuestionFile = Annotated[
    Path, typer.Argument(metavar="QUESTION", help="the study's YAML file with name, channels and labels")
]


def measure(
    screen: Console,
    question: QuestionFile,
    *,
    cases: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="number of training cases in all hospitals together")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="folder of this hospital's data (default: the folder that the hospital's settings name)",
        ),
    ] = None,
    local: Annotated[
        Path | None,
        typer.Option("--settings", metavar="FOLDER", help="a hospital's folder local/ with its medsilo.yaml"),
    ] = None,
    out: Command.OutFile,
) -> int:
    """Measure a hospital's data for nnU-Net's plans, and write the counts for the lead into a file.

    Only the numbers in this file leave the hospital. 'medsilo docs research/nnunet' explains each of them.
    """
    screen.note("reading nnU-Net")
    from medsilo.extend import DataSource, files
    from medsilo_nnunet.fingerprint import measured, memory_of
    from medsilo_nnunet.nnunet_files import RawData
    from medsilo_nnunet.question import read_question

    asked, settings = read_question(question), Command.settings(local)
    source = DataSource(folder=data) if data else settings.data
    if source is None:
        raise MedsiloError("no data folder is given; give --data, or set 'data' in medsilo.yaml and give --settings")
    least = settings.count_unit(synthetic=False)
    found = RawData.of(source.folder, asked, source)
    with screen.busy("measuring"):
        own = measured(found, asked, cases, least, memory_of(settings.compute().device))
    files.write_json(out, own.model_dump(mode="json"))
    bins = sum(len(channel.values) for channel in own.fingerprint.channels)
    screen.say(f"cases: {own.fingerprint.cases}, each number of {least} or more; bins of intensities: {bins}")
    for problem in found.listing.problems:
        screen.note(problem.counted)
    screen.say(f"for the lead: {out}")
    screen.answer(file=out, cases=own.fingerprint.cases, least=least, bins=bins)
    return 0


PEOPLE, OF = "For a consortium's lead", "nnunet"
MEASURE = Command(measure, "question.yaml --data DATA --cases 110 -o st-anna.json", PEOPLE, OF)
