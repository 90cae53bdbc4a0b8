"""Make nnU-Net's plans for data in several hospitals: each hospital measures its data, and the lead makes the plans."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.extend import Command, Console, MedsiloError
from medsilo_nnunet import PLANNERS

if TYPE_CHECKING:
    from medsilo_nnunet.fingerprint import MeasuredSite
    from medsilo_nnunet.question import SegmentationQuestion

QuestionFile = Annotated[
    Path, typer.Argument(metavar="QUESTION", help="the study's YAML file with name, channels and labels")
]
PlannerName = Annotated[str, typer.Option(metavar="NAME", help=f"nnU-Net's planner: {', '.join(PLANNERS)}")]


def measure(
    screen: Console,
    question: QuestionFile,
    *,
    cases: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="number of training cases in all hospitals together")
    ],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="folder of this hospital's data (default: the folder in its settings)"),
    ] = None,
    local: Annotated[
        Path | None,
        typer.Option("--settings", metavar="FOLDER", help="a hospital's folder local/ with its medsilo.yaml"),
    ] = None,
    out: Command.OutFile,
) -> int:
    """Measure a hospital's data for nnU-Net's plans, and write the counts that leave the hospital into a file.

    The file contains nothing else. 'medsilo docs research/nnunet' explains each number.
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


def plan(
    screen: Console,
    question: QuestionFile,
    sent: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="the hospitals' files; the name of each file is the hospital's name"),
    ],
    *,
    planner: PlannerName = PLANNERS[0],
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GB",
            min=0.1,
            help="GPU memory to plan for (default: the planner's standard, or that of the smallest hospital if it "
            "is less)",
        ),
    ] = None,
    out: Command.OutFile,
) -> int:
    """Make nnU-Net's plans from the hospitals' files, as nnU-Net would make them if all data were in one place.

    The exit code is 1 if a hospital's GPU has less memory than --memory.
    """
    screen.note("reading nnU-Net")
    from medsilo.extend import files
    from medsilo_nnunet.fingerprint import Fingerprint
    from medsilo_nnunet.planning import make_plans, unsure_keys
    from medsilo_nnunet.question import read_question

    asked = read_question(question)
    sites: dict[str, MeasuredSite] = {}
    for path in sent:
        if path.stem in sites:
            raise MedsiloError("two files belong to the same hospital; give each file once")
        sites[path.stem] = _read(path, asked)
    told = [one.fingerprint for one in sites.values()]
    whole = Fingerprint.merged(told)
    with screen.busy("planning"):
        made = make_plans(asked, whole, sites, planner, memory)
        unsure = unsure_keys(made.plans, told, lambda own: make_plans(asked, own, sites, planner, memory).plans)
    files.write_json(out, made.plans)
    screen.say(f"plans: {out}, of {whole.cases} cases of {len(sites)} hospitals, for {made.memory:g} GB")
    screen.answer(plans=out, cases=whole.cases, memory=made.memory, too_small=list(made.too_small), unsure=unsure)
    if unsure:
        screen.warn(f"each number covers several cases, so that exact ones might change {', '.join(unsure)}")
    if made.too_small:
        screen.warn(
            f"hospitals with less memory: {', '.join(made.too_small)}; give a smaller --memory, or go on without"
        )
    return 1 if made.too_small else 0


def _read(path: Path, asked: "SegmentationQuestion") -> "MeasuredSite":
    import json

    from medsilo.extend import Refused, files
    from medsilo_nnunet.fingerprint import MeasuredSite

    try:
        sent = MeasuredSite.received(json.loads(files.read_bounded(path, LARGEST)))
        sent.check(asked)
        return sent
    except Refused as error:
        raise MedsiloError(f"{path.name}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        told = f"{path.name} can't be read ({type(error).__name__}); give a file that medsilo nnunet measure wrote"
        raise MedsiloError(told) from error


LARGEST = 1 << 30
PEOPLE, OF = "For a consortium's lead", "nnunet"
MEASURE = Command(measure, "question.yaml --data DATA --cases 110 -o st-anna.json", PEOPLE, OF)
PLAN = Command(plan, "question.yaml st-anna.json north.json -o plans.json", PEOPLE, OF)
