"""Say what lies in a folder, what suits it, and what to do next: the first looker that knows the folder does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import DataError
from medsilo.registry import LOOKERS
from medsilo.site.settings import FILE_NAME
from medsilo.start.choices import Draft, choose, ranges
from medsilo.start.fitting import Machine
from medsilo.start.folder_layout import layout_of_folder
from medsilo.start.looks import Looks, look_at
from medsilo.start.writing import JOB, in_yaml, place_of


@dataclass(frozen=True)
class Sight:
    """Findings, one sentence a line, and the choices that follow.

    >>> Sight(["40 photographs"], several=False, choices=None).found
    ['40 photographs']
    """

    found: list[str]
    several: bool  # whether the folder has several hospitals
    choices: Draft


@dataclass(frozen=True)
class Folder:
    """A folder that `medsilo init` is to look at.

    >>> from pathlib import Path
    >>> Folder(Path("/data/kidney"), "st-anna", lambda: None, "cpu").site
    'st-anna'
    """

    path: Path
    site: str  # this hospital's name, where the folder is one hospital's
    machine: Callable[[], Machine]
    device: str | None  # one that was asked for


@dataclass(frozen=True)
class Looker:
    """Knows one kind of folder. It is an entry point `medsilo.lookers`; that of images is asked last.

    >>> from medsilo.extend import Looker
    >>> Looker(lambda folder: None).look(None) is None
    True
    """

    look: Callable[[Folder], Sight | None]  # opens some files and chooses; None for a folder of another kind


def first_sight(folder: Folder) -> Sight:
    """Open some of a folder's files, and choose."""
    for name in sorted(LOOKERS, key=lambda name: name == "images"):
        looker: Looker = LOOKERS[name]
        if (sight := looker.look(folder)) is not None:
            return sight
    raise DataError("no plug-in knows this folder; install medsilo again, whose own looker of images is missing")


def found_lines(looks: Looks) -> list[str]:
    """Return what was found, one sentence a line."""
    kind, unit = ("flat images", "pixels") if looks.flat else ("volumes", "voxels")
    task = "segmentation" if looks.segments else "classification"
    cases, patients = sum(looks.cases.values()), sum(looks.patients.values())
    lines = [f"{task}: {cases} {kind} of {patients} patients ({looks.layout.kind})"]
    if looks.layout.hospitals:
        told = ", ".join(f"{site} {count}" for site, count in looks.cases.items())
        lines.append(f"{len(looks.layout.hospitals)} hospitals, each a folder: {told}")
    sizes = ranges([look.size for look in looks.looked])
    spacing = "" if looks.flat else f", {ranges([look.spacing for look in looks.looked])} mm apart"
    lines.append(f"{len(looks.looked)} {kind} were opened: {sizes} {unit}{spacing}")
    lines += [f"left out: {what} ({count})" for what, count in looks.left_out.items()]
    if looks.layout.unused:
        lines.append(f"not looked at: {', '.join(looks.layout.unused)}")
    return lines


def look(folder: Folder) -> Sight:
    """Say what suits a folder of images; a DataError says what is missing in it."""
    looks = look_at(folder.path, layout_of_folder(folder.path))
    choices = choose(looks, looks.layout.hospitals or (folder.site,), folder.machine(), folder.device)
    return Sight(found_lines(looks), bool(looks.layout.hospitals), choices)


LOOKER = Looker(look)

SHOWN = (
    "task.signals",
    "task.rate",
    "task.window",
    "task.size",
    "task.target_spacing",
    "task.intensity",
    "network.name",
    "training.batch_size",
    "data.patient",
)


def shown_lines(choices: Draft) -> list[str]:
    """Return the choices that people ask about first, one line each."""
    own = [choice for choice in (*choices.plan, *choices.settings) if choice.key in SHOWN]
    return [f"{choice.key}: {in_yaml(choice.value)}  ({choice.why})" for choice in own]


def rows(choices: Draft) -> list[tuple[str, str, str, str]]:
    """Return the choices as file, key, value and reason."""
    files = [(f"{JOB}/app/config/plan.yaml", choices.plan), (FILE_NAME, choices.settings)]
    files += [(f"{site}/{FILE_NAME}", own) for site, own in choices.sites.items()]
    return [(file, choice.key, in_yaml(choice.value), choice.why) for file, own in files for choice in own]


def advice(several: bool, out: Path, stopped: Sequence[str]) -> list[tuple[str, str]]:
    """Return what to do next: what for, and the command, if there is one.

    several: whether the folder has all hospitals; stopped: those of which the check found what stops the study.
    """
    job = out / JOB
    given = f"--settings {out}"
    steps = [(f"read the reasons in {out / FILE_NAME} and {job}/app/config/plan.yaml, and correct what is wrong", "")]
    if stopped:
        command = f"medsilo check {job} --settings {place_of(out, stopped[0])} --site {stopped[0]}"
        return [(f"settle what the check found at {', '.join(stopped)}, then check again:", command), *steps]
    counted = f"medsilo statistics {job} {given} -o {out / 'cases'}"
    if several:
        steps.append(("how many patients each hospital has of each class, and how many an interval needs:", counted))
        command = f"medsilo compare --plan {job} --methods local,fedavg --minutes 60 {given} --engine inprocess"
        return [*steps, ("does joining pay for these hospitals?", command)]
    return [
        *steps,
        ("train on this machine alone:", f"medsilo run {job} --set algorithm.name=local {given} --engine inprocess"),
        (f"with others: send {job} to the consortium's lead, and put {out / FILE_NAME} into your kit's local/", ""),
    ]
