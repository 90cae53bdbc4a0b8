"""The command 'nnunet plan', by which a lead makes nnU-Net's plans from the hospitals' measurements."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli.show import Command, Console
from medsilo.core import files
from medsilo.core.errors import MedsiloError, Refused
from medsilo_nnunet import PLANNERS
from medsilo_nnunet.nnunet_plans import OF, PEOPLE, QuestionFile

if TYPE_CHECKING:
    from medsilo_nnunet.fingerprint import MeasuredSite
    from medsilo_nnunet.question import SegmentationQuestion

LARGEST = 1 << 30
PlannerName = Annotated[str, typer.Option(metavar="NAME", help=f"nnU-Net's planner: {', '.join(PLANNERS)}")]


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
            help="GPU memory to plan for (default: the planner's standard, or a hospital's smallest GPU memory if it "
            "is less)",
        ),
    ] = None,
    out: Command.OutFile,
) -> int:
    """Make nnU-Net's plans from the hospitals' files, as nnU-Net would make them if all data were in one place.

    The exit code is 1 if a hospital's GPU has less memory than --memory.
    """
    screen.note("reading nnU-Net")
    from medsilo_lab.nnunet_planning import make_plans, unsure_keys
    from medsilo_nnunet.fingerprint import Fingerprint
    from medsilo_nnunet.question import read_question

    asked = read_question(question)
    sites: dict[str, MeasuredSite] = {}
    for path in sent:
        if path.stem in sites:
            raise MedsiloError("two files belong to the same hospital; give each file once")
        sites[path.stem] = _read(path, asked)
    told = [site.fingerprint for site in sites.values()]
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


def _read(path: Path, question: "SegmentationQuestion") -> "MeasuredSite":
    import json

    from medsilo_nnunet.fingerprint import MeasuredSite

    try:
        sent = MeasuredSite.received(json.loads(files.read_bounded(path, LARGEST)))
        sent.check(question)
        return sent
    except Refused as error:
        raise MedsiloError(f"{path.name}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        told = f"{path.name} can't be read ({type(error).__name__}); give a file that medsilo nnunet measure wrote"
        raise MedsiloError(told) from error


PLAN = Command(plan, "question.yaml st-anna.json north.json -o plans.json", PEOPLE, OF)
